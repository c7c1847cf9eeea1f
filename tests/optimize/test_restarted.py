"""BLTs that start anew in every epoch: the loss and its slope, the optimum they come near to, and long runs."""

import numpy as np
import pytest

from anyorder import workload as W
from anyorder.errors import PlanError
from anyorder.optimize import choose, fit
from anyorder.participation import EpochShuffle, FixedOrder
from anyorder.strategy import registry
from anyorder.strategy.dense import fit_dense
from anyorder.strategy.registry import row_variances, sensitivity
from anyorder.strategy.restarted_blt import RestartedBLT, _EpochLoss, epoch_gram, fits_restarted
from optimize.test_toeplitz import slope

POINT = np.array([-3.0, -0.5, -1.0, -2.0, -0.3])
WORKLOADS = {
    "prefix": {},
    "schedule": {"momentum": 0.8, "learning_rates": np.linspace(1.0, 0.1, 60)},
    "nesterov": {"momentum": 0.8, "weight_decay": 0.1, "nesterov": True},
    "decoupled": {"momentum": 0.5, "weight_decay": 0.1, "coupled": False, "weights": np.linspace(0.2, 1.0, 60)},
}

every_workload = pytest.mark.parametrize("options", WORKLOADS)


@every_workload
@pytest.mark.parametrize("epoch", [0, 2])
def test_loss_is_that_of_the_strategy(options: str, epoch: int) -> None:
    M = epoch_gram(W.Workload(60, **WORKLOADS[options]), 20 * epoch, 20)
    loss = _EpochLoss(M)
    value, gradient = loss(POINT)
    parameters = [np.exp(-np.exp(POINT[:2]))], [np.exp(POINT[2:4])], [np.exp(POINT[4])], [1.0]
    K = RestartedBLT(*parameters, 20, 20).noising_matrix()
    assert value == pytest.approx(float(np.trace(K.T @ M @ K)), rel=1e-11)
    np.testing.assert_allclose(gradient, slope(lambda x: loss(x), POINT), rtol=1e-5, atol=1e-6 * value)


@every_workload
@pytest.mark.parametrize(("start", "s"), [(0, 20), (20, 20), (40, 20), (7, 1)])
def test_later_steps_are_seen_through_velocity_and_iterate(
    options: str, start: int, s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    A = W.Workload(60, **WORKLOADS[options])
    whole = A.matrix()[:, start : start + s]
    np.testing.assert_allclose(epoch_gram(A, start, s), whole.T @ whole, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr("anyorder.strategy.restarted_blt.DENSE_STEPS", 10)
    np.testing.assert_allclose(epoch_gram(A, start, s), whole.T @ whole, rtol=1e-8, atol=1e-9)


@every_workload
def test_variances_step_by_step(options: str) -> None:
    A = W.Workload(60, **WORKLOADS[options])
    strategy = RestartedBLT([[0.9, 0.4]] * 3, [[0.2, 0.3]] * 3, [0.9, 0.5, 0.0], [1.0, 0.7, 0.4], 60, 20)
    expected = np.square(A.matrix() @ strategy.noising_matrix()).sum(axis=1)
    np.testing.assert_allclose(row_variances(strategy, A), expected, rtol=1e-10)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_near_the_dense_optimum_of_its_kind(momentum: float) -> None:
    """3 % from all C that start anew, where a BLT that goes on is 15 % and more away."""
    A, participation = W.momentum(240, momentum), EpochShuffle(4, 60)
    best = fit_dense(A, participation).upper
    losses = [registry.rmse(strategy, A, participation) for strategy in fits_restarted(A, participation, 3)]
    assert losses == pytest.approx(sorted(losses, reverse=True), rel=1e-9)
    assert losses[0] < 1.08 * best
    assert losses[1] < 1.03 * best
    assert best <= losses[2] * (1 + 1e-6)
    blt = registry.rmse(fit("blt", A, participation, buffers=3), A, participation)
    assert blt > 1.15 * losses[1]


def test_the_maximum_and_the_last_are_fitted_where_asked() -> None:
    A, participation = W.momentum(240, 0.9), EpochShuffle(4, 60)
    mean = fit("restarted_blt", A, participation, buffers=2)
    for objective, loss, factor in (("max", registry.max_error, 0.89), ("last", registry.last_error, 0.81)):
        found = fit("restarted_blt", A, participation, objective, buffers=2)
        assert loss(found, A, participation) < factor * loss(mean, A, participation)
        assert sensitivity(found, participation).value == pytest.approx(1)


def test_shares_are_the_best() -> None:
    A, participation = W.prefix_sum(60), EpochShuffle(3, 20)
    best = fit("restarted_blt", A, participation, buffers=1)
    assert isinstance(best, RestartedBLT)
    assert np.square(best.shares).sum() == pytest.approx(1)
    assert sensitivity(best, participation).value == pytest.approx(1)
    least = registry.rmse(best, A, participation)
    for e in range(3):
        for factor in (0.9, 1.1):
            shares = best.shares * np.where(np.arange(3) == e, factor, 1.0)
            other = RestartedBLT(best.decays, best.scales, best.totals, shares, 60, 20)
            assert registry.rmse(other, A, participation) > least


def test_many_epochs_share_their_fits() -> None:
    A, participation = W.prefix_sum(400), EpochShuffle(40, 10)
    found = fit("restarted_blt", A, participation, buffers=1)
    assert isinstance(found, RestartedBLT)
    assert found.num_epochs == 40
    assert len(np.unique(found.decays)) == 8
    assert registry.rmse(found, A, participation) < 1.1 * fit_dense(A, participation).upper


def test_long_runs_are_chosen() -> None:
    participation = EpochShuffle(44, 100)  # of more steps than matrices are made of
    A = W.momentum(participation.n, 0.9)
    found = choose(A, participation, max_state=2, max_cost=4.0)
    assert found[0].name == "restarted blt, 1 buffer"  # within 1 % of two
    assert found[0].exact
    assert found[0].loss < 0.95 * next(c.loss for c in found if c.name.startswith("blt"))
    names = {c.name for c in choose(W.prefix_sum(60), EpochShuffle(3, 20), max_state=1)}
    assert "blt, 1 buffer" in names
    assert not any(name.startswith("restarted") for name in names)


def test_other_orders_are_refused() -> None:
    with pytest.raises(PlanError, match="EpochShuffle, got FixedOrder"):
        fit("restarted_blt", W.prefix_sum(20), FixedOrder(20, 2, 10), buffers=1)
    with pytest.raises(PlanError, match="at most 2048 steps, got 3000"):
        fit("restarted_blt", W.prefix_sum(6000), EpochShuffle(2, 3000), buffers=1)
