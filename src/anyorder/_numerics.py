"""Filters and convolutions without `scipy.signal`, whose import takes as long as a plan; searches along a line."""

import math
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import numpy as np
import scipy  # its parts, slow to load, when they are first asked for
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Numbers = NDArray[Any]


def lfilter(b: Any, a: Any, x: Floats, axis: int = -1) -> Floats:
    """As `scipy.signal.lfilter`: the rational filter b / a along an axis."""
    parts = (np.asarray(part, dtype=np.float64) for part in (b, a, x))
    return np.asarray(_linear_filter()(*parts, axis))


@cache
def _linear_filter() -> Callable[..., Any]:
    """The compiled filter alone, from its file; from `scipy.signal` where it is not there."""
    spec = PathFinder.find_spec("_sigtools", [str(Path(scipy.__file__).with_name("signal"))])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        if hasattr(module, "_linear_filter"):
            return module._linear_filter  # type: ignore[no-any-return]
    return scipy.signal.lfilter  # type: ignore[no-any-return]


def fftconvolve(first: Floats, second: Floats) -> Floats:
    """As `scipy.signal.fftconvolve`: the full convolution of (n,) and (m,) numbers."""
    length = len(first) + len(second) - 1
    size = scipy.fft.next_fast_len(length, real=True)
    product = complex_product(scipy.fft.rfft(first, size), scipy.fft.rfft(second, size))
    return np.asarray(scipy.fft.irfft(product, size)[:length])


def complex_product(first: Numbers, second: Numbers) -> Numbers:
    """Entry by entry, each product rounded by itself: NumPy's own fuses sums where a processor can."""
    return np.asarray(np.einsum("...,...->...", first, second))


# -- searches along a line ---------------------------------------------------------------------------------------------

# For the last place where a condition holds, and for a root. A privacy number is rounded to the safe side by what is
# returned: a place that was itself looked at, and where the condition held.


_STEP = 0.5  # the longest of a search by secants
_STEEPER = 3.0  # a slope may be so many times as much as it was; else the function jumps there


def bisect(
    holds: Callable[[float], bool],
    *,
    inside: float,
    outside: float,
    relative: float = 0.0,
    floor: float = 0.0,
    steps: float = math.inf,
) -> float:
    """The last place at which a condition holds, between one that does and one that does not, found by halves.

    Args:
        holds: looked at in the middle of what is left, never at the ends.
        inside: where it holds, on either side of `outside`; infinity is returned as it is.
        outside: where it does not.
        relative, floor: it ends where what is left is at most relative (floor + |inside|); by default at floats.
        steps: looks, at most.
    Returns: `inside`, or a place at which `holds` was true.
    """
    looks = 0
    while abs(inside - outside) > relative * (floor + abs(inside)) and looks < steps:
        middle = inside / 2 + outside / 2
        if middle in (inside, outside):
            break
        if holds(middle):
            inside = middle
        else:
            outside = middle
        looks += 1
    return inside


def doubled(holds: Callable[[float], bool], low: float, high: float, most: float = math.inf) -> tuple[float, float]:
    """The first of high, 2 high, .. at which a condition holds, and the place before it at which it does not.

    Args:
        holds: never looked at in `low`.
        low: the place before `high`.
        most: beyond it the second is infinity.
    Returns: (place before, place); what `bisect` takes for its outside and inside.
    """
    while not holds(high):
        low, high = high, 2 * high
        if high > most:
            return low, math.inf
    return low, high


def crossing(
    value: Callable[[float], float], low: float, high: float, *, absolute: float, relative: float = 2.0**-50
) -> float:
    """A root between two places of unlike signs, by Brent's method; what it ends on may be on either side."""
    return float(scipy.optimize.brentq(value, low, high, xtol=absolute, rtol=relative))


def least(value: Callable[[float], float], low: float, high: float, *, absolute: float) -> float:
    """The least value that a search between two places saw, by Brent's method: the least, where there is but one."""
    options = {"xatol": absolute}
    found = scipy.optimize.minimize_scalar(
        lambda x: value(float(x)), bounds=(low, high), method="bounded", options=options
    )
    return float(found.fun)


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
