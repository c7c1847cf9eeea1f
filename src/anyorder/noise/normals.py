"""The reference in NumPy: ChaCha's words, and Box-Muller in float32, which makes 16 normals of 16 words.

`anyorder.noise` states the arithmetic; it is final.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# ----------------------------------------------------------------------------------------------------
# The ChaCha block function (Bernstein 2008; RFC 8439 section 2.3), vectorised over blocks.


Words = NDArray[np.uint32]

ROUNDS = (8, 12, 20)
BLOCK = 16  # words, and normals, of a block
RAW = np.uint64(1 << 62)  # in the counters of raw words
EXTENSION = np.uint64(1 << 63)  # in the counters of the further bits of rare radii
MAX_ELEMENT = 1 << 62  # sixteen times this side of the domain bits
MAX_ROW = (1 << 63) - 1
_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4").astype(np.uint32)


def blocks(key: Words, counters: NDArray[np.uint64], nonce: int | NDArray[np.uint64], rounds: int) -> Words:
    """One block of keystream for each counter.

    State words: 0-3 constants, 4-11 key, 12-13 counter, 14-15 nonce, the low half of each first.

    Args:
        key: (8,) the key as little-endian words.
        counters: (B,) 64-bit block counters, in any order.
        nonce: 0 <= nonce < 2^64; or (B,), one for each counter.
        rounds: 8, 12 or 20.
    Returns: (16, B), word i of every block in row i. Cost: 5 word operations per word and round.
    """
    start = np.empty((16, len(counters)), np.uint32)
    start[0:4] = _CONSTANTS[:, None]
    start[4:12] = key[:, None]
    start[12] = counters.astype(np.uint32)
    start[13] = (counters >> np.uint64(32)).astype(np.uint32)
    row = np.asarray(nonce, np.uint64)
    start[14] = row & np.uint64(0xFFFFFFFF)
    start[15] = row >> np.uint64(32)
    state = start.copy()
    a, b, c, d = state[0:4], state[4:8], state[8:12], state[12:16]
    spare = np.empty_like(a)
    for _ in range(rounds // 2):
        for turn in (1, 3):  # columns, then diagonals as columns; back again
            _round(a, b, c, d, spare)
            _roll(b, turn, spare)
            _roll(c, 2, spare)
            _roll(d, 4 - turn, spare)
    state += start
    return state


def _round(a: Words, b: Words, c: Words, d: Words, spare: Words) -> None:
    """Four quarter rounds, one to a column, in place."""
    for first, second, third, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        np.add(first, second, out=first)
        np.bitwise_xor(third, first, out=third)
        np.left_shift(third, turn, out=spare)
        np.right_shift(third, 32 - turn, out=third)
        np.bitwise_or(third, spare, out=third)


def _roll(rows: Words, by: int, spare: Words) -> None:
    """Rows by, by + 1, .. come first, in place."""
    spare[:] = rows
    rows[: 4 - by] = spare[by:]
    rows[4 - by :] = spare[:by]


# ----------------------------------------------------------------------------------------------------
# The Gaussian transform.


Floats = NDArray[np.float32]

# Minimax polynomials, found by Remez exchange and rounded to float32, lowest power first. tests/noise/minimax.py
# finds them again; the relative errors are those of the rounded coefficients in exact arithmetic.
LOG = (-0.6666782, 0.50002676, -0.39926127, 0.3315517, -0.29829535, 0.28534976, -0.17400876)  # of -2 ln(1+f): 3.5e-8
SIN = (0.7853982, -0.080745436, 0.002490001, -3.5950452e-05)  # of sin(pi y / 4) / y in y^2: 3.5e-8
COS = (1.0, -0.3084245, 0.015850397, -0.00031916017)  # of cos(pi y / 4) in y^2: absolute, 4.8e-8
TWO_LN2_HIGH = -1.38671875  # -2 ln 2 in 10 bits: exact times an exponent
TWO_LN2_LOW = 0.00042438888  # -2 ln 2 less the above

_SQRT_HALF = 0x3F3504F3  # bits of float32 sqrt(1/2)
_TOP = _SQRT_HALF + (32 << 23)  # the same times 2^32


def normal_blocks(key: Words, counters: NDArray[np.uint64], nonce: int | NDArray[np.uint64], rounds: int) -> Floats:
    """(16, B) normals of the blocks with these counters; arguments as for `blocks`."""

    def further(columns: NDArray[np.intp]) -> Words:
        rows = nonce[columns] if isinstance(nonce, np.ndarray) else nonce
        return blocks(key, counters[columns] | EXTENSION, rows, rounds)

    return box_muller(blocks(key, counters, nonce, rounds), further)


def box_muller(words: Words, further: Callable[[NDArray[np.intp]], Words]) -> Floats:
    """(16, B) normals from (16, B) words, a block to a column.

    Args:
        words: the keystream; it is not written.
        further: column numbers -> (16, number of columns) words of their extension blocks; asked only for the
            columns with a radius word below 2^16.
    Returns: float32, |error| < 2e-6 against the same formula in exact arithmetic; |value| < 11.54.
    """
    radius = _radius(words[:8], further)
    cosine, sine = _circle(words[8:])
    result = np.empty(words.shape, np.float32)
    np.multiply(radius, cosine, out=result[:8])
    np.multiply(radius, sine, out=result[8:])
    return result


def _radius(words: Words, further: Callable[[NDArray[np.intp]], Words]) -> Floats:
    """sqrt(-2 ln u), u = word / 2^32 and 64 bits more where the word is below 2^16."""
    value = words.astype(np.float32)
    rows, columns = np.nonzero(words < 1 << 16)
    if columns.size:
        more, at = further(columns).astype(np.float32), np.arange(columns.size)
        tail = (more[2 * rows + 1, at] * np.float32(2**-32) + more[2 * rows, at]) * np.float32(2**-32)
        value[rows, columns] = np.maximum(tail + value[rows, columns], np.float32(2**-64))

    # u = 2^exponent (1 + f), sqrt(1/2) <= 1 + f < sqrt(2)
    bits = value.view(np.int32) - np.int32(_TOP)
    f = ((bits & np.int32(0x7FFFFF)) + np.int32(_SQRT_HALF)).view(np.float32)
    f -= np.float32(1)
    # Near u = 1 the rounding of value would show in ln u; as a signed integer the word is 2^32 (u - 1), small there.
    near_one = words.view(np.int32).astype(np.float32)
    near_one *= np.float32(2**-32)
    np.copyto(f, near_one, where=bits >= 0)
    exponent = (bits >> 23).astype(np.float32)

    square = f * f
    y = _polynomial(LOG, f)
    y *= f
    y *= square
    y += exponent * np.float32(TWO_LN2_LOW)
    y += square
    y += f * np.float32(-2)
    y += exponent * np.float32(TWO_LN2_HIGH)
    return np.sqrt(y, out=y)


def _circle(words: Words) -> tuple[Floats, Floats]:
    """Cosine and sine of (pi / 2) (h + l / 2^30): h the two top bits of a word, l the others, signed."""
    y = (words << 2).view(np.int32).astype(np.float32)
    y *= np.float32(2**-31)
    z = y * y
    sine = _polynomial(SIN, z)
    sine *= y
    cosine = _polynomial(COS, z)
    odd = (words & np.uint32(1 << 30)) != 0
    first, second = np.where(odd, sine, cosine), np.where(odd, cosine, sine)
    sign = np.uint32(1 << 31)
    first.view(np.uint32)[:] ^= (words ^ (words << 1)) & sign
    second.view(np.uint32)[:] ^= words & sign
    return first, second


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    """Horner's rule, a rounding after every product and every sum."""
    result = x * np.float32(coefficients[-1])
    for coefficient in coefficients[-2:0:-1]:
        result += np.float32(coefficient)
        result *= x
    result += np.float32(coefficients[0])
    return result
