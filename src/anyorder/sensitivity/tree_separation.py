"""Trees under a minimum separation: the exact program of [Kairouz et al. 2021, Theorem D.3], fast."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anyorder.strategy import Tree

__all__ = ["squared"]

Integers = NDArray[np.int64]


class _Front(NamedTuple):
    """Undominated ways to place steps under a node: (m,) each, sorted by exit, then count."""

    counts: Integers
    exits: Integers  # number of leaves after the node that are still too near to the last step
    values: Integers  # sum of squared counts of the nodes under and at this one


def squared(strategy: Tree, b: int, k: int) -> int:
    """sens^2 of at most k steps, any two at least b apart, exact.

    The steps are placed from left to right. What a node's leaves must know of those before is its *entry*, the number
    of its first leaves that are still too near, 0 <= entry < b; it passes on its exit, the entry of what follows:

        front(v, entry) = all (c + c', value + value' + (c + c')^2, exit') with (c, value, exit) in front(left, entry)
                          and (c', value', exit') in front(right, exit)

    Only undominated ways are kept: of those with the same count, none with both a later exit and a smaller value;
    where k does not bind, none with a smaller count either. A node of at most b real leaves holds at most one step,
    whose place does not change its value: the earliest is best. Nodes of the same shape share their fronts, and only
    entries that occur are followed, at most min(b, 2 n / b).

    Cost: about min(b, 2 n/b) (n/b)^2 simple operations in arrays; where k does not bind, far fewer. With n = 10^5 that
    is a tenth of a second for b = 100, and under a minute for any b and k.
    """
    solver = _Solver(b, None if k * b >= strategy.n else k)
    front = _Front(*(np.zeros(1, dtype=np.int64) for _ in range(3)))
    for tree in strategy.subtrees:
        front = solver.join(front, tree.level, tree.real, node=False)
    return int(front.values.max())


class _Solver:
    def __init__(self, b: int, k: int | None) -> None:
        self.b, self.k = b, k
        self._fronts: dict[tuple[int, int, int], _Front] = {}

    def front(self, level: int, real: int, entry: int) -> _Front:
        """The front of a node of 2^level leaves, the first `real` of them not virtual."""
        key = (level, real, entry)
        if key not in self._fronts:
            self._fronts[key] = self._make(level, real, entry)
        return self._fronts[key]

    def _make(self, level: int, real: int, entry: int) -> _Front:
        if real <= self.b:
            ways = [(0, max(entry - real, 0), 0)] + ([(1, entry + self.b - real, level + 1)] if entry < real else [])
            return _Front(*np.array(ways, dtype=np.int64).T)
        half = 1 << (level - 1)
        if real <= half:
            child = self.front(level - 1, real, entry)
            return child._replace(values=child.values + child.counts**2)
        return self.join(self.front(level - 1, half, entry), level - 1, real - half, node=True)

    def join(self, left: _Front, level: int, real: int, *, node: bool) -> _Front:
        """The ways of what lies left, then those of the given node; as children of a node, or side by side."""
        rights = {entry: self.front(level, real, entry) for entry in set(left.exits.tolist())}
        exits = np.unique(np.concatenate([right.exits for right in rights.values()]))
        width = 1 + int(left.counts.max()) + max(int(right.counts.max()) for right in rights.values())
        table = np.full((len(exits), width), -1, dtype=np.int64)
        cells = {x: np.searchsorted(exits, right.exits) * width + right.counts for x, right in rights.items()}
        flat = table.reshape(-1)
        for count, entry, value in zip(*(column.tolist() for column in left), strict=True):
            at = cells[entry] + count
            flat[at] = np.maximum(flat[at], rights[entry].values + value)
        return self._undominated(exits, table, node)

    def _undominated(self, exits: Integers, table: Integers, node: bool) -> _Front:
        if self.k is not None:
            table = table[:, : self.k + 1]
        if node:
            table = np.where(table < 0, -1, table + np.arange(table.shape[1]) ** 2)
        best = np.full_like(table, -1)  # of the other ways that are at least as good for what follows
        best[1:] = np.maximum.accumulate(table, axis=0)[:-1]
        if self.k is None:
            more = np.maximum.accumulate(np.maximum.accumulate(table, axis=0)[:, ::-1], axis=1)[:, ::-1]
            best[:, :-1] = np.maximum(best[:, :-1], more[:, 1:])
        rows, counts = np.nonzero(table > best)
        return _Front(counts.astype(np.int64), exits[rows], table[rows, counts])
