"""What all fits share: the search, the objectives, and what they need to know of a participation."""

import math
from collections import deque
from collections.abc import Callable
from typing import TypeVar, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import PlanError
from anyorder.patterns import Groups, Listed, Participation, Pattern, PerEpoch, Separated
from anyorder.strategy.arithmetic import dot, exp, log
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

# By quasi-Newton steps of limited memory [Nocedal & Wright 2006, Algorithm 7.4], in arithmetic that has the same bits
# everywhere, see `anyorder.strategy.arithmetic`; a line is searched by halves for a point that descends enough and is
# no longer as steep (weak Wolfe conditions), which also ends at a kink [Lewis & Overton 2013].

_WALL = 60.0  # the logarithm of a loss beyond all that are of use, so that a search turns back
_MEMORY = 30
_LOOKS = 12  # along a line
_ENOUGH, _STILL_STEEP = 1e-4, 0.9
_FLAT = 1e-8  # a largest entry of the gradient at which a search ends


def descend(
    loss: Callable[[Floats], Valued],
    start: Floats,
    *,
    max_iterations: int = 500,
    restarts: int = 5,
    gain: float = 1e-11,
    lowest: float = -math.inf,
) -> tuple[Floats, float]:
    """The local minimum of log(loss) near the start by L-BFGS, and the loss there; a loss that overflows is a wall.

    Each search ends where a step gains less than `gain`; another follows, since at the kinks of the majorant a stale
    curvature stops a search too early. No number goes below `lowest`.
    """

    def logarithm(x: Floats) -> Valued:
        with np.errstate(all="ignore"):
            value, gradient = loss(x)
            if not 0 < value < math.inf or not np.isfinite(gradient := gradient / value).all():
                return _WALL, np.zeros_like(x)
        return log(value), gradient

    value = math.inf
    for _ in range(restarts):
        start, found = _search(logarithm, np.maximum(start, lowest), max_iterations, gain, lowest)
        gained, value = value - found, found
        if gained < 1e-7:
            break
    return start, exp(value)


def _search(
    function: Callable[[Floats], Valued], x: Floats, max_iterations: int, gain: float, lowest: float
) -> tuple[Floats, float]:
    """One descent; numbers at `lowest` that would go below it stay there."""
    value, gradient = function(x)
    moves: deque[tuple[Floats, Floats, float]] = deque(maxlen=_MEMORY)
    bound = np.zeros(len(x), dtype=bool)
    for _ in range(max_iterations):
        before, bound = bound, (x <= lowest) & (gradient > 0)
        if (bound != before).any():
            moves.clear()  # a curvature among other numbers
        free = np.where(bound, 0.0, gradient)
        if np.abs(free).max() <= _FLAT:
            break
        way = -_quasi_newton(free, moves)
        if dot(way, free) >= 0:
            moves.clear()
            way = -free
        first = 1.0 if moves else min(1.0, 1 / float(np.abs(free).sum()))
        there = _along(function, x, value, gradient, way, first, lowest)
        if there is None:
            if not moves:
                break
            moves.clear()  # from here by the gradient
            continue
        moved, new, slope = there
        gained = value - new
        change = np.where(bound, 0.0, slope - gradient)
        if (curvature := dot(moved - x, change)) > 2.0**-52 * dot(change, change):
            moves.append((moved - x, change, curvature))
        x, value, gradient = moved, new, slope
        if gained <= gain * max(abs(value), abs(value + gained), 1.0):
            break
    return x, value


def _quasi_newton(gradient: Floats, moves: "deque[tuple[Floats, Floats, float]]") -> Floats:
    """H gradient, H the inverse curvature that the moves show."""
    result, shares = gradient, []
    for move, change, curvature in reversed(moves):
        share = dot(move, result) / curvature
        shares.append(share)
        result = result - share * change
    if moves:
        move, change, curvature = moves[-1]
        result = result * (curvature / dot(change, change))
    for (move, change, curvature), share in zip(moves, reversed(shares), strict=True):
        result = result + (share - dot(change, result) / curvature) * move
    return result


def _along(
    function: Callable[[Floats], Valued], x: Floats, value: float, gradient: Floats, way: Floats, step: float,
    lowest: float,
) -> tuple[Floats, float, Floats] | None:  # fmt: skip
    """A point on the way that is lower enough and no longer as steep, with value and gradient; None where none is."""
    low, high, steep = 0.0, math.inf, dot(way, gradient)
    best = None
    for _ in range(_LOOKS):
        moved = np.maximum(x + step * way, lowest)
        new, slope = function(moved)
        if new > value + _ENOUGH * dot(gradient, moved - x):
            high = step
        elif dot(slope, way) < _STILL_STEEP * steep:
            low, best = step, (moved, new, slope)
        else:
            return moved, new, slope
        if high == math.inf:
            step = 2 * low
        elif best is None and new < _WALL and new > value + step * steep:
            step = min(max(-steep * step * step / (2 * (new - value - step * steep)), 0.1 * step), 0.5 * step)
        else:
            step = (low + high) / 2
    return best
