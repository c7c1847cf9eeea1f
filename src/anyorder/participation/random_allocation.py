"""Random allocation: each unit draws one of the steps of an epoch, in each epoch anew."""

from dataclasses import dataclass
from functools import lru_cache, reduce
from math import inf, sqrt
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from anyorder import checks
from anyorder._draws import in_bins, uniform, uniform_integers
from anyorder.accounting.amplification.bins import bins_losses, gram_composition
from anyorder.accounting.amplification.exact import diagonal_composition, epoch_squares, epochs_delta, epochs_epsilon
from anyorder.accounting.amplification.methods import Deterministic, Method, MonteCarlo, Pld
from anyorder.accounting.amplification.mixture import absolute_columns, check_disjoint, support
from anyorder.accounting.amplification.secret_order import DrawLaw, UnitsOf
from anyorder.checks import final
from anyorder.errors import PlanError
from anyorder.formatting import counted
from anyorder.noise import NoiseSource
from anyorder.participation.epoch_shuffle import EpochShuffle
from anyorder.participation.groups import EpochDraws
from anyorder.participation.single_epoch import SingleEpoch
from anyorder.patterns import Asked, Needs, Participation, PerEpoch, Refusals, Word
from anyorder.strategy import Strategy

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_UP = 1 + 2e-10  # roundings of an inverted loss distribution


@final
@dataclass(frozen=True)
class RandomAllocation(EpochDraws):
    """Each unit draws one of the b steps of each epoch by a secret draw, again in each of k epochs.

    Args:
        k: number of epochs.
        b: steps in an epoch; n = k b.
    """

    k: int
    b: int

    kind = "random_allocation"
    words = (Word("random-allocation", options=("method",)),)
    draw_law = DrawLaw.BIN_EACH_EPOCH
    fitted_kinds = ("restarted_blt", "tree")

    @property
    def pattern(self) -> PerEpoch:
        """Return one step of each epoch, any of them."""
        return PerEpoch(self.k, self.b)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Refuse those who appeared before in the epoch of t."""
        return [("a unit may come once in an epoch", (count > 0) & (last // self.b == t // self.b))]

    @classmethod
    def asked(cls, asked: Asked) -> "RandomAllocation":
        """Return the order that draws one of the steps of each epoch."""
        return cls(asked.epochs, asked.steps)

    @property
    def needs(self) -> Needs:
        """A split that is drawn in each epoch."""
        return Needs("a random split in each epoch", secrecy=True, batches="varying size")

    def without_draws(self) -> Participation:
        """The steps known: shuffled epochs."""
        return SingleEpoch(self.n) if self.k == 1 else EpochShuffle(self.k, self.b)

    def units_of(self, size: int, source: NoiseSource) -> UnitsOf:
        """A step for each unit, one uniform word of (epoch, unit)."""

        @lru_cache(maxsize=1)
        def allocated(epoch: int) -> list[Integers]:
            own = source.of(epoch * self.b).derive(b"allocation")
            return in_bins(uniform(own, epoch, size, self.b), self.b)

        return lambda t: allocated(t // self.b)[t % self.b].copy()

    def check_mechanism(self, strategy: Strategy) -> None:
        """Epochs that do not overlap: draws are made in each."""
        first, last = support(strategy)
        if (first // self.b != last // self.b).any():
            raise PlanError(
                f"RandomAllocation, which draws again in each epoch, is accounted for a C whose epochs of b="
                f"{self.b} steps do not overlap: independent noise, or noise that restarts with each "
                f"epoch (RestartedBLT, a Tree with restarts), got {strategy!r}; or take BallsInBins, which is "
                "accounted with any C"
            )

    @property
    def most_bands(self) -> int:
        """Return the most bands: those within an epoch."""
        return min(self.b, self.n)

    def check_method(self, method: Method, strategy: Strategy) -> None:
        """No samples; the loss distribution where columns do not overlap."""
        match method:
            case Pld():
                check_disjoint(strategy)
            case MonteCarlo():
                raise PlanError(
                    "no samples are drawn for RandomAllocation, whose epochs are separate mechanisms, with "
                    "bounds that compose: take method 'bound'"
                )
            case Deterministic():
                pass
            case _:
                assert_never(method)

    def exact_epsilon(self, strategy: Strategy, sigma: float, delta: float) -> float:
        """Return the exact epsilon of one draw in each epoch, whose means are orthogonal."""
        return epochs_epsilon(epoch_squares(strategy, self.k, self.b), sigma, delta)

    def exact_delta(self, strategy: Strategy, sigma: float, epsilon: float) -> float:
        """Return the exact delta of one draw in each epoch, whose means are orthogonal."""
        return epochs_delta(epoch_squares(strategy, self.k, self.b), sigma, epsilon)

    def bound_epsilon(self, strategy: Strategy, sigma: float, delta: float) -> float:
        """By the Gram matrices of the epochs, composed."""
        losses, lost = _epoch_losses(strategy, self, sigma)
        return inf if delta <= 2 * lost else float(losses.get_epsilon_for_delta(delta - lost)) * _UP

    def bound_delta(self, strategy: Strategy, sigma: float, epsilon: float) -> float:
        """By the Gram matrices of the epochs, composed."""
        losses, lost = _epoch_losses(strategy, self, sigma)
        return min(1.0, max(0.0, float(losses.get_delta_for_epsilon(epsilon))) * _UP + lost)

    def terms(self, strategy: Strategy, sigma: float) -> Any:
        """None."""
        del strategy, sigma
        raise PlanError(
            "RandomAllocation is accounted without samples: its epochs are k separate mechanisms, whose "
            "bounds compose; take method 'bound'"
        )

    def claim_bins(self, alike: bool) -> int:
        """Return the bins of an epoch; of each epoch, where it has means of its own and takes as long as the first."""
        return self.b if alike else self.b * self.k

    @property
    def transforms(self) -> int:
        """So many for each epoch."""
        return 64 * self.k

    def losses(self, method: Method, strategy: Strategy, sigma: float, variant: int, pld: Any, h: float) -> Any:
        """Return the privacy losses of one draw in each epoch, composed."""
        del variant
        if type(method) is Pld:
            return diagonal_composition(pld, epoch_squares(strategy, self.k, self.b), sigma, h)
        return gram_composition(pld, epoch_grams(strategy, self), sigma, h)

    def canary_steps(self, count: int, source: NoiseSource) -> Bools:
        """A step of each epoch for each canary."""
        drawn = np.repeat(uniform_integers(source, self.k, count, self.b), self.b, axis=0)
        return np.asarray(np.arange(self.n)[:, None] % self.b == drawn)

    def log_ratios(self, exponents: Floats) -> Floats:
        """Sum over epochs of the log of the mean over steps of e^x."""
        epochs = exponents.reshape(self.k, self.b, -1)
        return np.asarray((logsumexp(epochs, axis=1) - np.log(self.b)).sum(axis=0))

    def describe(self) -> str:
        """Return a phrase for people."""
        steps, epochs = counted(self.b, "step"), counted(self.k, "epoch")
        return f"random allocation, each unit in one of {steps} by a secret draw, again in each of {epochs}"


@lru_cache(maxsize=2)
def _epoch_losses(strategy: Strategy, participation: RandomAllocation, sigma: float) -> tuple[Any, float]:
    """The loss distribution of all epochs, which do not overlap, composed; and what transforms may take from delta."""
    pld = checks.optional(
        "dp_accounting.pld.privacy_loss_distribution", extra="amplified", purpose="accounting for epochs of bins"
    )
    grams = epoch_grams(strategy, participation)
    largest = max(float(gram.max()) for gram, _ in grams)
    interval = min(max(sqrt(largest) / sigma / 400, 1e-4), 0.1)  # pessimistic, however coarse
    parts = [bins_losses(pld, gram, sigma, interval).self_compose(times) for gram, times in grams]
    return reduce(lambda one, other: one.compose(other), parts), 64 * participation.k * 2.0**-53


def epoch_grams(strategy: Strategy, participation: RandomAllocation) -> list[tuple[Floats, int]]:
    """(Gram matrix of an epoch's columns of |C|, epochs that have it)."""
    k, b = participation.k, participation.b
    grams: dict[bytes, tuple[Floats, int]] = {}
    for epoch in range(k):
        columns = absolute_columns(strategy, np.arange(epoch * b, (epoch + 1) * b))
        gram = columns.T @ columns
        known, times = grams.get(gram.tobytes(), (gram, 0))
        grams[gram.tobytes()] = known, times + 1
    return list(grams.values())
