"""Bounds for balls in bins, against quadrature, and the laws that they must keep."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from anyorder.accounting.amplification import bins_chain, bins_fit
from anyorder.accounting.amplification.bins import bins_delta, bins_epsilon, bins_losses
from anyorder.accounting.amplification.bins_chain import Chain, chain_law
from anyorder.accounting.amplification.bins_fit import dominating_chains
from anyorder.accounting.gaussian import gdp_delta
from anyorder.errors import ArgumentError

POINTS = {1: 20001, 2: 801, 3: 101}


def truth(k, epsilon, reach=8.0):
    """Both directions by the trapezoid rule, b <= 3, less what the rule may be wrong by at their kinks."""
    b = len(k)
    points = POINTS[b]
    axis = np.linspace(-reach, reach, points)
    weight = np.exp(-axis * axis / 2) / math.sqrt(2 * math.pi) * (axis[1] - axis[0])
    z = np.stack([g.ravel() for g in np.meshgrid(*[axis] * b, indexing="ij")])
    mass = np.prod(np.stack([g.ravel() for g in np.meshgrid(*[weight] * b, indexing="ij")]), axis=0)
    values, vectors = np.linalg.eigh(k)
    root = vectors * np.sqrt(np.maximum(values, 0))
    ratio = np.exp(root @ z - np.diag(k)[:, None] / 2).mean(0)
    t = math.exp(epsilon)
    wrong = (axis[1] - axis[0]) ** 2 / 8 * math.sqrt(k.max()) * max(t, 1.0)
    return mass @ np.maximum(ratio - t, 0) - wrong, mass @ np.maximum(1 - t * ratio, 0) - wrong


def matrices():
    rng = np.random.default_rng(5)
    for b in (1, 2, 3):
        yield np.eye(b)
        yield np.ones((b, b))
        for _ in range(4):
            m = rng.uniform(size=(b, 4)) * rng.uniform(0.05, 1.0, size=(b, 1))
            yield m @ m.T


@pytest.mark.parametrize("gram", list(matrices()), ids=lambda g: f"{len(g)}")
@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_never_below_quadrature(gram, sigma):
    for epsilon in (-0.5, 0.0, 0.5, 1.0, 2.0):
        both = truth(gram / sigma**2, epsilon)
        assert bins_delta(gram, sigma, epsilon) >= max(both), epsilon


def test_of_independent_bins_next_to_nothing_is_lost():
    for epsilon in (0.0, 0.5, 1.5):
        exact = max(truth(np.eye(2), epsilon))
        assert exact <= bins_delta(np.eye(2), 1.0, epsilon) <= exact * 1.01 + 2e-4


def test_of_equal_bins_it_is_one_gaussian():
    for epsilon in (0.0, 1.0, 3.0):
        assert bins_delta(np.full((5, 5), 0.7), 0.8, epsilon) == pytest.approx(
            gdp_delta(math.sqrt(0.7) / 0.8, epsilon), rel=1e-6
        )
    assert bins_delta(np.array([[2.0]]), 1.0, 1.0) == pytest.approx(gdp_delta(math.sqrt(2), 1.0), rel=1e-9)


def chain_matrix(b, v, r, nu, constant=0.0):
    d = np.abs(np.subtract.outer(np.arange(b), np.arange(b)))
    return constant + nu * (d == 0) + v * (r**d + r ** (b - d)) / (1 + r**b)


def exact_weights(k, count, seed):
    """(losses, weights) of samples under P, tilted along the bins, so that their tail is seen."""
    rng = np.random.default_rng(seed)
    scales = np.array([0.5, 1.0, 1.5, 2.0])
    b = len(k)
    root = np.linalg.cholesky(k + 1e-12 * np.eye(b))
    s = scales[np.arange(count) % 4]
    x = rng.standard_normal((count, b)) @ root.T + s[:, None] * k[rng.integers(b, size=count)]
    half = np.diag(k) / 2
    ratio = np.exp(x - half).mean(1)
    drawn = np.mean([np.exp(t * x - t * t * half).mean(1) for t in scales], axis=0)
    return ratio, 1 / drawn


@pytest.mark.parametrize(("b", "v", "r", "nu", "constant"), [(12, 0.4, 0.7, 0.05, 0.0), (8, 1.5, 0.5, 0.2, 0.3)])
def test_a_chain_is_followed_closely_and_from_above(b, v, r, nu, constant):
    gram = chain_matrix(b, v, r, nu, constant)
    ratio, weight = exact_weights(gram, 40_000, 3)
    for epsilon in (0.0, 0.5, 1.0):
        each = np.maximum(ratio - math.exp(epsilon), 0) * weight
        low, error = each.mean(), each.std() / 200
        found = bins_delta(gram, 1.0, epsilon)
        assert low - 4 * error <= found <= 1.3 * (low + 4 * error), epsilon


@pytest.mark.parametrize("chain", [Chain(1, 0.0, 0.1, 2.0, 0.5), Chain(2, 0.0, 0.1, 1.5, 0.9)])
def test_spreads_are_paid_for_in_both_directions(chain):
    """What a spread adds to the mean of L would lower E (1 - t L)_+ below the truth, but for `deflate`."""
    k, law = chain_matrix(chain.b, chain.v, chain.r, chain.nu), chain_law(chain)
    for epsilon in (-1.5, -0.5, 0.0, 0.5, 1.5):
        exact = truth(k, epsilon)
        if chain.b == 1:
            delta = gdp_delta(math.sqrt(k.max()), abs(epsilon))
            exact = (delta if epsilon >= 0 else 1 - math.exp(epsilon) + math.exp(epsilon) * delta,) * 2
        t = math.exp(epsilon)
        over = law.masses @ np.maximum(law.values - t, 0) + law.beyond
        under = law.masses @ np.maximum(1 - t * law.values / law.deflate, 0) + law.below
        assert exact[0] <= over <= 1.25 * exact[0], epsilon
        assert exact[1] <= under <= 1.2 * exact[1], epsilon


def test_what_lies_beyond_the_first_state_is_that_of_both_laws():
    """Of one bin without a factor: E e^(s - v/2) [s > last] and P(s < first)."""
    chain = Chain(1, 0.0, 0.0, 0.7, 0.5)
    _, first = bins_chain._states(chain)
    law = chain_law(chain)
    left = ndtr((0.7 - first[-1]) / math.sqrt(0.7))
    assert left <= law.beyond <= 1.3 * left  # and a little beyond the largest sum
    assert law.below == pytest.approx(ndtr(first[0] / math.sqrt(0.7)), rel=1e-9)
    assert first[-1] > 0.7 + 6 * math.sqrt(0.7)


def test_what_leaves_small_grids_adds_up_over_all_steps(monkeypatch):
    monkeypatch.setattr(bins_chain, "_FAR", 1.5)
    chain = Chain(6, 0.0, 0.0, 0.5, 0.5)
    law, (states, first) = chain_law(chain), bins_chain._states(chain)
    assert law.masses @ law.values + law.beyond >= 1
    deviation = math.sqrt(0.5)
    once = ndtr((0.5 - states[-1]) / deviation), ndtr(states[0] / deviation)
    assert 3 * once[0] < law.beyond
    assert 3 * once[1] < law.below
    assert (first[0], first[-1]) == (states[0], states[-1])


def test_a_step_of_the_bridge_counts_what_leaves_its_states():
    chain = Chain(6, 0.0, 0.0, 0.9, 0.8)
    states, first = bins_chain._states(chain)
    sums = bins_chain._partial_sums(chain)
    few = states[np.abs(states) < 1.2]  # so that much leaves
    start = first[np.abs(first) < 1.2]
    held = np.zeros((len(few), len(sums), len(start)))
    held[len(few) // 2, 40, len(start) // 2] = 1.0
    j, left = 2, 4
    at, zero = few[len(few) // 2], start[len(start) // 2]
    moved, over, under = bins_chain._step(chain, j, few, start, sums, held)
    K = chain_matrix(6, 0.9, 0.8, 0.0)  # s_j given its neighbour and s_0
    given = np.linalg.solve(K[np.ix_([1, 0], [1, 0])], K[[1, 0], 2])
    mean, var = given @ [at, zero], K[2, 2] - given @ K[[1, 0], 2]
    deviation = math.sqrt(var)
    assert under == pytest.approx(ndtr((few[0] - mean) / deviation), rel=1e-6)
    above = ndtr((mean - few[-1]) / deviation)
    weight = math.exp(mean + var / 2) * ndtr((mean + var - few[-1]) / deviation)
    assert over == pytest.approx((sums[40] * above + left * weight) / 6, rel=1e-6)
    assert moved.sum() == pytest.approx(1.0, abs=1e-9)
    assert moved.sum((1, 2)) @ few == pytest.approx(mean, abs=0.2)


def test_what_leaves_the_grid_is_counted_and_means_stay():
    law = chain_law(Chain(10, 0.0, 0.3, 0.6, 0.8))
    assert law.masses.sum() == pytest.approx(1.0, abs=1e-11)
    assert 1.0 <= law.masses @ law.values + law.beyond <= law.deflate
    assert 0 < law.beyond < 1e-6
    assert 0 < law.below < 1e-6
    plain = chain_law(Chain(10, 0.0, 0.3, 0.0, 0.5))
    assert plain.masses @ plain.values + plain.beyond == pytest.approx(1.0, abs=1e-9)


def test_chains_dominate_in_entries_and_as_forms():
    rng = np.random.default_rng(0)
    kernel = chain_matrix(16, 0.5, 0.8, 0.1) * rng.uniform(0.8, 1.0, size=16)[:, None]
    k = np.minimum(kernel, kernel.T)
    k[k < 0.05] = 0.0
    for chain in dominating_chains(k):
        above = chain_matrix(16, chain.v, chain.r, chain.nu, chain.constant)
        # dual of "above = k + entries + form": no non-negative form tells them apart
        for _ in range(200):
            y = rng.standard_normal((16, 3))
            form = y @ y.T
            if form.min() >= 0:
                assert (form * (above - k)).sum() >= 0
        assert above.sum() >= k.sum()
        assert np.trace(above) >= np.trace(k)


def test_a_raised_chain_dominates_as_a_sum_of_entries_and_a_form():
    """That is, no matrix that is both non-negative and semidefinite finds k above it; found by projections."""
    rng = np.random.default_rng(3)
    scales = rng.uniform(0.5, 1.0, size=10)
    k = chain_matrix(10, 0.6, 0.8, 0.1) * np.outer(scales, scales)
    low = bins_fit._raised(Chain(10, 0.02, 0.0, 0.25, 0.7), k)
    rest = chain_matrix(10, low.v, low.r, low.nu, low.constant) - k
    entries = np.zeros_like(rest)
    for _ in range(4000):
        values, vectors = np.linalg.eigh(rest - entries)
        entries = np.maximum(rest - (vectors * np.maximum(values, 0.0)) @ vectors.T, 0.0)
    assert np.linalg.eigvalsh(rest - entries)[0] > -1e-9
    assert low.nu < 0.9  # and not by far more than it takes


def test_larger_entries_and_less_noise_never_tell_less():
    base = chain_matrix(6, 0.5, 0.6, 0.1)
    deltas = [bins_delta(base * scale, 1.0, 1.0) for scale in (0.25, 0.5, 1.0, 2.0)]
    assert deltas == sorted(deltas)
    assert bins_epsilon(base, 2.0, 1e-5) < bins_epsilon(base, 1.0, 1e-5)
    assert bins_epsilon(base, 1.0, 1e-6) > bins_epsilon(base, 1.0, 1e-5)


def test_epsilon_and_delta_agree():
    base = chain_matrix(6, 0.5, 0.6, 0.1)
    epsilon = bins_epsilon(base, 1.0, 1e-5)
    assert bins_delta(base, 1.0, epsilon) <= 1e-5
    assert bins_delta(base, 1.0, epsilon * 0.999) > 1e-5


@pytest.mark.parametrize("sigma", [1e-3, 0.05, 1e3, 1e7])
def test_any_noise(sigma):
    gram = chain_matrix(6, 0.5, 0.6, 0.1)
    epsilon = bins_epsilon(gram, sigma, 1e-5)
    assert math.isfinite(epsilon)
    assert epsilon >= 0
    assert bins_delta(gram, sigma, 1.0) <= gdp_delta(math.sqrt(gram.max()) / sigma, 1.0) * (1 + 1e-9)


def test_losses_compose():
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    gram = chain_matrix(6, 0.3, 0.6, 0.1, 0.05)
    losses = bins_losses(pld, gram, 1.0, 0.005)
    for epsilon in (0.0, 0.5, 1.0, 2.0):
        one = bins_delta(gram, 1.0, epsilon)
        assert one * (1 - 1e-9) <= losses.get_delta_for_epsilon(epsilon) <= one * 1.01 + 1e-9
    # two of them are below the two Gaussians whose bins are known, and above one of them
    two = losses.self_compose(2).get_delta_for_epsilon(1.0)
    assert bins_delta(gram, 1.0, 1.0) < two < gdp_delta(math.sqrt(2 * gram.max()), 1.0)


def test_what_is_no_gram_matrix_is_refused():
    for wrong in (np.ones((2, 3)), -np.eye(2), np.array([[1.0, 0.2], [0.1, 1.0]]), np.full((2, 2), np.nan)):
        with pytest.raises(ArgumentError, match="gram must"):
            bins_delta(wrong, 1.0, 1.0)
    with pytest.raises(ArgumentError, match="sigma"):
        bins_epsilon(np.eye(2), 0.0, 1e-5)
