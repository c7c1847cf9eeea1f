"""Privacy accounting: Gaussian DP for every mechanism of this package, and the Poisson-sampled baseline.

    mu = clip_norm * sens(C, participation) / noise_std        one release of B (C G + noise_std Z)

`Plan.curve` is a `Curve`: `Gaussian`, `Sampled` or `Composed`, each with epsilon(delta) and delta(epsilon).
Exact unless a looser conversion is asked for by name. Every number is rounded to the side that is safe to report.
"""

from anyorder.accounting.curves import Composed, Curve, Gaussian, Sampled, compose
from anyorder.accounting.gaussian import (
    calibrate_gaussian,
    compose_mus,
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
    rdp_epsilon,
    zcdp_rho,
)
from anyorder.accounting.poisson import calibrate_poisson, poisson_epsilon

__all__ = [
    "Composed",
    "Curve",
    "Gaussian",
    "Sampled",
    "calibrate_gaussian",
    "calibrate_poisson",
    "compose",
    "compose_mus",
    "gdp_delta",
    "gdp_epsilon",
    "gdp_mu",
    "poisson_epsilon",
    "rdp_epsilon",
    "zcdp_rho",
]
