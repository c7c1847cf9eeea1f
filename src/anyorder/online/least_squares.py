"""Least squares in one pass from two private sums, [Kairouz et al. 2021, Algorithm 2] under any plan."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from anyorder import checks
from anyorder.errors import ArgumentError, TrainingError
from anyorder.ledger import distinct, numbered
from anyorder.online.learner import OnePass, check_plan
from anyorder.online.sets import Ball, Box, Everything, Set, Simplex, constraint_of
from anyorder.online.sums import HUGE, Examples, LinearSum, squares
from anyorder.plan.plan import Plan

# ----------------------------------------------------------------------------------------------------
# The two sums of least squares as one vector: how they share a release, and the sum over a batch of clipped ones.


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Streams:
    """How the two sums share one release.

    Attributes:
        target_weight, square_weight: a and b.
        bounds: L.
        step_noise: sqrt(features / a^2 + (features + 1) radius^2 / (2 b^2)).
    """

    target_weight: float
    square_weight: float
    bounds: float
    step_noise: float

    @classmethod
    def of(cls, plan: Plan, features: int, bounds: float, largest: float, radius: float) -> "Streams":
        """The a and b for which E||b - B theta||^2 is least at ||theta|| = radius, under the clip norm.

        B has variance tau^2 on the diagonal and tau^2 / 2 off it: E||B theta||^2 = tau^2 (features + 1) / 2 radius^2.
        With u = a^2 L^2 Y^2 / C^2, 1 - u = b^2 L^4 / C^2 that is p^2 / u + q^2 / (1 - u) times a constant,
        p = sqrt(features) Y, q = sqrt((features + 1) / 2) L radius: least at u = p / (p + q).
        """
        p, q = sqrt(features) * largest, sqrt((features + 1) / 2) * bounds * radius
        a = plan.clip_norm * sqrt(p / (p + q)) / (bounds * largest)
        b = plan.clip_norm * sqrt(q / (p + q)) / bounds**2
        return cls(a, b, bounds, plan.clip_norm * sqrt(features / a**2 + (features + 1) * radius**2 / 2 / b**2))

    def noise(self, std: float) -> float:
        """The root mean square of ||b - B theta|| at ||theta|| = radius, for noise of that std in clip norms."""
        return self.step_noise * std


def joint_sum(batch: Examples, streams: Streams, target_bounds: tuple[float, float], clip_norm: float) -> LinearSum:
    """The sum over units of each unit's joint vector, clipped to clip_norm, without the vector of any of them.

    A unit's factor f multiplies its rows: the sum is ( a X' f y, b svec(X' f X) ). Its norm needs the Gram matrix of
    its own rows alone, as ||X' X||_F = ||X X'||_F.

    Proof that rounding carries no unit over, u = 2^-53, k rows: the parts of the norm are low by less than
    (d + 8) sqrt(k) u of themselves, or by k^2 u clip_norm where the terms of y x cancel; c below has room for both.
    """
    names = distinct(batch.units)
    with np.errstate(all="ignore"):
        return LinearSum(names, _joint(batch, streams, target_bounds, clip_norm, len(names)))


def _joint(
    batch: Examples, streams: Streams, target_bounds: tuple[float, float], clip_norm: float, count: int
) -> Floats:  # fmt: skip
    lengths = np.sqrt(squares(batch.X))
    good = (lengths <= HUGE) & (np.abs(batch.y) <= HUGE)  # not so for NaN
    factors = _factors(batch, good, lengths, streams, target_bounds, clip_norm, count)
    rows = batch.X
    kept = good & (factors > 0)
    if not kept.all():
        rows, lengths, factors = rows[kept], lengths[kept], factors[kept]
    y = np.clip(batch.y[kept].astype(np.float64), *target_bounds)
    rows = _scaled(rows, _cut(lengths, streams.bounds))
    weighted = _scaled(rows, factors)
    moments = rows.T @ weighted
    if sparse.issparse(moments):
        moments = moments.toarray()
    moments *= sqrt(2)
    np.fill_diagonal(moments, np.diagonal(moments) / sqrt(2))
    triangle = np.triu_indices(len(moments))
    parts = [streams.target_weight * (weighted.T @ y), streams.square_weight * moments[triangle]]
    return np.concatenate(parts, dtype=np.float64)


def _factors(
    batch: Examples, good: NDArray[np.bool_], lengths: Floats, streams: Streams, target_bounds: tuple[float, float],
    clip_norm: float, count: int,
) -> Floats:  # fmt: skip
    """(m,) what each row is multiplied by: its unit's factor, 0 for the rows of a unit with one that cannot be used."""
    d = batch.X.shape[1]
    y = np.clip(batch.y.astype(np.float64), *target_bounds)
    short = np.minimum(lengths, streams.bounds)
    norms = short * np.hypot(streams.target_weight * y, streams.square_weight * short)
    result: Floats = np.minimum(1.0, clip_norm * (1 - (d + 32) * 2.0**-51) / norms)
    result[norms == 0] = 1.0
    result[~good] = 0.0
    if count == len(result):
        return result
    groups = numbered(batch.units)
    order, sizes = np.argsort(groups, kind="stable"), np.bincount(groups, minlength=count)
    ends = np.cumsum(sizes)
    for group in np.flatnonzero(sizes > 1):
        own = order[ends[group] - sizes[group] : ends[group]]
        if not good[own].all():
            result[own] = 0.0
            continue
        rows, k = _scaled(batch.X[own], _cut(lengths[own], streams.bounds)), len(own)
        gram = rows @ rows.T
        gram = gram.toarray() if sparse.issparse(gram) else gram
        first = np.sqrt(np.square(rows.T @ y[own]).sum())
        norm = np.hypot(streams.target_weight * first, streams.square_weight * np.sqrt(np.square(gram).sum()))
        room = 1 - ((d + 32) * sqrt(k) + k * k) * 2.0**-51
        result[own] = min(1.0, clip_norm * room / norm) if norm else 1.0
    return result


def _cut(lengths: Floats, bound: float) -> Floats:
    """(m,) what rows are multiplied by to be no longer than the bound."""
    return np.asarray(np.minimum(1.0, bound / np.maximum(lengths, np.finfo(np.float64).tiny)))


def _scaled(rows: Any, factors: Floats) -> Any:
    if sparse.issparse(rows):
        return sparse.diags_array(factors, format="csr") @ rows
    return np.asarray(rows * factors[:, None])


# ----------------------------------------------------------------------------------------------------
# Minima of quadratic functions over the sets of learners.


_TOLERANCE = 1e-10  # of iterates that are found by approach, against the largest that the objective allows


def minimise(W: Floats, s: Floats, ridge: float, l1: float, constraint: Set) -> Floats:
    """The minimum over theta in the set of  1/2 theta' (W+ + ridge I) theta - <s, theta> + l1 ||theta||_1.

    W+ is W without its negative eigenvalues: the nearest matrix in Frobenius norm that has none. With ridge > 0 there
    is one minimum. W = V diag(w) V', h = max(w, 0) + ridge, r = V' s:

        Everything, l1 = 0   V (r / h)
        Ball, l1 = 0         the same where it lies within, else V (r / (h + nu)), nu > 0, of that norm
        else                 proximal gradient steps, accelerated: each is the set's own `argmin`

    Args:
        W: (d, d), symmetric. s: (d,). ridge: above 0.
    Returns: (d, 1), in the set; by steps within 1e-10 of ||s|| / ridge of the minimum.
    Cost: O(d^3) for the eigenvalues; then O(d^2) for each of some sqrt(max h / min h) log(1e10) steps.
    """
    values, V = np.linalg.eigh(W)
    h = np.maximum(values, 0.0) + ridge
    r = V.T @ s
    free = bool(l1 == 0)
    match constraint:
        case Everything() if free:
            theta = V @ (r / h)
        case Ball() if free:
            theta = V @ _within(r, h, constraint.radius)
            theta *= min(1.0, constraint.radius / max(np.linalg.norm(theta), np.finfo(np.float64).tiny))
        case Everything() | Ball() | Box() | Simplex():
            return _approached((V * h) @ V.T, s, float(h.max()), float(h.min()), l1, constraint)
        case _:
            assert_never(constraint)
    return np.asarray(theta)[:, None]


def _within(r: Floats, h: Floats, radius: float) -> Floats:
    """The vector r / (h + nu) for the least nu >= 0 for which its norm is at most the radius.

    Newton's iteration on 1 / ||r / (h + nu)|| - 1 / radius, concave and rising in nu: from 0 it comes from below, and
    never goes past [More and Sorensen 1983].
    """
    nu = 0.0
    for _ in range(100):
        found = r / (h + nu)
        norm = float(np.linalg.norm(found))
        if norm <= radius * (1 + 1e-14):
            break
        nu += (norm / radius - 1) * norm**2 / float((np.square(found) / (h + nu)).sum())
    return np.asarray(r / (h + nu))


def _approached(H: Floats, s: Floats, steepest: float, flattest: float, l1: float, constraint: Any) -> Floats:
    """The minimum by accelerated proximal steps of constant momentum [Nesterov 2004, 2.2; Beck and Teboulle 2009].

    Of a step from y to x, ||x - minimum|| <= 2 (steepest / flattest) ||y - x||, which says when to stop.
    """
    ratio = sqrt(flattest / steepest)
    momentum = (1 - ratio) / (1 + ratio)
    near = _TOLERANCE * float(np.linalg.norm(s)) / flattest
    x = y = constraint.argmin(-s[:, None], steepest, l1)
    for _ in range(int(80 / ratio) + 100):
        before, x = x, constraint.argmin((H @ y - s[:, None]) - steepest * y, steepest, l1)
        if 2 * (steepest / flattest) * np.linalg.norm(x - y) <= near:
            return np.asarray(x)
        y = x + momentum * (x - before)
    raise TrainingError("the minimum over the set was not reached: the sums have numbers of too different sizes")


class LeastSquares(OnePass):
    """A linear model of squared loss that learns in one pass from sums that do not depend on it.

    Each row x is clipped to norm L = bounds, each y to [low, high], Y = max(|low|, |high|), and adds one vector

        z = ( a y x,  b svec(x x') ),    svec: the upper triangle, sqrt 2 off the diagonal: ||svec(M)|| = ||M||_F
        ||z||^2 = a^2 y^2 ||x||^2 + b^2 ||x||^4  <=  a^2 L^2 Y^2 + b^2 L^4  =  plan.clip_norm^2

    Rows of one unit are added first, and their sum is clipped to the clip norm as a whole. The vectors are released as
    one stream, a step of `ao.Release` each: with the sums so far, s_t of y x and W_t of x x', read off with their
    noise,
        theta_{t+1} = argmin over theta in the set of
                      theta' W_t theta - 2 <s_t, theta> + regularization/2 ||theta||^2
                      + t m ( l1 ||theta||_1 + l2/2 ||theta||^2 ),    m = plan.batch_size

    [K21] Algorithm 2 has two trees with the same noise multiplier: by the norm above one release of both is their
    composition, for any strategy, and how the budget is split between them can be chosen. a and b are those for which
    the mean of ||b_t - B_t theta||^2, the noise in half the gradient, is least at ||theta|| = radius:

        E ||b_t - B_t theta||^2  =  noise^2 ( features / a^2 + (features + 1) / 2 ||theta||^2 / b^2 )
        a^2 L^2 Y^2 : b^2 L^4  =  sqrt(features) Y : sqrt((features + 1) / 2) L radius

    W_t has the noise of its upper triangle in both triangles: it is symmetric, with noise of std tau on the diagonal
    and tau / sqrt 2 off it, tau = noise_std ||(A K)[t]|| / b. It may have negative eigenvalues, as the true sum has
    not: they are set to zero. That is the nearest matrix without any, no farther from the true sum, and makes the
    problem one with a single minimum, which an indefinite W_t with a small regularization has not.

    Guarantee: the weights after all steps together, and what is computed from them, are (plan.epsilon, plan.delta)-DP
    for one unit, the plan's `unit`, under its neighbours. A row with NaN, infinities or numbers beyond 2^200, in x or
    y, makes its unit add exactly zero, and nothing tells of it. A step that is refused changes nothing.

    Args:
        plan: what to run; its workload best a prefix sum, which is what is used.
        features: d; a step releases d + d (d + 1) / 2 numbers.
        bounds: L, public: the norm to which rows are clipped.
        target_bounds: (low, high), public: to which targets are clipped. The nearer to zero, the less noise: take off
            the middle of a range, and let a constant feature have it.
        constraint: the set that theta lies in: one of `anyorder.online.sets`; None for `Everything()`.
        regularization: above 0; None: 2 N / radius, where N^2 is that least mean, averaged over the plan's steps.
        radius: norm of theta that weights and regularization are chosen for; None: that of the set's farthest point, or
            without a set Y / L.
        l1, l2: weights of the elastic net in the mean loss.
        average: keep the mean of the weights over all steps, which then has to be found at each step.
        checkpoint, key: as of `Learner`.

    Attributes:
        plan, features, bounds, target_bounds, constraint, regularization, radius, l1, l2: as given or chosen.
        target_weight, square_weight: a and b.
        release: carries the plan out; observers see the steps of the joint vector.
        extra: as of `Learner`.

    Raises: PlanError, ArgumentError, CheckpointError, as `Learner`.
    Cost: of a step O(m d^2), and the noise of its numbers; of `theta` O(d^3), once after each step where it is asked
        for.

    Example:
        >>> plan = ao.plan(dataset_size=4, batch_size=2, epochs=1, epsilon=8, delta=1e-6)
        >>> learner = ao.online.LeastSquares(plan, 2, bounds=1.0, target_bounds=(-1.0, 1.0))
        >>> learner.step([0, 1], np.eye(2), [0.5, -0.5])
        >>> learner.theta.shape, learner.steps_taken
        ((2, 1), 1)
    """

    kind = "anyorder online least squares 1"
    word = "least squares"

    def __init__(
        self,
        plan: Plan,
        features: int,
        *,
        bounds: float,
        target_bounds: tuple[float, float],
        constraint: Set | None = None,
        regularization: float | None = None,
        radius: float | None = None,
        l1: float = 0.0,
        l2: float = 0.0,
        average: bool = False,
        checkpoint: str | Path | None = None,
        key: bytes | None = None,
    ) -> None:
        check_plan(plan)
        self.plan, self.features = plan, checks.integer("features", features, low=1)
        self.bounds = checks.positive("bounds", bounds)
        self.target_bounds = _targets(target_bounds)
        self.constraint = constraint_of(constraint)
        largest = max(abs(bound) for bound in self.target_bounds)
        self.radius = (
            _farthest(self.constraint, self.features, largest / self.bounds)
            if radius is None
            else checks.positive("radius", radius)
        )
        streams = Streams.of(plan, self.features, self.bounds, largest, self.radius)
        self.target_weight, self.square_weight = streams.target_weight, streams.square_weight
        self.regularization = (
            2 * streams.noise(plan.noise_error(sums=True)) / self.radius
            if regularization is None
            else checks.positive("regularization", regularization)
        )
        self.l1, self.l2 = checks.real("l1", l1, low=0.0), checks.real("l2", l2, low=0.0)
        self.constraint.check((self.features, 1), self.regularization)
        self._streams, self._keeps_average = streams, bool(average)
        self._triangle = np.triu_indices(self.features)
        size = self.features + len(self._triangle[0])
        self._begin(size, np.zeros(size), np.zeros((self.features, 1)), checkpoint, key)

    def _begun(self) -> None:
        self._theta: Floats | None = None

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, units: Iterable[Any], X: Any, y: Any) -> None:
        """Learn from one batch.

        Args, Raises: as of `Learner.step`; targets are any finite numbers.
        """
        self._check()
        batch = Examples.of(X, y, units, self.features)
        self.release.check(batch.units)
        names, total = self._joint_sum(batch)
        self.release.step(names, total)

    def _joint_sum(self, batch: Examples) -> LinearSum:
        return joint_sum(batch, self._streams, self.target_bounds, self.release.clip_norm)

    def _receive(self, step: int, private: Floats) -> None:
        self._in_order(step)
        if self._keeps_average:
            self._played += self.theta
        self._sum += self.plan.batch_size * private
        self._t, self._theta = step + 1, None

    @property
    def sums(self) -> tuple[Floats, Floats]:
        """(s (d,), W (d, d)): the private sums of y x and of x x'; W is symmetric, and may be indefinite."""
        d = self.features
        W = np.zeros((d, d))
        W[self._triangle] = self._sum[d:] / self.square_weight
        W[~np.eye(d, dtype=bool)] /= sqrt(2)
        return self._sum[:d] / self.target_weight, W + np.triu(W, 1).T

    @property
    def theta(self) -> Floats:
        """(d, 1) float64, the iterate that the next step plays; cannot be written."""
        if self._theta is None:
            s, W = self.sums
            seen = self._t * self.plan.batch_size
            ridge = (self.regularization + seen * self.l2) / 2
            theta = minimise(W, s, ridge, seen * self.l1 / 2, self.constraint)
            theta.flags.writeable = False
            self._theta = theta
        return self._theta

    @property
    def average(self) -> Floats:
        """(d, 1): the mean of the weights that were played; theta_1 before the first step. Needs `average=True`."""
        if not self._keeps_average:
            raise ArgumentError("average must be asked for when the learner is made: LeastSquares(.., average=True)")
        return super().average

    def _settings(self) -> str:
        numbers = (self.regularization, self.radius, self.l1, self.l2, self._keeps_average)
        return (
            f"{self.features} features of norm {self.bounds}, targets in {self.target_bounds}, "
            f"{self.constraint.words()}, regularization, radius, l1, l2 and average {numbers}"
        )


def _targets(bounds: Any) -> tuple[float, float]:
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise ArgumentError(f"target_bounds must be (low, high), got {bounds!r}")
    low, high = (checks.real("target_bounds", bound) for bound in bounds)
    if not low < high:
        raise ArgumentError(f"target_bounds must be (low, high) with low < high, got {bounds!r}")
    return low, high


def _farthest(constraint: Set, features: int, otherwise: float) -> float:
    """Norm of the point of the set that is farthest from zero."""
    match constraint:
        case Everything():
            return otherwise
        case Ball() | Simplex():
            return constraint.radius
        case Box():
            corner = np.broadcast_to(np.maximum(np.abs(constraint.low), np.abs(constraint.high)), (features, 1))
            return float(np.linalg.norm(corner)) or otherwise
