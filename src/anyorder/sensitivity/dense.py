"""The generic route: from X = C^T C itself, for n up to 4096."""

from collections.abc import Iterable
from itertools import accumulate
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import PlanError
from anyorder.formats import check_work
from anyorder.patterns import Listed, Pattern, PerEpoch, Separated
from anyorder.sensitivity.bound import Bound, from_sum, roots
from anyorder.sensitivity.shuffled import two_point_bound
from anyorder.strategy import Strategy

__all__ = ["bound", "gram_bound", "units"]

Floats = NDArray[np.float64]

_MAX_STEPS = 4096
_MAX_PATTERNS = 2000  # tried one by one; the closed bounds take about as long
_NOISE = 1e-12  # entries of X this small against its diagonal are rounding errors


def bound(strategy: Strategy, pattern: Pattern) -> Bound:
    """`gram_bound` of X = C^T C."""
    return gram_bound(_gram(strategy), pattern, terms=strategy.num_rows)


def units(strategy: Strategy, listed: Listed) -> Floats:
    """Of each unit: sum |X| over its steps squared."""
    X = np.abs(_gram(strategy))
    return roots(
        np.array([X[np.ix_(steps, steps)].sum() for steps in listed.enumerate()]), strategy.num_rows + listed.n
    )


def gram_bound(X: Floats, pattern: Pattern, *, terms: int) -> Bound:
    """The sensitivity from the matrix X = C^T C, (n, n).

    For one pattern pi, the Gram matrix Y has |Y_ij| <= 1, so sens(pi)^2 <= sum |X_pi,pi|; with equality if signs s
    exist with s_i s_j X_ij >= 0 on pi (Y = s s^T), as for X_pi,pi >= 0 and for |pi| <= 2.

    Over all patterns of Separated or PerEpoch the maximum of a quadratic form is hard. With

        R_i = max over allowed pi that contain i of sum_{j in pi} |X_ij|,

    sum_{i,j in pi} |X_ij| <= sum_{i in pi} R_i <= max over pi of the same: two linear maxima, which are solved
    by dynamic programming (Separated) or epoch by epoch (PerEpoch). The bound is exact where the pattern
    that attains the outer maximum really has this value, always if X_ij = 0 for |i - j| >= b. Few patterns are
    tried one by one. For PerEpoch `two_point_bound` is another bound; the smaller one is taken.

    Args:
        X: symmetric, positive semidefinite.
        pattern: of n steps.
        terms: number of products that were summed in an entry of X, for rounding.
    Cost: O(n^2) for a list of patterns, PerEpoch, or Separated where all that fit are allowed; else O(n^2 k).
    """
    rounds = pattern.max_participations if isinstance(pattern, Separated) else 16
    check_work(f"the sensitivity from all {len(X)} steps", numbers=X.size, operations=X.size * rounds)
    weights = np.abs(X)
    match pattern:
        case Separated() if pattern.is_single:
            return from_sum(float(X.diagonal().max()), terms, exact=True)
        case Listed():
            return _one_by_one(X, pattern, terms)
        case Separated() | PerEpoch() if pattern.count(_MAX_PATTERNS) <= _MAX_PATTERNS:
            return _one_by_one(X, pattern, terms)
        case PerEpoch(k=k, steps_per_epoch=s):
            best = _epoch_rows(weights, k, s).reshape(k, s)
            steps = (best.argmax(axis=1) + np.arange(k) * s).tolist()
            squared = min(float(best.max(axis=1).sum()), two_point_bound(weights, k, s))
        case Separated(b=b):
            k = pattern.max_participations
            squared, steps = _heaviest(_separated_rows(weights, b, k), b, k)
        case _:
            assert_never(pattern)
    attained, signed = _largest(X, [tuple(steps)])
    exact = signed and attained >= squared * (1 - _NOISE)
    return from_sum(squared, terms + pattern.n, exact=exact)


def _one_by_one(X: Floats, pattern: Pattern, terms: int) -> Bound:
    squared, exact = _largest(X, pattern.enumerate())
    return from_sum(squared, terms + pattern.n, exact=exact)


def _gram(strategy: Strategy) -> Floats:
    if strategy.n > _MAX_STEPS:
        raise PlanError(
            f"the sensitivity of {strategy!r} needs its dense matrix, which is made for at most {_MAX_STEPS} steps, "
            f"got {strategy.n}; use a structured strategy"
        )
    check_work(f"the dense matrix of {strategy.n} steps", numbers=strategy.n * strategy.num_rows)
    C = strategy.matrix()
    return np.asarray(C.T @ C)


def _largest(X: Floats, patterns: Iterable[tuple[int, ...]]) -> tuple[float, bool]:
    """The largest sum |X| over the patterns, and whether signs show that it is attained."""
    squared, exact = -1.0, True
    for steps in patterns:
        part = X[np.ix_(steps, steps)]
        value = float(np.abs(part).sum())
        if value > squared:
            signs = np.where(part[0] < 0, -1.0, 1.0)
            aligned = part * signs * signs[:, None]
            squared, exact = value, bool((aligned >= -_NOISE * part.diagonal().max()).all())
    return squared, exact


def _epoch_rows(weights: Floats, k: int, s: int) -> Floats:
    """R_i: its own weight, and the largest of each other epoch."""
    n = k * s
    largest = weights.reshape(n, k, s).max(axis=2)
    own = np.arange(n) // s
    return np.asarray(largest.sum(axis=1) - largest[np.arange(n), own] + weights.diagonal())


def _separated_rows(weights: Floats, b: int, k: int) -> Floats:
    """R_i: its own weight, and the heaviest k - 1 steps that are at least b from i and from each other."""
    n = len(weights)
    steps = np.arange(n)
    others = np.where(np.abs(np.subtract.outer(steps, steps)) < b, 0.0, weights)
    if k >= -(-n // b):  # all that fit
        return np.asarray(weights.diagonal() + _unlimited(others.T, b)[-1])
    best = np.zeros_like(others)
    for _ in range(k - 1):
        best = _one_more(others, best, b)
    return np.asarray(weights.diagonal() + best[:, -1])


def _one_more(weights: Floats, best: Floats, b: int) -> Floats:
    """The heaviest choice of one step more than in `best`, among the first 1, .., n (last axis)."""
    chosen = weights.copy()
    chosen[..., b:] += best[..., :-b]
    return np.maximum.accumulate(chosen, axis=-1)


def _unlimited(weights: Floats, b: int) -> Floats:
    """The heaviest choice of steps among the first 0, .., n (first axis)."""
    best = np.zeros((len(weights) + 1, *weights.shape[1:]))
    for t, weight in enumerate(weights):
        best[t + 1] = np.maximum(best[t], weight + best[max(t + 1 - b, 0)])
    return best


def _heaviest(weights: Floats, b: int, k: int) -> tuple[float, list[int]]:
    """The largest sum of k weights at most, at least b apart, and the steps that attain it."""
    n = len(weights)
    if k >= -(-n // b):
        tables = [_unlimited(weights, b)] * (n + 1)
    else:
        tables = list(accumulate(range(k), lambda best, _: _one_more(weights, best, b), initial=np.zeros(n)))
        tables = [np.append(0.0, table) for table in tables]
    steps: list[int] = []
    t, left = n, len(tables) - 1
    while t > 0:
        if tables[left][t] == tables[left][t - 1]:
            t -= 1
        else:
            steps.append(t - 1)
            t, left = max(t - b, 0), left - 1
    return float(tables[-1][n]), steps[::-1]
