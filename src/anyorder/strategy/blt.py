"""Buffered linear Toeplitz: C is a sum of m geometric decays, and so is C^-1; noise from m buffers."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.strategy.base import Recurrence, Row, State, Vector
from anyorder.strategy.toeplitz import Floats, Toeplitz, repeated

__all__ = ["BLT", "system"]


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
        inner = self.decays ** np.arange(block)[:, None]
        outer = self.scales * self.decays ** (block * np.arange(-(-m // block)))[:, None]
        return np.concatenate([[1.0], (outer @ inner.T).ravel()])[:m]

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
        energy, _ = _energies(q, F, self.n - 1)
        return float(1 + energy.sum())

    def mean_prefix_variance(self) -> float:
        """Mean variance of the n prefix sums: closed form, O(m^3 log n).

        (1/n) sum_t (n - t) (g_0 + .. + g_t)^2
        """
        q, F = self._prefix_system()
        energy, weighted = _energies(q, F, self.n - 1)
        return float(1 + energy.sum() - weighted.sum() / self.n)

    def recurrences(self, steps: NDArray[np.int64]) -> Recurrence:
        """State: the buffers."""
        F, G, h, g = system(self.decays, self.scales)
        return repeated(F, G, h, float(g), len(steps))

    def init(self, size: int) -> State:
        """Empty buffers."""
        checks.integer("size", size, low=0)
        return tuple(np.zeros(size, dtype=np.float32) for _ in range(self.num_buffers))

    def step(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        """One pass over the buffers.

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
        q = q @ F
    jump = np.linalg.matrix_power(F, block)
    outer = np.empty((-(-length // block), len(v)))
    for j in range(len(outer)):
        outer[j] = v
        v = jump @ v
    return np.asarray((outer @ inner.T).ravel()[:length])


def _energies(q: Floats, F: Floats, length: int) -> tuple[Floats, Floats]:
    """W = sum_{t < length} F^t' q q' F^t and the same with weights t + 1, by doubling: O(m^3 log length)."""
    Q = np.outer(q, q)
    W, T, P, done = np.zeros_like(F), np.zeros_like(F), np.eye(len(F)), 0
    for bit in f"{length:b}":
        T = T + P.T @ (T + done * W) @ P
        W, P, done = W + P.T @ W @ P, P @ P, 2 * done
        if bit == "1":
            T = Q + F.T @ (T + W) @ F
            W, P, done = Q + F.T @ W @ F, P @ F, done + 1
    return W, T
