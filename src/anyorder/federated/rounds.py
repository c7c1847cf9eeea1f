"""One round: who has sent a message, and the sum of what was sent, each message cut to the clip norm."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from anyorder.clipping.clip_rules import Cut
from anyorder.clipping.units import ClippedSum, step_of
from anyorder.errors import AnyorderError, ArgumentError, ParticipationError, PlanError, TrainingError
from anyorder.federated.messages import Layout
from anyorder.ledger import Units, as_units
from anyorder.ledger.ids import plain
from anyorder.release import Release

__all__ = ["Round", "sum_of_nobody"]

_ROWS = 1 << 24  # numbers of messages that are copied at once
_MOST = 1 << 22  # messages of a round whose users nobody names: so many add up exactly


def sum_of_nobody(layout: Layout, dtype: torch.dtype, release: Release, cut: Cut) -> ClippedSum:
    """Where messages are added, each cut at the norm in force: the same bits in whatever order they come."""
    shared = {name: torch.empty(shape, dtype=dtype) for name, shape in layout.shapes.items()}
    return ClippedSum(shared, clip_norm=release.clip_norm, scale=1.0, grid=release.plan.grid, cut=cut, any_order=True)


class Round:
    """A round that is open: messages come one by one, in any order, and are added up in the memory of one.

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
        finish: Callable[[Units, Tensor, int, float], None],
        end: Callable[[], None],
        alone: Callable[[], AbstractContextManager[None]],
        *,
        largest: float,
    ) -> None:
        self._release, self._layout, self._clipped = release, layout, total
        self._finish, self._end, self._alone, self._largest = finish, end, alone, largest
        self._dtype = torch.float64 if release.plan.grid is None else torch.int64
        self._sums = torch.zeros(layout.size, dtype=self._dtype)  # what others have added up
        self._users: set[int | str] = set()
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
            self._add(self._layout.flat(message)[None])

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
                "the devices with that: plan with on_device=('clipping',), or give single messages to add()"
            )
        own = self._sum_of(total)
        with self._adding(users) as known:
            if self._is_possible(own, _MOST if self._nameless else len(known)):
                self._sums += own

    def close(self) -> None:
        """End the round: its sum gets the noise of the step, and the optimizer moves the model.

        A round of few answers, or of none, is a round like all others: the divisor is the plan's.

        Raises: CheckpointError where the files cannot be written. If `server.step` has not moved, the round is still
            open, and may be closed again; else it was made, and `server.save()` is to be called again.
        """
        with self._free, self._alone():
            self._check_open()
            parts = self._clipped.finish()
            vector = torch.cat([parts[name].reshape(-1) for name in self._layout.shapes]) + self._sums
            further = [parts[name].reshape(1) for name in parts.keys() - self._layout.shapes.keys()]
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
        self._open = False
        self._end()

    def _check_open(self) -> None:
        if not self._open or self._release.steps_taken != self._step:
            raise TrainingError(
                f"round {self._step} is over: what comes late is left out, and its sender may take part in a later "
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
            self._clipped.add(self._layout.named(rows), torch.arange(len(rows)), complete=True)

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
