"""A federation of Flower's clients as a loop for the isolation harness: their data in, what may be shown out.

Shown are the model, what `start` returns, and what lies on the wire beside the numbers of a message: which devices
answer, with which records, of which sizes, and whose. A device's log stays on the device.
"""

import functools

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import nn

from anyorder.audit.faults import patched
from anyorder.federated import Server
from anyorder.federated.flower import PrivateStrategy
from anyorder.federated.flower import client as device
from flower.in_process import Device, InProcess

GOAL = 3


def network(width):
    return nn.Linear(width, 1)


def trained(examples, message):
    """An app that trains on this device's examples, and returns much besides: (x, y), or one that fails on them."""
    x, y = examples
    with torch.random.fork_rng():  # a device has generators of its own
        local = network(x.shape[1])
    local.load_state_dict(message.content["arrays"].to_torch_state_dict())
    if not len(y):
        raise SystemExit("no examples here")
    loss = ((local(x)[:, 0] - y) ** 2).mean()
    loss.backward()
    with torch.no_grad():
        for p in local.parameters():
            p -= p.grad
    told = {
        "arrays": ArrayRecord({**local.state_dict(), **({"more": torch.ones(len(y))} if len(y) > 2 else {})}),
        "metrics": MetricRecord({"num-examples": len(y), "loss": float(loss)}),
        "words": ConfigRecord({"note": f"loss {float(loss)}"}),
    }
    return Message(RecordDict(told), reply_to=message)


def on_the_wire(reply):
    """What a reply shows beside the numbers in it."""
    if reply.has_error():
        return [reply.error.code, reply.error.reason]
    content = reply.content
    arrays = {
        record: {name: [str(array.shape), array.dtype, len(array.data)] for name, array in content[record].items()}
        for record in content.array_records
    }
    words = {record: {name: _seen(value) for name, value in content[record].items()}
             for record in (*content.config_records, *content.metric_records)}  # fmt: skip
    return [list(content), arrays, words]


def _seen(value):
    """A word or a number; of bytes, which are masked or are keys, how many there are."""
    if isinstance(value, list):
        return [_seen(one) for one in value]
    return f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)


def federation(plan, users):
    """The loop: rows are the examples (x, y) of each of `users`, in their order."""

    def train(rows, folder):
        net = network(3)
        server = Server(plan, net, torch.optim.SGD(net.parameters(), lr=0.5))
        devices = [Device(node, user) for node, user in enumerate(users)]
        for one, examples in zip(devices, rows, strict=True):
            one.answer = functools.partial(trained, examples)
        grid = InProcess(*devices)
        with patched(device._log, "disabled", True):
            result = PrivateStrategy(server, cohort=GOAL, min_nodes=len(users), timeout=5.0).start(grid)
        wire = [on_the_wire(reply) for reply in grid.replies.values()]
        return [net, repr(result.arrays), result.train_metrics_clientapp, wire]

    return train
