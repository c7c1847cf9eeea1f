"""Noise is used once, whatever happens to the files and processes of a run: copies, cuts, forks, jobs started twice."""

import itertools
import os
import re
import shutil
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import CheckpointError, CheckpointWarning
from anyorder.participation import PoissonSampling
from anyorder.plan.planner import plan_at_sigma
from anyorder.release import files
from anyorder.strategy import BLT, BandedInverse, SquareRoot, Tree

N, B, STEPS = 24, 4, 12
STRATEGIES = {
    "blt": BLT([0.9, 0.5], [0.3, 0.2], STEPS),
    "banded inverse": BandedInverse([1.0, -0.5, -0.1], STEPS),
    "square root": SquareRoot(STEPS),
    "tree": Tree(STEPS, "online"),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


class Run:
    """A small run in a folder; `noises` holds the private gradient of each step of losses that are all zero."""

    def __init__(self, folder, name="blt", *, scale=0.0, **options):
        mechanism = STRATEGIES.get(name, name)
        plan = ao.plan(dataset_size=N, batch_size=B, epochs=2, epsilon=8, delta=1e-5, mechanism=mechanism)
        torch.manual_seed(0)
        network = nn.Linear(300, 2)
        data = TensorDataset(torch.randn(N, 300), torch.arange(N) % 2)
        self.engine = ao.PrivacyEngine(plan, checkpoint=folder / "run.ckpt" if folder else None, **options)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        self.model, self.optimizer, self.loader = self.engine.make_private(network, optimizer, DataLoader(data, B))
        self.batches = itertools.chain.from_iterable(itertools.repeat(self.loader))
        self.scale = scale
        self.noises = {}

    def to(self, step):
        while self.engine.step < step:
            x, y = next(self.batches)
            self.optimizer.zero_grad()
            (self.scale * nn.functional.cross_entropy(self.model(x), y)).backward()
            t = self.engine.step
            self.optimizer.step()
            self.noises[t] = torch.cat([p.grad.flatten() for p in self.model.parameters()]).numpy()
        return self


def journal_of(folder):
    return folder / ".run.ckpt.journal"


def six_steps(tmp_path, name):
    """A run that saved after step 4 and was stopped after step 6."""
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run(folder, name).to(4)
    run.engine.save()
    run.to(6).engine.close()
    return folder, run


def unlike(a, b):
    """Whether two vectors of noise have nothing in common but rows of earlier steps, which two copies rightly share.

    Those make a correlation of 0.32 at most (the tree at step 7): of 602 coordinates, 0.6 is eight deviations above it.
    One pair of floats in 10^7 is equal by chance.
    """
    return (a == b).sum() < 3 and abs(np.corrcoef(a, b)[0, 1]) < 0.6


@every_strategy
def test_a_copied_folder_goes_on_with_noise_of_its_own(tmp_path, name):
    folder, before = six_steps(tmp_path, name)
    shutil.copytree(folder, tmp_path / "copy")
    first = Run(folder, name).to(STEPS)
    with pytest.warns(CheckpointWarning, match=r"From step 6 on the noise comes from a fresh key"):
        copy = Run(tmp_path / "copy", name)
    copy.to(8)
    for t in (4, 5):  # in the journal of both: repeated
        assert (copy.noises[t] == before.noises[t]).all()
        assert (first.noises[t] == before.noises[t]).all()
    assert all(unlike(first.noises[t], copy.noises[t]) for t in (6, 7))
    fingerprints = [run.engine.certificate().key_fingerprint for run in (before, first, copy)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]

    copy.engine.save()
    copy.to(10).engine.close()
    shutil.copytree(tmp_path / "copy", tmp_path / "third")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Run(tmp_path / "copy", name).to(STEPS)  # the journal is its own now: bit for bit
    with pytest.warns(CheckpointWarning, match="From step 10 on"):
        third = Run(tmp_path / "third", name)
    third.to(STEPS)
    for t in (8, 9):
        assert (copy.noises[t] == again.noises[t]).all()
        assert (copy.noises[t] == third.noises[t]).all()
    assert unlike(again.noises[10], third.noises[10])
    assert unlike(first.noises[10], third.noises[10])


def cut_in_an_entry(journal):
    os.truncate(journal, journal.stat().st_size - 10)


def cut_between_entries(journal):
    os.truncate(journal, journal.stat().st_size - 41)


def put_back(journal):
    """What it was before step 5, in the very same file, as rsync or cp -a leave it."""
    data, times = journal.read_bytes()[:-41], journal.stat()
    with open(journal, "r+b") as file:
        file.truncate()
        file.write(data)
        file.truncate()
    os.utime(journal, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("harm", [cut_in_an_entry, cut_between_entries, put_back])
def test_a_cut_journal_lets_no_noise_be_used_again(tmp_path, harm):
    folder, before = six_steps(tmp_path, "blt")
    time.sleep(0.02)  # what systems tell times apart by
    harm(journal_of(folder))
    with pytest.warns(CheckpointWarning, match="From step 5 on the noise comes from a fresh key"):
        run = Run(folder)
    run.to(4)
    run.scale = 1.0  # other data
    with pytest.raises(CheckpointError, match="noise of step 4 was already used on other data"):
        run.to(5)
    run.scale = 0.0
    run.optimizer.zero_grad()
    run.engine.close()
    run = Run(folder).to(7)
    assert (run.noises[4] == before.noises[4]).all()
    assert unlike(run.noises[5], before.noises[5])


def test_a_journal_that_ends_before_the_checkpoint_is_in_doubt(tmp_path, monkeypatch):
    folder, before = six_steps(tmp_path, "blt")
    older = journal_of(folder).read_bytes()[: -3 * 41]  # as of step 3; the checkpoint is of step 4
    journal_of(folder).write_bytes(older)
    monkeypatch.setattr("anyorder.release.journal._SAME_TIME", 1 << 62)  # a system that tells no times
    with pytest.warns(CheckpointWarning, match="it ends before the checkpoint. From step 4 on"):
        run = Run(folder)
    assert unlike(run.to(6).noises[4], before.noises[4])


def test_an_older_checkpoint_than_the_renewal_is_refused_where_steps_are_unknown(tmp_path):
    folder, _ = six_steps(tmp_path, "blt")
    shutil.copy(folder / "run.ckpt", tmp_path / "old")
    run = Run(folder).to(8)
    run.engine.save()
    run.engine.close()
    os.truncate(journal_of(folder), journal_of(folder).stat().st_size - 3 * 41)  # steps 5 to 7
    with pytest.warns(CheckpointWarning, match="From step 8 on"):
        Run(folder).to(9).engine.close()
    shutil.copy(tmp_path / "old", folder / "run.ckpt")
    with pytest.raises(CheckpointError, match="but not step 5"):
        Run(folder)


def test_files_of_two_copies_do_not_mix(tmp_path):
    folder, _ = six_steps(tmp_path, "blt")
    shutil.copytree(folder, tmp_path / "a")
    shutil.copytree(folder, tmp_path / "b")
    for copy in ("a", "b"):
        with pytest.warns(CheckpointWarning):
            run = Run(tmp_path / copy).to(7)
        run.engine.save()
        run.engine.close()
    shutil.copy(tmp_path / "b" / "run.ckpt", tmp_path / "a" / "run.ckpt")
    with pytest.raises(CheckpointError, match="are of two copies of the run"):
        Run(tmp_path / "a")


def test_a_copy_is_refused_where_later_noise_is_settled_before(tmp_path):
    """The full tree draws the noise of a subtree's right half with that of its left."""
    tree = Tree(STEPS, "full", restarts=(6,), completion=True)
    folder, _ = six_steps(tmp_path, tree)
    shutil.copytree(folder, tmp_path / "copy")
    os.truncate(journal_of(tmp_path / "copy"), journal_of(tmp_path / "copy").stat().st_size - 41)
    data = journal_of(tmp_path / "copy").read_bytes()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"may lack steps.*cannot be drawn again: binary tree, full"):
            Run(tmp_path / "copy", tree)
    assert journal_of(tmp_path / "copy").read_bytes() == data
    shutil.copytree(folder, tmp_path / "whole")
    with pytest.warns(CheckpointWarning, match="From step 6 on"):  # where another tree begins
        Run(tmp_path / "whole", tree)
    Run(folder, tree)


def test_a_copy_tosses_its_own_coins(tmp_path):
    """Poisson sampling: batches that another copy drew would amplify neither."""
    plan = plan_at_sigma(1.0, order=PoissonSampling(12, 0.5), delta=1e-5, batch_size=32, clip_norm=1.0)

    def start(folder):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        data = TensorDataset(torch.zeros(64, 3), torch.arange(64))
        engine = ao.PrivacyEngine(plan, checkpoint=folder / "run.ckpt")
        return engine, *engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 8))

    def train(run, until):
        engine, model, optimizer, loader = run
        seen = {}
        for _, index in itertools.chain.from_iterable(itertools.repeat(loader)):
            optimizer.zero_grad()
            (0.0 * model(torch.zeros(len(index), 3)).sum()).backward()
            seen[engine.step] = index.tolist()
            optimizer.step()
            if engine.step == until:
                return seen

    (tmp_path / "a").mkdir()
    run = start(tmp_path / "a")
    train(run, 4)
    run[0].save()
    train(run, 6)
    run[0].close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = train(start(tmp_path / "a"), 8)
    with pytest.warns(CheckpointWarning, match="From step 6 on"):
        copy = start(tmp_path / "b")
    other = train(copy, 8)
    assert [first[t] == other[t] for t in (4, 5, 6, 7)] == [True, True, False, False]


# -- processes ---------------------------------------------------------------------------------------------------------


def in_child(work):
    """What `work` returns in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(work())
        except BaseException as problem:
            text = f"{type(problem).__name__}: {problem}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.parametrize("keeps", [True, False])
def test_an_engine_is_dead_in_a_forked_child(tmp_path, keeps):
    """With a checkpoint file that was not saved yet, or with none."""
    run = Run(tmp_path if keeps else None).to(2)
    for work in (lambda: run.to(3), lambda: run.engine.save(), lambda: run.engine.close()):
        assert "TrainingError: this process was forked" in in_child(work)
    assert run.engine.step == 2
    run.to(3)
    if keeps:
        run.engine.save()
        assert in_child(lambda: Run(tmp_path)).startswith("CheckpointError")  # the parent's lock holds


def test_engines_made_before_a_fork_have_noise_of_their_own():
    plan = ao.plan(dataset_size=N, batch_size=B, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    engine = ao.PrivacyEngine(plan)

    def begin():
        model = nn.Linear(2, 2)
        data = DataLoader(TensorDataset(torch.zeros(N, 2)), B)
        engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        return engine.certificate().key_fingerprint

    assert len({in_child(begin), in_child(begin), begin()}) == 3


def test_the_journal_begins_with_the_run(tmp_path):
    run = Run(tmp_path)
    head = journal_of(tmp_path).stat().st_size
    run.to(3)
    assert journal_of(tmp_path).stat().st_size == head + 3 * 41
    run.engine.save()
    run.to(5).engine.close()
    again = Run(tmp_path)
    again.scale = 1.0
    with pytest.raises(CheckpointError, match="other data"):
        again.to(4)


def test_a_job_started_twice_is_refused_before_the_first_has_saved(tmp_path):
    first = Run(tmp_path).to(1)
    assert "another process runs with this checkpoint file" in in_child(lambda: Run(tmp_path))
    first.to(2)
    first.engine.save()
    assert "another process runs with this checkpoint file" in in_child(lambda: Run(tmp_path))
    first.to(3).engine.close()
    assert Run(tmp_path).engine.step == 2  # the run is still there


def test_a_job_started_twice_in_one_process_is_one_run(tmp_path):
    """The newer one goes on from the first checkpoint, which is there before the first step."""
    first = Run(tmp_path).to(1)
    second = Run(tmp_path)
    with pytest.raises(CheckpointError, match="is closed"):
        first.to(2)
    assert np.array_equal(second.to(1).noises[0], first.noises[0])


def test_a_run_that_nobody_saved_goes_on_under_its_key(tmp_path):
    first = Run(tmp_path).to(2)
    first.engine.close()
    second = Run(tmp_path)
    assert second.engine.step == 0
    assert second.to(3).engine.certificate().key_fingerprint == first.engine.certificate().key_fingerprint
    assert all(np.array_equal(second.noises[t], first.noises[t]) for t in range(2))
    second.engine.close()
    (tmp_path / "run.ckpt").unlink()
    with pytest.raises(CheckpointError, match="took steps, and whose checkpoint .* is gone"):
        Run(tmp_path)


def test_an_engine_that_nobody_holds_leaves_the_place_to_the_next(tmp_path):
    """As in a notebook, where a cell is run again."""
    for _ in range(3):
        run = Run(tmp_path).to(1)
        assert run.engine.step == 1
        del run


def test_what_failed_to_begin_leaves_the_place_to_the_next(tmp_path):
    plan = ao.plan(dataset_size=N, batch_size=B, epochs=2, epsilon=8, delta=1e-5, mechanism="independent")
    model = nn.Linear(2, 2)
    engine = ao.PrivacyEngine(plan, checkpoint=tmp_path / "run.ckpt")
    data = DataLoader(TensorDataset(torch.zeros(N, 2)), B + 1)
    with pytest.raises(ao.errors.AnyorderError):
        engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    Run(tmp_path)


def test_a_save_never_replaces_another_runs_checkpoint(tmp_path):
    (tmp_path / "other").mkdir()
    other = Run(tmp_path / "other").to(2)
    other.engine.save()
    run = Run(tmp_path).to(1)
    shutil.copy(tmp_path / "other" / "run.ckpt", tmp_path / "run.ckpt")
    kept = (tmp_path / "run.ckpt").read_bytes()
    with pytest.raises(CheckpointError, match="is not a checkpoint of this run, and is not replaced"):
        run.engine.save()
    assert (tmp_path / "run.ckpt").read_bytes() == kept
    (tmp_path / "run.ckpt").unlink()
    run.engine.save()
    run.engine.save()


def test_an_engine_that_ended_saves_no_more(tmp_path):
    older = Run(tmp_path).to(2)
    older.engine.save()
    newer = Run(tmp_path).to(4)
    newer.engine.save()
    with pytest.raises(CheckpointError, match="closed"):
        older.engine.save()
    newer.engine.close()
    with pytest.raises(CheckpointError, match="closed"):
        newer.engine.save()
    assert Run(tmp_path).engine.step == 4


def test_a_folder_that_is_not_there_is_found_at_the_start(tmp_path):
    with pytest.raises(CheckpointError, match="the folder of checkpoint=.* is not there; make it"):
        Run(tmp_path / "missing")


def test_another_key_than_the_runs_is_refused(tmp_path):
    run = Run(tmp_path, key=b"1" * 32).to(1)
    run.engine.save()
    run.engine.close()
    with pytest.raises(CheckpointError, match="key= is not the key of the run") as caught:
        Run(tmp_path, key=b"2" * 32)
    assert "1111" not in str(caught.value)
    assert Run(tmp_path, key=b"1" * 32).engine.step == 1


def test_a_replay_that_differs_names_the_machines(tmp_path, monkeypatch):
    folder, _ = six_steps(tmp_path, "blt")
    monkeypatch.setattr(files, "_machine", lambda: "abacus, torch 0.1, 3 thread(s)")
    run = Run(folder)
    run.scale = 1.0
    torch_here = re.escape(f"torch {torch.__version__}, {torch.get_num_threads()} thread")
    with pytest.raises(CheckpointError, match=rf"saved on: .*{torch_here}.*; this is: abacus, torch 0.1, 3 thread"):
        run.to(5)


def test_a_replay_that_differs_on_one_machine_says_nothing_of_it(tmp_path):
    folder, _ = six_steps(tmp_path, "blt")
    run = Run(folder)
    run.scale = 1.0
    with pytest.raises(CheckpointError) as caught:
        run.to(5)
    assert "saved on" not in str(caught.value)
