"""A small private run, for tests of searches: a noisy sum that is scaled by its settings."""

import os
import sys
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import anyorder as ao
import processes
from anyorder.budget import trials
from anyorder.budget.search import Trial
from anyorder.budget.trials import TrialError

PLAN = {"dataset_size": 12, "mechanism": "independent"}
SPACE = {"batch_size": [3, 4, 6], "epochs": [1, 2], "rate": [0.1, 1.0, 10.0]}
TARGET = {"epsilon": 8.0, "delta": 1e-6}
LARGE = {"rate": (0.1, 10.0, "log"), "clip_norm": [0.5, 1.0, 2.0], "batch_size": [4], "epochs": [1]}


def run(plan, *, steps=None, **options):
    """(the sum of what was released, the certificate) of a run of the plan, on data that are the same in all tests."""
    data = np.random.default_rng(5).normal(size=(12, 2))
    total = np.zeros(2)
    with ao.Release(plan, size=2, **options) as release:
        for t in range(plan.n if steps is None else steps):
            here = np.arange(plan.batch_size) + plan.batch_size * (t % (12 // plan.batch_size))
            total += release.step(here.tolist(), ao.bounded_sum(data[here], here.tolist(), release.clip_norm))
        return total, release.certificate()


def function(settings, plan, folder):
    """The better, the nearer its rate is to 1."""
    total, certificate = run(plan)
    (folder / "model.txt").write_text(f"{total}\n")
    return Trial(-abs(np.log(settings["rate"])), certificate, {"total": total.tolist()})


class InThisProcess:
    """In place of the processes of `Trials`: for tests of all else, which look at what the function was given."""

    def __init__(self, function, printed):
        self._function = function

    def run(self, settings, plan, folder, seed):
        try:
            return self._function(settings, plan, folder)
        except (Exception, SystemExit):
            raise TrialError(traceback.format_exc()) from None

    def close(self):
        pass


def counted(function, log):
    """The function, and a line in a file for each call that is begun and for each that has ended."""

    def inner(settings, plan, folder):
        _line(log, f"begun {settings}")
        trial = function(settings, plan, folder)
        _line(log, f"ended {settings}")
        return trial

    return inner


def _line(log: Path, text: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{text}\n".encode())
    os.fsync(descriptor)
    os.close(descriptor)


class Copied:
    """In place of the interpreter of a search, without its two seconds: a copy of one that has imported torch alone.

    By `monkeypatch.setattr("anyorder.budget.trials.subprocess.Popen", Copied)`.
    """

    def __init__(self, command, stdin, stdout, stderr, env):
        jobs, asked = Pipe(duplex=False)
        told, results = Pipe(duplex=False)
        errors = Connection(os.dup(2 if stderr is None else stderr), readable=False)
        self.wait = self._start((jobs, results, errors), (asked, told), env)
        self.stdin, self.stdout = (
            os.fdopen(os.dup(end.fileno()), mode, 0) for end, mode in ((asked, "wb"), (told, "rb"))
        )
        for end in (jobs, asked, told, results, errors):
            end.close()

    def _start(self, ends, own, env):
        process = processes._context.Process(target=_serve, args=(*ends, env))
        process.start()
        return process.join


class Forked(Copied):
    """The same in a program of `processes`, which cannot ask for another: a copy of the program itself."""

    def _start(self, ends, own, env):
        if not (child := os.fork()):
            for end in own:
                end.close()
            try:
                _serve(*ends, env)
            finally:
                os._exit(0)
        return lambda: os.waitpid(child, 0)


def _serve(*ends):
    *pipes, env = ends
    for descriptor, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), descriptor)
        pipe.close()
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = env["PYTHONPATH"].split(os.pathsep)
    trials.serve()
