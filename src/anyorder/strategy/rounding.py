"""Coefficients are rounded to float32 when noise is made: how much more a unit can then move the release.

With K~ the coefficients as they are used, the release is C~ G + std Z for the C~ with K~ C~ = I. One unit moves it by
C~ D, D = sum_t e_t u_t^T over its k steps at most. Two ways to hold || C~ D || against sens(C):

- By columns. If || (C~ - C) e_t || <= r || C e_t || for every t, then with orthogonal u_t allowed in sens(C)

      || (C~ - C) D || <= r sum_t || C e_t || <= r sqrt(k) ( sum_t || C e_t ||^2 )^(1/2) <= r sqrt(k) sens(C).

- As a whole. K~ = K + E gives C~ = (I + C E)^-1 C, so that || C~ D || <= || C D || / (1 - w) for w >= || C E ||, and
  || C E ||^2 is at most the largest row sum of |C| |E| times its largest column sum.

Under secret coins a claim rests on more of C than its sensitivity: on the products of columns of |C|, see
`anyorder.accounting.amplification`. There C~ must be T C' with two properties. (1) Every entry of |C'| is at most
(1 + e) times that of |C|: so are, with (1 + e)^2, the products, and delta is monotone in each of them. (2) ||T|| <= 1 +
w, and T looks at no later step: then C~ G + std Z is made of C' G + std / (1 + w) Z by T and by noise of its own, of
covariance std^2 (I - T T^T / (1 + w)^2), which is post-processing. So noise that is (1 + e)(1 + w) times as large
covers the rounding. As a whole, T = (I + C E)^-1 and C' = C. By columns, T = I + (C~ - C) C^-1 with

    || (C~ - C) C^-1 || <= r ( sum_t || C e_t ||^2 )^(1/2) || K ||
"""

from math import inf, sqrt
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import ArgumentError, PlanError
from anyorder.patterns import Participation
from anyorder.strategy.base import Strategy
from anyorder.strategy.blt import BLT
from anyorder.strategy.low_rank import BandedLowRank
from anyorder.strategy.registry import Structure, kind_of
from anyorder.strategy.restarted import RestartedBLT
from anyorder.strategy.toeplitz import accurate_inverse_series, check_series
from anyorder.strategy.tree import Tree

Floats = NDArray[np.float64]


UNIT = 2.0**-24  # half the distance from 1 to the next float32
MOST = 0.01  # more than this is no rounding


class _Change(NamedTuple):
    columns: float
    whole: float = 0.0


def rounding(strategy: Strategy, participation: Participation) -> float:
    """By how much, relatively, the sensitivity of the noise in float32 coefficients may exceed sens(C).

    Returns: 0 where every coefficient is a float32 (independent noise, vanilla trees); else about 1e-7, times the root
        of the number of participations, and for regenerated trees 5e-7 times the root of n log n.
    Guarantee: sens(C~, participation) <= sens(C, participation) (1 + rounding); and where the participation is drawn by
        secret coins, its delta with C~ and std (1 + rounding) is at most that with C and std.
    Cost: O(n) for Toeplitz C, O(n^3) for Dense and BandedLowRank, else about that of one pass over the parameters; for
        secret coins also O(n^2) for RestartedBLT and trees.
    Raises: PlanError where coefficients leave the range of float32, or C is so ill-conditioned that they matter.
    """
    with np.errstate(all="ignore"):
        try:
            change = _change(strategy)
            hidden = _under_coins(strategy) if participation.secret else 0.0
        except ArgumentError:  # what is left of a parameter, 0 or infinity, is none
            change, hidden = _Change(inf), inf
    result = (1 + change.whole) * (1 + change.columns * sqrt(participation.max_participations)) - 1
    result = max(result, hidden)  # the first is for those who know the coins
    if not result <= MOST:
        raise PlanError(
            f"the noise of {strategy!r} cannot be made in float32: rounding its coefficients could change the "
            f"sensitivity by {result:.1e}, at most {MOST} is allowed; use parameters of ordinary size, or a C that is "
            "better conditioned"
        )
    return result * (1 + 1e-6) + 1e-15 if result else 0.0


def _change(strategy: Any) -> _Change:
    structure = kind_of(strategy).structure
    match structure:
        case Structure.IDENTITY:
            return _Change(0.0)
        case Structure.RESCALED:
            inner = _change(strategy.strategy)
            step = float(np.abs(strategy.scales / _rounded(strategy.scales) - 1).max())
            return _Change(inner.columns + step + inner.columns * step, inner.whole)
        case Structure.TREE:
            return _of_tree(strategy)
        case Structure.RESTARTED:
            return _Change(_of_restarted(strategy))
        case Structure.BANDED:
            squares = np.square(_rounded(strategy.bands) - strategy.bands).sum(axis=0)
            return _Change(_root(squares / strategy.column_norms_squared()))
        case Structure.BUFFERED:
            made = BLT(_rounded_decays(strategy.decays), _rounded(strategy.scales), strategy.n)
            return _of_series(strategy.toeplitz_coefficients(), made.toeplitz_coefficients())
        case Structure.TOEPLITZ_BANDED:
            return _of_series(strategy.coefficients, _rounded(strategy.coefficients))
        case Structure.TOEPLITZ:
            g = check_series("coefficients", _trimmed(_rounded(strategy.noising_coefficients())), strategy.n)
            return _of_series(strategy.toeplitz_coefficients(), accurate_inverse_series(g, strategy.n))
        case Structure.DENSE:
            C, K = strategy.matrix(), strategy.noising_matrix()
            return _Change(0.0, _resolvent(_norm(C, _rounded(K) - K) + _inversion(C, K)))
        case Structure.LOW_RANK:
            C, K = strategy.matrix(), strategy.noising_matrix()
            used = BandedLowRank(_rounded(strategy.bands), _rounded(strategy.left), _rounded(strategy.right)).matrix()
            columns = _root(np.square(used - C).sum(axis=0) / strategy.column_norms_squared())
            return _Change(columns, _resolvent(2 * _inversion(C, K) * _norm(C, K)))
        case _:
            assert_never(structure)


def _under_coins(strategy: Any) -> float:
    """(1 + e) (1 + w) - 1, see above."""
    structure = kind_of(strategy).structure
    match structure:
        case Structure.IDENTITY:
            return 0.0
        case Structure.RESCALED:
            inner, own = _under_coins(strategy.strategy), _by_entry(1 / _rounded(strategy.scales), 1 / strategy.scales)
            return inner + own + inner * own
        case Structure.BANDED:
            return _by_entry(_rounded(strategy.bands), strategy.bands)
        case Structure.TOEPLITZ_BANDED:
            return _by_entry(_rounded(strategy.coefficients), strategy.coefficients)
        case Structure.RESTARTED:  # T has a block for each epoch, as C has
            return max(_as_operator(epoch, _change(epoch), _inverse_norm(epoch)) for epoch in _epochs(strategy))
        case Structure.BUFFERED | Structure.TOEPLITZ:
            inverse = float(np.abs(strategy.noising_coefficients()).sum())
            return _as_operator(strategy, _change(strategy), inverse)
        case Structure.DENSE | Structure.LOW_RANK | Structure.TREE:
            change = _change(strategy)
            return _as_operator(strategy, change, _inverse_norm(strategy) if change.columns else 0.0)
        case _:
            assert_never(structure)


def _as_operator(strategy: Strategy, change: _Change, inverse: float) -> float:
    """At least || C~ C^-1 || - 1.

    Args:
        inverse: at least || K ||.
    """
    frobenius = sqrt(float(strategy.column_norms_squared().sum()))
    return (1 + change.whole) * (1 + change.columns * frobenius * inverse) - 1


def _by_entry(used: Floats, exact: Floats) -> float:
    """The largest relative change of a number; infinite where 0 became another."""
    changes = np.where(used == exact, 0.0, np.abs(used / exact - 1))
    return float(changes.max(initial=0.0)) if np.isfinite(changes).all() else inf


def _inverse_norm(strategy: Strategy) -> float:
    """At least || K ||."""
    K = np.abs(strategy.noising_matrix())
    return sqrt(float(K.sum(axis=1).max()) * float(K.sum(axis=0).max()))


def _epochs(strategy: RestartedBLT) -> list[RestartedBLT]:
    """A strategy for each epoch."""
    n, s = strategy.n, strategy.steps_per_epoch
    return [
        RestartedBLT(
            strategy.decays[e : e + 1], strategy.scales[e : e + 1], strategy.totals[e : e + 1],
            strategy.shares[e : e + 1], min(s, n - e * s), s,
        )
        for e in range(strategy.num_epochs)
    ]  # fmt: skip


def _rounded(values: Floats) -> Floats:
    return values.astype(np.float32).astype(np.float64)


def _trimmed(series: Floats) -> Floats:
    """Without the zeros at its end, but one number long at least."""
    return series[: max(1, int(np.flatnonzero(series).max(initial=0)) + 1)]


def _rounded_decays(decays: Floats) -> Floats:
    """1 - decay is what a step uses."""
    return 1 - _rounded(1 - decays)


def _root(squares: Floats) -> float:
    return sqrt(float(squares.max())) if np.isfinite(squares).all() else inf


def _of_series(c: Floats, used: Floats) -> _Change:
    """Toeplitz C: column t has the first n - t coefficients."""
    return _Change(_root(np.cumsum(np.square(used - c)) / np.cumsum(np.square(c))))


def _inversion(C: Floats, K: Floats) -> float:
    """At least || |K C - I| || or || |C K - I| || of an inverse by back substitution [Higham 2002, section 14.2].

    Where C was given and K was made, C times the error of K is such a residual; the other way round, one of it and a K.
    """
    return len(C) * 2.0**-52 * _norm(C, K)


def _resolvent(w: float) -> float:
    """1 / (1 - w) - 1."""
    return w / (1 - w) if w < 1 else inf


def _norm(C: Floats, E: Floats) -> float:
    """At least || |C| |E| ||: the root of its largest row sum times its largest column sum."""
    C, E = np.abs(C), np.abs(E)
    return sqrt(float((C @ E.sum(axis=1)).max()) * float((C.sum(axis=0) @ E).max()))


def _of_tree(strategy: Tree) -> _Change:
    """A tree of L levels over its leaves.

    Vanilla: all coefficients are 1 and -1. Online, with its estimates kept: a node's estimate is a y + (1 - a) (left +
    right) with 1 - a exact for a float32 a >= 1/2, and estimates sums of gradients without bias, so that K~ C = I.

    Full, with its estimates kept: from the leaves up, a node is (left + right) / (l + r), and its row of Z
    (r left - l right) / ((l + r) spread), for the float32 l, r near two shares whose sum is 1. An entry of C~ is that
    of C times at most L + 2 factors within UNIT of 1: so are the columns.

    Otherwise |E| <= UNIT |K|, also at the one step after a completed block. A column of |K| sums to at most 3, since
    a node's weight in the prefixes rises once and falls from then on (full: 2 spread <= sqrt 2); at most L + 1 nodes,
    with weights of at most sqrt 2 where K sums to as much, are over a step; and the rows of |K| under a node of m steps
    sum to at most 8 m. So || |C| |K| ||^2 <= 3 (L + 1) 8 n.
    """
    levels = max(tree.level for tree in strategy.subtrees)
    completed = any(strategy.completion)
    if strategy.estimator == "vanilla" or (strategy.estimator == "online" and strategy.state_rows and not completed):
        return _Change(0.0)
    if strategy.estimator == "full" and strategy.state_rows:
        return _Change(1.01 * UNIT * (levels + 2))
    return _Change(0.0, _resolvent(1.01 * UNIT * sqrt(24 * strategy.n * (levels + 1))))


def _of_restarted(strategy: RestartedBLT) -> float:
    """The largest || (C~ - C) e_t || / || C e_t ||, by the energy that an impulse at step t leaves behind.

    C turns noise y into z: x = s . u + y / d, z = (x + v q) / own, then u <- decays u + y / d, q <- q + gain z, with d
    the column's factor. Next to its state stands the difference from that of the rounded system, so that what is
    small is not what is left of two large numbers. Cost: O(s m^2) for epochs of s steps.
    """
    k, s, m = strategy.num_epochs, strategy.steps_per_epoch, strategy.num_buffers + 1
    tables = strategy.tables()  # own, v, gain, factor of each step
    padded = np.ones((4, k * s))
    padded[:, : strategy.n] = tables
    exact = padded.reshape(4, k, s)
    used = _rounded(exact)
    real = (np.arange(k * s) < strategy.n).reshape(k, s)
    rounded = _rounded_decays(strategy.decays), _rounded(strategy.scales)
    worst = np.zeros(k)
    energy = np.zeros((k, 2 * m, 2 * m))  # quadratic form: of all later z, from both states
    for i in reversed(range(s)):
        A, b, h, g = _inverse_system(strategy.decays, strategy.scales, exact[:, :, i])
        A_used, b_used, h_used, g_used = _inverse_system(*rounded, used[:, :, i])
        B = np.concatenate([b, b_used - b], axis=1)
        H = np.concatenate([h_used - h, h_used], axis=1)
        J = np.block([[A, np.zeros_like(A)], [A_used - A, A_used]])
        own = np.square(g_used - g) + np.einsum("ki,kij,kj->k", B, energy, B)
        worst = np.maximum(worst, np.where(real[:, i], own, 0.0))
        energy = H[:, :, None] * H[:, None, :] + J.transpose(0, 2, 1) @ energy @ J
        energy[~real[:, i]] = 0.0
    return _root(worst / np.square(strategy.shares))


def _inverse_system(decays: Floats, scales: Floats, step: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """A, b, h, g of each epoch: z = h . (u, q) + g y, (u, q) <- A (u, q) + b y."""
    own, v, gain, factor = step
    k, m = decays.shape
    h = np.concatenate([scales, v[:, None]], axis=1) / own[:, None]
    g = 1 / (factor * own)
    A = np.zeros((k, m + 1, m + 1))
    A[:, np.arange(m), np.arange(m)] = decays
    A[:, m] = gain[:, None] * h
    A[:, m, m] += 1.0
    b = np.concatenate([np.repeat(1 / factor[:, None], m, axis=1), (gain * g)[:, None]], axis=1)
    return A, b, h, g
