"""Patterns of mixed signs: the semidefinite program from both sides, and what it makes of a sensitivity."""

import numpy as np
import pytest

from anyorder.participation import FixedOrder, KnownOrder, MinSeparation
from anyorder.strategy import BandedInverse, Dense
from anyorder.strategy import sensitivity as bounds
from anyorder.strategy.registry import sensitivity, unit_sensitivities
from anyorder.strategy.sensitivity import GAP, Bound, gram_program, refined
from oracles import attained_squared

PENTAGON = np.array([[1.0 if i == j else np.cos(4 * np.pi * (i - j) / 5) for i in range(5)] for j in range(5)])


def gram(m: int, seed: int) -> np.ndarray:
    C = np.random.default_rng(seed).standard_normal((m, m))
    return C.T @ C


def test_by_hand() -> None:
    """Signs can be aligned: the sum of |X|. X = 3 I - 1 1^T has nothing for signs to gain beyond its eigenvalue."""
    for X in (np.array([[2.0, -1.0], [-1.0, 3.0]]), np.array([[1.0, 0.5, -0.5], [0.5, 1.0, -0.2], [-0.5, -0.2, 1.0]])):
        reached, bound = gram_program(X)
        assert reached == pytest.approx(np.abs(X).sum(), rel=1e-12)
        assert bound == pytest.approx(np.abs(X).sum(), rel=1e-9)
    reached, bound = gram_program(3 * np.eye(3) - np.ones((3, 3)))  # vectors at 120 degrees: 3 * 3
    assert reached == pytest.approx(9.0, rel=1e-9)
    assert 9.0 <= bound * (1 + 1e-15) <= 9.0 * (1 + 1e-8)
    assert gram_program(PENTAGON)[1] == pytest.approx(12.5, rel=1e-9)  # five times its largest eigenvalue, 5 / 2


@pytest.mark.parametrize("m", [3, 6, 12, 30])
def test_both_sides_meet_and_enclose_what_vectors_reach(m: int) -> None:
    for seed in range(5):
        X = gram(m, seed)
        reached, bound = gram_program(X)
        assert reached <= bound <= reached * (1 + GAP)
        assert m == 3 or bound < 0.999 * np.abs(X).sum()
        rng = np.random.default_rng(seed)
        for _ in range(50):
            V = rng.standard_normal((m, 3))
            V /= np.linalg.norm(V, axis=1)[:, None]
            assert np.einsum("ij,ij->", X @ V, V) <= bound
        if m <= 12:
            C = np.linalg.cholesky(X).T
            assert attained_squared(C, [tuple(range(m))]) <= bound * (1 + 1e-13)


def test_an_unfinished_climb_still_gives_an_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_SWEEPS", 20)
    X = gram(60, 0)
    reached, bound = gram_program(X)
    monkeypatch.undo()
    best = gram_program(X)[0]
    assert reached <= best <= bound


def test_signs_that_nearly_align_are_not_taken_for_aligned() -> None:
    """Two gradients at 34 degrees to the third, on either side, reach more than any signs."""
    X = np.array([[10.0, 1.0, 1.0], [1.0, 10.0, -0.6], [1.0, -0.6, 10.0]])
    angles = np.arccos(5 / 6) * np.array([0, 1, -1])
    reached = float((X * np.cos(angles - angles[:, None])).sum())
    assert reached > X.sum() * 1.001
    C = np.linalg.cholesky(X[::-1, ::-1])[::-1, ::-1].T
    assert sensitivity(Dense(C), FixedOrder(3, 3, 1)).value ** 2 >= reached


@pytest.mark.parametrize("n", [20, 24])
def test_sensitivities_of_mixed_signs_are_exact_and_smaller(n: int) -> None:
    C = np.tril(np.random.default_rng(3).standard_normal((n, n)), -1) + 2 * np.eye(n)
    strategy = Dense(C)
    for order in (FixedOrder(n, n // 2, 2), KnownOrder([[t % 2] for t in range(n)])):
        bound = sensitivity(strategy, order)
        X = C.T @ C
        sums = max(np.abs(X[np.ix_(p, p)]).sum() for p in map(list, order.patterns()))
        assert bound.exact
        assert bound.value**2 < 0.99 * sums
        assert bound.value**2 >= attained_squared(C, order.patterns()) * (1 - 1e-13)
    units = unit_sensitivities(strategy, order)
    assert units.max() == pytest.approx(bound.value, rel=1e-12)


def test_no_pattern_is_left_out_where_few_programs_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    C = np.tril(rng.standard_normal((12, 12)), -1) + 2 * np.eye(12)
    rule = MinSeparation(12, 2, 4)
    full = sensitivity(Dense(C), rule)
    monkeypatch.setattr(bounds, "MAX_WORK", 16)
    short = refined(Dense(C), rule.pattern, Bound(100.0, exact=False))
    reached = attained_squared(C, rule.patterns())
    assert short.value >= full.value * (1 - 1e-12)
    assert min(short.value, full.value) ** 2 >= reached * (1 - 1e-13)


def test_banded_inverses_of_mixed_signs_too() -> None:
    strategy = BandedInverse([1.0, -0.9, 0.7, 0.3], 60)
    bound = sensitivity(strategy, FixedOrder(60, 8, 8))
    assert bound.exact
    assert bound.value**2 >= attained_squared(strategy.matrix(), [tuple(range(0, 60, 8))]) * (1 - 1e-13)
