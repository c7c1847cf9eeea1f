"""Fits of `RestartedBLT` to orders shuffled every epoch.

With X = 0 between epochs the mean-square loss is a sum over epochs e of tr(M_e X_e^-1), M_e the diagonal block of
A^T A. In an epoch all X_tt are 1, and

    X^-1 = D (R - beta y y^T) D,   R = T^-1 T^-T,   v = T^-T 1,   y = T^-1 v,   beta = total^2 / (1 + total^2 |v|^2)

whose gradient follows the chain d, v, y <- coefficients of T and T^-1 <- decays and scales. Sums over the diagonals
of R need no loop: (s, s) tables with lags as rows.
"""

import math
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lstsq

from anyorder import checks
from anyorder._filters import fftconvolve
from anyorder.errors import PlanError
from anyorder.optimize.objectives import by_rows, mostly_last
from anyorder.optimize.patterns import shuffled
from anyorder.optimize.toeplitz import DENSE_STEPS, Valued, descend
from anyorder.patterns import Participation, PerEpoch
from anyorder.strategy import RestartedBLT
from anyorder.strategy.toeplitz import inverse_series
from anyorder.workload import Workload
from anyorder.workload.given import GivenWorkload

__all__ = ["epoch_gram", "fit_restarted", "fits_restarted", "restartable"]

Floats = NDArray[np.float64]

_MAX_EPOCH = 2048  # steps in an epoch
_SHORT = 512  # steps of an epoch up to which more epochs are fitted
_FITTED = 8  # epochs that are fitted; others take the parameters of the nearest one
_FASTEST, _SLOWEST = 1.6, -30.0  # log of -log(decay)
_FAST, _SCALE = -1.0, -1.5  # the fastest such decay and log scale at the start
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
            best = by_rows(partial(_refit, dict(points), pattern), workload)
        found.append(best)
    return found


def _losses(workload: Workload, pattern: PerEpoch) -> dict[int, "_EpochLoss"]:
    """Those of the epochs that are fitted."""
    k, s = pattern.k, pattern.steps_per_epoch
    count = _FITTED if s <= _SHORT else _FITTED // 2
    fitted = sorted({0, *np.linspace(0, k - 1, min(k, count)).round().astype(int).tolist()})
    return {e: _EpochLoss(epoch_gram(workload, e * s, s)) for e in fitted}


def _refit(points: dict[int, Floats], pattern: PerEpoch, workload: Workload) -> RestartedBLT:
    """The fit to another weighting of the rows, from the points of the last one, which it moves."""
    losses = _losses(workload, pattern)
    for e, loss in losses.items():
        points[e] = descend(loss, _with_slope(points[e]), restarts=1, gain=_GAIN)[0]
    return _strategy(points, losses, pattern)


def _best(loss: "_EpochLoss", m: int, fewer: Floats | None, near: Floats | None) -> Floats:
    """The point of least loss with m buffers: from the neighbour's point, in the first epoch from spread decays."""
    if near is None:
        rates = np.linspace(math.log(1 / loss.n), _FAST, m + 1)[1:]
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
    b[-1] -= math.log(2)
    return np.concatenate([a, a[-1:], b, b[-1:], rest])


def _strategy(points: dict[int, Floats], losses: dict[int, "_EpochLoss"], order: PerEpoch) -> RestartedBLT:
    """All epochs, with the norms of `epoch_shares`."""
    fitted = np.array(sorted(points))
    values = np.array([losses[e](points[e])[0] for e in fitted])
    roots = np.sqrt(np.exp(np.interp(np.arange(order.k), fitted, np.log(values))))
    nearest = np.abs(np.arange(order.k)[:, None] - fitted).argmin(axis=1)
    table = np.array([points[e] for e in fitted])[nearest]
    m = table.shape[1] // 2
    decays, scales = np.exp(-np.exp(np.clip(table[:, :m], _SLOWEST, _FASTEST))), np.exp(table[:, m : 2 * m])
    shares = np.sqrt(roots / roots.sum())
    return RestartedBLT(decays, scales, np.exp(table[:, -1]), shares, order.n, order.steps_per_epoch)


def epoch_gram(workload: Workload, start: int, s: int) -> Floats:
    """The diagonal block of A^T A for steps start, .., start + s - 1.

    Beyond 4096 steps: rows after the epoch see it through velocity and iterate at its end only, so they are
    combinations of two of them.
    """
    n, end = workload.n, start + s
    if n <= DENSE_STEPS or isinstance(workload, GivenWorkload):
        block = workload.matrix()[start:, start:end]
        return np.asarray(block.T @ block)
    inside = _without_weights(workload, slice(start, end)).matrix() * workload.weights[start:end, None]
    M = inside.T @ inside
    if end < n:
        plain = _without_weights(workload, slice(0, n))
        rows = plain.apply_transposed(_units(n, np.unique([end, n - 1])))[start:end].T
        last = np.arange(max(s - 2, 0), s)
        later = workload.apply(_units(n, start + last))[end:]
        mixing = lstsq(rows[:, last].T, later.T, cond=1e-10)[0]  # later = mixing^T rows
        M += rows.T @ (mixing @ mixing.T) @ rows
    return np.asarray(M)


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
        decays, scales, weight = np.exp(-np.exp(rates)), np.exp(x[m : 2 * m]), np.exp(2 * x[-1])
        powers = decays ** np.arange(n - 1)[:, None]
        c = np.concatenate([[1.0], powers @ scales])
        g = inverse_series(c, n)
        if not np.abs(g).max() < _UNSTABLE:
            return math.inf, np.zeros_like(x)
        d = np.sqrt(np.cumsum(np.square(c))[::-1] + weight)
        value, to_d, to_g = self._without_total(d, g)
        # less beta y^T N y, with N = D M D
        v = np.cumsum(g)[::-1]
        y = fftconvolve(g, v)[:n]
        moved = self.M @ (d * y)
        form = (d * y) @ moved
        denominator = 1 + weight * (v @ v)
        beta = weight / denominator
        to_d -= 2 * beta * y * moved
        to_y = -2 * beta * d * moved
        to_v = _correlated(to_y, g) + 2 * beta**2 * form * v
        to_g += _correlated(to_y, v) + np.cumsum(to_v)[::-1]
        by_weight = (to_d / d).sum() / 2 - form / denominator**2
        to_c = (c * np.cumsum(to_d / d)[::-1] - _correlated(to_g, fftconvolve(g, g)[:n]))[1:]
        by_decay = scales * ((to_c * np.arange(n - 1)) @ powers)  # times the decay
        by_rate = np.where(rates == x[:m], -by_decay * np.exp(rates), 0.0)
        return float(value - beta * form), np.concatenate([by_rate, scales * (to_c @ powers), [2 * weight * by_weight]])

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
            value += float(by_d @ own_d)
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
