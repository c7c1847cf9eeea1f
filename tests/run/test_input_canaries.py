"""Examples as canaries: in the data by coins, left out as zero, found by their losses."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.app import audit_inputs, with_canaries
from anyorder.app.audits import Setup, attack
from anyorder.errors import ArgumentError
from anyorder.plan.planner import plan_at_sigma
from anyorder.training.engine import PrivacyEngine

SIZE = 600
KEY = bytes(range(32))
COINS = np.random.default_rng(5).random(60) < 0.5


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def parts(seed=0):
    rng = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.randn(60, SIZE, generator=rng), torch.randint(2, (60,), generator=rng))
    examples = [(torch.randn(SIZE, generator=rng), torch.randint(2, (), generator=rng)) for _ in range(60)]
    return data, examples


def trained(data, sigma):
    plan = plan_at_sigma(sigma, dataset_size=120, batch_size=40, epochs=10, delta=1e-5, mechanism="independent")
    torch.manual_seed(0)
    model = nn.Linear(SIZE, 2)
    start = copy.deepcopy(model)
    engine = PrivacyEngine(plan, key=KEY)
    loader = DataLoader(data, batch_size=40, shuffle=True)
    model, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), lr=4.0), loader)
    for _ in range(10):
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
    return plan, model, start


def test_a_canary_that_is_left_out_adds_exactly_zero():
    """The model is that of a run in which the place of each such canary is skipped by hand."""
    data, examples = parts()
    coins = np.zeros(60, np.bool_)
    other = [(x + 1, 1 - y) for x, y in examples]
    _, first, _ = trained(with_canaries(data, examples, coins), sigma=1.0)
    _, second, _ = trained(with_canaries(data, other, coins), sigma=1.0)
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.isfinite().all()
    _, third, _ = trained(with_canaries(data, examples, ~coins), sigma=1.0)
    assert not torch.equal(next(first.parameters()), next(third.parameters()))


def test_a_true_claim_holds_and_without_noise_a_small_one_does_not():
    data, examples = parts()
    joined = with_canaries(data, examples, COINS)
    assert len(joined) == 120
    plan, model, start = trained(joined, sigma=0.6)
    assert not audit_inputs(plan, model, examples, COINS, loss, start=start).refuted()
    plan, model, start = trained(joined, sigma=1e-3)
    seen = audit_inputs(plan, model, examples, COINS, loss, start=start)
    assert seen.scores[COINS].mean() > seen.scores[~COINS].mean() + 1
    assert 0.5 < seen.lower_bound("one_run") < plan.epsilon
    claim = ao.plan(dataset_size=120, batch_size=40, epochs=10, epsilon=0.1, delta=1e-9, mechanism="independent")
    assert audit_inputs(claim, model, examples, COINS, loss, start=start).p_value() < 1e-3
    assert audit_inputs(claim, model, examples, COINS, loss).refuted()
    assert model.training


def test_data_with_canaries_is_audited_as_any_setup():
    data, examples = parts()
    plan = ao.plan(dataset_size=120, batch_size=40, epochs=1, epsilon=8, delta=1e-5)
    model = nn.Linear(SIZE, 2)
    loader = DataLoader(with_canaries(data, examples, COINS), batch_size=40)
    done = attack(Setup(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss), canaries=50)
    assert np.isfinite(done.audited.scores).all()
    assert done.certificate.steps == 3


@pytest.mark.parametrize("trains", [False, True])
def test_losses_are_of_evaluation_and_the_model_stays_in_its_mode(trains):
    _, examples = parts()
    plan = ao.plan(dataset_size=120, batch_size=40, epochs=1, epsilon=8, delta=1e-5)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(SIZE, 2)).train(trains)
    one, other = (audit_inputs(plan, model, examples, COINS, loss).scores for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert model.training is trains


def test_what_fits_no_canary_is_refused():
    data, examples = parts()
    with pytest.raises(ArgumentError, match="one bool for each of 60"):
        with_canaries(data, examples, COINS[:5])
    with pytest.raises(ArgumentError, match="one bool for each of 60"):
        with_canaries(data, examples, COINS.astype(float))
    with pytest.raises(ArgumentError, match="floating-point tensor"):
        with_canaries(data, [torch.tensor([1, 2])], COINS[:1])
    plan = ao.plan(dataset_size=120, batch_size=40, epochs=1, epsilon=8, delta=1e-5, neighbours="replace-one")
    with pytest.raises(ArgumentError, match="left out, not replaced"):
        audit_inputs(plan, nn.Linear(SIZE, 2), examples, COINS, loss)
