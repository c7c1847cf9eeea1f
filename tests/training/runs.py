"""A small private run: two batches of four examples of three features, three classes."""

import functools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao

planned = functools.cache(ao.plan)


def run_of(model=None, optimizer=None, epochs=1, data=None, loader=None, **options):
    """(engine, private model, private optimizer, private loader)."""
    plan = planned(dataset_size=8, batch_size=4, epochs=epochs, epsilon=8, delta=1e-5, mechanism="independent")
    model = nn.Linear(3, 3) if model is None else model
    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 3) if data is None else data
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ao.PrivacyEngine(plan, key=bytes(32))
    return engine, *engine.make_private(model, optimizer, DataLoader(data, 4) if loader is None else loader, **options)
