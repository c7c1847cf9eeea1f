"""What a model may be given, what it may return, and what cannot be run on one example alone."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyorder.clipping.per_example import FunctionalClipping, GhostClipping
from anyorder.errors import ArgumentError, ModelError

Clipping = FunctionalClipping


@pytest.fixture(params=[FunctionalClipping, GhostClipping], autouse=True)
def engine(request, monkeypatch):
    """Every test of this file holds for both engines."""
    monkeypatch.setitem(globals(), "Clipping", request.param)


def forward(module, *args, size=3, kwargs=None, **changes):
    options = {"groups": torch.arange(size), "clip_norm": 1e6, "scale": 1.0, "receive": pytest.fail} | changes
    return Clipping(module, 2).forward(args, kwargs or {}, **options)


class Structured(nn.Module):
    """Takes and returns nested structures."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, pair, *, mask, mode="plain", extra=None):
        assert extra is None
        scores = self.layer(pair[0] + pair[1]["deep"]) * mask[..., None]
        return {
            "scores": scores,
            "best": scores.argmax(-1),
            "loss": scores.square().sum(),
            "mode": (mode, None),
            "rest": [scores.detach()],
        }


def test_structures():
    torch.manual_seed(0)
    module, a, b, mask = Structured(), torch.randn(3, 4), torch.randn(3, 4), torch.tensor([1.0, 0.0, 2.0])
    received = []
    outputs = forward(
        module, (a, {"deep": b}), kwargs={"mask": mask, "mode": "fast", "extra": None}, receive=received.append
    )
    expected = module((a, {"deep": b}), mask=mask)
    torch.testing.assert_close(outputs["scores"], expected["scores"])
    torch.testing.assert_close(outputs["rest"][0], expected["rest"][0])
    assert torch.equal(outputs["best"], expected["best"])
    assert outputs["loss"].shape == (3,)
    assert outputs["mode"] == ("fast", None)
    assert not outputs["best"].requires_grad

    (outputs["loss"].sum() + 3 * outputs["scores"].sum()).backward()
    (expected["loss"] + 3 * expected["scores"].sum()).backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(received[0][name], p.grad)


def test_an_output_that_the_loss_does_not_use():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return self.a(x), self.b(x)

    received = []
    forward(Two(), torch.randn(3, 4), receive=received.append)[1].sum().backward()
    assert not received[0]["a.weight"].any()
    assert received[0]["b.weight"].any()


X = torch.randn(3, 4)
PLAIN = nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X, torch.randn(2, 4)), "in tensor 2 of 2"),
        ((X, torch.tensor(1.0)), "in tensor 2 of 2"),
        ((torch.tensor(1.0), X), "in tensor 1 of 2"),
        ((3,), "no tensor"),
        (([X, 2],), "int inside a list"),
        ((X, ["a", "b", "c"]), "str inside a list"),
        ((X, np.zeros(3)), "got a ndarray"),
        ((X.clone().requires_grad_(),), "must not require gradients"),
    ],
)
def test_arguments_that_do_not_split_by_example(args, message):
    with pytest.raises(ModelError, match=message):
        forward(PLAIN, *args)


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": torch.arange(4)},
        {"groups": torch.arange(3).reshape(3, 1)},
        {"groups": torch.arange(3.0)},
        {"clip_norm": 0.0},
        {"clip_norm": float("inf")},
        {"scale": 0.0},
        {"scale": float("nan")},
    ],
)
def test_options_that_break_their_rule(changes):
    with pytest.raises(ArgumentError, match=next(iter(changes))):
        forward(PLAIN, X, **changes)


@pytest.mark.parametrize("chunk_size", [0, 1.5, -1])
def test_chunk_size(chunk_size):
    with pytest.raises(ArgumentError, match="chunk_size"):
        Clipping(PLAIN, chunk_size)


class Layer(nn.Module):
    """A linear layer, and then what `function` makes of its output and input."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.function = function

    def forward(self, x):
        return self.function(self, self.layer(x), x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Record:
    """Of no kind that is known to hold tensors."""

    def __init__(self, logits):
        self.logits = logits


def count(self, out, x):
    self.calls += 1
    return out


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda self, out, x: out * x.sum().item(), r"line \d+: .*item[\s\S]*torch.where"),
        (lambda self, out, x: out if x.sum() > 0 else -out, "torch.where"),
        (lambda self, out, x: out * float(x.numpy().sum()), "torch.where"),
        (lambda self, out, x: out * x[x > 0].sum(), "product with the mask"),
        (lambda self, out, x: Square.apply(out), "setup_context"),
        (lambda self, out, x: self.calls.expand(1, 2).clone().add_(out.mean()).add_(out), "x.new_zeros"),
        (count, "writes its buffers calls"),
        (lambda self, out, x: Record(out), "Record"),
        (lambda self, out, x: out.T, r"\(2, 1\)"),
        (lambda self, out, x: out.argmax(-1), "no floating-point output"),
    ],
)
def test_models_that_cannot_run_on_one_example_alone(function, message):
    with pytest.raises(ModelError, match=message):
        forward(Layer(function), X)


def test_spectral_norm_in_training_mode_writes_buffers():
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2))
    before = {name: b.clone() for name, b in module.named_buffers()}
    with pytest.raises(ModelError, match="writes its buffers"):
        forward(module, X)
    assert all(torch.equal(b, before[name]) for name, b in module.named_buffers())
    assert forward(module.eval(), X).requires_grad


def test_packed_sequences_are_refused_with_the_change():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(4, 2, batch_first=True)

        def forward(self, x, lengths):
            pack = nn.utils.rnn.pack_padded_sequence
            return self.layer(pack(x, lengths, batch_first=True, enforce_sorted=False))[1][0]

    module, x, lengths = Packed(), torch.randn(3, 5, 4), torch.tensor([2, 5, 3])
    with pytest.raises(ModelError, match="padded tensor, and take the last state as out.gather") as caught:
        forward(module, x, lengths)
    assert "[2, 4]" not in str(caught.value)  # the lengths of examples
    out = module.layer(x)[0]
    last = out.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, out.shape[2]))[:, 0]
    torch.testing.assert_close(last, module(x, lengths))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda self, out, x: out.view(3, 2), r"runs on the batch, and not on one example[\s\S]*x.shape\[0\]"),
        (lambda self, out, x: out + torch.zeros(3, 2), r"\(3, 2\), not \(1, ...\)[\s\S]*x.shape\[0\]"),
    ],
)
def test_the_batch_size_written_into_forward(function, message):
    with pytest.raises(ModelError, match=message):
        forward(Layer(function), X)


class Characters(nn.Module):
    """Takes and returns the state, as tutorials write it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 2, num_layers=2, batch_first=True)

    def forward(self, x, state=None):
        return self.layer(x, state)


def test_the_state_of_a_recurrent_layer():
    x = torch.randn(3, 5, 4)
    with pytest.raises(ModelError, match="leave out the first state of a recurrent layer"):
        forward(Characters(), x, (torch.zeros(2, 3, 2), torch.zeros(2, 3, 2)))
    with pytest.raises(ModelError, match=r"last state of a recurrent layer .* state.transpose\(0, 1\)"):
        forward(Characters(), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_batch_in_another_dtype(dtype):
    with pytest.raises(ModelError, match=f"batch holds {str(dtype)[6:]} and the model's parameters are float32.*to"):
        forward(PLAIN, X.to(dtype))


def test_a_models_own_error_stays_its_own():
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        forward(PLAIN, torch.randn(3, 5))
    assert not isinstance(caught.value, ModelError)


def test_nothing_to_train():
    with pytest.raises(ModelError, match="no trainable parameters"):
        forward(nn.Linear(4, 2).requires_grad_(False), X)


def test_frozen_parameters_get_nothing():
    module = nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 2))
    received = []
    F.mse_loss(forward(module, X, receive=received.append), torch.zeros(3, 2)).backward()
    assert set(received[0]) == {"1.weight", "1.bias"}
