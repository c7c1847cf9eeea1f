"""The record of who took part when, and the guard of the rule that the plan's sensitivity rests on."""

import zlib
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder._closed import frozen
from anyorder.errors import (
    ArgumentError,
    CheckpointError,
    ParticipationError,
    StepsExhaustedError,
    TrainingError,
)
from anyorder.ledger.disk import Disk, Mark, Step
from anyorder.ledger.ids import Units, as_units, canonical_bytes, distinct
from anyorder.ledger.memory import Memory, pack, unpack
from anyorder.ledger.seen import Seen
from anyorder.participation import KnownOrder, Participation
from anyorder.participation.base import Refusals, Rule
from anyorder.participation.rules import RULES

__all__ = ["Ledger", "allows", "replay"]

_MAGIC = b"anyorder ledger 1\n"


class Ledger:
    """The record of who took part when, and the guard of the rule that the plan's sensitivity rests on.

    Steps are recorded in order, 0, 1, .., one call each; what `check` refuses has changed nothing. A unit that is
    named twice in a step counts once: its gradients are summed, then clipped once. An empty step is a step. Who is
    refused, the participation says: `Rule.refusals`, from a unit's last step and its number of steps, or
    `KnownOrder.strangers`, by name. A unit that stays away contributes zero, which is covered.

    Units are integers in int64 or strings, one kind in a ledger.

    Args:
        participation: the plan's.

    Cost: O(m log m) for a step of m units; 8 bytes for each unit ever seen, about 200 for one with a name, and the
    history, delta-coded and compressed to about one byte for each participation of an integer. `create` and `resume`
    keep the history in a file instead, see `ledger.disk`.
    """

    def __init__(self, participation: Participation) -> None:
        if type(participation) not in RULES:
            raise ArgumentError(f"participation must be one of anyorder's, got {type(participation).__name__}")
        self.participation = participation
        self._seen = Seen()
        self._is_string: bool | None = None  # unknown until a unit comes
        self._store: Memory | Disk = Memory()
        self._hash = sha256(_MAGIC).digest()
        self._allowed: Units | None = None  # at the next step; nobody else has it, or it cannot be written
        self._written: tuple[Units, bytes] | None = (
            None  # (units, digest): what the store has for the next step, beside what counts
        )

    @classmethod
    def create(cls, participation: Participation, path: str | Path, run: str) -> Self:
        """An empty ledger whose history is kept in a file of its own, append-only: see `ledger.disk`.

        Args:
            path: the file, which is made; one that a run without a checkpoint left is replaced.
            run: up to 128 letters and digits that name the run.
        Raises: CheckpointError if the file cannot be written, or is none of a ledger.
        """
        ledger = cls(participation)
        ledger._store = Disk.create(Path(path), run)
        return ledger

    @classmethod
    def resume(cls, participation: Participation, path: str | Path, run: str, mark: Mark) -> Self:
        """The ledger as it was when `settle` gave this mark; what the file has behind is dropped at the next step.

        Its history is replayed under the rule.
        Raises: CheckpointError if the file is missing, cut short, altered, or another; ParticipationError or
            StepsExhaustedError if the history breaks the rule of this participation.
        Cost: for 13 million participations of 10^6 units with names some seconds and 250 MB.
        """
        ledger, disk = cls(participation), Disk.resume(Path(path), run, mark)
        ledger._store = disk
        names: list[str] = []
        try:
            if len(disk):
                ledger._check_in_plan(len(disk) - 1)
            for t, step in enumerate(disk.steps()):
                ledger._take_over(t, step, names)
        except BaseException:
            disk.close()
            raise
        return ledger

    def _take_over(self, t: int, step: Step, names: list[str]) -> None:
        """Replay a step of the file; names are those of the units so far."""
        seen, order = self._seen, self.participation
        if step.integers is None:
            names += step.new
            if isinstance(order, Rule):
                wrong = order.refusals(t, *seen.look_up_numbers(step.numbers))
            else:
                wrong = self._refusals(t, [names[i] for i in step.numbers.tolist()])
            self._refuse(t, wrong)
            seen.add_numbers(t, step.numbers, step.new)
            self._is_string = True
        elif len(step.integers):
            self._refuse(t, self._refusals(t, step.integers))
            seen.add(t, step.integers)
            self._is_string = False
        self._hash = step.digest

    @property
    def step(self) -> int:
        """The next step; also the number of steps recorded."""
        return len(self._store)

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
        ids = self._checked(t, units)
        return list(ids) if isinstance(ids, list) else ids

    def allowed(self, t: int, units: Iterable[Any]) -> NDArray[np.bool_]:
        """(m,) whether the rule lets each of the units take part in step t, as things stand: to choose a cohort by.

        Args:
            t: a step of the plan; the next one, or a later one if no unit took part in between.
            units: in any order, each by itself; one that was never seen is judged as any newcomer.
        Raises: ArgumentError.
        """
        ids = as_units(units)
        self._check_kind(ids)
        return ~self._wrong(t, ids)

    def offenders(self, t: int, units: Iterable[Any]) -> Units:
        """Those of the units that the rule forbids at step t, sorted: for the owner of the data, not for logs."""
        ids = distinct(units)
        places = np.flatnonzero(self._wrong(t, ids))
        return [ids[i] for i in places] if isinstance(ids, list) else ids[places]

    def _wrong(self, t: int, ids: Units) -> NDArray[np.bool_]:
        """Whom the rule forbids, in one array for all its clauses."""
        wrong = self._refusals(_check.integer("t", t, low=0, high=self.participation.n - 1), ids)
        bad = np.zeros(len(ids), np.bool_)
        for _, clause in wrong:
            bad |= clause
        return bad

    def prepare(self, t: int, units: Iterable[Any]) -> None:
        """`check`, and all of `record` that can fail: a ledger on disk writes the step where it does not count yet."""
        self._write(t, self._checked(t, units))

    def record(self, t: int, units: Iterable[Any]) -> None:
        """`check`, then write step t down."""
        ids = self._checked(t, units)
        if self._written is None or self._written[0] is not ids:
            self._write(t, ids)
        assert self._written is not None
        self._allowed = None
        self._seen.add(t, ids)  # first: interrupted after it, the ledger refuses too much, and never too little
        self._store.keep(ids)
        self._hash = self._written[1]
        if len(ids):
            self._is_string = isinstance(ids, list)
        self._written = None

    def _write(self, t: int, ids: Units) -> None:
        digest = sha256(self._hash + t.to_bytes(8, "little") + canonical_bytes(ids)).digest()
        self._store.write(t, ids, self._seen, digest)
        self._written = ids, digest

    def _checked(self, t: int, units: Iterable[Any]) -> Units:
        t = _check.integer("t", t, low=0)
        self._check_in_plan(t)
        if t != self.step:
            raise TrainingError(f"steps must be recorded in order: the next step is {self.step}, got t={t}")
        if self._allowed is not None and _same(units, self._allowed):
            return self._allowed
        ids = distinct(units)
        self._check_kind(ids)
        if len(ids):
            self._refuse(t, self._refusals(t, ids))
        self._allowed = ids if isinstance(ids, list) else frozen(ids)
        return self._allowed

    def _check_in_plan(self, t: int) -> None:
        if t >= self.participation.n:
            raise StepsExhaustedError(
                f"step {t} is past the plan: its {self.participation.n} steps are 0 to {self.participation.n - 1}, and "
                "the noise is calibrated for no more; make a plan with more steps before training"
            )

    def _check_kind(self, ids: Units) -> None:
        if len(ids) and self._is_string is not None and isinstance(ids, list) != self._is_string:
            kinds = ("integers", "strings")
            raise ArgumentError(
                f"units must be {kinds[self._is_string]}, as in earlier steps, got {kinds[not self._is_string]}; "
                "one unit under two names would be counted as two"
            )

    def _refuse(self, t: int, refusals: Refusals) -> None:
        for rule, wrong in refusals:
            if wrong.any():
                raise ParticipationError(
                    f"step {t}: the plan covers {self.participation.describe()}; {rule}. Nothing was changed: leave "
                    "out the units that come too early or too often (ledger.offenders names them, to you alone), let "
                    "the loader keep the planned order, or plan for the order that it has"
                )

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
        return self._store.history(self._seen)

    def realised_bounds(self) -> tuple[int, int]:
        """(max_participations, min_separation) of the steps so far. Kept as steps are recorded: O(1).

        The most steps of a unit, and the smallest distance between two steps of one; n, where none came twice.
        """
        nearest = self._seen.nearest
        return self._seen.most, self.participation.n if nearest is None else nearest

    def realised(self) -> KnownOrder | None:
        """The order of the steps so far; None if no unit took part yet. Its sensitivity is at most the plan's."""
        order = [ids if isinstance(ids, list) else ids.tolist() for ids in self.history()]
        return KnownOrder(order) if any(order) else None

    def to_bytes(self) -> bytes:
        """The history and its digest, compact; `from_bytes` restores the ledger. The rule is the plan's to keep."""
        chunks = self._store.chunks if isinstance(self._store, Memory) else map(pack, self.history())
        body = b"".join(len(chunk).to_bytes(4, "little") + chunk for chunk in chunks)
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
                ledger.record(t, unpack(bytes(body[start + 4 : end])))
                start = end
        except (ArgumentError, zlib.error, TypeError, ValueError) as problem:
            raise CheckpointError(f"step {ledger.step} of this ledger cannot be read: {problem}") from problem
        if start != len(body) or ledger._hash != data[len(_MAGIC) + 4 : len(_MAGIC) + 36]:
            raise CheckpointError("the digest of this ledger does not follow from its history: it was altered")
        return ledger

    def settle(self) -> Mark:
        """Bring a ledger of `create` or `resume` to the disk, and say what a checkpoint must keep to resume from it.

        Raises: CheckpointError if the disk does not take it; ArgumentError for a ledger in memory.
        """
        if isinstance(self._store, Memory):
            raise ArgumentError("settle() is for a ledger on disk; one in memory is kept by to_bytes()")
        return self._store.settle()

    def close(self) -> None:
        """Let go of the file, if there is one: nothing is recorded from here on."""
        self._store.close()

    def __repr__(self) -> str:
        return f"Ledger({self.participation!r}, step={self.step})"


def _same(units: Iterable[Any], allowed: Units) -> bool:
    """Whether these are the units that were allowed: nobody can write an array of them; lists are compared."""
    if not isinstance(allowed, list):
        return units is allowed
    return isinstance(units, list) and set(map(type, units)) == {str} and units == allowed


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
