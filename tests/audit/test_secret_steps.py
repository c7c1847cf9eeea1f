"""Canaries under secret sampling: the law of their steps, and scores that are likelihood ratios, by enumeration."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from anyorder._draws import uniforms
from anyorder.audit import Canaries
from anyorder.audit.secret_steps import SecretScorer, drawn_steps
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedOrder,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.strategy import BandedInverse, Dense, Independent, ToeplitzBanded, Tree

RULES = {
    "poisson": PoissonSampling(6, 0.3),
    "cyclic": CyclicPoisson(6, 2, 0.4),
    "truncated": TruncatedPoisson(6, 0.4, 3, 7),
    "truncated cyclic": TruncatedPoisson(6, 0.4, 2, 7, cycle=2),
    "bins": BallsInBins(2, 3),
    "one epoch of bins": BallsInBins(1, 6),
    "allocation": RandomAllocation(2, 3),
    "separated": MinSeparationSampling(6, 3, 0.3),
    "separated, all at once": MinSeparationSampling(6, 2, 0.6, warm_start=False),
    "separated, at once again": MinSeparationSampling(6, 3, 1.0),
}
each = pytest.mark.parametrize("name", RULES)
SOURCE = NoiseSource(bytes(range(32)))


def chances(rule, canary=0):
    """Set of steps -> its probability, by going through all coins."""
    found = Counter()
    match rule:
        case PoissonSampling() | CyclicPoisson() | TruncatedPoisson():
            cycle = getattr(rule, "cycle", 1)
            q = rule.sampling_probability
            if type(rule) is TruncatedPoisson:
                q = stays(rule, canary)
            own = range(canary % cycle, rule.n, cycle)
            for coins in product((0, 1), repeat=len(own)):
                steps = tuple(t for t, coin in zip(own, coins, strict=True) if coin)
                found[steps] += q ** sum(coins) * (1 - q) ** (len(coins) - sum(coins))
        case BallsInBins():
            for j in range(rule.b):
                found[tuple(range(j, rule.n, rule.b))] += 1 / rule.b
        case RandomAllocation():
            for places in product(range(rule.b), repeat=rule.k):
                found[tuple(e * rule.b + place for e, place in enumerate(places))] += rule.b**-rule.k
        case MinSeparationSampling():
            p, b = rule.sampling_probability, rule.b
            waits = [1 - (b - 1) * rule.marginal] + [rule.marginal] * (b - 1) if rule.warm_start else [1.0]
            for wait, chance in enumerate(waits):
                separated(found, rule, (), wait, chance, p)
    assert sum(found.values()) == pytest.approx(1)
    return found


def separated(found, rule, steps, t, chance, p):
    if t >= rule.n:
        found[steps] += chance
        return
    separated(found, rule, (*steps, t), t + rule.b, chance * p, p)
    if p < 1:
        separated(found, rule, steps, t + 1, chance * (1 - p), p)


def stays(rule, canary):
    """Drawn, and not pushed out, by going through the coins of the whole group."""
    group = len(range(canary % rule.cycle, rule.dataset_size, rule.cycle))
    q, total = rule.sampling_probability, 0.0
    for coins in product((0, 1), repeat=group):
        drawn = sum(coins)
        if coins[0]:
            total += q**drawn * (1 - q) ** (group - drawn) * min(1, rule.batch_size / drawn)
    return total


@each
def test_canaries_draw_their_steps_by_the_law_of_the_rule(name):
    rule, count = RULES[name], 40_000
    there = drawn_steps(rule, count, SOURCE)
    assert there.shape == (rule.n, count)
    for group in range(getattr(rule, "cycle", 1)):
        own = there[:, group :: getattr(rule, "cycle", 1)]
        seen = Counter(tuple(np.flatnonzero(column).tolist()) for column in own.T)
        expected = chances(rule, group)
        assert set(seen) <= set(expected)
        for steps, chance in expected.items():
            deviation = np.sqrt(own.shape[1] * chance * (1 - chance))
            assert abs(seen[steps] - own.shape[1] * chance) < 5 * deviation + 1, steps
    assert not np.array_equal(there, drawn_steps(rule, count, SOURCE.derive(b"others")))


def test_uniforms_have_all_their_bits():
    """With fewer, a probability is rounded up to a multiple of the last one."""
    drawn = uniforms(SOURCE, 3, 1000)
    assert ((drawn >= 0) & (drawn < 1)).all()
    last = (drawn * 2.0**53) % 2
    assert np.isin(last, (0, 1)).all()
    assert abs(last.mean() - 0.5) < 0.05


@each
def test_the_steps_of_a_canary_tell_nothing_of_those_of_the_next(name):
    rule, count = RULES[name], 20_000
    there = drawn_steps(rule, count, SOURCE).astype(np.float64)
    cycle = getattr(rule, "cycle", 1)
    for group in range(cycle):
        there[:, group::cycle] -= there[:, group::cycle].mean(axis=1, keepdims=True)
    for lag in (1, 2, 3, 4):
        one, other = there[:, lag:], there[:, :-lag]
        for step in range(rule.n):
            products = one * other[step]
            assert (np.abs(products.mean(axis=1)) <= 5.5 * products.std(axis=1) / np.sqrt(count - lag)).all(), lag


@each
@pytest.mark.parametrize("strategy", [Independent(6), ToeplitzBanded([1.0, -0.6, 0.3], 6), Tree(6)], ids=type)
def test_the_score_is_the_likelihood_ratio(name, strategy):
    """Of any C, where the columns of different coins do not overlap; for groups and bins whatever C is."""
    rule = RULES[name]
    if type(strategy) is not Independent and type(rule) is not BallsInBins:
        overlaps = {
            RandomAllocation: Dense(np.kron(np.eye(2), [[1, 0, 0], [0.5, 1, 0], [-0.3, 0.2, 1]])),
            MinSeparationSampling: ToeplitzBanded([1.0, -0.5], 6),
            CyclicPoisson: ToeplitzBanded([1.0, 0.7], 6),
        }
        strategy = overlaps.get(type(rule), Independent(6))
        if getattr(rule, "cycle", 2) < 2:
            strategy = Independent(6)
    count, clip, std = 8, 1.5, 1.2
    canaries = Canaries(20, count, 20, 3)
    rows = np.random.default_rng(5).normal(size=(6, 20))
    C = strategy.matrix()
    y = C @ np.stack([canaries.dot(row) for row in rows]) / clip
    for signed in (False, True):
        scorer = SecretScorer(strategy, rule, canaries, clip, std, signed=signed)
        for row in rows:
            scorer.add(row)
        expected = np.zeros(count)
        for c in range(count):
            for sign in (1, -1) if signed else (1,):
                total = 0.0
                for steps, chance in chances(rule, c).items():
                    m = sign * C[:, list(steps)].sum(axis=1)
                    total += chance * np.exp((m @ y[:, c] - m @ m / 2) / (std / clip) ** 2)
                expected[c] += sign * np.log(total)
        np.testing.assert_allclose(scorer.scores(), expected, rtol=1e-9, atol=1e-9)


def test_a_score_before_the_end_is_that_of_the_rows_so_far():
    strategy, rule = BandedInverse([1.0, -0.5], 6), RULES["bins"]
    canaries = Canaries(20, 4, 20, 3)
    rows = np.random.default_rng(1).normal(size=(6, 20))
    scorer = SecretScorer(strategy, rule, canaries, 1.0, 1.0)
    for row in rows[:4]:
        scorer.add(row)
    C = strategy.matrix()[:4]
    y = C[:, :4] @ np.stack([canaries.dot(row) for row in rows[:4]])
    means = [C[:, j::3].sum(axis=1) for j in range(3)]
    expected = np.log(np.mean([np.exp(m @ y - m @ m / 2) for m in means], axis=0))
    np.testing.assert_allclose(scorer.scores(), expected)
    for row in rows[4:]:
        scorer.add(row)
    with pytest.raises(ArgumentError, match="and has more"):
        scorer.add(rows[0])


def test_truncation_pushes_out_as_many_as_there_are_too_many():
    rule = RULES["truncated cyclic"]
    np.testing.assert_allclose(rule.taken_probabilities(4), [stays(rule, c) for c in range(4)])
    wide = TruncatedPoisson(6, 0.4, 7, 7)
    assert wide.taken_probabilities(3).tolist() == [0.4] * 3


def test_what_does_not_fit_is_refused():
    with pytest.raises(ArgumentError, match="must be drawn in secret"):
        drawn_steps(FixedOrder(4, 2, 2), 3, SOURCE)
    with pytest.raises(ArgumentError, match="n=6 steps"):
        SecretScorer(Independent(5), RULES["bins"], Canaries(20, 4, 20, 3), 1.0, 1.0)
