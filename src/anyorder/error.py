"""How much noise reaches the iterates: the rows of B = A K, times the sensitivity.

All errors are at clip norm 1 and sigma 1 (std = sens), root scale: multiply by sigma * clip_norm
for the noise of one coordinate of the iterate, in units of the learning rate.
"""

import math

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import PlanError
from anyorder.participation import Participation
from anyorder.sensitivity import sensitivity
from anyorder.strategy import Strategy
from anyorder.workload import Workload

__all__ = ["last_loss", "max_loss", "rmse", "row_variances"]

_COLUMNS = 512  # of K that are multiplied by A at once


def rmse(strategy: Strategy, workload: Workload, participation: Participation) -> float:
    """The root mean square error over all iterates: sens * || A K ||_F / sqrt(n).  [Denisov et al. 2022, Eq. 2]"""
    return _sens(strategy, participation) * math.sqrt(row_variances(strategy, workload).mean())


def max_loss(strategy: Strategy, workload: Workload, participation: Participation) -> float:
    """The root mean square error of the worst iterate: sens * max_t || (A K)[t] ||."""
    return _sens(strategy, participation) * math.sqrt(row_variances(strategy, workload).max())


def last_loss(strategy: Strategy, workload: Workload, participation: Participation) -> float:
    """The root mean square error of the last iterate: sens * || (A K)[n - 1] ||."""
    return _sens(strategy, participation) * math.sqrt(row_variances(strategy, workload)[-1])


def row_variances(strategy: Strategy, workload: Workload) -> NDArray[np.float64]:
    """(n,) || (A K)[t] ||^2: the variance of each iterate's noise for rows of Z of variance 1, no sensitivity.

    Cost: `Strategy.prefix_variance` for the prefix sum; else the dense K, O(n num_rows).
    Raises: PlanError where the workload has another number of steps.
    """
    if workload.n != strategy.n:
        raise PlanError(f"workload and strategy must have the same number of steps, got {workload.n} and {strategy.n}")
    if workload.is_prefix_sum:
        return strategy.prefix_variance()
    K = strategy.noising_matrix()
    variance = np.zeros(strategy.n)
    for start in range(0, K.shape[1], _COLUMNS):
        variance += np.square(workload.apply(K[:, start : start + _COLUMNS])).sum(axis=1)
    return variance


def _sens(strategy: Strategy, participation: Participation) -> float:
    return sensitivity(strategy, participation).value
