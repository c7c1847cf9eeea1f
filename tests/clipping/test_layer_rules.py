"""Rules for layers of one's own: used where the type is the registered one, compared with autograd, one at a time."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.clipping import PerGroup, layer_rules, register_layer_rule
from anyorder.clipping import per_example as engine
from anyorder.clipping.per_example import FunctionalClipping, GhostClipping
from anyorder.errors import ArgumentError, ModelError
from clipping.brute import TOLERANCE, assert_close, clipped_sum, per_example, run
from laws.cases import over

B = 6


class Scale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(size)), nn.Parameter(torch.randn(size))

    def forward(self, x):
        return x * self.weight + self.bias


class LowRank(nn.Module):
    """x U V, whose first factor is a layer of torch's own inside this one."""

    def __init__(self, size, rank, out):
        super().__init__()
        self.down, self.up = nn.Linear(size, rank, bias=False), nn.Parameter(torch.randn(rank, out))

    def forward(self, x, *, factor=1.0):
        return self.down(x) @ self.up * factor


def windows(x, width):
    """(n, C, T - width + 1, width)."""
    return torch.stack([x[..., i : x.shape[-1] - width + 1 + i] for i in range(width)], -1)


class Filter(nn.Module):
    """A convolution with one filter for all channels, (n, C, T)."""

    def __init__(self, width):
        super().__init__()
        self.taps = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return windows(x, len(self.taps)) @ self.taps


class Words(nn.Module):
    """A table of which each row is scaled by a number of its own."""

    def __init__(self):
        super().__init__()
        self.table, self.size = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(9))

    def forward(self, ids):
        return self.table[ids] * self.size[ids][..., None]


CALLS = []


def scale_rule(layer, activations, backprops):
    CALLS.append(len(backprops))
    (x,), n = activations, len(backprops)
    return {
        layer.weight: (x * backprops).reshape(n, -1, x.shape[-1]).sum(1),
        layer.bias: backprops.reshape(n, -1, x.shape[-1]).sum(1),
    }


def low_rank_rule(layer, activations, backprops):
    CALLS.append(len(backprops))
    (x,) = activations
    x, g = x.flatten(1, -2) if x.dim() > 2 else x[:, None], backprops
    g = g.flatten(1, -2) if g.dim() > 2 else g[:, None]
    return {
        layer.down.weight: torch.einsum("nti,ntj->nij", g @ layer.up.mT, x),
        layer.up: torch.einsum("nti,ntj->nij", layer.down(x), g),
    }


def filter_rule(layer, activations, backprops):
    CALLS.append(len(backprops))
    return {layer.taps: torch.einsum("nctk,nct->nk", windows(activations[0], len(layer.taps)), backprops)}


def words_rule(layer, activations, backprops):
    CALLS.append(len(backprops))
    (ids,) = activations
    seen = F.one_hot(ids, 9).to(backprops.dtype)
    return {
        layer.table: torch.einsum("ntv,ntd->nvd", seen * layer.size[ids][..., None], backprops),
        layer.size: torch.einsum("ntv,ntd->nv", seen, backprops * layer.table[ids]),
    }


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    monkeypatch.setattr(layer_rules, "_RULES", {})
    CALLS.clear()
    register_layer_rule(Scale, scale_rule)
    register_layer_rule(LowRank)(low_rank_rule)
    register_layer_rule(Filter, filter_rule)
    register_layer_rule(Words, words_rule)


class Twice(nn.Module):
    """The layer twice, its weight by hand once more, and examples that lie behind another dimension."""

    def __init__(self):
        super().__init__()
        self.scale, self.last = Scale(4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.scale(torch.tanh(self.scale(x))) * self.scale.weight
        return self.last(self.scale(x[None])[0]).flatten(1)


MODELS = {
    "scale": (lambda: nn.Sequential(nn.Linear(4, 5), Scale(5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "alone": (lambda: Scale(4), (4,)),
    "positions": (lambda: nn.Sequential(Scale(4), nn.Flatten(), nn.Linear(12, 3)), (3, 4)),
    "rows": (lambda: nn.Sequential(nn.Flatten(0, 1), Scale(4), nn.Unflatten(0, (-1, 3)), nn.Flatten()), (3, 4)),
    "low rank": (lambda: nn.Sequential(LowRank(4, 2, 5), nn.Tanh(), LowRank(5, 1, 3)), (4,)),
    "convolution-like": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), Filter(3), nn.Flatten()), (2, 9)),
    "words": (lambda: nn.Sequential(Words(), nn.Flatten(), nn.Linear(20, 3)), 5),
    "twice and tied": (Twice, (4,)),
}
ENGINES = {
    "whole": GhostClipping,
    "chunks": lambda m: GhostClipping(m, 2),
    "functional": FunctionalClipping,
}


def batch(shape, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randint(0, 9, (B, shape)) if isinstance(shape, int) else torch.randn(B, *shape, dtype=dtype)


@over("groups", [torch.arange(B), torch.tensor([4, 0, 4, 4, 2, 0])])
@over("engine", ENGINES)
@over("dtype", TOLERANCE)
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_the_loop(name, dtype, engine, groups):
    torch.manual_seed(0)
    CALLS.clear()
    make, shape = MODELS[name]
    module, x = make().to(dtype), batch(shape, dtype)
    y = torch.randn_like(module(x))
    gradients = per_example(module, x, y, F.mse_loss)
    clipping = ENGINES[engine](module)
    for clip_norm in (0.1, 2.0):
        expected = clipped_sum(gradients, groups, clip_norm)
        _, sums = run(clipping, x, y, F.mse_loss, groups=groups, clip_norm=clip_norm)
        assert_close(sums, expected, 10 * TOLERANCE[dtype])
    assert bool(CALLS) == (engine != "functional")
    assert "forward" not in vars(module)


def test_rule_is_compared_once_for_each_layer_and_shape():
    module = nn.Sequential(Scale(4), Scale(4))
    clipping = GhostClipping(module)
    counts = []
    for x in (torch.randn(B, 4), torch.randn(2, 4), torch.randn(B, 3, 4), torch.randn(B, 3, 4)):
        CALLS.clear()
        run(clipping, x, x, F.mse_loss)
        counts.append(len(CALLS))
    assert counts == [4, 2, 4, 2]  # two layers, compared and used


def test_comparison_leaves_the_random_numbers_as_they_are():
    class Noisy(Scale):
        def forward(self, x):
            torch.rand(7)
            return super().forward(x)

    register_layer_rule(Noisy, scale_rule)
    module, x = nn.Sequential(Noisy(4), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(B, 4)
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        outputs.append(run(GhostClipping(module), x, torch.zeros(B, 2), F.mse_loss)[0])
    assert torch.equal(*outputs)


def wrong_scale(layer, activations, backprops):
    return {**scale_rule(layer, activations, backprops), layer.weight: 1.01 * (activations[0] * backprops)}


def forgets_a_parameter(layer, activations, backprops):
    return {layer.weight: activations[0] * backprops}


def other_shape(layer, activations, backprops):
    return {layer.weight: (activations[0] * backprops).sum(0), layer.bias: backprops}


def not_its_own(layer, activations, backprops):
    return {**scale_rule(layer, activations, backprops), torch.zeros(4): backprops}


def of_no_data(layer, activations, backprops):
    return {layer.weight: torch.zeros(1, 4), layer.bias: torch.zeros(1, 4)}


@pytest.mark.parametrize(
    ("rule", "match"),
    [(wrong_scale, r"1 \(Scale\) does not give the gradient of its parameter weight .* by 0\.01 of"),
     (forgets_a_parameter, "for its parameter bias, got none"), (other_shape, r"\(n, \*\(4,\)\) .* got shape \(4,\)"),
     (not_its_own, "of 1 that are not its parameters"), (of_no_data, "does not give the gradient")],
)  # fmt: skip
def test_wrong_rule_is_refused_before_anything_is_released(rule, match):
    register_layer_rule(Scale, rule)
    module = nn.Sequential(nn.Linear(4, 4), Scale(4))
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 4)), batch_size=4)
    engine = ao.PrivacyEngine(ao.plan(loader=loader, epochs=1, epsilon=8, delta=1e-3, mechanism="tree"))
    private, _, loader = engine.make_private(module, torch.optim.SGD(module.parameters(), lr=0.1), loader)
    x, _ = next(iter(loader))
    with pytest.raises(ModelError, match=match):
        private(x)
    assert engine.step == 0
    assert not engine.training._waiting.sums


def test_refusal_does_not_depend_on_the_data():
    """The rule is wrong for negative numbers alone, and the batch has none: it is refused, in the same words."""

    def of_positive(layer, activations, backprops):
        return {**scale_rule(layer, activations, backprops), layer.weight: activations[0].clamp(min=0) * backprops}

    register_layer_rule(Scale, of_positive)
    module, words = Scale(4), set()
    for x in (torch.rand(B, 4), -torch.rand(B, 4), torch.full((B, 4), torch.nan)):
        with pytest.raises(ModelError, match="does not give the gradient") as error:
            run(GhostClipping(module), x, x, F.mse_loss)
        words.add(str(error.value))
    assert len(words) == 1


def off(factor, *names):
    """`scale_rule`, but that the gradients of some parameters are times a factor."""

    def rule(layer, activations, backprops):
        found = scale_rule(layer, activations, backprops)
        return found | {getattr(layer, name): factor * found[getattr(layer, name)] for name in names}

    return rule


def test_another_rule_mode_or_parameter_of_a_layer_is_compared_too():
    class Doubled(Scale):
        def forward(self, x):
            return super().forward(x) if self.training else 2 * super().forward(x)

    register_layer_rule(Doubled, scale_rule)
    x = torch.randn(B, 4)
    rule, mode, parameter = Scale(4), Doubled(4), Scale(4)
    parameter.weight.requires_grad_(False)
    run(GhostClipping(rule), x, x, F.mse_loss)
    run(GhostClipping(mode), x, x, F.mse_loss)
    mode.eval()
    register_layer_rule(Scale, off(2.0, "weight"))
    run(GhostClipping(parameter), x, x, F.mse_loss)  # of its bias alone
    parameter.weight.requires_grad_(True)
    for module in (rule, mode, parameter):
        with pytest.raises(ModelError, match="does not give the gradient"):
            run(GhostClipping(module), x, x, F.mse_loss)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float64, 1 + 1e-4), (torch.float32, 1 + 1e-2)])
def test_a_rule_that_is_a_little_off_is_refused_at_each_precision(dtype, factor):
    register_layer_rule(Scale, off(factor, "bias"))
    x = torch.randn(B, 4, dtype=dtype)
    with pytest.raises(ModelError, match="does not give the gradient of its parameter bias"):
        run(GhostClipping(Scale(4).to(dtype)), x, x, F.mse_loss)


def test_rule_cannot_join_examples():
    """A rule that is right for the made-up examples, and adds other examples' gradients where there are more."""

    def joins(layer, activations, backprops):
        found = scale_rule(layer, activations, backprops)
        return {p: g + g.roll(1, 0) * (len(g) > 2) for p, g in found.items()}

    register_layer_rule(Scale, joins)
    module, x = nn.Sequential(Scale(4), nn.Tanh()).double(), batch((4,))
    expected = clipped_sum(per_example(module, x, x, F.mse_loss), torch.arange(B), 0.1)
    assert_close(run(GhostClipping(module), x, x, F.mse_loss, clip_norm=0.1)[1], expected, 1e-9)
    assert set(CALLS) == {1}


def test_whatever_a_rule_gives_is_cut(monkeypatch):
    monkeypatch.setattr(layer_rules._Ruled, "_check_once", lambda *_: None)
    register_layer_rule(Scale, lambda layer, a, b: {layer.weight: 1e6 * a[0], layer.bias: 1e6 * b})
    x = torch.randn(1, 4)
    for rule in (None, PerGroup()):
        _, sums = run(GhostClipping(Scale(4), rule=rule), x, -x, F.mse_loss, clip_norm=0.3)
        length = torch.cat([value.double() for value in sums.values()]).norm()
        assert 0.3 * (1 - 1e-5) <= length <= 0.3


def test_rule_that_keeps_a_batch_is_refused():
    kept = []

    def keeps(layer, activations, backprops):
        kept.append(activations[0] * 2)
        return scale_rule(layer, activations, backprops)

    register_layer_rule(Scale, keeps)
    clipping = GhostClipping(Scale(4))
    x = torch.randn(B, 4)
    with pytest.raises(ModelError, match="keeps tensors of an earlier batch"):
        for _ in range(2):
            run(clipping, x, x, F.mse_loss)


def test_hooks_of_the_layer_run_and_a_subclass_is_another_type():
    class Doubled(Scale):
        def forward(self, x):
            return 2 * super().forward(x)

    module, x = nn.Sequential(Scale(4), Doubled(4)).double(), batch((4,))
    handles = [
        module[0].register_forward_pre_hook(lambda layer, given: (given[0] * 3,)),
        module[0].register_forward_hook(lambda layer, given, made: made.tanh()),
    ]
    expected = clipped_sum(per_example(module, x, x, F.mse_loss), torch.arange(B), 0.1)
    assert_close(run(GhostClipping(module), x, x, F.mse_loss, clip_norm=0.1)[1], expected, 1e-9)
    assert len(CALLS) == 2
    assert len(handles) == 2


def test_a_layer_inside_a_layer_with_a_rule_is_part_of_it():
    """Its gradient comes by the outer rule alone, not twice; elsewhere in the model it comes by autograd."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.lstm = Scale(4), nn.LSTM(4, 2, batch_first=True).requires_grad_(False)

        def forward(self, x):
            return self.scale(x) * 3 + self.lstm(x[:, None])[0].sum((1, 2))[:, None].detach()

    class Model(nn.Sequential):
        def forward(self, x):
            return self[0].scale(super().forward(x))

    def rule(layer, activations, backprops):
        return {p: 3 * g for p, g in scale_rule(layer.scale, activations, backprops).items()}

    register_layer_rule(Outer, rule)
    module, x = Model(Outer()).double(), batch((4,))
    expected = clipped_sum(per_example(module, x, x, F.mse_loss), torch.arange(B), 0.1)
    assert_close(run(GhostClipping(module), x, x, F.mse_loss, clip_norm=0.1)[1], expected, 1e-9)


def test_gradients_by_a_rule_count_towards_the_memory_of_a_chunk(monkeypatch):
    monkeypatch.setattr(engine, "DIRECT_BYTES", 100)  # those of three examples, two parameters of four float32
    clipping, x = GhostClipping(Scale(4)), torch.randn(B, 4)
    run(clipping, x, x, F.mse_loss)
    assert clipping.state_dict()["chunk_size"] == 3


def test_frozen_parameters_and_settings():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = LowRank(4, 2, 3)
            self.layer.down.requires_grad_(False)

        def forward(self, x):
            return self.layer(x, factor=2.0) + self.layer(x=x)

    def rule(layer, activations, backprops):
        CALLS.append(1)
        return {layer.up: torch.einsum("ni,nj->nij", layer.down(activations[0]), backprops)}

    register_layer_rule(LowRank, rule)
    module, x, y = Model().double(), batch((4,)), torch.randn(B, 3, dtype=torch.float64)
    with pytest.raises(ModelError, match="does not give the gradient"):  # it knows of no factor
        run(GhostClipping(module), x, y, F.mse_loss)
    CALLS.clear()
    register_layer_rule(LowRank, lambda *given: {p: g.clone() for p, g in rule(*given).items()})
    Model.forward = lambda self, x: self.layer(x=x)
    expected = clipped_sum(per_example(module, x, y, F.mse_loss), torch.arange(B), 0.1)
    assert_close(run(GhostClipping(module), x, y, F.mse_loss, clip_norm=0.1)[1], expected, 1e-9)
    assert CALLS


def test_layers_that_no_rule_fits_are_refused():
    class Pair(Scale):
        def forward(self, x):
            return x * self.weight, self.bias

    class InPlace(Scale):
        def forward(self, x):
            return x.mul_(2) * self.weight + self.bias

    class Logarithm(Scale):
        def forward(self, x):
            return (x - 1e9).log() * self.weight + self.bias

    for kind, match in ((Pair, "one floating-point tensor"), (InPlace, "in place"), (Logarithm, "not finite")):
        register_layer_rule(kind, scale_rule)
        module = nn.Sequential(nn.Linear(4, 4), kind(4))
        with pytest.raises(ModelError, match=match):
            run(GhostClipping(module), torch.randn(B, 4), torch.randn(B, 4), lambda out, y: F.mse_loss(out[0], y[0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_reaches_the_rule_as_float32(dtype):
    seen = set()

    def rule(layer, activations, backprops):
        seen.update(t.dtype for t in (layer.weight, activations[0], backprops))
        return scale_rule(layer, activations, backprops)

    register_layer_rule(Scale, rule)
    x = torch.randn(B, 4).to(dtype)
    _, sums = run(GhostClipping(Scale(4).to(dtype)), x, x, F.mse_loss)
    assert seen == {torch.float32} == {value.dtype for value in sums.values()}


def test_autocast():
    module, x = nn.Sequential(nn.Linear(4, 4), Scale(4), nn.Linear(4, 2)), torch.randn(B, 4)
    y = torch.randn(B, 2)
    results = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(run(GhostClipping(module), x, y, F.mse_loss, clip_norm=0.1)[1])
        layer_rules._RULES.clear()
    assert_close(results[0], {n: v.double() for n, v in results[1].items()}, 2e-2)


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"chunk_size": 2}, {"unit": 1}, {"secure": True}], ids=str)
def test_training_is_that_without_a_rule(options):
    options = dict(options)
    secure = options.pop("secure", False)
    final = []
    for _ in range(2):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 5), Scale(5), nn.Linear(5, 1)).double()
        x = torch.randn(16, 4, dtype=torch.float64)
        loader = DataLoader(TensorDataset(x, torch.arange(16) // 2), batch_size=4)
        accumulate = options.get("accumulate", 1)
        plan = ao.plan(
            order=ao.participation.EpochShuffle(1, 4 // accumulate), batch_size=4 * accumulate, epsilon=8,
            delta=1e-3, mechanism=ao.mechanism("tree", secure=secure), unit="user" if "unit" in options else "example",
        )  # fmt: skip
        engine = ao.PrivacyEngine(plan, key=bytes(32))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        private, optimizer, loader = engine.make_private(module, optimizer, loader, **options)
        for i, (x, y) in enumerate(loader):
            if i % accumulate == 0:
                optimizer.zero_grad()
            (private(x)[:, 0] - y).square().mean().backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
        final.append(module.state_dict())
        layer_rules._RULES.clear()
    assert bool(CALLS) != secure
    for name, value in final[0].items():
        torch.testing.assert_close(value, final[1][name], rtol=1e-9, atol=1e-9)


OURS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention,
    nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell,
)  # fmt: skip


@pytest.mark.parametrize("kind", OURS)
def test_types_with_a_rule_of_this_package_are_refused(kind):
    with pytest.raises(ArgumentError, match="no rule of anyorder"):
        register_layer_rule(kind, scale_rule)


@pytest.mark.parametrize(("kind", "rule"), [(Scale(3), scale_rule), (int, scale_rule), (Scale, "rule")])
def test_arguments(kind, rule):
    with pytest.raises(ArgumentError, match="must be a"):
        register_layer_rule(kind, rule)


def test_decorator_and_call_give_the_rule_back():
    assert register_layer_rule(Scale)(scale_rule) is scale_rule
    assert register_layer_rule(Scale, scale_rule) is scale_rule
