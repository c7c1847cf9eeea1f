"""Numbers of ids, in the order in which they came: open addressing, by a library compiled with the package.

`ANYORDER_KERNEL=reference`, or no library: NumPy makes the same table, slower.
"""

import ctypes
import functools
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder._library import load

Integers = NDArray[np.int64]
Entries = NDArray[np.void]
"""Each an id and its number, -1 where the place is free."""


class IdTable:
    """A number for each id that was entered. Nothing is taken out.

    Where an id stands in memory depends on a salt, so that nobody can choose ids that meet; no number does.

    Args:
        words: of 8 bytes, in an id.

    Cost: an id takes 16 to 24 bytes, of two words 27 to 40; while the table grows the old one stays beside it.
    """

    def __init__(self, words: int = 1) -> None:
        self.count = 0
        self._words, self._salt = words, secrets.randbits(64)
        self._entries = self._free(64)

    def _free(self, size: int) -> Entries:
        entries = np.zeros(size, [("id", "<i8", (self._words,)), ("number", "<i4")])
        entries["number"] = -1
        return entries

    def find(self, ids: Integers) -> Integers:
        """(m,) the number of each of the (m, words) ids; -1 for those that were not entered."""
        library = _library()
        if library is None:
            return self._find(ids)
        numbers = np.empty(len(ids), np.int64)
        library.anyorder_find(*self._where(self._entries), _address(ids), len(ids), _address(numbers))
        return numbers

    def enter(self, ids: Integers) -> None:
        """Give each of the (m, words) ids, in their order, the next number; one that is there keeps its own."""
        needed, entries = self.count + len(ids), self._entries
        if 4 * needed > 3 * len(entries):
            old = entries[entries["number"] >= 0]
            entries = self._free(3 * max(len(entries), needed) // 2)
            self._enter(entries, np.ascontiguousarray(old["id"]), old["number"].astype(np.int64))
        self._enter(entries, ids, np.arange(self.count, needed))
        self._entries, self.count = entries, needed  # broken off before, what is known stays known

    def _where(self, entries: Entries) -> tuple[int, int, int, int]:
        return _address(entries), len(entries), self._words, self._salt

    def _places(self, entries: Entries, ids: Integers) -> Integers:
        x = ids[:, 0].astype(np.uint64) ^ np.uint64(self._salt)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x >> np.uint64(32)) * np.uint64(len(entries)) >> np.uint64(32)).astype(np.int64)

    def _find(self, ids: Integers) -> Integers:
        """`find` in NumPy: all ids look at their places, those that are not done at the next ones, and so on."""
        numbers, left, at = np.full(len(ids), -1, np.int64), np.arange(len(ids)), self._places(self._entries, ids)
        while len(left):
            entries = self._entries[at]
            same = (entries["id"] == ids[left]).all(1)
            numbers[left[same]] = entries["number"][same]  # -1 for an id that equals what a free entry has
            go = (entries["number"] >= 0) & ~same
            left, at = left[go], (at[go] + 1) % len(self._entries)
        return numbers

    def _enter(self, entries: Entries, ids: Integers, numbers: Integers) -> None:
        library = _library()
        if library is not None:
            library.anyorder_enter(*self._where(entries), _address(ids), len(ids), _address(numbers))
            return
        new = np.empty(len(ids), entries.dtype)
        new["id"], new["number"] = ids, numbers
        new = new[::-1]  # of those that meet at a place the last one is written: the first
        at = self._places(entries, new["id"])
        while len(new):
            free = entries["number"][at] < 0
            entries[at[free]] = new[free]
            go = (entries["id"][at] != new["id"]).any(1)
            new, at = new[go], (at[go] + 1) % len(entries)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@functools.cache
def _library() -> ctypes.CDLL | None:
    file = Path(__file__).with_name("_id_table.so")
    library = None if os.environ.get("ANYORDER_KERNEL") == "reference" else load(file, ("_id_table.cpp",))
    if library is not None:
        number, pointer = ctypes.c_uint64, ctypes.c_void_p
        for loop in (library.anyorder_find, library.anyorder_enter):
            loop.argtypes, loop.restype = [pointer, number, number, number, pointer, number, pointer], None
    return library
