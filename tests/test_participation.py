"""Participations: their patterns, their round trips, their refusals."""

import json
import time
import zlib
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyorder import formats, participation, patterns, plan
from anyorder.errors import ArgumentError, CertificateError
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    EpochShuffle,
    FixedOrder,
    KnownOrder,
    MinSeparation,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    SingleEpoch,
    TruncatedPoisson,
)
from anyorder.participation.known_order import with_names, without_names
from anyorder.participation.packing import packed, unpacked
from anyorder.participation.registry import ORDERS, recognised
from anyorder.patterns import LoaderFacts

EXAMPLES = [
    SingleEpoch(5),
    FixedOrder(8, 3, 3),
    EpochShuffle(2, 3),
    MinSeparation(7, 3, 2),
    MinSeparation(7, 1),
    KnownOrder([1, 2, 3, 1, 4]),
    KnownOrder([["ann", "bob"], [], ["ann"]]),
    PoissonSampling(4, 0.25),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=repr)
def test_patterns_obey_the_stated_bounds(example):
    patterns = list(example.patterns())
    assert max(map(len, patterns)) == example.max_participations
    for pattern in patterns:
        assert pattern == tuple(sorted(pattern))
        assert 0 <= pattern[0] <= pattern[-1] < example.n
        assert all(b - a >= example.min_separation for a, b in pairwise(pattern))


@pytest.mark.parametrize("example", EXAMPLES, ids=repr)
def test_round_trip(example):
    again = patterns.from_dict(example.to_dict())
    assert again == example
    assert list(again.patterns()) == list(example.patterns())
    assert hash(again) == hash(example)
    assert example.describe()


@given(n=st.integers(1, 9), b=st.integers(1, 5), k=st.integers(1, 5))
def test_min_separation_is_all_subsets_with_the_distance(n, b, k):
    allowed = {
        steps
        for size in range(1, k + 1)
        for steps in combinations(range(n), size)
        if all(y - x >= b for x, y in pairwise(steps))
    }
    assert set(MinSeparation(n, b, k).patterns()) == allowed


@pytest.mark.parametrize("rule", [MinSeparation(9, 3), MinSeparationSampling(9, 3, 0.5)], ids=repr)
def test_a_unit_waits_the_whole_separation(rule):
    last, count = np.array([0, 1, 2, 3, -1]), np.array([1, 1, 1, 1, 0])
    [(_, early), *_] = rule.refusals(4, last, count)
    assert early.tolist() == [False, False, True, True, False]


def test_a_public_order_covers_no_secret_one():
    """Its units would be those of a pattern, but whoever plans for secret draws has another claim."""
    for secret in (BallsInBins(2, 3), CyclicPoisson(6, 3, 0.3), TruncatedPoisson(6, 0.3, 4, 12, 3)):
        for planned in (FixedOrder(6, 2, 3), EpochShuffle(2, 3)):
            assert not participation.covers(planned, secret)


def test_separation_counts_from_step_to_step():
    """b = 3 allows steps 0 and 3, with two steps between them."""
    assert (0, 3) in set(MinSeparation(4, 3).patterns())
    assert (0, 2) not in set(MinSeparation(4, 3).patterns())


def test_known_order_counts_a_unit_once_a_step():
    order = KnownOrder([[7, 7, 8], [7]])
    assert list(order.patterns()) == [(0, 1), (0,)]
    assert order.min_separation == 1


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: SingleEpoch(0), "n"),
        (lambda: SingleEpoch(2.0), "n"),
        (lambda: SingleEpoch(True), "n"),
        (lambda: FixedOrder(10, 3, 3), "n must be at most k b"),
        (lambda: EpochShuffle(0, 3), "k"),
        (lambda: MinSeparation(5, 0), "b"),
        (lambda: KnownOrder([]), "order"),
        (lambda: KnownOrder([[], []]), "order"),
        (lambda: KnownOrder([["a", 1]]), "order"),
        (lambda: PoissonSampling(3, 0.0), "sampling_probability"),
        (lambda: PoissonSampling(3, 1.5), "sampling_probability"),
        (lambda: patterns.from_dict({"kind": "magic"}), "participation kind"),
        (lambda: CyclicPoisson(0, 2, 0.5), "n must"),
        (lambda: CyclicPoisson(4, 0, 0.5), "cycle must"),
        (lambda: CyclicPoisson(4, 2, 0.0), "sampling_probability"),
        (lambda: CyclicPoisson(4, 2, 1.5), "sampling_probability"),
        (lambda: TruncatedPoisson(0, 0.5, 4, 12), "n must"),
        (lambda: TruncatedPoisson(4, 0.5, 0, 12), "batch_size must"),
        (lambda: TruncatedPoisson(4, 0.5, 4, 0), "dataset_size must"),
        (lambda: TruncatedPoisson(4, 0.5, 4, 12, 0), "cycle must"),
        (lambda: TruncatedPoisson(4, 0.5, 4, 12, 13), "cycle must be at most dataset_size=12"),
        (lambda: TruncatedPoisson(4, 0.0, 4, 12), "sampling_probability"),
        (lambda: BallsInBins(0, 3), "k must"),
        (lambda: BallsInBins(3, 0), "b must"),
        (lambda: RandomAllocation(0, 3), "k must"),
        (lambda: RandomAllocation(3, 0), "b must"),
        (lambda: MinSeparationSampling(0, 3, 0.5), "n must"),
        (lambda: MinSeparationSampling(6, 0, 0.5), "b must"),
        (lambda: MinSeparationSampling(6, 3, 0.0), "sampling_probability"),
        (lambda: MinSeparationSampling(6, 3, 0.5, 1), "warm_start must"),
    ],
)
def test_bad_arguments_are_named(make, name):
    with pytest.raises(ArgumentError, match=name):
        make()


def test_numbers_and_words_of_secret_orders():
    """What plans and files of earlier versions rest on: kinds, defaults, whose absence moves others."""
    cut, groups = TruncatedPoisson(4, 0.5, 3, 12), TruncatedPoisson(4, 0.5, 3, 13, 4)
    assert (cut.cycle, groups.cycle) == (1, 4)
    assert MinSeparationSampling(6, 3, 0.5) == MinSeparationSampling(6, 3, 0.5, warm_start=True)
    assert MinSeparationSampling(6, 3, 0.5).marginal == 0.25
    sampled = [PoissonSampling(6, 0.5), CyclicPoisson(6, 3, 0.5), BallsInBins(2, 3), RandomAllocation(2, 3)]
    sampled.append(MinSeparationSampling(6, 3, 0.5))
    assert [rule.kind for rule in (*sampled, cut)] == [
        "poisson_sampling", "cyclic_poisson", "balls_in_bins", "random_allocation", "min_separation_sampling",
        "truncated_poisson",
    ]  # fmt: skip
    assert [rule.absence_moves_others for rule in (*sampled, cut)] == [False, True, False, False, False, True]
    assert [rule.draw_probability for rule in (*sampled, cut)] == [0.5, None, None, None, None, None]
    words = [
        rule.describe() for rule in (cut, groups, TruncatedPoisson(4, 0.5, 2, 12), TruncatedPoisson(4, 0.4, 3, 12))
    ]
    words += [MinSeparationSampling(6, 3, 0.5, warm).describe() for warm in (False, True)]
    assert len(set(words)) == 6


def test_a_known_order_of_a_million_units_is_no_work():
    """It took 8 s to make and 7 s to hash; what is asked is far from both, on a slow machine too."""
    order = np.array_split(np.random.default_rng(0).permutation(10**6), 2000)
    before = time.process_time()
    made = KnownOrder(order)
    made.to_dict()
    assert time.process_time() - before < 2.5
    assert len(made.units) == len(made.steps) == 10**6
    assert (np.sort(made.units[made.steps == 7]) == np.sort(order[7])).all()


@pytest.mark.parametrize("units", [[[5, 3], [-7, 3], [], [5]], [[2**62, -(2**62)], [2**62]], [["b", "a"], ["é"]]])
def test_units_of_any_size_come_back_from_a_file(units):
    made = KnownOrder(units)
    again = patterns.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert again.units.tolist() == sorted({u for step in units for u in step})
    assert again != KnownOrder([*units, units[0]])


@pytest.mark.parametrize(
    "change",
    [
        {"n": 2}, {"n": 0}, {"units": packed(np.arange(1))}, {"units": []}, {"steps": packed(np.arange(2))},
        {"indices": packed(np.array([-1, 0, 1]))}, {"steps": "i:"}, {"steps": "x:AAAA"}, {"steps": ""},
    ],
)  # fmt: skip
def test_known_orders_that_no_program_wrote(change):
    data = {**KnownOrder([[0], [1], [0]]).to_dict(), **change}
    with pytest.raises((ValueError, zlib.error)):
        patterns.from_dict(data)


def test_a_small_file_does_not_unpack_to_a_large_one():
    """Of a stranger; what one has packed oneself is read whatever its size."""
    many = np.zeros(formats.MAX_PARTICIPATIONS + 1, np.int64)
    assert len(unpacked(packed(many))) == len(many)
    with formats.bounded(True):
        assert len(unpacked(packed(many[:-1]))) == len(many) - 1
    for values in (many, np.zeros(formats.MAX_INFLATED + 1, np.int8)):
        with formats.bounded(True), pytest.raises(CertificateError, match="large=True"):
            unpacked(packed(values))


@pytest.mark.parametrize("names", [["a", "a", "b"], ["a", "b"], ["a", "b", "c", "d"], None])
def test_names_are_one_for_each_unit(names):
    """One name for two units would join their steps."""
    shown, own = without_names(KnownOrder([["x", "y"], ["z"], ["x"]]))
    assert with_names(shown, own) == KnownOrder([["x", "y"], ["z"], ["x"]])
    with pytest.raises(ArgumentError, match="names must be 3 distinct ids"):
        with_names(shown, names)


@pytest.mark.parametrize(
    ("b", "gap", "comes"), [(3, 2, False), (3, 3, True), (2, 1, False), (2, 2, True), (1, 1, True)]
)
def test_a_unit_comes_back_from_its_distance_on_and_no_step_before(b: int, gap: int, comes: bool) -> None:
    """By either rule that keeps a distance: a clause that is one short lets in what the sensitivity is not for."""
    for rule in (participation.MinSeparation(9, b), participation.MinSeparationSampling(9, b, 0.5)):
        ((_, early), *_) = rule.refusals(4 + gap, np.array([4]), np.array([1]))
        assert early.tolist() == [not comes]
        assert rule.pattern.allows([4, 4 + gap]) == comes


def test_no_two_orders_take_a_loader_for_their_own() -> None:
    for epochs, per_epoch in [(1, 4), (2, 4), (3, 1)]:
        for steps in {epochs * per_epoch, epochs * per_epoch - 1} - {0}:
            facts = LoaderFacts(steps, epochs, per_epoch)
            by_kind = [
                facts._replace(is_once=True, is_fixed=True), facts._replace(is_once=True),
                facts._replace(probability=0.25), facts._replace(units=[[0]] * steps), facts,
            ]  # fmt: skip
            taken = [[type(found) for cls in ORDERS if (found := cls.recognise(one)) is not None] for one in by_kind]
            assert [len(found) for found in taken] == [1, 1, 1, 1, 0]
            assert [[type(recognised(one))] for one in by_kind[:-1]] == taken[:-1]
            assert recognised(facts) is None


def test_more_participations_than_steps_are_as_many_as_fit():
    """A plan for them is that for n of n, and its ledger lets as many in."""
    for n, b, k, fits in ((2, 1, 10, 2), (4, 3, 10, 2), (4, 9, 2, 1)):
        assert MinSeparation(n, b, k).pattern == MinSeparation(n, b, fits).pattern
        assert MinSeparation(n, b, k).max_participations == fits
        assert FixedOrder(n, k, b).max_participations == fits
        many, few = (
            plan(order=MinSeparation(n, b, most), batch_size=4, noise_multiplier=1.0, delta=1e-3, unit="user")
            for most in (k, fits)
        )
        assert (many.epsilon, many.noise_std, many.sensitivity) == (few.epsilon, few.noise_std, few.sensitivity)
        assert f"at most {fits} of {n} steps" in many.participation.describe()
