"""What commands share that train: a new run or one that goes on, with a bar that stops however it ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from anyorder.cli.output import fail
from anyorder.errors import ArgumentError

__all__ = ["run_or_resume"]

T = TypeVar("T")


def run_or_resume(
    command: str,
    bar: Any,
    given: dict[str, Any],
    output: Path | None,
    resume: Path | None,
    *,
    start: Callable[[], T],
    go_on: Callable[[Path], T],
    budget: Path | None = None,
) -> T:
    """What `start` gives, or `go_on` with the folder of an earlier run. Stopped by a key it leaves with exit code 1.

    Args:
        command: its name, for what is to be typed to go on.
        bar: a `ProgressBar`.
        given: the settings that were given, by name.
        output: the folder that was given, for a new run.
        resume: the folder of the run to go on with.
        budget: the file that was given, for a new run.
    Raises: ArgumentError for settings beside `resume`, which has its own.
    """
    try:
        if resume is None:
            return start()
        beside = [name for name, value in (("output", output), ("budget", budget)) if value is not None]
        if given or beside:
            names = [*given, *beside]
            extra = ", ".join("--" + name.replace("_", "-") for name in names)
            raise ArgumentError(f"--resume takes the settings from its folder: leave out {extra}")
        return go_on(resume)
    except KeyboardInterrupt:
        bar.stop()
        hint = "" if bar.path is None else f"; go on with: anyorder {command} --resume {bar.path}"
        fail(f"stopped{hint}", 1)
    finally:
        bar.stop()
