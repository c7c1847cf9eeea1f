"""Minima of quadratic functions over the sets of learners."""

from math import sqrt
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import TrainingError
from anyorder.online.sets import Ball, Box, Everything, Set, Simplex

__all__ = ["minimise"]

Floats = NDArray[np.float64]
_TOLERANCE = 1e-10  # of iterates that are found by approach, against the largest that the objective allows


def minimise(W: Floats, s: Floats, ridge: float, l1: float, constraint: Set) -> Floats:
    """The minimum over theta in the set of  1/2 theta' (W+ + ridge I) theta - <s, theta> + l1 ||theta||_1.

    W+ is W without its negative eigenvalues: the nearest matrix in Frobenius norm that has none. With ridge > 0 there
    is one minimum. W = V diag(w) V', h = max(w, 0) + ridge, r = V' s:

        Everything, l1 = 0   V (r / h)
        Ball, l1 = 0         the same where it lies within, else V (r / (h + nu)), nu > 0, of that norm
        else                 proximal gradient steps, accelerated: each is the set's own `argmin`

    Args:
        W: (d, d), symmetric. s: (d,). ridge: above 0.
    Returns: (d, 1), in the set; by steps within 1e-10 of ||s|| / ridge of the minimum.
    Cost: O(d^3) for the eigenvalues; then O(d^2) for each of some sqrt(max h / min h) log(1e10) steps.
    """
    values, V = np.linalg.eigh(W)
    h = np.maximum(values, 0.0) + ridge
    r = V.T @ s
    free = bool(l1 == 0)
    match constraint:
        case Everything() if free:
            theta = V @ (r / h)
        case Ball() if free:
            theta = V @ _within(r, h, constraint.radius)
            theta *= min(1.0, constraint.radius / max(np.linalg.norm(theta), np.finfo(np.float64).tiny))
        case Everything() | Ball() | Box() | Simplex():
            return _approached((V * h) @ V.T, s, float(h.max()), float(h.min()), l1, constraint)
        case _:
            assert_never(constraint)
    return np.asarray(theta)[:, None]


def _within(r: Floats, h: Floats, radius: float) -> Floats:
    """The vector r / (h + nu) for the least nu >= 0 for which its norm is at most the radius.

    Newton's iteration on 1 / ||r / (h + nu)|| - 1 / radius, concave and rising in nu: from 0 it comes from below, and
    never goes past [More and Sorensen 1983].
    """
    nu = 0.0
    for _ in range(100):
        found = r / (h + nu)
        norm = float(np.linalg.norm(found))
        if norm <= radius * (1 + 1e-14):
            break
        nu += (norm / radius - 1) * norm**2 / float((np.square(found) / (h + nu)).sum())
    return np.asarray(r / (h + nu))


def _approached(H: Floats, s: Floats, steepest: float, flattest: float, l1: float, constraint: Any) -> Floats:
    """The minimum by accelerated proximal steps of constant momentum [Nesterov 2004, 2.2; Beck and Teboulle 2009].

    Of a step from y to x, ||x - minimum|| <= 2 (steepest / flattest) ||y - x||, which says when to stop.
    """
    ratio = sqrt(flattest / steepest)
    momentum = (1 - ratio) / (1 + ratio)
    near = _TOLERANCE * float(np.linalg.norm(s)) / flattest
    x = y = constraint.argmin(-s[:, None], steepest, l1)
    for _ in range(int(80 / ratio) + 100):
        before, x = x, constraint.argmin((H @ y - s[:, None]) - steepest * y, steepest, l1)
        if 2 * (steepest / flattest) * np.linalg.norm(x - y) <= near:
            return np.asarray(x)
        y = x + momentum * (x - before)
    raise TrainingError("the minimum over the set was not reached: the sums have numbers of too different sizes")
