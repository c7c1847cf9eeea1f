"""The noise of a run: normals by key, row and element; and step by step, the owner of counter and state."""

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.errors import ArgumentError, CheckpointError, StepsExhaustedError, TrainingError
from anyorder.noise import compiled, normals
from anyorder.noise.compiled import GROUP, CompiledPath, Targets, chosen, warn_if_missing, whole_groups
from anyorder.noise.normals import BLOCK, MAX_ELEMENT, MAX_ROW, RAW
from anyorder.noise.program import NoiseState
from anyorder.strategy import Banded, Strategy, ToeplitzBanded, Tree
from anyorder.strategy.registry import Structure, kind_of
from anyorder.strategy.rescaled import Rescaled

if TYPE_CHECKING:
    from anyorder.noise.torch_path import TorchPath

_CHUNK = 4096  # blocks at a time: 256 KiB of words, which a core's cache holds


class NoiseSource:
    """Standard normals Z[row, element] and raw words, addressed and never stored.

    Anyone who has the key can compute the noise and take it off: keep it as secret as the data. It must come from the
    operating system's entropy (`NoiseSource.random`) and serve one plan only; pass a key in tests and on resume.

    Args:
        key: 32 bytes.
        rounds: of ChaCha: 8 (the best attacks known reach 7, in theory), 12, or 20 (as in TLS).
        kernel: what makes the bits, which are the same: "best" (the compiled kernel where it is, else NumPy),
            "avx512", "avx2", "portable", or "reference" (NumPy).

    Attributes:
        rounds: as given.
        key_words: the key as eight little-endian words.
    Raises: ArgumentError for another key or rounds, or a kernel that cannot run here; the message never shows the key.
    """

    def __init__(self, key: bytes, rounds: int = 8, *, kernel: str = "best") -> None:
        if not isinstance(key, bytes):
            raise ArgumentError(f"key must be 32 bytes, got {type(key).__name__}")
        if len(key) != 32:
            raise ArgumentError(f"key must be 32 bytes, got {len(key)}; NoiseSource.random() makes one")
        if checks.integer("rounds", rounds, low=8) not in normals.ROUNDS:
            raise ArgumentError(f"rounds must be 8, 12 or 20, got {rounds!r}")
        self._key = key
        self.rounds = int(rounds)
        self.key_words = np.frombuffer(key, "<u4").astype(np.uint32)
        self._kernel_name = kernel
        self._later: tuple[tuple[int, NoiseSource], ...] = ()  # from which row on, ascending
        compiled.kernel(kernel)  # refuses one that cannot run

    @classmethod
    def random(cls, rounds: int = 8) -> "NoiseSource":
        """A source with a fresh key from the operating system."""
        return cls(os.urandom(32), rounds)

    @property
    def key(self) -> bytes:
        """The secret key, for checkpoints that are kept as safe as the data."""
        return self._key

    @property
    def own(self) -> "NoiseSource":
        """The source without its renewals."""
        return NoiseSource(self._key, self.rounds, kernel=self._kernel_name) if self._later else self

    @property
    def kernel(self) -> compiled.Kernel | None:
        """The kernel that makes the bits; None for NumPy."""
        return compiled.kernel(self._kernel_name)

    def derive(self, label: bytes) -> "NoiseSource":
        """A source for another purpose: its key is BLAKE2b of the label under this key.

        Equal labels give equal sources; without this key, sources of different labels look unrelated.
        """
        if not isinstance(label, bytes):
            raise ArgumentError(f"label must be bytes, got {label!r}")
        key = hashlib.blake2b(label, digest_size=32, key=self._key, person=b"anyorder derive").digest()
        result = NoiseSource(key, self.rounds, kernel=self._kernel_name)
        result._later = tuple((row, source.derive(label)) for row, source in self._later)
        return result

    def renewed(self, row: int, nonce: bytes) -> "NoiseSource":
        """The same rows below `row`, and from there on those of a fresh key, which a random nonce makes.

        For a run that cannot know whether the rows from there on were used before. The fresh key is derived from this
        one, so that anyone who has the nonce alone knows nothing.

        Args:
            row: not below that of an earlier renewal.
            nonce: 16 bytes or more, from the operating system's entropy.
        """
        row = checks.integer("row", row, low=self._later[-1][0] if self._later else 0, high=MAX_ROW)
        if not isinstance(nonce, bytes) or len(nonce) < 16:
            raise ArgumentError("nonce must be 16 bytes or more, as os.urandom gives them")
        result = NoiseSource(self._key, self.rounds, kernel=self._kernel_name)
        result._later = (*self._later, (row, self.own.derive(b"renewed " + nonce)))
        return result

    def of(self, row: int) -> "NoiseSource":
        """The source, of a single key, that this row comes from."""
        found = self.own
        for first, source in self._later:
            if row >= first:
                found = source
        return found

    def of_all(self, rows: Iterable[int]) -> "NoiseSource | None":
        """The source, of a single key, that all these rows come from; None where their keys differ."""
        if not self._later:
            return self
        sources = {source.key: source for source in map(self.of, rows)}
        return None if len(sources) > 1 else next(iter(sources.values()), self.own)

    def fingerprint(self) -> str:
        """32 hexadecimal digits that tell two sources apart, renewals included, and reveal nothing of the key."""
        later = "".join(f", from {row} {source.fingerprint()}" for row, source in self._later)
        text = f"layout 1, ChaCha{self.rounds}{later}".encode()
        return hashlib.blake2b(text, digest_size=16, key=self._key, person=b"anyorder finger").hexdigest()

    def normal(self, row: int, start: int, stop: int) -> NDArray[np.float32]:
        """Z[row, start:stop], independent N(0, 1).

        Args:
            row: 0 <= row < 2^63.
            start, stop: elements, 0 <= start <= stop <= 2^62.
        Returns: (stop - start,) float32, a fresh array; the same bits however a range is split.
        Cost: whole blocks of 16 elements. Working memory: 4 KiB a thread, or 1.5 MiB without the kernel.
        """
        _check_range(row, start, stop)
        if self._later:
            return self.of(row).normal(row, start, stop)
        result = np.empty(stop - start, np.float32)
        if self.kernel is not None:
            self.kernel.fill(self.key_words, self.rounds, row, start, result)
            return result

        _fill(result, start, lambda counters: normals.normal_blocks(self.key_words, counters, row, self.rounds))
        return result

    def normal_at(self, rows: ArrayLike, starts: ArrayLike, width: int) -> NDArray[np.float32]:
        """Z[rows[i], starts[i] : starts[i] + width] for many rows and places: the same bits as `normal`.

        Args:
            rows: (k,) integers, 0 <= row < 2^63.
            starts: (k,) integers, the first element of each.
            width: elements of each; all of them lie below 2^62.
        Returns: (k, width) float32, a fresh array.
        """
        width = checks.integer("width", width, low=0, high=MAX_ELEMENT)
        rows = integers("rows", rows, MAX_ROW)
        starts = integers("starts", starts, MAX_ELEMENT - width)
        if len(rows) != len(starts):
            raise ArgumentError(f"rows and starts must be equally many, got {len(rows)} and {len(starts)}")
        result = np.empty((len(rows), width), np.float32)
        if not self._later:
            self._fill_at(rows, starts, result)
            return result
        which = np.searchsorted([row for row, _ in self._later], rows, side="right")
        for i in np.unique(which).tolist():
            here = which == i
            source = self._later[i - 1][1] if i else self.own
            result[here] = source.normal_at(rows[here], starts[here], width)
        return result

    def words(self, row: int, start: int, stop: int) -> NDArray[np.uint32]:
        """Uniform 32-bit words for draws and shuffles, from blocks that no normal uses (counter bit 62).

        Args and Returns: as `normal`, in uint32.
        """
        _check_range(row, start, stop)
        if self._later:
            return self.of(row).words(row, start, stop)
        result = np.empty(stop - start, np.uint32)
        if self.kernel is not None:
            self.kernel.fill(self.key_words, self.rounds, row, start, result)
            return result
        _fill(result, start, lambda counters: normals.blocks(self.key_words, counters | RAW, row, self.rounds))
        return result

    def _fill_at(self, rows: NDArray[np.int64], starts: NDArray[np.int64], result: NDArray[np.float32]) -> None:
        if self.kernel is not None and result.size:
            self.kernel.fill_at(self.key_words, self.rounds, rows, starts, result)
            return
        width = result.shape[1]
        blocks = np.arange((width + 2 * BLOCK - 2) // BLOCK, dtype=np.uint64)  # wherever a range begins in its first
        at_once = max(1, _CHUNK // max(1, len(blocks)))
        for i in range(0, len(rows), at_once):
            here = slice(i, i + at_once)
            first, skip = np.divmod(starts[here], BLOCK)
            counters = (first.astype(np.uint64)[:, None] + blocks).ravel()
            nonces = np.repeat(rows[here].astype(np.uint64), len(blocks))
            made = normals.normal_blocks(self.key_words, counters, nonces, self.rounds)
            whole = made.T.reshape(len(first), -1)
            result[here] = np.take_along_axis(whole, skip[:, None] + np.arange(width), axis=1)

    def __repr__(self) -> str:
        return f"NoiseSource(fingerprint={self.fingerprint()!r}, rounds={self.rounds})"


def _check_range(row: int, start: int, stop: int) -> None:
    checks.integer("row", row, low=0, high=MAX_ROW)
    checks.integer("start", start, low=0, high=MAX_ELEMENT)
    checks.integer("stop", stop, low=start, high=MAX_ELEMENT)


def integers(name: str, values: ArrayLike, high: int | None = None) -> NDArray[np.int64]:
    """A vector of integers, from 0 to `high` where it is given; ArgumentError for anything else."""
    result = np.asarray(values)
    if result.ndim != 1 or (result.size and result.dtype.kind not in "iu"):
        raise ArgumentError(f"{name} must be a list of integers, got {result.dtype} of shape {result.shape}")
    if high is not None and result.size and not 0 <= int(result.min()) <= int(result.max()) <= high:
        raise ArgumentError(f"{name} must lie in 0 .. {high}, got {result.min()} .. {result.max()}")
    return result.astype(np.int64)


def _fill(result: NDArray[Any], start: int, make: Callable[[NDArray[np.uint64]], NDArray[Any]]) -> None:
    """Write elements start, start + 1, .. from the (16, B) blocks that `make` returns for B counters."""
    stop = start + len(result)
    end = -(-stop // BLOCK)
    for block in range(start // BLOCK, end, _CHUNK):
        flat = make(np.arange(block, min(block + _CHUNK, end), dtype=np.uint64)).T.reshape(-1)
        first = block * BLOCK
        low, high = max(start, first), min(stop, first + len(flat))
        result[low - start : high - start] = flat[low - first : high - first]


# ----------------------------------------------------------------------------------------------------
# From which row on a run can draw fresh noise, though the steps before a given one stay as they were released.
#
# Two runs that share their steps before t, and draw all that is left from keys of their own, are two mechanisms on
# what they share: together they cost the composition of two runs. For that no row of Z of the steps before may have to
# do with a later step, that is
#
#     K[s, q] = 0  for s < t and q >= r,        C[q, s] = 0  for q < r and s >= t
#
# with the r that is given here: the released noise of the steps before t is a function of the rows below r, and the
# other rows, which are drawn afresh, mask all that C makes of later gradients. With a C that is square and lower
# triangular, r = t.


def first_new_row(strategy: Strategy, t: int) -> int | None:
    """The r above; None where there is none."""
    structure = kind_of(strategy).structure
    match structure:
        case Structure.RESCALED:
            assert isinstance(strategy, Rescaled)
            return first_new_row(strategy.strategy, t)
        case Structure.TREE:
            assert isinstance(strategy, Tree)
            return strategy.rows_before(t)
        case (
            Structure.IDENTITY | Structure.TOEPLITZ | Structure.TOEPLITZ_BANDED | Structure.BUFFERED
            | Structure.BANDED | Structure.DENSE | Structure.LOW_RANK | Structure.RESTARTED
        ):  # fmt: skip
            return t  # C is square and lower triangular
        case _:
            assert_never(structure)


Vector = NDArray[np.float32]

_MAX_ELEMENT = 2**62 - 2 * GROUP  # the layout's range, less what whole groups add


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
            state alone, and with 8 bands or more, where the kernel is, a quarter of it besides: so many steps are made
            at once, which reads the state once for all of them. The bits are the same.
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
        self._strategy, self._n = strategy, strategy.n
        self._source = source
        self._std = round_up(checks.real("std", std, low=1e-30, high=1e30))
        self._size = checks.integer("size", size, low=0, high=_MAX_ELEMENT)
        self._start = checks.integer("start", start, low=0, high=_MAX_ELEMENT - self._size)
        self._most = self._affordable(memory)
        self._together = _together(strategy, None if memory is None else self._most) if source.kernel is not None else 1
        warn_if_missing(self._size)
        self._where = (source, self._std, self._start, self._size)
        self._go_on(CompiledPath(*self._where), 0, strategy.init(self._size))
        self._free_now = threading.Lock()

    def _go_on(self, path: "CompiledPath | TorchPath", t: int, state: Sequence[Vector]) -> None:
        """Make the steps from t on by this path, from a copy of the state before it."""
        arrays: list[Any] = path.load(state)
        together = self._together if isinstance(path, CompiledPath) else 1
        self._path, self._state = path, NoiseState(self._strategy, t, arrays, self._most, path.new, together)

    @property
    def t(self) -> int:
        """Steps made so far: the step that `next` makes."""
        return self._state.t

    @_one_at_a_time
    def next(self) -> Vector:
        """The noise of step t, (size,) float32, a fresh array.

        Raises: StepsExhaustedError after n steps; nothing changes.
        """
        self._check_next()
        return self._path.next(self._state)

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
        scale = checks.real("scale", scale)
        state, path = self._state, self._path
        self._check_next()
        if len(tensors) == 1 and isinstance(path, CompiledPath) and path.add_to_vector(state, tensors[0], scale):
            return
        targets = Targets(tensors, self._size)
        if not targets.on_cpu or not isinstance(self._path, CompiledPath):
            self._move_to(targets)
        self._path.add(self._state, targets, scale)

    @_one_at_a_time
    def skip(self) -> None:
        """A step of a stream of size 0, which has no noise. Raises: StepsExhaustedError, as `add_to`."""
        if self._size:
            raise ArgumentError(f"only a stream of size 0 has steps without noise, and this one has {self._size}")
        self._check_next()
        self._state.t += 1

    def _check_next(self) -> None:
        if self._state.broken or self._state.t >= self._n:
            check_step_left(self._state.t, self._n)
            self._state.check_whole()

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
        width = checks.integer("width", width, low=1)
        offset = checks.integer("offset", offset, low=0)
        return self._chosen(t, integers("rows", rows), width, offset)

    def elements(self, t: int, elements: ArrayLike) -> Vector:
        """The noise of step t for some coordinates, counted from the stream's first: (k,) float32; see `rows`."""
        return self._chosen(t, integers("elements", elements), 1, 0)[:, 0]

    def _chosen(self, t: int, rows: NDArray[np.int64], width: int, offset: int) -> Vector:
        t = checks.integer("t", t, low=0, high=self._n - 1)
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
        return chosen(self._strategy, self._source, self._std, t, self._start + offset + rows * width, width)

    def _move_to(self, targets: Targets) -> None:
        """Have the state where the targets are, and made there: on a device, or back on the CPU."""
        if len(targets.devices) != 1 or targets.has_arrays:
            raise ArgumentError(f"tensors must be on one device, got {sorted(map(str, targets.devices))}")
        (device,) = targets.devices
        if targets.on_cpu:
            self._change_to(CompiledPath(*self._where))
        elif isinstance(self._path, CompiledPath) or self._path.device != device:
            from anyorder.noise.torch_path import TorchPath  # brings torch in

            self._change_to(TorchPath(*self._where, device))

    def _change_to(self, path: "CompiledPath | TorchPath") -> None:
        self._go_on(path, self._state.t, self._path.save(self._state.arrays))

    # -- state -------------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """What a saved stream must share with the one it is loaded into."""
        return {
            "kind": type(self._strategy).__name__,
            "n": self._n,
            "start": self._start,
            "size": self._size,
            "std": float(self._std),
            "source": self._source.own.fingerprint(),
        }

    @_one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Numbers, words and NumPy arrays that `load_state_dict` resumes from, bit for bit. Never holds the key."""
        self._state.check_whole()
        state = [array.copy() for array in self._path.save(self._state.arrays)]
        return self._identity() | {"t": self.t, "state": state}

    @_one_at_a_time
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises: CheckpointError if it is of another stream, or malformed; nothing changes.
        """
        t, state = check_saved(saved, self._identity(), self._n), saved.get("state")
        if not isinstance(state, list | tuple) or not all(self._is_state(array) for array in state):
            raise CheckpointError(f"state of a saved noise stream must be float32 arrays over {self._size} coordinates")
        self._go_on(CompiledPath(*self._where), t, state)

    def _is_state(self, array: Any) -> bool:
        return isinstance(array, np.ndarray) and array.dtype == np.float32 and array.shape == (self._size,)

    def _affordable(self, memory: int | str | None) -> int:
        """Arrays that fit into the memory; the state's number where no memory is named."""
        least = self._strategy.state_rows
        length = whole_groups(self._start, self._size)
        if memory is None or not length:
            return least
        most = _bytes(memory) // (4 * length)
        if most < least:
            raise ArgumentError(
                f"memory={memory!r} is not enough for the state of {self._strategy!r}: {least} vectors of {self._size} "
                f"float32, {4 * least * length} bytes; give more, or choose a strategy that keeps less"
            )
        return most


def _together(strategy: Strategy, most: int | None) -> int:
    """Steps that are made at once where the state is the last outputs; `most` arrays are to be held, if that is set."""
    if type(strategy) not in (ToeplitzBanded, Banded):
        return 1
    steps = max(1, (strategy.state_rows + 1) // 4)
    return steps if most is None else min(steps, most - strategy.state_rows + 1)


def check_step_left(t: int, n: int) -> None:
    """Raise StepsExhaustedError where step t is past the n of the plan."""
    if t >= n:
        raise StepsExhaustedError(
            f"the plan has noise for {n} steps and all are made; a further step would have no guarantee: "
            f"plan more steps before training starts"
        )


def check_saved(saved: Mapping[str, Any], identity: Mapping[str, Any], n: int) -> int:
    """The step that a saved stream goes on from; CheckpointError if it is another stream's."""
    for name, own in identity.items():
        if name not in saved or saved[name] != own:
            raise CheckpointError(
                f"the saved noise stream has {name} = {saved.get(name)!r} and this one {own!r}: "
                f"its noise would not cancel; resume with the plan, the key and the shard that were saved"
            )
    t = saved.get("t")
    if type(t) is not int or not 0 <= t <= n:
        raise CheckpointError(f"t of a saved noise stream must be an integer from 0 to n, got {t!r}")
    return t


def round_up(std: float) -> np.float32:
    """The least float32 not below std: the noise is never less than was accounted for."""
    result = np.float32(std)
    return result if float(result) >= std else np.nextafter(result, np.float32(np.inf))


def _bytes(memory: int | str) -> int:
    """4_000_000_000, or "4GB" (10^9) or "4GiB" (2^30)."""
    if not isinstance(memory, str):
        return checks.integer("memory", memory, low=0)
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
    for unit, factor in units.items():
        if memory.endswith(unit):
            try:
                return int(checks.real("memory", float(memory[: -len(unit)]), low=0) * factor)
            except ValueError:
                break
    raise ArgumentError(f"memory must be bytes or text such as '4GB' or '512MiB', got {memory!r}")
