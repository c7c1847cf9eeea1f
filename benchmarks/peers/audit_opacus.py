"""A linear model trained with Opacus, to be attacked. Runs in an environment of its own; prints its claim as JSON.

    audit_opacus.py SETTINGS_AND_COINS.npz OUTPUT.npz

The gradient of an example is the example itself. `one`: example i is 1 in coordinate i if its coin says so, else zero.
`many`: as many trainings as coins; in each the examples are -1 but the first, which is 1 if the coin says so, else 0.
The output holds what every step released, as models tell it (sums of gradients in units of the clip norm), and the step
of each example in each epoch as the loader had it, for those who know the order.
"""

import json
import sys
import warnings

import numpy as np
import opacus
import torch
from one_hot import OneHot
from torch.utils.data import DataLoader, Dataset


class Line(Dataset):
    """All examples are -1 but the first."""

    def __init__(self, size: int, coin: bool) -> None:
        self.x = -torch.ones(size, 1)
        self.x[0] = float(coin)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.x[i], i


def train(data: Dataset, size: int, task: dict) -> tuple[np.ndarray, np.ndarray, opacus.PrivacyEngine]:
    """The loop of any user: released sums (steps, size), and the steps of each example (examples, epochs)."""
    model = torch.nn.Linear(size, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = opacus.PrivacyEngine()
    batch = task["batch_size"]
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=batch, shuffle=task["order"] == "shuffled"),
        noise_multiplier=task["noise_multiplier"], max_grad_norm=1.0, poisson_sampling=task["order"] == "poisson",
    )  # fmt: skip
    released, steps, before = [], np.full((len(data), task["epochs"]), -1), torch.zeros(size)
    for epoch in range(task["epochs"]):
        for x, which in loader:
            steps[which, epoch] = len(released)
            optimizer.zero_grad()
            if len(x):
                (-private(x)).mean().backward()
            else:  # a batch that the sampling left empty
                (-private(x)).sum().backward()
            optimizer.step()
            after = model.weight.detach()[0].clone()
            released.append(((after - before) * batch).numpy())
            before = after
    return np.stack(released), steps, engine


def main(source: str, target: str) -> None:
    """Train and write."""
    given = np.load(source)
    task, coins = json.loads(str(given["task"])), given["coins"]
    torch.set_num_threads(1)
    if task["kind"] == "one":
        released, steps, engine = train(OneHot(coins), len(coins), task)
        np.savez(target, released=released, steps=steps)
    else:
        runs = [train(Line(task["examples"], bool(coin)), 1, task) for coin in coins]
        engine = runs[0][2]
        np.savez(target, released=np.stack([r[:, 0] for r, _, _ in runs]), steps=np.stack([s[0] for _, s, _ in runs]))
    claimed = {str(delta): engine.get_epsilon(delta) for delta in task["deltas"]}
    print(json.dumps({"version": opacus.__version__, "claimed": claimed}))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of secure random numbers and of hooks
        main(*sys.argv[1:])
