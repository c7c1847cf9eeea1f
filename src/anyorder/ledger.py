"""Who took part when: ids of units, what was seen of each, the history in memory or in a file, and its guard."""

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from anyorder import checks, durable
from anyorder._ids import IdTable
from anyorder.errors import ArgumentError, CheckpointError, ParticipationError, StepsExhaustedError, TrainingError
from anyorder.formats import inflate, spend_participations
from anyorder.participation import KnownOrder
from anyorder.participation.registry import ORDERS
from anyorder.patterns import Participation, Refusals, Rule

Integers = NDArray[np.int64]

Units = Integers | list[str]
"""Ids of units: integers or strings. In a ledger's history distinct and sorted."""

_LITTLE = np.dtype("<i8")
_LENGTHS = [i.to_bytes(8, "little") for i in range(1 << 8)]


def as_units(units: Iterable[Any]) -> Units:
    """Ids in the order given: an int64 array, or a list of strings; an empty int64 array if there are none.

    Strings that read alike are one unit: see `checks.name_of_unit`.

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
    if kinds != {int}:  # the characters or the number itself, whatever a subclass says that it is
        if values and all(issubclass(kind, str) for kind in kinds):
            return list(map(checks.name_of_unit, values))
        if not all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ArgumentError(f"units must be all integers or all strings, got {names}")
        values = [int.__int__(value) if isinstance(value, int) else np.generic.item(value) for value in values]
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as problem:
        raise ArgumentError(f"integer units must fit into int64: {problem}; pass such ids as strings") from problem


def distinct(units: Iterable[Any]) -> Units:
    """Each id once, sorted."""
    is_array = type(units) is np.ndarray and units.dtype == np.int64 and units.ndim == 1
    ids: Units = units if is_array else as_units(units)  # type: ignore[assignment]
    if isinstance(ids, list):
        return sorted(set(ids))
    ids = ids.copy()
    ids.sort()  # np.unique hashes before it sorts: six times slower here
    again = ids[1:] == ids[:-1]
    return np.concatenate([ids[:1], ids[1:][~again]]) if len(again) and _greatest(again) else ids


def numbered(ids: Units) -> Integers:
    """(m,) a number for each id, equal where the ids are: not by NumPy's texts, which leave out NULs at the end."""
    if isinstance(ids, list):
        numbers = {unit: i for i, unit in enumerate(sorted(set(ids)))}
        return np.array([numbers[unit] for unit in ids], np.int64)
    return np.unique(ids, return_inverse=True)[1].reshape(-1).astype(np.int64)


def canonical_bytes(ids: Units) -> bytes:
    """What is hashed: a letter for the kind, then the ids, so that no two histories give the same bytes."""
    if isinstance(ids, list):
        raw = [unit.encode("utf-8", "surrogatepass") for unit in ids]
        sizes = [_LENGTHS[size] if size < len(_LENGTHS) else size.to_bytes(8, "little") for size in map(len, raw)]
        return b"s" + b"".join([size + name for size, name in zip(sizes, raw, strict=True)])
    return b"i" + ids.astype(_LITTLE, copy=False).tobytes()


def plain(ids: Units) -> Sequence[int | str]:
    """The ids as Python's own integers or strings."""
    return ids if isinstance(ids, list) else ids.tolist()


# ----------------------------------------------------------------------------------------------------
# What was seen of every unit: its last step, its number of steps, and the most and the nearest of all.


def _greatest(numbers: NDArray[Any]) -> int:
    """Of one or more: what `max` gives, in a fifth of the time where they are few; 1 where one of them is true."""
    return int(numbers.item(numbers.argmax()))


_DENSE = 1 << 22  # integer ids below this index the tables directly; others, and names, have numbers


class UnitHistory:
    """The last step and the number of steps of every unit that was seen.

    A name is known by two hashes of 64 bits, with a key of the process. Two names that have both in common, of 10^7
    names with probability 2e-25, are one unit here: it has the steps of both, and is refused too often, not too seldom.

    Attributes:
        most: the largest number of steps of a unit.
        nearest: the smallest distance between two steps of a unit; None while none came twice.
    """

    def __init__(self) -> None:
        self.most = 0
        self.nearest: int | None = None
        self._last = np.full(0, -1, np.int32)  # -1: never
        self._count = np.zeros(0, np.int32)
        self._table: IdTable | None = None  # None: integer ids are their own numbers
        # What was looked up last, for an add follows a look: the units, their numbers (one that stands for nobody where
        # none is known), last steps, numbers of steps.
        self._found: tuple[Units, Integers, Integers, Integers] | None = None

    def look_up(self, ids: Units) -> tuple[Integers, Integers]:
        """(last step or -1, number of steps) of each unit."""
        if self._found is None or self._found[0] is not ids:
            if self._table is not None:
                numbers = self._table.find(_words(ids))
            else:
                numbers = np.full(len(ids), -1, np.int64) if isinstance(ids, list) else ids
            self._found = ids, numbers, *self.look_up_numbers(numbers)
        return self._found[2:]

    def look_up_numbers(self, numbers: Integers) -> tuple[Integers, Integers]:
        """`look_up` for units by their `numbers`."""
        if len(numbers) and _greatest(numbers.view(np.uint64)) < len(self._last):  # as most steps come; none below zero
            return self._last.take(numbers).astype(np.int64), self._count.take(numbers).astype(np.int64)
        last, count = np.full(len(numbers), -1, np.int64), np.zeros(len(numbers), np.int64)
        there = (numbers >= 0) & (numbers < len(self._last))
        last[there], count[there] = self._last[numbers[there]], self._count[numbers[there]]
        return last, count

    def numbers(self, ids: Units) -> tuple[Integers, Units]:
        """Numbers of units by when they first came, in one step in their order; and those that are new."""
        self.look_up(ids)
        assert self._found is not None
        numbers = self._found[1].copy()
        places = np.flatnonzero(numbers < 0)
        numbers[places] = (0 if self._table is None else self._table.count) + np.arange(len(places))
        return numbers, [ids[i] for i in places.tolist()] if isinstance(ids, list) else ids[places]

    def add(self, t: int, ids: Units) -> None:
        """Note that these units, which are distinct and sorted, were in step t."""
        if not len(ids):
            return
        if self._table is None and not isinstance(ids, list) and ids.item(0) >= 0 and ids.item(-1) < _DENSE:
            self._add(t, ids, *self.look_up(ids))
            return
        if self._table is None and not isinstance(ids, list):
            self._go_sparse()
        numbers, new = self.numbers(ids)
        if len(new):
            self._enter(new)
        self._add(t, numbers, *self.look_up(ids))

    def add_numbers(self, t: int, numbers: Integers, new: list[str]) -> None:
        """`add` for names by their `numbers`."""
        if new:
            self._enter(new)
        self._add(t, numbers, *self.look_up_numbers(numbers))

    def _enter(self, new: Units) -> None:
        self._found = None  # broken off before the end, these are looked up again
        if self._table is None:
            self._table = IdTable(2 if isinstance(new, list) else 1)
        self._table.enter(_words(new))

    def _add(self, t: int, numbers: Integers, last: Integers, count: Integers) -> None:
        self._found = None
        size = _greatest(numbers) + 1
        if size > len(self._last):
            more = max(size, 3 * len(self._last) // 2) - len(self._last)
            self._last = np.concatenate([self._last, np.full(more, -1, np.int32)])
            self._count = np.concatenate([self._count, np.zeros(more, np.int32)])
        before = _greatest(last)  # -1 where none was seen
        if before >= 0:
            self.nearest = t - before if self.nearest is None else min(t - before, self.nearest)
        count = count + 1
        self._last[numbers], self._count[numbers] = t, count
        self.most = max(self.most, _greatest(count))

    def _go_sparse(self) -> None:
        seen = np.flatnonzero(self._count)
        table = IdTable()
        table.enter(_words(seen))
        self._found = None
        self._table, self._last, self._count = table, self._last[seen], self._count[seen]  # together, or not


def _words(ids: Units) -> Integers:
    """(m, 1) for integers; (m, 2) for names, Python's own hashes."""
    if not isinstance(ids, list):
        return np.ascontiguousarray(ids)[:, None]
    hashes = np.empty((len(ids), 2), np.int64)
    hashes[:, 0] = np.fromiter(map(hash, ids), np.int64, len(ids))
    hashes[:, 1] = np.fromiter(map(hash, map("\0".__add__, ids)), np.int64, len(ids))
    return hashes


# ----------------------------------------------------------------------------------------------------
# The history in memory: each step compressed, about one byte for each participation of an integer id.


_WIDTHS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


def integers_raw(ids: Integers) -> tuple[bytes, bytes]:
    """(one digit, the width; the first id and the distances to the next in that width): of sorted ids."""
    # Distances of sorted int64 values fit uint64, where the subtraction wraps around to the right result.
    values = ids.view(np.uint64) if ids.dtype == np.int64 else ids.astype(np.uint64)
    distances = values[1:] - values[:-1]
    bits = _greatest(distances).bit_length() if len(distances) else 0
    width = 1 if bits <= 8 else 2 if bits <= 16 else 4 if bits <= 32 else 8
    return b"%d" % width, ids[:1].astype(_LITTLE).tobytes() + distances.astype(_WIDTHS[width]).tobytes()


def integers_from(kind: bytes, raw: bytes) -> Integers:
    """What `integers_raw` wrote."""
    distances = np.frombuffer(raw[8:], f"<u{int(kind)}")
    spend_participations(len(distances) + 1)
    ids = np.concatenate([np.frombuffer(raw[:8], "<u8"), distances.astype(np.uint64)])
    return np.cumsum(ids, dtype=np.uint64).astype(np.int64)


def pack(ids: Units, canonical: bytes | None = None) -> bytes:
    """One step: a letter, then the compressed ids; integers as the first and the distances, in the least width."""
    if isinstance(ids, list):
        return b"s" + zlib.compress((canonical or canonical_bytes(ids))[1:], 1)
    if not len(ids):
        return b"0"
    kind, raw = integers_raw(ids)
    if len(raw) > 512:
        return kind + zlib.compress(raw, 1)
    # What zlib.compress(raw, 0) gives, whose buffers cost ten times as much: a small step is stored as it is.
    sizes = (len(raw) | (len(raw) ^ 0xFFFF) << 16).to_bytes(4, "little")
    return kind + b"x\x01\x01" + sizes + raw + zlib.adler32(raw).to_bytes(4, "big")


def unpack(chunk: bytes) -> Units:
    """Return what `pack` wrote."""
    if chunk == b"0":
        return np.empty(0, np.int64)
    kind, raw = chunk[:1], inflate(chunk[1:])
    if kind != b"s":
        return integers_from(kind, raw)
    spend_participations(len(raw) // 8)
    names, start = [], 0
    while start < len(raw):
        end = start + 8 + int.from_bytes(raw[start : start + 8], "little")
        names.append(raw[start + 8 : end].decode("utf-8", "surrogatepass"))
        start = end
    return names


# ----------------------------------------------------------------------------------------------------
# The history on disk: one file next to the checkpoint, which grows by a chunk with every step.
#
#     file     MAGIC run "\n", then the chunks of steps 0, 1, ..
#     chunk t  t, length of the body, kind, digest of the history | body | chain_t
#     chain_t  sha256(chain_{t-1} | chunk t without it),   chain_{-1} = sha256(MAGIC run "\n")
#
# The body has sorted integers as the first and the distances; strings as numbers, by when they first came, and the new
# ones in clear. So the file follows from the history alone: a step that is made again gives the same bytes.
#
# **What a crash leaves.** A step goes this way: (1) its chunk is written behind the end; (2) the journal commits, on
# the disk, a digest of its units and its total; (3) it is released; (4) the chunk counts. A save (5) brings the file
# to the disk with fsync, then (6) replaces the checkpoint, which holds the number of steps and chain_{steps - 1}, and
# no ids. What a resume takes over is what the checkpoint vouches for: chunks 0 .. steps - 1, which (5) brought to the
# disk before (6) could name them. So
#
# - killed anywhere, or out of power, before (6): the older checkpoint stands, the file has all of its chunks, and what
#   lies behind them, whole, torn or zeros, is dropped when the next step is written;
# - steps that were released after that checkpoint are made again, and the journal refuses them with other units or
#   another total, before anything is released. So every unit of a released sum is in the record again before any
#   further
#   step can be; the chunk itself need not be on the disk when its step is released, for the journal's entry is;
# - killed between (1) and (2): nothing was released, and the chunk lies behind what the checkpoint vouches for;
# - a file that is shorter than the checkpoint's steps, or whose chain is not the checkpoint's (altered, of another run,
#   of a copy that went on otherwise), is refused: CheckpointError. Who was in earlier steps is not known then, and to
#   let
#   units in by a record that is not theirs would break the claim.
#
# Whoever may write both files can write what they like: the chain finds damage and mistakes, not its own owner.


_FILE_MAGIC = b"anyorder ledger file 1\n"
_HEAD = struct.Struct("<QIc32s")  # step, length of the body, kind, digest of the history up to it
_COUNTS = struct.Struct("<II")  # units, new names
_CHAIN = 32


class Mark(NamedTuple):
    """What a checkpoint keeps of the file: its steps, and the chain up to them."""

    steps: int
    chain: bytes


class Step(NamedTuple):
    """One chunk, read back: sorted integers, or numbers of names with the new names."""

    digest: bytes
    integers: Integers | None
    numbers: Integers
    new: list[str]


class Disk:
    """The file of one run's ledger; made by `create` or `resume`. Readable by its owner only: it holds ids.

    Not locked: who has the run has its journal, which is.
    """

    def __init__(self, log: durable.Log, head: bytes) -> None:
        self.path = log.path
        self._head, self._log = head, log
        self._steps, self._chain = 0, sha256(head).digest()
        self._next = b""  # the chain of the chunk that is written and does not count yet

    @classmethod
    def create(cls, path: Path, run: str) -> Self:
        """An empty one. What a run without a checkpoint left is replaced. Raises: CheckpointError."""
        head = _FILE_MAGIC + run.encode() + b"\n"
        try:
            disk = cls(durable.Log.open(path, create=True), head)
            if not _FILE_MAGIC.startswith(disk._log.read(size=len(_FILE_MAGIC)).rstrip(b"\0")):
                raise CheckpointError(f"{path} is no ledger of anyorder, and not replaced; move it away")
            disk._log.append(head)
            durable.sync_folder(path.parent)
        except OSError as problem:
            raise CheckpointError(f"the ledger {path} cannot be written: {problem}") from problem
        return disk

    @classmethod
    def resume(cls, path: Path, run: str, mark: Mark) -> Self:
        """The file that a checkpoint vouches for. Raises: CheckpointError if it is missing, shorter, or another."""
        try:
            log = durable.Log.open(path)
        except OSError as problem:
            raise CheckpointError(
                f"the ledger {path} of this run cannot be opened: {problem}. It tells who took part when; without it "
                "a run cannot go on. Keep it next to the checkpoint, under its name, or start a new run"
            ) from problem
        disk = cls(log, _FILE_MAGIC + run.encode() + b"\n")
        try:
            disk._verify(mark)
        except BaseException:
            disk.close()
            raise
        return disk

    def __len__(self) -> int:
        return self._steps

    def _verify(self, mark: Mark) -> None:
        self._log.end = len(self._head)
        for head, body, chain in self._chunks(mark.steps):
            self._chain, self._steps = chain, self._steps + 1
            self._log.end += len(head) + len(body) + _CHAIN
        if self._chain != mark.chain:
            raise CheckpointError(
                f"the ledger {self.path} is not the one that its checkpoint was saved with: it was altered, or belongs "
                "to another run or another copy of this one. Resume with files that belong together"
            )

    def _chunks(self, steps: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        """(head, body, chain) of the first chunks. Raises: CheckpointError at one that is not whole."""
        chain = sha256(self._head).digest()
        try:
            with open(self.path, "rb") as file:
                most = self.path.stat().st_size
                if file.read(len(self._head)) != self._head:
                    raise CheckpointError(
                        f"{self.path} is no ledger of this run; resume with files that belong together"
                    )
                for t in range(steps):
                    head = file.read(_HEAD.size)
                    number, size = _HEAD.unpack(head)[:2] if len(head) == _HEAD.size else (-1, 0)
                    body = file.read(min(size, most))  # nonsense is not made room for
                    chain = sha256(chain + head + body).digest()
                    if number != t or file.read(_CHAIN) != chain:
                        raise CheckpointError(
                            f"the ledger {self.path} is cut short or altered at step {t} of {steps}: who took part is "
                            "not known. Resume with the file that the run wrote"
                        )
                    yield head, body, chain
        except OSError as problem:
            raise CheckpointError(f"the ledger {self.path} cannot be read: {problem}") from problem

    # -- to write ----------------------------------------------------------------------------------------------------

    def write(self, t: int, ids: Units, seen: UnitHistory, digest: bytes) -> None:
        """Write the chunk of the next step behind the end, where it does not count yet. Raises: CheckpointError."""
        kind, body = _packed(ids, seen)
        chunk = _HEAD.pack(t, len(body), kind, digest) + body
        chain = sha256(self._chain + chunk).digest()
        if not self._log.is_open:
            raise CheckpointError(f"the ledger {self.path} is closed: this run ended, or was resumed elsewhere")
        try:
            self._log.write(chunk + chain)
        except OSError as problem:
            raise CheckpointError(
                f"step {t} was not released: the ledger {self.path} cannot be written: {problem}. Make room, and take "
                "the step again"
            ) from problem
        self._next = chain

    def keep(self) -> None:
        """What was written last counts."""
        assert self._next
        self._log.keep()
        self._chain, self._steps, self._next = self._next, self._steps + 1, b""

    def settle(self) -> Mark:
        """Bring what counts to the disk, for a checkpoint that is written after it. Raises: CheckpointError."""
        try:
            self._log.sync()
        except OSError as problem:
            raise CheckpointError(f"the ledger {self.path} cannot be written: {problem}") from problem
        return Mark(self._steps, self._chain)

    def close(self) -> None:
        """Write no more. It can still be read, while its run did not go on elsewhere."""
        self._log.close()

    # -- to read -----------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """All chunks that count. Raises: CheckpointError, at the end at last, where they are not what was written."""
        read = expected = self._chain
        for head, body, chain in self._chunks(self._steps):
            yield _unpacked(head, body)
            read = chain
        if read != expected:
            raise CheckpointError(f"the ledger {self.path} was altered since it was written")

    def history(self) -> Iterator[Units]:
        """The units of each step."""
        names: list[str] = []
        for step in self.steps():
            names += step.new
            yield [names[i] for i in step.numbers.tolist()] if step.integers is None else step.integers


def _packed(ids: Units, seen: UnitHistory) -> tuple[bytes, bytes]:
    if isinstance(ids, list):
        numbers, new = seen.numbers(ids)
        raw = [str(name).encode("utf-8", "surrogatepass") for name in new]
        lengths = np.fromiter(map(len, raw), "<u4", len(raw))
        parts = (_COUNTS.pack(len(ids), len(new)), numbers.astype("<u4").tobytes(), lengths.tobytes(), *raw)
        return b"s", b"".join(parts)
    return integers_raw(ids) if len(ids) else (b"0", b"")


def _unpacked(head: bytes, body: bytes) -> Step:
    """A chunk that the chain vouches for."""
    _, _, kind, digest = _HEAD.unpack(head)
    nobody = np.empty(0, np.int64)
    if kind != b"s":
        return Step(digest, integers_from(kind, body) if kind != b"0" else nobody, nobody, [])
    units, new = _COUNTS.unpack_from(body)
    numbers = np.frombuffer(body, "<u4", units, _COUNTS.size).astype(np.int64)
    ends = np.frombuffer(body, "<u4", new, _COUNTS.size + 4 * units).astype(np.int64).cumsum()
    text = body[_COUNTS.size + 4 * (units + new) :]
    bounds = zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True) if new else ()
    return Step(digest, None, numbers, [text[i:j].decode("utf-8", "surrogatepass") for i, j in bounds])


# ----------------------------------------------------------------------------------------------------
# The record of who took part when, and the guard of the rule that the plan's sensitivity rests on.


_RECORD_MAGIC = b"anyorder ledger 1\n"


class Ledger:
    """The record of who took part when, and the guard of the rule that the plan's sensitivity rests on.

    Steps are recorded in order, 0, 1, .., one call each; what `check` refuses has changed nothing. A unit that is
    named twice in a step counts once: its gradients are summed, then clipped once. An empty step is a step. Who is
    refused, the participation says: `Rule.refusals`, from a unit's last step and its number of steps, or
    `KnownOrder.strangers`, by name. A unit that stays away contributes zero, which is covered.

    Units are integers in int64 or strings, one kind in a ledger.

    Args:
        participation: the plan's.

    Attributes:
        step: the next step; also the number of steps recorded.

    Cost: O(m log m) for a step of m units; 8 to 12 bytes for each number up to the largest id below 2^22; beyond, for
    each unit ever seen, 24 to 36, 36 to 52 for one with a name; and the history, delta-coded and compressed to about
    one byte for each participation of an integer. `create` and `resume` keep it in a file instead, see `Disk`.
    """

    def __init__(self, participation: Participation) -> None:
        if type(participation) not in ORDERS:
            raise ArgumentError(f"participation must be one of anyorder's, got {type(participation).__name__}")
        self.participation, self._steps = participation, participation.n
        self._seen = UnitHistory()
        self._is_string: bool | None = None  # unknown until a unit comes
        self.step = 0
        self._disk: Disk | None = None
        self._packed: list[bytes] = []  # without a disk: each step, packed
        self._hash = sha256(_RECORD_MAGIC).digest()
        self._allowed: Units | None = None  # at the next step; nobody else has it, or it cannot be written
        # (units, digest, canonical bytes) of the next step: what a disk has of it, beside what counts.
        self._written: tuple[Units, bytes, bytes] | None = None

    @classmethod
    def create(cls, participation: Participation, path: str | Path, run: str) -> Self:
        """An empty ledger whose history is kept in a file of its own, append-only: see `Disk`.

        Args:
            path: the file, which is made; one that a run without a checkpoint left is replaced.
            run: up to 128 letters and digits that name the run.
        Raises: CheckpointError if the file cannot be written, or is none of a ledger.
        """
        ledger = cls(participation)
        ledger._disk = Disk.create(Path(path), run)
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
        ledger._disk, ledger.step = disk, len(disk)
        names: list[str] = []
        try:
            if len(disk) > participation.n:
                raise ledger._past_the_plan(len(disk) - 1)
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

    def check(self, t: int, units: Iterable[Any]) -> Units:
        """Raise unless the units may take part in step t, which must be the next one. Records nothing.

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
        wrong = self._refusals(checks.integer("t", t, low=0, high=self._steps - 1), ids)
        bad = np.zeros(len(ids), np.bool_)
        for _, clause in wrong:
            bad |= clause
        return bad

    def prepare(self, t: int, units: Iterable[Any]) -> Units:
        """`check`, and all of `record` that can fail: a ledger on disk writes the step where it does not count yet."""
        ids = self._checked(t, units)
        self._write(t, ids)
        return list(ids) if isinstance(ids, list) else ids

    def record(self, t: int, units: Iterable[Any]) -> None:
        """`check`, then write step t down."""
        ids = self._checked(t, units)
        if self._written is None or self._written[0] is not ids:
            self._write(t, ids)
        assert self._written is not None
        self._allowed = None
        self._seen.add(t, ids)  # first: interrupted after it, the ledger refuses too much, and never too little
        if self._disk is None:
            self._packed.append(pack(ids, self._written[2]))
        else:
            self._disk.keep()
        self.step, self._hash = self.step + 1, self._written[1]
        if len(ids):
            self._is_string = isinstance(ids, list)
        self._written = None

    def _write(self, t: int, ids: Units) -> None:
        canonical = canonical_bytes(ids)
        digest = sha256(self._hash + t.to_bytes(8, "little") + canonical).digest()
        if self._disk is not None:
            self._disk.write(t, ids, self._seen, digest)
        self._written = ids, digest, canonical

    def _checked(self, t: int, units: Iterable[Any]) -> Units:
        step, allowed = self.step, self._allowed
        # What was allowed at this step is not looked up again: nobody can write an array of it; lists are compared.
        again = units is allowed or (isinstance(allowed, list) and _same_names(units, allowed))
        if again and allowed is not None and type(t) is int and t == step:
            return allowed
        t = t if type(t) is int and t >= 0 else checks.integer("t", t, low=0)
        if t >= self._steps:
            raise self._past_the_plan(t)
        if t != step:
            raise TrainingError(f"steps must be recorded in order: the next step is {step}, got t={t}")
        ids = distinct(units)
        if not isinstance(ids, list):  # nobody can write it, nor make it writeable: it lives in a `bytes` object
            ids = np.frombuffer(ids.tobytes(), np.int64)
        if self._is_string is not isinstance(ids, list):
            self._check_kind(ids)
        if len(ids):
            self._refuse(t, self._refusals(t, ids))
        self._allowed = ids
        return ids

    def _past_the_plan(self, t: int) -> StepsExhaustedError:
        return StepsExhaustedError(
            f"step {t} is past the plan: its {self._steps} steps are 0 to {self._steps - 1}, and "
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
            if len(wrong) and _greatest(wrong):
                raise ParticipationError(
                    f"step {t}: the plan covers {self.participation.describe()}; {rule}. Nothing was changed: leave "
                    "out the units that appear too early or too often (ledger.offenders names them, to you alone), let "
                    "the loader keep the planned order, or plan for the order that it has. Where a loop stopped after "
                    "backward(), or an epoch ended within accumulate= batches, call optimizer.step() before it goes on"
                )

    def _refusals(self, t: int, ids: Units) -> Refusals:
        order: Any = self.participation  # one of ORDERS: a `KnownOrder` or a `Rule`
        if type(order) is KnownOrder:
            return order.strangers(t, ids)
        return order.refusals(t, *self._seen.look_up(ids))  # type: ignore[no-any-return]

    def digest(self) -> str:
        """The history as one hash, 64 hexadecimal digits: equal for equal histories, however the units were passed.

        h_t = sha256(h_{t-1} | t | sorted ids), h_{-1} a constant.
        """
        return self._hash.hex()

    def history(self) -> Iterator[Units]:
        """The units of each recorded step, sorted: (m,) int64 arrays, or lists of strings."""
        return map(unpack, self._packed) if self._disk is None else self._disk.history()

    def realised_bounds(self) -> tuple[int, int]:
        """(max_participations, min_separation) of the steps so far. Kept as steps are recorded: O(1).

        The most steps of a unit, and the smallest distance between two steps of one; n, where none came twice.
        """
        nearest = self._seen.nearest
        return self._seen.most, self._steps if nearest is None else nearest

    def realised(self) -> KnownOrder | None:
        """The order of the steps so far; None if no unit took part yet. Its sensitivity is at most the plan's."""
        order = [ids if isinstance(ids, list) else ids.tolist() for ids in self.history()]
        return KnownOrder(order) if any(order) else None

    def to_bytes(self) -> bytes:
        """The history and its digest, compact; `from_bytes` restores the ledger. The rule is the plan's to keep."""
        chunks = self._packed if self._disk is None else map(pack, self.history())
        body = b"".join(len(chunk).to_bytes(4, "little") + chunk for chunk in chunks)
        head = _RECORD_MAGIC + self.step.to_bytes(4, "little") + self._hash
        return head + body + sha256(head + body).digest()

    @classmethod
    def from_bytes(cls, participation: Participation, data: bytes) -> "Ledger":
        """The ledger that `to_bytes` wrote, replayed step by step under the rule.

        Raises: CheckpointError if the bytes are cut short or altered; ParticipationError or StepsExhaustedError if
        the history breaks the rule of this participation. The messages name no unit.
        """
        ledger = cls(participation)
        start = len(_RECORD_MAGIC) + 36
        body, seal = data[:-32], data[-32:]
        if len(data) < start + 32 or not data.startswith(_RECORD_MAGIC) or sha256(body).digest() != seal:
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
        if start != len(body) or ledger._hash != data[len(_RECORD_MAGIC) + 4 : len(_RECORD_MAGIC) + 36]:
            raise CheckpointError("the digest of this ledger does not follow from its history: it was altered")
        return ledger

    def settle(self) -> Mark:
        """Bring a ledger of `create` or `resume` to the disk, and say what a checkpoint must keep to resume from it.

        Raises: CheckpointError if the disk does not take it; ArgumentError for a ledger in memory.
        """
        if self._disk is None:
            raise ArgumentError("settle() is for a ledger on disk; one in memory is kept by to_bytes()")
        return self._disk.settle()

    def close(self) -> None:
        """Let go of the file, if there is one: nothing is recorded from here on."""
        if self._disk is not None:
            self._disk.close()

    def __repr__(self) -> str:
        return f"Ledger({self.participation!r}, step={self.step})"


def _same_names(units: Iterable[Any], allowed: list[str]) -> bool:
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
