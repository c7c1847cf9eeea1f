"""One run, a whole trade-off function: f-DP in one run [Mahloujifar, Melis, Chaudhuri 2024].

As in `one_run`, m canaries have fair draws of their own, and r of them are guessed from the release. A mechanism is
f-DP where no test of one canary's draw, the others known, has errors below the curve f: with a false alarms at least
f(a) misses. That says more than one pair of epsilon and delta, and so more follows from what was guessed.

What follows, for f symmetric. Let N be the number of right guesses, and S a set of numbers. Of canary i with the draws
of all others known, "guessed in, and the number of other right guesses is in S" is an event of the release; so is
"guessed out, and ..". Where the draw is as guessed these are right guesses, else wrong ones, and f-DP bounds the first
by the second. Averaged over the guess and over all canaries, f being convex:

    wrong >= f(1 - right),   right = E[N; N - 1 in S] / m,   wrong = E[r - N; N in S] / m

With S = {t, t + 1, ..}, and R_t = E[N; N >= t] / m, H_t = E[r - N; N >= t] / m, this is H_t >= f(1 - R_{t+1}) for
every t < r. The largest P[N >= v] that these allow is found from above. All of it is put at N = v: to move probability
from higher numbers to v lowers every R_t and raises every H_t of t <= v. Then, downwards, each number gets the least
that its line demands: what is over is moved to the number below, which helps every line below, and at last to N = 0.
So tau = P[N >= v] is possible if and only if R_0 + H_0 <= r/m (all probability together is at most 1) in

    R_v = v tau / m,   H_v = (r - v) tau / m
    H_t = max(H_{t+1}, f(1 - R_{t+1})),   R_t = R_{t+1} + t/(r - t) (H_t - H_{t+1}),   t = v - 1, .., 0

and the possible tau are an interval from 0, the constraints being convex. Sets S of other forms would say more; their
linear program gives up to 5 % more of mu (m <= 300), and needs a solver whose errors can be trusted to 1e-9.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import assert_never

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.curves import BoundedRange, Composed, Curve, Gaussian, Sampled
from anyorder.accounting.gaussian import gdp_delta, gdp_epsilon

__all__ = ["Claim", "Errors", "chance", "chances", "epsilon_below", "errors_of", "largest_mu", "pairs_of"]

Vector = NDArray[np.float64]
Claim = Curve | tuple[float, float]
Errors = Callable[[Vector], Vector]
"""f(1 - x) of x, rounded down: the wrong share, at least, beside a right share x."""

_GRID = 33
_LEAST = -700.0  # log of the least p-value that is told
_MOST_MU = 1e3
_LINES = 200
_AMPLIFIED_LINES = 12  # each of them a bound of its own, of some seconds perhaps
_FLOOR = 1e-15  # rounding of 1 - delta - e^epsilon (1 - x) where it is positive


def errors_of(claim: Claim) -> Errors:
    """The trade-off function of a claim, rounded down: x -> f(1 - x).

        mu-GDP              Phi(Phi^-1(x) - mu)
        (epsilon, delta)    max(0, 1 - delta - e^epsilon (1 - x), e^-epsilon (x - delta))      [Dong, Roth, Su 2022]

    Other curves: the largest over the pairs (epsilon, delta(epsilon)) of `pairs_of`; fewer pairs than all make f
    smaller, so that a claim is easier to keep, never harder.
    """
    match claim:
        case Gaussian():
            return gaussian_errors(np.float64(claim.mu))
        case BoundedRange() | Sampled() | Amplified() | Composed() | (_, _):
            epsilons, deltas = np.array(pairs_of(claim)).T
            return _errors_of_lines(epsilons, deltas)
        case _:
            assert_never(claim)


@lru_cache(maxsize=4)
def pairs_of(claim: Claim) -> tuple[tuple[float, float], ...]:
    """Pairs (epsilon, delta) that a claim implies: the one that it is, or 200 of its curve, to where delta is 1e-12.

    Of an amplified curve, whose numbers cost more, 12, to where delta is 1e-5.
    """
    match claim:
        case Gaussian() | BoundedRange() | Sampled() | Composed():
            return _pairs_to(claim, 1e-12, _LINES)
        case Amplified():
            return _pairs_to(claim, 1e-5, _AMPLIFIED_LINES)
        case (epsilon, delta):
            return ((epsilon, delta),)
        case _:
            assert_never(claim)


def _pairs_to(curve: Curve, delta: float, number: int) -> tuple[tuple[float, float], ...]:
    epsilons = np.linspace(0.0, curve.epsilon(delta), number).tolist()
    return tuple((epsilon, curve.delta(epsilon)) for epsilon in epsilons)


def gaussian_errors(mu: Vector | np.float64) -> Errors:
    """Phi(Phi^-1(x) - mu) of x, less 1e-11 of it, which is above its rounding; mu may be an array beside x."""
    return lambda x: ndtr(ndtri(x) - mu) * (1 - 1e-11)


def _errors_of_lines(epsilons: Vector, deltas: Vector) -> Errors:
    epsilons, deltas = epsilons[:, None], deltas[:, None]
    with np.errstate(over="ignore"):
        steep, flat = np.minimum(np.exp(epsilons), 1e300), np.exp(-epsilons)

    def errors(x: Vector) -> Vector:
        high, low = 1 - deltas - steep * (1 - x) - _FLOOR, flat * (x - deltas) * (1 - 1e-14)
        most: Vector = np.maximum(high, low).max(axis=0)
        return np.maximum(0.0, most)

    return errors


def _impossible(tau: Vector, errors: Errors, m: int, r: int, v: int) -> NDArray[np.bool_]:
    """Whether P[N >= v] = tau is impossible under f: for each of several tau, or one f for each."""
    right, wrong = v / m * tau, (r - v) / m * tau
    keep = 1 - (r + 16) * 2.0**-52  # of what is added up in `right`, all of it positive
    most = r / m * (1 + (r + 16) * 2.0**-52)
    for t in range(v - 1, -1, -1):
        needed = np.maximum(wrong, errors(np.minimum(right, 1.0) * keep))
        more = needed - wrong
        if not more.any():  # no line below asks for more either
            break
        right, wrong = right + t / (r - t) * more, needed
        if (right + wrong > most).all():
            break
    found: NDArray[np.bool_] = right + wrong > most
    return found


def chance(errors: Errors, m: int, r: int, v: int) -> float:
    """The probability, at most, that v or more of r guesses are right under f-DP; see the head of this module.

    Args:
        errors: f, as `errors_of` gives it.
    Returns: p in [1e-304, 1], rounded up by less than 1e-6 of it.
    Cost: O(v) steps of some microseconds, six times.
    """
    low, high = _LEAST, 0.0
    if not _impossible(np.ones(1), errors, m, r, v)[0]:
        return 1.0
    while high - low > 1e-6:
        grid = np.linspace(low, high, _GRID)
        impossible = _impossible(np.exp(grid), errors, m, r, v)
        impossible[-1] = True  # by the step before
        first = int(impossible.argmax())
        low, high = (low, grid[0]) if first == 0 else (grid[first - 1], grid[first])
        if first == 0:
            break
    return math.exp(high)


def chances(errors: Errors, m: int, counts: list[tuple[int, int]]) -> float:
    """The p-value of all numbers of guesses together: the least, times how many there are (Bonferroni)."""
    return min(1.0, len(counts) * min(chance(errors, m, r, v) for r, v in counts))


def largest_mu(m: int, counts: list[tuple[int, int]], significance: float) -> float:
    """The largest mu found whose mu-GDP is refuted; 0 where none is. Every mu returned was itself tested.

    Cost: O(v) steps of some microseconds, five times, for each number of guesses.
    """
    return max(_largest_mu(m, r, v, significance / len(counts)) for r, v in counts)


def _largest_mu(m: int, r: int, v: int, significance: float) -> float:
    tau = np.full(_GRID, significance)
    low, high = 0.0, 1.0
    while high < _MOST_MU and _impossible(tau[:1], gaussian_errors(np.array([high])), m, r, v)[0]:
        low, high = high, 2 * high
    while high - low > 1e-7:
        grid = np.linspace(low, high, _GRID)
        possible = ~_impossible(tau, gaussian_errors(grid), m, r, v)
        possible[-1] = True
        first = int(possible.argmax())
        if first == 0:
            return 0.0
        low, high = float(grid[first - 1]), float(grid[first])
    return low


def epsilon_below(mu: float, delta: float) -> float:
    """The epsilon of mu-GDP at delta, rounded down; `gdp_epsilon` rounds up, by less than 1e-9 of it.

    Where delta is within 1e-6 of what holds at epsilon 0, that precision is not to be had, and 0 is returned.
    """
    if mu <= 0 or delta >= gdp_delta(mu, 0.0) * (1 - 2e-6):
        return 0.0
    return gdp_epsilon(mu, delta) * (1 - 1e-8)
