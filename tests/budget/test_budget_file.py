"""The file of a budget: torn, altered, cut, copied, full disks, many writers, and kills."""

import copy
import errno
import os
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import anyorder as ao
import processes
from anyorder import durable
from anyorder.accounting import Gaussian
from anyorder.budget import account, log
from anyorder.errors import BudgetError

EPSILON, DELTA = 8.0, 1e-5
SPENDER = """
import sys
import anyorder as ao
from anyorder.accounting import Gaussian
budget = ao.Budget(sys.argv[1])
print("ready", flush=True)
for number in range(int(sys.argv[2])):
    try:
        budget.spend(Gaussian(float(sys.argv[3])), run=f"{sys.argv[4]}x{number}")
    except ao.errors.BudgetError:
        break
    print(number, flush=True)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "people.budget"


@pytest.fixture
def budget(path):
    made = ao.Budget(path, EPSILON, DELTA)
    for mu in (0.1, 0.2, 0.3):
        made.spend(Gaussian(mu))
    return made


def mark(path):
    return path.with_name(f".{path.name}.mark")


def spender(path, count, mu, word):
    return processes.start("-c", SPENDER, path, str(count), str(mu), word)


# -- what a crash leaves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1, 20, -2])
def test_a_torn_last_line_is_no_entry_and_the_next_one_takes_its_place(path, budget, kept):
    whole = path.read_bytes()
    line = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole + line[:kept])
    again = ao.Budget(path)
    assert len(again.entries()) == 3
    again.spend(Gaussian(0.4))
    assert [held.curve.mu for held in ao.Budget(path).entries()] == [0.1, 0.2, 0.3, 0.4]
    assert [held.curve.mu for held in budget.entries()] == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize("rest", [b"\0" * 4096, b"\0\0\n", b'{"kind": "sp\0\0\0\0\n'])
def test_zeros_that_a_loss_of_power_left_are_no_entry(path, budget, rest):
    with path.open("ab") as file:
        file.write(rest)
    again = ao.Budget(path)
    again.spend(Gaussian(0.4))
    assert len(ao.Budget(path).entries()) == 4


def test_a_whole_line_without_its_end_counts(path, budget):
    path.write_bytes(path.read_bytes()[:-1])
    assert len(budget.entries()) == 3
    again = ao.Budget(path)
    assert len(again.entries()) == 3
    again.spend(Gaussian(0.4))
    assert len(ao.Budget(path).entries()) == 4
    assert len(budget.entries()) == 4


@pytest.mark.parametrize("kept", [0, 5, 60])
def test_a_torn_first_line_is_begun_again(path, kept):
    ao.Budget(path, EPSILON, DELTA)
    path.write_bytes(path.read_bytes()[:kept])
    mark(path).unlink()
    with pytest.raises(BudgetError, match="never begun"):
        ao.Budget(path)
    ao.Budget(path, 2.0, DELTA).spend(Gaussian(0.1))
    assert ao.Budget(path).remaining().limit == 2.0


# -- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [0, 1, 2, 3])
def test_an_altered_line_is_found(path, budget, line):
    lines = path.read_bytes().splitlines(keepends=True)
    old, new = (b'"epsilon": 8.0', b'"epsilon": 9.0') if line == 0 else (b'"mu": 0.', b'"mu": 0.0')
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new)
    path.write_bytes(b"".join(lines))
    with pytest.raises(BudgetError, match=f"line {line + 1} .* was altered"):
        ao.Budget(path)


def test_a_line_that_was_taken_out_or_moved_is_found(path, budget):
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in ([0, 2, 3], [0, 2, 1, 3], [1, 2, 3], [0, 1, 1, 2, 3]):
        path.write_bytes(b"".join(lines[i] for i in changed))
        with pytest.raises(BudgetError):
            ao.Budget(path).spend(Gaussian(0.1))


def test_an_older_copy_or_a_cut_end_is_found(path, budget):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    for one in (budget, None):
        with pytest.raises(BudgetError, match="3 lines, and 4 were written"):
            (one or ao.Budget(path)).spend(Gaussian(0.1))


def test_a_copy_that_went_on_otherwise_is_found(path, budget):
    before = path.read_bytes()
    budget.spend(Gaussian(0.4))
    elsewhere = path.with_name("copy.budget")
    elsewhere.write_bytes(before)  # without its mark: it goes on alone
    ao.Budget(elsewhere).spend(Gaussian(0.5))
    path.write_bytes(elsewhere.read_bytes())
    with pytest.raises(BudgetError, match="went on otherwise"):
        ao.Budget(path)


def test_to_begin_anew_needs_the_mark_gone_too(path, budget):
    path.unlink()
    with pytest.raises(BudgetError, match="was here, with 4 lines, and is gone"):
        ao.Budget(path, EPSILON, DELTA)
    mark(path).unlink()
    path.unlink(missing_ok=True)
    assert ao.Budget(path, EPSILON, DELTA).remaining().spent == 0


def test_other_files_are_not_written_to(path):
    path.write_text("shopping list\n")
    with pytest.raises(BudgetError, match="no budget file"):
        ao.Budget(path, EPSILON, DELTA)
    assert path.read_text() == "shopping list\n"
    with pytest.raises(BudgetError, match=r"no regular file|cannot be opened"):
        ao.Budget(path.parent, EPSILON, DELTA)


def test_names_of_one_file_share_its_lock_and_mark(path, budget, tmp_path):
    other = tmp_path / "link.budget"
    other.symlink_to(path)
    ao.Budget(other).spend(Gaussian(0.4))
    assert len(budget.entries()) == 4
    assert not mark(other).exists()


def test_an_object_sees_what_others_entered(path, budget):
    other = ao.Budget(path)
    other.spend(Gaussian(1.2))
    with pytest.raises(BudgetError, match="refused"):
        budget.spend(Gaussian(1.2))


# -- disks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [0, 10, 10_000])
def test_a_full_disk_spends_nothing(path, budget, monkeypatch, written):
    real = os.pwrite

    def full(descriptor, data, place):
        if written:
            real(descriptor, data[:written], place)
        raise OSError(errno.ENOSPC, "No space left on device")

    before = budget.remaining()
    with monkeypatch.context() as patch:
        patch.setattr(log.os, "pwrite", full)
        with pytest.raises(BudgetError, match="No space left.*Nothing was spent"):
            budget.spend(Gaussian(0.4))
    assert budget.remaining() == ao.Budget(path).remaining() == before
    budget.spend(Gaussian(0.4))
    assert len(ao.Budget(path).entries()) == 4


def test_a_line_that_may_not_be_on_the_disk_lets_no_run_start(path, budget, monkeypatch):
    def fails(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(log.os, "fsync", fails)
        with pytest.raises(BudgetError, match="may count as spent all the same"):
            budget.spend(Gaussian(0.4))
    assert len(budget.entries()) == len(ao.Budget(path).entries())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write what is read-only")
def test_what_is_read_only_can_be_looked_at(path, budget):
    path.chmod(0o444)
    assert ao.Budget(path).remaining().entries == 3
    with pytest.raises(BudgetError, match="cannot be opened"):
        budget.spend(Gaussian(0.1))


def test_a_file_system_without_locks_spends_nothing(budget, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(durable, "lock", refuse)
    with pytest.raises(BudgetError, match="cannot be locked"):
        budget.spend(Gaussian(0.1))


def test_the_clock_may_go_backwards(path, budget, monkeypatch):
    from anyorder.budget import file

    monkeypatch.setattr(file, "now", lambda: "1999-01-01T00:00:00+00:00")
    budget.spend(Gaussian(0.4))
    assert [held.curve.mu for held in ao.Budget(path).entries()] == [0.1, 0.2, 0.3, 0.4]


# -- many writers ----------------------------------------------------------------------------------------------------


def test_writers_at_once_lose_nothing_and_overspend_nothing(path):
    ao.Budget(path, EPSILON, DELTA)
    running = [spender(path, 40, 0.2, f"w{i}") for i in range(3)]
    told = [program.wait(120).stdout.split()[1:] for program in running]
    entries = ao.Budget(path).entries()
    assert {held.spend.run for held in entries} == {f"w{i}x{n}" for i, each in enumerate(told) for n in each}
    left = ao.Budget(path).remaining()
    assert left.spent <= EPSILON
    assert left.mu < 0.2  # all that fits was spent


@pytest.mark.parametrize("left", [b"", b"\0" * 160])
def test_a_mark_that_was_never_written_says_nothing(path, budget, left):
    mark(path).write_bytes(left)
    assert ao.Budget(path).spend(Gaussian(0.1)).entries == 4
    assert b'"lines": 5' in mark(path).read_bytes()


def test_a_mark_whose_writing_was_broken_off_accuses_nobody(path, budget, monkeypatch):
    """Half of a new chain before half of an old one would say that the file is a copy that went on otherwise."""

    def halved(real):
        def call(descriptor, data, *place):
            if ".mark" not in os.readlink(f"/proc/self/fd/{descriptor}"):
                return real(descriptor, data, *place)
            real(descriptor, data[: len(data) // 2], *place)
            raise KeyboardInterrupt

        return call

    with monkeypatch.context() as patch:
        for name in ("write", "pwrite"):
            patch.setattr(os, name, halved(getattr(os, name)))
        with pytest.raises(KeyboardInterrupt):
            budget.spend(Gaussian(0.4))
    assert len(ao.Budget(path).entries()) == 4


@pytest.mark.parametrize("left", [b"{", b"[]", b'{"id": 1}', b"none"])
def test_an_altered_mark_is_found(path, budget, left):
    """Else an end that was cut off would be forgotten."""
    path.write_bytes(path.read_bytes().rsplit(b"\n", 2)[0] + b"\n")
    mark(path).write_bytes(left)
    with pytest.raises(BudgetError, match="was altered: whether its end was missing is not known"):
        ao.Budget(path)
    mark(path).unlink()
    assert ao.Budget(path).remaining().entries == 2


def test_threads_share_an_object(path, budget):
    """Half-read lines would be counted twice, or be found altered."""
    other, small, problems = ao.Budget(path), Gaussian(0.01), []

    def use(i):
        try:
            for _ in range(4):
                budget.remaining()
                budget.entries()
            budget.spend(small, run=f"t{i}")
        except Exception as problem:
            problems.append(problem)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for trial in range(6):
            for _ in range(5):
                other.spend(small)
            threads = [threading.Thread(target=use, args=(f"{trial}x{i}",)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert problems == []
    assert len(budget.entries()) == 3 + 6 * 9
    assert budget.remaining() == ao.Budget(path).remaining()


READER = """
import sys
import anyorder as ao
budget = ao.Budget(sys.argv[1])
with budget._log.locked(write=False):
    pass
print("ready", flush=True)
while True:
    with budget._log.locked(write=False):  # which many share: when one leaves, another is there
        time.sleep(0.02)
"""


def test_readers_that_come_and_go_keep_no_writer_out(path, budget):
    readers = [processes.start("-c", "import time\n" + READER, path) for _ in range(4)]
    try:
        for reader in readers:
            reader.wait_for("ready\n")
        writer = spender(path, 5, 0.01, "w")
        assert writer.wait(60).stdout.split()[1:] == list("01234")
        assert all(reader.is_alive() for reader in readers)
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()


def test_a_lock_that_another_thread_keeps_is_no_endless_wait(budget, monkeypatch):
    monkeypatch.setattr(log, "_WAIT", 0.05)
    with (
        ThreadPoolExecutor() as pool,
        budget._log.locked(write=False),
        pytest.raises(BudgetError, match="locked by another thread"),
    ):
        pool.submit(budget.remaining).result()
    assert budget.remaining().entries == 3


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_in_the_middle_begins_anew(path, budget):
    """The child has a copy of a lock that nobody in it will give back."""
    with budget._log.locked(write=False):
        child = os.fork()
        if child == 0:
            os._exit(0 if budget._log._mutex.acquire(timeout=5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_copy_reads_the_file_anew(path, budget):
    for made in (pickle.loads(pickle.dumps(budget)), copy.deepcopy(budget)):
        assert made.path == path
        assert made.spend(Gaussian(0.1)) == budget.remaining()


def test_what_is_interrupted_half_way_is_read_again(path, budget, monkeypatch):
    other = ao.Budget(path)
    other.spend(Gaussian(0.4))
    with monkeypatch.context() as patched:
        patched.setattr(account.Account, "_add", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            budget.remaining()
    assert budget.remaining() == other.remaining()


def test_what_was_told_before_a_kill_is_there_after_it(path):
    rng = np.random.default_rng(0)
    ao.Budget(path, 1000.0, DELTA)
    told = set()
    for trial in range(4):
        program = spender(path, 100_000, 0.01, f"t{trial}")
        program.wait_for("ready\n")
        time.sleep(rng.uniform(0.02, 0.3))
        program.kill()
        ready, *numbers = program.wait().stdout.split("\n")[:-1]
        assert ready == "ready"
        told |= {f"t{trial}x{n}" for n in numbers}
        entered = [held.spend.run for held in ao.Budget(path).entries()]
        assert len(entered) == len(set(entered))
        assert told <= set(entered)
        assert len(entered) - len(told) <= trial + 1  # one each that was killed before it could tell
    assert ao.Budget(path).remaining().spent >= Gaussian(0.01 * len(told) ** 0.5).epsilon(DELTA)
