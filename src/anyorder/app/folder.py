"""The folder of a run: its files, each replaced whole."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anyorder import durable
from anyorder.errors import ArgumentError, CertificateError, CheckpointError
from anyorder.formats import read_json as read_object

__all__ = [
    "ACCURACY_PLOT", "BUDGET", "CERTIFICATE", "CHECKPOINT", "EVIDENCE", "METRICS", "MODEL", "NOISE_PLOT", "PLAN",
    "SECRET", "fresh", "has_begun", "held", "hide_secrets", "read_json", "replace", "say_begun", "write_json",
    "write_metrics",
]  # fmt: skip

MODEL = "model.pt"
METRICS = "metrics.json"
PLAN = "plan.json"
BUDGET = "budget.json"  # where the run is entered, and under which word
CERTIFICATE = "run.privacy.json"
SECRET = "secret"  # the folder of all that is as secret as the data; what lies beside it may be shown
CHECKPOINT = f"{SECRET}/checkpoint.pt"  # it holds the noise key
EVIDENCE = f"{SECRET}/run.evidence.json"  # who was in which step
ACCURACY_PLOT = "accuracy.png"
NOISE_PLOT = "noise.png"
_LOCK = ".lock"
_BEGINNING = {".gitignore", PLAN, METRICS, BUDGET, _LOCK, SECRET}


@contextlib.contextmanager
def fresh(folder: str | Path | None, dataset: str) -> Iterator[Path]:
    """A folder for a new run, held while it goes on; by default runs/<dataset>-<time>.

    It may hold what a run left that was killed before its first checkpoint: such a run took no step.
    Raises: ArgumentError if it holds other files, is in use, or cannot be written.
    """
    name = dataset.replace(":", ".")
    path = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}" if folder is None else Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ArgumentError(f"output folder {path} cannot be written: {problem.strerror or problem}") from problem
    _check_unused(path)  # before a file is made in it
    with held(path):
        _check_unused(path)  # nobody came in between
        yield path


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Let nobody else run in the folder meanwhile.

    Raises: ArgumentError if somebody does, or the folder cannot be written.
    """
    try:
        descriptor = durable.lock_file(path / _LOCK)
    except BlockingIOError as problem:
        raise ArgumentError(f"a run is going on in folder {path}: wait for its end, or choose another") from problem
    except OSError as problem:
        raise ArgumentError(f"output folder {path} cannot be written: {problem.strerror or problem}") from problem
    try:
        (path / SECRET).mkdir(mode=0o700, exist_ok=True)
        yield
    finally:
        os.close(descriptor)


def has_begun(path: Path) -> bool:
    """Whether the run in the folder has its first checkpoint, which comes before its first step, or had it once.

    A copy without the secret files has neither checkpoint nor journal: metrics, or the entry in a budget, tell.
    """
    from anyorder.release.journal import Journal  # with torch, which reports of folders do without

    said = read_json(path / METRICS) if (path / METRICS).exists() else {}
    entered = read_json(path / BUDGET) if (path / BUDGET).exists() else {}
    if "run" in entered or any(said.get(name) for name in ("began", "steps", "rounds", "test_accuracy", "finished")):
        return True
    return (path / CHECKPOINT).exists() or Journal.has_steps(path / CHECKPOINT)


def can_start_over(path: Path) -> bool:
    """Whether journals in the folder tell what was released, by this start or by those before it."""
    from anyorder.release.journal import Journal

    return Journal.has_steps(path / CHECKPOINT) or Journal.has_earlier(path / CHECKPOINT)


def say_begun(path: Path) -> None:
    """Write down, for copies of the folder, that its run has a key and may take steps."""
    shown = read_json(path / METRICS)
    if not shown.get("began"):
        write_metrics(path, shown)


def write_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """metrics.json of a run that began."""
    write_json(path / METRICS, {**metrics, "began": True})


def _check_unused(path: Path) -> None:
    hidden = f".{Path(CHECKPOINT).name}."  # the journal, and the checkpoint while it is written
    names = [durable.name_of_rest(name) or name.removesuffix(".part") for name in os.listdir(path)]
    begun = all(name in _BEGINNING for name in names)
    if begun and SECRET in names:
        begun = all((durable.name_of_rest(name) or name).startswith(hidden) for name in os.listdir(path / SECRET))
    if not begun or has_begun(path):
        raise ArgumentError(f"output folder {path} holds files already: choose another, or resume the run in it")


_IGNORED = f"""# As secret as the data: the noise key, who was in which step, what each step used its noise on.
{SECRET}/
# Empty: held while a run goes on.
{_LOCK}
"""


def hide_secrets(path: Path) -> None:
    """Keep the secret files of a run out of version control, before any of them is there."""
    replace(path / ".gitignore", lambda beside: beside.write_text(_IGNORED, encoding="utf-8"))


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file next to its place, which then takes it: nobody ever sees half a file, nor does a loss of power."""
    with durable.replacing(path) as (_, beside):
        write(beside)


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
