"""Builds the compiled libraries, plain ones for ctypes. Everything else stands in pyproject.toml.

Where there is no compiler the package installs all the same: NumPy makes the same noise, torch clips, both slower.
"""

import hashlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """The file is found by name, not imported: no tag of a Python version belongs in it."""

    def get_ext_filename(self, fullname: str) -> str:
        """As in anyorder/noise/_kernel.so."""
        return fullname.replace(".", "/") + ".so"


class AnyPython(bdist_wheel):
    """The libraries are called by ctypes and know no Python: one wheel serves every version on a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """As in py3-none-linux_x86_64."""
        return "py3", "none", super().get_tag()[2]


PACKAGE = Path(__file__).parent / "src/anyorder"


def library(name: str, *sources: str, contract: str) -> Extension:
    """A library of these files beside it, of which the first is compiled; it is named like a module.

    It tells what it was made of, so that an old one is not taken after the sources have changed.
    """
    room = Path(*name.split(".")[1:-1])
    made = hashlib.blake2b(b"".join((PACKAGE / room / file).read_bytes() for file in sources), digest_size=8)
    return Extension(
        name,
        sources=[str("src/anyorder" / room / sources[0])],
        depends=[str("src/anyorder" / room / file) for file in sources],
        define_macros=[("ANYORDER_SOURCES", f"0x{made.hexdigest()}ull")],
        language="c++",
        # Instruction sets are chosen at run time: none is named here.
        extra_compile_args=[
            "-std=c++17", "-O3", f"-ffp-contract={contract}", "-fno-math-errno", "-fno-fast-math", "-g0",
        ],
        extra_link_args=["-pthread"],
        optional=True,
    )  # fmt: skip


setup(
    ext_modules=[
        # A fused multiply-add would change the noise's bits.
        library("anyorder.noise._kernel", "_kernel.cpp", "_kernel.h", "_lanes.h", "_tile.h", "_jump.h", contract="off"),
        library("anyorder.clipping._convolution", "_convolution.cpp", "_convolution.h", contract="fast"),
        library("anyorder.plan._tree", "_tree.cpp", "_tree.h", contract="off"),
        library("anyorder._id_table", "_id_table.cpp", contract="off"),
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython},
)
