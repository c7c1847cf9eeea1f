"""A release with a checkpoint: it goes on bit for bit, and no noise is used twice."""

import fcntl
import gc
import os
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch

import anyorder as ao
import processes
from anyorder.errors import ArgumentError, CheckpointError, ParticipationError, TrainingError
from anyorder.participation import KnownOrder, SingleEpoch
from anyorder.release.journal import Journal
from laws.cases import STRATEGIES
from release.runs import KEY, SIZE, N, copied, expected, planned, state, taken, total, units


@pytest.mark.parametrize("name", STRATEGIES)
def test_saved_and_resumed_it_goes_on_bit_for_bit(name, tmp_path):
    plan = planned(STRATEGIES[name](N))
    with ao.Release(plan, SIZE, key=KEY, checkpoint=tmp_path / "run.ckpt") as release:
        first = taken(release, 5)
        release.save({"sum": np.sum(first, axis=0), "note": "five"})
    with ao.Release(plan, SIZE, checkpoint=tmp_path / "run.ckpt") as release:
        assert release.steps_taken == 5
        assert release.extra["note"] == "five"
        assert np.array_equal(release.extra["sum"], np.sum(first, axis=0))
        made = first + taken(release, N)
        release.certificate().save(tmp_path / "run.json")
    assert all(np.array_equal(a, b) for a, b in zip(made, expected(plan), strict=True))
    assert ao.verify(tmp_path / "run.json").certificate.steps == N


def test_a_lost_step_is_replayed_on_the_same_total_and_refused_on_another(tmp_path):
    path, plan = tmp_path / "run.ckpt", planned()
    release = ao.Release(plan, SIZE, checkpoint=path)
    taken(release, 2)
    release.save()
    lost = taken(release, 4)
    del release
    gc.collect()
    again = ao.Release(plan, SIZE, checkpoint=path)
    assert again.steps_taken == 2
    before = state(again)
    for other in (total(3), np.nextafter(total(2), 9), total(2, dtype=np.float64)):
        with pytest.raises(CheckpointError, match="never the same noise on other data"):
            again.step(units(2), other)
        assert state(again) == before
    assert np.array_equal(again.step(units(2), total(2)), lost[0])
    assert np.array_equal(again.step(units(3), torch.from_numpy(total(3))).numpy(), lost[1])
    again.step(units(4), total(7))  # nothing was released for this one


def test_the_journal_says_nothing_of_a_total_without_the_key(tmp_path, monkeypatch):
    """Its digests are under the run's key: whoever guesses the data cannot try the guess on the file."""
    digests, commit = [], Journal.commit
    monkeypatch.setattr(
        Journal, "commit", lambda self, t, digest, hint: (digests.append(digest), commit(self, t, digest))
    )
    for name, key in (("a", KEY), ("b", bytes(32)), ("c", None), ("d", KEY)):
        with ao.Release(planned(), SIZE, key=key, checkpoint=tmp_path / name) as release:
            release.step([0], total(0))
    assert digests[0] == digests[3]
    assert len(set(digests)) == 3


def test_a_lost_step_is_not_replayed_for_other_units(tmp_path):
    """Under another name the same sum would let a unit come once more than the ledger knows of."""
    path = tmp_path / "run.ckpt"
    plan = ao.plan(order=SingleEpoch(4), batch_size=1, epsilon=1, delta=1e-5, mechanism="independent")
    release = ao.Release(plan, SIZE, checkpoint=path)
    release.save()
    released = release.step(["alice"], total(0))
    release.close()
    again = ao.Release(plan, SIZE, checkpoint=path)
    for others in (["bob"], ["alice", "bob"], [0], ["alic"]):
        before = state(again)
        with pytest.raises(CheckpointError, match="never the same noise"):
            again.step(others, total(0))
        assert state(again) == before
    assert np.array_equal(again.step(["alice"], total(0)), released)
    with pytest.raises(ParticipationError):
        again.step(["alice"], total(1))


def test_a_step_without_names_has_nothing_in_it():
    release = ao.Release(planned("independent"), SIZE)
    before = state(release)
    for units_, given in ((None, total(0)), (None, np.zeros(SIZE)), ([], total(0))):
        with pytest.raises(ArgumentError, match="name"):
            release.step(units_, given)
    with pytest.raises(ArgumentError, match="name"):
        release.step_rows([], [1], total(0, (1, 3)))
    assert state(release) == before
    release.step([], np.zeros(SIZE))
    assert release.steps_taken == 1


def test_names_that_arrays_would_shorten_are_units_of_their_own():
    """ "a" and "a" with a NUL behind it: NumPy's texts would make them one, whose joint part would be clipped once."""
    vectors = np.array([[1.0, 0.0], [-5.0, 0.0]])
    both, one = ao.bounded_sum(vectors, ["a", "a\0"], 1.0), ao.bounded_sum(vectors[:1], ["a"], 1.0)
    assert np.linalg.norm(both - one) <= 1
    with pytest.raises(ArgumentError, match="NUL"):
        KnownOrder([["a"], ["a\0"]])


def test_units_that_were_checked_cannot_be_changed():
    release = ao.Release(planned("independent"), SIZE)
    ids = release.check([1, 2])
    with pytest.raises(ValueError, match="WRITEABLE"):
        ids.flags.writeable = True
    assert np.array_equal(release.ledger.check(0, ids), [1, 2])


def test_killed_and_resumed_it_is_the_run_that_was_not_killed(tmp_path):
    code = """
    import os, signal, sys
    import numpy as np
    import anyorder as ao
    plan = ao.Plan.load(sys.argv[1] + "/plan.json")
    with ao.Release(plan, 12, key=bytes(range(32)), checkpoint=sys.argv[1] + "/run.ckpt") as release:
        for t in range(release.steps_taken, 8):
            total = np.random.default_rng(t).normal(size=12).astype(np.float32)
            made = release.step([2 * (t % 4), 2 * (t % 4) + 1], total)
            np.save(sys.argv[1] + f"/{t}.npy", made)
            if t % 3 == 1 and not os.path.exists(sys.argv[1] + f"/killed{t}"):
                open(sys.argv[1] + f"/killed{t}", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            if t % 2 == 0:
                release.save()
    """
    plan = planned(STRATEGIES["blt"](N))
    plan.save(tmp_path / "plan.json")
    for _ in range(4):
        done = processes.run("-c", textwrap.dedent(code), tmp_path)
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
    assert sorted(path.name for path in tmp_path.glob("killed*")) == ["killed1", "killed4", "killed7"]
    for t, row in enumerate(expected(plan)):
        assert np.array_equal(np.load(tmp_path / f"{t}.npy"), row)


def test_a_checkpoint_of_another_plan_size_key_or_front_end_is_refused(tmp_path):
    path, plan = tmp_path / "run.ckpt", planned()
    with ao.Release(plan, SIZE, key=KEY, checkpoint=path) as release:
        taken(release, 2)
        release.save()
    for make, message in (
        (lambda: ao.Release(replace(plan, clip_norm=2.0), SIZE, checkpoint=path), "belongs to another plan"),
        (lambda: ao.Release(plan, SIZE + 1, checkpoint=path), "size = 12"),
        (lambda: ao.Release(plan, SIZE, key=bytes(32), checkpoint=path), "not the key of the run"),
    ):
        with pytest.raises(CheckpointError, match=message):
            make()
    with ao.Release(plan, SIZE, checkpoint=path) as release:  # none of them holds the file
        assert release.steps_taken == 2
    model = torch.nn.Linear(3, 4, bias=False)
    dataset = torch.utils.data.TensorDataset(torch.zeros(8, 3))
    of_engine = ao.plan(dataset_size=8, batch_size=2, epochs=1, epsilon=4, delta=1e-5, mechanism="tree")
    engine = ao.PrivacyEngine(of_engine, checkpoint=tmp_path / "engine.ckpt")
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    engine.save()
    engine.close()
    with pytest.raises(CheckpointError, match="another front end") as caught:
        ao.Release(of_engine, SIZE, checkpoint=tmp_path / "engine.ckpt")
    with open(tmp_path / ".engine.ckpt.journal", "rb+") as journal:  # free again, though the error is still held
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert caught.value.__traceback__ is not None
    with ao.Release(of_engine, SIZE, checkpoint=tmp_path / "plain.ckpt") as release:
        release.save()
    engine = ao.PrivacyEngine(of_engine, checkpoint=tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match="another front end"):
        engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader)


def test_two_processes_and_two_objects_on_one_file(tmp_path):
    path, plan = tmp_path / "run.ckpt", planned()
    plan.save(tmp_path / "plan.json")
    release = ao.Release(plan, SIZE, checkpoint=path)
    taken(release, 1)
    release.save()
    code = (
        "import sys, anyorder as ao\n"
        "try: ao.Release(ao.Plan.load(sys.argv[1] + '/plan.json'), 12, checkpoint=sys.argv[1] + '/run.ckpt')\n"
        "except ao.errors.CheckpointError as error: print(error)"
    )
    done = processes.run("-c", code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "another process runs with this checkpoint file" in done.stdout
    newer = ao.Release(plan, SIZE, checkpoint=path)
    for call in (lambda: release.step(units(1), total(1)), release.save):
        with pytest.raises(CheckpointError, match="is closed"):
            call()
    newer.step(units(1), total(1))


def test_a_forked_child_takes_no_step():
    release = ao.Release(planned(), SIZE)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for call in (lambda: release.step([0], total(0)), release.save, release.close):
            try:
                call()
            except TrainingError as error:
                os.write(write, b"x" if "forked" in str(error) else b"-")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 9) == b"xxx"
    release.step([0], total(0))


def test_a_closed_release_takes_no_step_and_saves_nothing(tmp_path):
    release = ao.Release(planned(), SIZE, checkpoint=tmp_path / "run.ckpt")
    release.close()
    release.close()
    for call in (lambda: release.step([0], total(0)), release.save, lambda: release.sample(3)):
        with pytest.raises((TrainingError, CheckpointError), match="was closed"):
            call()
    with pytest.raises(CheckpointError, match="no file"):
        ao.Release(planned(), SIZE).save()


def test_a_copied_journal_leads_to_fresh_noise(tmp_path):
    path, plan = tmp_path / "run.ckpt", planned(STRATEGIES["blt"](N))
    with ao.Release(plan, SIZE, key=KEY, checkpoint=path) as release:
        taken(release, 2)
        release.save()
    copied(tmp_path / ".run.ckpt.journal")
    with pytest.warns(ao.errors.CheckpointWarning, match="fresh key"):
        again = ao.Release(plan, SIZE, checkpoint=path)
    made = taken(again, N)
    assert not any(np.array_equal(a, b) for a, b in zip(made, expected(plan)[2:], strict=True))
