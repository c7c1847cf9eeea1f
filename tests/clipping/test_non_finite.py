"""A unit whose gradient is NaN or infinite adds exactly zero, silently, and moves no other unit's part."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyorder.clipping import Adaptive, Automatic, PerGroup, native, norms
from anyorder.clipping.per_example import FunctionalClipping, GhostClipping, make_clipping
from anyorder.errors import ArgumentError, NonFiniteError
from clipping.brute import distance, norm
from laws.cases import over

B, BAD = 6, 2


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(300, 4)

    def forward(self, ids):
        return F.linear(self.table(ids), self.table.weight)


class Last(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x)[0]


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return (x * self.scale).tanh()


def table(size=20, **options):
    return lambda: nn.Sequential(nn.Embedding(size, 4, **options), nn.Linear(4, 3))


MODELS = {  # the model, the shape of an example; of ids where it is a number
    "linear": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "positions kept": (lambda: nn.Linear(4, 4), (70, 4)),
    "positions by Gram": (lambda: nn.Linear(300, 300), (2, 300)),
    "positions dropped": (lambda: nn.Linear(600, 600), (400, 600)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 6, 6)),
    "groups": (lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 6, 6)),
    "examples as groups": (lambda: nn.Conv1d(16, 16, 3), (16, 140)),
    "wide kernel": (lambda: nn.Conv1d(64, 128, 5), (64, 6)),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6)), (4,)),
    "table": (table(), 5),
    "padded table": (table(padding_idx=1), 5),
    "tied": (Tied, 5),
    "lstm": (lambda: Last(nn.LSTM(4, 5, batch_first=True, num_layers=2)), (5, 4)),
    "gru": (lambda: Last(nn.GRU(4, 5, batch_first=True)), (5, 4)),
    "rnn": (lambda: Last(nn.RNN(4, 5, batch_first=True, bidirectional=True)), (5, 4)),
    "attention": (Attention, (5, 4)),
    "by autograd": (Scale, (4,)),
}
ENGINES = {
    "ghost": GhostClipping,
    "chunks": lambda m: GhostClipping(m, 2),
    "functional": FunctionalClipping,
    "functional in chunks": lambda m: FunctionalClipping(m, 4),
    "on a grid": lambda m: FunctionalClipping(m, 4, 2.0**-20),
    "per group": lambda m: GhostClipping(m, rule=PerGroup()),
    "automatic": lambda m: GhostClipping(m, rule=Automatic()),
    "adaptive": lambda m: GhostClipping(m, rule=Adaptive()),
    "functional, adaptive": lambda m: FunctionalClipping(m, rule=Adaptive()),
}


def inputs(shape):
    torch.manual_seed(1)
    return torch.randint(0, 20, (B, shape)) if isinstance(shape, int) else torch.randn(B, *shape)


def total(clipping, x, weights, groups, clip_norm=0.7):
    received = []
    outputs = clipping.forward((x,), {}, groups=groups, clip_norm=clip_norm, scale=float(B), receive=received.append)
    ((weights / B) * outputs.flatten(1).square().sum(1)).sum().backward()
    return received[0]


def compare(engine, make, x, value, where, groups):
    torch.manual_seed(0)
    module = make()
    bad = groups == groups[BAD]
    absent = total(ENGINES[engine](module), x, (~bad).float(), groups)
    weights = torch.ones(B)
    if where == "loss":
        weights[BAD] = value
    else:
        x = x.clone()
        x[BAD].view(-1)[1] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        present = total(ENGINES[engine](module), x, weights, groups)
    assert norm(absent) > 0
    assert list(present) == list(absent)
    assert distance(present, absent) <= 1e-6 * norm(absent)


ALONE, JOINED = torch.arange(B), torch.tensor([0, 1, 7, 3, 7, 0])


@pytest.mark.parametrize(("where", "groups"), [("input", JOINED), ("loss", ALONE)], ids=["input", "loss"])
@over("name", MODELS)
def test_each_layer(name, where, groups):
    make, shape = MODELS[name]
    where = "loss" if isinstance(shape, int) else where
    for value in (math.nan, math.inf):
        compare("ghost", make, inputs(shape), value, where, groups)


@over("groups", [ALONE, JOINED])
@over("name", ["linear", "table", "lstm", "norm"])
@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_and_rule(engine, name, groups):
    make, shape = MODELS[name]
    compare(engine, make, inputs(shape), math.nan, "loss", groups)


@pytest.mark.parametrize("name", ["convolution", "examples as groups"])
def test_convolutions_without_the_library(monkeypatch, name):
    monkeypatch.setattr(native, "available", lambda: False)
    make, shape = MODELS[name]
    for where in ("input", "loss"):
        compare("ghost", make, inputs(shape), math.nan, where, ALONE)


@pytest.mark.parametrize("groups", [ALONE, JOINED], ids=["examples", "units"])
@pytest.mark.parametrize("name", ["linear", "positions by Gram", "convolution", "table", "tied", "lstm", "norm"])
def test_where_no_gradient_of_a_unit_is_kept(monkeypatch, name, groups):
    """The sum is then made of what entered and left each layer, in which the bad unit's part must be gone too."""
    monkeypatch.setattr(norms, "STORE_BYTES", 0)
    make, shape = MODELS[name]
    compare("ghost", make, inputs(shape), math.nan, "loss", groups)


def test_nan_does_not_hide_large_numbers_of_other_examples():
    """What multiplies a weighted tensor decides about its precision; no NaN may speak for the others there."""
    torch.manual_seed(0)
    x = inputs((2, 300))
    x[0] *= 2.0**40
    compare("ghost", MODELS["positions by Gram"][0], x, math.nan, "input", ALONE)


def test_all_units_bad():
    module = MODELS["linear"][0]()
    for make in ENGINES.values():
        sums = total(make(module), torch.full((B, 4), math.nan), torch.ones(B), ALONE)
        assert all(not value.any() for value in sums.values())


@pytest.mark.parametrize("engine", [GhostClipping, FunctionalClipping])
@pytest.mark.parametrize(("large", "small"), [(1e38, 1e-42), (1e-42, 1e38), (1e38, 1e38), (3e38, 1e-30)])
@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (300, 300)])
def test_no_sum_overflows(engine, large, small, shape):
    """A unit of bounded norm adds a bounded vector, whatever numbers it comes from; of two that cancel as of one."""
    module = nn.Linear(*shape, bias=False)
    nn.init.zeros_(module.weight)

    def sums(x, weights):
        received = []
        outputs = engine(module).forward((x,), {}, groups=ALONE, clip_norm=1.0, scale=64.0, receive=received.append)
        (outputs * weights).sum().backward()
        return received[0]

    for T in (1, 2):
        x, weights = torch.full((B, T, shape[0]), 1e-3), torch.full((B, T, shape[1]), 1e-3)
        x[BAD, T - 1], weights[BAD] = -large, small
        x[BAD, 0] = large
        present = sums(x, weights)
        x[BAD] = 0
        assert distance(present, sums(x, weights)) <= 1 + 1e-6  # false where anything is NaN


@pytest.mark.parametrize("name", ENGINES)
def test_refuse_counts_them(name):
    module = MODELS["linear"][0]()
    grid = 2.0**-20 if name == "on a grid" else None
    clipping = make_clipping(module, 2 if "chunks" in name else None, grid, non_finite="refuse")
    x = inputs((4,))
    x[BAD, 1] = math.inf
    received = []
    outputs = clipping.forward((x,), {}, groups=JOINED, clip_norm=1.0, scale=1.0, receive=received.append)
    with pytest.raises(NonFiniteError, match="of 1 of 4 units"):
        outputs.sum().backward()
    assert not received


def test_other_words_are_refused():
    with pytest.raises(ArgumentError, match="non_finite must be one of 'refuse', 'zero'"):
        make_clipping(nn.Linear(2, 2), non_finite="ignore")
    with pytest.raises(ArgumentError, match="non_finite"):
        make_clipping(nn.Linear(2, 2), grid=2.0**-20, non_finite="ignore")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("engine", [GhostClipping, FunctionalClipping, lambda m, **o: GhostClipping(m, 2, **o)])
def test_units_that_are_not_finite_are_not_counted(engine, value):
    """Neither as above the clip norm, nor by making the count anything but a number."""
    module, weights = nn.Linear(4, 3).double(), torch.ones(B, dtype=torch.float64)
    x = inputs((4,)).double()
    absent, present = weights.clone(), weights.clone()
    absent[BAD], present[BAD] = 0.0, value
    sums = [total(engine(module, rule=Adaptive(share=0.5)), x, w, ALONE, clip_norm=1e-3) for w in (absent, present)]
    assert sums[0][".above"].item() == pytest.approx((B - 1) * 0.5e-3)
    assert torch.equal(sums[0][".above"], sums[1][".above"])
