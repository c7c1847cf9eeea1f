"""Arrivals that a timer spaces out."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.formatting import counted
from anyorder.patterns import LoaderFacts, Needs, Participation, Refusals, Rule, Separated

Integers = NDArray[np.int64]


@final
@dataclass(frozen=True)
class MinSeparation(Rule):
    """At most k steps, any two of them at least b apart: arrivals that a timer spaces out.

    Its patterns are `Separated`: a unit that is always let in at least b after its last step, and k times at most, has
    all its steps that far apart. Arrivals make their own batches, so the absence of a unit moves no other.

    Args:
        n: number of steps.
        b: smallest distance between two steps of a unit; b = 1 allows every step.
        k: largest number of steps of a unit; None for as many as fit.
    """

    n: int
    b: int
    k: int | None = None

    kind = "min_separation"
    absence_moves_others = False
    device_can_keep = True  # by a counter and a timer

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.integer("n", self.n, low=1))
        object.__setattr__(self, "b", checks.integer("b", self.b, low=1))
        if self.k is not None:
            object.__setattr__(self, "k", checks.integer("k", self.k, low=1))

    @cached_property
    def pattern(self) -> Separated:
        """Every set of at most k steps that are b apart."""
        return Separated(self.n, self.b, self.k)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Refuse those who appear too early after their last step, or too often."""
        k = self.pattern.k
        assert k is not None  # what fits, where none was given
        return [
            (f"a unit may come back at least b={self.b} steps after its last", (count > 0) & (t - last < self.b)),
            (f"a unit may come at most k={k} times", count >= k),
        ]

    def covers(self, actual: Participation) -> bool:
        """Cover any order that keeps units as far apart and in no more steps."""
        return actual.min_separation >= self.b and actual.max_participations <= self.max_participations

    @classmethod
    def recognise(cls, facts: LoaderFacts) -> "MinSeparation | None":
        """Passes in orders of their own, the last one in part: no more than one step in each, wherever they end."""
        whole = facts.steps == facts.epochs * facts.steps_per_epoch
        shuffled = facts.is_once and facts.epochs > 1 and not facts.is_fixed
        return cls(facts.steps, 1, facts.epochs) if shuffled and not whole else None

    @property
    def needs(self) -> Needs:
        """A timer."""
        return Needs("any order that keeps a distance", secrecy=False, batches="any size")

    def describe(self) -> str:
        """Return a phrase for people."""
        return f"each unit in at most {self.max_participations} of {counted(self.n, 'step')}, at least {self.b} apart"
