"""Tensors stand in for a module's own in every place where these are held, and all are back afterwards."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.clipping.mapping import reparametrized
from anyorder.clipping.per_example import FunctionalClipping, GhostClipping
from anyorder.errors import ModelError
from clipping.brute import TOLERANCE, assert_close, clipped_sum, per_example, run


class Again(nn.Module):
    """A layer under two names, a list that repeats one, a weight that two layers share, a buffer in two places."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))] * 3)
        self.last = self.first
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.register_buffer("shift", torch.ones(4))
        self.tied.register_buffer("shift", self.shift)

    def forward(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x) + self.tied.shift
        return self.last(self.tied(x)) + self.shift


def held(module):
    return [
        (name, tensor)
        for part in module.modules()
        for name, tensor in (*part._parameters.items(), *part._buffers.items())
    ]


def test_everything_is_back_also_after_an_error():
    module = Again()
    before = held(module)
    with pytest.raises(KeyError), reparametrized(module, {"first.weight": torch.zeros(4, 4), "shift": torch.zeros(4)}):
        assert not module.last.weight.any()
        assert not module.tied.weight.any()
        assert not module.tied.shift.any()
        assert module.last.bias is module.first.bias
        raise KeyError
    assert all(now is own for (_, now), (_, own) in zip(held(module), before, strict=True))


@pytest.mark.parametrize("change", ["parameter", "buffer", "two", "deleted", "of a part in two places"])
def test_what_is_put_in_the_place_of_a_parameter_is_refused_and_all_is_back(change):
    module = Again()
    before = held(module)
    tensors = {name: torch.zeros_like(t) for name, t in module.state_dict().items()}
    names = {"parameter": "weight", "buffer": "shift", "two": "bias, weight", "deleted": "bias"}
    with (
        pytest.raises(ModelError, match=f"forward gives {names.get(change, 'weight')} another"),
        reparametrized(module, tensors),
    ):
        match change:
            case "parameter":
                module.tied._parameters["weight"] = nn.Parameter(torch.ones(4, 4))
            case "buffer":
                module.shift = torch.ones(4)
            case "two":
                module.first._parameters.update(weight=None, bias=torch.ones(4))
            case "deleted":
                del module.tied.bias
            case _:
                module.rest[2][0]._parameters["weight"] = module.first.weight
    assert sorted(name for name, _ in held(module)) == sorted(name for name, _ in before)
    assert {id(t) for _, t in held(module)} == {id(t) for _, t in before}


@pytest.mark.parametrize("engine", [FunctionalClipping, GhostClipping])
def test_layers_that_are_in_a_model_twice(engine):
    torch.manual_seed(0)
    module, x, y = Again().double(), torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    before = held(module)
    expected = clipped_sum(per_example(module, x, y, F.mse_loss), torch.arange(5), 0.5)
    for _ in range(2):
        _, sums = run(engine(module), x, y, F.mse_loss, clip_norm=0.5)
        assert_close(sums, expected, TOLERANCE[torch.float64])
    assert all(now is own for (_, now), (_, own) in zip(held(module), before, strict=True))


def test_evaluation_leaves_the_parameters_in_place():
    module, loader = Again(), DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
    before = held(module)
    plan = ao.plan(loader=loader, epochs=1, epsilon=8, delta=1e-3, mechanism="tree")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private, _, _ = ao.PrivacyEngine(plan).make_private(module, optimizer, loader)
    private.eval()
    private(torch.randn(3, 4))
    assert all(now is own for (_, now), (_, own) in zip(held(module), before, strict=True))
