"""A copy of a run's folder without its secret files, as a clone of a repository is: it has no second run in it.

Each front end that writes folders, under a budget: whatever the copy does, two runs have two entries.
"""

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from anyorder.app import Settings, folder, train
from anyorder.app.federation import FederatedSettings, federate, resume_federation
from anyorder.app.fit import FitSettings, fit, resume_fit
from anyorder.app.job import Observer, resume
from anyorder.budget.file import Budget
from anyorder.errors import ArgumentError, BudgetError, CheckpointError
from anyorder.plan.certificate import Certificate
from anyorder.release.files import RunFiles

FRONT_ENDS = {
    "train": (train, resume),
    "federated": (federate, resume_federation),
    "fit": (fit, resume_fit),
}
EVERY = pytest.mark.parametrize("name", FRONT_ENDS)


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("ANYORDER_CACHE", "off")


@pytest.fixture
def job(name, tmp_path):
    """(settings, begin, go on): a small run of each front end."""
    begin, go_on = FRONT_ENDS[name]
    if name == "train":
        return Settings.of("digits", epsilon=8.0, mechanism="tree", epochs=1, batch_size=480), begin, go_on
    if name == "federated":
        few = {"users": 40, "rounds": 3, "report_goal": 8, "mechanism": "tree", "client_batch": 16}
        return FederatedSettings.of(**few), begin, go_on
    table = tmp_path / "t.csv"
    table.write_text("age,job\n" + "30,yes\n70,no\n" * 20)
    bounds = {"features": {"age": [0, 100]}, "target": ["no", "yes"]}
    return FitSettings(csv=str(table), target="job", bounds=bounds, batch_size=10, mechanism="tree"), begin, go_on


def copied(path: Path, place: Path) -> Path:
    """What .gitignore leaves, and what is not there yet at all."""
    return Path(shutil.copytree(path, place, ignore=lambda _, names: {folder.SECRET, ".lock"} & set(names)))


class CopiesBeforeTheFirstStep(Observer):
    def __init__(self, place):
        self.place = place

    def started(self, plan, path, step):
        assert step == 0
        copied(path, self.place)


@EVERY
@pytest.mark.parametrize("budgeted", [True, False])
def test_a_copy_of_a_run_that_began_is_neither_resumed_nor_begun_again(job, budgeted, tmp_path):
    settings, begin, go_on = job
    budget = Budget(tmp_path / "people.budget", 100.0, 1e-4) if budgeted else None
    given = {"budget": tmp_path / "people.budget"} if budgeted else {}
    begin(settings, tmp_path / "run", observer=CopiesBeforeTheFirstStep(tmp_path / "clone"), **given)
    before = {path.name: path.read_bytes() for path in (tmp_path / "clone").iterdir() if path.is_file()}
    with pytest.raises(CheckpointError, match=r"no secret/checkpoint\.pt, and the run"):
        go_on(tmp_path / "clone")
    with pytest.raises(ArgumentError, match="holds files already"):
        begin(settings, tmp_path / "clone", **given)
    (tmp_path / "clone" / ".lock").unlink(missing_ok=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "clone").iterdir() if path.is_file()} == before
    assert budget is None or len(budget.entries()) == 1


@EVERY
def test_a_copy_from_before_the_key_has_an_entry_of_its_own(job, tmp_path, monkeypatch):
    """Nothing in it says that the run began, since it had not: what it begins is another run, and is charged as one."""
    settings, begin, go_on = job
    budget = Budget(tmp_path / "people.budget", 100.0, 1e-4)
    real = RunFiles.begin

    def copying(self, *arguments):
        if not (tmp_path / "clone").exists():
            copied(tmp_path / "run", tmp_path / "clone")
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, "begin", copying)
        begin(settings, tmp_path / "run", budget=tmp_path / "people.budget")
    assert len(budget.entries()) == 1
    go_on(tmp_path / "clone")
    prints = [Certificate.load(tmp_path / place / "run.privacy.json").key_fingerprint for place in ("run", "clone")]
    words = [held.spend.run for held in budget.entries()]
    assert len(set(prints)) == 2
    assert words == prints  # an entry is a noise key's


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, "entry") for name in FRONT_ENDS),
        *(("train", one) for one in ("checkpoint.pt", "budget.json", "metrics.json")),
    ],
)
def test_a_run_that_is_killed_while_it_begins_is_charged_once(job, place, tmp_path, monkeypatch):
    """Between its key and its first step: whoever goes on has the same key, and so the same entry."""
    settings, begin, go_on = job
    path = tmp_path / "run"

    class Stop(Exception):
        pass

    def stop(*arguments, **others):
        raise Stop

    move, seen = os.replace, []

    def stopped(source, target):
        seen.append(Path(target).name)
        if Path(target).name == place and "checkpoint.pt" in seen:
            raise Stop
        move(source, target)

    Budget(tmp_path / "people.budget", 100.0, 1e-4)
    with monkeypatch.context() as patch:
        if place == "entry":
            patch.setattr(Budget, "spend", stop)
        else:
            patch.setattr(os, "replace", stopped)
        with pytest.raises(Stop):
            begin(settings, path, budget=tmp_path / "people.budget")
    go_on(path)
    [held] = Budget(tmp_path / "people.budget").entries()
    assert held.spend.run == Certificate.load(path / "run.privacy.json").key_fingerprint


@EVERY
def test_a_run_that_its_budget_refuses_at_last_takes_no_step(job, tmp_path, monkeypatch):
    """Another run took what was left between the check and the entry."""
    settings, begin, go_on = job
    Budget(tmp_path / "people.budget", 0.1, 1e-4)

    class Nothing(Observer):
        def stepped(self, step):
            raise AssertionError("a step was taken")

    with monkeypatch.context() as patch:
        patch.setattr(Budget, "check", lambda *arguments, **others: None)
        with pytest.raises(BudgetError, match="refused"):
            begin(settings, tmp_path / "run", observer=Nothing(), budget=tmp_path / "people.budget")
    with pytest.raises(BudgetError, match="refused"):
        go_on(tmp_path / "run", observer=Nothing())
