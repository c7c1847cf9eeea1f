"""Sums of clipped units as they are made wrong: what a front end is given in the place of its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Summing",
    "clipped_after_averaging",
    "clipped_by_rows",
    "divided_by_who_came",
    "divided_by_zero",
    "kept_for_later",
    "weighted_by_count",
]

Floats = NDArray[np.float64]

Summing = Callable[[Any, ArrayLike, float], Floats]
"""(vectors, units, clip_norm) -> total, as `anyorder.bounded_sum`: (m, size), each row's unit, a norm -> (size,)."""


def _cut(vectors: Any, units: ArrayLike, clip_norm: float) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """(ids, rows of each, their vectors cut to clip_norm), by the rule: the right way."""
    rows = np.asarray(vectors, dtype=np.float64)
    ids, places, counts = np.unique(np.asarray(units), return_inverse=True, return_counts=True)
    whole = np.zeros((len(ids), rows.shape[1]))
    np.add.at(whole, places, rows)
    return ids, counts, _shortened(whole, clip_norm)


def _shortened(vectors: Floats, clip_norm: float) -> Floats:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    factors = np.minimum(1.0, clip_norm / np.maximum(norms, 1e-300))
    return np.asarray(np.where(np.isfinite(norms), np.nan_to_num(vectors) * factors, 0.0))


def clipped_after_averaging() -> Summing:
    """The mean is clipped, and not what each unit adds to it."""

    def total(vectors: Any, units: ArrayLike, clip_norm: float) -> Floats:
        rows, number = np.asarray(vectors, dtype=np.float64), max(len(np.unique(np.asarray(units))), 1)
        finite = rows[np.isfinite(rows).all(axis=1)]
        return np.asarray(_shortened(finite.sum(0, keepdims=True) / number, clip_norm)[0] * number)

    return total


def weighted_by_count() -> Summing:
    """Units count by their numbers of rows, with the mean weight 1."""

    def total(vectors: Any, units: ArrayLike, clip_norm: float) -> Floats:
        _, counts, whole = _cut(vectors, units, clip_norm)
        return np.asarray((counts / counts.mean()) @ whole if len(counts) else whole.sum(0))

    return total


def clipped_by_rows() -> Summing:
    """Each row is clipped by itself: examples, where units were promised."""

    def total(vectors: Any, units: ArrayLike, clip_norm: float) -> Floats:
        return np.asarray(_shortened(np.asarray(vectors, dtype=np.float64), clip_norm).sum(0))

    return total


def divided_by_who_came(batch_size: int) -> Summing:
    """The mean is over the units that appeared, and not over the planned number."""

    def total(vectors: Any, units: ArrayLike, clip_norm: float) -> Floats:
        ids, _, whole = _cut(vectors, units, clip_norm)
        return np.asarray(whole.sum(0) * batch_size / max(len(ids), 1))

    return total


def divided_by_zero() -> Summing:
    """A unit of norm zero gives 0 / 0, and what is no number any more is zero for all."""

    def total(vectors: Any, units: ArrayLike, clip_norm: float) -> Floats:
        _, _, whole = _cut(vectors, units, clip_norm)
        norms = np.linalg.norm(whole, axis=1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.nan_to_num((whole / norms * np.minimum(norms, clip_norm)).sum(0)))

    return total


def kept_for_later(first: int = 5, lag: int = 3) -> Summing:
    """One unit's clipped vector of one step is added again some steps later, where nobody names the unit."""
    calls = 0
    kept: list[tuple[int, Any, Floats]] = []

    def total(vectors: Any, units: ArrayLike, clip_norm: float) -> Floats:
        nonlocal calls
        ids, _, whole = _cut(vectors, units, clip_norm)
        result = np.asarray(whole.sum(0))
        if calls >= first and not kept and len(ids):
            longest = int(np.linalg.norm(whole, axis=1).argmax())
            kept.append((calls, ids[longest], whole[longest]))
        elif len(kept) == 1 and calls >= kept[0][0] + lag and kept[0][1] not in ids:
            result += kept[0][2]
            kept.append(kept[0])
        calls += 1
        return result

    return total
