"""Which models are refused, by name and all at once, and what is found in them."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.clipping.validate import check_model, refuse_unfit
from anyorder.errors import ArgumentError, ModelError


class Block(nn.Module):
    def __init__(self, *, track):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.sync = nn.SyncBatchNorm(8)
        self.instance = nn.InstanceNorm2d(8, track_running_stats=track)
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


PARTS = ("1.norm (BatchNorm2d)", "GroupNorm(2, 8)", "1.sync (SyncBatchNorm)", "1.instance", "1.phase")


def test_all_problems_are_named():
    with pytest.raises(ModelError) as caught:
        refuse_unfit(nn.Sequential(nn.Linear(4, 3), Block(track=True)))
    message = str(caught.value)
    for part in PARTS:
        assert part in message, part
    assert "1.conv" not in message
    assert message.count("\n- ") == 4


def test_findings_are_a_list_that_can_be_printed():
    found = ao.check_model(nn.Sequential(nn.Linear(4, 3), Block(track=True)))
    assert [finding.name for finding in found] == ["1.norm", "1.sync", "1.instance", "1.phase"]
    assert all(finding.problem and finding.cure for finding in found)
    printed = "\n".join(map(str, found))
    assert all(part in printed for part in PARTS)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.BatchNorm3d(3), nn.LazyBatchNorm2d(), nn.BatchNorm2d(3).eval()])
def test_batch_norm_of_every_kind(norm):
    found = check_model(nn.Sequential(nn.Linear(2, 2), norm))
    assert found[0].name == "1"
    assert "GroupNorm" in found[0].cure


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
    assert check_model(module) == []
    refuse_unfit(module)


def test_frozen_integer_weights_pass():
    module = nn.Linear(2, 2)
    module.table = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    assert check_model(module) == []


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (nn.ReLU(), "", "trainable"),
        (nn.Linear(2, 2).requires_grad_(False), "", "trainable"),
        (nn.Sequential(nn.LazyLinear(3)), "0.weight", "no shape yet"),
        (nn.Linear(2, 2, device="meta"), "weight", "meta device"),
        (nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), "0", "give its .module"),
        (nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)), "0", "max_norm=None"),
    ],
)
def test_what_else_is_found(module, name, words):
    finding = check_model(module)[0]
    assert finding.name == name
    assert words in str(finding)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_models():
    finding = check_model(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))[0]
    assert finding.name == "0"
    assert "made from" in finding.cure


@pytest.mark.parametrize(
    "module", [nn.DataParallel(nn.Linear(4, 2)), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))]
)
def test_the_engine_refuses_what_is_found(module):
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
    plan = ao.plan(loader=loader, epochs=1, epsilon=8, delta=1e-3, mechanism="tree")
    with pytest.raises(ModelError) as caught:
        ao.PrivacyEngine(plan).make_private(module, torch.optim.SGD(module.parameters(), lr=0.1), loader)
    assert all(str(finding) in str(caught.value) for finding in check_model(module))


def test_not_a_module():
    with pytest.raises(ArgumentError, match="got function"):
        check_model(lambda x: x)
