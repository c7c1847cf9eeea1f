"""Known loss distributions of secret orders: never below brute force, and within a thousandth of it."""

import math

import numpy as np
import pytest
from scipy.special import erf

from accounting.amplification import oracle
from anyorder.accounting import gdp_delta, gdp_epsilon
from anyorder.accounting.amplification import exact as lognormals
from anyorder.accounting.amplification.exact import (
    cyclic_parts,
    diagonal_losses,
    epochs_delta,
    epochs_epsilon,
    mean_of_lognormals,
    pld_delta,
    pld_epsilon,
)
from anyorder.accounting.poisson import poisson_epsilon
from anyorder.errors import ArgumentError, PlanError
from anyorder.participation import BallsInBins, CyclicPoisson, RandomAllocation, TruncatedPoisson
from anyorder.strategy import Independent, ToeplitzBanded

EPSILONS = (0.0, 1.0)


@pytest.mark.parametrize("g", [0.01, 0.25, 4.0, 100.0])
def test_one_term_is_a_gaussian(g):
    ratio = mean_of_lognormals(np.array([g]))
    for epsilon in (0.0, 0.5 * math.sqrt(g), g / 2, 2 * g):
        exact = gdp_delta(math.sqrt(g), epsilon)
        for found in (ratio.remove(epsilon), ratio.add(epsilon)):
            assert exact <= found <= exact * (1 + 1e-3) + 1e-19


def close_above(found, exact, share=1e-3):
    """Within a thousandth: of delta, where it is one that is asked for, else in absolute terms."""
    return exact * (1 - 1e-7) <= found <= exact + share * max(exact, 1e-3)


@pytest.mark.parametrize(
    "diagonal",
    [(1.0, 1.0), (0.0, 2.0), (0.25, 1.0, 4.0)],
)
def test_brute_force_for_few_bins(diagonal):
    b = len(diagonal)
    for sigma, epsilon in ((0.8, 2.0), (2.0, 1.0)):
        ratio = mean_of_lognormals(np.array(diagonal) / sigma**2)
        exact = oracle.mixture_deltas(np.diag(diagonal), np.full(b, 1 / b), sigma, epsilon, step=0.25)
        assert close_above(ratio.remove(epsilon), exact.remove)
        assert close_above(ratio.add(epsilon), exact.add)
        found = epochs_delta([diagonal], sigma, epsilon)
        assert close_above(found, exact.worst)
        if 1e-9 < found < 0.9:
            assert epochs_epsilon([diagonal], sigma, found) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize(("k", "b"), [(2, 2), (2, 4), (4, 2)])
def test_brute_force_for_allocation(k, b):
    rule, independent = RandomAllocation(k, b), Independent(k * b)
    for epsilon in (0.5, 1.0):
        exact = oracle.scheme_deltas(np.eye(k * b), rule, 1.3, epsilon, step=0.5).worst
        rough = 3e-3 if k * b > 4 else 0.0  # of the points at random
        assert exact * (1 - rough) <= pld_delta(independent, rule, 1.3, epsilon) <= exact * (1 + 2e-3 + rough)


def test_balls_in_bins_with_independent_noise():
    for epsilon in EPSILONS:
        exact = oracle.scheme_deltas(np.eye(8), BallsInBins(2, 4), 1.1, epsilon, step=0.5).worst
        assert close_above(pld_delta(Independent(8), BallsInBins(2, 4), 1.1, epsilon), exact)


def test_the_mean_stays_and_only_spreads():
    for b, g in ((7, 0.5), (1000, 4.0)):
        ratio = mean_of_lognormals(np.full(b, g), points=500)
        assert float(ratio.masses.sum()) == pytest.approx(1, abs=1e-11)
        assert float((ratio.masses * ratio.points).sum()) + ratio.lost == pytest.approx(1, abs=1e-11)
        variance = float((ratio.masses * (ratio.points - 1) ** 2).sum())
        assert math.expm1(g) / b * (1 - 1e-9) <= variance <= math.expm1(g) / b * 1.05


def test_more_points_come_down_and_two_grids_agree():
    rough, fine = (mean_of_lognormals(np.full(100, 1.0), points=m) for m in (500, 1500))
    for epsilon in (0.0, 0.1, 0.3, 0.6):
        assert fine.remove(epsilon) < rough.remove(epsilon) < fine.remove(epsilon) * 1.1
        assert fine.add(epsilon) < rough.add(epsilon) < fine.add(epsilon) * 1.3


def test_many_unlike_variances_are_rounded_up():
    variances = np.linspace(0.9, 1.0, 30)
    found = mean_of_lognormals(variances, points=400)
    below, above = (mean_of_lognormals(np.full(30, g), points=400) for g in (0.9, 1.0))
    for epsilon in (0.2, 0.5, 1.0):
        assert below.remove(epsilon) < found.remove(epsilon) < above.remove(epsilon) * 1.01
    kinds, counts = lognormals._distinct_variances(variances)
    assert counts.sum() == 30
    assert (np.sort(np.repeat(kinds, counts)) >= variances).all()


def test_samples_of_a_thousand_bins():
    rng = np.random.default_rng(11)
    b, count = 1000, 6_000
    ratio = np.array([np.exp(rng.standard_normal((100, b)) * 2 - 2).mean(axis=1) for _ in range(count // 100)]).ravel()
    found = mean_of_lognormals(np.full(b, 4.0), points=1000)
    for level in (1.0, 1.2):
        put, value = np.maximum(1 - level * ratio, 0), found.add(math.log(level))
        assert abs(put.mean() - value) < 5 * put.std() / math.sqrt(count) + 0.01 * value


@pytest.mark.parametrize(("k", "b", "sigma"), [(10, 100, 0.7), (100, 10, 4.0)])
def test_allocation_is_below_poisson_sampling(k, b, sigma):
    # fewer ways to come twice: seen for C = I, and no theorem at every epsilon
    found = epochs_epsilon(np.ones((k, b)), sigma, 1e-5)
    assert 0.8 * (sampled := poisson_epsilon(sigma, 1 / b, k * b, 1e-5)) < found < sampled
    assert epochs_delta(np.ones((k, b)), sigma, found) == pytest.approx(1e-5, rel=1e-3)


def test_one_epoch_composed_is_the_ratio_itself():
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    ratio = mean_of_lognormals(np.full(20, 1.0))
    losses = diagonal_losses(pld, np.ones(20), 1.0, 1e-3)
    for epsilon in (0.1, 1.0, 3.0):
        exact = max(ratio.remove(epsilon), ratio.add(epsilon))
        assert exact * (1 - 1e-9) <= losses.get_delta_for_epsilon(epsilon) <= exact * (1 + 1e-3) + 1e-15


def test_what_secrecy_cannot_help_is_the_bound_for_known_batches():
    assert epochs_epsilon(np.ones((2, 3)), 0.05, 1e-5) == pytest.approx(
        gdp_epsilon(math.sqrt(2) / 0.05, 1e-5), rel=1e-9
    )
    with pytest.raises(ArgumentError, match="known batches"):
        diagonal_losses(None, np.ones(3), 0.05, 1e-3)


def test_epsilon_falls_in_sigma_and_rises_as_delta_falls():
    found = [pld_epsilon(Independent(40), RandomAllocation(4, 10), s, 1e-5) for s in (0.8, 2.0)]
    assert found == sorted(found, reverse=True)
    rising = [epochs_epsilon(np.ones((1, 10)), 1.0, d) for d in (1e-2, 1e-6, 1e-12)]
    assert rising == sorted(rising)
    assert rising[-1] < gdp_epsilon(1.0, 1e-12)


def test_half_the_noise_is_seen():
    for rule in (RandomAllocation(3, 8), TruncatedPoisson(24, 0.125, 8, 40)):
        assert pld_epsilon(Independent(24), rule, 1.5, 1e-5) > 1.8 * pld_epsilon(Independent(24), rule, 3.0, 1e-5)


def test_cyclic_parts_take_the_largest_column():
    strategy = ToeplitzBanded([2.0, 1.0, 0.5], n=20)
    each, q, steps = cyclic_parts(strategy, CyclicPoisson(20, 3, 0.25), 1.5)
    assert (q, steps) == (0.25, 7)
    assert each == pytest.approx(1.5 / math.sqrt(5.25), rel=1e-12)
    assert each < 1.5 / math.sqrt(5.25)
    with pytest.raises(PlanError, match="overlap"):
        cyclic_parts(strategy, CyclicPoisson(20, 2, 0.25), 1.5)


@pytest.mark.parametrize("seed", range(2))
def test_brute_force_for_cyclic_poisson(seed):
    rng = np.random.default_rng(seed)
    strategy, rule = ToeplitzBanded([1.0, rng.uniform(0.2, 0.9)], n=6), CyclicPoisson(6, 2, 0.3)
    each, q, steps = cyclic_parts(strategy, rule, 1.0)
    exact = oracle.scheme_deltas(strategy.matrix(), rule, 1.0, 0.8, step=0.25)
    gaussian = oracle.scheme_deltas(np.eye(steps), CyclicPoisson(steps, 1, q), each, 0.8, step=0.25)
    assert exact.worst <= gaussian.worst * (1 + 1e-7)
    assert exact.worst == pytest.approx(gaussian.worst, rel=1e-6)  # its first group meets full columns alone


TRUNCATED = [(4, 1, 0.5), (5, 3, 0.6), (3, 2, 0.9)]


@pytest.mark.parametrize(("size", "most", "q"), TRUNCATED)
def test_truncation_is_never_below_what_others_may_do(size, most, q):
    rule = TruncatedPoisson(1, q, most, size)
    for epsilon in (0.2, 1.0):
        found = pld_delta(Independent(1), rule, 1.2, epsilon)
        for others in ([-1.0] * (size - 1), [1.0] * (size - 1), np.linspace(-1, 1, size - 1)):
            worst = oracle.truncated_deltas(rule, 1.0, list(others), 1.2, epsilon, points=2001).worst
            assert worst <= found * (1 + 1e-6) + 1e-9


def test_truncation_without_its_cost_would_be_below():
    # the plain sampled Gaussian, as if nobody were pushed out, is not enough: so much of the delta is the cut
    rule = TruncatedPoisson(1, 0.9, 1, 3)
    plain = TruncatedPoisson(1, 0.9 / 2.7, 3, 3)  # as likely to be in a batch, and nobody cut
    worst = oracle.truncated_deltas(rule, 1.0, [-1.0, -1.0], 1.2, 0.5, points=4001).worst
    assert worst > pld_delta(Independent(1), plain, 1.2, 0.5) * 1.01
    assert worst <= pld_delta(Independent(1), rule, 1.2, 0.5)


def test_batches_that_are_never_cut_are_poisson_sampling():
    rule = TruncatedPoisson(50, 0.05, 100, 100)
    found = pld_epsilon(Independent(50), rule, 1.0, 1e-5)
    assert found == pytest.approx(poisson_epsilon(1.0, 0.05, 50, 1e-5), rel=1e-6)


def test_groups_of_two_sizes():
    # 7 units in 2 groups: 4 and 3; neither is always the worse, and the larger delta of both is what is claimed
    found = pld_delta(Independent(2), TruncatedPoisson(2, 0.5, 2, 7, cycle=2), 2.0, 0.5)
    each = [pld_delta(Independent(1), TruncatedPoisson(1, 0.5, 2, size), 2.0, 0.5) for size in (3, 4)]
    assert found == pytest.approx(max(each), rel=1e-9)
    assert each[0] != each[1]


def test_zero_out_with_known_coins_is_never_exceeded():
    rule = TruncatedPoisson(10, 1.0, 2, 20)
    assert pld_epsilon(Independent(10), rule, 1.0, 1e-5) <= gdp_epsilon(math.sqrt(10), 1e-5) * (1 + 1e-9)


def test_overlapping_columns_are_refused():
    with pytest.raises(PlanError, match="do not overlap"):
        pld_epsilon(ToeplitzBanded([1.0, 0.5], n=6), BallsInBins(2, 3), 1.0, 1e-5)


def test_an_erf_of_its_own():
    assert mean_of_lognormals(np.array([1.0])).remove(0.0) == pytest.approx(erf(0.5 / math.sqrt(2)), rel=1e-9)
