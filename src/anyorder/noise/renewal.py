"""From which row on a run can draw its noise anew, though the steps before a given one stay as they were released.

Two runs that share their steps before t, and draw all that is left from keys of their own, are two mechanisms on what
they share: together they cost the composition of two runs. For that no row of Z of the steps before may have to do with
a later step, that is

    K[s, q] = 0  for s < t and q >= r,        C[q, s] = 0  for q < r and s >= t

with the r that is given here: the released noise of the steps before t is a function of the rows below r, and the
other rows, which are drawn anew, mask all that C makes of later gradients. With a C that is square and lower
triangular, r = t.
"""

from typing import assert_never

from anyorder.strategy import Rescaled, Strategy, Tree
from anyorder.strategy.kinds import Structure, kind_of

__all__ = ["first_new_row"]


def first_new_row(strategy: Strategy, t: int) -> int | None:
    """The r above; None where there is none."""
    structure = kind_of(strategy).structure
    match structure:
        case Structure.RESCALED:
            assert isinstance(strategy, Rescaled)
            return first_new_row(strategy.strategy, t)
        case Structure.TREE:
            assert isinstance(strategy, Tree)
            return strategy.rows_before(t)
        case (
            Structure.IDENTITY | Structure.TOEPLITZ | Structure.TOEPLITZ_BANDED | Structure.BUFFERED
            | Structure.BANDED | Structure.DENSE | Structure.LOW_RANK | Structure.RESTARTED
        ):  # fmt: skip
            return t  # C is square and lower triangular
        case _:
            assert_never(structure)
