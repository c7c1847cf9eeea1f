"""Certificates of chance: the limit is not below the truth but for its failure, near it, and the same again."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from accounting.amplification.oracle import mixture_deltas
from anyorder.accounting import gdp_epsilon
from anyorder.accounting.amplification import monte_carlo
from anyorder.accounting.amplification import monte_carlo as monte_carlo_terms
from anyorder.accounting.amplification.monte_carlo import (
    Bins,
    BinsTerms,
    MonteCarlo,
    Shape,
    mc_delta,
    mc_epsilon,
    mc_interval,
)
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource
from anyorder.participation import BallsInBins
from anyorder.strategy import Independent, ToeplitzBanded


def bins_interval(gram, sigma: float, delta: float, settings: MonteCarlo):
    """`mc_interval` of any Gram matrix of bins."""
    source = NoiseSource((b"gram %d " % settings.salt).ljust(32))
    search = monte_carlo._EpsilonSearch(Bins(gram / sigma**2), source, settings.samples, None)
    return search.interval(delta, settings.failure or 1e-3)


@pytest.mark.parametrize(("mu", "delta"), [(0.3, 1e-5), (1.0, 1e-8)])
def test_one_bin_is_the_gaussian_mechanism(mu: float, delta: float) -> None:
    settings = MonteCarlo(50_000)
    truth = gdp_epsilon(mu, delta)
    found = mc_epsilon(Independent(1), BallsInBins(1, 1), 1 / mu, delta, settings)
    assert truth < found < 1.01 * truth
    interval = mc_interval(Independent(1), BallsInBins(1, 1), 1 / mu, delta, settings)
    assert 0.99 * truth < interval.lower < truth < interval.upper < 1.01 * truth
    assert 0.98 * delta < mc_delta(Independent(1), BallsInBins(1, 1), 1 / mu, truth, settings) < 1.1 * delta
    gram = bins_interval(np.ones((3, 3)), 1 / mu, delta, settings)  # bins that are all alike hide nothing
    assert 0.99 * truth < gram.lower < truth < gram.upper < 1.01 * truth


def test_the_same_again_and_other_samples_for_another_salt() -> None:
    rule, strategy = BallsInBins(2, 5), Independent(10)
    first = mc_epsilon(strategy, rule, 1.0, 1e-5, MonteCarlo(2500))
    assert first == mc_epsilon(strategy, rule, 1.0, 1e-5, MonteCarlo(2500))
    other = mc_epsilon(strategy, rule, 1.0, 1e-5, MonteCarlo(2500, salt=1))
    assert first != other
    assert first == pytest.approx(other, rel=0.03)


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="failure must be below delta"):
        mc_epsilon(Independent(4), BallsInBins(2, 2), 1.0, 1e-5, MonteCarlo(5000, failure=1e-5))


GRAM = np.array([[1.3, 0.6, 0.2], [0.6, 1.0, 0.5], [0.2, 0.5, 0.8]])
SIGMA, EPSILON = 0.9, 1.5
SHAPES = [Shape(2), Shape(5), Shape(3, (0.8, 1.5), -0.4), Shape(4, (1.2,), 0.5)]


def silent(count: int) -> None:
    pass


def terms(shape: Shape | None, samples: int = 200_000, key: int = 0) -> BinsTerms:
    bins, source = Bins(GRAM / SIGMA**2), NoiseSource(bytes([key] * 32))
    return bins.add(source, samples, 0.7, silent) if shape is None else bins.remove(source, samples, shape, silent)


@pytest.mark.parametrize("shape", [*SHAPES, None])
def test_terms_are_unbiased_and_bounded_in_both_directions(shape: Shape | None) -> None:
    delta = mixture_deltas(GRAM, np.ones(3) / 3, SIGMA, EPSILON)[shape is None]
    found = terms(shape)
    X = np.exp(monte_carlo._log_terms(found, EPSILON))
    error = X.std() / math.sqrt(len(X))
    assert error < 0.02 * delta
    assert abs(X.mean() - delta) < 4.5 * error
    assert X.max() <= monte_carlo._cap(found, EPSILON) * (1 + 1e-9)
    assert (np.exp(monte_carlo._log_terms(found, EPSILON + 0.1)) <= X).all()


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], None])
def test_the_limit_is_below_the_truth_as_rarely_as_it_says(shape: Shape | None) -> None:
    """2000 limits of 250 terms at failure 0.05: fewer than 5 % are below, but some are."""
    delta = mixture_deltas(GRAM, np.ones(3) / 3, SIGMA, EPSILON)[shape is None]
    X = np.exp(monte_carlo._log_terms(terms(shape, 500_000, key=3), EPSILON)).reshape(2000, 250)
    bet = 0.9 * min(1 / monte_carlo._cap(terms(shape, 4), EPSILON), math.sqrt(6 / 250) / X.std())
    wealth = np.log1p(bet * (delta - X)).sum(axis=1)
    below = (wealth >= math.log(20)).mean()  # the limit at epsilon is below delta
    assert 0.001 < below < 0.05
    assert (np.log1p(bet * (1.02 * delta - X)).sum(axis=1) >= math.log(20)).mean() > below


def test_a_limit_at_twice_the_failure_is_wrong_too_often() -> None:
    """One term that is 0 with probability 0.1, else the largest that a bet may lose to: Markov is an equality."""
    failure, m = 0.05, 1e-3
    bet = monte_carlo._Bet((1 / (2 * failure) - 1) / m, 0.0)  # the wealth is 20 / 2 after a 0
    weight = math.log(m / (1 - 2 * failure)) - 1e-12  # delta is m, but for rounding
    zero = np.random.default_rng(0).random(600) < 2 * failure

    def wrong(stake: float) -> float:
        count = 0
        for one in zero:
            term = BinsTerms(np.array([-1.0 if one else 50.0]), np.array([weight]), 0.0, weight, True)
            try:
                count += monte_carlo._upper_epsilon(term, m, stake, bet) == 0
            except ArgumentError:  # nothing is claimed
                assert not one or stake > -math.log(2 * failure)
        return count / len(zero)

    assert wrong(-math.log(failure)) == 0
    assert wrong(-math.log(2 * failure) - 1e-9) > 1.5 * failure


def test_what_a_claim_stakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is inside delta, and the best of 256 keys is paid for, in both directions."""
    seen: list[tuple[float, float]] = []
    epsilon, delta = monte_carlo._upper_epsilon, monte_carlo._upper_delta
    monkeypatch.setattr(monte_carlo, "_upper_epsilon", lambda *of: seen.append(of[1:3]) or epsilon(*of))
    monkeypatch.setattr(monte_carlo, "_upper_delta", lambda *of: seen.append(of[2:]) or delta(*of))
    mc_epsilon(Independent(6), BallsInBins(2, 3), 1.0, 1e-2, MonteCarlo(2000, failure=3e-3))
    assert seen == [(1e-2 - 3e-3, pytest.approx(math.log(256 / 3e-3)))] * 2
    seen.clear()
    found = mc_delta(Independent(6), BallsInBins(2, 3), 1.0, 1.0, MonteCarlo(2000, failure=3e-3))
    assert seen == [(1.0, pytest.approx(math.log(256 / 3e-3)))] * 2
    assert found > 3e-3 + mixture_deltas(2 * np.eye(3), np.ones(3) / 3, 1.0, 1.0).worst


def test_claims_over_many_salts_fail_as_rarely_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one key each, not the best of 256; few samples, so that a limit without margin would fail at about half."""
    monkeypatch.setattr(monte_carlo, "TRIES", 1)
    monkeypatch.setattr(Bins, "pilot", 1024)
    monkeypatch.setattr(monte_carlo, "POWERS", (2, 3))
    delta, failure, gram = 0.25, 0.1, 2 * np.eye(2)
    claims = [
        mc_epsilon(Independent(4), BallsInBins(2, 2), 1.0, delta, MonteCarlo(1000, failure, salt)) for salt in range(24)
    ]
    truth = np.linspace(0.4, 3.0, 14)
    deltas = [mixture_deltas(gram, np.ones(2) / 2, 1.0, at).worst for at in truth]
    found = np.interp(claims, truth, deltas)  # delta at what is claimed, which is to be at most delta - failure
    assert (found > delta - failure).sum() <= 4
    assert (found > 0.85 * (delta - failure)).mean() > 0.5  # and near it
    assert len(set(claims)) > 20


def test_both_directions_count() -> None:
    gram = np.full((2, 2), 1.0) + np.diag([3.0, 0.0])
    search = monte_carlo._EpsilonSearch(Bins(gram), NoiseSource(bytes(32)), 20_000, None)
    found = search.least_delta(0.3, 1e-4)
    first, second = mixture_deltas(gram, np.ones(2) / 2, 1.0, 0.3)
    assert max(first, second) < found < 1.1 * max(first, second)
    # where all samples of P against Q say that nothing is lost, Q against P still bounds the claim
    search = monte_carlo._EpsilonSearch(Bins(gram), NoiseSource(bytes(32)), 5000, None)
    nothing = BinsTerms(np.full(5000, -50.0), np.zeros(5000), 0.0, 0.0, True)
    search._remove = lambda m, stake: (nothing, monte_carlo._Bet(0.5, 0.0))  # type: ignore[method-assign]
    epsilon = search.least_epsilon(1e-2, math.log(1e4))
    assert mixture_deltas(gram, np.ones(2) / 2, 1.0, epsilon)[1] < 1e-2
    assert epsilon > 1.0


def test_chunks_do_not_matter_and_keys_do(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, added = terms(SHAPES[2], 5000), terms(None, 5000)
    monkeypatch.setattr(monte_carlo_terms, "_TERM_ELEMENTS", 3 * 700 + 1)
    np.testing.assert_allclose(terms(SHAPES[2], 5000).loss, whole.loss, rtol=0, atol=1e-12)
    np.testing.assert_allclose(terms(SHAPES[2], 5000).weight, whole.weight, rtol=0, atol=1e-11)
    np.testing.assert_allclose(terms(None, 5000).loss, added.loss, rtol=0, atol=1e-12)
    assert len(np.unique(whole.loss)) == len(whole.loss)  # no chunk repeats another
    keys: list[bytes] = []
    derive = NoiseSource.derive
    monkeypatch.setattr(NoiseSource, "derive", lambda self, label: keys.append(label) or derive(self, label))
    mc_epsilon(Independent(10), BallsInBins(2, 5), 1.0, 1e-5, MonteCarlo(2000))
    assert {b"pilot remove", b"remove", b"pilot add", b"add"} == set(keys)


@pytest.mark.parametrize("multiplier", [2.0, 4.0])
def test_published_samples_of_others(multiplier: float) -> None:
    path = Path(__file__).parents[2] / "refs" / "jax_privacy.json"
    values = {one["id"]: one["value"] for one in json.loads(path.read_text())["values"]}
    theirs = values[f"bnb_delta_dpsgd_nm{multiplier:.1f}_eps1"]["remove"]
    ours = mc_delta(Independent(100), BallsInBins(10, 10), multiplier, 1.0, MonteCarlo(100_000))
    assert theirs["delta"] - 3 * theirs["stderr"] < ours < 1.05 * theirs["delta"] + 3 * theirs["stderr"]


def test_failure_is_inside_delta_and_paid_for_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []
    monkeypatch.setattr(
        monte_carlo._EpsilonSearch, "least_epsilon", lambda self, m, stake: asked.append((m, stake)) or 1.0
    )
    for failure, expected in ((None, 1e-7), (2e-6, 2e-6)):
        mc_epsilon(Independent(4), BallsInBins(2, 2), 1.0, 1e-5, MonteCarlo(1000, failure))
        assert asked[-1] == (pytest.approx(1e-5 - expected, rel=1e-12), pytest.approx(math.log(256 / expected)))
    limits = [3e-4, 5e-4, 5e-4, 3e-4]  # of both directions, twice
    stakes: list[float] = []

    def limit(pilot: BinsTerms, terms: BinsTerms, epsilon: float, stake: float) -> float:
        assert len(pilot.loss) == 16384
        assert not set(pilot.loss) & set(terms.loss)  # the bet comes from other samples
        stakes.append(stake)
        return limits[len(stakes) - 1]

    monkeypatch.setattr(monte_carlo, "_upper_delta", limit)
    for _ in range(2):
        search = monte_carlo._EpsilonSearch(Bins(GRAM / SIGMA**2), NoiseSource(bytes(32)), 1000, None)
        assert search.least_delta(EPSILON, 1e-5) == pytest.approx(5e-4 + 1e-5, rel=1e-12)
    assert stakes == pytest.approx(4 * [math.log(256 / 1e-5)])


def test_keys_are_of_all_that_the_number_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    C, rule, goal = Independent(4), BallsInBins(2, 2), ["delta", (1e-5).hex()]
    found = [
        (C, rule, 1.0, goal, MonteCarlo(1000)), (C, rule, 1.0, goal, MonteCarlo(1001)),
        (C, rule, 1.0, goal, MonteCarlo(1000, 1e-7)), (C, rule, 1.0, goal, MonteCarlo(1000, salt=1)),
        (ToeplitzBanded([1.0, 0.5], 4), rule, 1.0, goal, MonteCarlo(1000)),
        (C, BallsInBins(1, 4), 1.0, goal, MonteCarlo(1000)),
        (C, rule, math.nextafter(1.0, 2), goal, MonteCarlo(1000)),
    ]  # fmt: skip
    keys = {bytes(monte_carlo._source(*one).words(0, 0, 8)) for one in found}
    assert len(keys) == len(found)
    goals: list[str] = []

    def stopped(strategy: object, rule: object, sigma: object, goal: list[str], settings: object) -> NoiseSource:
        goals.append(json.dumps(goal))
        raise InterruptedError

    monkeypatch.setattr(monte_carlo, "_source", stopped)
    for ask in (mc_epsilon, mc_interval, mc_delta):
        for number in (0.1, math.nextafter(0.1, 1)):
            with pytest.raises(InterruptedError):
                ask(C, rule, 1.0, number)
    assert len(set(goals)) == 6


def test_a_bet_that_a_term_could_ruin_is_never_taken() -> None:
    """The floor of the theorem: no term at or above it may take all, whatever the terms that were drawn."""
    nothing = BinsTerms(np.full(5000, -50.0), np.zeros(5000), 2.0, 1.5, True)
    m, size = 1e-3, 0.8
    at = monte_carlo._upper_epsilon(nothing, m, 0.1, monte_carlo._Bet(size, 0.0))
    assert size * (math.exp(1.5 - 2.0 * at) - m) <= 1 + 1e-9
    with pytest.raises(AssertionError, match="ruin"):
        monte_carlo._upper_epsilon(nothing._replace(slope=0.0), m, 0.1, monte_carlo._Bet(size, 0.0))
    assert monte_carlo._wealth(np.array([0.0, 3.0]), m, size) == -math.inf
    assert monte_carlo._wealth(np.array([0.0, 1.0]), m, size) < 0


def test_limits_are_rounded_outward() -> None:
    for edge in (0.01234567, 0.7, 3.21, 40.0):
        found = monte_carlo._smallest(lambda epsilon, edge=edge: epsilon >= edge, 0.0, 1e-6)
        assert edge <= found <= edge + 2e-6 * (1e-3 + edge)
        assert edge * (1 + 2e-5) <= monte_carlo._outward(edge) <= edge * (1 + 2e-5) * (1 + 1e-5)
    drawn = terms(SHAPES[0], 2000)
    found = monte_carlo._upper_delta(drawn, drawn, EPSILON, 5.0)
    size = monte_carlo._delta_bet(drawn, EPSILON, 5.0, 2000)
    X = np.exp(monte_carlo._log_terms(drawn, EPSILON))
    assert monte_carlo._wealth(X, found, size) >= 5.0 > monte_carlo._wealth(X, found * (1 - 1e-8), size)


def test_an_interval_pays_for_two_lower_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of both directions may be wrong with half of the failure; the larger upper limit needs no such thing."""
    stakes: dict[str, list[float]] = {"upper": [], "lower": []}
    answers = {"upper": [1.0, 2.0], "lower": [0.7, 0.5]}
    for side, taken in stakes.items():
        monkeypatch.setattr(
            monte_carlo,
            f"_{side}_epsilon",
            lambda found, m, stake, bet, side=side, taken=taken: taken.append(stake) or answers[side][len(taken) - 1],
        )
    gram = bins_interval(GRAM, SIGMA, 1e-2, MonteCarlo(1000, 1e-3))
    assert gram == (0.7, 2.0)
    assert stakes["upper"] == pytest.approx(2 * [math.log(1e3)])
    assert stakes["lower"] == pytest.approx(2 * [math.log(2e3)])


@pytest.mark.parametrize("answers", [(1.0, 2.0), (2.0, 1.0)])
def test_the_larger_epsilon_is_claimed(answers: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    left = list(answers)
    monkeypatch.setattr(monte_carlo, "_upper_epsilon", lambda *_: left.pop(0))
    assert monte_carlo._EpsilonSearch(Bins(GRAM), NoiseSource(bytes(32)), 1000, None).least_epsilon(1e-2, 7.0) == 2.0


def test_settings_out_of_range_are_refused() -> None:
    assert MonteCarlo().samples == 200_000
    for wrong in ({"samples": 999}, {"failure": 0.0}, {"failure": 1.0}, {"salt": -1}, {"salt": 2**63}):
        with pytest.raises(ArgumentError):
            MonteCarlo(**wrong)  # type: ignore[arg-type]


def test_terms_of_two_laws_come_in_equal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each law of the mixture has a mean of its own: only together are they unbiased."""
    counts: list[int] = []
    remove = Bins.remove

    def counted(self: Bins, source: NoiseSource, samples: int, *rest: object) -> BinsTerms:
        counts.append(samples)
        return remove(self, source, samples, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Bins, "remove", counted)
    for samples in (1001, 1003):
        mc_epsilon(Independent(4), BallsInBins(2, 2), 1.0, 1e-2, MonteCarlo(samples))
        assert counts[-1] == 1004
    assert all(count % 4 == 0 for count in counts)


def test_what_is_drawn_for_one_purpose_is_drawn_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms must be independent: no uniform number serves two samples, or two choices of one."""
    rows: list[int] = []
    drawn = monte_carlo_terms.uniforms
    monkeypatch.setattr(
        monte_carlo_terms, "uniforms", lambda source, row, *of: rows.append(row) or drawn(source, row, *of)
    )
    terms(SHAPES[3], 400)  # the centre, 4 copies, and 3 choices of what stands apart, in one chunk
    assert sorted(rows) == list(range(8))


def test_no_constant_of_a_pilot_raises_a_term_above_its_bound() -> None:
    """The pilot's z is free: one above the largest weight would make the terms larger than what bounds them."""
    found = terms(Shape(3, (0.8, 1.5), 50.0), 20_000)
    assert found.cap == terms(SHAPES[2], 4).cap
    for epsilon in (0.0, EPSILON):
        assert monte_carlo._log_terms(found, epsilon).max() <= monte_carlo._log_cap(found, epsilon) + 1e-9


def test_the_bet_on_delta_cannot_be_ruined_by_what_a_pilot_did_not_see() -> None:
    """A pilot without a term above 0 has no spread, by which any bet would look good."""
    seen = BinsTerms(np.full(1000, -50.0), np.zeros(1000), 1.0, 2.0, True)
    for epsilon in (0.0, 1.0, 5.0):
        assert monte_carlo._delta_bet(seen, epsilon, 12.0, 1000) * monte_carlo._cap(seen, epsilon) <= 0.9 * 1.006
