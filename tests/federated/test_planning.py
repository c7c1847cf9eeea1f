"""Epsilon against report goal: [Kairouz et al. 2021] Table 5, and what must hold of any point."""

import math

import pytest

from anyorder.accounting import gdp_epsilon
from anyorder.accounting.poisson import poisson_epsilon
from anyorder.errors import ArgumentError, PlanError
from anyorder.federated import epsilon_by_report_goal
from anyorder.federated.planning import at_same_error
from anyorder.participation import EpochShuffle, MinSeparation, PoissonSampling, SingleEpoch

USERS = 342_477
RATIO = 0.149 / 100
DELTA = 1e-6


def points(goals, population=USERS, **chosen):
    return epsilon_by_report_goal(population, 1600, RATIO, goals, DELTA, **chosen)


# -- the paper -------------------------------------------------------------------------------------------------------

TABLE_5 = [
    # report goal, population, noise, squared sensitivity, epsilon printed
    (100, USERS, 0.149, 11, 363.66),
    (1000, USERS, 1.49, 5 * 9, 32.52),
    (5060, USERS, 7.539, 24 * 7, 9.76),
    (16302, USERS, 24.29, 77 * 5, 4.11),
    (3846, 10**6, 5.73, 7 * 9, 7.57),
]


@pytest.mark.parametrize(("goal", "population", "noise", "squared", "printed"), TABLE_5)
def test_table_5(goal, population, noise, squared, printed):
    """All rounds of a pass as one tree, and the last pass counted whole: then the printed values come out.

    Its noise is printed with three digits, cut or rounded, and its report goals are rounded: the goals here are those
    of its noise. In the first row it used Rényi orders 1.1, 1.2, ..; its best is 1.2, the true best 1.24.
    """
    (point,) = points([goal], population, order="shuffled", conversion="rdp")
    assert point.noise_multiplier == pytest.approx(noise, abs=0.005)
    assert point.plan.sensitivity.value**2 == pytest.approx(squared, rel=1e-12)
    assert point.epsilon == pytest.approx(printed, rel=0.005 if goal == 100 else 0.0017)


def test_the_last_row_of_table_5_counts_the_rounds_that_there_are():
    """3.56: 16 passes of 97 rounds, 7 nodes over each leaf, and 48 rounds more, 6 nodes; whole passes give 3.58."""
    (whole,) = points([10262], 10**6, order="shuffled", conversion="rdp")
    (timed,) = points([10262], 10**6, order="timer", conversion="rdp")
    assert whole.plan.sensitivity.value**2 == pytest.approx(17 * 7)
    assert timed.plan.sensitivity.value**2 == pytest.approx(16 * 7 + 6)
    assert (round(whole.epsilon, 2), round(timed.epsilon, 2)) == (3.58, 3.56)


def test_amplified_rows_of_table_5_are_at_least_what_is_true():
    """DP-SGDM by Rényi orders: 9.42, 8.11, 3.70; the loss distribution gives less."""
    for goal, population, noise, printed in ((USERS, USERS, 23.97, 9.42), (17100, 10**6, 1.20, 3.70)):
        (point,) = epsilon_by_report_goal(population, 1600, noise / goal, [goal], DELTA, mechanism="poisson")
        assert point.epsilon == pytest.approx(poisson_epsilon(noise, goal / population, 1600, DELTA), rel=1e-6)
        assert 0.88 * printed < point.epsilon < printed


# -- a point ---------------------------------------------------------------------------------------------------------


def test_orders():
    one, five = points([100, 1000])
    assert one.plan.participation == SingleEpoch(1600)
    assert five.plan.participation == MinSeparation(1600, 342, 5)
    assert (five.min_separation, five.max_participations) == (342, 5)
    (shuffled,) = points([1000], order="shuffled")
    assert shuffled.plan.participation == EpochShuffle(5, 342)
    assert shuffled.rounds == 1600 < shuffled.plan.n
    assert (shuffled.min_separation, shuffled.max_participations) == (1, 5)
    (sampled,) = points([1000], mechanism="poisson")
    assert sampled.plan.participation == PoissonSampling(1600, 1000 / USERS)
    (everybody,) = epsilon_by_report_goal(20, 8, 1.0, [20], DELTA)
    assert everybody.plan.participation == MinSeparation(8, 1, 8)


def test_epsilon_is_that_of_its_plan_and_follows_from_the_sensitivity():
    for point in points([100, 1000, 5060]):
        assert point.plan.batch_size == point.report_goal
        assert point.plan.unit == "user"
        assert point.epsilon == point.plan.epsilon
        mu = point.plan.sensitivity.value / (RATIO * point.report_goal)
        assert point.epsilon == pytest.approx(gdp_epsilon(mu, DELTA), rel=1e-5)
        assert point.epsilon >= gdp_epsilon(mu, DELTA)


def test_momentum_and_restarts_are_those_that_are_asked_for():
    """A population of 1000 in rounds of 100: passes of ten rounds."""

    def of(**chosen):
        (point,) = epsilon_by_report_goal(1000, 40, 0.02, [100], DELTA, **chosen)
        return point.plan

    assert of(momentum=0.9).workload.momentum == 0.9
    assert of().workload.momentum == 0
    for every, restarts in ((0, ()), (1, (10, 20, 30)), (2, (20,)), (3, (30,))):
        assert tuple(of(restart_every=every).strategy.restarts) == restarts
        start = epsilon_by_report_goal(1000, 40, 0.02, [100], DELTA, mechanism="independent")
        (other,) = at_same_error(start, "tree", restart_every=every)
        assert tuple(other.plan.strategy.restarts) == restarts


def test_looser_conversions_are_above_the_exact_one():
    exact, rdp, zcdp = (points([1000], conversion=word)[0].epsilon for word in ("exact", "rdp", "zcdp"))
    assert exact < rdp < zcdp


def test_users_who_come_more_often_cost_more():
    """At the same noise, half the population has twice the passes."""
    (many,), (few,) = points([1000]), points([1000], USERS // 2)
    assert few.max_participations == 10
    assert few.epsilon > 1.3 * many.epsilon


@pytest.mark.parametrize("mechanism", ["tree", "blt, 2 buffers", "independent", "poisson"])
def test_the_same_error_is_the_same(mechanism):
    base = points([1000, 5060], momentum=0.9)
    for one, other in zip(base, at_same_error(base, mechanism, restart_every=0), strict=True):
        assert other.error == pytest.approx(one.error, rel=1e-9)
        assert other.report_goal == one.report_goal
        assert other.plan.workload == one.plan.workload


def test_error_is_what_independent_noise_adds_up_to():
    (point,) = epsilon_by_report_goal(1000, 10, 0.02, [100], DELTA, mechanism="independent")
    assert point.error == pytest.approx(0.02 * math.sqrt(sum(range(1, 11)) / 10))


def test_blt_is_better_than_the_restarted_tree_at_the_same_error():
    tree = points([5060])
    (blt,), (once,) = at_same_error(tree, "blt, 2 buffers"), at_same_error(tree, "tree", restart_every=0)
    assert blt.epsilon < 0.35 * tree[0].epsilon
    assert blt.epsilon < once.epsilon < tree[0].epsilon


def test_a_size_that_gains_nothing_at_some_goal_is_taken_smaller_there():
    tree = points([1000, 30_000])
    many, few = at_same_error(tree, "blt, 2 buffers")
    assert many.plan.strategy.num_buffers == 2
    assert few.plan.strategy.num_buffers == 1
    assert few.epsilon < tree[1].epsilon


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"population": 0}, "population must be"),
        ({"rounds": 0}, "rounds must be"),
        ({"noise_ratio": 0.0}, "noise_ratio must be"),
        ({"report_goals": []}, "report_goals must be one or more"),
        ({"report_goals": [1001]}, "report_goals must be"),
        ({"delta": 1.0}, "delta must lie"),
        ({"order": "sampled"}, "order must be"),
        ({"conversion": "pld"}, "conversion must be"),
        ({"restart_every": -1}, "restart_every must be"),
        ({"mechanism": "leaf"}, "mechanism must be"),
    ],
)
def test_what_is_refused(change, phrase):
    chosen = {"population": 1000, "rounds": 10, "noise_ratio": 0.1, "report_goals": [10], "delta": 1e-5, **change}
    with pytest.raises(ArgumentError, match=phrase):
        epsilon_by_report_goal(**chosen)


def test_sampling_has_no_mu_and_no_point_to_start_from():
    with pytest.raises(PlanError, match="has no mu"):
        points([100], mechanism="poisson", conversion="rdp")
    with pytest.raises(PlanError, match="secret sampling"):
        at_same_error(points([1000], mechanism="poisson"), "tree")
    with pytest.raises(PlanError, match="has no mu"):
        at_same_error(points([1000], conversion="rdp"), "poisson")
