"""How rows of a lazy table get the noise that they have missed: in one jump, in law, or step by step, by value."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from anyorder import checks
from anyorder.clipping import native
from anyorder.errors import ArgumentError, CheckpointError, PlanError, TrainingError
from anyorder.noise import lazy
from anyorder.noise.compiled import TableMemory
from anyorder.noise.lazy import Jump, Jumps
from anyorder.release.attached_tables import LazyRows
from anyorder.release.release import Release, Rows
from anyorder.strategy import Tree

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

Change = Callable[[], None]


class State(NamedTuple):
    """What is stored of rows, all or some: theta (k, width), and what is kept beside it (k, kept, width)."""

    theta: Tensor
    kept: Tensor


class ByJumps:
    """Jumps: `anyorder.noise.lazy` proves the law. Rows and steps are in the keys of the normals, and nothing else.

    The jumps of a tree without momentum have the nodes of the dense run itself, and so its noise by value; others have
    normals of their own, and its noise in law.

    State of a row: D numbers for each of its coordinates, the table's own last; see `anyorder.noise.lazy.Jumps`.

    Args:
        release: whose plan and keys.
        momentum, nesterov: of SGD.
    """

    def __init__(self, release: Release, momentum: float, nesterov: bool) -> None:
        strategy = release.plan.strategy
        self.by_value = type(strategy) is Tree and not momentum and strategy.estimator != "online"
        self._jumps = Jumps(strategy, momentum=momentum, nesterov=nesterov, by_value=self.by_value)
        self._options = {"way": "jumps", "momentum": float(momentum), "nesterov": bool(nesterov)}
        self._momentum, self._std = momentum, release.std
        self._source = release.noise_rows() if self.by_value else release.lazy_source(self._jumps.first_row)
        self.kept = self._jumps.kept

    def begin(self, first: int, num_rows: int, width: int) -> None:
        """Take the first coordinate and the shape of the table."""
        self._first = first

    def hold(self, stored: State) -> None:
        """Take what is stored of all rows: jumps and steps read it and write it in place."""
        self._stored = stored
        self._memory: TableMemory | None = None
        if stored.theta.device.type == "cpu":
            kept = _numpy(stored.kept)
            self._memory = TableMemory([*(kept[:, j] for j in range(self.kept)), _numpy(stored.theta)], self._first)

    def record(self, step: int, lr: float, divisor: float) -> None:
        """Take the public numbers of a step, in order."""
        self._jumps.record(step, lr, self._std / divisor)

    def jump(self, rows: Integers, starts: Integers, stop: int) -> Change:
        """Carry rows over the steps starts .. stop - 1, in which they had no gradient.

        Args:
            rows: (k,) distinct ones.
            starts: (k,) first step that each one lacks.
        Returns: what writes them. Nothing is written before it is called.
        """
        return self._change(rows, self._jumps.over(starts, stop))

    def bring(self, rows: Integers, last: NDArray[np.int32], stop: int) -> bool:
        """The same of those that lack steps, at once, and `last` is `stop` then; or False, and nothing was done."""
        return self._memory is not None and self._jumps.bring(self._source, self._memory, rows, last, stop)

    def step(self, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> Change:
        """Carry rows over a step in which they had these sums. As `jump`."""
        return self._change(rows, self._over(rows, step), _numpy(sums), self._jumps.input(step) / divisor)

    def seen_step(self, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> tuple[Change, Tensor]:
        """As `step`, of a rate above 0. Returns: also the private mean of these rows: of what the step moved.

        That is unrounded, as the table's own type would round what is seen.
        """
        before = _rows_copied(self._stored, rows)
        after = self._made(before, rows, self._over(rows, step), _numpy(sums), self._jumps.input(step) / divisor)
        theta, kept = (part.to("cpu", torch.float64) for part in before)
        mean = after.kept[:, -1] - self._momentum * kept[:, -1] if self._momentum else (theta - after.theta) / lr
        return partial(_write_rows, self._stored, rows, after), mean

    def _over(self, rows: Integers, step: int) -> Jump:
        return self._jumps.over([step], step + 1)._replace(which=np.zeros(len(rows), np.intp))

    def _change(self, rows: Integers, jump: Jump, *gradient: NDArray[Any]) -> Change:
        """In place, where the table is in the memory of the processor; the same bits elsewhere."""
        if self._memory is None:
            return partial(
                _write_rows, self._stored, rows, self._made(_rows_copied(self._stored, rows), rows, jump, *gradient)
            )
        return partial(lazy.carry, self._source, jump, self._memory, rows, *gradient)

    def _made(self, state: State, rows: Integers, jump: Jump, *gradient: NDArray[Any]) -> State:
        """In float64, on the CPU."""
        numbers = np.concatenate([_numpy(state.kept).transpose(1, 0, 2), _numpy(state.theta)[None]])
        made = torch.from_numpy(lazy.carried(self._source, jump, numbers, rows, self._first, *gradient))
        return State(made[-1], made[:-1].transpose(0, 1))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**self._options, **self._jumps.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        _check_options(saved, self._options)
        self._jumps.load_state_dict({"rates": np.asarray(saved["rates"])})


class ByValue:
    """Every missed step, one after the other, with the dense run's own noise and roundings: the oracle of tests.

    Args: as of `ByJumps`; the strategy must have noise of chosen rows.
    """

    by_value = True

    def __init__(self, release: Release, momentum: float, nesterov: bool) -> None:
        if release.plan.strategy.state_rows:
            raise PlanError(
                f"replay=True makes the noise of every missed step again, and that of "
                f"{release.plan.strategy.describe()} comes from all steps before: take replay=False, or plan with "
                "independent noise, a banded inverse, or a tree of regenerate=True"
            )
        self._options = {"way": "replay", "momentum": float(momentum), "nesterov": bool(nesterov)}
        self._release, self._momentum, self._nesterov = release, momentum, nesterov
        self.kept = int(momentum > 0)
        self._steps: list[tuple[float, float]] = []  # rate and divisor

    def begin(self, first: int, num_rows: int, width: int) -> None:
        """As of `ByJumps`."""
        self._width = width
        self._noise = self._release.table_noise(first, num_rows * width)

    def hold(self, stored: State) -> None:
        """As of `ByJumps`."""
        self._stored = stored

    def record(self, step: int, lr: float, divisor: float) -> None:
        """Take the public numbers of a step, in order."""
        assert len(self._steps) == step
        self._steps.append((lr, divisor))

    def jump(self, rows: Integers, starts: Integers, stop: int) -> Change:
        """As of `ByJumps`."""
        theta, kept = state = _rows_copied(self._stored, rows)
        for step in range(int(starts.min(initial=stop)), stop):
            late = np.flatnonzero(starts <= step)
            at = torch.from_numpy(late).to(theta.device)
            nothing = theta.new_zeros(len(late), self._width)
            here = State(theta[at], kept[at])
            self._take(here, rows[late], step, nothing, self._steps[step][1], self._steps[step][0])
            theta[at], kept[at] = here
        return partial(_write_rows, self._stored, rows, state)

    def bring(self, rows: Integers, last: NDArray[np.int32], stop: int) -> bool:
        """As of `ByJumps`."""
        return False

    def step(self, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> Change:
        """As of `ByJumps`."""
        state = _rows_copied(self._stored, rows)
        self._take(state, rows, step, sums, divisor, lr)
        return partial(_write_rows, self._stored, rows, state)

    def seen_step(self, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> tuple[Change, Tensor]:
        """As of `ByJumps`, to the rounding of the table's type."""
        before, after = _rows_copied(self._stored, rows), _rows_copied(self._stored, rows)
        self._take(after, rows, step, sums, divisor, lr)
        if self._momentum:
            mean = after.kept[:, 0] - self._momentum * before.kept[:, 0]
        else:
            mean = (before.theta - after.theta) / lr
        return partial(_write_rows, self._stored, rows, after), mean

    def _take(self, state: State, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> None:
        """The operations of `torch.optim.SGD`, in its order, in place."""
        theta, kept = state
        mean = self._noise.add_to_rows(step, 0, rows, sums, divisor).to(theta.device, theta.dtype)
        if self._momentum:
            velocity = kept[:, 0]
            velocity.mul_(self._momentum).add_(mean)
            mean = mean.add(velocity, alpha=self._momentum) if self._nesterov else velocity
        theta.add_(mean, alpha=-lr)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**self._options, "rates": np.array(self._steps, np.float64).reshape(-1, 2)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        _check_options(saved, self._options)
        self._steps = [(lr, divisor) for lr, divisor in np.asarray(saved["rates"]).tolist()]


Late = ByJumps | ByValue


def _numpy(values: Tensor) -> NDArray[Any]:
    """The same memory, where it is the processor's."""
    return np.asarray(values.numpy(force=values.requires_grad or values.device.type != "cpu"))


def _rows_copied(stored: State, rows: Integers) -> State:
    at = torch.from_numpy(rows).to(stored.theta.device)
    return State(*(part.index_select(0, at) for part in stored))


def _write_rows(stored: State, rows: Integers, state: State) -> None:
    at = torch.from_numpy(rows).to(stored.theta.device)
    for part, new in zip(stored, state, strict=True):
        part.index_copy_(0, at, new.to(part.device, part.dtype))


def _check_options(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse to bring rows over steps that were taken by another rule: their noise would tell when they were read."""
    was = {name: saved.get(name) for name in own}
    if was != own:
        raise CheckpointError(
            f"a table of the checkpoint was kept with {_told(was)}, and this one with {_told(own)}: resume with the "
            "momentum=, nesterov= and replay= of the run"
        )


def _told(options: Mapping[str, Any]) -> str:
    return f"momentum={options['momentum']}, nesterov={options['nesterov']}, replay={options['way'] == 'replay'}"


# ----------------------------------------------------------------------------------------------------
# A wide table with the noise of the dense run, at the cost of the rows that are read.


_IN_USE = "the table is in use by another thread: read it, take steps and flush one after the other"
_CHUNK = 1 << 20  # numbers of a flush at a time
_NOT_FLUSHED = (
    "the embedding's table is not flushed: which of its rows lack noise tells which rows were touched. Call "
    "flush() first"
)
_ALLOWED: ContextVar[bool] = ContextVar("stand-ins of lazy tables may be saved", default=False)
_TABLES: Any = WeakTensorKeyDictionary()  # weight -> its table, which is not kept alive by it


class LazyTable:
    """A table (V, D) trained by SGD under a plan, every row noised at every step, at the cost of the rows it reads.

    Row r of step t of the dense run is, for sums G of clipped rows and the plan's noise,

        u = ( G[t, r] + noise_std (K Z)[t, r] ) / plan.batch_size
        v <- momentum v + u,    theta <- theta - lr v        (nesterov: theta - lr (u + momentum v))

    A row that no step reads needs none of this until it is read. `read` gives it all noise that it has missed in one
    jump, drawn from its exact law (`anyorder.noise.lazy`): for independent noise, BLTs, banded strategies, banded
    inverses and vanilla trees; for vanilla and full trees without momentum by value, from the nodes of the dense run.
    So the table is, in law, that of the dense run, padding row and all: torch keeps the gradient of a `padding_idx`
    row zero, and the noise moves it here as there.

    Guarantee: that of the plan, for the table as `flush` shows it and all that the release returns. **An unflushed
    table must not be shown**: which rows lack noise tells which rows were touched. So `embedding.weight` is an empty
    (0, D) stand-in from the first gradient on until `flush()`, which puts the whole table there, and the next gradient
    takes it away again: training goes on in a copy of what is in `weight` then, so that what others have of a shown
    table (a `state_dict()`, an array, the tensor of `from_pretrained`) stays what was shown, and what they have changed
    in it counts. The un-noised sum of a row is never in memory without the noise of its step.

    Why two lives of a run cannot show two draws of one noise. The normals of a jump are functions of the key, the row
    and the interval (t1, t2), so a life that reads the same rows at the same steps has the same bits. A life that reads
    others has other draws; each sum of a step that depends on them then differs from what the journal has, and the step
    is refused; and what no released sum depended on nobody has seen. A table is seen by a flush alone. That has a
    record of its own, with a digest of the whole table, on the disk before the table is shown: a life that comes to
    that step again flushes again, by itself, and refuses unless the table is the same bit for bit. And where an earlier
    life took a step, none can flush before it that the earlier one did not. Past the last record nothing was shown. A
    journal that may lack records (a copy's) leads to a fresh key for jumps that end after what it has, if all rows were
    up to date there, as after a flush; else the run is refused, as what two copies have in common in a row would tell
    when it was read.

    Args:
        embedding: an `nn.Embedding` or `nn.EmbeddingBag` in float32 or float64, without `max_norm` and
            `scale_grad_by_freq`. Its weight is used by lookups alone, which read rows by `read`.
        release: of a plan without a selection, before its first step. It may be of size 0. The table's coordinates lie
            behind those of the release, row-major.
        lr: rate of the next step; a public number, which may be set before any step: `table.lr = ..`.
        momentum, nesterov: of `torch.optim.SGD`, without dampening. Adam, averages of weights and weight decay have no
            exact jump and are not offered: on rows without a gradient they are no linear maps of public coefficients,
            or move the row itself; `sparse=False` has them with dense noise.
        replay: make every missed step by value, in the order and with the roundings of the dense run: slow, for tests;
            for strategies with noise of chosen rows (no state).

    Attributes:
        num_rows, width, dtype, device: of the table.
        flushed: whether `embedding.weight` is the table.

    Raises: ArgumentError, PlanError (the strategy cannot jump; `secure`; several ranks), TrainingError (after the first
        step, or for a weight that has a table), CheckpointError.
    Cost: `read` and a step: the rows; the first step after a flush, a copy of the table. Memory: the table, and `kept`
        arrays of its size: the strategy's state, and one for momentum; 4 bytes a row. How long a read takes tells how
        many rows lacked noise.

    Example:
        >>> from torch import nn
        >>> plan = ao.plan(dataset_size=4, batch_size=2, epochs=1, epsilon=1, delta=1e-6, mechanism="independent")
        >>> table = ao.sparse.LazyTable(nn.Embedding(1000, 8), ao.Release(plan, 0), lr=0.1)
        >>> rows, sums = ao.sparse.bounded_rows(np.array([3, 3, 7]), np.ones((3, 8)), [0, 1, 1], plan.clip_norm)
        >>> table.step([0, 1], rows, sums)
        >>> table.flush()
    """

    selects = False

    def __init__(
        self,
        embedding: nn.Embedding | nn.EmbeddingBag,
        release: Release,
        *,
        lr: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        replay: bool = False,
    ) -> None:
        weight = _weight_of(embedding)
        if not isinstance(release, Release):
            raise ArgumentError(f"release must be an anyorder Release, got {type(release).__name__}")
        self.lr = lr
        momentum = checks.real("momentum", momentum, low=0.0)
        if momentum >= 1:
            raise ArgumentError(f"momentum must be below 1, got {momentum}")
        if nesterov and not momentum:
            raise ArgumentError("nesterov needs a momentum above 0, got 0")
        self._late: Late = (ByValue if replay else ByJumps)(release, momentum, nesterov)
        self._release, self._weight = release, weight
        self.num_rows, self.width = embedding.num_embeddings, embedding.embedding_dim
        self.dtype, self.device = weight.dtype, weight.device
        self._stand_in = torch.empty(0, self.width, dtype=self.dtype, device=self.device)
        self._table = weight.data  # never written while it is, or was, in the weight
        self._kept = torch.zeros(self.num_rows, self._late.kept, self.width, dtype=self.dtype, device=self.device)
        self._last = np.zeros(self.num_rows, np.int32)  # steps whose noise a row has
        self._steps = 0  # that are settled
        self._brought: tuple[int, NDArray[np.int64]] = (0, np.empty(0, np.int64))  # rows that have all of so many steps
        self._busy = False  # while rows are written
        self._free = threading.Lock()
        self.flushed = True
        given = weight.data
        try:
            release.attach(self)
        except BaseException:
            _put(weight, given, whole=True)  # a resume has put a stand-in there
            raise
        _TABLES[weight] = weakref.ref(self)
        embedding.register_state_dict_pre_hook(_refuse_stand_in)  # type: ignore[no-untyped-call]

    # -- for those who train -----------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The rate of the next step."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = checks.real("lr", value, low=0.0)

    @property
    def kept(self) -> int:
        """Arrays of the table's size that are kept next to it."""
        return self._late.kept

    def read(self, ids: Tensor) -> Tensor:
        """Rows as they are now, brought up to date first.

        A resumed run must read the same rows at the same steps, as forward passes of the same batches do.

        Args:
            ids: integers of any shape, 0 .. num_rows - 1.
        Returns: (*ids.shape, width), a copy without gradient, on the table's device. Not to be shown.
        Raises: ArgumentError for ids beyond the table; TrainingError where a step was broken off, or for closed runs.
        """
        flat = ids.detach().reshape(-1)
        if flat.is_floating_point() or flat.is_complex() or flat.dtype == torch.bool:
            raise ArgumentError(f"ids must be integers, got {ids.dtype}")
        try:
            found = native.ranked(flat.cpu().to(torch.int64).contiguous().numpy(), self.num_rows)
        except ValueError:
            raise ArgumentError(
                f"ids must lie in 0 .. {self.num_rows - 1}, the rows of the table, and some do not"
            ) from None
        self._release.check_usable()
        self.check(self._release.steps_taken)
        with self._alone():
            self._bring(found.distinct)
            return self._now.index_select(0, flat.to(self.device, torch.int64)).view(*ids.shape, self.width)

    def rows(self, rows: ArrayLike, values: Any) -> LazyRows:
        """Sums of some rows as a part of a step: `release.step(units, total, tables=[table.rows(..)])`.

        Args:
            rows: (k,) distinct row numbers, those that units of the step touch; perhaps none.
            values: (k, width) sums over units, float32 or float64, an array or a tensor; they are copied. A unit's
                vector, here and in the rest of the step's total, has norm at most `clip_norm`: clipped part by part it
                has not. `anyorder.sparse.bounded_parts` makes such sums, `bounded_rows` where one table is all.
        Raises: ArgumentError for rows or values that do not fit or are not finite; see `Release` on the latter.
        """
        asked = Rows.fitting(rows, values, self.num_rows, self.width)
        return LazyRows(self, asked.rows, asked.values)

    def step(self, units: Iterable[Any] | None, rows: ArrayLike, values: Any) -> None:
        """The next step of a release of size 0 with no other table; see `Release.step` and `rows`."""
        if self._release.size:
            raise ArgumentError(
                f"the release has {self._release.size} coordinates in addition to the table: give both to "
                "release.step(units, total, tables=[table.rows(rows, values)])"
            )
        self._release.step(units, np.zeros(0, np.float32), [self.rows(rows, values)])

    def flush(self) -> None:
        """Bring all rows up to date, and show the table in `embedding.weight`; see `Release.flush`.

        All lazy tables of the release are flushed together.
        """
        self._release.flush()

    # -- for the release ---------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return self.num_rows * self.width

    @property
    def by_value(self) -> bool:
        """True if the noise is that of the dense run by value, and not in law alone."""
        return self._late.by_value

    def begin(self, first: int, saved: dict[str, Any] | None) -> None:
        """Take the first coordinate, and go on from a checkpoint; of `Release.attach`."""
        known = _TABLES.get(self._weight)
        other = None if known is None else known()
        if other is not None and not other._release.is_closed:
            raise TrainingError("the weight has a lazy table already: one table for each weight")
        self._late.begin(first, self.num_rows, self.width)
        if saved is None:
            if len(self._table) != self.num_rows:
                raise TrainingError(
                    "the weight is the stand-in of another table, and no checkpoint has its values: flush that first"
                )
            return
        table, kept, last = saved["table"], saved["kept"], saved["last"].numpy()
        shape = (self.num_rows, self.width)
        if table.shape != shape or kept.shape != self._kept.shape or table.dtype != self.dtype:
            raise CheckpointError(
                f"a table of the checkpoint is {tuple(table.shape)} in {table.dtype} with {kept.shape[1]} kept arrays, "
                f"and this one {shape} in {self.dtype} with {self.kept}: resume with the model and momentum of the run"
            )
        self._late.load_state_dict(saved["late"])
        self._table, self._kept = table.to(self.device), kept.to(self.device)
        self._last, self._steps = last.astype(np.int32), int(saved["steps"])
        self._brought = 0, self._brought[1]
        self.flushed = bool(saved["flushed"])
        _put(self._weight, self._table if self.flushed else self._stand_in, whole=self.flushed)
        self._late.hold(State(self._table, self._kept))

    def check(self, step: int) -> None:
        """Raise TrainingError unless all steps before this one are settled, wholly."""
        if self._free.locked():
            raise TrainingError(_IN_USE)
        if self._busy or self._steps != step:
            raise TrainingError(
                "a step or a read of the table was broken off half way: nothing more may be released; resume from the "
                "last checkpoint"
            )

        weight = self._weight.data
        if self.flushed and (weight.shape, weight.dtype) != ((self.num_rows, self.width), self.dtype):
            raise TrainingError(
                f"embedding.weight is now {tuple(weight.shape)} in {weight.dtype}, and the table "
                f"{(self.num_rows, self.width)} in {self.dtype}: after a flush its values may be changed, no more"
            )

    def is_current(self) -> bool:
        """True if every row has the noise of all steps that were taken."""
        return not self.num_rows or int(self._last.min()) == self._steps

    def bring_up(self) -> Tensor:
        """Give all rows the noise that they lack. Returns: the table, which is not shown yet."""
        chunk = max(1, _CHUNK // (self.width * (self.kept + 1)))
        with self._alone():
            for start in range(0, self.num_rows, chunk):
                self._bring(np.arange(start, min(start + chunk, self.num_rows)))
        return self._table

    def show(self) -> None:
        """Put the table, whose rows are up to date, in the weight."""
        _put(self._weight, self._table, whole=True)
        self.flushed = True

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: of the same size whatever rows were touched. As secret as the data."""
        return {
            "table": self._now,
            "kept": self._kept,
            "last": self._last,
            "steps": self._steps,
            "flushed": self.flushed,
            "late": self._late.state_dict(),
        }

    def _bring(self, rows: NDArray[np.int64]) -> None:
        """Give rows, distinct ones, the noise of the steps before the next one."""
        if not self._steps or (self._brought[0] == self._steps and np.array_equal(self._brought[1], rows)):
            return
        self._busy = True
        done = self._late.bring(rows, self._last, self._steps)
        self._busy = False
        self._brought = (self._steps, rows) if done else self._brought
        if done:
            return
        lacking = rows[self._last[rows] < self._steps]
        if not len(lacking):
            return
        change = self._late.jump(lacking, self._last[lacking].astype(np.int64), self._steps)
        self._busy = True
        self._write(change)
        self._last[lacking] = self._steps
        self._busy = False

    def settle(self, part: LazyRows, step: int, divisor: float) -> Tensor | None:
        """Take a step that the journal has.

        Returns: None, as nothing of the table is released at a step; of a whole part its mean.
        """
        with self._alone():
            return self._settle(part, step, divisor)

    def _settle(self, part: LazyRows, step: int, divisor: float) -> Tensor | None:
        self._busy = True
        if self.flushed:
            self._table = self._now.clone(memory_format=torch.contiguous_format)
            self._late.hold(State(self._table, self._kept))
            _put(self._weight, self._stand_in, whole=False)
            self.flushed = False
        self._busy = False
        self._bring(part.rows)
        self._busy = True
        self._late.record(step, self._lr, divisor)
        mean = None
        if len(part.rows):
            given = part.rows, step, part.values, divisor, self._lr
            if part.is_whole:
                change, mean = self._late.seen_step(*given)
            else:
                change = self._late.step(*given)
            self._write(change)
            self._last[part.rows] = step + 1
        self._steps = step + 1
        self._busy = False
        return None if mean is None else mean.reshape(-1)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two threads that find one row lacking would both give it the noise."""
        if not self._free.acquire(blocking=False):
            raise TrainingError(_IN_USE)
        try:
            yield
        finally:
            self._free.release()

    @property
    def _now(self) -> Tensor:
        """The table; of a shown one what is in the weight, where others may have changed it."""
        return self._weight.data.to(self.device) if self.flushed else self._table

    def _write(self, change: Change) -> None:
        change()

    def __repr__(self) -> str:
        return f"LazyTable({self.num_rows}, {self.width}, kept={self.kept}, flushed={self.flushed})"


@contextmanager
def stand_ins_allowed() -> Iterator[None]:
    """Let `state_dict()` of a model hold the (0, D) stand-ins of unflushed tables, whose values a release keeps."""
    token = _ALLOWED.set(True)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def _refuse_stand_in(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A function of the module alone, so that copies of the embedding have it too."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if len(weight) != module.num_embeddings and not _ALLOWED.get():
        raise TrainingError(_NOT_FLUSHED)


def _put(weight: Tensor, data: Tensor, *, whole: bool) -> None:
    """Set the weight's numbers. A stand-in is neither copied nor pickled, by itself or with a model: it has no rows."""
    weight.data = data
    for name in ("__deepcopy__", "__reduce_ex__"):  # copy and pickle ask the object, before its class
        if whole:
            weight.__dict__.pop(name, None)
        else:
            weight.__dict__[name] = _refuse_copy


def _refuse_copy(_: Any) -> Any:
    raise TrainingError(_NOT_FLUSHED)


def _weight_of(embedding: Any) -> nn.Parameter:
    """Raises: ArgumentError for a layer that is no table of rows that are only looked up."""
    if type(embedding) not in (nn.Embedding, nn.EmbeddingBag):
        raise ArgumentError(
            f"embedding must be an nn.Embedding or nn.EmbeddingBag, got {type(embedding).__name__}: of other layers, "
            "and of their subclasses, it is not known which rows they read"
        )
    if embedding.max_norm is not None:
        raise ArgumentError("embedding must be without max_norm, which changes rows when they are read: no jump has it")
    if embedding.scale_grad_by_freq:
        raise ArgumentError(
            "embedding must be without scale_grad_by_freq, which scales a unit's gradient by what others read"
        )
    weight = embedding.weight
    if weight.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(f"embedding.weight must be in float32 or float64, got {weight.dtype}")
    if isinstance(weight, nn.Parameter) and weight.layout == torch.strided and weight.device.type != "meta":
        return weight
    raise ArgumentError("embedding.weight must be a dense parameter with memory")
