"""What every learner does with its release, whatever it makes of what comes back: steps in order, files, the claim."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from anyorder.certificate import Certificate, Evidence
from anyorder.errors import CheckpointError, TrainingError
from anyorder.plan import Plan
from anyorder.release import Release

__all__ = ["OnePass"]

Floats = NDArray[np.float64]


class OnePass(ABC):
    """Abstract: sums of what was released so far, the iterates that were played, and the release they are of.

    Attributes:
        plan: what is run.
        release: carries the plan out.
        extra: values of the caller's own, in each checkpoint.
        theta: the iterate that the next step plays.
    """

    kind: ClassVar[str]
    """Of the checkpoint."""
    word: ClassVar[str]
    """What the learner is called in messages."""

    plan: Plan
    release: Release
    extra: dict[str, Any]
    theta: Any

    def _begin(
        self, size: int, totals: Floats, played: Floats, checkpoint: str | Path | None, key: bytes | None
    ) -> None:
        """A new run, or the one of the checkpoint; `totals` and `played` are zeros of the shapes of both sums.

        Args:
            size: elements of what a step releases.
        """
        self._t, self._sum, self._played = 0, totals, played
        self.release = Release(self.plan, size, key=key, checkpoint=checkpoint)
        try:
            self.extra = {}
            if self.release.steps_taken or self.release.extra:
                self._restore(self.release.extra)
            self._begun()
            self.release.on_release(self._receive)  # the first one: the others cannot come between it and the step
            if checkpoint is not None and not self.release.extra:
                self.save()  # from here on the key is on the disk, and with it what a step is made again by
        except BaseException:
            self.release.close()
            raise

    @abstractmethod
    def _begun(self) -> None:
        """The sums are those of the run: make of them what is kept beside."""

    @abstractmethod
    def _receive(self, step: int, private: Floats) -> None:
        """Take in what was released: nothing else ever reaches the state."""

    @abstractmethod
    def _settings(self) -> str:
        """What a checkpoint must share with the learner that goes on from it."""

    def _in_order(self, step: int) -> None:
        if step != self._t:
            raise TrainingError(f"step {step} was released, and the learner is at step {self._t}")

    def _check(self) -> None:
        if self._t != self.release.steps_taken:
            raise TrainingError(
                f"step {self._t} was broken off after its release, and the model lacks it. Make a new learner from the "
                "checkpoint, which goes on before it"
            )

    @property
    def steps_taken(self) -> int:
        """Number of steps taken; t - 1 where the next one is the paper's t."""
        return self._t

    @property
    def average(self) -> Floats:
        """The mean of theta_1 .. theta_t, the iterates that were played; theta_1 before the first step.

        What bounds on the risk are of [Kairouz et al. 2021, Theorem 5.3, by online-to-batch].
        """
        return self._played / self._t if self._t else np.array(self.theta)

    def certificate(self) -> Certificate:
        """The claim of this run, for everybody: `save` it, and check it with `anyorder verify`. It names nobody."""
        return self.release.certificate()

    def evidence(self) -> Evidence:
        """Who took part in which step: what backs the certificate. As secret as the data."""
        return self.release.evidence()

    def save(self) -> None:
        """Write the checkpoint: one file, replaced atomically. It holds the noise key and the record of who took part.

        Raises: CheckpointError, TrainingError where a step was broken off; the file of the last save is intact.
        """
        self._check()
        self.release.save({
            "kind": self.kind, "settings": self._settings(), "step": self._t, "sum": self._sum, "played": self._played,
            "extra": self.extra,
        })  # fmt: skip

    def _restore(self, state: dict[str, Any]) -> None:
        if state.get("kind") != self.kind:
            raise CheckpointError(f"the checkpoint is of another front end than {self.word}; choose another file")
        if state["settings"] != self._settings():
            raise CheckpointError(
                f"the checkpoint is of a learner with other settings, {state['settings']}; and here they are "
                f"{self._settings()}: go on with those of the run, or choose another file"
            )
        if state["step"] != self.release.steps_taken:
            raise CheckpointError(
                f"the checkpoint has a learner at step {state['step']} and its release at {self.release.steps_taken}: "
                "steps were taken without the learner; choose another file"
            )
        self._t = int(state["step"])
        self._sum, self._played = state["sum"].numpy().copy(), state["played"].numpy().copy()
        self.extra = state["extra"]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Neither copied nor pickled: two lives of one run would use the same noise on different data."""
        raise TrainingError(
            "a learner must not be copied or pickled: its noise is for one run. Save a checkpoint= to go on in another "
            "process; theta and average may be copied"
        )

    def close(self) -> None:
        """Let another process resume this run. The end of the process does the same."""
        self.release.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()
