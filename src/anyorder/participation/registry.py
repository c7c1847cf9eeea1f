"""The orders that there are: the closed set that all claims are proven for. One row an order."""

from anyorder.participation.known import KnownOrder
from anyorder.participation.rules import EpochShuffle, FixedOrder, MinSeparation, SingleEpoch
from anyorder.participation.sampled import (
    BallsInBins,
    CyclicPoisson,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.patterns import Participation, check_order, close

ORDERS: tuple[type[Participation], ...] = (
    SingleEpoch,
    FixedOrder,
    EpochShuffle,
    MinSeparation,
    KnownOrder,
    PoissonSampling,
    CyclicPoisson,
    TruncatedPoisson,
    BallsInBins,
    RandomAllocation,
    MinSeparationSampling,
)
"""All of them, by exact type."""

close(ORDERS)


def covers(planned: Participation, actual: Participation) -> bool:
    """Whether the patterns of `actual`, within the planned steps, are known to be among those of `planned`.

    A known order covers whatever the ledger lets pass, step by step, so it is not judged here.
    """
    check_order(planned)
    check_order(actual)
    return planned.covers(actual)
