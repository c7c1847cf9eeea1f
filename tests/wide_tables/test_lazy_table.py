"""A lazy table is the table of the dense run: by value where the noise is made step by step, in law where it jumps."""

import copy
import io
import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import anyorder as ao
from anyorder.accounting.selection import Counts
from anyorder.errors import ArgumentError, PlanError, StepsExhaustedError, TrainingError
from anyorder.release.ranks import Alone, OneProcess
from anyorder.release.schedules import Adaptive, FixedNorm
from anyorder.sparse.lazy_table import stand_ins_allowed
from anyorder.strategy import Tree
from laws.cases import STRATEGIES, over
from release.runs import total
from wide_tables.tables import (
    DENSE,
    DIM,
    KEY,
    ROWS,
    N,
    begun,
    dense_run,
    dense_total,
    embedding,
    initial,
    lazy_step,
    planned,
    sums,
    units,
)

OPTIMIZERS = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.5, "nesterov": True},
}
RATES = {"constant": lambda t: 0.3, "moving": lambda t: 0.3 / (1 + t), "with a pause": lambda t: 0.1 * (t % 3)}


def stateless():
    return [name for name, make in STRATEGIES.items() if not make(N).state_rows]


def jumping(hows):
    """(strategy, optimizer) that a lazy table goes with."""
    found = []
    for name, make in STRATEGIES.items():
        for how in hows:
            try:
                ao.sparse.LazyTable(embedding(), ao.Release(planned(make(N)), 0), **OPTIMIZERS[how])
            except PlanError:
                continue
            found.append((name, how))
    return found


# -- by value --------------------------------------------------------------------------------------------------------


@over("name", stateless())
@pytest.mark.parametrize("how", OPTIMIZERS)
def test_replayed_it_is_the_dense_run_bit_for_bit(name, how):
    plan, rate = planned(STRATEGIES[name](N)), RATES["moving"]
    private, tables = dense_run(plan, rate, **OPTIMIZERS[how])
    layer, release, table = begun(plan, replay=True, **OPTIMIZERS[how])
    for t in range(N):
        assert np.array_equal(lazy_step(release, table, rate=rate), private[t])
        assert layer.weight.shape == (0, DIM)
        if t in (3, 6):
            table.flush()
            assert torch.equal(layer.weight.data, tables[t + 1])
    table.flush()
    assert torch.equal(layer.weight.data, tables[N])
    with pytest.raises(StepsExhaustedError):
        table.step([], [], np.zeros((0, DIM))) if not release.size else release.step([], np.zeros(DENSE), [])


@pytest.mark.parametrize("make", [Tree, lambda n: Tree(n, estimator="full"), lambda n: Tree(n, restarts=(3,))])
@pytest.mark.parametrize("schedule", RATES)
def test_a_tree_has_the_nodes_of_the_dense_run(make, schedule):
    plan, rate = planned(make(N)), RATES[schedule]
    private, tables = dense_run(plan, rate)
    layer, release, table = begun(plan)
    assert table.by_value
    assert table.kept == 0
    for t in range(N):
        ids = torch.tensor([t % 3])
        np.testing.assert_allclose(table.read(ids), tables[t][ids], atol=2e-6)
        assert np.array_equal(lazy_step(release, table, rate=rate), private[t])
    table.flush()
    np.testing.assert_allclose(layer.weight.data, tables[N], atol=2e-6)
    moved = float((tables[N] - initial()).abs().mean())
    assert moved > 1e-2


def test_a_tree_with_momentum_jumps_in_law_and_an_online_one_not_at_all():
    assert not begun(planned(Tree(N)), momentum=0.9)[2].by_value
    with pytest.raises(PlanError, match="online"):
        begun(planned(Tree(N, estimator="online")))


def test_rows_that_are_read_are_those_of_the_dense_run():
    plan, rate = planned("independent"), RATES["constant"]
    _, tables = dense_run(plan, rate, momentum=0.9)
    _, release, table = begun(plan, replay=True, momentum=0.9)
    for t in range(N):
        ids = torch.tensor([[t % ROWS, 0], [ROWS - 1, 0]])
        assert torch.equal(table.read(ids), tables[t][ids])
        lazy_step(release, table, rate=rate)


@pytest.mark.parametrize("how", OPTIMIZERS)
def test_rows_that_nobody_read_get_what_they_missed_in_their_step(how):
    """Who has gradients of rows from elsewhere need not read them first."""
    plan, rate = planned("independent"), RATES["constant"]
    _, tables = dense_run(plan, rate, **OPTIMIZERS[how])
    layer, release, table = begun(plan, replay=True, **OPTIMIZERS[how])
    for t in range(N):
        release.step(units(t), dense_total(t), [table.rows(*sums(t))])
    table.flush()
    assert torch.equal(layer.weight.data, tables[N])


@pytest.mark.parametrize(("name", "how"), jumping(OPTIMIZERS))
@over("schedule", ["constant", "with a pause"])
def test_without_noise_a_jump_is_the_dense_run(name, how, schedule):
    """What is left is the gradients' part: equal whatever is read when. The noise is 1e-6 of it."""
    plan, rate = planned(STRATEGIES[name](N), epsilon=None, noise_multiplier=1e-6), RATES[schedule]
    _, tables = dense_run(plan, rate, **OPTIMIZERS[how])
    layer, release, table = begun(plan, **OPTIMIZERS[how])
    for t in range(N):
        lazy_step(release, table, rate=rate)
        if t == 4:
            table.flush()
    table.flush()
    scale = float((tables[N] - initial()).abs().max())
    np.testing.assert_allclose(layer.weight.data, tables[N], atol=1e-3 * scale)


# -- in law ----------------------------------------------------------------------------------------------------------


def maps(rate, momentum, nesterov):
    """(N, N): private means -> what they have moved theta by after every step."""
    result = np.zeros((N, N))
    for s in range(N):
        v = theta = 0.0
        for t in range(N):
            u = float(s == t)
            v = momentum * v + u
            theta -= rate(t) * ((u + momentum * v) if nesterov else v)
            result[t, s] = theta
    return result


@pytest.mark.parametrize(("name", "how"), jumping(["sgd", "nesterov"]))
@over("schedule", ["constant", "moving"])
def test_the_law_of_all_iterates_is_that_of_the_dense_run(name, how, schedule):
    """Every row has its own reads; over 40 000 columns the covariance of its iterates is estimated to half a percent.

    Half the noise, noise of a wrong step, a jump whose part is drawn twice: each is off by far more.
    """
    dim, rate = 40_000, RATES[schedule]
    options = {"momentum": 0.0, "nesterov": False, **OPTIMIZERS[how]}
    plan = planned(STRATEGIES[name](N))
    _, release, table = begun(plan, size=0, rows=3, dim=dim, **options)
    reads = {0: range(N + 1), 1: (3, 6, 7, N), 2: (N,)}
    seen = {row: [] for row in reads}
    begin = initial(3, dim)
    for t in range(N + 1):
        for row, at in reads.items():
            if t in at:
                seen[row].append((table.read(torch.tensor([row]))[0] - begin[row]).double().numpy())
        if t < N:
            table.lr = rate(t)
            touched = [1] if t in (3, 6) else []
            table.step(units(t), touched, np.ones((len(touched), dim), np.float32))
    A = maps(rate, **options)
    gradients = np.isin(np.arange(N), (3, 6)) / plan.batch_size
    AK = A @ plan.strategy.noising_matrix() * (plan.noise_std / plan.batch_size)
    for row, at in reads.items():
        steps = [t - 1 for t in at if t > 0]
        values = np.array(seen[row][-len(steps) :])
        expected = (AK @ AK.T)[np.ix_(steps, steps)]
        mean = (A @ gradients)[steps] if row == 1 else np.zeros(len(steps))
        size = np.sqrt(np.diag(expected))
        off = (values - mean[:, None]).mean(axis=1)
        assert np.all(np.abs(off) <= 5 * size / np.sqrt(dim))
        centred = values - mean[:, None]
        found = centred @ centred.T / dim
        assert np.all(np.abs(found - expected) <= 5 * np.outer(size, size) * np.sqrt(2 / dim))


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("name", ["independent", "blt", "banded inverse"])
def test_rows_that_lack_different_steps_jump_together_as_each_alone(name, options):
    """The noise of a row is that of its own interval, whatever is read with it."""
    states = []
    for together in (True, False):
        _, release, table = begun(planned(STRATEGIES[name](N)), size=0, rows=5, **options)
        for t in range(N):
            table.step(units(t), [t % 5], np.ones((1, DIM), np.float32))
        assert table._last.tolist() == [6, 7, 8, 4, 5]
        for rows in [range(5)] if together else [[row] for row in range(5)]:
            table.read(torch.tensor(rows))
        states.append(torch.cat([table._kept, table._table[:, None]], 1))
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("multiplier", [0.7, 1.1, 1.3, 2.9])
def test_the_noise_of_a_jump_is_never_less_than_the_plans(multiplier):
    """The dense run rounds the plan's deviation up to float32, and rows of a table have no less."""
    plan = planned("independent", noise_multiplier=multiplier, epsilon=None)
    _, release, table = begun(plan)
    lazy_step(release, table)
    ((_, scale),) = table.state_dict()["late"]["rates"]
    assert plan.noise_std <= scale * plan.batch_size * (1 + 1e-15) <= plan.noise_std * (1 + 2.0**-22)
    assert release.std == np.float32(release.std) >= plan.noise_std


def test_rows_columns_and_tables_have_noise_of_their_own():
    plan, dim = planned(STRATEGIES["blt"](N)), 2000
    release = ao.Release(plan, 3, key=KEY)
    layers = [embedding(4, dim, seed) for seed in (1, 2)]
    first, second = (ao.sparse.LazyTable(layer, release, lr=1.0) for layer in layers)
    for t in range(N):
        part = [table.rows([], np.zeros((0, dim))) for table in (second, first)]  # in any order
        release.step(units(t), np.zeros(3), part)
    release.flush()
    moved = np.concatenate(
        [layer.weight.detach().numpy() - initial(4, dim, i + 1).numpy() for i, layer in enumerate(layers)]
    )
    correlation = np.corrcoef(moved)
    assert np.abs(correlation - np.eye(8)).max() < 5 / np.sqrt(dim)
    assert release.whole_size == 3 + 8 * dim


@pytest.mark.parametrize("replay", [True, False])
def test_a_clip_norm_that_moves_scales_rows_as_it_scales_the_dense_run(replay):
    """Sums are scaled to the planned norm, noise by the norm of its step, of those that a row has missed too."""
    plan = planned("independent") if replay else planned("independent", noise_multiplier=1e-6, epsilon=None)
    schedule = Adaptive(quantile=0.3, learning_rate=1.0, share=0.3)

    def run(size):
        return ao.Release.of_ranks(plan, OneProcess(size), schedule, key=KEY, checkpoint=None, place="test")

    dense, lazy = run(DENSE + ROWS * DIM), run(DENSE)
    layer = embedding()
    table = ao.sparse.LazyTable(layer, lazy, lr=0.3, replay=replay)
    weight, norms = initial(), []
    for t in range(N):
        total = torch.from_numpy(dense_total(t))
        touched, values = sums(t)
        whole = torch.zeros(ROWS, DIM)
        whole[torch.from_numpy(touched)] = torch.from_numpy(values)
        (expected,) = dense.take(dense.check(units(t)), [torch.cat([total, whole.view(-1)])])
        (private,) = lazy.take(lazy.check(units(t)), [total.clone()], tables=[table.rows(touched, values)])
        assert torch.equal(private, expected[:DENSE])
        weight.add_(expected[DENSE:].view(ROWS, DIM), alpha=-0.3)
        for release in (dense, lazy):
            release.record_count(t, 5.0 * t)
        assert dense.clip_norm == lazy.clip_norm
        norms.append(lazy.clip_norm)
    lazy.flush()
    assert len(set(norms)) == N
    if replay:
        assert torch.equal(layer.weight.data, weight)
    else:
        np.testing.assert_allclose(layer.weight.data, weight, atol=1e-4)


def test_the_padding_row_moves_as_in_the_dense_run():
    plan, rate = planned("independent"), RATES["constant"]
    _, tables = dense_run(plan, rate)
    layer = nn.Embedding(ROWS, DIM, padding_idx=ROWS - 1)
    layer.weight.data = initial()
    _, release, table = begun(plan, replay=True, layer=layer)
    while release.steps_taken < N:
        lazy_step(release, table, rate=rate)
    table.flush()
    assert torch.equal(layer.weight.data, tables[N])
    assert not torch.equal(layer.weight.data[-1], initial()[-1])


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_an_unflushed_table_is_nowhere_to_be_seen():
    layer, release, table = begun(planned("independent"))
    weight, model = layer.weight, nn.Sequential(layer)
    assert table.flushed
    assert torch.equal(model.state_dict()["0.weight"], initial())
    lazy_step(release, table)
    assert layer.weight is weight
    assert not table.flushed
    assert weight.shape == (0, DIM)
    assert next(model.parameters()).numel() == 0
    saving = lambda one: torch.save(one, io.BytesIO())  # noqa: E731
    for show in (copy.deepcopy, pickle.dumps, saving):  # a copy would have no rows, and nothing to flush
        for one in (model, layer, weight, torch.optim.SGD(model.parameters())):
            with pytest.raises(TrainingError, match="not flushed.* flush\\(\\) first"):
                show(one)
    with pytest.raises(TrainingError, match="not flushed"):
        model.state_dict()
    with stand_ins_allowed():
        assert model.state_dict()["0.weight"].shape == (0, DIM)
    table.flush()
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(one.state_dict()["0.weight"], weight)
        assert not vars(one[0].weight)
    assert table.flushed
    assert layer.weight is weight
    assert weight.data_ptr() == table._table.data_ptr()
    shown = model.state_dict()["0.weight"].clone()
    lazy_step(release, table)
    assert weight.numel() == 0
    table.flush()
    assert not torch.equal(weight.data, shown)
    assert (weight.data != initial()).all()  # each row, touched or not


def test_observers_see_nothing_of_a_lazy_table():
    _, release, table = begun(planned("independent"))
    seen = []
    release.on_release(lambda t, private: seen.append((t, private)))
    private = lazy_step(release, table)
    assert np.array_equal(seen[0][1], private)
    assert private.shape == (DENSE,)
    assert release.of_tables == []


def test_an_audit_sees_whole_tables():
    """Canaries lie in any row; what a guest adds is in the state, and observers see the private mean of all rows."""
    plan = planned("blt", noise_multiplier=1e-4, epsilon=None)
    for options in OPTIMIZERS.values():
        _, release, table = begun(plan, lr=0.7, **options)
        added, seen = [], []

        def guest(t, pieces, divisor, added=added):
            new = [piece + torch.full_like(piece, t + 1.0) for piece in pieces]
            added.append(torch.cat([piece.reshape(-1) for piece in new]) / divisor)
            return new

        release.admit(guest)
        release.on_release(lambda t, private, seen=seen: seen.append(private))
        for _ in range(N):
            lazy_step(release, table)
        for private, mean in zip(seen, added, strict=True):
            assert private.shape == (release.whole_size,)
            np.testing.assert_allclose(private, mean, atol=2e-2)
    with pytest.raises(ArgumentError, match="lr must be above 0"):
        _, release, table = begun(plan, lr=0.0)
        release.admit(guest)
        lazy_step(release, table)


def test_a_guest_sees_tables_in_the_order_in_which_they_are_attached():
    """Whatever the order of a step's parts: canaries lie at coordinates."""
    release, seen = ao.Release(planned("independent"), 0), []
    first, second = (ao.sparse.LazyTable(embedding(rows, 2), release) for rows in (3, 5))
    release.admit(lambda t, pieces, divisor: seen.append([len(piece) for piece in pieces]) or pieces)
    parts = [table.rows([0], np.ones((1, 2), np.float32)) for table in (second, first)]
    release.step(units(0), np.zeros(0, np.float32), parts)
    assert seen == [[0, 6, 10]]


def test_canaries_are_planted_in_tables_and_their_coins_heard():
    """With little noise every coin is heard, in rows that no unit touches too."""
    plan = planned("independent", noise_multiplier=1e-3, epsilon=None)
    _, release, table = begun(plan)
    canaries = ao.audit.Canaries(release.whole_size, 40, release.whole_size, seed=1)
    planted = ao.audit.plant(release, canaries, key=KEY, informed=True)
    for _ in range(N):
        lazy_step(release, table)
    with pytest.raises(TrainingError, match="before canaries are planted"):
        ao.sparse.LazyTable(embedding(), release)
    result = planted.result()
    assert np.array_equal(result.scores > 0.5 * result.scores.max(), result.included)
    assert 0 < result.included.sum() < 40


# -- cost ------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the most elements that an operation returned in memory of its own."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {id(x) for x in args}
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor) and id(one) not in given:
                self.most = max(self.most, one.numel())
        return result


def test_a_step_makes_nothing_of_the_tables_size():
    rows, dim = 1_000_000, 4
    _, release, table = begun(planned(STRATEGIES["blt"](N)), rows=rows, dim=dim)
    lazy_step(release, table)
    touched, values = np.array([7, 9, rows - 1]), np.ones((3, dim), np.float32)
    tracemalloc.start()
    with Largest() as seen:
        for t in range(1, 4):
            table.read(torch.from_numpy(touched))
            release.step(units(t), np.zeros(DENSE), [table.rows(touched, values)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen.most <= 100
    assert peak < rows


def test_the_memory_is_the_table_and_what_is_kept():
    plan = planned(STRATEGIES["blt"](N))
    layer, release, table = begun(plan, momentum=0.9)
    assert table.kept == plan.strategy.state_rows + 1
    held = [x for x in vars(table).values() if isinstance(x, torch.Tensor | np.ndarray)]
    assert sum(x.nbytes for x in held) == layer.weight.nbytes * (2 + table.kept) + 4 * ROWS  # the weight is the table


# -- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_a_lazy_table_is_refused():
    plan = planned("independent")

    class Mine(nn.Embedding):
        pass

    for layer, message in (
        (nn.Embedding(4, 3, max_norm=1.0), "max_norm"),
        (nn.Embedding(4, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.Embedding(4, 3, dtype=torch.bfloat16), "float32 or float64"),
        (nn.Linear(3, 4), "nn.Embedding or nn.EmbeddingBag"),
        (Mine(4, 3), "subclasses"),
        (nn.Embedding(4, 3, device="meta"), "with memory"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ao.sparse.LazyTable(layer, ao.Release(plan, 0))
    for options, message in (
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"nesterov": True}, "nesterov"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ao.sparse.LazyTable(embedding(), ao.Release(plan, 0), **options)
    with pytest.raises(ArgumentError, match="anyorder Release"):
        ao.sparse.LazyTable(embedding(), plan)
    with pytest.raises(PlanError, match="secure"):
        ao.sparse.LazyTable(embedding(), ao.Release(planned("independent", secure=True), 0))
    with pytest.raises(PlanError, match="replay=True"):
        ao.sparse.LazyTable(embedding(), ao.Release(planned(STRATEGIES["blt"](N)), 0), replay=True)

    class Two(Alone):
        size = 2

    several = ao.Release.of_ranks(plan, OneProcess(3, Two()), FixedNorm(), key=KEY, checkpoint=None, place="test")
    with pytest.raises(PlanError, match="this run has 2 ranks"):
        ao.sparse.LazyTable(embedding(), several)


def test_a_weight_has_one_table_and_a_release_its_tables_from_the_start():
    plan = planned("independent")
    layer, release, table = begun(plan)
    with pytest.raises(TrainingError, match="one table for each weight"):
        ao.sparse.LazyTable(layer, ao.Release(plan, 0))
    lazy_step(release, table)
    with pytest.raises(TrainingError, match="before the first step"):
        ao.sparse.LazyTable(embedding(), release)
    release.close()
    with pytest.raises(TrainingError, match="stand-in of another table"):
        ao.sparse.LazyTable(layer, ao.Release(plan, 0))
    with pytest.raises(TrainingError, match="closed"):
        table.read(torch.tensor([0]))
    other = ao.Release(plan, 3)
    other.step([0], np.zeros(3))
    with pytest.raises(TrainingError, match="before the first step"):
        ao.sparse.LazyTable(embedding(), other)


def snapshot(release, table):
    own = table._table.clone(), table._kept.clone(), table._last.copy(), table._steps, table.flushed
    return release._noise.state_dict()["t"], release.ledger.to_bytes(), own


def same(a, b):
    return a[:2] == b[:2] and all(np.array_equal(x, y) for x, y in zip(a[2], b[2], strict=True))


def test_what_is_refused_changes_nothing_and_names_no_row():
    plan = planned("independent")
    _, release, table = begun(plan)
    lazy_step(release, table)
    other = begun(plan)[2]
    before, one = snapshot(release, table), np.ones((2, DIM), np.float32)
    for rows, values, message in (
        ([1, 1], one, "distinct"),
        ([0, ROWS], one, f"0 .. {ROWS - 1}"),
        ([-1, 0], one, f"0 .. {ROWS - 1}"),
        ([0], one, "one for each row"),
        ([0.0, 1.0], one, "integers"),
        ([0, 1], one[:, :-1], "as wide as the table"),
        ([0, 1], one.astype(np.int64), "float32 or float64"),
        ([0, 1], one * np.nan, "finite"),
        ([0, 1], one.tolist(), "NumPy array"),
    ):
        with pytest.raises(ArgumentError, match=message) as caught:
            release.step(units(1), total(1, (DENSE,)), [table.rows(rows, values)])
        assert str(ROWS) + "," not in str(caught.value)
    good = table.rows([0, 1], one)
    for parts, message in (
        ([], "one part for each"),
        ([good, good], "one part for each"),
        ([other.rows([0, 1], one)], "one part for each"),
        ([(0, 1)], "LazyTable.rows"),
    ):
        with pytest.raises(ArgumentError, match=message):
            release.step(units(1), total(1, (DENSE,)), parts)
    with pytest.raises(ArgumentError, match="in addition to the table"):
        table.step(units(1), [0, 1], one)
    with pytest.raises(ArgumentError, match="sum of nobody"):
        release.step([], np.zeros(DENSE), [good])
    for ids in (torch.tensor([0, ROWS]), torch.tensor([-1])):
        with pytest.raises(ArgumentError, match=f"0 .. {ROWS - 1}"):
            table.read(ids)
    with pytest.raises(ArgumentError, match="integers"):
        table.read(torch.tensor([0.5]))
    assert same(snapshot(release, table), before)
    release.step([], np.zeros(DENSE), [table.rows([0, 1], 0 * one)])  # touched, by nobody
    assert release.steps_taken == 2


def test_a_plan_with_a_selection_needs_a_table_that_selects():
    plan = planned("independent", selection=Counts(3.0))
    release = ao.Release(plan, DENSE)
    with pytest.raises(PlanError, match="it needs a table"):
        release.step([0], np.zeros(DENSE))
    with pytest.raises(PlanError, match=r"without ao\.mechanism\(selection="):
        ao.sparse.LazyTable(embedding(), release)


@pytest.mark.parametrize("where", ["jump", "step", "_write"])
def test_a_step_that_was_broken_off_ends_the_run(where, monkeypatch):
    _, release, table = begun(planned(STRATEGIES["blt"](N)))
    lazy_step(release, table)

    def broken(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(table if where == "_write" else table._late, where, broken)
        release.step(units(1), total(1, (DENSE,)), [table.rows([2], np.ones((1, DIM)))])
    for refused in (
        lambda: release.step(units(1), total(1, (DENSE,)), [table.rows([2], np.ones((1, DIM)))]),
        table.flush,
    ):
        with pytest.raises(TrainingError, match="resume from the last checkpoint"):
            refused()


def test_a_read_that_was_broken_off_ends_the_run_only_where_rows_were_written(monkeypatch):
    _, release, table = begun(planned("independent"))
    lazy_step(release, table)
    for where, ends in (("jump", False), ("_write", True)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(table if ends else table._late, where, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            table.read(torch.tensor([4]))
        assert table._busy is ends
    with pytest.raises(TrainingError, match="resume from the last checkpoint"):
        table.read(torch.tensor([1]))


def test_bags_and_doubles():
    layer = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, dtype=torch.float64)
    _, release, table = begun(planned("independent"), layer=layer, size=0)
    lazy_step(release, table)
    assert table.read(torch.tensor([1], dtype=torch.int32)).dtype == torch.float64
    table.flush()
    assert layer(torch.tensor([[0, 1]])).shape == (1, DIM)
