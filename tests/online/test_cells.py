"""What stands in the cells of one row is no error, no warning, and nothing that other rows would show."""

import copy
import pickle
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.pipeline import make_pipeline

import anyorder as ao
from anyorder.errors import ArgumentError, TrainingError
from anyorder.online import Learner, LeastSquares, LinearRegression, LogisticRegression, Scaler
from anyorder.online.features import codes_of, numbers_of, read_targets
from anyorder.online.losses import CustomLoss, Squared
from laws.cases import over

KEY = bytes(range(32))
RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 3))
Y = (X[:, 0] > 0).astype(int)
ROW = 7
EMPTY = X.copy()
EMPTY[ROW] = np.nan


WORST = {
    "text": "abc", "nothing": "", "None": None, "missing": pd.NA, "no time": pd.NaT,
    "time": np.datetime64("2020-01-01"),
    "large": 10**400, "complex": 1j, "array": np.array([1.0, 2.0]), "array of one": np.array([1.0]), "list": [1.0],
    "signalling": Decimal("sNaN"), "object": object(),
    "dictionary": {}, "bytes": b"\xff",
}  # fmt: skip


def made(**changes):
    return LogisticRegression(
        **{"epsilon": 8.0, "bounds": 3.0, "classes": [0, 1], "batch_size": 20, "epochs": 1, "key": KEY} | changes
    )


def linear(**changes):
    return LinearRegression(
        **{"epsilon": 8.0, "bounds": 3.0, "target_bounds": (-1, 1), "batch_size": 20, "epochs": 1, "key": KEY} | changes
    )


@pytest.fixture(autouse=True)
def _no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@over("name", WORST)
@pytest.mark.parametrize("kind", ["array", "list", "frame"])
def test_a_bad_cell_makes_its_row_zero_and_nothing_tells_of_it(name, kind):
    rows = X.astype(object)
    rows[ROW, 1] = WORST[name]
    table = {"array": rows, "list": [list(row) for row in rows], "frame": pd.DataFrame(rows)}[kind]
    np.testing.assert_array_equal(made().fit(table, Y).coef_, made().fit(EMPTY, Y).coef_)


@over("name", WORST)
@pytest.mark.parametrize("kind", ["array", "list", "series"])
def test_a_bad_target_makes_its_row_zero_and_nothing_tells_of_it(name, kind):
    labels = Y.astype(object)
    labels[ROW] = WORST[name]
    given = {"array": labels, "list": list(labels), "series": pd.Series(labels)}[kind]
    for estimator in (made(), linear()):
        np.testing.assert_array_equal(estimator.fit(X, given).coef_, clone(estimator).fit(EMPTY, Y).coef_)


def test_numbers_of_every_kind_that_cannot_be_used_are_silent():
    signals = np.arange(60) == ROW
    for dtype, word, bits in ((np.float32, np.uint32, 0x7F800001), (np.float64, np.uint64, 0x7FF0000000000001)):
        rows, labels = X.astype(dtype), Y.astype(dtype)
        rows.view(word)[ROW, 0] = bits
        labels.view(word)[ROW] = bits
        for estimator in (made(), linear()):
            plain = clone(estimator).fit(EMPTY.astype(dtype), Y).coef_
            np.testing.assert_array_equal(clone(estimator).fit(rows, Y).coef_, plain)
            # The same rows else: of a signalling label the row is empty.
            np.testing.assert_array_equal(
                clone(estimator).fit(X.astype(dtype), labels).coef_,
                clone(estimator).fit(EMPTY.astype(dtype), Y).coef_,
            )
    wide = np.where(signals, np.longdouble("1e4000"), Y)
    linear().fit(np.where(signals[:, None], np.longdouble("1e4000"), X), wide)
    linear().fit(sparse.csr_array(np.where(signals[:, None], np.inf, X)), Y)
    nullable, text, labels = pd.DataFrame(X).convert_dtypes(), pd.DataFrame(X).astype(str), pd.Series(Y, dtype="Int64")
    nullable.iloc[ROW, 0], text.iloc[ROW, 0], labels[ROW] = pd.NA, "", pd.NA
    made().fit(nullable, labels)
    made().fit(text, Y)
    Scaler((-3.0, 3.0), epsilon=1.0, delta=1e-6, key=KEY).fit(np.where(signals[:, None], "x", X.astype(object)))


def test_text_of_numbers_is_numbers_and_labels_keep_their_equality():
    np.testing.assert_array_equal(numbers_of(np.array(["1.5", "2"])), [1.5, 2.0])
    np.testing.assert_array_equal(made().fit(X.astype(str), Y).coef_, made().fit(X, Y).coef_)
    classes = np.array([0, 1])
    mixed = read_targets([True, 1.0, np.int64(0), "1", None], np.zeros((5, 1)))
    assert codes_of(mixed, classes).tolist() == [1, 1, 0, -1, -1]
    assert codes_of(np.array(["b", "a", 1], object), np.array(["a", "b"])).tolist() == [1, 0, -1]


def test_types_and_shapes_are_refused():
    """These are the same whatever a row holds."""
    for bad in (X + 1j, X.astype("datetime64[s]"), pd.DataFrame({"a": pd.to_datetime(["2020-01-01"] * 60), "b": 1.0})):
        with pytest.raises(ArgumentError, match="X must"):
            made().fit(bad, Y)
    with pytest.raises(ValueError, match="2D"):
        made().fit([[1.0, 2.0], [1.0]] * 30, Y)
    with pytest.raises(ArgumentError, match="labels of the type"):
        made().fit(X, Y.astype(str))


def test_learners_take_wide_and_signalling_numbers_in_silence():
    plan = ao.plan(dataset_size=2, batch_size=2, epochs=1, epsilon=8, delta=1e-6)
    wide = np.array([np.longdouble("1e400"), 1])
    signalling = np.array([0x7F800001, 0], np.uint32).view(np.float32)

    def own(theta, X, y):
        return wide[:, None] * np.ones((2, 2), np.longdouble)

    for y in (wide, signalling):
        Learner(plan, (2, 1), loss=Squared(), regularization=1.0).step([0, 1], np.eye(2), y)
        LeastSquares(plan, 2, bounds=1.0, target_bounds=(-1, 1)).step([0, 1], np.eye(2), y)
    Learner(plan, (2, 1), loss=CustomLoss(own), regularization=1.0).step([0, 1], np.eye(2), [0, 1])


def test_learners_have_one_life():
    plan = ao.plan(dataset_size=2, batch_size=2, epochs=1, epsilon=8, delta=1e-6)
    for learner in (
        Learner(plan, (2, 1), loss=Squared(), regularization=1.0),
        LeastSquares(plan, 2, bounds=1.0, target_bounds=(-1, 1)),
    ):
        for again in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TrainingError, match="must not be copied or pickled"):
                again(learner)


def test_a_unit_that_is_no_row_must_be_named():
    scaler = Scaler((-3.0, 3.0), epsilon=1.0, delta=1e-6, unit="user")
    plan = ao.plan(dataset_size=60, batch_size=20, epochs=1, epsilon=3, delta=1e-6, unit="user")
    ready = made(plan=plan, epsilon=1.0, batch_size=None, epochs=None)
    for learn in (made(unit="user").fit, made(unit="user", horizon=9).partial_fit, scaler.fit, ready.fit):
        with pytest.raises(ArgumentError, match="units must be given"):
            learn(X, Y)
    assert made(unit="user").fit(X, Y, units=np.arange(60) % 30).certificate_.plan.unit == "user"
    Scaler((-3.0, 3.0), unit="user").fit(X)  # public: it protects nobody


def test_no_key_is_shown():
    for shown in (made(), Scaler(key=KEY), make_pipeline(Scaler((-3.0, 3.0)), made()), made().set_params(key=KEY)):
        assert "secret" in repr(shown)
        assert "x07" not in repr(shown)
        assert "x07" not in str(clone(shown).get_params())
    assert made().get_params()["key"] == KEY
    assert bytes(range(32)) not in pickle.dumps(made())
