"""The participation read off a loader is the one its batches have."""

import numpy as np
import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader

import anyorder as ao
from anyorder.errors import LoaderError, ParticipationError
from anyorder.ledger import replay
from anyorder.participation import EpochShuffle, FixedOrder, MinSeparation, PoissonSampling, SingleEpoch
from anyorder.sampling.loader import PrivateLoader
from anyorder.sampling.read_loader import find_participation
from anyorder.sampling.samplers import PoissonBatchSampler
from sampling.loaders import (
    DATA,
    KNOWN,
    SOURCE,
    Backwards,
    N,
    OwnLoader,
    Pairs,
    Stream,
    SubclassedRandom,
    distributed,
    nothing,
    private,
)


@pytest.mark.parametrize("name", KNOWN)
def test_found_participation_is_the_one_the_batches_have(name):
    make, expected, phrase = KNOWN[name]
    loader = make()
    found = find_participation(loader, 3)
    assert found.participation == expected
    assert phrase in found.order
    single = find_participation(loader, 1)
    assert single.participation == SingleEpoch(expected.n // 3)
    mine, calls = private(loader)
    for _ in range(3):
        for _ in mine:
            pass
    assert [position for _, position in calls] == list(range(expected.n))
    assert max(len(units) for units, _ in calls) == found.batch_size
    assert len({u for units, _ in calls for u in units}) <= found.dataset_size
    replay(found.participation, [units for units, _ in calls])
    per_epoch = found.steps_per_epoch
    replay(single.participation, [units for units, _ in calls[per_epoch : 2 * per_epoch]])
    if isinstance(expected, EpochShuffle):  # the claim is not looser than the truth
        with pytest.raises(ParticipationError):
            replay(FixedOrder(expected.n, 3, expected.steps_per_epoch), [units for units, _ in calls])


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("accumulate", [2, 3, 99])
def test_joined_batches_are_steps_of_one_epoch(name, accumulate):
    """The batches, joined here by hand epoch by epoch, are steps that the found participation allows."""
    make, expected, _ = KNOWN[name]
    loader = make()
    found = find_participation(loader, 3, accumulate=accumulate)
    mine, calls = private(loader)
    joined = []
    for _ in range(3):
        before = len(calls)
        for _ in mine:
            pass
        batches = [units for units, _ in calls[before:]]
        joined += [np.concatenate(batches[i : i + accumulate]) for i in range(0, len(batches), accumulate)]
    assert len(joined) == found.participation.n
    assert type(found.participation) is type(expected)
    assert found.steps_per_epoch == find_participation(loader, 3).steps_per_epoch
    assert replay(found.participation, joined).realised().max_participations == 3


def test_poisson_batches_are_not_joined():
    loader = DataLoader(DATA, batch_sampler=PoissonBatchSampler(N, 0.25, 7, SOURCE))
    with pytest.raises(LoaderError, match="accumulate must be 1, got 2"):
        find_participation(loader, 1, accumulate=2)


@pytest.mark.parametrize("shuffle", [False, True])
def test_distributed_steps_are_those_of_all_ranks_together(shuffle):
    found = find_participation(distributed(0, shuffle), 2)
    assert found.participation == (EpochShuffle(2, 4) if shuffle else FixedOrder(8, 2, 4))
    assert (found.batch_size, found.dataset_size, found.steps_per_epoch) == (6, N, 4)
    runs = [private(distributed(rank, shuffle)) for rank in range(3)]
    for mine, _ in runs:
        for _ in range(2):
            list(mine)
    steps = [[unit for _, calls in runs for unit in calls[t][0]] for t in range(8)]
    replay(found.participation, steps)
    assert all(len(set(units)) == len(units) for units in steps)
    assert (sorted(steps[0]) != sorted(steps[4])) == shuffle  # the epoch was told to the sampler


def test_distributed_padding_is_refused_and_an_even_deal_is_not():
    with pytest.raises(LoaderError, match="repeats 1 example"):
        find_participation(distributed(0, True, drop_last=False), 2)
    assert find_participation(distributed(0, True, drop_last=False, size=24), 2).participation == EpochShuffle(2, 4)


def test_undistributed_sampler_on_several_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(LoaderError, match="each of the 4 ranks would give out the whole data set"):
        find_participation(DataLoader(DATA, shuffle=True), 1)
    with pytest.raises(LoaderError, match="deals the examples out to 3 ranks, and 4 take part"):
        find_participation(distributed(0, True), 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert find_participation(distributed(0, True), 2).participation == EpochShuffle(2, 4)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert find_participation(DataLoader(DATA, batch_size=N), 2).participation == FixedOrder(2, 2, 1)


def test_poisson_is_found_only_from_its_own_sampler():
    sampler = PoissonBatchSampler(N, 0.25, 7, SOURCE)
    found = find_participation(DataLoader(DATA, batch_sampler=sampler), 2)
    assert found.participation == PoissonSampling(14, 0.25)
    assert (found.batch_size, found.dataset_size, found.steps_per_epoch) == (6, N, 7)


REFUSED = {
    "replacement": (lambda: DataLoader(DATA, sampler=data.RandomSampler(DATA, replacement=True)), "replacement=True"),
    "more": (lambda: DataLoader(DATA, sampler=data.RandomSampler(DATA, num_samples=N + 1)), f"num_samples={N + 1}"),
    "weighted": (
        lambda: DataLoader(DATA, sampler=data.WeightedRandomSampler([1.0] * N, 4)),
        "weights are public.*weight the loss",
    ),
    "own sampler": (lambda: DataLoader(DATA, sampler=Backwards()), "Backwards is not known.*order="),
    "subclass": (lambda: DataLoader(DATA, sampler=SubclassedRandom(DATA)), "SubclassedRandom is not known"),
    "own batches": (
        lambda: DataLoader(DATA, batch_sampler=Pairs()),
        "batch sampler Pairs is not known.*order=.*MinSeparation",
    ),
    "stream": (lambda: DataLoader(Stream()), "IterableDataset.*unit=.*order= and unit='user'"),
    "list": (lambda: [torch.zeros(3)], "torch DataLoader.*got list"),
    "no batches": (lambda: DataLoader(DATA, batch_size=None), "batch_size=None"),
    "own iteration": (lambda: OwnLoader(DATA), "OwnLoader overrides"),
    "any order": (lambda: DataLoader(DATA, num_workers=1, in_order=False), "in_order=True"),
    "twice": (lambda: DataLoader(DATA, sampler=data.SubsetRandomSampler([1, 2, 1])), "distinct"),
    "negative": (lambda: DataLoader(DATA, sampler=data.SubsetRandomSampler([1, -2])), "negative"),
    "no batch": (lambda: DataLoader(DATA, batch_size=N + 1, drop_last=True), "must have a batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_known_is_refused_with_advice(name):
    make, message = REFUSED[name]
    with pytest.raises(LoaderError, match=message):
        find_participation(make(), 2)


def test_participation_of_units_needs_an_order_that_is_known_beforehand():
    with pytest.raises(LoaderError, match="order="):
        find_participation(DataLoader(DATA, shuffle=True), 2, unit=0)


@pytest.mark.parametrize(
    "name", [name for name in REFUSED if name in ("list", "no batches", "own iteration", "any order")]
)
def test_loaders_that_cannot_be_followed(name):
    with pytest.raises(LoaderError, match=REFUSED[name][1]):
        PrivateLoader(REFUSED[name][0](), on_batch=nothing, seed=0)


def test_balanced_batches_train_in_the_order_that_the_refusal_names():
    """Three positives come back in each batch: EpochShuffle, which was all that was named, stops at the second one."""

    class Balanced(data.Sampler):
        def __iter__(self):
            return iter([[0, 1, 2, *range(i, i + 3)] for i in (3, 6, 9)])

        def __len__(self):
            return 3

    def trained(order):
        model = torch.nn.Linear(3, 1)
        loader = DataLoader(data.TensorDataset(torch.ones(N, 3)), batch_sampler=Balanced())
        engine = ao.PrivacyEngine(ao.plan(order=order, batch_size=6, epsilon=8, delta=1e-5))
        model, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        return engine.step

    assert trained(MinSeparation(3, b=1, k=3)) == 3
    with pytest.raises(ParticipationError):
        trained(EpochShuffle(1, 3))
