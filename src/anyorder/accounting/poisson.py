"""DP-SGD with Poisson sampling, the amplified baseline, by privacy loss distributions (Google's dp-accounting).

It holds only where every batch takes each unit by an independent coin. A shuffled loader does not do that: account
for it without amplification, mu = sqrt(epochs) / noise_multiplier.
"""

import math
from functools import cache

from anyorder import _check
from anyorder.accounting.gaussian import compose, gdp_epsilon, gdp_mu

__all__ = ["calibrate_poisson", "poisson_epsilon"]

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
    sigma = _check.positive("noise_multiplier", noise_multiplier)
    q = _sampling(sampling_probability)
    steps = _check.integer("steps", steps, low=1, high=_MAX_STEPS)
    delta = _check.probability("delta", delta)
    unamplified = gdp_epsilon(compose(math.sqrt(steps) / sigma), delta)
    rounding = (steps + 16) * 2.0**-53
    if delta <= 2 * rounding or not 0 < unamplified < math.inf:
        return unamplified
    return min(unamplified, _pld_epsilon(sigma, q, steps, delta - rounding))


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


def _sampling(value: float) -> float:
    return _check.real("sampling_probability", _check.positive("sampling_probability", value), high=1.0)


def _pld_epsilon(sigma: float, q: float, steps: int, delta: float) -> float:
    """Epsilon from the privacy loss distribution of dp-accounting alone; infinity where that cannot tell."""
    pld = _check.optional(
        "dp_accounting.pld.privacy_loss_distribution", extra="amplified", purpose="accounting for Poisson sampling"
    )
    interval = _grid_interval(sigma, q, steps)
    if interval > 100:  # losses in the millions, where sampling hides little, and exp(interval) overflows
        return math.inf
    one_step = pld.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=interval)
    return float(one_step.self_compose(steps).get_epsilon_for_delta(delta))


def _grid_interval(sigma: float, q: float, steps: int) -> float:
    """The interval of the grid of privacy losses: a tenth of the deviation of one step's loss, within bounds of cost.

    The grid inflates the variance of one step's loss by about (interval / deviation)^2 / 10. A grid of a million
    losses must still span the composed loss, so these bounds of its mean and deviation set the least interval.
    """
    largest = 1 / (2 * sigma * sigma) + 10 / sigma
    deviation = q * math.sqrt(math.expm1(min(1 / (sigma * sigma), 700.0)))
    mean = min(q / (2 * sigma * sigma), deviation * deviation)
    spread = min(math.sqrt(q) * (1 / sigma + 1 / (2 * sigma * sigma)), 2 * deviation)
    span = steps * mean + 10 * math.sqrt(steps) * spread + largest
    return max(min(max(deviation / 10, 1e-5), 1e-4), span / 1e6)
