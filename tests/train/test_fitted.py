"""Correlated noise under an optimizer that it was not fitted to: private, and warned of."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import OptimizerWarning


def bind(optimizer, mechanism="tree", **given):
    loader = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8)), batch_size=4)
    plan = ao.plan(loader=loader, epochs=2, epsilon=4, delta=1e-3, mechanism=mechanism, **given)
    model = nn.Linear(2, 1)
    return ao.PrivacyEngine(plan).make_private(model, optimizer(model.parameters()), loader)


class Own(torch.optim.AdamW):
    """A subclass, as of Hugging Face's."""


@pytest.mark.parametrize("kind", [
    torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, Own,
])  # fmt: skip
def test_adaptive_optimizers_are_warned_of_once_and_where_they_are_bound(kind):
    with pytest.warns(OptimizerWarning, match=f"{kind.__name__} divides its steps .* binary tree") as told:
        bind(lambda p: kind(p, lr=0.1))
    assert len(told) == 1
    assert told[0].filename == __file__
    assert "mechanism='independent'" in str(told[0].message)


@pytest.mark.parametrize("kind", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: ao.FTRL(p, lr=0.1)])
def test_linear_ones_are_not(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind(kind)


def test_independent_noise_goes_with_any():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind(lambda p: torch.optim.Adam(p, lr=0.1), mechanism="independent")


def test_a_server_of_users_warns_too():
    plan = ao.plan(dataset_size=8, batch_size=4, epochs=2, epsilon=4, delta=1e-3, mechanism="tree", unit="user")
    model = nn.Linear(2, 1)
    with pytest.warns(OptimizerWarning, match="Adam divides its steps") as told:
        ao.federated.Server(plan, model, torch.optim.Adam(model.parameters(), lr=0.1))
    assert [one.filename for one in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear = nn.Linear(2, 1)
        ao.federated.Server(plan, linear, torch.optim.SGD(linear.parameters(), lr=1.0))
