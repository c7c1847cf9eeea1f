"""DP-SGD with Poisson sampling, the amplified baseline, by privacy loss distributions (Google's dp-accounting).

It holds only where every batch takes each unit by an independent coin. A shuffled loader does not do that: account
for it without amplification, mu = sqrt(epochs) / noise_multiplier.
"""

import math
from collections.abc import Sequence
from functools import cache, lru_cache, reduce
from typing import Any

from anyorder import _check
from anyorder.accounting.gaussian import compose_mus, gdp_delta, gdp_epsilon, gdp_mu, zcdp_rho

__all__ = ["Part", "calibrate_poisson", "check_sampled", "mixed_delta", "mixed_epsilon", "poisson_epsilon"]

Part = tuple[float, float, int]  # noise multiplier, sampling probability, steps

_UP = 1 + 2e-10  # what a loss distribution's own rounding may take from epsilon: six times what was seen
_TOLERANCE = 1e-6  # of the target epsilon
_MAX_STEPS = 1_000_000  # dp-accounting takes minutes for more, and its float error nears the usual deltas


def poisson_epsilon(noise_multiplier: float, sampling_probability: float, steps: int, delta: float) -> float:
    """The epsilon of DP-SGD with Poisson sampling, at or above the true one. Neighbours: add-or-remove-one.

    Each of the steps releases the sum over a batch, into which each unit falls with probability
    sampling_probability, plus noise_multiplier * clip_norm * N(0, I). The privacy loss distribution of one step is
    rounded to a grid (connect the dots, pessimistic), composed by Fourier transform, and inverted. The transform
    has an error of about 1e-17 a step, so ten times that is taken off delta first. The result is never above
    gdp_epsilon(sqrt(steps) / noise_multiplier, delta), the same without sampling, which is also what a delta below
    1e-16 a step gets.

    Args:
        noise_multiplier: above 0, unitless.
        sampling_probability: above 0, at most 1.
        steps: from 1 to 1 000 000.
        delta: strictly between 0 and 1.
    Returns: epsilon. Above the true one by 0.1 % or less, in general; more where it is below 0.001.
    Cost: up to some seconds and 0.5 GB.
    Raises: ArgumentError; MissingDependencyError without dp-accounting.
    """
    part = check_sampled(noise_multiplier, sampling_probability, steps)
    return mixed_epsilon([part], _check.probability("delta", delta))


def calibrate_poisson(epsilon: float, delta: float, sampling_probability: float, steps: int) -> float:
    """The smallest noise multiplier for which `poisson_epsilon` keeps epsilon.

    Args:
        epsilon: above 0.
        delta: strictly between 0 and 1.
        sampling_probability: above 0, at most 1.
        steps: from 1 to 1 000 000.
    Returns: sigma; poisson_epsilon(sigma, ..) lies in [epsilon (1 - 1e-6), epsilon].
    Cost: about seven times that of `poisson_epsilon`.
    Raises: ArgumentError; MissingDependencyError without dp-accounting.
    """
    from scipy.optimize import brentq  # slow to load

    epsilon = _check.positive("epsilon", epsilon)
    delta = _check.probability("delta", delta)
    q = _sampling(sampling_probability)
    steps = _check.integer("steps", steps, low=1, high=_MAX_STEPS)
    aim = epsilon * (1 - _TOLERANCE / 2)

    @cache  # the search asks for the ends of its bracket again
    def excess(log_sigma: float) -> float:
        return poisson_epsilon(math.exp(log_sigma), q, steps, delta) - aim

    # the central limit, mu = q sqrt(steps (e^(1/sigma^2) - 1)) [Bu et al. 2020], starts the search
    guess = -math.log(math.log1p((gdp_mu(epsilon, delta) / q) ** 2 / steps)) / 2
    low = high = guess
    width = 0.1
    while excess(low) <= 0:
        high, low, width = low, low - width, 2 * width
    while excess(high) > 0:
        low, high, width = high, high + width, 2 * width
    result = brentq(excess, low, high, xtol=_TOLERANCE / 16, rtol=1e-14)
    while excess(result) > aim * _TOLERANCE / 4:
        result += _TOLERANCE / 16
    return math.exp(result)


def check_sampled(noise_multiplier: float, sampling_probability: float, steps: int) -> Part:
    """The part of a composition that these are. Raises: ArgumentError; see `poisson_epsilon`."""
    sigma = _check.positive("noise_multiplier", noise_multiplier)
    return sigma, _sampling(sampling_probability), _check.integer("steps", steps, low=1, high=_MAX_STEPS)


def _sampling(value: float) -> float:
    return _check.real("sampling_probability", _check.positive("sampling_probability", value), high=1.0)


def mixed_epsilon(parts: Sequence[Part], delta: float) -> float:
    """The epsilon of several mechanisms on the same units together, at or above the true one; see `poisson_epsilon`.

    Args:
        parts: (noise_multiplier, sampling_probability, steps), checked; probability 1 is a mechanism without sampling.
        delta: strictly between 0 and 1.
    """
    unsampled, rounding = _unsampled(parts), _rounding(parts)
    above = gdp_epsilon(unsampled, delta) if unsampled < math.inf else math.inf
    if delta <= 2 * rounding or not 0 < above < math.inf:
        return above
    losses = _losses(parts)
    if losses is None:
        return above
    return min(above, float(losses.get_epsilon_for_delta(delta - rounding)) * _UP)


def mixed_delta(parts: Sequence[Part], epsilon: float) -> float:
    """The delta of several mechanisms on the same units together, at or above the true one; see `mixed_epsilon`."""
    unsampled = _unsampled(parts)
    above = gdp_delta(unsampled, epsilon) if unsampled < math.inf else 1.0
    rounding = _rounding(parts)
    if above <= rounding or math.isinf(zcdp_rho(unsampled)):
        return above
    losses = _losses(parts)
    if losses is None:
        return above
    return min(above, math.nextafter(max(0.0, float(losses.get_delta_for_epsilon(epsilon))) + rounding, math.inf))


def _unsampled(parts: Sequence[Part]) -> float:
    """The mu of the same mechanisms without sampling, which hides no less of a unit than they do."""
    return compose_mus(*(math.sqrt(steps) / sigma for sigma, _, steps in parts))


def _rounding(parts: Sequence[Part]) -> float:
    """What the transforms of a composition may take from delta: ten times what they did."""
    return (sum(steps for _, _, steps in parts) + 16 * (2 * len(parts) - 1)) * 2.0**-53


def _losses(parts: Sequence[Part]) -> Any:
    """The privacy loss distribution of dp-accounting, pessimistic; None where its grid cannot tell."""
    pld = _check.optional(
        "dp_accounting.pld.privacy_loss_distribution", extra="amplified", purpose="accounting for Poisson sampling"
    )
    interval = _grid_interval(parts)
    if interval > 100:  # losses in the millions, where sampling hides little, and exp(interval) overflows
        return None
    return _composed(pld, tuple(parts), interval)


@lru_cache(maxsize=2)  # up to 32 MB each, for curves that are asked at several points
def _composed(pld: Any, parts: tuple[Part, ...], interval: float) -> Any:
    found = []
    for sigma, q, steps in parts:
        one_step = pld.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=interval)
        found.append(one_step.self_compose(steps))
    return reduce(lambda one, other: one.compose(other), found)


def _grid_interval(parts: Sequence[Part]) -> float:
    """The interval of the grid of privacy losses: a tenth of the deviation of a step's loss, within bounds of cost.

    The grid inflates the variance of each step's loss by about interval^2 / 10. A grid of a million
    losses must still span the composed loss, so these bounds of its mean and deviation set the least interval.
    """
    largest, mean, spreads, deviations = 0.0, 0.0, [], []
    for sigma, q, steps in parts:
        largest += 1 / (2 * sigma * sigma) + 10 / sigma
        deviation = q * math.sqrt(math.expm1(min(1 / (sigma * sigma), 700.0)))
        mean += steps * min(q / (2 * sigma * sigma), deviation * deviation)
        spread = min(math.sqrt(q) * (1 / sigma + 1 / (2 * sigma * sigma)), 2 * deviation)
        spreads.append(10 * math.sqrt(steps) * spread)
        deviations.append((deviation, steps))
    span = mean + math.hypot(*spreads) + largest
    most = max(deviation for deviation, _ in deviations)
    share = sum(steps * (deviation / most) ** 2 for deviation, steps in deviations) / sum(s for _, s in deviations)
    deviation = most * math.sqrt(share)  # root mean square over steps
    return max(min(max(deviation / 10, 1e-5), 1e-4), span / 1e6)
