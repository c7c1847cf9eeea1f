"""`ao.plan` and `ao.check` read a loader alike: who takes part when is told by one reader."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import LoaderError
from anyorder.noise import NoiseSource
from anyorder.participation import BallsInBins, EpochShuffle, FixedOrder, KnownOrder, PoissonSampling, SingleEpoch
from anyorder.sampling import EpochShuffleSampler, PoissonRates, UnitOrderSampler
from anyorder.sampling.read_loader import find_participation
from anyorder.sampling.samplers import FixedOrderSampler, PoissonBatchSampler
from anyorder.sampling.secret import secret_loader
from sampling.loaders import Backwards, OwnLoader, Pairs, Stream, SubclassedRandom

N = 24
DATA = TensorDataset(torch.arange(N), torch.arange(N) // 3)
TWICE = data.ConcatDataset([DATA, data.Subset(DATA, [0, 5])])
SOURCE = NoiseSource(bytes(32))

SAMPLERS = {
    "sequential": lambda: data.SequentialSampler(DATA),
    "random": lambda: data.RandomSampler(DATA),
    "random, some": lambda: data.RandomSampler(DATA, num_samples=9),
    "random, more": lambda: data.RandomSampler(DATA, num_samples=N + 1),
    "random, with replacement": lambda: data.RandomSampler(DATA, replacement=True),
    "subset": lambda: data.SubsetRandomSampler([3, 9, 4, 20, 1]),
    "subset, twice": lambda: data.SubsetRandomSampler([3, 9, 3]),
    "subset, from the end": lambda: data.SubsetRandomSampler([3, 9, -2]),
    "subset, empty": lambda: data.SubsetRandomSampler([]),
    "weighted": lambda: data.WeightedRandomSampler([1.0] * N, 8),
    "rates": lambda: PoissonRates([0.1] * N, 0.2),
    "weighted, without replacement": lambda: data.WeightedRandomSampler([1.0] * N, 8, replacement=False),
    "distributed": lambda: data.DistributedSampler(DATA, 3, 1),
    "distributed, in turn": lambda: data.DistributedSampler(DATA, 3, 1, shuffle=False),
    "distributed, filled up": lambda: data.DistributedSampler(DATA, 5, 1),
    "distributed, cut": lambda: data.DistributedSampler(DATA, 5, 1, drop_last=True),
    "fixed": lambda: FixedOrderSampler(DATA, 1),
    "keyed": lambda: EpochShuffleSampler(DATA, 1),
    "list": lambda: [3, 1, 2, 0, 7],
    "list, twice": lambda: [3, 1, 3],
    "list, from the end": lambda: (3, -1),
    "range": lambda: range(2, 20),
    "array": lambda: np.array([5, 4, 3, 2]),
    "tensor": lambda: torch.tensor([5, 4, 3, 2]),
    "own": Backwards,
    "own subclass": lambda: SubclassedRandom(DATA),
}
BATCH_SAMPLERS = {
    "list of batches": lambda: [[0, 1], [2, 3]],
    "uneven list of batches": lambda: ([0, 1, 2], [5], [9, 7]),
    "list of batches, twice": lambda: [[0, 1], [1, 3]],
    "list of batches, from the end": lambda: [[0, 1], [-1, 3]],
    "batches that are no indices": lambda: [["a", "b"]],
    "own batches": Pairs,
    "by units": lambda: UnitOrderSampler((torch.arange(N) // 3).tolist(), 4, 1),
    "poisson": lambda: PoissonBatchSampler(N, 0.25, 7, SOURCE),
}
LOADERS = {
    **{
        f"{name}, {size}{' drop_last' if drop else ''}": lambda make=make, size=size, drop=drop: DataLoader(
            DATA, size, sampler=make(), drop_last=drop
        )
        for (name, make), (size, drop) in itertools.product(SAMPLERS.items(), [(1, False), (4, False), (4, True)])
    },
    **{f"batch sampler of {name}": lambda make=make: DataLoader(DATA, batch_sampler=data.BatchSampler(make(), 4, False))
       for name, make in SAMPLERS.items()},
    **{f"uncollated {name}": lambda make=make: DataLoader(DATA, None, sampler=make())
       for name, make in {**SAMPLERS, **BATCH_SAMPLERS}.items()},
    **{name: lambda make=make: DataLoader(DATA, batch_sampler=make()) for name, make in BATCH_SAMPLERS.items()},
    "stream": lambda: DataLoader(Stream()),
    "own loader": lambda: OwnLoader(DATA, 4),
    "as workers finish": lambda: DataLoader(DATA, 4, num_workers=1, in_order=False),
    "an example in two data sets": lambda: DataLoader(TWICE, 4),
    "an example in two data sets, shuffled": lambda: DataLoader(TWICE, 4, shuffle=True),
    "secret poisson": lambda: secret_loader(DataLoader(DATA, 4), PoissonSampling(8, 0.25), SOURCE),
    "secret bins": lambda: secret_loader(DataLoader(DATA, 4), BallsInBins(2, 4), SOURCE),
}  # fmt: skip
WAYS = [(1, 1, None), (2, 1, None), (3, 2, None), (2, 4, None), (2, 1, 1)]  # epochs, accumulate, unit


def planned(loader, epochs, accumulate, unit):
    """What `ao.plan(loader=..)` plans for; None where it refuses the loader."""
    try:
        found = find_participation(loader, epochs, unit=unit, accumulate=accumulate)
    except LoaderError:
        return None
    return found.participation


def checked(loader, epochs, accumulate, unit):
    try:
        found = ao.check(
            loader, noise_multiplier=1.0, epochs=epochs, delta=1e-5, accumulate=accumulate, unit=unit, accountant="rdp"
        )
    except LoaderError:
        return None
    return found.participation


def alike(first, second):
    """Equal; known orders up to the names of their units, which a check leaves out."""
    if type(first) is type(second) is KnownOrder:
        return sorted(first.patterns()) == sorted(second.patterns())
    return first == second


def test_plan_and_check_give_one_answer(monkeypatch):
    for name in ("printed", "epsilon_of", "epsilon_at_least"):  # which are not what is asked
        monkeypatch.setattr(f"anyorder.audit.loader_check.{name}", lambda *_: 1.0)
    answers = {}
    for name, make in LOADERS.items():
        for way in WAYS:
            both = planned(make(), *way), checked(make(), *way)
            assert alike(*both), (name, way, both)
            answers[name, way] = both[0]
    kinds = {type(found) for found in answers.values()}
    assert kinds == {type(None), SingleEpoch, FixedOrder, EpochShuffle, KnownOrder, PoissonSampling}


@pytest.mark.parametrize("batches", [[[0, 1], [2, 3]], ([3, 1, 2], [0])])
def test_a_list_of_batches_is_a_fixed_order(batches):
    loader = DataLoader(DATA, batch_sampler=batches)
    plan = ao.plan(loader=loader, epochs=3, noise_multiplier=1.0, delta=1e-5, mechanism="independent")
    assert plan.participation == FixedOrder(6, 3, 2)
    assert plan.batch_size == max(map(len, batches))
    assert plan.dataset_size == 4


def test_what_is_planned_can_be_trained():
    """The engine follows the same reading: every batch is one of the list, in its order."""
    loader = DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]])
    plan = ao.plan(loader=loader, epochs=2, noise_multiplier=1.0, delta=1e-5, mechanism="independent")
    model = torch.nn.Linear(1, 1)
    engine = ao.PrivacyEngine(plan)
    model, optimizer, private = engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    seen = []
    for _ in range(2):
        for x, _y in private:
            optimizer.zero_grad()
            model(x[:, None].float()).square().mean().backward()
            optimizer.step()
            seen.append(x.tolist())
    assert seen == [[0, 1], [2, 3]] * 2


def test_poisson_indices_that_stand_twice_are_refused():
    """Who is listed twice has two coins in each step, where the plan counts one."""
    own = np.arange(N)
    sampler = PoissonBatchSampler(N, 0.25, 7, SOURCE, indices=own)
    loader = DataLoader(DATA, batch_sampler=sampler)
    own[:] = 0  # which is the caller's own
    assert planned(loader, 1, 1, None) == PoissonSampling(7, 0.25)
    sampler.indices[1] = sampler.indices[0]
    with pytest.raises(LoaderError, match="distinct"):
        ao.plan(loader=loader, epochs=1, noise_multiplier=1.0, delta=1e-5)
    assert not ao.check(loader, noise_multiplier=1.0, epochs=1, delta=1e-5).holds


class OwnIterator(DataLoader):
    def _get_iterator(self):
        return iter([torch.zeros(4)] * 5)


class OwnIndices(DataLoader):
    @property
    def _index_sampler(self):
        return [[0] * 4] * 5


def with_own(name):
    loader = DataLoader(DATA, 4)
    setattr(loader, name, OwnIterator(DATA, 4)._get_iterator)
    return loader


@pytest.mark.parametrize(
    "make", [lambda: OwnIterator(DATA, 4), lambda: OwnIndices(DATA, 4), lambda: with_own("_get_iterator")]
)
def test_a_loader_that_iterates_in_its_own_way_is_not_plain(make):
    """Its sampler says nothing of its batches."""
    with pytest.raises(LoaderError, match="overrides"):
        ao.plan(loader=make(), epochs=1, noise_multiplier=1.0, delta=1e-5)
    assert ao.check(make(), noise_multiplier=1.0, epochs=1, delta=1e-5).true == float("inf")
