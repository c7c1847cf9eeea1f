"""Whether the order of a loader is the plan's."""

from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from anyorder.errors import LoaderError
from anyorder.participation import EpochShuffle, FixedOrder, Participation, SingleEpoch, covers
from anyorder.plan import Plan
from anyorder.sampling import Found, find_participation
from anyorder.sampling.orders import check_loader, read_order

__all__ = ["BY_LEDGER", "check_order"]

BY_LEDGER = "not read off the loader; the ledger enforces the plan's"


def check_order(plan: Plan, loader: Any, accumulate: int) -> str:
    """The order in words; an order that is not known is left to the ledger.

    Args:
        accumulate: batches that make up one step.
    Raises: LoaderError if the order is known and not the plan's, or examples are dealt out to ranks with repetitions.
    """
    check_loader(loader)
    try:
        order = read_order(loader, 0)
    except LoaderError:
        if isinstance(loader.sampler, DistributedSampler):
            raise  # it repeats examples, and so would fail at the end of the first epoch
        return BY_LEDGER
    if order.ranks > 1 and not (dist.is_available() and dist.is_initialized()):
        raise LoaderError(
            f"the DistributedSampler deals the examples out to {order.ranks} ranks, and this process trains alone; "
            "call torch.distributed.init_process_group before make_private"
        )
    found = find_participation(loader, 1)
    steps = -(-found.steps_per_epoch // accumulate)
    actual = _over_epochs(find_participation(loader, -(-plan.n // steps)), steps)
    if not covers(plan.participation, actual):
        raise LoaderError(
            f"the plan is for {plan.participation.describe()}, but this loader gives {actual.describe()} "
            f"({found.order}); make the plan with ao.plan(loader=..., epochs=...) or change the loader"
        )
    if found.batch_size * accumulate != plan.batch_size:
        raise LoaderError(
            f"the plan divides by batch_size={plan.batch_size}, but the loader's batches of "
            f"{found.batch_size} times accumulate={accumulate} make {found.batch_size * accumulate}"
        )
    return found.order


def _over_epochs(found: Found, steps: int) -> Participation:
    """The participation of a loader whose batches are joined so that an epoch has `steps` steps."""
    match found.participation:
        case EpochShuffle(k=k):
            return EpochShuffle(k, steps)
        case FixedOrder(k=k):
            return FixedOrder(k * steps, k, steps)
        case SingleEpoch():
            return SingleEpoch(steps)
        case other:
            return other
