"""One run, (epsilon, delta): how many secret coins can be guessed right [Steinke, Nasr, Jagielski 2023].

Each of m canaries is in or out by a fair coin of its own. A guesser who sees the release alone guesses r of the coins.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from anyorder._check import integer

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
    coins; so equal scores are taken in a scattered order of their positions that no coin had a hand in, and that is no
    help to a list which was sorted by its coins.

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

        q = 1 / (1 + e^-epsilon),  B ~ Binomial(r, q):
        p = P[B >= v] + 2 m delta max_{1 <= i <= v} P[v - i <= B < v] / i     [Steinke et al. 2023, Theorem 5.2]

    For delta = 0: given the release and the coins before it, each guess is right with probability q at most. Equality
    where each canary is released by randomised response.

    Returns: p in (0, 1], never below the formula: rounding is added.
    Cost: O(r) time and memory.
    """
    return _chance_of(m, r, v, delta)(epsilon)


def _chance_of(m: int, r: int, v: int, delta: float) -> Callable[[float], float]:
    """`chance` as a function of epsilon; the binomial coefficients are made once."""
    k = np.arange(r + 1)
    coefficients = gammaln(r + 1) - gammaln(k + 1) - gammaln(r - k + 1)
    size = float(gammaln(r + 2))

    def p(epsilon: float) -> float:
        log_wrong = -float(np.logaddexp(0.0, epsilon))
        log_right = -float(np.logaddexp(0.0, -epsilon))
        log_pmf = coefficients + k * log_right + (r - k) * log_wrong
        rounding = 2.0**-50 * (64 + size - r * (log_right + log_wrong))
        total = math.exp(min(0.0, float(logsumexp(log_pmf[v:])) + rounding))
        if delta > 0 and v > 0:
            below = np.cumsum(np.exp(log_pmf[:v][::-1]))
            total += 2 * m * delta * math.exp(rounding) * float(np.max(below / np.arange(1, v + 1)))
        return min(1.0, math.nextafter(total, math.inf))

    return p


def chances(m: int, counts: list[tuple[int, int]], epsilon: float, delta: float) -> float:
    """The p-value of all numbers of guesses together: the least, times how many there are (Bonferroni)."""
    return min(1.0, len(counts) * min(chance(m, r, v, epsilon, delta) for r, v in counts))


def largest_epsilon(m: int, counts: list[tuple[int, int]], delta: float, significance: float) -> float:
    """The largest epsilon found that is refuted with delta: each number of guesses has its share of the significance.

    Returns: epsilon, not negative, finite; 0 where none is refuted. Every value returned was itself tested.
    Cost: 60 times that of `chance`, for each number of guesses.
    """
    return max(_largest(_chance_of(m, r, v, delta), significance / len(counts)) for r, v in counts)


def _largest(p: Callable[[float], float], significance: float) -> float:
    if p(0.0) > significance:
        return 0.0
    inside, outside = 0.0, 1.0
    while p(outside) <= significance:
        inside, outside = outside, 2 * outside
    for _ in range(_BISECTIONS):
        middle = (inside + outside) / 2
        if p(middle) <= significance:
            inside = middle
        else:
            outside = middle
    return inside
