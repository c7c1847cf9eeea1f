"""Balls in bins: each unit draws one of the steps of an epoch, once for all epochs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from anyorder._draws import in_bins, uniform, uniform_integers
from anyorder.accounting.amplification.bins import (
    bins_delta,
    bins_epsilon,
    gram_composition,
    likely_epsilon,
    rough_epsilon,
)
from anyorder.accounting.amplification.exact import diagonal_composition, epoch_squares, epochs_delta, epochs_epsilon
from anyorder.accounting.amplification.methods import Deterministic, Method, Pld
from anyorder.accounting.amplification.mixture import bins_gram, check_disjoint
from anyorder.accounting.amplification.monte_carlo import Bins
from anyorder.accounting.amplification.secret_order import NEAR, ROUGH, DrawLaw, UnitsOf
from anyorder.checks import final
from anyorder.formatting import counted
from anyorder.noise import NoiseSource
from anyorder.participation.fixed_order import FixedOrder
from anyorder.participation.groups import EpochDraws, stride_clause
from anyorder.participation.single_epoch import SingleEpoch
from anyorder.patterns import Asked, Listed, Needs, Participation, Refusals, Word
from anyorder.strategy import Strategy
from anyorder.strategy.registry import kind_of

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@final
@dataclass(frozen=True)
class BallsInBins(EpochDraws):
    """Each unit draws one of b bins, once, by a secret draw; bin j is the batch of steps j, j + b, j + 2b, ..

    [Chua et al. 2025; Choquette-Choo et al. 2025]. A unit takes part once in each of k epochs of b steps, at distance b
    exactly. A permutation that is divided into batches is not this: there the places of the others tell a unit's.

    Args:
        k: number of epochs.
        b: steps in an epoch, and bins; n = k b.
    """

    k: int
    b: int

    kind = "balls_in_bins"
    words = (Word("balls-in-bins", options=("method",)),)
    draw_law = DrawLaw.ONE_BIN
    fitted_kinds = ("tree", "toeplitz", "banded_inverse", "blt")

    @property
    def pattern(self) -> Listed:
        """Return one pattern for each bin."""
        return Listed.strided(self.n, self.b)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Refuse those of another bin than that of t."""
        return [stride_clause(self.b, t, last, count)]

    @classmethod
    def asked(cls, asked: Asked) -> "BallsInBins":
        """A bin for each step of an epoch."""
        return cls(asked.epochs, asked.steps)

    @property
    def needs(self) -> Needs:
        """A split that is drawn once."""
        return Needs("one random split, kept", secrecy=True, batches="varying size")

    def without_draws(self) -> Participation:
        """The bins known: a fixed order."""
        return SingleEpoch(self.n) if self.k == 1 else FixedOrder(self.n, self.k, self.b)

    def units_of(self, size: int, source: NoiseSource) -> UnitsOf:
        """A bin for each unit, one uniform word of (0, unit), for the whole run, whatever is renewed."""

        @cache
        def bins() -> list[Integers]:
            return in_bins(uniform(source.own.derive(b"bins"), 0, size, self.b), self.b)

        return lambda t: bins()[t % self.b].copy()

    def check_mechanism(self, strategy: Strategy) -> None:
        """Any kind of those that there are: the run is accounted as a whole."""
        kind_of(strategy)

    def check_method(self, method: Method, strategy: Strategy) -> None:
        """Any; the loss distribution where columns do not overlap."""
        if type(method) is Pld:
            check_disjoint(strategy)

    def exact_epsilon(self, strategy: Strategy, sigma: float, delta: float) -> float:
        """Return the exact epsilon of one draw of a bin, whose means are orthogonal."""
        return epochs_epsilon(self._squares(strategy), sigma, delta)

    def exact_delta(self, strategy: Strategy, sigma: float, epsilon: float) -> float:
        """Return the exact delta of one draw of a bin, whose means are orthogonal."""
        return epochs_delta(self._squares(strategy), sigma, epsilon)

    def bound_epsilon(self, strategy: Strategy, sigma: float, delta: float) -> float:
        """By the Gram matrix of the bins' means."""
        return bins_epsilon(bins_gram(strategy, self), sigma, delta)

    def bound_delta(self, strategy: Strategy, sigma: float, epsilon: float) -> float:
        """By the Gram matrix of the bins' means."""
        return bins_delta(bins_gram(strategy, self), sigma, epsilon)

    def terms(self, strategy: Strategy, sigma: float) -> Bins:
        """Samples of a bin and of noise."""
        return Bins(bins_gram(strategy, self) / sigma**2)

    def rough_epsilons(
        self, method: Method, strategy: Strategy, delta: float
    ) -> list[tuple[Callable[[float], float], float]]:
        """Return rough epsilons of the bound: by few bins, then by all that matter."""
        if type(method) is not Deterministic:
            return []
        gram = bins_gram(strategy, self)
        return [
            (lambda sigma: rough_epsilon(gram, sigma, delta), 20 * ROUGH),
            (lambda sigma: likely_epsilon(gram, sigma, delta), NEAR),
        ]

    def claim_bins(self, alike: bool) -> int:
        """The bins."""
        del alike
        return self.b

    def losses(self, method: Method, strategy: Strategy, sigma: float, variant: int, pld: Any, h: float) -> Any:
        """Return the privacy losses of one draw of a bin."""
        del variant
        if type(method) is Pld:
            return diagonal_composition(pld, self._squares(strategy), sigma, h)
        return gram_composition(pld, [(bins_gram(strategy, self), 1)], sigma, h)

    def _squares(self, strategy: Strategy) -> Floats:
        """(1, b) squared norms of the means of the bins."""
        return np.asarray(epoch_squares(strategy, self.k, self.b).sum(axis=0, keepdims=True))

    def canary_steps(self, count: int, source: NoiseSource) -> Bools:
        """A bin for each canary."""
        return np.asarray(np.arange(self.n)[:, None] % self.b == uniform_integers(source, 1, count, self.b))

    @property
    def means(self) -> int:
        """Return one mean for each bin."""
        return self.b

    def log_ratios(self, exponents: Floats) -> Floats:
        """Log of the mean over bins of e^x."""
        return np.asarray(logsumexp(exponents, axis=0) - np.log(self.b))

    def describe(self) -> str:
        """Return a phrase for people."""
        steps, epochs = counted(self.b, "step"), counted(self.k, "epoch")
        return f"balls in bins, each unit in one of {steps} by a secret draw, the same in each of {epochs}"
