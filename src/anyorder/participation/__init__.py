"""Who takes part when: the sets of steps at which one privacy unit may contribute.

A participation is public. It must not depend on the data: it is the order in which a loader hands out units, or a
rule that arrivals obey. Steps count from 0; `b` is the distance from one step of a unit to its next (b = 1: every
step), never the number of steps between them. An order is what people have; `anyorder.patterns` holds the few families
of sets of steps that each of them reduces to, and that all claims are proven for.
"""

from anyorder.participation.known import KnownOrder
from anyorder.participation.registry import covers
from anyorder.participation.rules import EpochShuffle, FixedOrder, MinSeparation, SingleEpoch
from anyorder.participation.sampled import (
    BallsInBins,
    CyclicPoisson,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.patterns import Listed, Participation, Pattern, PerEpoch, Separated, from_dict

__all__ = [
    "BallsInBins",
    "CyclicPoisson",
    "EpochShuffle",
    "FixedOrder",
    "KnownOrder",
    "Listed",
    "MinSeparation",
    "MinSeparationSampling",
    "Participation",
    "Pattern",
    "PerEpoch",
    "PoissonSampling",
    "RandomAllocation",
    "Separated",
    "SingleEpoch",
    "TruncatedPoisson",
    "covers",
    "from_dict",
]
