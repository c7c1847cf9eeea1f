"""Least squares in one pass from two private sums, [Kairouz et al. 2021, Algorithm 2] under any plan."""

from collections.abc import Iterable
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder.errors import ArgumentError
from anyorder.online.ftrl import check_plan
from anyorder.online.one_pass import OnePass
from anyorder.online.quadratic import minimise
from anyorder.online.sets import Ball, Box, Everything, Set, Simplex, constraint_of
from anyorder.online.sums import Batch, ClippedSum
from anyorder.online.two_sums import Streams, joint_sum
from anyorder.plan import Plan

__all__ = ["LeastSquares"]

Floats = NDArray[np.float64]


class LeastSquares(OnePass):
    """A linear model of squared loss that learns in one pass from sums that do not depend on it.

    Each row x is cut to norm L = bounds, each y to [low, high], Y = max(|low|, |high|), and adds one vector

        z = ( a y x,  b svec(x x') ),    svec: the upper triangle, sqrt 2 off the diagonal: ||svec(M)|| = ||M||_F
        ||z||^2 = a^2 y^2 ||x||^2 + b^2 ||x||^4  <=  a^2 L^2 Y^2 + b^2 L^4  =  plan.clip_norm^2

    Rows of one unit are added first, and their sum is cut to the clip norm as a whole. The vectors are released as one
    stream, a step of `ao.Release` each: with the sums so far, s_t of y x and W_t of x x', read off with their noise,

        theta_{t+1} = argmin over theta in the set of
                      theta' W_t theta - 2 <s_t, theta> + regularization/2 ||theta||^2
                      + t m ( l1 ||theta||_1 + l2/2 ||theta||^2 ),    m = plan.batch_size

    [K21] Algorithm 2 has two trees with the same noise multiplier: by the norm above one release of both is their
    composition, for any strategy, and how the budget is split between them can be chosen. a and b are those for which
    the mean of ||b_t - B_t theta||^2, the noise in half the gradient, is least at ||theta|| = radius:

        a^2 L^2 Y^2 : b^2 L^4  =  sqrt(features) Y : sqrt((features + 1) / 2) L radius

    W_t has the noise of its upper triangle in both triangles: it is symmetric, with noise of std tau on the diagonal
    and tau / sqrt 2 off it, tau = noise_std ||(A K)[t]|| / b. It may have negative eigenvalues, as the true sum has
    not: they are set to zero. That is the nearest matrix without any, no farther from the true sum, and makes the
    problem one with a single minimum, which an indefinite W_t with a small regularization has not. See docs/regret.md.

    Guarantee: all iterates together, and what is computed from them, are (plan.epsilon, plan.delta)-DP for one unit,
    the plan's `unit`, under its neighbours. A row with NaN, infinities or numbers beyond 2^200, in x or y, makes its
    unit add exactly zero, and nothing tells of it. A step that is refused changes nothing.

    Args:
        plan: what to run; its workload best a prefix sum, which is what is used.
        features: d; a step releases d + d (d + 1) / 2 numbers.
        bounds: L, public: the norm to which rows are cut.
        target_bounds: (low, high), public: to which targets are cut. The nearer to zero, the less noise: take off
            the middle of a range, and let a constant feature have it.
        constraint: the set that theta lies in: one of `anyorder.online.sets`; None for `Everything()`.
        regularization: above 0; None: 2 N / radius, where N^2 is that least mean, averaged over the plan's steps.
        radius: norm of theta that weights and regularization are chosen for; None: that of the set's farthest point, or
            without a set Y / L.
        l1, l2: weights of the elastic net in the mean loss.
        average: keep the mean of the iterates, which then has to be found at each step.
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
        self.plan, self.features = plan, _check.integer("features", features, low=1)
        self.bounds = _check.positive("bounds", bounds)
        self.target_bounds = _targets(target_bounds)
        self.constraint = constraint_of(constraint)
        largest = max(abs(bound) for bound in self.target_bounds)
        self.radius = (
            _farthest(self.constraint, self.features, largest / self.bounds)
            if radius is None
            else _check.positive("radius", radius)
        )
        streams = Streams.of(plan, self.features, self.bounds, largest, self.radius)
        self.target_weight, self.square_weight = streams.target_weight, streams.square_weight
        self.regularization = (
            2 * streams.noise(plan.noise_error(sums=True)) / self.radius
            if regularization is None
            else _check.positive("regularization", regularization)
        )
        self.l1, self.l2 = _check.real("l1", l1, low=0.0), _check.real("l2", l2, low=0.0)
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
        batch = Batch.of(X, y, units, self.features)
        self.release.check(batch.units)
        names, total = self._joint_sum(batch)
        self.release.step(names, total)

    def _joint_sum(self, batch: Batch) -> ClippedSum:
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
        """(d, 1): the mean of the iterates that were played; theta_1 before the first step. Needs `average=True`."""
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
    low, high = (_check.real("target_bounds", bound) for bound in bounds)
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
