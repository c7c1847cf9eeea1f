"""Buffered linear Toeplitz: C is a sum of m geometric decays, and so is C^-1; noise from m buffers."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder._numerics import complex_product
from anyorder.checks import final
from anyorder.errors import ArgumentError, PlanError
from anyorder.patterns import Listed, Participation, Pattern, PerEpoch, Separated
from anyorder.strategy import toeplitz
from anyorder.strategy.base import DENSE_STEPS, Recurrence, Row, State, Vector
from anyorder.strategy.fitting import (
    OBJECTIVES,
    Valued,
    check_optimisable,
    descend,
    expm1s,
    exps,
    log,
    logs,
    powers,
    stride,
    times,
)
from anyorder.strategy.sensitivity import (
    Bound,
    Change,
    UnitSquares,
    Visits,
    better,
    convex_bound,
    from_sum,
    largest,
    of_series,
    roots,
    rounded,
    rounded_decays,
    visits,
)
from anyorder.strategy.toeplitz import Problem, Toeplitz, reciprocal, repeated
from anyorder.strategy.variances import Way, by_recurrence, joined
from anyorder.workload import GivenWorkload, Workload

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@final
class BLT(Toeplitz):
    """C Toeplitz with c_0 = 1, c_t = sum_i scales_i decays_i^(t-1) [McMahan et al. 2024; Dvijotham et al. 2024].

    Noise from m buffers u, O(m d) a step whatever n:

        y_t = z_t - scales . u_t,      u_{t+1} = decays * u_t + y_t,      u_0 = 0

    so C^-1 is a BLT too, with the eigenvalues of diag(decays) - 1 scales^T as decays.

    Args:
        decays: (m,) in [-1, 1].
        scales: (m,).
        n: number of steps; a run may stop earlier.
    """

    _steps_alike = True

    def __init__(self, decays: ArrayLike, scales: ArrayLike, n: int) -> None:
        super().__init__(n)
        self.decays: Floats = checks.array("decays", decays, ndim=1)
        self.scales: Floats = checks.array("scales", scales, ndim=1)
        if self.decays.shape != self.scales.shape:
            raise ArgumentError(
                f"decays and scales must be equally many, got {len(self.decays)} and {len(self.scales)}"
            )
        if (np.abs(self.decays) > 1).any():
            raise ArgumentError(f"decays must lie in [-1, 1], or C grows without bound, got {self.decays}")

    @property
    def num_buffers(self) -> int:
        """Number of buffers m."""
        return len(self.decays)

    def toeplitz_coefficients(self, m: int | None = None) -> Floats:
        """(m,) 1, then sums of powers: O(m num_buffers)."""
        m = self.n if m is None else m
        block = int(np.sqrt(m)) + 1  # decay^(block j + i) = (decay^block)^j decay^i: two short tables of powers
        decays = self.decays.tolist()
        inner = np.array([[decay**i for decay in decays] for i in range(block)])
        outer = self.scales * np.array([[decay ** (block * j) for decay in decays] for j in range(-(-m // block))])
        return np.concatenate([[1.0], _tabled(outer, inner)])[:m]

    def noising_coefficients(self, m: int | None = None) -> Floats:
        """(m,) 1, then -scales . M^(t-1) 1 with M = diag(decays) - 1 scales^T: O(m num_buffers)."""
        m = self.n if m is None else m
        return np.concatenate([[1.0], _impulse(-self.scales, self._feedback(), np.ones(self.num_buffers), m)])[:m]

    def _feedback(self) -> Floats:
        """M: how the buffers move when the noise that they make is fed back."""
        return system(self.decays, self.scales).F

    def _prefix_system(self) -> tuple[Floats, Floats]:
        """q, F with q . F^(t-1) 1 = g_0 + .. + g_t for t >= 1: the buffers and the running sum."""
        m = self.num_buffers
        F = np.zeros((m + 1, m + 1))
        F[:m, :m] = self._feedback()
        F[m, :m] = -self.scales
        F[m, m] = 1.0
        return F[m].copy(), F

    def inverse(self) -> "BLT":
        """The BLT that C^-1 is.

        Raises: ArgumentError if its decays are complex or beyond [-1, 1]; the strategy itself streams all the same.
        """
        decays, vectors = np.linalg.eig(self._feedback())
        if np.iscomplexobj(decays):
            raise ArgumentError(f"the inverse of this BLT must have real decays, got {decays}")
        order = np.argsort(-decays)
        scales = -(self.scales @ vectors) * np.linalg.solve(vectors, np.ones(self.num_buffers))
        return BLT(decays[order], scales[order], self.n)

    def prefix_variance(self) -> Floats:
        """(n,) in O(n num_buffers); see `last_prefix_variance` for large n."""
        q, F = self._prefix_system()
        sums = np.concatenate([[1.0], _impulse(q, F, np.ones(len(q)), self.n)])[: self.n]
        return np.cumsum(np.square(sums))

    def last_prefix_variance(self) -> float:
        """Variance of the last prefix sum, which is the largest: closed form, O(m^3 log n)."""
        q, F = self._prefix_system()
        return float(1 + _energies(q, F, self.n - 1).sum())

    def recurrences(self, steps: NDArray[np.int64]) -> Recurrence:
        """State: the buffers."""
        F, G, h, g = system(self.decays, self.scales)
        return repeated(F, G, h, float(g), len(steps))

    def init(self, size: int) -> State:
        """Empty buffers."""
        checks.integer("size", size, low=0)
        return tuple(np.zeros(size, dtype=np.float32) for _ in range(self.num_buffers))

    def step(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        """Make the noise of a step in one pass over the buffers.

        The loss 1 - decay, not the decay, is rounded to float32: a decay within 1e-8 of 1 is not 1.
        """
        noise = row(t).copy()
        for scale, buffer in zip(self.scales, state, strict=True):
            noise -= np.float32(scale) * buffer
        losses = (1 - self.decays).astype(np.float32)
        return noise, tuple(buffer + (noise - loss * buffer) for loss, buffer in zip(losses, state, strict=True))

    @property
    def state_rows(self) -> int:
        """The buffers."""
        return self.num_buffers

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "blt", "decays": [..], "scales": [..], "n": n}."""
        return {"kind": "blt", "decays": self.decays.tolist(), "scales": self.scales.tolist(), "n": self.n}

    def __repr__(self) -> str:
        return f"BLT(num_buffers={self.num_buffers}, n={self.n})"


def system(decays: NDArray[Any], scales: NDArray[Any]) -> Recurrence:
    """The recurrence of a BLT, or of many: (.., m) decays and scales, which may be complex."""
    m = decays.shape[-1]
    F = np.repeat(-scales[..., None, :], m, axis=-2)
    F[..., np.arange(m), np.arange(m)] += decays
    return Recurrence(F, np.ones_like(decays), -scales, np.ones_like(decays[..., 0]))


def _impulse(q: Floats, F: Floats, v: Floats, length: int) -> Floats:
    """(length,) q . F^t v for t = 0, 1, .., in two short sequences of powers: O(length m) in one product."""
    block = int(np.sqrt(length)) + 1
    inner = np.empty((block, len(q)))
    for i in range(block):
        inner[i] = q
        q = times(F.T, q)
    jump = _power(F[None], block)[0]
    outer = np.empty((-(-length // block), len(v)))
    for j in range(len(outer)):
        outer[j] = v
        v = times(jump, v)
    return _tabled(outer, inner)[:length]


def _tabled(outer: Floats, inner: Floats) -> Floats:
    """The sums over buffers of outer_j inner_i, j by j."""
    table = np.zeros((len(outer), len(inner)))
    for own, within in zip(outer.T, inner.T, strict=True):
        table += own[:, None] * within
    return table.ravel()


def _energies(q: Floats, F: Floats, length: int) -> Floats:
    """sum_{t < length} F^t' q q' F^t, by doubling: O(m^3 log length)."""
    Q, W, P = np.outer(q, q), np.zeros_like(F), np.eye(len(F))
    for bit in f"{length:b}":
        W, P = W + P.T @ W @ P, P @ P
        if bit == "1":
            W, P = Q + F.T @ W @ F, P @ F
    return W


# -- sensitivity -----------------------------------------------------------------------------------------------------

# BLT: the energy of C u between two participations is a sum of geometric series, for any number of steps.


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
            if not is_positive(strategy) or n <= DENSE_STEPS:
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
    if found.exact or n > DENSE_STEPS:
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


# -- fit -------------------------------------------------------------------------------------------------------------

# Fits of buffered linear Toeplitz strategies, for any number of steps.
#
# The noise of the iterate p follows a linear recurrence x' = F x + G z of m buffers, velocity and iterate; its energy
# over L steps is a sum of powers of F, by doubling in O(m^3 log L). The sensitivity is a sum of geometric series
# between participations. Both are analytic in the decays and scales, so gradients are taken by complex steps, exact to
# rounding, all parameters in one batch.

Numbers = NDArray[Any]
"""Floats, or complex numbers that carry a derivative in their imaginary part."""

_STEP = 1e-30  # of the imaginary part
_SEGMENTS = 16  # of constant learning rate that stand for a schedule over more than 4096 steps
_NEW_SCALE = -7.0  # log of the scale of an added buffer
_FIRST_SCALE = -1.5
_STARTS, _TRIAL = 6, 15  # decays at which a new buffer is tried, and for how many iterations
_SPREADS = ((2.0, 1.2), (20.0, 1.2))  # n times the slowest rate of decay, and the log of the fastest, of a new start
_FASTEST, _SLOWEST = 1.6, -30.0  # log of -log(decay)


def fit_blt(workload: Workload, participation: Participation, buffers: int, objective: str = "mean") -> BLT:
    """The BLT of least loss with at most so many buffers; scales > 0, decays in (0, 1).

    Cost: of order log n for Toeplitz workloads; O(n^2) an evaluation for others up to 4096 steps; beyond, the fit (not
    the strategy's reported error) replaces the schedule by segments of constant rate.
    """
    return fit_blts(workload, participation, buffers, objective)[-1]


def fit_blts(workload: Workload, participation: Participation, buffers: int, objective: str = "mean") -> list[BLT]:
    """The fits with 1, 2, .., at most `buffers` buffers, as long as another one gains.

    One buffer after the other is added, tried at several decays, and all are optimised again, so that more are never
    worse; from three buffers on other searches begin at the square root, which a small new buffer may not reach.
    """
    checks.choice("objective", objective, OBJECTIVES)
    buffers = checks.integer("buffers", buffers, low=1)
    return [blt_of(x, workload.n) for x in grown(_loss(workload, participation, objective), workload.n, buffers)]


def grown(loss: Callable[[Floats], Valued], n: int, buffers: int) -> list[Floats]:
    """The parameters of least loss with 1, 2, .. buffers: logs of the rates of decay, and of the scales."""
    rates = np.linspace(log(2 / n), _FASTEST - 0.5, _STARTS)  # of decay, on a log scale
    x: Floats = np.zeros(0)
    least = math.inf
    found: list[Floats] = []
    for m in range(1, buffers + 1):
        scale = _NEW_SCALE if m > 1 else _FIRST_SCALE
        starts = [np.concatenate([x[: m - 1], [rate], x[m - 1 :], [scale]]) for rate in rates]
        tried = [descend(loss, start, max_iterations=_TRIAL, restarts=1) for start in starts]
        near, _ = min(tried, key=lambda result: result[1])
        anew = [_square_root(n, m, *spread) for spread in _SPREADS] if m > 2 else []
        x, value = min((descend(loss, start) for start in (near, *anew)), key=lambda result: result[1])
        if value > least * (1 - 1e-9):
            break
        least = value
        found.append(x)
    return found


def blt_of(x: Floats, n: int) -> BLT:
    """The strategy of `grown` parameters."""
    decays, scales = _parameters(x)
    order = np.argsort(-decays)
    return BLT(rounded_decays(decays[order]), rounded(scales[order]), n)


def _square_root(n: int, m: int, slowest: float, fastest: float) -> Floats:
    """A start with c_t near t^(-1/2) / sqrt(pi) = (1/pi) integral e^(a/2) exp(-e^a t) da, summed at m places of a."""
    a = np.linspace(min(log(slowest / n), fastest - 1.0), fastest, m)  # of few steps: one rate within the other's
    return np.concatenate([a, a / 2 + log((a[1] - a[0]) / math.pi) - exps(a)])


def _loss(workload: Workload, participation: Participation, objective: str) -> "partial[Valued]":
    if workload.n <= DENSE_STEPS and not workload.is_toeplitz:
        return partial(series_loss, Problem(workload, participation, objective))
    return partial(_stepped, BLTLoss(workload, participation, objective))


def _parameters(x: Numbers) -> tuple[Numbers, Numbers]:
    """Decays exp(-exp(a)) and scales exp(b) from x = (a, b), in the last axis."""
    m = x.shape[-1] // 2
    return exps(-exps(_clipped(x[..., :m]))), exps(x[..., m:])


def _clipped(a: Numbers) -> Numbers:
    """Within the range of decays; outside it nothing depends on a."""
    return np.where(a.real > _FASTEST, _FASTEST, np.where(a.real < _SLOWEST, _SLOWEST, a))


def series_loss(problem: Problem, x: Floats) -> Valued:
    """The loss from the first n coefficients of C."""
    m, n = len(x) // 2, problem.n
    decays, scales = _parameters(x)
    table = powers(decays, n - 1)
    c = np.concatenate([[1.0], times(table, scales)])
    error, g_error = reciprocal(c, n, problem.error)
    sens, g_sens = problem.sens(c)
    g = (g_error * sens + error * g_sens)[1:]
    by_scale = scales * times(table.T, g)
    by_decay = scales * times(table.T, g * np.arange(n - 1)) / decays
    inside = (x[:m] < _FASTEST) & (x[:m] > _SLOWEST)
    by_rate = np.where(inside, -by_decay * decays * exps(_clipped(x[:m])), 0.0)
    return error * sens, np.concatenate([by_rate, by_scale])


def _stepped(model: "BLTLoss", x: Floats) -> Valued:
    """The value at x and its gradient, by complex steps."""
    batch = np.concatenate([x[None], x + 1j * _STEP * np.eye(len(x))])
    values = model.loss(batch)
    return float(values[0].real), values[1:].imag / _STEP


class BLTLoss:
    """The loss of BLTs in closed form, for batches of (complex) parameters.

    Args:
        workload: Toeplitz or not; not `Custom` beyond 4096 steps.
        participation: as in `toeplitz.Problem`.
        objective: "mean", "max" or "last".
    """

    def __init__(self, workload: Workload, participation: Participation, objective: str) -> None:
        check_optimisable(participation)
        self.workload, self.objective, self.n = workload, objective, workload.n
        self.steps = participation.pattern.likely_worst()
        self.any_start = len(self.steps) > 1 and stride(participation.pattern) is None
        self.segments = _segments(workload)

    def loss(self, x: Numbers) -> Numbers:
        """Squared loss for (batch, 2 m) parameters."""
        decays, scales = _parameters(x)
        return complex_product(self.sens(decays, scales), self.error(decays, scales))

    def sens(self, decays: Numbers, scales: Numbers) -> Numbers:
        """Squared sensitivity for the worst pattern, (batch,).

        Where gaps are free, c_0 = 1 is replaced by c_1 = sum(scales) if that is more, so that c does not rise.
        """
        head: Numbers = np.ones_like(scales[:, 0])
        if self.any_start:
            head = np.where(scales.sum(axis=1).real > 1, scales.sum(axis=1), head)
        rates = -logs(decays)
        sums = rates[:, :, None] + rates[:, None, :]  # -log of decay_i decay_j
        buffers, total = np.zeros_like(decays), np.zeros_like(decays[:, 0])
        gaps = np.diff(self.steps, append=self.n).tolist()
        below = expm1s(-sums)
        jumps = {gap: (expm1s(-(gap - 1) * sums) / below, exps(-(gap - 1) * rates)) for gap in set(gaps)}
        for gap in gaps:
            series, jump = jumps[gap]
            here = head + complex_product(scales, buffers).sum(axis=1)
            total = total + complex_product(here, here)
            buffers = complex_product(decays, buffers) + 1
            w = complex_product(scales, buffers)
            total = total + np.einsum("bi,bij,bj->b", w, series, w)
            buffers = complex_product(jump, buffers)
        return total

    def error(self, decays: Numbers, scales: Numbers) -> Numbers:
        """Squared error of the objective, (batch,)."""
        size = decays.shape[1] + 2
        covariance = np.zeros((len(decays), size, size), dtype=decays.dtype)
        total: list[Numbers] = []
        for length, rate, weight in self.segments:
            F, G = joined(system(decays, scales), *self.workload.recurrence([rate]))
            q = np.zeros((len(decays), size), dtype=decays.dtype)
            q[:, -1] = 1.0
            if self.objective == "mean":
                W, T = _batched_energies(q, F, length)
                start = np.einsum("bij,bji->b", _congruent(F, W), covariance)
                noise = np.einsum("bi,bij,bj->b", G, (length + 1) * W - T, G)
                total.append(weight * (start + noise) / self.n)
            if len(self.segments) > 1 or self.objective != "mean":
                power = _power(F, length)
                covariance = _congruent(_transposed(power), covariance) + _batched_energy(G, _transposed(F), length)
                if self.objective != "mean":
                    total.append(weight * covariance[:, -1, -1])
        if self.objective == "last":
            return total[-1]
        if self.objective == "max":
            top = max(value[0].real for value in total)
            return np.asarray(top * exps(logs(np.sum([exps(24 * logs(value / top)) for value in total], axis=0)) / 24))
        return np.asarray(sum(total[1:], total[0]))


def _segments(workload: Workload) -> list[tuple[int, float, float]]:
    """(length, rate, mean squared weight) of pieces; one where the workload is Toeplitz."""
    if isinstance(workload, GivenWorkload):
        raise PlanError(f"a custom workload is fitted for at most {DENSE_STEPS} steps, got {workload.n}")
    count = 1 if workload.is_toeplitz else _SEGMENTS
    bounds = np.linspace(0, workload.n, count + 1).astype(int)
    pieces = [(i, j) for i, j in pairwise(bounds) if j > i]
    rates, weights = workload.learning_rates, np.square(workload.weights)
    return [(int(j - i), float(rates[i:j].mean()), float(weights[i:j].mean())) for i, j in pieces]


def _batched_energies(q: Numbers, F: Numbers, length: int) -> tuple[Numbers, Numbers]:
    """W = sum_{t < length} F^t' q q' F^t, and T, the same with weights t + 1, by doubling: O(m^3 log length)."""
    Q = q[:, :, None] * q[:, None, :]
    W, T, P, done = np.zeros_like(F), np.zeros_like(F), np.broadcast_to(np.eye(F.shape[1]), F.shape), 0
    for bit in f"{length:b}":
        later, moved, P = _moved(P, T + done * W, W, P)
        T, W, done = T + later, W + moved, 2 * done
        if bit == "1":
            later, moved, P = _moved(F, T + W, W, P)
            T, W, done = Q + later, Q + moved, done + 1
    return W, T


def _moved(F: Numbers, T: Numbers, W: Numbers, P: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """F^T T F, F^T W F and P F, by two products."""
    k = F.shape[-1]
    right = _multiplied(np.concatenate([T, W, P], axis=1), F)
    both = _multiplied(_transposed(F), np.concatenate([right[:, :k], right[:, k : 2 * k]], axis=2))
    return both[:, :, :k], both[:, :, k:], right[:, 2 * k :]


def _batched_energy(q: Numbers, F: Numbers, length: int) -> Numbers:
    """W alone."""
    Q = q[:, :, None] * q[:, None, :]
    W, P = np.zeros_like(F), np.broadcast_to(np.eye(F.shape[1]), F.shape)
    for bit in f"{length:b}":
        W, P = W + _congruent(P, W), _multiplied(P, P)
        if bit == "1":
            W, P = Q + _congruent(F, W), _multiplied(P, F)
    return W


def _power(F: Numbers, exponent: int) -> Numbers:
    P = np.broadcast_to(np.eye(F.shape[1]), F.shape)
    for bit in f"{exponent:b}":
        P = _multiplied(P, P)
        P = _multiplied(P, F) if bit == "1" else P
    return P


def _multiplied(A: Numbers, B: Numbers) -> Numbers:
    """A B of small matrices, without a library whose order of sums is its own."""
    return np.asarray(np.einsum("bij,bjk->bik", A, B))


def _congruent(P: Numbers, W: Numbers) -> Numbers:
    """P^T W P."""
    return _multiplied(_multiplied(_transposed(P), W), P)


def _transposed(matrices: Numbers) -> Numbers:
    """Without conjugation, which is not analytic."""
    return np.swapaxes(matrices, 1, 2)


# -- error -----------------------------------------------------------------------------------------------------------


def way(strategy: BLT) -> Way:
    """Of iterates: by the buffers."""
    return partial(by_recurrence, strategy.recurrences)


# -- rounding --------------------------------------------------------------------------------------------------------


def change(strategy: BLT) -> Change:
    """A BLT with `1 - decays` and `scales` rounded."""
    made = BLT(rounded_decays(strategy.decays), rounded(strategy.scales), strategy.n)
    return of_series(strategy.toeplitz_coefficients(), made.toeplitz_coefficients())
