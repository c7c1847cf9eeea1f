"""Epsilon of a search by Rényi divergences, the bound that papers print [Papernot, Steinke 2022, Theorems 2 and 6].

With r(a) the Rényi divergence of order a of one run, any orders a, b > 1, and D(eta, gamma) the law of K,

    r_search(a) <= r(a) + ln(E K) / (a - 1) + (1 + eta) ((1 - 1/b) r(b) + ln(1 / gamma) / b)      negative binomial
    r_search(a) <= r(a) + ln(E K) / (a - 1) + E K delta(ln(a / (a - 1)))                          Poisson

delta(.) is the privacy profile of one run. r_search is that of what is shown: an empty search of Poisson's law, which
is as likely whatever the data, adds nothing to delta at any epsilon >= 0, and is left out. docs/tuning.md proves both.
"""

import math
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder.accounting.curves import Amplified, BoundedRange, Composed, Curve, Gaussian, Sampled
from anyorder.accounting.gaussian import rdp_epsilon
from anyorder.budget.laws import Geometric, Logarithmic, NegativeBinomial, Poisson, Secret

__all__ = ["renyi_divergences", "renyi_search_epsilon"]

Floats = NDArray[np.float64]

_UP = 1 + 1e-9
_ORDERS = 1 + np.geomspace(1e-3, 2e4, 240)  # of formulas
_FEW = np.concatenate([[1.1, 1.25, 1.5, 1.75], np.arange(2.0, 33.0), 2.0 ** np.arange(5.5, 9.0, 0.5)])  # of sums


def renyi_divergences(curve: Curve, orders: Floats) -> Floats:
    """The Rényi divergence of one run at each order, at or above the true one.

    Args:
        curve: a Gaussian's are a mu^2 / 2, draws' of bounded range a e0^2 / 8 each, sampled sums' those of
            dp-accounting; sampled sums with draws under one coin are taken without their coin.
        orders: (m,), above 1.
    Returns: (m,), infinite where none is known.
    """
    match curve:
        case Gaussian():
            return orders * (curve.mu * curve.mu / 2 * _UP)
        case BoundedRange():
            return orders * (curve.draws * curve.e0 * curve.e0 / 8 * _UP)
        case Sampled():
            if curve.draws:
                return orders * (curve.n * (1 / curve.sigma**2 / 2 + curve.draws * curve.e0**2 / 8) * _UP)
            return _sampled(curve, orders)
        case Amplified():  # no coin is counted
            return orders * (curve.known_mu * curve.known_mu / 2 * _UP)
        case Composed():
            total = np.zeros(len(orders))
            for part in curve.parts:
                total = total + renyi_divergences(part, orders)
            return total * _UP
        case _:
            assert_never(curve)


def renyi_search_epsilon(law: Secret, curve: Curve, delta: float) -> float:
    """The epsilon of a whole search by Rényi divergences; see the formulas above, and `search_epsilon`."""
    orders = _ORDERS if type(curve) is Gaussian else _FEW
    divergences = renyi_divergences(curve, orders)
    match law:
        case Geometric() | NegativeBinomial() | Logarithmic():
            beaten = (1 - 1 / orders) * divergences - math.log(law.gamma) / orders
            extra = np.full(len(orders), (1 + law.eta) * float(beaten.min()))
        case Poisson():
            points = -np.log1p(-1 / orders)  # ln(a / (a - 1)); a smaller epsilon has a larger delta
            extra = law.mean * np.array([curve.delta(max(0.0, float(at) * (1 - 1e-12))) for at in points])
        case _:
            assert_never(law)
    # the logarithm of the mean may be below 0: a Poisson search that shows little
    total = divergences + extra * _UP + (math.log(law.mean) + 1e-12) / (orders - 1)
    held = np.isfinite(total)
    if not held.any():
        return math.inf
    return rdp_epsilon((orders[held], np.maximum(total[held], 0.0)), _check.probability("delta", delta))


def _sampled(curve: Sampled, orders: Floats) -> Floats:
    rdp = _check.optional("dp_accounting.rdp", extra="amplified", purpose="accounting for Poisson sampling")
    event = _check.optional("dp_accounting.dp_event", extra="amplified", purpose="accounting for Poisson sampling")
    accountant = rdp.RdpAccountant(orders)
    step = event.PoissonSampledDpEvent(curve.sampling_probability, event.GaussianDpEvent(curve.sigma))
    accountant.compose(step, curve.n)
    return np.asarray(accountant.rdp, np.float64) * _UP
