"""The scaler: public bounds, and one Gaussian release of mean and spread."""

import numpy as np
import pytest
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import anyorder as ao
from anyorder.errors import ArgumentError
from anyorder.online import LogisticRegression, Scaler

KEY = bytes(range(32))
RNG = np.random.default_rng(0)
X = RNG.normal([5.0, -2.0, 0.0], [1.0, 3.0, 0.2], (5000, 3))


def test_public_bounds_go_to_one():
    scaler = Scaler(([0.0, -10.0, 3.0], [10.0, 10.0, 3.0])).fit(X)
    made = scaler.transform([[0.0, 0.0, 7.0], [10.0, 10.0, 3.0], [99.0, -99.0, -1.0]])
    np.testing.assert_allclose(made, [[-1, 0, 0], [1, 1, 0], [1, -1, 0]])
    assert scaler.curve_ is None


def test_the_release_finds_mean_and_spread():
    scaler = Scaler((-20.0, 20.0), epsilon=4.0, delta=1e-6, key=KEY).fit(X)
    np.testing.assert_allclose(scaler.centre_, [5.0, -2.0, 0.0], atol=0.5)
    np.testing.assert_allclose(scaler.scale_[:2], [1.0, 3.0], atol=0.5)
    assert scaler.epsilon_ <= 4.0
    assert scaler.certificate_.steps == 1


def test_the_noise_is_the_plan_s():
    """Rows with NaN add zero, so that the means are noise alone: half of it would be seen at once."""
    nothing, found = np.full((10, 4), np.nan), []
    for i in range(200):
        scaler = Scaler((-1.0, 1.0), epsilon=1.0, delta=1e-6, key=bytes([i]) * 32)
        rows = nothing.copy()
        scaler.fit(rows)
        found.append(scaler.centre_)
    std = scaler.certificate_.plan.noise_std / 10
    cut = np.abs(RNG.standard_normal(100_000) * std)
    assert abs(np.abs(found).mean() - np.minimum(cut, 1.0).mean()) < 0.1 * np.minimum(cut, 1.0).mean()


def test_no_row_is_longer_than_the_sensitivity():
    u = np.clip(RNG.standard_normal((10_000, 3)) * 2, -1, 1)
    assert np.linalg.norm(np.hstack([u, u**2 - 0.5]), axis=1).max() <= np.sqrt(1.25 * 3) * (1 + 1e-12)
    plan = Scaler((-1.0, 1.0), epsilon=1.0, delta=1e-6, key=KEY).fit(X).certificate_.plan
    assert plan.clip_norm == np.sqrt(1.25 * 3)
    assert plan.noise_std >= plan.clip_norm / plan.mu


def test_scaler_and_learner_compose():
    y = (X[:, 0] > 5).astype(int)
    scaler = Scaler((-20.0, 20.0), epsilon=1.0, delta=1e-6, key=KEY)
    model = LogisticRegression(2.0, 1e-6, bounds=2.0, classes=2, mechanism="tree", key=KEY)
    assert make_pipeline(scaler, model).fit(X, y).score(X, y) > 0.8
    assert 2.0 < ao.compose(scaler.curve_, model.plan_.curve).epsilon(1e-6) < 3.0


def test_bounds_are_asked_for():
    with pytest.raises(ArgumentError, match="bounds must be"):
        Scaler().fit(X)
    with pytest.raises(ArgumentError, match="together"):
        Scaler((-1.0, 1.0), epsilon=1.0).fit(X)


REASONS = {
    "check_dtype_object": "wants a TypeError; it is an ArgumentError, as all of this package",
    "check_estimator_sparse_array": "by the name Scaler it takes it for one with a parameter with_mean",
    "check_estimator_sparse_matrix": "by the name Scaler it takes it for one with a parameter with_mean",
}


@parametrize_with_checks(
    [Scaler((-5.0, 5.0)), Scaler((-5.0, 5.0), epsilon=9.0, delta=1e-6, key=KEY)],
    expected_failed_checks=lambda scaler: REASONS,
)
def test_conventions(estimator, check):
    check(estimator)
