"""Many clients at once give the loop's numbers; what cannot or should not be mapped is looped, for a stated reason."""

import re
import warnings
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from tests.federated.test_clients import MODELS, examples_for, layout_of
from torch import Tensor, nn
from torch.nn import functional as F

from anyorder.federated import LocalTraining, clients
from anyorder.federated.clients import Examples, mapped, why_looped


class Branches(nn.Module):
    """What is computed depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(x)
        return y if y.sum() > 0 else 2 * y


class Attention(nn.Module):
    """A transformer's layer over five positions."""

    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.grow(x[..., None])).mean(1))


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(torch.tanh(self.first(x))))


MAPPED: dict[str, Callable[[], nn.Module]] = {
    **{name: MODELS[name] for name in ("linear", "layers", "double", "convolutions", "viewed", "tokens")},
    "attention": Attention,
    "tied": Tied,
    "unused": lambda: nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(2, 2)}),
}
LOOPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "words": (MODELS["words"], "it has recurrent layers"),
    "batch norm": (MODELS["batch norm"], "its buffers change"),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)), "it draws random numbers"),
    "branches": (Branches, "torch.func.vmap cannot run it: .*control flow"),
    "large": (lambda: nn.Sequential(nn.Linear(5, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 3)), "large"),
}
COUNTS = (9, 4, 0, 12, 9, 1, 8, 3)
SETTINGS = {
    "plain": LocalTraining(F.cross_entropy, lr=0.1, batch_size=4),
    "momentum": LocalTraining(F.cross_entropy, lr=0.1, batch_size=3, momentum=0.9),
    "epochs": LocalTraining(F.cross_entropy, lr=0.05, batch_size=5, epochs=3, momentum=0.5, max_examples=7),
}


class Chosen(nn.Module):
    """Runs one entry of a dict of layers."""

    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["a"](x)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MAPPED[name]() if name in MAPPED else LOOPED[name][0]()
    return Chosen(model) if isinstance(model, nn.ModuleDict) else model


def cohort_of(name: str, counts: tuple[int, ...] = COUNTS) -> list[Examples]:
    return [examples_for(name, count, i) for i, count in enumerate(counts)]


@pytest.mark.parametrize("training", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", MAPPED)
def test_the_numbers_are_those_of_the_loop(name: str, training: LocalTraining) -> None:
    model = model_of(name)
    layout, cohort, seeds = layout_of(model), cohort_of(name), list(range(len(COUNTS)))
    assert why_looped(training, model, layout, cohort[0]) is None
    expected = training.looped(model, layout, cohort, seeds)
    found = training.changes(model, layout, cohort, seeds)
    assert torch.equal(found, mapped(training, model, layout, cohort, seeds))
    assert found.dtype == expected.dtype
    assert float(expected.norm(dim=1)[0]) > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not found[2].any(), "nothing was trained on no examples"


@pytest.mark.parametrize("name", LOOPED)
def test_others_are_looped_and_it_is_said_why(name: str) -> None:
    model = model_of(name)
    layout, cohort = layout_of(model), cohort_of(name, (4, 6))
    training = LocalTraining(F.cross_entropy, lr=0.1, batch_size=4)
    reason = why_looped(training, model, layout, cohort[0])
    assert reason is not None
    assert re.search(LOOPED[name][1], reason)
    assert torch.equal(training.changes(model, layout, cohort, [1, 2]), training.looped(model, layout, cohort, [1, 2]))


@pytest.mark.parametrize("name", [*MAPPED, *LOOPED])
def test_the_model_and_the_generator_stay_as_they_are(name: str) -> None:
    model = model_of(name).eval()
    before, state = deepcopy(model.state_dict()), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SETTINGS["plain"].changes(model, layout_of(model), cohort_of(name, (4, 6)), [1, 2])
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_whether_clients_are_mapped_is_found_for_each_loss() -> None:
    """Of one model: a loss without a rule is looped, though another one was mapped before."""
    model, cohort = model_of("linear"), cohort_of("linear", (8, 8))
    layout = layout_of(model)

    def branches(output: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(output, y)
        return loss if loss > 0 else -loss

    for loss, is_mapped in ((F.cross_entropy, True), (branches, False), (F.cross_entropy, True)):
        training = LocalTraining(loss, lr=0.1, batch_size=4)
        assert (why_looped(training, model, layout, cohort[0]) is None) == is_mapped
        expected = training.looped(model, layout, cohort, [1, 2])
        torch.testing.assert_close(training.changes(model, layout, cohort, [1, 2]), expected, rtol=1e-4, atol=1e-6)


def test_a_loss_over_what_counts() -> None:
    """A mean over the labels that are not to be ignored is the mean over the batch's, not a mean of means."""
    model = model_of("linear")
    cohort = cohort_of("linear", (8, 8, 5))
    for _, y in cohort:
        y[::3] = -1
    training = LocalTraining(lambda output, y: F.cross_entropy(output, y, ignore_index=-1), batch_size=4)
    layout = layout_of(model)
    expected = training.looped(model, layout, cohort, [1, 2, 3])
    torch.testing.assert_close(mapped(training, model, layout, cohort, [1, 2, 3]), expected, rtol=1e-4, atol=1e-6)


def test_examples_of_several_shapes() -> None:
    """Sequences of two lengths are two groups; rows are in the order of the cohort."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))
    cohort = [
        (
            torch.randint(7, (4, 5 + i % 2), generator=torch.Generator().manual_seed(i)),
            torch.zeros(4, dtype=torch.int64),
        )
        for i in range(5)
    ]
    training = LocalTraining(lambda output, y: F.cross_entropy(output.mean(1), y), batch_size=2)
    layout, seeds = layout_of(model), [3, 1, 4, 1, 5]
    expected = training.looped(model, layout, cohort, seeds)
    torch.testing.assert_close(training.changes(model, layout, cohort, seeds), expected)


def test_clients_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few at a time give the same as all at once, and rows stay where they belong."""
    model = model_of("layers")
    layout, cohort, seeds = layout_of(model), cohort_of("layers"), list(range(len(COUNTS)))
    training = SETTINGS["epochs"]
    expected = mapped(training, model, layout, cohort, seeds)
    monkeypatch.setattr(clients, "_WEIGHTS", 3 * layout.size)
    torch.testing.assert_close(mapped(training, model, layout, cohort, seeds), expected, rtol=1e-5, atol=1e-7)


def test_what_is_not_finite_stays_with_its_client() -> None:
    model = model_of("linear")
    cohort = cohort_of("linear", (4, 4, 4))
    cohort[1][0][2, 3] = torch.nan
    found = SETTINGS["plain"].changes(model, layout_of(model), cohort, [0, 1, 2])
    assert found.isfinite().all(1).tolist() == [True, False, True]


def test_nobody() -> None:
    model = model_of("linear")
    assert SETTINGS["plain"].changes(model, layout_of(model), [], []).shape == (0, 18)


def test_only_what_is_shared_is_trained() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    layout = layout_of(model)
    shared = type(layout)({"1.weight": (3, 4)})
    training, cohort = SETTINGS["momentum"], cohort_of("linear")
    expected = training.looped(model, shared, cohort, [0] * len(cohort))
    assert expected.shape == (len(cohort), 12)
    torch.testing.assert_close(mapped(training, model, shared, cohort, [0] * len(cohort)), expected)


def large() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 1000), nn.ReLU(), nn.Linear(1000, 2000), nn.Linear(2000, 3))


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 200, 3), nn.ReLU(), nn.Conv2d(200, 60, 3), nn.Flatten(), nn.Linear(240, 3))


@pytest.mark.parametrize("make", [large, images])
def test_a_list_of_operations_gives_the_bits_of_the_loop(make: Callable[[], nn.Module]) -> None:
    model = make()
    layout, cohort, seeds = layout_of(model), cohort_of("convolutions"), list(range(len(COUNTS)))
    for training in (SETTINGS["plain"], SETTINGS["momentum"]):
        assert why_looped(training, model, layout, cohort[0]) == clients.LARGE
        expected = training.looped(model, layout, cohort, seeds)
        for _ in range(2):
            assert torch.equal(training.changes(model, layout, cohort, seeds), expected)
        assert clients._known_operation[model], "no list was written down"
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)


def test_what_a_list_is_compared_with_is_the_first_step() -> None:
    """Each block of clients takes one gradient by autograd, and that is no further one."""
    model, calls = large(), [0]
    layout, cohort, seeds = layout_of(model), cohort_of("convolutions", (8, 8)), [1, 2]

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return F.cross_entropy(output, y)

    training = LocalTraining(loss, batch_size=4)
    expected = training.looped(model, layout, cohort, seeds)
    training.changes(model, layout, cohort, seeds)
    calls[0] = 0
    assert torch.equal(training.changes(model, layout, cohort, seeds), expected)
    assert calls[0] == 1
    (run,) = clients._known_operation[model].values()
    turn = torch.ops.aten.t.default
    nodes = run.__self__.graph.nodes  # type: ignore[attr-defined]
    assert not any(node.target is turn and node.args[0].target is turn for node in nodes)


def test_a_list_is_written_anew_where_the_loss_has_changed() -> None:
    """A number that the loss reads from elsewhere, and that moves between two rounds."""
    model, weight = large(), [1.0]
    layout, cohort, seeds = layout_of(model), cohort_of("convolutions", (8, 8)), [1, 2]
    training = LocalTraining(lambda output, y: weight[0] * F.cross_entropy(output, y), batch_size=4)
    first = training.changes(model, layout, cohort, seeds)
    weight[0] = 0.25
    second = training.changes(model, layout, cohort, seeds)
    assert torch.equal(second, training.looped(model, layout, cohort, seeds))
    assert not torch.allclose(first, second)


def test_no_list_for_a_model_with_a_state_of_its_own() -> None:
    """Buffers and frozen parameters would be written down as they are."""
    model = large()
    model.register_buffer("scale", torch.ones(1))
    layout, cohort = layout_of(model), cohort_of("convolutions", (8, 8))
    SETTINGS["plain"].changes(model, layout, cohort, [1, 2])
    assert model not in clients._known_operation
    model = large()
    shared = type(layout)({name: shape for name, shape in layout.shapes.items() if not name.startswith("1.")})
    assert why_looped(SETTINGS["plain"], model, shared, cohort[0]) == clients.LARGE
    SETTINGS["plain"].changes(model, shared, cohort, [1, 2])
    assert model not in clients._known_operation


def test_what_is_not_finite_in_a_list() -> None:
    model = large()
    cohort = cohort_of("convolutions", (8, 8, 8))
    cohort[0][0][:] = torch.nan
    found = SETTINGS["plain"].changes(model, layout_of(model), cohort, [0, 1, 2])
    assert found.isfinite().all(1).tolist() == [False, True, True]
