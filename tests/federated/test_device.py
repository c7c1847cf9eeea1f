"""The counter and the timer on a device: they never double, whatever dies, and say nothing where they do not know."""

import itertools
import json
import multiprocessing
import os

import pytest

from anyorder import durable
from anyorder.errors import ArgumentError, CheckpointError, ParticipationError, PlanError
from anyorder.federated import DeviceRecord
from anyorder.ledger import Ledger
from anyorder.participation import EpochShuffle, KnownOrder, MinSeparation, SingleEpoch
from plans import flat_plan

HOUR = 3600.0


class Clock:
    def __init__(self, hours=1000.0):
        self.hours = hours

    def __call__(self):
        return self.hours * HOUR


def planned(rule=None, **changes):
    rule = MinSeparation(8, b=3, k=2) if rule is None else rule
    settings = {"participation": rule, "batch_size": 4, "epsilon": 4, "delta": 1e-5, "mechanism": "tree"}
    return flat_plan(**{**settings, "unit": "user", "on_device": ("record",), **changes})


@pytest.mark.parametrize("rule", [MinSeparation(7, 3), MinSeparation(7, 2, 2), MinSeparation(7, 1, 3), SingleEpoch(7)])
def test_lets_in_what_the_ledger_would(rule, tmp_path):
    plan = planned(rule)
    for size in range(4):
        for steps in itertools.combinations(range(7), size):
            (tmp_path / "x").unlink(missing_ok=True)
            device, ledger = DeviceRecord(tmp_path / "x", plan), Ledger(rule)
            for t in range(7):
                assert device.may(t) == bool(ledger.allowed(t, [1])[0])
                comes = t in steps and device.may(t)
                if comes:
                    device.take(t)
                    device = DeviceRecord(tmp_path / "x", plan)  # another process
                ledger.record(t, [1] if comes else [])
            with pytest.raises(ParticipationError, match="rounds 0 to 6"):
                device.take(7)


def test_the_timer_and_the_clock(tmp_path):
    clock = Clock()
    device = DeviceRecord(tmp_path / "x", (2, 3, 24.0), clock=clock)
    device.take(5)
    clock.hours += 23.99
    assert not device.may(50)
    with pytest.raises(ParticipationError, match="less than 24 hours"):
        device.take(50)
    clock.hours += 0.02
    assert not device.may(6)  # long ago, and only one round
    with pytest.raises(ParticipationError, match="may come back 2 rounds later"):
        device.take(6)
    assert not device.may(4)
    device.take(7)
    clock.hours -= 1
    with pytest.raises(ParticipationError, match="set back"):
        device.take(60)
    clock.hours += 30
    device.take(60)
    clock.hours += 1e6
    with pytest.raises(ParticipationError, match="took part 3 times"):
        device.take(10**6)
    clock.hours = float("nan")
    with pytest.raises(CheckpointError, match="clock"):
        device.may(1)


def test_refuses_where_it_does_not_know(tmp_path):
    path, clock = tmp_path / "x", Clock()
    device = DeviceRecord(path, planned(), hours=1, clock=clock)
    device.take(0)
    clock.hours += 100
    data = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    for place in range(len(data)):
        for harmed in (data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], data[:place]):
            path.write_bytes(harmed)
            with pytest.raises(CheckpointError, match="Send nothing"):
                device.take(5)
            with pytest.raises(CheckpointError):
                device.may(5)
    for harmed in (b"null", b"[]", b"{}", b"9" * 10_000, json.dumps({"state": {}, "sha256": ""}).encode()):
        path.write_bytes(harmed)
        with pytest.raises(CheckpointError):
            device.take(5)
    path.write_bytes(data)
    for rule, hours in ((planned(epsilon=2), 1), (planned(), 2), ((3, 2, 1.0), 0)):
        with pytest.raises(CheckpointError, match="another plan or other limits"):
            DeviceRecord(path, rule, hours=hours, clock=clock).take(5)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        device.take(5)
    with pytest.raises(CheckpointError, match="cannot be locked"):
        DeviceRecord(tmp_path / "no folder" / "x", (1, 1, 0.0)).take(0)


@pytest.mark.parametrize("other", [(3, 2, 24.0), (2, 3, 24.0), (2, 2, 23.0), (1, 2, 24.0), (2, 1, 24.0)])
def test_a_record_without_a_plan_is_of_its_limits(other, tmp_path):
    """Others would let the device forget: it could come more often, or sooner, than the first ones said."""
    clock = Clock()
    DeviceRecord(tmp_path / "x", (2, 2, 24.0), clock=clock).take(0)
    clock.hours += 100
    for act in (DeviceRecord.may, DeviceRecord.take):
        with pytest.raises(CheckpointError, match="other limits"):
            act(DeviceRecord(tmp_path / "x", other, clock=clock), 50)
    DeviceRecord(tmp_path / "x", (2, 2, 24.0), clock=clock).take(50)


def test_the_record_is_read_and_written_under_one_lock(tmp_path, monkeypatch):
    """Who reads before it has the lock may hold a state that another process has spent since."""
    first, second = (DeviceRecord(tmp_path / "x", (1, 1, 0.0)) for _ in range(2))
    real = durable.lock

    def waits(descriptor, *, wait):
        monkeypatch.setattr(durable, "lock", real)
        first.take(3)  # while the second one waits for the lock
        return real(descriptor, wait=wait)

    monkeypatch.setattr(durable, "lock", waits)
    with pytest.raises(ParticipationError, match="1 times"):
        second.take(3)
    first_inode = os.stat(tmp_path / "x.lock").st_ino
    descriptor = os.open(tmp_path / "x.lock", os.O_RDWR)
    seen = []

    def tried(given, *, wait=False):
        assert real(given, wait=wait)
        assert not real(descriptor)
        seen.append(os.fstat(given).st_ino)
        return True

    monkeypatch.setattr(durable, "lock", tried)
    with pytest.raises(ParticipationError):
        first.take(5)
    assert seen[0] == first_inode
    assert real(descriptor)  # it was let go
    os.close(descriptor)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace", "sync_folder"])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_point_loses_a_round_at_most_and_never_doubles(name, after, tmp_path, monkeypatch):
    path, plan = tmp_path / "x", planned()
    DeviceRecord(path, plan).take(0)
    owner = {"sync_folder": durable}.get(name, os)
    real = getattr(owner, name)

    def dies(*given, **named):
        if after:
            real(*given, **named)
        raise Killed

    monkeypatch.setattr(owner, name, dies)
    with pytest.raises(Killed):
        DeviceRecord(path, plan).take(3)
    monkeypatch.undo()
    device = DeviceRecord(path, plan)
    spent = name == "sync_folder" or (name == "replace" and after)
    assert device.may(3) != spent
    if not spent:
        device.take(3)
    for later in (3, 4, 7):
        with pytest.raises(ParticipationError):
            device.take(later)


def test_a_disk_that_does_not_take_it_lets_nothing_out(tmp_path, monkeypatch):
    device = DeviceRecord(tmp_path / "x", planned())
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(CheckpointError, match="cannot be written: full. Send nothing"):
            device.take(0)
        monkeypatch.undo()
    monkeypatch.setattr(os, "write", lambda descriptor, text: len(text) // 2)
    with pytest.raises(CheckpointError, match="as a whole"):
        device.take(0)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["x.lock"]
    device.take(0)


def _try(path, start, wins):
    start.wait()
    try:
        DeviceRecord(path, (1, 5, 0.0)).take(3)
        wins.put(1)
    except ParticipationError:
        wins.put(0)


def test_of_several_processes_one_has_the_round(tmp_path):
    context = multiprocessing.get_context("fork")
    start, wins = context.Event(), context.Queue()
    workers = [context.Process(target=_try, args=(tmp_path / "x", start, wins)) for _ in range(6)]
    for worker in workers:
        worker.start()
    start.set()
    assert sum(wins.get(timeout=60) for _ in workers) == 1
    for worker in workers:
        worker.join()


def test_orders_and_numbers_that_it_cannot_keep_are_refused(tmp_path):
    for rule in (EpochShuffle(2, 4), KnownOrder([[1]] * 8)):
        with pytest.raises(PlanError, match="counter and a timer"):
            DeviceRecord(tmp_path / "x", planned(rule, on_device=()))
    for wrong in ((0, 1, 0.0), (1, 0, 0.0), (1, 1, -1.0), (1, 1), None, "plan"):
        with pytest.raises(ArgumentError):
            DeviceRecord(tmp_path / "x", wrong)
    with pytest.raises(ArgumentError, match="given once"):
        DeviceRecord(tmp_path / "x", (1, 1, 1.0), hours=2)
    with pytest.raises(ArgumentError):
        DeviceRecord(tmp_path / "x", (1, 1, 0.0)).may(-1)
