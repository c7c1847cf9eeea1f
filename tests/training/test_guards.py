"""What is looked at before a step may be taken, one by one: each with the least that goes wrong without it."""

import operator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, TensorDataset

from anyorder.clipping import torch_private as private
from anyorder.clipping.coupling import ASKED, LossWatch
from anyorder.clipping.kept_tensors import Witness
from anyorder.clipping.program import Snapshot
from anyorder.errors import AnyorderError, LoaderError, ModelError, TrainingError
from anyorder.sampling.loader import PrivateLoader
from anyorder.training.engine import BoundParameters
from training.runs import run_of


def bound(model):
    found = BoundParameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found.check()
    return found


# -- modules and parameters -------------------------------------------------------------------------------------------


def test_a_layer_deep_within_is_exchanged():
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(3, 3))))
    guard = bound(model)
    model[0][0][0] = nn.Linear(3, 3)
    with pytest.raises(TrainingError):
        guard.check()


def test_one_of_two_places_of_a_parameter_goes():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    guard = bound(model)
    model["b"] = nn.Identity()
    with pytest.raises(TrainingError):
        guard.check()


@pytest.mark.parametrize("exchanged", [False, True])
def test_buffers_have_no_numbers_of_a_batch(exchanged):
    model, part = nn.Sequential(nn.Linear(3, 3), nn.Module()), nn.Module()
    part.register_buffer("mean", torch.zeros(3))
    model[1] = nn.ReLU() if exchanged else part
    guard = bound(model)
    model[1] = part
    guard.check()
    private.mark_memory(part.mean)
    with pytest.raises(TrainingError, match="memory"):
        guard.check()


def test_what_was_exchanged_is_looked_at_once(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    guard = bound(model)
    model[1] = nn.GELU()
    guard.check()
    monkeypatch.setattr(guard, "_named_now", lambda: pytest.fail("all names are compared again"))
    guard.check()


@pytest.mark.parametrize("several", ["groups", "optimizers"])
def test_settings_of_all_groups_are_looked_at(several):
    model = nn.Linear(3, 3)
    if several == "groups":
        optimizers = [torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)]
    else:
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    guard, last = BoundParameters(model, *optimizers), optimizers[-1].param_groups[-1]
    last["lr"] = torch.tensor(0.1)
    guard.check()
    private.mark_memory(last["lr"])
    with pytest.raises(TrainingError, match="setting"):
        guard.check()


def test_a_parameter_of_another_size_is_no_memory_of_the_library():
    engine, model, optimizer, loader = run_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    model.module.bias.data = torch.zeros(1)
    with pytest.raises(ModelError, match="another size"):
        F.cross_entropy(model(x), y).backward()


# -- what the model reads ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_memory_is_looked_at_behind_a_tensor_that_has_none():
    held, values = torch.zeros(3), torch.ones(3)
    private.mark_memory(held)
    assert private.is_marked(torch.zeros(3).to_sparse(), held)
    private.mark_memory(values)
    places = torch.arange(4), torch.arange(3)
    assert private.is_marked(torch.sparse_csr_tensor(*places, values, (3, 3), check_invariants=False))
    assert not private.is_marked(torch.zeros(3).to_mkldnn(), torch.zeros(3).to_sparse(), None)


READS = {
    "by name": lambda x, t: torch.add(x, other=t), "in a tuple": lambda x, t: torch.cat((x, t)),
    "as an end": lambda x, t: x[: t.long()[0]],
    "in a transform": lambda x, t: torch.func.grad(lambda c: (c * c).sum())(t),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_a_function_of_the_model_reads_no_such_memory(name):
    held = torch.zeros(3)
    private.mark_memory(held)
    ends = held.long()
    private.mark_memory(ends)
    with Witness([]), pytest.raises(ModelError, match="reads a tensor"):
        READS[name](torch.ones(3), ends if name == "as an end" else held)


def test_each_tensor_outside_of_the_model_is_looked_at():
    model = nn.Linear(3, 3)
    model.one, model.two = torch.zeros(3), torch.ones(3)
    snapshot = Snapshot(model)
    assert snapshot.holds()
    private.mark_memory(model.two)
    assert not snapshot.holds()


mean = torch.zeros(3)


class LessTheMean(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x - mean

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@torch.library.custom_op("anyorder_tests::less_the_mean", mutates_args=())
def less_the_mean(x: torch.Tensor) -> torch.Tensor:
    return x - mean


@torch.library.register_vmap("anyorder_tests::less_the_mean")
def _of_all(info, in_dims, x):
    return less_the_mean(x), in_dims[0]


class Centred(nn.Module):
    def __init__(self, centre, detached=False):
        super().__init__()
        self.layer, self.centre = nn.Linear(3, 3), centre

    def forward(self, x):
        return self.layer(self.centre(x))


@pytest.mark.parametrize("centre", [LessTheMean.apply, less_the_mean], ids=["autograd.Function", "operator"])
def test_what_runs_below_all_modes_reads_nothing_of_the_loop(centre, monkeypatch):
    monkeypatch.setitem(globals(), "mean", torch.zeros(3))
    engine, model, optimizer, loader = run_of(Centred(centre), epochs=2)
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    monkeypatch.setitem(globals(), "mean", 0.9 * mean + 0.1 * x.mean(0))
    with pytest.raises(ModelError, match="reads a tensor"):
        model(next(batches)[0])
    assert not private.here.in_pass


def test_a_replayed_pass_runs_under_no_hooks_on_saved_tensors():
    engine, model, optimizer, loader = run_of(nn.Linear(3, 3), epochs=4)
    for _ in range(3):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    x, y = next(iter(loader))
    doubled = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t)
    with doubled, pytest.raises((RuntimeError, AnyorderError)):
        model(x)


def test_one_hook_of_two_changes_what_is_saved():
    graph = torch.autograd.graph
    with graph.saved_tensors_hooks(graph.save_on_cpu().pack_hook, lambda t: t * 2):
        assert private.changes_saved_tensors()
    with graph.save_on_cpu():
        assert not private.changes_saved_tensors()


def test_what_escaped_is_told_of_the_model_too(monkeypatch):
    engine, model, optimizer, loader = run_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert engine.training.isolation.model == "by construction"
    monkeypatch.setattr(LossWatch, "escaped", "line 1 of a script")
    assert engine.training.isolation.model == "promised"


def test_what_is_proved_in_each_batch_is_told_where_all_may_know_it(monkeypatch):
    """How a loss was kept apart follows from this rank's batches, or from secret sizes; a promise is told anywhere."""
    engine, model, optimizer, loader = run_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    training = engine.training
    assert training._isolation().loss == "proved"
    for name in ("_group", "sizes"):
        with monkeypatch.context() as told:
            if name == "_group":
                told.setattr(training, "_group", object())
            else:
                told.setattr("anyorder.training.engine.sizes_are_public", lambda plan: False)
            assert training._isolation().loss == "proved or mapped"
            told.setattr(training._watch, "kept", "promised")
            assert training._isolation().loss == "promised"


class LessTheTable(nn.Module):
    """Rules of layers see what it reads: in torch's functions, as a bias, in a list."""

    def __init__(self, table, place):
        super().__init__()
        self.layer, self.table, self.place = nn.Linear(3, 3), [table], place

    def forward(self, x):
        if self.place == "a bias":
            return F.linear(self.layer(x), torch.eye(3), self.table[0])
        return self.layer(x) * torch.cat(self.table) if self.place == "a list" else self.layer(x - self.table[0])


@pytest.mark.parametrize("place", ["a function", "a bias", "a list"])
def test_a_frozen_parameter_that_has_numbers_of_a_batch_is_read_by_no_rule_of_a_layer(place):
    table = nn.Parameter(torch.zeros(3), requires_grad=False)
    engine, model, optimizer, loader = run_of(LessTheTable(table, place))
    x, _ = next(iter(loader))
    with torch.no_grad():
        table.copy_(x.mean(0))
    with pytest.raises(ModelError, match="reads a tensor"):
        model(x)


def test_what_runs_below_all_modes_reads_nothing_of_the_loop_on_the_way_back(monkeypatch):
    """By chunks the model runs again there."""
    monkeypatch.setitem(globals(), "mean", torch.zeros(3))
    engine, model, optimizer, loader = run_of(Centred(LessTheMean.apply), chunk_size=2)
    x, y = next(iter(loader))
    loss = F.cross_entropy(model(x), y)
    monkeypatch.setitem(globals(), "mean", x.mean(0))
    with pytest.raises(ModelError, match="reads a tensor"):
        loss.backward()


# -- what the loss is made of -----------------------------------------------------------------------------------------


class Words(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return "abc"[: index % 3]


def test_rows_that_the_loop_makes_of_texts_alone_are_promised():
    engine, model, optimizer, loader = run_of(data=Words(), loader=DataLoader(Words(), 4, collate_fn=list))
    for texts in loader:
        model(torch.tensor([[len(text), 1.0, 2.0] for text in texts])).square().mean().backward()
        optimizer.step()
    assert engine.training.loss_kept == "promised"


def test_a_transform_makes_no_number_of_the_batch_in_passing():
    engine, model, optimizer, loader = run_of()
    x, _ = next(iter(loader))
    outputs, made = model(x), []

    def passed(c):
        made.append(c.detach() * outputs.detach().mean())
        return c.sum()

    with pytest.raises(ModelError, match="under a transform of torch.func"):
        torch.func.grad(passed)(torch.ones(3))


def test_memory_into_which_an_earlier_batch_was_written_is_known_by_whatever_shows_it():
    engine, model, optimizer, loader = run_of()
    bank = torch.zeros(3)
    storage = bank.untyped_storage()
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(outputs := model(x), y).backward()
    optimizer.step()
    bank.copy_(outputs.detach()[0])
    again = torch.empty(0).set_(storage, 0, (3,), (1,))
    x, y = next(batches)
    with pytest.raises(ModelError, match="numbers of the batch were written"):
        F.cross_entropy(model(x) * again, y).backward()


def test_numbers_that_escaped_in_one_run_are_known_in_the_next(monkeypatch):
    monkeypatch.setattr(LossWatch, "escaped", "")
    shared = np.ones(3, np.float32)
    engine, model, optimizer, loader = run_of()
    x, y = next(iter(loader))
    F.cross_entropy(outputs := model(x), y).backward()
    torch.from_numpy(shared).copy_(outputs.detach()[0])
    engine, model, optimizer, loader = run_of()
    x, y = next(iter(loader))
    with pytest.raises(ModelError, match="numbers of the batch were written"):
        F.cross_entropy(model(x) * torch.from_numpy(shared), y).backward()


OUT_OF_NUMBERS = {
    "a number": (lambda t: t.item(), ModelError),
    "a list": (lambda t: t.tolist()[0], ModelError),
    "a branch": (lambda t: 2.0 if t > 40 else 1.0, "promised"),
    "a size": (lambda t: torch.arange(int(t.item())).numel() + 1.0, "promised"),
    "a comparison": (lambda t: 1.0 + torch.equal(t, torch.ones(1)), "promised"),
    "a row of a nested tensor": (
        lambda t: torch.nested.nested_tensor([[t.item()]]).unbind()[0].sum(), "promised"
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("way", OUT_OF_NUMBERS)
def test_what_is_made_of_numbers_that_were_taken_out_is_of_the_batch_however_it_is_read(way):
    made, expected = OUT_OF_NUMBERS[way]
    engine, model, optimizer, loader = run_of()
    x, y = next(iter(loader))
    weight = made(torch.tensor([x.abs().sum().item()]))
    loss = weight * F.cross_entropy(model(x), y)
    if expected is ModelError:
        with pytest.raises(ModelError, match="was taken out of the batch"):
            loss.backward()
    else:
        loss.backward()
        assert engine.training.loss_kept == expected


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_two_views_are_those_of_a_batch_of_any_size(rows):
    """Under secret sampling what is refused would tell how large one is."""
    watch = LossWatch()
    x = watch.batch(torch.randn(rows, 3), rows, handed := object())
    assert watch.batch_of(torch.cat([x, 2 * x]).chunk(2)) == (handed, True)
    assert watch.batch_of(torch.cat([x, x, x]).split(max(1, rows))) == (handed, True)
    out = watch.outputs(torch.randn(rows, 3, requires_grad=True) * 1, [x])
    first, second = torch.cat([out, x]).chunk(2)
    loss = (first - second).square().sum()
    stacked = torch.cat([x, out])
    loss = loss + (stacked[:rows] - stacked[rows:]).sum() + (stacked * torch.ones(2 * rows, 1)).sum()
    if rows:
        loss = loss + stacked.view(2, -1, 3).diff(dim=0).sum()
    loss.backward()
    assert watch.kept == ("proved" if rows else None)


# -- the loop is asked ------------------------------------------------------------------------------------------------


def test_a_mode_was_there_or_not():
    class Other(TorchFunctionMode):
        pass

    other = Other()
    private.place_below(ASKED, False)
    assert [private.place_below(other, wanted) for wanted in (False, True, True, False)] == [False, False, True, True]


class Failing(nn.Linear):
    fails = False

    def forward(self, x):
        if self.fails:
            raise ValueError("not now")
        return super().forward(x)


def test_the_loop_is_asked_after_a_pass_or_a_step_that_fails():
    model = Failing(3, 3)
    engine, private_model, optimizer, loader = run_of(model)
    batches = iter(loader)
    x, y = next(batches)
    with pytest.raises(TrainingError, match="without a backward pass"):
        optimizer.step()
    assert private.place_below(ASKED, True)
    private_model(x)
    model.fails = True
    with pytest.raises(ValueError, match="not now"):
        private_model(x)
    assert private.place_below(ASKED, True)


def test_a_zero_grad_of_ones_own_is_asked():
    seen = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            seen.append(private.place_below(ASKED, True))
            super().zero_grad(set_to_none)

    model = nn.Linear(3, 3)
    engine, _, optimizer, loader = run_of(model, Own(model.parameters(), lr=0.1))
    next(iter(loader))
    optimizer.zero_grad()
    assert seen == [True]


def test_zero_grad_leaves_zeros_where_asked():
    model = nn.Linear(3, 3)
    engine, private_model, optimizer, loader = run_of(model)
    x, y = next(iter(loader))
    F.cross_entropy(private_model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()


def test_a_data_set_is_not_asked():
    seen = []

    class Rows(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            seen.append(private.place_below(ASKED, False))
            return torch.zeros(3), 0

    engine, *_, loader = run_of(nn.Linear(3, 3), data=Rows())
    batches = iter(loader)
    next(batches)
    seen.clear()
    next(batches)
    assert seen
    assert not any(seen)


def test_a_loop_that_nobody_could_ask_is_promised():
    """What torch does with devices within `with torch.device(..)` may take the mode away."""
    engine, model, optimizer, loader = run_of(nn.Linear(3, 3))
    x, y = next(iter(loader))
    private.place_below(ASKED, False)
    F.cross_entropy(model(x), y).backward()
    assert engine.training.loss_kept == "promised"


# -- batches and iterations -------------------------------------------------------------------------------------------


def test_two_batches_do_not_wait_for_one_step():
    engine, model, optimizer, loader = run_of(nn.Linear(3, 3))
    batches = iter(loader)
    losses = [F.cross_entropy(model(x), y) for x, y in (next(batches), next(batches))]
    losses[0].backward()
    with pytest.raises(TrainingError):
        losses[1].backward()


def test_passes_are_of_one_step():
    engine, *_ = run_of(nn.Linear(3, 3))
    batch = SimpleNamespace(passes=None)
    first = engine.training._passes_of(batch, 0)
    assert engine.training._passes_of(batch, 0) is first
    assert engine.training._passes_of(batch, 1) is not first


def test_rows_without_versions_are_not_exchanged_within_an_epoch():
    with torch.inference_mode():
        rows = torch.arange(24.0).view(8, 3)
        others = rows.roll(4, 0)
    data = TensorDataset(rows)
    batches = iter(PrivateLoader(DataLoader(data, 4), seed=1))
    next(batches)
    data.tensors = (others,)
    with pytest.raises(LoaderError, match="exchanged"):
        next(batches)


def test_an_iteration_that_is_left_goes_on_behind_the_batch_that_is_used_later():
    loader = PrivateLoader(DataLoader(TensorDataset(torch.arange(12)), 2), seed=1)
    batches = iter(loader)
    next(batches)
    batch = loader.identity.newest()
    batches.close()
    loader.mark_used(batch)
    assert loader.position == 1
    assert next(iter(loader))[0].tolist() == [2, 3]


def test_an_old_iteration_that_is_closed_late_moves_no_new_one():
    loader = PrivateLoader(DataLoader(TensorDataset(torch.arange(12)), 2), seed=1)
    old, places = iter(loader), operator.attrgetter("_batches.position", "_position")
    next(old)
    new = iter(loader)
    next(new)
    before = places(loader)
    old.close()
    assert places(loader) == before
