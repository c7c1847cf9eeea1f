"""Banded C: the two ways to give it, unit columns, gram bands, and variance by recurrence."""

import json

import numpy as np
import pytest

from anyorder.errors import ArgumentError
from anyorder.strategy import Banded, SquareRoot, ToeplitzBanded
from anyorder.strategy.registry import from_dict
from references import reference


def random_banded(n: int, p: int) -> Banded:
    C = np.random.default_rng(n).standard_normal((n, n)) * 0.3
    C[np.diag_indices(n)] = 1 + np.abs(np.diag(C))
    return Banded(np.triu(np.tril(C), 1 - p))


def test_bands_and_matrix_are_the_same_strategy() -> None:
    strategy = Banded([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]])
    np.testing.assert_array_equal(strategy.matrix(), [[1, 0, 0], [4, 2, 0], [0, 5, 3]])
    assert Banded(strategy.matrix()) == strategy
    assert Banded(np.eye(4)).num_bands == 1


@pytest.mark.parametrize(("n", "p"), [(1, 1), (5, 2), (9, 4), (9, 9), (30, 7)])
def test_structured_equals_dense(n: int, p: int) -> None:
    strategy = random_banded(n, p)
    assert strategy.num_bands == p
    C = strategy.matrix()
    np.testing.assert_allclose(strategy.noising_matrix(), np.linalg.inv(C), atol=1e-12)
    X = C.T @ C
    for gap, band in enumerate(strategy.gram_bands()):
        np.testing.assert_allclose(band, np.append(np.diagonal(X, gap), np.zeros(gap)), atol=1e-13)
    expected = np.square(np.tri(n) @ np.linalg.inv(C)).sum(axis=1)
    np.testing.assert_allclose(strategy.prefix_variance(), expected, rtol=1e-11)
    assert from_dict(json.loads(json.dumps(strategy.to_dict()))) == strategy


def test_unit_columns() -> None:
    norms = random_banded(20, 5).normalized().column_norms_squared()
    np.testing.assert_allclose(norms, 1.0, rtol=1e-14)


def test_column_normalized_square_root_has_the_reference_error() -> None:
    expected = reference("colnorm_banded_default_n64_b4_pqe")
    C = ToeplitzBanded(SquareRoot(4).toeplitz_coefficients(), 64).matrix()
    variance = Banded(C).normalized().prefix_variance()
    assert variance.mean() == pytest.approx(expected["mean_error"], rel=1e-9)
    assert variance.max() == pytest.approx(expected["max_error"], rel=1e-9)
    np.testing.assert_allclose(variance[:6], expected["first"], rtol=1e-9)


def test_stream_has_the_reference_values() -> None:
    coefficients = np.array([1.0, 0.5, 0.375])
    C = ToeplitzBanded(coefficients / np.linalg.norm(coefficients), 8).matrix()
    strategy = Banded(C).normalized()
    Z = np.sin(1 + np.arange(8)[:, None] + 2 * np.arange(2)).astype(np.float32)
    state, noise = strategy.init(2), []
    for t in range(8):
        made, state = strategy.step(t, state, lambda r: Z[r])
        noise.append(made)
    np.testing.assert_allclose(noise, reference("stream_banded_toeplitz_colnorm_n8"), atol=1e-6)


@pytest.mark.parametrize(
    ("bands", "message"),
    [
        ([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], "below the matrix"),
        ([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]], "above 0"),
        (np.ones((3, 2)), r"p <= n, got shape \(3, 2\)"),
        ([[1.0, 1.0], [0.0, 1.0]], "lower triangular"),
        ([[1.0, np.nan, 1.0]], "finite"),
    ],
)
def test_refusals(bands: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Banded(bands)  # type: ignore[arg-type]
