"""One pass over the data, in any order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.formatting import counted
from anyorder.patterns import LoaderFacts, Needs, Participation, Refusals, Rule, Separated

Integers = NDArray[np.int64]


@final
@dataclass(frozen=True)
class SingleEpoch(Rule):
    """Every unit takes part in one step at most.

    Its patterns are `Separated` with b = n: two steps of a unit would lie less than n apart.
    """

    n: int

    kind = "single_epoch"
    device_can_keep = True  # it counts to one

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.integer("n", self.n, low=1))

    @property
    def pattern(self) -> Separated:
        """(0,), (1,), .., (n - 1,)."""
        return Separated(self.n, b=self.n, k=1)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Refuse those who appeared before."""
        return [("a unit may come once, and one came back", count > 0)]

    def covers(self, actual: Participation) -> bool:
        """Cover any order in which no unit appears twice."""
        return actual.max_participations == 1

    @classmethod
    def recognise(cls, facts: LoaderFacts) -> "SingleEpoch | None":
        """A pass in which no unit appears twice, in whatever order."""
        return cls(facts.steps) if facts.is_once and facts.epochs == 1 else None

    @property
    def needs(self) -> Needs:
        """What is needed: one pass."""
        return Needs("one pass in any order", secrecy=False, batches="one size")

    def describe(self) -> str:
        """Return a phrase for people."""
        return f"each unit in at most one of {counted(self.n, 'step')}"
