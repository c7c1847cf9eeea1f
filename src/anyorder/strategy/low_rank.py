"""C^-1 is banded plus low rank: the dense optimum, made short enough to stream."""

from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.patterns import Participation
from anyorder.strategy import dense
from anyorder.strategy.base import Recurrence, Row, State, Strategy, Vector, pack, unpack
from anyorder.strategy.dense import Dense
from anyorder.strategy.fitting import inverse_of_lower, product, question_of, remember, solved
from anyorder.strategy.sensitivity import Change, inversion, norm, resolvent, root, rounded
from anyorder.strategy.toeplitz import delays
from anyorder.workload import Workload

Floats = NDArray[np.float64]
PENALTY = 1e-12  # ridge of the alternating least squares, relative to the largest entry: keeps them solvable, no more
SWEEPS = 200
_UNIT = 2.0**-16


@final
class BandedLowRank(Strategy):
    """K = C^-1 with p free bands and, below them, the entries of a matrix of rank r [Denisov et al. 2022, App. H].

        K[t, s] = bands[t, t - s]        for t - s < p
                = left[t] . right[s]     for t - s >= p

    Noise from r accumulators, a_t = a_{t-1} + right[t-p] z_{t-p}, and the last p rows of Z: O((p + r) d) a step.

    The paper gives this form to B, of the prefix sum; then K, the differences of its rows, has it too.

    Args:
        bands: (n, p) bands[t, l] = K[t, t - l], 0 where l > t; bands[:, 0] > 0.
        left: (n, r).
        right: (n, r).
    """

    def __init__(self, bands: ArrayLike, left: ArrayLike, right: ArrayLike) -> None:
        self.bands: Floats = checks.array("bands", bands, ndim=2)
        self.left: Floats = checks.array("left", left, ndim=2)
        self.right: Floats = checks.array("right", right, ndim=2)
        n, p = self.bands.shape
        if p > n:
            raise ArgumentError(f"bands must be (n, p) with p <= n, got shape {self.bands.shape}")
        if self.left.shape != self.right.shape or len(self.left) != n:
            raise ArgumentError(
                f"left and right must both be (n, r) with n={n}, got {self.left.shape} and {self.right.shape}"
            )
        if (self.bands[:, 0] <= 0).any():
            raise ArgumentError(f"bands[:, 0], the diagonal, must be above 0, got {self.bands[:, 0].min()!r}")
        if self.bands[np.arange(p) > np.arange(n)[:, None]].any():
            raise ArgumentError("bands[t, l] must be 0 where l > t: those entries lie outside the matrix")

    @classmethod
    def approximate(cls, strategy: Strategy, *, num_bands: int, rank: int, sweeps: int = SWEEPS) -> "BandedLowRank":
        """The banded and low-rank strategy near a given one, such as the dense optimum.

        The noise of the prefix sums, B = A C^-1 with A all ones below the diagonal, is what is approximated: its
        first num_bands - 1 bands are kept, the rest is fitted by alternating least squares, and K = A^-1 B. A fit
        to B of another workload is no better: momentum only smooths the prefix sums. C is the inverse of this K,
        so privacy is exact, whatever the fit.

        Args:
            strategy: square; its n is at least num_bands.
            num_bands: p of the result, at least 2.
            rank: r.
            sweeps: of the least squares; 20 come near 200.
        Cost: O(n^3) time, O(n^2 + n rank^2) memory.
        """
        n = strategy.n
        if strategy.num_rows != n:
            raise ArgumentError(
                f"strategy must be square, got {strategy.num_rows} rows for {n} steps; a tree has no inverse"
            )
        num_bands = checks.integer("num_bands", num_bands, low=2, high=n)
        rank = checks.integer("rank", rank, low=1, high=n)
        B: Floats = np.cumsum(inverse_of_lower(strategy.matrix()), axis=0)
        left, right = _complete(B, num_bands - 1, rank, checks.integer("sweeps", sweeps, low=1))
        kept = np.tril(np.triu(B, 2 - num_bands)) + np.tril(product(left, right.T), 1 - num_bands)
        K = np.diff(kept, axis=0, prepend=0.0)
        bands = np.zeros((n, num_bands))
        for band in range(num_bands):
            bands[band:, band] = np.diagonal(K, -band)
        return cls(bands, np.diff(left, axis=0, prepend=0.0), right)

    @property
    def n(self) -> int:
        """Number of steps."""
        return len(self.bands)

    @property
    def num_bands(self) -> int:
        """Number of bands p."""
        return int(self.bands.shape[1])

    @property
    def rank(self) -> int:
        """Number of accumulators r."""
        return int(self.left.shape[1])

    def noising_matrix(self) -> Floats:
        """C^-1, (n, n)."""
        K = np.zeros((self.n, self.n))
        for left, right in zip(self.left.T, self.right.T, strict=True):
            K += np.outer(left, right)  # in this order on every processor, since scales are fitted to it
        K = np.tril(K, -self.num_bands)
        for band in range(self.num_bands):
            K[np.arange(band, self.n), np.arange(self.n - band)] = self.bands[band:, band]
        return K

    def matrix(self) -> Floats:
        """C, (n, n), by back substitution: O(n^3)."""
        return np.asarray(scipy.linalg.solve_triangular(self.noising_matrix(), np.eye(self.n), lower=True))

    def recurrences(self, steps: NDArray[np.int64]) -> Recurrence:
        """State: the accumulators, without the row that enters now, and the last p rows of Z, newest first."""
        k, r, p = len(steps), self.rank, self.num_bands
        leaving = np.where(steps[:, None] >= p, self.right[steps - p], 0.0)
        F = np.zeros((k, r + p, r + p))
        F[:, :r, :r] = np.eye(r)
        F[:, :r, -1] = leaving
        F[:, r:, r:], entry = delays(p)
        G = np.concatenate([np.zeros(r), entry])
        left = self.left[steps]
        h = np.concatenate([left, self.bands[steps, 1:], (left * leaving).sum(axis=1)[:, None]], axis=1)
        return Recurrence(F, np.repeat(G[None], k, axis=0), h, self.bands[steps, 0])

    def init(self, size: int) -> State:
        """Empty accumulators."""
        checks.integer("size", size, low=0)
        return tuple(np.zeros(size, dtype=np.float32) for _ in range(self.rank))

    def step(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        """The last p rows of Z, made again, and the accumulators."""
        p = self.num_bands
        if t >= p:
            leaving = row(t - p)
            weights = self.right[t - p].astype(np.float32)
            state = tuple(total + weight * leaving for total, weight in zip(state, weights, strict=True))
        bands = self.bands[t].astype(np.float32)
        noise = bands[0] * row(t)
        for band in range(1, min(p, t + 1)):
            noise += bands[band] * row(t - band)
        for weight, total in zip(self.left[t].astype(np.float32), state, strict=True):
            noise += weight * total
        return noise, state

    @property
    def state_rows(self) -> int:
        """The accumulators."""
        return self.rank

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "banded_low_rank", "n": n, "p": p, "rank": r, "bands", "left", "right": base64}."""
        return {
            "kind": "banded_low_rank", "n": self.n, "p": self.num_bands, "rank": self.rank,
            "bands": pack(self.bands), "left": pack(self.left), "right": pack(self.right),
        }  # fmt: skip

    @classmethod
    def _from_dict(cls, n: int, p: int, rank: int, bands: str, left: str, right: str) -> "BandedLowRank":
        return cls(unpack("bands", bands, (n, p)), unpack("left", left, (n, rank)), unpack("right", right, (n, rank)))

    def __repr__(self) -> str:
        return f"BandedLowRank(num_bands={self.num_bands}, rank={self.rank}, n={self.n})"


def _complete(B: Floats, p: int, rank: int, sweeps: int) -> tuple[Floats, Floats]:
    """left, right (n, rank) with left @ right.T near B on the entries t - s >= p, by alternating least squares.

    Row t of left sees columns s <= t - p only, so all its normal equations are prefix sums over s.
    """
    n = len(B)
    lower = np.tril(B, -p)
    left = _leading(lower, rank)
    right = np.zeros((n, rank))
    penalty = PENALTY * max(float(np.abs(lower).max()), 1.0) * np.eye(rank)
    for _ in range(sweeps):
        moments = np.cumsum((left[:, :, None] * left[:, None, :])[::-1], axis=0)[::-1]
        right[: n - p] = solved(moments[p:] + penalty, product(lower.T, left)[: n - p])
        moments = np.cumsum(right[:, :, None] * right[:, None, :], axis=0)
        left[p:] = solved(moments[: n - p] + penalty, product(lower, right)[p:])
    return left, right


def _leading(M: Floats, rank: int) -> Floats:
    """(n, rank) left singular vectors times the roots of their values, in few digits, see `arithmetic`: a start."""
    vectors, values, _ = np.linalg.svd(M)
    vectors = vectors[:, :rank]
    vectors = vectors * np.where(vectors.sum(axis=0) < 0, -1.0, 1.0)
    return np.asarray(np.rint(vectors * np.sqrt(values[:rank]) / _UNIT) * _UNIT + 0.0)  # of -0, 0


# -- fit -------------------------------------------------------------------------------------------------------------


def fit(workload: Workload, participation: Participation, objective: str, bands: int, rank: int) -> BandedLowRank:
    """The dense optimum made short [Denisov et al. 2022, App. H]; the optimum is kept on disk for other sizes."""
    optimum = remember(
        question_of("dense", workload, participation, objective) | {"size": {}},
        lambda: dense.fit(workload, participation, objective),
        encode=Dense.to_dict,
        decode=lambda data: Dense._from_dict(data["n"], data["lower"]),
    )
    return BandedLowRank.approximate(optimum, num_bands=bands, rank=rank)


# -- rounding --------------------------------------------------------------------------------------------------------


def change(strategy: BandedLowRank) -> Change:
    """By columns, of C~ with `bands`, `left` and `right` rounded; as a whole, what the two inverses lack."""
    C, K = strategy.matrix(), strategy.noising_matrix()
    used = BandedLowRank(rounded(strategy.bands), rounded(strategy.left), rounded(strategy.right)).matrix()
    columns = root(np.square(used - C).sum(axis=0) / strategy.column_norms_squared())
    return Change(columns, resolvent(2 * inversion(C, K) * norm(C, K)))
