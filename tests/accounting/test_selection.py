"""Draws of bounded range against brute force: closed forms, dependent draws, and pairs under one coin."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from anyorder.accounting import BoundedRange, Gaussian, Sampled, gdp_delta, gdp_epsilon
from anyorder.accounting.bounded_range import (
    _STEEPEST,
    _of_draw,
    _of_gaussian,
    _of_step,
    bounded_range_mu,
)
from anyorder.accounting.curves import compose
from anyorder.errors import ArgumentError

EPSILONS = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 3.0)


def bounded_range_delta(e0, epsilon):
    """The smallest delta at which every mechanism of range e0 keeps epsilon [Dong, Durfee, Rogers 2020]."""
    if epsilon >= e0:
        return 0.0
    if epsilon <= -e0:
        return -math.expm1(epsilon)
    return math.expm1((epsilon - e0) / 2) ** 2 / -math.expm1(-e0)


def hockey_stick(p, q, epsilon):
    return np.maximum(p - math.exp(epsilon) * q, 0).sum()


def draw(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def peeled(scores, k):
    """Probabilities of all ordered k-tuples of k draws without replacement."""
    found = []
    for chosen in itertools.permutations(range(len(scores)), k):
        left, probability = np.array(scores, float), 1.0
        for y in chosen:
            probability *= draw(left)[y]
            left[y] = -np.inf
        found.append(probability)
    return np.array(found)


@pytest.mark.parametrize("e0", [1e-3, 0.1, 1.0, 5.0, 40.0])
def test_the_closed_form_is_the_worst_of_all_mechanisms_of_two_outputs(e0):
    a = np.linspace(0, e0, 200_001)[1:-1]  # losses a and a - e0
    mass = (np.exp(-a) - np.exp(-e0)) / -np.expm1(-e0)
    for epsilon in (-0.7 * e0, 0.0, 0.3 * e0, 0.99 * e0):
        true = np.maximum(mass * (np.exp(a) - math.exp(epsilon)), 0)
        true += np.maximum((1 - mass) * (np.exp(a - e0) - math.exp(epsilon)), 0)
        found = bounded_range_delta(e0, epsilon)
        assert found >= true.max() * (1 - 1e-9)
        assert found == pytest.approx(true.max(), rel=1e-6)
    assert bounded_range_delta(e0, e0) == 0
    assert bounded_range_delta(e0, -2 * e0) == pytest.approx(-math.expm1(-2 * e0), rel=1e-12)


@pytest.mark.parametrize("e0", [1e-12, 1e-4, 0.0099, 0.01, 0.3, 1.0, 5.0, 40.0, 300.0])
def test_mu_is_the_least_that_covers_the_curve(e0):
    mu = bounded_range_mu(e0)
    for epsilon in np.linspace(0, min(e0, 30), 60):
        assert gdp_delta(mu, epsilon) >= bounded_range_delta(e0, epsilon) * (1 - 1e-9)
    assert mu <= _STEEPEST * e0 * (1 + 1e-12)
    if 0.01 <= e0 <= 20:
        assert gdp_delta(mu * (1 - 1e-6), 0.0) < bounded_range_delta(e0, 0.0)


def sides(rng, size, scale, both):
    """Scores with and without a unit that moves each up by 0 to 1, or, replaced, down as well."""
    scores = rng.uniform(0, 3, size)
    moves = rng.choice([0.0, 1.0], size) if rng.random() < 0.7 else rng.uniform(0, 1, size)
    if both:
        moves = moves - rng.choice([0.0, 1.0], size)
    return (scores + moves) / scale, scores / scale


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("both", [False, True], ids=["one way", "both ways"])
def test_dependent_draws_without_replacement_never_tell_more(k, both):
    rng = np.random.default_rng(7)
    scale = 1.3
    curve = BoundedRange((2 if both else 1) / scale, k, neighbours="replace-one" if both else "zero-out")
    deltas = {epsilon: curve.delta(epsilon) for epsilon in EPSILONS}
    closest = 0.0
    for _ in range(60):
        up, down = (peeled(scores, k) for scores in sides(rng, 5, scale, both))
        for epsilon, delta in deltas.items():
            for p, q in ((up, down), (down, up)):
                true = hockey_stick(p, q, epsilon)
                assert true <= delta * (1 + 1e-9) + 1e-14
                closest = max(closest, true / delta if delta > 1e-9 else 0.0)
    assert closest > 0.3  # half of the range would be refuted


@pytest.mark.parametrize("k", [1, 2, 5, 20])
@pytest.mark.parametrize("e0", [0.05, 0.5, 2.0])
def test_copies_of_one_worst_draw_never_tell_more(e0, k):
    curve = BoundedRange(e0, k)
    for epsilon in (0.0, 0.2 * k * e0, 0.5 * k * e0, 0.8 * k * e0):
        delta = curve.delta(epsilon)
        for share in np.linspace(0.02, 0.98, 25):
            a = share * e0
            mass = (math.exp(-a) - math.exp(-e0)) / -math.expm1(-e0)  # of the one output, where the unit is not
            q = np.array([math.comb(k, j) * mass**j * (1 - mass) ** (k - j) for j in range(k + 1)])
            loss = np.arange(k + 1) * a + (k - np.arange(k + 1)) * (a - e0)
            assert hockey_stick(q * np.exp(loss), q, epsilon) <= delta * (1 + 1e-9) + 1e-14


def test_one_draw_is_the_closed_form_and_more_have_an_epsilon_that_is_their_deltas():
    for e0 in (0.01, 0.4, 3.0):
        for epsilon in (0.0, 0.4 * e0, 0.9 * e0):
            true = bounded_range_delta(e0, epsilon)
            assert true * (1 - 1e-9) <= BoundedRange(e0, 1).delta(epsilon) <= true * 1.01 + 1e-12
    for curve in (BoundedRange(0.05, 400), BoundedRange(1.0, 3), compose(Gaussian(1.0), BoundedRange(0.05, 100))):
        for delta in (1e-3, 1e-6):
            assert curve.delta(curve.epsilon(delta)) <= delta * (1 + 1e-6)
    draws = BoundedRange(0.05, 400)
    assert draws.epsilon(1e-6) <= gdp_epsilon(0.5, 1e-6, "rdp") * (1 + 1e-12)  # zero-concentrated DP of k e0^2 / 8
    assert draws.epsilon(1e-6) > gdp_epsilon(0.4, 1e-6)


def test_beside_a_gaussian_they_are_convolved():
    """By quadrature over the outputs of a two-output draw and a Gaussian: the draw in the middle of its range."""
    mu, e0 = 0.8, 1.2
    curve = compose(Gaussian(mu), BoundedRange(e0, 1))
    x = np.linspace(-12, 13, 20_001)
    normal = norm.pdf(x) * (x[1] - x[0])
    for epsilon in (0.0, 0.7, 2.0):
        closest = 0.0
        for a in np.linspace(0.05, 0.95, 19) * e0:
            mass = (math.exp(-a) - math.exp(-e0)) / -math.expm1(-e0)
            q = np.outer([mass, 1 - mass], normal)
            p = q * np.exp(np.add.outer([a, a - e0], mu * x - mu * mu / 2))
            closest = max(closest, hockey_stick(p, q, epsilon))
        assert closest <= curve.delta(epsilon) <= 1.25 * closest


def step(sigma, scores, other):
    """(with, without): a draw, then a Gaussian that a unit moves by 1, as vectors of masses."""
    x = np.linspace(-9 * sigma, 1 + 9 * sigma, 301)
    width = x[1] - x[0]
    tell = [norm.pdf(x, shift, sigma) * width for shift in (1.0, 0.0)]
    return np.outer(draw(scores), tell[0]).ravel(), np.outer(draw(other), tell[1]).ravel()


@pytest.mark.parametrize(("sigma", "q", "n"), [(1.0, 0.1, 1), (0.7, 0.5, 1), (1.0, 0.2, 2), (0.8, 1.0, 1)])
def test_a_draw_and_a_gaussian_under_one_coin(sigma, q, n):
    scale = 0.9
    curve = Sampled(sigma, q, n, e0=1 / scale, draws=1)
    rng = np.random.default_rng(3)
    closest = 0.0
    moves = [np.array([1.0, 0.0, 0.0]), np.array([1.0, 1.0, 0.0]), rng.uniform(0, 1, 3)]
    deltas = {epsilon: curve.delta(epsilon) for epsilon in (0.0, 0.1, 0.5, 1.5)}
    for move in moves:
        scores = np.zeros(3)
        present, absent = step(sigma, (scores + move) / scale, scores / scale)
        mixed = (1 - q) * absent + q * present
        with_unit, without = mixed, absent
        for _ in range(n - 1):
            with_unit, without = np.outer(with_unit, mixed).ravel(), np.outer(without, absent).ravel()
        for epsilon, delta in deltas.items():
            for one, other in ((with_unit, without), (without, with_unit)):
                true = hockey_stick(one, other, epsilon)
                assert true <= delta * (1 + 1e-9) + 1e-12
                closest = max(closest, true / delta if delta > 1e-6 else 0.0)
    assert closest > 0.85


def test_two_coins_would_claim_too_little():
    """A draw and a sum of one batch fall under one coin: amplified apart, they would claim less than the truth."""
    sigma, q, scale = 0.5, 0.02, 0.4
    present, absent = step(sigma, np.array([1.0, 0.0, 0.0]) / scale, np.zeros(3))
    true = hockey_stick((1 - q) * absent + q * present, absent, 3.0)
    apart = compose(Sampled(sigma, q, 1), Sampled(1e6, q, 1, e0=1 / scale, draws=1))
    assert 2 * apart.delta(3.0) < true <= Sampled(sigma, q, 1, e0=1 / scale, draws=1).delta(3.0)


def test_draws_count_beside_a_quiet_sum():
    """What is told of both is never less than what the draws tell alone, by any way of accounting."""
    draws = BoundedRange(1.0, 3)
    both = Sampled(20.0, 1.0, 1, e0=1.0, draws=3)
    assert both.delta(0.5) >= draws.delta(0.5) * (1 - 1e-6)
    assert both.epsilon(1e-3) >= draws.epsilon(1e-3) * (1 - 1e-6)


def test_no_coin_is_a_coin_that_always_falls_so():
    for sigma, n, e0, draws in ((0.5, 5, 0.05, 100), (1.0, 2, 0.4, 3)):
        coin = Sampled(sigma, 1.0, n, e0=e0, draws=draws).epsilon(1e-5)
        none = compose(
            Gaussian(math.sqrt(n) / sigma, neighbours="add-or-remove"),
            BoundedRange(e0, n * draws, neighbours="add-or-remove"),
        ).epsilon(1e-5)
        assert coin == pytest.approx(none, rel=2e-4)
    assert Sampled(0.5, 0.1, 20, e0=1e-9, draws=1).epsilon(1e-5) == pytest.approx(
        Sampled(0.5, 0.1, 20).epsilon(1e-5), rel=1e-3
    )


@pytest.mark.parametrize(("e0", "h"), [(0.3, 1e-3), (0.3, 0.07), (1e-4, 1e-2), (12.0, 0.5)])
def test_masses_on_the_grid_are_those_of_the_pair(e0, h):
    for low, masses in (_of_draw(e0, h), _of_gaussian(2.0, h, 40.0)):
        losses = (low + np.arange(len(masses))) * h
        assert masses.min() >= 0
        assert masses.sum() == pytest.approx(1, abs=1e-13)
        assert (masses * np.exp(-losses)).sum() == pytest.approx(1, abs=1e-12)
        for epsilon in (0.0, 0.3 * e0, 0.8 * e0):  # it tells no less than the pair itself
            exact = bounded_range_delta(e0, epsilon) if low * h >= -e0 - h else gdp_delta(2.0, epsilon)
            seen = np.maximum(-np.expm1(epsilon - losses), 0) @ masses
            assert seen >= exact * (1 - 1e-9)


def test_a_steps_masses_are_all_there():
    for sigma, e0, draws in ((0.5, 0.284, 100), (2.0, 1e-3, 5000), (1.0, 3.0, 2)):
        losses, masses = _of_step(sigma, e0, draws)
        assert abs(masses[-1]) < 1e-15  # a rounding of the transform
        assert masses.sum() + (masses * np.exp(-losses))[1:].sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("sigma", "q", "e0", "draws"), [(1 / 0.3, 0.878, 2.936, 168), (2.0, 0.5, 1.5, 400)])
def test_losses_beyond_what_exponentials_tell_are_on_the_safe_side(sigma, q, e0, draws):
    curve = Sampled(sigma, q, 1, e0=e0, draws=draws)
    relation = {"neighbours": "add-or-remove"}
    coinless = compose(Gaussian(1 / sigma, **relation), BoundedRange(e0, draws, **relation))
    mean = draws * (e0 / math.expm1(-e0) * -1 - 1 - math.log(e0 / -math.expm1(-e0)))  # of the loss of an extreme pair
    assert curve.delta(0.1 * mean) >= 0.9 * q  # with the coin, nearly every outcome tells
    assert 0.1 * mean < curve.epsilon(1e-5) <= coinless.epsilon(1e-5) * (1 + 1e-6)


def test_equal_ranges_are_more_draws():
    one, two = BoundedRange(0.1, 3), BoundedRange(0.1, 4)
    assert compose(one, two) == BoundedRange(0.1, 7)
    assert compose(one, Gaussian(1.0), BoundedRange(0.2, 1), two) == compose(
        Gaussian(1.0), compose(BoundedRange(0.2, 1), BoundedRange(0.1, 7))
    )
    pair = Sampled(1.0, 0.1, 3, e0=0.1, draws=5)
    assert compose(pair, pair) == Sampled(1.0, 0.1, 6, e0=0.1, draws=5) != Sampled(1.0, 0.1, 6)


@pytest.mark.parametrize(
    ("e0", "draws"), [(1e-300, 1), (1e-9, 10**12), (1e-12, 2**53), (499.0, 1), (1e4, 3), (3.0, 10**9)]
)
def test_extremes_stay_on_the_safe_side(e0, draws):
    curve = BoundedRange(e0, draws)
    assert 0 <= curve.epsilon(1e-5) <= draws * e0 * (1 + 1e-6) or e0 > 1
    assert curve.epsilon(1e-5) <= gdp_epsilon(bounded_range_mu(e0) * math.sqrt(draws), 1e-5) * (1 + 1e-9)
    assert 0 <= curve.delta(1.0) <= 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: BoundedRange(0.0, 1), "e0 must"),
        (lambda: BoundedRange(1.0, 0), "draws must"),
        (lambda: BoundedRange(1.0, 2.0), "draws must"),
        (lambda: BoundedRange(1.0, 1, neighbours="near"), "neighbours must"),
        (lambda: Sampled(1.0, 0.1, 3, e0=1.0), "e0 and draws must be given together"),
        (lambda: Sampled(1.0, 0.1, 3, draws=1), "e0 and draws must be given together"),
        (lambda: compose(BoundedRange(1.0, 1), Sampled(1.0, 0.1, 3)), "parts must agree in neighbours"),
        (lambda: bounded_range_mu(math.nan), "e0 must"),
        (lambda: BoundedRange(1.0, 1).epsilon(0.0), "delta must"),
    ],
)
def test_what_is_refused(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()
    with pytest.raises(TypeError, match="must not be subclassed"):
        type("Own", (BoundedRange,), {})


def test_the_numbers_of_a_published_experiment():
    """Zhang, Mironov and Hejazinia 2021: batches of 20 of 200 000, 20 passes, delta 1e-5; add-or-remove."""
    setting = (20 / 200_000, 200_000)
    assert Sampled(0.32, *setting).epsilon(1e-5) == pytest.approx(22.35, abs=5e-3)
    # 100 draws with weights exp(lambda |g|), |g| <= S0, at eps'' = 2 lambda S0 = 16 / sqrt(2 100 ln(1 / 1.25e-7))
    e0 = 16 / math.sqrt(200 * math.log(1 / 1.25e-7))
    assert 8.4 < Sampled(0.5, *setting, e0=e0, draws=100).epsilon(1e-5) <= 8.56
