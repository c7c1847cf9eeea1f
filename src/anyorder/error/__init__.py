"""How much noise reaches the iterates: the rows of B = A K, times the sensitivity."""

import warnings
from collections.abc import Callable
from typing import Any

from anyorder.error.measures import last_error, max_error, rmse
from anyorder.error.variance import row_variances

__all__ = ["last_error", "max_error", "rmse", "row_variances"]

RENAMED: dict[str, Callable[..., float]] = {"max_loss": max_error, "last_loss": last_error}


def __getattr__(name: str) -> Any:
    if name not in RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return renamed(name)


def renamed(name: str) -> Callable[..., float]:
    """What an old name stands for, with a warning to whoever reads the attribute of a module."""
    now = RENAMED[name]
    message = f"{name} is now called {now.__name__}; the old name goes with the next version"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return now
