"""Training runs on file, a JSON object a line: what was trained once is not trained again."""

import json
from pathlib import Path
from typing import Any

__all__ = ["keep", "kept"]


def kept(file: Path) -> list[dict[str, Any]]:
    """All runs on file."""
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []


def keep(file: Path, run: dict[str, Any]) -> None:
    """Add one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(run) + "\n")
