"""A sensitivity as a number that is never below the true one."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.formats import html_table
from anyorder.patterns import Listed

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@final
@dataclass(frozen=True)
class Bound:
    """An L2 sensitivity at clip norm 1, root scale.

    Attributes:
        value: never below the true sensitivity.
        exact: whether it is proven equal to it, up to rounding.
    """

    value: float
    exact: bool

    def __post_init__(self) -> None:
        checks.real("value", self.value, low=0.0)

    def _repr_html_(self) -> str:
        kind = "exact" if self.exact else "an upper bound"
        return html_table([("sensitivity", f"{self.value:.6g} clip norms"), ("which is", kind)])


def from_integer(squared: int) -> Bound:
    """An exact sensitivity from its square: the least float whose square is not below."""
    value = math.sqrt(squared)
    while Fraction(value) ** 2 < squared:
        value = math.nextafter(value, math.inf)
    return Bound(value, exact=True)


def from_sum(squared: float, terms: int, *, exact: bool) -> Bound:
    """From a square that was summed in floats from `terms` products, rounded up by their largest rounding error."""
    return Bound(math.sqrt(squared * (1 + _slack(terms))), exact)


def roots(squared: NDArray[np.float64] | NDArray[np.int64], terms: int) -> NDArray[np.float64]:
    """Square roots, rounded up; those of integers are rounded only where they are not integers."""
    values = np.sqrt(squared, dtype=np.float64)
    if squared.dtype.kind == "i":
        return np.where(values**2 == squared, values, np.nextafter(values, np.inf))
    return np.asarray(values * (1 + _slack(terms)))


def _slack(terms: int) -> float:
    return (terms + 4) * float(np.finfo(np.float64).eps)


# -- units in lists --------------------------------------------------------------------------------------------------

# Who is where: the steps of many units as flat arrays, so that a million patterns are summed at once.


TOLERANCE = 1e-12  # an upper and a lower bound this close, relative, differ by rounding only


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
