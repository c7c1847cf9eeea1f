"""Curves of secret orders: how epsilon and delta follow from those of one pair, and the noise from them."""

import json
import math
from typing import Any

import numpy as np
import pytest

import anyorder as ao
from anyorder.accounting import Gaussian, gdp_delta, gdp_epsilon
from anyorder.accounting.amplification import bound, claims
from anyorder.accounting.amplification.bins import bins_delta, bins_epsilon
from anyorder.accounting.amplification.bound import calibrate_amplified
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.amplification.exact import pld_delta, pld_epsilon
from anyorder.accounting.amplification.methods import Deterministic, MonteCarlo, Pld
from anyorder.accounting.amplification.mixture import bins_gram
from anyorder.accounting.amplification.monte_carlo import TRIES
from anyorder.accounting.curves import sampled_curve
from anyorder.errors import AnyorderError, ArgumentError, CertificateError
from anyorder.participation import BallsInBins, CyclicPoisson, MinSeparationSampling, RandomAllocation, TruncatedPoisson
from anyorder.plan.plan import Plan, check_claims
from anyorder.plan.planner import with_budget
from anyorder.strategy import BLT, Banded, Independent, ToeplitzBanded
from anyorder.strategy.registry import rounding
from anyorder.strategy.restarted_blt import RestartedBLT
from anyorder.workload import Workload

BUFFERS = BLT([0.9], [0.2], 8)
BINS = BallsInBins(4, 2)


def pair(epsilon: float) -> float:
    return 1e-3 * math.exp(-1.5 * epsilon)


def test_replace_one_takes_half_of_epsilon_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "pair_delta", lambda C, rule, sigma, epsilon, method, told: pair(epsilon))
    two = Amplified(BUFFERS, BINS, 0.1 + 1e-9, neighbours="replace-one")
    for epsilon in (0.0, 0.5, 3.0):
        exact = pair(epsilon / 2) * (1 + math.exp(epsilon / 2))
        assert exact < two.delta(epsilon) < exact * (1 + 1e-12)
    found = two.epsilon(1e-5)
    assert two.delta(found) <= 1e-5 < two.delta(found * (1 - 1e-5))


def test_never_above_known_batches_whatever_the_method_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "pair_delta", lambda *_: 1.0)
    monkeypatch.setattr(claims, "pair_epsilon", lambda *_: math.inf)
    for neighbours, factor in (("zero-out", 1), ("add-or-remove", 1), ("replace-one", 2)):
        one = Amplified(BUFFERS, BINS, 1.0 + 1e-9, neighbours=neighbours)
        sens = ao.sensitivity(BUFFERS, ao.participation.FixedOrder(8, 4, 2)).value
        known = Gaussian(factor * sens / one.noise_multiplier)
        assert one.epsilon(1e-5) == pytest.approx(known.epsilon(1e-5), rel=1e-12)
        assert one.delta(1.0) == pytest.approx(known.delta(1.0), rel=1e-12)
        assert one.known_mu > factor * sens / one.noise_multiplier
    monkeypatch.setattr(claims, "pair_delta", lambda *_: 1e-9)
    monkeypatch.setattr(claims, "pair_epsilon", lambda *_: 0.25)
    quiet = Amplified(BUFFERS, BINS, 1.0 + 2e-9)
    assert (quiet.epsilon(1e-5), quiet.delta(1.0)) == (0.25, 1e-9)


def test_separation_has_no_bound_but_that_of_known_batches() -> None:
    banded, rule = ToeplitzBanded([1.0, 0.5], 8), MinSeparationSampling(8, 2, 0.2)
    assert claims.pair_epsilon(banded, rule, 1.0, 1e-5, Deterministic(), None) == math.inf
    assert claims.pair_delta(banded, rule, 1.0, 1.0, Deterministic(), None) == 1.0


def test_a_claim_is_that_of_its_own_pair_at_its_own_noise() -> None:
    gram, sigma = bins_gram(BUFFERS, BINS), 1.5 + 3e-9
    one = Amplified(BUFFERS, BINS, sigma)
    assert one.epsilon(1e-5) == bins_epsilon(gram, sigma, 1e-5) < 0.999 * Gaussian(one.known_mu).epsilon(1e-5)
    assert one.delta(1.0) == bins_delta(gram, sigma, 1.0) < 0.99 * Gaussian(one.known_mu).delta(1.0)
    exact = Amplified(Independent(8), BINS, sigma, Pld())
    assert exact.epsilon(1e-5) == pld_epsilon(Independent(8), BINS, sigma, 1e-5)
    assert exact.delta(1.0) == pld_delta(Independent(8), BINS, sigma, 1.0)


def restarted(*scales: float) -> RestartedBLT:
    k = len(scales)
    return RestartedBLT(k * [[0.9]], [[x] for x in scales], k * [0.5], k * [1.0], 2 * k, 2)


def test_epochs_of_their_own_compose() -> None:
    pytest.importorskip("dp_accounting")
    loud = claims.pair_delta(restarted(0.05, 0.9), RandomAllocation(2, 2), 1.0, 1.0, Deterministic(), None)
    one = claims.pair_delta(restarted(0.9), BallsInBins(1, 2), 1.0, 1.0, Deterministic(), None)
    twice = claims.pair_delta(restarted(0.9, 0.9), RandomAllocation(2, 2), 1.0, 1.0, Deterministic(), None)
    assert one * 1.01 < loud < twice
    less = claims.pair_delta(restarted(0.9, 0.9), RandomAllocation(2, 2), 2.0, 1.0, Deterministic(), None)
    assert less < twice  # and what is kept of one sigma is not taken for another


def test_two_ways_to_account_for_epochs_agree() -> None:
    pytest.importorskip("dp_accounting")
    C, rule = Independent(12), RandomAllocation(3, 4)
    exact = claims.pair_epsilon(C, rule, 1.0, 1e-5, Pld(), None)
    assert exact * (1 - 2e-3) < claims.pair_epsilon(C, rule, 1.0, 1e-5, Deterministic(), None) < exact * 1.1
    assert claims.pair_epsilon(C, rule, 1.0, 1e-14, Deterministic(), None) == math.inf  # of what transforms may lose
    assert claims.pair_delta(C, rule, 1.0, 500.0, Deterministic(), None) >= 2.0**-48


def test_a_curve_comes_back_from_its_file_and_refuses_what_it_is_not_for() -> None:
    for one in (
        Amplified(BUFFERS, BINS, 1 / 3, unit="user"),
        Amplified(BUFFERS, BINS, 1 / 3, MonteCarlo(3000, 1e-8, 7), neighbours="add-or-remove"),
        Amplified(Independent(8), BINS, 1 / 3, Pld(), neighbours="replace-one"),
    ):
        assert Amplified.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    truncated = TruncatedPoisson(8, 0.2, 5, 40)
    for wrong, why in (
        (lambda: Amplified(BUFFERS, BINS, 1.0, MonteCarlo(), neighbours="replace-one"), "one delta only"),
        (lambda: Amplified(Independent(8), truncated, 1.0, Pld(), neighbours="add-or-remove"), "zero-out neighbours"),
        (lambda: Amplified(BUFFERS, truncated, 1.0, Pld()), "take cycle"),
        (lambda: Amplified(BUFFERS, BINS, 1.0, Pld()), "columns do not overlap"),
        (lambda: Amplified(BUFFERS, BINS, 1.0, neighbours="all"), "neighbours"),
        (lambda: Amplified(BUFFERS, BINS, 1.0, unit=""), "unit"),
        (lambda: Amplified(BUFFERS, BINS, 0.0), "noise_multiplier"),
    ):
        with pytest.raises(AnyorderError, match=why):
            wrong()


def test_the_own_method_of_an_order_is_the_tightest_that_is_known() -> None:
    for rule in (BINS, RandomAllocation(4, 2)):
        assert claims.default_method(Independent(8), rule) == Pld()
    two = ToeplitzBanded([1.0, 0.5], 8)
    assert claims.default_method(two, BINS) == Deterministic()
    with pytest.raises(AnyorderError, match="columns do not overlap"):
        claims.check_method_fits(Pld(), two, BINS)


def test_fresh_samples_are_of_the_salt_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(claims, "mc_interval", lambda *given: asked.append(given))
    one = Amplified(BUFFERS, BINS, 1.5, MonteCarlo(3000, 1e-8, 7))
    claims.fresh_interval(one, 1e-5, 99)
    assert asked[0][:5] == (BUFFERS, BINS, 1.5, 1e-5, MonteCarlo(3000, None, 99))
    assert claims.fresh_interval(Amplified(BUFFERS, BINS, 1.5), 1e-5, 99) is None


def test_who_watches_is_told_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(claims, "pair_epsilon", lambda *given: told.append(given[-1]) or 0.1)
    bar = lambda done, total: None  # noqa: E731
    with claims.watched(bar):
        Amplified(BUFFERS, BINS, 1.5 + 1e-9).epsilon(1e-5)
    Amplified(BUFFERS, BINS, 1.5 + 2e-9).epsilon(1e-5)
    assert told == [bar, None]


# -- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_noise_by_samples_is_one_that_was_seen_to_hold(seed: int) -> None:
    """Of numbers that jump by half a per cent from sigma to sigma, the least sigma that held."""
    rng, seen = np.random.default_rng(seed), {}

    class Jumping:
        def __init__(self, log_sigma: float) -> None:
            self.at = log_sigma

        def epsilon(self, delta: float) -> float:
            value = seen.setdefault(self.at, 2 * math.exp(-1.5 * self.at) * (1 + 0.005 * rng.uniform(-1, 1)))
            return float(value)

    found = bound._by_samples(Jumping, 2.0, 1e-5, 0.6)  # type: ignore[arg-type]
    assert seen[found] <= 2.0
    assert found == min(at for at, value in seen.items() if value <= 2.0)
    assert abs(found) < 0.02


def test_a_search_for_noise_looks_no_oftener_than_samples_are_paid_for() -> None:
    """Each look is at samples of its own, of which the best may be chosen: the claim holds for the best of TRIES."""
    looks: list[float] = []

    class Wild:
        def __init__(self, log_sigma: float) -> None:
            looks.append(log_sigma)

        def epsilon(self, delta: float) -> float:
            return 2.0  # never enough

    with pytest.raises(ArgumentError, match="samples must be more"):
        bound._by_samples(Wild, 1.0, 1e-5, 0.6)  # type: ignore[arg-type]
    assert len(set(looks)) == len(looks) <= TRIES // 16  # some strategies and orders side by side are paid for too


def test_noise_is_for_the_neighbours_and_the_method_that_are_claimed() -> None:
    one = calibrate_amplified(BUFFERS, BINS, 2.0, 1e-5, neighbours="replace-one")
    assert Amplified(BUFFERS, BINS, one, neighbours="replace-one").epsilon(1e-5) <= 2.0
    plan = ao.plan(order=BINS, mechanism=BUFFERS, neighbours="replace-one", epsilon=2.0, delta=1e-5, batch_size=4)
    assert plan.neighbours == "replace-one"
    assert 1.999 < plan.epsilon <= 2.0 < 1.0001 * plan.known_epsilon  # type: ignore[operator]
    less = with_budget(plan, epsilon=1.0)
    assert 0.999 < less.epsilon <= 1.0
    sens = ao.sensitivity(BUFFERS, ao.participation.FixedOrder(8, 4, 2)).value
    assert plan.known_epsilon == pytest.approx(Gaussian(2 * sens / plan.sigma).epsilon(1e-5), rel=1e-9)


def test_a_search_without_secants_ends_where_epsilon_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root is found on either side of itself; what is returned must be on the one that holds."""
    monkeypatch.setattr(bound, "just_below", lambda *_, **__: None)
    monkeypatch.setattr(claims, "pair_delta", lambda C, rule, sigma, *rest: gdp_delta(0.5 / sigma, rest[0]))
    monkeypatch.setattr(claims, "pair_epsilon", lambda C, rule, sigma, *rest: gdp_epsilon(0.5 / sigma, rest[0]))
    for epsilon in np.linspace(0.5, 4.0, 15):
        sigma = calibrate_amplified(BUFFERS, BINS, epsilon, 1e-5)
        assert epsilon * (1 - 1e-3) <= gdp_epsilon(0.5 / sigma, 1e-5) <= epsilon


def test_noise_is_found_by_the_method_of_the_plan() -> None:
    plan = ao.plan(
        order=ao.order(BINS, method="bound"), mechanism=Independent(8), epsilon=2.0, delta=1e-5, batch_size=4
    )
    assert plan.method == Deterministic()
    assert 1.999 < plan.epsilon <= 2.0


def test_the_multiplier_that_is_asked_for_is_that_of_the_noise() -> None:
    plan = ao.plan(order=BINS, mechanism=BUFFERS, noise_multiplier=1.25, delta=1e-5, batch_size=4)
    assert rounding(BUFFERS, BINS) > 1e-9
    assert plan.noise_multiplier == pytest.approx(1.25, rel=1e-12)


def test_cyclic_sampling_counts_visits_up_and_takes_the_largest_column() -> None:
    bands = np.ones((2, 10))
    bands[0, 3], bands[1, 9] = 3.0, 0.0
    uneven = Banded(bands)
    rule = CyclicPoisson(10, 4, 0.1)
    found = sampled_curve(uneven, rule, 1.0)
    assert found.n == 3
    largest = math.sqrt(float(np.square(uneven.matrix()).sum(axis=0).max()))
    assert 1 - 1e-12 < found.sigma * largest < 1
    plan = ao.plan(order=rule, mechanism=uneven, epsilon=1.0, delta=1e-5, batch_size=4)
    assert 0.99 < plan.epsilon <= 1.0


# -- files -----------------------------------------------------------------------------------------------------------


def test_only_what_is_replayed_has_the_latitude_of_a_replay() -> None:
    def made(method: Any) -> Plan:
        return Plan(
            participation=BINS, strategy=Independent(8), workload=Workload(8), clip_norm=1.0, sigma=1.5, delta=1e-5,
            batch_size=4, neighbours="add-or-remove", method=method,
        )  # fmt: skip

    sampled, exact = made(MonteCarlo(1000)), made(Deterministic())
    near = {"epsilon": sampled.epsilon * (1 + 5e-6)}
    check_claims(sampled, sampled.claims() | near)
    for plan, name, factor in (
        (sampled, "epsilon", 1 - 2e-5), (sampled, "known_epsilon", 1 - 1e-6), (sampled, "noise_std", 1 - 1e-6),
        (exact, "epsilon", 1 - 1e-6),
    ):  # fmt: skip
        with pytest.raises(CertificateError, match=name):
            check_claims(plan, plan.claims() | {name: plan.claims()[name] * factor})
    assert sampled.digest != exact.digest != made(MonteCarlo(1000, salt=1)).digest != sampled.digest


def test_an_epsilon_that_known_batches_decide_has_no_latitude_although_samples_were_asked_for() -> None:
    """Coins that always fall, from the first step on: the claim is exact, and a hair less is not true."""
    plan = Plan(
        participation=MinSeparationSampling(8, 4, 1.0, warm_start=False), strategy=Independent(8), workload=Workload(8),
        clip_norm=1.0, sigma=1.5, delta=1e-5, batch_size=4, neighbours="add-or-remove", method=MonteCarlo(1000),
    )  # fmt: skip
    assert plan.epsilon == plan.known_epsilon
    check_claims(plan, plan.claims())
    for factor in (1 - 9e-6, 1 - 1e-8):
        with pytest.raises(CertificateError, match="epsilon"):
            check_claims(plan, plan.claims() | {"epsilon": plan.epsilon * factor})
