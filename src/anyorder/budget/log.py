"""A budget's file: lines of JSON, chained, in a log that only grows (`anyorder.durable`).

**What a crash leaves.** A line counts once it is whole; `append` returns after it, and its name, are on the disk. What
is behind the last whole line, torn or zeros, is no line: nobody was told that it counts, and the next writer cuts it
off. A whole last line that only lacks its end of line does count.

**What is found.** A line that is not what was chained raises BudgetError, and nothing is spent any more. Beside the
file lies `.NAME.mark`, with the number of lines and the last chain, written after each line is on the disk: a file that
has fewer lines than the mark tells of, or others (a backup put back, a copy that went on otherwise, an end that was cut
off), is refused. Whoever deletes both begins anew: what was spent is then known to nobody, and that is the owner's
promise to keep. Copies each go on alone, so keep one.

The lock is on the file itself, for as long as one spend takes; who only looks has it while the lines are read, where
it can be had. Where a file system refuses to lock, nothing is spent. Threads that share an object wait for each other
before it.
"""

import contextlib
import hashlib
import json
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, assert_never

from anyorder import durable
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.amplification.methods import MonteCarlo
from anyorder.accounting.curves import BoundedRange, Composed, Curve, Gaussian, Sampled, compose
from anyorder.errors import BudgetError
from anyorder.formats import brief, canonical, check_names

# ----------------------------------------------------------------------------------------------------
# The lines of a budget file: what each says, and the chain that binds it to all lines before it.
#
#     line    one JSON object, plain ASCII, and "\n"
#     chain   sha256(chain of the line before | this line's JSON without its chain)
#
# The first line says what the budget is of; then come spends, what runs turned out to use, and limits. All of it is
# public: no ids, no data, and curves alone. What units have each is in a file of its own; see
# `anyorder.budget.account`.


FORMAT = "anyorder-budget/1"
FILTERS = ("gaussian", "renyi")


@dataclass(frozen=True, kw_only=True)
class Begin:
    """What the budget is of.

    Attributes:
        id: 32 hexadecimal digits, drawn when it was made.
        unit, neighbours: of every plan; None: as those of the first that is spent.
        adaptive: whether later plans may be chosen after results of earlier ones.
        filter: which of `FILTERS` counts, if adaptive; None: by the law of the first that is spent.
        order: of the Rényi filter, fixed for good.
    """

    kind = "begin"
    id: str
    epsilon: float
    delta: float
    unit: str | None
    neighbours: str | None
    adaptive: bool
    filter: str | None
    order: int
    time: str


@dataclass(frozen=True, kw_only=True)
class UnitsAt:
    """Where the units' own parts of an entry are, in the secret file, and which file that is.

    Attributes:
        offset, size, digest: of the rows; the digest is under the file's key.
        key: fingerprint of that key. All entries of a budget have the same.
    """

    offset: int
    size: int
    digest: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Spend:
    """A plan, a run, or anything else with a curve, that units may be used for.

    Attributes:
        number: from 1, rising by 1.
        what: "plan", "certificate", "search" or "curve".
        parts: its curve, or that of one run of a search, for the budget's neighbours.
        search: the law of a search, whose runs have that curve; None for what is no search.
        plan: digest of the plan as it may be shown; None for what is none.
        run: a word under which it is charged once, however often it is asked for.
        key: fingerprint of the noise of the run, where it is known.
        about: words and numbers of the plan, for people.
        units: where each unit's own part is; None where everybody has the whole.
    """

    kind = "spend"
    number: int
    name: str
    what: str
    parts: list[dict[str, Any]]
    search: dict[str, Any] | None = None
    plan: str | None = None
    run: str | None = None
    key: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    units: dict[str, Any] | None = None
    time: str


@dataclass(frozen=True, kw_only=True)
class Settle:
    """What the run of an entry turned out to use.

    Attributes:
        number: of the entry.
        key: fingerprint of the noise of its run.
        steps: that it took.
        max_participations, min_separation: of those who took part.
        mu: of that.
    """

    kind = "settle"
    number: int
    key: str
    steps: int
    max_participations: int
    min_separation: int
    mu: float
    time: str


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit that holds from here on."""

    kind = "limit"
    epsilon: float
    delta: float
    time: str


Line = Begin | Spend | Settle | Limit
Entry = Spend | Settle | Limit


def encode(line: Line, chain: str) -> tuple[bytes, str]:
    """(the line as it is written, its chain) behind a line with the given chain."""
    data = {"kind": line.kind, **{f.name: getattr(line, f.name) for f in fields(line)}}
    if type(line) is Begin:
        data = {"format": FORMAT, **data}  # first, so that the file says what it is
    linked = _link(chain, data)
    return json.dumps({**data, "chain": linked}, allow_nan=False).encode("ascii") + b"\n", linked


def decode(raw: bytes, chain: str) -> tuple[Line, str]:
    """What a line says. Raises: ValueError if it is not whole, altered, or does not follow the line of this chain."""
    data = json.loads(raw)
    if not isinstance(data, dict):
        raise ValueError("it is no object")
    linked = data.pop("chain", None)
    if linked != _link(chain, data):
        raise ValueError("its chain differs")
    if data.get("kind") == Begin.kind and data.pop("format", None) != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    kinds: dict[str, type[Line]] = {one.kind: one for one in (Begin, Spend, Settle, Limit)}
    made = kinds.get(str(data.pop("kind", None)))
    if made is None:
        raise ValueError("its kind is unknown: a later version wrote it")
    check_names("a line", data, {f.name for f in fields(made)})
    return made(**data), linked


def _link(chain: str, data: dict[str, Any]) -> str:
    return hashlib.sha256((chain + canonical(data)).encode()).hexdigest()


# -- curves ----------------------------------------------------------------------------------------------------------


def write_curve(curve: Curve) -> list[dict[str, Any]]:
    """The parts of a curve, as JSON values; `read_curve` has them back."""
    match curve:
        case Composed():
            return [one for part in curve.parts for one in write_curve(part)]
        case Gaussian():
            own: dict[str, Any] = {"kind": "gaussian", "mu": curve.mu}
        case BoundedRange():
            own = {"kind": "bounded-range", "e0": curve.e0, "draws": curve.draws}
        case Sampled():
            own = {
                "kind": "sampled", "sigma": curve.sigma, "sampling_probability": curve.sampling_probability,
                "n": curve.n, "e0": curve.e0, "draws": curve.draws,
            }  # fmt: skip
        case Amplified():
            _check_countable(curve)
            return [{"kind": "amplified", **curve.to_dict()}]
        case _:
            assert_never(curve)
    return [{**own, "neighbours": curve.neighbours, "unit": curve.unit}]


def _check_countable(curve: Amplified) -> None:
    """Raise BudgetError for what no sum is made of."""
    if type(curve.method) is MonteCarlo:
        raise BudgetError(
            "a claim by samples holds for one delta of one release, and a budget adds up whole curves: plan with "
            "ao.order(.., method='bound'), which is counted"
        )


def read_curve(parts: list[dict[str, Any]], relation: str | None = None) -> Curve:
    """The curve of these parts.

    Args:
        relation: that all of them are to be for; their own by default.
    Raises: BudgetError for what `write_curve` does not write.
    """
    found: list[Curve] = []
    try:
        for part in parts:
            own = {name: value for name, value in part.items() if name not in ("kind", "neighbours")}
            neighbours = part["neighbours"] if relation is None else relation
            match part["kind"]:
                case "gaussian":
                    found.append(Gaussian(**own, neighbours=neighbours))
                case "bounded-range":
                    found.append(BoundedRange(**own, neighbours=neighbours))
                case "sampled":
                    found.append(Sampled(**own, neighbours=neighbours))
                case "amplified":
                    found.append(Amplified.from_dict({**own, "neighbours": neighbours}))
                case _:
                    raise ValueError("its kind is unknown")
        return compose(*found)
    except Exception as problem:  # of a line that is chained, so that its writer made it so
        raise BudgetError(f"the budget file holds a curve that is none: {brief(problem)}") from problem


def relabelled(curve: Curve, neighbours: str) -> Curve:
    """The same numbers, said to be for another relation; never from or to "replace-one", which has others."""
    if curve.neighbours == neighbours:
        return curve
    return read_curve(write_curve(curve), neighbours)


def label_of(parts: list[dict[str, Any]]) -> str:
    """The one relation that curves of a budget have in sums; that they are for the budget's was checked before.

    "zero-out" for it and for "add-or-remove", which budgets for zero-out take too, with one number. An amplified curve
    of "replace-one" is another curve, so that this is a label of its own, which all entries of such a budget have.
    """
    return "replace-one" if any(part["neighbours"] == "replace-one" for part in parts) else "zero-out"


_START = f'{{"format": "{FORMAT}"'.encode()
_WAIT = 300.0  # seconds for a lock: others may compute loss distributions while they hold it


class BudgetLog:
    """The lines of one file, as far as this object has read them.

    Attributes:
        path: with symbolic links followed, so that all names of the file have one lock and one mark.
        lines: all that count.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.realpath(path))
        self.lines: list[Line] = []
        self._chain, self._end, self._inode = "", 0, -1
        self._needs_newline = False
        self._mutex = threading.Lock()
        _LOGS.add(self)

    @property
    def mark_path(self) -> Path:
        """Of the mark."""
        return self.path.with_name(f".{self.path.name}.mark")

    @contextlib.contextmanager
    def locked(self, *, write: bool, create: bool = False) -> Iterator[int]:
        """The descriptor of the file. `lines` are all there are; with `write`, while nobody else writes any.

        Args:
            create: make the file, empty, where there is none.
        Raises: BudgetError if it is not there, cannot be opened, locked or read, or was altered.
        """
        until = time.monotonic() + _WAIT
        mutex = self._mutex
        if not mutex.acquire(timeout=_WAIT):
            raise self._busy("another thread")
        try:
            descriptor = self._open(write, create, until)
            try:
                with self._whole():
                    self._read(descriptor)
                if not write:  # readers that think for long, or come and go, keep no writer out
                    durable.unlock(descriptor)
                yield descriptor
            finally:
                durable.unlock(descriptor)  # a forked child may hold the same lock by its copy
                os.close(descriptor)
        finally:
            mutex.release()

    def forked(self) -> None:
        """Begin anew in a child, which was forked while another thread may have been at work in here."""
        self._mutex, self._inode = threading.Lock(), -1

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """What is interrupted within leaves nothing half taken over: it is read again."""
        try:
            yield
        except BaseException:
            self._inode = -1
            raise

    def _open(self, write: bool, create: bool, until: float) -> int:
        while True:
            try:
                descriptor = durable.open_shared(self.path, write=write, create=create)
            except FileNotFoundError as problem:
                raise BudgetError(
                    f"there is no budget file {self.path}; make it with ao.Budget(path, epsilon=.., delta=..) or "
                    f"anyorder budget FILE limit --epsilon .. --delta .., once for a data set"
                ) from problem
            except OSError as problem:
                raise BudgetError(f"the budget file {self.path} cannot be opened: {problem.strerror}") from problem
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise BudgetError(f"{self.path} is no regular file")
                self._lock(descriptor, write, until)
                if self._is_current(descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # replaced while we waited

    def _lock(self, descriptor: int, write: bool, until: float) -> None:
        pause = 0.0005
        try:
            while not durable.lock(descriptor):
                if time.monotonic() > until:
                    raise self._busy("another process")
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        except OSError as problem:
            if not write:  # what is whole counts, whoever writes meanwhile
                return
            raise BudgetError(
                f"the budget file {self.path} cannot be locked: {problem.strerror}. Without a lock two runs could "
                "spend the same; nothing was spent. Keep it on a file system with locks"
            ) from problem

    def _busy(self, by: str) -> BudgetError:
        return BudgetError(
            f"the budget file {self.path} is locked by {by} for {_WAIT:g} seconds; nothing was spent. Wait for its "
            "end, and ask again"
        )

    def _is_current(self, descriptor: int) -> bool:
        mine = os.fstat(descriptor)
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (mine.st_ino, mine.st_dev) == (named.st_ino, named.st_dev)

    # -- to read -----------------------------------------------------------------------------------------------------

    def _read(self, descriptor: int) -> None:
        """Take over the lines that others wrote since."""
        found = os.fstat(descriptor)
        if found.st_ino != self._inode or found.st_size < self._end:
            self.lines, self._chain, self._end, self._needs_newline = [], "", 0, False
            self._inode = found.st_ino
        mark = self._mark()  # before the lines: it is never ahead of them, also where they are read without a lock
        try:
            raw = durable.read_at(descriptor, self._end, found.st_size - self._end)
        except OSError as problem:
            raise BudgetError(f"the budget file {self.path} cannot be read: {problem.strerror}") from problem
        if self._needs_newline and raw.startswith(b"\n"):
            raw, self._end, self._needs_newline = raw[1:], self._end + 1, False
        if not self.lines and raw and not raw.startswith(_START) and not _START.startswith(raw.rstrip(b"\0")):
            raise BudgetError(f"{self.path} is no budget file of anyorder, and not written to; choose another file")
        *whole, rest = raw.split(b"\n")
        for place, one in enumerate(whole):
            is_last = place == len(whole) - 1 and not rest.strip(b"\0")
            if is_last and b"\0" in one:
                break  # of which a loss of power kept the length, not the content
            self._take(one, len(one) + 1)
            self._check_mark(mark)
        else:
            self._take_rest(rest)
            self._check_mark(mark)
        if mark is not None and self.lines and mark[0] == self._id and len(self.lines) < mark[1]:
            raise BudgetError(
                f"the budget file {self.path} has {len(self.lines)} lines, and {mark[1]} were written: it is cut "
                f"short, or an older copy. What was spent is not known. Put back the file of {self.mark_path.name}"
            )

    def _take(self, one: bytes, size: int) -> None:
        try:
            line, self._chain = decode(one, self._chain)
            if (type(line) is Begin) != (not self.lines):
                raise ValueError("it is not in its place")
        except Exception as problem:  # whatever the decoder trips over: it is not what was written
            raise BudgetError(
                f"line {len(self.lines) + 1} of the budget file {self.path} was altered, or is not of this version "
                f"({problem}): what was spent is not known, and nothing more is. Put back the file as it was written"
            ) from problem
        self.lines.append(line)
        self._end += size

    def _take_rest(self, rest: bytes) -> None:
        """What stands behind the last end of line: a whole line, if only its end was lost; else nothing."""
        try:
            line, chain = decode(rest, self._chain)
        except Exception:  # torn: nobody was told that it counts
            return
        if (type(line) is Begin) == (not self.lines):
            self.lines.append(line)
            self._chain, self._end, self._needs_newline = chain, self._end + len(rest), True

    @property
    def _id(self) -> str:
        begin = self.lines[0]
        assert type(begin) is Begin  # as `_take` sees to
        return begin.id

    def _mark(self) -> tuple[str, int, str] | None:
        """(id, lines, chain) of the last line that was known to be on the disk; None where there is no mark.

        One that a kill or a loss of power left empty, or as zeros, says nothing, and is written with the next line.
        Raises: BudgetError for one that was altered: it can no longer tell of an end that was lost.
        """
        try:
            raw = self.mark_path.read_bytes()
        except OSError:  # it guards against mistakes, and the file stands alone too
            return None
        if not raw.strip(b"\0"):
            return None
        try:
            found = json.loads(raw)
            return str(found["id"]), int(found["lines"]), str(found["chain"])
        except (ValueError, KeyError, TypeError) as problem:
            raise BudgetError(
                f"{self.mark_path}, which tells how many lines the budget file has, was altered: whether its end was "
                "missing is not known. Put it back; or, where you know that nothing is missing, delete it"
            ) from problem

    def _check_mark(self, mark: tuple[str, int, str] | None) -> None:
        if mark is not None and len(self.lines) == mark[1] and mark[0] == self._id and self._chain != mark[2]:
            raise BudgetError(
                f"the budget file {self.path} is not the one that was written here: its line {mark[1]} differs from "
                f"what {self.mark_path.name} tells. It is a copy that went on otherwise; what both spent is the sum of "
                "both. Put back the file that belongs here"
            )

    # -- to write ----------------------------------------------------------------------------------------------------

    def begin(self, descriptor: int, line: Begin) -> None:
        """Write the first line. Raises: BudgetError; then nothing is there."""
        mark = self._mark()
        if mark is not None:
            raise BudgetError(
                f"a budget file {self.path} was here, with {mark[1]} lines, and is gone: to begin again forgets what "
                f"was spent. Put it back; or, if these are other data, delete {self.mark_path} too"
            )
        self.append(descriptor, line)

    def append(self, descriptor: int, line: Line) -> None:
        """Write a line, and bring it to the disk. Raises: BudgetError if it cannot be written.

        Guarantee: when it returns, the line outlasts a loss of power. When it raises, the line does not count, unless
        the message says that it may.
        """
        raw, chain = encode(line, self._chain)
        log = durable.Log(self.path, descriptor, self._end, borrowed=True)
        try:
            log.append(b"\n" + raw if self._needs_newline else raw)
            durable.sync_folder(self.path.parent)
        except OSError as problem:
            raise BudgetError(self._undone(log, problem)) from problem
        with self._whole():
            self._end, self._chain, self._needs_newline = log.end, chain, False
            self.lines.append(line)
            self._write_mark()

    def _undone(self, log: durable.Log, problem: OSError) -> str:
        told = f"the budget file {self.path} cannot be written: {problem.strerror or problem}"
        try:
            log.cut(self._end)
            log.sync()
        except OSError:
            self._inode = -1  # read it again
            return f"{told}. It may count as spent all the same: look with anyorder budget {self.path} show"
        return f"{told}. Nothing was spent; make room, and ask again"

    def _write_mark(self) -> None:
        """After the line is on the disk, so that the mark is never ahead of it."""
        text = json.dumps({"id": self._id, "lines": len(self.lines), "chain": self._chain})
        with contextlib.suppress(OSError):  # the file is on the disk, which is what counts; an older mark is right too
            durable.replace(self.mark_path, text.encode())  # whole: half of a mark would accuse the file that it guards


_LOGS: weakref.WeakSet[BudgetLog] = weakref.WeakSet()


def _forked() -> None:
    for log in list(_LOGS):
        log.forked()


durable.in_forked_child(_forked)
