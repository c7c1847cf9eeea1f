"""Names of the form module:function, given on the command line."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyorder.errors import ArgumentError

__all__ = ["load_function"]


def load_function(name: str, what: str) -> Callable[..., Any]:
    """The function that `module:function` names; the module is also looked for in the current folder.

    Args:
        name: for example "mydata:load".
        what: the argument's name, for messages.
    Raises: ArgumentError if there is no such module or function. An error inside the module is left as it is.
    """
    module_name, _, function_name = name.partition(":")
    if module_name.endswith(".py") or not all(part.isidentifier() for part in module_name.split(".")):
        likely = Path(module_name.removesuffix(".py")).as_posix().lstrip("./").replace("/", ".")
        raise ArgumentError(
            f"{what} must name a module, got {name!r}: write it as a module, {likely}:{function_name}, without ./ "
            "and .py"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not module_name.startswith(problem.name):
            raise  # a module that this one needs is missing
        raise ArgumentError(f"{what} names module {module_name!r}, which cannot be found from {here}") from problem
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ArgumentError(f"{what} names {name!r}, but module {module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]
