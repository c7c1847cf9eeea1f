"""report.html of folders: of every front end, the same whoever makes it, and of neighbouring data."""

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from report.pages import certified, read, text

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

import anyorder as ao
from anyorder.app import Settings, train
from anyorder.app import report as report_file
from anyorder.app.cli import app
from anyorder.app.data import Data
from anyorder.app.federation import FederatedSettings, federate
from anyorder.app.fit import FitSettings, fit
from anyorder.budget import Trial
from anyorder.budget.search import tune
from anyorder.errors import ArgumentError
from anyorder.formats import save_json
from anyorder.participation import SingleEpoch
from anyorder.plan.plan import Plan
from anyorder.strategy import BLT, Independent
from anyorder.workload import prefix_sum
from budget.searches import InThisProcess

KEY = bytes(range(32))
SEED = 987_654_321


@pytest.fixture(autouse=True, scope="module")
def _no_cache():
    kept = os.environ.get("ANYORDER_CACHE", "")
    os.environ["ANYORDER_CACHE"] = "off"
    yield
    os.environ["ANYORDER_CACHE"] = kept


@pytest.fixture(autouse=True, scope="module")
def _no_processes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anyorder.budget.search.Trials", InThisProcess)
        yield


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def data(seed, others=0):
    """60 images and 40 tests; of another seed all differ, of another `others` the tests do not."""
    rng, tests = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(others)
    made = TensorDataset(torch.rand(60, 1, 4, 4, generator=rng), torch.randint(0, 3, (60,), generator=rng))
    test = TensorDataset(torch.rand(40, 1, 4, 4, generator=tests), torch.randint(0, 3, (40,), generator=tests))
    return Data("made-up", made, test, (1, 4, 4), 3)


def trained(folder, seed=1, **changes):
    given = {
        "epsilon": 4.0,
        "mechanism": "tree",
        "order": "fixed",
        "epochs": 2,
        "batch_size": 12,
        "seed": SEED,
        **changes,
    }
    return train(Settings.of("mine:load", model="linear", **given), folder, data=data(seed), key=KEY).path


def _trial(settings, plan, folder):
    return Trial(settings["rate"], ao.Certificate(plan, plan.n, os.urandom(16).hex(), "0" * 64, "0" * 64))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One of each front end."""
    base = tmp_path_factory.mktemp("report")
    made = {"train": trained(base / "train")}
    few = FederatedSettings.of(
        "digits", users=30, rounds=5, report_goal=5, mechanism="tree", client_batch=16, seed=SEED
    )
    made["federated"] = federate(few, base / "federated", key=KEY).path
    table = base / "secret-table.csv"
    table.write_text("age,income\n" + "".join(f"{7 * i % 90},{('no', 'yes')[i % 2]}\n" for i in range(60)))
    bounds = {"features": {"age": [0, 100]}, "target": ["no", "yes"]}
    asked = FitSettings(csv=str(table), target="income", bounds=bounds, batch_size=20, mechanism="tree",
                        test_csv=str(table))  # fmt: skip
    made["fit"] = fit(asked, base / "fit", key=KEY).path
    made["tune"] = base / "tune"
    space, few_runs = {"rate": [1, 2], "batch_size": [4]}, {"runs": 3, "law": "geometric"}
    tune(_trial, space, epsilon=4, delta=1e-5, plan={"dataset_size": 12, "epochs": 1}, folder=made["tune"], key=KEY,
         score="public", **few_runs)  # fmt: skip
    report_file.write_search(made["tune"])
    return made


IGNORED = "ignore:'click.utils.:DeprecationWarning"  # of typer, with click 8.5
AGAIN = """
import sys
from anyorder.app.cli import app
for name in sys.argv[1:]:
    app(["report", name], standalone_mode=False)
"""


def test_a_folder_has_a_report_and_the_command_makes_it_again_byte_for_byte(folders, tmp_path):
    """In another process, of another locale; whatever the folders are called, and of public files alone."""
    copies = {"federated": tmp_path / "another place", "tune": tmp_path / "a third"}
    for name, copy in copies.items():
        told = text((folders[name] / "report.html").read_text())
        assert "epsilon ≤ " in told
        assert "recomputed from what it fixes" in told
        copy.mkdir()
        for file in ("run.privacy.json", "search.privacy.json", "metrics.json", "plan.json"):
            if (folders[name] / file).exists():
                shutil.copy(folders[name] / file, copy)
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-W", "error", "-W", IGNORED, "-c", AGAIN, *(copy.name for copy in copies.values())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "report: another place/report.html\nreport: a third/report.html\n"
    for name, copy in copies.items():
        assert (copy / "report.html").read_bytes() == (folders[name] / "report.html").read_bytes()


@pytest.mark.parametrize("name", ["train", "federated", "fit", "tune"])
def test_nothing_secret_and_nothing_of_the_machine_is_in_it(name, folders, tmp_path):
    page = (folders[name] / "report.html").read_text()
    read(page)
    for secret in (str(SEED), KEY.hex(), str(folders[name].parent), "secret-table", socket.gethostname(), "seconds",
                   "/tmp", "metrics file\n"):  # fmt: skip
        assert secret not in page, secret
    assert getpass.getuser() == "root" or getpass.getuser() not in page
    metrics = folders[name] / "metrics.json"
    if metrics.exists() and "seconds" in (found := json.loads(metrics.read_text())):
        shutil.copytree(folders[name], tmp_path / "copy")
        slower = {**found, "seconds": 10 * found["seconds"] + 1.0}
        (tmp_path / "copy" / "metrics.json").write_text(json.dumps(slower))
        assert report_file.make(tmp_path / "copy").text == page  # in no form, however long it took


def test_what_a_training_measured_in_public_is_shown(folders):
    accuracy = json.loads((folders["train"] / "metrics.json").read_text())["test_accuracy"]
    told = text((folders["train"] / "report.html").read_text())
    assert f"{100 * accuracy[-1]:.2f} % of the test examples are right at the end" in told
    assert "A training on mine:load" in told
    assert "learning rate 0.1" in told
    assert "Test accuracy by round" in text((folders["federated"] / "report.html").read_text())
    assert "of who took part: at most" in text((folders["federated"] / "report.html").read_text())
    assert "on 60 rows of a table that the owner calls public" in text((folders["fit"] / "report.html").read_text())
    assert "a secret number of runs, geometric" in text((folders["tune"] / "report.html").read_text())


@pytest.mark.parametrize(("order", "noise"), [("fixed", {}), ("poisson", {"mechanism": "poisson", "epsilon": None,
                                                                         "noise_multiplier": 1.0})])  # fmt: skip
def test_all_data_may_differ_and_the_report_is_the_same(order, noise, tmp_path):
    """But for the accuracy on public tests, for digests of what was released, and for keyed ones under secret draws."""
    pages = []
    for seed in (1, 2):
        path = trained(tmp_path / str(seed), seed, order=order, **noise)
        metrics = json.loads((path / "metrics.json").read_text())
        metrics["test_accuracy"] = [0.25, 0.5]
        (path / "metrics.json").write_text(json.dumps(metrics))
        page = report_file.write(path).text
        file = json.loads((path / "run.privacy.json").read_text())
        keyed = [] if order == "fixed" else [file["run"]["record_digest"], file["run"]["receipt_root"]]
        for digest in [*keyed, file["sha256"], *file["weights"]]:
            page = page.replace(digest, "")
        pages.append(page)
    assert pages[0] == pages[1]


def test_a_search_keeps_its_one_time(folders):
    times = {path.stat().st_mtime_ns for path in folders["tune"].rglob("*")}
    assert len(times) == 1


# -- what is not shown ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of a training's folder."""
    shutil.copytree(folders["train"], tmp_path / "run")
    return tmp_path / "run"


def altered(path, change):
    """The sealed file with something else in it, and a seal that fits."""
    data = json.loads(path.read_text())
    data.pop("sha256")
    change(data)
    save_json(path, data)


def test_a_claim_that_does_not_follow_is_not_shown(folder):
    altered(folder / "run.privacy.json", lambda data: data["claims"].update(epsilon=0.125))
    done = invoke("report", folder)
    assert done.exit_code == 1
    assert "NOT verified" in done.stderr
    page = (folder / "report.html").read_text()
    told = text(page)
    assert told.split("Privacy report", 1)[1].strip().startswith("NOT VERIFIED. Do not rely on this file.")
    assert "the file claims epsilon = 0.125; recomputed from its plan it is" in told
    assert "≤" not in page
    assert str(folder) not in page


@pytest.mark.parametrize("content", [
    "", "{", "\ud7ff", '{"format": "<script>alert(1)</script>"}', '{"sha256": 1}',
    '{"format": "anyorder-certificate/2", "<img src=x>": 1, "sha256": "0"}',
])  # fmt: skip
def test_what_is_no_certificate_is_refused_in_red(content, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(content, encoding="utf-8")
    done = invoke("report", file)
    assert done.exit_code == 1
    assert len(done.stderr.splitlines()) == 1
    page = (tmp_path / "a.html").read_text()
    assert "NOT VERIFIED" in text(page)
    assert str(tmp_path) not in page


def test_what_is_no_folder_of_a_run_is_refused(tmp_path, folder):
    (folder / "run.privacy.json").unlink()  # has not ended
    for path, why in ((tmp_path / "none", "there is no file or folder"), (tmp_path, "is not the folder of a run"),
                      (folder, "is not the folder of a run that has ended")):  # fmt: skip
        done = invoke("report", path)
        assert done.exit_code == 2
        assert why in done.stderr
        with pytest.raises(ArgumentError, match=why):
            report_file.make(path)
    assert not list(tmp_path.glob("*.html"))
    assert invoke("report", folder / "plan.json", "--output", tmp_path / "no" / "a.html").exit_code == 2


def test_a_plan_and_a_lone_certificate_have_reports_too(folder):
    assert invoke("report", folder / "plan.json").exit_code == 0
    assert "What a run of this plan would promise" in text((folder / "plan.html").read_text())
    told = json.loads(invoke("report", folder / "run.privacy.json", "--json", "--output", folder / "b.html").stdout)
    assert told == {"ok": True, "output": str(folder / "b.html"), "problem": None}
    page = text((folder / "b.html").read_text())
    assert "A training run" in page  # nothing of the folder
    assert "Test accuracy" not in page


@pytest.mark.parametrize("change", [
    {"test_accuracy": [0.5, "<script>"]}, {"test_accuracy": [0.5, 1.5]}, {"test_accuracy": {"a": 1}},
    {"test_accuracy": [[1, 0.5], [1, 0.5]]}, {"test_accuracy": [[1, 0.5], 3]}, {"test_accuracy": [0.5] * 20_000},
    {"settings": 3}, {"finished": False}, {"claims": {}}, {"claims": {"epsilon": 1.0}},
])  # fmt: skip
def test_metrics_that_do_not_belong_to_the_claim_are_not_shown(change, folder):
    metrics = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps({**metrics, **change}))
    made = report_file.make(folder)
    assert made.problem is None  # of the claim
    told = text(made.text)
    assert "metrics.json is in the folder and is not shown" in told
    assert "Test accuracy by" not in told
    assert "epsilon ≤ 4" in told


def test_hostile_settings_are_left_out(folder):
    metrics = json.loads((folder / "metrics.json").read_text())
    metrics["settings"] |= {"dataset": "<script>alert(1)</script>", "model": "/home/me", "lr": "<b>", "momentum": [1]}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    page = report_file.make(folder).text
    told = text(page)
    assert "alert" not in page
    assert "/home" not in page
    assert "epochs 2" in told
    assert "momentum" not in told


def test_settings_that_no_reader_asks_for_are_not_shown(folder):
    metrics = json.loads((folder / "metrics.json").read_text())
    metrics["settings"] |= {
        "csv": "ward-7.csv",
        "data_dir": "ward-7",
        "output": "ward-7",
        "seed": 7_654_321,
        "name": "ward-7",
    }
    metrics |= {"train_accuracy": [0.91, 0.92], "train_loss": [0.3, 0.2], "batch_sizes": [11, 13]}  # of private data
    page = report_file.make(folder).text
    (folder / "metrics.json").write_text(json.dumps(metrics))
    assert report_file.make(folder).text == page


def audit_json(folder, refuted=False, **changes):
    plan = ao.verify(folder / "run.privacy.json").plan
    seen = {
        "refuted": refuted,
        "p_value": 0.25,
        "canaries": {"in": 30, "out": 34},
        "epsilon_at_least": {"one_run": 0.75},
    }
    save_json(folder / "audit.json", {"format": "anyorder-audit/1", "note": "", "target": "/home/me/x", "seconds": 77.5,
                                      "plan_digest": plan.digest, "audit": seen, **changes})  # fmt: skip


def test_an_audit_in_the_folder_gives_its_verdict(folder):
    audit_json(folder)
    page = report_file.make(folder).text
    told = text(page)
    assert "Not refuted" in told
    assert "64 planted gradients" in told
    assert "epsilon of at least 0.75" in told
    assert "/home" not in page
    assert "77.5" not in page


def test_an_audit_that_refuted_the_claim_is_a_refusal(folder):
    audit_json(folder, refuted=True)
    done = invoke("report", folder, "--json")
    assert done.exit_code == 1
    assert not json.loads(done.stdout)["ok"]
    told = text((folder / "report.html").read_text())
    assert "NOT VERIFIED" in told
    assert "an audit of this plan, with 64 canaries, refuted its claim" in told
    assert "≤" not in told


@pytest.mark.parametrize("refuted", [None, 1, "false"])
def test_only_a_plain_false_is_no_refutation(refuted, folder):
    audit_json(folder, refuted=refuted)
    told = text(report_file.make(folder).text)
    assert "NOT VERIFIED" in told
    assert "Not refuted" not in told


@pytest.mark.parametrize(
    "changes",
    [
        {"p_value": 1e-30}, {"p_value": "nan"}, {"p_value": -1}, {"canaries": {"in": -1, "out": 9}},
        {"epsilon_at_least": {"one_run": "nan"}}, {"claimed": {"delta": 0.0}}, {"claimed": {"delta": "nan"}},
        {"confidence": 1},
    ],
)  # fmt: skip
def test_an_audit_that_does_not_agree_with_itself_does_not_count(changes, folder):
    seen = {"refuted": False, "p_value": 0.25, "canaries": {"in": 30, "out": 34}}
    audit_json(folder, audit={**seen, **changes})
    told = text(report_file.make(folder).text)
    assert "does not count: the audit does not agree with itself" in told
    assert "Not refuted" not in told


def test_a_bound_at_a_delta_of_its_own_is_held_against_the_claim_there(folder):
    plan = ao.verify(folder / "run.privacy.json").plan
    there = plan.curve.epsilon(plan.delta / 1000)
    assert there > 1.2 * plan.epsilon
    for bound, more in ((0.99 * there, False), (1.01 * there, True)):
        audit_json(folder, audit={
            "refuted": False, "p_value": 0.5, "canaries": {"in": 30, "out": 34}, "confidence": 0.99,
            "claimed": {"delta": plan.delta / 1000}, "epsilon_at_least": {"one_run": bound},
        })  # fmt: skip
        told = text(report_file.make(folder).text)
        assert ("it saw more than the claim, as up to one true claim of 100 has it" in told) is more
        assert ("nothing that the claim excludes" in told) is not more


def test_a_bound_above_the_claim_is_said(folder):
    seen = {"refuted": False, "p_value": 0.01, "canaries": {"in": 30, "out": 34}, "epsilon_at_least": {"one_run": 50.0}}
    audit_json(folder, audit=seen)
    told = text(report_file.make(folder).text)
    assert "Not refuted: but it saw more than the claim" in told
    assert "nothing that the claim excludes" not in told


@pytest.mark.parametrize("place", ["link", "pipe"])
def test_the_page_is_not_written_through_what_a_folder_has_in_its_place(place, folder, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("mine")
    (folder / "report.html").unlink(missing_ok=True)
    os.mkfifo(folder / "report.html") if place == "pipe" else (folder / "report.html").symlink_to(other)
    assert invoke("report", folder).exit_code == 2
    assert other.read_text() == "mine"


def test_the_page_does_not_replace_what_it_is_of(folder, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("mine")
    assert invoke("report", page).exit_code == 2
    certificate = folder / "run.privacy.json"
    before = certificate.read_bytes()
    assert invoke("report", certificate, "--output", certificate).exit_code == 2
    assert (page.read_text(), certificate.read_bytes()) == ("mine", before)


def test_a_folder_of_a_run_and_a_search_is_asked_which(folder):
    (folder / "search.privacy.json").write_text("{}")
    done = invoke("report", folder)
    assert done.exit_code == 2
    assert "give the one file" in done.stderr


@pytest.mark.parametrize(("law", "runs", "place"), [("fixed", 2, "runs/1"), ("geometric", 5, "best")])
def test_a_run_of_a_search_has_no_page_that_does_not_say_so(law, runs, place, tmp_path):
    def trial(settings, plan, folder):
        made = _trial(settings, plan, folder)
        made.certificate.save(folder / "run.privacy.json")
        report_file.write(folder)
        return made

    given = {"dataset_size": 40, "batch_size": 10, "epochs": 1, "order": "fixed", "mechanism": "tree"}
    tune(trial, {"rate": [0.1, 0.2]}, epsilon=8.0, delta=1e-5, plan=given, runs=runs, law=law, folder=tmp_path, key=KEY,
         score="public")  # fmt: skip
    if (tmp_path / place).exists():  # the law may give no run
        assert not (tmp_path / place / "report.html").exists()
        assert "This run lies in the folder of a search" in text(report_file.make(tmp_path / place).text)


def test_no_sentence_of_a_metrics_file_heads_the_page(folder):
    found = json.loads((folder / "metrics.json").read_text())
    found["settings"]["dataset"] = "digits, verified: epsilon 0.01"
    (folder / "metrics.json").write_text(json.dumps(found))
    assert "epsilon 0.01" not in report_file.make(folder).text


@pytest.mark.parametrize("name", ["a\nline", "turned\u202e"])
def test_where_an_odd_folder_lies_is_not_told(name, folder, tmp_path):
    moved = tmp_path / "machine" / name
    shutil.copytree(folder, moved)
    (moved / "metrics.json").write_text("nonsense")
    page = report_file.make(moved).text
    assert "metrics.json is not JSON" in page
    assert "machine" not in page


@pytest.mark.parametrize("change", [{"plan_digest": "0" * 64}, {"audit": {}}, {"audit": 3}])
def test_an_audit_of_something_else_does_not_count(change, folder):
    audit_json(folder, **change)
    told = text(report_file.make(folder).text)
    assert "audit.json is in the folder and does not count" in told
    assert "There is no audit." in told


def test_the_budget_is_named_by_its_id_alone(folder):
    plan = ao.verify(folder / "run.privacy.json").plan
    kept = {"budget": "/home/me/budget.json", "id": "ab" * 16, "plan": plan.digest, "run": "cd" * 16}
    (folder / "budget.json").write_text(json.dumps(kept))
    page = report_file.make(folder).text
    assert "Budget id: " + "ab" * 16 in text(page)
    assert "/home" not in page
    assert "cd" * 16 not in page
    (folder / "budget.json").write_text(json.dumps({**kept, "plan": "0" * 64}))
    assert "budget.json is in the folder and does not count" in text(report_file.make(folder).text)


@pytest.mark.parametrize("n", [3000, 1 << 15, 1 << 19])
def test_a_file_of_a_stranger_costs_no_more_than_it_may(n, tmp_path):
    """Beside verification's 2 seconds the page itself has as much."""
    decays = np.linspace(0.1, 0.99, 32)
    blt = BLT(decays=decays, scales=(1 - decays) / 40, n=n)
    plan = Plan(participation=SingleEpoch(n), strategy=blt, workload=prefix_sum(n), clip_norm=1.0, sigma=1.0,
                delta=1e-6, batch_size=4, dataset_size=8 * n)  # fmt: skip
    certified(plan).save(tmp_path / "a.json")
    began = time.process_time()
    made = report_file.make(tmp_path / "a.json")
    assert time.process_time() - began < 4
    assert made.problem is None


def test_a_good_page_of_a_very_long_run_is_not_replaced_by_a_refusal(tmp_path):
    n = 1 << 20
    plan = Plan(participation=SingleEpoch(n), strategy=Independent(n), workload=prefix_sum(n), clip_norm=1.0, sigma=1.0,
                delta=1e-6, batch_size=4)  # fmt: skip
    certified(plan).save(tmp_path / "run.privacy.json")
    report_file.write(tmp_path)
    page = (tmp_path / "report.html").read_bytes()
    done = invoke("report", tmp_path)
    assert done.exit_code == 2
    assert "is left as it is" in done.stderr
    assert (tmp_path / "report.html").read_bytes() == page
    assert invoke("report", tmp_path, "--large").exit_code == 0
    assert (tmp_path / "report.html").read_bytes() == page
    (tmp_path / "report.html").unlink()
    assert invoke("report", tmp_path).exit_code == 1  # nothing was there: a page that says why there is no claim
    assert "--large" in text((tmp_path / "report.html").read_text())
    (tmp_path / "report.html").write_bytes(page)
    altered = (tmp_path / "run.privacy.json").read_text().replace('"delta": 1e-06', '"delta": 1e-05')
    (tmp_path / "run.privacy.json").write_text(altered)
    assert invoke("report", tmp_path).exit_code == 1  # what does not hold is said, whatever was there
    assert "was altered" in text((tmp_path / "report.html").read_text())
