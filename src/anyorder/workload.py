"""The workload A: the lower-triangular matrix that the optimizer applies to the gradients.

The iterate after step t is theta_0 - (A G)[t] (with weight decay: what theta_t would be without gradients, minus
that), so the error that matters is the noise in the rows of A G.
"""

import base64
import copy
import math
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder._numerics import lfilter
from anyorder.checks import SetOnce, final
from anyorder.errors import ArgumentError, PlanError
from anyorder.formats import inflate

__all__ = [
    "Stage",
    "Workload",
    "cosine",
    "custom",
    "from_optimizer",
    "linear_cooldown",
    "momentum",
    "prefix_sum",
    "stages",
    "step_decay",
    "warmup_stable_decay",
    "weighted",
]

Floats = NDArray[np.float64]

_LONG = 4096  # entries above which a serialised array is packed instead of listed


class Workload(SetOnce):
    """SGD with momentum, weight decay and a learning-rate schedule, as a matrix.

        p_t: what has been taken away from theta by the gradients up to step t; A[t, s] = d p_t / d g_s

        coupled=True    h_t = g_t - weight_decay p_{t-1},  m_t = momentum m_{t-1} + h_t,  p_t = p_{t-1} + rate_t u_t
        coupled=False   m_t = momentum m_{t-1} + g_t,      p_t = (1 - rate_t weight_decay) p_{t-1} + rate_t u_t
        u_t = m_t, or h_t + momentum m_t with nesterov (coupled=False: g_t + momentum m_t)

    `coupled` is the weight decay of `torch.optim.SGD` (decay enters the momentum); the other one is decoupled, as in
    AdamW. Without momentum they are the same. Without weight decay A[t, s] = sum_{u=s..t} rate_u momentum^(u-s)
    [Denisov et al. 2022, section 5].

    Args:
        n: number of steps.
        momentum: heavy-ball coefficient in [0, 1).
        learning_rates: (n,) rates, not negative; None is a constant 1. Without weight decay only their shape matters:
            a common factor scales the error of every mechanism alike.
        weight_decay: coefficient, not negative; a step must not shrink the iterate below 0: rate_t weight_decay <= 1.
        coupled: how weight decay enters, see above.
        nesterov: Nesterov's momentum, as in `torch.optim.SGD`.
        weights: (n,) importance of each iterate, not negative; None is 1 everywhere. They multiply the rows of A, so
            that the error is || diag(weights) A K ||.
    """

    def __init__(
        self,
        n: int,
        *,
        momentum: float = 0.0,
        learning_rates: ArrayLike | None = None,
        weight_decay: float = 0.0,
        coupled: bool = True,
        nesterov: bool = False,
        weights: ArrayLike | None = None,
    ) -> None:
        self.n = checks.integer("n", n, low=1)
        self.momentum = checks.real("momentum", momentum, low=0.0)
        if self.momentum >= 1:
            raise ArgumentError(f"momentum must be below 1, got {momentum!r}")
        self.learning_rates = nonnegative("learning_rates", learning_rates, self.n)
        self.weight_decay = checks.real("weight_decay", weight_decay, low=0.0)
        if self.weight_decay * self.learning_rates.max() > 1:
            raise ArgumentError(
                f"learning rate times weight_decay must be at most 1 at every step, got "
                f"{self.learning_rates.max():g} * {self.weight_decay:g}; with weight decay, rates are absolute"
            )
        self.coupled = bool(coupled)
        self.nesterov = bool(nesterov)
        self.weights = nonnegative("weights", weights, self.n)

    def matrix(self) -> Floats:
        """diag(weights) A, (n, n) float64, lower triangular."""
        return self.apply(np.eye(self.n))

    def apply(self, rows: Floats) -> Floats:
        """diag(weights) A @ rows for (n, m) or (n,) rows, by the recurrence: O(n m)."""
        rows = np.asarray(rows, dtype=np.float64)
        if self.weight_decay and np.ptp(self.learning_rates) == 0:
            numerator, denominator = self._transfer()
            return lfilter(self.learning_rates[0] * numerator, denominator, rows, axis=0) * _column(self.weights, rows)
        betas = np.full(self.n, self.momentum)
        decay = (self.weight_decay, 0.0) if self.coupled else (0.0, self.weight_decay)
        result = iterates(rows, self.learning_rates, betas, decay, self.nesterov)
        return result * _column(self.weights, rows)

    def apply_transposed(self, rows: Floats) -> Floats:
        """(diag(weights) A)^T @ rows for (n, m) or (n,) rows, by the recurrence run backwards: O(n m)."""
        rows = np.asarray(rows, dtype=np.float64)
        rows = _column(self.weights, rows) * rows
        if not self.weight_decay:
            update = _column(self.learning_rates, rows) * np.cumsum(rows[::-1], axis=0)[::-1]
            lagged = self.momentum * update if self.nesterov else update
            velocity = lfilter([1.0], [1.0, -self.momentum], lagged[::-1], axis=0)[::-1]
            return np.asarray(velocity + update if self.nesterov else velocity)
        coupled, decoupled = (self.weight_decay, 0.0) if self.coupled else (0.0, self.weight_decay)
        result = np.empty_like(rows)
        velocity, position = np.zeros(rows.shape[1:]), np.zeros(rows.shape[1:])  # what p_t.. owe to m_t, p_t
        for t in reversed(range(self.n)):
            position = position + rows[t]
            update = self.learning_rates[t] * position
            velocity = velocity + (self.momentum * update if self.nesterov else update)
            result[t] = velocity + update if self.nesterov else velocity
            position = (1 - self.learning_rates[t] * decoupled) * position - coupled * result[t]
            velocity = self.momentum * velocity
        return result

    def recurrence(self, rates: ArrayLike | None = None) -> tuple[Floats, Floats]:
        """M (n, 2, 2) and N (n, 2) with w <- M_t w + N_t g_t of w = (velocity m, p), for A without its weights.

        Args:
            rates: (k,) learning rates in the place of the workload's own.
        """
        beta, decay = self.momentum, self.weight_decay
        rates = self.learning_rates if rates is None else np.asarray(rates, dtype=np.float64)
        coupled, decoupled = (decay, 0.0) if self.coupled else (0.0, decay)
        update = np.array([beta, -coupled, 1.0])  # of m_{t-1}, p_{t-1}, g_t: the new m_t
        M, N = np.empty((len(rates), 2, 2)), np.empty((len(rates), 2))
        M[:, 0], N[:, 0] = update[:2], update[2]
        if self.nesterov:
            update = beta * update + [0.0, -coupled, 1.0]
        M[:, 1], N[:, 1] = rates[:, None] * update[:2], rates * update[2]
        M[:, 1, 1] += 1 - rates * decoupled
        return M, N

    @property
    def is_prefix_sum(self) -> bool:
        """True if A is all ones on and below the diagonal."""
        plain = self.momentum == 0 and self.weight_decay == 0
        return plain and bool((self.learning_rates == 1).all() and (self.weights == 1).all())

    @property
    def is_toeplitz(self) -> bool:
        """True if A[t, s] depends on t - s alone: constant rates, constant weights."""
        return bool(np.ptp(self.learning_rates) == 0 and np.ptp(self.weights) == 0)

    def toeplitz_coefficients(self) -> Floats:
        """First column of a Toeplitz A, (n,); momentum gives the partial sums of its powers. O(n).

        The transfer function of the recurrence, with x a delay of one step and N = 1, or 1 + momentum - momentum x:
        rate N / ((1 - (1 - rate decoupled) x) (1 - momentum x) + rate coupled x N).

        Raises: ArgumentError where A is not Toeplitz.
        """
        if not self.is_toeplitz:
            raise ArgumentError(f"toeplitz_coefficients needs constant learning rates and weights, got {self!r}")
        numerator, denominator = self._transfer()
        impulse = np.zeros(self.n)
        impulse[0] = self.learning_rates[0] * self.weights[0]
        return np.asarray(lfilter(numerator, denominator, impulse))

    def _transfer(self) -> tuple[Floats, Floats]:
        """Numerator, but for the rate, and denominator of the transfer function where rates are constant."""
        rate, beta, decay = self.learning_rates[0], self.momentum, self.weight_decay
        numerator = np.array([1 + beta, -beta]) if self.nesterov else np.ones(1)
        kept = 1 - (0.0 if self.coupled else rate * decay)
        denominator = np.array([1.0, -kept - beta, kept * beta])
        if self.coupled:
            denominator[1 : 1 + len(numerator)] += rate * decay * numerator
        return numerator, denominator

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `from_dict` makes an equal workload."""
        result: dict[str, Any] = {
            "kind": "momentum", "n": self.n, "momentum": self.momentum, "learning_rates": pack(self.learning_rates),
        }  # fmt: skip
        if self.weight_decay:
            result |= {"weight_decay": self.weight_decay, "coupled": self.coupled}
        if self.nesterov:
            result["nesterov"] = True
        if (self.weights != 1).any():
            result["weights"] = pack(self.weights)
        return result

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((type(self), self.n))

    def __repr__(self) -> str:
        parts = [f"n={self.n}", f"momentum={self.momentum:g}"]
        parts += ["learning_rates=..."] if (self.learning_rates != 1).any() else []
        parts += [f"weight_decay={self.weight_decay:g}, coupled={self.coupled}"] if self.weight_decay else []
        parts += ["nesterov=True"] if self.nesterov else []
        parts += ["weights=..."] if (self.weights != 1).any() else []
        return f"Workload({', '.join(parts)})"


def nonnegative(name: str, value: ArrayLike | None, n: int) -> Floats:
    """(n,) numbers, none negative, not all zero; ones for None. Read-only."""
    result = checks.array(name, np.ones(n) if value is None else value, ndim=1)
    if result.shape != (n,) or (result < 0).any() or not result.any():
        raise ArgumentError(f"{name} must be n={n} numbers, none negative, not all 0, got {result}")
    return result


def _column(values: Floats, rows: Floats) -> Floats:
    """(n,) values shaped to multiply (n, ..) rows."""
    return values.reshape((-1,) + (1,) * (rows.ndim - 1))


def iterates(
    rows: Floats, rates: Floats, betas: Floats, decay: tuple[float, float], nesterov: bool, dampening: float = 0.0
) -> Floats:
    """p_t of every step, see `Workload`. `decay` = (coupled, decoupled); torch does not dampen the first step."""
    if not any(decay) and not dampening and np.ptp(betas) == 0:  # two running sums
        velocity = lfilter([1.0], [1.0, -betas[0]], rows, axis=0) if betas[0] else rows
        update = rows + betas[0] * velocity if nesterov else velocity
        return np.asarray(np.cumsum(_column(rates, rows) * update, axis=0))
    result = np.empty_like(rows)
    velocity, position = np.zeros(rows.shape[1:]), np.zeros(rows.shape[1:])
    for t in range(len(rows)):
        h = rows[t] - decay[0] * position if decay[0] else rows[t]
        velocity = betas[t] * velocity + (h if t == 0 else (1 - dampening) * h)
        update = h + betas[t] * velocity if nesterov else velocity
        position = (1 - rates[t] * decay[1]) * position + rates[t] * update
        result[t] = position
    return result


def pack(values: Floats) -> list[float] | str | None:
    """None for all ones, a list, or, if long, the little-endian bytes compressed in base64."""
    if (values == 1).all():
        return None
    if values.size <= _LONG:
        result: list[float] = values.tolist()
        return result
    return base64.b64encode(zlib.compress(values.astype("<f8").tobytes(), 6)).decode()


def unpack(values: list[float] | str | None) -> Floats | None:
    if values is None:
        return None
    if isinstance(values, str):
        return np.frombuffer(inflate(base64.b64decode(values, validate=True)), dtype="<f8")
    return np.array(values, dtype=np.float64)


# ----------------------------------------------------------------------------------------------------
# A course of stages: optimizer settings and workload of one object, so that what is planned is what is run.


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


# ----------------------------------------------------------------------------------------------------
# A workload that is given by its matrix.


@final
class GivenWorkload(Workload):
    """Any lower-triangular workload, given by its matrix; made by `custom`. O(n^2) memory."""

    def __init__(self, entries: ArrayLike, *, weights: ArrayLike | None = None) -> None:
        self.entries = checks.array("matrix", entries, ndim=2)
        if self.entries.shape[0] != self.entries.shape[1] or np.triu(self.entries, 1).any():
            raise ArgumentError(f"matrix must be square and lower triangular, got shape {self.entries.shape}")
        if not self.entries.any():
            raise ArgumentError("matrix must have an entry that is not 0, got only zeros")
        super().__init__(len(self.entries), weights=weights)

    def apply(self, rows: Floats) -> Floats:
        """diag(weights) A @ rows: O(n^2 m)."""
        rows = np.asarray(rows, dtype=np.float64)
        result: Floats = (self.weights[:, None] * self.entries) @ rows
        return result

    def apply_transposed(self, rows: Floats) -> Floats:
        """(diag(weights) A)^T @ rows: O(n^2 m)."""
        result: Floats = (self.weights[:, None] * self.entries).T @ np.asarray(rows, dtype=np.float64)
        return result

    @property
    def is_prefix_sum(self) -> bool:
        """True if A is all ones on and below the diagonal."""
        return bool((self.matrix() == np.tri(self.n)).all())

    @property
    def is_toeplitz(self) -> bool:
        """True if every diagonal of A is constant."""
        A = self.matrix()
        return bool((A[1:, 1:] == A[:-1, :-1]).all())

    def toeplitz_coefficients(self) -> Floats:
        """First column of a Toeplitz A, (n,).

        Raises: ArgumentError where A is not Toeplitz.
        """
        if not self.is_toeplitz:
            raise ArgumentError(f"toeplitz_coefficients needs a matrix of constant diagonals, got {self!r}")
        return np.array(self.matrix()[:, 0])

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `from_dict` makes an equal workload."""
        columns = np.tril_indices(self.n)
        result: dict[str, Any] = {"kind": "custom", "n": self.n, "entries": pack(self.entries[columns])}
        if (self.weights != 1).any():
            result["weights"] = pack(self.weights)
        return result

    def __repr__(self) -> str:
        return f"Custom(n={self.n})"


# ----------------------------------------------------------------------------------------------------
# Learning-rate schedules: (n,) rates whose largest is 1.


def step_decay(n: int, every: int, factor: float) -> Floats:
    """factor^floor(t / every): a drop after every `every` steps, as torch's `StepLR`."""
    every = checks.integer("every", every, low=1)
    factor = checks.probability("factor", factor)
    return np.array([factor ** (t // every) for t in range(checks.integer("n", n, low=1))])


def cosine(n: int, final: float = 0.0) -> Floats:
    """(1 + cos(pi t / n)) / 2, from 1 down to `final`, as torch's `CosineAnnealingLR` with T_max = n."""
    final = checks.real("final", final, low=0.0, high=1.0)
    return final + (1 - final) * (1 + _cosines(np.arange(checks.integer("n", n, low=1)) / n)) / 2


def _cosines(turns: Floats) -> Floats:
    """cos(pi x) for x in [0, 1], by its series: the cosine of a library of C has other last digits on some machines."""
    squares = np.square(math.pi * np.minimum(turns, 1 - turns))
    total = np.zeros_like(turns)
    for i in reversed(range(12)):
        total = total * squares + (-1) ** i / math.factorial(2 * i)
    return np.where(turns > 0.5, -total, total)


def linear_cooldown(n: int, start: float = 0.75, final: float = 0.05) -> Floats:
    """1 for the first floor(start n) steps, then in equal steps from 1 down to `final`."""
    n = checks.integer("n", n, low=1)
    flat = int(checks.real("start", start, low=0.0, high=1.0) * n)
    return np.concatenate([np.ones(flat), np.linspace(1.0, checks.real("final", final, low=0.0, high=1.0), n - flat)])


def warmup_stable_decay(n: int, warmup: float = 0.1, decay: float = 0.2, final: float = 0.0) -> Floats:
    """Linear rise over the first floor(warmup n) steps, then 1, then linear fall to `final` after step n.

    Args: n: steps. warmup, decay: fractions of n, warmup + decay <= 1. final: rate at the (unused) step n.
    """
    n = checks.integer("n", n, low=1)
    rise = int(checks.real("warmup", warmup, low=0.0, high=1.0) * n)
    fall = int(checks.real("decay", decay, low=0.0, high=1.0) * n)
    if rise + fall > n:
        raise ArgumentError(f"warmup + decay must be at most 1, got {warmup} + {decay}")
    final = checks.real("final", final, low=0.0, high=1.0)
    up = np.arange(1, rise + 1) / (rise + 1)
    down = 1 - (1 - final) * np.arange(fall) / max(fall, 1)
    return np.concatenate([up, np.ones(n - rise - fall), down])


# ----------------------------------------------------------------------------------------------------
# The workload of a torch optimizer and its scheduler. Torch is imported when it is asked for.


def from_optimizer(optimizer: Any, scheduler: Any, n: int) -> Workload:
    """The workload of n steps of a `torch.optim.SGD`, `Adam` or `AdamW`, with a scheduler (or None) that steps with it.

    The schedule is read by running copies of both on a dummy parameter; yours are not touched. Rates are divided by
    the largest one where there is no weight decay. A scheduler that also cycles the momentum, or dampening, gives a
    `Custom` workload, O(n^2).

    Adam is not linear in the gradients. Its workload is that of second moments that stand still, which noise makes much
    the same at all steps, without weight decay:

        p_t = p_{t-1} + rate_t m_t / (1 - beta^(t+1)),    m_t = beta m_{t-1} + g_t

    Raises: ArgumentError for other optimizers (plan with `prefix_sum`: what they do with private gradients is
        post-processing), schedulers that look at the loss, parameter groups that differ in more than their rate, and a
        beta of Adam that changes.
    """
    import torch

    n = checks.integer("n", n, low=1)
    adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if not adam and type(optimizer) is not torch.optim.SGD:
        raise ArgumentError(
            f"optimizer must be torch.optim.SGD, Adam or AdamW, got {type(optimizer).__name__}; for any other, leave "
            "optimizer= out when you plan, or give ao.SGD(momentum=..) where it averages gradients: what it does with "
            "private gradients is post-processing"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ArgumentError("scheduler must not depend on the loss, got ReduceLROnPlateau; use a schedule of the step")
    if scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer:
        raise ArgumentError("scheduler must belong to the optimizer, got one that was made for another")
    history = _simulate(optimizer, scheduler, n)
    rates, betas, decays = (np.array([[group[i] for group in step] for step in history]) for i in range(3))
    shapes = rates / np.maximum(rates.max(axis=0), np.finfo(float).tiny)
    same = np.ptp(betas, axis=1).max() == 0 and np.ptp(decays) == 0
    if adam:
        return _of_adam(n, shapes, betas)
    first = optimizer.param_groups[0]
    nesterov, dampening = bool(first["nesterov"]), float(first["dampening"])
    same = same and np.allclose(shapes, shapes[:, :1]) and (not decays.any() or np.ptp(rates, axis=1).max() == 0)
    if not same or any((g["nesterov"], g["dampening"]) != (nesterov, dampening) for g in optimizer.param_groups):
        raise ArgumentError(
            "parameter groups must have the same momentum and weight decay, and rates that differ by a constant factor "
            "(with weight decay: equal rates); plan the groups apart, or with custom(matrix)"
        )
    decay, beta = float(decays[0, 0]), betas[:, 0]
    rate = rates[:, 0] if decay else shapes[:, 0]
    if np.ptp(beta) == 0 and dampening == 0:
        return Workload(n, momentum=beta[0], learning_rates=rate, weight_decay=decay, nesterov=nesterov)
    return GivenWorkload(iterates(np.eye(n), rate, beta, (decay, 0.0), nesterov, dampening))


def _of_adam(n: int, shapes: NDArray[np.float64], betas: NDArray[np.float64]) -> Workload:
    """From rates (n, groups) as shares of the largest one, and the first betas (n, groups)."""
    if np.ptp(betas) > 0 or not np.allclose(shapes, shapes[:, :1]):
        raise ArgumentError(
            "parameter groups of Adam must have the same first beta in all steps, and rates that differ by a constant "
            "factor; with a scheduler that cycles beta, such as OneCycleLR, give cycle_momentum=False"
        )
    beta = float(betas[0, 0])
    rates = shapes[:, 0] / (1 - beta ** np.arange(1, n + 1))
    return Workload(n, momentum=beta, learning_rates=rates / rates.max())


def _simulate(optimizer: Any, scheduler: Any, n: int) -> list[list[tuple[float, float, float]]]:
    """(rate, momentum or first beta, weight decay) of every group at every step, from copies."""
    import torch

    groups = []
    for group in optimizer.param_groups:
        options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [torch.nn.Parameter(torch.zeros(()))]})
    dummy = torch.optim.SGD(groups, lr=1.0)
    memo: dict[int, Any] = {id(optimizer): dummy}
    advance: Callable[[], None] = (lambda: None) if scheduler is None else copy.deepcopy(scheduler, memo).step
    history = []
    for _ in range(n):
        groups = dummy.param_groups
        history.append([(float(g["lr"]), _beta(g), float(g["weight_decay"])) for g in groups])
        with warnings.catch_warnings():  # a scheduler looks for its mark on the optimizer's step, which the copy lacks
            warnings.simplefilter("ignore", UserWarning)
            advance()
    return history


def _beta(group: dict[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group["momentum"])


# ----------------------------------------------------------------------------------------------------
# Workloads by their names.


_KINDS = (Workload, GivenWorkload, Course)


def check_kind(workload: object) -> None:
    """Raise PlanError unless it is one of the kinds of this module itself."""
    if type(workload) not in _KINDS:
        raise PlanError(
            f"workload must be a Workload, a Custom or stages, got {type(workload).__name__}: give the matrix to "
            "custom(matrix)"
        )


def prefix_sum(n: int) -> Workload:
    """The workload of plain SGD: A[t, s] = 1 for s <= t."""
    return Workload(n)


def momentum(n: int, momentum: float, learning_rates: ArrayLike | None = None) -> Workload:
    """The workload of SGD with heavy-ball momentum and a known schedule; see `Workload`."""
    return Workload(n, momentum=momentum, learning_rates=learning_rates)


def custom(matrix: ArrayLike) -> GivenWorkload:
    """Any lower-triangular (n, n) matrix as a workload."""
    return GivenWorkload(matrix)


def stages(of: Iterable[Stage]) -> Course:
    """The workload of stages that follow each other, each with its momentum, rate, schedule and parameters.

        course = ao.workload.stages([
            ao.workload.Stage(steps=10, rate=0.1, only_last=True),                # a mean, which the rest reads
            ao.workload.Stage(steps=90, momentum=0.9, own_parameters=True),
        ])
        plan = ao.plan(optimizer=course, ...)
        optimizer.param_groups[0].update(course.settings(step))                   # before each step

    Raises: ArgumentError for what is no stage, and for none.
    """
    return Course(tuple(of))


def weighted(workload: Workload, weights: ArrayLike) -> Workload:
    """The same workload with its rows multiplied by (n,) weights: which of the weights during training matter, and how
    much.

    Weights (0, .., 0, 1): the last alone, as where nobody sees those before it.

    The mean-square error becomes || diag(weights) A K ||_F^2 / n, times sens^2.
    """
    own = workload.given_weights if type(workload) is Course else workload.weights
    weights = nonnegative("weights", own * np.asarray(weights, dtype=np.float64), workload.n)
    if type(workload) is Course:
        return Course(workload.stages, weights=weights)
    return from_dict({**workload.to_dict(), "weights": pack(weights)})


def from_dict(data: dict[str, Any]) -> Workload:
    """The workload that `Workload.to_dict` described."""
    kind = checks.choice("workload kind", data.get("kind", ""), {"custom", "momentum", "stages"})
    weights = unpack(data.get("weights"))
    if kind == "stages":
        found = [Stage.from_dict(one) for one in data["stages"]]
        if sum(one.steps for one in found) != data["n"]:  # before any array is made: a reader bounds n alone
            raise ArgumentError(f"n must be the number of steps of all stages, got {data['n']!r}")
        return Course(found, weights=weights)
    if kind == "custom":
        n = checks.integer("n", data["n"], low=1)
        entries = np.zeros((n, n))
        packed = unpack(data["entries"])
        entries[np.tril_indices(n)] = 1.0 if packed is None else packed
        return GivenWorkload(entries, weights=weights)
    options = {key: value for key, value in data.items() if key not in ("kind", "learning_rates", "weights")}
    return Workload(learning_rates=unpack(data["learning_rates"]), weights=weights, **options)
