"""Samples for sampling with separation: their law, their bounds, and claims that keep to the truth."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accounting.amplification import oracle
from anyorder.accounting.amplification import monte_carlo
from anyorder.accounting.amplification import monte_carlo as monte_carlo_separated
from anyorder.accounting.amplification.mixture import bins_gram
from anyorder.accounting.amplification.monte_carlo import (
    Bins,
    BinsTerms,
    MonteCarlo,
    SeparatedTerms,
    Shape,
    mc_delta,
    mc_epsilon,
    mc_interval,
    separated_band,
)
from anyorder.accounting.curves import sampled_curve
from anyorder.errors import PlanError
from anyorder.noise import NoiseSource
from anyorder.participation import BallsInBins, MinSeparationSampling, PoissonSampling, RandomAllocation
from anyorder.strategy import Banded, Independent, Strategy, ToeplitzBanded

VALUES = json.loads((Path(__file__).parents[2] / "refs" / "jax_privacy.json").read_text())["values"]
REFERENCES = {one["id"]: one["value"] for one in VALUES}

CASES: dict[str, tuple[Strategy, MinSeparationSampling, float]] = {
    "warm": (ToeplitzBanded([1.0, -0.6, 0.3], 6), MinSeparationSampling(6, 3, 0.4), 1.0),
    "cold": (ToeplitzBanded([1.0, 0.6], 5), MinSeparationSampling(5, 2, 0.3, warm_start=False), 0.8),
    "bins": (ToeplitzBanded([1.0, 0.6], 5), MinSeparationSampling(5, 3, 1.0), 1.2),
    "short": (ToeplitzBanded([1.0, 0.6], 3), MinSeparationSampling(3, 5, 0.5), 1.0),
    "gentle": (ToeplitzBanded([1.0, 0.6], 5), MinSeparationSampling(5, 2, 0.2), 3.0),
}
SHAPES = [Shape(2), Shape(2, (1.5, 2.0), 0.4), None]
GENTLE = [Shape(4), Shape(5, (1.5, 4.0), 0.2)]


@functools.cache
def brute_force(case: str, epsilon: float) -> oracle.Deltas:
    strategy, rule, sigma = CASES[case]
    with np.errstate(over="ignore"):
        return oracle.scheme_deltas(strategy.matrix(), rule, sigma, epsilon, step=0.5)


def silent(count: int) -> None:
    pass


def sampler(strategy: Strategy, rule: MinSeparationSampling, sigma: float) -> SeparatedTerms:
    return SeparatedTerms(separated_band(strategy, rule) / sigma**2, rule)


def terms(case: str, shape: Shape | None, samples: int) -> BinsTerms:
    found, source = sampler(*CASES[case]), NoiseSource(bytes(32))
    return found.add(source, samples, 0.7, silent) if shape is None else found.remove(source, samples, shape, silent)


@pytest.mark.parametrize("case", CASES)
def test_the_recursion_sums_every_set_of_steps(case: str) -> None:
    strategy, rule, sigma = CASES[case]
    (law,), found = oracle.laws(rule), sampler(*CASES[case])
    exponents = np.random.default_rng(0).normal(size=(rule.n, 7)) * 3
    truth = sum(weight * np.exp(exponents[list(steps)].sum(axis=0)) for weight, steps in law)
    np.testing.assert_allclose(np.exp(found._log_total(exponents)), truth, rtol=1e-12)
    far = found._log_total(exponents * 400)  # by logarithms
    each = [math.log(weight) + 400 * exponents[list(steps)].sum(axis=0) for weight, steps in law]
    np.testing.assert_allclose(far, np.logaddexp.reduce(each), rtol=1e-12)
    chances = np.zeros(rule.n)
    for weight, steps in law:
        chances[list(steps)] += weight
    np.testing.assert_allclose(found._chances, chances, rtol=1e-12)
    gram = np.abs(strategy.matrix()).T @ np.abs(strategy.matrix()) / sigma**2
    np.testing.assert_allclose(found._gram @ np.eye(rule.n), gram, rtol=0, atol=1e-9)
    squares = [weight * gram[np.ix_(steps, steps)].sum() for weight, steps in law]
    assert found._half == pytest.approx(sum(squares) / 2, rel=1e-9)  # what bounds terms of Q against P
    assert found._square == pytest.approx(chances @ gram @ chances, rel=1e-9)
    root = found._root @ np.eye(rule.n)
    np.testing.assert_allclose(root @ root.T, gram, rtol=0, atol=1e-9)
    for scale in (1.0, 400.0):  # the second by logarithms
        tilts = scale * np.arange(rule.n)[:, None] / 10
        drawn = found._draw(found._tilted(tilts), np.random.default_rng(1).random((rule.n + 1, 40_000)))
        weights = np.array([math.log(weight) + tilts[list(steps)].sum() for weight, steps in law])
        weights = np.exp(weights - weights.max())
        for weight, (_, steps) in zip(weights / weights.sum(), law, strict=True):
            same = (drawn == np.isin(np.arange(rule.n), steps)[:, None]).all(axis=0).mean()
            assert abs(same - weight) < 4.5 * math.sqrt(weight * (1 - weight) / 40_000) + 1e-12


@pytest.mark.parametrize(
    ("case", "shape"),
    [(case, shape) for case in CASES if case != "bins" for shape in SHAPES] + [("gentle", one) for one in GENTLE],
)
def test_terms_are_unbiased_and_bounded_in_both_directions(case: str, shape: Shape | None) -> None:
    found = terms(case, shape, 40_000)
    for epsilon in (0.1, 0.5):
        delta = brute_force(case, epsilon)[shape is None]
        X = np.exp(monte_carlo._log_terms(found, epsilon))
        error = X.std() / math.sqrt(len(X))
        assert abs(X.mean() - delta) < 4.5 * error + 1e-6
        assert error < (0.2 if case == "gentle" else 0.04) * delta
        assert X.max() <= monte_carlo._cap(found, epsilon) * (1 + 1e-9)


def test_weights_of_copies_keep_their_bound() -> None:
    """Against every set of steps in every copy: what a few samples may miss."""
    for strategy, rule, sigma in CASES.values():
        found, (law,) = sampler(strategy, rule, sigma), oracle.laws(rule)
        steps = np.array([np.isin(np.arange(rule.n), one) for _, one in law], dtype=float).T
        for t in (2, 3):
            phi, bound = found._tilts(t)
            worst = float(found._tilted(np.full((rule.n, 1), phi[0])).log_total[0]) - phi[0] * steps.sum(axis=0)
            before = found._gram @ steps
            if t == 3:
                second = found._tilted(before + phi[1]).log_total
                worst = (worst + second)[:, None] - phi[1] * steps.sum(axis=0)
                before = (before[:, :, None] + before[:, None, :]).reshape(rule.n, -1)
            last = found._tilted(before + phi[-1]).log_total
            assert (worst.ravel() + last).max() <= bound + 1e-9


BETWEEN = np.eye(7)  # a column that is near both of two that do not meet
BETWEEN[2, 0], BETWEEN[3, 1:3], BETWEEN[4, 2] = 20.0, 20.0, 20.0
BETWEEN /= np.linalg.norm(BETWEEN, axis=0)


@pytest.mark.parametrize(
    ("C", "rule"),
    [
        (Banded(BETWEEN), MinSeparationSampling(7, 3, 0.9)),
        (ToeplitzBanded([1.0, 0.8, 0.7], 10), MinSeparationSampling(10, 3, 1e-3, warm_start=False)),
        (ToeplitzBanded([1.0, 0.0, 0.0, 0.9], 14), MinSeparationSampling(14, 4, 1e-3, warm_start=False)),
        (ToeplitzBanded([1.0, 0.3, 0.2], 8), MinSeparationSampling(8, 3, 1.0)),
    ],
)
def test_what_earlier_copies_add_is_bounded_by_their_steps(C: Strategy, rule: MinSeparationSampling) -> None:
    """The rho of the proof: log E exp(tau <m_S, m_R>) - kappa <= rho |R|, for every R, under every tilt of S."""
    found, (law,) = sampler(C, rule, 1.0), oracle.laws(rule)
    every = np.array([np.isin(np.arange(rule.n), one) for _, one in law], dtype=float).T
    for tilt in (0.0, 0.5):
        plain = found._tilted(np.full((rule.n, 1), tilt))
        for tau in (1, 2, 4, 12):
            rho = found._rho(float(plain.chances.max()), tau)
            added = found._tilted(tau * (found._gram @ every) + tilt).log_total - plain.log_total
            assert (added <= rho * every.sum(axis=0) + 1e-9).all()


def test_the_band_is_that_of_all_columns_whatever_the_blocks() -> None:
    """Blocks of 64 columns, or of a reach; an entry that one of them lost would make the claim too small."""
    for bands, n in ((3, 140), (70, 150), (1, 70)):
        C = ToeplitzBanded(0.97 ** np.arange(bands), n)
        rule = MinSeparationSampling(n, bands + 1, 0.1)
        band, gram = separated_band(C, rule), C.matrix().T @ C.matrix()
        for distance in range(bands):
            np.testing.assert_allclose(band[distance, : n - distance], gram.diagonal(distance), rtol=1e-12)
        assert band.shape == (bands, n)
        assert (band >= 0).all()
        whole = SeparatedTerms(band, rule)
        np.testing.assert_allclose(whole._gram @ np.eye(n), gram, rtol=0, atol=1e-8)
        np.testing.assert_allclose(np.diag(whole._root @ (whole._root @ np.eye(n)).T), gram.diagonal(), rtol=1e-8)


def test_the_largest_entries_count_where_columns_differ() -> None:
    """The last columns are cut off; those that are not decide what bounds the weights."""
    C = ToeplitzBanded([1.0, 0.9, 0.8], 6)
    gram = C.matrix().T @ C.matrix()
    found = sampler(C, MinSeparationSampling(6, 3, 0.4), 1.0)
    np.testing.assert_allclose(found._largest, [gram.diagonal(d).max() for d in range(3)], rtol=1e-9)


def test_sums_that_are_too_small_for_a_float_are_found_by_logarithms() -> None:
    strategy, rule, sigma = CASES["bins"]  # a coin that always falls: no set of steps without a factor
    exponents = np.full((rule.n, 3), -400.0)
    (law,), found = oracle.laws(rule), sampler(strategy, rule, sigma)
    each = [math.log(weight) - 400.0 * len(steps) for weight, steps in law]
    np.testing.assert_allclose(found._log_total(exponents), np.logaddexp.reduce(each), rtol=1e-12)
    assert np.isfinite(found._tilted(exponents).chances).all()


def test_what_is_drawn_for_one_purpose_is_drawn_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms must be independent: no uniform number serves two samples, or two copies of one."""
    rows: list[int] = []
    drawn = monte_carlo_separated.uniforms
    monkeypatch.setattr(
        monte_carlo_separated, "uniforms", lambda source, row, *of: rows.append(row) or drawn(source, row, *of)
    )
    terms("warm", Shape(3, (1.5, 2.0), 0.4), 400)
    assert sorted(rows) == [1, 2, 3, 4]


def test_no_constant_of_a_pilot_raises_a_term_above_its_bound() -> None:
    found = terms("gentle", Shape(3, (1.5, 4.0), 50.0), 20_000)
    assert found.cap == terms("gentle", Shape(3, (1.5, 4.0), 0.2), 4).cap
    for epsilon in (0.0, 0.5):
        assert monte_carlo._log_terms(found, epsilon).max() <= monte_carlo._log_cap(found, epsilon) + 1e-9


@pytest.mark.parametrize("case", ["warm", "cold"])
def test_claims_are_above_brute_force_and_near(case: str) -> None:
    strategy, rule, sigma = CASES[case]
    settings = MonteCarlo(30_000)
    truth = brute_force(case, 0.5).worst
    assert truth < mc_delta(strategy, rule, sigma, 0.5, settings) < 1.12 * truth
    epsilon = mc_epsilon(strategy, rule, sigma, 1e-2, settings)
    assert 0.75e-2 < brute_force(case, epsilon).worst < 1e-2
    interval = mc_interval(strategy, rule, sigma, 1e-2, settings)
    assert brute_force(case, interval.upper).worst < 1e-2 < brute_force(case, interval.lower).worst


def test_without_separation_it_is_poisson_sampling() -> None:
    probability = 0.3
    rule = MinSeparationSampling(20, 1, probability)
    truth = sampled_curve(Independent(20), PoissonSampling(20, probability), 1.0).epsilon(1e-5)
    interval = mc_interval(Independent(20), rule, 1.0, 1e-5, MonteCarlo(20_000))
    assert interval.lower < truth < interval.upper < 1.06 * truth
    assert truth < mc_epsilon(Independent(20), rule, 1.0, 1e-5, MonteCarlo(20_000)) < 1.08 * truth


def test_with_a_sure_coin_and_a_warm_start_it_is_balls_in_bins() -> None:
    strategy, rule, bins = ToeplitzBanded([1.0, 0.5, 0.2], 12), MinSeparationSampling(12, 4, 1.0), BallsInBins(3, 4)
    found, other = sampler(strategy, rule, 1.5), Bins(bins_gram(strategy, bins) / 2.25)
    u = np.random.default_rng(0).normal(size=(12, 5))
    in_bins = u.reshape(3, 4, 5).sum(axis=0).T
    r = u - found._diagonal[:, None] / 2
    np.testing.assert_allclose(found._log_total(r), other._loss(in_bins), rtol=0, atol=1e-8)
    ours = mc_interval(strategy, rule, 1.5, 1e-3, MonteCarlo(40_000))
    theirs = mc_interval(strategy, bins, 1.5, 1e-3, MonteCarlo(40_000))
    assert max(ours.lower, theirs.lower) < min(ours.upper, theirs.upper)
    assert ours.upper < 1.3 * theirs.lower


def unit(*coefficients: float) -> Any:
    return np.array(coefficients) / np.linalg.norm(coefficients)


DECAY = ToeplitzBanded(unit(1, 0.5, 0.25, 0.125).tolist(), 100)
ROOT8 = np.cumprod([1.0, *((2 * i - 1) / (2 * i) for i in range(1, 8))]).tolist()


@pytest.mark.parametrize(
    ("name", "strategy", "rule", "sigma"),
    [
        ("warm_p0.2_n100_b10_nm1.0", DECAY, MinSeparationSampling(100, 10, 0.2), 1.0),
        ("cold_p0.2_n100_b10_nm1.0", DECAY, MinSeparationSampling(100, 10, 0.2, False), 1.0),
        ("warm_p0.2_n100_b10_nm3.0", DECAY, MinSeparationSampling(100, 10, 0.2), 3.0),
        ("cold_p0.2_n100_b10_nm3.0", DECAY, MinSeparationSampling(100, 10, 0.2, False), 3.0),
        ("warm_p0.3_n40_b8_nm2.0_root8", ToeplitzBanded(ROOT8, 40), MinSeparationSampling(40, 8, 0.3), 2.0),
    ],
)
def test_published_losses_of_others(
    name: str, strategy: ToeplitzBanded, rule: MinSeparationSampling, sigma: float
) -> None:
    """Theirs takes the norms of the last columns, which the end cuts off, in the reverse order: so does this test."""
    found, (norms, bands) = sampler(strategy, rule, sigma), (np.zeros(rule.n), strategy.num_bands)
    y = 2 * np.sin(1 + np.arange(rule.n))
    norms[:] = found._diagonal
    norms[rule.n - bands + 1 :] = norms[: rule.n - bands : -1]
    r = (strategy.matrix().T @ y / sigma**2 - norms / 2)[:, None]
    assert found._log_total(r)[0] == pytest.approx(REFERENCES[f"bminsep_loss_{name}"], abs=1e-7)


@pytest.mark.parametrize(
    ("name", "rule", "sigma"),
    [
        ("warm_p0.2_n100_b10_nm2.0_eps1", MinSeparationSampling(100, 10, 0.2), 2.0),
        ("cold_p0.2_n100_b10_nm2.0_eps1", MinSeparationSampling(100, 10, 0.2, False), 2.0),
    ],
)
def test_published_samples_of_others(name: str, rule: MinSeparationSampling, sigma: float) -> None:
    theirs = REFERENCES[f"bminsep_delta_{name}"]
    found, source = sampler(DECAY, rule, sigma), NoiseSource(bytes(32))
    for side in ("remove", "add"):
        with_unit = side == "remove"
        made = found.remove(source, 20_000, Shape(2), silent) if with_unit else found.add(source, 20_000, 0.0, silent)
        X = np.exp(monte_carlo._log_terms(made, 1.0))
        error = math.hypot(X.std() / math.sqrt(len(X)), theirs[side]["stderr"])
        assert abs(X.mean() - theirs[side]["delta"]) < 4 * error
    claim = mc_delta(DECAY, rule, sigma, 1.0, MonteCarlo(20_000))
    worst = max((theirs["remove"], theirs["add"]), key=lambda one: one["delta"])
    assert worst["delta"] - 4 * worst["stderr"] < claim < 1.25 * worst["delta"] + 1e-4


def test_the_limit_is_below_the_truth_as_rarely_as_it_says() -> None:
    """1000 limits of 80 terms at failure 0.05."""
    for shape in (SHAPES[1], None):
        delta = brute_force("warm", 0.7)[shape is None]
        found = terms("warm", shape, 80_000)
        X = np.exp(monte_carlo._log_terms(found, 0.7)).reshape(1000, 80)
        bet = 0.9 * min(1 / monte_carlo._cap(found, 0.7), math.sqrt(6 / 80) / X.std())
        below = (np.log1p(bet * (delta - X)).sum(axis=1) >= math.log(20)).mean()
        assert below < 0.05


def test_the_same_again_whatever_the_chunks_and_other_samples_for_another_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, rule, sigma = CASES["warm"]
    whole, added = terms("warm", SHAPES[1], 5000), terms("warm", None, 5000)
    first = mc_epsilon(strategy, rule, sigma, 1e-3, MonteCarlo(3000))
    monkeypatch.setattr(monte_carlo_separated, "_SEPARATED_ELEMENTS", 4200)
    for one, again in ((whole, terms("warm", SHAPES[1], 5000)), (added, terms("warm", None, 5000))):
        np.testing.assert_allclose(again.loss, one.loss, rtol=0, atol=1e-12)
        np.testing.assert_allclose(again.weight, one.weight, rtol=0, atol=1e-11)
        assert len(np.unique(one.loss)) == len(one.loss)  # no chunk repeats another
    assert mc_epsilon(strategy, rule, sigma, 1e-3, MonteCarlo(3000)) == first
    assert mc_epsilon(strategy, rule, sigma, 1e-3, MonteCarlo(3000, salt=1)) != first


def test_refusals() -> None:
    with pytest.raises(PlanError, match="columns do not overlap b=2 steps apart"):
        mc_epsilon(ToeplitzBanded([1.0, 0.5, 0.2], 6), MinSeparationSampling(6, 2, 0.3), 1.0, 1e-3)
    with pytest.raises(PlanError, match="RandomAllocation is accounted without samples"):
        mc_epsilon(Independent(4), RandomAllocation(2, 2), 1.0, 1e-3)
    with pytest.raises(PlanError, match="balls in bins and for sampling with separation"):
        mc_epsilon(Independent(4), PoissonSampling(4, 0.5), 1.0, 1e-3)
