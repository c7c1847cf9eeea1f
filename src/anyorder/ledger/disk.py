r"""The history on disk: one file beside the checkpoint, which grows by a chunk with every step.

    file     MAGIC run "\n", then the chunks of steps 0, 1, ..
    chunk t  t, length of the body, kind, digest of the history | body | chain_t
    chain_t  sha256(chain_{t-1} | chunk t without it),   chain_{-1} = sha256(MAGIC run "\n")

The body has sorted integers as the first and the distances; strings as numbers, by when they first came, and the new
ones in clear. So the file follows from the history alone: a step that is made again gives the same bytes.

**What a crash leaves.** A step goes this way: (1) its chunk is written behind the end; (2) the journal commits, on the
disk, a digest of its units and its total; (3) it is released; (4) the chunk counts. A save (5) brings the file to the
disk with fsync, then (6) replaces the checkpoint, which holds the number of steps and chain_{steps - 1}, and no ids.
What a resume takes over is what the checkpoint vouches for: chunks 0 .. steps - 1, which (5) brought to the disk before
(6) could name them. So

- killed anywhere, or out of power, before (6): the older checkpoint stands, the file has all of its chunks, and what
  lies behind them, whole, torn or zeros, is dropped when the next step is written;
- steps that were released after that checkpoint are made again, and the journal refuses them with other units or
  another total, before anything is released. So every unit of a released sum is in the record again before any further
  step can be; the chunk itself need not be on the disk when its step is released, for the journal's entry is;
- killed between (1) and (2): nothing was released, and the chunk lies behind what the checkpoint vouches for;
- a file that is shorter than the checkpoint's steps, or whose chain is not the checkpoint's (altered, of another run,
  of a copy that went on otherwise), is refused: CheckpointError. Who was in earlier steps is not known then, and to let
  units in by a record that is not theirs would break the claim.

Whoever may write both files can write what they like: the chain finds damage and mistakes, not its own owner.
"""

import os
import struct
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from anyorder._sealed import sync_folder
from anyorder.errors import CheckpointError
from anyorder.ledger.ids import Integers, Units
from anyorder.ledger.memory import integers_from, integers_raw
from anyorder.ledger.seen import Seen

__all__ = ["Disk", "Mark", "Step"]

_MAGIC = b"anyorder ledger file 1\n"
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

    def __init__(self, path: Path, head: bytes, descriptor: int) -> None:
        self.path = path
        self._head, self._descriptor = head, descriptor
        self._steps, self._end, self._chain = 0, len(head), sha256(head).digest()
        self._next = b""  # the chunk that is written and does not count yet
        self._is_clean = False  # whether nothing lies behind the end but what this object wrote

    @classmethod
    def create(cls, path: Path, run: str) -> Self:
        """An empty one. What a run without a checkpoint left is replaced. Raises: CheckpointError."""
        head = _MAGIC + run.encode() + b"\n"
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            found = os.pread(descriptor, len(_MAGIC), 0)
            if not _MAGIC.startswith(found.rstrip(b"\0")):
                raise CheckpointError(f"{path} is no ledger of anyorder, and not replaced; move it away")
            os.ftruncate(descriptor, 0)
            _write(descriptor, head, 0)
            os.fsync(descriptor)
            sync_folder(path.parent)
        except OSError as problem:
            _close(descriptor)
            raise CheckpointError(f"the ledger {path} cannot be written: {problem}") from problem
        except CheckpointError:
            _close(descriptor)
            raise
        return cls(path, head, descriptor)

    @classmethod
    def resume(cls, path: Path, run: str, mark: Mark) -> Self:
        """The file that a checkpoint vouches for. Raises: CheckpointError if it is missing, shorter, or another."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as problem:
            raise CheckpointError(
                f"the ledger {path} of this run cannot be opened: {problem}. It tells who took part when; without it "
                "a run cannot go on. Keep it beside the checkpoint, under its name, or start a new run"
            ) from problem
        disk = cls(path, _MAGIC + run.encode() + b"\n", descriptor)
        try:
            disk._verify(mark)
        except BaseException:
            disk.close()
            raise
        return disk

    def __len__(self) -> int:
        return self._steps

    def _verify(self, mark: Mark) -> None:
        for head, body, chain in self._chunks(mark.steps):
            self._chain = chain
            self._steps, self._end = self._steps + 1, self._end + len(head) + len(body) + _CHAIN
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
                most = os.fstat(file.fileno()).st_size
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

    def write(self, t: int, ids: Units, seen: Seen, digest: bytes) -> None:
        """Write the chunk of the next step behind the end, where it does not count yet. Raises: CheckpointError."""
        kind, body = _packed(ids, seen)
        chunk = _HEAD.pack(t, len(body), kind, digest) + body
        chunk += sha256(self._chain + chunk).digest()
        if self._descriptor < 0:
            raise CheckpointError(f"the ledger {self.path} is closed: this run ended, or was resumed elsewhere")
        try:
            if not self._is_clean:
                os.ftruncate(self._descriptor, self._end)
                self._is_clean = True
            _write(self._descriptor, chunk, self._end)
        except OSError as problem:
            self._is_clean = False
            raise CheckpointError(
                f"step {t} was not released: the ledger {self.path} cannot be written: {problem}. Make room, and take "
                "the step again"
            ) from problem
        if len(self._next) > len(chunk):
            self._is_clean = False  # a part of another try is behind it
        self._next = chunk

    def keep(self, ids: Units) -> None:
        """What was written last counts."""
        assert self._next
        self._chain, self._end, self._steps = self._next[-_CHAIN:], self._end + len(self._next), self._steps + 1
        self._next = b""

    def settle(self) -> Mark:
        """Bring what counts to the disk, for a checkpoint that is written after it. Raises: CheckpointError."""
        try:
            os.fsync(self._descriptor)
        except OSError as problem:
            raise CheckpointError(f"the ledger {self.path} cannot be written: {problem}") from problem
        return Mark(self._steps, self._chain)

    def close(self) -> None:
        """Write no more. It can still be read, while its run did not go on elsewhere."""
        _close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    # -- to read -----------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """All chunks that count. Raises: CheckpointError, at the end at last, where they are not what was written."""
        read = expected = self._chain
        for head, body, chain in self._chunks(self._steps):
            yield _unpacked(head, body)
            read = chain
        if read != expected:
            raise CheckpointError(f"the ledger {self.path} was altered since it was written")

    def history(self, seen: Seen) -> Iterator[Units]:
        """The units of each step."""
        names = seen.names() if self._steps else []
        for step in self.steps():
            yield [names[i] for i in step.numbers.tolist()] if step.integers is None else step.integers


def _packed(ids: Units, seen: Seen) -> tuple[bytes, bytes]:
    if isinstance(ids, list):
        numbers, new = seen.numbers(ids)
        raw = [name.encode("utf-8", "surrogatepass") for name in new]
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


def _write(descriptor: int, data: bytes, place: int) -> None:
    written = 0
    while written < len(data):
        done = os.pwrite(descriptor, memoryview(data)[written : written + (1 << 30)], place + written)
        if done <= 0:
            raise OSError(f"{written} of {len(data)} bytes written")
        written += done


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
