"""A search that is killed at any point, and resumed, is the search that was not."""

import json
import os
import signal
from pathlib import Path

import pytest

import anyorder as ao
from anyorder.budget.claim import SearchCertificate
from anyorder.budget.search import SearchFolder, Trial, tune
from budget.searches import PLAN, TARGET, InThisProcess

SPACE = {"batch_size": [4, 6], "epochs": [1], "rate": [1, 2, 3, 4, 5, 6, 7]}


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch):
    monkeypatch.setattr("anyorder.budget.search.Trials", InThisProcess)


def function(settings, plan, folder):
    """A run whose noise and score follow from its folder's name, so that one made twice can be told."""
    _line(folder.parent.parent.parent / "log", f"{folder.name} {settings['rate']} {settings['batch_size']}")
    (folder / "model.txt").write_text(f"{settings}")
    fingerprint = os.urandom(16).hex()
    score = int(folder.name[:8], 16) / 2**32
    return Trial(score, ao.Certificate(plan, plan.n, fingerprint, "0" * 64, "0" * 64), [settings["rate"]])


def search(folder, law, key, made=function):
    runs = {"geometric": 6, "fixed": 4}[law]
    return tune(made, SPACE, **TARGET, plan=PLAN, runs=runs, law=law, folder=folder / "search", key=key, score="public")


def killed_at(event, folder, law, key):
    """Search in a process that kills itself before the given event; whether it did.

    Events are all writes of files, before and after each, and the calls of the function.
    """
    child = os.fork()
    if child == 0:
        try:
            _count_down(event)
            search(folder, law, key, made=_before(function))
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


_left = [0]


def _count_down(event):
    _left[0] = event
    for name in ("_write", "run_folder", "show", "clean"):
        setattr(SearchFolder, name, _before(getattr(SearchFolder, name)))
    for name in ("replace", "rename", "unlink", "rmdir", "open"):  # shutil and pathlib call these
        setattr(os, name, _before(getattr(os, name)))


def _before(call):
    def inner(*args, **options):
        _maybe_die()
        found = call(*args, **options)
        _maybe_die()
        return found

    return inner


def _maybe_die():
    _left[0] -= 1
    if _left[0] <= 0:
        os.kill(os.getpid(), signal.SIGKILL)


def _line(log: Path, text: str) -> None:
    with open(log, "a") as file:
        file.write(f"{text}\n")


@pytest.mark.slow
@pytest.mark.parametrize("law", ["geometric", "fixed"])
def test_killed_at_any_point_and_resumed(law, tmp_path):
    for first in range(100):  # a key of some runs, not many
        key, folder = bytes([first]) * 32, tmp_path / f"whole {first}"
        folder.mkdir()
        whole = search(folder, law, key)
        made = (folder / "log").read_text().splitlines()
        if len(made) in (4, 5):
            break
    assert len(made) == len(set(made))
    killed, event = 0, {"geometric": -1, "fixed": 0}[law]
    while True:
        event += 2 if event < 30 else 8
        folder = tmp_path / f"{event}"
        folder.mkdir()
        if not killed_at(event, folder, law, key):
            break
        killed += 1
        before = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
        records = list((folder / "search/.runs").glob("*.json")) if (folder / "search/.runs").exists() else []
        finished = {json.loads(path.read_text())["run"]["key_fingerprint"] for path in records}
        found = search(folder, law, key)
        after = (folder / "log").read_text().splitlines()
        # The same number, of the same settings, in the same order; at most the one that it was killed in made twice.
        assert list(dict.fromkeys(after)) == made
        assert len(after) <= len(made) + 1
        assert before == after[: len(before)]
        assert found.best.settings == whole.best.settings
        assert found.best.score == whole.best.score
        assert found.best.result == whole.best.result
        assert found.certificate.key_fingerprint == whole.certificate.key_fingerprint
        assert found.certificate.epsilon == whole.certificate.epsilon
        assert SearchCertificate.load(folder / "search/search.privacy.json") == found.certificate
        assert (found.best.folder / "model.txt").read_text() == f"{found.best.settings}"
        if law == "fixed":
            assert finished <= set(found.certificate.fingerprints)  # finished runs are those that are shown
            assert [trial.settings for trial in found.trials] == [trial.settings for trial in whole.trials]
        left = sorted(path.name for path in (folder / "search").iterdir())
        kept = "runs" if law == "fixed" else "best"
        assert left == [".gitignore", ".lock", ".search.json", kept, "search.privacy.json"]
        assert search(folder, law, key, made=None) == found
    assert killed > 18
