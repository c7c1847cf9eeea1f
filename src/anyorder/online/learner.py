"""What every learner does with its release, whatever it makes of what comes back: steps in order, files, the claim."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.errors import ArgumentError, CheckpointError, PlanError, TrainingError
from anyorder.online.losses import CustomLoss, Loss, LossWord, loss_of
from anyorder.online.sets import Set, constraint_of
from anyorder.online.sums import LARGEST, SMALLEST, Examples, sum_of
from anyorder.plan.certificate import Certificate, Evidence
from anyorder.plan.plan import Plan
from anyorder.release.release import Release
from anyorder.sampling.row_digests import digests_of

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

    def hold_to(self, rows: Iterable[bytes]) -> None:
        """Keep keyed digests of the rows of a run that knows rows by their places, or compare with those kept.

        Raises: CheckpointError, whose `changed` says how many rows differ, where a resumed run has others.
        """
        now = digests_of(rows, self.release.derived(b"rows").key)
        before = np.asarray(self.extra.setdefault("rows", now))
        if not np.array_equal(before, now):
            problem = CheckpointError(
                "the rows are not those with which this run began, or lie in other places: a row is known by its "
                "place, and the claim counts how often it takes part. Go on with the rows as they were, name whose "
                "each is (units=), or begin a new run, whose epsilon adds to this one's"
            )
            problem.changed = int(np.count_nonzero(before != now)) if len(before) == len(now) else len(now), len(before)
            raise problem

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

    def certificate(self, *, public_stop: bool = False) -> Certificate:
        """The claim of this run, for everybody: `save` it, and check it with `anyorder verify`. It names nobody.

        `public_stop` is for runs that ended early: see `Release.certificate`.
        """
        return self.release.certificate(public_stop=public_stop)

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


# ----------------------------------------------------------------------------------------------------
# Follow the regularised leader on private sums of gradients: [Kairouz et al. 2021, Algorithm 1] under any plan.


class Learner(OnePass):
    """A linear model that learns in one pass over batches in any order, [Kairouz et al. 2021, Algorithm 1].

    With m = plan.batch_size, batch t of examples, and g_t the sum of its units' gradients at theta_t, each clipped to
    plan.clip_norm (`clipped_sum`),

        S_t         = S_{t-1} + ( g_t + noise_std (K Z)[t] )                        a step of `ao.Release`, times m
        theta_{t+1} = argmin over theta in the set of
                      <S_t, theta> + regularization/2 ||theta||^2 + t m ( l1 ||theta||_1 + l2/2 ||theta||^2 )

    and theta_1 is the same with S_0 = 0. S_t is the sum of all gradients so far with the noise of that prefix sum: for
    a plan with `Tree` it is GetSum(T, t) of the paper, but for the rounding of noise to float32; its lambda is
    `regularization`, and its L the plan's clip norm. Sums are over examples: the loss that is followed is the sum over
    all of them, so that `regularization` does not grow as they come, while l1 and l2 are weights in the mean loss
    [composite losses as in McMahan 2011].

    Guarantee: the weights after all steps together, and what is computed from them, are (plan.epsilon, plan.delta)-DP
    for one unit, the plan's `unit`, under its neighbours, for batches that may be chosen by what was shown before.
    What a unit's rows are changes no shape, no error and no warning: one whose numbers cannot be used adds zero.
    Labels, rows and units themselves must be what the data has; features and labels are bounded by nobody here but
    through clip_norm.

    A step that is refused changes nothing, and is refused before a gradient is made. With `checkpoint`, the file is
    written where the learner is made and by `save`; a process that was killed goes on from the last of these,
    bit for bit, and repeats the steps after it: with the same batches, or they are refused. It holds the noise key.

    Args:
        plan: what to run; its workload best a prefix sum, which is what is used.
        shape: (d, outputs) of theta.
        loss: "logistic", "hinge", "squared", "poisson", or "softmax" with an output a class; or a `CustomLoss`.
        constraint: the set that theta lies in: one of `anyorder.online.sets`; None for `Everything()`.
        regularization: lambda, at least 0; above 0 where the set is not bounded. `anyorder.online.regret` has bounds
            by which to choose it from public numbers: what is chosen by looking at the data is a release of its own.
        l1, l2: weights of the elastic net in the mean loss of an example.
        checkpoint: file; where it exists the learner goes on from it, with the arguments that it was made with.
        key: 32 bytes for reproducible tests. In use, leave it out: a run whose key is known has no privacy.

    Attributes:
        plan, shape, loss, constraint, regularization, l1, l2: as given.
        theta: (d, outputs) float64, the iterate that the next step plays; cannot be written.
        release: carries the plan out; `release.on_release` is for audits and logs, `release.sample` draws the units
            of plans with secret sampling.
        extra: plain values and arrays of your own, to be written into: each `save` has them, and a resumed learner,
            arrays as tensors.

    Raises: PlanError for plans with a grid, a selection, a record on devices, or an unfit clip norm; ArgumentError;
        CheckpointError.
    Cost: that of `clipped_sum`, the noise, and `Set.argmin`: see `step`.

    Example:
        >>> plan = ao.plan(dataset_size=4, batch_size=2, epochs=1, epsilon=8, delta=1e-6)
        >>> learner = ao.online.Learner(plan, (2, 1), loss="logistic", regularization=10.0)
        >>> learner.step([0, 1], np.eye(2), [0, 1])
        >>> learner.theta.shape, learner.steps_taken
        ((2, 1), 1)
    """

    kind = "anyorder online learner 1"
    word = "a learner"

    def __init__(
        self,
        plan: Plan,
        shape: tuple[int, int],
        *,
        loss: Loss | LossWord,
        constraint: Set | None = None,
        regularization: float,
        l1: float = 0.0,
        l2: float = 0.0,
        checkpoint: str | Path | None = None,
        key: bytes | None = None,
    ) -> None:
        check_plan(plan)
        self.shape, self.loss = _shape_and_loss(shape, loss)
        self.plan, self.constraint = plan, constraint_of(constraint)
        self.regularization = checks.real("regularization", regularization, low=0.0)
        self.l1, self.l2 = checks.real("l1", l1, low=0.0), checks.real("l2", l2, low=0.0)
        self.constraint.check(self.shape, self.regularization)
        self._begin(self.shape[0] * self.shape[1], np.zeros(self.shape), np.zeros(self.shape), checkpoint, key)

    def _begun(self) -> None:
        self.theta = self._leader(self._t)

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, units: Iterable[Any], X: Any, y: Any) -> None:
        """Learn from one batch; `theta` is the next iterate after it.

        Args:
            units: (m,) whose each row is, integers or strings; the rows of one unit are added up and clipped together.
            X: (m, d), a NumPy array or a sparse one of SciPy, as `clipped_sum` takes it; perhaps no rows.
            y: (m,) labels, numbers.
        Raises: ParticipationError if the plan does not let one of the units take part now, StepsExhaustedError after
            the last step, ArgumentError for shapes and types, CheckpointError where a step that was lost in a crash is
            repeated with other data; what a `CustomLoss` gradient raises. Nothing changed. What an observer of
            `release` raises comes after the step, which was taken.
        Cost: that of `clipped_sum` and of the noise: 256 examples of 100 features, with the noise of a BLT, take
            0.7 ms of one core.
        """
        self._check()
        batch = Examples.of(X, y, units, self.shape[0])
        names = self.release.check(batch.units)
        self.release.step(names, sum_of(self.loss, self.theta, batch, self.release.clip_norm, names))

    def _receive(self, step: int, private: Floats) -> None:
        self._in_order(step)
        self._played += self.theta
        self._sum += self.plan.batch_size * private.reshape(self.shape)
        self.theta = self._leader(step + 1)
        self._t = step + 1  # last: where an interrupt comes before, the step counts as broken off

    def _leader(self, t: int) -> Floats:
        """theta_{t+1} of S_t."""
        seen = t * self.plan.batch_size
        quadratic = self.regularization + seen * self.l2
        theta = self.constraint.argmin(self._sum, quadratic, seen * self.l1)
        theta.flags.writeable = False
        return theta

    def _settings(self) -> str:
        """What a checkpoint must share with the learner that goes on from it; of functions it knows nothing."""
        kind = f"Custom of {self.loss.outputs} outputs" if type(self.loss) is CustomLoss else self.loss
        weights = (self.regularization, self.l1, self.l2)
        return f"{kind} of shape {self.shape}, {self.constraint.words()}, regularization, l1 and l2 {weights}"


def _shape_and_loss(shape: Any, given: Loss | LossWord) -> tuple[tuple[int, int], Loss]:
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise ArgumentError(f"shape must be (d, outputs), the shape of theta, got {shape!r}")
    d, outputs = (checks.integer("shape", size, low=1) for size in shape)
    loss = loss_of(given, outputs)
    if outputs != loss.outputs:
        raise ArgumentError(f"shape must have {loss.outputs} outputs, as the loss {type(loss).__name__}, got {shape!r}")
    return (d, outputs), loss


def check_plan(plan: Plan) -> None:
    """Raise PlanError where a learner cannot carry the plan out."""
    if type(plan) is not Plan:
        raise ArgumentError(f"plan must be an anyorder Plan (see anyorder.plan), got {type(plan).__name__}")
    if plan.grid is not None:
        raise PlanError(
            "the plan has a grid for exact integers, and a learner's sums are of floats: plan without "
            "ao.mechanism(secure=True), or give "
            "`ao.bounded_sum(.., grid=)` of your own gradients to an `ao.Release`"
        )
    if plan.selection is not None:
        raise PlanError(
            "the plan has a selection of rows, and a learner moves all of theta: plan without "
            "ao.mechanism(selection=..)"
        )
    if "record" in plan.on_device:
        raise PlanError(
            "the plan leaves the record to the users' devices, and a learner must know whose each row is, to clip the "
            "rows of one unit together: plan without ao.mechanism(on_device=('record',))"
        )
    if not SMALLEST <= plan.clip_norm <= LARGEST:
        raise PlanError(f"clip_norm must be from 2^-60 to 2^60 for a learner, got {plan.clip_norm}")
