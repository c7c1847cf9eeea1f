"""What the plan does not cover is refused, and nothing has changed afterwards."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import (
    ArgumentError,
    LoaderError,
    ModelError,
    NonFiniteError,
    ParticipationError,
    StepsExhaustedError,
    TrainingError,
)
from anyorder.participation import KnownOrder
from training.test_engine import KEY, STEPS, B, N, backward, data, network, planned, private, train, weights


def test_more_steps_than_planned():
    engine, model, optimizer, loader = private()
    train(engine, model, optimizer, loader)
    before = weights(model)
    with pytest.raises((StepsExhaustedError, LoaderError), match="18"):
        train(engine, model, optimizer, loader, epochs=1)
    assert torch.equal(before, weights(model))
    assert engine.step == 18


def test_unit_used_twice_in_an_epoch():
    again = [*range(B), 0, *range(B, N)]  # the second batch begins with the first example
    engine, model, optimizer, loader = private(loader=DataLoader(data(), batch_size=B, sampler=again))
    batches = iter(loader)
    backward(model, next(batches))
    optimizer.step()
    before = weights(model)
    with pytest.raises(ParticipationError):
        backward(model, next(batches))
    assert torch.equal(before, weights(model))
    assert engine.step == 1


@pytest.mark.parametrize(
    ("changes", "name"), [({"rule": "flat"}, "rule must be"), ({"optimizer": "sgd"}, "optimizer must be")]
)
def test_words_in_the_place_of_objects_are_named(changes, name):
    model, loader = nn.Linear(2, 1), DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4)
    plan = ao.plan(loader=loader, epochs=1, epsilon=1, delta=1e-5, mechanism="tree")
    arguments = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} | changes
    with pytest.raises(ArgumentError, match=name):
        ao.PrivacyEngine(plan).make_private(model, loader=loader, **arguments)


def test_same_batch_backward_twice_in_a_step():
    _, model, optimizer, loader = private()
    batch = next(iter(loader))
    backward(model, batch)
    with pytest.raises(TrainingError, match="already used"):
        backward(model, batch)
    optimizer.step()


def test_two_outputs_of_one_batch():
    for accumulate in (1, 2):
        engine, model, _, loader = private(loader=DataLoader(data(), batch_size=B // accumulate), accumulate=accumulate)
        x, y = next(iter(loader))
        first, second = (nn.functional.cross_entropy(model(x), y) for _ in range(2))
        first.backward()
        before = {name: value.clone() for name, value in engine.training._waiting.sums.items()}
        with pytest.raises(TrainingError, match="call backward once"):
            second.backward()
        assert all(torch.equal(value, before[name]) for name, value in engine.training._waiting.sums.items())


def test_backward_of_a_batch_whose_step_has_passed():
    """Its units were cut at the norm of that step, and asked for at that step."""

    class WritesData(torch.optim.SGD):
        """Torch sees no change, and lets the backward pass run."""

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data -= 0.1 * p.grad

    model = network()
    engine = ao.PrivacyEngine(planned(), key=KEY)
    optimizer = WritesData(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(model, optimizer, DataLoader(data(), batch_size=B))
    batches = iter(loader)
    (x, y), second = next(batches), next(batches)
    outputs = model(x)
    backward(model, second)
    optimizer.step()
    with pytest.raises(TrainingError, match=r"of step 0 after optimizer\.step\(\): its step has passed"):
        nn.functional.cross_entropy(outputs, y).backward()
    assert not engine.training._waiting.batches


def test_unit_in_two_micro_batches():
    loader = DataLoader(data(), batch_size=2, sampler=[0, 1, 0, 2, *range(3, N)])
    _, model, _, loader = private(loader=loader, accumulate=2)
    batches = iter(loader)
    backward(model, next(batches))
    with pytest.raises(TrainingError, match="two micro-batches"):
        backward(model, next(batches))


@pytest.mark.parametrize(
    ("rows", "order", "words"),
    [
        (
            4,
            ao.participation.MinSeparation(9, b=1, k=9),
            "clipped twice. Batches of the last epoch still wait for a step",
        ),
        (
            12,
            ao.participation.MinSeparation(9, b=1, k=9),
            r"make_private\. Batches of the last epoch .* == len\(loader\)",
        ),
        (12, ao.participation.FixedOrder(4, k=2, b=2), "an epoch ended within accumulate= batches, call optimizer"),
    ],
)
def test_a_shorter_last_group_needs_a_step_as_well(rows, order, words):
    plan = ao.plan(order=order, batch_size=8, epsilon=8, delta=1e-4)
    loader = DataLoader(TensorDataset(torch.randn(rows, 2)), batch_size=4)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = ao.PrivacyEngine(plan).make_private(model, optimizer, loader, accumulate=2)
    with pytest.raises((TrainingError, ParticipationError), match=words):
        for _ in range(2):
            for i, (x,) in enumerate(loader):
                model(x).square().mean().backward()
                if (i + 1) % 2 == 0:
                    optimizer.step()


def test_too_many_micro_batches():
    _, model, _, loader = private()
    batches = iter(loader)
    backward(model, next(batches))
    with pytest.raises(TrainingError, match="accumulate"):
        backward(model, next(batches))


def test_unknown_unit_of_a_known_order():
    order = KnownOrder([[4 * t + i for i in range(B)] for t in range(STEPS)])
    plan = ao.plan(order=order, batch_size=B, epsilon=8, delta=1e-5, mechanism="tree")
    _, model, _, loader = private(plan, loader=DataLoader(data(), batch_size=B, sampler=[*list(range(1, N)), 0]))
    with pytest.raises(ParticipationError):
        backward(model, next(iter(loader)))


def test_shuffled_loader_under_a_plan_for_fixed_order():
    with pytest.raises(LoaderError, match="same order"):
        private(planned(order="fixed"))


def test_loader_of_another_batch_size():
    with pytest.raises(LoaderError, match="steps|batch_size"):
        private(loader=DataLoader(data(), batch_size=3, shuffle=True))


def test_step_without_backward():
    _, model, optimizer, loader = private()
    with pytest.raises(TrainingError, match="without a backward"):
        optimizer.step()
    backward(model, next(iter(loader)))
    optimizer.zero_grad()
    with pytest.raises(TrainingError, match="without a backward"):
        optimizer.step()


def test_raw_gradient_of_the_original_model_is_not_used():
    engine, model, optimizer, loader = private()
    nn.functional.cross_entropy(model.module(data()[:][0]), data()[:][1]).backward()
    with pytest.raises(TrainingError, match="without a backward"):
        optimizer.step()


def test_gradient_from_elsewhere():
    """A penalty on weights would be overwritten in silence, or join the private gradient."""
    engine, model, optimizer, loader = private()
    for batch in loader:
        backward(model, batch)
        optimizer.step()  # no zero_grad: the gradient of the step before is the engine's own
    backward(model, next(iter(loader)))
    sum(p.square().sum() for p in model.parameters()).backward()
    before = weights(model)
    with pytest.raises(TrainingError, match="weight_decay"):
        optimizer.step()
    assert torch.equal(before, weights(model))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert engine.step == 7


def test_lbfgs():
    with pytest.raises(ArgumentError, match="LBFGS"):
        private(optimizer=torch.optim.LBFGS)


def test_input_that_is_not_the_batch():
    _, model, _, loader = private()
    with pytest.raises(TrainingError, match="loader"):
        model(torch.randn(4, 3))
    next(iter(loader))
    with pytest.raises(ArgumentError, match="whole batch"):
        model(torch.randn(7, 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_or_input_where_it_is_to_be_refused(bad):
    engine, model, optimizer, loader = private(non_finite="refuse")
    x, y = next(iter(loader))
    before = weights(model)
    with pytest.raises(NonFiniteError):
        (nn.functional.cross_entropy(model(x), y) * bad).backward()
    with pytest.raises(TrainingError):
        optimizer.step()
    x[:, 1] = bad
    with pytest.raises(NonFiniteError):
        backward(model, (x, y))
    assert torch.equal(before, weights(model))
    assert engine.step == 0


def test_optimizer_with_foreign_parameters():
    stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(ArgumentError, match="optimizer"):
        private(optimizer=lambda p: torch.optim.SGD([*p, stranger], lr=0.1))
    engine, model, optimizer, loader = private()
    optimizer.add_param_group({"params": [stranger]})
    backward(model, next(iter(loader)))
    with pytest.raises(ArgumentError, match="optimizer"):
        optimizer.step()
    assert engine.step == 0


def test_batch_norm():
    engine = ao.PrivacyEngine(planned(), key=KEY)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(ModelError, match="GroupNorm"):
        engine.make_private(
            model, torch.optim.SGD(model.parameters(), lr=1), DataLoader(data(), batch_size=B, shuffle=True)
        )


def test_frozen_after_make_private():
    _, model, _, loader = private()
    batch = next(iter(loader))
    model.module[0].weight.requires_grad_(False)
    with pytest.raises(TrainingError, match="frozen"):
        model(batch[0])


def exchanged_dict(model):
    model._modules = dict(model._modules)
    model._modules["0"] = nn.Linear(3, 4)


CHANGED = "exchanged, added, taken away or moved|was replaced after make_private"
CHANGES = {
    "exchanged": lambda model: model.add_module("0", nn.Linear(3, 4)),
    "added": lambda model: model.append(nn.LayerNorm(2)),
    "taken away": lambda model: model.pop(0),
    "the last": lambda model: model.pop(len(model) - 1),
    "in a dict of its own": exchanged_dict,
    "another name": lambda model: model.add_module("0", nn.Sequential(model[0])),
    "one parameter more": lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(2))),
    "a copy of all that it has": lambda model: vars(model[0]).update(vars(copy.deepcopy(model[0]))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_trained_is_what_was_made_private(name):
    """Another layer would be used, and never trained; its buffers may have numbers of a batch."""
    _, model, optimizer, loader = private()
    batches = iter(loader)
    backward(model, next(batches))
    kept = [(vars(part), dict(vars(part)), part._modules, dict(part._modules)) for part in model.module.modules()]
    held = [(part._parameters, dict(part._parameters)) for part in model.module.modules()]
    CHANGES[name](model.module)
    with pytest.raises(TrainingError, match=CHANGED):
        optimizer.step()
    for names, before, modules, children in kept:
        names.clear()
        names.update(before)
        modules.clear()
        modules.update(children)
    for own, before in held:
        own.clear()
        own.update(before)
    optimizer.step()
    CHANGES[name](model.module)
    with pytest.raises(TrainingError, match=CHANGED):
        model(next(batches)[0])


def test_modules_without_parameters_may_be_exchanged():
    _, model, optimizer, loader = private()
    for i, batch in enumerate(loader):
        model.module[1] = nn.GELU() if i % 2 else nn.ReLU()
        if i == 1:
            model.module.append(nn.Identity())
        last = model.module.pop(len(model.module) - 1)  # for an evaluation, say
        model.module.append(last)
        backward(model, batch)
        optimizer.step()
    assert not torch.equal(model.module[0].weight.grad, torch.zeros(4, 3))


def test_make_private_twice():
    engine, model, optimizer, loader = private()
    with pytest.raises(TrainingError, match="already"):
        engine.make_private(network(), optimizer, loader)


def test_an_optimizer_is_of_one_run():
    """Of two runs on one optimizer, the first would refuse the steps of the second, with words about the first."""
    engine, model, optimizer, _ = private()
    engine.close()
    with pytest.raises(ArgumentError, match="optimizer belongs to another private run"):
        ao.PrivacyEngine(planned()).make_private(model.module, optimizer, DataLoader(data(), batch_size=B))
    new = torch.optim.SGD(model.module.parameters(), lr=0.1)
    second = ao.PrivacyEngine(planned(), key=KEY)
    train(second, *second.make_private(model.module, new, DataLoader(data(), batch_size=B)), epochs=1)
    assert second.step == STEPS


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x):
        return self.decoder(self.encoder(x))


def again(model, optimizer, loader):
    for x in [*itertools.islice(itertools.cycle(loader), 3)]:
        model(x[0]).mean().backward()
        optimizer.step()


def by_parts(model, optimizer, loader):
    for (x,) in loader:
        model.decoder(model.encoder(x)).mean().backward()
        optimizer.step()


def whole_and_part(model, optimizer, loader):
    for (x,) in loader:
        (model(x) - model.encoder(x).mean(1, keepdim=True)).mean().backward()
        optimizer.step()


def time_first(model, optimizer, loader):
    for (x,) in loader:
        model(x.T)


def mixed_up(model, optimizer, loader):
    for (x,) in loader:
        model(0.5 * x + 0.5 * x.flip(0))


HABITS = {
    "cycle": (again, "itertools.cycle"),
    "parts": (by_parts, r"no part of it \(model.encoder"),
    "whole and part": (whole_and_part, r"called alone \(model.encoder"),
    "time first": (time_first, "batch_first=True"),
    "mixup": (mixed_up, "mixup, a shuffled or shifted copy"),
}


@pytest.mark.parametrize("name", HABITS)
def test_habits_of_ordinary_loops_are_told_what_to_do(name):
    loop, words = HABITS[name]
    model = Coder()
    loader = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4)
    plan = ao.plan(loader=loader, epochs=2, epsilon=8, delta=1e-5, mechanism="independent")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private, optimizer, batches = ao.PrivacyEngine(plan, key=KEY).make_private(model, optimizer, loader)
    with pytest.raises((TrainingError, ArgumentError, ModelError), match=words):
        loop(private, optimizer, batches)
