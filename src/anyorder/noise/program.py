"""A step of a strategy as a program: a value that every executor runs, with the same roundings.

Operands are tiles (numbers from 0: vectors that live for the step) and arrays (below zero: ~operand is the number of an
array that stays between steps). All are float32; each product, sum and quotient is rounded by itself.

    GAUSS    dst = [a +] Z[row] * c
    LINEAR   dst = [a +] x_0 * c_0 + x_1 * c_1 + ..      from left to right; zeros if there is nothing
    LEAK     dst = a + (b + a * c)
    DIVIDE   dst = a / c
    WORDS    dst = raw words of the row, as bits; of the compiled kernel alone, for rows that are asked for

An operation may write what it reads. `traced` and `compiled` make a program of `Strategy.step`; `execute_numpy` says in
thirty lines what a program does, on NumPy arrays and on torch tensors alike; `execute_native` (C++), `execute_torch`
and `execute_triton` are the other executors.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NONE", "OP", "RAW", "TERM", "Kind", "Program"]

NONE = 2**31 - 1  # no operand
RAW = 1 << 30  # of raw words, in the high word of the counter

# As in _kernel.h. `count` is the number of terms of a LINEAR, `row` then the place of its first term.
OP = np.dtype([("kind", "i4"), ("dst", "i4"), ("a", "i4"), ("b", "i4"), ("c", "f4"), ("count", "i4"), ("row", "u8")])
TERM = np.dtype([("x", "i4"), ("c", "f4")])


class Kind:
    """Operations of a program."""

    GAUSS, LINEAR, LEAK, DIVIDE, WORDS = range(5)


@dataclass(frozen=True)
class Program:
    """One step as operations on tiles and arrays.

    Args:
        ops: (num_ops,) of OP.
        terms: of TERM, for all LINEARs.
        num_tiles: tiles are 0 .. num_tiles - 1.
        result: operand that holds the noise, before std, when all is done.
    """

    ops: NDArray[Any]
    terms: NDArray[Any]
    num_tiles: int
    result: int

    @classmethod
    def of_row(cls, row: int, *, raw: bool = False) -> "Program":
        """A row of Z, or of raw words."""
        ops = np.array([(Kind.WORDS if raw else Kind.GAUSS, 0, NONE, NONE, 1.0, RAW if raw else 0, row)], OP)
        return cls(ops, np.empty(0, TERM), 1, 0)

    def rows(self) -> list[int]:
        """Rows of Z that it makes."""
        rows: list[int] = self.ops["row"][self.ops["kind"] == Kind.GAUSS].tolist()
        return rows
