"""A small private run, for tests of searches: a noisy sum that is scaled by its settings."""

import os
import traceback
from pathlib import Path

import numpy as np

import anyorder as ao
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
