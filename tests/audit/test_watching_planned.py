"""A training by this package's own engine that is watched: its plan's claim holds, unless something is beside it."""

import json
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset, random_split

import anyorder as ao
import anyorder.training.engine  # before a block that watches it
from anyorder.audit.loader_check import watch
from anyorder.clipping.coupling import unwatched
from anyorder.formatting import rounded_up
from audit import checked
from plans import flat_plan

N, DELTA = 80, 1e-5
pytest.importorskip("torch")


def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N, 4, generator=generator), torch.arange(N) % 2, torch.arange(N) // 2)


def bound(dataset=None, *, engine=None, private=None, accumulate=1, **given):
    """(engine, model, optimizer, loader), of two epochs."""
    loader = DataLoader(data() if dataset is None else dataset, batch_size=10, shuffle=True)
    budget = {"loader": loader, "batch_size": 10 * accumulate}
    if "order" in given:
        budget = {"dataset_size": N, "batch_size": 10}
    plan = flat_plan(**budget, epochs=2, epsilon=6, delta=DELTA, mechanism="independent", **given)
    made = ao.PrivacyEngine(plan, **(engine or {}))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return made, *made.make_private(model, optimizer, loader, accumulate=accumulate, **(private or {})), optimizer


def train(model, loader, optimizer, *, epochs=2, accumulate=1):
    for _ in range(epochs):
        for i, (x, y, *_) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()


def own(**options):
    """The finding of a plain training."""
    accumulate = options.get("accumulate", 1)
    with watch() as seen:
        engine, model, optimizer, loader, _ = bound(**options)
        train(model, loader, optimizer, accumulate=accumulate)
    [one] = seen.findings()
    return engine, one


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"order": "poisson"}, {"order": "balls-in-bins"}])
def test_a_plain_training_has_what_its_plan_claims(options):
    engine, one = own(**options)
    found = one.finding
    assert found.claimed == found.true == engine.plan.epsilon
    assert found.holds
    assert found.verdict == "holds"
    assert found.steps == engine.plan.n == engine.step
    assert found.neighbours == engine.plan.neighbours
    assert f"epsilon <= {rounded_up(found.true)}" in str(one)


@pytest.mark.parametrize("order", ["poisson", "balls-in-bins"])
def test_how_often_units_came_by_secret_coins_is_not_told(order):
    _, one = own(order=order)
    assert "who was in them is secret" in str(one)
    assert "most=" not in repr(one)
    assert not {"most", "together", "separation", "weight"} & one.to_dict()["seen"].keys()
    _, plain = own()
    assert plain.to_dict()["seen"]["most"] == 2
    assert "a unit in 2 steps at most" in str(plain)


def test_at_another_delta_it_is_the_plans_curve():
    with watch() as seen:
        engine, model, optimizer, loader, _ = bound()
        train(model, loader, optimizer)
    [one] = seen.findings(delta=1e-7)
    assert one.finding.true == engine.plan.curve.epsilon(1e-7) > engine.plan.epsilon
    assert one.finding.delta == 1e-7


def test_an_epoch_that_is_broken_off_costs_nothing():
    with watch() as seen:
        engine, model, optimizer, loader, _ = bound()
        train(model, loader, optimizer, epochs=1)
    [one] = seen.findings()
    assert one.finding.holds
    assert "Of 16 planned steps 8 were taken" in one.finding.because


def test_a_resumed_run_counts_from_where_it_was(tmp_path):
    engine, model, optimizer, loader, _ = bound(engine={"checkpoint": tmp_path / "c.pt"})
    train(model, loader, optimizer, epochs=1)
    engine.save()
    engine.close()
    with watch() as seen:
        loader = DataLoader(data(), batch_size=10, shuffle=True)
        again = ao.PrivacyEngine(engine.plan, checkpoint=tmp_path / "c.pt")
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = again.make_private(model, optimizer, loader)
        train(model, loader, optimizer, epochs=1)
    [one] = seen.findings()
    assert one.finding.holds
    assert "Of 16 planned steps 16 were taken" in one.finding.because


def test_users_are_by_the_ledger_alone():
    with watch() as seen:
        loader = DataLoader(data(), batch_size=10)
        plan = ao.plan(loader=loader, unit=2, epochs=2, epsilon=6, delta=DELTA, mechanism="independent")
        engine = ao.PrivacyEngine(plan)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.make_private(model, optimizer, loader, unit=2)
        train(model, loader, optimizer)
    [one] = seen.findings()
    assert one.finding.holds
    assert f"who counts as one {plan.unit} is what the script says" in one.finding.because


def not_proven(seen, words):
    findings = seen.findings()
    for one in findings:
        assert not one.finding.holds
        assert one.finding.verdict == "not proven"
    assert words in findings[0].finding.because


def test_a_second_optimizer_on_the_same_data_is_not_covered():
    with watch() as seen:
        _, model, optimizer, loader, _ = bound()
        beside = nn.Linear(4, 2)
        other = torch.optim.SGD(beside.parameters(), lr=0.1)
        for x, y, _ in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            F.cross_entropy(beside(unwatched(x)), unwatched(y)).backward()
            other.step()
    not_proven(seen, "another optimizer, or another engine")


def test_a_plain_training_after_the_private_one_is_not_covered():
    dataset = data()
    with watch() as seen:
        _, model, optimizer, loader, _ = bound(dataset)
        train(model, loader, optimizer)
        beside = nn.Linear(4, 2)
        train(beside, DataLoader(dataset, batch_size=10), torch.optim.SGD(beside.parameters(), lr=0.1), epochs=1)
    not_proven(seen, "another optimizer, or another engine")


def test_other_data_before_it_are_no_concern_of_it_and_judged_by_themselves():
    public = TensorDataset(torch.randn(20, 4), torch.arange(20) % 2)
    with watch() as seen:
        beside = nn.Linear(4, 2)
        train(beside, DataLoader(public, batch_size=5), torch.optim.SGD(beside.parameters(), lr=0.1), epochs=1)
        _, model, optimizer, loader, _ = bound()
        train(model, loader, optimizer)
    first, second = seen.findings()
    assert not first.finding.holds  # at the noise that is taken where none is known
    assert second.finding.holds


def test_parts_of_one_data_set_are_one():
    part, rest = random_split(data(), [60, 20], torch.Generator().manual_seed(1))
    with watch() as seen:
        _, model, optimizer, loader, _ = bound(part)
        train(model, loader, optimizer)
        with torch.no_grad():
            for x, _, _ in DataLoader(rest, batch_size=10):
                model(x)
    [one] = seen.findings()
    assert one.finding.holds


def test_two_engines_on_one_data_set_cost_more_than_each():
    dataset = data()
    with watch() as seen:
        for _ in range(2):
            _, model, optimizer, loader, _ = bound(dataset)
            train(model, loader, optimizer)
    not_proven(seen, "2 engines trained on it")


def test_a_key_in_the_script_is_told():
    with watch() as seen:
        _, model, optimizer, loader, _ = bound(engine={"key": bytes(32)})
        train(model, loader, optimizer)
    not_proven(seen, "the script gives the engine its noise key")


def test_gradients_that_are_refused_tell():
    with watch() as seen:
        _, model, optimizer, loader, _ = bound(private={"non_finite": "refuse"})
        train(model, loader, optimizer)
    not_proven(seen, "tells of gradients that are not finite")


def test_an_optimizer_that_steps_without_the_engine_is_seen():
    """The gradients of a step that the engine did not take are nobody's: here a hook of it is taken away."""
    with watch() as seen:
        engine, model, optimizer, loader, _ = bound()
        train(model, loader, optimizer, epochs=1)
        optimizer._optimizer_step_pre_hooks.clear()
        plain = nn.Linear(4, 2)
        optimizer.param_groups[0]["params"] = list(plain.parameters())
        for x, y, _ in loader:
            F.cross_entropy(plain(unwatched(x)), unwatched(y)).backward()
            optimizer.step()
    assert engine.step == 8
    not_proven(seen, "the engine took 8 steps, and 16 were seen")


def test_weights_that_are_changed_by_hand_between_steps_are_seen():
    for is_back in (True, False):
        with watch() as seen:
            _, model, optimizer, loader, _ = bound()
            train(model, loader, optimizer, epochs=1)
            weight = optimizer.param_groups[0]["params"][0]
            kept = weight.detach().clone()
            weight.data.add_(data()[:10][0].mean())
            if is_back:  # as weights of an average that are tried and taken out
                weight.data.copy_(kept)
            train(model, loader, optimizer, epochs=1)
        if is_back:
            assert seen.findings()[0].finding.holds
        else:
            not_proven(seen, "weights were changed between two steps")


def test_an_example_that_stands_twice_in_the_data_is_not_one_unit():
    dataset = data()
    with watch() as seen:
        loader = DataLoader(ConcatDataset([dataset, dataset]), batch_size=40, shuffle=False)
        plan = ao.plan(dataset_size=160, batch_size=40, epochs=1, order="fixed", epsilon=6, delta=DELTA,
                       mechanism="independent")  # fmt: skip
        engine = ao.PrivacyEngine(plan)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            model, optimizer, loader = engine.make_private(model, optimizer, loader)
            train(model, loader, optimizer, epochs=1)
        except ao.errors.AnyorderError:
            return  # the engine has refused it by itself
    not_proven(seen, "oftener or nearer")


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
import anyorder.training.engine  # before a block that watches it

data = TensorDataset(torch.randn(60, 4), torch.arange(60) % 2)
loader = DataLoader(data, batch_size=10, shuffle=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plan = ao.plan(loader=loader, epochs=2, epsilon=4, delta=1e-5, mechanism="tree", optimizer=optimizer)
engine = ao.PrivacyEngine(plan)
model, optimizer, loader = engine.make_private(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def test_the_command_knows_the_engine(tmp_path):
    (tmp_path / "own.py").write_text(textwrap.dedent(SCRIPT))
    done = checked.run("-m", "anyorder", "check", "--json", "own.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [one] = json.loads(done.stdout)["findings"]
    assert one["holds"]
    assert one["verdict"] == "holds"
    assert one["claimed"] == one["true"] == pytest.approx(4, rel=1e-3)
    assert one["accountant"] == "the plan of the script's own engine"
