"""Runs one script as its author would, and writes down its steps, its peak memory and what the engine kept.

python _inside.py WAY FOUND.json SCRIPT [ARGUMENT ..], in the script's folder.
"""

import itertools
import json
import resource
import runpy
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

ENDS: dict[int, list[float]] = {}
"""Optimizer -> when its steps ended, in seconds of the processor: others may be at work on the machine."""
ENGINES: list[Any] = []


def note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    ENDS.setdefault(id(optimizer), []).append(time.process_time())


def note_engines() -> None:
    """Those that are made private, for what they say at the end."""
    import anyorder

    make_private = anyorder.PrivacyEngine.make_private

    def noted(engine: Any, *args: Any, **kwargs: Any) -> Any:
        made = make_private(engine, *args, **kwargs)
        ENGINES.append(engine)
        return made

    anyorder.PrivacyEngine.make_private = noted  # type: ignore[assignment, method-assign]


def load_torchvision() -> None:
    """Where its build is for another torch, without its compiled operators, of which training needs none."""
    try:
        import torchvision  # type: ignore[import-not-found] # noqa: F401
    except ModuleNotFoundError:
        pass
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def found() -> dict[str, Any]:
    gaps = [b - a for ends in ENDS.values() for a, b in itertools.pairwise(ends)]
    result: dict[str, Any] = {
        "steps": sum(map(len, ENDS.values())),
        "step_seconds": statistics.median(gaps) if gaps else None,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if ENGINES:
        engine = ENGINES[-1]
        result |= {"private_steps": sum(one.step for one in ENGINES), "epsilon": engine.plan.epsilon}
        result |= {"order": engine.order, "isolation": engine.training.isolation.to_dict()}
    return result


def main() -> None:
    way, kept, script, *arguments = sys.argv[1:]
    load_torchvision()
    if way == "ours":
        note_engines()
    register_optimizer_step_post_hook(note_step)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path.cwd())
    warnings.simplefilter("ignore")
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        Path(kept).write_text(json.dumps(found()))


if __name__ == "__main__":
    main()
