"""Loaders, samplers and data sets that the tests of loaders share."""

import torch
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from anyorder.noise import NoiseSource
from anyorder.participation import EpochShuffle, FixedOrder
from anyorder.sampling.loader import PrivateLoader
from anyorder.sampling.samplers import EpochShuffleSampler, FixedOrderSampler

SOURCE = NoiseSource(bytes(32))
N = 23
DATA = TensorDataset(torch.arange(N), torch.arange(N) * 2.0)


class Backwards(data.Sampler):
    def __iter__(self):
        return iter(range(N - 1, -1, -1))

    def __len__(self):
        return N


class BackwardsToldEpoch(Backwards):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(i + self.epoch) % N for i in range(N)])


class Pairs(data.Sampler):
    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


class OwnLoader(DataLoader):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class SubclassedRandom(data.RandomSampler):
    pass


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(10):
            yield {"user": i % 5, "name": f"u{i % 5}", "x": float(i)}


class Bulk(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, indices):
        return torch.as_tensor(indices) + 100

    def __getitems__(self, indices):
        return [torch.as_tensor(i + 100) for i in indices]


def nothing(units, position):
    return None


def private(loader, unit=None, seed=0):
    """The private loader and the list to which it adds (units, position)."""
    calls = []
    return PrivateLoader(loader, unit=unit, on_batch=lambda u, p: calls.append((list(u), p)), seed=seed), calls


def distributed(rank, shuffle, drop_last=True, size=N):
    dataset = TensorDataset(torch.arange(size))
    sampler = data.DistributedSampler(dataset, 3, rank, shuffle=shuffle, seed=5, drop_last=drop_last)
    return DataLoader(dataset, batch_size=2, sampler=sampler)


KNOWN = {
    "sequential": (lambda: DataLoader(DATA, batch_size=4), FixedOrder(18, 3, 6), "sequential"),
    "drop last": (lambda: DataLoader(DATA, batch_size=4, drop_last=True), FixedOrder(15, 3, 5), "sequential"),
    "shuffle": (lambda: DataLoader(DATA, batch_size=5, shuffle=True), EpochShuffle(3, 5), "shuffled again"),
    "some": (
        lambda: DataLoader(DATA, batch_size=5, sampler=data.RandomSampler(DATA, num_samples=12)),
        EpochShuffle(3, 3), "shuffled again",
    ),
    "fixed": (lambda: DataLoader(DATA, batch_size=4, sampler=FixedOrderSampler(DATA)), FixedOrder(18, 3, 6), "once"),
    "keyed": (
        lambda: DataLoader(DATA, batch_size=4, sampler=EpochShuffleSampler(DATA, 3)),
        EpochShuffle(3, 6), "shuffled again",
    ),
    "subset": (
        lambda: DataLoader(DATA, batch_size=2, sampler=data.SubsetRandomSampler([3, 9, 4, 20, 1])),
        EpochShuffle(3, 3), "a subset of 5",
    ),
    "batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=data.BatchSampler(data.SequentialSampler(DATA), 6, False)),
        FixedOrder(12, 3, 4), "sequential",
    ),
    "bulk": (
        lambda: DataLoader(Bulk(), batch_size=None, sampler=data.BatchSampler(data.RandomSampler(Bulk()), 6, True)),
        EpochShuffle(3, 3), "shuffled again",
    ),
}  # fmt: skip
