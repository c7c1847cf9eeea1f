"""Stand-ins for photographs, that settings are chosen on."""

import pytest
import torch
from benchmarks import stand_ins
from torch.utils.data import TensorDataset

from anyorder.errors import ArgumentError


def test_a_stand_in_is_of_one_article_and_of_chance():
    articles = torch.rand(4, 28, 28, generator=torch.Generator().manual_seed(9))
    others = articles.clone()
    others[1:] = 1 - others[1:] / 3
    first, second = (stand_ins.made(x, torch.Generator().manual_seed(5)) for x in (articles, others))
    assert first.shape == (4, 3, 32, 32)
    assert torch.equal(first[0], second[0])
    assert all(float((a - b).abs().mean()) > 0.01 for a, b in zip(first[1:], second[1:], strict=True))
    assert torch.equal(first, (first * 255).round() / 255)
    assert 0 <= float(first.min()) < float(first.max()) <= 1


@pytest.mark.parametrize(("plain", "shape"), [(None, (3, 32, 32)), ("mnist", (1, 1, 1))])
def test_no_stand_in_is_scored_on_that_was_trained_on(plain, shape, monkeypatch):
    monkeypatch.setattr(stand_ins, "made", lambda articles, _: articles[:, None, :1, :1].expand(-1, 3, 32, 32))
    images = TensorDataset(torch.arange(10_040.0).view(-1, 1, 1, 1), torch.arange(10_040) % 10)
    data = stand_ins.load(images, 40, plain)
    assert (data.name, data.input_shape) == (plain or "stand_ins", shape)
    for part, rows in ((data.train, torch.arange(40)), (data.test, torch.arange(40, 10_040))):
        x, y = part.tensors
        assert torch.equal(x[:, 0, 0, 0], rows.float())
        assert torch.equal(y, rows % 10)
    assert len(stand_ins.load(images, 7).train) == 7
    for size in (41, 10_040, 0):
        with pytest.raises(ArgumentError, match="size must be an integer from 1 to 40"):
            stand_ins.load(images, size)
