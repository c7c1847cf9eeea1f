"""The folder of a run: its files, each replaced whole."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyorder._sealed import read_json as read_object
from anyorder.errors import ArgumentError, CertificateError, CheckpointError

__all__ = [
    "ACCURACY_PLOT", "CERTIFICATE", "CHECKPOINT", "EVIDENCE", "METRICS", "MODEL", "NOISE_PLOT", "PLAN", "create",
    "hide_secrets", "read_json", "replace", "write_json",
]  # fmt: skip

MODEL = "model.pt"
METRICS = "metrics.json"
PLAN = "plan.json"
CERTIFICATE = "run.privacy.json"
CHECKPOINT = "checkpoint.pt"  # secret: it holds the noise key
EVIDENCE = "run.evidence.json"  # secret: who was in which step
ACCURACY_PLOT = "accuracy.png"
NOISE_PLOT = "noise.png"


def create(folder: str | Path | None, dataset: str) -> Path:
    """An empty folder for a new run; by default runs/<dataset>-<time>.

    Raises: ArgumentError if it holds files already, or cannot be written.
    """
    name = dataset.replace(":", ".")
    path = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}" if folder is None else Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ArgumentError(f"output folder {path} holds files already: choose another, or resume the run in it")
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise ArgumentError(f"output folder {path} cannot be written: {problem.strerror or problem}") from problem
    return path


_IGNORED = f"""# Secret, as the data is: the noise key, who was in which step, what each step used its noise on.
# All else in this folder may be shown.
{CHECKPOINT}
.{CHECKPOINT}.*
.*.journal
{EVIDENCE}
.{EVIDENCE}.*
"""


def hide_secrets(path: Path) -> None:
    """Keep the secret files of a run out of version control, before any of them is there."""
    replace(path / ".gitignore", lambda beside: beside.write_text(_IGNORED, encoding="utf-8"))


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, then move it there, so that a reader never sees half a file."""
    beside = path.with_name(path.name + ".part")
    write(beside)
    os.replace(beside, path)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write JSON, replaced whole."""
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    replace(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote, of a run that is to be resumed."""
    try:
        return read_object(path)
    except CertificateError as problem:
        raise CheckpointError(f"{path.parent} is not the folder of a run that can be resumed: {problem}") from problem
