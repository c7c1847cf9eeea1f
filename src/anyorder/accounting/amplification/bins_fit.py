"""Chains whose covariances dominate a Gram matrix: entry by entry (Kahane), or as a quadratic form (Jensen), or a sum.

If K' = K + E + P with E >= 0 in every entry and P positive semidefinite, then delta of K is at most that of K': by the
theorem of `mixture` for E, and for P since x' = x + p with an independent p has E [L' | x] = L. Both at once reach much
further than either: a kernel without a tail is below one with a tail of about the same integral.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from anyorder.accounting.amplification.bins_chain import Chain, block_sizes, block_starts, ring

__all__ = ["dominating_chains"]

Floats = NDArray[np.float64]

_BLOCKS = 48  # from which on bins may share a state with their neighbours
_WITHIN = 0.15  # by how much the states of a block, were they apart, may fall off: v times their share of a length
_LENGTHS = 12  # of correlation that are tried
_SHARES = (0.0, 0.5, 1.0)  # of the way from the mean of a diagonal of k to its largest entry
_PRICES = (1.0, 2.0)  # powers of e^k by which a chain is chosen: of more, the diagonal counts more, as at large epsilon
_CHEAPER = 1.05  # times, above the matrix itself, that a chain of the second price must be by its own price
_PROJECTIONS = 15  # for the entries, each an eigendecomposition
_HALVINGS = 5  # of what the diagonal is given before
_SAFE = 1e-7  # of the largest entry, added to the diagonal for what a linear programme leaves open


def dominating_chains(k: Floats) -> list[Chain]:
    """A few chains above a covariance matrix k (b, b); none of fewer than four bins or of independent ones.

    The means over blocks of bins are first made circulant, by the largest entries of diagonals or less; of each
    correlation length the weights of constant, chain and diagonal are found by a linear programme, of least mean of
    e^k, linearised, the second moment of L; or of e^(2 k), nearer to what the tail of L costs. What a matrix that is
    less leaves open, the diagonal makes up for.
    """
    b = len(k)
    if b < 4 or (k - np.diag(np.diag(k))).max() == 0:
        return []
    each = max(1, b // _BLOCKS)
    found = _of_blocks(k, -(-b // each))
    fewer = min([each, *(_bins_of_a_state(chain) for chain in found)])
    return found if fewer == each else _of_blocks(k, -(-b // fewer))


def _bins_of_a_state(chain: Chain) -> int:
    """How many bins may share a state at little cost."""
    length = -chain.b / chain.blocks / math.log(chain.r)  # of correlation, in bins
    return max(1, int(min(_WITHIN * length / max(chain.v, 1e-9), chain.b)))


def _of_blocks(k: Floats, blocks: int) -> list[Chain]:
    """`dominating_chains` of so many blocks."""
    b = len(k)
    means = _block_means(k, blocks)
    middle, row = _mean_circulant(means), _circulant(means)
    shares = _SHARES if blocks == b else _SHARES[1:]  # of blocks the mean itself was raised most
    kept: list[Chain] = []
    first = None
    for power in _PRICES:
        last = _cheapest(row, power)
        if last is None or (first is not None and not _is_cheaper(last, first, row, power)):
            continue
        first = last
        solved = [_cheapest(middle + share * (row - middle), power) for share in shares[:-1]]
        tried = []
        for share, chain in zip(shares, [*solved, last], strict=True):
            if chain is not None:
                above = share == 1 and blocks == b
                found = [chain] if above else [_raised(one, k) for one in _of_bins(chain, k)]
                tried.append(min(found, key=lambda one: _moment(one, power)))
        # no moment says which is best at a small delta: beside the least, that of the largest entries is tried
        kept += [min(tried, key=lambda one: _moment(one, power)), tried[-1]]
    return list(dict.fromkeys(kept))


def _cheapest(row: Floats, power: float) -> Chain | None:
    """Of all lengths of correlation, the chain of least price above a circulant matrix."""
    fits = [_programme(row, math.exp(-1 / x), power) for x in np.geomspace(0.7, 2 * len(row), _LENGTHS)]
    solved = [fit for fit in fits if fit is not None]
    return min(solved, key=lambda fit: fit[0])[1] if solved else None


def _is_cheaper(chain: Chain, other: Chain, row: Floats, power: float) -> bool:
    """Whether a moment is so much nearer to that of the circulant matrix below both that the chain is worth its law."""
    least = len(row) * float(np.exp(np.minimum(power * row, 50.0)).sum())
    return _CHEAPER * (_moment(chain, power) - least) < _moment(other, power) - least


def _block_means(k: Floats, blocks: int) -> Floats:
    """(blocks, blocks) means of k over neighbouring bins."""
    starts, sizes = block_starts(len(k), blocks), block_sizes(len(k), blocks)
    return np.asarray(np.add.reduceat(np.add.reduceat(k, starts, 0), starts, 1) / np.outer(sizes, sizes))


def _of_bins(chain: Chain, k: Floats) -> list[Chain]:
    """A chain of blocks as one of their bins: what each block has of its own is its bins' own, or as much as in k."""
    b, each = len(k), len(k) / chain.b
    if each == 1:
        return [chain]
    block = np.repeat(np.arange(chain.b), block_sizes(b, chain.b))
    near = (block[:, None] == block) & ~np.eye(b, dtype=bool)
    own = max(0.0, float(k.diagonal().mean() - k[near].mean()))
    within = max(0.0, chain.nu - own / each)
    return [replace(chain, b=b, nu=chain.nu * each), replace(chain, b=b, nu=own, within=within)]


def _moment(chain: Chain, power: float) -> float:
    return float(np.exp(np.minimum(power * _matrix(chain), 50.0)).sum())


def _matrix(chain: Chain) -> Floats:
    """(b, b) K'."""
    kernel = chain.constant + chain.v * ring(chain.blocks, chain.r)
    kernel[0] += chain.within
    block = np.repeat(np.arange(chain.blocks), block_sizes(chain.b, chain.blocks))
    return np.asarray(kernel[np.abs(np.subtract.outer(block, block))] + chain.nu * np.eye(chain.b))


def _raised(chain: Chain, k: Floats) -> Chain:
    """The chain with a diagonal so much larger that it dominates k: entries by alternate projections, then the form."""
    rest = _matrix(chain) - k
    best = tried = _short(rest)
    for _ in range(_HALVINGS):
        tried /= 2
        found = tried + _short(rest + tried * np.eye(len(k)))
        if found > best and tried < best / 2:
            break
        best = min(best, found)
    return replace(chain, nu=chain.nu + best + _SAFE * float(k.max()))


def _short(rest: Floats) -> float:
    """By how much, at most, the diagonal must rise for entries of no negative sign and a form that add up to `rest`."""
    entries, least = np.zeros_like(rest), -math.inf
    for _ in range(_PROJECTIONS):
        values, vectors = np.linalg.eigh(rest - entries)
        least = max(least, float(values[0]))
        entries = np.maximum(rest - (vectors * np.maximum(values, 0.0)) @ vectors.T, 0.0)
    return max(0.0, -least)


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


def _programme(row: Floats, r: float, power: float) -> tuple[float, Chain] | None:
    """(its price, the cheapest chain of this r above a circulant matrix), an entry's price being e^(power row)."""
    from scipy.optimize import linprog  # slow to load

    b = len(row)
    d = np.arange(b)
    near = np.minimum(d, b - d)
    kernel = ring(b, r)
    half = b // 2 + 1
    parts = np.stack([np.ones(b), (d == 0) * 1.0, kernel], axis=1)
    waves = np.cos(2 * np.pi * np.outer(np.arange(half), d) / b)
    entries = np.zeros((b, half))
    entries[d, near] = 1.0
    price = np.exp(np.minimum(power * row, 50.0)) @ parts
    answer = linprog(
        np.concatenate([price, np.zeros(half)]),
        A_ub=-waves @ np.concatenate([parts, -entries], axis=1),
        b_ub=-waves @ row,
        bounds=(0, None),
        method="highs",
    )
    if answer.status != 0 or not np.isfinite(answer.x).all():
        return None
    constant, nu, v, *extra = np.maximum(answer.x, 0.0)
    # whatever the solver returned, the diagonal makes up for the least eigenvalue of what must be semidefinite
    rest = constant + nu * (d == 0) + v * kernel - row - np.array(extra)[near]
    short = max(0.0, -float((waves @ rest).min())) + _SAFE * float(row[0])
    return float(answer.fun), Chain(b, float(constant), float(nu) + short, float(v), r, b)
