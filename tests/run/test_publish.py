"""What of a run is shown: a certificate is of the weights that it names, and a published folder has no secret."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import anyorder as ao
from anyorder.app import folder
from anyorder.app.cli import app
from anyorder.app.job import Settings, train
from anyorder.errors import CertificateError
from anyorder.formats import save_json
from anyorder.plan.certificate import Certificate
from anyorder.release import checkpoint
from anyorder.release.weights import digests, digests_of_file


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mine"
    train(Settings.of("digits", epsilon=8.0, mechanism="tree", epochs=1, batch_size=480), folder)
    return folder


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "mine")


def test_the_published_folder_holds_known_public_files_alone_and_verifies(run):
    for name in ("notes.txt", "budget.json"):
        (run / name).write_text("mine")
    done = invoke("publish", run)
    assert done.exit_code == 0, done.output
    shown = run.with_name("mine-public")
    assert {path.name for path in shown.iterdir()} == {
        "accuracy.png", "metrics.json", "model.pt", "noise.png", "plan.json", "report.html", "run.privacy.json",
    }  # fmt: skip
    assert "left in" in done.stdout
    assert "notes.txt" in done.stdout
    assert invoke("verify", shown / "run.privacy.json", "--model", shown / "model.pt").exit_code == 0
    assert invoke("publish", run).exit_code == 2  # not over other files


@pytest.mark.parametrize("form", ["bytes", "hex", "HEX"])
@pytest.mark.parametrize("whose", ["noise", "record"])
def test_a_file_that_holds_a_key_of_the_run_is_not_published(whose, form, run):
    if whose == "noise":
        key = bytes(checkpoint.load(run / folder.CHECKPOINT)["key"])
    else:
        key = bytes.fromhex(json.loads((run / folder.EVIDENCE).read_text())["record_key"])
    written = {"bytes": key, "hex": key.hex().encode(), "HEX": key.hex().upper().encode()}[form]
    (run / "metrics.json").write_bytes(b'{"note": "' + written + b'"}')
    done = invoke("publish", run)
    assert done.exit_code == 1
    assert "holds a secret key" in done.stderr
    assert not run.with_name("mine-public").exists()


def test_links_and_folders_without_a_certificate_are_not_published(run, tmp_path):
    (tmp_path / "private.csv").write_text("people")
    (run / "plan.json").unlink()
    (run / "plan.json").symlink_to(tmp_path / "private.csv")
    assert "is a link" in invoke("publish", run).stderr
    (run / "run.privacy.json").unlink()
    assert "has no certificate" in invoke("publish", run).stderr


def test_other_weights_beside_a_certificate_do_not_pass(run, tmp_path):
    for name, value in torch.load(run / "model.pt").items():
        state = torch.load(run / "model.pt")
        torch.save({**state, name: value + 1e-6}, tmp_path / "other.pt")
        done = invoke("verify", run / "run.privacy.json", "--model", tmp_path / "other.pt")
        assert done.exit_code == 1
        assert "of another model" in done.stderr
    shutil.copy(tmp_path / "other.pt", run / "model.pt")
    assert invoke("publish", run).exit_code == 1
    assert "names no model" in invoke("verify", older(run, tmp_path), "--model", run / "model.pt").stderr
    assert "a model belongs to a certificate" in invoke("verify", run / "plan.json", "--model", run / "model.pt").stderr


def test_a_search_whose_certificate_was_altered_is_not_published(tmp_path):
    search = tmp_path / "search"

    def trial(settings, plan, folder):
        return ao.budget.Trial(0.0, Certificate(plan, plan.n, "1" * 32, "0" * 64, "0" * 64))

    given = {"epsilon": 8.0, "delta": 1e-6, "runs": 1, "law": "fixed", "score": "public"}
    ao.tune(trial, {"batch_size": [4]}, plan={"dataset_size": 12, "epochs": 1}, folder=search, **given)
    assert invoke("publish", search).exit_code == 0
    file = search / "search.privacy.json"
    file.write_text(file.read_text().replace('"delta": 1e-06', '"delta": 1e-09'))
    done = invoke("publish", search, "--to", tmp_path / "other")
    assert done.exit_code == 1
    assert "was altered" in done.stderr
    assert not (tmp_path / "other").exists()


def older(run, tmp_path):
    found = Certificate.load(run / "run.privacy.json")
    path = tmp_path / "older.privacy.json"
    ao.Certificate(**{**vars(found), "weights": ()}).save(path)
    return path


def test_a_certificate_is_of_the_weights_at_that_moment_whatever_the_file(tmp_path):
    """LoRA's way: one layer is frozen, and only what was trained is saved; or all of it with other things beside."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    rows = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    loader = DataLoader(rows, batch_size=10)
    engine = ao.PrivacyEngine(ao.plan(loader=loader, epochs=1, epsilon=8, delta=1e-5, mechanism="tree"))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    private, optimizer, loader = engine.make_private(model, optimizer, loader)
    found = []
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(x), y).backward()
        optimizer.step()
        found.append(engine.certificate())
    assert len({one.weights for one in found}) == 4
    found[-1].save(tmp_path / "run.privacy.json")
    again = Certificate.load(tmp_path / "run.privacy.json")
    assert again.weights == found[-1].weights == digests(model[1].state_dict())
    trained = {f"adapter.{name}": value.detach() for name, value in model[1].named_parameters()}
    torch.save(trained, tmp_path / "adapter.bin")
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.ckpt")
    np.savez(tmp_path / "all.npz", **{name: value.numpy() for name, value in trained.items()})
    for name in ("adapter.bin", "all.ckpt", "all.npz"):
        assert invoke("verify", tmp_path / "run.privacy.json", "--model", tmp_path / name).exit_code == 0, name
    torch.save(model[0].state_dict(), tmp_path / "frozen.pt")
    assert set(again.weights).isdisjoint(digests_of_file(tmp_path / "frozen.pt"))


def test_weights_of_the_best_epoch_are_named_once_they_are_in_the_model(tmp_path):
    model, file, best = nn.Linear(3, 2), tmp_path / "run.privacy.json", tmp_path / "best.pt"
    loader = DataLoader(TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,))), batch_size=20)
    engine = ao.PrivacyEngine(ao.plan(loader=loader, epochs=1, epsilon=8, delta=1e-5))
    model, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for i, (x, y) in enumerate(loader):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if i == 0:
            torch.save(model.state_dict(), best)
    engine.certificate().save(file)
    told = " ".join(invoke("verify", file, "--model", best).stderr.split())
    assert "load them into model.module, and then call certificate()" in told
    model.module.load_state_dict(torch.load(best))
    engine.certificate().save(file)
    assert invoke("verify", file, "--model", best).exit_code == 0


class Part(torch.Tensor):
    """As FSDP's: what one process holds."""

    to_local = torch.Tensor.clone


def test_digests_are_of_whole_tensors_with_their_type_and_sizes():
    values = [torch.zeros(6), torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6, dtype=torch.int32)]
    assert len(digests(values)) == len(values)
    with pytest.raises(CertificateError, match="gather them first"):
        digests([torch.ones(2).as_subclass(Part)])


@pytest.mark.parametrize("weights", [[], ["0" * 63], ["z" * 64], [0], ["0" * 64] * 10_001, "0" * 64])
def test_weights_are_a_list_of_digests(weights, run):
    path = run / "run.privacy.json"
    data = json.loads(path.read_text())
    data.pop("sha256")
    save_json(path, {**data, "weights": weights})
    with pytest.raises(CertificateError, match="weights"):
        Certificate.load(path)


class Executed:
    def __reduce__(self):
        return (exec, ("raise SystemExit(9)",))


def test_nothing_in_the_file_of_a_model_is_executed(run):
    torch.save({"x": Executed()}, run / "model.pt")
    done = invoke("verify", run / "run.privacy.json", "--model", run / "model.pt")
    assert done.exit_code == 1
    assert "cannot be read" in done.stderr
    np.save(run / "model.npy", np.array([Executed()], object), allow_pickle=True)
    with pytest.raises(CertificateError, match="cannot be read"):
        digests_of_file(run / "model.npy")


def test_what_was_withdrawn_is_neither_verified_nor_published(run):
    done = invoke("withdraw", run / "run.privacy.json", "--reason", "a person was in it twice")
    assert done.exit_code == 0, done.output
    assert "a person was in it twice" in invoke("verify", run / "run.privacy.json").stderr
    assert invoke("publish", run).exit_code == 1
