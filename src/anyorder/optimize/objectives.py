"""The maximum and the last error for fits that know the mean error only: rows of A weighted."""

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from anyorder.error import row_variances
from anyorder.strategy import Strategy
from anyorder.workload import Workload, weighted

__all__ = ["by_rows", "mostly_last", "squared_error"]

_OTHERS = 0.03  # weight of all other iterates where the last alone counts: without them no C attains the optimum
_ROUNDS = 8  # of reweighting rows

S = TypeVar("S", bound=Strategy)


def mostly_last(workload: Workload) -> Workload:
    """The workload in which the last iterate counts, and the others a thousandth each."""
    weights = np.full(workload.n, _OTHERS)
    weights[-1] = 1.0
    return weighted(workload, weights)


def by_rows(fit: Callable[[Workload], S], workload: Workload) -> S:
    """The strategy of least maximum error of some: fitted to the mean error, rows weighted until their errors are even.

    Args:
        fit: the strategy of one sensitivity that suits a workload's mean error.
    """
    weights, least = np.ones(workload.n), math.inf
    for _ in range(_ROUNDS):
        found = fit(weighted(workload, np.sqrt(weights)))
        errors = row_variances(found, workload)
        if errors.max() < least:
            best, least = found, float(errors.max())
        weights = np.maximum(weights * errors / errors.max(), 1e-6)
    return best


def squared_error(strategy: Strategy, workload: Workload, objective: str) -> float:
    """The squared error of the objective, for rows of Z of variance 1."""
    variances = row_variances(strategy, workload)
    return float({"mean": variances.mean(), "max": variances.max(), "last": variances[-1]}[objective])
