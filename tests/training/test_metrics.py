"""Released metrics: the mechanism of the plan, in a few more coordinates, and nothing else."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.audit import isolation
from anyorder.clipping import Adaptive, Automatic, PerGroup
from anyorder.errors import ArgumentError, CheckpointError, ModelError, PlanError, TrainingError
from anyorder.noise import NoiseSource
from anyorder.participation import EpochShuffle, MinSeparation, PoissonSampling
from anyorder.strategy import BLT, Independent, ToeplitzBanded
from anyorder.training.metrics import Measuring, _Multiples
from loops import train_to

KEY = bytes(range(32))
N, B, EPOCHS = 24, 4, 3
STEPS = EPOCHS * N // B
C, A = 0.7, 0.3
RULE = ao.Metrics({"loss": 2.0, "right": 1.0}, share=A)
STRATEGIES = {
    "independent": Independent(STEPS),
    "buffers": BLT([0.9, 0.3], [0.3, 0.2], STEPS),
    "bands": ToeplitzBanded([1.0, 0.5, 0.25], STEPS),
}


def data(weights=None, users=None):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(N, 3, generator=generator), torch.arange(N) % 2
    weights = torch.ones(N) if weights is None else weights
    return TensorDataset(x, y, weights, torch.arange(N) if users is None else users)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def planned(strategy=STRATEGIES["buffers"], *, sigma=0.5, **options):
    return ao.Plan(**{
        "participation": EpochShuffle(EPOCHS, N // B), "strategy": strategy, "clip_norm": C, "sigma": sigma,
        "workload": ao.workload.momentum(strategy.n, 0.0), "delta": 1e-5, "batch_size": B, **options,
    })  # fmt: skip


def private(plan=None, *, released=RULE, batch=B, checkpoint=None, dataset=None, **options):
    engine = ao.PrivacyEngine(plan or planned(), key=KEY, checkpoint=checkpoint)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset or data(), batch_size=batch, shuffle=True)
    return engine, *engine.make_private(model, optimizer, loader, released=released, **options)


def measured(engine, model, batch):
    """The loss of each row, measured with what is right, and returned."""
    x, y, weights, _ = batch
    outputs = model(x)
    losses = F.cross_entropy(outputs, y, reduction="none")
    engine.measure(loss=losses * weights, right=outputs.argmax(1) == y)
    return losses


def train(engine, model, optimizer, loader, until=STEPS, save_every=None):
    def backward(model, batch):
        measured(engine, model, batch).mean().backward()

    train_to(until, engine, model, optimizer, loader, backward=backward, save_every=save_every)


def gradient(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()


def noise_of(plan, size):
    source = NoiseSource(KEY).derive(plan.digest.encode())
    rows = np.stack([source.normal(r, 0, size) for r in range(plan.n)]).astype(np.float64)
    return torch.from_numpy(plan.noise_std * (plan.strategy.noising_matrix() @ rows))


def sums_of(engine, loss):
    """One step, and the vector that the noise was added to."""
    seen = []
    add_to = engine.release._noise.add_to
    engine.release._noise.add_to = lambda own, d: seen.append(torch.cat(own).double()) or add_to(own, d)
    loss().backward()
    engine.training._optimizers[0].step()
    engine.release._noise.add_to = add_to
    return seen[0]


# -- the mechanism -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "accumulate"), [("independent", 2), ("buffers", 1), ("bands", 2)])
def test_every_release_is_the_planned_mechanism_on_vectors_of_the_planned_norm(name, accumulate):
    plan = planned(STRATEGIES[name])
    engine, model, optimizer, loader = private(plan, batch=B // accumulate, accumulate=accumulate)
    params = list(model.parameters())
    size = sum(p.numel() for p in params) + 2
    noise, batches = noise_of(plan, size), (batch for _ in range(EPOCHS) for batch in loader)
    own, expected = math.sqrt(1 - A**2) * C, []
    assert engine.clip_norm == own
    for t in range(STEPS):
        vectors = []
        optimizer.zero_grad()
        for _ in range(accumulate):
            batch = next(batches)
            alone = copy.deepcopy(model.module)
            for x, y in zip(*batch[:2], strict=True):
                outputs = alone(x[None])
                loss = F.cross_entropy(outputs, y[None])
                g = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(alone.parameters()))]).double()
                s = torch.tensor([min(loss.item(), 2.0) / 2.0, float(outputs.argmax() == y)], dtype=torch.float64)
                vectors.append(torch.cat([g * min(1, own / g.norm().item()), A * C / math.sqrt(2) * s]))
            measured(engine, model, batch).mean().backward()
        vectors = torch.stack(vectors)
        assert vectors.norm(dim=1).max() <= C * (1 + 1e-12)
        optimizer.step()
        out = (vectors.sum(0) + noise[t]) / B
        torch.testing.assert_close(gradient(model), out[:-2], rtol=1e-4, atol=1e-5)
        expected.append(out[-2:] * torch.tensor([2.0, 1.0]) * math.sqrt(2) / (A * C))
    expected = torch.stack(expected)
    for i, metric in enumerate(RULE.bounds):
        assert engine.metrics.values(metric) == pytest.approx(expected[:, i].tolist(), abs=1e-4)
        assert engine.metrics.mean(metric, 5) == pytest.approx(expected[-5:, i].mean().item(), abs=1e-4)
    assert engine.certificate().plan == plan
    assert "loss, right: released with each step, for 0.3 of the clip norm" in repr(engine)


@pytest.mark.parametrize(("accumulate", "values"), [(1, 1.0), (2, 1e6), (1, math.nan)], ids=str)
def test_beside_a_norm_that_moves_every_release_is_the_mechanism_of_the_plan(accumulate, values):
    """Gradient, count and metrics share the norm out: each vector one example at a time, and where the norm goes."""
    b, q = 0.2, math.sqrt(1 - A**2)
    rule = Adaptive(quantile=0.3, learning_rate=1.5, share=b, every=N // B)
    plan = planned(STRATEGIES["independent"], sigma=0.05)
    weights = torch.ones(N).index_fill(0, torch.arange(3), values)
    engine, model, optimizer, loader = private(
        plan, batch=B // accumulate, accumulate=accumulate, rule=rule, dataset=data(weights)
    )
    size = sum(p.numel() for p in model.parameters()) + 3
    noise, batches = noise_of(plan, size), (batch for _ in range(EPOCHS) for batch in loader)
    c, count, norms, expected = C, 0.0, [], []
    for t in range(STEPS):
        vectors = []
        optimizer.zero_grad()
        assert engine.clip_norm == pytest.approx(c * q, rel=1e-5)
        for _ in range(accumulate):
            batch = next(batches)
            alone = copy.deepcopy(model.module)
            for x, y, weight in zip(*batch[:3], strict=True):
                outputs = alone(x[None])
                loss = F.cross_entropy(outputs, y[None])
                g = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(alone.parameters()))]).double()
                own = math.sqrt(1 - b**2) * q * C * g / max(g.norm().item(), c * q)
                value = (loss * weight).nan_to_num(nan=0.0).clamp(0, 2.0).item() / 2
                s = torch.tensor([value, float(outputs.argmax() == y)], dtype=torch.float64)
                above = torch.tensor([b * q * C * float(g.norm() > c * q)], dtype=torch.float64)
                vectors.append(torch.cat([own, A * C / math.sqrt(2) * s, above]))
            measured(engine, model, batch).mean().backward()
        vectors = torch.stack(vectors)
        assert vectors.norm(dim=1).max() <= C * (1 + 1e-12)
        optimizer.step()
        out = (vectors.sum(0) + noise[t]) / B
        torch.testing.assert_close(gradient(model), out[:-3] * c / (C * math.sqrt(1 - b**2)), rtol=1e-4, atol=1e-5)
        count += out[-1].item() / (b * q * C)
        expected.append(out[-3:-1] * torch.tensor([2.0, 1.0]) * math.sqrt(2) / (A * C))
        if (t + 1) % (N // B) == 0:
            c *= math.exp(1.5 * (min(max(count / (N // B), 0), 1) - 0.7))
            count, norms = 0.0, [*norms, c]
    assert len(set(norms)) == EPOCHS
    expected = torch.stack(expected)
    for i, metric in enumerate(RULE.bounds):
        assert engine.metrics.values(metric) == pytest.approx(expected[:, i].tolist(), abs=2e-4)


def test_a_norm_that_moves_leaves_room_for_the_rounding_of_its_sums():
    """From the plan's norm to the one in force and back, in float32: what one unit moves stays within its share."""
    for size in (1, 7, 4096, 2**15):
        plan = planned(batch_size=size)
        multiples = _Multiples.of(RULE, plan, norm_moves=True)
        for factor in (3.7, 0.013, 1e5 / 3):
            counts = np.linspace(0, 2 * size - 1, 50).astype(int)
            sums = torch.tensor(np.stack([counts, counts + 1]) * multiples.one) / factor
            moved = (sums.float() * factor).double().diff(dim=0).abs().max().item()
            assert moved <= A * C / math.sqrt(2)


@pytest.mark.parametrize(
    ("name", "rule", "steps"),
    [
        ("independent", None, 1),
        ("buffers", None, None),
        ("bands", None, 4),
        ("independent", Adaptive(learning_rate=3.0), 4),
    ],
)
def test_the_stated_noise_is_that_of_the_mean(name, rule, steps):
    """From the rows of C^-1; and from what comes out where all values are 0: half the noise would be seen."""
    n = 400
    strategy = {
        "independent": Independent(n),
        "buffers": BLT([0.9, 0.3], [0.3, 0.2], n),
        "bands": ToeplitzBanded([1.0, 0.5], n),
    }
    plan = planned(strategy[name], participation=EpochShuffle(n, 1), batch_size=N)
    many = ao.Metrics(dict.fromkeys(map(str, range(200)), 3.0), share=A)
    engine, model, optimizer, loader = private(plan, batch=N, released=many, rule=rule)
    for _ in range(10):
        for x, y, *_ in loader:
            optimizer.zero_grad()
            losses = F.cross_entropy(model(x), y, reduction="none")
            engine.measure(**dict.fromkeys(many.bounds, losses.detach() * 0))
            losses.mean().backward()
            optimizer.step()
    last = steps or 10
    K = strategy[name].noising_matrix()[10 - last : 10].sum(0) / last
    std = plan.noise_std * np.linalg.norm(K) * 3.0 * math.sqrt(200) / (A * C * N)
    assert engine.metrics.std("7", steps) == pytest.approx(std, rel=1e-4)
    seen = np.std([engine.metrics.mean(one, steps) for one in many.bounds])
    assert 0.8 < seen / std < 1.2


VALUES = [math.nan, math.inf, -math.inf, 1e30, -1.0, 0.0, 2.0, 1e-300]


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        *((None, value) for value in VALUES),
        *((rule, value) for rule in (Automatic(), PerGroup()) for value in VALUES[::3]),
    ],
)
def test_no_value_makes_a_vector_longer_than_the_clip_norm(rule, value):
    """One unit, whose gradient is clipped: the sum is its vector."""
    plan = planned(Independent(N), participation=EpochShuffle(1, N), batch_size=1)
    engine, model, _optimizer, loader = private(plan, batch=1, rule=rule)
    x, y, *_ = next(iter(loader))

    def loss():
        losses = 1e4 * F.cross_entropy(model(x), y, reduction="none")
        engine.measure(loss=losses.detach() * 0 + value, right=losses.detach() * 0 + value)
        return losses.mean()

    vector = sums_of(engine, loss)
    share = 1.0 if value >= 2 else 0.0
    assert vector[:-2].norm() == pytest.approx(C * math.sqrt(1 - A**2), rel=1e-4)
    assert vector[-2:] / C == pytest.approx([share * A / math.sqrt(2)] * 2, rel=1e-5)
    assert vector.norm() <= C


def test_a_unit_moves_its_own_part_of_the_sum_alone_and_at_most_the_share_and_its_rows_are_averaged():
    """Neighbours that differ in one unit's values: everything else is equal, bit for bit."""
    users = torch.arange(N) // 3

    def vector(weights):
        plan = planned(participation=MinSeparation(STEPS, b=1, k=STEPS), batch_size=N, unit="user")
        engine, model, _optimizer, loader = private(
            plan, batch=N, dataset=data(weights, users), unit=3, loss_reduction="sum"
        )
        batch = next(iter(loader))
        return sums_of(engine, lambda: measured(engine, model, batch).sum()), batch

    (plain, batch), ones = vector(None), torch.ones(N)
    rows = torch.arange(3, 6)
    with torch.no_grad():
        losses = F.cross_entropy(network()(batch[0]), batch[1], reduction="none")
    order = torch.argsort(batch[3], stable=True)
    means = losses[order].reshape(-1, 3).clamp(max=2.0).mean(1)
    assert plain[-2] == pytest.approx(A * C / math.sqrt(2) * (means / 2.0).sum().item(), rel=1e-4)
    for weight in (math.nan, 0.0, 1e30, -1.0):
        moved, *_ = vector(ones.index_fill(0, rows, weight))
        assert torch.equal(moved[:-2], plain[:-2])
        assert moved[-1] == plain[-1]
        assert 0 < abs(moved[-2] - plain[-2]) <= A * C / math.sqrt(2)


def test_sums_are_exact_so_that_rounding_does_not_carry_a_unit_over():
    """As many units as float32 cannot count in steps of one value: the difference of neighbours is one unit's part."""
    for size in (1, 7, 4096, 2**15):
        multiples = _Multiples.of(RULE, planned(batch_size=size))
        assert 2 * size * multiples.top <= 2**24
        assert multiples.top >= 127
        assert multiples.one <= A * C / math.sqrt(2)
        assert math.frexp(multiples.step)[0] == 0.5


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_equal_bit_for_bit(tmp_path):
    whole = private(planned())
    train(*whole)
    first = private(planned(), checkpoint=tmp_path / "run.pt")
    train(*first, until=7, save_every=5)
    first[0].close()
    second = private(planned(), checkpoint=tmp_path / "run.pt")
    assert second[0].metrics.steps == 5
    train(*second, save_every=5)
    for metric in RULE.bounds:
        assert second[0].metrics.values(metric) == whole[0].metrics.values(metric)
    assert all(torch.equal(p, q) for p, q in zip(whole[1].parameters(), second[1].parameters(), strict=True))
    second[0].close()
    with pytest.raises(CheckpointError, match="resume with the metrics of the run"):
        private(planned(), checkpoint=tmp_path / "run.pt", released=ao.Metrics({"loss": 1.0, "right": 1.0}, share=A))


@pytest.mark.parametrize("released", [None, RULE])
def test_a_checkpoint_of_a_run_with_or_without_metrics_is_for_no_other(tmp_path, released):
    engine, *_ = private(planned(), checkpoint=tmp_path / "run.pt", released=released)
    engine.close()
    with pytest.raises(CheckpointError):
        private(planned(), checkpoint=tmp_path / "run.pt", released=None if released else RULE)


def test_the_gradients_of_a_run_without_metrics_get_the_same_noise_in_the_same_coordinates():
    """And values do not move them."""
    engine, model, optimizer, loader = private(planned())
    train(engine, model, optimizer, loader, until=1)
    plain, other, opt, ordinary = private(planned(), released=None)
    x, y, *_ = next(iter(ordinary))
    F.cross_entropy(other(x), y).backward()
    opt.step()
    noise = noise_of(planned(), gradient(model).numel())[0] / B
    cut = gradient(model) - noise, gradient(other) - noise
    assert cut[0].norm() <= cut[1].norm() * (1 + 1e-5)
    assert cut[0] @ cut[1] > 0.9 * cut[0].norm() * cut[1].norm()
    with pytest.raises(TrainingError, match="releases no metrics"):
        plain.measure(loss=torch.zeros(B))


@pytest.mark.parametrize("micro_batch", [None, 16])
def test_rows_that_fill_a_batch_up_and_batches_of_nobody(micro_batch):
    """Under Poisson sampling; all values are at the bound, so the sum is the number of units."""
    strategy = Independent(30)
    plan = planned(
        strategy, participation=PoissonSampling(30, 0.05), batch_size=2, sigma=1e-6, neighbours="add-or-remove"
    )
    engine, model, optimizer, loader = private(plan, micro_batch=micro_batch, released=ao.Metrics({"one": 1.0}))
    for x, y, *_ in loader:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x), y, reduction="none")
        engine.measure(one=losses.detach() * 0 + 1)
        losses.mean().backward()
        optimizer.step()
        if engine.step == 30:
            break
    found = [value * 2 for value in engine.metrics.values("one")]
    assert found == pytest.approx([round(value) for value in found], abs=1e-3)
    assert len({round(value) for value in found}) > 2
    assert min(found) < 0.5


def test_a_step_that_is_left_out_releases_noise_alone():
    plan = planned(Independent(STEPS), sigma=1e-6)
    engine, model, optimizer, loader = private(plan)
    batches = iter(loader)
    next(batches)
    engine.skip()
    optimizer.step()
    assert engine.metrics.mean("loss") == pytest.approx(0.0, abs=1e-3)
    measured(engine, model, next(batches)).mean().backward()
    optimizer.step()
    assert engine.metrics.mean("loss", 1) > 0.1


def test_schedulers_read_them():
    engine, model, optimizer, loader = private(planned(Independent(STEPS)))  # no noise is fitted to rates that are read
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            measured(engine, model, batch).mean().backward()
            optimizer.step()
        scheduler.step(engine.metrics.mean("loss", steps=len(loader)))
    assert all(type(value) is ao.Public for value in engine.metrics.values("loss"))
    assert "mean of 18 steps" in repr(engine.metrics)


@pytest.mark.parametrize("factor", [1, 30])
def test_what_is_shown_of_them_opens_no_channel(factor):
    """Given the same releases, runs on neighbours show the same; a unit with more than its share would be seen."""
    rows = [(torch.randn(3, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 2)) for i in range(12)]
    plan = planned(Independent(6), participation=EpochShuffle(2, 3))

    def loop(rows, folder):
        engine, model, optimizer, loader = private(plan, dataset=rows)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                measured(engine, model, (x, y, 1.0, None)).mean().backward()
                optimizer.step()
                print(engine.metrics.mean("loss"), engine.metrics, engine)
            scheduler.step(engine.metrics.mean("right", 3))
            print(optimizer.param_groups[0]["lr"])
        return model

    with pytest.MonkeyPatch.context() as patch:
        own = Measuring._sum
        patch.setattr(Measuring, "_sum", lambda *args: factor * own(*args))
        found = isolation.check(loop, rows, rows=(3,))
    assert found.kinds == (set() if factor == 1 else {"own step"})


def test_values_of_rows_of_several_lengths_are_in_the_order_of_the_batch():
    rows = [(torch.full((2 + i % 7,), 1.0), torch.tensor(i)) for i in range(N)]
    plan = planned(Independent(STEPS), sigma=1e-6)
    weight = torch.tensor([1.0])
    engine = ao.PrivacyEngine(plan, key=KEY)
    model = Summed()
    loader = DataLoader(rows, batch_size=B, shuffle=True)
    model, optimizer, loader = engine.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.0), loader, released=ao.Metrics({"off": 1.0}), pad_to=(4, 8)
    )
    for x, i in loader:
        optimizer.zero_grad()
        sums = model(x)
        engine.measure(off=(sums * weight - (2 + i % 7)).abs())
        sums.mean().backward()
        optimizer.step()
    assert all(abs(value) < 1e-3 for value in engine.metrics.values("off"))


class Summed(nn.Module):
    """The sum of what is there."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.one.weight)

    def forward(self, x):
        return self.one(x.sum(1, keepdim=True)).squeeze(1)


# -- what is refused ---------------------------------------------------------------------------------------------------


def coupled(losses, outputs, other):
    return {
        "of all": losses - losses.mean(),
        "sorted": losses.sort().values,
        "rolled": losses.roll(1),
        "flipped": losses.flip(0),
        "a total": losses.sum().expand(B),
        "one number": losses.mean(),
        "of no batch": torch.ones(B),
        "numbers": losses.tolist(),
        "two each": outputs,
        "of another batch": other.float(),
        "too few": losses[:2],
        "by another way": torch.from_numpy(losses.detach().numpy().copy()),
    }


NAMES = list(coupled(torch.ones(B), torch.ones(B, 2), torch.ones(B)))


@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_not_known_to_be_of_their_rows_are_refused(name):
    engine, model, _, loader = private(released=ao.Metrics({"loss": 2.0}))
    batches = iter(loader)
    (_, other, *_), (x, y, *_) = next(batches), next(batches)
    outputs = model(x)
    losses = F.cross_entropy(outputs, y, reduction="none")
    with pytest.raises((ModelError, ArgumentError), match="loss"):
        engine.measure(loss=coupled(losses, outputs, other)[name])
    engine.measure(loss=losses)


def test_each_batch_is_measured_once_at_its_time():
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    x, y, *_ = next(batches)
    with pytest.raises(TrainingError, match=r"after model\(x\)"):
        engine.measure(loss=torch.zeros(B), right=torch.zeros(B))
    losses = F.cross_entropy(model(x), y, reduction="none")
    with pytest.raises(ArgumentError, match="loss, right"):
        engine.measure(loss=losses)
    with pytest.raises(TrainingError, match="nothing was measured"):
        losses.mean().backward(retain_graph=True)
    with pytest.raises(TrainingError, match="0 steps"):
        engine.metrics.mean("loss")
    batch = next(batches)
    losses = measured(engine, model, batch)
    optimizer.zero_grad()
    losses.mean().backward()
    with pytest.raises(TrainingError, match=r"after model\(x\)"):
        engine.measure(loss=losses, right=losses)
    optimizer.step()
    with pytest.raises(ArgumentError, match="loss, right"):
        engine.metrics.mean("other")
    with pytest.raises(TrainingError, match="1 steps"):
        engine.metrics.mean("loss", 2)


def test_a_step_that_was_broken_off_before_its_metrics_is_not_gone_on_from():
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    measured(engine, model, next(batches)).mean().backward()
    engine.training._measuring.record = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    del engine.training._measuring.record
    optimizer.zero_grad()
    measured(engine, model, next(batches)).mean().backward()
    with pytest.raises(TrainingError, match="metrics of step 0 are missing"):
        optimizer.step()


def test_where_they_are_not_for():
    with pytest.raises(PlanError, match="secure"):
        private(planned(grid=2.0**-20))
    with pytest.raises(ArgumentError, match=r"ao\.Metrics"):
        private(released={"loss": 4.0})
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Flatten())
    with pytest.raises(ArgumentError, match="tables"):
        ao.PrivacyEngine(planned(Independent(STEPS)), key=KEY).make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(), batch_size=B), released=RULE
        )
    for bounds in ({}, {"loss": 0.0}, {"loss": math.inf}, {1: 1.0}, ["loss"]):
        with pytest.raises(ArgumentError, match="bound"):
            ao.Metrics(bounds)
    with pytest.raises(ArgumentError, match="share"):
        ao.Metrics({"loss": 1.0}, share=1.0)
