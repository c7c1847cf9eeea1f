"""How often a unit comes into a run, and the epsilon that follows from that alone, for independent Gaussian noise.

Let m_t be how many examples of one unit are in step t, each clipped to norm 1, beneath noise of std sigma. Given the
order, the run is a Gaussian mechanism of

    mu = sqrt(m_1^2 + m_2^2 + ..) / sigma                                          zero-out neighbours, adaptive

and `weight` below is that sum of squares. A closed set of what may be known of an order:

    AtMost    weight never above a number, in whatever order that does not depend on the data
    Coins     each example of the unit in each step by a secret coin of its own: Poisson sampling
    Draws     m_t of independent Binomials: sampling with replacement; the draws taken as public
    Unknown   nothing: no epsilon is finite
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc, log_ndtr, logsumexp

from anyorder._closed import final
from anyorder.accounting import gdp_delta, gdp_epsilon, poisson_epsilon

__all__ = ["AtMost", "Coins", "Draws", "Shuffles", "Unknown", "Visits", "epsilon_at_least", "epsilon_of", "fullest"]

Floats = NDArray[np.float64]


@final
@dataclass(frozen=True)
class AtMost:
    """The sum over steps of squared counts of a unit is at most `weight`.

    Attributes:
        weight: 0 where nobody comes.
        is_reached: whether some unit surely has it, in steps that are known to all: the epsilon is then exact.
        shuffles: the order is that of shuffles that draw every unit's place anew; None for any other order.
    """

    weight: float
    is_reached: bool = False
    shuffles: "Shuffles | None" = None


@final
@dataclass(frozen=True)
class Shuffles:
    """Each unit is in one uniformly drawn batch of each epoch, or in none; from this a lower bound follows.

    Attributes:
        epochs: whole epochs.
        steps: steps in each.
        chance: that a unit is in an epoch at all: below 1 where a last batch is dropped, or few are drawn.
    """

    epochs: int
    steps: int
    chance: float = 1.0


@final
@dataclass(frozen=True)
class Coins:
    """Poisson sampling.

    Attributes:
        probability, steps: each example is in each step with this probability.
        empty: bound of the probability that the sampler leaves out a step, or fills it otherwise, for it is empty.
    """

    probability: float
    steps: int
    empty: float = 0.0


@final
@dataclass(frozen=True)
class Draws:
    """In each step a unit comes Binomial(size, probability) times, independently of all other steps."""

    size: int
    probability: float
    steps: int


@final
@dataclass(frozen=True)
class Unknown:
    """No bound is known."""


Visits = AtMost | Coins | Draws | Unknown
"""What is known of how often a unit comes."""


def epsilon_of(visits: Visits, noise_multiplier: float, delta: float) -> float:
    """The smallest epsilon that follows, for independent noise; infinity where none does.

    Neighbours: zero-out, for any data-independent order; add-or-remove for `Coins`.

    Args:
        visits: how often a unit comes.
        noise_multiplier: noise std over clip norm, above 0.
        delta: strictly between 0 and 1.
    Returns: epsilon, rounded up.
    Cost: closed form for `AtMost`; up to some seconds for the two others.
    """
    match visits:
        case AtMost():
            return gdp_epsilon(math.sqrt(visits.weight) / noise_multiplier * (1 + 2**-51), delta)
        case Coins():
            return _of_coins(visits, noise_multiplier, delta)
        case Draws():
            return _of_draws(visits, noise_multiplier, delta)
        case Unknown():
            return math.inf
        case _:
            assert_never(visits)


def _of_coins(coins: Coins, sigma: float, delta: float) -> float:
    """That of Poisson sampling, at the delta that is left after steps that are not what their coins said.

    A run that is another one with probability `empty` at most, on either side, is (e, d + empty (1 + exp(e)))-DP where
    that other one is (e, d)-DP.
    """
    epsilon = poisson_epsilon(sigma, coins.probability, coins.steps, delta)
    if coins.empty == 0:
        return epsilon
    lost = coins.empty * (1 + math.exp(min(2 * epsilon, 700.0)))
    if lost > delta / 2:
        return math.inf
    found = poisson_epsilon(sigma, coins.probability, coins.steps, delta - lost)
    return found if found <= 2 * epsilon else math.inf


def _of_draws(draws: Draws, sigma: float, delta: float) -> float:
    """The draws do not depend on the unit's data, so they may be shown: delta is the mean over them.

    delta(eps) = sum over w of P(weight = w) gdp_delta(sqrt(w) / sigma, eps)
    """
    chances, lost = _weights(draws, delta / 1000)
    weights = np.flatnonzero(chances > 1e-30)
    lost += float(chances.sum() - chances[weights].sum())
    # The transform's rounding: each frequency is off by 16 units of rounding a step at most, by Parseval so much in l2.
    lost += 16 * 2.0**-52 * (draws.steps + 64) * math.sqrt(len(chances))

    def excess(epsilon: float) -> float:
        each = [gdp_delta(math.sqrt(w) / sigma * (1 + 2**-51), epsilon) for w in weights.tolist()]
        return float(chances[weights] @ np.array(each)) + lost - delta

    return _least(excess, gdp_epsilon(math.sqrt(weights[-1]) / sigma, delta / 2))


def _weights(draws: Draws, lost: float) -> tuple[Floats, float]:
    """P(weight = 0), P(weight = 1), .. as far as it matters, and a bound of the probability of what is beyond."""
    q, steps = draws.probability, draws.steps
    most = next(m for m in range(draws.size + 1) if m == draws.size or steps * bdtrc(m, draws.size, q) < lost / 4)
    beyond = steps * float(bdtrc(most, draws.size, q)) if most < draws.size else 0.0
    counts = np.arange(most + 1)
    one = np.zeros(most * most + 1)
    one[counts**2] = np.diff(bdtr(counts, draws.size, q), prepend=0.0)
    length = 64
    while steps * (len(one) - 1) >= length and (tail := _tail(one, steps, length)) > lost / 4:
        length *= 2
    if steps * (len(one) - 1) < length:
        tail = 0.0
    size = max(length, len(one))
    composed = np.fft.irfft(np.fft.rfft(one, size) ** steps, size)  # what is beyond comes round, and is counted in tail
    return np.maximum(composed, 0.0), beyond + tail


def _tail(one: Floats, steps: int, length: int) -> float:
    """Chernoff's bound of the probability that a sum of so many has reached `length`."""
    values = np.flatnonzero(one)
    grid = np.geomspace(1e-4, 50, 200)
    exponents = steps * logsumexp(grid[:, None] * values, b=one[values], axis=1) - grid * length
    return float(np.exp(min(0.0, exponents.min())))


def _least(excess: Callable[[float], float], high: float) -> float:
    """The smallest epsilon where a falling function is not above 0, from above, to 1e-9 of it."""
    while excess(high) > 0:
        high *= 1.5
        if high > 1e6:
            return math.inf
    low = 0.0
    if excess(low) <= 0:
        return low
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) <= 0 else (middle, high)
    return high


def epsilon_at_least(visits: Visits, noise_multiplier: float, delta: float) -> float:
    """A lower bound of the true epsilon, zero-out neighbours: no accountant that is right can print less.

    The order's steps are known: exact. A shuffle anew in each epoch: an attack that looks, in each epoch, whether any
    step is above a threshold c, and counts the epochs. All other examples give 0 (a = 0), or all give the opposite of
    what the unit gives (a = 1: the step where the unit is zeroed out then lacks one of them). With T = steps - 1,

        P(above) = 1 - Phi((c - a - 1) / sigma) Phi(c / sigma)^T    with the unit
        Q(above) = 1 - Phi((c - a) / sigma) Phi(c / sigma)^T        without it

    and epsilon >= ln((P(in at least j epochs) - delta) / Q(in at least j epochs)), and the same the other way round
    [Chua et al. 2024, of one epoch]. 0 where nothing is known.

    Cost: milliseconds for up to 100 epochs.
    """
    if not isinstance(visits, AtMost):
        return 0.0
    if visits.is_reached:
        return gdp_epsilon(math.sqrt(visits.weight) / noise_multiplier, delta) * (1 - 1e-9)
    if visits.shuffles is None or visits.shuffles.epochs == 0:
        return 0.0
    return max(
        _attacked(visits.shuffles, noise_multiplier, delta, others, up) for others in (0, 1) for up in (True, False)
    )


def _attacked(shuffles: Shuffles, sigma: float, delta: float, others: int, up: bool) -> float:
    """ln((P - delta) / Q) of the best threshold and number of epochs."""
    epochs = shuffles.epochs
    c = (np.linspace(-3.0, 12.0, 1501) * sigma + 1)[:, None]
    quiet = (shuffles.steps - 1) * log_ndtr(c / sigma)
    without = -np.expm1(log_ndtr((c - others) / sigma) + quiet)
    with_it = -np.expm1(log_ndtr((c - others - 1) / sigma) + quiet)
    absent = -np.expm1(log_ndtr(c / sigma) + quiet)
    with_it = shuffles.chance * with_it + (1 - shuffles.chance) * absent
    without = shuffles.chance * without + (1 - shuffles.chance) * absent
    j = np.arange(1, epochs + 1)
    often, seldom = (
        (bdtrc(j - 1, epochs, with_it), bdtrc(j - 1, epochs, without)) if up
        else (bdtr(j - 1, epochs, without), bdtr(j - 1, epochs, with_it))
    )  # fmt: skip
    usable = (often > 1.001 * delta) & (seldom > 1e-200)
    if not usable.any():
        return 0.0
    return max(0.0, float(np.log((often[usable] - delta) / seldom[usable]).max()) * (1 - 1e-6))


def fullest(examples: int, size: int) -> int:
    """The largest sum of squares of so many examples of a unit over steps of so many each: all in as few as may be."""
    return examples // size * size**2 + (examples % size) ** 2
