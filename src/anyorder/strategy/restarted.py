"""Buffers that start anew in every epoch, and a noise of its own for the epoch's total: for shuffled epochs."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import block_diag, solve_triangular, toeplitz

from anyorder import checks
from anyorder.checks import final, frozen
from anyorder.errors import ArgumentError
from anyorder.strategy.base import Recurrence, Row, State, Strategy, Vector
from anyorder.strategy.blt import BLT

__all__ = ["RestartedBLT"]

Floats = NDArray[np.float64]


@final
class RestartedBLT(Strategy):
    """C block-diagonal, a block for each epoch: a BLT, a row for the total, all columns of one norm.

    With T the BLT's lower-triangular Toeplitz matrix the block of epoch e has the Gram matrix

        X = share^2 diag(d)^-1 (T^T T + total^2 1 1^T) diag(d)^-1,     X_tt = share^2

    A unit that takes part once in each epoch, anywhere, has sens^2 = sum of share^2 exactly: nothing is lost to steps
    that are last in one epoch and first in the next. What is lost is the correlation between epochs; the row
    total 1^T, a noisy sum of the whole epoch, keeps what all later iterates carry on small, as the root of a completed
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
        return np.asarray(block_diag(*(self._block(e, inverse=False) for e in range(self.num_epochs))))

    def noising_matrix(self) -> Floats:
        """C^-1, (n, n) lower triangular, block-diagonal."""
        return np.asarray(block_diag(*(self._block(e, inverse=True) for e in range(self.num_epochs))))

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
            return np.asarray(factors[:, None] * (toeplitz(blt.noising_coefficients(), zeros) @ G))
        T = toeplitz(blt.toeplitz_coefficients(), zeros)
        return np.asarray(solve_triangular(G, T, lower=True) / factors)

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
        """One pass over the buffers, which are emptied at an epoch's first step."""
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
