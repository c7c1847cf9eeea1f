"""Weighted and balanced sampling: Poisson sampling at a rate of each example, claimed for the largest."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, WeightedRandomSampler

import anyorder as ao
from anyorder._draws import Draws
from anyorder.errors import ArgumentError, LoaderError
from anyorder.noise import NoiseSource
from anyorder.participation import BallsInBins, CyclicPoisson, EpochShuffle, PoissonSampling
from anyorder.plan.planner import plan_at_sigma
from anyorder.sampling import PoissonRates
from anyorder.sampling.read_loader import read_order
from anyorder.sampling.secret import secret_loader

N, B, EPOCHS = 30, 5, 2
SOURCE = NoiseSource(bytes(range(32)))
LABELS = (torch.arange(N) % 5 == 0).long()
DATA = TensorDataset(torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), LABELS)
WEIGHTS = torch.tensor([1.0, 4.0])[LABELS]
RATES = (B * WEIGHTS.double() / WEIGHTS.double().sum()).numpy()


def weighted(weights=WEIGHTS, size=B, num=N, **options):
    return DataLoader(DATA, size, sampler=WeightedRandomSampler(weights, num, **options))


def rated(rates=RATES, most=0.5, size=B):
    return DataLoader(DATA, size, sampler=PoissonRates(rates, most))


def planned(loader, **options):
    settings = {"order": "poisson", "epochs": EPOCHS, "noise_multiplier": 2.0, "delta": 1e-3}
    return ao.plan(loader=loader, **settings | options)


def test_each_unit_comes_at_its_own_rate():
    """The draws are those of the largest rate, thinned: by binomial counts, within five deviations."""
    rates, each, steps = np.array([0.0, 1e-3, 0.05, 0.2, 0.5]), 1000, 8
    rule = PoissonSampling(steps, 0.5)
    own, whole = Draws(rule, 5 * each, SOURCE, np.repeat(rates, each)), Draws(rule, 5 * each, SOURCE)
    drawn = [own.step(t) for t in range(steps)]
    assert all(set(units) <= set(whole.step(t)) for t, units in enumerate(drawn))
    counts, n = np.bincount(np.concatenate(drawn) // each, minlength=5), steps * each
    assert (abs(counts - n * rates) <= 5 * np.sqrt(n * rates * (1 - rates))).all()


@pytest.mark.parametrize("sigma", [0.6, 1.5])
def test_a_lower_rate_loses_no_more(sigma):
    """By integration of both directions of one step, at every rate below the one that is claimed."""
    x = np.linspace(-30, 30, 60001)
    without, within = (np.exp(-((x - m) ** 2) / (2 * sigma**2)) / math.sqrt(2 * math.pi) / sigma for m in (0.0, 1.0))

    def losses(p):
        law = (1 - p) * without + p * within
        pairs = [(law, without), (without, law)]
        return np.array([[np.maximum(a - e * b, 0).sum() for e in (0.5, 1, 1.2, 3)] for a, b in pairs])

    claimed = losses(0.3)
    assert all((losses(p) <= claimed + 1e-9).all() for p in (0.0, 0.01, 0.1, 0.29))


def test_the_plan_is_for_the_largest_rate():
    """Its epsilon is at or above that of dp-accounting at the worst unit's rate, and near it."""
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    plan = planned(weighted())
    assert plan.participation == PoissonSampling(EPOCHS * N // B, float(RATES.max()))
    assert (plan.batch_size, plan.dataset_size, plan.neighbours) == (B, N, "add-or-remove")
    worst = pld.from_gaussian_mechanism(2.0, value_discretization_interval=1e-4, sampling_prob=float(RATES.max()))
    reference = worst.self_compose(plan.n).get_epsilon_for_delta(plan.delta)
    assert reference * (1 - 1e-3) <= plan.epsilon <= reference * (1 + 1e-3)
    assert planned(rated()).participation.sampling_probability == 0.5  # what is stated, not what the data have
    assert planned(weighted(num=12)).n == EPOCHS * 3


def test_training_is_that_of_a_loop_over_the_examples():
    plan = plan_at_sigma(1e-9, loader=weighted(), order="poisson", epochs=EPOCHS, delta=1e-3, clip_norm=0.5)
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    by_hand = torch.nn.Linear(3, 2)
    by_hand.load_state_dict(model.state_dict())
    optimizer, engine = torch.optim.SGD(model.parameters(), 0.5), ao.PrivacyEngine(plan, key=bytes(32))
    private, optimizer, loader = engine.make_private(model, optimizer, weighted())
    source, sizes = engine.release.draw_source(), []
    for t, batch in enumerate(b for _ in range(EPOCHS) for b in loader):
        optimizer.zero_grad()
        F.cross_entropy(private(batch[0]), batch[1]).backward()
        optimizer.step()
        words = source.derive(b"poisson").words(t, 0, N).astype(np.uint64)
        drawn = np.flatnonzero(words < RATES * 2.0**32)
        assert batch[1].tolist() == LABELS[drawn].tolist()
        sizes.append(len(drawn))
        total = [torch.zeros_like(p) for p in by_hand.parameters()]
        for i in drawn.tolist():
            loss = F.cross_entropy(by_hand(DATA[i][0][None]), DATA[i][1][None])
            gradients = torch.autograd.grad(loss, list(by_hand.parameters()))
            norm = float(torch.sqrt(sum(g.square().sum() for g in gradients)))
            total = [s + g * min(1.0, 0.5 / norm) for s, g in zip(total, gradients, strict=True)]
        with torch.no_grad():
            for p, s in zip(by_hand.parameters(), total, strict=True):
                p -= 0.5 * s / B
    assert len(sizes) == plan.n == engine.step
    for own, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=2e-5)


def test_the_rate_of_one_example_moves_no_other():
    """Stated rates may follow the example itself: another label moves its own draws alone."""
    rule, other = PoissonSampling(12, 0.5), RATES.copy()
    other[7] = 0.5

    def batches(rates):
        made = secret_loader(rated(rates), rule, SOURCE)
        return [set(batch) - {7} for epoch in range(2) for batch in made.batch_sampler.batches(epoch, 0)], len(made)

    assert batches(RATES) == batches(other)
    assert len(planned(rated(other)).participation.describe()) == len(planned(rated()).participation.describe())


def test_ranks_and_micro_batches_share_a_weighted_step_out():
    draws = Draws(PoissonSampling(12, 0.5), N, SOURCE, RATES)
    for ranks, accumulate in ((2, 1), (1, 3), (2, 2)):
        options = {"accumulate": accumulate, "ranks": ranks, "micro_batch": 4}
        dealt = [
            secret_loader(rated(), draws.rule, SOURCE, rank=rank, **options).batch_sampler for rank in range(ranks)
        ]
        assert {len(sampler) for sampler in dealt} == {6 * accumulate}
        for t in range(12):
            parts = [sampler.batch(t * accumulate + i) for sampler in dealt for i in range(accumulate)]
            drawn = sorted(i for part in parts for i in part[: len(part) - part.padding])
            assert drawn == draws.step(t).tolist()


REFUSED = {
    "too much weight": (lambda: planned(weighted(WEIGHTS * (1 + 99 * (torch.arange(N) == 0)))), "largest weight asks"),
    "no weight": (lambda: planned(weighted(torch.zeros(N))), "one of them above 0"),
    "other steps": (lambda: planned(weighted(), batch_size=2 * B), "batch_size must be that of the loader"),
    "users": (lambda: planned(weighted(), unit=1), "unit='example'"),
    "no weights": (lambda: planned(DataLoader(DATA, B, shuffle=True)), "says the rates of examples"),
    "another order": (lambda: planned(weighted(), order="balls-in-bins"), "must not be given together with loader"),
    "no order": (lambda: planned(weighted(), order=None), r"weights are public.*order='poisson'"),
    "no order for rates": (lambda: planned(rated(), order=None), "order='poisson'"),
    "fewer weights": (lambda: planned(weighted(torch.ones(9))), "must have a rate, got 9 for 30"),
    "each once": (lambda: planned(weighted(replacement=False)), "use replacement=True"),
    "a plan by size": (lambda: secret_loader(weighted(), PoissonSampling(12, B / N), SOURCE), "asks for 0.416667"),
    "more is stated": (lambda: secret_loader(rated(), PoissonSampling(12, 0.45), SOURCE), "asks for 0.5"),
    "a plan for bins": (lambda: secret_loader(rated(), BallsInBins(2, 6), SOURCE), "are for Poisson sampling"),
    "rates and users": (lambda: secret_loader(rated(), PoissonSampling(12, 0.5), SOURCE, unit=1), "by one draw"),
    "a rate above the stated": (lambda: rated(RATES, 0.4), "from 0 to most=0.4"),
    "a rate below none": (lambda: rated(-RATES), "from 0 to most"),
    "drawn without a run": (lambda: list(rated()), "secret key of a run"),
    "draws above the claim": (lambda: Draws(PoissonSampling(12, 0.2), N, SOURCE, RATES), "the claim is for"),
    "groups": (lambda: Draws(CyclicPoisson(12, 2, 0.5), N, SOURCE, RATES), "for Poisson sampling"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_claim_is_for_is_refused(name):
    refused, match = REFUSED[name]
    with pytest.raises((ArgumentError, LoaderError), match=match):
        refused()


def test_a_rate_in_single_precision_is_not_above_itself():
    assert rated(torch.full((N,), 0.3), 0.3).sampler.rates.max() == 0.3


def test_by_weight_without_replacement_is_one_pass():
    loader = weighted(replacement=False, num=20)
    assert ao.plan(
        loader=loader, epochs=3, noise_multiplier=1.0, delta=1e-3, mechanism="independent"
    ).participation == (EpochShuffle(3, 4))
    order = read_order(loader, b"seed")
    epochs = [[i for batch in order.batches(epoch, 0) for i in batch] for epoch in range(3)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert list(order.batches(1, 2)) == list(order.batches(1, 0))[2:]
    with pytest.raises(LoaderError, match="at most as many examples as have a weight above 0"):
        ao.plan(loader=weighted(WEIGHTS * LABELS, replacement=False), epochs=1, epsilon=1, delta=1e-3)


def test_weights_without_replacement_have_the_law_of_torch():
    """The first two of three, drawn one after another by weight: w_i / W times w_j / (W - w_i)."""
    weights, counts = np.array([1.0, 2.0, 5.0]), np.zeros((3, 3))
    sampler = WeightedRandomSampler(weights, 2, replacement=False)
    order = read_order(DataLoader(range(3), batch_sampler=BatchSampler(sampler, 2, False)), 0)
    for epoch in range(1000):
        counts[tuple(next(order.batches(epoch, 0)))] += 1
    law = weights[:, None] / 8 * weights / (8 - weights[:, None])
    np.fill_diagonal(law, 0.0)
    assert (abs(counts - 1000 * law) <= 5 * np.sqrt(1000 * law)).all()
