"""The plan's unit is the run's, and what the loader lists twice is not taken for two units."""

import warnings

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

import anyorder as ao
from anyorder.errors import LoaderError, ParticipationError, PlanError
from anyorder.participation import MinSeparation
from anyorder.plan.planner import plan_at_sigma
from training.test_batches import DATA, ROWS, USERS, B
from training.test_engine import planned, private, train


def stated(n=6, b=1, k=6, unit="user"):
    return ao.plan(
        order=MinSeparation(n, b, k), batch_size=B, epsilon=8, delta=1e-5, mechanism="independent", unit=unit
    )


def test_units_of_plan_and_run_are_the_same_thing():
    with pytest.raises(PlanError, match=r"protects one user.*each example is clipped.*unit="):
        private(planned(unit="user"))
    with pytest.raises(PlanError, match=r"protects one user.*each example is clipped"):
        private(stated())
    with pytest.raises(PlanError, match=r"protects one example.*unit='user'"):
        private(stated(unit="example"), loader=DataLoader(DATA, batch_size=B), unit=2)
    engine, *_ = private(stated(), loader=DataLoader(DATA, batch_size=B), unit=2)
    assert engine.certificate().plan.unit == "user"


@pytest.mark.parametrize(
    ("shuffle", "why"),
    [(False, r"unit='user' is not in the batch"), (True, r"must be known beforehand.*order=")],
)
def test_no_plan_for_units_that_a_loader_does_not_tell(shuffle, why):
    with pytest.raises(LoaderError, match=why):
        ao.plan(loader=DataLoader(DATA, batch_size=B, shuffle=shuffle), epochs=2, epsilon=8, delta=1e-5, unit="user")


def test_a_loader_that_scatters_the_examples_of_a_unit_is_told_of_before_the_first_step():
    shuffled = DataLoader(DATA, batch_size=B, shuffle=True)
    with pytest.warns(UserWarning, match=r"shuffles examples, so that those of one user"):
        private(stated(b=2), loader=shuffled, unit=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private(stated(b=1), loader=shuffled, unit=2)
        private(stated(b=2), loader=DataLoader(DATA, batch_size=B), unit=2)


def test_add_or_remove_neighbours_need_batches_that_stay_where_a_unit_is_absent():
    def plan(unit):
        return plan_at_sigma(
            1, order=MinSeparation(6, 3, 2), batch_size=B, delta=1e-5, mechanism="independent", unit=unit,
            neighbours="add-or-remove",
        )  # fmt: skip

    with pytest.raises(PlanError, match="add-or-remove.*sequential"):
        private(plan("example"), loader=DataLoader(DATA, batch_size=B))
    with pytest.raises(PlanError, match="add-or-remove.*shuffled"):
        private(plan("user"), loader=DataLoader(DATA, batch_size=B, shuffle=True), unit=2)
    batches = list(DataLoader(DATA, batch_size=B))
    with pytest.raises(PlanError, match=f"add-or-remove.*every {B} examples of a stream"):
        private(plan("user"), loader=DataLoader(Stream(DATA), batch_size=B), unit=2)
    private(plan("user"), loader=batches, unit=2)
    private(plan("user"), loader=DataLoader(Stream(batches), batch_size=None), unit=2)


def test_repeated_examples_are_refused_or_left_to_the_ledger():
    """One user of 24 places at a claim for one place: the gradient of an example would count 24 times."""
    repeated = Subset(DATA, [0] * 4 + list(range(1, ROWS - 3)))
    assert len(repeated) == ROWS
    with pytest.raises(LoaderError, match="more than once"):
        ao.plan(loader=DataLoader(repeated, batch_size=B, shuffle=True), epochs=2, epsilon=8, delta=1e-5)
    with pytest.raises(LoaderError, match="more than once"):
        private(planned(), loader=DataLoader(repeated, batch_size=B, shuffle=True))
    overlapping = ConcatDataset([Subset(DATA, range(12)), Subset(DATA, range(8, 20))])
    engine, model, optimizer, loader = private(
        stated(b=2, unit="example"), loader=DataLoader(overlapping, batch_size=B)
    )
    with pytest.raises(ParticipationError):
        train(engine, model, optimizer, loader, epochs=1)
    assert engine.step == 3  # example 8 was in step 2
    engine, model, optimizer, loader = private(stated(unit="example"), loader=DataLoader(repeated, batch_size=B))
    train(engine, model, optimizer, loader, epochs=1)
    assert next(iter(engine.ledger.history())).tolist() == [0]  # summed, then clipped once


def test_poisson_of_a_run_leaves_held_out_examples_out():
    held_in = [3, 9, 4, 7, 1]
    loader = DataLoader(DATA, batch_size=2, sampler=torch.utils.data.SubsetRandomSampler(held_in))
    plan = planned(order="poisson", mechanism="independent", dataset_size=5, batch_size=2, epochs=10)
    engine, model, optimizer, loader = private(plan, loader=loader)
    train(engine, model, optimizer, loader, epochs=10)
    assert set().union(*(units.tolist() for units in engine.ledger.history())) == set(held_in)


class OwnLoader(DataLoader):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class Stream(IterableDataset):
    def __init__(self, parts=DATA):
        self.parts = parts

    def __iter__(self):
        return iter(self.parts)


def batches_of_one_s_own():
    yield from DataLoader(DATA, batch_size=B)


ITERABLES = {
    "list": lambda: list(DataLoader(DATA, batch_size=B)),
    "generator": batches_of_one_s_own,
    "loader of one's own": lambda: OwnLoader(DATA, batch_size=B),
}


@pytest.mark.parametrize("name", ITERABLES)
def test_any_iterable_of_batches_trains_where_they_name_their_units(name):
    engine, model, optimizer, loader = private(stated(), loader=ITERABLES[name](), unit=2)
    train(engine, model, optimizer, loader, epochs=1)
    history = [units.tolist() for units in engine.ledger.history()]
    expected = [sorted(set(USERS[i : i + B].tolist())) for i in range(0, ROWS, B)]
    assert history == (expected[::-1] if "own" in name else expected)
    assert loader.position == 6
    assert loader.batches_per_epoch is None
    if name != "generator":
        with pytest.raises(LoaderError, match=r"order=.*unit='user'.*make_private"):
            private(stated(unit="example"), loader=ITERABLES[name]())
