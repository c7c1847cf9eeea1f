"""Sums of bounded vectors, and the noise that is added to them."""

import numpy as np
import pytest
import torch

import anyorder as ao
from anyorder.errors import ArgumentError
from anyorder.participation import MinSeparation
from release.runs import KEY


@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bounded_sums_cut_each_unit_once(kind, dtype):
    vectors = np.random.default_rng(1).normal(size=(9, 3, 2)).astype(dtype)
    names = np.array([5, 2, 5, 2, 2, 7, 1, 7, 3])
    vectors[names == 7] = [[[3e38, 0]] * 3, [[3e38, 0]] * 3]  # the sum of the two overflows in float32
    vectors[names == 3] = np.nan
    norms = {name: np.linalg.norm(vectors[names == name].sum(0).astype(float)) for name in (5, 2, 1)}
    expected = sum(vectors[names == name].astype(float).sum(0) * min(1, 0.7 / norm) for name, norm in norms.items())
    if dtype is np.float64:
        expected = expected + np.array([[1, 0]] * 3) * 0.7 / np.sqrt(3)
    given = torch.from_numpy(vectors) if kind == "tensor" else vectors
    kept = vectors.copy()
    for who in (names, [str(name) for name in names]):
        made = ao.bounded_sum(given, who, 0.7)
        assert type(made) is type(given)
        assert np.asarray(made).dtype == dtype
        np.testing.assert_allclose(np.asarray(made), expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(vectors, kept, equal_nan=True)


def test_bounded_sums_move_by_at_most_the_clip_norm():
    generator = np.random.default_rng(2)
    for _ in range(20):
        vectors = generator.normal(size=(6, 4)) * 10.0 ** generator.integers(-3, 300)
        one = ao.bounded_sum(vectors[:1], [0], 0.3)
        assert np.linalg.norm(one) <= 0.3
        grid = ao.bounded_sum(vectors[:1], [0], 0.3, grid=2.0**-20)
        assert (grid**2).sum() <= (0.3 * 2**20) ** 2


def test_bounded_sums_of_nobody_and_what_is_refused():
    assert np.array_equal(ao.bounded_sum(np.ones((0, 3)), [], 1.0), np.zeros(3))
    for vectors, who in (
        (np.ones(3), [0, 1, 2]), (np.ones((2, 3)), [0]), (np.ones((2, 3), int), [0, 1]), ([[1.0]], [0]),
        (torch.ones(2, 3, dtype=torch.int64), [0, 1]),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="vectors must be"):
            ao.bounded_sum(vectors, who, 1.0)
    with pytest.raises(ArgumentError, match="clip_norm"):
        ao.bounded_sum(np.ones((1, 3)), [0], -1.0)


def test_the_noise_is_the_planned_one():
    """Over many coordinates: its standard deviation, and that of the running sums, which the tree keeps low."""
    plan = ao.plan(order=MinSeparation(16, 4), batch_size=2, epsilon=1, delta=1e-6, mechanism="tree")
    release = ao.Release(plan, 200_000, key=KEY)
    running = np.cumsum([release.step([t], np.zeros(200_000)) for t in range(16)], axis=0)
    expected = plan.noise_profile(sums=True) * plan.clip_norm / plan.batch_size
    assert np.allclose(running.std(axis=1), expected, rtol=0.01)
