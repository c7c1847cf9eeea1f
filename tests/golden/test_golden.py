"""Files as the version of November 2026 wrote them (make.py) are read, and gone on with."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import anyorder as ao
from anyorder.accounting import Gaussian
from anyorder.errors import CheckpointError, CheckpointWarning, ParticipationError
from anyorder.federated import DeviceRecord
from anyorder.release.checkpoint import load
from anyorder.release.journal import Journal
from golden import make

FILES = Path(__file__).parent / "files"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(FILES, tmp_path / "files"))


def test_the_files_are_those_that_make_writes(tmp_path):
    make.write(tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert made - {"device.json.lock"} == {path.name for path in FILES.iterdir()}


def test_plan_certificate_and_evidence(folder):
    assert ao.Plan.load(folder / "plan.json").digest == make.plan().digest
    found = ao.verify(folder / "run.privacy.json", evidence=folder / "run.evidence.json")
    assert found.certificate.steps == make.STEPS
    assert found.plan.digest == make.plan().public().digest


@pytest.mark.parametrize("name", ["within", "beside"])
def test_checkpoint_journal_and_ledger(folder, name):
    """A copy of the files: so the noise of the next steps is fresh, and the journal's own step is known."""
    path = folder / f"{name}.ckpt"
    state = load(path)
    assert state["key"] == make.KEY
    with pytest.warns(CheckpointWarning, match="fresh key"):
        release = ao.Release(make.plan(), make.SIZE, checkpoint=path, ledger_on_disk=name == "beside")
    assert release.steps_taken == make.SAVED
    assert release.extra == {"note": name}
    assert [list(ids) for ids in release.ledger.history()] == [make.units(t) for t in range(make.SAVED)]
    with pytest.raises(CheckpointError, match="never the same noise"):
        release.step(make.units(3), make.total(0))
    for t in range(make.SAVED, 8):
        release.step(make.units(t), make.total(t))
    release.save()
    release.close()
    with ao.Release(make.plan(), make.SIZE, checkpoint=path, ledger_on_disk=name == "beside") as again:
        assert again.steps_taken == 8


def test_the_lost_step_comes_out_as_it_was(folder):
    with pytest.warns(CheckpointWarning), ao.Release(make.plan(), 6, checkpoint=folder / "within.ckpt") as release:
        private = release.step(make.units(3), make.total(3))
    with ao.Release(make.plan(), make.SIZE, key=make.KEY) as release:
        expected = [release.step(make.units(t), make.total(t)) for t in range(make.STEPS)]
    assert np.array_equal(private, expected[3])


def test_a_journal_alone(folder):
    state = load(folder / "within.ckpt")
    run = ao.noise.NoiseSource(state["key"]).derive(make.plan().digest.encode()).fingerprint()
    journal = Journal.open(folder / "within.ckpt", run)
    assert (journal.steps, journal.next_step, bool(journal.doubt)) == (make.STEPS, make.STEPS, True)


def test_a_server_goes_on_with_the_round_that_was_left(folder):
    with pytest.warns(CheckpointWarning):
        server = make.server(folder / "server.ckpt", key=None)
    assert server.step == 3
    assert [list(ids) for ids in server.release.ledger.history()] == [["ann"], ["bob"], ["cy"]]
    assert not (folder / "server.ckpt.pending").exists()
    with pytest.raises(ParticipationError):
        server.round({"cy": make.CHANGE})
    server.round({"ann": make.CHANGE})
    assert torch.isfinite(server.model.weight).all()


def test_a_budget_with_its_units_and_mark(folder):
    budget = ao.Budget(folder / "people.budget")
    assert [held.spend.name for held in budget.entries()] == ["count", "named", "run"]
    assert [held.rows is None for held in budget.entries()] == [True, False, True]
    assert budget.entries()[2].settled.steps == make.STEPS
    left = budget.remaining()
    assert (left.limit, left.delta) == (9.0, 1e-5)
    assert left.spent == pytest.approx(2.9273376711296133, rel=1e-9)
    assert budget.spend(Gaussian(0.1)).spent > left.spent
    lines = (FILES / "people.budget").read_bytes()
    assert (folder / "people.budget").read_bytes().startswith(lines)
    (folder / "people.budget").write_bytes(lines)
    with pytest.raises(ao.errors.BudgetError, match="6 lines, and 7 were written"):
        ao.Budget(folder / "people.budget")


def test_a_device_knows_its_round(folder):
    device = DeviceRecord(folder / "device.json", (2, 3, 0.0), clock=lambda: 1e9)
    assert [device.may(t) for t in range(2, 6)] == [False, False, True, True]
    device.take(4)
    assert not device.may(5)
