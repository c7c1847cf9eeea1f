"""Large arrays in JSON: base64 of little-endian float64, bit-exact."""

import base64
import binascii

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import ArgumentError

__all__ = ["pack", "unpack"]


def pack(values: NDArray[np.float64]) -> str:
    """The values in C order as text."""
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f8").tobytes()).decode()


def unpack(name: str, text: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """The array of the given shape that `pack` wrote."""
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f8")
        return flat.astype(np.float64).reshape(shape)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ArgumentError(f"{name} must be base64 text of {shape} float64 numbers: {error}") from error
