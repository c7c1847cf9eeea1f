"""Banded C^-1: BISR and lambda-CGD against closed forms and reference values."""

import numpy as np
import pytest

from anyorder import workload
from anyorder.errors import ArgumentError
from anyorder.participation import FixedOrder, SingleEpoch
from anyorder.strategy import BandedInverse, SquareRoot
from anyorder.strategy.registry import sensitivity
from references import reference, scenario


def test_inverse_square_root_of_the_prefix_sum() -> None:
    strategy = BandedInverse.from_square_root(workload.prefix_sum(20), 8)
    np.testing.assert_allclose(strategy.coefficients, reference("bisr_prefix_b8"), rtol=1e-12)
    g = np.cumprod([1.0] + [1 - 3 / (2 * k) for k in range(1, 8)])
    np.testing.assert_allclose(strategy.coefficients, g, rtol=1e-12)
    np.testing.assert_allclose(strategy.toeplitz_coefficients(8), SquareRoot(8).toeplitz_coefficients(), rtol=1e-12)


def test_inverse_square_root_of_momentum() -> None:
    strategy = BandedInverse.from_square_root(workload.momentum(30, 0.9), 8)
    np.testing.assert_allclose(strategy.coefficients, reference("bisr_momentum0.9_b8"), rtol=1e-9, atol=1e-13)
    full = BandedInverse.from_square_root(workload.momentum(12, 0.9), 12)
    K = full.noising_matrix()
    np.testing.assert_allclose(K @ K @ workload.momentum(12, 0.9).matrix(), np.eye(12), atol=1e-11)


def test_two_bands_by_hand() -> None:
    strategy = BandedInverse([1.0, -0.5], 4)  # lambda-CGD: z_t - 0.5 z_{t-1}
    np.testing.assert_array_equal(strategy.toeplitz_coefficients(), [1, 0.5, 0.25, 0.125])
    np.testing.assert_array_equal(strategy.terms(0).rows, [0])
    np.testing.assert_array_equal(strategy.terms(3).rows, [3, 2])
    np.testing.assert_array_equal(strategy.terms(3).coefficients, [1, -0.5])
    np.testing.assert_array_equal(strategy.prefix_variance(), [1, 1.25, 1.5, 1.75])
    assert sensitivity(strategy, SingleEpoch(4)).value == pytest.approx(np.sqrt(1 + 0.25 + 0.0625 + 0.015625))


@pytest.mark.parametrize("p", [2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize(("name", "k", "b"), [("n1000_k10_b100", 10, 100), ("so_2052_k6_b342", 6, 342)])
def test_in_the_scenarios(name: str, k: int, b: int, p: int) -> None:
    expected = scenario(name, f"BISR_p{p}")
    strategy = BandedInverse.from_square_root(workload.prefix_sum(k * b), p)
    bound = sensitivity(strategy, FixedOrder(k * b, k, b))
    assert bound.exact
    assert bound.value == pytest.approx(expected["sens"], rel=1e-9)
    variance = strategy.prefix_variance()
    assert bound.value * np.sqrt(variance.mean()) == pytest.approx(expected["rmse"], rel=1e-9)
    assert bound.value * np.sqrt(variance.max()) == pytest.approx(expected["max"], rel=1e-9)


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="above 0"):
        BandedInverse([0.0, 1.0], 4)
    with pytest.raises(ArgumentError, match="at most n=2"):
        BandedInverse([1.0, 0.5, 0.2], 2)
    with pytest.raises(ArgumentError, match="num_bands"):
        BandedInverse.from_square_root(workload.prefix_sum(4), 0)
