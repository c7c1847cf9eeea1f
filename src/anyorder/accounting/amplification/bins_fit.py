"""Chains whose covariances dominate a Gram matrix: entry by entry (Kahane), or as a quadratic form (Jensen), or a sum.

If K' = K + E + P with E >= 0 in every entry and P positive semidefinite, then delta of K is at most that of K': by the
theorem of `mixture` for E, and for P since x' = x + p with an independent p has E [L' | x] = L. Both at once reach much
further than either: a kernel without a tail is below one with a tail of about the same integral.
"""

import math

import numpy as np
from numpy.typing import NDArray

from anyorder.accounting.amplification.bins_chain import Chain

__all__ = ["dominating_chains"]

Floats = NDArray[np.float64]

_LENGTHS = 12  # of correlation that are tried
_SAFE = 1e-7  # of the largest entry, added to the diagonal for what a linear programme leaves open


def dominating_chains(k: Floats) -> list[Chain]:
    """Chains above a covariance matrix k (b, b): the best without a chain, and the best with one, if it is better.

    The matrix is first raised to a circulant one; of each correlation length the weights of constant, chain and
    diagonal are found by a linear programme, and least is the mean of e^k, linearised: the second moment of L.
    """
    b = len(k)
    if b == 1:
        return []
    row = _circulant(k)
    plain = Chain(b, float(row[1:].max()), 0.0, 0.0, 0.5)
    plain = Chain(b, plain.constant, float(max(row[0] - plain.constant, 0.0)) + _SAFE * float(row[0]), 0.0, 0.5)
    found = [plain]
    if b < 4 or plain.constant == 0:
        return found
    best = None
    for length in np.geomspace(0.7, 2 * b, _LENGTHS):
        chain = _programme(row, math.exp(-1 / length))
        if chain is not None and (best is None or chain[0] < best[0]):
            best = chain
    return found if best is None else [*found, best[1]]


def _circulant(k: Floats) -> Floats:
    """(b,) the least symmetric circulant matrix above k, entry by entry: its first row."""
    b = len(k)
    distance = np.subtract.outer(np.arange(b), np.arange(b)) % b
    row = np.zeros(b)
    np.maximum.at(row, distance.ravel(), k.ravel())
    return np.maximum(row, row[-np.arange(b)])


def _programme(row: Floats, r: float) -> tuple[float, Chain] | None:
    """(its price, the cheapest chain of this r above a circulant matrix)."""
    from scipy.optimize import linprog  # slow to load

    b = len(row)
    d = np.arange(b)
    near = np.minimum(d, b - d)
    kernel = (r**d + r ** (b - d)) / (1 + r**b)
    half = b // 2 + 1
    parts = np.stack([np.ones(b), (d == 0) * 1.0, kernel], axis=1)
    waves = np.cos(2 * np.pi * np.outer(np.arange(half), d) / b)
    entries = np.zeros((b, half))
    entries[d, near] = 1.0
    price = np.exp(np.minimum(row, 50.0)) @ parts
    answer = linprog(
        np.concatenate([price, np.zeros(half)]),
        A_ub=-waves @ np.concatenate([parts, -entries], axis=1),
        b_ub=-waves @ row,
        bounds=(0, None),
        method="highs",
    )
    if answer.status != 0:
        return None
    constant, nu, v, *extra = np.maximum(answer.x, 0.0)
    # whatever the solver returned, the diagonal makes up for the least eigenvalue of what must be semidefinite
    rest = constant + nu * (d == 0) + v * kernel - row - np.array(extra)[near]
    short = max(0.0, -float((waves @ rest).min())) + _SAFE * float(row[0])
    return float(answer.fun), Chain(b, float(constant), float(nu) + short, float(v), r)
