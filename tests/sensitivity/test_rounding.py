"""What float32 coefficients do to a claim: the noise that is really made, with its own inverse."""

from decimal import Decimal, localcontext

import numpy as np
import pytest

import anyorder as ao
from anyorder.errors import PlanError
from anyorder.participation import FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.patterns import Participation
from anyorder.strategy import BLT, Banded, BandedInverse, Dense, Independent, SquareRoot, Strategy, ToeplitzBanded, Tree
from anyorder.strategy.low_rank import BandedLowRank
from anyorder.strategy.registry import kind_of, rounding, sensitivity
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.restarted_blt import RestartedBLT
from laws.cases import PARTICIPATIONS, STRATEGIES
from oracles import attained_squared

RANDOM = np.random.default_rng(0)


def lower(n: int) -> np.ndarray:
    return np.tril(RANDOM.uniform(-0.3, 0.6, (n, n)), -1) + np.diag(RANDOM.uniform(0.8, 1.3, n))


HARD: dict[str, Strategy] = {
    "decays near 1": BLT([1 - 1e-9, 0.999, 0.7], [0.01, 0.1, 0.3], 80),
    "buffers that cancel": BLT([0.99, 0.98999], [10.0000005, -10.0], 60),  # columns err alike, and far from C alike
    "decays of both signs": BLT([0.9, -0.8], [0.7, -0.3], 50),
    "bands": ToeplitzBanded([1 / 3, 1 / 7, 0.1, 0.1, 0.1], 60),
    "bands of both signs": Banded(np.triu(lower(60), -4)),
    "inverse bands": BandedInverse([1.1, -0.7, -0.2, -0.1], 60),
    "nearly singular": BandedInverse([1.0, -2.9, 2.8, -0.9], 60),
    "square root": SquareRoot(70),
    "dense": Dense(lower(30)),
    "low rank": BandedLowRank.approximate(SquareRoot(60), num_bands=4, rank=3),  # of large left and right
    "scales": Rescaled(BLT([0.9], [0.3], 60), RANDOM.uniform(0.2, 5, 60)),
    "scales of scales": Rescaled(Rescaled(Dense(lower(20)), RANDOM.uniform(0.2, 5, 20)), RANDOM.uniform(0.2, 5, 20)),
    "restarted": RestartedBLT(
        [[0.97, 0.3], [0.9, 0.1]], [[0.3, 0.2], [0.1, 0.1]], [0.7, 0.2], [1.1, 0.9], 60, 35
    ),
    "tree regenerated": Tree(60, "online", regenerate=True),
    "full tree": Tree(80, "full", (30, 40), True),
}  # fmt: skip


def used(strategy: Strategy) -> np.ndarray:
    """C~: in float64, a factor of the inverse covariance of what `step` makes with its float32 coefficients."""
    rows = np.eye(strategy.num_rows)  # float64: only coefficients are rounded
    state, K = strategy.init(strategy.num_rows), []
    for t in range(strategy.n):
        noise, state = strategy.step(t, state, rows.__getitem__)
        assert noise.dtype == np.float64
        K.append(noise)
    return np.linalg.inv(np.linalg.cholesky(np.array(K) @ np.array(K).T))


def planned(strategy: Strategy, participation: Participation) -> ao.Plan:
    return ao.Plan(
        participation=participation, strategy=strategy, workload=ao.workload.prefix_sum(strategy.n), clip_norm=2.0,
        sigma=0.5, delta=1e-5, batch_size=1,
    )  # fmt: skip


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_noise_that_is_made_keeps_the_claim(name: str) -> None:
    strategy = STRATEGIES[name](9)
    C = used(strategy)
    for make in PARTICIPATIONS.values():
        plan = planned(strategy, make(9))
        mu = 2.0 * np.sqrt(attained_squared(C, plan.participation.patterns())) / plan.noise_std
        assert mu <= plan.mu * (1 + 1e-14 * (plan.rounding > 0))


@pytest.mark.parametrize("name", HARD)
def test_large_and_awkward_strategies_keep_the_claim(name: str) -> None:
    strategy = HARD[name]
    n, C = strategy.n, used(strategy)
    for participation in (SingleEpoch(n), FixedOrder(n, 4, -(-n // 4)), FixedOrder(n, n, 1), MinSeparation(n, 7, 3)):
        plan = planned(strategy, participation)
        patterns = list(participation.patterns())[:: 1 + n // 10]
        worst = 0.0
        for pattern in patterns:
            columns = C[:, list(pattern)]
            for signs in (np.ones(len(pattern)), np.resize([1, -1], len(pattern)), np.sign(columns.sum(0) + 1e-300)):
                worst = max(worst, float(np.linalg.norm(columns @ signs)))
        assert 2.0 * worst / plan.noise_std <= plan.mu * (1 + 1e-13)


@pytest.mark.parametrize("name", HARD)
def test_columns_stay_within_the_bound(name: str) -> None:
    """Of one participation the bound is no more than what rounding does, or a moderate multiple."""
    strategy = HARD[name]
    C, exact = used(strategy), strategy.column_norms_squared()
    change = float((np.sqrt(np.square(C).sum(axis=0) / exact) - 1).max())
    bound = rounding(strategy, SingleEpoch(strategy.n))
    assert change <= bound + 1e-13
    assert 0 < bound <= max(1e-5, 20 * change)


def test_trees_have_the_bounds_that_are_proven() -> None:
    """Small trees err less: what is claimed for all of them must not be fitted to these."""
    unit = np.finfo(np.float32).eps / 2
    assert rounding(Tree(64, "full"), SingleEpoch(64)) >= (6 + 2) * unit
    for tree in (Tree(64, "online", regenerate=True), Tree(64, "full", regenerate=True)):
        assert rounding(tree, SingleEpoch(64)) >= np.sqrt(24 * 64 * (6 + 1)) * unit
    completed = Tree(48, "online", (32,), True)
    assert rounding(completed, SingleEpoch(48)) >= np.sqrt(24 * 48 * (5 + 1)) * unit


def test_nothing_is_added_where_nothing_is_rounded() -> None:
    for strategy in (Independent(8), Tree(8), Tree(9, restarts=(5,), completion=True), Tree(9, "online")):
        assert rounding(strategy, MinSeparation(strategy.n, 1)) == 0.0
    plan = planned(Tree(9, "online"), SingleEpoch(9))
    assert plan.noise_std == pytest.approx(plan.sensitivity.value, rel=1e-15)


@pytest.mark.parametrize(
    "strategy",
    [
        Rescaled(Independent(3), [1e-60, 1.0, 1.0]),  # no noise at all at step 0
        Rescaled(Independent(3), [1e60, 1.0, 1.0]),
        BandedInverse([1e-50, 1.0], 3),
        Dense(np.tril(np.full((60, 60), 100.0), -1) + np.eye(60)),
        BLT([1.0], [1e100], 3),
    ],
)
def test_what_float32_cannot_hold_is_refused(strategy: Strategy) -> None:
    with pytest.raises(PlanError, match=r"cannot be made in float32.* at most 0\.01"):
        rounding(strategy, SingleEpoch(strategy.n))
    with pytest.raises(PlanError, match="float32"):
        _ = planned(strategy, SingleEpoch(strategy.n)).noise_std


@pytest.mark.parametrize("g", [[1, -2.9, 2.8, -0.9], [1, -2.95, 2.9, -0.95], [1.0, -1.999, 0.99905], [0.3, -0.2, -0.1]])
def test_an_ill_conditioned_inverse_is_not_below_the_true_value(g: list[float]) -> None:
    n, k = 600, 3
    with localcontext(prec=60):
        c: list[Decimal] = []
        for t in range(n):
            past = sum((Decimal(g[i]) * c[t - i] for i in range(1, min(len(g), t + 1))), Decimal(0))
            c.append((Decimal(t == 0) - past) / Decimal(g[0]))
        sums = [sum((c[t - j] for j in range(0, 200 * k, 200) if t >= j), Decimal(0)) for t in range(n)]
        true = sum((x * x for x in sums), Decimal(0)).sqrt()
    strategy = BandedInverse(g, n)
    assert np.abs(strategy.toeplitz_coefficients() / np.array(c, dtype=np.float64) - 1).max() < 1e-14
    bound = sensitivity(strategy, FixedOrder(n, k, 200))
    assert true <= Decimal(bound.value)
    if min(c) >= 0:  # else vectors that are not all equal reach more
        assert bound.exact
        assert Decimal(bound.value) <= true * Decimal(1 + 1e-13)
    order = KnownOrder([[t % 200] for t in range(n)])
    assert true <= Decimal(sensitivity(strategy, order).value)


@pytest.mark.parametrize("name", STRATEGIES)
def test_scales_that_are_powers_of_two_take_nothing_off(name: str) -> None:
    """They round nothing themselves, so that what the strategy inside may lose is what is lost."""
    strategy, order = STRATEGIES[name](9), SingleEpoch(9)
    assert rounding(Rescaled(strategy, 2.0 ** (np.arange(9) % 3)), order) >= rounding(strategy, order)


def test_inverses_by_back_substitution_are_counted_as_a_whole() -> None:
    for strategy in (STRATEGIES["dense"](9), STRATEGIES["low rank"](9)):
        for one in (strategy, Rescaled(strategy, np.full(9, 2.0))):
            C, K = strategy.matrix(), strategy.noising_matrix()
            assert kind_of(one).rounding.change(one).whole >= 9 * 2.0**-52 * np.linalg.norm(C, 2) * np.linalg.norm(K, 2)
