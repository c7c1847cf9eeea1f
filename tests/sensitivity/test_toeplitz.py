"""Toeplitz C: Kalinin & Lampert's pattern, majorants, orthogonal columns, reference values."""

import sys

import numpy as np
import pytest

from anyorder import workload
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.strategy import BandedInverse, SquareRoot, Strategy, ToeplitzBanded
from anyorder.strategy.registry import sensitivity, unit_sensitivities
from anyorder.strategy.toeplitz import gram_matrix, majorant
from oracles import attained_squared, random_separated
from references import reference, scenario


def test_by_hand() -> None:
    """Columns (1, 1, 0, 0) and (0, 0, 1, 1): sens^2 = 4; next to each other (1, 2, 1): 6."""
    strategy = ToeplitzBanded([1.0, 1.0], 4)
    assert sensitivity(strategy, FixedOrder(4, 2, 2)).value == pytest.approx(2)
    assert sensitivity(strategy, MinSeparation(4, 1, 2)).value == pytest.approx(np.sqrt(6))
    assert sensitivity(strategy, MinSeparation(4, 1)).value == pytest.approx(np.sqrt(1 + 4 + 4 + 4))
    assert sensitivity(strategy, SingleEpoch(4)).value == pytest.approx(np.sqrt(2))


@pytest.mark.parametrize(("n", "b", "k"), [(64, 8, None), (512, 128, 4), (1000, 100, 10)])
def test_square_root_references(n: int, b: int, k: int | None) -> None:
    bound = sensitivity(SquareRoot(n), MinSeparation(n, b, k))
    assert bound.exact
    assert bound.value == pytest.approx(reference(f"sqrt_minsep_sens_n{n}_b{b}_k{k}"), rel=1e-9)


@pytest.mark.parametrize(("n", "b", "k", "p"), [(64, 8, None, 16), (1000, 100, 5, 200), (512, 32, None, 32)])
def test_banded_square_root_references(n: int, b: int, k: int | None, p: int) -> None:
    strategy = ToeplitzBanded.from_square_root(workload.prefix_sum(n), p)
    bound = sensitivity(strategy, MinSeparation(n, b, k))
    assert bound.exact
    assert bound.value == pytest.approx(reference(f"bsr_minsep_sens_n{n}_b{b}_k{k}_bands{p}"), rel=1e-9)


@pytest.mark.parametrize(("n", "p", "b"), [(256, 4, 16), (1024, 16, 64)])
def test_banded_inverse_references(n: int, p: int, b: int) -> None:
    strategy = BandedInverse.from_square_root(workload.prefix_sum(n), p)
    bound = sensitivity(strategy, MinSeparation(n, b))
    assert bound.exact
    assert bound.value == pytest.approx(reference(f"bisr_prefix_n{n}_b{p}_minsep{b}")["sensitivity"], rel=1e-9)


@pytest.mark.parametrize(("n", "p", "b"), [(256, 4, 64), (512, 8, 128)])
def test_optimised_banded_inverse(n: int, p: int, b: int) -> None:
    """c is not monotone: jax_privacy's first value is the majorant, its second one, from X, is attained."""
    expected = reference(f"bandinv_opt_n{n}_b{p}_minsep{b}")
    strategy = BandedInverse(expected["noising_coef"], n)
    bound = sensitivity(strategy, MinSeparation(n, b))
    assert bound.exact
    assert bound.value == pytest.approx(expected["sens_matrix_bound"], rel=1e-9)
    assert bound.value < expected["sensitivity"]
    assert sensitivity(strategy, FixedOrder(n, n // b, b)).value == pytest.approx(bound.value, rel=1e-9)


def test_identity_and_square_root_in_a_scenario() -> None:
    expected = scenario("n1000_k10_b100", "sqrt_dense")
    assert sensitivity(SquareRoot(1000), FixedOrder(1000, 10, 100)).value == pytest.approx(expected["sens"], rel=1e-9)


def test_coefficients_that_rise_get_the_true_maximum() -> None:
    """jax_privacy prints the majorant here; the enumerated maximum is 28 % less, and n is small enough to have it."""
    expected = reference("minsep_sens_increasing_coefs_bound")
    strategy = ToeplitzBanded([0.5, 1.0, 0.25, -0.75], 8)
    bound = sensitivity(strategy, MinSeparation(8, 2))
    assert bound.value == pytest.approx(expected["brute_force_exact"], rel=1e-9)


def test_majorant_where_nothing_else_is_left() -> None:
    assert majorant(np.array([0.5, -1.0, 0.25, -0.75, 0.0])).tolist() == [1.0, 1.0, 0.75, 0.75, 0.0]
    n = 5000  # beyond the generic route
    g = [1.0, -0.9, 0.5]
    strategy = BandedInverse(g, n)
    bound = sensitivity(strategy, MinSeparation(n, 3, 4))
    c = strategy.toeplitz_coefficients()
    assert (c < 0).any()
    assert not bound.exact
    shifted = sum(np.append(np.zeros(3 * j), majorant(c)[: n - 3 * j]) for j in range(4))
    assert bound.value == pytest.approx(np.linalg.norm(shifted), rel=1e-9)


@pytest.mark.parametrize("signs", [1.0, -1.0])
def test_fewer_bands_than_separation_is_exact_whatever_the_signs(signs: float) -> None:
    strategy = ToeplitzBanded([1.0, signs * 2.0, 0.5], 10_000)
    for rule in (MinSeparation(10_000, 3, 7), FixedOrder(10_000, 100, 100), MinSeparation(10_000, 500)):
        bound = sensitivity(strategy, rule)
        assert bound.exact
        k = rule.max_participations
        last = 1 if (k - 1) * rule.min_separation == 9999 else 5.25
        assert bound.value**2 == pytest.approx((k - 1) * 5.25 + last, rel=1e-12)


def test_one_participation_more_counts() -> None:
    bounds = [sensitivity(SquareRoot(400), MinSeparation(400, 50, k)).value for k in range(1, 9)]
    C = SquareRoot(400).matrix()
    expected = [np.linalg.norm(C[:, 0 : 50 * k : 50].sum(axis=1)) for k in range(1, 9)]
    np.testing.assert_allclose(bounds, expected, rtol=1e-10)


@pytest.mark.parametrize("seed", range(40))
def test_random_coefficients_against_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 11))
    p, b = (int(v) for v in rng.integers(1, n + 1, 2))
    c = rng.standard_normal(p) if seed % 2 else rng.random(p)
    c[0] = abs(c[0]) + 0.1
    strategies: list[Strategy] = [ToeplitzBanded(c, n), BandedInverse(c, n)]
    for strategy in strategies:
        for rule in (MinSeparation(n, b), MinSeparation(n, b, 2), FixedOrder(n, -(-n // b), b), SingleEpoch(n)):
            bound = sensitivity(strategy, rule)
            reached = attained_squared(strategy.matrix(), rule.patterns())
            assert bound.value**2 >= reached * (1 - 1e-13)
            if bound.exact:
                assert bound.value**2 == pytest.approx(reached, rel=1e-9)


def test_random_patterns_at_larger_n() -> None:
    n, rng = 600, np.random.default_rng(5)
    for strategy in (SquareRoot(n), BandedInverse.from_square_root(workload.prefix_sum(n), 8)):
        C = strategy.matrix()
        for b, k in [(1, 30), (20, 12), (45, 14)]:
            bound = sensitivity(strategy, MinSeparation(n, b, k))
            for _ in range(50):
                pattern = list(random_separated(rng, n, b, k))
                assert np.square(C[:, pattern].sum(axis=1)).sum() <= bound.value**2 * (1 + 1e-13)


@pytest.mark.parametrize("n", [1, 2, 9, 600])
def test_gram_and_known_orders(n: int) -> None:
    """600 steps cross the blocks in which the columns of X are made."""
    strategy = BandedInverse([1.0, -0.4, -0.2][: min(n, 3)], n)
    C = strategy.matrix()
    np.testing.assert_allclose(gram_matrix(strategy.toeplitz_coefficients()), C.T @ C, rtol=1e-10, atol=1e-13)
    rng = np.random.default_rng(n)
    order = KnownOrder([rng.integers(0, 7, rng.integers(0, 4)).tolist() + ([9] if t == 0 else []) for t in range(n)])
    expected = [np.sqrt(np.abs(C.T @ C)[np.ix_(steps, steps)].sum()) for steps in map(list, order.patterns())]
    np.testing.assert_allclose(unit_sensitivities(strategy, order), expected, rtol=1e-9)
    assert sensitivity(strategy, order).value == pytest.approx(max(expected), rel=1e-9)


def test_shuffled_epochs_lie_between_the_same_order_and_any_order() -> None:
    n, k = 5000, 5
    for strategy in (SquareRoot(n), BandedInverse.from_square_root(workload.prefix_sum(n), 16)):
        same = sensitivity(strategy, FixedOrder(n, k, n // k)).value
        shuffled = sensitivity(strategy, EpochShuffle(k, n // k)).value
        anything = sensitivity(strategy, MinSeparation(n, 1, k)).value
        assert same < shuffled < anything


def test_known_orders_of_very_long_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    n, rng = 400, np.random.default_rng(0)
    order = KnownOrder([rng.integers(0, 60, 3).tolist() for _ in range(n)])
    for strategy in (SquareRoot(n), BandedInverse([1.0, -0.9, 0.5], n)):
        exact = unit_sensitivities(strategy, order)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["anyorder.strategy.toeplitz"], "_MAX_COLUMNS", 0)
            patch.setattr(sys.modules["anyorder.strategy.sensitivity"], "PROGRAM_STEPS", 0)
            bounds = unit_sensitivities(strategy, order)
            assert not sensitivity(strategy, order).exact
        assert (bounds >= exact * (1 - 1e-12)).all()
        assert bounds.max() < 1.3 * exact.max()
