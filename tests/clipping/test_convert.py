"""A converted model has nothing left to find, keeps what means the same, and leaves the original alone."""

import copy

import pytest
import torch
from torch import nn

import anyorder as ao
from anyorder.clipping import convert
from anyorder.clipping.per_example import GhostClipping
from anyorder.clipping.validate import check_model
from anyorder.errors import ArgumentError, ModelError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 8, max_norm=1.0)
        self.flat = nn.BatchNorm1d(8)
        self.conv = nn.Sequential(nn.Conv2d(8, 64, 1), nn.BatchNorm2d(64, eps=1e-3), nn.ReLU())
        self.instance = nn.InstanceNorm2d(64, track_running_stats=True, affine=True)
        self.volume = nn.BatchNorm3d(64, affine=False)
        self.again = self.conv[1]

    def forward(self, ids, x):
        x = self.again(self.conv(x + self.flat(self.table(ids))[..., None, None]))
        return self.volume(self.instance(x)[:, :, None])


def test_nothing_is_left_to_find_and_the_model_trains():
    torch.manual_seed(0)
    model = convert(Net())
    assert check_model(model) == []
    received = []
    outputs = GhostClipping(model).forward(
        (torch.tensor([0, 3, 4]), torch.randn(3, 8, 4, 4)),
        {},
        groups=torch.arange(3),
        clip_norm=1.0,
        scale=1.0,
        receive=received.append,
    )
    (outputs * torch.randn(64, 1, 4, 4)).sum().backward()
    assert all(values.any() for values in received[0].values())


def test_what_means_the_same_is_kept():
    torch.manual_seed(0)
    original = Net().double()
    for p in original.parameters():
        nn.init.normal_(p)
    original.conv.eval()
    original.conv[1].weight.requires_grad_(False)
    before = copy.deepcopy(original.state_dict())
    model = convert(original)
    kept = dict(model.named_parameters())
    assert list(kept) == [name for name, _ in original.named_parameters()]
    for name, p in original.named_parameters():
        assert torch.equal(kept[name], p)
        assert kept[name].dtype == p.dtype
        assert kept[name].requires_grad == p.requires_grad
        assert kept[name] is not p
    assert model.again is model.conv[1]
    assert (model.conv[1].eps, model.conv[1].num_groups, model.flat.num_groups) == (1e-3, 16, 1)
    assert [part.training for part in (model, model.conv, model.conv[1], model.flat)] == [True, False, False, True]
    assert isinstance(original.conv[1], nn.BatchNorm2d)
    assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())


@pytest.mark.parametrize("channels", [2, 3, 7, 8, 30, 64, 100, 256])
def test_no_example_is_normalised_to_nothing(channels):
    """One place for each channel: groups of one channel would give zeros."""
    torch.manual_seed(0)
    for norm, shape in ((nn.BatchNorm1d(max(channels, 8)), ()), (nn.BatchNorm2d(channels), (1, 1))):
        layer = convert(norm)
        assert layer(torch.randn(5, layer.num_channels, *shape)).square().mean() > 0.5
        assert layer.num_groups <= min(32, layer.num_channels / 2)


@pytest.mark.parametrize("channels", [1, 2, 7])
@pytest.mark.parametrize("positions", [(), (4,)])
def test_of_few_features_scale_and_shift_are_kept(channels, positions):
    """GroupNorm would give 0 for one value, and the sign of the difference for two."""
    layer = nn.BatchNorm1d(channels, eps=0)  # with statistics of 0 and 1 it is what it learned
    for p in layer.parameters():
        nn.init.normal_(p)
    x = torch.randn(5, channels, *positions)
    with pytest.warns(
        ao.errors.ModelWarning, match=r"^1 \(BatchNorm1d\): the copy keeps .* standardise the model's inputs"
    ):
        model = convert(nn.Sequential(nn.Identity(), layer.eval()))
    assert torch.allclose(model(x), layer(x))
    assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias"]
    assert check_model(model) == []
    assert "keep the scale and shift alone" in check_model(layer)[0].cure
    with pytest.warns(ao.errors.ModelWarning, match="^the model "):
        assert torch.equal(convert(nn.BatchNorm1d(channels, affine=False))(x), x)
    received, options = [], {"groups": torch.arange(5), "clip_norm": 1e6, "scale": 1.0}
    GhostClipping(model).forward((x,), {}, **options, receive=received.append).square().sum().backward()
    layer(x).square().sum().backward()
    assert torch.allclose(received[0]["1.weight"], layer.weight.grad, rtol=1e-4)


class Own(nn.BatchNorm2d):
    """A layer that does more than normalise."""

    def forward(self, x):
        return super().forward(x).relu()


def test_what_has_no_replacement_stays_and_is_found():
    assert check_model(convert(nn.Sequential(nn.Conv2d(3, 4, 1), Own(4))))[0].name == "1"


def test_lazy_layers_must_see_an_example_first():
    with pytest.raises(ModelError, match="parameter 0.weight has no shape yet"):
        convert(nn.Sequential(nn.LazyConv2d(4, 1), nn.BatchNorm2d(4)))


def test_a_layer_alone():
    assert isinstance(convert(nn.BatchNorm2d(8)), nn.GroupNorm)
    instance = convert(nn.InstanceNorm1d(3, track_running_stats=True))
    assert check_model(nn.Sequential(nn.Linear(2, 2), instance)) == []
    assert not list(instance.buffers())


def test_not_a_module():
    with pytest.raises(ArgumentError, match="got function"):
        convert(lambda x: x)
