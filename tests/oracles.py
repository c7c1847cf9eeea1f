"""Slow and simple: what the fast routes are held against."""

from collections.abc import Iterable
from itertools import product

import numpy as np


def attained_squared(C: np.ndarray, patterns: Iterable[tuple[int, ...]]) -> float:
    """max over patterns and signs s of || C sum_t s_t e_t ||^2: a value that one unit can really reach."""
    best = 0.0
    for steps in patterns:
        columns = C[:, list(steps)]
        if (columns.T @ columns >= 0).all():
            best = max(best, float(np.square(columns.sum(axis=1)).sum()))
            continue
        signs = np.array(list(product([1.0], *[[1.0, -1.0]] * (len(steps) - 1))))
        best = max(best, float(np.square(columns @ signs.T).sum(axis=0).max()))
    return best


def random_separated(rng: np.random.Generator, n: int, b: int, k: int) -> tuple[int, ...]:
    """A random pattern of at most k steps, at least b apart."""
    size = int(rng.integers(1, min(k, -(-n // b)) + 1))
    slack = n - (size - 1) * (b - 1)
    return tuple(int(t) + i * (b - 1) for i, t in enumerate(np.sort(rng.choice(slack, size, replace=False))))
