"""Refusal of private fits inside searches and ensembles, whose every fit is one more release on the same rows."""

import sys
from types import FrameType

from anyorder.errors import TrainingError

__all__ = ["check_alone"]

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
    wrappers of other packages: each of their fits is a release, too.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if _within(module, ("sklearn",)) and not _within(module, _ONCE):
            reason = next((reason for room, reason in _REASONS.items() if _within(module, (room,))), _OTHERS)
            raise TrainingError(f"{frame.f_code.co_qualname} of {module} must not fit a private learner: {reason}")
        frame = frame.f_back


def _within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)
