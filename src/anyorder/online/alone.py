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

_REFUSED = {
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
"""Rooms of scikit-learn whose members fit an estimator more than once, and what is wrong with it."""


def check_alone() -> None:
    """Raise TrainingError where one of scikit-learn's searches, ensembles or wrappers that fit often is calling.

    Told by the frames of the call, in this process or in the worker that fits. A loop of one's own is not seen, nor are
    wrappers of other packages: each of their fits is a release, too.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        for room, reason in _REFUSED.items():
            if module == room or module.startswith(room + "."):
                raise TrainingError(f"{frame.f_code.co_qualname} of {room} must not fit a private learner: {reason}")
        frame = frame.f_back
