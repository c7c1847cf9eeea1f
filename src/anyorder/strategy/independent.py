"""C = I: independent noise at every step, as in DP-SGD."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.patterns import Listed, Pattern
from anyorder.strategy.base import Combination, Recurrence, Terms
from anyorder.strategy.sensitivity import NO_CHANGE, Bound, Change, from_integer, roots
from anyorder.strategy.variances import Way, by_recurrence


@final
class Independent(Combination):
    """Independent noise at every step: C = I, the noise of DP-SGD.

    The prefix sum of t + 1 gradients has noise variance t + 1.

    Args:
        n: number of steps.
    """

    def __init__(self, n: int) -> None:
        self._n = checks.integer("n", n, low=1)

    @property
    def n(self) -> int:
        """Number of steps."""
        return self._n

    @property
    def restart_period(self) -> int:
        """1: every step's noise is its own."""
        return 1

    def matrix(self) -> NDArray[np.float64]:
        """The identity, (n, n)."""
        return np.eye(self._n)

    def terms(self, t: int) -> Terms:
        """Row t alone."""
        return Terms(np.array([t], dtype=np.int64), np.ones(1))

    def recurrences(self, steps: NDArray[np.int64]) -> Recurrence:
        """No state."""
        k = len(steps)
        return Recurrence(np.zeros((k, 0, 0)), np.zeros((k, 0)), np.zeros((k, 0)), np.ones(k))

    def prefix_variance(self) -> NDArray[np.float64]:
        """1, 2, .., n."""
        return np.arange(1.0, self._n + 1)

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "independent", "n": n}."""
        return {"kind": "independent", "n": self._n}

    def describe(self) -> str:
        """Return a phrase for people."""
        return "independent noise at every step"

    def __repr__(self) -> str:
        return f"Independent(n={self._n})"


# -- sensitivity -----------------------------------------------------------------------------------------------------

# C = I: the steps of one unit are orthogonal.


def bound(strategy: Independent, pattern: Pattern) -> Bound:
    """sens^2 = the largest number of steps of one unit."""
    return from_integer(pattern.max_participations)


def units(strategy: Independent, listed: Listed) -> NDArray[np.float64]:
    """Of each unit: the root of its number of steps."""
    return roots(np.bincount(listed.indices), 1)


# -- error -----------------------------------------------------------------------------------------------------------


def way(strategy: Independent) -> Way:
    """Of iterates: a recurrence without a state."""
    return partial(by_recurrence, strategy.recurrences)


# -- rounding --------------------------------------------------------------------------------------------------------


def change(strategy: Independent) -> Change:
    """None: 1 is a float32."""
    del strategy
    return NO_CHANGE


def under_coins(strategy: Independent, change: Change) -> float:
    """Nor here."""
    del strategy, change
    return 0.0
