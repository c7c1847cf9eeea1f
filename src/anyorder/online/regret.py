"""Bounds on the regret and the risk of `Learner`, for any strategy, and the regularization that makes them small.

[K21] is Kairouz et al. 2021, sections 5 and C.

The sum of the gradients of batch t at theta_t is g_t, ||g_t|| <= m_t L. The learner plays theta_{t+1} = argmin of
<g_1 + .. + g_t + b_t, theta> + lambda/2 ||theta||^2 + t m r(theta), r(theta) = l1 ||theta||_1 + l2/2 ||theta||^2.
b_t is the noise in prefix sum t, b_0 = 0, with std s_t in each of d coordinates; w_t is what it would have played
without noise; lambda_t = lambda + l2 m (t - 1). No gradient is clipped: L is at most the clip norm.

1. Losses are convex, so regret is at most sum <g_t, w_t - theta*> + sum <g_t, theta_t - w_t>.

2. Learning. Let F_t be the lambda_t-strongly convex objective that w_t minimises. With D = w_{t+1} - w_t,

    F_t(w_t) + <g_t, w_t> - F_{t+1}(w_{t+1})  <=  -<g_t, D> - lambda_t/2 ||D||^2 - m r(w_{t+1})
                                              <=  ||g_t||^2 / 2 lambda_t

Summed over t, and with F_{n+1}(w_{n+1}) <= F_{n+1}(theta*), that is

    sum <g_t, w_t - theta*>  <=  sum m_t^2 L^2 / 2 lambda_t + lambda/2 ||theta*||^2 + n r(theta*)

3. Noise. Two lambda_t-strongly convex objectives that differ by <b, theta> have minima at most ||b|| / lambda_t
apart: <g_t, theta_t - w_t> <= m_t L ||b_{t-1}|| / lambda_t. The norm of b_t is a function of the normals in Z,
Lipschitz with constant s_t; so is the weighted sum of all norms, with the sum of the weighted s_t; and
E||b_t|| <= s_t sqrt d. By concentration, but for a probability of beta,

    sum c_t ||b_t||  <=  (sum c_t s_t) (sqrt d + sqrt(2 ln(1/beta)))                                         QED

g_t may depend on everything played, and theta* on everything. With l2 = 0 the bound is (lambda R^2/2 + V / lambda) / n,
with V = sum m_t^2 L^2 / 2 + m_t L s_{t-1} (sqrt d + ..), least at lambda = sqrt(2 V) / R, where it is R sqrt(2 V) / n.

Independent noise has s_t = sigma sqrt t, and this way a regret that falls as n^(-1/4). A second analysis uses that its
noisy gradients are right in the mean. theta_t follows the losses <g_t + xi_t, theta>, which adds sum ||xi_t||^2 / 2
lambda_t to the learning, and sum <xi_t, theta_t> is a martingale of mean 0. What is left is <b_n, theta*>: mean 0 if
theta* does not depend on the noise, at most R ||b_n|| if it is chosen afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, exp, inf, lgamma, log, log2, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError, PlanError
from anyorder.plan.plan import Plan
from anyorder.strategy import Independent, Tree

__all__ = ["RegretBound", "best_regularization", "regret_bound", "risk_bound", "usual_regularization"]

Floats = NDArray[np.float64]
_FALL = 1e-9  # the least regularization that is looked at, against the best without l2


@final
@dataclass(frozen=True)
class RegretBound:
    """An upper bound on a regret or a risk, a mean over examples in units of the loss.

    Attributes:
        value: the bound: the sum of `terms`.
        regularization: the lambda it is for: the one given, or the one that makes it least.
        terms: "learning" (what a learner without noise pays), "noise", "comparator" (lambda radius^2 / 2n), and where
            there are any "composite" (l1 and l2 at the comparator) and "sampling" (bad luck with examples).
        analysis: "deviation" (of the weights from those without noise: any strategy, [K21]'s way) or "martingale"
            (independent noise alone, where noisy gradients are right in the mean); the lesser of the two.
        beta: what the bound may fail with, over the noise; None: it is on the mean.
        published: of plans with a tree, what [K21] Theorem C.1 states for the same lambda and noise, with the constants
            as printed. Its proof does not give them for small dimensions; see docs/regret.md. None: it says nothing.
        trivial: lipschitz * diameter, which no regret exceeds; a `value` above it says nothing. inf without a diameter.
    """

    value: float
    regularization: float
    terms: dict[str, float]
    analysis: str
    beta: float | None
    published: float | None
    trivial: float

    def __str__(self) -> str:
        terms = ", ".join(f"{name} {value:.4g}" for name, value in self.terms.items())
        sure = "in the mean" if self.beta is None else f"with probability {1 - self.beta:g}"
        return f"at most {self.value:.4g} {sure}, for regularization {self.regularization:.4g} ({terms})"


def regret_bound(
    n: int,
    dimension: int,
    *,
    lipschitz: float,
    radius: float,
    plan: Plan | None = None,
    noise: ArrayLike | None = None,
    batch_size: int = 1,
    beta: float | None = 0.05,
    regularization: float | None = None,
    diameter: float = inf,
    l1: float = 0.0,
    l2: float = 0.0,
) -> RegretBound:
    """Return how much worse the models of `Learner` can be, on its stream, than any one model of norm <= radius.

        (1/n) sum over examples i of  loss_i(theta_{t(i)}) - loss_i(theta*)   <=   learning + noise + comparator

        learning    sum_t m_t^2 L^2 / 2 lambda_t / n
        noise       sum_t m_t L s_{t-1} c / lambda_t / n,     c = sqrt(dimension) + sqrt(2 ln(1/beta))
        comparator  lambda radius^2 / 2 n

    m_t examples in batch t, L = lipschitz, lambda_t = lambda + l2 batch_size (t - 1), s_t the std of the noise in a
    coordinate of the t-th prefix sum, s_0 = 0: `plan.clip_norm * plan.noise_profile(sums=True)`. For every stream, also
    one that an adversary makes up who sees all models as they are played. [K21] Theorem C.1 with a constant of 1/2, the
    mean of the noise over steps for its maximum, and no union over steps.

    Args:
        n: examples of the run: of plan.n steps or of fewer; a pass counts as often as it is made.
        dimension: number of parameters, features times outputs.
        lipschitz: bound L on the norm of an example's gradient, at most plan.clip_norm: none is ever clipped.
        radius: of the models that are compared with, above 0.
        plan: whose noise it is. Or
        noise: (steps,) std s_1, s_2, .. of each prefix sum, or one number for all; with
        batch_size: examples in a batch.
        beta: the bound fails with at most this probability over the noise; None: it is on the mean over the noise.
        regularization: lambda of the learner; None: the one that makes the bound least.
        diameter: of the learner's constraint set, such as 2 radius for `Ball(radius)`. inf: no constraint.
        l1, l2: of the learner: the bound is on the losses without them, at the price of l1 ||theta*||_1 +
            l2/2 ||theta*||^2 [K21, Corollary 5.2], at most l1 sqrt(dimension) radius + l2/2 radius^2.
    Cost: that of `plan.noise_profile`.
    Raises: ArgumentError; PlanError for secret sampling, whose batches have no fixed size, for a plan that truncates
        gradients, and where the noise in prefix sums cannot be computed, see `Plan.noise_profile`.

    Example:
        >>> bound = ao.online.regret_bound(10_000, 10, lipschitz=1, radius=1, noise=0.0, beta=None)
        >>> round(bound.value, 6), round(bound.regularization, 6)  # L R / sqrt(n), L sqrt(n) / R
        (0.01, 100.0)
    """
    problem = _Problem.of(n, dimension, lipschitz, radius, plan, noise, batch_size, beta, diameter, l1, l2, fixed=False)
    return _bound(problem, regularization)


def _bound(problem: "_Problem", regularization: float | None) -> RegretBound:
    if regularization is not None:
        regularization = checks.positive("regularization", regularization)
    found = [_least(problem, analysis, regularization) for analysis in problem.analyses()]
    best = min(found, key=lambda bound: bound.value)
    return replace(best, published=problem.published(best.regularization))


def risk_bound(
    n: int,
    dimension: int,
    *,
    lipschitz: float,
    radius: float,
    plan: Plan | None = None,
    noise: ArrayLike | None = None,
    batch_size: int = 1,
    beta: float | None = 0.05,
    beta_data: float | None = None,
    regularization: float | None = None,
    diameter: float = inf,
    l1: float = 0.0,
    l2: float = 0.0,
) -> RegretBound:
    """Return how much worse `Learner.average` can be, on fresh examples, than any one model of norm <= radius.

        E loss(average; z) - E loss(theta*; z)  <=  regret_bound

    for z and all examples of the stream drawn independently, in the mean over the stream, and with probability
    1 - beta over the noise: [K21] Theorem C.5 with its constants worked out. With `beta_data` for the stream that was
    drawn too, with probability 1 - beta - beta_data, by

        sampling    L diameter sqrt(2 ln(1/beta_data) / n)

    The models that were played do not depend on the last batch: one that is short counts as a whole one, n is rounded
    up to batches.

    Args:
        beta_data: None, or what the bound may fail with over the stream; needs a diameter.
        others: as of `regret_bound`.
    Raises: as `regret_bound`; PlanError for a plan of several participations, in which examples are not fresh.
    """
    if plan is not None and plan.participation.max_participations != 1:
        raise PlanError(
            "the bound on the risk needs fresh examples at every step, and the plan lets a unit appear "
            f"{plan.participation.max_participations} times: plan for one epoch"
        )
    size = batch_size if plan is None else plan.batch_size
    whole = ceil(checks.integer("n", n, low=1) / checks.integer("batch_size", size, low=1)) * size
    problem = _Problem.of(whole, dimension, lipschitz, radius, plan, noise, size, beta, diameter, l1, l2, fixed=True)
    bound = _bound(problem, regularization)
    if beta_data is None:
        return bound
    if diameter == inf:
        raise ArgumentError(
            "beta_data must come with a diameter: without a bounded set one example may cost any amount"
        )
    sampling = lipschitz * diameter * sqrt(2 * log(1 / checks.probability("beta_data", beta_data)) / whole)
    return replace(bound, value=bound.value + sampling, terms={**bound.terms, "sampling": sampling})


def best_regularization(
    n: int, dimension: int, *, lipschitz: float, radius: float, plan: Plan, beta: float | None = None,
    diameter: float = inf, l1: float = 0.0, l2: float = 0.0,
) -> float:  # fmt: skip
    """The lambda for which `regret_bound` is least: a function of public numbers alone.

    Without l2 it is  sqrt(2 n V) / radius,  V lambda the sum of "learning" and "noise": it grows with sqrt(n), and with
    the noise's share of V.

    Args, Raises: as of `regret_bound`. beta: None, for the bound on the mean.
    """
    return regret_bound(
        n, dimension, lipschitz=lipschitz, radius=radius, plan=plan, beta=beta, diameter=diameter, l1=l1, l2=l2
    ).regularization


def usual_regularization(plan: Plan, norm: float, *, spread: float, curvature: float) -> float:
    """Lambda from public numbers, for learners in practice: what "auto" of the estimators is, and of `anyorder fit`.

        lambda = max(norm clip_norm s / spread,  curvature batch_size norm^2)

    s is the std of one coordinate of the noise in prefix sums, root mean square over steps, for clip norm 1: in the
    same sense the noise moves the score of no row by more than `spread`. The second keeps the steps of a loss whose
    slope has no bound from overshooting.

    Args:
        norm: bound on a row, with its constant.
        curvature: half the second derivative of the loss in its score; 0 for losses of bounded slope.
    """
    noise = plan.clip_norm * plan.noise_error(sums=True)
    return float(max(noise * norm / spread, curvature * plan.batch_size * norm**2))


# -- the terms -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    """The arguments, checked.

    Attributes:
        counts: (steps,) examples m_t of each batch.
        stds: (steps,) s_{t-1}: of the noise in theta_t.
        step_std: of the increment of independent noise; None for other noise.
        fixed: whether the model that is compared with does not depend on the noise.
    """

    n: int
    dimension: int
    lipschitz: float
    radius: float
    batch_size: int
    counts: Floats
    stds: Floats
    step_std: float | None
    beta: float | None
    diameter: float
    l1: float
    l2: float
    plan: Plan | None
    fixed: bool

    @classmethod
    def of(
        cls, n: Any, dimension: Any, lipschitz: Any, radius: Any, plan: Plan | None, noise: Any, batch_size: Any,
        beta: Any, diameter: Any, l1: Any, l2: Any, fixed: bool,
    ) -> "_Problem":  # fmt: skip
        if (plan is None) == (noise is None):
            raise ArgumentError("exactly one of plan and noise must be given")
        lipschitz = checks.positive("lipschitz", lipschitz)
        if plan is not None:
            _check_plan(plan, lipschitz)
            batch_size = plan.batch_size
        n, batch_size = checks.integer("n", n, low=1), checks.integer("batch_size", batch_size, low=1)
        steps = ceil(n / batch_size)
        counts = np.full(steps, float(batch_size))
        counts[-1] = n - (steps - 1) * batch_size
        dimension = checks.integer("dimension", dimension, low=1)
        stds = _stds(plan, noise, steps)
        return cls(
            n=n, dimension=dimension, lipschitz=lipschitz, radius=checks.positive("radius", radius),
            batch_size=batch_size, counts=counts, stds=stds,
            step_std=plan.noise_std if plan is not None and type(plan.strategy) is Independent else None,
            beta=None if beta is None else checks.probability("beta", beta),
            diameter=inf if diameter == inf else checks.positive("diameter", diameter),
            l1=checks.real("l1", l1, low=0.0), l2=checks.real("l2", l2, low=0.0), plan=plan, fixed=fixed,
        )  # fmt: skip

    def analyses(self) -> list[str]:
        """Those that hold."""
        bounded = self.beta is None or self.diameter < inf
        return ["deviation", "martingale"] if self.step_std is not None and bounded else ["deviation"]

    def terms(self, analysis: str, regularization: float) -> dict[str, float]:
        """Of the bound at a lambda."""
        strong: Floats = regularization + self.l2 * self.batch_size * np.arange(float(len(self.counts)))  # lambda_t
        noise = self._deviation(strong) if analysis == "deviation" else self._martingale(strong)
        found = {
            "learning": float((np.square(self.counts) / strong).sum()) * self.lipschitz**2 / 2 / self.n,
            "noise": noise / self.n,
            "comparator": regularization * self.radius**2 / 2 / self.n,
        }
        if self.l1 or self.l2:
            once = self.l1 * sqrt(self.dimension) * self.radius + self.l2 / 2 * self.radius**2
            found["composite"] = once * len(self.counts) * self.batch_size / self.n
        return found

    def _deviation(self, strong: Floats) -> float:
        """sum_t m_t L ||b_{t-1}|| / lambda_t: in the mean, or but for a probability of beta."""
        norm = _chi_mean(self.dimension) + (0.0 if self.beta is None else sqrt(2 * log(1 / self.beta)))
        return self.lipschitz * norm * float((self.counts * self.stds / strong).sum())

    def _martingale(self, strong: Floats) -> float:
        """sum_t <-xi_t, theta_t - theta*> + <g_t, xi_t> / lambda_t + ||xi_t||^2 / 2 lambda_t, likewise.

        The first is <b_T, theta* - theta_1> - sum_t <xi_t, theta_t - theta_1>: its mean is 0 for a theta* that does not
        depend on the noise, and at most radius E||b_T|| for one that is chosen when all is over.
        """
        assert self.step_std is not None
        std, d, steps = self.step_std, self.dimension, len(strong)
        mean = std**2 * d * float((0.5 / strong).sum())
        last = 0.0 if self.fixed else self.radius * std * sqrt(steps)
        if self.beta is None:
            return mean + last * _chi_mean(d)
        x = log((3 if self.fixed else 4) / self.beta)
        squares = std**2 * (sqrt(d * x * float(np.square(1 / strong).sum())) + x / float(strong[0]))
        crossed = std * self.lipschitz * sqrt(2 * x * float(np.square(self.counts / strong).sum()))
        walked = std * self.diameter * sqrt(2 * x * steps)
        return mean + squares + crossed + walked + last * (_chi_mean(d) + sqrt(2 * x))

    def published(self, regularization: float) -> float | None:
        """[K21] Theorem C.1: n times it is  T (m L sigma' sqrt(d ceil(lg T) ln(T/beta)) + m^2 L^2) / lambda + .."""
        if self.plan is None or type(self.plan.strategy) is not Tree or self.beta is None or self.l1 or self.l2:
            return None
        steps, full = len(self.counts), self.batch_size * self.lipschitz
        noise = self.plan.noise_std * sqrt(self.dimension * ceil(log2(steps)) * log(steps / self.beta))
        pays = steps * (full * noise + full**2) / regularization
        return (pays + regularization * self.radius**2 / 2) / self.n


def _check_plan(plan: Plan, lipschitz: float) -> None:
    if type(plan) is not Plan:
        raise ArgumentError(f"plan must be an anyorder Plan (see anyorder.plan), got {type(plan).__name__}")
    if plan.participation.secret:
        raise PlanError(
            "secret sampling draws batches of random size, which the bounds do not cover: plan for another order"
        )
    if plan.grid is not None:
        raise PlanError(
            "the plan has a grid for exact integers, which no learner takes: plan without ao.mechanism(secure=True)"
        )
    if lipschitz > plan.clip_norm:
        raise PlanError(
            f"lipschitz must be at most the plan's clip norm {plan.clip_norm:g}, got {lipschitz:g}: gradients that are "
            "clipped are those of another loss, which no bound speaks of; plan with clip_norm=lipschitz"
        )


def _stds(plan: Plan | None, noise: Any, steps: int) -> Floats:
    """(steps,) of the noise in theta_t, t = 1, ..: nothing in the first."""
    if plan is not None:
        if steps > plan.n:
            raise ArgumentError(
                f"n must be at most {plan.n * plan.batch_size}, the examples of the plan's {plan.n} steps"
            )
        of_sums = plan.clip_norm * plan.noise_profile(sums=True)
    elif np.ndim(noise) == 0:
        of_sums = np.full(steps, checks.real("noise", noise, low=0.0))
    else:
        of_sums = checks.array("noise", noise, ndim=1)
        if len(of_sums) < steps or of_sums.min() < 0:
            raise ArgumentError(f"noise must be {steps} numbers of at least 0, one for each step, got {len(of_sums)}")
    return np.concatenate([[0.0], of_sums[: steps - 1]])


def _chi_mean(d: int) -> float:
    """E ||z||, z of d standard normals; at most sqrt(d)."""
    return sqrt(2.0) * exp(lgamma((d + 1) / 2) - lgamma(d / 2)) if d < 1e6 else sqrt(d)


# -- the best lambda -------------------------------------------------------------------------------------------------


def _least(problem: _Problem, analysis: str, regularization: float | None) -> RegretBound:
    """The bound at the lambda, or at the best one."""
    best = _minimiser(problem, analysis) if regularization is None else regularization
    terms = problem.terms(analysis, best)
    return RegretBound(
        value=sum(terms.values()), regularization=best, terms=terms, analysis=analysis, beta=problem.beta,
        published=None, trivial=problem.lipschitz * problem.diameter,
    )  # fmt: skip


def _minimiser(problem: _Problem, analysis: str) -> float:
    """The best lambda: in closed form without l2, where all but the comparator falls as 1 / lambda; else by sections.

    With l2 the others fall more slowly, so that the best lambda is less; the whole is convex in lambda.
    """
    plain = replace(problem, l1=0.0, l2=0.0)

    def falls(at: float) -> float:
        terms = plain.terms(analysis, at)
        return terms["learning"] + terms["noise"]

    pays = 2 * (falls(1.0) - falls(2.0))  # without what does not depend on lambda
    best = sqrt(2 * problem.n * pays) / problem.radius
    if not problem.l2:
        return best
    return exp(_section(lambda at: sum(problem.terms(analysis, exp(at)).values()), log(best * _FALL), log(best)))


def _section(cost: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that falls and then rises is least, by golden sections."""
    golden = (sqrt(5.0) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    costs = cost(left), cost(right)
    while high - low > 1e-6:
        if costs[0] <= costs[1]:
            high, right, left = right, left, right - golden * (right - low)
            costs = cost(left), costs[0]
        else:
            low, left, right = left, right, left + golden * (high - left)
            costs = costs[1], cost(right)
    return (low + high) / 2
