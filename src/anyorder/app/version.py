"""What `anyorder --version` prints, from the libraries' files alone: neither torch nor NumPy is loaded for it."""

import os
from importlib.util import find_spec
from pathlib import Path

from anyorder import __version__
from anyorder._library import CLIPPING_SOURCES, NOISE_SOURCES, PATHS, load

_PACKAGE = Path(__file__).parents[1]


def version_lines() -> str:
    """The version, and which compiled libraries are used."""
    lines = [__version__, f"noise: {_in_use(_PACKAGE / 'noise' / '_kernel.so', NOISE_SOURCES, 'NumPy')}"]
    if find_spec("torch") is not None:
        library = _PACKAGE / "clipping" / "_convolution.so"
        lines.append(f"clipping: {_in_use(library, CLIPPING_SOURCES, 'torch')}")
    return "\n".join(lines)


def _in_use(file: Path, sources: tuple[str, ...], otherwise: str) -> str:
    """The library or what stands in for it; that its numbers are right is seen, and said, where it is first used."""
    asked = os.environ.get("ANYORDER_KERNEL", "best")
    if asked == "reference":
        return f"{otherwise} (ANYORDER_KERNEL=reference)"
    library = load(file, sources)
    if library is None:
        return f"{otherwise} (no library {file}, or it does not load, or is of other sources)"
    return f"compiled, {PATHS[int(library.anyorder_lanes())] if asked == 'best' else asked}"
