"""The model, a user's data, and plain local training: nothing here knows of privacy."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXAMPLES, FEATURES, CLASSES = 64, 16, 4


def network() -> nn.Module:
    """Its normalisation has buffers, which stay on the devices."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))


def data_of(user: str) -> tuple[Tensor, Tensor]:
    """A user's own examples, made up from the name: the same classes for all, and a shift of its own."""
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(int.from_bytes(user.encode()[-4:]))
    y = torch.randint(CLASSES, (EXAMPLES,), generator=own)
    x = centres[y] + torch.randn(EXAMPLES, FEATURES, generator=own) + 0.3 * torch.randn(FEATURES, generator=own)
    return x, y


def train(model: nn.Module, user: str, lr: float) -> float:
    """One epoch; the mean loss."""
    x, y = data_of(user)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model.train()
    losses = []
    for rows in torch.arange(len(x)).split(16):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)
