"""The ledger: which unit took part at which step. It refuses what the plan's participation does not cover."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder._closed import frozen
from anyorder._limits import inflate, spend_participations
from anyorder.errors import (
    ArgumentError,
    CheckpointError,
    ParticipationError,
    StepsExhaustedError,
    TrainingError,
)
from anyorder.participation import KnownOrder, Participation
from anyorder.participation.base import Refusals, Rule
from anyorder.participation.rules import RULES

__all__ = ["Ledger", "Units"]

Integers = NDArray[np.int64]

Units = Integers | list[str]
"""Ids of units: integers or strings. In a ledger's history distinct and sorted."""

_MAGIC = b"anyorder ledger 1\n"
_DENSE = 1 << 22  # integer ids below this index the tables directly; sparse ids go through a dictionary


class Ledger:
    """The record of who took part when, and the guard of the rule that the plan's sensitivity rests on.

    Steps are recorded in order, 0, 1, .., one call each; what `check` refuses has changed nothing. A unit that is
    named twice in a step counts once: its gradients are summed, then clipped once. An empty step is a step. Who is
    refused, the participation says: `Rule.refusals`, from a unit's last step and its number of steps, or
    `KnownOrder.strangers`, by name. A unit that stays away contributes zero, which is covered.

    Units are integers in int64 or strings, one kind in a ledger.

    Args:
        participation: the plan's.

    Cost: O(m log m) for a step of m units; 8 bytes for each unit ever seen, and the history, delta-coded and
    compressed to about one byte for each participation.
    """

    def __init__(self, participation: Participation) -> None:
        if type(participation) not in RULES:
            raise ArgumentError(f"participation must be one of anyorder's, got {type(participation).__name__}")
        self.participation = participation
        self._seen = _Seen()
        self._is_string: bool | None = None  # unknown until a unit comes
        self._chunks: list[bytes] = []
        self._hash = sha256(_MAGIC).digest()
        self._allowed: Integers | None = None  # at the next step; nobody can write it

    @property
    def step(self) -> int:
        """The next step; also the number of steps recorded."""
        return len(self._chunks)

    def check(self, t: int, units: Iterable[Any]) -> Units:
        """Raise unless the units may take part in step t, which must be the next one. Changes nothing.

        Returns: the units, distinct and sorted. What was returned last is not looked up again at the same step.

        Raises:
            ParticipationError: the rule forbids a unit at t. The message names no unit and no number of units, since
                messages end in logs; `offenders` does.
            StepsExhaustedError: t is not below the planned n.
            TrainingError: t is not the next step.
            ArgumentError: units are not integers or strings of this ledger's kind.
        """
        return self._checked(t, units)

    def offenders(self, t: int, units: Iterable[Any]) -> Units:
        """Those of the units that the rule forbids at step t, sorted: for the owner of the data, not for logs."""
        ids = _distinct(units)
        wrong = self._refusals(_check.integer("t", t, low=0, high=self.participation.n - 1), ids)
        places = np.flatnonzero(np.any([np.zeros(len(ids), np.bool_), *(bad for _, bad in wrong)], axis=0))
        return [ids[i] for i in places] if isinstance(ids, list) else ids[places]

    def record(self, t: int, units: Iterable[Any]) -> None:
        """`check`, then write step t down."""
        ids = self._checked(t, units)
        if len(ids):
            self._is_string = isinstance(ids, list)
        self._allowed = None
        self._seen.add(t, ids)
        self._hash = sha256(self._hash + t.to_bytes(8, "little") + canonical_bytes(ids)).digest()
        self._chunks.append(_pack(ids))

    def _checked(self, t: int, units: Iterable[Any]) -> Units:
        t = _check.integer("t", t, low=0)
        if t >= self.participation.n:
            raise StepsExhaustedError(
                f"step {t} is past the plan: its {self.participation.n} steps are 0 to {self.participation.n - 1}, and "
                "the noise is calibrated for no more; make a plan with more steps before training"
            )
        if t != self.step:
            raise TrainingError(f"steps must be recorded in order: the next step is {self.step}, got t={t}")
        if units is self._allowed:
            return self._allowed
        ids = _distinct(units)
        if len(ids) and self._is_string is not None and isinstance(ids, list) != self._is_string:
            kinds = ("integers", "strings")
            raise ArgumentError(
                f"units must be {kinds[self._is_string]}, as in earlier steps, got {kinds[not self._is_string]}; "
                "one unit under two names would be counted as two"
            )
        for rule, wrong in self._refusals(t, ids) if len(ids) else ():
            if wrong.any():
                raise ParticipationError(
                    f"step {t}: the plan covers {self.participation.describe()}; {rule}. Nothing was changed: leave "
                    "out the units that come too early or too often (ledger.offenders names them, to you alone), let "
                    "the loader keep the planned order, or plan for the order that it has"
                )
        if not isinstance(ids, list):
            ids = self._allowed = frozen(ids)
        return ids

    def _refusals(self, t: int, ids: Units) -> Refusals:
        match self.participation:
            case KnownOrder() as order:
                return order.strangers(t, ids)
            case Rule() as rule:
                return rule.refusals(t, *self._seen.look_up(ids))
            case other:
                raise AssertionError(f"{type(other).__name__} has no refusals, and all of RULES do")

    def digest(self) -> str:
        """The history as one hash, 64 hexadecimal digits: equal for equal histories, however the units were passed.

        h_t = sha256(h_{t-1} | t | sorted ids), h_{-1} a constant.
        """
        return self._hash.hex()

    def history(self) -> Iterator[Units]:
        """The units of each recorded step, sorted: (m,) int64 arrays, or lists of strings."""
        return (_unpack(chunk) for chunk in self._chunks)

    def realised(self) -> KnownOrder | None:
        """The order of the steps so far; None if no unit took part yet. Its sensitivity is at most the plan's."""
        order = [ids if isinstance(ids, list) else ids.tolist() for ids in self.history()]
        return KnownOrder(order) if any(order) else None

    def to_bytes(self) -> bytes:
        """The history and its digest, compact; `from_bytes` restores the ledger. The rule is the plan's to keep."""
        body = b"".join(len(chunk).to_bytes(4, "little") + chunk for chunk in self._chunks)
        head = _MAGIC + self.step.to_bytes(4, "little") + self._hash
        return head + body + sha256(head + body).digest()

    @classmethod
    def from_bytes(cls, participation: Participation, data: bytes) -> "Ledger":
        """The ledger that `to_bytes` wrote, replayed step by step under the rule.

        Raises: CheckpointError if the bytes are cut short or altered; ParticipationError or StepsExhaustedError if
        the history breaks the rule of this participation. The messages name no unit.
        """
        ledger = cls(participation)
        start = len(_MAGIC) + 36
        body, seal = data[:-32], data[-32:]
        if len(data) < start + 32 or not data.startswith(_MAGIC) or sha256(body).digest() != seal:
            raise CheckpointError(
                f"the {len(data)} bytes of this ledger are cut short, altered, or no ledger's: their checksum differs. "
                "Without its ledger a run cannot go on; resume from another checkpoint"
            )
        steps = int.from_bytes(data[start - 36 : start - 32], "little")
        try:
            for t in range(steps):
                end = start + 4 + int.from_bytes(body[start : start + 4], "little")
                ledger.record(t, _unpack(bytes(body[start + 4 : end])))
                start = end
        except (ArgumentError, zlib.error, TypeError, ValueError) as problem:
            raise CheckpointError(f"step {ledger.step} of this ledger cannot be read: {problem}") from problem
        if start != len(body) or ledger._hash != data[len(_MAGIC) + 4 : len(_MAGIC) + 36]:
            raise CheckpointError("the digest of this ledger does not follow from its history: it was altered")
        return ledger

    def __repr__(self) -> str:
        return f"Ledger({self.participation!r}, step={self.step})"


def replay(participation: Participation, history: Iterable[Iterable[Any]]) -> Ledger:
    """The ledger of a whole history: the units of step 0, 1, ..

    Raises: ParticipationError or StepsExhaustedError at the first step that the participation does not allow.
    """
    ledger = Ledger(participation)
    for t, units in enumerate(history):
        ledger.record(t, units)
    return ledger


def allows(participation: Participation, steps: Iterable[int]) -> bool:
    """Whether a unit may take part in these steps, which rise, and in no others."""
    return participation.pattern.allows(steps)


# -- ids -------------------------------------------------------------------------------------------------------------


def as_units(units: Iterable[Any]) -> Units:
    """Ids in the order given: an int64 array, or a list of strings; an empty int64 array if there are none.

    Raises: ArgumentError for anything but a sequence (or set, iterator, array) of integers in int64 or of strings.
    """
    if isinstance(units, (str, bytes)):
        raise ArgumentError(f"units must be a sequence of ids, got a single {type(units).__name__}")
    if hasattr(units, "__array__"):
        array = np.asarray(units)
        if array.ndim != 1:
            raise ArgumentError(f"units must have one dimension, got shape {array.shape}")
        if array.dtype.kind == "i":
            return array.astype(np.int64)
        units = array.tolist()
    values = list(units)
    kinds = set(map(type, values))
    if values and all(issubclass(kind, str) for kind in kinds):
        return [str(value) for value in values]
    if not all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ArgumentError(f"units must be all integers or all strings, got {names}")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as problem:
        raise ArgumentError(f"integer units must fit into int64: {problem}; pass such ids as strings") from problem


def numbered(ids: Units) -> Integers:
    """(m,) a number for each id, equal where the ids are: not by NumPy's texts, which leave out NULs at the end."""
    if isinstance(ids, list):
        numbers = {unit: i for i, unit in enumerate(sorted(set(ids)))}
        return np.array([numbers[unit] for unit in ids], np.int64)
    return np.unique(ids, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _distinct(units: Iterable[Any]) -> Units:
    ids = as_units(units)
    if isinstance(ids, list):
        return sorted(set(ids))
    ids = np.sort(ids)  # np.unique hashes before it sorts: six times slower here
    return ids[np.diff(ids, prepend=ids[:1] - 1) != 0] if len(ids) else ids


def canonical_bytes(ids: Units) -> bytes:
    """What is hashed: a letter for the kind, then the ids, so that no two histories give the same bytes."""
    if isinstance(ids, list):
        raw = [unit.encode("utf-8", "surrogatepass") for unit in ids]
        return b"s" + b"".join(len(unit).to_bytes(8, "little") + unit for unit in raw)
    return b"i" + ids.astype("<i8").tobytes()


def _pack(ids: Units) -> bytes:
    """One step: a letter, then the compressed ids; integers as the first and the distances, in the least width."""
    if isinstance(ids, list):
        return b"s" + zlib.compress(canonical_bytes(ids)[1:], 1)
    if not len(ids):
        return b"0"
    # Distances of sorted int64 values fit uint64, where the subtraction wraps around to the right result.
    distances = np.diff(ids.astype(np.uint64))
    width = next(w for w in (1, 2, 4, 8) if w == 8 or distances.max(initial=0) < 1 << (8 * w))
    raw = ids[:1].astype("<i8").tobytes() + distances.astype(f"<u{width}").tobytes()
    return str(width).encode() + zlib.compress(raw, 1)


def _unpack(chunk: bytes) -> Units:
    if chunk == b"0":
        return np.empty(0, np.int64)
    kind, raw = chunk[:1], inflate(chunk[1:])
    if kind == b"s":
        spend_participations(len(raw) // 8)
        names, start = [], 0
        while start < len(raw):
            end = start + 8 + int.from_bytes(raw[start : start + 8], "little")
            names.append(raw[start + 8 : end].decode("utf-8", "surrogatepass"))
            start = end
        return names
    distances = np.frombuffer(raw[8:], f"<u{int(kind)}")
    spend_participations(len(distances) + 1)
    ids = np.concatenate([np.frombuffer(raw[:8], "<u8"), distances.astype(np.uint64)])
    return np.cumsum(ids, dtype=np.uint64).astype(np.int64)


# -- what was seen ---------------------------------------------------------------------------------------------------


class _Seen:
    """The last step and the number of steps of every unit that was seen."""

    def __init__(self) -> None:
        self._last = np.full(0, -1, np.int32)  # -1: never
        self._count = np.zeros(0, np.int32)
        self._slots: dict[int | str, int] | None = None  # None: integer ids are their own slots

    def look_up(self, ids: Units) -> tuple[Integers, Integers]:
        """(last step or -1, number of steps) of each unit."""
        last, count = np.full(len(ids), -1, np.int64), np.zeros(len(ids), np.int64)
        if self._slots is None and not isinstance(ids, list):
            slots = np.where((ids >= 0) & (ids < len(self._last)), ids, -1)
        else:
            known = self._slots or {}
            slots = np.array([known.get(unit, -1) for unit in _plain(ids)], np.int64)
        there = slots >= 0
        last[there], count[there] = self._last[slots[there]], self._count[slots[there]]
        return last, count

    def add(self, t: int, ids: Units) -> None:
        if not len(ids):
            return
        if self._slots is None and (isinstance(ids, list) or ids[0] < 0 or ids[-1] >= _DENSE):
            self._go_sparse()
        if self._slots is None:
            assert not isinstance(ids, list)
            slots = ids
        else:
            known = self._slots
            slots = np.array([known.setdefault(unit, len(known)) for unit in _plain(ids)], np.int64)
        self._grow(int(slots.max()) + 1)
        self._last[slots] = t
        self._count[slots] += 1

    def _go_sparse(self) -> None:
        seen = np.flatnonzero(self._count)
        self._slots = {unit: slot for slot, unit in enumerate(seen.tolist())}
        self._last, self._count = self._last[seen], self._count[seen]

    def _grow(self, size: int) -> None:
        more = max(size, 2 * len(self._last)) - len(self._last)
        if size > len(self._last):
            self._last = np.concatenate([self._last, np.full(more, -1, np.int32)])
            self._count = np.concatenate([self._count, np.zeros(more, np.int32)])


def _plain(ids: Units) -> Sequence[int | str]:
    return ids if isinstance(ids, list) else ids.tolist()
