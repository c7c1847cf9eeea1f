"""Private linear models with scikit-learn's interface: fit, partial_fit, predict, in pipelines."""

from dataclasses import KW_ONLY, dataclass
from math import inf, log
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin, RegressorMixin

from anyorder import _check
from anyorder.errors import ArgumentError
from anyorder.online.estimator import Estimator
from anyorder.online.features import Linear, RowBound
from anyorder.online.inputs import codes_of, numbers_of, plain_key, public_classes
from anyorder.online.least_squares import LeastSquares
from anyorder.online.losses import Hinge, Logistic, Loss, Poisson, Softmax, Squared
from anyorder.plan import Plan

__all__ = [
    "ConvexLearner", "LinearRegression", "LinearSVC", "LogisticRegression", "PoissonRegression", "SoftmaxRegression",
]  # fmt: skip

Floats = NDArray[np.float64]


# -- classifiers -----------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class _Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """Abstract: labels of public classes."""

    _: KW_ONLY
    classes: Any = None

    def _targets(self, y: NDArray[Any]) -> NDArray[Any]:
        self.classes_ = public_classes(self.classes)
        return codes_of(y, self.classes_)

    def _same_classes(self, classes: Any) -> None:
        if not np.array_equal(np.unique(np.asarray(classes)), public_classes(self.classes)):
            raise ArgumentError("classes must be those of the estimator, or left out of partial_fit")

    def decision_function(self, X: Any) -> Floats:
        """(m,) scores of the second class, or (m, classes) scores of each; of rows as they are, not cut."""
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

    fit(X, y) makes one release: batches of rows, cut to public bounds, each with the gradient of its rows, cut to
    clip_norm, and noise that is correlated over steps; [Kairouz et al. 2021, Algorithm 1]. What is kept of it are
    `coef_`, `intercept_`, the plan and the certificate.

    Guarantee: what fit or all calls of partial_fit leave, in the attributes below, is (epsilon, delta)-DP for one unit,
    by itself each row, under `neighbours`. Number of rows and of features, names of features, and ids of units are
    public. Classes, bounds, scales, number of steps and weights are arguments, and never taken from the data: without
    bounds and classes nothing is fitted. A second fit is a second release: `ao.compose` has the epsilon of both.
    `predict` of others' rows costs them nothing here; `score` is not private.

    Args:
        epsilon, delta: of one fit, or of one stream of partial_fit.
        bounds: what is public of the features: the L2 norm to which each row is cut; or (low, high), numbers or arrays
            of one for each feature, to which each feature is clipped and from which it is mapped to [-1, 1]. A number
            is worth less noise where rows have many features that are mostly zero.
        classes: the labels that there can be, or their number for 0, 1, ..
        horizon: the most steps of a stream; for partial_fit alone.
        batch_size: units in a step. None: a 50th of all, from 1 to 256; 256 in partial_fit.
        epochs: passes over the rows, in one order. None: as many as make 1000 steps, from 1 to 5.
        mechanism: as of `ao.plan`. None: up to 300 steps the best of all ("dense"); beyond a BLT with two buffers, or
            eight bands where a pass has less than 20 steps, which are found in a second however many there are.
        clip_norm: to which a unit's gradient is cut. None: 0.3 of the largest that a row can have, which is less noise
            and for two classes the same as a loss that is linear in rows that are far off.
        regularization: lambda of `Learner`, above 0. "auto": for which the noise moves no score by more than 2, root
            mean square over steps. "bound": for which `regret_bound` is least; needs radius, and then clip_norm=None
            cuts nothing.
        radius: public bound on the norm of the parameters: a `Ball`. Or
        constraint: one of `anyorder.online.sets`. Both, as l1 and l2, are of the parameters on rows within their
            bounds, the intercept's among them.
        l1, l2: elastic net, weights in the mean loss.
        fit_intercept: add a feature of the size intercept_scaling times the bound on rows.
        average: what is kept is the mean of all iterates, the t-th with weight t^average: 0 for that of which
            `risk_bound` speaks, None for the last iterate alone.
        shuffle: take the units of a fit in a secret random order; else in that in which they first come.
        neighbours, unit: as of `ao.plan`: what epsilon is about.
        plan: an `ao.Plan` to carry out, such as `ao.tune` hands out; it says what else epsilon, delta, batch_size,
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
        """(m, 2) their logarithms."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))


class SoftmaxRegression(_Classifier):
    """Logistic regression of two or more classes as one release: `Learner` with the loss `Softmax`.

    Args, Guarantee, Attributes: as of `LogisticRegression`, but for coef_ (classes, features) and intercept_
        (classes,), where there are more than two.
    """

    def _loss(self) -> Loss:
        return Softmax(len(public_classes(self.classes)))

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

    def predict_log_proba(self, X: Any) -> Floats:
        """(m, classes) their logarithms."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))


class LinearSVC(_Binary):
    """A linear support vector machine of two classes, private: `Learner` with the loss `Hinge`.

    Args, Guarantee, Attributes: as of `LogisticRegression`. Its penalty is l2/2 ||theta||^2 beside the mean loss.
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
        low, high = (_check.real("target_bounds", side) for side in self.target_bounds)
        if low >= high:
            raise ArgumentError(f"target_bounds must be (low, high) with low below high, got {self.target_bounds!r}")
        return low, high

    def predict(self, X: Any) -> Floats:
        """(m,) predictions. Post-processing: it costs no privacy of those who were learned from."""
        return np.asarray(self._scores(X)[:, 0])

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
        return bool(_check.choice("algorithm", self.algorithm, {"two-streams", "ftrl"}) == "two-streams")

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
        return 1.0 if self.clip_norm is None else _check.positive("clip_norm", self.clip_norm)

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
        return Poisson()

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
        loss: such as `Custom(gradient)`, whose gradient sees rows that are cut to their bounds and have the intercept's
            element; `Squared()`, `Softmax(3)`, ..
        others: as of `LogisticRegression`, without classes. clip_norm must be given for a loss without a bound on its
            slope.
    Guarantee: as of `LogisticRegression`; with `Custom` on the promises there.
    Attributes: as of `LogisticRegression`: coef_ (outputs, features), intercept_ (outputs,).
    """

    _: KW_ONLY
    loss: Loss | None = None

    def _loss(self) -> Loss:
        if self.loss is None:
            raise ArgumentError(
                "loss must be given: one of anyorder.online.losses, such as Squared() or Custom(gradient)"
            )
        return self.loss

    def _slope(self, loss: Loss) -> float:
        return getattr(loss, "lipschitz", inf)

    def _targets(self, y: NDArray[Any]) -> NDArray[Any]:
        return numbers_of(y)

    def predict(self, X: Any) -> Floats:
        """(m,) or (m, outputs): the scores, rows times theta."""
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2 of the scores. **Not private**: it is computed from these rows, and no noise covers it."""
        return float(super().score(X, y, sample_weight))
