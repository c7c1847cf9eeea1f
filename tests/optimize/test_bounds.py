"""Lower bounds: below what any strategy reaches, for every participation, the cheap ones too; and not far below."""

import numpy as np
import pytest

from anyorder import workload as W
from anyorder.errors import PlanError
from anyorder.optimize import lower_bound
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.patterns import Participation
from anyorder.strategy import BLT, BandedInverse, Dense, Independent, SquareRoot, Tree, registry
from anyorder.strategy.dense import fit_dense

LOSSES = {"mean": registry.rmse, "max": registry.max_error, "last": registry.last_error}
N = 54
WORKLOADS = {
    "prefix": W.prefix_sum(N),
    "momentum": W.momentum(N, 0.9),
    "schedule": W.momentum(N, 0.9, W.cosine(N)),
    "decay": W.Workload(N, momentum=0.5, learning_rates=np.full(N, 0.5), weight_decay=0.05),
    "weights": W.weighted(W.prefix_sum(N), np.linspace(0.1, 1, N)),
}
PARTICIPATIONS = {
    "one": SingleEpoch(N),
    "fixed": FixedOrder(N, 3, 18),
    "fixed, cut": FixedOrder(N, 3, 22),
    "often": FixedOrder(N, 27, 2),
    "always": FixedOrder(N, N, 1),
    "separated": MinSeparation(N, 11, 4),
    "shuffled": EpochShuffle(3, 18),
    "known": KnownOrder([[t % 7, 7 + t % 11] for t in range(N)]),
}


@pytest.mark.parametrize(
    ("participation", "workload"), list(zip(PARTICIPATIONS, 3 * ["momentum", "schedule", "decay"], strict=False))
)
def test_no_strategy_goes_below(participation: str, workload: str) -> None:
    A, p = WORKLOADS[workload], PARTICIPATIONS[participation]
    strategies = [
        Independent(N),
        BLT([0.95, 0.5], [0.1, 0.3], N),
        BandedInverse.from_square_root(W.prefix_sum(N), 8),
        SquareRoot(N),
        Tree(N, "full"),
        Dense(fit_dense(A, p, tolerance=1e-2).C),
    ]
    for objective, loss in LOSSES.items():
        least = min(loss(strategy, A, p) for strategy in strategies)
        full = lower_bound(A, p, objective)
        cheap = lower_bound(A, p, objective, resolution=10)
        assert 0 < full <= least
        assert 0 < cheap <= full * (1 + 1e-9)
        if objective == "mean":
            assert least <= 1.5 * full  # a bound that lost a factor would be far below


@pytest.mark.parametrize("workload", ["prefix", "momentum", "decay"])
@pytest.mark.parametrize("participation", ["one", "fixed", "fixed, cut", "often", "always"])
def test_cheap_bounds_are_close_for_toeplitz_workloads(workload: str, participation: str) -> None:
    A, p = WORKLOADS[workload], PARTICIPATIONS[participation]
    assert lower_bound(A, p, resolution=10) > 0.8 * lower_bound(A, p)


def test_cheap_bound_of_a_long_run() -> None:
    A, p = W.prefix_sum(20_000), SingleEpoch(20_000)
    # between Matousek, Nikolov & Talwar's lower bound and the square root's error
    bound = lower_bound(A, p)
    assert np.log(2e4) / np.pi + 0.5 < bound < registry.rmse(SquareRoot(20_000), A, p)


def test_last_iterate_is_its_own_sensitivity() -> None:
    A = W.momentum(N, 0.9)
    row = A.matrix()[-1]
    assert lower_bound(A, SingleEpoch(N), "last") == pytest.approx(row.max(), rel=1e-9)
    patterns = FixedOrder(N, 3, 18).patterns()
    expected = max(row[list(steps)].sum() for steps in patterns)
    assert lower_bound(A, FixedOrder(N, 3, 18), "last") == pytest.approx(expected, rel=1e-9)


def test_another_n_is_refused() -> None:
    with pytest.raises(PlanError, match="same n"):
        lower_bound(W.prefix_sum(5), SingleEpoch(6))


@pytest.mark.parametrize("participation", [SingleEpoch(64), FixedOrder(64, 4, 16)], ids=repr)
def test_bound_meets_the_optimum(participation: Participation) -> None:
    A = W.prefix_sum(64)
    optimum = fit_dense(A, participation, tolerance=1e-8)
    assert lower_bound(A, participation, tolerance=1e-8) == pytest.approx(optimum.upper, rel=1e-7)
