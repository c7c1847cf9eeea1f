"""Trees under epoch shuffles: one step anywhere in each epoch of s steps."""

import numpy as np
from numpy.typing import NDArray

from anyorder.strategy import Tree
from anyorder.strategy.nodes import Subtree

__all__ = ["squared"]

Integers = NDArray[np.int64]

_NEVER = -(2**60)


def squared(strategy: Tree, s: int) -> int:
    """sens^2, exact, by dynamic programming over the nodes: O(n) time and memory.

    Under a node, every epoch that lies inside it has its one step; only the epochs of its first and its last leaf
    may have theirs elsewhere. So a node has four states, and its count follows from the state:

        best(v, first, last) = count^2 + max over fitting states of best(left) + best(right).
    """
    nodes = [_root(tree, s) for tree in strategy.subtrees]
    best, first, last = nodes[0]
    for right, right_first, right_last in nodes[1:]:
        best = _join(best, right, first, last, right_first, right_last)
        last = right_last
    return int(best[0, 1, 1])


def _root(tree: Subtree, s: int) -> tuple[Integers, Integers, Integers]:
    """Best values [1, first used, last used] under the root, and the epochs of its first and last leaf, by levels."""
    # A virtual leaf is given to the last epoch. A step there would share no more nodes with earlier ones than a step
    # on the last real leaf does, so the maximum stays.
    first = last = (tree.start + np.minimum(np.arange(1 << tree.level), tree.real - 1)) // s
    best = np.full((len(first), 2, 2), _NEVER)
    best[:, 0, 0], best[:, 1, 1] = 0, 1
    for _ in range(tree.level):
        best = _join(best[::2], best[1::2], first[::2], last[::2], first[1::2], last[1::2])
        first, last = first[::2], last[1::2]
        used = np.arange(2)
        inner = np.where(first == last, 0, last - first - 1)[:, None, None]
        ends = np.where((first == last)[:, None, None], used[:, None] & used, used[:, None] + used)
        best = np.where(best < 0, _NEVER, best + (inner + ends) ** 2)
    return best, first, last


def _join(
    left: Integers, right: Integers, first: Integers, left_last: Integers, right_first: Integers, last: Integers
) -> Integers:
    """Best sums of two neighbours; an epoch that now lies inside must be used, exactly once."""
    result = np.full_like(left, _NEVER)
    same = left_last == right_first
    for code in range(16):
        lf, ll, rf, rl = (code >> bit & 1 for bit in range(4))
        middle = np.where(same, ll + rf, 1)  # of an epoch on both sides: at most one use
        fits = middle <= 1
        fits &= (first == left_last) | np.where(same, (right_first == last) | (middle == 1), ll == 1)
        fits &= (right_first == last) | np.where(same, (first == left_last) | (middle == 1), rf == 1)
        f = np.where(same & (first == left_last), middle, lf)
        g = np.where(same & (right_first == last), middle, rl)
        value = np.where(fits, left[:, lf, ll] + right[:, rf, rl], _NEVER)
        index = np.arange(len(left))
        result[index, f & 1, g & 1] = np.maximum(result[index, f & 1, g & 1], value)
    return result
