"""The README's lines, which mypy reads strictly with the package; `test_typed.py` holds it to the README."""

# fmt: off
# ruff: noqa: E402

from typing import assert_type

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao

loader = DataLoader(TensorDataset(torch.randn(600, 8), torch.randint(0, 3, (600,))), batch_size=50, shuffle=True)
model, criterion = nn.Linear(8, 3), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[tuple[torch.Tensor, ...]]) -> None:
    for _ in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()


plan = ao.plan(loader=loader, epochs=5, epsilon=4, delta=1e-5, optimizer=optimizer)  # 1. the privacy you need
engine = ao.PrivacyEngine(plan)  # 2. enforces the plan
model, optimizer, loader = engine.make_private(model, optimizer, loader)  # 3. clips each example and adds noise
train(model, optimizer, loader)  # 4. your own training loop, unchanged
engine.certificate().save("run.privacy.json")  # 5. the proof: anyorder verify run.privacy.json

# `make_private` gives back the types that it was given, so that names may be bound again.
from anyorder.sampling.loader import PrivateLoader
from anyorder.training.engine import PrivateModule

assert_type(model, nn.Linear)
assert_type(engine.model, PrivateModule)
assert_type(engine.loader, PrivateLoader)
engine.epsilon(1e-6) + engine.epsilon()
