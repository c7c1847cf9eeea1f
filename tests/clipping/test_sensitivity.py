"""The bound that the noise is made for: what one unit adds to the sum."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from anyorder.clipping.bounded import ClippedSum
from anyorder.clipping.per_example import FunctionalClipping, GhostClipping
from clipping.brute import clipped_sum, distance, norm, per_example, run

Clipping = FunctionalClipping


@pytest.fixture(params=[FunctionalClipping, GhostClipping], autouse=True)
def engine(request, monkeypatch):
    """Every test of this file holds for both engines."""
    monkeypatch.setitem(globals(), "Clipping", request.param)


CLIP_NORM = 0.5
PARAMETERS = {"a": torch.zeros(3, 5), "b": torch.zeros(7)}


def one_unit(rows, *, clip_norm, scale, chunk):
    """The clipped sum of one unit with the given {name: (c, size)} examples."""
    total = ClippedSum({name: row[0] for name, row in rows.items()}, clip_norm=clip_norm, scale=scale)
    count = len(next(iter(rows.values())))
    for i in range(0, count, chunk):
        part = {name: row[i : i + chunk] for name, row in rows.items()}
        units = torch.zeros(len(next(iter(part.values()))), dtype=torch.int64)
        total.add(part, units, complete=i + chunk >= count)
    return total.finish()


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 5),
    chunk=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    magnitude=st.floats(-30, 30),
    log_clip=st.floats(-4, 4),
    log_scale=st.floats(-3, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_no_unit_is_over_the_clip_norm(seed, count, chunk, sizes, magnitude, log_clip, log_scale, dtype):
    generator = torch.Generator().manual_seed(seed)
    rows = {
        str(i): torch.randn(count, size, generator=generator, dtype=dtype) * 10**magnitude
        for i, size in enumerate(sizes)
    }
    clip_norm, scale = 10**log_clip, 10**log_scale
    result = norm(one_unit(rows, clip_norm=clip_norm, scale=scale, chunk=chunk))
    assert result <= clip_norm
    unclipped = scale * norm({name: row.double().sum(0) for name, row in rows.items()})
    assert result == pytest.approx(min(unclipped, clip_norm), rel=1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("factor", [1 - 1e-7, 1.0, 1 + 1e-7, 1e38, 1e39])
def test_the_bound_holds_where_rounding_could_break_it(factor):
    """At the border, and where the factor is too small for a normal float32."""
    for seed in range(50):
        v = torch.randn(1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        row = (v / v.norm() * factor).float().clamp(max=3e38)[None]
        assert norm(one_unit({"p": row}, clip_norm=1e-3, scale=1e-3 if factor < 2 else 1.0, chunk=1)) <= 1e-3


def test_zero_gradient_gives_zero():
    sums = one_unit({"p": torch.zeros(2, 4)}, clip_norm=1.0, scale=3.0, chunk=1)
    assert torch.equal(sums["p"], torch.zeros(4))


# -- removing and replacing a unit, with faults planted --------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def real(module, x, y, groups):
    return run(Clipping(module, 2), x, y, F.cross_entropy, groups=groups, clip_norm=CLIP_NORM)[1]


def per_example_fault(module, x, y, groups):
    return clipped_sum(per_example(module, x, y, F.cross_entropy), torch.arange(len(x)), CLIP_NORM)


def per_layer_fault(module, x, y, groups):
    gradients = per_example(module, x, y, F.cross_entropy)
    layers = [[{name: row[name]} for row in gradients] for name in gradients[0]]
    return functools.reduce(dict.__or__, (clipped_sum(layer, groups, CLIP_NORM) for layer in layers))


def after_averaging_fault(module, x, y, groups):
    gradients = per_example(module, x, y, F.cross_entropy)
    mean = {name: sum(row[name] for row in gradients) / len(x) for name in gradients[0]}
    return {name: g * len(x) for name, g in clipped_sum([mean], torch.zeros(1), CLIP_NORM).items()}


def unclipped_fault(module, x, y, groups):
    return clipped_sum(per_example(module, x, y, F.cross_entropy), groups, math.inf)


def largest_changes(mechanism):
    """The largest change of the sum over trials: by removing a unit, by replacing it."""
    removed, replaced = [], []
    module = network()
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        x = 3 * torch.randn(9, 4, generator=generator)
        y = torch.randint(0, 3, (9,), generator=generator)
        groups = torch.tensor([4, 0, 4, 2, 2, 7, 4, 0, 4])
        whole = mechanism(module, x, y, groups)
        for unit in (4, 0, 7):
            kept = groups != unit
            removed.append(distance(whole, mechanism(module, x[kept], y[kept], groups[kept])))
            other = x.clone()
            other[~kept] = -x[~kept]
            labels = torch.where(kept, y, (y + 1) % 3)
            replaced.append(distance(whole, mechanism(module, other, labels, groups)))
    return max(removed), max(replaced)


def test_sensitivity():
    removed, replaced = largest_changes(real)
    assert 0.99 * CLIP_NORM < removed <= CLIP_NORM * (1 + 1e-5)
    assert 1.5 * CLIP_NORM < replaced <= 2 * CLIP_NORM * (1 + 1e-5)


@pytest.mark.parametrize("fault", [per_example_fault, per_layer_fault, after_averaging_fault, unclipped_fault])
def test_the_sensitivity_test_sees_faults(fault):
    removed, _ = largest_changes(fault)
    assert removed > 1.05 * CLIP_NORM


def test_the_oracle_is_what_runs():
    module = network().double()
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.randint(0, 3, (9,))
    groups = torch.tensor([4, 0, 4, 2, 2, 7, 4, 0, 4])
    expected = clipped_sum(per_example(module, x, y, F.cross_entropy), groups, CLIP_NORM)
    assert distance(real(module, x, y, groups), expected) < 1e-10
