"""Variances of iterates whose noise is a tree's: all subtrees of a size side by side, from the leaves up.

A subtree is a random linear map from the state w = (velocity, iterate, ..) at its beginning. Of the subtrees of 2^j
leaves is kept, by node, how w moves through them and the moments of what they add; and by leaf t, how p_t depends on w
at the beginning of the subtree (`rows`), and its variance given that. Two neighbours make one of twice the size.

- Full estimator: given the estimate s of a node, its two children have independent noise but for what they share of s:
  s(left) = share s + e, s(right) = (1 - share) s - e.
- From below ("vanilla", "online"): two neighbours are independent, but for the last step of the second: there the
  estimates u of the two are replaced by u = a y + (1 - a) (u_left + u_right), y new; a = 1 for vanilla.

After a completed block the first step adds the estimate of its root less that of its last prefix: a third number of w
holds this until then.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from anyorder.strategy import Tree
from anyorder.strategy.nodes import Subtree, bits, completed_root, split, variance

__all__ = ["of_tree"]

Floats = NDArray[np.float64]

_P = 1  # place of the iterate in w


def of_tree(tree: Tree, M: Floats, N: Floats) -> Floats:
    """(n,) Var p_t for w <- M_t w + N_t eta_t, p = w[1], and the noise eta of a tree.

    Args:
        M: (n, 2, 2).
        N: (n, 2).
    Cost: O(n log n).
    """
    return _full(tree, M, N) if tree.estimator == "full" else _from_below(tree, M, N)


def _full(tree: Tree, M: Floats, N: Floats) -> Floats:
    covariance = np.zeros((2, 2))
    result = np.empty(len(N))
    for one in tree.subtrees:
        here = slice(one.start, one.start + one.real)
        rows, shares, own, move, pull, left = _given_root(one, M[here], N[here])
        root = variance(one.level, one.real)
        result[here] = own + np.square(shares) * root + _quadratic(rows, covariance)
        covariance = move @ covariance @ move.T + left + root * np.outer(pull, pull)
    return result


def _given_root(tree: Subtree, M: Floats, N: Floats) -> tuple[Floats, ...]:
    """Given s of the root: p_t = rows_t . w + shares_t s + (own_t); w' = move w + pull s + (left), variances in ()."""
    real = tree.real
    rows, shares, own = M[:, _P].copy(), N[:, _P].copy(), np.zeros(real)
    move, pull, left = M.copy(), N.copy(), np.zeros_like(M)
    leaf = np.arange(real)
    for level in range(tree.level):
        pairs = len(move) // 2
        share, spread = np.empty(pairs), np.empty(pairs)
        if pairs:
            share[:], spread[:] = split(level, 2 << level)
            share[-1], spread[-1] = split(level, min(2 << level, real - (pairs - 1) * (2 << level)))
        pair, second = leaf >> (level + 1), (leaf >> level & 1).astype(bool)
        first = ~second & (pair < pairs)  # a last node without a neighbour goes up as it is
        own[first] += np.square(shares[first] * spread[pair[first]])
        shares[first] *= share[pair[first]]
        before = 2 * pair[second]
        through = np.einsum("ti,ti->t", rows[second], pull[before])
        own[second] += _quadratic(rows[second], left[before])
        own[second] += np.square((through - shares[second]) * spread[pair[second]])
        shares[second] = share[pair[second]] * (through - shares[second]) + shares[second]
        rows[second] = np.einsum("ti,tij->tj", rows[second], move[before])

        a, b = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        through = np.einsum("kij,kj->ki", move[b], pull[a])
        apart = (through - pull[b]) * spread[:, None]
        joined = (
            move[b] @ move[a],
            share[:, None] * (through - pull[b]) + pull[b],
            move[b] @ left[a] @ move[b].transpose(0, 2, 1) + left[b] + apart[:, :, None] * apart[:, None],
        )
        rest = slice(2 * pairs, None)
        move, pull, left = (
            np.concatenate([new, old[rest]]) for new, old in zip(joined, (move, pull, left), strict=True)
        )
    return rows, shares, own, move[0], pull[0], left[0]


def _from_below(tree: Tree, M: Floats, N: Floats) -> Floats:
    n = len(N)
    if any(tree.completion):
        wide, M = M, np.zeros((n, 3, 3))
        M[:, :2, :2] = wide
        starts = list(tree.restarts)
        M[starts, :2, 2] = N[starts]
        N = np.concatenate([N, np.zeros((n, 1))], axis=1)
    size = M.shape[1]
    covariance = np.zeros((size, size))
    result = np.empty(n)
    for block, (start, end) in enumerate(pairwise((0, *tree.restarts, n))):
        levels = bits(end - start)
        shared: list[Floats] = []  # of w and the estimate of each subtree of the block
        first = start
        for level in levels:
            here = slice(first, first + (1 << level))
            rows, own, move, left, with_u = _alone(tree, level, M[here], N[here])
            result[here] = own + _quadratic(rows, covariance)
            covariance = move @ covariance @ move.T + left
            shared = [*(move @ one for one in shared), with_u]
            first += 1 << level
        if block < len(tree.completion) and tree.completion[block] and len(levels) > 1:
            covariance = _with_root(tree, end - start, covariance, shared)
    return result


def _alone(tree: Tree, level: int, M: Floats, N: Floats) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Of a complete subtree: p_t = rows_t . w + (own_t), w' = move w + (left), and the covariance of w' with u."""
    rows, own = M[:, _P].copy(), np.square(N[:, _P])
    move, left, with_u = M, N[:, :, None] * N[:, None], N
    leaf = np.arange(1 << level)
    for j in range(level):
        below = 2 * _estimate(tree, j)
        a = _weight(tree, j + 1)
        second = (leaf >> j & 1).astype(bool)
        before = leaf[second] >> (j + 1)
        own[second] += _quadratic(rows[second], left[::2][before])
        rows[second] = np.einsum("ti,tij->tj", rows[second], move[::2][before])
        last = N[(2 << j) - 1 :: 2 << j]
        both = np.einsum("kij,kj->ki", move[1::2], with_u[::2]) + with_u[1::2]
        cross = both[:, :, None] * last[:, None]
        left = move[1::2] @ left[::2] @ move[1::2].transpose(0, 2, 1) + left[1::2]
        left = left - a * (cross + cross.transpose(0, 2, 1)) + a**2 * (1 + below) * last[:, :, None] * last[:, None]
        with_u = (1 - a) * both + a * (a - (1 - a) * below) * last
        move = move[1::2] @ move[::2]
        own[(2 << j) - 1 :: 2 << j] = left[:, _P, _P]
    return rows, own, move[0], left[0], with_u[0]


def _with_root(tree: Tree, m: int, covariance: Floats, shared: list[Floats]) -> Floats:
    """The covariance of w when its third number is what the next step adds, beside its own noise."""
    levels = bits(m)
    if tree.estimator == "vanilla":
        fresh, weights = 1.0, [0.0] * len(levels)
    else:
        nodes, weights = completed_root(m)
        fresh = sum(weight**2 for _, _, weight in nodes)
    covariance = covariance.copy()
    with_w = sum(((weight - 1) * one for weight, one in zip(weights, shared, strict=True)), np.zeros(3))
    covariance[2], covariance[:, 2] = with_w, with_w
    covariance[2, 2] = fresh + sum(
        (weight - 1) ** 2 * _estimate(tree, level) for weight, level in zip(weights, levels, strict=True)
    )
    return covariance


def _estimate(tree: Tree, level: int) -> float:
    """Variance of the estimate u of a complete subtree."""
    return 1.0 if tree.estimator == "vanilla" else variance(level, 1 << level)


def _weight(tree: Tree, level: int) -> float:
    """a, of a node's own noise in its estimate."""
    return 1.0 if tree.estimator == "vanilla" else variance(level, 1 << level)


def _quadratic(rows: Floats, covariances: Floats) -> Floats:
    """Row C row^T of each row, with one C or one each."""
    if covariances.ndim == 2:
        return np.asarray(np.einsum("ti,ti->t", rows @ covariances, rows))
    return np.asarray(np.einsum("ti,tij,tj->t", rows, covariances, rows))
