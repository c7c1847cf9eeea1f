"""The noise of a stream made on the CPU: by the compiled kernel where it is, for rows of one key, else by NumPy."""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import ArgumentError
from anyorder.noise.native import SEGMENT, TYPES
from anyorder.noise.noise_state import NoiseState
from anyorder.noise.program import NONE, Operation, Program, compile_step, trace
from anyorder.noise.source import NoiseSource
from anyorder.strategy import State, Strategy

# ----------------------------------------------------------------------------------------------------
# Tensors and arrays that noise is added to: as memory for the kernel, and by their own operations without it.


_NAMES = "float32, float64, float16 or bfloat16"


class Targets:
    """Tensors that hold the coordinates of a stream, in their order; each in row-major order, whatever its strides.

    Args:
        tensors: torch tensors or NumPy arrays of any shapes and floating types.
        size: elements in all.
    Raises: ArgumentError if they do not fit, or one cannot be written; nothing is written before `add`.
    """

    def __init__(self, tensors: Sequence[Any], size: int) -> None:
        self.tensors = [_detached(i, x) for i, x in enumerate(tensors)]
        total = sum(_count(x) for x in self.tensors)
        if total != size:
            raise ArgumentError(f"tensors must hold the stream's {size} coordinates, got {total} elements")
        self.devices = {x.device for x in self.tensors if not isinstance(x, np.ndarray)}
        self.has_arrays = any(isinstance(x, np.ndarray) for x in self.tensors)
        self.on_cpu = all(device.type == "cpu" for device in self.devices)

    def segments(self, start: int) -> tuple[NDArray[Any], NDArray[np.int32], list[Any]]:
        """Memory for the kernel: segments, their types, and contiguous stand-ins where a tensor is not (else None)."""
        stand_ins = [None if _is_contiguous(x) else _contiguous(x) for x in self.tensors]
        segments, types = [], []
        for x, stand_in in zip(self.tensors, stand_ins, strict=True):
            x, count = x if stand_in is None else stand_in, _count(x)
            segments.append((x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr(), start, count))
            types.append(TYPES[_type_of(x)])
            start += count
        return np.array(segments, SEGMENT), np.array(types, np.int32), stand_ins

    def take_back(self, stand_ins: list[Any]) -> None:
        """Copy what was written to stand-ins."""
        for x, stand_in in zip(self.tensors, stand_ins, strict=True):
            if stand_in is not None:
                _write(x, stand_in)

    def add(self, noise: NDArray[np.float32], scale: float) -> None:
        """Tensor = (tensor + noise) * scale, with the roundings of the kernel."""
        start = 0
        for x in self.tensors:
            part = noise[start : start + _count(x)].reshape(tuple(x.shape))
            start += _count(x)
            wide = _type_of(x) == "float64"
            if isinstance(x, np.ndarray):
                total = x + part if wide else x.astype(np.float32) + part
                total *= scale if wide else np.float32(scale)
            else:
                torch = sys.modules["torch"]
                total = (x if wide else x.float()) + torch.from_numpy(part).to(x.device)
                total *= scale if wide else float(np.float32(scale))
            _write(x, total)


def _detached(i: int, x: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        x = x.detach()
        if x.device.type == "meta" or (type(x) is not torch.Tensor and "FakeTensor" in type(x).__name__):
            raise ArgumentError(f"tensors[{i}] has no memory (a meta or fake tensor): noise needs a real one")
        if x.layout != torch.strided:
            raise ArgumentError(f"tensors[{i}] must be dense, got layout {x.layout}")
        strides = x.stride()
        if 0 in strides and x.numel() and any(e > 1 for e, stride in zip(x.shape, strides, strict=True) if stride == 0):
            raise ArgumentError(f"tensors[{i}] has elements that share memory (an expanded tensor): give a copy of it")
    elif not isinstance(x, np.ndarray):
        raise ArgumentError(f"tensors must be torch tensors or NumPy arrays, got {type(x).__name__} at {i}")
    elif not x.flags.writeable or not x.dtype.isnative:
        raise ArgumentError(f"tensors[{i}] must be writeable and of native byte order")
    if _type_of(x) not in TYPES or _type_of(x) == "uint32":
        raise ArgumentError(f"tensors[{i}] must be of type {_NAMES}, got {x.dtype}")
    return x


def _type_of(x: Any) -> str:
    return _name(x.dtype)


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _count(x: Any) -> int:
    return int(x.size if isinstance(x, np.ndarray) else x.numel())


def _is_contiguous(x: Any) -> bool:
    return bool(x.flags.c_contiguous if isinstance(x, np.ndarray) else x.is_contiguous())


def _contiguous(x: Any) -> Any:
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def _write(x: Any, values: Any) -> None:
    if isinstance(x, np.ndarray):
        x[...] = values
    else:
        x.copy_(values)


# ----------------------------------------------------------------------------------------------------
# Programs run on vectors that have sums, products and quotients: what a program means, and how NumPy runs it.


_PIECE = 1 << 16  # coordinates at a time: what a core's cache holds


def execute(
    program: Program,
    row: Callable[[int], Any],
    arrays: Sequence[Any],
    zeros: Callable[[], Any],
    number: Callable[[float], Any],
) -> Any:
    """The result of a program over the coordinates in hand; the arrays are written.

    Args:
        program: of any operations but WORDS.
        row: gives Z[r], a fresh vector.
        arrays: of the program, float32 vectors: NumPy's or torch's. In-place writes reach them.
        zeros: makes a vector.
        number: makes a float32 of no dimensions. (Python's, in a quotient, torch makes its reciprocal on CUDA.)
    Returns: a vector, which may be one of the arrays.
    """
    tiles: list[Any] = [None] * program.num_tiles
    terms = program.terms.tolist()

    def read(operand: int) -> Any:
        return tiles[operand] if operand >= 0 else arrays[~operand]

    for kind, dst, a, b, c, count, at in program.ops.tolist():
        if kind == Operation.GAUSS:
            value = row(at) if c == 1 else row(at) * c
            value = value if a == NONE else read(a) + value
        elif kind == Operation.LINEAR:
            value = None if a == NONE else read(a)
            for x, factor in terms[at : at + count]:
                part = read(x) * factor
                value = part if value is None else value + part
            value = zeros() if value is None else value if count else value + number(-0.0)  # x + -0 is x, and fresh
        elif kind == Operation.LEAK:
            value = read(a) + (read(b) + read(a) * c)
        elif kind == Operation.DIVIDE:
            value = read(a) / number(c)
        else:
            raise AssertionError(kind)
        if dst >= 0:
            tiles[dst] = value
        else:
            arrays[~dst][:] = value
    return read(program.result)


def run(
    program: Program, source: NoiseSource, arrays: Sequence[NDArray[np.float32]], start: int, size: int
) -> NDArray[np.float32]:
    """The noise, before std, of the coordinates start .. start + size - 1, by NumPy; the arrays are written.

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


Vector = NDArray[np.float32]

GROUP = 256  # elements that the kernel works on together; arrays have whole groups
_PAGE = 1024  # float32 elements
_LINES = itertools.count(0, 5 * 16)  # elements from the start of a page, 5 lines from one array to the next


class HostNoise:
    """std * (K Z)[t] over the coordinates start, .., start + size - 1, with the state in the CPU's memory.

    Args:
        strategy: gives K.
        source: gives Z.
        std: a float32.
        size: number of coordinates.
        start: first coordinate.
        most: number of arrays to hold at most, the state's included.
    """

    def __init__(
        self, strategy: Strategy, source: NoiseSource, std: np.float32, size: int, start: int, most: int
    ) -> None:
        self._strategy, self._source, self._std, self._kernel = strategy, source, std, source.kernel
        self._size, self._start, self._origin, self._most = size, start, start // 16 * 16, most
        self._length = whole_groups(start, size)
        self._own = slice(start - self._origin, start - self._origin + size)
        self._hold(0, [_aligned(array) for array in strategy.init(self._length)])

    def _hold(self, t: int, state: list[Vector]) -> None:
        self.held: NoiseState[Vector] = NoiseState(self._strategy, t, state, self._most, self._new)

    def _new(self) -> Vector:
        return _aligned(self._length)

    def next(self) -> Vector:
        """The noise of the next step, (size,) float32, a fresh array."""
        noise = np.empty(self._size, np.float32)
        segments = np.array([(noise.ctypes.data, self._start, self._size)], SEGMENT)
        made = self._run(segments, np.zeros(1, np.int32), add=False, scale=1.0)
        return noise if made is None else made

    def add(self, targets: Targets, scale: float) -> None:
        """Write (target + noise of the next step) * scale to targets on the CPU."""
        segments, types, stand_ins = targets.segments(self._start)
        made = self._run(segments, types, add=True, scale=scale)
        with self.held.unsafe():
            if made is None:
                targets.take_back(stand_ins)
            else:
                targets.add(made, scale)

    def _run(self, segments: NDArray[Any], types: NDArray[np.int32], *, add: bool, scale: float) -> Vector | None:
        """The step. None where the kernel has written the segments, else the noise, which is nowhere yet."""
        made, arrays = self.held.prepare()
        source = None if self._kernel is None else self._source.of_all(made.program.rows())
        if self._kernel is None or source is None:
            arrays = [array.copy() for array in arrays]  # a step that fails changes nothing
            noise = run(made.program, self._source, arrays, self._origin, self._length)
            with self.held.unsafe():
                self.held.settle(made, arrays)
            return noise[self._own] * self._std
        with self.held.unsafe(harmless=(MemoryError,)):
            self._kernel.run(
                source.key_words, source.rounds, made.program, segments, types,
                arrays=np.array([array.ctypes.data for array in arrays] or [0], np.uint64), origin=self._origin,
                std=float(self._std), add=add, scale=scale,
            )  # fmt: skip
            self.held.settle(made, arrays)
        return None

    def state(self) -> State:
        """The state before the next step, over the stream's own coordinates: views."""
        return tuple(array[self._own] for array in self.held.state)

    def load(self, t: int, state: State) -> None:
        """Go on from a copy of a state before step t."""
        own = []
        for array in state:
            own.append(self._new())
            own[-1][self._own] = array
        self._hold(t, own)


def whole_groups(start: int, size: int) -> int:
    """Length of an array that holds these coordinates, from the first one's block on."""
    return -(-(start % 16 + size) // GROUP) * GROUP


def chosen(
    strategy: Strategy, source: NoiseSource, std: np.float32, t: int, starts: NDArray[np.int64], width: int
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


def _aligned(values: Vector | int) -> Vector:
    """A float32 vector that begins at a cache line: a copy, or zeros of a length that take no memory until written.

    The next one begins at another line of its page: what is read side by side would else share few places in the cache.
    """
    length = values if isinstance(values, int) else len(values)
    raw = np.zeros(length + _PAGE, np.float32)
    skip = (next(_LINES) - raw.ctypes.data // 4) % _PAGE
    result = raw[skip : skip + length]
    if not isinstance(values, int):
        result[:] = values
    return result
