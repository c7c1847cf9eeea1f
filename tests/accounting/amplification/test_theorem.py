"""The dominating pair of secret sampling against runs it must dominate: any signs, any directions, adaptive ones."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from accounting.amplification import oracle
from anyorder.accounting.amplification.mixture import bins_gram
from anyorder.participation import BallsInBins, MinSeparationSampling, PoissonSampling, RandomAllocation
from anyorder.strategy import Dense

RULES = [PoissonSampling(3, 0.4), BallsInBins(2, 2), RandomAllocation(2, 2), MinSeparationSampling(4, 2, 0.4)]


def random_matrix(rng, n):
    return np.tril(rng.uniform(-1, 1, (n, n)), -1) + np.diag(rng.uniform(0.3, 1, n))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_directions_that_do_not_adapt(rule, seed):
    rng = np.random.default_rng(seed)
    matrix = random_matrix(rng, rule.n)
    sigma, epsilon = rng.uniform(0.7, 1.5), rng.uniform(0, 1.5)
    above = oracle.scheme_deltas(matrix, rule, sigma, epsilon, step=0.5)
    (law,) = oracle.laws(rule)
    weights = [weight for weight, _ in law]
    for size in (1, 3):
        x = rng.standard_normal((rule.n, size))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        rows = np.array([(matrix[:, list(steps)] @ x[list(steps)]).ravel() for _, steps in law])
        found = oracle.mixture_deltas(rows @ rows.T, weights, sigma, epsilon, step=0.5)
        assert found.remove <= above.remove * (1 + 1e-4)
        assert found.add <= above.add * (1 + 1e-4)


def adaptive_deltas(c, law, sigma, epsilon, answer, points=4001):
    """Two steps; x_1 = 1, and x_2 = answer(y_1) in [-1, 1] for what was released first. C = [[1, 0], [c, 1]].

    law: (probability of (), (0,), (1,), (0, 1)). Sums over both outputs on a grid, the second in closed form.
    """
    y = np.linspace(-9 * sigma, 9 * sigma + 1, points)
    first = np.array([0.0, 1.0, 0.0, 1.0])
    x = answer(y)
    second = np.stack([0 * x, c + 0 * x, x, c + x])  # of each set of steps, at each first output
    density = np.exp(-((y - first[:, None]) ** 2) / (2 * sigma**2)) * (y[1] - y[0]) / (sigma * math.sqrt(2 * math.pi))
    z = np.linspace(-12 * sigma, 12 * sigma, points)
    ratio = np.exp((second[:, :, None] * z - second[:, :, None] ** 2 / 2) / sigma**2)
    ratio = np.einsum("s,sy,syz->yz", np.asarray(law), density / density[0], ratio)
    weight = density[0][:, None] * np.exp(-(z**2) / (2 * sigma**2)) * (z[1] - z[0]) / (sigma * math.sqrt(2 * math.pi))
    level = math.exp(epsilon)
    return oracle.Deltas(
        float((weight * np.maximum(ratio - level, 0)).sum()), float((weight * np.maximum(1 - level * ratio, 0)).sum())
    )


ANSWERS = {
    "against what came": lambda y: -np.sign(y - 0.5),
    "with what came": lambda y: np.sign(y - 0.5),
    "only where it tells": lambda y: np.where(np.abs(y - 0.5) > 1, 1.0, -1.0),
    "always": lambda y: np.ones_like(y),
}


@pytest.mark.parametrize(
    ("answer", "c"),
    [("against what came", 0.8), ("with what came", -0.8), ("only where it tells", 0.8), ("always", -0.8)],
)
def test_directions_that_adapt(c, answer):
    for law in ([0.0, 0.5, 0.5, 0.0], [0.49, 0.21, 0.21, 0.09], [0.2, 0.0, 0.0, 0.8]):
        means = np.array([[0.0, 0.0], [1.0, abs(c)], [0.0, 1.0], [1.0, 1 + abs(c)]])
        for epsilon in (0.0, 1.0):
            above = oracle.mixture_deltas(means @ means.T, np.maximum(law, 1e-300), 1.0, epsilon)
            found = adaptive_deltas(c, law, 1.0, epsilon, ANSWERS[answer], points=801)
            assert found.remove <= above.remove + 2e-4
            assert found.add <= above.add + 2e-4
            if answer == "always" and c > 0:
                assert found == pytest.approx(above, abs=2e-4)


def test_delta_rises_in_every_entry():
    rng = np.random.default_rng(5)
    for _ in range(5):
        means = rng.uniform(0, 1, (3, 3))
        more = means @ means.T
        for i, j in ((0, 0), (0, 1), (1, 2)):
            larger = more.copy()
            larger[i, j] = larger[j, i] = more[i, j] + 0.05
            if np.linalg.eigvalsh(larger).min() < 0:
                continue
            low, high = (oracle.mixture_deltas(g, [0.2, 0.3, 0.5], 0.8, 0.6, step=0.5) for g in (more, larger))
            assert low.remove <= high.remove * (1 + 1e-7)
            assert low.add <= high.add * (1 + 1e-7)


def test_one_gram_matrix_for_both():
    matrix = random_matrix(np.random.default_rng(1), 6)
    rule = BallsInBins(2, 3)
    gram = bins_gram(Dense(matrix), rule)
    found = oracle.mixture_deltas(gram, np.full(3, 1 / 3), 1.0, 0.5)
    assert found == pytest.approx(oracle.scheme_deltas(matrix, rule, 1.0, 0.5), rel=1e-9)
    one = np.sqrt(gram[0, 0])
    assert oracle.mixture_deltas(gram[:1, :1], [1.0], 1.0, 0.5).add == pytest.approx(
        float(ndtr(one / 2 - 0.5 / one) - math.exp(0.5) * ndtr(-one / 2 - 0.5 / one)), rel=1e-9
    )
