"""What a loop does with a batch beside its loss: writes into the model, copies, objects, hooks."""

import copy
import functools
import gc
import sys
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, default_collate

import anyorder as ao
from anyorder.clipping.coupling import LossWatch
from anyorder.errors import LoaderError, ModelError, TrainingError

ROWS = 8


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.shift, self.size = torch.zeros(3), 1.0

    def forward(self, x, size=1.0):
        return self.linear(x - self.mean - self.shift) / self.size / size


planned = functools.cache(ao.plan)


def private_of(model, batch_size=4, collate=None, rows=ROWS, path=None, **options):
    plan = planned(dataset_size=rows, batch_size=batch_size, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    data = TensorDataset(torch.randn(rows, 3), torch.arange(rows) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ao.PrivacyEngine(plan, key=bytes(32), checkpoint=path)
    return engine, *engine.make_private(model, optimizer, DataLoader(data, batch_size, collate_fn=collate), **options)


@torch.library.custom_op("anyorder_tests::write", mutates_args=("into",))
def write(numbers: torch.Tensor, into: torch.Tensor) -> None:
    into.copy_(numbers)


WRITERS = {
    "an operator": lambda held, x: torch.ops.aten.copy_.default(held, x.mean(0)),
    "an operator of one's own": lambda held, x: write(x.mean(0), held),
    "statistics": lambda held, x: torch.batch_norm_update_stats(x, held, torch.ones(3), 1.0),
    "a running mean": lambda held, x: F.batch_norm(x, held, torch.ones(3), training=True),
    "two results": lambda held, x: torch.max(x, 0, out=(held, torch.zeros(3, dtype=torch.long))),
    "a list": lambda held, x: torch._foreach_lerp_([held], [x.mean(0)], 1.0),
    "a table that is scaled": lambda held, x: F.embedding((x[:, 0] > 0).long(), held[None].T, max_norm=0.1),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_writes_by_another_way_makes_no_constant_of_a_batch(name):
    _, private, optimizer, loader = private_of(nn.Linear(3, 3))
    bank = torch.ones(3)
    with pytest.raises(ModelError, match="couples examples"):
        for x, y in loader:
            F.cross_entropy(private(x) * bank, y).backward()
            WRITERS[name](bank, x)
            optimizer.step()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", list(WRITERS)[:-1])
def test_what_writes_by_another_way_writes_nothing_into_the_model(name, after):
    _, private, _, loader = private_of(Scaled())
    x, y = next(iter(loader))
    before = private.module.linear.bias.detach().clone()
    loss = F.cross_entropy(private(x), y)
    if after:
        loss.backward()
    with pytest.raises(ModelError, match="are written into 'bias' of linear|into a list of tensors"):
        WRITERS[name](private.module.linear.bias.data, x)
    assert torch.equal(private.module.linear.bias, before)


def test_a_running_mean_that_is_a_frozen_parameter_is_no_constant():
    _, private, _, loader = private_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    mean = nn.Parameter(torch.zeros(3), requires_grad=False)
    outputs = private(x)
    F.batch_norm(x, mean, torch.ones(3), training=True)
    with pytest.raises(ModelError, match="numbers of the batch were written"):
        F.cross_entropy(outputs + mean, y).backward()


def test_a_frozen_network_with_public_statistics_may_be_in_the_loss():
    engine, private, _, loader = private_of(nn.Linear(3, 3))
    frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval().requires_grad_(False)
    for x, _ in loader:
        F.mse_loss(private(x), frozen(x)).backward()
        private.zero_grad()
    assert engine.training.loss_kept == "proved"
    assert type(frozen[1].running_mean) is torch.Tensor


WRITES = {
    "a buffer": lambda module, x: module.mean.mul_(0.9).add_(0.1 * x.mean(0)),
    "a buffer's place by an index of the batch": lambda module, x: module.mean[x[0].argmax()].add_(1),
    "an alias of a buffer": lambda module, x: module.mean[:2].copy_(x.mean(0)[:2]),
    "data of a buffer": lambda module, x: module.mean.data.add_(x.mean(0)),
    "a buffer by its name": lambda module, x: torch.mean(x, 0, out=module.mean),
    "another buffer": lambda module, x: setattr(module, "mean", x.mean(0)),
    "a parameter": lambda module, x: module.linear.bias.data.add_(x.mean(0)),
    "a Variable": lambda module, x: module.linear.bias.data.add_(torch.autograd.Variable(x).mean(0)),
    "an attribute in place": lambda module, x: module.shift.add_(x.mean(0)),
    "another attribute": lambda module, x: setattr(module, "shift", x.mean(0)),
    "a number": lambda module, x: setattr(module, "size", x.abs().max().item()),
    "a running mean": lambda module, x: F.batch_norm(x, module.mean, torch.ones(3), training=True),
    "another parameter": lambda module, x: setattr(module.linear, "bias", nn.Parameter(x.mean(0))),
    "a new parameter": lambda module, x: module.register_parameter("added", nn.Parameter(x.mean(0))),
    "a state in its place": lambda module, x: module.load_state_dict(
        {name: value + x.mean() for name, value in module.state_dict().items()}, assign=True
    ),
    "memory of a parameter": lambda module, x: setattr(module.linear.bias, "data", x.mean(0)),
    "memory of a buffer": lambda module, x: setattr(module.mean, "data", x.max(0).values),
    "a vector": lambda module, x: nn.utils.vector_to_parameters(x.mean(0).repeat(4), module.parameters()),
    "a swapped parameter": lambda module, x: torch.utils.swap_tensors(module.linear.bias, nn.Parameter(x.mean(0))),
}


@pytest.mark.filterwarnings("ignore:no output depends on added")
@pytest.mark.parametrize(
    ("name", "after"), [*product(list(WRITES)[:-1], [False]), *product(WRITES, [True])]
)  # torch swaps no tensor that is weakly referenced, as those of an open batch are
def test_numbers_of_a_batch_are_not_written_into_the_model(name, after):
    """A running mean of inputs, say: all later gradients would follow from every unit so far, without noise."""
    _, private, optimizer, loader = private_of(Scaled())
    told = (
        "written into|put something of a batch|put into an attribute|was replaced after make_private|exchanged, added"
    )
    told += "|was given memory"
    with pytest.raises((ModelError, TrainingError), match=told):
        for x, y in loader:
            number = x.abs().max().item()
            if not after:
                WRITES[name](private.module, x)
            F.cross_entropy(private(x), y).backward()
            if after:
                if name == "a number":
                    private.module.size = number
                else:
                    WRITES[name](private.module, x)
            optimizer.step()


NUMBERS = {
    "a parameter": lambda module, number: module.linear.bias.detach().add_(number),
    "a parameter's data": lambda module, number: module.linear.bias.data.fill_(number),
    "a parameter as init has it": lambda module, number: nn.init.constant_(module.linear.bias, number),
    "what was made of it": lambda module, number: module.linear.bias.data.copy_(torch.ones(3) * number),
    "a buffer's data": lambda module, number: module.mean.data.fill_(number),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_were_taken_out_before_the_backward_pass_are_not_written_into_the_model(name):
    _, private, optimizer, loader = private_of(Scaled())
    x, y = next(iter(loader))
    number = x.abs().max().item()
    F.cross_entropy(private(x), y).backward()
    optimizer.step()
    with pytest.raises(ModelError, match="numbers of the batch are written into"):
        NUMBERS[name](private.module, number)


@pytest.mark.parametrize("kind", [torch.sum, lambda x: x])
def test_forward_reads_no_tensor_of_the_loop(kind):
    """In a list that is no attribute of the model, say: each example would see those of all."""
    held = []

    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * held[0].mean()

    _, private, _, loader = private_of(Reads(3, 3))
    x, _ = next(iter(loader))
    held.append(kind(x))
    with pytest.raises(
        ModelError, match="the private model, reads a tensor of the batch|the model reads a tensor of a batch"
    ):
        private(x)


def test_a_number_of_the_batch_is_not_given_to_the_model():
    _, private, _, loader = private_of(Scaled())
    x, _ = next(iter(loader))
    with pytest.raises(ModelError, match=r"number that was taken out of the batch"):
        private(x, x.abs().max().item())


@pytest.mark.parametrize("name", ["another attribute", "another buffer", "a new parameter", "another parameter"])
def test_what_is_put_into_the_model_after_the_last_step_is_in_no_certificate(name):
    engine, private, optimizer, loader = private_of(Scaled())
    for x, y in loader:
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
    engine.certificate()
    WRITES[name](private.module, x)
    for told in (engine.certificate, engine.save):
        with pytest.raises(ModelError, match="put something of a batch"):
            told()


@pytest.mark.parametrize("name", ["another parameter", "a swapped parameter"])
def test_a_parameter_of_numbers_of_a_batch_is_not_stepped_on(name):
    _, private, optimizer, loader = private_of(Scaled())
    x, y = next(iter(loader))
    F.cross_entropy(private(x), y).backward()
    WRITES[name](private.module, x)
    with pytest.raises(TrainingError, match="was replaced after make_private"):
        optimizer.step()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["a vector", "memory of a parameter", "memory of a buffer"])
def test_the_model_is_given_no_memory_of_a_batch(name, after):
    _, private, _, loader = private_of(Scaled())
    x, y = next(iter(loader))
    if after:
        F.cross_entropy(private(x), y).backward()
    before = copy.deepcopy(private.module.state_dict())
    with pytest.raises(ModelError, match="are written into"):
        WRITES[name](private.module, x)
    assert all(value.equal(before[key]) for key, value in private.module.state_dict().items())


GIVEN = {
    "a mean": lambda x, out: x.mean(0),
    "an alias": lambda x, out: x.mean(0).data,
    "one of two results": lambda x, out: x.max(0).values,
    "an output": lambda x, out: out.detach()[0],
    "what the loader gave": lambda x, out: x[0],
    "the same, and what is read of it": lambda x, out: x[:1].data.squeeze(0),
}
USED = {
    "itself": lambda bank, out: out * bank,
    "what is made of it": lambda bank, out: out * (bank * 2),
    "a copy": lambda bank, out: out * bank.clone(),
    "a row of a table": lambda bank, out: out * F.embedding(torch.zeros(1, dtype=torch.long), bank[None]),
    "a weight": lambda bank, out: F.linear(out, torch.diag(bank)),
}


@pytest.mark.parametrize("when", ["before the loss", "after the loss", "after the backward pass"])
@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_constant_whose_memory_is_of_a_batch_is_none(batch_size, name, when):
    """`held.data = made`, of which torch tells nobody, nor counts a version. One row alone couples nothing."""
    for use, way in [*((use, "data") for use in USED), ("itself", "real"), ("a copy", "real")]:
        _, private, optimizer, loader = private_of(nn.Linear(3, 3), batch_size)
        bank, used, steps = torch.ones(3), USED[use], 0

        def give(x, outputs, place, bank=bank, way=way):
            if when == place:
                setattr(bank, way, GIVEN[name](x, outputs))

        alone = batch_size == 1 and when == "before the loss" and way == "data"  # each batch by itself
        refused = pytest.raises((ModelError, TrainingError), match="couples examples|written in place since")
        with nullcontext() if alone else refused:
            for x, y in loader:
                outputs = private(x)
                give(x, outputs, "before the loss")
                loss = F.cross_entropy(used(bank, outputs), y)
                give(x, outputs, "after the loss")
                loss.backward()
                give(x, outputs, "after the backward pass")
                optimizer.step()
                steps += 1
        read_before = when == "after the loss" and use != "itself"
        assert steps <= (ROWS if alone else batch_size == 1 or when == "after the backward pass" or read_before)


def test_memory_of_a_batch_makes_no_public_input_generator_or_network():
    for name in ("input", "generator", "network"):
        _, private, optimizer, loader = private_of(nn.Linear(3, 3))
        frozen, code = nn.Linear(3, 3).requires_grad_(False), torch.ones(4, 3)
        batches = iter(loader)
        x, y = next(batches)
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
        code.data = 0.9 * code + 0.1 * x.mean(0)
        if name == "network":
            frozen.weight.data = x[:3]
        x, y = next(batches)
        with pytest.raises(ModelError, match="of an earlier batch|numbers of the batch were written|require gradients"):
            if name == "input":
                private(code * 2)
            elif name == "generator":
                private(nn.Linear(3, 3)(code)).sum().backward()
            else:
                F.mse_loss(private(x), frozen(torch.ones(4, 3))).backward()


def test_what_a_loss_was_made_of_is_not_exchanged_before_its_backward_pass():
    """What a graph saved is the new memory, whose rows may be others'."""
    for name, given in product(("x", "outputs", "made"), ("rows", "public")):
        _, private, _, loader = private_of(nn.Linear(3, 3))
        x, _ = next(iter(loader))
        outputs = private(x)
        made = outputs * outputs
        loss = (made * made * x).mean()
        {"x": x, "outputs": outputs, "made": made}[name].data = x.flip(0) if given == "rows" else torch.ones(4, 3)
        with pytest.raises(ModelError, match="numbers of the batch were written"):
            loss.backward()


def test_a_running_mean_by_data_that_no_loss_reads_is_the_loops_own():
    engine, private, optimizer, loader = private_of(nn.Linear(3, 3))
    mean, zeros = torch.zeros(3), torch.ones(3)
    for x, y in loader:
        mean.data = 0.9 * mean.data + 0.1 * x.mean(0)
        zeros.data = torch.zeros_like(x)[0]
        F.cross_entropy(private(x) + zeros, y).backward()
        optimizer.step()
        mean.data = 0.9 * mean.data + 0.1 * x.mean(0)
    assert engine.training.loss_kept == "proved"


def test_a_constant_of_which_a_batch_only_took_the_shape_stays_one():
    engine, private, optimizer, loader = private_of(nn.Linear(3, 3))
    bank = torch.ones(3)
    for x, y in loader:
        F.cross_entropy(private(x) * bank.expand_as(x) * torch.broadcast_tensors(bank, x)[0], y).backward()
        assert bank.expand_as(x).shape == torch.broadcast_tensors(bank, x)[0].shape
        optimizer.step()
    assert engine.training.loss_kept == "proved"


def test_a_parameter_that_is_replaced_by_public_numbers_is_refused_for_it_would_not_be_trained():
    _, private, _, loader = private_of(Scaled())
    private.module.load_state_dict(Scaled().state_dict(), assign=True)
    with pytest.raises(TrainingError, match="was replaced after make_private"):
        private(next(iter(loader))[0])


def test_other_tensors_may_be_written():
    _, private, optimizer, loader = private_of(Scaled())
    mean = torch.zeros(3)
    for x, y in loader:
        mean.mul_(0.9).add_(0.1 * x.mean(0))
        F.cross_entropy(private(x), y).backward()
        optimizer.step()


class Keeper(nn.Module):
    """Of which an output is a constant."""

    def __init__(self, held):
        super().__init__()
        self.linear, self.held = nn.Linear(3, 3), [held]
        self.own = held

    def forward(self, x):
        return self.linear(x), self.held[0][1:]


@pytest.mark.parametrize("how", ["loss", "after", "no_grad", "eval"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter, nn.Buffer])
def test_what_is_written_into_outputs_is_not_written_into_the_model(kind, rows, how):
    """An output that is the same for all rows may be a parameter, or an attribute, which later batches would read."""
    _, private, optimizer, loader = private_of(Keeper(kind(torch.zeros(2, 3))), rows, rows=5 * rows)
    optimizer.param_groups[0]["lr"] = 0.0
    held, before = private.module.held[0], private.module.held[0].detach().clone()
    for x, y in loader:
        output, constant = private(x)
        if how == "eval":
            private.eval()
        with torch.set_grad_enabled(how != "no_grad"):
            constant = private(x)[1] if how in ("no_grad", "eval") else constant
        private.train()
        loss = F.cross_entropy(output, y)
        if how == "after":
            loss.backward()
        constant.detach()[0].add_(x.detach()[0])
        if how != "after":
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert held.equal(before)


@dataclass
class Named:
    x: torch.Tensor
    y: torch.Tensor


class Held:
    def __init__(self, x, y):
        self.x, self.y = x, y


class ByName(dict):
    x, y = property(lambda self: self["x"]), property(lambda self: self["y"])


OBJECTS = (
    Named, Held, namedtuple("Tuple", "x y"), lambda x, y: SimpleNamespace(x=x, y=y), lambda x, y: ByName(x=x, y=y)
)  # fmt: skip


@pytest.mark.parametrize("kind", OBJECTS)
def test_batches_that_are_objects_are_followed(kind):
    def collate(rows):
        return kind(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]).float())

    engine, private, optimizer, loader = private_of(nn.Linear(3, 1), collate=collate)
    for batch in loader:
        with pytest.raises(ModelError, match="couples examples"):
            F.mse_loss(private(batch.x).squeeze(1), batch.y - batch.y.mean()).backward()
        F.mse_loss(private(batch.x).squeeze(1), batch.y).backward()
        optimizer.step()
    assert engine.training.loss_kept == "proved"


@dataclass
class WithNumber(Named):
    temperature: float = 2.0


@pytest.mark.parametrize("value", [2.0, 3.0])
def test_a_number_of_a_batch_is_the_default_of_its_class(value):
    _, private, _, loader = private_of(
        nn.Linear(3, 3), collate=lambda rows: WithNumber(*default_collate(rows), temperature=value)
    )
    with nullcontext() if value == 2 else pytest.raises(LoaderError, match="the default of a field"):
        batch = next(iter(loader))
        F.cross_entropy(private(batch.x) / batch.temperature, batch.y).backward()


class Leaves(Held):
    def __del__(self):
        SHARED.append(self.x)


def test_a_batch_of_a_class_that_runs_code_when_it_goes_is_refused():
    """It could keep what rows have together, of the batch before anybody watches it."""
    with pytest.raises(LoaderError, match="without __del__"):
        next(iter(private_of(nn.Linear(3, 3), collate=lambda rows: Leaves(*default_collate(rows)))[3]))


class Listed(list):
    pass


def test_what_a_class_of_ones_own_lists_is_followed():
    engine, private, _, loader = private_of(nn.Linear(3, 3), collate=lambda rows: Listed(default_collate(rows)))
    batch = next(iter(loader))
    with pytest.raises(ModelError, match="takes rows of the batch together"):
        private(batch[0] - batch[0].mean(0))
    F.cross_entropy(private(batch[0]), batch[1]).backward()
    assert engine.training.loss_kept == "proved"


class Summed(TensorDataset):
    """Gives several examples at once, with their mean."""

    def __getitem__(self, indices):
        x, y = super().__getitem__(indices)
        return x, y, x.mean(0)


@pytest.mark.parametrize("change", [lambda mean: mean, lambda mean: 2 * mean, lambda mean: mean.expand(4, 3)])
def test_what_is_computed_of_a_tensor_beside_the_rows_is_not_given_to_the_model(change):
    rows = Summed(torch.randn(ROWS, 3), torch.arange(ROWS) % 3)
    plan = ao.plan(dataset_size=ROWS, batch_size=4, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    order = BatchSampler(range(ROWS), 4, False)
    loader, model = DataLoader(rows, batch_size=None, sampler=order), nn.Linear(3, 3)
    private, _, loader = ao.PrivacyEngine(plan, key=bytes(32)).make_private(
        model, torch.optim.SGD(model.parameters(), 0.1), loader
    )
    x, _, mean = next(iter(loader))
    with pytest.raises(ModelError, match="not one row for each example"):
        private(x - change(mean))


@pytest.mark.parametrize("given", [lambda x, made: (x,), lambda x, made: (made,), lambda x, made: (x, made)])
def test_a_batch_with_texts_is_promised(given):
    """What is made of them is taken for rows, and a length may be in the loss."""
    engine, private, _, loader = private_of(
        Scaled(), collate=lambda rows: (*default_collate(rows), [str(1 + x[0].abs().item()) for x, _ in rows])
    )
    x, y, texts = next(iter(loader))
    made = torch.tensor([[float(text)] * 3 for text in texts])
    F.cross_entropy(private(*given(x, made / made.mean(0))), y).backward()
    assert engine.training.loss_kept == "promised"


@pytest.mark.parametrize("kept", [lambda x, loss: x.mean(0), lambda x, loss: [loss.detach()]])
def test_a_checkpoint_keeps_no_tensor_of_a_batch(kept, tmp_path):
    engine, private, optimizer, loader = private_of(nn.Linear(3, 3), path=tmp_path / "run.ckpt")
    x, y = next(iter(loader))
    loss = F.cross_entropy(private(x), y)
    loss.backward()
    optimizer.step()
    with pytest.raises(TrainingError, match="a tensor of a batch"):
        engine.save(extra={"held": kept(x, loss)})
    engine.save(extra={"loss": loss.item(), "weights": torch.ones(3), "number": 3})


@pytest.mark.parametrize("set_rate", [
    lambda group, loss: group.update(lr=loss.detach()),
    lambda group, loss: group.update(weight_decay=loss.item()),
    lambda group, loss: group["lr"].fill_(loss.detach()),
    lambda group, loss: group.update(betas=(0.9, loss.item())),
    lambda group, loss: group["rate"].copy_(loss.detach()),
])  # fmt: skip
def test_no_setting_of_an_optimizer_is_of_a_batch(set_rate):
    _, private, optimizer, loader = private_of(nn.Linear(3, 3))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    optimizer.param_groups[0]["rate"] = nn.Parameter(torch.tensor(0.1), requires_grad=False)
    x, y = next(iter(loader))
    loss = F.cross_entropy(private(x), y)
    set_rate(optimizer.param_groups[0], loss)
    loss.backward()
    with pytest.raises(TrainingError, match="a setting of the optimizer"):
        optimizer.step()


def test_a_copy_of_a_tensor_of_the_batch_is_followed():
    _, private, _, loader = private_of(nn.Linear(3, 1))
    x, y = next(iter(loader))
    with pytest.raises(ModelError, match="couples examples"):
        F.mse_loss(private(x).squeeze(1), y - copy.copy(y.float()).mean()).backward()


@dataclass
class Measured:
    mean: object


COPIES = {
    "copied": lambda mean: copy.copy(mean),
    "copied whole": lambda mean: copy.deepcopy(mean),
    "in a list": lambda mean: copy.deepcopy([mean])[0],
    "as a dict": lambda mean: asdict(Measured(mean))["mean"],
}


@pytest.mark.parametrize("kind", ["a tensor", "a number"])
@pytest.mark.parametrize("name", COPIES)
def test_copies_are_of_the_batch_after_its_backward_pass_too(name, kind):
    _, private, optimizer, loader = private_of(nn.Linear(3, 3))
    kept = torch.zeros(3)
    with pytest.raises(ModelError, match="an earlier batch|taken out of the batch"):
        for x, y in loader:
            number = x.mean().item()
            F.cross_entropy(private(x) + kept, y).backward()
            kept = COPIES[name](x.mean(0) if kind == "a tensor" else number)
            optimizer.step()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_output_that_is_no_probability_adds_zero_and_raises_nothing(reduction):
    def gradients(value):
        torch.manual_seed(0)
        engine, private, optimizer, loader = private_of(nn.Linear(3, 1), loss_reduction="mean")
        for x, y in loader:
            x[1] = value
            outputs = torch.sigmoid(private(x)).squeeze(1)
            loss = F.binary_cross_entropy(outputs, (y > 1).float(), reduction=reduction)
            assert loss.dim() == (reduction == "none")
            loss.mean().backward()
            optimizer.step()
            yield private.module.weight.grad.clone()
            private.zero_grad()
        assert engine.training.loss_kept == "promised"  # for a row is written into

    for nan, infinite in zip(gradients(torch.nan), gradients(torch.inf), strict=True):
        assert torch.equal(nan, infinite)
    _, private, _, loader = private_of(nn.Linear(3, 1))
    x, y = next(iter(loader))
    outputs = torch.sigmoid(private(x)).squeeze(1)
    expected = F.binary_cross_entropy(outputs.detach().clone(), (y > 1).float(), reduction=reduction)
    assert torch.equal(F.binary_cross_entropy(outputs, (y > 1).float(), reduction=reduction), expected)


class Shared(nn.Module):
    """Reads what stands in a list of the loop."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) + SHARED[0].sum()


SHARED = [torch.zeros(3)]


@pytest.mark.parametrize("when", ["before", "on the way back", "of an earlier batch", "a number"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_model_reads_no_tensor_that_the_loop_has_of_a_batch(when, chunk_size):
    """By chunks the model runs again on the way back; else what it reads then may be anything."""
    SHARED[0] = torch.zeros(3)
    _, private, optimizer, loader = private_of(Shared(), chunk_size=chunk_size)

    def train():
        for x, y in loader:
            if when == "before":
                SHARED[0] = x.mean(0)
            loss = F.cross_entropy(outputs := private(x), y)
            if when == "on the way back":
                SHARED[0] = outputs.detach().mean(0)
            loss.backward()
            optimizer.step()
            SHARED[0] = torch.zeros(3) if when == "on the way back" else outputs.detach().mean(0)
            SHARED[0] = torch.tensor(float(len(x))) if when == "a number" else SHARED[0]

    if when == "a number" or (when == "on the way back" and chunk_size is None):
        train()
    else:
        with pytest.raises(ModelError, match="reads a tensor of a batch that it was not given"):
            train()


def test_hooks_on_what_a_loss_saves_are_refused():
    """As of a compression to eight bits, by the largest number of the batch."""
    _, private, _, loader = private_of(nn.Linear(3, 1))
    x, y = next(iter(loader))
    outputs = private(x)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t / t.abs().max(), lambda t: t),
        pytest.raises(ModelError, match="saved tensors"),
    ):
        F.mse_loss(outputs.exp().squeeze(1), y.float()).backward()


def test_a_loss_that_torch_would_run_again_on_the_way_back_is_refused():
    """It would read what its names stand for then: here a mean of the batch in the place of a constant."""
    _, private, _, loader = private_of(nn.Linear(3, 3))
    x, _ = next(iter(loader))
    outputs, held = private(x), [torch.ones(3)]
    with pytest.raises(ModelError, match=r"torch\.utils\.checkpoint around the loss"):
        loss = checkpoint(lambda out: (out * held[0]).sum(1).mean(), outputs, use_reentrant=False)
        held[0] = x.detach().mean(0)
        loss.backward()


def test_what_one_run_wrote_by_an_alias_is_refused_in_another_of_the_process():
    """Two engines in turn, or one that is resumed: a constant of the second has numbers of the first's batch."""
    constant, begun = torch.ones(3), private_of(nn.Linear(3, 3))
    for _ in range(2):
        _, private, _, loader = begun
        x, y = next(iter(loader))
        outputs = private(x)
        if constant.equal(torch.ones(3)):
            F.cross_entropy(outputs * constant, y).backward()
            constant.data.copy_(x.detach().mean(0))
            begun = private_of(nn.Linear(3, 3))
        else:
            with pytest.raises(ModelError, match="numbers of an earlier batch"):
                F.cross_entropy(outputs * constant, y).backward()


CHANGES = {
    "flips": lambda x, k: x.__setitem__(k, x[k].flip(1)),
    "noise": lambda x, k: x.__setitem__(k, x[k] + torch.randn(x.shape)[k]),
    "indices": lambda x, k: x.__setitem__(k.nonzero()[:, 0], -x[k.nonzero()[:, 0]]),
    "both": lambda x, k: x.__setitem__(k.nonzero()[:, 0], -x[k]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rows", list(product([False, True], repeat=3)))
def test_rows_at_constant_places_may_be_changed(change, rows):
    """An augmentation of some examples: each row is of its example as before."""
    engine, private, optimizer, loader = private_of(nn.Linear(3, 3))
    masks = [(*rows, True), (*rows[::-1], False)]  # what was found of one is not of all
    for (x, y), k in zip(loader, masks, strict=True):
        CHANGES[change](x, torch.tensor(k))
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
    assert engine.training.loss_kept == "proved"


def test_rows_that_go_elsewhere_in_the_next_batch_are_not_its_own():
    _, private, optimizer, loader = private_of(nn.Linear(3, 3))
    batches, k = iter(loader), torch.tensor([0, 2])
    x, y = next(batches)
    x[k] = -x[k]
    F.cross_entropy(private(x), y).backward()
    optimizer.step()
    other, _ = next(batches)
    other[k.flip(0)] = -other[k]
    with pytest.raises(ModelError, match="rows of others"):
        private(other)


@pytest.mark.parametrize("places", [[True, False, True, False], [0, 0, 0, 0], [2, 3, 0, 1], [0, 2]])
@pytest.mark.parametrize("written", [False, True])
def test_a_loss_that_is_run_row_by_row_chooses_no_rows(places, written):
    """Of one row alone, or of copies of it, the places are of other rows: the gradient would be another."""
    _, private, _, loader = private_of(nn.Linear(3, 3))
    x, _ = next(iter(loader))
    outputs, k = private(x).clone(), torch.tensor(places)
    chosen = 0.1 * outputs[k]
    if written:
        outputs[k] = chosen
    with pytest.raises(ModelError, match="rows in another order"):
        torch.fft.rfft(outputs if written else chosen, dim=1).abs().mean().backward()


OTHERS = {
    "rows in another order": lambda x, k: x.__setitem__(k, x[k].flip(0)),
    "rows of other places": lambda x, k: x.__setitem__(k, x[k.flip(0)]),
    "one row": lambda x, k: x.__setitem__(k, x[k][:1]),
    "a mask of bytes": lambda x, k: x.__setitem__(torch.ones(4, dtype=torch.uint8), x[torch.ones(4).long()]),
    "a column": lambda x, k: x.__setitem__(torch.tensor([0, 1, 3]), x[torch.tensor([0, 1, 3])][:, 0]),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("change", OTHERS)
def test_rows_of_others_are_not_written(change):
    _, private, _, loader = private_of(nn.Linear(3, 3))
    x, _ = next(iter(loader))
    OTHERS[change](x, torch.tensor([True, False, True, True]))
    with pytest.raises(ModelError, match="rows"):
        private(x)


def expanded(out, x, y):
    centre = torch.ones(3)
    shown = centre.expand_as(out)
    centre += out.detach().mean(0)
    return out - shown


def viewed(out, x, y):
    centre = torch.ones(ROWS // 2, 3)
    shown = centre.view_as(out)
    centre.add_((out - shown).detach().mean(0))
    return out - shown


def chosen_of_a_parameter(out, x, y):
    table = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    table[y[0]].lerp_(out.detach()[0], 0.5)
    return out * (table + 0)[0]


def chosen_of_a_subclass(out, x, y):
    table = torch.ones(3, 3).as_subclass(Own)
    table[y[0]].add_(out.detach()[0])
    return out * (table.as_subclass(torch.Tensor) + 0)[0]


def base_that_moved(out, x, y):
    centre = torch.ones(3, 1)
    turned = centre.T
    centre.data = torch.zeros(3, 1)
    alias = centre.detach()
    centre.add_(out.detach().mean(0)[:, None])
    assert turned.sum() == 3
    return out * (alias + 1).T


def view_that_moved(out, x, y):
    centre = torch.ones(3, 1)
    one, other = centre.T, centre[:, 0]
    one.data = torch.zeros(1, 3)
    centre.add_(out.detach().mean(0)[:, None])
    return out * (other + 1)


def array(out, x, y):
    centre = np.ones(3, np.float32)
    torch.from_numpy(centre).add_(out.detach().mean(0))
    return out * torch.from_numpy(centre)


def copy_of_an_array(out, x, y):
    centre = np.ones(3, np.float32)
    torch.from_numpy(centre).add_(out.detach().mean(0))
    return out * torch.tensor(centre)


def the_same_by_a_function(out, x, y):
    centre = torch.ones(3)
    same, _ = torch.atleast_1d(centre, out)
    same.add_(out.detach().mean(0))
    return out * centre


def detached_view(out, x, y):
    centre = torch.ones(ROWS // 2, 3)
    centre.view_as(out).detach().add_(out.detach().mean(0))
    return out - centre


def detached_row(out, x, y):
    centres = torch.ones(3, 3)
    centres[y[0]].detach().lerp_(out.detach()[0], 0.5)
    return out * centres.sum(0)


def data_of_a_row(out, x, y):
    centres = torch.ones(8, 3)
    centres.narrow(0, y[0], 1).data.add_(out.detach().mean(0))
    return out * centres.sum(0)


def by_vmap(out, x, y):
    bank = torch.zeros(ROWS // 2, 3)
    torch.vmap(lambda held, row: held.add_(row.sum()))(bank, out.detach())
    return out + bank.mean(0)


def by_a_criterion(out, x, y):
    bank = torch.zeros(ROWS // 2, 3)

    def criterion(outputs, held):
        held.add_(outputs.sum())
        return outputs.sum()

    ao.clipping.ExampleLoss(criterion)(out.detach(), bank)
    return out + bank.mean(0)


def without_versions(out, x, y):
    with torch.inference_mode():
        centre = torch.zeros(3)
        torch.mean(out.detach(), 0, out=centre)
    return out * (centre + 1)


def of_two_batches_memory(out, x, y):
    _, other, _, loader = private_of(nn.Linear(3, 3))
    (own, _), centre = next(iter(loader)), x.new_zeros(3)
    shown = centre.expand_as(other(own))
    centre.add_(out.detach().mean(0))
    return out * (shown + 1)


class Own(torch.Tensor):
    pass


SHOWN = (
    expanded, viewed, chosen_of_a_parameter, chosen_of_a_subclass, base_that_moved, view_that_moved, array,
    copy_of_an_array, the_same_by_a_function, detached_view, detached_row, data_of_a_row,
    by_vmap, by_a_criterion, without_versions, of_two_batches_memory,
)  # fmt: skip


@pytest.mark.parametrize("way", SHOWN)
def test_numbers_of_the_batch_are_read_in_no_other_tensor(way):
    _, private, _, loader = private_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    with pytest.raises(ModelError, match="were written|couples examples"):
        F.cross_entropy(way(private(x), x, y), y).backward()


def test_what_takes_a_row_by_a_label_and_writes_nothing_leaves_the_others_public():
    engine, private, _, loader = private_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    outputs, centres, shape = private(x), torch.ones(3, 3), torch.ones(4, 3)
    _ = outputs.detach() - centres[y[0]].detach()
    shape.data = torch.ones_like(x)
    F.cross_entropy(outputs * centres[0] * shape, y).backward()
    assert engine.training.loss_kept == "proved"


def test_numbers_of_a_batch_are_not_those_of_another_of_one_row():
    """Two runs in turn: what one writes into a tensor of the other's open batch moves no gradient there."""
    (_, private, _, loader), (_, other, _, others) = (private_of(nn.Linear(3, 3), rows) for rows in (4, 1))
    (x, _), (one, label) = next(iter(loader)), next(iter(others))
    outputs, bank = other(one), torch.zeros(3)
    shown = bank.expand_as(outputs)
    bank += private(x).detach().mean(0)
    with pytest.raises(ModelError, match="couples examples"):
        F.cross_entropy(outputs * shown, label).backward()


@pytest.mark.parametrize("after", [False, True], ids=["before backward", "after backward"])
def test_a_function_under_vmap_that_writes_weights_is_refused_and_no_certificate_is_given(after):
    engine, private, optimizer, loader = private_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    loss = F.cross_entropy(private(x), y)
    if after:
        loss.backward()
        optimizer.step()
    with pytest.raises(ModelError, match="are written into 'weight'"):
        torch.vmap(lambda weight, row: weight.add_(row))(private.module.weight.data, x[:3])
    with pytest.raises((ModelError, TrainingError), match="of a batch"):
        engine.certificate()


@pytest.mark.parametrize("state", [False, True], ids=["a constant", "the optimizer's state"])
def test_memory_that_an_earlier_batch_was_written_into_is_given_to_no_other(state):
    _, private, _, loader = begun = private_of(nn.Linear(3, 3))
    optimizer, (bank, constant) = begun[2], torch.zeros(2, 3)
    for step, (x, y) in enumerate(loader):
        if step:
            with pytest.raises((ModelError, TrainingError), match="of a batch|of an earlier batch"):
                F.cross_entropy(private(x) * (1 if state else constant), y).backward()
                optimizer.step()
            return
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
        bank.add_(x.mean(0))
        if state:
            optimizer.state[private.module.bias]["momentum_buffer"] = constant
        constant.data = bank
    raise AssertionError("read")


@pytest.mark.parametrize("first", [False, True])
def test_an_alias_that_is_written_between_two_batches_is_known_to_a_loss_of_both(first):
    _, private, _, loader = private_of(nn.Linear(3, 3))
    constant, batches = torch.ones(3), iter(loader)
    x, _ = next(batches)
    one = ao.clipping.ExampleLoss(lambda out, target: (constant * (out - target).square()).mean())(private(x), x)
    constant.data.add_(x.mean(0))
    x, y = next(batches)
    other = F.cross_entropy(private(x), y)
    with pytest.raises(ModelError, match="couples examples"):
        (one + other if first else other + one).backward()


def test_numbers_of_a_run_that_is_gone_are_still_of_its_batch():
    constant, (_, private, _, loader) = torch.ones(3), private_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    number = x.mean().item()
    del private, loader, x, y
    gc.collect()
    constant.data.fill_(number)
    _, private, _, loader = private_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    with pytest.raises(ModelError, match="couples examples"):
        F.cross_entropy(private(x) * constant, y).backward()


def test_nothing_of_one_run_is_written_into_the_model_of_another():
    (_, _, _, loader), (_, other, _, _) = private_of(nn.Linear(3, 3)), private_of(nn.Linear(3, 3))
    x, _ = next(iter(loader))
    with pytest.raises(ModelError, match="are written into 'weight'"):
        other.module.weight.data.add_(x.mean(0))


@pytest.mark.parametrize("after", [False, True], ids=["before backward", "after backward"])
@pytest.mark.parametrize("name", ["a table", "a list of counts", "a log"])
def test_metrics_by_hand_are_no_search_a_row(name, after, monkeypatch):
    """Each takes a view of a row, adds to it, and puts it back. It is no alias: other losses are proved."""
    searches, collected = [], gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(0) or collected())
    engine, private, optimizer, loader = private_of(nn.Linear(3, 3))
    table, counts, log = torch.zeros(3, 3), torch.zeros(3), torch.zeros(4, 3)
    for step, (x, y) in enumerate(loader):
        outputs = private(x)
        loss, hits = F.cross_entropy(outputs, y), (outputs.argmax(1) == y).float()
        if after:
            loss.backward()
        for row, (guess, label) in enumerate(zip(outputs.argmax(1), y, strict=True)):
            if name == "a table":
                table[label, guess] += 1
            elif name == "a list of counts":
                counts[y[row]] += hits[row]
            else:
                one = log[row]
                one[step] += loss.detach()
        if not after:
            loss.backward()
        optimizer.step()
    assert len(searches) <= 4
    assert engine.training.loss_kept == "proved"


def test_a_public_view_is_of_the_batch_too_where_an_alias_is_held():
    _, private, _, loader = private_of(nn.Linear(3, 3))
    x, _ = next(iter(loader))
    centre = torch.ones(3)
    alias, shown = centre.detach(), centre.expand_as(x)
    centre += x.mean(0)
    with pytest.raises(ModelError, match="were written"):
        private(x - shown)
    assert not alias.equal(torch.ones(3))


def test_a_view_of_another_engines_batch_is_no_constant():
    centre, engines = torch.ones(3), [private_of(nn.Linear(3, 3)) for _ in range(2)]
    (x, y), (other, _) = (next(iter(loader)) for _, _, _, loader in engines)
    shown = centre.expand_as(other)
    centre += engines[0][1](x).detach().mean(0)
    with pytest.raises(ModelError, match="were written|two batches"):
        F.cross_entropy(engines[1][1](other) - shown, y).backward()


@pytest.mark.parametrize("after", [False, True], ids=["before backward", "after backward"])
def test_a_row_of_a_weight_that_a_label_chose_is_not_written(after):
    _, private, _, loader = private_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    before, loss = copy.deepcopy(private.module.state_dict()), F.cross_entropy(private(x), y)
    if after:
        loss.backward()
    with torch.no_grad(), pytest.raises(ModelError, match="are written into 'weight'"):
        private.module.weight[y[3]].copy_(x[3])
    assert all(torch.equal(value, before[name]) for name, value in private.module.state_dict().items())


def by_backward(private, x, y):
    x.requires_grad_(True)
    F.cross_entropy(private(x), y).backward()


def by_grad(private, x, y):
    x.requires_grad = True
    torch.autograd.grad(F.cross_entropy(private(x), y), x)


def of_a_copy(private, x, y):
    moved = x.clone().detach().requires_grad_(True)
    torch.autograd.grad(F.cross_entropy(private(moved), y), moved)


@pytest.mark.parametrize("attack", [by_backward, by_grad, of_a_copy])
def test_adversarial_examples_are_told_what_to_write(attack):
    _, private, optimizer, loader = private_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    with pytest.raises(ModelError, match=r"adversarial examples torch.autograd.grad of model.module\(x\)"):
        attack(private, x, y)
    moved = x.detach().clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(F.cross_entropy(private.module(moved), y, reduction="sum"), moved)
    F.cross_entropy(private(x.detach() + slope.sign()), y).backward()
    optimizer.step()


def test_a_place_of_a_list_is_written_and_no_other_constant_is_refused():
    """`losses[0][1] += loss` goes by a view of the row, which another variable may hold as well."""
    _, private, optimizer, loader = private_of(nn.Linear(3, 3))
    losses, constant = [torch.zeros(3) for _ in range(2)], torch.ones(3)
    held = losses[0][:]
    for step, (x, y) in enumerate(loader):
        outputs = private(x)
        if step:
            with pytest.raises(ModelError, match="numbers of an earlier batch"):
                F.cross_entropy(outputs * (held + 1), y).backward()
            return
        F.cross_entropy(outputs * constant, y).backward()
        losses[0][1] += F.cross_entropy(outputs, y).detach()
        losses[1][:2][0].add_(outputs.detach().mean())
        optimizer.step()
        assert not LossWatch.escaped
    raise AssertionError("read")


ALIASES = {
    "an array": lambda held: held.numpy(),
    "an array of a view": lambda held: held[1:].numpy(),
    "a parameter": lambda held: nn.Parameter(held[1:], requires_grad=False),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_a_view_is_written_that_something_else_shows_too(alias):
    """It could be read there: losses with constants are refused, and told the line that wrote it."""
    _, private, optimizer, loader = private_of(nn.Linear(3, 3))
    held, constant = torch.ones(3), torch.ones(3)
    shown, line = ALIASES[alias](held), 0
    for step, (x, y) in enumerate(loader):
        outputs = private(x)
        loss = F.cross_entropy(outputs * constant, y)
        if step:
            with pytest.raises(ModelError, match=f"first on line {line} of {Path(__file__).name}"):
                loss.backward()
            return
        loss.backward()
        held[:2][1] += outputs.detach().mean()
        line = sys._getframe().f_lineno - 1
        assert float(shown[0 if len(shown) < 3 else 1]) != 1
        optimizer.step()
    raise AssertionError("read")


KNOWN = {
    "data": lambda held: (held.data, held),
    "detach": lambda held: (held.detach(), held),
    "a view": lambda held: (held[1:].data, held[:2]),
    "of data": lambda held: (held, held.data),
    "of a view": lambda held: (held.data[1:], held.detach().view(3, 1)),
}


@pytest.mark.parametrize("after", [False, True], ids=["before backward", "after backward"])
@pytest.mark.parametrize("shown", KNOWN)
def test_whoever_shows_what_the_loop_writes_is_known(shown, after):
    """All that `written` is read by later, and no other constant."""
    engine, private, optimizer, loader = private_of(nn.Linear(3, 3))
    (seen, written), constant = KNOWN[shown](torch.ones(3)), torch.ones(3)
    for step, (x, y) in enumerate(loader):
        outputs = private(x)
        if step:
            with pytest.raises(ModelError, match="numbers of an earlier batch"):
                F.cross_entropy(outputs * (seen.flatten() + 1)[-1], y).backward()
            F.cross_entropy(outputs * constant, y).backward()
            assert engine.training.loss_kept == "promised"  # what else a graph saved, nobody knows
            assert not LossWatch.escaped
            return
        loss = F.cross_entropy(outputs * constant, y)
        if not after and not step:
            written[:1] += outputs.detach().mean()
        loss.backward()
        if after and not step:
            written[:1] += outputs.detach().mean()
        optimizer.step()
    raise AssertionError("read")


def test_a_hook_on_the_graph_adds_nothing_to_a_batch_of_one_row():
    """By which numbers of an earlier batch come, past the loss: the row runs again without them."""
    found = []
    for value in (0.0, 9.0):
        torch.manual_seed(0)
        _, private, optimizer, loader = private_of(nn.Linear(3, 3), 1)
        optimizer.param_groups[0]["lr"], bank = 0.0, None
        for step, (x, y) in enumerate(loader):
            if step == 0:
                x = x + value
            outputs = private(x) * 1
            if bank is not None:
                outputs.grad_fn.register_hook(lambda inner, outer, bank=bank: (inner[0] + bank, *inner[1:]))
            F.cross_entropy(outputs, y).backward()
            bank = x.detach() if step == 0 else None
            optimizer.step()
            if step == 1:
                break
        found.append(private.module.weight.grad.clone())
    assert torch.equal(*found)


def gathered(x):
    dist.all_gather(rows := [torch.zeros(x.shape)], x)
    return rows[0]


def gathered_by_one(x):
    dist.gather(x, rows := [torch.zeros(x.shape)])
    return rows[0]


def gathered_by_the_group(x):
    rows = torch.zeros(x.shape)
    dist.group.WORLD.allgather([[rows]], [x]).wait()
    return rows


def gathered_objects(x):
    dist.all_gather_object(objects := [None], {"x": x})
    return objects[0]["x"]


@pytest.fixture
def one_process(tmp_path):
    def begin():
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

    yield begin
    dist.destroy_process_group()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("gather", [gathered, gathered_by_one, gathered_by_the_group, gathered_objects])
def test_what_processes_gather_of_a_batch_is_no_constant(gather, after, one_process):
    """Negatives that are other examples of the batch, and a queue of earlier ones."""
    _, private, optimizer, loader = private_of(nn.Linear(3, 3))
    one_process()
    center = torch.zeros(3)
    with pytest.raises(ModelError, match="earlier batch|were written" if after else "before its backward pass"):
        for x, _ in loader:
            outputs = private(x)
            center = center if after else gather(outputs.detach().contiguous()).mean(0)
            (outputs - center).square().mean().backward()
            center = gather(x.detach().contiguous()).mean(0)
            optimizer.step()


def test_losses_of_processes_are_added_up_after_the_backward_pass(one_process):
    engine, private, optimizer, loader = private_of(nn.Linear(3, 3))
    one_process()
    constant, total = torch.ones(3), torch.zeros(())
    for x, y in loader:
        loss = F.cross_entropy(private(x) * constant, y)
        loss.backward()
        total += loss.detach()
        dist.all_reduce(total)
        gathered_by_one(x)
        optimizer.step()
    assert engine.training.loss_kept == "proved"


def test_metrics_by_a_sparse_tensor_or_vmap_after_the_backward_pass_leave_constants_alone():
    engine, private, optimizer, loader = private_of(nn.Linear(3, 3))
    constant = torch.ones(3)
    for x, y in loader:
        outputs = private(x)
        F.cross_entropy(outputs * constant, y).backward()
        optimizer.step()
        places = torch.stack([y, outputs.argmax(1)])
        confusion = torch.sparse_coo_tensor(places, torch.ones(len(y)), (3, 3), check_invariants=True).to_dense()
        means = torch.func.vmap(torch.mean, in_dims=1)(outputs.detach())
        assert (float(confusion.sum()), means.shape) == (4.0, (3,))
    assert engine.training.loss_kept == "proved"
    for made in (confusion.sum(), means.sum()):
        _, private, _, loader = private_of(nn.Linear(3, 3))
        with pytest.raises(ModelError, match="earlier batch"):
            (private(next(iter(loader))[0]) * made).mean().backward()


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_bank_of_earlier_batches_is_refused_in_batches_of_one_row_too(batch_size):
    _, private, optimizer, loader = private_of(nn.Linear(3, 3), batch_size)
    bank = nn.Parameter(torch.zeros(3), requires_grad=False)
    with pytest.raises(ModelError, match="numbers of the batch were written"):
        for x, y in loader:
            outputs = private(x)
            F.cross_entropy(outputs + bank, y).backward()
            bank.data.add_(outputs.detach()[0])
            optimizer.step()


@pytest.mark.parametrize(("batch_size", "alias"), [(4, torch.detach), (1, torch.Tensor.numpy), (4, torch.Tensor.numpy)])
def test_a_metric_of_what_an_alias_has_written_is_refused(batch_size, alias):
    engine, private, _, loader = private_of(nn.Linear(3, 3), batch_size, released=ao.Metrics({"loss": 4.0}))
    x, y = next(iter(loader))
    bank, outputs = torch.zeros(3), private(x)
    written = torch.as_tensor(alias(bank))
    written.add_(outputs.detach().mean(0))
    with pytest.raises(ModelError, match="were written|rows"):
        engine.measure(loss=F.cross_entropy(outputs + bank, y, reduction="none"))


def test_a_metric_under_vmap_reads_nothing_that_an_alias_has_written():
    engine, private, _, loader = private_of(nn.Linear(3, 3), released=ao.Metrics({"loss": 4.0}))
    x, _ = next(iter(loader))
    bank, outputs = torch.zeros(3), private(x)
    torch.from_numpy(bank.numpy()).add_(outputs.detach().mean(0))
    with pytest.raises(ModelError, match="couples examples|row by row"):
        engine.measure(loss=torch.vmap(lambda out: (out + bank).square().sum())(outputs))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_metric_of_earlier_batches_is_refused_in_batches_of_one_row_too(batch_size):
    engine, private, _, loader = private_of(nn.Linear(3, 3), batch_size, released=ao.Metrics({"loss": 4.0}))
    x, y = next(iter(loader))
    private(x)
    with pytest.raises(ModelError, match="computed of the batch"):
        engine.measure(loss=torch.full((batch_size,), 1.5))


READ = {
    "a tensor": lambda held: held.mean(),
    "a number": lambda held: held.mean().item(),
    "an array": lambda held: float(held.numpy().mean()),
    "a branch": lambda held: 2.0 if held.mean() > 0 else 1.0,
}


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("name", READ)
def test_a_global_of_the_batch_is_not_read_by_the_model(name, earlier, first):
    """Every example would be scaled by all of them, or those of the batch before."""
    held = []

    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (READ[name](held[-1]) if held else 1.0)

    _, private, optimizer, loader = private_of(Reads(3, 3), 4, rows=24)
    with pytest.raises(ModelError, match="the model reads a tensor of a batch"):
        for step, (x, y) in enumerate(loader):
            if step >= first and not earlier:
                held.append(x)
            F.cross_entropy(private(x), y).backward()
            if step >= first:
                held.append(x)
            optimizer.step()
            optimizer.zero_grad()
        raise AssertionError("read")


def test_what_an_alias_wrote_may_be_read_by_the_model_and_nothing_is_proved_any_more():
    held = np.zeros(3, np.float32)

    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1 + float(held.mean()))

    engine, private, optimizer, loader = private_of(Reads(3, 3))
    kept = []
    for x, y in loader:
        F.cross_entropy(private(x), y).backward()
        kept.append(engine.training.loss_kept)
        optimizer.step()
        optimizer.zero_grad()
        torch.from_numpy(held).add_(x.mean(0))
    assert kept[:2] == ["proved", "promised"]


def test_a_gradient_of_a_shape_that_a_mask_chose_is_refused_without_the_shape():
    _, private, _, loader = private_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    losses = F.mse_loss(private(x), F.one_hot(y, 3).float(), reduction="none")
    with pytest.raises(ModelError, match="must have the loss's shape") as refused:
        losses.backward(torch.ones(4, 3)[y > 0])
    assert not any(map(str.isdigit, str(refused.value)))


COUNTS = {
    "added to, and put back": lambda counts, y: [counts.__setitem__(c, counts[c].add_(1)) for c in y],
    "+=": lambda counts, y: [counts.__setitem__((c, 0), counts[c, 0].__iadd__(1)) for c in y],
    "a view": lambda counts, y: [counts[c].add_(1) for c in y],
    "a view, and nothing says so": lambda counts, y: [F.threshold(counts[c], 0.5, 1.0, inplace=True) for c in y],
    "a view of its shape": lambda counts, y: counts.view_as(wide := torch.stack([y] * 3, 1)).add_(wide + 1),
}


@pytest.mark.parametrize("after", [False, True], ids=["in the loss", "after backward"])
@pytest.mark.parametrize("count", COUNTS)
def test_counts_by_label_are_of_the_batch(count, after):
    """`counts[label]` is a view of a tensor that stands outside: what is written there is in no later loss, and does
    not keep other constants out of losses after the backward pass.
    """
    _, private, optimizer, loader = private_of(nn.Linear(3, 3), 2)
    counts, constant = torch.zeros(3, 2), torch.ones(3)
    for step, (x, y) in enumerate(loader):
        outputs = private(x)
        if step == 2:
            assert counts.sum() > 0
            with pytest.raises(ModelError, match="numbers of an earlier batch|numbers of the batch were written"):
                F.cross_entropy(outputs * (1 / (1 + counts[:, 0])), y).backward()
            break
        loss = F.cross_entropy(outputs * constant if after else outputs, y)
        if not after:
            COUNTS[count](counts, y)
        loss.backward()
        if after:
            COUNTS[count](counts, y)
        optimizer.step()
