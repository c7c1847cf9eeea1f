"""The main job leaves a folder that says what was done, and goes on after a kill as if nothing had happened."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from anyorder.app import Settings, folder, train
from anyorder.app import job as models
from anyorder.app.data import load
from anyorder.app.job import Observer, resume
from anyorder.errors import AnyorderError, ArgumentError, CheckpointError, MissingDependencyError, ModelError
from anyorder.plan.certificate import verify
from anyorder.plan.plan import Plan
from processes import run as run_python
from run.stopping import StopAt

KEY = bytes(range(32))
FILES = {
    "accuracy.png", "metrics.json", "model.pt", "noise.png", "plan.json", "report.html", "run.privacy.json", "secret",
}  # fmt: skip
# Dropout shows that torch's generator goes on too.
MODEL = (
    "from torch import nn\n"
    "def build(shape, classes):\n"
    "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, classes))\n"
)


def small(order="fixed", **changes):
    noise = {"epsilon": 8.0, "mechanism": "tree"}
    if order in ("balls-in-bins", "random_allocation"):
        noise = {"noise_multiplier": 1.0, "mechanism": "independent"}
    if order == "poisson":
        noise = {"noise_multiplier": 1.0}  # a search for the noise of an epsilon takes seconds
    return Settings.of("digits", **{"order": order, "epochs": 2, "batch_size": 240, **noise, **changes})


def visible(folder):
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


class Steps(Observer):
    def __init__(self):
        self.steps, self.epochs = [], []

    def stepped(self, step):
        self.steps.append(step)

    def epoch_ended(self, epoch, accuracy):
        self.epochs.append((epoch, accuracy))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    observer = Steps()
    result = train(small(), tmp_path_factory.mktemp("run"), key=KEY, observer=observer)
    return result, observer


def test_the_folder_says_what_was_done(finished):
    result, observer = finished
    assert visible(result.path) == FILES
    assert observer.steps == list(range(1, 13))
    assert observer.epochs == [(1, result.accuracy[0]), (2, result.accuracy[1])]
    metrics = json.loads((result.path / "metrics.json").read_text())
    assert metrics == {**result.to_dict(), "began": True}
    assert metrics["finished"]
    assert metrics["test_accuracy"] == result.accuracy
    assert metrics["settings"]["epsilon"] == 8.0
    assert metrics["claims"]["epsilon"] == result.plan.epsilon <= 8
    assert not [name for name in metrics if "loss" in name or "train" in name]
    for picture in ("accuracy.png", "noise.png"):
        assert (result.path / picture).read_bytes().startswith(b"\x89PNG")
    assert Plan.load(result.path / "plan.json") == result.plan
    state = torch.load(result.path / "model.pt", weights_only=True)
    assert [tuple(value.shape) for value in state.values()] == [(32, 64), (32,), (10, 32), (10,)]


def record(path):
    return verify(path / "run.privacy.json", evidence=path / "secret" / "run.evidence.json").evidence.ledger


def test_version_control_is_told_which_files_are_secret(finished):
    """Of the folder git would take what may be shown, and nothing else."""
    path = finished[0].path
    git = ["git", "-c", "safe.directory=*", f"--work-tree={path}"]
    with tempfile.TemporaryDirectory() as other:
        environment = {**os.environ, "GIT_DIR": other}
        subprocess.run([*git, "init", "-q"], check=True, env=environment, capture_output=True)
        listed = subprocess.run(
            [*git, "ls-files", "--others", "--exclude-standard"],
            check=True, env=environment, cwd=path, capture_output=True, text=True,
        )  # fmt: skip
    assert set(listed.stdout.split()) == {*FILES, ".gitignore"} - {"secret"}
    assert len(os.listdir(path / "secret")) == 3  # checkpoint, journal, evidence
    assert (path / "secret").stat().st_mode & 0o777 == 0o700
    assert (path / "secret" / "run.evidence.json").stat().st_mode & 0o777 == 0o600


def test_the_certificate_verifies_and_names_every_row_once_an_epoch(finished):
    found = verify(finished[0].path / "run.privacy.json")
    assert found.plan == finished[0].plan
    assert found.certificate.steps == 12
    backed = verify(finished[0].path / "run.privacy.json", evidence=finished[0].path / "secret" / "run.evidence.json")
    rows = [list(units) for units in backed.evidence.ledger.history()]
    for epoch in (rows[:6], rows[6:]):
        assert sorted(row for step in epoch for row in step) == list(range(1437))
    assert [sorted(step) for step in rows[:6]] == [sorted(step) for step in rows[6:]]  # order "fixed"


def test_the_seed_draws_weights_and_order_and_never_the_noise(tmp_path):
    def run(name, seed, key):
        result = train(small(seed=seed, epochs=1), tmp_path / name, key=key)
        return torch.load(result.path / "model.pt")["1.bias"], record(result.path).digest()

    same, same_order = run("a", 1, KEY)
    again, again_order = run("b", 1, KEY)
    noise, noise_order = run("c", 1, None)
    _, other_order = run("d", 2, KEY)
    assert torch.equal(same, again)
    assert not torch.equal(same, noise)
    assert same_order == again_order == noise_order != other_order


def test_a_run_is_not_resumed_over_examples_in_other_places(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        train(small(epochs=1), tmp_path / "run", observer=StopAt(2))
    data = load("digits")
    moved = TensorDataset(*(tensor.roll(700, 0) for tensor in data.train.tensors))
    monkeypatch.setattr(models, "make_data", lambda settings, given=None: replace(data, train=moved))
    with pytest.raises(CheckpointError, match="rows of the data set are not those"):
        resume(tmp_path / "run")
    monkeypatch.undo()
    assert resume(tmp_path / "run").steps


@pytest.mark.parametrize(
    ("order", "optimizer"),
    [("shuffled", "sgd"), ("fixed", "ftrl"), ("sequential", "sgd"), ("poisson", "ftrl"), ("random_allocation", "sgd")],
)
def test_every_order_and_optimizer_runs(order, optimizer, tmp_path):
    epochs = 1 if order == "random_allocation" else 2  # whose law takes longest
    result = train(small(order=order, optimizer=optimizer, epochs=epochs), tmp_path / "run")
    assert result.steps == result.plan.n == 6 * epochs
    assert result.plan.participation.secret == (order in ("poisson", "random_allocation"))
    assert verify(tmp_path / "run" / "run.privacy.json").certificate.steps == 6 * epochs


def test_it_learns(tmp_path):
    """Half the data set's default epochs; 93 % and more after all of them."""
    result = train(Settings.of("digits", epsilon=8.0, mechanism="tree", epochs=10), tmp_path / "run", key=KEY)
    assert result.accuracy[-1] > 0.88


KILL = """
import os, signal, sys
from anyorder.app.job import Observer, Settings, train
class Killer(Observer):
    def stepped(self, step):
        if step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
noise = {"poisson": {"noise_multiplier": 1.0}, "balls-in-bins": {"noise_multiplier": 1.0, "mechanism": "independent"}}
noise = noise.get(sys.argv[4], {"epsilon": 8.0, "mechanism": "tree"})
settings = Settings.of("digits", epochs=2, batch_size=240, order=sys.argv[4], optimizer=sys.argv[5], **noise,
                       model="dropout_model:build", checkpoint_every=int(sys.argv[3]) or None)
train(settings, sys.argv[1], observer=Killer(), key=bytes(range(32)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "every", "order", "optimizer"),
    [
        (6, 3, "shuffled", "ftrl"),  # the last step of an epoch is in the checkpoint, its test is not
        (3, 0, "poisson", "sgd"),  # before the first epoch's end: from the checkpoint of step 0
        (
            9,
            4,
            "balls-in-bins",
            "sgd",
        ),  # one step after a checkpoint within an epoch: it is replayed
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(step, every, order, optimizer, tmp_path, monkeypatch):
    (tmp_path / "dropout_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "dropout_model", raising=False)
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = run_python("-c", KILL, "killed", str(step), str(every), order, optimizer, env=environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not Path("killed/model.pt").exists()
    assert not json.loads(Path("killed/metrics.json").read_text())["finished"]
    resumed = resume("killed")

    whole = train(small(order, optimizer=optimizer, model="dropout_model:build"), "whole", key=KEY)
    left, right = (torch.load(f"{name}/model.pt", weights_only=True) for name in ("killed", "whole"))
    assert all(torch.equal(left[name], right[name]) for name in right)
    assert resumed.accuracy == whole.accuracy
    digests = [record(Path(name)).digest() for name in ("killed", "whole")]
    assert digests[0] == digests[1]
    assert resume("killed").accuracy == whole.accuracy  # a finished run is left as it is


class Stop(Exception):
    """Stands for a kill: nothing is cleaned up."""


@pytest.mark.parametrize("place", ["mkdir", "plan.json", "checkpoint"])
def test_a_run_killed_before_its_first_checkpoint_goes_on_and_its_folder_can_be_taken(place, tmp_path, monkeypatch):
    """Killed at each file that comes before the first step, half way through it."""
    path = tmp_path / "run"

    def stop(*arguments):
        raise Stop

    def stop_at(name):
        real = folder.replace

        def stopped(target, write):
            if target.name == name:
                (path / f"{name}.part").write_text("{")
                raise Stop
            real(target, write)

        return stopped

    with monkeypatch.context() as patch:
        if place == "mkdir":
            patch.setattr(folder, "held", stop)
        elif place == "lock":
            patch.setattr(folder, "hide_secrets", stop)
        elif place in ("plan.json", "checkpoint"):
            move, name = os.replace, {"checkpoint": "checkpoint.pt"}.get(place, place)
            patch.setattr(os, "replace", lambda a, b: stop() if Path(b).name == name else move(a, b))
        else:
            patch.setattr(folder, "replace", stop_at(place))
        with pytest.raises(Stop):
            train(small(epochs=1), path)
    gc.collect()
    if place == "checkpoint":
        shutil.copytree(path, tmp_path / "same")
        resumed = resume(tmp_path / "same")
        assert resumed.steps == resumed.plan.n == 6
    taken = train(small(epochs=1, seed=3), path)
    assert taken.steps == 6
    assert json.loads((path / "metrics.json").read_text())["settings"]["seed"] == 3


def test_a_run_that_took_steps_and_lost_its_checkpoint_is_not_begun_again(tmp_path):
    class Stopper(Observer):
        def stepped(self, step):
            raise Stop

    with pytest.raises(Stop):
        train(small(), tmp_path / "run", observer=Stopper())
    (tmp_path / "run" / "secret" / "checkpoint.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no secret/checkpoint\.pt, and the run took steps"):
        resume(tmp_path / "run")
    with pytest.raises(ArgumentError, match="holds files already"):
        train(small(), tmp_path / "run")


def test_a_copy_without_the_secret_files_is_not_begun_again(tmp_path):
    """A clone has none of them: its run would be another one, under the first one's entry in a budget."""
    path = tmp_path / "run"

    class Stopper(Observer):
        def stepped(self, step):
            if step == 4:
                raise Stop

    with pytest.raises(Stop):
        train(small(), path, observer=Stopper())
    gc.collect()
    shutil.rmtree(path / "secret")
    shown = json.loads((path / "metrics.json").read_text())
    if not shown["steps"]:
        (path / "metrics.json").write_text(json.dumps({**shown, "steps": 3}))
    before = (path / "metrics.json").read_bytes()
    with pytest.raises(ArgumentError, match="holds files already"):
        train(small(), path)
    with pytest.raises(CheckpointError):
        resume(path)
    assert (path / "metrics.json").read_bytes() == before


def test_one_run_at_a_time_in_a_folder(tmp_path):
    class Second(Observer):
        def started(self, plan, path, step):
            with pytest.raises(ArgumentError, match="a run is going on in folder"):
                resume(path)
            with pytest.raises(ArgumentError, match="holds files already"):
                train(small(), path)

    train(small(epochs=1), tmp_path / "run", observer=Second())
    (tmp_path / "begun").mkdir()
    with folder.held(tmp_path / "begun"), pytest.raises(ArgumentError, match="a run is going on in folder"):
        train(small(), tmp_path / "begun")


def test_what_a_resume_reads_outlasts_a_loss_of_power(tmp_path, monkeypatch):
    """On the disk before it has its name, and then the folder, where the name stands."""
    calls, fsync, move = [], os.fsync, os.replace

    def noted(descriptor):
        calls.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def moved(source, target):
        calls.append(Path(target).name)
        move(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", moved)
    path = train(small(epochs=1), tmp_path / "run").path
    for name in ("plan.json", "metrics.json", "model.pt", "run.privacy.json"):
        at = len(calls) - 1 - calls[::-1].index(name)
        assert calls[at - 1] == (path / name).stat().st_ino
        assert calls[at + 1] == path.stat().st_ino


def test_what_cannot_be_resumed_is_said(finished, tmp_path):
    with pytest.raises(CheckpointError, match="not the folder of a run"):
        resume(tmp_path)
    (tmp_path / "metrics.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        resume(tmp_path)
    (tmp_path / "metrics.json").write_text('{"settings": {"colour": 1}}')
    with pytest.raises(CheckpointError, match="no settings"):
        resume(tmp_path)
    (tmp_path / "metrics.json").write_bytes((finished[0].path / "metrics.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"no secret/checkpoint\.pt"):
        resume(tmp_path)
    shutil.copytree(finished[0].path / "secret", tmp_path / "secret", dirs_exist_ok=True)
    other = train(small(epsilon=3.0, epochs=1), tmp_path / "other")
    (tmp_path / "plan.json").write_bytes((other.path / "plan.json").read_bytes())
    with pytest.raises(AnyorderError):
        resume(tmp_path)


def test_output_folders_that_cannot_be_used(finished, tmp_path):
    with pytest.raises(ArgumentError, match="holds files already"):
        train(small(), finished[0].path)
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot be written"):
        train(small(), tmp_path / "file" / "run")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    if not os.access(closed, os.W_OK):  # root may write anywhere
        with pytest.raises(ArgumentError, match="cannot be written"):
            train(small(), closed / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "cnn"}, "20 pixels"),
        ({"batch_size": 5000}, "batch_size"),
        ({"epsilon": None}, "exactly one of epsilon and noise_multiplier"),
        ({"momentum": 1.5}, "momentum"),
    ],
)
def test_a_refused_run_leaves_nothing(changes, message, tmp_path):
    with pytest.raises(AnyorderError, match=message):
        train(small(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_not_installed_is_said_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"\.\[train\]"):
        train(small(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_guarantee_leaves_nothing(tmp_path, monkeypatch):
    normed = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    monkeypatch.setitem(models.MODELS, "normed", lambda shape, classes: normed)
    with pytest.raises(ModelError, match="BatchNorm"):
        train(small(model="normed"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": float("nan")}, "lr must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"seed": -1}, "seed must be"),
        ({"checkpoint_every": 0}, "checkpoint_every must be"),
        ({"optimizer": "adam"}, "optimizer must be one of 'ftrl', 'sgd'"),
        ({"order": "random"}, "order must be one of"),
        ({"order": "poisson", "mechanism": "tree"}, "one thing, amplified DP-SGD"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ArgumentError, match=message):
        small(**changes)


def test_settings_take_the_data_sets_defaults_where_nothing_is_given():
    assert Settings.of("mnist").model == "patches"
    assert Settings.of("mnist", model=None, lr=3.0).model == "patches"
    assert Settings.of("mnist", model="cnn").batch_size == 250
    assert Settings.of("mnist", model="mlp", lr=3.0).lr == 3.0
    assert Settings.of("own:data").order == "shuffled"
    assert Settings.of("digits", order="poisson").mechanism == "poisson"
    assert Settings.of("digits", mechanism="poisson").order == "poisson"
    settings = small()
    assert Settings(**json.loads(json.dumps(settings.to_dict()))) == settings


def test_event_files_are_written(tmp_path):
    pytest.importorskip("tensorboard")
    train(small(epochs=1), tmp_path / "run", tensorboard=tmp_path / "events")
    assert any(path.name.startswith("events.out") for path in (tmp_path / "events").iterdir())
