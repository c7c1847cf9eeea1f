"""What every command prints: one line of a problem on stderr with its exit code, one JSON object on stdout."""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec

from anyorder._sealed import printable
from anyorder.errors import AnyorderError, ArgumentError, LoaderError, MissingDependencyError, ModelError, PlanError

__all__ = ["fail", "one_line_errors", "print_json"]

P = ParamSpec("P")
_USAGE = (ArgumentError, PlanError, LoaderError, ModelError, MissingDependencyError)


def fail(message: str, code: int) -> NoReturn:
    """Leave with this exit code, and one line on stderr."""
    print(f"anyorder: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(code)


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """The package's own errors become one line on stderr and an exit code."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except AnyorderError as problem:
            fail(str(problem), 2 if isinstance(problem, _USAGE) else 1)

    return guarded


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(data, allow_nan=False))
