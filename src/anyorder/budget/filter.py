"""Privacy filters: what one data set may still be used for, where later plans are chosen after earlier results.

    gaussian   sum of mu_i^2 <= mu_max^2                      mu_max from (epsilon, delta), exact
    renyi      sum of RDP_i(alpha) <= r_max                   alpha fixed beforehand, r_max from (epsilon, delta, alpha)
    planned    epsilon of `compose(all curves)` at delta      only where all curves were chosen in advance

**Gaussian.** Let W_b(s) = W(s) + b s, 0 <= s <= mu_max^2, be Brownian motion with drift b; to tell b = 0 from b = 1 is
as hard as N(0, 1) from N(mu_max, 1), since W_b(mu_max^2) is sufficient. A mu_i-GDP mechanism is a function of one draw
of N(b mu_i, 1) [Dong, Roth, Su 2022, Thm 2.10], as the path over an interval of length mu_i^2 gives it: its increment
over mu_i. So a sequence of mechanisms, each with its mu_i chosen after the outputs before it, is a function of one
path, as long as the intervals lie within [0, mu_max^2]: mu_max-GDP [Smith, Thakurta 2022; Koskela et al. 2022]. The
same is true of single steps, so runs may overlap. While a run goes on, its whole mu^2 is set aside; if it ends with k
and b, it used at most mu(k, b)^2 on every path, so `Budget.settle` is valid.

**Rényi.** For one alpha, sums of RDP_i(alpha) that never exceed r_max make the whole (alpha, r_max)-RDP, with RDP_i
chosen adaptively [Feldman, Zrnic 2021]. It must be one alpha: to take the best of several afterwards is a
choice made with the outputs in hand.

**Neither for several laws at once.** No filter is known for loss distributions or trade-off functions in general; to
compose them and to stop at the limit is wrong where curves are chosen adaptively.

Here are the numbers alone. The sums over a budget's entries are kept by `account.Account`, whose `Totals` say what one
entry more comes to; `file.Budget.spend` admits it or refuses it, under the lock of the file.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import inf, nextafter
from typing import assert_never

import numpy as np
from scipy.special import gammaln, logsumexp

from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.bounded_range import bounded_range_mu
from anyorder.accounting.curves import BoundedRange, Composed, Curve, Gaussian, Sampled
from anyorder.accounting.gaussian import rdp_epsilon
from anyorder.budget.search_privacy import Geometric, Logarithmic, NegativeBinomial, Poisson, Secret, search_epsilon
from anyorder.checks import final

__all__ = ["Cost", "Searched", "best_order", "dominating_squared", "renyi", "renyi_left", "root_down", "root_up"]

_MAX_ORDER = 4096
_OTHERS = (*range(2, 33), 48, 64, 96, 128, 256, 512)  # beta, of searches
_UP = 1 + 1e-9  # what logarithms and their sums may have lost; orders of magnitude more than they do


@final
@dataclass(frozen=True)
class Searched:
    """The cost of a search that shows the best of a secret number of runs; see `search_epsilon`.

    Attributes:
        law: of the number of runs.
        curve: of one run.
    """

    law: Secret
    curve: Curve

    @property
    def unit(self) -> str:
        """The privacy unit of the search."""
        return self.curve.unit

    @property
    def neighbours(self) -> str:
        """The relation."""
        return self.curve.neighbours

    def epsilon(self, delta: float) -> float:
        """The epsilon of the whole search, rounded up."""
        return search_epsilon(self.law, self.curve, delta)


Cost = Curve | Searched
"""What an entry may cost. A search is no `Curve`: its runs' is one of its parts."""


def renyi(curve: Cost, order: int) -> float:
    """The Rényi divergence of this order between any two neighbours, at most; rounded up.

        Gaussian      alpha mu^2 / 2
        BoundedRange  draws times the less of alpha e0^2 / 8 [Cesar, Rogers 2021] and ln(M_alpha) / (alpha - 1)
        Sampled       n / (alpha - 1) ln sum_k C(alpha, k) (1-q)^(alpha-k) q^k e^(k (k-1) / (2 sigma^2)) M_k^draws
                      [Mironov, Talwar, Zhang 2019]

    M_k = sinh((k - 1/2) e0) / ((2k - 1) sinh(e0 / 2)) is the k-th moment of the pair that dominates a draw of range e0
    (`anyorder.accounting.bounded_range`). That pair, and a Gaussian's, is the same with its two distributions
    exchanged, so that the direction in the formula is the worse one [same]. For a search, with beta any
    other order,

        RDP(alpha) + (1 + eta) ((1 - 1/beta) RDP(beta) + ln(1/gamma) / beta) + ln E[K] / (alpha - 1)
        RDP(alpha) + E[K] delta(ln(1 + 1 / (alpha - 1))) + ln E[K] / (alpha - 1)     where K is Poisson
                                                            [Papernot, Steinke 2022, Thm 2 and 6]

    Args:
        order: alpha, an integer of 2 or more.
    Returns: RDP(alpha), not negative; infinite where it is no float.
    """
    match curve:
        case Gaussian():
            return _up(order * curve.mu * curve.mu / 2)
        case BoundedRange():
            moments = _log_moment(curve.e0, order) / (order - 1)
            return _up(curve.draws * min(order * curve.e0**2 / 8, moments))
        case Sampled():
            return _up(curve.n * _sampled(curve.sigma, curve.sampling_probability, curve.e0, curve.draws, order))
        case Amplified():  # the sampling is not counted
            return _up(order * curve.known_mu * curve.known_mu / 2)
        case Composed():
            return _up(math.fsum(renyi(part, order) for part in curve.parts))
        case Searched():
            return _up(renyi(curve.curve, order) + _of_choice(curve, order))
        case _:
            assert_never(curve)


def _of_choice(search: Searched, order: int) -> float:
    """What the choice of the best adds to one run's."""
    law, curve = search.law, search.curve
    runs = max(math.log(law.mean * _UP), 0.0) / (order - 1)
    match law:
        case Poisson():
            return runs + law.mean * curve.delta(math.log1p(1 / (order - 1)))
        case Geometric() | NegativeBinomial() | Logarithmic():
            tail, least = math.log(1 / law.gamma) * _UP, inf
            for other in _OTHERS:
                least = min(least, (1 - 1 / other) * renyi(curve, other) + tail / other)
            return runs + (1 + law.eta) * least
        case _:
            assert_never(law)


def _log_moment(e0: float, k: int) -> float:
    """Ln M_k; the sinh of large arguments by their exponentials."""

    def log_sinh(x: float) -> float:
        return x + math.log(-math.expm1(-2 * x) / 2)

    return 0.0 if k < 2 else log_sinh((k - 0.5) * e0) - math.log(2 * k - 1) - log_sinh(e0 / 2)


@lru_cache(maxsize=1024)
def _sampled(sigma: float, q: float, e0: float, draws: int, order: int) -> float:
    """RDP of one step."""
    k = np.arange(order + 1)
    log_moments = k * (k - 1.0) / (2 * sigma * sigma)
    if draws:
        log_moments = log_moments + draws * np.array([_log_moment(e0, int(one)) for one in k])
    with np.errstate(divide="ignore", invalid="ignore"):
        binomials = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1) + k * math.log(q)
        binomials = binomials + np.where(k == order, 0.0, (order - k) * np.log1p(-q))
    # the terms of k = 0 and 1 are those of q^0, q^1 in (1 - q + q)^alpha = 1: what the others add to 1 keeps its digits
    log_added = logsumexp(binomials[2:] + log_moments[2:] + _log_less_one(log_moments[2:]))
    log_sum = float(np.logaddexp(0.0, log_added))
    return max(log_sum, 0.0) / (order - 1)


def _log_less_one(x: np.ndarray) -> np.ndarray:
    """ln(1 - e^-x), for x of 0 and more."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(-np.expm1(-x)))


def _up(value: float) -> float:
    return nextafter(value * _UP, inf) if value > 0 else 0.0


@lru_cache(maxsize=256)
def best_order(epsilon: float, delta: float) -> int:
    """The integer order at which a Rényi filter lets the most Gaussian noise through: r_max(alpha) / alpha is largest.

    That is the law of many small amplified parts too, below the order at which sampling stops to help.
    """
    orders = np.unique(np.geomspace(2, _MAX_ORDER, 2000).astype(np.int64))
    shares = [renyi_left(epsilon, delta, int(order)) / order for order in orders]
    return int(orders[int(np.argmax(shares))])


def renyi_left(epsilon: float, delta: float, order: int) -> float:
    """r_max: the RDP(alpha) that implies (epsilon, delta); what `rdp_epsilon` inverts. Rounded down; 0 for none."""
    none = rdp_epsilon(([float(order)], [0.0]), delta)
    gap = order - 1.0
    least = (-math.log(delta) - math.log(order)) / gap - math.log1p(1 / gap)  # of epsilon, for an RDP of 0
    left = max(0.0, epsilon - least) * (1 - 1e-12) if none <= epsilon else 0.0
    while left > 0 and rdp_epsilon(([float(order)], [left]), delta) > epsilon:
        left = left * (1 - 1e-12) - 1e-15
    return max(left, 0.0)


def dominating_squared(curve: Cost) -> Fraction:
    """mu^2 of the Gaussian that tells no less than the curve, exact where it is one; without sampling elsewhere.

    A draw of range e0 is mu-GDP by `bounded_range_mu`. A sampled step is so only as the same without the sampling: its
    loss has tails as heavy as that. Nothing Gaussian is known for a search: beyond every limit.
    """
    match curve:
        case Gaussian():
            return Fraction(curve.mu) ** 2
        case BoundedRange():
            return curve.draws * Fraction(bounded_range_mu(curve.e0)) ** 2
        case Sampled():
            step = Fraction(nextafter(1 / curve.sigma, inf)) ** 2
            draws = curve.draws * Fraction(bounded_range_mu(curve.e0)) ** 2 if curve.draws else Fraction(0)
            return curve.n * (step + draws)
        case Amplified():
            return Fraction(curve.known_mu) ** 2
        case Composed():
            return sum((dominating_squared(part) for part in curve.parts), Fraction(0))
        case Searched():
            return Fraction(2) ** 1100
        case _:
            assert_never(curve)


def root_up(square: Fraction) -> float:
    """The square root, rounded up to a float."""
    result = _root(square)
    while math.isfinite(result) and Fraction(result) ** 2 < square:
        result = nextafter(result, inf)
    return result


def root_down(square: Fraction) -> float:
    """The square root, rounded down to a float; 0 for what is negative."""
    result = _root(max(square, Fraction(0)))
    while result > 0 and Fraction(result) ** 2 > square:
        result = nextafter(result, 0.0)
    return result


def _root(square: Fraction) -> float:
    try:
        return math.sqrt(float(square))
    except OverflowError:
        return inf
