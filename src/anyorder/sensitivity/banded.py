"""Banded C: X = C^T C has the same bands, so participations far apart do not meet."""

from collections.abc import Callable
from typing import NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.patterns import Listed, Pattern, PerEpoch, Separated
from anyorder.sensitivity import dense
from anyorder.sensitivity.bound import Bound, from_sum, roots
from anyorder.sensitivity.visits import TOLERANCE, UnitSquares, Visits, better, largest, visits
from anyorder.strategy import Banded, ToeplitzBanded

__all__ = ["Gram", "bound", "gram_bound", "gram_of", "units"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_MAX_DENSE = 2048


class Gram(NamedTuple):
    """X = C^T C of a banded C.

    Attributes:
        n: number of steps.
        num_bands: X[i, j] = 0 for |i - j| >= num_bands.
        entry: (gaps, steps) -> X[steps, steps + gaps], elementwise, for 0 <= gap < num_bands, step + gap < n.
    """

    n: int
    num_bands: int
    entry: Callable[[Integers, Integers], Floats]

    def diagonal(self, gap: int) -> Floats:
        """(n - gap,) X[j, j + gap]."""
        steps = np.arange(self.n - gap)
        return self.entry(np.full_like(steps, gap), steps)


def gram_of(strategy: Banded | ToeplitzBanded) -> Gram:
    """X of a banded strategy: O(n p^2), or O(p^2) if it is Toeplitz."""
    n, p = strategy.n, strategy.num_bands
    if type(strategy) is Banded:
        bands = strategy.gram_bands()
        return Gram(n, p, lambda gaps, steps: bands[gaps, steps])
    c = strategy.coefficients
    sums = np.zeros((p, p))  # [gap, m] = sum_{l <= m} c_l c_{l + gap}: where column j + gap has m + 1 rows left
    for gap in range(p):
        sums[gap, : p - gap] = np.cumsum(c[: p - gap] * c[gap:])
        sums[gap, p - gap :] = sums[gap, p - gap - 1]
    return Gram(n, p, lambda gaps, steps: sums[gaps, np.minimum(n - 1 - steps - gaps, p - 1)])


def bound(strategy: Banded, pattern: Pattern) -> Bound:
    """`gram_bound` of X = C^T C; where that is not exact, X in full may give a smaller bound, for n up to 2048."""
    found = gram_bound(gram_of(strategy), pattern)
    if found.exact or strategy.n > _MAX_DENSE:
        return found
    C = strategy.matrix()
    return better(found, dense.gram_bound(C.T @ C, pattern, terms=strategy.n))


def units(strategy: Banded | ToeplitzBanded, listed: Listed) -> Floats:
    """Of each unit: sum |X| over its steps squared."""
    gram = gram_of(strategy)
    return roots(unit_squares(gram, visits(listed)).upper, _terms(gram, listed))


def gram_bound(gram: Gram, pattern: Pattern) -> Bound:
    """The sensitivity from X with p bands.

    - Listed: the largest over all units of sum |X| over their steps squared. Exact where X >= 0 on the steps of that
      unit. Single steps: the largest X_tt, exact.
    - Separated(b, k), by dynamic programming over the number of participations and the last one. Exact for
      p <= 2 b, when a participation meets the one before and the one after only: signs of the vectors can then be
      chosen, one after the other, so that every X_ij counts as |X_ij|. With p <= b none meet. For wider bands each
      participation is charged, for the q-th one before it, the largest |X| at least q b away; exact where equal
      steps b apart attain this.
    - PerEpoch(k, s), the same over the step in the last epoch. Exact for p <= s + 1.

    Cost: O(M p) for M participations; O(n k max(p - b, 1)), or O(n p) where as many participations as fit are allowed,
        for Separated; O(n p) for PerEpoch.
    """
    terms = _terms(gram, pattern)
    match pattern:
        case Listed():
            return largest(unit_squares(gram, visits(pattern)), terms)
        case Separated() | PerEpoch() if pattern.max_participations == 1:
            return from_sum(float(gram.diagonal(0).max()), terms, exact=True)
        case Separated(b=b):
            k = pattern.max_participations
            squared = _separated(gram, b, k)
            exact = gram.num_bands <= 2 * b or squared <= _equidistant(gram, b, k) * (1 + TOLERANCE)
            return from_sum(squared, terms, exact=exact)
        case PerEpoch(k=k, steps_per_epoch=s):
            return from_sum(_shuffled(gram, k, s), terms, exact=gram.num_bands <= s + 1)
        case _:
            assert_never(pattern)


def unit_squares(gram: Gram, units: Visits) -> UnitSquares:
    """Of every unit: the sums of |X| and of X over its steps squared. O(M p)."""
    steps = units.steps
    upper = gram.entry(np.zeros_like(steps), steps)
    lower = upper.copy()
    for distance in range(1, int(units.ranks.max()) + 1):
        later = np.flatnonzero(units.ranks >= distance)
        gaps = steps[later] - steps[later - distance]
        close = gaps < gram.num_bands
        if not close.any():
            break
        later, gaps = later[close], gaps[close]
        values = 2 * gram.entry(gaps, steps[later] - gaps)
        upper[later] += np.abs(values)
        lower[later] += values
    return UnitSquares(units.per_unit(upper), units.per_unit(lower))


def _separated(gram: Gram, b: int, k: int) -> float:
    """The largest sum of |X| over k steps at most, at least b apart; an upper bound of it for p > 2 b."""
    n, p = gram.n, gram.num_bands
    weights = gram.diagonal(0)
    beyond = np.zeros(n)
    for gap in range(min(p, n) - 1, 2 * b - 1, -1):
        beyond[gap:] = np.maximum(beyond[gap:], np.abs(gram.diagonal(gap)))
        if gap % b == 0:
            weights += 2 * beyond
    cross = {gap: 2 * np.abs(gram.diagonal(gap)) for gap in range(b, min(p, n))}
    free = max(b, p)
    if k >= -(-n // b):
        return _unlimited(weights, cross, b, free)
    last = weights  # the best with so many participations, the last one at t
    best = float(last.max())
    for _ in range(k - 1):
        longer = np.full(n, -np.inf)
        longer[free:] = np.maximum.accumulate(last)[: n - free]
        for gap, values in cross.items():
            longer[gap:] = np.maximum(longer[gap:], last[: n - gap] + values)
        last = longer + weights
        best = max(best, float(last.max()))
    return best


def _unlimited(weights: Floats, cross: dict[int, Floats], b: int, free: int) -> float:
    """The same for as many participations as fit, step by step: O(n p)."""
    n = len(weights)
    meeting = np.zeros((n, len(cross)))  # [t, gap - b] = 2 |X[t - gap, t]|
    for gap, values in cross.items():
        meeting[gap:, gap - b] = values
    last = np.zeros(n + free)  # padded in front: nothing before step 0
    best = np.zeros(n + free)
    for t in range(n):
        here = t + free
        window = last[here - b - len(cross) + 1 : here - b + 1][::-1] + meeting[t]
        last[here] = weights[t] + max(best[here - free], window.max(initial=0.0))
        best[here] = max(best[here - 1], last[here])
    return float(best[-1])


def _equidistant(gram: Gram, b: int, k: int) -> float:
    """The largest sum of X over steps t, t + b, .., k at most: attained, by vectors that are all equal."""
    n = gram.n
    total = np.zeros(n)
    for q in range(min(k, -(-n // b))):
        # of the pattern that begins at t: its participation q, with all those before it
        later = np.arange(q * b, n)
        for gap in range(0, min(q * b + 1, gram.num_bands), b):
            values = gram.entry(np.full_like(later, gap), later - gap)
            total[: n - q * b] += values if gap == 0 else 2 * values
    return float(total.max())


def _shuffled(gram: Gram, k: int, s: int) -> float:
    """The largest sum of |X| over one step of each epoch; an upper bound of it for p > s + 1."""
    n, p = gram.n, gram.num_bands
    weights = gram.diagonal(0)
    beyond: dict[int, Floats] = {}
    for gap in range(s + 1, min(p, n)):
        later = np.arange(gap, n)
        apart = later // s - (later - gap) // s
        values = 2 * np.abs(gram.diagonal(gap))
        for epochs in np.unique(apart[apart >= 2]):
            table = beyond.setdefault(int(epochs), np.zeros(n))
            table[later] = np.maximum(table[later], np.where(apart == epochs, values, 0.0))
    weights += sum(beyond.values(), np.zeros(n))
    cross = {gap: 2 * np.abs(gram.diagonal(gap)) for gap in range(1, min(p, 2 * s, n))}
    last = weights[:s]
    for start in range(s, n, s):
        longer = np.full(s, last.max())
        for gap, values in cross.items():
            here = np.arange(max(0, gap - s), min(s, gap))
            longer[here] = np.maximum(longer[here], last[here - gap + s] + values[start + here - gap])
        last = longer + weights[start : start + s]
    return float(last.max())


def _terms(gram: Gram, pattern: Pattern) -> int:
    return gram.num_bands + min(gram.num_bands, pattern.max_participations) + pattern.max_participations
