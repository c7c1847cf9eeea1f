"""A release from plain arrays: the planned mechanism, the same bits after a refusal, and no noise used twice."""

import fcntl
import gc
import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch

import anyorder as ao
from anyorder.errors import (
    ArgumentError,
    CheckpointError,
    ParticipationError,
    PlanError,
    StepsExhaustedError,
    TrainingError,
)
from anyorder.noise import GridStream, NoiseSource, NoiseStream
from anyorder.participation import FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.release.journal import Journal
from laws.cases import STRATEGIES

KEY = bytes(range(32))
N, SIZE = 8, 12
RULE = FixedOrder(N, k=2, b=4)


def planned(mechanism="tree", **changes):
    settings = {"participation": RULE, "batch_size": 4, "epsilon": 4, "delta": 1e-5, "mechanism": mechanism}
    return ao.plan(**{**settings, **changes})


def units(t):
    return [2 * (t % 4), 2 * (t % 4) + 1]


def total(t, shape=(SIZE,), dtype=np.float32):
    return np.random.default_rng(t).normal(size=shape).astype(dtype)


def taken(release, steps, **how):
    return [release.step(units(t), total(t, **how)) for t in range(release.steps_taken, steps)]


def expected(plan, dtype=np.float32):
    stream = NoiseStream(plan.strategy, NoiseSource(KEY).derive(plan.digest.encode()), plan.noise_std, SIZE)
    rows = []
    for t in range(plan.n):
        row = total(t).astype(dtype)
        stream.add_to([row], 1 / plan.batch_size)
        rows.append(row)
    return rows


def state(release):
    """All that a step may change."""
    return release._noise.state_dict()["t"], release.ledger.to_bytes(), release.clip.current


# -- the mechanism ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_is_the_planned_mechanism_for_every_strategy(name):
    plan = planned(STRATEGIES[name](N))
    for made, row in zip(taken(ao.Release(plan, SIZE, key=KEY), N), expected(plan), strict=True):
        assert made.dtype == np.float32
        assert np.array_equal(made, row)


@pytest.mark.parametrize("shape", [(SIZE,), (3, 4), (2, 3, 2), (1, SIZE, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_and_tensors_of_any_shape_give_the_same_numbers(shape, dtype):
    plan = planned()
    arrays, tensors = (ao.Release(plan, SIZE, key=KEY) for _ in range(2))
    rows = expected(plan, dtype)
    for t in range(N):
        given = total(t).astype(dtype).reshape(shape)
        kept = given.copy()
        as_array, as_tensor = arrays.step(units(t), given), tensors.step(units(t), torch.from_numpy(given))
        assert (type(as_array), as_array.shape, as_array.dtype) == (np.ndarray, shape, dtype)
        assert (as_tensor.shape, as_tensor.dtype) == (torch.Size(shape), torch.from_numpy(given).dtype)
        assert np.array_equal(as_array.reshape(-1), rows[t])
        assert np.array_equal(as_tensor.numpy().reshape(-1), rows[t])
        assert np.array_equal(given, kept)
        as_array[...] = 0  # the caller's own: nothing is shared
        as_tensor.zero_()


def test_totals_in_any_memory_order_are_read_row_by_row():
    plan = planned()
    plain, turned = (ao.Release(plan, SIZE, key=KEY) for _ in range(2))
    values = total(0, (3, 4))
    fortran = np.asfortranarray(values)
    fortran.flags.writeable = False
    assert np.array_equal(plain.step([0], values), turned.step([0], fortran))
    other = ao.Release(plan, SIZE, key=KEY)
    strided = torch.from_numpy(np.repeat(values, 2, axis=1))[:, ::2].requires_grad_()
    assert np.array_equal(other.step([0], strided).numpy(), ao.Release(plan, SIZE, key=KEY).step([0], values))


def test_an_engine_and_a_release_of_one_plan_and_key_are_one_mechanism():
    model = torch.nn.Linear(3, 4, bias=False)
    torch.nn.init.zeros_(model.weight)
    x = torch.randn(N * 2, 3, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(x)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    plan = ao.plan(dataset_size=N * 2, batch_size=2, epochs=1, epsilon=4, delta=1e-5, mechanism="tree")
    engine = ao.PrivacyEngine(plan, key=KEY)
    release = ao.Release(plan, SIZE, key=KEY)
    model, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), 0.0), loader)
    for t, (batch,) in enumerate(loader):
        optimizer.zero_grad()
        model(batch).sum(1).mean().backward()
        optimizer.step()
        parts = batch.unsqueeze(1).expand(-1, 4, -1)
        bounded = ao.bounded_sum(parts, [2 * t, 2 * t + 1], plan.clip_norm)
        made = release.step([2 * t, 2 * t + 1], bounded)
        torch.testing.assert_close(made, next(model.parameters()).grad, rtol=1e-5, atol=1e-6)
    assert release.certificate() == engine.certificate()


def test_grid_plans_take_integers_and_are_exact():
    plan = planned("independent", secure=True)
    release = ao.Release(plan, SIZE, key=KEY)
    stream = GridStream(plan.strategy, NoiseSource(KEY).derive(plan.digest.encode()), plan.noise_std, plan.grid, SIZE)
    for t in range(N):
        sums = ao.bounded_sum(total(t, (2, SIZE)), units(t), plan.clip_norm, grid=plan.grid)
        assert sums.dtype == np.int64
        made = release.step(units(t), sums)
        assert made.dtype == np.float64
        assert np.array_equal(made, (sums + stream.next()) * plan.grid / plan.batch_size)
    with pytest.raises(ArgumentError, match="must be int64, in steps of the plan's grid"):
        ao.Release(plan, SIZE).step([0], total(0))


# -- refusals --------------------------------------------------------------------------------------------------------

REFUSED = {
    "a unit too early": ([0], total(0), ParticipationError),
    "units of two kinds": ([1, "a"], total(0), ArgumentError),
    "other names than before": (["a"], total(0), ArgumentError),
    "one id": ("abc", total(0), ArgumentError),
    "a total of another size": ([2], total(0, (SIZE + 1,)), ArgumentError),
    "a list": ([2], total(0).tolist(), ArgumentError),
    "a masked array": ([2], np.ma.masked_array(total(0)), ArgumentError),
    "integers": ([2], np.ones(SIZE, np.int64), ArgumentError),
    "half precision": ([2], torch.ones(SIZE, dtype=torch.bfloat16), ArgumentError),
    "half precision of an array": ([2], total(0).astype(np.float16), ArgumentError),
    "bytes in another order": ([2], total(0).astype(">f4"), ArgumentError),
    "complex numbers": ([2], total(0).astype(np.complex64), ArgumentError),
    "no memory": ([2], torch.ones(SIZE, device="meta"), ArgumentError),
    "a sparse tensor": ([2], torch.eye(SIZE)[0].to_sparse(), ArgumentError),
    "NaN": ([2], np.where(np.arange(SIZE) == 3, np.nan, total(0)), ArgumentError),
    "infinities of both signs": ([2], np.resize([np.inf, -np.inf], SIZE), ArgumentError),
    "an infinity in a tensor": ([2], torch.from_numpy(total(0)).index_fill(0, torch.tensor(2), np.inf), ArgumentError),
}


@pytest.mark.parametrize("name", ["tree", "blt"])
@pytest.mark.parametrize("with_file", [False, True])
def test_what_is_refused_changes_nothing(name, with_file, tmp_path):
    plan = planned(STRATEGIES[name](N))
    path = tmp_path / "run.ckpt" if with_file else None
    release = ao.Release(plan, SIZE, key=KEY, checkpoint=path)
    seen = []
    release.on_release(lambda t, private: seen.append(t))
    made = []
    for t in range(N):
        if t % 4 == 1:  # unit 0 was in the step before
            journal = path and (tmp_path / ".run.ckpt.journal").read_bytes()
            before = state(release)
            for who, what, kind in REFUSED.values():
                with pytest.raises(kind):
                    release.step(who, what)
                assert state(release) == before
            assert journal == (path and (tmp_path / ".run.ckpt.journal").read_bytes())
        made.append(release.step(units(t), total(t)))
    assert all(np.array_equal(a, b) for a, b in zip(made, expected(plan), strict=True))
    assert seen == list(range(N))
    with pytest.raises(StepsExhaustedError, match="all 8 planned steps"):
        release.step([], total(0))


def test_the_error_of_a_total_that_is_not_finite_holds_no_value():
    release = ao.Release(planned(), SIZE)
    values = total(0)
    values[[3, 5]] = np.inf, 7654321
    with pytest.raises(ArgumentError) as caught:
        release.step([1], values)
    assert "7654321" not in str(caught.value)
    assert "inf" not in str(caught.value).replace("infinit", "")


def test_large_finite_totals_pass():
    """Their sum overflows, they do not."""
    release = ao.Release(planned(), SIZE)
    assert np.isfinite(release.step([0], np.full(SIZE, 3e38, np.float32))).all()
    assert np.isfinite(release.step([1], np.full(SIZE, 1.7e308))).all()


@pytest.mark.parametrize("size", [0, -1, 2.5, "12", True])
def test_sizes_are_positive_integers(size):
    with pytest.raises(ArgumentError, match="size"):
        ao.Release(planned(), size)


def test_a_plan_and_a_key_are_needed_as_they_are(tmp_path):
    with pytest.raises(ArgumentError, match="plan must be an anyorder Plan"):
        ao.Release({"n": 8}, SIZE)
    with pytest.raises(ArgumentError, match="key must be 32 bytes"):
        ao.Release(planned(), SIZE, key=b"short")
    with pytest.raises(CheckpointError, match="folder"):
        ao.Release(planned(), SIZE, checkpoint=tmp_path / "nowhere" / "run.ckpt")


def test_two_threads_cannot_take_one_step():
    release = ao.Release(planned(), SIZE)
    caught = []

    def again(t, private):
        try:
            release.step([3], total(1))
        except TrainingError as error:
            caught.append(str(error))

    release.on_release(again)
    release.step([0], total(0))
    assert release.steps_taken == 1
    assert "one at a time" in caught[0]


def test_a_step_broken_off_half_way_ends_the_release(monkeypatch):
    release = ao.Release(planned(), SIZE)
    release.step([0], total(0))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(release.ledger, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            release.step([1], total(1))
    with pytest.raises(TrainingError, match="broken off half way"):
        release.step([1], total(1))


# -- files -----------------------------------------------------------------------------------------------------------


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
    plan = ao.plan(participation=SingleEpoch(4), batch_size=1, epsilon=1, delta=1e-5, mechanism="independent")
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
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), tmp_path], capture_output=True, text=True, check=False
        )
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
    parts = torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(dataset, batch_size=2)
    engine.make_private(model, *parts)
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
        engine.make_private(model, *parts)


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
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
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
    journal = tmp_path / ".run.ckpt.journal"
    data = journal.read_bytes()
    journal.unlink()
    journal.write_bytes(data)
    with pytest.warns(ao.errors.CheckpointWarning, match="fresh key"):
        again = ao.Release(plan, SIZE, checkpoint=path)
    made = taken(again, N)
    assert not any(np.array_equal(a, b) for a, b in zip(made, expected(plan)[2:], strict=True))


def test_a_copied_journal_leads_to_fresh_coins(tmp_path):
    """Whoever goes on with the other copy tosses the run's own: the same coins in both would be no longer secret."""
    path, plan = tmp_path / "run.ckpt", poisson()
    with ao.Release(plan, SIZE, key=KEY, checkpoint=path) as release:
        release.step(release.sample(40), total(0))
        release.save()
    journal = tmp_path / ".run.ckpt.journal"
    data = journal.read_bytes()
    journal.unlink()
    journal.write_bytes(data)
    with pytest.warns(ao.errors.CheckpointWarning, match="fresh key"):
        again = ao.Release(plan, SIZE, checkpoint=path)
    other = ao.Release(plan, SIZE, key=KEY)
    other.step(other.sample(40), total(0))
    for t in range(1, plan.n):
        drawn, tossed = again.sample(40), other.sample(40)
        assert not np.array_equal(drawn, tossed)
        again.step(drawn, total(t))
        other.step(tossed, total(t))


# -- observers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_observers_see_copies_of_what_is_released(kind):
    plan = planned()
    release, seen = ao.Release(plan, SIZE, key=KEY), []
    convert = torch.from_numpy if kind == "tensor" else np.asarray

    def spoil(t, private):
        if kind == "tensor":
            private.zero_()
        else:
            with pytest.raises(ValueError, match="read-only"):
                private[0] = 0

    release.on_release(spoil)
    end = release.on_release(lambda t, private: seen.append((t, np.asarray(private).copy())))
    made = [np.asarray(release.step(units(t), convert(total(t)))) for t in range(4)]
    end()
    release.step(units(4), convert(total(4)))
    assert [t for t, _ in seen] == [0, 1, 2, 3]
    for private, (_, copy), row in zip(made, seen, expected(plan), strict=False):
        assert np.array_equal(private, row)
        assert np.array_equal(copy, row)
    with pytest.raises(ArgumentError, match="callback"):
        release.on_release(None)


def test_an_observer_that_raises_neither_loses_nor_doubles_a_step(tmp_path):
    plan = planned()
    release, seen = ao.Release(plan, SIZE, key=KEY, checkpoint=tmp_path / "run.ckpt"), []
    rows = expected(plan)

    def bad(t, private):
        raise ZeroDivisionError(f"at {t}")

    end = release.on_release(bad)
    release.on_release(lambda t, private: seen.append(t))
    for t in range(3):
        with pytest.raises(ZeroDivisionError, match=f"at {t}"):
            release.step(units(t), total(t))
        assert release.steps_taken == t + 1
        assert release.unreturned[0] == t
        assert np.array_equal(release.unreturned[1], rows[t])
    end_other = release.on_release(bad)
    with pytest.raises(ExceptionGroup, match="2 observers of step 3") as caught:
        release.step(units(3), total(3))
    assert len(caught.value.exceptions) == 2
    end()
    end_other()
    assert np.array_equal(release.step(units(4), total(4)), rows[4])
    assert release.unreturned is None
    assert seen == [0, 1, 2, 3, 4]
    release.save()
    release.close()
    assert ao.Release(plan, SIZE, checkpoint=tmp_path / "run.ckpt").steps_taken == 5


# -- rows ------------------------------------------------------------------------------------------------------------


def stateless():
    return [name for name, make in STRATEGIES.items() if not make(N).state_rows]


@pytest.mark.parametrize("name", stateless())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_those_of_the_whole_table(name, dtype):
    plan = planned(STRATEGIES[name](N))
    table, chosen = ao.Release(plan, SIZE, key=KEY), ao.Release(plan, SIZE, key=KEY)
    for t in range(N):
        values = total(t, (4, 3), dtype)
        rows = np.random.default_rng(t).permutation(4)[: t % 5]
        given = values[rows] if t % 2 else torch.from_numpy(values[rows])
        made = chosen.step_rows(units(t), rows, given)
        assert type(made) is type(given)
        assert np.array_equal(np.asarray(made), table.step(units(t), values)[rows])
    assert chosen.certificate() == table.certificate()
    with pytest.raises(StepsExhaustedError):
        chosen.step_rows([], [0], values[:1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_divided_as_the_whole_table_is(dtype):
    """By a number whose inverse is no float32."""
    plan = planned("independent", batch_size=3)
    values = 1e3 * total(0, (4, 3), dtype)
    whole = ao.Release(plan, SIZE, key=KEY).step([0], values)
    assert np.array_equal(ao.Release(plan, SIZE, key=KEY).step_rows([0], np.arange(4), values), whole)


def test_rows_that_do_not_fit_are_refused_and_change_nothing(tmp_path):
    release = ao.Release(planned("independent"), SIZE, checkpoint=tmp_path / "run.ckpt")
    before, values = state(release), total(0, (2, 3))
    for rows, given, message in (
        ([0, 0], values, "distinct"),
        ([0, 4], values, r"0 \.\. 3"),
        ([-1, 0], values, r"0 \.\. 3"),
        ([0], values, "one for each row"),
        ([0.0, 1.0], values, "integers"),
        ([0, 1], values[:, :0], "no rows of 0"),
        ([0, 1], total(0, (2, 5)), "no rows of 5"),
        ([0, 1], values[0], "width"),
        ([0, 1], values.astype(np.int64), "float32 or float64"),
        ([0, 1], values * np.inf, "finite"),
        ([0, 1], values.tolist(), "NumPy array"),
    ):
        with pytest.raises(ArgumentError, match=message):
            release.step_rows([0], rows, given)
        assert state(release) == before
    for plan in (planned(STRATEGIES["blt"](N)), planned("independent", secure=True)):
        with pytest.raises(ArgumentError, match="rows alone"):
            ao.Release(plan, SIZE).step_rows([0], [0, 1], values)


def test_a_lost_step_of_rows_is_replayed_on_these_rows_alone(tmp_path):
    path, plan, values = tmp_path / "run.ckpt", planned("independent"), total(0, (2, 3))
    release = ao.Release(plan, SIZE, checkpoint=path)
    release.save()
    lost = release.step_rows([0], [1, 3], values)
    release.close()
    again = ao.Release(plan, SIZE, checkpoint=path)
    whole = np.zeros((4, 3), np.float32)
    whole[[1, 3]] = values
    for call in (
        lambda: again.step_rows([0], [1, 2], values),
        lambda: again.step_rows([0], [3, 1], values),
        lambda: again.step([0], whole),
        lambda: again.step_rows([1], [1, 3], values),
    ):
        with pytest.raises(CheckpointError, match="never the same noise"):
            call()
    assert np.array_equal(again.step_rows([0], [1, 3], values), lost)


def test_rows_of_the_same_bytes_and_another_width_are_other_data(tmp_path):
    plan, values = planned("independent"), total(0, (2, 2), np.float64)
    release = ao.Release(plan, 8, checkpoint=tmp_path / "run.ckpt")
    release.save()
    lost = release.step_rows([0], [0, 1], values)
    release.close()
    again = ao.Release(plan, 8, checkpoint=tmp_path / "run.ckpt")
    for other in (values.view(np.float32), values.view(np.float32)[:, ::2].copy()):
        with pytest.raises(CheckpointError, match="never the same noise"):
            again.step_rows([0], [0, 1], other)
    assert np.array_equal(again.step_rows([0], [0, 1], values), lost)


# -- secret sampling -------------------------------------------------------------------------------------------------


def poisson():
    return ao.plan(dataset_size=40, batch_size=10, epochs=2, epsilon=4, delta=1e-5, order="poisson")


def test_an_amplified_claim_holds_for_no_batch_that_somebody_chose(tmp_path):
    plan, path = poisson(), tmp_path / "run.ckpt"
    release = ao.Release(plan, SIZE, key=KEY, checkpoint=path)
    with pytest.raises(TrainingError, match="secret coins"):
        release.step([1, 2], total(0))
    drawn = release.sample(40)
    changed = release.sample(40)
    changed[-1] = 40
    with pytest.raises(TrainingError, match="those that sample"):
        release.step(changed, total(0))
    assert np.array_equal(drawn, release.sample(40))
    before = state(release)
    for other in (drawn[1:], [*drawn, 99], [], [str(i) for i in drawn]):
        with pytest.raises(TrainingError, match="those that sample"):
            release.step(other, total(0))
        assert state(release) == before
    release.step(drawn[::-1], total(0))
    with pytest.raises(TrainingError, match="secret coins"):
        release.step(drawn, total(1))  # of the step before
    with pytest.raises(ArgumentError, match="num_units must be 40"):
        release.sample(39)
    release.save()
    following = release.sample(40)
    release.close()
    again = ao.Release(plan, SIZE, checkpoint=path)
    with pytest.raises(ArgumentError, match="num_units must be 40"):
        again.sample(41)
    assert np.array_equal(again.sample(40), following)
    with pytest.raises(PlanError, match="give step"):
        ao.Release(planned(), SIZE).sample(40)


def test_a_lost_step_of_coins_is_not_replayed_for_another_population(tmp_path):
    """Saved before the first coins, no checkpoint knows of how many: the journal does."""
    plan, path = poisson(), tmp_path / "run.ckpt"
    release = ao.Release(plan, SIZE, key=KEY, checkpoint=path)
    release.save()
    largest = int(release.sample(40).max())
    assert largest < 39
    released = release.step(release.sample(40), total(0))
    release.close()
    again = ao.Release(plan, SIZE, checkpoint=path)
    same = again.sample(largest + 1)  # the same units, drawn from fewer
    with pytest.raises(CheckpointError, match="never the same noise"):
        again.step(same, total(0))
    again.close()
    again = ao.Release(plan, SIZE, checkpoint=path)
    assert np.array_equal(again.step(again.sample(40), total(0)), released)


def test_the_coins_are_those_of_the_engine():
    plan = poisson()
    release, engine = ao.Release(plan, 3, key=KEY), ao.PrivacyEngine(plan, key=KEY)
    model = torch.nn.Linear(3, 1, bias=False)
    dataset = torch.utils.data.TensorDataset(torch.arange(40.0)[:, None].repeat(1, 3))
    loader = torch.utils.data.DataLoader(dataset, batch_size=10)
    _, _, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for (batch,), t in zip(loader, range(4), strict=False):
        drawn = release.sample(40)
        assert batch[:, 0].tolist() == drawn.tolist()
        release.step(drawn, total(t, (3,)))


# -- bounded sums ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bounded_sums_cut_each_unit_once(kind, dtype):
    vectors = np.random.default_rng(1).normal(size=(9, 3, 2)).astype(dtype)
    names = np.array([5, 2, 5, 2, 2, 7, 1, 7, 3])
    vectors[names == 7] = [[[3e38, 0]] * 3, [[3e38, 0]] * 3]  # the sum of the two overflows in float32
    vectors[names == 3] = np.nan
    norms = {name: np.linalg.norm(vectors[names == name].sum(0).astype(float)) for name in (5, 2, 1)}
    expected = sum(vectors[names == name].astype(float).sum(0) * min(1, 0.7 / norm) for name, norm in norms.items())
    if dtype is np.float64:
        expected = expected + np.array([[1, 0]] * 3) * 0.7 / np.sqrt(3)
    given = torch.from_numpy(vectors) if kind == "tensor" else vectors
    kept = vectors.copy()
    for who in (names, [str(name) for name in names]):
        made = ao.bounded_sum(given, who, 0.7)
        assert type(made) is type(given)
        assert np.asarray(made).dtype == dtype
        np.testing.assert_allclose(np.asarray(made), expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(vectors, kept, equal_nan=True)


def test_bounded_sums_move_by_at_most_the_clip_norm():
    generator = np.random.default_rng(2)
    for _ in range(20):
        vectors = generator.normal(size=(6, 4)) * 10.0 ** generator.integers(-3, 300)
        one = ao.bounded_sum(vectors[:1], [0], 0.3)
        assert np.linalg.norm(one) <= 0.3
        grid = ao.bounded_sum(vectors[:1], [0], 0.3, grid=2.0**-20)
        assert (grid**2).sum() <= (0.3 * 2**20) ** 2


def test_bounded_sums_of_nobody_and_what_is_refused():
    assert np.array_equal(ao.bounded_sum(np.ones((0, 3)), [], 1.0), np.zeros(3))
    for vectors, who in (
        (np.ones(3), [0, 1, 2]), (np.ones((2, 3)), [0]), (np.ones((2, 3), int), [0, 1]), ([[1.0]], [0]),
        (torch.ones(2, 3, dtype=torch.int64), [0, 1]),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="vectors must be"):
            ao.bounded_sum(vectors, who, 1.0)
    with pytest.raises(ArgumentError, match="clip_norm"):
        ao.bounded_sum(np.ones((1, 3)), [0], -1.0)


def test_the_noise_is_the_planned_one():
    """Over many coordinates: its standard deviation, and that of the running sums, which the tree keeps low."""
    plan = ao.plan(participation=MinSeparation(16, 4), batch_size=2, epsilon=1, delta=1e-6, mechanism="tree")
    release = ao.Release(plan, 200_000, key=KEY)
    running = np.cumsum([release.step([t], np.zeros(200_000)) for t in range(16)], axis=0)
    expected = plan.noise_profile(sums=True) * plan.clip_norm / plan.batch_size
    assert np.allclose(running.std(axis=1), expected, rtol=0.01)
