"""Any lower-triangular C, without structure: the optimum that structured strategies are measured against."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import scipy  # its parts, slow to load, when they are first asked for
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final, frozen
from anyorder.errors import PlanError
from anyorder.patterns import Groups, Listed, Participation, PerEpoch, Separated, grouped
from anyorder.strategy.banded import epoch_factors, epoch_shares, fit_banded
from anyorder.strategy.base import DENSE_STEPS, Combination, Terms, check_lower_triangular, pack, unpack
from anyorder.strategy.fitting import by_rows, coarse, disjoint, exps, logs, mostly_last, solved, times
from anyorder.strategy.sensitivity import Change, inversion, norm, resolvent, rounded
from anyorder.strategy.variances import by_columns
from anyorder.workload import Workload

Floats = NDArray[np.float64]


@final
class Dense(Combination):
    """C given in full [Denisov et al. 2022, section 3].

    A step regenerates t + 1 rows of Z: O(n^2 d) for a run. For small n, and as the yardstick of the structured
    strategies.

    Args:
        C: (n, n) lower triangular, positive diagonal.
    """

    def __init__(self, C: ArrayLike) -> None:
        self._C = check_lower_triangular("C", C)
        self._K: Floats = frozen(scipy.linalg.solve_triangular(self._C, np.eye(self.n), lower=True))

    @property
    def n(self) -> int:
        """Number of steps."""
        return len(self._C)

    def matrix(self) -> Floats:
        """C, read-only."""
        return self._C

    def noising_matrix(self) -> Floats:
        """C^-1, read-only."""
        return self._K

    def terms(self, t: int) -> Terms:
        """Rows 0 to t."""
        return Terms(np.arange(t + 1), self._K[t, : t + 1])

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "dense", "n": n, "lower": base64 of the lower triangle, row by row}."""
        return {"kind": "dense", "n": self.n, "lower": pack(self._C[np.tril_indices(self.n)])}

    @classmethod
    def _from_dict(cls, n: int, lower: str) -> "Dense":
        n = checks.integer("n", n, low=1)
        C = np.zeros((n, n))
        C[np.tril_indices(n)] = unpack("lower", lower, (n * (n + 1) // 2,))
        return cls(C)

    def __repr__(self) -> str:
        return f"Dense(n={self.n})"


# -- functions of blocks ---------------------------------------------------------------------------------------------

# Functions of positive definite matrices, block by block: arrays (blocks, length, length), one block a pattern.


TINY = 1e-300


def proportional(B: Floats) -> Floats:
    """The rows of each block of L: the directions of B's, norm^2 = the block's share of sum v = 1."""
    norms = np.linalg.norm(B, axis=2)
    return np.asarray(B / norms[:, :, None] * norms.sum(axis=1)[:, None, None])


def log_gram(B: Floats) -> Floats:
    """log(L L^T) for L = `proportional`(B)."""
    norms = np.linalg.norm(B, axis=2)
    N = B / norms[:, :, None]
    scale = 2 * logs(norms.sum(axis=1))
    return np.asarray(function(logarithm, N @ N.transpose(0, 2, 1)) + scale[:, None, None] * np.eye(B.shape[1]))


def logarithm(x: Floats) -> Floats:
    """The logarithm; of what is not above `TINY`, its."""
    return np.asarray(logs(np.maximum(x, TINY)))


def function(f: Callable[[Floats], Floats], blocks: Floats) -> Floats:
    """F of symmetric blocks, through their eigenvalues."""
    if blocks.shape[1] == 1:
        return f(np.maximum(blocks, TINY)) if f is not exps else exps(blocks)
    values, Q = np.linalg.eigh(blocks)
    if f is not exps:
        values = np.maximum(values, 1e-14 * values[:, -1:])
    return np.asarray((Q * f(values)[:, None, :]) @ Q.transpose(0, 2, 1))


def constant_diagonal(logarithms: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """V = exp(logarithms) scaled on both sides to a constant diagonal: log V, V^1/2, V^-1/2, the diagonal."""
    V = function(exps, logarithms)
    d = np.sqrt(np.einsum("gii->gi", V))
    nu = np.square(d.mean(axis=1))
    V = V / (d[:, :, None] * d[:, None, :]) * nu[:, None, None]
    return function(logarithm, V), function(np.sqrt, V), function(lambda x: 1 / np.sqrt(x), V), nu


def profile(X: Floats) -> Floats:
    """Root of the diagonal of each block over its trace."""
    diagonal = np.einsum("gii->gi", X)
    return np.asarray(np.sqrt(diagonal / diagonal.sum(axis=1, keepdims=True)))


# -- the optimum -----------------------------------------------------------------------------------------------------

# The dense optimum, with a certificate: no C at all has an error below `lower`.
#
# One unit takes the steps of a pattern pi. With X = C^T C and A^T A = M the mean-square loss is
#
#     tr(M X^-1)  over X > 0  with  <X_pi,pi, Y> <= 1  for every pattern pi and Gram matrix Y >= 0, diag(Y) = 1.
#
# For disjoint patterns (one epoch; the same order in every epoch) its Lagrange dual is a maximum over one matrix per
# pattern, V_pi >= 0 whose diagonal is constant:
#
#     loss >= 2 || A V^1/2 ||_* - sum_pi v_pi,  V = diag(V_pi), v_pi = the diagonal of V_pi;
#     with the best scale of V:  loss >= || A V^1/2 ||_*^2 / sum_pi v_pi                                           (1)
#
# which for one participation is the bound of [Denisov et al. 2022, Thm 3.2]. The same V are the multipliers of the
# smaller problem in which X_pi,pi is diagonal, so nothing is lost by orthogonal columns within a pattern: the
# sensitivity is then sqrt(max_pi sum_{t in pi} X_tt), exactly, whatever the signs of a unit's gradients.
#
# Ascent: || A L ||_* = max <U, A L> over || U ||_2 <= 1, for any L with L L^T = V. With U held, the best L has rows
# proportional to those of the blocks of A^T U = X(V) L, and sqrt(v_pi) is the sum of their norms: every step ascends
# (for one participation it is v <- v X_tt^2, twice the step of the paper's fixed point in log v). Anderson's mixing of
# the last steps in log V makes it converge in tens of eigendecompositions. The maximum error adds weights w on the
# rows of A, sum w = 1, that move alike: max_t loss_t >= || diag(w)^1/2 A V^1/2 ||_*^2 / sum v.

Blocks = list[Floats]  # for each group of patterns one (patterns, length, length) array

_HISTORY = 20  # steps that the mixing remembers
_ALIKE = 1e-12  # of the normal equations of unit rows
# Steps come from eigendecompositions, whose last digits are a library's: rounded, they are the same, and so is what is
# mixed of them, see `anyorder.strategy.fitting`. The loss at the optimum moves by the square of this.
_DIGITS = 23  # of the logarithms; fewer where a coordinate has a small part of V or w
_SHARE_BITS = 12
_GRADED = 1e-4  # of the largest column's square: schedules that end near a rate of 0
_LEAP = 3.0  # the furthest that mixing moves a logarithm
_ASTRAY = 1e-3  # a relative fall of the dual after which mixing starts anew
_RIDGE = 1e-15  # of the mean eigenvalue: keeps X finite where A has an empty column
_ALTERNATIONS = 3
_COARSER, _ROUGH = 4, 60  # one pattern of so many, for so many steps: a start
_LARGE = 256  # steps from which it saves time
_EPS = float(np.finfo(np.float64).eps)
_FLOOR = 0.1
_OF_GAP = 4  # the share of the tolerance that the floor takes
_PATIENCE = 50  # steps with little gain after which it is lowered all the same
_IDLE = 3e-4  # diagonal of C at steps that move nothing


@dataclass(frozen=True)
class Optimum:
    """The best dense C found, and how good any C could be.

    Attributes:
        C: (n, n) lower triangular; its sensitivity for the given patterns is 1.
        lower, upper: root-mean-square (or root-maximum) error, sensitivity included: `upper` is that of C, and no C
            has one below `lower`.
        iterations: eigendecompositions done.
    """

    C: Floats
    lower: float
    upper: float
    iterations: int

    @property
    def gap(self) -> float:
        """Relative gap of the squared losses."""
        return (self.upper / self.lower) ** 2 - 1


def optimum(
    A: Floats, groups: Groups, *, objective: str = "mean", tolerance: float = 1e-6, max_iterations: int = 300
) -> Optimum:
    """The dense C of least error for disjoint patterns.

    Args:
        A: (n, n) workload, rows already weighted.
        groups: disjoint patterns that cover 0..n-1, see `patterns.disjoint`.
        objective: "mean" or "max".
        tolerance: relative gap of the squared losses at which to stop.
        max_iterations: or after so many eigendecompositions; both bounds hold all the same.
    Cost: an n x n eigendecomposition and a few products each time: about 10 times for prefix sums, 50 for momentum.
    """
    is_max = checks.choice("objective", objective, {"mean", "max"}) == "max"
    moving = np.asarray(A.any(axis=0))
    if not moving.all():
        return _without(A, groups, moving, objective=objective, tolerance=tolerance, max_iterations=max_iterations)
    found = _ascend(A, groups, is_max=is_max, tolerance=tolerance, max_iterations=max_iterations)
    C = _lower_factor(found.ascent.feasible(found.nearest))
    errors = np.square(scipy.linalg.solve_triangular(C.T, A.T, lower=False)).sum(axis=0)
    upper = math.sqrt(errors.max() if is_max else errors.mean())
    lower = found.bound() if is_max else found.bound() / math.sqrt(len(A))
    return Optimum(C, lower, upper, found.iterations)


def _without(A: Floats, groups: Groups, moving: NDArray[np.bool_], **options: Any) -> Optimum:
    """The optimum where some columns of A are 0, such as at a learning rate of 0: of the other steps alone.

    Nothing is asked of C at the idle steps, so it is small there: a share of 1e-7 of the squared sensitivity each.
    """
    inner = optimum(A[:, moving], _moved(groups, moving), **options)
    C = np.diag(np.full(len(moving), _IDLE))
    C[np.ix_(moving, moving)] = inner.C
    X = C.T @ C
    sens = math.sqrt(max(float(X[steps][:, steps].sum()) for group in groups for steps in group))
    return Optimum(C / sens, inner.lower, inner.upper * sens, inner.iterations)


def _moved(groups: Groups, moving: NDArray[np.bool_]) -> Groups:
    """The patterns without the idle steps, in the numbers of those that are left."""
    places = np.cumsum(moving) - 1
    patterns = [places[steps[moving[steps]]] for group in groups for steps in group]
    return grouped([p for p in patterns if len(p)], int(moving.sum()))


def least_error(A: Floats, groups: Groups, *, objective: str, tolerance: float, max_iterations: int) -> float:
    """`lower` of `optimum` alone; after two or three iterations it is within 0.1 % already."""
    moving = np.asarray(A.any(axis=0))
    if not moving.all():
        A, groups = A[:, moving], _moved(groups, moving)
    is_max = objective == "max"
    found = _ascend(A, groups, is_max=is_max, tolerance=tolerance, max_iterations=max_iterations)
    return found.bound() if is_max else found.bound() / math.sqrt(len(A))


def dual_bound(A: Floats, groups: Groups, *, tolerance: float, max_iterations: int) -> tuple[float, list[Floats]]:
    """The certified root of (1) for the sum over rows, and the V_pi that attain it; A may have any number of rows."""
    found = _ascend(A, groups, is_max=False, tolerance=tolerance, max_iterations=max_iterations)
    return found.bound(), [L @ L for L in found.best.L]


def _ascend(A: Floats, groups: Groups, *, is_max: bool, tolerance: float, max_iterations: int) -> "_Found":
    checks.integer("max_iterations", max_iterations, low=1)
    scale = float(np.linalg.norm(A)) / math.sqrt(len(A))
    ascent = _Ascent(A / scale, groups, is_max=is_max)
    memory = _Anderson()
    point, lowest = _coarse_start(A, groups, is_max=is_max, tolerance=tolerance), math.inf
    point = ascent.start() if point is None else point
    anchor = best = nearest = ascent.evaluate(point)
    since: list[float] = []  # the bounds since the floor was lowered
    for count in range(1, max_iterations + 1):
        state = ascent.evaluate(point) if count > 1 else anchor
        if state.lower < anchor.lower * (1 - _ASTRAY):
            memory.clear()
            point = ascent.step(anchor)
            continue
        anchor = state
        best = max(best, state, key=lambda s: s.lower)
        if (upper := ascent.feasible_loss(state)) < lowest:
            lowest, nearest = upper, state
        if lowest <= best.lower * (1 + 0.9 * tolerance):
            break
        if is_max and ascent.floor > tolerance / _OF_GAP:
            since.append(best.lower)
            idle = len(since) > _PATIENCE and since[-1] - since[-_PATIENCE] < 0.01 * (lowest - best.lower)
            if idle or upper < state.lower * (1 + 0.6 * ascent.floor):
                ascent.floor = max(ascent.floor / 5, tolerance / _OF_GAP)  # what is left of the gap is owed to it
                memory.clear()
                since.clear()
        image = ascent.step(state)
        units = ascent.units(image) * min(2.0**-_DIGITS, tolerance / 8)
        point = memory.mix(
            np.rint(state.point / units) * units, np.rint(image / units) * units,
            coarse(ascent.shares(state), _SHARE_BITS),
        )  # fmt: skip
    return _Found(ascent, best, nearest, scale, count)


def _coarse_start(A: Floats, groups: Groups, *, is_max: bool, tolerance: float) -> Floats | None:
    """The point of the problem with every fourth pattern only, log V interpolated between them; None for small ones."""
    ordered = all((np.diff(g[:, 0]) > 0).all() for g in groups)  # patterns beside each other are alike
    if not ordered or A.shape[1] < _LARGE or sum(len(g) for g in groups) < 4 * _COARSER:
        return None
    kept = [np.unique(np.linspace(0, len(g) - 1, -(-len(g) // _COARSER)).round().astype(int)) for g in groups]
    steps = np.sort(np.concatenate([g[rows].ravel() for g, rows in zip(groups, kept, strict=True)]))
    coarse = [np.searchsorted(steps, g[rows]) for g, rows in zip(groups, kept, strict=True)]
    found = _ascend(A[:, steps], coarse, is_max=is_max, tolerance=max(tolerance, 1e-3), max_iterations=_ROUGH)
    between = scipy.interpolate.interp1d
    logs = [between(rows, log, axis=0)(np.arange(len(g))) if len(rows) > 1 else np.repeat(log, len(g), axis=0)
            for g, rows, log in zip(groups, kept, found.best.logs, strict=True)]  # fmt: skip
    return _flat(logs, found.best.log_weights)


def certified_bound(A: Floats, L: Floats, total: float, basis: tuple[Floats, Floats] | None = None) -> float:
    """Root of (1) for V = L L^T with sum v = total, never above its exact value.

    || A L ||_* >= <W, A L Q> / || W ||_2 for any W and orthonormal Q. W is the computed polar factor in the eigenbasis
    Q of (A L)^T A L (made here, or given with its eigenvalues), its weak directions taken from a small singular value
    decomposition since their eigenvalues drown in rounding, made closer to orthogonal by Newton-Schulz steps;
    || W ||_2^2 is at most 1 plus the largest row sum of |W^T W - 1|, and all sums are lowered by their rounding.
    """
    n, eps = max(A.shape), _EPS
    F = A @ L
    values, Q = scipy.linalg.eigh(F.T @ F, driver=_driver(F), check_finite=False) if basis is None else basis
    FQ = F @ Q
    weak = int(np.searchsorted(values, 1e6 * n * eps * values[-1]))
    strong = FQ[:, weak:] / np.sqrt(values[weak:])
    W = strong
    if weak:  # older releases of SciPy refuse a matrix without columns
        left, sizes, right = scipy.linalg.svd(FQ[:, :weak] - strong @ (strong.T @ FQ[:, :weak]), full_matrices=False)
        known = sizes > 100 * n * eps * math.sqrt(values[-1])
        W = np.hstack([left[:, known], strong])
        FQ = np.hstack([FQ[:, :weak] @ right[known].T, FQ[:, weak:]])
    for _ in range(8):
        deviation = W.T @ W - np.eye(W.shape[1])
        excess = float(np.abs(deviation).sum(axis=1).max())
        if excess < 1e-9:
            break
        W = W - 0.5 * W @ deviation
    rounding = 8 * n * eps
    inner = float(np.einsum("ij,ij->", W, FQ)) - rounding * float(np.linalg.norm(W) * np.linalg.norm(F))
    return float(max(inner, 0.0) / math.sqrt((1 + excess + rounding * n) * total * (1 + rounding)))


@dataclass(frozen=True)
class _State:
    """A point of the dual and X(V)^-1 = L Q values^-1 Q^T L there."""

    logs: Blocks  # log V
    log_weights: Floats  # log w of the rows of A
    L: Blocks  # V^1/2
    inverse: Blocks  # V^-1/2
    nu: list[Floats]  # v
    values: Floats
    Q: Floats
    X: Blocks  # X_pi,pi

    @property
    def point(self) -> Floats:
        return _flat(self.logs, self.log_weights)

    @property
    def total(self) -> float:
        return sum(float(v.sum()) for v in self.nu)

    @property
    def lower(self) -> float:
        """The bound (1) on the squared loss."""
        return float(self.values.sum()) ** 2 / self.total


class _Ascent:
    """The dual (1) over log V, and over log w for the maximum error.

    Attributes:
        floor: the share of w that is spread over all rows, see `_floored`; lowered on the way.
    """

    def __init__(self, A: Floats, groups: Groups, *, is_max: bool) -> None:
        self.A, self.groups, self.is_max, self.floor = A, groups, is_max, _FLOOR
        self.M = A.T @ A
        moves = np.square(A).sum(axis=0)
        self.is_graded = len(A) == len(moves) and not is_max and bool(moves.min() < _GRADED * moves.max())

    def start(self) -> Floats:
        """V = 1, equal w."""
        logs = [np.zeros((len(g), g.shape[1], g.shape[1])) for g in self.groups]
        return _flat(logs, np.full(len(self.A) if self.is_max else 0, 0.0))

    def evaluate(self, point: Floats) -> _State:
        """Normalise the point, factor V, and take the eigendecomposition."""
        logs, offset = [], 0
        for g in self.groups:
            shape = (len(g), g.shape[1], g.shape[1])
            logs.append(point[offset : offset + math.prod(shape)].reshape(shape))
            offset += math.prod(shape)
        log_weights = point[offset:]
        if self.is_max:
            log_weights = logarithm(_floored(exps(0.5 * (log_weights - log_weights.max())), self.floor / len(self.A)))
        A = self.weighted(log_weights)
        factors = [constant_diagonal(block) for block in logs]
        logs, L, inverse, nu = (list(part) for part in zip(*factors, strict=True))
        if self.is_graded:  # squares of the small ones would drown
            _, values, right = scipy.linalg.svd(self._right(A, L), check_finite=False)
            values, Q = np.maximum(values[::-1], _EPS * values[0]), right[::-1].T
        else:
            G = self._left(L, self._left(L, A.T @ A if self.is_max else self.M).T)
            G[np.diag_indices_from(G)] += _RIDGE * np.trace(G) / len(G)
            squares, Q = scipy.linalg.eigh(G, driver=_driver(G), overwrite_a=True, check_finite=False)
            values = np.sqrt(np.maximum(squares, _EPS * squares[-1]))
        X = []
        for steps, Li in zip(self.groups, inverse, strict=True):
            rows = Q[steps]
            X.append(Li @ ((rows * values) @ rows.transpose(0, 2, 1)) @ Li)
        return _State(logs, log_weights, L, inverse, nu, values, Q, X)

    def step(self, state: _State) -> Floats:
        """The ascent step from a state."""
        B = [X @ L for X, L in zip(state.X, state.L, strict=True)]
        if not self.is_max:
            return _flat([log_gram(block) for block in B], state.log_weights)
        # with U held the best L and w follow from each other: a power iteration
        A, root = self.A, exps(0.5 * state.log_weights)
        U = (root[:, None] * self._projected(state.L, state.Q) / state.values) @ state.Q.T
        for _ in range(_ALTERNATIONS):
            L = [proportional(block) for block in B]
            root = np.maximum(np.einsum("ij,ij->i", self._right(A, L), U), TINY)
            root = np.sqrt(_floored(root, self.floor / len(self.A)))
            B = self._blocks(A.T * root, U)
        return _flat([log_gram(block) for block in B], 2 * logarithm(root))

    def shares(self, state: _State) -> Floats:
        """What each coordinate of the point weighs in the mixing: the root of its part of V, of w."""
        parts = [np.repeat(v / state.total, L.shape[1] ** 2) for v, L in zip(state.nu, state.L, strict=True)]
        return np.asarray(np.sqrt(np.concatenate([*parts, exps(state.log_weights)])))

    def units(self, point: Floats) -> Floats:
        """Of each coordinate's rounding: 1 over the root of its part of V or w, of the largest 1."""
        diagonals, offset = [], 0
        for g in self.groups:
            k = g.shape[1]
            block = point[offset : offset + len(g) * k * k].reshape(len(g), k, k)
            diagonals.append(np.repeat(np.einsum("gii->gi", block).mean(axis=1), k * k))
            offset += block.size
        found = [part.max() - part for part in (np.concatenate(diagonals), point[offset:]) if part.size]
        return np.asarray(np.ldexp(1.0, np.rint(np.concatenate(found) / (2 * math.log(2))).astype(int)))

    def weighted(self, log_weights: Floats) -> Floats:
        """diag(w)^1/2 A; A itself for the mean error."""
        return exps(0.5 * log_weights)[:, None] * self.A if self.is_max else self.A

    def root(self, state: _State) -> Floats:
        """V^1/2, (n, n)."""
        return self._left(state.L, np.eye(len(self.M)))

    def feasible_loss(self, state: _State) -> float:
        """The squared loss, sum or maximum over rows, at `feasible`."""
        factors = []
        for X, L in zip(state.X, state.L, strict=True):
            factors.append(L @ (function(np.sqrt, X) / profile(X)[:, None, :]))
        errors = self._errors(state, factors)
        return float(errors.max() if self.is_max else errors.sum())

    def feasible(self, state: _State) -> Floats:
        """X' = T^T X T near X(V), with T_pi = X_pi,pi^-1/2 D_pi^1/2, so that X'_pi,pi = D_pi is diagonal, trace 1."""
        T = [function(lambda x: 1 / np.sqrt(x), X) * profile(X)[:, None, :] for X in state.X]
        half = self._left([t.transpose(0, 2, 1) @ Li for t, Li in zip(T, state.inverse, strict=True)], state.Q)
        half *= np.sqrt(state.values)
        return np.asarray(half @ half.T)

    def _errors(self, state: _State, factors: Blocks) -> Floats:
        """(n,) a_t^T F^T Q values^-1 Q^T F a_t for a block-diagonal F: F = L gives a_t^T X^-1 a_t."""
        return np.asarray(np.square(self._projected(factors, state.Q)) @ (1 / state.values))

    def _projected(self, factors: Blocks, Q: Floats) -> Floats:
        """A F^T Q."""
        return np.asarray(self._left(factors, self.A.T).T @ Q)

    def _right(self, matrix: Floats, blocks: Blocks) -> Floats:
        """The matrix times the block-diagonal one."""
        return self._left([block.transpose(0, 2, 1) for block in blocks], matrix.T).T

    def _blocks(self, left: Floats, right: Floats) -> Blocks:
        """The diagonal blocks of left @ right."""
        return [left[steps] @ right.T[steps].transpose(0, 2, 1) for steps in self.groups]

    def _left(self, blocks: Blocks, matrix: Floats) -> Floats:
        """The block-diagonal matrix times `matrix`."""
        result = np.empty_like(matrix)
        for steps, block in zip(self.groups, blocks, strict=True):
            result[steps] = block @ matrix[steps]
        return result


@dataclass(frozen=True)
class _Found:
    """The points of an ascent with the best bound and the least feasible loss."""

    ascent: _Ascent
    best: _State
    nearest: _State
    scale: float
    iterations: int

    def bound(self) -> float:
        """The certified root of (1)."""
        A = self.ascent.weighted(self.best.log_weights)
        basis = np.square(self.best.values), self.best.Q
        return self.scale * certified_bound(A, self.ascent.root(self.best), self.best.total, basis)


class _Anderson:
    """Anderson's mixing of a fixed-point iteration x <- g(x): the combination of the last steps of least residual."""

    def __init__(self) -> None:
        self._images: list[Floats] = []
        self._residuals: list[Floats] = []

    def clear(self) -> None:
        self._images, self._residuals = [], []

    def mix(self, x: Floats, image: Floats, shares: Floats) -> Floats:
        """The next point from x and g(x)."""
        self._images = [*self._images[-_HISTORY:], image]
        self._residuals = [*self._residuals[-_HISTORY:], image - x]
        if len(self._images) == 1:
            return image
        differences = np.diff(np.array(self._residuals), axis=0) * shares
        weights = _least_squares(differences, self._residuals[-1] * shares)
        move = (weights[:, None] * np.diff(np.array(self._images), axis=0)).sum(axis=0)
        return np.asarray(image - np.clip(move, -_LEAP, _LEAP))


def _least_squares(rows: Floats, target: Floats) -> Floats:
    """The weights w of least || w rows - target ||, rows of any size; a ridge keeps those that are alike together."""
    lengths = np.sqrt(np.maximum(np.square(rows).sum(axis=1), TINY))
    rows = rows / lengths[:, None]
    normal = np.array([times(rows, row) for row in rows]) + _ALIKE * np.eye(len(rows))
    return np.asarray(solved(normal[None], times(rows, target)[None])[0] / lengths)


def _driver(of: Floats) -> str:
    """Divide and conquer; for one step the plain one, since SciPy 1.13 gives the other too little memory there."""
    return "evd" if len(of) > 1 else "ev"


def _flat(logs: Blocks, log_weights: Floats) -> Floats:
    return np.concatenate([*(block.ravel() for block in logs), log_weights])


def _floored(root: Floats, floor: float) -> Floats:
    """The w >= floor, sum w = 1, that maximise sum_t sqrt(w_t) root_t: proportional to root^2 above the floor.

    The floor spoils the maximum error by a share n floor at most, and keeps X unique where few rows attain the maximum.
    """
    squares = np.square(root)
    free = np.ones(len(root), dtype=bool)
    while True:
        w = np.where(free, squares * (1 - floor * (~free).sum()) / squares[free].sum(), floor)
        below = free & (w < floor)
        if not below.any():
            return np.asarray(w)
        free &= ~below


def _lower_factor(X: Floats) -> Floats:
    """Lower-triangular C with C^T C = X: the Cholesky factor of X with rows and columns reversed."""
    C: Floats = np.ascontiguousarray(scipy.linalg.cholesky(X[::-1, ::-1], lower=True)[::-1, ::-1].T)
    return C


# -- fit -------------------------------------------------------------------------------------------------------------


def fit_dense(
    workload: Workload, participation: Participation, objective: str = "mean", *, tolerance: float | None = None
) -> Optimum:
    """The dense optimum and its certificate.

    - SingleEpoch, FixedOrder, a KnownOrder whose units do not mix: over all C, to `tolerance`, a relative gap of the
      squared losses: 1e-6 by default, 1e-3 for "max". A warning says so where 300 iterations end above it, as they may
      for "max" with momentum; `gap` is true all the same.
    - EpochShuffle: over all C that start anew in every epoch, X = 0 between epochs. `lower` is a bound for all C.
    - MinSeparation: over all C with X_st = 0 at distances b and more, unit columns: the banded fit with b bands.

    Attributes of the result refer to the objective; for "last" the other iterates count a thousandth.
    """
    if tolerance is None:
        tolerance = 1e-3 if objective == "max" else 1e-6
    found = solve_dense(workload, participation, objective, tolerance=tolerance)
    if found.gap > tolerance and _over_all(participation):
        warnings.warn(
            f"the dense optimum is found to a gap of {found.gap:.1e} in the squared loss, not to the tolerance "
            f"{tolerance:.1e}: no C is better by more than that; a larger tolerance says so beforehand",
            stacklevel=2,
        )
    return found


def _over_all(participation: Participation) -> bool:
    """Whether the dense optimum is over all C, and not over some that the participation makes good."""
    pattern = participation.pattern
    match pattern:
        case Listed():
            return True
        case Separated() | PerEpoch():
            return pattern.max_participations == 1
        case _:
            assert_never(pattern)


def solve_dense(workload: Workload, participation: Participation, objective: str, *, tolerance: float) -> Optimum:
    """`fit_dense` for callers that look at the gap themselves."""
    if workload.n > DENSE_STEPS:
        raise PlanError(f"dense strategies are fitted for at most {DENSE_STEPS} steps, got {workload.n}")
    groups = disjoint(participation)
    if objective == "last":
        workload, objective = mostly_last(workload), "mean"
    options: dict[str, Any] = {"objective": objective, "tolerance": tolerance}
    if _over_all(participation):
        return optimum(workload.matrix(), groups, **options)
    found = optimum(workload.matrix(), groups, **{**options, "tolerance": max(tolerance, 1e-3)})

    def inner(weighting: Workload) -> Dense:
        pattern = participation.pattern
        match pattern:
            case PerEpoch(steps_per_epoch=s):
                return Dense(_epochs(weighting, s))
            case Separated():
                return Dense(_separated(weighting, participation))
            case Listed():
                raise AssertionError("lists of patterns are solved over all C")
            case _:
                assert_never(pattern)

    if objective == "mean":
        C = inner(workload).matrix()
    else:
        C = by_rows(inner, workload, lambda found, work: by_columns(found.noising_matrix(), work)).matrix()
    errors = _errors(workload, C)
    upper = math.sqrt(errors.max() if objective == "max" else errors.mean())
    return Optimum(C, found.lower, upper, found.iterations)


def _epochs(workload: Workload, s: int) -> Floats:
    singles = grouped(list(np.arange(s)[:, None]), s)
    found = [optimum(R, singles) for R in epoch_factors(workload.matrix(), s)]
    shares = epoch_shares([part.upper**2 for part in found])
    return np.asarray(scipy.linalg.block_diag(*(share * part.C for share, part in zip(shares, found, strict=True))))


def _separated(workload: Workload, participation: Participation) -> Floats:
    found = fit_banded(workload, participation, workload.n)
    return found.matrix() / math.sqrt(participation.max_participations)


def _errors(workload: Workload, C: Floats) -> Floats:
    """(n,) squared norms of the rows of A C^-1."""
    K = scipy.linalg.solve_triangular(C, np.eye(len(C)), lower=True)
    return np.asarray(np.square(workload.apply(K)).sum(axis=1))


def fit(workload: Workload, participation: Participation, objective: str) -> Dense:
    """The C of `fit_dense`."""
    return Dense(fit_dense(workload, participation, objective).C)


# -- rounding --------------------------------------------------------------------------------------------------------


def change(strategy: Dense) -> Change:
    """K~ = K + E, and what K C = I lacks."""
    C, K = strategy.matrix(), strategy.noising_matrix()
    return Change(0.0, resolvent(norm(C, rounded(K) - K) + inversion(C, K)))
