"""What single units have of a budget, where orders are known: a file of its own, as secret as who was in which step.

    file    one JSON line with a key, then for each entry its units: (keyed hash of the id, mu) each

The hash keeps names out of sight, and no more: who has this file can try ids. The budget file says where the units of
an entry are and, under the key, what they were. Where this file is lost, cut or altered, such an entry counts for
everybody with the largest mu of its units: never less than it should.

One unit has one hash only under one key. So the first entry with units binds the budget to the fingerprint of the key;
where the file is gone, or another is in its place, no more units are entered one by one.
"""

import hashlib
import hmac
import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anyorder._sealed import sync_folder
from anyorder.budget.entries import UnitsAt
from anyorder.errors import BudgetError

__all__ = ["Own", "UnitFile"]

_FORMAT = "anyorder-budget-units/1"
_ROW = np.dtype([("id", "<u8"), ("mu", "<f8")])


class Own:
    """What units have beyond what everybody has: sums of mu^2, rounded up.

    Attributes:
        ids: (U,) hashes, rising. Two ids of one hash, of 2^64, would be counted as one unit: never too little.
        squares: (U,) their sums.
    """

    def __init__(self) -> None:
        self.ids = np.empty(0, np.uint64)
        self.squares = np.empty(0)

    def add(self, ids: NDArray[np.uint64], squares: NDArray[np.float64]) -> None:
        """Take the parts of one entry in; each id may come once."""
        every, place = np.unique(np.concatenate([self.ids, ids]), return_inverse=True)
        sums = np.zeros(len(every))
        sums[place[: len(self.ids)]] = self.squares
        sums[place[len(self.ids) :]] = np.nextafter(sums[place[len(self.ids) :]] + squares, np.inf)
        self.ids, self.squares = every, sums

    def worst(self) -> float:
        """The largest sum; 0 for nobody."""
        return float(self.squares.max()) if len(self.squares) else 0.0


class UnitFile:
    """`.NAME.units` beside a budget file NAME."""

    def __init__(self, budget: Path) -> None:
        self.path = budget.with_name(f".{budget.name}.units")

    def hashed(
        self, ids: list[int] | list[str], mus: NDArray[np.float64], bound: str | None = None, *, make: bool = True
    ) -> tuple[bytes, NDArray[np.void]]:
        """(key, the rows of these units), under the key of the file.

        Args:
            bound: fingerprint of the key that the budget's entries have; None before the first. Then the file is made
                where there is none.
            make: False to write nothing: where there is no file, no unit has anything that these could add to.

        Raises: BudgetError if the file cannot be made or read, or is not the one that the budget is bound to.
        """
        key = self._key()
        if bound is not None and (key is None or _fingerprint(key) != bound):
            what = "is gone, or cannot be read" if key is None else "is not the one that belongs to this budget"
            raise BudgetError(
                f"{self.path}, which keeps what units have, {what}: how much these units have is not known. Nothing "
                "was spent; put the file back, or spend with named=False, which counts for everybody"
            )
        key = key or (self._made() if make else os.urandom(32))
        rows = np.empty(len(ids), _ROW)
        rows["id"] = [
            int.from_bytes(hashlib.blake2b(_raw(one), digest_size=8, key=key).digest(), "little") for one in ids
        ]
        rows["mu"] = mus
        rows = rows[np.lexsort((rows["mu"], rows["id"]))]
        last = np.append(rows["id"][1:] != rows["id"][:-1], True)
        return key, rows[last]  # the larger of two units of one hash

    def write(self, key: bytes, rows: NDArray[np.void]) -> UnitsAt:
        """Bring the rows to the disk, behind all that are there. Raises: BudgetError; then nothing refers to them."""
        data = rows.tobytes()
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            try:
                place = os.fstat(descriptor).st_size
                if os.write(descriptor, data) != len(data):
                    raise OSError("not all bytes were written")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as problem:
            raise BudgetError(
                f"{self.path}, which keeps what units have, cannot be written: {problem.strerror or problem}. Nothing "
                "was spent; make room, and ask again"
            ) from problem
        return UnitsAt(offset=place, size=len(data), digest=_digest(key, place, data), key=_fingerprint(key))

    def fingerprint(self) -> str | None:
        """Of the key that the file has now; None where there is none to be read."""
        key = self._key()
        return None if key is None else _fingerprint(key)

    def read(self, at: UnitsAt) -> NDArray[np.void] | None:
        """The rows of an entry; None where they are lost or are not those that were written."""
        key = self._key()
        if key is None or _fingerprint(key) != at.key:
            return None
        try:
            with open(self.path, "rb") as file:
                file.seek(at.offset)
                data = file.read(at.size)
        except (OSError, ValueError):  # then the entry counts for everybody
            return None
        if not hmac.compare_digest(_digest(key, at.offset, data), at.digest):
            return None
        return np.frombuffer(data, _ROW)

    def _key(self) -> bytes | None:
        try:
            with open(self.path, "rb") as file:
                head = json.loads(file.readline(200))
            return bytes.fromhex(head["key"]) if head["format"] == _FORMAT else None
        except (OSError, ValueError, KeyError, TypeError):  # then no entry has units
            return None

    def _made(self) -> bytes:
        key = os.urandom(32)
        head = json.dumps({"format": _FORMAT, "key": key.hex()}).encode() + b"\n"
        beside = self.path.with_name(self.path.name + ".part")
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, head)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(beside, self.path)  # one that cannot be read any more: its entries count for everybody
            sync_folder(self.path.parent)
        except OSError as problem:
            raise BudgetError(f"{self.path} cannot be written: {problem.strerror}; nothing was spent") from problem
        return key


def _raw(one: int | str) -> bytes:
    """An integer as its digits: whoever is 7 in one plan and "7" in the next is one person."""
    return str(one).encode("utf-8", "surrogatepass")


def _fingerprint(key: bytes) -> str:
    return hashlib.sha256(b"anyorder budget units" + key).hexdigest()[:32]


def _digest(key: bytes, place: int, data: bytes) -> str:
    return hmac.new(key, place.to_bytes(8, "little") + data, "sha256").hexdigest()
