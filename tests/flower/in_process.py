"""A federation without a network: Flower's messages, handed to Flower's client apps by a grid in this process."""

import itertools

import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

import anyorder as ao
from anyorder.federated.flower import client_mod
from plans import flat_plan

SIZES = (4, 3)


class Model(torch.nn.Module):
    """Two shared layers with a normalisation between them, whose buffers stay where they are."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(*SIZES), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)


def server(plan, *, lr=1.0, **options):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return ao.federated.Server(plan, model, optimizer, key=bytes(32), **options)


def plan(rounds=4, *, goal=3, b=1, k=None, **options):
    from anyorder.participation import MinSeparation

    options = {"delta": 1e-6, "sigma": 2.0, "clip_norm": 1.0, "mechanism": "independent", "unit": "user"} | options
    return flat_plan(participation=MinSeparation(rounds, b=b, k=k or rounds), batch_size=goal, **options)


class Device:
    """A SuperNode: its app, its context, and how it fails.

    Args:
        change: (parameters) -> what training adds to them; or an exception.
        reply: (message that would go out) -> what does, or None for nothing.
    """

    def __init__(self, node, user="", change=None, *, record=None, reply=None, mods=None):
        self.node, self.user, self.reply, self.alive = node, user or f"user{node}", reply, True
        self.trained, self.change = 0, change or (lambda arrays, node=node: fixed(arrays, node))
        own = {"record": record} if record else {"user": lambda context: str(context.node_config["user"])}
        self.context = Context(1, node, {"user": self.user}, RecordDict(), {})
        self.app = ClientApp(mods=[client_mod(**own)] if mods is None else mods)

        @self.app.train()
        def train(message, context):
            self.trained += 1
            return self.answer(message)

        @self.app.evaluate()
        def evaluate(message, context):
            return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.5})}), reply_to=message)

    def answer(self, message):
        arrays = message.content["arrays"].to_torch_state_dict()
        change = self.change(arrays)
        after = {name: value + change[name] for name, value in arrays.items()}
        after["norm.running_mean"], after["norm.num_batches_tracked"] = torch.ones(3), torch.tensor(77)
        metrics = MetricRecord({"num-examples": 31 + self.node, "train_loss": 0.125})
        return Message(RecordDict({"arrays": ArrayRecord(after), "metrics": metrics}), reply_to=message)

    def __call__(self, message):
        try:
            reply = self.app(message=message, context=self.context)
        except Exception as problem:  # as a SuperNode does
            reply = Message(Error(code=2, reason=f"{type(problem)}:<'{problem}'>"), reply_to=message)
        return reply if self.reply is None else self.reply(reply)


def fixed(arrays, node):
    """A change that only depends on the node: of norm 0.2 (node + 1)."""
    generator = torch.Generator().manual_seed(node)
    change = {name: torch.randn(value.shape, generator=generator) for name, value in arrays.items()}
    norm = torch.cat([value.reshape(-1) for value in change.values()]).norm()
    return {name: value * (0.2 * (node + 1) / norm) for name, value in change.items()}


class InProcess(Grid):
    """Hands messages to devices when they are pushed; `sent` and `replies` keep what went over the wire."""

    def __init__(self, *devices):
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # as a ServerApp's process has them
        self.devices = {device.node: device for device in devices}
        self.sent, self.replies, self._numbers = [], {}, itertools.count(1)
        self.extra = []  # replies that come with the next pull, whatever they answer

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return [node for node, device in self.devices.items() if device.alive]

    def push_messages(self, messages):
        names = []
        for message in messages:
            name = str(next(self._numbers))
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
            device = self.devices[message.metadata.dst_node_id]
            copy = Message(_copy(message.content), metadata=message.metadata)
            reply = device(copy) if device.alive else None
            if reply is not None:
                self.replies[name] = reply
            names.append(name)
        return names

    def pull_messages(self, message_ids):
        found = [self.replies[name] for name in message_ids if name in self.replies]
        extra, self.extra = self.extra, []
        return extra + found

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


def _copy(content):
    """As the wire does it: a client cannot write into what the server keeps."""
    from copy import deepcopy

    return deepcopy(content)


def weights(server):
    return torch.cat([p.detach().reshape(-1) for p in server.model.parameters()])
