"""The participation that a loader's order amounts to."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from anyorder import checks
from anyorder.errors import LoaderError
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, Participation, PoissonSampling, SingleEpoch
from anyorder.sampling.loader import Origins, Unit
from anyorder.sampling.orders import Order, check_loader, check_ranks, read_order
from anyorder.sampling.samplers import SecretBatchSampler
from anyorder.sampling.secret import read_owners

__all__ = ["Found", "find_participation"]


@dataclass(frozen=True)
class Found:
    """What a loader's order says about participation.

    Attributes:
        participation: who takes part when, if every batch is one step.
        batch_size: examples in a full batch, over all ranks together; the expected size under Poisson sampling.
        dataset_size: examples that take part.
        steps_per_epoch: batches in one epoch.
        order: the order found, in words.
    """

    participation: Participation
    batch_size: int
    dataset_size: int
    steps_per_epoch: int
    order: str


def find_participation(loader: Any, epochs: int, *, unit: Unit = None, accumulate: int = 1) -> Found:
    """The participation of the examples of a loader that is run through `epochs` times.

    Each batch is a step. With `accumulate`, so many batches are, fewer in the last step of an epoch where the epoch is
    not divided by it; the numbers of `Found` are still those of batches.

        sequential, FixedOrderSampler, DistributedSampler(shuffle=False)                             FixedOrder
        shuffle=True, RandomSampler, SubsetRandomSampler, EpochShuffleSampler, DistributedSampler    EpochShuffle
        any of these for one epoch                                                                   SingleEpoch
        PoissonBatchSampler                                                                          PoissonSampling

    With `unit` it is that of the units, a `KnownOrder`: the data set is read once, for who owns which example. The
    order must then be known beforehand: sequential, FixedOrderSampler, EpochShuffleSampler, UnitOrderSampler. How many
    examples each unit has, and so its steps, is public in that claim.

    A step under a DistributedSampler is one batch on all ranks together; all ranks must use one seed.

    Examples are told apart through `Subset` and `ConcatDataset`: one that such a data set lists twice comes twice.

    Raises: LoaderError for an order that is not known, or in which an example may come twice in an epoch.
    """
    epochs = checks.integer("epochs", epochs, low=1)
    accumulate = checks.integer("accumulate", accumulate, low=1)
    check_loader(loader)
    order = read_order(loader, 0)
    check_ranks(order)
    assert order.members is not None
    Origins(loader.dataset).check_distinct(order.members)
    if unit is None:
        participation = _participation(order, epochs, accumulate, loader)
    else:
        participation = _order_of_units(order, epochs, accumulate, loader, unit)
    return Found(participation, order.batch_size * order.ranks, order.dataset_size, order.steps, order.phrase)


def _participation(order: Order, epochs: int, accumulate: int, loader: DataLoader[Any]) -> Participation:
    steps = -(-order.steps // accumulate)
    if order.kind == "secret":
        raise LoaderError(f"the batches are those of a plan already: {order.phrase}; give its participation as order=")
    if order.kind == "poisson":
        if accumulate != 1:
            raise LoaderError(f"batches of Poisson sampling are steps each: accumulate must be 1, got {accumulate}")
        sampler: Any = loader.batch_sampler or loader.sampler
        rule: Any = sampler.rule if type(sampler) is SecretBatchSampler else sampler
        return PoissonSampling(epochs * steps, rule.sampling_probability)
    if epochs == 1:
        return SingleEpoch(steps)
    if order.kind == "fixed":
        return FixedOrder(epochs * steps, k=epochs, b=steps)
    return EpochShuffle(k=epochs, steps_per_epoch=steps)


def _order_of_units(order: Order, epochs: int, accumulate: int, loader: DataLoader[Any], unit: Unit) -> KnownOrder:
    """Which units are in which step of all epochs."""
    if not order.known_beforehand:
        raise LoaderError(
            f"the steps of units must be known beforehand, and this order is {order.phrase}"
            f"{f', dealt out to {order.ranks} ranks' if order.ranks > 1 else ''}; use batch_sampler="
            "anyorder.sampling.UnitOrderSampler(ids, batch_size), sampler=anyorder.FixedOrderSampler(data, seed) or "
            "anyorder.sampling.EpochShuffleSampler(data, seed), or pass order= to ao.plan (for example "
            "MinSeparation), which the ledger then enforces step by step"
        )
    assert order.members is not None
    members = np.sort(order.members)
    ids = np.asarray(read_owners(loader, members, unit, order.batch_size))
    per_epoch = -(-order.steps // accumulate)
    steps: list[list[Any]] = [[] for _ in range(epochs * per_epoch)]
    for epoch in range(epochs):
        for i, batch in enumerate(order.batches(epoch, 0)):
            steps[epoch * per_epoch + i // accumulate] += ids[np.searchsorted(members, batch)].tolist()
    return KnownOrder(steps)
