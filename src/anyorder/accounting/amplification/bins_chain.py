"""The law of a mean of lognormals driven by a Gaussian chain on a circle, by dynamic programming, on the safe side.

    L = 1/b sum_j exp(s_j - v/2) xi_j,   xi_j = exp(N(-nu/2, nu)) independent,
    cov(s_i, s_j) = v (r^d + r^(b - d)) / (1 + r^b)

with d = |i - j|: the Ornstein-Uhlenbeck process on a circle. Given s_0 the others are a bridge, a Markov chain, and the
law of (s_j, partial sum) is carried from bin to bin for each s_0. Every law that is put on a grid is spread about its
mean, and this can only raise E phi(L) for a convex phi (docs/amplification.md): a partial sum and a factor xi always;
a state s of the chain where phi rises too, as what follows is a + sum_i c_i e^(a_i s), 0 <= a_i <= 1, convex in s; and
where phi falls e^s is spread about its mean, in which the same is concave. What leaves the grid is counted in full.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import ndtr

from anyorder._closed import final
from anyorder.accounting.amplification.lognormals import between, lognormal, power, times_lognormal

__all__ = ["Chain", "Law", "chain_law"]

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
class Law:
    """Atoms (value, mass under Q) of L, and what lies beyond, for one direction.

    rising:  E (L - t)_+ <= sum mass (value - t)_+ + beyond
    falling: E (1 - t L)_+ <= sum mass (1 - t value)_+ + beyond
    """

    values: Floats
    masses: Floats
    beyond: float


def chain_law(chain: Chain, *, falling: bool = False, coarse: float = 1.0) -> Law:
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
    return Law(sums / b, held.sum((0, 1)), beyond)


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
    atoms = times_lognormal(power(lognormal(nu, _POINTS), size, _POINTS), within, _POINTS)
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
