"""The law of a mean of independent lognormals: the likelihood ratio of secret bins whose means are orthogonal.

For a diagonal Gram matrix G the ratio of the dominating pair of `mixture` is, without the unit,

    L = sum_j w_j e^{X_j},   X_j ~ N(-g_j / 2, g_j) independent,   g_j = G_jj / sigma^2,   E L = 1

[for C = I: Feldman, Shenfeld 2026], and both hockey sticks are means of convex functions of L:

    with against without: E (L - e^eps)_+;      without against with: E (1 - e^eps L)_+

**Never below.** An atom of a law on [0, inf) between two points of a grid is split among them so that its mean stays.
That is a mean-preserving spread, so E phi rises for every convex phi. It stays one under the sums: if L1' is a spread
of L1 and L2' of L2, independent, then E[a L1' + b L2' | L1, L2] = a L1 + b L2 for a fitting coupling, and Jensen's
inequality does the rest. Mass above the grid is put at 0, and its share T of the mean noted as lost: for L = L' + T,

    (L - K)_+ <= (L' - K)_+ + T,     (1 - K L)_+ <= (1 - K L')_+,     so E (L - K)_+ <= E (L' - K)_+ + lost

Every sum here is one of positive numbers, no transform takes part and nothing cancels: what comes out is off by a
relative rounding alone, tails as well as the body, and that is added.

A larger g_j never lowers delta (the theorem of `mixture`), so many unlike g_j may be rounded up to a few.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from anyorder._closed import final

__all__ = [
    "LARGEST",
    "Atoms",
    "Ratio",
    "between",
    "lognormal",
    "mean_of_lognormals",
    "power",
    "times_lognormal",
    "together",
]

Floats = NDArray[np.float64]

LARGEST = 200.0  # variance of a logarithm; above it products of masses near the smallest float
_FAR = 9.5  # deviations that a grid covers: beyond has mass 1e-21
_KINDS = 12  # different variances that are kept apart
_SMOOTH = 0.3  # deviations over which a grid is smoothed
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)


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
    kinds, counts = _kinds(np.sort(np.asarray(variances, dtype=np.float64)))
    found: tuple[int, Atoms] | None = None
    for kind, count in zip(kinds, counts, strict=True):
        one = power(lognormal(float(kind), points), int(count), points)
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


def _kinds(variances: Floats) -> tuple[Floats, NDArray[np.int64]]:
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


def power(one: Atoms, count: int, points: int) -> Atoms:
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
