"""The brute force itself: closed forms, another way round each integral, and samples."""

import math

import numpy as np
import pytest

from accounting.amplification import oracle
from anyorder.accounting import gdp_delta
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)

C = np.array([[1.0, 0, 0, 0], [0.6, 1.0, 0, 0], [0.3, 0.6, 1.0, 0], [0.1, 0.3, 0.6, 1.0]])


def sampled(gram, weights, sigma, epsilon, count=400_000):
    """(remove, add, their errors) by samples, from the Gram matrix and nothing else."""
    gram, weights = np.asarray(gram) / sigma**2, np.asarray(weights)
    values, vectors = np.linalg.eigh(gram)
    half = vectors * np.sqrt(np.maximum(values, 0))
    rng = np.random.default_rng(7)
    inner = rng.standard_normal((count, len(gram))) @ half.T  # <m_i, y> without the unit
    which = rng.choice(len(gram), count, p=weights / weights.sum())
    ratio = np.exp(inner - np.diag(gram) / 2) @ weights
    ratio_with = np.exp(inner + gram[which] - np.diag(gram) / 2) @ weights
    one, two = np.maximum(1 - np.exp(epsilon) / ratio_with, 0), np.maximum(1 - np.exp(epsilon) * ratio, 0)
    return one.mean(), two.mean(), one.std() / math.sqrt(count), two.std() / math.sqrt(count)


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_one_gaussian(mu):
    for epsilon in (0.0, 1.0, 3.0):
        found = oracle.mixture_deltas([[mu**2]], [1.0], 1.0, epsilon)
        assert found == pytest.approx((gdp_delta(mu, epsilon),) * 2, rel=1e-9)


def test_the_same_gaussian_seen_as_four():
    found = oracle.mixture_deltas(np.ones((4, 4)) * 2.0, [0.1, 0.2, 0.3, 0.4], 1.5, 1.0)
    assert found == pytest.approx((gdp_delta(math.sqrt(2) / 1.5, 1.0),) * 2, rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_halved_grid_and_other_axis(epsilon):
    gram = C.T @ C
    found = oracle.mixture_deltas(gram, np.full(4, 0.25), 0.9, epsilon, step=0.5)
    assert found == pytest.approx(oracle.mixture_deltas(gram, np.full(4, 0.25), 0.9, epsilon, step=0.4), rel=1e-8)
    split = np.kron(gram, np.ones((2, 2)))  # each mean twice: the same mixture
    assert found == pytest.approx(oracle.mixture_deltas(split, np.full(8, 0.125), 0.9, epsilon, step=0.5), rel=1e-8)


@pytest.mark.parametrize("seed", range(4))
def test_any_signs_against_samples(seed):
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((4, 3))
    weights = rng.dirichlet(np.ones(4))
    found = oracle.mixture_deltas(means @ means.T, weights, 1.2, 0.5, step=0.25)
    remove, add, *errors = sampled(means @ means.T, weights, 1.2, 0.5)
    assert found.remove == pytest.approx(remove, abs=5 * errors[0])
    assert found.add == pytest.approx(add, abs=5 * errors[1])


RULES = [
    PoissonSampling(4, 0.3),
    CyclicPoisson(4, 2, 0.3),
    BallsInBins(2, 2),
    RandomAllocation(2, 2),
    MinSeparationSampling(4, 2, 0.4),
    MinSeparationSampling(4, 3, 0.4, warm_start=False),
]


@pytest.mark.parametrize("rule", [*RULES, BallsInBins(2, 4), RandomAllocation(2, 4), PoissonSampling(8, 0.2)], ids=repr)
def test_a_law_is_one(rule):
    for law in oracle.laws(rule):
        assert sum(weight for weight, _ in law) == pytest.approx(1.0, abs=1e-14)
        assert len({steps for _, steps in law}) == len(law)


def test_a_warm_start_has_level_batches():
    (law,) = oracle.laws(MinSeparationSampling(7, 3, 0.4))
    for t in range(7):
        assert sum(w for w, steps in law if t in steps) == pytest.approx(0.4 / 1.8, abs=1e-14)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_schemes_against_samples(rule):
    found = oracle.scheme_deltas(C, rule, 1.0, 0.7, step=0.5)
    both = []
    for law in oracle.laws(rule):
        means = np.array([C[:, list(steps)].sum(axis=1) for _, steps in law])
        both.append(sampled(means @ means.T, [w for w, _ in law], 1.0, 0.7, count=100_000))
    assert found.remove == pytest.approx(max(b[0] for b in both), abs=0.004)
    assert found.add == pytest.approx(max(b[1] for b in both), abs=0.004)


@pytest.mark.parametrize("rule", [PoissonSampling(4, 0.3), RandomAllocation(2, 2)], ids=repr)
def test_points_at_random_against_the_grid(rule, monkeypatch):
    grid = oracle.scheme_deltas(C, rule, 1.0, 0.7, step=0.5)
    monkeypatch.setattr(
        oracle, "_trapezoid", lambda means, weights, epsilon, step: oracle._sobol(means, weights, epsilon)
    )
    assert oracle.scheme_deltas(C, rule, 1.0, 0.7) == pytest.approx(grid, rel=1e-3)


def test_truncation_that_never_happens_is_poisson():
    rule = TruncatedPoisson(1, 0.3, 4, 4)
    found = oracle.truncated_deltas(rule, 1.0, [0.0, 0.0, 0.0], 1.0, 0.5)
    assert found == pytest.approx(oracle.scheme_deltas([[1.0]], PoissonSampling(1, 0.3), 1.0, 0.5), abs=1e-8)


def test_truncation_by_samples():
    rule, others = TruncatedPoisson(1, 0.6, 2, 4), [-1.0, 0.5, 1.0]
    rng = np.random.default_rng(3)
    count, sigma, epsilon = 200_000, 0.8, 0.3
    coins = rng.random((count, 4)) < 0.6
    ranks = np.where(coins, rng.random((count, 4)), 2.0).argsort(axis=1).argsort(axis=1)
    kept = coins & (ranks < 2)
    numbers = np.array([*others, 1.0])
    sums, noise = kept @ numbers, sigma * rng.standard_normal(count)
    zeroed = kept[:, :3] @ numbers[:3]
    kinds, masses = np.unique(kept, axis=0, return_counts=True)

    def density(y, vector):
        return (masses / count) @ np.exp(-((y - (kinds @ vector)[:, None]) ** 2) / (2 * sigma**2))

    without = np.array([*others, 0.0])
    ratio = density(sums + noise, without) / density(sums + noise, numbers)
    back = density(zeroed + noise, numbers) / density(zeroed + noise, without)
    found = oracle.truncated_deltas(rule, 1.0, others, sigma, epsilon)
    assert found.remove == pytest.approx(np.maximum(1 - math.exp(epsilon) * ratio, 0).mean(), abs=2e-3)
    assert found.add == pytest.approx(np.maximum(1 - math.exp(epsilon) * back, 0).mean(), abs=2e-3)
