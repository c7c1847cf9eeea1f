"""The client of `federated_flower`, a module of its own: Flower's actors import it."""

import functools

import torch
from federated_task import BATCH, LR, data, network
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

client = ClientApp()


@functools.cache
def kept(channels_last: bool) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.set_num_threads(1)
    return network(channels_last), *data(channels_last)


@client.train()
def train(message: Message, context: Context) -> Message:
    model, x, y = kept(bool(message.content["config"]["channels-last"]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    user = int(context.node_config["partition-id"])
    for xb, yb in zip(x[user].split(BATCH), y[user].split(BATCH), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(xb), yb).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(x[user])})}
    return Message(RecordDict(content), reply_to=message)
