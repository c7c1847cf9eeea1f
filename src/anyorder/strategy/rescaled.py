"""A strategy with every column divided by its own scale: noise that grows or shrinks over time."""

from math import inf, nextafter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError, PlanError
from anyorder.patterns import Groups, Listed, Participation, Pattern
from anyorder.strategy import banded, blt, toeplitz
from anyorder.strategy.banded import Banded
from anyorder.strategy.base import DENSE_STEPS, Recurrence, Row, State, Strategy, Vector
from anyorder.strategy.blt import BLT
from anyorder.strategy.fitting import (
    Valued,
    descend,
    describes_all,
    disjoint,
    dot,
    exps,
    inverse_of_lower,
    product,
    times,
)
from anyorder.strategy.independent import Independent
from anyorder.strategy.sensitivity import (
    BandedGram,
    Bound,
    Change,
    UnitSquares,
    Visits,
    banded_bound,
    banded_squares,
    by_entry,
    from_sum,
    gram_bound,
    largest,
    matrix_bound,
    matrix_units,
    roots,
    rounded,
    visits,
)
from anyorder.strategy.toeplitz import Toeplitz, ToeplitzBanded
from anyorder.workload import Workload

Floats = NDArray[np.float64]


@final
class Rescaled(Strategy):
    """C diag(scales)^-1: step t's noise is scales[t] times that of the given strategy, X = D^-1 (C^T C) D^-1.

    Args:
        strategy: C.
        scales: (n,) above 0.
    """

    def __init__(self, strategy: Strategy, scales: ArrayLike) -> None:
        self.strategy = strategy
        self.scales: Floats = checks.array("scales", scales, ndim=1)
        if self.scales.shape != (strategy.n,) or (self.scales <= 0).any():
            raise ArgumentError(f"scales must be n={strategy.n} numbers above 0, got {self.scales}")

    @property
    def n(self) -> int:
        """Number of steps."""
        return self.strategy.n

    @property
    def num_rows(self) -> int:
        """Number of rows of C and of Z."""
        return self.strategy.num_rows

    @property
    def restart_period(self) -> int | None:
        """The restart period of the strategy: scales keep blocks apart."""
        return self.strategy.restart_period

    def matrix(self) -> Floats:
        """C diag(scales)^-1, (num_rows, n)."""
        return np.asarray(self.strategy.matrix() / self.scales)

    def noising_matrix(self) -> Floats:
        """diag(scales) K, (n, num_rows)."""
        return np.asarray(self.scales[:, None] * self.strategy.noising_matrix())

    def columns(self, steps: ArrayLike) -> Floats:
        """C[:, steps], each column over its scale."""
        return np.asarray(self.strategy.columns(steps) / self.scales[np.asarray(steps)])

    def column_norms_squared(self) -> Floats:
        """(n,) squared norms of the columns."""
        return np.asarray(self.strategy.column_norms_squared() / np.square(self.scales))

    def prefix_variance(self) -> Floats:
        """(n,) variance of each prefix sum's noise: O(n^2) time, and O(n) memory where C is Toeplitz."""
        if not isinstance(self.strategy, Toeplitz):
            return super().prefix_variance()
        g = self.strategy.noising_coefficients()[::-1]
        sums, variance = np.zeros(self.n), np.empty(self.n)
        for t in range(self.n):
            sums[: t + 1] += self.scales[t] * g[self.n - 1 - t :]
            variance[t] = sums @ sums
        return variance

    def recurrences(self, steps: NDArray[np.int64]) -> Recurrence:
        """The strategy's, with what comes out scaled."""
        F, G, h, g = self.strategy.recurrences(steps)
        scales = self.scales[steps]
        return Recurrence(F, G, h * scales[:, None], g * scales)

    def init(self, size: int) -> State:
        """The state of the strategy."""
        return self.strategy.init(size)

    def step(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        """The strategy's noise times scales[t]."""
        noise, state = self.strategy.step(t, state, row)
        return noise * np.float32(self.scales[t]), state

    @property
    def state_rows(self) -> int:
        """The number of vectors that the strategy keeps."""
        return self.strategy.state_rows

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "rescaled", "strategy": {..}, "scales": [..]}."""
        return {"kind": "rescaled", "strategy": self.strategy.to_dict(), "scales": self.scales.tolist()}

    def __repr__(self) -> str:
        return f"Rescaled({self.strategy!r})"


# -- sensitivity -----------------------------------------------------------------------------------------------------

# C diag(s)^-1: X' = D^-1 X D^-1, from whatever the structure of C gives.


def bound(strategy: Rescaled, pattern: Pattern) -> Bound:
    """The sensitivity of C diag(s)^-1.

    Banded C stays banded. For Toeplitz C, listed patterns go unit by unit, all others by X itself, for n up to
    4096; beyond, sens(C) / min(s) is an upper bound, since u_t / s_t is no longer than 1 / min(s).
    """
    inner, weights = _flat(strategy)
    gram = _banded(inner, weights)
    if gram is not None:
        return banded_bound(gram, pattern)
    if pattern.max_participations == 1:
        norms = strategy.column_norms_squared()
        if isinstance(pattern, Listed):
            norms = norms[pattern.steps]  # a step may be empty
        return from_sum(float(norms.max()), _terms(strategy, pattern), exact=True)
    if isinstance(pattern, Listed) and isinstance(inner, Toeplitz):
        return largest(_unit_squares(inner, weights, visits(pattern)), _terms(strategy, pattern))
    if isinstance(inner, Toeplitz):
        if strategy.n > DENSE_STEPS:
            whole = blt.bound(inner, pattern) if type(inner) is BLT else toeplitz.bound(inner, pattern)
            return Bound(nextafter(whole.value * float(weights.max()), inf), exact=False)
        X = toeplitz.gram_matrix(inner.toeplitz_coefficients()) * weights * weights[:, None]
        return gram_bound(X, pattern, terms=strategy.n)
    return matrix_bound(strategy, pattern)


def units(strategy: Rescaled, listed: Listed) -> Floats:
    """Of each unit: sum |X'| over its steps squared."""
    inner, weights = _flat(strategy)
    gram = _banded(inner, weights)
    if gram is not None:
        return roots(banded_squares(gram, visits(listed)).upper, _terms(strategy, listed))
    if isinstance(inner, Toeplitz):
        return roots(_unit_squares(inner, weights, visits(listed)).upper, _terms(strategy, listed))
    return matrix_units(strategy, listed)


def _flat(strategy: Rescaled) -> tuple[Strategy, Floats]:
    """The strategy inside, and 1 / scales, also where scales are nested."""
    inner: Strategy = strategy
    weights = np.ones(strategy.n)
    while type(inner) is Rescaled:
        weights, inner = weights / inner.scales, inner.strategy
    return inner, weights


def _banded(inner: Strategy, weights: Floats) -> BandedGram | None:
    """X' if it is banded."""
    if type(inner) is Independent:
        return BandedGram(inner.n, 1, lambda gaps, steps: weights[steps] ** 2)
    if type(inner) is Banded:
        X = banded.gram_of(inner)
    elif type(inner) is ToeplitzBanded:
        X = toeplitz.gram_of(inner)
    else:
        return None
    return BandedGram(
        X.n, X.num_bands, lambda gaps, steps: X.entry(gaps, steps) * weights[steps] * weights[steps + gaps]
    )


def _unit_squares(inner: Toeplitz, weights: Floats, units: Visits) -> UnitSquares:
    if type(inner) is BLT and blt.is_positive(inner):
        return blt.unit_squares(inner, units, weights)
    return toeplitz.unit_squares(inner.toeplitz_coefficients(), units, weights)


def _terms(strategy: Strategy, pattern: Pattern) -> int:
    return strategy.n + pattern.max_participations


# -- fit -------------------------------------------------------------------------------------------------------------

# Time rescaling: a factor for the noise of every step, where it is known which steps one unit takes.


def rescale(strategy: Strategy, workload: Workload, participation: Participation) -> Rescaled:
    """C diag(s)^-1 with the s of least mean-square loss: 2 to 6 % less error than C for one number a step.

        loss = s^T H s * max_pi sum_{t,u in pi} |X_tu| / (s_t s_u),   H = A^T A o K K^T,   X = C^T C

    over s > 0, scaled so that every pattern has the same sensitivity; L-BFGS in log s, from s = 1.

    Args:
        strategy: square, of at most 4096 steps.
        workload: A.
        participation: whose patterns are disjoint: SingleEpoch, FixedOrder, a KnownOrder in which units do not mix.
    Cost: O(n^3) once, O(n^2) an iteration.
    """
    n = strategy.n
    if not describes_all(participation):
        raise PlanError(f"rescaling needs to know which steps one unit takes (FixedOrder), got {participation!r}")
    if n > DENSE_STEPS or strategy.num_rows != n:
        raise PlanError(f"rescaling takes square strategies of at most {DENSE_STEPS} steps, got {strategy!r}")
    K, A = strategy.noising_matrix(), workload.matrix()
    C = strategy.matrix() if isinstance(strategy, Toeplitz) else inverse_of_lower(K)
    groups = disjoint(participation)
    X = np.abs(product(C.T, C))
    loss = _RescaledLoss(product(A.T, A) * product(K, K.T), [X[g[:, :, None], g[:, None, :]] for g in groups], groups)
    x, _ = descend(loss, np.zeros(n), restarts=1, gain=1e-9)
    return Rescaled(strategy, rounded(loss.scales(x)[0]))


def normalised(strategy: Strategy) -> Rescaled:
    """The strategy with columns of norm 1: for orders in which any steps far enough apart may be one unit's."""
    return Rescaled(strategy, rounded(np.sqrt(strategy.column_norms_squared())))


class _RescaledLoss:
    """s'^T H s' over x = log s, with s' = s times the root of the pattern's sum."""

    def __init__(self, H: Floats, X: list[Floats], groups: Groups) -> None:
        self.H, self.X, self.groups = H, X, groups

    def scales(self, x: Floats) -> tuple[Floats, list[Floats]]:
        """s', and for each group the shares of the steps in their pattern's sum."""
        result, shares, own = np.empty_like(x), [], exps(x)
        for steps, X in zip(self.groups, self.X, strict=True):
            s = own[steps]
            parts = X / (s[:, :, None] * s[:, None, :])
            sums = parts.sum(axis=(1, 2))
            shares.append(parts.sum(axis=2) / sums[:, None])
            result[steps] = s * np.sqrt(sums)[:, None]
        return result, shares

    def __call__(self, x: Floats) -> Valued:
        s, shares = self.scales(x)
        moved = times(self.H, s)
        along = 2 * moved * s
        gradient = along.copy()
        for steps, share in zip(self.groups, shares, strict=True):
            gradient[steps] -= share * along[steps].sum(axis=1)[:, None]
        return dot(s, moved), gradient


# -- rounding --------------------------------------------------------------------------------------------------------


def change(strategy: Rescaled, inner: Change) -> Change:
    """`inner` of the strategy inside, and every column over a scale that is rounded."""
    step = float(np.abs(strategy.scales / rounded(strategy.scales) - 1).max())
    return Change(inner.columns + step + inner.columns * step, inner.whole)


def under_coins(strategy: Rescaled, inner: float) -> float:
    """`inner` of the strategy inside, times entries over scales that are rounded."""
    own = by_entry(1 / rounded(strategy.scales), 1 / strategy.scales)
    return inner + own + inner * own
