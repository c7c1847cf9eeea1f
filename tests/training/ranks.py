"""What the ranks of `test_distributed.py` do: started as by torchrun, a process for each rank, over gloo on the CPU."""

import dataclasses
import faulthandler
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import anyorder as ao
from anyorder.clipping import Adaptive
from anyorder.errors import (
    CheckpointError,
    LoaderError,
    ModelError,
    NonFiniteError,
    OptimizerWarning,
    ParticipationError,
    PlanError,
    TrainingError,
)
from anyorder.participation import MinSeparation, PoissonSampling
from anyorder.strategy import BLT, Independent, Tree
from anyorder.strategy.restarted_blt import RestartedBLT

KEY = bytes(range(32))
N, B, EPOCHS = 24, 4, 2  # B examples in a step, on all ranks together
STEPS = EPOCHS * N // B
STRATEGIES = {
    "tree": Tree(STEPS, "online"),
    "blt": BLT([0.9, 0.5], [0.3, 0.2], STEPS),  # keeps a state
    "adaptive": RestartedBLT([[0.9]] * EPOCHS, [[0.3]] * EPOCHS, [0.5] * EPOCHS, [1.0] * EPOCHS, STEPS, N // B),
    "grid": Tree(STEPS),  # in exact integers
}
NOISE = [("tree", False), ("blt", False), ("adaptive", True), ("grid", False), ("grid", True)]  # sharded where true
SAVED = {"plain": ("blt", False), "grid": ("grid", False), "adaptive": ("adaptive", True)}


def dataset():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, 4, 3, generator=generator), torch.arange(N) % 2)


class Network(nn.Module):
    """An odd number of coordinates, a frozen parameter, a scalar, a buffer, and a recurrent layer."""

    def __init__(self, scalar):
        super().__init__()
        self.memory = nn.LSTM(3, 3, batch_first=True)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.last = nn.Sequential(nn.Tanh(), nn.Linear(3, 2))
        self.register_buffer("shift", torch.full((3,), 0.1))
        self.register_buffer("coins", torch.rand(2, 3).t() > 0.5)  # not contiguous, not of floats
        self.gain = nn.Parameter(torch.ones(1, 3))  # one rank has all of its rows
        self.factor = 1.0
        self.scale = nn.Parameter(torch.tensor(1.0)) if scalar else None  # FSDP2 has no scalars

    def forward(self, x):
        out = self.factor * self.last(self.gain * self.frozen(self.memory(x)[0][:, -1]) + self.shift)
        return out if self.scale is None else out * self.scale


def start(checkpoint=None, *, kind="tree", fsdp=False, scalar=False, seed=0, accumulate=1, **options):
    """A run over all ranks of the process group; over one process where there is none."""
    plan = ao.plan(
        dataset_size=N, batch_size=B, epochs=EPOCHS, epsilon=8, delta=1e-5, mechanism=STRATEGIES[kind], clip_norm=0.3
    )
    if kind == "grid":
        plan = dataclasses.replace(plan, grid=2.0**-10)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(seed)
    model = Network(scalar)
    if fsdp:
        shard(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    rank = dist.get_rank() if dist.is_initialized() else 0
    sampler = DistributedSampler(dataset(), ranks, rank, shuffle=True, seed=3)
    engine = ao.PrivacyEngine(plan, checkpoint=checkpoint, key=KEY)
    loader = DataLoader(dataset(), batch_size=B // ranks // accumulate, sampler=sampler)
    rule = Adaptive(share=0.3) if kind == "adaptive" else None
    with warnings.catch_warnings():  # Adam is here for its state, of which each rank has a part
        warnings.simplefilter("ignore", OptimizerWarning)
        return engine, *engine.make_private(model, optimizer, loader, accumulate=accumulate, rule=rule, **options)


def shard(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.memory)
    fully_shard(model)


def shard_by_columns(model):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def vector(tensors):
    return torch.cat([full(t).detach().reshape(-1) for t in tensors])


def weights(model):
    return vector(model.module.state_dict().values())


def train(engine, model, optimizer, loader, until=STEPS, *, loss=1.0, save_every=0):
    """The gradients of every step, (steps, d)."""
    gradients = []
    while engine.step < until:
        for x, y in loader:
            if engine.training._waiting.batches == 0:
                optimizer.zero_grad()
            (loss * nn.functional.cross_entropy(model(x), y)).backward()
            if engine.training._waiting.batches < engine.training._options.accumulate:
                continue
            optimizer.step()
            gradients.append(vector(p.grad for p in model.parameters() if p.requires_grad))
            if save_every and engine.step % save_every == 0:
                engine.save({"by": "rank"})
            if engine.step == until:
                break
    return torch.stack(gradients)


def units_of(engine):
    return [list(units) for units in engine.ledger.history()]


def outcome(run, gradients):
    engine, model, _, _ = run
    return {
        "gradients": gradients,
        "weights": weights(model),
        "ledger": engine.ledger.digest(),
        "clip_norm": engine.clip_norm,
    }


# -- scenarios: each runs on all ranks ---------------------------------------------------------------------------------


def whole_runs(folder):
    """Runs whose results the test compares with those of one process."""
    results = {}
    for name, options in {
        "plain": {"scalar": True, "seed": dist.get_rank()},  # the first rank's parameters count
        "sharded": {"fsdp": True},
        "accumulated": {"accumulate": 2},
        "adaptive": {"kind": "adaptive"},
    }.items():
        run = start(**options)
        results[name] = outcome(run, train(*run, until=STEPS if name == "plain" else 8))
    for kind, fsdp in NOISE:
        run = start(kind=kind, fsdp=fsdp)
        results[f"noise {kind} {fsdp}"] = outcome(run, train(*run, loss=0.0))
        results[f"ranges {fsdp}"] = run[0].training._shards.ranges
    return results


def saved_runs(folder):
    """Checkpoints at step 4, of two ranks."""
    for name, (kind, fsdp) in SAVED.items():
        run = start(folder / name / "run.ckpt", kind=kind, fsdp=fsdp)
        train(*run, until=4, loss=0.0, save_every=4)
        run[0].close()


def units_run(participation, ids):
    """A run whose units on this rank are ids[rank], batch by batch."""
    plan = ao.plan(order=participation, batch_size=4, epsilon=8, delta=1e-5, mechanism="tree", unit="user")
    mine = iter(ids[dist.get_rank()])
    sampler = DistributedSampler(dataset(), shuffle=False)
    loader = DataLoader(dataset(), batch_size=2, sampler=sampler)
    engine, model = ao.PrivacyEngine(plan, key=KEY), Network(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return engine, *engine.make_private(model, optimizer, loader, unit=lambda batch: next(mine))


def backward(model, batch, factor=1.0):
    nn.functional.cross_entropy(model(batch[0] * factor), batch[1]).backward()


def refused_with_nothing_changed(run, kind, match, call):
    engine, model, _, _ = run
    before = weights(model), engine.step
    with pytest.raises(kind, match=match):
        call()
    assert torch.equal(weights(model), before[0])
    assert engine.step == before[1]


def unit_on_two_ranks(folder):
    run = units_run(MinSeparation(4, 2, 2), [[[0, 1], [0, 1]], [[1, 2], [2, 3]]])
    _, model, optimizer, loader = run
    batches = iter(loader)
    batch = next(batches)
    refused_with_nothing_changed(run, TrainingError, "a unit is on two ranks", lambda: model(batch[0]))
    backward(model, next(batches))
    optimizer.step()
    assert units_of(run[0]) == [[0, 1, 2, 3]]


def unit_that_was_on_another_rank(folder):
    run = units_run(MinSeparation(4, 2, 2), [[["a", "b"], ["e", "f"]], [["c", "d"], ["a", "g"]]])
    _, model, optimizer, loader = run
    batches = iter(loader)
    backward(model, next(batches))
    optimizer.step()
    batch = next(batches)
    refused_with_nothing_changed(run, ParticipationError, "at least b=2 steps", lambda: model(batch[0]))


def unit_in_micro_batches_of_two_ranks(folder):
    run = start(accumulate=2)
    engine, model, _, loader = run
    batches = iter(loader)
    backward(model, next(batches))
    batch = next(batches)
    if dist.get_rank() == 1:
        engine.loader.identity.newest().units[0] = units_of_first(engine)
    refused_with_nothing_changed(run, TrainingError, "two micro-batches", lambda: model(batch[0]))


def units_of_first(engine):
    return engine.training._waiting.units[0]


def nan_on_one_rank(folder):
    """A rank whose units are not finite adds zero, and no other rank hears of it; or all of them refuse."""
    released = []
    for loss_weight, factor in ((1.0, float("nan")), (0.0, 1.0)):
        loss_weight, factor = (loss_weight, factor) if dist.get_rank() == 1 else (1.0, 1.0)
        engine, model, optimizer, loader = start()
        x, y = next(iter(loader))
        (loss_weight * nn.functional.cross_entropy(model(x * factor), y)).backward()
        optimizer.step()
        assert engine.step == 1
        released.append(weights(model))
    assert torch.equal(*released)

    run = start(non_finite="refuse")
    engine, model, optimizer, loader = run
    batches = iter(loader)
    factor = float("nan") if dist.get_rank() == 1 else 1.0
    batch = next(batches)
    refused_with_nothing_changed(run, NonFiniteError, "NaN or infinite", lambda: backward(model, batch, factor))
    refused_with_nothing_changed(run, TrainingError, "without a backward pass", optimizer.step)
    optimizer.zero_grad()
    backward(model, next(batches))
    optimizer.step()
    assert engine.step == 1


def second_backward(folder):
    _, model, _, loader = start()
    x, y = next(iter(loader))
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(TrainingError, match="second time"):
        loss.backward()


def error_on_one_rank(folder):
    run = start()
    _, model, optimizer, loader = run
    batches = iter(loader)
    batch = next(batches)
    backward(model, batch)
    optimizer.step()
    if dist.get_rank() == 0:
        batch = next(batches)  # rank 1 goes on with the batch that it has used
    match = "rank 1: this batch" if dist.get_rank() == 0 else "this batch was already used"
    refused_with_nothing_changed(run, TrainingError, match, lambda: model(batch[0]))


def ranks_out_of_step(folder):
    run = start(folder / "apart.ckpt")
    engine, model, optimizer, loader = run
    backward(model, next(iter(loader)))
    match = r"rank 0 is at optimizer.step\(\) of step 0, rank 1 is at engine.save"
    call = optimizer.step if dist.get_rank() == 0 else engine.save
    if dist.get_rank() == 1:
        engine.training._discard()
    refused_with_nothing_changed(run, TrainingError, match, call)


def save_that_fails(folder):
    with pytest.raises(CheckpointError, match="rank 0: the folder" if dist.get_rank() else "^the folder"):
        start(folder / "missing" / "run.ckpt")
    run = start(folder / "run.ckpt")
    if dist.get_rank() == 0:
        (folder / "run.ckpt").write_text("something else")
    match = "rank 0: .* is not a checkpoint of this run" if dist.get_rank() else "is not a checkpoint of this run"
    refused_with_nothing_changed(run, CheckpointError, match, run[0].save)


def refused_set_ups(folder):
    rank = dist.get_rank()

    def set_up(loader, model=None, plan=None, **options):
        plan = plan or ao.plan(dataset_size=N, batch_size=4, epochs=2, epsilon=8, delta=1e-5, mechanism="tree")
        model = model or nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return ao.PrivacyEngine(plan).make_private(model, optimizer, loader, **options)

    data = dataset()
    dealt = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=True))
    odd = TensorDataset(torch.zeros(N - 1, 3))
    with pytest.raises(ModelError, match=r"DistributedDataParallel. averages gradients"):
        set_up(dealt, DistributedDataParallel(nn.Linear(3, 2)))
    sharded = nn.Linear(4, 4)
    shard_by_columns(sharded)
    with pytest.raises(ModelError, match=r"weight is placed as .Shard.dim=1"):
        set_up(dealt, sharded)
    with pytest.raises(LoaderError, match="repeats 1 example"):
        set_up(DataLoader(odd, batch_size=2, sampler=DistributedSampler(odd)))
    with pytest.raises(LoaderError, match="each of the 2 ranks would give out the whole data set"):
        set_up(DataLoader(data, batch_size=2, shuffle=True))
    with pytest.raises(LoaderError, match="out to 3 ranks, and 2 take part"):
        set_up(DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 3, rank)))
    with pytest.raises(LoaderError, match="gives 4 epochs of 3 steps"):
        set_up(DataLoader(data, batch_size=4, sampler=DistributedSampler(data)))
    own = ao.plan(dataset_size=N, batch_size=4, epochs=2, epsilon=8 + rank, delta=1e-5, mechanism="tree")
    with pytest.raises(PlanError, match="different plans"):
        set_up(dealt, plan=own)
    with pytest.raises(PlanError, match="different options"):
        set_up(dealt, loss_reduction=("mean", "sum")[rank])
    mine = torch.randperm(N, generator=torch.Generator().manual_seed(rank))
    shuffled = TensorDataset(*(tensor[mine] for tensor in data.tensors))  # on each rank by itself
    with pytest.raises(LoaderError, match="the ranks' data sets are not the same"):
        set_up(DataLoader(shuffled, batch_size=2, sampler=DistributedSampler(shuffled)))
    engines = [set_up(dealt)[0]._private_forward.__self__ for _ in range(2)]
    keys = [None, None]
    dist.all_gather_object(keys, [engine.release._key for engine in engines])
    assert keys[0] == keys[1]  # one key for all ranks,
    assert keys[0][0] != keys[0][1]  # and another one for each run


def poisson(folder):
    run = poisson_run()
    train(*run, until=4)
    return outcome(run, torch.zeros(1))


def poisson_run():
    plan = ao.Plan(  # its epsilon, which takes seconds, is not asked for
        participation=PoissonSampling(4, 0.25), strategy=Independent(4), workload=ao.workload.prefix_sum(4),
        clip_norm=1.0, sigma=1.0, delta=1e-5, batch_size=6, neighbours="add-or-remove",
    )  # fmt: skip
    torch.manual_seed(0)
    engine, model = ao.PrivacyEngine(plan, key=KEY), Network(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return engine, *engine.make_private(model, optimizer, DataLoader(dataset(), batch_size=6))


def evaluation_sees_the_step(folder):
    """FSDP holds whole weights after an evaluation; those of before a step must not be used after it."""
    _, model, optimizer, loader = start(fsdp=True)
    x = dataset().tensors[0][:3]
    batches = iter(loader)
    for _ in range(2):
        model.train()
        backward(model, next(batches))
        optimizer.step()
        model.eval()
        with torch.no_grad():
            outputs = model(x)
    plain = Network(False)
    plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    torch.testing.assert_close(outputs, plain(x))
    model.module.factor, plain.factor = 2.0, 2.0
    model.module.shift = plain.shift = plain.shift + 1.0
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for part, each in zip((model, plain), inputs, strict=True):
        part(each).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


SCENARIOS = [
    whole_runs, saved_runs, unit_on_two_ranks, unit_that_was_on_another_rank, unit_in_micro_batches_of_two_ranks,
    nan_on_one_rank, second_backward, error_on_one_rank, ranks_out_of_step, save_that_fails, refused_set_ups, poisson,
    evaluation_sees_the_step,
]  # fmt: skip


def killed(folder):
    """Rank 1 dies in step 6; steps 4 and 5 were released after the checkpoint."""
    run = start(folder / "killed" / "run.ckpt", scalar=True)
    train(*run, until=6, save_every=4)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(*run)


def resumed(folder):
    """Go on from checkpoints: the killed run; runs of two ranks that one process went on with."""
    run = start(folder / "killed" / "run.ckpt", scalar=True)
    assert run[0].extra == {"by": "rank"}
    results = {"killed": (run[0].step, outcome(run, train(*run)))}
    for name, (kind, fsdp) in SAVED.items():  # what was sharded is resumed plain, and the other way round
        run = start(folder / name / "run.ckpt", kind=kind, fsdp=not fsdp)
        assert run[0].extra == {"by": "rank"}
        results[name] = run[0].step, outcome(run, train(*run, loss=0.0))
    return results


def main(scenarios, folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for scenario in scenarios:
        result = scenario(folder)
        torch.save(result, folder / f"{scenario.__name__}.{dist.get_rank()}")
    dist.barrier()
    sys.stderr.flush()
    # Without the interpreter's own end: gloo's threads that still hold a tensor then would abort the process
    # (pytorch/pytorch, issue 190489), which says nothing of the scenarios.
    os._exit(0)


if __name__ == "__main__":
    faulthandler.enable()
    main({"first": [*SCENARIOS, killed], "second": [resumed]}[sys.argv[1]], Path(sys.argv[2]))
