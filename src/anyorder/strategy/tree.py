"""The nodes of binary trees over the steps, and the weights of the estimates that are made of them."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError, PlanError
from anyorder.patterns import Listed, Participation, Pattern, PerEpoch, Separated
from anyorder.strategy.base import Combination, Row, State, Terms, Vector
from anyorder.strategy.fitting import OBJECTIVES, epoch, of_objective
from anyorder.strategy.sensitivity import NO_CHANGE, UNIT, Bound, Change, from_integer, resolvent, roots
from anyorder.strategy.variances import Way, of_iterates
from anyorder.workload import Workload

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Subtree(NamedTuple):
    """A complete binary tree of 2^level leaves: the steps start .. start + real - 1, then virtual zeros."""

    start: int
    level: int
    real: int


def ceil(m: int) -> int:
    """The least power of two that is at least m."""
    return 1 << (m - 1).bit_length()


def bits(m: int) -> list[int]:
    """The 1-bits of m, highest first."""
    return [level for level in reversed(range(m.bit_length())) if m >> level & 1]


def trailing_zeros(i: int) -> int:
    return (i & -i).bit_length() - 1


def node(last: int, level: int) -> int:
    """Post-order id of the node of 2^level leaves that ends with leaf `last`: nodes that end before it, and below."""
    return 2 * last - last.bit_count() + level


def forest(start: int, m: int, completed: bool) -> list[Subtree]:
    if completed:
        return [Subtree(start, (m - 1).bit_length(), m)]
    starts = accumulate((1 << level for level in bits(m)), initial=start)
    return [Subtree(first, level, 1 << level) for first, level in zip(starts, bits(m), strict=False)]


def variance(level: int, real: int) -> float:
    """a(v): variance of the from-below estimate of a node of 2^level leaves, `real` of them not virtual.

    Two estimates are joined: the node itself, variance 1, and the sum of its children: a = c / (1 + c).
    """
    half = (1 << level) >> 1
    if real == 1 << level:
        return 1 / (2 - 1 / real)
    below = variance(level - 1, min(real, half)) + (variance(level - 1, real - half) if real > half else 0.0)
    return below / (1 + below)


def split(level: int, real: int) -> tuple[float, float]:
    """Of a node with children of 2^level leaves: a/(a + a') and sqrt(a a'/(a + a'))."""
    left, right = variance(level, 1 << level), variance(level, real - (1 << level))
    return left / (left + right), math.sqrt(left * right / (left + right))


def path(tree: Subtree, t: int) -> Iterator[tuple[int, float, float]]:
    """From the root to the leaf of step t, the nodes with two real children: (row of Z, weight on s, weight on Z).

    The row is the first step of the right child. On the way to that child Z counts negatively.
    """
    first, level, real = tree
    while real > 1:
        level -= 1
        half = 1 << level
        if real > half:
            left, spread = split(level, real)
            if t < first + half:
                yield first + half, left, spread
                real = half
            else:
                yield first + half, 1 - left, -spread
                first, real = first + half, real - half


def from_below(level: int) -> Floats:
    """Weights of u of a complete subtree on its nodes, in post-order."""
    weights = np.ones(1)
    for j in range(1, level + 1):
        a = variance(j, 1 << j)
        weights = np.concatenate([(1 - a) * weights, (1 - a) * weights, [a]])
    return weights


def completed_root(m: int) -> tuple[list[tuple[int, int, float]], list[float]]:
    """The estimate u of the root over m real leaves, as weights: on its partial nodes, on u of the complete subtrees.

    Returns: (last leaf, level, weight) of each partial node; one weight for each 1-bit of m, highest first.
    """
    nodes, weights = [], []
    first, level, real, weight = 0, (m - 1).bit_length(), m, 1.0
    while real < 1 << level:
        a = variance(level, real)
        nodes.append((first + (1 << level) - 1, level, weight * a))
        weight *= 1 - a
        level -= 1
        if real > 1 << level:
            weights.append(weight)
            first, real = first + (1 << level), real - (1 << level)
    return nodes, [*weights, weight]


def within(level: int, real: int) -> tuple[Floats, Floats]:
    """Of s of the first 1 .. real leaves of a node: its weight on s of the node, and its variance given that."""
    if real == 1:
        return np.ones(1), np.zeros(1)
    half = (1 << level) >> 1
    if real <= half:
        return within(level - 1, real)
    left, spread = split(level - 1, real)
    alpha, beta = within(level - 1, half)
    alpha_right, beta_right = (alpha, beta) if real == 2 * half else within(level - 1, real - half)
    return (
        np.concatenate([left * alpha, left + (1 - left) * alpha_right]),
        np.concatenate([beta + (alpha * spread) ** 2, beta_right + ((1 - alpha_right) * spread) ** 2]),
    )


# -- the strategy ----------------------------------------------------------------------------------------------------


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
        regenerate: keep nothing between steps, and make every row again when it is needed.
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
        """Return a phrase for people."""
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
            new = row(self._offsets[block] + node(i, j + 1)) * a + (kept + new) * (np.float32(1) - a)
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


# -- sensitivity -----------------------------------------------------------------------------------------------------

# Trees: sens^2 is the largest sum of squared counts, over the nodes, of the steps of one unit under the node.
#
# C^T C counts the nodes that two steps share, so it has no negative entry and this is exact for every pattern. All
# counts are integers: no rounding before the last root.


def bound(strategy: Tree, pattern: Pattern) -> Bound:
    """Exact, with restarts too: no node counts steps of two `subtrees`, and a restart begins new ones.

    So their squared counts add up, and each case goes through the subtrees from left to right. What it carries from
    one to the next is what a unit's pattern still forbids there: a second step of an epoch that goes on, or a step too
    near to the last.

    Costs: see `units`, `_squared_per_epoch`, `_squared_separated`.
    """
    match pattern:
        case Listed():
            squared = int(_counts_squared(strategy, pattern.steps, pattern.indices).max())
        case Separated(b=b):
            squared = _squared_separated(strategy, b, pattern.max_participations)
        case PerEpoch(steps_per_epoch=s):
            squared = _squared_per_epoch(strategy, s)
        case _:
            assert_never(pattern)
    return from_integer(squared)


def units(strategy: Tree, listed: Listed) -> NDArray[np.float64]:
    """Of each unit, [Kairouz et al. 2021, Alg. 4]: O(M log n) for M participations."""
    return roots(_counts_squared(strategy, listed.steps, listed.indices), 1)


def _counts_squared(strategy: Tree, steps: Integers, units: Integers) -> Integers:
    """Of each unit, the sum of its squared counts. `steps` sorted by unit, then step, so equal nodes are adjacent."""
    starts = np.array([tree.start for tree in strategy.subtrees])
    levels = np.array([tree.level for tree in strategy.subtrees])
    trees = np.searchsorted(starts, steps, side="right") - 1
    squared = np.zeros(int(units.max()) + 1, dtype=np.int64)
    for level in range(int(levels.max()) + 1):
        has = levels[trees] >= level
        keys = np.stack([units[has], trees[has], (steps[has] - starts[trees[has]]) >> level])
        first = np.flatnonzero(np.append(True, (np.diff(keys) != 0).any(axis=0))) if has.any() else np.empty(0, int)
        counts = np.diff(np.append(first, keys.shape[1]))
        np.add.at(squared, keys[0, first], counts**2)
    return squared


# -- sensitivity under epoch shuffles --------------------------------------------------------------------------------

# Trees under epoch shuffles: one step anywhere in each epoch of s steps.


_NEVER = -(2**60)


def _squared_per_epoch(strategy: Tree, s: int) -> int:
    """sens^2, exact, by dynamic programming over the nodes: O(n) time and memory.

    Under a node, every epoch that lies inside it has its one step; only the epochs of its first and its last leaf
    may have theirs elsewhere. So a node has four states, and its count follows from the state:

        best(v, first, last) = count^2 + max over fitting states of best(left) + best(right).
    """
    nodes = [_root(tree, s) for tree in strategy.subtrees]
    best, first, last = nodes[0]
    for right, right_first, right_last in nodes[1:]:
        best = _join(best, right, first, last, right_first, right_last)
        last = right_last
    return int(best[0, 1, 1])


def _root(tree: Subtree, s: int) -> tuple[Integers, Integers, Integers]:
    """Best values [1, first used, last used] under the root, and the epochs of its first and last leaf, by levels."""
    # A virtual leaf is given to the last epoch. A step there would share no more nodes with earlier ones than a step
    # on the last real leaf does, so the maximum stays.
    first = last = (tree.start + np.minimum(np.arange(1 << tree.level), tree.real - 1)) // s
    best = np.full((len(first), 2, 2), _NEVER)
    best[:, 0, 0], best[:, 1, 1] = 0, 1
    for _ in range(tree.level):
        best = _join(best[::2], best[1::2], first[::2], last[::2], first[1::2], last[1::2])
        first, last = first[::2], last[1::2]
        used = np.arange(2)
        inner = np.where(first == last, 0, last - first - 1)[:, None, None]
        ends = np.where((first == last)[:, None, None], used[:, None] & used, used[:, None] + used)
        best = np.where(best < 0, _NEVER, best + (inner + ends) ** 2)
    return best, first, last


def _join(
    left: Integers, right: Integers, first: Integers, left_last: Integers, right_first: Integers, last: Integers
) -> Integers:
    """Best sums of two neighbours; an epoch that now lies inside must be used, exactly once."""
    result = np.full_like(left, _NEVER)
    same = left_last == right_first
    for code in range(16):
        lf, ll, rf, rl = (code >> bit & 1 for bit in range(4))
        middle = np.where(same, ll + rf, 1)  # of an epoch on both sides: at most one use
        fits = middle <= 1
        fits &= (first == left_last) | np.where(same, (right_first == last) | (middle == 1), ll == 1)
        fits &= (right_first == last) | np.where(same, (first == left_last) | (middle == 1), rf == 1)
        f = np.where(same & (first == left_last), middle, lf)
        g = np.where(same & (right_first == last), middle, rl)
        value = np.where(fits, left[:, lf, ll] + right[:, rf, rl], _NEVER)
        index = np.arange(len(left))
        result[index, f & 1, g & 1] = np.maximum(result[index, f & 1, g & 1], value)
    return result


# -- sensitivity under a minimum separation --------------------------------------------------------------------------

# Trees under a minimum separation: the exact program of [Kairouz et al. 2021, Theorem D.3], fast.


class _Front(NamedTuple):
    """Undominated ways to place steps under a node: (m,) each, sorted by exit, then count."""

    counts: Integers
    exits: Integers  # number of leaves after the node that are still too near to the last step
    values: Integers  # sum of squared counts of the nodes under and at this one


def _squared_separated(strategy: Tree, b: int, k: int) -> int:
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


# -- error -----------------------------------------------------------------------------------------------------------

# Variances of iterates whose noise is a tree's: all subtrees of a size side by side, from the leaves up.
#
# A subtree is a random linear map from the state w = (velocity, iterate, ..) at its beginning. Of the subtrees of 2^j
# leaves is kept, by node, how w moves through them and the moments of what they add; and by leaf t, how p_t depends on
# w at the beginning of the subtree (`rows`), and its variance given that. Two neighbours make one of twice the size.
#
# - Full estimator: given the estimate s of a node, its two children have independent noise but for what is shared of s:
#   s(left) = share s + e, s(right) = (1 - share) s - e.
# - From below ("vanilla", "online"): two neighbours are independent, but for the last step of the second: there the
#   estimates u of the two are replaced by u = a y + (1 - a) (u_left + u_right), y new; a = 1 for vanilla.
#
# After a completed block the first step adds the estimate of its root less that of its last prefix: a third number of
# w holds this until then.


_P = 1  # place of the iterate in w


def tree_variances(tree: Tree, M: Floats, N: Floats) -> Floats:
    """(n,) Var p_t for w <- M_t w + N_t eta_t, p = w[1], and the noise eta of a tree.

    Args:
        M: (n, 2, 2).
        N: (n, 2).
    Cost: O(n log n).
    """
    return _full(tree, M, N) if tree.estimator == "full" else _from_below(tree, M, N)


def way(tree: Tree) -> Way:
    """Of iterates."""
    return partial(tree_variances, tree)


def _full(tree: Tree, M: Floats, N: Floats) -> Floats:
    covariance = np.zeros((2, 2))
    result = np.empty(len(N))
    for one in tree.subtrees:
        here = slice(one.start, one.start + one.real)
        rows, shares, own, move, pull, left = _given_root(one, M[here], N[here])
        root = variance(one.level, one.real)
        result[here] = own + np.square(shares) * root + _quadratic(rows, covariance)
        covariance = move @ covariance @ move.T + left + root * np.outer(pull, pull)
    return result


def _given_root(tree: Subtree, M: Floats, N: Floats) -> tuple[Floats, ...]:
    """Given s of the root: p_t = rows_t . w + shares_t s + (own_t); w' = move w + pull s + (left), variances in ()."""
    real = tree.real
    rows, shares, own = M[:, _P].copy(), N[:, _P].copy(), np.zeros(real)
    move, pull, left = M.copy(), N.copy(), np.zeros_like(M)
    leaf = np.arange(real)
    for level in range(tree.level):
        pairs = len(move) // 2
        share, spread = np.empty(pairs), np.empty(pairs)
        if pairs:
            share[:], spread[:] = split(level, 2 << level)
            share[-1], spread[-1] = split(level, min(2 << level, real - (pairs - 1) * (2 << level)))
        pair, second = leaf >> (level + 1), (leaf >> level & 1).astype(bool)
        first = ~second & (pair < pairs)  # a last node without a neighbour goes up as it is
        own[first] += np.square(shares[first] * spread[pair[first]])
        shares[first] *= share[pair[first]]
        before = 2 * pair[second]
        through = np.einsum("ti,ti->t", rows[second], pull[before])
        own[second] += _quadratic(rows[second], left[before])
        own[second] += np.square((through - shares[second]) * spread[pair[second]])
        shares[second] = share[pair[second]] * (through - shares[second]) + shares[second]
        rows[second] = np.einsum("ti,tij->tj", rows[second], move[before])

        a, b = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        through = np.einsum("kij,kj->ki", move[b], pull[a])
        apart = (through - pull[b]) * spread[:, None]
        joined = (
            move[b] @ move[a],
            share[:, None] * (through - pull[b]) + pull[b],
            move[b] @ left[a] @ move[b].transpose(0, 2, 1) + left[b] + apart[:, :, None] * apart[:, None],
        )
        rest = slice(2 * pairs, None)
        move, pull, left = (
            np.concatenate([new, old[rest]]) for new, old in zip(joined, (move, pull, left), strict=True)
        )
    return rows, shares, own, move[0], pull[0], left[0]


def _from_below(tree: Tree, M: Floats, N: Floats) -> Floats:
    n = len(N)
    if any(tree.completion):
        wide, M = M, np.zeros((n, 3, 3))
        M[:, :2, :2] = wide
        starts = list(tree.restarts)
        M[starts, :2, 2] = N[starts]
        N = np.concatenate([N, np.zeros((n, 1))], axis=1)
    size = M.shape[1]
    covariance = np.zeros((size, size))
    result = np.empty(n)
    for block, (start, end) in enumerate(pairwise((0, *tree.restarts, n))):
        levels = bits(end - start)
        shared: list[Floats] = []  # of w and the estimate of each subtree of the block
        first = start
        for level in levels:
            here = slice(first, first + (1 << level))
            rows, own, move, left, with_u = _alone(tree, level, M[here], N[here])
            result[here] = own + _quadratic(rows, covariance)
            covariance = move @ covariance @ move.T + left
            shared = [*(move @ one for one in shared), with_u]
            first += 1 << level
        if block < len(tree.completion) and tree.completion[block] and len(levels) > 1:
            covariance = _with_root(tree, end - start, covariance, shared)
    return result


def _alone(tree: Tree, level: int, M: Floats, N: Floats) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Of a complete subtree: p_t = rows_t . w + (own_t), w' = move w + (left), and the covariance of w' with u."""
    rows, own = M[:, _P].copy(), np.square(N[:, _P])
    move, left, with_u = M, N[:, :, None] * N[:, None], N
    leaf = np.arange(1 << level)
    for j in range(level):
        below = 2 * _estimate(tree, j)
        a = _weight(tree, j + 1)
        second = (leaf >> j & 1).astype(bool)
        before = leaf[second] >> (j + 1)
        own[second] += _quadratic(rows[second], left[::2][before])
        rows[second] = np.einsum("ti,tij->tj", rows[second], move[::2][before])
        last = N[(2 << j) - 1 :: 2 << j]
        both = np.einsum("kij,kj->ki", move[1::2], with_u[::2]) + with_u[1::2]
        cross = both[:, :, None] * last[:, None]
        left = move[1::2] @ left[::2] @ move[1::2].transpose(0, 2, 1) + left[1::2]
        left = left - a * (cross + cross.transpose(0, 2, 1)) + a**2 * (1 + below) * last[:, :, None] * last[:, None]
        with_u = (1 - a) * both + a * (a - (1 - a) * below) * last
        move = move[1::2] @ move[::2]
        own[(2 << j) - 1 :: 2 << j] = left[:, _P, _P]
    return rows, own, move[0], left[0], with_u[0]


def _with_root(tree: Tree, m: int, covariance: Floats, shared: list[Floats]) -> Floats:
    """The covariance of w when its third number is what the next step adds, beside its own noise."""
    levels = bits(m)
    if tree.estimator == "vanilla":
        fresh, weights = 1.0, [0.0] * len(levels)
    else:
        nodes, weights = completed_root(m)
        fresh = sum(weight**2 for _, _, weight in nodes)
    covariance = covariance.copy()
    with_w = sum(((weight - 1) * one for weight, one in zip(weights, shared, strict=True)), np.zeros(3))
    covariance[2], covariance[:, 2] = with_w, with_w
    covariance[2, 2] = fresh + sum(
        (weight - 1) ** 2 * _estimate(tree, level) for weight, level in zip(weights, levels, strict=True)
    )
    return covariance


def _estimate(tree: Tree, level: int) -> float:
    """Variance of the estimate u of a complete subtree."""
    return 1.0 if tree.estimator == "vanilla" else variance(level, 1 << level)


def _weight(tree: Tree, level: int) -> float:
    """a, of a node's own noise in its estimate."""
    return 1.0 if tree.estimator == "vanilla" else variance(level, 1 << level)


def _quadratic(rows: Floats, covariances: Floats) -> Floats:
    """Row C row^T of each row, with one C or one each."""
    if covariances.ndim == 2:
        return np.asarray(np.einsum("ti,ti->t", rows @ covariances, rows))
    return np.asarray(np.einsum("ti,tij,tj->t", rows, covariances, rows))


# -- fit -------------------------------------------------------------------------------------------------------------

# Choose the tree: where to restart, whether to complete, for a workload and a participation.


def fit_tree(
    workload: Workload,
    participation: Participation,
    *,
    objective: str = "mean",
    estimator: str = "full",
    restart_every: int | None = None,
    completion: str = "auto",
) -> Tree:
    """The binary tree of least error, sensitivity included, among restart schedules and completion on or off.

    Args:
        workload: what the optimizer applies.
        participation: who takes part when; restarts fall on its epochs where it has epochs.
        objective: "mean", "max" or "last" error.
        estimator: "vanilla", "online" or "full"; full is never worse.
        restart_every: a fresh tree every so many epochs; 0 for never; None chooses.
        completion: "on", "off", or "auto", which completes where that lowers the error.
    Returns: the best `Tree`.
    Cost: one error and one sensitivity for each of about 2 log2(epochs) candidates.
    """
    checks.choice("objective", objective, OBJECTIVES)
    checks.choice("completion", completion, {"auto", "on", "off"})
    if workload.n != participation.n:
        raise PlanError(f"workload and participation must have the same n, got {workload.n} and {participation.n}")
    candidates = _candidates(participation, estimator, restart_every, completion)
    return min(candidates, key=lambda tree: _loss(tree, workload, participation.pattern, objective))


def _loss(tree: Tree, workload: Workload, pattern: Pattern, objective: str) -> float:
    """The error, sensitivity included."""
    variances = tree.prefix_variance() if workload.is_prefix_sum else of_iterates(tree, workload, way(tree))
    return bound(tree, pattern).value * math.sqrt(of_objective(variances, objective))


def restart_steps(participation: Participation, every: int) -> tuple[int, ...]:
    """The steps at which a fresh tree begins, one every `every` epochs; none for every = 0."""
    checks.integer("restart_every", every, low=0)
    if every == 0:
        return ()
    steps = epoch(participation.pattern)
    if steps is None:
        raise PlanError(
            f"restart_every needs a participation with epochs (EpochShuffle, FixedOrder), got {participation!r}; "
            "give restarts to strategy.Tree by step"
        )
    return tuple(range(every * steps, participation.n, every * steps))


def _candidates(
    participation: Participation, estimator: str, restart_every: int | None, completion: str
) -> Iterator[Tree]:
    schedules = _schedules(participation) if restart_every is None else [restart_every]
    completions = {"on": [True], "off": [False], "auto": [False, True]}[completion]
    for restarts in dict.fromkeys(restart_steps(participation, every) for every in schedules):
        for complete in completions if restarts else [False]:
            yield Tree(participation.n, estimator=estimator, restarts=restarts, completion=complete)


def _schedules(participation: Participation) -> list[int]:
    if epoch(participation.pattern) is None:
        return [0]
    k = participation.max_participations
    return [0, *(2**i for i in range(k.bit_length()) if 2**i < k)]


# -- rounding --------------------------------------------------------------------------------------------------------


def change(strategy: Tree) -> Change:
    """A tree of L levels over its leaves.

    Vanilla: all coefficients are 1 and -1. Online, with its estimates kept: a node's estimate is a y + (1 - a) (left +
    right) with 1 - a exact for a float32 a >= 1/2, and estimates sums of gradients without bias, so that K~ C = I.

    Full, with its estimates kept: from the leaves up, a node is (left + right) / (l + r), and its row of Z
    (r left - l right) / ((l + r) spread), for the float32 l, r near two shares whose sum is 1. An entry of C~ is that
    of C times at most L + 2 factors within UNIT of 1: so are the columns.

    Otherwise |E| <= UNIT |K|, also at the one step after a completed block. A column of |K| sums to at most 3, since
    a node's weight in the prefixes rises once and falls from then on (full: 2 spread <= sqrt 2); at most L + 1 nodes,
    with weights of at most sqrt 2 where K sums to as much, are over a step; and the rows of |K| under a node of m steps
    sum to at most 8 m. So || |C| |K| ||^2 <= 3 (L + 1) 8 n.
    """
    levels = max(tree.level for tree in strategy.subtrees)
    completed = any(strategy.completion)
    if strategy.estimator == "vanilla" or (strategy.estimator == "online" and strategy.state_rows and not completed):
        return NO_CHANGE
    if strategy.estimator == "full" and strategy.state_rows:
        return Change(1.01 * UNIT * (levels + 2))
    return Change(0.0, resolvent(1.01 * UNIT * math.sqrt(24 * strategy.n * (levels + 1))))
