"""Toeplitz C: C[i, j] = c_{i-j}. The square root of the workload, banded ones, and what all Toeplitz forms share."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache as cached
from functools import cached_property, partial
from typing import Any, TypeVar, assert_never

import numpy as np
import scipy  # its parts, slow to load, when they are first asked for
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder._numerics import complex_product, fftconvolve, lfilter
from anyorder.checks import final, frozen
from anyorder.errors import ArgumentError, PlanError
from anyorder.formats import check_work
from anyorder.patterns import Listed, Participation, Pattern, PerEpoch, Separated
from anyorder.strategy.base import DENSE_STEPS, Combination, Recurrence, Row, State, Strategy, Terms, Vector
from anyorder.strategy.fitting import (
    OBJECTIVES,
    Valued,
    check_optimisable,
    descend,
    dot,
    exp,
    log,
    product,
    shuffled,
    stride,
    times,
    whole_power,
)
from anyorder.strategy.sensitivity import (
    TOLERANCE,
    BandedGram,
    Bound,
    Change,
    UnitSquares,
    Visits,
    as_operator,
    banded_bound,
    banded_squares,
    better,
    by_entry,
    from_sum,
    gram_bound,
    largest,
    of_series,
    refined,
    roots,
    rounded,
    toeplitz_bound,
    trimmed,
    visits,
)
from anyorder.strategy.variances import Way, by_bands, combined, substituted
from anyorder.workload import Workload

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

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
        h[k] = (f[k] - dot(h[1:k], h[k - 1 : 0 : -1])) / (2 * h[0])
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
        return np.asarray(scipy.linalg.toeplitz(self.toeplitz_coefficients(), np.zeros(self.n)))

    def noising_matrix(self) -> Floats:
        """C^-1, (n, n)."""
        return np.asarray(scipy.linalg.toeplitz(self.noising_coefficients(), np.zeros(self.n)))

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

    _steps_alike = True

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


# -- sensitivity -----------------------------------------------------------------------------------------------------

# Toeplitz C: the first participation as early as possible, the others as close as possible.


_MAX_COLUMNS = 100_000  # steps up to which the columns of X are made one after the other: about ten seconds
_BLOCK_ENTRIES = 1 << 22  # entries of X in hand


def bound(strategy: Toeplitz, pattern: Pattern) -> Bound:
    """The sensitivity of a lower-triangular Toeplitz C with first column c.

    A pattern that is moved to later steps keeps fewer rows of C, so of all patterns with the same gaps the one that
    begins at step 0 counts. With steps 0, b, 2b, ..:

        sens^2 = || sum_{j < k} shift^{jb} c ||^2

    - Listed with stride b: exact where X >= 0 on the pattern; else the sum of |X|. Other lists: see `unit_squares`.
    - Separated(b, k): exact for c non-negative and non-increasing [Kalinin & Lampert 2024]; else c is replaced
      by its non-increasing majorant max_{s >= t} |c_s|, and the result is exact where it equals what c attains.
      With at most b bands the columns are orthogonal: exact.
    - PerEpoch(k, s): an upper bound, see `toeplitz_bound`; exact for k = 1.

    Where that is not exact, the bands of X, or X itself for n up to 4096, may give a smaller bound.

    Cost: O(n) for exact ones.
    """
    match pattern:
        case Listed():
            return _listed(strategy, pattern)
        case Separated(b=b):
            found = _banded(strategy, pattern, _equidistant(strategy, b, pattern.max_participations, majorant))
        case PerEpoch():
            found = _banded(strategy, pattern, _epochs(strategy, pattern))
        case _:
            assert_never(pattern)
    if not found.exact and strategy.n <= DENSE_STEPS:
        X = gram_matrix(strategy.toeplitz_coefficients())
        found = better(found, gram_bound(X, pattern, terms=strategy.n))
    return found


def _listed(strategy: Toeplitz, pattern: Listed) -> Bound:
    b = pattern.stride
    if b is None:
        return largest(_unit_squares(strategy, visits(pattern)), _terms(strategy, pattern))
    found = _banded(strategy, pattern, _equidistant(strategy, b, pattern.max_participations, np.abs))
    if found.exact:
        return found
    steps = np.arange(0, strategy.n, b)
    if len(steps) * strategy.n > DENSE_STEPS**2:
        return found
    columns = strategy.columns(steps)
    one = Listed.strided(len(steps), 1)
    return better(found, gram_bound(columns.T @ columns, one, terms=strategy.n))


def units(strategy: Toeplitz, listed: Listed) -> Floats:
    """Of each unit: sum |X| over its steps squared."""
    return roots(_unit_squares(strategy, visits(listed)).upper, _terms(strategy, listed))


def majorant(c: Floats) -> Floats:
    """max_{s >= t} |c_s|: the least non-increasing sequence that is not below |c|."""
    return np.maximum.accumulate(np.abs(c)[::-1])[::-1]


def gram_matrix(c: Floats) -> Floats:
    """X = C^T C, (n, n), from X[s, t] = X[s + 1, t + 1] + c_{n-1-s} c_{n-1-t}: O(n^2)."""
    n = len(c)
    X = np.empty((n, n))
    for t, column in _gram_columns(c):
        X[: t + 1, t] = column
        X[t, : t + 1] = column
    return X


def _equidistant(strategy: Toeplitz, b: int, k: int, upwards: Callable[[Floats], Floats]) -> Bound:
    """Of steps 0, b, 2b, ..: what c attains, or `upwards(c)`, which no pattern goes above."""
    c = strategy.toeplitz_coefficients()
    if not c[b:].any():
        return from_sum(_orthogonal(c, b, k), int(np.count_nonzero(c)) + k, exact=True)
    upper = _folded(upwards(c), b, k)
    # sums of k, squared and added in pairs
    return from_sum(upper, 2 * k + 64, exact=upper <= _folded(c, b, k) * (1 + TOLERANCE))


def _epochs(strategy: Toeplitz, pattern: PerEpoch) -> Bound:
    """A single epoch is one step; else the two-point bound, or that of any steps at all."""
    n, k, s = pattern.n, pattern.k, pattern.steps_per_epoch
    if k == 1:
        return _equidistant(strategy, n, 1, np.abs)
    longer = strategy.toeplitz_coefficients(n + s)
    squared = toeplitz_bound(longer, k, s)
    return from_sum(min(squared, _folded(majorant(longer[:n]), 1, k)), n + k * k, exact=False)


def gram_of(strategy: ToeplitzBanded) -> BandedGram:
    """X where C has p bands: O(p^2)."""
    n, p, c = strategy.n, strategy.num_bands, strategy.coefficients
    sums = np.zeros((p, p))  # [gap, m] = sum_{l <= m} c_l c_{l + gap}: where column j + gap has m + 1 rows left
    for gap in range(p):
        sums[gap, : p - gap] = np.cumsum(c[: p - gap] * c[gap:])
        sums[gap, p - gap :] = sums[gap, p - gap - 1]
    return BandedGram(n, p, lambda gaps, steps: sums[gaps, np.minimum(n - 1 - steps - gaps, p - 1)])


def _banded(strategy: Toeplitz, pattern: Pattern, found: Bound) -> Bound:
    """The bands of X, where it has few."""
    if found.exact or type(strategy) is not ToeplitzBanded:
        return found
    return better(found, banded_bound(gram_of(strategy), pattern))


def _folded(c: Floats, b: int, k: int) -> float:
    """|| sum_{j < k} shift^{jb} c ||^2 in n rows: O(n)."""
    n = len(c)
    rows = -(-n // b)
    padded = np.zeros(rows * b)
    padded[:n] = c
    sums = np.cumsum(padded.reshape(rows, b), axis=0)
    if k < rows:
        sums[k:] -= sums[:-k].copy()
    flat = sums.ravel()[:n]
    return float(np.square(flat).sum())


def _orthogonal(c: Floats, b: int, k: int) -> float:
    """The norms of columns 0, b, 2b, .. squared: no two have a row in common."""
    norms = np.cumsum(np.square(c))[::-1]
    return float(norms[::b][:k].sum())


def _gram_columns(c: Floats) -> Iterator[tuple[int, Floats]]:
    """Pairs (t, X[: t + 1, t]), for t = n - 1 down to 0."""
    n = len(c)
    tails = c[::-1]
    column = np.zeros(n + 1)
    for t in range(n - 1, -1, -1):
        column = column[1:] + tails[: t + 1] * tails[t]
        yield t, column


def _unit_squares(strategy: Toeplitz, units: Visits) -> UnitSquares:
    if type(strategy) is ToeplitzBanded:
        return banded_squares(gram_of(strategy), units)
    return unit_squares(strategy.toeplitz_coefficients(), units)


def unit_squares(c: Floats, units: Visits, weights: Floats | None = None) -> UnitSquares:
    """Of every unit: the sums of |X| and of X over its steps squared.

    With (n,) weights, of diag(weights) X diag(weights). The columns of X are made one after the other, a block is
    kept, and every participation meets the earlier ones of its unit there. Cost: O(n^2 + M k) time, O(M + n) memory,
    for M participations and at most k of a unit. Beyond 100 000 steps an upper bound, see `_uncut`.
    """
    n, steps = units.n, units.steps
    weights = np.ones(n) if weights is None else weights
    if n > _MAX_COLUMNS:
        return _uncut(c, units, weights)
    check_work("the sensitivity of each unit", operations=n * n + 4 * len(steps) * int(units.ranks.max() + 1))
    order = np.argsort(steps, kind="stable")
    size = max(1, min(n, _BLOCK_ENTRIES // n))
    bounds = np.searchsorted(steps[order], np.arange(0, n + size, size))
    upper = np.empty(len(steps))
    lower = np.empty(len(steps))
    block = np.empty((size, n))
    for t, column in _gram_columns(c):
        block[t % size, : t + 1] = column * weights[: t + 1] * weights[t]
        if t % size:
            continue
        later = order[bounds[t // size] : bounds[t // size + 1]]
        distance = 0
        while len(later):
            earlier = steps[later - distance]
            values = block[steps[later] - t, earlier]
            if distance == 0:
                upper[later], lower[later] = values, values
            else:
                upper[later] += 2 * np.abs(values)
                lower[later] += 2 * values
            distance += 1
            later = later[units.ranks[later] >= distance]
    return UnitSquares(units.per_unit(upper), units.per_unit(lower))


def _uncut(c: Floats, units: Visits, weights: Floats) -> UnitSquares:
    """Upper bounds with all n rows for every pair, |X[s, t]| <= sum_l |c_l c_{l+t-s}|: O(n log n + M k)."""
    n = len(c)
    norms = np.cumsum(np.square(c))[::-1]
    size = scipy.fft.next_fast_len(2 * n, real=True)
    spectrum = scipy.fft.rfft(np.abs(c), size)
    overlaps = scipy.fft.irfft(complex_product(spectrum, spectrum.conj()), size)[:n]

    def entry(gaps: Integers, steps: Integers) -> Floats:
        pairs = np.where(gaps == 0, norms[steps], overlaps[gaps])
        return np.asarray(pairs * weights[steps] * weights[steps + gaps])

    upper = banded_squares(BandedGram(n, n, entry), units).upper
    return UnitSquares(upper, np.zeros_like(upper))


def _terms(strategy: Toeplitz, pattern: Pattern) -> int:
    return strategy.n + pattern.max_participations


# -- fit -------------------------------------------------------------------------------------------------------------

# Fits of Toeplitz strategies: banded C, and C with a banded inverse.
#
# With C Toeplitz of first column c, C^-1 is Toeplitz of first column d, the power series 1 / c. The loss is a
# quadratic form in d times one in c, both with exact gradients: for x = 1 / y a gradient g with respect to x is
#
#     - sum_t g_t (x * x)_{t-j}                                                                                   (1)
#
# with respect to y_j. Quasi-Newton steps (L-BFGS) on the logarithm of the loss do the rest.


T = TypeVar("T", bound=Toeplitz)
_SHORT = 64  # coefficients up to which sums are taken directly, and the error is a form of so many rows
_STAGES = ((1e1, 1e-8, 1), (1e3, 1e-8, 2), (1e5, 1e-9, 3))  # penalty on a rising c, gain, searches; then its majorant
_SAME = 1e-9  # a relative difference of losses that is one of rounding
_POWER = 48  # of the norm that stands for the maximum over rows


class Problem:
    """The loss of Toeplitz strategies, for one workload, participation and objective.

    Args:
        workload: Toeplitz, or of at most 4096 steps.
        participation: or a pattern; its worst steps are taken to be those of `Pattern.likely_worst`, which is exact for
            non-increasing c >= 0.
        objective: "mean", "max" or "last".
    """

    def __init__(self, workload: Workload, participation: Participation | Pattern, objective: str = "mean") -> None:
        self.objective = checks.choice("objective", objective, OBJECTIVES)
        self.workload, self.n = workload, workload.n
        if workload.n != participation.n:
            raise PlanError(f"workload and participation must have the same n, got {workload.n} and {participation.n}")
        if isinstance(participation, Participation):
            check_optimisable(participation)
            participation = participation.pattern
        self.pattern = participation
        self.steps = participation.likely_worst()
        self._error = self._error_function()

    def error(self, d: Floats) -> Valued:
        """|| A D ||_F^2 / n, or the squared norm of the last, of the largest row, with D of first column d, 0, 0, ..

        Args: d: (m,) with m <= n. The gradient is (m,). Cost: O(n log n), or O(n^2) where A is not Toeplitz.
        """
        return self._error(d)

    def sens(self, c: Floats, stiffness: float = np.inf) -> Valued:
        """The squared sensitivity for the first column c, 0, 0, .. of C, and its gradient; c is (m,) with m <= n.

        Exact for one participation, for bands that do not meet, for FixedOrder and c >= 0; else of the non-increasing
        majorant of |c|, which is never less. That has kinks; with a finite stiffness, |c| itself counts, and
        stiffness times the squares of its rises as a penalty.
        """
        gaps = np.diff(self.steps)
        if len(self.steps) == 1 or len(c) <= gaps.min():
            return len(self.steps) * dot(c, c), 2 * len(self.steps) * c
        n = self.n
        padded = np.zeros(n)
        padded[: len(c)] = np.abs(c)
        free = stride(self.pattern) is None
        if free and np.isinf(stiffness):
            value, gradient = self._majorant_sens(padded)
        else:
            value, gradient = self._pattern_sens(padded)
        if free and np.isfinite(stiffness):
            rises = np.zeros(n + 1)
            rises[1:-1] = np.maximum(np.diff(padded), 0.0)
            value += stiffness * dot(rises, rises)
            gradient -= 2 * stiffness * np.diff(rises)
        return value, gradient[: len(c)] * np.where(c < 0, -1.0, 1.0)

    def _pattern_sens(self, c: Floats) -> Valued:
        """|| sum of c moved to each of the steps ||^2."""
        n = self.n
        sums, gradient = np.zeros(n), np.zeros(n)
        for t in self.steps:
            sums[t:] += c[: n - t]
        for t in self.steps:
            gradient[: n - t] += sums[t:]
        return dot(sums, sums), 2 * gradient

    def _majorant_sens(self, c: Floats) -> Valued:
        """The same of the non-increasing majorant; its entries are those of c at the places `source`."""
        backwards = c[::-1]
        top = np.maximum.accumulate(backwards)
        latest = np.maximum.accumulate(np.where(backwards == top, np.arange(self.n), 0))
        source = self.n - 1 - latest[::-1]
        value, gradient = self._pattern_sens(c[source])
        return value, np.bincount(source, gradient, minlength=self.n).astype(np.float64)

    def _error_function(self) -> Callable[[Floats], Valued]:
        if self.workload.is_toeplitz:
            a = self.workload.toeplitz_coefficients()
            mean = self.objective == "mean"  # a Toeplitz A: the last row is the largest
            weights = (self.n - np.arange(self.n)) / self.n if mean else np.ones(self.n)
            short = cached(partial(_lagged_products, a, mean, min(_SHORT, self.n)))

            def error(d: Floats) -> Valued:
                small = len(d) <= _SHORT
                return _quadratic(short()[: len(d), : len(d)], d) if small else _toeplitz_error(a, weights, d)

            return error
        if self.n > DENSE_STEPS:
            raise PlanError(
                f"a workload that is not Toeplitz is fitted for at most {DENSE_STEPS} steps with this kind of "
                f"strategy, got {self.n}; fit kind 'blt', or a workload with constant learning rate"
            )
        A = self.workload.matrix()
        if self.objective == "max":
            return lambda d: _largest_row(A, d)
        if self.objective == "last":
            return lambda d: _row_error(A[-1], d)
        Q = _lagged(product(A.T, A)) / self.n
        return lambda d: _quadratic(Q[: len(d), : len(d)], d)


def _toeplitz_error(a: Floats, weights: Floats, d: Floats) -> Valued:
    """sum_t weights_t (a * d)_t^2."""
    n = len(a)
    b = fftconvolve(a, d)[:n]
    weighted = weights * b
    return dot(weighted, b), 2 * fftconvolve(weighted[::-1], a)[:n][::-1][: len(d)]


def _lagged_products(a: Floats, mean: bool, m: int) -> Floats:
    """Q (m, m) with `_toeplitz_error` = d^T Q d: Q[i, j] = sum_t weights_t a_{t-i} a_{t-j}: O(n m).

    With l = j - i and p_u = a_u a_{u+l} it is the sum of p_u over u < n - j, or of (n - j - u) p_u / n for the mean: a
    cumulative sum, once or twice.
    """
    n = len(a)
    Q = np.zeros((m, m))
    for lag in range(m):
        sums = np.cumsum(a[: n - lag] * a[lag:])
        if mean:
            sums = np.cumsum(sums) / n
        entries = sums[::-1][: m - lag]  # up to u = n - 1 - j, for j = lag, lag + 1, ..
        Q[np.arange(m - lag), np.arange(lag, m)] = Q[np.arange(lag, m), np.arange(m - lag)] = entries
    return Q


def _row_error(row: Floats, d: Floats) -> Valued:
    """|| a D ||^2 for one row a: entries sum_u a_u d_{u-s}."""
    n = len(row)
    entries = fftconvolve(row[::-1], d)[:n]  # reversed
    return dot(entries, entries), 2 * fftconvolve(entries, row)[n - 1 : n - 1 + len(d)]


def _quadratic(Q: Floats, d: Floats) -> Valued:
    moved = times(Q, d)
    return dot(d, moved), 2 * moved


def _lagged(M: Floats) -> Floats:
    """Q with tr(D^T M D) = d^T Q d: Q[i, j] = sum_s M[i + s, j + s], from the lower right corner."""
    Q = M.copy()
    for i in range(len(M) - 2, -1, -1):
        Q[i, :-1] += Q[i + 1, 1:]
    return Q


def _largest_row(A: Floats, d: Floats) -> Valued:
    """The p-norm, p = 48, of the squared row norms of A D: above the largest by n^(1/p) at most."""
    n = len(A)
    spectrum = np.fft.rfft(d, 2 * n)
    products = complex_product(np.fft.rfft(A[:, ::-1], 2 * n, axis=1), spectrum)
    B = np.fft.irfft(products, 2 * n, axis=1)[:, :n][:, ::-1]
    rows = np.square(B).sum(axis=1)
    value = float(rows.max() * exp(log(float(whole_power(rows / rows.max(), _POWER).sum())) / _POWER))
    shares = whole_power(rows / value, _POWER - 1)
    G = product(A.T, shares[:, None] * B)
    return value, 2 * np.array([np.trace(G, -lag) for lag in range(len(d))])


def reciprocal(y: Floats, m: int, gradient: Callable[[Floats], Valued]) -> Valued:
    """The value of a function of x = 1 / y, m coefficients, and its gradient in y by (1)."""
    x = inverse_series(y, m)
    value, g = gradient(x)
    square = lfilter([1.0], y, x) if len(y) <= _SHORT else fftconvolve(x, x)[:m]
    if len(y) <= _SHORT:
        return value, -np.array([dot(g[lag:], square[: m - lag]) for lag in range(len(y))])
    return value, -fftconvolve(g[::-1], square)[:m][::-1][: len(y)]


def square_root_start(workload: Workload, m: int) -> Floats:
    """The first m coefficients of the square root of the workload, or, with a schedule, of its constant-rate form."""
    shape = workload if workload.is_toeplitz else Workload(workload.n, momentum=getattr(workload, "momentum", 0.0))
    a = shape.toeplitz_coefficients()[:m]
    return square_root_series(a / a[0], m)


def fit_toeplitz(problem: Problem, bands: int) -> ToeplitzBanded:
    """The banded Toeplitz C of least loss: from the square root, and from the fit with half the bands."""
    return fits_toeplitz(problem, [bands])[0]


def fit(workload: Workload, participation: Participation, objective: str, bands: int) -> ToeplitzBanded:
    """`fit_toeplitz` to a workload."""
    return fit_toeplitz(Problem(workload, participation, objective), bands)


def fits_toeplitz(problem: Problem, sizes: Sequence[int]) -> list[ToeplitzBanded]:
    """`fit_toeplitz` for many sizes, each fit made once."""

    def loss(stiffness: float, free: Floats) -> Valued:
        c = np.concatenate([[1.0], free])
        error, g_error = reciprocal(c, problem.n, problem.error)
        sens, g_sens = problem.sens(c, stiffness)
        return error * sens, (g_error * sens + error * g_sens)[1:]

    return fit_all(problem, sizes, loss, ToeplitzBanded, inverse=False)


def fit_all(
    problem: Problem, sizes: Sequence[int], loss: Callable[[float, Floats], Valued], make: Callable[[Floats, int], T],
    *, inverse: bool,
) -> list[T]:  # fmt: skip
    """The strategies of least loss for each size; never worse than with half as many bands."""
    known = {1: np.ones(1)}

    def coefficients(bands: int) -> Floats:
        if bands not in known:
            half = coefficients(bands // 2)
            known[bands] = _fit_series(problem, half, bands, loss, inverse=inverse)
        return known[bands]

    made: dict[int, tuple[T, float]] = {}

    def strategy(bands: int) -> tuple[T, float]:
        if bands not in made:
            found = make(rounded(coefficients(bands)), problem.n)
            made[bands] = found, 0.0
            if shuffled(problem.pattern):
                # the loss is of one pattern of many: by the sensitivity over all, fewer bands may serve better
                own = found, _true_loss(problem, found)
                fewer = own if bands == 1 else strategy(bands // 2)
                made[bands] = fewer if fewer[1] < own[1] * (1 - _SAME) else own
        return made[bands]

    return [strategy(checks.integer("bands", bands, low=1, high=problem.n))[0] for bands in sizes]


def _true_loss(problem: Problem, strategy: Toeplitz) -> float:
    error, _ = problem.error(strategy.noising_coefficients())
    pattern = problem.pattern
    return error * refined(strategy, pattern, bound(strategy, pattern)).value ** 2


def _fit_series(
    problem: Problem, half: Floats, bands: int, loss: Callable[[float, Floats], Valued], *, inverse: bool
) -> Floats:
    """The coefficients with so many bands: from those with half of them, or from the square root if that is better.

    Where c must not rise, a penalty on its rises grows until the kinks of the majorant are near.
    """
    root = square_root_start(problem.workload, bands)
    longer = np.concatenate([half, np.zeros(bands - len(half))])[1:]
    starts = [longer, (inverse_series(root, bands) if inverse else root)[1:]]
    smooth = len(problem.steps) == 1 or stride(problem.pattern) is not None
    x = min(starts, key=lambda start: loss(np.inf if smooth else _STAGES[0][0], start)[0])
    for stiffness, gain, restarts in () if smooth else _STAGES:
        x, _ = descend(partial(loss, stiffness), x, gain=gain, restarts=restarts, max_iterations=300)
    tried = [descend(partial(loss, np.inf), x), (longer, loss(np.inf, longer)[0])]
    return np.concatenate([[1.0], min(tried, key=lambda result: result[1])[0]])


# -- error -----------------------------------------------------------------------------------------------------------

_MOST_BANDS = 1024  # of a noising matrix that is handled as banded


def way(strategy: Toeplitz) -> Way | None:
    """Of iterates: a step adds up the last rows of Z; none where they are too many, and K is made in full."""
    g = trimmed(strategy.noising_coefficients())
    return (lambda M, N: by_bands(combined(g, strategy.n), M, N)) if len(g) <= _MOST_BANDS else None


def way_of_banded(strategy: ToeplitzBanded) -> Way:
    """Of iterates: a step takes off the last outputs."""
    return lambda M, N: by_bands(substituted(strategy.coefficients[:, None], strategy.n), M, N)


# -- rounding --------------------------------------------------------------------------------------------------------


def change(strategy: Toeplitz) -> Change:
    """Of steps that add up rows of Z: C~ has the inverse of the rounded series."""
    g = check_series("coefficients", trimmed(rounded(strategy.noising_coefficients())), strategy.n)
    return of_series(strategy.toeplitz_coefficients(), accurate_inverse_series(g, strategy.n))


def change_of_banded(strategy: ToeplitzBanded) -> Change:
    """Coefficients of C themselves are rounded."""
    return of_series(strategy.coefficients, rounded(strategy.coefficients))


def under_coins(strategy: Toeplitz, change: Change) -> float:
    """|| K || is at most the sum of its series."""
    return as_operator(strategy, change, float(np.abs(strategy.noising_coefficients()).sum()))


def under_coins_of_banded(strategy: ToeplitzBanded, change: Change) -> float:
    """Entries of C themselves are rounded."""
    del change
    return by_entry(rounded(strategy.coefficients), strategy.coefficients)
