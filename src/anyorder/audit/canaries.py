"""Canaries: public directions that an audit adds to sums by secret coins, and looks for in what was released."""

from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import _check
from anyorder._closed import SetOnce, final, frozen
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource

__all__ = ["Canaries"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_BLOCK = 1 << 20  # elements of directions that are made, or kept, at a time


@final
class Canaries(SetOnce):
    """`count` unit vectors of `size` coordinates, which live on `dimension` of them: functions of the seed alone.

    Orthogonal ones own dimension // count coordinates each, in turns: canary c has the places c, c + count, ..
    among the coordinates; what is left over belongs to none. Inner products of a row with all of them cost
    O(dimension). Random ones are directions in all `dimension` coordinates, drawn independently; they are made again,
    block by block, whenever they are needed: O(count dimension) for a row. No (count, size) matrix is kept.

    The vectors are public. What is secret is which of them were added: see `coins`.

    Args:
        size: coordinates of a released row.
        count: number of canaries.
        dimension: coordinates that they live on, at most `size`.
        seed: what the vectors, and where nothing else is said the coordinates, follow from: an integer, or bytes.
        orthogonal: True for disjoint coordinates, which needs count <= dimension; False for random directions; None
            for orthogonal ones where that is possible.
        coordinates: (dimension,) distinct coordinates, those of one layer perhaps; None to draw them.
    Raises: ArgumentError.

    Example:
        >>> canaries = Canaries(size=6, count=3, dimension=6, seed=0)
        >>> np.round(canaries.vectors() @ canaries.vectors().T, 12).tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    def __init__(
        self,
        size: int,
        count: int,
        dimension: int,
        seed: int | bytes,
        *,
        orthogonal: bool | None = None,
        coordinates: ArrayLike | None = None,
    ) -> None:
        self.size = _check.integer("size", size, low=1, high=1 << 62)
        self.count = _check.integer("count", count, low=1)
        self.dimension = _check.integer("dimension", dimension, low=1, high=self.size)
        self.seed: int | bytes = seed if isinstance(seed, bytes) else _check.integer("seed", seed, low=0)
        if orthogonal is not None and not isinstance(orthogonal, bool):
            raise ArgumentError(f"orthogonal must be True, False or None, got {orthogonal!r}")
        if orthogonal and self.count > self.dimension:
            raise ArgumentError(
                f"orthogonal canaries have coordinates of their own: count must be at most dimension={self.dimension}, "
                f"got {self.count}; take fewer, or orthogonal=False"
            )
        self.orthogonal = self.count <= self.dimension if orthogonal is None else orthogonal
        label = b"bytes " + seed if isinstance(seed, bytes) else b"integer %d" % int(seed)
        self._source = NoiseSource(blake2b(label, digest_size=32, person=b"anyorder canary").digest())
        self._given = None if coordinates is None else frozen(_distinct(coordinates, self.dimension, self.size))

    @cached_property
    def coordinates(self) -> Integers:
        """(dimension,) the coordinates that the canaries live on; drawn ones ascend."""
        if self._given is not None:
            return self._given
        return frozen(drawn(self._source.derive(b"coordinates"), self.size, self.dimension))

    @property
    def width(self) -> int:
        """Coordinates of one canary."""
        return self.dimension // self.count if self.orthogonal else self.dimension

    def coins(self, key: bytes | None = None) -> NDArray[np.bool_]:
        """(count,) independent fair coins, which decide who is included.

        They do not follow from the seed: whoever scores what was released knows the vectors, and must not know them.

        Args:
            key: 32 bytes for reproducible tests; in use None: the coins then come from the operating system.
        """
        source = NoiseSource.random() if key is None else NoiseSource(key).derive(b"coins of canaries")
        return np.asarray(source.words(0, 0, self.count) & 1 == 1)

    def vector(self, c: int) -> Floats:
        """(size,) canary c."""
        c = _check.integer("c", c, low=0, high=self.count - 1)
        result = np.zeros(self.size)
        result[self._places(c, c + 1)[:, 0]] = self._made(c, c + 1)[:, 0]
        return result

    def vectors(self) -> Floats:
        """(count, size) all of them: for small ones."""
        return np.stack([self.vector(c) for c in range(self.count)])

    def sum(self, which: ArrayLike) -> Floats:
        """(size,) the sum of the canaries that are named.

        Args:
            which: a bool for each canary, or the numbers of some; one that is named twice is in it twice.
        """
        chosen = np.asarray(which)
        if chosen.dtype == np.bool_:
            if chosen.shape != (self.count,):
                raise ArgumentError(f"which must have one bool for each of {self.count} canaries, got {chosen.shape}")
            return self.combined(chosen)
        if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
            raise ArgumentError(f"which must be a list of bools or of integers, got {chosen.dtype}, {chosen.shape}")
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.count:
            raise ArgumentError(f"which must name canaries 0 to {self.count - 1}, and some are not")
        return self.combined(np.bincount(chosen.astype(np.int64), minlength=self.count))

    def combined(self, weights: ArrayLike, scale: float = 1.0, *, whole: bool = False) -> Floats:
        """(size,) sum over c of weights[c] scale g_c.

        Args:
            weights: (count,) numbers.
            scale: of every canary.
            whole: round every coordinate of scale g_c toward zero to an integer before it is added, which makes no
                vector longer: for sums on a grid.
        """
        w = _check.array("weights", weights, ndim=1)
        if len(w) != self.count:
            raise ArgumentError(f"weights must be {self.count} numbers, one for each canary, got {len(w)}")
        result = np.zeros(self.size)
        for i, j in self._blocks():
            if not w[i:j].any():
                continue
            vectors = self._made(i, j) if scale == 1.0 else scale * self._made(i, j)
            vectors = np.trunc(vectors) if whole else vectors
            if self.orthogonal:
                result[self._places(i, j)] = vectors * w[i:j]
            else:
                result[self.coordinates] += vectors @ w[i:j]
        return result

    def dot(self, row: Any) -> Floats:
        """(count,) inner products of one released row with every canary, in float64.

        Args:
            row: `size` numbers in any shape, NumPy or torch.
        Cost: O(dimension) for orthogonal canaries, O(count dimension) for random ones.
        Raises: ArgumentError if it does not fit or is not finite.
        """
        values = _flat(row)
        if values.shape != (self.size,):
            raise ArgumentError(f"a released row must have size={self.size} numbers, got shape {np.shape(row)}")
        everything = self.dimension == self.size and self._given is None
        own = (values if everything else values[self.coordinates]).astype(np.float64, copy=False)
        if not np.isfinite(own.sum()):  # which NaN and infinities survive
            raise ArgumentError("a released row must be finite, and some of its coordinates are not")
        if self.orthogonal:
            table = own[: self.width * self.count].reshape(self.width, self.count)
            parts = [np.einsum("wc,wc->c", table[:, i:j], self._made(i, j)) for i, j in self._blocks()]
        else:
            parts = [own @ self._made(i, j) for i, j in self._blocks()]
        return np.concatenate(parts)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of canaries that are made together: always the same, so that sums are rounded the same."""
        step = max(1, _BLOCK // self.width)
        return ((i, min(i + step, self.count)) for i in range(0, self.count, step))

    def _places(self, i: int, j: int) -> Integers:
        """(width, j - i) coordinates of canaries i, .., j - 1."""
        if not self.orthogonal:
            return np.broadcast_to(self.coordinates[:, None], (self.dimension, j - i))
        return np.asarray(self.coordinates[np.arange(self.width)[:, None] * self.count + np.arange(i, j)])

    def _made(self, i: int, j: int) -> Floats:
        """(width, j - i) what canaries i, .., j - 1 have there."""
        if self.count * self.width <= _BLOCK:
            return self._all[:, i:j]
        return self._make(i, j)

    @cached_property
    def _all(self) -> Floats:
        return self._make(0, self.count)

    def _make(self, i: int, j: int) -> Floats:
        vectors = self._source.normal(0, i * self.width, j * self.width).astype(np.float64).reshape(j - i, self.width)
        norms = np.sqrt(np.square(vectors).sum(axis=1))
        vectors[norms == 0, 0], norms[norms == 0] = 1.0, 1.0  # of width 1, once in 2^30
        vectors /= norms[:, None]
        return np.ascontiguousarray(vectors.T) if self.orthogonal else vectors.T  # a long copy for one product

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.size, self.count, self.dimension, self.seed, self.orthogonal, self._given)

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is Canaries
            and (self.size, self.count, self.dimension, self.orthogonal) == (
                other.size, other.count, other.dimension, other.orthogonal
            )
            and self._source.key == other._source.key
            and np.array_equal(self.coordinates, other.coordinates)
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self.size, self.count, self.dimension, self.orthogonal, self._source.key))

    def __repr__(self) -> str:
        kind = "orthogonal" if self.orthogonal else "random"
        return f"Canaries(size={self.size}, count={self.count}, dimension={self.dimension}, seed={self.seed!r}, {kind})"


def _again(
    size: int, count: int, dimension: int, seed: int | bytes, orthogonal: bool, coordinates: Integers | None
) -> Canaries:
    return Canaries(size, count, dimension, seed, orthogonal=orthogonal, coordinates=coordinates)


def _flat(row: Any) -> NDArray[Any]:
    """The numbers of a row, one behind the other, on the host."""
    if hasattr(row, "detach"):  # a torch tensor, of whatever device; this room does not import torch
        row = row.detach().cpu()
        row = (row if row.element_size() > 2 else row.float()).numpy()
    return np.asarray(row).reshape(-1)


def _distinct(coordinates: ArrayLike, dimension: int, size: int) -> Integers:
    given = np.asarray(coordinates)
    if given.ndim != 1 or given.dtype.kind not in "iu" or len(given) != dimension:
        raise ArgumentError(
            f"coordinates must be dimension={dimension} integers, got {given.dtype} of shape {given.shape}"
        )
    if not 0 <= given.min() <= given.max() < size or len(np.unique(given)) < dimension:
        raise ArgumentError(f"coordinates must be distinct and lie in 0 .. {size - 1}, and some do not")
    return given.astype(np.int64)


def drawn(source: NoiseSource, size: int, dimension: int) -> Integers:
    """(dimension,) coordinates below size, ascending, every set of them as likely as any other."""
    if dimension == size:
        return np.arange(size)
    few = min(dimension, size - dimension)  # draws of the smaller part repeat themselves seldom
    found, start = np.empty(0, np.int64), 0
    while len(found) < few:
        words = source.words(0, start, start + 4 * few).view(np.uint64)
        start += 4 * few
        found = np.concatenate([found, (words % np.uint64(size)).astype(np.int64)])
        found = found[np.sort(np.unique(found, return_index=True)[1])]  # each where it came first
    drawn = np.sort(found[:few])
    return drawn if few == dimension else np.delete(np.arange(size), drawn)
