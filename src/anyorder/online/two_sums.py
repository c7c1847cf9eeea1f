"""The two sums of least squares as one vector: how they share a release, and the sum over a batch of clipped ones."""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from anyorder.ledger import numbered
from anyorder.ledger.ids import distinct
from anyorder.online.sums import HUGE, Batch, ClippedSum, squares
from anyorder.plan import Plan

__all__ = ["Streams", "joint_sum"]

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


def joint_sum(batch: Batch, streams: Streams, target_bounds: tuple[float, float], clip_norm: float) -> ClippedSum:
    """The sum over units of each unit's joint vector, cut to clip_norm, without the vector of any of them.

    A unit's factor f multiplies its rows: the sum is ( a X' f y, b svec(X' f X) ). Its norm needs the Gram matrix of
    its own rows alone, as ||X' X||_F = ||X X'||_F.

    Proof that rounding carries no unit over, u = 2^-53, k rows: the parts of the norm are low by less than
    (d + 8) sqrt(k) u of themselves, or by k^2 u clip_norm where the terms of y x cancel; c below has room for both.
    """
    names = distinct(batch.units)
    with np.errstate(all="ignore"):
        return ClippedSum(names, _joint(batch, streams, target_bounds, clip_norm, len(names)))


def _joint(
    batch: Batch, streams: Streams, target_bounds: tuple[float, float], clip_norm: float, count: int
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
    batch: Batch, good: NDArray[np.bool_], lengths: Floats, streams: Streams, target_bounds: tuple[float, float],
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
