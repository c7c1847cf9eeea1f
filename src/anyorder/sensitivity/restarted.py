"""RestartedBLT: X is 0 between its epochs, and X_tt is the epoch's share^2."""

from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.patterns import Listed, Pattern, PerEpoch, Separated
from anyorder.sensitivity import dense
from anyorder.sensitivity.bound import Bound, from_sum, roots
from anyorder.sensitivity.visits import Visits, visits
from anyorder.strategy import RestartedBLT

__all__ = ["bound", "units"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_MAX_GRAM = 4096  # steps up to which X itself is an option


def bound(strategy: RestartedBLT, pattern: Pattern) -> Bound:
    """The sensitivity of a RestartedBLT.

    A unit that is c times in an epoch of the strategy adds at most (c share)^2 there, exactly share^2 for c = 1; epochs
    add up. So one step in each epoch costs sum share^2, exactly. Where a unit may come twice in an epoch, or where it
    may leave an epoch out, n up to 4096 goes to X itself; beyond, the counts give an upper bound.

    Cost: O(k), O(M) for M participations in a list of patterns, O(n^2) with X.
    """
    squares = np.square(strategy.shares)
    terms = strategy.n + strategy.num_epochs
    match pattern:
        case Separated() if pattern.is_single:
            return from_sum(float(squares.max()), terms, exact=True)
        case PerEpoch(steps_per_epoch=s) if s % strategy.steps_per_epoch == 0:
            inside = s // strategy.steps_per_epoch  # whole epochs of the strategy
            return from_sum(float(squares.reshape(-1, inside).max(axis=1).sum()), terms, exact=True)
        case Listed():
            totals, once = _unit_squares(strategy, visits(pattern))
            if once or strategy.n > _MAX_GRAM:
                return from_sum(float(totals.max()), terms, exact=once)
        case Separated() | PerEpoch():
            if strategy.n > _MAX_GRAM:
                return from_sum(_counted(strategy, pattern), terms, exact=False)
        case _:
            assert_never(pattern)
    return dense.bound(strategy, pattern)


def units(strategy: RestartedBLT, listed: Listed) -> Floats:
    """Of each unit: sum |X| over its steps squared; beyond 4096 steps sum (c share)^2 over its epochs."""
    totals, once = _unit_squares(strategy, visits(listed))
    if once or strategy.n > _MAX_GRAM:
        return roots(totals, strategy.n + strategy.num_epochs)
    return dense.units(strategy, listed)


def _unit_squares(strategy: RestartedBLT, who: Visits) -> tuple[Floats, bool]:
    """(U,) sum over epochs of (c share)^2, and whether all c <= 1."""
    epochs = who.steps // strategy.steps_per_epoch
    pairs, counts = np.unique(who.indices * strategy.num_epochs + epochs, return_counts=True)
    weights = np.square(counts * strategy.shares[pairs % strategy.num_epochs])
    totals = np.bincount(pairs // strategy.num_epochs, weights=weights, minlength=who.num_units)
    return totals.astype(np.float64), bool(counts.max() == 1)


def _counted(strategy: RestartedBLT, pattern: Separated | PerEpoch) -> float:
    """The sum of (c share)^2, c the most that fits into each epoch; the k heaviest epochs are enough."""
    s, k = strategy.steps_per_epoch, pattern.max_participations
    match pattern:
        case PerEpoch(steps_per_epoch=length):
            starts = s * np.arange(strategy.num_epochs)
            ends = np.minimum(starts + s, strategy.n)
            counts: Integers = (ends - 1) // length - starts // length + 1
        case Separated(b=b):
            counts = np.full(strategy.num_epochs, min(k, -(-s // b)))
        case _:
            assert_never(pattern)
    return float(np.sort(np.square(counts * strategy.shares))[-k:].sum())
