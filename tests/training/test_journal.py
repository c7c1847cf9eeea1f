"""The journal lets no noise be used on two different data, whatever kills the writer."""

import errno
import os
import shutil
import signal
import textwrap
import time
from pathlib import Path

import pytest

import processes
from anyorder.errors import ArgumentError, CheckpointError
from anyorder.release.journal import Journal
from training.test_checkpoint import failing, files, run_python


def digest(i):
    return i.to_bytes(16, "little")


RECORD = 41  # bytes
HEAD = len(b"anyorder journal 2\nrun\n")


@pytest.fixture
def checkpoint(tmp_path):
    return tmp_path / "run.ckpt"  # of which a journal needs the name alone


CHECKSUM = Journal._checksum


def written(checkpoint):
    journal = Journal.create(checkpoint, "run")
    for step in range(3, 7):
        journal.commit(step, digest(step))
    journal.close()
    return checkpoint.with_name(".run.ckpt.journal")


@pytest.fixture
def journal(checkpoint):
    return written(checkpoint)


def put_back(journal, data):
    """Other bytes in the very same file."""
    with open(journal, "r+b") as file:
        file.write(data)
        file.truncate()


def test_a_replay_must_be_on_the_same_data(journal):
    again = Journal.open(journal.parent / "run.ckpt", "run")
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
    assert Journal.open(journal.parent / "run.ckpt", "run").steps == 5
    assert journal.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("cut", range(1, RECORD))
def test_a_torn_last_entry_is_dropped_and_leaves_a_doubt(journal, cut):
    data = journal.read_bytes()
    put_back(journal, data[:-cut])
    again = Journal.open(journal.parent / "run.ckpt", "run")
    assert again.steps == 3
    assert again.doubt == "its last record is torn"
    again.renew(6, b"n" * 16, [])
    again.commit(6, digest(60))  # of other noise
    again.close()
    back = Journal.open(journal.parent / "run.ckpt", "run")
    assert back.steps == 4
    assert back.doubt is None
    assert back.renewals == [(6, b"n" * 16)]
    back.commit(6, digest(60))


@pytest.mark.parametrize("zeros", [1, RECORD, 3 * RECORD + 1])
def test_zeros_at_the_end_are_torn_too(journal, zeros):
    put_back(journal, journal.read_bytes() + bytes(zeros))
    again = Journal.open(journal.parent / "run.ckpt", "run")
    assert again.steps == 4
    assert again.doubt == "its last record is torn"
    again.renew(7, b"n" * 16, [])
    again.close()
    assert Journal.open(journal.parent / "run.ckpt", "run").doubt is None  # they are gone


def test_the_very_file_leaves_no_doubt(journal):
    for step in range(7, 60):
        again = Journal.open(journal.parent / "run.ckpt", "run")
        assert again.doubt is None
        assert again.next_step == step
        again.commit(step, digest(step))
        again.close()


def test_the_very_file_is_known_by_a_clock_that_is_wrong(checkpoint, monkeypatch):
    """That of a file server: then the time that the system noted before tells."""
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    journal = Journal.create(checkpoint, "run")
    journal.commit(0, digest(0))
    journal.close()
    assert Journal.open(checkpoint, "run").doubt is None
    monkeypatch.setattr("anyorder.release.journal._ATTEMPTS", 1)
    journal = Journal.open(checkpoint, "run")
    journal.commit(1, digest(1))
    journal.close()
    journal = Journal.open(checkpoint, "run")
    assert journal.doubt  # the step is there nevertheless
    assert journal.steps == 2


def test_a_copy_leaves_a_doubt_until_it_is_made_the_runs_own(journal):
    folder = journal.parent / "copy"
    folder.mkdir()
    shutil.copy2(journal, folder)
    copy = Journal.open(folder / "run.ckpt", "run")
    assert copy.doubt == "it is not the file that the run wrote, but a copy"
    assert copy.steps == 4
    copy.close()
    copy = Journal.open(folder / "run.ckpt", "run")
    assert copy.doubt  # opening alone settles nothing
    copy.renew(7, b"n" * 16, [])
    copy.close()
    copy = Journal.open(folder / "run.ckpt", "run")
    assert copy.doubt is None
    assert copy.renewals == [(7, b"n" * 16)]
    assert copy.next_step == 7
    assert Journal.open(journal.parent / "run.ckpt", "run").doubt is None


def cut_between_entries(journal):
    os.truncate(journal, journal.stat().st_size - RECORD)


def restored_in_place(journal):
    put_back(journal, journal.read_bytes())


def restored_with_its_times(journal):
    times = journal.stat()
    put_back(journal, journal.read_bytes())
    os.utime(journal, ns=(times.st_atime_ns, times.st_mtime_ns))


def replaced(journal):
    beside = journal.with_name("beside")
    shutil.copy2(journal, beside)
    os.replace(beside, journal)


def moved_and_back(journal):
    journal.rename(journal.with_name("away"))
    journal.with_name("away").rename(journal)


@pytest.mark.parametrize(
    "change", [cut_between_entries, restored_in_place, restored_with_its_times, replaced, moved_and_back]
)
def test_what_others_did_to_the_file_leaves_a_doubt(journal, change):
    time.sleep(0.02)  # what systems tell times apart by
    change(journal)
    again = Journal.open(journal.parent / "run.ckpt", "run")
    assert again.doubt
    assert again.steps in (3, 4)
    again.close()
    fresh = Journal.create(journal.parent / "run.ckpt", "run")  # the same key given again
    assert fresh.doubt


def test_a_renewal_that_was_broken_off_leaves_the_doubt(journal, monkeypatch):
    folder = journal.parent / "copy"
    folder.mkdir()
    shutil.copy2(journal, folder)
    copy = Journal.open(folder / "run.ckpt", "run")
    put = Journal._put

    def broken(self, kind, *rest):
        if kind == b"f":
            raise KeyboardInterrupt
        put(self, kind, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_put", broken)
        with pytest.raises(KeyboardInterrupt):
            copy.renew(7, b"n" * 16, [])
    copy.close()
    assert Journal.open(folder / "run.ckpt", "run").doubt


def test_steps_without_an_entry_before_later_ones_are_told(journal):
    again = Journal.open(journal.parent / "run.ckpt", "run")
    again.renew(9, b"n" * 16, [(2, b"m" * 16)])
    assert again.renewals == [(2, b"m" * 16), (9, b"n" * 16)]
    assert again.missing(7) == [7, 8]
    assert again.missing(9) == []
    again.commit(9, digest(9))
    assert again.missing(7) == [7, 8]
    assert again.next_step == 10


@pytest.mark.parametrize("last_byte", [0, 1])
def test_every_altered_byte_is_noticed(checkpoint, monkeypatch, last_byte):
    """Also where records end in a zero, as what a loss of power leaves does."""
    monkeypatch.setattr(Journal, "_checksum", lambda *record: CHECKSUM(*record)[:-1] + bytes([last_byte]))
    journal = written(checkpoint)
    data = journal.read_bytes()
    last, one = len(data) - 2 * RECORD, len(data) - RECORD
    for place in range(one):
        put_back(journal, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=r"altered|no journal of this run"):
            Journal.open(journal.parent / "run.ckpt", "run")
    put_back(journal, data[:last] + data[one:] + data[last:one])
    with pytest.raises(CheckpointError, match="altered"):
        Journal.open(journal.parent / "run.ckpt", "run")


@pytest.mark.parametrize("rest", [b"", bytes(5), b"x" * (RECORD - 1), bytes(3 * RECORD)])
def test_a_last_record_with_a_wrong_checksum_is_torn(journal, rest):
    """A kill between two pages leaves one of full length. Nothing was released under it; and if somebody altered it,
    the file is as good as one that was cut before it: the step is in doubt, and takes fresh noise."""
    data = journal.read_bytes()
    one = len(data) - RECORD
    for place in range(one, len(data)):
        put_back(journal, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :] + rest)
        again = Journal.open(journal.parent / "run.ckpt", "run")
        assert (again.steps, again.doubt) == (3, "its last record is torn")
        again.close()
    again = Journal.open(journal.parent / "run.ckpt", "run")
    again.renew(6, b"n" * 16, [])
    again.commit(6, digest(60))
    again.close()
    back = Journal.open(journal.parent / "run.ckpt", "run")
    assert (back.steps, back.doubt, back.renewals) == (4, None, [(6, b"n" * 16)])


def test_a_bad_record_before_a_whole_one_is_refused_whatever_it_is(journal):
    data = journal.read_bytes()
    bad = bytes([data[-1] ^ 1])
    put_back(journal, data[:-1] + bad + b"x" * RECORD)
    with pytest.raises(CheckpointError, match="altered"):
        Journal.open(journal.parent / "run.ckpt", "run")


def test_missing_empty_or_foreign_journal(journal):
    folder = journal.parent
    with pytest.raises(CheckpointError, match=r"is missing.*Keep it next to the checkpoint"):
        Journal.open(folder / "other.ckpt", "run")
    assert files(folder) == [".run.ckpt.journal"]
    with pytest.raises(CheckpointError, match="no journal of this run"):
        Journal.open(folder / "run.ckpt", "other")
    data = journal.read_bytes()
    for content in (b"", data[: HEAD - 1], bytes(HEAD)):
        put_back(journal, content)
        with pytest.raises(CheckpointError, match="is no journal of this run, or it was emptied"):
            Journal.open(folder / "run.ckpt", "run")
        Journal.create(folder / "run.ckpt", "run").close()  # no step was committed
        assert Journal.open(folder / "run.ckpt", "run").steps == 0
    put_back(journal, b"my notes")
    with pytest.raises(CheckpointError, match="is no journal of anyorder, and not replaced"):
        Journal.create(folder / "run.ckpt", "run")
    assert journal.read_bytes() == b"my notes"


def test_a_run_begun_again_with_its_key_replays_its_steps(journal):
    again = Journal.create(journal.parent / "run.ckpt", "run")
    assert again.steps == 4
    with pytest.raises(CheckpointError, match="never the same noise"):
        again.commit(5, digest(6))


def test_what_a_run_has_left_that_took_no_step_is_replaced(checkpoint):
    Journal.create(checkpoint, "first").close()
    Journal.create(checkpoint, "fresh").close()
    back = Journal.open(checkpoint, "fresh")
    assert back.steps == 0
    assert back.doubt is None


def test_a_journal_with_steps_whose_checkpoint_is_gone_is_refused(journal):
    """A fresh key on the same data would be a second release of it, beside what the first one showed."""
    data = journal.read_bytes()
    with pytest.raises(
        CheckpointError, match="took steps, and whose checkpoint .*run.ckpt is gone.*Put the checkpoint"
    ):
        Journal.create(journal.parent / "run.ckpt", "fresh")
    assert journal.read_bytes() == data
    journal.unlink()
    assert Journal.create(journal.parent / "run.ckpt", "fresh").steps == 0


def test_another_run_of_this_process_is_refused_until_it_is_closed(checkpoint):
    first = Journal.create(checkpoint, "first")
    with pytest.raises(CheckpointError, match="an engine of this process runs with this checkpoint file"):
        Journal.create(checkpoint, "second")
    first.close()
    second = Journal.create(checkpoint, "second")
    itself = [second]
    itself.append(itself)  # held by nothing but itself
    del second, itself
    Journal.create(checkpoint, "third")


def test_opened_again_in_one_process_the_older_is_closed(journal):
    older = Journal.open(journal.parent / "run.ckpt", "run")
    newer = Journal.open(str(journal.parent) + "/./run.ckpt", "run")
    with pytest.raises(CheckpointError, match="is closed"):
        older.commit(7, digest(7))
    newer.commit(7, digest(7))
    older.close()
    newer.commit(8, digest(8))


def test_two_processes_cannot_use_one_checkpoint_file(journal):
    """Neither for one run, nor for a fresh one."""
    mine = Journal.open(journal.parent / "run.ckpt", "run")
    code = """
    import sys
    from anyorder.errors import CheckpointError
    from anyorder.release.journal import Journal
    for run_id in ("run", "fresh"):
        for make in (Journal.open, Journal.create):
            try:
                make(sys.argv[1] + "/run.ckpt", run_id)
            except CheckpointError as error:
                print(error)
    """
    assert run_python(code, journal.parent).count("another process runs with this checkpoint file") == 4
    mine.commit(7, digest(7))


def test_lock_ends_with_the_process_though_its_workers_live(journal):
    code = """
    import os, signal, sys, time
    from anyorder.release.journal import Journal
    journal = Journal.open(sys.argv[1] + "/run.ckpt", "run")
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.1)
    print(child, flush=True)
    os.close(1)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = processes.run("-c", textwrap.dedent(code), journal.parent)
    child = int(done.stdout)
    assert done.returncode == -signal.SIGKILL
    try:
        assert Journal.open(journal.parent / "run.ckpt", "run").steps == 4
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("function", ["pwrite", "fsync"])
def test_what_cannot_be_written_down_is_not_released(journal, monkeypatch, function):
    again = Journal.open(journal.parent / "run.ckpt", "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing(errno.ENOSPC))
        with pytest.raises(CheckpointError, match="step 7 was not released"):
            again.commit(7, digest(7))
    again.commit(7, digest(70))  # the step had released nothing
    again.close()
    back = Journal.open(journal.parent / "run.ckpt", "run")
    assert back.steps == 5
    back.commit(7, digest(70))


def test_disk_that_fills_within_an_entry(journal):
    code = """
    import os, resource, signal, sys
    from anyorder.errors import CheckpointError
    from anyorder.release.journal import Journal
    journal = Journal.open(sys.argv[1] + "/run.ckpt", "run")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = os.path.getsize(journal.path) + 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    told = []
    for _ in range(2):
        try:
            journal.commit(7, bytes(16))
        except CheckpointError as error:
            told.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.commit(7, b"1" * 16)
    print(told)
    """
    assert run_python(code, journal.parent).count("20 of 41 bytes written") == 2
    back = Journal.open(journal.parent / "run.ckpt", "run")
    assert back.steps == 5
    back.commit(7, b"1" * 16)


def test_read_only_folder(journal, monkeypatch):
    for code in (errno.EROFS, errno.EACCES):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", failing(code))
            for make in (Journal.open, Journal.create):
                with pytest.raises(CheckpointError, match=os.strerror(code)):
                    make(journal.parent / "run.ckpt", "run")
    (journal.parent / "file").write_text("x")
    for make in (Journal.open, Journal.create):
        with pytest.raises(CheckpointError, match="Not a directory"):
            make(journal.parent / "file" / "run.ckpt", "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(CheckpointError, match="cannot be written"):
            Journal.create(journal.parent / "new", "new")


def test_killed_at_random_moments_every_released_step_is_in_the_journal(tmp_path):
    code = """
    import os, random, signal, sys, time
    from anyorder.release.journal import Journal
    folder, generator = sys.argv[1], random.Random(1)
    Journal.create(folder + "/run.ckpt", "run").close()
    log = os.open(folder + "/released", os.O_RDWR | os.O_CREAT | os.O_APPEND)  # plays the part of the release
    def digest(step, life):
        return step.to_bytes(8, "little") + life.to_bytes(8, "little")
    for life in range(25):
        child = os.fork()
        if child == 0:
            journal = Journal.open(folder + "/run.ckpt", "run")
            step = journal.steps
            while True:
                journal.commit(step, digest(step, life))
                os.write(log, digest(step, life))
                step += 1
        time.sleep(generator.uniform(0.0, 0.04))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if life % 3 == 0:  # a tail as a crash in mid-write leaves it
            with open(folder + "/.run.ckpt.journal", "ab") as file:
                file.write(os.urandom(generator.randrange(41)))
        journal = Journal.open(folder + "/run.ckpt", "run")
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
        Journal.create(tmp_path / "run.ckpt", run_id)


@pytest.mark.parametrize(("step", "value"), [(-1, bytes(16)), (1.5, bytes(16)), (0, bytes(15)), (0, "x" * 16)])
def test_bad_commits(tmp_path, step, value):
    with pytest.raises(ArgumentError):
        Journal.create(tmp_path / "run.ckpt", "run").commit(step, value)


def test_journal_is_found_by_the_checkpoints_name(tmp_path):
    folder = Path(os.path.realpath(tmp_path))
    assert Journal.create(tmp_path / "a.pt", "0af3").path == folder / ".a.pt.journal"
    (tmp_path / "link.pt").symlink_to("b.pt")
    assert Journal.create(tmp_path / "link.pt", "0af4").path == folder / ".b.pt.journal"


def test_a_new_journals_name_outlasts_a_loss_of_power(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    journal = Journal.create(tmp_path / "run.ckpt", "run")
    assert synced[-1] == tmp_path.stat().st_ino
    journal.commit(0, digest(0))
    assert synced[-1] == journal.path.stat().st_ino
