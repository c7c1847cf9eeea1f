"""How rows of a lazy table get the noise that they have missed: in one jump, in law, or step by step, by value."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyorder.errors import CheckpointError, PlanError
from anyorder.noise import lazy
from anyorder.noise.lazy import Jump, Jumps
from anyorder.release import Release
from anyorder.strategy import Tree

__all__ = ["ByJumps", "ByValue", "Change", "Late", "State"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

Change = Callable[[], None]


class State(NamedTuple):
    """What is stored of rows, all or some: theta (k, width), and what is kept beside it (k, kept, width)."""

    theta: Tensor
    kept: Tensor


class ByJumps:
    """Jumps: `docs/lazy.md` proves the law. Rows and steps are in the keys of the normals, and nothing else.

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
        self._arrays: list[NDArray[Any]] | None = None
        if stored.theta.device.type == "cpu":
            kept = _numpy(stored.kept)
            self._arrays = [*(kept[:, j] for j in range(self.kept)), _numpy(stored.theta)]

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

    def step(self, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> Change:
        """Carry rows over a step in which they had these sums. As `jump`."""
        return self._change(rows, self._over(rows, step), _numpy(sums), self._jumps.input(step) / divisor)

    def seen_step(self, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> tuple[Change, Tensor]:
        """As `step`, of a rate above 0. Returns: also the private mean of these rows: of what the step moved.

        That is unrounded, as the table's own type would round what is seen.
        """
        before = _copied(self._stored, rows)
        after = self._made(before, rows, self._over(rows, step), _numpy(sums), self._jumps.input(step) / divisor)
        theta, kept = (part.to("cpu", torch.float64) for part in before)
        mean = after.kept[:, -1] - self._momentum * kept[:, -1] if self._momentum else (theta - after.theta) / lr
        return partial(_put, self._stored, rows, after), mean

    def _over(self, rows: Integers, step: int) -> Jump:
        return self._jumps.over([step], step + 1)._replace(which=np.zeros(len(rows), np.intp))

    def _change(self, rows: Integers, jump: Jump, *gradient: NDArray[Any]) -> Change:
        """In place, where the table is in the memory of the processor; the same bits elsewhere."""
        if self._arrays is None:
            return partial(_put, self._stored, rows, self._made(_copied(self._stored, rows), rows, jump, *gradient))
        return partial(lazy.carry, self._source, jump, self._arrays, rows, self._first, *gradient)

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
        theta, kept = state = _copied(self._stored, rows)
        for step in range(int(starts.min(initial=stop)), stop):
            late = np.flatnonzero(starts <= step)
            at = torch.from_numpy(late).to(theta.device)
            nothing = theta.new_zeros(len(late), self._width)
            here = State(theta[at], kept[at])
            self._take(here, rows[late], step, nothing, self._steps[step][1], self._steps[step][0])
            theta[at], kept[at] = here
        return partial(_put, self._stored, rows, state)

    def step(self, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> Change:
        """As of `ByJumps`."""
        state = _copied(self._stored, rows)
        self._take(state, rows, step, sums, divisor, lr)
        return partial(_put, self._stored, rows, state)

    def seen_step(self, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> tuple[Change, Tensor]:
        """As of `ByJumps`, to the rounding of the table's type."""
        before, after = _copied(self._stored, rows), _copied(self._stored, rows)
        self._take(after, rows, step, sums, divisor, lr)
        if self._momentum:
            mean = after.kept[:, 0] - self._momentum * before.kept[:, 0]
        else:
            mean = (before.theta - after.theta) / lr
        return partial(_put, self._stored, rows, after), mean

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


def _copied(stored: State, rows: Integers) -> State:
    at = torch.from_numpy(rows).to(stored.theta.device)
    return State(*(part.index_select(0, at) for part in stored))


def _put(stored: State, rows: Integers, state: State) -> None:
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
