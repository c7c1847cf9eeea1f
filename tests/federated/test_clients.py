"""Local training against a loop that is written out with torch's own optimizer, and what it must leave alone."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyorder as ao
from anyorder.errors import ArgumentError
from anyorder.federated import Layout, LocalTraining
from anyorder.federated.clients import order_of, takes_channels_last


class Viewed(nn.Module):
    """Takes a view of what a convolution returns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 3, 3), nn.Linear(3 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x).view(-1, 3 * 16))


class Words(nn.Module):
    """An embedding, an LSTM, a linear layer; a loss per position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(7, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(x))[0]).transpose(1, 2)


class Remembering(nn.Module):
    """Adds to its inputs a buffer that it has from the inputs before."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)
        self.register_buffer("last", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(x + self.last)
        self.last.copy_(x.detach().mean(0))
        return y


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 3),
    "layers": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)),
    "double": lambda: nn.Linear(5, 3).double(),
    "convolutions": convolutions,
    "viewed": Viewed,
    "batch norm": normed,
    "words": Words,
    "tokens": lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(24, 3)),
}


def examples_for(name: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Examples that the model of that name takes."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(3, (count,), generator=generator)
    if name in {"words", "tokens"}:
        x = torch.randint(7, (count, 6), generator=generator)
        return x, (torch.randint(7, (count, 6), generator=generator) if name == "words" else classes)
    x = torch.randn(
        count, *((2, 6, 6) if name in {"convolutions", "viewed", "batch norm"} else (5,)), generator=generator
    )
    return (x.double() if name == "double" else x), classes


def written_out(training: LocalTraining, model: nn.Module, examples: tuple[Tensor, Tensor], seed: int) -> Tensor:
    """The change, as one writes it: a copy, an optimizer, backward, step."""
    client = deepcopy(model).train()
    optimizer = torch.optim.SGD(client.parameters(), lr=training.lr, momentum=training.momentum)
    for rows in order_of(len(examples[0]), training, seed):
        for batch in rows.split(training.batch_size):
            optimizer.zero_grad()
            training.loss(client(examples[0][batch]), examples[1][batch]).backward()
            optimizer.step()
    pairs = zip(client.parameters(), model.parameters(), strict=True)
    return torch.cat([(after - before).detach().flatten() for after, before in pairs])


def layout_of(model: nn.Module) -> Layout:
    return Layout.of(dict(model.named_parameters()))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


SETTINGS = [
    LocalTraining(F.cross_entropy, lr=0.1, batch_size=4),
    LocalTraining(F.cross_entropy, lr=0.1, batch_size=3, epochs=2, momentum=0.9, max_examples=7),
]


@pytest.mark.parametrize("training", SETTINGS, ids=["plain", "momentum"])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_loop_that_one_writes(name: str, training: LocalTraining) -> None:
    model = MODELS[name]()
    examples = examples_for(name, 8, 1)
    expected = written_out(training, model, examples, 5)
    found = training.change(model, layout_of(model), examples, 5)
    assert found.dtype == expected.dtype
    assert float(expected.norm()) > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_and_the_generator_stay_as_they_are(name: str) -> None:
    model = MODELS[name]().eval()
    before, state = deepcopy(model.state_dict()), torch.get_rng_state()
    SETTINGS[0].looped(model, layout_of(model), [examples_for(name, 8, i) for i in range(3)], [1, 2, 3])
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_clients_are_independent_of_each_other() -> None:
    """Weights, momentum, the counts of a batch norm, the masks of dropout: each begins anew with each client."""
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    training = LocalTraining(F.cross_entropy, batch_size=4, momentum=0.5, epochs=2)
    cohort = [examples_for("linear", 8, i) for i in range(4)]
    together = training.looped(model, layout_of(model), cohort, [3, 4, 5, 6])
    for i in range(4):
        assert torch.equal(training.change(model, layout_of(model), cohort[i], 3 + i), together[i])
    assert not torch.equal(training.change(model, layout_of(model), cohort[0], 4), together[0])


def test_no_buffer_takes_one_clients_data_to_the_next() -> None:
    model = Remembering()
    training = LocalTraining(F.cross_entropy, batch_size=4)
    cohort = [examples_for("linear", 8, i) for i in range(3)]
    for changes in (training.looped, training.changes):
        together = changes(model, layout_of(model), cohort, [3, 4, 5])
        for i in range(3):
            assert torch.equal(training.change(model, layout_of(model), cohort[i], 3 + i), together[i])
    assert not model.last.any()


def test_seeds_draw_the_masks_of_dropout() -> None:
    """Of one example, whose order no seed changes."""
    model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    training, one = LocalTraining(F.cross_entropy), examples_for("linear", 1, 0)
    first, second, again = training.looped(model, layout_of(model), [one] * 3, [1, 2, 1])
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_seeds_order_the_examples() -> None:
    training = LocalTraining(F.cross_entropy, batch_size=2, max_examples=5, epochs=3)
    orders = order_of(9, training, 1)
    assert len(orders) == 3
    assert len({tuple(sorted(rows.tolist())) for rows in orders}) == 1, "another choice of examples in a later epoch"
    assert len({tuple(rows.tolist()) for rows in orders}) == 3
    assert [rows.tolist() for rows in orders] == [rows.tolist() for rows in order_of(9, training, 1)]
    assert orders[0].tolist() != order_of(9, training, 2)[0].tolist()
    assert all(len(set(rows.tolist())) == 5 for rows in orders)


def test_only_what_is_shared_is_trained() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    layout = Layout({"1.weight": (3, 4)})
    found = LocalTraining(F.cross_entropy).change(model, layout, examples_for("linear", 8, 0), 0)
    assert found.shape == (12,)
    assert found.norm() > 0


def test_nobody_and_nothing() -> None:
    model = nn.Linear(5, 3)
    training = LocalTraining(F.cross_entropy)
    assert training.looped(model, layout_of(model), [], []).shape == (0, 18)
    nothing = (torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(training.change(model, layout_of(model), nothing, 0), torch.zeros(18))


def test_a_loss_that_is_not_finite_raises_nothing() -> None:
    model = nn.Linear(5, 3)
    cohort = [examples_for("linear", 8, i) for i in range(3)]
    cohort[1][0][2, 3] = torch.nan
    found = LocalTraining(F.cross_entropy).looped(model, layout_of(model), cohort, [0, 1, 2])
    assert found.isfinite().all(1).tolist() == [True, False, True]
    assert model.weight.isfinite().all()


def test_channels_last_where_the_model_takes_it() -> None:
    images, _ = examples_for("convolutions", 2, 0)
    assert takes_channels_last(convolutions(), images)
    assert takes_channels_last(normed(), images)
    assert not takes_channels_last(Viewed(), images)
    assert not takes_channels_last(nn.Linear(6, 3), images)


@pytest.mark.parametrize(
    "options",
    [{"loss": 3}, {"lr": 0.0}, {"batch_size": 0}, {"epochs": 0}, {"max_examples": 0}, {"momentum": 1.0}],
    ids=str,
)
def test_refusals(options: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        LocalTraining(**({"loss": F.cross_entropy} | options))  # type: ignore[arg-type]


def test_refused_examples() -> None:
    training, model = LocalTraining(F.cross_entropy), nn.Linear(5, 3)
    layout = layout_of(model)
    x, y = examples_for("linear", 4, 0)
    for wrong in [x, (x, y[:2]), (x, y.tolist()), (x, y, y), (x, torch.tensor(1))]:
        with pytest.raises(ArgumentError, match="examples|rows"):
            training.change(model, layout, wrong, 0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="one seed a client, got 1 for 2"):
        training.looped(model, layout, [(x, y)] * 2, [0])
    with pytest.raises(ArgumentError, match=r"weight of shape \(3, 5\), as the layout says, got \(2, 5\)"):
        training.change(nn.Linear(5, 2), layout, (x, y), 0)


def test_it_is_public() -> None:
    assert ao.federated.LocalTraining is LocalTraining


class Continued(nn.Module):
    """An LSTM that begins each batch with the state that the last one left, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out, self.last = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3), None

    def forward(self, x: Tensor) -> Tensor:
        fits = self.last is not None and self.last[0].shape[1] == len(x)
        y, last = self.lstm(x, self.last if fits else None)
        self.last = tuple(part.detach() for part in last)
        return self.out(y[:, -1])


class Centred(nn.Module):
    """Takes away a running mean: a plain tensor that is made anew, or changed in place, in a list, or a lost buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.out, self.kind, self.mean, self.kept = nn.Linear(4, 3), kind, torch.zeros(4), [torch.zeros(4)]
        self.register_buffer("other", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        moved = 0.5 * x.detach().flatten(1, -2).mean((0, 1)).abs()
        match self.kind:
            case "anew":
                self.mean = 0.5 * self.mean + moved
            case "in place":
                self.mean.mul_(0.5).add_(moved)
            case "list":
                self.kept[0] = 0.5 * self.kept[0] + moved
            case "buffer":
                self.other = 0.5 * self.other + moved
        return self.out((x - self.mean - self.kept[0] - self.other).flatten(1, -2).mean(1))


class Weighted(nn.Module):
    """A loss that remembers how large it was."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 1.0

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(scores, y)
        self.largest = max(self.largest + 0.1, float(loss.detach()))
        return loss / self.largest


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "lstm": Continued,
    **{kind: (lambda kind=kind: Centred(kind)) for kind in ("anew", "in place", "list", "buffer")},
    "loss": lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 3)),
}


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("way", ["changes", "looped"])
def test_what_a_model_keeps_in_plain_attributes_does_not_reach_the_next_client(name: str, way: str) -> None:
    torch.manual_seed(0)
    model = STATEFUL[name]()
    layout = Layout.of(dict(model.named_parameters()))
    training = LocalTraining(Weighted() if name == "loss" else F.cross_entropy, lr=0.5, batch_size=4, epochs=2)
    generator = torch.Generator().manual_seed(1)
    cohort = [
        (torch.randn(8, 5, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(4)
    ]
    alone = torch.stack([training.change(model, layout, examples, i) for i, examples in enumerate(cohort)])
    together = getattr(training, way)(model, layout, cohort, list(range(4)))
    assert torch.equal(together, alone)
    assert together.norm() > 0


def test_state_that_only_some_data_leave_is_refused_where_clients_share_a_model() -> None:
    class Odd(nn.Linear):
        largest = 0

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-2] == 3:  # as any condition that the trial does not meet
                self.largest = self.largest + 1
            return super().forward(x)

    model = Odd(5, 3)
    layout = Layout.of(dict(model.named_parameters()))
    training = LocalTraining(F.cross_entropy, lr=0.5, batch_size=4)
    cohort = [(torch.randn(7, 5), torch.zeros(7, dtype=torch.int64)) for _ in range(3)]
    with pytest.raises(ArgumentError, match="keeps state in plain attributes"):
        training.changes(model, layout, cohort, [0, 1, 2])
