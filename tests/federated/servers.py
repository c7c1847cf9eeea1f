"""Small servers, plans and messages that tests share."""

import numpy as np
import torch
from torch import nn

import anyorder as ao
from anyorder.federated import Server
from anyorder.participation import MinSeparation
from anyorder.strategy import BandedInverse, Independent
from anyorder.workload import prefix_sum

KEY = bytes(range(32))
N, GOAL, USERS = 8, 4, 12


def plan(n=N, *, strategy=None, order=None, clip_norm=1.0, sigma=0.5, **more):
    """User-level, each user at most three times and three rounds apart."""
    return ao.Plan(
        participation=order or MinSeparation(n, 3, 3),
        strategy=strategy or BandedInverse([1.0, -0.5, -0.2], n),
        workload=prefix_sum(n),
        clip_norm=clip_norm,
        sigma=sigma,
        delta=1e-6,
        batch_size=GOAL,
        **{"unit": "user", **more},
    )


def independent(n=N, **more):
    return plan(n, strategy=Independent(n), **more)


class Net(nn.Module):
    """Two shared layers, a personal one, and buffers: floats, and a counter."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.personal = nn.Linear(4, 2)


SHARED = ("one.weight", "one.bias", "norm.weight", "norm.bias")


def make(given=None, *, checkpoint=None, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), key=KEY, **more):
    """A server of a small model, the same at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    shared = [p for name, p in model.named_parameters() if name in SHARED]
    return Server(given or plan(), model, optimizer(shared), checkpoint=checkpoint, key=key, **more)


def message(server, seed, size=1.0):
    """A random change of norm `size`."""
    vector = torch.from_numpy(np.random.default_rng(seed).normal(size=server.layout.size)).float()
    named = server.layout.named(vector * (size / vector.norm()))
    return {name: value.clone() for name, value in named.items()}


def cohort(t):
    """Users of round t, each three rounds after the last time."""
    return [u for u in range(USERS) if u % 3 == t % 3]


def messages(server, t, kind=0):
    """What the cohort of a round sends."""
    return {u: message(server, (kind, t, u), 0.3 * (1 + u)) for u in cohort(t)}


def run(server, until=None, kind=0):
    """Make rounds until one, or the last."""
    while server.step < (server.plan.n if until is None else until):
        server.round(messages(server, server.step, kind))
    return server


def state(server):
    """All that a model holds, as one list of tensors."""
    return [value.clone() for value in server.model.state_dict().values()]


def same(one, other):
    """Whether two servers hold the same models, bit for bit, and the same record."""
    models = all(torch.equal(a, b) for a, b in zip(state(one), state(other), strict=True))
    return models and one.release.ledger.digest() == other.release.ledger.digest() and one.step == other.step
