"""Buffers that start anew in every epoch, and a noise of its own for the epoch's total: for shuffled epochs."""

import math
from functools import partial
from typing import Any, assert_never

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder._numerics import fftconvolve
from anyorder.checks import final, frozen
from anyorder.errors import ArgumentError, PlanError
from anyorder.patterns import Listed, Participation, Pattern, PerEpoch, Separated
from anyorder.strategy.base import DENSE_STEPS, Recurrence, Row, State, Strategy, Vector
from anyorder.strategy.blt import BLT
from anyorder.strategy.fitting import (
    Valued,
    by_rows,
    descend,
    dot,
    exps,
    log,
    logs,
    mostly_last,
    powers,
    product,
    shuffled,
    times,
)
from anyorder.strategy.sensitivity import (
    Bound,
    Change,
    Visits,
    as_operator,
    from_sum,
    inverse_norm,
    matrix_bound,
    matrix_units,
    root,
    roots,
    rounded,
    rounded_decays,
    visits,
)
from anyorder.strategy.toeplitz import inverse_series
from anyorder.strategy.variances import Way, by_recurrence, of_iterates
from anyorder.workload import GivenWorkload, Workload

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@final
class RestartedBLT(Strategy):
    """C block-diagonal, a block for each epoch: a BLT, a row for the total, all columns of one norm.

    With T the BLT's lower-triangular Toeplitz matrix the block of epoch e has the Gram matrix

        X = share^2 diag(d)^-1 (T^T T + total^2 1 1^T) diag(d)^-1,     X_tt = share^2

    A unit that takes part once in each epoch, anywhere, has sens^2 = sum of share^2 exactly: nothing is lost to steps
    that are last in one epoch and first in the next. What is lost is the correlation between epochs; the row
    total 1^T, a noisy sum of the whole epoch, keeps what all later weights carry on small, as the root of a completed
    tree does.

    Noise: with v = T^-T 1, gamma = total^2 / (1 + total^2 |v|^2), S_t = 1 - gamma sum_{i < t} v_i^2 the Cholesky factor
    G of 1 - gamma v v^T has G_tt = sqrt(S_{t+1} / S_t), G_ti = -gamma v_t v_i / sqrt(S_i S_{i+1}). So

        x_t = G_tt z_t - v_t q_t,    q_{t+1} = q_t + gamma v_t / sqrt(S_t S_{t+1}) z_t,    q_0 = 0

    goes through the BLT's buffers and is multiplied by d_t / share: m + 1 vectors of state, O(m d) a step.

    Args:
        decays, scales: (k, m) of each epoch's BLT; decays in [-1, 1].
        totals: (k,) weight of the row for the total, at least 0.
        shares: (k,) norm of all columns in each epoch, above 0.
        n: number of steps.
        steps_per_epoch: s, with k = ceil(n / s); the last epoch may be shorter.
    """

    def __init__(
        self,
        decays: ArrayLike,
        scales: ArrayLike,
        totals: ArrayLike,
        shares: ArrayLike,
        n: int,
        steps_per_epoch: int,
    ) -> None:
        self._n = checks.integer("n", n, low=1)
        self.steps_per_epoch = checks.integer("steps_per_epoch", steps_per_epoch, low=1)
        self.num_epochs = -(-self._n // self.steps_per_epoch)
        self.decays: Floats = checks.array("decays", decays, ndim=2)
        self.scales: Floats = checks.array("scales", scales, ndim=2)
        self.totals: Floats = checks.array("totals", totals, ndim=1)
        self.shares: Floats = checks.array("shares", shares, ndim=1)
        lengths = {len(part) for part in (self.decays, self.scales, self.totals, self.shares)}
        if lengths != {self.num_epochs}:
            raise ArgumentError(
                f"decays, scales, totals and shares must have one row for each of the {self.num_epochs} epochs of "
                f"{self.steps_per_epoch} steps in n={self._n}, got {sorted(lengths)} rows"
            )
        if (self.totals < 0).any() or (self.shares <= 0).any():
            raise ArgumentError(f"totals must be at least 0 and shares above 0, got {self.totals} and {self.shares}")
        self._blts = tuple(
            BLT(decay, scale, min(self.steps_per_epoch, self._n - e * self.steps_per_epoch))
            for e, (decay, scale) in enumerate(zip(self.decays, self.scales, strict=True))
        )
        tables = [_tables(blt, total) for blt, total in zip(self._blts, self.totals, strict=True)]
        self._own, self._v, self._gain, norms = frozen(np.concatenate(tables, axis=1))
        self._factors: Floats = frozen(norms / np.repeat(self.shares, [blt.n for blt in self._blts]))

    @property
    def n(self) -> int:
        """Number of steps."""
        return self._n

    @property
    def restart_period(self) -> int:
        """The steps of an epoch."""
        return self.steps_per_epoch

    @property
    def num_buffers(self) -> int:
        """Buffers m of each epoch's BLT."""
        return int(self.decays.shape[1])

    def matrix(self) -> Floats:
        """C, (n, n) lower triangular, block-diagonal."""
        return np.asarray(scipy.linalg.block_diag(*(self._block(e, inverse=False) for e in range(self.num_epochs))))

    def noising_matrix(self) -> Floats:
        """C^-1, (n, n) lower triangular, block-diagonal."""
        return np.asarray(scipy.linalg.block_diag(*(self._block(e, inverse=True) for e in range(self.num_epochs))))

    def column_norms_squared(self) -> Floats:
        """(n,) share^2 of each step's epoch."""
        return np.repeat(np.square(self.shares), [blt.n for blt in self._blts])

    def _block(self, e: int, *, inverse: bool) -> Floats:
        """diag(d) T^-1 G / share, or its inverse."""
        blt, here = self._blts[e], self._steps(e)
        v, factors = self._v[here], self._factors[here]
        G = np.tril(-np.outer(v, self._gain[here]), -1) + np.diag(self._own[here])
        zeros = np.zeros(blt.n)
        if inverse:
            return np.asarray(factors[:, None] * (scipy.linalg.toeplitz(blt.noising_coefficients(), zeros) @ G))
        T = scipy.linalg.toeplitz(blt.toeplitz_coefficients(), zeros)
        return np.asarray(scipy.linalg.solve_triangular(G, T, lower=True) / factors)

    def _steps(self, e: int) -> slice:
        return slice(e * self.steps_per_epoch, e * self.steps_per_epoch + self._blts[e].n)

    def recurrences(self, steps: NDArray[np.int64]) -> Recurrence:
        """State: the buffers u and the total's q; what is in it as an epoch begins is dropped."""
        m = self.num_buffers
        epoch, place = np.divmod(steps, self.steps_per_epoch)
        output = np.concatenate([-self.scales[epoch], -self._v[steps, None]], axis=1)
        F = np.zeros((len(steps), m + 1, m + 1))
        F[:, :m] = output[:, None]
        F[:, np.arange(m), np.arange(m)] += self.decays[epoch]
        F[:, m, m] = 1.0
        G = np.repeat(self._own[steps, None], m + 1, axis=1)
        G[:, m] = self._gain[steps]
        kept, factors = place > 0, self._factors[steps]
        h = np.where(kept[:, None], output * factors[:, None], 0.0)
        return Recurrence(np.where(kept[:, None, None], F, 0.0), G, h, self._own[steps] * factors)

    def tables(self) -> Floats:
        """(4, n) what `step` uses: G_tt, v_t, gamma v_t / sqrt(S_t S_{t+1}), d_t / share."""
        return np.stack([self._own, self._v, self._gain, self._factors])

    def init(self, size: int) -> State:
        """Empty buffers."""
        return (*self._blts[0].init(size), np.zeros(size, dtype=np.float32))

    def step(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        """Make the noise of a step in one pass over the buffers, which are emptied at an epoch's first step."""
        e, i = divmod(t, self.steps_per_epoch)
        if i == 0:
            state = tuple(np.zeros_like(vector) for vector in state)  # where they are: on a device, perhaps
        *buffers, q = state
        z = row(t)
        x = np.float32(self._own[t]) * z - np.float32(self._v[t]) * q
        q = q + np.float32(self._gain[t]) * z
        noise, moved = self._blts[e].step(i, tuple(buffers), lambda _: x)
        return noise * np.float32(self._factors[t]), (*moved, q)

    @property
    def state_rows(self) -> int:
        """The buffers and the total's."""
        return self.num_buffers + 1

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "restarted_blt", "decays": [[..]], "scales": [[..]], "totals", "shares", "n", "steps_per_epoch"}."""
        return {
            "kind": "restarted_blt", "decays": self.decays.tolist(), "scales": self.scales.tolist(),
            "totals": self.totals.tolist(), "shares": self.shares.tolist(), "n": self._n,
            "steps_per_epoch": self.steps_per_epoch,
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"RestartedBLT(num_buffers={self.num_buffers}, epochs={self.num_epochs}, n={self._n})"


def _tables(blt: BLT, total: float) -> Floats:
    """(4, n) rows G_tt, v_t, gamma v_t / sqrt(S_t S_{t+1}), d_t."""
    v = np.cumsum(blt.noising_coefficients())[::-1]
    # S_t (1 + total^2 |v|^2), summed from the end: no cancellation, and the common factor drops out
    U = 1 + total**2 * np.append(np.cumsum(np.square(v[::-1]))[::-1], 0.0)
    norms = np.sqrt(np.cumsum(np.square(blt.toeplitz_coefficients()))[::-1] + total**2)
    return np.stack([np.sqrt(U[1:] / U[:-1]), v, total**2 * v / np.sqrt(U[:-1] * U[1:]), norms])


# -- sensitivity -----------------------------------------------------------------------------------------------------

# RestartedBLT: X is 0 between its epochs, and X_tt is the epoch's share^2.


def bound(strategy: RestartedBLT, pattern: Pattern) -> Bound:
    """The sensitivity of a RestartedBLT.

    A unit that is c times in an epoch of the strategy adds at most (c share)^2 there, exactly share^2 for c = 1; epochs
    add up. So one step in each epoch costs sum share^2, exactly. Where a unit may come twice in an epoch, or where it
    may leave an epoch out, n up to 4096 goes to X itself; beyond, the counts give an upper bound.

    Cost: O(k), O(M) for M participations in a list of patterns, O(n^2) with X.
    """
    squares = np.square(strategy.shares)
    terms = strategy.n + strategy.num_epochs
    match pattern:
        case Separated() if pattern.is_single:
            return from_sum(float(squares.max()), terms, exact=True)
        case PerEpoch(steps_per_epoch=s) if s % strategy.steps_per_epoch == 0:
            inside = s // strategy.steps_per_epoch  # whole epochs of the strategy
            return from_sum(float(squares.reshape(-1, inside).max(axis=1).sum()), terms, exact=True)
        case Listed():
            totals, once = _unit_squares(strategy, visits(pattern))
            if once or strategy.n > DENSE_STEPS:
                return from_sum(float(totals.max()), terms, exact=once)
        case Separated() | PerEpoch():
            if strategy.n > DENSE_STEPS:
                return from_sum(_counted(strategy, pattern), terms, exact=False)
        case _:
            assert_never(pattern)
    return matrix_bound(strategy, pattern)


def units(strategy: RestartedBLT, listed: Listed) -> Floats:
    """Of each unit: sum |X| over its steps squared; beyond 4096 steps sum (c share)^2 over its epochs."""
    totals, once = _unit_squares(strategy, visits(listed))
    if once or strategy.n > DENSE_STEPS:
        return roots(totals, strategy.n + strategy.num_epochs)
    return matrix_units(strategy, listed)


def _unit_squares(strategy: RestartedBLT, who: Visits) -> tuple[Floats, bool]:
    """(U,) sum over epochs of (c share)^2, and whether all c <= 1."""
    epochs = who.steps // strategy.steps_per_epoch
    pairs, counts = np.unique(who.indices * strategy.num_epochs + epochs, return_counts=True)
    weights = np.square(counts * strategy.shares[pairs % strategy.num_epochs])
    totals = np.bincount(pairs // strategy.num_epochs, weights=weights, minlength=who.num_units)
    return totals.astype(np.float64), bool(counts.max() == 1)


def _counted(strategy: RestartedBLT, pattern: Separated | PerEpoch) -> float:
    """The sum of (c share)^2, c the most that fits into each epoch; the k heaviest epochs are enough."""
    s, k = strategy.steps_per_epoch, pattern.max_participations
    match pattern:
        case PerEpoch(steps_per_epoch=length):
            starts = s * np.arange(strategy.num_epochs)
            ends = np.minimum(starts + s, strategy.n)
            counts: Integers = (ends - 1) // length - starts // length + 1
        case Separated(b=b):
            counts = np.full(strategy.num_epochs, min(k, -(-s // b)))
        case _:
            assert_never(pattern)
    return float(np.sort(np.square(counts * strategy.shares))[-k:].sum())


# -- fit -------------------------------------------------------------------------------------------------------------

# Fits of `RestartedBLT` to orders shuffled every epoch.
#
# With X = 0 between epochs the mean-square loss is a sum over epochs e of tr(M_e X_e^-1), M_e the diagonal block of
# A^T A. In an epoch all X_tt are 1, and
#
#     X^-1 = D (R - beta y y^T) D,   R = T^-1 T^-T,   v = T^-T 1,   y = T^-1 v,   beta = total^2 / (1 + total^2 |v|^2)
#
# whose gradient follows the chain d, v, y <- coefficients of T and T^-1 <- decays and scales. Sums over the diagonals
# of R need no loop: (s, s) tables with lags as rows.


_MAX_EPOCH = 2048  # steps in an epoch
_SHORT = 512  # steps of an epoch up to which more epochs are fitted
_FITTED = 8  # epochs that are fitted; others take the parameters of the nearest one
_FASTEST, _SLOWEST = 1.6, -30.0  # log of -log(decay)
_FAST, _SCALE = -1.0, -1.5  # the fastest such decay and log scale at the start
_SINGULAR = 1e-10
_UNSTABLE = 10.0  # entries of T^-1 beyond this: its powers grow, and sums lose their digits
_GAIN = 1e-8
_ENTRIES = 1 << 15  # of a table in hand


def restartable(workload: Workload, pattern: PerEpoch) -> bool:
    """Whether there is more than one epoch, and `fit_restarted` knows its steps."""
    known = workload.n <= DENSE_STEPS or not isinstance(workload, GivenWorkload)
    return known and pattern.k > 1 and pattern.steps_per_epoch <= _MAX_EPOCH


def fit_restarted(
    workload: Workload, participation: Participation, buffers: int, objective: str = "mean"
) -> RestartedBLT:
    """The RestartedBLT of least error with at most so many buffers, one epoch of it to each shuffled epoch."""
    return fits_restarted(workload, participation, buffers, objective)[-1]


def fits_restarted(
    workload: Workload, participation: Participation, buffers: int, objective: str = "mean"
) -> list[RestartedBLT]:
    """The fits with 1, 2, .., at most `buffers` buffers, none worse in the mean than the one before.

    Of many epochs eight are fitted (four, if they are long): they differ only by how much later iterates carry on.

    Args:
        workload: of at most 4096 steps if `Custom`.
        participation: EpochShuffle with at most 2048 steps in an epoch.
        buffers: m.
        objective: "mean", "max" or "last" error; see `objectives` for the other two.
    Cost: O(s^2) an evaluation, some hundreds of them.
    """
    buffers = checks.integer("buffers", buffers, low=1)
    pattern = shuffled(participation.pattern)
    if pattern is None:
        raise PlanError(f"restarts in every epoch need EpochShuffle, got {participation!r}")
    s = pattern.steps_per_epoch
    if s > _MAX_EPOCH:
        raise PlanError(f"restarted BLTs are fitted for epochs of at most {_MAX_EPOCH} steps, got {s}; use kind 'blt'")
    if objective == "last":
        workload = mostly_last(workload)
    losses = _losses(workload, pattern)
    points: dict[int, Floats] = {}
    found = []
    for m in range(1, buffers + 1):
        near = None
        for e in losses:
            points[e] = near = _best(losses[e], m, points.get(e), near)
        best = _strategy(points, losses, pattern)
        if objective == "max":
            best = by_rows(partial(_refit, dict(points), pattern), workload, _errors)
        found.append(best)
    return found


def _losses(workload: Workload, pattern: PerEpoch) -> dict[int, "_EpochLoss"]:
    """Those of the epochs that are fitted."""
    k, s = pattern.k, pattern.steps_per_epoch
    count = _FITTED if s <= _SHORT else _FITTED // 2
    fitted = sorted({0, *np.linspace(0, k - 1, min(k, count)).round().astype(int).tolist()})
    return {e: _EpochLoss(epoch_gram(workload, e * s, s)) for e in fitted}


def _errors(strategy: RestartedBLT, workload: Workload) -> Floats:
    """(n,) squared errors of the iterates."""
    return of_iterates(strategy, workload, way(strategy))


def _refit(points: dict[int, Floats], pattern: PerEpoch, workload: Workload) -> RestartedBLT:
    """The fit to another weighting of the rows, from the points of the last one, which it moves."""
    losses = _losses(workload, pattern)
    for e, loss in losses.items():
        points[e] = descend(loss, _with_slope(points[e]), restarts=1, gain=_GAIN)[0]
    return _strategy(points, losses, pattern)


def _best(loss: "_EpochLoss", m: int, fewer: Floats | None, near: Floats | None) -> Floats:
    """The point of least loss with m buffers: from the neighbour's point, in the first epoch from spread decays."""
    if near is None:
        rates = np.linspace(log(1 / loss.n), _FAST, m + 1)[1:]
        start = np.concatenate([rates, np.full(m, _SCALE), [0.0]])
    else:
        start = _with_slope(near)
    tried = [descend(loss, start, restarts=1, gain=_GAIN)]
    if fewer is not None:  # the same loss: more buffers are never worse
        tried.append((same := _split(fewer), loss(same)[0]))
    return min(tried, key=lambda result: result[1])[0]


def _with_slope(x: Floats) -> Floats:
    """The point with a total of 1 at least: one near 0 has no slope to leave it by."""
    return np.append(x[:-1], max(x[-1], 0.0))


def _split(x: Floats) -> Floats:
    """The same C with one buffer more: the last one becomes two of its decay, half its scale each."""
    m = len(x) // 2
    a, b, rest = x[:m], x[m : 2 * m].copy(), x[2 * m :]
    b[-1] -= log(2)
    return np.concatenate([a, a[-1:], b, b[-1:], rest])


def _strategy(points: dict[int, Floats], losses: dict[int, "_EpochLoss"], order: PerEpoch) -> RestartedBLT:
    """All epochs, with the norms of `epoch_shares`."""
    fitted = np.array(sorted(points))
    values = np.array([losses[e](points[e])[0] for e in fitted])
    roots = np.sqrt(exps(np.interp(np.arange(order.k), fitted, logs(values))))
    nearest = np.abs(np.arange(order.k)[:, None] - fitted).argmin(axis=1)
    table = np.array([points[e] for e in fitted])[nearest]
    m = table.shape[1] // 2
    rates = np.clip(table[:, :m], _SLOWEST, _FASTEST)
    decays, scales = rounded_decays(exps(-exps(rates))), rounded(exps(table[:, m : 2 * m]))
    shares = rounded(np.sqrt(roots / roots.sum()))
    return RestartedBLT(decays, scales, rounded(exps(table[:, -1])), shares, order.n, order.steps_per_epoch)


def epoch_gram(workload: Workload, start: int, s: int) -> Floats:
    """The diagonal block of A^T A for steps start, .., start + s - 1.

    Beyond 4096 steps: rows after the epoch see it through velocity and iterate at its end only, so they are
    combinations of two of them.
    """
    n, end = workload.n, start + s
    if n <= DENSE_STEPS or isinstance(workload, GivenWorkload):
        block = workload.matrix()[start:, start:end]
        return product(block.T, block)
    inside = _without_weights(workload, slice(start, end)).matrix() * workload.weights[start:end, None]
    M = product(inside.T, inside)
    if end < n:
        plain = _without_weights(workload, slice(0, n))
        rows = plain.apply_transposed(_units(n, np.unique([end, n - 1])))[start:end].T
        last = np.arange(max(s - 2, 0), s)
        later = workload.apply(_units(n, start + last))[end:]
        mixing = times(_pseudo_inverse(rows[:, last].T)[:, None], later)  # later = mixing^T rows
        both = np.array([times(mixing, row) for row in mixing])
        M += (rows[:, :, None] * (both[:, :, None] * rows).sum(axis=1)[:, None]).sum(axis=0)
    return np.asarray(M)


def _pseudo_inverse(R: Floats) -> Floats:
    """Of one or two rows and columns: the inverse, unless R has rank 1."""
    size = np.square(R).sum()
    if R.shape == (2, 2) and abs(det := R[0, 0] * R[1, 1] - R[0, 1] * R[1, 0]) > _SINGULAR * size:
        return np.array([[R[1, 1], -R[0, 1]], [-R[1, 0], R[0, 0]]]) / float(det)
    return np.asarray(R.T / size)


def _without_weights(workload: Workload, steps: slice) -> Workload:
    rates = workload.learning_rates[steps]
    return Workload(
        len(rates),
        momentum=workload.momentum,
        learning_rates=rates,
        weight_decay=workload.weight_decay,
        coupled=workload.coupled,
        nesterov=workload.nesterov,
    )


def _units(n: int, steps: NDArray[np.int64]) -> Floats:
    units = np.zeros((n, len(steps)))
    units[steps, np.arange(len(steps))] = 1.0
    return units


class _EpochLoss:
    """tr(M X^-1) over x = (log rates, log scales, log total), for one epoch of n steps."""

    def __init__(self, M: Floats) -> None:
        self.n, self.M = len(M), M
        lags, steps = np.indices(M.shape)
        self.diagonals = np.where(lags + steps < self.n, M[np.minimum(lags + steps, self.n - 1), steps], 0.0)
        self.diagonals[1:] *= 2

    def __call__(self, x: Floats) -> Valued:
        m, n = len(x) // 2, self.n
        rates = np.clip(x[:m], _SLOWEST, _FASTEST)
        decays, scales, weight = exps(-exps(rates)), exps(x[m : 2 * m]), float(exps(2 * x[-1:])[0])
        table = powers(decays, n - 1)
        c = np.concatenate([[1.0], times(table, scales)])
        g = inverse_series(c, n)
        if not np.abs(g).max() < _UNSTABLE:
            return math.inf, np.zeros_like(x)
        d = np.sqrt(np.cumsum(np.square(c))[::-1] + weight)
        value, to_d, to_g = self._without_total(d, g)
        # less beta y^T N y, with N = D M D
        v = np.cumsum(g)[::-1]
        y = fftconvolve(g, v)[:n]
        moved = times(self.M, d * y)
        form = dot(d * y, moved)
        denominator = 1 + weight * dot(v, v)
        beta = weight / denominator
        to_d -= 2 * beta * y * moved
        to_y = -2 * beta * d * moved
        to_v = _correlated(to_y, g) + 2 * beta**2 * form * v
        to_g += _correlated(to_y, v) + np.cumsum(to_v)[::-1]
        by_weight = (to_d / d).sum() / 2 - form / denominator**2
        to_c = (c * np.cumsum(to_d / d)[::-1] - _correlated(to_g, fftconvolve(g, g)[:n]))[1:]
        by_decay = scales * times(table.T, to_c * np.arange(n - 1))  # times the decay
        by_rate = np.where(rates == x[:m], -by_decay * exps(rates), 0.0)
        return float(value - beta * form), np.concatenate(
            [by_rate, scales * times(table.T, to_c), [2 * weight * by_weight]]
        )

    def _without_total(self, d: Floats, g: Floats) -> tuple[float, Floats, Floats]:
        """tr(D M D R) and its gradients in d and g; R[u + lag, u] = sum_{i <= u} g_{i + lag} g_i.

        Some lags at a time, and only the steps u that they leave: tables that stay in the processor's cache.
        """
        n = self.n
        value, to_d, to_g = 0.0, np.zeros(n), np.zeros(n)
        all_d, all_g, count = _shifted(d), _shifted(g), max(1, _ENTRIES // n)
        for first in range(0, n, count):
            lags, left = slice(first, min(first + count, n)), n - first
            later_d, later_g = all_d[lags, :left], all_g[lags, :left]
            diagonals, own_d, own_g = self.diagonals[lags, :left], d[:left], g[:left]
            P = np.cumsum(later_g * own_g, axis=1)
            P *= diagonals
            by_d = np.einsum("lu,lu->u", P, later_d)
            value += dot(by_d, own_d)
            to_d[:left] += by_d
            _add_skew_sums(to_d[first:], P * own_d)
            W = diagonals * later_d
            W *= own_d
            W = np.cumsum(W[:, ::-1], axis=1)[:, ::-1]
            to_g[:left] += np.einsum("lu,lu->u", W, later_g)
            _add_skew_sums(to_g[first:], W * own_g)
        return value, to_d, to_g


def _shifted(x: Floats) -> Floats:
    """(n, n) x_{lag + u}, 0 beyond the end."""
    return np.lib.stride_tricks.sliding_window_view(np.append(x, np.zeros(len(x) - 1)), len(x))


def _add_skew_sums(sums: Floats, table: Floats) -> None:
    """Add to sums_t what the table has at lag + u = t; beyond the end it is 0."""
    rows, columns = table.shape
    padded = np.zeros((rows, columns + rows))
    padded[:, :columns] = table
    width = columns + rows - 1
    sums += padded.ravel()[: rows * width].reshape(rows, width).sum(axis=0)[: len(sums)]


def _correlated(x: Floats, y: Floats) -> Floats:
    """(n,) sum_t x_t y_{t - l} for each l."""
    return np.asarray(fftconvolve(x[::-1], y)[: len(x)][::-1])


# -- error -----------------------------------------------------------------------------------------------------------


def way(strategy: RestartedBLT) -> Way:
    """Of iterates: by the buffers and the noisy total."""
    return partial(by_recurrence, strategy.recurrences)


# -- rounding --------------------------------------------------------------------------------------------------------


def change(strategy: RestartedBLT) -> Change:
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
    used = rounded(exact)
    real = (np.arange(k * s) < strategy.n).reshape(k, s)
    parameters = rounded_decays(strategy.decays), rounded(strategy.scales)
    worst = np.zeros(k)
    energy = np.zeros((k, 2 * m, 2 * m))  # quadratic form: of all later z, from both states
    for i in reversed(range(s)):
        A, b, h, g = _inverse_system(strategy.decays, strategy.scales, exact[:, :, i])
        A_used, b_used, h_used, g_used = _inverse_system(*parameters, used[:, :, i])
        B = np.concatenate([b, b_used - b], axis=1)
        H = np.concatenate([h_used - h, h_used], axis=1)
        J = np.block([[A, np.zeros_like(A)], [A_used - A, A_used]])
        own = np.square(g_used - g) + np.einsum("ki,kij,kj->k", B, energy, B)
        worst = np.maximum(worst, np.where(real[:, i], own, 0.0))
        energy = H[:, :, None] * H[:, None, :] + J.transpose(0, 2, 1) @ energy @ J
        energy[~real[:, i]] = 0.0
    return Change(root(worst / np.square(strategy.shares)))


def under_coins(strategy: RestartedBLT, whole: Change) -> float:
    """T has a block for each epoch, as C has."""
    del whole
    return max(as_operator(epoch, change(epoch), inverse_norm(epoch)) for epoch in _epochs(strategy))


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
