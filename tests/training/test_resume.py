"""A run that is killed at any point and resumed gives the same model as one that was not, or refuses."""

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
import processes
from anyorder.clipping.per_example import Pass, Unmapped
from anyorder.errors import CheckpointError, CheckpointWarning, OptimizerWarning, TrainingError
from anyorder.strategy import Tree

KEY = bytes(range(32))
N, B, EPOCHS = 24, 4, 3


def dataset(shift=0.0):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, 3, generator=generator) + shift, torch.arange(N) % 2)


def start(checkpoint, *, shift=0.0, estimator="full", key=KEY, optimizer="sgd", epsilon=8.0):
    plan = ao.plan(
        dataset_size=N,
        batch_size=B,
        epochs=EPOCHS,
        epsilon=epsilon,
        delta=1e-5,
        mechanism=Tree(18, estimator, restarts=(6,), completion=True),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2))
    if optimizer == "ftrl":
        optimizer = ao.FTRL(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = ao.PrivacyEngine(plan, checkpoint=checkpoint, key=key)
    loader = DataLoader(dataset(shift), batch_size=B, shuffle=True)
    with warnings.catch_warnings():  # both are here for their state, which is resumed too
        warnings.simplefilter("ignore", OptimizerWarning)
        return engine, *engine.make_private(model, optimizer, loader)


def steps(engine, model, optimizer, loader, *, until, save_every=4, delay=0.0, shift=0.0):
    """Train to the given step, saving on the way."""
    while engine.step < until:
        for x, y in loader:
            time.sleep(delay)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x + shift), y).backward()
            optimizer.step()
            if engine.step % save_every == 0:
                engine.save()
            if engine.step == until:
                return


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(("estimator", "optimizer"), [("vanilla", "adam"), ("online", "ftrl"), ("full", "adam")])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path, estimator, optimizer):
    (tmp_path / "a").mkdir()
    whole = start(tmp_path / "a" / "run.ckpt", estimator=estimator, optimizer=optimizer)
    steps(*whole, until=18)
    (tmp_path / "b").mkdir()
    for stop in (2, 7, 11, 18):  # stops between saves: the lost steps are replayed
        run = start(tmp_path / "b" / "run.ckpt", estimator=estimator, optimizer=optimizer)
        assert run[0].step == max(0, (stop - 1) // 4 * 4) or run[0].step <= stop
        steps(*run, until=stop)
        run[0].close()
    assert torch.equal(weights(whole[1]), weights(run[1]))
    assert whole[0].ledger.digest() == run[0].ledger.digest()


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("full"), Unmapped("no")])
def test_what_a_run_found_out_of_its_batches_goes_on(tmp_path, monkeypatch, fault):
    """Chunks that a memory full for a moment made smaller, and the engine: other masks, and a refusal, without them."""
    outputs, raised = Pass.outputs, []

    def full_once(self, tensors, *options):
        if not raised:
            raised.append(1)
            raise fault
        return outputs(self, tensors, *options)

    run = start(tmp_path / "run.ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(Pass, "outputs", full_once)
        steps(*run, until=6)
    run[0].close()
    again = start(tmp_path / "run.ckpt")
    steps(*again, until=6)
    assert torch.equal(weights(again[1]), weights(run[1]))


def test_noise_is_never_used_on_other_data(tmp_path):
    """Steps 5 and 6 were released and lost; resuming on other data must not release them again."""
    run = start(tmp_path / "run.ckpt")
    steps(*run, until=6)
    run[0].close()
    other = start(tmp_path / "run.ckpt")
    assert other[0].step == 4
    before = weights(other[1])
    with pytest.raises(CheckpointError, match="other data"):
        steps(*other, until=6, shift=1e-3)
    assert torch.equal(before, weights(other[1]))
    assert other[0].step == 4
    other[0].close()
    same = start(tmp_path / "run.ckpt")
    steps(*same, until=18)


def test_checkpoint_of_another_plan_is_refused(tmp_path):
    run = start(tmp_path / "run.ckpt")
    steps(*run, until=4)
    run[0].close()
    with pytest.raises(CheckpointError, match="sigma"):
        start(tmp_path / "run.ckpt", epsilon=9.0)


def test_checkpoint_without_its_journal_is_refused(tmp_path):
    run = start(tmp_path / "run.ckpt")
    steps(*run, until=6)
    run[0].close()
    for journal in tmp_path.glob(".*journal*"):
        journal.unlink()
    with pytest.raises(CheckpointError, match="journal"):
        start(tmp_path / "run.ckpt")


def test_two_processes_cannot_run_the_same_run(tmp_path):
    run = start(tmp_path / "run.ckpt", estimator="online")
    steps(*run, until=4)
    other = processes.run(__file__, tmp_path)
    assert other.returncode != 0
    assert "another process" in other.stderr
    assert run[0].step == 4
    steps(*run, until=5)


def test_resumed_in_the_same_process_ends_the_older_engine(tmp_path):
    older = start(tmp_path / "run.ckpt")
    steps(*older, until=4)
    newer = start(tmp_path / "run.ckpt")
    with pytest.raises(CheckpointError, match="closed"):
        steps(*older, until=5)
    steps(*newer, until=18)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_damaged_checkpoint_is_refused(tmp_path, damage):
    path = tmp_path / "run.ckpt"
    run = start(path)
    steps(*run, until=4)
    run[0].close()
    raw = path.read_bytes()
    middle = len(raw) // 2
    flipped = raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]
    path.write_bytes({"truncated": raw[:-9], "flipped": flipped, "empty": b"", "foreign": b"PK" * 500}[damage])
    with pytest.raises(CheckpointError, match="run.ckpt"):
        start(path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_disk_that_cannot_be_written_leaves_the_previous_checkpoint(tmp_path, monkeypatch, error):
    path = tmp_path / "run.ckpt"
    run = start(path)
    steps(*run, until=4)
    before, step = path.read_bytes(), run[0].step

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(CheckpointError, match=error.strerror):
            run[0].save()
        state = weights(run[1])
        with pytest.raises(CheckpointError, match=error.strerror):  # the journal cannot be written: no release
            steps(*run, until=5)
    assert path.read_bytes() == before
    assert run[0].step == step
    assert torch.equal(state, weights(run[1]))
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_save_needs_a_file_and_a_whole_step(tmp_path):
    engine, *_ = start(None)
    with pytest.raises(CheckpointError, match="checkpoint="):
        engine.save()
    engine, model, _, loader = start(tmp_path / "run.ckpt")
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(CheckpointError, match="between steps"):
        engine.save()


def test_extra_travels_with_the_checkpoint(tmp_path):
    engine, *_ = start(tmp_path / "run.ckpt")
    engine.save(extra={"scheduler": {"last_epoch": 7}})
    engine.close()
    engine, *_ = start(tmp_path / "run.ckpt")
    with pytest.warns(CheckpointWarning, match=r"extra=\['scheduler'\], and nothing read it"):
        engine.save(extra={"scheduler": {"last_epoch": 7}})
    engine.save(extra={"scheduler": {"last_epoch": 7}})  # it is said once
    engine.close()
    engine, *_ = start(tmp_path / "run.ckpt")
    assert engine.extra == {"scheduler": {"last_epoch": 7}}
    engine.save()


def test_numbers_of_a_batch_are_saved_as_ordinary_ones(tmp_path):
    """A history of losses, taken before the backward pass. To save it is no look at it."""
    engine, model, optimizer, loader = start(tmp_path / "run.ckpt")
    x, y = next(iter(loader))
    loss = nn.functional.cross_entropy(model(x), y)
    history = [loss.item(), (y == 0).sum().item()]
    loss.backward()
    optimizer.step()
    engine.save(extra={"history": history})
    assert engine.training.loss_kept == "proved"
    engine.close()
    saved = start(tmp_path / "run.ckpt")[0].extra["history"]
    assert saved == history
    assert list(map(type, saved)) == [float, int]


def test_a_fresh_run_has_a_fresh_key():
    first, second = (start(None, key=None)[0] for _ in range(2))
    assert first.certificate().key_fingerprint != second.certificate().key_fingerprint


def _main(folder: str) -> None:
    """The victim of the next test: trains on, from whatever it finds."""
    run = start(Path(folder) / "run.ckpt", estimator="online")
    if run[0].step == 0:
        run[0].save()
    print("ready", flush=True)
    steps(*run, until=18, save_every=3, delay=0.02)
    torch.save(weights(run[1]), Path(folder) / "final.pt")
    Path(folder, "digest.json").write_text(json.dumps(run[0].ledger.digest()))


def test_kill_at_any_moment(tmp_path):
    """kill -9 at random moments, in new processes, until the run is through: the model is the uninterrupted one's."""
    chance = random.Random(0)
    kills = 0
    for _ in range(30):
        program = processes.start(__file__, tmp_path)
        program.wait_for("ready")
        if kills < 2:
            time.sleep(chance.uniform(0.0, 0.25))
            program.kill()
        done = program.wait(120)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        kills += 1
    assert kills == 2
    (tmp_path / "whole").mkdir()
    whole = start(tmp_path / "whole" / "run.ckpt", estimator="online")
    steps(*whole, until=18, save_every=3)
    assert torch.equal(torch.load(tmp_path / "final.pt"), weights(whole[1]))
    assert json.loads((tmp_path / "digest.json").read_text()) == whole[0].ledger.digest()


def test_backward_of_a_passed_step_is_refused(tmp_path):
    engine, model, optimizer, loader = start(None)
    batches = iter(loader)
    x, y = next(batches)
    late = nn.functional.cross_entropy(model(x), y)
    x, y = next(batches)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(TrainingError):
        late.backward()
    assert engine.step == 1


if __name__ == "__main__":
    _main(sys.argv[1])
