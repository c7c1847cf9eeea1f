"""Jumps of a tree's noise: by value, from the nodes of two prefixes; or as a recurrence, with momentum."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import PlanError
from anyorder.strategy import Tree
from anyorder.strategy.base import Recurrence

__all__ = ["Prefixes", "check_recurrence", "check_value", "recurrences"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_MOST = 1 << 21  # rows of prefixes that are kept


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
        self._num_rows, self._terms = tree.num_rows, tree.prefix_terms
        self._forget()

    def _forget(self) -> None:
        """Know no prefix."""
        self._begin: Integers = np.zeros(0, np.int64)  # of each step: where its rows begin below; -1 where not known
        self._length: Integers = np.zeros(0, np.int64)
        self._rows, self._coefficients, self._end = np.zeros(0, np.int64), np.zeros(0), 0

    def over(
        self, starts: Integers, stop: int, changes: Sequence[int], weights: Callable[[Integers], Floats]
    ) -> tuple[Integers, Floats]:
        """Rows of Z and their factors, both (k, w), from (k,) starts.

        Args:
            changes: the steps b from the first start to the stop, at which c changes, ascending.
            weights: c_t of some steps.
        """
        owner = np.flatnonzero(starts < stop)
        if not len(owner):
            return np.zeros((len(starts), 0), np.int64), np.zeros((len(starts), 0))
        begin = starts[owner]
        own, point = [owner, owner], [begin, np.full(len(owner), stop)]
        factor = [weights(begin), np.repeat(-weights(np.array([stop - 1])), len(owner))]
        if len(changes):
            of, which = (begin[:, None] < np.array(changes)).nonzero()
            b = np.array(changes)[which]
            own, point, factor = [*own, owner[of]], [*point, b], [*factor, weights(b) - weights(b - 1)]
        owner, place, factors = self._listed(np.concatenate(own), np.concatenate(point), np.concatenate(factor))
        keys = owner * self._num_rows + self._rows[place]
        order = keys.argsort(kind="stable")  # of two ascending runs, where nothing changes
        keys = keys[order]
        first = np.diff(keys, prepend=-1) != 0
        sums = np.bincount(first.cumsum() - 1, (self._coefficients[place] * factors)[order])
        keys, sums = keys[first][sums != 0], sums[sums != 0]
        owner, row = np.divmod(keys, self._num_rows)
        count = np.bincount(owner, minlength=len(starts))
        place = np.arange(len(keys)) - np.repeat(np.cumsum(count) - count, count)
        rows, result = np.zeros((2, len(starts), int(count.max(initial=0))))
        ids = rows.astype(np.int64)
        ids[owner, place], result[owner, place] = row, sums
        return ids, result

    def _listed(self, owner: Integers, point: Integers, factor: Floats) -> tuple[Integers, Integers, Floats]:
        """For every row of the prefixes P of the points: the owner, the row's place, and the factor."""
        self._know(point)
        length = self._length[point]
        end = length.cumsum()
        place = np.arange(end[-1]) + np.repeat(self._begin[point] - end + length, length)
        return np.repeat(owner, length), place, np.repeat(factor, length)

    def _know(self, point: Integers) -> None:
        """Have the rows of these prefixes."""
        most = int(point.max()) + 1
        if most > len(self._begin):
            self._begin = np.append(self._begin, np.full(most, -1))
            self._length = np.append(self._length, np.zeros(most, np.int64))
        new = point[self._begin[point] < 0]
        if not len(new):
            return
        if self._end > _MOST:
            self._forget()
            return self._know(point)
        for t in np.unique(new).tolist():
            terms = self._terms(t)
            start, end = self._end, self._end + len(terms.rows)
            if end > len(self._rows):
                self._rows = np.append(self._rows, np.zeros(end, np.int64))
                self._coefficients = np.append(self._coefficients, np.zeros(end))
            order = terms.rows.argsort()
            self._rows[start:end], self._coefficients[start:end] = terms.rows[order], terms.coefficients[order]
            self._begin[t], self._length[t], self._end = start, end - start, end


def _sizes(tree: Tree) -> list[int]:
    """Steps of each block."""
    return [end - start for start, end in pairwise((0, *tree.restarts, tree.n))]
