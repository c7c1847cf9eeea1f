"""The workload of SGD as a matrix that is never made, and what all workloads share."""

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder._filters import lfilter
from anyorder.checks import SetOnce
from anyorder.errors import ArgumentError
from anyorder.formats import inflate

__all__ = ["Workload", "iterates", "nonnegative", "pack", "unpack"]

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
