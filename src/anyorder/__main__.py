"""`anyorder` on the command line, and `python -m anyorder`."""

import sys
from importlib.util import find_spec
from typing import NoReturn

from anyorder.app.version import version_lines

__all__ = ["main"]


def main() -> None:
    """Run the command line; leaves with 0 (ok), 1 (a verification or a run failed), 2 (bad usage) or 130 (stopped)."""
    try:
        _main()
    except KeyboardInterrupt:  # while modules load, or in a command that has nothing to go on with
        print("anyorder: stopped", file=sys.stderr)
        sys.exit(130)


def _main() -> NoReturn:
    if sys.argv[1:] == ["--version"]:  # without the command line's own packages
        print(version_lines())
        sys.exit(0)
    if find_spec("typer") is None or find_spec("rich") is None:
        from anyorder import checks
        from anyorder.errors import MissingDependencyError

        try:
            for package in ("typer", "rich"):
                checks.optional(package, extra="cli", purpose="the command line")
        except MissingDependencyError as problem:
            print(f"anyorder: {problem}", file=sys.stderr)
            sys.exit(2)
    from anyorder.app.cli import run

    sys.exit(run())


if __name__ == "__main__":
    main()
