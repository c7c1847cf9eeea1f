"""The ledger on disk is the ledger in memory, and a crash, a cut or another file never passes for its history."""

import os
import time

import numpy as np
import pytest

from anyorder.errors import ArgumentError, CheckpointError, ParticipationError, StepsExhaustedError
from anyorder.ledger import Ledger, Mark, replay
from anyorder.participation import EpochShuffle, KnownOrder, MinSeparation, PoissonSampling, SingleEpoch

RUN = "0123456789abcdef"
RULE = MinSeparation(12, b=3, k=3)
INTEGERS = [[3, 1, 900], [], [70_000, 5], [1], [3, 5 + (1 << 50)], [-7, 5]]
NAMES = [["b", "", "a\0"], [], ["ü" * 9, "c"], ["a\0", "d"], ["\ud800"], ["c", "e", "f"]]


def on_disk(path, history, rule=RULE):
    ledger = Ledger.create(rule, path, RUN)
    for t, units in enumerate(history):
        ledger.record(t, units)
    return ledger


def resumed(path, mark, rule=RULE, run=RUN):
    return Ledger.resume(rule, path, run, mark)


@pytest.mark.parametrize("history", [[], [[], []], INTEGERS, NAMES], ids=["none", "nobody", "integers", "names"])
def test_on_disk_and_in_memory_are_one_ledger(history, tmp_path):
    path, memory = tmp_path / "x.ledger", replay(RULE, history)
    ledger = on_disk(path, history)
    mark = ledger.settle()
    for other in (ledger, resumed(path, mark), resumed(path, mark)):
        assert (other.digest(), other.step, other.to_bytes()) == (memory.digest(), len(history), memory.to_bytes())
        assert [list(units) for units in other.history()] == [sorted(units) for units in history]
        assert other.realised_bounds() == memory.realised_bounds()
        assert other.settle() == mark
        named = {unit for units in history for unit in units}
        for t in range(len(history), RULE.n):
            assert other.allowed(t, named).tolist() == memory.allowed(t, named).tolist()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("history", [INTEGERS, NAMES], ids=["integers", "names"])
def test_a_resumed_ledger_goes_on_to_the_same_bytes(history, tmp_path):
    """From every step; what lies behind is dropped, and comes back the same where it is made again."""
    whole = on_disk(tmp_path / "whole", history)
    end, expected = whole.settle(), (tmp_path / "whole").read_bytes()
    marks = [on_disk(tmp_path / f"{t}", history[:t]).settle() for t in range(len(history) + 1)]
    assert marks[-1] == end
    for t, mark in enumerate(marks):
        (tmp_path / "copy").write_bytes(expected)  # with steps after the mark
        ledger = resumed(tmp_path / "copy", mark)
        assert (ledger.step, (tmp_path / "copy").read_bytes()) == (t, expected)
        for later in range(t, len(history)):
            ledger.record(later, history[later])
        assert ledger.settle() == end
        assert (tmp_path / "copy").read_bytes() == expected
    other = resumed(tmp_path / "copy", marks[3])
    other.record(3, [])
    assert other.settle() != marks[4]
    with pytest.raises(CheckpointError):
        resumed(tmp_path / "copy", end)
    assert resumed(tmp_path / "copy", marks[3]).digest() == replay(RULE, history[:3]).digest()


def put(path, data):
    """Another file in its place: one that is cut and written again is on the disk before it is closed."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


@pytest.mark.parametrize("history", [INTEGERS, NAMES], ids=["integers", "names"])
def test_a_crash_at_any_byte_leaves_the_marked_steps(history, tmp_path):
    """The file is cut at every byte, or the rest is zeros, as a loss of power leaves it."""
    first = on_disk(tmp_path / "first", history[:3])
    mark, safe = first.settle(), (tmp_path / "first").stat().st_size
    last = on_disk(tmp_path / "last", history)
    end, data = last.settle(), (tmp_path / "last").read_bytes()
    digest, path = first.digest(), tmp_path / "x"
    for cut in range(len(data)):
        for torn in (data[:cut], data[:cut] + bytes(len(data) - cut))[: 1 + (cut % 3 == 0)]:
            put(path, torn)
            if torn != data:
                with pytest.raises(CheckpointError):
                    resumed(path, end)
            if cut < safe and torn[:safe] != data[:safe]:
                with pytest.raises(CheckpointError):
                    resumed(path, mark)
                continue
            ledger = resumed(path, mark)
            assert (ledger.digest(), ledger.step) == (digest, 3)
        if cut >= safe and cut % 7 == 0:
            for t in range(3, len(history)):
                ledger.record(t, history[t])
            assert (ledger.settle(), path.read_bytes()) == (end, data)


@pytest.mark.parametrize("history", [INTEGERS, NAMES], ids=["integers", "names"])
def test_altered_swapped_and_missing_files_are_refused(history, tmp_path):
    path = tmp_path / "x"
    mark = on_disk(path, history).settle()
    data = path.read_bytes()
    for place in range(len(data)):
        put(path, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CheckpointError):
            resumed(path, mark)
    path.write_bytes(data)
    for other in (
        Mark(mark.steps, bytes(32)), Mark(mark.steps - 1, mark.chain), Mark(mark.steps + 1, mark.chain),
        on_disk(tmp_path / "y", [*history[:-1], []]).settle(),
    ):  # fmt: skip
        with pytest.raises(CheckpointError):
            resumed(path, other)
    with pytest.raises(CheckpointError, match="no ledger of this run"):
        resumed(path, mark, run="another")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        resumed(path, mark)


def test_nothing_is_made_over_what_is_no_ledger(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="not replaced"):
        Ledger.create(RULE, tmp_path / "notes", RUN)
    assert (tmp_path / "notes").read_text() == "mine"
    for left in (b"", b"\0\0", b"anyorder led", b"anyorder ledger file 1\nother run\n and more"):
        (tmp_path / "x").write_bytes(left)
        mark = on_disk(tmp_path / "x", INTEGERS).settle()
        assert resumed(tmp_path / "x", mark).step == len(INTEGERS)
    with pytest.raises(CheckpointError, match="cannot be written"):
        Ledger.create(RULE, tmp_path / "nowhere" / "x", RUN)


def test_what_a_mark_vouches_for_was_brought_to_the_disk(tmp_path, monkeypatch):
    """And the file's name with its first line: after a loss of power a run without its ledger cannot go on."""
    real, synced = os.fsync, []

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((path, os.path.getsize(path) if os.path.isfile(path) else None))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "x"
    ledger = Ledger.create(RULE, path, RUN)
    assert synced == [(str(path), path.stat().st_size), (str(tmp_path), None)]
    for t, units in enumerate(NAMES):
        ledger.record(t, units)
    synced.clear()
    ledger.settle()
    assert synced == [(str(path), path.stat().st_size)]


def test_what_was_prepared_does_not_count(tmp_path):
    ledger = on_disk(tmp_path / "x", NAMES[:2])
    before = ledger.settle(), ledger.digest(), ledger.realised_bounds()
    ledger.prepare(2, ["a long name that is new", "c"])
    ledger.prepare(2, ["c"])
    assert (ledger.settle(), ledger.digest(), ledger.realised_bounds()) == before
    assert resumed(tmp_path / "x", before[0]).step == 2
    ledger.record(2, NAMES[2])
    for t in range(3, len(NAMES)):
        ledger.prepare(t, NAMES[t])
        ledger.record(t, NAMES[t])
    assert ledger.settle() == on_disk(tmp_path / "y", NAMES).settle()
    assert ledger.to_bytes() == replay(RULE, NAMES).to_bytes()


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    ledger = on_disk(tmp_path / "x", NAMES[:2])
    before = ledger.settle(), ledger.to_bytes()
    real = os.pwrite
    for broken in (lambda fd, data, place: 0, lambda fd, data, place: real(fd, data[: len(data) // 2], place) and 0):
        monkeypatch.setattr(os, "pwrite", broken)
        with pytest.raises(CheckpointError, match="step 2 was not released: .* Make room"):
            ledger.record(2, NAMES[2])
        monkeypatch.setattr(os, "pwrite", real)
        assert (ledger.settle(), ledger.to_bytes()) == before
    for t in range(2, len(NAMES)):
        ledger.record(t, NAMES[t])
    assert ledger.settle() == on_disk(tmp_path / "y", NAMES).settle()
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


@pytest.mark.parametrize("way", ["prepared", "full disk", "resumed"])
def test_who_was_not_in_a_step_leaves_no_trace_in_the_file(way, tmp_path, monkeypatch):
    """The file follows from the history alone: ids of a try that was not released are gone from it."""
    path, crowd = tmp_path / "x", [f"nobody {i}" for i in range(50)]
    ledger = on_disk(path, NAMES[:2])
    mark, real = ledger.settle(), os.pwrite
    match way:
        case "prepared":
            ledger.prepare(2, crowd)
        case "full disk":
            ledger.prepare(2, [])
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", lambda fd, data, place: real(fd, data[:-9], place) and 0)
                with pytest.raises(CheckpointError, match="Make room"):
                    ledger.prepare(2, crowd)
        case "resumed":
            ledger.prepare(2, crowd)
            ledger.close()
            ledger = resumed(path, mark)
    assert b"nobody" in path.read_bytes()
    for t in (2, 3):  # what lies behind is dropped by the step after, at the latest
        ledger.record(t, [])
    on_disk(tmp_path / "y", [*NAMES[:2], [], []])
    assert path.read_bytes() == (tmp_path / "y").read_bytes()


def test_resuming_replays_the_rule(tmp_path):
    mark = on_disk(tmp_path / "x", [["a"], ["a"]], PoissonSampling(4, 0.5)).settle()
    with pytest.raises(ParticipationError):
        resumed(tmp_path / "x", mark, SingleEpoch(4))
    with pytest.raises(StepsExhaustedError):
        resumed(tmp_path / "x", mark, PoissonSampling(1, 0.5))
    order = KnownOrder([["a"], ["a"], ["b"]])
    assert resumed(tmp_path / "x", mark, order).check(2, ["b"]) == ["b"]
    with pytest.raises(ParticipationError):
        resumed(tmp_path / "x", mark, KnownOrder([["a"], ["b"]]))
    mark = on_disk(tmp_path / "x", [[1], [1]], PoissonSampling(4, 0.5)).settle()
    with pytest.raises(ParticipationError):
        resumed(tmp_path / "x", mark, MinSeparation(4, b=2))


def test_one_kind_of_unit_after_a_resume(tmp_path):
    mark = on_disk(tmp_path / "x", [["a"], []]).settle()
    with pytest.raises(ArgumentError, match="units must be strings"):
        resumed(tmp_path / "x", mark).check(2, [1])
    mark = on_disk(tmp_path / "x", [[1], []]).settle()
    with pytest.raises(ArgumentError, match="units must be integers"):
        resumed(tmp_path / "x", mark).allowed(2, ["a"])


def test_a_closed_ledger_is_read_and_not_written(tmp_path):
    ledger = on_disk(tmp_path / "x", NAMES[:4])
    ledger.close()
    assert ledger.to_bytes() == replay(RULE, NAMES[:4]).to_bytes()
    with pytest.raises(CheckpointError, match="closed"):
        ledger.record(4, [])
    on_disk(tmp_path / "x", [[], [], [], []])  # another run went over it
    with pytest.raises(CheckpointError, match="altered"):
        ledger.to_bytes()
    (tmp_path / "x").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        ledger.to_bytes()
    with pytest.raises(ArgumentError, match="in memory"):
        Ledger(RULE).settle()


@pytest.mark.parametrize("rule", [RULE, SingleEpoch(12), EpochShuffle(3, 4), KnownOrder([["u1"], ["u2", "u3"]] * 6)])
@pytest.mark.parametrize("kind", [lambda i: i, lambda i: i * (1 << 40) - 9, lambda i: f"u{i}"])
def test_allowed_is_what_check_lets_in_and_bounds_are_those_of_the_history(rule, kind):
    if isinstance(rule, KnownOrder) and kind(1) != "u1":
        rule = KnownOrder([[kind(1)], [kind(2), kind(3)]] * 6)
    rng, ledger, steps = np.random.default_rng(0), Ledger(rule), {}
    everyone = [kind(i) for i in rng.permutation(15)]
    for t in range(rule.n):
        allowed = ledger.allowed(t, everyone)
        for unit, good in zip(everyone, allowed, strict=True):
            assert good == (len(ledger.offenders(t, [unit])) == 0)
        coming = [unit for unit, good in zip(everyone, allowed, strict=True) if good and rng.random() < 0.4]
        ledger.record(t, coming)
        for unit in coming:
            steps.setdefault(unit, []).append(t)
        gaps = [gap for own in steps.values() for gap in np.diff(own).tolist()]
        most = max(map(len, steps.values()), default=0)
        assert ledger.realised_bounds() == (most, min(gaps, default=rule.n))
        realised = ledger.realised()
        if realised is not None and gaps:
            assert ledger.realised_bounds() == (realised.max_participations, realised.min_separation)
    twice = ledger.allowed(rule.n - 1, [*everyone, *everyone])
    assert np.array_equal(twice[:15], twice[15:])
    for wrong in (-1, rule.n):
        with pytest.raises(ArgumentError):
            ledger.allowed(wrong, everyone)


@pytest.mark.parametrize("named", [False, True])
def test_many_units_over_many_steps(named, tmp_path):
    """A twentieth of 13 million participations: a generous bound on time, which a quadratic path would break."""
    units, n, cohort = 100_000, 100, 6500
    rule = MinSeparation(n, b=5)
    ids = np.arange(units) if not named else np.array([f"user-{i:07d}" for i in range(units)], object)
    rng, ledger = np.random.default_rng(0), Ledger.create(rule, tmp_path / "x", RUN)
    parts = np.array_split(rng.permutation(units), units // cohort)
    rounds = [ids[parts[t % len(parts)]] for t in range(n)]
    rounds = [cohort.tolist() for cohort in rounds] if named else rounds
    begin = time.process_time()
    for t, cohort in enumerate(rounds):
        ledger.record(t, ledger.check(t, cohort))
    spent = (time.process_time() - begin) / n
    mark, size = ledger.settle(), (tmp_path / "x").stat().st_size
    begin = time.process_time()
    again = resumed(tmp_path / "x", mark, rule)
    print(
        f"{spent * 1e3:.1f} ms a step, {time.process_time() - begin:.2f} s to resume, {size / n / 6500:.1f} bytes each"
    )
    assert again.digest() == ledger.digest()
    assert again.realised_bounds() == ledger.realised_bounds() == (-(-n // len(parts)), len(parts))
    assert spent < 0.05
    assert size < 6 * n * 6500 + 20 * units
