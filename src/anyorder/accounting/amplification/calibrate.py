"""The least noise with which an amplified claim keeps a budget."""

from collections.abc import Callable
from functools import cache
from math import exp, inf, log, log1p

from anyorder import _check
from anyorder.accounting.amplification.bins_rough import likely_epsilon, rough_epsilon
from anyorder.accounting.amplification.curve import Amplified
from anyorder.accounting.amplification.exact import rough_truncated
from anyorder.accounting.amplification.methods import Deterministic, Method, MonteCarlo, Pld
from anyorder.accounting.amplification.mixture import bins_gram
from anyorder.accounting.amplification.values import Secret, default_method
from anyorder.accounting.gaussian import NEIGHBOURS, gdp_mu
from anyorder.accounting.secants import just_below
from anyorder.errors import ArgumentError
from anyorder.participation.sampled import BallsInBins, TruncatedPoisson
from anyorder.sensitivity import known_sensitivity
from anyorder.strategy import Strategy

__all__ = ["calibrate_amplified"]

_TOLERANCE = 1e-4  # of the target epsilon
_STEP = _TOLERANCE / 8  # of sigma
_LOOKS = 16
_SLOPE = -1.2  # of the logarithm of epsilon by that of sigma, at first
_ROUGH = 1e-3  # of the target epsilon
_CHANCE = 4e-3  # of the target epsilon, by samples
_POWER = 1.5


def calibrate_amplified(
    strategy: Strategy,
    participation: Secret,
    epsilon: float,
    delta: float,
    method: Method | None = None,
    neighbours: str = "zero-out",
) -> float:
    """The smallest noise multiplier, noise std over clip norm, with which the amplified claim keeps (epsilon, delta).

    Args:
        strategy: C.
        participation: the order: truncated Poisson sampling, balls in bins, random allocation or sampling with
            separation. For the other two see `calibrate_poisson`.
        epsilon: above 0.
        delta: strictly between 0 and 1.
        method: of the claim; None for the order's own.
        neighbours: of the claim.
    Returns: sigma; the claim's epsilon lies in [epsilon (1 - 1e-4), epsilon], in general, and is never above. By
        samples it lies in [epsilon (1 - 4e-3), epsilon], in general.
    Cost: some three times that of the claim, by the deterministic bound or a loss distribution; by samples ten times.
    Raises: ArgumentError; PlanError where the order is not accounted with this C.
    """
    epsilon, delta = _check.positive("epsilon", epsilon), _check.probability("delta", delta)
    _check.choice("neighbours", neighbours, NEIGHBOURS)
    chosen = default_method(strategy, participation) if method is None else method

    def curve(log_sigma: float) -> Amplified:
        return Amplified(strategy, participation, exp(log_sigma), chosen, neighbours=neighbours)

    # with the batches known it holds: the search goes down from there
    sens = known_sensitivity(strategy, participation).value
    high = log(NEIGHBOURS[neighbours] * sens / gdp_mu(epsilon, delta)) + _STEP
    if type(chosen) is MonteCarlo:
        return exp(_by_samples(curve, epsilon, delta, high))
    start, slope = high - 0.4, _SLOPE
    if neighbours != "replace-one":
        for rough, tolerance in _rough(chosen, strategy, participation, epsilon, delta):
            found = just_below(_beyond(rough, epsilon), start, slope, tolerance, looks=6)
            start, slope = found or (start, slope)
    found = just_below(_beyond(lambda sigma: curve(log(sigma)).epsilon(delta), epsilon), start, slope, _TOLERANCE / 2)
    return exp(_without_chance(curve, epsilon, delta, high) if found is None else found[0])


def _beyond(epsilon_at: Callable[[float], float], epsilon: float) -> Callable[[float], float]:
    """By how much, in logarithms, an epsilon at sigma is above the target, of the logarithm of sigma; falling."""

    def beyond(log_sigma: float) -> float:
        found = epsilon_at(exp(log_sigma))
        over = log(found / epsilon) if found > 0 else -inf
        return max(over, 1e-15) if found > epsilon else min(max(over, -50.0), 0.0)

    return beyond


def _rough(
    method: Method, strategy: Strategy, order: Secret, epsilon: float, delta: float
) -> list[tuple[Callable[[float], float], float]]:
    """(epsilon at sigma as far as it is known quickly, how near the target a search by it goes), the quickest first."""
    match method, order:
        case Deterministic(), BallsInBins():
            gram = bins_gram(strategy, order)
            return [
                (lambda sigma: rough_epsilon(gram, sigma, delta), 20 * _ROUGH),
                (lambda sigma: likely_epsilon(gram, sigma, delta), _TOLERANCE / 2),
            ]
        case Pld(), TruncatedPoisson():
            return [
                (lambda sigma: rough_truncated(strategy, order, sigma, delta), _ROUGH),
            ]
        case _:
            return []


def _without_chance(curve: Callable[[float], Amplified], epsilon: float, delta: float, high: float) -> float:
    """The logarithm of sigma, by delta at epsilon, which takes one number where epsilon at delta takes many."""
    from scipy.optimize import brentq  # slow to load

    @cache  # the search asks for the ends of its bracket again
    def excess(log_sigma: float) -> float:
        found = curve(log_sigma).delta(epsilon)
        return max(log(found / delta), -50.0) if found > 0 else -50.0

    low, width = high - 0.4, 0.4
    while excess(low) <= 0:
        high, low, width = low, low - width, 1.5 * width
        if width > 100:
            raise ArgumentError(f"epsilon={epsilon:g} is kept at delta={delta:g} with next to no noise")
    result = float(brentq(excess, low, high, xtol=_STEP / 4, rtol=1e-14))
    step = _STEP
    while curve(result).epsilon(delta) > epsilon:
        result, step = result + step, 1.5 * step
    return result


def _by_samples(curve: Callable[[float], Amplified], epsilon: float, delta: float, high: float) -> float:
    """The logarithm of a sigma whose own samples keep epsilon, after at most `_LOOKS` looks.

    Each look is at samples of its own. Numbers jump by some thousandths from one sigma to the next, so that the least
    sigma has no meaning beyond that: the best of a few that hold is taken.
    """
    aim = log(epsilon * (1 - _CHANCE / 2))
    held: tuple[float, float] | None = None  # the least sigma that keeps epsilon, and its log epsilon
    broke: tuple[float, float] | None = None
    at = high
    for _ in range(_LOOKS):
        found = log(max(curve(at).epsilon(delta), 1e-9))
        if found <= log(epsilon):
            held = (at, found) if held is None or at < held[0] else held
            if found >= log(epsilon) + log1p(-_CHANCE):
                break
        else:
            broke = (at, found) if broke is None or at > broke[0] else broke
        if held is not None and broke is not None and held[0] - broke[0] < _CHANCE / 4:
            break  # numbers jump here
        if held is None:
            at = at + 0.1  # the rounding of samples, at the noise that known batches need
        elif broke is None or broke[0] >= held[0]:
            at = held[0] - min(max((aim - held[1]) / _POWER, _STEP), 0.5)
        else:
            share = (broke[1] - aim) / max(broke[1] - held[1], 1e-12)
            at = broke[0] + min(max(share, 0.1), 0.9) * (held[0] - broke[0])
    if held is None:
        raise ArgumentError(f"samples must be more to show epsilon={epsilon:g} at delta={delta:g}")
    return held[0]
