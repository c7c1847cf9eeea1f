"""Orders by secret draws in a training loop: their batches, units by key, micro-batches, filled-up rows, resumes."""

import copy
from itertools import chain, repeat

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import anyorder as ao
from anyorder._draws import Draws
from anyorder.clipping import Adaptive, Automatic
from anyorder.errors import ArgumentError, CheckpointWarning, LoaderError, PlanError, TrainingError
from anyorder.noise import NoiseSource
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    EpochShuffle,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.plan.planner import plan_at_sigma
from anyorder.strategy import Independent
from release.runs import copied
from training.test_engine import KEY, clipped_sum, gradients, network, weights

ROWS = 24
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
USERS = torch.tensor([7, 3, 7, 90, 41, 3, 12, 12, 55, 7, 60, 60, 60, 41, 2, 2, 8, 9, 9, 55, 31, 31, 90, 77])
DATA = TensorDataset(X, torch.arange(ROWS) % 2, USERS)
RULES = [
    PoissonSampling(12, 0.25),
    CyclicPoisson(12, 3, 0.5),
    TruncatedPoisson(12, 0.4, batch_size=8, dataset_size=ROWS),
    BallsInBins(3, 4),
    RandomAllocation(3, 4),
    MinSeparationSampling(12, 3, 0.5),
]
NAMES = [type(rule).__name__ for rule in RULES]


def planned(rule, **changes):
    """Its epsilon, which takes long for some, is not asked for."""
    settings = {"unit": "example", "clip_norm": 0.3, "sigma": 1.0, "batch_size": 6}
    return ao.Plan(
        participation=rule, strategy=Independent(rule.n), workload=ao.workload.prefix_sum(rule.n), delta=1e-5,
        neighbours="zero-out" if rule.absence_moves_others else "add-or-remove", **{**settings, **changes},
    )  # fmt: skip


def private(plan, *, dataset=DATA, checkpoint=None, key=KEY, workers=0, net=None, **options):
    engine = ao.PrivacyEngine(plan, key=key, checkpoint=checkpoint)
    model = network() if net is None else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(dataset, batch_size=6, shuffle=True, num_workers=workers)
    return engine, *engine.make_private(model, optimizer, loader, **options)


def take(run, steps, accumulate=1, seen=None):
    """So many optimizer steps, over as many epochs as they take."""
    engine, model, optimizer, loader = run
    waiting, end = 0, engine.step + steps
    while engine.step < end:
        for batch in loader:
            if not waiting:
                optimizer.zero_grad()
            if seen is not None:
                seen.append(batch)
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            waiting += 1
            if waiting == accumulate:
                optimizer.step()
                waiting = 0
            if engine.step == end:
                break
    return weights(model)


def drawn(plan, size, rule=None):
    rule = rule or plan.participation
    draws = Draws(rule, size, NoiseSource(KEY).derive(plan.digest.encode()).derive(b"sampling"))
    return [draws.step(t) for t in range(rule.n)]


def history(engine):
    return [sorted(units.tolist()) for units in engine.ledger.history()]


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_batches_are_those_of_the_draws_and_of_the_release(rule):
    plan, seen = planned(rule), []
    run = private(plan)
    take(run, rule.n, seen=seen)
    expected = [units.tolist() for units in drawn(plan, ROWS)]
    assert history(run[0]) == expected
    for (x, *_), units in zip(seen, expected, strict=True):
        assert len(x) == (8 if isinstance(rule, TruncatedPoisson) else len(units))
        assert torch.equal(x[: len(units)], X[units])
    release = ao.Release(plan, 3, key=KEY)
    for units in expected:
        assert release.sample(ROWS).tolist() == units
        release.step(units, np.zeros(3))
    assert run[0].certificate().realised == release.certificate().realised


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_the_gradient_is_that_of_the_units_alone(rule, monkeypatch):
    """Against brute force: rows that fill a micro-batch up must add nothing, though they are examples of the batch."""
    monkeypatch.setattr(ao.Plan, "noise_std", 1e-9)
    engine, model, optimizer, loader = private(planned(rule), accumulate=2, micro_batch=7)
    batches = chain.from_iterable(repeat(loader))
    for t in range(4):
        before = copy.deepcopy(model.module)
        for _ in range(2):
            batch = next(batches)
            assert len(batch[0]) >= 7
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        units = list(engine.ledger.history())[t]
        expected = clipped_sum(before, [X[units], DATA.tensors[1][units]], 0.3) / 6 if len(units) else torch.zeros(26)
        torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-6)
        optimizer.zero_grad()


def test_rows_that_fill_up_add_nothing_whatever_they_hold():
    """Automatic clipping makes the smallest gradient long, Adaptive counts, and a row may hold NaN."""
    for rule in (Automatic(), Adaptive(), None):
        outcomes = []
        for rows in (None, 24):
            run = private(planned(PoissonSampling(6, 0.2)), micro_batch=rows, rule=rule)
            outcomes.append((take(run, 6), run[0].clip_norm))
        torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=1e-4, atol=1e-5)
        assert outcomes[0][1] == pytest.approx(outcomes[1][1], rel=1e-6)
    bad = TensorDataset(X.clone().index_fill_(0, torch.tensor([0]), torch.nan), DATA.tensors[1])
    rare = planned(PoissonSampling(6, 1e-6))
    empty = [take(private(rare, dataset=bad, micro_batch=rows), 6) for rows in (None, 5)]
    assert torch.equal(*empty)  # example 0 is what fills an empty batch up


def test_truncated_batches_have_one_size():
    rule = TruncatedPoisson(12, 0.6, batch_size=8, dataset_size=ROWS)
    for accumulate, rows in ((1, 8), (2, 4), (3, 3)):
        seen = []
        run = private(planned(rule), accumulate=accumulate)
        take(run, 12, accumulate, seen)
        assert {len(batch[0]) for batch in seen} == {rows}
        assert max(map(len, history(run[0]))) == 8
        assert len(seen) == 12 * accumulate
    with pytest.raises(ArgumentError, match="dataset_size=24"):
        private(planned(rule), dataset=Subset(DATA, range(20)))


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_units_coin_decides_for_all_its_examples(rule, accumulate):
    """Units are numbers in the ascending list of ids, in which 7 is the fourth; all examples of one come together."""
    ids = np.unique(USERS)
    if isinstance(rule, TruncatedPoisson):
        rule = TruncatedPoisson(12, 0.4, batch_size=6, dataset_size=len(ids))
    plan, seen = planned(rule, unit="user"), []
    run = private(plan, unit=2, accumulate=accumulate)
    take(run, rule.n, accumulate, seen)
    expected = [ids[units].tolist() for units in drawn(plan, len(ids))]
    assert history(run[0]) == expected
    for t, units in enumerate(expected):
        parts = seen[t * accumulate : (t + 1) * accumulate]
        came = torch.cat([part[0] for part in parts])[:, 0]
        assert sorted(came.tolist()) == sorted(X[np.isin(USERS, units), 0].tolist())
        for one in range(accumulate):
            for other in range(one):
                assert not set(parts[one][2].tolist()) & set(parts[other][2].tolist())
    if isinstance(rule, CyclicPoisson):
        places = [{int(np.searchsorted(ids, unit)) % 3 for unit in units} for units in expected]
        assert all(groups <= {t % 3} for t, groups in enumerate(places))
    if isinstance(rule, BallsInBins):
        assert expected[:4] == expected[4:8] == expected[8:]
        assert sorted(unit for units in expected[:4] for unit in units) == ids.tolist()


class Renaming(torch.utils.data.Dataset):
    """Gives its examples to other users once it has been read."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        self.reads += 1
        x, y, user = DATA[i]
        return x, y, user + (self.reads > ROWS)


@pytest.mark.parametrize("rows", [None, 30])
def test_a_batch_names_the_units_that_were_drawn(rows):
    run = private(planned(PoissonSampling(6, 0.4), unit="user"), unit=2, dataset=Renaming(), micro_batch=rows)
    with pytest.raises(LoaderError, match="other units than those that were drawn"):
        take(run, 6)
    assert run[0].step == 0 or not any(history(run[0]))


def test_units_by_key_with_rows_that_fill_up():
    plan = planned(PoissonSampling(6, 0.4), unit="user")
    whole = [take(private(plan, unit=2, accumulate=a, micro_batch=m), 6, a) for a, m in ((1, None), (1, 30), (3, 12))]
    for other in whole[1:]:
        torch.testing.assert_close(other, whole[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_resumed_run_is_the_same_bit_for_bit(rule, tmp_path):
    options = {"accumulate": 2, "micro_batch": 8}
    whole = private(planned(rule), **options)
    expected = take(whole, 12, 2)
    path = tmp_path / "run.ckpt"
    run = private(planned(rule), checkpoint=path, **options)
    take(run, 6, 2)  # within an epoch
    run[0].save()
    lost = take(run, 2, 2)  # after the last save
    run[0].close()
    again = private(planned(rule), checkpoint=path, key=None, **options)
    assert torch.equal(take(again, 2, 2), lost)
    assert torch.equal(take(again, 4, 2), expected)
    assert again[0].ledger.digest() == whole[0].ledger.digest()


def test_workers_and_pinning_change_nothing():
    plan = planned(MinSeparationSampling(12, 3, 0.5))
    assert torch.equal(take(private(plan, workers=2, micro_batch=9), 12), take(private(plan, micro_batch=9), 12))


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_batch_serves_the_step_that_it_was_drawn_for(rule):
    """Bins that come one step early would be bins of another order; what is left out is a step of nobody."""
    engine, model, optimizer, loader = private(planned(rule))
    batches = iter(loader)
    next(batches)
    batch = next(batches)
    with pytest.raises(TrainingError, match="step 1.*step 0"):
        model(batch[0])
    loader.seek(0)
    take((engine, model, optimizer, loader), 1)
    loader.seek(0)
    with pytest.raises(TrainingError, match="was used already"):
        model(next(iter(loader))[0])
    loader.seek(1)
    next(iter(loader))
    engine.skip()
    optimizer.step()
    take((engine, model, optimizer, loader), rule.n - 2)
    own = [units.tolist() for units in drawn(engine.plan, ROWS)]
    assert history(engine) == [own[0], [], *own[2:]]


def test_empty_batches_are_steps_too():
    """To pass over them would give each step's coins given that somebody is in it: unit 0 would come far more often."""
    rule = PoissonSampling(12, 0.05)
    engine, model, optimizer, loader = run = private(planned(rule), dataset=Subset(DATA, range(6)))
    own = [units.tolist() for units in drawn(engine.plan, 6)]
    assert [] in own
    assert any(own)
    first = own.index(next(units for units in own[own.index([]) :] if units))  # after an empty batch
    with pytest.raises(TrainingError, match="engine.skip"):
        for batch in loader:
            if len(batch[0]):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
                optimizer.step()
    loader.seek(engine.step)
    for _ in range(engine.step, first):
        next(iter(loader))
        engine.skip()
        optimizer.step()
    take(run, rule.n - first)  # an epoch that is left early goes on where it was
    assert history(engine) == own


def test_micro_batches_of_two_steps_are_not_joined():
    engine, model, optimizer, loader = private(planned(PoissonSampling(12, 0.25)), accumulate=2)
    batches = iter(loader)
    next(batches)
    for t in range(2):
        batch = next(batches)
        if t:
            with pytest.raises(TrainingError, match="step 1.*step 0"):
                model(batch[0])
        else:
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def test_bins_stay_where_a_journal_is_in_doubt(tmp_path):
    """New ones would bring units back at distances that the order does not have."""
    path, plan = tmp_path / "run.ckpt", planned(BallsInBins(3, 4))
    run = private(plan, checkpoint=path)
    take(run, 6)
    run[0].save()
    run[0].close()
    copied(tmp_path / ".run.ckpt.journal")
    with pytest.warns(CheckpointWarning, match="draws"):
        again = private(plan, checkpoint=path, key=None)
    take(again, 6)
    assert history(again[0]) == [units.tolist() for units in drawn(plan, ROWS)]


def test_what_cannot_be_drawn_from_is_refused():
    plan = planned(BallsInBins(3, 4))
    with pytest.raises(ArgumentError, match="micro_batch must be at least 3"):
        private(plan, micro_batch=2, accumulate=2)
    with pytest.raises(ArgumentError, match="micro_batch"):
        private(plan, micro_batch=0)
    shuffled = plan_at_sigma(1.0, order=EpochShuffle(3, 4), batch_size=6, delta=1e-5)
    with pytest.raises(ArgumentError, match="micro_batch is for orders by secret draws"):
        private(shuffled, micro_batch=6)
    engine = ao.PrivacyEngine(plan)
    model = network()
    with pytest.raises(LoaderError, match="DataLoader"):
        engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), list(DataLoader(DATA, batch_size=6)))


def test_nothing_public_tells_how_many_were_drawn():
    """Lengths, positions and reports of two runs with other batches are the same."""
    told = []
    for key in (KEY, bytes(32)):
        run = private(planned(BallsInBins(3, 4)), key=key, accumulate=2, micro_batch=8)
        take(run, 5, 2)
        engine, _, _, loader = run
        facts = engine.order, len(loader), loader.position, loader.batches_per_epoch, engine.epoch
        told.append((facts, engine.certificate().realised))
    assert told[0] == told[1]


def test_the_release_of_an_engine_takes_no_totals_past_the_draws():
    """A batch of a secret order is what was drawn for its step; the engine's loader draws, and its release does not."""
    plan = planned(RULES[0])
    engine = ao.PrivacyEngine(plan, key=KEY)
    model = network()
    engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=6))
    size = engine.release.size
    for take in (
        lambda: engine.release.step([0], np.zeros(size, np.float32)),
        lambda: engine.release.step_rows([0], [0], np.zeros((1, size), np.float32)),
    ):
        with pytest.raises(PlanError, match="drawn by the loader of this run"):
            take()
    assert engine.step == 0
