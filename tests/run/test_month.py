"""A month in the life of a team: what is run, killed, copied, verified, withdrawn and run again stays one account."""

import gc
import json
import math
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from typer.testing import CliRunner

import anyorder as ao
from anyorder.app.cli import app
from anyorder.errors import AnyorderError, BudgetError, CheckpointError
from loops import train_to

ROWS, BATCH, EPOCHS = 48, 12, 2


class People(Dataset):
    """The team's table, of which somebody may have withdrawn."""

    def __init__(self, gone=()):
        self.gone = gone

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return None if i in self.gone else (torch.randn(3, generator=generator), i % 2)


def loader(gone=()):
    return DataLoader(People(gone), batch_size=BATCH, shuffle=True)


def planned(epsilon):
    return ao.plan(loader=loader(), epochs=EPOCHS, epsilon=epsilon, delta=1e-5, mechanism="tree")


def cell(plan, folder, model, *, gone=(), until=None, budget=None):
    """The notebook's cell: it begins the run in the folder, or goes on with it; the engine, closed."""
    engine = ao.PrivacyEngine(plan, checkpoint=folder / "secret.ckpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private, optimizer, batches = engine.make_private(model, optimizer, loader(gone), like=(torch.zeros(3), 0))
    try:
        if budget is not None:
            budget.spend(plan, folder.name, run=engine.certificate())
        train_to(plan.n if until is None else until, engine, private, optimizer, batches)
        engine.save()
        engine.certificate().save(folder / "run.privacy.json")
        engine.evidence().save(folder / "secret.evidence.json")
        torch.save(model.state_dict(), folder / "model.pt")
    finally:
        engine.close()
    return engine


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_month_of_one_team(tmp_path):
    budget = ao.Budget(tmp_path / "people.budget", epsilon=9.0, delta=1e-5)
    torch.manual_seed(1)
    models = [nn.Linear(3, 2) for _ in range(3)]
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    first, second, third = folders

    # Two fine-tunes; a third is more than is left, and takes no step.
    cell(planned(4.0), first, models[0], budget=budget)
    cell(planned(5.0), second, models[1], until=3, budget=budget)  # the machine dies after its third step
    with pytest.raises(BudgetError, match="must not run"):
        cell(planned(8.0), third, models[2], budget=budget)
    assert len(budget.entries()) == 2

    # The folder moves, somebody withdraws, and the run goes on: charged once, with the plan that it had.
    gc.collect()
    moved = shutil.move(second, tmp_path / "elsewhere")
    model = nn.Linear(3, 2)
    engine = cell(planned(5.0), moved, model, gone={7}, budget=budget)
    assert engine.step == engine.plan.n
    assert len(budget.entries()) == 2

    # A colleague verifies each model, and both together; an auditor sees who was in which step.
    for folder in (first, moved):
        paths = folder / "run.privacy.json", "--model", folder / "model.pt"
        assert invoke("verify", *paths).exit_code == 0
        assert (
            invoke("verify", folder / "run.privacy.json", "--evidence", folder / "secret.evidence.json").exit_code == 0
        )
    assert invoke("verify", first / "run.privacy.json", "--model", moved / "model.pt").exit_code == 1
    both = json.loads(invoke("verify", first / "run.privacy.json", moved / "run.privacy.json", "--json").stdout)
    assert both["together"]["mu"] == pytest.approx(math.hypot(planned(4.0).mu, planned(5.0).mu))
    assert both["together"]["epsilon"] == pytest.approx(budget.remaining().spent, rel=1e-6)

    # Who asks gets a receipt: in both epochs of the first run; who withdrew, in what came before.
    certificate = ao.Certificate.load(first / "run.privacy.json")
    evidence = ao.verify(first / "run.privacy.json", evidence=first / "secret.evidence.json").evidence
    evidence.receipt(7).save(tmp_path / "mine.json")
    certificate.check(ao.verify(first / "run.privacy.json", receipt=tmp_path / "mine.json").receipt)
    assert len(evidence.receipt(7).steps) == EPOCHS

    # The cell is run again: there is nothing left to do, and nothing is charged. A copy of the folder goes no further.
    again = cell(planned(5.0), moved, nn.Linear(3, 2), gone={7}, budget=budget)
    assert again.step == again.plan.n
    assert len(budget.entries()) == 2
    (moved / "secret.ckpt").unlink()
    with pytest.raises(CheckpointError):
        cell(planned(5.0), moved, nn.Linear(3, 2), gone={7}, budget=budget)

    # It turns out that a table was joined twice: the owner withdraws the first certificate.
    evidence.withdraw(first / "run.privacy.json", "a table was joined twice")
    with pytest.raises(AnyorderError, match="a table was joined twice"):
        ao.verify(first / "run.privacy.json")
