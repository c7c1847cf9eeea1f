"""Sums of given rows: against `bounded_sum` of whole tables."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import anyorder as ao
from anyorder.errors import ArgumentError
from anyorder.sparse import bounded_rows

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
@pytest.mark.parametrize("seed", range(20))
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
