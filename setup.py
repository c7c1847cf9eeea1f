"""Builds the noise kernel: a plain shared library for ctypes. Everything else stands in pyproject.toml.

Where there is no compiler the package installs all the same, and makes the same noise with NumPy, slower.
"""

import hashlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """The file is found by name, not imported: no tag of a Python version belongs in it."""

    def get_ext_filename(self, fullname: str) -> str:
        """anyorder/noise/_kernel.so."""
        return fullname.replace(".", "/") + ".so"


ROOM = Path(__file__).parent / "src/anyorder/noise"
SOURCES = ("_kernel.cpp", "_kernel.h", "_lanes.h", "_tile.h")
# The library tells what it was made of, so that an old one is not taken after the sources have changed.
DIGEST = hashlib.blake2b(b"".join((ROOM / name).read_bytes() for name in SOURCES), digest_size=8).hexdigest()

kernel = Extension(
    "anyorder.noise._kernel",
    sources=["src/anyorder/noise/_kernel.cpp"],
    depends=[f"src/anyorder/noise/{name}" for name in SOURCES],
    define_macros=[("ANYORDER_SOURCES", f"0x{DIGEST}ull")],
    language="c++",
    # A fused multiply-add would change the bits. Instruction sets are chosen at run time: none is named here.
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-fast-math", "-g0"],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(ext_modules=[kernel], cmdclass={"build_ext": BuildLibrary})
