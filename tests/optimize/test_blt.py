"""BLT fits: the closed forms against series, targets, and long runs."""

from functools import partial

import numpy as np
import pytest

from anyorder import workload as W
from anyorder.errors import PlanError
from anyorder.participation import EpochShuffle, FixedOrder, MinSeparation, SingleEpoch
from anyorder.patterns import Participation
from anyorder.strategy import BLT, registry
from anyorder.strategy.blt import BLTLoss, _stepped, fit_blt, fit_blts, series_loss
from anyorder.strategy.fitting import descend
from anyorder.strategy.registry import row_variances, sensitivity
from anyorder.strategy.toeplitz import Problem
from laws.cases import over
from optimize.test_toeplitz import slope
from references import scenario

N = 30
POINT = np.array([-3.0, -0.5, -1.0, -2.0])
CONSTANT = {
    "prefix": {},
    "momentum": {"momentum": 0.8},
    "coupled": {"momentum": 0.8, "weight_decay": 0.1},
    "decoupled": {"momentum": 0.8, "weight_decay": 0.1, "coupled": False},
    "nesterov": {"momentum": 0.8, "weight_decay": 0.1, "nesterov": True},
}
PARTICIPATIONS = [SingleEpoch(N), FixedOrder(N, 3, 10), MinSeparation(N, 7, 3), EpochShuffle(3, 10)]


@over("participation", PARTICIPATIONS)
@pytest.mark.parametrize("options", CONSTANT)
@pytest.mark.parametrize("objective", ["mean", "max", "last"])
def test_closed_form_is_the_series(options: str, participation: Participation, objective: str) -> None:
    A = W.Workload(N, **CONSTANT[options])
    for point in (POINT, POINT + np.array([0, 0, 1.5, 1.5])):  # c_1 below and above 1
        value, gradient = _stepped(BLTLoss(A, participation, objective), point)
        expected, slopes = series_loss(Problem(A, participation, objective), point)
        assert value == pytest.approx(expected, rel=1e-11)
        np.testing.assert_allclose(gradient, slopes, rtol=1e-8, atol=1e-9 * value)


@pytest.mark.parametrize("objective", ["mean", "max", "last"])
def test_gradient_for_a_schedule(objective: str) -> None:
    problem = Problem(W.momentum(N, 0.8, W.cosine(N)), FixedOrder(N, 3, 10), objective)
    value, gradient = series_loss(problem, POINT)
    np.testing.assert_allclose(gradient, slope(lambda x: series_loss(problem, x), POINT), rtol=1e-5, atol=1e-6 * value)


def test_loss_is_what_error_says() -> None:
    A, participation = W.momentum(N, 0.8), MinSeparation(N, 7, 3)
    strategy = BLT(np.exp(-np.exp(POINT[:2])), np.exp(POINT[2:]), N)
    value, _ = _stepped(BLTLoss(A, participation, "mean"), POINT)
    assert value == pytest.approx(registry.rmse(strategy, A, participation) ** 2)


@pytest.mark.parametrize(
    ("n", "k", "b", "buffers", "target", "name"),
    [
        (1000, 10, 100, 1, 12.46, "n1000_k10_b100"),
        (1000, 10, 100, 2, 12.20, "n1000_k10_b100"),
        (2000, 20, 100, 2, 21.38, "cifar_2000_k20_b100"),
        (2052, 6, 342, 2, 9.19, "so_2052_k6_b342"),
    ],
)
def test_mean_error_targets(n: int, k: int, b: int, buffers: int, target: float, name: str) -> None:
    A, participation = W.prefix_sum(n), MinSeparation(n, b, k)
    found = fit_blt(A, participation, buffers)
    loss = registry.rmse(found, A, participation)
    assert loss <= target
    assert loss <= scenario(name, f"BLT{buffers}_mean")["rmse"] * (1 + 1e-6)


def test_fit_knows_the_workload() -> None:
    participation = FixedOrder(1000, 10, 100)
    A = W.momentum(1000, 0.9)
    assert registry.rmse(fit_blt(A, participation, 2), A, participation) <= 92.1
    B = W.momentum(1000, 0.9, W.cosine(1000))
    assert registry.rmse(fit_blt(B, participation, 2), B, participation) <= 69.25
    assert registry.last_error(fit_blt(B, participation, 2, "last"), B, participation) <= 68.03


@pytest.mark.parametrize(
    ("participation", "objective"), [(p, ("mean", "last")[i % 2]) for i, p in enumerate(PARTICIPATIONS)], ids=str
)
def test_more_buffers_are_never_worse(participation: Participation, objective: str) -> None:
    A = W.momentum(N, 0.5)
    model = BLTLoss(A, participation, objective)
    losses = []
    for buffers in (1, 2, 3):
        found = fit_blt(A, participation, buffers, objective)
        losses.append(float(model.sens(found.decays[None], found.scales[None])[0]))
        losses[-1] *= float(model.error(found.decays[None], found.scales[None])[0])
    assert losses[2] <= losses[1] * (1 + 1e-9) <= losses[0] * (1 + 1e-8)


def test_a_million_steps() -> None:
    n = 1_000_000
    A = W.prefix_sum(n)
    found = fit_blt(A, SingleEpoch(n), 4)
    assert registry.rmse(found, A, SingleEpoch(n)) < 1.01 * (np.log(n) / np.pi + 0.9)
    often = fit_blt(A, FixedOrder(n, 10, n // 10), 2)
    assert registry.rmse(often, A, FixedOrder(n, 10, n // 10)) < 0.05 * np.sqrt(10 * n / 2)


def test_a_long_schedule_is_cut_into_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 150
    A, participation = W.momentum(n, 0.9, W.cosine(n)), FixedOrder(n, 3, 50)
    exact = fit_blt(A, participation, 2)
    monkeypatch.setattr("anyorder.strategy.blt.DENSE_STEPS", 50)
    for objective, loss in (("mean", registry.rmse), ("last", registry.last_error)):
        approximate = fit_blt(A, participation, 2, objective)
        assert loss(approximate, A, participation) < 1.01 * loss(exact, A, participation)
    with pytest.raises(PlanError, match="custom workload"):
        fit_blt(W.custom(np.tri(n) + np.eye(n) * np.arange(n)), participation, 1)


def test_decays_and_scales_stream() -> None:
    found = fit_blt(W.prefix_sum(N), MinSeparation(N, 7, 3), 3)
    assert (found.decays > 0).all()
    assert (found.decays <= 1).all()
    assert (found.scales > 0).all()
    assert (np.diff(found.decays) < 0).all()
    assert sensitivity(found, MinSeparation(N, 7, 3)).exact


def test_variances_of_long_runs() -> None:
    strategy = BLT([0.9, 0.3], [0.2, 0.1], N)
    workloads = [W.Workload(N, **options) for options in CONSTANT.values()]
    workloads += [W.Workload(N, learning_rates=W.cosine(N), **options) for options in CONSTANT.values()]
    workloads += [W.weighted(W.momentum(N, 0.5, W.cosine(N)), np.arange(1.0, N + 1))]
    K = strategy.noising_matrix()
    expected = [np.square(A.matrix() @ K).sum(axis=1) for A in workloads]
    for A, variances in zip(workloads, expected, strict=True):
        np.testing.assert_allclose(row_variances(strategy, A), variances, rtol=1e-10)


@pytest.mark.parametrize("participation", [SingleEpoch(600), EpochShuffle(5, 120)], ids=repr)
def test_no_random_start_ends_lower(participation: Participation) -> None:
    """Where more buffers gain nothing, none was missed."""
    A = W.prefix_sum(600)
    found = fit_blts(A, participation, 3)
    loss, rng = partial(_stepped, BLTLoss(A, participation, "mean")), np.random.default_rng(0)
    least = np.inf
    for _ in range(8):
        start = np.concatenate([rng.uniform(-7.5, 1.0, 3), rng.uniform(-4.0, 0.0, 3)])
        least = min(least, descend(loss, start, restarts=1)[1])
    best = found[-1]
    value, _ = loss(np.concatenate([np.log(-np.log(best.decays)), np.log(best.scales)]))
    assert value <= least * (1 + 1e-5)


@pytest.mark.parametrize("objective", ["mean", "max", "last"])
@pytest.mark.parametrize("n", [1, 3])
def test_of_few_steps_there_is_a_fit(n: int, objective: str) -> None:
    """Starts at the square root took the log of a negative number: "math domain error"."""
    for momentum in (0.0, 0.99):
        for participation in (SingleEpoch(n), MinSeparation(n, 1), FixedOrder(n, 2, -(-n // 2))):
            found = fit_blts(W.Workload(n, momentum=momentum), participation, 4, objective)
            assert 1 <= len(found) <= 4
            assert all(np.isfinite(one.matrix()).all() for one in found)
