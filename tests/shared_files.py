"""Where the reference values and data sets lie: the folder `shared` beside the checkout, or $ANYORDER_SHARED."""

import os
from pathlib import Path

import pytest


def shared(name: str) -> Path:
    """The path of a shared file or folder; skips the test, with the reason, where it is absent."""
    root = Path(os.environ.get("ANYORDER_SHARED", Path(__file__).resolve().parents[1].parent / "shared"))
    path = root / name
    if not path.exists():
        pytest.skip(f"needs {name} from the shared folder of references and data, not found under {root}")
    return path
