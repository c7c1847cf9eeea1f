"""Orders for user ids: whole units, few steps, far apart; and plans for the order of units that a loader has."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import ArgumentError, LoaderError, ParticipationError, PlanError
from anyorder.formatting import rounded_up
from anyorder.participation import KnownOrder
from anyorder.sampling import EpochShuffleSampler, UnitOrderSampler
from anyorder.sampling.read_loader import find_participation


def steps_of(ids, sampler):
    """{unit: its steps in an epoch}."""
    found = {}
    for t, batch in enumerate(sampler):
        for unit in {ids[i] for i in batch}:
            found.setdefault(unit, []).append(t)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_example_comes_once_and_every_unit_in_as_few_steps_as_fit(seed):
    draw = np.random.default_rng(seed)
    ids, size = draw.integers(0, draw.integers(1, 60), draw.integers(1, 500)).tolist(), int(draw.integers(1, 40))
    sampler = UnitOrderSampler(ids, size, seed=seed)
    batches = list(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(len(ids)))
    assert len(batches) == len(sampler)
    assert set(map(len, batches)) <= set(range(1, size + 1))
    for unit, steps in steps_of(ids, sampler).items():
        assert len(steps) == -(-ids.count(unit) // size)
    # Any two of the batches that are not over half full would have been one.
    assert sum(2 * len(batch) <= size for batch in batches) <= 1


def test_the_steps_of_a_large_unit_lie_far_apart():
    ids = ["large"] * 40 + [f"u{i}" for i in range(160)]
    steps = steps_of(ids, UnitOrderSampler(ids, 10, seed=3))["large"]
    assert len(steps) == 4
    assert min(np.diff([*steps, steps[0] + 20])) >= 4  # evenly: 5 of 20


def test_several_large_units_share_steps_and_stay_apart():
    ids = [f"u{i}" for i in range(8) for _ in range(26)]
    found = steps_of(ids, UnitOrderSampler(ids, 20, seed=0))
    assert all(len(steps) == 2 and steps[1] - steps[0] >= 3 for steps in found.values())


def test_the_order_follows_the_seed_alone():
    ids = [i % 7 for i in range(60)]
    one, again, other = (list(UnitOrderSampler(ids, 9, seed=s)) for s in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(("ids", "size"), [([], 4), ([1, 2], 0), ([1, "a"], 4), ([1.5], 4)])
def test_ids_and_sizes_that_make_no_order_are_refused(ids, size):
    with pytest.raises(ArgumentError):
        UnitOrderSampler(ids, size)


def users(seed=0, *, count=240, people=12):
    ids = torch.tensor(np.random.default_rng(seed).integers(0, people, count))
    return ids, TensorDataset(torch.randn(count, 4), torch.randint(0, 2, (count,)), ids)


def orders(ids, data):
    shuffled, fixed = EpochShuffleSampler(data, 5), ao.FixedOrderSampler(data, 5)
    return {
        "sequential": DataLoader(data, batch_size=32),
        "without the last": DataLoader(data, batch_size=32, drop_last=True),
        "once": DataLoader(data, batch_size=32, sampler=fixed),
        "in each epoch": DataLoader(data, batch_size=32, sampler=shuffled),
        "by unit": DataLoader(data, batch_sampler=UnitOrderSampler(ids.tolist(), 32, seed=5)),
    }


@pytest.mark.parametrize("name", orders(*users()))
def test_the_plan_is_for_the_units_that_the_run_meets(name):
    ids, data = users()
    loader = orders(ids, data)[name]
    plan = ao.plan(loader=loader, unit=2, epochs=2, epsilon=4, delta=1e-5, mechanism="tree")
    assert (plan.unit, plan.batch_size) == ("user", 32)
    engine = ao.PrivacyEngine(plan)
    model = nn.Linear(4, 2)
    model, optimizer, private = engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader, unit=2)
    met = []
    for _ in range(2):
        for x, y, owner in private:
            met.append(owner.tolist())
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert plan.participation == KnownOrder(met)
    assert engine.ledger.realised() == plan.participation


def test_numbers_of_a_batch_are_units_and_truth_values_are_none():
    class Taken(int):
        def __int__(self):
            return 0

    assert KnownOrder([[Taken(3), 5], [4]]) == KnownOrder([[3, 5], [4]])
    for mixed in ([[True]], [[Taken(3), True]], [[Taken(3), "3"]], [[Taken(3), 1.0]]):
        with pytest.raises(ArgumentError, match="all integers or all strings"):
            KnownOrder(mixed)


def test_units_by_field_and_by_a_function_give_one_plan():
    ids, data = users()

    def named(examples):
        x, y, owners = torch.utils.data.default_collate(examples)
        return {"x": x, "y": y, "user_id": [f"user {i}" for i in owners.tolist()]}

    loader = DataLoader(data, batch_size=32, collate_fn=named)
    by_field = ao.plan(loader=loader, unit="user_id", epochs=1, epsilon=4, delta=1e-5, mechanism="tree")
    by_function = ao.plan(
        loader=loader, unit=lambda batch: batch["user_id"], epochs=1, epsilon=4, delta=1e-5, mechanism="tree"
    )
    assert by_field.participation == by_function.participation
    assert (by_field.unit, by_function.unit) == ("user_id", "user")
    assert "user 3" not in str(by_field)


def test_each_unit_has_its_own_mu_and_the_plan_the_largest():
    ids, data = users()
    plan = ao.plan(loader=DataLoader(data, batch_size=32), unit=2, epochs=2, epsilon=4, delta=1e-5, mechanism="tree")
    mus = plan.unit_mus()
    assert len(mus) == len(set(ids.tolist()))
    assert mus.max() == pytest.approx(plan.mu, rel=1e-12)
    own = ao.unit_sensitivities(plan.strategy, plan.participation)
    assert mus == pytest.approx(plan.mu * own / own.max(), rel=1e-12)
    replaced = replace(plan, neighbours="replace-one")
    assert replaced.unit_mus().max() == pytest.approx(replaced.mu, rel=1e-12)
    assert f"mu from {rounded_up(mus.min())} to {rounded_up(mus.max())}" in str(plan)
    with pytest.raises(PlanError, match="KnownOrder"):
        ao.plan(dataset_size=9, batch_size=3, epochs=1, epsilon=1, delta=1e-5, mechanism="tree").unit_mus()


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": torch.utils.data.SubsetRandomSampler([1, 2, 3])}])
def test_an_order_that_is_drawn_later_is_refused_with_the_samplers_that_are_known(options):
    _, data = users()
    with pytest.raises(LoaderError, match="UnitOrderSampler"):
        ao.plan(loader=DataLoader(data, batch_size=32, **options), unit=2, epochs=2, epsilon=4, delta=1e-5)


def test_another_seed_than_the_plans_is_refused():
    ids, data = users(people=100)

    def loader(seed):
        return DataLoader(data, batch_sampler=UnitOrderSampler(ids.tolist(), 32, seed=seed))

    plan = ao.plan(loader=loader(1), unit=2, epochs=1, epsilon=4, delta=1e-5, mechanism="tree")
    engine, model = ao.PrivacyEngine(plan), nn.Linear(4, 2)
    model, _, private = engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader(2), unit=2)
    with pytest.raises(ParticipationError):
        for x, *_ in private:
            model(x)


def test_one_pass_reads_every_example_once():
    class Counting(torch.utils.data.Dataset):
        def __init__(self):
            self.read = []

        def __len__(self):
            return 20

        def __getitem__(self, i):
            self.read.append(i)
            return torch.zeros(2), i % 3

    data = Counting()
    found = find_participation(DataLoader(data, batch_size=6, sampler=EpochShuffleSampler(20, 1)), 4, unit=1)
    assert sorted(data.read) == list(range(20))
    assert found.participation.n == 16


def test_a_plan_of_joined_batches_that_the_engine_would_refuse_is_refused_with_the_cure():
    """It was made, and the engine stopped in the first step: a unit is in two micro-batches."""
    ids = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    data = TensorDataset(torch.randn(12, 3), torch.arange(12) % 2, torch.tensor(ids))
    options = {"unit": 2, "epochs": 1, "epsilon": 8, "delta": 1e-3}
    with pytest.raises(LoaderError, match=r"UnitOrderSampler\(ids, batch_size\)") as told:
        ao.plan(loader=DataLoader(data, batch_size=4), batch_size=8, **options)
    assert "two of the 2 batches" in str(told.value)
    # What it names does run: the units whole, or batches of a step's size.
    together = DataLoader(data, batch_sampler=UnitOrderSampler(ids, 5, seed=0))
    for loader, size, accumulate in ((together, 10, 2), (DataLoader(data, batch_size=8), None, 1)):
        plan = ao.plan(loader=loader, batch_size=size, **options)
        model = nn.Linear(3, 2)
        engine = ao.PrivacyEngine(plan)
        model, optimizer, batches = engine.make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader, unit=2, accumulate=accumulate
        )
        for i, (x, y, _) in enumerate(batches, 1):
            nn.functional.cross_entropy(model(x), y).backward()
            if i % accumulate == 0 or i == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        assert engine.step == plan.n
