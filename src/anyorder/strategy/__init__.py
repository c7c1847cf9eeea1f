"""Strategies: the matrix C, in forms that stream."""

from collections.abc import Callable
from typing import Any

from anyorder import _check
from anyorder.errors import PlanError
from anyorder.strategy.banded import Banded
from anyorder.strategy.banded_inverse import BandedInverse
from anyorder.strategy.base import Combination, Row, State, Strategy, Terms
from anyorder.strategy.blt import BLT
from anyorder.strategy.dense import Dense
from anyorder.strategy.independent import Independent
from anyorder.strategy.low_rank import BandedLowRank
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.restarted import RestartedBLT
from anyorder.strategy.toeplitz import SquareRoot, Toeplitz, ToeplitzBanded
from anyorder.strategy.tree import Tree

__all__ = [
    "BLT",
    "KINDS",
    "Banded",
    "BandedInverse",
    "BandedLowRank",
    "Combination",
    "Dense",
    "Independent",
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
    "check_kind",
    "from_dict",
]


KINDS = (
    BLT, Banded, BandedInverse, BandedLowRank, Dense, Independent, Rescaled, RestartedBLT, SquareRoot, ToeplitzBanded,
    Tree,
)  # fmt: skip
"""All strategies there are: a set that claims rest on."""


def check_kind(strategy: object) -> None:
    """Raise PlanError unless it is one of the kinds of this package itself, all the way in."""
    while type(strategy) is Rescaled:
        strategy = strategy.strategy
    if type(strategy) not in KINDS:
        raise PlanError(
            f"strategy must be one of {', '.join(kind.__name__ for kind in KINDS)}, got {type(strategy).__name__}: "
            "sensitivities are proven for these alone; give the matrix C of another to Dense"
        )


def _rescaled(strategy: dict[str, Any], scales: list[float]) -> Rescaled:
    return Rescaled(from_dict(strategy), scales)


_KINDS: dict[str, Callable[..., Strategy]] = {
    "banded": Banded._from_dict,
    "banded_inverse": BandedInverse,
    "banded_low_rank": BandedLowRank._from_dict,
    "blt": BLT,
    "dense": Dense._from_dict,
    "independent": Independent,
    "rescaled": _rescaled,
    "restarted_blt": RestartedBLT,
    "square_root": SquareRoot,
    "toeplitz_banded": ToeplitzBanded,
    "tree": Tree,
}


def from_dict(data: dict[str, Any]) -> Strategy:
    """The strategy that `Strategy.to_dict` described."""
    kind = _check.choice("strategy kind", data.get("kind", ""), _KINDS)
    return _KINDS[kind](**{key: value for key, value in data.items() if key != "kind"})
