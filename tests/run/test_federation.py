"""`anyorder federated`: a folder that says what was done, the same after a kill, for any number of processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from typer.testing import CliRunner

from anyorder.certificate import verify
from anyorder.cli import app
from anyorder.errors import ArgumentError, CheckpointError
from anyorder.federated import CheckIn, Diurnal, Uniform
from anyorder.plan import Plan
from anyorder.release import checkpoint
from anyorder.run import FederatedSettings, Observer, by_key, federate, resume_federation, split_by_class
from anyorder.run.federated_data import accuracy, federation

KEY = bytes(range(32))
FILES = {
    "accuracy.png", "checkpoint.pt", "metrics.json", "model.pt", "noise.png", "plan.json", "run.evidence.json",
    "run.privacy.json",
}  # fmt: skip
SMALL = {"users": 40, "rounds": 12, "report_goal": 8, "mechanism": "tree", "client_batch": 16}


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("ANYORDER_CACHE", "off")


def words(**options):
    return [part for name, value in options.items() for part in ("--" + name.replace("_", "-"), str(value))]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def small(**options):
    return FederatedSettings.of(**{**SMALL, **options})


def model_of(path):
    return torch.cat([value.reshape(-1) for value in torch.load(Path(path) / "model.pt", weights_only=True).values()])


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federated") / "run"
    outcome = invoke("federated", *words(**SMALL), "--output", folder)
    assert outcome.exit_code == 0, outcome.output
    return folder, outcome


def test_the_command_prints_both_epsilons_and_leaves_a_folder_that_verifies(run_folder):
    folder, outcome = run_folder
    text = " ".join(outcome.stdout.replace("│", " ").split())
    assert "protects one user" in text
    for phrase in (
        "test accuracy",
        "planned epsilon <= 8 at",
        "realised epsilon <= ",
        "b = 4: the most at which 11 of",
    ):
        assert phrase in text, phrase
    assert "loss" not in text
    assert {path.name for path in folder.iterdir()} >= FILES
    verify(folder / "run.privacy.json")
    assert invoke("verify", folder / "run.privacy.json", "--evidence", folder / "run.evidence.json").exit_code == 0
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["finished"]
    assert metrics["rounds"] == 12
    assert metrics["realised"]["max_participations"] <= 3
    assert metrics["realised"]["min_separation"] >= 4
    assert metrics["realised"]["epsilon"] <= metrics["claims"]["epsilon"] <= 8
    assert [done for done, _ in metrics["test_accuracy"]] == list(range(1, 13))
    plan = Plan.load(folder / "plan.json")
    assert (plan.unit, plan.batch_size, plan.dataset_size, plan.neighbours) == ("user", 8, 40, "zero-out")


def test_git_sees_no_secret_of_a_folder(run_folder):
    folder, _ = run_folder
    for name in ("checkpoint.pt.pending", "checkpoint.pt.ledger"):  # what lies there while a run goes on
        assert not (folder / name).exists() or name.endswith("ledger")
        (folder / name).touch()
    subprocess.run(["git", "init", "-q", folder], check=True)
    listed = subprocess.run(
        ["git", "-C", folder, "ls-files", "--others", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    assert set(listed.stdout.split()) == FILES - {"checkpoint.pt", "run.evidence.json"} | {".gitignore"}


def test_a_command_that_was_killed_goes_on_bit_for_bit(tmp_path):
    """Kill -9 at whatever moment; the key that the killed run drew makes the run to compare with."""
    options = {**SMALL, "rounds": 60, "availability": "check-in", "timer_hours": 6, "server_optimizer": "ftrl"}
    path = tmp_path / "killed"
    command = [sys.executable, "-m", "anyorder", "federated", *words(**options), "--output", path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ANYORDER_CACHE": "off"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as process:
        while process.poll() is None and len(accuracy_so_far(path)) < 2:
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert not (path / "model.pt").exists()
    key = checkpoint.load(path / "checkpoint.pt")["key"]
    outcome = invoke("federated", "--resume", path, "--json")
    assert outcome.exit_code == 0, outcome.output
    resumed = json.loads(outcome.stdout)
    whole = federate(FederatedSettings.of(**options), tmp_path / "whole", key=key)
    assert torch.equal(model_of(path), model_of(tmp_path / "whole"))
    assert resumed["test_accuracy"] == [list(point) for point in whole.accuracy]
    assert resumed["realised"] == whole.to_dict()["realised"]
    verify(path / "run.privacy.json")


def accuracy_so_far(path):
    try:
        return json.loads((path / "metrics.json").read_text())["test_accuracy"]
    except FileNotFoundError:
        return []


class Stop(Exception):
    """Stands for a kill: nothing is cleaned up."""


class Stopping(Observer):
    def __init__(self, last):
        self.last = last

    def stepped(self, step):
        if step == self.last:
            raise Stop


@pytest.mark.parametrize("last", [1, 12])
def test_the_test_of_the_round_that_a_run_was_killed_after_is_made_up_for(last, tmp_path):
    settings = small()
    with pytest.raises(Stop):
        federate(settings, tmp_path / "run", observer=Stopping(last), key=KEY)
    resumed = resume_federation(tmp_path / "run")
    whole = federate(settings, tmp_path / "whole", key=KEY)
    assert resumed.accuracy == whole.accuracy
    assert torch.equal(model_of(tmp_path / "run"), model_of(tmp_path / "whole"))
    assert resume_federation(tmp_path / "run").accuracy == whole.accuracy  # a finished run is left as it is


def test_two_processes_make_the_run_of_one(tmp_path):
    one = federate(small(report_goal=20, users=100), tmp_path / "one", key=KEY)
    two = federate(small(report_goal=20, users=100), tmp_path / "two", key=KEY, processes=2)
    assert torch.equal(model_of(tmp_path / "one"), model_of(tmp_path / "two"))
    assert one.accuracy == two.accuracy
    assert not torch.distributed.is_initialized()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


OWN = """
import torch
def users():
    chance = torch.Generator().manual_seed(0)
    def some(count):
        x = torch.randn(count, 4, generator=chance)
        return x, (x[:, 0] > 0).long()
    return {f"writer {i}": some(1 + i % 5) for i in range(30)}, some(200), lambda: torch.nn.Linear(4, 2)
"""


def test_users_and_model_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_users.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = {"dataset": "own_users:users", "rounds": 20, "report_goal": 6, "noise_multiplier": 0.1, "clip_norm": 1}
    outcome = invoke("federated", *words(**options, max_participations=2), "--json")
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(outcome.stdout)
    assert result["output"].startswith("runs/own_users.users-")
    assert result["test_accuracy"][-1][1] > 0.7
    assert result["claims"]["noise_std"] == pytest.approx(0.1)
    assert result["realised"]["max_participations"] == 2


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["--epsilon", "-1"], "epsilon must be above 0, got -1.0"),
        (["--epsilon", "8", "--noise-multiplier", "1"], "exactly one of epsilon and noise_multiplier"),
        (["--users", "2000"], "users must be at most 718, so that each of them has 2 of the 1437"),
        (["--availability", "always"], "availability must be one of"),
        (["--available", "1.5"], "probability must be a finite number from 0 to 1"),
        (["--over-selection", "0.5"], "over_selection must be"),
        (["--server-optimizer", "lion"], "server_optimizer must be one of"),
        (["--dataset", "imagenet"], "dataset must be one of"),
        (["--user-key", "writer"], "has no columns beside"),
        (["--processes", "0"], "processes must be"),
        (["--mechanism", "poisson"], "needs secret sampling"),
        (["--resume", "absent", "--rounds", "3"], "leave out --rounds"),
    ],
)
def test_a_bad_value_is_one_line_and_leaves_no_folder(arguments, phrase, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = invoke("federated", *arguments)
    assert outcome.exit_code == 2, outcome.output
    (line,) = outcome.stderr.splitlines()
    assert phrase in line
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_job_is_no_federation(tmp_path):
    (tmp_path / "metrics.json").write_text(json.dumps({"settings": {"dataset": "digits", "epochs": 3}}))
    with pytest.raises(CheckpointError, match="no settings of a federation"):
        resume_federation(tmp_path)


# -- users ------------------------------------------------------------------------------------------------------------


def test_a_split_gives_every_example_to_one_user_and_few_classes_to_each():
    classes = np.random.default_rng(0).integers(0, 10, 1000)
    parts = split_by_class(classes, 50, 2, seed=1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
    assert {len(part) for part in parts} == {20}
    few = np.mean([len(set(classes[part].tolist())) for part in parts])
    assert few < 2.8  # two runs, some of which lie across two classes
    mixed = split_by_class(classes, 50, 0, seed=1)
    assert sorted(np.concatenate(mixed).tolist()) == list(range(1000))
    assert np.mean([len(set(classes[part].tolist())) for part in mixed]) > 7
    assert all(np.array_equal(a, b) for a, b in zip(parts, split_by_class(classes, 50, 2, seed=1), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, split_by_class(classes, 50, 2, seed=2), strict=True))


def test_rows_by_key():
    parts = by_key(["ann", "bob", "ann", "cy"])
    assert {user: places.tolist() for user, places in parts.items()} == {"ann": [0, 2], "bob": [1], "cy": [3]}
    assert set(by_key(np.array([7, 7, 3]))) == {7, 3}
    with pytest.raises(ArgumentError, match="of one type"):
        by_key(["1", 1])
    with pytest.raises(ArgumentError, match="got none"):
        by_key([])


def test_a_column_says_whose_a_row_is(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    pillow = pytest.importorskip("PIL.Image")
    for split, rows in (("train", 12), ("test", 4)):
        images = []
        for i in range(rows):
            file = tmp_path / "one.png"
            pillow.fromarray(np.full((28, 28), 10 * i, np.uint8)).save(file)
            images.append({"bytes": file.read_bytes(), "path": None})
        file.unlink()
        table = arrow.table(
            {"image": images, "label": [i % 3 for i in range(rows)], "writer": [f"w{i % 5}" for i in range(rows)]}
        )
        parquet.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    found = federation("mnist", data_dir=tmp_path, model="linear", user_key="writer")
    assert list(found.users) == ["w0", "w1", "w2", "w3", "w4"]
    x, y = found.users["w1"]
    assert x.shape == (3, 1, 28, 28)
    assert (255 * x[:, 0, 0, 0]).round().tolist() == [10, 60, 110]
    assert y.tolist() == [1, 0, 2]
    with pytest.raises(ArgumentError, match="image, label, writer"):
        federation("mnist", data_dir=tmp_path, user_key="speaker")


def test_accuracy_leaves_out_what_is_marked_so_and_keeps_the_mode():
    model = torch.nn.Linear(2, 2, bias=False)
    model.weight.data = torch.eye(2)
    x, y = torch.tensor([[1.0, 0], [0, 1], [1, 0], [1, 0]]), torch.tensor([0, 1, 1, -100])
    assert accuracy(model.train(), (x, y), batch_size=3) == pytest.approx(2 / 3)
    assert model.training


def test_words_for_availability():
    assert small(available=0.5).who_is_there() == Uniform(0.5)
    assert small(availability="diurnal", available=0.5, round_hours=2.0).who_is_there() == Diurnal(
        0.5, 0.1, round_hours=2.0
    )
    assert small(availability="check-in").who_is_there() == CheckIn(24.0, 12.0, 1.0)
