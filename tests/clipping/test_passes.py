"""Several passes over one batch: a unit's gradient is the sum over all of them, and is clipped once."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyorder.clipping.per_example import FunctionalClipping, GhostClipping, Passes
from anyorder.errors import ModelError, TrainingError
from clipping.brute import clipped_sum, distance, norm

B = 7


class Direct(nn.Module):
    """A parameter that no layer's rule knows, and one that is used twice."""

    def __init__(self):
        super().__init__()
        self.scale, self.tied = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.tied(torch.tanh(self.tied(x * self.scale)))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(5, 6), nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, ids):
        return self.head(self.norm(self.table(ids)).mean(1))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)),
    "direct": Direct,
    "tokens": Tokens,
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Flatten(), nn.Linear(9, 4)),
}
ENGINES = {
    "ghost": GhostClipping,
    "ghost in chunks": lambda model: GhostClipping(model, chunk_size=3),
    "functional": FunctionalClipping,
    "functional in chunks": lambda model: FunctionalClipping(model, chunk_size=2),
}


def loss(outputs):
    """Terms of each pass, and of all of them together."""
    terms = sum((k + 1) * out.square().sum(1) for k, out in enumerate(outputs))
    return sum((a * b).sum(1) for a, b in itertools.pairwise(outputs)) + terms


def inputs(name, passes, generator):
    if name == "tokens":
        return [torch.randint(0, 5, (B, 3), generator=generator) for _ in range(passes)]
    return [torch.randn(B, 4, generator=generator) for _ in range(passes)]


def by_loop(model, given, groups, clip_norm):
    """One example at a time, by plain autograd."""
    parameters = dict(model.named_parameters())
    rows = []
    for i in range(B):
        value = loss([model(x[i : i + 1]) for x in given]).sum()
        rows.append(dict(zip(parameters, torch.autograd.grad(value, list(parameters.values())), strict=True)))
    return clipped_sum(rows, groups, clip_norm)


def together(clipping, given, groups, clip_norm):
    received, passes = [], Passes()
    options = {"groups": groups, "clip_norm": clip_norm, "scale": float(B), "receive": received.append}
    outputs = [clipping.forward((x,), {}, passes=passes, **options) for x in given]
    loss(outputs).mean().backward()
    (sums,) = received
    return sums


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_a_loop(name, engine, passes):
    torch.manual_seed(passes)
    generator = torch.Generator().manual_seed(passes)
    model = MODELS[name]()
    clipping = ENGINES[engine](model)
    for step in range(4):  # the first ones by the model's code, the later ones by what was written down
        groups = torch.tensor([3, 0, 0, 1, 5, 1, 2]) if step % 2 else torch.arange(B)
        given = inputs(name, passes, generator)
        clip_norm = 0.8 * norm(by_loop(model, given, groups, float("inf"))) / B
        expected = by_loop(model, given, groups, clip_norm)
        found = together(clipping, given, groups, clip_norm)
        assert distance(found, expected) <= 2e-5 * norm(expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_unit_adds_one_clip_norm_however_many_passes(engine):
    """All passes pull one way: clipped each by itself they would add up to as many clip norms."""
    model = nn.Linear(4, 4)
    x = torch.randn(1, 4).expand(B, 4)
    sums = together(ENGINES[engine](model), [x] * 4, torch.arange(B), 1e-3)
    assert B * 1e-3 * (1 - 1e-3) <= norm(sums) <= B * 1e-3 * (1 + 1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_backward_draws_what_each_pass_drew(engine):
    """Of a linear map w of x with a random mask, <gradient, w> is the output: mask by mask, pass by pass."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1, bias=False))
    received, passes = [], Passes()
    options = {"groups": torch.arange(B), "clip_norm": 1e6, "scale": 1.0, "receive": received.append}
    clipping = ENGINES[engine](model)
    outputs = [clipping.forward((torch.randn(B, 4),), {}, passes=passes, **options) for _ in range(3)]
    assert len({float(x.detach().sum()) for x in outputs}) == 3
    sum(x.sum() for x in outputs).backward()
    inner = (received[0]["1.weight"] * model[1].weight).sum()
    torch.testing.assert_close(inner, sum(x.detach().sum() for x in outputs))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pass_outside_of_the_loss_adds_nothing_and_a_second_backward_is_refused(engine):
    model, groups, received, passes = nn.Linear(4, 4), torch.arange(B), [], Passes()
    options = {"groups": groups, "clip_norm": 1.0, "scale": float(B), "receive": received.append, "passes": passes}
    clipping, x = ENGINES[engine](model), torch.randn(B, 4)
    first, other = (clipping.forward((one,), {}, **options) for one in (x, torch.randn(B, 4)))
    loss([first]).mean().backward()
    (sums,) = received
    assert distance(sums, by_loop(model, [x], groups, 1.0)) <= 1e-5
    with pytest.raises(TrainingError, match="Add the losses and call backward once"):
        other.mean().backward()
    assert len(received) == 1


def test_passes_that_run_in_different_ways_are_refused():
    model, passes = nn.Linear(4, 4), Passes()
    options = {"groups": torch.arange(B), "clip_norm": 1.0, "scale": 1.0, "receive": print, "passes": passes}
    GhostClipping(model).forward((torch.randn(B, 4),), {}, **options)
    with pytest.raises(TrainingError, match="in different ways"):
        GhostClipping(model, chunk_size=2).forward((torch.randn(B, 4),), {}, **options)
    for make in (GhostClipping, FunctionalClipping):
        options["passes"] = Passes()
        make(model, chunk_size=3).forward((torch.randn(B, 4),), {}, **options)
        with pytest.raises(TrainingError, match="in different ways"):
            make(model, chunk_size=2).forward((torch.randn(B, 4),), {}, **options)


@pytest.mark.parametrize("engine", ["ghost in chunks", "functional", "functional in chunks"])
def test_gradients_do_not_go_back_through_chunks(engine):
    """To what another network made: only where the batch goes through at once do they come to it, row by row."""
    passes = Passes()
    passes.chained = True
    options = {"groups": torch.arange(B), "clip_norm": 1.0, "scale": 1.0, "receive": print, "passes": passes}
    with pytest.raises(ModelError, match="does not go through it at once"):
        ENGINES[engine](nn.Linear(4, 4)).forward((torch.randn(B, 4, requires_grad=True),), {}, **options)


def test_on_a_grid():
    torch.manual_seed(0)
    model, grid = MODELS["mlp"](), 1e-6
    given, groups = [torch.randn(B, 4), torch.randn(B, 4)], torch.tensor([0, 1, 0, 2, 3, 4, 4])
    found = together(FunctionalClipping(model, 2, grid), given, groups, 0.5)
    expected = by_loop(model, given, groups, 0.5)
    assert distance({n: v * grid for n, v in found.items()}, expected) <= 1e-3


def test_two_parts_of_a_model_have_uses_of_their_own():
    """The first pass reads one layer and the second the other: each parameter has one use, and the clip is joint."""

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, first: bool):
            return self.one(x) if first else self.two(x)

    torch.manual_seed(0)
    model = Parts()
    clipping = GhostClipping(model)
    for _ in range(4):
        received, passes, x = [], Passes(), torch.randn(B, 4)
        options = {"groups": torch.arange(B), "clip_norm": 0.5, "scale": 1.0, "receive": received.append}
        one, two = (clipping.forward((x, first), {}, passes=passes, **options) for first in (True, False))
        (F.softplus(one).sum() + two.square().sum()).backward()
        rows = []
        for i in range(B):
            value = F.softplus(model(x[i : i + 1], True)).sum() + model(x[i : i + 1], False).square().sum()
            gradients = torch.autograd.grad(value, list(model.parameters()))
            rows.append(dict(zip(dict(model.named_parameters()), gradients, strict=True)))
        expected = clipped_sum(rows, torch.arange(B), 0.5)
        assert distance(received[0], expected) <= 1e-5 * norm(expected)
