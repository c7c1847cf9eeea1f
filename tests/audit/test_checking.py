"""Which order a loader really has, and what that is worth: every kind of loader that people have."""

import json
import math
import random
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import ndtri
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import anyorder as ao
from anyorder._draws import Draws
from anyorder.accounting import gdp_epsilon
from anyorder.accounting.poisson import poisson_epsilon
from anyorder.audit import loader_check
from anyorder.audit.arrivals import Arrivals
from anyorder.audit.loader_check import judge, printed
from anyorder.audit.observations import (
    AtMost,
    DrawnVisits,
    SampledVisits,
    Shuffles,
    _weights,
    epsilon_at_least,
    epsilon_of,
    fullest,
)
from anyorder.errors import ArgumentError, LoaderError
from anyorder.noise import NoiseSource
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, PoissonSampling, SingleEpoch
from anyorder.sampling.samplers import Owned, SecretBatchSampler

N, BATCH, DELTA = 200, 10, 1e-5
DATA = TensorDataset(torch.arange(N * 3.0).reshape(N, 3), torch.arange(N) // 4)


def check(loader, **options):
    quick = {"accountant": "rdp"}  # a tenth of the time of the other
    return ao.check(loader, **{"noise_multiplier": 1.0, "epochs": 3, "delta": DELTA, **quick, **options})


def claim_of(q, steps):
    return pytest.approx(printed("rdp", 1.0, q, steps, DELTA), rel=1e-12)


def true_of(weight, sigma=1.0):
    return pytest.approx(gdp_epsilon(math.sqrt(weight) / sigma, DELTA), rel=1e-9)


class Odd(Sampler):
    """Of somebody's own."""

    def __iter__(self):
        raise AssertionError("a check must not iterate a sampler")

    def __len__(self):
        return N


class Batches(Odd):
    def __len__(self):
        return 20


class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("a check must not read a stream")


class SizedStream(Stream):
    def __len__(self):
        return N


class OwnLoader(DataLoader):
    def __iter__(self):
        return super().__iter__()


class Reshuffled(RandomSampler):
    """A subclass may do anything."""


def listed(*sizes):
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return [row.tolist() for row in rows]


TWICE = ConcatDataset([DATA, Subset(DATA, range(50))])
ORDERS = {
    "sequential": (lambda: DataLoader(DATA, BATCH), 3, FixedOrder(60, 3, 20)),
    "shuffled": (lambda: DataLoader(DATA, BATCH, shuffle=True), 3, EpochShuffle(3, 20)),
    "drop_last": (lambda: DataLoader(DATA, 30, shuffle=True, drop_last=True), 3, EpochShuffle(3, 6)),
    "a smaller last batch": (lambda: DataLoader(DATA, 30, shuffle=True), 3, EpochShuffle(3, 7)),
    "batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), BATCH, False)), 3, EpochShuffle(3, 20),
    ),
    "batch sampler as sampler": (
        lambda: DataLoader(DATA, sampler=BatchSampler(SequentialSampler(DATA), BATCH, False), batch_size=None), 3,
        FixedOrder(60, 3, 20),
    ),
    "data set of batches": (lambda: DataLoader(DATA, batch_size=None, shuffle=True), 3, None),  # nor has a plan
    "list of batches as batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=listed(*[10] * 20)),
        3, FixedOrder(60, 3, 20),
    ),
    "uneven list of batches": (lambda: DataLoader(DATA, batch_sampler=listed(7, 3, 12)), 3, FixedOrder(9, 3, 3)),
    "a list with an index twice in a batch": (lambda: DataLoader(DATA, batch_sampler=[[0, 1, 0], [2, 3]]), 12, None),
    "a list with an index in two batches": (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [0, -N]]), 15, None),
    "a sampler that is a list": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler([3, 1, 2, 0], 2, False)), 3, FixedOrder(6, 3, 2),
    ),
    "subset at random": (
        lambda: DataLoader(DATA, BATCH, sampler=SubsetRandomSampler(range(80))),
        3, EpochShuffle(3, 8),
    ),
    "subset with an index twice": (lambda: DataLoader(DATA, BATCH, sampler=SubsetRandomSampler([5, 5, 6])), 12, None),
    "some of all": (
        lambda: DataLoader(DATA, BATCH, sampler=RandomSampler(DATA, num_samples=50)),
        3, EpochShuffle(3, 5),
    ),
    "two shuffles in an epoch": (
        lambda: DataLoader(DATA, BATCH, sampler=RandomSampler(DATA, num_samples=2 * N)),
        6, None,
    ),
    "two shuffles that share a batch": (
        lambda: DataLoader(DATA,
        30, sampler=RandomSampler(DATA, num_samples=2 * N)), 12, None,
    ),
    "Subset": (lambda: DataLoader(Subset(DATA, range(50, 150)), BATCH, shuffle=True), 3, EpochShuffle(3, 10)),
    "an example in two data sets": (lambda: DataLoader(TWICE, BATCH, shuffle=True), 12, None),
    "an example in two data sets, sequential": (lambda: DataLoader(TWICE, BATCH), 6, None),
    "fixed": (lambda: DataLoader(DATA, BATCH, sampler=ao.FixedOrderSampler(DATA, 1)), 3, FixedOrder(60, 3, 20)),
    "keyed shuffle": (
        lambda: DataLoader(DATA, BATCH, sampler=ao.sampling.EpochShuffleSampler(DATA, 1)),
        3, EpochShuffle(3, 20),
    ),
    "by units": (
        lambda: DataLoader(DATA, batch_sampler=ao.sampling.UnitOrderSampler(DATA.tensors[1].tolist(), 12, 1)), 3,
        FixedOrder(51, 3, 17),
    ),
    "distributed": (lambda: DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, 4, 1)), 3, EpochShuffle(3, 5)),
    "distributed, in turn": (
        lambda: DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, 4, 1, shuffle=False)), 3, FixedOrder(15, 3, 5),
    ),
    "distributed, filled up": (lambda: DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, 3, 0)), 6, None),
    "distributed, filled up within a step": (
        lambda: DataLoader(DATA, N, sampler=DistributedSampler(DATA,
        3, 0)), 12, None,
    ),
    "distributed, the rest dropped": (
        lambda: DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, 3, 0, drop_last=True)), 3, EpochShuffle(3, 7),
    ),
    "by weights without replacement": (
        lambda: DataLoader(DATA, BATCH, sampler=WeightedRandomSampler(torch.ones(N), 100, replacement=False)), 3,
        EpochShuffle(3, 100 // BATCH),
    ),
    "a list of batches": (lambda: [torch.zeros(10, 3)] * 20, 3, None),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_orders_in_which_a_unit_comes_a_bounded_number_of_times(name):
    make, weight, participation = ORDERS[name]
    loader = make()
    found = check(loader)
    assert found.true == true_of(weight)
    assert found.participation == participation
    assert found.neighbours == "zero-out"
    assert found.steps == 3 * len(loader)
    assert found.sampling_probability == 1 / len(loader)
    assert found.claimed == claim_of(1 / len(loader), found.steps)
    assert found.holds == (found.claimed > found.true)
    assert not found.holds or name == "a sampler that is a list"  # at q = 1/2, RDP loses more than sampling gains
    assert 0 <= found.at_least <= found.true
    again = check(make(), noise_multiplier=found.noise_needed)
    assert again.true <= found.claimed * (1 + 1e-9)
    assert again.order == found.order in str(found)


def test_no_order_lets_a_unit_come_more_often_than_what_is_proven():
    """The samplers themselves, run: the weight of every unit in the steps of three epochs."""
    for accumulate, name in product([1, 3], ORDERS):
        from anyorder.audit.observations import weights_of
        from anyorder.sampling.read_loader import Origins

        make, _, _ = ORDERS[name]
        loader = make()
        if isinstance(loader, list):
            continue  # has no sampler, and names nobody
        found = check(loader, accumulate=accumulate)
        torch.manual_seed(0)
        names, steps, per_epoch = [], [], -(-len(loader) // accumulate)
        ranks = getattr(loader.sampler, "num_replicas", 1)
        for rank in range(ranks):
            if ranks > 1:
                loader.sampler.rank = rank
            for epoch in range(3):
                for i, batch in enumerate(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler):
                    indices = np.atleast_1d(np.asarray(batch, np.int64)) % len(loader.dataset)
                    names.append(Origins(loader.dataset).names(indices))
                    steps.append(np.full(len(indices), epoch * per_epoch + i // accumulate))
        weight = weights_of(np.concatenate(names), np.concatenate(steps)).max()
        assert gdp_epsilon(math.sqrt(weight), DELTA) <= found.true


UNKNOWN = {
    "sampler": lambda: DataLoader(DATA, BATCH, sampler=Odd()),
    "subclass of a known sampler": lambda: DataLoader(DATA, BATCH, sampler=Reshuffled(DATA)),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=Batches()),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "stream with a length": lambda: DataLoader(SizedStream(), BATCH),
    "loader": lambda: OwnLoader(DATA, BATCH, shuffle=True),
    "generator": lambda: (batch for batch in [torch.zeros(2)]),
    "as workers finish": lambda: DataLoader(DATA, BATCH, num_workers=1, in_order=False),
    "stack of parts that overlap": lambda: DataLoader(StackDataset(Subset(DATA, [0, 1]), Subset(DATA, [1, 0])), 1),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_of_an_unknown_order_nothing_finite_follows(name):
    found = check(UNKNOWN[name]())
    assert found.true == math.inf
    assert not found.holds
    assert found.verdict == "not proven"
    assert found.participation is None
    assert found.because
    assert "no finite epsilon" in str(found)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["true"] is None
    if name in ("stream", "generator"):
        assert math.isnan(found.claimed)
    else:
        assert found.claimed > 0


def test_a_stream_is_not_touched():
    loader = DataLoader(SizedStream(), BATCH)
    before = dict(vars(loader))
    assert check(loader).claimed == claim_of(1 / 20, 60)
    assert vars(loader) == before  # len(loader) would have left a mark


def test_an_infinite_loader_needs_its_steps_and_sizes():
    class Endless(Sampler):
        def __iter__(self):
            raise AssertionError

    found = check(DataLoader(DATA, BATCH, sampler=Endless()), epochs=None, steps=60, batch_size=10)
    assert found.claimed == claim_of(10 / N, 60)
    assert found.true == math.inf


def test_sampling_with_replacement_is_a_mixture_over_the_draws():
    uniform = check(DataLoader(DATA, BATCH, sampler=RandomSampler(DATA, replacement=True)))
    even = check(DataLoader(DATA, BATCH, sampler=WeightedRandomSampler(torch.ones(N), N)))
    assert uniform.true == pytest.approx(even.true, rel=1e-6)
    assert check(DataLoader(DATA, BATCH, shuffle=True)).true < uniform.true < math.inf
    favoured = torch.ones(N)
    favoured[3] = 5
    assert check(DataLoader(DATA, BATCH, sampler=WeightedRandomSampler(favoured, N))).true > uniform.true
    twice = check(DataLoader(TWICE, BATCH, sampler=RandomSampler(TWICE, replacement=True)))
    assert twice.true > uniform.true  # two of 250 are one unit


def test_by_replacement_the_epsilon_is_the_mean_over_draws():
    """Against draws by hand: four steps of one draw of two examples."""
    found = check(DataLoader(DATA, 1, sampler=RandomSampler(range(2), replacement=True)), epochs=2)
    total = sum(math.comb(4, j) / 16 * ao.accounting.gdp_delta(math.sqrt(j), found.true) for j in range(5))
    assert total == pytest.approx(DELTA, rel=0.01)
    assert total <= DELTA


def weights_by_hand(draws):
    """P(weight = 0), P(weight = 1), .. by plain convolutions."""
    n, q = draws.size, draws.probability
    one = np.zeros(n * n + 1)
    for m in range(n + 1):
        one[m * m] = math.comb(n, m) * q**m * (1 - q) ** (n - m)
    result = np.ones(1)
    for _ in range(draws.steps):
        result = np.convolve(result, one)
    return result


@pytest.mark.parametrize(
    "draws", [DrawnVisits(3, 0.2, 4), DrawnVisits(3, 0.2, 50), DrawnVisits(20, 0.1, 3), DrawnVisits(12, 0.05, 30)]
)
def test_what_is_cut_off_from_the_draws_is_paid(draws):
    """Weights that are beyond the arrays count as lost, and the epsilon is not below that of all of them."""
    exact = weights_by_hand(draws)
    found, lost = _weights(draws, DELTA / 1000)
    size = max(len(exact), len(found))
    missing = np.pad(exact, (0, size - len(exact))) - np.pad(found, (0, size - len(found)))
    assert missing.clip(0).sum() <= lost + 1e-13  # beside what transforms round
    assert lost <= DELTA / 1000

    def delta_at(epsilon):
        likely = np.flatnonzero(exact > 1e-25).tolist()
        return sum(exact[w] * ao.accounting.gdp_delta(math.sqrt(w), epsilon) for w in likely)

    epsilon = epsilon_of(draws, 1.0, DELTA)
    assert delta_at(epsilon) <= DELTA < delta_at(0.999 * epsilon)


def test_empty_batches_are_paid_on_both_sides():
    """A run that is another one with a small probability: that is added to delta once, and exp(epsilon) times."""
    empty = 1e-8
    found = epsilon_of(SampledVisits(0.05, 60, empty=empty), 1.0, DELTA)
    assert found >= poisson_epsilon(1.0, 0.05, 60, DELTA - empty * (1 + math.exp(found)))
    assert found < 1.1 * poisson_epsilon(1.0, 0.05, 60, DELTA)
    assert epsilon_of(SampledVisits(0.05, 60, empty=1e-6), 1.0, DELTA) == math.inf


def test_ranks_that_all_read_the_whole_data_set_add_a_unit_so_often(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    for loader in (DataLoader(DATA, BATCH), DataLoader(DATA, BATCH, shuffle=True)):
        found = check(loader)
        assert found.true == true_of(3 * 3**2)
        assert found.participation is None
    replaced = DataLoader(DATA, BATCH, sampler=RandomSampler(DATA, replacement=True))
    assert check(replaced).true == epsilon_of(DrawnVisits(3 * BATCH, (1 + 1e-12) / N, 60), 1.0, DELTA)


def test_a_last_epoch_that_is_broken_off_before_the_fullest_unit():
    loader = DataLoader(DATA, batch_sampler=[[0], [1], [2, 2]])
    whole = check(loader, epochs=None, steps=6)
    assert whole.at_least == pytest.approx(whole.true)
    assert whole.true == true_of(2 * 4)
    for steps in (4, 5):
        broken = check(loader, epochs=None, steps=steps)
        assert broken.at_least <= gdp_epsilon(2.0, DELTA) <= broken.true  # example 2 was there in one epoch


def test_one_epoch_in_any_order_is_one_step():
    for shuffle in (False, True):
        found = check(DataLoader(DATA, BATCH, shuffle=shuffle), epochs=1)
        assert found.true == true_of(1)
        assert found.participation == SingleEpoch(20)


def test_a_loader_of_one_batch_holds_what_is_claimed():
    """All examples in every step: no sampling is assumed, and none is needed."""
    found = check(DataLoader(DATA, N, shuffle=True), accountant="prv")
    assert found.sampling_probability == 1
    assert found.holds
    assert found.verdict == "holds"
    assert found.advice == ()


def test_steps_that_end_within_an_epoch():
    found = check(DataLoader(DATA, BATCH, shuffle=True), epochs=None, steps=45)
    assert (found.epochs, found.true) == (3, true_of(3))
    assert found.participation == MinSeparation(45, 1, 3)
    sequential = check(DataLoader(DATA, BATCH), epochs=None, steps=45)
    assert sequential.participation == FixedOrder(45, 3, 20)
    assert sequential.at_least == pytest.approx(sequential.true)


def test_accumulated_batches_are_one_step():
    found = check(DataLoader(DATA, BATCH, shuffle=True), accumulate=4)
    assert (found.steps, found.sampling_probability) == (15, 4 / 20)
    assert found.participation == EpochShuffle(3, 5)
    joined = DataLoader(DATA, batch_sampler=[[0, 1], [0, 2], [3], [4]])
    assert check(joined, accumulate=2).true == true_of(12)
    assert check(joined).true == true_of(6)


def test_units_of_several_examples():
    loader = DataLoader(DATA, BATCH, shuffle=True)
    assert check(loader, unit=1).true == true_of(3 * 16)  # four examples in one batch, at worst
    sequential = check(DataLoader(DATA, 4), unit=1)
    assert sequential.true == true_of(3 * 16)
    assert sequential.at_least == pytest.approx(sequential.true)
    spread = check(DataLoader(DATA, 2), unit=1)
    assert spread.true == true_of(3 * 8)
    assert isinstance(spread.participation, KnownOrder)
    assert check(DataLoader(DATA, 2, shuffle=True), unit=1).true == true_of(3 * 8)
    batches = [(torch.zeros(2), torch.tensor([1, 1])), (torch.zeros(2), torch.tensor([1, 2]))]
    assert check(batches, unit=1).true == true_of(3 * 5)


def test_poisson_sampling_of_our_own_holds():
    """For one epoch: a DataLoader does not tell a batch sampler the epoch."""
    sampler = ao.sampling.samplers.PoissonBatchSampler(N, 0.05, 20, NoiseSource(b"k" * 32))
    found = check(DataLoader(DATA, batch_sampler=sampler), epochs=1, accountant="prv")
    assert found.holds
    assert found.true == poisson_epsilon(1.0, 0.05, 20, DELTA)
    assert found.participation == PoissonSampling(20, 0.05)
    assert found.neighbours == "add-or-remove"
    by_user = check(DataLoader(DATA, batch_sampler=sampler), epochs=1, unit=1)
    assert not by_user.holds
    assert by_user.true > found.true
    assert not check(DataLoader(DATA, batch_sampler=sampler), epochs=1, accumulate=2).holds


def test_poisson_coins_that_come_again_are_counted_as_often(monkeypatch):
    """Three epochs of the same 20 batches: a unit's part is that of 20 steps of three times the squared length."""
    monkeypatch.setattr(loader_check, "_needed", lambda *given: math.inf)  # the noise that would do takes seconds
    ours = ao.sampling.samplers.PoissonBatchSampler(N, 0.05, 20, NoiseSource(b"k" * 32))
    draws = Draws(PoissonSampling(20, 0.05), N, NoiseSource(b"k" * 32))
    secret = SecretBatchSampler(draws, Owned.each_its_own(np.arange(N)))
    least = poisson_epsilon(1 / math.sqrt(3), 0.05, 20, DELTA)
    for sampler in (ours, secret):
        loader = DataLoader(DATA, batch_sampler=sampler)
        epochs = [[batch[0].tolist() for batch in loader] for _ in range(2)]
        assert epochs[0] == epochs[1]
        found = check(loader, accountant="prv")
        assert not found.holds
        assert found.true >= least
        assert "set_epoch" in found.order
        assert check(loader, accumulate=3).true == math.inf  # where steps may straddle epochs
        assert check(loader, epochs=1, accountant="prv").holds
    assert check(loader, unit=1).true > found.true
    assert math.isfinite(check(DataLoader(DATA, batch_sampler=ours), accumulate=2).true)
    rare = SampledVisits(0.05, 60, period=20)  # beneath little noise, new coins are more than the same ones
    assert epsilon_of(rare, 0.05, 0.9) == epsilon_of(SampledVisits(0.05, 60), 0.05, 0.9)
    assert epsilon_of(rare, 0.05, 0.9) > epsilon_of(DrawnVisits(1, 0.05, 20), 0.05 / math.sqrt(3), 0.9)


def test_a_claim_that_an_attack_refutes_is_false_and_no_attack_is_above_what_is_proven():
    for k, batch, sigma in ((1, 10, 0.5), (1, 10, 1.0), (3, 10, 1.0), (3, 10, 2.0), (20, 4, 1.0), (3, 100, 1.0)):
        for drop_last, size in ((False, batch), (True, batch + 1)):
            loader = DataLoader(DATA, size, shuffle=True, drop_last=drop_last)
            found = check(loader, epochs=k, noise_multiplier=sigma)
            assert 0 < found.at_least <= found.true
    found = check(DataLoader(DATA, BATCH, shuffle=True), accountant="prv")
    assert found.claimed == poisson_epsilon(1.0, 0.05, 60, DELTA)
    assert found.claimed < 2.9 < 6.5 < found.at_least < 8.38
    assert found.verdict == "false"


def test_a_claim_holds_from_the_epsilon_that_follows_on():
    found = Arrivals("some order", AtMost(4.0), "so it is")
    for share, verdict in ((1.001, "holds"), (1.0, "holds"), (0.999, "not proven")):
        judged = judge(found, share * gdp_epsilon(2.0, DELTA), 1.0, DELTA, q=None, accountant="somebody")
        assert (judged.holds, judged.verdict) == (verdict == "holds", verdict)


def test_the_attack_on_shuffles_is_what_its_simulation_does():
    """P and Q of the event, by drawing: one epoch of four steps, the threshold at which the bound is best."""

    bound = epsilon_at_least(AtMost(1.0, shuffles=Shuffles(1, 4)), 1.0, 1e-2)
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((400_000, 4))
    best = 0.0
    for others in (0, 1):
        world = noise.copy()
        world[:, 0] += others
        q_max, p_max = world.max(1), (world + np.eye(4)[0]).max(1)
        for c in np.linspace(0, 5, 51):
            p, q = (p_max > c).mean(), (q_max > c).mean()
            if q > 1e-3:
                best = max(best, math.log(max(p - 1e-2, 1e-9) / q))
    assert bound == pytest.approx(best, abs=0.1)


def above(drawn):
    """The share of what is drawn that is above each threshold from 0 to 5."""
    return 1 - np.searchsorted(np.sort(drawn), np.linspace(0, 5, 51), side="right") / len(drawn)


@pytest.mark.parametrize(("epochs", "steps", "chance"), [(1, 50, 0.5), (2, 4, 0.5), (2, 50, 0.8)])
def test_the_attack_where_a_unit_is_not_in_every_epoch(epochs, steps, chance):
    """By drawing: where a unit is absent, its step has neither it nor one that gives the opposite."""
    delta, rng, count = 1e-2, np.random.default_rng(1), 400_000
    there = rng.random((count, epochs)) < chance
    own = rng.standard_normal((count, epochs))
    quiet = ndtri(rng.random((count, epochs)) ** (1 / (steps - 1)))  # the largest of the other steps
    best = 0.0
    for others in (0, 1):
        without, with_it = (np.maximum(own + there * there_is, quiet) for there_is in (others, others + 1))
        for j in range(1, epochs + 1):  # in j epochs above c: where the j-th largest is
            q, p = (above(np.sort(world, axis=1)[:, -j]) for world in (without, with_it))
            for pair in ((p, q), (1 - q, 1 - p)):
                for often, seldom in zip(*pair, strict=True):
                    if seldom > 1e-3 and often > delta:
                        best = max(best, math.log((often - delta) / seldom))
    bound = epsilon_at_least(AtMost(epochs, shuffles=Shuffles(epochs, steps, chance)), 1.0, delta)
    assert bound == pytest.approx(best, abs=0.02)


class Accountant:
    """As an engine's: its history, and an epsilon."""

    def __init__(self, history):
        self.history = history

    def get_epsilon(self, delta):
        return 0.5 * len(self.history)


def test_the_least_noise_of_an_engine_counts_and_its_history_is_left_alone():
    stepped, fresh = (
        SimpleNamespace(accountant=Accountant(history)) for history in ([(2.0, 0.05, 10), (1.0, 0.05, 30)], [])
    )
    found = ao.check(DataLoader(DATA, BATCH), delta=DELTA, engine=stepped)
    assert (found.noise_multiplier, found.steps, found.claimed) == (1.0, 40, 1.0)
    found = ao.check(DataLoader(DATA, BATCH), delta=DELTA, engine=fresh, noise_multiplier=1.0, epochs=3)
    assert (found.steps, found.claimed) == (60, 0.5)
    assert fresh.accountant.history == []


def test_attacks_claim_no_more_than_they_show():
    of_one_step = AtMost(1.0, shuffles=Shuffles(1, 1))
    assert epsilon_at_least(of_one_step, 1.0, 1e-2) == pytest.approx(gdp_epsilon(1.0, 1e-2), rel=1e-3)
    seldom = AtMost(1.0, shuffles=Shuffles(1, 4, chance=0.009))  # at a delta of 0.01 that hides all
    assert epsilon_at_least(seldom, 1.0, 1e-2) == 0
    kept = check(DataLoader(DATA, BATCH, sampler=ao.FixedOrderSampler(DATA)))
    assert (kept.at_least, kept.verdict) == (0, "not proven")  # nobody knows the shuffle


def test_the_fullest_steps():
    assert [fullest(7, 3), fullest(8, 3), fullest(6, 3), fullest(2, 5)] == [19, 22, 18, 4]


def test_rdp_is_what_its_accountant_prints():
    assert check(DataLoader(DATA, BATCH, shuffle=True)).claimed == pytest.approx(3.368, abs=1e-3)


def test_a_mechanism_is_compared_in_the_advice():
    found = check(DataLoader(DATA, BATCH), mechanism="tree")
    assert any("times less noise" in line for line in found.advice)
    assert any("noise multiplier 2." in line for line in found.advice)


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


class Augmented(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.rand(2) + random.random() + np.random.rand(), i // 4  # noqa: NPY002


def test_nothing_of_the_run_is_moved():
    def batches(checked):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        own = torch.Generator().manual_seed(3)
        loader = DataLoader(Augmented(), BATCH, shuffle=True, generator=own)
        seen = []
        for _ in range(2):
            if checked:
                check(loader)
                check(loader, unit=1)
                check(DataLoader(Augmented(), BATCH, sampler=DistributedSampler(Augmented(), 3, 0)), unit=1)
            seen += [(x.tolist(), y.tolist()) for x, y in loader]
        return seen, states(), own.get_state().tolist()

    assert batches(False) == batches(True)


def test_a_distributed_sampler_keeps_its_epoch():
    sampler = DistributedSampler(DATA, 2, 0)
    sampler.set_epoch(5)
    check(DataLoader(DATA, BATCH, sampler=sampler))
    assert sampler.epoch == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0.0}, "delta"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": None}, "exactly one of epochs and steps"),
        ({"steps": 5}, "exactly one of epochs and steps"),
        ({"noise_multiplier": None}, "noise_multiplier"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"accountant": "moments"}, "accountant"),
        ({"accumulate": 0}, "accumulate"),
        ({"engine": object()}, "accountant with a history"),
    ],
)
def test_what_is_missing_or_wrong_is_told(options, message):
    with pytest.raises(ArgumentError, match=message):
        check(DataLoader(DATA, BATCH), **options)


def test_a_loader_without_a_batch_is_refused():
    for loader in (DataLoader(DATA, N + 1, drop_last=True), [], DataLoader(DATA, batch_sampler=[])):
        with pytest.raises(LoaderError, match="must have a batch"):
            check(loader)
    for other in (3, lambda: DataLoader(DATA)):
        with pytest.raises(ArgumentError, match="loader must be what a loop gets its batches from"):
            check(other)


def test_seedable_samplers_of_accelerate_are_known():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    loader = accelerate.data_loader.prepare_data_loader(
        DataLoader(DATA, BATCH, shuffle=True), num_processes=1, process_index=0, use_seedable_sampler=True,
        put_on_device=False,
    )  # fmt: skip
    assert check(loader).participation == EpochShuffle(3, 20)


@pytest.mark.parametrize("style", ["a step of their own", "dropped", "joined with the next epoch's"])
@pytest.mark.parametrize(
    ("batches", "accumulate", "shuffle"), [(4, 3, False), (2, 5, True), (6, 3, True), (3, 4, False)]
)
def test_batches_that_are_left_over_are_counted_however_a_loop_takes_them(style, batches, accumulate, shuffle):
    """Every style of a loop, by brute force: no example weighs more than what is found."""
    loader = DataLoader(Subset(TensorDataset(torch.zeros(2 * batches, 1)), range(2 * batches)), 2, shuffle=shuffle)
    epochs, steps, order = 7, [], random.Random(0)
    waiting = []
    for _ in range(epochs):
        places = list(range(2 * batches))
        if shuffle:
            order.shuffle(places)
        for i in range(batches):
            waiting.append(places[2 * i : 2 * i + 2])
            if len(waiting) == accumulate or (style == "a step of their own" and i == batches - 1):
                steps.append(np.concatenate(waiting))
                waiting = []
        if style == "dropped":
            waiting = []
    weights = sum((np.bincount(step, minlength=2 * batches) ** 2 for step in steps), np.zeros(2 * batches))
    most = gdp_epsilon(math.sqrt(weights.max()), 1e-5) if len(steps) else 0.0
    by_epochs = ao.check(loader, noise_multiplier=1.0, epochs=epochs, accumulate=accumulate, delta=1e-5)
    assert by_epochs.true >= most * (1 - 1e-9)
    if steps:
        by_steps = ao.check(loader, noise_multiplier=1.0, steps=len(steps), accumulate=accumulate, delta=1e-5)
        assert by_steps.true >= most * (1 - 1e-9)
        assert "if every epoch is whole" in by_steps.because
    joined = {(4, 3): 2, (2, 5): 3, (6, 3): 1, (3, 4): 2}[batches, accumulate]
    assert by_epochs.true == pytest.approx(gdp_epsilon(math.sqrt(epochs * joined), 1e-5), rel=1e-9)
    if batches % accumulate == 0:
        assert by_epochs.at_least > 0
        assert by_epochs.true == pytest.approx(gdp_epsilon(math.sqrt(epochs), 1e-5), rel=1e-9)


def test_loaders_by_secret_coins_say_what_they_draw():
    """A shuffle that is cut into batches is no balls in bins, and a loader of bins is no Poisson sampling."""
    from anyorder.participation import BallsInBins
    from anyorder.sampling.secret import secret_loader

    given = DataLoader(DATA, BATCH, shuffle=True)
    bins = check(secret_loader(given, BallsInBins(3, 20), NoiseSource(b"k" * 32)))
    assert bins.order == BallsInBins(3, 20).describe()
    assert bins.true == np.inf
    assert not bins.holds
    assert "amplified_epsilon" in bins.because
    shuffled = check(given, accountant="prv")
    assert "bins" not in shuffled.order
    assert not shuffled.holds
