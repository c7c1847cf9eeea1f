"""Runs that are stopped at a step and resumed, beside one that was not."""

import pytest
import torch

from anyorder.app import train
from anyorder.app.job import Observer, resume

KEY = bytes(range(32))


class StopAt(Observer):
    def __init__(self, step):
        self.step = step

    def stepped(self, step):
        if step == self.step:
            raise KeyboardInterrupt


def assert_goes_on(settings, folder, step):
    """Bit for bit."""
    whole = train(settings, folder / "whole", key=KEY)
    with pytest.raises(KeyboardInterrupt):
        train(settings, folder / "stopped", key=KEY, observer=StopAt(step))
    again = resume(folder / "stopped")
    assert again.accuracy == whole.accuracy
    states = [torch.load(path / "model.pt", weights_only=True) for path in (whole.path, again.path)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
