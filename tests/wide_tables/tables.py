"""A small run with a dense vector and one or two tables, lazily and as the dense run that it stands for."""

import numpy as np
import torch
from torch import nn

import anyorder as ao
from release.runs import KEY, N, planned, units

__all__ = ["DENSE", "DIM", "KEY", "ROWS", "N", "begun", "dense_run", "initial", "lazy_step", "planned", "sums", "units"]

DENSE, ROWS, DIM = 5, 6, 16


def initial(rows=ROWS, dim=DIM, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32))


def embedding(rows=ROWS, dim=DIM, seed=0):
    layer = nn.Embedding(rows, dim, sparse=True)
    layer.weight.data = initial(rows, dim, seed)
    return layer


def sums(t, rows=ROWS, dim=DIM):
    """The rows of a step, some of which come often and one never, and their sums."""
    chance = np.random.default_rng(100 + t)
    touched = np.sort(chance.permutation(rows - 1)[: (0, 1, 2, 3)[t % 4]])
    return touched, chance.normal(size=(len(touched), dim)).astype(np.float32)


def dense_total(t):
    return np.random.default_rng(t).normal(size=DENSE).astype(np.float32)


def begun(plan, *, size=DENSE, rows=ROWS, dim=DIM, path=None, lr=0.3, key=KEY, layer=None, **options):
    """(embedding, release, table)"""
    layer = embedding(rows, dim) if layer is None else layer
    release = ao.Release(plan, size, key=key, checkpoint=path)
    return layer, release, ao.sparse.LazyTable(layer, release, lr=lr, **options)


def lazy_step(release, table, *, rate=None):
    """Takes the next step as a training loop would: rows are read, then their sums given."""
    t = release.steps_taken
    touched, values = sums(t, table.num_rows, table.width)
    if rate is not None:
        table.lr = rate(t)
    table.read(torch.from_numpy(touched))
    total = dense_total(t) if release.size else np.zeros(0, np.float32)
    return release.step(units(t), total, [table.rows(touched, values)])


def dense_run(plan, rate, *, momentum=0.0, nesterov=False, steps=None):
    """(private dense vectors, tables after every step) of a release of the whole vector, and torch's SGD."""
    release = ao.Release(plan, DENSE + ROWS * DIM, key=KEY)
    weight = nn.Parameter(initial())
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum, nesterov=nesterov)
    private, tables = [], [weight.detach().clone()]
    for t in range(plan.n if steps is None else steps):
        table = np.zeros((ROWS, DIM), np.float32)
        touched, values = sums(t)
        table[touched] = values
        made = release.step(units(t), np.concatenate([dense_total(t), table.ravel()]))
        private.append(made[:DENSE])
        weight.grad = torch.from_numpy(made[DENSE:].reshape(ROWS, DIM).copy())
        optimizer.param_groups[0]["lr"] = rate(t)
        optimizer.step()
        tables.append(weight.detach().clone())
    return private, tables
