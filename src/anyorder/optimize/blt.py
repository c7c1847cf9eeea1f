"""Fits of buffered linear Toeplitz strategies, for any number of steps.

The noise of the iterate p follows a linear recurrence x' = F x + G z of m buffers, velocity and iterate; its energy
over L steps is a sum of powers of F, by doubling in O(m^3 log L). The sensitivity is a sum of geometric series between
participations. Both are analytic in the decays and scales, so gradients are taken by complex steps, exact to rounding,
all parameters in one batch.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.error.blocks import joined
from anyorder.errors import PlanError
from anyorder.optimize.bounds import OBJECTIVES
from anyorder.optimize.patterns import check_optimisable, stride
from anyorder.optimize.toeplitz import DENSE_STEPS, Problem, Valued, descend, reciprocal, worst_steps
from anyorder.patterns import Participation
from anyorder.strategy import BLT
from anyorder.strategy.blt import system
from anyorder.workload import Workload
from anyorder.workload.given import GivenWorkload

__all__ = ["Blt", "blt_of", "fit_blt", "fit_blts", "grown", "series_loss"]

Floats = NDArray[np.float64]
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
    rates = np.linspace(math.log(2 / n), _FASTEST - 0.5, _STARTS)  # of decay, on a log scale
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
    return BLT(decays[order], scales[order], n)


def _square_root(n: int, m: int, slowest: float, fastest: float) -> Floats:
    """A start with c_t near t^(-1/2) / sqrt(pi) = (1/pi) integral e^(a/2) exp(-e^a t) da, summed at m places of a."""
    a = np.linspace(math.log(slowest / n), fastest, m)
    return np.concatenate([a, a / 2 + math.log((a[1] - a[0]) / math.pi) - np.exp(a)])


def _loss(workload: Workload, participation: Participation, objective: str) -> "partial[Valued]":
    if workload.n <= DENSE_STEPS and not workload.is_toeplitz:
        return partial(series_loss, Problem(workload, participation, objective))
    return partial(_stepped, Blt(workload, participation, objective))


def _parameters(x: Numbers) -> tuple[Numbers, Numbers]:
    """Decays exp(-exp(a)) and scales exp(b) from x = (a, b), in the last axis."""
    m = x.shape[-1] // 2
    return np.exp(-np.exp(_clipped(x[..., :m]))), np.exp(x[..., m:])


def _clipped(a: Numbers) -> Numbers:
    """Within the range of decays; outside it nothing depends on a."""
    return np.where(a.real > _FASTEST, _FASTEST, np.where(a.real < _SLOWEST, _SLOWEST, a))


def series_loss(problem: Problem, x: Floats) -> Valued:
    """The loss from the first n coefficients of C."""
    m, n = len(x) // 2, problem.n
    decays, scales = _parameters(x)
    powers = decays ** np.arange(n - 1)[:, None]
    c = np.concatenate([[1.0], powers @ scales])
    error, g_error = reciprocal(c, n, problem.error)
    sens, g_sens = problem.sens(c)
    g = (g_error * sens + error * g_sens)[1:]
    by_scale = scales * (g @ powers)
    by_decay = scales * ((g * np.arange(n - 1)) @ powers) / decays
    inside = (x[:m] < _FASTEST) & (x[:m] > _SLOWEST)
    by_rate = np.where(inside, -by_decay * decays * np.exp(_clipped(x[:m])), 0.0)
    return error * sens, np.concatenate([by_rate, by_scale])


def _stepped(model: "Blt", x: Floats) -> Valued:
    """The value at x and its gradient, by complex steps."""
    batch = np.concatenate([x[None], x + 1j * _STEP * np.eye(len(x))])
    values = model.loss(batch)
    return float(values[0].real), values[1:].imag / _STEP


class Blt:
    """The loss of BLTs in closed form, for batches of (complex) parameters.

    Args:
        workload: Toeplitz or not; not `Custom` beyond 4096 steps.
        participation: as in `toeplitz.Problem`.
        objective: "mean", "max" or "last".
    """

    def __init__(self, workload: Workload, participation: Participation, objective: str) -> None:
        check_optimisable(participation)
        self.workload, self.objective, self.n = workload, objective, workload.n
        self.steps = worst_steps(participation)
        self.any_start = len(self.steps) > 1 and stride(participation.pattern) is None
        self.segments = _segments(workload)

    def loss(self, x: Numbers) -> Numbers:
        """Squared loss for (batch, 2 m) parameters."""
        decays, scales = _parameters(x)
        return self.sens(decays, scales) * self.error(decays, scales)

    def sens(self, decays: Numbers, scales: Numbers) -> Numbers:
        """Squared sensitivity for the worst pattern, (batch,).

        Where gaps are free, c_0 = 1 is replaced by c_1 = sum(scales) if that is more, so that c does not rise.
        """
        head: Numbers = np.ones_like(scales[:, 0])
        if self.any_start:
            head = np.where(scales.sum(axis=1).real > 1, scales.sum(axis=1), head)
        rates = -np.log(decays)
        sums = rates[:, :, None] + rates[:, None, :]  # -log of decay_i decay_j
        buffers, total = np.zeros_like(decays), np.zeros_like(decays[:, 0])
        gaps = np.diff(self.steps, append=self.n)
        for gap in gaps:
            total = total + (head + (scales * buffers).sum(axis=1)) ** 2
            buffers = decays * buffers + 1
            w = scales * buffers
            series = np.expm1(-(gap - 1) * sums) / np.expm1(-sums)
            total = total + np.einsum("bi,bij,bj->b", w, series, w)
            buffers = decays ** (gap - 1) * buffers
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
                W, T = _energies(q, F, length)
                start = np.einsum("bij,bji->b", _transposed(F) @ W @ F, covariance)
                noise = np.einsum("bi,bij,bj->b", G, (length + 1) * W - T, G)
                total.append(weight * (start + noise) / self.n)
            if len(self.segments) > 1 or self.objective != "mean":
                power = _power(F, length)
                covariance = power @ covariance @ _transposed(power) + _energy(G, _transposed(F), length)
                if self.objective != "mean":
                    total.append(weight * covariance[:, -1, -1])
        if self.objective == "last":
            return total[-1]
        if self.objective == "max":
            top = max(value[0].real for value in total)
            return np.asarray(top * sum((value / top) ** 24 for value in total) ** (1 / 24))
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


def _energies(q: Numbers, F: Numbers, length: int) -> tuple[Numbers, Numbers]:
    """W = sum_{t < length} F^t' q q' F^t, and T, the same with weights t + 1, by doubling: O(m^3 log length)."""
    Q = q[:, :, None] * q[:, None, :]
    W, T, P, done = np.zeros_like(F), np.zeros_like(F), np.broadcast_to(np.eye(F.shape[1]), F.shape), 0
    for bit in f"{length:b}":
        T = T + _transposed(P) @ (T + done * W) @ P
        W, P, done = W + _transposed(P) @ W @ P, P @ P, 2 * done
        if bit == "1":
            T = Q + _transposed(F) @ (T + W) @ F
            W, P, done = Q + _transposed(F) @ W @ F, P @ F, done + 1
    return W, T


def _energy(q: Numbers, F: Numbers, length: int) -> Numbers:
    """W alone."""
    Q = q[:, :, None] * q[:, None, :]
    W, P = np.zeros_like(F), np.broadcast_to(np.eye(F.shape[1]), F.shape)
    for bit in f"{length:b}":
        W, P = W + _transposed(P) @ W @ P, P @ P
        if bit == "1":
            W, P = Q + _transposed(F) @ W @ F, P @ F
    return W


def _power(F: Numbers, exponent: int) -> Numbers:
    return np.linalg.matrix_power(F, exponent)


def _transposed(matrices: Numbers) -> Numbers:
    """Without conjugation, which is not analytic."""
    return np.swapaxes(matrices, 1, 2)
