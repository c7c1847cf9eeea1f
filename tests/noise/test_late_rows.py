"""Rows of a table carried over missed steps: the same bits on every instruction set as in NumPy, in place."""

import numpy as np
import pytest

from anyorder._library import PATHS
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource, compiled
from anyorder.noise.compiled import TableMemory, kernel
from anyorder.noise.lazy import Jump, Jumps, carried, carry
from anyorder.strategy import BLT, Independent, ToeplitzBanded, Tree

KEY = bytes(range(32))
KERNELS = [*(PATHS[: PATHS.index(kernel().name) + 1] if kernel() else ())]
STEPS = 64
STRATEGIES = {
    "independent": (Independent(STEPS), {}),
    "momentum": (Independent(STEPS), {"momentum": 0.9, "nesterov": True}),
    "blt": (BLT([0.9, 0.4], [0.2, 0.1], STEPS), {}),
    "bands": (ToeplitzBanded(np.linspace(1, 0.1, 20), STEPS), {"momentum": 0.5}),
    "tree": (Tree(STEPS, estimator="full"), {"by_value": True}),
}


def jumps_of(name):
    strategy, options = STRATEGIES[name]
    jumps = Jumps(strategy, **options)
    for t in range(STEPS):
        jumps.record(t, 0.1, 0.5)
    return jumps


def table(rng, size, rows, width, kind, layout):
    """Arrays of a table: each for itself, or those of a row together."""
    values = rng.standard_normal((size, rows, width) if layout == "apart" else (rows, size, width)).astype(kind)
    return values, list(values if layout == "apart" else values.transpose(1, 0, 2))


def check(names, jump, width, kind, layout="together", sums_kind=None, rows=150, first=11):
    """The kernels of these names against NumPy."""
    rng = np.random.default_rng(width)
    size, k = jump.Phi.shape[1], len(jump.which)
    chosen = rng.permutation(rows)[:k]
    sums = None if sums_kind is None else rng.standard_normal((k, width)).astype(sums_kind)
    into = None if sums is None else np.where(rng.random(size) < 0.5, 0, rng.standard_normal(size))
    made, arrays = table(rng, size, rows, width, kind, layout)
    before = made.copy()
    expected = [x.copy() for x in arrays]
    state, reference = np.stack([x[chosen] for x in arrays]), NoiseSource(KEY, kernel="reference")
    numbers = carried(reference, jump, state, chosen, first, sums, into)
    for x, new in zip(expected, numbers, strict=True):
        x[chosen] = new
    for name in names:
        made[:] = before
        carry(NoiseSource(KEY, kernel=name), jump, TableMemory(arrays, first), chosen, sums, into)
        for x, right in zip(arrays, expected, strict=True):
            assert x.tobytes() == right.tobytes(), name
        assert made.tobytes() != before.tobytes()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("width", "kind", "sums"), [
    (1, "f4", "f4"), (7, "f8", None), (33, "f4", None), (100, "f4", "f8"), (128, "f8", "f4"), (1000, "f4", "f4"),
])  # fmt: skip
def test_bits_are_those_of_numpy(strategy, width, kind, sums):
    jumps = jumps_of(strategy)
    starts = np.random.default_rng(1).integers(0, 60, 5 if width > 500 else 140)
    for given, layout in ((starts, "together"), (np.full(3, 59), "apart"), (np.full(70, 3), "together")):
        check(["reference", *KERNELS], jumps.over(given, 60), width, kind, layout, sums)


@pytest.mark.parametrize("name", ["reference", *KERNELS])
def test_zeros_are_left_out_and_numbers_that_are_none_stay_where_they_are(name):
    """What has the factor 0 is left out, were it infinite; and the first sum of -0 is 0."""
    Phi, R = np.array([[[1.0, 0], [0, 1]]]), np.array([[[0.0, 0, 0], [0, 0.5, 0]]])
    jump = Jump(Phi, R, np.array([[1, 2, 3]]), np.zeros(3, np.int64))
    arrays = [np.full((4, 20), -0.0, np.float32), np.full((4, 20), np.inf, np.float32)]
    source = NoiseSource(KEY, kernel=name)
    carry(source, jump, TableMemory(arrays, 0), np.array([0, 1, 3]))
    assert not np.signbit(arrays[0][[0, 1, 3]]).any()
    assert np.signbit(arrays[0][2]).all()
    assert np.isposinf(arrays[1]).all()
    arrays[1][:] = 0
    carry(source, jump, TableMemory(arrays, 0), np.array([0, 1, 3]))
    assert np.array_equal(arrays[1][3], source.normal(2, 60, 80) / 2)  # the second normal, of the row's own place


def test_threads_change_nothing_and_rare_radii_are_there(monkeypatch):
    """Enough normals that some need further bits."""
    monkeypatch.setattr(compiled, "_threads", lambda: 3)
    jump = jumps_of("blt").over(np.arange(600) % 50, 50)
    check(KERNELS, jump, 300, "f4", rows=700)


def test_jumps_of_many_normals():
    """Beyond what the kernel has room for NumPy does it."""
    rng = np.random.default_rng(0)
    for w in (64, 127, 128, 129):
        jump = Jump(
            np.ones((2, 1, 1)), rng.standard_normal((2, 1, w)), rng.integers(0, 2**60, (2, w)), np.arange(9) % 2
        )
        check(["reference", *KERNELS], jump, 40, "f4", "apart", "f4")


@pytest.mark.parametrize("name", ["reference", *KERNELS])
def test_renewed_rows_come_from_their_own_key(name):
    source = NoiseSource(KEY, kernel=name).renewed(10, b"n" * 16)
    for ids in ([[3, 9], [10, 11]], [[10, 11], [12, 13]]):
        jump = Jump(np.ones((2, 1, 1)), np.ones((2, 1, 2)), np.array(ids), np.array([0, 1]))
        values = np.zeros((2, 30))
        carry(source, jump, TableMemory([values], 5), np.array([1, 0]))
        for at, (a, b) in zip((1, 0), ids, strict=True):
            place = 5 + 30 * at
            made = source.normal(a, place, place + 30).astype(float) + source.normal(b, place, place + 30)
            assert np.array_equal(values[at], made)


@pytest.mark.parametrize("renewed", [None, 19, 20, 21])
@pytest.mark.parametrize("name", ["independent", "momentum", "blt", "bands"])
def test_rows_are_brought_up_at_once_as_by_their_jumps(name, renewed):
    """Each over the steps that it lacks, those that lack none not at all, once the maps are known; else nothing is."""
    rng, jumps, stop = np.random.default_rng(1), jumps_of(name), 20
    rows, last = rng.permutation(150)[:90], rng.integers(0, stop + 1, 150).astype(np.int32)
    values, arrays = table(rng, jumps.size, 150, 8, "f4", "together")
    for kernel_name in KERNELS:
        source = NoiseSource(KEY, kernel=kernel_name)
        if renewed is not None:
            source = source.renewed(jumps.first_row(renewed), b"n" * 16)
        fresh, made, expected, steps = jumps_of(name), values.copy(), values.copy(), last.copy()
        inside = TableMemory(list(made.transpose(1, 0, 2)), 11)
        assert not fresh.bring(source, inside, rows, steps, stop)
        assert made.tobytes() == values.tobytes()
        lacking = rows[last[rows] < stop]
        jump = fresh.over(last[lacking], stop)
        carry(source, jump, TableMemory(list(expected.transpose(1, 0, 2)), 11), lacking)
        assert fresh.bring(source, inside, rows, steps, stop)
        assert made.tobytes() == expected.tobytes() != values.tobytes()
        assert (steps[rows] == stop).all()
        others = np.setdiff1d(np.arange(150), rows)
        assert (steps[others] == last[others]).all()
        with pytest.raises(ArgumentError, match="rows must lie in"):
            fresh.bring(source, inside, np.array([0, 150]), steps, stop)


def test_rows_are_not_brought_up_at_once_over_a_change_of_the_rate():
    jumps, values = Jumps(Independent(STEPS)), np.zeros((4, 8), np.float32)
    for t in range(STEPS):
        jumps.record(t, 0.1 if t < 10 else 0.2, 0.5)
    source, memory, rows = NoiseSource(KEY), TableMemory([values], 0), np.arange(4)
    jumps.over(np.arange(10, 20), 20)
    assert not jumps.bring(source, memory, rows, np.array([9, 10, 11, 12], np.int32), 20)
    assert not values.any()
    assert jumps.bring(source, memory, rows, np.array([10, 10, 11, 20], np.int32), 20) == bool(KERNELS)


@pytest.mark.parametrize("compiled", [True, False])
def test_what_does_not_fit_is_refused_and_changes_nothing(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(NoiseSource, "kernel", None)
    jump = Jump(np.ones((1, 1, 1)), np.ones((1, 1, 1)), np.array([[1]]), np.zeros(2, np.int64))
    source, values, rows = NoiseSource(KEY), np.zeros((4, 5)), np.array([0, 1])
    sums = np.ones((2, 5))
    memory = TableMemory([values], 0)
    for made, arguments, message in [
        (jump, (memory, np.array([0, 4])), "rows must lie in"),
        (jump, (memory, np.array([-1, 0])), "rows must lie in"),
        (jump._replace(which=np.array([0, 1])), (memory, rows), "with a map|out of bounds"),
        (jump, (memory, np.array([0])), "map for each row"),
        (jump, (TableMemory([values, values], 0), rows), "does not fit"),
        (jump, (memory, rows, sums), "go together"),
        (jump, (memory, rows, sums[:, 1:], np.ones(1)), "sums must be"),
        (jump, (memory, rows, sums, np.ones(2)), "sums must be"),
    ]:
        with pytest.raises((ArgumentError, IndexError), match=message):
            carry(source, made, *arguments)
    for arrays, first, message in [
        ([values.T], 0, "contiguous"),
        ([values[::-1]], 0, "contiguous"),
        ([values.astype(np.float16)], 0, "float32 or float64"),
        ([values], -1, "elements of Z"),
        ([values], 2**62 - 19, "elements of Z"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            TableMemory(arrays, first)
    assert not values.any()
    carry(source, jump, TableMemory([np.zeros((4, 0))], 0), rows)
    carry(source, jump._replace(which=np.zeros(0, np.int64)), memory, rows[:0])
    assert not values.any()
