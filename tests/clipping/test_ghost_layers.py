"""Ghost norms and book-keeping against a loop over examples: every layer, every way to use a parameter."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from anyorder.clipping import norms
from anyorder.clipping import per_example as engine
from anyorder.clipping.norms import DirectUse, LinearUse
from anyorder.clipping.per_example import GhostClipping
from clipping.brute import TOLERANCE, assert_close, clipped_sum, norm, per_example, run
from clipping.test_layers_by_loop import CASES, IMAGE, SEQUENCE, TOKENS, LowRank, inputs
from laws.cases import over


class With(nn.Module):
    """Parameters of given shapes, and a function of them and the input."""

    def __init__(self, function, *shapes, **modules):
        super().__init__()
        self.function = function
        for i, shape in enumerate(shapes):
            self.register_parameter("abc"[i], nn.Parameter(torch.randn(shape)))
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.function(self, x)


def cross_attention(self, x):
    return self.layer(x[:, :2], x[..., :4], x[..., 4:], need_weights=False)[0]


def masked_attention(self, x):
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = x[..., 0] > 1.5
    return self.layer(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)[0].nan_to_num()


def time_first(self, x):
    x = x.transpose(0, 1)
    return self.layer(x, x, x)[0].transpose(0, 1)


def packed_projection(self, x):
    """Slices of one matrix that overlap, and slices that do not."""
    q, k = self.a.chunk(2)
    return F.linear(x, q) + F.linear(x, k) + F.linear(x, self.b[:3]) + F.linear(x, self.b[2:5])


def tied_and_turned(self, x):
    return (self.layer(x).tanh() @ self.layer.weight.t()).mean(1)


def positions(self, x):
    """Positions are read once for all examples."""
    return self.second(self.first(x) + self.layer(torch.arange(x.shape[1])))


def attention_scores(self, x):
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.layer(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def per_head_mask(self, x):
    q = self.layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=(x[..., 0] * self.a)[:, None, None, :]).flatten(1)


def without_gradient(self, x):
    with torch.no_grad():
        fixed = self.layer(x)
    return self.layer(x) * fixed


def nested_map(self, x):
    return torch.vmap(self.layer, in_dims=1, out_dims=1)(x)


def several_images(self, x):
    """Every example is cut into images, all of which a layer sees as its batch."""
    return self.layer(x.reshape(-1, 2, 3, 6)).reshape(len(x), -1)


def lone_sequence(self, x):
    return self.layer(x[0])[0][None] if len(x) == 1 else torch.stack([self.layer(row)[0] for row in x])


def frozen_bias(layer):
    layer.bias.requires_grad_(False)
    return layer


ODD = {
    "scale": (lambda: With(lambda self, x: x * self.a + self.b, (8,), ()), SEQUENCE),
    "einsum": (lambda: With(lambda self, x: torch.einsum("btd,de->bte", x, self.a), (8, 3)), SEQUENCE),
    "matrix product": (lambda: With(lambda self, x: x @ self.a + torch.matmul(x, self.b.T), (8, 3), (3, 8)), SEQUENCE),
    "addmm": (lambda: With(lambda self, x: torch.addmm(self.b, x.flatten(0, 1), self.a).view(len(x), 5, 3),
                           (8, 3), (3,)), SEQUENCE),
    "bilinear": (lambda: With(lambda self, x: F.bilinear(x, x, self.a, self.b), (3, 8, 8), (3,)), SEQUENCE),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), SEQUENCE),
    "weight norm, conv": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 3, 3)), IMAGE),
    "weight norm, lstm": (lambda: With(lambda self, x: self.layer(x)[0], layer=nn.utils.parametrizations.weight_norm(
        nn.LSTM(8, 3, batch_first=True), "weight_hh_l0")), SEQUENCE),
    "used whole and in a layer": (lambda: With(lambda self, x: self.layer(x) + self.layer.weight.sum(1) ** 2,
                                               layer=nn.Linear(8, 3)), SEQUENCE),
    "rows, used whole and in a layer": (lambda: With(lambda self, x: self.layer(x) + self.layer.weight.sum(1) ** 2,
                                                     layer=nn.Linear(8, 3)), (8,)),
    "rows, a slice and the whole": (lambda: With(
        lambda self, x: F.linear(x, self.a[:2]) + self.a.square().mean(), (3, 8)), (8,)),
    "table used whole": (lambda: With(lambda self, x: self.layer(x).sum(1) * self.layer.weight.sum(0),
                                      layer=nn.Embedding(10, 4)), TOKENS),
    "slices": (lambda: With(packed_projection, (6, 8), (5, 8)), SEQUENCE),
    "low rank layers": (lambda: LowRank(), SEQUENCE),
    "frozen bias": (lambda: nn.Sequential(frozen_bias(nn.Linear(8, 4)), frozen_bias(nn.Linear(4, 4))), SEQUENCE),
    "frozen weight": (lambda: With(lambda self, x: F.linear(x, torch.ones(3, 8).to(x), self.a), (3,)), SEQUENCE),
    "frozen bias, conv": (lambda: frozen_bias(nn.Conv2d(4, 3, 3)), IMAGE),
    "positions": (lambda: With(positions, layer=nn.Embedding(5, 4), first=nn.Embedding(10, 4), second=nn.Linear(4, 3)),
                  TOKENS),
    "tied, turned": (lambda: With(tied_and_turned, layer=nn.Embedding(10, 4)), TOKENS),
    "tied, padding": (lambda: With(lambda self, x: F.linear(self.layer(x).tanh(), self.layer.weight),
                                   layer=nn.Embedding(10, 4, padding_idx=2)), TOKENS),
    "embedding twice": (lambda: With(lambda self, x: self.layer(x) * self.layer(x.flip(1)), layer=nn.Embedding(10, 4)),
                        TOKENS),
    "embedding, scaled by frequency": (lambda: nn.Embedding(10, 4, scale_grad_by_freq=True), TOKENS),
    "cross attention": (lambda: With(cross_attention, layer=nn.MultiheadAttention(
        8, 2, batch_first=True, kdim=4, vdim=4, add_bias_kv=True, add_zero_attn=True)), SEQUENCE),
    "cross attention, packed": (lambda: With(lambda self, x: self.layer(x[:, :2], x, x, need_weights=False)[0],
                                             layer=nn.MultiheadAttention(8, 2, batch_first=True)), SEQUENCE),
    "masked attention": (lambda: With(masked_attention, layer=nn.MultiheadAttention(8, 2, batch_first=True)), SEQUENCE),
    "attention, time first": (lambda: With(time_first, layer=nn.MultiheadAttention(8, 2)), SEQUENCE),
    "attention scores": (lambda: With(attention_scores, layer=nn.Linear(8, 24)), SEQUENCE),
    "mask with a gradient": (lambda: With(per_head_mask, (5,), layer=nn.Linear(8, 8)), SEQUENCE),
    "without gradient": (lambda: With(without_gradient, layer=nn.Linear(8, 3)), SEQUENCE),
    "nested map": (lambda: With(nested_map, layer=nn.Linear(8, 3)), SEQUENCE),
    "several images": (lambda: With(several_images, layer=nn.Conv2d(2, 3, 2, groups=1)), IMAGE),
    "several images, groups": (lambda: With(several_images, layer=nn.Conv2d(2, 4, 2, groups=2)), IMAGE),
    "convolution, called twice": (lambda: With(lambda self, x: self.layer(self.layer(x)), layer=nn.Conv2d(4, 4, 3)),
                                  IMAGE),
    "convolution, even and same": (lambda: nn.Conv2d(4, 3, (2, 4), padding="same"), IMAGE),
    "convolution, reflected": (lambda: nn.Conv2d(4, 3, 3, padding=(1, 2), padding_mode="reflect"), IMAGE),
    "convolution, channels last": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 3, 2)).to(
        memory_format=torch.channels_last), IMAGE),
    "transformer layer, time first": (lambda: With(lambda self, x: self.layer(x.transpose(0, 1)).transpose(0, 1),
        layer=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True)), SEQUENCE),
    "decoder layer": (lambda: With(lambda self, x: self.layer(x, x[:, :3]),
        layer=nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)), SEQUENCE),
    "lone sequence": (lambda: With(lone_sequence, layer=nn.LSTM(8, 3)), SEQUENCE),
    "lstm, time first": (lambda: With(lambda self, x: self.layer(x.transpose(0, 1))[1][1][0],
                                      layer=nn.LSTM(8, 3, 2)), SEQUENCE),
    "gru, shared weights": (lambda: With(lambda self, x: self.layer(self.layer(x)[0])[0],
                                         layer=nn.GRU(8, 8, batch_first=True)), SEQUENCE),
    "in place": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), SEQUENCE),
    "prelu": (lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU(8), nn.Linear(8, 3)), (8,)),
    "layer norm of two dimensions": (lambda: nn.Sequential(nn.LayerNorm((5, 8)), nn.Linear(8, 3)), SEQUENCE),
    "layer norm, twice": (lambda: With(lambda self, x: self.layer(self.layer(x) ** 2),
                                      layer=nn.LayerNorm(8)), SEQUENCE),
    "layer norm, no bias": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, bias=False)), (8,)),
    "layer norm, frozen bias": (lambda: nn.Sequential(nn.Linear(8, 8), frozen_bias(nn.LayerNorm(8))), SEQUENCE),
    "layer norm by its function": (lambda: With(
        lambda self, x: torch.layer_norm(x, (8,), self.a[0], self.a[1], 1e-2), (2, 8)), SEQUENCE),
    "rms norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 3), nn.RMSNorm(3, eps=0.1)),
                 SEQUENCE),
    "rms norm of two dimensions": (lambda: nn.Sequential(nn.RMSNorm((5, 8)), nn.Linear(8, 3)), SEQUENCE),
    "group of zero-gradient parts": (lambda: With(lambda self, x: self.layer(x) * 0 + x @ self.a, (8, 3),
                                                  layer=nn.Linear(8, 3)), SEQUENCE),
}  # fmt: skip

# Torch says of some functions that it maps them one example at a time, and that it copies padded inputs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]
UNITS = {"examples": torch.arange(5), "units": torch.tensor([5, 2, 5, 9, 5])}


@pytest.mark.filterwarnings("ignore:.*in two passes:anyorder.errors.ClippingWarning")
@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, "units"), (torch.float64, "examples")])
@over("name", CASES | ODD)
def test_layer(name, dtype, units):
    torch.manual_seed(3)
    make, shape = (CASES | ODD)[name]
    clipping = check(make().to(dtype), inputs(shape, 5, dtype), UNITS[units], dtype)
    assert clipping._unmapped == (name == "weight norm, lstm"), "one pass was to do"


def check(module, x, groups, dtype, chunk_size=None, shortened=0.0):
    """Where float32 terms cancel, bounds of rounding errors may shorten the units that are cut; never the others."""
    target = torch.randn_like(module(x))
    gradients = per_example(module, x, target, F.mse_loss)
    clip_norm = 0.7 * max(sum(g.square().sum().item() for g in row.values()) ** 0.5 for row in gradients)
    clipping = GhostClipping(module, chunk_size)
    clip_norm = clip_norm or 1.0  # where every gradient is zero
    outputs, sums = run(clipping, x, target, F.mse_loss, groups=groups, clip_norm=clip_norm)
    torch.testing.assert_close(outputs, torch.cat([module(x[i : i + 1]) for i in range(len(x))]))
    assert_close(sums, clipped_sum(gradients, groups, clip_norm), shortened or TOLERANCE[dtype], clip_norm)
    if shortened:
        _, sums = run(clipping, x, target, F.mse_loss, groups=groups, clip_norm=100 * clip_norm)
        assert_close(sums, clipped_sum(gradients, groups, 100 * clip_norm), TOLERANCE[dtype])
    assert all(p.grad is None for p in module.parameters())
    assert {s.dtype for s in sums.values()} == {dtype}
    return clipping


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["cnn", "tied", "lstm", "transformer", "aliased and unused"])
def test_chunks(name, chunk_size):
    torch.manual_seed(3)
    make, shape = CASES[name]
    check(make().double(), inputs(shape, 5, torch.float64), UNITS["units"], torch.float64, chunk_size)


# -- both formulas, over shapes --------------------------------------------------------------------------------------


@pytest.fixture(params=["kept", "gram", "made"])
def formula(request, monkeypatch):
    """Each way to a norm, in blocks of few units."""
    cost = {"kept": (2.0, 1.0, 2.0), "gram": (1.0, 2.0, 2.0), "made": (2.0, 2.0, 1.0)}[request.param]
    monkeypatch.setattr(norms, "_costs", lambda uses, units: cost)
    monkeypatch.setattr(norms, "BLOCK", 60)
    return request.param


@over("name", ["linear", "linear on sequences", "conv1d", "conv2d", "conv2d dilated", "conv3d",
                                  "called twice", "tied", "several images, groups", "slices"])  # fmt: skip
def test_every_formula(name, formula):
    torch.manual_seed(3)
    make, shape = (CASES | ODD)[name]
    check(make().double(), inputs(shape, 5, torch.float64), UNITS["examples"], torch.float64)
    check(make(), inputs(shape, 5, torch.float32), UNITS["units"], torch.float32, shortened=2e-4)


@example(62, 1, 1, 1, 1, [1, 1, 1], 1, 0, 1, "zeros", False, False)  # units cancel to a fortieth
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32), dims=st.integers(1, 3), groups=st.integers(1, 2), channels=st.integers(1, 2),
    out=st.integers(1, 2), kernel=st.lists(st.integers(1, 3), min_size=3, max_size=3), stride=st.integers(1, 2),
    padding=st.integers(0, 2), dilation=st.integers(1, 2), mode=st.sampled_from(["zeros", "circular", "replicate"]),
    bias=st.booleans(), last=st.booleans(),
)  # fmt: skip
def test_convolutions(seed, dims, groups, channels, out, kernel, stride, padding, dilation, mode, bias, last):
    torch.manual_seed(seed)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](
        groups * channels, groups * out, tuple(kernel[:dims]), stride, padding, dilation, groups, bias, mode
    )
    x = torch.randn(4, groups * channels, *([6, 5, 7][:dims]))
    if last and dims == 2:
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    check(layer, x, torch.tensor([0, 1, 0, 2]), torch.float32)
    check(layer.double(), x.double(), torch.arange(4), torch.float64)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), T=st.integers(1, 9), size=st.integers(1, 9), rows=st.integers(1, 12),
       padding=st.one_of(st.none(), st.integers(-1, 0)), tied=st.booleans(), count=st.integers(1, 6))  # fmt: skip
def test_tables(seed, T, size, rows, padding, tied, count):
    torch.manual_seed(seed)
    layer = nn.Embedding(rows, size, padding_idx=padding)
    module = With(
        lambda self, x: F.linear(self.layer(x).sin(), self.layer.weight) if tied else self.layer(x), layer=layer
    )
    x = torch.randint(0, rows, (count, T))
    groups = torch.randint(0, 3, (count,))
    check(module.double(), x, groups, torch.float64)
    check(module.float(), x, groups, torch.float32, shortened=1e-4)


def test_a_large_table_needs_no_gradient_per_example():
    """(B, V, D) would be 64 GB."""
    torch.manual_seed(0)
    embedding = nn.Embedding(100_000, 80)
    model = With(lambda self, x: self.layer(x).mean(1), layer=embedding)
    x, y = torch.randint(0, 100_000, (2000, 3)), torch.randn(2000, 80)
    _, sums = run(GhostClipping(model), x, y, F.mse_loss, clip_norm=1e-4)
    assert 0 < norm(sums) <= 2000 * 1e-4


# -- what the norms guarantee ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancel", [0.0, 1.0 - 1e-3, 1.0 - 1e-6])
@pytest.mark.parametrize("name", ["linear", "tied", "conv"])
def test_no_unit_is_over_the_clip_norm_however_much_cancels(name, cancel, formula):
    """The gradients of positions 0, 2, .. nearly cancel those of 1, 3, ..; the exact norm is taken in float64."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        if name == "linear":
            module, x = nn.Linear(30, 20, bias=False), torch.randn(1, 8, 30)
            x[:, 1::2] = x[:, ::2]
        elif name == "conv":
            module, x = nn.Conv1d(30, 20, 1, bias=False), torch.randn(1, 30, 8)
            x[..., 1::2] = x[..., ::2]
        else:
            module = With(lambda self, x: F.linear(self.layer(x), self.layer.weight), layer=nn.Embedding(20, 30))
            x = torch.randint(0, 20, (1, 8))
            x[:, 1::2] = x[:, ::2]
        out = module(x)
        weights = torch.randn_like(out)
        if name == "conv":
            weights[..., 1::2] = -cancel * weights[..., ::2]
        else:
            weights[:, 1::2] = -cancel * weights[:, ::2]
        exact = per_example(
            module.double(), x.double() if x.is_floating_point() else x, weights.double(), lambda o, w: (o * w).sum()
        )
        length = norm(exact[0])
        module.float()
        clip_norm = 0.5 * length
        _, sums = run(GhostClipping(module), x, weights, lambda o, w: (o * w).sum(), clip_norm=clip_norm, scale=1.0)
        # What was added is the exact gradient times a factor: the factor is what must be small enough.
        factor = sum((sums[n].double() * g).sum() for n, g in exact[0].items()).item() / length**2
        assert factor * length <= clip_norm * (1 + 1e-7 / (1.0000001 - cancel))
        assert cancel or factor * length >= 0.999 * clip_norm


@pytest.mark.parametrize("cancel", [0.0, 1.0 - 1e-3, 1.0 - 1e-5])
def test_stated_norms_are_never_too_small(cancel, formula):
    """Beside the exact norms of what is summed: of the kept gradients, or of the float32 factors."""
    generator = torch.Generator().manual_seed(0)
    for T, n, m in [(2, 3, 5), (8, 40, 3), (30, 4, 4), (6, 700, 9)]:
        a, g = (torch.randn(40, T, size, generator=generator) for size in (n, m))
        a[:, 1::2], g[:, 1::2] = a[:, ::2], -cancel * g[:, ::2]
        use = LinearUse(a, g, torch.float32)
        settled = norms.settle([use], engine.UnitMap.of(torch.arange(40), a.device))
        made = g.double().mT @ a.double() if settled.kept is None else settled.kept.double()
        exact = made.square().sum((1, 2))
        assert (settled.kept is not None) == (formula == "kept")
        assert (settled.squares >= exact).all()
        if not cancel:
            assert (settled.squares <= 1.01 * exact).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-22, 1e-18, 1e18, 1e25])
def test_squares_that_leave_the_range_of_float32(magnitude):
    torch.manual_seed(0)
    module, x = nn.Linear(400, 30, bias=False), torch.randn(4, 3, 400) * magnitude
    weights = torch.randn(4, 3, 30)
    exact = per_example(module.double(), x.double(), weights.double(), lambda o, w: (o * w).sum())
    clip_norm = 0.5 * min(norm(g) for g in exact)
    for formula in ((2.0, 1.0, 2.0), (1.0, 2.0, 2.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(norms, "_costs", lambda uses, units, formula=formula: formula)
            _, sums = run(
                GhostClipping(module.float()), x, weights, lambda o, w: (o * w).sum(), clip_norm=clip_norm, scale=1.0
            )
        expected = clipped_sum(exact, torch.arange(4), clip_norm)
        assert norm(sums) <= norm(expected) * (1 + 1e-5)


# -- faults that the comparison must see -----------------------------------------------------------------------------


def without_cross_term(uses, units):
    parts = [norms.settle([use], units) for use in uses]
    return norms.Settled(sum(p.squares for p in parts), lambda *w: sum(p.total(*w) for p in parts))


def first_use_only(uses, units):
    return norms.settle(uses[:1], units)


def per_example_norms(uses, units):
    return norms.settle(uses, engine.UnitMap.of(torch.arange(len(units.index)), units.index.device))


@pytest.mark.parametrize(
    ("fault", "name", "units"),
    [(without_cross_term, "called twice", "examples"), (without_cross_term, "tied", "examples"),
     (first_use_only, "called twice", "examples"), (first_use_only, "gru, shared weights", "examples"),
     (first_use_only, "tied", "examples")],
)  # fmt: skip
def test_planted_faults_are_seen(monkeypatch, fault, name, units):
    monkeypatch.setattr(engine, "settle", lambda uses, u: fault(uses, u) if len(uses) > 1 else norms.settle(uses, u))
    torch.manual_seed(3)
    make, shape = (CASES | ODD)[name]
    with pytest.raises(AssertionError):
        check(make().double(), inputs(shape, 5, torch.float64), UNITS[units], torch.float64)


def test_a_direct_use_beside_a_rule_is_not_missed(monkeypatch):
    """The fault: what autograd returns for a parameter that a rule has settled is dropped."""
    settle = engine.Pass._settle
    monkeypatch.setattr(
        engine.Pass,
        "_settle",
        lambda self, name, direct: settle(self, name, None if name in self._settled else direct),
    )
    for name in ("used whole and in a layer", "table used whole"):
        make, shape = ODD[name]
        torch.manual_seed(3)
        with pytest.raises(AssertionError):
            check(make().double(), inputs(shape, 5, torch.float64), UNITS["examples"], torch.float64)


def test_rules_are_taken_where_they_should_be(monkeypatch):
    """Only scales, shifts and biases have their per-example gradients made."""
    seen = []
    monkeypatch.setattr(engine, "settle", lambda uses, units: (seen.extend(uses), norms.settle(uses, units))[1])
    for name in ("transformer", "cnn", "lstm", "embedding", "low rank", "tied", "attention", "lstm cell"):
        torch.manual_seed(0)
        make, shape = CASES[name]
        module, x = make(), inputs(CASES[name][1], 4, torch.float32)
        run(GhostClipping(module), x, torch.randn_like(module(x)), F.mse_loss)
    assert {len(use.shape) for use in seen if isinstance(use, DirectUse)} == {1}
    assert len(seen) > 20


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_scales_of_normalised_layers_have_no_copy_for_each_example_in_the_graph(monkeypatch, norm):
    """Autograd would make products and sums over positions one by one; the rule tells their gradients itself."""
    seen = []
    finish = engine.Pass.finish
    monkeypatch.setattr(engine.Pass, "finish", lambda self, direct: (seen.append(direct), finish(self, direct))[1])
    module = nn.Sequential(nn.Linear(8, 8), norm(8), nn.Tanh(), norm(8))
    x = torch.randn(4, 5, 8)
    run(GhostClipping(module), x, torch.randn(4, 5, 8), F.mse_loss)
    assert seen == [{}]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_normalised_layers_give_what_torch_gives(norm):
    """Outputs and what flows on, in numbers far from 0 and in more blocks than one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 512), norm(512), nn.Linear(512, 2))
    x, target = 3 + 10 * torch.randn(40, 4, 6), torch.randn(40, 4, 2)
    plain = module(x)
    wanted = torch.autograd.grad(F.mse_loss(plain, target), list(module.parameters()))
    sums = run(GhostClipping(module), x, target, F.mse_loss, clip_norm=1e6)[1]
    for (name, value), gradient in zip(sums.items(), wanted, strict=True):
        torch.testing.assert_close(value / len(x), gradient, rtol=1e-4, atol=1e-5, msg=name)
