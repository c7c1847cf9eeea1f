"""Sums of floats that are the same in any order: multiples of one step, never above the clip norm."""

import pytest
import torch

from anyorder.clipping import Adaptive
from anyorder.clipping.bounded import ClippedSum, step_of
from anyorder.clipping.norms import Cut
from anyorder.errors import ArgumentError

SHAPES = {"a": (3, 5), "b": (7,)}


def total(rows, pieces, *, clip_norm=0.7, rule=None, any_order=True):
    shapes = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    result = ClippedSum(shapes, clip_norm=clip_norm, scale=1.0, cut=Cut.of(rule), any_order=any_order)
    for piece in pieces:
        result.add({name: row[piece] for name, row in rows.items()}, torch.arange(len(piece)), complete=True)
    return result.finish()


def rows(count, size=1.0):
    generator = torch.Generator().manual_seed(3)
    scales = size * torch.logspace(-1, 1, count)
    return {
        name: torch.randn(count, *shape, generator=generator) * scales.view(-1, *[1] * len(shape))
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("clip_norm", [1.0, 0.5, 2.0**-60, 2.0**60, 0.7, 1 + 2**-52, 2 - 2**-52, 3.0, 1e-9])
def test_the_step_is_a_power_of_two_just_above_a_fraction_of_the_norm(clip_norm):
    step = step_of(clip_norm)
    assert step.hex().startswith("0x1.0000000000000p")
    assert clip_norm / 2**31 <= step < clip_norm / 2**30


@pytest.mark.parametrize("clip_norm", [2.0**-61, 2.0**61, 0.0, float("nan")])
def test_norms_without_room_around_them_are_refused(clip_norm):
    with pytest.raises(ArgumentError, match="2\\^-60 to 2\\^60"):
        step_of(clip_norm)


@pytest.mark.parametrize("rule", [None, Adaptive()])
def test_no_order_and_no_chunk_leaves_a_bit(rule):
    """The counts of a rule are added as exactly as the vectors."""
    given, order = rows(30), torch.randperm(30, generator=torch.Generator().manual_seed(1)).tolist()
    chunks = [list(range(30))], [[i] for i in range(30)], [order[:7], order[7:8], order[8:]], [order]
    first, *others = [total(given, pieces, rule=rule) for pieces in chunks]
    step = step_of(0.7)
    for value in first.values():
        assert value.dtype == torch.float64
        assert torch.equal(value, (value / step).trunc() * step)
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1.0, 1e6])
def test_truncation_raises_no_coordinate(size):
    given, step = rows(20, size), step_of(0.7)
    for i in range(20):
        cut, exact = total(given, [[i]]), total(given, [[i]], any_order=False)
        for name in SHAPES:
            assert (cut[name].abs() <= exact[name].double().abs()).all()
            assert (cut[name].sign() * exact[name].double().sign() >= 0).all()
            assert ((cut[name] - exact[name].double()).abs() < step).all()
        assert sum(float(cut[name].square().sum()) for name in SHAPES) <= 0.7**2
