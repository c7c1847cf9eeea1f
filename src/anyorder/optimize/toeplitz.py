"""Fits of Toeplitz strategies: banded C, and C with a banded inverse.

With C Toeplitz of first column c, C^-1 is Toeplitz of first column d, the power series 1 / c. The loss is a quadratic
form in d times one in c, both with exact gradients: for x = 1 / y a gradient g with respect to x is

    - sum_t g_t (x * x)_{t-j}                                                                                   (1)

with respect to y_j. Quasi-Newton steps (L-BFGS) on the logarithm of the loss do the rest.
"""

from collections.abc import Callable, Sequence
from functools import cache as cached
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from anyorder import checks
from anyorder._filters import fftconvolve, lfilter
from anyorder.errors import PlanError
from anyorder.optimize.bounds import OBJECTIVES
from anyorder.optimize.patterns import check_optimisable, shuffled, stride
from anyorder.patterns import Participation
from anyorder.sensitivity import sensitivity
from anyorder.strategy import BandedInverse, Toeplitz, ToeplitzBanded
from anyorder.strategy.toeplitz import inverse_series, square_root_series
from anyorder.workload import Workload

__all__ = [
    "DENSE_STEPS",
    "Problem",
    "descend",
    "fit_banded_inverse",
    "fit_toeplitz",
    "fits_banded_inverse",
    "fits_toeplitz",
    "square_root_start",
]

Floats = NDArray[np.float64]
Valued = tuple[float, Floats]
"""A value and its gradient."""

T = TypeVar("T", BandedInverse, ToeplitzBanded)

DENSE_STEPS = 4096  # steps up to which a workload that is not Toeplitz is handled as a matrix
_SHORT = 64  # coefficients up to which sums are taken directly, and the error is a form of so many rows
_STAGES = ((1e1, 1e-8, 1), (1e3, 1e-8, 2), (1e5, 1e-9, 3))  # penalty on a rising c, gain, searches; then its majorant
_WALL = 60.0  # the logarithm of a loss beyond all that are of use, so that a search turns back
_BLOCK = 1 << 14  # steps in hand
_POWER = 48  # of the norm that stands for the maximum over rows


class Problem:
    """The loss of Toeplitz strategies, for one workload, participation and objective.

    Args:
        workload: Toeplitz, or of at most 4096 steps.
        participation: its worst pattern is taken to be `worst_steps`, which is exact for non-increasing c >= 0.
        objective: "mean", "max" or "last".
    """

    def __init__(self, workload: Workload, participation: Participation, objective: str = "mean") -> None:
        self.objective = checks.choice("objective", objective, OBJECTIVES)
        self.workload, self.participation, self.n = workload, participation, workload.n
        if workload.n != participation.n:
            raise PlanError(f"workload and participation must have the same n, got {workload.n} and {participation.n}")
        check_optimisable(participation)
        self.steps = worst_steps(participation)
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
            return len(self.steps) * float(c @ c), 2 * len(self.steps) * c
        n = self.n
        padded = np.zeros(n)
        padded[: len(c)] = np.abs(c)
        free = stride(self.participation.pattern) is None
        if free and np.isinf(stiffness):
            value, gradient = self._majorant_sens(padded)
        else:
            value, gradient = self._pattern_sens(padded)
        if free and np.isfinite(stiffness):
            rises = np.zeros(n + 1)
            rises[1:-1] = np.maximum(np.diff(padded), 0.0)
            value += stiffness * float(rises @ rises)
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
        return float(sums @ sums), 2 * gradient

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
            short = cached(partial(_lagged_products, a, weights, min(_SHORT, self.n)))

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
        Q = _lagged(A.T @ A) / self.n
        return lambda d: _quadratic(Q[: len(d), : len(d)], d)


def worst_steps(participation: Participation) -> NDArray[np.int64]:
    """The pattern of largest sensitivity for Toeplitz C with a non-increasing first column; a guess for EpochShuffle.

    As early and as close as allowed. In shuffled epochs: last of one, first of the next, and so in pairs. For a
    KnownOrder: evenly spread.
    """
    return participation.pattern.worst()


def _toeplitz_error(a: Floats, weights: Floats, d: Floats) -> Valued:
    """sum_t weights_t (a * d)_t^2."""
    n = len(a)
    b = fftconvolve(a, d)[:n]
    weighted = weights * b
    return float(weighted @ b), 2 * fftconvolve(weighted[::-1], a)[:n][::-1][: len(d)]


def _lagged_products(a: Floats, weights: Floats, m: int) -> Floats:
    """Q (m, m) with `_toeplitz_error` = d^T Q d: Q[i, j] = sum_t weights_t a_{t-i} a_{t-j}, a block of t at a time."""
    padded = np.concatenate([np.zeros(m - 1), a])
    Q = np.zeros((m, m))
    for start in range(0, len(a), _BLOCK):
        part = weights[start : start + _BLOCK]
        rows = sliding_window_view(padded[start : start + len(part) + m - 1], m)[:, ::-1]  # a_t, .., a_{t-m+1}
        Q += (rows * part[:, None]).T @ rows
    return Q


def _row_error(row: Floats, d: Floats) -> Valued:
    """|| a D ||^2 for one row a: entries sum_u a_u d_{u-s}."""
    n = len(row)
    entries = fftconvolve(row[::-1], d)[:n]  # reversed
    return float(entries @ entries), 2 * fftconvolve(entries, row)[n - 1 : n - 1 + len(d)]


def _quadratic(Q: Floats, d: Floats) -> Valued:
    product = Q @ d
    return float(d @ product), 2 * product


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
    B = np.fft.irfft(np.fft.rfft(A[:, ::-1], 2 * n, axis=1) * spectrum, 2 * n, axis=1)[:, :n][:, ::-1]
    rows = np.square(B).sum(axis=1)
    value = float(rows.max() * ((rows / rows.max()) ** _POWER).sum() ** (1 / _POWER))
    shares = (rows / value) ** (_POWER - 1)
    G = A.T @ (shares[:, None] * B)
    return value, 2 * np.array([np.trace(G, -lag) for lag in range(len(d))])


def reciprocal(y: Floats, m: int, gradient: Callable[[Floats], Valued]) -> Valued:
    """The value of a function of x = 1 / y, m coefficients, and its gradient in y by (1)."""
    x = inverse_series(y, m)
    value, g = gradient(x)
    square = lfilter([1.0], y, x) if len(y) <= _SHORT else fftconvolve(x, x)[:m]
    if len(y) <= _SHORT:
        return value, -np.array([g[lag:] @ square[: m - lag] for lag in range(len(y))])
    return value, -fftconvolve(g[::-1], square)[:m][::-1][: len(y)]


def descend(
    loss: Callable[[Floats], Valued],
    start: Floats,
    *,
    max_iterations: int = 500,
    restarts: int = 5,
    gain: float = 1e-11,
    lowest: float | None = None,
) -> tuple[Floats, float]:
    """The local minimum of log(loss) near the start by L-BFGS, and the loss there; a loss that overflows is a wall.

    Each search ends where a step gains less than `gain`; another follows, since at the kinks of the majorant a stale
    curvature stops a search too early. No number goes below `lowest`.
    """
    from scipy.optimize import minimize  # slow to load

    def logarithm(x: Floats) -> Valued:
        with np.errstate(all="ignore"):
            value, gradient = loss(x)
            result = float(np.log(value)), gradient / value
        if not np.isfinite(result[0]) or not np.isfinite(result[1]).all():
            return _WALL, np.zeros_like(x)
        return result

    options = {"maxiter": max_iterations, "maxfun": 2 * max_iterations, "maxcor": 30, "ftol": gain, "gtol": 1e-8}
    value = np.inf
    for _ in range(restarts):
        bounds = None if lowest is None else [(lowest, None)] * len(start)
        found = minimize(logarithm, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        gained, value, start = value - float(found.fun), float(found.fun), found.x
        if gained < 1e-7:
            break
    return start, float(np.exp(value))


def square_root_start(workload: Workload, m: int) -> Floats:
    """The first m coefficients of the square root of the workload, or, with a schedule, of its constant-rate form."""
    shape = workload if workload.is_toeplitz else Workload(workload.n, momentum=getattr(workload, "momentum", 0.0))
    a = shape.toeplitz_coefficients()[:m]
    return square_root_series(a / a[0], m)


def fit_toeplitz(problem: Problem, bands: int) -> ToeplitzBanded:
    """The banded Toeplitz C of least loss: from the square root, and from the fit with half the bands."""
    return fits_toeplitz(problem, [bands])[0]


def fits_toeplitz(problem: Problem, sizes: Sequence[int]) -> list[ToeplitzBanded]:
    """`fit_toeplitz` for many sizes, each fit made once."""

    def loss(stiffness: float, free: Floats) -> Valued:
        c = np.concatenate([[1.0], free])
        error, g_error = reciprocal(c, problem.n, problem.error)
        sens, g_sens = problem.sens(c, stiffness)
        return error * sens, (g_error * sens + error * g_sens)[1:]

    return _fit_all(problem, sizes, loss, ToeplitzBanded)


def fit_banded_inverse(problem: Problem, bands: int) -> BandedInverse:
    """The C of banded Toeplitz inverse of least loss: from the inverse square root, and from half the bands."""
    return fits_banded_inverse(problem, [bands])[0]


def fits_banded_inverse(problem: Problem, sizes: Sequence[int]) -> list[BandedInverse]:
    """`fit_banded_inverse` for many sizes, each fit made once."""

    def loss(stiffness: float, free: Floats) -> Valued:
        d = np.concatenate([[1.0], free])
        sens, g_sens = reciprocal(d, problem.n, lambda c: problem.sens(c, stiffness))
        error, g_error = problem.error(d)
        return error * sens, (g_error * sens + error * g_sens)[1:]

    return _fit_all(problem, sizes, loss, BandedInverse)


def _fit_all(problem: Problem, sizes: Sequence[int], loss: Callable[[float, Floats], Valued], kind: type[T]) -> list[T]:
    """The strategies of least loss for each size; never worse than with half as many bands."""
    known = {1: np.ones(1)}

    def coefficients(bands: int) -> Floats:
        if bands not in known:
            half = coefficients(bands // 2)
            known[bands] = _fit_series(problem, half, bands, loss, inverse=issubclass(kind, BandedInverse))
        return known[bands]

    made: dict[int, tuple[T, float]] = {}

    def strategy(bands: int) -> tuple[T, float]:
        if bands not in made:
            found = kind(coefficients(bands), problem.n)
            made[bands] = found, 0.0
            if shuffled(problem.participation.pattern):
                # the loss is of one pattern of many: by the sensitivity over all, fewer bands may serve better
                own = found, _true_loss(problem, found)
                made[bands] = own if bands == 1 else min(own, strategy(bands // 2), key=lambda one: one[1])
        return made[bands]

    return [strategy(checks.integer("bands", bands, low=1, high=problem.n))[0] for bands in sizes]


def _true_loss(problem: Problem, strategy: Toeplitz) -> float:
    error, _ = problem.error(strategy.noising_coefficients())
    return error * sensitivity(strategy, problem.participation).value ** 2


def _fit_series(
    problem: Problem, half: Floats, bands: int, loss: Callable[[float, Floats], Valued], *, inverse: bool
) -> Floats:
    """The coefficients with so many bands: from those with half of them, or from the square root if that is better.

    Where c must not rise, a penalty on its rises grows until the kinks of the majorant are near.
    """
    root = square_root_start(problem.workload, bands)
    longer = np.concatenate([half, np.zeros(bands - len(half))])[1:]
    starts = [longer, (inverse_series(root, bands) if inverse else root)[1:]]
    smooth = len(problem.steps) == 1 or stride(problem.participation.pattern) is not None
    x = min(starts, key=lambda start: loss(np.inf if smooth else _STAGES[0][0], start)[0])
    for stiffness, gain, restarts in () if smooth else _STAGES:
        x, _ = descend(partial(loss, stiffness), x, gain=gain, restarts=restarts, max_iterations=300)
    tried = [descend(partial(loss, np.inf), x), (longer, loss(np.inf, longer)[0])]
    return np.concatenate([[1.0], min(tried, key=lambda result: result[1])[0]])
