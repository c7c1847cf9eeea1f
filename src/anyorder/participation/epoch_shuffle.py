"""Every epoch in an order of its own."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.formatting import counted
from anyorder.participation.fixed_order import FixedOrder
from anyorder.participation.single_epoch import SingleEpoch
from anyorder.patterns import Asked, LoaderFacts, Needs, Participation, PerEpoch, Refusals, Rule, Word

Integers = NDArray[np.int64]


@final
@dataclass(frozen=True)
class EpochShuffle(Rule):
    """One step anywhere in each of k epochs: what `DataLoader(shuffle=True)` does. No amplification is claimed.

    Its patterns are `PerEpoch`, word for word.

    Args:
        k: number of epochs.
        steps_per_epoch: steps in one epoch; n = k * steps_per_epoch.
    """

    k: int
    steps_per_epoch: int

    kind = "epoch_shuffle"
    words = (Word("shuffled", "again in each epoch", is_quick=True),)

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", checks.integer("k", self.k, low=1))
        object.__setattr__(self, "steps_per_epoch", checks.integer("steps_per_epoch", self.steps_per_epoch, low=1))

    @property
    def n(self) -> int:  # type: ignore[override]
        """K * steps_per_epoch."""
        return self.k * self.steps_per_epoch

    @property
    def pattern(self) -> PerEpoch:
        """Return one step of each epoch, any of them."""
        return PerEpoch(self.k, self.steps_per_epoch)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Refuse those who appeared before in the epoch of t."""
        s = self.steps_per_epoch
        epoch = t // s
        span = f"epoch {epoch}, steps {epoch * s} to {(epoch + 1) * s - 1}"
        return [(f"a unit may come once in {span}", (count > 0) & (last // s == epoch))]

    def covers(self, actual: Participation) -> bool:
        """No more epochs of the same length, shuffled or in the same order in each."""
        match actual.pattern:
            case PerEpoch(k=k, steps_per_epoch=s):
                return s == self.steps_per_epoch and k <= self.k
            case _:
                return FixedOrder(self.n, self.k, self.steps_per_epoch).covers(actual)

    @classmethod
    def asked(cls, asked: Asked) -> Participation:
        """Return the order; of one epoch, a single pass."""
        return SingleEpoch(asked.steps) if asked.epochs == 1 else cls(asked.epochs, asked.steps)

    @classmethod
    def recognise(cls, facts: LoaderFacts) -> "EpochShuffle | None":
        """Several whole passes, each in an order of its own."""
        whole = facts.steps == facts.epochs * facts.steps_per_epoch
        shuffled = facts.is_once and facts.epochs > 1 and not facts.is_fixed
        return cls(facts.epochs, facts.steps_per_epoch) if shuffled and whole else None

    @property
    def needs(self) -> Needs:
        """Any orders."""
        return Needs("any order in each epoch", secrecy=False, batches="one size")

    def describe(self) -> str:
        """Return a phrase for people."""
        return f"{counted(self.k, 'epoch')} of {counted(self.steps_per_epoch, 'step')}, shuffled again in each"
