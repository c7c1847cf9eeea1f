"""A sensitivity as a number that is never below the true one; how much more float32 lets a unit move the release."""

import math
from dataclasses import dataclass
from fractions import Fraction
from math import inf, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.formats import html_table
from anyorder.patterns import Listed
from anyorder.strategy.base import Strategy

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
# the file of the kind; here is what they share. `anyorder.strategy.sensitivity.rounding` makes one number of them.


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
