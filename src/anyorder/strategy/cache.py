"""Results of long optimisations on disk, by the content of the question.

The folder is $ANYORDER_CACHE ("off" for none), or `anyorder` in the platform's folder for caches. Nothing private is
in it, and nothing in it is trusted with privacy: sensitivities are computed anew from whatever strategy was read.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from anyorder.patterns import Participation
from anyorder.workload import Workload

_VERSION = 4  # of the optimisers: raise it when they find better optima

T = TypeVar("T")


def folder() -> Path | None:
    """Where results are kept; None if $ANYORDER_CACHE is "off"."""
    chosen = os.environ.get("ANYORDER_CACHE")
    if chosen:
        return None if chosen == "off" else Path(chosen)
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        root = str(Path.home() / "Library" / "Caches")
    else:
        root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "anyorder"


def key(question: dict[str, Any]) -> str:
    """SHA-256 of the question as canonical JSON, with the version of the optimisers."""
    text = json.dumps({"version": _VERSION, **question}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def question(kind: str, workload: Workload, participation: Participation, objective: str) -> dict[str, Any]:
    """That of a fit: JSON values."""
    return {
        "kind": kind, "workload": workload.to_dict(), "participation": participation.to_dict(), "objective": objective,
    }  # fmt: skip


def remember(
    question: dict[str, Any], answer: Callable[[], T], *, encode: Callable[[T], Any], decode: Callable[[Any], T]
) -> T:
    """The answer from disk, or computed and kept.

    An entry that cannot be read, is damaged, or does not decode is computed anew and replaced; a folder that cannot
    be written is done without. Writes are atomic: processes may share the folder.

    Args:
        question: JSON values that determine the answer.
        answer: computes it.
        encode, decode: to and from JSON values.
    """
    root = folder()
    if root is None:
        return answer()
    path = root / f"{key(question)}.json"
    try:
        entry = json.loads(path.read_text())
        if entry["digest"] == _digest(entry["value"]):
            return decode(entry["value"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass  # absent or damaged: computed below
    result = answer()
    value = encode(result)
    _write(path, json.dumps({"digest": _digest(value), "value": value}))
    return result


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError:
        return
