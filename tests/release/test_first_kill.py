"""Killed at any moment from the first start on, no step is released twice with different noise.

The key comes from the operating system: what a restart does not find is another run on the same data.
"""

import functools
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import CheckpointError, CheckpointWarning
from federated.test_kills import killed_at
from release.runs import SIZE, planned, total, units

pytestmark = pytest.mark.usefixtures("stopped_by_load")
STEPS, RAW = 3, os.write


class Shown:
    """What was released, as somebody outside has it: a file that no kill takes back."""

    def __init__(self, path):
        self._log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def show(self, t, private):
        data = np.asarray(private, np.float32).tobytes()
        RAW(self._log, t.to_bytes(8, "little") + len(data).to_bytes(8, "little") + data)

    def read(self):
        """[(step, what was released)], of all lives."""
        raw, found = os.pread(self._log, 1 << 24, 0), []
        while raw:
            size = int.from_bytes(raw[8:16], "little")
            found.append((int.from_bytes(raw[:8], "little"), raw[16 : 16 + size]))
            raw = raw[16 + size :]
        return found

    def check(self):
        for t in range(STEPS):
            assert len({private for step, private in self.read() if step == t}) == 1


def release_life(folder, shown, *, beside=False):
    release = ao.Release(planned(), SIZE, checkpoint=folder / "run", ledger_on_disk=beside)
    for t in range(release.steps_taken, STEPS):
        shown.show(t, release.step(units(t), total(t)))
        if t == 1:
            release.save()
    release.close()


@functools.cache
def examples():
    return ao.plan(dataset_size=6, batch_size=2, epochs=1, epsilon=8, delta=1e-5, mechanism="tree")


def engine_life(folder, shown):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    engine = ao.PrivacyEngine(examples(), checkpoint=folder / "run")
    data = TensorDataset(torch.arange(18.0).reshape(6, 3), torch.arange(6) % 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private, optimizer, loader = engine.make_private(model, optimizer, DataLoader(data, 2, shuffle=True))
    engine.on_release(lambda t, released: shown.show(t, released))
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(x), y).backward()
        optimizer.step()
    engine.close()


def lives(folder, life, point, **how):
    """A life that is killed at this point, and another one to the end; whether the first was killed."""
    folder.mkdir()
    shown = Shown(folder / "shown")
    was_killed = killed_at(point, lambda: life(folder, shown, **how))
    life(folder, shown, **how)
    shown.check()
    return was_killed


@pytest.mark.slow
@pytest.mark.parametrize(("beside", "apart"), [(False, 2), (True, 1)])
def test_a_release_that_is_killed_before_any_call_on_files(tmp_path, beside, apart):
    points = iter(range(0, 200, apart))
    while lives(tmp_path / str(point := next(points)), release_life, point, beside=beside):
        pass
    assert point > 15


@pytest.mark.slow
def test_an_engine_that_is_killed_before_any_call_on_files(tmp_path):
    engine_life(tmp_path, Shown(tmp_path / "shown"))  # imports, and the plan, which each child would make again
    points = iter(range(200))
    while lives(tmp_path / str(point := next(points)), engine_life, point):
        pass
    assert point > 10


def test_on_other_data_the_steps_that_were_released_are_refused(tmp_path):
    """Wherever the first life ended: what it showed was under the key that the next one has."""
    for point in range(1, 20, 6):
        folder = tmp_path / str(point)
        folder.mkdir()
        shown = Shown(folder / "shown")
        killed_at(point, lambda folder=folder, shown=shown: release_life(folder, shown))
        released = {t for t, _ in shown.read()}
        with ao.Release(planned(), SIZE, checkpoint=folder / "run") as release:
            for t in range(release.steps_taken, STEPS):
                if t in released:
                    with pytest.raises(CheckpointError, match="never the same noise on other data"):
                        release.step(units(t), total(t + 100))
                    release.step(units(t), total(t))


def test_the_key_is_on_the_disk_before_the_journal_has_a_step(tmp_path, monkeypatch):
    acts, replace, pwrite = [], os.replace, os.pwrite

    def moved(source, target):
        acts.append(os.path.basename(target))
        replace(source, target)

    def written(descriptor, data, place):
        acts.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        return pwrite(descriptor, data, place)

    monkeypatch.setattr(os, "replace", moved)
    monkeypatch.setattr(os, "pwrite", written)
    with ao.Release(planned(), SIZE, checkpoint=tmp_path / "run") as release:
        assert set(acts) == {".run.journal"}
        acts.clear()
        release.step(units(0), total(0))
    assert acts[:2] == ["run", ".run.journal"]


def test_a_release_that_took_no_step_leaves_the_place_to_another(tmp_path):
    ao.Release(planned(), SIZE, checkpoint=tmp_path / "run").close()
    ao.Release(planned("independent"), SIZE, checkpoint=tmp_path / "run").close()
    assert not (tmp_path / "run").exists()


def test_a_journal_that_was_cut_and_renewed_still_tells_of_its_run(tmp_path):
    """As a partial restore leaves it: with the checkpoint gone too, no new run begins beside what was released."""
    plan, path = planned("independent"), tmp_path / "run"
    with ao.Release(plan, SIZE, checkpoint=path) as release:
        for t in range(2):
            release.step(units(t), total(t))
        release.save()
    journal = tmp_path / ".run.journal"
    data = journal.read_bytes()
    journal.write_bytes(data[: data.find(b"\n", 19) + 1])
    with pytest.warns(CheckpointWarning, match="may lack steps"), ao.Release(plan, SIZE, checkpoint=path) as release:
        assert release.steps_taken == 2
    path.unlink()
    with pytest.raises(CheckpointError, match="is gone"):
        ao.Release(plan, SIZE, checkpoint=path)


def test_beside_a_run_whose_checkpoint_is_gone_another_one_has_its_own_file_and_entry(tmp_path):
    """Nothing is started over unless it is asked for: both runs stand in the budget, and the journal stays."""
    plan, budget = planned("independent"), ao.Budget(tmp_path / "people.budget", 100.0, 1e-4)

    def begun(name):
        release = ao.Release(plan, SIZE, checkpoint=tmp_path / name)
        release.save()
        budget.spend(release.certificate())
        release.step(units(release.steps_taken), total(release.steps_taken))
        release.close()

    begun("run")
    (tmp_path / "run").unlink()
    journal = (tmp_path / ".run.journal").read_bytes()
    for _ in range(9):
        with pytest.raises(CheckpointError, match="start_over=True"):
            begun("run")
    assert (tmp_path / ".run.journal").read_bytes() == journal
    assert len(budget.entries()) == 1
    begun("run again")
    assert len({held.key for held in budget.entries()}) == 2
