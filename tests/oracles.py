"""Slow and simple: what the fast routes are held against."""

from collections.abc import Iterable
from itertools import product

import numpy as np


def attained_squared(C: np.ndarray, patterns: Iterable[tuple[int, ...]]) -> float:
    """max over patterns and unit vectors u of || C sum_t e_t u_t^T ||^2: a value that one unit can really reach.

    Signs are tried all, and vectors of as many dimensions as there are steps are climbed to, one after the other.
    """
    best, gram = 0.0, np.abs(C.T @ C)
    for steps in sorted(patterns, key=lambda steps: -float(gram[np.ix_(steps, steps)].sum())):
        columns = C[:, list(steps)]
        X = columns.T @ columns
        if (X >= 0).all():
            best = max(best, float(np.square(columns.sum(axis=1)).sum()))
            continue
        if np.abs(X).sum() <= best:
            continue
        signs = np.array(list(product([1.0], *[[1.0, -1.0]] * (len(steps) - 1))))
        values = np.square(columns @ signs.T).sum(axis=0)
        best = max(best, float(values.max()), _climbed(X))
    return best


def _climbed(X: np.ndarray) -> float:
    V = np.random.default_rng(1).standard_normal(X.shape)
    V /= np.linalg.norm(V, axis=1)[:, None]
    others, before = X - np.diag(X.diagonal()), 0.0
    for _ in range(3000):
        for i, row in enumerate(others):
            pull = row @ V
            V[i] = pull / max(np.linalg.norm(pull), 1e-300)
        V /= np.linalg.norm(V, axis=1)[:, None].clip(1e-300)
        now = float(np.einsum("ij,ij->", X @ V, V))
        if now <= before * (1 + 1e-14):
            break
        before = now
    return before


def random_separated(rng: np.random.Generator, n: int, b: int, k: int) -> tuple[int, ...]:
    """A random pattern of at most k steps, at least b apart."""
    size = int(rng.integers(1, min(k, -(-n // b)) + 1))
    slack = n - (size - 1) * (b - 1)
    return tuple(int(t) + i * (b - 1) for i, t in enumerate(np.sort(rng.choice(slack, size, replace=False))))
