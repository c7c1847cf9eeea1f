"""Filters and convolutions of `scipy.signal`, loaded when first used: a fifth of what `import anyorder` would load."""

from typing import Any

import numpy as np
import scipy  # loads a part of it when it is first asked for
from numpy.typing import NDArray

__all__ = ["fftconvolve", "lfilter"]

Floats = NDArray[np.float64]


def lfilter(b: Any, a: Any, x: Floats, axis: int = -1) -> Floats:
    """As `scipy.signal.lfilter`: the rational filter b / a along an axis."""
    return np.asarray(scipy.signal.lfilter(b, a, x, axis=axis))


def fftconvolve(first: Floats, second: Floats) -> Floats:
    """As `scipy.signal.fftconvolve`: the full convolution."""
    return np.asarray(scipy.signal.fftconvolve(first, second))
