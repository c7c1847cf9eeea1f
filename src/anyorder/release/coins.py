"""Secret coins: who is in a step where the claim rests on chance that nobody else knows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder.errors import ArgumentError, TrainingError
from anyorder.ledger import Units
from anyorder.noise import NoiseSource
from anyorder.plan import Plan

__all__ = ["Coins"]


class Coins:
    """The batches of Poisson sampling over units 0, .., size - 1: those of `PoissonBatchSampler`.

    Args:
        sampling_probability: q; rounded down to a multiple of 2^-32, which is the private side.
        source: where the coins come from; rows are steps.
    """

    def __init__(self, sampling_probability: float, source: NoiseSource) -> None:
        self._q, self._source = sampling_probability, source
        self._size: int | None = None
        self._drawn: tuple[int, NDArray[np.int64]] | None = None  # step, units

    @classmethod
    def of(cls, plan: Plan, source: NoiseSource) -> "Coins | None":
        """Those of a plan whose claim rests on them, else None."""
        rule = plan.participation
        return None if rule.coin is None else cls(rule.coin, source)

    def draw(self, step: int, size: int) -> NDArray[np.int64]:
        """The units of a step, ascending."""
        size = _check.integer("num_units", size, low=1)
        if self._size is not None and size != self._size:
            raise ArgumentError(f"num_units must be {self._size} as in the steps before, got {size}")
        from anyorder.sampling.samplers import PoissonBatchSampler

        sampler = PoissonBatchSampler(size, self._q, 1, self._source)
        drawn = np.array(sampler.batch(step), np.int64)
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
