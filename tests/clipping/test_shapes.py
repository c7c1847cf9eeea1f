"""Every kind of layer in shapes that hypothesis chooses, by both engines, against a loop over examples in float64.

Sums are right to TOLERANCE, or to the rounding of torch's own loop where a shape makes that larger.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from anyorder.clipping.per_example import FunctionalClipping, GhostClipping
from clipping.brute import TOLERANCE, clipped_sum, distance, norm, per_example, run
from clipping.test_layers_by_loop import Cells, Recurrent


class Attention(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x, x)[0]


def convolution(draw, kinds):
    dims, groups, kernel = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    channels, out = (groups * draw(st.integers(1, 3)) for _ in range(2))
    options = {"stride": draw(st.integers(1, 2)), "groups": groups, "bias": draw(st.booleans())}
    side = draw(st.integers(kernel, kernel + 3))
    return kinds[dims - 1](channels, out, kernel, **options), (channels, *(side,) * dims)


def linear(draw):
    size, positions = draw(st.integers(1, 9)), draw(st.lists(st.integers(1, 5), max_size=2))
    return nn.Linear(size, draw(st.integers(1, 9)), bias=draw(st.booleans())), (*positions, size)


def normed(draw):
    size, positions = draw(st.integers(2, 9)), draw(st.integers(1, 5))
    kind = draw(st.sampled_from([nn.LayerNorm, nn.RMSNorm]))
    return nn.Sequential(nn.Linear(size, size), kind(size)), (positions, size)


def normed_by_channel(draw):
    channels, side = 2 * draw(st.integers(1, 3)), draw(st.integers(2, 4))
    layer = nn.GroupNorm(2, channels) if draw(st.booleans()) else nn.InstanceNorm2d(channels, affine=True)
    return nn.Sequential(nn.Conv2d(channels, channels, 1), layer), (channels, side, side)


def attention(draw):
    heads, width, positions = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    layer = nn.MultiheadAttention(heads * width, heads, batch_first=True, bias=draw(st.booleans()))
    return Attention(layer), (positions, heads * width)


def recurrent(draw):
    kind = draw(st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]))
    size, hidden, steps = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 7))
    options = {"num_layers": draw(st.integers(1, 2)), "bidirectional": draw(st.booleans()), "batch_first": True}
    return Recurrent(kind(size, hidden, **options)), (steps, size)


def cell(draw):
    kind = draw(st.sampled_from([nn.LSTMCell, nn.GRUCell, nn.RNNCell]))
    size, hidden, steps = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return Cells(kind(size, hidden)), (steps, size)


LAYERS = {
    "linear": linear,
    "convolution": lambda draw: convolution(draw, (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
    "transposed": lambda draw: convolution(draw, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)),
    "norm": normed,
    "norm by channel": normed_by_channel,
    "attention": attention,
    "recurrent": recurrent,
    "cell": cell,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LAYERS)
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_sums_are_those_of_the_loop(name, dtype, data):
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    module, shape = LAYERS[name](data.draw)
    module.to(dtype)
    size = data.draw(st.integers(1, 5))
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    x = torch.randn(size, *shape, dtype=dtype)
    y = torch.randn_like(module(x))
    exact = per_example(copy.deepcopy(module).double(), x.double(), y.double(), F.mse_loss)
    own = per_example(module, x, y, F.mse_loss)
    largest = max(norm(g) for g in exact)
    for clip_norm in (0.5 * largest, 10 * size * largest):
        expected = clipped_sum(exact, groups, clip_norm)
        rounding = distance(clipped_sum(own, groups, clip_norm), expected)  # large where the gradient nearly cancels
        rounding += 2 * torch.finfo(dtype).eps * min(clip_norm, size * largest)  # where units cancel, to a bit perhaps
        for engine in (FunctionalClipping, GhostClipping):
            clipping = engine(module, data.draw(st.sampled_from([None, 1, 3])))
            _, sums = run(clipping, x, y, F.mse_loss, groups=groups, clip_norm=clip_norm)
            assert distance(sums, expected) <= TOLERANCE[dtype] * norm(expected) + 2 * rounding
