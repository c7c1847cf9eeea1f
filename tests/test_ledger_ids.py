"""A unit has one name, whatever type it comes as."""

import enum

import numpy as np
import pytest

from anyorder.clipping.bounded import bounded_sum
from anyorder.errors import ArgumentError, ParticipationError
from anyorder.ledger import Ledger, as_units
from anyorder.participation import KnownOrder, SingleEpoch


class Owner(str, enum.Enum):  # noqa: UP042 - StrEnum has another str()
    A = "hospital-a"


class Secret(str):
    def __str__(self):
        return "***"


class Number(enum.IntEnum):
    X = 3


class Odd(int):
    def __int__(self):
        return 5

    __index__ = __int__


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ([Owner.A], ["hospital-a"]),
        ([Secret("a"), "b"], ["a", "b"]),
        ([np.str_("a")], ["a"]),
        ([Number.X, np.int32(4), np.uint64(7)], [3, 4, 7]),
        ([Odd(1), 2], [1, 2]),
        (np.array([Odd(1), 2], object), [1, 2]),
    ],
)
def test_a_subclass_is_the_plain_value_that_it_equals(given, plain):
    assert list(as_units(given)) == plain
    assert {type(unit) for unit in as_units(given)} <= {str, np.int64}
    ledger = Ledger(SingleEpoch(4))
    ledger.record(0, given)
    with pytest.raises(ParticipationError):
        ledger.check(1, plain[:1])


@pytest.mark.parametrize("given", [[True], [1, True], [np.bool_(1)], [1.0], [2**64], [np.uint64(2**63)]])
def test_what_is_no_id_is_refused(given):
    with pytest.raises(ArgumentError):
        as_units(given)


@pytest.mark.parametrize("again", [" ann", "ann\n", "\u00a0ann"])
def test_white_space_around_a_name_makes_no_second_person(again):
    ledger = Ledger(SingleEpoch(4))
    ledger.record(0, ["ann", "ben"])
    with pytest.raises(ParticipationError):
        ledger.check(1, [again])
    assert len(KnownOrder([["ann"], [again]]).units) == 1


def test_an_accent_typed_in_two_ways_is_one_person():
    composed, decomposed = "Zo\u00eb", "Zoe\u0308"
    ledger = Ledger(SingleEpoch(4))
    ledger.record(0, [composed])
    with pytest.raises(ParticipationError):
        ledger.check(1, [decomposed])
    total = bounded_sum(np.ones((2, 4)), [composed, decomposed], clip_norm=1.0)
    assert np.linalg.norm(total) <= 1.0  # and not 2: one vector of one person
    assert len(KnownOrder([[composed], [decomposed]]).units) == 1
