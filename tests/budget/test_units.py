"""The secret file of what units have: one key a file, hashes that keep kinds apart, rows bound to their place."""

import os

import numpy as np
import pytest

from anyorder.budget import account
from anyorder.budget.account import Own, UnitFile
from anyorder.errors import BudgetError


@pytest.fixture
def file(tmp_path):
    return UnitFile(tmp_path / "people.budget")


def entered(file, ids, mus):
    key, rows = file.hashed(ids, np.array(mus, float))
    return file.write(key, rows), rows


def test_rows_come_back_and_the_larger_of_two_of_one_unit_counts(file):
    at, rows = entered(file, ["ann", "bob", "ann"], [0.3, 0.2, 0.1])
    assert sorted(rows["mu"].tolist()) == [0.2, 0.3]
    assert file.read(at).tolist() == rows.tolist()
    assert np.all(np.diff(rows["id"].astype(object)) > 0)


def test_a_unit_has_one_hash_in_a_file_and_another_in_the_next(file, tmp_path):
    _, first = entered(file, ["ann"], [0.1])
    _, again = entered(UnitFile(tmp_path / "people.budget"), ["ann"], [0.2])
    _, other = entered(UnitFile(tmp_path / "other.budget"), ["ann"], [0.1])
    assert first["id"] == again["id"] != other["id"]
    assert file.hashed(["ann"], np.ones(1))[0] != UnitFile(tmp_path / "other.budget").hashed(["ann"], np.ones(1))[0]


def test_an_integer_is_who_its_digits_are(file):
    """Two people, if somebody calls them 1 and "1", would have too much; one, if they were apart, too little."""
    _, rows = entered(file, ["1"], [0.1])
    _, same = entered(file, [1], [0.1])
    _, other = entered(file, ["01"], [0.1])
    assert rows["id"] == same["id"] != other["id"]


@pytest.mark.parametrize("change", ["mu", "place", "key", "cut", "format"])
def test_rows_that_were_altered_moved_or_lost_are_none(file, change):
    at, _ = entered(file, ["ann"], [0.3])
    behind, _ = entered(file, ["bob"], [0.1])
    raw = bytearray(file.path.read_bytes())
    if change == "mu":
        raw[at.offset + 15] ^= 1
    elif change == "place":  # a louder unit's row in the place of a quieter one's, each with its own digest
        raw[at.offset : at.offset + 16] = raw[behind.offset : behind.offset + 16]
        at = account.UnitsAt(offset=at.offset, size=16, digest=behind.digest, key=behind.key)
    elif change == "key":
        raw[raw.index(b'"key": "') + 8] ^= 1
    elif change == "cut":
        raw = raw[: at.offset + 8]
    else:
        raw = raw.replace(b"units/1", b"units/2")
    file.path.write_bytes(bytes(raw))
    assert file.read(at) is None


def test_a_digest_of_rows_is_made_with_the_key(file):
    """Else whoever reads the public file could try the units of an entry."""
    _, rows = entered(file, ["ann"], [0.3])
    digests = {account._digest(key, 100, rows.tobytes()) for key in (bytes(32), bytes(31) + b"1", b"k")}
    assert len(digests) == 3


def test_rows_are_on_the_disk_before_an_entry_tells_of_them(file, monkeypatch):
    entered(file, ["ann"], [0.3])
    synced = []
    real = os.fsync

    def sync(descriptor):
        synced.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(account.os, "fsync", sync)
    at, _ = entered(file, ["bob"], [0.1])
    assert synced == [at.offset + at.size]


def test_rows_that_are_not_written_whole_are_refused(file, monkeypatch):
    key, rows = file.hashed(["ann", "bob"], np.array([0.1, 0.2]))
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, place: real(descriptor, data[:-1], place))
    with pytest.raises(BudgetError, match="31 of 32 bytes written.*Nothing was spent"):
        file.write(key, rows)


def test_sums_of_units_are_never_below_their_parts():
    rng = np.random.default_rng(0)
    own, exact = Own(), dict.fromkeys(range(6), 0)
    for _ in range(60):
        ids = np.flatnonzero(rng.random(6) < 0.5).astype(np.uint64)
        squares = rng.random(len(ids))
        own.add(ids, squares)
        for one, square in zip(ids.tolist(), squares.tolist(), strict=True):
            exact[one] += int(square * 2**53)  # these are multiples of 2^-53
    for one, square in zip(own.ids.tolist(), own.squares.tolist(), strict=True):
        assert exact[one] <= square * 2**53 <= exact[one] * (1 + 1e-13)
    assert own.worst() == max(own.squares)
    assert Own().worst() == 0
