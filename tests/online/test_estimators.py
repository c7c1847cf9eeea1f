"""The estimators: what they learn, what they keep, and what they refuse."""

import copy
import pickle
from contextlib import contextmanager

import joblib
import numpy as np
import pytest
from scipy import sparse
from sklearn import ensemble, linear_model, model_selection, multiclass
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.feature_selection import RFE, SelectFromModel, SequentialFeatureSelector
from sklearn.impute import IterativeImputer
from sklearn.multioutput import ClassifierChain
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    QuantileTransformer,
    StandardScaler,
)
from sklearn.semi_supervised import SelfTrainingClassifier

import anyorder as ao
from anyorder.audit.faults import patched
from anyorder.audit.faults.core import FAULTS
from anyorder.audit.faults.front_end import Reached
from anyorder.errors import (
    ArgumentError,
    CheckpointError,
    NoiseWarning,
    ParticipationError,
    StepsExhaustedError,
    TrainingError,
)
from anyorder.online import Ball, LinearRegression, LogisticRegression, PoissonRegression, SoftmaxRegression
from anyorder.online.features import RowBound, RowsByUnit
from anyorder.online.losses import Squared
from anyorder.release.release import Release
from online.test_scaler import least_sigma

KEY = bytes(range(32))
RNG = np.random.default_rng(0)
X = RNG.standard_normal((400, 3))
Y = (X @ [1.0, -2.0, 0.5] + 0.3 > 0).astype(int)


def made(**changes):
    return LogisticRegression(
        **{"epsilon": 8.0, "delta": 1e-6, "bounds": 3.0, "classes": [0, 1], "batch_size": 20, "epochs": 1, "key": KEY}
        | changes
    )


def test_it_learns_and_says_what_it_promises():
    model = made().fit(X, Y)
    assert model.score(X, Y) > 0.85
    assert model.coef_.shape == (1, 3)
    assert model.intercept_.shape == (1,)
    assert model.epsilon_ == model.plan_.epsilon <= 8.0
    assert model.certificate_.steps == model.n_iter_ == 20
    assert model.plan_.neighbours == "zero-out"
    assert model.certificate_.plan == model.plan_
    assert (model.predict_proba(X).argmax(axis=1) == model.predict(X)).all()


def test_the_noise_in_the_model_is_the_plan_s():
    """With no gradient at all the first iterate is noise alone: half of it would be seen at once."""
    nothing = np.full(200, 7)  # labels of no class
    found = []
    for i in range(60):
        model = made(batch_size=200, average=None, regularization=1.0, key=bytes([i]) * 32).fit(X[:200], nothing)
        found.append([*model.coef_[0], model.intercept_[0] / 0.9])
    std = np.std(found)
    assert abs(std / model.plan_.noise_std - 1) < 0.2
    assert model.plan_.noise_std >= 0.99 * model.plan_.clip_norm / ao.compose(model.plan_.curve).mu


def test_a_unit_moves_the_sums_by_no_more_than_the_clip_norm():
    """Rows that are as bad as can be: the difference of two fits on neighbours is that of one clipped gradient."""
    for worst in ([1e300, -1e300, 0.0], [1e6, 0.0, 0.0], [np.nan, 1.0, 1.0], [np.inf, 0.0, 0.0]):
        rows, empty = X[:20].copy(), X[:20].copy()
        rows[3], empty[3] = worst, np.nan
        one, other = (
            made(average=None, regularization=1.0, intercept_scaling=1.0).fit(each, Y[:20]) for each in (rows, empty)
        )
        moved = np.hypot(np.linalg.norm(one.coef_ - other.coef_), (one.intercept_ - other.intercept_)[0] / 3.0)
        assert moved <= one.plan_.clip_norm * (1 + 1e-6)


@pytest.mark.parametrize("missing", ["bounds", "classes"])
def test_nothing_is_fitted_from_data(missing):
    with pytest.raises(ArgumentError, match=f"{missing} must be given"):
        made(**{missing: None}).fit(X, Y)
    with pytest.raises(ArgumentError, match="horizon must be given"):
        made().partial_fit(X, Y)
    with pytest.raises(ArgumentError, match="target_bounds must be given"):
        LinearRegression(bounds=3.0).fit(X, Y)


def test_classes_are_those_that_were_given():
    model = SoftmaxRegression(bounds=3.0, classes=["c", "a", "b"], key=KEY).fit(X, np.where(Y, "a", "zebra"))
    assert list(model.classes_) == ["a", "b", "c"]
    assert model.predict_proba(X).shape == (400, 3)
    with pytest.raises(ArgumentError, match="labels of the type of the classes"):
        model.fit(X, Y)
    with pytest.raises(ArgumentError, match="SoftmaxRegression"):
        made(classes=3).fit(X, Y)


def test_classes_are_distinct_and_two_at_least():
    for wrong in ([0, 1, 1], [0], 1, "ab", True, [[0, 1]]):
        with pytest.raises(ArgumentError, match="classes must be"):
            SoftmaxRegression(bounds=3.0, classes=wrong).fit(X, Y)


def test_rows_that_cannot_be_used_add_zero_in_silence():
    rows, labels = X.copy(), Y.astype(float)
    rows[0], rows[1, 1], labels[2], labels[3] = np.nan, np.inf, np.nan, 9
    kept = X.copy()
    kept[:4] = np.nan
    np.testing.assert_array_equal(made().fit(rows, labels).coef_, made().fit(kept, Y).coef_)


def test_sparse_rows_are_the_same_rows():
    thin = sparse.csr_array(np.where(RNG.random((300, 40)) < 0.1, RNG.random((300, 40)), 0.0))
    labels = RNG.integers(0, 2, 300)
    for bounds in (0.7, (-0.5, 0.5)):
        dense, own = (made(bounds=bounds).fit(each, labels) for each in (thin.toarray(), thin))
        np.testing.assert_allclose(dense.coef_, own.coef_, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(dense.predict_proba(thin), own.predict_proba(thin.toarray()))
    with pytest.raises(ArgumentError, match="sparse"):
        made(bounds=(0.0, 1.0)).fit(thin, labels)


def test_rows_keep_to_their_bound_and_models_come_back():
    for bounds in (0.5, 4.0, (-1.0, 2.0), ([-1.0, 0.0, 5.0], [0.5, 0.0, 6.0])):
        bound = RowBound.of(bounds, 3, intercept=True, scaling=0.3)
        rows = bound.prepare(X * 3)
        assert (np.linalg.norm(rows, axis=1) <= bound.norm * (1 + 1e-12)).all()
        assert rows.shape == (400, 4)
        theta = RNG.standard_normal((4, 2))
        model = bound.back(theta)
        inside = np.clip(X, *bounds) if isinstance(bounds, tuple) else X / np.linalg.norm(X, axis=1)[:, None] * 0.4
        np.testing.assert_allclose(inside @ model.coef.T + model.intercept, bound.prepare(inside) @ theta, atol=1e-9)
    assert not model.coef[:, 1].any()  # of a feature that is constant
    for wrong, words in (
        ((1.0, 0.0), "low at most high"), (([0.0, 0.0, 2.0], [1.0, 1.0, 1.0]), "low at most high"),
        ((0.0, np.inf), "high of bounds must be a finite number"), (([0.0, np.nan, 0.0], 1.0), "low of bounds must be"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=words):
            RowBound.of(wrong, 3, intercept=True, scaling=0.3)


def test_bounds_given_as_pairs_are_not_taken_for_lows_and_highs():
    """Two features in [0, 10] by pairs would be one feature at 0 and one at 10, and nothing to learn from."""
    with pytest.raises(ArgumentError, match="not one pair for each feature"):
        RowBound.of([(0, 10), (0, 10)], 2, intercept=True, scaling=0.3)
    with pytest.raises(ArgumentError, match=r"target_bounds must be \(low, high\), got 10"):
        LinearRegression(epsilon=1.0, bounds=1.0, target_bounds=10).fit(X, X[:, 0])


def test_noise_of_wide_rows_does_not_keep_a_vector_of_each_step():
    assert type(LogisticRegression(bounds=1.0, classes=2).fit(X, X[:, 0] > 0).plan_.strategy) is ao.strategy.Dense
    wide = sparse.csr_array((400, 2**17))
    model = LogisticRegression(bounds=1.0, classes=2, batch_size=4, epochs=1).fit(wide, X[:, 0] > 0)
    assert type(model.plan_.strategy) is ao.strategy.BLT


@pytest.mark.parametrize("bounds", [2.0, (-2.0, 2.0)])
def test_sparse_elements_in_two_parts_are_one_and_are_left_as_they_are(bounds):
    parts = sparse.csr_array(([1.5, 1.5, 0.5, -9.0], [1, 1, 0, 2], [0, 2, 4]), shape=(2, 3))
    before = parts.data.copy()
    bound = RowBound.of(bounds, 3, intercept=True, scaling=0.3)
    whole = bound.prepare(np.array([[0.0, 3.0, 0.0], [0.5, 0.0, -9.0]]))
    np.testing.assert_allclose(bound.prepare(parts).toarray(), whole)
    assert np.array_equal(parts.data, before)


@pytest.mark.parametrize("kind", [LogisticRegression, SoftmaxRegression])
def test_a_stream_is_told_its_classes_in_its_first_call(kind):
    options = {"bounds": 3.0, "horizon": 4, "batch_size": 100, "key": KEY}
    told, other = kind(**options), kind(classes=[0, 1], **options)
    with pytest.raises(ArgumentError, match="classes must be given"):
        told.partial_fit(X[:100], Y[:100])
    with pytest.raises(ArgumentError, match="two or more"):
        told.partial_fit(X[:100], Y[:100], classes=[1])
    told.partial_fit(X[:100], Y[:100], classes=[0, 1]).partial_fit(X[100:200], Y[100:200])
    other.partial_fit(X[:200], Y[:200])
    assert np.array_equal(told.coef_, other.coef_)
    with pytest.raises(ArgumentError, match="those of the estimator"):
        told.partial_fit(X[200:300], Y[200:300], classes=[0, 2])
    assert told.n_iter_ == 2


@pytest.mark.parametrize("bounds", [1.0, (-1.0, 1.0)])
def test_a_regression_predicts_for_rows_as_it_learned_from_them(bounds):
    # Of a line through rows that were all cut to norm 1, a row of norm 2 is not twice as high.
    generator = np.random.default_rng(0)
    X = generator.normal(size=(2000, 5))
    y = X @ [1.0, -2.0, 0.5, 0.0, 3.0]
    model = LinearRegression(8.0, bounds=bounds, target_bounds=(-10, 10), key=KEY).fit(X, y)
    cut = X / np.maximum(1.0, np.linalg.norm(X, axis=1))[:, None] if bounds == 1.0 else X.clip(-1, 1)
    np.testing.assert_allclose(model.predict(X), cut @ model.coef_[0] + model.intercept_)
    np.testing.assert_allclose(model.predict(sparse.csr_array(X)), model.predict(X))
    assert model.score(X, y) > 0.85


def test_regressions_learn():
    target = X @ [1.0, -2.0, 0.5] + 3
    common = {"epsilon": 50.0, "bounds": 3.0, "key": KEY, "mechanism": "tree"}
    assert LinearRegression(target_bounds=(-5, 11), **common).fit(X, target).score(X, target) > 0.8
    counts = RNG.poisson(np.exp(X @ [0.3, -0.5, 0.2] + 1))
    model = PoissonRegression(target_bounds=(0, 15), **common).fit(X, counts)
    assert model.score(X, np.exp(X @ [0.3, -0.5, 0.2] + 1)) > 0.5
    assert (model.predict(X) > 0).all()
    own = ao.online.ConvexLearner(loss=Squared(), clip_norm=5.0, regularization=500.0, **common).fit(X, X[:, 0])
    assert own.score(X, X[:, 0]) > 0.5


def test_two_streams_are_one_release_of_two_sums():
    target = X @ [1.0, -2.0, 0.5] + 3
    common = {"epsilon": 50.0, "bounds": 3.0, "target_bounds": (-5, 11), "key": KEY, "algorithm": "two-streams"}
    model = LinearRegression(**common).fit(X, target)
    assert model.score(X, target) > 0.95
    assert model.n_iter_ == model.plan_.n == 1
    assert model.certificate_.steps == 1
    steps = LinearRegression(batch_size=50, shuffle=False, **common).fit(X, target)
    assert steps.n_iter_ == 8
    own = ao.online.LeastSquares(steps.plan_, 4, bounds=np.hypot(3, 0.9), target_bounds=(-1.0, 1.0), key=KEY)
    rows = RowBound.of(3.0, 3, intercept=True, scaling=0.3).prepare(X)
    for i in range(0, 400, 50):
        own.step(range(i, i + 50), rows[i : i + 50], (np.clip(target[i : i + 50], -5, 11) - 3) / 8)
    np.testing.assert_allclose(steps.coef_, 8 * own.theta[:3].T, rtol=1e-9)
    stream = LinearRegression(batch_size=50, horizon=20, **common)
    for i in range(0, 400, 100):
        stream.partial_fit(X[i : i + 100], target[i : i + 100])
    assert stream.n_iter_ == 8
    assert stream.score(X, target) > 0.8
    for wrong in ({"epochs": 2}, {"regularization": "bound"}, {"algorithm": "exact"}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            LinearRegression(**common | wrong).fit(X, target)


def noise_of_two_streams(keys=40):
    """Of rows that all add zero, against the least noise of a Gaussian by its profile in closed form."""
    nothing, found = np.full((50, 3), np.nan), []
    for i in range(keys):
        model = LinearRegression(2.0, 1e-6, bounds=1.0, target_bounds=(-1, 1), algorithm="two-streams",
                                 clip_norm=1.0, key=bytes([i]) * 32)  # fmt: skip
        sums = []
        with patched(LinearRegression, "_kept", lambda self, made, to=sums: to.append(made._sum.copy()) or made.theta):
            model.fit(nothing, np.zeros(50))
        found.append(sums[0])
    return float(np.std(found)) / least_sigma(2.0, 1e-6)


def noise_of_ftrl(keys=100):
    nothing, found = np.full((50, 3), np.nan), []
    for i in range(keys):
        model = made(epsilon=2.0, batch_size=50, clip_norm=1.0, average=None, regularization=1.0, key=bytes([i]) * 32)
        model.fit(nothing, np.zeros(50, int))
        found.append([*model.coef_[0], model.intercept_[0] / 0.9])
    return float(np.std(found)) / least_sigma(2.0, 1e-6)


def half_the_noise():
    (fault,) = [fault for fault in FAULTS if fault.name == "half the noise"]
    return fault.plant(Reached())


@pytest.mark.parametrize("noise", [noise_of_two_streams, noise_of_ftrl])
def test_half_the_noise_of_a_fit_is_found(noise):
    """400 or 560 numbers: a standard error of 3.5 % at most."""
    assert abs(noise() - 1) < 0.12
    with half_the_noise():
        assert noise(40) < 0.7


def farthest_moves(fits):
    """By how much one unit of several rows, each as far out as can be, moves what is released, in clip norms."""
    rows, empty, units = X[:60].copy(), X[:60].copy(), np.repeat(np.arange(15), 4)
    rows[units == 7], empty[units == 7] = [3.0, 0.0, 0.0], np.nan
    labels = np.where(units == 7, 1, Y[:60])
    return fits(rows, labels, units) - fits(empty, labels, units)


def first_step_of_ftrl(rows, labels, units):
    model = made(batch_size=15, average=None, regularization=1.0, intercept_scaling=1.0).fit(rows, labels, units=units)
    return np.append(model.coef_[0], model.intercept_[0] / 3.0) / model.plan_.clip_norm


def sums_of_two_streams(rows, labels, units):
    sums = []
    with patched(LinearRegression, "_kept", lambda self, made: sums.append(made._sum.copy()) or made.theta):
        LinearRegression(8.0, bounds=3.0, target_bounds=(0, 1), algorithm="two-streams", key=KEY).fit(
            rows, labels, units=units
        )
    return sums[0]


@contextmanager
def every_unit_twice():
    """The vector of each unit is added two times."""
    real = Release.step

    def step(self, units, gradients, **others):
        return real(self, units, 2 * gradients, **others)

    with patched(Release, "step", step):
        yield


@pytest.mark.parametrize("fits", [first_step_of_ftrl, sums_of_two_streams])
def test_a_doubled_unit_in_a_fit_is_found(fits):
    def check():
        assert 0.99 < np.linalg.norm(farthest_moves(fits)) <= 1 + 1e-5

    check()
    with every_unit_twice(), pytest.raises(AssertionError):
        check()


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_is_the_fit_of_its_batches():
    plan = ao.plan(dataset_size=400, batch_size=20, epochs=1, epsilon=8, delta=1e-6, mechanism="tree", clip_norm=0.9)
    common = {"epsilon": 1.0, "delta": None, "plan": plan, "batch_size": None, "epochs": None}
    whole = made(shuffle=False, **common).fit(X, Y)
    stream = made(**common)
    for start in range(0, 400, 80):
        stream.partial_fit(X[start : start + 80], Y[start : start + 80])
    np.testing.assert_array_equal(whole.coef_, stream.coef_)
    assert stream.certificate_.steps == 20
    with pytest.raises(StepsExhaustedError, match="0 of the horizon"):
        stream.partial_fit(X, Y)


def test_a_stream_that_is_too_long_is_refused_before_a_gradient():
    stream = made(horizon=5).partial_fit(X[:60], Y[:60])
    before = stream.coef_
    with pytest.raises(StepsExhaustedError, match="nothing was learned"):
        stream.partial_fit(X[60:120], Y[60:120])
    assert stream.n_iter_ == 3
    assert stream.partial_fit(X[60:100], Y[60:100]).n_iter_ == 5
    assert (stream.coef_ != before).any()
    with pytest.raises(ArgumentError, match="horizon must be at least the 20 steps"):
        made(horizon=5).fit(X, Y)


def test_a_unit_that_comes_back_is_refused():
    stream = made(horizon=9).partial_fit(X[:20], Y[:20], units=np.arange(20))
    with pytest.raises(ParticipationError):
        stream.partial_fit(X[20:40], Y[20:40], units=np.arange(19, 39))


def test_the_rows_of_a_unit_come_together():
    units = RNG.integers(0, 50, 400)
    model = made(batch_size=5).fit(X, Y, units=units)
    assert model.n_iter_ == 10
    assert model.certificate_.realised.max_participations == 1
    names = made(batch_size=5).fit(X, Y, units=[f"u{i:02}" for i in units])
    np.testing.assert_allclose(names.coef_, model.coef_)


def test_units_come_in_the_order_of_their_first_rows_and_name_every_row():
    groups = RowsByUnit(["b", "c", "b", "a", "c"], 5)
    assert [batch.tolist() for batch in groups.batches(1, None)] == [[0, 2], [1, 4], [3]]
    assert [batch.tolist() for batch in groups.batches(2, np.array([2, 0, 1]))] == [[1, 4, 3], [0, 2]]
    for call in (made().fit, made(horizon=20).partial_fit):
        with pytest.raises(ArgumentError, match="units must name whose each row is"):
            call(X, Y, units=np.arange(399))


def test_the_order_of_a_fit_is_drawn_by_a_key_of_its_own(monkeypatch):
    keys = []

    def permutation_of(count, key):
        keys.append(key)
        return np.arange(count)

    monkeypatch.setattr("anyorder.online.estimators.permutation_of", permutation_of)
    for key in (None, None, KEY, KEY, bytes(32)):
        made(key=key).fit(X, Y)
    assert len(set(keys)) == 4
    assert keys[2] == keys[3]
    assert not {KEY, bytes(32)} & set(keys)


def test_a_copy_of_a_fit_has_its_certificate_and_no_record():
    """The certificate is made when it is asked for, and says the same then."""
    fitted = made(key=None).fit(X, Y)
    record = fitted._evidence.record_key
    data = pickle.dumps(fitted)
    assert record not in data
    assert b"Ledger" not in data
    assert pickle.loads(data).certificate_ == fitted.certificate_ == copy.deepcopy(fitted).certificate_
    assert fitted.certificate_.realised.max_participations == 1
    first = fitted.certificate_
    assert fitted.fit(X[:200], Y[:200]).certificate_ != first


def test_what_is_pickled_has_no_key_and_no_sums(tmp_path):
    stream = made(horizon=9, key=None).partial_fit(X[:60], Y[:60])
    release = stream._learner.release
    data = pickle.dumps(stream)
    assert release._key not in data
    assert release._source.key not in data
    assert b"Learner" not in data
    assert stream._learner._sum.tobytes() not in data
    for other in (pickle.loads(data), copy.deepcopy(stream)):
        np.testing.assert_array_equal(other.predict(X), stream.predict(X))
        assert other.certificate_ == stream.certificate_
        with pytest.raises(TrainingError, match="copy of a stream"):
            other.partial_fit(X[60:80], Y[60:80])
    assert KEY not in pickle.dumps(made())
    fitted = made().fit(X, Y)
    assert "_learner" not in vars(fitted)
    with pytest.raises(TrainingError, match="make a new estimator"):
        fitted.partial_fit(X, Y)


def test_a_fit_that_was_killed_goes_on_bit_for_bit(tmp_path, monkeypatch):
    path = tmp_path / "fit.checkpoint"
    whole = made(checkpoint=tmp_path / "whole").fit(X, Y)
    step, taken = LogisticRegression._step, []

    def dies(self, *args):
        if len(taken) == 13:
            raise KeyboardInterrupt
        taken.append(1)
        step(self, *args)

    monkeypatch.setattr(LogisticRegression, "_step", dies)
    with pytest.raises(KeyboardInterrupt):
        made(checkpoint=path).fit(X, Y)
    monkeypatch.undo()
    np.testing.assert_array_equal(made(checkpoint=path).fit(X, Y).coef_, whole.coef_)
    np.testing.assert_array_equal(made(checkpoint=path).fit(X, Y).coef_, whole.coef_)  # an ended run, again
    with pytest.raises(CheckpointError):
        made(checkpoint=path).fit(X, 1 - Y)  # would use its noise on other data


@pytest.mark.parametrize("shape", [np.asarray, sparse.csr_matrix])
def test_a_killed_fit_does_not_go_on_over_rows_in_other_places(tmp_path, monkeypatch, shape):
    """Rows are known by their places: who lies where a later batch is taken would come a second time."""
    path, step, taken = tmp_path / "fit.checkpoint", LogisticRegression._step, []

    def dies(self, *args):
        if len(taken) == 1:
            raise KeyboardInterrupt
        taken.append(1)
        step(self, *args)

    places = np.arange(len(X))
    places[[2, 30]] = places[[30, 2]]
    monkeypatch.setattr(LogisticRegression, "_step", dies)
    with pytest.raises(KeyboardInterrupt):
        made(checkpoint=path).fit(shape(X), Y)
    monkeypatch.setattr(LogisticRegression, "_step", lambda *args: pytest.fail("a step is taken"))
    with pytest.raises(CheckpointError, match="rows are not those") as caught:
        made(checkpoint=path).fit(shape(X[places]), Y[places])
    assert caught.value.changed == (2, len(X))


def test_a_stream_goes_on_in_another_process(tmp_path):
    path = tmp_path / "stream.checkpoint"
    whole = made(horizon=9).partial_fit(X[:60], Y[:60]).partial_fit(X[60:100], Y[60:100])
    first = made(horizon=9, checkpoint=path).partial_fit(X[:60], Y[:60])
    first._close()
    second = made(horizon=9, checkpoint=path).partial_fit(X[60:100], Y[60:100])
    np.testing.assert_array_equal(second.coef_, whole.coef_)


# -- who fits --------------------------------------------------------------------------------------------------------

SEARCHES = {
    "grid": lambda e: model_selection.GridSearchCV(e, {"l2": [0, 1]}, cv=2),
    "grid in workers": lambda e: model_selection.GridSearchCV(e, {"l2": [0, 1]}, cv=2, n_jobs=2),
    "random": lambda e: model_selection.RandomizedSearchCV(e, {"l2": [0, 1]}, n_iter=2, cv=2),
    "threshold": lambda e: model_selection.TunedThresholdClassifierCV(e, cv=2),
    "bagging": lambda e: ensemble.BaggingClassifier(e, n_estimators=2),
    "voting": lambda e: ensemble.VotingClassifier([("a", e), ("b", e)]),
    "stacking": lambda e: ensemble.StackingClassifier([("a", e)], cv=2),
    "rest": lambda e: multiclass.OneVsRestClassifier(e),
    "one": lambda e: multiclass.OneVsOneClassifier(e),
    "calibrated": lambda e: CalibratedClassifierCV(e, cv=2),
    "features": lambda e: RFE(e),
    "features, one by one": lambda e: SequentialFeatureSelector(e, cv=2),
    "self-trained": lambda e: SelfTrainingClassifier(e),
    "imputer": lambda e: IterativeImputer(
        LinearRegression(bounds=3.0, target_bounds=(-3, 3)), max_iter=2, random_state=0
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SEARCHES)
def test_searches_and_ensembles_are_refused_with_the_reason(name):
    workers = joblib.parallel_config("multiprocessing")  # forked, where its own way imports all of it anew
    with workers, pytest.raises(Exception, match="must not fit a private learner"):
        SEARCHES[name](made()).fit(np.where(np.arange(400)[:, None] == 3, np.nan, X) if name == "imputer" else X, Y)


@pytest.mark.filterwarnings("ignore")
def test_cross_validation_is_refused():
    for call in (
        lambda: model_selection.cross_val_score(made(), X, Y, cv=2),
        lambda: model_selection.cross_validate(make_pipeline(FunctionTransformer(), made()), X, Y, cv=2),
        lambda: model_selection.cross_val_predict(made(), X, Y, cv=2),
        lambda: model_selection.learning_curve(made(), X, Y, cv=2, error_score="raise"),
        lambda: model_selection.learning_curve(
            made(horizon=99), X, Y, cv=2, error_score="raise", exploit_incremental_learning=True
        ),
        lambda: ClassifierChain(made()).fit(X, np.stack([Y, Y], axis=1)),
        lambda: linear_model.RANSACRegressor(LinearRegression(bounds=3.0, target_bounds=(0, 1)), min_samples=50).fit(
            X, Y
        ),
    ):
        with pytest.raises(Exception, match="must not fit a private learner"):
            call()


def test_pipelines_fit_once():
    pipeline = make_pipeline(FunctionTransformer(np.tanh), made()).fit(X, Y)
    assert pipeline.score(X, Y) > 0.8
    assert clone(pipeline)[-1].get_params()["bounds"] == 3.0
    SelectFromModel(made(), threshold=-np.inf).fit(X, Y)
    regression = LinearRegression(epsilon=8.0, bounds=3.0, target_bounds=(-1, 2), key=KEY)
    TransformedTargetRegressor(regression, func=np.tanh, inverse_func=np.arctanh, check_inverse=False).fit(X, Y)


TOLD = {
    "StandardScaler": lambda: make_pipeline(StandardScaler(), made()),
    "MinMaxScaler": lambda: make_pipeline(make_pipeline(FunctionTransformer(), MinMaxScaler()), made()),
    "PCA, StandardScaler": lambda: make_pipeline(
        ColumnTransformer([("some", StandardScaler(), [0]), ("rest", "passthrough", [1, 2])]),
        FeatureUnion([("as it is", Normalizer()), ("parts", PCA(2))]), made(bounds=3.0),
    ),
    "QuantileTransformer": lambda: TransformedTargetRegressor(
        LinearRegression(epsilon=8.0, bounds=3.0, target_bounds=(-1, 2), key=KEY),
        transformer=QuantileTransformer(n_quantiles=9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("names", TOLD)
def test_steps_that_are_fitted_without_noise_are_told(names):
    with pytest.warns(NoiseWarning, match=f"^{names} is fitted to the rows without noise"):
        TOLD[names]().fit(X, Y)


def test_steps_that_learn_nothing_of_the_rows_are_not_told():
    """`-W error` is on; the warning is of classes alone, and rows that were scaled beforehand tell nothing."""
    coded = OneHotEncoder(categories=[[0, 1]], sparse_output=False)
    some = ColumnTransformer([("codes", coded, [3]), ("scaled", ao.online.Scaler((-3.0, 3.0)), [0, 1, 2])])
    make_pipeline(some, Normalizer(), made()).fit(np.column_stack([X, Y]), Y)
    made().fit((X - X.mean(0)) / X.std(0), Y)


# -- arguments -------------------------------------------------------------------------------------------------------


def test_a_plan_stands_for_what_it_says():
    plan = ao.plan(dataset_size=400, batch_size=50, epochs=2, epsilon=3, delta=1e-6, clip_norm=0.5)
    model = made(plan=plan, epsilon=1.0, delta=None, batch_size=None, epochs=None).fit(X, Y)
    assert model.plan_ == plan
    assert model.n_iter_ == 16
    for name, value in {
        "epsilon": 3.0, "delta": 1e-5, "batch_size": 50, "epochs": 2, "horizon": 16, "mechanism": "tree",
        "clip_norm": 0.5, "neighbours": "replace-one", "unit": "user",
    }.items():  # fmt: skip
        with pytest.raises(ArgumentError, match=f"{name} must not be given together with plan"):
            made(**{"plan": plan, "epsilon": 1.0, "delta": None, "batch_size": None, "epochs": None, name: value}).fit(
                X, Y
            )
    with pytest.raises(ao.errors.PlanError, match="multiple of 6 steps"):
        made(plan=plan, epsilon=1.0, delta=None, batch_size=None, epochs=None).fit(X[:300], Y[:300])


def test_what_is_said_is_planned_and_learned_with():
    said = {"epsilon": 3.0, "delta": 1e-7, "unit": "visit", "neighbours": "replace-one", "mechanism": "tree"}
    model = made(**said, radius=2.0, l1=0.1, l2=0.2, key=None)
    loss, bound = model._loss(), model._row_bound(X)
    for plan in (model._fit_plan(400, loss, bound), made(**said, horizon=20, epochs=None)._stream_plan(loss, bound)):
        assert (plan.delta, plan.unit, plan.neighbours, plan.n) == (1e-7, "visit", "replace-one", 20)
        assert 2.97 <= plan.epsilon <= 3.0
        assert plan.clip_norm == pytest.approx(0.3 * np.hypot(3.0, 0.9))
    learner, other = (model._learner_of(plan, loss, bound) for _ in range(2))
    assert (learner.constraint, learner.l1, learner.l2) == (Ball(2.0), 0.1, 0.2)
    assert learner.release._key != other.release._key
    norm, noise = np.hypot(3.0, 0.9), plan.clip_norm * plan.noise_error(sums=True)
    assert learner.regularization == pytest.approx(noise * norm / 2)
    squares = LinearRegression(bounds=3.0, target_bounds=(0, 1), batch_size=20)
    assert squares._regularization(plan, Squared(), bound) == pytest.approx(max(noise * norm, 20 * norm**2 / 2))
    best = ao.online.best_regularization(400, 4, lipschitz=0.9, radius=2.0, plan=plan, diameter=4.0, l1=0.1, l2=0.2)
    weak = made(regularization="bound", radius=2.0, l1=0.1, l2=0.2)
    assert weak._regularization(plan, loss, RowBound(4, 0.9, None, 0.0)) == pytest.approx(best)
    with pytest.raises(ArgumentError, match="radius and constraint"):
        made(radius=1.0, constraint=Ball(1.0)).fit(X, Y)
    with pytest.raises(ArgumentError, match="epochs must be None or 1"):
        made(horizon=9, epochs=2).partial_fit(X[:20], Y[:20])
    plain = LogisticRegression()
    assert (plain.epsilon, plain.delta) == (1.0, None)
    for units, delta in ((400, 1e-6), (10**7, 1e-8)):
        assert plain._said(units, 20, loss, RowBound(4, 0.9, None, 0.0))["delta"] == delta


def test_regularization_by_the_bound_cuts_nothing():
    model = made(regularization="bound", radius=2.0).fit(X, Y)
    assert model.plan_.clip_norm == pytest.approx(np.hypot(3.0, 0.9))
    with pytest.raises(ArgumentError, match="radius"):
        made(regularization="bound").fit(X, Y)


def test_defaults_follow_from_public_numbers_alone():
    """Whatever the rows are, as long as there are as many, the plan is the same."""
    for count, steps in ((40, 200), (1437, 260), (60_000, 940)):
        rows = np.zeros((count, 2))
        plans = [
            LogisticRegression(bounds=1.0, classes=2, key=KEY)._fit_plan(count, made()._loss(), bound)
            for bound in [RowBound.of(1.0, rows.shape[1], intercept=True, scaling=0.3)] * 2
        ]
        assert plans[0] == plans[1]
        assert plans[0].n == steps


def test_errors_quote_no_value():
    with pytest.raises(ArgumentError) as caught:
        made().fit(X[:40] + 1j, Y[:40])
    assert "j" not in str(caught.value).split("got")[-1]
    assert caught.value.__cause__ is None
    with pytest.raises(ArgumentError, match="finite"):
        made().fit(X, Y).predict(np.full((1, 3), np.nan))
    with pytest.raises(ArgumentError, match="finite") as caught:
        made().fit(X, Y).predict(np.array([["secret-name", 1.0, 2.0]], dtype=object))
    assert "secret-name" not in str(caught.value)
