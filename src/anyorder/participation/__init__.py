"""Who takes part when: the sets of steps at which one privacy unit may contribute.

A participation is public. It must not depend on the data: it is the order in which a loader hands out units, or a
rule that arrivals obey. Steps count from 0; `b` is the distance from one step of a unit to its next (b = 1: every
step), never the number of steps between them. An order is what people have; `anyorder.patterns` holds the few families
of sets of steps that each of them reduces to, and that all claims are proven for.
"""

from anyorder.participation.balls_in_bins import BallsInBins
from anyorder.participation.cyclic_poisson import CyclicPoisson
from anyorder.participation.epoch_shuffle import EpochShuffle
from anyorder.participation.fixed_order import FixedOrder
from anyorder.participation.known_order import KnownOrder
from anyorder.participation.min_separation import MinSeparation
from anyorder.participation.min_separation_sampling import MinSeparationSampling
from anyorder.participation.poisson import PoissonSampling
from anyorder.participation.random_allocation import RandomAllocation
from anyorder.participation.registry import covers
from anyorder.participation.single_epoch import SingleEpoch
from anyorder.participation.truncated_poisson import TruncatedPoisson
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
