"""What a filter sums: Rényi divergences by integration, Gaussians that tell no less, roots rounded to the safe side."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import norm

from anyorder.accounting import BoundedRange, Gaussian, Sampled
from anyorder.accounting.curves import compose
from anyorder.accounting.gaussian import rdp_epsilon
from anyorder.budget import Geometric, Logarithmic, NegativeBinomial, Poisson
from anyorder.budget.filter import Searched, best_order, dominating_squared, renyi, renyi_left, root_down, root_up
from anyorder.budget.search_privacy import weight

ORDERS = (2, 3, 5, 16)


def line(low, high, count):
    """(points, weights) of Gauss and Legendre."""
    x, w = np.polynomial.legendre.leggauss(count)
    return (low + high) / 2 + (high - low) / 2 * x, (high - low) / 2 * w


def losses(e0):
    """(losses, chances) of the pair that dominates a draw of range e0: density e^(-loss / 2) from -e0 to e0."""
    x, w = line(-e0, e0, 24)
    chances = w * np.exp(-x / 2)
    return x, chances / chances.sum()


def sampled(sigma, q, order, e0=0.0, draws=0):
    """RDP(order) of a step of a secret draw, in both directions, by integration; draws are under the coin too."""
    x, w = line(-16 * sigma, 16 * (1 + sigma), 500)
    own = np.log(w) + norm.logpdf(x, scale=sigma)
    loss = x / sigma**2 - 1 / (2 * sigma**2)
    for _ in range(draws):
        more, chances = losses(e0)
        own = (own[:, None] + np.log(chances)).ravel()
        loss = (loss[:, None] + more).ravel()
        held = own > own.max() - 400
        own, loss = own[held], loss[held]
    mixed = np.logaddexp(math.log1p(-q), math.log(q) + loss)
    logs = (own + order * mixed, own + (1 - order) * mixed)
    return max(np.logaddexp.reduce(one) for one in logs) / (order - 1)


@pytest.mark.parametrize("order", ORDERS)
def test_a_gaussians_divergence_is_rounded_up(order):
    for mu in (1e-6, 0.1, 0.3, 1.7, 20.0):
        exact = order * Fraction(mu) ** 2 / 2
        assert exact <= Fraction(renyi(Gaussian(mu), order)) <= exact * Fraction(1 + 1e-8)
    assert renyi(Gaussian(0.0), order) == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("e0", [0.05, 0.7, 3.0])
def test_a_draws_divergence_is_that_of_its_pair_or_the_papers(order, e0):
    x, chances = losses(e0)
    moment = math.log(chances @ np.exp(order * x)) / (order - 1)
    for draws in (1, 7):
        found = renyi(BoundedRange(e0, draws), order)
        assert found == pytest.approx(draws * min(moment, order * e0**2 / 8), rel=1e-7)
    worst = 0.0
    for up in np.linspace(0.0, e0, 202)[1:-1]:  # any draw: two outputs, of losses up and up - e0
        first = -math.expm1(up - e0) / (math.exp(up) - math.exp(up - e0))
        worst = max(worst, math.log(first * math.exp(order * up) + (1 - first) * math.exp(order * (up - e0))))
    assert worst / (order - 1) <= renyi(BoundedRange(e0, 1), order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("sigma", "q"), [(0.8, 0.01), (1.0, 0.3), (4.0, 0.001), (2.0, 1.0)])
def test_a_sampled_sums_divergence_is_that_of_its_integral(order, sigma, q):
    truth = sampled(sigma, q, order) if q < 1 else order / (2 * sigma**2)
    for n in (1, 30):
        found = renyi(Sampled(sigma, q, n), order)
        assert n * truth * (1 - 1e-9) <= found <= n * truth * (1 + 1e-6)


@pytest.mark.parametrize(("e0", "draws"), [(0.4, 1), (0.4, 2), (2.0, 1)])
def test_draws_under_the_coin_are_within_its_integral(e0, draws):
    truth = sampled(1.0, 0.1, 4, e0, draws)
    assert truth * (1 - 1e-9) <= renyi(Sampled(1.0, 0.1, 3, e0=e0, draws=draws), 4) / 3 <= truth * (1 + 1e-5)


def test_parts_add():
    parts = (Gaussian(0.5, neighbours="add-or-remove"), Sampled(1.0, 0.1, 3))
    parts = (*parts, BoundedRange(0.2, 5, neighbours="add-or-remove"))
    for order in ORDERS:
        assert renyi(compose(*parts), order) == pytest.approx(sum(renyi(one, order) for one in parts), rel=1e-7)


LAWS = [
    Geometric(50.0), Geometric(1.5), Logarithmic(10.0), NegativeBinomial(-0.5, 10.0), NegativeBinomial(3.0, 10.0),
    Poisson(0.3), Poisson(10.0),
]  # fmt: skip


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("mu", [0.2, 1.0])
def test_a_searchs_divergence_is_the_published_and_above_that_of_a_search(law, mu):
    x, w = line(-14.0, 14.0 + 20 * mu, 1500)
    logs = [
        np.log(w) + norm.logpdf(x - shift) + np.log(weight(law, ndtr(shift - x))[0]) for shift in (0.0, mu)
    ]  # what is shown of runs that are better the larger they are
    for order in (2, 3, 16):
        found = renyi(Searched(law, Gaussian(mu)), order)
        for one, other in (logs, logs[::-1]):
            assert np.logaddexp.reduce(order * one + (1 - order) * other) / (order - 1) <= found
        if isinstance(law, Poisson):
            choice = law.mean * Gaussian(mu).delta(math.log(order / (order - 1)))
        else:
            others = [(1 - 1 / b) * b * mu**2 / 2 - math.log(law.gamma) / b for b in range(2, 513)]
            choice = (1 + law.eta) * min(others)
        formula = order * mu**2 / 2 + choice + max(math.log(law.mean), 0.0) / (order - 1)
        assert formula * (1 - 1e-9) <= found <= formula * 1.02  # not every b is tried


CURVES = [
    Gaussian(0.7), BoundedRange(0.3, 1), BoundedRange(0.3, 12), BoundedRange(2.0, 2), Sampled(1.5, 0.5, 1),
    Sampled(1.5, 0.5, 4), Sampled(3.0, 0.99, 2, e0=0.3, draws=3), compose(Gaussian(0.4), BoundedRange(0.4, 5)),
]  # fmt: skip


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_the_gaussian_in_the_place_of_a_curve_tells_no_less(curve):
    like = Gaussian(root_up(dominating_squared(curve)))
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0):
        assert curve.delta(epsilon) <= like.delta(epsilon) + 1e-12


def test_gaussians_in_the_place_of_others_add():
    draw = dominating_squared(BoundedRange(0.3, 1))
    assert dominating_squared(BoundedRange(0.3, 12)) == 12 * draw
    coin = dominating_squared(Sampled(1.5, 0.01, 1))
    assert 1 / Fraction(1.5) ** 2 <= coin < 1 / Fraction(1.5) ** 2 * Fraction(1 + 1e-12)  # as without its coin
    assert dominating_squared(Sampled(1.5, 0.01, 4, e0=0.3, draws=5)) == 4 * (coin + 5 * draw)
    assert dominating_squared(compose(Gaussian(0.5), BoundedRange(0.3, 2))) == Fraction(1, 4) + 2 * draw
    assert root_up(dominating_squared(Searched(Geometric(2.0), Gaussian(0.1)))) == math.inf


def test_roots_are_rounded_to_their_side():
    rng = np.random.default_rng(0)
    squares = [Fraction(float(x)) ** 2 + Fraction(int(k), 2**200) for x in rng.gamma(1.0, size=200) for k in (-1, 0, 1)]
    for square in [*squares, *(Fraction(float(x)) for x in rng.gamma(1.0, size=200))]:
        up, down = root_up(square), root_down(square)
        assert Fraction(down) ** 2 <= square <= Fraction(up) ** 2
        assert up <= math.nextafter(math.nextafter(down, math.inf), math.inf)
    assert root_down(Fraction(-1)) == root_up(Fraction(0)) == 0
    assert root_up(Fraction(2) ** 3000) == math.inf


@pytest.mark.parametrize(("epsilon", "delta"), list(itertools.product([0.05, 1.0, 8.0, 100.0], [1e-12, 1e-5, 0.1])))
def test_a_filters_limit_is_what_its_order_lets_through(epsilon, delta):
    best = best_order(epsilon, delta)
    for order in {2, 3, 7, 64, 1000, best}:
        left = renyi_left(epsilon, delta, order)
        assert left >= 0
        if left > 0:
            assert rdp_epsilon(([float(order)], [left]), delta) <= epsilon
        assert rdp_epsilon(([float(order)], [left * (1 + 1e-9) + 1e-9]), delta) > epsilon
        assert left / order <= renyi_left(epsilon, delta, best) / best * (1 + 1e-3)
