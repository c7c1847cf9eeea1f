"""Privacy accounting: Gaussian DP for every mechanism of this package, and the Poisson-sampled baseline.

    mu = clip_norm * sens(C, participation) / noise_std        one release of B (C G + noise_std Z)

`Plan.curve` is a `Curve`: `Gaussian`, `BoundedRange`, `Sampled`, `Amplified` or `Composed`, with epsilon(delta) and
delta(epsilon).
Exact unless a looser conversion is asked for by name. Every number is rounded to the side that is safe to report.
"""

from anyorder.accounting.amplification.bound import amplified_epsilon
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.amplification.methods import Deterministic, Method, MonteCarlo, Pld
from anyorder.accounting.curves import BoundedRange, Composed, Curve, Gaussian, Sampled, compose
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
    "Amplified",
    "BoundedRange",
    "Composed",
    "Curve",
    "Deterministic",
    "Gaussian",
    "Method",
    "MonteCarlo",
    "Pld",
    "Sampled",
    "amplified_epsilon",
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
