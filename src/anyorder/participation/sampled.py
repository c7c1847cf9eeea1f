"""Orders that are drawn by secret coins: a unit's privacy comes from them, and they hold only while nobody knows them.

Each unit has coins of its own, independent of all others', so the absence of one moves no other (but where batches are
cut to a fixed size, and where units lie in groups by their number, which closes up). `pattern` is what a unit's steps
may be if its coins became known: what is left of the claim then.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.formatting import counted
from anyorder.patterns import Listed, Participation, PerEpoch, Refusals, Rule, Separated

__all__ = [
    "BallsInBins",
    "CyclicPoisson",
    "MinSeparationSampling",
    "PoissonSampling",
    "RandomAllocation",
    "TruncatedPoisson",
]

Integers = NDArray[np.int64]


class SecretRule(Rule):
    """A rule whose steps secret coins draw."""

    @property
    def secret(self) -> bool:
        """True."""
        return True

    def covers(self, actual: Participation) -> bool:
        """Itself alone: of another order no coins are known."""
        return self == actual


@final
@dataclass(frozen=True)
class PoissonSampling(SecretRule):
    """Every unit is in every step independently with a given, secret coin: DP-SGD's amplified baseline.

    Only `anyorder`'s own sampler provides it; a shuffled loader does not. Any set of steps may come: `Listed` with
    stride 1. Its privacy comes from the coins, so no sensitivity is offered for it; a unit's absence moves no other.

    Args:
        n: number of steps.
        sampling_probability: q, in (0, 1].
    """

    n: int
    sampling_probability: float

    kind = "poisson_sampling"
    absence_moves_others = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.integer("n", self.n, low=1))
        probability = checks.real("sampling_probability", self.sampling_probability, low=0.0, high=1.0)
        object.__setattr__(self, "sampling_probability", checks.positive("sampling_probability", probability))

    @property
    def pattern(self) -> Listed:
        """Every step: the one maximal pattern."""
        return Listed.strided(self.n, 1)

    @property
    def coin(self) -> float:
        """The sampling probability."""
        return self.sampling_probability

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Nobody: chance alone keeps a unit out of a step."""
        return []

    def describe(self) -> str:
        """One phrase for people."""
        steps = counted(self.n, "step")
        return f"Poisson sampling, each unit in each of {steps} with probability {self.sampling_probability:g}"


@final
@dataclass(frozen=True)
class CyclicPoisson(SecretRule):
    """Units lie in `cycle` groups, fixed beforehand; step t takes each unit of group t mod cycle by a secret coin.

    A unit may be in steps j, j + cycle, j + 2 cycle, .. for the j of its group, so that under a C of at most `cycle`
    bands its steps do not overlap [Choquette-Choo et al. 2023]. Groups are public and say nothing of the data: by the
    unit's number, its place among all units modulo `cycle`. Without one unit all later ones would be of other groups,
    so that neighbours differ by a unit's gradients, "zero-out". `Listed` with stride `cycle`; cycle = 1 has the steps
    of `PoissonSampling`, which is for "add-or-remove".

    Args:
        n: number of steps.
        cycle: number of groups b.
        sampling_probability: of a unit of the step's group, in (0, 1].
    """

    n: int
    cycle: int
    sampling_probability: float

    kind = "cyclic_poisson"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.integer("n", self.n, low=1))
        object.__setattr__(self, "cycle", checks.integer("cycle", self.cycle, low=1))
        object.__setattr__(self, "sampling_probability", _probability(self.sampling_probability))

    @property
    def pattern(self) -> Listed:
        """One pattern for each group."""
        return Listed.strided(self.n, self.cycle)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Those of another group than that of t."""
        return [_stride_clause(self.cycle, t, last, count)]

    def describe(self) -> str:
        """One phrase for people."""
        groups, steps = counted(self.cycle, "group"), counted(self.n, "step")
        return (
            f"cyclic Poisson sampling, {groups} in turn over {steps}, each unit of a step's group "
            f"with probability {self.sampling_probability:g}"
        )


@final
@dataclass(frozen=True)
class TruncatedPoisson(SecretRule):
    """Poisson sampling, or cyclic Poisson sampling, whose batches are cut to a fixed size by a secret, uniform choice.

    A batch of at most `batch_size` units: of more that were drawn, a uniform choice stays. One unit's presence may push
    another out, so neighbours differ by a unit's gradients, "zero-out", and the size of the data set is public.

    Args:
        n: number of steps.
        sampling_probability: of a unit of the step's group, in (0, 1].
        batch_size: the most units of a step.
        dataset_size: number of units, all groups together.
        cycle: number of groups, by the unit's number; 1 for one group.
    """

    n: int
    sampling_probability: float
    batch_size: int
    dataset_size: int
    cycle: int = 1

    kind = "truncated_poisson"

    def __post_init__(self) -> None:
        for name in ("n", "batch_size", "dataset_size", "cycle"):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name), low=1))
        object.__setattr__(self, "sampling_probability", _probability(self.sampling_probability))
        if self.cycle > self.dataset_size:
            raise ArgumentError(
                f"cycle must be at most dataset_size={self.dataset_size}, one unit in a group, got {self.cycle}"
            )

    @property
    def group_size(self) -> int:
        """Units of the largest group."""
        return -(-self.dataset_size // self.cycle)

    @property
    def pattern(self) -> Listed:
        """One pattern for each group."""
        return Listed.strided(self.n, self.cycle)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Those of another group than that of t."""
        return [_stride_clause(self.cycle, t, last, count)]

    def describe(self) -> str:
        """One phrase for people."""
        cyclic = f", {self.cycle} groups in turn" if self.cycle > 1 else ""
        steps, units = counted(self.n, "step"), counted(self.batch_size, "unit")
        return (
            f"truncated Poisson sampling{cyclic}, each of {steps} at most {units}, drawn with "
            f"probability {self.sampling_probability:g}"
        )


@final
@dataclass(frozen=True)
class BallsInBins(SecretRule):
    """Each unit draws one of b bins, once, by a secret coin; bin j is the batch of steps j, j + b, j + 2b, ..

    [Chua et al. 2025; Choquette-Choo et al. 2025]. A unit takes part once in each of k epochs of b steps, at distance b
    exactly. A permutation that is cut into batches is not this: there the places of the others tell a unit's.

    Args:
        k: number of epochs.
        b: steps in an epoch, and bins; n = k b.
    """

    k: int
    b: int

    kind = "balls_in_bins"
    absence_moves_others = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", checks.integer("k", self.k, low=1))
        object.__setattr__(self, "b", checks.integer("b", self.b, low=1))

    @property
    def n(self) -> int:  # type: ignore[override]
        """K b."""
        return self.k * self.b

    @property
    def pattern(self) -> Listed:
        """One pattern for each bin."""
        return Listed.strided(self.n, self.b)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Those of another bin than that of t."""
        return [_stride_clause(self.b, t, last, count)]

    def describe(self) -> str:
        """One phrase for people."""
        steps, epochs = counted(self.b, "step"), counted(self.k, "epoch")
        return f"balls in bins, each unit in one of {steps} by a secret coin, the same in each of {epochs}"


@final
@dataclass(frozen=True)
class RandomAllocation(SecretRule):
    """Each unit draws one of the b steps of each epoch by a secret coin, anew in each of k epochs.

    Args:
        k: number of epochs.
        b: steps in an epoch; n = k b.
    """

    k: int
    b: int

    kind = "random_allocation"
    absence_moves_others = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", checks.integer("k", self.k, low=1))
        object.__setattr__(self, "b", checks.integer("b", self.b, low=1))

    @property
    def n(self) -> int:  # type: ignore[override]
        """K b."""
        return self.k * self.b

    @property
    def pattern(self) -> PerEpoch:
        """One step of each epoch, any of them."""
        return PerEpoch(self.k, self.b)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Those who came before in the epoch of t."""
        return [("a unit may come once in an epoch", (count > 0) & (last // self.b == t // self.b))]

    def describe(self) -> str:
        """One phrase for people."""
        steps, epochs = counted(self.b, "step"), counted(self.k, "epoch")
        return f"random allocation, each unit in one of {steps} by a secret coin, anew in each of {epochs}"


@final
@dataclass(frozen=True)
class MinSeparationSampling(SecretRule):
    """A unit that was in none of the last b - 1 steps is taken by a secret coin: b-min-sep [Dong, Ganesh 2026].

    With a warm start a unit begins as if the sampling had gone on forever: it waits w steps before its first coin, with
    probability p / (1 + (b - 1) p) for each w = 1, .., b - 1, and none else; so that batches have the same expected
    size from the first step on, dataset_size p / (1 + (b - 1) p). Without, all units may come at step 0.
    `Separated`: any steps at least b apart.

    Args:
        n: number of steps.
        b: smallest distance between two steps of a unit.
        sampling_probability: p, of a unit that may come, in (0, 1].
        warm_start: see above. With p = 1 it is balls in bins.
    """

    n: int
    b: int
    sampling_probability: float
    warm_start: bool = True

    kind = "min_separation_sampling"
    absence_moves_others = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.integer("n", self.n, low=1))
        object.__setattr__(self, "b", checks.integer("b", self.b, low=1))
        object.__setattr__(self, "sampling_probability", _probability(self.sampling_probability))
        if type(self.warm_start) is not bool:
            raise ArgumentError(f"warm_start must be True or False, got {self.warm_start!r}")

    @property
    def pattern(self) -> Separated:
        """Every set of steps that are b apart."""
        return Separated(self.n, self.b)

    @property
    def marginal(self) -> float:
        """The probability of a unit to be in a step, in the long run: p / (1 + (b - 1) p)."""
        p = self.sampling_probability
        return p / (1 + (self.b - 1) * p)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Those who come too early after their last step."""
        return [(f"a unit may come back at least b={self.b} steps after its last", (count > 0) & (t - last < self.b))]

    def describe(self) -> str:
        """One phrase for people."""
        warm = "" if self.warm_start else ", all from the first step on"
        return (
            f"sampling with separation, each unit in each of {counted(self.n, 'step')} with probability "
            f"{self.sampling_probability:g} unless it was in one of the last {self.b - 1}{warm}"
        )


def _probability(value: float) -> float:
    found = checks.real("sampling_probability", value, low=0.0, high=1.0)
    return checks.positive("sampling_probability", found)


def _stride_clause(b: int, t: int, last: Integers, count: Integers) -> tuple[str, NDArray[np.bool_]]:
    return (f"a unit's steps must lie multiples of b={b} apart", (count > 0) & ((t - last) % b != 0))
