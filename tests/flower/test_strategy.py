"""Flower's messages become rounds of the server, and nothing else of them does."""

import dataclasses
import io
import logging
import os

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

import anyorder as ao
from anyorder.errors import ArgumentError, PlanError, TrainingError
from anyorder.federated.flower import PrivateStrategy
from anyorder.federated.flower.messages import array_of
from flower.in_process import Device, InProcess, fixed, plan, server, weights


def start(run, *devices, timeout=0.3, **options):
    grid = InProcess(*devices)
    PrivateStrategy(run, timeout=timeout, **options).start(grid)
    return grid


def reference(run, rounds=4, users=range(3), silent=()):
    """The same rounds without Flower; `silent` users are in them with zeros."""
    arrays = {name: p.detach() for name, p in run.model.named_parameters()}
    for _ in range(rounds):
        run.round({f"user{i}": None if i in silent else fixed(arrays, i) for i in users})
    return weights(run)


def who(run):
    """The users of each round taken."""
    batches = run.release.ledger.history()
    return [sorted(str(user) for user in batch) for batch in batches]


def of_user(user, **records):
    """A reply function that puts other records into what the device sends."""

    def reply(message):
        content = RecordDict(dict(message.content.items()) | records)
        return Message(content, metadata=message.metadata)

    return reply


def test_rounds_over_flower_are_those_of_the_server():
    run = server(plan())
    grid = start(run, *(Device(i) for i in range(3)))
    assert run.step == 4
    assert torch.allclose(weights(run), reference(server(plan())), atol=2e-6)
    assert who(run) == [["user0", "user1", "user2"]] * 4
    first = grid.sent[0].content
    assert set(first["arrays"]) == {name for name, _ in run.model.named_parameters()}  # and no buffers
    told = [dict(message.content["anyorder"]) for message in grid.sent]
    assert [record["round"] for record in told] == [t for t in range(4) for _ in range(3)]
    assert {record["clip_norm"] for record in told} == {1.0}
    assert run.model.norm.num_batches_tracked == 0


def test_the_mean_is_over_the_report_goal_whoever_answers():
    run = server(plan(goal=3))
    devices = [Device(i) for i in range(3)]
    devices[2].reply = failed
    start(run, *devices)
    assert torch.allclose(weights(run), reference(server(plan()), users=range(2)), atol=2e-6)
    assert who(run) == [["user0", "user1"]] * 4


def test_a_long_message_is_cut_though_the_client_does_not():
    def long(message):
        arrays = message.content["arrays"].to_numpy_ndarrays()
        names = list(message.content["arrays"])
        record = ArrayRecord({name: Array(1e6 * value) for name, value in zip(names, arrays, strict=True)})
        return of_user("user0", arrays=record)(message)

    honest, run = server(plan(rounds=1, goal=2)), server(plan(rounds=1, goal=2))
    start(run, Device(0, reply=long), Device(1))
    honest.round({"user1": fixed(dict(honest.model.named_parameters()), 1)})
    assert 0.9 < float((weights(run) - weights(honest)).norm()) * 2 <= 1.0 + 1e-5


def empty_arrays(message):
    return of_user("user2", arrays=ArrayRecord())(message)


def no_arrays(message):
    content = RecordDict({"anyorder": message.content["anyorder"]})
    return Message(content, metadata=message.metadata)


def with_arrays(make):
    def reply(message):
        record = ArrayRecord({name: make(array) for name, array in message.content["arrays"].items()})
        return of_user("user2", arrays=record)(message)

    return reply


NO_MESSAGES = {
    "nan": with_arrays(lambda array: Array(np.full(array.shape, np.nan, np.float32))),
    "integers": with_arrays(lambda array: Array(np.ones(array.shape, np.int64))),
    "long": with_arrays(lambda array: Array(np.ones((*array.shape, 2), np.float32))),
    "no array": with_arrays(lambda array: Array("float32", array.shape, "numpy.ndarray", b"\x93NUMPY\x01\x00v\x00{")),
    "a pickle": with_arrays(lambda array: Array("float32", array.shape, "numpy.ndarray", b"cos\nsystem\n(S'x'\ntR.")),
    "empty": empty_arrays,
    "nothing": no_arrays,
}


@pytest.mark.parametrize("reply", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_zeros_and_its_user_was_there(reply, caplog):
    run = server(plan())
    with caplog.at_level(logging.DEBUG):
        start(run, Device(0), Device(1), Device(2, reply=reply))
    assert torch.allclose(weights(run), reference(server(plan()), silent=(2,)), atol=2e-6)
    assert who(run) == [["user0", "user1", "user2"]] * 4


def test_bytes_of_a_client_run_no_code_and_are_arrays_or_nothing(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    def saved(write, *values, **options):
        file = io.BytesIO()
        write(file, *values, **options)
        return file.getvalue()

    assert array_of(saved(np.save, np.array([Trap()], dtype=object), allow_pickle=True)) is None
    assert not (tmp_path / "trapped").exists()
    assert array_of(saved(np.savez, np.ones(3))) is None  # an archive of arrays is none
    assert array_of(b"") is None
    assert np.array_equal(array_of(saved(np.save, np.arange(3))), np.arange(3))


def other_round(message):
    return of_user("user2", anyorder=ConfigRecord({"round": 99, "user": "user2"}))(message)


def failed(message):
    return Message(Error(code=2, reason="loss was 0.125"), metadata=message.metadata)


def from_nobody(message):
    return of_user("user2", anyorder=ConfigRecord({"round": message.content["anyorder"]["round"]}))(message)


def a_long_name(message):
    record = ConfigRecord({"round": message.content["anyorder"]["round"], "user": "x" * 10_000})
    return of_user("user2", anyorder=record)(message)


@pytest.mark.parametrize("reply", [other_round, failed, from_nobody, a_long_name, lambda message: None])
def test_late_failed_and_nameless_replies_are_left_out(reply):
    run = server(plan())
    start(run, Device(0), Device(1), Device(2, reply=reply))
    assert torch.allclose(weights(run), reference(server(plan()), users=range(2)), atol=2e-6)
    assert who(run) == [["user0", "user1"]] * 4


def test_a_user_on_two_devices_is_counted_and_added_once():
    run = server(plan(rounds=2))
    start(run, Device(0, "ann"), Device(1, "ann"), Device(2, "bob"))
    assert who(run) == [["ann", "bob"]] * 2


def test_a_reply_that_comes_again_is_added_once():
    run = server(plan(rounds=2))
    grid = InProcess(Device(0), Device(1), Device(2))
    strategy = PrivateStrategy(run, timeout=0.3)

    def twice(replies):
        for reply in replies:
            yield reply
            yield reply

    for t in (1, 2):
        messages = list(strategy.configure_train(t, strategy._arrays(), ConfigRecord(), grid))
        replies = list(strategy._replies(grid, messages))
        strategy.aggregate_train(t, [*replies, *replies] if t == 1 else twice(replies))
    assert torch.allclose(weights(run), reference(server(plan(rounds=2)), rounds=2), atol=2e-6)


def test_without_names_too_a_reply_that_comes_again_is_added_once():
    """No ledger of users stands behind it: the node that was asked has answered."""

    class Counter:
        def may(self, step):
            return True

        def take(self, step):
            pass

    nameless = plan(rounds=1, on_device=("record",))
    run, once = server(nameless), server(nameless)
    grid = InProcess(*(Device(i, record=lambda context: Counter()) for i in range(3)))
    strategy = PrivateStrategy(run, timeout=0.3)
    messages = list(strategy.configure_train(1, strategy._arrays(), ConfigRecord(), grid))
    replies = sorted(strategy._replies(grid, messages), key=lambda reply: reply.metadata.src_node_id)
    strategy.aggregate_train(1, [replies[0], replies[0], replies[1], replies[0], replies[2]])
    arrays = {name: p.detach() for name, p in once.model.named_parameters()}
    once.round([fixed(arrays, i) for i in range(3)])
    assert torch.allclose(weights(run), weights(once), atol=2e-6)


def test_a_name_that_a_device_tells_though_nobody_asked_stops_nothing():
    class Counter:
        def may(self, step):
            return True

        def take(self, step):
            pass

    def telling(message):
        record = ConfigRecord({"round": message.content["anyorder"]["round"], "user": "ann"})
        return of_user("ann", anyorder=record)(message)

    run, silent = (server(plan(rounds=2, on_device=("record",))) for _ in range(2))
    start(run, *(Device(i, record=lambda context: Counter(), reply=telling) for i in range(3)))
    start(silent, *(Device(i, record=lambda context: Counter()) for i in range(3)))
    assert torch.allclose(weights(run), weights(silent), atol=2e-6)
    assert who(run) == [[], []]


def test_a_user_who_is_refused_takes_nobodys_place():
    run = server(plan(rounds=1, goal=2))
    grid = InProcess(Device(0, "ann"), Device(1, "ann"), Device(2, "bob"))
    strategy = PrivateStrategy(run, timeout=0.3, cohort=3)
    messages = list(strategy.configure_train(1, strategy._arrays(), ConfigRecord(), grid))
    replies = sorted(strategy._replies(grid, messages), key=lambda reply: reply.metadata.src_node_id)
    strategy.aggregate_train(1, replies)
    assert who(run) == [["ann", "bob"]]


def test_a_reply_of_the_round_before_is_left_out():
    run = server(plan(rounds=2))
    grid = InProcess(Device(0), Device(1), Device(2))
    strategy = PrivateStrategy(run, timeout=0.3)
    messages = list(strategy.configure_train(1, strategy._arrays(), ConfigRecord(), grid))
    old = list(strategy._replies(grid, messages))
    strategy.aggregate_train(1, old[:1])
    list(strategy.configure_train(2, strategy._arrays(), ConfigRecord(), grid))
    strategy.aggregate_train(2, old)
    assert len(who(run)[0]) == 1
    assert who(run)[1] == []


def test_users_whom_the_plan_does_not_allow_are_refused_and_then_not_asked():
    run = server(plan(rounds=6, goal=2, b=3, k=2))
    devices = [Device(0), Device(1)]
    start(run, *devices)
    assert who(run) == [["user0", "user1"], [], [], ["user0", "user1"], [], []]
    assert [device.trained for device in devices] == [2, 2]  # the node's user was known by the second round


def test_a_device_that_hides_its_past_is_refused_by_the_ledger():
    """A node that comes under a new number is asked; its user is known all the same."""
    run = server(plan(rounds=2, goal=2, b=2, k=1))
    PrivateStrategy(run, timeout=0.3).start(InProcess(Device(0), Device(1)), num_rounds=1)
    start(run, Device(5, "user0"), Device(6, "user9"))
    assert who(run) == [["user0", "user1"], ["user9"]]


def test_cohorts_take_turns_and_all_whom_a_round_asked_are_in_it():
    run = server(plan(rounds=4, goal=2))
    devices = [Device(i) for i in range(4)]
    start(run, *devices)
    assert [device.trained for device in devices] == [2, 2, 2, 2]
    run = server(plan(rounds=1, goal=2))
    start(run, *(Device(i) for i in range(4)), cohort=4)
    assert len(who(run)[0]) == 4  # whoever is faster, nobody's message chooses whose is left out


def test_a_training_that_fails_on_its_data_changes_nothing_but_its_own_message():
    """Neighbours: all messages of a user are zero; its training raises. Everybody else is where they were."""

    def seen(change):
        run = server(plan(rounds=4, goal=2, b=2, k=2))
        sums = []
        run.release.on_release(lambda step, vector: sums.append(vector.clone()))
        devices = [Device(0, change=change), *(Device(i) for i in range(1, 6))]
        start(run, *devices, cohort=3, min_nodes=1)
        return who(run), torch.stack(sums)

    fails, zeros = seen(lambda arrays: 1 / 0), seen(lambda arrays: {n: torch.zeros_like(v) for n, v in arrays.items()})
    assert fails[0] == zeros[0]
    assert torch.equal(fails[1], zeros[1])
    assert any("user0" in users for users in fails[0])


class Hostile:
    """Raises at whatever it is asked, but what it was told to answer."""

    def __init__(self, **answers):
        self.__dict__.update(answers)

    def __getattr__(self, name):
        raise RuntimeError("the loss of patient 17")


def hostile(part):
    """A reply function: of the right node, and with something in it that raises when it is looked at."""

    def reply(message):
        whole = Hostile(metadata=message.metadata, has_error=lambda: False, has_content=lambda: True)
        own = message.content
        answers = {"config_records": own.config_records, "array_records": own.array_records}
        match part:
            case "metadata":
                return Hostile(metadata=Hostile(reply_to_message_id=message.metadata.reply_to_message_id))
            case "content":
                return whole
            case "records":
                answers["config_records"] = Hostile()
            case "user":
                answers["config_records"] = {"anyorder": {"round": own["anyorder"]["round"], "user": Named("user2")}}
            case "arrays":
                answers["array_records"] = Hostile()
            case "array":
                answers["array_records"] = {"arrays": {name: Hostile() for name in own["arrays"]}}
            case "data":
                answers["array_records"] = {"arrays": {name: Hostile(data=Hostile()) for name in own["arrays"]}}
        whole.content = Hostile(**answers)
        return whole

    return reply


class Named(str):
    __slots__ = ()

    def __hash__(self):
        raise RuntimeError("the loss of patient 17")


@pytest.mark.parametrize("part", ["metadata", "content", "records", "user", "arrays", "array", "data"])
def test_a_reply_that_raises_when_it_is_looked_at_stops_nobody(part):
    run = server(plan(rounds=2))
    start(run, Device(0), Device(1), Device(2, reply=hostile(part)))
    there = part in {"arrays", "array", "data"}  # its message is none, and counts as zeros
    assert who(run) == [["user0", "user1", *["user2"] * there]] * 2
    assert torch.allclose(weights(run), reference(server(plan(rounds=2)), rounds=2, users=range(2)), atol=2e-6)


def test_nothing_that_has_no_noise_is_read_logged_or_returned(caplog, capfd):
    """Metrics that differ, of clients that answer or fail, leave everything that can be seen as it is."""

    def seen(examples, loss, failing):
        run = server(plan())
        devices = [Device(i) for i in range(4)]

        def metrics(message):
            record = MetricRecord({"num-examples": examples, "train_loss": loss})
            return of_user("user1", metrics=record)(message)

        devices[1].reply = metrics
        if failing:
            devices[3].reply = lambda message: Message(Error(code=2, reason=f"loss {loss}"), metadata=message.metadata)
        else:
            devices[3].reply = lambda message: None
        caplog.clear()
        with caplog.at_level(logging.DEBUG):
            result = PrivateStrategy(run, timeout=0.3, cohort=4).start(InProcess(*devices))
        assert not result.train_metrics_clientapp
        assert not result.evaluate_metrics_clientapp
        arrays = np.concatenate([value.ravel() for value in result.arrays.to_numpy_ndarrays()])
        words = [record.getMessage() for record in caplog.records if "finished in" not in record.getMessage()]
        return arrays.tobytes(), words, capfd.readouterr().out

    assert seen(10, 0.5, True) == seen(9_000, 7.0, False)


def test_there_is_no_evaluation_on_clients():
    run = server(plan(rounds=1))
    strategy = PrivateStrategy(run)
    assert list(strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), None)) == []
    assert strategy.aggregate_evaluate(1, [object()]) is None
    said = []
    PrivateStrategy(run, timeout=0.3).start(
        InProcess(*(Device(i) for i in range(3))),
        evaluate_fn=lambda t, arrays: said.append(t) or MetricRecord({"accuracy": 0.1}),
    )
    assert said == [0, 1]


def test_what_apps_pass_to_other_strategies_is_refused():
    run = server(plan(rounds=1))
    grid = InProcess(Device(0))
    with pytest.raises(ArgumentError, match="leave initial_arrays"):
        PrivateStrategy(run).start(grid, initial_arrays=ArrayRecord())
    with pytest.raises(ArgumentError, match="evaluate_config"):
        PrivateStrategy(run).start(grid, evaluate_config=ConfigRecord())
    with pytest.raises(ArgumentError, match="num_rounds"):
        PrivateStrategy(run).start(grid, num_rounds=2)
    with pytest.raises(ArgumentError, match="cohort"):
        PrivateStrategy(run, cohort=2)
    with pytest.raises(TrainingError, match="next round is 1"):
        PrivateStrategy(run).aggregate_train(2, [])
    assert run.step == 0


def test_without_clients_no_round_is_spent():
    run = server(plan(rounds=1))
    with pytest.raises(TrainingError, match="no client was connected"):
        PrivateStrategy(run, timeout=0.3).start(InProcess())
    assert run.step == 0


def test_a_grid_that_breaks_leaves_the_round_to_the_resumed_run(tmp_path):
    class Breaking(InProcess):
        def pull_messages(self, message_ids):
            if len(self.sent) > 6:
                raise ConnectionError("the SuperLink is gone")
            return super().pull_messages(message_ids)

    path = tmp_path / "run.checkpoint"
    first = server(plan(), checkpoint=path)
    with pytest.raises(ConnectionError):
        PrivateStrategy(first, timeout=0.3).start(Breaking(*(Device(i) for i in range(3))))
    assert first.step == 2
    first.close()
    run = server(plan(), checkpoint=path)
    assert run.step == 2
    start(run, *(Device(i) for i in range(3)))
    assert torch.allclose(weights(run), reference(server(plan())), atol=2e-6)
    assert who(run) == [["user0", "user1", "user2"]] * 4


def test_what_apps_are_told_and_what_is_said_of_each_round():
    run = server(plan(rounds=2))
    grid = InProcess(*(Device(i) for i in range(3)))
    result = PrivateStrategy(run, timeout=0.3).start(
        grid,
        train_config=ConfigRecord({"lr": 0.25}),
        evaluate_fn=lambda t, arrays: MetricRecord({"round": t}) if t else None,
    )
    assert {message.content["config"]["lr"] for message in grid.sent} == {0.25}
    assert grid.sent[-1].content["config"]["server-round"] == 2
    assert {t: said["round"] for t, said in result.evaluate_metrics_serverapp.items()} == {1: 1, 2: 2}


def test_where_the_norm_moves_devices_leave_room_above_it():
    adaptive = ao.clipping.Adaptive(quantile=0.5)
    moving = plan(rounds=8, mechanism="independent")
    run = server(moving, rule=adaptive)
    grid = start(run, *(Device(i) for i in range(3)))
    told = [grid.sent[3 * t].content["anyorder"] for t in range(8)]
    assert all(record["cut"] == 2 * record["clip_norm"] for record in told)
    assert len({record["clip_norm"] for record in told}) > 1


def test_the_certificate_of_the_run_verifies(tmp_path):
    run = server(plan())
    start(run, *(Device(i) for i in range(3)))
    run.certificate().save(tmp_path / "run.privacy.json")
    ao.verify(tmp_path / "run.privacy.json")


def test_a_cohort_of_fixed_size_needs_neighbours_who_stay():
    other = dataclasses.replace(plan(), neighbours="add-or-remove")
    with pytest.raises(PlanError, match="would ask somebody else"):
        PrivateStrategy(server(other))
