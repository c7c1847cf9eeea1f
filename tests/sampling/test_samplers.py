"""Orders are pure functions of (seed, epoch), uniform, and independent of every global generator."""

import random
from itertools import islice, permutations

import numpy as np
import pytest
import torch
from scipy import stats

from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource
from anyorder.sampling.samplers import EpochShuffleSampler, FixedOrderSampler, PoissonBatchSampler, key_of

SOURCE = NoiseSource(bytes(range(32)))


def test_fixed_order_is_one_permutation_for_ever():
    sampler = FixedOrderSampler(100, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(100))
    assert first != list(range(100))
    assert list(sampler) == first == FixedOrderSampler(range(100), seed=3).order(5).tolist()
    assert list(FixedOrderSampler(100, seed=4)) != first
    assert len(sampler) == 100


def test_without_a_seed_each_sampler_has_its_own_order():
    one, other = FixedOrderSampler(50), FixedOrderSampler(50)
    assert list(one) != list(other)
    other.key = one.key
    assert list(one) == list(other)


def test_epoch_shuffle_depends_on_seed_and_epoch_alone():
    sampler = EpochShuffleSampler(60, seed=b"x")
    orders = {}
    for epoch in (3, 0, 7):
        sampler.set_epoch(epoch)
        orders[epoch] = list(sampler)
        assert sorted(orders[epoch]) == list(range(60))
        assert orders[epoch] == EpochShuffleSampler(60, seed=b"x").order(epoch).tolist()
    assert orders[0] != orders[3] != orders[7]
    assert EpochShuffleSampler(60, seed=1).order(0).tolist() != EpochShuffleSampler(60, seed=b"1").order(0).tolist()


def test_global_generators_are_neither_used_nor_moved():
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    list(FixedOrderSampler(10)), list(EpochShuffleSampler(10, 0)), list(PoissonBatchSampler(10, 0.5, 3, SOURCE))
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert states[2] == random.getstate()


def test_every_permutation_is_equally_likely():
    sampler, counts = EpochShuffleSampler(4, seed=0), dict.fromkeys(permutations(range(4)), 0)
    for epoch in range(4800):
        counts[tuple(sampler.order(epoch).tolist())] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


def test_poisson_batches_can_start_anywhere():
    sampler = PoissonBatchSampler(40, 0.3, 6, SOURCE)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert len(sampler) == len(first) == 6
    assert first != second
    assert list(sampler.batches(1, 4)) == second[4:]
    assert second == list(islice(PoissonBatchSampler(40, 0.3, 12, SOURCE), 6, None))
    assert all(batch == sorted(set(batch)) for batch in first + second)


def test_poisson_coins_are_fair_and_independent():
    q, size, steps = 0.2, 200, 2000
    coins = np.zeros((steps, size), bool)
    for t, batch in enumerate(PoissonBatchSampler(size, q, steps, SOURCE)):
        coins[t, batch] = True
    assert stats.binomtest(int(coins.sum()), coins.size, q).pvalue > 1e-4
    sizes = np.bincount(coins.sum(1), minlength=size + 1)[20:61]  # the size of a batch is binomial
    expected = stats.binom.pmf(np.arange(20, 61), size, q)
    pooled = expected * steps > 5
    assert stats.chisquare(sizes[pooled], expected[pooled] / expected[pooled].sum() * sizes[pooled].sum()).pvalue > 1e-4
    assert stats.chisquare(coins.sum(0), np.full(size, coins.sum() / size)).pvalue > 1e-4
    together = (coins[:-1] & coins[1:]).sum()
    assert abs(together / (size * (steps - 1)) - q * q) < 5 * np.sqrt(q * q / (size * steps))


def test_poisson_extremes():
    assert list(PoissonBatchSampler(5, 1.0, 2, SOURCE)) == [list(range(5))] * 2
    assert list(PoissonBatchSampler(3, 1e-6, 4, SOURCE)) == [[]] * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedOrderSampler(0),
        lambda: FixedOrderSampler(2.5),
        lambda: EpochShuffleSampler(3, -1),
        lambda: EpochShuffleSampler(3, 0).set_epoch(-1),
        lambda: EpochShuffleSampler(3, 0).order(1.5),
        lambda: EpochShuffleSampler(3, "seed"),
        lambda: PoissonBatchSampler(3, 0.0, 1, SOURCE),
        lambda: PoissonBatchSampler(3, 1.5, 1, SOURCE),
        lambda: PoissonBatchSampler(3, 0.5, 0, SOURCE),
        lambda: PoissonBatchSampler(0, 0.5, 1, SOURCE),
        lambda: PoissonBatchSampler(3, 0.5, 1, SOURCE, indices=np.array([0, 0, 1])),
        lambda: PoissonBatchSampler(3, 0.5, 1, SOURCE, indices=np.array([2, 1, 3])),
        lambda: PoissonBatchSampler(3, 0.5, 1, SOURCE, indices=np.array([-1, 0, 1])),
        lambda: PoissonBatchSampler(3, 0.5, 1, SOURCE, indices=np.array([0, 1])),
        lambda: PoissonBatchSampler(3, 0.5, 1, SOURCE, indices=np.array([0.0, 1.0, 2.5])),
    ],
)
def test_bad_arguments(make):
    with pytest.raises(ArgumentError):
        make()


def test_keys_are_32_bytes_and_distinct():
    keys = [key_of(seed) for seed in (0, 1, b"", b"0", b"int0", None, None)]
    assert {len(key) for key in keys} == {32}
    assert len(set(keys)) == 7
