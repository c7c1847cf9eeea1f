"""The norm at which a run cuts its units now: the plan's, or one that follows a quantile of their norms."""

import math
from typing import Any, Protocol

from anyorder.errors import CheckpointError, PlanError, TrainingError
from anyorder.plan import Plan
from anyorder.release.ranks import Ranks

__all__ = ["ClipNorm", "Schedule"]

RANGE = 2.0**20
SMALLEST, LARGEST = 2.0**-17, 2.0**60  # of a plan's clip norm; see `norms.py` for what is below


class Schedule(Protocol):
    """Numbers of a clip norm that moves: those of `anyorder.clipping.Adaptive`, where their meaning stands."""

    @property
    def quantile(self) -> float: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def share(self) -> float: ...
    @property
    def gradient_share(self) -> float: ...
    @property
    def every(self) -> int | None: ...


class ClipNorm:
    """The norm c at which units are cut now, and how sums cut there become those that the plan's noise is for.

    Without a schedule c is the plan's clip norm C. With one the units' vectors have one more coordinate, the count, and
    norm c; times C / c they have norm C; noise is added; and times c / (C sqrt(1 - share^2)) the gradient is in its own
    units again. Nothing but released numbers enters here, so that c is public.

    Attributes:
        current: c.

    Raises: PlanError where the plan does not let the clip norm move.
    """

    def __init__(self, plan: Plan, schedule: Schedule | None) -> None:
        self._rule = schedule
        self._planned, self._batch_size = plan.clip_norm, plan.batch_size
        self._period = 0 if self._rule is None else _period(plan, self._rule)
        self.current = plan.clip_norm
        self._sum = 0.0  # of the period's released counts, in units of the gradient
        self._steps = 0  # whose counts are in

    @property
    def divisor(self) -> float:
        """What a noised sum is divided by: the batch size, and what takes the gradient back to its own units."""
        if self._rule is None:
            return self._batch_size
        return self._batch_size * (self._planned * self._rule.gradient_share / self.current)

    def planned(self, own: list[Any]) -> list[Any]:
        """Sums of vectors of norm c as sums of vectors of the planned norm."""
        return own if self._rule is None else [x * (self._planned / self.current) for x in own]

    def record(self, step: int, count: float, group: Ranks) -> None:
        """Take the released count of a step, under a schedule; set c anew where the step is the last of a period."""
        assert self._rule is not None
        self._sum += count
        self._steps = step + 1
        if (step + 1) % self._period:
            return
        one = self._rule.share * self.current / self._rule.gradient_share  # what a unit above c adds
        above = self._sum / (one * self._period)
        off = min(max(above, 0.0), 1.0) - (1 - self._rule.quantile)
        moved = self.current * math.exp(self._rule.learning_rate * off)
        # One rank's number for all: exp may differ in its last bit between machines.
        self.current = group.from_first(min(max(moved, self._planned / RANGE), self._planned * RANGE))
        self._sum = 0.0

    def check_step(self, step: int) -> None:
        """Refuse to go on where a step was broken off between its release and its count: c would be another."""
        if self._rule is not None and self._steps != step:
            raise TrainingError(
                f"the count of step {self._steps} is missing: the step was broken off after its release; resume from "
                "the last checkpoint in a new engine"
            )

    def state_dict(self) -> dict[str, Any] | None:
        """For a checkpoint."""
        if self._rule is None:
            return None
        return {"rule": repr(self._rule), "current": self.current, "sum": self._sum, "steps": self._steps}

    def check(self, saved: dict[str, Any] | None) -> None:
        """Raise CheckpointError if the state is another rule's."""
        own, other = (None if state is None else state["rule"] for state in (self.state_dict(), saved))
        if own != other:
            raise CheckpointError(
                f"the checkpoint was written under rule={other or 'one with a fixed clip norm'}, and this run has "
                f"{own or 'one with a fixed clip norm'}; resume with the rule of the run"
            )

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        """Go on where `state_dict` was taken; see `check`."""
        if saved is not None:
            self.current, self._sum, self._steps = saved["current"], saved["sum"], saved["steps"]


def _period(plan: Plan, rule: Schedule) -> int:
    restart = plan.strategy.restart_period
    if plan.grid is not None:
        raise PlanError(
            "Adaptive() moves the clip norm, and the exact integers of secure mode are made for one that stays; take "
            "Flat(), or plan without secure="
        )
    if not SMALLEST <= plan.clip_norm <= LARGEST:
        raise PlanError(
            f"under Adaptive() clip_norm must be from {SMALLEST:.3g} to {LARGEST:.3g}, so that float32 has "
            f"room for norms around it, got {plan.clip_norm}"
        )
    if restart is None:
        raise PlanError(
            f"Adaptive() sets the clip norm anew where the noise restarts, and that of {plan.strategy!r} does not: "
            "noise of earlier steps, scaled by another norm, would no longer cancel. Plan with mechanism='independent' "
            "or, for shuffled epochs, with what ao.optimize.fit('restarted_blt', ..) gives; or take Flat()"
        )
    period = restart if rule.every is None else rule.every
    if period % restart:
        raise PlanError(f"every must be a multiple of the {restart} steps after which the noise restarts, got {period}")
    return period
