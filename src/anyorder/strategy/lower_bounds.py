"""Lower bounds of the error of every strategy: certified, so that a ratio to them is an honest one.

All follow from the dual of `dense`: for disjoint patterns pi of steps that one unit can take, and any V_pi >= 0 with
constant diagonal v_pi,

    sens(C)^2 || A C^-1 ||_F^2 >= || A V^1/2 ||_*^2 / sum_pi v_pi.                                              (1)
"""

import math
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.errors import PlanError
from anyorder.patterns import Listed, Participation, Pattern, PerEpoch, Separated, grouped
from anyorder.strategy.dense import dual_bound, least_error
from anyorder.strategy.fitting import OBJECTIVES, disjoint
from anyorder.workload import Workload

Floats = NDArray[np.float64]
_PATTERN = 32  # steps of a pattern whose correlations are optimised; longer ones are split
_COARSE = 256  # steps of the coarse problems
_COLUMNS = 32  # of A that are made at once


def lower_bound(
    workload: Workload,
    participation: Participation,
    objective: str = "mean",
    *,
    resolution: int = 2048,
    tolerance: float = 1e-3,
    max_iterations: int = 60,
) -> float:
    """A root-scale error, sensitivity included, that no strategy goes below: dense or not, with any memory.

    - "last": the last iterate alone is a sum of gradients with weights a, and one unit moves it by sum_{t in pi} |a_t|.
    - n <= resolution: the dual (1) itself, within `tolerance` (relative, of the squared loss) of the optimum where
      `patterns.describes_all`; for MinSeparation, EpochShuffle and mixed known orders over some of their patterns.
    - larger n, Toeplitz A, constant distances: V equal over the steps of an epoch, and || A V^1/2 ||_* from below by
      <U, A V^1/2> with U block-circulant, whose symbol is a polar factor: fast Fourier transforms, 5 to 8 % low.
    - larger n otherwise: (1) for units that appear at every q-th step only, with rows of A averaged over q: the lower
      by about ln(q)/pi per participation. "max" falls back on "mean".

    Args:
        workload, participation: with the same n.
        objective: "mean", "max" or "last".
        resolution: largest n for which the full dual is solved; its cost grows with the cube.
        tolerance, max_iterations: when to stop there; 2 iterations give a bound that is 0.1 % low at most times.
    Raises: PlanError for PoissonSampling or where n differs.
    """
    checks.choice("objective", objective, OBJECTIVES)
    if workload.n != participation.n:
        raise PlanError(f"workload and participation must have the same n, got {workload.n} and {participation.n}")
    groups = disjoint(participation)
    if objective == "last":
        impulse = np.zeros(workload.n)
        impulse[-1] = 1.0
        last = np.abs(workload.apply_transposed(impulse))
        return max(float(last[steps].sum(axis=1).max()) for steps in groups) * (1 - 1e-12)
    if workload.n <= resolution:
        options: dict[str, Any] = {"tolerance": tolerance, "max_iterations": max_iterations}
        return least_error(workload.matrix(), groups, objective=objective, **options)
    distance = _distance(participation.pattern)
    bounds = [_coarse_bound(workload, distance)]
    if workload.is_toeplitz:
        bounds += [_symbol_bound(workload.toeplitz_coefficients(), *epochs) for epochs in _epochs(workload.n, distance)]
    return max(bounds)


def _distance(pattern: Pattern) -> int:
    """A distance such that j, j + d, j + 2d, .. are one unit's steps, for every j; n where none is known."""
    match pattern:
        case Listed(stride=None):
            return pattern.n
        case Listed() | Separated() | PerEpoch():
            return pattern.spread
        case _:
            assert_never(pattern)


def _epochs(n: int, distance: int) -> list[tuple[int, int]]:
    """(distance, width) of patterns j, j + distance, .. of equal length, j < width: the longest, and one step less."""
    width = n % distance
    return [(distance, distance)] if width == 0 or n < distance else [(distance, width), (distance, distance)]


def _symbol_bound(a: Floats, distance: int, width: int) -> float:
    """(1) for the Toeplitz matrix of a, patterns j + distance e, j < width, V the same Y for each pattern.

    With Y = L L^T the blocks (e, f) of A V^1/2, (width, width) each, are Toeplitz: h_ef(lag) = sum_g L_gf
    a_{(e - g) distance + lag}. For U with circulant blocks, <U, A V^1/2> = mean over frequencies of <u, c>, where c is
    the transform of (width - |lag|) h_ef(lag); the best u of norm 1 gives the mean of the nuclear norms of c.
    """
    n = len(a)
    k = n // distance if width == distance else -(-n // distance)
    count = width  # of patterns
    if k > _PATTERN:  # each split into `parts`, uncorrelated in V
        parts = -(-k // _PATTERN)
        k, distance, count = k // parts, distance * parts, distance
        width = min(distance, n - (k - 1) * distance)
        count = min(count, width)
    L = np.linalg.cholesky(_correlations(a, k, distance))
    lags = np.arange(1 - width, width)
    padded = np.concatenate([np.zeros(n), a])
    shifts = np.array([padded[n + e * distance + lags] for e in range(k)])  # a at (e - g) distance + lag
    size = 1 << (2 * width - 1).bit_length()
    total, step = 0.0, max(1, (1 << 21) // (k * k))
    symbols = np.fft.rfft(_wrapped(shifts * (width - np.abs(lags)), lags, size), axis=1)
    weights = np.full(symbols.shape[1], 2.0)
    weights[[0, -1]] = 1.0
    for start in range(0, symbols.shape[1], step):
        part = symbols[:, start : start + step]
        C = np.zeros((part.shape[1], k, k), dtype=complex)
        for e in range(k):
            C[:, e, : e + 1] = part[e::-1].T
        norms = np.linalg.svd(C @ L, compute_uv=False).sum(axis=1)
        total += float(norms @ weights[start : start + step])
    return 1 / math.sqrt(n * count) * total / size * (1 - 1e-9)


def _wrapped(values: Floats, lags: NDArray[np.int64], size: int) -> Floats:
    """The values at their lags modulo size."""
    result = np.zeros((len(values), size))
    result[:, lags % size] = values
    return result


def _correlations(a: Floats, k: int, distance: int) -> Floats:
    """A Gram matrix Y, (k, k), that serves well as the pattern's multiplier: from a coarse copy of the problem."""
    if k == 1:
        return np.ones((1, 1))
    per_epoch = max(1, _COARSE // k)
    steps = (np.arange(k * per_epoch) * distance) // per_epoch
    lags = np.subtract.outer(steps, steps)
    A = np.where(lags >= 0, a[np.minimum(np.abs(lags), len(a) - 1)], 0.0)
    patterns = [np.arange(j, k * per_epoch, per_epoch) for j in range(per_epoch)]
    _, (V,) = dual_bound(A, grouped(patterns, k * per_epoch), tolerance=1e-2, max_iterations=10)
    Y = V.mean(axis=0)
    d = np.sqrt(np.diag(Y))
    # a little of the identity keeps the Cholesky factor well defined; it is a Gram matrix all the same
    return np.asarray(0.999 * Y / np.outer(d, d) + 0.001 * np.eye(k))


def _coarse_bound(workload: Workload, distance: int) -> float:
    """(1) for units that appear at steps 0, q, 2q, .. only, and rows of A averaged over q steps, which lowers norms."""
    n = workload.n
    per_epoch = min(distance, max(1, (_COARSE * distance) // n))
    q = -(-distance // per_epoch)
    steps = np.concatenate([np.arange(start, min(start + distance, n), q) for start in range(0, n, distance)])
    keep = max(1, len(steps) // (4 * _COARSE))  # many short epochs: every keep-th participation only
    steps = steps[::keep] if keep > 1 else steps
    rows = -(-n // _COARSE)
    blocks = np.arange(0, n, rows)
    A = np.empty((len(blocks), len(steps)))
    for start in range(0, len(steps), _COLUMNS):
        chosen = steps[start : start + _COLUMNS]
        units = np.zeros((n, len(chosen)))
        units[chosen, np.arange(len(chosen))] = 1.0
        A[:, start : start + _COLUMNS] = np.add.reduceat(workload.apply(units), blocks, axis=0) / math.sqrt(rows)
    patterns = [np.flatnonzero(steps % distance == j) for j in np.unique(steps % distance)]
    bound, _ = dual_bound(A, grouped(patterns, len(steps)), tolerance=1e-2, max_iterations=10)
    return bound / math.sqrt(n)
