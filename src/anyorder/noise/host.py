"""The noise of a stream made on the CPU: by the compiled kernel where it is, for rows of one key, else by NumPy."""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder.noise import execute_numpy
from anyorder.noise.compiled import compile_step
from anyorder.noise.held import Held
from anyorder.noise.native import SEGMENT
from anyorder.noise.source import NoiseSource
from anyorder.noise.targets import Targets
from anyorder.noise.traced import trace
from anyorder.strategy import State, Strategy

__all__ = ["GROUP", "HostNoise", "chosen", "whole_groups"]

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
        self.held: Held[Vector] = Held(self._strategy, t, state, self._most, self._new)

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
            noise = execute_numpy.run(made.program, self._source, arrays, self._origin, self._length)
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

        noise = execute_numpy.execute(program, row, (), lambda: np.zeros(len(starts) * width, np.float32), np.float32)
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
