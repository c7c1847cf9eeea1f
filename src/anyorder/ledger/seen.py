"""What was seen of every unit: its last step, its number of steps, and the most and the nearest of all."""

from itertools import repeat

import numpy as np

from anyorder.ledger.ids import Integers, Units, plain

__all__ = ["Seen"]

_DENSE = 1 << 22  # integer ids below this index the tables directly; other ids go through a dictionary


class Seen:
    """The last step and the number of steps of every unit that was seen.

    Attributes:
        most: the largest number of steps of a unit.
        nearest: the smallest distance between two steps of a unit; None while none came twice.
    """

    def __init__(self) -> None:
        self.most = 0
        self.nearest: int | None = None
        self._last = np.full(0, -1, np.int32)  # -1: never
        self._count = np.zeros(0, np.int32)
        self._slots: dict[int | str, int] | None = None  # None: integer ids are their own slots
        self._found: tuple[Units, Integers] | None = None  # what was looked up last: an add follows a look

    def look_up(self, ids: Units) -> tuple[Integers, Integers]:
        """(last step or -1, number of steps) of each unit."""
        return self._of(self._find(ids))

    def _of(self, slots: Integers) -> tuple[Integers, Integers]:
        last, count = np.full(len(slots), -1, np.int64), np.zeros(len(slots), np.int64)
        there = (slots >= 0) & (slots < len(self._last))
        last[there], count[there] = self._last[slots[there]], self._count[slots[there]]
        return last, count

    def _find(self, ids: Units) -> Integers:
        """(m,) the slot of each unit, -1 for those never seen."""
        if self._found is not None and self._found[0] is ids:
            return self._found[1]
        if self._slots is None and not isinstance(ids, list):
            slots = np.where((ids >= 0) & (ids < len(self._last)), ids, -1)
        else:
            known = self._slots or {}
            slots = np.fromiter(map(known.get, plain(ids), repeat(-1)), np.int64, len(ids))
        self._found = ids, slots
        return slots

    def numbers(self, names: list[str]) -> tuple[Integers, list[str]]:
        """Numbers of names by when they first came, in one step in their order; and the names that are new."""
        slots = self._find(names).copy()
        places = np.flatnonzero(slots < 0)
        slots[places] = len(self._slots or {}) + np.arange(len(places))
        return slots, [names[i] for i in places.tolist()]

    def names(self) -> list[str]:
        """All names that were seen, by their numbers."""
        return list(map(str, self._slots or {}))

    def add(self, t: int, ids: Units) -> None:
        """Note that these units, which are distinct, were in step t."""
        if not len(ids):
            return
        if self._slots is None and (isinstance(ids, list) or ids[0] < 0 or ids[-1] >= _DENSE):
            self._go_sparse()
        if self._slots is None:
            assert not isinstance(ids, list)
            slots = ids
        else:
            slots, known = self._find(ids).copy(), self._slots
            named = plain(ids)
            for i in np.flatnonzero(slots < 0).tolist():
                slots[i] = known.setdefault(named[i], len(known))
        self._add(t, slots)

    def add_numbers(self, t: int, slots: Integers, new: list[str]) -> None:
        """`add` for units by their `numbers`."""
        if self._slots is None:
            self._go_sparse()
        known = self._slots
        assert known is not None
        known.update(zip(new, range(len(known), len(known) + len(new)), strict=True))
        self._add(t, slots)

    def look_up_numbers(self, slots: Integers) -> tuple[Integers, Integers]:
        """`look_up` for units by their `numbers`."""
        return self._of(slots)

    def _add(self, t: int, slots: Integers) -> None:
        self._found = None
        self._grow(int(slots.max()) + 1)
        last = self._last[slots]
        before = last[last >= 0]
        if len(before):
            gap = t - int(before.max())
            self.nearest = gap if self.nearest is None else min(gap, self.nearest)
        self._last[slots] = t
        self._count[slots] += 1
        self.most = max(self.most, int(self._count[slots].max()))

    def _go_sparse(self) -> None:
        seen = np.flatnonzero(self._count)
        self._slots = {unit: slot for slot, unit in enumerate(seen.tolist())}
        self._last, self._count = self._last[seen], self._count[seen]
        self._found = None

    def _grow(self, size: int) -> None:
        more = max(size, 2 * len(self._last)) - len(self._last)
        if size > len(self._last):
            self._last = np.concatenate([self._last, np.full(more, -1, np.int32)])
            self._count = np.concatenate([self._count, np.zeros(more, np.int32)])
