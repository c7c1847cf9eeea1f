"""Models of torch's own layers in a row: the same sums as example by example, and nothing else takes this way."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from anyorder.clipping import GhostClipping, layer_rules
from anyorder.clipping import per_example as engine
from anyorder.clipping.layer_rules import RowwiseCall
from anyorder.errors import ModelError
from clipping.brute import TOLERANCE, assert_close, clipped_sum, per_example, run

POOLS = (nn.MaxPool2d(2, 1), nn.AvgPool2d(3, padding=1), nn.AdaptiveAvgPool2d((2, None)))
ACTIVATIONS = (
    nn.Identity(), nn.Tanh(), nn.Sigmoid(), nn.ReLU(), nn.SiLU(), nn.Mish(), nn.GELU(approximate="tanh"), nn.ELU(0.5),
    nn.LeakyReLU(0.2), nn.Softplus(2.0, 1.0),
)  # fmt: skip


def tied():
    table, head = nn.Embedding(10, 4, padding_idx=-1), nn.Linear(4, 10)
    head.weight = table.weight
    return nn.Sequential(table, nn.Tanh(), head, nn.Flatten())


def layer_twice():
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), nn.Sequential(layer))


def frozen(*names):
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def images(part):
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), part, nn.Flatten(), nn.LazyLinear(3))


CASES = {
    "linear": (lambda: nn.Linear(8, 3), (8,)),
    "linear on sequences": (lambda: nn.Sequential(nn.Linear(8, 3, bias=False), nn.Tanh()), (5, 8)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 9)),
    "conv2d": (lambda: nn.Conv2d(2, 4, (3, 2), stride=2, padding=1, dilation=2, groups=2), (2, 6, 6)),
    "embedding": (lambda: nn.Embedding(10, 4, padding_idx=0), "tokens"),
    "bags": (lambda: nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum"), nn.Linear(4, 2)), "tokens"),
    "bags of padding": (lambda: nn.EmbeddingBag(10, 4, mode="mean", padding_idx=-2), "tokens"),
    "frozen bags": (lambda: nn.Sequential(nn.EmbeddingBag(10, 4).requires_grad_(False), nn.Linear(4, 2)), "tokens"),
    "layer norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm((5, 8), bias=False)), (5, 8)),
    "layer norm without weights": (lambda: nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), frozen()), (8,)),
    "tied": (tied, "tokens"),
    "a layer twice": (layer_twice, (8,)),
    "frozen first": (lambda: frozen("0.weight", "0.bias"), (8,)),
    "frozen norm": (lambda: frozen("1.weight", "1.bias"), (5, 8)),
    "frozen last": (lambda: frozen("3.weight", "3.bias", "0.bias"), (8,)),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3)), (8,)),
    "frozen tables": (lambda: nn.Sequential(nn.Embedding(10, 4).requires_grad_(False), nn.Linear(4, 2)), "tokens"),
    "frozen conv": (lambda: nn.Sequential(nn.Conv2d(2, 2, 3).requires_grad_(False), nn.Conv2d(2, 3, 2)), (2, 6, 6)),
    **{repr(part): (lambda part=part: images(part), (2, 6, 6)) for part in POOLS},
    **{repr(part): (lambda part=part: nn.Sequential(nn.Linear(8, 4), part), (8,)) for part in ACTIVATIONS},
}  # fmt: skip


def made(name, dtype=torch.float64, size=6):
    """A model of CASES and a batch."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    module = make()
    x = torch.randint(0, 10, (size, 5)) if shape == "tokens" else torch.randn(size, *shape)
    module(x)  # lazy layers
    module, x = module.to(dtype), x if shape == "tokens" else x.to(dtype)
    return module, x, torch.randn_like(module(x).detach())


def rowwise(module, args, kwargs):
    """The call of a module whose parameters are trained as they say, or None."""
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    return RowwiseCall.of(module, args, kwargs, parameters, [], {})


def sums(module, x, y, monkeypatch, *, general=False, chunk_size=None, groups=None, loss=F.mse_loss):
    torch.manual_seed(1)
    with monkeypatch.context() as patch:
        if general:
            patch.setattr(RowwiseCall, "of", lambda *_: None)
        else:
            patch.delattr(engine, "for_each_example")  # which the general way calls
        return run(GhostClipping(module, chunk_size), x, y, loss, groups=groups, clip_norm=0.5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_the_general_way_and_of_a_loop(name, dtype, monkeypatch):
    module, x, y = made(name, dtype)
    for groups, chunk_size in ((torch.arange(6), None), (torch.tensor([2, 0, 2, 1, 2, 0]), None), (torch.arange(6), 4)):
        outputs, found = sums(module, x, y, monkeypatch, groups=groups, chunk_size=chunk_size)
        same, general = sums(module, x, y, monkeypatch, general=True, groups=groups, chunk_size=chunk_size)
        assert outputs.shape == same.shape
        assert outputs.dtype == same.dtype == dtype
        torch.testing.assert_close(outputs, same)
        assert_close(found, general, TOLERANCE[dtype])
        assert all(found[key].dtype == general[key].dtype for key in found)
        if name != "dropout":
            expected = clipped_sum(per_example(module, x, y, F.mse_loss), groups, 0.5)
            assert_close(found, expected, TOLERANCE[dtype])
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("name", CASES)
def test_an_example_moves_no_row_but_its_own(name, monkeypatch):
    module, x, y = made(name)
    other = x.clone()
    other[2] = -x[2] if x.is_floating_point() else 9 - x[2]
    before, after = (sums(module, batch, y, monkeypatch)[0] for batch in (x, other))
    rows = [i for i in range(6) if i != 2]
    assert torch.equal(before[rows], after[rows])
    assert not torch.equal(before[2], after[2])


@pytest.mark.parametrize("name", ["linear", "conv2d", "layer norm", "embedding"])
def test_a_unit_without_a_finite_norm_adds_zero(name, monkeypatch):
    module, x, y = made(name)

    def loss(outputs, y):
        return F.mse_loss(outputs * torch.tensor([1.0, 1, float("nan"), 1, 1, 1]).view(-1, *(1,) * (y.dim() - 1)), y)

    found = sums(module, x, y, monkeypatch, loss=loss)[1]
    rows = torch.tensor([0, 1, 3, 4, 5])
    expected = clipped_sum(per_example(module, x[rows], y[rows], F.mse_loss), torch.arange(5), 0.5)
    assert_close(found, expected, TOLERANCE[torch.float64])


def test_masks_are_drawn_anew_for_each_example_and_batch(monkeypatch):
    module = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5))
    clipping = GhostClipping(module)
    x, y = torch.ones(4, 4), torch.zeros(4, 50)
    rows = torch.cat([run(clipping, x, y, F.mse_loss)[0] for _ in range(2)]).detach()
    assert len({tuple(row.tolist()) for row in rows}) == 8
    module.eval()
    assert torch.equal(run(clipping, x, y, F.mse_loss)[0], module(x))


def test_chunks_run_again_with_what_was_read_in_forward(monkeypatch):
    module, x, y = made("dropout")
    expected = sums(module, x, y, monkeypatch, chunk_size=2)[1]

    def loss(outputs, y):
        module.eval()
        module[0].register_forward_hook(lambda *_: torch.zeros(2, 8, dtype=torch.float64))
        return F.mse_loss(outputs, y)

    found = sums(module, x, y, monkeypatch, chunk_size=2, loss=loss)[1]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class OwnLinear(nn.Linear):
    """Forward is inherited; it could not be."""


class OwnTensor(torch.Tensor):
    """One of the user's."""


class Mode(torch.overrides.TorchFunctionMode):
    """Of the user's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    """Of the user's, below autograd."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def with_(part, **attributes):
    for name, value in attributes.items():
        setattr(part, name, value)
    return part


def hooked(register):
    part = nn.Linear(4, 4)
    getattr(part, register)(lambda *_: None)
    return part


def with_buffer():
    part = nn.Linear(4, 4)
    part.register_buffer("seen", torch.zeros(1))
    return part


def broad_bias():
    part = nn.Linear(4, 4)
    part.bias = nn.Parameter(torch.zeros(6, 4))
    return part


STRANGE = {
    "subclass": lambda: OwnLinear(4, 4),
    "subclass of the container": lambda: type("Own", (nn.Sequential,), {})(nn.Linear(4, 4)),
    "subclass of a parameter": lambda: with_(nn.Linear(4, 4), weight=type("P", (nn.Parameter,), {})(torch.ones(4, 4))),
    "forward hook": lambda: hooked("register_forward_hook"),
    "hook before forward": lambda: hooked("register_forward_pre_hook"),
    "backward hook": lambda: hooked("register_full_backward_hook"),
    "hook of the container": lambda: (s := nn.Sequential(nn.Linear(4, 4)), s.register_forward_hook(print))[0],
    "forward of its own": lambda: with_(nn.Linear(4, 4), forward=lambda x: x - x.mean(0)),
    "container's forward": lambda: with_(nn.Sequential(nn.Linear(4, 4)), forward=lambda x: x - x.mean(0)),
    "call of its own": lambda: with_(nn.Linear(4, 4), _call_impl=lambda x: x - x.mean(0)),
    "a further attribute": lambda: with_(nn.Linear(4, 4), seen=[]),
    "a tensor as a setting": lambda: nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(torch.ones(6, 1))),
    "a tensor in a setting": lambda: nn.Sequential(nn.Linear(4, 4), nn.AvgPool2d((torch.tensor(2), 2))),
    "parametrized": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "buffer": with_buffer,
    "bias of each row": broad_bias,
    "trained bias of a frozen weight": lambda: (m := nn.Linear(4, 4), m.weight.requires_grad_(False))[0],
    "in place": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
    "flatten to a word": lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(1, "all")),
    "a number as the kernel": lambda: with_(nn.Conv2d(1, 1, 1), kernel_size=1),
    "a number as the shape": lambda: with_(nn.LayerNorm(4), normalized_shape=4),
    "a word as padding": lambda: with_(nn.Embedding(4, 4), padding_idx="0"),
    "flatten examples": lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)),
    "flatten from behind": lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(-2)),
    "softmax": lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(0)),
    "indices": lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d(2, return_indices=True)),
    "circular": lambda: nn.Conv2d(1, 1, 1, padding_mode="circular"),
    "same": lambda: nn.Conv2d(1, 1, 1, padding="same"),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(),
    "max norm": lambda: nn.Embedding(4, 4, max_norm=1.0),
    "attention": lambda: nn.MultiheadAttention(4, 1),
    "compiled": lambda: (m := nn.Linear(4, 4), m.compile(backend="eager"))[0],
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_not_exactly_of_the_form_is_not_rowwise(name):
    x = torch.randn(6, 4)
    assert rowwise(nn.Sequential(nn.Linear(4, 4)), (x,), {}) is not None
    module = STRANGE[name]()
    assert rowwise(module, (x,), {}) is None
    assert rowwise(nn.Sequential(nn.Sequential(module)), (x,), {}) is None


def test_other_arguments_and_modes_are_not_rowwise(monkeypatch):
    module, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(6, 4)
    batched = []
    torch.vmap(lambda row: (batched.append(row), row)[1])(x)
    kept = torch.func.vmap(lambda row: (batched.append(rowwise(module, (x,), {})), row)[1])
    kept(x)
    assert batched[1] is None
    for args, kwargs in (
        ((x, x), {}), ((), {"input": x}), ((x, 1), {}), (((x,),), {}), ((x[0, 0],), {}), ((batched[0],), {}),
        ((x.as_subclass(OwnTensor),), {}), ((x.clone().requires_grad_(),), {}), ((x.to_sparse(),), {}),
    ):  # fmt: skip
        assert rowwise(module, args, kwargs) is None
    for around in (Mode(), torch.device("cpu"), torch.autocast("cpu"), DispatchMode()):
        with around:
            assert rowwise(module, (x,), {}) is None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert rowwise(module, (x,), {}) is None
    finally:
        handle.remove()
    assert rowwise(module, (x,), {}) is not None
    for kind, name in ((nn.Linear, "forward"), (nn.Sequential, "forward"), (nn.Module, "__call__")):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, lambda self, x: x - x.mean(0))
            assert rowwise(module, (x,), {}) is None


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(6, 6), (6,)),
        (nn.Sequential(nn.Linear(6, 6), nn.Flatten()), (6,)),
        (nn.Conv2d(6, 6, 1), (6, 4, 4)),
        (nn.Conv1d(6, 6, 1), (6, 4)),
        (nn.LayerNorm(6), (6,)),
        (nn.LayerNorm((6, 4)), (6, 4)),
    ],
    ids=str,
)
def test_the_examples_are_not_taken_for_another_dimension(module, shape):
    """Where torch would take the batch for one example: each example alone is too small for the model."""
    with pytest.raises((ModelError, RuntimeError)):
        GhostClipping(module).forward(
            (torch.randn(shape),), {}, groups=torch.arange(6), clip_norm=1.0, scale=1.0, receive=print
        )


def test_a_batch_of_numbers_is_run_on_each_alone(monkeypatch):
    module, x, y = nn.Sequential(nn.Linear(1, 1)), torch.randn(6), torch.randn(6)
    found = run(GhostClipping(module), x, y, F.mse_loss, clip_norm=0.5)[1]
    expected = clipped_sum(per_example(module, x, y, F.mse_loss), torch.arange(6), 0.5)
    assert_close(found, expected, TOLERANCE[torch.float32])


def test_hooks_on_saved_tensors_are_not_run_on_the_batch():
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(6, 4)
    seen = []
    call, parameters = rowwise(module, (x,), {}), {n: p.detach() for n, p in module.named_parameters()}
    job = engine.Pass(module, call, parameters, torch.arange(6), None, None, 1.0, 1.0, None)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.shape), t)[1], lambda t: t)
    with hooks, pytest.raises(engine.Unmapped, match="would run or move parts"):
        job.outputs((x,))
    assert not seen


def test_what_an_earlier_batch_left_is_refused_here_too():
    """A hook kept a tensor of the batch, and is gone: the loss could still read it."""
    module, x, y = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(6, 4), torch.randn(6, 4)
    kept = []
    handle = module[0].register_forward_hook(lambda part, given, made: kept.append(made))
    clipping = GhostClipping(module)
    run(clipping, x, y, F.mse_loss)
    handle.remove()
    assert rowwise(module, (x,), {}) is not None
    with pytest.raises(ModelError, match="keeps tensors of an earlier batch"):
        run(clipping, x, y, F.mse_loss)
    kept.clear()
    run(clipping, x, y, F.mse_loss)


def test_every_kind_is_tested():
    kinds = {type(part) for make, _ in CASES.values() for part in made_parts(make)}
    assert kinds - {nn.LazyLinear} == layer_rules._KINDS.keys()


def made_parts(make):
    return copy.deepcopy(make()).modules()


def test_hooks_of_saving_leave_a_model_rowwise():
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(6, 4)
    module[0].register_state_dict_pre_hook(lambda *_: None)
    module.register_load_state_dict_post_hook(lambda *_: None)
    assert rowwise(module, (x,), {}) is not None
