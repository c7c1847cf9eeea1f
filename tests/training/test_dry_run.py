"""Before a model meets data it is tried on made-up rows: what it keeps is refused, what it would not learn is said."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import anyorder as ao
from anyorder.errors import ModelError, ModelWarning
from anyorder.plan.planner import plan_at_sigma
from anyorder.training.dry_run import try_model

WORDS = torch.ones(4, 7, dtype=torch.int64)
REALS = torch.zeros(4, 5)
SEEN = {"longest": 0}


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, x):
        self.keep(x)
        return self.out(self.embed(x).sum(1)) * self.factor(x)

    def keep(self, x):
        pass

    def factor(self, x):
        return 1.0


class Longest(Texts):
    longest = 0

    def keep(self, x):
        self.longest = max(self.longest, x.shape[1])

    def factor(self, x):
        return 1 / self.longest


class InList(Longest):
    def __init__(self):
        super().__init__()
        self.lengths = []

    def keep(self, x):
        self.lengths.append(x.shape[1])

    def factor(self, x):
        return 1 / max(self.lengths)


class InObject(Longest):
    class Box:
        longest = 0

    def __init__(self):
        super().__init__()
        self.box = self.Box()

    def keep(self, x):
        self.box.longest = max(self.box.longest, x.shape[1])

    def factor(self, x):
        return 1 / self.box.longest


class InBuffer(Longest):
    def __init__(self):
        super().__init__()
        self.register_buffer("most", torch.zeros(()))

    def keep(self, x):
        self.most.fill_(max(float(self.most), x.shape[1]))

    def factor(self, x):
        return 1 / self.most


class InClass(Longest):
    kept = {"longest": 0}  # noqa: RUF012

    def keep(self, x):
        self.kept["longest"] = max(self.kept["longest"], x.shape[1])

    def factor(self, x):
        return 1 / self.kept["longest"]


class InGlobal(Longest):
    def keep(self, x):
        SEEN["longest"] = max(SEEN["longest"], x.shape[1])

    def factor(self, x):
        return 1 / SEEN["longest"]


class InClosure(Longest):
    def __init__(self):
        super().__init__()
        longest = [0]

        def keep(x):
            longest[0] = max(longest[0], x.shape[1])
            return 1 / longest[0]

        self.of = keep

    def keep(self, x):
        pass

    def factor(self, x):
        return self.of(x)


def remember(x):
    remember.longest = max(getattr(remember, "longest", 0), x.shape[1])


class OnFunction(Longest):
    def keep(self, x):
        remember(x)

    def factor(self, x):
        return 1 / remember.longest


class InDefault(Longest):
    def keep(self, x):
        self.of(x)

    def of(self, x, longest=[0]):  # noqa: B006
        longest[0] = max(longest[0], x.shape[1])
        return 1 / longest[0]

    factor = of


class InSet(Longest):
    def __init__(self):
        super().__init__()
        self.longest = {0}

    def keep(self, x):
        self.longest.add(max(self.longest.pop(), x.shape[1]))

    def factor(self, x):
        return 1 / max(self.longest)


class InTensor(InBuffer):
    def __init__(self):
        super().__init__()
        self.register_buffer("most", torch.zeros(3))

    def keep(self, x):
        self.most[0] = max(float(self.most[0]), x.shape[1])

    def factor(self, x):
        return 1 / self.most[0]


def hooked():
    model, longest = Texts(), [0]

    def hook(module, given, output):
        longest[0] = max(longest[0], given[0].shape[1])
        return output / longest[0]

    model.embed.register_forward_hook(hook)
    return model


class Values(nn.Module):
    """Keeps the largest value that it saw."""

    def __init__(self):
        super().__init__()
        self.layer, self.largest = nn.Linear(5, 3), 0.0

    def forward(self, x):
        self.largest = max(self.largest, float(x.detach().abs().max()))
        return self.layer(x) / (1 + self.largest)


KEEP = {
    "an attribute": (Longest, WORDS), "a list": (InList, WORDS), "an object": (InObject, WORDS),
    "a buffer": (InBuffer, WORDS), "a class": (InClass, WORDS), "a closure": (InClosure, WORDS),
    "a hook": (hooked, WORDS), "a largest value": (Values, REALS), "a global": (InGlobal, WORDS),
    "a function": (OnFunction, WORDS), "a default": (InDefault, WORDS), "a set": (InSet, WORDS),
    "a tensor": (InTensor, WORDS),
}  # fmt: skip


@pytest.mark.parametrize("name", KEEP)
def test_what_a_model_keeps_of_lengths_or_values_is_refused(name):
    make, x = KEEP[name]
    with pytest.raises(ModelError, match="keeps something of what it is given"):
        try_model(make(), (x,), {})


class Calls(nn.Module):
    def __init__(self, buffer=False):
        super().__init__()
        self.layer, self.calls = nn.Linear(5, 3), 0
        self.register_buffer("count", torch.zeros((), dtype=torch.int64) if buffer else None)

    def forward(self, x):
        self.calls += 1
        if self.count is not None:
            self.count += 1
        return self.layer(x) / self.calls


class Cache(nn.Module):
    """Makes a constant when it is first called."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(5, 3), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(5.0)
        return self.layer(x * self.table)


FINE = {
    "a counter of calls": Calls,
    "a counter of calls in a buffer": lambda: Calls(buffer=True),
    "a constant that is made at the first call": Cache,
    "dropout": lambda: nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3)),
    "normalisation of each example": lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)),
    "an adapter whose second matrix is zero": lambda: nn.Sequential(nn.Linear(5, 4), _zero(nn.Linear(4, 3))),
}


def _zero(layer):
    nn.init.zeros_(layer.weight)
    return layer


@pytest.mark.parametrize("name", FINE)
def test_what_is_fine_is_not_mentioned(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try_model(FINE[name](), (REALS,), {})


class Attends(nn.Module):
    """Dropout by a function, of a small share of the output, as in the attention of a text model."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        h = self.layer(x)
        return h + 0.05 * F.dropout(h, 0.1)


def test_random_numbers_that_change_little_are_not_taken_for_batch_statistics():
    """By how much two draws differ is random too: near the tolerance, one of a hundred models was warned of."""
    for seed in range(100):
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try_model(Attends(), (REALS,), {})


def test_a_cache_that_no_output_follows_is_named_and_not_refused():
    class Grows(nn.Module):
        """As caches of positions do."""

        def __init__(self):
            super().__init__()
            self.embed, self.out, self.longest = nn.Embedding(9, 6), nn.Linear(6, 3), 0

        def forward(self, x):
            self.longest = max(self.longest, x.shape[1])
            return self.out(self.embed(x).sum(1))

    with pytest.warns(ModelWarning, match="keeps something of what it is given, in longest"):
        try_model(Grows(), (WORDS,), {})


class ByHand(nn.Module):
    """Batch normalisation, written by hand."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        h = self.layer(x)
        return (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()


class Apart(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.layer, self.unused, self.change = nn.Linear(5, 3), nn.Linear(2, 2), change

    def forward(self, x):
        return self.change(self.layer(x))


SAID = {
    "other outputs for one row alone": ByHand,
    "no gradient is finite": lambda: Apart(lambda h: (h - h).sqrt()),
    "every gradient is zero": lambda: Apart(lambda h: h * 0),
    "no output depends on unused.weight, unused.bias": lambda: Apart(lambda h: h),
}


@pytest.mark.parametrize("words", SAID)
def test_what_a_model_would_not_learn_is_said(words):
    with pytest.warns(ModelWarning, match=words):
        try_model(SAID[words](), (REALS,), {})


def test_nothing_is_changed_and_no_value_is_read():
    """Inputs of other values give the same answer; generators, weights, buffers and counters stay as they are."""
    model = nn.Sequential(Calls(buffer=True), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    np.random.seed(5)  # noqa: NPY002  # elsewhere than a trial that came before would leave them
    random.seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    for x in (REALS, REALS * float("nan"), torch.full_like(REALS, float("inf"))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try_model(model, (x,), {})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model[0].calls == 0
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])  # noqa: NPY002
    assert states[2] == random.getstate()


def test_integers_are_made_up_too():
    class Ones(Texts):
        def factor(self, x):
            return (x == 1).all(1, keepdim=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a model of the first batch's own words would learn nothing
        try_model(Ones(), (5 * WORDS,), {})


def test_a_model_that_takes_no_made_up_data_is_left_to_the_first_batch():
    class Picky(nn.Linear):
        def forward(self, x):
            if float(x.detach().abs().max()) != 0.25:
                raise ValueError("no")
            return super().forward(x)

    try_model(Picky(5, 3), (REALS,), {})


def trained(model, x, loss=F.cross_entropy):
    plan = ao.plan(dataset_size=12, batch_size=4, epochs=1, epsilon=8, delta=1e-3, mechanism="tree")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [(x[0], torch.tensor(i % 3)) for i in range(12)]
    engine = ao.PrivacyEngine(plan)
    private, optimizer, loader = engine.make_private(model, optimizer, DataLoader(rows, batch_size=4, shuffle=True))
    for inputs, y in loader:
        optimizer.zero_grad()
        loss(private(inputs), y).backward()
        optimizer.step()
    return engine


def test_the_engine_tries_a_model_once_before_its_first_batch(monkeypatch):
    from anyorder.training import engine

    calls = []
    monkeypatch.setattr(engine, "try_model", lambda *arguments: calls.append(arguments))
    trained(nn.Linear(5, 3), REALS)
    assert len(calls) == 1


def test_the_engine_refuses_and_warns():
    with pytest.raises(ModelError, match="keeps something of what it is given, in longest"):
        trained(Longest(), WORDS)
    with pytest.warns(ModelWarning, match="other outputs for one row alone"):
        trained(ByHand(), REALS)


class Norms(torch.nn.utils.parametrizations._SpectralNorm):
    """It iterates on what it was called on, for all that is known of it."""


def spectral():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6), n_power_iterations=2), nn.Tanh(), nn.Linear(6, 3)
    )


def test_a_spectral_norm_iterates_on_released_weights_as_it_does_without_a_guarantee():
    x, y = torch.randn(16, 4), torch.arange(16) % 3
    model, plain = spectral(), spectral()
    plan = plan_at_sigma(1e-9, dataset_size=16, batch_size=8, epochs=3, delta=1e-5, clip_norm=1e3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    private, optimizer, batches = ao.PrivacyEngine(plan, key=bytes(32)).make_private(model, optimizer, loader)
    own = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        private.train()
        for (given, labels), (same, others) in zip(batches, loader, strict=True):
            F.cross_entropy(private(given), labels).backward()
            optimizer.step()
            own.zero_grad()
            F.cross_entropy(plain(same), others).backward()
            own.step()
    norm, other = model[0].parametrizations.weight[0], plain[0].parametrizations.weight[0]
    torch.testing.assert_close(norm._u, other._u, rtol=1e-4, atol=1e-5)
    found, same = (layer.parametrizations.weight.original for layer in (model[0], plain[0]))
    torch.testing.assert_close(found, same, rtol=1e-4, atol=1e-5)


def test_what_else_iterates_in_a_pass_is_refused():
    layer = nn.Linear(4, 3)
    nn.utils.parametrize.register_parametrization(layer, "weight", Norms(layer.weight))
    with pytest.raises(ModelError, match="writes its buffers parametrizations"):
        trained(layer, torch.randn(8, 4))
