"""Arithmetic whose results are the same to the last bit on every processor, with any BLAS and any number of threads.

A fit takes hundreds of steps, each from the last one's result, so that one bit in the first becomes the third digit of
the coefficients. Libraries of linear algebra add up in the order that suits a processor and its threads; exp, log and
powers differ in the last bit between vector forms, and in libraries of C between processors with and without fused
products. So what a fit goes by is made of NumPy's own sums, which have one order, of products, square roots and
cumulative products, which IEEE fixes, and of what is here.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "coarse", "dot", "exp", "expm1s", "exps", "gram_of_lower", "inverse_of_lower", "log", "logs", "lower_product",
    "powers", "product", "root_of", "solved", "times", "whole_power",
]  # fmt: skip

Floats = NDArray[np.float64]
Numbers = NDArray[Any]

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
