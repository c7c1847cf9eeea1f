"""Banded C: dynamic programming against enumeration; sqrt(k) for unit columns."""

import numpy as np
import pytest

from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.patterns import Participation, Separated
from anyorder.strategy import Banded, Dense, SquareRoot, Strategy, ToeplitzBanded, banded, toeplitz
from anyorder.strategy.registry import sensitivity, unit_sensitivities
from anyorder.strategy.sensitivity import banded_bound
from oracles import attained_squared, random_separated
from references import reference


def random_banded(rng: np.random.Generator, n: int, p: int, *, signed: bool) -> Banded:
    C = rng.standard_normal((n, n)) if signed else rng.random((n, n))
    C[np.diag_indices(n)] = 0.2 + np.abs(np.diag(C))
    return Banded(np.triu(np.tril(C), 1 - p))


@pytest.mark.parametrize("b", [8, 9, 20])
def test_unit_columns_far_apart(b: int) -> None:
    strategy = random_banded(np.random.default_rng(0), 100, 8, signed=True).normalized()
    for rule in (MinSeparation(100, b, 4), FixedOrder(100, -(-100 // b), b), MinSeparation(100, b)):
        bound = sensitivity(strategy, rule)
        assert bound.exact
        assert bound.value == pytest.approx(np.sqrt(rule.max_participations), rel=1e-12)


@pytest.mark.parametrize("b", [3, 4])
def test_references(b: int) -> None:
    i, j = np.indices((8, 8))
    C = np.where((i >= j) & (i - j < 3), (1 + 0.3 * np.cos(1 + i + 2 * j)) / (1 + abs(i - j)), 0.0)
    bound = sensitivity(Banded(C), MinSeparation(8, b))
    assert bound.exact
    assert bound.value == pytest.approx(reference(f"banded_sens_testmat8_bands3_minsep{b}"), rel=1e-9)


def test_by_hand() -> None:
    """X = [[2, 2, 0], [2, 5, 3], [0, 3, 9]]: both neighbours 5 + 9 + 2 * 3, ends 11, all 2 + 5 + 9 + 4 + 6."""
    strategy = Banded([[1.0, 2.0, 3.0], [1.0, 1.0, 0.0]])
    assert sensitivity(strategy, MinSeparation(3, 1, 2)).value ** 2 == pytest.approx(20)
    assert sensitivity(strategy, MinSeparation(3, 2)).value ** 2 == pytest.approx(11)
    assert sensitivity(strategy, MinSeparation(3, 1)).value ** 2 == pytest.approx(26)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_brute_force(seed: int, signed: bool) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 11))
    p, b = (int(v) for v in rng.integers(1, n + 1, 2))
    strategy = random_banded(rng, n, p, signed=signed)
    gram = banded.gram_of(strategy)
    rules: list[Participation] = [
        SingleEpoch(n), FixedOrder(n, -(-n // b), b), MinSeparation(n, b), MinSeparation(n, b, 2),
        MinSeparation(n, b, 3), KnownOrder([[t % 2, 5 + t % 3] for t in range(n)]),
    ]  # fmt: skip
    rules += [EpochShuffle(k, n // k) for k in (1, 2, 3, n) if n % k == 0 and (n // k) ** k < 500]
    for rule in rules:
        reached = attained_squared(strategy.matrix(), rule.patterns())
        for bound in (banded_bound(gram, rule.pattern), sensitivity(strategy, rule)):
            assert bound.value**2 >= reached * (1 - 1e-13)
            if bound.exact:
                assert bound.value**2 == pytest.approx(reached, rel=1e-9)
        narrow = isinstance(rule, EpochShuffle) and strategy.num_bands <= rule.steps_per_epoch + 1
        narrow |= isinstance(rule, MinSeparation) and strategy.num_bands <= 2 * b
        if narrow:
            assert banded_bound(gram, rule.pattern).exact


@pytest.mark.parametrize(("b", "k"), [(20, 5), (20, None), (12, 7), (7, None), (3, 10), (1, 4)])
def test_random_patterns_at_larger_n(b: int, k: int | None) -> None:
    n, rng = 150, np.random.default_rng(3)
    strategy = random_banded(rng, n, 20, signed=False)
    rule = MinSeparation(n, b, k)
    bound, C = sensitivity(strategy, rule), strategy.matrix()
    for _ in range(200):
        pattern = list(random_separated(rng, n, b, rule.max_participations))
        assert np.square(C[:, pattern].sum(axis=1)).sum() <= bound.value**2 * (1 + 1e-13)
    if b >= 10:
        assert bound.exact


@pytest.mark.parametrize("limit", [None, 30])
def test_the_two_programs_agree(limit: int | None) -> None:
    """As many participations as fit: step by step, and by counting up to that many."""
    strategy = random_banded(np.random.default_rng(4), 90, 5, signed=False)
    gram = banded.gram_of(strategy)
    counted = banded_bound(gram, Separated(90, 3, 29))
    free = banded_bound(gram, Separated(90, 3, limit))
    assert counted.value <= free.value * (1 + 1e-13)
    weights = gram.diagonal(0)
    assert free.value >= np.sqrt(weights[::3].sum())


def test_toeplitz_gram_without_bands() -> None:
    strategy = ToeplitzBanded([2.0, 1.0, -0.5, 0.25], 9)
    X = strategy.matrix().T @ strategy.matrix()
    gram = toeplitz.gram_of(strategy)
    for gap in range(4):
        np.testing.assert_allclose(gram.diagonal(gap), np.diagonal(X, gap), atol=1e-14)


def test_banded_and_toeplitz_banded_agree() -> None:
    toeplitz = ToeplitzBanded(SquareRoot(12).toeplitz_coefficients(), 60)
    strategies: list[Strategy] = [toeplitz, Banded(toeplitz.matrix()), Dense(toeplitz.matrix())]
    order = KnownOrder([[t % 7, 10 + (t * t) % 11] for t in range(60)])
    for rule in (MinSeparation(60, 6), FixedOrder(60, 5, 12), EpochShuffle(5, 12), SingleEpoch(60), order):
        bounds = [sensitivity(strategy, rule) for strategy in strategies]
        assert bounds[0].value == pytest.approx(bounds[1].value, rel=1e-12)
        assert bounds[0].value <= bounds[2].value * (1 + 1e-12)
        assert bounds[0].exact
        assert bounds[1].exact
    units = [unit_sensitivities(strategy, order) for strategy in strategies]
    np.testing.assert_allclose(units[0], units[1], rtol=1e-12)
    np.testing.assert_allclose(units[0], units[2], rtol=1e-12)
