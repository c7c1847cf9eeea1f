"""The order in which a DataLoader hands out the examples of a data set, read off its samplers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from anyorder.errors import LoaderError
from anyorder.participation import PoissonSampling
from anyorder.sampling.samplers import EpochShuffleSampler, FixedOrderSampler, PoissonBatchSampler, SecretBatchSampler
from anyorder.sampling.unit_order import UnitOrderSampler

__all__ = ["Order", "check_loader", "check_ranks", "is_plain", "read_order", "take_order"]

Indices = NDArray[np.int64]
Keyed = FixedOrderSampler | EpochShuffleSampler
Kind = Literal["fixed", "shuffled", "poisson", "secret", "unknown"]

_EXPLICIT = "or pass order= to ao.plan, which the ledger then enforces step by step"
_BY_UNITS = (
    "let its batches name their units: ao.plan(order=.., batch_size=.., unit='user') and "
    "make_private(.., unit=<where a batch keeps the ids>)"
)
_ANEW = "shuffled anew in each epoch"


@dataclass(frozen=True)
class Order:
    """The batches of any epoch.

    Attributes:
        kind: "fixed": the same in every epoch; "shuffled": each example at most once in an epoch; "poisson"; "secret":
            another order of secret coins; "unknown".
        phrase: the order in words.
        batches: (epoch, start) -> the index lists of the epoch from batch `start` on; those of this rank.
        steps: batches in one epoch.
        batch_size: examples in a full batch on this rank; the expected size under Poisson sampling.
        dataset_size: examples that take part, on all ranks.
        members: (m,) indices that may come, on any rank; None where the order is unknown.
        ranks: over how many the examples are dealt out.
        keyed: has the key that the order is drawn from, if there is one.
        repeatable: whether `batches` is a function of its arguments.
        is_stated: whether the shuffles are drawn from a key of the loader's own, and not from the run's.
    """

    kind: Kind
    phrase: str
    batches: Callable[[int, int], Iterator[list[int]]]
    steps: int
    batch_size: int
    dataset_size: int
    members: Indices | None = None
    ranks: int = 1
    keyed: Keyed | None = None
    repeatable: bool = True
    is_stated: bool = False

    @property
    def known_beforehand(self) -> bool:
        """Whether every batch of every epoch can be told before the run, on a single rank."""
        return self.ranks == 1 and (self.kind == "fixed" or self.is_stated)


@dataclass(frozen=True)
class _Indices:
    """What a sampler of single indices gives: `of(epoch)`, `size` of them; the rest as in `Order`."""

    kind: Kind
    phrase: str
    of: Callable[[int], Indices]
    size: int
    members: Indices
    ranks: int = 1
    keyed: Keyed | None = None


def check_loader(loader: Any) -> None:
    """Raise LoaderError unless the batches of a loader are those of its sampler, in that order."""
    if not isinstance(loader, DataLoader):
        raise LoaderError(
            f"loader must be a torch DataLoader, whose sampler tells the order, got {type(loader).__name__}. Wrap the "
            f"data in one; or {_BY_UNITS}"
        )
    if not is_plain(loader):
        raise LoaderError(
            f"{type(loader).__name__} overrides DataLoader.__iter__, so its batches need not be those of its sampler; "
            f"use a plain DataLoader with a collate_fn, or {_BY_UNITS}"
        )
    if loader.num_workers and not loader.in_order:
        raise LoaderError(
            "in_order=False hands batches out as workers finish them; a planned order needs in_order=True"
        )
    if loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset):
        first = _batcher(loader)
        if not isinstance(first, (BatchSampler, PoissonBatchSampler, SecretBatchSampler)):
            raise LoaderError("batch_size=None hands out single examples without a batch dimension; set a batch_size")


def is_plain(loader: Any) -> bool:
    """Whether it is a DataLoader whose batches are those of its sampler."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def check_ranks(order: Order) -> None:
    """Raise LoaderError unless each of several processes hands out its own part of the data set."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return  # a plan for ranks may be made by one process
    world = torch.distributed.get_world_size()
    if order.ranks == 1 < world:
        raise LoaderError(
            f"each of the {world} ranks would hand out the whole data set, every example {world} times an epoch; use "
            f"a DistributedSampler, {_EXPLICIT}"
        )
    if order.ranks != world:
        raise LoaderError(
            f"the DistributedSampler deals the examples out to {order.ranks} ranks, and {world} take part; leave its "
            "num_replicas and rank to the process group"
        )


def read_order(loader: DataLoader[Any], seed: int | bytes) -> Order:
    """The order of a checked loader with a known sampler; `seed` is for those that shuffle with torch's generator.

    Samplers are known by their exact class: a subclass may do anything.
    Raises: LoaderError if the order is not known, or an example may come twice in an epoch.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise LoaderError(
            "the order of an IterableDataset is not known beforehand; name its units with unit= in make_private, and "
            "pass order= to ao.plan, which the ledger then enforces step by step"
        )
    batcher = _batcher(loader)
    if type(batcher) is PoissonBatchSampler:
        q = batcher.sampling_probability
        phrase, expected = f"Poisson sampling with probability {q:g}", max(1, round(q * batcher.size))
        return Order("poisson", phrase, batcher.batches, batcher.steps, expected, batcher.size, batcher.indices)
    if type(batcher) is SecretBatchSampler:
        kind: Kind = "poisson" if type(batcher.rule) is PoissonSampling else "secret"
        members, steps, size = batcher.members, batcher.steps, batcher.batch_size
        return Order(kind, batcher.phrase, batcher.batches, steps, size, len(members), members)
    if type(batcher) is UnitOrderSampler:
        phrase, members = "by units, the same order in each epoch", batcher.indices
        size = batcher.batch_size
        return Order("fixed", phrase, batcher.batches, len(batcher), size, len(members), members)
    if type(batcher) is not BatchSampler:
        raise LoaderError(
            f"the order of the batch sampler {type(batcher).__name__} is not known; use batch_size= and shuffle=, a "
            f"torch BatchSampler or anyorder.FixedOrderSampler, {_EXPLICIT}"
        )
    indices, size = _read_sampler(batcher.sampler, seed), batcher.batch_size
    steps = indices.size // size if batcher.drop_last else -(-indices.size // size)
    if steps == 0:
        raise LoaderError(
            f"an epoch must have a batch, got {indices.size} examples for batch_size={size} and "
            f"drop_last={batcher.drop_last}"
        )

    def batches(epoch: int, start: int) -> Iterator[list[int]]:
        chosen = indices.of(epoch)
        return (chosen[i * size : (i + 1) * size].tolist() for i in range(start, steps))

    i, is_stated = indices, type(batcher.sampler) is EpochShuffleSampler
    total = len(i.members)
    return Order(
        i.kind, i.phrase, batches, steps, size, total, i.members, i.ranks, i.keyed, is_stated=is_stated
    )  # fmt: skip


def take_order(loader: DataLoader[Any], seed: int | bytes) -> Order:
    """As `read_order`; an order that is not known is taken as it comes, told the epoch where it wants to know."""
    try:
        return read_order(loader, seed)
    except LoaderError:
        batcher = _batcher(loader)
    inner = getattr(batcher, "sampler", None)
    told: list[Any] = [part for part in (batcher, inner) if hasattr(part, "set_epoch")]

    def batches(epoch: int, start: int) -> Iterator[list[int]]:
        for part in told:
            part.set_epoch(epoch)
        return (list(batch) for batch in islice(iter(batcher), start, None))

    phrase = f"that of {type(batcher if inner is None else inner).__name__}"
    if not hasattr(batcher, "__len__") or not len(batcher):
        raise LoaderError(f"an epoch must have a known number of batches, at least one; the order is {phrase}")
    size = getattr(batcher, "batch_size", None) or 1
    dataset_size = len(loader.dataset)  # type: ignore[arg-type]
    return Order("unknown", phrase, batches, len(batcher), size, dataset_size, repeatable=bool(told))


def _batcher(loader: DataLoader[Any]) -> Any:
    """What gives lists of indices: the batch sampler, or with batch_size=None a sampler that yields lists."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _read_sampler(sampler: Any, seed: int | bytes) -> _Indices:
    kind = type(sampler)
    if kind is SequentialSampler:
        size = len(sampler)
        return _Indices("fixed", "sequential", lambda epoch: np.arange(size), size, np.arange(size))
    if kind is FixedOrderSampler:
        size, phrase = len(sampler), "shuffled once, the same order in each epoch"
        return _Indices("fixed", phrase, sampler.order, size, np.arange(size), keyed=sampler)
    if kind is EpochShuffleSampler:
        return _Indices("shuffled", _ANEW, sampler.order, len(sampler), np.arange(len(sampler)), keyed=sampler)
    if kind is RandomSampler:
        return _random(sampler, seed)
    if kind is SubsetRandomSampler:
        return _subset(sampler, seed)
    if kind is DistributedSampler:
        return _distributed(sampler)
    if isinstance(sampler, WeightedRandomSampler):
        raise LoaderError(
            "WeightedRandomSampler draws some examples often and at random; use shuffle=True and weight the loss, "
            f"{_EXPLICIT}"
        )
    raise LoaderError(
        f"the order of the sampler {kind.__name__} is not known; use shuffle=, a torch sampler without replacement or "
        f"anyorder.FixedOrderSampler, {_EXPLICIT}"
    )


def _random(sampler: RandomSampler, seed: int | bytes) -> _Indices:
    total, size = len(sampler.data_source), len(sampler)
    if sampler.replacement or size > total:
        raise LoaderError(
            f"RandomSampler with replacement={sampler.replacement} and num_samples={size} of {total} may draw an "
            f"example more than once an epoch; use shuffle=True, {_EXPLICIT}"
        )
    shuffler = EpochShuffleSampler(total, seed)
    members = np.arange(total)
    return _Indices("shuffled", _ANEW, lambda epoch: shuffler.order(epoch)[:size], size, members, keyed=shuffler)


def _subset(sampler: SubsetRandomSampler, seed: int | bytes) -> _Indices:
    subset = np.asarray(sampler.indices, dtype=np.int64)
    if not subset.size or len(np.unique(subset)) < subset.size or subset.min() < 0:
        raise LoaderError(
            "the indices of SubsetRandomSampler must be distinct, none negative, at least one; an index that stands "
            "twice takes part twice an epoch"
        )
    shuffler = EpochShuffleSampler(subset.size, seed)
    size, phrase = subset.size, f"a subset of {subset.size}, {_ANEW}"
    return _Indices("shuffled", phrase, lambda epoch: subset[shuffler.order(epoch)], size, subset, keyed=shuffler)


def _distributed(sampler: DistributedSampler[Any]) -> _Indices:
    size, ranks = len(sampler.dataset), sampler.num_replicas  # type: ignore[arg-type]
    if sampler.total_size > size:
        raise LoaderError(
            f"DistributedSampler repeats {sampler.total_size - size} example(s) to deal {size} out to {ranks} ranks; "
            f"give the sampler drop_last=True, {_EXPLICIT}"
        )

    def indices(epoch: int) -> Indices:
        sampler.set_epoch(epoch)
        return np.fromiter(sampler, np.int64, len(sampler))

    kind: Kind = "shuffled" if sampler.shuffle else "fixed"
    # Without the number of ranks: a checkpoint may be resumed on another one.
    phrase = f"distributed, {_ANEW if sampler.shuffle else 'sequential'}"
    return _Indices(kind, phrase, indices, len(sampler), np.arange(size), ranks)
