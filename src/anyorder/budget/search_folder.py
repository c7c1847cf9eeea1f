"""The folder of a search: what is shown of it, and what is as secret as the data until the end, when it is removed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anyorder._sealed import load_json, save_json, sync_folder
from anyorder.errors import ArgumentError, CertificateError, CheckpointError

__all__ = ["BEST", "CERTIFICATE", "PRINTED", "REPORT", "SHOWN", "SearchFolder", "hide_times", "searching"]

CERTIFICATE = "search.privacy.json"
REPORT = "report.html"  # a page of the search, as each run has one of its own
BEST = "best"  # the folder of the run that was chosen
SHOWN = "runs"  # the folders of all runs, where the law shows them
_RUNS = ".runs"  # secret: a folder and a record for each run
_STATE = ".search.json"  # secret: the key of the draws; after the end, what is shown
_FAILURE = ".failure.txt"  # secret: which run failed, and how
PRINTED = ".printed.txt"  # secret: what runs print
_LOCK = ".lock"
_BEGINNING = {".gitignore", _LOCK, _STATE, _RUNS, PRINTED}

_STATE_FORMAT = "anyorder-search-state/1"
_RUN_FORMAT = "anyorder-search-run/1"

_IGNORED = f"""# A search: its state, its runs and what they print are as secret as the data. Its certificate is public.
# Of the best run's folder show what the run itself says may be shown: it may hold a checkpoint or evidence.
*
!.gitignore
!{CERTIFICATE}
!{REPORT}
"""


class SearchFolder:
    """The files of a search that is going on in this process, which has locked them.

    Args:
        path: where they are.
        kept: whether the search can be resumed from there; else records stay in memory.
    """

    def __init__(self, path: Path, kept: bool) -> None:
        self.path, self.kept = path, kept
        self._records: dict[str, dict[str, Any]] = {}

    # -- the state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """What was saved last; None for a search that has not begun. Raises: CheckpointError."""
        if not self.kept or not (self.path / _STATE).exists():
            return None
        return self._read(self.path / _STATE, _STATE_FORMAT)

    def save_state(self, **state: Any) -> None:
        """Replace it, whole, on the disk when this returns."""
        if self.kept:
            self._write(self.path / _STATE, {"format": _STATE_FORMAT, **state})

    # -- runs --------------------------------------------------------------------------------------------------------

    def run_folder(self, name: str) -> Path:
        """The folder of a run, for its owner's eyes; with what a killed attempt left in it."""
        folder = self.path / _RUNS / name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def record(self, name: str) -> dict[str, Any] | None:
        """What a finished run left; None if it is not finished."""
        if not self.kept:
            return self._records.get(name)
        path = self._record_path(name)
        return self._read(path, _RUN_FORMAT) if path.exists() else None

    def save_record(self, name: str, record: dict[str, Any]) -> None:
        """A run is finished. Raises: ArgumentError where its result is not of JSON values and the folder is kept."""
        if not self.kept:
            self._records[name] = record
            return
        try:
            self._write(self._record_path(name), {"format": _RUN_FORMAT, **record})
        except (TypeError, ValueError, RecursionError) as problem:
            if isinstance(problem, CertificateError):
                raise
            raise ArgumentError(
                "the result of a run must be finite numbers, texts, lists and the like where the search has a folder, "
                f"in which it is kept: write all else into the run's own folder ({problem})"
            ) from problem

    def failure(self, text: str) -> Path:
        """Where the owner finds what went wrong."""
        if self.kept:
            path = self.path / _FAILURE
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        else:
            descriptor, name = tempfile.mkstemp(prefix="anyorder-search-", suffix=".txt")  # mode 0600
            path = Path(name)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        return path

    # -- the end -----------------------------------------------------------------------------------------------------

    def show(self, names: dict[str, str]) -> None:
        """Give the folders of runs that are shown their names: {run: place}. May be repeated after a kill."""
        if not self.kept:
            return
        for name, place in names.items():
            source, target = self.path / _RUNS / name, self.path / place
            if source.exists():
                (source / REPORT).unlink(missing_ok=True)  # a run's own promise is not that of a chosen one
                target.parent.mkdir(exist_ok=True)
                os.rename(source, target)
                sync_folder(target.parent)

    def clean(self) -> None:
        """Remove all runs that were not shown, and their records; what is left has the time at which it all began."""
        if self.kept and (self.path / _RUNS).exists():
            shutil.rmtree(self.path / _RUNS)
        if self.kept:
            begun = self.path.glob(f".{_STATE}.*")  # of a state that a kill came into: the key may be in it
            for path in (self.path / _FAILURE, self.path / PRINTED, *begun):
                path.unlink(missing_ok=True)
            hide_times(self.path)

    def _record_path(self, name: str) -> Path:
        return self.path / _RUNS / f"{name}.json"

    def _write(self, path: Path, data: dict[str, Any]) -> None:
        save_json(path, data, secret=True)
        sync_folder(path.parent)

    def _read(self, path: Path, format_: str) -> dict[str, Any]:
        try:
            return load_json(path, format_, large=True)
        except CertificateError as problem:
            raise CheckpointError(
                f"{self.path} is not the folder of a search that can be resumed: {problem}"
            ) from problem


@contextlib.contextmanager
def searching(folder: str | Path | None) -> Iterator[SearchFolder]:
    """The folder of a search, held while it goes on; without one, a folder that is removed at the end.

    Raises: ArgumentError if it holds other files, is in use, or cannot be written.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="anyorder-search-") as made:  # mode 0700
            (Path(made) / _RUNS).mkdir(mode=0o700)
            yield SearchFolder(Path(made), kept=False)
        return
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = os.listdir(path)
        strange = [name for name in names if name not in _BEGINNING and not name.startswith(f".{_STATE}.")]
        if _STATE not in names and strange:
            raise ArgumentError(f"folder {path} holds files already: choose another, or resume the search in it")
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise ArgumentError(f"folder {path} cannot be written: {problem.strerror or problem}") from problem
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            raise ArgumentError(
                f"a search is going on in folder {path}: wait for its end, or choose another"
            ) from problem
        (path / ".gitignore").write_text(_IGNORED, encoding="utf-8")  # before anything secret is there
        (path / _RUNS).mkdir(mode=0o700, exist_ok=True)
        yield SearchFolder(path, kept=True)
    finally:
        os.close(descriptor)


def hide_times(folder: Path) -> None:
    """Give all files one time, that of the lock: when they were written tells how long the search went on."""
    began = (folder / _LOCK).stat().st_mtime_ns
    for where, _, names in os.walk(folder, topdown=False):
        for name in [*names, "."]:
            os.utime(os.path.join(where, name), ns=(began, began), follow_symlinks=False)
