"""The front ends of the package, as audits with planted faults see them. A new one joins with its line at the end."""

import dataclasses
import sys
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.audit.faults import Fault, FrontEnd, Moved, patched
from anyorder.audit.faults.trial import banded_inverse, independent, tree
from anyorder.clipping import Adaptive
from anyorder.clipping.clip_rules import Cut
from anyorder.train.training import Training

# -- faults of the package's own clipping, which all of them go through ----------------------------------------------


@contextmanager
def factors_of_another(reached):
    """Each unit is cut by the factor of the next one: a list that is off by one."""
    real = Cut.apply

    def apply(self, squares, clip_norm):
        reached()
        factors, counts = real(self, squares, clip_norm)
        return {name: values.roll(1) for name, values in factors.items()}, counts

    with patched(Cut, "apply", apply):
        yield


@contextmanager
def norm_for_its_square(reached):
    """The norm is taken for its square."""
    real = Cut.apply

    def apply(self, squares, clip_norm):
        reached()
        return real(self, {name: square.sqrt() for name, square in squares.items()}, clip_norm)

    with patched(Cut, "apply", apply):
        yield


CLIPPING = (
    Fault("factors of another unit", factors_of_another),
    Fault("norm taken for its square", norm_for_its_square),
)

# -- the release core, with sums by bounded_sum ------------------------------------------------------------------------

HERE = sys.modules[__name__]
bounded_sum = ao.bounded_sum


def run_core(trial):
    release = ao.Release(trial.plan, trial.size, key=trial.key)
    for units, vectors in trial.steps:
        yield release.step(units, bounded_sum(vectors, units, release.clip_norm))


def core_sampled(trial):
    release = ao.Release(trial.plan, trial.size, key=trial.key)
    for _ in range(trial.plan.n):
        units = release.sample(len(trial.vectors))
        yield release.step(units, bounded_sum(trial.vectors[units], units, release.clip_norm))


def core_summing(make):
    return patched(HERE, "bounded_sum", make)


core = FrontEnd("release core", run_core, core_summing, core_sampled, CLIPPING)

# -- the same in exact integers ----------------------------------------------------------------------------------------

GRID = 2.0**-20


def run_exact(trial):
    release = ao.Release(dataclasses.replace(trial.plan, grid=GRID), trial.size, key=trial.key)
    for units, vectors in trial.steps:
        yield release.step(units, exact_sum(vectors, units, release.clip_norm))


def exact_sum(vectors, units, clip_norm):
    return ao.bounded_sum(vectors, units, clip_norm, grid=GRID)


def exact_summing(make):
    def total(vectors, units, clip_norm):
        return (make(vectors, units, clip_norm) / GRID).astype(np.int64)

    return patched(HERE, "exact_sum", total)


exact = FrontEnd(
    "release core, exact integers",
    run_exact,
    exact_summing,
    faults=CLIPPING,
    strategies=(banded_inverse, tree, independent),
    excuses={
        "row of Z used again": "its rows come from no program of a step; that of a whole step stands for it",
        "stale kernel": "exact noise is made without a compiled step",
        "clip norm of the next step": "the clip norm of a plan with exact integers never moves",
        "larger sampling probability": "the coins are those of the release core",
    },
)

# -- the engine: a linear functional, whose gradient at an example is the example --------------------------------------


def linear(trial, loader, **options):
    engine = ao.PrivacyEngine(trial.plan, key=trial.key)
    model = nn.Linear(trial.size, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return engine, *engine.make_private(model, optimizer, loader, loss_reduction="sum", **options)


def gradients(trial, rule=None):
    """For every step the engine's clip norm before it, and the private gradient after it."""
    batches = [{"x": torch.from_numpy(vectors), "unit": torch.from_numpy(units)} for units, vectors in trial.steps]
    engine, model, optimizer, loader = linear(trial, batches, unit="unit", rule=rule)
    for batch in loader:
        optimizer.zero_grad()
        clip_norm = engine.clip_norm
        model(batch["x"]).sum().backward()
        optimizer.step()
        yield clip_norm, model.module.weight.grad.reshape(-1).clone()


def run_engine(trial):
    return (row for _, row in gradients(trial))


def engine_sampled(trial):
    loader = DataLoader(TensorDataset(torch.from_numpy(trial.vectors)), batch_size=8)
    _, model, optimizer, loader = linear(trial, loader)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        yield model.module.weight.grad.reshape(-1).clone()


@contextmanager
def engine_summing(make):
    """Replaces the clipped sums that a backward pass gives."""
    forward, receive = Training._forward, Training._receive
    inputs = []

    def remember(self, args, kwargs):
        inputs[:] = [args[0]]
        return forward(self, args, kwargs)

    def replaced(self, batch, step, units, sums):
        total = make(inputs[0].numpy(), np.asarray(batch.units), self.release.clip_norm)
        weight = torch.from_numpy(total).to(sums["weight"].dtype).view_as(sums["weight"])
        receive(self, batch, step, units, {**sums, "weight": weight})

    with patched(Training, "_forward", remember), patched(Training, "_receive", replaced):
        yield


engine = FrontEnd("torch engine", run_engine, engine_summing, engine_sampled, CLIPPING)

ADAPTIVE = Adaptive(quantile=0.5, learning_rate=0.3, share=0.1)


def run_adaptive(trial):
    """With a clip norm that follows the units' norms."""
    for clip_norm, row in gradients(trial, ADAPTIVE):
        yield Moved(row, clip_norm, clip_norm / (trial.plan.clip_norm * ADAPTIVE.gradient_share))


adaptive = FrontEnd(
    "torch engine, adaptive norm",
    run_adaptive,
    engine_summing,
    faults=CLIPPING,
    strategies=(independent,),
    excuses={
        "stale kernel": "independent noise has no coefficients",
        "separation off by one": "steps of independent noise have nothing in common that nearer ones could add to",
        "larger sampling probability": "secret sampling needs no moving norm to be tested: the engine has it",
    },
)

FRONT_ENDS = {
    "release": [core, exact],
    "train": [engine, adaptive],
}
"""Room of the package -> its front ends."""
