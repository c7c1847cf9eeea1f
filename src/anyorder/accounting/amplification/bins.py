"""Deterministic bounds for balls in bins with any non-negative strategy: never below the truth.

With K = G / sigma^2, G the Gram matrix of the bins' means and x ~ N(0, K), the pair of `mixture` has

    L = 1/b sum_j exp(x_j - K_jj / 2)
    with against without:  delta(eps) = E (L - e^eps)_+,     without against with:  delta(eps) = E (1 - e^eps L)_+

Both are E phi(L) of a convex phi, and depend on K alone. K is replaced by a larger K'.

*Two ways to raise K.* By entries (Kahane): if K <= K' in every entry, delta of K is at most that of K'. By forms
(Jensen): if K' - K = P is positive semidefinite, take x' = x + p with p ~ N(0, P) independent of x; then E [L' | x] =
L, and E phi(L) <= E phi(L') for convex phi. So K' = K + E + P is enough, E >= 0 in every entry, P
positive semidefinite.

*Chains* (`bins_fit`, `bins_chain`), with d = |i - j| on a circle of b bins:

    K' = c + nu [d = 0] + v (r^d + r^(b - d)) / (1 + r^b)

c is an independent factor exp(sqrt(c) z - c / 2); for each value of the rest both expectations are formulas, those of
Black and Scholes. nu is an independent lognormal factor in every bin. v, r is the Ornstein-Uhlenbeck process on a
circle: given s_0 the others form a Markov chain, so the law of (s_j, partial sum) is carried from bin to bin for each
s_0. Neighbouring bins may share a state, where v falls little within such a block: one more matrix above K. For each of
twelve r a linear programme finds c, nu, v, E and P; its result is not trusted: the diagonal is raised by what the least
eigenvalue lacks.

*Nested matrices* (`bins_nested`). The bins are the leaves of a tree, K'_ij is the height of the lowest node above i and
j, and K'_jj that of the leaf. L of a node is a lognormal factor times the mean of its children's L, which are
independent. The least nested matrix above K is found by single linkage: exact for diagonal matrices, close for trees.

*Grids are on the safe side.* A value between two points of the grid is split so that its mean stays. phi(L) is convex
in each factor and in the partial sum, so the split only raises E phi(L). For states with rising phi, what follows is
A + sum_i exp(a_i s + noise) with a_i >= 0: convex in s, and the same split is safe. What is below the grid moves to its
lowest point; what is above counts with the mean of L, as (L - t)_+ <= L. With falling phi, what follows is concave in
u = e^s, so the split keeps the mean of e^s. What is above moves to the highest point; what is below counts as a whole,
as phi <= 1. For the rounding of floats, 1e-9 of delta and 1e-13 are added.

The least of several K' counts, one of them max K 11^T, a single Gaussian: what the bins give if they are known. For
composition, the greatest convex minorant of the curve in e^eps becomes a loss distribution.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, assert_never

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import ndtr

from anyorder import checks
from anyorder._numerics import bisect
from anyorder.accounting.amplification.exact import Atoms, between, lognormal, nth_power, times_lognormal, together
from anyorder.accounting.gaussian import gdp_delta, gdp_epsilon
from anyorder.checks import final
from anyorder.errors import ArgumentError

# ----------------------------------------------------------------------------------------------------
# The law of a mean of lognormals driven by a Gaussian chain on a circle, by dynamic programming, on the safe side.
#
#     L = 1/b sum_j exp(s_j - v/2) xi_j,   xi_j = exp(N(-nu/2, nu)) independent,
#     cov(s_i, s_j) = v (r^d + r^(b - d)) / (1 + r^b)
#
# with d = |i - j|: the Ornstein-Uhlenbeck process on a circle. Given s_0 the others are a bridge, a Markov chain, and
# the law of (s_j, partial sum) is carried from bin to bin for each s_0. Every law that is put on a grid is spread
# about its mean, and this can only raise E phi(L) for a convex phi: a partial sum and a factor
# xi always; a state s of the chain where phi rises too, as what follows is a + sum_i c_i e^(a_i s), 0 <= a_i <= 1,
# convex in s; and where phi falls e^s is spread about its mean, in which the same is concave. What leaves the grid is
# counted in full.


Floats = NDArray[np.float64]

_FAR = 6.5  # deviations to which a Gaussian is followed
_PER_STEP = (3.0, 4.0)  # points of the grid of states in a deviation of one step of a chain, and where they count most
_STATES = 160  # at most, of the chain
_FIRST = (0.6, 0.4)  # deviations of s_0 between two of its points, of few blocks; and as many times
_FIRST_OF_MANY = 1.5  # that of 30 or more, where the first one counts less
_LARGE = 1.0  # variance from which spread partial sums and states weigh less
_GAP = (0.005, 0.04)  # of partial sums, relative, least and most; between them so that all additions raise
_RAISED = 0.01  # the variance of L by about this share
_GAP_FACTOR = 0.15  # of a factor xi, relative, at most
_AT_ONCE = 40_000  # numbers of a table, which then stays in the processor's cache
_FAR_BELOW = 40.0  # beyond it a grid is long, and only the Gaussian is near
_POINTS = 600  # of the law of a block's factors
_NOTHING = 1e-15  # mass, under either law, of a block's factors that the grid need not reach to
_EVEN = (2.0, 1.4)  # by how much less than its mean L is, as a logarithm, where partial sums begin to have equal gaps:
# where phi rises; and for each unit of K' more where it falls, as 1 - t L counts where L is far below 1


@final
@dataclass(frozen=True)
class Chain:
    """K'_ij = v (r^d + r^(m - d)) / (1 + r^m) + within [d = 0] + nu [i = j] + constant, b bins in m blocks on a circle.

    d is the distance of the blocks of i and j, which are of like size: see `block_starts`. v = 0 for no chain.
    """

    b: int
    constant: float
    nu: float
    v: float
    r: float
    blocks: int
    within: float = 0.0

    @property
    def own(self) -> float:
        """The diagonal of K' without its constant part."""
        return self.v + self.within + self.nu


def block_starts(b: int, blocks: int) -> NDArray[np.int64]:
    """(blocks,) the first bin of each block."""
    return np.arange(blocks) * b // blocks


def block_sizes(b: int, blocks: int) -> NDArray[np.int64]:
    """(blocks,) how many bins are in each."""
    return np.diff(np.append(block_starts(b, blocks), b))


def ring(m: int, r: float) -> Floats:
    """(m,) correlations of the chain at each distance on a circle of m states."""
    d = np.arange(m)
    return np.asarray((r**d + r ** (m - d)) / (1 + r**m))


@final
@dataclass(frozen=True)
class ChainLaw:
    """Atoms (value, mass under Q) of L, and what lies beyond, for one direction.

    rising:  E (L - t)_+ <= sum mass (value - t)_+ + beyond
    falling: E (1 - t L)_+ <= sum mass (1 - t value)_+ + beyond
    """

    values: Floats
    masses: Floats
    beyond: float


def chain_law(chain: Chain, *, falling: bool = False, coarse: float = 1.0) -> ChainLaw:
    """The law of L of a chain without its constant part: for with against without, or `falling`, the other way round.

    Args:
        coarse: how many times as wide the gaps of all grids are; on the safe side whatever it is.
    Cost: O(m F S^2 A) flops for m blocks, S states, F first states and A partial sums, in general some 60, 25 and 1000.
    """
    b, v = chain.b, chain.v
    states, first = _states(chain, coarse)
    sums = _partial_sums(chain, coarse, falling)
    sizes = block_sizes(b, chain.blocks).tolist()
    adds = {size: _additions(states - v / 2, chain, size, sums, coarse) for size in sorted(set(sizes))}
    law, _, low = _spread(np.zeros(1), math.sqrt(v), first, falling)
    beyond = float(low[0]) if falling else float(ndtr(v**0.5 - first[-1] / v**0.5)) if v else 0.0
    held = np.zeros((len(first), len(states), len(sums)))
    held[np.arange(len(first)), np.searchsorted(states, first), 0] = law[:, 0]  # s_0 is a point of the grid of states
    for j, size in enumerate(sizes):
        if j and v:
            held, more = _step(chain, j, states, first, sums, held, falling)
            beyond += more
        for i, (matrix, surplus) in enumerate(adds[size]):
            here = held[:, i]
            if here.any():
                beyond += 0.0 if falling else float((here @ surplus).sum()) / b
                held[:, i] = (matrix @ here.T).T
    return ChainLaw(sums / b, held.sum((0, 1)), beyond)


def _states(chain: Chain, coarse: float = 1.0) -> tuple[Floats, Floats]:
    """The points of s_j, and those of s_0, every so many of them."""
    v, r = chain.v, chain.r
    if v == 0:
        return np.zeros(1), np.zeros(1)
    deviation = math.sqrt(v)
    high, low = v + _FAR * deviation, _FAR * deviation
    gap = coarse * max(deviation * math.sqrt(1 - r * r) / _PER_STEP[_fine(chain)], (high + low) / _STATES)
    many = min(max(chain.blocks / 20, 1.0), _FIRST_OF_MANY)
    every = max(1, round(_FIRST[_fine(chain)] * many * coarse * deviation / gap))
    below, above = math.ceil(low / gap / every) * every, math.ceil(high / gap / every) * every
    points: Floats = np.arange(-below, above + 1) * np.float64(gap)
    return points, points[::every].copy()


def _fine(chain: Chain) -> bool:
    """Whether the states' own spread counts: they are most of K', and that is small."""
    return chain.v < _LARGE and 2 * chain.v > chain.own + chain.constant


def _partial_sums(chain: Chain, coarse: float = 1.0, falling: bool = False) -> Floats:
    """0, and up to where next to nothing of L lies under either law; gaps rise with the sum."""
    k = chain.own
    knee = chain.b * math.exp(-_EVEN[0] - falling * min(_EVEN[1] * k, _FAR_BELOW))
    gap = coarse * _gap(chain)
    top = math.log(chain.b) + k / 2 + _FAR * math.sqrt(k)
    even = np.arange(0.0, 1.0, gap) * knee
    rest = np.arange(0.0, top - math.log(knee) + gap, gap)
    return np.concatenate([even, knee * np.exp(rest)])


def _gap(chain: Chain) -> float:
    """Relative gap of partial sums: an addition adds gap^2 / 6 of the sum's square, on average a third of the last."""
    kernel = chain.v * ring(chain.blocks, chain.r)
    kernel[0] += chain.within
    own = math.exp(min(kernel[0], 50.0)) * math.expm1(min(chain.nu, 50.0)) / chain.b
    variance = np.expm1(np.minimum(kernel, 50.0)).mean() + own
    least, most = _GAP  # the least keeps memory small where there is next to no variance
    return min(max(math.sqrt(18 * _RAISED * variance / chain.blocks), least), most)


def _spread_normal(means: Floats, deviation: float, points: Floats) -> tuple[Floats, Floats, Floats]:
    """Of N(mean, deviation^2), each mean a column, spread on ascending points: masses; what lies above, and below.

    What lies beyond an end is put on the end. A mass between is split so that the mean stays.
    """
    if len(points) == 1:
        return np.ones((1, len(means))), np.zeros(len(means)), np.zeros(len(means))
    x = (points[:, None] - means) / deviation
    below, above = ndtr(x), ndtr(-x)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    # E (X - point)_+ and E (point - X)_+ in deviations; differences of the one that is small
    calls, puts = density - x * above, density + x * below
    gaps = np.diff(x, axis=0)
    slope = np.where(x[:-1] + x[1:] > 0, np.diff(calls, axis=0), np.diff(puts, axis=0) - gaps) / gaps  # in [-1, 0]
    rises = np.where(x[:-1] + x[1:] > 0, np.diff(calls, axis=0) + gaps, np.diff(puts, axis=0)) / gaps  # slope + 1
    masses = np.empty_like(x)
    masses[1:-1] = np.where(x[1:-1] > 0, np.diff(slope, axis=0), np.diff(rises, axis=0))
    masses[0], masses[-1] = rises[0], -slope[-1]
    return np.maximum(masses, 0.0), above[-1], below[0]


def _spread(means: Floats, deviation: float, points: Floats, falling: bool) -> tuple[Floats, Floats, Floats]:
    """`_spread_normal` about the mean of s, or of e^s."""
    return (_spread_weights if falling else _spread_normal)(means, deviation, points)


def _spread_weights(means: Floats, deviation: float, points: Floats) -> tuple[Floats, Floats, Floats]:
    """`_spread_normal`, but a mass between two points is split so that the mean of e^s stays."""
    if len(points) == 1:
        return np.ones((1, len(means))), np.zeros(len(means)), np.zeros(len(means))
    x = (points[:, None] - means) / deviation
    cells = between(x)
    # of e^(s - lower point), less 1, over the cell
    above = np.exp(means + deviation**2 / 2 - points[:-1, None]) * between(x - deviation) - cells
    above = np.clip(above / np.expm1(np.diff(points))[:, None], 0.0, cells)
    masses = np.zeros_like(x)
    masses[:-1] += cells - above
    masses[1:] += above
    below, beyond = ndtr(x[0]), ndtr(-x[-1])
    masses[0] += below
    masses[-1] += beyond
    return masses, beyond, below


def _bridge(chain: Chain, j: int) -> tuple[float, float, float]:
    """Of s_j given s_(j - 1) and s_0 = s_b: the weights of both in its mean, and its deviation."""
    b, v, r = chain.blocks, chain.v, chain.r
    left = b - j  # steps from s_j to s_b
    line = v * (1 - r**b) / (1 + r**b)  # variance of the same process on a line
    whole = 1 - r ** (2 * left + 2)
    deviation = math.sqrt(line * (1 - r * r) * (1 - r ** (2 * left)) / whole)
    return r * (1 - r ** (2 * left)) / whole, r**left * (1 - r * r) / whole, deviation


def _step(
    chain: Chain, j: int, states: Floats, first: Floats, sums: Floats, held: Floats, falling: bool
) -> tuple[Floats, float]:
    """(first states, states, sums) masses after the step of the bridge from s_(j - 1) to s_j; what left the grid.

    Beyond the last state, where s > every state, all weights to come are at most e^s on average.
    """
    last, whence, deviation = _bridge(chain, j)
    means = last * states[:, None] + whence * first
    masses, above, below = _spread(means.ravel(), deviation, states, falling)
    weights = held.sum(2).T.ravel()
    if falling:
        gone = float(weights @ below)
    else:
        partial = (held @ sums).T.ravel()
        at = means.ravel() + deviation**2
        left = chain.b - j * chain.b // chain.blocks  # bins
        ahead = left * np.exp(at - deviation**2 / 2) * ndtr((at - states[-1]) / deviation)
        gone = float(partial @ above + weights @ ahead) / chain.b
    by_first = np.ascontiguousarray(masses.reshape(len(states), *means.shape).transpose(2, 0, 1))  # (first, to, from)
    return by_first @ held, gone


def _additions(
    logs: Floats, chain: Chain, size: int, sums: Floats, coarse: float = 1.0
) -> list[tuple[sparse.csr_array, Floats]]:
    """For each state, the matrix of sum -> sum + e^log (xi_1 + .. + xi_size), and what goes beyond the grid's end."""
    factors, masses, tail = _block_factor(chain, size, (4.0 if len(logs) == 1 else 1.0) / coarse)
    found = []
    for log in logs:
        weight = size * math.exp(log)
        target = sums[:, None] + weight * factors
        cell, share = _between_points(target, sums)
        source = np.broadcast_to(np.arange(len(sums))[:, None], cell.shape).ravel()
        weights = np.concatenate([((1 - share) * masses).ravel(), (share * masses).ravel()])
        entries = (np.concatenate([cell.ravel(), cell.ravel() + 1]), np.concatenate([source, source]))
        matrix = sparse.coo_array((weights, entries), shape=(len(sums), len(sums))).tocsr()
        matrix.eliminate_zeros()
        found.append((matrix, np.maximum(target - sums[-1], 0.0) @ masses + weight * tail))
    return found


def _between_points(at: Floats, grid: Floats) -> tuple[NDArray[np.int64], Floats]:
    """(the point of the grid below, the share of a mass that goes to the one above so that its mean stays)."""
    cell = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
    return cell, np.clip((at - grid[cell]) / (grid[cell + 1] - grid[cell]), 0.0, 1.0)


def _block_factor(chain: Chain, size: int, finer: float) -> tuple[Floats, Floats, float]:
    """(values, masses, mean beyond them) of a block's mean of factors, spread about its mean, on 0 and a grid."""
    nu, within = chain.nu, chain.within
    if size == 1 or nu == 0:
        return _lognormal(nu + within, finer)
    atoms = times_lognormal(nth_power(lognormal(nu, _POINTS), size, _POINTS), within, _POINTS)
    deviation = math.sqrt(within + math.log1p(math.expm1(nu) / size))
    gap = min(_GAP_FACTOR, deviation / 2) / finer
    held = atoms.masses * np.maximum(atoms.points, 1.0) > _NOTHING
    low, high = atoms.points[held & (atoms.points > 0)][[0, -1]]
    values: Floats = np.append(0.0, low * np.exp(np.arange(0.0, math.log(high / low) + gap, gap)))
    points = np.minimum(atoms.points, values[-1])
    cell, share = _between_points(points, values)
    masses = np.zeros(len(values))
    masses += np.bincount(cell, atoms.masses * (1 - share), len(values))
    masses += np.bincount(cell + 1, atoms.masses * share, len(values))
    return values, masses, atoms.lost + float((atoms.points - points) @ atoms.masses)


def _lognormal(nu: float, finer: float) -> tuple[Floats, Floats, float]:
    """(values, masses, mean beyond them) of exp(N(-nu/2, nu)) spread about its mean, on 0 and a grid."""
    if nu == 0:
        return np.ones(1), np.ones(1), 0.0
    deviation = math.sqrt(nu)
    gap = min(_GAP_FACTOR, deviation / 2) / finer
    values = np.exp(np.arange(-nu / 2 - _FAR * deviation, nu / 2 + _FAR * deviation + gap, gap))
    inner = np.log(values) / deviation - deviation / 2  # E (xi - y)_+ = ndtr(-inner) - y ndtr(-inner - deviation)
    calls = ndtr(-inner) - values * ndtr(-inner - deviation)
    puts = values * ndtr(inner + deviation) - ndtr(inner)
    values, calls, puts = (np.concatenate([[start], part]) for start, part in ((0, values), (1, calls), (0, puts)))
    gaps = np.diff(values)
    slopes = np.concatenate([[-1.0], np.diff(calls) / gaps, [0.0]])
    rises = np.concatenate([[0.0], np.diff(puts) / gaps, [1.0]])
    masses = np.where(values > 1, np.diff(slopes), np.diff(rises))
    return values, np.maximum(masses, 0.0), float(calls[-1])


# ----------------------------------------------------------------------------------------------------
# Nested covariances above a Gram matrix, and the law of L of those: bins are leaves of a tree, of any shape.
#
#     K'_ij = height of the least node above both leaves i and j;   K'_jj = height of leaf j;   heights rise to the
#     leaves
#
# Each node has a factor e^X of its own, X ~ N(-g / 2, g), g its height less that of its parent, so L of a node is this
# factor times the mean of the L of its children, which are independent: sums and products of independent laws, each
# spread about its mean (`lognormals`), from the leaves up. The height of the root is a constant part of K'.
#
# Of all K' of this form above K in every entry there is a least one: the largest, over all paths from i to j, of the
# least entry on the path [single linkage]. Exact for a diagonal and a constant beside it, and for Gram matrices of
# trees.


Node = tuple[int, tuple[Any, ...]]  # its level; of what is below it, (node, how often); nothing for a leaf

_LEVELS = 48  # of heights, where there are more
_SAME = 1e-7  # of the largest, between two heights
_NESTED_ROUND = 1e-10  # of sums and products of positive terms


@final
@dataclass(frozen=True)
class Nested:
    """The heights of levels, ascending, and the root."""

    b: int
    heights: tuple[float, ...]
    root: Node

    @property
    def constant(self) -> float:
        """The part that all entries share."""
        return self.heights[self.root[0]]


def nested_above(k: Floats) -> Nested:
    """The least nested matrix above k in every entry, heights rounded up to at most some 50.

    Cost: O(b^2).
    """
    b = len(k)
    heights = np.unique(k)
    heights = heights[np.append(np.diff(heights) > _SAME * heights[-1], True)]  # else differences lose their digits
    if len(heights) > _LEVELS:
        steps = np.linspace(heights[0], heights[-1], _LEVELS)
        heights = np.append(steps[:-1], heights[-1])
    levels = np.searchsorted(heights, k)  # the first height not below
    nodes: list[tuple[int, list[Node]]] = [(int(levels[j, j]), []) for j in range(b)]
    if b > 1:
        top = len(heights)
        for left, right, distance, _ in scipy.cluster.hierarchy.linkage(
            scipy.spatial.distance.squareform(top - levels, checks=False), "single"
        ):
            level = top - round(distance)
            below = [node for side in (left, right) for node in _below(nodes[int(side)], level)]
            nodes.append((level, below))
    return Nested(b, tuple(heights.tolist()), _closed(nodes[-1], 0))


def _below(node: tuple[int, list[Node]], level: int) -> list[Node]:
    """What a node gives to one of this level above it: what is below it if it is of the same level, else itself."""
    return node[1] if node[1] and node[0] == level else [_closed(node, level)]


def _closed(node: tuple[int, list[Node]], least: int) -> Node:
    """In one form, so that equal nodes are equal; a leaf is no lower than its parent."""
    level, below = node
    return max(level, least), tuple(sorted(Counter(below).items()))


def nested_law(nested: Nested, *, falling: bool = False, coarse: float = 1.0) -> ChainLaw:
    """The law of L of a nested matrix without its constant part: for both directions, but for what lies beyond.

    Args:
        coarse: how many times as wide gaps of chains are that this is as near as; on the safe side whatever it is.
    Cost: some 0.02 s for each unlike node.
    """
    if not nested.root[1]:
        return ChainLaw(np.ones(1), np.ones(1), 0.0)
    atoms = _nested_atoms(nested, coarse)
    masses = atoms.masses * (1 + _NESTED_ROUND)
    return ChainLaw(atoms.points, masses, 0.0 if falling else atoms.lost * (1 + _NESTED_ROUND) + 1e-20)


@lru_cache(maxsize=4)  # the other direction asks for the same
def _nested_atoms(nested: Nested, coarse: float) -> Atoms:
    points = round(_POINTS / coarse**1.5)
    laws: dict[tuple[Node, int], tuple[int, Atoms]] = {}

    def law(node: Node, parent: int) -> tuple[int, Atoms]:
        """(number of leaves, law)."""
        if (node, parent) not in laws:
            g = nested.heights[node[0]] - nested.heights[parent]
            if node[1]:
                leaves, mean = average(node)
                laws[node, parent] = leaves, times_lognormal(mean, g, points)
            else:
                laws[node, parent] = 1, lognormal(g, points)
        return laws[node, parent]

    def average(node: Node) -> tuple[int, Atoms]:
        found: tuple[int, Atoms] | None = None
        for child, count in node[1]:
            leaves, one = law(child, node[0])
            constant = len(one.points) == 2  # leaves no higher than this node: their mean is 1
            part = leaves * count, one if constant else nth_power(one, count, points)
            found = part if found is None else together(found, part, points)
        assert found is not None
        return found

    return average(nested.root)[1]


# ----------------------------------------------------------------------------------------------------
# Chains whose covariances dominate a Gram matrix: entry by entry (Kahane), or as a quadratic form (Jensen), or a sum.
#
# If K' = K + E + P with E >= 0 in every entry and P positive semidefinite, then delta of K is at most that of K': by
# the theorem of `mixture` for E, and for P since x' = x + p with an independent p has E [L' | x] = L. Both at once
# reach much further than either: a kernel without a tail is below one with a tail of about the same integral.


_BLOCKS = 48  # from which on bins may share a state with their neighbours
_WITHIN = 0.15  # by how much the states of a block, were they apart, may fall off: v times their share of a length
_LENGTHS = 12  # of correlation that are tried
_SHARES = (0.0, 0.5, 1.0)  # of the way from the mean of a diagonal of k to its largest entry
_PRICES = (1.0, 2.0)  # powers of e^k by which a chain is chosen: of more, the diagonal counts more, as at large epsilon
_CHEAPER = 1.05  # times, above the matrix itself, that a chain of the second price must be by its own price
_PROJECTIONS = 15  # for the entries, each an eigendecomposition
_HALVINGS = 5  # of what the diagonal is given before
_SAFE = 1e-7  # of the largest entry, added to the diagonal for what a linear programme leaves open


def dominating_chains(k: Floats) -> list[Chain]:
    """A few chains above a covariance matrix k (b, b); none of fewer than four bins or of independent ones.

    The means over blocks of bins are first made circulant, by the largest entries of diagonals or less; of each
    correlation length the weights of constant, chain and diagonal are found by a linear programme, of least mean of
    e^k, linearised, the second moment of L; or of e^(2 k), nearer to what the tail of L costs. What a matrix that is
    less leaves open, the diagonal makes up for.
    """
    b = len(k)
    if b < 4 or (k - np.diag(np.diag(k))).max() == 0:
        return []
    each = max(1, b // _BLOCKS)
    found = _of_blocks(k, -(-b // each))
    fewer = min([each, *(_bins_of_a_state(chain) for chain in found)])
    return found if fewer == each else _of_blocks(k, -(-b // fewer))


def _bins_of_a_state(chain: Chain) -> int:
    """How many bins may share a state at little cost."""
    length = -chain.b / chain.blocks / math.log(chain.r)  # of correlation, in bins
    return max(1, int(min(_WITHIN * length / max(chain.v, 1e-9), chain.b)))


def _of_blocks(k: Floats, blocks: int) -> list[Chain]:
    """`dominating_chains` of so many blocks."""
    b = len(k)
    means = _block_means(k, blocks)
    middle, row = _mean_circulant(means), _circulant(means)
    shares = _SHARES if blocks == b else _SHARES[1:]  # of blocks the mean itself was raised most
    kept: list[Chain] = []
    first = None
    for power in _PRICES:
        last = _cheapest(row, power)
        if last is None or (first is not None and not _is_cheaper(last, first, row, power)):
            continue
        first = last
        solved = [_cheapest(middle + share * (row - middle), power) for share in shares[:-1]]
        tried = []
        for share, chain in zip(shares, [*solved, last], strict=True):
            if chain is not None:
                above = share == 1 and blocks == b
                found = [chain] if above else [_raised(one, k) for one in _of_bins(chain, k)]
                tried.append(min(found, key=lambda one: _moment(one, power)))
        # no moment says which is best at a small delta: beside the least, that of the largest entries is tried
        kept += [min(tried, key=lambda one: _moment(one, power)), tried[-1]]
    return list(dict.fromkeys(kept))


def _cheapest(row: Floats, power: float) -> Chain | None:
    """Of all lengths of correlation, the chain of least price above a circulant matrix."""
    fits = [_programme(row, math.exp(-1 / x), power) for x in np.geomspace(0.7, 2 * len(row), _LENGTHS)]
    solved = [fit for fit in fits if fit is not None]
    return min(solved, key=lambda fit: fit[0])[1] if solved else None


def _is_cheaper(chain: Chain, other: Chain, row: Floats, power: float) -> bool:
    """Whether a moment is so much nearer to that of the circulant matrix below both that the chain is worth its law."""
    least = len(row) * float(np.exp(np.minimum(power * row, 50.0)).sum())
    return _CHEAPER * (_moment(chain, power) - least) < _moment(other, power) - least


def _block_means(k: Floats, blocks: int) -> Floats:
    """(blocks, blocks) means of k over neighbouring bins."""
    starts, sizes = block_starts(len(k), blocks), block_sizes(len(k), blocks)
    return np.asarray(np.add.reduceat(np.add.reduceat(k, starts, 0), starts, 1) / np.outer(sizes, sizes))


def _of_bins(chain: Chain, k: Floats) -> list[Chain]:
    """A chain of blocks as one of their bins: what each block has of its own is its bins' own, or as much as in k."""
    b, each = len(k), len(k) / chain.b
    if each == 1:
        return [chain]
    block = np.repeat(np.arange(chain.b), block_sizes(b, chain.b))
    near = (block[:, None] == block) & ~np.eye(b, dtype=bool)
    own = max(0.0, float(k.diagonal().mean() - k[near].mean()))
    within = max(0.0, chain.nu - own / each)
    return [replace(chain, b=b, nu=chain.nu * each), replace(chain, b=b, nu=own, within=within)]


def _moment(chain: Chain, power: float) -> float:
    return float(np.exp(np.minimum(power * _matrix(chain), 50.0)).sum())


def _matrix(chain: Chain) -> Floats:
    """(b, b) K'."""
    kernel = chain.constant + chain.v * ring(chain.blocks, chain.r)
    kernel[0] += chain.within
    block = np.repeat(np.arange(chain.blocks), block_sizes(chain.b, chain.blocks))
    return np.asarray(kernel[np.abs(np.subtract.outer(block, block))] + chain.nu * np.eye(chain.b))


def _raised(chain: Chain, k: Floats) -> Chain:
    """The chain with a diagonal so much larger that it dominates k: entries by alternate projections, then the form."""
    rest = _matrix(chain) - k
    best = tried = _short(rest)
    for _ in range(_HALVINGS):
        tried /= 2
        found = tried + _short(rest + tried * np.eye(len(k)))
        if found > best and tried < best / 2:
            break
        best = min(best, found)
    return replace(chain, nu=chain.nu + best + _SAFE * float(k.max()))


def _short(rest: Floats) -> float:
    """By how much, at most, the diagonal must rise for entries of no negative sign and a form that add up to `rest`."""
    entries, least = np.zeros_like(rest), -math.inf
    for _ in range(_PROJECTIONS):
        values, vectors = np.linalg.eigh(rest - entries)
        least = max(least, float(values[0]))
        entries = np.maximum(rest - (vectors * np.maximum(values, 0.0)) @ vectors.T, 0.0)
    return max(0.0, -least)


def _mean_circulant(k: Floats) -> Floats:
    """(b,) the first row of the symmetric circulant matrix nearest to k."""
    b = len(k)
    distance = np.subtract.outer(np.arange(b), np.arange(b)) % b
    row = np.bincount(distance.ravel(), k.ravel(), b) / b
    return np.asarray((row + row[-np.arange(b)]) / 2)


def _circulant(k: Floats) -> Floats:
    """(b,) the least symmetric circulant matrix above k, entry by entry: its first row."""
    b = len(k)
    distance = np.subtract.outer(np.arange(b), np.arange(b)) % b
    row = np.zeros(b)
    np.maximum.at(row, distance.ravel(), k.ravel())
    return np.maximum(row, row[-np.arange(b)])


def _programme(row: Floats, r: float, power: float) -> tuple[float, Chain] | None:
    """(its price, the cheapest chain of this r above a circulant matrix), an entry's price being e^(power row)."""
    b = len(row)
    d = np.arange(b)
    near = np.minimum(d, b - d)
    kernel = ring(b, r)
    half = b // 2 + 1
    parts = np.stack([np.ones(b), (d == 0) * 1.0, kernel], axis=1)
    waves = np.cos(2 * np.pi * np.outer(np.arange(half), d) / b)
    entries = np.zeros((b, half))
    entries[d, near] = 1.0
    price = np.exp(np.minimum(power * row, 50.0)) @ parts
    answer = scipy.optimize.linprog(
        np.concatenate([price, np.zeros(half)]),
        A_ub=-waves @ np.concatenate([parts, -entries], axis=1),
        b_ub=-waves @ row,
        bounds=(0, None),
        method="highs",
    )
    if answer.status != 0 or not np.isfinite(answer.x).all():
        return None
    constant, nu, v, *extra = np.maximum(answer.x, 0.0)
    # whatever the solver returned, the diagonal makes up for the least eigenvalue of what must be semidefinite
    rest = constant + nu * (d == 0) + v * kernel - row - np.array(extra)[near]
    short = max(0.0, -float((waves @ rest).min())) + _SAFE * float(row[0])
    return float(answer.fun), Chain(b, float(constant), float(nu) + short, float(v), r, b)


_LARGEST = 60.0  # of the diagonal of K: beyond, losses of some hundred, only the Gaussian is tried
_MOST_MU = 1e100  # mu of all bins known: above, K is no finite number
COARSE = 2.0  # gaps of grids that tell in general which K' and direction do not count: those bounds hold too
_FINER = {Nested: 1.5, Chain: 5.0}  # a delta on coarse grids, beside the least, that a fine one may yet undercut
_NEAR = 0.1  # of epsilon, between both grids
_DELTA_ROUND = 1e-9  # relative, of all sums of positive terms; and
_FLOOR = 1e-13  # what a difference of two terms of order 1 may lose


def bins_delta(gram: Floats, sigma: float, epsilon: float) -> float:
    """The larger delta(epsilon) of both directions, at or above the true one.

    Args:
        gram: (b, b) of `bins_gram`, no entry below 0.
        sigma: noise multiplier.
        epsilon: any real number.
    Guarantee: never below the truth. Neighbours: add-or-remove, zero-out.
    Cost: some seconds for the first epsilon of a matrix at b = 100, next to nothing for the next ones.
    Raises: ArgumentError.
    """
    return _larger(*scaled(gram, sigma), checks.real("epsilon", epsilon))


def bins_epsilon(gram: Floats, sigma: float, delta: float) -> float:
    """The least epsilon >= 0 with `bins_delta` <= delta, rounded up.

    Args, Raises, Guarantee: those of `bins_delta`; delta strictly between 0 and 1.
    Returns: epsilon; inf never: that of the Gaussian whose bins are known is one.
    """
    delta = checks.probability("delta", delta)
    k, mu = scaled(gram, sigma)
    known = gdp_epsilon(mu, delta) if mu else 0.0
    # from above, where most K' and the second direction hardly count, and no fine law of theirs is needed
    high, rough = known, least_epsilon(lambda epsilon: coarsely(k, mu, epsilon), delta, known)
    if rough < known and _larger(k, mu, rough) <= delta:
        high = rough
    step = _NEAR * rough
    while high > step and _larger(k, mu, high - step) <= delta:
        high -= step
    return least_epsilon(lambda epsilon: _larger(k, mu, epsilon), delta, high, max(high - step, 0.0))


def least_epsilon(at: Callable[[float], float], delta: float, high: float, low: float = 0.0) -> float:
    """The least epsilon of a curve of delta, rounded up to 1e-9 of it, where `high` holds, and it is above `low`."""
    return bisect(lambda epsilon: at(epsilon) <= delta, inside=high, outside=low, relative=1e-9, steps=60)


def bins_losses(pld: Any, gram: Floats, sigma: float, h: float, every: int = 1) -> Any:
    """The loss distribution of dp-accounting for both directions, pessimistic, on a grid of interval h.

    Args:
        pld: the module dp_accounting.pld.privacy_loss_distribution.
        gram, sigma: those of `bins_delta`.
        h: interval of losses, above 0.
        every: losses are at every so many points of this grid alone, which is as good as a coarser grid.
    """
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots

    k, mu = scaled(gram, sigma)
    h = checks.positive("h", h)
    reach = min(mu * mu / 2 + 10 * mu, 600.0)
    ends = math.ceil(reach / h / checks.integer("every", every, low=1))
    points = np.arange(-ends, ends + 1) * every
    at = np.asarray(points * h, dtype=np.float64)
    both = _curve(k, mu, at)
    found = []
    for deltas in both:
        rounded, kept = _convex(np.exp(at), deltas)
        found.append(create_pmf_pessimistic_connect_dots(h, points[kept], rounded[kept]))
    return pld.PrivacyLossDistribution(*found)


def scaled(gram: Floats, sigma: float) -> tuple[Floats, float]:
    """(K, mu of a Gaussian above it), of a Gram matrix and a noise multiplier. Raises: ArgumentError."""
    gram = np.asarray(gram, dtype=np.float64)
    sigma = checks.positive("sigma", sigma)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or not gram.size:
        raise ArgumentError(f"gram must be a square matrix of one row or more, got shape {gram.shape}")
    if not np.isfinite(gram).all() or gram.min() < 0 or not np.allclose(gram, gram.T, rtol=1e-9, atol=0):
        raise ArgumentError("gram must be symmetric, finite and have no entry below 0: see bins_gram")
    mu = math.sqrt(float(gram.max())) / sigma * (1 + 2.0**-50)  # of gram, as K is 0 where sigma is very large
    if mu > _MOST_MU:
        raise ArgumentError(f"sigma must be at least {_MOST_MU**-1:g} of the largest ||C pi||, got {sigma!r}")
    return np.maximum(gram, gram.T) / sigma / sigma * (1 + 2.0**-50), mu


def _curve(k: Floats, mu: float, epsilons: Floats) -> Floats:
    """(2, m) delta of both directions at each epsilon: the least over all K'."""
    gaussian = np.array([_gaussian(mu, float(e)) for e in epsilons])
    found = np.stack([gaussian, gaussian])
    for chain in dominating(k, mu):
        for row, falling in enumerate((False, True)):
            found[row] = np.minimum(found[row], _deltas_above(chain, epsilons, falling, 1.0))
    return found


def _larger(k: Floats, mu: float, epsilon: float) -> float:
    """The larger of both directions at one epsilon; the laws of the second only as far as they count."""
    ranked = sorted(
        ((delta_above(one, epsilon, falling=False, coarse=COARSE), i, one) for i, one in enumerate(dominating(k, mu))),
        key=lambda found: found[:2],
    )
    rising = falling = _gaussian(mu, epsilon)
    rising = min([rising, *(delta for delta, _, _ in ranked[:1])])
    for delta, _, one in ranked:
        if delta <= _FINER[type(one)] * rising:
            rising = min(rising, delta_above(one, epsilon, falling=False))
    for coarse in (COARSE, 1.0):
        for _, _, one in ranked:
            if falling > rising:
                falling = min(falling, delta_above(one, epsilon, falling=True, coarse=coarse))
    return max(rising, falling)


def coarsely(k: Floats, mu: float, epsilon: float) -> float:
    """With against without, on coarse grids."""
    return min(
        [_gaussian(mu, epsilon), *(delta_above(x, epsilon, falling=False, coarse=COARSE) for x in dominating(k, mu))]
    )


def _gaussian(mu: float, epsilon: float) -> float:
    """Delta of one Gaussian, at a negative epsilon by its symmetry: E (L - t)_+ = 1 - t + t E (L - 1/t)_+."""
    delta = gdp_delta(mu, abs(epsilon)) if mu else 0.0
    return delta if epsilon >= 0 else min(1.0, (-math.expm1(epsilon) + math.exp(epsilon) * delta) * (1 + 2.0**-50))


def dominating(k: Floats, mu: float) -> tuple[Nested | Chain, ...]:
    """The K' that are tried, those whose laws cost least first."""
    return _dominating(k.shape[0], k.tobytes(), mu)


@lru_cache(maxsize=4)
def _dominating(b: int, data: bytes, mu: float) -> tuple[Nested | Chain, ...]:
    if not 1e-6 < mu * mu < _LARGEST:
        return ()
    k = np.frombuffer(data).reshape(b, b)
    return nested_above(k), *(chain for chain in dominating_chains(k) if chain.own < 2 * _LARGEST)


@lru_cache(maxsize=32)
def _law(one: Nested | Chain, falling: bool, coarse: float) -> ChainLaw:
    match one:
        case Nested():
            return nested_law(one, falling=falling, coarse=coarse)
        case Chain():
            return chain_law(one, falling=falling, coarse=coarse)
        case _:
            assert_never(one)


def delta_above(one: Nested | Chain, epsilon: float, *, falling: bool, coarse: float = 1.0) -> float:
    """Of one direction, for one K': of the product of its own L with an independent Gaussian factor."""
    return float(_deltas_above(one, np.array([epsilon]), falling, coarse)[0])


def _deltas_above(one: Nested | Chain, epsilons: Floats, falling: bool, coarse: float) -> Floats:
    """The same at each epsilon."""
    law, at = _law(one, falling, coarse), _put if falling else _call
    parts = np.array_split(epsilons, 1 + len(epsilons) * len(law.values) // _AT_ONCE)
    found = np.concatenate([at(law.values, part[:, None], one.constant) @ law.masses for part in parts])
    return np.minimum(1.0, (found + law.beyond) * (1 + _DELTA_ROUND) + _FLOOR)


def _call(values: Floats, epsilon: Floats, c: float) -> Floats:
    """E (value e^y - e^epsilon)_+ for y ~ N(-c / 2, c)."""
    t = np.exp(np.minimum(epsilon, 700.0))  # at a larger epsilon this is above
    if c == 0:
        return np.asarray(np.maximum(values - t, 0.0))
    above = _distance(values, epsilon, c)
    found = values * ndtr(above + math.sqrt(c) / 2) - t * ndtr(above - math.sqrt(c) / 2)
    return np.where(values > 0, np.maximum(found, 0.0), 0.0)


def _put(values: Floats, epsilon: Floats, c: float) -> Floats:
    """E (1 - e^epsilon value e^y)_+ for y ~ N(-c / 2, c)."""
    t = np.exp(np.minimum(epsilon, 700.0))
    if c == 0:
        return np.asarray(np.maximum(1 - t * values, 0.0))
    above = _distance(values, -epsilon, c)
    found = ndtr(-above + math.sqrt(c) / 2) - t * values * ndtr(-above - math.sqrt(c) / 2)
    return np.where(values > 0, np.maximum(found, 0.0), 1.0)


def _distance(values: Floats, epsilon: Floats, c: float) -> Floats:
    with np.errstate(divide="ignore"):
        return np.asarray((np.log(values) - epsilon) / math.sqrt(c))


def _convex(ts: Floats, deltas: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The greatest convex function of e^epsilon below these points: still above the true one, which is convex."""
    kept: list[int] = []
    for i in range(len(ts)):
        while len(kept) > 1:
            a, m = kept[-2], kept[-1]
            if (deltas[m] - deltas[a]) * (ts[i] - ts[a]) < (deltas[i] - deltas[a]) * (ts[m] - ts[a]):
                break
            kept.pop()
        kept.append(i)
    index = np.array(kept)
    return np.interp(ts, ts[index], deltas[index]), index


# ----------------------------------------------------------------------------------------------------
# What `bins_epsilon` comes to, for searches over sigma: quickly, or by the one K' that counts. Nothing claims it.


def rough_epsilon(gram: Floats, sigma: float, delta: float) -> float:
    """Epsilon at delta of with against without, on coarse grids: a tenth of the work, and some percent more."""
    return _best(gram, sigma, delta)[0]


def likely_epsilon(gram: Floats, sigma: float, delta: float) -> float:
    """Epsilon at delta of with against without, by the K' that is the least on coarse grids: in general the claim's."""
    rough, above = _best(gram, sigma, delta)
    return rough if above is None else min(rough, _of(above, delta, rough, 1.0))


def _best(gram: Floats, sigma: float, delta: float) -> tuple[float, Nested | Chain | None]:
    """(epsilon, its K'); None for that of a Gaussian."""
    k, mu = scaled(gram, sigma)
    least, found = gdp_epsilon(mu, delta) if mu else 0.0, None
    for above in dominating(k, mu):
        epsilon = _of(above, delta, least, COARSE)
        if epsilon < least:
            least, found = epsilon, above
    return least, found


def _of(above: Nested | Chain, delta: float, high: float, coarse: float) -> float:
    """Epsilon at delta by one K'; `high` where it is more."""

    def at(epsilon: float) -> float:
        return delta_above(above, epsilon, falling=False, coarse=coarse)

    return least_epsilon(at, delta, high) if at(high) <= delta else high


_LOUDEST = 60.0  # mu^2 of a bin, above which nothing is won by bins
_FINE = 100.0  # points of the grid of bins in the mu of a bin: each takes a sum over the law


def gram_composition(pld: Any, grams: list[tuple[Floats, int]], sigma: float, h: float) -> Any:
    """`bins_losses` of draws of bins with these Gram matrices, each so many times; None where bins hide nothing.

    Bins are put on every so many points of the grid, which is no less pessimistic.
    """
    mu = math.sqrt(max(float(gram.max()) for gram, _ in grams)) / sigma
    if not 1e-6 < mu * mu < _LOUDEST:
        return None
    every = max(1, math.ceil(min(mu / _FINE, 0.1) / h))
    parts = [bins_losses(pld, gram, sigma, h, every).self_compose(count) for gram, count in grams]
    return reduce(lambda one, other: one.compose(other), parts)
