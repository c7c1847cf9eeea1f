"""The engine around the rules: one pass, memory, chunks that it chooses, what it refuses, what it hands over."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyorder.clipping import layer_rules
from anyorder.clipping import per_example as clipping_engine
from anyorder.clipping.norms import round_down
from anyorder.clipping.per_example import FunctionalClipping, GhostClipping, make_clipping
from anyorder.errors import ClippingWarning, ModelError, TrainingError
from clipping.brute import assert_close, clipped_sum, norm, per_example, run


class Count(nn.Module):
    """Counts its forward passes, and how many examples autograd sees."""

    def __init__(self, *modules):
        super().__init__()
        self.inner = nn.Sequential(*modules)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


def network():
    torch.manual_seed(0)
    return Count(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(size=6):
    torch.manual_seed(1)
    return torch.randn(size, 4, dtype=torch.float64), torch.randint(0, 3, (size,))


def test_one_forward_pass():
    module, (x, y) = network(), batch()
    run(GhostClipping(module), x, y, F.cross_entropy)
    assert module.calls == 1


class Scale(nn.Module):
    """A large parameter that no rule knows."""

    def __init__(self, size=50):
        super().__init__()
        self.w = nn.Parameter(torch.randn(size, dtype=torch.float64))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return (x[:, :1] * self.w).tanh()


def test_gradients_made_by_autograd_are_kept_within_memory(monkeypatch):
    monkeypatch.setattr(clipping_engine, "DIRECT_BYTES", 3 * 50 * 8)
    module, (x, _) = Scale(), batch(7)
    clipping, target = GhostClipping(module), torch.randn(7, 50, dtype=torch.float64)
    expected = clipped_sum(per_example(module, x, target, F.mse_loss), torch.arange(7), 0.01)
    module.calls = 0
    for calls in (1 + 2 * 3, 2 * 3):  # the first batch finds out: 7 examples, 3 at a time
        _, sums = run(clipping, x, target, F.mse_loss, clip_norm=0.01)
        assert_close(sums, expected, 1e-10)
        assert module.calls == calls
        module.calls = 0


def test_a_chunk_size_is_kept(monkeypatch):
    monkeypatch.setattr(clipping_engine, "DIRECT_BYTES", 1)
    module, (x, _) = Scale(), batch(7)
    run(GhostClipping(module, 7), x, torch.randn(7, 50, dtype=torch.float64), F.mse_loss)
    assert module.calls == 1


def test_a_full_memory_halves_the_batch(monkeypatch):
    outputs = clipping_engine.Pass.outputs

    def small(self, tensors, *options):
        if len(tensors[0]) > 2:
            raise torch.OutOfMemoryError("full")
        return outputs(self, tensors, *options)

    monkeypatch.setattr(clipping_engine.Pass, "outputs", small)
    module, (x, y) = network(), batch(8)
    expected = clipped_sum(per_example(module, x, y, F.cross_entropy), torch.arange(8), 0.1)
    assert_close(run(GhostClipping(module), x, y, F.cross_entropy, clip_norm=0.1)[1], expected, 1e-10)
    with pytest.raises(torch.OutOfMemoryError):
        run(GhostClipping(module, 4), x, y, F.cross_entropy)


def test_a_chunk_size_that_was_given_is_not_that_of_the_checkpoint():
    for given, found in ((None, 3), (2, 2)):
        clipping = GhostClipping(network(), given)
        clipping.load_state_dict({"chunk_size": 3, "unmapped": True, "mapped": False})
        assert clipping.state_dict() == {"chunk_size": found, "unmapped": True, "mapped": False}


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_outputs_that_depend_on_no_parameter(chunk_size):
    module, (x, y) = network(), batch()
    module.forward = lambda x: x[:, :3] * 2
    _, sums = run(GhostClipping(module, chunk_size), x, y, F.cross_entropy)
    assert {name: s.shape for name, s in sums.items()} == {n: p.shape for n, p in module.named_parameters()}
    assert norm(sums) == 0


def test_units_are_not_split_by_chunks():
    module, (x, y) = network(), batch(8)
    groups = torch.tensor([1, 0, 1, 1, 2, 1, 0, 1])
    expected = clipped_sum(per_example(module, x, y, F.cross_entropy), groups, 0.1)
    for chunk_size in range(1, 9):
        _, sums = run(GhostClipping(module, chunk_size), x, y, F.cross_entropy, groups=groups, clip_norm=0.1)
        assert_close(sums, expected, 1e-10)


@pytest.mark.parametrize("backward", [True, False])
def test_a_batch_leaves_nothing_in_memory(backward):
    """Neither the graph nor what the layers saw lives on in a cycle of references."""
    seen = []

    class Watch(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append(weakref.ref(out))
            return out

    module, (x, y) = nn.Sequential(Watch(4, 5), nn.Tanh(), nn.LSTM(5, 3)).double(), batch()
    kept = []
    register = clipping_engine.Pass.__init__

    def watch(self, *args, **kwargs):
        register(self, *args, **kwargs)
        kept.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipping_engine.Pass, "__init__", watch)
        gc.collect()
        gc.disable()
        try:
            outputs = GhostClipping(module).forward(
                (x[:, None],), {}, groups=torch.arange(6), clip_norm=1.0, scale=1.0, receive=lambda sums: None
            )
            if backward:
                outputs[0].sum().backward()
            del outputs
            assert kept[0]() is None
            assert seen[0]() is None
        finally:
            gc.enable()
    assert len(y) == 6
    assert "forward" not in vars(module[2])
    assert all(own is p for own, p in zip(module[2]._flat_weights, module[2].parameters(), strict=True))


# -- what other engines or nobody can run ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's compiler, about what it looks at
def test_compiled_models_run_as_if_they_were_not():
    """What they are compiled to is not used."""
    module, (x, y) = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), batch()
    compiled = torch.compile(module, backend="eager")
    expected = run(GhostClipping(module), x, y, F.cross_entropy, clip_norm=0.1)[1]
    _, sums = run(GhostClipping(compiled), x, y, F.cross_entropy, clip_norm=0.1)
    assert_close({name.removeprefix("_orig_mod."): value for name, value in sums.items()}, expected, 1e-10)


class Hidden(torch.autograd.Function):
    """A function that tells vmap nothing."""

    generate_vmap_rule = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_functions_that_cannot_be_mapped_are_refused():
    module, (x, y) = nn.Sequential(nn.Linear(4, 3).double()), batch()
    module.register_forward_hook(lambda m, args, out: Hidden.apply(out))
    with pytest.raises(ModelError, match="vmap cannot run"):
        run(GhostClipping(module), x, y, F.cross_entropy)


def test_models_of_the_other_engine_run_by_it(monkeypatch):
    calls = []
    forward = FunctionalClipping.forward
    monkeypatch.setattr(
        FunctionalClipping,
        "forward",
        lambda self, *args, **kwargs: (calls.append(1), forward(self, *args, **kwargs))[1],
    )

    def fail(self, tensors, *options):
        raise clipping_engine.Unmapped("no")

    monkeypatch.setattr(clipping_engine.Pass, "outputs", fail)
    module, (x, y) = network(), batch()
    clipping = GhostClipping(module)
    expected = clipped_sum(per_example(module, x, y, F.cross_entropy), torch.arange(6), 0.1)
    with pytest.warns(ClippingWarning, match=r"Count is clipped in two passes.*\(Unmapped: no\)"):
        first = run(clipping, x, y, F.cross_entropy, clip_norm=0.1)[1]
    second = run(clipping, x, y, F.cross_entropy, clip_norm=0.1)[1]  # without a word
    assert_close(first, expected, 1e-10)
    assert_close(second, expected, 1e-10)
    assert len(calls) == 2


@pytest.mark.parametrize("engine", [GhostClipping, FunctionalClipping])
@pytest.mark.parametrize("fault", [KeyError, TypeError, AttributeError, ZeroDivisionError])
def test_a_fault_is_no_reason_for_two_passes(fault, engine):
    """What torch raises for a model that it cannot map is; in both engines, and in models run on the whole batch."""

    def broken(*args, **kwargs):
        raise fault("a fault")

    for module in (network(), nn.Sequential(nn.Linear(4, 3))):
        before = [name for name, _ in module.named_parameters()]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(fault, match="a fault"):
            patch.setitem(layer_rules.RULES, F.linear, broken)
            patch.setattr(layer_rules.LinearMap, "apply", broken)
            patch.setattr(F, "linear", broken)
            run(engine(module), torch.randn(2, 4).to(next(module.parameters())), torch.tensor([0, 1]), F.cross_entropy)
        assert [name for name, _ in module.named_parameters()] == before


def test_a_rule_that_fails_is_told_with_its_cause(monkeypatch):
    """It made training up to twice as slow, and nobody learned of it."""

    def broken(*args, **kwargs):
        raise ValueError("a fault in a rule")

    monkeypatch.setitem(layer_rules.RULES, F.linear, broken)
    module, (x, y) = network(), batch()
    expected = clipped_sum(per_example(module, x, y, F.cross_entropy), torch.arange(6), 0.1)
    with pytest.warns(ClippingWarning, match="ValueError: a fault in a rule"):
        sums = run(GhostClipping(module), x, y, F.cross_entropy, clip_norm=0.1)[1]
    assert_close(sums, expected, 1e-10)


@pytest.mark.parametrize("couple", [lambda x: x - x.mean(0), lambda x: x.roll(1, 0), lambda x: x.cumsum(0)])
def test_functions_over_the_batch_see_one_example(couple):
    """They cannot couple examples, whatever the model does with its first dimension."""
    module, (x, y) = network(), batch()
    module.inner.insert(1, nn.Identity())
    module.inner[1].forward = couple
    expected = clipped_sum(per_example(module, x, y, F.cross_entropy), torch.arange(6), 0.1)
    outputs, sums = run(GhostClipping(module), x, y, F.cross_entropy, clip_norm=0.1)
    assert_close(sums, expected, 1e-10)
    changed = x.clone()
    changed[2] = float("nan")
    again = GhostClipping(module).forward(
        (changed,), {}, groups=torch.arange(6), clip_norm=1.0, scale=1.0, receive=pytest.fail
    )
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(again[rest], outputs[rest])
    assert again[2].isnan().all()


def test_hooks_of_the_user_run():
    module, (x, y) = network(), batch()
    seen = []
    module.inner[0].register_forward_hook(lambda m, args, out: out * 2)
    module.inner[2].register_full_backward_hook(lambda m, gin, gout: seen.append(gout[0].shape))
    expected = clipped_sum(per_example(module, x, y, F.cross_entropy), torch.arange(6), 0.1)
    seen.clear()
    assert_close(run(GhostClipping(module), x, y, F.cross_entropy, clip_norm=0.1)[1], expected, 1e-10)


def test_low_precision_under_autocast_is_summed_in_float32():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(2, 4, 2), nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(50, 2, 4), torch.randint(0, 3, (50,))
    expected = clipped_sum(per_example(module, x, y, F.cross_entropy), torch.arange(50), 0.1)
    received = []
    with torch.autocast("cpu", torch.bfloat16):
        outputs = GhostClipping(module).forward(
            (x,), {}, groups=torch.arange(50), clip_norm=0.1, scale=50.0, receive=received.append
        )
        assert outputs.dtype == torch.bfloat16
        F.cross_entropy(outputs, y).backward()
    assert {s.dtype for s in received[0].values()} == {torch.float32}
    assert_close(received[0], expected, 0.02)
    assert norm(received[0]) <= 5.0


def test_which_engine():
    module = nn.Linear(4, 3)
    assert isinstance(make_clipping(module), GhostClipping)
    assert isinstance(make_clipping(module, grid=2.0**-20), FunctionalClipping)


@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_chunks_draw_the_same_masks_again(chunk_size):
    """The outputs are w times the gradient, mask by mask, and w is 1."""
    module, received = nn.Sequential(Scale(), nn.Dropout(0.4)), []
    module[0].forward = lambda x: x[:, :1] * module[0].w
    nn.init.ones_(module[0].w)
    x = torch.rand(8, 1, dtype=torch.float64) + 1
    outputs = GhostClipping(module, chunk_size).forward(
        (x,), {}, groups=torch.arange(8), clip_norm=1e6, scale=1.0, receive=received.append
    )
    assert (outputs == 0).any(), "no mask"
    torch.rand(17)
    state = torch.get_rng_state()
    outputs.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.allclose(received[0]["0.w"], outputs.detach().sum(0), rtol=1e-12)


def test_factors_are_rounded_to_the_number_nearest_to_zero():
    factors = torch.logspace(-46, 38, 4001, dtype=torch.float64)
    factors = torch.cat([-factors, torch.zeros(1, dtype=torch.float64), factors])
    rounded = round_down(factors, torch.float32)
    assert rounded.dtype == torch.float32
    assert (rounded.double().abs() <= factors.abs()).all()
    further = torch.nextafter(rounded, torch.full_like(rounded, torch.inf).copysign(factors.float()))
    assert (further.double().abs() > factors.abs())[factors != 0].all()
    assert torch.equal(round_down(factors, torch.float64), factors)


class TimesInPlace(torch.autograd.Function):
    """Its backward writes into the gradient that other layers were given too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(1000)


class Beside(nn.Module):
    """Two layers whose sum has one gradient; that of the second is written in place."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        second = TimesInPlace.apply(self.second(x) * 1e-3)
        return self.first(x) + second  # made last, whose backward is first


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (lambda: nn.Linear(32, 32), torch.randn(6, 32)),
        (lambda: nn.Linear(128, 128), torch.randn(6, 3, 128)),
        (lambda: nn.Conv1d(64, 64, 3), torch.randn(6, 64, 5)),
        (lambda: nn.Embedding(400, 3), torch.arange(24).view(6, 4)),
    ],
    ids=["linear", "positions", "convolution", "table"],
)
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_gradient_that_is_written_in_place_after_its_norm_is_in_no_sum(layer, x, chunk_size):
    """A sum is either of what the norms are of, or refused: never longer than clip_norm for each unit."""
    module, received = Beside(layer(), layer()), []
    outputs = GhostClipping(module, chunk_size).forward(
        (x,), {}, groups=torch.arange(len(x)), clip_norm=1.0, scale=1.0, receive=received.append
    )
    try:
        outputs.square().sum().backward()
    except TrainingError as error:
        assert "in place" in str(error)  # noqa: PT017
        assert not received
    else:
        assert norm(received[0]) <= len(x)
