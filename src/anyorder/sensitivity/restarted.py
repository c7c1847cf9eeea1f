"""RestartedBLT: X is 0 between its epochs, and X_tt is the epoch's share^2."""

import numpy as np
from numpy.typing import NDArray

from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, Participation, SingleEpoch
from anyorder.sensitivity import dense
from anyorder.sensitivity.bound import Bound, from_sum, roots, unproven
from anyorder.sensitivity.visits import Visits, visits
from anyorder.strategy import RestartedBLT

__all__ = ["bound", "units"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_MAX_GRAM = 4096  # steps up to which X itself is an option


def bound(strategy: RestartedBLT, participation: Participation) -> Bound:
    """The sensitivity of a RestartedBLT.

    A unit that is c times in an epoch of the strategy adds at most (c share)^2 there, exactly share^2 for c = 1; epochs
    add up. So one step in each epoch costs sum share^2, exactly. Where a unit may come twice in an epoch, or where it
    may leave an epoch out, n up to 4096 goes to X itself; beyond, the counts give an upper bound.

    Cost: O(k), O(M) for M participations of a FixedOrder or KnownOrder, O(n^2) with X.
    """
    squares = np.square(strategy.shares)
    terms = strategy.n + strategy.num_epochs
    if type(participation) is SingleEpoch:
        return from_sum(float(squares.max()), terms, exact=True)
    if type(participation) is EpochShuffle and participation.steps_per_epoch % strategy.steps_per_epoch == 0:
        inside = participation.steps_per_epoch // strategy.steps_per_epoch  # whole epochs of the strategy
        return from_sum(float(squares.reshape(-1, inside).max(axis=1).sum()), terms, exact=True)
    if type(participation) is FixedOrder or type(participation) is KnownOrder:
        totals, once = _unit_squares(strategy, visits(participation))
        if once or strategy.n > _MAX_GRAM:
            return from_sum(float(totals.max()), terms, exact=once)
    elif strategy.n > _MAX_GRAM:
        return from_sum(_counted(strategy, participation), terms, exact=False)
    return dense.bound(strategy, participation)


def units(strategy: RestartedBLT, order: KnownOrder) -> Floats:
    """Of each unit: sum |X| over its steps squared; beyond 4096 steps sum (c share)^2 over its epochs."""
    totals, once = _unit_squares(strategy, visits(order))
    if once or strategy.n > _MAX_GRAM:
        return roots(totals, strategy.n + strategy.num_epochs)
    return dense.units(strategy, order)


def _unit_squares(strategy: RestartedBLT, who: Visits) -> tuple[Floats, bool]:
    """(U,) sum over epochs of (c share)^2, and whether all c <= 1."""
    epochs = who.steps // strategy.steps_per_epoch
    pairs, counts = np.unique(who.indices * strategy.num_epochs + epochs, return_counts=True)
    weights = np.square(counts * strategy.shares[pairs % strategy.num_epochs])
    totals = np.bincount(pairs // strategy.num_epochs, weights=weights, minlength=who.num_units)
    return totals.astype(np.float64), bool(counts.max() == 1)


def _counted(strategy: RestartedBLT, participation: Participation) -> float:
    """The sum of (c share)^2, c the most that fits into each epoch; the k heaviest epochs are enough."""
    s, k = strategy.steps_per_epoch, participation.max_participations
    if type(participation) is EpochShuffle:
        starts = s * np.arange(strategy.num_epochs)
        ends = np.minimum(starts + s, strategy.n)
        length = participation.steps_per_epoch
        counts: Integers = (ends - 1) // length - starts // length + 1
    elif type(participation) is MinSeparation:
        counts = np.full(strategy.num_epochs, min(k, -(-s // participation.min_separation)))
    else:
        raise unproven(participation)
    return float(np.sort(np.square(counts * strategy.shares))[-k:].sum())
