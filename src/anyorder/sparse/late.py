"""How rows of a lazy table get the noise that they have missed: in one jump, in law, or step by step, by value."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyorder.errors import CheckpointError, PlanError
from anyorder.noise.lazy import Jumps
from anyorder.release import Release
from anyorder.strategy import Tree

__all__ = ["ByJumps", "ByValue", "Late", "State"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_NUMPY: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}


class State(NamedTuple):
    """What is stored of rows: theta (k, width), and what is kept beside it (k, kept, width)."""

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

    def record(self, step: int, lr: float, divisor: float) -> None:
        """Take the public numbers of a step, in order."""
        self._jumps.record(step, lr, self._std / divisor)

    def jump(self, state: State, rows: Integers, starts: Integers, stop: int) -> State:
        """The state of rows after the steps starts .. stop - 1, in which they had no gradient.

        In the numbers' own type, of Phi - 1: Phi in float32 would be another matrix.

        Args:
            state: copies of what is stored, which are overwritten.
            rows: (k,).
            starts: (k,) first step that each one lacks.
        Returns: the state, on the CPU.
        """
        theta, kept = (part.cpu() for part in state)
        k, width = theta.shape
        jump = self._jumps.over(starts, stop)
        w = jump.rows.shape[1]
        if not w:
            return State(theta, kept)
        alike = len(jump.Phi) == 1  # in most steps: all rows were read when the batch was
        places = (rows * width + self._first)[:, None]
        ids, elements = np.broadcast_arrays(jump.rows if alike else jump.rows[jump.which], places)
        xi = torch.from_numpy(self._source.normal_at(ids.ravel(), elements.ravel(), width))
        xi = xi.view(k, w, width).to(theta.dtype)
        maps = jump.R
        if self.kept:
            maps = np.concatenate([jump.Phi[:, :, :-1] - np.eye(self.kept + 1, self.kept), maps], axis=2)
            xi = torch.cat([kept, xi], dim=1)
        maps = maps.astype(_NUMPY[theta.dtype])
        factors = torch.from_numpy(maps).expand(k, -1, -1) if alike else torch.from_numpy(maps[jump.which])
        if xi.shape[1] == 1:
            theta.addcmul_(xi[:, 0], factors[:, 0])
            return State(theta, kept)
        made = torch.bmm(factors, xi)
        theta += made[:, -1]
        if self.kept:
            kept += made[:, :-1]
        return State(theta, kept)

    def step(self, state: State, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> State:
        """The state of rows after a step in which they had these sums. As `jump`, over that step."""
        theta, kept = self.jump(state, rows, np.full(len(rows), step, np.int64), step + 1)
        own = sums.detach().to("cpu", theta.dtype)
        into = self._jumps.input(step) / divisor
        theta.add_(own, alpha=float(into[-1]))
        if self._momentum:
            kept[:, -1].add_(own, alpha=float(into[-2]))
        return State(theta, kept)

    def exact(self, state: State) -> State:
        """For `gradient`: what is released is seen by what it moves, which the table's own type would round."""
        return State(*(part.to("cpu", torch.float64) for part in state))

    def gradient(self, before: State, after: State, lr: float) -> Tensor:
        """The private mean of a step that led from one state to the other, of rates above 0."""
        if self._momentum:
            return after.kept[:, -1] - self._momentum * before.kept[:, -1]
        return (before.theta - after.theta) / lr

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

    def record(self, step: int, lr: float, divisor: float) -> None:
        """Take the public numbers of a step, in order."""
        assert len(self._steps) == step
        self._steps.append((lr, divisor))

    def jump(self, state: State, rows: Integers, starts: Integers, stop: int) -> State:
        """As of `ByJumps`; on the table's device."""
        theta, kept = state
        for step in range(int(starts.min(initial=stop)), stop):
            late = np.flatnonzero(starts <= step)
            at = torch.from_numpy(late).to(theta.device)
            nothing = theta.new_zeros(len(late), self._width)
            here = State(theta[at], kept[at])
            made = self.step(here, rows[late], step, nothing, self._steps[step][1], self._steps[step][0])
            theta[at], kept[at] = made
        return state

    def step(self, state: State, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> State:
        """As of `ByJumps`: the operations of `torch.optim.SGD`, in its order."""
        theta, kept = state
        mean = self._noise.add_to_rows(step, 0, rows, sums, divisor).to(theta.device, theta.dtype)
        if self._momentum:
            velocity = kept[:, 0]
            velocity.mul_(self._momentum).add_(mean)
            mean = mean.add(velocity, alpha=self._momentum) if self._nesterov else velocity
        theta.add_(mean, alpha=-lr)
        return state

    def exact(self, state: State) -> State:
        """As it is: the roundings are those of the dense run."""
        return state

    def gradient(self, before: State, after: State, lr: float) -> Tensor:
        """As of `ByJumps`, to the rounding of the table's type."""
        if self._momentum:
            return after.kept[:, 0] - self._momentum * before.kept[:, 0]
        return (before.theta - after.theta) / lr

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**self._options, "rates": np.array(self._steps, np.float64).reshape(-1, 2)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        _check_options(saved, self._options)
        self._steps = [(lr, divisor) for lr, divisor in np.asarray(saved["rates"]).tolist()]


Late = ByJumps | ByValue


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
