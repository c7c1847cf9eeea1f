"""EpochShuffle: the bounds by corners, against enumeration and a search for bad orders."""

import numpy as np
import pytest

from anyorder import workload
from anyorder.participation import EpochShuffle
from anyorder.strategy import BLT, BandedInverse, SquareRoot
from anyorder.strategy import sensitivity as bounds
from anyorder.strategy.blt import _shuffled as blt_bound
from anyorder.strategy.registry import sensitivity
from anyorder.strategy.sensitivity import toeplitz_bound, two_point_bound
from anyorder.strategy.toeplitz import Toeplitz, gram_matrix


def enumerated(weights: np.ndarray, k: int, s: int) -> float:
    return max(float(weights[np.ix_(p, p)].sum()) for p in EpochShuffle(k, s).patterns())


def searched(weights: np.ndarray, k: int, s: int) -> float:
    """A bad order, by moving one step at a time to its worst place: a value that is attained."""
    best, rng = 0.0, np.random.default_rng(0)
    for _ in range(20):
        steps, before = rng.integers(0, s, k) + np.arange(k) * s, None
        while before is None or (before != steps).any():
            before = steps.copy()
            for e in range(k):
                here = np.arange(e * s, (e + 1) * s)
                gain = weights[here, here] + 2 * weights[np.ix_(here, np.delete(steps, e))].sum(axis=1)
                steps[e] = here[gain.argmax()]
        best = max(best, float(weights[np.ix_(steps, steps)].sum()))
    return best


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("window", [1, 8])
def test_never_below_the_enumerated_maximum(seed: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_WINDOW", window)
    rng = np.random.default_rng(seed)
    k, s = int(rng.integers(2, 5)), int(rng.integers(1, 6))
    n = k * s
    factor = rng.standard_normal((n, n))
    weights = np.abs(factor.T @ factor)
    assert two_point_bound(weights, k, s) >= enumerated(weights, k, s) * (1 - 1e-13)
    c = rng.standard_normal(n + s)
    X = np.abs(gram_matrix(c[:n]))
    assert toeplitz_bound(c, k, s) >= enumerated(X, k, s) * (1 - 1e-12)
    blt = BLT(rng.random(2), rng.random(2), n)
    X = gram_matrix(blt.toeplitz_coefficients())
    assert blt_bound(blt, k, s) >= enumerated(X, k, s) * (1 - 1e-12)


def test_a_pair_that_stands_out_is_counted_both_ways() -> None:
    """Above the plane of its corners, in any two epochs: the pair is in the sum as (i, j) and as (j, i)."""
    k, s = 4, 5
    for i in range(k * s):
        for j in range((i // s + 1) * s, k * s):  # of a later epoch
            weights = np.zeros((k * s, k * s))
            weights[i, j] = weights[j, i] = 1.0
            assert enumerated(weights, k, s) == 2
            assert two_point_bound(weights, k, s) >= 2


def test_corners_alone_are_exact_for_convex_weights() -> None:
    place = np.arange(12)
    weights = np.exp(-0.2 * np.abs(place - place[:, None]))
    assert two_point_bound(weights, 3, 4) == pytest.approx(enumerated(weights, 3, 4), rel=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [SquareRoot(600), BLT([0.99, 0.8], [0.08, 0.2], 600), BandedInverse.from_square_root(workload.prefix_sum(600), 16)],
    ids=repr,
)
@pytest.mark.parametrize("k", [3, 10, 20])
def test_close_to_what_a_bad_order_attains(strategy: Toeplitz, k: int) -> None:
    X = gram_matrix(strategy.toeplitz_coefficients())
    attained = np.sqrt(searched(X, k, 600 // k))
    bound = sensitivity(strategy, EpochShuffle(k, 600 // k))
    assert attained * (1 - 1e-12) <= bound.value <= attained * 1.003
    longer = toeplitz_bound(strategy.toeplitz_coefficients(600 + 600 // k), k, 600 // k)
    assert bound.value * (1 - 1e-9) <= np.sqrt(longer) <= attained * 1.03


def test_closed_form_of_a_blt_is_the_transformed_one() -> None:
    strategy = BLT([0.999, 0.9], [0.05, 0.3], 20_000)
    series = strategy.toeplitz_coefficients(22_000)
    assert blt_bound(strategy, 10, 2000) == pytest.approx(toeplitz_bound(series, 10, 2000), rel=1e-10)
