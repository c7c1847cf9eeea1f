"""Root mean square errors of the iterates.

All are at clip norm 1 and sigma 1 (std = sens): multiply by sigma * clip_norm for the noise of one coordinate of the
iterate, in units of the learning rate.
"""

import math

from anyorder.error.variance import row_variances
from anyorder.patterns import Participation
from anyorder.sensitivity import sensitivity
from anyorder.strategy import Strategy
from anyorder.workload import Workload

__all__ = ["last_error", "max_error", "rmse"]


def rmse(strategy: Strategy, workload: Workload, participation: Participation) -> float:
    """The root mean square error over all iterates: sens * || A K ||_F / sqrt(n).  [Denisov et al. 2022, Eq. 2]"""
    return _sens(strategy, participation) * math.sqrt(row_variances(strategy, workload).mean())


def max_error(strategy: Strategy, workload: Workload, participation: Participation) -> float:
    """The root mean square error of the worst iterate: sens * max_t || (A K)[t] ||."""
    return _sens(strategy, participation) * math.sqrt(row_variances(strategy, workload).max())


def last_error(strategy: Strategy, workload: Workload, participation: Participation) -> float:
    """The root mean square error of the last iterate: sens * || (A K)[n - 1] ||."""
    return _sens(strategy, participation) * math.sqrt(row_variances(strategy, workload)[-1])


def _sens(strategy: Strategy, participation: Participation) -> float:
    return sensitivity(strategy, participation).value
