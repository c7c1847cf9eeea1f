"""Deterministic bounds for balls in bins with any non-negative strategy: never below the truth.

With K = G / sigma^2 and x ~ N(0, K), the pair of `mixture` has L = mean_j exp(x_j - K_jj / 2), and

    with against without:  delta(eps) = E (L - e^eps)_+,     without against with:  delta(eps) = E (1 - e^eps L)_+

K is replaced by a larger K': one that is nested, whose L is put together from the leaves of a tree up (`bins_nested`),
or a chain (`bins_fit`), whose L can be followed bin by bin (`bins_chain`). Its constant part is an independent Gaussian
factor e^(sqrt(c) z - c / 2), for which both expectations are formulas. The least of several K' counts, one of them
max K 11^T, a single Gaussian: what the bins give if they are known. See docs/amplification.md.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from anyorder import _check
from anyorder.accounting.amplification.bins_chain import Chain, Law, chain_law
from anyorder.accounting.amplification.bins_fit import dominating_chains
from anyorder.accounting.amplification.bins_nested import Nested, nested_above, nested_law
from anyorder.accounting.gaussian import gdp_delta, gdp_epsilon
from anyorder.errors import ArgumentError

__all__ = [
    "COARSE", "above", "bins_delta", "bins_epsilon", "bins_losses", "coarsely", "delta_above", "least_epsilon",
    "scaled",
]  # fmt: skip

Floats = NDArray[np.float64]

_LARGEST = 60.0  # of the diagonal of K: beyond, losses of some hundred, only the Gaussian is tried
_MOST = 1e100  # mu of all bins known: above, K is no finite number
COARSE = 2.0  # gaps of grids that tell in general which K' and direction do not count: those bounds hold too
_FINER = {Nested: 1.5, Chain: 5.0}  # a delta on coarse grids, beside the least, that a fine one may yet undercut
_NEAR = 0.1  # of epsilon, between both grids
_ROUND = 1e-9  # relative, of all sums of positive terms; and
_FLOOR = 1e-13  # what a difference of two terms of order 1 may lose


def bins_delta(gram: Floats, sigma: float, epsilon: float) -> float:
    """The larger delta(epsilon) of both directions, at or above the true one.

    Args:
        gram: (b, b) of `bins_gram`, no entry below 0.
        sigma: noise multiplier.
        epsilon: any real number.
    Guarantee: never below the truth. Neighbours: add-or-remove, zero-out.
    Cost: some seconds for the first epsilon of a matrix at b = 100, next to nothing for the next ones.
    Raises: ArgumentError.
    """
    return _larger(*scaled(gram, sigma), _check.real("epsilon", epsilon))


def bins_epsilon(gram: Floats, sigma: float, delta: float) -> float:
    """The least epsilon >= 0 with `bins_delta` <= delta, rounded up.

    Args, Raises, Guarantee: those of `bins_delta`; delta strictly between 0 and 1.
    Returns: epsilon; inf never: that of the Gaussian whose bins are known is one.
    """
    delta = _check.probability("delta", delta)
    k, mu = scaled(gram, sigma)
    known = gdp_epsilon(mu, delta) if mu else 0.0
    # from above, where most K' and the second direction hardly count, and no fine law of theirs is needed
    high, rough = known, least_epsilon(lambda epsilon: coarsely(k, mu, epsilon), delta, known)
    if rough < known and _larger(k, mu, rough) <= delta:
        high = rough
    step = _NEAR * rough
    while high > step and _larger(k, mu, high - step) <= delta:
        high -= step
    return least_epsilon(lambda epsilon: _larger(k, mu, epsilon), delta, high, max(high - step, 0.0))


def least_epsilon(at: Callable[[float], float], delta: float, high: float, low: float = 0.0) -> float:
    """The least epsilon of a curve of delta, rounded up to 1e-9 of it, where `high` holds, and it is above `low`."""
    for _ in range(60 if high else 0):
        middle = (low + high) / 2
        if at(middle) <= delta:
            high = middle
        else:
            low = middle
        if high - low < 1e-9 * high:
            break
    return high


def bins_losses(pld: Any, gram: Floats, sigma: float, h: float, every: int = 1) -> Any:
    """The loss distribution of dp-accounting for both directions, pessimistic, on a grid of interval h.

    Args:
        pld: the module dp_accounting.pld.privacy_loss_distribution.
        gram, sigma: those of `bins_delta`.
        h: interval of losses, above 0.
        every: losses are at every so many points of this grid alone, which is as good as a coarser grid.
    """
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots

    k, mu = scaled(gram, sigma)
    h = _check.positive("h", h)
    reach = min(mu * mu / 2 + 10 * mu, 600.0)
    ends = math.ceil(reach / h / _check.integer("every", every, low=1))
    points = np.arange(-ends, ends + 1) * every
    at = np.asarray(points * h, dtype=np.float64)
    both = _curve(k, mu, at)
    found = []
    for deltas in both:
        rounded, kept = _convex(np.exp(at), deltas)
        found.append(create_pmf_pessimistic_connect_dots(h, points[kept], rounded[kept]))
    return pld.PrivacyLossDistribution(*found)


def scaled(gram: Floats, sigma: float) -> tuple[Floats, float]:
    """(K, mu of a Gaussian above it), of a Gram matrix and a noise multiplier. Raises: ArgumentError."""
    gram = np.asarray(gram, dtype=np.float64)
    sigma = _check.positive("sigma", sigma)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or not gram.size:
        raise ArgumentError(f"gram must be a square matrix of one row or more, got shape {gram.shape}")
    if not np.isfinite(gram).all() or gram.min() < 0 or not np.allclose(gram, gram.T, rtol=1e-9, atol=0):
        raise ArgumentError("gram must be symmetric, finite and have no entry below 0: see bins_gram")
    mu = math.sqrt(float(gram.max())) / sigma * (1 + 2.0**-50)  # of gram, as K is 0 where sigma is very large
    if mu > _MOST:
        raise ArgumentError(f"sigma must be at least {_MOST**-1:g} of the largest ||C pi||, got {sigma!r}")
    return np.maximum(gram, gram.T) / sigma / sigma * (1 + 2.0**-50), mu


def _curve(k: Floats, mu: float, epsilons: Floats) -> Floats:
    """(2, m) delta of both directions at each epsilon: the least over all K'."""
    gaussian = np.array([_gaussian(mu, float(e)) for e in epsilons])
    found = np.stack([gaussian, gaussian])
    for chain in above(k, mu):
        for row, falling in enumerate((False, True)):
            deltas = [delta_above(chain, float(e), falling=falling) for e in epsilons]
            found[row] = np.minimum(found[row], deltas)
    return found


def _larger(k: Floats, mu: float, epsilon: float) -> float:
    """The larger of both directions at one epsilon; the laws of the second only as far as they count."""
    ranked = sorted(
        ((delta_above(one, epsilon, falling=False, coarse=COARSE), i, one) for i, one in enumerate(above(k, mu))),
        key=lambda found: found[:2],
    )
    rising = falling = _gaussian(mu, epsilon)
    rising = min([rising, *(delta for delta, _, _ in ranked[:1])])
    for delta, _, one in ranked:
        if delta <= _FINER[type(one)] * rising:
            rising = min(rising, delta_above(one, epsilon, falling=False))
    for coarse in (COARSE, 1.0):
        for _, _, one in ranked:
            if falling > rising:
                falling = min(falling, delta_above(one, epsilon, falling=True, coarse=coarse))
    return max(rising, falling)


def coarsely(k: Floats, mu: float, epsilon: float) -> float:
    """With against without, on coarse grids."""
    return min([_gaussian(mu, epsilon), *(delta_above(x, epsilon, falling=False, coarse=COARSE) for x in above(k, mu))])


def _gaussian(mu: float, epsilon: float) -> float:
    """Delta of one Gaussian, at a negative epsilon by its symmetry: E (L - t)_+ = 1 - t + t E (L - 1/t)_+."""
    delta = gdp_delta(mu, abs(epsilon)) if mu else 0.0
    return delta if epsilon >= 0 else min(1.0, (-math.expm1(epsilon) + math.exp(epsilon) * delta) * (1 + 2.0**-50))


def above(k: Floats, mu: float) -> tuple[Nested | Chain, ...]:
    """The K' that are tried, those whose laws cost least first."""
    return _above(k.shape[0], k.tobytes(), mu)


@lru_cache(maxsize=4)
def _above(b: int, data: bytes, mu: float) -> tuple[Nested | Chain, ...]:
    if not 1e-6 < mu * mu < _LARGEST:
        return ()
    k = np.frombuffer(data).reshape(b, b)
    return nested_above(k), *(chain for chain in dominating_chains(k) if chain.own < 2 * _LARGEST)


@lru_cache(maxsize=32)
def _law(one: Nested | Chain, falling: bool, coarse: float) -> Law:
    match one:
        case Nested():
            return nested_law(one, falling=falling, coarse=coarse)
        case Chain():
            return chain_law(one, falling=falling, coarse=coarse)
        case _:
            assert_never(one)


def delta_above(one: Nested | Chain, epsilon: float, *, falling: bool, coarse: float = 1.0) -> float:
    """Of one direction, for one K': of the product of its own L with an independent Gaussian factor."""
    law = _law(one, falling, coarse)
    found = law.masses @ (_put if falling else _call)(law.values, epsilon, one.constant) + law.beyond
    return min(1.0, float(found) * (1 + _ROUND) + _FLOOR)


def _call(values: Floats, epsilon: float, c: float) -> Floats:
    """E (value e^y - e^epsilon)_+ for y ~ N(-c / 2, c)."""
    if c == 0:
        return np.asarray(np.maximum(values - math.exp(min(epsilon, 700.0)), 0.0))
    above = _distance(values, epsilon, c)
    found = values * ndtr(above + math.sqrt(c) / 2) - np.exp(epsilon + log_ndtr(above - math.sqrt(c) / 2))
    return np.where(values > 0, np.maximum(found, 0.0), 0.0)


def _put(values: Floats, epsilon: float, c: float) -> Floats:
    """E (1 - e^epsilon value e^y)_+ for y ~ N(-c / 2, c)."""
    if c == 0:
        return np.asarray(np.maximum(1 - math.exp(min(epsilon, 700.0)) * values, 0.0))
    above = _distance(values, -epsilon, c)
    found = ndtr(-above + math.sqrt(c) / 2) - values * np.exp(min(epsilon, 700.0)) * ndtr(-above - math.sqrt(c) / 2)
    return np.where(values > 0, np.maximum(found, 0.0), 1.0)


def _distance(values: Floats, epsilon: float, c: float) -> Floats:
    with np.errstate(divide="ignore"):
        return np.asarray((np.log(values) - epsilon) / math.sqrt(c))


def _convex(ts: Floats, deltas: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The greatest convex function of e^epsilon below these points: still above the true one, which is convex."""
    kept: list[int] = []
    for i in range(len(ts)):
        while len(kept) > 1:
            a, m = kept[-2], kept[-1]
            if (deltas[m] - deltas[a]) * (ts[i] - ts[a]) < (deltas[i] - deltas[a]) * (ts[m] - ts[a]):
                break
            kept.pop()
        kept.append(i)
    index = np.array(kept)
    return np.interp(ts, ts[index], deltas[index]), index
