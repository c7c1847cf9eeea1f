"""Programs run on vectors that have sums, products and quotients: what a program means, and how NumPy runs it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder.noise.program import NONE, Kind, Program
from anyorder.noise.source import NoiseSource

__all__ = ["execute", "run"]

_PIECE = 1 << 16  # coordinates at a time: what a core's cache holds


def execute(
    program: Program,
    row: Callable[[int], Any],
    arrays: Sequence[Any],
    zeros: Callable[[], Any],
    number: Callable[[float], Any],
) -> Any:
    """The result of a program over the coordinates in hand; the arrays are written.

    Args:
        program: of any operations but WORDS.
        row: gives Z[r], a fresh vector.
        arrays: of the program, float32 vectors: NumPy's or torch's. In-place writes reach them.
        zeros: makes a vector.
        number: makes a float32 of no dimensions. (Python's, in a quotient, torch makes its reciprocal on CUDA.)
    Returns: a vector, which may be one of the arrays.
    """
    tiles: list[Any] = [None] * program.num_tiles
    terms = program.terms.tolist()

    def read(operand: int) -> Any:
        return tiles[operand] if operand >= 0 else arrays[~operand]

    for kind, dst, a, b, c, count, at in program.ops.tolist():
        if kind == Kind.GAUSS:
            value = row(at) if c == 1 else row(at) * c
            value = value if a == NONE else read(a) + value
        elif kind == Kind.LINEAR:
            value = None if a == NONE else read(a)
            for x, factor in terms[at : at + count]:
                part = read(x) * factor
                value = part if value is None else value + part
            value = zeros() if value is None else value if count else value + number(-0.0)  # x + -0 is x, and fresh
        elif kind == Kind.LEAK:
            value = read(a) + (read(b) + read(a) * c)
        elif kind == Kind.DIVIDE:
            value = read(a) / number(c)
        else:
            raise AssertionError(kind)
        if dst >= 0:
            tiles[dst] = value
        else:
            arrays[~dst][:] = value
    return read(program.result)


def run(
    program: Program, source: NoiseSource, arrays: Sequence[NDArray[np.float32]], start: int, size: int
) -> NDArray[np.float32]:
    """The noise, before std, of the coordinates start .. start + size - 1, by NumPy; the arrays are written.

    The bits are those of `Strategy.step`. Rows may come from several keys.

    Args:
        program: the step.
        source: gives Z.
        arrays: (size,) float32 each.
        start, size: the coordinates.
    Returns: (size,) float32, a fresh array. Memory: the tiles of 2^16 coordinates besides.
    """
    noise = np.empty(size, np.float32)
    for low in range(0, size, _PIECE):
        high = min(low + _PIECE, size)

        def row(r: int, low: int = low, high: int = high) -> NDArray[np.float32]:
            return source.normal(r, start + low, start + high)

        own = [array[low:high] for array in arrays]
        noise[low:high] = execute(program, row, own, partial(np.zeros, high - low, np.float32), np.float32)
    return noise
