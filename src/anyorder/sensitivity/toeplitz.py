"""Toeplitz C: the first participation as early as possible, the others as close as possible."""

from collections.abc import Callable, Iterator
from typing import assert_never

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft

from anyorder.formats import check_work
from anyorder.patterns import Listed, Pattern, PerEpoch, Separated
from anyorder.sensitivity import banded, dense
from anyorder.sensitivity.bound import Bound, from_sum, roots
from anyorder.sensitivity.shuffled import toeplitz_bound
from anyorder.sensitivity.visits import TOLERANCE, UnitSquares, Visits, better, largest, visits
from anyorder.strategy import Toeplitz, ToeplitzBanded

__all__ = ["bound", "gram_matrix", "majorant", "unit_squares", "units"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_GRAM = 4096  # steps up to which X itself is an option
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
    if not found.exact and strategy.n <= MAX_GRAM:
        X = gram_matrix(strategy.toeplitz_coefficients())
        found = better(found, dense.gram_bound(X, pattern, terms=strategy.n))
    return found


def _listed(strategy: Toeplitz, pattern: Listed) -> Bound:
    b = pattern.stride
    if b is None:
        return largest(_unit_squares(strategy, visits(pattern)), _terms(strategy, pattern))
    found = _banded(strategy, pattern, _equidistant(strategy, b, pattern.max_participations, np.abs))
    if found.exact:
        return found
    steps = np.arange(0, strategy.n, b)
    if len(steps) * strategy.n > MAX_GRAM**2:
        return found
    columns = strategy.columns(steps)
    one = Listed.strided(len(steps), 1)
    return better(found, dense.gram_bound(columns.T @ columns, one, terms=strategy.n))


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


def _banded(strategy: Toeplitz, pattern: Pattern, found: Bound) -> Bound:
    """The bands of X, where it has few."""
    if found.exact or type(strategy) is not ToeplitzBanded:
        return found
    return better(found, banded.gram_bound(banded.gram_of(strategy), pattern))


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
        return banded.unit_squares(banded.gram_of(strategy), units)
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
    size = next_fast_len(2 * n, real=True)
    overlaps = irfft(np.square(np.abs(rfft(np.abs(c), size))), size)[:n]

    def entry(gaps: Integers, steps: Integers) -> Floats:
        pairs = np.where(gaps == 0, norms[steps], overlaps[gaps])
        return np.asarray(pairs * weights[steps] * weights[steps + gaps])

    upper = banded.unit_squares(banded.Gram(n, n, entry), units).upper
    return UnitSquares(upper, np.zeros_like(upper))


def _terms(strategy: Toeplitz, pattern: Pattern) -> int:
    return strategy.n + pattern.max_participations
