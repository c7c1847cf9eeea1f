"""Sampling: samplers that are pure functions of a seed, and loaders whose order is read off and followed."""

from anyorder.sampling.found import Found, find_participation
from anyorder.sampling.loader import PrivateLoader, Unit
from anyorder.sampling.samplers import EpochShuffleSampler, FixedOrderSampler, PoissonBatchSampler
from anyorder.sampling.unit_order import UnitOrderSampler

__all__ = [
    "EpochShuffleSampler",
    "FixedOrderSampler",
    "Found",
    "PoissonBatchSampler",
    "PrivateLoader",
    "Unit",
    "UnitOrderSampler",
    "find_participation",
]
