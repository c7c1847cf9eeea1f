"""A table is shown by a flush that the journal has first: killed, resumed, copied, it shows one draw of its noise."""

import os
import signal
import sys
import warnings

import numpy as np
import pytest
import torch

import anyorder as ao
import anyorder.release.attached_tables as tables
import anyorder.release.checkpoint as checkpoint
import anyorder.release.files as files
import anyorder.release.journal as journal
import anyorder.release.release as core
import anyorder.sparse.lazy_table as lazy_table
from anyorder.errors import ArgumentError, CheckpointError, CheckpointWarning, TrainingError
from laws.cases import STRATEGIES
from release.runs import copied
from wide_tables.tables import DENSE, DIM, KEY, ROWS, N, begun, dense_total, embedding, lazy_step, planned, sums, units

FLUSHES = (3, 5, N)  # before these steps
MODULES = (checkpoint, core, files, journal, tables, lazy_table)
CALLS = ("write", "pwrite", "fsync", "replace", "unlink", "ftruncate")


def plan(name="blt"):
    return planned(STRATEGIES[name](N))


def go_on(run, until, saves=(), flushes=FLUSHES):
    """Takes steps, and flushes and saves before those that are named. Returns: what was released and shown."""
    layer, release, table = run
    seen = {}
    while True:
        t = release.steps_taken
        if t in flushes:
            table.flush()
            seen["shown", t] = layer.weight.detach().numpy().copy()
        if t in saves:
            release.save()
        if t == until:
            return seen
        seen["private", t] = lazy_step(release, table, rate=lambda t: 0.3 if t < 4 else 0.1)


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a.keys() & b.keys())


def state(table):
    own = table.state_dict()
    return [own["table"].clone(), own["kept"].clone(), own["last"].copy(), own["steps"], own["flushed"]]


def whole(name="blt", **options):
    return go_on(begun(plan(name), **options), N)


@pytest.mark.parametrize("name", ["blt", "independent", "banded inverse"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_saved_and_resumed_it_is_the_run_that_was_not(tmp_path, name, momentum):
    path, expected = tmp_path / "run", whole(name, momentum=momentum)
    for t in range(N + 1):
        run = begun(plan(name), path=path, momentum=momentum)
        assert run[1].steps_taken == max(0, t - 1)
        seen = go_on(run, t, saves=(t,))
        assert same(seen, expected)
        assert run[2].flushed is (run[0].weight.numel() > 0) is (t == 0 or t in FLUSHES)
        before = state(run[2])
        run[1].close()
        again = begun(plan(name), path=path, momentum=momentum)
        assert all(np.array_equal(a, b) for a, b in zip(state(again[2]), before, strict=True))
        assert (again[0].weight.numel() > 0) is before[-1]
        again[1].close()


@pytest.mark.parametrize("height", [1, 4, ROWS])
def test_a_flush_by_chunks_of_rows_is_that_of_all_rows(monkeypatch, height):
    """The last chunk may be shorter; a row has the noise of its own coordinates in each."""
    expected = whole("independent")
    monkeypatch.setattr(lazy_table, "_CHUNK", height * DIM)
    seen = whole("independent")
    assert seen.keys() == expected.keys()
    assert same(seen, expected)


def test_a_lost_flush_is_made_again_by_itself_at_its_step(tmp_path):
    path = tmp_path / "run"
    run = begun(plan(), path=path)
    go_on(run, 2, saves=(2,))
    seen = go_on(run, 6, flushes=(3, 5))
    run[1].close()
    layer, release, table = begun(plan(), path=path)
    for t in range(2, 6):
        assert np.array_equal(lazy_step(release, table, rate=lambda t: 0.3 if t < 4 else 0.1), seen["private", t])
        assert table.flushed is (t + 1 in (3, 5))
        if table.flushed:
            assert np.array_equal(layer.weight.detach(), seen["shown", t + 1])
    assert same(go_on((layer, release, table), N), whole())


def test_a_flush_at_the_checkpoints_own_step_is_made_again(tmp_path):
    path = tmp_path / "run"
    run = begun(plan(), path=path)
    go_on(run, 4, saves=(4,), flushes=())
    run[2].flush()
    shown = run[0].weight.detach().clone()
    run[1].close()
    layer, _, table = begun(plan(), path=path)
    assert table.flushed
    assert torch.equal(layer.weight.detach(), shown)


def test_another_draw_of_a_shown_table_is_refused_and_not_shown(tmp_path):
    """A row that is read once more has other draws of the same law: whoever had both tables could average them."""
    path = tmp_path / "run"
    run = begun(plan(), path=path)
    go_on(run, 2, saves=(2,), flushes=())
    shown = go_on(run, 4, flushes=(4,))["shown", 4]
    run[1].close()
    run = layer, release, table = begun(plan(), path=path)
    go_on(run, 3, flushes=())
    table.read(torch.tensor([ROWS - 1]))
    with pytest.raises(CheckpointError, match="two draws of one noise"):
        go_on(run, 4, flushes=())
    assert layer.weight.numel() == 0
    assert not torch.equal(table._table[-1], torch.from_numpy(shown[-1]))
    for refused in (table.flush, lambda: go_on(run, 5, flushes=()), release.save):
        with pytest.raises((CheckpointError, TrainingError), match="two draws|broken off"):
            refused()
    assert layer.weight.numel() == 0


def test_a_flush_is_told_of_every_table(tmp_path):
    """Another draw of one of two tables is refused, whichever it is, and neither is shown."""

    def run(*extra):
        layers, release = [embedding(seed=s) for s in (0, 1)], ao.Release(plan(), 0, key=KEY, checkpoint=path)
        both = [ao.sparse.LazyTable(layer, release, lr=0.3) for layer in layers]
        if not release.steps_taken:
            release.save()
        for t in range(3):
            if t == 2 and extra:
                both[extra[0]].read(torch.tensor([ROWS - 1]))
            release.step(units(t), np.zeros(0, np.float32), [table.rows([], np.zeros((0, DIM))) for table in both])
            if t == 0:
                assert [table.flushed for table in both] == [False, False]
        return layers, release

    for extra in (None, 0, 1):
        path = tmp_path / f"run {extra}"
        with run()[1] as release:
            release.flush()
        if extra is None:
            layers, release = run()
            assert [len(layer.weight) for layer in layers] == [ROWS, ROWS]
            release.close()
            continue
        with pytest.raises(CheckpointError, match="two draws of one noise"):
            run(extra)


def test_no_flush_between_lost_steps_that_had_none(tmp_path):
    path = tmp_path / "run"
    run = begun(plan(), path=path)
    go_on(run, 2, saves=(2,), flushes=())
    seen = go_on(run, 5, flushes=())
    run[1].close()
    run = layer, _, table = begun(plan(), path=path)
    for until in (2, 3, 4):
        go_on(run, until, flushes=())
        before = state(table)
        with pytest.raises(CheckpointError, match=f"take steps {until} to 4 again"):
            table.flush()
        assert layer.weight.numel() == 0
        assert all(np.array_equal(a, b) for a, b in zip(state(table), before, strict=True))
    assert same(go_on(run, 5, flushes=()), seen)
    table.flush()
    assert table.flushed


def test_a_lost_step_is_repeated_on_its_own_rows_and_values_alone(tmp_path):
    path = tmp_path / "run"
    run = begun(plan(), path=path)
    go_on(run, 3, saves=(3,), flushes=())
    lost = lazy_step(*run[1:])
    run[1].close()
    _, release, table = begun(plan(), path=path)
    touched, values = sums(3)
    assert len(touched) == 3
    table.read(torch.from_numpy(touched))
    for rows, given, who in (
        (touched[::-1].copy(), values, units(3)),
        (touched[:2], values[:2], units(3)),
        (touched, values + 1e-3, units(3)),
        (touched, values.astype(np.float64), units(3)),
        ([*touched, ROWS - 1], np.concatenate([values, 0 * values[:1]]), units(3)),
        (touched, values, units(3)[:1]),
    ):
        with pytest.raises(CheckpointError, match="never the same noise"):
            release.step(who, dense_total(3), [table.rows(rows, given)])
    assert np.array_equal(release.step(units(3), dense_total(3), [table.rows(touched, values)]), lost)


# -- kills -----------------------------------------------------------------------------------------------------------


def killed_at(point, act, *, lines):
    """Run `act` in a child that is killed before its point-th call on files, or line of code. Whether it was."""
    child = os.fork()
    if not child:
        left = [point]

        def count():
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def counted(real):
            def call(*arguments, **named):
                count()
                return real(*arguments, **named)

            return call

        def local(frame, event, argument):
            if event == "line":
                count()
            return local

        try:
            if lines:
                names = {module.__file__ for module in MODULES}
                sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename in names else None)
            else:
                for name in CALLS:
                    setattr(os, name, counted(getattr(os, name)))
            act()
        finally:
            sys.settrace(None)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def act(path, shown):
    """What the child does: two steps, each with a flush before it, and a save; what it shows, it leaves in files."""
    layer, release, table = begun(plan(), path=path)
    for t in (3, 4, 5):
        if t in FLUSHES:
            table.flush()
            np.save(shown / f"{t}.npy", layer.weight.detach().numpy())
        if t == 4:
            release.save()
        lazy_step(release, table, rate=lambda t: 0.3 if t < 4 else 0.1)


def check(tmp_path, point, expected, *, lines):
    folder = tmp_path / str(point)
    folder.mkdir()
    path = folder / "run"
    run = begun(plan(), path=path)
    go_on(run, 3, saves=(3,), flushes=())
    run[1].close()
    was_killed = killed_at(point, lambda: act(path, folder), lines=lines)
    with warnings.catch_warnings(record=True) as doubts:
        warnings.simplefilter("always", CheckpointWarning)
        try:
            resumed = begun(plan(), path=path)
        except CheckpointError:
            assert doubts  # on a busy machine the journal's clock may need a second try, and a kill finds it between
            return was_killed, False
    if doubts:
        return was_killed, False
    seen = go_on(resumed, N)
    assert same(seen, expected)
    for t in (3, 5):
        if (folder / f"{t}.npy").exists():
            try:
                shown = np.load(folder / f"{t}.npy")
            except (EOFError, ValueError):
                continue  # it was killed while it wrote
            assert np.array_equal(shown, expected["shown", t])
    assert ("shown", 5) in seen
    resumed[1].close()
    return was_killed, True


def test_a_kill_before_each_call_on_files(tmp_path):
    expected, resumed, was_killed = whole(), [], True
    while was_killed:
        was_killed, goes_on = check(tmp_path, len(resumed), expected, lines=False)
        resumed.append(goes_on)
    assert len(resumed) > 12
    assert sum(resumed) > 0.7 * len(resumed)


def test_a_kill_at_a_line_of_code(tmp_path):
    expected = whole()
    killed, resumed = zip(*(check(tmp_path, point, expected, lines=True) for point in range(5, 700, 58)), strict=True)
    assert sum(killed) > 5
    assert sum(resumed) > 0.7 * len(resumed)


# -- copies ----------------------------------------------------------------------------------------------------------


def test_a_copied_run_goes_on_from_a_flush_alone(tmp_path):
    """Two copies that both show the table: what they share of a row's noise must not tell when it was read."""
    for saved, flushed in ((3, ()), (3, (2,)), (3, (3,))):
        path = tmp_path / f"run {saved} {flushed}"
        run = begun(plan(), path=path)
        go_on(run, saved, saves=(saved,), flushes=flushed)
        before = state(run[2])
        run[1].close()
        copied(path.with_name(f".{path.name}.journal"))
        if saved not in flushed:
            with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match="drawn again from step 3"):
                begun(plan(), path=path)
            with pytest.raises(CheckpointError, match="drawn again from step 3"):
                begun(plan(), path=path)
            continue
        with pytest.warns(CheckpointWarning, match="fresh key"):
            run = layer, release, table = begun(plan(), path=path)
        assert all(np.array_equal(a, b) for a, b in zip(state(table), before, strict=True))
        go_on(run, N, flushes=())
        table.flush()
        moved = layer.weight.detach().numpy() - before[0].numpy()
        assert (moved != whole()["shown", N] - before[0].numpy()).all()  # every coordinate has other noise
        release.close()


def test_a_run_that_was_drawn_anew_goes_on_from_later_checkpoints(tmp_path):
    """Those need no flush: what it shares with the other copy lies before the one that both began with."""
    path = tmp_path / "run"
    run = begun(plan(), path=path)
    run[1].save()
    run[1].close()
    copied(path.with_name(".run.journal"))
    with pytest.warns(CheckpointWarning, match="fresh key"):
        run = begun(plan(), path=path)
    go_on(run, 5, saves=(5,), flushes=())
    before = state(run[2])
    run[1].close()
    run = layer, release, table = begun(plan(), path=path)
    assert all(np.array_equal(a, b) for a, b in zip(state(table), before, strict=True))
    go_on(run, N, flushes=(N,))
    release.close()


def test_a_copy_whose_journal_has_steps_after_the_checkpoint(tmp_path):
    """The steps that both copies have are repeated; from the flush at their end on, noise is fresh."""
    for flushes, goes_on in (((), False), ((4,), False), ((5,), True)):
        path = tmp_path / f"run {flushes}"
        run = begun(plan(), path=path)
        go_on(run, 3, saves=(3,), flushes=())
        seen = go_on(run, 5, flushes=flushes)
        run[1].close()
        copied(path.with_name(f".{path.name}.journal"))
        if not goes_on:
            with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match="drawn again from step 5"):
                begun(plan(), path=path)
            continue
        with pytest.warns(CheckpointWarning, match="From step 5 on"):
            run = begun(plan(), path=path)
        again = go_on(run, 5, flushes=())
        assert same(again, seen)
        assert np.array_equal(run[0].weight.detach(), seen["shown", 5])
        go_on(run, N, flushes=(N,))
        run[1].close()


def test_a_copied_run_by_value_goes_on_anywhere(tmp_path):
    """Its noise is that of the dense run whatever was read, and so is what a fresh key draws anew."""
    path = tmp_path / "run"
    run = begun(plan("independent"), path=path, replay=True)
    go_on(run, 3, saves=(3,), flushes=())
    run[1].close()
    copied(path.with_name(".run.journal"))
    with pytest.warns(CheckpointWarning):
        run = begun(plan("independent"), path=path, replay=True)
    go_on(run, N, flushes=(N,))
    dense = ao.Release(plan("independent"), DENSE + ROWS * DIM, key=KEY)
    assert dense.whole_size == run[1].whole_size


# -- files that do not fit, and what they tell ------------------------------------------------------------------------


def test_a_full_disk_shows_nothing_and_a_flush_again_does(tmp_path, monkeypatch):
    run = layer, release, table = begun(plan(), path=tmp_path / "run")
    go_on(run, 3, flushes=())

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="flush again"):
        patch.setattr(os, "pwrite", full)
        table.flush()
    assert layer.weight.numel() == 0
    with pytest.raises(TrainingError, match="flush again"):
        lazy_step(release, table)
    assert same(go_on(run, N), whole())


def test_tables_of_a_resumed_run_are_those_of_the_run(tmp_path):
    path = tmp_path / "run"
    release = ao.Release(plan(), DENSE, checkpoint=path)
    layers = [embedding(ROWS, DIM), embedding(4, 3)]
    for layer in layers:
        ao.sparse.LazyTable(layer, release)
    release.save()
    release.close()

    def resumed():
        return ao.Release(plan(), DENSE, checkpoint=path)

    def attach(release, layer, **options):
        return ao.sparse.LazyTable(layer, release, **options)

    with pytest.raises(CheckpointError, match="table 0 of the checkpoint has 96 coordinates, and this one 12"):
        attach(resumed(), embedding(4, 3))
    with pytest.raises(CheckpointError, match="kept arrays"):
        attach(resumed(), embedding(ROWS, DIM), momentum=0.9)
    with pytest.raises(CheckpointError, match="kept arrays"):
        attach(resumed(), embedding(DIM, ROWS))
    with pytest.raises(CheckpointError, match="in torch.float32"):
        attach(resumed(), torch.nn.Embedding(ROWS, DIM, dtype=torch.float64))
    again = resumed()
    one = attach(again, embedding(ROWS, DIM))
    for refused in (again.flush, again.save, lambda: again.step([], np.zeros(DENSE), []), lambda: again.check(None)):
        with pytest.raises(TrainingError, match="attach the others"):
            refused()
    other = attach(again, embedding(4, 3))
    with pytest.raises(TrainingError, match="before the first step"):
        attach(again, embedding(4, 3))
    again.step([0], np.zeros(DENSE), [one.rows([], np.zeros((0, DIM))), other.rows([0], np.ones((1, 3)))])
    again.close()
    with ao.Release(plan("independent"), DENSE, checkpoint=tmp_path / "other") as release:
        attach(release, embedding(), replay=True)
        release.save()
    with (
        ao.Release(plan("independent"), DENSE, checkpoint=tmp_path / "other") as release,
        pytest.raises(CheckpointError, match="replay"),
    ):
        attach(release, embedding())


def test_sizes_of_files_do_not_tell_which_rows_were_touched(tmp_path):
    sizes = set()
    for i, touched in enumerate(([], [0], list(range(ROWS)))):
        _, release, table = begun(plan(), path=tmp_path / str(i), size=0)
        for t in range(3):
            table.step(units(t), touched, np.ones((len(touched), DIM), np.float32))
        release.save()
        names = (f"{i}", f".{i}.journal")
        sizes.add(tuple((tmp_path / name).stat().st_size for name in names))
        release.close()
    assert len(sizes) == 1


@pytest.mark.parametrize("has_files", [True, False])
def test_a_closed_run_shows_nothing(tmp_path, has_files):
    run = layer, release, table = begun(plan(), path=tmp_path / "run" if has_files else None)
    go_on(run, 2, flushes=())
    release.close()
    with pytest.raises((TrainingError, CheckpointError), match="closed"):
        table.flush()
    assert layer.weight.numel() == 0
    with pytest.raises(ArgumentError, match="ids must be integers"):
        table.read(torch.tensor([0.5]))
