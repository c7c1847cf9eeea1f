"""How the command line ends: an exit code, and for a problem one line on stderr."""

import sys
from enum import IntEnum
from typing import NoReturn

__all__ = ["MEANINGS", "ExitCode", "fail"]


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_PRIVATE = 3
    WHAT_IF = 4
    NOT_ESTABLISHED = 5
    STOPPED = 130


MEANINGS = {
    ExitCode.OK: "It worked. A verification passed, a checked claim holds, an audit did not refute the claim.",
    ExitCode.FAILED: "It failed. A file was not verified, a checked claim does not hold, an audit refuted the claim, a "
    "budget refused a plan, or a run ended early.",
    ExitCode.USAGE: "Nothing was done. The command was wrong, a package is missing, or an audit did not take place.",
    ExitCode.NOT_PRIVATE: "`check` alone: no private training was seen, so epsilon is infinite.",
    ExitCode.WHAT_IF: "`check` alone: no epsilon is claimed. The result says what the order of the data would give.",
    ExitCode.NOT_ESTABLISHED: "`check` alone: an epsilon is claimed. Whether each example was clipped alone, and each "
    "step had noise of its own, could not be established.",
    ExitCode.STOPPED: "Ctrl-C stopped it before there was anything to go on with.",
}
"""What each code says to a script that calls the command."""


def fail(message: str, code: int) -> NoReturn:
    """Leave with this exit code, and one line on stderr."""
    from anyorder.formats import printable  # with NumPy, which help and version do without

    print(f"anyorder: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(int(code))
