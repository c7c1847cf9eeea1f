"""Wrote the files beside this one, with the version of November 2026: `python tests/golden/make.py FOLDER`.

They are kept as that version wrote them: what reads them today must go on reading them, see test_golden.py.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import anyorder as ao
from anyorder.accounting import Gaussian
from anyorder.federated import DeviceRecord, Server
from anyorder.participation import FixedOrder, KnownOrder, MinSeparation
from anyorder.strategy import Independent
from anyorder.workload import prefix_sum

KEY = bytes(range(32))
SIZE, STEPS, SAVED = 6, 4, 3


def plan():
    """Of eight steps, whose noise can be drawn anew from any of them on."""
    order = FixedOrder(8, k=2, b=4)
    return ao.plan(order=order, batch_size=2, epsilon=4, delta=1e-5, mechanism="independent")


def total(t):
    return np.random.default_rng(t).normal(size=SIZE).astype(np.float32)


def units(t):
    return [f"a{t % 4}", f"b{t % 4}"]


def user_plan():
    return ao.Plan(
        participation=MinSeparation(6, 3, 3), strategy=Independent(6), workload=prefix_sum(6), clip_norm=1.0,
        sigma=0.5, delta=1e-6, batch_size=2, unit="user",
    )  # fmt: skip


def server(path, key=KEY):
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return Server(user_plan(), model, torch.optim.SGD(model.parameters(), lr=1.0), checkpoint=path, key=key)


CHANGE = {"weight": torch.tensor([[0.5, -0.25]]), "bias": torch.tensor([0.125])}


def releases(folder):
    """A checkpoint at step 3 and its journal with step 3 in it: with the ledger in it, and beside it."""
    for name, beside in (("within", False), ("beside", True)):
        release = ao.Release(plan(), SIZE, key=KEY, checkpoint=folder / f"{name}.ckpt", ledger_on_disk=beside)
        for t in range(STEPS):
            release.step(units(t), total(t))
            if t == SAVED - 1:
                release.save({"note": name})
        if not beside:
            release.certificate(public_stop=True).save(folder / "run.privacy.json")
            release.evidence().save(folder / "run.evidence.json")
        release.close()
    plan().save(folder / "plan.json")


def servers(folder):
    """A server at round 2 whose third round is all in, and was not made."""
    made = server(folder / "server.ckpt")
    made.round({"ann": CHANGE})
    made.round({"bob": CHANGE})
    made._make = lambda pending: None  # as if it had been killed there
    made.round({"cy": CHANGE})
    made.close()


def budgets(folder):
    """A limit, a curve, a plan of named units, a settled run, another limit."""
    budget = ao.Budget(folder / "people.budget", 8.0, 1e-5)
    budget.spend(Gaussian(0.25), "count")
    named = ao.plan(
        order=KnownOrder([["ann", "bob"], ["cy"], ["ann"]]), batch_size=1, noise_multiplier=20.0, delta=1e-5,
        mechanism="independent",
    )  # fmt: skip
    budget.spend(named, "named", named=True)
    budget.spend(plan(), "run", run="the run")
    with ao.Release(plan(), SIZE, key=KEY) as release:
        for t in range(STEPS):
            release.step(units(t), total(t))
        budget.settle(release.certificate(public_stop=True), run="the run")
    budget.limit(9.0, 1e-5)


def devices(folder):
    """A device that took part in round 2."""
    DeviceRecord(folder / "device.json", (2, 3, 0.0), clock=lambda: 1e9).take(2)


def write(folder):
    """All of them."""
    for act in (releases, servers, budgets, devices):
        act(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
