"""A course of stages: optimizer settings and workload of one object, so that what is planned is what is run."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.workload.base import Workload, iterates, nonnegative, pack, unpack

__all__ = ["Course", "Stage"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """So many steps of SGD with one momentum, as `torch.optim.SGD` takes them.

    Args:
        steps: of the stage.
        momentum: heavy-ball coefficient in [0, 1).
        rate: learning rate, in the units of the optimizer; positive.
        schedule: (steps,) factors of the rate, not negative, not all 0; None for a constant rate.
        own_parameters: whether the stage trains parameters of its own, which no earlier stage moved. They start here,
            and the others stand still from here on. Else it goes on with the parameters of the stage before.
        only_last: whether only the last weights of the stage are used, as those of a mean that later stages read.
    """

    steps: int
    momentum: float = 0.0
    rate: float = 1.0
    schedule: tuple[float, ...] | None = None
    own_parameters: bool = False
    only_last: bool = False

    def __post_init__(self) -> None:
        checks.integer("steps", self.steps, low=1)
        if checks.real("momentum", self.momentum, low=0.0) >= 1:
            raise ArgumentError(f"momentum must be below 1, got {self.momentum!r}")
        checks.positive("rate", self.rate)
        if self.schedule is not None:
            factors = checks.array("schedule", self.schedule, ndim=1)
            if len(factors) != self.steps or (factors < 0).any() or not factors.any():
                raise ArgumentError(f"schedule must be {self.steps} factors, none negative, not all 0, got {factors}")
            object.__setattr__(self, "schedule", tuple(factors.tolist()))

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `from_dict` makes an equal stage."""
        factors = None if self.schedule is None else pack(np.array(self.schedule))
        return {
            "steps": self.steps, "momentum": self.momentum, "rate": self.rate, "schedule": factors,
            "own_parameters": self.own_parameters, "only_last": self.only_last,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Stage":
        """The stage that `to_dict` described."""
        factors = unpack(data["schedule"])
        return cls(**{**data, "schedule": None if factors is None else tuple(factors.tolist())})


@final
class Course(Workload):
    """The workload of stages, one after the other; made by `stages`.

    A[t, s] = d p_t / d g_s, where p_t are the parameters that step t moves. A stage with parameters of its own starts
    from nothing: A has a block for each run of stages that share parameters, and zeros elsewhere. Rates are divided
    by the largest of their block, so that its error is that of learning rate 1. Without momentum torch leaves the
    velocity of an earlier stage as it is, and a later stage with momentum goes on from there: so does A.

    Weights of different parameters cannot be compared. The rows of a block are multiplied by one number, such that
    a block of k steps has k^2 of the squared error of independent noise: then noise that is equal at every step is the
    best of all that differs from block to block, and no block pays for another. The numbers are divided by that of the
    longest block, whose weights the error of the plan counts as they are.

    Attributes:
        stages: in the order of the run.
        blocks: (first step, end) of each run of stages that share parameters.
        block_weights: the number of each block.
        given_weights: (n,) importance of each iterate, see `weighted`. `weights` has these times the numbers of the
            blocks, and zeros where only the last weights of a stage are used.
    """

    def __init__(self, stages: Sequence[Stage], *, weights: Any = None) -> None:
        self.stages = tuple(stages)
        if not self.stages or any(type(one) is not Stage for one in self.stages):
            raise ArgumentError(f"stages must be one or more of anyorder.workload.Stage, got {stages!r}")
        self._ends = tuple(accumulate(one.steps for one in self.stages))
        n = self._ends[-1]
        fresh = [0, *(end for end, one in zip(self._ends, self.stages[1:], strict=False) if one.own_parameters)]
        self.blocks = tuple(zip(fresh, [*fresh[1:], n], strict=True))
        self.betas = np.repeat([one.momentum for one in self.stages], [one.steps for one in self.stages])
        rates = np.concatenate([one.rate * np.array(one.schedule or np.ones(one.steps)) for one in self.stages])
        used = np.concatenate([_rows_used(one) for one in self.stages])
        for start, end in self.blocks:
            rates[start:end] /= rates[start:end].max()
        self.given_weights = nonnegative("weights", weights, n)
        self.block_weights = _balanced(self.blocks, self.betas, rates, used)
        rows = self.given_weights * used
        for (start, end), weight in zip(self.blocks, self.block_weights, strict=True):
            rows[start:end] *= weight
        longest = max(self.stages, key=lambda one: one.steps)
        super().__init__(n, momentum=longest.momentum, learning_rates=rates, weights=rows)

    # -- what the optimizer takes ------------------------------------------------------------------------------------

    def stage_of(self, step: int) -> int:
        """The place of the stage that a step belongs to."""
        return bisect_right(self._ends, checks.integer("step", step, low=0, high=self.n - 1))

    def settings(self, step: int) -> dict[str, float]:
        """The learning rate and momentum of a step, as a parameter group of `torch.optim.SGD` has them."""
        i = self.stage_of(step)
        stage = self.stages[i]
        factor = 1.0 if stage.schedule is None else stage.schedule[step - self._ends[i] + stage.steps]
        return {"lr": stage.rate * factor, "momentum": stage.momentum}

    # -- A -----------------------------------------------------------------------------------------------------------

    def apply(self, rows: Floats) -> Floats:
        """diag(weights) A @ rows for (n, m) or (n,) rows, by the recurrence: O(n m)."""
        rows = np.asarray(rows, dtype=np.float64)
        result = np.empty_like(rows)
        for start, end in self.blocks:
            block = slice(start, end)
            if np.ptp(self.betas[block]) == 0:
                result[block] = iterates(rows[block], self.learning_rates[block], self.betas[block], (0.0, 0.0), False)
                continue
            velocity, position = np.zeros(rows.shape[1:]), np.zeros(rows.shape[1:])
            for t in range(start, end):
                beta = self.betas[t]
                velocity = beta * velocity + rows[t] if beta else velocity
                position = position + self.learning_rates[t] * (velocity if beta else rows[t])
                result[t] = position
        return result * self.weights.reshape((-1,) + (1,) * (rows.ndim - 1))

    def apply_transposed(self, rows: Floats) -> Floats:
        """(diag(weights) A)^T @ rows for (n, m) or (n,) rows, by the recurrence run backwards: O(n m)."""
        rows = self.weights.reshape((-1,) + (1,) * (np.ndim(rows) - 1)) * np.asarray(rows, dtype=np.float64)
        result = np.empty_like(rows)
        for start, end in self.blocks:
            velocity, position = np.zeros(rows.shape[1:]), np.zeros(rows.shape[1:])
            for t in reversed(range(start, end)):
                position = position + rows[t]
                beta = self.betas[t]
                if beta:
                    velocity = velocity + self.learning_rates[t] * position
                result[t] = velocity if beta else self.learning_rates[t] * position
                velocity = beta * velocity if beta else velocity
        return result

    def recurrence(self, rates: Any = None) -> tuple[Floats, Floats]:
        """M and N of `Workload.recurrence`, of A without its weights; M is zero where a block starts.

        Args:
            rates: (k,) learning rates in the place of the course's own, with the momentum of the longest stage.
        """
        if rates is not None:
            return super().recurrence(rates)
        moves = self.betas != 0
        M, N = np.zeros((self.n, 2, 2)), np.ones((self.n, 2))
        M[:, 0, 0] = np.where(moves, self.betas, 1.0)
        M[:, 1, 0] = np.where(moves, self.learning_rates * self.betas, 0.0)
        M[:, 1, 1] = 1.0
        N[:, 0] = moves
        N[:, 1] = self.learning_rates
        M[[start for start, _ in self.blocks]] = 0.0
        return M, N

    @property
    def is_prefix_sum(self) -> bool:
        """Never: `Workload(n)` is the one."""
        return False

    @property
    def is_toeplitz(self) -> bool:
        """Never taken for it."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `from_dict` makes an equal workload."""
        result: dict[str, Any] = {"kind": "stages", "n": self.n, "stages": [one.to_dict() for one in self.stages]}
        if (self.given_weights != 1).any():
            result["weights"] = pack(self.given_weights)
        return result

    def __repr__(self) -> str:
        told = ", ".join(f"{one.steps} with momentum {one.momentum:g}" for one in self.stages)
        return f"Course({told})"


def _rows_used(stage: Stage) -> Floats:
    """(steps,) 1 where the weights after a step are used, else 0."""
    used = np.ones(stage.steps)
    if stage.only_last:
        used[:-1] = 0.0
    return used


def _balanced(blocks: Sequence[tuple[int, int]], betas: Floats, rates: Floats, used: Floats) -> tuple[float, ...]:
    """K / || A of the block ||_F for each block of k steps, over that of the longest. O(n).

    || A ||_F^2 is the sum of Var p_t for noise of variance 1 at every step: three moments of (velocity, p).
    """
    found = []
    for start, end in blocks:
        of_velocity = both = of_position = energy = 0.0
        for beta, rate, is_used in zip(*(part[start:end].tolist() for part in (betas, rates, used)), strict=True):
            if beta:
                of_velocity = beta * beta * of_velocity + 1.0
                of_position += 2 * rate * beta * both + rate * rate * of_velocity
                both = beta * both + rate * of_velocity
            else:
                of_position += rate * rate
            energy += is_used * of_position
        found.append((end - start) / max(energy, np.finfo(float).tiny) ** 0.5)
    longest = max(range(len(blocks)), key=lambda i: blocks[i][1] - blocks[i][0])
    return tuple(weight / found[longest] for weight in found)
