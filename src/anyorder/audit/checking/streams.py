"""Samplers of single indices, known by their exact class: what they give in an epoch, without drawing it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Stream", "is_of", "read_stream"]

Indices = NDArray[np.int64]

_ANEW = "shuffled anew in each epoch"
_PUBLIC = "if the weights do not depend on the data (weights of classes do: labels are data)"


@dataclass(frozen=True)
class Stream:
    """What a sampler of single indices gives in an epoch, on all ranks together.

    Attributes:
        order: in words.
        size: indices in an epoch, of this rank.
        ranks: over how many the indices are dealt out in turn.
        fixed: () -> the indices of every epoch; None for another order.
        members: indices that may come, None for all of the data set.
        is_public: whether the order, if fixed, is known to all who know the data set's.
        copies: places that an index may have in an epoch.
        together: places of one index that may fall into a step of so many places.
        places: () -> by place of a shuffle, which name stands there: those that stand twice by padding.
        chances: () -> of each index, the probability of one draw; None where nothing is drawn with replacement.
        is_uniform: whether an index's place is drawn uniformly.
        is_fresh: whether it surely is so in each epoch anew.
        caveat: what else must be so.
    """

    order: str
    size: int
    ranks: int = 1
    fixed: Callable[[], Indices] | None = None
    members: Indices | None = None
    is_public: bool = True
    copies: int = 1
    together: Callable[[int], int] = lambda size: 1
    places: Callable[[], Indices] | None = None
    chances: Callable[[], NDArray[np.float64]] | None = None
    is_uniform: bool = True
    is_fresh: bool = True
    caveat: str = ""


def read_stream(sampler: Any) -> Stream | None:
    from torch import Tensor
    from torch.utils.data import (
        DistributedSampler,
        RandomSampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )

    from anyorder.sampling import EpochShuffleSampler, FixedOrderSampler

    kind = type(sampler)
    if kind is SequentialSampler:
        size = len(sampler)
        return Stream("sequential, the same in each epoch", size, fixed=lambda: np.arange(size))
    if kind is FixedOrderSampler:
        return Stream("shuffled once, the same order in each epoch", len(sampler), fixed=sampler.order, is_public=False)
    if kind in (list, tuple, range, np.ndarray, Tensor):
        return Stream("a list, the same in each epoch", len(sampler), fixed=lambda: np.asarray(sampler, np.int64))
    if kind is EpochShuffleSampler:
        return Stream(_ANEW, len(sampler))
    if kind is RandomSampler or is_of(sampler, "accelerate.data_loader", "SeedableRandomSampler"):
        return _random(sampler)
    if kind is SubsetRandomSampler:
        subset = np.asarray(sampler.indices, np.int64)
        return Stream(f"a subset of {len(subset)}, {_ANEW}", len(subset), members=subset)
    if kind is DistributedSampler:
        return _distributed(sampler)
    if kind is WeightedRandomSampler:
        return _weighted(sampler)
    return None


def _random(sampler: Any) -> Stream:
    total, size = len(sampler.data_source), len(sampler)
    if sampler.replacement:
        return Stream(
            f"drawn with replacement, {size} of {total} in an epoch", size, chances=lambda: np.full(total, 1 / total)
        )
    if size <= total:
        words = _ANEW if size == total else f"{size} of {total} without replacement, drawn anew in each epoch"
        return Stream(words, size)

    def together(step: int) -> int:
        if total % step == 0:
            return 1
        return step // total if step % total == 0 else min((step - 1) // total + 2, -(-size // total))

    words = f"shuffles one after another, {size} examples of {total} in an epoch"
    return Stream(words, size, copies=-(-size // total), together=together, is_uniform=False)


def _weighted(sampler: Any) -> Stream:
    weights, size = sampler.weights.numpy().astype(np.float64), len(sampler)
    if sampler.replacement:
        return Stream(
            f"drawn by weights, with replacement, {size} in an epoch", size, chances=lambda: weights / weights.sum(),
            caveat=_PUBLIC,
        )  # fmt: skip
    return Stream(
        f"drawn by weights, without replacement, {size} of {len(weights)} in an epoch", size, is_uniform=False,
        caveat=_PUBLIC,
    )  # fmt: skip


def _distributed(sampler: Any) -> Stream:
    size, ranks, total = len(sampler.dataset), sampler.num_replicas, sampler.total_size
    places = (lambda: np.arange(total) % size) if total > size else None
    padding = "" if total <= size else f", {total - size} example(s) twice to fill up {ranks} ranks"
    if not sampler.shuffle:
        words = f"dealt out to {ranks} ranks in turn, the same in each epoch{padding}"
        return Stream(words, len(sampler), ranks, fixed=lambda: np.arange(total) % size)
    words = (
        f"dealt out to {ranks} ranks, {_ANEW} if set_epoch is called before it (else one shuffle, the same in each "
        f"epoch){padding}"
    )
    copies = -(-total // size)
    return Stream(
        words, len(sampler), ranks, copies=copies, together=lambda step: copies, places=places,
        is_uniform=total <= size, is_fresh=False,
    )  # fmt: skip


def is_of(found: Any, module: str, name: str) -> bool:
    """Whether it is of exactly this class; a class whose module was never imported has no objects."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and type(found) is kind
