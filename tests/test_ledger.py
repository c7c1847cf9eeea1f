"""The ledger accepts exactly the histories that the participation allows, and remembers them."""

import hashlib
import time
from itertools import combinations

import numpy as np
import pytest
import torch

from anyorder.errors import ArgumentError, CheckpointError, ParticipationError, StepsExhaustedError, TrainingError
from anyorder.ledger import Ledger, UnitHistory, replay
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, PoissonSampling, SingleEpoch

RULES = [
    SingleEpoch(7),
    FixedOrder(8, k=3, b=3),
    FixedOrder(8, k=8, b=1),
    FixedOrder(6, k=2, b=3),
    EpochShuffle(k=2, steps_per_epoch=4),
    EpochShuffle(k=4, steps_per_epoch=2),
    EpochShuffle(k=8, steps_per_epoch=1),
    MinSeparation(8, b=3),
    MinSeparation(8, b=3, k=2),
    MinSeparation(8, b=1, k=3),
    PoissonSampling(6, 0.5),
]


def history_of(steps, n, unit):
    return [[unit] if t in steps else [] for t in range(n)]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("unit", [5, 1 << 40, "ada"])
def test_accepts_a_history_iff_it_lies_in_an_allowed_pattern(rule, unit):
    allowed = {steps for p in rule.patterns() for size in range(len(p) + 1) for steps in combinations(p, size)}
    for size in range(rule.n + 1):
        for steps in combinations(range(rule.n), size):
            try:
                replay(rule, history_of(steps, rule.n, unit))
                accepted = True
            except ParticipationError:
                accepted = False
            assert accepted == (steps in allowed), steps


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_many_units_are_judged_like_one(rule):
    generator = np.random.default_rng(0)
    for kind in (lambda i: i, lambda i: i * (1 << 35) - 7, str):
        ledger, alone = Ledger(rule), {i: Ledger(rule) for i in range(12)}
        for t in range(rule.n):
            for _ in range(6):  # tries at this step; the first that passes is recorded
                chosen = generator.choice(12, size=generator.integers(0, 6), replace=False).tolist()
                good = True
                for i in chosen:
                    try:
                        alone[i].check(t, [i])
                    except ParticipationError:
                        good = False
                try:
                    ledger.check(t, [kind(i) for i in chosen])
                    accepted = True
                except ParticipationError:
                    accepted = False
                assert accepted == good
                if good:
                    break
            chosen = chosen if good else []
            ledger.record(t, [kind(i) for i in chosen])
            for i, other in alone.items():
                other.record(t, [i] if i in chosen else [])


@pytest.mark.parametrize("kind", [str, int])
def test_what_was_checked_vouches_for_no_other_units(kind):
    """Names are compared, not counted: a list as long as the one that was checked is held to the rule itself."""
    first, second = [kind(1), kind(2)], [kind(3), kind(4)]
    ledger = Ledger(SingleEpoch(3))
    ledger.check(0, first)
    ledger.record(0, second)
    assert [list(map(kind, units)) for units in ledger.history()] == [second]
    ledger.check(1, first)
    with pytest.raises(ParticipationError, match="step 1"):
        ledger.record(1, second)
    assert ledger.step == 1


def test_the_nearest_return_is_that_of_the_one_who_came_last():
    """Of several who come back in one step: the certificate claims that all were at least so far apart."""
    ledger = replay(MinSeparation(9, 1), [["a"], [], [], ["b"], ["a", "b"], [], [], ["a", "b"]])
    assert ledger.realised_bounds() == (3, 1)


def test_known_order_takes_the_planned_units_and_forgives_absence():
    ledger = Ledger(KnownOrder([["a", "b"], ["c"], ["a"]]))
    ledger.record(0, ["b"])
    with pytest.raises(ParticipationError, match="step 1: .* units that were planned for it"):
        ledger.check(1, ["a", "c"])
    assert ledger.offenders(1, ["a", "c"]) == ["a"]
    ledger.record(1, [])
    ledger.record(2, ["a"])
    assert [list(units) for units in ledger.history()] == [["b"], [], ["a"]]
    numbers = Ledger(KnownOrder([[1, 2], [3]]))
    numbers.record(0, np.array([2, 1]))
    with pytest.raises(ParticipationError):
        numbers.record(1, [1])


def test_messages_name_rule_and_remedy():
    ledger = replay(MinSeparation(9, b=4), [[1, 2, 3, 4, 5], [], []])
    with pytest.raises(ParticipationError) as caught:
        ledger.record(3, [1, 2, 3, 4, 9])
    text = str(caught.value)
    assert "step 3: the plan covers each unit in at most 3 of 9 steps, at least 4 apart" in text
    assert "a unit may come back at least b=4 steps after its last" in text
    assert "Nothing was changed" in text


@pytest.mark.parametrize(
    "rule",
    [SingleEpoch(7), FixedOrder(8, 3, 3), EpochShuffle(2, 4), MinSeparation(8, 3), MinSeparation(8, 1, k=1)],
    ids=repr,
)
def test_messages_tell_nobody_and_no_number_of_units(rule):
    """One offender or many, whoever they are: one text."""
    texts = set()
    for many in ([5], [5, 6, 7], [1 << 40], ["ada"], ["ada", "bob"]):
        ledger = replay(rule, [many])
        with pytest.raises(ParticipationError) as caught:
            ledger.check(1, many)
        texts.add(str(caught.value))
        with pytest.raises(ParticipationError) as caught:
            Ledger.from_bytes(rule, replay(PoissonSampling(8, 0.5), [many, many]).to_bytes())
        texts.add(str(caught.value))
    assert len(texts) == 1
    with pytest.raises(ArgumentError) as refused:
        Ledger(rule).check(0, "ada")
    assert "ada" not in str(refused.value)


def test_offenders_are_told_to_who_asks():
    ledger = replay(MinSeparation(9, b=4, k=2), [[1, 2, 3], [9], [], [], [1]])
    before = ledger.to_bytes()
    assert ledger.offenders(5, [3, 4, 9, 2]).tolist() == []
    assert ledger.offenders(5, [1, 4, 2, 1]).tolist() == [1]
    assert ledger.offenders(8, [1, 4, 9]).tolist() == [1]  # for the third time
    assert ledger.offenders(4, [9, 3]).tolist() == [9]
    assert replay(PoissonSampling(3, 0.5), [["a"]]).offenders(1, ["a", "b"]) == []
    assert replay(SingleEpoch(3), [["a", "c"]]).offenders(1, ["c", "b", "a"]) == ["a", "c"]
    with pytest.raises(ArgumentError, match="from 0 to 8"):
        ledger.offenders(9, [1])
    assert ledger.to_bytes() == before


@pytest.mark.parametrize("units", [[1], [7, 1], [7, 7], [[1]], [1.5], "ab", ["x"], [True], [2**63], [None]])
def test_refusal_and_check_change_nothing(units):
    ledger = replay(SingleEpoch(4), [[1, 2], [3]])
    before = ledger.to_bytes(), ledger.step, ledger.digest()
    if units == [7, 7]:
        ledger.check(2, units)  # accepted, and still nothing changes
    else:
        with pytest.raises((ParticipationError, ArgumentError)):
            ledger.record(2, units)
    assert (ledger.to_bytes(), ledger.step, ledger.digest()) == before
    ledger.record(2, [7])


def test_steps_come_in_order_and_end():
    ledger = Ledger(SingleEpoch(2))
    with pytest.raises(TrainingError, match="the next step is 0, got t=1"):
        ledger.record(1, [1])
    ledger.record(0, [1])
    with pytest.raises(TrainingError, match="the next step is 1, got t=0"):
        ledger.check(0, [2])
    ledger.record(1, [2])
    with pytest.raises(StepsExhaustedError, match="its 2 steps are 0 to 1"):
        ledger.check(2, [])


def test_a_unit_twice_in_a_step_counts_once():
    ledger = Ledger(MinSeparation(6, b=2, k=2))
    ledger.record(0, [4, 4, 4])
    ledger.record(1, [])
    ledger.record(2, [4, 4])
    with pytest.raises(ParticipationError, match="at most k=2 times"):
        replay(MinSeparation(6, b=2, k=2), [[4], [], [4], [], [4]])


def test_one_kind_of_unit():
    ledger = replay(SingleEpoch(5), [[], ["a"]])
    with pytest.raises(ArgumentError, match="units must be strings, as in earlier steps, got integers"):
        ledger.check(2, [1])
    with pytest.raises(ArgumentError, match="all integers or all strings"):
        ledger.check(2, ["b", 1])
    with pytest.raises(ArgumentError, match="one dimension"):
        ledger.check(2, np.zeros((2, 2), int))
    with pytest.raises(ArgumentError, match="int64"):
        Ledger(SingleEpoch(1)).check(0, np.array([2**63], np.uint64))


def test_digest_is_that_of_the_history_not_of_the_containers():
    forms = [
        [[3, 1, 2], [], [-5]],
        [np.array([2, 3, 1, 1], np.int32), np.array([]), np.array([-5])],
        [torch.tensor([1, 2, 3]), (), {-5}],
        [(np.int64(i) for i in (3, 2, 1)), iter(()), range(-5, -4)],
    ]
    digests = {replay(SingleEpoch(3), form).digest() for form in forms}
    assert len(digests) == 1
    chain = hashlib.sha256(b"anyorder ledger 1\n").digest()
    for t, units in enumerate([[1, 2, 3], [], [-5]]):
        chain = hashlib.sha256(chain + t.to_bytes(8, "little") + b"i" + np.array(units, "<i8").tobytes()).digest()
    assert digests == {chain.hex()}
    text = {replay(SingleEpoch(2), form).digest() for form in ([["b", "a"], ["ü"]], [np.array(["a", "b"]), {"ü"}])}
    assert len(text) == 1


def test_digest_tells_histories_apart():
    histories = [
        [], [[]], [[], []], [[1]], [[], [1]], [[1], []], [[1, 2]], [[1], [2]], [[2], [1]], [["1"]], [["1", "2"]],
        [["12"]], [["1"], ["2"]], [["1\0"]], [["\ud800"]], [[256]], [[0]], [[-1]],
    ]  # fmt: skip
    assert len({replay(SingleEpoch(2), history).digest() for history in histories}) == len(histories)


HISTORIES = [
    [],
    [[], []],
    [[0, 5, 300, 70_000, 1 << 33, (1 << 63) - 1], [], [-(1 << 63), 7]],
    [["b", "", "a\0", "ü" * 300], [], ["\ud800"]],
    [list(range(0, 5000, 3)), list(range(1, 5000, 3))],
]


@pytest.mark.parametrize("history", HISTORIES)
def test_saved_and_restored_ledger_is_the_same_and_goes_on(history):
    rule = SingleEpoch(9)
    ledger = replay(rule, history)
    back = Ledger.from_bytes(rule, ledger.to_bytes())
    assert [list(units) for units in back.history()] == [sorted(units) for units in history]
    assert (back.digest(), back.step, back.to_bytes()) == (ledger.digest(), len(history), ledger.to_bytes())
    for unit in [unit for units in history for unit in units][:3]:
        with pytest.raises(ParticipationError):
            back.check(back.step, [unit])


def test_cut_or_altered_bytes_are_refused():
    rule = EpochShuffle(k=2, steps_per_epoch=3)
    data = replay(rule, [[1, 2], [3], [], [3, 1]]).to_bytes()
    for cut in range(len(data)):
        with pytest.raises(CheckpointError):
            Ledger.from_bytes(rule, data[:cut])
    for place in range(len(data)):
        with pytest.raises(CheckpointError):
            Ledger.from_bytes(rule, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    with pytest.raises(CheckpointError):
        Ledger.from_bytes(rule, data + b"\0")


def test_altered_history_under_a_fresh_checksum_is_refused():
    data = replay(SingleEpoch(3), [[1], [2]]).to_bytes()
    other = replay(SingleEpoch(3), [[1], [3]]).to_bytes()
    head = len(b"anyorder ledger 1\n") + 4 + 32
    forged = data[:head] + other[head:-32]
    with pytest.raises(CheckpointError, match="does not follow from its history"):
        Ledger.from_bytes(SingleEpoch(3), forged + hashlib.sha256(forged).digest())


def test_restoring_under_another_rule_replays_that_rule():
    data = replay(PoissonSampling(4, 0.5), [[1], [1]]).to_bytes()
    with pytest.raises(ParticipationError):
        Ledger.from_bytes(SingleEpoch(4), data)
    with pytest.raises(StepsExhaustedError):
        Ledger.from_bytes(PoissonSampling(1, 0.5), data)


def test_realised_order_is_that_of_the_steps_taken():
    assert replay(SingleEpoch(5), [[], []]).realised() is None
    order = replay(MinSeparation(50, b=2), [["a", "b"], [], ["b"], [], []]).realised()
    assert order == KnownOrder([["a", "b"], [], ["b"], [], []])
    assert (order.n, order.max_participations, order.min_separation) == (5, 2, 2)


def test_dense_ids_then_a_sparse_one():
    ledger = replay(SingleEpoch(9), [[3, 9], [4], [1 << 50]])
    assert ledger.offenders(3, [3, 9, 4, 1 << 50, 5]).tolist() == [3, 4, 9, 1 << 50]
    for unit in (3, 9, 4, 1 << 50):
        with pytest.raises(ParticipationError):
            ledger.check(3, [unit])
    ledger.record(3, [5, 0, -1])


@pytest.mark.parametrize("late", [[1 << 50], [-1], [2**22]])
def test_what_is_known_of_dense_ids_stays_known_when_a_sparse_one_comes(late):
    """Their last step and their count: not that they came alone."""
    dense, sparse = Ledger(MinSeparation(12, b=3, k=3)), Ledger(MinSeparation(12, b=3, k=3))
    everyone = list(range(10))
    for t, units in enumerate([[3, 9], [4], [7], [3], [4, 5], [9], [3], [8, 5], late, [7]]):
        dense.record(t, units)
        sparse.record(t, [f"{unit}" for unit in units])
        for later in range(t + 1, 12):
            expected = sparse.allowed(later, [f"{unit}" for unit in everyone])
            assert np.array_equal(dense.allowed(later, everyone), expected)
        assert dense.realised_bounds() == sparse.realised_bounds()


def test_hundred_thousand_units_over_a_thousand_steps():
    units, steps, batch = 100_000, 1_000, 1_000
    rule = EpochShuffle(k=steps * batch // units, steps_per_epoch=units // batch)
    generator = np.random.default_rng(1)
    ledger, begin = Ledger(rule), time.process_time()
    for t in range(steps):
        if t % rule.steps_per_epoch == 0:
            order = generator.permutation(units)
        place = t % rule.steps_per_epoch * batch
        ledger.record(t, order[place : place + batch])
    print(f"{time.process_time() - begin:.2f} s, {len(ledger.to_bytes()) / (steps * batch):.2f} bytes a participation")
    assert len(ledger.to_bytes()) < 2 * steps * batch
    with pytest.raises(StepsExhaustedError):
        ledger.check(steps, [])


@pytest.mark.parametrize("rule", ["single_epoch", None])
def test_participation_must_be_one(rule):
    with pytest.raises(ArgumentError, match="participation"):
        Ledger(rule)


def test_nonsense_under_a_fresh_checksum_is_refused():
    data = replay(SingleEpoch(3), [[1, 9]]).to_bytes()
    place = data.index(b"1", len(b"anyorder ledger 1\n") + 4 + 32)  # the width of the distances
    for letter in b"035s\xff":
        forged = data[:place] + bytes([letter]) + data[place + 1 : -32]
        with pytest.raises(CheckpointError):
            Ledger.from_bytes(SingleEpoch(3), forged + hashlib.sha256(forged).digest())


def test_what_a_check_returned_is_not_looked_up_again_at_its_step():
    ledger = Ledger(SingleEpoch(3))
    looked_up = []
    refusals = ledger._refusals
    ledger._refusals = lambda t, ids: looked_up.append(t) or refusals(t, ids)
    allowed = ledger.check(0, [3, 1, 3])
    assert allowed.tolist() == [1, 3]
    ledger.record(0, ledger.check(0, allowed))
    assert looked_up == [0]
    with pytest.raises(ValueError, match="read-only"):
        allowed[0] = 2  # it was judged as it is
    with pytest.raises(ParticipationError):
        ledger.check(1, allowed)  # another step
    other = ledger.check(1, [2])
    ledger.check(1, [4])
    ledger.record(1, other)
    assert [units.tolist() for units in ledger.history()] == [[1, 3], [2]]


@pytest.mark.parametrize("name", [lambda i: i, lambda i: f"u{i}"], ids=["integers", "names"])
def test_what_a_check_returned_lets_no_others_in_of_the_same_number(name):
    ledger = Ledger(SingleEpoch(3))
    ledger.record(0, [name(1), name(2)])
    ledger.check(1, [name(3), name(4)])
    for others in ([name(1), name(3)], [name(1), name(2)]):
        with pytest.raises(ParticipationError):
            ledger.check(1, others)
        with pytest.raises(ParticipationError):
            ledger.record(1, others)
        ledger.check(1, [name(3), name(4)])
    ledger.record(1, [name(5), name(6)])
    assert [list(units) for units in ledger.history()][1] == [name(5), name(6)]


def test_what_was_looked_up_is_forgotten_with_a_step():
    seen, ids = UnitHistory(), np.array([1, 2])
    seen.look_up(ids)
    seen.add(0, ids)
    assert seen.look_up(ids)[0].tolist() == [0, 0]
