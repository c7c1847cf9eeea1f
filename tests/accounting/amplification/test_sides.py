"""On which side known loss distributions round: what grids, sums and transforms lose counts against the claim."""

import math
from fractions import Fraction

import numpy as np
import pytest

from anyorder.accounting import gdp_delta, gdp_epsilon
from anyorder.accounting.amplification import exact
from anyorder.accounting.amplification.exact import (
    LARGEST,
    Ratio,
    cyclic_parts,
    diagonal_losses,
    epochs_delta,
    epochs_epsilon,
)
from anyorder.errors import ArgumentError, PlanError
from anyorder.participation import BallsInBins, CyclicPoisson, RandomAllocation, TruncatedPoisson
from anyorder.strategy import Independent, ToeplitzBanded

# E L = 0.9, so that a tenth is lost above all points.
HAND = Ratio(np.array([0.0, 0.5, 1.0, 2.0]), np.array([0.25, 0.3, 0.25, 0.25]), 0.1, 0.05)


def true_remove(epsilon):
    return sum(p * max(x - math.exp(epsilon), 0) for x, p in zip(HAND.points, HAND.masses, strict=True))


def true_add(epsilon):
    return sum(p * max(1 - x * math.exp(epsilon), 0) for x, p in zip(HAND.points, HAND.masses, strict=True))


@pytest.mark.parametrize("epsilon", [0.0, 0.3, math.log(2), 5.0, 1000.0])
def test_what_is_lost_and_what_is_rounded_is_added(epsilon):
    assert HAND.remove(epsilon) == pytest.approx(true_remove(min(epsilon, 700)) * 1.05 + 0.1, rel=1e-12)
    assert HAND.add(epsilon) == pytest.approx(true_add(min(epsilon, 700)) * 1.05, rel=1e-12)
    assert HAND.remove(0.0) <= 1
    assert Ratio(np.array([0.0, 1.0]), np.array([0.99, 0.5]), 0.9, 0.5).remove(0.0) <= 1
    assert Ratio(np.array([0.0, 1.0]), np.array([0.99, 0.5]), 0.9, 0.5).add(0.0) == 1


@pytest.mark.parametrize("h", [1e-3, 0.05, 0.4])
def test_a_loss_distribution_is_a_spread_with_all_that_was_lost(h):
    """Each direction by itself, and at no point of the grid below; the grid itself costs at most its cells."""
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    found = HAND.losses(pld, h)
    for epsilon in (0.0, 0.1, 0.3, 0.65, 0.8, 3.0):
        remove, add = (part.get_delta_for_epsilon(epsilon) for part in (found._pmf_remove, found._pmf_add))
        for mine, true in ((remove, HAND.remove(epsilon)), (add, HAND.add(epsilon))):
            assert true * (1 - 1e-9) <= mine <= true + 1.2 * h
    twice = found.self_compose(2)  # of two, at least what one of them may lose
    assert twice._pmf_remove.get_delta_for_epsilon(3.0) >= 1 - 0.9**2 - 1e-9
    assert twice._pmf_add.get_delta_for_epsilon(3.0) >= 1 - (1 - 0.25 * 1.05) ** 2 - 1e-9
    # rounded up to its grid: never optimistic
    assert found._pmf_remove._pessimistic_estimate
    assert found._pmf_add._pessimistic_estimate


def test_the_deviation_of_a_sampled_gaussian_is_rounded_down():
    for bands in ([1.0], [1.0, 0.3], [2.0, 1.0, 0.7]):
        strategy = ToeplitzBanded(bands, n=9)
        largest = Fraction(float(strategy.column_norms_squared().max()))
        for sigma in np.random.default_rng(2).uniform(0.3, 30, 60).tolist():
            each, _, steps = cyclic_parts(strategy, CyclicPoisson(9, 4, 0.5), sigma)
            assert Fraction(each) ** 2 * largest < Fraction(sigma) ** 2
            assert each == pytest.approx(sigma / math.sqrt(largest), rel=1e-14)
            assert steps == 3


def test_an_inverted_curve_ends_where_it_holds():
    for delta in (0.9, 0.5, 1e-3, 1e-12):
        found = exact._inverted(lambda epsilon: math.exp(-epsilon), delta, 40.0)
        assert math.exp(-found) <= delta
        assert found == pytest.approx(-math.log(delta), rel=3e-9)
    assert exact._inverted(lambda epsilon: 0.3, 0.3, 5.0) == 0.0
    assert 0 < exact._inverted(lambda epsilon: 0.5 - epsilon / 10, 0.3, 5.0) <= 2.00000001


@pytest.mark.parametrize("epochs", [3, 100])
def test_transforms_may_be_off_and_that_is_added(epochs):
    """Below some 1e-14 a transform tells nothing: known batches do; just above, what it may be off by counts."""
    ones, lost = np.ones((epochs, 10)), (epochs + 16) * 2.0**-53
    known = math.sqrt(epochs)
    for delta in (1e-300, lost, 2 * lost):
        assert epochs_epsilon(ones, 1.0, delta) == pytest.approx(gdp_epsilon(known, delta), rel=1e-12)
    found = epochs_epsilon(ones, 1.0, 3 * lost)
    assert found < gdp_epsilon(known, 3 * lost)
    assert 2.7 * lost < epochs_delta(ones, 1.0, found) < 3.1 * lost
    far = gdp_epsilon(known, 1e-9)
    assert lost * (1 - 1e-6) <= epochs_delta(ones, 1.0, far) <= gdp_delta(known, far)


def test_epochs_of_unlike_bins():
    both = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    sigma = 0.8
    found = epochs_epsilon(both, sigma, 1e-5)
    assert found == pytest.approx(epochs_epsilon(both[::-1], sigma, 1e-5), rel=1e-6)
    assert epochs_epsilon([both[0]] * 2, sigma, 1e-5) * 1.05 < found
    assert found < epochs_epsilon([both[1]] * 2, sigma, 1e-5) / 1.05
    assert epochs_epsilon([both[1]], sigma, 1e-5) < found
    assert epochs_delta(both, sigma, found) == pytest.approx(1e-5, rel=1e-3)
    # with next to no noise the worst bin of each epoch is known
    mu = math.sqrt(2.0 + 3.0) / 0.05
    assert epochs_epsilon([[1.0, 2.0], [3.0, 1.0]], 0.05, 1e-5) == pytest.approx(gdp_epsilon(mu, 1e-5), rel=1e-12)


def test_both_directions_count_and_the_larger_is_taken():
    ratio = exact.ratio_of((0.5, 0.5, 4.0))
    for epsilon in (0.1, 0.5, 2.0):
        sides = ratio.remove(epsilon), ratio.add(epsilon)
        assert epochs_delta([[0.5, 0.5, 4.0]], 1.0, epsilon) == pytest.approx(max(sides), rel=1e-12)
        assert sides[0] != pytest.approx(sides[1], rel=1e-3)
        assert epochs_epsilon([[0.5, 0.5, 4.0]], 1.0, max(sides)) == pytest.approx(epsilon, rel=1e-6)


def test_coins_that_always_fall_so_and_nobody_is_cut():
    rule = TruncatedPoisson(10, 1.0, 20, 20)
    exact_epsilon = gdp_epsilon(math.sqrt(10) / 2, 1e-5)
    assert exact.pld_epsilon(Independent(10), rule, 2.0, 1e-5) == pytest.approx(exact_epsilon, rel=1e-3)
    exact_delta = gdp_delta(math.sqrt(10) / 2, 3.0)
    assert exact_delta * (1 - 1e-9) <= exact.pld_delta(Independent(10), rule, 2.0, 3.0) <= exact_delta * (1 + 1e-6)


def test_truncated_batches_below_what_transforms_tell():
    rule, lost = TruncatedPoisson(10, 0.1, 4, 20), 36 * 2.0**-53
    known = math.sqrt(10)
    for delta in (1e-300, lost, 2 * lost):
        assert exact.pld_epsilon(Independent(10), rule, 1.0, delta) == pytest.approx(
            gdp_epsilon(known, delta), rel=1e-9
        )
    found = exact.pld_epsilon(Independent(10), rule, 1.0, 3 * lost)
    assert 2.5 * lost < exact.pld_delta(Independent(10), rule, 1.0, found) < 3.2 * lost
    little = exact.pld_epsilon(Independent(10), rule, 1e-4, 1e-5)  # losses in the millions
    assert little == pytest.approx(gdp_epsilon(known / 1e-4, 1e-5), rel=1e-9)
    assert exact.pld_delta(Independent(10), rule, 1e-4, 1.0) == 1.0


@pytest.mark.parametrize("ask", [exact.pld_epsilon, exact.pld_delta])
def test_what_has_no_known_law_is_refused(ask):
    overlapping = ToeplitzBanded([1.0, 0.5], n=6)
    for rule in (BallsInBins(2, 3), RandomAllocation(2, 3), TruncatedPoisson(6, 0.5, 3, 12)):
        with pytest.raises(PlanError, match="overlap"):
            ask(overlapping, rule, 1.0, 0.1)
        with pytest.raises(PlanError, match="same number of steps"):
            ask(Independent(12), rule, 1.0, 0.1)
    with pytest.raises(PlanError, match="overlap"):
        cyclic_parts(overlapping, CyclicPoisson(6, 1, 0.5), 1.0)


@pytest.mark.parametrize("variance", [-0.1, LARGEST * 1.01])
def test_variances_that_have_no_grid(variance):
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    with pytest.raises(ArgumentError, match="diagonal"):
        diagonal_losses(pld, [1.0, variance], 1.0, 0.01)
    with pytest.raises(ArgumentError, match="diagonal"):
        diagonal_losses(pld, [1.0, 4 * variance], 2.0, 0.01)
    if variance < 0:
        with pytest.raises(ArgumentError, match="negative"):
            epochs_epsilon([[1.0, variance]], 1.0, 1e-5)
