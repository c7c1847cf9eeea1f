"""DP-SGD with Poisson sampling, the amplified baseline, by privacy loss distributions (Google's dp-accounting).

It holds only where every batch takes each unit by an independent draw. A shuffled loader does not do that: account
for it without amplification, mu = sqrt(epochs) / noise_multiplier.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder._numerics import bisect, crossing, just_below
from anyorder.accounting.bounded_range import (
    Pair,
    RangeDraws,
    bounded_range_mu,
    draws_interval,
    draws_losses,
    pair_losses,
)
from anyorder.accounting.gaussian import compose_mus, gdp_delta, gdp_epsilon, gdp_mu, zcdp_rho
from anyorder.checks import final

__all__ = [
    "Part",
    "PoissonParts",
    "calibrate_poisson",
    "check_sampled",
    "mixed_delta",
    "mixed_epsilon",
    "poisson_epsilon",
    "replaced_gaussian",
    "rough_poisson",
    "sampled_gaussian",
    "step_interval",
]


@final
@dataclass(frozen=True)
class PoissonParts:
    """A release by secret draws whose loss distribution is made elsewhere.

    Attributes:
        mu: of the Gaussian that tells no less: the same with draws that are known.
        transforms: mechanisms that its own distribution is composed of.
        of: all that the distribution depends on.
        losses: (of, module of loss distributions, interval) -> the distribution, pessimistic; None for that of mu.
    """

    mu: float
    transforms: int
    of: Hashable
    losses: Callable[[Any, Any, float], Any]


Floats = NDArray[np.float64]

Part = (
    tuple[float, float, int] | RangeDraws | Pair | PoissonParts
)  # a tuple: noise multiplier, sampling probability, steps

_UP = 1 + 2e-10  # what a loss distribution's own rounding may take from epsilon: six times what was seen
_TOLERANCE = 1e-6  # of the target epsilon
_COARSE = 4.0  # times the interval of a grid, where it need not be near
_REACH = 10.5  # of the losses of a step at sigma 1
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
    return mixed_epsilon((part,), checks.probability("delta", delta))


def calibrate_poisson(epsilon: float, delta: float, sampling_probability: float, steps: int) -> float:
    """The smallest noise multiplier for which `poisson_epsilon` keeps epsilon.

    Args:
        epsilon: above 0.
        delta: strictly between 0 and 1.
        sampling_probability: above 0, at most 1.
        steps: from 1 to 1 000 000.
    Returns: sigma; poisson_epsilon(sigma, ..) lies in [epsilon (1 - 1e-6), epsilon].
    Cost: about five times that of `poisson_epsilon`; the same question again costs nothing.
    Raises: ArgumentError; MissingDependencyError without dp-accounting.
    """
    epsilon, delta = checks.positive("epsilon", epsilon), checks.probability("delta", delta)
    steps = checks.integer("steps", steps, low=1, high=_MAX_STEPS)
    return _calibrated(epsilon, delta, _sampling(sampling_probability), steps)


def rough_poisson(epsilon: float, delta: float, sampling_probability: float, steps: int) -> float:
    """About `calibrate_poisson`, by a coarser grid, for searches: some thousandths more, and nothing claims it.

    Args, Raises: as there.
    Cost: a quarter of it.
    """
    epsilon, delta = checks.positive("epsilon", epsilon), checks.probability("delta", delta)
    steps = checks.integer("steps", steps, low=1, high=_MAX_STEPS)
    return math.exp(_rough_search(epsilon, delta, _sampling(sampling_probability), steps)[0])


def _epsilon_at(q: float, steps: int, delta: float, epsilon: float, coarse: float) -> Callable[[float], float]:
    """By how much epsilon is above the target, as a share of it, of the logarithm of sigma; falling."""
    return lambda x: mixed_epsilon(((math.exp(x), q, steps),), delta, coarse) / epsilon - 1


@lru_cache(maxsize=64)
def _rough_search(epsilon: float, delta: float, q: float, steps: int) -> tuple[float, float]:
    """The logarithm of sigma by a coarse grid, and the slope of epsilon there; of the guess where it finds none."""
    # the central limit, mu = q sqrt(steps (e^(1/sigma^2) - 1)) [Bu et al. 2020], starts the search
    guess = -math.log(math.log1p((gdp_mu(epsilon, delta) / q) ** 2 / steps)) / 2
    found = just_below(_epsilon_at(q, steps, delta, epsilon, _COARSE), guess, -1.2, 1e-5)
    return (guess, -1.2) if found is None else found


@lru_cache(maxsize=64)
def _calibrated(epsilon: float, delta: float, q: float, steps: int) -> float:
    aim = epsilon * (1 - _TOLERANCE / 2)
    start, slope = _rough_search(epsilon, delta, q, steps)
    found = just_below(_epsilon_at(q, steps, delta, epsilon, 1.0), start, slope, _TOLERANCE)
    if found is not None and poisson_epsilon(math.exp(found[0]), q, steps, delta) <= epsilon:
        return math.exp(found[0])

    @cache  # the search asks for the ends of its bracket again
    def excess(log_sigma: float) -> float:
        return poisson_epsilon(math.exp(log_sigma), q, steps, delta) - aim

    low = high = start
    width = 0.1
    while excess(low) <= 0:
        high, low, width = low, low - width, 2 * width
    while excess(high) > 0:
        low, high, width = high, high + width, 2 * width
    result = crossing(excess, low, high, absolute=_TOLERANCE / 16, relative=1e-14)
    while excess(result) > aim * _TOLERANCE / 4:
        result += _TOLERANCE / 16
    return math.exp(result)


def check_sampled(noise_multiplier: float, sampling_probability: float, steps: int) -> tuple[float, float, int]:
    """The part of a composition that these are. Raises: ArgumentError; see `poisson_epsilon`."""
    sigma = checks.positive("noise_multiplier", noise_multiplier)
    return sigma, _sampling(sampling_probability), checks.integer("steps", steps, low=1, high=_MAX_STEPS)


def _sampling(value: float) -> float:
    return checks.real("sampling_probability", checks.positive("sampling_probability", value), high=1.0)


@lru_cache(maxsize=64)
def mixed_epsilon(parts: tuple[Part, ...], delta: float, coarse: float = 1.0) -> float:
    """The epsilon of several mechanisms on the same units together, at or above the true one; see `poisson_epsilon`.

    Args:
        parts: (noise_multiplier, sampling_probability, steps), checked; probability 1 is a mechanism without sampling.
            Or draws of bounded range, alone or with a Gaussian under one draw.
        delta: strictly between 0 and 1.
        coarse: how many times as wide the grid of losses is; above the truth whatever it is.
    """
    unsampled, rounding = _unsampled(parts), _rounding(parts)
    above = gdp_epsilon(unsampled, delta) if unsampled < math.inf else math.inf
    if above < math.inf and any(isinstance(part, (RangeDraws, Pair)) for part in parts):
        above = min(above, gdp_epsilon(_concentrated(parts), delta, "rdp"))
    if delta <= 2 * rounding or not 0 < above < math.inf:
        return above
    losses = _losses(parts, coarse)
    if losses is None:
        return above
    return min(above, float(losses.get_epsilon_for_delta(delta - rounding)) * _UP)


def mixed_delta(parts: Sequence[Part], epsilon: float) -> float:
    """The delta of several mechanisms on the same units together, at or above the true one; see `mixed_epsilon`."""
    unsampled = _unsampled(parts)
    above = gdp_delta(unsampled, epsilon) if unsampled < math.inf else 1.0
    if above > 0 and unsampled < math.inf and any(isinstance(part, (RangeDraws, Pair)) for part in parts):
        above = min(above, _concentrated_delta(_concentrated(parts), epsilon))
    rounding = _rounding(parts)
    if above <= rounding or math.isinf(zcdp_rho(unsampled)):
        return above
    losses = _losses(parts)
    if losses is None:
        return above
    return min(above, math.nextafter(max(0.0, float(losses.get_delta_for_epsilon(epsilon))) + rounding, math.inf))


def _unsampled(parts: Sequence[Part]) -> float:
    """The mu of the same mechanisms without sampling, which hides no less of a unit than they do."""
    return compose_mus(*(math.sqrt(steps) / sigma for sigma, _, steps in map(_as_gaussian, parts)))


def _as_gaussian(part: Part) -> tuple[float, float, int]:
    """(noise multiplier, sampling probability, steps) of Gaussians that tell no less."""
    if isinstance(part, RangeDraws):
        return math.nextafter(1 / bounded_range_mu(part.e0), 0.0), 1.0, part.draws
    if isinstance(part, Pair):
        return 1 / part.mu * (1 - 2.0**-50), part.q, part.steps
    if isinstance(part, PoissonParts):
        return 1 / part.mu * (1 - 2.0**-50), 1.0, 1
    return part


def _concentrated(parts: Sequence[Part]) -> float:
    """The mu whose zero-concentrated DP, mu^2 / 2, that of the parts is without sampling; a draw's is e0^2 / 8."""
    found = []
    for part in parts:
        if isinstance(part, RangeDraws):
            found.append(math.sqrt(part.draws) * part.e0 / 2)
        elif isinstance(part, Pair):
            found.append(math.sqrt(part.steps) * math.hypot(1 / part.sigma, math.sqrt(part.draws) * part.e0 / 2))
        elif isinstance(part, PoissonParts):
            found.append(part.mu)
        else:
            found.append(math.sqrt(part[2]) / part[0])
    return compose_mus(*found) * (1 + 2.0**-50)


def _concentrated_delta(mu: float, epsilon: float) -> float:
    """A delta at which zero-concentrated DP of mu^2 / 2 keeps epsilon: the inverse of the conversion "rdp"."""

    def holds(log_delta: float) -> bool:
        return gdp_epsilon(mu, math.exp(log_delta), "rdp") <= epsilon

    return math.exp(bisect(holds, inside=0.0, outside=-700.0, steps=50))


def _rounding(parts: Sequence[Part]) -> float:
    """What the transforms of a composition may take from delta: ten times what they did."""
    steps = sum(_as_gaussian(part)[2] for part in parts)
    inner = sum(part.steps * part.draws for part in parts if isinstance(part, Pair))  # in each step's own transform
    inner += sum(part.transforms for part in parts if isinstance(part, PoissonParts))
    return (steps + inner + 16 * (2 * len(parts) - 1)) * 2.0**-53


def _losses(parts: Sequence[Part], coarse: float = 1.0) -> Any:
    """The privacy loss distribution of dp-accounting, pessimistic; None where its grid cannot tell."""
    pld = checks.optional(
        "dp_accounting.pld.privacy_loss_distribution", extra="amplified", purpose="accounting for Poisson sampling"
    )
    interval = coarse * _grid_interval(parts)
    ranges = [part.e0 for part in parts if isinstance(part, (RangeDraws, Pair))]
    if interval > 100 or max(ranges, default=0.0) > 500:  # losses in the millions, where exp(interval) overflows
        return None
    return _composed(pld, tuple(parts), interval)


@lru_cache(maxsize=2)  # up to 32 MB each, for curves that are asked at several points
def _composed(pld: Any, parts: tuple[Part, ...], interval: float) -> Any:
    found = []
    for part in parts:
        losses = None
        if isinstance(part, RangeDraws):
            losses = draws_losses(pld, part, interval)
        elif isinstance(part, Pair):
            losses = pair_losses(pld, part, interval)
        elif isinstance(part, PoissonParts):
            losses = part.losses(part.of, pld, interval)
        if losses is not None:
            found.append(losses)
            continue
        sigma, q, steps = _as_gaussian(part)
        if isinstance(part, RangeDraws):
            sigma, steps = sigma / math.sqrt(steps) * (1 - 2.0**-50), 1
        found.append(sampled_gaussian(pld, sigma, q, interval).self_compose(steps))
    return reduce(lambda one, other: one.compose(other), found)


def sampled_gaussian(pld: Any, sigma: float, q: float, h: float) -> Any:
    """The loss distribution of one sampled Gaussian: `pld.from_gaussian_mechanism`, in a sixth of the time.

    Where each loss of the grid is reached is found there by some Python calls a loss, and here in one array.

    Args:
        pld: the module dp_accounting.pld.privacy_loss_distribution.
        sigma: noise multiplier, of sums in which a unit counts 1.
        q: sampling probability, at most 1.
        h: interval of the grid of losses.
    Returns: pessimistic, for add-or-remove-one.
    """
    ways = ("REMOVE",) if q == 1 else ("REMOVE", "ADD")
    return pld.PrivacyLossDistribution(*(_pessimistic(sigma, q, h, way) for way in ways))


def replaced_gaussian(pld: Any, sigma: float, q: float, h: float) -> Any:
    """The same where the unit is another, which is in the sum when it is: at 1 from the sum without, and at -1."""
    return pld.PrivacyLossDistribution(_pessimistic(sigma, q, h, "REPLACE"))


def _pessimistic(sigma: float, q: float, h: float, way: str) -> Any:
    """Of one direction, by connecting the dots [Doroshenko et al. 2022, Algorithm 1]."""
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    loss = GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=AdjacencyType[way])
    ends = loss.connect_dots_bounds()
    low, high = math.floor(ends.epsilon_lower / h), math.ceil(ends.epsilon_upper / h)
    epsilons = np.arange(low, high + 1) * h
    # delta = P[X <= x] - e^epsilon Q[X <= x], x where the loss, which falls in x, is epsilon. With the unit the loss is
    # above log(1 - q): at less delta is 1 - e^epsilon. Without it, it is below -log(1 - q): from there on delta is 0.
    least = math.log1p(-q) if q < 1 else -math.inf
    inside = {"REMOVE": epsilons > least, "ADD": epsilons < -least, "REPLACE": epsilons < math.inf}[way]
    deltas = -np.expm1(np.minimum(epsilons, 0.0)) if way == "REMOVE" else np.zeros(len(epsilons))
    x = _reached(epsilons[inside], sigma, q, way)
    deltas[inside] = loss.mu_upper_cdf(x) - np.exp(epsilons[inside] + loss.mu_lower_log_cdf(x))
    return create_pmf_pessimistic_connect_dots_fixed_gap(h, low, high, np.clip(deltas, 0.0, 1.0))


@np.errstate(divide="ignore")  # infinity is what is meant
def _reached(losses: Floats, sigma: float, q: float, way: str) -> Floats:
    """Where the loss of one distribution to the other is so large.

    REMOVE:  (1 - q) N(0) + q N(-1) to N(0): log(1 - q + q e^y), y = -(x + 1/2) / sigma^2
    ADD:     N(0) to (1 - q) N(0) + q N(1): -log(1 - q + q e^y), y = (x - 1/2) / sigma^2
    REPLACE: (1 - q) N(0) + q N(-1) to (1 - q) N(0) + q N(1), where with r = e^(1 / 2 sigma^2) (1 - q) / q
             loss = log((r + e^(-x / sigma^2)) / (r + e^(x / sigma^2))): x = -sigma^2 (asinh(r sinh(loss/2)) + loss/2)
    """
    if way == "REPLACE":
        half = np.abs(losses) / 2
        log_r = 0.5 / sigma**2 + np.log1p(-q) - math.log(q)
        a = log_r + half + np.log(-np.expm1(-2 * half)) - math.log(2)  # of r sinh(loss / 2)
        asinh = np.where(a > 20, a + math.log(2), np.arcsinh(np.exp(np.minimum(a, 20.0))))
        return np.asarray(-(sigma**2) * np.sign(losses) * (asinh + half))
    sign = 1.0 if way == "REMOVE" else -1.0
    y = sign * losses  # log((e^y - (1 - q)) / q), for q = 1 itself
    if q < 1:
        y = y - math.log(q) + np.log(-np.expm1(np.minimum(math.log1p(-q) - y, 0.0)))
    return np.asarray(-sign * (0.5 + y * sigma**2))


def step_interval(sigma: float, q: float, steps: int, *, quick: bool = True) -> float:
    """The interval of the grid of losses for so many steps of one sampled Gaussian; see `_grid_interval`.

    Args:
        quick: whether it may grow where losses reach far: not for a part whose deviation is not that of the whole.
    """
    return _grid_interval([(sigma, q, steps)], quick=quick)


def _grid_interval(parts: Sequence[Part], *, quick: bool = True) -> float:
    """The interval of the grid of privacy losses: a tenth of the deviation of a step's loss, within bounds of cost.

    The grid inflates the variance of each step's loss by about interval^2 / 10. Where a step's losses reach far, at
    sigma below 1, 1e-4 at most would take 100 000 points and more, and seconds: there the interval grows with the third
    power of that reach, to 1e-3 or a fiftieth of the least deviation, which adds 1 / 25 000 to the variance. A grid of
    a million losses must still span the composed loss, so bounds of its mean and deviation set the least interval.
    """
    largest, mean, spreads, deviations = 0.0, 0.0, [], []
    for sigma, q, steps in map(_as_gaussian, parts):
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
    draws = [draws_interval(part) for part in parts if isinstance(part, RangeDraws)]
    least = 1e-7 if draws else 1e-5  # many draws of little range
    wanted = min(max(deviation / 10, least), 1e-4)
    if quick:
        wanted = max(wanted, min(1e-4 * (largest / _REACH) ** 3, min(deviations)[0] / 50, 1e-3))
    return max(wanted, span / 1e6, *draws)
