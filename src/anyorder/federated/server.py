"""The server: rounds of clipped messages, released by the plan, that move one model."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anyorder import checks, durable
from anyorder.checks import final
from anyorder.clipping.bounded import BLOCK, ClippedSum, step_of
from anyorder.clipping.norms import Cut, Flat, Rule
from anyorder.errors import AnyorderError, ArgumentError, CheckpointError, ParticipationError, PlanError, TrainingError
from anyorder.ledger import Units, as_units, plain
from anyorder.plan.certificate import Certificate, Evidence
from anyorder.plan.plan import Plan
from anyorder.release.checkpoint import load, save_atomic
from anyorder.release.ranks import OneProcess
from anyorder.release.release import Release
from anyorder.training.distributed import is_sharded
from anyorder.training.engine import BoundParameters
from anyorder.training.optimizers import warn_of_unfitted

# ----------------------------------------------------------------------------------------------------
# Messages: what one user sends in a round, as one vector; whatever is no message is the zero vector.


Message = Mapping[str, Any]
"""{parameter name: tensor or array}, a user's change: its own parameters less those that it was sent."""


@final
@dataclass(frozen=True)
class Layout:
    """The parameters that messages are about, one behind the other in one vector.

    Attributes:
        shapes: of each parameter, in the model's order.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> "Layout":
        """Return the layout of named parameters, which must be real floats: a message has no integers or counters."""
        for name, p in parameters.items():
            if not p.is_floating_point():
                raise ArgumentError(f"parameter {name} must be of floats, got {p.dtype}; leave it out of the optimizer")
        return cls({name: tuple(p.shape) for name, p in parameters.items()})

    @property
    def size(self) -> int:
        """Elements of the vector."""
        return sum(prod(shape) for shape in self.shapes.values())

    def flat(self, message: Any) -> Tensor:
        """(size,) float32, float64 where some part is: the message as a vector; zeros if it is not whole.

        Whole: exactly the names of the layout, each a real tensor or array of its shape, all elements finite. Nothing
        tells which it was: an error, a count or a log of bad messages would be a release, and one client's veto.
        """
        try:
            vector = self._vector(message)
        except Exception:  # whatever a stranger's object does when it is looked at, it is no message, and stops nobody
            vector = None
        return torch.zeros(self.size) if vector is None else vector

    def problem(self, message: Any) -> str | None:
        """Return what is wrong with a message, or None: for a client with data of its own, never for a server."""
        if not isinstance(message, Mapping):
            return f"a message is a dict of {{name: tensor}}, got {type(message).__name__}"
        missing, extra = [n for n in self.shapes if n not in message], [n for n in message if n not in self.shapes]
        if missing or extra:
            wrong = [f"{what} {_few(names)}" for what, names in (("missing", missing), ("extra", extra)) if names]
            return f"its names must be those of the {len(self.shapes)} shared parameters, got {'; '.join(wrong)}"
        for name, shape in self.shapes.items():
            problem = _problem_of(message[name], shape)
            if problem is not None:
                return f"{name} must {problem}"
        if self._vector(message) is None:
            return "its numbers must be finite"
        return None

    def _vector(self, message: Any) -> Tensor | None:
        if not isinstance(message, Mapping) or len(message) != len(self.shapes):
            return None
        values = [message[name] for name in self.shapes]  # looked up once: what is checked is what is taken
        if any(_problem_of(value, shape) for value, shape in zip(values, self.shapes.values(), strict=True)):
            return None
        parts = [_tensor(value).reshape(-1) for value in values]
        dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        vector = torch.cat([part.to("cpu", dtype) for part in parts])  # a copy, which nobody else writes
        if vector.sum().isfinite():  # faster than the look at each, and true of finite numbers alone
            return vector
        return vector if vector.isfinite().all() else None

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector (size,), or of rows (.., size), by name and in their shapes."""
        sizes = [prod(shape) for shape in self.shapes.values()]
        pieces = torch.split(vector, sizes, -1)
        return {
            name: piece.view(*vector.shape[:-1], *shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }


def _few(names: list[Any]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(str, names[:3])) + more


_TENSORS = (Tensor, nn.Parameter)  # these very classes: one derived from them may answer as it likes


def _problem_of(value: Any, shape: tuple[int, ...]) -> str | None:
    if type(value) not in _TENSORS and type(value) is not np.ndarray:
        return f"be a tensor or an array, got {type(value).__name__}"
    is_tensor = type(value) in _TENSORS
    if is_tensor and (value.layout != torch.strided or value.is_meta or value.is_nested):
        return "be dense, with memory"
    if not (value.is_floating_point() if is_tensor else value.dtype.kind == "f" and value.dtype.itemsize <= 8):
        return f"be of floats, got {value.dtype}"
    return None if tuple(value.shape) == shape else f"have shape {shape}, got {tuple(value.shape)}"


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))


def clip_message(update: Message, clip_norm: float) -> dict[str, Tensor]:
    """A user's change as it leaves the device: clipped to L2 norm clip_norm, over all parameters together.

        update * min(1, clip_norm / ||update||),    and zeros where a number in it is NaN or infinite

    Integers and counters are left out: they never leave a client. A change of norm zero stays zero.

    Args:
        update: {parameter name: the client's change}; not written.
        clip_norm: `plan.clip_norm`, or the norm in force that the server told.
    Guarantee: the norm of the result is at most clip_norm in exact arithmetic; factors are rounded down.
    Returns: {name: tensor} of the floats in update, each in its own type, at least float32.
    Raises: ArgumentError for what is no dict of tensors or arrays.
    """
    clip_norm = checks.positive("clip_norm", clip_norm)
    if not isinstance(update, Mapping):
        raise ArgumentError(f"update must be a dict of {{parameter name: tensor}}, got {type(update).__name__}")
    tensors = {}
    for name, value in update.items():
        if not isinstance(value, (Tensor, np.ndarray)):
            raise ArgumentError(f"update[{name!r}] must be a tensor or an array, got {type(value).__name__}")
        floats = value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"
        if floats:
            tensors[name] = _tensor(value)
    if not tensors:
        return {}
    total = ClippedSum(tensors, clip_norm=clip_norm, scale=1.0)
    total.add(
        {name: tensor[None] for name, tensor in tensors.items()}, torch.zeros(1, dtype=torch.int64), complete=True
    )
    return total.finish()


# ----------------------------------------------------------------------------------------------------
# What a round is about to release, kept until its checkpoint is written: so that no kill loses a round.


@dataclass(frozen=True)
class PendingRound:
    """A round whose messages are all in.

    Attributes:
        step: its number.
        users: who is in it.
        total: the un-noised sum, one piece: as secret as the data.
    """

    step: int
    users: Units
    total: Tensor


class Pending:
    """The file `<checkpoint>.pending`, which holds at most one round.

    It is written before the journal is told of the round, and removed once a checkpoint has the round's result. A
    server that finds it makes that very round from it, on the same sum, so that the noise of a round never comes to
    stand on two sums, and clients that have gone need not come back.

    Args:
        checkpoint: the run's file; None for a run that keeps nothing.
        run_id: of the run: up to 32 letters and digits. A file of another run is refused.

    Attributes:
        step: of the round in the file; None if there is none, or it was not read yet.
    """

    def __init__(self, checkpoint: Path | None, run_id: str) -> None:
        target = None if checkpoint is None else Path(os.path.realpath(checkpoint))
        self._path = None if target is None else target.with_name(target.name + ".pending")
        self._run_id = run_id
        self.step: int | None = None

    def write(self, pending: PendingRound) -> None:
        """Put the round on the disk. Raises: CheckpointError; nothing of the round has been used yet."""
        if self._path is None:
            return
        state = {"run": self._run_id, "step": pending.step, "users": pending.users, "total": pending.total}
        save_atomic(self._path, state, self._run_id)
        self.step = pending.step

    def read(self) -> PendingRound | None:
        """The round that was left, if one was. Raises: CheckpointError for a file that is altered, or another run's."""
        if self._path is None or not self._path.exists():
            return None
        state: dict[str, Any] = load(self._path)
        if state.get("run") != self._run_id:
            raise CheckpointError(
                f"{self._path} holds a round of another run, whose checkpoint is gone. What is in it is as secret as "
                "the data: put its checkpoint back, or remove it"
            )
        users = state["users"]
        ids = as_units(users if isinstance(users, list) else users.numpy().astype(np.int64))
        self.step = state["step"]
        return PendingRound(state["step"], ids, state["total"])

    def remove(self) -> None:
        """The round is in a checkpoint, or given up. Raises: CheckpointError if the file cannot be removed."""
        if self._path is None:
            return
        try:
            durable.remove(self._path)
            self.step = None
        except OSError as problem:
            raise CheckpointError(
                f"{self._path} cannot be removed: {problem}. It holds what no noise covers; remove it, and save again"
            ) from problem


# ----------------------------------------------------------------------------------------------------
# One round: who has sent a message, and the sum of what was sent, each message cut to the clip norm.


_ROWS = 1 << 24  # numbers of messages that are copied at once
_MOST_MESSAGES = 1 << 22  # messages of a round whose users nobody names: so many add up exactly


def sum_of_nobody(layout: Layout, dtype: torch.dtype, release: Release, cut: Cut) -> ClippedSum:
    """Where messages are added, each cut at the norm in force: the same bits in whatever order they come."""
    shared = {name: torch.empty(shape, dtype=dtype) for name, shape in layout.shapes.items()}
    return ClippedSum(shared, clip_norm=release.clip_norm, scale=1.0, grid=release.plan.grid, cut=cut, any_order=True)


class Round:
    """A round that is open: messages come one by one, in any order, and are added up in the memory of one, or 2 MB.

        sum over users of  message * min(1, clip_norm / ||message||)

    The order of arrival leaves no trace in the sum, not by a bit: each cut message is truncated to multiples of
    about clip_norm / 2^31, which add up exactly.

    A message that is none (of other names, shapes or types, not finite) is the zero vector, and nothing tells of it;
    its user has taken part. A *user* that the plan does not let take part now, or who was added before, is refused
    before anything is added, and the round goes on: that depends on who came and when, not on what was sent.

    What else stops an `add` half way (an interrupt, no memory) leaves a sum of which nobody can say whose messages are
    in it: such a round takes nothing more and is never released, `discard` it.

    Made by `Server.open`. As a context manager it closes itself, or, left by an error, discards itself. Several threads
    may add at once; one at a time is let in.
    """

    def __init__(
        self,
        release: Release,
        layout: Layout,
        total: ClippedSum,
        pieces: Layout,
        finish: Callable[[Units, Tensor, int, float], None],
        end: Callable[[], None],
        alone: Callable[[], AbstractContextManager[None]],
        *,
        largest: float,
    ) -> None:
        self._release, self._layout, self._clipped, self._pieces = release, layout, total, pieces
        self._finish, self._end, self._alone, self._largest = finish, end, alone, largest
        self._dtype = torch.float64 if release.plan.grid is None else torch.int64
        self._sums = torch.zeros(layout.size, dtype=self._dtype)  # what others have added up
        self._users: set[int | str] = set()
        self._waiting: list[Tensor] = []  # messages that are in, and added up together
        self._step, self._clip_norm = release.steps_taken, release.clip_norm
        self._open = self._whole = True  # whole: the sum is that of the messages of these users, and of no others
        self._free = threading.RLock()  # of the thread: one that was interrupted with it does not wait for itself
        on_device = release.plan.on_device
        self._sums_allowed, self._nameless = "clipping" in on_device, "record" in on_device

    def add(self, user: int | str | None, message: Any) -> None:
        """Add one user's message.

        Args:
            user: integer or string; None where the plan leaves the record to the devices.
            message: {parameter name: tensor or array of floats}, the user's change.
        Raises: ParticipationError for a user who was added before, or whom the plan does not let take part in this
            round; ArgumentError for what is no id. Nothing was added, and the round goes on. TrainingError after the
            end of the round.
        Cost: O(size).
        """
        with self._adding(None if user is None else [user]):
            self._waiting.append(self._layout.flat(message))
            if len(self._waiting) * self._layout.size >= BLOCK:
                self._add_waiting()

    def add_rows(self, users: Iterable[Any] | None, rows: Any) -> None:
        """Add many users' messages, which are vectors already: the fast way for simulations.

        Args:
            users: (m,) ids, each once; None where the plan leaves the record to the devices.
            rows: (m, size) array or tensor of floats in the order of `server.layout`. A row that is not finite is the
                zero vector.
        Raises: as `add`, of any of them: none was added. ArgumentError for rows of another shape or type.
        """
        tensor = _rows_of(rows, self._layout.size)
        most = max(1, _ROWS // self._layout.size)
        with self._adding(users, len(tensor)):
            for start in range(0, len(tensor), most):
                self._add(tensor[start : start + most])

    def add_sum(self, users: Iterable[Any] | None, total: Any) -> None:
        """Add a sum that somebody else made of messages that the clients have cut: under secure aggregation.

        Only a plan that says so (`on_device=("clipping",)`) has it: the server cannot see that no message in the sum is
        longer than the clip norm. A sum that no cut messages have is zero: one that is not finite, or not in the
        model's precision, or that is longer than the clip norm times the number of users, by more than rounding.

        Args:
            users: whose messages are in it; None where the plan leaves the record to the devices.
            total: (size,) floats in the order of `server.layout`; int64 in steps of `plan.grid` where it has one.
        Raises: as `add`. PlanError where clipping is not left to the devices. ArgumentError for another shape or type.
        """
        if not self._sums_allowed:
            raise PlanError(
                "add_sum() takes sums of which nobody sees that each message was clipped, and the plan does not trust "
                "the devices with that: plan with ao.mechanism(on_device=('clipping',)), or give single messages to "
                "add()"
            )
        own = self._sum_of(total)
        with self._adding(users) as known:
            if self._is_possible(own, _MOST_MESSAGES if self._nameless else len(known)):
                self._sums += own

    def close(self) -> None:
        """End the round: its sum gets the noise of the step, and the optimizer moves the model.

        A round of few answers, or of none, is a round like all others: the divisor is the plan's.

        Raises: CheckpointError where the files cannot be written. If `server.step` has not moved, the round is still
            open, and may be closed again; else it was made, and `server.save()` is to be called again.
        """
        with self._free, self._alone():
            self._check_open()
            self._whole = False
            self._add_waiting()
            self._whole = True
            parts = self._clipped.finish()
            vector = torch.cat([parts[name].reshape(-1) for name in self._pieces.shapes]) + self._sums
            further = [parts[name].reshape(1) for name in parts.keys() - self._pieces.shapes.keys()]
            try:
                self._finish(as_units(self._users), torch.cat([vector, *further]), self._step, self._clip_norm)
            finally:
                if self._release.steps_taken != self._step:
                    self._ended()

    def discard(self) -> None:
        """Forget the round: nothing of it was released or recorded."""
        with self._alone(), self._free:  # at once, or never: not after a close() that is under way
            if self._open:
                self._ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        if kind is not None:
            self.discard()
        elif self._open:
            self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _ended(self) -> None:
        self._open, self._waiting = False, []
        self._end()

    def _check_open(self) -> None:
        if not self._open or self._release.steps_taken != self._step:
            raise TrainingError(
                f"round {self._step} is over: a late message is left out, and its sender may take part in a later "
                "round that the plan allows"
            )
        if not self._whole:
            raise TrainingError(
                f"round {self._step} was broken off while a message was added, and nobody can say what is in its sum: "
                "discard() it, and open another one; nothing of it was released or recorded"
            )

    @contextmanager
    def _adding(self, users: Iterable[Any] | None, count: int | None = None) -> Iterator[set[Any]]:
        """Where messages of these users are added: in the sum and among the users, or the round is not whole."""
        given = None if users is None else as_units(users)
        with self._free:
            self._check_open()
            self._whole = False  # before the look at who is there: what comes in between is refused
            try:
                known = self._known(given, count)
            except AnyorderError:  # refused, with nothing added
                self._whole = True
                raise
            yield known
            self._users |= known
            self._whole = True

    def _known(self, users: Units | None, count: int | None = None) -> set[Any]:
        """The ids, none of which may have been added before; the caller adds them when their messages are in."""
        if self._nameless:
            if users is not None:
                raise ArgumentError("the plan leaves the record to the devices: the server takes no ids, give None")
            return set()
        if users is None:
            raise ArgumentError("users must name who sent the messages, got None")
        if count is not None and len(users) != count:
            raise ArgumentError(f"users must be {count} ids, one for each row, got {len(users)}")
        ids = set(plain(users))
        if ids and self._users and type(next(iter(ids))) is not type(next(iter(self._users))):
            raise ArgumentError("users must be all integers or all strings; one under two names would be two")
        if len(ids) < len(users) or not self._users.isdisjoint(ids):
            raise ParticipationError(
                f"round {self._step}: a user sent a message before, and each has one a round. Nothing was added, and "
                "the round goes on: drop the second one, from another device or repeated"
            )
        self._release.check(users)
        return ids

    def _add(self, rows: Tensor) -> None:
        if len(rows):
            self._clipped.add(self._pieces.named(rows), torch.arange(len(rows)), complete=True)

    def _add_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._add(torch.stack(waiting))

    def _is_possible(self, own: Tensor, most: int) -> bool:
        """Whether so many cut messages can have this sum, and the model's precision the mean: a public rule.

        Of devices that keep their promise all sums are; of one that does not, the model would be infinite for ever.
        """
        grid = self._release.plan.grid or 1.0
        norm = float(torch.linalg.vector_norm(own.double())) * grid
        largest = float((self._sums + own).double().abs().max()) * grid
        return norm <= 1.01 * most * self._release.clip_norm and largest <= self._largest

    def _sum_of(self, total: Any) -> Tensor:
        grid, size = self._release.plan.grid, self._layout.size
        tensor = total if isinstance(total, Tensor) else torch.from_numpy(np.array(total))
        fits = tensor.is_floating_point() if grid is None else tensor.dtype == torch.int64
        if tensor.numel() != size or not fits:
            kind = "floats" if grid is None else f"int64, in steps of the plan's grid {grid:g}"
            raise ArgumentError(f"total must be {size} {kind}, got {tensor.dtype} of shape {tuple(tensor.shape)}")
        flat = tensor.detach().reshape(-1).to("cpu", self._dtype)
        if grid is not None:
            return flat
        step = step_of(self._release.clip_norm)
        return (flat / step).trunc_().mul_(step) if flat.isfinite().all() else torch.zeros(size, dtype=self._dtype)


def _rows_of(rows: Any, size: int) -> Tensor:
    is_array = isinstance(rows, np.ndarray) and rows.dtype.kind == "f"
    if not is_array and not (isinstance(rows, Tensor) and rows.is_floating_point()):
        raise ArgumentError(f"rows must be an array or tensor of floats, got {type(rows).__name__}")
    tensor = rows.detach().to("cpu") if isinstance(rows, Tensor) else torch.from_numpy(np.ascontiguousarray(rows))
    if tensor.dim() != 2 or tensor.shape[1] != size:
        raise ArgumentError(f"rows must be (m, {size}), in the order of server.layout, got {tuple(tensor.shape)}")
    return tensor


_SMALLEST, _LARGEST = 2.0**-60, 2.0**60  # clip norms with room around them in float32


class Server:
    """Federated averaging under a plan, one message a user and round [McMahan et al. 2018; Kairouz et al. 2021, 7].

    A user's message is its own change of the parameters, theta_after - theta_before. Round t releases

        m_t = ( sum over users of  message * min(1, clip_norm / ||message||)  +  noise_std * (K Z)[t] ) / report_goal

    and gives the optimizer -m_t for a gradient: SGD with lr 1 adds the mean; `ao.FTRL`, momentum and Adam are
    post-processing as well. The norm is over all shared parameters together; all weights are one; the divisor is the
    planned one, no matter who answers.

    Guarantee: the sequence of models is (plan.epsilon, plan.delta)-DP for one user, the plan's `unit`, under its
    neighbours: all messages of one user, replaced by zeros, change what is seen by no more. Nothing that a user sends
    stops a round, skips it or tells: what is no message is the zero vector. A user who appears too early, too often or
    twice is refused before anything is added. No count of answers, loss or metric leaves the server.

    What is shared is what the optimizer holds. The model's other parameters, and all buffers, are never read by a
    release, nor changed: what clients keep (personal layers, counters of a normalisation) stays with them.

    With `checkpoint` every round is on the disk before `round` or `close` return. A server that was killed, at whatever
    point, goes on from there: a round whose messages were all in is made again, on the same sum and with the same
    noise; nothing is lost but a round that was still collecting. The files hold the noise key, and between two
    instants of a round its un-noised sum: keep them as safe as the data. The model is in them whole: so is what you put
    into its parameters that are not shared, or its buffers, of somebody's personal values.

    Args:
        plan: what to run. Its `unit` says who sends: "user", "owner".
        model: any module of floats, on any device.
        optimizer: over the parameters that are shared.
        report_goal: None, or `plan.batch_size`, which it is.
        checkpoint: file; where it exists the run goes on from it, with the same kinds of model and optimizer.
        key: 32 bytes for reproducible tests. In use, leave it out: a run whose key is known has no privacy.
        rule: how messages are clipped: a rule of `ao.clipping`; `Flat()` if None. `Adaptive(..)` moves the norm where
            the noise restarts: tell clients `clip_norm` in each round.

    Attributes:
        plan, model: as given. The model is the one that the last round left.
        layout: the shared parameters, in the order of `Round.add_rows`.
        release: carries the plan out; `release.on_release` is for audits and logs.

    Raises: PlanError for another report goal, a plan with secret sampling or an unfit clip norm; ArgumentError for
        parameters that are no floats, or an optimizer of another model or run; CheckpointError.
    Warns: OptimizerWarning where the plan's noise is correlated and the optimizer has another momentum, or beta
        of Adam, than the plan, or is RMSprop or the like.
    Cost: memory of two vectors in float64 while a round is open.

    Example:
        >>> plan = ao.plan(dataset_size=6, batch_size=2, epochs=1, epsilon=8, delta=1e-6, unit="user")
        >>> model = torch.nn.Linear(2, 1)
        >>> server = ao.federated.Server(plan, model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> change = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
        >>> server.round({"ann": change, "bob": change})
        >>> server.step
        1
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        report_goal: int | None = None,
        checkpoint: str | Path | None = None,
        key: bytes | None = None,
        rule: Rule | None = None,
    ) -> None:
        _check_plan(plan, report_goal)
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model must be a torch module, got {type(model).__name__}")
        warn_of_unfitted(plan, optimizer, stacklevel=2)
        self.plan, self.model, self._optimizer = plan, model, optimizer
        self._cut = Cut.of(rule)
        self._held = BoundParameters(model, optimizer)
        self._round: Round | None = None
        self._made: int | None = None  # the round that is being made; None between rounds
        self._unsaved = self._moving = False
        self._within: dict[str, object] = {}
        try:
            self.layout = _layout_of(self._held.named)
            wide = any(p.dtype == torch.float64 for p in self._held.named.values())
            self._dtype = torch.float64 if wide else torch.float32
            self._check_rule()
            size = self.layout.size + len(self._cut.counted)
            files = {"key": key, "checkpoint": checkpoint, "ledger_on_disk": checkpoint is not None}
            self.release = Release.of_ranks(plan, OneProcess(size), self._cut.schedule, place="Server", **files)
            try:
                self._begin(None if checkpoint is None else Path(checkpoint))
            except BaseException:
                self.release.close()
                raise
        except BaseException:
            self._held.thaw()
            raise
        self._held.bind()
        optimizer.register_step_pre_hook(self._only_here)

    def _check_rule(self) -> None:
        """A rule that does not fit the parameters is refused now, not in a round."""
        self._cut.apply({name: torch.zeros(1, dtype=torch.float64) for name in self.layout.shapes}, self.plan.clip_norm)

    def _begin(self, path: Path | None) -> None:
        """A new run, or the one of the checkpoint; and the round that it was killed in."""
        self._path = path
        self._pending = Pending(path, self.release.derived(b"pending").fingerprint())
        left = self._pending.read()
        state = self.release.resumed
        self.release.resumed = None
        if state is not None:
            self._restore(state)
        elif path is not None:
            self._save()  # from here on the key is on the disk, and with it what a round is made again by
        if left is None:
            return
        if left.step > self.step:
            raise CheckpointError(
                f"round {left.step} is in {path}.pending, and the checkpoint is at round {self.step}: it is older than "
                "the run's last one, and the rounds between would have to be made again; put the last one back"
            )
        if left.step == self.step:
            self._allowed(left.users)
            self._make(left)
        self._pending.remove()

    # -- rounds ------------------------------------------------------------------------------------------------------

    def round(self, messages: Mapping[Any, Message] | Iterable[Message]) -> None:
        """Make the next round of these messages.

        Args:
            messages: {user id: {parameter name: the client's change}}, for the clients that answered, perhaps nobody.
                Where the plan leaves the record to the devices: the messages alone, in a list.
        Raises: ParticipationError if the plan does not let one of the users take part now, StepsExhaustedError after
            the last round; nothing changed. CheckpointError as `Round.close`.
        """
        if not isinstance(messages, Iterable):
            raise ArgumentError(f"messages must be a dict {{user: message}}, got {type(messages).__name__}")
        round = self.open()
        try:
            if isinstance(messages, Mapping):
                self.release.check(messages.keys())
                for user, message in messages.items():
                    round.add(user, message)
            else:
                for message in messages:
                    round.add(None, message)
            round.close()
        finally:
            if self._round is round:
                self._round = None  # where the files failed, what is in <checkpoint>.pending stays: a restart makes it

    def open(self) -> Round:
        """The next round, for messages as they come: see `Round`.

        Raises: StepsExhaustedError after the last round; TrainingError while another one is open.
        """
        with self._one_at_a_time():
            if self._round is not None:
                raise TrainingError(f"round {self.step} is open already: close() or discard() it first")
            self._check()
            pieces = self.layout
            if type(self._cut.factors) is Flat and pieces.size <= BLOCK:  # one norm, and no memory worth sparing
                pieces = Layout({"message": (pieces.size,)})
            total = sum_of_nobody(pieces, self._dtype, self.release, self._cut)
            least = min(torch.finfo(p.dtype).max for p in self._held.named.values())
            end = self._finish, self._ended, self._one_at_a_time
            self._round = opened = Round(
                self.release, self.layout, total, pieces, *end, largest=least * self.plan.batch_size
            )
            return opened

    def eligible(self, users: Iterable[Any]) -> NDArray[np.bool_]:
        """(m,) bool: whom of the users the plan lets take part in the next round. Choose cohorts among them."""
        if not isinstance(users, Iterable):
            raise ArgumentError(f"users must be a list or an array of ids, got {type(users).__name__}")
        ids = as_units(users)
        if self.step >= self.plan.n:
            return np.zeros(len(ids), np.bool_)
        return self.release.ledger.allowed(self.step, ids)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Two rounds at one step would be two sums under one noise, or a sum cut at a norm that is not in force."""
        own = object()
        try:  # a dict's setdefault is one act, and leaves nothing behind that an interrupt could keep locked
            if self._within.setdefault("here", own) is not own:
                raise TrainingError(
                    "the server is being used already, by another thread or around this observer: one at a time"
                )
            yield
        finally:
            if self._within.get("here") is own:
                del self._within["here"]

    def _ended(self) -> None:
        self._round = None
        if self._pending.step == self.step and not self.release.may_have_committed:
            self._pending.remove()  # of a round that is given up after its close() had failed

    def _check(self) -> None:
        if self._made is not None and self._made != self.step:
            raise TrainingError(
                f"round {self._made} was broken off after its release: the model lacks it. Make a new server from the "
                "checkpoint, which finishes it"
            )
        if self._unsaved:
            self._save()
        self._held.check_optimizer()
        self.release.check(None)

    def _finish(self, users: Units, total: Tensor, step: int, clip_norm: float) -> None:
        """Release a round's sum, cut at clip_norm, and move the model; the round is on the disk before and after."""
        if (step, clip_norm) != (self.step, self.clip_norm):
            raise TrainingError(
                f"a sum of round {step}, clipped at norm {clip_norm:g}, is none of round {self.step}, whose norm is "
                f"{self.clip_norm:g}: discard() it"
            )
        pending = PendingRound(
            self.step, self._allowed(users), total if self.plan.grid is not None else total.to(self._dtype)
        )
        if not self.release.repeats:  # else what its noise was used on is settled, by another one's messages perhaps
            self._pending.write(pending)
        self._make(pending)

    def _allowed(self, users: Units) -> Units:
        """The users, whom the plan lets make this round now, with an optimizer that moves what is released alone."""
        self._held.check_optimizer()
        return self.release.check(users)

    def _make(self, pending: PendingRound) -> None:
        self._made = pending.step
        (private,) = self.release.take(pending.users, [pending.total.clone()], "Server.round")
        self._move(private[: self.layout.size])
        for count in private[self.layout.size :]:
            self.release.record_count(pending.step, float(count))
        self._made, self._unsaved = None, self._path is not None
        if self._unsaved:
            self._save()
        self.release.tell(pending.step, lambda: private)

    def _move(self, mean: Tensor) -> None:
        """One step of the optimizer, on minus the mean change."""
        changes = self.layout.named(mean)
        for name, p in self._held.named.items():
            p.grad = changes[name].neg().to(p.device, p.dtype)
        self._moving = True
        try:
            self._optimizer.step()
        finally:
            self._moving = False
        for p in self._held.named.values():
            p.grad = None

    def _only_here(self, *call: Any) -> None:
        if not self._moving:
            raise TrainingError("the optimizer belongs to a server, whose rounds are its steps: call round()")

    # -- what is shown and kept --------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The next round, 0 to n; n when all are made."""
        return self.release.steps_taken

    @property
    def clip_norm(self) -> float:
        """The norm at which messages are clipped in the next round: for clients to know. It is public."""
        return self.release.clip_norm

    @property
    def extra(self) -> dict[str, Any]:
        """Plain values, arrays and tensors of your own, to be written into: each checkpoint has them."""
        return self.release.extra

    def certificate(self, *, public_stop: bool = False) -> Certificate:
        """The claim of this run, for everybody: `save` it, and check it with `anyorder verify`. It names nobody.

        `public_stop` is for runs that ended early: see `Release.certificate`.
        """
        return self.release.certificate(public_stop=public_stop)

    def evidence(self) -> Evidence:
        """Return the record that backs the certificate: who took part in which round. It is as secret as the data."""
        return self.release.evidence()

    def save(self) -> None:
        """Write the checkpoint. Every round does; call it after a change of `extra`, or when a round could not.

        Raises: CheckpointError, TrainingError where a round was broken off; the file of the last save is intact.
        """
        with self._one_at_a_time():
            self._save()

    def _save(self) -> None:
        if self._made is not None and self._made != self.step:
            self._check()
        own = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "kind": self._kind(),
        }
        self.release.save_all("Server.save()", {"server": own}, self.extra)
        if self._pending.step is not None and self._pending.step < self.step:
            self._pending.remove()
        self._unsaved = False

    def _kind(self) -> str:
        return f"{type(self._optimizer).__name__} of {dict(self.layout.shapes)}"

    def _restore(self, state: dict[str, Any]) -> None:
        own = state.get("server")
        if own is None:
            raise CheckpointError(f"{self._path} is the checkpoint of another front end; choose another file")
        if own["kind"] != self._kind():
            raise CheckpointError(
                f"{self._path} is of a server with other shared parameters or another kind of optimizer; resume with "
                "those of the run"
            )
        try:
            self.model.load_state_dict(own["model"])
            self._optimizer.load_state_dict(own["optimizer"])
        except (RuntimeError, ValueError) as problem:
            raise CheckpointError(f"{self._path} is of another model or optimizer: {problem}") from problem

    def close(self) -> None:
        """Let another process resume this run. The end of the process does the same."""
        if self._round is not None:
            self._round.discard()
        with self._one_at_a_time():
            self.release.close()


def _check_plan(plan: Plan, report_goal: int | None) -> None:
    if type(plan) is not Plan:
        raise ArgumentError(f"plan must be an anyorder Plan (see anyorder.plan), got {type(plan).__name__}")
    if report_goal is not None and checks.integer("report_goal", report_goal, low=1) != plan.batch_size:
        raise PlanError(
            f"report_goal is what sums are divided by, and the plan has batch_size={plan.batch_size} there, got "
            f"{report_goal}; plan with batch_size={report_goal}"
        )
    if plan.participation.secret:
        raise PlanError(
            "the plan is for secret sampling, whose batches are drawn at random: users appear as they can, and one who "
            "was drawn may not answer. Plan for MinSeparation(..) or another order of users"
        )
    if plan.selection is not None:
        raise PlanError(
            "the plan has a selection of rows: it needs a table, and a server's messages have every coordinate. Plan "
            "without ao.mechanism(selection=..)"
        )
    if not _SMALLEST <= plan.clip_norm <= _LARGEST:
        raise PlanError(f"clip_norm must be from 2^-60 to 2^60 on a server, got {plan.clip_norm}")


def _layout_of(shared: Mapping[str, nn.Parameter]) -> Layout:
    if any(is_sharded(p) for p in shared.values()):
        raise ArgumentError("model must be whole in this process: a server takes no sharded parameters")
    return Layout.of(shared)
