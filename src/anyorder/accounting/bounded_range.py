"""Mechanisms of bounded range, as a draw of the exponential mechanism is: what their outputs tell at most.

A mechanism has range e0 if ln(P(y) / P'(y)) lies, over all outputs y, within an interval of length e0. A draw with
probability proportional to exp(lambda u) has: ln(P(y) / P'(y)) is lambda (u(y) - u'(y)) less what is the same for all
y, so that its range is lambda times how far a unit moves some u up and another down, together:

    e0 = lambda a      where a unit moves every u by 0 to a, in one direction
    e0 = 2 lambda S0   where u lies in [0, S0] and a unit may do anything

The worst pair of neighbours at each epsilon tells, by a = e^-e0,

    delta(eps) = (1 - e^((eps - e0) / 2))^2 / (1 - e^-e0),  |eps| <= e0          [Dong, Durfee, Rogers 2020]

No single mechanism of range e0 is the worst at all of them, so that draws that depend on each other may tell more
than copies of one. But delta(eps) is the curve of a pair of distributions that dominates every mechanism of range e0 at
once (its loss has density proportional to e^(x / 2) on [-e0, e0]), and draws that depend on each other tell no more
than that many copies of a dominating pair [Zhu, Dong, Wang 2022, Theorem 10]. In hypothesis tests the pair is one
logistic location against another, e0 apart: f(x) = L(L^-1(1 - x) - e0), L(y) = 1 / (1 + e^-y).
"""

import math

from scipy.special import expit, ndtri

from anyorder import _check

__all__ = ["bounded_range_delta", "bounded_range_mu"]

_STEEPEST = math.sqrt(2 * math.pi) / 4  # of Phi^-1(L(y)), at y = 0


def bounded_range_delta(e0: float, epsilon: float) -> float:
    """The smallest delta at which every mechanism of range e0 keeps epsilon, rounded up.

    Args:
        e0: not negative.
        epsilon: of any sign; below -e0, and below 0 for e0 = 0, it is 1 - e^epsilon.
    Raises: ArgumentError.

    Example:
        >>> bounded_range_delta(1.0, 1.0), round(bounded_range_delta(1.0, 0.0), 6)
        (0.0, 0.244919)
    """
    e0, epsilon = _check.real("e0", e0, low=0.0), _check.real("epsilon", epsilon)
    if epsilon >= e0:
        return 0.0
    if epsilon <= -e0:
        return min(1.0, -math.expm1(epsilon) * (1 + 2.0**-50))
    return min(1.0, math.expm1((epsilon - e0) / 2) ** 2 / -math.expm1(-e0) * (1 + 2.0**-49))


def bounded_range_mu(e0: float) -> float:
    """The smallest mu for which every mechanism of range e0 is mu-GDP, rounded up.

        mu = 2 Phi^-1(1 / (1 + e^(-e0 / 2)))           about 0.627 e0 where e0 is small, never more

    In tests it is a logistic location against another e0 apart, and h(y) = Phi^-1(L(y)) turns the logistic to a normal:
    h falls off from a line to both sides of 0, for the logistic has the heavier tails [van Zwet 1964]. So
    h(y) - h(y - e0) is largest at y = e0 / 2, and normal locations that far apart tell no less.

    Args:
        e0: not negative.
    Raises: ArgumentError.

    Example:
        >>> round(bounded_range_mu(1.0), 4)
        0.6208
    """
    e0 = _check.real("e0", e0, low=0.0)
    line = _STEEPEST * e0 * (1 + 2.0**-50)
    if e0 < 0.01:
        return line
    return min(line, -2 * float(ndtri(expit(-e0 / 2))) * (1 + 2.0**-40))
