"""Trees: sens^2 is the largest sum of squared counts, over the nodes, of the steps of one unit under the node.

C^T C counts the nodes that two steps share, so it has no negative entry and this is exact for every pattern.
All counts are integers: no rounding before the last root.
"""

from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.patterns import Listed, Pattern, PerEpoch, Separated
from anyorder.sensitivity import tree_epochs, tree_separation
from anyorder.sensitivity.bound import Bound, from_integer, roots
from anyorder.strategy import Tree

__all__ = ["bound", "units"]

Integers = NDArray[np.int64]


def bound(strategy: Tree, pattern: Pattern) -> Bound:
    """Exact. Costs: see `units`, `tree_epochs`, `tree_separation`."""
    match pattern:
        case Listed():
            squared = int(_counts_squared(strategy, pattern.steps, pattern.indices).max())
        case Separated(b=b):
            squared = tree_separation.squared(strategy, b, pattern.max_participations)
        case PerEpoch(steps_per_epoch=s):
            squared = tree_epochs.squared(strategy, s)
        case _:
            assert_never(pattern)
    return from_integer(squared)


def units(strategy: Tree, listed: Listed) -> NDArray[np.float64]:
    """Of each unit, [Kairouz et al. 2021, Alg. 4]: O(M log n) for M participations."""
    return roots(_counts_squared(strategy, listed.steps, listed.indices), 1)


def _counts_squared(strategy: Tree, steps: Integers, units: Integers) -> Integers:
    """Of each unit, the sum of its squared counts. `steps` sorted by unit, then step, so equal nodes are adjacent."""
    starts = np.array([tree.start for tree in strategy.subtrees])
    levels = np.array([tree.level for tree in strategy.subtrees])
    trees = np.searchsorted(starts, steps, side="right") - 1
    squared = np.zeros(int(units.max()) + 1, dtype=np.int64)
    for level in range(int(levels.max()) + 1):
        has = levels[trees] >= level
        keys = np.stack([units[has], trees[has], (steps[has] - starts[trees[has]]) >> level])
        first = np.flatnonzero(np.append(True, (np.diff(keys) != 0).any(axis=0))) if has.any() else np.empty(0, int)
        counts = np.diff(np.append(first, keys.shape[1]))
        np.add.at(squared, keys[0, first], counts**2)
    return squared
