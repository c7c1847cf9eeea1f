"""A sensitivity as a number that is never below the true one."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final

__all__ = ["Bound", "from_integer", "from_sum", "roots"]


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
