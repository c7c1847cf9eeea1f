"""Ways of training that public scripts have, each in a made-up model: they run, and a unit is clipped once a step."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import ModelWarning, TrainingError


def exact(**size):
    """A plan that hides nothing, so that a step can be told by its gradient."""
    return ao.plan(noise_multiplier=1e-6, delta=1e-5, mechanism="independent", **size)


def test_an_episode_of_any_length_is_clipped_as_one_unit():
    """A policy plays by itself, and learns from whole episodes: the steps of one are clipped together."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.Softmax(1))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-6)
    plan = exact(order=ao.participation.SingleEpoch(5), batch_size=1, unit="episode", clip_norm=0.5)
    waiting, numbers = [], itertools.count()
    played = (waiting.pop() for _ in range(5))
    private, optimizer, loader = ao.PrivacyEngine(plan).make_private(
        policy, optimizer, played, unit=3, loss_reduction="sum"
    )
    batches = iter(loader)
    for length in (3, 1, 7, 2, 4):
        states = torch.randn(length, 4)
        with torch.no_grad():
            actions = Categorical(policy(states)).sample()
        returns = torch.linspace(9, 10, length)
        waiting.append((states, actions, returns, torch.full((length,), next(numbers))))
        s, a, g, _ = next(batches)
        loss = -(Categorical(policy(states)).log_prob(actions) * returns).sum()
        whole = torch.autograd.grad(loss, list(policy.parameters()))
        norm = torch.cat([part.flatten() for part in whole]).norm()
        (-(Categorical(private(s)).log_prob(a) * g).sum()).backward()
        optimizer.step()
        for p, part in zip(policy.parameters(), whole, strict=True):
            torch.testing.assert_close(p.grad, part * min(1, 0.5 / norm), rtol=1e-4, atol=1e-5)
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore::anyorder.errors.ClippingWarning")
def test_a_view_that_joins_examples_joins_none_where_each_is_run_alone():
    """The last states of both directions, (2, batch, width), viewed as (batch, 2 width): those of two examples."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, bidirectional=True, batch_first=True)

        def forward(self, x):
            out, (last, _) = self.lstm(x)
            weights = torch.bmm(out, last.view(-1, 8, 1)).softmax(1)
            return (out * weights).sum(1)

    def gradient(second):
        torch.manual_seed(0)
        model = Attention()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(2, 5, 3)
        x[1] = second
        loader = DataLoader(TensorDataset(x, torch.tensor([1.0, 0.0])), batch_size=2)
        plan = exact(loader=loader, epochs=1, clip_norm=1e3)
        private, optimizer, loader = ao.PrivacyEngine(plan, key=bytes(32)).make_private(model, optimizer, loader)
        for rows, counts in loader:
            (private(rows).sum(1) * counts).mean().backward()  # of the first alone
            optimizer.step()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    with pytest.warns(ModelWarning, match="other outputs for one row alone than for the same row in a batch"):
        torch.testing.assert_close(gradient(0.5), gradient(-3.0), rtol=0, atol=1e-6)


def test_a_loop_that_peeks_at_a_batch_before_each_pass():
    """`next(iter(loader))` for the size of a batch: what is not trained on counts for nothing."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(12, 3), torch.randn(12, 1)), batch_size=4, shuffle=True)
    engine = ao.PrivacyEngine(exact(loader=loader, epochs=2))
    private, optimizer, loader = engine.make_private(model, optimizer, loader)
    for _ in range(2):
        assert len(next(iter(loader))[0]) == 4
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(private(x), y).backward()
            optimizer.step()
    assert engine.step == 6


def test_to_predict_after_training_the_message_says_eval():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(4, 3)), batch_size=4)
    private, optimizer, loader = ao.PrivacyEngine(exact(loader=loader, epochs=1)).make_private(model, optimizer, loader)
    ((x,),) = loader
    private(x).mean().backward()
    optimizer.step()
    with pytest.raises(TrainingError, match=r"call model.eval\(\) before"):
        private(x)
    assert private.eval()(x).shape == (4, 1)
