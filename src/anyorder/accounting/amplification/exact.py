"""Loss distributions of secret orders where they are known: cyclic and truncated Poisson, bins of orthogonal means.

sigma = noise std / clip norm throughout. Every epsilon and delta here is at or above the true one; the grids behind
them are redrawn for each sigma, so that they fall in sigma up to about 1e-3 of themselves.

**Cyclic Poisson.** The columns of one group's steps do not overlap, so that the steps of a unit are ceil(n / cycle)
sampled Gaussians of deviation sigma / max_t |C e_t| [Choquette-Choo et al. 2023]; directions may depend on what came.

**Truncated Poisson** [dp-accounting, `TruncatedSubsampledGaussianDpEvent`; arXiv 2508.15089]. Batches of at most B of
the N units of a group. Let r be the number of others that were drawn, r ~ Bin(N - 1, q).

    r < B    nobody is cut: the Gaussian sampled with q, of sensitivity 1.
    r >= B   the batch is a uniform B of the others, V, or with probability p the unit and a uniform B - 1 of them, U;
             p = P(unit stays | r >= B), and neither law depends on r. Take U as V less a uniform member v: then

                 with the unit     (1 - p) N(U + v) + p N(U + x)
                 without it        (1 - p) N(U + v) + p N(U)

             Seen from U + v its two parts are the vectors x - v and -v, of norm at most 2 and 1; the pair of +2 and
             -2 with probability p in both dominates ("replace-one" at half of sigma; loose, but what is known).

To tell which case it is can only help: the mixture of both pairs, joint convexity. It rests on these: the choice of
who stays is uniform and secret, as the draws are; N counts all units of the group and is public; without the unit its
place is kept, with zero for its gradient (zero-out). A group's size may be one more than another's, and neither is
always worse: the larger delta of both is taken. With draws that are known a unit moves the sums by its own gradients
alone, so that mu = sqrt(steps) / sigma holds too.

**Orthogonal means.** See `lognormals`; k epochs of allocation anew are k such ratios, composed.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtrc, ndtr, ndtri

from anyorder import checks
from anyorder._numerics import bisect
from anyorder.accounting.amplification.mixture import check_fits, reach
from anyorder.accounting.amplification.secret_order import AmplifiedOrder
from anyorder.accounting.gaussian import gdp_delta, gdp_epsilon
from anyorder.accounting.poisson import replaced_gaussian, sampled_gaussian, step_interval
from anyorder.checks import final
from anyorder.errors import ArgumentError, PlanError
from anyorder.strategy import Strategy

# ----------------------------------------------------------------------------------------------------
# The law of a mean of independent lognormals: the likelihood ratio of secret bins whose means are orthogonal.
#
# For a diagonal Gram matrix G the ratio of the dominating pair of `mixture` is, without the unit,
#
#     L = sum_j w_j e^{X_j},   X_j ~ N(-g_j / 2, g_j) independent,   g_j = G_jj / sigma^2,   E L = 1
#
# [for C = I: Feldman, Shenfeld 2026], and both hockey sticks are means of convex functions of L:
#
#     with against without: E (L - e^eps)_+;      without against with: E (1 - e^eps L)_+
#
# **Never below.** An atom of a law on [0, inf) between two points of a grid is split among them so that its mean stays.
# That is a mean-preserving spread, so E phi rises for every convex phi. It stays one under the sums: if L1' is a spread
# of L1 and L2' of L2, independent, then E[a L1' + b L2' | L1, L2] = a L1 + b L2 for a fitting coupling, and Jensen's
# inequality does the rest. Mass above the grid is put at 0, and its share T of the mean noted as lost: for L = L' + T,
#
#     (L - K)_+ <= (L' - K)_+ + T,     (1 - K L)_+ <= (1 - K L')_+,     so E (L - K)_+ <= E (L' - K)_+ + lost
#
# Every sum here is one of positive numbers, no transform takes part and nothing cancels: what comes out is off by a
# relative rounding alone, tails as well as the body, and that is added.
#
# A larger g_j never lowers delta (the theorem of `mixture`), so many unlike g_j may be rounded up to a few.


Floats = NDArray[np.float64]

LARGEST = 200.0  # variance of a logarithm; above it products of masses near the smallest float
_FAR = 9.5  # deviations that a grid covers: beyond has mass 1e-21
_KINDS = 12  # different variances that are kept apart
_SMOOTH = 0.3  # deviations over which a grid is smoothed
# The rule of Gauss and Legendre with 6 nodes, written down as in `anyorder.accounting.gaussian`.
_UPPER_NODES = np.array([0.2386191860831969, 0.6612093864662645, 0.9324695142031519])
_UPPER_WEIGHTS = np.array([0.46791393457269104, 0.3607615730481387, 0.17132449237917027])
_NODES = np.concatenate([-_UPPER_NODES[::-1], _UPPER_NODES])
_WEIGHTS = np.concatenate([_UPPER_WEIGHTS[::-1], _UPPER_WEIGHTS])


@final
@dataclass(frozen=True)
class Ratio:
    """The law of a likelihood ratio on a grid, a spread of the true one.

    Attributes:
        points: (m,) ascending; the first is 0.
        masses: (m,) without the unit; with it they are points * masses.
        lost: of the mass with the unit, what lies above all points.
        rounding: relative, of every mass.
    """

    points: Floats
    masses: Floats
    lost: float
    rounding: float

    def remove(self, epsilon: float) -> float:
        """With the unit against without, never below the true one."""
        level = math.exp(min(epsilon, 700.0))
        above = self.points > level
        found = float(np.sum(self.masses[above] * (self.points[above] - level)))
        return min(1.0, found * (1 + self.rounding) + self.lost)

    def add(self, epsilon: float) -> float:
        """Without the unit against with it, never below the true one."""
        level = math.exp(min(epsilon, 700.0))
        below = self.points * level < 1
        return min(1.0, float(np.sum(self.masses[below] * (1 - level * self.points[below]))) * (1 + self.rounding))

    def deviation(self) -> float:
        """Of the loss, with the unit: of what is not in its far tails, a scale for grids."""
        held = self.points > 0
        masses, losses = (self.masses * self.points)[held], np.log(self.points[held])
        mean = float(np.sum(masses * losses) / masses.sum())
        return math.sqrt(float(np.sum(masses * np.square(losses - mean)) / masses.sum()))

    def losses(self, pld: Any, h: float) -> Any:
        """The loss distribution of dp-accounting on the grid h, both directions: one more spread, of both at once."""
        from dp_accounting.pld.pld_pmf import DensePLDPmf

        held = (self.points > 0) & (self.masses > 0)
        losses, without = np.log(self.points[held]), self.masses[held]
        cells = np.floor(losses / h).astype(np.int64)
        low, high = int(cells.min()), int(cells.max()) + 1
        # a share of the mass without the unit to the point above, so that both the mass and its mean stay
        share = np.clip(np.expm1(losses - cells * h) / math.expm1(h), 0.0, 1.0)
        spread = np.zeros(high - low + 1)
        spread += np.bincount(cells - low, without * (1 - share), len(spread))
        spread += np.bincount(cells - low + 1, without * share, len(spread))
        spread *= 1 + self.rounding
        unit = spread * np.exp(np.arange(low, high + 1) * h)
        remove = DensePLDPmf(h, low, unit, max(self.lost, 1 - float(unit.sum())), True)
        nothing = float(self.masses[self.points == 0].sum()) * (1 + self.rounding)
        add = DensePLDPmf(h, -high, spread[::-1].copy(), max(nothing, 1 - float(spread.sum())), True)
        return pld.PrivacyLossDistribution(remove, add)


def mean_of_lognormals(variances: Floats, points: int = 2000) -> Ratio:
    """The law of the mean of e^{X_j}, X_j ~ N(-g_j / 2, g_j) independent, as a spread on some 2000 points.

    Args:
        variances: (b,) the g_j, not negative, at most `LARGEST`.
        points: of each grid. The deviation of the mean grows by some (60 / points)^2 / 3 of itself at each sum.
    Cost: points^2 for each of at most 2 log2 b sums for each of at most 12 unlike variances; 2 to 3 s for b = 1000.
    """
    kinds, counts = _distinct_variances(np.sort(np.asarray(variances, dtype=np.float64)))
    found: tuple[int, Atoms] | None = None
    for kind, count in zip(kinds, counts, strict=True):
        one = nth_power(lognormal(float(kind), points), int(count), points)
        found = (int(count), one) if found is None else together(found, (int(count), one), points)
    assert found is not None
    total, law = found
    # each sum of positive terms may be off by the number of its terms, and the errors of its two parts add
    rounding = 8.0 * total * points * 2.0**-53 + 1e-12
    return Ratio(law.points, law.masses, law.lost * (1 + rounding) + 1e-20, rounding)


@final
@dataclass(frozen=True)
class Atoms:
    """A law on a grid from 0; `lost` of its mean lies above, where its mass is counted at 0."""

    points: Floats
    masses: Floats
    lost: float


def _distinct_variances(variances: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """At most `_KINDS` values, each the largest of its like, and how many each stands for."""
    kinds, counts = np.unique(variances, return_counts=True)
    if len(kinds) <= _KINDS:
        return kinds, counts
    edges = np.linspace(kinds[0], kinds[-1], _KINDS + 1)[1:]
    edges[-1] = kinds[-1]
    which = np.searchsorted(edges, variances)
    present = np.unique(which)
    return (
        np.array([variances[which == kind].max() for kind in present]),
        np.array([int((which == kind).sum()) for kind in present]),
    )


def lognormal(g: float, points: int) -> Atoms:
    """e^X, X ~ N(-g / 2, g), spread."""
    if g == 0:
        return Atoms(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 0.0)
    s = math.sqrt(g)
    edges = np.linspace(-g / 2 - _FAR * s, g / 2 + _FAR * s, points - 1)  # of the logarithm
    half = np.diff(edges)[:, None] / 2
    x = edges[:-1, None] + half * (1 + _NODES)
    density = half * _WEIGHTS * np.exp(-np.square(x + g / 2) / (2 * g)) / (s * math.sqrt(2 * math.pi))
    above = np.expm1(x - edges[:-1, None]) / np.expm1(2 * half)
    masses = np.zeros(points)
    masses[1:-1] += (density * (1 - above)).sum(axis=1)
    masses[2:] += (density * above).sum(axis=1)
    grid = np.concatenate([[0.0], np.exp(edges)])
    low, mean_low = float(ndtr((edges[0] + g / 2) / s)), float(ndtr((edges[0] - g / 2) / s))
    masses[1] += mean_low / grid[1]
    masses[0] += max(low - mean_low / grid[1], 0.0) + float(ndtr(-(edges[-1] + g / 2) / s))
    return Atoms(grid, masses, float(ndtr(-(edges[-1] - g / 2) / s)))


def nth_power(one: Atoms, count: int, points: int) -> Atoms:
    """The mean of `count` of them, by halves."""
    found, square, left = None, (1, one), count
    while True:
        if left & 1:
            found = square if found is None else together(found, square, points)
        left >>= 1
        if not left:
            return found[1] if found is not None else one
        square = together(square, square, points)


def together(first: tuple[int, Atoms], second: tuple[int, Atoms], points: int) -> tuple[int, Atoms]:
    """The mean of both, independent, each with its number of terms."""
    (n, a), (m, b) = first, second
    x, y = a.points * (n / (n + m)), b.points * (m / (n + m))
    lost = (n * a.lost + m * b.lost) / (n + m)
    grid = _grid(np.add.outer, _thinned(x, a.masses), _thinned(y, b.masses), points)
    masses, same = np.zeros(len(grid)), first is second
    widths = np.diff(grid)
    rows = max(1, 2**17 // len(y))
    for start in range(0, len(x), rows):
        part = slice(start, min(start + rows, len(x)))
        begin = start if same else 0  # both orders of a pair of unlike atoms at once
        sums = np.add.outer(x[part], y[begin:])
        weights = np.multiply.outer(a.masses[part], b.masses[begin:])
        if same:
            weights = np.triu(weights) + np.triu(weights, 1)
        over = sums >= grid[-1]
        if over.any():
            lost += float(np.sum(weights[over] * sums[over]))
            masses[0] += float(weights[over].sum())
        inside = ~over & (weights > 0)
        sums, weights = sums[inside], weights[inside]
        cells = np.searchsorted(grid, sums, side="right") - 1
        above = np.clip((sums - grid[cells]) / widths[cells], 0.0, 1.0)
        masses += np.bincount(cells, weights * (1 - above), len(grid))
        masses += np.bincount(cells + 1, weights * above, len(grid))
    return n + m, Atoms(grid, masses, lost)


def times_lognormal(law: Atoms, g: float, points: int) -> Atoms:
    """The product with an independent e^X, X ~ N(-g / 2, g), spread."""
    if g == 0:
        return law
    factor, s = lognormal(g, 400), math.sqrt(g)
    grid = _grid(np.multiply.outer, _thinned(law.points, law.masses), _thinned(factor.points, factor.masses), points)
    held = (law.masses > 0) & (law.points > 0)
    values, weights = law.points[held], law.masses[held]
    x = (np.log(grid[1:, None]) - np.log(values) + g / 2) / s
    cells, means = between(x), between(x - s) * values  # mass, and mean, of each value's product in each cell
    above = np.clip((means - grid[1:-1, None] * cells) / np.diff(grid[1:])[:, None], 0.0, cells)
    low = np.minimum(ndtr(x[0]), values * ndtr(x[0] - s) / grid[1])  # of the cell from 0 on
    masses = np.zeros(len(grid))
    masses[0] = float(law.masses[~held].sum()) + float((ndtr(x[0]) - low + ndtr(-x[-1])) @ weights)
    masses[1] = float(low @ weights)
    masses[1:-1] += (cells - above) @ weights
    masses[2:] += above @ weights
    return Atoms(grid, masses, law.lost + float((values * ndtr(s - x[-1])) @ weights))


def between(x: Floats) -> Floats:
    """Mass of a standard normal between neighbours of an ascending first axis."""
    return np.asarray(np.where(x[:-1] > 0, ndtr(-x[:-1]) - ndtr(-x[1:]), ndtr(x[1:]) - ndtr(x[:-1])))


def _thinned(x: Floats, masses: Floats) -> tuple[Floats, Floats]:
    """Some 400 atoms that stand for the law where a grid is chosen, and nowhere else."""
    starts = np.arange(0, len(x), max(1, len(x) // 400))
    thin = np.add.reduceat(masses, starts)
    return np.add.reduceat(masses * x, starts) / np.maximum(thin, 1e-300), thin


def _grid(
    outer: Callable[[Floats, Floats], Floats], first: tuple[Floats, Floats], second: tuple[Floats, Floats], points: int
) -> Floats:
    """Points at equal steps of the normal quantile of the law of a sum or product, without the unit and with it.

    Any grid is safe; this one has in each tail as many points as the tail has deviations, and more where it is far.
    """
    sums, masses = outer(first[0], second[0]).ravel(), np.multiply.outer(first[1], second[1]).ravel()
    order = np.argsort(sums)
    sums, masses = sums[order], masses[order]
    masses = masses + masses * sums
    below = np.cumsum(masses)
    over = np.cumsum(masses[::-1])[::-1]
    share = np.where(below < over, below, over) / below[-1]
    quantile = np.where(below < over, 1.0, -1.0) * ndtri(np.clip(share, 1e-30, 0.5))
    held = (np.abs(quantile) < _FAR) & (sums > 0)
    quantile, sums = quantile[held], sums[held]
    stretch = quantile * np.sqrt(1 + np.square(quantile / 4))
    wanted = np.linspace(stretch[0], stretch[-1], points)
    grid = np.interp(wanted, np.maximum.accumulate(stretch), sums)
    window = 1 + 2 * max(1, round(_SMOOTH / 2 / (wanted[1] - wanted[0])))  # thinned atoms make steps of it
    padded = np.concatenate([np.full(window // 2, grid[0]), grid, np.full(window // 2, grid[-1])])
    smooth = np.convolve(padded, np.full(window, 1 / window), mode="valid")
    return np.unique(np.concatenate([[0.0], smooth[smooth > 0]]))


_DOWN, _UP = 1 - 2.0**-50, 1 + 2e-10  # roundings of a deviation, and of an inverted loss distribution
_POINTS = 5e5  # of a grid of losses
_COARSE = 8.0  # times the interval of a grid, where it need not be near
_FINE = 40  # points in a deviation of one epoch's loss


class CyclicGroups(Protocol):
    """Units in `cycle` groups by turns, each unit of a step's group drawn with a probability, for n steps."""

    @property
    def n(self) -> int: ...
    @property
    def cycle(self) -> int: ...

    @property
    def sampling_probability(self) -> float: ...


class CutGroups(CyclicGroups, Protocol):
    """The same with batches of at most `batch_size` units, of `dataset_size` in all groups."""

    @property
    def batch_size(self) -> int: ...

    @property
    def dataset_size(self) -> int: ...


def cyclic_parts(strategy: Strategy, rule: CyclicGroups, sigma: float) -> tuple[float, float, int]:
    """(deviation over sensitivity, probability, steps) of the sampled Gaussians that a unit meets.

    Args:
        strategy: C; its columns that are `cycle` steps apart or more do not overlap.
        sigma: noise std / clip norm, above 0.
    Returns: sigma / max column norm, rounded down; q; ceil(n / cycle).
    Raises: PlanError for another C; ArgumentError.
    """
    sigma = checks.positive("sigma", sigma)
    check_fits(strategy, rule)
    largest = math.sqrt(float(strategy.column_norms_squared().max())) * (1 + 2.0**-48)
    return sigma / largest, rule.sampling_probability, -(-rule.n // rule.cycle)


def pld_epsilon(strategy: Strategy, participation: AmplifiedOrder, sigma: float, delta: float) -> float:
    """The epsilon at delta, both directions, at or above the true one, of an order whose loss distribution is known.

    Args:
        strategy: C that `check_fits` takes; columns that do not overlap, for balls in bins and allocation.
        participation: of zero-out neighbours where batches are cut, of add-or-remove for bins.
        sigma: noise std / clip norm, above 0.
        delta: strictly between 0 and 1.
    Returns: never above that of known batches; that one where a ratio's logarithm has a variance above 200.
    Cost: truncated batches up to some seconds; 2 to 4 s for bins up to b = 1000 of equal norms, whatever k.
    Raises: ArgumentError; PlanError; MissingDependencyError without dp-accounting, but for one epoch.
    """
    sigma, delta = checks.positive("sigma", sigma), checks.probability("delta", delta)
    check_fits(strategy, participation)
    return participation.exact_epsilon(strategy, sigma, delta)


def pld_delta(strategy: Strategy, participation: AmplifiedOrder, sigma: float, epsilon: float) -> float:
    """The delta at epsilon >= 0, at or above the true one; see `pld_epsilon`."""
    sigma, epsilon = checks.positive("sigma", sigma), checks.real("epsilon", epsilon, low=0.0)
    check_fits(strategy, participation)
    return participation.exact_delta(strategy, sigma, epsilon)


def epochs_epsilon(diagonals: ArrayLike, sigma: float, delta: float) -> float:
    """Epsilon at delta of one draw of a bin in each epoch, where the means of an epoch's bins are orthogonal.

    Args:
        diagonals: (k, b) squared norms of the means m_j of each epoch: (1, b) for balls in bins; ones for C = I.
        sigma, delta: as in `pld_epsilon`.
    """
    found = _ratios(diagonals, sigma)
    known = gdp_epsilon(found.mu, delta)
    if known == 0 or not found.ratios:
        return known
    if found.epochs == 1:
        ratio = found.ratios[0][0]
        return min(known, _inverted(lambda epsilon: max(ratio.remove(epsilon), ratio.add(epsilon)), delta, known))
    losses, rounding = _epochs(found)
    if delta <= 2 * rounding:
        return known
    return min(known, float(losses.get_epsilon_for_delta(delta - rounding)) * _UP)


def epochs_delta(diagonals: ArrayLike, sigma: float, epsilon: float) -> float:
    """Delta at epsilon of one draw of a bin in each epoch; see `epochs_epsilon`."""
    found = _ratios(diagonals, sigma)
    known = gdp_delta(found.mu, epsilon)
    if known == 0 or not found.ratios:
        return known
    if found.epochs == 1:
        ratio = found.ratios[0][0]
        return min(known, max(ratio.remove(epsilon), ratio.add(epsilon)))
    losses, rounding = _epochs(found)
    return min(known, max(0.0, float(losses.get_delta_for_epsilon(epsilon))) * _UP + rounding)


def diagonal_losses(pld: Any, diagonal: ArrayLike, sigma: float, h: float) -> Any:
    """The pessimistic loss distribution of dp-accounting, both directions, of bins of orthogonal means.

    Args:
        pld: the module dp_accounting.pld.privacy_loss_distribution.
        diagonal: (b,) squared norms of the means.
        h: interval of its grid.
    Raises: ArgumentError where a squared norm is above 200 sigma^2: the Gaussian of the largest says as much.
    """
    variances = checks.array("diagonal", diagonal, ndim=1) / sigma**2
    if variances.min() < 0 or variances.max() > LARGEST:
        raise ArgumentError(
            f"diagonal / sigma^2 must lie in [0, {LARGEST:g}], got {variances.min():g} to {variances.max():g}; with so "
            "little noise secrecy hides next to nothing: take the bound for known batches"
        )
    return ratio_of(tuple(variances)).losses(pld, h)


class _Ratios:
    """What epochs of bins come to: the mu of known batches, and the ratio of each kind of epoch with their number."""

    def __init__(self, mu: float, ratios: Sequence[tuple[Ratio, int]], largest: float) -> None:
        self.mu, self.ratios, self.largest = mu, ratios, largest
        self.epochs = sum(count for _, count in ratios)


def _ratios(diagonals: ArrayLike, sigma: float) -> _Ratios:
    variances = checks.array("diagonals", diagonals, ndim=2) / checks.positive("sigma", sigma) ** 2
    if variances.min() < 0:
        raise ArgumentError(f"diagonals must not be negative, got {variances.min():g}")
    largest = float(variances.max())
    mu = math.sqrt(float(variances.max(axis=1).sum())) / _DOWN
    if not 0 < largest <= LARGEST:
        return _Ratios(mu, [], largest)
    return _Ratios(mu, [(ratio_of(kind), count) for kind, count in distinct_rows(variances)], largest)


@lru_cache(maxsize=16)
def ratio_of(variances: tuple[float, ...]) -> Ratio:
    """The mean of lognormals of these variances."""
    return mean_of_lognormals(np.array(variances))


def _epochs(found: _Ratios) -> tuple[Any, float]:
    """(loss distribution of all epochs together, what its transforms may take from delta)."""
    pld = checks.optional(
        "dp_accounting.pld.privacy_loss_distribution", extra="amplified", purpose="accounting for epochs of bins"
    )
    deviations = [(ratio.deviation(), count) for ratio, count in found.ratios]
    whole = math.sqrt(sum(count * deviation**2 for deviation, count in deviations))
    far = found.largest / 2 + 10 * math.sqrt(found.largest)  # of one epoch's loss
    span = 2 * far + 10 * whole + whole**2
    h = max(whole / math.sqrt(found.epochs) / _FINE, span / _POINTS)
    parts = [ratio.losses(pld, h).self_compose(count) for ratio, count in found.ratios]
    rounding = (found.epochs + 16 * (2 * len(parts) - 1)) * 2.0**-53
    return reduce(lambda one, other: one.compose(other), parts), rounding


def _inverted(delta_at: Any, delta: float, known: float) -> float:
    """The least epsilon, to 1e-9 of it, at which a curve is at most delta; `known` holds."""
    if delta_at(0.0) <= delta:
        return 0.0
    return bisect(lambda epsilon: delta_at(epsilon) <= delta, inside=known, outside=0.0, relative=1e-9)


def epoch_squares(strategy: Strategy, k: int, b: int) -> Floats:
    """(k, b) squared norms of the columns of the steps of each epoch, of a C whose columns do not overlap."""
    if reach(strategy) != 1:
        raise PlanError(
            f"the loss distribution is known for a C whose columns do not overlap, such as Independent, got "
            f"{strategy!r}: take the deterministic bound, or Monte Carlo"
        )
    return np.asarray(strategy.column_norms_squared().reshape(k, b))


def rough_truncated(strategy: Strategy, rule: CutGroups, sigma: float, delta: float) -> float:
    """About `pld_epsilon`, on a coarse grid, for searches over sigma."""
    return truncated_epsilon(strategy, rule, sigma, delta, coarse=_COARSE)


def truncated_epsilon(strategy: Strategy, rule: CutGroups, sigma: float, delta: float, coarse: float = 1.0) -> float:
    """Epsilon at delta of truncated Poisson sampling, zero-out neighbours."""
    mu, rounding, losses = _truncated_parts(strategy, rule, sigma, coarse)
    known = gdp_epsilon(mu, delta)
    if delta <= 2 * rounding or not 0 < known < math.inf:
        return known
    found = losses()
    if any(one is None for one in found):
        return known
    return min(known, max(float(one.get_epsilon_for_delta(delta - rounding)) for one in found) * _UP)


def truncated_delta(strategy: Strategy, rule: CutGroups, sigma: float, epsilon: float) -> float:
    """Delta at epsilon of truncated Poisson sampling, zero-out neighbours."""
    mu, rounding, losses = _truncated_parts(strategy, rule, sigma)
    known = gdp_delta(mu, epsilon)
    if known <= rounding:
        return known
    found = losses()
    if any(one is None for one in found):
        return known
    return min(known, max(max(0.0, float(one.get_delta_for_epsilon(epsilon))) for one in found) * _UP + rounding)


def _truncated_parts(
    strategy: Strategy, rule: CutGroups, sigma: float, coarse: float = 1.0
) -> tuple[float, float, Callable[[], list[Any]]]:
    """(mu of known batches, what transforms may take from delta, the loss distribution of each size of group)."""
    each, q, steps = cyclic_parts(strategy, rule, sigma)

    def losses() -> list[Any]:
        return [_truncated(each, q, steps, rule.batch_size, size, coarse) for size in group_sizes(rule)]

    return math.sqrt(steps) / each / _DOWN, (2 * steps + 16) * 2.0**-53, losses


def group_sizes(rule: CutGroups) -> set[int]:
    """Of its groups: they differ by one at most."""
    return {rule.dataset_size // rule.cycle, -(-rule.dataset_size // rule.cycle)}


@lru_cache(maxsize=4)
def _truncated(sigma: float, q: float, steps: int, batch_size: int, size: int, coarse: float = 1.0) -> Any:
    """The loss distribution of all steps for a group of `size` units; None where its grid cannot tell."""
    pld = checks.optional(
        "dp_accounting.pld.privacy_loss_distribution", extra="amplified", purpose="accounting for truncated batches"
    )
    h = coarse * max(step_interval(sigma, q, steps), step_interval(sigma / 2, q, steps, quick=False))
    if h > 100:  # losses in the millions
        return None
    return _truncated_steps(pld, sigma, q, steps, batch_size, size, h)


def truncated_losses(pld: Any, strategy: Strategy, rule: CutGroups, sigma: float, size: int, h: float) -> Any:
    """The pessimistic loss distribution of dp-accounting of all steps, on the grid h, for a group of `size` units."""
    each, q, steps = cyclic_parts(strategy, rule, sigma)
    return _truncated_steps(pld, each, q, steps, rule.batch_size, size, h)


def _truncated_steps(pld: Any, sigma: float, q: float, steps: int, batch_size: int, size: int, h: float) -> Any:
    """So many times `pld.from_truncated_subsampled_gaussian_mechanism`, for a unit whose gradient is replaced by zero.

    Where a batch is cut, with probability `cut`, the unit may have taken another one's place: it is replaced then.
    """
    one = sampled_gaussian(pld, sigma, q, h)
    cut = float(bdtrc(batch_size - 1, size - 1, q)) if batch_size < size else 0.0
    if cut > 0:
        within = float(bdtrc(batch_size, size, q)) * batch_size / cut / size  # that the unit is in a batch that is
        one = replaced_gaussian(pld, sigma / 2, within, h).compute_mixture(one, cut)
    return one.self_compose(steps)


def distinct_rows(rows: Floats) -> list[tuple[tuple[float, ...], int]]:
    """(a row sorted, how many rows are that one)."""
    return list(Counter(tuple(row) for row in np.sort(rows, axis=1).tolist()).items())


def diagonal_composition(pld: Any, rows: Floats, sigma: float, h: float) -> Any:
    """`diagonal_losses` of epochs with these squared norms, composed; None where bins hide nothing."""
    kinds = distinct_rows(rows)
    if not all(0 < max(kind) / sigma**2 <= LARGEST for kind, _ in kinds):
        return None
    parts = [diagonal_losses(pld, kind, sigma, h).self_compose(count) for kind, count in kinds]
    return reduce(lambda one, other: one.compose(other), parts)
