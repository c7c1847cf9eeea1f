"""Ways around the bound that were found by looking for them: rounding, and data that is kept or written."""

from collections import OrderedDict, defaultdict, namedtuple
from functools import partial

import pytest
import torch
from torch import nn

from anyorder.clipping.per_example import FunctionalClipping, GhostClipping
from anyorder.errors import ModelError
from clipping.brute import distance, norm
from laws.cases import over

ENGINES = [FunctionalClipping, GhostClipping]
HUGE = 2.0**24


def sums(engine, module, x, groups=None, clip_norm=1.0, loss=torch.sum):
    received = []
    outputs = engine(module).forward(
        (x,), {}, groups=torch.arange(len(x)) if groups is None else groups, clip_norm=clip_norm, scale=1.0,
        receive=received.append,
    )  # fmt: skip
    loss(outputs).backward()
    return received[0]


def wide(size):
    module = nn.Linear(size, size, bias=False)
    nn.init.zeros_(module.weight)
    return module


@pytest.mark.parametrize("engine", ENGINES)
def test_huge_positions_that_cancel_do_not_hide_a_unit(engine):
    """The rounding of the sum over positions, not of the norm, is what would carry the unit over."""
    T, size = 64, 512
    a = torch.full((T,), 1.1)
    a[0], a[-1] = HUGE, -(HUGE + float(torch.tensor(1.1).double()) * (T - 2))
    x = torch.zeros(2, T, size)
    x[0] = a[:, None]
    assert norm(sums(engine, wide(size), x)) <= 1.0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_unit_whose_rows_cancel_does_not_move_the_rounding_of_others(engine):
    B, size = 128, 256
    x = torch.full((B, 1, size), 0.6 / size)
    x[0], x[-1] = HUGE, -HUGE
    groups = torch.arange(B)
    groups[-1] = 0
    without = x.clone()
    without[0], without[-1] = 0.0, 0.0
    assert distance(sums(engine, wide(size), x, groups), sums(engine, wide(size), without, groups)) <= 1.0


@over("tiny", [2.0**-149, 3 * 2.0**-149, 2.0**-130])
@over("large", [2.0**20, 2.0**31, 2.0**100, 2.0**126])
@pytest.mark.parametrize("kind", ["linear", "wider", "positions", "convolution"])
@pytest.mark.parametrize("engine", ENGINES)
def test_denormal_numbers_do_not_round_a_unit_over_the_bound(engine, kind, large, tiny):
    """A weight times a denormal number may round to twice the product; what it is multiplied by may be huge."""
    size, T = (8, 64) if kind == "wider" else (64, 64), 3 if kind == "positions" else 1
    module, shape = nn.Linear(*size, bias=False), (T, size[0])
    if kind == "convolution":
        module, shape = nn.Conv1d(4, 4, 3, bias=False), (4, 3)
    for a, g in ((large, tiny), (tiny, -large)):
        x, loss = torch.full((1, *shape), a), partial(weighted, g)
        exact = norm(sums(FunctionalClipping, module.double(), x.double(), clip_norm=1e300, loss=loss))
        module.float()
        for factor in (0.51, 0.7, 0.999):
            clip_norm = max(factor * exact, 2.0**-60)
            assert norm(sums(engine, module, x, clip_norm=clip_norm, loss=loss)) <= clip_norm


def weighted(weight, outputs):
    return (outputs * weight).sum()


class Writes(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.layer, self.code, self.write = nn.Linear(4, 4), nn.Parameter(torch.zeros(4)), write

    def forward(self, x):
        y = self.layer(x) + self.code
        with torch.no_grad():
            self.write(self.code, x.mean(0))
        return y


WRITES = {
    "add_": lambda code, v: code.add_(v),
    "copy_": lambda code, v: code.copy_(v),
    "index_copy_": lambda code, v: code.index_copy_(0, torch.tensor([0, 1]), v[:2]),
    "masked_fill_": lambda code, v: code.masked_fill_(v > 0, 1.0),
    "setitem": lambda code, v: code.__setitem__(0, v[0]),
    "data": lambda code, v: code.data.add_(v),
    "detach": lambda code, v: code.detach().index_copy_(0, torch.tensor([0, 1]), v[:2]),
    "out": lambda code, v: torch.add(v, 1, out=code),
}


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_that_forward_writes_are_refused_and_keep_their_values(engine, write, B):
    module = Writes(WRITES[write])
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    with pytest.raises(ModelError):
        sums(engine, module, torch.ones(B, 4))
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])


class Remembers(nn.Module):
    def __init__(self, hold):
        super().__init__()
        self.layer, self.hold, self.hidden = nn.Linear(4, 4), hold, None

    def forward(self, x):
        h = self.layer(x)
        self.hidden = self.hold(h.detach())
        return h


class Holder(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.register_buffer("hidden", tensor)


Pair = namedtuple("Pair", "count hidden")
HOLDS = {
    "tensor": lambda h: h,
    "tuple": lambda h: (1, h),
    "list": lambda h: [[], [h]],
    "set": lambda h: {h},
    "dict": lambda h: {"": 1, "h": h},
    "ordered": lambda h: OrderedDict(h=(h,)),
    "named": lambda h: Pair(1, h),
    "default": lambda h: defaultdict(list, h=[h]),
    "parameter": lambda h: nn.ParameterDict({"h": nn.Parameter(h, requires_grad=False)}),
    "module": Holder,
}


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_values_kept_for_the_next_batch_are_refused(engine, hold):
    with pytest.raises(ModelError, match="keeps a tensor of the batch"):
        sums(engine, Remembers(HOLDS[hold]), torch.randn(3, 4))
