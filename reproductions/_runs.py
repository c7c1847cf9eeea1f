"""Training runs on file, a JSON object a line: what was trained once is not trained again."""

import json
from pathlib import Path
from typing import Any

from reproductions import _powers

__all__ = ["keep", "kept"]


READ: set[str] = set()  # files of stored runs that a figure has read
POWERS: set[str] = set()  # digests of the powers that were stated when those runs were made
FRESH = False  # whether runs of other processes are left out, so that all are run anew
_OLD: dict[Path, int] = {}  # lines on file before the first look


def kept(file: Path) -> list[dict[str, Any]]:
    """All runs on file; with FRESH those of this process alone."""
    lines = file.read_text().splitlines() if file.exists() else []
    old = _OLD.setdefault(file, len(lines))
    runs = [json.loads(text) for text in lines[old if FRESH else 0 :]]
    if old and not FRESH:
        READ.add(file.name)
    POWERS.update(run.pop("powers", "") for run in runs)
    return runs


def keep(file: Path, run: dict[str, Any]) -> None:
    """Add one, with the powers of its paper, which the file is named after, as they are stated now."""
    file.parent.mkdir(parents=True, exist_ok=True)
    run = run | {"powers": _powers.of_paper(file.stem.split("_")[0])}
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(run) + "\n")
