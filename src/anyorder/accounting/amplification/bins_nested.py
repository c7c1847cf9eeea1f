"""Nested covariances above a Gram matrix, and the law of L of those: bins are leaves of a tree, of any shape.

    K'_ij = height of the least node above both leaves i and j;   K'_jj = height of leaf j;   heights rise to the leaves

Each node has a factor e^X of its own, X ~ N(-g / 2, g), g its height less that of its parent, so L of a node is this
factor times the mean of the L of its children, which are independent: sums and products of independent laws, each
spread about its mean (`lognormals`), from the leaves up. The height of the root is a constant part of K'.

Of all K' of this form above K in every entry there is a least one: the largest, over all paths from i to j, of the
least entry on the path [single linkage]. Exact for a diagonal and a constant beside it, and for Gram matrices of trees.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder._closed import final
from anyorder.accounting.amplification.bins_chain import Law
from anyorder.accounting.amplification.lognormals import Atoms, lognormal, power, times_lognormal, together

__all__ = ["Nested", "nested_above", "nested_law"]

Floats = NDArray[np.float64]
Node = tuple[int, tuple[Any, ...]]  # its level; of what is below it, (node, how often); nothing for a leaf

_LEVELS = 48  # of heights, where there are more
_SAME = 1e-7  # of the largest, between two heights
_POINTS = 600
_ROUND = 1e-10  # of sums and products of positive terms


@final
@dataclass(frozen=True)
class Nested:
    """The heights of levels, ascending, and the root."""

    b: int
    heights: tuple[float, ...]
    root: Node

    @property
    def constant(self) -> float:
        """The part that all entries share."""
        return self.heights[self.root[0]]


def nested_above(k: Floats) -> Nested:
    """The least nested matrix above k in every entry, heights rounded up to at most some 50.

    Cost: O(b^2).
    """
    from scipy.cluster.hierarchy import linkage  # slow to load
    from scipy.spatial.distance import squareform

    b = len(k)
    heights = np.unique(k)
    heights = heights[np.append(np.diff(heights) > _SAME * heights[-1], True)]  # else differences lose their digits
    if len(heights) > _LEVELS:
        steps = np.linspace(heights[0], heights[-1], _LEVELS)
        heights = np.append(steps[:-1], heights[-1])
    levels = np.searchsorted(heights, k)  # the first height not below
    nodes: list[tuple[int, list[Node]]] = [(int(levels[j, j]), []) for j in range(b)]
    if b > 1:
        top = len(heights)
        for left, right, distance, _ in linkage(squareform(top - levels, checks=False), "single"):
            level = top - round(distance)
            below = [node for side in (left, right) for node in _below(nodes[int(side)], level)]
            nodes.append((level, below))
    return Nested(b, tuple(heights.tolist()), _closed(nodes[-1], 0))


def _below(node: tuple[int, list[Node]], level: int) -> list[Node]:
    """What a node gives to one of this level above it: what is below it if it is of the same level, else itself."""
    return node[1] if node[1] and node[0] == level else [_closed(node, level)]


def _closed(node: tuple[int, list[Node]], least: int) -> Node:
    """In one form, so that equal nodes are equal; a leaf is no lower than its parent."""
    level, below = node
    return max(level, least), tuple(sorted(Counter(below).items()))


def nested_law(nested: Nested, *, falling: bool = False, coarse: float = 1.0) -> Law:
    """The law of L of a nested matrix without its constant part: for both directions, but for what lies beyond.

    Args:
        coarse: how many times as wide gaps of chains are that this is as near as; on the safe side whatever it is.
    Cost: some 0.02 s for each unlike node.
    """
    if not nested.root[1]:
        return Law(np.ones(1), np.ones(1), 0.0)
    points = round(_POINTS / coarse**1.5)
    laws: dict[tuple[Node, int], tuple[int, Atoms]] = {}

    def law(node: Node, parent: int) -> tuple[int, Atoms]:
        """(number of leaves, law)."""
        if (node, parent) not in laws:
            g = nested.heights[node[0]] - nested.heights[parent]
            if node[1]:
                leaves, mean = average(node)
                laws[node, parent] = leaves, times_lognormal(mean, g, points)
            else:
                laws[node, parent] = 1, lognormal(g, points)
        return laws[node, parent]

    def average(node: Node) -> tuple[int, Atoms]:
        found: tuple[int, Atoms] | None = None
        for child, count in node[1]:
            leaves, one = law(child, node[0])
            constant = len(one.points) == 2  # leaves no higher than this node: their mean is 1
            part = leaves * count, one if constant else power(one, count, points)
            found = part if found is None else together(found, part, points)
        assert found is not None
        return found

    _, atoms = average(nested.root)
    masses = atoms.masses * (1 + _ROUND)
    return Law(atoms.points, masses, 0.0 if falling else atoms.lost * (1 + _ROUND) + 1e-20)
