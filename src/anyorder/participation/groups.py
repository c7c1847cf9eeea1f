"""What secret orders share: groups of units that come by turns, and one draw among the steps of an epoch."""

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder._draws import tossed_ratios, uniforms
from anyorder.accounting import poisson
from anyorder.accounting.amplification.methods import Deterministic, Method, Pld
from anyorder.accounting.amplification.mixture import reach
from anyorder.accounting.amplification.secret_order import AmplifiedOrder, SecretOrder
from anyorder.noise import NoiseSource
from anyorder.participation.fixed_order import FixedOrder
from anyorder.participation.single_epoch import SingleEpoch
from anyorder.patterns import Listed, Participation, Refusals
from anyorder.strategy import Strategy

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def probability_of(value: float) -> float:
    """A sampling probability, in (0, 1]. Raises: ArgumentError."""
    found = checks.real("sampling_probability", value, low=0.0, high=1.0)
    return checks.positive("sampling_probability", found)


def stride_clause(b: int, t: int, last: Integers, count: Integers) -> tuple[str, Bools]:
    """Those whose last step lies no multiple of b before t: of another group, or bin, than that of t."""
    return (f"a unit's steps must lie multiples of b={b} apart", (count > 0) & ((t - last) % b != 0))


def groups_in_turn(n: int, count: int, cycle: int) -> Bools:
    """(n, count) whether step t is of the group of unit c, which is c mod cycle."""
    return np.asarray(np.arange(n)[:, None] % cycle == np.arange(count) % cycle)


def cyclic_without_draws(n: int, cycle: int) -> Participation:
    """Every unit in every step of its group."""
    rounds = -(-n // cycle)
    return SingleEpoch(n) if rounds == 1 else FixedOrder(n, rounds, cycle)


class GroupDraws(SecretOrder):
    """Units lie in `cycle` groups, by turns; each unit of a step's group is in it by a secret draw."""

    cycle: int
    sampling_probability: float

    @property
    def pattern(self) -> Listed:
        """Return one pattern for each group."""
        return Listed.strided(self.n, self.cycle)

    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Refuse those of another group than that of t."""
        return [stride_clause(self.cycle, t, last, count)]

    def noise_alone(self, epsilon: float, delta: float) -> float:
        """Return the noise of Poisson sampling of a group's steps; where batches are cut, it is near."""
        return poisson.calibrate_poisson(epsilon, delta, self.sampling_probability, -(-self.n // self.cycle))

    @abstractmethod
    def taken_probabilities(self, count: int) -> Floats:
        """(count,) the probability of unit c to be in a step of its group, with any others drawn."""

    def canary_steps(self, count: int, source: NoiseSource) -> Bools:
        """A draw of its own for each step of its group; canary c lies in group c mod cycle."""
        mine = groups_in_turn(self.n, count, self.cycle)
        return np.asarray(mine & (uniforms(source, self.n, count) < self.taken_probabilities(count)))

    def log_ratios(self, exponents: Floats) -> Floats:
        """Sum over a group's steps of log(1 - q + q e^x)."""
        count = exponents.shape[1]
        each = tossed_ratios(exponents, self.taken_probabilities(count))
        return np.asarray(np.where(groups_in_turn(self.n, count, self.cycle), each, 0.0).sum(axis=0))


class EpochDraws(AmplifiedOrder):
    """Each unit is in one of the b steps of an epoch, by a secret draw, in each of k epochs."""

    k: int
    b: int

    absence_moves_others = False
    draws_last = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", checks.integer("k", self.k, low=1))
        object.__setattr__(self, "b", checks.integer("b", self.b, low=1))

    @property
    def n(self) -> int:  # type: ignore[override]
        """K b."""
        return self.k * self.b

    @property
    def rate(self) -> float:
        """Return the rate of a unit: one step of b."""
        return 1 / self.b

    @property
    def steps_per_epoch(self) -> int:
        """B."""
        return self.b

    @property
    def bins(self) -> int:
        """The steps of an epoch."""
        return self.b

    def default_method(self, strategy: Strategy) -> Method:
        """The loss distribution where columns do not overlap, else the bound."""
        return Pld() if reach(strategy) == 1 else Deterministic()
