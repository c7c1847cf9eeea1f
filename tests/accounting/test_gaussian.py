"""The exact Gaussian curve against many digits: value, side, inverses, edges, arguments."""

import doctest
import itertools
import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mpf

from accounting.oracle import delta_of, epsilon_of
from anyorder.accounting import gaussian, gdp_delta, gdp_epsilon, gdp_mu
from anyorder.accounting.amplification import exact
from anyorder.accounting.curves import compose
from anyorder.accounting.gaussian import calibrate_gaussian, rdp_epsilon, zcdp_rho
from anyorder.errors import ArgumentError

MUS = (1e-100, 1e-8, 1e-4, 0.03, 0.5, 0.999, 1.0, 1.001, 3.0, 7.0, 30.0, 500.0)
TAILS = (-3.0, -0.4, 0.0, 0.3, 0.999, 1.001, 2.0, 5.0, 12.0, 20.0, 30.0, 36.9)  # epsilon / mu - mu / 2
log_mus = st.floats(-6, 3).map(lambda power: 10.0**power)
log_deltas = st.floats(-250, -0.5).map(lambda power: 10.0**power)
log_epsilons = st.floats(-6, 4).map(lambda power: 10.0**power)


@pytest.mark.parametrize("mu", MUS)
def test_delta_agrees_with_the_oracle_and_is_never_below(mu):
    for tail in TAILS:
        epsilon = mu * (tail + mu / 2)
        true = delta_of(mu, epsilon)
        if epsilon < 0 or true < 1e-305:
            continue
        x, y, value = epsilon / mu - mu / 2, epsilon / mu + mu / 2, gdp_delta(mu, epsilon)
        excess = 1e-15 * (16 + x * x + (1 + abs(x)) * y + abs(math.log(mu)))
        assert true <= value <= true * (1 + excess), (epsilon, float(true))


def test_delta_at_300_digits_down_and_below_the_smallest_float():
    epsilon = gdp_epsilon(1.0, 1e-300)
    assert 0 <= 1 - delta_of(1.0, epsilon) / mpf(1e-300) < 1e-11
    assert gdp_delta(1.0, 1e4) == 5e-324  # truly about 1e-21000000: rounded up, not to 0
    assert gdp_delta(1e-12, 1.0) == 5e-324
    assert 0 < delta_of(1.0, 37.9) < gdp_delta(1.0, 37.9) < delta_of(1.0, 37.9) * (1 + 1e-9)  # subnormal: 1e-309


def test_delta_without_noise_or_epsilon():
    assert gdp_delta(0.0, 0.0) == gdp_delta(0.0, 5.0) == 0.0
    assert gdp_delta(1e200, 1e300) == 1.0
    assert gdp_delta(2.0, 0.0) == pytest.approx(math.erf(2**-0.5), rel=1e-14)  # total variation 2 Phi(1) - 1


def test_epsilon_agrees_with_the_oracle_and_is_never_below():
    for delta, mu in product([0.3, 1e-5, 1e-300], MUS):
        true, value = epsilon_of(mu, delta), gdp_epsilon(mu, delta)
        assert true <= value
        assert value == 0 or gdp_delta(mu, value) <= delta
        if true > 1e-6 * delta:  # nearer to the curve's start than that, delta's own rounding moves epsilon more
            assert value <= true * (1 + 1e-9)


def test_mu_is_the_largest_that_keeps_the_target():
    for delta, epsilon in product([0.5, 0.1, 1e-5, 1e-10, 1e-100], [0.0, 1e-9, 1e-3, 0.1, 1.0, 8.0, 18.9, 1e3, 1e6]):
        mu = gdp_mu(epsilon, delta)
        assert delta_of(mu, epsilon) <= delta < delta_of(mu * (1 + 1e-12 * (1 + mu)), epsilon)
        assert gdp_delta(mu, epsilon) <= delta
        assert gdp_epsilon(mu, delta) <= epsilon


@pytest.mark.parametrize("mu", [1e4, 1e8, 1e17, 1e100, 1e150])
def test_epsilon_of_huge_mu_tends_to_its_rho(mu):
    epsilon = gdp_epsilon(mu, 1e-5)
    assert mu * mu / 2 <= epsilon <= (mu * mu / 2 + 5 * mu) * (1 + 1e-14)
    assert gdp_delta(mu, epsilon) <= 1e-5
    assert mu * mu / 2 <= gdp_epsilon(mu, 1e-5, "rdp") <= (mu * mu / 2 + 5 * mu) * (1 + 1e-14)


def test_epsilon_beyond_floats_is_infinite_and_of_no_signal_zero():
    for conversion in ("exact", "rdp", "zcdp"):
        assert gdp_epsilon(1e160, 1e-5, conversion) == math.inf
        assert gdp_epsilon(0.0, 1e-5, conversion) == 0.0
    assert gdp_epsilon(1e-7, 1e-5) == 0.0  # delta alone covers it: 2 Phi(mu/2) - 1 = 4e-8
    assert gdp_epsilon(1e-300, 1e-5, "rdp") == 0.0
    assert 0 < gdp_epsilon(1e-310, 5e-324, "rdp") < 1e-10


@settings(max_examples=40, deadline=None)
@given(log_mus, log_deltas)
def test_round_trip_through_epsilon(mu, delta):
    epsilon = gdp_epsilon(mu, delta)
    if epsilon == 0:
        assert delta_of(mu, 0) <= delta
        return
    back = gdp_mu(epsilon, delta)
    assert delta_of(mu, epsilon) <= delta
    assert delta_of(back, epsilon) <= delta
    assert back >= mu * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(log_epsilons, log_deltas)
def test_round_trip_through_sigma(epsilon, delta):
    sigma = calibrate_gaussian(epsilon, delta)
    assert 1 / sigma <= gdp_mu(epsilon, delta)
    assert delta_of(1 / mpf(sigma), epsilon) <= delta
    landed = gdp_epsilon(1 / sigma, delta)
    assert landed <= epsilon
    assert landed >= epsilon * (1 - 1e-9) or epsilon < 1e-4 * delta


@settings(max_examples=40, deadline=None)
@given(log_mus, st.floats(1e-9, 1), log_epsilons, st.floats(1e-9, 1), st.floats(-250, -0.5))
def test_monotone(mu, more_mu, epsilon, more_epsilon, power):
    assert gdp_delta(mu, epsilon) <= gdp_delta(mu * (1 + more_mu), epsilon)
    assert gdp_delta(mu, epsilon) >= gdp_delta(mu, epsilon * (1 + more_epsilon))
    delta = 10**power
    assert gdp_epsilon(mu, delta) <= gdp_epsilon(mu * (1 + more_mu), delta)
    assert gdp_epsilon(mu, delta) >= gdp_epsilon(mu, min(0.9, delta * (1 + more_epsilon)))
    assert gdp_mu(epsilon, delta) <= gdp_mu(epsilon * (1 + more_epsilon), delta)


def test_mu_allows_for_a_curve_that_is_not_monotone_in_its_last_digits():
    generator = np.random.default_rng(7)
    for power, delta in zip(generator.uniform(-7, -5, 300), generator.uniform(0.2, 0.5, 300), strict=True):
        epsilon = float(10**power)
        assert gdp_epsilon(gdp_mu(epsilon, float(delta)), float(delta)) <= epsilon


def test_examples_in_the_docstrings():
    assert doctest.testmod(gaussian).failed == 0


def test_calibration_at_the_ends():
    assert calibrate_gaussian(0.0, 5e-324) == math.inf  # no noise is enough
    assert calibrate_gaussian(1e6, 1e-5) == pytest.approx(1 / math.sqrt(2e6), rel=1e-2)


def test_compose_rounds_up_and_is_exact_where_floats_are():
    assert compose() == 0.0
    assert compose(3.0, 4.0) == 5.0
    assert compose(0.7) == 0.7
    assert compose(1e-200, 0.0) == 1e-200
    assert compose(1e308, 1e308, 1e308, 1e308) == math.inf
    generator = np.random.default_rng(0)
    for count in range(1, 60):
        mus = generator.lognormal(sigma=3, size=count).tolist()
        true = mpf(0)
        for mu in mus:
            true += mpf(mu) ** 2
        assert true <= mpf(compose(*mus)) ** 2 <= true * (1 + 1e-15)


def test_zcdp_rho_rounds_up():
    assert zcdp_rho(2.0) == 2.0
    assert zcdp_rho(0.0) == 0.0
    assert zcdp_rho(1e200) == math.inf
    for mu in np.random.default_rng(1).lognormal(sigma=2, size=200).tolist():
        assert mpf(mu) ** 2 / 2 <= mpf(zcdp_rho(mu)) <= mpf(mu) ** 2 / 2 * (1 + 1e-15)


def test_rdp_conversion_is_the_minimum_over_all_orders():
    for delta, mu in product([1e-3, 1e-6, 1e-10, 1e-200], [1e-6, 0.01, 0.3, 1.0, 3.0, 40.0, 1e4]):
        value = gdp_epsilon(mu, delta, "rdp")
        gap = (
            math.sqrt(-2 * math.log(delta)) / mu * np.logspace(-4, 1, 20_001)
        )  # around the order of the best pure Chernoff
        gap = gap[gap > 1e-12]
        on_grid = rdp_epsilon((1 + gap, (1 + gap) * mu**2 / 2), delta)
        assert value <= on_grid * (1 + 1e-12)
        assert value >= on_grid * (1 - 1e-6)


def test_rdp_epsilon_is_the_written_formula_and_the_best_order_wins():
    orders, values = np.array([1.5, 4.0, 30.0]), np.array([0.2, 0.5, 4.0])
    written = values + np.log(1 - 1 / orders) - (math.log(1e-6) + np.log(orders)) / (orders - 1)
    assert rdp_epsilon((orders, values), 1e-6) == pytest.approx(written.min(), rel=1e-14)
    assert rdp_epsilon(([4.0], [0.5]), 1e-6) == pytest.approx(written[1], rel=1e-14)
    assert rdp_epsilon(([1e6], [0.0]), 0.5) == 0.0  # the formula is negative


def test_bad_arguments_are_named():
    for call, name in [
        *itertools.product(
            [lambda bad=bad: gdp_delta(bad, 1.0) for bad in (-1.0, math.nan, math.inf, "x", True)], ["mu"]
        ),
        *itertools.product([lambda bad=bad: gdp_delta(1.0, bad) for bad in (-1.0, math.nan, math.inf)], ["epsilon"]),
        *itertools.product([lambda bad=bad: gdp_epsilon(bad, 1e-5) for bad in (-1.0, math.nan, math.inf)], ["mu"]),
        *itertools.product([lambda bad=bad: gdp_epsilon(0.0, bad) for bad in (0, 1, -0.1, 2, math.nan)], ["delta"]),
        *itertools.product([lambda bad=bad: gdp_mu(1.0, bad) for bad in (0, 1, -0.1, 2, math.nan)], ["delta"]),
        *itertools.product([lambda bad=bad: gdp_mu(bad, 1e-5) for bad in (-1.0, math.nan, math.inf)], ["epsilon"]),
        *itertools.product([lambda bad=bad: calibrate_gaussian(bad, 1e-5) for bad in (-1.0, math.nan)], ["epsilon"]),
        *itertools.product([lambda bad=bad: calibrate_gaussian(1.0, bad) for bad in (0.0, 1.0, math.nan)], ["delta"]),
        (lambda: gdp_epsilon(1.0, 1e-5, "pld"), "conversion"),
        (lambda: gdp_epsilon(0.0, 1e-5, ""), "conversion"),
        (lambda: compose(1.0, -1.0), r"mus\[1\]"),
        (lambda: compose(math.nan), r"mus\[0\]"),
        (lambda: zcdp_rho(-1.0), "mu"),
        (lambda: rdp_epsilon(([1.0, 2.0], [1.0, 1.0]), 1e-5), "rdp orders"),
        (lambda: rdp_epsilon(([2.0], [1.0, 1.0]), 1e-5), "rdp values"),
        (lambda: rdp_epsilon(([2.0], [-1.0]), 1e-5), "rdp values"),
        (lambda: rdp_epsilon(([2.0], [math.nan]), 1e-5), "rdp values"),
        (lambda: rdp_epsilon(([2.0], [1.0]), 1.0), "delta"),
    ]:
        with pytest.raises(ArgumentError, match=f"^{name} must"):
            call()


@pytest.mark.parametrize(("module", "count"), [(gaussian, 64), (exact, 6)])
def test_the_rule_that_is_written_down_is_that_of_gauss_and_legendre(module, count):
    """With m nodes it integrates polynomials of degree 2 m - 1; no other rule does."""
    for power in range(2 * count):
        integral = np.sum(module._WEIGHTS * module._NODES**power)
        assert integral == pytest.approx((1 + (-1) ** power) / (power + 1), rel=1e-12, abs=1e-16)


def test_noise_multipliers_are_the_same_in_every_version_of_numpy_and_scipy():
    """Else a run could not go on after an update."""
    found = [calibrate_gaussian(epsilon, 1e-6).hex() for epsilon in (0.1, 1.0, 8.0)]
    assert found == ["0x1.22700188bf550p+5", "0x1.0e61239070ac4p+2", "0x1.4e4d8bf470831p-1"]
