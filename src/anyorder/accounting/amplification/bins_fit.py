"""Chains whose covariances dominate a Gram matrix: entry by entry (Kahane), or as a quadratic form (Jensen), or a sum.

If K' = K + E + P with E >= 0 in every entry and P positive semidefinite, then delta of K is at most that of K': by the
theorem of `mixture` for E, and for P since x' = x + p with an independent p has E [L' | x] = L. Both at once reach much
further than either: a kernel without a tail is below one with a tail of about the same integral.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from anyorder.accounting.amplification.bins_chain import Chain

__all__ = ["dominating_chains"]

Floats = NDArray[np.float64]

_LENGTHS = 12  # of correlation that are tried
_SHARES = (0.0, 0.5, 1.0)  # of the way from the mean of a diagonal of k to its largest entry
_PROJECTIONS = 40
_SAFE = 1e-7  # of the largest entry, added to the diagonal for what a linear programme leaves open


def dominating_chains(k: Floats) -> list[Chain]:
    """At most two chains above a covariance matrix k (b, b); none of fewer than four bins or of independent ones.

    The matrix is first made circulant, by the largest entries of its diagonals or less; of each correlation length the
    weights of constant, chain and diagonal are found by a linear programme, of least mean of e^k, linearised: the
    second moment of L. What a matrix that is less leaves open, the diagonal makes up for.
    """
    b = len(k)
    row = _circulant(k)
    if b < 4 or row[1:].max() == 0:
        return []
    middle = _mean_circulant(k)
    tried, raised = [], None
    for share in _SHARES:
        fits = [
            _programme(middle + share * (row - middle), math.exp(-1 / x)) for x in np.geomspace(0.7, 2 * b, _LENGTHS)
        ]
        solved = [fit for fit in fits if fit is not None]
        if solved:
            _, chain = min(solved, key=lambda fit: fit[0])
            tried.append(chain if share == 1 else _raised(chain, k))
            raised = chain if share == 1 else None
    # the second moment does not say which is best at a small delta: of those that are lower than the last, one is tried
    tried.sort(key=_second_moment)
    return [*tried[:1], *([raised] if raised and raised != tried[0] else [])]


def _second_moment(chain: Chain) -> float:
    return float(np.exp(np.minimum(_row(chain), 50.0)).sum())


def _row(chain: Chain) -> Floats:
    """(b,) the first row of K'."""
    d = np.arange(chain.b)
    kernel = (chain.r**d + chain.r ** (chain.b - d)) / (1 + chain.r**chain.b)
    return np.asarray(chain.constant + chain.nu * (d == 0) + chain.v * kernel)


def _raised(chain: Chain, k: Floats) -> Chain:
    """The chain with a diagonal so much larger that it dominates k: entries by alternate projections, then the form."""
    b = len(k)
    rest = _row(chain)[np.abs(np.subtract.outer(np.arange(b), np.arange(b)))] - k
    entries = np.zeros_like(k)
    for _ in range(_PROJECTIONS):
        values, vectors = np.linalg.eigh(rest - entries)
        entries = np.maximum(rest - (vectors * np.maximum(values, 0.0)) @ vectors.T, 0.0)
    short = max(0.0, -float(np.linalg.eigvalsh(rest - entries)[0]))
    return replace(chain, nu=chain.nu + short + _SAFE * float(k.max()))


def _mean_circulant(k: Floats) -> Floats:
    """(b,) the first row of the symmetric circulant matrix nearest to k."""
    b = len(k)
    distance = np.subtract.outer(np.arange(b), np.arange(b)) % b
    row = np.bincount(distance.ravel(), k.ravel(), b) / b
    return np.asarray((row + row[-np.arange(b)]) / 2)


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
