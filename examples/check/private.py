"""Opacus with its own random batches: the epsilon that it prints holds."""

import warnings

import opacus
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")  # of Opacus, on its random numbers and hooks
x = torch.randn(200, 10)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=20, shuffle=True)
model = torch.nn.Linear(10, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = opacus.PrivacyEngine(accountant="rdp")
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=2.0,
    max_grad_norm=1.0,
)
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
print(f"epsilon {engine.accountant.get_epsilon(delta=1e-4):.2f}")
