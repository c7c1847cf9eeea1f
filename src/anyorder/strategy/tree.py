"""Tree aggregation: C has one row for each node of binary trees over the steps. [Kairouz et al. 2021, B.1, D.3]"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError, PlanError
from anyorder.strategy.base import Combination, Row, State, Terms, Vector
from anyorder.strategy.nodes import (  # fmt: skip
    Subtree,
    bits,
    ceil,
    completed_root,
    forest,
    from_below,
    node,
    path,
    split,
    trailing_zeros,
    variance,
    within,
)

__all__ = ["Subtree", "Tree"]

Floats = NDArray[np.float64]


@final
class Tree(Combination):
    """Binary trees over the steps: each node is a noisy sum of the gradients under it.

    A block of m steps, from one restart to the next, has the complete subtrees of its leaves and no other nodes:
    a forest, one tree for each 1-bit of m. A completed block has one tree of 2^ceil(log2 m) leaves, the last ones
    virtual zeros, so that the noise carried past the restart is that of its root. [Kairouz et al. 2021, D.3.1]

    Prefix sums are estimated from the nodes in one of three ways; y(v) is the noisy node v over m(v) leaves:

    - "vanilla": the nodes of the binary expansion of t: variance popcount(t).
    - "online" (Honaker, from below): the same nodes, each estimated from all nodes under it,
      u(v) = a y(v) + (1 - a) (u(left) + u(right)) with variance a(v) = 1 / (2 - 1/m(v)).
    - "full" (Honaker): K = pinv(C), the best K for the tree: prefixes also use nodes that end later, which is
      private by [Denisov et al. 2022, Thm 2.1]. The errors of the estimates s(v) form a Markov tree, as no node
      outside v tells how s(v) divides between its children (a = a(left), a' = a(right)):

          s(root) = sqrt(a(root)) Z,  s(left) = a/(a + a') s(v) + w,  s(right) = a'/(a + a') s(v) - w,
          w = sqrt(a a'/(a + a')) Z,

      so the noise of a step is that of its leaf, from one row of Z for the root and one for each inner node: n
      rows in place of 2n. This is the square form of the same mechanism (C^T C is the tree's, K K^T that of
      the pseudoinverse; Prop. 2.2 there), and no row is ever made for the future's sake.

    A virtual leaf is known to be 0, so it enters "online" and "full" with variance 0, and nodes with no real
    leaf are never drawn. The completed root is then a little better than with noise on every virtual leaf (25 of
    32 leaves, online: 0.489 in place of 0.508).

    Cost of a step in rows of Z: vanilla 2 on average; online and full 2 and 1 on average, with log2(n) vectors
    kept, or, regenerated, log2(n) + 1 on average (2n once) and log2(n) + 1. The first step after a completed
    block of m makes at most 2 log2(m) more, and 2m more with "online" regenerated.

    Args:
        n: number of steps.
        estimator: "vanilla", "online" or "full".
        restarts: steps 0 < r < n, increasing, at which a fresh tree begins. The noise of the last prefix before
            stays in all later prefixes.
        completion: whether the block before each restart is completed; one bool, or one for each restart.
        regenerate: keep nothing between steps, and make every row anew when it is needed.
    """

    def __init__(
        self,
        n: int,
        estimator: str = "vanilla",
        restarts: Sequence[int] = (),
        completion: bool | Sequence[bool] = False,
        regenerate: bool = False,
    ) -> None:
        self._n = checks.integer("n", n, low=1)
        self.estimator = checks.choice("estimator", estimator, {"vanilla", "online", "full"})
        self.restarts = tuple(checks.integer("restarts", r, low=1, high=self._n - 1) for r in restarts)
        if any(r >= s for r, s in pairwise(self.restarts)):
            raise ArgumentError(f"restarts must increase, got {self.restarts}")
        self.completion = (completion,) * len(self.restarts) if isinstance(completion, bool) else tuple(completion)
        if len(self.completion) != len(self.restarts) or not all(isinstance(c, bool) for c in self.completion):
            raise ArgumentError(
                f"completion must be a bool, or one for each of {len(self.restarts)} restarts, got {completion!r}"
            )
        if not isinstance(regenerate, bool):
            raise ArgumentError(f"regenerate must be a bool, got {regenerate!r}")
        self.regenerate = regenerate
        self._edges = (0, *self.restarts, self._n)
        self._sizes = tuple(end - start for start, end in pairwise(self._edges))
        completed = (*self.completion, False)
        nodes = [2 * ceil(m) - 1 if c else 2 * m - m.bit_count() for m, c in zip(self._sizes, completed, strict=True)]
        self._offsets = tuple(accumulate(nodes, initial=0))
        forests = map(forest, self._edges[:-1], self._sizes, completed)
        self.subtrees = tuple(tree for forest in forests for tree in forest)
        self._starts = tuple(tree.start for tree in self.subtrees)

    @property
    def n(self) -> int:
        """Number of steps."""
        return self._n

    @property
    def num_rows(self) -> int:
        """Number of nodes, in post-order in each block; n with "full"."""
        return self._n if self.estimator == "full" else self._offsets[-1]

    def matrix(self) -> Floats:
        """C: 1 where the node covers the step; with "full", the square form, weighted Haar wavelets."""
        return self.columns(np.arange(self._n))

    def columns(self, steps: ArrayLike) -> Floats:
        """C[:, steps], (num_rows, len(steps)): the nodes over each leaf, O(log n) each."""
        steps = np.asarray(steps)
        result = np.zeros((self.num_rows, len(steps)))
        for column, t in enumerate(steps.tolist()):
            tree = self._tree(t)
            if self.estimator == "full":
                result[tree.start, column] = 1 / math.sqrt(variance(tree.level, tree.real))
                for r, share, spread in path(tree, t):
                    result[r, column] = (1 - share) / spread
                continue
            block, i = self._locate(t)
            for level in range(tree.level + 1):
                last = i | ((1 << level) - 1)
                result[self._offsets[block] + node(last, level), column] = 1
        return result

    def column_norms_squared(self) -> Floats:
        """(n,) number of nodes over each step."""
        return np.concatenate([np.full(tree.real, tree.level + 1.0) for tree in self.subtrees])

    def terms(self, t: int) -> Terms:
        """Row t of K: the new estimate of the prefix less the old one."""
        if self.estimator == "full":
            return self._leaf(t)
        block, i = self._locate(t)
        level = trailing_zeros(i + 1)
        parts = self._carried(block - 1) if self._completes_at(block, i) else []
        if self.estimator == "vanilla":
            parts += [self._subtree(block, i, level, 1.0)]
            parts += [self._subtree(block, i - (1 << j), j, -1.0) for j in range(level)]
        else:
            parts += [self._grown(block, i, level)]
        return Terms(np.concatenate([p.rows for p in parts]), np.concatenate([p.coefficients for p in parts]))

    def prefix_terms(self, t: int) -> Terms:
        """The noise of the steps 0 .. t - 1 in all: rows of Z and coefficients, at most log2(n) + 1 for each block.

        Raises: PlanError with "online", whose estimates have all nodes below.
        """
        t = checks.integer("t", t, low=0, high=self._n)
        if self.estimator == "online":
            raise PlanError(f"a prefix sum of {self!r} has as many rows as steps; use the vanilla or full estimator")
        if t == 0:
            return Terms(np.empty(0, np.int64), np.empty(0))
        if self.estimator == "full":
            return self._full_prefix(t)
        block, i = self._locate(t - 1)
        rows = self._expansion(block, i + 1)
        for before in range(block):
            root = self._offsets[before + 1] - 1
            rows = ([root] if self.completion[before] else self._expansion(before, self._sizes[before])) + rows
        return Terms(np.array(rows), np.ones(len(rows)))

    def step(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        """The noise of step t; "online" keeps its estimates u, "full" the s of the subtrees that come next."""
        if self.state_rows == 0:
            return super().step(t, state, row)
        return self._step_full(t, state, row) if self.estimator == "full" else self._step_online(t, state, row)

    @property
    def state_rows(self) -> int:
        """At most floor(log2(n + 1)) vectors; none if regenerated."""
        if self.estimator == "vanilla" or self.regenerate:
            return 0
        if self.estimator == "full":
            return max((tree.real - 1).bit_length() for tree in self.subtrees)
        return max((m + 1).bit_length() - 1 for m in self._sizes)

    def rows_before(self, t: int) -> int | None:
        """The r for which the steps before t use rows 0 .. r - 1 and none of these has to do with a step from t on.

        None with "full" within a subtree: its rows for steps to come are in the noise of those before.
        """
        if self.estimator == "full":
            return t if any(tree.start == t for tree in self.subtrees) else None
        if t == 0:
            return 0
        block, i = self._locate(t - 1)
        return self._offsets[block] + node(i, trailing_zeros(i + 1)) + 1

    def prefix_variance(self) -> Floats:
        """(n,) variance of the noise in each prefix sum, in closed form: O(n log n)."""
        result = np.empty(self._n)
        carried = 0.0
        for block, (start, end) in enumerate(pairwise(self._edges)):
            if self.estimator == "full":
                result[start:end] = self._full_variance(start, end)
            else:
                steps = np.arange(1, end - start + 1)
                levels = range((end - start).bit_length())
                weights = [1.0 if self.estimator == "vanilla" else variance(level, 1 << level) for level in levels]
                result[start:end] = sum((steps >> level & 1) * weights[level] for level in levels)
            result[start:end] += carried
            if block < len(self.completion) and self.completion[block] and self.estimator != "full":
                m = end - start
                carried += 1.0 if self.estimator == "vanilla" else variance((m - 1).bit_length(), m)
            else:
                carried = float(result[end - 1])
        return result

    def to_dict(self) -> dict[str, Any]:
        """The arguments; "completion" as one bool for each restart."""
        return {
            "kind": "tree", "n": self._n, "estimator": self.estimator, "restarts": list(self.restarts),
            "completion": list(self.completion), "regenerate": self.regenerate,
        }  # fmt: skip

    def describe(self) -> str:
        """One phrase for people."""
        completed = f", {sum(self.completion)} of them completed" if any(self.completion) else ""
        restarts = f"{len(self.restarts)} restart(s){completed}" if self.restarts else "never restarted"
        return f"binary tree, {self.estimator} estimator, {restarts}"

    def __repr__(self) -> str:
        restarts = f", restarts={self.restarts}, completion={self.completion}" if self.restarts else ""
        return f"Tree(n={self._n}, estimator={self.estimator!r}{restarts}, regenerate={self.regenerate})"

    def _locate(self, t: int) -> tuple[int, int]:
        """The block of step t and its place there."""
        block = bisect_right(self._edges, t) - 1
        return block, t - self._edges[block]

    def _tree(self, t: int) -> Subtree:
        return self.subtrees[bisect_right(self._starts, t) - 1]

    def _completes_at(self, block: int, i: int) -> bool:
        """Whether this step takes the noise from the last prefix of the block before to its completed root."""
        return i == 0 and block > 0 and self.completion[block - 1] and self._sizes[block - 1].bit_count() > 1

    def _subtree(self, block: int, i: int, level: int, weight: float) -> Terms:
        """The estimate of the complete subtree that ends with leaf i of the block, times weight."""
        last = self._offsets[block] + node(i, level)
        if self.estimator == "vanilla":
            return Terms(np.array([last]), np.array([weight]))
        return Terms(np.arange(last - (2 << level) + 2, last + 1), weight * from_below(level))

    def _expansion(self, block: int, count: int) -> list[int]:
        """Node ids of the binary expansion of a block's first leaves."""
        ends = accumulate(1 << level for level in bits(count))
        return [self._offsets[block] + node(end - 1, level) for level, end in zip(bits(count), ends, strict=True)]

    def _grown(self, block: int, i: int, level: int) -> Terms:
        """The estimate of the subtree that leaf i completes, less those of the subtrees that it replaces."""
        new = self._subtree(block, i, level, 1.0)
        for j in range(level):
            old = self._subtree(block, i - (1 << j), j, 1.0)
            new.coefficients[old.rows - new.rows[0]] -= old.coefficients
        return new

    def _carried(self, block: int) -> list[Terms]:
        """The estimate of the completed root of a block less that of its last prefix."""
        m = self._sizes[block]
        if self.estimator == "vanilla":
            root = Terms(np.array([self._offsets[block + 1] - 1]), np.ones(1))
            weights = [0.0] * m.bit_count()
        else:
            nodes, weights = completed_root(m)
            rows = [self._offsets[block] + node(last, level) for last, level, _ in nodes]
            root = Terms(np.array(rows), np.array([weight for _, _, weight in nodes]))
        ends = accumulate(1 << level for level in bits(m))
        pieces = zip(bits(m), ends, weights, strict=True)
        return [root, *(self._subtree(block, end - 1, level, weight - 1) for level, end, weight in pieces)]

    def _step_online(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        block, i = self._locate(t)
        level = trailing_zeros(i + 1)
        new = row(self._offsets[block] + node(i, 0)).copy()  # it enters the state
        noise = np.zeros_like(new)
        if self._completes_at(block, i):
            nodes, weights = completed_root(self._sizes[block - 1])
            for last, height, weight in nodes:
                noise += row(self._offsets[block - 1] + node(last, height)) * np.float32(weight)
            for kept, weight in zip(state, weights, strict=True):
                noise += kept * np.float32(weight - 1)
        state = state if i else ()
        for j in range(level):
            a = np.float32(variance(j + 1, 2 << j))
            kept = state[-1 - j]
            noise -= kept
            new = row(self._offsets[block] + node(i, j + 1)) * a + (kept + new) * (1 - a)
        noise += new
        return noise, (*state[: len(state) - level], new)

    def _step_full(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        tree = self._tree(t)
        i = t - tree.start
        if i == 0:
            level, real = tree.level, tree.real
            value = row(t) * np.float32(math.sqrt(variance(level, real)))
        else:
            level = trailing_zeros(i)
            real = min(1 << level, tree.real - i)
            value, state = state[-1].copy(), state[:-1]
        while real > 1:
            level -= 1
            half = 1 << level
            if real > half:
                left, spread = split(level, real)
                w = row(t + half) * np.float32(spread)
                state = (*state, value * np.float32(1 - left) - w)
                value = value * np.float32(left) + w
                real = half
        return value, state

    def _leaf(self, t: int) -> Terms:
        """The estimate of the leaf of step t ("full"), from the root down."""
        tree = self._tree(t)
        rows, coefficients = [tree.start], [math.sqrt(variance(tree.level, tree.real))]
        for r, share, spread in path(tree, t):
            coefficients = [c * share for c in coefficients] + [spread]
            rows.append(r)
        return Terms(np.array(rows), np.array(coefficients))

    def _full_prefix(self, t: int) -> Terms:
        """The estimates of the leaves before t, summed ("full"): those of the roots, then down the last tree."""
        tree = self._tree(t - 1)
        total = {one.start: math.sqrt(variance(one.level, one.real)) for one in self.subtrees if one.start < tree.start}
        here = {tree.start: math.sqrt(variance(tree.level, tree.real))}  # the estimate of a node, as rows
        first, level, real = tree
        while 0 < t - first < real:
            level -= 1
            half = 1 << level
            if real > half:
                left, spread = split(level, real)
                child = {r: c * left for r, c in here.items()} | {first + half: spread}
                if t - first >= half:
                    total |= {r: total.get(r, 0.0) + c for r, c in child.items()}
                    here = {r: c * (1 - left) for r, c in here.items()} | {first + half: -spread}
                    first, real = first + half, real - half
                else:
                    here, real = child, half
        if t > first:
            total |= {r: total.get(r, 0.0) + c for r, c in here.items()}
        return Terms(np.array(list(total)), np.array(list(total.values())))

    def _full_variance(self, start: int, end: int) -> Floats:
        parts, total = [], 0.0
        for tree in self.subtrees:
            if start <= tree.start < end:
                alpha, beta = within(tree.level, tree.real)
                root = variance(tree.level, tree.real)
                parts.append(total + beta + alpha**2 * root)
                total += root
        return np.concatenate(parts)
