"""A model with a table and a linear layer, for tests of wide tables, and its gradients by brute force."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.clipping.coupling import unwatched
from anyorder.participation import EpochShuffle, PoissonSampling
from anyorder.strategy import Independent

KEY = bytes(range(32))
V, D, L = 60, 3, 4
N, B, EPOCHS = 24, 4, 2
STEPS = EPOCHS * N // B


class Words(nn.Module):
    """A linear layer of the sum of a few rows of a table, whose first half the data never touch."""

    def __init__(self, sparse=True, bag=False, rows=V):
        super().__init__()
        self.linear = nn.Linear(D, 2)
        kind = nn.EmbeddingBag if bag else nn.Embedding
        options = {"mode": "sum"} if bag else {}
        self.table = kind(rows, D, sparse=sparse, **options)
        self.bag = bag

    def forward(self, ids):
        rows = self.table(ids)
        return self.linear(rows if self.bag else rows.sum(1))


class TableAlone(nn.Module):
    """Nothing but a table: outputs are sums of its rows."""

    def __init__(self, sparse=True, rows=V, scale=1.0):
        super().__init__()
        self.table = nn.Embedding(rows, D, sparse=sparse)
        self.scale = scale

    def forward(self, ids):
        return self.table(ids).sum(1) * self.scale


def data(shift=0):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset((torch.randint(V // 2, V, (N, L), generator=generator) + shift) % V, torch.arange(N) % 2)


def planned(strategy=None, *, selection=None, sigma=0.5, clip_norm=0.7, batch_size=B, poisson=None, steps=STEPS):
    """A plan whose epsilon nobody asks for."""
    strategy = strategy or Independent(steps)
    participation = EpochShuffle(EPOCHS, steps // EPOCHS) if poisson is None else PoissonSampling(steps, poisson)
    return ao.Plan(
        participation=participation, strategy=strategy, workload=ao.workload.prefix_sum(strategy.n),
        clip_norm=clip_norm, sigma=sigma, delta=1e-5, batch_size=batch_size, selection=selection,
        neighbours="zero-out" if poisson is None else "add-or-remove",
    )  # fmt: skip


def private(
    plan,
    *,
    make=Words,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    loader=None,
    checkpoint=None,
    shift=0,
    **options,
):
    torch.manual_seed(0)
    engine = ao.PrivacyEngine(plan, key=KEY, checkpoint=checkpoint)
    model = make()
    loader = loader or DataLoader(data(shift), batch_size=B, shuffle=True)
    return engine, *engine.make_private(model, optimizer(model.parameters()), loader, **options)


def backward(model, batch):
    outputs = model(batch[0])
    loss = nn.functional.cross_entropy(outputs, batch[1]) if outputs.shape[1] == 2 else outputs.sum(1).mean()
    loss.backward()


def train(engine, model, optimizer, loader, until=None, save_every=None, each=None):
    """Steps up to `until`; `each` is called after each."""
    until = engine.plan.n if until is None else until
    while engine.step < until:
        for batch in loader:
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            if each is not None:
                each(batch)
            if save_every and engine.step % save_every == 0:
                engine.save()
            if engine.step == until:
                break


def per_unit(model, batch):
    """(b, d) gradients, the linear layer's first, one example at a time, as float64."""
    rows, batch = [], unwatched(batch)
    for i in range(len(batch[0])):
        copy = Words(sparse=False)
        copy.load_state_dict(model.state_dict())
        nn.functional.cross_entropy(copy(batch[0][i : i + 1]), batch[1][i : i + 1]).backward()
        rows.append(torch.cat([p.grad.reshape(-1) for p in copy.parameters()]))
    return torch.stack(rows).double()


def clipped_sum(gradients, clip_norm):
    norms = gradients.norm(dim=1, keepdim=True)
    return (gradients * (clip_norm / norms).clamp(max=1)).sum(0)


def counts(ids, count_norm):
    """(V,) the clipped counts of the rows that the units of a batch touch."""
    total = np.zeros(V)
    for row in ids.numpy():
        touched = np.unique(row)
        total[touched] += min(1.0, count_norm / np.sqrt(len(touched)))
    return total


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.module.parameters()])
