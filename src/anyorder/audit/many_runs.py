"""Many runs, one canary each: the two errors of one test, bounded by Clopper and Pearson's intervals.

Nothing is asked of the mechanism; what is asked of the data is that the pairs (score, included) are independent.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainccinv

from anyorder._numerics import bisect
from anyorder.audit.f_dp import Errors

__all__ = ["chance", "largest_epsilon"]

_CANDIDATES = 1000
_BISECTIONS = 60


def largest_epsilon(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    delta: float,
    significance: float,
    threshold: float | None,
) -> float:
    """A lower bound of epsilon at delta from independent pairs.

        epsilon >= max(ln((1 - delta - a) / b), ln((1 - delta - b) / a))         [Kairouz, Oh, Viswanath 2015, Eq. 3]

    a and b: upper bounds of false alarms (score >= threshold, out) and misses (score < threshold, in), each at half
    of the significance; both lines use the same two bounds, so that nothing more is to be paid.

    Args:
        threshold: fixed before the scores were seen; None: the even-numbered pairs choose it, the odd-numbered test.
    Returns: epsilon, not negative, finite.
    """
    if threshold is None:
        threshold = _chosen(scores[::2], included[::2], delta, significance)
        scores, included = scores[1::2], included[1::2]
    alarms, misses = _upper_errors(scores, included, np.array([threshold]), significance / 2)
    return float(_epsilons(alarms, misses, delta)[0])


def chance(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    errors: Errors,
    threshold: float | None,
) -> float:
    """The least significance at which a trade-off function is refuted: misses at most b, and f(a) > b.

    Args:
        errors: f, as `f_dp.errors_of` gives it.
        threshold: as in `largest_epsilon`; None: the one by which the even-numbered pairs refute this claim best.
    Returns: p in (0, 1], rounded up.
    """
    if threshold is None:
        threshold = _least(scores[::2], included[::2], errors, _candidates(scores[::2]))[1]
        scores, included = scores[1::2], included[1::2]
    high = _least(scores, included, errors, np.array([threshold]))[0]
    return 1.0 if high is None else 2 * math.exp(high) * (1 + 1e-9)


def _least(
    scores: NDArray[np.float64], included: NDArray[np.bool_], errors: Errors, thresholds: NDArray[np.float64]
) -> tuple[float | None, float]:
    """Log of the least level at which some threshold refutes, None where it is above 1/2; and which threshold does."""

    def margins(log_level: float) -> NDArray[np.float64]:
        alarms, misses = _upper_errors(scores, included, thresholds, math.exp(log_level))
        return np.asarray(errors(1 - alarms) - misses)

    high = math.log(0.5)
    best = margins(high)
    if best.max() <= 0:
        return None, float(thresholds[np.argmax(best)])
    high = bisect(lambda level: bool(margins(level).max() > 0), inside=high, outside=-700.0, steps=_BISECTIONS)
    return high, float(thresholds[np.argmax(margins(high))])


def _chosen(scores: NDArray[np.float64], included: NDArray[np.bool_], delta: float, significance: float) -> float:
    """The threshold that gives these pairs the largest bound."""
    candidates = _candidates(scores)
    alarms, misses = _upper_errors(scores, included, candidates, significance / 2)
    return float(candidates[np.argmax(_epsilons(alarms, misses, delta))])


def _candidates(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Thresholds between scores, spread over them."""
    candidates = np.unique(scores)
    if len(candidates) > _CANDIDATES:
        candidates = candidates[np.linspace(0, len(candidates) - 1, _CANDIDATES).astype(int)]
    return np.append((candidates[:-1] + candidates[1:]) / 2, candidates[-1])


def _upper_errors(
    scores: NDArray[np.float64], included: NDArray[np.bool_], thresholds: NDArray[np.float64], level: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Upper bounds of false alarms and of misses at each threshold, each at this level."""
    inside, outside = np.sort(scores[included]), np.sort(scores[~included])
    misses = np.searchsorted(inside, thresholds)
    alarms = len(outside) - np.searchsorted(outside, thresholds)
    return _upper(alarms, len(outside), level), _upper(misses, len(inside), level)


def _upper(k: NDArray[np.int64], n: int, level: float) -> NDArray[np.float64]:
    """The largest probability under which k or fewer of n have a probability of the level, rounded up."""
    some = np.minimum(k, max(n - 1, 0))
    bound = betainccinv(some + 1.0, np.maximum(n - some, 1.0), level) * (1 + 1e-9)
    return np.where(k >= n, 1.0, np.minimum(bound, 1.0))


def _epsilons(alarms: NDArray[np.float64], misses: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    """The bound from upper bounds of both errors; they are never 0."""
    least, most = np.minimum(alarms, misses), np.maximum(alarms, misses)
    ratios = np.maximum((1 - delta - most) / least, (1 - delta - least) / most)
    return np.log(np.maximum(ratios, 1.0)) * (1 - 1e-14)
