"""How rows of a lazy table get the noise that they have missed: in one jump, in law, or step by step, by value."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyorder.errors import CheckpointError, PlanError
from anyorder.noise.lazy import Jumps
from anyorder.release import Release
from anyorder.strategy import Tree

__all__ = ["ByJumps", "ByValue", "Late"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class ByJumps:
    """Jumps: `docs/lazy.md` proves the law. Rows and steps are in the keys of the normals, and nothing else.

    The jumps of a tree without momentum have the nodes of the dense run itself, and so its noise by value; others have
    normals of their own, and its noise in law.

    State of a row: (D, width) numbers, the table's own last; see `anyorder.noise.lazy.Jumps`.

    Args:
        release: whose plan and keys.
        momentum, nesterov: of SGD.
    """

    def __init__(self, release: Release, momentum: float, nesterov: bool) -> None:
        strategy = release.plan.strategy
        self.by_value = type(strategy) is Tree and not momentum and strategy.estimator != "online"
        self._jumps = Jumps(strategy, momentum=momentum, nesterov=nesterov, by_value=self.by_value)
        self._momentum, self._std = momentum, release.std
        self._source = release.noise_rows() if self.by_value else release.lazy_source(self._jumps.first_row)
        self.kept = self._jumps.kept

    def begin(self, first: int, num_rows: int, width: int) -> None:
        """Take the first coordinate and the shape of the table."""
        self._first = first

    def record(self, step: int, lr: float, divisor: float) -> None:
        """Take the public numbers of a step, in order."""
        self._jumps.record(step, lr, self._std / divisor)

    def jump(self, state: Tensor, rows: Integers, starts: Integers, stop: int) -> Tensor:
        """The state of rows after the steps starts .. stop - 1, in which they had no gradient.

        Args:
            state: (D, k, width), as it is stored.
            rows: (k,).
            starts: (k,) first step that each one lacks.
        Returns: (D, k, width) float64, on the CPU.
        """
        s = _floats(state)
        D, k, width = s.shape
        jump = self._jumps.over(starts, stop)
        w = jump.rows.shape[1]
        ids = jump.rows[jump.which].ravel()
        elements = np.repeat(self._first + rows * width, w)
        xi = self._source.normal_at(ids, elements, width).reshape(k, w, width).astype(np.float64)
        if len(jump.Phi) == 1:  # most steps: all rows were read when the batch was
            made = jump.Phi[0] @ s.reshape(D, k * width)
            made += jump.R[0] @ xi.transpose(1, 0, 2).reshape(w, k * width)
            return torch.from_numpy(made.reshape(D, k, width))
        made = jump.Phi[jump.which] @ s.transpose(1, 0, 2)
        made += jump.R[jump.which] @ xi
        return torch.from_numpy(np.ascontiguousarray(made.transpose(1, 0, 2)))

    def step(self, state: Tensor, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> Tensor:
        """The state of rows after a step in which they had these sums. As `jump`, over that step."""
        made = self.jump(state, rows, np.full(len(rows), step, np.int64), step + 1)
        mean = sums.detach().to("cpu", torch.float64) / divisor
        made += torch.from_numpy(self._jumps.input(step))[:, None, None] * mean
        return made

    def gradient(self, before: Tensor, after: Tensor, lr: float) -> Tensor:
        """The private mean of a step that led from one state to the other, of rates above 0."""
        before = before.to("cpu", torch.float64)
        if self._momentum:
            return after[-2] - self._momentum * before[-2]
        return (before[-1] - after[-1]) / lr

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"way": "jumps", **self._jumps.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        _check_way(saved, "jumps")
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

    def jump(self, state: Tensor, rows: Integers, starts: Integers, stop: int) -> Tensor:
        """As of `ByJumps`; in the table's own type."""
        made = state.clone()
        for step in range(int(starts.min(initial=stop)), stop):
            late = np.flatnonzero(starts <= step)
            at = torch.from_numpy(late).to(state.device)
            nothing = state.new_zeros(len(late), self._width)
            made[:, at] = self.step(made[:, at], rows[late], step, nothing, self._steps[step][1], self._steps[step][0])
        return made

    def step(self, state: Tensor, rows: Integers, step: int, sums: Tensor, divisor: float, lr: float) -> Tensor:
        """As of `ByJumps`: the operations of `torch.optim.SGD`, in its order."""
        mean = self._noise.add_to_rows(step, 0, rows, sums, divisor).to(state.device, state.dtype)
        made = state.clone()
        if self._momentum:
            made[0].mul_(self._momentum).add_(mean)
            mean = mean.add(made[0], alpha=self._momentum) if self._nesterov else made[0]
        made[-1].add_(mean, alpha=-lr)
        return made

    def gradient(self, before: Tensor, after: Tensor, lr: float) -> Tensor:
        """As of `ByJumps`, to the rounding of the table's type."""
        if self._momentum:
            return after[0] - self._momentum * before[0]
        return (before[-1] - after[-1]) / lr

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"way": "replay", "rates": np.array(self._steps, np.float64).reshape(-1, 2)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        _check_way(saved, "replay")
        self._steps = [(lr, divisor) for lr, divisor in np.asarray(saved["rates"]).tolist()]


Late = ByJumps | ByValue


def _floats(state: Tensor) -> Floats:
    return np.asarray(state.detach().to("cpu", torch.float64).numpy())


def _check_way(saved: Mapping[str, Any], own: str) -> None:
    if saved.get("way") != own:
        raise CheckpointError(
            f"a table of the checkpoint was kept by {saved.get('way')}, and this one by {own}: resume with the same "
            "replay= as in the run"
        )
