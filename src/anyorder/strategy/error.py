"""The variance of every iterate's noise, for any strategy and workload, at any n that has a way in good time.

The iterate p is the second number of a state w = (velocity, p) that moves with the noise eta_t of each step,

    w <- M_t w + N_t s_t eta_t,      eta = K Z,

M_t and N_t of the workload (`Workload.recurrence`), s_t a factor of `Rescaled`. What eta is to w decides the way, which
the row of a kind in `registry` says and its file holds:

- Toeplitz C and A: the rows of A K are those of one series, its cumulative energy (O(n) after the coefficients).
- recurrences of a state of few numbers: the covariance of state and w, many blocks of steps side by side (`variances`).
- bands: a block of steps is a small dense map of the last p - 1 outputs or rows of Z (`variances`).
- trees: subtrees of a size side by side, from the leaves up (`tree`).
- else K itself, column by column.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from anyorder.errors import PlanError
from anyorder.patterns import Participation
from anyorder.strategy.base import DENSE_STEPS, Strategy
from anyorder.strategy.fitting import of_objective
from anyorder.strategy.registry import kind_of
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.sensitivity import sensitivity
from anyorder.strategy.toeplitz import Toeplitz
from anyorder.strategy.variances import by_columns, of_iterates
from anyorder.workload import GivenWorkload, Workload

__all__ = ["last_error", "max_error", "rmse", "row_variances"]

Floats = NDArray[np.float64]
COLUMN_STEPS = 16384  # up to which the columns of K are made one after the other


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
    return kind_of(inner).variances.way(inner) is not None or (series and workload.n <= COLUMN_STEPS)


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
    if workload.is_prefix_sum and kind_of(strategy).variances.closed:
        return strategy.prefix_variance()
    inner, scales = _unscaled(strategy)
    if isinstance(inner, Toeplitz) and scales is None and workload.is_toeplitz:
        return np.asarray(np.cumsum(np.square(workload.apply(inner.noising_coefficients()))))
    way = None if isinstance(workload, GivenWorkload) else kind_of(inner).variances.way(inner)
    if way is None:
        return _by_columns(inner, scales, workload)
    return of_iterates(inner, workload, way, scales)


def _unscaled(strategy: Strategy) -> tuple[Strategy, Floats | None]:
    """The strategy without scales, and their product."""
    scales = None
    while isinstance(strategy, Rescaled):
        scales = strategy.scales if scales is None else scales * strategy.scales
        strategy = strategy.strategy
    return strategy, scales


def _by_columns(strategy: Strategy, scales: Floats | None, workload: Workload) -> Floats:
    """From K itself, which a long Toeplitz one is a view of."""
    n = strategy.n
    if not isinstance(strategy, Toeplitz) or n <= DENSE_STEPS:
        return by_columns(strategy.noising_matrix(), workload, scales)
    padded = np.concatenate([np.zeros(n), strategy.noising_coefficients()])
    return by_columns(sliding_window_view(padded, n)[::-1].T[:, :n], workload, scales)  # [t, s] = g_{t-s}


# -- measures --------------------------------------------------------------------------------------------------------

# Root mean square errors of the iterates.
#
# All are at clip norm 1 and sigma 1 (std = sens): multiply by sigma * clip_norm for the noise of one coordinate of the
# iterate, in units of the learning rate.


def rmse(strategy: Strategy, workload: Workload, participation: Participation) -> float:
    """The root mean square error over the weights during training: sens * || A K ||_F / sqrt(n).  [Denisov et al.
    2022, Eq. 2]
    """
    return _sens(strategy, participation) * math.sqrt(row_variances(strategy, workload).mean())


def max_error(strategy: Strategy, workload: Workload, participation: Participation) -> float:
    """The root mean square error of the worst iterate: sens * max_t || (A K)[t] ||."""
    return _sens(strategy, participation) * math.sqrt(row_variances(strategy, workload).max())


def last_error(strategy: Strategy, workload: Workload, participation: Participation) -> float:
    """The root mean square error of the last iterate: sens * || (A K)[n - 1] ||."""
    return _sens(strategy, participation) * math.sqrt(row_variances(strategy, workload)[-1])


def _sens(strategy: Strategy, participation: Participation) -> float:
    return sensitivity(strategy, participation).value


def squared_error(strategy: Strategy, workload: Workload, objective: str) -> float:
    """The squared error of the objective, for rows of Z of variance 1."""
    return of_objective(row_variances(strategy, workload), objective)


RENAMED: dict[str, Callable[..., float]] = {"max_loss": max_error, "last_loss": last_error}


def __getattr__(name: str) -> Any:
    if name not in RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return renamed(name)


def renamed(name: str) -> Callable[..., float]:
    """What an old name stands for, with a warning to whoever reads the attribute of a module."""
    now = RENAMED[name]
    message = f"{name} is now called {now.__name__}; the old name goes with the next version"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return now
