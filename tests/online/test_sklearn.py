"""scikit-learn's own checks of estimators, on every class; what cannot hold is named with its reason."""

import pytest
import sklearn
from sklearn.utils.estimator_checks import check_estimator

from anyorder.online import (
    ConvexLearner,
    LinearRegression,
    LinearSVC,
    LogisticRegression,
    PoissonRegression,
    SoftmaxRegression,
)
from anyorder.online.losses import Squared

KEY = bytes(range(32))
COMMON = {
    "epsilon": 500.0,
    "delta": 1e-6,
    "bounds": 6.0,
    "horizon": 1000,
    "batch_size": 16,
    "mechanism": "independent",
    "key": KEY,
}
ESTIMATORS = [
    LogisticRegression(classes=[0, 1], **COMMON),
    SoftmaxRegression(classes=2, **COMMON),
    LinearSVC(classes=[0, 1], **COMMON),
    LinearRegression(target_bounds=(-4, 4), **COMMON),
    LinearRegression(target_bounds=(-4, 4), algorithm="two-streams", **COMMON),
    PoissonRegression(target_bounds=(0, 10), **COMMON),
    ConvexLearner(loss=Squared(), clip_norm=10.0, regularization=300.0, **COMMON),
]

SILENT = "an error would tell of one row; it adds zero, and nothing tells of it"
OTHER_CLASSES = "it has labels of other classes than the public ones, which add zero"
CANNOT_HOLD = {
    "check_fit_score_takes_y": "partial_fit after a fit would be a second release that forgets the first; refused",
    "check_dtype_object": "wants a TypeError; it is an ArgumentError, as all of this package, and quotes no value",
    "check_estimators_nan_inf": f"NaN in what is learned from: {SILENT}",
    "check_supervised_y_no_nan": f"infinite targets: {SILENT}",
}
CLASSIFIERS = {
    "check_classifiers_classes": OTHER_CLASSES,
    "check_classifiers_regression_target": OTHER_CLASSES,
}


def cannot_hold(estimator):
    match estimator:
        case SoftmaxRegression():
            own = dict.fromkeys(("check_classifiers_train", "check_estimator_sparse_array"), OTHER_CLASSES)
            for name in ("check_estimators_partial_fit_n_features", "check_n_features_in_after_fitting"):
                own[name] = "says to partial_fit that there are other classes"
            return {**CANNOT_HOLD, **CLASSIFIERS, **own, "check_estimator_sparse_matrix": OTHER_CLASSES}
        case LogisticRegression() | LinearSVC():
            return {**CANNOT_HOLD, **CLASSIFIERS, "check_classifier_not_supporting_multiclass": OTHER_CLASSES}
        case _:
            return CANNOT_HOLD


@pytest.mark.skipif(
    tuple(map(int, sklearn.__version__.split(".")[:2])) < (1, 8),
    reason="what cannot hold is written down for the checks of scikit-learn 1.8, which have other data",
)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda one: type(one).__name__)
def test_conventions(estimator):
    """What is said to fail must fail, or it is said no more."""
    found = check_estimator(estimator, expected_failed_checks=cannot_hold(estimator), on_fail=None, on_skip=None)
    assert len(found) > 40
    wrong = {one["check_name"]: one["exception"] for one in found if one["status"] == "failed"}
    wrong |= {one["check_name"]: "passes" for one in found if one["status"] == "passed" and one["expected_to_fail"]}
    assert wrong == {}
