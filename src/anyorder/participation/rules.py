"""The rules that people have: what a loader does, what arrivals obey, what an order lists.

Each rule is one class: it says which family its patterns are (`pattern`; its docstring proves it), whom the ledger
refuses (`refusals`), which loaders' orders it covers, and its words and fields.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.formatting import counted
from anyorder.patterns import Listed, Participation, PerEpoch, Refusals, Rule, Separated

Integers = NDArray[np.int64]


@final
@dataclass(frozen=True)
class SingleEpoch(Rule):
    """Every unit takes part in one step at most.

    Its patterns are `Separated` with b = n: two steps of a unit would lie less than n apart.
    """

    n: int

    kind = "single_epoch"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.integer("n", self.n, low=1))

    @property
    def pattern(self) -> Separated:
        """(0,), (1,), .., (n - 1,)."""
        return Separated(self.n, b=self.n, k=1)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Those who came before."""
        return [("a unit may come once, and one came back", count > 0)]

    def covers(self, actual: Participation) -> bool:
        """Whatever lets no unit come twice."""
        return actual.max_participations == 1

    def describe(self) -> str:
        """One phrase for people."""
        return f"each unit in at most one of {counted(self.n, 'step')}"


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.integer("n", self.n, low=1))
        object.__setattr__(self, "k", checks.integer("k", self.k, low=1))
        object.__setattr__(self, "b", checks.integer("b", self.b, low=1))
        if self.n > self.k * self.b:
            raise ArgumentError(
                f"n must be at most k b = {self.k} * {self.b} = {self.k * self.b}, or some unit comes more than k "
                f"times; got n={self.n}"
            )

    @property
    def pattern(self) -> Listed:
        """One pattern for each step of an epoch."""
        return Listed.strided(self.n, self.b)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Those who come at another step of the epoch than before, or in more epochs than begin within n steps."""
        k = self.max_participations
        return [
            (f"a unit's steps must lie multiples of b={self.b} apart", (count > 0) & ((t - last) % self.b != 0)),
            (f"a unit may come at most k={k} times", count >= k),
        ]

    def covers(self, actual: Participation) -> bool:
        """The same stride over no more epochs, or an order that ends within one epoch and lets no unit come twice."""
        if actual.max_participations == 1:
            return actual.n <= self.b
        match actual.pattern:
            case Listed(stride=stride):
                return stride == self.b and not actual.secret and actual.max_participations <= self.k
            case _:
                return False

    def describe(self) -> str:
        """One phrase for people."""
        return f"{counted(self.max_participations, 'epoch')} of {counted(self.b, 'step')}, the same order in each"


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", checks.integer("k", self.k, low=1))
        object.__setattr__(self, "steps_per_epoch", checks.integer("steps_per_epoch", self.steps_per_epoch, low=1))

    @property
    def n(self) -> int:  # type: ignore[override]
        """K * steps_per_epoch."""
        return self.k * self.steps_per_epoch

    @property
    def pattern(self) -> PerEpoch:
        """One step of each epoch, any of them."""
        return PerEpoch(self.k, self.steps_per_epoch)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Those who came before in the epoch of t."""
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

    def describe(self) -> str:
        """One phrase for people."""
        return f"{counted(self.k, 'epoch')} of {counted(self.steps_per_epoch, 'step')}, shuffled anew in each"


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.integer("n", self.n, low=1))
        object.__setattr__(self, "b", checks.integer("b", self.b, low=1))
        if self.k is not None:
            object.__setattr__(self, "k", checks.integer("k", self.k, low=1))

    @property
    def pattern(self) -> Separated:
        """Every set of at most k steps that are b apart."""
        return Separated(self.n, self.b, self.k)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Those who come too early after their last step, or too often."""
        k = self.max_participations
        return [
            (f"a unit may come back at least b={self.b} steps after its last", (count > 0) & (t - last < self.b)),
            (f"a unit may come at most k={k} times", count >= k),
        ]

    def covers(self, actual: Participation) -> bool:
        """Whatever keeps units as far apart and lets them come no more often."""
        return actual.min_separation >= self.b and actual.max_participations <= self.max_participations

    def describe(self) -> str:
        """One phrase for people."""
        return f"each unit in at most {self.max_participations} of {counted(self.n, 'step')}, at least {self.b} apart"
