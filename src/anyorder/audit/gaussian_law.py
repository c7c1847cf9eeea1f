"""Aligned scores as two normals with one standard deviation: the t statistic, and the exact interval of mu.

    included ~ N(a + mu s, s^2),   others ~ N(a, s^2),   independent; a and s unknown
    T = (mean included - mean others) / (S sqrt(1/n1 + 1/n0)) ~ noncentral t,  n1 + n0 - 2 degrees of freedom,
                                                                 noncentrality mu sqrt(n1 n0 / (n1 + n0))

An estimate: it is exact under this law, which the whitened scores of a Gaussian mechanism have, and says nothing
elsewhere. The tails of the noncentral t are integrated here, in logs: those of SciPy lose all digits where they are
small.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, log_ndtr, ndtri_exp

from anyorder.errors import ArgumentError

__all__ = ["chance", "limits", "log_tail", "statistic"]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_NOTHING = 1e-14  # spread, in the largest score: that of rounding
_GAP = 1e-6  # between the means, in the largest score: with such a spread, a mu of 10^8 or more
_DROP = 60.0  # of the log of the integrand, at the ends of the interval


def log_tail(t: float, df: int, shift: float) -> float:
    """Ln P[T > t] of the noncentral t with noncentrality `shift`; P[T < t] is that of -t and -shift.

        P[T > t] = E[Phi(shift - t S)],   df S^2 ~ chi^2 with df degrees of freedom

    The integrand is log-concave in S: Gauss-Legendre between the two points where it is e^-60 of its largest value,
    in pieces as narrow as the density of S and as the step of Phi. Relative error of P below 1e-11 for |t| <= 1e5 and
    df <= 1e5 (checked against the regularised beta function at shift 0 and against scipy where that is accurate).

    Cost: some 100 microseconds to 1 ms.
    """
    constant = math.log(2) + df / 2 * math.log(df / 2) - float(gammaln(df / 2))

    def log_integrand(s: NDArray[np.float64]) -> NDArray[np.float64]:
        power = (df - 1) * np.log(s) if df > 1 else 0.0
        return power - df / 2 * s * s + log_ndtr(shift - t * s)  # type: ignore[no-any-return]

    top, start, end = _support(log_integrand)
    pieces = np.linspace(start, end, 48)
    if t != 0:
        pieces = np.concatenate([pieces, np.clip((shift + np.linspace(-40, 40, 41)) / t, start, end)])
    pieces = np.unique(pieces)
    half = np.diff(pieces)[:, None] / 2
    s = pieces[:-1, None] + half * (1 + _NODES)
    total = float(np.sum(half * _WEIGHTS * np.exp(log_integrand(s) - top)))
    return min(0.0, constant + top + math.log(total))


def _support(log_integrand: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> tuple[float, float, float]:
    """(largest value, start, end) of a log-concave function on (0, inf): it is 60 below the largest outside."""
    low, high = -50.0, 50.0  # of ln s
    for _ in range(24):  # by thirds would be slower: a grid of 17, and the two intervals beside its best
        grid = np.linspace(low, high, 17)
        best = int(np.argmax(log_integrand(np.exp(grid))))
        low, high = grid[max(0, best - 1)], grid[min(16, best + 1)]
        if high - low < 1e-9:
            break
    mode = math.exp((low + high) / 2)
    top = float(log_integrand(np.array([mode]))[0])

    def edge(inside: float, outside: float) -> float:
        for _ in range(12):
            grid = np.linspace(inside, outside, 17)
            below = log_integrand(grid) < top - _DROP
            if not below.any():
                return outside
            first = int(below.argmax())
            inside, outside = float(grid[max(0, first - 1)]), float(grid[first])
            if abs(outside - inside) < 0.01 * abs(outside - mode):
                break
        return outside

    far = 2 * mode
    while float(log_integrand(np.array([far]))[0]) > top - _DROP:
        far *= 2
    return top, edge(mode, mode * 1e-30), edge(mode, far)


def _statistic(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> tuple[float, int, float]:
    """(t, degrees of freedom, noncentrality for mu = 1); t is infinite for a gap and no noise."""
    n1 = int(included.sum())
    n0 = len(scores) - n1
    if n1 == 0 or n0 == 0 or n1 + n0 < 3:
        raise ArgumentError(
            f"included must hold canaries of both kinds, three or more together, for the Gaussian law, got {n1} in and "
            f"{n0} out: use method='one_run' or 'f_dp', which do not need both"
        )
    scaled = scores / max(float(np.abs(scores).max()), 1e-300)
    inside, outside = scaled[included], scaled[~included]
    gap = float(inside.mean() - outside.mean())
    squares = float(((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum())
    df = n1 + n0 - 2
    weight = math.sqrt(n1 * n0 / (n1 + n0))
    spread = math.sqrt(squares / df)
    if spread <= _NOTHING and gap > _GAP:
        return math.inf, df, weight
    if spread <= _NOTHING:
        raise ArgumentError(
            "scores must spread among the included or the others for the Gaussian law, got equal ones: nothing tells "
            "the noise; use method='one_run' or 'f_dp'"
        )
    return gap / spread * weight, df, weight


def statistic(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> float | None:
    """The t found: infinite where canaries stand out of no noise at all, None where nothing tells the noise."""
    try:
        return _statistic(scores, included)[0]
    except ArgumentError:
        return None


def chance(scores: NDArray[np.float64], included: NDArray[np.bool_], mu: float) -> float:
    """P[T >= the t found] under the law with this mu: a one-sided p-value, rounded up; uniform where the law holds."""
    t, df, weight = _statistic(scores, included)
    if math.isinf(t):
        return math.ulp(0.0)
    return min(1.0, max(math.exp(log_tail(t, df, mu * weight)) * (1 + 1e-9), math.ulp(0.0)))


def limits(scores: NDArray[np.float64], included: NDArray[np.bool_], below: float, above: float) -> tuple[float, float]:
    """(low, high): mu is under low with probability `below` and over high with probability `above`, exactly.

    low solves P[T > t | low] = below, high P[T < t | high] = above; both are rounded outwards, by 1e-9 of them.
    """
    t, df, weight = _statistic(scores, included)
    if math.isinf(t):
        raise ArgumentError(
            "scores must spread among the included or the others for an interval of mu, got canaries that stand out of "
            "no noise at all: mu is infinite; p_value refutes every claim"
        )
    low = _solved(lambda shift: log_tail(t, df, shift), math.log(below), t)
    high = -_solved(lambda shift: log_tail(-t, df, shift), math.log(above), -t)
    return low / weight, high / weight


def _solved(log_p: Callable[[float], float], aim: float, near: float) -> float:
    """The shift, rounded down, at which a probability that rises in it is e^aim; nearly linear as a normal quantile."""
    from scipy.optimize import brentq

    def excess(shift: float) -> float:
        return float(ndtri_exp(max(log_p(shift), -1e15)) - ndtri_exp(aim))

    step = 1.0 + 0.01 * abs(near)
    low, high = near - step, near + step
    while excess(low) > 0:
        low, step = low - step, 2 * step
    while excess(high) < 0:
        high, step = high + step, 2 * step
    return float(brentq(excess, low, high, xtol=1e-12, rtol=1e-12)) - 1e-9 * (1 + abs(near))
