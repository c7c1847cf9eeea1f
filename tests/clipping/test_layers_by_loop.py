"""Outputs and clipped sums against a loop over examples, layer by layer."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyorder.clipping.per_example import FunctionalClipping
from clipping.brute import TOLERANCE, assert_close, clipped_sum, per_example, run
from laws.cases import over


class Attention(nn.Module):
    """Self-attention, with the module called on the same tensor three times."""

    def __init__(self, need_weights=False, dropout=0.0):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=dropout)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Tied(nn.Module):
    """Input and output embedding share their weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x).tanh()).mean(1)


class Twice(nn.Module):
    """One layer at two depths."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class LowRank(nn.Module):
    """A frozen layer and a trained product of two thin ones."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 6).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(8, 2))
        self.up = nn.Parameter(torch.randn(2, 6))

    def forward(self, x):
        return self.base(x) + x @ self.down @ self.up


class Aliased(nn.Module):
    """Two parameters whose gradients are one tensor, and one that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(8))
        self.b = nn.Parameter(torch.randn(8))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x + self.a + self.b


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Cells(nn.Module):
    """Cells in a loop, with states of the model's own making."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state


class OwnState(nn.Module):
    """A recurrent layer that is given its initial state."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 3, batch_first=True)
        self.initial = nn.Parameter(torch.randn(1, 3))

    def forward(self, x):
        state = self.initial.expand(1, len(x), 3)
        return self.layer(x, (state.contiguous(), torch.zeros_like(state)))[0]


def frozen_attention():
    return nn.Sequential(Attention().requires_grad_(False), nn.Linear(8, 3)).eval()


def cnn():
    return nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(45, 3))


SEQUENCE, IMAGE, TOKENS = (5, 8), (4, 6, 6), "tokens"
CASES = {
    "linear": (lambda: nn.Linear(8, 3), (8,)),
    "linear on sequences": (lambda: nn.Linear(8, 3), SEQUENCE),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), IMAGE),
    "conv2d dilated": (lambda: nn.Conv2d(4, 6, 3, dilation=2, padding="same", padding_mode="circular"), IMAGE),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3, stride=2, padding=1, groups=2), (4, 5, 5, 5)),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), IMAGE),
    "cnn": (cnn, IMAGE),
    "embedding": (lambda: nn.Embedding(10, 4, padding_idx=0), TOKENS),
    "layer norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), SEQUENCE),
    "rms norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), SEQUENCE),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)), IMAGE),
    "instance norm": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, affine=True)), IMAGE),
    "batch norm, eval": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).eval(), IMAGE),
    "attention": (Attention, SEQUENCE),
    "attention with weights": (lambda: Attention(need_weights=True), SEQUENCE),
    "attention, frozen, eval": (frozen_attention, SEQUENCE),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), SEQUENCE),
    "transformer, eval": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), SEQUENCE),
    "tied": (Tied, TOKENS),
    "called twice": (Twice, (8,)),
    "low rank": (LowRank, (8,)),
    "aliased and unused": (Aliased, (8,)),
    "lstm": (lambda: Recurrent(nn.LSTM(8, 3, 2, batch_first=True, bidirectional=True)), SEQUENCE),
    "lstm, projected": (lambda: Recurrent(nn.LSTM(8, 3, batch_first=True, proj_size=2)), SEQUENCE),
    "lstm, own state": (OwnState, SEQUENCE),
    "gru": (lambda: Recurrent(nn.GRU(8, 3, batch_first=True)), SEQUENCE),
    "rnn": (lambda: Recurrent(nn.RNN(8, 3, batch_first=True)), SEQUENCE),
    "lstm cell": (lambda: Cells(nn.LSTMCell(8, 3)), SEQUENCE),
    "gru cell": (lambda: Cells(nn.GRUCell(8, 3)), SEQUENCE),
}  # fmt: skip


def inputs(shape, size, dtype):
    if shape == TOKENS:
        return torch.randint(0, 10, (size, 5))
    return torch.randn(size, *shape, dtype=dtype)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@over("name", CASES)
def test_layer(name, dtype):
    torch.manual_seed(3)
    make, shape = CASES[name]
    module = make().to(dtype)
    x = inputs(shape, 4, dtype)
    target = torch.randn_like(module(x))
    groups = torch.tensor([5, 2, 5, 9])
    gradients = per_example(module, x, target, F.mse_loss)
    clip_norm = 0.7 * max(sum(g.square().sum().item() for g in row.values()) ** 0.5 for row in gradients)

    outputs, sums = run(FunctionalClipping(module, 3), x, target, F.mse_loss, groups=groups, clip_norm=clip_norm)

    torch.testing.assert_close(outputs, torch.cat([module(x[i : i + 1]) for i in range(4)]))
    assert_close(sums, clipped_sum(gradients, groups, clip_norm), TOLERANCE[dtype])
    assert all(p.grad is None for p in module.parameters())
    assert {s.dtype for s in sums.values()} == {dtype}


def test_the_loop_of_the_layers_needs_the_clip_norm():
    """The clip norm of `test_layer` clips some units and leaves others."""
    torch.manual_seed(3)
    module, x, target = nn.Linear(8, 3), torch.randn(4, 8), torch.randn(4, 3)
    gradients = per_example(module, x, target, F.mse_loss)
    norms = [sum(g.square().sum().item() for g in row.values()) ** 0.5 for row in gradients]
    assert min(norms) < 0.7 * max(norms) < max(norms)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse_loss", "cross_entropy over positions"])
def test_criterion(loss, reduction):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(7, 8, dtype=torch.float64)
    y = torch.randn(7, 3, dtype=torch.float64) if loss == "mse_loss" else torch.randint(0, 3, (7,))
    if loss == "cross_entropy over positions":
        module = nn.Sequential(module, nn.Linear(3, 12), nn.Unflatten(1, (3, 4))).double()
        y = torch.randint(0, 3, (7, 4))
    function = getattr(F, loss.split()[0])

    def criterion(out, target):
        return function(out, target, reduction=reduction)

    expected = clipped_sum(per_example(module, x, y, criterion), torch.arange(7), 0.5)
    _, sums = run(FunctionalClipping(module), x, y, criterion, clip_norm=0.5, scale=7.0 if reduction == "mean" else 1.0)
    assert_close(sums, expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_models_are_summed_in_float32(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(300, 8), torch.randint(0, 3, (300,))
    expected = clipped_sum(per_example(copy.deepcopy(module), x, y, F.cross_entropy), torch.arange(300), 1e-2)
    _, sums = run(FunctionalClipping(module.to(dtype)), x.to(dtype), y, F.cross_entropy, clip_norm=1e-2, scale=300.0)
    assert {s.dtype for s in sums.values()} == {torch.float32}
    # Each gradient is rounded, and not their sum: 300 roundings of a running sum would show.
    assert_close(sums, expected, torch.finfo(dtype).eps)
