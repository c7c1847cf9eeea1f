"""Toeplitz C: C[i, j] = c_{i-j}. The square root of the workload, banded ones, and what all Toeplitz forms share."""

from abc import abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import toeplitz

from anyorder import checks
from anyorder._filters import fftconvolve, lfilter
from anyorder.checks import final, frozen
from anyorder.errors import ArgumentError
from anyorder.strategy.base import Combination, Recurrence, Row, State, Strategy, Terms, Vector
from anyorder.workload import Workload

__all__ = [
    "Series",
    "SquareRoot",
    "Toeplitz",
    "ToeplitzBanded",
    "inverse_series",
    "square_root_series",
]

Floats = NDArray[np.float64]

_REFINED_OPERATIONS = 1 << 24
DIRECT_OPERATIONS = 1 << 27  # an inverse series of m terms from p costs m p this way, and is exact to rounding


def inverse_series(series: ArrayLike, m: int) -> Floats:
    """The first m coefficients of 1 / f for a power series f with f_0 != 0.

    The first column of the inverse of a lower-triangular Toeplitz matrix. Recurrence in O(m p); Newton's iteration
    with fast Fourier transforms, O(m log m), where that is too long.
    """
    f = np.asarray(series, dtype=np.float64)[:m]
    if m * len(f) <= DIRECT_OPERATIONS:
        impulse = np.zeros(m)
        impulse[0] = 1.0
        return np.asarray(lfilter([1.0], f, impulse))
    g = np.array([1.0 / f[0]])
    while len(g) < m:
        size = min(2 * len(g), m)
        residual = -fftconvolve(f[:size], g)[:size]
        residual[0] += 2.0
        g = fftconvolve(residual, g)[:size]
    return g


def accurate_inverse_series(series: ArrayLike, m: int) -> Floats:
    """`inverse_series` corrected by its residual in twice the precision, up to 2^24 operations.

    The plain recurrence loses digits where 1 / f grows by cancellation, as for f near (1 - x)^2: some n^2 roundings.
    With r = f c - 1 the correction is c <- c - r / f.
    """
    f = np.asarray(series, dtype=np.float64)[:m]
    c = inverse_series(f, m)
    if m * len(f) > _REFINED_OPERATIONS or not np.abs(c).max() < 2.0**900:  # beyond, halves overflow
        return c
    for _ in range(2):
        c = c - np.asarray(lfilter([1.0], f, _residual(f, c)))
    return c


def _residual(f: Floats, c: Floats) -> Floats:
    """The first coefficients of f c - 1, as in twice the precision [Ogita, Rump, Oishi 2005, Dot2]."""
    total, errors = np.zeros(len(c)), np.zeros(len(c))
    total[0] = -1.0
    high = _high(c)
    for i, factor in enumerate(f):
        part, part_high = c[: len(c) - i], high[: len(c) - i]
        product = factor * part
        factor_high = _high(factor)
        low = (factor_high * part_high - product) + factor_high * (part - part_high)
        low = low + (factor - factor_high) * part_high + (factor - factor_high) * (part - part_high)
        before = total[i:].copy()
        total[i:] += product
        added = total[i:] - before
        errors[i:] += (before - (total[i:] - added)) + (product - added) + low
    return total + errors


def _high(x: Any) -> Any:
    """The upper 26 bits: products of such halves are exact [Dekker 1971]."""
    scaled = x * 134217729.0
    return scaled - (scaled - x)


def square_root_series(series: ArrayLike, m: int) -> Floats:
    """The first m coefficients of sqrt(f) for a power series f with f_0 > 0, in O(m^2).

    h_k = (f_k - sum_{0 < i < k} h_i h_{k-i}) / (2 h_0)
    """
    f = np.zeros(m)
    given = np.asarray(series, dtype=np.float64)[:m]
    f[: len(given)] = given
    h = np.zeros(m)
    h[0] = np.sqrt(f[0])
    for k in range(1, m):
        h[k] = (f[k] - h[1:k] @ h[k - 1 : 0 : -1]) / (2 * h[0])
    return h


class Toeplitz(Strategy):
    """A strategy whose C, and so C^-1, is lower-triangular Toeplitz: two power series, c and 1 / c."""

    def __init__(self, n: int) -> None:
        self._n = checks.integer("n", n, low=1)

    @property
    def n(self) -> int:
        """Number of steps."""
        return self._n

    @abstractmethod
    def toeplitz_coefficients(self, m: int | None = None) -> Floats:
        """(m,) first entries of the first column of C; all n by default."""

    @abstractmethod
    def noising_coefficients(self, m: int | None = None) -> Floats:
        """(m,) first entries of the first column of C^-1; all n by default."""

    def matrix(self) -> Floats:
        """C, (n, n)."""
        return np.asarray(toeplitz(self.toeplitz_coefficients(), np.zeros(self.n)))

    def noising_matrix(self) -> Floats:
        """C^-1, (n, n)."""
        return np.asarray(toeplitz(self.noising_coefficients(), np.zeros(self.n)))

    def prefix_variance(self) -> Floats:
        """(n,) sum_{s <= t} (g_0 + .. + g_s)^2 with g the first column of C^-1: O(n) after the coefficients."""
        variance: Floats = np.cumsum(np.square(np.cumsum(self.noising_coefficients())))
        return variance

    def columns(self, steps: ArrayLike) -> Floats:
        """C[:, steps], (n, len(steps))."""
        steps = np.asarray(steps)
        coefficients = self.toeplitz_coefficients()
        result = np.zeros((self.n, len(steps)))
        for i, t in enumerate(steps):
            result[t:, i] = coefficients[: self.n - t]
        return result

    def column_norms_squared(self) -> Floats:
        """(n,) column t keeps the first n - t coefficients."""
        return np.cumsum(np.square(self.toeplitz_coefficients()))[::-1]


class Series(Toeplitz, Combination):
    """Toeplitz strategies whose steps make all earlier rows of Z again: two series, and nothing else to say.

    O(n^2 d) for a run. Enough for a new family, until it has a state that makes its steps short.
    """

    def noising_coefficients(self, m: int | None = None) -> Floats:
        """(m,) coefficients of 1 / c."""
        m = self.n if m is None else m
        return inverse_series(self.toeplitz_coefficients(m), m)

    @cached_property
    def _noising(self) -> Floats:
        return frozen(self.noising_coefficients())

    def terms(self, t: int) -> Terms:
        """Rows t, t - 1, .., 0."""
        return Terms(np.arange(t, -1, -1), self._noising[: t + 1])


@final
class ToeplitzBanded(Toeplitz):
    """C[i, j] = c_{i-j} for i - j < p, else 0.

    Noise by back substitution on the last p - 1 outputs y, O(p d) a step:

        y_t = (z_t - c_1 y_{t-1} - .. - c_{p-1} y_{t-p+1}) / c_0

    Args:
        coefficients: (p,) c_0 > 0, .., c_{p-1}; p <= n.
        n: number of steps.
    """

    def __init__(self, coefficients: ArrayLike, n: int) -> None:
        super().__init__(n)
        self.coefficients = check_series("coefficients", coefficients, self.n)

    @classmethod
    def from_square_root(cls, workload: Workload, num_bands: int) -> "ToeplitzBanded":
        """The first num_bands coefficients of the square root of a Toeplitz workload (BSR, Kalinin & Lampert 2024)."""
        num_bands = checks.integer("num_bands", num_bands, low=1, high=workload.n)
        return cls(square_root_series(workload.toeplitz_coefficients(), num_bands), workload.n)

    @property
    def num_bands(self) -> int:
        """Number of coefficients p."""
        return len(self.coefficients)

    def toeplitz_coefficients(self, m: int | None = None) -> Floats:
        """(m,) c_0, .., c_{p-1}, 0, .."""
        return _padded(self.coefficients, self.n if m is None else m)

    def noising_coefficients(self, m: int | None = None) -> Floats:
        """(m,) coefficients of 1 / c."""
        return inverse_series(self.coefficients, self.n if m is None else m)

    def recurrences(self, steps: NDArray[np.int64]) -> Recurrence:
        """State: the last p - 1 outputs, newest first."""
        F, G = delays(self.num_bands - 1)
        h, g = -self.coefficients[1:] / self.coefficients[0], 1 / self.coefficients[0]
        F[:1] = h
        return repeated(F, g * G, h, g, len(steps))

    def init(self, size: int) -> State:
        """No outputs yet."""
        checks.integer("size", size, low=0)
        return ()

    def step(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        """Back substitution; the state is the last p - 1 outputs, newest first."""
        c = self.coefficients.astype(np.float32)
        noise = row(t).copy()
        for coefficient, past in zip(c[1:], state, strict=False):
            noise -= coefficient * past
        noise /= c[0]
        return noise, (noise.copy(), *state)[: self.num_bands - 1]

    @property
    def state_rows(self) -> int:
        """The last p - 1 outputs."""
        return self.num_bands - 1

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "toeplitz_banded", "coefficients": [..], "n": n}."""
        return {"kind": "toeplitz_banded", "coefficients": self.coefficients.tolist(), "n": self.n}

    def __repr__(self) -> str:
        return f"ToeplitzBanded(num_bands={self.num_bands}, n={self.n})"


@final
class SquareRoot(Series):
    """The square root of the prefix sum: C = B = A^(1/2) [Fichtenberger et al. 2022; Henzinger et al. 2023].

        c_k = c_{k-1} (1 - 1/(2k)),   (C^-1)_k = g_k = g_{k-1} (1 - 3/(2k)),   c_0 = g_0 = 1

    C^-1 is full: a step regenerates t + 1 rows of Z, O(n^2 d) for a run. For small n, and as a yardstick; its
    banded forms and `BLT` stream in short time.

    Args:
        n: number of steps.
    """

    def toeplitz_coefficients(self, m: int | None = None) -> Floats:
        """(m,) binomial(2k, k) / 4^k."""
        return binomial_series(0.5, self.n if m is None else m)

    def noising_coefficients(self, m: int | None = None) -> Floats:
        """(m,) coefficients of sqrt(1 - x)."""
        return binomial_series(1.5, self.n if m is None else m)

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "square_root", "n": n}."""
        return {"kind": "square_root", "n": self.n}

    def __repr__(self) -> str:
        return f"SquareRoot(n={self.n})"


def binomial_series(a: float, m: int) -> Floats:
    """(m,) coefficients of (1 - x)^(a - 1): f_0 = 1, f_k = f_{k-1} (1 - a / k)."""
    factors = np.ones(m)
    factors[1:] -= a / np.arange(1, m)
    return np.asarray(np.cumprod(factors))


def check_series(name: str, value: ArrayLike, n: int) -> Floats:
    """1 to n coefficients, the first above 0."""
    series = checks.array(name, value, ndim=1)
    if len(series) > n:
        raise ArgumentError(f"{name} must be at most n={n} numbers, got {len(series)}")
    if series[0] <= 0:
        raise ArgumentError(f"{name} must begin with a number above 0, the diagonal of the matrix, got {series[0]!r}")
    return series


def delays(d: int) -> tuple[Floats, Floats]:
    """F, G of a state that holds the last d numbers put in, newest first."""
    G = np.zeros(d)
    G[:1] = 1.0
    return np.eye(d, k=-1), G


def repeated(F: Floats, G: Floats, h: Floats, g: float, count: int) -> Recurrence:
    """The same recurrence for so many steps."""
    return Recurrence(*(np.broadcast_to(part, (count, *np.shape(part))) for part in (F, G, h, np.float64(g))))


def _padded(series: Floats, m: int) -> Floats:
    result = np.zeros(m)
    result[: len(series)] = series[:m]
    return result
