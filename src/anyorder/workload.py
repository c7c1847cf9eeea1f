"""The workload A: the lower-triangular matrix that the optimizer applies to the gradients.

The iterate after step t is theta_0 - (A G)[t], so the error that matters is the noise in the rows of A G.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import _check
from anyorder.errors import ArgumentError

__all__ = ["Workload", "from_dict", "momentum", "prefix_sum"]

Floats = NDArray[np.float64]


class Workload:
    """SGD with momentum and a learning-rate schedule, as a matrix.

        m_t = momentum * m_{t-1} + g_t,   theta_{t+1} = theta_t - rate_t m_t
        A[t, s] = sum_{u=s..t} rate_u momentum^(u-s)                      [Denisov et al. 2022, section 5]

    Args:
        n: number of steps.
        momentum: heavy-ball coefficient in [0, 1).
        learning_rates: (n,) relative rates, not negative; None is a constant 1. Only their shape matters: a
            common factor scales the error of every mechanism alike.
    """

    def __init__(self, n: int, *, momentum: float = 0.0, learning_rates: ArrayLike | None = None) -> None:
        self.n = _check.integer("n", n, low=1)
        self.momentum = _check.real("momentum", momentum, low=0.0)
        if self.momentum >= 1:
            raise ArgumentError(f"momentum must be below 1, got {momentum!r}")
        rates = np.ones(self.n) if learning_rates is None else _check.array("learning_rates", learning_rates, ndim=1)
        if rates.shape != (self.n,) or (rates < 0).any() or not rates.any():
            raise ArgumentError(f"learning_rates must be n={self.n} numbers, none negative, not all 0, got {rates}")
        self.learning_rates: Floats = rates

    def matrix(self) -> Floats:
        """A, (n, n) float64, lower triangular."""
        return self.apply(np.eye(self.n))

    def apply(self, rows: Floats) -> Floats:
        """A @ rows for (n, m) rows, by the recurrence: O(n m)."""
        result = np.empty_like(rows)
        velocity = np.zeros(rows.shape[1:])
        position = np.zeros(rows.shape[1:])
        for t in range(self.n):
            velocity = self.momentum * velocity + rows[t]
            position = position + self.learning_rates[t] * velocity
            result[t] = position
        return result

    @property
    def is_prefix_sum(self) -> bool:
        """Whether A is all ones on and below the diagonal."""
        return self.momentum == 0 and bool((self.learning_rates == 1).all())

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `from_dict` makes an equal workload."""
        constant = bool((self.learning_rates == 1).all())
        rates: Sequence[float] | None = None if constant else self.learning_rates.tolist()
        return {"kind": "momentum", "n": self.n, "momentum": self.momentum, "learning_rates": rates}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workload) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.n, self.momentum))

    def __repr__(self) -> str:
        schedule = "" if (self.learning_rates == 1).all() else ", learning_rates=..."
        return f"Workload(n={self.n}, momentum={self.momentum:g}{schedule})"


def prefix_sum(n: int) -> Workload:
    """The workload of plain SGD: A[t, s] = 1 for s <= t."""
    return Workload(n)


def momentum(n: int, momentum: float, learning_rates: ArrayLike | None = None) -> Workload:
    """The workload of SGD with heavy-ball momentum and a known schedule; see `Workload`."""
    return Workload(n, momentum=momentum, learning_rates=learning_rates)


def from_dict(data: dict[str, Any]) -> Workload:
    """The workload that `Workload.to_dict` described."""
    _check.choice("workload kind", data.get("kind", ""), {"momentum"})
    return Workload(data["n"], momentum=data["momentum"], learning_rates=data["learning_rates"])
