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
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy.special import expit, ndtr, ndtri

from anyorder import checks
from anyorder.checks import final

_STEEPEST = math.sqrt(2 * math.pi) / 4  # of Phi^-1(L(y)), at y = 0


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
    e0 = checks.real("e0", e0, low=0.0)
    line = _STEEPEST * e0 * (1 + 2.0**-50)
    if e0 < 0.01:
        return line
    return min(line, -2 * float(ndtri(expit(-e0 / 2))) * (1 + 2.0**-40))


# ----------------------------------------------------------------------------------------------------
# Losses of draws of bounded range on a grid, alone or with a Gaussian of the same sample: always on the safe side.
#
# A pair of distributions (P, Q) is a set of atoms with masses p, q and loss ln(p / q). An atom whose loss lies between
# two points of the grid is split among them so that both masses stay: its likelihood ratio is spread about its mean,
# and the spread pair tells no less ("connect the dots", Doroshenko et al. 2022). All terms are positive: nothing
# cancels.
#
# **A pair from one sample.** Let (P, Q) dominate what a step releases with and without a unit, all of it: draws, then
# sums. Where the unit is in the step's sample with probability q, the release with it is (1 - q) Q + q P, and
#
#     with against without:  loss ln(1 - q + q e^x), mass (1 - q) Q + q P;   without against with:  the negative, mass Q
#
# dominate it: a hockey stick of the mixture is one of (P, Q), for either direction, so that what dominates before the
# sampling does after it. What was released of one sample must be joined before: two amplified parts would have two.


Floats = NDArray[np.float64]

_POINTS = 1 << 18  # above 0 of a grid that is made here, at most about so many
_TAIL = 1e-20  # of the mass, that lies beyond an end of it
_LARGEST = 700.0  # loss whose exponential is a number


@final
@dataclass(frozen=True)
class RangeDraws:
    """So many draws of range e0, without sampling."""

    e0: float
    draws: int


@final
@dataclass(frozen=True)
class Pair:
    """Steps of so many draws of range e0 and a Gaussian, all from one sample a step."""

    sigma: float
    q: float
    steps: int
    e0: float
    draws: int

    @property
    def mu(self) -> float:
        """Of one step without sampling, where its draws are as bad as Gaussians can be."""
        return math.hypot(1 / self.sigma, bounded_range_mu(self.e0) * math.sqrt(self.draws))


def draws_interval(draws: RangeDraws) -> float:
    """The least interval of a grid on which the losses of draws have few points enough."""
    return _reach(0.0, draws.e0, draws.draws) / _POINTS


def draws_losses(pld: Any, draws: RangeDraws, h: float) -> Any:
    """The loss distribution of dp-accounting of draws, on a grid of interval h; None where it is too coarse."""
    if draws.e0 < 2 * h:
        return None
    _, masses = _together(0.0, draws.e0, draws.draws, h)
    low = -(len(masses) - 1)
    both = np.concatenate([(masses * np.exp(np.arange(0, low - 1, -1) * h))[:0:-1], masses])
    return pld.PrivacyLossDistribution(_pmf(low, both, h))


def pair_losses(pld: Any, pair: Pair, h: float) -> Any:
    """The loss distribution of dp-accounting of the steps of a pair; None where its draws are too many."""
    found = _of_step(pair.sigma, pair.e0, pair.draws)
    if found is None:
        return None
    losses, with_unit = found
    without = with_unit * np.exp(-losses)
    q = pair.q
    # the same atoms seen from the other side: a step's pair is the same with its two distributions exchanged
    x = np.concatenate([-losses[:0:-1], losses])
    p, r = np.concatenate([without[:0:-1], with_unit]), np.concatenate([with_unit[:0:-1], without])
    if q < 0.5:
        mixed = np.log1p(q * np.expm1(x))
    else:
        with np.errstate(divide="ignore"):
            mixed = np.logaddexp(np.log1p(-q), math.log(q) + x)
    with_sampling, without_unit = (
        _pmf(*_spread(at, masses, h), h) for at, masses in ((mixed, (1 - q) * r + q * p), (-mixed, r))
    )
    return pld.PrivacyLossDistribution(with_sampling, without_unit).self_compose(pair.steps)


def _pmf(low: int, masses: Floats, h: float) -> Any:
    """Masses on the grid from `low` h on, and what is missing at infinity."""
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    if not np.isfinite(masses).all():  # max() below would take a NaN for nothing missing
        raise ArithmeticError("a loss distribution has masses that are no numbers")
    return DensePLDPmf(h, low, masses, max(0.0, 1 - float(masses.sum())) + 4 * _TAIL, True)


def _of_draw(e0: float, h: float) -> tuple[int, Floats]:
    """(index of the first point, masses) of the density e^(x / 2) / (4 sinh(e0 / 2)) on [-e0, e0].

    The part [s, t] of the cell above the point x has mass K e^(x/2) (e^(t/2) - e^(s/2)), K = 1 / (2 sinh(e0 / 2)), of
    which K e^(x/2) 4 sinh((t + s) / 4) sinh((t - s) / 4) / (1 - e^-h) goes to the point above.
    """
    last = math.ceil(e0 / h)
    points = np.arange(-last, last) * h
    s, t = np.maximum(-e0 - points, 0.0), np.minimum(e0 - points, h)
    weights = np.exp(points / 2) / (2 * math.sinh(e0 / 2))
    mass = weights * np.exp(s / 2) * np.expm1((t - s) / 2)
    above = np.minimum(weights * 4 * np.sinh((t + s) / 4) * np.sinh((t - s) / 4) / -math.expm1(-h), mass)
    result = np.zeros(2 * last + 1)
    result[:-1] += mass - above
    result[1:] += above
    return -last, result


def _of_gaussian(mu: float, h: float, reach: float) -> tuple[int, Floats]:
    """(index of the first point, masses) of the loss N(mu^2 / 2, mu^2) within `reach` of 0."""
    last = math.ceil(reach / h)
    points = np.arange(-last, last + 1) * h
    inside, outside = (_cells(points / mu - shift) for shift in (mu / 2, -mu / 2))
    above = np.clip((inside - outside * np.exp(points[:-1])) / -math.expm1(-h), 0.0, inside)
    result = np.zeros(2 * last + 1)
    result[:-1] += inside - above
    result[1:] += above
    return -last, result


def _cells(edges: NDArray[np.floating[Any]]) -> Floats:
    """Normal masses between edges, by the tail that is the smaller."""
    upper = np.diff(-ndtr(-edges))
    lower = np.diff(ndtr(edges))
    return np.asarray(np.where(edges[:-1] > 0, upper, lower))


def _reach(mu: float, e0: float, draws: int) -> float:
    """Where no more than a 10^-20 of the loss of a Gaussian lies beyond, and as much of that of draws [Hoeffding].

    A draw's loss is within e0 of 0, and as much again where it was spread on a grid, and e0^2 / 2 on average at most.
    """
    far = math.sqrt(-2 * math.log(_TAIL))
    e0 = 1.5 * e0
    return mu * mu / 2 + far * mu + min(draws * e0, draws * e0 * e0 / 2 + far * e0 * math.sqrt(draws))


@lru_cache(maxsize=4)
def _of_step(sigma: float, e0: float, draws: int) -> tuple[Floats, Floats] | None:
    """(losses from 0 on, masses) of draws and a Gaussian, one step without sampling; None for draws beyond telling."""
    reach = _reach(1 / sigma, e0, draws)
    h = max(min(e0, 1 / sigma, 1e-2) / 20, reach / _POINTS)
    return None if e0 < 2 * h or reach > _LARGEST - 3 * h else _together(1 / sigma, e0, draws, h)


def _together(mu: float, e0: float, draws: int, h: float) -> tuple[Floats, Floats]:
    """(losses from 0 on, masses) of draws beside a Gaussian of mu, or without one.

    What lies below 0 follows: masses of the opposite losses times e^loss, which a transform could not tell.
    """
    low, one = _of_draw(e0, h)
    last = math.ceil(_reach(mu, e0, draws) / h) + 2
    start, normal = _of_gaussian(mu, h, last * h) if mu else (0, np.ones(1))
    size = scipy.fft.next_fast_len(max(2 * last + 1, len(normal), len(one)) + 1, real=True)
    waves = scipy.fft.rfft(one, size) ** draws * scipy.fft.rfft(normal, size)
    start += draws * low  # the loss of the first value, up to rounds of the transform
    masses = scipy.fft.irfft(waves, size)[(np.arange(last + 1) - start) % size]
    return np.asarray(np.arange(last + 1) * h), masses


def _spread(losses: Floats, masses: Floats, h: float) -> tuple[int, Floats]:
    """(index of the first point, masses) of atoms on the grid."""
    held = (masses != 0) & np.isfinite(losses)
    losses, masses = losses[held], masses[held]
    cells = np.floor(losses / h).astype(np.int64)
    above = masses * np.clip(np.expm1(cells * h - losses) / math.expm1(-h), 0.0, 1.0)
    low = int(cells.min())
    result = np.zeros(int(cells.max()) - low + 2)
    result[:-1] += np.bincount(cells - low, masses - above)
    result[1:] += np.bincount(cells - low, above)
    return low, result
