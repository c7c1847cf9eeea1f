"""No p-value and no bound refutes what is true; `python -m benchmarks.audit --only null` is the same at full size."""

import math

import numpy as np
import pytest
from benchmarks.audits import null

from anyorder.accounting import Gaussian, gdp_delta
from anyorder.audit import mu_estimate, p_value


def test_the_gaussian_test_has_its_level_exactly():
    """1000 runs with the true mu: 50 +- 4 binomial deviations, and p-values that are uniform."""
    runs, p = 1000, []
    for run in range(runs):
        attack = null.normal(np.random.default_rng([run, 11]), 30, 0.0)
        p.append(p_value(attack.scores, attack.coins, attack.claims[0], "gaussian"))
    p = np.sort(p)
    for level in (0.01, 0.05, 0.5):
        assert abs((p <= level).sum() - runs * level) < 4 * math.sqrt(runs * level * (1 - level))
    assert np.abs(p - (np.arange(runs) + 0.5) / runs).max() < 1.95 / math.sqrt(runs)  # Kolmogorov: 0.001


def test_the_interval_of_mu_covers_as_often_as_it_says():
    missed = np.zeros(2)
    for run in range(100):
        rng = np.random.default_rng([run, 13])
        coins = rng.random(12) < 0.5
        if not 0 < coins.sum() < 12:
            continue
        low, high = mu_estimate(1.5 * coins + rng.standard_normal(12), coins, 0.8)
        missed += [low > 1.5, high < 1.5]
    assert (np.abs(missed - 10) < 4 * 3).all()


@pytest.mark.parametrize(
    ("method", "mechanism"),
    [("one_run", null.normal), ("f_dp", null.response), ("clopper_pearson", null.normal)],
)
def test_the_others_are_not_above_their_level(method, mechanism):
    runs = 60
    assert null.nulls(method, runs, mechanism, 60) <= runs * 0.05 + 4 * math.sqrt(runs * 0.05 * 0.95)


def test_one_run_has_its_level_exactly_for_randomised_response():
    found, nominal = null.exact_level(1000)
    assert 0.02 < nominal <= 0.05
    assert abs(found - 1000 * nominal) < 4 * math.sqrt(1000 * nominal * (1 - nominal))


def test_random_mechanisms_are_never_refuted():
    tallies = {}
    for seed in range(5 * len(null.MECHANISMS)):
        null.attacked(seed, tallies)
    assert set(tallies) == set(null.METHODS)
    for tally in tallies.values():
        assert tally.far_above == 0
        assert tally.least > 1e-6
        for count, of in ((tally.above, tally.bounds), (tally.small, tally.p_values)):
            assert count <= 0.05 * of + 4 * math.sqrt(0.05 * 0.95 * of)


def test_half_the_noise_is_found():
    """The same harness does refute a claim that is false, by each method at what it can see."""
    rng = np.random.default_rng(3)
    coins = rng.random(4000) < 0.5
    scores = 2.0 * coins + rng.standard_normal(4000)
    for method, most in (("gaussian", 1e-100), ("clopper_pearson", 1e-3), ("f_dp", 0.01), ("one_run", 0.01)):
        assert p_value(scores, coins, Gaussian(1.0), method) < most, method


def test_the_mechanisms_are_as_private_as_they_say():
    """Each claim against a hockey-stick divergence that is summed: one canary, the others known."""
    rng = np.random.default_rng(5)
    for _ in range(5):
        mu, q, epsilon = rng.uniform(0.3, 3), rng.uniform(0.1, 0.9), rng.uniform(0.05, 2)
        x = np.linspace(-12, 15, 270_001)
        out, full = np.exp(-x * x / 2), np.exp(-((x - mu) ** 2) / 2)
        scale = (x[1] - x[0]) / math.sqrt(2 * math.pi)
        into = (1 - q) * out + q * full
        pairs = ((into, out), (out, into))
        plain = max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum()) * scale for a, b in pairs)
        attack = null._curve(np.zeros(2), np.zeros(2, bool), lambda e, q=q, mu=mu: null.sampled_delta(mu, q, e))
        assert attack.epsilon(plain) == pytest.approx(epsilon, abs=1e-5)
        assert gdp_delta(mu, epsilon) >= plain
    h, coupling, m = 0.4, 0.3, 5
    flips = np.array([null._chain(np.random.default_rng(seed), m, h, coupling) for seed in range(4000)])
    states = np.array(np.meshgrid(*[[-1, 1]] * m)).reshape(m, -1).T
    weights = np.exp(-h * states.sum(1) + coupling * (states[:, 1:] * states[:, :-1]).sum(1))
    weights /= weights.sum()
    assert flips.mean(0) == pytest.approx(weights @ states, abs=0.08)
    worst = max(
        abs(math.log(weights[i] / weights[j]))
        for i in range(len(states))
        for j in range(len(states))
        if (states[i] != states[j]).sum() == 1
    )
    assert worst == pytest.approx(2 * h + 4 * coupling)
