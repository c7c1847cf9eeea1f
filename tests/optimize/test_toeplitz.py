"""Toeplitz fits: losses and gradients against matrices, published optima as targets."""

from itertools import pairwise

import numpy as np
import pytest
from scipy.linalg import toeplitz

from anyorder import workload as W
from anyorder.errors import ArgumentError, PlanError
from anyorder.participation import EpochShuffle, FixedOrder, MinSeparation, SingleEpoch
from anyorder.patterns import Participation
from anyorder.strategy import Dense, ToeplitzBanded, registry
from anyorder.strategy.banded_inverse import fit_banded_inverse, fits_banded_inverse
from anyorder.strategy.registry import sensitivity
from anyorder.strategy.toeplitz import Problem, fit_toeplitz, fits_toeplitz, reciprocal
from references import reference, scenario

N = 24
WORKLOADS = {
    "prefix": W.prefix_sum(N),
    "schedule": W.momentum(N, 0.8, W.cosine(N)),
    "decay": W.weighted(W.Workload(N, momentum=0.5, weight_decay=0.1), np.arange(1.0, N + 1)),
}
PARTICIPATIONS = [SingleEpoch(N), FixedOrder(N, 4, 6), MinSeparation(N, 5, 4), EpochShuffle(4, 6)]


def slope(f, x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """The gradient by central differences."""
    return np.array([(f(x + step * u)[0] - f(x - step * u)[0]) / (2 * step) for u in np.eye(len(x))])


def series(size: int) -> np.ndarray:
    """Decaying, not monotone, of both signs."""
    return np.exp(-0.1 * np.arange(size)) + 0.05 * np.random.default_rng(size).standard_normal(size)


@pytest.mark.parametrize("objective", ["mean", "max", "last"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_error_is_that_of_the_matrix(workload: str, objective: str) -> None:
    A = WORKLOADS[workload]
    problem = Problem(A, SingleEpoch(N), objective)
    for size in (5, N):
        d = series(size)
        rows = np.square(A.matrix() @ toeplitz(np.r_[d, np.zeros(N - size)], np.zeros(N))).sum(axis=1)
        expected = {"mean": rows.mean(), "max": rows.max(), "last": rows[-1]}[objective]
        slack = N ** (1 / 48) if objective == "max" and not A.is_toeplitz else 1 + 1e-10
        assert expected * (1 - 1e-10) <= problem.error(d)[0] <= expected * slack
        np.testing.assert_allclose(problem.error(d)[1], slope(problem.error, d), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("participation", PARTICIPATIONS, ids=repr)
@pytest.mark.parametrize("stiffness", [np.inf, 10.0])
def test_sens_has_the_right_gradient(participation: Participation, stiffness: float) -> None:
    problem = Problem(W.prefix_sum(N), participation)
    for size in (4, N):
        np.testing.assert_allclose(
            problem.sens(series(size), stiffness)[1],
            slope(lambda c: problem.sens(c, stiffness), series(size)),
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.parametrize("participation", PARTICIPATIONS[:3], ids=repr)
def test_sens_is_the_sensitivity(participation: Participation) -> None:
    problem = Problem(W.prefix_sum(N), participation)
    falling = ToeplitzBanded(np.exp(-0.1 * np.arange(N)), N)
    assert problem.sens(falling.coefficients)[0] == pytest.approx(sensitivity(falling, participation).value ** 2)
    any_sign = ToeplitzBanded(series(N), N)
    exact = sensitivity(Dense(any_sign.matrix()), participation).value
    assert problem.sens(any_sign.coefficients)[0] >= exact**2 * (1 - 1e-9)


def test_likely_worst_steps_are_allowed_and_worst() -> None:
    for participation in (FixedOrder(10, 3, 4), MinSeparation(10, 3, 3), EpochShuffle(3, 4), EpochShuffle(2, 4)):
        C = ToeplitzBanded(0.7 ** np.arange(participation.n), participation.n).matrix()
        totals = {p: np.square(C[:, list(p)].sum(axis=1)).sum() for p in participation.patterns()}
        assert totals[tuple(participation.pattern.likely_worst().tolist())] >= max(totals.values()) * (1 - 1e-2)


def test_reciprocal_gradient() -> None:
    problem = Problem(W.prefix_sum(N), SingleEpoch(N))
    for size in (4, N):
        c = series(size)
        _, gradient = reciprocal(c, N, problem.error)
        np.testing.assert_allclose(gradient, slope(lambda c: reciprocal(c, N, problem.error), c), rtol=1e-4)
    long = Problem(W.prefix_sum(100), SingleEpoch(100))
    _, gradient = reciprocal(series(100), 100, long.error)
    expected = slope(lambda c: reciprocal(c, 100, long.error), series(100))
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(("bands", "target"), [(8, 26.42), (32, 15.54), (100, 11.58)])
def test_banded_toeplitz_targets(bands: int, target: float) -> None:
    A, participation = W.prefix_sum(1000), MinSeparation(1000, 100, 10)
    found = fit_toeplitz(Problem(A, participation), bands)
    assert registry.rmse(found, A, participation) <= target
    assert registry.rmse(found, A, participation) <= scenario("n1000_k10_b100", f"BandToep_p{bands}")["rmse"] * (
        1 + 1e-6
    )


@pytest.mark.parametrize("participation", [FixedOrder(1000, 10, 100), MinSeparation(1000, 100, 10)], ids=repr)
def test_banded_inverse_target(participation: Participation) -> None:
    A = W.prefix_sum(1000)
    assert registry.rmse(fit_banded_inverse(Problem(A, participation), 16), A, participation) <= 12.24


@pytest.mark.parametrize(("n", "b", "bands"), [(256, 64, 4), (512, 128, 8)])
def test_banded_inverse_is_no_worse_than_published(n: int, b: int, bands: int) -> None:
    A, participation = W.prefix_sum(n), MinSeparation(n, b)
    values = reference(f"bandinv_opt_n{n}_b{bands}_minsep{b}")
    found = fit_banded_inverse(Problem(A, participation), bands)
    assert registry.rmse(found, A, participation) <= values["sensitivity"] * values["mean_error"] ** 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("fit", [fit_toeplitz, fit_banded_inverse])
@pytest.mark.parametrize("participation", [SingleEpoch(96), MinSeparation(96, 32, 3), EpochShuffle(3, 32)], ids=repr)
def test_more_bands_are_never_worse(fit, participation: Participation) -> None:
    A = W.momentum(96, 0.9, W.linear_cooldown(96))
    problem = Problem(A, participation)
    losses = []
    for bands in (1, 2, 4, 8, 16):
        c = fit(problem, bands)
        losses.append(problem.error(c.noising_coefficients())[0] * problem.sens(c.toeplitz_coefficients())[0])
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in pairwise(losses))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("objective", ["max", "last"])
def test_objectives_are_traded(objective: str) -> None:
    A = W.momentum(96, 0.9, W.cosine(96))
    participation = FixedOrder(96, 3, 32)
    loss = {"max": registry.max_error, "last": registry.last_error}[objective]
    aware = fit_toeplitz(Problem(A, participation, objective), 16)
    mean = fit_toeplitz(Problem(A, participation), 16)
    assert loss(aware, A, participation) < loss(mean, A, participation)


def test_the_full_toeplitz_optimum_of_the_maximum_is_the_square_root_or_better() -> None:
    A = W.prefix_sum(64)
    root = reference("sqrt_toeplitz_prefix_n64")
    found = fit_toeplitz(Problem(A, SingleEpoch(64), "max"), 64)
    best = root["sensitivity"] * root["max_error"] ** 0.5
    assert 0.995 * best < registry.max_error(found, A, SingleEpoch(64)) <= best * (1 + 1e-9)


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="bands"):
        fit_toeplitz(Problem(W.prefix_sum(5), SingleEpoch(5)), 6)
    with pytest.raises(ArgumentError, match="objective"):
        Problem(W.prefix_sum(5), SingleEpoch(5), "median")
    with pytest.raises(PlanError, match="same n"):
        Problem(W.prefix_sum(5), SingleEpoch(6))
    with pytest.raises(PlanError, match="at most 4096 steps"):
        Problem(W.momentum(5000, 0.0, W.cosine(5000)), SingleEpoch(5000))


@pytest.mark.parametrize(("k", "momentum"), [(8, 0.0), (4, 0.9)])
def test_more_bands_are_never_worse_in_shuffled_epochs(k: int, momentum: float) -> None:
    A, participation = W.momentum(64, momentum), EpochShuffle(k, 64 // k)
    for fits in (fits_banded_inverse, fits_toeplitz):
        found = fits(Problem(A, participation), [2, 4, 8, 16, 32])
        losses = [registry.rmse(strategy, A, participation) for strategy in found]
        assert losses == pytest.approx(sorted(losses, reverse=True), rel=1e-9)
