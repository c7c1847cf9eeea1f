"""The server: what it releases, whom it lets in, and what stops it."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from torch import nn

import anyorder as ao
import anyorder.federated.server as rounds
from anyorder import plan as planned
from anyorder.accounting.selection import Counts
from anyorder.clipping import Adaptive, Flat, PerGroup
from anyorder.clipping.bounded import step_of
from anyorder.errors import ArgumentError, ParticipationError, PlanError, StepsExhaustedError, TrainingError
from anyorder.federated import Server
from anyorder.noise import NoiseSource
from anyorder.participation import MinSeparation, PoissonSampling
from federated.servers import GOAL, KEY, SHARED, N, cohort, independent, make, message, messages, plan, run, same, state

# -- what is released -------------------------------------------------------------------------------------------------


def released(server):
    """What observers see from now on."""
    rows = []
    server.release.on_release(lambda t, private: rows.append(private.double().numpy()))
    return rows


def by_hand(given, grid=None):
    """The releases of `messages`, by the core's own `Release.step` on sums by `bounded_sum`."""
    server = make(given)
    release = ao.Release(given, server.layout.size, key=KEY)
    rows = []
    for t in range(given.n):
        sent = messages(server, t)
        vectors = torch.stack([server.layout.flat(one) for one in sent.values()])
        total = ao.bounded_sum(vectors, list(sent), given.clip_norm, grid=grid)
        rows.append(release.step(list(sent), total).double().numpy())
    return np.array(rows)


def test_a_release_is_that_of_the_core_on_the_clipped_sum():
    server = make()
    rows = released(server)
    run(server)
    assert np.allclose(rows, by_hand(plan()), rtol=0, atol=1e-6)


def test_exact_integers_are_those_of_the_core():
    given = plan(grid=2.0**-20)
    server = make(given)
    rows = released(server)
    run(server)
    assert np.array_equal(rows, by_hand(given, given.grid))


def test_the_step_is_on_minus_the_mean():
    server = make()
    before = torch.cat([p.detach().reshape(-1) for name, p in server.model.named_parameters() if name in SHARED])
    rows = released(server)
    run(server)
    after = torch.cat([p.detach().reshape(-1) for name, p in server.model.named_parameters() if name in SHARED])
    assert np.allclose((after - before).numpy(), np.sum(rows, 0), atol=1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: ao.FTRL(p, lr=0.5, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.5),
    ],
)
@pytest.mark.filterwarnings("ignore::anyorder.errors.OptimizerWarning")  # that it is private, not how good it is
def test_any_optimizer_is_post_processing(optimizer):
    """The same moves as the optimizer's on a plain model that is given minus the means."""
    server = make(optimizer=optimizer)
    plain = make().model
    rows = released(server)
    run(server)
    shared = [p for name, p in plain.named_parameters() if name in SHARED]
    other = optimizer(shared)
    for row in rows:
        pieces = torch.split(torch.from_numpy(row).float(), [p.numel() for p in shared])
        for p, piece in zip(shared, pieces, strict=True):
            p.grad = -piece.view_as(p)
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(state(server), plain.state_dict().values(), strict=True))


def test_few_answers_and_none_are_rounds_of_the_same_divisor():
    server = make()
    rows = released(server)
    one = {3: message(server, 1)}
    for sent in ({}, one, {}):
        server.round(sent)
    noise = make()
    quiet = released(noise)
    for _ in range(3):
        noise.round({})
    change = np.array(rows) - np.array(quiet)
    assert not change[0].any()
    assert np.linalg.norm(change[1]) == pytest.approx(1 / GOAL, rel=1e-5)  # clipped to 1, divided by the report goal
    assert server.step == 3
    assert [len(ids) for ids in server.release.ledger.history()] == [0, 1, 0]


def test_the_order_of_arrival_leaves_no_bit():
    servers = [make() for _ in range(3)]
    for t in range(8):
        sent = messages(servers[0], t)
        vectors = torch.stack([servers[0].layout.flat(one) for one in sent.values()])
        servers[0].round(sent)
        with servers[1].open() as opened:
            for user in reversed(sent):
                opened.add(user, sent[user])
        with servers[2].open() as opened:
            opened.add_rows(list(sent)[2:], vectors[2:])
            opened.add_rows(np.array(list(sent)[:2]), vectors[:2].numpy())
    assert same(servers[0], servers[1])
    assert same(servers[0], servers[2])


def test_sums_of_others_are_the_same_release():
    given = dataclasses.replace(plan(), on_device=("clipping",))
    one, other = make(given), make(given)
    rows, sums = released(one), released(other)
    for t in range(8):
        sent = messages(one, t)
        one.round(sent)
        with other.open() as opened:
            for users in (list(sent)[:2], list(sent)[2:]):
                cut = [ao.federated.clip_message(sent[user], one.clip_norm) for user in users]
                opened.add_sum(users, sum(one.layout.flat(each) for each in cut))
    assert np.allclose(rows, sums, atol=1e-6)
    assert one.release.ledger.digest() == other.release.ledger.digest()


def test_sums_of_others_in_exact_integers():
    given = dataclasses.replace(plan(grid=2.0**-20), on_device=("clipping",))
    one, other = make(given), make(given)
    for t in range(8):
        sent = messages(one, t)
        one.round(sent)
        vectors = torch.stack([one.layout.flat(each) for each in sent.values()])
        with other.open() as opened:
            opened.add_sum(list(sent), ao.bounded_sum(vectors, list(sent), 1.0, grid=given.grid))
    assert same(one, other)


@pytest.mark.parametrize("times", [1, 3, 7])
def test_rows_that_are_added_in_blocks_are_all_added(times, monkeypatch):
    one, other = make(), make()
    monkeypatch.setattr(rounds, "_ROWS", times * one.layout.size + 1)
    vectors = torch.randn(10, one.layout.size, generator=torch.Generator().manual_seed(0))
    with one.open() as opened:
        opened.add_rows(range(10), vectors)
    other.round({user: other.layout.named(vector) for user, vector in enumerate(vectors)})
    assert same(one, other)


def test_a_sum_is_truncated_as_messages_are():
    """What is below one step leaves no bit; so the order of sums leaves none either."""
    given = dataclasses.replace(plan(), on_device=("clipping",))
    step = step_of(given.clip_norm)
    rows = []
    for total in ([0.9, -0.9, 0.0], [0.0, 0.0, 0.0], [1.9, -1.9, 1.0], [1.0, -1.0, 1.0]):
        model = nn.Linear(2, 1, dtype=torch.float64)
        server = Server(given, model, torch.optim.SGD(model.parameters(), lr=1.0), key=KEY)
        own = released(server)
        with server.open() as opened:
            opened.add_sum([1], step * torch.tensor(total, dtype=torch.float64))
        rows += own
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[2], rows[3])
    assert not np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize("rule", [Flat(), PerGroup(), PerGroup(groups=(("one",), ("norm",)), shares=(0.6, 0.8))])
def test_rules_keep_a_user_within_the_norm(rule):
    quiet, loud = make(independent(), rule=rule), make(independent(), rule=rule)
    rows, others = released(quiet), released(loud)
    quiet.round({0: message(quiet, 1, 0.0)})
    loud.round({0: message(loud, 1, 1e6)})
    assert 0.9 / GOAL < np.linalg.norm(rows[0] - others[0]) < (1 + 1e-6) / GOAL


def test_the_adaptive_norm_moves_at_restarts_by_what_was_released():
    server = make(independent(), rule=Adaptive(quantile=0.5, learning_rate=1.0))
    norms = [server.clip_norm]
    while server.step < 8:
        server.round(messages(server, server.step))
        norms.append(server.clip_norm)
    assert norms[0] == 1.0
    assert len(set(norms)) > 4
    with pytest.raises(PlanError, match="restarts"):
        make(rule=Adaptive())


def test_the_noise_is_the_plans():
    """Rounds of nobody: their rows, made white by the strategy, have the plan's deviation, and not half of it."""
    given = plan(32)
    model = nn.Linear(2000, 1, bias=False)
    server = Server(given, model, torch.optim.SGD(model.parameters(), lr=1.0), key=KEY)
    rows = released(server)
    for _ in range(32):
        server.round({})
    white = given.strategy.matrix() @ np.array(rows) * GOAL / given.noise_std
    assert white.std() == pytest.approx(1.0, abs=0.02)


# -- who takes part ---------------------------------------------------------------------------------------------------


def test_too_early_users_are_refused_before_anything_is_added():
    server = make()
    server.round({0: message(server, 1), 1: message(server, 2)})
    before = state(server)
    assert server.eligible([0, 1, 2]).tolist() == [False, False, True]
    assert server.eligible(np.array([2, 1, 2])).tolist() == [True, False, True]
    with pytest.raises(ParticipationError):
        server.round({2: message(server, 3), 0: message(server, 1)})
    assert server.step == 1
    assert all(torch.equal(a, b) for a, b in zip(before, state(server), strict=True))
    with server.open() as opened:
        with pytest.raises(ParticipationError):
            opened.add(0, message(server, 1))
        with pytest.raises(ParticipationError):
            opened.add_rows([2, 1], torch.zeros(2, server.layout.size))
        opened.add(2, message(server, 3))
    assert server.step == 2
    assert list(server.release.ledger.history())[1].tolist() == [2]


def test_eligible_is_who_may_come_in_the_next_round_and_no_later_one():
    server = make()
    server.round({0: message(server, 1)})
    may = []
    while server.step < 5:
        may.append(server.eligible([0, 5]).tolist())
        server.round({})
    assert may == [[False, True], [False, True], [True, True], [True, True]]


def test_a_second_message_of_a_user_is_refused_and_changes_nothing():
    one, other = make(), make()
    first, second = message(one, 1), message(one, 2)
    one.round({7: first})
    with other.open() as opened:
        opened.add(7, first)
        for again in (lambda: opened.add(7, second), lambda: opened.add(np.int64(7), second)):
            with pytest.raises(ParticipationError, match="before"):
                again()
        with pytest.raises(ParticipationError, match="before"):
            opened.add_rows([5, 7], torch.ones(2, other.layout.size))
        with pytest.raises(ParticipationError, match="before"):
            opened.add_rows([5, 5], torch.ones(2, other.layout.size))
    assert same(one, other)


def test_a_refused_sum_leaves_nothing():
    given = dataclasses.replace(plan(), on_device=("clipping",))
    one, other = make(given), make(given)
    ones = torch.ones(one.layout.size)
    with one.open() as opened:
        opened.add_sum([5, 7], ones)
        for users in ([7], [7, 8], [9, 9], ["ann"]):
            with pytest.raises((ParticipationError, ArgumentError)):
                opened.add_sum(users, 1e3 * ones)
    with other.open() as opened:
        opened.add_sum([5, 7], ones)
    with one.open() as opened, pytest.raises(ParticipationError):
        opened.add_sum([5, 1], 1e3 * ones)
    other.round({})
    assert same(one, other)


@pytest.mark.parametrize("users", [[1], [1, 2, 3], []])
def test_each_row_has_one_user(users):
    """One more or less would be a message of nobody, or a user without one."""
    one, other = make(), make()
    with one.open() as opened:
        with pytest.raises(ArgumentError):
            opened.add_rows(users, torch.ones(2, one.layout.size))
        opened.add_rows([1, 4], torch.ones(2, one.layout.size))
    with other.open() as opened:
        opened.add_rows([1, 4], torch.ones(2, one.layout.size))
    assert same(one, other)


class Slow(dict):
    """A message that is read while another thread comes with something."""

    def __init__(self, given, act):
        super().__init__(given)
        self._act, self._come = act, False

    def __len__(self):
        if not self._come:
            self._come = True
            self._act()
        return super().__len__()


@pytest.mark.parametrize("way", ["add", "add_rows", "discard"])
def test_messages_that_come_at_the_same_time_wait_for_each_other(way):
    server, other = make(), make()
    opened = server.open()
    first, second = message(server, 1), message(server, 2)
    acts = {
        "add": lambda: opened.add(7, second),
        "add_rows": lambda: opened.add_rows([7], server.layout.flat(second)[None]),
        "discard": opened.discard,
    }
    threads, refused = [], []

    def act():
        try:
            acts[way]()
        except ParticipationError:
            refused.append(way)

    def come():
        threads.append(threading.Thread(target=act))
        threads[0].start()
        threads[0].join(0.2)
        assert threads[0].is_alive()  # it waits

    opened.add(7, Slow(first, come))
    threads[0].join()
    if way == "discard":
        assert server.step == 0
        return
    opened.close()
    assert refused == [way]
    other.round({7: first})
    assert same(server, other)


def test_a_late_message_is_refused():
    server = make()
    opened = server.open()
    opened.close()
    with pytest.raises(TrainingError, match="over"):
        opened.add(1, message(server, 1))
    with pytest.raises(TrainingError, match="over"):
        opened.close()
    assert not len(next(iter(server.release.ledger.history())))


def test_users_are_of_one_kind():
    server = make()
    with server.open() as opened:
        opened.add("ann", message(server, 1))
        for stranger in (1, None, 1.5, b"ann", ["bob"]):
            with pytest.raises(ArgumentError):
                opened.add(stranger, message(server, 1))
    assert list(server.release.ledger.history()) == [["ann"]]
    with server.open() as opened, pytest.raises(ArgumentError, match="strings"):
        opened.add(3, message(server, 1))


def test_the_plan_ends():
    server = run(make())
    assert not server.eligible(["ann", "bob"]).any()
    before = state(server)
    with pytest.raises(StepsExhaustedError):
        server.round({})
    assert all(torch.equal(a, b) for a, b in zip(before, state(server), strict=True))


def test_the_record_on_devices_needs_no_ids():
    given = dataclasses.replace(plan(), on_device=("record",))
    server, named = make(given), make()
    for t in range(8):
        sent = messages(server, t)
        server.round(list(sent.values()))
        named.round(sent)
    with pytest.raises(ArgumentError, match="no ids"), make(given).open() as opened:
        opened.add(1, message(server, 1))
    assert all(len(ids) == 0 for ids in server.release.ledger.history())


# -- messages of strangers --------------------------------------------------------------------------------------------

BAD = {
    "NaN": lambda good: {**good, "one.bias": torch.full((4,), float("nan"))},
    "infinity": lambda good: {**good, "one.bias": torch.tensor([np.inf, 0, 0, 0])},
    "too large": lambda good: {**good, "one.bias": torch.full((4,), 1e300, dtype=torch.float64)},
    "wrong shape": lambda good: {**good, "one.bias": torch.ones(5)},
    "unknown name": lambda good: {**good, "two.bias": torch.ones(5)},
    "names missing": lambda good: {"one.bias": torch.ones(4)},
    "integers": lambda good: {**good, "one.bias": torch.ones(4, dtype=torch.int64)},
    "nothing": lambda good: None,
    "text": lambda good: "message",
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_message_is_zeros_and_its_user_took_part(kind):
    server, other = make(), make()
    good = {u: message(server, u) for u in (1, 2)}
    server.round({**good, 3: BAD[kind](message(server, 3))})
    other.round({**good, 3: {name: torch.zeros_like(value) for name, value in message(other, 3).items()}})
    assert same(server, other)
    assert server.step == 1


def test_rows_that_are_not_finite_are_zeros():
    server, other = make(), make()
    rows = torch.randn(3, server.layout.size, generator=torch.Generator().manual_seed(0))
    with server.open() as opened:
        bad = rows.clone()
        bad[1, 4] = float("nan")
        opened.add_rows([1, 2, 3], bad)
    with other.open() as opened:
        rows[1] = 0
        opened.add_rows([1, 2, 3], rows)
    assert same(server, other)


# -- what is not shared ------------------------------------------------------------------------------------------------


def test_only_what_the_optimizer_holds_is_shared():
    server = make()
    before = dict(zip(server.model.state_dict(), state(server), strict=True))
    run(server)
    after = server.model.state_dict()
    assert tuple(server.layout.shapes) == SHARED
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(SHARED)
    assert not server.model.personal.weight.requires_grad


def test_what_is_shared_stays_what_it_was():
    """To freeze or thaw a parameter between rounds would change what the noise was planned for."""
    server = make()
    for p, trained in ((server.model.personal.weight, True), (server.model.one.weight, False)):
        p.requires_grad_(trained)
        with pytest.raises(TrainingError):
            server.round({})
        with pytest.raises(TrainingError):
            server.open()
        p.requires_grad_(not trained)
    assert server.step == 0
    server.round({})


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_another_report_goal_is_refused():
    make(report_goal=GOAL)
    with pytest.raises(PlanError, match="batch_size=4"):
        make(report_goal=5)


def test_a_plan_with_a_selection_needs_a_table():
    """Its claim is for rows that are chosen, and messages have every coordinate."""
    selecting = planned(
        order=MinSeparation(N, 3, 3), batch_size=GOAL, epsilon=4, delta=1e-6, unit="user",
        mechanism=ao.mechanism("independent", selection=Counts(3.0)),
    )  # fmt: skip
    with pytest.raises(PlanError, match="it needs a table"):
        make(selecting)


def test_plans_of_secret_sampling_are_refused():
    with pytest.raises(PlanError, match="secret sampling"):
        make(independent(order=PoissonSampling(8, 0.1), neighbours="add-or-remove", sigma=1.0))


def test_sums_need_a_plan_that_trusts_the_devices_with_clipping():
    server = make()
    with server.open() as opened, pytest.raises(PlanError, match="on_device"):
        opened.add_sum([1], torch.zeros(server.layout.size))
    trusting = make(dataclasses.replace(plan(), on_device=("clipping",)))
    with trusting.open() as opened:
        for total in (torch.zeros(3), torch.zeros(trusting.layout.size, dtype=torch.int64)):
            with pytest.raises(ArgumentError, match="total must be"):
                opened.add_sum([1], total)
        opened.add_sum([1], torch.full((trusting.layout.size,), float("nan")))
    assert all(value.isfinite().all() for value in state(trusting))


def test_an_optimizer_serves_one_server():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    Server(plan(), model, optimizer)
    with pytest.raises(ArgumentError, match="another private run"):
        Server(plan(), model, optimizer)
    model.weight.grad = torch.ones(1, 2)
    with pytest.raises(TrainingError, match="server"):
        optimizer.step()


@pytest.mark.parametrize("given", [None, "plan"])
def test_arguments(given):
    model = nn.Linear(2, 1)
    with pytest.raises(ArgumentError, match="Plan"):
        Server(given, model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_complex_parameters_are_refused():
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(ArgumentError, match="floats"):
        Server(plan(), model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_sums_for_wide_parameters_are_wide():
    fine = 2.0**-2 + 2.0**-27  # of more digits than float32 has
    rows = []
    for sent in ({}, {1: {"weight": torch.full((1, 2), fine, dtype=torch.float64)}}):
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        server = Server(plan(), model, torch.optim.SGD(model.parameters(), lr=1.0), key=KEY)
        seen = released(server)
        server.round(sent)
        rows += seen
    assert np.allclose((rows[1] - rows[0]) * GOAL, fine, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_other_widths(dtype):
    model = nn.Linear(3, 2).to(dtype)
    server = Server(plan(), model, torch.optim.SGD(model.parameters(), lr=1.0), key=KEY)
    server.round({1: message(server, 1)})
    assert model.weight.dtype == dtype
    assert model.weight.isfinite().all()


def test_one_round_at_a_time_and_an_error_discards_it():
    server = make()
    opened = server.open()
    with pytest.raises(TrainingError, match="open already"):
        server.open()
    opened.add(1, message(server, 1))
    opened.discard()
    with pytest.raises(ZeroDivisionError), server.open() as opened:
        opened.add(1, message(server, 1))
        raise ZeroDivisionError
    assert server.step == 0
    server.round({1: message(server, 1)})
    assert same(server, _after(make(), {1: message(server, 1)}))


def _after(server, sent):
    server.round(sent)
    return server


def test_a_step_that_is_broken_off_is_not_gone_on_from(tmp_path):
    server = make(checkpoint=tmp_path / "run")
    real = server._optimizer.step

    def breaks():
        raise KeyboardInterrupt

    server._optimizer.step = breaks
    with pytest.raises(KeyboardInterrupt):
        server.round({1: message(server, 1)})
    server._optimizer.step = real
    with pytest.raises(TrainingError, match="broken off"):
        server.round({})
    with pytest.raises(TrainingError, match="broken off"):
        server.save()  # the model lacks the round
    server.close()
    assert same(make(checkpoint=tmp_path / "run"), _after(make(), {1: message(server, 1)}))


def test_the_certificate_is_the_runs():
    server = run(make())
    certificate = server.certificate()
    assert certificate.steps == 8
    assert certificate.plan.unit == "user"
    assert server.evidence().certificate == certificate


def test_cohorts_of_the_helper_keep_the_plan():
    assert all(make().eligible(cohort(t)).all() for t in range(8))


def test_an_observers_error_leaves_a_whole_round():
    server, other = make(), make()

    def fails(t, private):
        raise ZeroDivisionError

    end = server.release.on_release(fails)
    with pytest.raises(ZeroDivisionError):
        server.round({1: message(server, 1)})
    end()
    other.round({1: message(server, 1)})
    assert same(server, other)


def test_keys_are_bound_to_plans():
    """Without a key two servers have unrelated noise."""
    servers = [make(key=None) for _ in range(2)]
    for server in servers:
        server.round({})
    assert not same(*servers)
    assert NoiseSource(KEY).key == KEY
