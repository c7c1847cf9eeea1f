"""Minimisers in closed form, against a solver that knows nothing of them, and where they are degenerate."""

from itertools import product

import numpy as np
import pytest
from scipy.optimize import minimize

from anyorder.errors import ArgumentError
from anyorder.online import Ball, Box, Simplex
from anyorder.online.sets import Everything

SETS = {
    "everything": lambda d, g: Everything(),
    "ball": lambda d, g: Ball(g.uniform(0.1, 2.0)),
    "box": lambda d, g: Box(g.uniform(-2, 0.5, d), g.uniform(0.6, 2, d)),
    "box of numbers": lambda d, g: Box(-0.3, 0.7),
    "simplex": lambda d, g: Simplex(g.uniform(0.5, 2.0)),
}


def objective(theta, linear, quadratic, l1):
    return linear @ theta + quadratic / 2 * theta @ theta + l1 * np.abs(theta).sum()


def brute(kind, linear, quadratic, l1):
    """By SLSQP on theta = p - q with p, q >= 0, where ||theta||_1 is the least sum of p and q."""
    d = len(linear)
    whole = np.hstack([np.eye(d), -np.eye(d)])
    constraints = []
    match kind:
        case Ball():
            constraints = [{"type": "ineq", "fun": lambda z: kind.radius**2 - np.square(whole @ z).sum()}]
        case Box():
            constraints = [
                {"type": "ineq", "fun": lambda z: whole @ z - kind.low},
                {"type": "ineq", "fun": lambda z: kind.high - whole @ z},
            ]
        case Simplex():
            constraints = [
                {"type": "eq", "fun": lambda z: (whole @ z).sum() - kind.radius},
                {"type": "ineq", "fun": lambda z: whole @ z},
            ]
    found = minimize(
        lambda z: linear @ (whole @ z) + quadratic / 2 * np.square(whole @ z).sum() + l1 * z.sum(),
        np.full(2 * d, 0.5),
        bounds=[(0, None)] * (2 * d),
        constraints=constraints,
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-12},
    )
    return whole @ found.x


def inside(kind, theta):
    match kind:
        case Everything():
            return True
        case Ball():
            return np.linalg.norm(theta) <= kind.radius * (1 + 1e-12)
        case Box():
            return bool(((theta >= kind.low) & (theta <= kind.high)).all())
        case Simplex():
            return bool((theta >= 0).all()) and abs(theta.sum() - kind.radius) < 1e-9 * kind.radius


def test_a_minimiser_is_that_of_a_general_solver():
    for name, quadratic, l1 in product(SETS, [0.0, 0.05, 1.3], [0.0, 0.4]):
        if name == "everything" and quadratic == 0.0:
            continue  # refused: below
        generator = np.random.default_rng(7)
        for d in (1, 2, 4):
            for _ in range(4):
                linear = generator.normal(size=d)
                kind = SETS[name](d, generator)
                theta = kind.argmin(linear, quadratic, l1)
                assert inside(kind, theta)
                other = brute(kind, linear, quadratic, l1)
                assert np.allclose(theta, other, atol=2e-3)
                assert objective(theta, linear, quadratic, l1) <= objective(other, linear, quadratic, l1) + 1e-6


def test_no_point_of_the_set_is_better():
    for name, quadratic, l1 in product(SETS, [0.0, 2.0], [0.0, 0.7]):
        if name == "everything" and quadratic == 0.0:
            continue
        generator = np.random.default_rng(11)
        d = 5
        linear, kind = generator.normal(size=d), SETS[name](d, generator)
        best = objective(kind.argmin(linear, quadratic, l1), linear, quadratic, l1)
        points = generator.normal(size=(2000, d))
        match kind:
            case Ball():
                points *= kind.radius * generator.uniform(size=(2000, 1)) / np.linalg.norm(points, axis=1)[:, None]
            case Box():
                points = generator.uniform(kind.low, kind.high, size=(2000, d))
            case Simplex():
                points = kind.radius * generator.dirichlet(np.full(d, 0.3), 2000)
        assert all(objective(point, linear, quadratic, l1) >= best - 1e-12 for point in points)


def test_where_several_points_are_minimal_it_is_the_shortest():
    linear = np.array([0.5, -0.2])
    assert np.array_equal(Ball(2.0).argmin(linear, 0.0, l1=1.0), [0, 0])
    assert np.array_equal(Ball(2.0).argmin(np.zeros(2), 0.0), [0, 0])
    assert np.array_equal(Box(-1.0, 2.0).argmin([0.0, 0.3], 0.0), [0.0, -1.0])
    assert np.array_equal(Box(1.0, 2.0).argmin([0.0, 0.0], 0.0), [1.0, 1.0])
    assert np.array_equal(Simplex(3.0).argmin([1.0, 0.0, 0.0, 2.0], 0.0), [0.0, 1.5, 1.5, 0.0])
    assert np.allclose(Simplex().argmin(np.zeros(4), 1.0), 0.25)


def test_small_ones_by_hand():
    assert np.array_equal(Everything().argmin([3.0, -0.5], 2.0, l1=1.0), [-1.0, 0.0])
    assert np.allclose(Ball(1.0).argmin([3.0, 4.0], 0.5), [-0.6, -0.8])
    assert np.array_equal(Ball(10.0).argmin([3.0, 4.0], 0.5), [-6.0, -8.0])
    assert np.array_equal(Box(0.0, 1.0).argmin([3.0, -4.0], 1.0), [0.0, 1.0])
    assert np.allclose(Simplex().argmin([-1.0, -0.5], 1.0), [0.75, 0.25])


def test_shapes_are_kept_and_a_norm_is_over_all_of_them():
    linear = np.array([[3.0], [4.0]])
    assert np.allclose(Ball(1.0).argmin(linear, 0.0), [[-0.6], [-0.8]])
    assert Simplex().argmin(linear, 1.0).shape == (2, 1)
    assert np.array_equal(Box([[0.0], [-9.0]], 9.0).argmin(linear, 1.0), [[0.0], [-4.0]])


def test_very_large_and_very_small_numbers():
    for scale, kind in product([1e-300, 1e-160, 1e160, 1e300], [Everything(), Ball(2.0), Box(-1.0, 1.0), Simplex()]):
        linear = scale * np.array([3.0, -4.0])
        theta = kind.argmin(linear, scale)
        assert np.allclose(theta, kind.argmin([3.0, -4.0], 1.0))
        with_none = Box(-1.0, 1.0).argmin(linear, 1e-320)
        assert np.array_equal(with_none, [-1.0, 1.0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Everything().argmin([1.0], 0.0), "quadratic must be above 0"),
        (lambda: Ball(1.0).argmin([1.0], -1.0), "quadratic"),
        (lambda: Ball(1.0).argmin([1.0], 1.0, -1.0), "l1"),
        (lambda: Ball(1.0).argmin([np.nan], 1.0), "linear must be finite"),
        (lambda: Ball(0.0), "radius"),
        (lambda: Simplex(-1.0), "radius"),
        (lambda: Box(1.0, 0.0), "low must not be above high"),
        (lambda: Box(-np.inf, 0.0), "low must be finite"),
        (lambda: Box([0.0, 0.0], [1.0, 1.0, 1.0]), "broadcast"),
        (lambda: Box([0.0, 0.0], 1.0).argmin([1.0, 1.0, 1.0], 1.0), "broadcast"),
        (lambda: Simplex().argmin(np.zeros(0), 1.0), "a coordinate"),
    ],
)
def test_what_has_no_minimiser_is_refused(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_boxes_are_compared_by_value_and_cannot_be_written():
    low = np.zeros(2)
    box = Box(low, 1.0)
    low += 5
    assert box == Box([0.0, 0.0], 1.0)
    assert hash(box) == hash(Box([0.0, 0.0], 1.0))
    assert box != Box([0.0, 0.5], 1.0)
    assert box.words() != Box([0.0, 0.5], 1.0).words()
    with pytest.raises(ValueError, match="read-only"):
        box.low[0] = 1.0
