"""Linear systems carried over many steps at once: s_{t2} = Phi s_{t1} + R xi, xi standard normal.

R is a square root of the covariance of what the steps t1 .. t2 - 1 add, R R^T. Two maps follow each other as

    Phi = Phi_2 Phi_1,      R R^T = Phi_2 R_1 (Phi_2 R_1)^T + R_2 R_2^T

and R is the triangular factor of [Phi_2 R_1, R_2], by an orthogonal transformation: covariances are never made, as
their square roots could lose half of the digits. All float64. A result depends on its steps alone, never on what was
asked for before: a run that is resumed gets the same bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ByLength", "BySteps", "Maps"]

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
        if self._count + len(missing) > self._most:  # begin anew, with what is asked for now in any case
            self._count = self._maps.Phi.shape[1] + 1
            self._where[self._count :] = -1
            missing = lengths[self._where[lengths] < 0]
        if missing.size:
            self._add(missing, self._made(missing))
        return self._maps.at(self._where[lengths])

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
