"""The ChaCha block function (Bernstein 2008; RFC 8439 section 2.3), vectorised over blocks."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROUNDS", "blocks"]

Words = NDArray[np.uint32]

ROUNDS = (8, 12, 20)
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
