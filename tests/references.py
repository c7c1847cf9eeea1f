"""The reference values of tests/refs: what other projects, papers and independent computations give."""

import json
from pathlib import Path
from typing import Any

REFS = Path(__file__).parent / "refs"


def load(file: str) -> Any:
    """All of one file; tests/refs/README.md says where its numbers come from."""
    return json.loads((REFS / file).read_text())


def reference(name: str) -> Any:
    """The value of one id of jax_privacy.json."""
    return next(entry["value"] for entry in load("jax_privacy.json")["values"] if entry["id"] == name)


def scenario(name: str, mechanism: str) -> dict[str, float]:
    """rmse, max, sens of a mechanism in one of the scenarios of state_of_the_art.json; sensitivity included."""
    data = load("state_of_the_art.json")
    found: dict[str, float] = data["computed_here"]["mechanisms_by_scenario"]["values"][name]["mechanisms"][mechanism]
    return found
