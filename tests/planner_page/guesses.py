"""What tests of the page put in the place of a calibration that takes seconds."""

import math

import anyorder as ao

PATCHED = ("anyorder.optimize.amplified.rough_poisson", "anyorder.accounting.poisson.calibrate_poisson")


def guessed(epsilon: float, delta: float, q: float, steps: int) -> float:
    """The central limit: both sides of an equality have it."""
    return 1 / math.sqrt(math.log1p((ao.accounting.gdp_mu(epsilon, delta) / q) ** 2 / steps))
