"""Correlated noise that is added late: what a coordinate has missed is added in one jump, with the very same law.

A coordinate theta that gets no gradient for some steps still gets noise in each of them. Noise, momentum and rate make
a linear system of a few numbers s = (x, v, theta), x the state of the strategy's recurrence (`Strategy.recurrences`):

    y = h x + g z,      x <- F x + G z,      u = (gradient + std y) / divisor
    v <- momentum v + u,      theta <- theta - rate v          (with Nesterov: theta - rate (u + momentum v))

z a fresh normal. So s_{t2} = Phi s_{t1} + R xi with xi of at most D fresh normals for D numbers, whatever t2 - t1 is.
Tables made so have the law of the dense run, whatever is touched, and when. With public matrices,

    s_{t+1} = Phi_t s_t + Gamma_t z_t + B_t gradient_t / divisor_t                                              (1)

and where there is no gradient in the steps a .. b - 1

    s_b = Phi s_a + w,   Phi = Phi_{b-1} .. Phi_a,   w = sum_u Phi_{b-1} .. Phi_{u+1} Gamma_u z_u ~ N(0, R R^T)    (2)

so that R xi with fresh normals xi has the law of w.

**Claim.** A run reads in every step the rows that it likes, by any rule that uses what it has read, the data and its
own draws. Rows have a gradient only in steps in which they are read. Then all that the lazy run reads, and the whole
table when it is flushed, have jointly the law of the dense run with the same rule.

**Proof.** Let a_i be the step at which coordinate i was last brought up to date, and H the history: data, draws,
gradients, and the states s^i at all those times. In the dense run, given H, the normals z^i_u with u >= a_i are
independent and standard: at first H has none of them. Reading i at step b adds s^i_b, which by (2) is a function of
s^i_{a_i} in H and of z^i_u for a_i <= u < b. These leave the statement as a_i becomes b; the others are independent
of them. A gradient, and which rows are read next, are functions of H and new draws. A touched coordinate takes step b
by (1), which is a reading at b + 1. So in the dense run s^i_b given H has the law of Phi s^i_{a_i} + R xi,
independently over coordinates: what the lazy run draws. A flush reads all rows.  QED  So a flushed table is a
function, in law, of the dense mechanism's output. x and v must be kept and jump with theta: their correlation cancels.

Normal j of the jump of coordinate c from a to b is Z[(b (n + 1) + a) D + j, c], of a key of its own. As 0 <= a <= n
and 0 <= j < D, two intervals share no row, and a coordinate's intervals are disjoint: no normal is used twice. Jumps
over step t or later have ids from (t + 1) (n + 1) D on, all others are below: a run that must draw again from step t
on does so from there.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.errors import ArgumentError, CheckpointError, PlanError
from anyorder.noise.compiled import TableMemory
from anyorder.noise.normals import MAX_ROW
from anyorder.noise.stream import NoiseSource
from anyorder.strategy import Strategy, Tree
from anyorder.strategy.base import Recurrence
from anyorder.strategy.registry import Structure, in_words, kind_of
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.variances import joined
from anyorder.workload import Workload

# ----------------------------------------------------------------------------------------------------
# Linear systems carried over many steps at once: s_{t2} = Phi s_{t1} + R xi, xi standard normal.
#
# R is a square root of the covariance of what the steps t1 .. t2 - 1 add, R R^T. Two maps follow each other as
#
#     Phi = Phi_2 Phi_1,      R R^T = Phi_2 R_1 (Phi_2 R_1)^T + R_2 R_2^T
#
# and R is the triangular factor of [Phi_2 R_1, R_2], by an orthogonal transformation: covariances are never made, as
# their square roots could lose half of the digits. All float64. A result depends on its steps alone, never on what was
# asked for before: a run that is resumed gets the same bits.


Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_CACHE = 32 << 20  # bytes of maps that are kept by length
_FEW = 8  # numbers of a coordinate, of which many maps follow others side by side; above, one after the other
_NEAR = 32  # lengths of a block, of which the maps are made together
_TINY = 1e-290  # squares of a norm below which a reflection moves nothing


class Maps(NamedTuple):
    """Phi (k, D, D), R (k, D, D)."""

    Phi: Floats
    R: Floats

    @classmethod
    def identity(cls, count: int, size: int) -> "Maps":
        """Over no step."""
        return cls(np.repeat(np.eye(size)[None], count, axis=0), np.zeros((count, size, size)))

    def at(self, places: Any) -> "Maps":
        """Some of them."""
        return Maps(self.Phi[places], self.R[places])

    def put(self, places: Any, maps: "Maps") -> None:
        """Write some of them."""
        self.Phi[places], self.R[places] = maps.Phi, maps.R

    def then(self, later: "Maps") -> "Maps":
        """These, and then those: as many, or one for all."""
        size = self.R.shape[1]
        if size > _FEW:
            both = np.concatenate([later.Phi @ self.R, np.broadcast_to(later.R, self.R.shape)], axis=2)
            upper: Any = np.linalg.qr(both.transpose(0, 2, 1), mode="r")
            return Maps(later.Phi @ self.Phi, np.ascontiguousarray(upper.transpose(0, 2, 1)))
        Phi = later.Phi.transpose(1, 2, 0)
        own = np.concatenate([self.R, self.Phi], axis=2).transpose(1, 2, 0).copy()  # (D, 2 D, k)
        made = Phi[:, 0, None] * own[0]
        for j in range(1, size):
            made += Phi[:, j, None] * own[j]
        product = made[:, size:].transpose(2, 0, 1).copy()
        made[:, size:] = later.R.transpose(1, 2, 0)
        return Maps(product, _triangle(made).transpose(2, 0, 1).copy())


def _triangle(M: Floats) -> Floats:
    """(D, D, k) lower triangular L with L L^T = M M^T, of (D, w, k), which is overwritten: Householder reflections.

    Every operation is one of single numbers, for all k side by side: the bits do not depend on how many there are.
    """
    size = len(M)
    L = np.zeros((size, size, M.shape[2]))
    for i in range(size):
        v, rest = M[i, i:], M[i + 1 :, i:]
        norm = np.sqrt(_added(v * v))
        L[i, i] = -np.copysign(norm, v[0])
        if i + 1 == size:
            break
        weight = norm * (norm + np.abs(v[0]))
        v[0] -= L[i, i]
        with np.errstate(divide="ignore", invalid="ignore"):
            v_scaled = np.where(weight > _TINY, v / weight, 0.0)
        rest -= _added((rest * v).swapaxes(0, 1))[:, None] * v_scaled
        L[i + 1 :, i] = rest[:, 0]
    return L


def _added(parts: Floats) -> Floats:
    """Their sum over the first axis, in order."""
    result: Floats = parts[0].copy()
    for part in parts[1:]:
        result += part
    return result


class ByLength:
    """Maps of a system that is the same at every step, by the number of steps, which the first `size` columns tell.

    Args:
        Phi: (D, D) of one step.
        gamma: (D,) of one step.
    """

    def __init__(self, Phi: Floats, gamma: Floats) -> None:
        size = len(gamma)
        self._most = max(size + 1, _CACHE // (16 * size * size))
        first = Maps.identity(size + 1, size)
        for length in range(size):  # while there are no more rows of Z than columns: a column each
            first.Phi[length + 1] = Phi @ first.Phi[length]
            first.R[length + 1, :, :length] = Phi @ first.R[length, :, :length]
            first.R[length + 1, :, length] = gamma
        self._maps, self._count = first, size + 1
        self._where = np.arange(size + 1)  # of each length; -1 where it was not made
        self._powers = [first.at(slice(1, 2))]

    def over(self, lengths: Integers) -> Maps:
        """Maps over so many steps each: (k,) lengths, all different."""
        longest = int(lengths.max(initial=0))
        if longest >= len(self._where):
            more = np.full(longest // _NEAR * _NEAR + _NEAR, -1)
            more[: len(self._where)] = self._where
            self._where = more
        missing = lengths[self._where[lengths] < 0]
        if missing.size and self._maps.Phi.shape[1] <= _FEW:
            blocks = np.unique(missing // _NEAR) * _NEAR
            near = (blocks[:, None] + np.arange(_NEAR)).ravel()
            near = near[self._where[near] < 0]  # soon asked for too, and side by side at the price of one
            missing = near if self._count + len(near) <= self._most else missing
        if self._count + len(missing) > self._most:  # begin again, with what is asked for now in any case
            self._count = self._maps.Phi.shape[1] + 1
            self._where[self._count :] = -1
            missing = lengths[self._where[lengths] < 0]
        if missing.size:
            self._add(missing, self._made(missing))
        return self._maps.at(self._where[lengths])

    @property
    def known(self) -> tuple[Maps, Integers]:
        """All maps that were made, and the place of each length among them, -1 where it was not made."""
        return self._maps, self._where

    def _made(self, lengths: Integers) -> Maps:
        result = Maps.identity(len(lengths), self._maps.Phi.shape[1])
        bits = int(lengths.max()).bit_length()
        while len(self._powers) < bits:
            self._powers.append(self._powers[-1].then(self._powers[-1]))
        for bit in range(bits):
            has = (lengths >> bit & 1).astype(bool)
            if has.any():
                result.put(has, result.at(has).then(self._powers[bit]))
        return result

    def _add(self, lengths: Integers, maps: Maps) -> None:
        end = self._count + len(lengths)
        self._maps = _grown(self._maps, end)
        self._maps.put(slice(self._count, end), maps)
        self._where[lengths] = np.arange(self._count, end)
        self._count = end


class BySteps:
    """Maps of a system that changes from step to step.

    Blocks of steps as in a Fenwick tree: block s >= 1 has the steps s .. s + 2^j - 1, 2^j the largest power of two in
    s. From a start on, block after block leads to the step c(start, stop): the stop with all bits below the highest
    one in which the two differ set to 0. What is known of a start is kept, and goes on with the stop: in a run of n
    steps a start is carried on log2(n) times at most. From c(start, stop) to the stop lead the same few maps for all.

    Args:
        single: (k,) steps -> their maps.
        size: D.
    """

    def __init__(self, single: Callable[[Integers], Maps], size: int) -> None:
        self._single = single
        self._blocks = Maps.identity(1, size)
        self._made = 0  # blocks are there that end at this step or before
        self._known = Maps.identity(1, size)  # from each start on ..
        self._end = np.zeros(0, np.int64)  # .. to this step; 0 where nothing is known

    def over(self, starts: Integers, stop: int) -> Maps:
        """Maps from (k,) starts, all different and below the stop, to the stop."""
        self._complete(stop)
        ends = _towards(starts, stop)
        path = [int(ends.min())]  # ends lie on it: each is the stop without its lowest bits
        while path[-1] < stop:
            path.append(int(_towards(np.array(path[-1:]), stop)[0]))
        self._carry(starts, ends)
        result = self._known.at(starts)
        if len(path) > 1:
            self._carry(np.array(path[:-1]), np.array(path[1:]))
        rest: Maps | None = None  # from a step of the path to the stop
        for step in reversed(path[:-1]):
            known = self._known.at(slice(step, step + 1))
            rest = known if rest is None else known.then(rest)
            here = ends == step
            if here.any():
                result.put(here, result.at(here).then(rest))
        return result

    def _carry(self, starts: Integers, ends: Integers) -> None:
        """Know the maps from the starts to these ends."""
        if starts.max() >= len(self._end):
            length = max(2 * len(self._end), int(starts.max()) + 1)
            self._known = _grown(self._known, length)
            self._end = np.concatenate([self._end, np.zeros(length - len(self._end), np.int64)])
        fresh = starts[(self._end[starts] == 0) | (self._end[starts] > ends)]
        if fresh.size:
            self._known.put(fresh, self._single(fresh))
            self._end[fresh] = fresh + 1
        while (behind := self._end[starts] < ends).any():
            late = starts[behind]
            next_block = self._end[late]
            self._known.put(late, self._known.at(late).then(self._blocks.at(next_block)))
            self._end[late] = next_block + (next_block & -next_block)

    def _complete(self, stop: int) -> None:
        """Have all blocks that end at the stop or before."""
        if stop <= self._made:
            return
        self._blocks = _grown(self._blocks, stop)
        level = 0
        while stop >> (level + 1):
            m = np.arange(self._made >> (level + 1), stop >> (level + 1))
            if m.size:
                first = (2 * m + 1) << level
                maps = self._single(first)
                for below in range(level):
                    maps = maps.then(self._blocks.at(first + (1 << below)))
                self._blocks.put(first, maps)
            level += 1
        self._made = stop


def _towards(starts: Integers, stop: int) -> Integers:
    """c(start, stop), see `BySteps`."""
    bit = np.frexp((starts ^ stop).astype(np.float64))[1] - 1  # the highest one in which they differ
    return np.asarray(stop >> bit << bit)


def _grown(maps: Maps, length: int) -> Maps:
    """With room for so many."""
    count, size, _ = maps.Phi.shape
    if length <= count:
        return maps
    room = np.zeros((2, max(length, 2 * count), size, size))
    room[0, :count], room[1, :count] = maps
    return Maps(*room)


# ----------------------------------------------------------------------------------------------------
# Jumps of a tree's noise: by value, from the nodes of two prefixes; or as a recurrence, with momentum.


_MOST_PREFIXES = 1 << 21  # rows of prefixes that are kept


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
        if self._end > _MOST_PREFIXES:
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


# ----------------------------------------------------------------------------------------------------
# Rows of a table carried over the steps that they have missed: the arithmetic of a jump, the same bits everywhere.
#
# For each coordinate of a row, with D numbers s, normals xi and perhaps a sum g of gradients,
#
#     s_i  <-  0 + Phi_i1 s_1 + .. + Phi_iD s_D + R_i1 xi_1 + .. + R_iw xi_w + into_i g
#
# in float64, from left to right, every product and every sum rounded by itself, terms of factor 0 left out; then once
# rounded to the type of the table. Such a sum is never -0, so that a term of +0 or -0 would change no bit of it.


_MOST_NORMALS = 128  # normals of a coordinate that the kernel has room for


class Jump(NamedTuple):
    """From each start to one stop: s <- Phi s + R Z[rows], for all coordinates of a row of a table.

    Z is the run's own where the jumps are `by_value`, else one that serves these jumps alone.

    Attributes:
        Phi: (u, D, D) float64, one for each distinct start; theta is last.
        R: (u, D, w); w is at most `Jumps.width`, and at most the number of steps where these are few.
        rows: (u, w) int64 row ids of Z: never the same for two intervals, but by value.
        which: (k,) the distinct start of each one that was asked for.
    """

    Phi: Floats
    R: Floats
    rows: Integers
    which: NDArray[np.intp]


def carry(
    source: NoiseSource,
    jump: Jump,
    memory: TableMemory,
    rows: Integers,
    sums: NDArray[Any] | None = None,
    into: Floats | None = None,
) -> None:
    """Carry some rows of a table, in place; see the module.

    Args:
        source: of the normals.
        jump: maps, and which one each row takes.
        memory: the numbers of the table.
        rows: (k,) distinct rows.
        sums: (k, width) what the rows have as gradients, float32 or float64; or none.
        into: (D,) what a sum of 1 adds.
    Raises: ArgumentError for what does not fit; MemoryError. Nothing was changed then.
    """
    _check_fits(jump, memory, rows, sums, into)
    one = _one_source(source, jump.rows)
    kernel = None if one is None else one.kernel
    room = jump.R.shape[2] <= _MOST_NORMALS or _used(jump).max() <= _MOST_NORMALS
    if one is not None and kernel is not None and room:
        kernel.carry(
            one.key_words, one.rounds, memory, np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(jump.Phi),
            np.ascontiguousarray(jump.R), np.ascontiguousarray(jump.rows), np.ascontiguousarray(jump.which, np.int64),
            None if sums is None else np.ascontiguousarray(sums), into,
        )  # fmt: skip
        return
    if len(rows) and not 0 <= rows.min() <= rows.max() < memory.num_rows:
        raise ArgumentError(f"rows must lie in 0 .. {memory.num_rows - 1}, each with a map of the jump")
    if not len(rows) or not memory.width:
        return
    made = carried(source, jump, np.stack([x[rows] for x in memory.arrays]), rows, memory.first, sums, into)
    with np.errstate(all="ignore"):
        for x, new in zip(memory.arrays, made, strict=True):
            x[rows] = new


def carried(
    source: NoiseSource,
    jump: Jump,
    state: NDArray[Any],
    rows: Integers,
    first: int,
    sums: NDArray[Any] | None = None,
    into: Floats | None = None,
) -> Floats:
    """The numbers of `carry` before they are rounded to the type of the table: (D, k, width).

    Args:
        state: (D, k, width) the numbers of these rows.
    """
    D, k, width = state.shape
    w = int(_used(jump).max(initial=0))
    ids, elements = np.broadcast_arrays(jump.rows[jump.which, :w], (first + rows * width)[:, None])
    xi = source.normal_at(ids.ravel(), elements.ravel(), width).reshape(k, w, width)
    made = np.zeros((D, k, width))
    with np.errstate(all="ignore"):  # of a run that diverges
        for i in range(D):
            for j in range(D):
                _add(made[i], jump.Phi[jump.which, i, j], state[j])
            for j in range(w):
                _add(made[i], jump.R[jump.which, i, j], xi[:, j])
            if sums is not None and into is not None:
                _add(made[i], np.full(k, into[i]), sums)
    return made


def _add(total: Floats, factors: Floats, x: NDArray[Any]) -> None:
    """Total += factors x, row by row; where the factor is 0, not even 0 inf."""
    has = factors != 0
    if has.all():
        total += factors[:, None] * x
    elif has.any():
        total[has] += factors[has, None] * x[has]


def _used(jump: Jump) -> Integers:
    """(u,) the columns of R up to the last that is not 0: no further normals are made."""
    _, D, w = jump.R.shape
    has = jump.R[:, 0] != 0 if D == 1 else (jump.R != 0).any(axis=1)
    used: Integers = (has * np.arange(1, w + 1)).max(axis=1, initial=0)
    return used


def _one_source(source: NoiseSource, ids: Integers) -> NoiseSource | None:
    """The source of a single key that all these rows of Z come from."""
    if not ids.size:
        return source
    return source.of_all(int(row()) for row in (ids.min, ids.max))  # keys change from a row on


def _check_fits(
    jump: Jump, memory: TableMemory, rows: Integers, sums: NDArray[Any] | None, into: Floats | None
) -> None:
    """The kernel writes where it is told, and reads as far: which rows and maps there are, it asks for itself."""
    D, u, w = len(memory.arrays), len(jump.Phi), jump.rows.shape[1]
    if jump.Phi.shape != (u, D, D) or jump.R.shape != (u, D, w) or jump.rows.shape != (u, w):
        raise ArgumentError(f"a jump of {jump.Phi.shape[1]} numbers does not fit {D} arrays")
    if len(jump.which) != len(rows):
        raise ArgumentError("a jump must have a map for each row")
    if (sums is None) != (into is None):
        raise ArgumentError("sums and into go together")
    if sums is None or into is None:
        return
    if sums.shape != (len(rows), memory.width) or sums.dtype not in (np.float32, np.float64) or into.shape != (D,):
        raise ArgumentError(f"sums must be {(len(rows), memory.width)} in float32 or float64, got {sums.shape}")


# ----------------------------------------------------------------------------------------------------
# Jumps over the steps of a run: the maps of a strategy with its optimizer and rates, by any of the ways above.


_MOST_STATE = 64  # numbers of a coordinate
_RECENT = 16  # steps


class Jumps:
    """Jumps over steps that a row of a table has missed, for a strategy, SGD with momentum, and public rates.

    Args:
        strategy: of the run.
        momentum: of `torch.optim.SGD`, in [0, 1), without dampening.
        nesterov: as there.
        by_value: of a tree without momentum, vanilla or full: jumps have the nodes of the run's own Z, so that the
            noise is that of the dense run by value, and nothing is kept beside theta. Z must be renewed as the run's
            is. A change of the rate or scale within a jump costs the nodes of one more prefix.
    Raises: PlanError for a strategy without a recurrence of few numbers.
    `size` is D, the numbers of a coordinate: the strategy's state, a velocity where momentum > 0, theta last. `width`
    is the most normals that a coordinate takes in a jump.

    Cost: in a run of constant rate and scale, with a strategy that is the same at every step, maps are kept by length,
        32 MB of them; otherwise O(log n) QR factorisations of D x 2D for each start, and 32 n D^2 bytes.
    """

    def __init__(
        self, strategy: Strategy, *, momentum: float = 0.0, nesterov: bool = False, by_value: bool = False
    ) -> None:
        if not isinstance(nesterov, bool):
            raise ArgumentError(f"nesterov must be a bool, got {nesterov!r}")
        if nesterov and not momentum:
            raise ArgumentError("nesterov needs a momentum above 0, got 0")
        self._optimizer = Workload(1, momentum=momentum, nesterov=nesterov)
        self.n: int = strategy.n
        if not isinstance(by_value, bool):
            raise ArgumentError(f"by_value must be a bool, got {by_value!r}")
        self._prefixes: Prefixes | None = None
        state = 0
        if by_value:
            self._prefixes = Prefixes(_valued(strategy, self._optimizer.momentum))
        else:
            self._steady, self._recurrences = _way(strategy)
            state = self._recurrences(np.zeros(1, np.int64)).h.shape[1]
        self.size: int = state + 1 + (self._optimizer.momentum > 0)
        self.width: int = self.size
        if self.size > _MOST_STATE:
            raise PlanError(
                f"a lazy table keeps {self.size - 1} further tables for {in_words(strategy)}, and {_MOST_STATE - 1} "
                "are the most: choose fewer bands or buffers, as ao.plan(mechanism='blt', limits=ao.Limits(memory=4)) "
                "does"
            )
        if not self.by_value and self.first_row(self.n) > MAX_ROW:
            raise PlanError(f"jumps need row ids below 2^63: n={self.n} steps with {self.width} normals are too many")
        self._rates: list[tuple[float, float]] = []
        self._changes: list[int] = []  # steps whose rate or scale is not that of the step before
        self._moving = BySteps(self._single, self.size)
        self._constant: tuple[int, ByLength] | None = None
        self._into: tuple[float, Floats] | None = None  # a rate, and `input` with it
        self._recent: dict[int, Maps] = {}  # of the last steps that were asked for one by one

    @property
    def kept(self) -> int:
        """Arrays of the size of the table that are kept with it."""
        return self.size - 1

    @property
    def by_value(self) -> bool:
        """Whether the rows of a jump are those of the run's own Z, and the noise that of the dense run by value.

        Elements are then the coordinates of the run. Else rows are of a Z that serves jumps alone.
        """
        return self._prefixes is not None

    @property
    def recorded(self) -> int:
        """Steps whose rate and scale are known."""
        return len(self._rates)

    def record(self, t: int, lr: float, scale: float) -> None:
        """Say what step t is done with: public numbers, of steps in their order.

        Args:
            t: step; the one after the last that was recorded.
            lr: learning rate, not negative.
            scale: noise std over divisor, in force at step t.
        """
        checks.integer("t", t, low=0, high=self.n - 1)
        if t != self.recorded:
            raise ArgumentError(f"steps must be recorded in their order: t must be {self.recorded}, got {t}")
        pair = checks.real("lr", lr, low=0.0), checks.real("scale", scale, low=0.0)
        if not self._rates or pair != self._rates[-1]:
            self._changes.append(t)
        self._rates.append(pair)

    def input(self, t: int) -> Floats:
        """(D,) what a private mean of 1 in step t adds: s <- Phi s + R xi + input gradient, over (t, t + 1)."""
        t = checks.integer("t", t, low=0, high=self.recorded - 1)
        lr = self._rates[t][0]
        if self._into is None or self._into[0] != lr:
            result = np.zeros(self.size)
            into = self._optimizer.recurrence([-lr])[1][0]  # velocity and theta
            result[-1 - (self._optimizer.momentum > 0) :] = into if self._optimizer.momentum else into[1:]
            self._into = lr, result
        return self._into[1].copy()

    def over(self, starts: ArrayLike, stop: int) -> Jump:
        """Jumps from each start to the stop: what the steps start .. stop - 1 add where there is no gradient.

        Args:
            starts: (k,) integers, 0 <= start <= stop, in any order; a start of `stop` is no jump.
            stop: at most `recorded`.
        """
        stop = checks.integer("stop", stop, low=0, high=self.recorded)
        given = np.asarray(starts)
        integers = given.ndim == 1 and (given.dtype.kind in "iu" or not given.size)
        low, high = (int(given.min()), int(given.max())) if integers and given.size else (0, 0)
        if not integers or not 0 <= low <= high <= stop:
            raise ArgumentError(f"starts must be a list of steps from 0 to stop={stop}")
        distinct, which = _distinct(given, low, high)
        if self._prefixes is not None:
            first, last = (bisect_right(self._changes, t) for t in (distinct.min(initial=stop), stop - 1))
            since = self._changes[max(0, first - 1) : last]  # of these steps on c is the same up to the next one
            values = np.array([lr * scale for lr, scale in (self._rates[t] for t in since)])
            rows, factors = self._prefixes.over(
                distinct, stop, self._changes[first:last], lambda t: values[np.searchsorted(since, t, "right") - 1]
            )
            return Jump(np.ones((len(distinct), 1, 1)), factors[:, None], rows, which)
        maps, width = self._maps(distinct, stop)
        ids = (stop * (self.n + 1) + distinct)[:, None] * self.width + np.arange(width)
        return Jump(maps.Phi, maps.R[:, :, :width], ids, which)

    def bring(
        self, source: NoiseSource, memory: TableMemory, rows: Integers, last: NDArray[np.int32], stop: int
    ) -> bool:
        """Carry rows of a table over the steps last[row] .. stop - 1, and set `last`, by one call of the kernel.

        The bits are those of `carry` with the jumps of `over`.

        Args:
            rows: (k,) rows, distinct.
            last: of all rows of the table: the steps whose noise each one has.
        Returns: whether it was done. Else nothing was: where rates change from step to step, or a map was never asked
            for by `over`, which keeps those that it makes.
        """
        since = self._changes[bisect_right(self._changes, stop - 1) - 1] if stop else 0
        kept = self._constant
        if self._prefixes is not None or kept is None or kept[0] != since or stop - since < 2:
            return False
        first = (stop * (self.n + 1) + since) * self.width
        one = source.of_all((first, first + (stop - since) * self.width - 1))  # keys change from a row on
        if one is None or one.kernel is None:
            return False
        maps, map_of = kept[1].known
        return one.kernel.bring(
            one.key_words, one.rounds, memory, rows, maps.Phi, maps.R, map_of, last, stop, since, self.n + 1
        )

    def first_row(self, t: int) -> int:
        """The r for which jumps over step t or later ones have rows from r on, and those that end before have not.

        Not of jumps by value, which have the run's rows.
        """
        if self._prefixes is not None:
            raise PlanError("jumps by value have the rows of the run itself: they are renewed with the run's noise")
        return (t + 1) * (self.n + 1) * self.width

    def state_dict(self) -> dict[str, Any]:
        """The recorded rates and scales, public numbers."""
        return {"rates": np.array(self._rates, dtype=np.float64).reshape(-1, 2)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Know the steps that were recorded when `state_dict` was taken; jumps then have the same bits as there.

        Raises: CheckpointError if it is malformed; nothing changes.
        """
        rates = saved.get("rates")
        pairs: NDArray[Any] = rates if isinstance(rates, np.ndarray) and rates.dtype == np.float64 else np.empty(0)
        if pairs.shape[1:] != (2,) or len(pairs) > self.n or not (np.isfinite(pairs) & (pairs >= 0)).all():
            raise CheckpointError(
                f"the rates of a saved table must be {self.n} pairs of finite numbers at most, none < 0"
            )
        self._rates = [(lr, scale) for lr, scale in pairs.tolist()]
        new = np.ones(len(pairs), bool)
        new[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
        self._changes = np.flatnonzero(new).tolist()
        self._moving = BySteps(self._single, self.size)
        self._constant = None
        self._recent = {}

    def _maps(self, starts: Integers, stop: int) -> tuple[Maps, int]:
        """From distinct, ascending starts; columns of R beyond the number that is told are 0."""
        longest = int(stop - starts[0]) if starts.size else 0
        since = self._changes[bisect_right(self._changes, stop - 1) - 1] if self._steady and stop else stop
        if longest and starts[-1] < stop:  # as always, where nothing is special
            if since <= starts[0] and stop - since > 1:
                return self._since(since).over(stop - starts), min(longest, self.width)
            if longest == 1:
                return self._single(starts), min(longest, self.width)
        result = Maps.identity(len(starts), self.size)
        if longest:
            if stop - since < 2:
                since = stop
            here, far = (since <= starts) & (starts < stop), starts < since
            if here.any():
                result.put(here, self._since(since).over(stop - starts[here]))
            if far.any():
                result.put(far, self._moving.over(starts[far], stop))
                return result, self.width
        return result, min(longest, self.width)

    def _since(self, step: int) -> ByLength:
        """Of the steps from one on whose rate and scale are all alike."""
        if self._constant is None or self._constant[0] != step:
            one = self._single(np.array([step]))
            self._constant = step, ByLength(one.Phi[0], one.R[0, :, 0])
        return self._constant[1]

    def _single(self, steps: Integers) -> Maps:
        """The maps of single steps; of R the first column alone is not 0. One step is asked for again and again."""
        if len(steps) != 1:
            return self._made(steps)
        step = int(steps[0])
        if step not in self._recent:
            if len(self._recent) >= _RECENT:
                self._recent.clear()
            self._recent[step] = self._made(steps)
        return self._recent[step].at([0])

    def _made(self, steps: Integers) -> Maps:
        lr, scale = np.array([self._rates[t] for t in steps.tolist()]).reshape(-1, 2).T
        M, N = self._optimizer.recurrence(-lr)
        Phi, gamma = joined(self._recurrences(steps), M, N * scale[:, None])
        R = np.zeros((len(steps), self.size, self.size))
        R[:, :, 0] = self._without_idle(gamma)
        return Maps(self._without_idle(self._without_idle(Phi).transpose(0, 2, 1)).transpose(0, 2, 1).copy(), R)

    def _without_idle(self, values: Floats) -> Floats:
        """(k, .., D) without the velocity, which without momentum is nothing that is kept."""
        if self._optimizer.momentum:
            return values
        return np.delete(values, values.shape[1] - 2, axis=1)


def _distinct(given: NDArray[Any], low: int, high: int) -> tuple[Integers, NDArray[np.intp]]:
    """As `np.unique` with `return_inverse`, of integers from low to high: without sorting, where they are dense."""
    if low == high and given.size:
        return np.array([low]), np.zeros(len(given), np.intp)
    if high - low > 8 * len(given):
        return np.unique(given.astype(np.int64), return_inverse=True)
    places = given.astype(np.int64) - low
    there = np.zeros(high - low + 1, bool)
    there[places] = True
    found = np.flatnonzero(there)
    numbers = np.empty(len(there), np.intp)
    numbers[found] = np.arange(len(found))
    return found + low, numbers[places]


def _way(strategy: Strategy) -> tuple[bool, Callable[[Integers], Recurrence]]:
    """Whether the recurrence is the same at every step, and the recurrence.

    Raises: PlanError where noise cannot be added late.
    """
    structure = kind_of(strategy).structure
    match structure:
        case Structure.IDENTITY | Structure.BUFFERED | Structure.TOEPLITZ_BANDED:
            return True, strategy.recurrences
        case Structure.BANDED | Structure.RESTARTED | Structure.LOW_RANK:
            return False, strategy.recurrences
        case Structure.RESCALED:
            assert isinstance(strategy, Rescaled)
            if not isinstance(strategy.strategy, Tree):
                _way(strategy.strategy)
                return False, strategy.recurrences
        case Structure.TOEPLITZ:
            if type(strategy).recurrences is not Strategy.recurrences:
                return True, strategy.recurrences
        case Structure.TREE:
            assert isinstance(strategy, Tree)
            check_recurrence(strategy)
            return False, partial(recurrences, strategy)
        case Structure.DENSE:
            pass
        case _:
            assert_never(structure)
    raise PlanError(
        f"noise of {in_words(strategy)} cannot be added late: it has no recurrence of a few numbers, so that a row "
        "would need the noise of every step that it missed. Plan with mechanism='blt', whose noise can jump (and "
        "limits=ao.Limits(memory=4) for the most arrays of the table's size that are kept)"
    )


def _valued(strategy: Strategy, momentum: float) -> Tree:
    """A tree whose missed noise is a short combination of nodes. PlanError for what is none."""
    kind_of(strategy)
    if not isinstance(strategy, Tree) or momentum:
        raise PlanError(
            f"by_value=True needs a tree and momentum 0, got {in_words(strategy)} and momentum {momentum:g}: in no "
            "other case is the noise of many steps a combination of a few rows of Z; take by_value=False"
        )
    check_value(strategy)
    return strategy
