"""Files are whole or absent whatever kills the writer; the journal lets no noise be used on two different data."""

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from anyorder.errors import ArgumentError, CheckpointError
from anyorder.train import checkpoint
from anyorder.train.checkpoint import Journal, load, random_state, save_atomic, set_random_state

PAYLOAD = {
    "tensor": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "array": np.arange(4, dtype=np.uint32)[::-1],
    "empty": np.zeros((0, 3)),
    "number": np.float64(0.1),
    "nested": [1, 2.5, None, True, ("a", b"\0\xff" * 3), {3: {"x": -(2**70)}}],
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "state": torch.nn.Linear(2, 1).state_dict(),
    "random": random_state(),
}


def run_python(code, *arguments):
    """A Python process in which a script runs; its output must be empty but for what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def same(a, b):
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return torch.equal(torch.as_tensor(np.array(a) if isinstance(a, np.ndarray) else a), b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "run.pt"
    save_atomic(path, PAYLOAD)
    back = load(path)
    assert same(PAYLOAD, back)
    assert back["half"].dtype == torch.bfloat16
    assert type(back["number"]) is float
    assert files(tmp_path) == ["run.pt"]
    assert path.stat().st_mode & 0o777 == 0o600  # the key may be inside
    save_atomic(str(path), {"step": 2})
    assert load(str(path)) == {"step": 2}


def test_a_link_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run.pt").symlink_to(tmp_path / "disk" / "real.pt")
    save_atomic(tmp_path / "run.pt", {"step": 1})
    assert load(tmp_path / "disk" / "real.pt") == {"step": 1}
    assert (tmp_path / "run.pt").is_symlink()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"a": [0, object()]}, r"payload\['a'\]\[1\] is a object"),
        ({"a": {1, 2}}, "is a set"),
        ({"a": np.array(["x"])}, "array that torch cannot hold"),
        ({(1, 2): 0}, "key that is no string"),
        ({"a": torch.float32}, "is a dtype"),
        ({"a": lambda: 0}, "is a function"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, value, name):
    with pytest.raises(CheckpointError, match=name):
        save_atomic(tmp_path / "run.pt", value)
    assert files(tmp_path) == []


def test_cut_altered_or_foreign_files_are_refused(tmp_path):
    path = tmp_path / "run.pt"
    save_atomic(path, {"x": torch.arange(3), "key": b"k" * 32})
    data = path.read_bytes()
    for cut in [*range(0, 90), *range(90, len(data), 53), len(data) - 1]:
        path.write_bytes(data[:cut])
        with pytest.raises(CheckpointError):
            load(path)
    for place in [*range(0, 90), *range(90, len(data), 53), len(data) - 1]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(CheckpointError):
            load(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match="cut short or altered"):
        load(path)
    torch.save({"x": 1}, path)
    with pytest.raises(CheckpointError, match="is no checkpoint of anyorder"):
        load(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path / "absent.pt")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_nothing_in_a_file_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "_storable", lambda value, where: value)
    save_atomic("run.pt", {"x": Evil()})
    with pytest.raises(CheckpointError, match="cannot be decoded"):
        load("run.pt")
    save_atomic("run.pt", [1])
    with pytest.raises(CheckpointError, match="not a dict"):
        load("run.pt")
    assert files(tmp_path) == ["run.pt"]


def failing(code, after=0):
    calls = iter(range(after))

    def fail(*args, **kwargs):
        if next(calls, None) is None:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    real = os.write
    return fail


@pytest.mark.parametrize("function", ["write", "fsync", "replace", "second write"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_failed_write_leaves_the_last_file_and_no_rest(tmp_path, monkeypatch, function, code):
    path = tmp_path / "run.pt"
    save_atomic(path, {"step": 1})
    with monkeypatch.context() as patch:
        name = function.split()[-1]
        patch.setattr(os, name, failing(code, after=int(function == "second write")))
        with pytest.raises(CheckpointError, match=os.strerror(code)):
            save_atomic(path, {"step": 2})
    assert load(path) == {"step": 1}
    assert files(tmp_path) == ["run.pt"]
    save_atomic(path, {"step": 3})
    assert load(path) == {"step": 3}


def test_full_disk(tmp_path):
    code = """
    import resource, signal, sys, torch
    from anyorder.errors import CheckpointError
    from anyorder.train.checkpoint import load, save_atomic
    save_atomic(sys.argv[1], {"x": torch.zeros(10)})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        save_atomic(sys.argv[1], {"x": torch.ones(100_000)})
    except CheckpointError as error:
        print(error)
    assert torch.equal(load(sys.argv[1])["x"], torch.zeros(10))
    """
    assert "File too large" in run_python(code, tmp_path / "run.pt")
    assert files(tmp_path) == ["run.pt"]


def test_impossible_places(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "run.pt", tmp_path / "absent" / "run.pt", tmp_path):
        with pytest.raises(CheckpointError, match="was not written"):
            save_atomic(path, {})
        with pytest.raises(CheckpointError, match="cannot be read"):
            load(path)
    assert files(tmp_path) == ["file"]


def test_interrupt_leaves_no_rest(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_atomic(tmp_path / "run.pt", {})
    assert files(tmp_path) == []


def test_rests_of_the_dead_are_removed_and_those_of_the_living_kept(tmp_path):
    dead, other = tmp_path / ".run.pt.abcd1234.tmp", tmp_path / ".run.pt.notes.tmp"
    living = tmp_path / ".run.pt.zzzz0000.tmp"
    for path in (dead, other, living):
        path.write_text("x")
    with open(living) as file:
        checkpoint.fcntl.flock(file, checkpoint.fcntl.LOCK_EX)
        save_atomic(tmp_path / "run.pt", {})
    assert files(tmp_path) == [other.name, living.name, "run.pt"]


def test_killed_at_random_moments_the_file_is_the_old_or_the_new(tmp_path):
    code = """
    import os, random, signal, sys, time, torch
    from anyorder.train.checkpoint import load, save_atomic
    path, generator = sys.argv[1], random.Random(0)
    def payload(step):
        return {"step": step, "x": torch.full((200_000,), float(step))}
    save_atomic(path, payload(0))
    seen, during = 0, 0
    for _ in range(25):
        child = os.fork()
        if child == 0:
            step = seen
            while True:
                step += 1
                save_atomic(path, payload(step))
        time.sleep(generator.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = load(path)
        assert found["step"] >= seen and torch.equal(found["x"], payload(found["step"])["x"])
        seen = found["step"]
        during += any(name.endswith(".tmp") for name in os.listdir(os.path.dirname(path)))
    save_atomic(path, payload(-1))
    print(seen, during)
    """
    saved, during = map(int, run_python(code, tmp_path / "run.pt").split())
    assert saved > 5
    assert during > 0  # some were killed while they wrote
    assert files(tmp_path) == ["run.pt"]


def test_random_state_comes_back(tmp_path):
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), random.gauss(0, 1)  # noqa: NPY002

    random.gauss(0, 1)  # leaves a second normal in store
    save_atomic(tmp_path / "run.pt", random_state())
    first = draw()
    set_random_state(load(tmp_path / "run.pt"))
    assert draw() == first


# -- the journal -----------------------------------------------------------------------------------------------------


def digest(i):
    return i.to_bytes(16, "little")


@pytest.fixture
def journal(tmp_path):
    journal = Journal.create(tmp_path, "run")
    for step in range(3, 7):
        journal.commit(step, digest(step))
    journal.close()
    return tmp_path / ".run.journal"


def test_a_replay_must_be_on_the_same_data(journal):
    again = Journal.open(journal.parent, "run")
    assert again.steps == 4
    size = journal.stat().st_size
    for step in range(3, 7):
        again.commit(step, digest(step))
    assert journal.stat().st_size == size  # nothing new is released, nothing written
    with pytest.raises(CheckpointError, match="noise of step 5 was already used on other data: never the same noise"):
        again.commit(5, digest(6))
    again.commit(7, digest(7))
    with pytest.raises(CheckpointError, match="never the same noise"):
        again.commit(7, digest(8))
    again.close()
    assert Journal.open(journal.parent, "run").steps == 5
    assert journal.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("cut", range(1, 32))
def test_a_torn_last_entry_is_dropped(journal, cut):
    data = journal.read_bytes()
    journal.write_bytes(data[:-cut])
    again = Journal.open(journal.parent, "run")
    assert again.steps == 3
    again.commit(6, digest(60))  # its step was not released: other data are allowed
    again.commit(7, digest(7))
    again.close()
    back = Journal.open(journal.parent, "run")
    assert back.steps == 5
    back.commit(6, digest(60))


def test_a_last_entry_of_zeros_is_torn_too(journal):
    journal.write_bytes(journal.read_bytes() + bytes(32))
    assert Journal.open(journal.parent, "run").steps == 4


def test_every_altered_byte_is_noticed(journal):
    data = journal.read_bytes()
    for place in range(len(data)):
        journal.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=r"altered|no journal of this run"):
            Journal.open(journal.parent, "run")
    entries = len(data) - 4 * 32
    swapped = data[:entries] + data[entries + 32 : entries + 64] + data[entries : entries + 32] + data[entries + 64 :]
    journal.write_bytes(swapped)
    with pytest.raises(CheckpointError, match="altered"):
        Journal.open(journal.parent, "run")


def test_missing_empty_or_foreign_journal(journal):
    folder = journal.parent
    with pytest.raises(CheckpointError, match=r"is missing.*Keep it beside the checkpoint"):
        Journal.open(folder, "other")
    assert files(folder) == [".run.journal"]
    (folder / ".other.journal").write_bytes(journal.read_bytes())
    with pytest.raises(CheckpointError, match="no journal of this run"):
        Journal.open(folder, "other")
    head = len(journal.read_bytes()) - 4 * 32
    for content in (b"", journal.read_bytes()[: head - 1], bytes(head)):
        journal.write_bytes(content)
        with pytest.raises(CheckpointError, match="is empty"):
            Journal.open(folder, "run")
        Journal.create(folder, "run").close()  # no step was committed
        assert Journal.open(folder, "run").steps == 0


def test_create_refuses_a_run_that_took_steps(journal):
    with pytest.raises(CheckpointError, match="steps of this very run"):
        Journal.create(journal.parent, "run")
    assert Journal.open(journal.parent, "run").steps == 4


def test_opened_again_in_one_process_the_older_is_closed(journal):
    older = Journal.open(journal.parent, "run")
    newer = Journal.open(str(journal.parent) + "/.", "run")
    with pytest.raises(CheckpointError, match="is closed"):
        older.commit(7, digest(7))
    newer.commit(7, digest(7))
    older.close()
    newer.commit(8, digest(8))


def test_two_processes_cannot_run_one_run(journal):
    mine = Journal.open(journal.parent, "run")
    code = """
    import sys
    from anyorder.errors import CheckpointError
    from anyorder.train.checkpoint import Journal
    for make in (Journal.open, Journal.create):
        try:
            make(sys.argv[1], "run")
        except CheckpointError as error:
            print(error)
    """
    assert run_python(code, journal.parent).count("another process runs this very run") == 2
    mine.commit(7, digest(7))
    mine.close()
    assert run_python(code, journal.parent).count("steps of this very run") == 1  # open works, create still refuses


def test_lock_ends_with_the_process_though_its_workers_live(journal):
    code = """
    import os, signal, sys, time
    from anyorder.train.checkpoint import Journal
    journal = Journal.open(sys.argv[1], "run")
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.1)
    print(child, flush=True)
    os.close(1)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(journal.parent)], stdout=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    try:
        assert Journal.open(journal.parent, "run").steps == 4
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("function", ["pwrite", "fsync"])
def test_what_cannot_be_written_down_is_not_released(journal, monkeypatch, function):
    again = Journal.open(journal.parent, "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing(errno.ENOSPC))
        with pytest.raises(CheckpointError, match="step 7 was not released"):
            again.commit(7, digest(7))
    again.commit(7, digest(70))  # the step had released nothing
    again.close()
    back = Journal.open(journal.parent, "run")
    assert back.steps == 5
    back.commit(7, digest(70))


def test_disk_that_fills_within_an_entry(journal):
    code = """
    import os, resource, signal, sys
    from anyorder.errors import CheckpointError
    from anyorder.train.checkpoint import Journal
    journal = Journal.open(sys.argv[1], "run")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = os.path.getsize(journal.path) + 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for _ in range(2):
        try:
            journal.commit(7, bytes(16))
        except CheckpointError as error:
            print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.commit(7, b"1" * 16)
    """
    assert run_python(code, journal.parent).count("20 of 32 bytes written") == 2
    back = Journal.open(journal.parent, "run")
    assert back.steps == 5
    back.commit(7, b"1" * 16)


def test_read_only_folder(journal, monkeypatch):
    for code in (errno.EROFS, errno.EACCES):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", failing(code))
            for make in (Journal.open, Journal.create):
                with pytest.raises(CheckpointError, match=os.strerror(code)):
                    make(journal.parent, "run")
    (journal.parent / "file").write_text("x")
    for make in (Journal.open, Journal.create):
        with pytest.raises(CheckpointError, match="Not a directory"):
            make(journal.parent / "file", "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(CheckpointError, match="cannot be written"):
            Journal.create(journal.parent, "new")


def test_killed_at_random_moments_every_released_step_is_in_the_journal(tmp_path):
    code = """
    import os, random, signal, sys, time
    from anyorder.train.checkpoint import Journal
    folder, generator = sys.argv[1], random.Random(1)
    Journal.create(folder, "run").close()
    log = os.open(folder + "/released", os.O_RDWR | os.O_CREAT | os.O_APPEND)  # plays the part of the release
    def digest(step, life):
        return step.to_bytes(8, "little") + life.to_bytes(8, "little")
    for life in range(25):
        child = os.fork()
        if child == 0:
            journal = Journal.open(folder, "run")
            step = journal.steps
            while True:
                journal.commit(step, digest(step, life))
                os.write(log, digest(step, life))
                step += 1
        time.sleep(generator.uniform(0.0, 0.04))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if life % 3 == 0:  # a tail as a crash in mid-write leaves it
            with open(folder + "/.run.journal", "ab") as file:
                file.write(os.urandom(generator.randrange(32)))
        journal = Journal.open(folder, "run")
        released = os.pread(log, 1 << 24, 0)
        releases = [released[i : i + 16] for i in range(0, len(released), 16)]
        assert journal.steps - len(set(releases)) in range(life + 2), (journal.steps, len(releases))
        for entry in releases:
            journal.commit(int.from_bytes(entry[:8], "little"), entry)
        journal.close()
    print(len(releases))
    """
    assert int(run_python(code, tmp_path)) > 20


@pytest.mark.parametrize("run_id", ["", "../x", "a b", "x" * 129])
def test_run_ids_are_plain(tmp_path, run_id):
    with pytest.raises(ArgumentError, match="run_id"):
        Journal.create(tmp_path, run_id)


@pytest.mark.parametrize(("step", "value"), [(-1, bytes(16)), (1.5, bytes(16)), (0, bytes(15)), (0, "x" * 16)])
def test_bad_commits(tmp_path, step, value):
    with pytest.raises(ArgumentError):
        Journal.create(tmp_path, "run").commit(step, value)


def test_journal_is_found_by_its_name(tmp_path):
    assert Journal.create(tmp_path, "0af3").path == Path(os.path.realpath(tmp_path)) / ".0af3.journal"
