"""Units, chunks, random numbers, and the order of calls."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyorder.clipping import per_example as clipping_engine
from anyorder.clipping.per_example import FunctionalClipping, GhostClipping
from anyorder.errors import ModelError, NonFiniteError, TrainingError
from clipping.brute import assert_close, clipped_sum, norm, per_example, run
from laws.cases import over

Clipping = FunctionalClipping


@pytest.fixture(params=[FunctionalClipping, GhostClipping], autouse=True)
def engine(request, monkeypatch):
    """Every test of this file holds for both engines."""
    monkeypatch.setitem(globals(), "Clipping", request.param)


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(size, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(size, 4, dtype=dtype), torch.randint(0, 3, (size,))


def forward(clipping, x, receive, **changes):
    options = {"groups": torch.arange(len(x)), "clip_norm": 1.0, "scale": 1.0, "receive": receive} | changes
    return clipping.forward((x,), {}, **options)


GROUPS = {
    "each its own": torch.arange(11),
    "one": torch.zeros(11, dtype=torch.int64),
    "scattered": torch.tensor([3, 1, 3, 0, 2**62, -5, 3, 1, 3, 3, -5]),
    "in order, over borders": torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 2]),
}


@pytest.mark.parametrize("groups", GROUPS)
@over("chunk_size", [1, 2, 3, 10, 11, 50, None])
def test_units_and_chunks(groups, chunk_size):
    module, (x, y) = network(), batch(11)
    expected = clipped_sum(per_example(module, x, y, F.cross_entropy), GROUPS[groups], 0.4)
    outputs, sums = run(Clipping(module, chunk_size), x, y, F.cross_entropy, groups=GROUPS[groups], clip_norm=0.4)
    torch.testing.assert_close(outputs, module(x))
    assert_close(sums, expected, 1e-10)


def test_units_are_summed_before_they_are_clipped():
    """Two examples of one unit with opposite gradients cancel; clipped one by one they would not."""
    module = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[100.0, 0.0], [-99.0, 0.0]])
    _, sums = run(Clipping(module, 1), x, None, lambda out, _: out.sum(), groups=torch.tensor([8, 8]), scale=1)
    assert torch.allclose(sums["weight"], torch.tensor([[1.0, 0.0]]), atol=1e-5)


def test_the_default_chunk_bounds_memory(monkeypatch):
    """Of the gradients of all examples, which this engine makes."""
    seen = []

    class Watch(nn.Linear):
        def forward(self, x):
            seen.append(1)
            return super().forward(x)

    module, (x, y) = Watch(4, 3).double(), batch(10)
    monkeypatch.setattr(clipping_engine, "CHUNK_BYTES", 4 * 15 * 8)  # four examples of 15 float64 parameters
    run(FunctionalClipping(module), x, y, F.cross_entropy)
    assert len(seen) == 3 + 3


# -- coupling and random numbers -------------------------------------------------------------------------------------


class Centred(nn.Module):
    """Subtracts the mean over the batch: of one example alone, that is the example itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        assert len(x) == 1
        return self.layer(x - x.mean(0))


def test_examples_cannot_be_coupled():
    module = Centred()
    outputs, sums = run(Clipping(module), torch.randn(6, 4), None, lambda out, _: out.sum(), scale=1.0)
    assert torch.equal(outputs, module.layer.bias.expand(6, 3))
    assert not sums["layer.weight"].any()


class Masked(nn.Module):
    """out = w * x * mask: so the sum of the outputs is w times the gradient."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.dropout = nn.Dropout(0.4)

    def forward(self, x):
        return self.dropout(self.w * x)


@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_backward_draws_the_same_masks(chunk_size):
    module, (x, _) = Masked(), batch(8)
    received = []
    groups = torch.tensor([5, 5, 1, 1, 0, 3, 3, 1])
    outputs = forward(Clipping(module, chunk_size), x, received.append, groups=groups, clip_norm=1e6)
    assert len({tuple(row) for row in (outputs == 0).tolist()}) > 1, "examples share a mask"
    torch.rand(17)
    state = torch.get_rng_state()
    outputs.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert received[0]["w"].item() == pytest.approx(outputs.sum().item() / 2, rel=1e-12)


def test_forward_draws_new_masks_each_time():
    clipping, (x, _) = Clipping(Masked()), batch(8)
    assert not torch.equal(forward(clipping, x, print), forward(clipping, x, print))


def test_eval_mode_is_followed():
    module, (x, _) = Masked().eval(), batch(8)
    outputs, sums = run(Clipping(module), x, None, lambda out, _: out.sum(), clip_norm=1e6, scale=1.0)
    assert torch.equal(outputs, module(x))
    assert sums["w"].item() == pytest.approx(x.sum().item())


def test_autocast_holds_in_backward():
    seen = []

    class Watch(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append((out.dtype, torch.is_autocast_cache_enabled()))
            return out

    module, (x, y) = nn.Sequential(Watch(4, 5), nn.Tanh(), nn.Linear(5, 3)), batch(6, torch.float32)
    exact = run(Clipping(module, 4), x, y, F.cross_entropy)[1]
    seen.clear()
    received = []
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(forward(Clipping(module, 4), x, received.append, scale=6.0), y)
    loss.backward()
    assert seen == [(torch.bfloat16, False)] * 4
    assert {s.dtype for s in received[0].values()} == {torch.float32}
    assert_close(received[0], exact, 0.02)


def test_autocast_around_backward_alone_does_not_reach_the_model():
    module, (x, y) = network(torch.float32), batch(6, torch.float32)
    exact = run(Clipping(module), x, y, F.cross_entropy)[1]
    received = []
    loss = F.cross_entropy(forward(Clipping(module), x, received.append, scale=6.0), y)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert_close(received[0], exact, 1e-6)


# -- what is refused, and what is empty ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("chunk_size", [1, 2, None])
def test_non_finite_gradients_release_nothing_where_they_are_refused(bad, chunk_size):
    module, (x, y) = network(), batch(7)
    x[2, 1] = x[5, 0] = bad
    received = []
    clipping = Clipping(module, chunk_size, non_finite="refuse")
    outputs = forward(clipping, x, received.append, groups=torch.tensor([0, 1, 4, 3, 4, 4, 9]))
    with pytest.raises(NonFiniteError, match="of 1 of 5 units"):
        F.cross_entropy(outputs, y).backward()
    assert not received


def test_backward_runs_once():
    module, (x, y) = network(), batch(3)
    received = []
    loss = F.cross_entropy(forward(Clipping(module), x, received.append), y)
    loss.backward(retain_graph=True)
    with pytest.raises(TrainingError, match="second time"):
        loss.backward()
    assert len(received) == 1

    loss = forward(Clipping(module), x, received.append).sum()
    loss.backward()
    with pytest.raises(TrainingError, match="second time"):
        loss.backward()
    assert len(received) == 2


def test_double_backward_is_refused():
    module, (x, y) = network(), batch(3)
    loss = F.cross_entropy(forward(Clipping(module), x, pytest.fail), y)
    with pytest.raises(TrainingError, match="create_graph"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("what", ["parameter", "input"])
def test_changes_in_place_are_refused(what):
    module, (x, y) = network(), batch(3)
    loss = F.cross_entropy(forward(Clipping(module), x, pytest.fail), y)
    with torch.no_grad():
        (x if what == "input" else module[0].weight).add_(1)
    with pytest.raises(TrainingError, match="written in place"):
        loss.backward()


def test_errors_of_the_receiver_reach_the_caller():
    def refuse(sums):
        raise TrainingError("not now")

    module, (x, y) = network(), batch(3)
    with pytest.raises(TrainingError, match="not now"):
        F.cross_entropy(forward(Clipping(module), x, refuse), y).backward()


def test_no_grad_gives_detached_outputs():
    module, (x, _) = network(), batch(3)
    module.register_buffer("unused", torch.ones(2))
    with torch.no_grad():
        outputs = forward(Clipping(module), x, pytest.fail)
    assert not outputs.requires_grad
    torch.testing.assert_close(outputs, module(x).detach())
    with torch.inference_mode():
        torch.testing.assert_close(forward(Clipping(module), x, pytest.fail), outputs)


def test_batch_of_one():
    module, (x, y) = network(), batch(1)
    _, sums = run(Clipping(module), x, y, F.cross_entropy, clip_norm=0.1)
    assert_close(sums, clipped_sum(per_example(module, x, y, F.cross_entropy), torch.zeros(1), 0.1), 1e-10)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_empty_batch(reduction):
    module = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3), nn.Dropout())
    state = torch.get_rng_state()
    received = []
    outputs = forward(Clipping(module), torch.empty(0, 5, dtype=torch.int64), received.append, scale=0.0)
    assert outputs.shape == (0, 3)
    assert torch.equal(torch.get_rng_state(), state)
    F.cross_entropy(outputs, torch.empty(0, dtype=torch.int64), reduction=reduction).backward()
    assert {name: s.shape for name, s in received[0].items()} == {n: p.shape for n, p in module.named_parameters()}
    assert norm(received[0]) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_and_torch_are_left_as_they_were(fails):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(4, 3, batch_first=True)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            if fails:
                self.scale.add_(x.mean())
            return self.layer(x)[0] * self.scale

    module = Model()
    before = copy.deepcopy(module.state_dict())
    if fails:
        with pytest.raises(ModelError, match="buffers scale"):
            forward(Clipping(module), torch.randn(2, 5, 4), pytest.fail)
    else:
        run(Clipping(module), torch.randn(2, 5, 4), None, lambda out, _: out.sum())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert not module.layer._forward_pre_hooks
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
