"""The bound of a search against exact searches over small mechanisms, and its edges."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from anyorder.accounting import BoundedRange, Gaussian, Sampled
from anyorder.accounting.curves import compose
from anyorder.budget import Fixed, Geometric, Logarithmic, NegativeBinomial, Poisson, calibrate_search, search_epsilon
from anyorder.budget.search_privacy import _profile, repeated
from anyorder.errors import ArgumentError

LAWS = [
    Geometric(1.5), Geometric(10.0), Geometric(300.0), Logarithmic(10.0), NegativeBinomial(-0.5, 10.0),
    NegativeBinomial(3.0, 10.0), NegativeBinomial(0.5, 100.0), Poisson(0.5), Poisson(5.0), Poisson(60.0),
]  # fmt: skip
EPSILONS = [0.0, 0.1, 0.5, 1.0, 2.0, 4.0]


def search_delta(law, curve, epsilon):
    """Where the profile that `search_epsilon` searches is at epsilon."""
    if isinstance(law, Fixed):
        return repeated(curve, law.runs).delta(epsilon)
    alone = curve.delta(epsilon)
    if alone == 0:
        return 0.0 if curve.mu == 0 else _profile(law, curve, 1e-280).delta(epsilon)
    return _profile(law, curve, alone).delta(epsilon)


class Small:
    """A mechanism of a few outputs, given by its two distributions, in the place of a curve."""

    mu = None

    def __init__(self, q, p):
        self.q, self.p = np.asarray(q, float), np.asarray(p, float)

    def delta(self, epsilon):
        return max(stick(self.q, self.p, epsilon), stick(self.p, self.q, epsilon))

    def epsilon(self, delta):
        low, high = 0.0, 800.0
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high


def stick(q, p, epsilon):
    return math.fsum(np.maximum(q - math.exp(epsilon) * p, 0.0))


def shown(law, q, scores):
    """What the search shows of each output: best scores win, equals at random."""
    chances = np.empty(len(q))
    for i, score in enumerate(scores):
        below, upto = q[scores < score].sum(), min(1.0, q[scores <= score].sum())
        chances[i] = q[i] / q[scores == score].sum() * (law.pgf(upto) - law.pgf(min(below, 1.0)))
    return chances


def orders(n):
    """Every ranking of n outputs, with ties."""
    return {tuple(np.unique(scores, return_inverse=True)[1]) for scores in itertools.product(range(n), repeat=n)}


def mechanisms(rng, n):
    """Pairs of distributions: mild ones, ones with rare telling outputs, and ones that are close to pure."""
    q, p = rng.dirichlet(np.full(n, 1.0), 2)
    yield 0.9 * q + 0.1 / n, 0.9 * p + 0.1 / n
    q = rng.dirichlet(np.full(n, 0.3)) + 1e-9
    p = q * np.exp(rng.normal(0, 0.5, n))
    yield q / q.sum(), p / p.sum()
    q = 10.0 ** rng.uniform(-5, 0, n)
    p = q * np.exp(0.4 * rng.choice([-1, 1], n))
    yield q / q.sum(), p / p.sum()


@pytest.mark.parametrize("law", [LAWS[1], *LAWS[3:8]], ids=str)
def test_no_search_over_a_small_mechanism_tells_more(law):
    """All rankings of up to four outputs, ties too, both directions; a Poisson search that shows nothing counts."""
    rng = np.random.default_rng(5)
    nearest = 0.0
    for n in (2, 3, 4):
        for q, p in mechanisms(rng, n):
            bounds = [search_delta(law, Small(q, p), epsilon) for epsilon in EPSILONS]
            for scores in map(np.array, orders(n)):
                a, b = shown(law, q, scores), shown(law, p, scores)
                assert math.isclose(a.sum() + law.pgf(0.0), 1.0, abs_tol=1e-9)
                for epsilon, bound in zip(EPSILONS, bounds, strict=True):
                    true = max(stick(a, b, epsilon), stick(b, a, epsilon))
                    assert true <= bound + 1e-15
                    nearest = max(nearest, true / bound if bound > 1e-12 else 0.0)
    assert nearest > 0.5  # the bound is one, and not far


@pytest.mark.parametrize("law", [Geometric(2.0), Poisson(1.0), Logarithmic(2.0)], ids=str)
def test_what_a_search_shows_by_enumerating_its_runs(law):
    """The generating function against the definition: K runs one by one, the best of them, equals by coins."""
    q, scores = np.array([0.5, 0.3, 0.2]), np.array([1, 0, 1])
    by_law = np.zeros(3)
    sure = 1 - law.pgf(0.0)
    derivative = [_chance(law, k) for k in range(9)]
    for k in range(1, 9):
        for runs in itertools.product(range(3), repeat=k):
            best = [run for run in runs if scores[run] == max(scores[list(runs)])]
            for run in best:
                by_law[run] += derivative[k] * np.prod(q[list(runs)]) / len(best)
    assert np.allclose(by_law, shown(law, q, scores), atol=1 - sum(derivative) + 1e-12)
    assert math.isclose(shown(law, q, scores).sum(), sure, rel_tol=1e-12)


def _chance(law, k):
    """P(K = k) from the definitions of the laws, written once more."""
    if isinstance(law, Poisson):
        return math.exp(-law.mean) * law.mean**k / math.factorial(k)
    if k == 0:
        return 0.0
    gamma = law.gamma
    if law.eta == 0:
        return (1 - gamma) ** k / (k * math.log(1 / gamma))
    product = math.prod((i + law.eta) / (i + 1) for i in range(k))
    return (1 - gamma) ** k / (gamma**-law.eta - 1) * product


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_no_search_over_a_small_mechanism_is_further_in_renyi_divergence(law):
    """The two theorems that the Rényi bound rests on, order by order, of what is shown; three outputs."""
    rng = np.random.default_rng(11)
    orders_of = np.array([1.1, 1.5, 2.0, 3.0, 5.0, 9.0, 20.0, 60.0])
    for q, p in mechanisms(rng, 3):
        own = np.array([max(divergence(q, p, a), divergence(p, q, a)) for a in orders_of])
        if isinstance(law, Poisson):
            extra = np.array([law.mean * Small(q, p).delta(math.log(a / (a - 1))) for a in orders_of])
        else:
            extra = (1 + law.eta) * min((1 - 1 / orders_of) * own - math.log(law.gamma) / orders_of)
        bounds = own + extra + math.log(law.mean) / (orders_of - 1)
        for scores in map(np.array, orders(3)):
            a, b = shown(law, q, scores), shown(law, p, scores)
            for order, bound in zip(orders_of, bounds, strict=True):
                assert max(divergence(a, b, order), divergence(b, a, order)) <= bound + 1e-9


def divergence(q, p, order):
    held = q > 0
    logs = order * np.log(q[held]) + (1 - order) * np.log(p[held])
    return (logs.max() + math.log(np.exp(logs - logs.max()).sum())) / (order - 1)


@pytest.mark.parametrize("law", [Geometric(10.0), Logarithmic(100.0), NegativeBinomial(-0.5, 10.0)], ids=str)
def test_pure_runs_make_the_pure_search_that_is_published(law):
    """(2 + eta) epsilon [Papernot, Steinke 2022, Corollary 3]; 3 epsilon of the geometric law [Liu, Talwar 2019]."""
    e0 = 0.7
    likely = 1 / (1 + math.exp(-e0))
    run = Small([likely, 1 - likely], [1 - likely, likely])
    assert search_delta(law, run, (2 + law.eta) * e0 + 1e-6) < 1e-9
    assert search_delta(law, run, (1 + law.eta / 2) * e0) > 1e-4


def test_the_bound_is_never_above_those_that_are_published():
    """Rényi [Papernot, Steinke 2022, Theorems 2, 6]; by a point of the profile [Koskela, Redberg, Wang 2024]."""
    for mu in (0.1, 4.0):
        for law in (Geometric(50), NegativeBinomial(-0.5, 50), Poisson(10)):
            least, profile, renyi = (
                search_epsilon(law, Gaussian(mu), 1e-6, bound) for bound in ("least", "profile", "renyi")
            )
            assert least == profile < renyi
    law, run = Geometric(50), Gaussian(1.0)
    for epsilon in (7.0, 12.0):
        for e1 in np.linspace(0.5, 8.0, 20):
            step = (law.eta + 1) * math.log(math.exp(e1) + (1 - law.gamma) / law.gamma * run.delta(e1))
            if step < epsilon:
                assert search_delta(law, run, epsilon) <= law.mean * run.delta(epsilon - step) * (1 + 1e-3)


@pytest.mark.parametrize("law", [Geometric(50), NegativeBinomial(-0.5, 50), Poisson(10)], ids=str)
def test_a_gaussian_run_comes_within_a_hundredth_of_the_bound_and_never_above(law):
    """Best are the outputs x < a, least likely under Q for what they are under Q', then those beyond b, telling Q."""
    mu, delta = 1.0, 1e-6
    bound = search_epsilon(law, Gaussian(mu), delta)
    near, over = 0.0, 0.0
    for first in np.geomspace(1e-4, 0.5, 50):
        a = mu + ndtri(first)
        b = np.linspace(max(a, mu + 2), mu + 6, 60)
        shown_q, shown_p = (
            np.array([law.pgf(1 - low) - law.pgf(max(0.0, 1 - low - width)) for width in widths])
            for low, widths in ((first, ndtr(mu - b)), (ndtr(a), ndtr(-b)))
        )
        near = max(near, float(np.max(shown_q - math.exp(0.99 * bound) * shown_p)))
        over = max(over, float(np.max(shown_q - math.exp(bound) * shown_p)))
    assert over <= delta < near


def test_calibration_lands_at_or_just_under_the_target():
    for law, epsilon in ((Fixed(50), 0.1), (Geometric(50), 8.0), (NegativeBinomial(-0.5, 50), 0.1), (Poisson(10), 8.0)):
        mu = calibrate_search(law, epsilon, 1e-6)
        assert epsilon * (1 - 1e-4) <= search_epsilon(law, Gaussian(mu), 1e-6) <= epsilon
    with pytest.raises(ArgumentError, match="no mu"):
        calibrate_search(Geometric(50), 1.0, 1e-6, lambda mu: Gaussian(3.0))


def test_more_of_anything_costs_more():
    base = search_epsilon(Geometric(50), Gaussian(1.0), 1e-6)
    assert search_epsilon(Geometric(55), Gaussian(1.0), 1e-6) > base
    assert search_epsilon(Geometric(50), Gaussian(1.01), 1e-6) > base
    assert search_epsilon(Geometric(50), Gaussian(1.0), 1e-7) > base > Gaussian(1.0).epsilon(1e-6)
    etas = [search_epsilon(NegativeBinomial(eta, 50), Gaussian(1.0), 1e-6) for eta in (-0.5, 0.0, 1.0, 3.0)]
    assert etas == sorted(etas)
    assert etas[1] == search_epsilon(Logarithmic(50), Gaussian(1.0), 1e-6)
    assert math.isclose(etas[2], base, rel_tol=1e-9)
    deltas = [search_delta(Geometric(50), Gaussian(1.0), epsilon) for epsilon in np.linspace(0, 30, 31)]
    assert deltas == sorted(deltas, reverse=True)
    assert deltas[0] <= 1


def test_delta_and_epsilon_agree():
    for law in (Fixed(5), Geometric(50), Poisson(10)):
        epsilon = search_epsilon(law, Gaussian(0.5), 1e-6)
        assert math.isclose(search_delta(law, Gaussian(0.5), epsilon), 1e-6, rel_tol=2e-3)


def test_a_fixed_number_of_runs_is_their_composition():
    assert math.isclose(search_epsilon(Fixed(9), Gaussian(0.5), 1e-6), Gaussian(1.5).epsilon(1e-6), rel_tol=1e-12)
    amplified = Sampled(1.0, 0.01, 10)
    assert search_epsilon(Fixed(6), amplified, 1e-6) == Sampled(1.0, 0.01, 60).epsilon(1e-6)
    assert search_delta(Fixed(3), amplified, 1.0) == compose(amplified, amplified, amplified).delta(1.0)


def test_other_curves():
    """A curve that is no Gaussian has fewer knots, and stays on the safe side of one that is no better."""
    draws = BoundedRange(0.05, 16)
    like = Gaussian(math.sqrt(16) * 0.05 / 2)  # zero-concentrated DP of the same rho, and nearly normal
    found, compared = (search_epsilon(Geometric(50), curve, 1e-6) for curve in (draws, like))
    assert found > draws.epsilon(1e-6)
    assert math.isclose(found, compared, rel_tol=0.1)


def test_edges():
    assert search_epsilon(Geometric(50), Gaussian(0.0), 1e-6) == 0.0
    assert search_delta(Poisson(5), Gaussian(0.0), 0.0) == 0.0
    assert search_epsilon(Geometric(50), Gaussian(1e-12), 1e-6) < 1e-4
    assert (
        search_epsilon(Geometric(50), Gaussian(30.0), 1e-6) < 690 < search_epsilon(Geometric(50), Gaussian(40.0), 1e-6)
    )
    assert search_delta(Geometric(50), Gaussian(1.0), 1e5) < 1e-200
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(ArgumentError, match="delta"):
            search_epsilon(Geometric(50), Gaussian(1.0), delta)
