"""`anyorder` on the command line, and `python -m anyorder`."""

import sys
from importlib.util import find_spec
from typing import NoReturn

from anyorder.app.exits import ExitCode
from anyorder.app.version import version_lines

__all__ = ["main"]


def main() -> None:
    """Run the command line; leaves with an `anyorder.app.exits.ExitCode`."""
    try:
        _main()
    except KeyboardInterrupt:  # while modules load, or in a command that has nothing to go on with
        print("anyorder: stopped", file=sys.stderr)
        sys.exit(ExitCode.STOPPED)


def _main() -> NoReturn:
    if sys.argv[1:] == ["--version"]:  # without the command line's own packages
        print(version_lines())
        sys.exit(ExitCode.OK)
    if find_spec("typer") is None or find_spec("rich") is None:
        from anyorder import checks
        from anyorder.errors import MissingDependencyError

        try:
            for package in ("typer", "rich"):
                checks.optional(package, extra="cli", purpose="the command line")
        except MissingDependencyError as problem:
            print(f"anyorder: {problem}", file=sys.stderr)
            sys.exit(ExitCode.USAGE)
    from anyorder.app.cli import run

    sys.exit(run())


if __name__ == "__main__":
    main()
