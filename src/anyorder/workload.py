"""The workload A: the lower-triangular matrix that the optimizer applies to the gradients.

The iterate after step t is theta_0 - (A G)[t] (with weight decay: what theta_t would be without gradients, minus
that), so the error that matters is the noise in the rows of A G.
"""

import base64
import copy
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import _check
from anyorder._closed import SetOnce, final
from anyorder._filters import lfilter
from anyorder._limits import inflate
from anyorder.errors import ArgumentError, PlanError

__all__ = [
    "Custom",
    "Workload",
    "cosine",
    "custom",
    "from_optimizer",
    "last_iterate",
    "linear_cooldown",
    "momentum",
    "prefix_sum",
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
        self.n = _check.integer("n", n, low=1)
        self.momentum = _check.real("momentum", momentum, low=0.0)
        if self.momentum >= 1:
            raise ArgumentError(f"momentum must be below 1, got {momentum!r}")
        self.learning_rates = _nonnegative("learning_rates", learning_rates, self.n)
        self.weight_decay = _check.real("weight_decay", weight_decay, low=0.0)
        if self.weight_decay * self.learning_rates.max() > 1:
            raise ArgumentError(
                f"learning rate times weight_decay must be at most 1 at every step, got "
                f"{self.learning_rates.max():g} * {self.weight_decay:g}; with weight decay, rates are absolute"
            )
        self.coupled = bool(coupled)
        self.nesterov = bool(nesterov)
        self.weights = _nonnegative("weights", weights, self.n)

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
        result = _recurrence(rows, self.learning_rates, betas, decay, self.nesterov)
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
        """Whether A is all ones on and below the diagonal."""
        plain = self.momentum == 0 and self.weight_decay == 0
        return plain and bool((self.learning_rates == 1).all() and (self.weights == 1).all())

    @property
    def is_toeplitz(self) -> bool:
        """Whether A[t, s] depends on t - s alone: constant rates, constant weights."""
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
        denominator = np.convolve([1.0, -1 + (0.0 if self.coupled else rate * decay)], [1.0, -beta])
        if self.coupled:
            denominator[1 : 1 + len(numerator)] += rate * decay * numerator
        return numerator, denominator

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `from_dict` makes an equal workload."""
        result: dict[str, Any] = {
            "kind": "momentum", "n": self.n, "momentum": self.momentum, "learning_rates": _pack(self.learning_rates),
        }  # fmt: skip
        if self.weight_decay:
            result |= {"weight_decay": self.weight_decay, "coupled": self.coupled}
        if self.nesterov:
            result["nesterov"] = True
        if (self.weights != 1).any():
            result["weights"] = _pack(self.weights)
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


@final
class Custom(Workload):
    """Any lower-triangular workload, given by its matrix; made by `custom`. O(n^2) memory."""

    def __init__(self, entries: ArrayLike, *, weights: ArrayLike | None = None) -> None:
        self.entries = _check.array("matrix", entries, ndim=2)
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
        """Whether A is all ones on and below the diagonal."""
        return bool((self.matrix() == np.tri(self.n)).all())

    @property
    def is_toeplitz(self) -> bool:
        """Whether every diagonal of A is constant."""
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
        result: dict[str, Any] = {"kind": "custom", "n": self.n, "entries": _pack(self.entries[columns])}
        if (self.weights != 1).any():
            result["weights"] = _pack(self.weights)
        return result

    def __repr__(self) -> str:
        return f"Custom(n={self.n})"


_KINDS = (Workload, Custom)


def check_kind(workload: object) -> None:
    """Raise PlanError unless it is one of the kinds of this module itself."""
    if type(workload) not in _KINDS:
        raise PlanError(
            f"workload must be a Workload or a Custom, got {type(workload).__name__}: give the matrix to custom(matrix)"
        )


def _nonnegative(name: str, value: ArrayLike | None, n: int) -> Floats:
    """(n,) numbers, none negative, not all zero; ones for None. Read-only."""
    result = _check.array(name, np.ones(n) if value is None else value, ndim=1)
    if result.shape != (n,) or (result < 0).any() or not result.any():
        raise ArgumentError(f"{name} must be n={n} numbers, none negative, not all 0, got {result}")
    return result


def _column(values: Floats, rows: Floats) -> Floats:
    """(n,) values shaped to multiply (n, ..) rows."""
    return values.reshape((-1,) + (1,) * (rows.ndim - 1))


def _recurrence(
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


def _pack(values: Floats) -> list[float] | str | None:
    """None for all ones, a list, or, if long, the little-endian bytes compressed in base64."""
    if (values == 1).all():
        return None
    if values.size <= _LONG:
        result: list[float] = values.tolist()
        return result
    return base64.b64encode(zlib.compress(values.astype("<f8").tobytes(), 6)).decode()


def _unpack(values: list[float] | str | None) -> Floats | None:
    if values is None:
        return None
    if isinstance(values, str):
        return np.frombuffer(inflate(base64.b64decode(values, validate=True)), dtype="<f8")
    return np.array(values, dtype=np.float64)


def prefix_sum(n: int) -> Workload:
    """The workload of plain SGD: A[t, s] = 1 for s <= t."""
    return Workload(n)


def momentum(n: int, momentum: float, learning_rates: ArrayLike | None = None) -> Workload:
    """The workload of SGD with heavy-ball momentum and a known schedule; see `Workload`."""
    return Workload(n, momentum=momentum, learning_rates=learning_rates)


def custom(matrix: ArrayLike) -> Custom:
    """Any lower-triangular (n, n) matrix as a workload."""
    return Custom(matrix)


def weighted(workload: Workload, weights: ArrayLike) -> Workload:
    """The same workload with its rows multiplied by (n,) weights: which iterates matter, and how much.

    The mean-square error becomes || diag(weights) A K ||_F^2 / n, times sens^2.
    """
    weights = _nonnegative("weights", workload.weights * np.asarray(weights, dtype=np.float64), workload.n)
    return from_dict({**workload.to_dict(), "weights": _pack(weights)})


def last_iterate(workload: Workload) -> Workload:
    """The same workload where only the last iterate counts: weights (0, .., 0, 1)."""
    weights = np.zeros(workload.n)
    weights[-1] = 1.0
    return weighted(workload, weights)


def from_dict(data: dict[str, Any]) -> Workload:
    """The workload that `Workload.to_dict` described."""
    kind = _check.choice("workload kind", data.get("kind", ""), {"custom", "momentum"})
    weights = _unpack(data.get("weights"))
    if kind == "custom":
        n = _check.integer("n", data["n"], low=1)
        entries = np.zeros((n, n))
        packed = _unpack(data["entries"])
        entries[np.tril_indices(n)] = 1.0 if packed is None else packed
        return Custom(entries, weights=weights)
    options = {key: value for key, value in data.items() if key not in ("kind", "learning_rates", "weights")}
    return Workload(learning_rates=_unpack(data["learning_rates"]), weights=weights, **options)


# Learning-rate schedules: (n,) rates whose largest is 1.


def step_decay(n: int, every: int, factor: float) -> Floats:
    """factor^floor(t / every): a drop after every `every` steps, as torch's `StepLR`."""
    every = _check.integer("every", every, low=1)
    drops = np.arange(_check.integer("n", n, low=1)) // every
    return np.asarray(_check.probability("factor", factor) ** drops)


def cosine(n: int, final: float = 0.0) -> Floats:
    """(1 + cos(pi t / n)) / 2, from 1 down to `final`, as torch's `CosineAnnealingLR` with T_max = n."""
    final = _check.real("final", final, low=0.0, high=1.0)
    result: Floats = final + (1 - final) * (1 + np.cos(np.pi * np.arange(_check.integer("n", n, low=1)) / n)) / 2
    return result


def linear_cooldown(n: int, start: float = 0.75, final: float = 0.05) -> Floats:
    """1 for the first floor(start n) steps, then in equal steps from 1 down to `final`."""
    n = _check.integer("n", n, low=1)
    flat = int(_check.real("start", start, low=0.0, high=1.0) * n)
    return np.concatenate([np.ones(flat), np.linspace(1.0, _check.real("final", final, low=0.0, high=1.0), n - flat)])


def warmup_stable_decay(n: int, warmup: float = 0.1, decay: float = 0.2, final: float = 0.0) -> Floats:
    """Linear rise over the first floor(warmup n) steps, then 1, then linear fall to `final` after step n.

    Args: n: steps. warmup, decay: fractions of n, warmup + decay <= 1. final: rate at the (unused) step n.
    """
    n = _check.integer("n", n, low=1)
    rise = int(_check.real("warmup", warmup, low=0.0, high=1.0) * n)
    fall = int(_check.real("decay", decay, low=0.0, high=1.0) * n)
    if rise + fall > n:
        raise ArgumentError(f"warmup + decay must be at most 1, got {warmup} + {decay}")
    final = _check.real("final", final, low=0.0, high=1.0)
    up = np.arange(1, rise + 1) / (rise + 1)
    down = 1 - (1 - final) * np.arange(fall) / max(fall, 1)
    return np.concatenate([up, np.ones(n - rise - fall), down])


def from_optimizer(optimizer: Any, scheduler: Any, n: int) -> Workload:
    """The workload of n steps of a `torch.optim.SGD` with a learning-rate scheduler (or None) that steps with it.

    The schedule is read by running copies of both on a dummy parameter; yours are not touched. Rates are divided by
    the largest one where there is no weight decay. A scheduler that also cycles the momentum, or dampening, gives a
    `Custom` workload, O(n^2).

    Raises: ArgumentError for optimizers that are not linear in the gradients (Adam: use `prefix_sum`, its updates are
        post-processing), schedulers that look at the loss, and parameter groups that differ in more than their rate.
    """
    import torch

    n = _check.integer("n", n, low=1)
    if type(optimizer) is not torch.optim.SGD:
        raise ArgumentError(
            f"optimizer must be torch.optim.SGD, which is linear in the gradients, got {type(optimizer).__name__}; "
            "for any other, plan with prefix_sum(n): what it does with private gradients is post-processing"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ArgumentError("scheduler must not depend on the loss, got ReduceLROnPlateau; use a schedule of the step")
    if scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer:
        raise ArgumentError("scheduler must belong to the optimizer, got one that was made for another")
    history = _simulate(optimizer, scheduler, n)
    rates, betas, decays = (np.array([[group[i] for group in step] for step in history]) for i in range(3))
    first = optimizer.param_groups[0]
    nesterov, dampening = bool(first["nesterov"]), float(first["dampening"])
    shapes = rates / np.maximum(rates.max(axis=0), np.finfo(float).tiny)
    same = np.ptp(betas, axis=1).max() == 0 and np.ptp(decays) == 0
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
    return Custom(_recurrence(np.eye(n), rate, beta, (decay, 0.0), nesterov, dampening))


def _simulate(optimizer: Any, scheduler: Any, n: int) -> list[list[tuple[float, float, float]]]:
    """(rate, momentum, weight decay) of every group at every step, from copies."""
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
        history.append([(float(g["lr"]), float(g["momentum"]), float(g["weight_decay"])) for g in groups])
        dummy.step()
        with warnings.catch_warnings():  # a scheduler looks for its mark on the optimizer's step, which the copy lacks
            warnings.simplefilter("ignore", UserWarning)
            advance()
    return history
