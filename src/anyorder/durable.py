"""Files that outlast a kill and a loss of power: how every record of this package comes to the disk.

Journal, ledger and budget are a `Log`, which only grows. Checkpoints, records of devices, sealed JSON and what a folder
shows are one value each, which `replacing` puts in the place of the one before. Locks are exclusive, of `filelock`,
which knows Windows too.

**What a crash leaves of a log.** Bytes go behind its end (`write`), to the disk (`sync`), and then count (`keep`).
Killed in between, the file has a rest behind what counts: whole, torn, or zeros where a loss of power kept the length
and not the content. What the next process takes for its end, the log's owner says, who can tell a whole record from a
torn one; the next `write` cuts off what lies behind.

**What a crash leaves of a value.** It is written to a file beside, brought to the disk, and put under the name in one
act; then the folder, where the name stands, is brought to the disk. At every moment the name has the old value or the
new one, whole. The file beside stays behind if its writer is killed; the next writer removes it, for nobody has its
lock.

Locks end with their process. They hold on one machine and, where the server supports them, over network file systems;
where a file system refuses to lock, OSError says so.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

_BINARY = getattr(os, "O_BINARY", 0)  # Windows would translate ends of lines
_MOST = 1 << 30  # bytes in one call: some systems take no more
_POLL = 0.005  # seconds
_BESIDE = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.tmp")


class Log:
    """A file that only grows. What counts ends at `end`.

    Args:
        borrowed: the descriptor is the caller's to close.

    Attributes:
        path: the file.
        end: bytes that count.
    """

    def __init__(self, path: Path, descriptor: int, end: int = 0, *, borrowed: bool = False) -> None:
        self.path, self.end, self._borrowed = path, end, borrowed
        self._descriptor = descriptor
        self._next = 0  # bytes that were written behind the end, and do not count yet
        self._is_clean = False  # whether nothing lies behind the end but these

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> "Log":
        """The log in a file, of which nothing counts yet; readable by its owner only. Raises: OSError."""
        return cls(path, os.open(path, os.O_RDWR | _BINARY | (os.O_CREAT if create else 0), 0o600))

    @property
    def is_open(self) -> bool:
        """Whether it was not closed."""
        return self._descriptor >= 0

    @property
    def is_settled(self) -> bool:
        """Whether nothing lies behind what counts, as of a write that was broken off."""
        return self.is_open and self.stat().st_size == self.end

    def lock(self) -> bool:
        """Lock the file until it is closed; False where another one has the lock. Raises: OSError."""
        return lock(self._descriptor)

    def stat(self) -> os.stat_result:
        """What the system says of the file."""
        return os.fstat(self._descriptor)

    def read(self, start: int = 0, size: int | None = None) -> bytes:
        """What the file holds, whether it counts or not. Raises: OSError."""
        return read_at(self._descriptor, start, self.stat().st_size - start if size is None else size)

    def write(self, data: bytes) -> None:
        """Write behind the end, over what was written there before and was not kept. Raises: OSError."""
        self.cut()
        before, self._next, self._is_clean = self._next, 0, False
        write_at(self._descriptor, data, self.end)
        self._is_clean = len(data) >= before  # else a part of another try is behind
        self._next = len(data)

    def cut(self, end: int | None = None) -> None:
        """Drop what lies behind the end, and is not this object's own. Raises: OSError.

        Args:
            end: drop all behind this, also where it counted.
        """
        if end is not None:
            self.end, self._is_clean = end, False
        if not self._is_clean:
            if self.stat().st_size > self.end:  # a cut of nothing would change the file's times
                os.ftruncate(self._descriptor, self.end)
            self._is_clean, self._next = True, 0

    def sync(self) -> None:
        """Bring what was written to the disk. Raises: OSError."""
        os.fsync(self._descriptor)

    def keep(self) -> None:
        """What was written last counts."""
        self.end, self._next = self.end + self._next, 0

    def append(self, data: bytes) -> None:
        """Write, sync, keep. Raises: OSError; then it does not count."""
        self.write(data)
        self.sync()
        self.keep()

    def close(self) -> None:
        """Let go of the file and of its lock."""
        if self._descriptor >= 0 and not self._borrowed:
            os.close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def open_shared(path: Path, *, write: bool, create: bool = False) -> int:
    """The descriptor of a file that everybody may read. A pipe without a writer does not block. Raises: OSError."""
    flags = (os.O_CREAT if create else 0) | _BINARY | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, os.O_RDWR | flags, 0o644)  # to look, too: network file systems lock no other
    except OSError:
        if write:
            raise
    return os.open(path, os.O_RDONLY | flags)


def read_at(descriptor: int, place: int, size: int) -> bytes:
    """Up to `size` bytes from `place` on; fewer at the end of the file. Raises: OSError."""
    parts = []
    while size > 0:
        if hasattr(os, "pread"):
            part = os.pread(descriptor, min(size, _MOST), place)
        else:  # Windows
            os.lseek(descriptor, place, os.SEEK_SET)
            part = os.read(descriptor, min(size, _MOST))
        if not part:
            break
        parts.append(part)
        size, place = size - len(part), place + len(part)
    return b"".join(parts)


def write_at(descriptor: int, data: bytes, place: int) -> None:
    """Write the bytes from `place` on. Raises: OSError, where not all could be written."""
    for start in range(0, len(data), _MOST):
        part = data if len(data) <= _MOST else memoryview(data)[start : start + _MOST]
        if hasattr(os, "pwrite"):
            done = os.pwrite(descriptor, part, place + start)
        else:  # Windows
            os.lseek(descriptor, place + start, os.SEEK_SET)
            done = os.write(descriptor, part)
        if done != len(part):
            raise OSError(f"{start + done} of {len(data)} bytes written")


# -- one value -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: str | Path, *, secret: bool = False) -> Iterator[tuple[int, Path]]:
    """A file beside this one, to be written within, which then takes its place; a symbolic link is followed.

    Yields: (descriptor, path) of the file beside: write by one of them.

    Args:
        secret: readable by its owner only, from its first byte on.
    Raises: OSError, and whatever is raised within: the file beside is removed, the old one left as it was.
    """
    target = Path(os.path.realpath(path))
    _remove_stale(target)
    descriptor, beside = _made_beside(target, 0o600 if secret else 0o666)
    try:
        try:
            yield descriptor, beside
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())
            if os.name == "nt":  # which moves no open file
                os.close(descriptor)
                descriptor = -1
            os.replace(beside, target)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    sync_folder(target.parent)


def _made_beside(target: Path, mode: int) -> tuple[int, Path]:
    """A new file beside, locked, which marks it as in use for as long as this process lives."""
    while True:
        beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, mode)
        try:
            is_ours = lock(descriptor) and beside.exists()
        except OSError:  # no locks here: then nobody removes it
            is_ours = True
        if is_ours:
            return descriptor, beside
        os.close(descriptor)  # another writer took it for a rest between its making and its lock
        with contextlib.suppress(OSError):
            os.unlink(beside)


def replace(path: str | Path, *parts: bytes | memoryview, secret: bool = False) -> None:
    """Put these bytes in the place of what a file holds, as `replacing` does. Raises: OSError."""
    with replacing(path, secret=secret) as (descriptor, _):
        for part in parts:
            view = memoryview(part)
            while len(view):
                done = os.write(descriptor, view[:_MOST])
                if done <= 0:
                    raise OSError("it was not written as a whole")
                view = view[done:]


def move(path: Path, to: Path) -> None:
    """Give a file another name in its folder, on the disk when it returns. Raises: OSError."""
    os.replace(path, to)
    sync_folder(to.parent)


def remove(path: Path) -> None:
    """Remove a file, if it is there, for good. Raises: OSError."""
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


def name_of_rest(name: str) -> str | None:
    """The name of the file that a file beside was to replace; None for what is no such file."""
    found = _BESIDE.fullmatch(name)
    return None if found is None else found[1]


def _remove_stale(target: Path) -> None:
    """Remove what writers that were killed have left: no living process has its lock."""
    for name in os.listdir(target.parent):
        if name_of_rest(name) == target.name:
            with contextlib.suppress(OSError):
                log = Log.open(target.parent / name)
                try:
                    is_stale = log.lock()
                    if is_stale and os.name != "nt":  # which removes no open file
                        os.unlink(log.path)
                finally:
                    log.close()
                if is_stale and os.name == "nt":
                    os.unlink(log.path)


def sync_folder(folder: Path) -> None:
    """Make a new name in a folder outlast a loss of power; Windows does so by itself, and opens no folder."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- locks -----------------------------------------------------------------------------------------------------------


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file for this process until the descriptor is closed; False where another one has the lock.

    Raises: OSError where the file system has no locks.
    """
    from filelock import lock_descriptor  # here: 15 ms, which those who lock nothing do without

    return lock_descriptor(descriptor, blocking=wait, poll_interval=_POLL)


def unlock(descriptor: int) -> None:
    """Let go of the lock before the descriptor is closed: a forked child may have a copy of it."""
    from filelock import unlock_descriptor

    with contextlib.suppress(OSError):
        unlock_descriptor(descriptor)


def lock_file(path: Path, *, wait: bool = False) -> int:
    """The descriptor of a file that is there to be locked, locked: close it to let go.

    Raises: BlockingIOError where another one has the lock; OSError where it cannot be made or locked.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not lock(descriptor, wait=wait):
            raise BlockingIOError(f"{path} is locked")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def in_forked_child(act: Callable[[], None]) -> None:
    """Have this done in every forked child, which has copies of its parent's descriptors and locks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)
