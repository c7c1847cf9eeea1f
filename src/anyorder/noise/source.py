"""The source of all randomness: a key, and pure functions of (key, row, element)."""

import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.noise import compiled, normals
from anyorder.noise.normals import BLOCK, MAX_ELEMENT, MAX_ROW, RAW

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
