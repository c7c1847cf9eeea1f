"""What the private model says where it is used as an ordinary one cannot be."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import TrainingError


def private(model=None, key=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 2) if model is None else model
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,))), batch_size=4)
    plan = ao.plan(loader=loader, epochs=1, epsilon=8, delta=1e-3, mechanism="tree")
    return ao.PrivacyEngine(plan, key=key).make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


@pytest.mark.parametrize("given_in_evaluation", [False, True])
def test_a_loss_in_evaluation_mode(given_in_evaluation):
    model, _, loader = private(nn.Linear(4, 2).eval() if given_in_evaluation else None)
    model.training = not given_in_evaluation
    for x, y in loader:
        loss = F.cross_entropy(model.eval()(x), y)
        with pytest.raises(TrainingError, match=r"model.train\(\)"):
            loss.backward()


def test_outputs_of_evaluation_are_those_of_the_model():
    model, _, _ = private()
    x = torch.randn(3, 4, requires_grad=True)
    outputs = model.eval()(x)
    torch.testing.assert_close(outputs, model.module(x))
    outputs.sum().backward()  # gradients of the input are nobody's
    torch.testing.assert_close(x.grad, model.module.weight.sum(0).expand(3, 4))
    assert model.module.weight.grad is None
    with torch.no_grad():
        assert not model(x).requires_grad


@pytest.mark.parametrize(
    ("use", "cure"),
    [
        (torch.optim.swa_utils.AveragedModel, r"AveragedModel\(model.module\)"),
        (copy.deepcopy, r"copy.deepcopy\(model.module\)"),
        (pickle.dumps, r"model.state_dict\(\)"),
        (lambda model: model._replicate_for_data_parallel(), "torchrun"),
        (torch.jit.script, "take model.module"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_belongs_to_one_run(use, cure):
    model, _, _ = private()
    with pytest.raises(TrainingError, match=cure):
        use(model)


def test_the_average_of_the_model_itself():
    model, optimizer, loader = private()
    average = torch.optim.swa_utils.AveragedModel(model.module)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model.module)
    assert not torch.equal(average.module.weight, model.module.weight)


def test_nn_data_parallel_calls_what_is_refused():
    """The name is torch's own."""
    from torch.nn.parallel import replicate

    assert "_replicate_for_data_parallel" in replicate.__code__.co_names


@pytest.mark.parametrize("by", [lambda m: torch.compile(m, backend="eager"), lambda m: m.compile(backend="eager") or m])
def test_a_private_model_that_is_compiled_runs_as_it_is_written(by):
    """The compiler went into the ledger, and died of an assertion."""
    found = []
    for compiles in (False, True):
        model, optimizer, loader = private(key=bytes(32))
        called = by(model) if compiles else model
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(called(x), y).backward()
            optimizer.step()
        found.append(model.module.weight.detach().clone())
        called.eval()
        with torch.no_grad():
            assert torch.equal(called(x), model.module(x))
    assert torch.equal(*found)
