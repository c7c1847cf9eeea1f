"""Sums of given rows, in one table and in several: against `bounded_sum` of whole tables."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import anyorder as ao
from anyorder.errors import ArgumentError
from anyorder.sparse import bounded_parts, bounded_rows
from laws.cases import over

V, D = 9, 4


def given(seed, m=40, units=7, dtype=np.float64):
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(m, D)) * 10.0 ** generator.integers(-3, 3, (m, 1))
    return generator.integers(0, V, m), values.astype(dtype), generator.integers(0, units, m)


def whole(rows, values):
    tables = np.zeros((len(rows), V, D), values.dtype)
    tables[np.arange(len(rows)), rows] = values
    return tables


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@over("seed", range(20))
def test_it_is_the_bounded_sum_of_whole_tables(seed, dtype):
    rows, values, units = given(seed, m=1 + 3 * seed, dtype=dtype)
    expected = ao.bounded_sum(whole(rows, values), units, 0.7)
    ids, sums = bounded_rows(rows, values, units, 0.7)
    assert (ids == np.unique(rows)).all()
    assert (ids.dtype, sums.dtype) == (np.int64, dtype)
    table = np.zeros((V, D))
    table[ids] = sums
    np.testing.assert_allclose(table, expected, rtol=0, atol=1e-12 if dtype == np.float64 else 2e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e18])
def test_no_unit_adds_more_than_the_norm_in_exact_arithmetic(size, dtype):
    """As a ratio of integers: floats have exact ones."""
    for seed in range(10):
        rows, values, _ = given(seed, dtype=dtype)
        values = (values * dtype(size)).astype(dtype)
        for clip_norm in (0.7, 1.0, 3e-5):
            _, sums = bounded_rows(rows, values, np.zeros(len(rows), np.int64), clip_norm)
            square = sum(Fraction(float(v)) ** 2 for v in sums.ravel())
            assert square <= Fraction(clip_norm) ** 2
            if size >= 1.0:
                assert square >= Fraction(clip_norm * (1 - 1e-5)) ** 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_unit_that_is_not_finite_adds_exactly_zero(bad):
    rows, values, units = given(1)
    without = bounded_rows(rows[units != 3], values[units != 3], units[units != 3], 0.5)
    values[np.flatnonzero(units == 3)[0], 1] = bad
    ids, sums = bounded_rows(rows, values, units, 0.5)
    table, other = np.zeros((V, D)), np.zeros((V, D))
    table[ids], other[without[0]] = sums, without[1]
    np.testing.assert_array_equal(table, other)


def test_rows_of_one_unit_are_added_before_they_are_cut():
    rows, values = np.array([5, 5]), np.array([[3.0, 0.0], [-3.0, 0.5]])
    _, sums = bounded_rows(rows, values, ["a", "a"], 1.0)
    np.testing.assert_allclose(sums, [[0.0, 0.5]])


def test_tensors_come_back_as_tensors_and_nothing_of_the_tables_size_is_made():
    rows = torch.tensor([2**50, 3, 2**50])
    ids, sums = bounded_rows(rows, torch.ones(3, 2), ["a", "b", "a"], 1.0)
    assert ids.tolist() == [3, 2**50]
    torch.testing.assert_close(sums, torch.full((2, 2), 0.5**0.5), rtol=1e-5, atol=0)
    ids, sums = bounded_rows(torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2).half(), [], 1.0)
    assert (ids.shape, sums.shape, sums.dtype) == ((0,), (0, 2), torch.float32)


@pytest.mark.parametrize(
    ("rows", "values", "units", "words"),
    [
        ([1, 2], np.ones((2, 2)), "ab", "rows must be a NumPy array or torch tensor of numbers, got list"),
        (np.array([1, 2]), np.ones((2, 2, 1)), "ab", "values must be floats of shape"),
        (np.array([1, 2]), np.ones((3, 2)), "ab", "one row for each of the 2 units"),
        (np.array([1.0, 2.0]), np.ones((2, 2)), "ab", "rows must be int64 or int32"),
        (np.array([1]), np.ones((2, 2)), "ab", "of shape \\(2,\\)"),
        (np.array([77, -93]), np.ones((2, 2)), "ab", "from 0, got a negative number"),
        (np.array([1, 2]), np.ones((2, 2), dtype=int), "ab", "values must be floats"),
    ],
)
def test_what_does_not_fit_is_refused(rows, values, units, words):
    with pytest.raises(ArgumentError, match=words) as error:
        bounded_rows(rows, values, list(units), 1.0)
    assert "93" not in str(error.value)


def several(seed, dtype=np.float64):
    """A dense part (m, 2, 3) and two tables, in which other units have parts; every third case has no dense part."""
    generator = np.random.default_rng(100 + seed)
    tables = [given(3 * seed + i, m=int(generator.integers(0, 30)), units=9, dtype=dtype) for i in (1, 2)]
    m = int(generator.integers(0, 20))
    vectors = (generator.normal(size=(m, 2, 3)) * 10.0 ** generator.integers(-3, 3, (m, 1, 1))).astype(dtype)
    return None if seed % 3 == 2 else (vectors, generator.integers(0, 9, m)), tables


def side_by_side(dense, tables):
    """(m, 6 + 2 V D) vectors, zero but for the part that each is of, and their units."""
    vectors, units = (np.zeros((0, 2, 3)), np.zeros(0, np.int64)) if dense is None else dense
    parts = [vectors.reshape(len(vectors), 6), *(whole(r, v).reshape(len(r), V * D) for r, v, _ in tables)]
    blocks = [
        np.hstack([part if i == j else np.zeros((len(part), other.shape[1])) for j, other in enumerate(parts)])
        for i, part in enumerate(parts)
    ]
    return np.vstack(blocks), np.concatenate([units, *(units for _, _, units in tables)])


def laid_out(total, sums):
    tables = np.zeros((len(sums), V, D))
    for table, (rows, values) in zip(tables, sums, strict=True):
        table[rows] = values
    return np.concatenate([np.zeros(6) if not len(total) else total.reshape(6), tables.reshape(-1)])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("names", [int, "user {}".format])
@over("seed", range(15))
def test_parts_are_the_bounded_sum_of_all_of_them_side_by_side(seed, names, dtype):
    dense, tables = several(seed, dtype)
    expected = ao.bounded_sum(*side_by_side(dense, tables), 0.7)
    dense = None if dense is None else (dense[0], [names(u) for u in dense[1]])
    total, sums = bounded_parts(dense, [(r, v, [names(u) for u in units]) for r, v, units in tables], 0.7)
    for (rows, values), (asked, _, _) in zip(sums, tables, strict=True):
        assert (rows == np.unique(asked)).all()
        assert (rows.dtype, values.dtype) == (np.int64, dtype)
    assert (total.shape, total.dtype) == (((0,), np.float32) if dense is None else ((2, 3), dtype))
    np.testing.assert_allclose(laid_out(total, sums), expected, rtol=0, atol=1e-12 if dtype == np.float64 else 3e-6)


@pytest.mark.parametrize("dtypes", [(np.float64,) * 3, (np.float32,) * 3, (np.float64, np.float32, np.float64)])
def test_no_unit_adds_more_than_the_norm_to_all_parts_together(dtypes):
    for seed in range(30):
        dense, tables = several(seed)
        one = lambda units: np.full(len(units), 5)  # noqa: E731
        dense = None if dense is None else ((1e3 * dense[0]).astype(dtypes[0]), one(dense[1]))
        tables = [(r, (1e3 * v).astype(d), one(u)) for (r, v, u), d in zip(tables, dtypes[1:], strict=True)]
        for clip_norm in (0.7, 1.0, 3e-5):
            total, sums = bounded_parts(dense, tables, clip_norm)
            square = sum(Fraction(float(x)) ** 2 for part in (total, *(v for _, v in sums)) for x in part.ravel())
            assert Fraction(clip_norm * (1 - 1e-5)) ** 2 <= square <= Fraction(clip_norm) ** 2


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_a_unit_that_is_not_finite_in_one_part_adds_exactly_zero_to_all(place, bad):
    rng = np.random.default_rng(0)
    units = np.arange(6)
    dense, tables = (rng.normal(size=(6, 2, 3)), units), [(units, rng.normal(size=(6, D)), units) for _ in range(2)]
    keep = units != 3
    other = bounded_parts((dense[0][keep], units[keep]), [(r[keep], v[keep], units[keep]) for r, v, _ in tables], 0.5)
    (dense[0] if place == 0 else tables[place - 1][1])[3] = bad
    found = laid_out(*bounded_parts(dense, tables, 0.5))
    np.testing.assert_array_equal(found, laid_out(*other))
    assert np.isfinite(found).all()


def test_one_table_is_bounded_rows_bit_for_bit_and_tensors_stay_tensors():
    rows, values, units = given(4)
    _, [(ids, sums)] = bounded_parts(None, [(rows, values, units)], 0.7)
    expected = bounded_rows(rows, values, units, 0.7)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_array_equal(sums, expected[1])
    total, [(ids, sums)] = bounded_parts(
        (torch.full((1, 2), 3.0), ["a"]), [(torch.tensor([2**50]), torch.full((1, 2), 4.0), ["a"])], 1.0
    )
    torch.testing.assert_close(total, torch.full((2,), 0.6 / 2**0.5), rtol=1e-5, atol=0)
    torch.testing.assert_close(sums, torch.full((1, 2), 0.8 / 2**0.5), rtol=1e-5, atol=0)
    total, [] = bounded_parts((torch.zeros(0, 3).half(), []), [], 1.0)
    assert (total.shape, total.dtype) == ((3,), torch.float32)


@pytest.mark.parametrize(
    ("dense", "tables", "words"),
    [
        (None, [], "a dense part or a table"),
        (np.ones((2, 2)), [], "dense must be \\(vectors, units\\), or None, got ndarray"),
        ((np.ones(2), "ab"), [], "units must be a sequence"),
        ((np.ones(2), ["a", "b"]), [], "dense vectors must be floats of shape"),
        ((np.ones((2, 2), int), ["a", "b"]), [], "dense vectors must be floats of shape"),
        (([[1.0]], ["a"]), [], "NumPy array or torch tensor"),
        (None, (np.array([1]), np.ones((1, 2)), ["a"]), "tables must be a list of \\(rows, values, units\\)"),
        (None, [(np.array([1]), np.ones((2, 2)), ["a", "b"])], "rows of table 0 must be int64 or int32 of shape"),
        (None, [(np.array([-93]), np.ones((1, 2)), ["a"])], "rows of table 0 must be numbered from 0"),
        ((np.ones((1, 2)), [1]), [(np.array([1]), np.ones((1, 2)), ["a"])], "all integers or all strings"),
    ],
)
def test_parts_that_do_not_fit_are_refused(dense, tables, words):
    with pytest.raises(ArgumentError, match=words) as error:
        bounded_parts(dense, tables, 1.0)
    assert "93" not in str(error.value)
