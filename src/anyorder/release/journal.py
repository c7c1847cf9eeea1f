"""The journal of a run: what each step used its noise on, so that no noise is used on two different data."""

import gc
import glob
import os
import re
import struct
import time
import weakref
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from anyorder import checks, durable
from anyorder.errors import ArgumentError, CheckpointError

_MARK = b"anyorder journal 2\n"
_ANY_MARK = b"anyorder journal "
_RECORD = struct.Struct("<cQ16sQ8s")  # kind, number, content, time of the change in ns, checksum
_STEP, _RENEWAL, _FILE = b"s", b"r", b"f"  # (step, digest), (step, nonce), (inode, of which plan)
_END = b"e"  # (steps that count, of which plan): another start takes the place of this one
_BEFORE = b"b"  # (starts that were moved aside before this one, of which plan)
_FLUSH = b"t"  # (next step, digest of the tables that were shown)
_SAME_TIME = 100_000  # ns by which the file's own time may be later than that in its last record
_TICK = 10_000_000  # and earlier: systems note the time of their last tick
_ATTEMPTS = 8
_open_journals: "weakref.WeakSet[Journal]" = weakref.WeakSet()


class Journal:
    """A log, written ahead, of what every step of a run used its noise on.

    The noise of step t is a function of the run's key and t. A run that is resumed from a checkpoint makes the noise
    of the steps after it again; on other data, the difference of the two releases would be free of noise. So each step
    commits a digest of its un-noised sum before it releases; a step that was committed before must have the same
    digest, and then it releases nothing new.

    A journal that is not the very file that the run wrote last may lack steps: that of a copied folder, whose other
    copy went on; one from a backup; one that was cut. Every record tells the file's inode and the time at which the
    system noted this very change; nobody can set that time (`st_ctime`). Where they differ from the file's own,
    `doubt` says why, and the rows of steps that no entry covers must come from a fresh key (`renew`). A copy of a whole
    file system or machine, taken and put back beneath the system, looks like the file itself: see the limits page.

    One process has the journal of a checkpoint file at a time: it is locked until `close` or the process's end. Opened
    again for the same run in the same process, the older one is closed. The file is `.<name of checkpoint>.journal`
    next to the checkpoint, readable by the owner only. Its digests are of private data: make them under a secret key,
    so that the file says nothing to those without the checkpoint.

    Attributes:
        path: the file.
        doubt: why the journal may lack steps; None for the file that the run wrote.
        renewals: (step, nonce) in their order: from this step on, new rows come from a key of this nonce.
        plan: 16 bytes of the digest of the run's plan; zeros in a journal of an earlier version.
        ended: steps that count, where the run was said to be over; else 0.
        before: starts that were moved aside before this one.
    """

    def __init__(self, log: durable.Log, run_id: str) -> None:
        self._log = log
        self.path = log.path
        self.on_close: Callable[[], None] | None = None  # of what else the one who has the journal may write
        self.doubt: str | None = None
        self.renewals: list[tuple[int, bytes]] = []
        self._head = _MARK + run_id.encode() + b"\n"
        self._entries: dict[int, bytes] = {}
        self._flushes: dict[int, bytes] = {}
        self.plan = bytes(16)
        self.ended = 0
        self.before = 0
        self._last = (0, 0)  # inode, and time of the last record
        _open_journals.add(self)

    @classmethod
    def create(cls, checkpoint: str | Path, run_id: str, plan: bytes = bytes(16)) -> "Journal":
        """The journal of a run that has no checkpoint yet. What a run left that took no step is replaced. Where the
        run is this very one, of a key that was given, its steps are replayed.

        Args:
            plan: 16 bytes of the digest of its plan.
        Raises: CheckpointError if another run is using the checkpoint file, or took steps and its checkpoint is gone,
            or the folder is not there or not writable.
        """
        journal = cls._acquire(checkpoint, run_id, create=True)
        try:
            data = journal._log.read()
            if data.startswith(journal._head):
                journal._read(data)
            elif _has_steps(data):
                raise CheckpointError(
                    f"{journal.path} is of a run that took steps, and whose checkpoint {checkpoint} is gone: a new run "
                    "on the same data would be released in addition, with other noise. Put the checkpoint back to go "
                    "on with that run. Or begin again with start_over=True (Release, PrivacyEngine; train "
                    "--start-over): then certificate and budget count what that run released too. What has no such "
                    "option (servers, fit) begins in another place: compose both (ao.compose)"
                )
            elif data.startswith(_ANY_MARK) or _ANY_MARK.startswith(data.rstrip(b"\0")):
                journal._log.append(journal._head)
                journal._put(_FILE, journal._log.stat().st_ino, plan)
            else:
                raise CheckpointError(f"{journal.path} is no journal of anyorder, and not replaced; move it away")
            durable.sync_folder(journal.path.parent)
        except (OSError, CheckpointError) as problem:
            journal.close()
            if isinstance(problem, CheckpointError):
                raise
            raise CheckpointError(f"the journal {journal.path} cannot be written: {problem}") from problem
        return journal

    @classmethod
    def open(cls, checkpoint: str | Path, run_id: str) -> "Journal":
        """The journal of a run that is resumed.

        Raises: CheckpointError if it is missing, altered, of another run, in use by another process, or not writable.
        """
        journal = cls._acquire(checkpoint, run_id, create=False)
        try:
            journal._read(journal._log.read())
        except (OSError, CheckpointError) as problem:
            journal.close()
            if isinstance(problem, CheckpointError):
                raise
            raise CheckpointError(f"the journal {journal.path} cannot be read: {problem}") from problem
        return journal

    @classmethod
    def _acquire(cls, checkpoint: str | Path, run_id: str, *, create: bool) -> "Journal":
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", run_id):
            raise ArgumentError(f"run_id must be 1 to 128 letters, digits, '-' or '_', got {run_id!r}")
        path = _path_of(checkpoint)
        _end_others(path, _MARK + run_id.encode() + b"\n")
        try:
            journal = cls(durable.Log.open(path, create=create), run_id)
        except FileNotFoundError as problem:
            raise CheckpointError(
                f"the journal {path} of this run is missing. It tells which steps were released after the checkpoint; "
                "without it, noise could be used again on other data. Keep it next to the checkpoint, under its name, "
                "or start a new run"
            ) from problem
        except OSError as problem:
            raise CheckpointError(f"the journal {path} cannot be opened for writing: {problem}") from problem
        try:
            is_ours = journal._log.lock()
        except OSError as problem:
            journal.close()
            raise CheckpointError(f"the journal {path} cannot be locked: {problem}") from problem
        if not is_ours:
            journal.close()
            raise CheckpointError(
                f"the journal {path} is locked: another process runs with this checkpoint file. Two would use the same "
                "noise on different data, or replace each other's checkpoint; stop the other, or choose another file"
            )
        return journal

    @classmethod
    def of_any_run(cls, checkpoint: str | Path) -> "Journal | None":
        """The journal of whichever run has taken steps with this checkpoint file; None where there is none.

        Raises: CheckpointError as `open`, but not for records that were altered: `doubt` says so.
        """
        if not cls.has_steps(checkpoint):
            return None
        head = _path_of(checkpoint).read_bytes().split(b"\n", 2)[1]
        journal = cls._acquire(checkpoint, head.decode("ascii", "replace"), create=False)
        try:
            journal._read(journal._log.read())
        except CheckpointError:
            journal.doubt = "its records were altered"
        except OSError as problem:
            journal.close()
            raise CheckpointError(f"the journal {journal.path} cannot be read: {problem}") from problem
        return journal

    def end(self, steps: int, plan: bytes) -> None:
        """Write down, on the disk, that another start takes the place of this one, of which so many steps count."""
        self._commit(_END, steps, plan, "nothing was started over", "start over again")

    def begin_after(self, starts: int) -> None:
        """Write down, on the disk, how many starts were moved aside before: who starts over later finds one missing."""
        if starts > self.before and self.doubt is None:  # a doubtful file keeps the time that it is doubted by
            self._commit(_BEFORE, starts, self.plan, "the run was not begun", "begin again")

    def move_aside(self, others: list[Path]) -> None:
        """Keep the file as that of an earlier start, numbered, and before it the others of the run; and let go of it.

        Raises: CheckpointError. What a kill leaves is refused without start_over=True, or is found by `earlier`.
        """
        folder = self.path.parent
        number = 1 + max((int(path.suffix[1:]) for path in _set_aside(self.path)), default=0)
        try:
            for path in others:
                if path.exists():
                    durable.move(path, folder / f".{path.name}.{number}")
            durable.move(self.path, folder / f"{self.path.name}.{number}")
        except OSError as problem:
            raise CheckpointError(f"the files of the run before cannot be moved aside: {problem}") from problem
        finally:
            self.close()

    @staticmethod
    def earlier(checkpoint: str | Path, plan: bytes, most: int) -> list[tuple[str, int]]:
        """(run_id, steps that count) of each start that `move_aside` has put away, in their order.

        Args:
            plan: 16 bytes of the plan's digest, which must be theirs.
            most: steps that count where a file does not say how many.
        Raises: CheckpointError where one was of another plan: what it released has another curve.
        """
        found = []
        for path in _set_aside(_path_of(checkpoint)):
            data = path.read_bytes()
            head, last = data.split(b"\n", 2)[1], data[-_RECORD.size :]
            kind, steps, content, *_ = _RECORD.unpack(last) if len(last) == _RECORD.size else (b"", 0, b"")
            if kind == _END and content != plan:
                raise CheckpointError(_OTHER_PLAN.format(path))
            found.append((head.decode("ascii", "replace"), min(steps, most) if kind == _END else most))
        return found

    @staticmethod
    def has_earlier(checkpoint: str | Path) -> bool:
        """Whether a start was moved aside from this checkpoint file."""
        return bool(_set_aside(_path_of(checkpoint)))

    @staticmethod
    def has_steps(checkpoint: str | Path) -> bool:
        """Whether the journal of a checkpoint file, of any run, has steps. False where there is no journal."""
        try:
            data = _path_of(checkpoint).read_bytes()
        except FileNotFoundError:
            return False
        except OSError as problem:
            raise CheckpointError(f"the journal of {checkpoint} cannot be read: {problem}") from problem
        return _has_steps(data)

    def _read(self, data: bytes) -> None:
        if not data.startswith(self._head):
            raise CheckpointError(
                f"{self.path} is no journal of this run, or it was emptied: which steps were released is not known; "
                "start a new run"
            )
        self._log.end = len(self._head)
        end = len(data.rstrip(b"\0"))  # zeros behind it are what a loss of power leaves; a whole record may end in some
        end = min(len(data), end + (self._log.end - end) % _RECORD.size)
        while self._log.end + _RECORD.size <= len(data) and self._log.end < end:
            kind, number, content, when, checksum = _RECORD.unpack_from(data, self._log.end)
            known = kind in (_RENEWAL, _FILE, _FLUSH, _END, _BEFORE) or (kind == _STEP and number not in self._entries)
            if not known or checksum != self._checksum(kind, number, content, when):
                if end - self._log.end < 2 * _RECORD.size:
                    break  # nothing whole follows
                place = (self._log.end - len(self._head)) // _RECORD.size
                raise CheckpointError(
                    f"record {place} of the journal {self.path} was altered: its "
                    "checksum differs. Which steps were released is not known; start a new run"
                )
            self._keep(kind, number, content, when)
            self._log.end += _RECORD.size
        # A rest is a record that a loss of power or a kill tore, whose step was not released, or what a cut has left.
        # A torn one may be as long as a whole one: `_put` writes over its own last attempt, and a write is not one act.
        # If somebody altered it, the file is as one that was cut before it, and the doubt leads to fresh noise too.
        changed = self._log.stat()
        inode, when = self._last
        if self._log.end != len(data):
            self.doubt = "its last record is torn"
        elif inode != changed.st_ino:
            self.doubt = "it is not the file that the run wrote, but a copy"
        elif not _is_same(_time_of(changed), when):
            self.doubt = "it was written, moved or put back by something else after the run's last step"

    def _keep(self, kind: bytes, number: int, content: bytes, when: int) -> None:
        """Take over what a record says that counts."""
        if kind == _STEP:
            self._entries[number] = content
        elif kind == _RENEWAL:
            self.renewals.append((number, content))
        elif kind == _FLUSH:
            self._flushes[number] = content
        elif kind == _END:
            self.ended = max(self.ended, number)
        elif kind == _BEFORE:
            self.before = max(self.before, number)
        if kind in (_FILE, _END) and any(content):
            self.plan = content
        self._last = (number if kind == _FILE else self._last[0], when)

    def commit(self, step: int, digest: bytes, hint: str = "") -> None:
        """Write down, on the disk, what step uses its noise on; call it before anything noised is released.

        Args:
            step: t.
            digest: 16 bytes that differ where the un-noised sum differs.
            hint: what a message on another sum should say besides.
        Raises: CheckpointError if the step was committed with another digest, or the entry cannot be written: then
            the step must not be released.
        """
        step = checks.integer("step", step, low=0, high=2**64 - 1)
        if not isinstance(digest, bytes) or len(digest) != 16:
            raise ArgumentError(f"digest must be 16 bytes, got {digest!r}")
        self.check_open()
        if step in self._entries:
            if self._entries[step] != digest:
                raise CheckpointError(
                    f"the noise of step {step} was already used on other data: never the same noise on other data. "
                    "A replay needs the same batches, model and settings, bit for bit, as the run that was lost, and "
                    f"a machine, torch version and number of threads that round alike{hint}. Restore them, resume "
                    "from a later checkpoint, or start a new run"
                )
            return
        self._commit(_STEP, step, digest, f"step {step} was not released", "take the step again")

    def commit_flush(self, step: int, digest: bytes) -> None:
        """Write down, on the disk, that tables were brought up to date before `step`; call it before they are shown.

        Where they were shown at this step before, by a process that was lost, they must be the same. Elsewhere they
        must not be shown while lost steps are repeated: the rows' noise over this step would be out in two draws.

        Raises: CheckpointError; then the tables must not be shown.
        """
        self.check_open()
        if step in self._flushes:
            if self._flushes[step] != digest:
                raise CheckpointError(
                    f"other tables were shown before step {step}: never two draws of one noise. A replay needs the "
                    "same batches, model and settings, rows read at the same steps, and a machine that rounds alike, "
                    "as the run that was lost. Restore them, resume from a later checkpoint, or start a new run"
                )
            return
        self.check_flush(step)
        self._commit(_FLUSH, step, digest, "the tables were not shown", "flush again")

    def _commit(self, kind: bytes, number: int, content: bytes, undone: str, again: str) -> None:
        """Put a record on the disk. Raises: CheckpointError, which says what was not done and how to go on."""
        try:
            self._put(kind, number, content)
        except OSError as problem:
            raise CheckpointError(
                f"{undone}: the journal {self.path} cannot be written: {problem}. Make room, and {again}"
            ) from problem

    def check_flush(self, step: int) -> None:
        """Raise CheckpointError where a lost process has gone on from `step` without showing the tables."""
        self.check_open()
        if step < self.next_step and step not in self._flushes:
            raise CheckpointError(
                f"the tables were not shown before step {step} by the process that took it, and it was lost: take "
                f"steps {step} to {self.next_step - 1} again first, and flush then"
            )

    def has_flush(self, step: int) -> bool:
        """Whether tables were shown before this step."""
        return step in self._flushes

    def check_open(self) -> None:
        """Raise CheckpointError where this object no longer stands for the run."""
        if not self._log.is_open:
            raise CheckpointError(
                f"the journal {self.path} is closed: this run ended, or was resumed elsewhere in this process"
            )

    def renew(self, step: int, nonce: bytes, known: list[tuple[int, bytes]]) -> None:
        """Write down that from `step` on new rows come from a key of this nonce, and that this file is the run's now.

        Args:
            known: renewals of the checkpoint, of which the journal may have lost some.
        """
        missing = known[len(self.renewals) :]
        try:
            self._log.cut()
            for number, content in (*missing, (step, nonce)):
                self._put(_RENEWAL, number, content)
            self._put(_FILE, self._log.stat().st_ino, self.plan)  # last: until then the doubt remains
        except OSError as problem:
            raise CheckpointError(f"the journal {self.path} cannot be written: {problem}") from problem
        self.doubt = None

    def _put(self, kind: bytes, number: int, content: bytes) -> None:
        """Append a record that tells when the system noted the change: by the clock, or else by what it noted before.
        It has the time of its own write, and is written again, in its place, until that came true.

        Systems note the exact time, or that of a tick up to 10 ms ago, so that the clock's comes true at once, and a
        kill finds a whole record or none. The other guess is for the clock of a file server. Where none comes true, a
        resume will be in doubt.
        """
        changed = _time_of(self._log.stat())
        for attempt in range(_ATTEMPTS):
            when = changed if attempt % 2 else time.time_ns()
            checksum = self._checksum(kind, number, content, when)
            self._log.write(_RECORD.pack(kind, number, content, when, checksum))
            changed = _time_of(self._log.stat())
            if _is_same(changed, when):
                break
        self._log.sync()
        self._keep(kind, number, content, when)
        self._log.keep()

    def _checksum(self, kind: bytes, number: int, content: bytes, when: int) -> bytes:
        """Binds a record to the run and to its place in the file."""
        text = self._head + struct.pack("<QcQQ", self._log.end, kind, number, when) + content
        return blake2b(text, digest_size=8, person=b"anyorder journal").digest()

    @property
    def steps(self) -> int:
        """Number of steps committed."""
        return len(self._entries)

    @property
    def is_settled(self) -> bool:
        """Whether the file holds what this object knows, and nothing behind it, as of a commit that was broken off."""
        return self._log.is_settled

    @property
    def next_step(self) -> int:
        """The first step of which nothing is written."""
        return max([t + 1 for t in self._entries] + [t for t, _ in self.renewals], default=0)

    def missing(self, step: int) -> list[int]:
        """Steps from `step` on that have no entry, though later ones have: their noise was used on data unknown."""
        return [t for t in range(step, self.next_step) if t not in self._entries]

    def close(self) -> None:
        """Let go of the run; `commit` is refused from here on."""
        self._end()
        _open_journals.discard(self)

    def _end(self) -> None:
        if self._log.is_open:
            self._log.close()
            if self.on_close is not None:
                self.on_close()

    def __del__(self) -> None:
        # The set of open journals lets go of it by itself; to be taken out here would break into a walk through it.
        self._end()


def _is_same(changed: int, when: int) -> bool:
    """Whether a change that a record tells of is the file's last one: what others do to a file, they do later."""
    return when - _TICK <= changed <= when + _SAME_TIME


def _time_of(found: os.stat_result) -> int:
    """When the file was changed last, ns. Windows shows a time that can be set: a file that somebody puts back with its
    time is not found out there.
    """
    return found.st_mtime_ns if os.name == "nt" else found.st_ctime_ns


def _has_steps(data: bytes) -> bool:
    """Whether a journal of any run has steps, or tells of some: one that was cut and renewed still has its renewals."""
    begin = data.find(b"\n", len(_MARK)) + 1
    told = {_STEP[0], _RENEWAL[0], _FLUSH[0], _END[0]}  # an end: of one whose own journal was gone
    return data.startswith(_ANY_MARK) and bool(begin) and not told.isdisjoint(data[begin :: _RECORD.size])


_OTHER_PLAN = (
    "{} is of a run that took steps under another plan, or of a version that did not say which: what a new start "
    "releases is counted beside it where both have one plan. Start over with that plan; or begin in a checkpoint file "
    "of another name, and compose both (ao.compose; in a budget, an entry for each)"
)


def check_same_plan(journal: Journal, plan: bytes) -> None:
    """Raise CheckpointError unless the journal says that its run had this plan."""
    if journal.plan != plan:
        raise CheckpointError(_OTHER_PLAN.format(journal.path))


def _set_aside(journal: Path) -> list[Path]:
    """The journals of earlier starts, in their order."""
    found = [path for path in journal.parent.glob(f"{glob.escape(journal.name)}.*") if path.suffix[1:].isdigit()]
    return sorted(found, key=lambda path: int(path.suffix[1:]))


def _path_of(checkpoint: str | Path) -> Path:
    checkpoint = Path(os.path.realpath(checkpoint))
    return checkpoint.with_name(f".{checkpoint.name}.journal")


def _end_others(path: Path, head: bytes) -> None:
    """Close this process's journals of the run at this path; refuse where they are of another run."""
    if any(other.path == path and other._head != head for other in _open_journals):
        gc.collect()  # engines that nobody holds any more
    for other in [other for other in _open_journals if other.path == path]:
        if other._head != head:
            raise CheckpointError(
                f"an engine of this process runs with this checkpoint file already (it has {path}), and would lose its "
                "own: call its close(), resume from what it saved, or choose another file"
            )
        other.close()


def _let_go_in_child() -> None:
    """A forked worker of a data loader must not hold the lock of a run whose process has died."""
    for journal in list(_open_journals):
        journal.close()


durable.in_forked_child(_let_go_in_child)
