"""Jumps of a tree's noise: by value, from the nodes of two prefixes; or as a recurrence, with momentum."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import PlanError
from anyorder.strategy import Terms, Tree
from anyorder.strategy.base import Recurrence

__all__ = ["Prefixes", "check_recurrence", "check_value", "recurrences"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def check_value(tree: Tree) -> None:
    """Raise PlanError where a prefix sum of the noise is no short combination of nodes."""
    if tree.estimator == "online":
        raise PlanError(
            "noise of a tree with the online estimator cannot be added late: its estimate of a prefix sum has every "
            "node under it, as many as steps; the full estimator has smaller noise, and log2(n) rows for a prefix sum"
        )


def check_recurrence(tree: Tree) -> None:
    """Raise PlanError where a step takes not one new node."""
    completed = any(done and m & (m - 1) for done, m in zip(tree.completion, _sizes(tree), strict=False))
    if tree.estimator != "vanilla" or completed:
        which = f"the {tree.estimator} estimator" if tree.estimator != "vanilla" else "completed blocks"
        raise PlanError(
            f"noise of a tree with {which} cannot be added late by a recurrence: a step takes several new rows of Z, "
            "or estimates from all nodes below; a vanilla tree without completion can, a full one by value, without "
            "momentum (Jumps(.., by_value=True)); or take a BLT (mechanism='blt')"
        )


def recurrences(tree: Tree, steps: Integers) -> Recurrence:
    """Of a vanilla tree: x_j is the node of 2^j leaves of the prefix's binary expansion, z the one that step t ends.

    With 2^l the largest power of two in the number of leaves: y = z - (x_0 + .. + x_{l-1}), then x_0 .. x_{l-1} are 0
    and x_l = z. What a block leaves in x the next one overwrites before it uses it. The law is the tree's, the rows of
    Z are not.
    """
    d = max(_sizes(tree)).bit_length()
    starts = np.array([0, *tree.restarts])
    place = steps - starts[np.searchsorted(starts, steps, side="right") - 1]
    level = np.frexp(((place + 1) & -(place + 1)).astype(np.float64))[1][:, None] - 1
    levels = np.arange(d)
    F = np.zeros((len(steps), d, d))
    F[:, levels, levels] = levels > level
    return Recurrence(F, 1.0 * (levels == level), -1.0 * (levels < level), np.ones(len(steps)))


class Prefixes:
    """By value: theta moves by minus the sum over steps of c_t noise_t, c_t = rate times scale.

    With c the same from one change b to the next, and P_t the noise of all steps before t, O(log n) rows of Z, that is

        c_{t1} P_{t1}  +  sum over changes t1 < b < t2 of (c_b - c_{b-1}) P_b  -  c_{t2-1} P_{t2}

    in which the rows that P_{t1} and P_{t2} share vanish where there is no change.
    """

    def __init__(self, tree: Tree) -> None:
        self._num_rows = tree.num_rows
        self._prefix = lru_cache(maxsize=1 << 16)(tree.prefix_terms)

    def over(
        self, starts: Integers, stop: int, changes: Sequence[int], weight: Callable[[int], float]
    ) -> tuple[Integers, Floats]:
        """Rows of Z and their factors, both (k, w), from (k,) starts.

        Args:
            changes: the steps b from the first start to the stop, at which c changes, ascending.
            weight: c_t of a step.
        """
        owners: list[int] = []
        terms: list[Terms] = []
        factors: list[float] = []
        for i, start in enumerate(starts.tolist()):
            if start == stop:
                continue
            points = [(start, weight(start)), (stop, -weight(stop - 1))]
            points += [(b, weight(b) - weight(b - 1)) for b in changes if start < b < stop]
            owners += [i] * len(points)
            terms += [self._prefix(t) for t, _ in points]
            factors += [factor for _, factor in points]
        if not terms:
            return np.zeros((len(starts), 0), np.int64), np.zeros((len(starts), 0))
        lengths = [len(one.rows) for one in terms]
        owner = np.repeat(np.array(owners, np.int64), lengths)
        values = np.concatenate([one.coefficients for one in terms]) * np.repeat(factors, lengths)
        keys, which = np.unique(
            owner * self._num_rows + np.concatenate([one.rows for one in terms]), return_inverse=True
        )
        sums = np.bincount(which, values, len(keys))
        keys, sums = keys[sums != 0], sums[sums != 0]
        owner, row = np.divmod(keys, self._num_rows)
        count = np.bincount(owner, minlength=len(starts))
        place = np.arange(len(keys)) - np.repeat(np.cumsum(count) - count, count)
        rows, result = np.zeros((2, len(starts), int(count.max(initial=0))))
        ids = rows.astype(np.int64)
        ids[owner, place], result[owner, place] = row, sums
        return ids, result


def _sizes(tree: Tree) -> list[int]:
    """Steps of each block."""
    return [end - start for start, end in pairwise((0, *tree.restarts, tree.n))]
