"""Modules that write into new tensors, draw a number to branch on, or normalise a part of the channels."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyorder.clipping.per_example import FunctionalClipping, GhostClipping
from clipping.brute import TOLERANCE, assert_close, clipped_sum, per_example, run

B = 6


class Written(nn.Module):
    """Fills a tensor step by step, made by a function that knows of no example."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(4, 2), make

    def forward(self, x):
        result = self.make(x.shape[0], 3)
        result[:, :2] = self.layer(x)
        result[:, 2] = x[:, 0]
        return result


class Normed(nn.Module):
    """Normalises one half of the channels."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 8), nn.GroupNorm(2, 4)

    def forward(self, x):
        a, b = self.layer(x)[..., None].expand(-1, -1, 3).chunk(2, dim=1)
        return self.norm(a * torch.arange(1.0, 4.0, dtype=x.dtype)) + b


MODULES = {
    "empty": lambda: Written(lambda *size: torch.empty(*size, dtype=torch.float64)),
    "zeros": lambda: Written(lambda *size: torch.zeros(size, dtype=torch.float64, device="cpu")),
    "ones": lambda: Written(lambda *size: torch.ones(size=size, dtype=torch.float64)),
    "full": lambda: Written(lambda *size: torch.full(size, 7.0, dtype=torch.float64)),
    "norm": Normed,
}


@pytest.mark.parametrize("engine", [FunctionalClipping, GhostClipping])
@pytest.mark.parametrize("name", MODULES)
def test_sums_are_those_of_the_loop(name, engine):
    torch.manual_seed(0)
    module, x = MODULES[name]().double(), torch.randn(B, 4, dtype=torch.float64)
    y = torch.randn_like(module(x))
    expected = clipped_sum(per_example(module, x, y, F.mse_loss), torch.arange(B), 0.5)
    clipping = engine(module)
    for _ in range(2):  # the second time it is known how
        outputs, sums = run(clipping, x, y, F.mse_loss, clip_norm=0.5)
        torch.testing.assert_close(outputs, module(x))
        assert_close(sums, expected, TOLERANCE[torch.float64])


def test_new_tensors_are_what_they_would_be():
    made = []

    class Makes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            made.append([torch.zeros(2), torch.ones(2, dtype=torch.int32), torch.full((2,), 3), torch.full((2,), True)])
            result = torch.zeros(x.shape[0], 2)
            result += self.layer(x)
            return result

    run(GhostClipping(Makes()), torch.randn(B, 4), torch.zeros(B, 2), F.mse_loss)
    plain = [torch.zeros(2), torch.ones(2, dtype=torch.int32), torch.full((2,), 3), torch.full((2,), True)]
    assert [(t.dtype, t.shape) for t in made[-1]] == [(t.dtype, t.shape) for t in plain]


class Depth(nn.Module):
    """A residual block that is left out at random, as `drop` says."""

    def __init__(self, drop):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), drop

    def forward(self, x):
        return x + self.drop(self.layer(x))


def of_rows(x):  # as torchvision's StochasticDepth
    noise = torch.empty([x.shape[0], 1], dtype=x.dtype, device=x.device)
    return x * noise.bernoulli_(0.5).div_(0.5)


def of_the_batch(x):
    return 2 * x if torch.rand(1, dtype=x.dtype) < 0.5 else 0 * x


def by_item(x):  # as LayerDrop
    return 2 * x if torch.rand([]).item() < 0.5 else 0 * x


def by_index(x):
    return (2 * x, 0 * x)[int(torch.randint(0, 2, (1,)))]


@pytest.mark.parametrize("engine", [FunctionalClipping, GhostClipping])
@pytest.mark.parametrize("drop", [of_rows, of_the_batch, by_item, by_index])
def test_stochastic_depth(drop, engine):
    torch.manual_seed(0)
    module, x = Depth(drop).double(), torch.randn(B, 4, dtype=torch.float64)
    clipping = engine(module)
    masks, y = [], torch.randn(B, 4, dtype=torch.float64)
    for _ in range(12):
        outputs, sums = run(clipping, x, y, F.mse_loss, clip_norm=0.5)
        taken = ((outputs - x).abs().sum(1) > 0).to(x.dtype)
        masks.append(taken)
        fixed = [Depth(lambda values, factor=2 * keep: factor * values).double() for keep in taken]
        for one in fixed:
            one.layer = module.layer
        gradients = [per_example(one, x[i : i + 1], y[i : i + 1], F.mse_loss)[0] for i, one in enumerate(fixed)]
        assert_close(sums, clipped_sum(gradients, torch.arange(B), 0.5), TOLERANCE[torch.float64])
    masks = torch.stack(masks)
    assert 0.2 < masks.mean() < 0.8
    assert bool((masks == masks[:, :1]).all()) == (drop is not of_rows)


@pytest.mark.parametrize("engine", [FunctionalClipping, GhostClipping])
def test_what_was_found_out_goes_on_after_a_resume(engine):
    first, second = engine(Depth(of_the_batch)), engine(Depth(of_the_batch))
    x, y = torch.randn(B, 4), torch.zeros(B, 4)
    run(first, x, y, F.mse_loss)
    second.load_state_dict(first.state_dict())
    torch.manual_seed(1)
    second._module.load_state_dict(first._module.state_dict())
    expected = run(first, x, y, F.mse_loss)[1]
    torch.manual_seed(1)
    assert all(torch.equal(value, expected[name]) for name, value in run(second, x, y, F.mse_loss)[1].items())
