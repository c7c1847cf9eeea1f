"""Arithmetic whose results are the same to the last bit on every processor, with any BLAS and any number of threads.

A fit takes hundreds of steps, each from the last one's result, so that one bit in the first becomes the third digit of
the coefficients. Libraries of linear algebra add up in the order that suits a processor and its threads, and vector
forms of exp and of powers differ in the last bit. So what a fit goes by is made of NumPy's own sums, which have one
order, of products, square roots and cumulative products, which IEEE fixes, and of what is here.
"""

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["coarse", "dot", "exps", "inverse_of_lower", "powers", "product", "solved", "times", "whole_power"]

Floats = NDArray[np.float64]

_OVERFLOW = 709.0  # exp of it is a float
_SMALL = 64  # rows of a triangular matrix that are inverted one by one


def dot(x: Floats, y: Floats) -> float:
    """sum_i x_i y_i."""
    return float((x * y).sum())


def times(A: Floats, x: Floats) -> Floats:
    """A x, row by row."""
    return np.asarray((np.ascontiguousarray(A) * x).sum(axis=-1))


def exps(x: Floats) -> Floats:
    """Exp of each of a few numbers; infinite where it overflows."""
    found = [math.exp(value) if value < _OVERFLOW else math.inf for value in x.ravel().tolist()]
    return np.array(found).reshape(x.shape)


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
    low = A_high @ B_low + A_low @ B_high
    return np.asarray(np.ldexp(high + np.ldexp(low, -bits), rows + columns - 2 * bits))


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


def _split(M: Floats, axis: int, bits: int) -> tuple[Floats, Floats, NDArray[np.int32]]:
    """M = (high + low / 2^bits) 2^(exponents - bits), integers of `bits` digits."""
    exponents = np.frexp(np.abs(M).max(axis=axis, keepdims=True))[1]
    scaled = np.ldexp(M, bits - exponents)
    high = np.rint(scaled)
    return high, np.rint(np.ldexp(scaled - high, bits)), exponents
