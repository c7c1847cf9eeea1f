"""Checkpoints: files that are whole or absent, and a journal so that no noise is used on two different data."""

import contextlib
import fcntl
import io
import os
import random
import re
import struct
import tempfile
import weakref
from collections.abc import Iterator
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anyorder import _check
from anyorder.errors import ArgumentError, CheckpointError

__all__ = ["Journal", "load", "random_state", "save_atomic", "set_random_state"]

_MAGIC = b"anyorder checkpt"
_VERSION = 2
_HEAD = struct.Struct("<16sIQ32s")  # magic, version, length of the body, sha256 of what precedes the hash and the body


# -- the file --------------------------------------------------------------------------------------------------------


def save_atomic(path: str | Path, payload: dict[str, Any]) -> None:
    """Write a checkpoint file: at every moment the path holds the old file or the new one, whole.

    The bytes go to a temporary file in the same folder, then to the disk, then under the name. Readable by the owner
    only: a checkpoint that holds a noise key must be kept as safe as the data.

    Args:
        path: the file. A symbolic link is followed.
        payload: tensors, NumPy arrays (loaded as tensors), numbers, strings, bytes, None, and lists, tuples and dicts
            of them.
    Raises: CheckpointError with the reason; the temporary file is removed, the old file left as it was.
    """
    buffer = io.BytesIO()
    torch.save(_storable(payload, "payload"), buffer)
    body = buffer.getbuffer()
    head = _HEAD.pack(_MAGIC, _VERSION, len(body), _seal(body))
    target = Path(os.path.realpath(path))
    temporary = None
    try:
        _remove_stale(target)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # marks it as in use, for as long as this process lives
            _write(descriptor, head)
            _write(descriptor, body)
            os.fsync(descriptor)
            os.replace(temporary, target)
            temporary = None
        finally:
            os.close(descriptor)
        _sync_folder(target.parent)
    except OSError as problem:
        raise CheckpointError(
            f"the checkpoint {path} was not written: {problem}. The file of the last save is intact; make room or "
            "choose another folder, and save again"
        ) from problem
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def load(path: str | Path) -> dict[str, Any]:
    """The payload of a checkpoint file, tensors on the CPU. Nothing in the file is executed.

    Raises: CheckpointError if the file cannot be read, is cut short or altered, or is no checkpoint of this package.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as problem:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {problem}") from problem
    if not data.startswith(_MAGIC):
        raise CheckpointError(f"{path} is no checkpoint of anyorder: it does not begin with its mark")
    if len(data) < _HEAD.size:
        raise CheckpointError(f"the checkpoint {path} is cut short: {len(data)} bytes; use another checkpoint")
    _, version, length, seal = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if version != _VERSION:
        raise CheckpointError(
            f"the checkpoint {path} has format {version}, this version of anyorder reads {_VERSION}; resume with the "
            "version that wrote it"
        )
    if len(body) != length or _seal(body) != seal:
        raise CheckpointError(
            f"the checkpoint {path} is cut short or altered: {len(body)} bytes of {length}, or another checksum; "
            "use another checkpoint"
        )
    try:
        payload = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as problem:  # whatever the decoder trips over, the file is not ours
        raise CheckpointError(f"the checkpoint {path} cannot be decoded: {problem}") from problem
    if not isinstance(payload, dict):
        raise CheckpointError(f"the checkpoint {path} holds a {type(payload).__name__}, not a dict")
    return payload


def _seal(body: memoryview) -> bytes:
    seal = sha256(_MAGIC + struct.pack("<IQ", _VERSION, len(body)))
    seal.update(body)
    return seal.digest()


def _storable(value: Any, where: str) -> Any:
    """The value with NumPy's types replaced by torch's and Python's; an error names what cannot be stored."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.copy())
        except (TypeError, ValueError) as problem:
            raise CheckpointError(f"{where} is an array that torch cannot hold: {problem}") from problem
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int, float, bytes)) for key in value):
            raise CheckpointError(f"{where} has a key that is no string or number: {list(value)[:5]}")
        return {key: _storable(part, f"{where}[{key!r}]") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_storable(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, torch.Tensor):
        return value.detach()
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    raise CheckpointError(
        f"{where} is a {type(value).__name__}; a checkpoint holds tensors, NumPy arrays of numbers, numbers, strings, "
        "bytes, None, and lists, tuples and dicts of them"
    )


def _write(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(descriptor, view[: 1 << 30]) :]


def _sync_folder(folder: Path) -> None:
    """Make a new name in a folder outlast a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_stale(target: Path) -> None:
    """Remove the temporary files of savers that were killed: no living process holds their lock."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"[a-z0-9_]{8}\.tmp")
    for name in os.listdir(target.parent):
        if pattern.fullmatch(name):
            with contextlib.suppress(OSError), _opened(target.parent / name) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(target.parent / name)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# -- the state of the ordinary generators ----------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The generators that dropout and augmentation draw from, for a checkpoint. The private noise needs no state."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), np.asarray(keys).astype(np.int64), *rest],
        "python": [version, list(numbers), gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators back where `random_state` saw them; of GPUs, those that are there."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda, device)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys).astype(np.uint32), *rest))  # noqa: NPY002
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))


# -- the journal -----------------------------------------------------------------------------------------------------

_MARK = b"anyorder journal 1\n"
_ENTRY = struct.Struct("<Q16s8s")  # step, digest, checksum
_open_journals: "weakref.WeakSet[Journal]" = weakref.WeakSet()


class Journal:
    """A log, written ahead, of what every step of a run used its noise on.

    The noise of step t is a function of the run's key and t. A run that is resumed from a checkpoint makes the noise
    of the steps after it again; on other data, the difference of the two releases would be free of noise. So once a
    run has a checkpoint, each step commits a digest of its un-noised sum before it releases; a step that was
    committed before must have the same digest, and then it releases nothing new.

    One process has a run's journal at a time: the file is locked until `close` or the process's end. Opened again in
    the same process, the older one is closed. The file is `<folder>/.<run_id>.journal`, readable by the owner only.

    The digest is of private data: make it under a secret key (`blake2b(.., digest_size=16, key=..)`), so that the
    file says nothing to those without the checkpoint.

    Order of calls: `create` before the first checkpoint is written, `open` when one is resumed.
    """

    def __init__(self, descriptor: int, path: Path, head: bytes) -> None:
        self._descriptor = descriptor
        self.path = path
        self._head = head
        self._entries: dict[int, bytes] = {}
        self._size = 0  # bytes that are valid
        _open_journals.add(self)

    @classmethod
    def create(cls, folder: str | Path, run_id: str) -> "Journal":
        """The journal of a run that has no checkpoint yet.

        Raises: CheckpointError if the run has a journal with steps, runs elsewhere, or the folder is not writable.
        """
        journal = cls._acquire(folder, run_id, os.O_RDWR | os.O_CREAT)
        if journal._entries:
            journal.close()
            raise CheckpointError(
                f"{journal.path} has steps of this very run: its noise was used before. Resume from its checkpoint, or "
                "start a new run, with a new key"
            )
        try:
            if journal._size == 0:
                journal._append(journal._head)
            _sync_folder(journal.path.parent)
        except OSError as problem:
            journal.close()
            raise CheckpointError(f"the journal {journal.path} cannot be written: {problem}") from problem
        return journal

    @classmethod
    def open(cls, folder: str | Path, run_id: str) -> "Journal":
        """The journal of a run that is resumed.

        Raises: CheckpointError if it is missing, altered, in use by another process, or not writable.
        """
        journal = cls._acquire(folder, run_id, os.O_RDWR)
        if journal._size == 0:
            journal.close()
            raise CheckpointError(
                f"the journal {journal.path} is empty: it no longer tells which steps were released; start a new run"
            )
        return journal

    @classmethod
    def _acquire(cls, folder: str | Path, run_id: str, flags: int) -> "Journal":
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", run_id):
            raise ArgumentError(f"run_id must be 1 to 128 letters, digits, '-' or '_', got {run_id!r}")
        path = Path(os.path.realpath(folder)) / f".{run_id}.journal"
        for other in list(_open_journals):
            if other.path == path:
                other.close()
        try:
            head = _MARK + run_id.encode() + b"\n"
            journal = cls(os.open(path, flags, 0o600), path, head)
        except FileNotFoundError as problem:
            raise CheckpointError(
                f"the journal {path} of this run is missing. It tells which steps were released after the checkpoint; "
                "without it, noise could be used again on other data. Keep it beside the checkpoint, or start a new run"
            ) from problem
        except OSError as problem:
            raise CheckpointError(f"the journal {path} cannot be opened for writing: {problem}") from problem
        try:
            fcntl.flock(journal._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            journal._read()
        except BlockingIOError as problem:
            journal.close()
            raise CheckpointError(
                f"the journal {path} is locked: another process runs this very run. Two would use the same noise on "
                "different data; stop the other, or start a new run"
            ) from problem
        except OSError as problem:
            journal.close()
            raise CheckpointError(f"the journal {path} cannot be locked and read: {problem}") from problem
        except CheckpointError:
            journal.close()
            raise
        return journal

    def _read(self) -> None:
        data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        head = self._head
        if len(data) <= len(head) and data != head and head.startswith(data.rstrip(b"\0")):
            return  # killed while it was created, before any step
        if not data.startswith(head):
            raise CheckpointError(f"{self.path} is no journal of this run: it does not begin with its mark")
        self._size = len(head)
        for place in range(len(head), len(data), _ENTRY.size):
            entry = data[place : place + _ENTRY.size]
            # The last entry may be torn: its commit had not returned, so its step was not released.
            if len(entry) < _ENTRY.size or (place + _ENTRY.size == len(data) and not any(entry)):
                break
            step, digest, checksum = _ENTRY.unpack(entry)
            if checksum != self._checksum(step, digest) or step in self._entries:
                raise CheckpointError(
                    f"entry {len(self._entries)} of the journal {self.path} was altered: its checksum differs. Which "
                    "steps were released is not known; start a new run"
                )
            self._entries[step] = digest
            self._size += _ENTRY.size

    def commit(self, step: int, digest: bytes) -> None:
        """Write down, on the disk, what step uses its noise on; call it before anything noised is released.

        Args:
            step: t.
            digest: 16 bytes that differ where the un-noised sum differs.
        Raises: CheckpointError if the step was committed with another digest, or the entry cannot be written: then
            the step must not be released.
        """
        step = _check.integer("step", step, low=0, high=2**64 - 1)
        if not isinstance(digest, bytes) or len(digest) != 16:
            raise ArgumentError(f"digest must be 16 bytes, got {digest!r}")
        if self._descriptor < 0:
            raise CheckpointError(
                f"the journal {self.path} is closed: this run ended, or was resumed elsewhere in this process"
            )
        if step in self._entries:
            if self._entries[step] != digest:
                raise CheckpointError(
                    f"the noise of step {step} was already used on other data: never the same noise on other data. "
                    "A replay needs the same batches, model and settings, bit for bit, as the run that was lost; "
                    "restore them, resume from a later checkpoint, or start a new run"
                )
            return
        try:
            self._append(_ENTRY.pack(step, digest, self._checksum(step, digest)))
        except OSError as problem:
            raise CheckpointError(
                f"step {step} was not released: the journal {self.path} cannot be written: {problem}. Make room, and "
                "take the step again"
            ) from problem
        self._entries[step] = digest

    def _checksum(self, step: int, digest: bytes) -> bytes:
        """Binds an entry to the run and to its place in the file."""
        text = self._head + struct.pack("<QQ", self._size, step) + digest
        return blake2b(text, digest_size=8, person=b"anyorder journal").digest()

    def _append(self, record: bytes) -> None:
        """Write at the end of what is valid; a record that a failure cut short is written over by the next."""
        written = os.pwrite(self._descriptor, record, self._size)
        if written == len(record):
            os.fsync(self._descriptor)
            self._size += len(record)
            return
        raise OSError(f"{written} of {len(record)} bytes written")

    @property
    def steps(self) -> int:
        """Number of steps committed."""
        return len(self._entries)

    def steps_from(self, step: int) -> int:
        """Number of steps committed, of those from `step` on."""
        return sum(t >= step for t in self._entries)

    def close(self) -> None:
        """Let go of the run; `commit` is refused from here on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        _open_journals.discard(self)

    def __del__(self) -> None:
        self.close()


def _let_go_in_child() -> None:
    """A forked worker of a data loader must not hold the lock of a run whose process has died."""
    for journal in list(_open_journals):
        journal.close()


os.register_at_fork(after_in_child=_let_go_in_child)
