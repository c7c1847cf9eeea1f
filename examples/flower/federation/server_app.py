"""The server: a plan, a model, and rounds until the plan is used up; killed and started again, it goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

import anyorder as ao
from anyorder.federated.flower import PrivateStrategy
from anyorder.participation import MinSeparation
from federation.task import network

app = ServerApp()


def plan_of(config: Mapping[str, Any]) -> ao.Plan:
    """What the run claims; a resumed run must claim the same."""
    secure = bool(config["secure"])
    return ao.plan(
        order=MinSeparation(config["rounds"], b=config["separation"], k=config["participations"]),
        batch_size=config["report-goal"],
        epsilon=config["epsilon"],
        delta=config["delta"],
        clip_norm=config["clip-norm"],
        mechanism=ao.mechanism("tree", secure=secure, on_device=("clipping",) if secure else ()),
        unit="user",
    )


def server_of(config: Mapping[str, Any]) -> ao.federated.Server:
    """New, or from the checkpoint."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["server-lr"])
    return ao.federated.Server(plan_of(config), model, optimizer, checkpoint=Path(config["output"]) / "run.checkpoint")


@app.main()
def main(grid: Grid, context: Context) -> None:
    config: dict[str, Any] = dict(context.run_config)
    server = server_of(config)
    strategy = PrivateStrategy(server, cohort=config["cohort"], timeout=config["timeout"])
    strategy.start(grid, train_config=ConfigRecord({"lr": config["client-lr"]}))
    output = Path(config["output"])
    server.certificate().save(output / "run.privacy.json")
    torch.save(server.model.state_dict(), output / "model.pt")
