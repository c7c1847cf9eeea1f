"""Curves against closed forms, an independent integral, and each other; what compose refuses."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import norm

import anyorder as ao
from accounting.oracle import epsilon_of
from anyorder.accounting import Gaussian, Sampled, gdp_delta, gdp_epsilon
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.amplification.methods import Pld
from anyorder.accounting.curves import Composed, _part, compose
from anyorder.accounting.gaussian import compose_mus
from anyorder.errors import ArgumentError
from anyorder.participation import TruncatedPoisson
from anyorder.plan.planner import plan_at_sigma
from anyorder.strategy import Independent
from plans import flat_plan


@pytest.mark.parametrize("mu", [1e-6, 0.1, 1.0, 7.0, 50.0])
def test_gaussians_are_the_closed_form_both_ways(mu):
    curve = Gaussian(mu)
    for delta in (0.1, 1e-5, 1e-12, 1e-300):
        assert curve.epsilon(delta) == gdp_epsilon(mu, delta)
        assert curve.delta(curve.epsilon(delta)) <= delta
    for epsilon in (0.0, 0.3, 8.0):
        assert curve.delta(epsilon) == gdp_delta(mu, epsilon)
    assert curve.epsilon(1e-5) >= epsilon_of(mu, 1e-5)


@pytest.mark.parametrize("mu", [1e-6, 0.3, 50.0])
@pytest.mark.parametrize("k", [1, 4, 7])
def test_k_equal_gaussians_are_one_of_sqrt_k(mu, k):
    found = compose(*[Gaussian(mu)] * k)
    assert type(found) is Gaussian
    assert math.sqrt(k) * mu * (1 - 1e-15) <= found.mu <= math.sqrt(k) * mu * (1 + 1e-15)
    assert found.mu == compose_mus(*[mu] * k) == compose(*[mu] * k)


@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-9, 1e-11, 1e-14, 1e-300])
@pytest.mark.parametrize(("sigma", "n"), [(1.0, 1), (2.0, 40), (30.0, 9000)])
def test_a_coin_that_always_falls_so_is_no_coin(sigma, n, delta):
    without = Gaussian(math.sqrt(n) / sigma)
    found = Sampled(sigma, 1.0, n).epsilon(delta)
    assert found == pytest.approx(without.epsilon(delta), rel=1e-9)
    assert found >= without.epsilon(delta) * (1 - 1e-13)
    mixed = Composed((Gaussian(0.5, neighbours="add-or-remove"), Sampled(sigma, 1.0, n)))
    true = gdp_epsilon(compose_mus(0.5, math.sqrt(n) / sigma), delta)
    assert true * (1 - 1e-13) <= mixed.epsilon(delta) <= true * (1 + 1e-13)
    at = without.epsilon(1e-6)
    assert mixed.delta(at) >= gdp_delta(compose_mus(0.5, math.sqrt(n) / sigma), at) * (1 - 1e-9)


def step_delta(mu, sigma, q, epsilon, *, added):
    """delta(epsilon) of a mu-GDP release beside one sampled step, by quadrature over the output of that step."""

    def log_ratio(x):  # of the two densities, with and without the unit
        return np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2)))

    def rest(loss):  # what the Gaussian may still add: its hockey stick, at any sign of the argument
        return norm.cdf(mu / 2 - loss / mu) - np.exp(loss) * norm.cdf(-mu / 2 - loss / mu)

    def integrand(x):
        without = norm.pdf(x, scale=sigma)
        if added:
            return without * rest(epsilon + log_ratio(x))
        return without * np.exp(log_ratio(x)) * rest(epsilon - log_ratio(x))

    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 40_001)  # smooth, and nothing at the ends: exact to rounding
    return np.sum(integrand(x)) * (x[1] - x[0])


@pytest.mark.parametrize(
    ("mu", "sigma", "q", "delta"),
    [(0.5, 1.0, 0.1, 1e-5), (2.0, 0.7, 0.3, 1e-3), (0.2, 2.0, 0.5, 1e-6), (1.0, 0.6, 0.01, 1e-4)],
)
def test_a_gaussian_beside_a_sampled_step_by_quadrature(mu, sigma, q, delta):
    curve = compose(Gaussian(mu, neighbours="add-or-remove"), Sampled(sigma, q, 1))
    assert type(curve) is Composed

    def true(epsilon):
        return max(step_delta(mu, sigma, q, epsilon, added=added) for added in (False, True))

    epsilon = curve.epsilon(delta)
    assert true(epsilon) <= delta <= true(epsilon * (1 - 1e-3))
    for at in (0.1, 1.0, 3.0):
        assert true(at) * (1 - 1e-9) <= curve.delta(at) <= true(at) * 1.01 + 1e-13


def test_a_mixture_is_worth_more_than_its_gaussian_bound():
    few, choice = Sampled(1.0, 0.01, 1000), Gaussian(0.5, neighbours="add-or-remove")
    both = compose(few, choice)
    assert few.epsilon(1e-5) < both.epsilon(1e-5) < few.epsilon(5e-6) + choice.epsilon(5e-6)  # and basic composition
    assert both.epsilon(1e-5) == pytest.approx(2.7629, abs=1e-3)


def test_equal_coins_are_more_steps_and_order_is_nothing():
    a, b, choice = Sampled(1.0, 0.1, 3), Sampled(2.0, 0.1, 4), Gaussian(0.5, neighbours="add-or-remove")
    assert compose(a, a) == Sampled(1.0, 0.1, 6)
    assert compose(a, b, choice, a) == compose(choice, compose(a, compose(b, a)))
    assert compose(a, b, choice, choice).parts[0].mu == compose_mus(0.5, 0.5)


def test_the_noise_of_a_gaussian_beside_others_is_never_rounded_up():
    for mu in [*np.random.default_rng(1).uniform(0.01, 30, 2000).tolist(), *range(1, 50)]:
        noise, q, steps = _part(Gaussian(mu))
        assert (q, steps) == (1.0, 1)
        assert 1 - Fraction(1, 2**50) <= Fraction(noise) * Fraction(mu) < 1


def test_extremes_stay_on_the_safe_side():
    tiny = Gaussian(5e-324, neighbours="add-or-remove")
    assert compose(tiny, Sampled(1.0, 0.1, 3)).epsilon(1e-5) == pytest.approx(
        Sampled(1.0, 0.1, 3).epsilon(1e-5), rel=1e-6
    )
    loud = Sampled(1e-200, 0.5, 3)
    assert loud.epsilon(1e-5) == math.inf
    assert loud.delta(100.0) == 1.0
    assert compose(loud, tiny).delta(100.0) == 1.0
    assert Sampled(1e200, 0.5, 3).epsilon(1e-5) == 0.0
    # below what transforms can tell, what holds without sampling
    assert Sampled(1.0, 0.1, 3).epsilon(1e-300) == gdp_epsilon(math.sqrt(3), 1e-300)


def test_a_plan_gives_its_curve():
    shared = {"dataset_size": 100, "batch_size": 10, "epochs": 2, "delta": 1e-5}
    one = ao.plan(**shared, epsilon=3)
    assert one.curve == Gaussian(1 / one.sigma)
    assert (one.curve.mu, one.curve.epsilon(1e-5)) == (one.mu, one.epsilon)
    assert one.curve.delta(one.epsilon) <= 1e-5
    two = flat_plan(**shared, sigma=2.0, neighbours="replace-one", unit="user")
    assert two.curve == Gaussian(1.0, neighbours="replace-one", unit="user")
    three = flat_plan(**shared, sigma=2.0, order="poisson")
    assert three.curve == Sampled(2.0, 0.1, 20)
    assert (three.mu, three.curve.epsilon(1e-5)) == (None, three.epsilon)
    four = flat_plan(**shared, sigma=2.0, order="poisson", unit="user").curve
    assert four == Sampled(2.0, 0.1, 20, unit="user") != three.curve
    assert compose(four, four) == Sampled(2.0, 0.1, 40, unit="user")
    assert {part.unit for part in compose(four, Sampled(1.0, 0.1, 1, unit="user")).parts} == {"user"}


def test_plans_on_the_same_units_compose():
    shared = {"dataset_size": 100, "batch_size": 10, "delta": 1e-5, "neighbours": "add-or-remove"}
    known = ao.participation.MinSeparation(20, 5)
    one = plan_at_sigma(2.0, order=known, batch_size=10, delta=1e-5, neighbours="add-or-remove")
    two = plan_at_sigma(1.0, order=known, batch_size=10, delta=1e-5, neighbours="add-or-remove")
    assert compose(one.curve, two.curve).epsilon(1e-5) == gdp_epsilon(compose_mus(0.5, 1.0), 1e-5)
    coins = flat_plan(**shared, epochs=2, sigma=2.0, order="poisson")
    both = compose(one.curve, coins.curve).epsilon(1e-5)
    assert max(one.epsilon, coins.epsilon) < both < gdp_epsilon(compose_mus(0.5, math.sqrt(20) / 2), 1e-5)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: compose(Gaussian(1.0), Sampled(1.0, 0.1, 3)), "parts must agree in neighbours"),
        (lambda: compose(Gaussian(1.0), Gaussian(1.0, neighbours="replace-one")), "parts must agree in neighbours"),
        (lambda: compose(Gaussian(1.0), Gaussian(1.0, unit="user")), "parts must agree in neighbours and unit"),
        (lambda: compose(Gaussian(1.0), 1.0), "parts must all be curves"),
        (lambda: compose("a"), "mus"),
        (lambda: compose(Gaussian(1e200), Gaussian(1.79e308), Gaussian(1.79e308)), "mu must be a finite number"),
        (lambda: Composed((Gaussian(1.0),)), "parts must be as compose"),
        (lambda: Composed((Gaussian(1.0), Gaussian(1.0))), "parts must be as compose"),
        (lambda: Composed((Gaussian(1.0), Composed)), "parts must be of Gaussian, BoundedRange, Sampled and Amplified"),
        (lambda: Composed((Gaussian(1.0), Sampled(1.0, 0.1, 3))), "parts must agree"),
        (lambda: Gaussian(-1.0), "mu must"),
        (lambda: Gaussian(math.nan), "mu must"),
        (lambda: Gaussian(math.inf), "mu must"),
        (lambda: Gaussian(1.0, neighbours="close"), "neighbours must"),
        (lambda: Gaussian(1.0, unit=3), "unit must"),
        (lambda: Sampled(0.0, 0.1, 3), "noise_multiplier must"),
        (lambda: Sampled(1.0, 1.1, 3), "sampling_probability must"),
        (lambda: Sampled(1.0, 0.1, 0), "steps must"),
        (lambda: Gaussian(1.0).epsilon(0.0), "delta must"),
        (lambda: Sampled(1.0, 0.1, 3).epsilon(1.0), "delta must"),
        (lambda: Sampled(1.0, 0.1, 3).delta(-1.0), "epsilon must"),
        (lambda: Gaussian(1.0).delta(math.inf), "epsilon must"),
    ],
)
def test_what_is_refused(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()


def test_of_groups_of_several_sizes_the_loudest_counts():
    """Under truncated sampling a larger group is cut more often: a sum must hold for the units of each."""
    order = TruncatedPoisson(4, 0.5, batch_size=2, dataset_size=5, cycle=2)  # groups of three and of two
    alone = Amplified(Independent(4), order, 1.0, Pld())
    both = compose(alone, Gaussian(0.01))
    assert both.epsilon(1e-5) >= alone.epsilon(1e-5) * (1 - 1e-6)
    assert both.delta(2.0) >= alone.delta(2.0) * (1 - 1e-6)


@pytest.mark.parametrize("kind", [Gaussian, Sampled, Composed])
def test_kinds_are_closed(kind):
    with pytest.raises(TypeError, match="must not be subclassed"):
        type("Other", (kind,), {})
