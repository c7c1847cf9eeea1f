"""The two ways out of vmap, the quick one and torch.func's own, give the same sums."""

import pytest
import torch
from torch import Tensor, nn

from anyorder.clipping import layer_rules, torch_private
from anyorder.clipping.per_example import GhostClipping


def clipped(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    received: list[dict[str, Tensor]] = []
    groups = torch.arange(len(x))
    y = GhostClipping(model).forward((x,), {}, groups=groups, clip_norm=1.0, scale=1.0, receive=received.append)
    y.square().sum().backward()
    return received[0]


def test_without_torchs_undocumented_function(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(108, 5), nn.Tanh(), nn.Linear(5, 4))
    x = torch.randn(6, 2, 8, 8)
    quick = clipped(model, x)
    monkeypatch.setattr(torch_private, "interpreter", None)
    for name, value in clipped(model, x).items():
        assert torch.equal(value, quick[name])


def test_without_torchs_undocumented_way_into_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.Dropout(0.5), nn.Linear(5, 4))
    x = torch.randn(6, 8)
    torch.manual_seed(1)
    quick = clipped(model, x)
    monkeypatch.setattr(torch_private, "enter_vmap", None)
    torch.manual_seed(1)
    for name, value in clipped(model, x).items():
        assert torch.equal(value, quick[name])


def test_a_map_over_examples_ends_where_the_function_fails() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("of the function")

    with pytest.raises(RuntimeError, match="of the function"):
        layer_rules.for_each_example(fails, torch.zeros(3))
    assert torch_private.current_level() is None


def test_a_result_that_is_the_same_for_all_examples_has_a_row_for_each() -> None:
    ((same, own),) = layer_rules.for_each_example(lambda x: ((torch.ones(2), 2 * x),), torch.arange(3.0))
    assert same.tolist() == [[1.0, 1.0]] * 3
    assert own.tolist() == [0.0, 2.0, 4.0]
