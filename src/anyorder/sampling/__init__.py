"""Sampling: samplers that are pure functions of a seed, and loaders whose order is read off and followed."""

from anyorder.sampling.samplers import EpochShuffleSampler, PoissonRates
from anyorder.sampling.unit_order import UnitOrderSampler

__all__ = [
    "EpochShuffleSampler",
    "PoissonRates",
    "UnitOrderSampler",
]
