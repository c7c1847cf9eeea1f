"""The batches of secret orders: every drawn example once, on one rank and in one micro-batch; what fills them up."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

from anyorder._draws import Draws
from anyorder.errors import LoaderError
from anyorder.noise import NoiseSource
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.sampling.read_loader import read_owners
from anyorder.sampling.samplers import SecretBatchSampler
from anyorder.sampling.secret import secret_loader

SOURCE = NoiseSource(bytes(range(32)))
N = 24
RULES = [
    PoissonSampling(12, 0.3),
    CyclicPoisson(12, 3, 0.5),
    TruncatedPoisson(12, 0.4, batch_size=8, dataset_size=N),
    BallsInBins(3, 4),
    RandomAllocation(3, 4),
    MinSeparationSampling(12, 3, 0.5),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
OWNERS = np.array([5, 5, 5, 5, 5, 5, 5, 2, 2, 2, 9, 9, 7, 7, 7, 7, 1, 3, 3, 8, 8, 8, 8, 0])


class Only(torch.utils.data.Dataset):
    """Of which some examples are nobody's business here."""

    def __init__(self, allowed):
        self.allowed = set(allowed)

    def __len__(self):
        return 2 * N

    def __getitem__(self, index):
        assert index in self.allowed, "an example that the sampler may not give was read"
        return torch.tensor([index, OWNERS[index % N]])


def sampler_of(rule, *, dataset=None, order=None, **options):
    dataset = TensorDataset(torch.arange(N), torch.as_tensor(OWNERS)) if dataset is None else dataset
    loader = DataLoader(dataset, batch_size=4, shuffle=order is None, sampler=order)
    made = secret_loader(loader, rule, SOURCE, **options)
    assert isinstance(made.batch_sampler, SecretBatchSampler)
    return made.batch_sampler


def own(batch):
    return batch[: len(batch) - batch.padding]


@every_rule
@pytest.mark.parametrize("rows", [None, 6])
def test_ranks_and_micro_batches_share_a_step_out(rule, rows):
    draws = Draws(rule, N, SOURCE)
    for ranks, accumulate in ((1, 1), (2, 1), (1, 3), (2, 2), (3, 2)):
        dealt = [
            sampler_of(rule, ranks=ranks, rank=rank, accumulate=accumulate, micro_batch=rows if ranks > 1 else None)
            for rank in range(ranks)
        ]
        assert len({len(sampler) for sampler in dealt}) == 1
        assert len(dealt[0]) % accumulate == 0
        for t in range(rule.n):
            parts = [sampler.batch(t * accumulate + i) for sampler in dealt for i in range(accumulate)]
            assert sorted(index for part in parts for index in own(part)) == draws.step(t).tolist()
            if rows is not None and ranks > 1:
                assert all(len(part) == max(rows, len(own(part))) for part in parts)
            elif isinstance(rule, TruncatedPoisson):
                assert {len(part) for part in parts} == {-(-rule.batch_size // (ranks * accumulate))}
            else:
                assert not any(part.padding for part in parts)


@every_rule
def test_an_epoch_from_any_batch_on(rule):
    sampler = sampler_of(rule, accumulate=2)
    for epoch in range(2):
        whole = list(sampler.batches(epoch, 0))
        assert len(whole) == len(sampler)
        for start in (1, 2, len(whole) - 1):
            assert list(sampler.batches(epoch, start)) == whole[start:]
    assert list(sampler) == list(sampler_of(rule, accumulate=2).batches(0, 0))


def test_lengths_of_epochs_and_expected_sizes():
    found = [(len(s), s.batch_size) for s in (sampler_of(rule) for rule in RULES)]
    assert found == [(4, 7), (6, 4), (3, 8), (4, 6), (4, 6), (4, 6)]
    assert len(sampler_of(PoissonSampling(11, 0.3))) == 11
    assert len(sampler_of(BallsInBins(3, 4), accumulate=5)) == 20
    assert sampler_of(PoissonSampling(12, 0.5), accumulate=2, ranks=3).batch_size == 2
    assert sampler_of(PoissonSampling(12, 0.5), unit=1).batch_size == 12  # of examples, eight users or not


def test_other_numbers_are_another_order_for_a_checkpoint():
    others = [
        PoissonSampling(12, 0.3), PoissonSampling(12, 0.25), CyclicPoisson(12, 3, 0.5), CyclicPoisson(12, 4, 0.5),
        BallsInBins(3, 4), BallsInBins(4, 3), RandomAllocation(3, 4), MinSeparationSampling(12, 3, 0.5),
        MinSeparationSampling(12, 3, 0.5, warm_start=False), TruncatedPoisson(12, 0.4, 8, N),
        TruncatedPoisson(12, 0.4, 7, N),
    ]  # fmt: skip
    assert len({sampler_of(rule).phrase for rule in others}) == len(others)


@every_rule
@pytest.mark.parametrize("unit", [None, 1])
def test_examples_that_the_sampler_may_not_give_are_never_read(rule, unit):
    """Numbers are places in the ascending list of those that it may; rows that fill up are of them, too."""
    members = [33, 30, 41, 12, 17, 25, 8, 19]
    size = len({OWNERS[i % N] for i in members}) if unit else len(members)
    if isinstance(rule, TruncatedPoisson):
        rule = TruncatedPoisson(12, 0.4, batch_size=3, dataset_size=size)
    held, draws = Only(members), Draws(rule, size, SOURCE)
    collate = {"collate_fn": lambda rows: list(torch.stack(rows).T)}
    loader = DataLoader(held, batch_size=2, sampler=SubsetRandomSampler(members), **collate)
    made = secret_loader(loader, rule, SOURCE, unit=unit, micro_batch=8)
    batches = [batch for epoch in range(2) for batch in made.batch_sampler.batches(epoch, 0)]
    for t, batch in enumerate(batches):
        assert set(batch) <= set(members)
        named = [sorted(members).index(i) for i in own(batch)]
        if unit:
            ids = sorted({int(OWNERS[i % N]) for i in members})
            named = sorted({ids.index(OWNERS[i % N]) for i in own(batch)})
        assert sorted(named) == draws.step(t).tolist()
        if not own(batch):
            assert batch == [8] * 8
    assert all(len(x) == 8 for x, _ in made)
    bare = secret_loader(loader, PoissonSampling(12, 1e-6), SOURCE)
    assert {len(x) for x, _ in bare} == {0}


@every_rule
def test_who_is_listed_twice_has_no_two_coins(rule):
    if isinstance(rule, TruncatedPoisson):
        rule = TruncatedPoisson(12, 0.4, 8, 6)
    listed = Subset(TensorDataset(torch.arange(N)), [3, 1, 4, 1, 5, 2])
    with pytest.raises(LoaderError):
        sampler_of(rule, dataset=listed)


def test_units_are_dealt_out_whole_and_evenly():
    """The largest first, each to the shortest: no micro-batch is longer than the shortest by more than one unit."""
    sampler = sampler_of(PoissonSampling(1, 1.0), unit=1, accumulate=3)
    parts = [sampler.batch(i) for i in range(3)]
    assert sorted(index for part in parts for index in part) == list(range(N))
    owners = [set(OWNERS[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set(OWNERS.tolist()))
    assert sorted(map(len, parts)) == [8, 8, 8]


@pytest.mark.parametrize("at_once", [1, 5, 7, 24, 100])
def test_owners_are_read_in_parts(at_once):
    data = TensorDataset(torch.arange(N), torch.as_tensor(OWNERS))
    members = np.array([2, 3, 5, 8, 13, 21, 22, 23])
    for loader in (DataLoader(data), DataLoader(data, batch_size=3, shuffle=True)):
        assert read_owners(loader, members, 1, at_once).tolist() == OWNERS[members].tolist()
    names = [(i, f"u{OWNERS[i]}") for i in range(N)]
    assert read_owners(DataLoader(names), members, 1, at_once) == [f"u{OWNERS[i]}" for i in members]


def test_owners_must_be_one_for_each_example():
    data = TensorDataset(torch.arange(N), torch.as_tensor(OWNERS))
    for wrong in (lambda batch: batch[1][:1], lambda batch: torch.cat([batch[1], batch[1]])):
        with pytest.raises(LoaderError, match="one id for each"):
            read_owners(DataLoader(data), np.arange(N), wrong, 7)
