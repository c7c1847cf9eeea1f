"""Banded and low-rank C^-1: the form, and how near it comes to the strategy that it approximates."""

import numpy as np
import pytest

from anyorder.errors import ArgumentError
from anyorder.strategy import Dense, SquareRoot, Tree
from anyorder.strategy.low_rank import BandedLowRank

BANDS = [[1.0, 0.0], [2.0, 0.5], [3.0, 0.25]]


def loss(strategy: object, A: np.ndarray) -> float:
    """|| A C^-1 ||_F times the single-participation sensitivity."""
    C = strategy.matrix()  # type: ignore[attr-defined]
    return float(np.linalg.norm(A @ strategy.noising_matrix()) * np.linalg.norm(C, axis=0).max())  # type: ignore[attr-defined]


def test_by_hand() -> None:
    strategy = BandedLowRank(BANDS, [[0.0], [0.0], [2.0]], [[5.0], [0.0], [0.0]])
    np.testing.assert_array_equal(strategy.noising_matrix(), [[1, 0, 0], [0.5, 2, 0], [10, 0.25, 3]])
    assert strategy.state_rows == strategy.rank == 1


def test_a_low_rank_remainder_is_found_exactly() -> None:
    """Prefix noise whose entries below the diagonal have rank 2 comes back as it was."""
    n, rng = 24, np.random.default_rng(0)
    B = np.tril(rng.random((n, 2)) @ rng.random((2, n)), -1) + 3 * np.eye(n)
    K = np.diff(B, axis=0, prepend=0.0)
    given = Dense(np.tril(np.linalg.inv(K)))
    found = BandedLowRank.approximate(given, num_bands=2, rank=2)
    np.testing.assert_allclose(found.noising_matrix(), K, atol=1e-6)


def test_more_rank_is_nearer_and_rank_four_is_enough() -> None:
    n = 128
    A, best = np.tri(n), loss(SquareRoot(n), np.tri(n))
    ratios = [loss(BandedLowRank.approximate(SquareRoot(n), num_bands=4, rank=r), A) / best for r in (1, 2, 4)]
    assert ratios[0] > ratios[1] > ratios[2]
    assert ratios[2] < 1.001


def test_a_step_asks_for_few_rows() -> None:
    strategy = BandedLowRank.approximate(SquareRoot(40), num_bands=3, rank=2)
    state, asked = strategy.init(1), []

    def row(r: int) -> np.ndarray:
        asked.append(r)
        return np.ones(1, dtype=np.float32)

    for t in range(40):
        asked.clear()
        _, state = strategy.step(t, state, row)
        assert sorted(asked) == list(range(max(0, t - 3), t + 1))


@pytest.mark.parametrize(
    ("bands", "left", "right", "message"),
    [
        (BANDS, np.ones((3, 1)), np.ones((3, 2)), "both be"),
        (BANDS, np.ones((2, 1)), np.ones((2, 1)), "n=3"),
        ([[1.0, 1.0], [1.0, 1.0]], np.ones((2, 1)), np.ones((2, 1)), "outside the matrix"),
        ([[1.0, 0.0], [0.0, 1.0]], np.ones((2, 1)), np.ones((2, 1)), "above 0"),
        ([[1.0, 0.0]], np.ones((1, 1)), np.ones((1, 1)), "p <= n"),
    ],
)
def test_refusals(bands: object, left: np.ndarray, right: np.ndarray, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        BandedLowRank(bands, left, right)  # type: ignore[arg-type]


def test_a_tree_has_no_inverse_to_approximate() -> None:
    with pytest.raises(ArgumentError, match="square"):
        BandedLowRank.approximate(Tree(8), num_bands=2, rank=1)
    with pytest.raises(ArgumentError, match="num_bands"):
        BandedLowRank.approximate(SquareRoot(8), num_bands=1, rank=1)
