"""Simulations: the server of a deployment, the same bits for any number of processes, and nothing shown but models."""

import importlib.util
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import anyorder as ao
import processes
from anyorder.errors import ArgumentError, PlanError
from anyorder.federated import CheckIn, LocalTraining, Server, assist, simulate
from anyorder.federated.cohorts import UniformAvailability, choose_cohort
from anyorder.federated.simulation import outcome, public_source
from anyorder.participation import MinSeparation
from anyorder.plan.planner import plan_at_sigma

SCRIPT = Path(__file__).with_name("simulated.py")
spec = importlib.util.spec_from_file_location("simulated", SCRIPT)
simulated = importlib.util.module_from_spec(spec)
spec.loader.exec_module(simulated)
from_here = simulated.start, simulated.examples, simulated.weights, simulated.whole_run
start, examples, weights, whole_run = from_here


@pytest.fixture(scope="module")
def reference():
    return whole_run()


def history(server):
    return [list(units) for units in server.release.ledger.history()]


def test_the_same_seed_and_key_give_the_same_bits_and_another_seed_others(reference):
    models, server = reference
    again, twin = whole_run()
    assert torch.equal(models, again)
    assert history(server) == history(twin)
    others, third = whole_run(seed=4)
    assert not torch.equal(models, others)
    assert history(server) != history(third)


def test_one_thread_for_the_same_bits_and_afterwards_all_is_as_before(reference):
    threads, server, seen = torch.get_num_threads(), start(), []
    torch.set_num_threads(2)
    try:
        before = torch.get_rng_state()
        options = {"availability": UniformAvailability(0.8), "drop_out": 0.2, "seed": 3}
        note = lambda done, model: seen.append(torch.get_num_threads())  # noqa: E731
        simulate(server, examples(), simulated.TRAINING, on_round=note, **options)
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_num_threads(threads)
    assert set(seen) == {1}
    assert torch.equal(weights(server.model), reference[0][-1])


def test_a_simulation_is_the_servers_rounds_on_clients_one_by_one(reference):
    """A plain loop: ask, train each client by itself, hand its message to `server.round`."""
    models, _ = reference
    server, users, source = start(), examples(), public_source(3)
    ids = list(users)
    for t, expected in enumerate(models):
        present = UniformAvailability(0.8).present(source.derive(b"availability"), t, len(ids))
        candidates = present & server.eligible(ids)
        cohort = choose_cohort(source.derive(b"cohort"), t, candidates, simulated.GOAL, drop_out=0.2).added
        words = source.derive(b"client").words(t, 0, 2 * len(ids)).view(np.uint64) >> np.uint64(1)
        messages = {}
        for place in cohort.tolist():
            change = simulated.TRAINING.change(server.model, server.layout, users[ids[place]], int(words[place]))
            messages[ids[place]] = server.layout.named(change)
        server.round(messages)
        torch.testing.assert_close(weights(server.model), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("last", [1, 4])
def test_a_simulation_that_was_stopped_goes_on_from_the_servers_checkpoint(tmp_path, reference, last):
    models, _ = reference
    options = {"availability": UniformAvailability(0.8), "drop_out": 0.2, "seed": 3}

    class Stopped(Exception):
        pass

    def stop(done, model):
        if done == last:
            raise Stopped

    first = start(tmp_path / "run.ckpt")
    with pytest.raises(Stopped):
        simulate(first, examples(), simulated.TRAINING, on_round=stop, **options)
    first.close()
    second, seen = start(tmp_path / "run.ckpt"), []
    simulate(second, examples(), simulated.TRAINING, on_round=lambda done, model: seen.append(done), **options)
    assert seen == list(range(last + 1, simulated.ROUNDS + 1))
    assert torch.equal(weights(second.model), models[-1])


def test_the_ledger_is_kept_to_and_what_came_gives_the_final_epsilon(reference):
    _, server = reference
    last = {}
    for t, users in enumerate(history(server)):
        assert 0 < len(users) <= simulated.GOAL
        for user in users:
            assert t - last.get(user, -9) >= simulated.APART
            last[user] = t
    twin = start()
    made = simulate(twin, examples(), simulated.TRAINING, availability=UniformAvailability(0.3), seed=1)
    assert made.rounds == simulated.ROUNDS
    assert made.planned == (3, simulated.APART)
    most, least = made.realised
    steps = {}
    for t, users in enumerate(history(twin)):
        for user in users:
            steps.setdefault(user, []).append(t)
    assert most == max(map(len, steps.values())) <= 3
    gaps = [b - a for own in steps.values() for a, b in pairwise(own)]
    assert least == min(gaps) >= simulated.APART
    assert made.realised_epsilon <= made.planned_epsilon == pytest.approx(8, rel=1e-6)
    assert made.delta == 1e-5


@pytest.mark.parametrize("stop", [KeyboardInterrupt, TimeoutError])
def test_a_simulation_that_was_stopped_half_way_claims_nothing_realised(stop):
    """Who watches the models may stop at a good one: nobody stated that it was for another reason."""

    def watch(done, model):
        if done == 4:
            raise stop

    server = start()
    with pytest.raises(stop):
        simulate(server, examples(), simulated.TRAINING, on_round=watch)
    assert server.step == 4
    assert outcome(server).realised is outcome(server).realised_epsilon is None
    assert server.certificate().stated == ()


def test_a_timer_in_hours_gives_a_separation_in_rounds_that_is_known_afterwards():
    clock = CheckIn(hours=6.0, spread=3.0, round_hours=1.0, swing=0.5)
    n, users = 30, examples(80)
    promised = clock.separation(n, len(users), 8, 6)
    plan = ao.plan(order=MinSeparation(n, promised), batch_size=6, epsilon=8, delta=1e-5, mechanism="tree", unit="user")
    model = simulated.network()
    server = Server(plan, model, torch.optim.SGD(model.parameters(), lr=1.0), key=simulated.KEY)
    made = simulate(server, users, simulated.TRAINING, availability=clock)
    assert made.realised[1] >= promised
    assert made.realised[0] < made.planned[0]  # over-selection and chance: nobody came as often as could be
    assert made.realised_epsilon < 0.95 * made.planned_epsilon


def test_too_few_make_a_round_whose_divisor_is_the_report_goal():
    """Two of ten answer, with a change of 1 each: the model moves by two tenths, not by one."""

    class Two:
        def present(self, source, round, num_users):
            return np.arange(num_users) < 2

        def separation(self, num_rounds, num_users, cohort, report_goal):
            return 1

    def run(availability, rounds):
        plan = plan_at_sigma(
            1e-9, order=MinSeparation(rounds, 1), batch_size=10, delta=1e-5, mechanism="independent",
            clip_norm=4.0, unit="user",
        )  # fmt: skip
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        server = Server(plan, model, torch.optim.SGD(model.parameters(), lr=1.0), key=simulated.KEY)
        one = LocalTraining(lambda output, target: -output.mean(), lr=1.0)  # each client's change is +1
        users = [(torch.ones(1, 1), torch.zeros(1))] * 30
        simulate(server, users, one, availability=availability)
        return model.weight.item(), [list(units) for units in server.release.ledger.history()]

    moved, came = run(Two(), 3)
    assert came == [[0, 1]] * 3
    assert moved == pytest.approx(3 * 0.2, abs=1e-4)

    class Nobody(Two):
        def present(self, source, round, num_users):
            return np.zeros(num_users, np.bool_)

    moved, came = run(Nobody(), 3)
    assert came == [[], [], []]  # noise alone, and a round all the same
    assert moved == pytest.approx(0, abs=1e-4)


def test_what_a_clients_training_raises_leaves_no_trace_and_the_run_can_go_on(reference):
    users = examples()
    broken = {**users, **{user: (x[:, :3], y) for user, (x, y) in list(users.items())[::2]}}
    server = start()
    with pytest.raises(RuntimeError):
        simulate(server, broken, simulated.TRAINING, availability=UniformAvailability(0.8), drop_out=0.2, seed=3)
    assert server.step == 0
    assert history(server) == []
    simulate(server, users, simulated.TRAINING, availability=UniformAvailability(0.8), drop_out=0.2, seed=3)
    assert torch.equal(weights(server.model), reference[0][-1])


def test_clients_whose_change_is_not_finite_are_zeros_that_nobody_hears_of(capsys):
    users = examples()
    bad = {**users, "user 7": (torch.full((4, 5), float("nan")), torch.zeros(4, dtype=torch.long))}
    server = start()
    simulate(server, bad, simulated.TRAINING, seed=3, progress=False)
    assert any("user 7" in units for units in history(server))
    assert weights(server.model).isfinite().all()
    assert capsys.readouterr() == ("", "")


def test_the_bar_shows_rounds_and_nothing_else(capsys):
    simulate(start(), examples(), simulated.TRAINING, progress=True)
    shown = capsys.readouterr().out
    assert "6/6 rounds" in shown
    assert not [word for word in ("loss", "norm", "clients", "user") if word in shown]


def test_what_makes_no_sense_is_refused_before_a_round():
    server = start()
    for match, options in {
        "over_selection": {"over_selection": 0.5},
        "drop_out": {"drop_out": 1.0},
        "seed": {"seed": -1},
    }.items():
        with pytest.raises(ArgumentError, match=match):
            simulate(server, examples(), simulated.TRAINING, **options)
    with pytest.raises(ArgumentError, match="at least one user"):
        simulate(server, {}, simulated.TRAINING)

    class Wrong:
        def present(self, source, round, num_users):
            return np.ones(num_users)

    with pytest.raises(ArgumentError, match=r"must return \(60,\) bool, got float64"):
        simulate(server, examples(), simulated.TRAINING, availability=Wrong())
    with pytest.raises(ArgumentError, match="ranks after the first"):
        assist(simulated.network(), examples(), simulated.TRAINING)
    moving = start(neighbours="add-or-remove", mechanism="independent")
    with pytest.raises(PlanError, match="another one would be asked"):
        simulate(moving, examples(), simulated.TRAINING)
    with pytest.raises(PlanError, match="leaves the record to devices"):
        simulate(start(on_device=("record",)), examples(), simulated.TRAINING)
    assert server.step == moving.step == 0


def test_two_processes_give_the_bits_of_one_and_hear_of_each_others_ends(tmp_path, reference):
    done = processes.run_on_two_ranks("-W", "ignore", SCRIPT, tmp_path)
    for rank in (0, 1):
        assert (tmp_path / f"done {rank}").exists(), done.stderr
    assert torch.equal(torch.load(tmp_path / "models"), reference[0])
    assert torch.equal(torch.load(tmp_path / "models of many blocks"), simulated.many_blocks())
    assert (tmp_path / "noticed").exists(), done.stderr


def test_too_few_users_for_the_rounds_are_known_before():
    few = dict(list(examples().items())[:40])
    with pytest.warns(
        UserWarning, match="40 users in at most 3 rounds each are 120 messages, and 6 rounds of 24 want 144"
    ):
        simulate(start(), few, simulated.TRAINING)


def test_what_is_of_another_kind_is_named():
    server = start()
    with pytest.raises(ArgumentError, match=r"Uniform\(0.3\), got float"):
        simulate(server, examples(), simulated.TRAINING, availability=0.3)
    with pytest.raises(ArgumentError, match="messages must be a dict .* got NoneType"):
        server.round(None)
    with pytest.raises(ArgumentError, match="users must be a list or an array of ids, got int"):
        server.eligible(3)
    assert server.step == 0
    server.round({})  # nothing stayed open
