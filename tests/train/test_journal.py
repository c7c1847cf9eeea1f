"""The journal lets no noise be used on two different data, whatever kills the writer."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from anyorder.errors import ArgumentError, CheckpointError
from anyorder.train.checkpoint import Journal
from train.test_checkpoint import failing, files, run_python


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
