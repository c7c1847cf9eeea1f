"""What all fits share: the search, the objectives, and what they need to know of a participation."""

import math
from collections.abc import Callable
from typing import TypeVar, assert_never

import numpy as np
import scipy
from numpy.typing import NDArray

from anyorder.errors import PlanError
from anyorder.patterns import Groups, Listed, Participation, Pattern, PerEpoch, Separated
from anyorder.strategy.base import Strategy
from anyorder.workload import Workload, weighted

Floats = NDArray[np.float64]


Valued = tuple[float, Floats]
"""A value and its gradient."""

OBJECTIVES = ("last", "max", "mean")


def disjoint(participation: Participation) -> Groups:
    """Disjoint patterns that cover every step, each inside a pattern that the participation allows.

    Where `describes_all`, as for SingleEpoch, FixedOrder, and a KnownOrder whose units never mix, these are all
    patterns: then a bound over them is the bound over the participation. Elsewhere they are some of them, and a lower
    bound of the error over them still holds.

    Raises: PlanError for PoissonSampling, whose noise is independent.
    """
    check_optimisable(participation)
    return participation.pattern.disjoint()


def check_optimisable(participation: Participation) -> None:
    """Raises PlanError for PoissonSampling, whose noise is independent."""
    if participation.secret:
        raise PlanError(
            f"{type(participation).__name__} is accounted for independent noise only: there is no strategy to optimise"
        )


def describes_all(participation: Participation) -> bool:
    """Whether `disjoint` leaves no pattern out."""
    return not participation.secret and participation.pattern.are_disjoint


def stride(pattern: Pattern) -> int | None:
    """The distance of all steps of every unit; None where distances differ."""
    match pattern:
        case Listed(stride=b):
            return b
        case Separated() | PerEpoch():
            return None
        case _:
            assert_never(pattern)


def epoch(pattern: Pattern) -> int | None:
    """The steps of an epoch, in which every unit comes once; None where there are no epochs."""
    match pattern:
        case Listed(stride=b):
            return b
        case PerEpoch(steps_per_epoch=s):
            return s
        case Separated():
            return None
        case _:
            assert_never(pattern)


def shuffled(pattern: Pattern) -> PerEpoch | None:
    """The pattern if its places within epochs are free; None else."""
    match pattern:
        case PerEpoch():
            return pattern
        case Listed() | Separated():
            return None
        case _:
            assert_never(pattern)


# -- objectives ------------------------------------------------------------------------------------------------------

# The maximum and the last error for fits that know the mean error only: rows of A weighted.


_OTHERS = 0.03  # weight of all other iterates where the last alone counts: without them no C attains the optimum
_ROUNDS = 8  # of reweighting rows

S = TypeVar("S", bound=Strategy)


def of_objective(variances: Floats, objective: str) -> float:
    """The squared error that counts, of those of all iterates."""
    return float({"mean": variances.mean(), "max": variances.max(), "last": variances[-1]}[objective])


def mostly_last(workload: Workload) -> Workload:
    """The workload in which the last iterate counts, and the others a thousandth each."""
    weights = np.full(workload.n, _OTHERS)
    weights[-1] = 1.0
    return weighted(workload, weights)


def by_rows(fit: Callable[[Workload], S], workload: Workload, variances: Callable[[S, Workload], Floats]) -> S:
    """The strategy of least maximum error of some: fitted to the mean error, rows weighted until their errors are even.

    Args:
        fit: the strategy of one sensitivity that suits a workload's mean error.
        variances: of its kind, the squared errors of all iterates.
    """
    weights, least = np.ones(workload.n), math.inf
    for _ in range(_ROUNDS):
        found = fit(weighted(workload, np.sqrt(weights)))
        errors = variances(found, workload)
        if errors.max() < least:
            best, least = found, float(errors.max())
        weights = np.maximum(weights * errors / errors.max(), 1e-6)
    return best


# -- the search ------------------------------------------------------------------------------------------------------

_WALL = 60.0  # the logarithm of a loss beyond all that are of use, so that a search turns back


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
        found = scipy.optimize.minimize(logarithm, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        gained, value, start = value - float(found.fun), float(found.fun), found.x
        if gained < 1e-7:
            break
    return start, float(np.exp(value))
