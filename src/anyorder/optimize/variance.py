"""The variance of every iterate, also where n is too large for a matrix."""

import numpy as np
from numpy.typing import NDArray

from anyorder import error
from anyorder._filters import fftconvolve
from anyorder.errors import PlanError
from anyorder.optimize.blt import recurrence
from anyorder.optimize.toeplitz import DENSE_STEPS
from anyorder.strategy import BLT, Independent, RestartedBLT, Strategy, Toeplitz
from anyorder.workload import Custom, Workload

__all__ = ["has_variances", "row_variances"]

Floats = NDArray[np.float64]


def has_variances(strategy: Strategy, workload: Workload) -> bool:
    """Whether `row_variances` knows a way that n allows."""
    if workload.is_prefix_sum or workload.n <= DENSE_STEPS:
        return True
    if isinstance(strategy, RestartedBLT):
        return not isinstance(workload, Custom)
    if workload.is_toeplitz:
        return isinstance(strategy, (Toeplitz, Independent))
    return isinstance(strategy, (BLT, Independent)) and not isinstance(workload, Custom)


def row_variances(strategy: Strategy, workload: Workload) -> Floats:
    """(n,) || (A K)[t] ||^2 for rows of Z of variance 1, no sensitivity.

    As `error.row_variances` for prefix sums and up to 4096 steps. Beyond: for Toeplitz strategy and workload the
    cumulative energy of the product of two series, O(n log n); for a RestartedBLT, and for a BLT and a schedule, the
    covariance of buffers, velocity and iterate, step by step, O(n m^2).
    """
    if not has_variances(strategy, workload):
        raise PlanError(f"the error of {strategy!r} for {workload!r} needs matrices of at most {DENSE_STEPS} steps")
    if workload.is_prefix_sum or workload.n <= DENSE_STEPS:
        return error.row_variances(strategy, workload)
    if isinstance(strategy, RestartedBLT):
        return _restarted(strategy, workload)
    if workload.is_toeplitz:
        a = workload.toeplitz_coefficients()
        b = fftconvolve(a, strategy.noising_coefficients())[: len(a)] if isinstance(strategy, Toeplitz) else a
        return np.cumsum(np.square(b))
    decays, scales = (strategy.decays, strategy.scales) if isinstance(strategy, BLT) else (np.zeros(1), np.zeros(1))
    return _stepwise(decays, scales, workload)


def _stepwise(decays: Floats, scales: Floats, workload: Workload) -> Floats:
    """Var p_t by Sigma <- F Sigma F^T + G G^T; F and G are linear in the rate."""
    bases = [recurrence(decays[None], scales[None], rate, workload) for rate in (0.0, 1.0)]
    F, G = bases[0][0][0], bases[0][1][0]
    dF, dG = bases[1][0][0] - F, bases[1][1][0] - G
    covariance = np.zeros_like(F)
    result = np.empty(workload.n)
    for t, rate in enumerate(workload.learning_rates):
        step, noise = F + rate * dF, G + rate * dG
        covariance = step @ covariance @ step.T + np.outer(noise, noise)
        result[t] = covariance[-1, -1]
    return result * np.square(workload.weights)


def _restarted(strategy: RestartedBLT, workload: Workload) -> Floats:
    """The same with noise that changes from step to step, its buffers empty as an epoch begins."""
    beta, decay = workload.momentum, workload.weight_decay
    m = strategy.num_buffers + 1
    move, noise = np.zeros((m + 2, m + 2)), np.empty(m + 2)
    covariance = np.zeros((m + 2, m + 2))
    result = np.empty(workload.n)
    for t, rate in enumerate(workload.learning_rates):
        if t % strategy.steps_per_epoch == 0:
            covariance[:m], covariance[:, :m] = 0.0, 0.0
        move[:m, :m], noise[:m], fresh, own = strategy.system(t)
        move[m, :m], move[m, m], move[m, m + 1] = fresh, beta, -decay if workload.coupled else 0.0
        update, noise[m] = move[m].copy(), own
        if workload.nesterov:
            update = beta * update
            update[:m] += fresh
            update[m + 1] += move[m, m + 1]
            own *= 1 + beta
        move[m + 1], noise[m + 1] = rate * update, rate * own
        move[m + 1, m + 1] += 1.0 if workload.coupled else 1.0 - rate * decay
        covariance = move @ covariance @ move.T + np.outer(noise, noise)
        result[t] = covariance[-1, -1]
    return result * np.square(workload.weights)
