"""Cyclic Poisson sampling: groups of units by turns, each unit of a step's group by a secret draw."""

from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder._draws import tossed
from anyorder.accounting.amplification.exact import cyclic_parts
from anyorder.accounting.amplification.mixture import check_fits, check_reach
from anyorder.accounting.amplification.secret_order import DrawLaw, SampledOrder, UnitsOf
from anyorder.checks import final
from anyorder.errors import PlanError
from anyorder.formatting import counted
from anyorder.noise import NoiseSource
from anyorder.participation.groups import GroupDraws, cyclic_without_draws, probability_of
from anyorder.patterns import Asked, Needs, Participation, Word
from anyorder.strategy import Strategy

Floats = NDArray[np.float64]


@final
@dataclass(frozen=True)
class CyclicPoisson(GroupDraws, SampledOrder):
    """Units lie in `cycle` groups, fixed beforehand; step t takes each unit of group t mod cycle by a secret draw.

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
    words = (Word("cyclic-poisson", options=("cycle",)),)
    draw_law = DrawLaw.EACH_STEP
    cycle_is_chosen = True
    neighbours = "zero-out"
    fitted_kinds = ("toeplitz", "banded")

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.integer("n", self.n, low=1))
        object.__setattr__(self, "cycle", checks.integer("cycle", self.cycle, low=1))
        object.__setattr__(self, "sampling_probability", probability_of(self.sampling_probability))

    @classmethod
    def asked(cls, asked: Asked) -> "CyclicPoisson":
        """Return the order of the expected batch size: q = cycle batch_size / dataset_size, of the units of a group."""
        cycle = asked.cycle_for("cyclic-poisson")
        return cls(asked.n, cycle, min(1.0, asked.share * cycle))

    def with_cycle(self, cycle: int) -> "CyclicPoisson":
        """Return the same from as many groups, of one group: as many units in a step are expected."""
        return replace(self, cycle=cycle, sampling_probability=min(1.0, self.sampling_probability * cycle))

    @property
    def needs(self) -> Needs:
        """Any example of a group at any time of it."""
        return Needs("random access in a group", secrecy=True, batches="varying size")

    def check_neighbours(self, neighbours: str) -> None:
        """Allow zero-out neighbours alone."""
        if neighbours != "zero-out":
            raise PlanError(
                "CyclicPoisson is accounted for zero-out neighbours only (a unit's gradients replaced by zero): "
                "its groups go by a unit's number, so that without one unit all later ones would be of other "
                f"groups; got {neighbours!r}"
            )

    def without_draws(self) -> Participation:
        """Every unit in every step of its group."""
        return cyclic_without_draws(self.n, self.cycle)

    @property
    def rate(self) -> float:
        """The sampling probability, of one group of `cycle`."""
        return self.sampling_probability / self.cycle

    def units_of(self, size: int, source: NoiseSource) -> UnitsOf:
        """By one 32-bit word of each step and unit of its group; of one group the same as Poisson sampling."""
        return tossed(size, source, self.cycle, self.sampling_probability)

    def check_mechanism(self, strategy: Strategy) -> None:
        """At most `cycle` bands: the columns of a unit's steps must not overlap."""
        check_reach(strategy, self, self.cycle, "cycle")

    @property
    def most_bands(self) -> int:
        """Return the most bands: one for each group."""
        return min(self.cycle, self.n)

    def sampled_parts(self, strategy: Strategy, sigma: float) -> tuple[float, float, int]:
        """Return a sampled Gaussian for each step of a group, of the largest column [Choquette-Choo et al. 2023]."""
        return cyclic_parts(strategy, self, sigma)

    def least_noise(self, strategy: Strategy, epsilon: float, delta: float) -> float:
        """Return the noise of so many sampled Gaussians, times the norm of the largest column."""
        check_fits(strategy, self)
        largest = sqrt(float(strategy.column_norms_squared().max()))
        return self.noise_alone(epsilon, delta) * (largest * (1 + 2.0**-47))

    def taken_probabilities(self, count: int) -> Floats:
        """(count,) the probability of unit c to be in a step of its group."""
        return np.full(count, self.sampling_probability)

    def describe(self) -> str:
        """Return a phrase for people."""
        groups, steps = counted(self.cycle, "group"), counted(self.n, "step")
        return (
            f"cyclic Poisson sampling, {groups} in turn over {steps}, each unit of a step's group "
            f"with probability {self.sampling_probability:g}"
        )
