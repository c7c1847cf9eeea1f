"""Secret sampling: a loader that draws each unit by itself, from the examples that a loader may give."""

from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from anyorder import checks
from anyorder._draws import Draws, check_size
from anyorder.errors import ArgumentError, LoaderError
from anyorder.ledger import numbered
from anyorder.noise import NoiseSource
from anyorder.patterns import Participation
from anyorder.sampling.read_loader import (
    Indices,
    Origins,
    Rates,
    Unit,
    check_loader,
    read_order,
    read_owners,
    read_rates,
    rebuild,
    settled,
)
from anyorder.sampling.samplers import Owned, SecretBatchSampler
from anyorder.sampling.shapes import CollateAny


def secret_loader(
    loader: Any,
    participation: Participation,
    source: NoiseSource,
    *,
    unit: Unit = None,
    accumulate: int = 1,
    micro_batch: int | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> DataLoader[Any]:
    """A DataLoader with the settings of `loader` that draws the batches of a secret order from the same examples.

    One iteration gives the steps of an epoch: b of them for orders in epochs of b steps; else the fewest in which a
    unit comes once in expectation, where that divides the planned n, and else all n. An empty batch has tensors of
    shape (0, ..): the first example, collated and cut to none.

    Args:
        loader: names the examples (those that its sampler may give), collation, workers; its own order is dropped.
        participation: the order.
        source: where the secret draws come from: derived from the run's key.
        unit: as of `PrivateLoader`. With one, the data set is read once for who owns what, and a unit's draws decide
            for all its examples.
        accumulate: micro-batches that each step is cut into.
        micro_batch: rows of each of them, on each rank: fewer are padded. A step with more than all of them hold has
            larger ones. None: no padding, but under `TruncatedPoisson` of examples, where a step's most are known.
        rank, ranks: every batch is dealt out to so many ranks, and this one's share is handed out.
    Raises: LoaderError for a loader that cannot be drawn from; ArgumentError for another number of units than the
        order is for, or micro-batches that do not hold what a step is expected to have.
    """
    check_loader(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise LoaderError(f"{_name(participation)} picks examples by index, and an IterableDataset has none")
    if loader.batch_sampler is None:
        raise LoaderError(
            f"{_name(participation)} needs a loader that collates examples, got batch_size=None; set a batch_size"
        )
    found = read_rates(loader)
    members = _members(loader, participation) if found is None else np.arange(len(found.rates))
    rates, stated, ids = None, None, None
    if found is not None:
        _check_rates(found, participation, unit)
        rates, stated = found.rates, (found.steps, found.batch_size)
    if unit is None:
        Origins(loader.dataset).check_distinct(members)  # who is listed twice has two draws
        owned = Owned.each_its_own(members)
    else:
        ids = read_owners(loader, members, unit)
        owned = Owned.by(members, numbered(ids))
    draws = Draws(participation, check_size(participation, len(owned)), source, rates)
    if micro_batch is None and unit is None and draws.rule.most_units is not None:
        micro_batch = -(-draws.rule.most_units // (accumulate * ranks))
    sampler = SecretBatchSampler(
        draws, owned, accumulate=accumulate, rows=micro_batch, rank=rank, ranks=ranks, ids=ids, stated=stated
    )
    if micro_batch is not None and sampler.batch_size > checks.integer("micro_batch", micro_batch, low=1):
        raise ArgumentError(
            f"micro_batch must be at least {sampler.batch_size}, the examples that each of accumulate={accumulate} "
            f"micro-batches of a step is expected to have, got {micro_batch}; more of them need less"
        )
    first, dataset = (
        int(sampler.members[0]),
        settled(loader.dataset),
    )  # a later list may name one twice
    return rebuild(loader, sampler, dataset=dataset, collate_fn=CollateAny(dataset, first, loader.collate_fn))


def _members(loader: DataLoader[Any], rule: Participation) -> Indices:
    """The indices that the sampler of a loader may give, ascending: held-out examples are not among them."""
    try:
        members = read_order(loader, 0).members
    except LoaderError as problem:
        raise LoaderError(
            f"{_name(rule)} draws from the examples that the loader's sampler may give, and these are not known "
            f"here: {problem}. Use shuffle=True, or torch's SubsetRandomSampler"
        ) from problem
    assert members is not None
    return np.sort(members)


def _check_rates(found: Rates, rule: Participation, unit: Unit) -> None:
    """Raise LoaderError unless the order's claim is one for examples of these rates."""
    if unit is not None:
        raise LoaderError(
            "weights and rates are for examples, and unit= protects all examples of a unit by one draw: use "
            "shuffle=True, and weight the loss"
        )
    if rule.draw_probability is None:
        raise LoaderError(
            f"weights and rates of examples are for Poisson sampling, and the plan is for {rule.describe()}: plan with "
            "ao.plan(loader=loader, order='poisson', ..), or use shuffle=True"
        )
    if found.most > rule.draw_probability:
        raise LoaderError(
            f"the plan's claim is for examples that are in a step with probability {rule.draw_probability:g} at most, "
            f"and the loader asks for {found.most:g}: make the plan of it, ao.plan(loader=loader, order='poisson', ..)"
        )


def _name(rule: Participation) -> str:
    return "an order of secret draws" if rule.draw_probability is None else "Poisson sampling"
