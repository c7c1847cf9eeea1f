"""The isolation harness: whether what one unit brings reaches anything but its own part of its own steps.

A training loop is run on a data set and on neighbours of it, which differ in one unit. All runs are given one key and
one public seed; and whatever its own sums are, a run on a neighbour is handed the private gradients of the first run.
Then all that a run does may follow from releases alone, and what differs is a channel:

- the sums of steps in which the unit is not, which must be equal bit for bit;
- the sums of its own steps, which may move by what the neighbouring relation allows, and no more;
- the number of steps, who is in them, and the size of what is released;
- what is printed, logged, raised and written, and what the loop returns;
- where the global generators of torch, NumPy and Python stand: what is drawn next would tell.

    report = isolation.check(train, rows)
    report.raise_if_found()

What it finds is a leak, shown by a pair of data sets. What it does not find is not proved absent.
"""

import hashlib
import io
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatch
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyorder.accounting.gaussian import gdp_epsilon
from anyorder.audit.faults.front_end import patched
from anyorder.audit.neighbours import KINDS, Neighbour, neighbours
from anyorder.checks import final
from anyorder.clipping.coupling import LossWatch
from anyorder.errors import ArgumentError, IsolationError
from anyorder.noise import NoiseSource
from anyorder.plan.plan import Plan
from anyorder.release.attached_tables import Part
from anyorder.release.release import Release

__all__ = ["KINDS", "Channel", "IsolationReport", "Neighbour", "check", "neighbours"]

_SLACK = 1e-4  # float32 sums of a batch, in clip norms
_MOST_STEPS = 3000  # of which C is made as a matrix
_AS_A_WHOLE = ("output", "log", "generators")  # what differs by itself somewhere is not compared

# -- what is reported ------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Channel:
    """One way by which a unit reached more than its own part of its own steps.

    Attributes:
        kind: "sum of others", "own step", "steps", "units", "size", "generators", "output", "log", "error", "file" or
            "result".
        neighbour: in what the data sets differ.
        step: the first at which it was seen; None for what belongs to no step.
        distance: largest distance of the sums, in clip norms; None for what is no sum.
        allowed: what the relation allows, in clip norms.
        epsilon: of a Gaussian mechanism whose two means are these runs' sums, exactly, at the plan's delta; infinite
            where no noise covers the channel.
        claimed: the plan's.
        text: what differs.
    """

    kind: str
    neighbour: str
    step: int | None
    distance: float | None
    allowed: float | None
    epsilon: float
    claimed: float
    text: str

    def __str__(self) -> str:
        where = "" if self.step is None else f", step {self.step}"
        moved = ""
        if self.distance is not None:
            moved = f"moved by {self.distance:.4g} clip norms where {self.allowed:g} is allowed; "
        price = "no noise covers it" if self.epsilon == inf else f"epsilon {self.epsilon:.4g}"
        return f"{self.kind} [{self.neighbour}{where}]: {moved}{self.text} ({price}, claimed {self.claimed:.4g})"


@final
@dataclass(frozen=True)
class IsolationReport:
    """The channels that a check found.

    Attributes:
        channels: each kind once for each neighbour; empty where the unit reached nothing else.
        neighbours: names of those that were tried.
        steps: number of steps of the first run.
        own: how far a sum of the unit's own was moved at most, in clip norms, where that is allowed.
        moved: names of those neighbours that moved such a sum: the others tried less.
    """

    channels: tuple[Channel, ...]
    neighbours: tuple[str, ...]
    steps: int
    own: float
    moved: tuple[str, ...]

    @property
    def kinds(self) -> set[str]:
        """The kinds of channels that were found."""
        return {channel.kind for channel in self.channels}

    def raise_if_found(self) -> None:
        """Raise IsolationError with all channels in it, if there is any."""
        if self.channels:
            raise IsolationError(repr(self))

    def __repr__(self) -> str:
        head = f"isolation: {len(self.neighbours)} neighbours, {self.steps} steps, {len(self.kinds)} kind(s) of channel"
        head += f"; the unit moved its own steps by {self.own:.3g} clip norms at most"
        worst: dict[str, list[Channel]] = {}
        for channel in self.channels:
            worst.setdefault(channel.kind, []).append(channel)
        lines = []
        for found in worst.values():
            others = f"; {len(found) - 1} more neighbour(s)" if len(found) > 1 else ""
            lines.append(f"  {max(found, key=lambda one: one.distance or 0.0)}{others}")
        return "\n".join([head, *lines])


# -- the check -------------------------------------------------------------------------------------------------------


def check(
    train: Callable[[Any, Path], Any],
    dataset: Any,
    *,
    rows: Sequence[int] = (0,),
    unit: Any = None,
    others: Iterable[Neighbour] | None = None,
    kinds: Sequence[str] | None = None,
    secret: Sequence[str] = (),
    seed: int = 0,
) -> IsolationReport:
    """Run a training loop on neighbours, and report what one unit reached besides its own part of its own steps.

    The loop makes everything again in each run: model, optimizer, loader, engine. Its number of steps may be small; the
    unit must be in one of them, and not in all.

    Args:
        train: the loop, given a data set and a folder. What it returns and what it writes into the folder counts as
            public, as is all that it prints, logs and raises. A module counts by its state, an object of the package
            by its `to_dict`.
        dataset: rows, of which one unit's are changed; anything where `others` are given.
        rows: places of that unit's rows.
        unit: how the ledger knows it; None: the first of its rows, as loaders of a data set name examples.
        others: neighbours of one's own. None: those of `neighbours(dataset, rows, kinds)`.
        kinds: in what they differ, names of `KINDS`; None: all that keep the types and shapes that all rows share.
        secret: patterns of names of files, in the folder, that are not shown.
        seed: public: that of the global generators when a run begins.
    Returns: a report; the global generators are as they were.
    Raises: ArgumentError where the loop fails on the data set itself, releases nothing, never has the unit in a step,
        or where no neighbour moved a sum of the unit's own: nothing would have been tried.
    Cost: one run for each neighbour, and three more. The sums of all steps of the first run are held.
    """
    if others is None:
        others = neighbours(dataset, rows, kinds)
    elif kinds is not None:
        raise ArgumentError("kinds choose among the usual neighbours: give them, or others of your own, not both")
    tried, unit = list(others), rows[0] if unit is None else unit
    if not tried:
        raise ArgumentError("others must have a neighbour in it: none of the kinds changes these rows")
    with _generators_kept():
        _run(train, dataset, None, secret, seed)  # what a program does once alone, as imports, is done
        first = _run(train, dataset, None, secret, seed)
        _check_first(first, unit)
        again = _Pair(Neighbour("the same data again", dataset), first, unit)
        again.compare(_run(train, dataset, first, secret, seed))
        found, moved, own = list(again.channels), [], 0.0
        by_themselves = {(one.kind, "" if one.kind in _AS_A_WHOLE else one.text) for one in found}
        for neighbour in tried:
            pair = _Pair(neighbour, first, unit, by_themselves)
            pair.compare(_run(train, neighbour.dataset, first, secret, seed))
            found += pair.channels
            moved += [neighbour.name] if pair.moved else []
            own = max(own, pair.own)
    if not moved and not found:
        raise ArgumentError(
            "no neighbour moved a sum of the unit's own: nothing was tried. Is `unit` how the ledger knows the rows "
            "that differ, and does the loop train on them?"
        )
    return IsolationReport(tuple(found), tuple(one.name for one in tried), len(first.steps), own, tuple(moved))


def _check_first(first: "_Run", unit: Any) -> None:
    if first.error is not None:
        raise ArgumentError(f"train must run on the data set itself, and ended with {first.error}")
    if not first.steps:
        raise ArgumentError("train released nothing: it must take steps of an engine, a server or a Release")
    own = [unit in step.units for step in first.steps]
    if not any(own):
        raise ArgumentError(f"unit {unit!r} is in no step: name the unit as the ledger does, and let it take part")
    if all(own):
        raise ArgumentError(f"unit {unit!r} is in all {len(own)} steps: take a data set of more batches")


# -- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """What a step was made of, before the noise."""

    plan: Plan
    units: frozenset[Any]
    own: list[Tensor]
    parts: list[Part]
    scale: float  # of a sum, over what the plan's clip norm is of
    generators: str

    def pieces(self) -> list[Tensor]:
        """All sums, flat, in units of the gradient."""
        unit = self.scale if self.plan.grid is None else self.plan.grid
        whole = [part.whole() for part in self.parts]
        return [x.detach().double().cpu().reshape(-1) * unit for x in (*self.own, *whole)]

    def exact(self) -> list[Tensor]:
        """All that a later look could see of the sums: bits, and which rows of tables there are."""
        return [*self.own, *(x for part in self.parts for x in part.parts())]


@dataclass
class _Run:
    """What is seen of a run."""

    steps: list[_Step] = field(default_factory=list)
    too_many: bool = False  # steps, beside the first run's
    other_size: str | None = None
    printed: str = ""
    logged: list[str] = field(default_factory=list)
    error: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    result: dict[str, str] = field(default_factory=dict)
    generators: str = ""


class _Diverged(BaseException):
    """A run has no sum of the first run to go on with; no loop catches it by `except Exception`."""


def _run(train: Callable[..., Any], dataset: Any, first: _Run | None, secret: Sequence[str], seed: int) -> _Run:
    run = _Run()
    folder = Path(tempfile.gettempdir()) / f"anyorder-isolation-{os.getpid()}"  # one name: it may be printed
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    try:
        with _released(run, first), _captured(run), patched(LossWatch, "escaped", ""):  # as in a process of its own
            try:
                run.result = _shown(train(dataset, folder))
            except _Diverged:
                pass
            except SystemExit as exit_:
                run.error = f"exit code {exit_.code}"
            except Exception as problem:
                run.error = _plain(f"{type(problem).__qualname__}: {problem}")
        run.generators = _where_generators_stand()
        run.files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not any(fnmatch(str(path.relative_to(folder)), one) for one in secret)
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return run


@contextmanager
def _released(run: _Run, first: _Run | None) -> Iterator[None]:
    """Within it every release is noted; and given the sums of the first run, whose noise it has too."""
    take, take_rows, keys = Release.take, Release._take_rows, iter(range(1 << 30))

    def sums(release: Release, units: Any, own: list[Tensor], parts: Sequence[Part]) -> _Step:
        """What was given, noted; and what to go on with."""
        norm = release._norm
        step = _Step(
            release.plan, frozenset(np.asarray(units).tolist() if isinstance(units, np.ndarray) else units),
            [x.detach().clone() for x in own], list(parts), 1.0 if norm is None else norm.factor,
            _where_generators_stand(),
        )  # fmt: skip
        run.steps.append(step)
        if first is None:
            return step
        if len(run.steps) > len(first.steps):
            run.too_many = True
            raise _Diverged
        theirs = first.steps[len(run.steps) - 1]
        shapes = [
            [(tuple(x.shape), x.dtype) for x in (*one.own, *(p.whole() for p in one.parts))] for one in (step, theirs)
        ]
        if shapes[0] != shapes[1]:
            run.other_size = f"{shapes[0]} for {shapes[1]}"
            raise _Diverged
        return replace(theirs, parts=[replace(a, table=b.table) for a, b in zip(theirs.parts, parts, strict=True)])

    def taken(self: Release, units: Any, own: list[Tensor], place: str = "Release.step", tables: Any = ()) -> Any:
        step = sums(self, units, own, self._in_order(tables))
        return take(
            self, units, [x.clone().to(y.device) for x, y in zip(step.own, own, strict=True)], place, step.parts
        )

    def taken_rows(self: Release, units: Any, asked: Any) -> Any:
        step = sums(self, units, [torch.from_numpy(asked.rows), asked.values], ())
        return take_rows(self, units, replace(asked, rows=step.own[0].numpy(), values=step.own[1].clone()))

    def fresh(cls: type[NoiseSource], rounds: int = 8) -> NoiseSource:
        return cls(hashlib.sha256(b"isolation %d" % next(keys)).digest(), rounds)

    with ExitStack() as stack:
        stack.enter_context(patched(Release, "take", taken))
        stack.enter_context(patched(Release, "_take_rows", taken_rows))
        stack.enter_context(patched(NoiseSource, "random", classmethod(fresh)))
        yield


@contextmanager
def _captured(run: _Run) -> Iterator[None]:
    """Keeps what is printed, by Python or by a program that it calls, and what is logged and warned of."""
    call = logging.Logger.callHandlers

    def noted(self: logging.Logger, record: logging.LogRecord) -> None:
        run.logged.append(_plain(f"{record.levelname} {record.name}: {record.getMessage()}"))
        call(self, record)

    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file, ExitStack() as stack:
        stream = io.TextIOWrapper(os.fdopen(os.dup(file.fileno()), "wb"), encoding="utf-8", write_through=True)
        before = sys.stdout, sys.stderr, os.dup(1), os.dup(2)
        stack.enter_context(patched(logging.Logger, "callHandlers", noted))
        warned = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        try:
            sys.stdout = sys.stderr = stream
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        finally:
            stream.flush()
            sys.stdout, sys.stderr = before[:2]
            for number, copy in zip((1, 2), before[2:], strict=True):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            run.logged += [_plain(f"{one.category.__name__}: {one.message}") for one in warned]
            run.printed = _plain(file.read().decode(errors="replace"))
            stream.close()


def _plain(text: str) -> str:
    """Without addresses in memory, which differ by themselves."""
    return re.sub(r"0x[0-9a-f]+", "0x..", text)


def _where_generators_stand() -> str:
    _, keys, *rest = np.random.get_state()  # noqa: NPY002
    states = torch.get_rng_state().numpy().tobytes(), np.asarray(keys).tobytes(), repr(rest), repr(random.getstate())
    return _digest(repr(states).encode())


@contextmanager
def _generators_kept() -> Iterator[None]:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _shown(value: Any, place: str = "what train returns", depth: int = 12) -> dict[str, str]:
    """{place: what is seen there} of a value, in all its parts."""
    if isinstance(value, nn.Module):
        value = value.state_dict()
    elif hasattr(value, "to_dict") and not isinstance(value, type):
        value = value.to_dict()
    elif is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.to_dense() if value.is_sparse else value
        bits = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {place: f"{value.dtype} {tuple(value.shape)} {_digest(bits)}"}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {place: f"{value.dtype} {value.shape} {_digest(value.tobytes())}"}
    if isinstance(value, Mapping | Sequence | set | frozenset) and not isinstance(value, str | bytes) and depth:
        named = value.items() if isinstance(value, Mapping) else enumerate(value)
        parts = {f"{place}[{name!r}]": part for name, part in named}
        found = {place: f"{type(value).__name__} of {len(parts)}"}
        for name, part in parts.items():
            found |= _shown(part, name, depth - 1)
        return found
    return {place: _plain(repr(value))}


# -- two runs compared -----------------------------------------------------------------------------------------------


class _Pair:
    """The first run and one on a neighbour.

    Args:
        by_themselves: kinds and texts that differ on the same data too, and are told once.
    """

    def __init__(
        self, neighbour: Neighbour, first: _Run, unit: Any, by_themselves: Iterable[tuple[str, str]] = ()
    ) -> None:
        self._neighbour, self._first, self._unit, self._known = neighbour, first, unit, set(by_themselves)
        self._allowed = 1.0 if neighbour.is_absent else 2.0
        self.channels: list[Channel] = []
        self.moved, self.own = False, 0.0

    def compare(self, run: _Run) -> None:
        """Find the channels."""
        first = self._first
        if run.other_size is not None:
            self._say("size", f"what is released has other shapes, {run.other_size}", step=len(run.steps) - 1)
        pairs = list(zip(first.steps, run.steps, strict=False))[: len(run.steps) - (run.other_size is not None)]
        self._compare_sums(pairs)
        self._compare_each_step(pairs, run)
        if run.error != first.error:
            self._say("error", f"train ended with {run.error}", step=len(run.steps))
            return  # the rest is of another program
        if run.other_size is not None:
            return
        if run.too_many or len(run.steps) != len(first.steps):
            self._say("steps", f"{'more' if run.too_many else len(run.steps)} steps were taken for {len(first.steps)}")
        if run.too_many:
            return
        self._compare_texts("output", first.printed.splitlines(), run.printed.splitlines())
        self._compare_texts("log", first.logged, run.logged)
        self._compare_named("file", first.files, run.files)
        self._compare_named("result", first.result, run.result)

    def _compare_sums(self, pairs: Sequence[tuple[_Step, _Step]]) -> None:
        far: dict[str, tuple[int, float]] = {}  # kind -> first step, largest distance
        rows = []
        for t, (one, other) in enumerate(pairs):
            change = torch.cat([y - x for x, y in zip(one.pieces(), other.pieces(), strict=True)] or [torch.zeros(1)])
            if not change.isfinite().all():
                change = torch.full_like(change, inf)
            distance = float(change.norm()) / one.plan.clip_norm
            is_own, equal = self._unit in one.units, all(map(_equal, one.exact(), other.exact()))
            rows.append(change.numpy() / one.plan.clip_norm)
            self.moved |= is_own and not equal
            if is_own and distance <= self._allowed + _SLACK:
                self.own = max(self.own, distance)
                continue
            kind = "own step" if is_own else "sum of others"
            if not equal:
                begun, most = far.get(kind, (t, 0.0))
                far[kind] = begun, max(most, distance)
        for kind, (t, distance) in far.items():
            allowed = self._allowed if kind == "own step" else 0.0
            text = "a step of the unit itself" if kind == "own step" else "a step in which the unit is not"
            self._say(kind, text, step=t, distance=distance, allowed=allowed, epsilon=_epsilon(pairs, rows))

    def _compare_each_step(self, pairs: Sequence[tuple[_Step, _Step]], run: _Run) -> None:
        absent = {self._unit} if self._neighbour.is_absent else set()
        for t, (one, other) in enumerate(pairs):
            if one.units - absent != other.units - absent:
                self._say("units", "others are in this step", step=t)
                break
        states: list[tuple[int | None, str, str]] = [
            (t, one.generators, other.generators) for t, (one, other) in enumerate(pairs)
        ]
        ended = len(pairs) == len(self._first.steps) and run.error == self._first.error and not run.too_many
        end = [(None, self._first.generators, run.generators)] if ended else []
        for step, one_state, other_state in [*states, *end]:
            if one_state != other_state:
                text = "the global generators of torch, NumPy or Python stand elsewhere: what is drawn next tells of it"
                self._say("generators", text, step=step)
                break

    def _compare_texts(self, kind: str, one: Sequence[str], other: Sequence[str]) -> None:
        for number in range(max(len(one), len(other))):
            a, b = (lines[number] if number < len(lines) else "nothing" for lines in (one, other))
            if a != b:
                done = "printed" if kind == "output" else "logged"
                self._say(kind, f"line {number + 1} of what is {done} is {b!r} and was {a!r}")
                return

    def _compare_named(self, kind: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name):
                self._say(kind, f"{name} differs" if name in one and name in other else f"{name} is in one run alone")

    def _say(
        self, kind: str, text: str, *, step: int | None = None, distance: float | None = None,
        allowed: float | None = None, epsilon: float = inf,
    ) -> None:  # fmt: skip
        if {(kind, text), (kind, "")} & self._known:
            return
        claimed = self._first.steps[0].plan.epsilon
        self.channels.append(Channel(kind, self._neighbour.name, step, distance, allowed, epsilon, claimed, text))


def _equal(x: Tensor, y: Tensor) -> bool:
    """Bit for bit, but that one NaN is as good as another."""
    return x.dtype == y.dtype and x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())


def _epsilon(pairs: Sequence[tuple[_Step, _Step]], rows: Sequence[Any]) -> float:
    """Of the Gaussian mechanism with these two runs' C G as means: mu = ||C (G - G')|| / std."""
    plan = pairs[0][0].plan
    if plan.n > _MOST_STEPS or len({len(row) for row in rows}) > 1 or len(rows) > plan.n:
        return max(gdp_epsilon(float(np.linalg.norm(x)) * plan.clip_norm / plan.noise_std, plan.delta) for x in rows)
    change = np.zeros((plan.n, len(rows[0])))
    change[: len(rows)] = rows
    if not np.isfinite(change).all():
        return inf
    mu = float(np.linalg.norm(plan.strategy.matrix() @ change)) * plan.clip_norm / plan.noise_std
    return gdp_epsilon(mu, plan.delta) if mu else 0.0
