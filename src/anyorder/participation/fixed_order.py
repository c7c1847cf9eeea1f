"""The same order in every epoch."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.formatting import counted
from anyorder.participation.single_epoch import SingleEpoch
from anyorder.patterns import Asked, Listed, LoaderFacts, Needs, Participation, Refusals, Rule, Word

Integers = NDArray[np.int64]


@final
@dataclass(frozen=True)
class FixedOrder(Rule):
    """The same order in every epoch: a unit that is in step j < b is in steps j, j + b, j + 2b, ..

    What a sequential loader does, or one that shuffled once and keeps the order (`FixedOrderSampler`). Its patterns
    are `Listed` with stride b: a unit whose steps are multiples of b apart has them all among those of one j.

    Args:
        n: number of steps, at most k b.
        k: number of epochs.
        b: steps in one epoch.
    """

    n: int
    k: int
    b: int

    kind = "fixed_order"
    words = (
        Word("fixed", "shuffled once, then kept", is_quick=True),
        Word("sequential", "as stored", is_compared=False, is_quick=True),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.integer("n", self.n, low=1))
        object.__setattr__(self, "k", checks.integer("k", self.k, low=1))
        object.__setattr__(self, "b", checks.integer("b", self.b, low=1))
        if self.n > self.k * self.b:
            raise ArgumentError(
                f"n must be at most k b = {self.k} * {self.b} = {self.k * self.b}, or some unit appears more than k "
                f"times; got n={self.n}"
            )

    @cached_property
    def pattern(self) -> Listed:
        """Return one pattern for each step of an epoch."""
        return Listed.strided(self.n, self.b)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Refuse units at another step of the epoch than before, or in more epochs than begin within n steps."""
        k = self.max_participations
        return [
            (f"a unit's steps must lie multiples of b={self.b} apart", (count > 0) & ((t - last) % self.b != 0)),
            (f"a unit may come at most k={k} times", count >= k),
        ]

    def covers(self, actual: Participation) -> bool:
        """Cover the same stride over no more epochs, or an order of one epoch in which no unit appears twice."""
        if actual.max_participations == 1:
            return actual.n <= self.b
        match actual.pattern:
            case Listed(stride=stride):
                return stride == self.b and not actual.secret and actual.max_participations <= self.k
            case _:
                return False

    @classmethod
    def asked(cls, asked: Asked) -> Participation:
        """Return the order; of one epoch, a single pass."""
        return SingleEpoch(asked.steps) if asked.epochs == 1 else cls(asked.n, asked.epochs, asked.steps)

    @classmethod
    def recognise(cls, facts: LoaderFacts) -> "FixedOrder | None":
        """Several passes in one order."""
        several = facts.is_once and facts.epochs > 1
        return cls(facts.steps, facts.epochs, facts.steps_per_epoch) if several and facts.is_fixed else None

    @property
    def needs(self) -> Needs:
        """An order that is kept."""
        return Needs("one order, kept", secrecy=False, batches="one size")

    def describe(self) -> str:
        """Return a phrase for people."""
        return f"{counted(self.max_participations, 'epoch')} of {counted(self.b, 'step')}, the same order in each"
