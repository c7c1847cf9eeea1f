"""The variance of every iterate's noise, for any strategy and workload, at any n that has a way in good time.

The iterate p is the second number of a state w = (velocity, p) that moves with the noise eta_t of each step,

    w <- M_t w + N_t s_t eta_t,      eta = K Z,

M_t and N_t of the workload (`Workload.recurrence`), s_t a factor of `Rescaled`. What eta is to w decides the way:

- Toeplitz C and A: the rows of A K are those of one series, its cumulative energy (O(n) after the coefficients).
- recurrences of a state of few numbers: the covariance of state and w, many blocks of steps side by side (`blocks`).
- bands: a block of steps is a small dense map of the last p - 1 outputs or rows of Z (`blocks`).
- trees: subtrees of a size side by side, from the leaves up (`trees`).
- else K itself, column by column.
"""

from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.error.blocks import by_bands, by_recurrence, combined, substituted
from anyorder.error.trees import of_tree
from anyorder.errors import PlanError
from anyorder.strategy import Banded, Rescaled, Strategy, Toeplitz, ToeplitzBanded, Tree
from anyorder.strategy.kinds import Structure, kind_of
from anyorder.workload import Workload
from anyorder.workload.given import GivenWorkload

__all__ = ["has_variances", "row_variances"]

Floats = NDArray[np.float64]

DENSE_STEPS = 4096  # for which K is made in full
COLUMN_STEPS = 16384  # and for which its columns are made one after the other
_MOST_BANDS = 1024
_COLUMNS = 512  # of K that are multiplied by A at once


def has_variances(strategy: Strategy, workload: Workload) -> bool:
    """Whether `row_variances` knows a way that n allows."""
    if workload.n <= DENSE_STEPS:
        return True
    inner, scales = _unscaled(strategy)
    series = isinstance(inner, Toeplitz)
    if series and scales is None and workload.is_toeplitz:
        return True
    if isinstance(workload, GivenWorkload):
        return series and workload.n <= COLUMN_STEPS
    match kind_of(inner).structure:
        case Structure.DENSE | Structure.LOW_RANK:
            return False
        case Structure.TOEPLITZ:
            assert isinstance(inner, Toeplitz)
            return workload.n <= COLUMN_STEPS or len(_trimmed(inner.noising_coefficients())) <= _MOST_BANDS
        case _:
            return True


def row_variances(strategy: Strategy, workload: Workload) -> Floats:
    """(n,) || (A K)[t] ||^2: the variance of each iterate's noise for rows of Z of variance 1, no sensitivity.

    Cost: O(n log n) for Toeplitz C and A, O(n m^3) for m buffers, O(n p^2) for p bands, O(n log n) for trees, all in
        less than a second for n = 10^5; O(n^3) for Dense and BandedLowRank; O(n^2) for SquareRoot and a schedule.
    Raises: PlanError where the workload has another number of steps, or n is too large, see `has_variances`.
    """
    n = strategy.n
    if workload.n != n:
        raise PlanError(f"workload and strategy must have the same number of steps, got {workload.n} and {n}")
    if not has_variances(strategy, workload):
        most = COLUMN_STEPS if isinstance(_unscaled(strategy)[0], Toeplitz) else DENSE_STEPS
        raise PlanError(
            f"the error of {strategy!r} for {workload!r} must be made from the matrix C^-1, for at most {most} steps, "
            f"got {n}; a strategy with a small state (BLT, Banded, BandedInverse, Tree) has no such limit"
        )
    if workload.is_prefix_sum and kind_of(strategy).structure in (Structure.IDENTITY, Structure.TREE):
        return strategy.prefix_variance()  # in closed form
    inner, scales = _unscaled(strategy)
    if isinstance(inner, Toeplitz) and scales is None and workload.is_toeplitz:
        return np.asarray(np.cumsum(np.square(workload.apply(inner.noising_coefficients()))))
    if isinstance(workload, GivenWorkload):
        return _by_columns(inner, scales, workload)
    M, N = workload.recurrence()
    if scales is not None:
        N = N * scales[:, None]
    return _moved(inner, M, N, scales, workload)


def _moved(strategy: Strategy, M: Floats, N: Floats, scales: Floats | None, workload: Workload) -> Floats:
    squares = np.square(workload.weights)
    structure = kind_of(strategy).structure
    match structure:
        case Structure.IDENTITY | Structure.BUFFERED | Structure.RESTARTED:
            return by_recurrence(strategy.recurrences, M, N) * squares
        case Structure.BANDED:
            assert isinstance(strategy, Banded)
            return by_bands(substituted(strategy.bands, strategy.n), M, N) * squares
        case Structure.TOEPLITZ_BANDED:
            assert isinstance(strategy, ToeplitzBanded)
            return by_bands(substituted(strategy.coefficients[:, None], strategy.n), M, N) * squares
        case Structure.TREE:
            assert isinstance(strategy, Tree)
            return of_tree(strategy, M, N) * squares
        case Structure.TOEPLITZ:
            assert isinstance(strategy, Toeplitz)
            g = _trimmed(strategy.noising_coefficients())
            if len(g) <= _MOST_BANDS:
                return by_bands(combined(g, strategy.n), M, N) * squares
            return _by_columns(strategy, scales, workload)
        case Structure.DENSE | Structure.LOW_RANK:
            return _by_columns(strategy, scales, workload)
        case Structure.RESCALED:
            raise AssertionError("scales were taken off")
        case _:
            assert_never(structure)


def _unscaled(strategy: Strategy) -> tuple[Strategy, Floats | None]:
    """The strategy without scales, and their product."""
    scales = None
    while isinstance(strategy, Rescaled):
        scales = strategy.scales if scales is None else scales * strategy.scales
        strategy = strategy.strategy
    return strategy, scales


def _by_columns(strategy: Strategy, scales: Floats | None, workload: Workload) -> Floats:
    """The sums of squares of the rows of A K, so many columns of K at a time."""
    n = strategy.n
    if isinstance(strategy, Toeplitz) and n > DENSE_STEPS:
        padded = np.concatenate([np.zeros(n), strategy.noising_coefficients()])
        entries = np.lib.stride_tricks.sliding_window_view(padded, n)[::-1].T  # [t, s] = g_{t-s}
    else:
        entries = strategy.noising_matrix()
    result = np.zeros(n)
    for start in range(0, strategy.num_rows, _COLUMNS):
        columns = entries[:, start : start + _COLUMNS]
        result += np.square(workload.apply(columns if scales is None else scales[:, None] * columns)).sum(axis=1)
    return result


def _trimmed(series: Floats) -> Floats:
    """Without the zeros at its end."""
    return series[: int(np.flatnonzero(series)[-1]) + 1]
