"""What leaves a device: one clipped change and whom it is from, whatever the app returns."""

import logging

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from anyorder.errors import ArgumentError
from anyorder.federated.flower import PrivateStrategy, client_mod
from anyorder.federated.flower.messages import Instruction
from flower.in_process import Device, InProcess, plan, server

SHARED = {"w": torch.zeros(2, 3), "b": torch.ones(3)}


def instruction(**values):
    return Instruction(**{"step": 4, "clip_norm": 1.0, "cut": 1.0, "grid": None, "on_device": ()} | values)


def asked(told=None, *, kind="train", arrays=SHARED):
    InProcess()  # sets what a message is sent from
    record = ArrayRecord({name: Array(value.numpy().copy()) for name, value in arrays.items()})
    records = {"arrays": record, "config": ConfigRecord({"lr": 0.1})}
    if told is not None:
        records["anyorder"] = told.record()
    return Message(RecordDict(records), 1, kind)


def device(after=None, user="ann", **options):
    """A device whose app returns these parameters, and much besides."""
    made = Device(1, user, **options)
    made.answer = lambda message: answered(after, message)
    return made


def answered(after, message):
    arrays = {name: Array(value.numpy()) for name, value in after.items()}
    metrics = MetricRecord({"num-examples": 31, "train_loss": 0.125})
    words = ConfigRecord({"note": "a secret"})
    return Message(RecordDict({"model": ArrayRecord(arrays), "metrics": metrics, "words": words}), reply_to=message)


def moved(size):
    return {name: value + size for name, value in SHARED.items()}


def norm(reply):
    return float(
        torch.cat([v.double().reshape(-1) for v in reply.content["arrays"].to_torch_state_dict().values()]).norm()
    )


@pytest.mark.parametrize(("size", "expected"), [(0.0, 0.0), (0.1, 0.3), (5.0, 1.0), (float("nan"), 0.0), (1e30, 1.0)])
def test_one_clipped_change_and_a_user_leave_the_device(size, expected):
    extra = {"steps": torch.tensor([7]), "buffer": torch.ones(4)}
    reply = device(moved(size) | extra)(asked(instruction()))
    assert norm(reply) == pytest.approx(expected, rel=1e-5)
    assert norm(reply) <= 1.0
    assert set(reply.content) == {"arrays", "anyorder"}
    assert set(reply.content["arrays"]) == {"w", "b"}
    assert dict(reply.content["anyorder"]) == {"round": 4, "user": "ann"}


def test_an_app_that_trains_what_it_was_handed_moves_the_model_all_the_same():
    made = Device(1, "ann")

    def answer(message):
        arrays = message.content["arrays"].to_torch_state_dict()
        for value in arrays.values():
            value.add_(0.1)
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    made.answer = answer
    assert norm(made(asked(instruction()))) == pytest.approx(0.3, rel=1e-5)


def test_it_is_cut_where_the_server_says_which_may_be_above_the_norm():
    reply = device(moved(5.0))(asked(instruction(clip_norm=1.0, cut=2.0)))
    assert norm(reply) == pytest.approx(2.0, rel=1e-5)
    assert norm(reply) <= 2.0


@pytest.mark.parametrize("kind", ["evaluate", "query", "train.special"])
def test_nothing_but_training_is_answered(kind):
    made = device(moved(0.1))
    made.app.train("special")(lambda message, context: made.answer(message))
    made.app.query()(lambda message, context: made.answer(message))
    reply = made(asked(instruction(), kind=kind))
    assert reply.has_error()
    assert "train messages alone" in reply.error.reason


def test_servers_that_add_no_noise_are_not_answered():
    reply = device(moved(0.1))(asked())
    assert "not from anyorder.federated.flower.PrivateStrategy" in reply.error.reason


def broken(message):
    raise ValueError("loss 0.125 of patient 17")


def without_w(message):
    return answered({"b": SHARED["b"]}, message)


def other_shape(message):
    return answered(SHARED | {"w": torch.zeros(3, 2)}, message)


def integers(message):
    return answered(SHARED | {"w": torch.zeros(2, 3, dtype=torch.int64)}, message)


def two_records(message):
    reply = answered(SHARED, message)
    reply.content["more"] = ArrayRecord({"w": Array(SHARED["w"].numpy())})
    return reply


def ended(message):
    raise SystemExit("loss 0.125 of patient 17")


FAILURES = [broken, without_w, other_shape, integers, two_records, ended]


@pytest.mark.parametrize("answer", FAILURES)
def test_a_training_that_fails_sends_what_one_that_changes_nothing_sends(answer, caplog):
    made = Device(1, "ann")
    made.answer = answer
    with caplog.at_level(logging.ERROR, logger="anyorder.federated.flower"):
        reply = made(asked(instruction()))
    assert caplog.records[-1].exc_info is not None  # why stays on the device
    idle = device(moved(0.0))(asked(instruction()))
    assert list(reply.content) == list(idle.content)
    for name, array in idle.content["arrays"].items():
        assert reply.content["arrays"][name].data == array.data
    assert dict(reply.content["anyorder"]) == dict(idle.content["anyorder"])


def test_a_training_that_fails_is_counted_on_the_device():
    counter = Counter()
    made = Device(1, record=lambda context: counter)
    made.answer = broken
    reply = made(asked(instruction(on_device=("record",))))
    assert norm(reply) == 0.0
    assert counter.taken == [4]


class Counter:
    """A record on the device, as the mod uses it."""

    def __init__(self, may=True):
        self.answer, self.taken = may, []

    def may(self, step):
        return self.answer

    def take(self, step):
        self.taken.append(step)


def test_with_a_record_on_the_device_no_name_leaves_it():
    counter = Counter()
    told = instruction(on_device=("record",))
    reply = device(moved(0.1), record=lambda context: counter)(asked(told))
    assert dict(reply.content["anyorder"]) == {"round": 4}
    assert counter.taken == [4]
    made = device(moved(0.1), record=lambda context: Counter(may=False))
    assert made(asked(told)).has_error()
    assert made.trained == 0


def test_the_record_is_written_before_the_message_leaves():
    class Full(Counter):
        def take(self, step):
            raise OSError("no space left on device")

    reply = device(moved(0.1), record=lambda context: Full())(asked(instruction(on_device=("record",))))
    assert reply.has_error()


@pytest.mark.parametrize(
    ("own", "told", "words"),
    [
        ({}, ("record",), "this one has none"),
        ({"record": lambda context: Counter()}, (), "at the server, by user"),
        ({}, ("clipping",), "sums integers under masks"),
        ({}, ("everything",), "on_device must be"),
    ],
)
def test_plan_and_device_must_agree_on_what_is_trusted(own, told, words):
    reply = device(moved(0.1), **own)(asked(instruction(on_device=told)))
    assert words in reply.error.reason


@pytest.mark.parametrize(
    "values",
    [{"round": "4"}, {"clip_norm": float("inf")}, {"cut": 0.0}, {"grid": -1.0}, {"on_device": "clipping"}, {"cut": 1}],
)
def test_an_instruction_that_is_none_is_not_followed(values):
    message = asked(instruction())
    message.content["anyorder"] = ConfigRecord(dict(message.content["anyorder"]) | values)
    reply = device(moved(0.1))(message)
    assert "the server must tell" in reply.error.reason


def test_who_says_who_it_is():
    with pytest.raises(ArgumentError, match="got neither"):
        client_mod()
    with pytest.raises(ArgumentError, match="got both"):
        client_mod(user="ann", record=lambda context: Counter())
    made = Device(1, mods=[client_mod(user=lambda context: "")])
    assert "user must be a word" in made(asked(instruction())).error.reason
    made = Device(1, mods=[client_mod(user="bob")])
    made.answer = lambda message: answered(moved(0.1), message)
    assert made(asked(instruction())).content["anyorder"]["user"] == "bob"


def test_records_on_devices_leave_none_at_the_server():
    run = server(plan(rounds=3, b=2, k=1, on_device=("record",)))
    counters = [Counter(), Counter(), Counter(may=False)]
    devices = [Device(i, record=lambda context, own=own: own) for i, own in enumerate(counters)]
    PrivateStrategy(run, timeout=0.3).start(InProcess(*devices))
    assert run.step == 3
    assert [len(list(batch)) for batch in run.release.ledger.history()] == [0, 0, 0]
    assert [counter.taken for counter in counters] == [[0, 1, 2], [0, 1, 2], []]
