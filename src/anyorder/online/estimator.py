"""What the estimators of this room share: the plan of a fit, the steps of it, and what is kept after it."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields, replace
from math import isinf
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from anyorder import _check
from anyorder._words import counted
from anyorder.certificate import Certificate
from anyorder.errors import ArgumentError, PlanError, StepsExhaustedError, TrainingError
from anyorder.online.alone import check_alone
from anyorder.online.features import Linear, RowBound
from anyorder.online.ftrl import Learner
from anyorder.online.inputs import Groups, Key, check_units, plain_key, read_rows, read_targets
from anyorder.online.losses import Loss
from anyorder.online.regret import best_regularization, usual_regularization
from anyorder.online.sets import Ball, Set
from anyorder.participation import SingleEpoch
from anyorder.plan import Plan
from anyorder.planner import plan as make_plan
from anyorder.sampling.samplers import permutation_of
from anyorder.strategy import Strategy

__all__ = ["Estimator"]

Floats = NDArray[np.float64]

_CUT = 0.3  # the clip norm in largest gradients, where it is not given
_STEPS, _PASSES = 1000, 5  # passes are made as long as the steps stay near the one, and not more than the other
_BATCHES, _LARGEST = 50, 256  # in a pass over few units; in a batch
_SHORT = 300  # steps up to which the best strategy of all is found in a second, and kept in half a megabyte
_KEPT = 10**7  # numbers that noise may keep between steps, for each class, before a mechanism with two vectors is taken
_APART = 20  # steps of a pass from which on a BLT has use for two buffers
_SAVES = 20


@dataclass(eq=False, repr=False)
class Estimator(BaseEstimator):  # type: ignore[misc]
    """Abstract: a linear model fitted by `Learner`. Its arguments are those of `LogisticRegression`."""

    epsilon: float = 1.0
    delta: float = 1e-6
    _: KW_ONLY
    bounds: float | tuple[ArrayLike, ArrayLike] | None = None
    horizon: int | None = None
    batch_size: int | None = None
    epochs: int | None = None
    mechanism: str | Strategy | None = None
    clip_norm: float | None = None
    regularization: float | str = "auto"
    radius: float | None = None
    constraint: Set | None = None
    l1: float = 0.0
    l2: float = 0.0
    fit_intercept: bool = True
    intercept_scaling: float = 0.3
    average: float | None = 3.0
    shuffle: bool = True
    neighbours: str = "zero-out"
    unit: str = "example"
    plan: Plan | None = None
    checkpoint: str | Path | None = None
    key: bytes | None = None

    # What a kind of model says: its loss and a bound on its slope, how far the noise may move a score, the curvature
    # of a loss whose slope has no bound, its targets as the loss takes them, and the model from theta.
    _spread = 2.0
    _curvature = 0.0

    def _loss(self) -> Loss:
        raise NotImplementedError

    def _slope(self, loss: Loss) -> float:
        """A bound on the norm of the slope, or inf where there is none."""
        return loss.lipschitz

    def _targets(self, y: NDArray[Any]) -> NDArray[Any]:
        raise NotImplementedError

    def _model(self, found: Linear) -> Linear:
        return found

    # -- learning ----------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, units: Iterable[Any] | None = None) -> Self:
        """Learn from all rows, as one release of its own: a second `fit` on the same rows is a second release.

        Args:
            X: (m, d) numbers: an array, a data frame or a sparse array of SciPy. A row with NaN counts as zero.
            y: (m,) labels or targets. A label that is no class counts as zero, in silence.
            units: (m,) whose each row is; None: each row is a unit of its own. All rows of a unit go into one batch,
                added up and cut together. How many units there are, and their ids, are public.
        Raises: ArgumentError, PlanError before anything of the data is used but shapes and types; TrainingError inside
            searches and ensembles of scikit-learn, see docs/online.md; CheckpointError.
        Cost: the plan, some seconds where a fit has so many steps for the first time, and then nothing; and the steps:
            256 rows of 100 features take about 0.8 ms of one core.
        """
        check_alone()
        check_units(self.unit if self.plan is None else self._given_plan().unit, units)
        loss = self._loss()
        rows = read_rows(self, X, reset=True, finite=False)
        groups = Groups(units, rows.shape[0])
        targets = self._targets(read_targets(y, rows))
        bound = self._row_bound(rows)
        plan = self._fit_plan(groups.count, loss, bound)
        self._close()
        learner = self._learner_of(plan, loss, bound)
        try:
            order = permutation_of(groups.count, learner.release.derived(b"order").key) if self.shuffle else None
            batches = groups.batches(plan.batch_size, order)
            if plan.n % len(batches):
                raise PlanError(
                    f"plan must have a multiple of {len(batches)} steps, as many as batches of {plan.batch_size} in "
                    f"{groups.count} units, got {plan.n}"
                )
            between = -(-plan.n // _SAVES)
            for t in range(learner.steps_taken, plan.n):
                if self.checkpoint is not None and t % between == 0:
                    learner.save()  # never after the last step: a run that has ended holds others to its data
                chosen = batches[t % len(batches)]
                self._step(learner, groups.names(chosen), bound.prepare(rows[chosen]), targets[chosen])
            self._take_over(learner, bound)
            self.__dict__.pop("_certificate", None)
            self._evidence = learner.evidence()
        finally:
            learner.close()
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, units: Iterable[Any] | None = None) -> Self:
        """Learn from further rows of a stream, of `horizon` steps at most: all calls together are one release.

        Rows are taken in the order given, in batches of batch_size (256); the last batch of a call may be shorter, and
        is a step as the others. What was learned so far is in `coef_` at any time.

        Args:
            X, y: as of `fit`.
            classes: None, or the classes once more, which must be those of the estimator.
            units: (m,) whose each row is. None: every row is a new unit that never came before and never comes again,
                which is **your promise**. With ids the ledger holds the stream to it: a unit that comes back in a later
                step is refused.
        Raises: as `fit`; StepsExhaustedError before the first step, if the rows make more steps than are left;
            ParticipationError for a unit that came before: the batches before that one were learned.
        """
        check_alone()
        check_units(self.unit if self.plan is None else self._given_plan().unit, units)
        loss = self._loss()
        live: Any = self.__dict__.get("_learner")
        first = live is None
        if first and self.__dict__.keys() & {"_certificate", "_evidence"}:
            raise TrainingError(
                "partial_fit must not go on from a fit, whose plan has no steps left, nor from a copy of a stream, "
                "which lacks its noise key: make a new estimator, with its own epsilon; a stream goes on in another "
                "process by checkpoint="
            )
        if classes is not None:
            self._same_classes(classes)
        rows = read_rows(self, X, reset=first, finite=False)
        ids = None if units is None else Groups(units, rows.shape[0])
        targets = self._targets(read_targets(y, rows))
        bound = self._row_bound(rows)
        if live is None:
            live = self._learner_of(self._stream_plan(loss, bound), loss, bound)
            self._learner = live
        plan = live.plan
        steps = -(-rows.shape[0] // plan.batch_size)
        if steps > plan.n - live.steps_taken:
            raise StepsExhaustedError(
                f"the rows make {counted(steps, 'step')} of {plan.batch_size}, and {plan.n - live.steps_taken} of the "
                f"horizon of {plan.n} are left: nothing was learned from them. A longer stream needs a larger horizon "
                "from its start"
            )
        for start in range(0, rows.shape[0], plan.batch_size):
            chosen = np.arange(start, min(start + plan.batch_size, rows.shape[0]))
            seen = int(live.extra.get("seen", 0))
            names = np.arange(seen, seen + len(chosen)) if ids is None else ids.names(chosen)
            self._step(live, names, bound.prepare(rows[chosen]), targets[chosen])
            live.extra["seen"] = seen + len(chosen)
        if self.checkpoint is not None:
            live.save()
        self._take_over(live, bound)
        return self

    def _step(self, learner: Any, units: Any, X: Any, y: NDArray[Any]) -> None:
        learner.step(units, X, y)
        if self.average:
            kept, t = learner.extra, learner.steps_taken
            new = float(t) ** self.average
            kept["weight"] = kept.get("weight", 0.0) + new
            before = np.asarray(kept.get("average", np.zeros(learner.shape)))  # a tensor after a resume
            kept["average"] = before + (new / kept["weight"]) * (learner.theta - before)

    def _kept(self, learner: Any) -> Floats:
        """The parameters that the model is made of."""
        if self.average:
            return np.asarray(learner.extra["average"])
        return np.asarray(learner.theta if self.average is None else learner.average)

    def _take_over(self, learner: Any, bound: RowBound) -> None:
        """What may be shown: a function of released values and public numbers."""
        model = self._model(bound.back(self._kept(learner)))
        self.coef_, self.intercept_ = model.coef, model.intercept
        self.plan_, self.epsilon_, self.n_iter_ = learner.plan, learner.plan.epsilon, learner.steps_taken

    def _same_classes(self, classes: Any) -> None:
        raise ArgumentError("classes must be left out: a regression has none")

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _row_bound(self, rows: Any) -> RowBound:
        bound = RowBound.of(self.bounds, rows.shape[1], intercept=self.fit_intercept, scaling=self.intercept_scaling)
        if not isinstance(rows, np.ndarray):
            bound.check_sparse()
        return bound

    def _fit_plan(self, count: int, loss: Loss, bound: RowBound) -> Plan:
        """For so many units, by numbers that are public."""
        if self.plan is not None:
            return self._given_plan()
        size = self._usual_size(count) if self.batch_size is None else self.batch_size
        size = min(_check.integer("batch_size", size, low=1), count)
        batches = -(-count // size)
        passes = self._usual_passes(batches) if self.epochs is None else self.epochs
        steps = batches * _check.integer("epochs", passes, low=1)
        if self.horizon is not None and steps > _check.integer("horizon", self.horizon, low=1):
            raise ArgumentError(
                f"horizon must be at least the {steps} steps of this fit ({passes} passes of {batches}), got "
                f"{self.horizon}; fit knows its own number, and needs none"
            )
        return make_plan(
            dataset_size=count, epochs=passes, order="fixed", mechanism=self._mechanism(steps, batches, bound),
            **self._said(size, loss, bound),
        )  # fmt: skip

    def _usual_size(self, count: int) -> int:
        return max(1, min(_LARGEST, count // _BATCHES))

    def _usual_passes(self, batches: int) -> int:
        return max(1, min(_PASSES, round(_STEPS / batches)))

    def _stream_plan(self, loss: Loss, bound: RowBound) -> Plan:
        if self.plan is not None:
            return self._given_plan()
        if self.horizon is None:
            raise ArgumentError(
                "horizon must be given for partial_fit: the most steps (batches) that there will be, in all calls "
                "together. Noise is planned for it, and it must not depend on the data"
            )
        if self.epochs not in (None, 1):
            raise ArgumentError(f"epochs must be None or 1 for partial_fit, where a unit comes once, got {self.epochs}")
        horizon = _check.integer("horizon", self.horizon, low=1)
        size = _LARGEST if self.batch_size is None else _check.integer("batch_size", self.batch_size, low=1)
        mechanism = self._mechanism(horizon, horizon, bound)
        return make_plan(participation=SingleEpoch(horizon), mechanism=mechanism, **self._said(size, loss, bound))

    def _said(self, size: int, loss: Loss, bound: RowBound) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon, "delta": self.delta, "batch_size": size, "neighbours": self.neighbours,
            "unit": self.unit, "clip_norm": self._clip_norm(loss, bound),
        }  # fmt: skip

    def _mechanism(self, steps: int, apart: int, bound: RowBound) -> str | Strategy:
        if self.mechanism is not None:
            return self.mechanism
        if steps == 1:
            return "independent"
        if steps <= _SHORT and steps * bound.width <= _KEPT:  # dense noise keeps a vector of each step
            return "dense"
        return "blt, 2 buffers" if apart >= _APART else "banded inverse, 8 bands"

    def _clip_norm(self, loss: Loss, bound: RowBound) -> float:
        if self.clip_norm is not None:
            return _check.positive("clip_norm", self.clip_norm)
        slope = self._slope(loss)
        if isinf(slope):
            raise ArgumentError(
                f"clip_norm must be given for the loss {type(loss).__name__}, whose gradients have no bound: the L2 "
                "norm to which each unit's gradient is cut"
            )
        return bound.norm * slope * (1.0 if self.regularization == "bound" else _CUT)

    def _given_plan(self) -> Plan:
        """The plan that was given, if nothing else says the same thing."""
        if not isinstance(self.plan, Plan):
            raise ArgumentError(f"plan must be an anyorder Plan (see anyorder.plan), got {type(self.plan).__name__}")
        default = {one.name: one.default for one in fields(self)}
        for name in (
            "epsilon",
            "delta",
            "batch_size",
            "epochs",
            "horizon",
            "mechanism",
            "clip_norm",
            "neighbours",
            "unit",
        ):
            if getattr(self, name) != default[name]:
                raise ArgumentError(
                    f"{name} must not be given together with plan, which says it, got {getattr(self, name)!r}"
                )
        if self.plan.amplified:
            raise PlanError(
                "plan must not be for secret sampling: fit takes every unit once in each pass. With ao.online.Learner, "
                "release.sample draws the batches of such a plan"
            )
        return self.plan

    # -- the learner -------------------------------------------------------------------------------------------------

    def _set(self) -> Set | None:
        if self.radius is None:
            return self.constraint
        if self.constraint is not None:
            raise ArgumentError("radius and constraint must not be given together: radius is Ball(radius)")
        return Ball(self.radius)

    def _learner_of(self, plan: Plan, loss: Loss, bound: RowBound) -> Any:
        if self.average is not None:
            _check.real("average", self.average, low=0.0)
        shape = (bound.width, loss.outputs)
        return Learner(
            plan, shape, loss=loss, constraint=self._set(), regularization=self._regularization(plan, loss, bound),
            l1=self.l1, l2=self.l2, checkpoint=self.checkpoint, key=plain_key(self.key),
        )  # fmt: skip

    def _regularization(self, plan: Plan, loss: Loss, bound: RowBound) -> float:
        """Lambda, by public numbers.

        "auto": noise in the prefix sums has the standard deviation s in each coordinate, root mean square over steps.
        With lambda = s norm / spread it moves the score of no row by more than `spread` in the same sense. A loss
        without a bound on its slope also needs a step that does not overshoot, lambda >= curvature batch_size norm^2.
        """
        if not isinstance(self.regularization, str):
            return _check.real("regularization", self.regularization, low=0.0)
        if _check.choice("regularization", self.regularization, {"auto", "bound"}) == "auto":
            return usual_regularization(plan, bound.norm, spread=self._spread, curvature=self._curvature)
        if self.radius is None or isinf(loss.lipschitz):
            raise ArgumentError(
                "regularization 'bound' must come with radius, the norm of the models that the bound compares with, "
                f"and a loss of bounded slope, got radius={self.radius!r} and the loss {type(loss).__name__}"
            )
        return best_regularization(
            plan.n * plan.batch_size, bound.width * loss.outputs, lipschitz=loss.lipschitz * bound.norm,
            radius=self.radius, plan=plan, diameter=2 * self.radius, l1=self.l1, l2=self.l2,
        )  # fmt: skip

    # -- what is shown and kept --------------------------------------------------------------------------------------

    @property
    def certificate_(self) -> Certificate:
        """The claim of the fit, or of the stream so far, for everybody: `save` it, check it with `anyorder verify`.

        Cost: when it is first asked for, about 8 us for each unit.
        """
        check_is_fitted(self)
        live: Learner | None = self.__dict__.get("_learner")
        if live is not None:
            return live.certificate()
        if "_certificate" not in self.__dict__:
            self._certificate: Certificate = replace(self._evidence.certificate, realised=self._evidence.realised)
        return self._certificate

    def _close(self) -> None:
        """End a stream that partial_fit began."""
        live: Learner | None = self.__dict__.pop("_learner", None)
        if live is not None:
            live.close()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, Key(value) if name == "key" and type(value) is bytes else value)

    def __getstate__(self) -> dict[str, Any]:
        """Without keys, un-noised sums and the record of who took part: a copy predicts, and does not learn on."""
        state = dict(super().__getstate__())
        if state.keys() & {"_learner", "_evidence"}:
            state["_certificate"] = self.certificate_
        state.pop("_learner", None)
        state.pop("_evidence", None)
        state["key"] = None
        return state

    def _scores(self, X: Any) -> Floats:
        check_is_fitted(self)
        rows = read_rows(self, X, reset=False, finite=True)
        return np.asarray(rows @ self.coef_.T + self.intercept_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.non_deterministic = self.key is None
        return tags
