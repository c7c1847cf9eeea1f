"""The nodes of binary trees over the steps, and the weights of the estimates that are made of them."""

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Subtree", "bits", "ceil", "completed_root", "forest", "from_below", "node", "path", "split", "trailing_zeros",
    "variance", "within",
]  # fmt: skip

Floats = NDArray[np.float64]


class Subtree(NamedTuple):
    """A complete binary tree of 2^level leaves: the steps start .. start + real - 1, then virtual zeros."""

    start: int
    level: int
    real: int


def ceil(m: int) -> int:
    """The least power of two that is at least m."""
    return 1 << (m - 1).bit_length()


def bits(m: int) -> list[int]:
    """The 1-bits of m, highest first."""
    return [level for level in reversed(range(m.bit_length())) if m >> level & 1]


def trailing_zeros(i: int) -> int:
    return (i & -i).bit_length() - 1


def node(last: int, level: int) -> int:
    """Post-order id of the node of 2^level leaves that ends with leaf `last`: nodes that end before it, and below."""
    return 2 * last - last.bit_count() + level


def forest(start: int, m: int, completed: bool) -> list[Subtree]:
    if completed:
        return [Subtree(start, (m - 1).bit_length(), m)]
    starts = accumulate((1 << level for level in bits(m)), initial=start)
    return [Subtree(first, level, 1 << level) for first, level in zip(starts, bits(m), strict=False)]


def variance(level: int, real: int) -> float:
    """a(v): variance of the from-below estimate of a node of 2^level leaves, `real` of them not virtual.

    Two estimates are joined: the node itself, variance 1, and the sum of its children: a = c / (1 + c).
    """
    half = (1 << level) >> 1
    if real == 1 << level:
        return 1 / (2 - 1 / real)
    below = variance(level - 1, min(real, half)) + (variance(level - 1, real - half) if real > half else 0.0)
    return below / (1 + below)


def split(level: int, real: int) -> tuple[float, float]:
    """Of a node with children of 2^level leaves: a/(a + a') and sqrt(a a'/(a + a'))."""
    left, right = variance(level, 1 << level), variance(level, real - (1 << level))
    return left / (left + right), math.sqrt(left * right / (left + right))


def path(tree: Subtree, t: int) -> Iterator[tuple[int, float, float]]:
    """From the root to the leaf of step t, the nodes with two real children: (row of Z, weight on s, weight on Z).

    The row is the first step of the right child. On the way to that child Z counts negatively.
    """
    first, level, real = tree
    while real > 1:
        level -= 1
        half = 1 << level
        if real > half:
            left, spread = split(level, real)
            if t < first + half:
                yield first + half, left, spread
                real = half
            else:
                yield first + half, 1 - left, -spread
                first, real = first + half, real - half


def from_below(level: int) -> Floats:
    """Weights of u of a complete subtree on its nodes, in post-order."""
    weights = np.ones(1)
    for j in range(1, level + 1):
        a = variance(j, 1 << j)
        weights = np.concatenate([(1 - a) * weights, (1 - a) * weights, [a]])
    return weights


def completed_root(m: int) -> tuple[list[tuple[int, int, float]], list[float]]:
    """The estimate u of the root over m real leaves, as weights: on its partial nodes, on u of the complete subtrees.

    Returns: (last leaf, level, weight) of each partial node; one weight for each 1-bit of m, highest first.
    """
    nodes, weights = [], []
    first, level, real, weight = 0, (m - 1).bit_length(), m, 1.0
    while real < 1 << level:
        a = variance(level, real)
        nodes.append((first + (1 << level) - 1, level, weight * a))
        weight *= 1 - a
        level -= 1
        if real > 1 << level:
            weights.append(weight)
            first, real = first + (1 << level), real - (1 << level)
    return nodes, [*weights, weight]


def within(level: int, real: int) -> tuple[Floats, Floats]:
    """Of s of the first 1 .. real leaves of a node: its weight on s of the node, and its variance given that."""
    if real == 1:
        return np.ones(1), np.zeros(1)
    half = (1 << level) >> 1
    if real <= half:
        return within(level - 1, real)
    left, spread = split(level - 1, real)
    alpha, beta = within(level - 1, half)
    alpha_right, beta_right = (alpha, beta) if real == 2 * half else within(level - 1, real - half)
    return (
        np.concatenate([left * alpha, left + (1 - left) * alpha_right]),
        np.concatenate([beta + (alpha * spread) ** 2, beta_right + ((1 - alpha_right) * spread) ** 2]),
    )
