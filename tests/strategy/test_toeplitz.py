"""Toeplitz C: power series against closed forms; square roots against their squares and reference values."""

from math import comb

import numpy as np
import pytest
from scipy.linalg import toeplitz

from anyorder import workload
from anyorder.errors import ArgumentError
from anyorder.participation import FixedOrder
from anyorder.strategy import SquareRoot, ToeplitzBanded
from anyorder.strategy import toeplitz as module
from anyorder.strategy.registry import sensitivity
from anyorder.strategy.toeplitz import inverse_series, square_root_series
from references import reference, scenario


def test_series_by_hand() -> None:
    np.testing.assert_array_equal(inverse_series([1.0, -1.0], 4), [1, 1, 1, 1])
    np.testing.assert_array_equal(inverse_series([2.0, 1.0], 3), [0.5, -0.25, 0.125])
    np.testing.assert_array_equal(square_root_series([4.0, 4.0, 1.0], 5), [2, 1, 0, 0, 0])
    np.testing.assert_allclose(inverse_series([1.0, 0.5, 0.25, 0.125], 12), reference("inverse_coef_given"), atol=1e-15)


def test_newtons_iteration_gives_the_same_inverse(monkeypatch: pytest.MonkeyPatch) -> None:
    series = SquareRoot(1000).toeplitz_coefficients()
    direct = inverse_series(series, 1500)
    monkeypatch.setattr(module, "DIRECT_OPERATIONS", 0)
    np.testing.assert_allclose(inverse_series(series, 1500), direct, atol=1e-14)


def test_square_root_of_the_prefix_sum() -> None:
    strategy = SquareRoot(16)
    np.testing.assert_allclose(strategy.matrix() @ strategy.matrix(), np.tri(16), atol=1e-14)
    np.testing.assert_allclose(strategy.toeplitz_coefficients(), [comb(2 * k, k) / 4**k for k in range(16)], rtol=1e-14)
    np.testing.assert_allclose(strategy.toeplitz_coefficients(), reference("sqrt_coefs_16"), rtol=1e-13)
    np.testing.assert_allclose(strategy.noising_coefficients(), reference("sqrt_noising_coefs_16"), rtol=1e-13)
    np.testing.assert_allclose(square_root_series(np.ones(16), 16), strategy.toeplitz_coefficients(), rtol=1e-13)


@pytest.mark.parametrize("n", [16, 64, 256, 1024, 2048])
def test_square_root_error(n: int) -> None:
    expected, strategy = reference(f"sqrt_toeplitz_prefix_n{n}"), SquareRoot(n)
    variance = strategy.prefix_variance()
    assert variance.mean() == pytest.approx(expected["mean_error"], rel=1e-9)
    assert variance.max() == pytest.approx(expected["max_error"], rel=1e-9)
    assert variance[-1] == pytest.approx(expected["last_error"], rel=1e-9)
    assert np.sqrt(strategy.column_norms_squared().max()) == pytest.approx(expected["sensitivity"], rel=1e-9)


def test_root_of_the_max_loss_is_the_landau_constant() -> None:
    """B = C for the square root: the last row of B has the norm of the first column of C."""
    strategy = SquareRoot(300)
    assert strategy.prefix_variance()[-1] == pytest.approx(strategy.column_norms_squared()[0], rel=1e-12)


def test_banded_reference_errors() -> None:
    expected = reference("banded_sqrt_prefix_n256_b4")
    strategy = ToeplitzBanded.from_square_root(workload.prefix_sum(256), 4)
    assert strategy.prefix_variance().mean() == pytest.approx(expected["mean_error"], rel=1e-9)
    assert strategy.prefix_variance().max() == pytest.approx(expected["max_error"], rel=1e-9)
    given = ToeplitzBanded([1.0, 0.5, 0.375], 8)
    np.testing.assert_allclose(given.prefix_variance(), reference("per_query_error_n8_b3"), rtol=1e-12)


@pytest.mark.parametrize("p", [2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize(("name", "k", "b"), [("n1000_k10_b100", 10, 100), ("cifar_2000_k20_b100", 20, 100)])
def test_banded_square_root_in_the_scenarios(name: str, k: int, b: int, p: int) -> None:
    expected = scenario(name, f"BSR_p{p}")
    strategy = ToeplitzBanded.from_square_root(workload.prefix_sum(k * b), p)
    bound = sensitivity(strategy, FixedOrder(k * b, k, b))
    assert bound.value == pytest.approx(expected["sens"], rel=1e-9)
    assert bound.exact
    assert bound.value * np.sqrt(strategy.prefix_variance().mean()) == pytest.approx(expected["rmse"], rel=1e-9)


def test_square_root_of_momentum() -> None:
    A = workload.momentum(12, 0.7)
    strategy = ToeplitzBanded.from_square_root(A, 12)
    np.testing.assert_allclose(strategy.matrix() @ strategy.matrix(), A.matrix(), atol=1e-12)


def test_a_dropped_coefficient_would_show() -> None:
    c = np.array([2.0, 1.0, -0.5, 0.25])
    strategy = ToeplitzBanded(c, 6)
    expected = np.linalg.inv(toeplitz(np.append(c, [0, 0]), np.zeros(6)))
    np.testing.assert_allclose(strategy.noising_matrix(), expected, atol=1e-14)


def test_state_holds_the_last_outputs_only() -> None:
    strategy = ToeplitzBanded([1.0, 0.5, 0.25], 10)
    state = strategy.init(2)
    for t in range(10):
        _, state = strategy.step(t, state, lambda r: np.full(2, r, dtype=np.float32))
        assert len(state) == min(t + 1, 2) <= strategy.state_rows
    assert ToeplitzBanded([3.0], 10).state_rows == 0


@pytest.mark.parametrize(
    ("coefficients", "n", "message"),
    [([0.0, 1.0], 4, "above 0"), ([-1.0], 4, "above 0"), ([1.0] * 5, 4, "at most n=4"), ([], 4, "non-empty"),
     ([1.0, np.inf], 4, "finite"), ([[1.0]], 4, "1 dimension"), ([1.0], 0, "n must be")],
)  # fmt: skip
def test_refusals(coefficients: list[float], n: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ToeplitzBanded(coefficients, n)


def test_square_roots_need_a_toeplitz_workload() -> None:
    A = workload.momentum(4, 0.5, learning_rates=[1.0, 1.0, 1.0, 0.5])
    with pytest.raises(ArgumentError, match="constant learning rates"):
        ToeplitzBanded.from_square_root(A, 2)
    with pytest.raises(ArgumentError, match="num_bands"):
        ToeplitzBanded.from_square_root(workload.prefix_sum(4), 5)


def test_the_recurrence_of_a_first_coefficient_that_is_not_one():
    strategy = ToeplitzBanded([2.0, 0.5, -0.3], 7)
    K, state = strategy.noising_matrix(), np.zeros((2, 7))
    for t, z in enumerate(np.eye(7)):
        F, G, h, g = strategy.recurrence(t)
        np.testing.assert_allclose(h @ state + g * z, K[t], rtol=0, atol=1e-14)
        state = F @ state + np.outer(G, z)
