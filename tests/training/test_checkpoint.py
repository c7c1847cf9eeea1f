"""Files are whole or absent whatever kills the writer."""

import errno
import os
import random
import struct
import textwrap

import numpy as np
import pytest
import torch

import processes
from anyorder import durable
from anyorder.errors import CheckpointError
from anyorder.release import checkpoint
from anyorder.release.checkpoint import load, save_atomic
from anyorder.training.engine import random_state, set_random_state

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
    done = processes.run("-c", textwrap.dedent(code), *map(str, arguments))
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


def test_the_format_before_is_refused(tmp_path):
    (tmp_path / "old.pt").write_bytes(struct.pack("<16sIQ32s", b"anyorder checkpt", 2, 100, b"s" * 32) + bytes(100))
    with pytest.raises(CheckpointError, match="has format 2, this version of anyorder reads 3"):
        load(tmp_path / "old.pt")


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
    from anyorder.release.checkpoint import load, save_atomic
    save_atomic(sys.argv[1], {"x": torch.zeros(10)})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        save_atomic(sys.argv[1], {"x": torch.ones(100_000)})
    except CheckpointError as error:  # printed it would go to a file, of which there is no room
        assert "File too large" in str(error)
    else:
        raise AssertionError
    assert torch.equal(load(sys.argv[1])["x"], torch.zeros(10))
    """
    run_python(code, tmp_path / "run.pt")
    assert files(tmp_path) == ["run.pt"]


def test_what_another_run_wrote_is_not_replaced(tmp_path):
    path = tmp_path / "run.pt"
    save_atomic(path, {"step": 1}, "first")
    save_atomic(path, {"step": 2}, "first")
    for run in ("second", "", "firs", "first2"):
        with pytest.raises(CheckpointError, match="is not a checkpoint of this run, and is not replaced"):
            save_atomic(path, {"step": 3}, run)
    assert load(path) == {"step": 2}
    for other in (b"notes", b"", path.read_bytes()[:50]):
        (tmp_path / "notes").write_bytes(other)
        with pytest.raises(CheckpointError, match="is not replaced"):
            save_atomic(tmp_path / "notes", {})
        assert (tmp_path / "notes").read_bytes() == other
    assert files(tmp_path) == ["notes", "run.pt"]


def test_file_and_name_outlast_a_loss_of_power(tmp_path, monkeypatch):
    """The file is on the disk before it has its name, and then the folder, where the name stands."""
    calls, fsync, replace = [], os.fsync, os.replace

    def noted(descriptor):
        calls.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def moved(source, target):
        calls.append("moved")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", moved)
    save_atomic(tmp_path / "run.pt", {"step": 1})
    assert calls == [(tmp_path / "run.pt").stat().st_ino, "moved", tmp_path.stat().st_ino]


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
        assert durable.lock(file.fileno())
        save_atomic(tmp_path / "run.pt", {})
    assert files(tmp_path) == [other.name, living.name, "run.pt"]


def test_killed_at_random_moments_the_file_is_the_old_or_the_new(tmp_path):
    code = """
    import os, random, signal, sys, time, torch
    from anyorder.release.checkpoint import load, save_atomic
    path, generator = sys.argv[1], random.Random(0)
    def payload(step):
        return {"step": step, "x": torch.full((200_000,), float(step))}
    save_atomic(path, payload(0))
    seen, during, rounds = 0, 0, 0
    while rounds < 12 or (rounds < 1000 and (seen <= 5 or not during)):  # more where the machine is busy
        rounds += 1
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
