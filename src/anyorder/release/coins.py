"""Secret coins: who is in a step where the claim rests on chance that nobody else knows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder._draws import Draws, check_size
from anyorder.errors import ArgumentError, TrainingError
from anyorder.ledger import Units
from anyorder.noise import NoiseSource
from anyorder.participation import Participation
from anyorder.plan.plan import Plan

__all__ = ["Coins"]


class Coins:
    """The batches of a secret order over units 0, .., size - 1: those of `Draws`.

    Args:
        rule: the order.
        source: where the coins come from; rows are steps.
    """

    def __init__(self, rule: Participation, source: NoiseSource) -> None:
        self._rule, self._source = rule, source
        self._size: int | None = None
        self._draws: Draws | None = None
        self._drawn: tuple[int, NDArray[np.int64]] | None = None  # step, units

    @classmethod
    def of(cls, plan: Plan, source: NoiseSource) -> "Coins | None":
        """Those of a plan whose claim rests on them, else None."""
        return cls(plan.participation, source) if plan.participation.secret else None

    def draw(self, step: int, size: int) -> NDArray[np.int64]:
        """The units of a step, ascending."""
        size = check_size(self._rule, size)
        if self._size is not None and size != self._size:
            raise ArgumentError(f"num_units must be {self._size} as in the steps before, got {size}")
        if self._draws is None:
            self._draws = Draws(self._rule, size, self._source)
        drawn = self._draws.step(step)
        self._size, self._drawn = size, (step, drawn)
        return drawn.copy()

    @property
    def population(self) -> bytes:
        """Its size, for the journal: another one would toss the same coins for others."""
        return b"population %d," % (self._size or 0)

    def check(self, step: int, ids: Units) -> None:
        """Raise TrainingError unless the units are those that were drawn for the step."""
        if self._drawn is None or self._drawn[0] != step:
            raise TrainingError(
                "the plan's claim rests on secret coins: take the units of each step from sample(num_units), which "
                "tosses them. For batches that come as they come, plan for another order"
            )
        if isinstance(ids, list) or not np.array_equal(ids, self._drawn[1]):
            raise TrainingError(
                "units must be those that sample() drew for this step, all of them: the plan's claim does not hold for "
                "batches that somebody chose"
            )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"size": self._size}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._size = saved["size"]
