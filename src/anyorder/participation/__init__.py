"""Who takes part when: the sets of steps at which one privacy unit may contribute.

A participation is public. It must not depend on the data: it is the order in which a loader hands out units, or a
rule that arrivals obey. Steps count from 0; `b` is the distance from one step of a unit to its next (b = 1: every
step), never the number of steps between them. `rules` holds what people have, `patterns` the few families of sets of
steps that each of them reduces to, and that all claims are proven for.
"""

from anyorder.participation.base import Participation
from anyorder.participation.known import KnownOrder
from anyorder.participation.patterns import Listed, Pattern, PerEpoch, Separated
from anyorder.participation.rules import EpochShuffle, FixedOrder, MinSeparation, SingleEpoch, covers, from_dict
from anyorder.participation.sampled import (
    BallsInBins,
    CyclicPoisson,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)

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
