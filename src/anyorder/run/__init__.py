"""The main job: train a model on a data set by name, privately, into a folder that says what was done; and audits.

`run.planning`, for the shell's plans, loads without torch; the job is loaded when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyorder.run.auditing import Setup, audit_training
    from anyorder.run.input_canaries import audit_inputs, with_canaries
    from anyorder.run.job import Observer, Result, resume, train
    from anyorder.run.settings import Settings

__all__ = [
    "Observer", "Result", "Settings", "Setup", "audit_inputs", "audit_training", "resume", "train", "with_canaries",
]  # fmt: skip

_FILES = {  # the others are in job
    "Settings": "settings",
    "Setup": "auditing",
    "audit_inputs": "input_canaries",
    "audit_training": "auditing",
    "with_canaries": "input_canaries",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'anyorder.run' has no attribute {name!r}")
    return getattr(importlib.import_module(f"anyorder.run.{_FILES.get(name, 'job')}"), name)
