"""Training runs on file, a JSON object a line: what was trained once is not trained again."""

import json
from pathlib import Path
from typing import Any

__all__ = ["keep", "kept"]


READ: set[str] = set()  # files of stored runs that a figure has read
FRESH = False  # whether runs of other processes are left out, so that all are run anew
_OLD: dict[Path, int] = {}  # lines on file before the first look


def kept(file: Path) -> list[dict[str, Any]]:
    """All runs on file; with FRESH those of this process alone."""
    lines = file.read_text().splitlines() if file.exists() else []
    old = _OLD.setdefault(file, len(lines))
    if FRESH:
        return [json.loads(text) for text in lines[old:]]
    if old:
        READ.add(file.name)
    return [json.loads(text) for text in lines]


def keep(file: Path, run: dict[str, Any]) -> None:
    """Add one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(run) + "\n")
