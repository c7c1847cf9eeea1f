"""Privacy accounting: Gaussian DP for every mechanism of this package, and the Poisson-sampled baseline.

    mu = clip_norm * sens(C, participation) / noise_std        one release of B (C G + noise_std Z)

`Plan.curve` is a `Curve`: `Gaussian`, `BoundedRange`, `Sampled`, `Amplified` or `Composed`, with epsilon(delta) and
delta(epsilon).
Exact unless a looser conversion is asked for by name. Every number is rounded to the side that is safe to report.
"""

from anyorder.accounting.amplification.bound import amplified_epsilon
from anyorder.accounting.curves import BoundedRange, Gaussian, Sampled
from anyorder.accounting.gaussian import (
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
)

__all__ = [
    "BoundedRange",
    "Gaussian",
    "Sampled",
    "amplified_epsilon",
    "gdp_delta",
    "gdp_epsilon",
    "gdp_mu",
]
