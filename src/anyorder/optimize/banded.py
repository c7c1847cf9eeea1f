"""Fits of banded strategies, every column its own: p n numbers, by quasi-Newton steps with exact gradients.

With M = A^T A and K = C^-1 the loss is tr(K^T M K) and its gradient with respect to C is -2 K^T M K K^T. Where p <= b
the participations of a unit meet no common row of C, so only the norms of the columns enter the sensitivity.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag, cholesky
from scipy.linalg.lapack import dtrtri

from anyorder import checks
from anyorder.errors import PlanError
from anyorder.optimize.patterns import disjoint, shuffled, stride
from anyorder.optimize.toeplitz import Problem, Valued, descend, fit_toeplitz
from anyorder.participation import MinSeparation, SingleEpoch
from anyorder.patterns import Groups, Participation
from anyorder.strategy import Banded
from anyorder.workload import Workload, prefix_sum

__all__ = ["epoch_factors", "epoch_shares", "fit_banded"]

Floats = NDArray[np.float64]

_MAX_STEPS = 2048


def fit_banded(workload: Workload, participation: Participation, bands: int, *, max_iterations: int = 60) -> Banded:
    """The banded C of least mean-square loss.

    FixedOrder: the squared norms of the columns of a pattern sum to 1. EpochShuffle: bands end with their epoch, and
    the columns of an epoch have equal norms, see `epoch_shares`. Else every column has norm 1, so that the
    sensitivity is sqrt(k). It starts from the banded Toeplitz fit with columns normalised, so it is never worse.

    Args:
        workload: of at most 2048 steps.
        participation: with more than one participation, `bands` is lowered to the smallest distance b, or to the steps
            of an epoch: with more, the columns of one unit would overlap, which costs more than it gains.
        bands: p.
    Cost: four n x n products for each of some tens of iterations.
    """
    n, k = workload.n, participation.max_participations
    if n > _MAX_STEPS:
        raise PlanError(f"banded strategies are fitted for at most {_MAX_STEPS} steps, got {n}; use kind 'toeplitz'")
    bands = checks.integer("bands", bands, low=1, high=n)
    A = workload.matrix()
    epochs = shuffled(participation.pattern)
    if epochs is not None and k > 1:
        s = epochs.steps_per_epoch
        parts = [_fit_columns(R, prefix_sum(s), SingleEpoch(s), bands, max_iterations) for R in epoch_factors(A, s)]
        shares = epoch_shares([loss for _, loss in parts])
        return Banded(block_diag(*(share * C for share, (C, _) in zip(shares, parts, strict=True))))
    if stride(participation.pattern) is None:
        participation = MinSeparation(n, participation.min_separation, k)
    return Banded(_fit_columns(A, workload, participation, bands, max_iterations)[0])


def _fit_columns(
    A: Floats, like: Workload, participation: Participation, bands: int, max_iterations: int
) -> tuple[Floats, float]:
    """C and its squared loss: from the Toeplitz fit to a workload of the kind of A, with columns normalised."""
    n = len(A)
    bands = min(bands, participation.min_separation)
    groups = [np.arange(n)[:, None]] if stride(participation.pattern) is None else disjoint(participation)
    start = fit_toeplitz(Problem(like, participation), bands).coefficients
    scale = float(np.linalg.norm(A))
    loss = _Loss(A / scale, bands, groups)
    x = loss.pack(np.repeat(start[:, None], n, axis=1))
    x, value = descend(loss, x, max_iterations=max_iterations, restarts=1, gain=1e-8)
    return loss.matrix(loss.unpack(x)[0]), value * scale**2


def epoch_factors(A: Floats, s: int) -> list[Floats]:
    """R_e with R_e^T R_e = the diagonal block of A^T A of each epoch: the workload of a C that starts anew in it."""
    M = A.T @ A
    factors = []
    for start in range(0, len(A), s):
        block = M[start : start + s, start : start + s]
        factors.append(cholesky(block + 1e-13 * np.trace(block) * np.eye(s)))  # definite also for a rate of 0
    return factors


def epoch_shares(losses: list[float]) -> Floats:
    """The column norms of each epoch, squares summing to 1, of least total: sum_e loss_e / share_e^2.

    With X = 0 between epochs a unit of `EpochShuffle` adds up one column of each, so share_e^2 ~ sqrt(loss_e).
    """
    roots = np.sqrt(np.array(losses))
    return np.asarray(np.sqrt(roots / roots.sum()))


class _Loss:
    """|| A C^-1 ||_F^2 over the entries of C's bands, whose columns are normalised pattern by pattern."""

    def __init__(self, A: Floats, bands: int, groups: Groups) -> None:
        self.M, self.n, self.groups = A.T @ A, len(A), groups
        self.rows, self.columns = np.nonzero(np.arange(bands)[:, None] + np.arange(self.n) < self.n)
        self.bands = bands

    def pack(self, bands: Floats) -> Floats:
        """The entries inside the matrix of (p, n) bands."""
        return bands[self.rows, self.columns]

    def unpack(self, x: Floats) -> tuple[Floats, Floats]:
        """(p, n) normalised bands, and the (n,) norms by which their columns were divided."""
        raw = np.zeros((self.bands, self.n))
        raw[self.rows, self.columns] = x
        squares = np.square(raw).sum(axis=0)
        norms = np.empty(self.n)
        for steps in self.groups:
            norms[steps] = np.sqrt(squares[steps].sum(axis=1))[:, None]
        return raw / norms, norms

    def matrix(self, bands: Floats) -> Floats:
        """C, (n, n)."""
        C = np.zeros((self.n, self.n))
        C[self.rows + self.columns, self.columns] = bands[self.rows, self.columns]
        return C

    def __call__(self, x: Floats) -> Valued:
        bands, norms = self.unpack(x)
        if (bands[0] <= 0).any():
            return math.inf, np.zeros_like(x)
        K, _ = dtrtri(self.matrix(bands), lower=1)
        MK = self.M @ K
        value = float(np.einsum("ij,ij->", K, MK))
        full = (K.T @ MK) @ K.T
        gradient = np.zeros_like(bands)
        gradient[self.rows, self.columns] = -2 * full[self.rows + self.columns, self.columns]
        # through the norms: remove what only rescales a pattern
        along = (gradient * bands).sum(axis=0)
        shares = np.empty(self.n)
        for steps in self.groups:
            shares[steps] = along[steps].sum(axis=1)[:, None]
        return value, self.pack((gradient - bands * shares) / norms)
