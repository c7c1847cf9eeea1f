"""Epsilon against report goal: what more users in a round buy, at one utility. [Kairouz et al. 2021, 7.3, Table 5]"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from anyorder import checks
from anyorder.accounting import gdp_epsilon
from anyorder.checks import final
from anyorder.errors import ArgumentError, PlanError
from anyorder.optimize.candidates import fit_named
from anyorder.participation import EpochShuffle, MinSeparation, PoissonSampling, SingleEpoch
from anyorder.patterns import Participation
from anyorder.plan.options import SGD
from anyorder.plan.plan import Plan
from anyorder.plan.planner import plan as make_plan
from anyorder.plan.planner import with_budget
from anyorder.strategy import Independent, Strategy, Tree
from anyorder.workload import Workload

__all__ = ["ReportGoal", "at_same_error", "epsilon_by_report_goal"]

_ORDERS = {"timer", "shuffled"}
_CONVERSIONS = {"exact", "rdp", "zcdp"}


@final
@dataclass(frozen=True)
class ReportGoal:
    """One report goal with what it costs and buys.

    Attributes:
        plan: a whole plan with this goal as its batch size: `Server` takes it as it is.
        conversion: how epsilon was made of mu: "exact", "rdp" or "zcdp".
        rounds: that are asked for; `plan.n` may be more, where its order counts whole passes.
    """

    plan: Plan
    conversion: str
    rounds: int

    @property
    def report_goal(self) -> int:
        """Messages that a round waits for, and the divisor of their sum."""
        return self.plan.batch_size

    @property
    def epsilon(self) -> float:
        """At `plan.delta`; under the looser conversions what a paper would print, never below `plan.epsilon`."""
        if self.conversion == "exact":
            return self.plan.epsilon
        assert self.plan.mu is not None  # refused where it was asked for
        return gdp_epsilon(self.plan.mu, self.plan.delta, self.conversion)

    @property
    def noise_multiplier(self) -> float:
        """Noise std over clip norm: in a round, and for the tree at each node."""
        return self.plan.noise_multiplier

    @property
    def max_participations(self) -> int:
        """Rounds of one user at most; under secret sampling all, as chance alone bounds them."""
        return self.plan.participation.max_participations

    @property
    def min_separation(self) -> int:
        """Rounds from one participation of a user to the next at least; all where there is only one."""
        return self.plan.participation.min_separation

    @property
    def error(self) -> float:
        """Root mean square of the noise in the coordinates of the weights, in clip norms, for server learning rate 1.

            noise_multiplier / report_goal * || A K ||_F / sqrt(n)

        Equal errors are what "the same utility" means across mechanisms, as far as noise decides it.
        """
        return self.plan.noise_error() / self.report_goal

    def to_dict(self) -> dict[str, object]:
        """JSON values: all of the above."""
        return {
            "report_goal": self.report_goal, "epsilon": self.epsilon, "delta": self.plan.delta,
            "conversion": self.conversion, "mu": self.plan.mu, "noise_multiplier": self.noise_multiplier,
            "max_participations": self.max_participations, "min_separation": self.min_separation,
            "error": self.error, "mechanism": self.plan.strategy.describe(),
            "participation": self.plan.participation.to_dict(),
        }  # fmt: skip


def epsilon_by_report_goal(
    population: int,
    rounds: int,
    noise_ratio: float,
    report_goals: Iterable[int],
    delta: float,
    *,
    mechanism: str = "tree",
    order: str = "timer",
    restart_every: int = 1,
    momentum: float = 0.0,
    conversion: str = "exact",
) -> list[ReportGoal]:
    """Epsilon against report goal, at a fixed ratio of noise to report goal: fixed noise in the mean of a round.

        noise_multiplier = noise_ratio * report_goal,   s = floor(population / report_goal) rounds in a pass,
        k = ceil(rounds / s) participations of a user at most,   mu = sens(C, participation) / noise_multiplier

    A larger goal takes more noise, which is divided by more users, so the model stays as it was; but passes get
    shorter, and each user appears more often. [Kairouz et al. 2021] find a ratio of 0.149 / 100 to cost 0.65 points of
    accuracy (24.50 % of 25.15 %), for the tree, and say why utility stays.

    Args:
        population: users, at least the largest report goal.
        rounds: of training.
        noise_ratio: noise std over clip norm, of one round (of one node for the tree), over report goal; above 0.
        report_goals: users in a round.
        delta: strictly between 0 and 1.
        mechanism: "tree", a name that `ao.plan` takes ("blt, 2 buffers", "independent", ..; at a goal where so many
            gain nothing, fewer), or "poisson": DP-SGD with secret sampling, which is amplified.
        order: what keeps a user from coming back: "timer", at least s rounds after the last time, which a server
            enforces (`MinSeparation`); "shuffled", once in each pass of s rounds, in any place of it, where whole
            passes are planned (`EpochShuffle`), as the paper counts.
        restart_every: of the tree: a fresh one every so many passes; 0 for never.
        momentum: of the server's optimizer; errors and fits are for it.
        conversion: "exact", or "rdp" or "zcdp" for comparison with papers.
    Returns: a point for each goal, in their order.
    Guarantee: each epsilon applies to its plan, neighbours "zero-out" ("add-or-remove" for "poisson"), unit "user".
    Cost: milliseconds a goal for the tree; a fit for the others; seconds for "poisson".
    Raises: ArgumentError; PlanError for a looser conversion of "poisson".

    Example:
        >>> points = epsilon_by_report_goal(342_477, 1600, 0.149 / 100, [100, 1000], 1e-6, order="shuffled")
        >>> [(point.max_participations, round(point.epsilon, 2)) for point in points]
        [(1, 352.64), (5, 30.85)]
    """
    noise_ratio = checks.positive("noise_ratio", noise_ratio)
    orders = _orders(population, rounds, report_goals, mechanism, order)
    _check_conversion(conversion, mechanism)
    every = checks.integer("restart_every", restart_every, low=0)
    points = []
    for goal, rule in orders:
        found = _strategy(mechanism, rule, population // goal, every, momentum)
        noise = noise_ratio * goal
        points.append(_point(goal, rule, found, noise, delta, population, momentum, conversion, rounds))
    return points


def at_same_error(points: Sequence[ReportGoal], mechanism: str, *, restart_every: int = 1) -> list[ReportGoal]:
    """The same report goals with another mechanism, and as much noise as gives the weights the same error.

    Orders, workload and delta are those of the points: `point.error` is that of the point in the same place. So their
    epsilons are to be compared at one utility, as far as the mean square of the noise decides it.

    Args:
        points: of `epsilon_by_report_goal`, not under secret sampling.
        mechanism: as there.
        restart_every: of the tree, as there.
    Raises: ArgumentError; PlanError.
    """
    every = checks.integer("restart_every", restart_every, low=0)
    found = []
    for point in points:
        base = point.plan
        population = base.dataset_size
        if base.amplified or population is None:
            raise PlanError(f"points must not be under secret sampling, got {base.participation.describe()}")
        _check_conversion(point.conversion, mechanism)
        goal, rule, momentum = point.report_goal, base.participation, base.workload.momentum
        if mechanism == "poisson":
            rule = PoissonSampling(rule.n, goal / population)
        chosen = _strategy(mechanism, rule, population // goal, every, momentum)
        trial = _point(goal, rule, chosen, 1.0, base.delta, population, momentum, point.conversion, point.rounds)
        noise = point.error / trial.error
        found.append(replace(trial, plan=with_budget(trial.plan, noise_multiplier=noise)))
    return found


def _check_conversion(conversion: str, mechanism: str) -> None:
    checks.choice("conversion", conversion, _CONVERSIONS)
    if mechanism == "poisson" and conversion != "exact":
        raise PlanError(f"conversion must be 'exact' for mechanism 'poisson', which has no mu, got {conversion!r}")


def _orders(
    population: int, rounds: int, report_goals: Iterable[int], mechanism: str, order: str
) -> list[tuple[int, Participation]]:
    population = checks.integer("population", population, low=1)
    rounds = checks.integer("rounds", rounds, low=1)
    checks.choice("order", order, _ORDERS)
    goals = [checks.integer("report_goals", goal, low=1, high=population) for goal in report_goals]
    if not goals:
        raise ArgumentError("report_goals must be one or more numbers of users, got none")
    return [(goal, _order(population, rounds, goal, mechanism, order)) for goal in goals]


def _order(population: int, rounds: int, goal: int, mechanism: str, order: str) -> Participation:
    """Who comes when, with `goal` of the population in each round."""
    s = population // goal
    k = -(-rounds // s)
    if mechanism == "poisson":
        return PoissonSampling(rounds, goal / population)
    if k == 1:
        return SingleEpoch(rounds)
    return MinSeparation(rounds, s, k) if order == "timer" else EpochShuffle(k, s)


def _strategy(mechanism: str, rule: Participation, s: int, restart_every: int, momentum: float) -> Strategy:
    if mechanism == "poisson":
        return Independent(rule.n)
    if mechanism == "tree":
        span = restart_every * s
        restarts = range(span, rule.n, span) if span else ()
        return Tree(rule.n, estimator="full", restarts=tuple(restarts))
    return fit_named(mechanism, Workload(rule.n, momentum=momentum), rule, at_most=True)


def _point(
    goal: int, rule: Participation, strategy: Strategy, noise: float, delta: float, population: int, momentum: float,
    conversion: str, rounds: int,
) -> ReportGoal:  # fmt: skip
    plan = make_plan(
        order=rule, mechanism=strategy, noise_multiplier=noise, delta=delta, batch_size=goal,
        dataset_size=population, optimizer=SGD(momentum=momentum), unit="user",
    )  # fmt: skip
    return ReportGoal(plan, conversion, rounds)
