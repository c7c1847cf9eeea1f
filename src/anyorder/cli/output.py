"""What every command prints: one line of a problem on stderr with its exit code, one JSON object on stdout."""

import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

from anyorder.errors import AnyorderError, ArgumentError, LoaderError, MissingDependencyError, ModelError, PlanError
from anyorder.formats import printable
from anyorder.plan.cost import is_large
from anyorder.plan.plan import Plan

__all__ = ["attacking", "fail", "one_line_errors", "print_json", "verify_command"]

P = ParamSpec("P")
_USAGE = (ArgumentError, PlanError, LoaderError, ModelError, MissingDependencyError)


def fail(message: str, code: int) -> NoReturn:
    """Leave with this exit code, and one line on stderr."""
    print(f"anyorder: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(code)


def verify_command(folder: Path, plan: Plan) -> str:
    """What checks the run in a folder."""
    return f"anyorder verify{' --large' if is_large(plan.to_dict()) else ''} {folder / 'run.privacy.json'}"


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """The package's own errors become one line on stderr and an exit code."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except AnyorderError as problem:
            fail(str(problem), 2 if isinstance(problem, _USAGE) else 1)

    return guarded


@contextmanager
def attacking(stop: Callable[[], object] = lambda: None) -> Iterator[None]:
    """An audit, in which code runs that is not ours: whatever goes wrong leaves with 2, as 1 says "refuted".

    Args:
        stop: ends the bar of progress, before anything is printed and at the end; may be called twice.
    """
    try:
        yield
    except AnyorderError as problem:
        stop()
        fail(str(problem), 2)
    except KeyboardInterrupt:
        stop()
        fail("stopped: there is no audit of half a run", 2)
    except SystemExit as problem:  # of the code that is audited; its own code may be 1, or 0
        stop()
        fail(f"the code that is audited left the process, by sys.exit({problem.code!r}): there is no audit", 2)
    except Exception as problem:  # of the code that is audited, where the traceback says more than a line
        stop()
        if isinstance(problem, ModuleNotFoundError) and problem.name == "torch":
            fail("this audit needs torch, which is not installed: pip install torch", 2)
        traceback.print_exc()
        raise SystemExit(2) from problem
    finally:
        stop()


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(data, allow_nan=False))
