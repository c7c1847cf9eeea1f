"""The draws of every secret order have the law that its claim is for, and are functions of key and step alone."""

import hashlib
from collections import Counter
from fractions import Fraction
from itertools import product
from math import comb
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from anyorder import _draws
from anyorder._draws import Draws
from anyorder.errors import ArgumentError
from anyorder.ledger import Ledger
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

KEY = bytes(range(32))
SOURCE = NoiseSource(KEY)
UNITS = 30_000  # each is a sample of its own
LEAST = 1e-4  # p-value; keys are fixed

ALL = [
    PoissonSampling(12, 0.3),
    CyclicPoisson(12, 3, 0.4),
    TruncatedPoisson(12, 0.4, batch_size=9, dataset_size=40, cycle=2),
    BallsInBins(3, 4),
    RandomAllocation(3, 4),
    MinSeparationSampling(12, 3, 0.4),
    MinSeparationSampling(12, 4, 0.7, warm_start=False),
]
INDEPENDENT = [
    PoissonSampling(4, 0.3),
    CyclicPoisson(6, 3, 0.4),
    BallsInBins(2, 3),
    BallsInBins(3, 2),
    RandomAllocation(2, 3),
    RandomAllocation(3, 2),
    MinSeparationSampling(6, 1, 0.3),
    MinSeparationSampling(7, 3, 0.6),
    MinSeparationSampling(6, 3, 1.0),
    MinSeparationSampling(6, 4, 0.25),
    MinSeparationSampling(6, 3, 0.5, warm_start=False),
]


def law_of(rule, number):
    """{pattern: probability} of one unit, from the rule's words alone."""
    law = Counter()
    match rule:
        case PoissonSampling():
            for pattern in product((0, 1), repeat=rule.n):
                law[pattern] += chance(pattern, range(rule.n), rule.sampling_probability)
        case CyclicPoisson():
            own = range(number % rule.cycle, rule.n, rule.cycle)
            for coins in product((0, 1), repeat=len(own)):
                pattern = [0] * rule.n
                for t, coin in zip(own, coins, strict=True):
                    pattern[t] = coin
                law[tuple(pattern)] += chance(pattern, own, rule.sampling_probability)
        case BallsInBins():
            for j in range(rule.b):
                law[tuple(int(t % rule.b == j) for t in range(rule.n))] += 1 / rule.b
        case RandomAllocation():
            for places in product(range(rule.b), repeat=rule.k):
                law[tuple(int(places[t // rule.b] == t % rule.b) for t in range(rule.n))] += rule.b**-rule.k
        case MinSeparationSampling():
            start = rule.marginal if rule.warm_start else 0.0
            for wait in range(rule.b):
                weight = start if wait else 1 - (rule.b - 1) * start
                for pattern, p in separated(rule, wait):
                    law[pattern] += weight * p
    assert sum(law.values()) == pytest.approx(1)
    return {pattern: p for pattern, p in law.items() if p > 0}


def chance(pattern, steps, q):
    return np.prod([q if pattern[t] else 1 - q for t in steps])


def separated(rule, free, t=0):
    """All patterns from step t on of a unit that may come from step `free` on."""
    if t == rule.n:
        return [((), 1.0)]
    p = rule.sampling_probability if t >= free else 0.0
    return [((1, *rest), p * q) for rest, q in separated(rule, t + rule.b, t + 1) if p] + [
        ((0, *rest), (1 - p) * q) for rest, q in separated(rule, free, t + 1)
    ]


def patterns(rule, size=UNITS, source=SOURCE):
    """(size, n) who is in which step."""
    draws, found = Draws(rule, size, source), np.zeros((size, rule.n), np.int8)
    for t in range(rule.n):
        found[draws.step(t), t] = 1
    return found


def agrees(counts, law):
    """The p-value of counts under a law; rare outcomes are joined."""
    assert counts.keys() <= law.keys(), "an outcome that the rule does not allow"
    total = sum(counts.values())
    rare = [x for x in law if law[x] * total < 8]
    observed = [counts[x] for x in law if x not in rare] + [sum(counts[x] for x in rare)] * bool(rare)
    expected = [law[x] * total for x in law if x not in rare] + [sum(law[x] for x in rare) * total] * bool(rare)
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return stats.chi2.sf(statistic, len(observed) - 1) if len(observed) > 1 else 1.0


@pytest.mark.parametrize("rule", INDEPENDENT, ids=repr)
def test_the_steps_of_a_unit_have_the_joint_law_of_the_rule(rule):
    found, groups = patterns(rule), rule.cycle if isinstance(rule, CyclicPoisson) else 1
    for j in range(groups):
        counts = Counter(map(tuple, found[j::groups].tolist()))
        assert agrees(counts, law_of(rule, j)) > LEAST
    expected = sum(np.array(x) * p for x, p in law_of(rule, 0).items())
    if groups == 1:
        assert np.abs(found.mean(0) - expected).max() < 5 * np.sqrt(0.25 / UNITS)


@pytest.mark.parametrize("rule", INDEPENDENT, ids=repr)
def test_units_draw_by_coins_of_their_own(rule):
    """Two units' patterns are independent: those side by side, and those that share blocks of the cipher's words."""
    found = patterns(rule)
    for distance in (1, 2, 8, 16):
        law = [law_of(rule, 0), law_of(rule, distance)]
        first = found[: UNITS - UNITS % (2 * distance)].reshape(-1, 2, distance, rule.n)
        one, other = first[:, 0].reshape(-1, rule.n), first[:, 1].reshape(-1, rule.n)
        if isinstance(rule, CyclicPoisson):  # a pair of which the first is of group 0
            mine = np.arange(len(found))[: len(one) * 2].reshape(-1, 2, distance)[:, 0].ravel() % rule.cycle == 0
            one, other = one[mine], other[mine]
        rows, counts = np.unique(np.hstack([one, other]) @ (1 << np.arange(2 * rule.n)), return_counts=True)
        bits = (rows[:, None] >> np.arange(2 * rule.n) & 1).reshape(-1, 2, rule.n).tolist()
        pairs = Counter({(tuple(a), tuple(b)): int(n) for (a, b), n in zip(bits, counts, strict=True)})
        joint = {(a, b): p * q for a, p in law[0].items() for b, q in law[1].items()}
        assert agrees(pairs, joint) > LEAST


@pytest.mark.parametrize("cycle", [1, 2])
def test_truncation_leaves_a_uniform_choice_of_those_who_were_drawn(cycle):
    rule = TruncatedPoisson(8000, 0.6, batch_size=2, dataset_size=4 * cycle, cycle=cycle)
    draws, counts = Draws(rule, rule.dataset_size, SOURCE), Counter()
    for t in range(rule.n):
        drawn = draws.step(t)
        assert set(drawn % cycle) <= {t % cycle}
        counts[tuple(drawn // cycle)] += 1
    law = Counter()
    for coins in product((0, 1), repeat=4):
        who = tuple(i for i in range(4) if coins[i])
        kept = [s for s in product(range(4), repeat=2) if s[0] < s[1] and set(s) <= set(who)] if len(who) > 2 else [who]
        for batch in kept:
            law[batch] += 0.6 ** len(who) * 0.4 ** (4 - len(who)) / (comb(len(who), 2) if len(who) > 2 else 1)
    assert agrees(counts, law) > LEAST


def test_steps_of_truncated_sampling_are_independent():
    rule = TruncatedPoisson(6000, 0.5, batch_size=1, dataset_size=3)
    draws = Draws(rule, 3, SOURCE)
    batches = [tuple(draws.step(t)) for t in range(rule.n)]
    single = {(i,): (1 - 0.5**3) / 3 for i in range(3)} | {(): 0.5**3}
    joint = {(a, b): p * q for a, p in single.items() for b, q in single.items()}
    assert agrees(Counter(zip(batches[::2], batches[1::2], strict=True)), joint) > LEAST


@pytest.mark.parametrize("rule", ALL, ids=repr)
def test_any_step_at_any_time_is_the_same(rule):
    straight = [Draws(rule, 40, SOURCE).step(t).tolist() for t in range(rule.n)]
    draws = Draws(rule, 40, NoiseSource(KEY))
    for t in [7, 7, 3, 11, 0, 1, 2, 10, 4]:
        drawn = draws.step(t)
        assert drawn.tolist() == straight[t] == sorted(set(straight[t]))
        assert drawn.dtype == np.int64
        drawn[:] = -1  # the caller's own
    other = [Draws(rule, 40, NoiseSource(bytes(32))).step(t).tolist() for t in range(rule.n)]
    assert other != straight


@pytest.mark.parametrize("rule", ALL, ids=repr)
def test_the_ledger_takes_what_is_drawn(rule):
    for key in range(20):
        ledger = Ledger(rule)
        draws = Draws(rule, 40, NoiseSource(bytes([key]) * 32))
        for t in range(rule.n):
            ledger.record(t, ledger.check(t, draws.step(t)))


def test_a_bin_is_for_the_whole_run_and_an_allocation_for_an_epoch():
    bins, anew = Draws(BallsInBins(3, 4), 200, SOURCE), Draws(RandomAllocation(3, 4), 200, SOURCE)
    first = [bins.step(t).tolist() for t in range(4)]
    assert [bins.step(t).tolist() for t in range(12)] == 3 * first
    epochs = [[anew.step(4 * e + j).tolist() for j in range(4)] for e in range(3)]
    assert all(sorted(unit for batch in epoch for unit in batch) == list(range(200)) for epoch in [first, *epochs])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_poisson_coins_are_those_of_its_sampler():
    """Bits of runs that were begun with them."""
    assert [Draws(PoissonSampling(4, 0.2), 30, SOURCE).step(t).tolist() for t in range(4)] == [
        np.flatnonzero(SOURCE.derive(b"poisson").words(t, 0, 30) < int(0.2 * 2**32)).tolist() for t in range(4)
    ]
    same = Draws(CyclicPoisson(4, 1, 0.2), 30, SOURCE)
    assert all(np.array_equal(same.step(t), Draws(PoissonSampling(4, 0.2), 30, SOURCE).step(t)) for t in range(4))


class Words(NamedTuple):
    """A source of stated words."""

    given: list[int]

    def derive(self, label):
        return self

    def words(self, row, start, count):
        return np.array(self.given, np.uint32)[start : start + count]


def test_a_unit_whose_word_is_the_threshold_stays_away():
    """Words below q 2^32 are q 2^32 of them; with the threshold itself a coin would fall more often than q."""
    threshold = _draws.threshold_of(0.25, 32)
    draws = Draws(PoissonSampling(1, 0.25), 4, Words([threshold - 1, threshold, threshold + 1, 0]))
    assert draws.step(0).tolist() == [0, 3]


def test_a_renewed_source_moves_no_unit_where_the_rule_forbids_it():
    renewed, size = SOURCE.renewed(6, b"n" * 16), 300
    for rule in (
        BallsInBins(3, 4),
        RandomAllocation(3, 4),
        MinSeparationSampling(12, 3, 0.5),
        PoissonSampling(12, 0.5),
    ):
        before, after, ledger = Draws(rule, size, SOURCE), Draws(rule, size, renewed), Ledger(rule)
        same = [np.array_equal(before.step(t), after.step(t)) for t in range(12)]
        assert all(same[:6])
        match rule:
            case BallsInBins():
                assert all(same)
            case RandomAllocation():
                assert all(same[:8])
                assert not any(same[8:])
            case _:
                assert not any(same[6:])
        for t in range(12):
            ledger.record(t, ledger.check(t, after.step(t)))


@pytest.mark.parametrize("rule", ALL, ids=repr)
def test_a_renewed_source_draws_the_same_for_whoever_begins_there(rule):
    """A process that goes on within an epoch has seen none of it; a renewal is where one does."""
    for row in (1, 6, 8):
        renewed = SOURCE.renewed(row, b"n" * 16)
        straight = Draws(rule, 40, renewed)
        for t in range(rule.n):
            assert np.array_equal(Draws(rule, 40, renewed).step(t), straight.step(t)), (row, t)


def test_a_draw_that_was_interrupted_is_begun_anew(monkeypatch):
    """Half of its steps are no state to go on from: units would wait for a step that nobody drew."""
    rule = MinSeparationSampling(12, 3, 0.6)
    whole, draws = Draws(rule, 300, SOURCE), Draws(rule, 300, SOURCE)
    straight, words, left = [whole.step(t).tolist() for t in range(12)], _draws.words, [4]

    def stopped(*args):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return words(*args)

    draws.step(2)
    monkeypatch.setattr(_draws, "words", stopped)
    with pytest.raises(KeyboardInterrupt):
        draws.step(9)
    assert draws.step(4).tolist() == straight[4]
    assert draws.step(7).tolist() == straight[7]


BITS = {
    "PoissonSampling(n=12, sampling_probability=0.3)": "6e01e1cb75e2c558",
    "CyclicPoisson(n=12, cycle=3, sampling_probability=0.4)": "55bca63d3bdeb26a",
    "TruncatedPoisson(n=12, sampling_probability=0.4, batch_size=9, dataset_size=40, cycle=2)": "50d71d3ae9273a6b",
    "BallsInBins(k=3, b=4)": "cdd8884428b2d782",
    "RandomAllocation(k=3, b=4)": "72ad477d0a3a7197",
    "MinSeparationSampling(n=12, b=3, sampling_probability=0.4, warm_start=True)": "ad21b2e4f5e80cac",
    "MinSeparationSampling(n=12, b=4, sampling_probability=0.7, warm_start=False)": "21bbb7770f49ea59",
}


@pytest.mark.parametrize("rule", ALL, ids=repr)
def test_bits_stay(rule):
    """A run that was begun with an earlier version goes on with its bins: others would be another order."""
    draws = Draws(rule, 40, SOURCE)
    drawn = ";".join(",".join(map(str, draws.step(t).tolist())) for t in range(rule.n))
    assert hashlib.sha256(drawn.encode()).hexdigest()[:16] == BITS[repr(rule)]


def test_a_choice_of_one_of_b_is_made_of_whole_ranges_of_words(monkeypatch):
    """A word behind the last multiple of b is drawn again; modulo alone, the first ones would come more often."""
    last = 2**64 // 3 * 3 - 1
    words = [np.array(row, np.uint64) for row in ([last, last + 1, 5], [0, 2**64 - 1, 0], [0, 7, 0])]
    monkeypatch.setattr(_draws, "words", lambda source, row, size: words.pop(0))
    assert _draws.uniform(SOURCE, 0, 3, 3).tolist() == [last % 3, 1, 2]
    assert not words
    monkeypatch.setattr(_draws, "words", lambda source, row, size: np.array([2**64 - 1, 0], np.uint64))
    assert _draws.uniform(SOURCE, 0, 2, 4).tolist() == [3, 0]


def test_thresholds_are_rounded_down_and_nearly_always_exact():
    for q in (0.3, 1 / 3, 1e-3, 1.0, 2.0**-32):
        assert Fraction(_draws.threshold_of(q, 32), 2**32) <= Fraction(q)
        assert q < 2**-11 or Fraction(_draws.threshold_of(q, 64), 2**64) == Fraction(q)
    words = np.array([0, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
    assert _draws.below(words, 0.5).tolist() == [True, True, False, False]
    assert _draws.below(words, 1.0).all()


class Given:
    """A source of words that are given."""

    def __init__(self, *words):
        self.given = np.array(words, np.uint32)

    @property
    def own(self):
        return self

    def derive(self, label):
        return self

    def words(self, row, start, stop):
        return self.given[start:stop]


@pytest.mark.parametrize(("q", "word"), [(0.5, 2**31), (0.25, 2**30), (2.0**-32, 1)])
def test_a_coin_falls_for_the_words_below_its_threshold_and_no_other(q, word):
    """One word more would be a probability above the claimed one, by 2^-32."""
    source = Given(word - 1, word, 0, word + 1, 2**32 - 1)
    for rule in (PoissonSampling(1, q), CyclicPoisson(1, 1, q)):
        assert Draws(rule, 5, source).step(0).tolist() == [0, 2]


def test_a_coin_of_64_bits_falls_for_the_words_below_its_threshold_and_no_other():
    low, high = 2**32 - 1, 2**31 - 1  # little-endian: 2^63 - 1, 2^63, 0
    source = Given(low, high, 0, high + 1, 0, 0)
    for rule in (TruncatedPoisson(1, 0.5, 3, 3), MinSeparationSampling(1, 1, 0.5)):
        assert Draws(rule, 3, source).step(0).tolist() == [0, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Draws(FixedOrder(4, 2, 2), 4, SOURCE),
        lambda: Draws(BallsInBins(2, 2), 0, SOURCE),
        lambda: Draws(TruncatedPoisson(4, 0.5, 2, 10), 9, SOURCE),
        lambda: Draws(PoissonSampling(4, 2.0**-33), 4, SOURCE),
        lambda: Draws(BallsInBins(2, 2), 4, SOURCE).step(-1),
    ],
)
def test_bad_arguments(make):
    with pytest.raises(ArgumentError):
        make()
