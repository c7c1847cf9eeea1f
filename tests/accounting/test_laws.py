"""Law 4 for every accountant, by registration: never below an oracle, and calibration at or under its target."""

import math

import pytest

from accounting.oracle import epsilon_of, poisson_step_epsilon
from anyorder.accounting import gdp_epsilon
from anyorder.accounting.gaussian import calibrate_gaussian
from anyorder.accounting.poisson import calibrate_poisson, poisson_epsilon

# name: (epsilon(mu, delta), what it must not be below, the most it may lie above it relatively or None)
ACCOUNTANTS = {
    "exact": (gdp_epsilon, epsilon_of, 1e-9),
    "rdp": (lambda mu, delta: gdp_epsilon(mu, delta, "rdp"), epsilon_of, None),
    "zcdp": (lambda mu, delta: gdp_epsilon(mu, delta, "zcdp"), epsilon_of, None),
    "poisson, every unit in one step": (lambda mu, delta: poisson_epsilon(1 / mu, 1.0, 1, delta), epsilon_of, 1e-9),
    "poisson, every unit in each of 10 steps": (
        lambda mu, delta: poisson_epsilon(math.sqrt(10) / mu, 1.0, 10, delta),
        epsilon_of,
        1e-9,
    ),
    "poisson, a tenth in one step": (
        lambda mu, delta: poisson_epsilon(1 / mu, 0.1, 1, delta),
        lambda mu, delta: poisson_step_epsilon(1 / mu, 0.1, delta),
        1e-3,
    ),
}

# name: (sigma(epsilon, delta), epsilon(sigma, delta), how far under the target it may land, relatively)
CALIBRATIONS = {
    "exact": (calibrate_gaussian, lambda sigma, delta: gdp_epsilon(1 / sigma, delta), 1e-9),
    "poisson": (
        lambda epsilon, delta: calibrate_poisson(epsilon, delta, 0.1, 40),
        lambda sigma, delta: poisson_epsilon(sigma, 0.1, 40, delta),
        1e-6,
    ),
    "poisson, every unit in each step": (
        lambda epsilon, delta: calibrate_poisson(epsilon, delta, 1.0, 4),
        lambda sigma, delta: gdp_epsilon(2 / sigma, delta),  # with no sampling the exact one must agree
        1e-6,
    ),
}


@pytest.mark.parametrize("name", ACCOUNTANTS)
@pytest.mark.parametrize("mu", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-10])
def test_never_below_the_oracle(name, mu, delta):
    accountant, oracle, excess = ACCOUNTANTS[name]
    value, true = accountant(mu, delta), oracle(mu, delta)
    assert value >= true * (1 - 1e-15)  # 1 / (1 / mu) may round down
    if excess is not None:
        assert value <= true * (1 + excess) + 1e-6 * excess


@pytest.mark.parametrize("name", CALIBRATIONS)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.2, 1e-6), (2.0, 1e-5)])
def test_calibration_lands_at_or_under_the_target(name, epsilon, delta):
    calibrate, accountant, below = CALIBRATIONS[name]
    landed = accountant(calibrate(epsilon, delta), delta)
    assert epsilon * (1 - below) <= landed <= epsilon
