"""Neighbours whose texts differ in length: the sum of all other units' clipped gradients stays as it was."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import anyorder as ao

KEY = bytes(32)
UNITS, CLASSES, WORDS = 6, 3, 20


def texts(first: int, seed: int = 0) -> list[Any]:
    """Texts of 8 to 12 words, and one of another length; each with a class."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [first, 8, 12, 9, 8, 10]
    return [
        (torch.randint(1, WORDS, (n,), generator=generator.manual_seed(i)), i % CLASSES) for i, n in enumerate(lengths)
    ]


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.out = nn.Linear(8, CLASSES)


class LastState(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.out(self.lstm(self.words(x))[0][:, -1])


class MeanOverLength(Embedded):
    def forward(self, x):
        return self.out(self.words(x).mean(1))


class Bidirectional(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 4, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.out(self.gru(self.words(x))[0].amax(1))


class Attention(Embedded):
    """With positions from the left: padding in front moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(64, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x, mask):
        states = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.out(self.layer(states, src_key_padding_mask=~mask)[:, -1])


class Tokens(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, WORDS)

    def forward(self, x):
        return self.out(self.rnn(self.words(x))[0])


def right(rows):
    x = pad_sequence([x for x, _ in rows], batch_first=True)
    return x, torch.tensor([y for _, y in rows])


def left(rows):
    x = pad_sequence([x for x, _ in rows], batch_first=True, padding_side="left")
    return x, torch.tensor([y for _, y in rows])


def centred(rows):
    x, y = right(rows)
    return (x - x.double().mean(0).round().long()).abs(), y


def mixed(rows):
    x, y = right(rows)
    return torch.maximum(x, x.roll(1, 0)), y


def classes(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def masked(model, x, y):
    return F.cross_entropy(model(x, x != 0), y, reduction="none")


def tokens(model, x, y):
    """The next word at each place, padding read too."""
    return F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none").mean(1)


CASES: dict[str, Any] = {
    "last state": (LastState, right, classes, {}),
    "mean over length": (MeanOverLength, right, classes, {}),
    "bidirectional": (Bidirectional, right, classes, {}),
    "padded in front, masked": (Attention, left, masked, {"pad_side": "left"}),
    "tokens": (Tokens, right, tokens, {}),
    "centred": (LastState, centred, classes, {}),
    "mixed": (MeanOverLength, mixed, classes, {}),
}
each = pytest.mark.parametrize("name", CASES)


def sums_of(name, data, weights, collate=None, **options):
    """The noised sum of one step, flat, in clip norms; the noise is that of the key, and tiny."""
    make, its_own, losses, more = CASES[name]
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = len(data)
    plan = ao.plan(
        dataset_size=units, batch_size=units, epochs=1, noise_multiplier=1e-6, delta=1e-5, clip_norm=1.0,
        mechanism="independent", unit=options.pop("plan_unit", "example"),
    )  # fmt: skip
    engine = ao.PrivacyEngine(plan, key=KEY)
    loader = DataLoader(data, batch_size=units, collate_fn=collate or its_own)
    model, optimizer, loader = engine.make_private(model, optimizer, loader, **{**more, **options})
    for x, y in loader:
        optimizer.zero_grad()
        (losses(model, x, y) * weights * 1000).mean().backward()
        optimizer.step()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double() * units


OTHERS = torch.tensor([0.0] + [1.0] * (UNITS - 1))


@each
@pytest.mark.parametrize("seed_of_other", [0, 5])
def test_the_length_of_one_text_moves_no_other(name, seed_of_other):
    """Its loss does not count, so that the sums are those of the others."""
    one, other = (sums_of(name, texts(n, seed_of_other), OTHERS, pad_to=(16, 64)) for n in (8, 40))
    assert (one - other).norm() < 1e-4
    assert one.norm() > 0.5
