"""C with p bands, each column its own: noise by back substitution on the last p - 1 outputs."""

import math
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final, frozen
from anyorder.errors import ArgumentError, PlanError
from anyorder.patterns import Groups, Listed, Participation, Pattern, Separated
from anyorder.strategy.base import Recurrence, Row, State, Strategy, Vector, check_lower_triangular, pack, unpack
from anyorder.strategy.fitting import (
    Valued,
    by_rows,
    descend,
    dot,
    gram_of_lower,
    lower_product,
    mostly_last,
    product,
    root_of,
    shuffled,
    stride,
)
from anyorder.strategy.sensitivity import (
    BandedGram,
    Bound,
    Change,
    banded_bound,
    banded_squares,
    banded_terms,
    better,
    by_entry,
    gram_bound,
    root,
    roots,
    rounded,
    visits,
)
from anyorder.strategy.toeplitz import Problem, delays, fit_toeplitz
from anyorder.strategy.variances import Way, by_bands, of_iterates, substituted
from anyorder.workload import Workload, prefix_sum

Floats = NDArray[np.float64]


@final
class Banded(Strategy):
    """C lower triangular with C[i, j] = 0 for i - j >= p [Choquette-Choo et al. 2023].

        y_t = (z_t - C[t, t-1] y_{t-1} - .. - C[t, t-p+1] y_{t-p+1}) / C[t, t]              O(p d) a step

    With unit columns and at least p steps from one participation of a unit to the next, its columns are
    orthogonal and the sensitivity is sqrt(k) exactly.

    Args:
        bands: (p, n) with p < n, bands[l, j] = C[j + l, j]; entries with j + l >= n must be 0. Or C itself, (n, n),
            whose bands below the last non-zero one are dropped.
    """

    def __init__(self, bands: ArrayLike) -> None:
        values = checks.array("bands", bands, ndim=2)
        p, n = values.shape
        if p > n:
            raise ArgumentError(f"bands must be (p, n) with p <= n, got shape {values.shape}")
        if p == n:
            values = _bands_of(check_lower_triangular("bands", values))
            p = len(values)
        outside = np.arange(p)[:, None] + np.arange(n) >= n
        if values[outside].any():
            raise ArgumentError("bands[l, j] must be 0 where j + l >= n: those entries lie below the matrix")
        if (values[0] <= 0).any():
            raise ArgumentError(f"bands[0], the diagonal of C, must be above 0, got {values[0].min()!r}")
        self.bands: Floats = frozen(values)

    @property
    def n(self) -> int:
        """Number of steps."""
        return int(self.bands.shape[1])

    @property
    def num_bands(self) -> int:
        """Number of bands p."""
        return len(self.bands)

    def normalized(self) -> "Banded":
        """The strategy with every column divided by its norm."""
        return Banded(self.bands / np.sqrt(self.column_norms_squared()))

    def matrix(self) -> Floats:
        """C, (n, n)."""
        return self.columns(np.arange(self.n))

    def columns(self, steps: ArrayLike) -> Floats:
        """C[:, steps], (n, len(steps))."""
        steps = np.asarray(steps)
        result = np.zeros((self.n, len(steps)))
        for band, values in enumerate(self.bands):
            inside = np.flatnonzero(steps + band < self.n)
            result[steps[inside] + band, inside] = values[steps[inside]]
        return result

    def noising_matrix(self) -> Floats:
        """C^-1, (n, n), by back substitution on the identity."""
        K = np.zeros((self.n, self.n))
        for t in range(self.n):
            K[t, t] = 1.0
            for band in range(1, min(self.num_bands, t + 1)):
                K[t] -= self.bands[band, t - band] * K[t - band]
            K[t] /= self.bands[0, t]
        return K

    def column_norms_squared(self) -> Floats:
        """(n,) squared norms of the columns."""
        return np.asarray(np.square(self.bands).sum(axis=0))

    def gram_bands(self) -> Floats:
        """(p, n) bands of X = C^T C: entry [l, j] is X[j, j + l], 0 where j + l >= n. O(n p^2)."""
        p, n = self.bands.shape
        gram = np.zeros((p, n))
        for gap in range(p):
            # column j meets column j + gap in rows j + gap .. j + p - 1
            gram[gap, : n - gap] = np.einsum("lj,lj->j", self.bands[gap:, : n - gap], self.bands[: p - gap, gap:])
        return gram

    def prefix_variance(self) -> Floats:
        """(n,) variance of each prefix sum's noise, by the covariance of the last p sums: O(n p^2), O(p^2) memory.

        With x_t = x_{t-1} + y_t the sums, back substitution reads C[t, t] x_t = z_t + a_1 x_{t-1} + .. + a_p x_{t-p}.
        """
        p, n = self.bands.shape
        covariance = np.zeros((p, p))  # of x_{t-1}, .., x_{t-p}, at index step modulo p
        variance = np.empty(n)
        for t in range(n):
            row = np.zeros(p + 1)  # C[t, t - l] for l = 0..p
            count = min(p, t + 1)
            row[:count] = self.bands[np.arange(count), t - np.arange(count)]
            a = np.zeros(p)
            a[(t - np.arange(1, p + 1)) % p] = (row[:-1] - row[1:]) / row[0]
            cross = covariance @ a
            variance[t] = a @ cross + 1 / row[0] ** 2
            covariance[t % p], covariance[:, t % p] = cross, cross
            covariance[t % p, t % p] = variance[t]
        return variance

    def recurrences(self, steps: NDArray[np.int64]) -> Recurrence:
        """State: the last p - 1 outputs, newest first."""
        back = np.arange(1, self.num_bands)
        columns = steps[:, None] - back
        diagonal = self.bands[0, steps]
        h = -np.where(columns >= 0, self.bands[back, columns], 0.0) / diagonal[:, None]
        shift, entry = delays(self.num_bands - 1)
        F = np.repeat(shift[None], len(steps), axis=0)
        F[:, :1] = h[:, None]
        return Recurrence(F, entry / diagonal[:, None], h, 1 / diagonal)

    def step(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        """Back substitution; the state is the last p - 1 outputs, newest first."""
        noise = row(t).copy()
        for i, past in enumerate(state, start=1):
            noise -= np.float32(self.bands[i, t - i]) * past
        noise /= np.float32(self.bands[0, t])
        return noise, (noise.copy(), *state)[: self.num_bands - 1]

    @property
    def state_rows(self) -> int:
        """The last p - 1 outputs."""
        return self.num_bands - 1

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "banded", "p": p, "n": n, "bands": base64}."""
        return {"kind": "banded", "p": self.num_bands, "n": self.n, "bands": pack(self.bands)}

    @classmethod
    def _from_dict(cls, p: int, n: int, bands: str) -> "Banded":
        n = checks.integer("n", n, low=1)
        p = checks.integer("p", p, low=1, high=n)
        values = unpack("bands", bands, (p, n))
        return cls(_matrix_of(values)) if p == n else cls(values)

    def __repr__(self) -> str:
        return f"Banded(num_bands={self.num_bands}, n={self.n})"


def _bands_of(C: Floats) -> Floats:
    """(p, n) bands of a lower-triangular C down to its last non-zero one."""
    n = len(C)
    rows, columns = np.nonzero(C)
    bands = np.zeros((int((rows - columns).max()) + 1, n))
    for band in range(len(bands)):
        bands[band, : n - band] = np.diagonal(C, -band)
    return bands


def _matrix_of(bands: Floats) -> Floats:
    """C from n bands."""
    n = bands.shape[1]
    return sum((np.diag(values[: n - band], -band) for band, values in enumerate(bands)), np.zeros((n, n)))


# -- sensitivity -----------------------------------------------------------------------------------------------------


_MAX_DENSE = 2048


def gram_of(strategy: Banded) -> BandedGram:
    """X of a banded C, whose participations far apart do not meet: O(n p^2)."""
    bands = strategy.gram_bands()
    return BandedGram(strategy.n, strategy.num_bands, lambda gaps, steps: bands[gaps, steps])


def bound(strategy: Banded, pattern: Pattern) -> Bound:
    """`banded_bound` of X = C^T C; where that is not exact, X in full may give a smaller bound, for n up to 2048."""
    found = banded_bound(gram_of(strategy), pattern)
    if found.exact or strategy.n > _MAX_DENSE:
        return found
    C = strategy.matrix()
    return better(found, gram_bound(C.T @ C, pattern, terms=strategy.n))


def units(strategy: Banded, listed: Listed) -> Floats:
    """Of each unit: sum |X| over its steps squared."""
    X = gram_of(strategy)
    return roots(banded_squares(X, visits(listed)).upper, banded_terms(X, listed))


# -- fit -------------------------------------------------------------------------------------------------------------

# Fits of banded strategies, every column its own: p n numbers, by quasi-Newton steps with exact gradients.
#
# With B = A K and K = C^-1 the loss is tr(B^T B) and its gradient with respect to C is -2 B^T B K^T. Where p <=
# b the participations of a unit meet no common row of C, so only the norms of the columns enter the sensitivity.


_MAX_STEPS = 2048
_FEW_BANDS = 64  # whose entries of a product are made by themselves


def fit_banded(workload: Workload, participation: Participation, bands: int, *, max_iterations: int = 60) -> Banded:
    """The banded C of least mean-square loss.

    FixedOrder: the squared norms of the columns of a pattern sum to 1. EpochShuffle: bands end with their epoch, and
    the columns of an epoch have equal norms, see `epoch_shares`. Else every column has norm 1, so that the
    sensitivity is sqrt(k). It starts from the banded Toeplitz fit with columns normalised, so it is never worse.

    Args:
        workload: of at most 2048 steps.
        participation: with more than one participation, `bands` is lowered to the smallest distance b, or to the steps
            of an epoch: this fit bounds columns of one unit that do not overlap. With a short b among long distances
            another kind may have a lower error, as banded Toeplitz, whose overlaps are counted.
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
        parts = [_fit_columns(R, prefix_sum(s), Separated(s, s, 1), bands, max_iterations) for R in epoch_factors(A, s)]
        shares = epoch_shares([loss for _, loss in parts])
        return Banded(scipy.linalg.block_diag(*(share * C for share, (C, _) in zip(shares, parts, strict=True))))
    pattern = participation.pattern
    if stride(pattern) is None:
        pattern = Separated(n, pattern.min_separation, k)
    return Banded(_fit_columns(A, workload, pattern, bands, max_iterations)[0])


def fit(workload: Workload, participation: Participation, objective: str, bands: int) -> Banded:
    """`fit_banded` for any objective."""
    if objective == "max":
        return by_rows(lambda weighting: fit_banded(weighting, participation, bands), workload, _errors)
    return fit_banded(mostly_last(workload) if objective == "last" else workload, participation, bands)


def _errors(strategy: Banded, workload: Workload) -> Floats:
    """(n,) squared errors of the iterates."""
    return of_iterates(strategy, workload, way(strategy))


def _fit_columns(A: Floats, like: Workload, pattern: Pattern, bands: int, max_iterations: int) -> tuple[Floats, float]:
    """C and its squared loss: from the Toeplitz fit to a workload of the kind of A, with columns normalised."""
    n = len(A)
    bands = min(bands, pattern.min_separation)
    groups = [np.arange(n)[:, None]] if stride(pattern) is None else pattern.disjoint()
    start = fit_toeplitz(Problem(like, pattern), bands).coefficients
    scale = math.sqrt(dot(A, A))
    loss = _BandedLoss(A / scale, bands, groups)
    x = loss.pack(np.repeat(start[:, None], n, axis=1))
    x, value = descend(loss, x, max_iterations=max_iterations, restarts=1, gain=1e-8)
    return loss.matrix(rounded(loss.unpack(x)[0])), value * scale**2


def epoch_factors(A: Floats, s: int) -> list[Floats]:
    """R_e with R_e^T R_e = the diagonal block of A^T A of each epoch: the workload of a C that starts anew in it."""
    M = product(A.T, A)
    factors = []
    for start in range(0, len(A), s):
        block = M[start : start + s, start : start + s]
        factors.append(root_of(block + 1e-13 * np.trace(block) * np.eye(s)))  # definite also for a rate of 0
    return factors


def epoch_shares(losses: list[float]) -> Floats:
    """The column norms of each epoch, squares summing to 1, of least total: sum_e loss_e / share_e^2.

    With X = 0 between epochs a unit of `EpochShuffle` adds up one column of each, so share_e^2 ~ sqrt(loss_e).
    """
    roots = np.sqrt(np.array(losses))
    return np.asarray(np.sqrt(roots / roots.sum()))


class _BandedLoss:
    """|| A C^-1 ||_F^2, A lower triangular, over the entries of C's bands; columns normalised by pattern."""

    def __init__(self, A: Floats, bands: int, groups: Groups) -> None:
        self.A, self.n, self.groups = A, len(A), groups
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

    def inverse(self, bands: Floats) -> Floats:
        """C^-1, a row after the other."""
        K = np.zeros((self.n, self.n))
        for t in range(self.n):
            first = max(0, t - self.bands + 1)
            row = bands[t - np.arange(first, t), np.arange(first, t)]
            K[t, :t] = -(row[:, None] * K[first:t, :t]).sum(axis=0) / bands[0, t]
            K[t, t] = 1 / bands[0, t]
        return K

    def matrix(self, bands: Floats) -> Floats:
        """C, (n, n)."""
        C = np.zeros((self.n, self.n))
        C[self.rows + self.columns, self.columns] = bands[self.rows, self.columns]
        return C

    def __call__(self, x: Floats) -> Valued:
        bands, norms = self.unpack(x)
        if (bands[0] <= 0).any():
            return math.inf, np.zeros_like(x)
        K = self.inverse(bands)
        B = lower_product(self.A, K)
        value, G = dot(B, B), gram_of_lower(B)
        gradient = np.zeros_like(bands)  # -2 G K^T, in the bands
        if self.bands <= _FEW_BANDS:
            for band in range(self.bands):
                gradient[band, : self.n - band] = -2 * (G[band:] * K[: self.n - band]).sum(axis=1)
        else:
            gradient[self.rows, self.columns] = -2 * product(G, K.T)[self.rows + self.columns, self.columns]
        # through the norms: remove what only rescales a pattern
        along = (gradient * bands).sum(axis=0)
        shares = np.empty(self.n)
        for steps in self.groups:
            shares[steps] = along[steps].sum(axis=1)[:, None]
        return value, self.pack((gradient - bands * shares) / norms)


# -- error -----------------------------------------------------------------------------------------------------------


def way(strategy: Banded) -> Way:
    """Of iterates: a step takes off the last outputs."""
    return lambda M, N: by_bands(substituted(strategy.bands, strategy.n), M, N)


# -- rounding --------------------------------------------------------------------------------------------------------


def change(strategy: Banded) -> Change:
    """Every column has its own entries, rounded."""
    squares = np.square(rounded(strategy.bands) - strategy.bands).sum(axis=0)
    return Change(root(squares / strategy.column_norms_squared()))


def under_coins(strategy: Banded, change: Change) -> float:
    """Entries of C themselves are rounded."""
    del change
    return by_entry(rounded(strategy.bands), strategy.bands)
