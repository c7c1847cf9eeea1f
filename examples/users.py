"""User-level privacy for a stream: users arrive when they please, a timer keeps their visits apart.

The data is made up: each of 200 users has a few points of a noisy line. A stream has no sampler to read an order off,
so the plan says what arrivals obey (at most 4 visits, at least 20 steps apart), and the ledger holds them to it.

Run: python examples/users.py
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import anyorder as ao

STEPS, USERS_PER_STEP, SEPARATION, VISITS = 80, 10, 20, 4


class Arrivals(IterableDataset[tuple[Tensor, Tensor, int]]):
    """Users in an order of their own; one who was served waits until the timer allows the next visit."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield (features, target, user), ten users of two points each to a step."""
        generator = torch.Generator().manual_seed(0)
        last = dict.fromkeys(range(200), -SEPARATION)
        visits = dict.fromkeys(range(200), 0)
        for step in range(STEPS):
            ready = [u for u in last if step - last[u] >= SEPARATION and visits[u] < VISITS]
            order = torch.randperm(len(ready), generator=generator)[:USERS_PER_STEP].tolist()
            for user in (ready[i] for i in order):
                last[user], visits[user] = step, visits[user] + 1
                for _ in range(2):
                    x = torch.randn(3, generator=generator)
                    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn((), generator=generator)
                    yield x, y, user


def main() -> None:
    """Train a linear model, one pass over the arrivals."""
    plan = ao.plan(
        order=ao.participation.MinSeparation(n=STEPS, b=SEPARATION, k=VISITS),
        batch_size=USERS_PER_STEP,
        epsilon=4,
        delta=1e-5,
        unit="user",
        mechanism="tree",
    )
    print(plan)
    engine = ao.PrivacyEngine(plan)
    model = nn.Linear(3, 1)
    optimizer = ao.FTRL(model.parameters(), lr=0.03)
    loader = DataLoader(Arrivals(), batch_size=2 * USERS_PER_STEP)
    model, optimizer, loader = engine.make_private(model, optimizer, loader, unit=2, loss_reduction="sum")

    for x, y, _ in loader:
        optimizer.zero_grad()
        (0.5 * (model(x).squeeze(1) - y) ** 2).sum().backward()
        optimizer.step()
    print(f"\nsteps {engine.step}, weights {model.module.weight.detach().numpy().round(2)} (truth: 1, -2, 0.5)")


if __name__ == "__main__":
    main()
