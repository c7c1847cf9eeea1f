"""How the command line ends: one line of a problem on stderr, and an exit code."""

import sys
from typing import NoReturn

__all__ = ["fail"]


def fail(message: str, code: int) -> NoReturn:
    """Leave with this exit code, and one line on stderr."""
    from anyorder.formats import printable  # with NumPy, which help and version do without

    print(f"anyorder: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(code)
