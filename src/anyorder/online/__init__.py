"""Convex learners in one pass, of any order: an adapter of `anyorder.release`.

The classes with scikit-learn's interface, and `Scaler`, are loaded when they are first asked for: scikit-learn is
in the extra `online`, and the rest works without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from anyorder import checks
from anyorder.online.learner import Learner
from anyorder.online.least_squares import LeastSquares
from anyorder.online.losses import CustomLoss
from anyorder.online.regret import best_regularization, regret_bound
from anyorder.online.sets import Ball, Box, Simplex

if TYPE_CHECKING:
    from anyorder.online.estimators import (
        ConvexLearner,
        LinearRegression,
        LinearSVC,
        LogisticRegression,
        PoissonRegression,
        Scaler,
        SoftmaxRegression,
    )

__all__ = [
    "Ball",
    "Box",
    "ConvexLearner",
    "CustomLoss",
    "Learner",
    "LeastSquares",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "PoissonRegression",
    "Scaler",
    "Simplex",
    "SoftmaxRegression",
    "best_regularization",
    "regret_bound",
]  # fmt: skip

_LAZY = {
    "ConvexLearner": "estimators",
    "LinearRegression": "estimators",
    "LinearSVC": "estimators",
    "LogisticRegression": "estimators",
    "PoissonRegression": "estimators",
    "Scaler": "estimators",
    "SoftmaxRegression": "estimators",
}
"""Name -> the file that it is from."""

if not TYPE_CHECKING:  # which sees the imports above, and tells of names that are none

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'anyorder.online' has no attribute {name!r}")
        checks.optional("sklearn", extra="online", purpose=f"anyorder.online.{name}")
        value = getattr(importlib.import_module(f"anyorder.online.{_LAZY[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
