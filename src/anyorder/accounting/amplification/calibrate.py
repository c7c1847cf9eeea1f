"""The least noise with which an amplified claim keeps a budget."""

from functools import cache
from math import exp, inf, log

from anyorder import _check
from anyorder.accounting.amplification.curve import RELATIONS, Amplified, Secret, default_method
from anyorder.accounting.amplification.methods import Method
from anyorder.accounting.gaussian import gdp_mu
from anyorder.errors import ArgumentError
from anyorder.sensitivity import known_sensitivity
from anyorder.strategy import Strategy

__all__ = ["calibrate_amplified"]

_TOLERANCE = 1e-4  # of the target epsilon
_STEP = _TOLERANCE / 8  # of sigma


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
    Returns: sigma; the claim's epsilon lies in [epsilon (1 - 1e-4), epsilon], in general, and is never above.
    Cost: about ten times that of the claim.
    Raises: ArgumentError; PlanError where the order is not accounted with this C.
    """
    from scipy.optimize import brentq  # slow to load

    epsilon, delta = _check.positive("epsilon", epsilon), _check.probability("delta", delta)
    chosen = default_method(participation) if method is None else method

    def curve(log_sigma: float) -> Amplified:
        return Amplified(strategy, participation, exp(log_sigma), chosen, neighbours=neighbours)

    @cache  # the search asks for the ends of its bracket again
    def excess(log_sigma: float) -> float:
        found = curve(log_sigma).delta(epsilon)
        return log(found / delta) if found > 0 else -inf

    # with the batches known it holds: the search goes down from there
    sens = known_sensitivity(strategy, participation).value
    high = log(RELATIONS[_check.choice("neighbours", neighbours, RELATIONS)] * sens / gdp_mu(epsilon, delta)) + _STEP
    low, width = high - 0.4, 0.4
    while excess(low) <= 0:
        high, low, width = low, low - width, 1.5 * width
        if width > 100:
            raise ArgumentError(f"no noise is so small that epsilon={epsilon:g} is not kept at delta={delta:g}")
    result = float(brentq(lambda at: max(excess(at), -50.0), low, high, xtol=_STEP / 4, rtol=1e-14))
    step = _STEP
    while curve(result).epsilon(delta) > epsilon:
        result, step = result + step, 1.5 * step
    return exp(result)
