"""C = I: the steps of one unit are orthogonal."""

import numpy as np
from numpy.typing import NDArray

from anyorder.patterns import Listed, Pattern
from anyorder.sensitivity.bound import Bound, from_integer, roots
from anyorder.strategy import Independent

__all__ = ["bound", "units"]


def bound(strategy: Independent, pattern: Pattern) -> Bound:
    """sens^2 = the largest number of steps of one unit."""
    return from_integer(pattern.max_participations)


def units(strategy: Independent, listed: Listed) -> NDArray[np.float64]:
    """Of each unit: the root of its number of steps."""
    return roots(np.bincount(listed.indices), 1)
