"""Features brought to one scale: by public bounds, or by a mean and a spread that are released privately."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from math import sqrt
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from anyorder.accounting.curves import Curve
from anyorder.certificate import Certificate
from anyorder.clipping import bounded_sum
from anyorder.errors import ArgumentError
from anyorder.ledger import as_units, numbered
from anyorder.ledger.ids import distinct
from anyorder.online.alone import check_alone
from anyorder.online.features import RowBound
from anyorder.online.inputs import Key, check_units, read_rows
from anyorder.participation import SingleEpoch
from anyorder.planner import plan as make_plan
from anyorder.release import Release

__all__ = ["Scaler"]

Floats = NDArray[np.float64]


@dataclass(eq=False, repr=False)
class Scaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Clips each feature to [low, high], and maps it: to [-1, 1], or to mean 0 and spread 1 by a private release.

    Without epsilon it is public: nothing is taken from the data but the number of features. With epsilon and delta,
    u in [-1, 1]^d a row so mapped, `fit` releases once, with noise by one Gaussian mechanism,

        sum over units of  v_u,   v_u = mean over its rows of (u, u^2 - 1/2)   (elementwise),   ||v_u|| <= sqrt(5 d) / 2

    and takes mean and spread of every feature from it, for as many units as there are, which is public. Proof of the
    norm: of one feature u^2 + (u^2 - 1/2)^2 = u^4 + 1/4 <= 5/4, summed over d features; a mean is no longer than the
    longest. So nothing is lost by the cut to that norm, which is made all the same, against rounding. A unit with NaN
    in some row adds zero.

    Guarantee: with epsilon, what fit leaves is (epsilon, delta)-DP for one unit, neighbours zero-out; a model that is
    fitted on what `transform` gives has its own epsilon beside it: `ao.compose(scaler.curve_, model.plan_.curve)`.

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
            participation=SingleEpoch(1), batch_size=count, epsilon=self.epsilon, delta=self.delta,
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
