"""The orders of public training scripts, made again: the pattern of a loader, and none of its code.

Every loader has as many batches in an epoch as its script's, of a few examples each, so that the accountant's
q = 1 / len(loader) is the script's.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

SMALL = 4  # examples in a batch


def sequential(batches: int) -> Any:
    return DataLoader(range(SMALL * batches), SMALL)


def shuffled(batches: int) -> Any:
    return DataLoader(range(SMALL * batches), SMALL, shuffle=True)


def shuffled_and_dropped(batches: int) -> Any:
    return DataLoader(range(SMALL * batches + 1), SMALL, shuffle=True, drop_last=True)


def shuffled_batches(batches: int) -> Any:
    """The data set holds whole batches."""
    return DataLoader(range(batches), batch_size=None, shuffle=True)


def dealt_out(batches: int) -> Any:
    """Eight ranks and one example too few, so that one comes twice."""
    data = range(8 * batches - 1)
    return DataLoader(data, 1, sampler=DistributedSampler(data, 8, 0))


def dealt_out_evenly(batches: int) -> Any:
    data = range(8 * batches)
    return DataLoader(data, 1, sampler=DistributedSampler(data, 8, 0), drop_last=True)


def listed(batches: int) -> Any:
    """One list of batches for all epochs."""
    return [torch.zeros(SMALL, 1) for _ in range(batches)]


def poisson_of_opacus(batches: int) -> Any:
    from opacus.data_loader import DPDataLoader

    return DPDataLoader.from_data_loader(DataLoader(TensorDataset(torch.zeros(SMALL * batches, 1)), SMALL))


def poisson_by_hand(batches: int) -> Any:
    """A coin for each example in each step, drawn by the script itself."""
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler

    sampler = UniformWithReplacementSampler(num_samples=SMALL * batches, sample_rate=1 / batches, steps=batches)
    return DataLoader(range(SMALL * batches), batch_sampler=sampler)


def with_replacement(batches: int) -> Any:
    data = range(SMALL * batches)
    return DataLoader(data, SMALL, sampler=RandomSampler(data, replacement=True))


def ten_billion_draws(batches: int) -> Any:
    """Draws with replacement from 10 000 examples, in an epoch that no run ever ends."""
    del batches
    return DataLoader(range(10_000), 64, sampler=RandomSampler(range(10_000), replacement=True, num_samples=10**10))


class _Endless(Sampler[int]):
    """Shuffle after shuffle, without end."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self.size).tolist()


def endless(batches: int) -> Any:
    data = range(SMALL * batches - 1)  # not of whole batches, as nowhere
    return DataLoader(data, SMALL, sampler=_Endless(len(data)))


class _Thrice(Sampler[int]):
    """A third of a shuffle in an epoch, each three times in a row."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).repeat_interleave(3)[: self.size].tolist())

    def __len__(self) -> int:
        return self.size


def repeated_thrice(batches: int) -> Any:
    data = range(SMALL * batches)
    return DataLoader(data, batch_sampler=BatchSampler(_Thrice(len(data)), SMALL, True))


class _Buffered(Sampler[int]):
    """The next of the data, or another of a buffer of the next few."""

    def __init__(self, size: int, buffer: int) -> None:
        self.size, self.buffer = size, buffer

    def __iter__(self) -> Iterator[int]:
        held = list(range(min(self.buffer, self.size)))
        for i in range(self.size):
            j = int(torch.randint(len(held), ()))
            yield held[j]
            following = i + self.buffer
            if following < self.size:
                held[j] = following
            else:
                held.pop(j)

    def __len__(self) -> int:
        return self.size


def buffered(batches: int) -> Any:
    data = range(SMALL * batches)
    return DataLoader(data, SMALL, sampler=_Buffered(len(data), 16))


class _Grouped(Sampler[list[int]]):
    """Batches of one of two groups; what is left over is filled up with examples that came before."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        given, left = 0, []
        for rows in [[i for i in torch.randperm(self.size).tolist() if i % 3 == g] for g in (True, False)]:
            parts = [rows[i : i + SMALL] for i in range(0, len(rows), SMALL)]
            full = [part for part in parts if len(part) == SMALL]
            given += len(full)
            yield from full
            left += [part + rows[: SMALL - len(part)] for part in parts if len(part) < SMALL]
        yield from left[: len(self) - given]

    def __len__(self) -> int:
        return self.size // SMALL


def grouped(batches: int) -> Any:
    data = range(SMALL * batches)
    return DataLoader(data, batch_sampler=_Grouped(len(data)))


class _Frozen(Sampler[list[int]]):
    """The same batches in every epoch, in another order."""

    def __init__(self, batches: int) -> None:
        self.batches = np.arange(SMALL * batches).reshape(batches, SMALL).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        return iter([self.batches[i] for i in torch.randperm(len(self.batches)).tolist()])

    def __len__(self) -> int:
        return len(self.batches)


def frozen_batches(batches: int) -> Any:
    return DataLoader(range(SMALL * batches), batch_sampler=_Frozen(batches))


class _Authors(Sampler[list[int]]):
    """Shuffles authors, and takes the next example of each."""

    def __init__(self, authors: int) -> None:
        self.inner = BatchSampler(RandomSampler(range(authors)), SMALL, True)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def by_authors(batches: int) -> Any:
    return DataLoader(range(SMALL * batches), batch_sampler=_Authors(SMALL * batches))


class _OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


def own_loader(batches: int) -> Any:
    """A class with an `__iter__` of its own."""
    return _OwnLoader(range(SMALL * batches), SMALL, shuffle=True)


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def stream(batches: int) -> Any:
    del batches
    return DataLoader(_Stream(), SMALL)
