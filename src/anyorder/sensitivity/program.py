"""Gram matrices of mixed signs: the small semidefinite program of each pattern, from both sides.

    sens(pi)^2 = max <X_pi,pi, Y> over Y >= 0 with Y_ii <= 1        (exact for gradients of |pi| dimensions or more)
               = min sum(y) over y with Diag(y) - X_pi,pi >= 0

Any y of the second line is an upper bound: that is what is returned. The first is climbed by Y = V V^T with unit rows,
one row at a time [Burer and Monteiro 2003]; a stationary V gives y_i = <(X V)_i, V_i>, and the least eigenvalue of
Diag(y) - X says how much must be added to each y_i.
"""

from math import sqrt

import numpy as np
from numpy.typing import NDArray

from anyorder.patterns import Pattern
from anyorder.sensitivity.bound import Bound, from_sum
from anyorder.sensitivity.visits import TOLERANCE
from anyorder.strategy import Strategy

__all__ = ["gram_program", "refined"]

Floats = NDArray[np.float64]

MAX_STEPS = 4096
MAX_PATTERNS = 2000  # looked at
MAX_WORK = 2**15  # steps squared, of all programs that are solved: about a second
MAX_SIZE = 64  # steps in a pattern
GAP = 1e-9  # relative, of the squares, below which both sides are one
_SWEEPS = 400


def refined(strategy: Strategy, pattern: Pattern, found: Bound) -> Bound:
    """The bound, or a smaller one where the patterns are few: those of largest sum |X| first, while it matters.

    Cost: O(n k) for each of at most 2000 patterns, and a second for as many programs as fit.
    """
    k = pattern.max_participations
    if found.exact or k > MAX_SIZE or strategy.n > MAX_STEPS or pattern.count(MAX_PATTERNS) > MAX_PATTERNS:
        return found
    grams = []
    for steps in dict.fromkeys(pattern.enumerate()):
        columns = strategy.columns(steps)
        grams.append(columns.T @ columns)
    sums = np.array([np.abs(X).sum() for X in grams])
    upper = lower = 0.0
    order = np.argsort(-sums).tolist()
    for count, i in enumerate(order):
        if sums[i] <= upper or count * k * k >= MAX_WORK:
            upper = max(upper, float(sums[i]))
            break
        reached, bound = _aligned(grams[i]) or gram_program(grams[i])
        upper, lower = max(upper, min(bound, float(sums[i]))), max(lower, reached)
    made = from_sum(upper, strategy.num_rows + k * k, exact=upper <= lower * (1 + GAP))
    return made if made.exact or made.value < found.value else found


def _aligned(X: Floats) -> tuple[float, float] | None:
    """Both sides where signs s exist with s_i s_j X_ij >= 0 but for rounding: sum |X|."""
    signs = np.where(X[0] < 0, -1.0, 1.0)
    reached, bound = float((X * signs * signs[:, None]).sum()), float(np.abs(X).sum())
    return (reached, bound) if reached >= bound * (1 - TOLERANCE) else None


def gram_program(X: Floats) -> tuple[float, float]:
    """Max <X, Y> over Y >= 0 with Y_ii <= 1, for X >= 0 of m rows: a value that is reached, and an upper bound.

    Cost: at most 400 sweeps of O(m^2 sqrt(m)).
    """
    m = len(X)
    rank = int(sqrt(2 * m)) + 2  # enough for every stationary point that is stable to be the maximum
    V = np.random.default_rng(0).standard_normal((m, rank))
    V /= np.linalg.norm(V, axis=1)[:, None]
    others = X - np.diag(X.diagonal())
    reached, bound = 0.0, float(np.abs(X).sum())
    for sweep in range(_SWEEPS):
        for i in range(m):
            pull = others[i] @ V
            length = sqrt(pull @ pull)
            if length > 0:
                V[i] = pull / length
        if sweep % 20 == 19 or sweep == 7:
            y = np.einsum("ij,ij->i", X @ V, V)
            slack = np.diag(y) - X
            error = m * 2.0**-50 * float(np.abs(slack).sum(axis=1).max())  # of the eigenvalue, as it is computed
            missing = max(0.0, error - float(np.linalg.eigvalsh(slack)[0]))
            # rows may be longer than 1 by a rounding each
            reached = max(reached, float(y.sum()) * (1 - m * 2.0**-50))
            bound = min(bound, float(y.sum()) + m * missing)
            if bound <= reached * (1 + GAP / 10):
                break
    return reached, bound
