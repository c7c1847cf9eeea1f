"""Samplers whose order is a pure function of a seed and an epoch, so that any epoch and batch can be begun anew."""

import os
from collections.abc import Iterator, Sized
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from anyorder import checks
from anyorder._draws import Draws
from anyorder.noise import NoiseSource
from anyorder.participation import PoissonSampling

__all__ = ["EpochShuffleSampler", "FixedOrderSampler", "PoissonBatchSampler", "key_of", "permutation_of"]


def key_of(seed: int | bytes | None) -> bytes:
    """32 bytes: BLAKE2b of a seed; fresh ones from the operating system for None."""
    if seed is None:
        return os.urandom(32)
    text = b"bytes" + seed if isinstance(seed, bytes) else b"int%d" % checks.integer("seed", seed, low=0)
    return blake2b(text, digest_size=32, person=b"anyorder sampler").digest()


def permutation_of(size: int, seed: int | bytes | None, row: int = 0) -> NDArray[np.int64]:
    """0 .. size - 1 in the order that sorts 64-bit words; see `_permutation`."""
    return _permutation(key_of(seed), size, row)


def _permutation(key: bytes, size: int, row: int) -> NDArray[np.int64]:
    """The order that sorts 64-bit words: uniform up to ties, which come in one of 2^65 / size^2 draws."""
    words = NoiseSource(key).derive(b"order").words(row, 0, 2 * size)
    return np.argsort(words.view(np.uint64), kind="stable")


class _KeyedSampler(Sampler[int]):
    """Indices of one epoch in an order drawn from a key.

    Attributes:
        key: what the order is drawn from; kept in checkpoints.
    """

    def __init__(self, data: Sized | int, seed: int | bytes | None) -> None:
        self.size = checks.integer("size", len(data) if isinstance(data, Sized) else data, low=1)
        self.key = key_of(seed)

    def _permutation(self, row: int) -> NDArray[np.int64]:
        return _permutation(self.key, self.size, row)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The indices of an epoch, (size,) int64."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.size


class FixedOrderSampler(_KeyedSampler):
    """Shuffles once and keeps the order in every epoch.

    A unit then comes back after exactly one epoch, so the plan's participation is `FixedOrder`, which needs less
    noise than an order that is shuffled anew (`EpochShuffle`), where last and first steps of epochs may meet.

    Args:
        data: the data set, or its size.
        seed: an integer >= 0 or bytes; None draws one from the operating system.
    """

    def __init__(self, data: Sized | int, seed: int | bytes | None = None) -> None:
        super().__init__(data, seed)

    def order(self, epoch: int = 0) -> NDArray[np.int64]:
        """The indices, (size,) int64; the same in every epoch."""
        return self._permutation(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())


class EpochShuffleSampler(_KeyedSampler):
    """Shuffles anew in each epoch; the order is a pure function of the seed and the epoch.

    Args:
        data: the data set, or its size.
        seed: an integer >= 0 or bytes.
    """

    def __init__(self, data: Sized | int, seed: int | bytes) -> None:
        super().__init__(data, seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives."""
        self.epoch = checks.integer("epoch", epoch, low=0)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The indices of an epoch, (size,) int64."""
        return self._permutation(checks.integer("epoch", epoch, low=0))

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.epoch).tolist())


class PoissonBatchSampler(Sampler[list[int]]):
    """Batches in which every example is independently with the same probability: the sampling of amplified DP-SGD.

    Example i is in batch t iff its coin, a 32-bit word addressed by (t, i), is below q 2^32. The probability is
    rounded down to a multiple of 2^-32, which is the private side. Batches differ in size and may be empty.

    Privacy: amplification holds only while the coins are secret. `source` must come from the run's secret key.

    Args:
        size: number of examples.
        sampling_probability: q in (0, 1].
        steps: batches in one epoch.
        source: where the coins come from.
        rank, ranks: every batch is dealt out to so many ranks, and this one's share is given.
        indices: (size,) int64, distinct and ascending: the indices of the examples; None for 0, .., size - 1.
    """

    def __init__(
        self,
        size: int,
        sampling_probability: float,
        steps: int,
        source: NoiseSource,
        *,
        rank: int = 0,
        ranks: int = 1,
        indices: NDArray[np.int64] | None = None,
    ) -> None:
        self.size = checks.integer("size", size, low=1)
        self.sampling_probability = checks.real("sampling_probability", sampling_probability, low=0.0, high=1.0)
        self.steps = checks.integer("steps", steps, low=1)
        probability = checks.positive("sampling_probability", self.sampling_probability)
        self._draws = Draws(PoissonSampling(self.steps, probability), self.size, source)
        self._rank, self._ranks = rank, ranks
        self.indices = np.arange(self.size) if indices is None else indices
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives."""
        self.epoch = checks.integer("epoch", epoch, low=0)

    def batch(self, t: int) -> list[int]:
        """The rank's indices of batch t, counted over all epochs; ascending, perhaps none."""
        drawn: list[int] = self.indices[self._draws.step(t)].tolist()
        return drawn[self._rank :: self._ranks]

    def batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        """The batches of an epoch from its batch `start` on."""
        return (self.batch(epoch * self.steps + i) for i in range(start, self.steps))

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches(self.epoch, 0)

    def __len__(self) -> int:
        return self.steps
