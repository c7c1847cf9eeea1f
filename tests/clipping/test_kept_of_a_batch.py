"""What a model keeps of one batch for the next is refused, wherever it is kept."""

import contextlib
import gc
import traceback
import weakref

import pytest
import torch
from torch import nn

from anyorder.clipping import kept_tensors
from anyorder.clipping.per_example import FunctionalClipping, GhostClipping
from anyorder.errors import ModelError

ENGINES = [GhostClipping, FunctionalClipping, lambda m: GhostClipping(m, 2), lambda m: FunctionalClipping(m, 2)]
NAMES = ["ghost", "functional", "ghost in chunks", "functional in chunks"]
B = 4


class Queue:
    """A plain object, of which torch knows nothing."""

    def __init__(self):
        self.held = []


class Keeps(nn.Module):
    """Adds what it kept of earlier calls to what it computes."""

    def __init__(self, keep, hold):
        super().__init__()
        self.layer, self.recurrent = nn.Linear(3, 3), nn.GRU(3, 3, batch_first=True)
        self.keep = keep
        queue = Queue()
        self.read = (lambda: queue.held) if hold == "object" else lambda: GLOBAL
        self.write = queue.held.append if hold == "object" else GLOBAL.append

    def forward(self, x):
        h = self.layer(x)
        s = self.recurrent(x[:, None])[0][:, 0]
        y = h + s + sum(self.read())
        self.write(self.keep(x, h, s))
        return y


GLOBAL = []
KEEPS = {
    "input": lambda x, h, s: x,
    "output": lambda x, h, s: h.detach(),
    "of a recurrent layer": lambda x, h, s: s.detach(),
    "part": lambda x, h, s: h.detach().chunk(3, 1)[0],
    "computed": lambda x, h, s: (h * 2).detach().clone(),
}


def step(clipping, x):
    received = []
    outputs = clipping.forward((x,), {}, groups=torch.arange(len(x)), clip_norm=1.0, scale=1.0, receive=received.append)
    outputs.square().sum().backward()
    return received[0]


@pytest.fixture(autouse=True)
def _empty():
    GLOBAL.clear()
    yield
    GLOBAL.clear()


@pytest.mark.parametrize("hold", ["object", "global"])
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_a_later_batch_does_not_see_an_earlier_one(engine, keep, hold):
    clipping = engine(Keeps(KEEPS[keep], hold))
    with pytest.raises(ModelError, match="keeps tensors of an earlier batch"):
        for _ in range(2):
            step(clipping, torch.randn(B, 3))
    with pytest.raises(ModelError, match="keeps tensors of an earlier batch"):  # it is there still
        step(clipping, torch.randn(B, 3))


class Forgets(nn.Module):
    """Keeps something until its forward ends, a table of its own, and a cycle that nobody reads."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(3, 3), []

    def forward(self, x):
        if not self.table:
            self.table.append(torch.arange(3).float())
        held = [x, self.layer(x)]
        held.append(held)
        return held[1] * self.table[0]


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_what_nobody_can_read_is_no_state(engine):
    clipping = engine(Forgets())
    gc.disable()
    try:
        for _ in range(3):
            step(clipping, torch.randn(B, 3))
    finally:
        gc.enable()


def test_models_that_keep_nothing_leave_nothing_to_collect(monkeypatch):
    """To look for cycles takes longer than a step."""
    calls = []
    monkeypatch.setattr(kept_tensors.gc, "collect", lambda: calls.append(1))
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True)
    module = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (1, 4)), layer, nn.Flatten(), nn.Linear(4, 2))
    for engine in (GhostClipping, FunctionalClipping):
        clipping = engine(module)
        for _ in range(3):
            step(clipping, torch.randn(B, 3))
    assert not calls


def test_a_forward_that_failed_is_no_state():
    """Whoever looks at the error holds its frames, and all that is in them."""
    clipping, errors = GhostClipping(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))), []
    for size in (5, 3):
        try:
            step(clipping, torch.randn(B, size))
        except Exception as error:
            errors.append((error, traceback.walk_tb(error.__traceback__)))
    assert len(errors) == 1


class Counts(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.layer, self.change = nn.Linear(3, 3), change
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.change(self)
        return self.layer(x) + self.n


def count(module):
    module.n = module.n + 1


def replace_weight(module):
    module.layer.weight = nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize(("change", "name"), [(count, "n"), (replace_weight, "weight")])
@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_a_tensor_that_forward_puts_in_place_of_another_is_refused(engine, change, name):
    module = Counts(change)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    with pytest.raises(ModelError, match=f"forward gives {name} another tensor"):
        step(engine(module), torch.randn(B, 3))
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_what_one_model_keeps_is_no_state_of_another(engine):
    first, second = engine(Keeps(KEEPS["output"], "object")), engine(nn.Linear(3, 3))
    with contextlib.suppress(ModelError):  # some run the model twice for a batch
        step(first, torch.randn(B, 3))
    for _ in range(2):
        step(second, torch.randn(B, 3))
    with pytest.raises(ModelError, match="keeps tensors of an earlier batch"):
        step(first, torch.randn(B, 3))
    step(second, torch.randn(B, 3))


def test_a_model_in_two_passes_is_held_to_what_it_kept_in_the_batch_before():
    """Each of its batches is run by an engine of its own, which knows what the last one saw."""
    clipping = GhostClipping(Keeps(KEEPS["output"], "object"), 1)
    clipping._unmapped = True
    with torch.no_grad(), pytest.raises(ModelError, match="keeps tensors of an earlier batch"):
        for _ in range(2):  # without a backward pass an engine runs the model once
            x = torch.randn(1, 3)
            clipping.forward((x,), {}, groups=torch.arange(1), clip_norm=1.0, scale=1.0, receive=None)


class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, other):
        ctx.save_for_backward(other)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("python", [0, 1, 2])
@pytest.mark.parametrize("graph", [False, True])
def test_holders_are_those_of_python(graph, python):
    x, tensor = torch.zeros((), requires_grad=True), torch.ones(())
    result = Node.apply(x, tensor) if graph else x * 2
    held, reference = [tensor] * python, weakref.ref(tensor)
    del tensor
    assert max(0, kept_tensors._holders(reference)) == len(held)
    assert (reference() is not None) == bool(graph or python)
    assert result.requires_grad


def test_a_tensor_that_a_graph_of_torch_alone_holds_is_no_state():
    made, graphs = [], []
    x = torch.zeros(3)

    def run(row):
        inner = row + 1
        kept_tensors.note(made, inner)
        graphs.append(torch.func.vjp(lambda x: x * inner, x)[1])
        return row

    with kept_tensors.one_pass(made):
        torch.func.vmap(run)(torch.ones(2, 3))
    assert kept_tensors._left(made)
    with kept_tensors.one_pass(made):
        pass
