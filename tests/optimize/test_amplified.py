"""Fits for secret orders: what they make small, how near its estimate is, and that they are better for it."""

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import toeplitz
from scipy.stats import norm
from tests.ranking import assert_ranked
from tests.references import reference

from anyorder.accounting.amplification.mixture import bins_gram
from anyorder.accounting.gaussian import calibrate_gaussian
from anyorder.accounting.poisson import calibrate_poisson
from anyorder.errors import ArgumentError, PlanError
from anyorder.optimize import choose, fit
from anyorder.optimize.amplified import Guess, Judge, Weighted, composed
from anyorder.optimize.candidates import fit_named
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedOrder,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.patterns import Participation
from anyorder.strategy import Banded, Independent, Strategy, ToeplitzBanded
from anyorder.strategy.registry import row_variances
from anyorder.strategy.restarted_blt import RestartedBLT
from anyorder.workload import momentum, prefix_sum

DELTA = 1e-5


def rmse(strategy: Strategy) -> float:
    return math.sqrt(row_variances(strategy, prefix_sum(strategy.n)).mean())


# -- the form --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", [1, 3, 4, 12])
def test_the_weighted_form_is_that_of_the_gram_matrix(b: int) -> None:
    rng = np.random.default_rng(b)
    weights, c = np.append(1.0, rng.random(b - 1)), rng.random(7) * np.where(np.arange(7) == 3, -1, 1)
    form = Weighted(prefix_sum(12), b, weights)
    G = bins_gram(ToeplitzBanded(c, 12), BallsInBins(12 // b, b))
    value, gradient = form.sens(c)
    assert value == pytest.approx((toeplitz(weights) * G).sum() / b)
    step = 1e-6
    for i, slope in enumerate(gradient):
        e = np.eye(7)[i] * step
        assert slope == pytest.approx((form.sens(c + e)[0] - form.sens(c - e)[0]) / (2 * step), abs=1e-6)


# -- the estimate ----------------------------------------------------------------------------------------------------


def two_bins(G: NDArray[np.float64], sigma: float, epsilon: float) -> float:
    """Delta of two bins by quadrature: E_Q (L - e^eps)_+ over the plane of both exponents."""
    x = np.linspace(-12, 12, 1601)
    area = norm.pdf(x)[:, None] * norm.pdf(x)[None] * (x[1] - x[0]) ** 2
    root = np.linalg.cholesky(G) / sigma
    exponents = np.einsum("ij,jkl->ikl", root, np.array(np.meshgrid(x, x, indexing="ij")))
    L = np.exp(exponents - np.diag(G)[:, None, None] / (2 * sigma**2)).mean(axis=0)
    return float((area * np.maximum(L - math.exp(epsilon), 0)).sum())


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
def test_the_estimate_is_near_for_two_bins(epsilon: float, shared: float) -> None:
    G = 5.0 * np.array([[1.0, shared], [shared, 1.3]])
    sigma = Guess(2, 2, epsilon, DELTA)(G).sigma
    assert two_bins(G, 1.01 * sigma, epsilon) < DELTA < two_bins(G, sigma / 1.01, epsilon)


def test_what_all_bins_share_is_not_amplified() -> None:
    guess = Guess(8, 8, 2.0, DELTA)
    flat = np.full((8, 8), 4.0)
    assert guess(flat + 1e-6 * np.eye(8)).sigma == pytest.approx(2 * calibrate_gaussian(2.0, DELTA), rel=2e-3)
    assert Guess(1, 1, 2.0, DELTA)(flat[:1, :1]).sigma == pytest.approx(2 * calibrate_gaussian(2.0, DELTA))
    assert guess(4 * np.eye(8)).sigma < 0.97 * guess(flat + np.eye(8)).sigma


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_its_weights_are_its_derivative(epsilon: float) -> None:
    guess = Guess(20, 20, epsilon, DELTA)
    distance = np.abs(np.subtract.outer(np.arange(20), np.arange(20)))
    G = 0.9**distance
    found = guess(G)
    W = toeplitz(found.weights)
    own, others = (np.eye(20), 1e-2 * 0.8**distance)
    predicted = (W * others).sum() / (W * own).sum()
    moved = [math.log(guess(G + 0.01 * d).sigma / found.sigma) for d in (own, others)]
    assert moved[1] / moved[0] == pytest.approx(predicted, rel=0.35)  # the threshold is smeared


def test_draws_anew_compose() -> None:
    guess = Guess(10, 10, 2.0, DELTA)
    assert composed(guess, [np.eye(10)]).sigma == pytest.approx(guess(np.eye(10)).sigma, rel=5e-3)
    assert composed(Guess(1, 1, 2.0, DELTA), 4 * [np.eye(1)]).sigma == pytest.approx(2 * calibrate_gaussian(2.0, DELTA))
    # each of many draws hides in the middle: near Poisson sampling with the same probability
    assert composed(guess, 10 * [np.eye(10)]).sigma == pytest.approx(calibrate_poisson(2.0, DELTA, 0.1, 100), rel=0.1)


def test_many_bins_are_judged_by_those_in_the_middle() -> None:
    whole, part = Guess(400, 400, 2.0, DELTA), Guess(100, 400, 2.0, DELTA)
    assert part(np.eye(100)).sigma == pytest.approx(whole(np.eye(400)).sigma, rel=0.02)


# -- balls in bins ---------------------------------------------------------------------------------------------------

BINS = BallsInBins(3, 20)
KINDS: tuple[tuple[str, dict[str, int]], ...] = (
    ("toeplitz", {"bands": 8}), ("toeplitz", {"bands": 20}), ("banded_inverse", {"bands": 4}), ("blt", {"buffers": 1}),
    ("tree", {}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sizes", "epsilon"), [(*one, (1.0, 8.0)[i % 2]) for i, one in enumerate(KINDS)], ids=str
)
def test_never_worse_than_the_fit_for_a_fixed_order(kind: str, sizes: dict[str, int], epsilon: float) -> None:
    A = prefix_sum(BINS.n)
    judge = Judge(A, BINS, "mean", epsilon, DELTA)
    fixed = fit(kind, A, FixedOrder(BINS.n, BINS.k, BINS.b), **sizes)
    found = fit(kind, A, BINS, **sizes, epsilon=epsilon, delta=DELTA)
    assert type(found) is type(fixed)
    assert judge(found).loss <= judge(fixed).loss * (1 + 1e-9)
    if epsilon == 1.0 and sizes.get("bands") == 20:
        assert judge(found).loss < 0.9 * judge(fixed).loss


@pytest.mark.parametrize("objective", ["mean", "max"])
def test_choice_is_ranked_and_true(objective: str) -> None:
    b, bands = {"mean": (8, 8), "max": (6, 4)}[objective]
    rule = BallsInBins(2, b)
    A = momentum(rule.n, 0.5)
    found = choose(A, rule, objective=objective, epsilon=2.0, delta=DELTA)
    judge = Judge(A, rule, objective, 2.0, DELTA)
    assert_ranked(found)
    for one in found:
        judged = judge(one.strategy)
        assert (one.loss, one.sensitivity) == (judged.loss, judged.noise.sigma)
        assert one.ratio is None
    assert {"independent", "tree", f"banded toeplitz, {bands} bands"} <= {
        one.name.split(" buffers")[0] for one in found
    }
    assert found[0].loss < 0.8 * next(one.loss for one in found if one.name == "independent")


def test_the_best_depends_on_epsilon() -> None:
    """The more must be hidden, the less noise is correlated."""
    A = prefix_sum(BINS.n)
    quiet, loud = (fit("blt", A, BINS, buffers=1, epsilon=epsilon, delta=DELTA) for epsilon in (0.5, 20.0))
    assert quiet.column_norms_squared()[0] < 0.8 * loud.column_norms_squared()[0]


def test_where_nothing_is_amplified_the_choice_is_that_of_a_known_order() -> None:
    once = BallsInBins(12, 1)  # a unit in every step, surely
    best = choose(prefix_sum(12), once, epsilon=2.0, delta=DELTA)[0]
    assert best.strategy == Independent(12)
    assert best.loss == pytest.approx(math.sqrt(12) * calibrate_gaussian(2.0, DELTA) * rmse(Independent(12)))


@pytest.mark.usefixtures("fitted_once")
def test_budgets_hold() -> None:
    for max_state, max_cost in ((0, 1.0), (2, 8.0), (None, 4.0)):
        for one in choose(prefix_sum(12), BallsInBins(2, 6), max_state, max_cost=max_cost, epsilon=1.0, delta=DELTA):
            assert max_state is None or one.state_rows <= max_state
            assert one.cost <= max_cost


def test_words_and_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYORDER_CACHE", str(tmp_path))
    A, rule = prefix_sum(12), BallsInBins(2, 6)
    found = fit_named("blt, 1 buffer", A, rule, epsilon=2.0, delta=DELTA)
    assert found == fit("blt", A, rule, buffers=1, epsilon=2.0, delta=DELTA)
    assert found != fit("blt", A, rule, buffers=1, epsilon=8.0, delta=DELTA)
    [*ranking] = choose(A, rule, epsilon=2.0, delta=DELTA)
    assert fit_named("auto", A, rule, epsilon=2.0, delta=DELTA) == ranking[0].strategy
    assert fit_named("tree", A, rule, epsilon=2.0, delta=DELTA).n == 12
    with monkeypatch.context() as broken:
        broken.setattr("anyorder.optimize.candidates.amplified_fits", iter)  # which takes no such arguments
        assert choose(A, rule, epsilon=2.0, delta=DELTA) == ranking


# -- orders under which a unit's steps do not overlap ----------------------------------------------------------------


def test_better_than_jax_privacy_for_cyclic_sampling() -> None:
    """Its choice of bands and coefficients, n = 256, q = 160 / 10240, epsilon 2, delta 1e-6."""
    peer = reference("amplified_opt_n256")
    theirs = peer["stddev"] * rmse(ToeplitzBanded(peer["coef"], 256))
    A = prefix_sum(256)
    same = choose(A, CyclicPoisson(256, 5, 5 / 64), epsilon=2.0, delta=1e-6)
    assert same[0].loss < 0.94 * theirs
    largest = math.sqrt(same[0].strategy.column_norms_squared().max())  # 1 % better with columns of norm 1, not simpler
    assert same[0].sensitivity == pytest.approx(calibrate_poisson(2.0, 1e-6, 5 / 64, 52) * largest)
    toeplitz_alone = fit("toeplitz", A, CyclicPoisson(256, 5, 5 / 64), bands=5, epsilon=2.0, delta=1e-6)
    assert (
        same[0].sensitivity * rmse(toeplitz_alone) / math.sqrt(toeplitz_alone.column_norms_squared()[0]) < 0.96 * theirs
    )


@pytest.mark.parametrize(
    "rule",
    [CyclicPoisson(48, 6, 1.0), TruncatedPoisson(48, 1.0, 20, 100, 6), MinSeparationSampling(48, 6, 0.2)],
    ids=repr,
)
def test_strategies_keep_to_the_reach_of_the_order(rule: Participation) -> None:
    found = choose(prefix_sum(48), rule, epsilon=2.0, delta=DELTA)
    assert len(found) > 3
    for one in found:
        overlap = np.abs(one.strategy.matrix().T @ one.strategy.matrix())
        assert np.triu(overlap, 6).max() < 1e-12
    assert found[0].loss < next(one.loss for one in found if one.name == "independent")
    with pytest.raises(PlanError, match="must have at most 6 bands"):
        fit("toeplitz", prefix_sum(48), rule, bands=7, epsilon=2.0, delta=DELTA)
    with pytest.raises(PlanError, match="has no fit for"):
        fit("blt", prefix_sum(48), rule, buffers=1, epsilon=2.0, delta=DELTA)


def test_random_allocation_restarts() -> None:
    rule = RandomAllocation(3, 12)
    found = choose(prefix_sum(36), rule, epsilon=8.0, delta=DELTA)
    assert type(found[0].strategy) is RestartedBLT
    for one in found:
        overlap = np.abs(one.strategy.matrix().T @ one.strategy.matrix())
        assert overlap[:12, 12:].max() < 1e-9
    judge = Judge(prefix_sum(36), rule, "mean", 8.0, DELTA)
    assert judge(fit("restarted_blt", prefix_sum(36), rule, buffers=1, epsilon=8.0, delta=DELTA)).loss <= found[1].loss
    assert found[0].loss < judge(Independent(36)).loss


def test_banded_columns_of_their_own() -> None:
    rule = CyclicPoisson(40, 4, 0.2)
    found = fit("banded", prefix_sum(40), rule, bands=4, epsilon=1.0, delta=DELTA)
    assert type(found) is Banded
    assert found.column_norms_squared() == pytest.approx(np.ones(40))


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_claim_goes_with_secret_orders_alone() -> None:
    A, known, secret = prefix_sum(8), FixedOrder(8, 2, 4), BallsInBins(2, 4)
    for asked in (fit, choose):
        words = ("tree",) if asked is fit else ()
        with pytest.raises(ArgumentError, match="must not be given for an order without secret draws"):
            asked(*words, A, known, epsilon=1.0, delta=DELTA)  # type: ignore[operator]
        with pytest.raises(ArgumentError, match="epsilon and delta must be given"):
            asked(*words, A, secret, epsilon=1.0)  # type: ignore[operator]
        with pytest.raises(ArgumentError, match="epsilon must be"):
            asked(*words, A, secret, epsilon=0.0, delta=DELTA)  # type: ignore[operator]
        with pytest.raises(PlanError, match="independent noise only"):
            asked(*words, A, PoissonSampling(8, 0.1), epsilon=1.0, delta=DELTA)  # type: ignore[operator]
    with pytest.raises(ArgumentError, match="whose best tree"):
        fit_named("tree", A, secret, epsilon=1.0, delta=DELTA, restart_every=1)
    with pytest.raises(PlanError, match="has no fit for"):
        fit("dense", A, secret, epsilon=1.0, delta=DELTA)
