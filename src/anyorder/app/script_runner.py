"""Runs a script, or a function, as Python would, and writes down what was seen.

    python -m anyorder.app.script_runner REPORT '{"delta": 1e-5}' SCRIPT.py [ARGUMENTS]
    python -m anyorder.app.script_runner REPORT '{"epochs": 3}' module:function

A process of its own, which ends with the script's exit code; `anyorder check` reads the report. A function that returns
a loader has that loader checked; one that returns nothing is a training, and is watched.
"""

import importlib
import json
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anyorder.audit.loader_check import check, length_of, watch
from anyorder.audit.observations import undisturbed
from anyorder.errors import AnyorderError, ArgumentError
from anyorder.plan.options import careful_delta


def main(arguments: list[str]) -> None:
    """Run, and write the report whatever happens to the script.

    Args:
        arguments: the report's path, options in JSON, what to run, and its arguments.
    """
    report, options, target, *rest = arguments
    with undisturbed():  # engines are watched where they are there before the script
        import anyorder.training.engine  # noqa: F401

        if find_spec("opacus") is not None:
            importlib.import_module("opacus")
    found: dict[str, Any] = {"findings": [], "problem": None}
    given = json.loads(options)
    sys.argv = [target, *rest]
    try:
        with watch(unit=given.pop("unit", None)) as seen:
            try:
                result = _run(target)
            finally:
                choice = {name: given[name] for name in ("delta", "noise_multiplier", "accountant") if name in given}
                found["findings"] = [_told(one) for one in seen.findings(**choice)]
        if result is not None:
            delta = careful_delta(1e-5, length_of(getattr(result, "dataset", None)))
            found["findings"] = [_told(check(result, **{"delta": delta, "noise_multiplier": 1.0, **given}))]
    except AnyorderError as problem:
        found["problem"] = str(problem)
    finally:
        Path(report).write_text(json.dumps(found, allow_nan=False))


def _run(target: str) -> Any:
    """What a script or function returns; None for a script."""
    if ":" not in target:
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(str(Path(target).resolve()), run_name="__main__")
        return None
    sys.path[0] = str(Path.cwd())
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ArgumentError(f"the target must be SCRIPT.py or module:function, got {target!r}, which is no function")
    return function()


def _told(one: Any) -> dict[str, Any]:
    return {**one.to_dict(), "facts": one.facts()}


if __name__ == "__main__":
    main(sys.argv[1:])
