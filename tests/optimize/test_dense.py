"""The dense optimum against published optima, closed forms, and its own certificate."""

import math
import warnings

import numpy as np
import pytest

from anyorder import workload as W
from anyorder.errors import PlanError
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, PoissonSampling, SingleEpoch
from anyorder.patterns import Participation
from anyorder.strategy import Dense, registry
from anyorder.strategy.dense import Optimum, certified_bound, fit_dense, least_error, optimum
from anyorder.strategy.fitting import disjoint
from anyorder.strategy.registry import sensitivity
from references import load, reference

# Root-scale optima of the prefix sum, one participation, by an independent dual ascent: within 1e-8 of optimal.
OPTIMA = {
    "max": {2: 1.1547005384, 16: 1.7044802441, 64: 2.1113666548, 256: 2.5327161370},
    "mean": {2: 1.1441228056, 16: 1.6894036820, 64: 2.0998564722, 256: 2.5244144147},
}


def solve(A: W.Workload, participation: Participation, objective: str = "mean", tolerance: float = 1e-6) -> Optimum:
    return optimum(A.matrix(), disjoint(participation), objective=objective, tolerance=tolerance)


@pytest.mark.parametrize(("objective", "n"), [(o, n) for o, values in OPTIMA.items() for n in values])
def test_published_optima_are_reached(objective: str, n: int) -> None:
    found = solve(W.prefix_sum(n), SingleEpoch(n), objective, 1e-7)
    best = OPTIMA[objective][n]
    assert found.gap < 1e-7
    assert found.lower <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.upper <= best * (1 + 1e-6)


def test_two_steps_have_a_closed_form() -> None:
    assert solve(W.prefix_sum(2), SingleEpoch(2), "max", 1e-9).upper == pytest.approx(2 / math.sqrt(3), rel=1e-9)


@pytest.mark.parametrize("name", ["prefix_n8", "prefix_n64", "prefix_n256", "momentum_n64", "momentum_n256"])
def test_agrees_with_an_independent_solver(name: str) -> None:
    values = load("dense_optima.json")["values"][name]
    n = int(name.split("_n")[1])
    A = W.momentum(n, 0.95, W.linear_cooldown(n)) if name.startswith("momentum") else W.prefix_sum(n)
    found = solve(A, SingleEpoch(n))
    assert found.gap < 1.5e-6
    assert found.lower <= values["rmse"] * (1 + 1e-9)
    assert found.upper <= values["rmse"] * (1 + 1e-6)
    assert found.upper >= math.sqrt(values["lower_bound"]) * (1 - 1e-9)


@pytest.mark.parametrize(("name", "n", "k"), [("dense_prefix_n16_k4", 16, 4), ("dense_prefix_n128_k8", 128, 8)])
def test_many_epochs_are_no_worse_than_published(name: str, n: int, k: int) -> None:
    values = reference(name)
    found = solve(W.prefix_sum(n), FixedOrder(n, k, n // k))
    assert found.gap < 1e-6
    assert found.upper <= values["sensitivity"] * math.sqrt(values["mean_error"]) * (1 + 1e-6)


@pytest.mark.parametrize("objective", ["mean", "max"])
@pytest.mark.parametrize(
    "participation",
    [SingleEpoch(24), FixedOrder(24, 4, 6), FixedOrder(22, 4, 6), KnownOrder([[t % 5] for t in range(24)])],
    ids=lambda p: p.describe(),
)
def test_the_claim_is_the_truth(participation: Participation, objective: str) -> None:
    n = participation.n
    A = W.momentum(n, 0.8, W.cosine(n, 0.1))
    tolerance = {"mean": 1e-6, "max": 1e-2}[objective]
    found = solve(A, participation, objective, tolerance)
    strategy = Dense(found.C)
    bound = sensitivity(strategy, participation)
    assert bound.value == pytest.approx(1, rel=1e-9)
    assert bound.exact
    loss = {"mean": registry.rmse, "max": registry.max_error}[objective]
    assert found.upper == pytest.approx(loss(strategy, A, participation), rel=1e-9)
    assert found.lower <= found.upper <= found.lower * (1 + tolerance)


@pytest.mark.parametrize("participation", [SingleEpoch(12), FixedOrder(12, 3, 4), FixedOrder(12, 12, 1)], ids=repr)
def test_no_strategy_is_below_the_bound(participation: Participation) -> None:
    rng = np.random.default_rng(0)
    A = W.momentum(12, 0.5)
    best = solve(A, participation, tolerance=1e-9)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(10):
            C = best.C + size * np.tril(rng.standard_normal((12, 12)))
            np.fill_diagonal(C, np.abs(np.diag(C)))
            assert registry.rmse(Dense(C), A, participation) >= best.lower
            # nor for other signs of the columns, which only the bound over all vectors covers
            signs = np.where(rng.random(12) < 0.5, -1.0, 1.0)
            assert registry.rmse(Dense(np.diag(signs) @ C @ np.diag(signs)), A, participation) >= best.lower


def test_a_unit_in_every_step_needs_orthogonal_columns() -> None:
    A = W.momentum(20, 0.7)
    found = solve(A, FixedOrder(20, 20, 1), tolerance=1e-9)
    columns = np.sqrt(np.square(A.matrix()).sum(axis=0))
    assert found.upper == pytest.approx(columns.sum() / math.sqrt(20), rel=1e-8)
    np.testing.assert_allclose(found.C, np.diag(np.diag(found.C)), atol=1e-6)


def test_steps_of_rate_zero_do_no_harm() -> None:
    n = 16
    found = solve(W.momentum(n, 0.5, np.r_[np.zeros(4), np.ones(n - 8), np.zeros(4)]), SingleEpoch(n), tolerance=1e-4)
    assert np.isfinite(found.C).all()
    assert found.gap < 1e-3


@pytest.mark.parametrize("rank", [6, 20])
def test_certificate_is_close_to_the_nuclear_norm_and_never_above(rank: int) -> None:
    rng = np.random.default_rng(rank)
    for size in (1e-6, 1.0):
        A = rng.standard_normal((20, rank)) @ (rng.standard_normal((rank, 20)) * np.geomspace(1, size, 20))
        L = np.diag(rng.random(20) + 0.1)
        exact = np.linalg.svd(A @ L, compute_uv=False).sum() / math.sqrt(2.5)
        bound = certified_bound(A, L, 2.5)
        assert exact * (1 - 1e-8) <= bound <= exact


def test_shuffled_epochs_start_anew() -> None:
    participation = EpochShuffle(3, 8)
    A = W.prefix_sum(24)
    found = fit_dense(A, participation)
    X = found.C.T @ found.C
    assert np.abs(X[:8, 8:]).max() < 1e-12
    assert sensitivity(Dense(found.C), participation).value == pytest.approx(1, rel=1e-9)
    assert found.lower <= found.upper == pytest.approx(registry.rmse(Dense(found.C), A, participation), rel=1e-9)
    tilted = Dense(found.C * np.repeat([1.0, 1.1, 1.0], 8))  # another division between the epochs
    assert registry.rmse(tilted, A, participation) > found.upper


def test_separated_participations_do_not_meet() -> None:
    participation = MinSeparation(24, 6, 4)
    found = fit_dense(W.prefix_sum(24), participation)
    gaps = np.abs(np.subtract.outer(range(24), range(24)))
    assert np.abs((found.C.T @ found.C)[gaps >= 6]).max() < 1e-12
    bound = sensitivity(Dense(found.C), participation)
    assert bound.exact
    assert bound.value == pytest.approx(1, rel=1e-7)  # the bands are float32
    assert found.lower < found.upper < 1.2 * found.lower


@pytest.mark.parametrize("participation", [SingleEpoch(24), EpochShuffle(2, 12), MinSeparation(24, 12)], ids=repr)
def test_objectives_are_traded(participation: Participation) -> None:
    A = W.prefix_sum(24)
    strategies = {o: Dense(fit_dense(A, participation, o).C) for o in ("mean", "max", "last")}
    for objective, loss in {"mean": registry.rmse, "max": registry.max_error, "last": registry.last_error}.items():
        values = {o: loss(strategy, A, participation) for o, strategy in strategies.items()}
        assert values[objective] == min(values.values()), (objective, values)


def test_poisson_sampling_is_refused() -> None:
    with pytest.raises(PlanError, match="independent noise only"):
        disjoint(PoissonSampling(8, 0.1))


def test_a_gap_above_the_tolerance_is_said() -> None:
    """At kinks of the maximum; by the roundings of a processor 300 iterations end near 1e-3 or a few times below."""
    A, participation = W.momentum(48, 0.95), FixedOrder(48, 6, 8)
    with pytest.warns(UserWarning, match=r"gap of .* not to the tolerance 1\.0e-06"):
        found = fit_dense(A, participation, "max", tolerance=1e-6)
    assert found.gap > 1e-6
    C, K = found.C, np.linalg.inv(found.C)
    errors = np.square(A.matrix() @ K).sum(axis=1)
    assert found.upper == pytest.approx(np.sqrt(errors.max()) * sensitivity(Dense(C), participation).value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit_dense(A, participation, "max", tolerance=2 * found.gap).gap <= 2 * found.gap
        assert fit_dense(W.momentum(48, 0.5), participation, "max").gap <= 1e-3


@pytest.mark.parametrize("participation", [FixedOrder(300, 5, 60), SingleEpoch(300)], ids=repr)
def test_two_iterations_from_a_coarse_start_are_near(participation: Participation) -> None:
    A, groups = W.momentum(300, 0.9), disjoint(participation)
    whole = optimum(A.matrix(), groups, tolerance=1e-3)
    quick = least_error(A.matrix(), groups, objective="mean", tolerance=1e-3, max_iterations=2)
    assert quick <= whole.upper
    assert quick > 0.995 * whole.lower  # from equal V two iterations are 2 % off
