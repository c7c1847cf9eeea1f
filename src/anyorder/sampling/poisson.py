"""Poisson sampling: a loader that draws each example by a coin of its own, from the examples that a loader may give."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from anyorder.errors import ArgumentError, LoaderError
from anyorder.noise import NoiseSource
from anyorder.participation import Participation
from anyorder.sampling.loader import rebuild
from anyorder.sampling.orders import check_loader, read_order
from anyorder.sampling.origins import Indices, Origins
from anyorder.sampling.samplers import PoissonBatchSampler

__all__ = ["poisson_loader"]


def poisson_loader(
    loader: Any, participation: Participation, source: NoiseSource, *, rank: int = 0, ranks: int = 1
) -> DataLoader[Any]:
    """A DataLoader with the settings of `loader` that draws the batches of Poisson sampling from the same examples.

    One iteration gives ceil(1/q) batches, which are an epoch in expectation, where that divides the planned n; else
    all n. An empty batch has tensors of shape (0, ..): the first example,
    collated and cut to none.

    Args:
        loader: names the examples (those that its sampler may give), collation, workers; its own order is dropped.
        participation: how many steps, and the probability of the coins; PoissonSampling.
        source: where the secret coins come from: derived from the run's key.
        rank, ranks: every batch is dealt out to so many ranks, and this one's share is handed out.
    """
    check_loader(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise LoaderError("Poisson sampling picks examples by index, and an IterableDataset has none")
    if loader.batch_sampler is None:
        raise LoaderError(
            "Poisson sampling needs a loader that collates examples, got batch_size=None; set a batch_size"
        )
    members = _members(loader)
    q, n = participation.coin, participation.n
    if q is None:
        raise ArgumentError(f"participation must be drawn by secret coins, got {participation!r}")
    epoch = math.ceil(1 / q)
    steps = n if n % epoch else epoch
    sampler = PoissonBatchSampler(len(members), q, steps, source, rank=rank, ranks=ranks, indices=members)
    return rebuild(loader, sampler, collate_fn=_CollateAny(loader.dataset, int(members[0]), loader.collate_fn))


def _members(loader: DataLoader[Any]) -> Indices:
    """The indices that the sampler of a loader may give, ascending: held-out examples are not among them."""
    try:
        members = read_order(loader, 0).members
    except LoaderError as problem:
        raise LoaderError(
            f"Poisson sampling draws from the examples that the loader's sampler may give, and these are not known "
            f"here: {problem}. Use shuffle=True, or torch's SubsetRandomSampler"
        ) from problem
    assert members is not None
    Origins(loader.dataset).check_distinct(members)  # who is listed twice has two coins
    return np.sort(members)


class _CollateAny:
    """Collates like the user's function, and no examples too."""

    def __init__(self, dataset: Any, first: int, collate_fn: Callable[[Any], Any]) -> None:
        self._dataset, self._first, self._collate = dataset, first, collate_fn

    def __call__(self, examples: Any) -> Any:
        return self._collate(examples) if len(examples) else _none_of(self._collate([self._dataset[self._first]]))


def _none_of(batch: Any) -> Any:
    """A batch of one example, cut to none, in the same containers."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _none_of(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_none_of, batch))
    if isinstance(batch, (list, tuple)):
        # Fields are containers and stay; what is left is the one example's value (a string, say), and goes.
        containers = (torch.Tensor, np.ndarray, Mapping, list, tuple)
        return type(batch)([_none_of(part) for part in batch if isinstance(part, containers)])
    raise LoaderError(
        f"a batch of no examples cannot be made from {type(batch).__name__}; let collate_fn return tensors, or lists, "
        "tuples or dicts of them"
    )
