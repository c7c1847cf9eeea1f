"""A linear model trained with opake, to be attacked. Runs in an environment of its own; prints its claim as JSON.

    audit_opake.py SETTINGS_AND_COINS.npz OUTPUT.npz

The gradient of an example is the example itself: 1 in coordinate i if the coin of i says so, else zero. Mechanism,
sampler and accountant are paired as its guide and its `examples/train_dpftrl.py` pair them:

    sequential   BLT, SequentialBatchSampler, mf_gaussian with the horizon, separation and participations of the order
    poisson      identity, CyclicPoissonSampler, poisson
    cyclic       banded, CyclicPoissonSampler over as many groups as bands, poisson
    bins         banded inverse square root, BallsInBinsSampler, balls_in_bins

The output holds what every step released (in units of the clip norm), C, and, where it is fixed, what is known of the
steps of each example: `steps` (sequential), `group` (cyclic).
"""

# ruff: noqa: E402

import dataclasses
import json
import secrets
import sys
from importlib.metadata import version

import numpy as np
import torch
from one_hot import OneHot

_dataclass = dataclasses.dataclass
if sys.version_info < (3, 12):  # its accountants name __weakref__ twice, which earlier Pythons refuse
    dataclasses.dataclass = lambda *args, weakref_slot=False, **options: _dataclass(*args, **options)

import opake.dpftrl.accounting as accounting
from opake.dpftrl.clipping import clipped_grad
from opake.dpftrl.noise import band_mf_strategy, bisr_strategy, blt_strategy, identity_strategy, mf_gaussian_noise
from opake.dpftrl.sampling import BallsInBinsSampler, CyclicPoissonSampler, SequentialBatchSampler
from opake.functional import empty_collate
from opake.random import key
from torch.utils.data import DataLoader, Dataset

BANDS = 4


def paired(order: str, data: Dataset, task: dict) -> tuple[object, object, object, dict]:
    """Strategy, sampler, accounted process, and how often and how far apart a unit takes part."""
    batch, epochs, sigma = task["batch_size"], task["epochs"], task["noise_multiplier"]
    epoch = len(data) // batch
    n, q = epochs * epoch, batch / len(data)
    rng = key(secrets.randbelow(2**31))
    match order:
        case "sequential":
            strategy, often = blt_strategy(), {"min_sep": epoch, "max_participations": epochs}
            process = accounting.mf_gaussian(sigma, strategy, n_steps=n, **often)
            return strategy, SequentialBatchSampler(data, batch_size=batch, n_steps=n), process, often
        case "poisson":
            strategy = identity_strategy()
            process = accounting.poisson(accounting.mf_gaussian(sigma, strategy), sample_rate=q, n_steps=n)
            return strategy, CyclicPoissonSampler(data, sample_rate=q, n_steps=n, key=rng), process, {}
        case "cyclic":
            strategy, q = band_mf_strategy(bands=BANDS), q * BANDS
            process = accounting.poisson(accounting.mf_gaussian(sigma, strategy), sample_rate=q, n_steps=n)
            return strategy, CyclicPoissonSampler(data, sample_rate=q, bands=BANDS, n_steps=n, key=rng), process, {}
        case "bins":
            strategy, often = bisr_strategy(bandwidth=BANDS), {"min_sep": epoch, "max_participations": epochs}
            inner = accounting.mf_gaussian(sigma, strategy)
            process = accounting.balls_in_bins(inner, num_bins=epoch, n_steps=n)
            return strategy, BallsInBinsSampler(data, num_bins=epoch, n_steps=n, key=rng), process, often
        case other:
            raise ValueError(other)


def main(source: str, target: str) -> None:
    """Train and write."""
    given = np.load(source)
    task, coins = json.loads(str(given["task"])), given["coins"]
    torch.set_num_threads(1)
    data, size, batch = OneHot(coins), len(coins), task["batch_size"]
    strategy, sampler, process, often = paired(task["order"], data, task)
    n = task["epochs"] * (size // batch)
    gradient, state = clipped_grad(lambda w, x: -(w @ x), clipping_norm=1.0, batch_argnums=1, normalize_by=batch)
    weights = torch.zeros(size)
    noise, noise_state = mf_gaussian_noise(
        weights,
        strategy,
        n_steps=n,
        noise_multiplier=task["noise_multiplier"],
        key=key(secrets.randbelow(2**31)),
        **often,
    )
    released, took = [], []
    for x, which in DataLoader(data, batch_sampler=sampler, collate_fn=empty_collate(torch.utils.data.default_collate)):
        summed, state = gradient(weights, x, state=state)
        private, noise_state = noise(summed, noise_state)
        weights = weights - private.pytree
        took.append(which.tolist())
        released.append((-private.pytree * batch).numpy())
    inverse = strategy.streaming_matrix(n_steps=n, **({"min_sep": 1, "max_participations": None} | often)).materialize(
        n
    )
    known = {"strategy": np.linalg.inv(inverse.double().numpy())}
    if task["order"] == "sequential":
        known["steps"] = np.array([[t for t in range(n) if i in took[t]] for i in range(size)])
    if task["order"] == "cyclic":
        known["group"] = np.full(size, -1)  # fixed beforehand; -1: of a rest that is never drawn
        for g, members in enumerate(sampler.partition):
            known["group"][members] = g
    np.savez(target, released=np.stack(released), **known)
    claimed = {str(delta): process.epsilon_at(delta) for delta in task["deltas"]}
    print(json.dumps({"version": version("opake-dpftrl"), "claimed": claimed, "bands": BANDS}))


if __name__ == "__main__":
    main(*sys.argv[1:])
