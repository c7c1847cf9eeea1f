"""Integers under Flower's masks: the model of the plain sum, bit for bit, whoever drops out."""

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from anyorder.errors import PlanError, TrainingError
from anyorder.federated.flower import PrivateStrategy
from anyorder.federated.flower.messages import Masking
from anyorder.federated.flower.server import threshold_of
from anyorder.federated.server import Layout
from flower.in_process import Device, InProcess, fixed, plan, server, weights


def masked(rounds=2, goal=4, **options):
    return plan(rounds, goal=goal, **{"secure": True, "on_device": ("clipping",)} | options)


def start(run, *devices, timeout=0.3, **options):
    grid = InProcess(*devices)
    PrivateStrategy(run, timeout=timeout, min_nodes=2, **options).start(grid)
    return grid


def plainly(rounds, users, **options):
    """The model of the same rounds, by integers that are added up in the clear."""
    run = server(masked(rounds, **options))
    masking = Masking(run.clip_norm, run.plan.grid)
    for names in users:
        arrays = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        changes = [changed(arrays, i) for i in names]
        with run.open() as opened:
            total = sum((masking.integers(run.layout, change) for change in changes), torch.zeros(run.layout.size))
            opened.add_sum([f"user{i}" for i in names], total.to(torch.int64))
    return weights(run)


def changed(arrays, node):
    """What a device finds: the difference of what it returned and what it was sent, in float32."""
    return {name: (arrays[name] + value) - arrays[name] for name, value in fixed(arrays, node).items()}


def who(run):
    return [sorted(str(user) for user in batch) for batch in run.release.ledger.history()]


def stage_of(message):
    return message.content[RECORD_KEY_CONFIGS].get(Key.STAGE)


class Dropping(Device):
    """Does not answer from a stage on: 0 keys, 1 shares, 2 masked vectors, 3 unmasking."""

    def __init__(self, node, stage, **options):
        super().__init__(node, **options)
        self.left = stage

    def __call__(self, message):
        stages = [Stage.SETUP, Stage.SHARE_KEYS, Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK]
        at = stages.index(stage_of(message))
        return super().__call__(message) if at < self.left else None


def test_sums_under_masks_are_the_plain_sum_to_the_bit():
    run = server(masked())
    grid = start(run, *(Device(i) for i in range(4)))
    assert torch.equal(weights(run), plainly(2, [range(4)] * 2))
    assert who(run) == [["user0", "user1", "user2", "user3"]] * 2
    assert {dict(message.content["anyorder"])["grid"] for message in grid.sent} == {run.plan.grid}


def test_and_so_is_the_servers_own_sum_of_the_same_changes():
    secret, plain = server(masked(rounds=1)), server(masked(rounds=1))
    start(secret, *(Device(i) for i in range(4)))
    arrays = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
    plain.round({f"user{i}": changed(arrays, i) for i in range(4)})
    assert torch.equal(weights(secret), weights(plain))


def test_what_the_server_sees_of_a_device_is_masked():
    """Of two runs with the same changes nothing is the same, and no vector is near its message."""
    seen = []
    for _ in range(2):
        run = server(masked(rounds=1))
        grid = start(run, *(Device(i) for i in range(4)))
        for reply in grid.replies.values():
            assert not reply.content.array_records
            assert not reply.content.metric_records
            assert set(reply.content) <= {RECORD_KEY_CONFIGS, "anyorder"}
            parts = reply.content[RECORD_KEY_CONFIGS].get(Key.MASKED_PARAMETERS)
            if parts is not None:
                seen.append(bytes_to_ndarray(parts[1]))
    assert len(seen) == 8
    for i, vector in enumerate(seen):
        assert vector.max() > 2**31  # messages and their sums are below m c < 2^31
        for other in seen[i + 1 :]:
            assert not np.array_equal(vector, other)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_device_that_drops_out_leaves_the_sum_of_the_others(stage):
    """Lost before its vector came it is not in the sum; lost after, it is."""
    run = server(masked(rounds=1))
    start(run, Device(0), Device(1), Device(2), Dropping(3, stage))
    users = range(4 if stage == 3 else 3)
    assert who(run) == [[f"user{i}" for i in users]]
    assert torch.equal(weights(run), plainly(1, [users]))


def test_devices_that_drop_out_one_in_each_stage():
    run = server(masked(rounds=1, goal=8))
    devices = [Dropping(5, 0), Dropping(6, 1), Dropping(7, 2)]
    start(run, *(Device(i) for i in range(5)), *devices)
    assert torch.equal(weights(run), plainly(1, [range(5)], goal=8))


@pytest.mark.parametrize("stages", [(2, 2), (3, 3), (2, 3)])
def test_too_few_to_unmask_is_a_round_of_nobody(stages):
    """A sum that two of four unmask would be noise of its masks, with users on record."""
    run = server(masked(rounds=1))
    start(run, Device(0), Device(1), *(Dropping(2 + i, stage) for i, stage in enumerate(stages)), timeout=0.2)
    assert run.step == 1
    assert who(run) == [[]]
    assert torch.equal(weights(run), plainly(1, [()]))


def test_a_sum_that_was_not_unmasked_is_asked_for_again():
    """Two do not answer the first time; one of them is gone at the second."""

    class Late(Device):
        def __init__(self, node, *, gone):
            super().__init__(node)
            self.missed, self.gone = False, gone

        def __call__(self, message):
            if stage_of(message) == Stage.COLLECT_MASKED_VECTORS and not self.missed:
                self.missed = True
                return None
            return None if self.missed and self.gone else super().__call__(message)

    run = server(masked(rounds=1))
    start(run, Device(0), Device(1), Late(2, gone=False), Late(3, gone=True), timeout=0.2)
    assert who(run) == [["user0", "user1", "user2"]]
    assert torch.equal(weights(run), plainly(1, [range(3)]))


def test_users_are_admitted_before_masks_are_exchanged():
    run = server(masked(rounds=3, goal=3, b=2, k=2))
    start(run, Device(0, "ann"), Device(1, "ann"), Device(2, "bob"), Device(3, "eve"), cohort=4)
    assert who(run) == [["ann", "bob", "eve"], [], ["ann", "bob", "eve"]]


def test_users_whom_the_plan_does_not_allow_are_known_under_other_nodes_too():
    run = server(masked(rounds=2, goal=3, b=2, k=1))
    PrivateStrategy(run, timeout=0.3, min_nodes=2).start(InProcess(*(Device(i) for i in range(3))), num_rounds=1)
    start(run, Device(7, "user0"), Device(8, "eve"), Device(9, "bob"))
    assert who(run) == [["user0", "user1", "user2"], ["bob", "eve"]]


def test_with_the_record_on_the_device_too_the_server_learns_no_name():
    class Counter:
        def __init__(self):
            self.taken = []

        def may(self, step):
            return not self.taken

        def take(self, step):
            self.taken.append(step)

    counters = [Counter() for _ in range(4)]
    run = server(masked(rounds=2, b=2, k=1, on_device=("clipping", "record")))
    devices = [Device(i, record=lambda context, own=own: own) for i, own in enumerate(counters)]
    grid = start(run, *devices, timeout=0.2)
    assert [counter.taken for counter in counters] == [[0]] * 4
    contents = [reply.content for reply in grid.replies.values() if reply.has_content()]
    told = [dict(content["anyorder"]) for content in contents if "anyorder" in content]
    assert told == [{"round": 0}] * 4
    assert who(run) == [[], []]


def spoiled(change):
    """A reply function that changes the vector that a device sends under its masks."""

    def reply(message):
        record = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
        if Key.MASKED_PARAMETERS not in record:
            return message
        content = RecordDict({RECORD_KEY_CONFIGS: ConfigRecord({Key.MASKED_PARAMETERS: change(record)})})
        return Message(content, metadata=message.metadata)

    return reply


def test_a_vector_that_is_none_counts_as_no_answer():
    run = server(masked(rounds=1))
    garbage = spoiled(lambda record: [b"no array", b"cos\nsystem"])
    start(run, Device(0), Device(1), Device(2), Device(3, reply=garbage))
    assert who(run) == [["user0", "user1", "user2"]]
    assert torch.equal(weights(run), plainly(1, [range(3)]))


def answering(key, change):
    """A reply function that changes the answers in which there is this key."""

    def reply(message):
        if not message.has_content():
            return message
        record = dict(message.content.config_records.get(RECORD_KEY_CONFIGS, {}))
        if key not in record:
            return message
        changed = ConfigRecord(record | change(record))
        content = RecordDict(dict(message.content.items()) | {RECORD_KEY_CONFIGS: changed})
        return Message(content, metadata=message.metadata)

    return reply


def test_who_shares_with_some_has_not_answered():
    def less(record):
        return {name: record[name][:-1] for name in (Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST)}

    run = server(masked(rounds=1))
    start(run, Device(0), Device(1), Device(2), Device(3, reply=answering(Key.DESTINATION_LIST, less)))
    assert who(run) == [["user0", "user1", "user2"]]
    assert torch.equal(weights(run), plainly(1, [range(3)]))


def test_shares_under_other_names_are_left_out():
    run = server(masked(rounds=1))
    devices = [Device(i) for i in range(4)]
    start(run, answers(devices[0], lambda record: {Key.NODE_ID_LIST: record[Key.NODE_ID_LIST][::-1]}), *devices[1:])
    assert who(run) == [[f"user{i}" for i in range(4)]]
    assert torch.equal(weights(run), plainly(1, [range(4)]))


def answers(device, change):
    device.reply = answering(Key.NODE_ID_LIST, change)
    return device


def test_shares_that_are_made_up_stop_no_run():
    run = server(masked(rounds=1))
    devices = [Device(i) for i in range(4)]
    start(run, answers(devices[0], lambda record: {Key.SHARE_LIST: [b"x"] * len(record[Key.SHARE_LIST])}), *devices[1:])
    assert run.step == 1
    assert who(run) == [[]]
    assert torch.equal(weights(run), plainly(1, [()]))


@pytest.mark.parametrize("weights_off", [-1, 1])
def test_a_sum_whose_weights_are_off_is_none(weights_off):
    masking = Masking(1.0, 2.0**-20)
    total = np.full(5, 3 * masking.bound)
    assert masking.unshift(total, 6 * masking.bound, 3).tolist() == [0] * 5
    assert masking.unshift(total, 6 * masking.bound + weights_off, 3) is None


def test_a_sum_that_no_messages_have_is_zeros_and_its_users_were_there():
    def large(record):
        from flwr.common import ndarray_to_bytes

        weight, vector = record[Key.MASKED_PARAMETERS]
        return [weight, ndarray_to_bytes((bytes_to_ndarray(vector) + 2**31) % 2**32)]

    run = server(masked(rounds=1))
    start(run, Device(0), Device(1), Device(2), Device(3, reply=spoiled(large)))
    assert who(run) == [["user0", "user1", "user2", "user3"]]
    assert torch.equal(weights(run), plainly(1, [()]))


def test_a_training_that_fails_is_zeros_in_a_sum_under_masks():
    """Not a lost sum: then the others' messages would hang on one device's data."""

    def seen(change):
        run = server(masked(rounds=2, b=2, k=1))
        start(run, *(Device(i) for i in range(3)), Device(3, change=change))
        return who(run), weights(run)

    fails, zeros = seen(lambda arrays: 1 / 0), seen(lambda arrays: {n: torch.zeros_like(v) for n, v in arrays.items()})
    assert fails[0] == zeros[0] == [["user0", "user1", "user2", "user3"], []]
    assert torch.equal(fails[1], zeros[1])


def altered(key, change):
    """A reply function that changes what a device tells under a key."""

    def reply(message):
        record = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
        if key not in record:
            return message
        content = RecordDict(dict(message.content.items()))
        content[RECORD_KEY_CONFIGS] = ConfigRecord(dict(record) | {key: change(record[key])})
        return Message(content, metadata=message.metadata)

    return reply


MADE_UP = {
    "key": altered(Key.PUBLIC_KEY_1, lambda key: b"none"),
    "destinations": altered(Key.DESTINATION_LIST, lambda to: [str(node) for node in to]),
    "shares for others": altered(Key.CIPHERTEXT_LIST, lambda texts: list(range(len(texts)))),
    "shares of others": altered(Key.SHARE_LIST, lambda shares: [bytes(len(share)) for share in shares]),
}


@pytest.mark.parametrize("reply", MADE_UP.values(), ids=MADE_UP)
def test_what_a_device_makes_up_under_masks_stops_nobody(reply):
    """One is lost after it shared its key, so that secrets of both kinds are put together."""
    run = server(masked(rounds=2, goal=6))
    start(run, *(Device(i) for i in range(4)), Dropping(4, 2), Device(5, reply=reply), timeout=0.2)
    assert run.step == 2
    allowed = [[f"user{i}" for i in range(4)], []]
    assert all(users in allowed for users in who(run))


def told(**values):
    masking = Masking(1.0, 2.0**-20)
    settings = masking.settings(4, 3) | values
    return masking, ConfigRecord(settings)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({Key.THRESHOLD: 2}, "more than half"),
        ({Key.THRESHOLD: 5}, "more than half"),
        ({Key.THRESHOLD: 1, Key.SAMPLE_NUMBER: 1}, "two or more"),
        ({Key.SHARE_NUMBER: 9}, "needs the settings"),
        ({Key.CLIPPING_RANGE: 8.0}, "needs the settings"),
        ({Key.TARGET_RANGE: 2**22}, "needs the settings"),
        ({Key.MOD_RANGE: 2**24}, "needs the settings"),
        ({Key.MAX_WEIGHT: 1000.0}, "needs the settings"),
    ],
)
def test_devices_refuse_settings_that_round_or_show_their_message(values, words):
    masking, record = told(**values)
    with pytest.raises(TrainingError, match=words):
        masking.check_setup(record)
    masking, record = told()
    masking.check_setup(record)


class Curious(Device):
    """Reached by a server that asks for more; keeps what is answered to that."""

    def __init__(self, node, stage, change):
        super().__init__(node)
        self.stage, self.alter, self.said = stage, change, []

    def __call__(self, message):
        if stage_of(message) != self.stage:
            return super().__call__(message)
        record = message.content[RECORD_KEY_CONFIGS]
        record.update(self.alter(dict(record)))
        reply = super().__call__(message)
        self.said.append(reply)
        return reply


@pytest.mark.parametrize(
    ("stage", "change", "words"),
    [
        (Stage.SETUP, lambda record: {Key.THRESHOLD: 2}, "more than half"),
        (Stage.SETUP, lambda record: {Key.MAX_WEIGHT: 1000.0}, "needs the settings"),
        (Stage.UNMASK, lambda record: {Key.DEAD_NODE_ID_LIST: record[Key.ACTIVE_NODE_ID_LIST][-1:]}, "would unmask it"),
    ],
)
def test_a_device_answers_no_server_that_asks_for_what_shows_a_message(stage, change, words):
    device = Curious(0, stage, change)
    start(server(masked(rounds=1)), device, *(Device(i) for i in range(1, 4)))
    assert device.said
    assert all(words in reply.error.reason for reply in device.said)


def test_devices_do_not_tell_both_secrets_of_another():
    asked = ConfigRecord({Key.ACTIVE_NODE_ID_LIST: [1, 2, 3], Key.DEAD_NODE_ID_LIST: [3, 4]})
    with pytest.raises(TrainingError, match="would unmask it"):
        Masking.check_unmask(asked)
    asked[Key.DEAD_NODE_ID_LIST] = [4]
    Masking.check_unmask(asked)


@pytest.mark.parametrize("messages", range(2, 9))
def test_no_two_sets_of_devices_can_tell_two_secrets_of_one(messages):
    """One asked for the mask and the other for the key would need more devices than there are."""
    assert 2 * threshold_of(messages) > messages or messages == 2
    assert threshold_of(messages) <= messages


def test_sums_that_could_wrap_are_refused_before_training():
    fine = Masking(1.0, 2.0**-29)
    fine.check_size(3)
    with pytest.raises(PlanError, match="can wrap around"):
        fine.check_size(4)
    run = server(masked())
    most = int(2**31 / (run.clip_norm / run.plan.grid))
    with pytest.raises(PlanError, match="can wrap around"):
        PrivateStrategy(run, cohort=most)
    PrivateStrategy(run, cohort=most - 1)


def test_floats_are_not_summed_under_masks():
    run = server(plan(rounds=1, on_device=("clipping",)))
    with pytest.raises(PlanError, match=r"plan with ao\.mechanism\(secure="):
        PrivateStrategy(run)
    run = server(masked(rounds=1, goal=1))
    with pytest.raises(PlanError, match="report goal of two or more"):
        PrivateStrategy(run)


@pytest.mark.parametrize("size", [0.0, 1e-9, 0.3, 1.0, 50.0, 1e30, float("nan")])
@pytest.mark.parametrize("grid", [2.0**-8, 2.0**-20, 2.0**-29])
def test_flowers_own_arithmetic_leaves_integers_as_they_are(size, grid):
    """Its quantisation at our settings, at the ends of the range too, is a shift by c and nothing else."""
    from flwr.common.secure_aggregation.quantization import quantize

    masking = Masking(1.0, grid)
    layout = Layout({"w": (7,), "b": (2, 3)})
    generator = torch.Generator().manual_seed(3)
    change = {name: size * torch.randn(shape, generator=generator) for name, shape in layout.shapes.items()}
    integers = masking.integers(layout, change)
    assert int(integers.square().sum()) <= masking.bound**2
    ends = torch.cat([integers, torch.tensor([-masking.bound, masking.bound, 0])]).numpy()
    settings = masking.settings(3, 2)
    weight = round(1 / settings[Key.MAX_WEIGHT] * settings[Key.TARGET_RANGE])
    (shifted,) = quantize([ends * (weight / settings[Key.TARGET_RANGE])], settings[Key.CLIPPING_RANGE], weight)
    assert np.array_equal(shifted.astype(np.int64), ends + masking.bound)
    whole = masking.unshift(3 * shifted.astype(np.int64), 3 * weight, 3)
    assert np.array_equal(whole.numpy(), 3 * ends)


def test_stages_of_another_round_are_refused():
    from anyorder.federated.flower.messages import Instruction

    run = server(masked(rounds=1))
    device = Device(0)
    grid = InProcess(device, *(Device(i) for i in range(1, 4)))
    PrivateStrategy(run, timeout=0.3).start(grid)
    message = next(m for m in grid.sent if stage_of(m) == Stage.SHARE_KEYS and m.metadata.dst_node_id == 0)
    other = Instruction(7, 1.0, 1.0, run.plan.grid, ("clipping",))
    message.content["anyorder"] = other.record()
    assert "of another round" in device(message).error.reason


def test_masks_of_flower_come_from_32_bits():
    """What docs/federated.md says of them: keys of 256 bits that agree in the XOR of their words give one mask."""
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    word = (77).to_bytes(4, "little")
    first, second = word + bytes(28), bytes(28) + word
    (a,), (b,) = (pseudo_rand_gen(seed, 2**32, [(5,)]) for seed in (first, second))
    assert np.array_equal(a, b)
