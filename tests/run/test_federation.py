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

import anyorder as ao
from anyorder.app import by_key
from anyorder.app import job as models
from anyorder.app.cli import app
from anyorder.app.cli.federated import _rows
from anyorder.app.federation import (
    FederatedResult,
    FederatedSettings,
    accuracy,
    federate,
    federation,
    resume_federation,
    split_by_class,
)
from anyorder.app.job import Observer
from anyorder.errors import ArgumentError, CheckpointError
from anyorder.federated import CheckIn, Diurnal
from anyorder.federated.cohorts import UniformAvailability
from anyorder.federated.simulation import Simulation
from anyorder.plan.certificate import verify
from anyorder.plan.plan import Plan
from anyorder.release import checkpoint
from processes import start

KEY = bytes(range(32))
FILES = {
    "accuracy.png", "metrics.json", "model.pt", "noise.png", "plan.json", "report.html", "run.privacy.json", "secret",
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
    assert "for one user in at most 3 rounds, 4 apart" in text
    verify(folder / "run.privacy.json")
    assert (
        invoke("verify", folder / "run.privacy.json", "--evidence", folder / "secret" / "run.evidence.json").exit_code
        == 0
    )
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["finished"]
    assert metrics["rounds"] == 12
    assert metrics["realised"]["max_participations"] <= 3
    assert metrics["realised"]["min_separation"] >= 4
    assert metrics["realised"]["epsilon"] <= metrics["claims"]["epsilon"] <= 8
    assert [done for done, _ in metrics["test_accuracy"]] == list(range(1, 13))
    plan = Plan.load(folder / "plan.json")
    assert (plan.unit, plan.batch_size, plan.dataset_size, plan.neighbours) == ("user", 8, 40, "zero-out")


def test_what_was_realised_is_shown_as_it_came(run_folder):
    """Two rounds where three were planned, five apart where four were."""
    folder, _ = run_folder
    settings = FederatedSettings(**json.loads((folder / "metrics.json").read_text())["settings"])
    outcome = Simulation(12, (3, 4), (2, 5), 8.0, 5.25, 1e-5)
    plan = Plan.load(folder / "plan.json")
    rows = dict(_rows(FederatedResult(folder, settings, plan, "b = 4", [(6, 0.5), (12, 0.75)], outcome, 1.0)))
    assert rows["planned"] == "epsilon <= 8 at delta = 1e-05, for one user in at most 3 rounds, 4 apart"
    came = "nobody was in more than 2 rounds, or in two less than 5 apart"
    assert rows["realised"] == f"epsilon <= 5.25 at delta = 1e-05: {came}"
    assert rows["test accuracy"] == "75.00 % (50.0 % after 6)"


def test_git_sees_no_secret_of_a_folder(run_folder):
    folder, _ = run_folder
    for name in ("secret/checkpoint.pt.pending", "secret/checkpoint.pt.ledger"):  # what lies there while a run goes on
        assert not (folder / name).exists() or name.endswith("ledger")
        (folder / name).touch()
    subprocess.run(["git", "init", "-q", folder], check=True)
    listed = subprocess.run(
        ["git", "-C", folder, "ls-files", "--others", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    assert set(listed.stdout.split()) == FILES - {"secret"} | {".gitignore"}


def test_a_run_that_was_stopped_for_its_accuracy_has_no_certificate_and_one_that_went_on_states_nothing(tmp_path):
    class Enough(Observer):
        def epoch_ended(self, done, right):
            if done >= 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federate(small(), tmp_path / "run", observer=Enough(), key=KEY)
    assert not (tmp_path / "run" / "run.privacy.json").exists()
    resume_federation(tmp_path / "run")
    certificate = verify(tmp_path / "run" / "run.privacy.json").certificate
    assert certificate.stated == ()
    assert certificate.realised is not None


def test_a_command_that_was_killed_goes_on_bit_for_bit(tmp_path):
    """Kill -9 at whatever moment; the key that the killed run drew makes the run to compare with."""
    options = {**SMALL, "rounds": 24, "availability": "check-in", "timer_hours": 6, "server_optimizer": "ftrl"}
    path = tmp_path / "killed"
    program = start("-m", "anyorder", "federated", *words(**options), "--output", path)
    while program.is_alive() and len(accuracy_so_far(path)) < 2:
        time.sleep(0.01)
    program.kill()
    killed = program.wait()
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (path / "model.pt").exists()
    key = checkpoint.load(path / "secret" / "checkpoint.pt")["key"]
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


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(tmp_path):
    one = federate(small(report_goal=10, users=50, rounds=5), tmp_path / "one", key=KEY)
    two = federate(small(report_goal=10, users=50, rounds=5), tmp_path / "two", key=KEY, processes=2)
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
    options["mechanism"] = "tree"
    with pytest.warns(UserWarning, match="30 users in at most 2 rounds each are 60 messages"):
        outcome = invoke("federated", *words(**options, max_participations=2), "--json")
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(outcome.stdout)
    assert result["output"].startswith("runs/own_users.users-")
    assert result["test_accuracy"][-1][1] > 0.7
    assert result["claims"]["noise_std"] == pytest.approx(0.1)
    assert result["realised"]["max_participations"] == 2
    idle = ("users", "model", "classes_per_user", "timer_hours", "round_hours")
    assert [result["settings"][name] for name in idle] == [None] * 5


OPTIONS = {
    "dataset": "digits", "model": "linear", "users": 50, "classes_per_user": 3, "epsilon": 5.0, "delta": 1e-6,
    "rounds": 9, "report_goal": 7, "clip_norm": 0.7, "mechanism": "tree", "min_separation": 2,
    "max_participations": 3, "availability": "check-in", "timer_hours": 3.0, "round_hours": 0.5,
    "over_selection": 1.7, "drop_out": 0.3, "client_lr": 0.04, "client_batch": 5, "local_epochs": 4,
    "max_examples": 11, "server_optimizer": "adam", "server_lr": 0.6, "momentum": 0.8, "seed": 12,
}  # fmt: skip


class Reached(Exception):
    """Has what a run was about to do."""


OTHERS = {"noise_multiplier": 2.0, "data_dir": "there", "user_key": "writer", "available": 0.9}


@pytest.mark.parametrize("options", [OPTIONS, OTHERS])
def test_every_option_is_in_the_settings(options, monkeypatch):
    def reached(settings, output, **others):
        raise Reached(settings, output, others["processes"])

    monkeypatch.setattr("anyorder.app.federation.federate", reached)
    outcome = invoke("federated", *words(**options), "--output", "there", "--processes", 3)
    settings, output, processes = outcome.exception.args
    assert settings == FederatedSettings.of(**options)
    assert {name: getattr(settings, name) for name in options} == options
    assert (output, processes) == (Path("there"), 3)


def about_to(settings, path, monkeypatch):
    """What a run hands to `simulate`."""

    def reached(*given, **options):
        raise Reached(given, options)

    monkeypatch.setattr("anyorder.app.federation.simulate", reached)
    with pytest.raises(Reached) as caught:
        federate(settings, path, key=KEY)
    return caught.value.args


@pytest.mark.filterwarnings("ignore::anyorder.errors.OptimizerWarning")  # Adam is one of the settings
def test_every_setting_is_in_what_is_run(tmp_path, monkeypatch):
    settings = FederatedSettings.of(**OPTIONS)
    (server, users, training), options = about_to(settings, tmp_path / "run", monkeypatch)
    plan = server.plan
    assert (plan.delta, plan.clip_norm, plan.batch_size, plan.n, plan.dataset_size) == (1e-6, 0.7, 7, 9, 50)
    assert plan.epsilon == pytest.approx(5.0, rel=1e-4)
    assert plan.workload.momentum == 0.8
    assert (plan.participation.min_separation, plan.participation.max_participations) == (2, 3)
    assert (training.lr, training.batch_size, training.epochs, training.max_examples) == (0.04, 5, 4, 11)
    assert [options[name] for name in ("availability", "over_selection", "drop_out", "seed")] == [
        CheckIn(3.0, 1.5, 0.5), 1.7, 0.3, 12,
    ]  # fmt: skip
    expected = federation("digits", users=50, classes_per_user=3, seed=12).users
    assert users.keys() == expected.keys()
    assert all(torch.equal(users[user][0], expected[user][0]) for user in users)
    group = server._optimizer.param_groups[0]
    assert (type(server._optimizer), group["lr"], group["betas"][0]) == (torch.optim.Adam, 0.6, 0.8)
    torch.manual_seed(12)
    assert torch.equal(server.model.state_dict()["1.weight"], models.build("linear", (1, 8, 8), 10)[1].weight)


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("ftrl", ao.FTRL)])
def test_the_servers_optimizer(name, kind, tmp_path, monkeypatch):
    settings = small(server_optimizer=name, server_lr=0.3, momentum=0.7)
    (server, *_), _ = about_to(settings, tmp_path / "run", monkeypatch)
    group = server._optimizer.param_groups[0]
    assert (type(server._optimizer), group["lr"], group["momentum"]) == (kind, 0.3, 0.7)


def test_the_separation_leaves_room_for_all_who_are_asked(tmp_path, monkeypatch):
    """Of 100 users, 40 are asked in each round, and 20 are added."""
    settings = small(users=100, report_goal=20, over_selection=2.0)
    (server, *_), _ = about_to(settings, tmp_path / "run", monkeypatch)
    assert server.plan.participation.min_separation == UniformAvailability().separation(12, 100, 40, 20) == 4


def test_a_command_that_is_stopped_says_how_to_go_on_and_fails(tmp_path, monkeypatch):
    def stopped(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("anyorder.app.federation.simulate", stopped)
    outcome = invoke("federated", *words(**SMALL), "--output", tmp_path / "run")
    assert outcome.exit_code == 1
    assert "stopped; go on with: anyorder federated --resume" in " ".join(outcome.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["--resume", "absent", "--output", "there"], "leave out --output"),
        (["--epsilon", "-1"], "epsilon must be above 0, got -1.0"),
        (["--epsilon", "8", "--noise-multiplier", "1"], "exactly one of epsilon and noise_multiplier"),
        (["--users", "2000"], "users must be at most 718, so that each of them has 2 of the 1437"),
        (["--availability", "always"], "availability must be one of"),
        (["--available", "1.5"], "probability must be a finite number from 0 to 1"),
        (["--over-selection", "0.5"], "over_selection must be"),
        (["--server-optimizer", "lion"], "server_optimizer must be one of"),
        (["--dataset", "imagenet"], "dataset must be one of"),
        (["--user-key", "writer"], "has no columns but"),
        (["--processes", "0"], "processes must be"),
        (["--mechanism", "poisson"], "needs secret sampling"),
        (["--resume", "absent", "--rounds", "3"], "leave out --rounds"),
        (["--dataset", "mine:users", "--users", "30"], "users has no effect with dataset 'mine:users'"),
        (["--dataset", "mine:users", "--model", "cnn"], "model has no effect"),
        (["--dataset", "mine:users", "--classes-per-user", "3"], "classes_per_user has no effect"),
        (["--timer-hours", "3"], "timer_hours has no effect with availability 'uniform'"),
        (["--availability", "check-in", "--available", "0.5"], "available has no effect"),
        (["--users", "20", "--report-goal", "21"], "at most the number of users, 20, got 21"),
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
    assert small(available=0.5).who_is_there() == UniformAvailability(0.5)
    assert small(availability="diurnal", available=0.5, round_hours=2.0).who_is_there() == Diurnal(
        0.5, 0.1, round_hours=2.0
    )
    assert small(availability="check-in").who_is_there() == CheckIn(24.0, 12.0, 1.0)


def test_poisson_is_not_offered():
    text = " ".join(invoke("federated", "--help").stdout.replace("│", " ").split())
    assert "DP-FTRL" in text
    assert "poisson" not in text
