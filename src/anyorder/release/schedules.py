"""Which norm units are clipped at, and when: the plan's own throughout, or one that follows what was released."""

from dataclasses import dataclass
from math import exp, sqrt
from typing import Any, ClassVar

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import CheckpointError, PlanError, TrainingError
from anyorder.plan.plan import Plan
from anyorder.release.ranks import Ranks

RANGE = 2.0**20
SMALLEST, LARGEST = 2.0**-17, 2.0**60  # of a plan's clip norm; see `clipping/norms.py`


@final
@dataclass(frozen=True)
class FixedNorm:
    """The plan's clip norm in every step."""


@final
@dataclass(frozen=True)
class Adaptive:
    """The clip norm follows a quantile of the units' norms, at no privacy beyond the plan's [Andrew et al. 2021].

    In period k units are clipped to c_k. With a = share and C the plan's clip norm, c_0 = C, unit u adds the vector of
    d + 1 numbers

        v_u = ( sqrt(1 - a^2) C g_u / max(||g_u||, c_k),  a C s_u ),    s_u = 1 if ||g_u|| > c_k else 0

    to the sum of a step, which gets the plan's noise in all d + 1 coordinates and is divided by the batch size. What
    is released, times c_k / (C sqrt(1 - a^2)), is the gradient. The last coordinates of the K steps of a period, with
    the sum S, tell which part of the units was above c_k, and at the period's end

        above = S / (a C K),    c_{k+1} = c_k exp( learning_rate (min(max(above, 0), 1) - (1 - quantile)) )

    c_k stays between 2^-20 and 2^20 of C.

    Guarantee: the plan's own. ||v_u||^2 <= (1 - a^2) C^2 + a^2 C^2 = C^2 whatever c_k is, and c_k is a function of
    releases of earlier steps alone. So step t adds an adaptively chosen function of the data, of norm at most C for
    each unit, to which the Gaussian matrix mechanism gives the same mu as to functions fixed beforehand [Denisov et
    al. 2022, Theorem 2.1]; what is done with the releases is post-processing. The c_k are public, as gradients are.
    A unit whose gradient is zero adds nothing, as `zero-out` neighbours have it; the paper counts units below c_k,
    less a half each, and there it would add to the count.

    To count costs noise: what the gradients have of it grows by 1 / sqrt(1 - a^2).

    Periods end where the strategy's noise restarts, `Strategy.restart_period`: within a block noise is made to cancel
    that of earlier steps, and once scaled by another c_k it would not. Batches of fewer units than the plan's batch
    size make the part above look smaller.

    Here `clip_norm` is c_k, and vectors are c_k / C times those above; the engine does the rest.

    Attributes:
        quantile: part of the units whose norm is to be at most the clip norm.
        learning_rate: of the logarithm of the norm, at most 10; the paper takes 0.2, at every step.
        share: a, part of the norm C that the count has.
        every: steps in a period, a multiple of the strategy's restart period; None for that period itself: an epoch
            of restarted buffers, one step of independent noise.
    """

    quantile: float = 0.5
    learning_rate: float = 1.0
    share: float = 0.1
    every: int | None = None

    COUNT: ClassVar[str] = ".above"
    """Name of the sum of the last coordinate. No parameter's name begins with a dot."""

    def __post_init__(self) -> None:
        checks.probability("quantile", self.quantile)
        checks.positive("learning_rate", checks.real("learning_rate", self.learning_rate, low=0.0, high=10.0))
        checks.probability("share", self.share)
        if self.every is not None:
            checks.integer("every", self.every, low=1)

    @property
    def gradient_share(self) -> float:
        """sqrt(1 - a^2), part of the norm C that the gradient has."""
        return sqrt(1 - self.share**2)

    def period(self, plan: Plan) -> int:
        """Steps in a period, K.

        Raises: PlanError where the plan does not let the norm move.
        """
        restart = plan.strategy.restart_period
        if plan.grid is not None:
            raise PlanError(
                "Adaptive() moves the clip norm, and the exact integers of secure mode are made for one that stays; "
                "take Flat(), or plan without ao.mechanism(secure=True)"
            )
        if not SMALLEST <= plan.clip_norm <= LARGEST:
            raise PlanError(
                f"under Adaptive() clip_norm must be from {SMALLEST:.3g} to {LARGEST:.3g}, so that float32 has "
                f"room for norms around it, got {plan.clip_norm}"
            )
        if restart is None:
            raise PlanError(
                f"Adaptive() sets the clip norm again where the noise restarts; that of {plan.strategy!r} does not: "
                "noise of earlier steps, scaled by another norm, would no longer cancel. Plan with "
                "mechanism='independent' or, for shuffled epochs, with what ao.optimize.fit('restarted_blt', ..) "
                "gives; or take Flat()"
            )
        period = restart if self.every is None else self.every
        if period % restart:
            raise PlanError(
                f"every must be a multiple of the {restart} steps after which the noise restarts, got {period}"
            )
        return period

    def following(self, current: float, planned: float, total: float, period: int) -> float:
        """The norm c of the next period, after one at norm `current`.

        Args:
            current: c_k.
            planned: C.
            total: S, in units of the gradient: sum of the period's released counts times c_k / (C sqrt(1 - a^2)).
            period: K.
        """
        one = self.share * current / self.gradient_share  # what a unit above c adds
        above = total / (one * period)
        off = min(max(above, 0.0), 1.0) - (1 - self.quantile)
        moved = current * exp(self.learning_rate * off)
        return min(max(moved, planned / RANGE), planned * RANGE)

    def describe(self) -> str:
        """Return a sentence for people."""
        return f"adaptive: the clip norm follows the {self.quantile:g} quantile of the gradients' norms"


Schedule = FixedNorm | Adaptive
"""Closed: a norm in force that is no function of earlier releases would be a release itself."""


class MovingNorm:
    """The norm c at which units are clipped now under `Adaptive`, and how sums cut there become those of the plan's
    noise.

    The units' vectors have one more coordinate, the count, and norm c; times C / c they have norm C; noise is added;
    and times c / (C sqrt(1 - share^2)) the gradient is in its own units again. Nothing but released numbers enters
    here, so that c is public.

    Attributes:
        current: c.

    Raises: PlanError where the plan does not let the clip norm move.
    """

    def __init__(self, plan: Plan, rule: Adaptive) -> None:
        self._rule, self._period = rule, rule.period(plan)
        self._planned, self._batch_size = plan.clip_norm, plan.batch_size
        self.current = plan.clip_norm
        self._sum = 0.0  # of the period's released counts, in units of the gradient
        self._steps = 0  # whose counts are in

    @property
    def factor(self) -> float:
        """C / c: what makes of a sum of vectors of norm c one of vectors of the planned norm."""
        return self._planned / self.current

    @property
    def divisor(self) -> float:
        """What a noised sum is divided by: the batch size, and what takes the gradient back to its own units."""
        return self._batch_size * (self._planned * self._rule.gradient_share / self.current)

    def record(self, step: int, count: float, ranks: Ranks) -> None:
        """Take the released count of a step; set c anew where the step is the last of a period."""
        self._sum += count
        self._steps = step + 1
        if (step + 1) % self._period:
            return
        following = self._rule.following(self.current, self._planned, self._sum, self._period)
        # One rank's number for all: exp may differ in its last bit between machines.
        self.current = ranks.from_first(following)
        self._sum = 0.0

    def check_step(self, step: int) -> None:
        """Refuse to go on where a step was broken off between its release and its count: c would be another."""
        if self._steps != step:
            raise TrainingError(
                f"the count of step {self._steps} is missing: the step was broken off after its release; resume from "
                "the last checkpoint in a new engine"
            )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"rule": repr(self._rule), "current": self.current, "sum": self._sum, "steps": self._steps}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; see `check_schedule`."""
        self.current, self._sum, self._steps = saved["current"], saved["sum"], saved["steps"]


def check_schedule(norm: MovingNorm | None, saved: dict[str, Any] | None) -> None:
    """Raise CheckpointError if the state is another rule's; None is a clip norm that does not move."""
    own = None if norm is None else norm.state_dict()["rule"]
    other = None if saved is None else saved["rule"]
    if own != other:
        raise CheckpointError(
            f"the checkpoint was written under rule={other or 'one with a fixed clip norm'}, and this run has "
            f"{own or 'one with a fixed clip norm'}; resume with the rule of the run"
        )
