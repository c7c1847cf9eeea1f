"""The parts of a run by its settings: model, loader, optimizer, loss."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from anyorder.clipping.validate import refuse_unfit
from anyorder.errors import CheckpointError
from anyorder.run import folder, models
from anyorder.run.datasets import Data
from anyorder.run.settings import Settings
from anyorder.sampling import EpochShuffleSampler, FixedOrderSampler
from anyorder.train import FTRL

__all__ = ["loss", "make_loader", "make_model", "make_optimizer", "settings_of"]


def settings_of(found: dict[str, Any], path: Path) -> Settings:
    """The settings in the metrics of the run in a folder. Raises CheckpointError if there are none."""
    try:
        return Settings(**found["settings"])
    except (KeyError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{path / folder.METRICS} holds no settings of a run: {problem}") from problem


def make_model(settings: Settings, data: Data) -> nn.Module:
    """The model, weights drawn by the seed; torch's generator stays as it was. Raises ModelError, ArgumentError."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = models.build(settings.model, data.input_shape, data.num_classes).to(settings.device)
    refuse_unfit(model)
    return model


def make_loader(settings: Settings, data: Data) -> DataLoader[Any]:
    """The training data in the settings' order."""
    samplers = {"fixed": FixedOrderSampler, "shuffled": EpochShuffleSampler}
    kind = samplers.get(settings.order)
    sampler = None if kind is None else kind(len(data.train), settings.seed)  # type: ignore[arg-type]
    return DataLoader(data.train, batch_size=settings.batch_size, sampler=sampler)


def make_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """The settings' optimizer over all trainable parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if settings.optimizer == "ftrl":
        return FTRL(parameters, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Mean cross entropy of a batch of (inputs, classes), on a device."""
    x, y = batch
    return F.cross_entropy(model(x.to(device)), y.to(device))
