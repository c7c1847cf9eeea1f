"""The scaler: public bounds, and one Gaussian release of mean and spread."""

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

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


def released(scaler):
    """What was released of features in [-1, 1], the means of u and of u^2 - 1/2, from what is kept."""
    return np.concatenate([scaler.centre_, scaler.scale_**2 + scaler.centre_**2 - 0.5])


def least_sigma(epsilon, delta):
    """Of the Gaussian mechanism of sensitivity 1, by its profile in closed form [Balle and Wang 2018, Theorem 8]."""

    def exceeds(sigma):
        a, b = 1 / (2 * sigma), epsilon * sigma
        return norm.cdf(a - b) - np.exp(epsilon) * norm.cdf(-a - b) - delta

    return brentq(exceeds, 0.01, 1000.0)


def test_the_noise_is_that_of_the_gaussian_mechanism():
    """Rows with NaN add zero: what is released is noise alone, and half of it would be seen at once."""
    m, d = 2000, 300
    nothing = np.full((m, d), np.nan)
    keys = [bytes([i]) * 32 for i in range(4)]
    noise = [released(Scaler((-1.0, 1.0), epsilon=1.0, delta=1e-6, key=key).fit(nothing)) for key in keys]
    for part in (np.ravel([one[:d] for one in noise]), np.ravel([one[d:] for one in noise])):
        assert abs(m * part.std() / (np.sqrt(1.25 * d) * least_sigma(1.0, 1e-6)) - 1) < 0.08  # 4 standard errors


@pytest.mark.parametrize("rows", [1, 7])
def test_a_unit_moves_the_release_by_no_more_than_the_sensitivity(rows):
    """Two fits on neighbours, with the same noise; the farthest that a unit can move it is reached."""
    data = np.clip(RNG.standard_normal((700, 3)) * 0.3, -1, 1)
    units = np.repeat(np.arange(700 // rows), rows)
    for worst, reached in (([1.0, -1.0, 1.0], True), ([1e300, np.inf, -np.inf], True), ([0.3, 0.0, -0.2], False)):
        one, empty = data.copy(), data.copy()
        one[units == 5], empty[units == 5] = worst, np.nan
        first, second = (
            Scaler((-1.0, 1.0), epsilon=50.0, delta=1e-6, key=KEY).fit(each, units=units) for each in (one, empty)
        )
        moved = np.linalg.norm(released(first) - released(second)) * len(np.unique(units))
        most = np.sqrt(1.25 * 3)
        assert first.certificate_.plan.clip_norm == most
        assert moved <= most * (1 + 1e-9)
        assert (moved > 0.999 * most) == reached


def test_many_rows_of_a_unit_are_one_mean():
    scaler = Scaler((-20.0, 20.0), epsilon=8.0, delta=1e-6, key=KEY)
    scaler.fit(np.repeat(X, 3, axis=0), units=np.repeat(np.arange(len(X)), 3))
    other = Scaler((-20.0, 20.0), epsilon=8.0, delta=1e-6, key=KEY).fit(X)
    np.testing.assert_allclose(scaler.centre_, other.centre_, atol=1e-9)
    np.testing.assert_allclose(scaler.scale_, other.scale_, atol=1e-9)


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


@pytest.mark.parametrize("estimator", [Scaler((-5.0, 5.0)), Scaler((-5.0, 5.0), epsilon=9.0, delta=1e-6, key=KEY)])
def test_conventions(estimator):
    found = check_estimator(estimator, expected_failed_checks=REASONS, on_fail=None, on_skip=None)
    assert len(found) > 40
    assert {one["check_name"]: one["exception"] for one in found if one["status"] == "failed"} == {}
