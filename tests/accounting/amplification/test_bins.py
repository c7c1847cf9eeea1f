"""Bounds for balls in bins, against quadrature, and the laws that they must keep."""

import math
from itertools import permutations

import numpy as np
import pytest
from scipy.linalg import block_diag
from scipy.special import ndtr

from accounting.amplification.oracle import mixture_deltas
from anyorder.accounting.amplification import bins
from anyorder.accounting.amplification import bins as bins_chain
from anyorder.accounting.amplification import bins as bins_fit
from anyorder.accounting.amplification import exact as lognormals
from anyorder.accounting.amplification.bins import (
    Chain,
    _bridge,
    _spread_normal,
    _spread_weights,
    bins_delta,
    bins_epsilon,
    bins_losses,
    chain_law,
    dominating_chains,
    nested_above,
    nested_law,
)
from anyorder.accounting.amplification.exact import epochs_delta
from anyorder.accounting.amplification.mixture import bins_gram
from anyorder.accounting.gaussian import gdp_delta
from anyorder.errors import ArgumentError
from anyorder.participation import BallsInBins
from anyorder.strategy import ToeplitzBanded

POINTS = {1: 8001, 2: 801, 3: 81}


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
        m = rng.uniform(size=(b, 4)) * rng.uniform(0.05, 1.0, size=(b, 1))
        yield m @ m.T


@pytest.mark.parametrize("gram", list(matrices()), ids=lambda g: f"{len(g)}")
@pytest.mark.parametrize("sigma", [0.5, 1.5])
def test_never_below_quadrature(gram, sigma):
    for epsilon in (-0.5, 0.0, 1.5):
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


def each_its_own(b, constant, nu, v, r):
    """A chain whose bins share no state."""
    return Chain(b, constant, nu, v, r, b)


def chain_matrix(b, v, r, nu, constant=0.0):
    d = np.abs(np.subtract.outer(np.arange(b), np.arange(b)))
    return constant + nu * (d == 0) + v * (r**d + r ** (b - d)) / (1 + r**b)


def block_matrix(chain):
    """K' of blocks, written out."""
    block = [max(m for m in range(chain.blocks) if m * chain.b // chain.blocks <= i) for i in range(chain.b)]
    states = chain_matrix(chain.blocks, chain.v, chain.r, chain.within, chain.constant)
    return states[np.ix_(block, block)] + chain.nu * np.eye(chain.b)


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


def test_a_chain_is_followed_closely_and_from_above():
    gram = chain_matrix(8, 1.5, 0.5, 0.2, 0.3)
    ratio, weight = exact_weights(gram, 40_000, 3)
    for epsilon in (0.0, 1.0):
        each = np.maximum(ratio - math.exp(epsilon), 0) * weight
        low, error = each.mean(), each.std() / 200
        found = bins_delta(gram, 1.0, epsilon)
        assert low - 4 * error <= found <= 1.3 * (low + 4 * error), epsilon


@pytest.mark.parametrize("chain", [each_its_own(1, 0.0, 0.1, 2.0, 0.5), each_its_own(2, 0.0, 0.1, 1.5, 0.9)])
def test_spreads_are_paid_for_in_both_directions(chain):
    """What a spread adds to the mean of L would lower E (1 - t L)_+ below the truth, were it of s and not of e^s."""
    k, law = chain_matrix(chain.b, chain.v, chain.r, chain.nu), chain_law(chain)
    fall = chain_law(chain, falling=True)
    for epsilon in (-1.5, -0.5, 0.0, 0.5, 1.5):
        exact = truth(k, epsilon)
        if chain.b == 1:
            delta = gdp_delta(math.sqrt(k.max()), abs(epsilon))
            exact = (delta if epsilon >= 0 else 1 - math.exp(epsilon) + math.exp(epsilon) * delta,) * 2
        t = math.exp(epsilon)
        over = law.masses @ np.maximum(law.values - t, 0) + law.beyond
        under = fall.masses @ np.maximum(1 - t * fall.values, 0) + fall.beyond
        assert exact[0] <= over <= 1.25 * exact[0], epsilon
        assert exact[1] <= under <= 1.2 * exact[1], epsilon


def test_what_lies_beyond_the_first_state_is_that_of_both_laws():
    """Of one bin without a factor: E e^(s - v/2) [s > last] and P(s < first)."""
    chain = each_its_own(1, 0.0, 0.0, 0.7, 0.5)
    _, first = bins_chain._states(chain)
    law = chain_law(chain)
    left = ndtr((0.7 - first[-1]) / math.sqrt(0.7))
    assert left <= law.beyond <= 1.3 * left  # and a little beyond the largest sum
    assert chain_law(chain, falling=True).beyond == pytest.approx(ndtr(first[0] / math.sqrt(0.7)), rel=1e-9)
    assert first[-1] > 0.7 + 6 * math.sqrt(0.7)


def test_what_leaves_small_grids_adds_up_over_all_steps(monkeypatch):
    monkeypatch.setattr(bins_chain, "_FAR", 1.5)
    chain = each_its_own(6, 0.0, 0.0, 0.5, 0.5)
    law, (states, first) = chain_law(chain), bins_chain._states(chain)
    assert law.masses @ law.values + law.beyond >= 1
    deviation = math.sqrt(0.5)
    once = ndtr((0.5 - states[-1]) / deviation), ndtr(states[0] / deviation)
    assert 3 * once[0] < law.beyond
    assert 3 * once[1] < chain_law(chain, falling=True).beyond
    assert (first[0], first[-1]) == (states[0], states[-1])


def test_a_step_of_the_bridge_counts_what_leaves_its_states():
    chain = each_its_own(6, 0.0, 0.0, 0.9, 0.8)
    states, first = bins_chain._states(chain)
    sums = bins_chain._partial_sums(chain)
    few = states[np.abs(states) < 1.2]  # so that much leaves
    start = first[np.abs(first) < 1.2]
    held = np.zeros((len(start), len(few), len(sums)))
    held[len(start) // 2, len(few) // 2, 40] = 1.0
    j, left = 2, 4
    at, zero = few[len(few) // 2], start[len(start) // 2]
    moved, over = bins_chain._step(chain, j, few, start, sums, held, False)
    _, under = bins_chain._step(chain, j, few, start, sums, held, True)
    K = chain_matrix(6, 0.9, 0.8, 0.0)  # s_j given its neighbour and s_0
    given = np.linalg.solve(K[np.ix_([1, 0], [1, 0])], K[[1, 0], 2])
    mean, var = given @ [at, zero], K[2, 2] - given @ K[[1, 0], 2]
    deviation = math.sqrt(var)
    assert under == pytest.approx(ndtr((few[0] - mean) / deviation), rel=1e-6)
    above = ndtr((mean - few[-1]) / deviation)
    weight = math.exp(mean + var / 2) * ndtr((mean + var - few[-1]) / deviation)
    assert over == pytest.approx((sums[40] * above + left * weight) / 6, rel=1e-6)
    assert moved.sum() == pytest.approx(1.0, abs=1e-9)
    assert moved.sum((0, 2)) @ few == pytest.approx(mean, abs=0.2)


def test_what_leaves_the_grid_is_counted_and_means_stay():
    law = chain_law(each_its_own(10, 0.0, 0.3, 0.6, 0.8))
    assert law.masses.sum() == pytest.approx(1.0, abs=1e-11)
    fall = chain_law(each_its_own(10, 0.0, 0.3, 0.6, 0.8), falling=True)
    assert fall.masses.sum() == pytest.approx(1.0, abs=1e-11)
    assert fall.masses @ fall.values <= 1.0 <= law.masses @ law.values + law.beyond
    assert 0 < law.beyond < 1e-6
    assert 0 < fall.beyond < 1e-6
    plain = chain_law(each_its_own(10, 0.0, 0.3, 0.0, 0.5))
    assert plain.masses @ plain.values + plain.beyond == pytest.approx(1.0, abs=1e-9)


CHAINS = [each_its_own(4, 0.0, nu, v, r) for nu, v, r in ((0.3, 1.5, 0.7), (1e-4, 3.0, 0.9))]


BLOCKS = [Chain(4, 0.0, 0.3, 0.6, 0.7, 2, 0.2), Chain(4, 0.0, 0.2, 1.5, 0.5, 3)]


@pytest.mark.parametrize(
    ("chain", "most"), [*((chain, 1.45) for chain in CHAINS), *((chain, 1.25) for chain in BLOCKS)]
)
def test_a_chain_is_never_below_quadrature_in_either_direction(chain, most):
    k = block_matrix(chain)
    rising, falling = chain_law(chain), chain_law(chain, falling=True)
    for epsilon in (-2.0, 1.0):
        t, true = math.exp(epsilon), mixture_deltas(k, np.full(4, 0.25), 1.0, epsilon, step=0.5)
        over = rising.masses @ np.maximum(rising.values - t, 0) + rising.beyond
        under = falling.masses @ np.maximum(1 - t * falling.values, 0) + falling.beyond
        assert true.remove * (1 - 1e-6) <= over <= true.remove * most + 1e-8
        assert true.add * (1 - 1e-6) <= under <= true.add * 1.25 + 1e-8


def test_bins_of_unlike_blocks_count_as_many_as_they_are():
    chain = Chain(7, 0.0, 0.3, 0.5, 0.6, 3, 0.1)
    assert np.diff([*bins_chain.block_starts(7, 3), 7]).tolist() == [2, 2, 3]
    law = chain_law(chain)
    assert law.masses @ law.values + law.beyond == pytest.approx(1.0, abs=0.01)
    ratio, weight = exact_weights(block_matrix(chain), 40_000, 4)
    for epsilon in (0.5,):
        each = np.maximum(ratio - math.exp(epsilon), 0) * weight
        low, error = each.mean(), each.std() / 200
        found = law.masses @ np.maximum(law.values - math.exp(epsilon), 0) + law.beyond
        assert low - 3 * error <= found <= 1.1 * (low + 3 * error), epsilon


def test_blocks_have_the_variance_that_their_matrix_says():
    """Grids add to it, a quarter as much when they are half as wide."""
    short, none = Chain(18, 0.0, 0.8, 0.05, 0.5, 9), each_its_own(8, 0.0, 0.2, 0.6, 0.9)
    for chain in (Chain(20, 0.0, 0.4, 0.3, 0.8, 5, 0.05), short, none):
        exact = np.exp(block_matrix(chain)).mean() - 1
        for coarse, most in ((2.0, 0.72), (1.0, 0.18)):
            law = chain_law(chain, coarse=coarse)
            assert exact <= law.masses @ law.values**2 - 1 <= (1 + most) * exact, chain
            assert law.masses @ law.values + law.beyond >= 1.0


def test_what_leaves_the_states_of_blocks_counts_all_bins_ahead():
    """Twice as many bins in each block: the share of L that is lost is the same."""
    one, two = (Chain(b, 0.0, 0.0, 0.9, 0.8, 6) for b in (6, 12))
    states, first = bins_chain._states(one)
    few, start, sums = states[abs(states) < 1.2], first[abs(first) < 1.2], bins_chain._partial_sums(one)
    held = np.zeros((len(start), len(few), len(sums)))
    held[len(start) // 2, len(few) // 2, 0] = 1.0
    lost, also = (bins_chain._step(chain, 2, few, start, sums, held, False)[1] for chain in (one, two))
    assert lost == pytest.approx(also)


def test_what_lies_beyond_the_factors_of_a_block_counts_with_its_weight(monkeypatch):
    monkeypatch.setattr(bins_chain, "_NOTHING", 1e-3)  # so that much does
    chain = Chain(6, 0.0, 2.0, 0.0, 0.5, 2)
    values, masses, tail = bins_chain._block_factor(chain, 3, 1.0)
    law = chain_law(chain)
    assert masses @ values + tail == pytest.approx(1.0, rel=1e-6)
    assert tail > 1e-3
    assert law.beyond > 1e-3
    assert law.masses @ law.values + law.beyond >= 1 - 1e-6


def test_large_factors_of_a_block_are_followed_as_far_as_their_mean_lies():
    for nu in (5.0, 20.0, 40.0):
        assert bins_chain._block_factor(Chain(8, 0.0, nu, 0.0, 0.5, 4), 2, 1.0)[2] < 1e-8


def test_unlike_blocks_follow_in_their_order():
    """Of 1, 2, 1 and 2 bins."""
    chain = Chain(6, 0.0, 0.1, 1.0, 0.3, 4, 0.4)
    exact, law = np.exp(block_matrix(chain)).mean() - 1, chain_law(chain, coarse=0.5)
    assert exact <= law.masses @ law.values**2 - 1 <= 1.03 * exact


def test_where_phi_falls_small_sums_are_told_apart():
    """At a large epsilon 1 - t L counts where all states are low: a grid that does not reach there loses much."""
    chain = each_its_own(12, 0.0, 0.37, 2.65, 0.97)  # on coarse grids: fine ones take seconds, and lose as much
    rising, falling = (bins.delta_above(chain, 6.0, falling=way, coarse=2.0) for way in (False, True))
    assert falling < rising / 2
    assert falling < 1.5 * bins.delta_above(chain, 6.0, falling=True, coarse=1.2)


def test_bins_that_are_nearly_equal_take_a_small_grid():
    assert len(bins_chain._partial_sums(each_its_own(100, 1.0, 1e-7, 0.0, 0.5))) < 1500
    assert bins_delta(np.ones((60, 60)), 1.0, 1.0) == pytest.approx(gdp_delta(1.0, 1.0), rel=1e-6)


@pytest.mark.parametrize("chain", CHAINS)
def test_the_bridge_has_the_covariances_of_the_circle(chain):
    b, root = 7, np.zeros((7, 7))
    chain = each_its_own(b, 0.0, 0.0, chain.v, chain.r)
    root[0, 0] = math.sqrt(chain.v)
    for j in range(1, b):
        last, first, deviation = _bridge(chain, j)
        root[j] = last * root[j - 1] + first * root[0]
        root[j, j] = deviation
    assert root @ root.T == pytest.approx(chain_matrix(b, chain.v, chain.r, 0.0), rel=1e-12)


def test_spreads_keep_their_means_and_put_more_everywhere():
    points = np.arange(-20, 25) * 0.4
    means, deviation = np.array([-0.3, 0.77, 2.0]), 0.9
    for spread, scale in ((_spread_normal, lambda s: s), (_spread_weights, np.exp)):
        masses, above, below = spread(means, deviation, points)
        assert masses.sum(0) == pytest.approx(1.0, abs=1e-13)
        exact = means if spread is _spread_normal else np.exp(means + deviation**2 / 2)
        assert scale(points) @ masses == pytest.approx(exact, rel=1e-9)
        assert (above < 1e-9).all()
        assert (below < 1e-9).all()
    # the convex functions that each is for: e^s, and -e^(s/2) in e^s
    assert (np.exp(points) @ _spread_normal(means, deviation, points)[0] >= np.exp(means + deviation**2 / 2)).all()
    root = np.exp(points / 2) @ _spread_weights(means, deviation, points)[0]
    assert (root <= np.exp(means / 2 + deviation**2 / 8)).all()


def test_what_leaves_the_grid_is_counted(monkeypatch):
    chain = each_its_own(4, 0.0, 0.3, 1.5, 0.7)
    monkeypatch.setattr(bins_chain, "_FAR", 1.5)  # so that much does
    k = chain_matrix(4, chain.v, chain.r, chain.nu)
    rising, falling = chain_law(chain), chain_law(chain, falling=True)
    assert rising.masses.sum() == pytest.approx(1.0, abs=1e-11)
    assert rising.beyond > 0.01
    assert falling.beyond > 0.01
    assert rising.masses @ rising.values + rising.beyond >= 1.0
    for epsilon in (0.5, 3.0):
        t, true = math.exp(epsilon), mixture_deltas(k, np.full(4, 0.25), 1.0, epsilon, step=0.5)
        assert rising.masses @ np.maximum(rising.values - t, 0) + rising.beyond >= true.remove
        assert falling.masses @ np.maximum(1 - t * falling.values, 0) + falling.beyond >= true.add


def nested_matrices():
    rng = np.random.default_rng(2)
    yield np.array([[1.0, 0.8, 0.4, 0.4], [0.8, 1.0, 0.4, 0.4], [0.4, 0.4, 0.9, 0.6], [0.4, 0.4, 0.6, 1.1]])
    yield np.diag([1.0, 1.0, 0.5, 1.2])
    m = rng.uniform(size=(4, 6))
    yield m @ m.T


@pytest.mark.parametrize("k", list(nested_matrices()))
def test_nested_matrices_are_above_and_their_laws_too(k):
    nested = nested_above(k)
    above = heights(nested)
    # the leaves come in an order of their own: of all orders, one is above k
    assert any((above >= k[np.ix_(order, order)] - 1e-12).all() for order in permutations(range(4)))
    rising, falling = nested_law(nested), nested_law(nested, falling=True)
    for epsilon in (0.0, 1.5):
        true = mixture_deltas(above, np.full(4, 0.25), 1.0, epsilon, step=0.5)
        over = rising.masses @ bins._call(rising.values, epsilon, nested.constant) + rising.beyond
        under = falling.masses @ bins._put(falling.values, epsilon, nested.constant) + falling.beyond
        assert true.remove * (1 - 1e-6) <= over <= true.remove * 1.01 + 1e-9
        assert true.add * (1 - 1e-6) <= under <= true.add * 1.01 + 1e-9


def heights(nested):
    """The matrix of a nested one, its leaves from left to right."""

    def blocks(node):
        level, below = node
        if not below:
            return np.array([[nested.heights[level]]])
        parts = [blocks(child) for child, count in below for _ in range(count)]
        return np.maximum(block_diag(*parts), nested.heights[level])

    return blocks(nested.root)


def test_a_nested_matrix_is_as_low_as_it_can_be():
    tree = np.array([[1.0, 0.8, 0.4, 0.4], [0.8, 1.0, 0.4, 0.4], [0.4, 0.4, 1.0, 0.8], [0.4, 0.4, 0.8, 1.0]])
    assert heights(nested_above(tree)) == pytest.approx(tree, rel=1e-12)
    line = np.array([[1.0, 0.5, 0.0], [0.5, 1.0, 0.4], [0.0, 0.4, 1.0]])  # 0 and 2 are as near as the path over 1
    assert sorted(heights(nested_above(line))[np.triu_indices(3, 1)]) == pytest.approx([0.4, 0.4, 0.5])
    many = np.random.default_rng(0).uniform(size=(60, 3))
    found = nested_above(many @ many.T)
    assert len(found.heights) <= 50
    assert heights(found).sum() >= (many @ many.T).sum()


def test_independent_bins_are_as_by_convolution_of_lognormals():
    diagonal = np.repeat([0.5, 0.8, 1.0], 4)
    for epsilon in (0.1, 1.0):
        other = epochs_delta(diagonal[None], 0.8, epsilon)
        assert bins_delta(np.diag(diagonal), 0.8, epsilon) == pytest.approx(other, rel=0.02)


def test_what_leaves_the_grid_of_a_nested_law_is_counted(monkeypatch):
    k = next(nested_matrices())
    monkeypatch.setattr(lognormals, "_FAR", 1.5)
    bins._nested_atoms.cache_clear()  # of grids that reach further, and then of those that do not
    law = nested_law(nested_above(k))
    bins._nested_atoms.cache_clear()
    assert law.beyond > 0.01
    for epsilon in (0.5, 2.0):
        true = mixture_deltas(k, np.full(4, 0.25), 1.0, epsilon, step=0.5)
        assert law.masses @ bins._call(law.values, epsilon, 0.4) + law.beyond >= true.remove
        assert law.masses @ bins._put(law.values, epsilon, 0.4) >= true.add


def test_without_against_with_is_bounded_too():
    """A constant part that is most of K, where this direction counts."""
    k = chain_matrix(4, 0.3, 0.6, 0.05, 1.5)
    for epsilon in (0.0, 1.5, 3.0):
        true = mixture_deltas(k, np.full(4, 0.25), 1.0, epsilon, step=0.5)
        rising, falling = bins._curve(*bins.scaled(k, 1.0), np.array([epsilon]))[:, 0]
        assert true.remove <= rising <= true.remove * 1.2
        assert true.add <= falling <= true.add * 1.2


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


@pytest.mark.parametrize(("top", "width"), [(1.8, 6)])
def test_a_price_nearer_to_the_tail_finds_the_smaller_bound(monkeypatch, top, width):
    """Entries that fall off at once: a long chain of little height is dearer by the second moment, and less."""
    apart = np.abs(np.subtract.outer(np.arange(40), np.arange(40)))
    k = top * np.maximum(0.0, 1 - np.minimum(apart, 40 - apart) / width)
    both = bins.bins_epsilon(k, 1.0, 1e-5)
    monkeypatch.setattr(bins_fit, "_PRICES", (1.0,))
    bins._dominating.cache_clear()
    one = bins.bins_epsilon(k, 1.0, 1e-5)
    bins._dominating.cache_clear()
    assert both < 0.95 * one


def test_of_many_bins_some_share_a_state_and_nothing_is_lost_that_counts(monkeypatch):
    """Entries that fall off by and by: a bound with blocks beside that of each bin for itself, and samples."""
    k = chain_matrix(40, 0.3, math.exp(-1 / 8), 0.3, 0.1)
    monkeypatch.setattr(bins_fit, "_BLOCKS", 20)
    blocks = dominating_chains(k)
    assert {chain.blocks for chain in blocks} == {20}
    monkeypatch.setattr(bins_fit, "_BLOCKS", 40)
    plain = dominating_chains(k)
    assert {chain.blocks for chain in plain} == {40}
    of_blocks, of_bins = (
        min(bins.delta_above(chain, 1.0, falling=False) for chain in chains) for chains in (blocks, plain)
    )
    assert of_blocks < 1.15 * of_bins


def test_blocks_are_no_longer_than_what_is_alike():
    """Where the entries fall off within few bins, each has a state of its own."""
    for v, length, each in ((0.2, 20, 2), (2.0, 20, 1)):
        k = chain_matrix(96, v, math.exp(-1 / length), 0.1, 0.1)
        assert {round(96 / chain.blocks) for chain in dominating_chains(k)} == {each}, (v, length)


def above_zero(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.maximum(values, 0.0)) @ vectors.T


def is_sum_of_entries_and_form(rest):
    """By reflections on one set after the other, halved, which come to a point of both where there is one."""
    at = np.zeros_like(rest)
    for _ in range(4000):
        form = above_zero(at)
        other = np.minimum(2 * form - at, rest)  # rest less something of no negative entry
        at += other - form
    return np.minimum(rest - above_zero(at), 0.0).min() > -1e-7


@pytest.mark.parametrize("b", [12, 13])
def test_what_is_tried_of_blocks_dominates(b, monkeypatch):
    monkeypatch.setattr(bins_fit, "_BLOCKS", 6)
    scales = np.random.default_rng(3).uniform(0.3, 1, size=b)
    k = chain_matrix(b, 0.3, 0.97, 0.1) * np.outer(scales, scales)
    found = dominating_chains(k)
    assert found
    for chain in found:
        assert chain.blocks < b
        assert is_sum_of_entries_and_form(block_matrix(chain) - k)


@pytest.mark.parametrize("fitted", [each_its_own(10, 0.02, 0.0, 0.25, 0.7), Chain(10, 0.02, 0.1, 0.25, 0.5, 4, 0.05)])
def test_a_raised_chain_dominates_as_a_sum_of_entries_and_a_form(fitted):
    """That is, no matrix that is both non-negative and semidefinite finds k above it; found by projections."""
    rng = np.random.default_rng(3)
    scales = rng.uniform(0.5, 1.0, size=10)
    k = chain_matrix(10, 0.6, 0.8, 0.1) * np.outer(scales, scales)
    low = bins_fit._raised(fitted, k)
    assert is_sum_of_entries_and_form(block_matrix(low) - k)
    assert low.nu < 0.9  # and not by far more than it takes


def test_larger_entries_and_less_noise_never_tell_less_and_epsilon_is_that_of_delta():
    base = chain_matrix(4, 0.5, 0.6, 0.1)
    deltas = [bins_delta(base * scale, 1.0, 1.0) for scale in (0.25, 1.0, 2.0)]
    assert deltas == sorted(deltas)
    epsilon = bins_epsilon(base, 1.0, 1e-5)
    assert bins_delta(base, 1.0, epsilon) <= 1e-5
    assert bins_delta(base, 1.0, epsilon * 0.999) > 1e-5
    assert bins_epsilon(base, 2.0, 1e-5) < epsilon < bins_epsilon(base, 1.0, 1e-6)


@pytest.mark.parametrize("sigma", [1e-3, 1e7])
def test_any_noise(sigma):
    gram = chain_matrix(6, 0.5, 0.6, 0.1)
    epsilon = bins_epsilon(gram, sigma, 1e-5)
    assert math.isfinite(epsilon)
    assert epsilon >= 0
    assert bins_delta(gram, sigma, 1.0) <= gdp_delta(math.sqrt(gram.max()) / sigma, 1.0) * (1 + 1e-9)


def test_losses_compose():
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    gram = chain_matrix(4, 0.3, 0.6, 0.1, 0.05)
    losses = bins_losses(pld, gram, 1.0, 0.005)
    for epsilon in (0.0, 1.0):
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
    with pytest.raises(ArgumentError, match="sigma must be at least 1e-100 of the largest"):
        bins_delta(np.eye(2), 1e-160, 1.0)


def test_noise_so_large_that_k_is_no_number_above_0_is_not_perfect():
    assert bins_delta(np.eye(2), 1e170, 0.0) > 1e-171


def test_what_is_left_out_of_a_claim_does_not_count():
    k = bins_gram(ToeplitzBanded([1.0, 0.6, 0.36], 8), BallsInBins(2, 4)) / 2.25

    def all_of_it(epsilon):
        both = (
            min(bins.delta_above(one, epsilon, falling=falling) for one in bins.dominating(k, math.sqrt(k.max())))
            for falling in (False, True)
        )
        return min(max(both), gdp_delta(math.sqrt(k.max()), epsilon))

    assert bins_epsilon(k, 1.0, 1e-4) == pytest.approx(bins.least_epsilon(all_of_it, 1e-4, 20.0), rel=2e-9)


def test_coarse_grids_are_bounds_that_cost_more_epsilon():
    for one in (each_its_own(4, 0.1, 0.2, 0.6, 0.7), nested_above(np.eye(6) * 0.5 + 0.2)):
        for epsilon in (0.5, 2.0):
            for falling in (False, True):
                fine, coarse = (bins.delta_above(one, epsilon, falling=falling, coarse=c) for c in (1.0, bins.COARSE))
                assert fine <= coarse < 2 * fine
