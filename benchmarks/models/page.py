"""The page of the documentation that lists the models."""

import importlib
import importlib.util
from collections.abc import Iterator

from benchmarks.models.case import EXAMPLES, TOLERANCE, Case, Outcome

__all__ = ["LIBRARIES", "of_library", "page", "row"]

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

_HEAD = f"""# Models

Each of these runs in a test: random weights, a small configuration, {EXAMPLES} examples of which some are cut, and the
clipped sum against that of a loop over the examples with plain autograd, in float32, to {TOLERANCE:g} of its norm.
The page is what `python -m benchmarks.models` prints.

- *one pass*: one forward and one backward pass; *every gradient*: all examples' gradients are made, with a second
  forward pass.
- *refused*: `make_private`, or the first call, raises an error that says what to change; here is a part of it.
- A model that computes a loss of its own from `labels` returns one for each example: `loss.mean().backward()`.
- A cache in the outputs (`past_key_values`) is left out, as with `use_cache=False`.
- *converted*: by `ao.clipping.convert`, which puts GroupNorm in the place of BatchNorm.

`ao.check_model(model)` says what must be changed in a model of your own before training.
"""


def of_library(library: str) -> list[Case]:
    """The cases of a library; none where it is not installed."""
    if library != "patterns" and importlib.util.find_spec(library) is None:
        return []
    return list(importlib.import_module(f"benchmarks.models.{LIBRARIES[library]}").cases())


def row(case: Case, found: Outcome) -> str:
    """One line of a table."""
    if case.refused:
        result = f"refused: `{case.refused}`" if case.refused in found.refusal else "**wrong: not refused as said**"
    elif found.right:
        result = "one pass" if found.passes == 1 else "every gradient"
    else:
        result = "**wrong**" if found.error is not None else "**refused**"
    name = f"{case.name} ({case.given})" if case.given else case.name
    return f"| {name} | {result} |"


def page(found: dict[Case, Outcome]) -> Iterator[str]:
    """The lines of the page."""
    yield from _HEAD.splitlines()
    for library, title in _TITLES.items():
        rows = [row(case, outcome) for case, outcome in found.items() if case.library == library]
        if rows:
            yield from ["", f"## {title}", "", "| model | runs in |", "|---|---|", *rows]
