"""Correlated noise under an optimizer that it was not fitted to: private, and warned of."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import OptimizerWarning
from plans import flat_plan


def bind(optimizer, mechanism="tree", workload=None, **given):
    loader = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8)), batch_size=4)
    plan = flat_plan(loader=loader, epochs=2, epsilon=4, delta=1e-3, mechanism=mechanism, workload=workload, **given)
    model = nn.Linear(2, 1)
    return ao.PrivacyEngine(plan).make_private(model, optimizer(model.parameters()), loader)


class Own(torch.optim.AdamW):
    """A subclass, as of Hugging Face's."""


@pytest.mark.parametrize("kind", [
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adamax,
])  # fmt: skip
def test_adaptive_optimizers_are_warned_of_once_and_where_they_are_bound(kind):
    with pytest.warns(OptimizerWarning, match=f"{kind.__name__} divides its steps .* binary tree") as told:
        bind(lambda p: kind(p, lr=0.1))
    assert len(told) == 1
    assert told[0].filename == __file__
    assert "mechanism='independent'" in str(told[0].message)


ADAM = [torch.optim.Adam, torch.optim.AdamW, Own]


@pytest.mark.parametrize("kind", ADAM)
def test_adam_is_warned_of_where_the_noise_was_not_fitted_to_its_beta(kind):
    for momentum in (0.0, 0.9):  # SGD with momentum 0.9 does not divide its first steps by 1 - beta^t
        told = f"fitted to SGD with momentum {momentum:g}, and {kind.__name__} takes averages of gradients by beta 0.9:"
        with pytest.warns(OptimizerWarning, match=told) as seen:
            bind(lambda p: kind(p, lr=0.1), "blt", momentum=momentum)
        assert [one.filename for one in seen] == [__file__]


@pytest.mark.parametrize("kind", ADAM)
def test_adam_is_not_warned_of_where_it_was(kind):
    def made(parameters):
        return kind(parameters, lr=0.1, betas=(0.8, 0.99))

    fit = torch.optim.Adam([torch.zeros(1)], betas=(0.8, 0.99))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind(lambda p: kind(p, lr=0.1, betas=(0.0, 0.99)), "blt")
        bind(made, "blt", fit)
        bind(made, "tree")


LINEAR = [torch.optim.SGD, ao.FTRL]


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_linear_ones_are_not_where_the_noise_was_fitted_to_their_momentum(kind, momentum):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind(lambda p: kind(p, lr=0.1, momentum=momentum), "blt", momentum=momentum)


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize(("fitted", "found"), [(0.0, 0.9), (0.9, 0.0), (0.9, 0.5)])
def test_a_momentum_that_the_noise_was_not_fitted_to_is_warned_of(kind, fitted, found):
    told = f"BLT.* was fitted to momentum {fitted:g}, and this optimizer has {found:g}.*momentum={found:g}"
    with pytest.warns(OptimizerWarning, match=told) as seen:
        bind(lambda p: kind(p, lr=0.1, momentum=found), "blt", momentum=fitted)
    assert [one.filename for one in seen] == [__file__]


def test_one_group_of_another_momentum_is_warned_of():
    def groups(parameters):
        weight, bias = parameters
        return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "momentum": 0.5}], lr=0.1, momentum=0.9)

    with pytest.warns(OptimizerWarning, match=r"has 0\.5 and 0\.9: .* Give all groups the momentum 0\.9"):
        bind(groups, "blt", momentum=0.9)


@pytest.mark.parametrize("mechanism", ["tree", "independent"])
def test_noise_that_is_the_same_for_each_momentum_is_not_warned_of(mechanism):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), mechanism)


@pytest.mark.parametrize("momentum", [float(np.float32(0.9)), 1 - 0.1 + 1e-12])
def test_a_momentum_that_differs_by_rounding_is_the_one_that_was_meant(momentum):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind(lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum), "blt", momentum=0.9)


def test_groups_that_are_not_trained_have_no_momentum():
    def frozen(parameters):
        weight, bias = parameters
        bias.requires_grad_(False)
        return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "momentum": 0.0}], lr=0.1, momentum=0.9)

    def empty(parameters):
        return torch.optim.SGD([{"params": parameters}, {"params": [], "momentum": 0.0}], lr=0.1, momentum=0.9)

    for groups in (frozen, empty):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            bind(groups, "blt", momentum=0.9)


def test_that_noise_harms_less_which_is_fitted_to_the_momentum():
    order = {"dataset_size": 200, "batch_size": 10, "epochs": 2, "epsilon": 4, "delta": 1e-5, "mechanism": "dense"}
    plans = {momentum: flat_plan(**order, momentum=momentum) for momentum in (0.0, 0.9)}
    for fitted, found, more in ((0.9, 0.0, 1.3), (0.0, 0.9, 1.1)):
        other = replace(plans[fitted], workload=plans[found].workload)
        assert other.noise_error() > more * plans[found].noise_error()


def test_that_noise_harms_adam_less_which_is_fitted_to_it():
    order = {"dataset_size": 200, "batch_size": 10, "epochs": 2, "epsilon": 4, "delta": 1e-5, "mechanism": "dense"}
    best = ao.plan(**order, optimizer=torch.optim.Adam([torch.zeros(1)]))
    for other, more in ((ao.SGD(), 1.1), (ao.SGD(momentum=0.9), 1.1)):
        assert (
            replace(ao.plan(**order, optimizer=other), workload=best.workload).noise_error() > more * best.noise_error()
        )


def test_who_makes_errors_of_warnings_is_stopped_before_anything_is_bound():
    loader = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8)), batch_size=4)
    engine = ao.PrivacyEngine(
        ao.plan(loader=loader, epochs=2, epsilon=4, delta=1e-3, mechanism="blt", optimizer=ao.SGD(momentum=0.9))
    )
    model = nn.Linear(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OptimizerWarning):
            engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader)


def test_a_workload_of_ones_own_is_trusted():
    plan = ao.plan(dataset_size=8, batch_size=4, epochs=2, epsilon=4, delta=1e-3, mechanism="banded, 2 bands",
                   optimizer=ao.workload.custom(np.tril(np.ones((4, 4)))))  # fmt: skip
    loader = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8)), batch_size=4, shuffle=True)
    model = nn.Linear(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ao.PrivacyEngine(plan).make_private(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5), loader)


def test_independent_noise_goes_with_any():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind(lambda p: torch.optim.RMSprop(p, lr=0.1), mechanism="independent")


def test_a_server_of_users_warns_too():
    plan = ao.plan(dataset_size=8, batch_size=4, epochs=2, epsilon=4, delta=1e-3, mechanism="tree", unit="user")
    model = nn.Linear(2, 1)
    with pytest.warns(OptimizerWarning, match="RMSprop divides its steps") as told:
        ao.federated.Server(plan, model, torch.optim.RMSprop(model.parameters(), lr=0.1))
    assert [one.filename for one in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear = nn.Linear(2, 1)
        ao.federated.Server(plan, linear, torch.optim.SGD(linear.parameters(), lr=1.0))


def steps(plan, optimizer, before, loader):
    """Train for the steps of a plan, with `before(step, optimizer)` at each."""
    engine = ao.PrivacyEngine(plan, key=b"\x00" * 32)
    model, optimizer, loader = engine.make_private(optimizer.model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            before(engine.step, optimizer)
            optimizer.zero_grad()
            ((model(x)[:, 0] - y) ** 2).mean().backward()
            optimizer.step()


def test_settings_are_asked_at_each_step():
    loader = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8)), batch_size=1)
    course = ao.workload.stages(
        [
            ao.workload.Stage(steps=8, rate=1.0, only_last=True),
            ao.workload.Stage(steps=8, momentum=0.9, rate=0.5, own_parameters=True),
        ]
    )
    flat = {"loader": loader, "epochs": 2, "epsilon": 4, "delta": 1e-3, "mechanism": "blt"}
    staged = ao.plan(**flat, optimizer=course)
    planned = ao.plan(**flat, optimizer=ao.SGD(momentum=0.9))

    def run(plan, before):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        optimizer.model = model
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            steps(plan, optimizer, before, loader)
        return [str(one.message) for one in told if one.category is OptimizerWarning]

    def as_planned(step, optimizer):
        optimizer.param_groups[0].update(course.settings(step))

    def falling(step, optimizer):
        optimizer.param_groups[0]["lr"] = 0.5 * (1 - step / 16)

    assert run(staged, as_planned) == []
    assert run(planned, lambda step, optimizer: None) == []
    (told,) = run(planned, as_planned)  # a course that the plan does not know: momentum 0 for the first half
    assert "momentum 0.9 and a schedule in step 0" in told
    (told,) = run(staged, lambda step, optimizer: None)
    assert "momentum 0 and a schedule in step 0" in told
    assert run(planned, falling) == []  # noise of successive steps still cancels
    scheduled = ao.plan(**flat, optimizer=ao.SGD(momentum=0.9, learning_rates=1 - np.arange(16) / 16))
    assert run(scheduled, falling) == []
    (told,) = run(scheduled, lambda step, optimizer: None)
    assert "in step 9" in told
    assert "2.29 times" in told
