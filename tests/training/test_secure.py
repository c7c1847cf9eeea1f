"""Training in exact integers, end to end: what is released, resumed, certified, and refused."""

import copy
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import CertificateError, CheckpointError, PlanError
from anyorder.noise import NoiseSource
from anyorder.noise.discrete import GridStream
from anyorder.participation import FixedOrder, MinSeparation, SingleEpoch
from anyorder.release.release import SharedNoise
from anyorder.strategy import BLT, BandedInverse, Independent, Tree
from anyorder.strategy.base import Combination
from anyorder.training.distributed import Shards
from plans import flat_plan

KEY = bytes(range(32))
N, B, EPOCHS = 24, 4, 3
STEPS = EPOCHS * N // B


def planned(**changes):
    settings = {"dataset_size": N, "batch_size": B, "epochs": EPOCHS, "epsilon": 8, "delta": 1e-5, "mechanism": "tree"}
    return flat_plan(**{"secure": True, "momentum": 0.5, **settings, **changes})


def data(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, 3, generator=generator), torch.arange(N) % 2


def private(plan, *, examples=None, checkpoint=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    loader = DataLoader(TensorDataset(*(examples or data())), batch_size=B)
    engine = ao.PrivacyEngine(plan, key=KEY, checkpoint=checkpoint)
    return engine, *engine.make_private(model, optimizer, loader, **options)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def train(engine, model, optimizer, loader, steps=STEPS):
    """The released gradients, in float64."""
    released = []
    while len(released) < steps:
        for batch in loader:
            step(model, optimizer, batch)
            released.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double())
            if len(released) == steps:
                break
    return torch.stack(released)


def integer_sum(model, batch, plan):
    """One example at a time: clip, truncate, add."""
    total = 0
    for x, y in zip(*batch, strict=True):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        g = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
        total = total + (g * min(1.0, plan.clip_norm / g.norm().item()) / plan.grid).trunc()
    return total.double()


KINDS = [Independent(STEPS), Tree(STEPS), Tree(STEPS, "full"), BandedInverse([1, -0.5], STEPS)]


@pytest.mark.parametrize("mechanism", KINDS, ids=repr)
def test_released_gradients_are_integer_sums_plus_integer_noise(mechanism):
    plan = planned(mechanism=mechanism, clip_norm=0.3)
    engine, model, optimizer, loader = private(plan)
    source = NoiseSource(KEY).derive(plan.digest.encode())
    size = sum(p.numel() for p in model.parameters())
    stream = GridStream(plan.strategy, source, plan.noise_std, plan.grid, size)
    for batch in loader:
        expected = integer_sum(copy.deepcopy(model.module), batch, plan)
        step(model, optimizer, batch)
        released = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double() * B / plan.grid
        noise = torch.from_numpy(stream.next()).double()
        # Of the floats before truncation the last bits may differ, one step of the grid each.
        assert (released - noise - expected).abs().max() <= 2e-7 * noise.abs().max() + 2 * B


def test_every_release_is_a_multiple_of_the_grid():
    """With gradients in float64 nothing hides them: times batch over grid they are integers."""
    plan = planned()
    engine, model, optimizer, loader = private(plan)
    model.module.double()
    batch = next(iter(loader))
    step(model, optimizer, (batch[0].double(), batch[1]))
    for p in model.parameters():
        steps = p.grad * B / plan.grid
        assert (steps - steps.round()).abs().max() < 1e-6
        assert steps.abs().min() > 100


def test_noise_has_the_claimed_size():
    """A model without gradients shows the bare noise; half of it would show."""
    plan = planned(mechanism="independent", clip_norm=2.0)
    engine = ao.PrivacyEngine(plan)
    model = nn.Linear(3000, 2)
    loader = DataLoader(TensorDataset(torch.zeros(N, 3000)), batch_size=B)
    model, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    (batch,) = next(iter(loader))
    (model(batch) * 0).sum().backward()
    optimizer.step()
    noise = torch.cat([p.grad.reshape(-1) for p in model.parameters()]) * B
    assert noise.std().item() == pytest.approx(plan.noise_std, rel=5 / math.sqrt(2 * noise.numel()))


@pytest.mark.parametrize("mechanism", [Independent(STEPS), Tree(STEPS, "full")])
def test_neighbours_outputs_differ_by_one_unit_s_integers(mechanism):
    """The first releases of two data sets that differ in example 2, under one key: their difference is noise-free."""
    plan = planned(mechanism=mechanism, clip_norm=0.3, neighbours="replace-one")
    x, y = data()
    changed = x.clone()
    changed[2] = 5.0
    pair = [train(*private(plan, examples=(examples, y)), steps=1)[0] for examples in (x, changed)]
    difference = (pair[0] - pair[1]) * B / plan.grid
    error = 2e-7 * max(p.abs().max().item() for p in pair) * B / plan.grid  # of the float32 gradients
    assert difference.norm() * plan.grid <= 2 * plan.clip_norm + error * plan.grid * math.sqrt(len(difference))
    assert difference.norm() > 0


def test_resumed_training_is_bit_equal(tmp_path):
    plan, file = planned(mechanism=Tree(STEPS, "full", restarts=(6,), completion=True)), tmp_path / "run.ckpt"
    whole = train(*private(plan))
    engine, *parts = private(plan, checkpoint=file)
    assert torch.equal(train(engine, *parts, steps=7), whole[:7])
    engine.save()
    engine.close()
    engine, *parts = private(plan, checkpoint=file)
    assert engine.step == 7
    assert torch.equal(train(engine, *parts, steps=STEPS - 7), whole[7:])


def test_a_checkpoint_without_a_grid_is_another_plan_s(tmp_path):
    file = tmp_path / "run.ckpt"
    plan = planned()
    engine, *parts = private(plan, checkpoint=file)
    train(engine, *parts, steps=1)
    engine.save()
    engine.close()
    with pytest.raises(CheckpointError, match="grid"):
        private(replace(plan, grid=None), checkpoint=file)


def test_micro_batches_give_the_same_integers():
    plan = planned(mechanism="independent")
    whole = train(*private(plan), steps=1)
    torch.manual_seed(0)
    engine = ao.PrivacyEngine(plan, key=KEY)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    loader = DataLoader(TensorDataset(*data()), batch_size=B // 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = engine.make_private(model, optimizer, loader, accumulate=2)
    for _, batch in zip(range(2), loader, strict=False):
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    pieces = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
    assert (pieces - whole[0]).abs().max() * B / plan.grid <= 2 * B + 2e-7 * whole.abs().max() * B / plan.grid


def test_ranks_make_their_own_part_of_the_noise():
    parameters = {"a": nn.Parameter(torch.zeros(5, 3)), "b": nn.Parameter(torch.zeros(4))}
    source, strategy = NoiseSource(KEY), Tree(4, "full")
    whole = GridStream(strategy, source, 1.5, 2.0**-10, 19)
    ranks = []
    for rank in (0, 1):
        shards = Shards(parameters, SimpleNamespace(rank=rank, size=2))
        ranks.append(SharedNoise(strategy, source, 1.5, shards, 2.0**-10))
    sums = torch.arange(10), torch.arange(10, 19)
    for _ in range(4):
        parts = [piece for stream, own in zip(ranks, sums, strict=True) for piece in stream.add_to([own], 2)]
        assert np.array_equal(torch.cat(parts) * 2 / 2.0**-10, np.arange(19) + whole.next())
    with pytest.raises(RuntimeError, match="can't be cast"):
        SharedNoise(strategy, source, 1.5, shards, 2.0**-10).add_to([torch.zeros(9)], 2)


# -- plans and certificates ------------------------------------------------------------------------------------------


def test_nothing_but_the_arithmetic_changes():
    """The same epsilon and noise as without a grid: rounding is post-processing."""
    plain = planned(secure=False)
    plan = planned()
    assert replace(plan, grid=None) == plain
    assert plan.claims() == plain.claims()
    assert plan.digest != plain.digest
    assert "exact integers" in str(plan)
    assert "12 bytes a parameter" in str(plan)
    assert "exact integers" not in str(plain)


@pytest.mark.parametrize(("clip_norm", "grid"), [(1.0, 2.0**-20), (0.3, 2.0**-22), (2.5, 2.0**-19)])
def test_the_grid_is_chosen_below_the_clip_norm(clip_norm, grid):
    assert planned(clip_norm=clip_norm).grid == grid


def test_auto_takes_the_best_that_allows_it():
    chosen = ao.plan(
        order=FixedOrder(60, 3, 20), batch_size=4, epsilon=4, delta=1e-5, mechanism=ao.mechanism(secure=True)
    ).strategy
    assert isinstance(chosen, Combination)


def test_a_certificate_is_verified_with_its_grid(tmp_path):
    plan = planned()
    engine, *parts = private(plan)
    train(engine, *parts, steps=2)
    path = tmp_path / "run.privacy.json"
    engine.certificate().save(path)
    assert ao.verify(path).plan.grid == plan.grid
    found = json.loads(path.read_text())
    del found["sha256"]
    for grid in (0.3, "fine", 2.0**-60):
        found["plan"]["grid"] = grid
        ao.formats.save_json(path, found)
        with pytest.raises(CertificateError, match="grid"):
            ao.verify(path)


ARRIVALS = {"participation": MinSeparation(6, 3), "dataset_size": None, "epochs": None}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mechanism": BLT([0.5], [0.5], STEPS)}, "recurrence in floating point"),
        ({"order": "poisson", "mechanism": "auto"}, "another shape"),
        ({**ARRIVALS, "neighbours": "add-or-remove"}, "another shape"),
    ],
)
def test_what_is_not_covered_is_refused_with_the_reason(changes, reason, monkeypatch):
    """Before any accounting, and in a plan that was made without."""
    with monkeypatch.context() as patch:
        patch.setattr("anyorder.accounting.poisson.calibrate_poisson", None)
        with pytest.raises(PlanError, match=reason):
            planned(**changes)
    changes = {**changes, "secure": False, "epsilon": None, "noise_multiplier": 2.0}
    plain = planned(**changes)
    with pytest.raises(PlanError, match=reason):
        replace(plain, grid=2.0**-20)


@pytest.mark.parametrize("grid", [0.3, 2.0**-32, 2.0, -1.0, 2.0**-120])
def test_grids_that_are_not_exact_are_refused(grid):
    with pytest.raises(ValueError, match="grid must be"):
        replace(planned(mechanism="independent"), grid=grid)


def test_grid_of_noise_above_what_the_sampler_takes_is_refused():
    plan = ao.plan(
        order=SingleEpoch(3), batch_size=1, noise_multiplier=2.0**10, delta=1e-5, mechanism=ao.mechanism(secure=True)
    )
    assert plan.grid == 2.0**-20
    with pytest.raises(PlanError, match="noise_std"):
        replace(plan, grid=2.0**-25)


def test_a_refused_gradient_leaves_the_run_as_it_was():
    """Where a unit that is not finite is refused, nothing is drawn, recorded or released; the next batch goes on."""
    plan = planned(mechanism="independent")
    clean = train(*private(plan), steps=1)
    engine, model, optimizer, loader = private(plan, non_finite="refuse")
    before = engine.release._noise.state_dict()
    (x, y) = next(iter(loader))
    with pytest.raises(RuntimeError, match="NaN or infinite"):
        step(model, optimizer, (torch.where(torch.arange(B)[:, None] == 1, math.inf, x), y))
    assert engine.step == 0
    assert all(p.grad is None for p in model.parameters())
    assert all(np.array_equal(before[k], v) for k, v in engine.release._noise.state_dict().items())
    optimizer.zero_grad()
    step(model, optimizer, (x, y))
    assert torch.equal(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double(), clean[0])
