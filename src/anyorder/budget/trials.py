"""Trials in processes of their own: of a run nothing reaches the next one, or the program that searches, but its Trial.

A global generator, a counter of a module, a cache, a layer that was left in memory: whatever of the process a run
changes, the next run could read, and the best run's weights would then tell how many runs came before it. K is secret.
So one interpreter is started for a search. It loads the function, runs nothing, and is copied (`fork`) for each run:
all runs begin from one and the same state, and differ by their settings and by the seeds of Python's, NumPy's and
torch's global generators, which follow from the search's key and the run's number through a pseudorandom function.
Where the system cannot copy processes, an interpreter is started for each run.

Copies share what the system keeps but once. The place in a file that was open before the first run is put back before
each; memory that is shared on purpose (`share_memory_()`, `multiprocessing.Value`, `numpy.memmap` in mode "r+") is
refused, for what one run writes there the next one reads.
"""

import contextlib
import mmap
import os
import pickle
import random
import select
import signal
import stat
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from anyorder.errors import ArgumentError

try:
    import cloudpickle
except ImportError:  # functions of modules go without
    cloudpickle = None

_START = "from anyorder.budget.trials import serve; serve()"
_FORKS = hasattr(os, "fork")
_LENGTH = struct.Struct("<Q")


class TrialError(Exception):
    """A run failed; the text is for its owner alone."""


class Trials:
    """Calls a function, each time in a process of its own.

    Args:
        function: called as function(settings, plan, folder).
        printed: the secret file that gets what runs print; None: they print to standard error.
    Raises: ArgumentError if the function cannot be sent to another process.
    """

    def __init__(self, function: Callable[..., Any], printed: Path | None) -> None:
        self._printed = printed
        try:
            self._function = _dumps(function)
        except Exception as problem:
            more = "" if cloudpickle else ", or install the extra 'tune', which takes functions of a notebook too"
            raise ArgumentError(
                f"function must be one that can be sent to another process, as each run has its own, got "
                f"{function!r:.70} ({problem}): define it in a module, with its data{more}"
            ) from problem
        self._worker = self._started()

    def run(self, settings: dict[str, Any], plan: Any, folder: Path, seed: bytes) -> Any:
        """What the function returns. Raises: TrialError; KeyboardInterrupt if the run was stopped by one."""
        if self._worker is None:
            self._worker = self._started()
        try:
            _send(self._worker.stdin, _dumps((settings, plan, folder, seed)))
            word, told = pickle.loads(_receive(self._worker.stdout))
        except (EOFError, OSError):
            word, told = "failed", "the process of the run ended before the run did"
        except Exception:  # of what was returned
            word, told = "failed", traceback.format_exc()
        if word == "failed" or not _FORKS:
            self.close()
        if word == "stopped":
            raise KeyboardInterrupt
        if word == "failed":
            raise TrialError(told)
        return told

    def close(self) -> None:
        """End the process; a run that is going on ends with it."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        for pipe in (worker.stdin, worker.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        worker.wait()

    def _started(self) -> Any:
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        file = None if self._printed is None else os.open(self._printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            worker = subprocess.Popen(
                [sys.executable, "-P", "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        finally:
            if file is not None:
                os.close(file)
        try:
            _send(worker.stdin, self._function)
            problem = pickle.loads(_receive(worker.stdout))
        except (EOFError, OSError):
            problem = "its process ended"
        if problem is not None:
            self._worker = worker
            self.close()
            raise ArgumentError(
                f"function must load in another process, as each run has its own, and did not: {problem}. Define it in "
                "a module that can be imported, with its data"
            )
        return worker


# ----------------------------------------------------------------------------------------------------
# The other side.


def serve() -> None:
    """Load a function from standard input, and call it in a copy of this process for each line of arguments there."""
    jobs, results = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a run prints is no result
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the search
    function, problem = None, None
    try:
        function = pickle.loads(_receive(jobs))
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is None and _FORKS:
        problem = _shared_memory()
    _send(results, _dumps(problem))
    places = _places() if _FORKS else {}
    while problem is None:
        try:
            job = _receive(jobs)
        except EOFError:
            return
        for descriptor, place in places.items():
            with contextlib.suppress(OSError):  # closed since
                os.lseek(descriptor, place, os.SEEK_SET)
        sent = mmap.mmap(-1, 1)  # shared with the copy
        child = os.fork() if _FORKS else 0
        if child == 0:
            _send(results, _outcome(function, job, jobs))
            sent[0] = 1
            os._exit(0)
        os.waitpid(child, 0)
        if not sent[0]:  # killed, by the system or by its own code
            _send(results, _dumps(("failed", "the process of the run ended before the run did")))


def _shared_memory() -> str | None:
    """What is wrong with memory that copies of this process would share; None where there is none, or no telling."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in maps:
        _, rights, _, _, _, *name = line.split(maxsplit=5)
        file = Path(name[0]) if name else Path()
        is_lock, is_device = file.name.startswith("sem."), Path("/dev") == file.parent
        if "w" in rights and "s" in rights and not (is_lock or (is_device and file.name != "zero (deleted)")):
            return (
                "it holds memory that processes share, such as share_memory_() and multiprocessing.Value make, or "
                "numpy.memmap in mode 'r+': what one run writes there, the next one reads. Make it within the "
                "function, or take a copy (clone(), mode 'r')"
            )
    return None


def _places() -> dict[int, int]:
    """Where each open file is read next: copies of a process share that."""
    found = {}
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else map(str, range(256)):
        with contextlib.suppress(OSError):  # no file is open there
            if int(name) > 2 and stat.S_ISREG(os.fstat(int(name)).st_mode):
                found[int(name)] = os.lseek(int(name), 0, os.SEEK_CUR)
    return found


def _outcome(function: Any, job: bytes, jobs: IO[bytes]) -> bytes:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with, args=(jobs,), daemon=True).start()
    try:
        settings, plan, folder, seed = pickle.loads(job)
        _seed(seed)
        outcome = _dumps(("returned", function(settings, plan, folder)))
    except KeyboardInterrupt:
        outcome = _dumps(("stopped", None))
    except (Exception, SystemExit):
        outcome = _dumps(("failed", traceback.format_exc()))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return outcome


def _seed(seed: bytes) -> None:
    random.seed(seed)
    np.random.seed(np.frombuffer(seed, np.uint32))  # noqa: NPY002  # what a run's own code may draw from
    if torch := sys.modules.get("torch"):  # one that is imported later begins from a constant
        torch.manual_seed(int.from_bytes(seed[:8], "little"))


def _end_with(jobs: IO[bytes]) -> None:
    """Kill this process when the search has ended: two runs of one name must not be at work in one folder."""
    if hasattr(select, "poll"):
        end = select.poll()
        end.register(jobs, 0)  # of its closing alone: nothing is read here
        end.poll()
        os.kill(os.getpid(), signal.SIGKILL)


def _dumps(value: Any) -> bytes:
    data: bytes = (cloudpickle or pickle).dumps(value)
    return data


def _send(pipe: Any, data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _receive(pipe: Any) -> bytes:
    return _exactly(pipe, _LENGTH.unpack(_exactly(pipe, _LENGTH.size))[0])


def _exactly(pipe: Any, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = pipe.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
