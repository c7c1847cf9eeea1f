"""The participation that a loader's order amounts to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from anyorder import checks
from anyorder.errors import LoaderError
from anyorder.participation import PoissonSampling
from anyorder.participation.registry import recognised
from anyorder.patterns import LoaderFacts, Participation
from anyorder.sampling.loader import Origins, Unit
from anyorder.sampling.read_loader import Order, check_loader, check_ranks, read_order, read_rates
from anyorder.sampling.secret import read_owners


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
        a list of indices or of batches, each index once                                             FixedOrder
        PoissonBatchSampler                                                                          PoissonSampling

    With `unit` it is that of the units, a `KnownOrder`: the data set is read once, for who owns which example. The
    order must then be known beforehand: sequential, FixedOrderSampler, EpochShuffleSampler, UnitOrderSampler. How many
    examples each unit has, and so its steps, is public in that claim.

    A step under a DistributedSampler is one batch on all ranks together; all ranks must use one seed.

    Examples are told apart through `Subset` and `ConcatDataset`: one that such a data set lists twice comes twice.

    Raises: LoaderError for an order that is not known, or in which an example may come twice in an epoch, or a unit in
        two of the batches that make a step.
    """
    epochs = checks.integer("epochs", epochs, low=1)
    accumulate = checks.integer("accumulate", accumulate, low=1)
    check_loader(loader)
    order = planned_order(loader, accumulate)
    per_epoch = -(-order.steps // accumulate)
    units = None if unit is None else _units_of_steps(order, epochs, accumulate, loader, unit)
    participation = participation_of(order, accumulate, epochs * per_epoch, epochs, units)
    return Found(participation, order.batch_size * order.ranks, order.dataset_size, order.steps, order.phrase)


def find_rates(loader: Any, epochs: int) -> Found | None:
    """Poisson sampling of the examples of a loader whose sampler weights them; None for other loaders.

    Raises: LoaderError for weights that cannot be rates.
    """
    check_loader(loader)
    found = read_rates(loader)
    if found is None:
        return None
    rule = PoissonSampling(checks.integer("epochs", epochs, low=1) * found.steps, found.most)
    order = "Poisson sampling, each example at a rate of its own"
    return Found(rule, found.batch_size, len(found.rates), found.steps, order)


def planned_order(loader: DataLoader[Any], accumulate: int) -> Order:
    """The order of a checked loader, if a plan can be made of it. Raises: LoaderError."""
    order = read_order(loader, 0)
    if order.kind == "secret":
        raise LoaderError(f"the batches are those of a plan already: {order.phrase}; give its order as order=")
    if order.kind == "poisson" and accumulate != 1:
        raise LoaderError(f"batches of Poisson sampling are steps each: accumulate must be 1, got {accumulate}")
    check_ranks(order)
    assert order.members is not None
    Origins(loader.dataset).check_distinct(order.members)
    return order


def participation_of(
    order: Order, accumulate: int, steps: int, epochs: int, units: Sequence[Any] | None = None
) -> Participation:
    """The participation of a `planned_order` that is run for so many steps, in so many epochs.

    Args:
        units: those of each step, where they are asked for by name.
    """
    if units is not None:
        check_known_beforehand(order)
    found = recognised(
        LoaderFacts(
            steps, epochs, -(-order.steps // accumulate), is_once=units is None and order.kind in ("fixed", "shuffled"),
            is_fixed=order.kind == "fixed", probability=order.probability if units is None else None, units=units,
        )
    )  # fmt: skip
    if found is None:
        raise LoaderError(f"this order is none that claims are proven for: {order.phrase}")
    return found


def check_known_beforehand(order: Order) -> None:
    """Raise LoaderError unless the steps of units can be told before the run."""
    if not order.known_beforehand:
        raise LoaderError(
            f"the steps of units must be known beforehand, and this order is {order.phrase}"
            f"{f', dealt out to {order.ranks} ranks' if order.ranks > 1 else ''}; use batch_sampler="
            "anyorder.sampling.UnitOrderSampler(ids, batch_size), sampler=anyorder.FixedOrderSampler(data, seed) or "
            "anyorder.sampling.EpochShuffleSampler(data, seed), or pass order= to ao.plan (for example "
            "MinSeparation), which the ledger then enforces step by step"
        )


def _units_of_steps(order: Order, epochs: int, accumulate: int, loader: DataLoader[Any], unit: Unit) -> list[Any]:
    """Which units are in which step of all epochs."""
    check_known_beforehand(order)
    assert order.members is not None
    members = np.sort(order.members)
    ids = np.asarray(read_owners(loader, members, unit, order.batch_size))
    per_epoch = -(-order.steps // accumulate)
    steps: list[list[Any]] = [[] for _ in range(epochs * per_epoch)]
    for epoch in range(epochs):
        for i, batch in enumerate(order.batches(epoch, 0)):
            came = ids[np.searchsorted(members, batch)].tolist()
            if i % accumulate == 0:
                seen: set[Any] = set()
            if not seen.isdisjoint(came):
                raise LoaderError(
                    f"a unit is in two of the {accumulate} batches that make a step, and would be clipped in each: "
                    "keep the examples of a unit in one batch, with batch_sampler="
                    "anyorder.sampling.UnitOrderSampler(ids, batch_size), or make the loader with the batch size of a "
                    "step, and bound memory by make_private(chunk_size=..)"
                )
            seen.update(came)
            steps[epoch * per_epoch + i // accumulate] += came
    return steps
