"""A table whose rows are chosen privately at each step: the planned mechanism, and nothing of the table's size."""

import shutil
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chi2, norm
from torch import nn
from torch.utils.data import DataLoader

import anyorder as ao
from anyorder.clipping import Adaptive
from anyorder.clipping.coupling import unwatched
from anyorder.errors import ArgumentError, CheckpointError, CheckpointWarning, PlanError, TrainingError
from anyorder.noise import NoiseSource, NoiseStream
from anyorder.release.attached_tables import SelectedRows
from anyorder.sparse import Counts, Top, Uniform
from anyorder.sparse.select import SelectedTables, select_counts, select_top, select_uniform
from anyorder.strategy import BandedInverse, Independent, Tree
from anyorder.training.engine import BoundParameters
from anyorder.training.trained_tables import TrainedTables, tables_in
from training import wide
from training.wide import KEY, STEPS, B, D, N, V, Words, backward, clipped_sum, per_unit, planned, private, train

DENSE = 2 * D + 2
COUNTS = Counts(1.5, count_norm=1.2, sigma=0.8)
STRATEGIES = [Independent(STEPS), BandedInverse([1.0, -0.5, -0.2], STEPS), Tree(STEPS, regenerate=True)]


def source_of(plan):
    return NoiseSource(KEY).derive(plan.digest.encode())


def expected_rows(plan, step, ids):
    """The rows that the plan chooses, from counts by hand."""
    source, rule = source_of(plan).derive(b"selection"), plan.selection
    if isinstance(rule, Uniform):
        return select_uniform(rule.rows, num_rows=V, source=source, step=step)
    if isinstance(rule, Top):
        scores = wide.counts(ids, 1e9) * rule.score_norm
        return select_top(scores, rule.rows, plan.selection_scale, source=source, step=step)
    found = wide.counts(ids, rule.count_norm)
    return select_counts(found, rule.threshold, plan.selection_std, source=source, step=step)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("selection", [COUNTS, Top(5, sigma=2.0, score_norm=0.5), Uniform(6)], ids=lambda s: s.kind)
def test_each_step_is_the_planned_mechanism(strategy, selection):
    """Counts by hand, rows by the selector, gradients one example at a time, the noise of a dense stream."""
    plan = planned(strategy, selection=selection)
    engine, model, optimizer, loader = private(plan)
    stream = NoiseStream(plan.strategy, source_of(plan), plan.noise_std, DENSE + V * D)
    sizes = set()
    for step, batch in enumerate(loader):
        before = per_unit(model.module, batch)
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        total = (clipped_sum(before, plan.clip_norm) + torch.from_numpy(stream.next())) / plan.batch_size
        rows = expected_rows(plan, step, batch[0])
        linear, table = model.module.linear, model.module.table.weight.grad
        dense = torch.cat([linear.weight.grad.reshape(-1), linear.bias.grad])
        torch.testing.assert_close(dense.double(), total[:DENSE], rtol=1e-5, atol=1e-6)
        assert table.is_sparse
        assert table.is_coalesced()
        assert table.shape == (V, D)
        assert table.indices()[0].tolist() == rows.tolist()
        torch.testing.assert_close(table.values().double(), total[DENSE:].view(V, D)[rows], rtol=1e-5, atol=1e-6)
        sizes.add(len(rows))
    assert sizes - {0}
    assert engine.step == STEPS // 2


class Apart(nn.Module):
    """Two tables of unlike shapes."""

    def __init__(self, sparse=True):
        super().__init__()
        self.first = nn.Embedding(V, D, sparse=sparse)
        self.second = nn.Embedding(V + 9, 2, sparse=sparse)

    def forward(self, ids):
        return self.first(ids[:, :2]).sum(1)[:, :2] + self.second(ids[:, 2:] + 9).sum(1)


def test_rows_are_chosen_among_those_of_all_tables_together():
    """One vector of counts, of one norm, one choice, and coordinates one behind the other."""
    plan = planned(selection=COUNTS)
    engine, model, optimizer, loader = private(plan, make=Apart)
    stream = NoiseStream(plan.strategy, source_of(plan), plan.noise_std, V * D + (V + 9) * 2)
    chosen = []
    for step, (ids, y) in enumerate(loader):
        copy = Apart(sparse=False)
        copy.load_state_dict(model.module.state_dict())
        gradients = []
        for i in range(len(ids)):
            copy.zero_grad()
            nn.functional.cross_entropy(copy(unwatched(ids[i : i + 1])), unwatched(y[i : i + 1])).backward()
            gradients.append(torch.cat([p.grad.reshape(-1) for p in copy.parameters()]).double())
        optimizer.zero_grad()
        backward(model, (ids, y))
        optimizer.step()
        counts = np.zeros(V + V + 9)
        for row in ids.numpy():
            touched = np.unique(np.concatenate([row[:2], V + row[2:] + 9]))
            counts[touched] += min(1.0, COUNTS.count_norm / np.sqrt(len(touched)))
        source = source_of(plan).derive(b"selection")
        rows = select_counts(counts, COUNTS.threshold, plan.selection_std, source=source, step=step)
        total = clipped_sum(torch.stack(gradients), plan.clip_norm) + torch.from_numpy(stream.next())
        whole = (total / plan.batch_size).split([V * D, (V + 9) * 2])
        own = rows[rows < V], rows[rows >= V] - V
        for p, values, ids_of in zip(model.module.parameters(), whole, own, strict=True):
            assert p.grad.indices()[0].tolist() == ids_of.tolist()
            torch.testing.assert_close(p.grad.values().double(), values.view(p.shape)[ids_of], rtol=1e-5, atol=1e-6)
        chosen.append([len(rows) for rows in own])
    assert np.all(np.sum(chosen, 0) > 0)


def test_the_dense_part_is_that_of_a_dense_run():
    """The table's coordinates lie behind the others in both."""
    released = []
    for sparse in (True, False):
        plan = planned(selection=Uniform(V) if sparse else None)
        # The noise is bound to the plan: so that both have one, the dense run is given the other's source.
        if not sparse:
            object.__setattr__(plan, "digest", planned(selection=Uniform(V)).digest)
        engine, model, optimizer, loader = private(plan, make=lambda sparse=sparse: Words(sparse=sparse))
        rows = []
        train(engine, model, optimizer, loader, each=lambda _, m=model, rows=rows: rows.append(grads(m.module)))
        released.append(torch.stack(rows))
    torch.testing.assert_close(*released, rtol=0, atol=1e-7)  # the sums are made in another order


def grads(model):
    return torch.cat([p.grad.to_dense().reshape(-1) for p in model.parameters()]).clone()


def nothing(engine, model, optimizer, loader):
    """Steps whose gradients and counts are zero but for the noise."""
    for _ in loader:
        optimizer.zero_grad()
        engine.skip()
        optimizer.step()
        yield model.module.table.weight.grad


def test_noise_on_rows_that_nobody_touched_has_the_planned_law():
    """Half the noise, the noise of another step, and a threshold on counts without noise are each refuted."""
    steps, rows = wide.EPOCHS * N, 400
    plan = planned(Independent(steps), selection=Counts(1.0, sigma=1.0), steps=steps, batch_size=1)
    loader = DataLoader(wide.data(), batch_size=1, shuffle=True)
    engine, model, optimizer, loader = private(plan, make=lambda: Words(rows=rows), loader=loader)
    released, places = [], []
    while engine.step < steps:
        for table in nothing(engine, model, optimizer, loader):
            released.append(table.values().double().numpy() * plan.batch_size / plan.noise_std)
            places.append(table.indices()[0].numpy())
    found = np.concatenate(released)
    assert 1e-6 < chi2.cdf((found**2).sum(), found.size) < 1 - 1e-6
    trials = len(places) * rows
    chance = norm.sf(1.0 / plan.selection_std)
    assert binomtest(sum(map(len, places)), trials, chance).pvalue > 1e-6
    assert len({tuple(p) for p in places}) == len(places)
    same = np.mean([np.intersect1d(a, b).size for a, b in pairwise(places)])
    assert abs(same - rows * chance**2) < 6 * np.sqrt(rows * chance**2 / (len(places) - 1))


@pytest.mark.parametrize(
    "selection", [Counts(0.4, sigma=0.5), Top(6, score_norm=0.5, sigma=0.5), Uniform(6)], ids=lambda s: s.kind
)
def test_rows_of_several_tables_are_those_of_one(selection):
    """They are chosen together, and each table has the noise of its own coordinates, behind those before it."""
    plan, shapes = planned(BandedInverse([1.0, -0.5, -0.2], STEPS), selection=selection), [(7, 3), (5, 2), (6, 3)]
    release = ao.Release(plan, 4, key=KEY)
    tables = SelectedTables(release, shapes)
    size = sum(rows * width for rows, width in shapes)
    stream = NoiseStream(plan.strategy, source_of(plan), plan.noise_std, 4 + size)
    rng, chosen = np.random.default_rng(0), []
    source = source_of(plan).derive(b"selection")
    for step in range(STEPS):
        full = [np.zeros(shape) for shape in shapes]
        heights = [np.zeros(rows) for rows, _ in shapes]
        for one, height in zip(full, heights, strict=True):
            touched = rng.permutation(len(one))[:3]
            one[touched], height[touched] = rng.normal(size=(3, one.shape[1])), rng.uniform(0.1, 1.0, 3)
        counts = [] if selection.kind == "uniform" else [torch.tensor(x).to_sparse() for x in heights]
        sums = [torch.tensor(x).to_sparse(1) for x in full]
        release.step(range(step % 6 * B, step % 6 * B + B), np.zeros(4), [tables.part(sums, counts)])
        every = np.concatenate(heights)
        match selection:
            case Counts():
                rows = select_counts(every, selection.threshold, plan.selection_std, source=source, step=step)
            case Top():
                rows = select_top(every * selection.score_norm, 6, plan.selection_scale, source=source, step=step)
            case Uniform():
                rows = select_uniform(6, num_rows=len(every), source=source, step=step)
        mean = torch.from_numpy(np.concatenate([x.ravel() for x in full]) + stream.next()[4:]) / plan.batch_size
        expected = torch.split(mean, [x.size for x in full])
        first = 0
        for made, whole, shape in zip(tables.each(release.of_tables), expected, shapes, strict=True):
            own = rows[(rows >= first) & (rows < first + shape[0])] - first
            assert made.shape == shape
            assert made.indices()[0].tolist() == own.tolist()
            torch.testing.assert_close(made.values().double(), whole.view(shape)[own], rtol=1e-5, atol=1e-6)
            first += shape[0]
        chosen.append(tuple(rows.tolist()))
    assert len(set(chosen)) > STEPS // 2


@pytest.mark.parametrize("selection", [Top(1000, sigma=2.0), Uniform(1000)], ids=lambda s: s.kind)
def test_more_rows_than_there_are_are_all_rows(selection):
    engine, model, optimizer, loader = private(planned(selection=selection))
    train(engine, model, optimizer, loader, until=1)
    assert model.module.table.weight.grad.indices()[0].tolist() == list(range(V))


def test_a_step_of_nobody_has_no_sums_and_no_counts():
    release = ao.Release(planned(selection=COUNTS), 2, key=KEY)
    tables = SelectedTables(release, [(6, 2)])
    sums, counts = ([sparse_rows([1], x, 6, width) for x in (0.0, 1.0)] for width in ((2,), ()))
    for i, j in ((0, 1), (1, 0)):
        with pytest.raises(ArgumentError, match="sum of nobody must be zero"):
            release.step([], np.zeros(2), [tables.part([sums[i]], [counts[j]])])
    release.step([], np.zeros(2), [tables.part([sums[0]], [counts[0]])])


def test_an_audited_run_releases_every_row():
    """Canaries lie in any row, chosen or not."""
    plan = planned(selection=COUNTS, sigma=1e-6)
    release, seen = ao.Release(plan, 2, key=KEY), []
    tables = SelectedTables(release, [(6, 2), (3, 4)])
    release.admit(lambda t, pieces, divisor: [piece + 1 + i for i, piece in enumerate(pieces)])
    release.on_release(lambda t, private: seen.append(private))
    empty = [[sparse_rows([], 0.0, rows, width) for rows, width in shapes] for shapes in (
        [(6, (2,)), (3, (4,))], [(6, ()), (3, ())]
    )]  # fmt: skip
    release.step(range(B), np.zeros(2), [tables.part(*empty)])
    expected = torch.tensor([1.0] * 2 + [2.0] * 24) / plan.batch_size
    torch.testing.assert_close(torch.as_tensor(seen[0]).float(), expected, rtol=1e-4, atol=1e-4)
    made = tables.each(release.of_tables)
    assert [x.indices()[0].tolist() for x in made] == [list(range(6)), list(range(3))]


def test_tables_of_a_selection_are_attached_as_one():
    """Else each would choose rows by the plan's counts, with the same coins, and spend them again."""
    release = ao.Release(planned(selection=COUNTS), 2)
    SelectedTables(release, [(5, 3), (4, 3)])
    with pytest.raises(PlanError, match="attach them as one"):
        SelectedTables(release, [(5, 3)])
    with pytest.raises(PlanError, match="no selection"):
        SelectedTables(ao.Release(planned(), 2), [(5, 3)])


# -- optimizers --------------------------------------------------------------------------------------------------------

SPARSE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
DENSELY = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "sgd with decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "adagrad with decay": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
    "ftrl": lambda p: ao.FTRL(p, lr=0.1),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch's own Adagrad
@pytest.mark.parametrize("name", [*SPARSE, *DENSELY])
def test_optimizers_get_what_they_take(name):
    """The same steps by hand, on a model of its own, with the private gradients made dense."""
    make = {**SPARSE, **DENSELY}[name]
    engine, model, optimizer, loader = private(planned(selection=COUNTS), optimizer=make)
    copy = Words(sparse=False)
    copy.load_state_dict(model.state_dict())
    other = make(copy.parameters())

    def follow(_):
        assert model.module.table.weight.grad.is_sparse == (name in SPARSE)
        for p, own in zip(copy.parameters(), model.module.parameters(), strict=True):
            p.grad = own.grad.to_dense().clone()
        other.step()

    train(engine, model, optimizer, loader, each=follow)
    for own, p in zip(model.module.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(own, p, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_adam_moves_the_chosen_rows_alone():
    """Lazy Adam; dense Adam moves rows on, by what they were given before: two algorithms."""
    moved = {}
    for kind in (torch.optim.SparseAdam, torch.optim.Adam):
        engine, model, optimizer, loader = private(
            planned(selection=COUNTS), make=wide.TableAlone, optimizer=lambda p, kind=kind: kind(list(p), lr=0.1)
        )
        table = model.module.table.weight
        chosen, changed = [], []
        before = [table.detach().clone()]

        def look(_, table=table, chosen=chosen, changed=changed, before=before):
            gradient = table.grad if table.grad.is_sparse else table.grad.to_sparse(1)
            chosen.append(set(gradient.coalesce().indices()[0].tolist()))
            changed.append(set((table != before[0]).any(1).nonzero()[:, 0].tolist()))
            before[0] = table.detach().clone()

        train(engine, model, optimizer, loader, until=6, each=look)
        moved[kind] = all(a == b for a, b in zip(chosen, changed, strict=True))
    assert moved == {torch.optim.SparseAdam: True, torch.optim.Adam: False}


def test_sparse_adam_is_refused_beside_dense_parameters():
    with pytest.raises(ArgumentError, match="SparseAdam takes sparse gradients alone"):
        private(planned(selection=COUNTS), optimizer=lambda p: torch.optim.SparseAdam(list(p)))


# -- how a loop may use it ---------------------------------------------------------------------------------------------


def test_micro_batches_are_one_step():
    released = []
    for batch, accumulate in ((B, 1), (B // 2, 2)):
        loader = DataLoader(wide.data(), batch_size=batch)
        engine, model, optimizer, loader = private(
            planned(selection=COUNTS), loader=loader, accumulate=accumulate, loss_reduction="sum"
        )
        batches = iter(loader)
        for _ in range(3):
            for _ in range(accumulate):
                x, y = next(batches)
                nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
        released.append(wide.weights(model))
    torch.testing.assert_close(*released, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_left_out_is_one_of_noise_alone():
    released = []
    for left_out in (True, False):
        engine, model, optimizer, loader = private(planned(selection=Uniform(7)))
        batches = iter(loader)
        backward(model, next(batches))
        optimizer.step()
        x, _ = next(batches)
        if left_out:
            engine.skip()
        else:
            (model(x) * 0).sum().backward()
        optimizer.step()
        released.append(grads(model.module))
    assert torch.equal(*released)


def test_zero_grad_discards_a_batch():
    engine, model, optimizer, loader = private(planned(selection=COUNTS))
    batches = iter(loader)
    backward(model, next(batches))
    optimizer.zero_grad()
    with pytest.raises(TrainingError, match="without a backward pass"):
        optimizer.step()


def test_empty_batches_of_poisson_sampling():
    """A batch of nobody chooses rows as any other, and gives them noise."""
    plan = planned(selection=Counts(0.5, sigma=1.0), poisson=0.02, batch_size=1)
    engine, model, optimizer, loader = private(plan, loader=DataLoader(wide.data(), batch_size=1))
    sizes, chosen = [], []
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum").backward()
        optimizer.step()
        sizes.append(len(batch[0]))
        chosen.append(len(model.module.table.weight.grad.coalesce().values()))
    assert 0 in sizes
    assert all(n for n, size in zip(chosen, sizes, strict=True) if not size)


def test_the_counts_of_a_moving_clip_norm_are_a_dense_coordinate():
    plan = planned(selection=Uniform(V), sigma=1e-6)
    released = []
    for sparse in (True, False):
        engine, model, optimizer, loader = private(
            plan if sparse else planned(sigma=1e-6), make=lambda sparse=sparse: Words(sparse=sparse), rule=Adaptive(),
            loader=DataLoader(wide.data(), batch_size=B),
        )  # fmt: skip
        norms = []
        train(engine, model, optimizer, loader, each=lambda _, e=engine, norms=norms: norms.append(e.clip_norm))
        released.append((norms, wide.weights(model)))
    assert len(set(released[0][0])) > 3
    np.testing.assert_allclose(*(norms for norms, _ in released), rtol=1e-4)
    torch.testing.assert_close(*(found for _, found in released), rtol=1e-3, atol=1e-4)


def test_a_unit_that_is_not_finite_adds_nothing_to_the_sums():
    released = []
    for bad in (True, False):
        engine, model, optimizer, loader = private(planned(selection=Uniform(V)))
        x, y = next(iter(loader))
        factors = torch.ones(B, 1)
        factors[1] = float("inf") if bad else 0.0
        ((model(x) * factors).sum(1)).mean().backward()
        optimizer.step()
        released.append(grads(model.module))
    assert torch.equal(*released)


def test_a_closure_makes_the_gradients():
    released = []
    for closed in (True, False):
        engine, model, optimizer, loader = private(planned(selection=COUNTS))
        batch = next(iter(loader))
        optimizer.zero_grad()
        if closed:
            optimizer.step(lambda model=model, batch=batch: backward(model, batch))
        else:
            backward(model, batch)
            optimizer.step()
        released.append(wide.weights(model))
    assert torch.equal(*released)


def test_the_examples_of_a_user_are_cut_and_counted_together():
    plan = planned(selection=COUNTS, sigma=1e-6)
    import dataclasses

    plan = dataclasses.replace(plan, unit="user", selection=Counts(0.6, count_norm=1.0, sigma=1e-6))
    ids = wide.data()[:4][0]
    users = torch.tensor([0, 0, 0, 1])
    engine, model, optimizer, loader = private(plan, loader=[(ids, torch.zeros(4, dtype=torch.int64), users)], unit=2)
    for x, y, _ in loader:
        gradients = per_unit(model.module, (x, y))
        total = clipped_sum(torch.stack([gradients[:3].sum(0), gradients[3]]), plan.clip_norm) / plan.batch_size
        nn.functional.cross_entropy(model(x), y, reduction="mean").backward()
        optimizer.step()
    touched = np.zeros(V)
    for rows in (np.unique(ids[:3]), np.unique(ids[3])):
        touched[rows] += 1 / np.sqrt(len(rows))
    found = model.module.table.weight.grad.coalesce()
    assert found.indices()[0].tolist() == np.flatnonzero(touched >= 0.6).tolist() != []
    torch.testing.assert_close(
        found.values().double(), total[DENSE:].view(V, D)[found.indices()[0]], rtol=1e-4, atol=1e-5
    )


def test_observers_see_the_dense_part_and_the_chosen_rows():
    engine, model, optimizer, loader = private(planned(selection=COUNTS))
    told = []
    engine.on_release(lambda step, private: told.append((step, private)))
    train(engine, model, optimizer, loader, until=1)
    ((step, (dense, (rows,))),) = told
    assert step == 0
    assert torch.equal(dense, grads(model.module)[:DENSE])
    assert torch.equal(rows.to_dense(), model.module.table.weight.grad.to_dense())


def test_who_audits_sees_every_row_whatever_is_chosen():
    plan = planned(selection=COUNTS)
    engine, *_ = private(plan)
    (part,) = engine.training._tables.parts(engine.training._tables.nothing())
    total = torch.randn(V * D)
    assert torch.equal(part.of_whole(total).whole(), total)
    made = part.table.settle(part.of_whole(total), 0, engine.release.divisor)
    noise = NoiseStream(plan.strategy, source_of(plan), plan.noise_std, DENSE + V * D).next()[DENSE:]
    torch.testing.assert_close(made.double(), (total.double() + torch.from_numpy(noise)) / B, rtol=1e-5, atol=1e-5)


# -- going on after a stop ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", ["momentum", "adagrad", "adam"])
def test_a_resumed_run_is_bit_for_bit_the_one_that_was_not_stopped(tmp_path, name):
    make = {**SPARSE, **DENSELY}[name]
    plan = planned(selection=COUNTS)
    whole = private(plan, optimizer=make)
    train(*whole)
    first = private(plan, optimizer=make, checkpoint=tmp_path / "run")
    train(*first, until=7, save_every=3)
    first[0].close()
    again = private(plan, optimizer=make, checkpoint=tmp_path / "run")
    assert again[0].step == 6
    train(*again)
    assert torch.equal(wide.weights(again[1]), wide.weights(whole[1]))


class NextWords(wide.Words):
    def forward(self, ids):
        return super().forward((ids + 1) % wide.V)


def test_a_lost_step_is_repeated_with_its_own_data_or_not_at_all(tmp_path):
    """Other counts would be compared with the same coins: two answers with one noise."""
    plan = planned(selection=COUNTS)
    first = private(plan, checkpoint=tmp_path / "run")
    first[0].save()
    train(*first, until=1)
    first[0].close()
    other = private(plan, checkpoint=tmp_path / "run", make=NextWords)
    with pytest.raises(CheckpointError, match="step 0"):
        train(*other, until=1)


def test_a_copied_run_chooses_anew(tmp_path):
    """Both copies go on: one coin for two counts would tell what lies between them."""
    plan = planned(selection=Uniform(10))
    (tmp_path / "one").mkdir()
    first = private(plan, checkpoint=tmp_path / "one" / "run")
    train(*first, until=3)
    first[0].save()
    first[0].close()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    chosen = []
    for name in ("one", "two"):
        with warnings.catch_warnings():
            warnings.simplefilter("error" if name == "one" else "ignore", CheckpointWarning)
            run = private(plan, checkpoint=tmp_path / name / "run")
        rows = []
        train(*run, until=6, each=lambda _, m=run[1], rows=rows: rows.append(m.module.table.weight.grad.indices()[0]))
        run[0].close()
        chosen.append(torch.stack(rows))
    assert (chosen[0] != chosen[1]).any(1).all()


def rows_at(ids, numbers, rows=V):
    numbers = torch.tensor(numbers, dtype=torch.float64)
    return torch.sparse_coo_tensor(
        torch.tensor([ids]), numbers, (rows, *numbers.shape[1:]), is_coalesced=True, check_invariants=True
    )


def test_the_journal_is_told_of_rows_sums_and_counts():
    """Two steps that differ in any of them are not taken for one."""
    sums = [rows_at([3, 5], [[1.0, 2.0], [3.0, 4.0]]), rows_at([7], [[5.0, 6.0]])]
    counts = [rows_at([3, 5], [0.5, 1.0]), rows_at([7], [1.0])]
    steps = [
        (sums, counts),
        ([rows_at([3, 6], [[1.0, 2.0], [3.0, 4.0]]), sums[1]], counts),
        ([rows_at([3, 5], [[1.0, 2.0], [3.0, 4.5]]), sums[1]], counts),
        (sums, [rows_at([3, 5], [0.5, 0.75]), counts[1]]),
        (sums, [rows_at([2, 5], [0.5, 1.0]), counts[1]]),
        (sums, []),
        ([rows_at([3, 5], [[1.0, 2.0], [3.0, 4.0]], V + 1), sums[1]], counts),
    ]
    told = [[piece.numpy().tobytes() for piece in SelectedRows(None, *map(tuple, step)).parts()] for step in steps]
    assert len({b"".join(pieces) for pieces in told}) == len(steps)
    heads = {tuple(SelectedRows(None, *map(tuple, step)).parts()[0].tolist()) for step in steps}
    assert len(heads) == 3  # with every length and no value


def test_counts_have_a_norm_of_their_own():
    """A clip norm that moves scales sums, and no counts: somebody may be in these alone."""
    counts = rows_at([3], [0.5])
    part = SelectedRows(None, (rows_at([3], [[1.0, 2.0]]),), (counts,))
    planned = part.scaled(2.0)
    assert planned.sums[0].values().tolist() == [[2.0, 4.0]]
    assert planned.counts[0].values().tolist() == [0.5]
    nobody = rows_at([3], [[0.0, 0.0]])
    assert SelectedRows(None, (nobody,), (rows_at([3], [0.0]),)).is_zero
    assert not SelectedRows(None, (nobody,), (counts,)).is_zero
    assert not SelectedRows(None, (rows_at([3], [[0.0, 1.0]]),), (rows_at([3], [0.0]),)).is_zero


def chosen_rows(tables, release):
    return [x.indices()[0].tolist() for x in tables.each(release.of_tables)]


def sparse_rows(rows, values, height, width):
    ids = torch.tensor([list(rows)], dtype=torch.int64)
    return torch.sparse_coo_tensor(
        ids, torch.full((len(rows), *width), values), (height, *width), check_invariants=True, is_coalesced=True
    )


def test_a_lost_step_is_repeated_on_its_own_sums_and_counts_alone(tmp_path):
    plan, taken = planned(selection=Counts(0.6, sigma=0.5)), []

    def take(shape, rows=(1, 3), value=1.0, counted=(1, 3), count=0.5):
        release = ao.Release(plan, 2, key=KEY, checkpoint=tmp_path / f"run {len(rows)}")
        with release:
            tables = SelectedTables(release, [shape])
            if not release.extra:
                release.save(extra={"saved": True})
            counts = [sparse_rows(counted, count, shape[0], ())]
            part = tables.part([sparse_rows(rows, value, shape[0], shape[1:])], counts)
            private = release.step(range(B), np.zeros(2), [part])
            return private.tolist(), chosen_rows(tables, release), release.of_tables[0][0].values().tolist()

    taken = take((6, 2))
    for change in ({"rows": (1, 4)}, {"value": 1.5}, {"counted": (1, 4)}, {"count": 0.75}, {"counted": (1, 3, 4)}):
        with pytest.raises(CheckpointError, match="never the same noise"):
            take((6, 2), **change)
    assert take((6, 2)) == taken
    nothing = {"rows": (), "counted": ()}
    take((6, 2), **nothing)
    with pytest.raises(CheckpointError, match="never the same noise"):
        take((4, 3), **nothing)  # as many coordinates, other rows


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_selection_needs_a_table():
    with pytest.raises(PlanError, match="no table"):
        private(planned(selection=COUNTS), make=lambda: Words(sparse=False))


class Tied(Words):
    def __init__(self):
        super().__init__()
        self.output = nn.Linear(D, V, bias=False)
        self.output.weight = self.table.weight


def with_option(**options):
    def make():
        model = Words()
        model.table = nn.Embedding(V, D, sparse=True, **options)
        return model

    return make


def with_largest():
    model = Words(bag=True)
    model.table = nn.EmbeddingBag(V, D, mode="max", sparse=True)
    return model


@pytest.mark.parametrize("selection", [COUNTS, None])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Tied, "the weight of the table table.weight is output's too"),
        (with_option(max_norm=1.0), "max_norm"),
        (with_option(scale_grad_by_freq=True), "scale_grad_by_freq"),
        (with_largest, "mode='max'"),
    ],
)
def test_tables_that_are_more_than_lookups_are_refused(selection, make, words):
    with pytest.raises(ao.errors.AnyorderError, match=words):
        private(planned(selection=selection), make=make)


def test_a_layer_that_may_read_otherwise_is_trained_as_other_layers():
    """What a subclass does with its rows is not known."""

    class Own(nn.Embedding):
        pass

    def make():
        model = Words()
        model.table = Own(V, D, sparse=True)
        return model

    with pytest.raises(PlanError, match="no table"):
        private(planned(selection=COUNTS), make=make)


@pytest.mark.parametrize("selection", [COUNTS, None])
def test_several_processes_are_refused(selection):
    """Before anything of the model is told to the others."""
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bound = BoundParameters(model, optimizer)
    with pytest.raises(PlanError, match="trained by one process, and here are 2"):
        TrainedTables(model, bound, optimizer, planned(selection=selection), tables_in(model, bound.named), 2)


def test_a_frozen_table_is_none():
    """Nor is one that the optimizer does not hold: there is nothing to release."""

    def make():
        model = Words()
        model.table.weight.requires_grad_(False)
        return model

    engine, model, optimizer, loader = private(planned(), make=make, optimizer=lambda p: torch.optim.Adam(list(p)[:2]))
    train(engine, model, optimizer, loader, until=1)
    assert model.module.table.weight.grad is None


def test_a_gradient_from_elsewhere_is_refused():
    engine, model, optimizer, loader = private(planned(selection=COUNTS))
    backward(model, next(iter(loader)))
    model.module.table(torch.tensor([1])).sum().backward()
    with pytest.raises(TrainingError, match="did not come through the private model"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:threshold=6 is more than:anyorder.errors.SelectionWarning")  # few rows are wanted
def test_nothing_of_the_tables_size_is_made():
    """A table of 10^7 numbers: a step makes less than a hundredth of that."""
    rows = 10_000_000 // D
    plan = planned(selection=Counts(6.0, sigma=1.0))
    engine, model, optimizer, loader = private(plan, make=lambda: Words(rows=rows))
    train(engine, model, optimizer, loader, until=2)
    made = []
    with torch.profiler.profile(profile_memory=True) as profile:
        train(engine, model, optimizer, loader, until=4)
    made = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert made < 4 * 10_000_000 / 100


def test_errors_tell_no_row():
    """What is refused names tables and rules, never a row."""
    engine, model, optimizer, loader = private(planned(selection=COUNTS))
    batch = next(iter(loader))
    with pytest.raises(ao.errors.AnyorderError) as caught, warnings.catch_warnings():
        model(batch[0] + 12345)
    assert not any(str(int(i)) in str(caught.value) for i in (batch[0] + 12345).flatten())
