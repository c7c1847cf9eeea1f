"""The epsilon of any mechanism in any secret order, in one call."""

from collections.abc import Callable
from functools import cache
from math import exp, inf, log, log1p
from typing import Any, NamedTuple, assert_never

from anyorder import checks
from anyorder._numerics import crossing, just_below
from anyorder.accounting.amplification.claims import Amplified, Progress, default_method
from anyorder.accounting.amplification.methods import Deterministic, Method, MonteCarlo, Pld
from anyorder.accounting.amplification.mixture import check_fits
from anyorder.accounting.amplification.secret_order import AmplifiedOrder, SampledOrder
from anyorder.accounting.curves import sampled_curve
from anyorder.accounting.gaussian import NEIGHBOURS, gdp_mu
from anyorder.errors import ArgumentError, PlanError
from anyorder.patterns import Participation
from anyorder.strategy import Strategy
from anyorder.strategy.registry import known_sensitivity

# ----------------------------------------------------------------------------------------------------
# The least noise with which an amplified claim keeps a budget.


_TOLERANCE = 1e-4  # of the target epsilon
_STEP = _TOLERANCE / 8  # of sigma
_LOOKS = 16
_SLOPE = -1.2  # of the logarithm of epsilon by that of sigma, at first
_CHANCE = 4e-3  # of the target epsilon, by samples
_POWER = 1.5


def calibrate_amplified(
    strategy: Strategy,
    participation: AmplifiedOrder,
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
    epsilon, delta = checks.positive("epsilon", epsilon), checks.probability("delta", delta)
    checks.choice("neighbours", neighbours, NEIGHBOURS)
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
        for rough, tolerance in participation.rough_epsilons(chosen, strategy, delta):
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


def _without_chance(curve: Callable[[float], Amplified], epsilon: float, delta: float, high: float) -> float:
    """The logarithm of sigma, by delta at epsilon, which takes one number where epsilon at delta takes many."""

    @cache  # the search asks for the ends of its bracket again
    def excess(log_sigma: float) -> float:
        found = curve(log_sigma).delta(epsilon)
        return max(log(found / delta), -50.0) if found > 0 else -50.0

    low, width = high - 0.4, 0.4
    while excess(low) <= 0:
        high, low, width = low, low - width, 1.5 * width
        if width > 100:
            raise ArgumentError(f"epsilon={epsilon:g} is kept at delta={delta:g} with next to no noise")
    result = crossing(excess, low, high, absolute=_STEP / 4, relative=1e-14)
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


_WORDS = {"auto", "pld", "bound", "monte_carlo"}


class AmplifiedBound(NamedTuple):
    """An epsilon, and how sure it is.

    Attributes:
        value: epsilon, at or above the true one.
        method: "pld", "bound" or "monte_carlo".
        confidence: 1.0 where no chance is in it; else 1 - failure. The failure is inside delta already, so that (value,
            delta) is differential privacy of the samples and the run together.
    """

    value: float
    method: str
    confidence: float


def amplified_epsilon(
    strategy: Strategy,
    participation: Participation,
    noise_multiplier: float,
    delta: float,
    method: str | Method = "auto",
    *,
    samples: int | None = None,
    failure: float | None = None,
    neighbours: str = "zero-out",
    progress: Progress | None = None,
) -> AmplifiedBound:
    """The epsilon of C G + noise where the steps of each unit are drawn in secret, at or above the true one.

        P = sum over S of w_S N(m_S, sigma^2 I),  Q = N(0, sigma^2 I),   m_S = sum over t in S of |C| e_t

    See `anyorder.accounting.amplification.mixture` for the proof, for any C and for gradients that depend on what was
    released. "auto" takes the loss distribution of this pair where it is known ("pld": Poisson, cyclic and truncated
    Poisson sampling; bins whose columns of C do not overlap, as those of independent noise), else the deterministic
    bound; "monte_carlo" where there is no better ("bound" for sampling with separation is that of known batches), or
    where it is asked for. None is above the epsilon of those who know all batches.

    Args:
        strategy: C; which fits which order, `check_fits` there says.
        participation: an order by secret draws.
        noise_multiplier: sigma, noise std over clip norm, above 0. A plan's also covers that coefficients are float32.
        delta: strictly between 0 and 1.
        method: "auto", "pld", "bound" or "monte_carlo"; or a `Method`.
        samples: of "monte_carlo", 200 000 by default.
        failure: of "monte_carlo", the probability of too small an epsilon; a hundredth of delta by default.
        neighbours: "zero-out", or "add-or-remove", the same number where a unit's absence moves no other; or
            "replace-one", by two such steps, without chance.
        progress: called with what is done and what is to be done, by "monte_carlo".
    Returns: AmplifiedBound(value, method, confidence).
    Cost: by method; seconds to a minute for b = 100, n = 1000.
    Raises: ArgumentError; PlanError for a C, method or relation that the order is not accounted with;
        MissingDependencyError without dp-accounting, where a loss distribution is composed.

    Example:
        >>> from anyorder.participation import BallsInBins
        >>> from anyorder.strategy import Independent
        >>> amplified_epsilon(Independent(40), BallsInBins(2, 20), 1.0, 1e-5).confidence
        1.0
    """
    delta = checks.probability("delta", delta)
    checks.choice("neighbours", neighbours, NEIGHBOURS)
    check_fits(strategy, participation)
    if isinstance(participation, SampledOrder):
        if method not in ("auto", "pld") and type(method) is not Pld:
            raise PlanError(
                f"{type(participation).__name__} is accounted by its loss distribution: take method 'pld', got "
                f"{method!r}"
            )
        if neighbours == "replace-one":
            raise PlanError(f"{type(participation).__name__} is not accounted for replace-one neighbours")
        if neighbours == "add-or-remove":
            participation.check_neighbours(neighbours)
        sampled = sampled_curve(strategy, participation, noise_multiplier)
        return AmplifiedBound(sampled.epsilon(delta), "pld", 1.0)
    assert isinstance(participation, AmplifiedOrder)
    chosen = method_named(method, strategy, participation, samples, failure)
    curve = Amplified(strategy, participation, noise_multiplier, chosen, neighbours=neighbours)
    value = curve.epsilon(delta, progress)
    match chosen:
        case Pld():
            return AmplifiedBound(value, "pld", 1.0)
        case Deterministic():
            return AmplifiedBound(value, "bound", 1.0)
        case MonteCarlo():
            failure = delta / 100 if chosen.failure is None else chosen.failure
            return AmplifiedBound(value, "monte_carlo", 1 - failure)
        case _:
            assert_never(chosen)


def method_named(
    method: Any, strategy: Strategy, participation: Any, samples: int | None = None, failure: float | None = None
) -> Method:
    """The method of these words. Raises: ArgumentError."""
    if type(method) in (Pld, Deterministic, MonteCarlo):
        if samples is not None or failure is not None:
            raise ArgumentError("samples and failure must be in the MonteCarlo that is given, not next to a method")
        found: Method = method
        return found
    checks.choice("method", method, _WORDS)
    own = default_method(strategy, participation) if method == "auto" else None
    if method != "monte_carlo" and type(own) is not MonteCarlo and (samples is not None or failure is not None):
        raise ArgumentError(f"samples and failure must come with method 'monte_carlo', got method={method!r}")
    if method == "pld":
        return Pld()
    if method == "bound":
        return Deterministic()
    if own is not None and type(own) is not MonteCarlo:
        return own
    return MonteCarlo(failure=failure) if samples is None else MonteCarlo(samples, failure)
