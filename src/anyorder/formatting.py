"""Numbers and counts as people read them: a promise is never shown smaller than it is, and one is not many."""

import math
from collections.abc import Callable


def rounded_up(value: float, digits: int = 4) -> str:
    """So many digits, rounded up, for whatever is an upper bound: 4.0004 reads 4.001.

    What is above a shown number by less than 1e-12 of it is taken for that number: 3.3 has no exact float.
    """
    return _rounded(value, digits, math.ceil, -1e-9)


def rounded_down(value: float, digits: int = 4) -> str:
    """So many digits, rounded down, for lower bounds and what is left: 3.9996 reads 3.999; else as `rounded_up`."""
    return _rounded(value, digits, math.floor, 1e-9)


def _rounded(value: float, digits: int, whole: Callable[[float], int], slack: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(abs(value))))
    return f"{whole(value * scale + slack) / scale:.{digits}g}"


def one_of(confidence: float) -> str:
    """Of how many true bounds with this confidence one may fail, rounded down: "twenty" for 0.95, "66" for 0.985."""
    often = math.floor(1 / (1 - confidence) * (1 + 1e-9))
    return "twenty" if often == 20 else str(often)


def counted(count: int, what: str) -> str:
    """A count and its noun in English: "1 step", "2 steps", "0 batches", "1 entry".

    Args:
        what: in the singular.
    """
    if count == 1:
        return f"1 {what}"
    if what.endswith(("tch", "sh", "s", "x")):
        return f"{count} {what}es"
    return f"{count} {what[:-1]}ies" if what.endswith(("ry", "ty", "ly")) else f"{count} {what}s"
