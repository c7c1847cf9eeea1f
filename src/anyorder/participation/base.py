"""What a participation states about itself: the one place where a rule says all that others ask of it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from anyorder.participation.patterns import Pattern

__all__ = ["Participation", "Refusals", "Rule"]

Integers = NDArray[np.int64]

Refusals = list[tuple[str, NDArray[np.bool_]]]
"""What a rule says, and which of the units that want to come break it, clause by clause."""


class Participation(ABC):
    """A set of allowed patterns; a pattern is the sorted tuple of the steps of one unit.

    Attributes:
        n: number of steps.
        kind: its name in files.
        absence_moves_others: whether, without one unit, others would be in other steps, as where a loader fills
            batches by number. Then neighbours cannot differ by a unit's absence ("add-or-remove").
    """

    n: int
    kind: ClassVar[str]
    absence_moves_others: ClassVar[bool] = True

    @property
    @abstractmethod
    def pattern(self) -> Pattern:
        """The family that holds every set of steps that a unit may take; claims are proven for it."""

    @abstractmethod
    def covers(self, actual: "Participation") -> bool:
        """Whether the patterns of `actual`, within the planned steps, are known to be among those of this one."""

    @abstractmethod
    def describe(self) -> str:
        """One phrase for people."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `read` makes an equal participation; "kind" is its name."""

    @classmethod
    @abstractmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """From what `to_dict` wrote, without its kind."""

    @property
    def coin(self) -> float | None:
        """The probability of the secret coin that alone decides whether a unit is in a step; None for other orders."""
        return None

    @property
    def secret(self) -> bool:
        """Whether its steps are drawn by secret coins, from which its privacy comes."""
        return False

    @property
    def max_participations(self) -> int:
        """The largest number of steps of one unit."""
        return self.pattern.max_participations

    @property
    def min_separation(self) -> int:
        """The smallest distance between two steps of one unit that the rule allows; n if there is only one step."""
        return self.pattern.min_separation

    def patterns(self) -> Iterator[tuple[int, ...]]:
        """Every maximal allowed pattern; exponentially many for some rules: for tests and small n."""
        return self.pattern.enumerate()


class Rule(Participation):
    """A participation that names no units: who may come follows from a unit's last step and its number of steps.

    Subclasses are frozen dataclasses; files hold their fields.
    """

    @abstractmethod
    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Which units may not be in step t; those that no clause names may, whatever other units do.

        What is let through, step by step, must be within `pattern`: the claim rests on it.

        Args:
            t: the step.
            last: (m,) the last step of each unit that wants to come; -1 for never.
            count: (m,) its number of steps so far.
        """

    def to_dict(self) -> dict[str, Any]:
        """{"kind": .., and the fields}."""
        return {"kind": self.kind} | {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """From the fields."""
        return cls(**data)
