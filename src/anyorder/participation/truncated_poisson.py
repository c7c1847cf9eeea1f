"""Truncated Poisson sampling: batches of at most a fixed size."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from anyorder import _draws, checks
from anyorder.accounting.amplification.exact import (
    group_sizes,
    rough_truncated,
    truncated_delta,
    truncated_epsilon,
    truncated_losses,
)
from anyorder.accounting.amplification.methods import Method, Pld
from anyorder.accounting.amplification.mixture import check_reach
from anyorder.accounting.amplification.secret_order import ROUGH, AmplifiedOrder, DrawLaw, UnitsOf
from anyorder.checks import final
from anyorder.errors import ArgumentError, PlanError
from anyorder.formatting import counted
from anyorder.noise import NoiseSource
from anyorder.participation.groups import GroupDraws, cyclic_without_draws, probability_of
from anyorder.patterns import Asked, Needs, Participation, Word
from anyorder.strategy import Strategy

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@final
@dataclass(frozen=True)
class TruncatedPoisson(GroupDraws, AmplifiedOrder):
    """Poisson sampling, or cyclic Poisson sampling, whose batches are truncated to a fixed size by a secret, uniform
    choice.

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
    draw_law = DrawLaw.CUT_BATCHES
    words = (Word("truncated-poisson", options=("cycle", "max_batch_size")),)
    cycle_is_chosen = True
    fitted_kinds = ("toeplitz", "banded")

    def __post_init__(self) -> None:
        for name in ("n", "batch_size", "dataset_size", "cycle"):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name), low=1))
        object.__setattr__(self, "sampling_probability", probability_of(self.sampling_probability))
        if self.cycle > self.dataset_size:
            raise ArgumentError(
                f"cycle must be at most dataset_size={self.dataset_size}, one unit in a group, got {self.cycle}"
            )

    @classmethod
    def asked(cls, asked: Asked) -> "TruncatedPoisson":
        """Return the order for a batch size, truncated to batch_size + 3 sqrt(batch_size) units a step where nothing is
        said.
        """
        cycle = asked.cycle_for("truncated-poisson", otherwise=1)
        most = asked.max_batch_size
        most = ceil(asked.batch_size + 3 * sqrt(asked.batch_size)) if most is None else most
        most = checks.integer("max_batch_size", most, low=1)
        size = asked.dataset_size
        return cls(asked.n, min(1.0, asked.share * cycle), min(most, size), size, cycle)

    def with_cycle(self, cycle: int) -> "TruncatedPoisson":
        """Return the same from as many groups, of one group: as many units in a step are expected."""
        return replace(self, cycle=cycle, sampling_probability=min(1.0, self.sampling_probability * cycle))

    @property
    def needs(self) -> Needs:
        """Any example at any time."""
        return Needs("random access", secrecy=True, batches=f"at most {self.batch_size}, filled up")

    def check_neighbours(self, neighbours: str) -> None:
        """No unit's absence: another would be in its place."""
        if neighbours == "add-or-remove":
            raise PlanError(
                "TruncatedPoisson is accounted for zero-out neighbours (a unit's gradients replaced by zero): "
                "batches are truncated to their size, and without one unit others take its place; got 'add-or-remove'"
            )

    def without_draws(self) -> Participation:
        """Every unit in every step of its group."""
        return cyclic_without_draws(self.n, self.cycle)

    @property
    def rate(self) -> float:
        """The sampling probability, of one group of `cycle`."""
        return self.sampling_probability / self.cycle

    @property
    def most_units(self) -> int:
        """A full batch."""
        return self.batch_size

    def check_size(self, size: int) -> int:
        """The claim counts on the number of units."""
        size = checks.integer("num_units", size, low=1)
        if size != self.dataset_size:
            raise ArgumentError(
                f"num_units must be the order's dataset_size={self.dataset_size}, which its claim counts on, got {size}"
            )
        return size

    def units_of(self, size: int, source: NoiseSource) -> UnitsOf:
        """By a 64-bit word of each step and unit; of more than batch_size, those with the least further word stay.

        That is a uniform choice up to ties (2^-65 a pair).
        """
        _draws.threshold_of(self.sampling_probability, 64)
        source = source.derive(b"truncated poisson")

        def step(t: int) -> Integers:
            group = np.arange(t % self.cycle, size, self.cycle)
            tossed = _draws.below(_draws.words(source, t, len(group)), self.sampling_probability)
            # ranks also where none is left out: steps take equal time
            ranks = _draws.words(source.derive(b"choice"), t, len(group))
            drawn = np.flatnonzero(tossed)
            kept = drawn[np.argsort(ranks[drawn], kind="stable")[: self.batch_size]]
            return group[np.sort(kept)]

        return step

    def check_mechanism(self, strategy: Strategy) -> None:
        """At most `cycle` bands: the columns of a unit's steps must not overlap."""
        check_reach(strategy, self, self.cycle, "cycle")

    @property
    def most_bands(self) -> int:
        """Return the most bands: one for each group."""
        return min(self.cycle, self.n)

    def default_method(self, strategy: Strategy) -> Method:
        """The loss distribution."""
        del strategy
        return Pld()

    def check_method(self, method: Method, strategy: Strategy) -> None:
        """The loss distribution alone."""
        del strategy
        if type(method) is not Pld:
            raise PlanError("TruncatedPoisson is accounted by its loss distribution: take method 'pld'")

    def exact_epsilon(self, strategy: Strategy, sigma: float, delta: float) -> float:
        """By the loss distribution of dp-accounting, of each size of group."""
        return truncated_epsilon(strategy, self, sigma, delta)

    def exact_delta(self, strategy: Strategy, sigma: float, epsilon: float) -> float:
        """By the loss distribution of dp-accounting, of each size of group."""
        return truncated_delta(strategy, self, sigma, epsilon)

    def rough_epsilons(
        self, method: Method, strategy: Strategy, delta: float
    ) -> list[tuple[Callable[[float], float], float]]:
        """On a coarse grid."""
        del method
        return [(lambda sigma: rough_truncated(strategy, self, sigma, delta), ROUGH)]

    @property
    def variants(self) -> tuple[int, ...]:
        """The sizes of groups."""
        return tuple(sorted(group_sizes(self)))

    @property
    def transforms(self) -> int:
        """Two for each step of a group."""
        return 2 * -(-self.n // self.cycle)

    def losses(self, method: Method, strategy: Strategy, sigma: float, variant: int, pld: Any, h: float) -> Any:
        """Return the privacy losses of all steps of a group of this size."""
        del method
        return truncated_losses(pld, strategy, self, sigma, variant, h)

    def taken_probabilities(self, count: int) -> Floats:
        """(count,) E min(B, batch_size) / group, B ~ Binomial(group, q), for as many units as the group of c has."""
        groups = np.arange(self.cycle)
        sizes = (self.dataset_size - groups + self.cycle - 1) // self.cycle
        each = np.array([_stays(self.sampling_probability, self.batch_size, int(size)) for size in sizes])
        return each[np.arange(count) % self.cycle]

    def describe(self) -> str:
        """Return a phrase for people."""
        cyclic = f", {self.cycle} groups in turn" if self.cycle > 1 else ""
        steps, units = counted(self.n, "step"), counted(self.batch_size, "unit")
        return (
            f"truncated Poisson sampling{cyclic}, each of {steps} at most {units}, drawn with "
            f"probability {self.sampling_probability:g}"
        )


def _stays(q: float, batch_size: int, group: int) -> float:
    """E min(B, batch_size) / group: all units of a group are alike."""
    if batch_size >= group:
        return q
    at_most = np.arange(batch_size + 1)
    within = float((at_most * scipy.stats.binom.pmf(at_most, group, q)).sum())
    return (within + batch_size * (1 - float(scipy.special.bdtr(batch_size, group, q)))) / group
