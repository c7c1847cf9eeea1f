"""Private linear models with scikit-learn's interface: fit, partial_fit, predict, in pipelines."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, fields
from math import inf, isinf, log, sqrt
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, OneToOneFeatureMixin, RegressorMixin, TransformerMixin
from sklearn.utils import get_tags
from sklearn.utils.validation import check_is_fitted

from anyorder import checks
from anyorder.accounting.curves import Curve
from anyorder.clipping.bounded import bounded_sum
from anyorder.errors import ArgumentError, NoiseWarning, PlanError, StepsExhaustedError, TrainingError
from anyorder.formatting import counted
from anyorder.ledger import as_units, distinct, numbered
from anyorder.online.features import (
    Key,
    Linear,
    RowBound,
    RowsByUnit,
    check_units,
    codes_of,
    contents_of,
    numbers_of,
    plain_key,
    public_classes,
    read_rows,
    read_targets,
)
from anyorder.online.learner import Learner
from anyorder.online.least_squares import LeastSquares
from anyorder.online.losses import Hinge, Logistic, Loss, LossWord, PoissonLoss, Softmax, Squared, loss_of
from anyorder.online.regret import best_regularization, usual_regularization
from anyorder.online.sets import Ball, Set
from anyorder.participation import SingleEpoch
from anyorder.plan.certificate import Certificate
from anyorder.plan.options import careful_delta
from anyorder.plan.plan import Plan
from anyorder.plan.planner import plan as make_plan
from anyorder.release.release import Release
from anyorder.sampling.samplers import permutation_of
from anyorder.strategy import Strategy

# ----------------------------------------------------------------------------------------------------
# Refusal of private fits inside searches and ensembles, whose every fit is one more release on the same rows.


_SEARCH = (
    "it fits again and again on the same rows, every fit is a release of its own, and it chooses or reports by scores "
    "of rows that no noise covers: what it shows is not (epsilon, delta)-private for the epsilon of one fit. Search "
    "with ao.tune, which gives one epsilon for the whole search; for a test score, split the rows once by yourself, "
    "fit on the one part, and score on the other"
)
_SEVERAL = (
    "it fits several times on the same rows, and every fit is a release of its own: together they have a larger "
    "epsilon than one fit says. Fit each by itself, with ao.Budget (or ao.compose of their plan_.curve) for the sum"
)
_CLASSES = f"{_SEVERAL}. For several classes at once SoftmaxRegression is one release"

_OTHERS = (
    "it may fit several times on the same rows, and every fit is a release of its own: together they have a larger "
    "epsilon than one fit says. Of scikit-learn, pipelines, ColumnTransformer, TransformedTargetRegressor and "
    "SelectFromModel fit once, and may; elsewhere fit by yourself, and hand over what was fitted"
)

_REASONS = {
    "sklearn.model_selection": _SEARCH,
    "sklearn.calibration": _SEARCH,
    "sklearn.ensemble": _SEVERAL,
    "sklearn.feature_selection._rfe": _SEARCH,
    "sklearn.feature_selection._sequential": _SEARCH,
    "sklearn.linear_model._ransac": _SEARCH,
    "sklearn.multiclass": _CLASSES,
    "sklearn.multioutput": _SEVERAL,
    "sklearn.semi_supervised": _SEARCH,
}
"""What is wrong in rooms of scikit-learn whose members fit an estimator more than once."""

_ONCE = (
    "sklearn.base", "sklearn.compose", "sklearn.feature_selection._base", "sklearn.feature_selection._from_model",
    "sklearn.pipeline", "sklearn.utils",
)  # fmt: skip
"""Rooms whose members fit an estimator once, if at all. All others of scikit-learn are refused, also those to come."""


def check_alone() -> None:
    """Raise TrainingError where something of scikit-learn is calling that is not known to fit once.

    Told by the frames of the call, in this process or in the worker that fits. A loop of one's own is not seen, nor are
    wrappers of other packages: each of their fits is a release, too. Warns (NoiseWarning) of other steps of a pipeline
    that are fitted to the rows without noise: by their classes and settings, which are public, and not by the rows.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if _within(module, ("sklearn",)) and not _within(module, _ONCE):
            reason = next((reason for room, reason in _REASONS.items() if _within(module, (room,))), _OTHERS)
            raise TrainingError(f"{frame.f_code.co_qualname} of {module} must not fit a private learner: {reason}")
        if frame.f_code.co_name == "fit" and _within(module, ("sklearn.pipeline", "sklearn.compose")):
            owner = frame.f_locals.get("self")
            before = [step for _, step in getattr(owner, "steps", [])[:-1]] + [getattr(owner, "transformer", None)]
            if names := sorted({type(step).__name__ for one in before for step in _fitted_steps(one)}):
                warnings.warn(
                    f"{', '.join(names)} is fitted to the rows without noise, and the epsilon of this model does not "
                    "cover what it learns of them: predictions and weights may tell of single rows. Use "
                    "ao.online.Scaler, or a step whose settings are public",
                    NoiseWarning, stacklevel=3,
                )  # fmt: skip
        frame = frame.f_back


def _fitted_steps(step: Any) -> Iterator[Any]:
    """The parts of a step of a pipeline that learn from the rows they are given, and are none of this package."""
    inner = [
        part
        for name in ("steps", "transformers", "transformer_list")
        for entry in getattr(step, name, None) or []
        for part in entry
        if hasattr(part, "fit")
    ]
    for part in inner:
        yield from _fitted_steps(part)
    if inner or not hasattr(step, "fit") or not get_tags(step).requires_fit or isinstance(step, Scaler):
        return
    if isinstance(getattr(step, "categories", "auto"), str):  # else given beforehand, as to an encoder
        yield step


def _within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


# ----------------------------------------------------------------------------------------------------
# What the estimators of this room share: the plan of a fit, the steps of it, and what is kept after it.


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
    delta: float | None = None
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
                summed and clipped together. How many units there are, and their ids, are public.
        Raises: ArgumentError, PlanError before anything of the data is used but shapes and types; TrainingError inside
            searches and ensembles of scikit-learn, see docs/online.md; CheckpointError.
        Cost: the plan, some seconds where a fit has so many steps for the first time, and then nothing; and the steps:
            256 rows of 100 features take about 0.8 ms of one core.
        """
        check_alone()
        check_units(self.unit if self.plan is None else self._given_plan().unit, units)
        loss = self._loss()
        rows = read_rows(self, X, reset=True, finite=False)
        groups = RowsByUnit(units, rows.shape[0])
        targets = self._targets(read_targets(y, rows))
        bound = self._row_bound(rows)
        plan = self._fit_plan(groups.count, loss, bound)
        self._close()
        learner = self._learner_of(plan, loss, bound)
        try:
            if units is None and self.checkpoint is not None:
                learner.hold_to(contents_of(rows, targets))
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
            classes: the labels that there can be, from what is public, in the first call of an estimator that was made
                without them, as scikit-learn asks for them; elsewhere None, or the same once more.
            units: (m,) whose each row is. None: every row is a new unit that never came before and never comes again,
                which is **your promise**. With ids the ledger holds the stream to it: a unit that comes back in a later
                step is refused.
        Raises: as `fit`; StepsExhaustedError before the first step, if the rows make more steps than are left;
            ParticipationError for a unit that came before: the batches before that one were learned.
        """
        check_alone()
        check_units(self.unit if self.plan is None else self._given_plan().unit, units)
        live: Any = self.__dict__.get("_learner")
        first = live is None
        if classes is not None:
            self._same_classes(classes, first=first)
        loss = self._loss()
        if first and self.__dict__.keys() & {"_certificate", "_evidence"}:
            raise TrainingError(
                "partial_fit must not go on from a fit, whose plan has no steps left, nor from a copy of a stream, "
                "which lacks its noise key: make a new estimator, with its own epsilon; a stream goes on in another "
                "process by checkpoint="
            )
        rows = read_rows(self, X, reset=first, finite=False)
        ids = None if units is None else RowsByUnit(units, rows.shape[0])
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

    def _same_classes(self, classes: Any, *, first: bool) -> None:
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
        size = min(checks.integer("batch_size", size, low=1), count)
        batches = -(-count // size)
        passes = self._usual_passes(batches) if self.epochs is None else self.epochs
        steps = batches * checks.integer("epochs", passes, low=1)
        if self.horizon is not None and steps > checks.integer("horizon", self.horizon, low=1):
            raise ArgumentError(
                f"horizon must be at least the {steps} steps of this fit ({passes} passes of {batches}), got "
                f"{self.horizon}; fit knows its own number, and needs none"
            )
        return make_plan(
            dataset_size=count, epochs=passes, order="fixed", mechanism=self._mechanism(steps, batches, bound),
            **self._said(count, size, loss, bound),
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
            raise ArgumentError(f"epochs must be None or 1 for partial_fit: a unit appears once; got {self.epochs}")
        horizon = checks.integer("horizon", self.horizon, low=1)
        size = _LARGEST if self.batch_size is None else checks.integer("batch_size", self.batch_size, low=1)
        mechanism = self._mechanism(horizon, horizon, bound)
        return make_plan(
            order=SingleEpoch(horizon), mechanism=mechanism, **self._said(horizon * size, size, loss, bound)
        )

    def _said(self, units: int, size: int, loss: Loss, bound: RowBound) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon, "delta": careful_delta(1e-6, units) if self.delta is None else self.delta,
            "batch_size": size, "neighbours": self.neighbours,
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
            return checks.positive("clip_norm", self.clip_norm)
        slope = self._slope(loss)
        if isinf(slope):
            raise ArgumentError(
                f"clip_norm must be given for the loss {type(loss).__name__}, whose gradients have no bound: the L2 "
                "norm to which each unit's gradient is clipped"
            )
        return bound.norm * slope * (1.0 if self.regularization == "bound" else _CUT)

    def _given_plan(self) -> Plan:
        """The plan that was given, if nothing else says the same thing."""
        if type(self.plan) is not Plan:
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
            checks.real("average", self.average, low=0.0)
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
            return checks.real("regularization", self.regularization, low=0.0)
        if checks.choice("regularization", self.regularization, {"auto", "bound"}) == "auto":
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
            self._certificate: Certificate = self._evidence.shown()
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

    def _read(self, X: Any) -> Any:
        check_is_fitted(self)
        return read_rows(self, X, reset=False, finite=True)

    def _line(self, rows: Any) -> Floats:
        return np.asarray(rows @ self.coef_.T + self.intercept_)

    def _scores(self, X: Any) -> Floats:
        return self._line(self._read(X))

    def _scores_of_clipped(self, X: Any) -> Floats:
        """A line fitted to clipped rows is no line for others: a row at ten times the bound has ten times the score."""
        rows = self._read(X)
        return self._line(self._row_bound(rows).clipped(rows))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.non_deterministic = self.key is None
        return tags


# ----------------------------------------------------------------------------------------------------
# Features brought to one scale: by public bounds, or by a mean and a spread that are released privately.


@dataclass(eq=False, repr=False)
class Scaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Clips each feature to [low, high], and maps it: to [-1, 1], or to mean 0 and spread 1 by a private release.

    Without epsilon it is public: nothing is taken from the data but the number of features. With epsilon and delta,
    u in [-1, 1]^d a row so mapped, `fit` releases once, with noise by one Gaussian mechanism,

        sum over units of  v_u,   v_u = mean over its rows of (u, u^2 - 1/2)   (elementwise),   ||v_u|| <= sqrt(5 d) / 2

    and takes mean and spread of every feature from it, for as many units as there are, which is public. Proof of the
    norm: of one feature u^2 + (u^2 - 1/2)^2 = u^4 + 1/4 <= 5/4, summed over d features; a mean is no longer than the
    longest. So nothing is lost by clipping to that norm, which is made all the same, against rounding. A unit with NaN
    in some row adds zero.

    Guarantee: with epsilon, what fit leaves is (epsilon, delta)-DP for one unit, neighbours zero-out; a model that is
    fitted on what `transform` gives has its own epsilon in addition: `ao.compose(scaler.curve_, model.plan_.curve)`.

    Args:
        bounds: (low, high), each a number or one for each feature: public, and wide enough; not found in the data.
        epsilon, delta: both or none.
        unit: as of `ao.plan`.
        key: 32 bytes for reproducible tests.

    Attributes:
        centre_, scale_: (d,): transform gives (clip(x, low, high) - centre_) / scale_.
        curve_, certificate_, epsilon_: of the release; None of a public scaler.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    Raises: ArgumentError; TrainingError inside searches and ensembles.
    Cost: O(m d).
    """

    bounds: tuple[ArrayLike, ArrayLike] | None = None
    _: KW_ONLY
    epsilon: float | None = None
    delta: float | None = None
    unit: str = "example"
    key: bytes | None = None

    def fit(self, X: Any, y: Any = None, units: Iterable[Any] | None = None) -> Self:
        """Take the number of features, and with epsilon release mean and spread. units: (m,) whose each row is."""
        if (self.epsilon is None) != (self.delta is None):
            raise ArgumentError("epsilon and delta must be given together, or neither for a public scaler")
        if self.epsilon is not None:
            check_alone()
            check_units(self.unit, units)
        rows = read_rows(self, X, reset=True, finite=False)
        bound = self._bound(rows)
        assert bound.box is not None
        half = bound.box.high / 2 - bound.box.low / 2
        self.curve_: Curve | None = None
        self.certificate_: Certificate | None = None
        self.epsilon_: float | None = None
        mean, spread = np.zeros(bound.d), np.ones(bound.d)
        if self.epsilon is not None:
            mean, spread = self._release(bound.prepare(rows), units)
        self.centre_ = bound.box.centre + half * mean
        self.scale_ = np.where(half > 0, half, 1.0) * spread
        return self

    def _bound(self, rows: Any) -> RowBound:
        if self.bounds is None or not isinstance(self.bounds, (tuple, list, np.ndarray)):
            raise ArgumentError(
                "bounds must be (low, high) of the features, from what is public: bounds that are found in the data "
                "tell of its outliers"
            )
        if sparse.issparse(rows):
            raise ArgumentError(
                "X must not be sparse: a shift would make every zero another number; give the learner a number "
                "for bounds"
            )
        return RowBound.of(self.bounds, rows.shape[1], intercept=False, scaling=1.0)

    def _release(self, mapped: Floats, units: Iterable[Any] | None) -> tuple[Floats, Floats]:
        """Mean and spread of rows in [-1, 1], of one release."""
        m, d = mapped.shape
        ids = as_units(np.arange(m) if units is None else units)
        count = len(distinct(ids))
        assert self.epsilon is not None
        assert self.delta is not None
        plan = make_plan(
            order=SingleEpoch(1), batch_size=count, epsilon=self.epsilon, delta=self.delta,
            mechanism="independent", clip_norm=sqrt(1.25 * d), unit=self.unit,
        )  # fmt: skip
        groups = numbered(ids)
        share = 1.0 / np.bincount(groups)[groups]  # of a row in its unit's mean
        vectors = np.hstack([mapped, np.square(mapped) - 0.5]) * share[:, None]
        with Release(plan, 2 * d, key=self.key) as release:
            means = release.step(ids, bounded_sum(vectors, ids, plan.clip_norm))
            self.curve_, self.epsilon_, self.certificate_ = plan.curve, plan.epsilon, release.certificate()
        mean = np.clip(means[:d], -1.0, 1.0)
        noise = plan.noise_std / count  # of each released mean: a spread below it cannot be told from none
        least = min(1.0, max(noise, 1e-6))
        return mean, np.sqrt(np.clip(means[d:] + 0.5 - np.square(mean), least, 1.0))

    def transform(self, X: Any) -> Floats:
        """(m, d): the features clipped and scaled; NaN stays NaN."""
        check_is_fitted(self)
        rows = read_rows(self, X, reset=False, finite=False)
        bound = self._bound(rows)
        assert bound.box is not None
        with np.errstate(all="ignore"):
            return np.asarray((np.clip(rows, bound.box.low, bound.box.high) - self.centre_) / self.scale_)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, Key(value) if name == "key" and type(value) is bytes else value)

    def __getstate__(self) -> dict[str, Any]:
        """Without a key."""
        return {**super().__getstate__(), "key": None}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = self.epsilon is not None and self.key is None
        return tags


# -- classifiers -----------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class _Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """Abstract: labels of public classes."""

    _: KW_ONLY
    classes: Any = None

    def _targets(self, y: NDArray[Any]) -> NDArray[Any]:
        self.classes_ = self._public_classes()
        return codes_of(y, self.classes_)

    def _public_classes(self) -> NDArray[Any]:
        return public_classes(self.__dict__.get("_classes_of_stream") if self.classes is None else self.classes)

    def _same_classes(self, classes: Any, *, first: bool) -> None:
        if self.classes is None and first:
            self._classes_of_stream = public_classes(classes)
        if not np.array_equal(np.unique(np.asarray(classes)), self._public_classes()):
            raise ArgumentError("classes must be those of the estimator, or left out of partial_fit")

    def decision_function(self, X: Any) -> Floats:
        """(m,) scores of the second class, or (m, classes) scores of each; of rows as they are, not clipped."""
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """(m,) the class of highest score. Post-processing: it costs no privacy of those who were learned from."""
        scores = self.decision_function(X)
        return np.asarray(self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)])

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Mean accuracy. **Not private**: it is computed from these rows, and no noise covers it."""
        return float(super().score(X, y, sample_weight))


class _Binary(_Classifier):
    """Abstract: two classes, of which the second one has the label 1."""

    def _targets(self, y: NDArray[Any]) -> NDArray[Any]:
        codes = super()._targets(y)
        if len(self.classes_) != 2:
            raise ArgumentError(
                f"classes must be two, got {len(self.classes_)}. Only binary classification is supported here; for "
                "more use SoftmaxRegression"
            )
        return codes

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


class LogisticRegression(_Binary):
    """Logistic regression of two classes, private: `Learner` with the loss `Logistic`.

    fit(X, y) makes one release: batches of rows, clipped to public bounds, each with the gradient of its rows, clipped
    to clip_norm, and noise that is correlated over steps; [Kairouz et al. 2021, Algorithm 1]. What is kept of it are
    `coef_`, `intercept_`, the plan and the certificate.

    Guarantee: what fit or all calls of partial_fit leave, in the attributes below, is (epsilon, delta)-DP for one unit,
    by itself each row, under `neighbours`. Number of rows and of features, names of features, and ids of units are
    public. Classes, bounds, scales, number of steps and weights are arguments, and never taken from the data: without
    bounds and classes nothing is fitted. A second fit is a second release: `ao.compose` has the epsilon of both.
    `predict` of others' rows costs them nothing here; `score` is not private.

    Args:
        epsilon, delta: of one fit, or of one stream of partial_fit. delta=None: 1e-6, or a tenth of one over the number
            of units (of a stream: horizon * batch_size) where that is smaller, rounded down to one digit.
        bounds: what is public of the features: the L2 norm to which each row is clipped; or (low, high), numbers or
            arrays of one for each feature, to which each feature is clipped and from which it is mapped to [-1, 1]. A
            number is worth less noise where rows have many features that are mostly zero.
        classes: the labels that there can be, or their number for 0, 1, ..
        horizon: the most steps of a stream; for partial_fit alone.
        batch_size: units in a step. None: a 50th of all, from 1 to 256; 256 in partial_fit.
        epochs: passes over the rows, in one order. None: as many as make 1000 steps, from 1 to 5.
        mechanism: as of `ao.plan`. None: up to 300 steps the best of all ("dense"); beyond a BLT with two buffers, or
            eight bands where a pass has less than 20 steps, which are found in a second however many there are.
        clip_norm: to which a unit's gradient is clipped. None: 0.3 of the largest that a row can have, which is less
            noise, and for two classes the same as a loss that is linear in rows that are far off.
        regularization: lambda of `Learner`, above 0. "auto": for which the noise moves no score by more than 2, root
            mean square over steps. "bound": for which `regret_bound` is least; needs radius, and then clip_norm=None
            clips nothing.
        radius: public bound on the norm of the parameters: a `Ball`. Or
        constraint: one of `anyorder.online.sets`. Both, as l1 and l2, are of the parameters on rows within their
            bounds, the intercept's among them.
        l1, l2: elastic net, weights in the mean loss.
        fit_intercept: add a feature of the size intercept_scaling times the bound on rows.
        average: what is kept is the mean of all weights, the t-th with weight t^average: 0 for that of which
            `risk_bound` speaks, None for the last iterate alone.
        shuffle: take the units of a fit in a secret random order; else in that in which they first come.
        neighbours, unit: as of `ao.plan`: what epsilon is about.
        plan: an `ao.Plan` to carry out, such as `ao.tune` gives; it says what else epsilon, delta, batch_size,
            epochs, horizon, mechanism, clip_norm, neighbours and unit say.
        checkpoint: a file from which a fit or a stream that was killed goes on, with the same rows.
        key: 32 bytes for reproducible tests. In use, leave it out: noise whose key is known hides nothing.

    Attributes:
        coef_: (1, features). intercept_: (1,).
        classes_: the classes, sorted.
        plan_, epsilon_: the plan and its epsilon. n_iter_: steps taken.
        certificate_: an `ao.Certificate`.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> X, y = rng.standard_normal((500, 3)), rng.integers(0, 2, 500)
        >>> model = ao.online.LogisticRegression(epsilon=2.0, bounds=3.0, classes=[0, 1]).fit(X, y)
        >>> model.coef_.shape, round(model.epsilon_, 3)
        ((1, 3), 2.0)
    """

    def _loss(self) -> Loss:
        return Logistic()

    def predict_proba(self, X: Any) -> Floats:
        """(m, 2) probabilities of both classes."""
        second = expit(self.decision_function(X))
        return np.stack([1.0 - second, second], axis=1)

    def predict_log_proba(self, X: Any) -> Floats:
        """(m, classes) their logarithms."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))


class SoftmaxRegression(_Classifier):
    """Logistic regression of two or more classes as one release: `Learner` with the loss `Softmax`.

    Args, Guarantee, Attributes: as of `LogisticRegression`, but for coef_ (classes, features) and intercept_
        (classes,), where there are more than two.
    """

    def _loss(self) -> Loss:
        return Softmax(len(self._public_classes()))

    def _model(self, found: Linear) -> Linear:
        if len(self.classes_) > 2:
            return found
        return Linear(found.coef[1:] - found.coef[:1], found.intercept[1:] - found.intercept[:1])

    def predict_proba(self, X: Any) -> Floats:
        """(m, classes) probabilities of the classes."""
        scores = self._scores(X)
        return np.asarray(
            softmax(np.hstack([np.zeros_like(scores), scores]) if scores.shape[1] == 1 else scores, axis=1)
        )

    predict_log_proba = LogisticRegression.predict_log_proba


class LinearSVC(_Binary):
    """A linear support vector machine of two classes, private: `Learner` with the loss `Hinge`.

    Args, Guarantee, Attributes: as of `LogisticRegression`. Its penalty is l2/2 ||theta||^2 plus the mean loss.
    """

    def _loss(self) -> Loss:
        return Hinge()


# -- regressions -----------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class _Regressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """Abstract: targets within public bounds."""

    _: KW_ONLY
    target_bounds: tuple[float, float] | None = None
    _spread = 1.0
    _curvature = 0.5

    def _target_range(self) -> tuple[float, float]:
        if self.target_bounds is None:
            raise ArgumentError(
                "target_bounds must be given: (low, high), to which targets are clipped, from what is public. Bounds "
                "that are found in the data tell of its outliers"
            )
        if not hasattr(self.target_bounds, "__len__") or len(self.target_bounds) != 2:
            raise ArgumentError(f"target_bounds must be (low, high), got {self.target_bounds!r}")
        low, high = (checks.real("target_bounds", side) for side in self.target_bounds)
        if low >= high:
            raise ArgumentError(f"target_bounds must be (low, high) with low below high, got {self.target_bounds!r}")
        return low, high

    def predict(self, X: Any) -> Floats:
        """(m,) predictions for rows clipped to their bounds, as those were that it learned from. Post-processing."""
        return np.asarray(self._scores_of_clipped(X)[:, 0])

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2. **Not private**: it is computed from these rows, and no noise covers it."""
        return float(super().score(X, y, sample_weight))


@dataclass(eq=False, repr=False)
class LinearRegression(_Regressor):
    """Least squares, private: by the gradients of `Squared`, or from two sums that do not depend on the model.

    Targets are clipped to target_bounds, and mapped to [-1, 1] while it learns.

    "ftrl" is `Learner`, [Kairouz et al. 2021, Algorithm 1], in passes over the rows as the other learners.
    "two-streams" is `LeastSquares`, their Algorithm 2: one release of the sums of y x and x x'. `fit` makes it in one
    step of all units, where no strategy has less noise than one Gaussian; with batch_size in several, as a stream does.
    What is kept is the last iterate, which uses all that was seen. It has noise in d (d + 1) / 2 sums, the other one in
    d: it is ahead with about five features, behind with twenty, see docs/online.md.

    Args:
        target_bounds: (low, high) of the targets, public.
        algorithm: "ftrl" or "two-streams".
        others: as of `LogisticRegression`, without classes. With two streams regularization is a number or "auto", that
            of `LeastSquares`; epochs is 1; clip_norm is any unit of length, and average has no say; radius is
            also what weights and regularization are chosen for. With "ftrl" clip_norm=None is 0.3 of the largest
            gradient of a row with a prediction within target_bounds.
    Guarantee, Attributes: as of `LogisticRegression`; coef_ is (1, features) and intercept_ (1,).
    """

    _: KW_ONLY
    algorithm: str = "ftrl"

    def _sums(self) -> bool:
        return bool(checks.choice("algorithm", self.algorithm, {"two-streams", "ftrl"}) == "two-streams")

    def _loss(self) -> Loss:
        return Squared()

    def _slope(self, loss: Loss) -> float:
        return 2.0

    def _scale(self) -> tuple[float, float]:
        low, high = self._target_range()
        return low / 2 + high / 2, high / 2 - low / 2

    def _targets(self, y: NDArray[Any]) -> NDArray[Any]:
        centre, half = self._scale()
        return np.asarray((np.clip(numbers_of(y), centre - half, centre + half) - centre) / half)

    def _model(self, found: Linear) -> Linear:
        centre, half = self._scale()
        return Linear(half * found.coef, half * found.intercept + centre)

    def _usual_size(self, count: int) -> int:
        return count if self._sums() else super()._usual_size(count)

    def _usual_passes(self, batches: int) -> int:
        return 1 if self._sums() else super()._usual_passes(batches)

    def _clip_norm(self, loss: Loss, bound: RowBound) -> float:
        if not self._sums():
            return super()._clip_norm(loss, bound)
        return 1.0 if self.clip_norm is None else checks.positive("clip_norm", self.clip_norm)

    def _learner_of(self, plan: Plan, loss: Loss, bound: RowBound) -> Any:
        if not self._sums():
            return super()._learner_of(plan, loss, bound)
        if self.epochs not in (None, 1):
            raise ArgumentError(f"epochs must be None or 1 for two streams, which need a row once, got {self.epochs}")
        weight = self.regularization
        if isinstance(weight, str) and weight != "auto":
            raise ArgumentError(f"regularization must be a number or 'auto' for two streams, got {weight!r}")
        return LeastSquares(
            plan, bound.width, bounds=bound.norm, target_bounds=(-1.0, 1.0), constraint=self._set(),
            regularization=None if isinstance(weight, str) else weight, radius=self.radius, l1=self.l1, l2=self.l2,
            checkpoint=self.checkpoint, key=plain_key(self.key),
        )  # fmt: skip

    def _step(self, learner: Any, units: Any, X: Any, y: NDArray[Any]) -> None:
        if self._sums():
            learner.step(units, X, y)
        else:
            super()._step(learner, units, X, y)

    def _kept(self, learner: Any) -> Floats:
        return np.asarray(learner.theta) if self._sums() else super()._kept(learner)


class PoissonRegression(_Regressor):
    """Regression of counts with a logarithmic link, private: `Learner` with the loss `Poisson`.

    Targets are clipped to target_bounds, and divided by the middle of these while it learns.

    Args, Guarantee, Attributes: as of `LinearRegression`; target_bounds from 0 on. predict gives means, e^score.
    """

    _spread = 0.5

    def _loss(self) -> Loss:
        return PoissonLoss()

    def _slope(self, loss: Loss) -> float:
        return 2.0

    def _middle(self) -> float:
        low, high = self._target_range()
        if low < 0:
            raise ArgumentError(f"target_bounds must be from 0 on: counts are not below it, got {self.target_bounds!r}")
        return low / 2 + high / 2

    def _targets(self, y: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(np.clip(numbers_of(y), *self._target_range()) / self._middle())

    def _model(self, found: Linear) -> Linear:
        return Linear(found.coef, found.intercept + log(self._middle()))

    def predict(self, X: Any) -> Floats:
        """(m,) means. Post-processing: it costs no privacy of those who were learned from."""
        return np.asarray(np.exp(super().predict(X)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags


@dataclass(eq=False, repr=False)
class ConvexLearner(RegressorMixin, Estimator):  # type: ignore[misc]
    """Any convex loss of `anyorder.online.losses`, private, on rows and targets as the loss takes them.

    Args:
        loss: such as `CustomLoss(gradient)`, whose gradient sees rows that are clipped to their bounds and have the
            intercept's element; or "squared", "logistic", "hinge", "poisson".
        others: as of `LogisticRegression`, without classes. clip_norm must be given for a loss without a bound on its
            slope.
    Guarantee: as of `LogisticRegression`; with `CustomLoss` on the promises there.
    Attributes: as of `LogisticRegression`: coef_ (outputs, features), intercept_ (outputs,).
    """

    _: KW_ONLY
    loss: Loss | LossWord | None = None

    def _loss(self) -> Loss:
        if self.loss is None:
            raise ArgumentError("loss must be given, such as 'squared' or CustomLoss(gradient)")
        return loss_of(self.loss, 1)

    def _slope(self, loss: Loss) -> float:
        return getattr(loss, "lipschitz", inf)

    def _targets(self, y: NDArray[Any]) -> NDArray[Any]:
        return numbers_of(y)

    def predict(self, X: Any) -> Floats:
        """(m,) or (m, outputs): the scores, rows times theta, for rows clipped to their bounds as in `fit`."""
        scores = self._scores_of_clipped(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2 of the scores. **Not private**: it is computed from these rows, and no noise covers it."""
        return float(super().score(X, y, sample_weight))
