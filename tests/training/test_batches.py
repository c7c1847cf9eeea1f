"""Rows that go into the model are clipped by the units of their own batch, however a loop feeds them, or refused."""

import collections
import copy
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import anyorder as ao
import processes
from anyorder.errors import ArgumentError, TrainingError
from anyorder.participation import MinSeparation
from anyorder.sampling.loader import Batch, BatchIdentity
from training.test_engine import KEY, clipped_sum, network, weights

ROWS, B = 24, 4
# Two users in each batch, interleaved in one batch and one behind the other in the next.
USERS = torch.tensor([10 * (i // B) + (i % 2 if i // B % 2 else i % B // 2) for i in range(ROWS)])
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, torch.arange(ROWS) % 2, USERS)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def private(dataset=DATA, loader=None, **options):
    plan = ao.plan(
        order=MinSeparation(60, 1, 60), batch_size=B, epsilon=8, delta=1e-5, mechanism="independent",
        clip_norm=0.1, unit="user",
    )  # fmt: skip
    engine, model = ao.PrivacyEngine(plan, key=KEY), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=B) if loader is None else loader
    return engine, *engine.make_private(model, optimizer, loader, unit=2, **options)


def test_zero_grad_forgets_a_batch_whose_step_was_not_taken():
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    for _ in range(2):
        x, y, _users = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert [sorted(units) for units in engine.ledger.history()] == [[10, 11]]


def copied(batch):
    return [t.clone() for t in batch]


def one_ahead(loader):
    """As loops do that move the next batch to a device while they train on this one."""
    batches = iter(loader)
    following = next(batches)
    while following is not None:
        batch, following = following, next(batches, None)
        yield batch


class Prefetcher:
    def __init__(self, loader, depth=1):
        self.loader, self.depth = loader, depth

    def __iter__(self):
        queue = collections.deque()
        for batch in self.loader:
            queue.append(copied(batch))
            if len(queue) > self.depth:
                yield queue.popleft()
        yield from queue


def some_left_out(loader):
    return (batch for i, batch in enumerate(loader) if i not in (0, 3))


def endless(loader):
    while True:
        yield from loader


def pairs(loader):
    for first, second in zip(loader, loader, strict=True):
        yield first
        yield second


def chosen(loader, batches):
    for batch in batches:
        loader.use(batch[0])
        yield copied(batch)


RIGHT = {
    "as they come": iter,
    "copies": lambda loader: map(copied, loader),
    "views": lambda loader: ([x.flatten(1)[:, :], y, u] for x, y, u in loader),
    "other numbers": lambda loader: ([x.double().float(), y, u] for x, y, u in loader),
    "one ahead": one_ahead,
    "all at once": list,
    "two iterations": pairs,
    "some left out": some_left_out,
    "left out, the others named": lambda loader: chosen(loader, some_left_out(loader)),
    "one ahead and named": lambda loader: chosen(loader, one_ahead(loader)),
    "after a look": lambda loader: (next(iter(loader)), map(copied, loader))[1],
    "backwards": lambda loader: reversed(list(loader)),
}
REFUSED = {
    "copies one ahead": lambda loader: map(copied, one_ahead(loader)),
    "prefetcher": Prefetcher,
    "prefetcher over epochs": lambda loader: Prefetcher(endless(loader), depth=7),
    "copies of all": lambda loader: list(map(copied, loader)),
    "copies of two iterations": lambda loader: map(copied, pairs(loader)),
    "copies, some left out": lambda loader: map(copied, some_left_out(loader)),
}


def run(engine, model, optimizer, batches, most=6):
    """Train; every step's sum is that of the rows which the model was given, each with its own user."""
    for _, (x, y, users) in zip(range(most), batches, strict=False):
        expected = clipped_sum(copy.deepcopy(model.module), (x, y), 0.1, groups=users.tolist())
        nn.functional.cross_entropy(model(x), y).backward()
        sums = torch.cat(
            [engine.training._waiting.sums[name].reshape(-1) for name, _ in model.module.named_parameters()]
        )
        torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-6)
        optimizer.step()
        assert list(engine.ledger.history())[-1].tolist() == sorted(set(users.tolist()))


@pytest.mark.parametrize("dataset", [DATA, Stream()])
@pytest.mark.parametrize("feed", RIGHT)
def test_rows_have_the_units_of_their_own_batch(feed, dataset):
    engine, model, optimizer, loader = private(dataset)
    run(engine, model, optimizer, RIGHT[feed](loader))
    assert engine.step == (4 if "left out" in feed else 6)


@pytest.mark.parametrize("feed", REFUSED)
def test_copies_of_one_of_several_batches_are_refused_before_any_step(feed):
    engine, model, optimizer, loader = private()
    before = weights(model)
    with pytest.raises(TrainingError, match=r"several batches .*loader\.use"):
        run(engine, model, optimizer, iter(REFUSED[feed](loader)))
    assert engine.step == 0
    assert torch.equal(before, weights(model))


def test_short_epochs_do_not_hide_a_batch_that_was_fetched_ahead():
    """With one batch an epoch, two epochs are under way; with two, a queue of two reaches the third."""
    for size, depth in ((ROWS, 1), (ROWS // 2, 2)):
        engine, model, optimizer, loader = private(loader=DataLoader(DATA, batch_size=size))
        with pytest.raises(TrainingError, match="several batches"):
            run(engine, model, optimizer, iter(Prefetcher(endless(loader), depth)))
        assert engine.step == 0


def test_copies_with_the_rows_of_users_in_another_order_are_refused():
    """Each user's rows would be cut with another's. Where each row is a unit, the order does no harm."""
    for feed in (lambda x: x.flip(0), lambda x: x[torch.tensor([0, 2, 1, 3])], lambda x: torch.cat([x[1:], x[:1]])):
        engine, model, optimizer, loader = private()
        x, y, _ = next(iter(loader))
        with pytest.raises(TrainingError, match="another order"):
            model(feed(x))
        nn.functional.cross_entropy(model(-x.clone()), y).backward()
        optimizer.step()
        assert engine.step == 1
    plan = ao.plan(dataset_size=ROWS, batch_size=B, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = ao.PrivacyEngine(plan).make_private(model, optimizer, DataLoader(DATA, batch_size=B))
    assert model(next(iter(loader))[0].flip(0)).shape == (B, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool])
def test_what_is_in_the_rows_refuses_nothing(dtype):
    """Rows that are changed, and rows that are equal: nothing about them may stop a run."""
    rows = torch.tensor([[0, 1, 1], [1, 0, 1], [0, 1, 1], [1, 0, 1]]).to(dtype)
    for x in (rows, torch.arange(12).reshape(4, 3).to(dtype)):
        batch = [x]
        out, handed = BatchIdentity(), Batch(["a", "a", "b", "b"], 0, 1)
        out.add(batch, handed)
        assert out.find([x.clone()]) is handed
        changed = x.clone()
        changed[:, 0] = 1 - x[:, 0] if dtype != torch.bool else ~x[:, 0]
        assert out.find([changed]) is handed
        assert out.find([rows.flip(0)]) is handed


def test_a_batch_comes_whole_and_once_with_its_rows_in_place():
    _, model, _, loader = private()
    batches = iter(loader)
    x, y, _ = next(batches)
    for part in (x[:2], x[1:], torch.cat([x, x])):
        with pytest.raises(ArgumentError, match="whole batch"):
            model(part)
    with pytest.raises(TrainingError, match="another order"):
        model(x[1].expand(B, 3))
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    for again in (x, x.view(B, 3), x.clone()):
        with pytest.raises(TrainingError, match="already used"):
            model(again)
    next(batches)
    with pytest.raises(TrainingError, match="already used"):
        model(x[:, :])


def test_tensors_of_two_batches_in_one_call():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, a, b):
            return self.inner(a + b)

    plan = ao.plan(
        order=MinSeparation(6, 1, 6), batch_size=B, epsilon=8, delta=1e-5, mechanism="independent", unit="user"
    )
    model = Sum()
    model, _, loader = ao.PrivacyEngine(plan).make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=B), unit=2
    )
    first, second = list(loader)[:2]
    with pytest.raises(TrainingError, match="two batches"):
        model(first[0], second[0])
    assert model(first[0], torch.ones(B, 3)).shape == (B, 2)


def test_forward_of_two_micro_batches_before_their_backward():
    engine, model, optimizer, loader = private(accumulate=2)
    batches = map(copied, loader)
    losses = [nn.functional.cross_entropy(model(x), y) for (x, y, _), _ in zip(batches, range(2), strict=False)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    assert next(iter(engine.ledger.history())).tolist() == USERS[: 2 * B].unique().tolist()


@pytest.mark.parametrize("nested", [lambda x: {"a": {"x": x}}, lambda x: (x, ["text"] * B), lambda x: _Box(x)])
def test_batches_of_any_container_are_recognised(nested):
    loader = DataLoader(DATA, batch_size=B, collate_fn=lambda rows: nested(torch.stack([row[0] for row in rows])))
    plan = ao.plan(dataset_size=ROWS, batch_size=B, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ao.PrivacyEngine(plan, key=KEY)
    model, optimizer, loader = engine.make_private(model, optimizer, loader)
    batches = list(loader)
    for t in (1, 4):
        inner = next(leaf for leaf in _leaves(batches[t]) if isinstance(leaf, torch.Tensor))
        model(inner).sum().backward()
        optimizer.step()
    assert [units.tolist() for units in engine.ledger.history()] == [[4, 5, 6, 7], [16, 17, 18, 19]]


class _Box:
    def __init__(self, x):
        self.x = x


def _leaves(value):
    if isinstance(value, _Box):
        return [value.x]
    return torch.utils._pytree.tree_leaves(value)


def test_a_resumed_run_goes_on_behind_the_batch_that_was_used(tmp_path):
    """Not behind the one that was fetched ahead."""
    engine, model, optimizer, loader = private()
    run(engine, model, optimizer, one_ahead(loader), most=3)
    assert loader.position == 3
    run(engine, model, optimizer, loader)
    assert [u.tolist()[0] // 10 for u in engine.ledger.history()] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("line", range(1, 12))
def test_an_interrupt_while_sums_arrive_leaves_no_half_of_a_batch(line):
    """At every line of `_receive`, the batch is there as a whole or not at all."""
    engine, model, optimizer, loader = private()
    x, y, _ = next(iter(loader))
    loss = nn.functional.cross_entropy(model(x), y)
    lines = iter(range(1, 100))

    def interrupt(frame, event, argument):
        if frame.f_code.co_name == "_receive" and event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return interrupt

    torch.autograd.set_multithreading_enabled(False)
    sys.settrace(interrupt)
    try:
        loss.backward()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
        torch.autograd.set_multithreading_enabled(True)
    there = engine.training._waiting.batches
    with nullcontext() if there else pytest.raises(TrainingError, match="without a backward"):
        optimizer.step()
    assert engine.step == there


LEFT = """
import torch, anyorder as ao
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.ones(8, 2)), 2)
model = torch.nn.Linear(2, 1)
engine = ao.PrivacyEngine(ao.plan(loader=loader, epochs=1, epsilon=8, delta=1e-5, mechanism="independent"))
model, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader)
batches = iter(loader)
print(len(next(batches)[0]))
"""


def test_a_process_that_ends_within_an_iteration_says_nothing():
    done = processes.run("-c", LEFT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
