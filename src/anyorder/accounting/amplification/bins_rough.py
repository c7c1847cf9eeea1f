"""What `bins_epsilon` comes to, for searches over sigma: quickly, or by the one K' that counts. Nothing claims it."""

import numpy as np
from numpy.typing import NDArray

from anyorder.accounting.amplification import bins
from anyorder.accounting.amplification.bins_chain import Chain
from anyorder.accounting.amplification.bins_nested import Nested
from anyorder.accounting.gaussian import gdp_epsilon

__all__ = ["likely_epsilon", "rough_epsilon"]

Floats = NDArray[np.float64]


def rough_epsilon(gram: Floats, sigma: float, delta: float) -> float:
    """Epsilon at delta of with against without, on coarse grids: a tenth of the work, and some percent more."""
    return _best(gram, sigma, delta)[0]


def likely_epsilon(gram: Floats, sigma: float, delta: float) -> float:
    """Epsilon at delta of with against without, by the K' that is the least on coarse grids: in general the claim's."""
    rough, above = _best(gram, sigma, delta)
    return rough if above is None else min(rough, _of(above, delta, rough, 1.0))


def _best(gram: Floats, sigma: float, delta: float) -> tuple[float, Nested | Chain | None]:
    """(epsilon, its K'); None for that of a Gaussian."""
    k, mu = bins.scaled(gram, sigma)
    least, found = gdp_epsilon(mu, delta) if mu else 0.0, None
    for above in bins.above(k, mu):
        epsilon = _of(above, delta, least, bins.COARSE)
        if epsilon < least:
            least, found = epsilon, above
    return least, found


def _of(above: Nested | Chain, delta: float, high: float, coarse: float) -> float:
    """Epsilon at delta by one K'; `high` where it is more."""

    def at(epsilon: float) -> float:
        return bins.delta_above(above, epsilon, falling=False, coarse=coarse)

    return bins.least_epsilon(at, delta, high) if at(high) <= delta else high
