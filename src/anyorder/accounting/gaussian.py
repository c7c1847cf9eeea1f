"""Gaussian differential privacy: the exact curve, its inverses, composition, and the looser conversions by name.

A mu-GDP mechanism is as hard to attack as telling N(0, 1) from N(mu, 1). With x = eps/mu - mu/2, y = x + mu,

    delta(eps) = Phi(-x) - e^eps Phi(-y) = integral_0^inf phi(x + s) (1 - e^(-mu s)) ds       [Balle & Wang 2018]

The relation of neighbours is that of mu: zero-out or add-or-remove-one, as the sensitivity was computed.
"""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erfcx, ndtr

from anyorder import checks
from anyorder._numerics import bisect, crossing
from anyorder.errors import ArgumentError

NEIGHBOURS = {"zero-out": 1.0, "replace-one": 2.0, "add-or-remove": 1.0}
"""Neighbouring relation -> how far one unit moves a sum, in sensitivities."""

_CONVERSIONS = ("exact", "rdp", "zcdp")
_UNIT = 2.0**-53  # relative error of one rounding

# The rule of Gauss and Legendre with 64 nodes, its half above zero. It is written down because NumPy's differs in the
# last digit between versions: with it every noise multiplier would, and no run could go on after an update.
_UPPER_NODES = np.array([
    0.02435029266342443, 0.07299312178779904, 0.12146281929612054, 0.16964442042399283, 0.21742364374000708,
    0.2646871622087674, 0.31132287199021097, 0.3572201583376681, 0.4022701579639916, 0.4463660172534641,
    0.48940314570705296, 0.5312794640198946, 0.571895646202634, 0.6111553551723933, 0.6489654712546573,
    0.6852363130542333, 0.7198818501716109, 0.7528199072605319, 0.7839723589433414, 0.8132653151227975,
    0.8406292962525803, 0.8659993981540928, 0.8893154459951141, 0.9105221370785028, 0.9295691721319396,
    0.9464113748584028, 0.9610087996520538, 0.973326827789911, 0.983336253884626, 0.9910133714767443,
    0.9963401167719552, 0.9993050417357722,
])  # fmt: skip
_UPPER_WEIGHTS = np.array([
    0.048690957009139814, 0.04857546744150351, 0.048344762234802996, 0.04799938859645842, 0.04754016571483042,
    0.046968182816210076, 0.04628479658131447, 0.045491627927418184, 0.044590558163756566, 0.04358372452932355,
    0.04247351512365361, 0.041262563242623576, 0.039953741132720544, 0.03855015317861564, 0.03705512854024009,
    0.0354722132568823, 0.033805161837141794, 0.032057928354851495, 0.030234657072402554, 0.028339672614259535,
    0.02637746971505491, 0.0243527025687112, 0.02227017380838297, 0.020134823153530088, 0.017951715775697284,
    0.01572603047602503, 0.01346304789671786, 0.011168139460131028, 0.008846759826363397, 0.006504457968978502,
    0.004147033260564499, 0.00178328072169414,
])  # fmt: skip
_NODES = np.concatenate([-_UPPER_NODES[::-1], _UPPER_NODES])
_WEIGHTS = np.concatenate([_UPPER_WEIGHTS[::-1], _UPPER_WEIGHTS])


def gdp_delta(mu: float, epsilon: float) -> float:
    """The smallest delta for which mu-GDP implies (epsilon, delta)-DP, rounded up.

        delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)        [Dong, Roth, Su 2022, Cor. 2.13]

    Exact in both directions: every (epsilon, delta) on this curve is attained. The result is above the true value
    by 1e-15 (16 + x^2 + (1 + |x|) y + |ln mu|) of it, or less, with x = epsilon/mu - mu/2 and y = x + mu; where the
    true value is below the smallest float, it is that float.

    Args:
        mu: not negative; sens * clip_norm / noise_std.
        epsilon: not negative.
    Returns: delta in [0, 1], never below the true value; 0 only for mu = 0.
    Raises: ArgumentError for a negative or non-finite argument.

    Example:
        >>> round(gdp_delta(1.0, 1.0), 6)
        0.126937
    """
    mu = checks.real("mu", mu, low=0.0)
    epsilon = checks.real("epsilon", epsilon, low=0.0)
    if mu == 0:
        return 0.0
    y = epsilon / mu + mu / 2
    x = epsilon / mu - mu / 2 - 4 * _UNIT * y  # below the true x by more than its rounding; delta falls in x
    if x < 0 and mu >= 1:
        delta = float(ndtr(-x)) - math.exp(-x * x / 2) * float(erfcx(y / math.sqrt(2))) / 2
        return min(1.0, delta * (1 + 64 * _UNIT))
    if x > 40:  # phi(x) is below the smallest float
        return math.ulp(0.0)
    log_ratio = _log_mills_difference(x, mu)
    log_delta = log_ratio - (x * x + math.log(2 * math.pi)) / 2
    rounding = _UNIT * (64 + 2 * x * x + 4 * abs(log_ratio))
    return min(1.0, math.nextafter(math.exp(log_delta + rounding), math.inf))


def _log_mills_difference(x: float, mu: float) -> float:
    """ln(R(x) - R(x + mu)), R(t) = Phi(-t) / phi(t) the Mills ratio, without cancellation, for x > -1/2 - rounding."""
    if mu >= max(1.0, x):
        scale = math.sqrt(math.pi / 2)
        return math.log(scale * float(erfcx(x / math.sqrt(2)) - erfcx((x + mu) / math.sqrt(2))))
    # R(x) - R(x + mu) = mu * integral_0^inf e^(-s^2/2 - x s) s (1 - e^(-mu s)) / (mu s) ds; the first factor is
    # e^-45 at the end of the interval, and Gauss-Legendre with 64 nodes is exact to rounding for mu < max(1, x)
    end = 90 / (math.sqrt(x * x + 90) + x)
    s = end / 2 * (1 + _NODES)
    decay = np.minimum(-mu * s, -math.ulp(0.0))  # -mu s, not zero; SciPy's exprel differs in the last digit by version
    integral = float(np.sum(_WEIGHTS * np.exp(-s * (s / 2 + x)) * s * (np.expm1(decay) / decay))) * end / 2
    return math.log(mu) + math.log(integral)


def gdp_epsilon(mu: float, delta: float, conversion: str = "exact") -> float:
    """The smallest epsilon for which mu-GDP implies (epsilon, delta)-DP, rounded up.

        exact   gdp_delta(mu, epsilon) = delta, solved to the last float: gdp_delta(mu, result) <= delta
        rdp     min over alpha > 1 of alpha rho + ln(1 - 1/alpha) - (ln delta + ln alpha) / (alpha - 1)
        zcdp    rho + 2 sqrt(rho ln(1/delta)),   rho = mu^2 / 2                          [Bun & Steinke 2016]

    The two others are never below the exact one; they serve to compare with papers (RDP is 5 to 8 % above at usual
    budgets). Relative error of the exact one below 1e-9, unless delta is within 1e-6 of its value at epsilon 0.

    Args:
        mu: not negative.
        delta: strictly between 0 and 1.
        conversion: "exact", "rdp" or "zcdp".
    Returns: epsilon; 0 where delta alone suffices; infinity where the result is no float (mu above 1e154).
    Raises: ArgumentError.

    Example:
        >>> round(gdp_epsilon(3**0.5, 1e-5), 3), round(gdp_epsilon(3**0.5, 1e-5, "rdp"), 3)
        (8.385, 9.01)
    """
    mu = checks.real("mu", mu, low=0.0)
    delta = checks.probability("delta", delta)
    checks.choice("conversion", conversion, _CONVERSIONS)
    rho = zcdp_rho(mu)
    if mu == 0 or math.isinf(rho):
        return rho
    if conversion == "rdp":
        order = _best_order(mu, delta)
        return rdp_epsilon(([order], [order * rho * (1 + 2 * _UNIT)]), delta)
    upper = (rho + mu * math.sqrt(-2 * math.log(delta))) * (1 + 8 * _UNIT)
    if conversion == "zcdp":
        return upper
    if gdp_delta(mu, 0.0) <= delta:
        return 0.0
    inside = upper * (1 + 2.0**-40)  # delta there is at most half of delta, also as rounded, whatever mu is
    return bisect(lambda epsilon: gdp_delta(mu, epsilon) <= delta, inside=inside, outside=0.0)


def gdp_mu(epsilon: float, delta: float) -> float:
    """The largest mu for which mu-GDP implies (epsilon, delta)-DP, rounded down.

    The inverse of `gdp_delta` in mu, less 1e-14 of itself, so that both gdp_delta(result, epsilon) <= delta and
    gdp_epsilon(result, delta) <= epsilon hold in floats.

    Args:
        epsilon: not negative.
        delta: strictly between 0 and 1.
    Returns: mu, never above the true value.
    Raises: ArgumentError.

    Example:
        >>> round(gdp_mu(8.0, 1e-5), 4)
        1.666
    """
    epsilon = checks.real("epsilon", epsilon, low=0.0)
    delta = checks.probability("delta", delta)

    def holds(mu: float) -> bool:
        return gdp_delta(mu * (1 + 2.0**-47), epsilon) <= delta

    outside = 1.0
    while holds(outside):
        outside *= 2
    inside = outside / 2
    while not holds(inside):
        outside, inside = inside, inside / 2
    return bisect(holds, inside=inside, outside=outside)


def calibrate_gaussian(epsilon: float, delta: float) -> float:
    """The smallest noise multiplier sigma = 1 / mu that keeps (epsilon, delta), rounded up.

    The noise is then noise_std = sigma * clip_norm * sens(C, participation).

    Args:
        epsilon: not negative.
        delta: strictly between 0 and 1.
    Returns: sigma; gdp_epsilon(1 / sigma, delta) is at most epsilon, and within 1e-9 of it.
    Raises: ArgumentError.

    Example:
        >>> round(calibrate_gaussian(8.0, 1e-5), 4)
        0.6002
    """
    mu = gdp_mu(epsilon, delta)
    return math.nextafter(1 / mu, math.inf) if mu > 0 else math.inf


def compose_mus(*mus: float) -> float:
    """The mu of several mechanisms together, each with fresh noise, rounded up.

        mu = sqrt(mu_1^2 + mu_2^2 + ..)                                   [Dong, Roth, Su 2022, Cor. 3.3]

    Holds for adaptive composition. Give only the blocks that one unit can enter.

    Args:
        mus: not negative; none at all give 0.
    Returns: mu, never below the true value; infinity where that is no float.
    Raises: ArgumentError.

    Example:
        >>> compose_mus(3.0, 4.0)
        5.0
    """
    checked = [checks.real(f"mus[{index}]", mu, low=0.0) for index, mu in enumerate(mus)]
    result = math.hypot(*checked)
    squared = sum((Fraction(mu) ** 2 for mu in checked), Fraction(0))
    while math.isfinite(result) and Fraction(result) ** 2 < squared:
        result = math.nextafter(result, math.inf)
    return result


def zcdp_rho(mu: float) -> float:
    """The rho of zero-concentrated DP of a mu-GDP mechanism, mu^2 / 2, rounded up; infinity where that is no float."""
    mu = checks.real("mu", mu, low=0.0)
    rho = mu * mu / 2
    return rho if math.isinf(rho) or 2 * Fraction(rho) >= Fraction(mu) ** 2 else math.nextafter(rho, math.inf)


def rdp_epsilon(rdp: tuple[ArrayLike, ArrayLike], delta: float) -> float:
    """The epsilon that a Rényi DP curve implies, given at some orders, rounded up.

        epsilon = min over the orders of RDP(alpha) + ln(1 - 1/alpha) - (ln delta + ln alpha) / (alpha - 1)

    [Canonne, Kamath, Steinke 2020, Prop. 12]. Any set of orders gives a valid epsilon; more orders a smaller one.

    Args:
        rdp: (orders, values), each (m,): orders above 1, the Rényi divergence bound at each, not negative.
        delta: strictly between 0 and 1.
    Returns: epsilon, not negative.
    Raises: ArgumentError.

    Example:
        >>> round(rdp_epsilon(([2.0, 5.0, 10.0], [1.0, 2.5, 5.0]), 1e-5), 3)
        4.753
    """
    orders, values = checks.array("rdp orders", rdp[0], ndim=1), checks.array("rdp values", rdp[1], ndim=1)
    delta = checks.probability("delta", delta)
    if (orders <= 1).any():
        raise ArgumentError(f"rdp orders must all be above 1, got {orders.min():g}")
    if values.shape != orders.shape or (values < 0).any():
        raise ArgumentError(f"rdp values must be {orders.size} numbers, one an order, none negative, got {values}")
    gap = orders - 1
    gain = np.log1p(1 / gap) + np.log(orders) / gap
    cost = -math.log(delta) / gap
    epsilon = values - gain + cost
    return max(0.0, float(np.min(epsilon + 8 * _UNIT * (values + gain + cost))))


def _best_order(mu: float, delta: float) -> float:
    """The alpha that minimises the RDP conversion of mu-GDP: the root of (mu (alpha - 1))^2 / 2 = ln(1/(delta alpha)).

    The left side rises and the right side falls in alpha, and their difference is the derivative up to a positive
    factor: the minimum is the only one.
    """
    log_inverse = -math.log(delta)

    def slope(gap: float) -> float:
        return (mu * gap) ** 2 / 2 + math.log1p(gap) - log_inverse

    end = min(math.sqrt(2 * log_inverse) / mu, math.expm1(min(log_inverse, 700.0)))
    gap = crossing(slope, 0.0, end, absolute=1e-14 * end, relative=1e-14) if slope(end) > 0 else end
    return float(max(1 + gap, math.nextafter(1.0, 2.0)))  # every order is valid
