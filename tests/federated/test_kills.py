"""A server that is killed, at whatever point: nothing is lost but a round that was still collecting."""

import os
import signal
import sys

import pytest
import torch

import anyorder.federated.server as pending
import anyorder.federated.server as server_file
import anyorder.ledger as ledger_file
import anyorder.release.checkpoint as checkpoint
import anyorder.release.journal as journal
import anyorder.release.release as core
from anyorder.clipping import Adaptive
from anyorder.errors import CheckpointError, TrainingError
from federated.servers import N, independent, make, message, messages, plan, run, same, state

pytestmark = pytest.mark.usefixtures("stopped_by_load")
CALLS = ("write", "pwrite", "fsync", "replace", "unlink", "ftruncate")
LINES = {module.__file__ for module in (pending, server_file, ledger_file, checkpoint, core, journal)}


def killed_at(point, act, *, lines=False):
    """Run `act` in a child process that is killed before its point-th system call on files, or line of code.

    Returns: whether it was killed; False where `act` came to its end first.
    """
    child = os.fork()
    if not child:
        try:
            (_trace if lines else _count)(point)
            act()
        finally:
            sys.settrace(None)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def _countdown(point):
    left = [point]

    def count():
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def _count(point):
    count = _countdown(point)

    def counted(real):
        def call(*arguments, **named):
            count()
            return real(*arguments, **named)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def _trace(point):
    count = _countdown(point)

    def local(frame, event, argument):
        if event == "line":
            count()
        return local

    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename in LINES else None)


def one_round(path, **how):
    """What the child does: it goes on with a run, and makes round 2."""
    run(make(checkpoint=path, **how), until=3)


NEVER_KILLED = {}  # by the step from which it went on, and the names of what is other than usual


def check(tmp_path, point, *, lines=False, **how):
    """Kill, resume, go on with other messages; the run is one that was never killed. Returns whether it was killed."""
    path = tmp_path / "run"
    run(make(checkpoint=path, **how), until=2).close()
    was_killed = killed_at(point, lambda: one_round(path, **how), lines=lines)
    left = pending.Pending(path, make(checkpoint=None, **how).release.derived(b"pending").fingerprint()).read()
    resumed = make(checkpoint=path, **how)
    step = resumed.step
    if left is not None:
        assert step == left.step + 1  # its messages were all in
    assert "run.pending" not in os.listdir(tmp_path)
    run(resumed, until=5, kind=1)
    kind = (step, *how)
    if kind not in NEVER_KILLED:
        NEVER_KILLED[kind] = run(run(make(checkpoint=None, **how), until=step), until=5, kind=1)
    expected = NEVER_KILLED[kind]
    assert same(resumed, expected)
    assert resumed.certificate() == expected.certificate()
    return was_killed, step


def fresh(tmp_path, point):
    folder = tmp_path / str(point)
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_a_kill_before_each_call_on_files(tmp_path):
    steps = []
    for point in range(200):
        was_killed, step = check(fresh(tmp_path, point), point)
        steps.append(step)
        if not was_killed:
            break
    assert not was_killed
    assert len(steps) > 12
    assert sorted(steps) == steps
    assert set(steps) == {2, 3}


@pytest.mark.parametrize("point", range(94, 600, 188))
def test_a_kill_at_a_line_of_code(tmp_path, point):
    check(tmp_path, point, lines=True)


@pytest.mark.parametrize("point", range(1, 16, 6))
def test_the_adaptive_norm_is_where_it_was(tmp_path, point):
    how = {"given": independent(), "rule": Adaptive(), "optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}
    check(tmp_path, point, **how)


@pytest.mark.parametrize("point", range(2, 16, 9))
def test_exact_integers(tmp_path, point):
    check(tmp_path, point, given=plan(grid=2.0**-20))


# -- files that do not go together, and full disks --------------------------------------------------------------------


LEAVES_A_ROUND = set()  # the first call that does, once it is found


def killed_with_a_round_left(path, **how):
    """A run that was killed in round 2 after its messages were in, before its checkpoint."""
    run(make(checkpoint=path, **how), until=2).close()
    for point in range(min(LEAVES_A_ROUND, default=0), 40):
        assert killed_at(point, lambda: one_round(path, **how))
        if pending_file(path).exists():
            LEAVES_A_ROUND.add(point)
            return
    raise AssertionError("no point left a round")


def pending_file(path):
    return path.with_name(path.name + ".pending")


def test_a_round_comes_to_the_disk_in_this_order(tmp_path, monkeypatch):
    """What a loss of power leaves is what was brought to the disk: a kill alone would not tell."""
    server = run(make(checkpoint=tmp_path / "run"), until=2)
    seen = []

    def noted(name, show):
        real = getattr(os, name)

        def call(*given, **named):
            seen.append((name, show(*given)))
            return real(*given, **named)

        monkeypatch.setattr(os, name, call)

    def file_of(descriptor):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        return "a new file" if name.endswith(".tmp") else name

    noted("fsync", file_of)
    noted("replace", lambda old, new: os.path.basename(new))
    noted("unlink", lambda path, *_: os.path.basename(path))
    run(server, until=3)
    folder = ("fsync", tmp_path.name)
    written = [("fsync", "a new file"), ("replace", "{}"), folder]
    assert seen == [
        *((act, name.format("run.pending")) for act, name in written),
        ("fsync", ".run.journal"),
        ("fsync", "run.ledger"),
        *((act, name.format("run")) for act, name in written),
        ("unlink", "run.pending"),
        folder,
    ]


@pytest.mark.parametrize("point", range(0, 14, 6))
def test_a_kill_while_a_left_round_is_made_loses_it_no_more(tmp_path, point):
    path = tmp_path / "run"
    killed_with_a_round_left(path)
    killed_at(point, lambda: make(checkpoint=path))
    resumed = make(checkpoint=path)
    assert resumed.step == 3
    assert not pending_file(path).exists()
    assert same(run(resumed), run(make()))


def test_a_round_that_was_left_is_readable_by_the_owner_only(tmp_path):
    killed_with_a_round_left(tmp_path / "run")
    assert pending_file(tmp_path / "run").stat().st_mode & 0o777 == 0o600


def test_without_the_file_of_the_round_the_noise_is_not_used_again(tmp_path):
    """The defence beneath: the journal knows what the noise of round 2 was used on."""
    path = tmp_path / "run"
    run(make(checkpoint=path), until=2).close()
    saved = path.read_bytes()
    run(make(checkpoint=path), until=3).close()
    path.write_bytes(saved)
    server = make(checkpoint=path)
    assert server.step == 2
    with pytest.raises(CheckpointError, match="other data"):
        server.round(messages(server, 2, kind=1))
    assert server.step == 2
    assert not pending_file(path).exists()  # a restart could not make it
    server.close()
    server = make(checkpoint=path)
    assert same(run(server), run(make()))  # the same messages are the same round


@pytest.mark.parametrize("damage", ["cut", "flipped", "another run's"])
def test_a_damaged_file_of_a_round_is_refused(tmp_path, damage):
    path = tmp_path / "run"
    killed_with_a_round_left(path)
    data = pending_file(path).read_bytes()
    if damage == "another run's":
        (tmp_path / "other").mkdir()
        killed_with_a_round_left(tmp_path / "other" / "run", key=bytes(32))
        changed = pending_file(tmp_path / "other" / "run").read_bytes()
    else:
        changed = data[:-7] if damage == "cut" else data[:400] + bytes([data[400] ^ 1]) + data[401:]
    pending_file(path).write_bytes(changed)
    with pytest.raises(CheckpointError, match="run.pending"):
        make(checkpoint=path)
    pending_file(path).write_bytes(data)
    assert make(checkpoint=path).step == 3


def test_a_round_that_is_left_of_a_run_whose_checkpoint_is_gone(tmp_path):
    path = tmp_path / "run"
    killed_with_a_round_left(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="whose checkpoint .* is gone"):
        make(checkpoint=path, key=None)
    (tmp_path / ".run.journal").unlink()
    with pytest.raises(CheckpointError, match="another run"):
        make(checkpoint=path, key=None)


def test_an_older_checkpoint_beside_a_newer_round_is_refused(tmp_path):
    path = tmp_path / "run"
    make(checkpoint=path).close()
    oldest = path.read_bytes()
    killed_with_a_round_left(path)
    path.write_bytes(oldest)
    with pytest.raises(CheckpointError, match="older"):
        make(checkpoint=path)


class Full:
    """A disk that is full at one call on files, and has room again afterwards."""

    def __init__(self, monkeypatch, point):
        self.left = point
        for name in ("write", "pwrite", "fsync"):
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, real):
        def call(*arguments):
            self.left -= 1
            if self.left == -1:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        return call


@pytest.mark.parametrize("point", range(0, 12, 2))
def test_a_full_disk_loses_no_round(tmp_path, point):
    server = run(make(checkpoint=tmp_path / "run"), until=2)
    sent = messages(server, 2)
    opened = server.open()
    for user, one in sent.items():
        opened.add(user, one)
    with pytest.MonkeyPatch.context() as patch:
        full = Full(patch, point)
        try:
            opened.close()
        except CheckpointError:
            assert full.left < 0
    if server.step == 2:
        opened.close()  # with room again
    run(server)
    assert same(server, run(make()))
    server.close()
    assert same(make(checkpoint=tmp_path / "run"), server)


def test_a_disk_that_stays_full_stops_the_server_and_a_restart_goes_on(tmp_path, monkeypatch):
    server = run(make(checkpoint=tmp_path / "run"), until=2)
    real = checkpoint.save_atomic

    def full(path, *rest):
        if not str(path).endswith("pending"):
            raise CheckpointError("full")
        real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("anyorder.release.files.save_atomic", full)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="full"):
                server.round(messages(server, 2))
        assert server.step == 3
    server.close()
    again = make(checkpoint=tmp_path / "run")
    assert again.step == 3
    assert same(run(again), run(make()))


def test_a_given_up_round_leaves_nothing_behind(tmp_path, monkeypatch):
    server = run(make(checkpoint=tmp_path / "run"), until=2)
    opened = server.open()
    opened.add(2, message(server, 5))
    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "commit", lambda *_: (_ for _ in ()).throw(CheckpointError("full")))
        with pytest.raises(CheckpointError, match="full"):
            opened.close()
    assert pending_file(tmp_path / "run").exists()
    opened.discard()
    assert not pending_file(tmp_path / "run").exists()
    assert same(run(server), run(make()))


def test_a_save_by_hand_leaves_a_round_that_is_not_made_yet(tmp_path, monkeypatch):
    """Its noise is used on its sum: without the file nobody could make it again."""
    server = run(make(checkpoint=tmp_path / "run"), until=2)
    sent = messages(server, 2)
    with monkeypatch.context() as patch:
        patch.setattr(
            "anyorder.release.release.SharedNoise.add_to", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            server.round(sent)
    assert server.step == 2
    server._made = None
    server.save()
    assert pending_file(tmp_path / "run").exists()
    server.close()
    again = make(checkpoint=tmp_path / "run")
    assert again.step == 3
    assert same(run(again), run(make()))


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_what_is_kept(tmp_path):
    server = make(checkpoint=tmp_path / "run")
    server.extra["note"] = 7
    run(server, until=3).close()
    again = make(checkpoint=tmp_path / "run")
    assert again.extra == {"note": 7}
    assert same(again, server)
    with pytest.raises((CheckpointError, TrainingError), match="closed"):
        server.round({})


@pytest.mark.filterwarnings("ignore::anyorder.errors.OptimizerWarning")  # refused for another reason
def test_another_model_or_optimizer_is_refused(tmp_path):
    run(make(checkpoint=tmp_path / "run"), until=1).close()
    with pytest.raises(CheckpointError, match="kind of optimizer"):
        make(checkpoint=tmp_path / "run", optimizer=lambda p: torch.optim.Adam(p, lr=1.0))
    with pytest.raises(CheckpointError, match="size"):
        make(checkpoint=tmp_path / "run", optimizer=lambda p: torch.optim.SGD(p[1:], lr=1.0))
    assert make(checkpoint=tmp_path / "run").step == 1


def test_the_restored_model_is_the_checkpoints(tmp_path):
    server = run(make(checkpoint=tmp_path / "run"), until=3)
    server.close()
    again = make(checkpoint=tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(state(server), state(again), strict=True))
    assert again.step == 3 < N
