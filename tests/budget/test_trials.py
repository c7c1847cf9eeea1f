"""Each run of a search has a process of its own: nothing of one reaches another, or the program that searches."""

import importlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import anyorder as ao
import processes
from anyorder.budget.search import Trial, tune
from anyorder.errors import ArgumentError, TrainingError
from budget.searches import Copied

GIVEN = {"epsilon": 8.0, "delta": 1e-6, "plan": {"dataset_size": 12}, "runs": 6, "score": "public"}
SPACE = {"rate": [1.0, 2.0, 3.0], "batch_size": [4], "epochs": [1]}
KEYS = [bytes([i]) * 32 for i in range(4)]
CALLS = []  # what a run leaves in a module, the next run would find


@pytest.fixture
def copied(monkeypatch):
    monkeypatch.setattr("anyorder.budget.trials.subprocess.Popen", Copied)


def certificate(plan):
    return ao.Certificate(plan, plan.n, os.urandom(16).hex(), "0" * 64, "0" * 64)


def drawing(settings, plan, folder):
    """A model as people write it: its first weights are of the global generator."""
    CALLS.append(len(CALLS))
    weights = torch.nn.Linear(3, 1).weight.detach().flatten().tolist()
    drawn = {"torch": weights, "numpy": float(np.random.random()), "python": random.random()}  # noqa: NPY002
    print("a line of a run")
    return Trial(float(len(CALLS)), certificate(plan), {**drawn, "calls": len(CALLS)})


def sequence(count):
    """What the weights of runs would be that draw from one generator, one after another."""
    return [torch.nn.Linear(3, 1).weight.detach().flatten().tolist() for _ in range(count)]


@pytest.mark.usefixtures("copied")
def test_each_run_begins_anew_and_its_generators_follow_from_the_key():
    """So nothing of the best run tells how many came before."""
    torch.manual_seed(0)
    state = torch.get_rng_state()
    given = {**GIVEN, "runs": 2, "law": "fixed"}
    first, again, other = (tune(drawing, SPACE, **given, key=key) for key in (KEYS[0], KEYS[0], KEYS[1]))
    assert torch.equal(torch.get_rng_state(), state)
    assert CALLS == []
    assert [one.result for one in first.trials] == [one.result for one in again.trials]
    runs = [*first.trials, *other.trials]
    assert [one.result["calls"] for one in runs] == [1] * 4
    drawn = [one.result[name] for one in runs for name in ("numpy", "python")]
    assert len(set(drawn)) == len(drawn) == 8
    assert len({tuple(one.result["torch"]) for one in runs}) == 4
    seen = sequence(100)
    assert not [one for one in runs if one.result["torch"] in seen]


def test_functions_with_data_of_their_own_are_sent_and_results_come_back():
    data = torch.arange(1_000_000.0)  # larger than a pipe holds

    def trial(settings, plan, folder):
        return Trial(settings["rate"], certificate(plan), {"whole": data, "sum": float(data.sum())})

    found = tune(trial, SPACE, **{**GIVEN, "runs": 2, "law": "fixed"}, key=KEYS[0])
    assert torch.equal(found.best.result["whole"], data)


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize(
    ("end", "phrase"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended before the run did"),
        (lambda: os._exit(0), "ended before the run did"),
        (lambda: sys.exit(3), "SystemExit"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_run_whose_process_dies_fails_as_all_others_do(end, phrase, tmp_path, capfd):
    def trial(settings, plan, folder):
        print("of one person", file=sys.stderr)
        return end()

    with pytest.raises(TrainingError, match="nothing of the search is shown") as caught:
        tune(trial, SPACE, **GIVEN, key=KEYS[0], folder=tmp_path)
    assert caught.value.__context__ is None
    assert phrase in (tmp_path / ".failure.txt").read_text()
    assert "of one person" in (tmp_path / ".printed.txt").read_text()
    assert capfd.readouterr() == ("", "")
    if phrase == "SystemExit":  # what was mended goes on
        assert tune(drawing, SPACE, **GIVEN, key=KEYS[0], folder=tmp_path).best.result["calls"] == 1


@pytest.mark.usefixtures("copied")
def test_a_key_in_the_hand_of_a_run_stops_the_search():
    def trial(settings, plan, folder):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        tune(trial, SPACE, **GIVEN, key=KEYS[0])
    assert caught.value.__context__ is None


@pytest.mark.usefixtures("copied")
def test_what_cannot_be_sent_is_refused_before_the_budget_is_charged(tmp_path):
    left, lock = ao.Budget(tmp_path / "people.budget", epsilon=20.0, delta=1e-5), threading.Lock()

    with pytest.raises(ArgumentError, match="sent to another process"):
        tune(lambda s, p, f: lock.acquire(), SPACE, **GIVEN, budget=left)

    class Absent:
        def __reduce__(self):
            return (__import__, ("no_such_module",))

    absent = Absent()
    with pytest.raises(ArgumentError, match="must load in another process.*no_such_module"):
        tune(lambda s, p, f: absent, SPACE, **GIVEN, budget=left)
    assert left.entries() == []


MODULE = """
import multiprocessing, tempfile
import torch

OPEN = tempfile.TemporaryFile(buffering=0)
OPEN.write(bytes(1000))
OPEN.seek(7)
{}


def place():
    return OPEN.read(1) and OPEN.tell()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module with a file that is open and one more line, and a function that reads there."""
    monkeypatch.syspath_prepend(tmp_path)
    opened = []

    def make(line=""):
        name = f"open_in_a_module_{len(opened)}"
        (tmp_path / f"{name}.py").write_text(MODULE.format(line))
        opened.append(importlib.import_module(name))
        read = opened[-1].place
        return lambda settings, plan, folder: Trial(1.0, certificate(plan), read())

    yield make
    for one in opened:
        one.OPEN.close()
        del sys.modules[one.__name__]


@pytest.mark.usefixtures("copied")
def test_all_runs_read_a_file_that_was_open_before_them_from_one_place(module):
    """Copies of a process share the place, and the result told how many runs had read before. A lock is no memory."""
    found = tune(module("LOCK = multiprocessing.RLock()"), SPACE, **{**GIVEN, "runs": 3, "law": "fixed"}, key=KEYS[0])
    assert [one.result for one in found.trials] == [8, 8, 8]


@pytest.mark.usefixtures("copied")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell")
def test_memory_that_runs_would_share_is_refused(module):
    """A counter there told how many runs came before the best."""
    for line in ("A = multiprocessing.RawValue('i')", "A = torch.zeros(3).share_memory_()"):
        with pytest.raises(ArgumentError, match="memory that processes share"):
            tune(module(line), SPACE, **GIVEN, key=KEYS[0])


SEARCH = """
import os, signal, sys, time
import anyorder as ao

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it

def trial(settings, plan, folder):
    (folder / "begun").write_text(str(os.getpid()))
    time.sleep(60)

ao.tune(trial, {"batch_size": [4]}, epsilon=8.0, delta=1e-6, plan={"dataset_size": 12, "epochs": 1}, score="public",
        folder=sys.argv[1])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_ends_with_its_search(how, tmp_path):
    """A function of a script, sent by value; killed in a run, the search leaves no run that goes on."""
    (tmp_path / "mine.py").write_text(SEARCH)
    search = processes.start(tmp_path / "mine.py", tmp_path / "found")
    end = time.monotonic() + 60
    while not (begun := list((tmp_path / "found").glob(".runs/*/begun"))) or not begun[0].read_text():
        assert time.monotonic() < end
        assert search.is_alive(), search.wait().stderr
        time.sleep(0.02)
    os.kill(search.process.pid, how)
    search.wait(60)
    pid = int(begun[0].read_text())
    while (status := Path(f"/proc/{pid}/status")).exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
