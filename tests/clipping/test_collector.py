"""A step leaves no cycle of references through a tensor: with the garbage collector off, memory stays flat."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.clipping.coupling import LossWatch
from anyorder.clipping.per_example import FunctionalClipping, GhostClipping

TOKENS, STEPS = 11, 20


class Language(nn.Module):
    """A small language model, with tied embeddings: its loss is of several labels for each example."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(TOKENS, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x):
        return F.linear(self.layer(self.table(x)), self.table.weight)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer, self.last = (
            nn.Embedding(TOKENS, 8),
            nn.LSTM(8, 8, batch_first=True),
            nn.Linear(8, TOKENS),
        )

    def forward(self, x):
        return self.last(self.layer(self.table(x))[0])


def numbers():
    return torch.randn(40, 6), torch.randint(0, 3, (40,))


def tokens():
    return torch.randint(0, TOKENS, (40, 5)), torch.randint(0, TOKENS, (40, 5))


CASES = {
    "a layer": (lambda: nn.Linear(6, 3), numbers),
    "layers in a row": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), numbers),
    "by autograd": (lambda: nn.Sequential(nn.Linear(6, 4), nn.GroupNorm(2, 4), nn.Linear(4, 3)), numbers),
    "language": (Language, tokens),
    "recurrent": (Recurrent, tokens),
}


def resident():
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in CASES), *((name, {"chunk_size": 3}) for name in ("a layer", "by autograd", "recurrent"))],
)
def test_tensors_stay_flat_without_the_collector(name, options, no_collector):
    torch.manual_seed(0)
    make, data = CASES[name]
    model = make()
    loader = DataLoader(TensorDataset(*data()), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ao.PrivacyEngine(
        ao.plan(loader=loader, epochs=STEPS // 5, noise_multiplier=1.0, delta=1e-5, mechanism="tree")
    )
    model, optimizer, loader = engine.make_private(model, optimizer, loader, **options)
    counts, outputs = [], []
    for _ in range(STEPS // 5):
        for x, y in loader:
            optimizer.zero_grad()
            scores = model(x)
            outputs.append(weakref.ref(scores))
            F.cross_entropy(scores.flatten(0, -2), y.flatten()).backward()
            optimizer.step()
            if len(outputs) in (5, STEPS):
                counts.append(resident())
    del scores
    assert len(outputs) == STEPS
    assert counts[0] == counts[1]
    assert not [1 for output in outputs if output() is not None]


@pytest.mark.parametrize("kind", [GhostClipping, FunctionalClipping])
def test_losses_that_never_come_back_are_let_go(kind, no_collector):
    """While the watch still writes down, too: the outputs of a first batch that nobody calls backward on."""
    module, (x, y), watch = nn.Linear(6, 3), numbers(), LossWatch()
    left = []
    for _ in range(2):
        scores = kind(module).forward(
            (x,), {}, groups=torch.arange(len(x)), clip_norm=1.0, scale=1.0, receive=lambda sums: None
        )
        watched = watch.outputs(scores)
        loss = F.cross_entropy(watched, y)
        left += [weakref.ref(scores), weakref.ref(watched), weakref.ref(loss)]
    del scores, watched, loss
    assert [reference() for reference in left] == [None] * 6
