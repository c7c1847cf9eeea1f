"""The noise of a run, step by step: the only owner of the step counter and of the strategy's state."""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import _check
from anyorder.errors import ArgumentError, CheckpointError, StepsExhaustedError, TrainingError
from anyorder.noise import native
from anyorder.noise.source import NoiseSource
from anyorder.noise.targets import Targets
from anyorder.noise.traced import Compiled, compile_step, trace
from anyorder.strategy import State, Strategy

__all__ = ["NoiseStream"]

Vector = NDArray[np.float32]

_GROUP = 256  # elements that the kernel works on together; arrays have whole groups
_PAGE = 1024  # float32 elements
_LINES = itertools.count(0, 5 * 16)  # elements from the start of a page, 5 lines from one array to the next
_MAX_ELEMENT = 2**62 - 2 * _GROUP  # the layout's range, less what whole groups add


def _one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a call while another is under way: two threads on one stream would get the same noise."""

    @functools.wraps(method)
    def guarded(self: "NoiseStream", *args: Any, **kwargs: Any) -> Any:
        if not self._free_now.acquire(blocking=False):
            raise TrainingError("this noise stream is in use by another thread: give each thread a stream of its own")
        try:
            return method(self, *args, **kwargs)
        finally:
            self._free_now.release()

    return guarded


class NoiseStream:
    """std * (K Z)[t] for t = 0, 1, .., n - 1 over the coordinates start, .., start + size - 1.

    Streams over disjoint ranges of coordinates make together, bit for bit, what one stream over all of them makes:
    a rank asks for its own range and talks to nobody.

    With the compiled kernel a step is one pass over the memory of its arrays, in torch's number of threads. The
    operations are those of `Strategy.step`, with the same roundings; the state is written in place.

    Args:
        strategy: gives K and the number of steps n.
        source: gives Z. One source serves one plan.
        std: noise standard deviation in gradient units, 1e-30 to 1e30; rounded up to float32, never down.
        size: number of coordinates.
        start: first coordinate.
        memory: bytes, or text such as "4GB", that the stream may hold between steps. What the strategy's own state
            leaves of it holds rows of Z that the next step uses too; the other rows are made again. None holds the
            state alone. The bits are the same.
    """

    def __init__(
        self,
        strategy: Strategy,
        source: NoiseSource,
        std: float,
        size: int,
        *,
        start: int = 0,
        memory: int | str | None = None,
    ) -> None:
        self._strategy = strategy
        self._source = source
        self._std = _round_up(_check.real("std", std, low=1e-30, high=1e30))
        self._size = _check.integer("size", size, low=0, high=_MAX_ELEMENT)
        self._start = _check.integer("start", start, low=0, high=_MAX_ELEMENT - self._size)
        self._origin = self._start // 16 * 16
        self._length = -(-(self._start + self._size - self._origin) // _GROUP) * _GROUP
        self._most_arrays = self._affordable(memory)
        native.warn_if_missing(self._size)
        self._t = 0
        self._state: list[Vector] = [_aligned(array) for array in strategy.init(self._length)]
        self._rows: dict[int, Vector] = {}  # rows of Z that are kept
        self._free: list[Vector] = []
        self._device: Any = None  # what holds the state where the gradients are, once they are not on the CPU
        self._zeros: Callable[[], Any]  # there
        self._broken = False
        self._free_now = threading.Lock()

    @property
    def t(self) -> int:
        """Steps made so far: the step that `next` makes."""
        return self._t

    @_one_at_a_time
    def next(self) -> Vector:
        """The noise of step t, (size,) float32, a fresh array.

        Raises: StepsExhaustedError after n steps; nothing changes.
        """
        self._check_next()
        noise = np.empty(self._size, np.float32)
        if self._device is not None:
            made = self._zeros()
            self._add_on_device(Targets([made], self._size), 1.0)
            with self._unsafe(harmless=()):
                noise[:] = made.cpu().numpy()
            return noise
        segments = np.array([(noise.ctypes.data, self._start, self._size)], native.SEGMENT)
        if self._run(segments, np.zeros(1, np.int32), add=False, scale=1.0):
            return noise
        return self._reference_step()

    @_one_at_a_time
    def add_to(self, tensors: Sequence[Any], scale: float = 1.0) -> None:
        """Add the noise of step t in place: tensor = (tensor + noise) * scale.

        The tensors hold the coordinates in their order. Sum and product are rounded to float32 (float64 where the
        tensor is), then once to the tensor's type. Nothing of the size of the tensors is made, but a copy of one that
        is not contiguous.

        Args:
            tensors: torch tensors or NumPy arrays of any shapes and floating types, `size` elements in all.
            scale: factor, such as 1 / batch_size.
        Raises: ArgumentError for tensors that do not fit, StepsExhaustedError after n steps; nothing changes.
        """
        scale = _check.real("scale", scale)
        targets = Targets(tensors, self._size)
        self._check_next()
        if self._device is not None or not targets.on_cpu:
            self._add_on_device(targets, scale)
            return
        segments, types, stand_ins = targets.segments(self._start)
        if not self._run(segments, types, add=True, scale=scale):
            with self._unsafe(harmless=()):
                targets.add(self._reference_step(), scale)
            return
        with self._unsafe(harmless=()):
            targets.take_back(stand_ins)

    def rows(self, t: int, rows: ArrayLike, width: int, *, offset: int = 0) -> Vector:
        """The noise of step t for some rows of a (num_embeddings, width) table; the step counter stays.

        Bit for bit what `next` gives there, at the cost of these rows alone.

        Args:
            t: step, 0 <= t < n.
            rows: (k,) row numbers.
            width: columns of the table.
            offset: place of the table among the stream's coordinates.
        Returns: (k, width) float32.
        Raises: ArgumentError for a strategy with a state: its noise needs all steps before; for rows outside.
        """
        width = _check.integer("width", width, low=1)
        offset = _check.integer("offset", offset, low=0)
        return self._chosen(t, _integers("rows", rows), width, offset)

    def elements(self, t: int, elements: ArrayLike) -> Vector:
        """The noise of step t for some coordinates, counted from the stream's first: (k,) float32; see `rows`."""
        return self._chosen(t, _integers("elements", elements), 1, 0)[:, 0]

    # -- steps -------------------------------------------------------------------------------------------------------

    def _check_next(self) -> None:
        n = self._strategy.n
        if self._t >= n:
            raise StepsExhaustedError(
                f"the plan has noise for {n} steps and all are made; a further step would have no guarantee: "
                f"plan more steps before training starts"
            )
        self._check_whole()

    def _check_whole(self) -> None:
        if self._broken:
            raise TrainingError(
                f"step {self._t} of this noise stream was broken off half way: its state is of two steps at once; "
                "load a saved state and go on from there"
            )

    @contextmanager
    def _unsafe(self, harmless: tuple[type[Exception], ...] = (MemoryError, ArgumentError)) -> Iterator[None]:
        """What must not be left half done. The harmless errors come before anything is done."""
        self._broken = True
        try:
            yield
        except harmless:
            self._broken = False
            raise
        self._broken = False

    def _run(self, segments: NDArray[Any], types: NDArray[np.int32], *, add: bool, scale: float) -> bool:
        """The step by the kernel; False, and nothing done, where it cannot follow the strategy, or has no one key."""
        kernel = self._source.kernel
        traced = None if kernel is None else trace(self._strategy, self._t, len(self._state))
        source = None if traced is None else self._source.of_all(traced.rows())
        if kernel is None or traced is None or source is None:
            return False
        keep = self._rows_to_keep(traced.rows(), len(traced.state))
        given = [*self._state, *self._rows.values(), *self._free]
        stored = {row: len(self._state) + i for i, row in enumerate(self._rows)}
        free = range(len(self._state) + len(stored), len(given))
        allowance = max(self._most_arrays - len(given), 0)
        made = compile_step(traced, len(self._state), stored, free, keep, allowance)
        arrays = given + [_aligned(self._length) for _ in range(made.num_arrays - len(given))]
        with self._unsafe():
            kernel.run(
                source.key_words, source.rounds, made.program, segments, types,
                arrays=np.array([array.ctypes.data for array in arrays] or [0], np.uint64), origin=self._origin,
                std=float(self._std), add=add, scale=scale,
            )  # fmt: skip
            self._settle(made, arrays)
        return True

    def _settle(self, made: Compiled, arrays: list[Vector]) -> None:
        """Take over the state after a step. Arrays that hold nothing any more are kept, as many as memory allows."""
        self._state = [arrays[i] for i in made.state]
        self._rows = {row: arrays[i] for row, i in made.rows.items()}
        used = {*made.state, *made.rows.values()}
        most = max(self._most_arrays, self._strategy.state_rows) - len(used)
        self._free = [array for i, array in enumerate(arrays) if i not in used][: max(most, 0)]
        self._t += 1

    def _rows_to_keep(self, rows: list[int], num_state: int) -> set[int]:
        """Rows of Z at hand in this step that the next one uses too, as many as there is memory for."""
        room = self._most_arrays - num_state
        if room <= 0 or self._t + 1 >= self._strategy.n:
            return set()
        following = trace(self._strategy, self._t + 1, num_state)
        shared = [] if following is None else [row for row in following.rows() if row in rows or row in self._rows]
        return set(sorted(shared, key=lambda row: row not in self._rows)[:room])

    def _reference_step(self) -> Vector:
        """The step by NumPy."""

        def row(r: int) -> Vector:
            return self._source.normal(r, self._origin, self._origin + self._length)

        noise, state = self._strategy.step(self._t, tuple(self._state), row)
        noise = noise[self._start - self._origin :][: self._size] * self._std
        # The kernel writes arrays in place: no two may be one.
        self._state = list(state) if self._source.kernel is None else [_aligned(array) for array in state]
        self._t += 1
        return noise

    def _add_on_device(self, targets: Targets, scale: float) -> None:
        """The step on a device that is not the CPU, where the state then stays."""
        from anyorder.noise.device import DeviceNoise  # brings torch in

        if len(targets.devices) != 1 or any(isinstance(x, np.ndarray) for x in targets.tensors):
            raise ArgumentError(f"tensors must be on one device, got {sorted(map(str, targets.devices))}")
        (device,) = targets.devices
        if self._device is None or self._device.device != device:
            import torch

            self._zeros = functools.partial(torch.zeros, self._size, device=device)
            made = DeviceNoise(self._strategy, self._source, float(self._std), self._size, self._start, device)
            made.load(self._t, self._own_state())
            self._device, self._state, self._rows, self._free = made, [], {}, []
        with self._unsafe():
            self._device.add(self._t, targets.tensors, scale)
            self._t += 1

    def _chosen(self, t: int, rows: NDArray[np.int64], width: int, offset: int) -> Vector:
        t = _check.integer("t", t, low=0, high=self._strategy.n - 1)
        if self._strategy.state_rows:
            raise ArgumentError(
                f"the noise of chosen rows needs a strategy without a state, got {self._strategy!r}: its noise at a "
                "coordinate comes from all steps before, at that coordinate; use a tree with regenerate=True, a banded "
                "inverse or independent noise, or make the whole step with next()"
            )
        most = (self._size - offset) // width
        if rows.size and not 0 <= rows.min() <= rows.max() < most:
            raise ArgumentError(
                f"rows must lie in 0 .. {most - 1}, got {rows.min()} .. {rows.max()}: the stream has {self._size} "
                f"coordinates, {width} to a row from {offset} on"
            )
        out = np.empty((rows.size, width), np.float32)
        starts = self._start + offset + rows * width
        kernel = self._source.kernel
        traced = None if kernel is None else trace(self._strategy, t, 0)
        source = None if traced is None else self._source.of_all(traced.rows())
        if kernel is None or traced is None or source is None:

            def row(r: int) -> Vector:
                parts = [self._source.normal(r, int(start), int(start) + width) for start in starts]
                return np.concatenate([np.empty(0, np.float32), *parts])

            out[:] = (self._strategy.step(t, (), row)[0] * self._std).reshape(out.shape)
            return out
        segments = np.zeros(rows.size, native.SEGMENT)
        segments["data"] = out.ctypes.data + np.arange(rows.size, dtype=np.uint64) * np.uint64(4 * width)
        segments["element"], segments["length"] = starts, width
        kernel.run(
            source.key_words, source.rounds, compile_step(traced, 0, {}, (), (), 0).program, segments,
            np.zeros(rows.size, np.int32), std=float(self._std), scattered=True,
        )  # fmt: skip
        return out

    # -- state -------------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """What a saved stream must share with the one it is loaded into."""
        return {
            "kind": type(self._strategy).__name__,
            "n": self._strategy.n,
            "start": self._start,
            "size": self._size,
            "std": float(self._std),
            "source": self._source.own.fingerprint(),
        }

    def _own_state(self) -> State:
        """The state over the stream's own coordinates: views, or copies where it is on a device."""
        if self._device is not None:
            state: State = self._device.state(self._t)
            return state
        low = self._start - self._origin
        return tuple(array[low : low + self._size] for array in self._state)

    @_one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Numbers, words and NumPy arrays that `load_state_dict` resumes from, bit for bit. Never holds the key."""
        self._check_whole()
        return self._identity() | {"t": self._t, "state": [array.copy() for array in self._own_state()]}

    @_one_at_a_time
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises: CheckpointError if it is of another stream, or malformed; nothing changes.
        """
        for name, own in self._identity().items():
            if name not in saved or saved[name] != own:
                raise CheckpointError(
                    f"the saved noise stream has {name} = {saved.get(name)!r} and this one {own!r}: "
                    f"its noise would not cancel; resume with the plan, the key and the shard that were saved"
                )
        t, state = saved.get("t"), saved.get("state")
        if type(t) is not int or not 0 <= t <= self._strategy.n:
            raise CheckpointError(f"t of a saved noise stream must be an integer from 0 to n, got {t!r}")
        if not isinstance(state, list | tuple) or not all(self._is_state(array) for array in state):
            raise CheckpointError(f"state of a saved noise stream must be float32 arrays over {self._size} coordinates")
        low = self._start - self._origin
        own = []
        for array in state:
            own.append(_aligned(self._length))
            own[-1][low : low + self._size] = array
        self._t, self._state, self._rows, self._free, self._device, self._broken = t, own, {}, [], None, False

    def _is_state(self, array: Any) -> bool:
        return isinstance(array, np.ndarray) and array.dtype == np.float32 and array.shape == (self._size,)

    def _affordable(self, memory: int | str | None) -> int:
        """Arrays that fit into the memory; the state's number where no memory is named."""
        least = self._strategy.state_rows
        if memory is None or not self._length:
            return least
        most = _bytes(memory) // (4 * self._length)
        if most < least:
            raise ArgumentError(
                f"memory={memory!r} is not enough for the state of {self._strategy!r}: {least} vectors of {self._size} "
                f"float32, {4 * least * self._length} bytes; give more, or choose a strategy that keeps less"
            )
        return most


def _round_up(std: float) -> np.float32:
    """The least float32 not below std: the noise is never less than was accounted for."""
    result = np.float32(std)
    return result if float(result) >= std else np.nextafter(result, np.float32(np.inf))


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


def _integers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    result = np.asarray(values)
    if result.ndim != 1 or (result.size and result.dtype.kind not in "iu"):
        raise ArgumentError(f"{name} must be a list of integers, got {result.dtype} of shape {result.shape}")
    return result.astype(np.int64)


def _bytes(memory: int | str) -> int:
    """4_000_000_000, or "4GB" (10^9) or "4GiB" (2^30)."""
    if not isinstance(memory, str):
        return _check.integer("memory", memory, low=0)
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
    for unit, factor in units.items():
        if memory.endswith(unit):
            try:
                return int(_check.real("memory", float(memory[: -len(unit)]), low=0) * factor)
            except ValueError:
                break
    raise ArgumentError(f"memory must be bytes or text such as '4GB' or '512MiB', got {memory!r}")
