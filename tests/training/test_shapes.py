"""Neighbours whose texts differ in length: the sum of all other units' clipped gradients stays as it was."""

import importlib.util
import io
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import anyorder as ao
import processes
from anyorder.clipping.norms import Automatic, PerGroup
from anyorder.clipping.per_example import make_clipping
from anyorder.errors import ArgumentError, LoaderError, ModelError
from anyorder.sampling.shapes import ByShape

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


def sums_of(name, data, weights, mechanism="independent", **options):
    """The noised sum of one step, flat, in clip norms; the noise is that of the key, and tiny."""
    make, its_own, losses, more = CASES[name] if isinstance(name, str) else name
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = len(data)
    plan = ao.plan(
        dataset_size=units, batch_size=units, epochs=1, noise_multiplier=1e-6, delta=1e-5, clip_norm=1.0,
        mechanism=mechanism,
    )  # fmt: skip
    engine = ao.PrivacyEngine(plan, key=KEY)
    loader = DataLoader(data, batch_size=units, collate_fn=its_own)
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


def test_groups_add_up_to_what_each_text_gives_alone():
    """The sum over a batch is that of batches of one, each padded to its own public length."""
    data = texts(40)
    together = sums_of("bidirectional", data, torch.ones(UNITS), pad_to=(8, 16, 64))
    alone = [sums_of("bidirectional", [one], torch.ones(1), pad_to=(8, 16, 64)) for one in data]
    assert (together - sum(alone)).norm() < 1e-3
    whole = sums_of("bidirectional", data, torch.ones(UNITS), pad_to=(64,))
    assert (together - whole).norm() > 1e-2


@pytest.mark.filterwarnings("ignore:the model keeps something")
def test_rows_run_at_their_own_length_and_the_loop_sees_the_longest():
    seen = io.StringIO()

    class Seeing(MeanOverLength):
        def forward(self, x):
            print(*x.shape, file=seen)
            return super().forward(x)

    torch.manual_seed(0)
    model = Seeing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = ao.plan(dataset_size=UNITS, batch_size=UNITS, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    private, optimizer, loader = ao.PrivacyEngine(plan, key=KEY).make_private(
        model, optimizer, DataLoader(texts(40), UNITS, collate_fn=right), pad_to=(8, 16, 64)
    )
    for x, y in loader:
        assert x.shape == (UNITS, 64)
        outputs = private(x)
        assert outputs.shape == (UNITS, CLASSES)
        assert {line.split()[1] for line in seen.getvalue().splitlines()} >= {"8", "16", "64"}
        for row, y_hat in zip(x, outputs, strict=True):
            own = next(n for n in (8, 16, 64) if not row[n:].any())
            torch.testing.assert_close(y_hat, MeanOverLength.forward(model, row[None, :own])[0])
        F.cross_entropy(outputs, y).backward()
        optimizer.step()


def right_of_units(rows):
    """Texts padded on the right, their labels, and whose they are."""
    return *right([row[:2] for row in rows]), torch.tensor([unit for *_, unit in rows])


def test_all_rows_of_a_unit_have_its_longest():
    """A short text of a unit that has a long one too is read at the long one's length."""
    data = [(x, y, i // 2) for i, (x, y) in enumerate(texts(40))]

    plan = ao.plan(
        order=ao.participation.MinSeparation(1, 1, 1), batch_size=UNITS, epsilon=8, delta=1e-5, unit="user",
        mechanism="independent",
    )  # fmt: skip
    model = MeanOverLength()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ao.PrivacyEngine(plan, key=KEY)
    private, optimizer, loader = engine.make_private(
        model, optimizer, DataLoader(data, UNITS, collate_fn=right_of_units), unit=2, pad_to=(8, 16, 64)
    )
    for x, y, _ in loader:
        outputs = private(x)
        torch.testing.assert_close(outputs[:2], MeanOverLength.forward(model, x[:2]))
        torch.testing.assert_close(outputs[2:4], MeanOverLength.forward(model, x[2:4, :16]))
        F.cross_entropy(outputs, y).backward()
        optimizer.step()
    assert engine.step == 1


def test_without_pad_to_texts_of_several_lengths_are_refused_before_any_gradient():
    data = texts(40)
    plan = ao.plan(dataset_size=UNITS, batch_size=3, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    model = LastState()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ao.PrivacyEngine(plan, key=KEY)
    _, _, loader = engine.make_private(model, optimizer, DataLoader(data, 3, collate_fn=right))
    for _ in range(2):
        with pytest.raises(LoaderError, match="state the public lengths") as told:
            next(iter(loader))
    assert not any(number in str(told.value) for number in ("40", " 8", "12 "))
    assert engine.step == 0
    assert loader.position == 0
    for name, p in model.state_dict().items():
        assert torch.equal(p, before[name])


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"micro_batch": 8}, {}])
def test_secret_batches_of_texts(options):
    """Empty batches, micro-batches and rows that only fill up, of texts of several lengths."""
    data = [(x, y) for seed in range(4) for x, y in texts(40, seed)]
    plan = ao.plan(
        order=ao.participation.PoissonSampling(8, 0.05), dataset_size=24, batch_size=1, epsilon=8, delta=1e-3
    )
    model = Bidirectional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ao.PrivacyEngine(plan, key=KEY)
    private, optimizer, loader = engine.make_private(
        model, optimizer, DataLoader(data, 1, collate_fn=right), pad_to=(8, 16, 64), **options
    )
    sizes = []
    for i, (x, y) in enumerate(loader):
        assert x.shape[1] == 64
        sizes.append(len(x))
        F.cross_entropy(private(x), y).backward()
        if (i + 1) % options.get("accumulate", 1) == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert engine.step == 8
    assert 0 in sizes or options == {"micro_batch": 8}


def test_images_of_several_sizes():
    generator = torch.Generator().manual_seed(0)

    def data(first):
        sizes = [first, (8, 6), (6, 8), (8, 8), (10, 4), (16, 16)]
        return [
            (torch.randn(1, *size, generator=generator.manual_seed(i)), i % CLASSES) for i, size in enumerate(sizes)
        ]

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, CLASSES)

        def forward(self, x):
            return self.out(self.conv(x).relu().mean((2, 3)))

    def padded(rows):
        height, width = (max(x.shape[d] for x, _ in rows) for d in (1, 2))
        x = [F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x, _ in rows]
        return torch.stack(x), torch.tensor([y for _, y in rows])

    case = (Pooled, padded, classes, {})
    sizes = ((8, 8), (16, 16))
    one, other = (sums_of(case, data(first), OTHERS, pad_to=sizes) for first in ((8, 8), (3, 14)))
    assert torch.equal(one, other)
    assert one.norm() > 0.5


def test_tables_and_bags_of_several_lengths():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(WORDS, 8, mode="mean", sparse=True)
            self.out = nn.Linear(8, CLASSES)

        def forward(self, x):
            return self.out(self.bag(x))

    data = texts(40)
    grads = []
    for first in (8, 40):
        torch.manual_seed(0)
        model = Bag()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = ao.plan(
            dataset_size=UNITS, batch_size=UNITS, epochs=1, noise_multiplier=1e-6, delta=1e-5, mechanism="independent"
        )
        engine = ao.PrivacyEngine(plan, key=KEY)
        data = texts(first)
        private, optimizer, loader = engine.make_private(
            model, optimizer, DataLoader(data, UNITS, collate_fn=right), pad_to=(8, 16, 64)
        )
        for x, y in loader:
            (F.cross_entropy(private(x), y, reduction="none") * OTHERS * 1000).mean().backward()
            optimizer.step()
        assert None not in engine.training._by_shape._known.values()  # it ran length by length
        engine.flush()
        grads.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert (grads[0] - grads[1]).norm() < 1e-5


def test_a_model_of_one_length_runs_at_the_longest():
    class Fixed(Embedded):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(8 * 64, CLASSES)

        def forward(self, x):
            return self.out(self.words(x).flatten(1))

    case = (Fixed, right, classes, {})
    one, other = (sums_of(case, texts(n), OTHERS, pad_to=(16, 64)) for n in (8, 40))
    assert torch.equal(one, other)


class Dropped(MeanOverLength):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return self.out(F.dropout(self.words(x), self.p).mean(1))


@pytest.mark.parametrize("first", range(UNITS))
def test_masks_of_others_stay_where_a_text_has_another_length(first):
    """They followed from the place among the texts of a length, which a neighbour in front moves."""
    case = (lambda: Dropped(0.5), right, classes, {})
    others = torch.tensor([float(i != first) for i in range(UNITS)])
    pair = [texts(9), texts(9)]
    pair[1][first] = (torch.ones(40, dtype=torch.int64), 0)
    one, other = (sums_of(case, data, others, pad_to=(16, 64)) for data in pair)
    assert torch.equal(one, other)
    assert one.norm() > 0.5


def test_a_model_that_may_draw_and_does_not_runs_length_by_length():
    case = (lambda: Dropped(0.0), right, classes, {})
    by_length, longest = (sums_of(case, texts(9), torch.ones(UNITS), pad_to=sizes) for sizes in ((16, 64), (64,)))
    assert (by_length - longest).norm() > 0.1


def test_workers_and_long_texts():
    data = texts(40)
    plan = ao.plan(dataset_size=UNITS, batch_size=3, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    model = LastState()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ao.PrivacyEngine(plan, key=KEY)
    private, optimizer, loader = engine.make_private(
        model, optimizer, DataLoader(data, 3, collate_fn=right, num_workers=1), pad_to=(8, 16)
    )
    for i, (x, y) in enumerate(loader):
        assert x.shape == (3, 16)
        for row, (text, _) in zip(x, data[3 * i :], strict=False):
            assert row.tolist()[: len(text)] == text[:16].tolist()
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
    assert engine.step == 2


def test_ranks_run_their_own_lengths(tmp_path):
    script = Path(__file__).with_name("rank_lengths.py")
    spec = importlib.util.spec_from_file_location("rank_lengths", script)
    ranks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ranks)
    done = processes.run_on_two_ranks("-W", "ignore", script, tmp_path / "weights")
    assert done.returncode == 0, done.stderr
    alone = ranks.trained()
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"weights.{rank}"), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": 2},
        {"rule": Automatic(gamma=0.01)},
        {"rule": PerGroup([["words.weight", "out.weight"], ["out.bias"]])},
        {"mechanism": ao.mechanism("independent", secure=True)},
        {"loss_reduction": "sum"},
    ],
    ids=["chunks", "automatic", "groups of parameters", "integers", "sum"],
)
def test_lengths_go_with_other_options(options):
    pair = [texts(8), texts(40)]
    one, other = (sums_of("mean over length", data, OTHERS, pad_to=(8, 16, 64), **options) for data in pair)
    together = sums_of("mean over length", pair[1], torch.ones(UNITS), pad_to=(8, 16, 64), **options)
    alone = [sums_of("mean over length", [text], torch.ones(1), pad_to=(8, 16, 64), **options) for text in pair[1]]
    assert (one - other).norm() < 1e-4
    assert (together - sum(alone)).norm() < 2e-3
    assert together.norm() > 0.5


def test_units_of_secret_batches_that_are_filled_up():
    data = [(x, y, i // 2) for seed in range(4) for i, (x, y) in enumerate(texts(40, seed), 6 * seed)]

    plan = ao.plan(
        order=ao.participation.PoissonSampling(6, 0.2), dataset_size=12, batch_size=2, epsilon=8, delta=1e-3,
        unit="user",
    )  # fmt: skip
    model = MeanOverLength()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ao.PrivacyEngine(plan, key=KEY)
    private, optimizer, loader = engine.make_private(
        model, optimizer, DataLoader(data, 2, collate_fn=right_of_units), unit=2, pad_to=(8, 16, 64), micro_batch=6
    )
    lengths = {unit: max(len(x) for x, _, own in data if own == unit) for unit in range(12)}
    for x, y, units in loader:
        outputs = private(x)
        rows = len(engine.loader.identity.newest().units)  # the others only fill up
        assert len(x) >= 6
        for row, unit, found in zip(x[:rows], units.tolist(), outputs, strict=False):
            public = next(n for n in (8, 16, 64) if n >= lengths[unit])
            torch.testing.assert_close(found, MeanOverLength.forward(model, row[None, :public])[0])
        F.cross_entropy(outputs, y).backward()
        optimizer.step()
    assert engine.step == 6


class Counting(MeanOverLength):
    """What it gives depends on how often it was called."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def test_a_model_that_counts_its_calls_tells_no_lengths():
    found = []
    for first in (8, 40):
        torch.manual_seed(0)
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = ao.plan(
            dataset_size=2 * UNITS, batch_size=UNITS, epochs=1, noise_multiplier=1e-6, delta=1e-5,
            mechanism="independent",
        )  # fmt: skip
        private, optimizer, loader = ao.PrivacyEngine(plan, key=KEY).make_private(
            model, optimizer, DataLoader([*texts(first), *texts(8)], UNITS, collate_fn=right), pad_to=(8, 16, 64)
        )
        for x, y in loader:
            optimizer.zero_grad()
            (F.cross_entropy(private(x), y, reduction="none") * OTHERS).mean().backward()
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert (found[0] - found[1]).norm() < 1e-5


def test_finding_the_shapes_of_outputs_draws_no_numbers_and_leaves_the_engine():
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    clipping = make_clipping(model)
    by_shape, before = ByShape(clipping, lambda: None), clipping.state_dict()
    drawn = []

    def run(number, rows, **options):
        inputs = torch.zeros(len(rows), (8, 16)[number], dtype=torch.int64)
        return list(pytree.tree_flatten(clipping.forward((inputs,), {}, clip_norm=1.0, scale=1.0, **options)))

    drawn.append(torch.get_rng_state())
    leaves, cuts = [torch.zeros(4, 16, dtype=torch.int64)], [((1, (8, 16)),)]
    assert by_shape._shapes_of_outputs(run, leaves, cuts, 2) == [torch.Size([16, CLASSES])]
    drawn.append(torch.get_rng_state())
    assert torch.equal(*drawn)
    assert clipping.state_dict() == before


# -- an example that does not fit ------------------------------------------------------------------------------------

ODD: dict[str, Any] = {
    "floats": (torch.full((9,), 0.5), 1),
    "more dimensions": (torch.ones(9, 2, dtype=torch.int64), 1),
    "no dimension": (torch.tensor(3), 1),
    "a label of another type": (torch.ones(9, dtype=torch.int64), "one"),
    "a field more": (torch.ones(9, dtype=torch.int64), 1, 2),
    "nothing": None,
}


def of_eight(data):
    return [(x[:8] if isinstance(x, torch.Tensor) and x.dim() else x, *rest) for x, *rest in data]


@pytest.mark.filterwarnings("ignore:the model gives other outputs")
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("options", [{"pad_to": (16, 64)}, {}], ids=["padded", "stacked"])
def test_an_example_that_does_not_fit_adds_zero(odd, first, options):
    """Its owner alone decided whether the run went on."""
    case = (MeanOverLength, right if options else None, classes, {})
    data = texts(9) if options else of_eight(texts(9))
    like = (torch.zeros(8, dtype=torch.int64), 0)
    without = torch.tensor([float(i != first) for i in range(UNITS)])
    others = sums_of(case, data, without, like=like, **options)
    neighbour = [ODD[odd] if i == first else one for i, one in enumerate(data)]
    for weights in (without, torch.ones(UNITS)):
        found = sums_of(case, neighbour, weights, like=like, **options)
        assert torch.equal(found, others)
    assert others.norm() > 0.5
    with pytest.raises((LoaderError, RuntimeError, TypeError, IndexError, ValueError)):
        sums_of(case, neighbour, without, **options)


def test_examples_that_fit_are_as_without_a_made_up_one():
    case = (MeanOverLength, right, classes, {})
    like = (torch.zeros(70, dtype=torch.int64), 0)
    pair = [sums_of(case, texts(40), torch.ones(UNITS), pad_to=(16, 64), **more) for more in ({}, {"like": like})]
    assert torch.equal(*pair)


def test_secret_batches_of_examples_that_do_not_fit():
    """Also where the first example of the data set, which empty batches were made of, is the one."""
    data = [ODD["floats"], *(row for seed in range(4) for row in texts(9, seed))][:24]
    order = ao.participation.PoissonSampling(8, 0.05)
    plan = ao.plan(order=order, dataset_size=24, batch_size=1, epsilon=8, delta=1e-3)
    model = MeanOverLength()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ao.PrivacyEngine(plan, key=KEY)
    loader, like = DataLoader(data, 1, collate_fn=right), (torch.zeros(8, dtype=torch.int64), 0)
    private, optimizer, loader = engine.make_private(model, optimizer, loader, pad_to=(16, 64), like=like)
    for x, y in loader:
        assert (x.dtype, x.shape[1]) == (torch.int64, 64)
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.step == 8


@pytest.mark.parametrize("like", [None, 3, (torch.zeros(2, 2, 2), 0, 0), (torch.zeros(8), {})])
def test_a_made_up_example_that_is_none_is_refused(like):
    plan = ao.plan(dataset_size=UNITS, batch_size=3, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    model = MeanOverLength()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(texts(8), 3, collate_fn=right)
    if like is None:
        with pytest.raises(ArgumentError, match="units that are examples"):
            ao.PrivacyEngine(plan).make_private(model, optimizer, loader, like=3, unit=1)
    else:
        with pytest.raises(ArgumentError, match="as the data set gives them"):
            ao.PrivacyEngine(plan).make_private(model, optimizer, loader, like=like)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_refusal_of_stacked_examples_says_nothing_of_them(workers):
    """Torch's says which of the batch it is, and how large."""
    data = of_eight(texts(9))
    data[4] = (torch.ones(37, dtype=torch.int64), 1)
    plan = ao.plan(dataset_size=UNITS, batch_size=UNITS, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    model = MeanOverLength()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, UNITS, num_workers=workers)
    _, _, loader = ao.PrivacyEngine(plan).make_private(model, optimizer, loader)
    with pytest.raises(LoaderError, match="differ in shape") as told:
        list(loader)
    shown = "".join(traceback.format_exception(told.value))
    error = told.value
    while error is not None:  # a worker that the collector of cycles finds in a frame is waited for, five seconds
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    assert "37" not in str(told.value)
    assert "equal size" not in shown


class AtItsLength(Embedded):
    def forward(self, x, lengths):
        last = (lengths - 1)[:, None, None].expand(-1, 1, 8)
        return self.out(self.words(x).gather(1, last)[:, 0])


@pytest.mark.parametrize("longest", [23, 19])
def test_a_length_behind_the_longest_is_refused_without_a_word_of_it(longest):
    """Torch says that index 22 is out of bounds: a text's own length."""
    data = [(x, len(x), y) for x, y in texts(longest)]
    loader = DataLoader(data, UNITS)
    model = AtItsLength()
    plan = ao.plan(loader=loader, epochs=1, noise_multiplier=1.0, delta=1e-3, mechanism="independent")
    engine = ao.PrivacyEngine(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(model, optimizer, loader, pad_to=(8, 16))
    [(x, lengths, y)] = loader
    with pytest.raises(ModelError) as caught:
        model(x, lengths)
    assert str(caught.value) == (
        "the model failed on a batch with a number above 16, the longest length of pad_to=. An example that is longer "
        "loses its end, and its length stays as it was: limit it in forward, lengths.clamp(max=x.shape[1]), or list a "
        "longer length in pad_to="
    )
    shown = "".join(traceback.format_exception(caught.value))
    assert "out of bounds" not in shown
    assert engine.step == 0
    assert model(x, lengths.clamp(max=16)).shape == (UNITS, CLASSES)
