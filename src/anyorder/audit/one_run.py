"""One run, (epsilon, delta): how many secret draws can be guessed right [Steinke, Nasr, Jagielski 2023].

Each of m canaries is in or out by a fair draw of its own. A guesser who sees the release alone guesses r of the draws.
Let N of the guesses be right, B ~ Binomial(r, q) with q = 1 / (1 + e^-epsilon), and b_k = P[B = k]. Then

    P[N >= v] <= beta + m delta beta (1 - beta) / (v b_v),   beta = P[B >= v]

For delta = 0 this is their theorem: randomised response guesses best. Their term in delta is another one,
2 m delta max_i P[v - i <= B < v] / i. It is larger wherever p is small, often seven times; and where v is below
r q it is too small: some mechanism of two canaries, (1, 0.05)-DP, has P[N >= 1] = 0.9447, and their formula 0.9421. The
one above is the largest probability that any mechanism has, as long as that mechanism's P[N = 0] is not negative.

Proof. Of canary i, the draws of all others known, "guessed in, and j other guesses are right" with j in a set S is an
event of the release, and so is "guessed out, ..". Where the draw is as guessed, these are right guesses, else wrong
ones. (epsilon, delta)-DP compares the two; averaged over the guess and all canaries, with p_j = P[N = j],

    sum_{j in S} (j + 1) p_{j+1} - e^epsilon (r - j) p_j  <=  m delta       for every S

For b_j in place of p_j each term is 0. So d_j = p_{j+1} / b_{j+1} - p_j / b_j obeys
sum_j (j + 1) b_{j+1} max(d_j, 0) <= m delta. By summation in parts P[N >= v] - beta = sum_j d_j W_j, where
W_j = P[B > j, B >= v] - beta P[B > j] >= 0; so it is at most m delta max_j W_j / ((j + 1) b_{j+1}). As b is
log-concave, P[B <= j] / ((j + 1) b_{j+1}) rises in j and P[B > j] / ((j + 1) b_{j+1}) falls: the largest is that of
j = v - 1, which is beta (1 - beta) / (v b_v).
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from anyorder._numerics import bisect, doubled
from anyorder.checks import integer

__all__ = ["SHARES", "chance", "chances", "largest_epsilon", "right_guesses"]

SHARES = (0.15, 0.5)
"""Shares of the canaries that are guessed where no number of guesses is given: both are tried, and paid for.

Of the epsilon that the best single share would give (m from 100 to 10 000, mu from 0.5 to 4, 27 cases) they give 91 %
by `one_run` and 88 % by `f_dp` in the mean, 80 % at least; one share for all gives 87 and 88 %, and 68 % at least;
three shares give no more than two. Best is about 0.02 for many canaries of small mu, 0.5 for large mu.
"""

_GOLDEN = (math.sqrt(5) - 1) / 2
_BISECTIONS = 60


def right_guesses(
    scores: NDArray[np.float64], included: NDArray[np.bool_], guesses: int | None
) -> list[tuple[int, int]]:
    """(r, v) for each number of guesses r that is tried: v of them are right.

    The r/2 highest scores are guessed in, the r/2 lowest out. That may depend on the scores in any way, not on the
    draws; so equal scores are taken in a scattered order of their positions that no draw had a hand in, and that is no
    help to a list which was sorted by its draws.

    Args:
        guesses: their number, from 1 to m; None: those of `SHARES`.
    """
    m = len(scores)
    if guesses is None:
        numbers = sorted({min(m, 2 * max(1, round(share * m / 2))) for share in SHARES})
    else:
        numbers = [integer("guesses", guesses, low=1, high=m)]
    scattered = np.arange(1, m + 1) * _GOLDEN % 1.0
    order = np.lexsort((scattered, scores))
    right_out, right_in = np.cumsum(~included[order]), np.cumsum(included[order[::-1]])
    return [(r, int(right_in[(r + 1) // 2 - 1] + (right_out[r // 2 - 1] if r > 1 else 0))) for r in numbers]


def chance(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """The probability, at most, that v or more of r guesses are right where (epsilon, delta)-DP holds.

        p = beta + m delta beta (1 - beta) / (v b_v)                                      see the head of this module

    Returns: p in (0, 1], never below the formula: rounding is added.
    Cost: O(r) time and memory.
    """
    return _chance_of(m, r, v)(epsilon, delta)


@lru_cache(maxsize=4)
def _chance_of(m: int, r: int, v: int) -> Callable[[float, float], float]:
    """`chance` as a function of epsilon and delta; the binomial coefficients are made once."""
    k = np.arange(r + 1)
    coefficients = gammaln(r + 1) - gammaln(k + 1) - gammaln(r - k + 1)
    size = float(gammaln(r + 2))

    def p(epsilon: float, delta: float) -> float:
        log_wrong = -float(np.logaddexp(0.0, epsilon))
        log_right = -float(np.logaddexp(0.0, -epsilon))
        log_pmf = coefficients + k * log_right + (r - k) * log_wrong
        rounding = 2.0**-50 * (64 + size - r * (log_right + log_wrong))
        top = float(log_pmf[v:].max())
        log_tail = top + math.log(float(np.exp(log_pmf[v:] - top).sum()))
        total = math.exp(min(0.0, log_tail + rounding))
        if delta > 0 and v > 0:
            hazard = math.exp(min(700.0, log_tail - float(log_pmf[v]) + rounding))
            total += m * delta * hazard / v * (1 - total * math.exp(-2 * rounding)) * (1 + 2.0**-40)
        return min(1.0, math.nextafter(total, math.inf))

    return p


def chances(m: int, counts: list[tuple[int, int]], pairs: Sequence[tuple[float, float]]) -> float:
    """The p-value of all numbers of guesses together: the least, times how many there are (Bonferroni).

    Args:
        pairs: (epsilon, delta) that all hold; the least p over them costs nothing, for each bounds one probability.
    """
    least = min(_chance_of(m, r, v)(*pair) for r, v in counts for pair in pairs)
    return min(1.0, len(counts) * least)


def largest_epsilon(m: int, counts: list[tuple[int, int]], delta: float, significance: float) -> float:
    """The largest epsilon found that is refuted with delta: each number of guesses has its share of the significance.

    Returns: epsilon, not negative, finite; 0 where none is refuted. Every value returned was itself tested.
    Cost: 60 times that of `chance`, for each number of guesses.
    """
    return max(_largest(_chance_of(m, r, v), delta, significance / len(counts)) for r, v in counts)


def _largest(p: Callable[[float, float], float], delta: float, significance: float) -> float:
    if p(0.0, delta) > significance:
        return 0.0
    inside, outside = doubled(lambda epsilon: not p(epsilon, delta) <= significance, 0.0, 1.0)
    return bisect(lambda epsilon: p(epsilon, delta) <= significance, inside=inside, outside=outside, steps=_BISECTIONS)
