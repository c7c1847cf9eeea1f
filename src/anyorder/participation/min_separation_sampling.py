"""Sampling with separation: a unit that was in none of the last b - 1 steps is drawn."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from anyorder import _draws, checks
from anyorder._draws import uniforms
from anyorder.accounting.amplification.methods import Method, Pld
from anyorder.accounting.amplification.mixture import check_fits, check_reach
from anyorder.accounting.amplification.monte_carlo import SeparatedTerms, separated_band
from anyorder.accounting.amplification.secret_order import AmplifiedOrder, DrawLaw, UnitsOf
from anyorder.checks import final
from anyorder.errors import ArgumentError, PlanError
from anyorder.formatting import counted
from anyorder.noise import NoiseSource
from anyorder.participation.groups import probability_of
from anyorder.participation.min_separation import MinSeparation
from anyorder.participation.single_epoch import SingleEpoch
from anyorder.patterns import Asked, Needs, Participation, Refusals, Separated, Word
from anyorder.strategy import Strategy

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@final
@dataclass(frozen=True)
class MinSeparationSampling(AmplifiedOrder):
    """A unit that was in none of the last b - 1 steps is taken by a secret draw: b-min-sep [Dong, Ganesh 2026].

    With a warm start a unit begins as if the sampling had gone on forever: it waits w steps before its first draw, with
    probability p / (1 + (b - 1) p) for each w = 1, .., b - 1, and none else; so that batches have the same expected
    size from the first step on, dataset_size p / (1 + (b - 1) p). Without, all units may appear at step 0.
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
    # compared by its name alone: only samples amplify its claims, and its distance must be given
    words = (Word("min-separation-sampling", options=("cycle", "method"), is_compared=False, is_on_page=False),)
    draw_law = DrawLaw.SEPARATED
    draws_last = True
    fitted_kinds = ("toeplitz",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checks.integer("n", self.n, low=1))
        object.__setattr__(self, "b", checks.integer("b", self.b, low=1))
        object.__setattr__(self, "sampling_probability", probability_of(self.sampling_probability))
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
        """Refuse those who appear too early after their last step."""
        return [(f"a unit may come back at least b={self.b} steps after its last", (count > 0) & (t - last < self.b))]

    @classmethod
    def asked(cls, asked: Asked) -> "MinSeparationSampling":
        """Return the order for a batch size: p / (1 + (b - 1) p) = batch_size / dataset_size, for the cycle b."""
        b, share = asked.cycle_for("min-separation-sampling"), asked.share
        return cls(asked.n, b, min(1.0, share / (1 - (b - 1) * share)))

    @property
    def needs(self) -> Needs:
        """Any example at any time."""
        return Needs("random access", secrecy=True, batches="varying size")

    def without_draws(self) -> Participation:
        """Any steps that are b apart."""
        return SingleEpoch(self.n) if self.b >= self.n else MinSeparation(self.n, self.b)

    @property
    def rate(self) -> float:
        """Return the rate of a unit in the long run."""
        return self.marginal

    def units_of(self, size: int, source: NoiseSource) -> UnitsOf:
        """By a 64-bit word of each step and unit that may come, from step to step.

        Since when units wait is the run's own, whatever is renewed. Warm starts are within 2^-64 for each wait.
        """
        _draws.threshold_of(self.sampling_probability, 64)
        source = source.derive(b"min separation")
        reached: list[tuple[int, Integers]] = []  # step, from which step on each unit may come; none while it is made

        def step(t: int) -> Integers:
            start, free = reached.pop() if reached else (0, self._waits(source, size))
            if start > t:
                start, free = 0, self._waits(source, size)
            drawn = np.zeros(0, np.int64)
            for s in range(start, t + 1):
                tossed = _draws.below(_draws.words(source, s, size), self.sampling_probability)
                drawn = np.flatnonzero(tossed & (free <= s))
                free[drawn] = s + self.b
            reached.append((t + 1, free))
            return drawn

        return step

    def _waits(self, source: NoiseSource, size: int) -> Integers:
        """From which step on each unit is drawn: w = 1, .., b - 1 with probability p / (1 + (b - 1) p) each, else 0."""
        if not self.warm_start:
            return np.zeros(size, np.int64)
        p = Fraction(self.sampling_probability)
        width = int(2**64 * p / (1 + (self.b - 1) * p))
        if self.b == 1 or width == 0:
            return np.zeros(size, np.int64)
        found = _draws.words(source.own.derive(b"start"), 0, size) // np.uint64(width) + np.uint64(1)
        return np.where(found < self.b, found, np.uint64(0)).astype(np.int64)

    def check_mechanism(self, strategy: Strategy) -> None:
        """At most b bands: the columns of a unit's steps must not overlap."""
        check_reach(strategy, self, self.b, "b")

    @property
    def bins(self) -> int:
        """The steps between two of a unit, in expectation."""
        return min(self.n, max(self.b, round(1 / self.marginal)))

    @property
    def most_bands(self) -> int:
        """The separation."""
        return min(self.b, self.n)

    def check_method(self, method: Method, strategy: Strategy) -> None:
        """Samples; or the bound, which is that of known batches."""
        del strategy
        if type(method) is Pld:
            raise PlanError("no loss distribution is known of MinSeparationSampling: take method 'monte_carlo'")

    def terms(self, strategy: Strategy, sigma: float) -> SeparatedTerms:
        """Samples of a unit's steps and of noise."""
        check_fits(strategy, self)
        return SeparatedTerms(separated_band(strategy, self) / sigma**2, self)

    def losses(self, method: Method, strategy: Strategy, sigma: float, variant: int, pld: Any, h: float) -> Any:
        """None: known batches say as much."""
        del method, strategy, sigma, variant, pld, h

    def canary_steps(self, count: int, source: NoiseSource) -> Bools:
        """Draw steps one after the other, as for units."""
        drawn = uniforms(source, self.n + 1, count)
        first = np.zeros(count, np.int64)
        if self.warm_start:  # drawn[n] / marginal is below b - 1 with probability (b - 1) marginal
            waits = np.floor(drawn[self.n] / self.marginal).astype(np.int64) + 1
            first = np.where(waits < self.b, waits, 0)
        there = np.zeros((self.n, count), np.bool_)
        for step in range(self.n):
            there[step] = (first <= step) & (drawn[step] < self.sampling_probability)
            first = np.where(there[step], step + self.b, first)
        return there

    def log_ratios(self, exponents: Floats) -> Floats:
        """L_i = log((1 - p) e^L_(i+1) + p e^(x_i + L_(i+b))), from the last step to the first [Dong, Ganesh 2026]."""
        n, b, p = self.n, self.b, self.sampling_probability
        logs = np.zeros((n + b + 1, exponents.shape[1]))
        with np.errstate(divide="ignore"):
            for i in range(n - 1, -1, -1):
                logs[i] = np.logaddexp(np.log1p(-p) + logs[i + 1], np.log(p) + exponents[i] + logs[i + b])
            if not self.warm_start:
                return np.asarray(logs[0])
            weights = np.full(b, self.marginal)
            weights[0] = max(0.0, 1 - (b - 1) * self.marginal)
            return np.asarray(logsumexp(logs[:b], axis=0, b=weights[:, None]))

    def describe(self) -> str:
        """Return a phrase for people."""
        warm = "" if self.warm_start else ", all from the first step on"
        return (
            f"sampling with separation, each unit in each of {counted(self.n, 'step')} with probability "
            f"{self.sampling_probability:g} unless it was in one of the last {self.b - 1}{warm}"
        )
