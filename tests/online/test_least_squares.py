"""Least squares by two sums: against Algorithm 2 written out, brute force over neighbours, and planted faults."""

from itertools import pairwise
from math import sqrt

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import minimize

import anyorder as ao
from anyorder.errors import ArgumentError, CheckpointError, PlanError, TrainingError
from anyorder.online import Ball, Box, LeastSquares, Simplex
from anyorder.online.least_squares import Streams, minimise
from anyorder.online.sets import Everything
from anyorder.online.sums import Examples
from anyorder.plan.planner import plan_at_sigma
from online.test_ftrl import is_free
from plans import flat_plan

KEY = bytes(range(32))
TARGETS = (-2.0, 3.0)


def plan_for(n=24, batch_size=4, mechanism="tree", **options):
    return flat_plan(
        dataset_size=n, batch_size=batch_size, epochs=1, epsilon=4.0, delta=1e-6, mechanism=mechanism, **options
    )


def learner_for(plan, d=3, **options):
    return LeastSquares(plan, d, **{"bounds": 1.5, "target_bounds": TARGETS, "key": KEY, **options})


def data(n=24, d=3, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, d)) * 1.2
    return X, X @ generator.normal(size=d) * 2 + generator.normal(size=n)


def joint(x, y, learner):
    """The vector of a row, by the definition."""
    x = x * min(1.0, learner.bounds / np.linalg.norm(x)) if np.linalg.norm(x) else x
    y = min(max(y, TARGETS[0]), TARGETS[1])
    i, j = np.triu_indices(len(x))
    svec = np.outer(x, x)[i, j] * np.where(i == j, 1.0, sqrt(2))
    return np.concatenate([learner.target_weight * y * x, learner.square_weight * svec])


# -- Algorithm 2 -------------------------------------------------------------------------------------------------------


def algorithm_2(plan, X, y, learner, noise):
    """[K21] Algorithm 2 with one loop a line; `noise` (n, size) is that of the joint vector in each prefix sum."""
    d, a, b = X.shape[1], learner.target_weight, learner.square_weight
    v, M = np.zeros(d), np.zeros((d, d))
    thetas = [np.zeros(d)]
    for t in range(plan.n):
        for i in range(t * plan.batch_size, min((t + 1) * plan.batch_size, len(X))):
            x = X[i] * min(1.0, learner.bounds / np.linalg.norm(X[i]))
            v += np.clip(y[i], *TARGETS) * x
            M += np.outer(x, x)
        s = v + noise[t, :d] / a
        B = np.zeros((d, d))
        place = d
        for i in range(d):
            for j in range(i, d):
                B[i, j] = B[j, i] = noise[t, place] / b / (1 if i == j else sqrt(2))
                place += 1
        values, vectors = np.linalg.eigh(M + B)
        W = vectors @ np.diag(np.maximum(values, 0)) @ vectors.T
        thetas.append(np.linalg.solve(2 * W + learner.regularization * np.eye(d), 2 * s))
    return thetas


@pytest.mark.parametrize("mechanism", ["tree", "blt, 1 buffer", "banded inverse, 3 bands", "dense", "independent"])
def test_iterates_are_those_of_algorithm_2_with_the_same_noise(mechanism, tmp_path):
    X, y = data()
    plan = plan_for(mechanism=mechanism)
    learner, released = learner_for(plan, average=True), []
    learner.release.on_release(lambda step, private: released.append(private.copy()))
    thetas = [learner.theta]
    for t in range(plan.n):
        batch = slice(4 * t, 4 * t + 4)
        learner.step(np.arange(24)[batch], X[batch], y[batch])
        thetas.append(learner.theta)
    totals = [sum(joint(X[i], y[i], learner) for i in range(4 * t, 4 * t + 4)) for t in range(plan.n)]
    noise = np.cumsum(4 * np.array(released) - totals, axis=0)
    expected = algorithm_2(plan, X, y, learner, noise)
    for theta, other in zip(thetas, expected, strict=True):
        assert np.allclose(theta[:, 0], other, rtol=1e-9, atol=1e-12)
    assert np.allclose(learner.average[:, 0], np.mean(expected[:-1], axis=0))
    s, W = learner.sums
    assert np.array_equal(W, W.T)
    # and that noise is the plan's own, from the key and the matrices alone
    source = ao.noise.NoiseSource(KEY).derive(plan.digest.encode())
    stream = ao.noise.NoiseStream(plan.strategy, source, plan.noise_std, 9)
    made = np.cumsum([stream.next() for _ in range(plan.n)], axis=0)
    assert np.allclose(made, noise, atol=1e-5 * plan.noise_std)
    learner.certificate().save(tmp_path / "run.json")
    assert ao.verify(tmp_path / "run.json").plan.digest == plan.digest


def test_half_the_noise_is_caught():
    """The noise in both sums has the std of the claim: 300 keys, a chi-square test; and with a fault planted."""
    plan = plan_for(8, 4, "blt, 1 buffer")
    stds = plan.clip_norm * plan.noise_profile(sums=True)

    def statistic(factor):
        found = []
        for key in range(300):
            learner = learner_for(plan, key=key.to_bytes(32, "little"))
            for t in range(plan.n):
                learner.step(np.arange(4 * t, 4 * t + 4), np.zeros((4, 3)), np.zeros(4))
            s, W = learner.sums
            found.append(factor * np.concatenate([
                s * learner.target_weight, W[np.triu_indices(3, 1)] * learner.square_weight * sqrt(2),
                np.diag(W) * learner.square_weight,
            ]) / stds[-1])  # fmt: skip
        number = np.size(found)
        return (np.square(found).sum() - number) / sqrt(2 * number)

    assert abs(statistic(1.0)) < 4
    assert statistic(0.5) < -20


# -- sensitivity -------------------------------------------------------------------------------------------------------


def test_no_unit_adds_more_than_the_clip_norm_and_some_add_all_of_it():
    """Units of one to three rows, of all lengths, by search; the largest is at both bounds at once."""
    plan = plan_for(clip_norm=0.7)
    learner = learner_for(plan, 2)
    generator, largest = np.random.default_rng(1), 0.0
    for case in range(3000):
        k = 1 + case % 3
        rows = generator.normal(size=(k, 2)) * 10 ** generator.uniform(-2, 3)
        if case % 5 == 0:  # alike
            rows[:] = rows[0]
        y = generator.normal(size=k) * 10 ** generator.uniform(-1, 2)
        total = learner._joint_sum(Examples.of(rows, y, ["a"] * k, 2)).total
        norm = np.linalg.norm(total)
        assert norm <= plan.clip_norm
        whole = sum(joint(x, label, learner) for x, label in zip(rows, y, strict=True))
        expected = whole * min(1.0, plan.clip_norm / np.linalg.norm(whole))
        assert np.allclose(total, expected, rtol=1e-9, atol=1e-12)
        largest = max(largest, norm)
    assert largest > plan.clip_norm * (1 - 1e-9)
    corner = learner._joint_sum(Examples.of(np.array([[1.5, 0.0]]), np.array([3.0]), ["a"], 2)).total
    assert np.linalg.norm(corner) == pytest.approx(plan.clip_norm)
    weights = learner.target_weight**2 * 1.5**2 * 3**2 + learner.square_weight**2 * 1.5**4
    assert weights == pytest.approx(plan.clip_norm**2)


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_weights_are_the_best_by_search(scale):
    plan, d, L, Y, radius = plan_for(), 5, 1.5, 3.0, scale
    streams = Streams.of(plan, d, L, Y, radius)

    def noise(share):
        a, b = sqrt(share) / (L * Y), sqrt(1 - share) / L**2
        return sqrt(d / a**2 + (d + 1) / 2 * radius**2 / b**2)

    assert streams.step_noise == pytest.approx(min(noise(share) for share in np.linspace(0.001, 0.999, 9999)), rel=1e-6)
    generator = np.random.default_rng(0)  # and the formula is the mean that it stands for
    theta = generator.normal(size=d)
    theta *= radius / np.linalg.norm(theta)
    found = []
    for _ in range(20000):
        G = generator.normal(size=(d, d)) / streams.square_weight
        B = (G + G.T) / 2  # variance 1 / b^2 on the diagonal, half of it off it
        found.append(np.square(generator.normal(size=d) / streams.target_weight - B @ theta).sum())
    assert streams.step_noise == pytest.approx(sqrt(np.mean(found)), rel=0.02)


@pytest.mark.parametrize(
    ("options", "radius"),
    [
        ({}, 2.0), ({"radius": 0.7}, 0.7), ({"constraint": Ball(0.5)}, 0.5), ({"constraint": Simplex(3.0)}, 3.0),
        ({"constraint": Box(-2.0, 1.0)}, sqrt(12)), ({"target_bounds": (-6.0, 3.0)}, 4.0),
    ],
)  # fmt: skip
def test_regularization_is_that_of_the_noise_at_the_radius(options, radius):
    """2 N / radius with N^2 the mean of ||b_t - B_t theta||^2 at it, averaged over steps."""
    plan = plan_for()
    learner = learner_for(plan, **options)
    std = plan.noise_std * np.linalg.norm(np.tri(plan.n) @ plan.strategy.noising_matrix(), axis=1)
    one = 3 / learner.target_weight**2 + 4 / 2 * radius**2 / learner.square_weight**2
    assert learner.radius == pytest.approx(radius)
    assert learner.regularization == pytest.approx(2 * sqrt(one * np.mean(std**2)) / radius)


def test_bad_rows_make_their_unit_zero_and_nothing_else():
    plan = plan_for(60, 10)
    learner = learner_for(plan, 2)
    X = np.array(
        [[np.nan, 1], [1, np.inf], [1, 2], [1e300, 1], [0.5, 0.5], [0, 0], [2, 1], [1e-320, 0], [1, 1], [3, 4.0]]
    )
    y = np.array([1.0, 1, np.nan, 1, 2, 5, -np.inf, 1, 1, 1])
    units = ["a", "b", "c", "d", "e", "f", "g", "h", "e2", "a"]  # the last row is of the unit with NaN
    with np.errstate(all="raise"):
        total = learner._joint_sum(Examples.of(X, y, units, 2)).total
    assert np.allclose(total, joint(X[4], 2, learner) + joint(X[8], 1, learner))
    learner.step(units, X, y)


def test_sparse_rows_are_dense_ones():
    plan = plan_for(40, 20)
    learner = learner_for(plan, 6)
    generator = np.random.default_rng(2)
    X = generator.normal(size=(20, 6)) * (generator.random((20, 6)) < 0.3)
    y, units = generator.normal(size=20), generator.integers(0, 9, 20)
    dense, csr = (learner._joint_sum(Examples.of(form, y, units, 6)).total for form in (X, sparse.csr_array(X)))
    assert np.allclose(dense, csr, rtol=1e-12)


# -- the minimum -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constraint", [Everything(), Ball(0.7), Ball(50.0), Box(-0.2, 0.5), Simplex(1.5)])
@pytest.mark.parametrize("l1", [0.0, 0.4])
def test_minimum_is_that_of_a_search(constraint, l1):
    d = 4
    for seed in range(5):
        generator = np.random.default_rng(seed)
        G = generator.normal(size=(d, d)) * 2
        W, s, ridge = (G + G.T) / 2, generator.normal(size=d) * 3, 0.5
        assert np.linalg.eigvalsh(W).min() < 0
        values, V = np.linalg.eigh(W)
        H = (V * (np.maximum(values, 0) + ridge)) @ V.T

        def cost(theta, H=H, s=s):
            return 0.5 * theta @ H @ theta - s @ theta + l1 * np.abs(theta).sum()

        found = minimise(W, s, ridge, l1, constraint)[:, 0]
        match constraint:
            case Ball():
                assert np.linalg.norm(found) <= constraint.radius * (1 + 1e-15)
            case Box():
                assert (found >= -0.2).all()
                assert (found <= 0.5).all()
            case Simplex():
                assert found.min() >= 0
                assert found.sum() == pytest.approx(1.5)
        inside = [found]
        for _ in range(300):  # near ones in the set, by its own projection
            near = found + generator.normal(size=d) * 10 ** generator.uniform(-5, 0)
            inside.append(constraint.argmin(-near, 1.0))
        assert min(map(cost, inside)) >= cost(found) - 1e-9
        if type(constraint) is Everything and not l1:
            assert np.allclose(found, minimize(cost, np.zeros(d), tol=1e-12).x, atol=1e-4)


def test_without_negative_eigenvalues_the_matrix_is_no_farther_from_the_true_one():
    generator = np.random.default_rng(0)
    for _ in range(200):
        X, G = generator.normal(size=(3, 5)), generator.normal(size=(5, 5))
        Q, B = X.T @ X, (G + G.T) / 2
        values, V = np.linalg.eigh(Q + B)
        kept = (V * np.maximum(values, 0)) @ V.T
        assert np.linalg.norm(kept - Q) <= np.linalg.norm(B) + 1e-12


def test_composite_terms_shrink_with_the_steps():
    """With the true sums and l2, theta is the ridge solution of the mean loss: as the noise falls."""
    X, y = data(4000, 3)
    plan = plan_at_sigma(1e-9, dataset_size=4000, batch_size=1000, epochs=1, delta=1e-6, mechanism="tree")
    learner = learner_for(plan, bounds=100.0, target_bounds=(-100.0, 100.0), regularization=1e-9, l2=0.3)
    for t in range(4):
        learner.step(np.arange(1000 * t, 1000 * t + 1000), X[1000 * t :][:1000], y[1000 * t :][:1000])
    expected = np.linalg.solve(2 * X.T @ X / 4000 + 0.3 * np.eye(3), 2 * X.T @ y / 4000)
    assert np.allclose(learner.theta[:, 0], expected, rtol=1e-5)


# -- kept and refused --------------------------------------------------------------------------------------------------


def test_resume_is_the_same_run_bit_for_bit(tmp_path):
    X, y = data()
    plan = plan_for(mechanism="blt, 1 buffer")

    def steps(learner, *numbers):
        for t in numbers:
            learner.step(np.arange(4 * t, 4 * t + 4), X[4 * t : 4 * t + 4], y[4 * t : 4 * t + 4])

    whole = learner_for(plan, average=True)
    steps(whole, *range(6))
    path = tmp_path / "run.pt"
    options = {"average": True, "checkpoint": path}
    with learner_for(plan, **options) as first:
        steps(first, 0, 1)
        first.extra["note"] = 7
        first.save()
        steps(first, 2)  # lost, and repeated
    with learner_for(plan, **options) as second:
        assert second.steps_taken == 2
        assert second.extra["note"] == 7
        with pytest.raises(CheckpointError):
            second.step(np.arange(8, 12), X[8:12] + 0.1, y[8:12])
        steps(second, *range(2, 6))
        assert np.array_equal(second.theta, whole.theta)
        assert np.array_equal(second.average, whole.average)
    assert is_free(path)
    for other in (
        {"regularization": 3.0}, {"radius": 1.0, "regularization": whole.regularization}, {"l1": 0.1}, {"l2": 0.1},
        {"average": False}, {"target_bounds": (-2.0, 2.5), "regularization": whole.regularization, "radius": 2.0},
        {"bounds": 1.0, "regularization": whole.regularization, "radius": 2.0},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="other settings") as caught:
            learner_for(plan, **options | other)
        assert is_free(path), caught.traceback  # which has the learner that was refused alive
    fresh = tmp_path / "ball.pt"
    learner_for(plan, checkpoint=fresh, constraint=Ball(1.0), radius=1.0).close()
    with pytest.raises(CheckpointError, match="other settings"):
        learner_for(plan, checkpoint=fresh, constraint=Ball(1.5), radius=1.0)
    with pytest.raises(CheckpointError, match="another front end"):
        ao.online.Learner(plan, (9, 1), loss="squared", regularization=1.0, checkpoint=path)


def test_a_step_that_was_broken_off_stops_the_learner(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    learner = learner_for(plan_for())
    with monkeypatch.context() as within:
        within.setattr(ao.Release, "tell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            learner.step([0], np.ones((1, 3)), [1.0])
    for call in (lambda: learner.step([1], np.ones((1, 3)), [1.0]), learner.save):
        with pytest.raises(TrainingError, match="step 0 was broken off"):
            call()
    with pytest.raises(TrainingError, match="the learner is at step 0"):
        learner.release.step([1], np.zeros(9))


def test_theta_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        learner_for(plan_for()).theta[0] = 1.0


def test_refusals():
    plan = plan_for()
    for options, words in (
        ({"bounds": 0.0}, "bounds must be above 0"),
        ({"target_bounds": (1.0, 1.0)}, "low < high"),
        ({"target_bounds": 2.0}, r"\(low, high\)"),
        ({"constraint": "ball"}, "constraint must be"),
        ({"regularization": 0.0}, "regularization must be above 0"),
        ({"d": 0}, "features must be"),
    ):
        with pytest.raises(ArgumentError, match=words):
            learner_for(plan, **options)
    with pytest.raises(PlanError, match="grid"):
        learner_for(plan_for(secure=True))
    with pytest.raises(ArgumentError, match="average=True"):
        _ = learner_for(plan).average
    learner = learner_for(plan)
    with pytest.raises(ArgumentError, match="X must be"):
        learner.step([0], np.zeros((1, 4)), [0.0])
    assert learner.steps_taken == 0


def test_it_learns():
    """Mean squared error falls towards that without noise as epsilon grows."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(4000, 5))
    X /= np.maximum(1, np.linalg.norm(X, axis=1, keepdims=True) / 2)
    y = np.clip(X @ np.array([0.5, -0.3, 0.2, 0.0, 0.1]) + 0.1 * generator.normal(size=4000), -1, 1)
    errors = []
    for epsilon in (0.3, 1.0, 8.0):
        plan = ao.plan(dataset_size=4000, batch_size=100, epochs=1, epsilon=epsilon, delta=1e-6, mechanism="tree")
        learner = LeastSquares(plan, 5, bounds=2.0, target_bounds=(-1.0, 1.0), key=KEY)
        for t in range(40):
            learner.step(np.arange(100 * t, 100 * t + 100), X[100 * t :][:100], y[100 * t :][:100])
        errors.append(np.square(X @ learner.theta[:, 0] - y).mean())
    assert all(more > less for more, less in pairwise(errors))
    assert errors[-1] < 0.02
    assert np.square(y).mean() > 0.2
