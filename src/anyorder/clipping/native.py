"""Per-example gradients of a convolution's weight, and squared norms, by a library compiled with the package.

Nothing is unfolded: each example's products are added up in registers, at the speed of the processor's multiplier,
while its inputs are in the cache. Without the library torch does the same slower.
`ANYORDER_KERNEL` set to "avx512", "avx2" or "portable" takes that instruction set, "reference" torch.
"""

import ctypes
import functools
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from anyorder import checks
from anyorder._library import CLIPPING_SOURCES, PATHS, WARNING, load, parallel
from anyorder.errors import ClippingWarning, ModelError

__all__ = [
    "Ranked", "add_rows", "available", "clip", "convolution", "describe", "ranked", "squares", "warn_if_missing",
]  # fmt: skip

_LARGE = 1 << 20  # parameters from which the missing library is worth a word


def available() -> bool:
    """True if the library can be used here."""
    return _path() is not None


def describe() -> str:
    """Return what is in use, in words."""
    path = _path()
    return f"compiled, {PATHS[path]}" if path is not None else f"torch ({_missing()})"


empty = functools.partial(torch.empty, dtype=torch.float32, device="cpu")
"""Memory that the library writes: what a script makes torch's default says nothing of it."""


def warn_if_missing(size: int) -> None:
    """Once, for a model of many parameters: say that torch does what the library would, and what to do."""
    if size >= _LARGE and os.environ.get("ANYORDER_KERNEL") != "reference" and not available():
        _warn()


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"the compiled clipping library is not there ({_missing()}): torch gives the same bounds, convolutions up to "
        f"twice slower. {WARNING}",
        ClippingWarning,
        stacklevel=4,
    )


def _missing() -> str:
    if os.environ.get("ANYORDER_KERNEL") == "reference":
        return "ANYORDER_KERNEL=reference"
    if not _file().exists():
        return f"no library {_file()}"
    return f"{_file()} does not load, is of other sources, or gives other numbers"


def _file() -> Path:
    return Path(__file__).with_name("_convolution.so")


def convolution(
    x: Tensor,
    g: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: int,
    path: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, *kernel, C, O) the gradients of a convolution's weight, (B,) float64 their squared norms.

    The squares of n numbers are never less than in exact arithmetic, and more by a factor of at most 1 + (n + 8) 2^-51.

    Args:
        x: (B, C, H, W) float32 on the CPU, any strides.
        g: (B, O, ..) of the convolution's outputs, likewise.
        kernel, stride, padding: of height and width.
        dilation: of the height; that of the width is 1.
        path: the instruction set, by its place in PATHS; None: the best.
    Raises: MemoryError if there is none for a copy of an example; nothing was done.
    """
    library, path = _library(), _path() if path is None else path
    assert library is not None
    x, g = x.resolve_neg(), g.resolve_neg()  # memory as it is read
    out, norms = empty(len(x), *kernel, x.shape[1], g.shape[1]), empty(len(x), dtype=torch.float64)
    values = (
        x.data_ptr(), g.data_ptr(), out.data_ptr(), norms.data_ptr(), *x.shape, *g.shape[1:], *kernel, *stride,
        *padding, dilation, *x.stride(), *g.stride(),
    )  # fmt: skip
    job, threads = (ctypes.c_int64 * len(values))(*values), torch.get_num_threads()
    if library.anyorder_convolution(job, path, threads, parallel() if threads > 1 else None):
        raise MemoryError("no memory for a copy of an example's inputs and gradients; nothing was computed")
    return out, norms


def squares(rows: Tensor, path: int | None = None) -> Tensor:
    """(n,) float64, the squared norms of (n, m) float32 on the CPU, each row one run of memory; errors as above."""
    library, path = _library(), _path() if path is None else path
    assert library is not None
    rows = rows.resolve_neg()
    result = empty(len(rows), dtype=torch.float64)
    threads = torch.get_num_threads()
    library.anyorder_squares(
        rows.data_ptr(), *rows.shape, rows.stride(0), result.data_ptr(), path, threads,
        parallel() if threads > 1 else None,
    )  # fmt: skip
    return result


def clip(
    layers: Sequence[tuple[Tensor | None, Tensor, Tensor | None]], scale: float, clip_norm: float, large: float,
    path: int | None = None,
) -> tuple[int, Tensor]:  # fmt: skip
    """(How many examples are left out, (B,) float32 the weights of all) of the clipped sums of layers.

    An example's gradient has for each layer the part g (x) a, or g itself where `a` is None; norms are over all of
    them. Weights are those of the flat rule, rounded down. What is left out has a norm that is NaN or infinite.

    Args:
        layers: (a (B, inputs) or None, g (B, outputs), the sum: (outputs, inputs) or (outputs,), contiguous, which is
            written, or None for one that is made elsewhere); float32 on the CPU, each row one run of memory.
        scale, clip_norm: of the gradients; the norm of an example, times `scale`, is clipped to `clip_norm`.
        large: bound on |a|: above it the result is -1, and the sums are to be made in float64.
        path: the instruction set; see `convolution`.
    Returns: the number is -1, and nothing else counts, where an activation is above `large`, or a sum not finite.
    """
    library, path = _library(), _path() if path is None else path
    assert library is not None
    values: list[int] = []
    for a, g, out in layers:
        if out is not None and out.numel() != g.shape[1] * (1 if a is None else a.shape[1]):
            raise ModelError("a parameter has another size than what it is used as (module.bias.data = zeros(1))")
        values += (
            0 if a is None else a.data_ptr(), g.data_ptr(), 0 if out is None else out.data_ptr(),
            0 if a is None else a.shape[1], g.shape[1], 0 if a is None else a.stride(0), g.stride(0),
        )  # fmt: skip
    batch = layers[0][1].shape[0]
    weights, job = empty(batch), (ctypes.c_int64 * len(values))(*values)
    bad = library.anyorder_clip(job, len(layers), batch, scale, clip_norm, large, weights.data_ptr(), path)
    return bad, weights


class Ranked(NamedTuple):
    """Which rows of a table are read.

    Attributes:
        distinct: (R,) int64, the rows, ascending.
        place: (n,) int64, of each read among them.
        twice: whether a unit reads a row twice.
    """

    distinct: NDArray[np.int64]
    place: NDArray[np.int64]
    twice: bool


def ranked(ids: NDArray[np.int64], size: int, each: int = 1, none: int = -1) -> Ranked:
    """The rows of n reads, of which each unit has `each` that follow each other.

    Args:
        ids: (n,) contiguous.
        size: rows of the table.
        none: a row whose reads count for nothing, and have the place -1.
    Raises: ValueError for ids that are not from 0 to size - 1.
    """
    n, library = len(ids), _library() if available() else None
    distinct, place, twice = np.empty(n, np.int64), np.empty(n, np.int64), ctypes.c_int32()
    count = -2
    if library is not None:
        count = library.anyorder_rank(
            ids.ctypes.data, n, each, size, none, distinct.ctypes.data, place.ctypes.data, ctypes.byref(twice)
        )
    if count == -1 or (count == -2 and n and not 0 <= ids.min() <= ids.max() < size):
        raise ValueError("ids of other rows than the table has")
    if count >= 0:
        return Ranked(distinct[:count], place, bool(twice))
    distinct, places = np.unique(ids[ids != none], return_inverse=True)
    place[:] = -1
    place[ids != none] = places
    order = np.argsort(place, kind="stable")  # of the reads of a row, in the order of units
    unit, row = order // each, place[order]
    again = (unit[1:] == unit[:-1]) & (row[1:] == row[:-1]) & (row[1:] >= 0)
    return Ranked(distinct, place, bool(again.any()))


def add_rows(g: Tensor, weights: Tensor, place: NDArray[np.int64], rows: int) -> Tensor | None:
    """(rows, D), the sum over units b and their reads t of weights[b] g[b, t], at the row `place` of the read.

    Args:
        g: (B, T, D) float32 on the CPU, contiguous.
        weights: (B,) float32; one of 0 adds exactly zero, whatever g is.
        place: (B T,).
    Returns: None where a sum is not finite.
    """
    library = _library()
    assert library is not None
    sums = empty(rows, g.shape[2])
    finite = library.anyorder_add_rows(
        g.data_ptr(), place.ctypes.data, weights.data_ptr(), len(place), g.shape[1], g.shape[2], sums.data_ptr(), rows
    )
    return sums if finite else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load(_file(), CLIPPING_SOURCES)
    if library is None:
        return None
    pointer = ctypes.c_void_p
    library.anyorder_convolution.argtypes = [pointer, ctypes.c_int, ctypes.c_int, pointer]
    library.anyorder_squares.argtypes = [
        pointer, *(3 * [ctypes.c_int64]), pointer, ctypes.c_int, ctypes.c_int, pointer
    ]  # fmt: skip
    library.anyorder_squares.restype = None
    number, real = ctypes.c_int64, ctypes.c_double
    library.anyorder_clip.argtypes = [pointer, number, number, real, real, ctypes.c_float, pointer, ctypes.c_int]
    library.anyorder_clip.restype = number
    library.anyorder_rank.argtypes = [pointer, *(4 * [number]), *(3 * [pointer])]
    library.anyorder_rank.restype = number
    library.anyorder_add_rows.argtypes = [*(3 * [pointer]), number, number, number, pointer, number]
    return library


@functools.cache
def _path() -> int | None:
    """The instruction set to use; None without the library, or where torch is asked for."""
    library, name = _library(), os.environ.get("ANYORDER_KERNEL", "best")
    checks.choice("ANYORDER_KERNEL", name, {"best", "reference", *PATHS})
    if library is None or name == "reference":
        return None
    best = int(library.anyorder_lanes())
    path = best if name == "best" else PATHS.index(name)
    return path if path <= best and _agrees(path) else None


def _agrees(path: int) -> bool:
    """Whether it makes the gradients that torch makes: of integers, whose sums are exact."""
    x = (torch.arange(2 * 5 * 7 * 12, device="cpu") * 37 % 17 - 8).float().view(2, 5, 7, 12)
    g = (torch.arange(2 * 37 * 3 * 4, device="cpu") * 29 % 13 - 6).float().view(2, 37, 3, 4)
    patches = F.unfold(x, (4, 5), padding=(1, 2), stride=(2, 3)).view(2, 5, 4, 5, 12)
    expected = torch.einsum("bchwt,bot->bhwco", patches.double(), g.flatten(2).double())
    made, norms = convolution(x, g, (4, 5), (2, 3), (1, 2), 1, path)
    exact = expected.square().flatten(1).sum(1)
    return bool((made == expected).all()) and all(
        bool((exact <= found).all()) and bool((found <= exact * (1 + 1e-11)).all())
        for found in (norms, squares(made.flatten(1), path))
    )
