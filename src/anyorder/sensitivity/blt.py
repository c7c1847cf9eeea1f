"""BLT: the energy of C u between two participations is a sum of geometric series, for any number of steps."""

from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.patterns import Listed, Pattern, PerEpoch, Separated
from anyorder.sensitivity import toeplitz
from anyorder.sensitivity.bound import Bound, from_sum, roots
from anyorder.sensitivity.shuffled import convex_bound
from anyorder.sensitivity.visits import UnitSquares, Visits, better, largest, visits
from anyorder.strategy import BLT

__all__ = ["bound", "is_positive", "unit_squares", "units"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def bound(strategy: BLT, pattern: Pattern) -> Bound:
    """The sensitivity of a BLT.

    With scales and decays that are not negative, c >= 0 and c_1, c_2, .. falls, so the worst pattern is 0, b, 2b, ..
    if c_1 = sum(scales) <= 1 = c_0; else c_0 is replaced by c_1, which gives an upper bound for Separated. Closed
    form: O(k m^2) for strides and Separated, O(k^2 m^2) for PerEpoch, O(M m^2) for other lists of M participations.
    Other scales and decays, and PerEpoch for n up to 4096, go to `toeplitz.bound`.
    """
    k, n, terms = pattern.max_participations, strategy.n, _terms(strategy, pattern)
    head = 1.0
    match pattern:
        case Listed(stride=None):
            return largest(_unit_squares(strategy, visits(pattern)), terms)
        case PerEpoch(steps_per_epoch=s) if k > 1:
            if not is_positive(strategy) or n <= toeplitz.MAX_GRAM:
                return toeplitz.bound(strategy, pattern)
            return from_sum(_shuffled(strategy, k, s), terms + k * k, exact=False)
        case Separated() if k > 1:
            head = max(1.0, float(strategy.scales.sum()))
        case Listed() | Separated() | PerEpoch():
            pass  # the first pattern, or any step alone
        case _:
            assert_never(pattern)
    if not is_positive(strategy):
        return toeplitz.bound(strategy, pattern)
    squared = _equidistant(strategy, head, pattern.min_separation, k)
    found = from_sum(squared, terms, exact=head == 1)
    if found.exact or n > toeplitz.MAX_GRAM:
        return found
    return better(found, toeplitz.bound(strategy, pattern))


def units(strategy: BLT, listed: Listed) -> Floats:
    """Of each unit: sum |X| over its steps squared."""
    return roots(_unit_squares(strategy, visits(listed)).upper, _terms(strategy, listed))


def is_positive(strategy: BLT) -> bool:
    """Whether all scales and decays are at least 0, and so all entries of C and of X."""
    return bool((strategy.scales >= 0).all() and (strategy.decays >= 0).all())


def unit_squares(strategy: BLT, units: Visits, weights: Floats | None = None) -> UnitSquares:
    """Of every unit: || C u ||^2 with u = weights (1 if not given) at its steps, 0 elsewhere; for positive BLTs.

    The buffers v jump from one participation to the next, gap steps on:

        v' = decays^(gap - 1) (decays v + weight),   energy = (weight + scales . v)^2 + sum of the steps between

    and with w = scales (decays v + weight) the steps between add sum_{ij} w_i w_j (1 - x^(gap - 1)) / (1 - x), where
    x = decays_i decays_j. Cost: O(M m^2) time for M participations.
    """
    n, decays, scales = units.n, strategy.decays, strategy.scales
    ends = np.append(units.steps[1:], n)
    last = np.append(np.diff(units.indices) > 0, True)
    gaps = np.where(last, n, ends) - units.steps
    lengths, where = _distinct(gaps - 1, n)
    jumps = decays ** lengths[:, None]
    series = _geometric(decays, lengths)
    totals = np.zeros(units.num_units)
    buffers = np.zeros((units.num_units, len(decays)))
    here = np.flatnonzero(units.ranks == 0)
    while len(here):
        unit, length = units.indices[here], where[here]
        weight = np.ones(len(here)) if weights is None else weights[units.steps[here]]
        v = buffers[unit]
        totals[unit] += np.square(weight + v @ scales)
        v = decays * v + weight[:, None]
        totals[unit] += _energy(scales * v, series, length)
        buffers[unit] = jumps[length] * v
        here = here[~last[here]] + 1
    return UnitSquares(totals, totals)


def _unit_squares(strategy: BLT, units: Visits) -> UnitSquares:
    if is_positive(strategy):
        return unit_squares(strategy, units)
    return toeplitz.unit_squares(strategy.toeplitz_coefficients(), units)


def _equidistant(strategy: BLT, head: float, b: int, k: int) -> float:
    """|| sum_{j < k} shift^{jb} c ||^2 with c_0 = head: O(k m^2)."""
    n, decays, scales = strategy.n, strategy.decays, strategy.scales
    powers = decays ** (b * np.arange(k))[:, None]
    after = np.cumsum(powers, axis=0)  # decays v + 1 after participation 0, .., k - 1
    before = np.zeros_like(after)
    before[1:] = decays ** (b - 1) * after[:-1]
    lengths = np.array([b - 1, n - 1 - (k - 1) * b])
    which = np.zeros(k, dtype=np.int64)
    which[-1] = 1
    energies = _energy(scales * after, _geometric(decays, lengths), which)
    return float(np.square(head + before @ scales).sum() + energies.sum())


def _shuffled(strategy: BLT, k: int, s: int) -> float:
    """`convex_bound`, with sum_{l < rows} c_l c_{l + gap} in closed form: O(k^2 m^2)."""
    decays, scales = strategy.decays, strategy.scales

    def gram(gaps: Integers, rows: Integers) -> Floats:
        lengths, which = np.unique(rows - 1, return_inverse=True)
        series = _geometric(decays, lengths)
        tails = decays ** np.maximum(gaps - 1, 0)[:, None] * scales  # c_gap = tails.sum(), gap > 0
        first = np.where(gaps == 0, 1.0, tails.sum(axis=1))
        later = np.where((gaps == 0)[:, None], scales, tails * decays)  # c_{l + gap} = later . decays^(l - 1)
        return np.asarray(first + np.einsum("gi,gij,j->g", later, series[which], scales))

    return convex_bound(k, s, gram)


def _energy(w: Floats, series: Floats, which: Integers) -> Floats:
    """sum_{ij} w_i w_j series_ij for rows w (M, m) and series[which]; pair by pair, to keep memory at O(M)."""
    total = np.zeros(len(w))
    for i in range(w.shape[1]):
        total += np.square(w[:, i]) * series[which, i, i]
        for j in range(i):
            total += 2 * w[:, i] * w[:, j] * series[which, i, j]
    return total


def _geometric(decays: Floats, lengths: Integers) -> Floats:
    """(L, m, m) sums 1 + x + .. + x^(length - 1), x = decays_i decays_j in [0, 1], without cancellation near x = 1."""
    loss = 1 - decays
    gone = loss[:, None] + decays[:, None] * loss  # 1 - x
    lengths = lengths[:, None, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        sums = -np.expm1(lengths * np.log1p(-gone)) / gone
    sums = np.where(gone == 0, lengths, sums)
    return np.where(lengths == 0, 0.0, sums)


def _distinct(values: Integers, n: int) -> tuple[Integers, Integers]:
    """The distinct values in [0, n), and where each of the given ones is among them: O(M + n)."""
    present = np.zeros(n, dtype=bool)
    present[values] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[values]


def _terms(strategy: BLT, pattern: Pattern) -> int:
    return 4 * (pattern.max_participations + strategy.num_buffers**2) + 64
