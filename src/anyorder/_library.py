"""Libraries that are compiled with the package, found beside their sources, and called through ctypes."""

import ctypes
import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

__all__ = ["CLIPPING_SOURCES", "NOISE_SOURCES", "PATHS", "TREE_SOURCES", "WARNING", "Memory", "load", "parallel"]

PATHS = ("portable", "avx2", "avx512")  # instruction sets, in the order of their numbers in every library

# What each library is made of, beside it.
NOISE_SOURCES = ("_kernel.cpp", "_kernel.h", "_lanes.h", "_tile.h", "_jump.h")
CLIPPING_SOURCES = ("_convolution.cpp", "_convolution.h")
TREE_SOURCES = ("_tree.cpp", "_tree.h")

WARNING = (
    "Install the package again where a C++ compiler (g++ or clang++) is: in a clone of anyorder, "
    "pip install --force-reinstall --no-deps ."
)
"""What to do where a library is missing."""


class Memory(ctypes.c_void_p):
    """The type of an argument that is bytes, an array without gaps, or None."""

    @classmethod
    def from_param(cls, given: Any, /) -> Any:
        """What ctypes passes on."""
        return ctypes.c_void_p(given.__array_interface__["data"][0]) if hasattr(given, "dtype") else given


def load(file: Path, sources: tuple[str, ...]) -> ctypes.CDLL | None:
    """The library; None where it is not, does not load, or was made of other sources than those next to it."""
    try:
        library = ctypes.CDLL(str(file))
        library.anyorder_sources.restype = ctypes.c_uint64
        found = [file.with_name(name) for name in sources]
        if all(source.exists() for source in found):  # else it was installed without them
            made = hashlib.blake2b(b"".join(source.read_bytes() for source in found), digest_size=8).digest()
            if library.anyorder_sources() != int.from_bytes(made, "big"):
                return None
    except (OSError, AttributeError):
        return None
    return library


def parallel() -> int | None:
    """Torch's own pool of threads, where it is OpenMP: a second pool would fight it for the cores."""
    return _pool() if "torch" in sys.modules else None


@functools.cache
def _pool() -> int | None:
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None
