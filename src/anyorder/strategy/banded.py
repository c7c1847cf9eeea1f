"""C with p bands, each column its own: noise by back substitution on the last p - 1 outputs."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final, frozen
from anyorder.errors import ArgumentError
from anyorder.strategy._packing import pack, unpack
from anyorder.strategy.base import Recurrence, Row, State, Strategy, Vector
from anyorder.strategy.dense import check_lower_triangular
from anyorder.strategy.toeplitz import delays

__all__ = ["Banded"]

Floats = NDArray[np.float64]


@final
class Banded(Strategy):
    """C lower triangular with C[i, j] = 0 for i - j >= p [Choquette-Choo et al. 2023].

        y_t = (z_t - C[t, t-1] y_{t-1} - .. - C[t, t-p+1] y_{t-p+1}) / C[t, t]              O(p d) a step

    With unit columns and at least p steps from one participation of a unit to the next, its columns are
    orthogonal and the sensitivity is sqrt(k) exactly.

    Args:
        bands: (p, n) with p < n, bands[l, j] = C[j + l, j]; entries with j + l >= n must be 0. Or C itself, (n, n),
            whose bands below the last non-zero one are dropped.
    """

    def __init__(self, bands: ArrayLike) -> None:
        values = checks.array("bands", bands, ndim=2)
        p, n = values.shape
        if p > n:
            raise ArgumentError(f"bands must be (p, n) with p <= n, got shape {values.shape}")
        if p == n:
            values = _bands_of(check_lower_triangular("bands", values))
            p = len(values)
        outside = np.arange(p)[:, None] + np.arange(n) >= n
        if values[outside].any():
            raise ArgumentError("bands[l, j] must be 0 where j + l >= n: those entries lie below the matrix")
        if (values[0] <= 0).any():
            raise ArgumentError(f"bands[0], the diagonal of C, must be above 0, got {values[0].min()!r}")
        self.bands: Floats = frozen(values)

    @property
    def n(self) -> int:
        """Number of steps."""
        return int(self.bands.shape[1])

    @property
    def num_bands(self) -> int:
        """Number of bands p."""
        return len(self.bands)

    def normalized(self) -> "Banded":
        """The strategy with every column divided by its norm."""
        return Banded(self.bands / np.sqrt(self.column_norms_squared()))

    def matrix(self) -> Floats:
        """C, (n, n)."""
        return self.columns(np.arange(self.n))

    def columns(self, steps: ArrayLike) -> Floats:
        """C[:, steps], (n, len(steps))."""
        steps = np.asarray(steps)
        result = np.zeros((self.n, len(steps)))
        for band, values in enumerate(self.bands):
            inside = np.flatnonzero(steps + band < self.n)
            result[steps[inside] + band, inside] = values[steps[inside]]
        return result

    def noising_matrix(self) -> Floats:
        """C^-1, (n, n), by back substitution on the identity."""
        K = np.zeros((self.n, self.n))
        for t in range(self.n):
            K[t, t] = 1.0
            for band in range(1, min(self.num_bands, t + 1)):
                K[t] -= self.bands[band, t - band] * K[t - band]
            K[t] /= self.bands[0, t]
        return K

    def column_norms_squared(self) -> Floats:
        """(n,) squared norms of the columns."""
        return np.asarray(np.square(self.bands).sum(axis=0))

    def gram_bands(self) -> Floats:
        """(p, n) bands of X = C^T C: entry [l, j] is X[j, j + l], 0 where j + l >= n. O(n p^2)."""
        p, n = self.bands.shape
        gram = np.zeros((p, n))
        for gap in range(p):
            # column j meets column j + gap in rows j + gap .. j + p - 1
            gram[gap, : n - gap] = np.einsum("lj,lj->j", self.bands[gap:, : n - gap], self.bands[: p - gap, gap:])
        return gram

    def prefix_variance(self) -> Floats:
        """(n,) variance of each prefix sum's noise, by the covariance of the last p sums: O(n p^2), O(p^2) memory.

        With x_t = x_{t-1} + y_t the sums, back substitution reads C[t, t] x_t = z_t + a_1 x_{t-1} + .. + a_p x_{t-p}.
        """
        p, n = self.bands.shape
        covariance = np.zeros((p, p))  # of x_{t-1}, .., x_{t-p}, at index step modulo p
        variance = np.empty(n)
        for t in range(n):
            row = np.zeros(p + 1)  # C[t, t - l] for l = 0..p
            count = min(p, t + 1)
            row[:count] = self.bands[np.arange(count), t - np.arange(count)]
            a = np.zeros(p)
            a[(t - np.arange(1, p + 1)) % p] = (row[:-1] - row[1:]) / row[0]
            cross = covariance @ a
            variance[t] = a @ cross + 1 / row[0] ** 2
            covariance[t % p], covariance[:, t % p] = cross, cross
            covariance[t % p, t % p] = variance[t]
        return variance

    def recurrences(self, steps: NDArray[np.int64]) -> Recurrence:
        """State: the last p - 1 outputs, newest first."""
        back = np.arange(1, self.num_bands)
        columns = steps[:, None] - back
        diagonal = self.bands[0, steps]
        h = -np.where(columns >= 0, self.bands[back, columns], 0.0) / diagonal[:, None]
        shift, entry = delays(self.num_bands - 1)
        F = np.repeat(shift[None], len(steps), axis=0)
        F[:, :1] = h[:, None]
        return Recurrence(F, entry / diagonal[:, None], h, 1 / diagonal)

    def init(self, size: int) -> State:
        """No outputs yet."""
        checks.integer("size", size, low=0)
        return ()

    def step(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        """Back substitution; the state is the last p - 1 outputs, newest first."""
        noise = row(t).copy()
        for i, past in enumerate(state, start=1):
            noise -= np.float32(self.bands[i, t - i]) * past
        noise /= np.float32(self.bands[0, t])
        return noise, (noise.copy(), *state)[: self.num_bands - 1]

    @property
    def state_rows(self) -> int:
        """The last p - 1 outputs."""
        return self.num_bands - 1

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "banded", "p": p, "n": n, "bands": base64}."""
        return {"kind": "banded", "p": self.num_bands, "n": self.n, "bands": pack(self.bands)}

    @classmethod
    def _from_dict(cls, p: int, n: int, bands: str) -> "Banded":
        n = checks.integer("n", n, low=1)
        p = checks.integer("p", p, low=1, high=n)
        values = unpack("bands", bands, (p, n))
        return cls(_matrix_of(values)) if p == n else cls(values)

    def __repr__(self) -> str:
        return f"Banded(num_bands={self.num_bands}, n={self.n})"


def _bands_of(C: Floats) -> Floats:
    """(p, n) bands of a lower-triangular C down to its last non-zero one."""
    n = len(C)
    rows, columns = np.nonzero(C)
    bands = np.zeros((int((rows - columns).max()) + 1, n))
    for band in range(len(bands)):
        bands[band, : n - band] = np.diagonal(C, -band)
    return bands


def _matrix_of(bands: Floats) -> Floats:
    """C from n bands."""
    n = bands.shape[1]
    return sum((np.diag(values[: n - band], -band) for band, values in enumerate(bands)), np.zeros((n, n)))
