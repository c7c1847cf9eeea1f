"""Errors: published values of the tree, and the dense definition."""

import numpy as np
import pytest

from anyorder import error
from anyorder.errors import PlanError
from anyorder.participation import FixedOrder, MinSeparation, SingleEpoch
from anyorder.sensitivity import sensitivity
from anyorder.strategy import Independent, SquareRoot, Tree
from anyorder.workload import Workload, momentum, prefix_sum
from references import load


def test_tree_references() -> None:
    values = load("state_of_the_art.json")["computed_here"]["tree"]["values"]
    for size, value in values.items():
        n = int(size)
        for estimator, key in (("vanilla", "naive"), ("online", "honaker_online")):
            arguments = (Tree(n, estimator), prefix_sum(n), SingleEpoch(n))
            assert error.rmse(*arguments) == pytest.approx(value[f"{key}_rmse"], rel=1e-10)
            assert error.max_loss(*arguments) == pytest.approx(value[f"{key}_max"], rel=1e-10)


def test_independent_in_closed_form() -> None:
    """Variances 1, 2, .., n, times k."""
    arguments = (Independent(60), prefix_sum(60), FixedOrder(60, 4, 15))
    assert error.rmse(*arguments) == pytest.approx(np.sqrt(4 * 61 / 2), rel=1e-12)
    assert error.max_loss(*arguments) == error.last_loss(*arguments) == pytest.approx(np.sqrt(4 * 60), rel=1e-12)


@pytest.mark.parametrize(
    "strategy", [Independent(700), SquareRoot(700), Tree(700, "online", (300,), True), Tree(700, "full")]
)
def test_definition(strategy: Independent) -> None:
    """|| (A K)[t] ||, with more columns than are multiplied at once, and the sensitivity of the participation."""
    workload = momentum(700, 0.9, np.linspace(1, 0.1, 700))
    B = workload.matrix() @ strategy.noising_matrix()
    norms = np.linalg.norm(B, axis=1)
    np.testing.assert_allclose(error.row_variances(strategy, workload), norms**2, rtol=1e-10)
    rule = MinSeparation(700, 200, 2)
    sens = sensitivity(strategy, rule).value
    assert error.rmse(strategy, workload, rule) == pytest.approx(sens * np.linalg.norm(B) / np.sqrt(700), rel=1e-10)
    assert error.max_loss(strategy, workload, rule) == pytest.approx(sens * norms.max(), rel=1e-10)
    assert error.last_loss(strategy, workload, rule) == pytest.approx(sens * norms[-1], rel=1e-10)


def test_prefix_sum_in_closed_form_is_the_dense_one() -> None:
    strategy = Tree(100, "full", (37,), True)
    barely_another = Workload(100, momentum=1e-300)
    assert not barely_another.is_prefix_sum
    dense = error.row_variances(strategy, barely_another)
    np.testing.assert_allclose(error.row_variances(strategy, prefix_sum(100)), dense, rtol=1e-11)


def test_other_numbers_of_steps_are_refused() -> None:
    with pytest.raises(PlanError, match="got 9 and 8"):
        error.row_variances(Tree(8), prefix_sum(9))
    with pytest.raises(PlanError, match="got 9 and 8"):
        error.rmse(Tree(8), prefix_sum(8), SingleEpoch(9))
