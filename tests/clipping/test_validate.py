"""Which models are refused, by name and all at once."""

import pytest
import torch
from torch import nn

from anyorder.clipping import check_model
from anyorder.errors import ArgumentError, ModelError


class Block(nn.Module):
    def __init__(self, *, track):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.sync = nn.SyncBatchNorm(8)
        self.instance = nn.InstanceNorm2d(8, track_running_stats=track)
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def test_all_problems_are_named():
    with pytest.raises(ModelError) as caught:
        check_model(nn.Sequential(nn.Linear(4, 3), Block(track=True)))
    message = str(caught.value)
    for part in ("1.norm (BatchNorm2d)", "GroupNorm(num_groups, 8)", "1.sync (SyncBatchNorm)", "1.instance", "1.phase"):
        assert part in message, part
    assert "1.conv" not in message
    assert message.count("\n- ") == 4


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.BatchNorm3d(3), nn.LazyBatchNorm2d(), nn.BatchNorm2d(3).eval()])
def test_batch_norm_of_every_kind(norm):
    with pytest.raises(ModelError, match="GroupNorm"):
        check_model(nn.Sequential(nn.Linear(2, 2), norm))


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)),
        nn.TransformerEncoderLayer(8, 2, 16),
        nn.LSTM(4, 3),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)),
        nn.Linear(2, 2).half(),
    ],
)
def test_models_that_pass(module):
    check_model(module)


def test_frozen_integer_weights_pass():
    module = nn.Linear(2, 2)
    module.table = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    check_model(module)


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_nothing_to_train(module):
    with pytest.raises(ModelError, match="trainable"):
        check_model(module)


def test_lazy_modules_have_no_shape():
    with pytest.raises(ModelError, match=r"parameter 0\.weight has no shape yet"):
        check_model(nn.Sequential(nn.LazyLinear(3)))


def test_not_a_module():
    with pytest.raises(ArgumentError, match="got function"):
        check_model(lambda x: x)
