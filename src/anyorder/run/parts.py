"""The parts of a run by its settings: model, loader, optimizer, loss."""

import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from anyorder.clipping.validate import refuse_unfit
from anyorder.errors import CheckpointError
from anyorder.run import datasets, folder, models
from anyorder.run.datasets import Data
from anyorder.run.features import STAGES, Features, Whitened, joined, patched, scattered
from anyorder.run.settings import OF_FEATURES, Settings
from anyorder.sampling import EpochShuffleSampler, FixedOrderSampler
from anyorder.training import FTRL

__all__ = ["batches", "loss", "make_data", "make_loader", "make_model", "make_optimizer", "settings_of"]


def settings_of(found: dict[str, Any], path: Path) -> Settings:
    """The settings in the metrics of the run in a folder. Raises CheckpointError if there are none."""
    try:
        return Settings(**found["settings"])
    except (KeyError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{path / folder.METRICS} holds no settings of a run: {problem}") from problem


def make_data(settings: Settings, data: Data | None = None) -> Data:
    """The data set, loaded where it is not given, in the form that the model takes."""
    data = data or datasets.load(settings.dataset, settings.data_dir)
    if settings.model not in OF_FEATURES:
        return data
    gc.collect()  # a run before this one holds its features, which may be gigabytes, in a cycle that torch makes
    if isinstance(data.train, Features):
        return data
    return patched(data) if settings.model == "patches" else scattered(data)


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
    return batches(data.train, settings.batch_size, sampler)


def batches(part: Any, size: int, sampler: Any = None) -> DataLoader[Any]:
    """A loader of (inputs, classes)."""
    return DataLoader(part, size, sampler=sampler, collate_fn=joined if isinstance(part, Features) else None)


def make_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """The settings' optimizer over all trainable parameters."""
    if isinstance(model, Whitened):
        learned = dict(zip(STAGES, (model.centre, model.spread, model.classify), strict=True))
        groups = [{"params": list(layer.parameters())} for layer in learned.values()]
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if settings.optimizer == "ftrl":
        return FTRL(parameters, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Mean cross entropy of a batch of (inputs, classes), on a device; the mean of what a `Whitened` model measures."""
    x, y = batch
    outputs = model(x.to(device))
    if getattr(model, "stage", STAGES[-1]) != STAGES[-1]:
        return outputs.mean()  # type: ignore[no-any-return]
    return F.cross_entropy(outputs, y.to(device))
