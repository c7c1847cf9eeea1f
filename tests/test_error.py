"""Errors: published values of the tree, and the dense definition."""

import math
import time
from itertools import product

import numpy as np
import pytest

from anyorder.errors import PlanError
from anyorder.participation import EpochShuffle, FixedOrder, MinSeparation, SingleEpoch
from anyorder.strategy import (
    BLT,
    Banded,
    BandedInverse,
    Independent,
    SquareRoot,
    Strategy,
    ToeplitzBanded,
    Tree,
    registry,
)
from anyorder.strategy.registry import sensitivity
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.restarted_blt import RestartedBLT
from anyorder.workload import GivenWorkload, Workload, custom, momentum, prefix_sum
from laws.cases import STRATEGIES
from references import load


def test_tree_references() -> None:
    values = load("state_of_the_art.json")["computed_here"]["tree"]["values"]
    for size, value in values.items():
        n = int(size)
        for estimator, key in (("vanilla", "naive"), ("online", "honaker_online")):
            arguments = (Tree(n, estimator), prefix_sum(n), SingleEpoch(n))
            assert registry.rmse(*arguments) == pytest.approx(value[f"{key}_rmse"], rel=1e-10)
            assert registry.max_error(*arguments) == pytest.approx(value[f"{key}_max"], rel=1e-10)


def test_independent_in_closed_form() -> None:
    """Variances 1, 2, .., n, times k."""
    arguments = (Independent(60), prefix_sum(60), FixedOrder(60, 4, 15))
    assert registry.rmse(*arguments) == pytest.approx(np.sqrt(4 * 61 / 2), rel=1e-12)
    assert (
        registry.max_error(*arguments) == registry.last_error(*arguments) == pytest.approx(np.sqrt(4 * 60), rel=1e-12)
    )


@pytest.mark.parametrize(
    "strategy", [Independent(700), SquareRoot(700), Tree(700, "online", (300,), True), Tree(700, "full")]
)
def test_definition(strategy: Independent) -> None:
    """|| (A K)[t] ||, with more columns than are multiplied at once, and the sensitivity of the participation."""
    workload = momentum(700, 0.9, np.linspace(1, 0.1, 700))
    B = workload.matrix() @ strategy.noising_matrix()
    norms = np.linalg.norm(B, axis=1)
    np.testing.assert_allclose(registry.row_variances(strategy, workload), norms**2, rtol=1e-10)
    rule = MinSeparation(700, 200, 2)
    sens = sensitivity(strategy, rule).value
    assert registry.rmse(strategy, workload, rule) == pytest.approx(sens * np.linalg.norm(B) / np.sqrt(700), rel=1e-10)
    assert registry.max_error(strategy, workload, rule) == pytest.approx(sens * norms.max(), rel=1e-10)
    assert registry.last_error(strategy, workload, rule) == pytest.approx(sens * norms[-1], rel=1e-10)


def test_prefix_sum_in_closed_form_is_the_dense_one() -> None:
    strategy = Tree(100, "full", (37,), True)
    barely_another = Workload(100, momentum=1e-300)
    assert not barely_another.is_prefix_sum
    dense = registry.row_variances(strategy, barely_another)
    np.testing.assert_allclose(registry.row_variances(strategy, prefix_sum(100)), dense, rtol=1e-11)


def schedules(n: int) -> dict[str, Workload]:
    rng = np.random.default_rng(n)
    rates = rng.uniform(0, 1, n)
    rates[n // 2 :: 7] = 0.0 if n > 1 else 1.0
    weights = rng.uniform(0, 2, n) * (np.arange(n) != 1)
    return {
        "prefix sum": prefix_sum(n),
        "momentum": Workload(n, momentum=0.9),
        "nesterov": Workload(n, momentum=0.9, nesterov=True, learning_rates=rates),
        "weight decay": Workload(n, momentum=0.8, weight_decay=0.1, learning_rates=np.full(n, 0.5)),
        "nesterov and weight decay": Workload(n, momentum=0.8, weight_decay=0.1, nesterov=True, weights=weights),
        "decoupled": Workload(n, momentum=0.8, weight_decay=0.3, coupled=False, nesterov=True, learning_rates=rates),
        "coupled": Workload(n, momentum=0.8, weight_decay=0.3, learning_rates=rates, weights=weights),
        "no momentum": Workload(n, learning_rates=rates, weight_decay=0.5),
        "custom": custom(np.tril(rng.normal(size=(n, n))) + np.eye(n)),
        "custom, Toeplitz": custom(np.tri(n) + np.eye(n)),
    }


def slowly(workload: Workload, rows: np.ndarray) -> np.ndarray:
    """diag(weights) A @ rows by the definition of the optimizer."""
    if isinstance(workload, GivenWorkload):
        return workload.weights[:, None] * (workload.entries @ rows)
    beta, decay, coupled = workload.momentum, workload.weight_decay, workload.coupled
    m, p, result = np.zeros(rows.shape[1]), np.zeros(rows.shape[1]), []
    for g, rate in zip(rows, workload.learning_rates, strict=True):
        h = g - decay * p if coupled else g
        m = beta * m + h
        u = h + beta * m if workload.nesterov else m
        p = (p if coupled else (1 - rate * decay) * p) + rate * u
        result.append(p)
    return workload.weights[:, None] * np.array(result)


def test_every_strategy_with_every_workload() -> None:
    for n, name in product([1, 2, 7, 65], STRATEGIES):
        strategy = STRATEGIES[name](n)
        for scaled in (strategy, Rescaled(strategy, np.linspace(2, 0.5, n))):
            K = scaled.noising_matrix()
            for words, workload in schedules(n).items():
                expected = np.square(slowly(workload, K)).sum(axis=1)
                np.testing.assert_allclose(
                    registry.row_variances(scaled, workload), expected, rtol=1e-10, atol=1e-300, err_msg=words
                )


@pytest.mark.parametrize("name", ["square root", "banded inverse mixed"])
def test_columns_of_a_long_series_are_made_in_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, workload = STRATEGIES[name](100), schedules(100)
    expected = [registry.row_variances(strategy, one) for one in workload.values()]
    monkeypatch.setattr(registry, "DENSE_STEPS", 20)
    for one, values in zip(workload.values(), expected, strict=True):
        np.testing.assert_allclose(registry.row_variances(strategy, one), values, rtol=1e-12)


def banded(n: int, bands: int) -> Banded:
    lags, columns = np.indices((bands, n))
    return Banded(np.where(lags + columns < n, SquareRoot(bands).toeplitz_coefficients()[:, None], 0.0))


LONG = 100_000
BLTS = ([0.999, 0.9, 0.5], [0.01, 0.1, 0.2])


@pytest.mark.parametrize(
    "strategy",
    [
        BLT(*BLTS, LONG), banded(LONG, 32), ToeplitzBanded(SquareRoot(32).toeplitz_coefficients(), LONG),
        BandedInverse.from_square_root(prefix_sum(LONG), 32), Tree(LONG), Tree(LONG, "full"),
        Tree(LONG, "online", (30_000, 60_000), True), Rescaled(BLT(*BLTS, LONG), np.linspace(1, 2, LONG)),
        RestartedBLT([BLTS[0]] * 4, [BLTS[1]] * 4, [0.5] * 4, [0.5] * 4, LONG, LONG // 4),
    ],
    ids=repr,
)  # fmt: skip
def test_long_runs_take_a_moment(strategy: Strategy) -> None:
    """Processor time, which other programs do not add to; the last iterate against what its own row says."""
    for workload in (prefix_sum(LONG), Workload(LONG, momentum=0.9), momentum(LONG, 0.9, np.linspace(1, 0, LONG))):
        start = time.process_time()
        found = registry.rmse(strategy, workload, EpochShuffle(4, LONG // 4))
        assert time.process_time() - start < 2.0
        assert 0 < found < math.inf
    found = registry.row_variances(strategy, prefix_sum(LONG))[:300]
    np.testing.assert_allclose(found, np.square(np.cumsum(first_rows(strategy, 300), axis=0)).sum(axis=1), rtol=1e-9)


def first_rows(strategy: Strategy, count: int) -> np.ndarray:
    """The first rows of K, of a long strategy, without columns of zeros."""
    if isinstance(strategy, Tree):
        terms = [strategy.terms(t) for t in range(count)]
        used = np.unique(np.concatenate([one.rows for one in terms]))
        rows = np.zeros((count, len(used)))
        for row, one in zip(rows, terms, strict=True):
            np.add.at(row, np.searchsorted(used, one.rows), one.coefficients)
        return rows
    rows, state = np.zeros((count, count)), np.zeros((len(strategy.recurrence(0).h), count))
    for t, z in enumerate(np.eye(count)):
        F, G, h, g = strategy.recurrence(t)
        rows[t] = h @ state + g * z
        state = F @ state + np.outer(G, z)
    return rows


def test_other_numbers_of_steps_are_refused() -> None:
    with pytest.raises(PlanError, match="got 9 and 8"):
        registry.row_variances(Tree(8), prefix_sum(9))
    with pytest.raises(PlanError, match="got 9 and 8"):
        registry.rmse(Tree(8), prefix_sum(8), SingleEpoch(9))


def test_a_series_that_is_scaled_is_none_any_more() -> None:
    """Beyond the steps for which columns are made, only what is Toeplitz throughout has a way."""
    n = registry.COLUMN_STEPS + 1
    for workload, plain in ((prefix_sum(n), True), (momentum(n, 0.9, np.linspace(1, 0, n)), False)):
        assert registry.has_variances(SquareRoot(n), workload) == plain
        scaled = Rescaled(SquareRoot(n), np.linspace(1, 2, n))
        assert not registry.has_variances(scaled, workload)
        with pytest.raises(PlanError, match="must be made from the matrix"):
            registry.row_variances(scaled, workload)
