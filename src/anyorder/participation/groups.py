"""Units in groups that come by turns: what cyclic and truncated Poisson sampling share."""

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.participation.fixed_order import FixedOrder
from anyorder.participation.single_epoch import SingleEpoch
from anyorder.patterns import Participation

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def probability_of(value: float) -> float:
    """A sampling probability, in (0, 1]. Raises: ArgumentError."""
    found = checks.real("sampling_probability", value, low=0.0, high=1.0)
    return checks.positive("sampling_probability", found)


def stride_clause(b: int, t: int, last: Integers, count: Integers) -> tuple[str, Bools]:
    """Those whose last step lies no multiple of b before t: of another group, or bin, than that of t."""
    return (f"a unit's steps must lie multiples of b={b} apart", (count > 0) & ((t - last) % b != 0))


def groups_in_turn(n: int, count: int, cycle: int) -> Bools:
    """(n, count) whether step t is of the group of unit c, which is c mod cycle."""
    return np.asarray(np.arange(n)[:, None] % cycle == np.arange(count) % cycle)


def cyclic_without_draws(n: int, cycle: int) -> Participation:
    """Every unit in every step of its group."""
    rounds = -(-n // cycle)
    return SingleEpoch(n) if rounds == 1 else FixedOrder(n, rounds, cycle)
