"""The place where a falling function is just below zero, in few looks: each may take seconds."""

from collections.abc import Callable

__all__ = ["just_below"]

_STEP = 0.5  # the longest
_STEEPER = 3.0  # a slope may be so many times as much as it was; else the function jumps there


def just_below(
    value: Callable[[float], float], x: float, slope: float, tolerance: float, looks: int = 12
) -> tuple[float, float] | None:
    """An x with -tolerance <= value(x) <= 0, by secants, and the last slope.

    Args:
        value: of a number, falling.
        x: where the search starts.
        slope: near there, below 0.
        tolerance: above 0.
        looks: values that are asked for, at most.
    Returns: None where it was not found, as where the function jumps over zero.
    """
    before: tuple[float, float] | None = None
    for _ in range(looks):
        y = value(x)
        if -tolerance <= y <= 0:
            return x, slope
        if before is not None and y != before[1]:
            found = (y - before[1]) / (x - before[0])
            if _STEEPER * slope < found < slope / _STEEPER:
                slope = found
        before = x, y
        x -= min(max((y + tolerance / 2) / slope, -_STEP), _STEP)
        if x == before[0]:
            return None
    return None
