"""BLT: closed forms against the coefficients, units against dense columns, ten million steps."""

import numpy as np
import pytest

from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.strategy import BLT, blt, toeplitz
from anyorder.strategy.registry import sensitivity, unit_sensitivities
from anyorder.strategy.sensitivity import visits
from oracles import attained_squared
from references import reference

CASES = [
    ([0.9, 0.5], [0.3, 0.1]),
    ([0.99999, 0.9, 0.3], [0.01, 0.2, 0.1]),
    ([1.0, 0.0], [0.1, 0.4]),
    ([0.6, 0.6], [0.9, 0.6]),  # c_1 > c_0
    ([0.5, -0.5], [0.3, -0.2]),
]


def test_references() -> None:
    given = ([0.9, 0.5], [0.3, 0.1])
    bound = sensitivity(BLT(*given, 10), MinSeparation(10, 2, 5))
    assert bound.exact
    assert bound.value**2 == pytest.approx(reference("blt_given_sens2_n10_minsep"), rel=1e-9)
    single = sensitivity(BLT(*given, 1000), SingleEpoch(1000)).value
    assert single**2 == pytest.approx(reference("blt_given_sens2_n1000"), rel=1e-9)


@pytest.mark.parametrize(("decays", "scales"), CASES)
@pytest.mark.parametrize(("n", "b", "k"), [(1, 1, None), (7, 1, None), (7, 3, 2), (40, 7, None), (600, 13, 9)])
def test_closed_forms_equal_the_sums(decays: list[float], scales: list[float], n: int, b: int, k: int | None) -> None:
    strategy = BLT(decays, scales, n)
    rules = [MinSeparation(n, b, k), FixedOrder(n, -(-n // b), b), SingleEpoch(n)]
    for rule in rules:
        expected, bound = toeplitz.bound(strategy, rule.pattern), sensitivity(strategy, rule)
        assert bound.value == pytest.approx(expected.value, rel=1e-9)
        assert bound.exact == expected.exact


def test_a_first_coefficient_that_is_too_small_is_raised() -> None:
    """c = (1, 1.5, .9, ..): for n above 4096 the majorant (1.5, 1.5, .9, ..) is what is left."""
    strategy = BLT([0.6], [1.5], 6000)
    bound = sensitivity(strategy, MinSeparation(6000, 10, 3))
    assert not bound.exact
    c = toeplitz.majorant(strategy.toeplitz_coefficients())
    shifted = sum(np.append(np.zeros(10 * j), c[: 6000 - 10 * j]) for j in range(3))
    assert bound.value == pytest.approx(np.linalg.norm(shifted), rel=1e-10)
    assert sensitivity(strategy, FixedOrder(6000, 600, 10)).exact


@pytest.mark.parametrize(("decays", "scales"), CASES)
def test_units_of_a_known_order(decays: list[float], scales: list[float]) -> None:
    n, rng = 300, np.random.default_rng(1)
    strategy = BLT(decays, scales, n)
    order = KnownOrder([rng.integers(0, 50, 3).tolist() for _ in range(n)])
    C = strategy.matrix()
    expected = [np.sqrt(np.abs(C.T @ C)[np.ix_(steps, steps)].sum()) for steps in map(list, order.patterns())]
    np.testing.assert_allclose(unit_sensitivities(strategy, order), expected, rtol=1e-10)


def test_weighted_units() -> None:
    n, rng = 40, np.random.default_rng(2)
    strategy, weights = BLT([0.9, 0.5], [0.3, 0.1], n), rng.random(n)
    order = KnownOrder([[t % 3, t % 5 + 10] for t in range(n)])
    C = strategy.matrix() * weights
    squares = blt.unit_squares(strategy, visits(order.pattern), weights)
    expected = [np.square(C[:, steps].sum(axis=1)).sum() for steps in map(list, order.patterns())]
    np.testing.assert_allclose(squares.upper, expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, m = int(rng.integers(1, 10)), int(rng.integers(1, 4))
    strategy = BLT(rng.random(m), rng.random(m), n)
    for rule in (MinSeparation(n, 2), MinSeparation(n, 1, 2), FixedOrder(n, n, 2), EpochShuffle(n, 1)):
        bound, reached = sensitivity(strategy, rule), attained_squared(strategy.matrix(), rule.patterns())
        assert bound.value**2 >= reached * (1 - 1e-13)
        if bound.exact:
            assert bound.value**2 == pytest.approx(reached, rel=1e-9)


def test_ten_million_steps() -> None:
    n = 10**7
    strategy = BLT([0.9999999, 0.999, 0.9], [0.0005, 0.01, 0.1], n)
    bound = sensitivity(strategy, MinSeparation(n, 10**6, 10))
    c = strategy.toeplitz_coefficients()
    total = np.square(np.cumsum(c.reshape(10, -1), axis=0)).sum()
    assert bound.value**2 == pytest.approx(total, rel=1e-9)
    assert sensitivity(strategy, FixedOrder(n, 10, 10**6)).value == pytest.approx(bound.value, rel=1e-12)
    assert bound.value < sensitivity(strategy, EpochShuffle(10, 10**6)).value
