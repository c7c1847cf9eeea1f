"""The part of docs/models.md that lists the models."""

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from benchmarks.models.case import Case, Outcome

__all__ = ["BEGIN", "END", "LIBRARIES", "PAGE", "entry", "of_library", "page"]

LIBRARIES = {
    "patterns": "patterns", "transformers": "transformers_models", "peft": "peft_models",
    "diffusers": "diffusers_models",
}  # fmt: skip

_TITLES = {
    "patterns": "As torchvision, timm and tutorials write them",
    "transformers": "transformers, attention masks and caches as they come",
    "peft": "peft",
    "diffusers": "diffusers",
}

BEGIN, END = "<!-- models: python -m benchmarks.models --write -->", "<!-- end of models -->"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def of_library(library: str) -> list[Case]:
    """The cases of a library; none where it is not installed."""
    if library != "patterns" and importlib.util.find_spec(library) is None:
        return []
    return list(importlib.import_module(f"benchmarks.models.{LIBRARIES[library]}").cases())


def entry(case: Case, found: Outcome) -> tuple[str, str]:
    """(what came of it, the model)."""
    if case.refused:
        result = f"refused: `{case.refused}`" if case.refused in found.refusal else "**wrong: not refused as said**"
    elif found.right:
        result = "one pass" if found.passes == 1 else "every gradient"
    else:
        result = "**wrong**" if found.error is not None else "**refused**"
    return result, f"{case.name} ({case.given})" if case.given else case.name


def page(found: dict[Case, Outcome]) -> Iterator[str]:
    """The tables of models, which stand in the page between its marks: one row for all with the same outcome."""
    for library, title in _TITLES.items():
        rows: dict[str, list[str]] = {}
        for result, name in (entry(case, outcome) for case, outcome in found.items() if case.library == library):
            rows.setdefault(result, []).append(name)
        if rows:
            yield from ["", f"### {title}", "", "| runs in | models |", "|---|---|"]
            yield from (f"| {result} | {'; '.join(names)} |" for result, names in rows.items())
