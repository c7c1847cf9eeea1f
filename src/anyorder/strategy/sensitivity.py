"""Sensitivities: numbers never below the true ones, from X = C^T C; and how much float32 adds to them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import inf, sqrt
from typing import NamedTuple, assert_never

import numpy as np
import scipy  # its parts, slow to load, when they are first asked for
from numpy.typing import NDArray

from anyorder import checks
from anyorder._numerics import complex_product
from anyorder.checks import final
from anyorder.errors import PlanError
from anyorder.formats import check_work, html_table
from anyorder.patterns import Listed, Pattern, PerEpoch, Separated
from anyorder.strategy.base import DENSE_STEPS, Strategy

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@final
@dataclass(frozen=True)
class Bound:
    """An L2 sensitivity at clip norm 1, root scale.

    Attributes:
        value: never below the true sensitivity.
        exact: whether it is proven equal to it, up to rounding.
    """

    value: float
    exact: bool

    def __post_init__(self) -> None:
        checks.real("value", self.value, low=0.0)

    def _repr_html_(self) -> str:
        kind = "exact" if self.exact else "an upper bound"
        return html_table([("sensitivity", f"{self.value:.6g} clip norms"), ("which is", kind)])


def from_integer(squared: int) -> Bound:
    """An exact sensitivity from its square: the least float whose square is not below."""
    value = math.sqrt(squared)
    while Fraction(value) ** 2 < squared:
        value = math.nextafter(value, math.inf)
    return Bound(value, exact=True)


def from_sum(squared: float, terms: int, *, exact: bool) -> Bound:
    """From a square that was summed in floats from `terms` products, rounded up by their largest rounding error."""
    return Bound(math.sqrt(squared * (1 + _slack(terms))), exact)


def roots(squared: NDArray[np.float64] | NDArray[np.int64], terms: int) -> NDArray[np.float64]:
    """Square roots, rounded up; those of integers are rounded only where they are not integers."""
    values = np.sqrt(squared, dtype=np.float64)
    if squared.dtype.kind == "i":
        return np.where(values**2 == squared, values, np.nextafter(values, np.inf))
    return np.asarray(values * (1 + _slack(terms)))


def _slack(terms: int) -> float:
    return (terms + 4) * float(np.finfo(np.float64).eps)


# -- units in lists --------------------------------------------------------------------------------------------------

# Who is where: the steps of many units as flat arrays, so that a million patterns are summed at once.


TOLERANCE = 1e-12  # an upper and a lower bound this close, relative, differ by rounding only


class Visits(NamedTuple):
    """One entry for each participation, sorted by unit, then step.

    Attributes:
        n: number of steps.
        num_units: number of units U.
        steps: (M,) step.
        indices: (M,) unit, 0 <= index < U; every unit has at least one entry.
        ranks: (M,) number of earlier participations of the same unit.
    """

    n: int
    num_units: int
    steps: Integers
    indices: Integers
    ranks: Integers

    def per_unit(self, values: Floats) -> Floats:
        """(U,) sums of (M,) values."""
        return np.bincount(self.indices, weights=values, minlength=self.num_units).astype(np.float64)


class UnitSquares(NamedTuple):
    """Squared sensitivities of units: never below the true ones, and what vectors that are all equal attain."""

    upper: Floats
    lower: Floats


def visits(listed: Listed) -> Visits:
    """The units of a list of patterns, with ranks."""
    starts = np.searchsorted(listed.indices, np.arange(listed.num_units))
    ranks = np.arange(len(listed.steps)) - starts[listed.indices]
    return Visits(listed.n, listed.num_units, listed.steps, listed.indices, ranks)


def largest(squares: UnitSquares, terms: int) -> Bound:
    """The sensitivity over all units; exact where the largest upper bound is attained."""
    upper, lower = float(squares.upper.max()), float(squares.lower.max())
    return from_sum(upper, terms, exact=upper <= lower * (1 + TOLERANCE))


def better(first: Bound, second: Bound) -> Bound:
    """The smaller one; an exact one is the smaller one up to rounding."""
    if first.exact or second.exact:
        return first if first.exact else second
    return min(first, second, key=lambda bound: bound.value)


# ----------------------------------------------------------------------------------------------------
# Coefficients are rounded to float32 when noise is made: how much more a unit can then move the release.
#
# With K~ the coefficients as they are used, the release is C~ G + std Z for the C~ with K~ C~ = I. One unit moves it by
# C~ D, D = sum_t e_t u_t^T over its k steps at most. Two ways to hold || C~ D || against sens(C):
#
# - By columns. If || (C~ - C) e_t || <= r || C e_t || for every t, then with orthogonal u_t allowed in sens(C)
#
#       || (C~ - C) D || <= r sum_t || C e_t || <= r sqrt(k) ( sum_t || C e_t ||^2 )^(1/2) <= r sqrt(k) sens(C).
#
# - As a whole. K~ = K + E gives C~ = (I + C E)^-1 C, so that || C~ D || <= || C D || / (1 - w) for w >= || C E ||, and
#   || C E ||^2 is at most the largest row sum of |C| |E| times its largest column sum.
#
# Under secret draws a claim rests on more of C than its sensitivity: on the products of columns of |C|, see
# `anyorder.accounting.amplification`. There C~ must be T C' with two properties. (1) Every entry of |C'| is at most
# (1 + e) times that of |C|: so are, with (1 + e)^2, the products, and delta is monotone in each of them. (2) ||T|| <=
# 1 + w, and T looks at no later step: then C~ G + std Z is made of C' G + std / (1 + w) Z by T and by noise of its
# own, of covariance std^2 (I - T T^T / (1 + w)^2), which is post-processing. So noise that is (1 + e)(1 + w) times as
# large covers the rounding. As a whole, T = (I + C E)^-1 and C' = C. By columns, T = I + (C~ - C) C^-1 with
#
#     || (C~ - C) C^-1 || <= r ( sum_t || C e_t ||^2 )^(1/2) || K ||
#
# The row of a kind in `registry` says its two: the `Change` of C, and (1 + e) (1 + w) - 1 under draws. They stand in
# the file of the kind; here is what they share. `anyorder.strategy.registry.rounding` makes one number of them.


UNIT = 2.0**-24  # half the distance from 1 to the next float32
MOST = 0.01  # more than this is no rounding


class Change(NamedTuple):
    """How far C~ may be from C: r by columns, 1 / (1 - w) - 1 as a whole, see above."""

    columns: float
    whole: float = 0.0


NO_CHANGE = Change(0.0)


def as_operator(strategy: Strategy, change: Change, inverse: float) -> float:
    """At least || C~ C^-1 || - 1.

    Args:
        inverse: at least || K ||.
    """
    frobenius = sqrt(float(strategy.column_norms_squared().sum()))
    return (1 + change.whole) * (1 + change.columns * frobenius * inverse) - 1


def under_coins(strategy: Strategy, change: Change) -> float:
    """(1 + e) (1 + w) - 1 of any C, e = 0."""
    return as_operator(strategy, change, inverse_norm(strategy) if change.columns else 0.0)


def by_entry(used: Floats, exact: Floats) -> float:
    """The largest relative change of a number; infinite where 0 became another."""
    changes = np.where(used == exact, 0.0, np.abs(used / exact - 1))
    return float(changes.max(initial=0.0)) if np.isfinite(changes).all() else inf


def inverse_norm(strategy: Strategy) -> float:
    """At least || K ||."""
    K = np.abs(strategy.noising_matrix())
    return sqrt(float(K.sum(axis=1).max()) * float(K.sum(axis=0).max()))


def rounded(values: Floats) -> Floats:
    """As float32 has them."""
    return values.astype(np.float32).astype(np.float64)


def trimmed(series: Floats) -> Floats:
    """Without the zeros at its end, but one number long at least."""
    return series[: max(1, int(np.flatnonzero(series).max(initial=0)) + 1)]


def rounded_decays(decays: Floats) -> Floats:
    """1 - decay is what a step uses."""
    return 1 - rounded(1 - decays)


def root(squares: Floats) -> float:
    """Of the largest; infinite where one is no number."""
    return sqrt(float(squares.max())) if np.isfinite(squares).all() else inf


def of_series(c: Floats, used: Floats) -> Change:
    """Toeplitz C: column t has the first n - t coefficients."""
    return Change(root(np.cumsum(np.square(used - c)) / np.cumsum(np.square(c))))


def inversion(C: Floats, K: Floats) -> float:
    """At least || |K C - I| || or || |C K - I| || of an inverse by back substitution [Higham 2002, section 14.2].

    Where C was given and K was made, C times the error of K is such a residual; the other way round, one of it and a K.
    """
    return len(C) * 2.0**-52 * norm(C, K)


def resolvent(w: float) -> float:
    """1 / (1 - w) - 1."""
    return w / (1 - w) if w < 1 else inf


def norm(C: Floats, E: Floats) -> float:
    """At least || |C| |E| ||: the root of its largest row sum times its largest column sum."""
    C, E = np.abs(C), np.abs(E)
    return sqrt(float((C @ E.sum(axis=1)).max()) * float((C.sum(axis=0) @ E).max()))


# -- from X = C^T C: in full, in few bands, over shuffled epochs, and by a semidefinite program ------------------------


_MAX_PATTERNS = 2000  # tried one by one; the closed bounds take about as long
_NOISE = 1e-12  # entries of X this small against its diagonal are rounding errors


def matrix_bound(strategy: Strategy, pattern: Pattern) -> Bound:
    """`gram_bound` of X = C^T C."""
    return gram_bound(_gram(strategy), pattern, terms=strategy.num_rows)


def matrix_units(strategy: Strategy, listed: Listed) -> Floats:
    """Of each unit: sum |X| over its steps squared."""
    X = np.abs(_gram(strategy))
    return roots(
        np.array([X[np.ix_(steps, steps)].sum() for steps in listed.enumerate()]), strategy.num_rows + listed.n
    )


def gram_bound(X: Floats, pattern: Pattern, *, terms: int) -> Bound:
    """The sensitivity from the matrix X = C^T C, (n, n).

    For one pattern pi, the Gram matrix Y has |Y_ij| <= 1, so sens(pi)^2 <= sum |X_pi,pi|; with equality if signs s
    exist with s_i s_j X_ij >= 0 on pi (Y = s s^T), as for X_pi,pi >= 0 and for |pi| <= 2.

    Over all patterns of Separated or PerEpoch the maximum of a quadratic form is hard. With

        R_i = max over allowed pi that contain i of sum_{j in pi} |X_ij|,

    sum_{i,j in pi} |X_ij| <= sum_{i in pi} R_i <= max over pi of the same: two linear maxima, which are solved
    by dynamic programming (Separated) or epoch by epoch (PerEpoch). The bound is exact where the pattern
    that attains the outer maximum really has this value, always if X_ij = 0 for |i - j| >= b. Few patterns are
    tried one by one. For PerEpoch `two_point_bound` is another bound; the smaller one is taken.

    Args:
        X: symmetric, positive semidefinite.
        pattern: of n steps.
        terms: number of products that were summed in an entry of X, for rounding.
    Cost: O(n^2) for a list of patterns, PerEpoch, or Separated where all that fit are allowed; else O(n^2 k).
    """
    rounds = pattern.max_participations if isinstance(pattern, Separated) else 16
    check_work(f"the sensitivity from all {len(X)} steps", numbers=X.size, operations=X.size * rounds)
    weights = np.abs(X)
    match pattern:
        case Separated() if pattern.is_single:
            return from_sum(float(X.diagonal().max()), terms, exact=True)
        case Listed():
            return _one_by_one(X, pattern, terms)
        case Separated() | PerEpoch() if pattern.count(_MAX_PATTERNS) <= _MAX_PATTERNS:
            return _one_by_one(X, pattern, terms)
        case PerEpoch(k=k, steps_per_epoch=s):
            best = _epoch_rows(weights, k, s).reshape(k, s)
            steps = (best.argmax(axis=1) + np.arange(k) * s).tolist()
            squared = min(float(best.max(axis=1).sum()), two_point_bound(weights, k, s))
        case Separated(b=b):
            k = pattern.max_participations
            squared, steps = _heaviest(_separated_rows(weights, b, k), b, k)
        case _:
            assert_never(pattern)
    attained, signed = _heaviest_pattern(X, [tuple(steps)])
    exact = signed and attained >= squared * (1 - _NOISE)
    return from_sum(squared, terms + pattern.n, exact=exact)


def _one_by_one(X: Floats, pattern: Pattern, terms: int) -> Bound:
    squared, exact = _heaviest_pattern(X, pattern.enumerate())
    return from_sum(squared, terms + pattern.n, exact=exact)


def _gram(strategy: Strategy) -> Floats:
    if strategy.n > DENSE_STEPS:
        raise PlanError(
            f"the sensitivity of {strategy!r} needs its dense matrix, which is made for at most {DENSE_STEPS} steps, "
            f"got {strategy.n}; use a structured strategy"
        )
    check_work(f"the dense matrix of {strategy.n} steps", numbers=strategy.n * strategy.num_rows)
    C = strategy.matrix()
    return np.asarray(C.T @ C)


def _heaviest_pattern(X: Floats, patterns: Iterable[tuple[int, ...]]) -> tuple[float, bool]:
    """The largest sum |X| over the patterns, and whether signs show that it is attained."""
    squared, exact = -1.0, True
    for steps in patterns:
        part = X[np.ix_(steps, steps)]
        value = float(np.abs(part).sum())
        if value > squared:
            signs = np.where(part[0] < 0, -1.0, 1.0)
            aligned = part * signs * signs[:, None]
            squared, exact = value, bool((aligned >= -_NOISE * part.diagonal().max()).all())
    return squared, exact


def _epoch_rows(weights: Floats, k: int, s: int) -> Floats:
    """R_i: its own weight, and the largest of each other epoch."""
    n = k * s
    largest = weights.reshape(n, k, s).max(axis=2)
    own = np.arange(n) // s
    return np.asarray(largest.sum(axis=1) - largest[np.arange(n), own] + weights.diagonal())


def _separated_rows(weights: Floats, b: int, k: int) -> Floats:
    """R_i: its own weight, and the heaviest k - 1 steps that are at least b from i and from each other."""
    n = len(weights)
    steps = np.arange(n)
    others = np.where(np.abs(np.subtract.outer(steps, steps)) < b, 0.0, weights)
    if k >= -(-n // b):  # all that fit
        return np.asarray(weights.diagonal() + _unlimited(others.T, b)[-1])
    best = np.zeros_like(others)
    for _ in range(k - 1):
        best = _one_more(others, best, b)
    return np.asarray(weights.diagonal() + best[:, -1])


def _one_more(weights: Floats, best: Floats, b: int) -> Floats:
    """The heaviest choice of one step more than in `best`, among the first 1, .., n (last axis)."""
    chosen = weights.copy()
    chosen[..., b:] += best[..., :-b]
    return np.maximum.accumulate(chosen, axis=-1)


def _unlimited(weights: Floats, b: int) -> Floats:
    """The heaviest choice of steps among the first 0, .., n (first axis)."""
    best = np.zeros((len(weights) + 1, *weights.shape[1:]))
    for t, weight in enumerate(weights):
        best[t + 1] = np.maximum(best[t], weight + best[max(t + 1 - b, 0)])
    return best


def _heaviest(weights: Floats, b: int, k: int) -> tuple[float, list[int]]:
    """The largest sum of k weights at most, at least b apart, and the steps that attain it."""
    n = len(weights)
    if k >= -(-n // b):
        tables = [_unlimited(weights, b)] * (n + 1)
    else:
        tables = list(accumulate(range(k), lambda best, _: _one_more(weights, best, b), initial=np.zeros(n)))
        tables = [np.append(0.0, table) for table in tables]
    steps: list[int] = []
    t, left = n, len(tables) - 1
    while t > 0:
        if tables[left][t] == tables[left][t - 1]:
            t -= 1
        else:
            steps.append(t - 1)
            t, left = max(t - b, 0), left - 1
    return float(tables[-1][n]), steps[::-1]


# -- in bands --------------------------------------------------------------------------------------------------------

# Banded C: X = C^T C has the same bands, so participations far apart do not meet.


class BandedGram(NamedTuple):
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


def banded_bound(gram: BandedGram, pattern: Pattern) -> Bound:
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
    terms = banded_terms(gram, pattern)
    match pattern:
        case Listed():
            return largest(banded_squares(gram, visits(pattern)), terms)
        case Separated() | PerEpoch() if pattern.max_participations == 1:
            return from_sum(float(gram.diagonal(0).max()), terms, exact=True)
        case Separated(b=b):
            k = pattern.max_participations
            squared = _separated_bands(gram, b, k)
            exact = gram.num_bands <= 2 * b or squared <= _equidistant_bands(gram, b, k) * (1 + TOLERANCE)
            return from_sum(squared, terms, exact=exact)
        case PerEpoch(k=k, steps_per_epoch=s):
            return from_sum(_shuffled_bands(gram, k, s), terms, exact=gram.num_bands <= s + 1)
        case _:
            assert_never(pattern)


def banded_squares(gram: BandedGram, units: Visits) -> UnitSquares:
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


def _separated_bands(gram: BandedGram, b: int, k: int) -> float:
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
        return _unlimited_bands(weights, cross, b, free)
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


def _unlimited_bands(weights: Floats, cross: dict[int, Floats], b: int, free: int) -> float:
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


def _equidistant_bands(gram: BandedGram, b: int, k: int) -> float:
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


def _shuffled_bands(gram: BandedGram, k: int, s: int) -> float:
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


def banded_terms(gram: BandedGram, pattern: Pattern) -> int:
    return gram.num_bands + min(gram.num_bands, pattern.max_participations) + pattern.max_participations


# -- shuffled epochs -------------------------------------------------------------------------------------------------

# One step anywhere in each epoch: the worst steps are first or last ones, or nearly so.


_WINDOW = 8  # epochs whose choices are remembered: 2^window states


def two_point_bound(weights: Floats, k: int, s: int) -> float:
    """An upper bound of the largest sum of weights over pi x pi, with one step of each of k epochs of s steps in pi.

    Let o_e be the place of the step in epoch e, from 0 to s - 1. For e < f, the weight as a function of o_e and o_f is
    at most its bilinear interpolation between the four corners plus the largest excess over that; the same on
    the diagonal, with linear interpolation. The sum of all interpolations is linear in each o_e, so its maximum has
    every o_e at 0 or s - 1: 2^k choices, of which dynamic programming takes the best. The excess is 0 where the
    weights are convex in each place, as X is for convex Toeplitz c but for the rows that the end of the run cuts off.
    The last epoch, where the cut is felt most, is taken step by step, without interpolation.

    Choices of the last 8 epochs are remembered; older ones are charged at their worst.

    Args:
        weights: (n, n) symmetric, not negative, n = k s.
    Cost: O(n^2 + k 2^8 (k + s)) time.
    """
    place = np.linspace(0.0, 1.0, s) if s > 1 else np.zeros(1)
    diagonal = weights.diagonal().reshape(k, s)
    value, excess = np.zeros(()), 0.0
    for f in range(k - 1):
        block = weights[: f * s, f * s : (f + 1) * s].reshape(f, s, s)  # epoch e, place in e, place in f
        corners = block[:, [0, -1]][:, :, [0, -1]]
        plane = _between(_between(corners, place, 1), place, 2)
        excess += float(_positive(diagonal[f] - _between(diagonal[f, [0, -1]], place, 0)).max())
        excess += 2 * float(_positive(block - plane).max(axis=(1, 2)).sum())
        value = _advance(value, diagonal[f, [0, -1]], corners)
    block = weights[: (k - 1) * s, (k - 1) * s :].reshape(k - 1, s, s)
    corners = block[:, [0, -1]]
    beyond = _positive(block - _between(corners, place, 1)).max(axis=1).sum(axis=0)
    return excess + float(_advance(value, diagonal[k - 1] + 2 * beyond, corners).max())


def toeplitz_bound(c: Floats, k: int, s: int) -> float:
    """The same for Toeplitz C, without X.

    For j in epoch f, |X[i, j]| is at most h_f(j - i) = sum_{l < n - f s} |c_l c_{l+j-i}|, which cuts off no row that X
    has. As a function of two places, h_f(o_f - o_e + d s) exceeds its bilinear interpolation by no more than it
    exceeds the two lines between h_f(d s - s + 1), h_f(d s), h_f(d s + s - 1), plus a quarter of the dent where these
    three are not convex: along o_f - o_e = constant the interpolation is quadratic, and on these lines at both ends.

    Args:
        c: (n + s,) first coefficients of C.
    Cost: O(k n log n), by fast Fourier transforms.
    """
    c = np.abs(c)
    size = scipy.fft.next_fast_len(2 * len(c), real=True)
    transform = scipy.fft.rfft(c, size)
    rise = np.linspace(0.0, 1.0, s)[1:] if s > 1 else np.zeros(0)
    value, excess = np.zeros(()), 0.0
    for f in range(k):
        product = complex_product(transform, scipy.fft.rfft(c[: (k - f) * s], size).conj())
        h = scipy.fft.irfft(product, size)[: (f + 1) * s]
        distance = s * np.arange(f, 0, -1)[:, None]
        near, at, far = h[distance - s + 1], h[distance], h[distance + s - 1]
        above = np.concatenate([
            h[distance - np.arange(s)[1:]] - at - rise * (near - at),
            h[distance + np.arange(s)[1:]] - at - rise * (far - at),
        ], axis=1)  # fmt: skip
        excess += 2 * float(_positive(above).max(axis=1, initial=0.0).sum())
        excess += 2 * float(_positive(2 * at - near - far).sum()) / 4
        corners = np.concatenate([at, far, near, at], axis=1).reshape(f, 2, 2)
        value = _advance(value, h[[0, 0]], corners)
    return excess + float(value.max())


def convex_bound(k: int, s: int, gram: Callable[[Integers, Integers], Floats]) -> float:
    """The same for Toeplitz C with c >= 0 and c_1, c_2, .. convex, so that each h_f is: nothing exceeds the lines.

    Args:
        gram: (gaps, rows) -> sum_{l < rows} c_l c_{l + gap}, elementwise.
    Cost: 3 values of `gram` for each pair of epochs, and O(k 2^8).
    """
    value = np.zeros(())
    for f in range(k):
        rows = (k - f) * s
        gaps = s * np.arange(f, 0, -1)[:, None, None] + (s - 1) * np.array([[0, 1], [-1, 0]])
        values = gram(np.append(gaps.ravel(), 0), np.full(gaps.size + 1, rows))
        value = _advance(value, values[[-1, -1]], values[:-1].reshape(gaps.shape))
    return float(value.max())


def _advance(value: Floats, own: Floats, cross: Floats) -> Floats:
    """The best sums after one more epoch.

    Args:
        value: (2, .., 2) best sum for each choice in the remembered epochs, oldest first.
        own: (c,) weight of each choice in this epoch.
        cross: (f, 2, c) weight of a choice in each of the f earlier epochs with one in this.
    """
    known = value.ndim
    forgotten = cross[: len(cross) - known].max(axis=1).sum(axis=0)
    longer = value[..., None] + own + 2 * forgotten
    for i, pair in enumerate(cross[len(cross) - known :]):
        longer = longer + 2 * pair.reshape((2,) + (1,) * (known - 1 - i) + (-1,))
    return longer if known < _WINDOW else np.asarray(longer.max(axis=0))


def _between(ends: Floats, place: Floats, axis: int) -> Floats:
    """Linear interpolation along an axis of length 2, at places from 0 to 1."""
    low, high = np.take(ends, [0], axis=axis), np.take(ends, [1], axis=axis)
    shape = [1] * ends.ndim
    shape[axis] = -1
    at = place.reshape(shape)
    return low * (1 - at) + high * at


def _positive(values: Floats) -> Floats:
    return np.maximum(values, 0.0)


# -- a semidefinite program ------------------------------------------------------------------------------------------

# Gram matrices of mixed signs: the small semidefinite program of each pattern, from both sides.
#
#     sens(pi)^2 = max <X_pi,pi, Y> over Y >= 0 with Y_ii <= 1        (exact for gradients of |pi| dimensions or more)
#                = min sum(y) over y with Diag(y) - X_pi,pi >= 0
#
# Any y of the second line is an upper bound: that is what is returned. The first is climbed by Y = V V^T with unit
# rows, one row at a time [Burer and Monteiro 2003]; a stationary V gives y_i = <(X V)_i, V_i>, and the least
# eigenvalue of Diag(y) - X says how much must be added to each y_i.


PROGRAM_STEPS = 4096
PROGRAM_PATTERNS = 2000  # looked at
MAX_WORK = 2**15  # steps squared, of all programs that are solved: about a second
MAX_SIZE = 64  # steps in a pattern
GAP = 1e-9  # relative, of the squares, below which both sides are one
_SWEEPS = 400


def refined(strategy: Strategy, pattern: Pattern, found: Bound) -> Bound:
    """The bound, or a smaller one where the patterns are few: those of largest sum |X| first, while it matters.

    Cost: O(n k) for each of at most 2000 patterns, and a second for as many programs as fit.
    """
    k = pattern.max_participations
    if found.exact or k > MAX_SIZE or strategy.n > PROGRAM_STEPS or pattern.count(PROGRAM_PATTERNS) > PROGRAM_PATTERNS:
        return found
    grams = []
    for steps in dict.fromkeys(pattern.enumerate()):
        columns = strategy.columns(steps)
        grams.append(columns.T @ columns)
    sums = np.array([np.abs(X).sum() for X in grams])
    upper = lower = 0.0
    order = np.argsort(-sums).tolist()
    for count, i in enumerate(order):
        if sums[i] <= upper or count * k * k >= MAX_WORK:
            upper = max(upper, float(sums[i]))
            break
        reached, bound = _aligned(grams[i]) or gram_program(grams[i])
        upper, lower = max(upper, min(bound, float(sums[i]))), max(lower, reached)
    made = from_sum(upper, strategy.num_rows + k * k, exact=upper <= lower * (1 + GAP))
    return made if made.exact or made.value < found.value else found


def _aligned(X: Floats) -> tuple[float, float] | None:
    """Both sides where signs s exist with s_i s_j X_ij >= 0 but for rounding: sum |X|."""
    signs = np.where(X[0] < 0, -1.0, 1.0)
    reached, bound = float((X * signs * signs[:, None]).sum()), float(np.abs(X).sum())
    return (reached, bound) if reached >= bound * (1 - TOLERANCE) else None


def gram_program(X: Floats) -> tuple[float, float]:
    """Max <X, Y> over Y >= 0 with Y_ii <= 1, for X >= 0 of m rows: a value that is reached, and an upper bound.

    Cost: at most 400 sweeps of O(m^2 sqrt(m)).
    """
    m = len(X)
    rank = int(sqrt(2 * m)) + 2  # enough for every stationary point that is stable to be the maximum
    V = np.random.default_rng(0).standard_normal((m, rank))
    V /= np.linalg.norm(V, axis=1)[:, None]
    others = X - np.diag(X.diagonal())
    reached, bound = 0.0, float(np.abs(X).sum())
    for sweep in range(_SWEEPS):
        for i in range(m):
            pull = others[i] @ V
            length = sqrt(pull @ pull)
            if length > 0:
                V[i] = pull / length
        if sweep % 20 == 19 or sweep == 7:
            y = np.einsum("ij,ij->i", X @ V, V)
            slack = np.diag(y) - X
            error = m * 2.0**-50 * float(np.abs(slack).sum(axis=1).max())  # of the eigenvalue, as it is computed
            missing = max(0.0, error - float(np.linalg.eigvalsh(slack)[0]))
            # rows may be longer than 1 by a rounding each
            reached = max(reached, float(y.sum()) * (1 - m * 2.0**-50))
            bound = min(bound, float(y.sum()) + m * missing)
            if bound <= reached * (1 + GAP / 10):
                break
    return reached, bound
