"""The clip norm that follows a quantile: the mechanism of the plan, in one more coordinate, and nothing else."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.clipping import Adaptive, Automatic, Flat
from anyorder.clipping.norms import ClipRule
from anyorder.errors import ArgumentError, CheckpointError, PlanError, TrainingError
from anyorder.noise import NoiseSource
from anyorder.participation import EpochShuffle, MinSeparation, PoissonSampling
from anyorder.strategy import BLT, Banded, Independent, SquareRoot, Tree
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.restarted_blt import RestartedBLT
from loops import backward, train_to

KEY = bytes(range(32))
N, B, EPOCHS = 24, 4, 3
EPOCH = N // B
STEPS = EPOCHS * EPOCH
RESTARTED = RestartedBLT([[0.9, 0.3]] * EPOCHS, [[0.3, 0.2]] * EPOCHS, [0.5] * EPOCHS, [1.0, 0.9, 0.8], STEPS, EPOCH)
STRATEGIES = {
    "restarted": (RESTARTED, None),
    "every epoch": (Independent(STEPS), EPOCH),
    "every step": (Independent(STEPS), None),
    "rescaled": (Rescaled(RESTARTED, np.linspace(1, 2, STEPS)), EPOCH),
}


def data(shift=0.0):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, 3, generator=generator) + shift, torch.arange(N) % 2)


def network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 2))


def planned(strategy=RESTARTED, *, sigma=0.05, clip_norm=0.7, batch_size=B):
    """A plan whose epsilon nobody asks for."""
    return ao.Plan(
        participation=EpochShuffle(EPOCHS, EPOCH), strategy=strategy, workload=ao.workload.momentum(strategy.n, 0.5),
        clip_norm=clip_norm, sigma=sigma, delta=1e-5, batch_size=batch_size,
    )  # fmt: skip


def private(plan=None, rule=None, *, dropout=0.0, checkpoint=None, batch=B, shift=0.0, lr=0.1, **options):
    engine = ao.PrivacyEngine(plan or planned(), key=KEY, checkpoint=checkpoint)
    model = network(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    loader = DataLoader(data(shift), batch_size=batch, shuffle=True)
    return engine, *engine.make_private(model, optimizer, loader, rule=rule or Adaptive(), **options)


def train(engine, model, optimizer, loader, until=STEPS, save_every=None):
    train_to(until, engine, model, optimizer, loader, save_every=save_every)


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def per_example(model, batch):
    """(b, d) gradients, one example at a time."""
    rows = []
    for x, y in zip(*batch, strict=True):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows).double()


# -- the mechanism -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_release_is_the_planned_mechanism_on_vectors_of_the_planned_norm(name, accumulate):
    """Gradients, and the trajectory of clip norms, by the rule's equations, one example at a time."""
    strategy, every = STRATEGIES[name]
    rule = Adaptive(quantile=0.3, learning_rate=1.5, share=0.2, every=every)
    plan, a, C = planned(strategy), rule.share, 0.7
    engine, model, optimizer, loader = private(plan, rule, batch=B // accumulate, accumulate=accumulate)
    size = weights(model).numel() + 1
    source = NoiseSource(KEY).derive(plan.digest.encode())
    rows = np.stack([source.normal(r, 0, size) for r in range(STEPS)]).astype(np.float64)
    noise = torch.from_numpy(plan.noise_std * (strategy.noising_matrix() @ rows))
    period = every or strategy.restart_period
    c, S, moves = C, 0.0, []
    batches = _endless(loader)
    for t in range(STEPS):
        vectors = []
        optimizer.zero_grad()
        for _ in range(accumulate):
            batch = next(batches)
            g = per_example(copy.deepcopy(model.module), batch)
            norms = g.norm(dim=1, keepdim=True)
            gradient_part = math.sqrt(1 - a**2) * C * g / norms.clamp(min=c)
            vectors.append(torch.cat([gradient_part, a * C * (norms > c).double()], dim=1))
            backward(model, batch)
        vectors = torch.cat(vectors)
        assert vectors.norm(dim=1).max() <= C * (1 + 1e-12)
        assert engine.clip_norm == pytest.approx(c, rel=1e-5)
        optimizer.step()
        released = (vectors.sum(0) + noise[t]) / B
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
        expected = released[:-1] * c / (C * math.sqrt(1 - a**2))
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
        S += released[-1].item()
        if (t + 1) % period == 0:
            above = S / (a * C * period)
            moves.append(above)
            c *= math.exp(1.5 * (min(max(above, 0), 1) - 0.7))
            S = 0.0
    assert engine.clip_norm == pytest.approx(c, rel=1e-5)
    assert len(set(moves)) > 1


def _endless(loader):
    while True:
        yield from loader


def stepped(engine, model, optimizer, loss):
    """One step of a loss, and the vectors that the noise was added to, and its divisor."""
    seen = []
    add_to = engine.release._noise.add_to
    engine.release._noise.add_to = lambda own, divisor: seen.append((torch.cat(own), divisor)) or add_to(own, divisor)
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    del engine.release._noise.add_to
    return seen[0]


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("clip_norm", [1e-3, 0.7, 300.0])
def test_a_unit_moves_the_noised_sum_by_at_most_the_planned_norm(clip_norm, chunk_size):
    """Whatever the current norm is, and for gradients of any size: of none, at the border, far beyond it."""
    plan = planned(Independent(STEPS), clip_norm=clip_norm, batch_size=1)
    plan = dataclasses.replace(plan, participation=MinSeparation(STEPS, STEPS), unit="user")
    generator = torch.Generator().manual_seed(0)
    v = torch.nn.functional.normalize(torch.randn(1, 501, generator=generator, dtype=torch.float64), dim=1)
    for current in (clip_norm * 2.0**-20, clip_norm / 3, clip_norm, clip_norm * 1.7e5):
        for length in (0.0, 1e-6, 1 - 1e-7, 1.0, 1 + 1e-7, 50.0, 1e20):
            x = (v * length * current).float()
            engine = ao.PrivacyEngine(plan, key=KEY)
            model = nn.Linear(501, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            loader = DataLoader(TensorDataset(x), batch_size=1)
            model, optimizer, loader = engine.make_private(
                model, optimizer, loader, rule=Adaptive(share=0.3), unit=lambda batch: [0], chunk_size=chunk_size
            )
            next(iter(loader))
            engine.release._norm.current = current
            own, divisor = stepped(engine, model, optimizer, lambda model=model, x=x: model(x).sum())
            assert own.double().norm().item() <= clip_norm
            if abs(length - 1) > 1e-5:
                assert own[-1].item() == pytest.approx(0.3 * clip_norm * (length > 1), rel=1e-5)
            if length > 1.1:
                assert own.double().norm().item() == pytest.approx(clip_norm, rel=1e-5)
            assert divisor == pytest.approx(clip_norm * math.sqrt(1 - 0.3**2) / current, rel=1e-12)


def test_noise_of_gradient_and_count_has_the_planned_size():
    """A loss of zero shows the bare noise; half of it in either place would fail here, by many standard errors."""
    steps, features = 400, 2000
    plan = ao.Plan(
        participation=PoissonSampling(steps, 0.5), strategy=Independent(steps), workload=ao.workload.prefix_sum(steps),
        clip_norm=2.0, sigma=1.3, delta=1e-5, batch_size=5, neighbours="add-or-remove",
    )  # fmt: skip
    engine = ao.PrivacyEngine(plan)
    model = nn.Linear(features, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(torch.zeros(1, features)), batch_size=1)
    model, optimizer, loader = engine.make_private(model, optimizer, loader, rule=Adaptive(share=0.6, every=2 * steps))
    counts, noise = [], None
    while engine.step < steps:
        for (x,) in loader:
            before = engine.release._norm._sum
            optimizer.zero_grad()
            (model(x) * 0).sum().backward()
            optimizer.step()
            # in units of c, of which the gradient's share is 0.8 and the count's 0.6
            counts.append((engine.release._norm._sum - before) * 5 * 0.8)
            noise = next(model.parameters()).grad * 5 * 0.8
    assert engine.step == steps
    assert np.std(counts) == pytest.approx(plan.noise_std, rel=5 / math.sqrt(2 * steps))
    assert np.mean(counts) == pytest.approx(0.0, abs=5 * plan.noise_std / math.sqrt(steps))
    assert noise.std().item() == pytest.approx(plan.noise_std, rel=5 / math.sqrt(2 * features))


@pytest.mark.parametrize(("quantile", "start", "sigma"), [(0.2, 10.0, 1.0), (0.9, 0.1, 1e-9)])
def test_converges_to_the_quantile(quantile, start, sigma):
    """Norms 1.00, 1.01, .., 2.99 in place of 1: the quantiles are 1 + 2 q."""
    size, batch, epochs = 200, 20, 30
    steps = epochs * size // batch
    participation = EpochShuffle(epochs, size // batch)
    if sigma < 1:
        strategy = Independent(steps)
    else:
        strategy = RestartedBLT([[0.9]] * epochs, [[0.2]] * epochs, [1.0] * epochs, [1.0] * epochs, steps, 10)
    plan = ao.Plan(
        participation=participation, strategy=strategy, workload=ao.workload.prefix_sum(steps), clip_norm=start,
        sigma=sigma, delta=1e-5, batch_size=batch,
    )  # fmt: skip
    engine = ao.PrivacyEngine(plan, key=KEY)
    model = nn.Linear(2, 1, bias=False)
    x = (1 + torch.arange(size) / 100)[:, None] * torch.tensor([[0.6, 0.8]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(x), batch_size=batch, shuffle=True)
    rule = Adaptive(quantile=quantile, share=0.5, every=size // batch)
    model, optimizer, loader = engine.make_private(model, optimizer, loader, rule=rule)
    visited = []
    for _ in range(epochs):
        visited.append(engine.clip_norm)
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
    assert visited[0] == start
    tolerance = 0.02 if sigma < 1 else 0.4
    assert np.mean(visited[-8:]) == pytest.approx(1 + 2 * quantile, abs=tolerance)


def test_clip_norm_stays_within_bounds_where_all_gradients_are_zero():
    """Else it would shrink to 0, and a factor of 1 / 0 make NaN of a gradient of zeros."""
    plan = planned(Independent(STEPS), sigma=1e-9)
    engine, model, optimizer, loader = private(plan, Adaptive(learning_rate=10.0), lr=0.0)
    norms = set()
    for _ in range(EPOCHS):
        for x, _ in loader:
            optimizer.zero_grad()
            (model(x) * 0).sum().backward()
            optimizer.step()
            assert all(p.grad.isfinite().all() for p in model.parameters())
            norms.add(engine.clip_norm)
    assert min(norms) == engine.clip_norm == 0.7 * 2.0**-20


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["restarted", "every epoch"])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path, name):
    """Stops in the middle of periods, and between saves: the lost steps are replayed under the journal."""
    strategy, every = STRATEGIES[name]
    options = {"plan": planned(strategy, sigma=0.3), "rule": Adaptive(every=every), "dropout": 0.5}
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    whole = private(**options, checkpoint=tmp_path / "a" / "run.ckpt")
    train(*whole, save_every=4)
    norms = set()
    for stop in (2, 7, 11, 18):
        run = private(**options, checkpoint=tmp_path / "b" / "run.ckpt")
        train(*run, until=stop, save_every=4)
        norms.add(run[0].clip_norm)
        run[0].close()
    assert len(norms) > 2
    assert run[0].clip_norm == whole[0].clip_norm
    assert torch.equal(weights(run[1]), weights(whole[1]))


def test_checkpoint_of_another_rule_is_refused(tmp_path):
    for name, first, others in [
        ("a", Adaptive(), [Adaptive(share=0.2), Adaptive(every=2 * EPOCH), Automatic()]),
        ("b", Automatic(), [Adaptive()]),
    ]:
        (tmp_path / name).mkdir()
        run = private(rule=first, checkpoint=tmp_path / name / "run.ckpt")
        train(*run, until=4, save_every=4)
        run[0].close()
        for rule in others:
            with pytest.raises(CheckpointError, match="written under rule="):
                private(rule=rule, checkpoint=tmp_path / name / "run.ckpt")
        assert private(rule=first, checkpoint=tmp_path / name / "run.ckpt")[0].step == 4


@pytest.mark.parametrize(
    ("plan", "rule", "match"),
    [
        (planned(Tree(STEPS, "online", restarts=(6, 12), completion=True)), Adaptive(), "does not.*restarted_blt"),
        (planned(Tree(STEPS)), Adaptive(), "where the noise restarts"),
        (planned(BLT([0.9], [0.3], STEPS)), Adaptive(), "where the noise restarts"),
        (planned(Banded(np.eye(STEPS) + np.eye(STEPS, k=-1))), Adaptive(), "where the noise restarts"),
        (planned(SquareRoot(STEPS)), Adaptive(every=STEPS), "where the noise restarts"),
        (planned(Rescaled(SquareRoot(STEPS), np.ones(STEPS))), Adaptive(), "where the noise restarts"),
        (planned(RESTARTED), Adaptive(every=EPOCH + 1), "multiple of the 6 steps"),
        (planned(RESTARTED), Adaptive(every=EPOCH // 2), "multiple of the 6 steps"),
        (dataclasses.replace(planned(Independent(STEPS)), grid=2.0**-12), Adaptive(), "secure mode"),
        (planned(clip_norm=1e-6), Adaptive(), "from 7.63e-06 to 1.15e.18, .* got 1e-06"),
        (planned(clip_norm=1e19), Adaptive(), "got 1e.19"),
    ],
)
def test_what_is_not_covered_is_refused_with_nothing_changed(plan, rule, match):
    engine, model = ao.PrivacyEngine(plan, key=KEY), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    before = weights(model)
    with pytest.raises(PlanError, match=match):
        engine.make_private(model, optimizer, DataLoader(data(), batch_size=B, shuffle=True), rule=rule)
    assert torch.equal(weights(model), before)
    assert engine.clip_norm == plan.clip_norm
    assert not optimizer._optimizer_step_pre_hooks
    engine.make_private(model, optimizer, DataLoader(data(), batch_size=B, shuffle=True))


class Counts(ClipRule):
    """A rule with a coordinate that no plan knows of."""

    def describe(self):
        return "counts"

    def factors(self, squares, clip_norm):
        return {name: 0.5 * factor for name, factor in Flat().factors(squares, clip_norm).items()}

    def coordinates(self, squares, clip_norm):
        return {"units": torch.full_like(next(iter(squares.values())), 0.1 * clip_norm)}


def test_coordinates_of_another_rule_are_refused():
    """Before anything is bound to the engine."""
    with pytest.raises(ArgumentError, match="coordinates of its own: only Adaptive"):
        private(rule=Counts())


def test_failed_step_changes_nothing():
    engine, model, optimizer, loader = private()
    train(engine, model, optimizer, loader, until=2)
    before = engine.release._norm.state_dict()
    batches = iter(loader)
    x, y = next(batches)
    outputs = model(x)
    with pytest.raises(TrainingError, match="create_graph"):
        nn.functional.cross_entropy(outputs, y).backward(create_graph=True)
    backward(model, next(batches))
    optimizer.zero_grad()
    assert engine.release._norm.state_dict() == before
    backward(model, next(batches))
    optimizer.step()
    assert engine.release._norm.state_dict() != before


def test_a_step_broken_off_before_its_count_is_the_last(monkeypatch):
    engine, model, optimizer, loader = private()
    train(engine, model, optimizer, loader, until=2)
    batches = iter(loader)
    backward(model, next(batches))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.release._norm, "record", interrupted)
        optimizer.step()
    optimizer.zero_grad()
    backward(model, next(batches))
    with pytest.raises(TrainingError, match="count of step 2 is missing"):
        optimizer.step()


def test_clip_norm_of_other_rules_is_the_plans():
    engine, model, optimizer, loader = private(rule=Automatic())
    assert ao.PrivacyEngine(planned()).clip_norm == 0.7
    train(engine, model, optimizer, loader)
    assert engine.clip_norm == 0.7
    assert engine.certificate().plan == engine.plan
