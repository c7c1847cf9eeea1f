"""Recurrent layers that record: outputs and input gradients are torch's, records give each example's gradient."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anyorder.clipping.recurrent import run_recurrent
from anyorder.errors import ModelError
from clipping.brute import assert_close

LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Of outputs and input gradients, number by number; of an example's gradient, by its L2 norm."""


class Records(dict):
    """{name: (activations, gradients)}, each told once."""

    def __call__(self, name, activations, gradients):
        assert name not in self
        self[name] = activations, gradients

    def per_example(self):
        return {name: g.sum(1) if a is None else torch.einsum("bto,bti->boi", g, a) for name, (a, g) in self.items()}


def leaves(outputs):
    return [outputs] if isinstance(outputs, torch.Tensor) else [leaf for part in outputs for leaf in leaves(part)]


def initial_state(module, batch, dtype=torch.float64, device="cpu"):
    """A random initial state that requires gradients."""
    sizes = [module.hidden_size] * (2 if isinstance(module, (nn.LSTM, nn.LSTMCell)) else 1)
    lead = ()
    if isinstance(module, nn.RNNBase):
        sizes[0] = module.proj_size or module.hidden_size
        lead = (module.num_layers * (1 + module.bidirectional),)
    state = [torch.randn(*lead, batch, size, dtype=dtype, device=device, requires_grad=True) for size in sizes]
    return tuple(state) if len(state) > 1 else state[0]


def one(tensors, i, dim):
    """Example i of a tensor or a tuple of them, as a batch of one."""
    if isinstance(tensors, tuple):
        return tuple(one(t, i, dim) for t in tensors)
    return None if tensors is None else tensors.narrow(dim, i, 1)


def in_float64(value):
    """A module, a tensor or a tuple of them; a new leaf."""
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).double()
    if isinstance(value, tuple):
        return tuple(map(in_float64, value))
    return None if value is None else value.detach().double().requires_grad_()


def check(module, x, state, *, seed=0, loop=True, tolerance=None):
    """Compare with torch: outputs, gradients of input and state; and, with its float64, each example's gradient."""
    tolerance = tolerance or EXACT[x.dtype]
    near = {"rtol": tolerance, "atol": tolerance}
    cell = isinstance(module, nn.RNNCellBase)
    batch_dim = 0 if cell or module.batch_first else 1
    records = Records()
    torch.manual_seed(seed)
    expected = leaves(module(x, state))
    torch.manual_seed(seed)
    outputs = leaves(run_recurrent(module, x, state, records))
    cotangents = [torch.randn_like(t) for t in expected]
    for actual, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual, wanted, **near)
        assert actual.stride() == wanted.stride()
    inputs = [x, *(leaves(state) if state is not None else [])]
    parameters = dict(module.named_parameters())
    wanted = torch.autograd.grad(expected, [*inputs, *parameters.values()], cotangents)
    for actual, gradient in zip(torch.autograd.grad(outputs, inputs, cotangents), wanted, strict=False):
        torch.testing.assert_close(actual, gradient, **near)
    assert records.keys() == parameters.keys()
    found = {name: records.per_example()[name] for name in parameters}
    total = dict(zip(parameters, wanted[len(inputs) :], strict=True))
    assert_close({name: g.sum(0) for name, g in found.items()}, total, 2 * tolerance)
    exact, x, state = in_float64(module), in_float64(x), in_float64(state)
    for i in range(x.shape[batch_dim]) if loop else ():
        alone = leaves(exact(one(x, i, batch_dim), one(state, i, 0 if cell else 1)))
        own = [c.narrow(batch_dim if k == 0 or cell else 1, i, 1).double() for k, c in enumerate(cotangents)]
        gradients = torch.autograd.grad(alone, list(exact.parameters()), own)
        assert_close({name: g[i] for name, g in found.items()}, dict(zip(found, gradients, strict=True)), tolerance)


@st.composite
def layers(draw):
    """A layer, the times, the examples, whether the state is given."""
    kind = draw(st.sampled_from(LAYERS))
    hidden = draw(st.integers(2, 4))
    options = {"nonlinearity": draw(st.sampled_from(["tanh", "relu"]))} if kind is nn.RNN else {}
    if kind is nn.LSTM:
        options["proj_size"] = draw(st.integers(0, hidden - 1))
    module = kind(
        draw(st.integers(1, 3)),
        hidden,
        num_layers=draw(st.integers(1, 3)),
        bidirectional=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(list(EXACT))),
        **options,
    )
    return module, draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.booleans())


@st.composite
def cells(draw):
    """A cell, the examples, whether the state is given."""
    kind = draw(st.sampled_from(CELLS))
    options = {"nonlinearity": draw(st.sampled_from(["tanh", "relu"]))} if kind is nn.RNNCell else {}
    sizes = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    module = kind(*sizes, bias=draw(st.booleans()), dtype=draw(st.sampled_from(list(EXACT))), **options)
    return module, draw(st.integers(1, 5)), draw(st.booleans())


def inputs_of(module, times, batch, dtype=torch.float64, device="cpu"):
    shape = (batch, times) if module.batch_first else (times, batch)
    return torch.randn(*shape, module.input_size, dtype=dtype, device=device, requires_grad=True)


def dtype_of(module):
    return next(module.parameters()).dtype


@settings(max_examples=60, deadline=None)
@given(layers(), st.integers(0, 2**16))
def test_layers_equal_torch(case, seed):
    module, times, batch, given_state = case
    torch.manual_seed(seed)
    module.reset_parameters()
    dtype = dtype_of(module)
    check(module, inputs_of(module, times, batch, dtype), initial_state(module, batch, dtype) if given_state else None)


@settings(max_examples=60, deadline=None)
@given(cells(), st.integers(0, 2**16))
def test_cells_equal_torch(case, seed):
    module, batch, given_state = case
    torch.manual_seed(seed)
    module.reset_parameters()
    x = torch.randn(batch, module.input_size, dtype=dtype_of(module), requires_grad=True)
    check(module, x, initial_state(module, batch, dtype_of(module)) if given_state else None)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_is_that_of_torch(kind, batch_first):
    module = kind(3, 4, num_layers=3, dropout=0.5, bidirectional=True, batch_first=batch_first, dtype=torch.float64)
    check(module, inputs_of(module, 6, 4), None, loop=False)
    module.eval()
    check(module, inputs_of(module, 6, 4), None)


@pytest.mark.parametrize("times", [10, 150])
@pytest.mark.parametrize("kind", LAYERS)
def test_float32_of_usual_sizes(kind, times):
    torch.manual_seed(0)
    module = kind(12, 33, num_layers=2, batch_first=True)
    check(module, inputs_of(module, times, 7, dtype=torch.float32), initial_state(module, 7, torch.float32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", LAYERS)
def test_cuda(kind):
    module = kind(5, 7, num_layers=2, bidirectional=True, dtype=torch.float64, device="cuda")
    state = initial_state(module, 3, device="cuda")
    check(module, inputs_of(module, 9, 3, device="cuda"), state, tolerance=1e-10)


@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_autocast_runs_in_the_dtype_of_torch(kind):
    module, records = kind(8, 16), Records()
    x = torch.randn(*((5, 8) if kind in CELLS else (6, 5, 8)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            expected = leaves(module(x))
        except RuntimeError as problem:
            if "primitive descriptor" not in str(problem):
                raise
            pytest.skip(f"torch itself has no bfloat16 {kind.__name__} for this processor")
        outputs = leaves(run_recurrent(module, x, None, records))
    assert [t.dtype for t in outputs] == [t.dtype for t in expected]
    for actual, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual.float(), wanted.float(), rtol=0, atol=0.03)
    exact = Records()
    cotangents = [torch.randn_like(t) for t in outputs]
    torch.autograd.backward(outputs, cotangents)
    torch.autograd.backward(leaves(run_recurrent(module, x, None, exact)), [c.float() for c in cotangents])
    found = {name: (None if a is None else a.float(), g.float()) for name, (a, g) in records.items()}
    assert all(g.dtype == torch.bfloat16 for _, g in records.values())
    for name, gradient in Records(found).per_example().items():
        wanted = exact.per_example()[name]
        assert (gradient - wanted).norm() <= 0.03 * wanted.norm()


@pytest.mark.parametrize("kind", LAYERS)
def test_loss_of_the_last_state_alone(kind):
    module, records = kind(3, 4, batch_first=True, dtype=torch.float64), Records()
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    torch.stack(leaves(run_recurrent(module, x, None, records)[1])).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    torch.stack(leaves(module(x)[1])).sum().backward()
    for name, gradient in records.per_example().items():
        torch.testing.assert_close(gradient.sum(0), module.get_parameter(name).grad)


def test_frozen_weights_and_an_empty_batch():
    module, records = nn.GRU(3, 4, batch_first=True).requires_grad_(False), Records()
    x = torch.randn(0, 6, 3, requires_grad=True)
    run_recurrent(module, x, None, records)[0].sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert records["weight_ih_l0"][0].shape == (0, 6, 3)
    assert records["weight_hh_l0"][1].shape == (0, 6, 12)


@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_second_backward_is_refused(kind):
    module = kind(3, 4)
    outputs = leaves(
        run_recurrent(module, torch.randn(2, 3) if kind in CELLS else torch.randn(2, 2, 3), None, Records())
    )
    outputs[0].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        outputs[0].sum().backward()
    module = kind(3, 4)
    outputs = leaves(
        run_recurrent(module, torch.randn(2, 3) if kind in CELLS else torch.randn(2, 2, 3), None, Records())
    )
    with torch.no_grad():
        module.get_parameter("weight_hh" if kind in CELLS else "weight_hh_l0").zero_()
    with pytest.raises(RuntimeError, match="inplace"):
        outputs[0].sum().backward()


def test_outputs_written_in_place_are_refused():
    module = nn.LSTM(3, 4, batch_first=True)
    output, _ = run_recurrent(module, torch.randn(2, 5, 3), None, Records())
    output.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        output.sum().backward()


def test_refusals():
    lstm, cell, x = nn.LSTM(3, 4, batch_first=True), nn.LSTMCell(3, 4), torch.randn(2, 5, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 2]), batch_first=True)
    for module, given_input, state, match in (
        (lstm, packed, None, "padded tensor, got a PackedSequence, which joins the examples"),
        (lstm, x[0], None, "a tensor of 3 dimensions, got shape"),
        (cell, x[0, 0], None, "a tensor of 2 dimensions, got shape"),
        (cell, x[0], (torch.zeros(5, 4), torch.zeros(1, 4)), "must have shape"),
        (cell, x[0], (torch.zeros(5, 4), torch.zeros(5, 4, dtype=torch.float64)), "one dtype"),
        (lstm, x[:, :0], None, "at least one step"),
    ):
        with pytest.raises(ModelError, match=match):
            run_recurrent(module, given_input, state, Records())
    with pytest.raises(RuntimeError, match="Expected hidden"):
        run_recurrent(lstm, x, (torch.zeros(1, 3, 4), torch.zeros(1, 2, 4)), Records())
    with pytest.raises(ValueError, match="type"):
        run_recurrent(lstm, x.double(), None, Records())


@pytest.mark.parametrize("kind", LAYERS)
def test_one_initial_state_for_all_examples(kind):
    module = kind(3, 4, dtype=torch.float64)
    learned = torch.randn(1, 1, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    gradients = []
    for run in (module, lambda x, hx: run_recurrent(module, x, hx, Records())):
        state = learned.expand(1, 6, 4)
        output, _ = run(x, (state, state) if kind is nn.LSTM else state)
        gradients.append(torch.autograd.grad(output.square().sum(), learned)[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)
