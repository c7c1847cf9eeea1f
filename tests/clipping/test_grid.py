"""Sums on a grid: each unit's integers, added exactly."""

import itertools
from fractions import Fraction

import pytest
import torch
from torch import nn

from anyorder.clipping.bounded import ClippedSum
from anyorder.clipping.per_example import FunctionalClipping
from clipping.brute import run

GRID = 2.0**-12
SHAPES = {"a": (3, 5), "b": (7,)}


def parameters(dtype=torch.float32):
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def gradients(count, *, seed=0, size=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(count, *shape, generator=generator) * size).to(dtype) for name, shape in SHAPES.items()}


def sums(rows, *, grid=GRID, clip_norm=1.0, chunk=None, units=None, dtype=torch.float32):
    count = len(rows["a"])
    total = ClippedSum(parameters(dtype), clip_norm=clip_norm, scale=1.0, grid=grid)
    units = torch.arange(count) if units is None else units
    for i in range(0, count, chunk or count):
        piece = slice(i, i + (chunk or count))
        own = units[piece]
        complete = piece.stop >= count or own[-1] != units[piece.stop]
        total.add({name: row[piece] for name, row in rows.items()}, own - own[0], complete=bool(complete))
    return total.finish()


def flat(sums):
    return torch.cat([value.reshape(-1) for value in sums.values()])


def squared(integers):
    return sum(int(i) ** 2 for i in flat(integers).tolist())


def one(rows, i):
    return {name: row[i : i + 1] for name, row in rows.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-4, 0.05, 1.0, 1e30])
@pytest.mark.parametrize("clip_norm", [1.0, 0.3, 1 + 2**-30])
def test_no_unit_has_more_than_the_norm(dtype, size, clip_norm):
    """In exact arithmetic, over the integers; and truncation takes less than one step from a coordinate."""
    rows = gradients(40, size=size, dtype=dtype)
    for i in range(40):
        integers = sums(one(rows, i), clip_norm=clip_norm, dtype=dtype)
        assert flat(integers).dtype == torch.int64
        assert squared(integers) <= (Fraction(clip_norm) / Fraction(GRID)) ** 2
        plain = flat(sums(one(rows, i), grid=None, clip_norm=clip_norm, dtype=dtype)).double() / GRID
        assert torch.equal(plain.trunc(), flat(integers).double())


def test_sums_are_exact_in_every_order_and_chunk():
    rows = gradients(23)
    expected = sum(flat(sums(one(rows, i))) for i in range(23))
    for chunk in (1, 4, 23):
        assert torch.equal(flat(sums(rows, chunk=chunk)), expected)
    shuffled = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    assert torch.equal(flat(sums({name: row[shuffled] for name, row in rows.items()})), expected)


def test_a_unit_of_several_examples_is_truncated_once():
    rows = gradients(6, size=0.05)
    units = torch.tensor([0, 0, 0, 1, 1, 2])
    joined = {name: torch.stack([row[units == u].sum(0) for u in range(3)]) for name, row in rows.items()}
    for chunk in (2, 6):
        difference = flat(sums(rows, units=units, chunk=chunk)) - flat(sums(joined))
        assert difference.abs().max() <= 1  # the floating-point sum over a unit's examples may round otherwise


def test_neighbours_differ_by_the_unit_alone():
    """Zero-out and replace-one: exact, whatever the others are."""
    rows, others = gradients(9), gradients(9, seed=1)
    own = sums(one(rows, 4))
    for rest in (rows, others):
        with_unit = {name: rest[name].clone() for name in rest}
        zeroed = {name: rest[name].clone() for name in rest}
        for name in rest:
            with_unit[name][4] = rows[name][4]
            zeroed[name][4] = 0
        assert torch.equal(flat(sums(with_unit)) - flat(sums(zeroed)), flat(own))


def test_a_unit_over_the_norm_counts_as_zero(monkeypatch):
    """Were the floating-point norm ever wrong, the integers would show it: nothing of that unit is added."""
    rows = gradients(5, size=10.0)
    total = ClippedSum(parameters(), clip_norm=1.0, scale=1.0, grid=GRID)
    total._clip_norm = 1.001
    total.add(rows, torch.arange(5), complete=True)
    assert not flat(total.finish()).any()


def test_a_unit_below_the_grid_vanishes():
    assert not flat(sums(gradients(3, size=1e-9))).any()


def test_infinite_gradients_add_zero_as_without_a_grid():
    rows, others = gradients(3), gradients(3)
    rows["a"][1, 0, 0] = float("inf")
    for gradient in others.values():
        gradient[1] = 0.0
    assert torch.equal(flat(sums(rows)), flat(sums(others)))


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_model_s_neighbours_differ_by_one_bounded_vector(chunk_size):
    """Through torch.func: replacing example 2 changes the sum by the same integers, whatever the other examples are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))
    clipping = FunctionalClipping(model, chunk_size, GRID)

    def total(x, y):
        return flat(run(clipping, x, y, nn.CrossEntropyLoss(), clip_norm=0.5)[1])

    changes = []
    for _ in range(3):
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
        pair = []
        for value, label in ((1.0, 0), (-2.0, 1)):
            x[2], y[2] = value, label
            pair.append(total(x, y))
        changes.append(pair[0] - pair[1])
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(changes))
    assert changes[0].any()
    assert sum(i * i for i in changes[0].tolist()) <= (2 * 0.5 / GRID) ** 2
