"""What the optimisers need to know of a participation: disjoint sets of steps that one unit can take together."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import PlanError
from anyorder.participation import (
    EpochShuffle,
    FixedOrder,
    KnownOrder,
    MinSeparation,
    Participation,
    PoissonSampling,
    SingleEpoch,
)

__all__ = ["Groups", "check_optimisable", "describes_all", "disjoint", "grouped", "spread"]

Groups = list[NDArray[np.int64]]
"""Patterns of equal length together: arrays (number of patterns, length) of steps."""


def disjoint(participation: Participation) -> Groups:
    """Disjoint patterns that cover every step, each inside a pattern that the participation allows.

    For SingleEpoch, FixedOrder, and a KnownOrder whose units never mix these are all patterns: then a bound over them
    is the bound over the participation (`describes_all`). For MinSeparation, EpochShuffle and other known orders they
    are some of them, and a lower bound of the error over them still holds.

    Raises: PlanError for PoissonSampling, whose noise is independent.
    """
    check_optimisable(participation)
    n = participation.n
    if isinstance(participation, KnownOrder):
        return grouped(_owners(participation), n)
    stride = n if isinstance(participation, SingleEpoch) else min(spread(participation), n)
    table = np.arange(-(-n // stride) * stride).reshape(-1, stride).T
    whole = stride if n % stride == 0 else n % stride  # patterns of full length; the others lack the last step
    return [part for part in (table[whole:, :-1], table[:whole]) if part.size]


def check_optimisable(participation: Participation) -> None:
    """Raises PlanError for PoissonSampling, whose noise is independent."""
    if isinstance(participation, PoissonSampling):
        raise PlanError("PoissonSampling is accounted for independent noise only: there is no strategy to optimise")


def spread(participation: Participation) -> int:
    """A distance b such that the patterns j, j + b, j + 2b, .. within n steps are allowed: as long as can be."""
    if isinstance(participation, FixedOrder):
        return participation.b
    if isinstance(participation, EpochShuffle):
        return participation.steps_per_epoch
    k = participation.max_participations
    return max(participation.min_separation, -(-participation.n // k))


def describes_all(participation: Participation) -> bool:
    """Whether `disjoint` leaves no pattern out."""
    if isinstance(participation, KnownOrder):
        steps = [frozenset(pattern) for pattern in participation.patterns()]
        return len(set().union(*steps)) == sum(len(pattern) for pattern in set(steps))
    if isinstance(participation, (EpochShuffle, MinSeparation)):
        return participation.max_participations == 1
    return isinstance(participation, (SingleEpoch, FixedOrder))


def grouped(patterns: list[NDArray[np.int64]], n: int) -> Groups:
    """The patterns sorted by length into rectangular arrays; steps in none of them come alone."""
    missing = np.setdiff1d(np.arange(n), np.concatenate(patterns))
    patterns = patterns + [missing[i : i + 1] for i in range(len(missing))]
    lengths = np.array([len(pattern) for pattern in patterns])
    return [np.array([p for p in patterns if len(p) == length]) for length in np.unique(lengths) if length]


def _owners(order: KnownOrder) -> list[NDArray[np.int64]]:
    """Each step given to one of its units, those with most free steps first."""
    bounds = np.searchsorted(order.indices, np.arange(len(order.units) + 1))
    free = np.ones(order.n, dtype=bool)
    result = []
    for i, j in sorted(pairwise(bounds.tolist()), key=lambda bound: bound[0] - bound[1]):
        steps = order.steps[i:j][free[order.steps[i:j]]]
        if steps.size:
            free[steps] = False
            result.append(steps)
    return result
