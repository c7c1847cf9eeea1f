"""What a loop does with batches that it keeps, seeds that it sets again, and classes of its own: `true` stays true."""

import itertools
import math
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from anyorder.accounting import gdp_epsilon
from anyorder.audit.loader_check import watch
from anyorder.noise import NoiseSource
from anyorder.sampling.samplers import PoissonBatchSampler

DELTA = 1e-5
DATA = TensorDataset(torch.arange(40).float()[:, None])


def seen_of(loop, data=DATA, **options):
    """The finding of a loop(loader, step)."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step(*_):
        parameter.grad = torch.ones(1)
        optimizer.step()

    torch.manual_seed(0)
    with watch() as seen:
        loop(DataLoader(data, **{"batch_size": 4, "shuffle": True, **options}), step)
    [found] = seen.findings(delta=DELTA, noise_multiplier=1.0)
    return found


def least(weight):
    return gdp_epsilon(math.sqrt(weight), DELTA) * (1 - 1e-9)


def inner(loader, step):
    for batch in loader:
        for _ in range(20):
            step(batch)


def kept(loader, step):
    batches = list(loader)
    for _ in range(20):
        for batch in batches:
            step(batch)


def cycled(loader, step):
    for batch in itertools.islice(itertools.cycle(loader), 200):
        step(batch)


def replayed(loader, step):
    first = None
    for batch in loader:
        step(batch)
        first = batch if first is None else first
        step(first)


@pytest.mark.parametrize("loop", [inner, kept, cycled, replayed])
def test_batches_that_the_loop_keeps_count_as_often_as_it_uses_them(loop):
    found = seen_of(loop)
    assert found.finding.true >= least(20 if loop is not replayed else 11)
    if loop is not inner:
        assert found.finding.true == math.inf
        assert "batches that it kept" in found.finding.because


def test_the_only_batch_there_is_counts_in_each_step():
    def whole(loader, step):
        batch = next(iter(loader))
        for _ in range(20):
            step(batch)

    found = seen_of(whole, batch_size=40)
    assert found.seen.weight == 20
    assert found.finding.true == pytest.approx(least(20))


def test_a_loop_that_is_one_batch_ahead_is_no_loop_that_keeps_batches():
    def ahead(loader, step):
        for _ in range(3):
            batches = iter(loader)
            batch = next(batches)
            while batch is not None:
                following = next(batches, None)
                step(batch)
                batch = following

    found = seen_of(ahead)
    assert (found.seen.steps, found.seen.most, found.seen.doubt) == (30, 3, "")
    assert found.finding.true == pytest.approx(least(3))


def test_coins_of_a_batch_that_is_used_again_are_not_tossed_again():
    sampler = PoissonBatchSampler(40, 0.25, 10, NoiseSource(bytes(32)))
    found = seen_of(inner, batch_size=1, shuffle=None, batch_sampler=sampler)
    assert found.seen.weight >= 40
    assert found.finding.true >= least(found.seen.weight)
    assert not found.finding.holds


# -- Opacus ----------------------------------------------------------------------------------------------------------


def private(run, *sigmas, poisson):
    """The findings of trainings, one of each noise multiplier: run(loader, step)."""
    opacus = pytest.importorskip("opacus", reason="opacus is not installed")
    data = TensorDataset(torch.randn(400, 3), torch.randn(400, 1))
    torch.manual_seed(0)
    with warnings.catch_warnings(), watch() as seen:
        warnings.simplefilter("ignore")
        for sigma in sigmas:
            engine = opacus.PrivacyEngine(accountant="rdp")
            model = torch.nn.Linear(3, 1)
            model, optimizer, loader = engine.make_private(
                module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), noise_multiplier=sigma,
                data_loader=DataLoader(data, batch_size=40), max_grad_norm=1.0,
                poisson_sampling=poisson,
            )  # fmt: skip

            def step(x, y, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()

            run(loader, step)
            engine.get_epsilon(DELTA)
    return seen.findings(delta=DELTA)


def once(loader, step):
    for x, y in loader:
        step(x, y)


@pytest.mark.parametrize("most", [None, 9])
def test_coins_whose_seed_is_set_again_are_no_coins(most):
    def seeded(loader, step):
        for _ in range(12):
            torch.manual_seed(0)
            for x, y in itertools.islice(loader, most):
                step(x, y)

    [found] = private(seeded, 1.0, poisson=True)
    assert found.finding.true >= least(found.seen.weight)
    assert found.seen.weight >= 12
    assert "the same batches came again" in found.finding.because
    assert not found.finding.holds


def test_coins_that_are_kept_are_no_coins():
    def listed(loader, step):
        batches = list(loader)
        for _ in range(20):
            for x, y in batches:
                step(x, y)

    [found] = private(listed, 1.0, poisson=True)
    assert found.finding.true == math.inf


def test_two_private_trainings_of_one_data_set_add_up():
    [found] = private(once, 4.0, 0.5, poisson=False)
    assert found.finding.noise_multiplier == 0.5
    assert found.finding.true >= gdp_epsilon(math.sqrt(2) / 0.5, DELTA) * (1 - 1e-9)
    assert "2 accountants" in found.finding.accountant
    assert found.finding.claimed == max(epsilon for _, epsilon in found.printed)
    assert found.finding.at_least <= gdp_epsilon(math.sqrt(1 / 16 + 1 / 0.25), DELTA)  # what really is


def test_steps_of_the_accountant_that_were_not_seen():
    pytest.importorskip("opacus", reason="opacus is not installed")
    from opacus.accountants import RDPAccountant

    original = RDPAccountant.step

    def twice(self, **options):
        original(self, **options)
        original(self, **options)

    RDPAccountant.step = twice
    try:
        [found] = private(once, 1.0, poisson=False)
    finally:
        RDPAccountant.step = original
    assert found.finding.true == math.inf
    assert "20 steps and 10 were seen" in found.finding.because
