"""A release whose record has a file of its own: small checkpoints, and no unit of a released sum is ever forgotten."""

import os
import signal
import textwrap

import numpy as np
import pytest

import anyorder as ao
import processes
from anyorder.errors import ArgumentError, CheckpointError, ParticipationError
from anyorder.participation import MinSeparation
from anyorder.release.checkpoint import load
from release.runs import KEY, SIZE, planned, state, total

RULE = MinSeparation(8, b=4, k=2)


def begun(path, key=KEY, **changes):
    plan = planned(participation=RULE, **changes)
    return ao.Release(plan, SIZE, key=key, checkpoint=path, ledger_on_disk=True)


def who(t):
    return [f"user {t % 4}", f"other {t % 4}"]


def test_the_record_is_beside_the_checkpoint_which_does_not_grow(tmp_path):
    plan, sizes = planned(participation=RULE), []
    memory = ao.Release(plan, SIZE, key=KEY)
    crowd = [[f"{name} in a crowd {i}" for i in range(500)] for name in "abcd"]
    with begun(tmp_path / "run.pt") as release:
        for t in range(plan.n):
            assert np.array_equal(release.step(crowd[t % 4], total(t)), memory.step(crowd[t % 4], total(t)))
            release.save()
            sizes.append((tmp_path / "run.pt").stat().st_size)
        assert max(sizes) - min(sizes) < 1000
        assert "crowd" not in str(load(tmp_path / "run.pt"))
        assert release.certificate() == memory.certificate()
        release.evidence().save(tmp_path / "disk.json")
    memory.evidence().save(tmp_path / "memory.json")
    assert (tmp_path / "disk.json").read_bytes() == (tmp_path / "memory.json").read_bytes()
    assert (tmp_path / "run.pt.ledger").stat().st_mode & 0o777 == 0o600
    with begun(tmp_path / "run.pt", key=None) as again:
        assert again.certificate() == memory.certificate()


def test_a_resumed_release_remembers_all_and_repeats_what_was_lost(tmp_path):
    path = tmp_path / "run.pt"
    with begun(path) as release:
        release.step(who(0), total(0))
        release.save()
        made = [release.step(who(t), total(t)) for t in (1, 2)]
    with begun(path, key=None) as again:
        assert again.steps_taken == 1
        before = state(again)
        with pytest.raises(ParticipationError):
            again.step(who(0), total(1))
        with pytest.raises(CheckpointError, match="other data"):  # the sum of others
            again.step(who(3), total(1))
        with pytest.raises(CheckpointError, match="other data"):  # a unit less: it could come once more
            again.step(who(1)[:1], total(1))
        assert state(again) == before
        assert all(np.array_equal(again.step(who(t), total(t)), made[t - 1]) for t in (1, 2))
        for t in (3, 4, 5, 6, 7):
            again.step(who(t), total(t))
        again.save()
        assert again.ledger.realised_bounds() == (2, 4)


@pytest.mark.parametrize("harm", ["cut", "altered", "missing", "of another run", "as it was before"])
def test_a_record_that_is_not_the_checkpoints_ends_the_run(harm, tmp_path):
    path, record = tmp_path / "run.pt", tmp_path / "run.pt.ledger"
    with begun(path) as release:
        release.step(who(0), total(0))
        earlier = record.read_bytes()
        release.step(who(1), total(1))
        release.save()
    with begun(tmp_path / "other.pt", key=bytes(32)) as other:
        other.step(who(0), total(0))
        other.step(who(1), total(1))
        other.save()
    data = record.read_bytes()
    match harm:
        case "cut":
            record.write_bytes(data[:-1])
        case "altered":
            record.write_bytes(data.replace(b"user 1", b"user 7"))
        case "missing":
            record.unlink()
        case "of another run":
            record.write_bytes((tmp_path / "other.pt.ledger").read_bytes())
        case "as it was before":
            record.write_bytes(earlier)
    with pytest.raises(CheckpointError, match="ledger"):
        begun(path, key=None)
    record.write_bytes(data)
    with begun(path, key=None) as again:
        assert again.steps_taken == 2


def test_both_ways_to_keep_the_record_are_told_apart(tmp_path):
    plan = planned(participation=RULE)
    with begun(tmp_path / "disk.pt") as release:
        release.save()
    with pytest.raises(CheckpointError, match="ledger_on_disk=True"):
        ao.Release(plan, SIZE, checkpoint=tmp_path / "disk.pt")
    with ao.Release(plan, SIZE, checkpoint=tmp_path / "memory.pt") as release:
        release.save()
    with pytest.raises(CheckpointError, match="ledger_on_disk=False"):
        begun(tmp_path / "memory.pt", key=None)
    with pytest.raises(ArgumentError, match="checkpoint="):
        begun(None)


def test_what_the_journal_refuses_leaves_no_trace(tmp_path):
    with begun(tmp_path / "run.pt") as release:
        release.save()
        release.step(who(0), total(0))
    data = (tmp_path / "run.pt.ledger").read_bytes()
    with begun(tmp_path / "run.pt", key=None) as again:
        with pytest.raises(CheckpointError, match="other data"):
            again.step([f"{name} with a long name" for name in who(0)], total(0))
        again.step(who(0), total(0))
        again.save()
    again = begun(tmp_path / "run.pt", key=None)
    assert [list(ids) for ids in again.ledger.history()] == [sorted(who(0))]
    again.step(who(1), total(1))
    assert (tmp_path / "run.pt.ledger").read_bytes().startswith(data)


@pytest.mark.parametrize("rows", [False, True])
def test_a_step_for_which_the_record_has_no_room_used_no_noise(rows, tmp_path, monkeypatch):
    """So whoever is there when there is room again may take it."""
    with begun(tmp_path / "run.pt", mechanism="independent") as release:

        def step(units, t):
            if rows:
                return release.step_rows(units, [1, 2], total(t, (2, 4)))
            return release.step(units, total(t))

        step(who(0), 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(CheckpointError, match="step 1 was not released: .* Make room"):
                step(who(1), 1)
        step(who(2), 2)
        assert [sorted(ids) for ids in release.ledger.history()] == [sorted(who(0)), sorted(who(2))]


PROGRAM = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from anyorder.ledger import Disk
    from anyorder.release import files
    from release.test_ledger_on_disk import begun, total, who

    def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
    def after(owner, name, times):
        real = getattr(owner, name)
        def wrapped(*given, **named):
            result = real(*given, **named)
            wrapped.left -= 1
            if not wrapped.left: die()
            return result
        wrapped.left = times
        setattr(owner, name, wrapped)

    release = begun({path!r})
    after(*{{"written": (Disk, "write", 3), "committed": (files.RunFiles, "commit", 3), "kept": (Disk, "keep", 3),
             "settled": (Disk, "settle", 4), "saved": (files, "save_atomic", 4)}}[{point!r}])
    for t in range(8):
        print(release.step(who(t), total(t)).tobytes().hex(), flush=True)
        release.save()
"""


@pytest.mark.parametrize("point", ["written", "committed", "kept", "settled", "saved"])
def test_killed_between_any_two_writes_the_run_goes_on_and_forgets_nobody(point, tmp_path):
    path = tmp_path / "run.pt"
    program = PROGRAM.format(tests=os.path.dirname(os.path.dirname(__file__)), path=str(path), point=point)
    done = processes.run("-c", textwrap.dedent(program))
    assert done.returncode == -signal.SIGKILL, done.stderr
    shown = [bytes.fromhex(line) for line in done.stdout.split()]
    with begun(path, key=None) as release:
        assert release.steps_taken == {"saved": 3}.get(point, 2)
        assert len(shown) == (2 if point in ("written", "committed", "kept") else 3)
        if point in ("committed", "kept", "settled"):
            with pytest.raises(CheckpointError, match="other data"):
                release.step([*who(2), "late"], total(2))
        for t in range(release.steps_taken, 8):
            made = release.step(who(t), total(t)).tobytes()
            assert t >= len(shown) or made == shown[t]
        assert [sorted(ids) for ids in release.ledger.history()] == [sorted(who(t)) for t in range(8)]
