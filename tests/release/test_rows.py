"""Rows of a table, released at their own cost, are those of the whole table."""

import numpy as np
import pytest
import torch

import anyorder as ao
from anyorder.errors import ArgumentError, CheckpointError, StepsExhaustedError
from laws.cases import STRATEGIES
from release.runs import KEY, SIZE, N, planned, state, total, units


def stateless():
    return [name for name, make in STRATEGIES.items() if not make(N).state_rows]


@pytest.mark.parametrize("name", stateless())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_those_of_the_whole_table(name, dtype):
    plan = planned(STRATEGIES[name](N))
    table, chosen = ao.Release(plan, SIZE, key=KEY), ao.Release(plan, SIZE, key=KEY)
    for t in range(N):
        values = total(t, (4, 3), dtype)
        rows = np.random.default_rng(t).permutation(4)[: t % 5]
        given = values[rows] if t % 2 else torch.from_numpy(values[rows])
        made = chosen.step_rows(units(t), rows, given)
        assert type(made) is type(given)
        assert np.array_equal(np.asarray(made), table.step(units(t), values)[rows])
    assert chosen.certificate() == table.certificate()
    with pytest.raises(StepsExhaustedError):
        chosen.step_rows([], [0], values[:1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_divided_as_the_whole_table_is(dtype):
    """By a number whose inverse is no float32."""
    plan = planned("independent", batch_size=3)
    values = 1e3 * total(0, (4, 3), dtype)
    whole = ao.Release(plan, SIZE, key=KEY).step([0], values)
    assert np.array_equal(ao.Release(plan, SIZE, key=KEY).step_rows([0], np.arange(4), values), whole)


def test_rows_that_do_not_fit_are_refused_and_change_nothing(tmp_path):
    release = ao.Release(planned("independent"), SIZE, checkpoint=tmp_path / "run.ckpt")
    before, values = state(release), total(0, (2, 3))
    for rows, given, message in (
        ([0, 0], values, "distinct"),
        ([0, 4], values, r"0 \.\. 3"),
        ([-1, 0], values, r"0 \.\. 3"),
        ([0], values, "one for each row"),
        ([0.0, 1.0], values, "integers"),
        ([0, 1], values[:, :0], "no rows of 0"),
        ([0, 1], total(0, (2, 5)), "no rows of 5"),
        ([0, 1], values[0], "width"),
        ([0, 1], values.astype(np.int64), "float32 or float64"),
        ([0, 1], values * np.inf, "finite"),
        ([0, 1], values.tolist(), "NumPy array"),
    ):
        with pytest.raises(ArgumentError, match=message):
            release.step_rows([0], rows, given)
        assert state(release) == before
    for plan in (planned(STRATEGIES["blt"](N)), planned("independent", secure=True)):
        with pytest.raises(ArgumentError, match="rows alone"):
            ao.Release(plan, SIZE).step_rows([0], [0, 1], values)


def test_a_lost_step_of_rows_is_replayed_on_these_rows_alone(tmp_path):
    path, plan, values = tmp_path / "run.ckpt", planned("independent"), total(0, (2, 3))
    release = ao.Release(plan, SIZE, checkpoint=path)
    release.save()
    lost = release.step_rows([0], [1, 3], values)
    release.close()
    again = ao.Release(plan, SIZE, checkpoint=path)
    whole = np.zeros((4, 3), np.float32)
    whole[[1, 3]] = values
    for call in (
        lambda: again.step_rows([0], [1, 2], values),
        lambda: again.step_rows([0], [3, 1], values),
        lambda: again.step([0], whole),
        lambda: again.step_rows([1], [1, 3], values),
    ):
        with pytest.raises(CheckpointError, match="never the same noise"):
            call()
    assert np.array_equal(again.step_rows([0], [1, 3], values), lost)


def test_rows_of_the_same_bytes_and_another_width_are_other_data(tmp_path):
    plan, values = planned("independent"), total(0, (2, 2), np.float64)
    release = ao.Release(plan, 8, checkpoint=tmp_path / "run.ckpt")
    release.save()
    lost = release.step_rows([0], [0, 1], values)
    release.close()
    again = ao.Release(plan, 8, checkpoint=tmp_path / "run.ckpt")
    for other in (values.view(np.float32), values.view(np.float32)[:, ::2].copy()):
        with pytest.raises(CheckpointError, match="never the same noise"):
            again.step_rows([0], [0, 1], other)
    assert np.array_equal(again.step_rows([0], [0, 1], values), lost)
