"""A strategy with every column divided by its own scale: noise that grows or shrinks over time."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.strategy.base import Recurrence, Row, State, Strategy, Vector
from anyorder.strategy.toeplitz import Toeplitz

__all__ = ["Rescaled"]

Floats = NDArray[np.float64]


@final
class Rescaled(Strategy):
    """C diag(scales)^-1: step t's noise is scales[t] times that of the given strategy, X = D^-1 (C^T C) D^-1.

    Args:
        strategy: C.
        scales: (n,) above 0.
    """

    def __init__(self, strategy: Strategy, scales: ArrayLike) -> None:
        self.strategy = strategy
        self.scales: Floats = checks.array("scales", scales, ndim=1)
        if self.scales.shape != (strategy.n,) or (self.scales <= 0).any():
            raise ArgumentError(f"scales must be n={strategy.n} numbers above 0, got {self.scales}")

    @property
    def n(self) -> int:
        """Number of steps."""
        return self.strategy.n

    @property
    def num_rows(self) -> int:
        """Number of rows of C and of Z."""
        return self.strategy.num_rows

    @property
    def restart_period(self) -> int | None:
        """That of the strategy: scales keep blocks apart."""
        return self.strategy.restart_period

    def matrix(self) -> Floats:
        """C diag(scales)^-1, (num_rows, n)."""
        return np.asarray(self.strategy.matrix() / self.scales)

    def noising_matrix(self) -> Floats:
        """diag(scales) K, (n, num_rows)."""
        return np.asarray(self.scales[:, None] * self.strategy.noising_matrix())

    def columns(self, steps: ArrayLike) -> Floats:
        """C[:, steps], each column over its scale."""
        return np.asarray(self.strategy.columns(steps) / self.scales[np.asarray(steps)])

    def column_norms_squared(self) -> Floats:
        """(n,) squared norms of the columns."""
        return np.asarray(self.strategy.column_norms_squared() / np.square(self.scales))

    def prefix_variance(self) -> Floats:
        """(n,) variance of each prefix sum's noise: O(n^2) time, and O(n) memory where C is Toeplitz."""
        if not isinstance(self.strategy, Toeplitz):
            return super().prefix_variance()
        g = self.strategy.noising_coefficients()[::-1]
        sums, variance = np.zeros(self.n), np.empty(self.n)
        for t in range(self.n):
            sums[: t + 1] += self.scales[t] * g[self.n - 1 - t :]
            variance[t] = sums @ sums
        return variance

    def recurrences(self, steps: NDArray[np.int64]) -> Recurrence:
        """The strategy's, with what comes out scaled."""
        F, G, h, g = self.strategy.recurrences(steps)
        scales = self.scales[steps]
        return Recurrence(F, G, h * scales[:, None], g * scales)

    def init(self, size: int) -> State:
        """The state of the strategy."""
        return self.strategy.init(size)

    def step(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        """The strategy's noise times scales[t]."""
        noise, state = self.strategy.step(t, state, row)
        return noise * np.float32(self.scales[t]), state

    @property
    def state_rows(self) -> int:
        """What the strategy keeps."""
        return self.strategy.state_rows

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "rescaled", "strategy": {..}, "scales": [..]}."""
        return {"kind": "rescaled", "strategy": self.strategy.to_dict(), "scales": self.scales.tolist()}

    def __repr__(self) -> str:
        return f"Rescaled({self.strategy!r})"
