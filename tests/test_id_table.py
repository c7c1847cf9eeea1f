"""The table of ids beside a dict, compiled and in NumPy; the history of units beside one that is kept in dicts."""

import numpy as np
import pytest

from anyorder import _ids as id_table
from anyorder._ids import IdTable
from anyorder.ledger import Ledger, UnitHistory, distinct, plain
from anyorder.participation import MinSeparation

LOW, HIGH = -(1 << 63), (1 << 63) - 1


@pytest.fixture(params=["compiled", "NumPy"], autouse=True)
def loops(request, monkeypatch):
    if request.param == "NumPy":
        monkeypatch.setattr(id_table, "_library", lambda: None)
    elif id_table._library() is None:
        pytest.skip("no compiled library")


def families(generator):
    """Ids that could meet: spread, in a row, equal but for their high or low bits, at the ends."""
    yield generator.integers(LOW, HIGH, 3000, endpoint=True)
    yield np.arange(-1500, 1500)
    yield np.arange(3000) << 40
    yield (np.arange(3000) << 20) + 7
    yield np.array([0, -1, LOW, HIGH, LOW + 1, HIGH - 1, 1, 1 << 32, -(1 << 32)])


@pytest.mark.parametrize("words", [1, 2])
def test_numbers_are_those_of_a_dict(words):
    generator = np.random.default_rng(3)
    for family in families(generator):
        ids = np.zeros((len(family), words), np.int64)
        ids[:, -1] = generator.permutation(family)  # of two words all begin alike: the longest search there is
        ids = np.unique(ids[:100] if words == 2 else ids, axis=0)
        generator.shuffle(ids)
        table, known = IdTable(words), {}
        for start in range(0, len(ids), 211):
            new = ids[start : start + 211]
            table.enter(new)
            for row in new.tolist():
                known[tuple(row)] = len(known)
            asked = ids[generator.integers(0, len(ids), 500)]
            assert table.find(asked).tolist() == [known.get(tuple(row), -1) for row in asked.tolist()]
        assert table.count == len(known)


def test_of_two_that_cannot_be_told_apart_the_first_is_found():
    """After the table has grown as well: they are taken for one unit, and that unit has a record."""
    table = IdTable()
    table.enter(np.array([[5], [5], [6], [5]]))
    table.enter(np.arange(100, 1100)[:, None])
    assert table.find(np.array([[5], [6], [99], [100]])).tolist() == [0, 2, -1, 4]


def test_two_names_of_one_hash_are_refused_too_often_and_not_too_seldom(monkeypatch):
    """Whether they come together or one after the other, over a save as well."""
    monkeypatch.setattr("anyorder.ledger._words", lambda names: np.array([[len(name), 0] for name in names]))
    for together in (True, False):
        ledger = Ledger(MinSeparation(9, b=3, k=2))
        ledger.record(0, ["a", "b"] if together else ["a"])
        assert ledger.offenders(1, ["a", "b", "cc"]) == ["a", "b"]
        for t in range(1, 4):
            ledger.record(t, ["b"] if t == 3 else [])
        ledger = Ledger.from_bytes(ledger.participation, ledger.to_bytes())
        assert ledger.offenders(5, ["a", "b", "cc"]) == ["a", "b"]
        assert ledger.offenders(8, ["a", "b", "cc"]) == ["a", "b"]


@pytest.mark.parametrize("kind", ["small", "spread", "names", "small, then spread"])
def test_history_is_that_of_dicts(kind):
    generator = np.random.default_rng(4)
    people = {
        "small": np.arange(900), "spread": generator.integers(LOW, HIGH, 900),
        "names": [f"\0{i}\0" for i in range(900)], "small, then spread": np.arange(900) * (1 << 13),
    }[kind]  # fmt: skip
    people = distinct(people)
    seen, last, count, nearest = UnitHistory(), {}, {}, None
    for t in range(60):
        some = np.sort(generator.choice(min(len(people), 30 * (t + 1)), 25, replace=False))
        units = [people[i] for i in some] if isinstance(people, list) else people[some]
        found = seen.look_up(units)
        assert found[0].tolist() == [last.get(unit, -1) for unit in plain(units)]
        assert found[1].tolist() == [count.get(unit, 0) for unit in plain(units)]
        seen.add(t, units)
        for unit in plain(units):
            if unit in last:
                nearest = min(nearest or 99, t - last[unit])
            last[unit], count[unit] = t, count.get(unit, 0) + 1
        assert (seen.most, seen.nearest) == (max(count.values()), nearest)
