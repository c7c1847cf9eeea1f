"""A table whose noise is made row by row, when a row is read: the dense run's mechanism, shown after a flush."""

import functools

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.utils.data import DataLoader

import anyorder as ao
from anyorder.clipping import Adaptive, per_example, program
from anyorder.clipping.coupling import unwatched
from anyorder.errors import AnyorderError, ArgumentError, CheckpointError, PlanError, TrainingError
from anyorder.strategy import BLT, BandedInverse, Independent, Tree
from anyorder.training import engine as engines
from anyorder.training import trained_tables
from training import wide
from training.wide import STEPS, B, V, Words, backward, planned, private, train

# that a table is trained as other layers by whatever optimizer, fitted to the noise or not
pytestmark = pytest.mark.filterwarnings("ignore::anyorder.errors.OptimizerWarning")

STRATEGIES = [Independent(STEPS), BandedInverse([1.0, -0.5, -0.2], STEPS), Tree(STEPS), BLT([0.9], [0.4], STEPS)]
COMBINATIONS = STRATEGIES[:3]
WAYS = {
    "sgd": {},
    "momentum": {"momentum": 0.8},
    "nesterov": {"momentum": 0.8, "nesterov": True},
}


def dense(patch, plan, **options):
    """The run with a dense gradient; under another plan of the same noise, as noise is bound to the plan."""
    return private(plan, make=lambda: Words(sparse=False), **options)


def finish(run, *, scheduled=False, flush_every=None):
    engine, model, optimizer, loader = run
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) if scheduled else None

    def each(_):
        if scheduler is not None:
            scheduler.step()
        if flush_every and engine.step % flush_every == 0:
            engine.flush()

    train(engine, model, optimizer, loader, each=each)
    engine.flush()
    return wide.weights(model)


@pytest.mark.parametrize(("flush_every", "scheduled"), [(None, True), (1, False), (5, True)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", COMBINATIONS, ids=lambda s: type(s).__name__)
def test_a_replayed_run_is_the_dense_one_by_value(monkeypatch, strategy, way, scheduled, flush_every):
    """Row by row the noise that the dense run has: same sums, same rates, same model."""
    monkeypatch.setattr(trained_tables, "LazyTable", functools.partial(trained_tables.LazyTable, replay=True))
    found = []
    for sparse in (True, False):
        run = private(
            planned(strategy), make=lambda sparse=sparse: Words(sparse=sparse),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.3, **WAYS[way]),
        )  # fmt: skip
        found.append(finish(run, scheduled=scheduled, flush_every=flush_every))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [None, Adaptive()])
@pytest.mark.parametrize("way", WAYS)
def test_without_noise_it_is_the_dense_run(way, rule):
    """Sums, rates, clip norms and momentum are those of the engine, whatever the noise."""
    found = []
    for sparse in (True, False):
        run = private(
            planned(Independent(STEPS), sigma=1e-7), make=lambda sparse=sparse: Words(sparse=sparse),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.3, **WAYS[way]), rule=rule,
        )  # fmt: skip
        found.append(finish(run, scheduled=True))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def of_two_passes(model, batch):
    """The loss of a model that is called twice on each example, on rows of its own."""
    ids, labels = batch
    nn.functional.cross_entropy(model(ids) - 0.5 * model((ids + 17) % V), labels).backward()


@pytest.mark.parametrize("bag", [False, True])
def test_two_passes_over_a_batch_are_the_dense_ones(monkeypatch, bag):
    monkeypatch.setattr(trained_tables, "LazyTable", functools.partial(trained_tables.LazyTable, replay=True))
    monkeypatch.setattr(wide, "backward", of_two_passes)
    strategy = BandedInverse([1.0, -0.5, -0.2], STEPS)
    make = functools.partial(Words, bag=bag)
    found = [
        finish(private(planned(strategy), make=functools.partial(make, sparse=sparse))) for sparse in (True, False)
    ]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_what_a_unit_adds_in_two_passes_is_clipped_once():
    engine, model, optimizer, loader = private(planned(sigma=1e-9))
    for ids, labels in loader:
        engine.flush()
        copy, before = Words(sparse=False), wide.weights(model).clone()
        copy.load_state_dict(model.state_dict())
        rows = []
        for i in range(B):
            copy.zero_grad()
            of_two_passes(copy, unwatched((ids[i : i + 1], labels[i : i + 1])))
            rows.append(torch.cat([p.grad.reshape(-1) for p in copy.parameters()]).double())
        optimizer.zero_grad()
        of_two_passes(model, (ids, labels))
        optimizer.step()
        engine.flush()
        moved = (before - wide.weights(model)).double() / 0.1 * B
        torch.testing.assert_close(moved, wide.clipped_sum(torch.stack(rows), 0.7), atol=1e-4, rtol=1e-4)


def test_a_table_has_the_rate_of_its_own_group():
    """And its own momentum, at every step."""

    def optimizer(parameters):
        *linear, table = parameters
        return torch.optim.SGD([{"params": linear, "lr": 0.1}, {"params": [table], "lr": 0.4, "momentum": 0.5}])

    found = []
    for sparse in (True, False):
        run = private(
            planned(sigma=1e-7), make=lambda sparse=sparse: Words(sparse=sparse), optimizer=optimizer
        )  # fmt: skip
        found.append(finish(run, scheduled=True))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_what_is_shown_has_the_planned_law(strategy):
    """A table that nobody touched moves by rate std / batch size times a sum of rows of C^-1 Z.

    Half the noise, noise of a step that is used again and a row that is never brought up to date are refuted.
    """
    plan = planned(strategy)
    rows = 4000
    engine, model, optimizer, loader = private(plan, make=lambda: Words(rows=rows))
    before = None
    moves = []
    for t in range(STEPS):
        if t % 6 == 0:
            batches = iter(loader)
        engine.flush()
        now = model.module.table.weight.detach().clone().double()
        if t in (0, 4, 5):
            moves.append(now)
        next(batches)
        engine.skip()
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    moves.append(model.module.table.weight.detach().clone().double())
    sums = np.tril(np.ones((STEPS, STEPS))) @ strategy.noising_matrix()
    law = sums[[3, 4, STEPS - 1]] * 0.1 * plan.noise_std / plan.batch_size
    white = np.linalg.solve(
        np.linalg.cholesky(law @ law.T), torch.stack([(x - moves[0]).reshape(-1) for x in moves[1:]]).numpy()
    )
    for row in white:
        assert 1e-6 < chi2.cdf((row**2).sum(), row.size) < 1 - 1e-6
    assert abs(np.corrcoef(white) - np.eye(3)).max() < 5 / np.sqrt(white.shape[1])
    del before


# -- what is shown, and when -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bag", [False, True])
def test_a_taped_step_is_the_step_without_a_tape_bit_for_bit(monkeypatch, bag):
    """A read of a table is an operation of the tape; what it does to the table is done in every batch."""
    found, taped = [], []
    kept = per_example._GhostJob.taped

    def counted(self, tape):
        result = kept(self, tape)
        taped.append(result is not None)
        return result

    monkeypatch.setattr(per_example._GhostJob, "taped", counted)
    for most in (program.TAPE_BYTES, 0):
        monkeypatch.setattr(program, "TAPE_BYTES", most)
        found.append(finish(private(planned(BLT([0.9], [0.4], STEPS)), make=lambda: Words(bag=bag))))
        taped.append(None)
    first = taped.index(None)
    assert taped[:first].count(True) > STEPS // 2
    assert taped[first:] == [None, None]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_nothing_stale_is_shown():
    engine, model, optimizer, loader = private(planned())
    x, _ = wide.data()[:4]
    for call in (lambda: model.eval()(x), lambda: model.train() and model.state_dict()):
        train(engine, model, optimizer, loader, until=engine.step + 1)
        with torch.no_grad(), pytest.raises(TrainingError, match="flush"):
            call()
        model.eval()
        with pytest.raises(TrainingError, match="flush"):
            model(x)
        engine.flush()
        model(x)
        with torch.no_grad():
            model(x)
        assert model.state_dict()["table.weight"].shape == (V, wide.D)
        model.train()


def test_the_gradient_of_a_lazy_table_stays_none():
    engine, model, optimizer, loader = private(planned())
    train(engine, model, optimizer, loader, until=2)
    assert model.module.table.weight.grad is None
    engine.flush()
    assert model.module.table.weight.grad is None


def test_flush_between_steps_alone():
    engine, model, optimizer, loader = private(planned())
    backward(model, next(iter(loader)))
    with pytest.raises(TrainingError, match="between steps"):
        engine.flush()


def test_flush_without_tables_does_nothing():
    engine, model, optimizer, loader = private(planned(), make=lambda: Words(sparse=False))
    train(engine, model, optimizer, loader, until=1)
    before = wide.weights(model)
    engine.flush()
    assert torch.equal(before, wide.weights(model))


# -- how a loop may use it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bag", [False, True])
def test_micro_batches_are_one_step(bag):
    released = []
    for batch, accumulate in ((B, 1), (B // 2, 2)):
        loader = DataLoader(wide.data(), batch_size=batch)
        engine, model, optimizer, loader = private(
            planned(), make=lambda: Words(bag=bag), loader=loader, accumulate=accumulate, loss_reduction="sum"
        )
        batches = iter(loader)
        for _ in range(3):
            for _ in range(accumulate):
                x, y = next(batches)
                nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
        engine.flush()
        released.append(wide.weights(model))
    torch.testing.assert_close(*released, rtol=1e-4, atol=1e-5)


def test_empty_batches_of_poisson_sampling():
    engine, model, optimizer, loader = private(planned(poisson=0.02, batch_size=1), loader=DataLoader(wide.data()))
    sizes = set()
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum").backward()
        optimizer.step()
        sizes.add(len(batch[0]))
    engine.flush()
    assert 0 in sizes
    assert wide.weights(model).isfinite().all()


def test_a_closure_makes_the_gradients():
    released = []
    for closed in (True, False):
        engine, model, optimizer, loader = private(planned())
        batch = next(iter(loader))
        optimizer.zero_grad()
        if closed:
            optimizer.step(lambda model=model, batch=batch: backward(model, batch))
        else:
            backward(model, batch)
            optimizer.step()
        engine.flush()
        released.append(wide.weights(model))
    assert torch.equal(*released)


def test_a_model_of_a_table_alone():
    engine, model, optimizer, loader = private(planned(), make=wide.TableAlone)
    before = None
    train(engine, model, optimizer, loader, until=5)
    engine.flush()
    assert model.module.table.weight.isfinite().all()
    del before


# -- going on after a stop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "flush_every"), [*((strategy, 3) for strategy in STRATEGIES), (STRATEGIES[-1], None)]
)
def test_a_resumed_run_is_bit_for_bit_the_one_that_was_not_stopped(tmp_path, strategy, flush_every):
    plan = planned(strategy)

    def run(checkpoint, until, save_every=None):
        found = private(plan, checkpoint=checkpoint)
        engine = found[0]

        def each(_):
            if flush_every and engine.step % flush_every == 0:
                engine.flush()

        train(*found, until=until, each=each, save_every=save_every)
        return found

    whole = run(tmp_path / "whole", STEPS)
    whole[0].flush()
    first = run(tmp_path / "run", 8, save_every=3)
    first[0].close()
    again = run(tmp_path / "run", STEPS)
    again[0].flush()
    assert torch.equal(wide.weights(again[1]), wide.weights(whole[1]))


class Again(Words):
    """One table under two names."""

    def __init__(self):
        super().__init__()
        self.again = self.table


@pytest.mark.parametrize("flushed", [True, False])
def test_a_table_of_two_names_is_resumed(tmp_path, flushed):
    first = private(planned(), make=Again, checkpoint=tmp_path / "run")
    train(*first, until=3)
    if flushed:
        first[0].flush()
    first[0].save()
    first[0].flush()
    first[0].close()
    again = private(planned(), make=Again, checkpoint=tmp_path / "run")
    again[0].flush()
    assert torch.equal(wide.weights(again[1]), wide.weights(first[1]))


def test_the_checkpoint_has_the_whole_table_whatever_was_touched(tmp_path):
    sizes = []
    for shift in (0, 7):
        engine, model, optimizer, loader = private(planned(), checkpoint=tmp_path / f"run{shift}", shift=shift)
        train(engine, model, optimizer, loader, until=3)
        engine.save()
        sizes.append((tmp_path / f"run{shift}").stat().st_size)
        engine.close()
    assert len(set(sizes)) == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda p: torch.optim.Adam(p), "needs torch.optim.SGD, got Adam"),
        (lambda p: type("Own", (torch.optim.SGD,), {})(p, lr=0.1), "needs torch.optim.SGD, got Own"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), "without weight_decay, got 0.1"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, dampening=0.1), "without dampening, got 0.1"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "without maximize, got True"),
        (lambda p: ao.FTRL(p, lr=0.1), "needs torch.optim.SGD, got FTRL"),
        (lambda p: torch.optim.Adagrad(p), "linear updates alone"),
    ],
)
def test_updates_that_are_not_linear_are_refused(optimizer, words):
    with pytest.raises(ArgumentError, match=words):
        private(planned(), optimizer=optimizer)


def test_another_group_may_decay():
    def optimizer(parameters):
        *linear, table = parameters
        return torch.optim.SGD([{"params": linear, "weight_decay": 0.1}, {"params": [table]}], lr=0.1)

    engine, model, optimizer, loader = private(planned(), optimizer=optimizer)
    train(engine, model, optimizer, loader, until=2)


def test_options_stay_as_they_were():
    engine, model, optimizer, loader = private(planned(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5))
    train(engine, model, optimizer, loader, until=1)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(TrainingError, match="only the rate may move"):
        engine.flush()
    backward(model, next(iter(loader)))
    with pytest.raises(TrainingError, match="only the rate may move"):
        optimizer.step()


def test_exact_integers_are_refused():
    plan = ao.plan(
        dataset_size=wide.N, batch_size=B, epochs=1, epsilon=8, delta=1e-5, clip_norm=1.0,
        mechanism=ao.mechanism("independent", secure=True),
    )  # fmt: skip
    with pytest.raises(PlanError, match="no exact integers"):
        private(plan)


def test_a_gradient_from_elsewhere_is_refused():
    engine, model, optimizer, loader = private(planned())
    backward(model, next(iter(loader)))
    model.module.table.weight.grad = torch.zeros_like(model.module.table.weight)
    with pytest.raises(TrainingError, match="gets none through the private model"):
        optimizer.step()


def test_a_refused_model_is_left_as_it_was():
    model = Words()
    with pytest.raises(AnyorderError):
        private(planned(), make=lambda: model, optimizer=lambda p: torch.optim.Adam(p))
    assert model.table.weight.shape == (V, wide.D)
    model.state_dict()


def test_a_resume_that_fails_leaves_the_table_in_the_model(tmp_path, monkeypatch):
    run = private(planned(), checkpoint=tmp_path / "run")
    train(*run, until=2)
    run[0].save()
    run[0].close()
    model = Words()
    given = model.table.weight.detach().clone()

    def fail(*_):
        raise ArgumentError("no room")

    monkeypatch.setattr(engines.Training, "_restore", fail)
    with pytest.raises(ArgumentError, match="no room"):
        private(planned(), make=lambda: model, checkpoint=tmp_path / "run")
    assert torch.equal(model.state_dict()["table.weight"], given)


def test_a_run_is_resumed_with_the_momentum_of_its_table_alone(tmp_path):
    def opened(momentum):
        return private(
            planned(), checkpoint=tmp_path / "run", optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum)
        )

    run = opened(0.9)
    train(*run, until=2)
    run[0].save()
    run[0].close()
    with pytest.raises(CheckpointError, match=r"momentum=0\.9, nesterov=False, replay=False, and this"):
        opened(0.5)
    opened(0.9)[0].flush()
