"""The run that a search chose, in a folder of its own: its certificate names the search, wherever it is copied to."""

import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

import anyorder as ao
from anyorder.app import report as report_file
from anyorder.budget import Trial
from anyorder.budget.claim import SearchCertificate
from anyorder.errors import ArgumentError, BudgetError, CertificateError, TrainingError
from anyorder.formats import load_json, save_json
from anyorder.plan.certificate import FORMAT
from anyorder.plan.plan import CANDIDATE
from budget.searches import PLAN, TARGET, InThisProcess
from budget.test_search import never, quick, search
from plans import flat_plan
from report.pages import text

FEW = {"batch_size": [4], "epochs": [1], "rate": [0.1, 1.0, 10.0]}


def kept(settings, plan, folder):
    """A run that leaves all that a training of its own would: certificate, evidence and plan."""
    with ao.Release(plan, size=1) as release:
        release.step([0, 1], np.array([0.5]))
        release.certificate().save(folder / "run.privacy.json")
        release.evidence().save(folder / "run.evidence.json")
        plan.save(folder / "plan.json")
        return Trial(-settings["rate"], release.certificate())


@pytest.fixture(scope="module", params=["geometric", "fixed"])
def copied(request, tmp_path_factory):
    """(the folder of a run alone, with nothing of the search beside it; the search)."""
    base = tmp_path_factory.mktemp("candidates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anyorder.budget.search.Trials", InThisProcess)
        found = search(kept, FEW, runs=3, law=request.param, folder=base / "search")
    shutil.copytree(found.best.folder, base / "mine")
    return base / "mine", found


def test_a_candidate_says_so_wherever_its_folder_is_copied(copied):
    folder, found = copied
    read = ao.verify(folder / "run.privacy.json", evidence=folder / "run.evidence.json")
    assert read.plan.candidate_of == found.certificate.key_fingerprint
    assert read.plan.epsilon < found.certificate.epsilon
    for shown in (read.plan, read.certificate, ao.Plan.load(folder / "plan.json")):
        assert CANDIDATE in str(shown)
    page = text(report_file.make(folder).text)
    assert page.count(CANDIDATE) == 2  # on the card, and before the number
    assert page.index(f"This run is {CANDIDATE}") < page.index("epsilon ≤ ")
    assert "The promise, for one" not in page
    assert found.certificate.key_fingerprint in page


def test_verify_says_so_and_is_not_green(copied):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from anyorder.app.cli import app

    folder, found = copied
    for name in ("run.privacy.json", "plan.json"):
        done = CliRunner().invoke(app, ["verify", str(folder / name)], env={"FORCE_COLOR": "1", "COLUMNS": "200"})
        assert done.exit_code == 0
        last = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).rpartition("verified: ")[2]
        assert CANDIDATE in " ".join(last.split())
        assert "\x1b[32mverified" not in done.stdout
    told = CliRunner().invoke(app, ["verify", str(folder / "run.privacy.json"), "--json"]).stdout
    assert f'"candidate_of": "{found.certificate.key_fingerprint}"' in told


def test_who_takes_the_word_away_has_no_evidence_for_the_rest(copied, tmp_path):
    folder, _ = copied
    data = load_json(folder / "run.privacy.json", FORMAT)
    del data["plan"]["candidate_of"]
    save_json(tmp_path / "forged.json", data)
    assert ao.verify(tmp_path / "forged.json").plan.candidate_of is None  # a seal finds damage, not lies
    with pytest.raises(CertificateError, match="not that of this certificate"):
        ao.verify(tmp_path / "forged.json", evidence=folder / "run.evidence.json")


def test_a_budget_takes_the_search_and_not_its_candidate(copied, tmp_path):
    folder, found = copied
    left = ao.Budget(tmp_path / "data.budget", epsilon=40.0, delta=1e-6)
    with pytest.raises(BudgetError, match="one candidate of a search"):
        left.spend(found.best.certificate)
    with pytest.raises(BudgetError, match="one candidate of a search"):
        left.check(ao.Plan.load(folder / "plan.json"))
    left.spend(found.certificate)


def test_the_best_run_must_be_of_this_search(copied):
    _, found = copied
    shown, best = found.certificate, found.best.certificate
    for name, allowed in ((None, True), (shown.key_fingerprint, True), ("ab" * 16, False)):
        other = replace(best, plan=replace(best.plan, candidate_of=name))
        if allowed:
            replace(shown, best=other)
        else:
            with pytest.raises(ArgumentError, match="candidate of another search"):
                replace(shown, best=other)


def test_a_plan_of_no_search_is_written_as_ever():
    plan = flat_plan(**PLAN, batch_size=4, epochs=1, **TARGET)
    assert plan.candidate_of is None
    assert "candidate_of" not in plan.to_dict()
    assert "search" not in dict(plan.facts())
    marked = replace(plan, candidate_of="ab" * 16)
    assert marked.digest != plan.digest
    assert marked.epsilon == plan.epsilon
    assert ao.Plan.from_dict(marked.to_dict()) == marked


@pytest.mark.parametrize("name", ["", "ab", "AB" * 16, "ab" * 17, 3, "gg" * 16, "ab" * 16 + "\n"])
def test_a_search_is_named_by_a_fingerprint(name):
    plan = flat_plan(**PLAN, batch_size=4, epochs=1, **TARGET)
    with pytest.raises(ArgumentError, match="candidate_of must be 32 hexadecimal digits"):
        replace(plan, candidate_of=name)
    with pytest.raises(CertificateError):
        ao.Plan.from_dict({**plan.to_dict(), "candidate_of": name})
    with pytest.raises(CertificateError):
        ao.Plan.from_dict({**plan.to_dict(), "candidate_of": None})


def test_a_search_that_was_begun_before_plans_said_so_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("anyorder.budget.search.Trials", InThisProcess)
    with pytest.raises(TrainingError):
        search(lambda settings, plan, folder: 1 / 0, FEW, folder=tmp_path)
    state = load_json(tmp_path / ".search.json", "anyorder-search-state/1")
    del state["named"]
    save_json(tmp_path / ".search.json", state, secret=True)
    plans = []

    def made(settings, plan, folder):
        plans.append(plan.candidate_of)
        return quick(settings, plan, folder)

    found = search(made, FEW, folder=tmp_path)
    assert set(plans) == {None}
    assert search(never, FEW, folder=tmp_path).certificate == found.certificate
    assert SearchCertificate.load(tmp_path / "search.privacy.json") == found.certificate


def test_a_search_that_has_ended_gives_the_same_again(tmp_path, monkeypatch):
    monkeypatch.setattr("anyorder.budget.search.Trials", InThisProcess)
    found = search(kept, FEW, folder=tmp_path)
    again = search(never, FEW, folder=tmp_path)
    assert again.certificate == found.certificate
    assert again.best.certificate.plan.candidate_of == found.certificate.key_fingerprint
    assert os.listdir(tmp_path / "best")
