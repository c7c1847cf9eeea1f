"""What an order by secret random draws says for itself, so that accounting, samplers and audits need not know which.

The orders are in `anyorder.participation`, one file each. Each of them is one of two:

    SampledOrder      a unit's steps are so many sampled Gaussian mechanisms beside each other: its curve is `Sampled`
    AmplifiedOrder    the pair of `anyorder.accounting.amplification.mixture`, by one of several methods: `Amplified`
"""

from abc import abstractmethod
from collections.abc import Callable
from enum import Enum
from math import ceil, inf
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.accounting.amplification.methods import Deterministic, Method
from anyorder.errors import PlanError
from anyorder.noise import NoiseSource
from anyorder.patterns import Participation, Rule
from anyorder.strategy import Strategy

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ROUGH = 1e-3
"""Of the target epsilon: how near a first search by a rough number goes."""
NEAR = 5e-5
"""The same for a number that is nearly right."""

UnitsOf = Callable[[int], Integers]
"""(t) -> the units of step t, ascending, perhaps none; a fresh array."""


class DrawLaw(Enum):
    """How a unit's steps are drawn, for tests of batches against the law that they should have."""

    ONE_BIN = "one of b bins, the same in all epochs"
    BIN_EACH_EPOCH = "one of b bins, drawn again in each epoch"
    EACH_STEP = "a draw in each step, or in each step of the unit's group"
    CUT_BATCHES = "a draw in each step of the unit's group, and batches cut to a size"
    SEPARATED = "a draw in each step that is far enough from the unit's last"


class SecretOrder(Rule):
    """An order whose steps are drawn in secret, from which its privacy comes.

    Each unit has random draws of its own, independent of all others'. `pattern` is what a unit's steps may be if its
    draws became known: what is left of the claim then.

    Attributes:
        draw_law: how its draws are made.
        draws_last: whether draws decide more than one step, so that a copy of a run shares them with the run.
        takes_selection: whether it is accounted for with a selection of rows of tables.
        reads_columns: whether its claim reads the columns of C, which takes time.
        fitted_kinds: the kinds of strategy that are fitted to its own claim, beside independent noise.
    """

    draw_law: ClassVar[DrawLaw]
    draws_last: ClassVar[bool] = False
    takes_selection: ClassVar[bool] = False
    reads_columns: ClassVar[bool] = True
    fitted_kinds: ClassVar[tuple[str, ...]] = ()

    @property
    def secret(self) -> bool:
        """True."""
        return True

    def covers(self, actual: Participation) -> bool:
        """Itself alone: of another order no draws are known."""
        return self == actual

    # -- who is in a step --------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def rate(self) -> float:
        """The expected part of the units that are drawn in a step, before batches are cut; in the long run."""

    @abstractmethod
    def units_of(self, size: int, source: NoiseSource) -> UnitsOf:
        """Who is in each step, among units of numbers 0, .., size - 1: a function of the source and the step alone."""

    @property
    def most_units(self) -> int | None:
        """The most units of a step, where batches are cut; None where all may come."""
        return None

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which a unit comes once in expectation, where they divide n; else n."""
        epoch = ceil(1 / self.rate)
        return self.n if self.n % epoch else epoch

    def check_size(self, size: int) -> int:
        """The number of units, if the order may have so many. Raises: ArgumentError."""
        return checks.integer("num_units", size, low=1)

    def with_cycle(self, cycle: int) -> "SecretOrder":
        """The same from as many groups, of one group, where `cycle_is_chosen`: as many units in a step are expected."""
        raise PlanError(f"no groups come by turns in {self.describe()}, got cycle={cycle}")

    # -- which mechanisms fit ----------------------------------------------------------------------------------------

    @abstractmethod
    def check_mechanism(self, strategy: Strategy) -> None:
        """Refuse a C that the order is not accounted with. Raises: PlanError with the reason."""

    @property
    def bins(self) -> int | None:
        """The bins that a unit's steps are like; None where no two of them share anything under a C that fits."""
        return None

    @property
    def most_bands(self) -> int:
        """The most bands of a C that fits."""
        return self.n

    def noise_alone(self, epsilon: float, delta: float) -> float:
        """Sigma for columns of norm 1, where `bins` is None: near what the claim needs, for fits."""
        raise PlanError(f"fits by a claim are for orders that are drawn in secret, got {self.describe()}")

    # -- what an audit's canaries do ---------------------------------------------------------------------------------

    @abstractmethod
    def canary_steps(self, count: int, source: NoiseSource) -> Bools:
        """(n, count) in which steps each of `count` canaries is, by the law of the order, with draws of their own."""

    @property
    def means(self) -> int:
        """How many means m_S the log likelihood ratio is made of: one a step, or one a group of steps that go together.

        Step t adds to mean t mod `means`.
        """
        return self.n

    @abstractmethod
    def log_ratios(self, exponents: Floats) -> Floats:
        """(count,) log of the mixture's density over that of the noise alone.

        Args:
            exponents: (means, count) (<m, y> - |m|^2 / 2) / sigma^2 of each mean and canary.
        """


class SampledOrder(SecretOrder):
    """A secret order under which a unit meets so many sampled Gaussian mechanisms, all alike, one after another.

    Attributes:
        neighbours: the one relation that it is accounted for.
    """

    neighbours: ClassVar[str]

    @abstractmethod
    def sampled_parts(self, strategy: Strategy, sigma: float) -> tuple[float, float, int]:
        """(deviation over sensitivity, probability, steps) of those mechanisms.

        Args:
            strategy: that `check_mechanism` let pass.
            sigma: noise std over clip norm, above 0.
        """

    @abstractmethod
    def least_noise(self, strategy: Strategy, epsilon: float, delta: float) -> float:
        """The smallest noise std over clip norm that keeps (epsilon, delta), rounded up."""


class AmplifiedOrder(SecretOrder):
    """A secret order whose curve is found by a method: the pair of `mixture`, bounded from above.

    `exact_` is of method "pld", `bound_` of "bound"; without a bound of its own, that of known batches is left.
    """

    def default_method(self, strategy: Strategy) -> Method:
        """The method of a plan that names none, that is "auto"."""
        del strategy
        return Deterministic()

    @abstractmethod
    def check_method(self, method: Method, strategy: Strategy) -> None:
        """Refuse a method that finds nothing for this order and C. Raises: PlanError."""

    def exact_epsilon(self, strategy: Strategy, sigma: float, delta: float) -> float:
        """Epsilon at delta by the loss distribution, both directions, at or above the true one."""
        raise self._no_losses()

    def exact_delta(self, strategy: Strategy, sigma: float, epsilon: float) -> float:
        """Delta at epsilon by the loss distribution, both directions, at or above the true one."""
        raise self._no_losses()

    def bound_epsilon(self, strategy: Strategy, sigma: float, delta: float) -> float:
        """Epsilon at delta by a proven bound; infinite where nothing is known but what known batches give."""
        del strategy, sigma, delta
        return inf

    def bound_delta(self, strategy: Strategy, sigma: float, epsilon: float) -> float:
        """Delta at epsilon by a proven bound; 1 where nothing is known but what known batches give."""
        del strategy, sigma, epsilon
        return 1.0

    def terms(self, strategy: Strategy, sigma: float) -> Any:
        """What draws the samples of method "monte_carlo": `Bins` or `SeparatedTerms`. Raises: PlanError for none."""
        raise PlanError(f"samples are drawn for balls in bins and for sampling with separation, got {self!r}")

    def rough_epsilons(
        self, method: Method, strategy: Strategy, delta: float
    ) -> list[tuple[Callable[[float], float], float]]:
        """(epsilon at sigma as far as it is known quickly, how near a search by it goes), the quickest first."""
        del method, strategy, delta
        return []

    def claim_bins(self, alike: bool) -> int:
        """Bins that the claim goes through: its cost, for files of strangers.

        Args:
            alike: whether the columns of C are all alike.
        """
        del alike
        return 1

    # -- as a part of a composition ----------------------------------------------------------------------------------

    @property
    def variants(self) -> tuple[int, ...]:
        """The cases of which the worst counts, such as sizes of groups; else a single one, 0."""
        return (0,)

    @property
    def transforms(self) -> int:
        """Mechanisms that its own loss distribution is composed of, beyond one."""
        return 0

    @abstractmethod
    def losses(self, method: Method, strategy: Strategy, sigma: float, variant: int, pld: Any, h: float) -> Any:
        """The loss distribution of dp-accounting, both directions, at or above the true one in every delta.

        Args:
            method: not by samples, which hold for one delta.
            variant: of `variants`.
            pld: the module dp_accounting.pld.privacy_loss_distribution.
            h: interval of the grid.
        Returns: None where there is none, and known batches say as much.
        """

    def _no_losses(self) -> PlanError:
        return PlanError(f"no loss distribution is known of {type(self).__name__}")
