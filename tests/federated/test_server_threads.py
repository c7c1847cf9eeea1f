"""What comes between: other threads, interrupts, other objects of the same run; and what an optimizer holds besides."""

import os
import sys
import threading

import pytest
import torch
from torch import nn

import anyorder.federated.server as rounds
import anyorder.federated.server as server_file
from anyorder.clipping import Adaptive
from anyorder.clipping.bounded import ClippedSum
from anyorder.errors import ArgumentError, CheckpointError, ParticipationError, TrainingError
from anyorder.federated import Server
from anyorder.release.journal import Journal
from federated.servers import KEY, independent, make, message, messages, plan, run, same, state

# -- threads -----------------------------------------------------------------------------------------------------------


def in_another_thread(act):
    """What it raised, or None."""
    problems = []

    def caught():
        try:
            act()
        except Exception as problem:
            problems.append(problem)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    return problems[0] if problems else None


@pytest.mark.parametrize("act", [Server.open, lambda server: server.round({}), Server.save, Server.close])
def test_nothing_else_is_done_while_a_round_is_opened(tmp_path, monkeypatch, act):
    server = make(checkpoint=tmp_path / "run")
    problems = []
    real = rounds.sum_of_nobody

    def slow(*arguments):
        problems.append(in_another_thread(lambda: act(server)))
        return real(*arguments)

    monkeypatch.setattr(server_file, "sum_of_nobody", slow)
    opened = server.open()
    monkeypatch.undo()
    assert "one at a time" in str(problems[0])
    opened.close()
    assert server.step == 1
    assert same(run(server), run(_after(make(), {})))


def _after(server, sent):
    server.round(sent)
    return server


@pytest.mark.parametrize("act", [Server.open, lambda server: server.round({}), Server.save, Server.close])
def test_nothing_else_is_done_while_a_round_is_closed(tmp_path, act):
    """Nor by an observer, around which the round is not over."""
    server = make(checkpoint=tmp_path / "run")
    problems = []
    end = server.release.on_release(lambda t, private: problems.append(in_another_thread(lambda: act(server))))
    opened = server.open()
    opened.close()
    assert "one at a time" in str(problems[0])
    end()
    end = server.release.on_release(lambda t, private: act(server))
    with pytest.raises(TrainingError, match="one at a time"):
        server.round({})
    end()
    assert same(run(server), run(_after(_after(make(), {}), {})))


def test_a_sum_of_another_step_or_norm_is_refused():
    """The defence beneath: a round that was opened twice over is released once, at the norm that it was cut at."""
    server = make(independent(), rule=Adaptive(learning_rate=1.0))
    late = server.open()
    server._round = None
    late.add(1, message(server, 1))
    server.round({0: message(server, 0)})
    late._step = 1  # as if it had been opened for this step
    with pytest.raises(TrainingError, match="norm"):
        late.close()
    assert server.step == 1


def test_many_threads_add_to_one_round():
    server, other = make(), make()
    sent = {u: message(server, u) for u in range(12)}
    opened = server.open()
    problems = []

    def add(user):
        try:
            opened.add(user % 12, sent[user % 12])
        except ParticipationError as problem:
            problems.append(problem)

    threads = [threading.Thread(target=add, args=(user,)) for user in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    opened.close()
    other.round(sent)
    assert len(problems) == 12
    assert same(server, other)


# -- an add that is broken off -----------------------------------------------------------------------------------------


def rows_of(server, count):
    return torch.randn(count, server.layout.size, generator=torch.Generator().manual_seed(0))


ADDS = {
    "add": lambda server, opened: opened.add(0, message(server, 0)),
    "add_rows": lambda server, opened: opened.add_rows([0, 1], rows_of(server, 2)),
    "add_sum": lambda server, opened: opened.add_sum([0, 1], 0.1 * rows_of(server, 1)),
    "close": lambda server, opened: opened.close(),  # which adds up what waits
}


@pytest.mark.parametrize("how", ["add", "add_rows", "close"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("problem", [KeyboardInterrupt, MemoryError, TimeoutError])
def test_a_round_that_was_broken_inside_an_add_is_discarded(monkeypatch, how, when, problem):
    server = make()
    opened = server.open()
    opened.add(5, message(server, 5))
    real = ClippedSum.add

    def broken(self, *arguments, **named):
        if when == "after":
            real(self, *arguments, **named)
        raise problem

    monkeypatch.setattr(ClippedSum, "add", broken)
    monkeypatch.setattr(
        server_file, "BLOCK", 1 if how == "add" else server_file.BLOCK
    )  # messages are added up when there are some
    with pytest.raises(problem):
        ADDS[how](server, opened)
    monkeypatch.undo()
    before = state(server)
    for again in (lambda: ADDS[how](server, opened), lambda: opened.add(7, message(server, 7)), opened.close):
        with pytest.raises(TrainingError, match="broken off"):
            again()
    assert server.step == 0
    assert all(torch.equal(a, b) for a, b in zip(before, state(server), strict=True))
    opened.discard()
    server.round({0: message(server, 0)})
    assert same(server, _after(make(), {0: message(server, 0)}))


@pytest.mark.parametrize("how", ["add", "add_rows", "add_sum"])
def test_an_interrupt_at_each_line_of_an_add_counts_nobody_twice(how):
    """After each of them a second try is refused, or the round is; and no lock is held."""
    server = make(plan(on_device=("clipping",)))
    seen, point = set(), 0
    while True:
        opened = server.open()
        was_broken = interrupted(lambda opened=opened: ADDS[how](server, opened), point)
        try:
            ADDS[how](server, opened)
            again = "added"
        except ParticipationError:
            again = "was added before"
        except TrainingError:
            again = "broken"
        seen.add(again)
        single = {0} if how == "add" else {0, 1}
        if again != "broken":
            assert opened._users == single
            total = torch.cat([v.reshape(-1) for v in opened._clipped.finish().values()]) + opened._sums
            assert total.norm() <= len(single) + 1e-6
            assert opened._clipped.units in (len(single), 0)  # 0: of a sum
        opened.discard()
        if not was_broken:
            break
        point += 1
    assert point > 20
    assert seen == {"added", "was added before", "broken"}


def interrupted(act, point):
    """Run it with an interrupt at the point-th line of rounds.py; whether there was one."""
    left = [point]

    def local(frame, event, argument):
        if event == "line":
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
        return local

    tracer = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename == rounds.__file__ else None)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(tracer)
    return False


# -- what the optimizer holds besides ----------------------------------------------------------------------------------


def test_a_gradient_that_was_left_on_a_frozen_parameter_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].requires_grad_(False)
    server = Server(plan(), model, torch.optim.SGD(model.parameters(), lr=1.0), key=KEY)
    before = state(server)
    model[1].weight.grad = torch.ones(2, 4)
    with pytest.raises(TrainingError, match="frozen parameter"):
        server.round({})
    model[1].weight.grad = None
    opened = server.open()
    model[1].weight.grad = torch.ones(2, 4)
    with pytest.raises(TrainingError, match="frozen parameter"):
        opened.close()
    assert server.step == 0
    model[1].weight.grad = None
    opened.close()
    assert server.step == 1
    assert torch.equal(before[2], model[1].weight)


def test_a_group_that_was_added_later_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    server = Server(plan(), model, optimizer, key=KEY)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ArgumentError, match="no others"):
        server.round({})
    assert server.step == 0


# -- rounds that are broken off, and what is kept of them -------------------------------------------------------------


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_round_between_its_noise_and_the_record_is_not_saved(tmp_path, monkeypatch):
    """Else the next server would release it with the noise of the round that follows."""
    path = tmp_path / "run"
    server = run(make(checkpoint=path), until=2)
    monkeypatch.setattr(server.release.ledger, "record", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.round(messages(server, 2))
    with pytest.raises(TrainingError, match="broken off"):
        server.save()
    monkeypatch.undo()
    server.close()
    again = make(checkpoint=path)
    assert again.step == 3  # made again, of what was left
    assert same(run(again), run(make()))


@pytest.mark.parametrize("where", ["noise", "keep"])
def test_a_round_that_the_journal_has_is_kept_when_it_is_given_up(tmp_path, monkeypatch, where):
    """After the commit, or within it: then nobody knows how far it came."""
    path = tmp_path / "run"
    server = run(make(checkpoint=path), until=2)
    opened = server.open()
    for user, one in messages(server, 2).items():
        opened.add(user, one)
    if where == "noise":
        monkeypatch.setattr(server.release._noise, "add_to", interrupt)
    else:
        monkeypatch.setattr(Journal, "_keep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        opened.close()
    monkeypatch.undo()
    server.close()
    assert "run.pending" in os.listdir(tmp_path)
    again = make(checkpoint=path)
    assert again.step == 3
    assert same(run(again), run(make()))


def test_a_server_that_was_superseded_leaves_the_files_alone(tmp_path):
    path = tmp_path / "run"
    old = run(make(checkpoint=path), until=2)
    opened = old.open()
    for user, one in messages(old, 2, kind=1).items():
        opened.add(user, one)
    new = run(make(checkpoint=path), until=5)
    files = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    for act in (opened.close, lambda: old.round({}), old.save, lambda: old.release.ledger.prepare(2, [2])):
        with pytest.raises((CheckpointError, TrainingError), match=r"closed|open already"):
            act()
    old.close()
    assert files == {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    run(new, until=6).close()
    assert same(run(make(checkpoint=path)), run(make()))


def test_a_server_that_was_superseded_does_not_remove_what_the_other_keeps(tmp_path, monkeypatch):
    path = tmp_path / "run"
    servers = []
    for _ in range(2):  # of both the round 2 was written, and not made
        server = make(checkpoint=path)
        servers.append(run(server, until=2))
        opened = server.open()
        for user, one in messages(server, 2).items():
            opened.add(user, one)
        with monkeypatch.context() as patch:
            patch.setattr(server.release.ledger, "prepare", interrupt)
            with pytest.raises(KeyboardInterrupt):
                opened.close()
        if server is servers[0]:
            (tmp_path / "run.pending").unlink()  # so that the second one does not make it at once
    servers[0].close()
    assert (tmp_path / "run.pending").exists()
    servers[1].close()
    assert not (tmp_path / "run.pending").exists()
    assert same(run(make(checkpoint=path)), run(make()))
