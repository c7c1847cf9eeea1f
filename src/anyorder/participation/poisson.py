"""Poisson sampling: DP-SGD's amplified baseline."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder._draws import tossed, tossed_ratios, uniforms
from anyorder.accounting import poisson
from anyorder.accounting.amplification.secret_order import DrawLaw, SampledOrder, UnitsOf
from anyorder.checks import final
from anyorder.errors import PlanError
from anyorder.formatting import counted
from anyorder.noise import NoiseSource
from anyorder.participation.groups import cyclic_without_draws, probability_of
from anyorder.patterns import Asked, Listed, LoaderFacts, Needs, Participation, Refusals, Word
from anyorder.strategy import Independent, Strategy

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@final
@dataclass(frozen=True)
class PoissonSampling(SampledOrder):
    """Every unit is in every step independently with a given, secret draw: DP-SGD's amplified baseline.

    Only `anyorder`'s own sampler provides it; a shuffled loader does not. Any set of steps may come: `Listed` with
    stride 1. Its privacy comes from the draws, so no sensitivity is offered for it; a unit's absence moves no other.

    Args:
        n: number of steps.
        sampling_probability: q, in (0, 1].
    """

    n: int
    sampling_probability: float

    kind = "poisson_sampling"
    absence_moves_others = False
    words = (Word("poisson", is_quick=True),)
    draw_law = DrawLaw.EACH_STEP
    neighbours = "add-or-remove"
    takes_selection = True
    reads_columns = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.integer("n", self.n, low=1))
        object.__setattr__(self, "sampling_probability", probability_of(self.sampling_probability))

    @property
    def pattern(self) -> Listed:
        """Every step: the one maximal pattern."""
        return Listed.strided(self.n, 1)

    @property
    def draw_probability(self) -> float:
        """The sampling probability."""
        return self.sampling_probability

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Nobody: chance alone keeps a unit out of a step."""
        return []

    @classmethod
    def asked(cls, asked: Asked) -> "PoissonSampling":
        """Return the order of the expected batch size: q = batch_size / dataset_size."""
        return cls(asked.n, asked.share)

    @classmethod
    def recognise(cls, facts: LoaderFacts) -> "PoissonSampling | None":
        """Each unit by a draw of its own in each step."""
        return None if facts.probability is None else cls(facts.steps, facts.probability)

    @property
    def needs(self) -> Needs:
        """Any example at any time."""
        return Needs("random access", secrecy=True, batches="varying size")

    def check_neighbours(self, neighbours: str) -> None:
        """Allow add-or-remove neighbours alone."""
        if neighbours != "add-or-remove":
            raise PlanError(f"PoissonSampling is accounted for add-or-remove neighbours only, got {neighbours!r}")

    def without_draws(self) -> Participation:
        """Every unit in every step."""
        return cyclic_without_draws(self.n, 1)

    @property
    def rate(self) -> float:
        """The sampling probability."""
        return self.sampling_probability

    def units_of(self, size: int, source: NoiseSource) -> UnitsOf:
        """By one 32-bit word of each step and unit."""
        return tossed(size, source, 1, self.sampling_probability)

    def check_mechanism(self, strategy: Strategy) -> None:
        """Independent noise: what is drawn for one step must tell nothing of others."""
        if type(strategy) is not Independent:
            raise PlanError(f"PoissonSampling is accounted for independent noise only, got {strategy!r}")

    def sampled_parts(self, strategy: Strategy, sigma: float) -> tuple[float, float, int]:
        """Return one sampled Gaussian for each step."""
        del strategy
        return sigma, self.sampling_probability, self.n

    def least_noise(self, strategy: Strategy, epsilon: float, delta: float) -> float:
        """Return the noise of the sampled Gaussian."""
        del strategy
        return poisson.calibrate_poisson(epsilon, delta, self.sampling_probability, self.n)

    def canary_steps(self, count: int, source: NoiseSource) -> Bools:
        """A draw of its own for each step and canary."""
        return np.asarray(uniforms(source, self.n, count) < self.sampling_probability)

    def log_ratios(self, exponents: Floats) -> Floats:
        """Sum over steps of log(1 - q + q e^x)."""
        q = np.full(exponents.shape[1], self.sampling_probability)
        return np.asarray(tossed_ratios(exponents, q).sum(axis=0))

    def describe(self) -> str:
        """Return a phrase for people."""
        steps = counted(self.n, "step")
        return f"Poisson sampling, each unit in each of {steps} with probability {self.sampling_probability:g}"
