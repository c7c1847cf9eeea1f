"""Whether the order of a loader is the plan's."""

import warnings
from typing import Any, assert_never

import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset

from anyorder.errors import LoaderError, PlanError
from anyorder.participation import KnownOrder, Listed, PerEpoch, Separated, covers
from anyorder.plan.plan import Plan
from anyorder.sampling import Unit, find_participation
from anyorder.sampling.read_loader import check_loader, is_plain, read_order

__all__ = ["BY_LEDGER", "check_absence", "check_order", "check_unit", "warn_of_scattered_units"]

EXAMPLE = "example"

BY_LEDGER = "not read off the loader; the ledger enforces the plan's"


def check_order(plan: Plan, loader: Any, accumulate: int) -> str:
    """The order in words; an order that is not known is left to the ledger.

    Args:
        accumulate: batches that make up one step.
    Raises: LoaderError if the order is known and not the plan's, or examples are dealt out to ranks with repetitions.
    """
    check_loader(loader)
    stated = not plan.participation.absence_moves_others  # a rule of arrivals, or an order that lists its units
    try:
        order = read_order(loader, 0)
    except LoaderError:
        if isinstance(loader.sampler, DistributedSampler):
            raise  # it repeats examples, and so would fail at the end of the first epoch
        return BY_LEDGER
    try:
        found = find_participation(loader, 1)
    except LoaderError:
        if not stated:
            raise  # an example that is listed twice would stop the run in its first epoch
        return BY_LEDGER
    if order.ranks > 1 and not (dist.is_available() and dist.is_initialized()):
        raise LoaderError(
            f"the DistributedSampler deals the examples out to {order.ranks} ranks, and this process trains alone; "
            "call torch.distributed.init_process_group before make_private"
        )
    epochs = -(-plan.n // -(-found.steps_per_epoch // accumulate))
    actual = find_participation(loader, epochs, accumulate=accumulate).participation
    if not covers(plan.participation, actual):
        joined = (
            f"; {accumulate} batches make a step here: plan with batch_size={found.batch_size * accumulate}"
            if accumulate > 1
            else ""
        )
        raise LoaderError(
            f"the plan is for {plan.participation.describe()}, but this loader gives {actual.describe()} "
            f"({found.order}); make the plan with ao.plan(loader=..., epochs=...) or change the loader{joined}"
        )
    if found.batch_size * accumulate != plan.batch_size:
        raise LoaderError(
            f"the plan divides by batch_size={plan.batch_size}, but the loader's batches of "
            f"{found.batch_size} times accumulate={accumulate} make {found.batch_size * accumulate}"
        )
    return found.order


def check_absence(plan: Plan, loader: Any) -> None:
    """Raise PlanError where the plan's neighbours differ by the absence of a unit, which would move others."""
    if plan.neighbours != "add-or-remove" or not is_plain(loader):
        return
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            return  # the stream makes the batches itself
        phrase = f"every {loader.batch_size} examples of a stream"
    else:
        try:
            phrase = read_order(loader, 0).phrase
        except LoaderError:
            return  # a batch sampler of one's own, whose batches may stay
    raise PlanError(
        "the plan's neighbours are 'add-or-remove', which needs batches that stay where a unit is absent. This loader "
        f"fills batches by number ({phrase}), and would put others into the place of one that is not there: plan for "
        "'zero-out' (its gradients replaced by zero) or 'replace-one', or give batches as they arrive"
    )


def check_unit(plan: Plan, unit: Unit) -> None:
    """Raise PlanError unless the plan protects what is clipped: examples, or the units that a key names."""
    if unit is None and plan.unit != EXAMPLE:
        raise PlanError(
            f"the plan protects one {plan.unit}, but without unit= each example is clipped on its own; pass unit= with "
            f"the place of each example's {plan.unit} in a batch (a field of a dict, a position in a tuple, a "
            "callable), or plan for unit='example'"
        )
    if unit is not None and plan.unit == EXAMPLE:
        raise PlanError(
            "unit= names units by a key, but the plan protects one example; say whom the key names in the plan: "
            "ao.plan(.., unit='user')"
        )


def warn_of_scattered_units(plan: Plan, loader: Any) -> None:
    """Warn where the examples of a unit come in any steps of an epoch, and the plan wants its steps apart."""
    rule = plan.participation
    match rule.pattern:
        case Separated(b=1):
            return
        case Listed() | Separated() | PerEpoch():
            pass
        case _:
            assert_never(rule.pattern)
    if not is_plain(loader):
        return
    try:
        order = read_order(loader, 0)
    except LoaderError:
        return
    planned = type(rule) is KnownOrder and order.known_beforehand
    if order.kind == "shuffled" and not planned:
        warnings.warn(
            f"this loader shuffles examples, so that those of one {plan.unit} come in any steps, while the plan covers "
            f"{rule.describe()}: the ledger refuses the first step that does not fit. Keep the examples of each "
            f"{plan.unit} together, or plan for ao.participation.MinSeparation(n, b=1, k=..)",
            stacklevel=2,
        )
