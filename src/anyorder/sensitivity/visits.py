"""Who is where: the steps of many units as flat arrays, so that a million patterns are summed at once."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anyorder.patterns import Listed
from anyorder.sensitivity.bound import Bound, from_sum

__all__ = ["TOLERANCE", "UnitSquares", "Visits", "better", "largest", "visits"]

TOLERANCE = 1e-12  # an upper and a lower bound this close, relative, differ by rounding only

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Visits(NamedTuple):
    """One entry for each participation, sorted by unit, then step.

    Attributes:
        n: number of steps.
        num_units: number of units U.
        steps: (M,) step.
        indices: (M,) unit, 0 <= index < U; every unit has at least one entry.
        ranks: (M,) number of earlier participations of the same unit.
    """

    n: int
    num_units: int
    steps: Integers
    indices: Integers
    ranks: Integers

    def per_unit(self, values: Floats) -> Floats:
        """(U,) sums of (M,) values."""
        return np.bincount(self.indices, weights=values, minlength=self.num_units).astype(np.float64)


class UnitSquares(NamedTuple):
    """Squared sensitivities of units: never below the true ones, and what vectors that are all equal attain."""

    upper: Floats
    lower: Floats


def visits(listed: Listed) -> Visits:
    """The units of a list of patterns, with ranks."""
    starts = np.searchsorted(listed.indices, np.arange(listed.num_units))
    ranks = np.arange(len(listed.steps)) - starts[listed.indices]
    return Visits(listed.n, listed.num_units, listed.steps, listed.indices, ranks)


def largest(squares: UnitSquares, terms: int) -> Bound:
    """The sensitivity over all units; exact where the largest upper bound is attained."""
    upper, lower = float(squares.upper.max()), float(squares.lower.max())
    return from_sum(upper, terms, exact=upper <= lower * (1 + TOLERANCE))


def better(first: Bound, second: Bound) -> Bound:
    """The smaller one; an exact one is the smaller one up to rounding."""
    if first.exact or second.exact:
        return first if first.exact else second
    return min(first, second, key=lambda bound: bound.value)
