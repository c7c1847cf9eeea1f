"""Canaries: unit vectors that follow from a seed alone, and coins that do not."""

import pickle
import time
import tracemalloc
from itertools import product

import numpy as np
import pytest
import torch

import anyorder as ao
from anyorder.audit import Canaries
from anyorder.audit import canaries as module
from anyorder.errors import ArgumentError

KEY = bytes(range(32))

CASES = {
    "orthogonal": Canaries(20, 3, 20, 1),
    "single coordinates": Canaries(7, 7, 7, b"seed"),
    "some coordinates": Canaries(50, 4, 13, 2),
    "most coordinates": Canaries(50, 4, 47, 2),
    "given coordinates": Canaries(9, 2, 4, 3, coordinates=[8, 0, 3, 5]),
    "random": Canaries(20, 3, 20, 1, orthogonal=False),
    "more than coordinates": Canaries(6, 11, 5, 4),
    "one": Canaries(1, 1, 1, 0),
    "big seed": Canaries(20, 5, 10, 2**200),
}


@pytest.fixture(params=[False, True], ids=["whole", "in small blocks"])
def blocks(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(module, "_DIRECTION_BLOCK", 7)


@pytest.mark.parametrize("canaries", CASES.values(), ids=CASES)
def test_canaries_have_norm_one_and_lie_on_their_coordinates(canaries):
    vectors = canaries.vectors()
    assert vectors.shape == (canaries.count, canaries.size)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-14)
    outside = np.setdiff1d(np.arange(canaries.size), canaries.coordinates)
    assert not vectors[:, outside].any()
    assert len(np.unique(canaries.coordinates)) == canaries.dimension
    if canaries.orthogonal:
        np.testing.assert_array_equal(vectors @ vectors.T - np.diag(np.diag(vectors @ vectors.T)), 0)


def test_products_and_sums_are_those_of_the_vectors(blocks):
    for dtype, canaries in product([np.float64, np.float32], CASES.values()):
        again = pickle.loads(pickle.dumps(canaries))
        vectors = again.vectors()
        rng = np.random.default_rng(0)
        row = rng.normal(size=canaries.size).astype(dtype)
        np.testing.assert_allclose(again.dot(row), vectors @ row, rtol=1e-12, atol=1e-13)
        np.testing.assert_array_equal(again.dot(torch.from_numpy(row)), again.dot(row))
        weights = rng.integers(-1, 2, size=canaries.count)
        np.testing.assert_allclose(again.combined(weights), weights @ vectors, atol=1e-14)
        np.testing.assert_allclose(again.combined(weights, 3.5), 3.5 * (weights @ vectors), atol=1e-13)
        whole = again.combined(weights, 1000.5, whole=True)
        np.testing.assert_array_equal(whole, weights @ np.trunc(1000.5 * vectors))
        mask = weights > 0
        np.testing.assert_array_equal(again.sum(mask), again.sum(np.flatnonzero(mask)))
        np.testing.assert_allclose(again.sum([0, 0]), 2 * vectors[0], atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_vectors_depend_on_no_order_of_access(name):
    canaries = CASES[name]
    first, second = (pickle.loads(pickle.dumps(canaries)) for _ in range(2))
    some = second.vector(canaries.count - 1)
    second.dot(np.ones(canaries.size))
    np.testing.assert_array_equal(first.vectors()[-1], some)
    np.testing.assert_array_equal(second.vectors(), canaries.vectors())


def test_blocks_change_no_vector(monkeypatch):
    before = {name: canaries.vectors() for name, canaries in CASES.items()}
    monkeypatch.setattr(module, "_DIRECTION_BLOCK", 5)
    for name, canaries in CASES.items():
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(canaries)).vectors(), before[name])


def test_canaries_are_equal_by_value_and_never_change():
    for canaries in CASES.values():
        again = pickle.loads(pickle.dumps(canaries))
        assert again == canaries
        assert hash(again) == hash(canaries)
        with pytest.raises(AttributeError, match="immutable"):
            canaries.seed = 5
        with pytest.raises(ValueError, match="read-only"):
            canaries.coordinates[0] = 1
    assert len(set(CASES.values())) == len(CASES)
    base = Canaries(10, 2, 4, 5)
    assert base != Canaries(10, 2, 4, b"5")
    assert base != Canaries(10, 2, 4, 6)
    assert base != Canaries(10, 2, 4, 5, orthogonal=False)
    assert base == Canaries(10, 2, 4, 5, coordinates=base.coordinates)
    assert base != Canaries(10, 2, 4, 5, coordinates=base.coordinates[::-1])
    assert ao.audit.Canaries is Canaries


def test_drawn_coordinates_are_spread_evenly():
    counts = np.zeros(10)
    for seed in range(2000):
        counts[Canaries(10, 1, 3, seed).coordinates] += 1
    assert abs(counts - 600).max() < 5 * np.sqrt(600 * 0.7)


def test_random_directions_are_even_over_the_sphere():
    vectors = Canaries(8, 4000, 8, 0, orthogonal=False).vectors()
    np.testing.assert_allclose(vectors.mean(axis=0), 0, atol=5 / np.sqrt(8 * 4000))
    np.testing.assert_allclose(vectors.T @ vectors / 4000, np.eye(8) / 8, atol=5 * 0.125 * np.sqrt(2 / 4000))


def test_coins_are_fair_and_do_not_follow_from_the_vectors():
    canaries = Canaries(20_000, 20_000, 20_000, 7)
    coins = canaries.draw(KEY)
    assert coins.dtype == np.bool_
    assert abs(coins.mean() - 0.5) < 5 / np.sqrt(4 * 20_000)
    np.testing.assert_array_equal(coins, canaries.draw(KEY))
    free = [canaries.draw() for _ in range(3)]
    assert all(0.4 < (free[0] == other).mean() < 0.6 for other in (coins, *free[1:]))
    sign = np.array([canaries.vector(c).sum() > 0 for c in range(500)])
    assert 0.35 < (sign == coins[:500]).mean() < 0.65
    with pytest.raises(ArgumentError, match="key must be 32 bytes"):
        canaries.draw(b"short")


@pytest.mark.parametrize("key", [KEY, None], ids=["of a key", "of the system"])
def test_no_coin_tells_the_next(key):
    coins = Canaries(20_000, 20_000, 20_000, 7).draw(key)
    for lag in (1, 2, 3, 4, 8, 32, 10_000):
        agree = (coins[lag:] == coins[:-lag]).mean()
        assert abs(agree - 0.5) < 6 / np.sqrt(4 * (20_000 - lag)), lag


def test_arguments_that_do_not_fit_are_refused():
    for arguments, options, message in [
        ((0, 1, 1, 0), {}, "size must be an integer of at least 1|size must be an integer from 1"),
        ((3, 0, 1, 0), {}, "count must be"),
        ((3, 1, 4, 0), {}, "dimension must be an integer from 1 to 3"),
        ((3, 1, 0, 0), {}, "dimension must be"),
        ((3.0, 1, 1, 0), {}, "size must be"),
        ((3, True, 1, 0), {}, "count must be"),
        ((3, 1, 1, -1), {}, "seed must be"),
        ((3, 1, 1, None), {}, "seed must be"),
        ((3, 1, 1, "word"), {}, "seed must be"),
        ((3, 3, 2, 0), {"orthogonal": True}, "count must be at most dimension=2"),
        ((3, 1, 1, 0), {"orthogonal": 1}, "orthogonal must be True, False or None"),
        ((3, 1, 2, 0), {"coordinates": [1, 1]}, "coordinates must be distinct"),
        ((3, 1, 2, 0), {"coordinates": [1, 3]}, "coordinates must be distinct and lie in 0 .. 2"),
        ((3, 1, 2, 0), {"coordinates": [-1, 1]}, "coordinates must be distinct and lie in 0 .. 2"),
        ((3, 1, 2, 0), {"coordinates": [1]}, "coordinates must be dimension=2 integers"),
        ((3, 1, 2, 0), {"coordinates": [0.0, 1.0]}, "coordinates must be dimension=2 integers"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            Canaries(*arguments, **options)


def test_rows_and_choices_that_do_not_fit_are_refused():
    canaries = Canaries(4, 2, 4, 0)
    for row in (np.ones(3), np.ones(5), 1.0, torch.ones(2, 3)):
        with pytest.raises(ArgumentError, match="size=4"):
            canaries.dot(row)
    for bad in (np.nan, np.inf):
        with pytest.raises(ArgumentError, match="must be finite"):
            canaries.dot([1.0, 2.0, bad, 0.0])
    assert canaries.dot(torch.ones(2, 2, dtype=torch.bfloat16)).shape == (2,)
    for which in ([True], [2], [-1], [0.5], [[0]]):
        with pytest.raises(ArgumentError, match="which must"):
            canaries.sum(which)
    assert not canaries.sum([]).any()
    with pytest.raises(ArgumentError, match="weights must be 2 numbers"):
        canaries.combined([1, 2, 3])
    for c in (-1, 2, 0.5):
        with pytest.raises(ArgumentError, match="c must be"):
            canaries.vector(c)


def test_no_matrix_over_all_coordinates_is_kept():
    canaries = Canaries(200_000, 100, 200_000, 0, orthogonal=False)  # 160 MB in float64
    row = np.ones(200_000)
    tracemalloc.start()
    found = canaries.dot(row)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6
    np.testing.assert_allclose(found[0], canaries.vector(0) @ row)


def test_orthogonal_canaries_cost_a_pass_over_the_row():
    canaries = Canaries(100_000, 1000, 100_000, 0)
    row = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        canaries.dot(row)
        times.append(time.perf_counter() - start)
    assert min(times) < 5e-3  # some 0.3 ms; a matrix of 1000 rows needs a hundred


def test_wide_random_canaries_are_the_same_alone_and_in_a_block():
    canaries = Canaries(size=20_000, count=100, dimension=20_000, seed=0, orthogonal=False)
    weights = np.zeros(100)
    weights[[3, 60, 99]] = 1.0
    together = canaries.combined(weights)  # made in blocks of 52
    alone = sum(canaries.vector(c) for c in (3, 60, 99))
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-15)
    for c in (0, 3, 99):
        assert np.array_equal(canaries.combined(np.arange(100) == c), canaries.vector(c))
        assert abs(np.linalg.norm(canaries.vector(c)) - 1) < 1e-14
