"""A release from plain arrays: the planned mechanism, and the same bits after a refusal."""

import dataclasses

import numpy as np
import pytest
import torch

import anyorder as ao
from anyorder.errors import ArgumentError, CheckpointError, ParticipationError, StepsExhaustedError, TrainingError
from anyorder.noise import NoiseSource
from anyorder.noise.discrete import GridStream
from laws.cases import STRATEGIES
from release.runs import KEY, SIZE, N, expected, planned, state, taken, total, units

# -- the mechanism ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_is_the_planned_mechanism_for_every_strategy(name):
    plan = planned(STRATEGIES[name](N))
    for made, row in zip(taken(ao.Release(plan, SIZE, key=KEY), N), expected(plan), strict=True):
        assert made.dtype == np.float32
        assert np.array_equal(made, row)


@pytest.mark.parametrize("shape", [(SIZE,), (3, 4), (2, 3, 2), (1, SIZE, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_and_tensors_of_any_shape_give_the_same_numbers(shape, dtype):
    plan = planned()
    arrays, tensors = (ao.Release(plan, SIZE, key=KEY) for _ in range(2))
    rows = expected(plan, dtype)
    for t in range(N):
        given = total(t).astype(dtype).reshape(shape)
        kept = given.copy()
        as_array, as_tensor = arrays.step(units(t), given), tensors.step(units(t), torch.from_numpy(given))
        assert (type(as_array), as_array.shape, as_array.dtype) == (np.ndarray, shape, dtype)
        assert (as_tensor.shape, as_tensor.dtype) == (torch.Size(shape), torch.from_numpy(given).dtype)
        assert np.array_equal(as_array.reshape(-1), rows[t])
        assert np.array_equal(as_tensor.numpy().reshape(-1), rows[t])
        assert np.array_equal(given, kept)
        as_array[...] = 0  # the caller's own: nothing is shared
        as_tensor.zero_()


def test_a_total_of_nobody_must_be_zero():
    """Else somebody's part is in it whom no record names."""
    plan, zero = planned(), np.zeros(SIZE, np.float32)
    release, other = (ao.Release(plan, SIZE, key=KEY) for _ in range(2))
    for wrong in (total(0), np.eye(1, SIZE, SIZE - 1, dtype=np.float32)[0] * 1e-30):
        with pytest.raises(ArgumentError, match="the sum of nobody must be zero"):
            release.step([], wrong)
    assert release.steps_taken == 0
    assert np.array_equal(release.step([], zero), other.step([], zero))


def test_each_run_has_a_key_of_its_own():
    first, second = (ao.Release(planned(), SIZE) for _ in range(2))
    assert first.evidence().key_fingerprint != second.evidence().key_fingerprint
    assert first.evidence().record_key != second.evidence().record_key
    assert not np.array_equal(first.step(units(0), total(0)), second.step(units(0), total(0)))


def test_evidence_holds_no_key_that_noise_or_coins_follow_from():
    plan = planned()
    source = NoiseSource(KEY).derive(plan.digest.encode())
    keys = {KEY, source.key, source.derive(b"sampling").key}
    assert ao.Release(plan, SIZE, key=KEY).evidence().record_key not in keys


def test_totals_in_any_memory_order_are_read_row_by_row():
    plan = planned()
    plain, turned = (ao.Release(plan, SIZE, key=KEY) for _ in range(2))
    values = total(0, (3, 4))
    fortran = np.asfortranarray(values)
    fortran.flags.writeable = False
    assert np.array_equal(plain.step([0], values), turned.step([0], fortran))
    other = ao.Release(plan, SIZE, key=KEY)
    strided = torch.from_numpy(np.repeat(values, 2, axis=1))[:, ::2].requires_grad_()
    assert np.array_equal(other.step([0], strided).numpy(), ao.Release(plan, SIZE, key=KEY).step([0], values))


def test_an_engine_and_a_release_of_one_plan_and_key_are_one_mechanism():
    model = torch.nn.Linear(3, 4, bias=False)
    torch.nn.init.zeros_(model.weight)
    x = torch.randn(N * 2, 3, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(x)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    plan = ao.plan(dataset_size=N * 2, batch_size=2, epochs=1, epsilon=4, delta=1e-5, mechanism="tree")
    engine = ao.PrivacyEngine(plan, key=KEY)
    release = ao.Release(plan, SIZE, key=KEY)
    model, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), 0.0), loader)
    for t, (batch,) in enumerate(loader):
        optimizer.zero_grad()
        model(batch).sum(1).mean().backward()
        optimizer.step()
        parts = batch.unsqueeze(1).expand(-1, 4, -1)
        bounded = ao.bounded_sum(parts, [2 * t, 2 * t + 1], plan.clip_norm)
        made = release.step([2 * t, 2 * t + 1], bounded)
        torch.testing.assert_close(made, next(model.parameters()).grad, rtol=1e-5, atol=1e-6)
    assert release.certificate() == dataclasses.replace(engine.evidence(), isolation=None).certificate


def test_grid_plans_take_integers_and_are_exact():
    plan = planned("independent", secure=True)
    release = ao.Release(plan, SIZE, key=KEY)
    stream = GridStream(plan.strategy, NoiseSource(KEY).derive(plan.digest.encode()), plan.noise_std, plan.grid, SIZE)
    for t in range(N):
        sums = ao.bounded_sum(total(t, (2, SIZE)), units(t), plan.clip_norm, grid=plan.grid)
        assert sums.dtype == np.int64
        made = release.step(units(t), sums)
        assert made.dtype == np.float64
        assert np.array_equal(made, (sums + stream.next()) * plan.grid / plan.batch_size)
    with pytest.raises(ArgumentError, match="must be int64, in steps of the plan's grid"):
        ao.Release(plan, SIZE).step([0], total(0))


# -- refusals --------------------------------------------------------------------------------------------------------

REFUSED = {
    "a unit too early": ([0], total(0), ParticipationError),
    "units of two kinds": ([1, "a"], total(0), ArgumentError),
    "other names than before": (["a"], total(0), ArgumentError),
    "one id": ("abc", total(0), ArgumentError),
    "a total of another size": ([2], total(0, (SIZE + 1,)), ArgumentError),
    "a list": ([2], total(0).tolist(), ArgumentError),
    "a masked array": ([2], np.ma.masked_array(total(0)), ArgumentError),
    "integers": ([2], np.ones(SIZE, np.int64), ArgumentError),
    "half precision": ([2], torch.ones(SIZE, dtype=torch.bfloat16), ArgumentError),
    "half precision of an array": ([2], total(0).astype(np.float16), ArgumentError),
    "bytes in another order": ([2], total(0).astype(">f4"), ArgumentError),
    "complex numbers": ([2], total(0).astype(np.complex64), ArgumentError),
    "no memory": ([2], torch.ones(SIZE, device="meta"), ArgumentError),
    "a sparse tensor": ([2], torch.eye(SIZE)[0].to_sparse(), ArgumentError),
    "NaN": ([2], np.where(np.arange(SIZE) == 3, np.nan, total(0)), ArgumentError),
    "infinities of both signs": ([2], np.resize([np.inf, -np.inf], SIZE), ArgumentError),
    "an infinity in a tensor": ([2], torch.from_numpy(total(0)).index_fill(0, torch.tensor(2), np.inf), ArgumentError),
}


@pytest.mark.parametrize("name", ["tree", "blt"])
@pytest.mark.parametrize("with_file", [False, True])
def test_what_is_refused_changes_nothing(name, with_file, tmp_path):
    plan = planned(STRATEGIES[name](N))
    path = tmp_path / "run.ckpt" if with_file else None
    release = ao.Release(plan, SIZE, key=KEY, checkpoint=path)
    seen = []
    release.on_release(lambda t, private: seen.append(t))
    made = []
    for t in range(N):
        if t % 4 == 1:  # unit 0 was in the step before
            journal = path and (tmp_path / ".run.ckpt.journal").read_bytes()
            before = state(release)
            for who, what, kind in REFUSED.values():
                with pytest.raises(kind):
                    release.step(who, what)
                assert state(release) == before
            assert journal == (path and (tmp_path / ".run.ckpt.journal").read_bytes())
        made.append(release.step(units(t), total(t)))
    assert all(np.array_equal(a, b) for a, b in zip(made, expected(plan), strict=True))
    assert seen == list(range(N))
    with pytest.raises(StepsExhaustedError, match="all 8 planned steps"):
        release.step([], total(0))


def test_the_error_of_a_total_that_is_not_finite_holds_no_value():
    release = ao.Release(planned(), SIZE)
    values = total(0)
    values[[3, 5]] = np.inf, 7654321
    with pytest.raises(ArgumentError) as caught:
        release.step([1], values)
    assert "7654321" not in str(caught.value)
    assert "inf" not in str(caught.value).replace("infinit", "")


def test_large_finite_totals_pass():
    """Their sum overflows, they do not."""
    release = ao.Release(planned(), SIZE)
    assert np.isfinite(release.step([0], np.full(SIZE, 3e38, np.float32))).all()
    assert np.isfinite(release.step([1], np.full(SIZE, 1.7e308))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_total_of_torch_is_that_of_numpy_and_stays_as_it_is(dtype):
    given = (torch.arange(1 << 20, dtype=dtype) / 3).reshape(1024, 1024).T  # not in row-major order
    before = given.clone()
    expected = ao.Release(planned(), 1 << 20, key=bytes(32)).step([0], given.numpy().copy())
    assert np.array_equal(ao.Release(planned(), 1 << 20, key=bytes(32)).step([0], given).numpy(), expected)
    assert torch.equal(given, before)
    given[1023, 1023] = torch.nan
    with pytest.raises(ArgumentError, match="finite"):
        ao.Release(planned(), 1 << 20).step([0], given)


@pytest.mark.parametrize("size", [-1, 2.5, "12", True])
def test_sizes_are_integers_that_are_not_negative(size):
    with pytest.raises(ArgumentError, match="size"):
        ao.Release(planned(), size)


def test_a_release_of_size_0_takes_no_step_without_tables():
    release = ao.Release(planned(), 0)
    for refused in (lambda: release.step([0], np.zeros(0, np.float32)), lambda: release.check(None)):
        with pytest.raises(TrainingError, match="size 0 has tables alone"):
            refused()
    assert release.steps_taken == 0


def test_a_plan_and_a_key_are_needed_as_they_are(tmp_path):
    with pytest.raises(ArgumentError, match="plan must be an anyorder Plan"):
        ao.Release({"n": 8}, SIZE)
    with pytest.raises(ArgumentError, match="key must be 32 bytes"):
        ao.Release(planned(), SIZE, key=b"short")
    with pytest.raises(CheckpointError, match="folder"):
        ao.Release(planned(), SIZE, checkpoint=tmp_path / "nowhere" / "run.ckpt")


def test_two_threads_cannot_take_one_step():
    release = ao.Release(planned(), SIZE)
    caught = []

    def again(t, private):
        try:
            release.step([3], total(1))
        except TrainingError as error:
            caught.append(str(error))

    release.on_release(again)
    release.step([0], total(0))
    assert release.steps_taken == 1
    assert "one at a time" in caught[0]


def test_a_step_broken_off_half_way_ends_the_release(monkeypatch):
    release = ao.Release(planned(), SIZE)
    release.step([0], total(0))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(release.ledger, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            release.step([1], total(1))
    with pytest.raises(TrainingError, match="broken off half way"):
        release.step([1], total(1))
