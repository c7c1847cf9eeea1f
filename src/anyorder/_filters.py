"""Filters and convolutions as in `scipy.signal`, without that package, whose import takes as long as a plan."""

from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import numpy as np
import scipy  # its parts, slow to load, when they are first asked for
from numpy.typing import NDArray

__all__ = ["complex_product", "fftconvolve", "lfilter"]

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
