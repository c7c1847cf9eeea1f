"""The README's loop, which mypy reads strictly with the package; `test_typed.py` holds it to the README."""

# fmt: off
# ruff: noqa: B007, E402

from typing import assert_type

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao

dataset = TensorDataset(torch.randn(600, 8), torch.randint(0, 3, (600,)))
loader = DataLoader(dataset, batch_size=50, shuffle=True)
model, criterion = nn.Linear(8, 3), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

plan = ao.plan(loader=loader, epochs=2, epsilon=8, delta=1e-5, clip_norm=1.0, optimizer=optimizer)
print(plan)  # the order that was found, the mechanism chosen, its noise and error

engine = ao.PrivacyEngine(plan)
model, optimizer, loader = engine.make_private(model, optimizer, loader)

for epoch in range(2):
    for x, y in loader:  # your loop, unchanged
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()

engine.certificate().save("run.privacy.json")

# `make_private` gives back the types that it was given, so that names may be bound again.
from anyorder.sampling.loader import PrivateLoader
from anyorder.training.engine import PrivateModule

assert_type(model, nn.Linear)
assert_type(engine.model, PrivateModule)
assert_type(engine.loader, PrivateLoader)
engine.epsilon(1e-6) + engine.epsilon()
