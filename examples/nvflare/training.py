"""The model, a client's data, and what the server runs: a plan, a model and an optimizer."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn

import anyorder as ao
from anyorder.participation import MinSeparation

EXAMPLES, FEATURES, CLASSES = 64, 16, 4
ROUNDS, COHORT, APART = 8, 2, 2  # four clients: each takes part in every second round


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def data_of(client: str) -> tuple[Tensor, Tensor]:
    """A client's own examples, made up from its name."""
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(int.from_bytes(client.encode()[-4:]))
    y = torch.randint(CLASSES, (EXAMPLES,), generator=own)
    return centres[y] + torch.randn(EXAMPLES, FEATURES, generator=own), y


def train(model: nn.Module, client: str) -> float:
    """One epoch; the mean loss."""
    x, y = data_of(client)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for rows in torch.arange(len(x)).split(16):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def plan_of_the_run() -> ao.Plan:
    order = MinSeparation(ROUNDS, b=APART, k=ROUNDS // APART)
    return ao.plan(order=order, batch_size=COHORT, epsilon=8, delta=1e-5, clip_norm=0.5, unit="owner", mechanism="tree")


def make_server() -> ao.federated.Server:
    """Called by the controller in the server's process. The checkpoint lies outside the job's folder: it is secret."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    folder = Path(os.environ.get("ANYORDER_SECRET_FOLDER", Path.home()))
    return ao.federated.Server(plan_of_the_run(), model, optimizer, checkpoint=folder / "run.checkpoint")
