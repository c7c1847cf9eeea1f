"""What all fits share: arithmetic, the search, the objectives, facts of a participation, and results kept on disk."""

import hashlib
import json
import math
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import PlanError
from anyorder.patterns import Groups, Listed, Participation, Pattern, PerEpoch, Separated
from anyorder.strategy.base import Strategy
from anyorder.workload import Workload, weighted

Floats = NDArray[np.float64]
Numbers = NDArray[Any]

# -- arithmetic ------------------------------------------------------------------------------------------------------

# Arithmetic whose results are the same to the last bit on every processor, with any BLAS and any number of threads.
#
# A fit takes hundreds of steps, each from the last one's result, so that one bit in the first becomes the third digit
# of the coefficients. Libraries of linear algebra add up in the order that suits a processor and its threads; exp, log
# and powers differ in the last bit between vector forms, and in libraries of C between processors with and without
# fused products. So what a fit goes by is made of NumPy's own sums, which have one order, of products, square roots and
# cumulative products, which IEEE fixes, and of what is here.

_UNDERFLOW, _OVERFLOW = -745.0, 709.0  # exp of them is a float
_LN2, _LN2_REST = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")  # of the first, 32 digits
_PER_LN2 = 1 / math.log(2)
_EXP = tuple(1 / math.factorial(i) for i in range(14))  # to |x| = ln 2 / 2
_EXPM1 = tuple(1 / math.factorial(i + 1) for i in range(15))  # of expm1(x) / x, to |x| = 1 / 2
_LOG = tuple(2 / (2 * i + 1) for i in range(11))  # of log((1 + s) / (1 - s)) / s in s^2, to s = 0.172
_ROOT = math.sqrt(0.5)
_FEW = 12  # numbers that are faster one by one
_COLUMNS = 160  # of a triangular matrix at once
_LEAST_EXPONENT = 500  # of a unit: numbers below it are 0
_SMALL = 64  # rows of a triangular matrix that are inverted one by one


def dot(x: Floats, y: Floats) -> float:
    """sum_i x_i y_i."""
    return float(np.add.reduce(x * y, axis=None))


def times(A: Floats, x: Floats) -> Floats:
    """A x, row by row."""
    return np.asarray(np.add.reduce(np.ascontiguousarray(A) * x, axis=-1))


def exp(x: float) -> float:
    """Exp of a number, as of `exps`."""
    return float(exps(np.array([x]))[0])


def log(x: float) -> float:
    """The logarithm of a number above 0, as of `logs`."""
    mantissa, exponent = math.frexp(x)
    return float(_log(2 * mantissa, exponent - 1) if mantissa < _ROOT else _log(mantissa, exponent))


def exps(x: Numbers) -> Numbers:
    """Exp of each number, to 1 unit in the last place; infinite where it overflows.

    Complex numbers must be those of complex steps, in directions along the first axis: real parts are alike along it,
    and the result is right to first order in the imaginary ones.
    """
    if np.iscomplexobj(x):
        values = exps(x.real[:1])
        return _stepped(values, values * x.imag)
    if x.size <= _FEW:
        few = [_exp(v, round, math.ldexp) if _UNDERFLOW < v < _OVERFLOW else _beyond(v) for v in x.ravel().tolist()]
        return np.array(few).reshape(x.shape)
    inside = (x > _UNDERFLOW) & (x < _OVERFLOW)
    values = _exp(np.where(inside, x, 0.0), np.rint, lambda of, k: np.ldexp(of, k.astype(np.int64)))
    return np.where(inside, values, np.where(x <= _UNDERFLOW, 0.0, math.inf))


def expm1s(x: Numbers) -> Numbers:
    """Exp - 1 of each number, without cancellation; of complex ones as `exps`."""
    if np.iscomplexobj(x):
        values = expm1s(x.real[:1])
        return _stepped(values, (values + 1) * x.imag)
    near = np.abs(x) < 0.5
    small = np.where(near, x, 0.0)
    return np.where(near, small * _series(small, _EXPM1), exps(x) - 1)


def logs(x: Numbers) -> Numbers:
    """The logarithm of each number above 0, to 3 units in the last place; of complex ones as `exps`."""
    if np.iscomplexobj(x):
        return _stepped(logs(x.real[:1]), x.imag / x.real)
    mantissas, exponents = np.frexp(x)
    low = mantissas < _ROOT
    return np.asarray(_log(np.where(low, 2 * mantissas, mantissas), exponents - low))


def _exp(x: Any, whole: Callable[[Any], Any], scaled: Callable[[Any, Any], Any]) -> Any:
    """2^k exp(x - k ln 2), of a number or of an array; no product is fused with a sum."""
    k = whole(x * _PER_LN2)
    return scaled(_series((x - k * _LN2) - k * _LN2_REST, _EXP), k)


def _beyond(x: float) -> float:
    return 0.0 if x <= _UNDERFLOW else math.inf


def _log(mantissa: Any, exponent: Any) -> Any:
    s = (mantissa - 1) / (mantissa + 1)
    return exponent * _LN2 + (s * _series(s * s, _LOG) + exponent * _LN2_REST)


def _series(x: Any, coefficients: tuple[float, ...]) -> Any:
    total: Any = coefficients[-1]
    for one in coefficients[-2::-1]:
        total = total * x + one
    return total


def _stepped(values: Floats, steps: Floats) -> Numbers:
    result = np.empty(steps.shape, dtype=np.complex128)
    result.real, result.imag = values, steps
    return result


def powers(bases: Floats, count: int) -> Floats:
    """(count, m) bases^0, bases^1, .., by repeated products."""
    table = np.empty((count, len(bases)))
    table[:1], table[1:] = 1.0, bases
    return np.asarray(np.multiply.accumulate(table, axis=0))


def whole_power(x: Floats, exponent: int) -> Floats:
    """x^exponent of each number, by squares."""
    result = np.ones_like(x)
    for bit in f"{exponent:b}":
        result = result * result * x if bit == "1" else result * result
    return result


def coarse(values: Floats, bits: int) -> Floats:
    """Each number rounded to so many binary digits.

    What is found by a library's decompositions differs between processors by some 1e-13; of numbers with `bits` digits
    one in 1e13 / 2^bits comes out otherwise, and nothing is left of the difference in the others.
    """
    mantissas, exponents = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(np.ldexp(mantissas, bits)), exponents - bits))


def product(A: Floats, B: Floats) -> Floats:
    """A @ B of matrices, to 2^-40 of the largest entries of row and column: by three products without any rounding.

    Entries are split in two integers of so few digits that sums of their products are exact in 53 bits, in whatever
    order a library adds them up [Ozaki, Ogita, Oishi, Rump 2012].
    """
    bits = (53 - A.shape[1].bit_length()) // 2
    A_high, A_low, rows = _split(A, 1, bits)
    B_high, B_low, columns = _split(B, 0, bits)
    high = A_high @ B_high
    low = A_high @ B_low
    low += A_low @ B_high
    low *= 2.0**-bits
    low += high
    low *= rows
    low *= columns
    return np.asarray(low)


def lower_product(A: Floats, B: Floats) -> Floats:
    """`product` of lower-triangular matrices."""
    result = np.zeros_like(B)
    for start in range(0, len(B), _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        result[start:, columns] = product(A[start:, start:], B[start:, columns])
    return result


def gram_of_lower(B: Floats) -> Floats:
    """B^T B of a lower-triangular matrix, by `product`."""
    result = np.empty_like(B)
    for start in range(0, len(B), _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        result[start:, columns] = product(B[start:, start:].T, B[start:, columns])
        result[columns, start:] = result[start:, columns].T
    return result


def inverse_of_lower(L: Floats) -> Floats:
    """The inverse of a lower-triangular matrix, by halves; the entries of small blocks one row after the other."""
    n = len(L)
    inverse = np.zeros_like(L)
    if n <= _SMALL:
        for t in range(n):
            inverse[t, t] = 1.0
            inverse[t] = (inverse[t] - (L[t, :t, None] * inverse[:t]).sum(axis=0)) / L[t, t]
        return inverse
    h = n // 2
    first, last = inverse_of_lower(L[:h, :h]), inverse_of_lower(L[h:, h:])
    inverse[:h, :h], inverse[h:, h:] = first, last
    inverse[h:, :h] = -product(last, product(L[h:, :h], first))
    return inverse


def root_of(M: Floats) -> Floats:
    """Lower-triangular R with R^T R = M, positive definite: Cholesky's, the last row first."""
    R = np.zeros_like(M)
    for t in reversed(range(len(M))):
        row = M[t, : t + 1] - (R[t + 1 :, t, None] * R[t + 1 :, : t + 1]).sum(axis=0)
        R[t, : t + 1] = row / np.sqrt(row[t])
    return R


def solved(M: Floats, x: Floats) -> Floats:
    """M^-1 x for (k, r, r) positive definite matrices and (k, r) vectors, by elimination without exchanges."""
    M, x = M.copy(), x.copy()
    r = x.shape[1]
    for j in range(r):
        shares = M[:, j + 1 :, j] / M[:, j, j, None]
        M[:, j + 1 :, j + 1 :] -= shares[:, :, None] * M[:, j, None, j + 1 :]
        x[:, j + 1 :] -= shares * x[:, j, None]
    for j in reversed(range(r)):
        x[:, j] /= M[:, j, j]
        x[:, :j] -= M[:, :j, j] * x[:, j, None]
    return x


def _split(M: Floats, axis: int, bits: int) -> tuple[Floats, Floats, Floats]:
    """M = (high + low / 2^bits) unit, integers of `bits` digits; units are powers of two."""
    largest = np.maximum(M.max(axis=axis, keepdims=True), -M.min(axis=axis, keepdims=True))
    units = np.ldexp(1.0, np.maximum(np.frexp(largest)[1] - bits, -_LEAST_EXPONENT))
    scaled = M * (1 / units)
    high = np.rint(scaled)
    scaled -= high
    scaled *= 2.0**bits
    return high, np.rint(scaled, out=scaled), units


# -- objectives and participations -----------------------------------------------------------------------------------

Valued = tuple[float, Floats]
"""A value and its gradient."""

OBJECTIVES = ("last", "max", "mean")


def disjoint(participation: Participation) -> Groups:
    """Disjoint patterns that cover every step, each inside a pattern that the participation allows.

    Where `describes_all`, as for SingleEpoch, FixedOrder, and a KnownOrder whose units never mix, these are all
    patterns: then a bound over them is the bound over the participation. Elsewhere they are some of them, and a lower
    bound of the error over them still holds.

    Raises: PlanError for PoissonSampling, whose noise is independent.
    """
    check_optimisable(participation)
    return participation.pattern.disjoint()


def check_optimisable(participation: Participation) -> None:
    """Raises PlanError for PoissonSampling, whose noise is independent."""
    if participation.secret:
        raise PlanError(
            f"{type(participation).__name__} is accounted for independent noise only: there is no strategy to optimise"
        )


def describes_all(participation: Participation) -> bool:
    """Whether `disjoint` leaves no pattern out."""
    return not participation.secret and participation.pattern.are_disjoint


def stride(pattern: Pattern) -> int | None:
    """The distance of all steps of every unit; None where distances differ."""
    match pattern:
        case Listed(stride=b):
            return b
        case Separated() | PerEpoch():
            return None
        case _:
            assert_never(pattern)


def epoch(pattern: Pattern) -> int | None:
    """The steps of an epoch, in which every unit comes once; None where there are no epochs."""
    match pattern:
        case Listed(stride=b):
            return b
        case PerEpoch(steps_per_epoch=s):
            return s
        case Separated():
            return None
        case _:
            assert_never(pattern)


def shuffled(pattern: Pattern) -> PerEpoch | None:
    """The pattern if its places within epochs are free; None else."""
    match pattern:
        case PerEpoch():
            return pattern
        case Listed() | Separated():
            return None
        case _:
            assert_never(pattern)


# -- objectives ------------------------------------------------------------------------------------------------------

# The maximum and the last error for fits that know the mean error only: rows of A weighted.


_OTHERS = 0.03  # weight of all other iterates where the last alone counts: without them no C attains the optimum
_ROUNDS = 8  # of reweighting rows

S = TypeVar("S", bound=Strategy)


def of_objective(variances: Floats, objective: str) -> float:
    """The squared error that counts, of those of all iterates."""
    return float({"mean": variances.mean(), "max": variances.max(), "last": variances[-1]}[objective])


def mostly_last(workload: Workload) -> Workload:
    """The workload in which the last iterate counts, and the others a thousandth each."""
    weights = np.full(workload.n, _OTHERS)
    weights[-1] = 1.0
    return weighted(workload, weights)


def by_rows(fit: Callable[[Workload], S], workload: Workload, variances: Callable[[S, Workload], Floats]) -> S:
    """The strategy of least maximum error of some: fitted to the mean error, rows weighted until their errors are even.

    Args:
        fit: the strategy of one sensitivity that suits a workload's mean error.
        variances: of its kind, the squared errors of all iterates.
    """
    weights, least = np.ones(workload.n), math.inf
    for _ in range(_ROUNDS):
        found = fit(weighted(workload, np.sqrt(weights)))
        errors = variances(found, workload)
        if errors.max() < least:
            best, least = found, float(errors.max())
        weights = np.maximum(weights * errors / errors.max(), 1e-6)
    return best


# -- the search ------------------------------------------------------------------------------------------------------

# By quasi-Newton steps of limited memory [Nocedal & Wright 2006, Algorithm 7.4], in arithmetic that has the same bits
# everywhere, see `anyorder.strategy.fitting`; a line is searched by halves for a point that descends enough and is
# no longer as steep (weak Wolfe conditions), which also ends at a kink [Lewis & Overton 2013].

_WALL = 60.0  # the logarithm of a loss beyond all that are of use, so that a search turns back
_MEMORY = 30
_LOOKS = 12  # along a line
_ENOUGH, _STILL_STEEP = 1e-4, 0.9
_FLAT = 1e-8  # a largest entry of the gradient at which a search ends


def descend(
    loss: Callable[[Floats], Valued],
    start: Floats,
    *,
    max_iterations: int = 500,
    restarts: int = 5,
    gain: float = 1e-11,
    lowest: float = -math.inf,
) -> tuple[Floats, float]:
    """The local minimum of log(loss) near the start by L-BFGS, and the loss there; a loss that overflows is a wall.

    Each search ends where a step gains less than `gain`; another follows, since at the kinks of the majorant a stale
    curvature stops a search too early. No number goes below `lowest`.
    """

    def logarithm(x: Floats) -> Valued:
        with np.errstate(all="ignore"):
            value, gradient = loss(x)
            if not 0 < value < math.inf or not np.isfinite(gradient := gradient / value).all():
                return _WALL, np.zeros_like(x)
        return log(value), gradient

    value = math.inf
    for _ in range(restarts):
        start, found = _search(logarithm, np.maximum(start, lowest), max_iterations, gain, lowest)
        gained, value = value - found, found
        if gained < 1e-7:
            break
    return start, exp(value)


def _search(
    function: Callable[[Floats], Valued], x: Floats, max_iterations: int, gain: float, lowest: float
) -> tuple[Floats, float]:
    """One descent; numbers at `lowest` that would go below it stay there."""
    value, gradient = function(x)
    moves: deque[tuple[Floats, Floats, float]] = deque(maxlen=_MEMORY)
    bound = np.zeros(len(x), dtype=bool)
    for _ in range(max_iterations):
        before, bound = bound, (x <= lowest) & (gradient > 0)
        if (bound != before).any():
            moves.clear()  # a curvature among other numbers
        free = np.where(bound, 0.0, gradient)
        if np.abs(free).max() <= _FLAT:
            break
        way = -_quasi_newton(free, moves)
        if dot(way, free) >= 0:
            moves.clear()
            way = -free
        first = 1.0 if moves else min(1.0, 1 / float(np.abs(free).sum()))
        there = _along(function, x, value, gradient, way, first, lowest)
        if there is None:
            if not moves:
                break
            moves.clear()  # from here by the gradient
            continue
        moved, new, slope = there
        gained = value - new
        change = np.where(bound, 0.0, slope - gradient)
        if (curvature := dot(moved - x, change)) > 2.0**-52 * dot(change, change):
            moves.append((moved - x, change, curvature))
        x, value, gradient = moved, new, slope
        if gained <= gain * max(abs(value), abs(value + gained), 1.0):
            break
    return x, value


def _quasi_newton(gradient: Floats, moves: "deque[tuple[Floats, Floats, float]]") -> Floats:
    """H gradient, H the inverse curvature that the moves show."""
    result, shares = gradient, []
    for move, change, curvature in reversed(moves):
        share = dot(move, result) / curvature
        shares.append(share)
        result = result - share * change
    if moves:
        move, change, curvature = moves[-1]
        result = result * (curvature / dot(change, change))
    for (move, change, curvature), share in zip(moves, reversed(shares), strict=True):
        result = result + (share - dot(change, result) / curvature) * move
    return result


def _along(
    function: Callable[[Floats], Valued], x: Floats, value: float, gradient: Floats, way: Floats, step: float,
    lowest: float,
) -> tuple[Floats, float, Floats] | None:  # fmt: skip
    """A point on the way that is lower enough and no longer as steep, with value and gradient; None where none is."""
    low, high, steep = 0.0, math.inf, dot(way, gradient)
    best = None
    for _ in range(_LOOKS):
        moved = np.maximum(x + step * way, lowest)
        new, slope = function(moved)
        if new > value + _ENOUGH * dot(gradient, moved - x):
            high = step
        elif dot(slope, way) < _STILL_STEEP * steep:
            low, best = step, (moved, new, slope)
        else:
            return moved, new, slope
        if high == math.inf:
            step = 2 * low
        elif best is None and new < _WALL and new > value + step * steep:
            step = min(max(-steep * step * step / (2 * (new - value - step * steep)), 0.1 * step), 0.5 * step)
        else:
            step = (low + high) / 2
    return best


# -- results on disk -------------------------------------------------------------------------------------------------

# Results of long optimisations, by the content of the question.
#
# The folder is $ANYORDER_CACHE ("off" for none), or `anyorder` in the platform's folder for caches. Nothing private is
# in it, and nothing in it is trusted with privacy: sensitivities are computed anew from whatever strategy was read.


_VERSION = 4  # of the optimisers: raise it when they find better optima

T = TypeVar("T")


def cache_folder() -> Path | None:
    """Where results are kept; None if $ANYORDER_CACHE is "off"."""
    chosen = os.environ.get("ANYORDER_CACHE")
    if chosen:
        return None if chosen == "off" else Path(chosen)
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        root = str(Path.home() / "Library" / "Caches")
    else:
        root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "anyorder"


def cache_key(question: dict[str, Any]) -> str:
    """SHA-256 of the question as canonical JSON, with the version of the optimisers."""
    text = json.dumps({"version": _VERSION, **question}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def question_of(kind: str, workload: Workload, participation: Participation, objective: str) -> dict[str, Any]:
    """That of a fit: JSON values."""
    return {
        "kind": kind, "workload": workload.to_dict(), "participation": participation.to_dict(), "objective": objective,
    }  # fmt: skip


def remember(
    question: dict[str, Any], answer: Callable[[], T], *, encode: Callable[[T], Any], decode: Callable[[Any], T]
) -> T:
    """The answer from disk, or computed and kept.

    An entry that cannot be read, is damaged, or does not decode is computed anew and replaced; a folder that cannot
    be written is done without. Writes are atomic: processes may share the folder.

    Args:
        question: JSON values that determine the answer.
        answer: computes it.
        encode, decode: to and from JSON values.
    """
    root = cache_folder()
    if root is None:
        return answer()
    path = root / f"{cache_key(question)}.json"
    try:
        entry = json.loads(path.read_text())
        if entry["digest"] == _digest(entry["value"]):
            return decode(entry["value"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass  # absent or damaged: computed below
    result = answer()
    value = encode(result)
    _write(path, json.dumps({"digest": _digest(value), "value": value}))
    return result


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError:
        return
