"""The generic route, from X = C^T C."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyorder.errors import ArgumentError, PlanError
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.patterns import PerEpoch
from anyorder.strategy import Dense, Independent, Tree
from anyorder.strategy import sensitivity as bounds
from anyorder.strategy.registry import sensitivity, unit_sensitivities
from anyorder.strategy.sensitivity import Bound, gram_bound
from oracles import attained_squared
from references import load


def example(n: int, *, signed: bool = False, bands: int | None = None) -> Dense:
    """The test matrix of the references."""
    i, j = np.indices((n, n))
    C = np.where(i >= j, (1 + 0.3 * np.cos(1 + i + 2 * j)) / (1 + abs(i - j)), 0.0)
    if signed:
        C = np.where((i > j) & ((i + 2 * j) % 3 == 1), -C, C)
    return Dense(np.where(i - j < (bands or n), C, 0.0))


def test_references() -> None:
    """jax_privacy's values, and an enumeration of sets and signs."""
    values = {v["id"]: v["value"] for v in load("jax_privacy.json")["values"]}
    for signed in (False, True):
        for k in (1, 2, 4):
            key = f"fixed_epoch_sign{int(signed)}_n8_k{k}"
            if key in values:
                got = sensitivity(example(8, signed=signed), FixedOrder(8, k, 8 // k))
                assert got.value == pytest.approx(values[key], rel=1e-9)
    for signed, b, k in [(False, 2, None), (False, 4, None), (False, 1, 3), (True, 4, None)]:
        reference = values[f"dense_minsep_upper_sign{int(signed)}_n8_b{b}_k{k}"]
        got = sensitivity(example(8, signed=signed), MinSeparation(8, b, k))
        # Few patterns are tried one by one: below the other's upper bound, at the enumerated maximum.
        assert got.value == pytest.approx(reference["brute_force_exact"], rel=1e-9)
        assert got.value <= reference["jax_privacy_upper_bound"] * (1 + 1e-12)
    for b in (3, 4):
        got = sensitivity(example(8, bands=3), MinSeparation(8, b))
        assert got.exact
        assert got.value == pytest.approx(values[f"banded_sens_testmat8_bands3_minsep{b}"], rel=1e-9)


def test_signs_that_balance_are_exact() -> None:
    """X_ij < 0 costs as much as X_ij > 0: the unit turns its vector round."""
    C = np.array([[1.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [1.0, -1.0, 1.0]])
    bound = sensitivity(Dense(C), KnownOrder([0, 0, 0]))
    assert bound.exact
    assert bound.value**2 == pytest.approx(np.abs(C.T @ C).sum())
    C[2, 0] = -0.9  # now the three signs contradict each other: three vectors in a plane do not
    bound = sensitivity(Dense(C), KnownOrder([0, 0, 0]))
    assert bound.exact
    assert bound.value**2 == pytest.approx(attained_squared(C, [(0, 1, 2)]), rel=1e-9)
    assert bound.value**2 < np.abs(C.T @ C).sum() - 0.1


@pytest.fixture
def no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns are never few enough to be tried one by one."""
    monkeypatch.setattr(bounds, "_MAX_PATTERNS", 0)


@pytest.mark.usefixtures("no_lists")
@pytest.mark.parametrize("signed", [False, True])
def test_bounds_without_lists_hold(signed: bool) -> None:
    rng = np.random.default_rng(0)
    exact = 0
    for _ in range(150):
        n, b, k = (int(v) for v in (rng.integers(1, 10), rng.integers(1, 6), rng.integers(1, 5)))
        C = np.tril(rng.random((n, n)) ** 3 - (0.3 if signed else 0.0)) + 0.5 * np.eye(n)
        for rule in (MinSeparation(n, b, k), MinSeparation(n, b), EpochShuffle(n, 1), EpochShuffle(1, n)):
            bound = gram_bound(C.T @ C, rule.pattern, terms=n)
            reached = attained_squared(C, rule.patterns())
            assert bound.value**2 >= reached * (1 - 1e-12)
            if bound.exact:
                exact += 1
                assert bound.value**2 == pytest.approx(reached, rel=1e-9)
    assert exact > 100


@pytest.mark.usefixtures("no_lists")
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_epoch_bounds_without_lists_hold(seed: int, k: int, s: int) -> None:
    C = np.tril(np.random.default_rng(seed).standard_normal((k * s, k * s)))
    bound = gram_bound(C.T @ C, PerEpoch(k, s), terms=k * s)
    reached = attained_squared(C, EpochShuffle(k, s).patterns())
    assert bound.value**2 >= reached * (1 - 1e-12)
    assert not bound.exact or bound.value**2 == pytest.approx(reached, rel=1e-9)


@pytest.mark.usefixtures("no_lists")
@pytest.mark.parametrize("k", [None, 3, 2, 1])
def test_banded_with_separated_steps_is_exact(k: int | None) -> None:
    """At most b bands: columns of one unit are orthogonal, and only the diagonal of X counts."""
    strategy = example(12, bands=3, signed=True)
    bound = sensitivity(strategy, MinSeparation(12, 3, k))
    reached = attained_squared(strategy.matrix(), MinSeparation(12, 3, k).patterns())
    assert bound.exact
    assert bound.value**2 == pytest.approx(reached, rel=1e-12)
    unit = strategy.matrix() / np.sqrt(strategy.column_norms_squared())
    assert sensitivity(Dense(unit), MinSeparation(12, 3, 4)).value == pytest.approx(2.0, rel=1e-12)


@pytest.mark.usefixtures("no_lists")
def test_every_step_of_a_positive_matrix_is_exact() -> None:
    strategy = example(30)
    bound = sensitivity(strategy, MinSeparation(30, 1))
    assert bound.exact
    assert bound.value**2 == pytest.approx(np.square(strategy.matrix().sum(axis=1)).sum(), rel=1e-12)


def test_agrees_with_the_tree_by_its_matrix() -> None:
    """The generic route on the nodes of a tree: never below the tree's own exact program."""
    tree = Tree(40, restarts=(13,), completion=True)
    X = tree.matrix().T @ tree.matrix()
    for rule in (MinSeparation(40, 7, 4), MinSeparation(40, 5), EpochShuffle(4, 10), FixedOrder(40, 4, 10)):
        exact, generic = sensitivity(tree, rule), gram_bound(X, rule.pattern, terms=40)
        assert generic.value >= exact.value
        assert not generic.exact or generic.value == pytest.approx(exact.value, rel=1e-9)


def test_units() -> None:
    strategy, order = example(6, signed=True), KnownOrder([0, 1, 0, 2, 1, 1])
    X = np.abs(strategy.matrix().T @ strategy.matrix())
    expected = [np.sqrt(X[np.ix_(p, p)].sum()) for p in ([0, 2], [1, 4, 5], [3])]
    np.testing.assert_allclose(unit_sensitivities(strategy, order), expected, rtol=1e-12)


def test_independent_counts_steps() -> None:
    order = KnownOrder([0, 0, 1, 0, 1, 2, 0])
    assert sensitivity(Independent(7), order) == Bound(2.0, exact=True)
    np.testing.assert_allclose(unit_sensitivities(Independent(7), order) ** 2, [4, 2, 1], rtol=1e-15)
    assert sensitivity(Independent(2000), MinSeparation(2000, 314, 9)).value ** 2 == pytest.approx(7)


def test_refusals() -> None:
    with pytest.raises(PlanError, match="at most 4096 steps, got 5000"):
        bounds.matrix_bound(Independent(5000), SingleEpoch(5000))
    with pytest.raises(ArgumentError, match="order must be a KnownOrder"):
        unit_sensitivities(Independent(3), SingleEpoch(3))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="value"):
        Bound(float("nan"), exact=True)
