"""Models that checkpoint parts of themselves: per-unit clipped sums are those of the model without checkpoints."""

import functools
import importlib.util
import threading

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from anyorder.clipping import mapping
from anyorder.clipping.per_example import FunctionalClipping, GhostClipping
from anyorder.errors import ModelError
from clipping.brute import assert_close, clipped_sum, run

ENGINES = [GhostClipping, FunctionalClipping]
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


def by_backward(module, x, y):
    """[{name: gradient}] of each example alone; torch.autograd.grad cannot be used on reentrant checkpoints."""
    result = []
    for i in range(len(x)):
        module.zero_grad()
        F.cross_entropy(module(x[i : i + 1]), y[i : i + 1]).backward()
        result.append(
            {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}
        )
    return result


class Net(nn.Module):
    """a, then b by itself, b twice more in one checkpoint inside another, b in a sequence; all checkpointed."""

    def __init__(self, inputs=4, hidden=5, *, dropout=0.0, use=checkpoint, **options):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 3)
        self.dropout, self.use, self.options, self.calls = nn.Dropout(dropout), use, options, 0

    def first(self, x):
        self.calls += 1
        return self.dropout(self.b(x)).tanh()

    def forward(self, x):
        use = functools.partial(self.use, **self.options)
        h = self.a(x).requires_grad_()  # as models do whose first layers are frozen
        h = use(self.first, h)
        h = use(lambda h: use(self.b, use(self.b, h).tanh()).tanh(), h)
        if self.options["use_reentrant"] is not None and self.use is checkpoint:
            steps = [self.b, nn.Tanh(), self.b]
            h = checkpoint_sequential(steps, 2, h, use_reentrant=self.options["use_reentrant"])
        return self.c(h)


def through_the_module(*args, **kwargs):
    return torch.utils.checkpoint.checkpoint(*args, **kwargs)


def batch(size=6, inputs=4):
    return torch.randn(size, inputs, dtype=torch.float64), torch.randint(0, 3, (size,))


@pytest.mark.parametrize("use", [checkpoint, through_the_module])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=8, deadline=None)
@given(sizes=st.tuples(*(st.integers(1, 6) for _ in range(3))), chunk=st.none() | st.integers(1, 4), data=st.data())
def test_sums_are_those_of_the_loop(engine, reentrant, use, sizes, chunk, data):
    size, inputs, hidden = sizes
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    module, (x, y) = Net(inputs, hidden, use=use, use_reentrant=reentrant).double(), batch(size, inputs)
    expected = clipped_sum(by_backward(module, x, y), groups, 0.1)
    _, sums = run(engine(module, chunk), x, y, F.cross_entropy, groups=groups, clip_norm=0.1)
    assert_close(sums, expected, 1e-10)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
@pytest.mark.parametrize("engine", ENGINES)
def test_selective_checkpoints(engine, policy):
    context = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
    module, (x, y) = Net(use_reentrant=False, context_fn=context).double(), batch()
    expected = clipped_sum(by_backward(module, x, y), torch.arange(6), 0.1)
    assert_close(run(engine(module), x, y, F.cross_entropy, clip_norm=0.1)[1], expected, 1e-10)


def test_the_context_of_a_segment_is_entered():
    def context():
        return torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16)

    class Low(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False, context_fn=context)

    outputs, _ = run(GhostClipping(Low()), torch.randn(6, 4), torch.zeros(6).long(), F.cross_entropy)
    assert outputs.dtype == torch.bfloat16


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_random_numbers_are_those_of_the_model_without_checkpoints(engine, reentrant, chunk):
    torch.manual_seed(0)
    module, (x, y) = Net(dropout=0.5, use_reentrant=reentrant).double(), batch()
    plain = Net(dropout=0.5, use=lambda function, *args, use_reentrant: function(*args), use_reentrant=None).double()
    plain.load_state_dict(module.state_dict())
    module.options["use_reentrant"] = None  # no sequence: `plain` has none
    module.use = functools.partial(checkpoint_or, reentrant)
    results = []
    for net in (module, plain):
        torch.manual_seed(1)
        outputs, sums = run(engine(net, chunk), x, y, F.cross_entropy, clip_norm=0.1)
        results.append((outputs, sums, torch.rand(3)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][2], results[1][2])
    assert_close(results[0][1], results[1][1], 1e-14)


def checkpoint_or(reentrant, function, *args, use_reentrant):
    return checkpoint(function, *args, use_reentrant=reentrant)


def own_calls(reentrant=False):
    """How often torch runs a segment in one forward and backward pass of its own."""
    module, (x, y) = Net(use_reentrant=reentrant).double(), batch()
    F.cross_entropy(module(x), y).backward()
    return module.calls


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_keeps_its_own_checkpoints(reentrant):
    """Inside a pass a segment runs once; outside of it, and in another thread meanwhile, torch runs it again."""
    elsewhere = []

    class Meanwhile(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=lambda: elsewhere.append(own_calls(reentrant)))
            thread.start()
            thread.join()
            return x

    net, (x, y) = Net(use_reentrant=reentrant), batch()
    run(GhostClipping(nn.Sequential(Meanwhile(), net).double()), x, y, F.cross_entropy)
    assert net.calls == 1
    assert elsewhere == [2]
    assert own_calls(reentrant) == 2
    with torch.no_grad():
        net.eval()(x)
    assert net.calls == 2


def replaced():
    return [vars(owner).get(name) for owner, name, _ in mapping._REPLACED]


def test_an_error_in_a_segment_leaves_torch_as_it_was():
    before = replaced()

    def fail(x):
        raise KeyError("mine")

    module, (x, y) = Net(use_reentrant=False).double(), batch()
    module.first = fail
    with pytest.raises(KeyError, match="mine"):
        run(GhostClipping(module), x, y, F.cross_entropy)
    assert replaced() == before
    assert own_calls() == 2


def test_passes_that_overlap_in_time_leave_torch_as_it_was():
    before, entered, leave = replaced(), threading.Event(), threading.Event()

    def other():
        with mapping.plain_segments():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other, daemon=True)
    with mapping.plain_segments():
        thread.start()
        assert entered.wait(10)
    assert own_calls() == 2
    assert replaced() != before
    leave.set()
    thread.join()
    assert replaced() == before


def another_torch():
    """Torch's checkpoints from another place than that in which they are replaced."""
    spec = importlib.util.spec_from_file_location("another_checkpoint", torch.utils.checkpoint.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.checkpoint


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_checkpoints_of_another_torch_are_refused(engine, reentrant):
    module, (x, y) = Net(use=another_torch(), use_reentrant=reentrant).double(), batch()
    with pytest.raises(ModelError, match="checkpoint|vmap"):
        run(engine(module), x, y, F.cross_entropy)
    assert module.calls <= 3  # each way to run it is tried once
