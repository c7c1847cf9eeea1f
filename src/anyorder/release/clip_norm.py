"""The norm at which a run cuts its units now: the plan's, or one that follows a quantile of their norms."""

from typing import Any, assert_never

from anyorder.errors import CheckpointError, TrainingError
from anyorder.plan.plan import Plan
from anyorder.release.ranks import Ranks
from anyorder.release.schedules import Adaptive, Fixed, Schedule

__all__ = ["ClipNorm"]


class ClipNorm:
    """The norm c at which units are cut now, and how sums cut there become those that the plan's noise is for.

    Under `Fixed` c is the plan's clip norm C. Under `Adaptive` the units' vectors have one more coordinate, the count,
    and norm c; times C / c they have norm C; noise is added; and times c / (C sqrt(1 - share^2)) the gradient is in its
    own units again. Nothing but released numbers enters here, so that c is public.

    Attributes:
        current: c.

    Raises: PlanError where the plan does not let the clip norm move.
    """

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        match schedule:
            case Fixed():
                self._moving, self._period = None, 0
            case Adaptive():
                self._moving, self._period = schedule, schedule.period(plan)
            case _:
                assert_never(schedule)
        self._planned, self._batch_size = plan.clip_norm, plan.batch_size
        self.current = plan.clip_norm
        self._sum = 0.0  # of the period's released counts, in units of the gradient
        self._steps = 0  # whose counts are in

    @property
    def divisor(self) -> float:
        """What a noised sum is divided by: the batch size, and what takes the gradient back to its own units."""
        if self._moving is None:
            return self._batch_size
        return self._batch_size * (self._planned * self._moving.gradient_share / self.current)

    def planned(self, own: list[Any]) -> list[Any]:
        """Sums of vectors of norm c as sums of vectors of the planned norm."""
        return own if self._moving is None else [x * (self._planned / self.current) for x in own]

    def record(self, step: int, count: float, group: Ranks) -> None:
        """Take the released count of a step, under `Adaptive`; set c anew where the step is the last of a period."""
        assert self._moving is not None
        self._sum += count
        self._steps = step + 1
        if (step + 1) % self._period:
            return
        following = self._moving.following(self.current, self._planned, self._sum, self._period)
        # One rank's number for all: exp may differ in its last bit between machines.
        self.current = group.from_first(following)
        self._sum = 0.0

    def check_step(self, step: int) -> None:
        """Refuse to go on where a step was broken off between its release and its count: c would be another."""
        if self._moving is not None and self._steps != step:
            raise TrainingError(
                f"the count of step {self._steps} is missing: the step was broken off after its release; resume from "
                "the last checkpoint in a new engine"
            )

    def state_dict(self) -> dict[str, Any] | None:
        """For a checkpoint."""
        if self._moving is None:
            return None
        return {"rule": repr(self._moving), "current": self.current, "sum": self._sum, "steps": self._steps}

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
