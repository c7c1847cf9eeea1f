"""A GradScaler is refused where it takes a step, and nothing of it is left behind."""

import pytest
import torch
from torch.nn import functional as F

from anyorder.errors import TrainingError
from training.test_module import private


@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_is_refused(unscale):
    model, optimizer, loader = private()
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(iter(loader))
    before = model.module.weight.clone()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(TrainingError, match="enabled=False"):
        scaler.step(optimizer)
    assert torch.equal(model.module.weight, before)
    optimizer.zero_grad()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_a_scaler_that_does_nothing_steps():
    model, optimizer, loader = private()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x, y in loader:
        before = model.module.weight.clone()
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(model.module.weight, before)
