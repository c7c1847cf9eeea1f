"""Programs: a replayed batch is, to the last bit, one in which the model ran, and never that of another state."""

import copy
import gc
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anyorder.clipping import per_example, program, register_layer_rule
from anyorder.clipping.per_example import GhostClipping
from anyorder.errors import ModelError, TrainingError

B = 6


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        return self.head(x)


class Own(nn.Module):
    """Parameters used in no layer, a buffer, a tensor of the module's own, a setting."""

    def __init__(self):
        super().__init__()
        self.scale, self.line = nn.Parameter(torch.rand(4)), nn.Linear(4, 3)
        self.register_buffer("mean", torch.rand(4))
        self.table, self.temperature, self.options = torch.rand(4), 2.0, {"power": [1, 2]}

    def forward(self, x, add=0.0):
        x = ((x - self.mean) * (self.scale * self.mean) + self.table) / self.temperature
        x = x ** self.options["power"][1] + add
        return {"y": self.line(x), "rank": x.argsort(1), "name": "own"}


class Writes(nn.Module):
    """In-place functions and views, of what it made itself."""

    def __init__(self):
        super().__init__()
        self.line, self.shift = nn.Linear(4, 6), nn.Parameter(torch.rand(3))

    def forward(self, x):
        y = self.line(x)
        first, second = y.chunk(2, -1)
        first = first.clone()
        first[:, 1:].mul_(2).add_(second[:, 1:].detach())
        return torch.cat([first.relu_(), second * self.shift], -1)


def lstm():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 5, num_layers=2, dropout=0.3, batch_first=True), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    return Last()


def frozen():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    return model


TABLE = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), lambda: torch.randn(B, 4)),
    "logistic": (lambda: nn.Linear(4, 3), lambda: torch.randn(B, 4)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.Flatten(),
            nn.Linear(36, 3),
        ),
        lambda: torch.randn(B, 1, 6, 6),
    ),
    "lstm": (lstm, lambda: torch.randn(B, 3, 4)),
    "gpt": (Gpt, lambda: torch.randint(0, 11, (B, 5))),
    "bags": (
        lambda: nn.Sequential(nn.EmbeddingBag(11, 4, mode="sum", padding_idx=0), nn.Linear(4, 2)),
        lambda: torch.randint(0, 11, (B, 3)),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 30), nn.Dropout(0.5), nn.Linear(30, 3)),
        lambda: torch.randn(B, 4),
    ),
    "own": (Own, lambda: torch.randn(B, 4)),
    "writes": (Writes, lambda: torch.randn(B, 4)),
    "frozen": (frozen, lambda: torch.randn(B, 4)),
}  # fmt: skip
GROUPS = {"examples": torch.arange(B), "units": torch.tensor([0, 1, 0, 2, 2, 2])}


def step(clipping, x, groups=GROUPS["examples"], **kwargs):
    """(outputs, sums) of one batch."""
    got = []
    outputs = clipping.forward((x,), kwargs, groups=groups, clip_norm=0.7, scale=float(len(x)), receive=got.append)
    y = outputs["y"] if isinstance(outputs, dict) else outputs
    (y.float().square().sum() / 10).backward()
    return outputs, got[0]


def without(module):
    """The engine that never replays."""
    clipping = GhostClipping(module)
    clipping.programs.drop()
    return clipping


def equal(a, b):
    (y, sums), (z, others) = a, b
    if isinstance(y, dict):
        assert y.keys() == z.keys()
        assert y["name"] == z["name"]
        torch.testing.assert_close(y["rank"], z["rank"], rtol=0, atol=0)
        y, z = y["y"], z["y"]
    torch.testing.assert_close(y, z, rtol=0, atol=0)
    assert list(sums) == list(others)
    for name, value in sums.items():
        torch.testing.assert_close(value, others[name], rtol=5e-10, atol=0)


def captured(module, make, **kwargs):
    """An engine that has a program."""
    clipping = GhostClipping(module)
    for _ in range(4):  # a finalizer that runs in a recording ends it
        if not len(clipping.programs):
            step(clipping, make(), **kwargs)
    assert len(clipping.programs) == 1, clipping.programs.refused
    step(clipping, make(), **kwargs)  # of which the operations of both passes are written down
    return clipping


def tapes(clipping):
    """Whether each program has a tape."""
    return [kept.tape is not None for kept in clipping.programs._twice.values()]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", TABLE)
def test_replayed_batches_are_those_of_the_model_bit_for_bit(name, groups):
    make, inputs = TABLE[name]
    torch.manual_seed(1)
    module = make()
    other = copy.deepcopy(module)
    clipping, ordinary = captured(module, inputs), without(other)
    assert tapes(clipping) == [name != "lstm"]  # whose layer writes into views of its own
    for seed in range(3):
        torch.manual_seed(seed)
        x = inputs()
        torch.manual_seed(7 + seed)
        one = step(clipping, x, GROUPS[groups])
        after = torch.rand(1)
        torch.manual_seed(7 + seed)
        equal(one, step(ordinary, x, GROUPS[groups]))
        assert torch.rand(1) == after  # as many numbers were drawn
        with torch.no_grad():  # parameters move: the program reads them
            for p, q in zip(module.parameters(), other.parameters(), strict=True):
                q.copy_(p.mul_(1.1))


@pytest.mark.parametrize("name", ["mlp", "gpt", "convolutions", "own"])
def test_autocast(name):
    make, inputs = TABLE[name]
    module = make()
    with torch.autocast("cpu", torch.bfloat16):
        clipping = captured(module, inputs)
        x = inputs()
        torch.manual_seed(3)
        one = step(clipping, x)
        torch.manual_seed(3)
        equal(one, step(without(module), x))


def test_masks_are_drawn_again_in_each_batch():
    module = nn.Sequential(nn.Linear(4, 30), nn.Dropout(0.5))
    clipping, x = captured(module, TABLE["mlp"][1]), torch.randn(B, 4)
    first, second = step(clipping, x)[0], step(clipping, x)[0]
    assert not torch.equal(first == 0, second == 0)
    assert (first == 0).float().mean(1).std() > 0 or not torch.equal(first[0] == 0, first[1] == 0)


def test_no_code_of_the_model_runs_in_a_replayed_batch(monkeypatch):
    clipping = captured(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), TABLE["mlp"][1])
    found = clipping.programs.find
    monkeypatch.setattr(clipping.programs, "find", lambda *key: (found(*key), monkeypatch.setattr(F, "relu", None))[0])
    step(clipping, torch.randn(B, 4))


# -- what a model may read, changed between two batches --------------------------------------------------------------

FACTOR, FACTORS = 2.0, {"f": 2.0}


class Settings:
    kept = 2.0

    def __init__(self):
        self.factor = 2.0


class Reads(nn.Module):
    """Reads all that a program is compared with."""

    power = 1.0

    def __init__(self):
        super().__init__()
        self.line, self.drop, self.shift = nn.Linear(4, 4), nn.Dropout(0.5), nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.rand(4))
        self.factor, self.word, self.deep = 2.0, "relu", {"list": [1.0, (2.0, {"x": 3.0})]}
        self.settings, self.activation, self.named = Settings(), torch.tanh, {"a": 5.0}

    def forward(self, x):
        x = self.drop(self.line(x - self.mean)) * self.factor * self.deep["list"][1][1]["x"] * self.settings.factor
        x = self.activation(x) * FACTOR * FACTORS["f"] * self.power * Settings.kept * outside(1.0)
        return (x.relu() if self.word == "relu" else x.exp()) * self.named.get("a", 1.0) + self.shift


def outside(x):
    return x * 3.0


def hook(value):
    return lambda module, args, output: output * value


def new_type(m, monkeypatch):
    class Other(Reads):
        def forward(self, x):
            return super().forward(x) * 5

    m.__class__ = Other


CHANGES = {
    "training": lambda m, mp: m.eval(),
    "training of a part": lambda m, mp: m.drop.eval(),
    "a setting of a part": lambda m, mp: setattr(m.drop, "p", 0.0),
    "number": lambda m, mp: setattr(m, "factor", 3.0),
    "word": lambda m, mp: setattr(m, "word", "exp"),
    "name of a number": lambda m, mp: m.named.update(b=m.named.pop("a")),
    "inside containers": lambda m, mp: m.deep["list"][1][1].update(x=4.0),
    "item of a list": lambda m, mp: m.deep["list"].__setitem__(1, (2.0, {"x": 7.0})),
    "function": lambda m, mp: setattr(m, "activation", torch.sigmoid),
    "object": lambda m, mp: setattr(m.settings, "factor", 9.0),
    "class": lambda m, mp: mp.setattr(Settings, "kept", 7.0),
    "class of the model": lambda m, mp: mp.setattr(Reads, "power", 7.0),
    "global": lambda m, mp: mp.setitem(globals(), "FACTOR", 5.0),
    "item of a global": lambda m, mp: mp.setitem(FACTORS, "f", 5.0),
    "global function": lambda m, mp: mp.setitem(globals(), "outside", lambda x: x * 8.0),
    "forward of the object": lambda m, mp: setattr(m, "forward", lambda x: m.line(x)),
    "forward of the class": lambda m, mp: mp.setattr(Reads, "forward", lambda self, x: self.line(x)),
    "forward of a layer": lambda m, mp: mp.setattr(nn.Dropout, "forward", lambda self, x: x),
    "type": new_type,
    "part": lambda m, mp: setattr(m, "line", nn.Linear(4, 4)),
    "parameter": lambda m, mp: setattr(m, "shift", nn.Parameter(torch.ones(4))),
    "values of a parameter": lambda m, mp: m.shift.data.fill_(3.0),
    "memory of a parameter": lambda m, mp: setattr(m.shift, "data", torch.ones(4)),
    "frozen": lambda m, mp: m.line.weight.requires_grad_(False),
    "frozen bias": lambda m, mp: m.line.bias.requires_grad_(False),
    "buffer": lambda m, mp: setattr(m, "mean", torch.ones(4)),
    "values of a buffer": lambda m, mp: m.mean.fill_(3.0),
    "no buffer": lambda m, mp: (delattr(m, "mean"), setattr(m, "mean", 0.5)),
    "forward hook": lambda m, mp: m.line.register_forward_hook(hook(3.0)),
    "forward hook of the model": lambda m, mp: m.register_forward_hook(hook(3.0)),
    "pre-hook": lambda m, mp: m.drop.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "hook of all modules": lambda m, mp: mp.callback(nn.modules.module.register_module_forward_hook(hook(2.0)).remove),
    "dtype": lambda m, mp: m.double(),
}


class Undone(pytest.MonkeyPatch):
    def __init__(self):
        super().__init__()
        self.callback = lambda undo: self.undos.append(undo)
        self.undos = []

    def undo(self):
        super().undo()
        for undo in self.undos:
            undo()


@pytest.fixture
def patch():
    made = Undone()
    yield made
    made.undo()


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_batches_is_never_replayed_as_it_was(change, patch):
    torch.manual_seed(0)
    module = Reads()
    clipping, x = captured(module, TABLE["mlp"][1]), torch.randn(B, 4)
    assert tapes(clipping) == [True]
    CHANGES[change](module, patch)
    x = x.to(module.line.weight.dtype)
    torch.manual_seed(3)
    one = step(clipping, x)
    torch.manual_seed(3)
    equal(one, step(without(module), x))
    for _ in range(4):
        torch.manual_seed(3)
        equal(step(clipping, x), one)


def test_what_a_closure_and_a_set_hold_is_compared():
    factor = 2.0

    def line(m, x):
        return x * factor * (2.0 if "a" in m.names else 1.0)

    module = Of(line)
    module.names = {"b"}
    clipping, x = captured(module, TABLE["own"][1]), torch.randn(B, 4)
    module.names.add("a")
    equal(step(clipping, x), step(without(module), x))
    clipping = captured(module, TABLE["own"][1])
    factor = 7.0
    equal(step(clipping, x), step(without(module), x))


BATCHES = {
    "size": lambda: (torch.randn(B + 1, 4), {}),
    "one example": lambda: (torch.randn(1, 4), {}),
    "shape": lambda: (torch.randn(B, 2, 4), {}),
    "stride": lambda: (torch.randn(4, B).t(), {}),
    "dtype": lambda: (torch.randint(0, 5, (B, 4)), {}),
    "setting": lambda: (torch.randn(B, 4), {"add": 2.0}),
    "type of a setting": lambda: (torch.randn(B, 4), {"add": 0}),
    "tensor for a setting": lambda: (torch.randn(B, 4), {"add": torch.ones(B, 4)}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_another_kind_has_a_program_of_its_own(name):
    module = Own()
    clipping = captured(module, TABLE["own"][1])
    x, kwargs = BATCHES[name]()
    for _ in range(4):
        equal(
            step(clipping, x, torch.arange(len(x)), **kwargs), step(without(module), x, torch.arange(len(x)), **kwargs)
        )
    again = torch.randn(B, 4)
    equal(step(clipping, again), step(without(module), again))


@pytest.mark.parametrize(
    ("asks", "other"),
    [
        (lambda m, x: x.float() * (2.0 if x.dtype == torch.int32 else 1.0), lambda x: x.int()),
        (lambda m, x: x * (2.0 if x.is_contiguous() else 1.0) * 1.0, lambda x: x.t().contiguous().t()),
    ],
    ids=["dtype", "strides"],
)
def test_a_model_that_asks_how_a_batch_is_laid_out_is_asked_again(asks, other):
    def numbers():
        return torch.randint(0, 5, (B, 4))

    module = Of(asks)
    clipping = captured(module, numbers)
    for x in (other(numbers()), numbers()):
        equal(step(clipping, x), step(without(module), x))


def test_settings_of_torch_make_another_kind():
    module, x = Own(), torch.randn(B, 4)
    clipping = captured(module, TABLE["own"][1])
    with torch.autocast("cpu", torch.bfloat16):
        assert step(clipping, x)[0]["y"].dtype == torch.bfloat16
    torch.use_deterministic_algorithms(True)
    try:
        equal(step(clipping, x), step(without(module), x))
        assert len(clipping.programs._once) == 2
    finally:
        torch.use_deterministic_algorithms(False)


# -- models that get no program --------------------------------------------------------------------------------------

COUNTS = [0]


class Function(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Of(nn.Module):
    """A model whose forward has a line of its own."""

    def __init__(self, line):
        super().__init__()
        self.head, self.line, self.count, self.p = nn.Linear(4, 3), line, 0, torch.rand(4)

    def forward(self, x):
        return self.head(self.line(self, x))


def late(x, count):
    """Another function of x from the fifth batch on: two recordings are equal before."""
    return x * 2.0 if count > 4 else x * 1.0


def counts(m, x):
    m.count += 1
    return late(x, m.count)


def counts_globally(m, x):
    COUNTS[0] += 1
    return late(x, COUNTS[0])


def closed_over():
    value = 1.0

    def line(m, x):
        nonlocal value
        value += 1
        return late(x, value)

    return line


def without_gradient(m, x):
    with torch.no_grad():
        y = x * 2
    return x + y


def made_later(m, x):
    m.late = getattr(m, "late", 0) + 1
    return x


def drawn_by_default(m, x, state=[]):  # noqa: B006
    state.append(1)
    return late(x, len(state))


def counts_on_a_function(m, x):
    helper.calls = getattr(helper, "calls", 0) + 1
    return late(x, helper.calls)


def helper():
    pass


STRANGE = {
    "counts": counts,
    "counts globally": counts_globally,
    "counts on a function": counts_on_a_function,
    "counts in a closure": closed_over(),
    "counts in a default": drawn_by_default,
    "draws by Python": lambda m, x: x * (2.0 if random.random() < 0.5 else 1.0),
    "draws out of sight": lambda m, x: x * 2 if next(iter(random.random, 2.0)) < 1e-9 else x * 1,
    "draws by NumPy": lambda m, x: x * float(np.random.rand()),  # noqa: NPY002
    "reads a generator": lambda m, x: x * (torch.initial_seed() % 7),
    "has a gradient of its own": lambda m, x: Function.apply(x),
    "runs without gradients": without_gradient,
    "reads a value of a tensor": lambda m, x: x * float(m.p[0]),
    "reads values by NumPy": lambda m, x: x * m.p.numpy()[0].item(),
    "reads a list of values": lambda m, x: x * m.p.tolist()[0],
    "keeps what it made": made_later,
    "makes tensors of numbers": lambda m, x: x * torch.tensor(2.0),
    "prints": lambda m, x: (print(end=""), x)[1],
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_model_that_may_do_something_else_next_time_runs_itself(name):
    module = Of(STRANGE[name])
    clipping = GhostClipping(module)
    for _ in range(8):
        step(clipping, torch.randn(B, 4))
    assert len(clipping.programs) == 0
    assert clipping.programs.refused


BY_A_SETTING = {
    "another number": lambda m, x: x * (2.0 if torch.is_warn_always_enabled() else 1.0),
    "another operation": lambda m, x: x * 2.0 if torch.is_warn_always_enabled() else x + 2.0,
    "one operation more": lambda m, x: (x * 2.0).tanh() if torch.is_warn_always_enabled() else x * 2.0,
}


@pytest.mark.parametrize("name", BY_A_SETTING)
def test_two_batches_of_two_lists_make_no_program(name):
    """By a setting that nobody compares: what ran is."""
    module, x = Of(BY_A_SETTING[name]), torch.randn(B, 4)
    clipping = GhostClipping(module)
    try:
        for setting in (False, True, True):
            torch.set_warn_always(setting)
            equal(step(clipping, x), step(without(module), x))
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
def test_a_model_with_hooks_runs_itself(register):
    """What a hook does in a batch is not in the list of another."""
    module, calls = nn.Linear(4, 3), []
    getattr(module, register)(
        lambda part, *given: late(given[-1] if given[1:] else given[0][0], calls.append(1) or len(calls))
    )
    clipping = GhostClipping(module)
    for _ in range(8):
        x = torch.randn(B, 4)
        step(clipping, x)
    assert clipping.programs.refused == "a module with hooks"
    assert len(calls) >= 8
    assert len(clipping.programs) == 0


def test_a_layer_with_a_rule_of_its_own_and_a_table_that_lies_elsewhere():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))

        def forward(self, x):
            return x * self.weight

    register_layer_rule(Scale, lambda layer, a, b: {layer.weight: a[0] * b})
    clipping = GhostClipping(nn.Sequential(Scale(), nn.Linear(4, 2)))
    for _ in range(4):
        step(clipping, torch.randn(B, 4))
    assert clipping.programs.refused == "a rule of the user's own"


def test_a_layer_left_out_at_random_is_left_out_in_its_own_batches():
    """Two batches may agree by chance; what was drawn by Python is seen, whatever it was."""
    module = Of(lambda m, x: x * 2 if random.random() < 1e-9 else x)
    clipping = GhostClipping(module)
    for _ in range(4):
        step(clipping, torch.randn(B, 4))
    assert len(clipping.programs) == 0


def test_at_most_eight_kinds_of_batches_have_a_program():
    module = nn.Linear(4, 3)
    clipping = GhostClipping(module)
    for _ in range(3):
        for length in range(1, 13):
            x = torch.randn(B, length, 4)
            equal(step(clipping, x), step(without(module), x))
    assert len(clipping.programs) == program._KINDS_OF_BATCHES


@pytest.mark.parametrize("name", TABLE)
def test_two_sizes_make_a_program_of_any_size(name, monkeypatch):
    make, inputs = TABLE[name]
    module = make()
    x = torch.cat([inputs() for _ in range(4)])
    clipping = GhostClipping(module)
    for size in (B, 4, 5):
        step(clipping, x[:size], torch.arange(size))
    (made,) = clipping.programs._twice.values()
    assert made.size is None
    recorded = []
    monkeypatch.setattr(clipping.programs, "recorder", lambda key: recorded.append(key))
    for size in (1, 2, 3, 7, 20, B):
        torch.manual_seed(size)
        one = step(clipping, x[:size], torch.arange(size) // 2)
        torch.manual_seed(size)
        equal(one, step(without(module), x[:size], torch.arange(size) // 2))
    assert len(recorded) <= 1  # a single example may lie otherwise in memory


def test_a_setting_that_moves_in_each_batch_is_followed_and_given_up():
    module = Own()
    clipping = GhostClipping(module)
    for i in range(150):
        if i % 3 == 0:
            module.temperature = 1.0 + i
        x = torch.randn(B, 4)
        equal(step(clipping, x), step(without(module), x))
    assert len(clipping.programs) == 0


def test_a_setting_that_moves_now_and_then_never_ends_the_programs(monkeypatch):
    """A table that is flushed after each epoch is another tensor then: after 33 epochs no step was replayed."""
    monkeypatch.setattr(program, "_CHANGES", 2)
    module = Own()
    clipping = captured(module, lambda: torch.randn(B, 4))
    for change in range(4):
        module.temperature = 3.0 + change
        for _ in range(6):
            step(clipping, torch.randn(B, 4))
        assert len(clipping.programs) == 1


def test_modes_and_profilers_of_the_user_see_the_model(monkeypatch):
    module = nn.Linear(4, 3)
    clipping, x = captured(module, TABLE["mlp"][1]), torch.randn(B, 4)
    seen = []

    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Sees():
        step(clipping, x)
    assert F.linear in seen


def test_a_larger_batch_than_those_that_were_recorded_is_cut_where_its_gradients_would_not_fit(monkeypatch):
    module = Own()
    clipping, x = GhostClipping(module), torch.randn(20, 4)
    monkeypatch.setattr(per_example, "DIRECT_BYTES", 10 * 4 * 4)  # ten examples
    for size in (6, 4, 5):
        step(clipping, x[:size], torch.arange(size))
    assert len(clipping.programs) == 1
    one = step(clipping, x, torch.arange(20))
    assert clipping.state_dict()["chunk_size"] == 10
    equal(one, step(GhostClipping(module, 10), x, torch.arange(20)))


def test_a_buffer_that_is_written_before_backward_is_what_it_was_in_forward():
    module, x, got = Own(), torch.randn(B, 4), []
    clipping = captured(module, TABLE["own"][1])
    _, expected = step(without(module), x)
    y = clipping.forward((x,), {}, groups=GROUPS["examples"], clip_norm=0.7, scale=float(B), receive=got.append)["y"]
    module.mean.fill_(7.0)
    (y.square().sum() / 10).backward()
    equal((y, got[0]), (y, expected))


# -- what is held ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "lstm", "gpt", "own"])
def test_nothing_of_a_batch_is_held_without_the_collector(name):
    make, inputs = TABLE[name]
    module = make()
    clipping = captured(module, inputs)
    gc.collect()
    gc.disable()
    try:
        step(clipping, inputs())
        before = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
        for _ in range(50):
            step(clipping, inputs())
        assert sum(isinstance(one, torch.Tensor) for one in gc.get_objects()) == before
    finally:
        gc.enable()


def test_tensors_of_a_replayed_pass_die_when_nobody_needs_them(monkeypatch):
    module = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(4, 4))
    monkeypatch.setattr(program, "TAPE_BYTES", 0)
    clipping = captured(module, TABLE["mlp"][1])
    assert tapes(clipping) == [False]
    (found,) = clipping.programs._twice.values()
    left, played = [], program._played

    def seen(play, tensors, *rest):
        played(play, tensors, *rest)
        left.append(tensors)

    monkeypatch.setattr(program, "_played", seen)
    assert math.isfinite(float(step(clipping, torch.randn(B, 4))[0].detach().sum()))
    made = {number for node in found._nodes for number in node.made}
    kept = {number for part in found._outputs for number in part}
    assert {number for number in made if left[0][number] is not None} == kept & made


def test_a_global_of_the_name_of_an_attribute_is_another_thing(monkeypatch):
    """The snapshot held what a loop kept under that name, outputs perhaps, and took each batch for a change."""
    clipping = captured(module := TABLE["own"][0](), TABLE["own"][1])
    monkeypatch.setitem(globals(), "table", held := torch.randn(3))  # where forward reads self.table
    for _ in range(3):
        step(clipping, TABLE["own"][1]())
    assert clipping.programs._changes == 0
    clipping = captured(module, TABLE["own"][1])
    assert not any(value is held for value in clipping.programs._snapshot._seen.values())


# -- forward and backward ----------------------------------------------------------------------------------------------


def loss_of(clipping, x, loss, **options):
    """The sums of a batch with a loss of its own."""
    got = []
    options = {
        "groups": torch.arange(len(x)),
        "clip_norm": 0.7,
        "scale": float(len(x)),
        "receive": got.append,
    } | options
    loss(clipping.forward((x,), {}, **options)).backward()
    return got[0]


LOSSES = {
    "expanded": lambda y: y.sum() / 10,
    "transposed": lambda y: (y.mT.contiguous() * torch.arange(3.0)[:, None]).sum() / 10,
    "a part": lambda y: y[::2, 1].exp().sum() / 10,
    "twice": lambda y: (y * y.detach()).sum() / 10 + y.square().mean(),
    "negated": lambda y: torch.complex(y, y).conj().imag.square().sum() / 10,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_tape_takes_the_gradients_of_any_loss(name):
    torch.manual_seed(0)
    module = TABLE["mlp"][0]()
    clipping, ordinary = captured(module, TABLE["mlp"][1]), without(copy.deepcopy(module))
    assert tapes(clipping) == [True]
    x = torch.randn(B, 4)
    one, other = (loss_of(c, x, LOSSES[name]) for c in (clipping, ordinary))
    assert tapes(clipping) == [True]
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], rtol=1e-6, atol=1e-8)


def test_what_is_written_between_the_passes_of_a_tape_is_refused():
    clipping = captured(module := TABLE["mlp"][0](), TABLE["mlp"][1])

    def forward():
        x = torch.randn(B, 4)
        options = {"groups": torch.arange(B), "clip_norm": 0.7, "scale": 1.0, "receive": lambda sums: None}
        return x, clipping.forward((x,), {}, **options)

    x, y = forward()
    x.mul_(2)
    with pytest.raises(TrainingError, match="cannot run"):
        y.sum().backward()
    x, y = forward()
    with torch.no_grad():
        module[0].weight.mul_(2)
    with pytest.raises(TrainingError, match="cannot run"):
        y.sum().backward()
    x, y = forward()
    with pytest.raises(RuntimeError, match="modified inplace"):
        y.mul_(2)
    y.sum().backward(retain_graph=True)
    with pytest.raises(TrainingError, match="second time"):
        y.sum().backward()
    assert tapes(clipping) == [True]


class Hidden(nn.Module):
    """Gives what its backward pass reads: a hidden state, a view of another, and a mask."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = self.a(x).tanh()
        k = h * (mask := x[..., :1] > 0)
        return {"y": self.b(k), "h": h, "k": k[..., 1:], "mask": mask}


@pytest.mark.parametrize("large", [False, True])
def test_what_the_model_gave_is_not_what_backward_reads_once_it_is_written(monkeypatch, large):
    """By a tape, and by the graph of autograd where there is none; what backward does not read may be written."""
    monkeypatch.setattr(program, "TAPE_BYTES", 0 if large else program.TAPE_BYTES)
    torch.manual_seed(0)
    clipping, x = captured(Hidden(), lambda: torch.randn(B, 4)), torch.randn(B, 4)
    assert tapes(clipping) == [not large]

    def sums(write, name):
        def loss(outputs):
            total = outputs["y"].sum() / 10
            with torch.no_grad():
                write(outputs[name])
            return total

        return loss_of(clipping, x, loss)

    before = sums(lambda h: None, "y")
    for write in (lambda h: h.copy_(1 - h.float()), lambda h: h.detach()[1:].fill_(0)):
        for name in ("h", "k", "mask"):
            with pytest.raises(RuntimeError, match="was written in place since" if not large else "inplace"):
                sums(write, name)
        for name, value in sums(write, "y").items():
            assert torch.equal(value, before[name])


def test_a_unit_that_is_not_finite_adds_nothing_by_a_tape():
    torch.manual_seed(0)
    module = TABLE["mlp"][0]()
    clipping, ordinary = captured(module, TABLE["mlp"][1]), without(copy.deepcopy(module))
    x = torch.randn(B, 4)
    rows, kept = x.clone(), x[[0, 1, 3, 4, 5]]
    rows[2, 1] = math.nan
    sums = loss_of(clipping, rows, lambda y: y.square().sum() / 10, scale=1.0)
    others = loss_of(ordinary, kept, lambda y: y.square().sum() / 10, scale=1.0)
    for key, value in sums.items():
        torch.testing.assert_close(value, others[key], rtol=1e-6, atol=1e-8)


def test_a_large_pass_has_no_tape(monkeypatch):
    monkeypatch.setattr(program, "TAPE_BYTES", 100)
    clipping = captured(TABLE["mlp"][0](), TABLE["mlp"][1])
    assert tapes(clipping) == [False]
    for _ in range(4):
        step(clipping, torch.randn(B, 4))
    assert tapes(clipping) == [False]


def test_a_batch_whose_loss_is_never_taken_leaves_no_tape():
    clipping, x = captured(TABLE["mlp"][0](), TABLE["mlp"][1]), torch.randn(B, 4)
    (kept,) = clipping.programs._twice.values()
    kept.tape, kept.tries = None, 0
    options = {"groups": torch.arange(B), "clip_norm": 0.7, "scale": 1.0, "receive": lambda sums: None}
    clipping.forward((x,), {}, **options)
    assert tapes(clipping) == [False]
    step(clipping, x)
    assert tapes(clipping) == [True]


def test_ids_that_are_in_no_table_are_refused_and_the_tape_goes_on():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    clipping, ids = captured(module, lambda: torch.randint(0, 5, (B, 2))), torch.randint(0, 5, (B, 2))
    assert tapes(clipping) == [True]
    with pytest.raises((IndexError, ModelError)):
        step(clipping, torch.full((B, 2), 7))
    equal(step(clipping, ids), step(without(copy.deepcopy(module)), ids))


def test_a_pass_that_is_written_down_holds_no_more_than_one_that_is_not(monkeypatch):
    """A recorder that held what it saw took the first steps of a large model beyond the memory of all others."""

    class Chain(nn.Linear):
        def forward(self, x):
            for _ in range(20):  # nothing of which backward needs
                x = x + 1.0
            return super().forward(x)

    alive, end = [], program.Recorder.end

    def ended(self, *given):
        alive.append(sum(type(one) is torch.Tensor and one.shape[-1:] == (37,) for one in gc.get_objects()))
        end(self, *given)

    monkeypatch.setattr(program.Recorder, "end", ended)
    captured(Chain(37, 2), lambda: torch.randn(B, 37))
    assert len(alive) >= 2
    assert max(alive) < 10
