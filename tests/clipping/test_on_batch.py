"""The two ways out of vmap, the quick one and torch.func's own, give the same sums."""

import pytest
import torch
from torch import Tensor, nn

from anyorder.clipping import GhostClipping, tracing


def clipped(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    received: list[dict[str, Tensor]] = []
    groups = torch.arange(len(x))
    y = GhostClipping(model).forward((x,), {}, groups=groups, clip_norm=1.0, scale=1.0, receive=received.append)
    y.square().sum().backward()
    return received[0]


def test_without_torchs_undocumented_function(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(108, 5), nn.Tanh(), nn.Linear(5, 4))
    x = torch.randn(6, 2, 8, 8)
    quick = clipped(model, x)
    monkeypatch.setattr(tracing, "_interpreter", None)
    for name, value in clipped(model, x).items():
        assert torch.equal(value, quick[name])
