"""The path of the CPU: the compiled kernel where it is, for rows of one key, else NumPy.

The library is built when the package is installed, where a C++ compiler is. Without it NumPy makes the same bits,
slower. `ANYORDER_KERNEL` set to "avx512", "avx2", "portable" or "reference" (NumPy) takes that path and no other.
"""

import ctypes
import functools
import itertools
import os
import struct
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder._library import NOISE_SOURCES, PATHS, WARNING, load, parallel
from anyorder.errors import ArgumentError, NoiseWarning
from anyorder.noise import normals
from anyorder.noise.program import (
    NONE,
    OP,
    TERM,
    NoiseState,
    Operation,
    Program,
    compile_step,
    execute,
    trace,
)
from anyorder.strategy import Strategy
from anyorder.strategy.base import State

if TYPE_CHECKING:
    from anyorder.noise.stream import NoiseSource

# ----------------------------------------------------------------------------------------------------
# The kernel: the library, kept to one instruction set, and given steps.


Vector = NDArray[np.float32]

_VERSION = 5  # of the library's interface
_LARGE = 1 << 20  # coordinates from which the missing kernel is worth a word

SEGMENT = np.dtype([("data", "u8"), ("element", "u8"), ("length", "u8")])
# As in _kernel.h: key, rounds, result; addresses of ops, terms, arrays, segments, types, rows; num_ops,
# num_tiles, num_segments, origin; scale, std, add, scattered.
_STEP = struct.Struct("@32s2i10Qdf2i4x")
# As in _kernel.h: key, rounds, types of the numbers and the sums; addresses of arrays, strides, rows, which, Phi, R,
# ids, sums, into; num_rows, size, normals, width, maps, table_rows, first; addresses of last, map_of; stop, since,
# steps, lengths.
_JUMP = struct.Struct("@32s3i4x22Q")
TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3, "uint32": 4}
_NUMBERS = {np.dtype(name): TYPES[name] for name in ("float32", "float64")}  # a dtype's name takes long to ask for


class Kernel:
    """The library, kept to one instruction set."""

    def __init__(self, library: ctypes.CDLL, path: int) -> None:
        self._library, self._path = library, path

    @property
    def name(self) -> str:
        """The instruction set: "avx512", "avx2" or "portable"."""
        return PATHS[self._path]

    def run(
        self,
        key: NDArray[np.uint32],
        rounds: int,
        program: Program,
        segments: NDArray[Any],
        types: NDArray[np.int32],
        *,
        arrays: NDArray[np.uint64] | None = None,
        origin: int = 0,
        std: float = 1.0,
        add: bool = False,
        scale: float = 1.0,
        scattered: bool = False,
        rows: NDArray[np.uint64] | None = None,
        threads: int | None = None,
    ) -> None:
        """Segment = (segment + std * result) * scale, or without the first segment where `add` is false.

        Args:
            key: (8,) words.
            rounds: of ChaCha.
            program: what makes the result.
            segments: SEGMENT records: address, first element, length. They follow each other, or are `scattered`.
            types: of the segments' memory, one of TYPES each.
            arrays: addresses of float32 arrays from element `origin` on, a multiple of 16, over whole groups of 256.
            rows: of Z, one for each segment, in the place of the program's; segments are `scattered`, arrays are none.
            std, scale: factors. Sum and products are rounded to float32 each (float64 for such memory).
            threads: at most so many; by default torch's number, or one for each core.
        Raises: MemoryError if there is no memory for tiles; nothing was done.
        """
        self.do(
            _STEP.pack(
                key.tobytes(), rounds, program.result, program.ops.ctypes.data, program.terms.ctypes.data,
                0 if arrays is None else arrays.ctypes.data, segments.ctypes.data, types.ctypes.data,
                0 if rows is None else rows.ctypes.data, len(program.ops), program.num_tiles, len(segments), origin,
                scale, std, add, scattered,
            ),
            threads,
        )  # fmt: skip

    def do(self, step: bytes, threads: int | None = None) -> None:
        """What `run` packs. Raises: MemoryError, and then nothing was done."""
        count = _threads() if threads is None else threads
        if self._library.anyorder_run(step, self._path, count, parallel() if count > 1 else None):
            raise MemoryError("no memory for the noise kernel's tiles; nothing was changed")

    def fill(
        self, key: NDArray[np.uint32], rounds: int, row: int, start: int, out: NDArray[Any], threads: int | None = None
    ) -> None:
        """Out = elements start, start + 1, .. of a row: normals for float32, raw words for uint32."""
        raw = out.dtype == np.uint32
        segments = np.array([(out.ctypes.data, start, out.size)], SEGMENT)
        types = np.array([TYPES[out.dtype.name]], np.int32)
        self.run(key, rounds, Program.of_row(row, raw=raw), segments, types, origin=start // 16 * 16, threads=threads)

    def fill_at(
        self,
        key: NDArray[np.uint32],
        rounds: int,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        out: NDArray[Any],
    ) -> None:
        """Out[i] = normals starts[i], .. of row rows[i]; out (k, width) float32, contiguous, not empty."""
        segments = np.empty(len(rows), SEGMENT)
        segments["data"] = out.ctypes.data + np.arange(len(rows), dtype=np.uint64) * np.uint64(out.strides[0])
        segments["element"], segments["length"] = starts, out.shape[1]
        own = np.ascontiguousarray(rows).view(np.uint64)
        types = np.full(len(rows), TYPES[out.dtype.name], np.int32)
        self.run(key, rounds, Program.of_row(0), segments, types, scattered=True, rows=own)

    def carry(
        self, key: NDArray[np.uint32], rounds: int, memory: "TableMemory", rows: NDArray[np.int64],
        Phi: NDArray[np.float64], R: NDArray[np.float64], ids: NDArray[np.int64], which: NDArray[np.int64],
        sums: NDArray[Any] | None = None, into: NDArray[np.float64] | None = None, threads: int | None = None,
    ) -> None:  # fmt: skip
        """Rows of a table: s <- Phi s + R Z[ids] + into sums, as `noise.lazy.carry` says, which checks all shapes.

        Raises: ArgumentError for rows that are not in the table, or have no map; MemoryError. Nothing was done then.
        """
        jump = _JUMP.pack(
            key.tobytes(), rounds, memory.kind, 0 if sums is None else _NUMBERS[sums.dtype], *memory.addresses,
            rows.ctypes.data, which.ctypes.data, Phi.ctypes.data, R.ctypes.data, ids.ctypes.data,
            0 if sums is None else sums.ctypes.data, 0 if into is None else into.ctypes.data, len(rows),
            len(memory.arrays), R.shape[2], memory.width, len(R), memory.num_rows, memory.first, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip
        self._jump(jump, memory, threads)

    def bring(
        self, key: NDArray[np.uint32], rounds: int, memory: "TableMemory", rows: NDArray[np.int64],
        Phi: NDArray[np.float64], R: NDArray[np.float64], map_of: NDArray[np.int64], last: NDArray[np.int32],
        stop: int, since: int, steps: int, threads: int | None = None,
    ) -> bool:  # fmt: skip
        """`carry`, without sums, over the steps last[row] .. stop - 1, which some rows may lack; `last` is `stop` then.

        Args:
            Phi, R: maps, (u, D, D) each; that over l steps is at map_of[l], -1 where none is known.
            since: no map leads over an earlier step.
            steps: of the run, and one.
        Returns: whether it was done; nothing was where a map is not known.
        """
        jump = _JUMP.pack(
            key.tobytes(), rounds, memory.kind, 0, *memory.addresses, rows.ctypes.data, 0, Phi.ctypes.data,
            R.ctypes.data, 0, 0, 0, len(rows), len(memory.arrays), R.shape[2], memory.width, len(R), memory.num_rows,
            memory.first, last.ctypes.data, map_of.ctypes.data, stop, since, steps, len(map_of),
        )  # fmt: skip
        return self._jump(jump, memory, threads)

    def _jump(self, jump: bytes, memory: "TableMemory", threads: int | None) -> bool:
        count = _threads() if threads is None else threads
        failed = self._library.anyorder_jump(jump, self._path, count, parallel() if count > 1 else None)
        if failed == 2:
            raise ArgumentError(f"rows must lie in 0 .. {memory.num_rows - 1}, each with a map of the jump")
        if failed == 1:
            raise MemoryError("no memory for the noise kernel's tiles; nothing was changed")
        return not failed

    def transform(self, words: NDArray[np.uint32], further: NDArray[np.uint32]) -> NDArray[np.float32]:
        """`normals.box_muller` of (16, B) words, B a multiple of 16, with the extension words of every block."""
        words, further = np.ascontiguousarray(words), np.ascontiguousarray(further)
        out = np.empty(words.shape[::-1], np.float32)
        self._library.anyorder_transform(
            self._path, words.ctypes.data, further.ctypes.data, out.ctypes.data, words.shape[1]
        )
        return out.T


class TableMemory:
    """The numbers of each coordinate of a table, where the kernel writes them.

    Args:
        arrays: (V, width) each, all float32 or all float64, rows contiguous: the numbers of a coordinate, in order.
        first: element of Z of the first coordinate of row 0; they lie row-major.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]], first: int) -> None:
        kind, shape = arrays[0].dtype, arrays[0].shape
        for x in arrays:
            plain = x.strides[1] == x.itemsize or shape[1] < 2
            if x.shape != shape or x.dtype != kind or kind not in _NUMBERS or not plain or x.strides[0] < 0:
                raise ArgumentError("arrays must be float32 or float64, alike, with contiguous rows")
        self.num_rows, self.width = shape
        if not 0 <= first <= normals.MAX_ELEMENT - self.num_rows * self.width:
            raise ArgumentError("elements of Z must lie in 0 .. 2^62")
        self.arrays, self.first, self.kind = arrays, first, _NUMBERS[kind]
        self._places = np.array([[x.ctypes.data for x in arrays], [x.strides[0] for x in arrays]], np.uint64)
        self.addresses = self._places[0].ctypes.data, self._places[1].ctypes.data


def kernel(name: str = "best") -> Kernel | None:
    """The kernel of an instruction set; None for "reference", or for "best" where no library is.

    Raises: ArgumentError if the one that is named cannot run here.
    """
    checks.choice("kernel", name, {"best", "reference", *PATHS})
    if name == "best":
        name = os.environ.get("ANYORDER_KERNEL", "best")
        checks.choice("ANYORDER_KERNEL", name, {"best", "reference", *PATHS})
    library = None if name == "reference" else _library()
    if library is None:
        if name in PATHS:
            raise ArgumentError(f"kernel {name!r} is not there: {_missing()}")
        return None
    best = library.anyorder_lanes()
    path = best if name == "best" else PATHS.index(name)
    if path > best:
        raise ArgumentError(f"kernel {name!r} does not run on this processor; its best is {PATHS[best]!r}")
    found = _checked(path)
    if found is None and name in PATHS:
        raise ArgumentError(f"kernel {name!r} is not there: {_missing()}")
    return found


def warn_if_missing(size: int) -> None:
    """Once, for a stream of many coordinates: say that the noise is made by NumPy, and what to do."""
    if size >= _LARGE and os.environ.get("ANYORDER_KERNEL") != "reference" and kernel() is None:
        _warn()


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"the compiled noise kernel is not there ({_missing()}): NumPy makes the same noise, 10 to 50 times slower. "
        + WARNING,
        NoiseWarning,
        stacklevel=4,
    )


def _file() -> Path:
    return Path(__file__).with_name("_kernel.so")


def _missing() -> str:
    if os.environ.get("ANYORDER_KERNEL") == "reference":
        return "ANYORDER_KERNEL=reference"
    if not _file().exists():
        return f"no library {_file()}"
    return f"{_file()} does not load, is of other sources, or gives other bits"


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load(_file(), NOISE_SOURCES)
    if library is None or library.anyorder_version() != _VERSION:
        return None
    pointer = ctypes.c_void_p
    library.anyorder_run.argtypes = [pointer, ctypes.c_int, ctypes.c_int, pointer]
    library.anyorder_jump.argtypes = [pointer, ctypes.c_int, ctypes.c_int, pointer]
    library.anyorder_transform.argtypes = [ctypes.c_int, pointer, pointer, pointer, ctypes.c_uint64]
    library.anyorder_transform.restype = None
    return library


@functools.cache
def _checked(path: int) -> Kernel | None:
    """The kernel if it gives the bits of the reference: one built from other sources or with other options does not."""
    library = _library()
    assert library is not None
    found = Kernel(library, path)
    words = (np.arange(1, 16 * 64 + 1, dtype=np.uint32) * np.uint32(0x9E3779B9)).reshape(16, 64)
    words[0, :8] = [0, 1, 255, 65535, 65536, 2**31, 2**31 - 1, 2**32 - 1]
    expected = normals.box_muller(words, lambda columns: words[:, columns])
    key, made = words[3, :8], np.empty(1024, np.uint32)
    found.fill(key, 8, 2**40, 0, made, threads=1)
    raw = normals.blocks(key, np.arange(64, dtype=np.uint64) | normals.RAW, 2**40, 8)
    same = found.transform(words, words).tobytes() == expected.tobytes() and made.tobytes() == raw.T.tobytes()
    agrees = same and _steps_agree(found) and _ranges_agree(found) and _jumps_agree(found)
    return found if agrees else None


def _steps_agree(kernel: Kernel) -> bool:
    """Whether a step with every operation, memory of several types, and its state are NumPy's."""
    size, first, std, scale = 300, 19, np.float32(1.5), 0.375
    key, length = np.arange(1, 9, dtype=np.uint32), 512
    counters = np.arange(first // 16, first // 16 + length // 16, dtype=np.uint64)

    def row(r: int) -> Vector:
        return normals.normal_blocks(key, counters, r, 8).T.reshape(-1)

    kept, other = row(1), row(2)
    c = [np.float32(x) for x in (0.3, -0.7, 1.7, 0.6)]
    total = other + row(3) * c[0] * c[1] + kept * c[3]
    noise = (total / c[2] + row(2**40) * c[0])[first % 16 :][:size] * std
    after = [kept + (total + kept * c[1]), other + (total + other * c[0])]
    ops = np.array([
        (Operation.GAUSS, 0, NONE, NONE, c[0], 0, 3),
        (Operation.LINEAR, 1, ~1, NONE, 1.0, 1, 0),
        (Operation.LINEAR, 1, 1, NONE, 1.0, 1, 1),
        (Operation.LEAK, ~0, ~0, 1, c[1], 0, 0),
        (Operation.LEAK, ~1, ~1, 1, c[0], 0, 0),
        (Operation.DIVIDE, 0, 1, NONE, c[2], 0, 0),
        (Operation.GAUSS, 1, 0, NONE, c[0], 0, 2**40),
    ], OP)  # fmt: skip
    program = Program(ops, np.array([(0, c[1]), (~0, c[3])], TERM), 2, 1)
    memory = [np.full(100, 0.5, kind) for kind in (np.float32, np.float64, np.float16)]
    expected = []
    for i, x in enumerate(memory):
        wide = x if x.dtype == np.float64 else x.astype(np.float32)
        expected.append(((wide + noise[100 * i :][:100]) * wide.dtype.type(scale)).astype(x.dtype))
    state = [kept.copy(), other.copy()]
    segments = np.array([(x.ctypes.data, first + 100 * i, 100) for i, x in enumerate(memory)], SEGMENT)
    kernel.run(
        key, 8, program, segments, np.array([TYPES[x.dtype.name] for x in memory], np.int32),
        arrays=np.array([x.ctypes.data for x in state], np.uint64), origin=first // 16 * 16, std=float(std), add=True,
        scale=scale, threads=1,
    )  # fmt: skip
    made, right = [*memory, *state], [*expected, *after]
    return all(a.tobytes() == b.tobytes() for a, b in zip(made, right, strict=True))


def _ranges_agree(kernel: Kernel) -> bool:
    """Whether ranges of several rows are those of the reference, further bits of rare radii included."""
    key, width, blocks = np.arange(1, 9, dtype=np.uint32), 32, np.arange(2, dtype=np.uint64)
    rows = np.array([7, 2**40 + 18955, 2**40 + 4618])  # the first block of one has a rare radius, and the second of one
    made = np.empty((3, width), np.float32)
    kernel.fill_at(key, 8, rows, np.zeros(3, np.int64), made)
    expected = [normals.normal_blocks(key, blocks, row, 8).T.tobytes() for row in rows.tolist()]
    return [out.tobytes() for out in made] == expected


def _jumps_agree(kernel: Kernel) -> bool:
    """Whether rows of a table are carried as NumPy does it: every product and sum rounded by itself."""
    key, width, first = np.arange(1, 9, dtype=np.uint32), 37, 5
    table, sums = np.empty((4, 2, width), np.float32), np.linspace(-1, 1, 2 * width).reshape(2, width)
    for j, row in enumerate(table.reshape(8, width)):
        kernel.fill(key, 8, 2**33 + j, 0, row, threads=1)
    rows, ids = np.array([3, 1]), np.array([[9, 2**40]])
    Phi, R, into = np.array([[[0.999999, 0], [0.3, 1]]]), np.array([[[0.7, 0], [0.1, -0.2]]]), np.array([0, -0.0625])
    xi = np.empty((4, width), np.float32)
    kernel.fill_at(key, 8, np.tile(ids[0], 2), np.repeat(first + rows * width, 2), xi)
    expected = table.copy()
    for i, row in enumerate(rows.tolist()):
        x, z = table[row].astype(np.float64), xi[2 * i : 2 * i + 2].astype(np.float64)
        expected[row, 0] = x[0] * Phi[0, 0, 0] + z[0] * 0.7
        expected[row, 1] = x[0] * 0.3 + x[1] + z[0] * 0.1 + z[1] * -0.2 + sums[i] * -0.0625
    memory = TableMemory([table[:, 0], table[:, 1]], first)
    kernel.carry(key, 8, memory, rows, Phi, R, ids, np.zeros(2, np.int64), sums, into, threads=1)
    return table.tobytes() == expected.tobytes()


def _threads() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return int(torch.get_num_threads())
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given):
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ----------------------------------------------------------------------------------------------------
# Tensors and arrays that noise is added to: as memory for the kernel, and by their own operations without it.


class Targets:
    """Tensors that hold the coordinates of a stream, in their order; each in row-major order, whatever its strides.

    Args:
        tensors: torch tensors or NumPy arrays of any shapes and floating types.
        size: elements in all.
    Raises: ArgumentError if they do not fit, or one cannot be written; nothing is written before `add`.
    """

    def __init__(self, tensors: Sequence[Any], size: int) -> None:
        self.tensors: list[Any] = []
        self.devices: set[Any] = set()
        self.has_arrays = False
        self.on_cpu = True
        self._types: list[str] = []
        self._counts: list[int] = []
        torch = sys.modules.get("torch")
        for i, x in enumerate(tensors):
            kind = _name(getattr(x, "dtype", None))
            if torch is not None and isinstance(x, torch.Tensor):
                x = x.detach()
                _check_tensor(i, x, torch)
                self.devices.add(x.device)
                self.on_cpu &= x.device.type == "cpu"
                count = x.numel()
            else:
                _check_array(i, x)
                self.has_arrays = True
                count = x.size
            if kind not in TYPES or kind == "uint32":
                raise ArgumentError(
                    f"tensors[{i}] must be of type float32, float64, float16 or bfloat16, got {x.dtype}"
                )
            self.tensors.append(x)
            self._types.append(kind)
            self._counts.append(count)
        if sum(self._counts) != size:
            raise ArgumentError(f"tensors must hold the stream's {size} coordinates, got {sum(self._counts)} elements")

    def segments(self, start: int) -> tuple[NDArray[Any], NDArray[np.int32], list[Any]]:
        """Memory for the kernel: segments, their types, and contiguous stand-ins where a tensor is not (else None)."""
        segments, types, stand_ins = [], [], []
        for x, kind, count in zip(self.tensors, self._types, self._counts, strict=True):
            stand_in = None
            if isinstance(x, np.ndarray):
                if not x.flags.c_contiguous:
                    x = stand_in = np.ascontiguousarray(x)
                segments.append((x.ctypes.data, start, count))
            else:
                if not x.is_contiguous():
                    x = stand_in = x.contiguous()
                segments.append((x.data_ptr(), start, count))
            types.append(TYPES[kind])
            stand_ins.append(stand_in)
            start += count
        return np.array(segments, SEGMENT), np.array(types, np.int32), stand_ins

    def take_back(self, stand_ins: list[Any]) -> None:
        """Copy what was written to stand-ins."""
        for x, stand_in in zip(self.tensors, stand_ins, strict=True):
            if stand_in is not None:
                _write(x, stand_in)

    def add(self, noise: Vector, scale: float) -> None:
        """Tensor = (tensor + noise) * scale, with the roundings of the kernel."""
        start = 0
        for x, kind, count in zip(self.tensors, self._types, self._counts, strict=True):
            part = noise[start : start + count].reshape(tuple(x.shape))
            start += count
            wide = kind == "float64"
            if isinstance(x, np.ndarray):
                total = x + part if wide else x.astype(np.float32) + part
                total *= scale if wide else np.float32(scale)
            else:
                torch = sys.modules["torch"]
                total = (x if wide else x.float()) + torch.from_numpy(part).to(x.device)
                total *= scale if wide else float(np.float32(scale))
            _write(x, total)


def _check_tensor(i: int, x: Any, torch: Any) -> None:
    if x.device.type == "meta" or (type(x) is not torch.Tensor and "FakeTensor" in type(x).__name__):
        raise ArgumentError(f"tensors[{i}] has no memory (a meta or fake tensor): noise needs a real one")
    if x.layout != torch.strided:
        raise ArgumentError(f"tensors[{i}] must be dense, got layout {x.layout}")
    strides = x.stride()
    if 0 in strides and x.numel() and any(e > 1 for e, stride in zip(x.shape, strides, strict=True) if stride == 0):
        raise ArgumentError(f"tensors[{i}] has elements that share memory (an expanded tensor): give a copy of it")


def _check_array(i: int, x: Any) -> None:
    if not isinstance(x, np.ndarray):
        raise ArgumentError(f"tensors must be torch tensors or NumPy arrays, got {type(x).__name__} at {i}")
    if not x.flags.writeable or not x.dtype.isnative:
        raise ArgumentError(f"tensors[{i}] must be writeable and of native byte order")


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _write(x: Any, values: Any) -> None:
    if isinstance(x, np.ndarray):
        x[...] = values
    else:
        x.copy_(values)


# ----------------------------------------------------------------------------------------------------
# Steps of a stream, made in the CPU's memory.


_PIECE = 1 << 16  # coordinates that NumPy makes at a time: what a core's cache holds
GROUP = 256  # elements that the kernel works on together; arrays have whole groups
_PAGE = 1024  # float32 elements
_LINES = itertools.count(0, 5 * 16)  # elements from the start of a page, 5 lines from one array to the next


class CompiledPath:
    """Makes std * (K Z)[t] over the coordinates start, .., start + size - 1, with arrays in the CPU's memory.

    Args:
        source: gives Z.
        std: a float32.
        start: first coordinate.
        size: number of coordinates.
    """

    def __init__(self, source: "NoiseSource", std: np.float32, start: int, size: int) -> None:
        self._source, self._std, self._kernel = source, std, source.kernel
        self._size, self._start, self._origin = size, start, start // 16 * 16
        self._length = whole_groups(start, size)
        self._own = slice(start - self._origin, start - self._origin + size)
        self._call: _VectorCall | None = None

    def new(self) -> Vector:
        """A float32 array of zeros, that take no memory until written; it begins at a cache line.

        The next one begins at another line of its page: what is read side by side would else share few places in the
        cache.
        """
        raw = np.zeros(self._length + _PAGE, np.float32)
        skip = (next(_LINES) - raw.ctypes.data // 4) % _PAGE
        return raw[skip : skip + self._length]

    def load(self, vectors: Sequence[Vector]) -> list[Vector]:
        """Arrays that hold copies of these, over whole groups."""
        arrays = []
        for vector in vectors:
            arrays.append(self.new())
            arrays[-1][self._own] = vector
        return arrays

    def save(self, arrays: Sequence[Vector]) -> State:
        """What arrays hold, over the stream's own coordinates: views."""
        return tuple(array[self._own] for array in arrays)

    def next(self, state: NoiseState[Vector]) -> Vector:
        """The noise of the next step, (size,) float32, a fresh array."""
        noise = np.empty(self._size, np.float32)
        segments = np.array([(noise.ctypes.data, self._start, self._size)], SEGMENT)
        made = self._run(state, segments, np.zeros(1, np.int32), add=False, scale=1.0)
        state.broken = False
        return noise if made is None else made

    def add(self, state: NoiseState[Vector], targets: Targets, scale: float) -> None:
        """Write (target + noise of the next step) * scale to targets on the CPU."""
        segments, types, stand_ins = targets.segments(self._start)
        made = self._run(state, segments, types, add=True, scale=scale)
        if made is None:
            targets.take_back(stand_ins)
        else:
            targets.add(made, scale)
        state.broken = False

    def add_to_vector(self, state: NoiseState[Vector], x: Any, scale: float) -> bool:
        """`add` for one run of float32 where step t is row t of Z: the call was packed before, and two words are new.

        Returns: whether it was done; else nothing was.
        """
        torch = sys.modules.get("torch")
        if torch is None or type(x) is not torch.Tensor or not state.is_rows or self._kernel is None:
            return False
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.numel() != self._size or not x.is_contiguous():
            return False
        call, source = self._call, self._source.of_all([state.t])
        if source is None or not self._size:
            return False
        if call is None or call.made_for != (source, scale):
            call = self._call = _VectorCall(source, scale, self._start, self._size, self._origin, float(self._std))
        call.words[0], call.rows[0] = x.data_ptr(), state.t
        state.broken = True
        try:
            self._kernel.do(call.step)
        except MemoryError:  # before anything was done
            state.broken = False
            raise
        state.t += 1
        state.broken = False
        return True

    def _run(
        self, state: NoiseState[Vector], segments: NDArray[Any], types: NDArray[np.int32], *, add: bool, scale: float
    ) -> Vector | None:
        """The step. None where the kernel has written the segments, else the noise, which is nowhere yet.

        The state stays marked as broken until the caller is done with it.
        """
        made, arrays = state.prepare()
        source = None if self._kernel is None else self._source.of_all(made.program.rows())
        if self._kernel is None or source is None:
            arrays = [array.copy() for array in arrays]  # a step that fails changes nothing
            noise = by_numpy(made.program, self._source, arrays, self._origin, self._length)
            state.broken = True
            state.advance(made, arrays)
            return noise[self._own] * self._std
        addresses = np.array([array.ctypes.data for array in arrays] or [0], np.uint64)
        state.broken = True
        try:
            self._kernel.run(
                source.key_words, source.rounds, made.program, segments, types, arrays=addresses, origin=self._origin,
                std=float(self._std), add=add, scale=scale,
            )  # fmt: skip
        except MemoryError:  # before anything was done
            state.broken = False
            raise
        state.advance(made, arrays)
        return None


class _VectorCall:
    """A packed step of the kernel: a row, added to one run of float32.

    Attributes:
        made_for: the source and scale in it.
        step: what `Kernel.do` takes.
        rows, words: memory that it refers to: the row, and the address of the run.
    """

    def __init__(self, source: "NoiseSource", scale: float, start: int, size: int, origin: int, std: float) -> None:
        self.made_for = source, scale
        self._program, self._segments = Program.of_row(0), np.array([(0, start, size)], SEGMENT)
        self._types, terms = np.array([TYPES["float32"]], np.int32), self._program.terms
        self.rows, self.words = self._program.ops["row"], self._segments["data"]
        self.step = _STEP.pack(
            source.key_words.tobytes(), source.rounds, self._program.result, self._program.ops.ctypes.data,
            terms.ctypes.data, 0, self._segments.ctypes.data, self._types.ctypes.data, 0, 1, self._program.num_tiles, 1,
            origin, scale, std, True, False,
        )  # fmt: skip


def by_numpy(
    program: Program, source: "NoiseSource", arrays: Sequence[NDArray[np.float32]], start: int, size: int
) -> NDArray[np.float32]:
    """The noise, before std, of the coordinates start .. start + size - 1; the arrays are written.

    The bits are those of `Strategy.step`. Rows may come from several keys.

    Args:
        program: the step.
        source: gives Z.
        arrays: (size,) float32 each.
        start, size: the coordinates.
    Returns: (size,) float32, a fresh array. Memory: the tiles of 2^16 coordinates besides.
    """
    noise = np.empty(size, np.float32)
    for low in range(0, size, _PIECE):
        high = min(low + _PIECE, size)

        def row(r: int, low: int = low, high: int = high) -> NDArray[np.float32]:
            return source.normal(r, start + low, start + high)

        own = [array[low:high] for array in arrays]
        noise[low:high] = execute(program, row, own, partial(np.zeros, high - low, np.float32), np.float32)
    return noise


def whole_groups(start: int, size: int) -> int:
    """Length of an array that holds these coordinates, from the first one's block on."""
    return -(-(start % 16 + size) // GROUP) * GROUP


def chosen(
    strategy: Strategy, source: "NoiseSource", std: np.float32, t: int, starts: NDArray[np.int64], width: int
) -> Vector:
    """The noise of step t in ranges of coordinates, wherever they lie; for a strategy without a state.

    Args:
        strategy, source, std, t: the step.
        starts: (k,) first coordinates.
        width: of every range.
    Returns: (k, width) float32.
    """
    program = compile_step(trace(strategy, t, 0), 0, {}, (), (), 0).program
    kernel, one = source.kernel, source.of_all(program.rows())
    if kernel is None or one is None:

        def row(r: int) -> Vector:
            parts = [source.normal(r, int(start), int(start) + width) for start in starts]
            return np.concatenate([np.empty(0, np.float32), *parts])

        noise = execute(program, row, (), lambda: np.zeros(len(starts) * width, np.float32), np.float32)
        result: Vector = (noise * std).reshape(len(starts), width)
        return result
    out = np.empty((len(starts), width), np.float32)
    segments = np.zeros(len(starts), SEGMENT)
    segments["data"] = out.ctypes.data + np.arange(len(starts), dtype=np.uint64) * np.uint64(4 * width)
    segments["element"], segments["length"] = starts, width
    kernel.run(
        one.key_words, one.rounds, program, segments, np.zeros(len(starts), np.int32), std=float(std), scattered=True
    )
    return out
