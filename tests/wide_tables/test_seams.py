"""Where a lazy run meets what is around it: what others hold of its table, settings, copies, interrupts, threads."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from anyorder.errors import CheckpointError, CheckpointWarning, TrainingError
from anyorder.release.attached_tables import AttachedTables
from laws.cases import STRATEGIES
from release.runs import copied
from wide_tables.tables import ROWS, N, begun, initial, lazy_step, planned


def plan(name="blt"):
    return planned(STRATEGIES[name](N))


def steps(run, until):
    while run[1].steps_taken < until:
        lazy_step(*run[1:])


# -- what others hold of a table that was shown ------------------------------------------------------------------------


def holds(layer):
    """Everything that people keep of a weight, without a copy."""
    return {
        "state_dict": layer.state_dict()["weight"],
        "numpy": layer.weight.detach().numpy(),
        "data": layer.weight.data,
        "view": layer.weight.detach()[1:],
    }


@pytest.mark.parametrize("flush", [0, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_others_have_of_a_shown_table_stays_as_it_was_shown(flush, momentum):
    """Else the rows that move in it between two flushes are the rows that were touched."""
    run = layer, _, table = begun(plan(), momentum=momentum)
    steps(run, flush)
    table.flush()
    held = holds(layer)
    shown = {name: np.asarray(value).copy() for name, value in held.items()}
    for until in range(flush + 1, N + 1):
        steps(run, until)
        table.read(torch.arange(ROWS)[:2])
        assert all(np.array_equal(held[name], shown[name]) for name in held)
    table.flush()
    assert all(np.array_equal(held[name], shown[name]) for name in held)
    assert (layer.weight.detach().numpy() != shown["data"]).all()


def test_the_tensor_of_from_pretrained_and_shared_memory_are_not_written():
    given = initial()
    layer = nn.Embedding.from_pretrained(given, freeze=False, sparse=True)
    run = begun(plan(), layer=layer)
    steps(run, 3)
    assert torch.equal(given, initial())
    run[2].flush()
    layer.share_memory()
    others, shown = layer.weight.detach(), layer.weight.detach().clone()
    assert others.is_shared()
    steps(run, 4)
    assert torch.equal(others, shown)


def test_a_resumed_table_is_not_written_while_it_is_shown(tmp_path):
    run = begun(plan(), path=tmp_path / "run")
    steps(run, 3)
    run[2].flush()
    run[1].save()
    run[1].close()
    run = layer, release, _ = begun(plan(), path=tmp_path / "run")
    held = layer.weight.detach()
    shown = held.clone()
    steps(run, N)
    assert torch.equal(held, shown)
    release.close()


@pytest.mark.parametrize("how", ["in place", "replaced"])
@pytest.mark.parametrize("before", [0, 3])
def test_training_goes_on_from_what_is_in_the_weight(how, before):
    """As in the dense run: the steps' updates, and their noise, are added to it."""
    moved = {}
    for factor in (1.0, 3.0):
        run = layer, _, table = begun(plan(), layer=nn.Embedding.from_pretrained(initial().double(), freeze=False))
        steps(run, before)
        table.flush()
        if how == "in place":
            with torch.no_grad():
                layer.weight.mul_(factor)
        else:
            layer.weight.data = (factor * layer.weight.detach()).T.contiguous().T
        start = layer.weight.detach().clone()
        assert torch.equal(table.read(torch.arange(ROWS)), start)
        steps(run, N)
        table.flush()
        moved[factor] = layer.weight.detach() - start
    torch.testing.assert_close(moved[1.0], moved[3.0], rtol=0, atol=1e-9)


def test_a_weight_of_another_shape_or_type_is_refused_before_a_step():
    for change in (lambda w: w[:-1], lambda w: w.half(), lambda w: w.T.contiguous()):
        run = layer, release, table = begun(plan())
        layer.weight.data = change(layer.weight.detach())
        with pytest.raises(TrainingError, match=r"embedding\.weight is now"):
            lazy_step(release, table)
        assert release.steps_taken == 0
        layer.weight.data = initial()
        steps(run, 1)


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", [{"momentum": 0.5}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "replay": True}, {}]
)
def test_a_run_goes_on_with_its_own_momentum_alone(tmp_path, other):
    """With another, the rows that were touched would have noise of another size than the others."""
    run = begun(plan("independent"), path=tmp_path / "run", momentum=0.9)
    steps(run, 3)
    run[1].save()
    run[1].close()
    with pytest.raises(CheckpointError, match=r"momentum=0\.9, nesterov=False, replay=False, and|kept arrays"):
        begun(plan("independent"), path=tmp_path / "run", **other)
    steps(begun(plan("independent"), path=tmp_path / "run", momentum=0.9), N)


# -- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [3, N])
def test_a_copy_after_the_last_step_is_refused_while_rows_lack_noise(tmp_path, saved):
    """Both copies could flush, and if one has read a row besides, the two tables tell when others were touched."""
    run = begun(plan(), path=tmp_path / "run")
    steps(run, saved)
    run[1].save()
    steps(run, N)
    run[1].close()
    copied(tmp_path / ".run.journal")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"drawn again from step {N} on"):
            begun(plan(), path=tmp_path / "run")


@pytest.mark.parametrize("saved", [3, N])
def test_a_copy_after_the_last_flush_shows_the_same_table(tmp_path, saved):
    run = begun(plan(), path=tmp_path / "run")
    steps(run, saved)
    run[1].save()
    steps(run, N)
    run[2].flush()
    shown = run[0].weight.detach().clone()
    run[1].close()
    copied(tmp_path / ".run.journal")
    run = begun(plan(), path=tmp_path / "run")
    steps(run, N)
    assert torch.equal(run[0].weight.detach(), shown)
    run[1].close()


def test_a_copy_of_a_finished_run_by_value_goes_on(tmp_path):
    run = begun(plan("independent"), path=tmp_path / "run", replay=True)
    steps(run, N)
    run[1].save()
    run[1].close()
    copied(tmp_path / ".run.journal")
    run = begun(plan("independent"), path=tmp_path / "run", replay=True)
    run[2].flush()
    run[1].close()


# -- interrupts, and shown weights that are changed --------------------------------------------------------------------


@pytest.mark.parametrize("then", ["step", "flush", "save"])
def test_an_interrupt_before_a_flush_of_the_journal_leaves_it_to_the_next_step(tmp_path, monkeypatch, then):
    run = begun(plan(), path=tmp_path / "run")
    run[1].save()
    steps(run, 4)
    run[2].flush()
    steps(run, N)
    run[2].flush()
    shown = run[0].weight.detach().clone()
    run[1].close()
    run = layer, release, table = begun(plan(), path=tmp_path / "run")
    steps(run, 3)

    def interrupt(*_):
        raise KeyboardInterrupt

    own = release.ledger.record

    def record_and_interrupt(*arguments):
        own(*arguments)
        monkeypatch.setattr(AttachedTables, "flush_again", interrupt)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(release.ledger), "record", lambda self, *arguments: record_and_interrupt(*arguments))
        lazy_step(release, table)
    monkeypatch.undo()
    assert release.steps_taken == 4
    assert not table.flushed
    if then == "flush":
        table.flush()
    elif then == "save":
        release.save()
        release.close()
        run = layer, release, table = begun(plan(), path=tmp_path / "run")
        assert table.flushed
    steps(run, N)
    assert torch.equal(layer.weight.detach(), shown)
    release.close()


def test_a_flush_that_was_interrupted_as_it_ended_is_made_again(tmp_path, monkeypatch):
    layer, _, table = run = begun(plan(), path=tmp_path / "run")
    steps(run, 3)
    own = table.show

    def show():
        own()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(table, "show", show)
        table.flush()
    with pytest.raises(TrainingError, match="broken off: flush again"):
        steps(run, 4)
    shown = layer.weight.detach().clone()
    table.flush()
    assert torch.equal(layer.weight.detach(), shown)
    steps(run, N)
    run[1].close()


@pytest.mark.parametrize("saved", ["before", "after"])
def test_shown_weights_may_be_changed_and_flushed_saved_and_resumed(tmp_path, saved):
    """Normalised rows, or the best state so far: what is done to a shown table tells nothing more."""

    def normalise(layer):
        with torch.no_grad():
            layer.weight.div_(layer.weight.norm(dim=1, keepdim=True))
        return layer.weight.detach().clone()

    run = begun(plan(), path=tmp_path / "run")
    steps(run, 3)
    if saved == "before":
        run[1].save()
    run[2].flush()
    changed = normalise(run[0])
    run[2].flush()
    assert torch.equal(run[0].weight.detach(), changed)
    if saved == "after":
        run[1].save()
    steps(run, N)
    run[2].flush()
    last = run[0].weight.detach().clone()
    run[1].close()
    run = begun(plan(), path=tmp_path / "run")
    if saved == "before":
        normalise(run[0])
    assert torch.equal(run[0].weight.detach(), changed)
    run[2].flush()
    steps(run, N)
    assert torch.equal(run[0].weight.detach(), last)
    run[1].close()


# -- threads, and a resume that fails ----------------------------------------------------------------------------------


def test_another_thread_is_refused_while_a_row_gets_its_noise(monkeypatch):
    """Else both would find the row lacking, and give it its noise twice."""
    run = _, release, table = begun(plan())
    steps(run, 3)
    twin = begun(plan())
    steps(twin, 3)
    twin[2].flush()
    problems, own = [], table._late.bring

    def tried(act):
        try:
            act()
        except TrainingError as problem:
            problems.append(str(problem))

    def bring(*arguments):
        monkeypatch.setattr(table._late, "bring", own)
        for act in (lambda: table.read(torch.arange(ROWS)), table.flush, lambda: lazy_step(release, table)):
            thread = threading.Thread(target=tried, args=(act,))
            thread.start()
            thread.join()
        return own(*arguments)

    monkeypatch.setattr(table._late, "bring", bring)
    table.read(torch.arange(ROWS))
    assert len(problems) == 3
    assert all("in use by another thread" in problem for problem in problems)
    assert release.steps_taken == 3
    table.flush()
    assert torch.equal(run[0].weight, twin[0].weight)
    steps(run, N)


def test_a_resume_that_fails_leaves_the_weight_as_it_was(tmp_path):
    run = begun(plan(), path=tmp_path / "run")
    steps(run, 3)
    run[1].save()
    run[1].close()
    copied(tmp_path / ".run.journal")
    layer = nn.Embedding.from_pretrained(initial(), freeze=False, sparse=True)
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match="drawn again"):
        begun(plan(), path=tmp_path / "run", layer=layer)
    assert torch.equal(layer.weight.detach(), initial())
