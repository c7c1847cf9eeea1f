"""The values that jax_privacy gives, by their ids."""

import json
from typing import Any

from shared_files import shared


def reference(name: str) -> Any:
    """The value of one id of refs/jax_privacy.json."""
    values = json.loads(shared("refs/jax_privacy.json").read_text())["values"]
    return next(entry["value"] for entry in values if entry["id"] == name)


def scenario(name: str, mechanism: str) -> dict[str, float]:
    """rmse, max, sens of a mechanism in one of the scenarios of refs/state_of_the_art.json; sensitivity included."""
    data = json.loads(shared("refs/state_of_the_art.json").read_text())
    found: dict[str, float] = data["computed_here"]["mechanisms_by_scenario"]["values"][name]["mechanisms"][mechanism]
    return found
