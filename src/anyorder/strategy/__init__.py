"""Strategies: the matrix C, in forms that stream."""

from anyorder.strategy.banded import Banded
from anyorder.strategy.banded_inverse import BandedInverse
from anyorder.strategy.base import Combination, Recurrence, Row, State, Strategy, Terms
from anyorder.strategy.blt import BLT
from anyorder.strategy.dense import Dense
from anyorder.strategy.independent import Independent
from anyorder.strategy.low_rank import BandedLowRank
from anyorder.strategy.registry import from_dict
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.restarted import RestartedBLT
from anyorder.strategy.toeplitz import SquareRoot, Toeplitz, ToeplitzBanded
from anyorder.strategy.tree import Tree

__all__ = [
    "BLT",
    "Banded",
    "BandedInverse",
    "BandedLowRank",
    "Combination",
    "Dense",
    "Independent",
    "Recurrence",
    "Rescaled",
    "RestartedBLT",
    "Row",
    "SquareRoot",
    "State",
    "Strategy",
    "Terms",
    "Toeplitz",
    "ToeplitzBanded",
    "Tree",
    "from_dict",
]
