"""The main job: train a model on a data set by name, privately, into a folder that says what was done.

Federations and audits besides.

`run.planning`, for the shell's plans, loads without torch; the job is loaded when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyorder.run.auditing import Setup, audit_training
    from anyorder.run.federated_data import by_key
    from anyorder.run.input_canaries import audit_inputs, with_canaries
    from anyorder.run.job import resume, train
    from anyorder.run.settings import Settings

__all__ = ["Settings", "Setup", "audit_inputs", "audit_training", "by_key", "resume", "train", "with_canaries"]

_FILES = {  # the others are in job
    "Settings": "settings",
    "Setup": "auditing",
    "audit_inputs": "input_canaries",
    "audit_training": "auditing",
    "by_key": "federated_data",
    "with_canaries": "input_canaries",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'anyorder.run' has no attribute {name!r}")
    return getattr(importlib.import_module(f"anyorder.run.{_FILES.get(name, 'job')}"), name)
