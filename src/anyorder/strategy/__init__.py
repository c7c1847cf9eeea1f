"""Strategies: the matrix C, in forms that stream."""

from anyorder.strategy.banded import Banded
from anyorder.strategy.banded_inverse import BandedInverse
from anyorder.strategy.base import Strategy
from anyorder.strategy.blt import BLT
from anyorder.strategy.dense import Dense
from anyorder.strategy.independent import Independent
from anyorder.strategy.toeplitz import SquareRoot, Toeplitz, ToeplitzBanded
from anyorder.strategy.tree import Tree

__all__ = [
    "BLT",
    "Banded",
    "BandedInverse",
    "Dense",
    "Independent",
    "SquareRoot",
    "Strategy",
    "Toeplitz",
    "ToeplitzBanded",
    "Tree",
]
