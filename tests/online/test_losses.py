"""Losses: values and slopes against differences, labels that are none, and scores that overflow."""

import math

import numpy as np
import pytest

from anyorder.errors import ArgumentError
from anyorder.online.losses import CustomLoss, Hinge, Logistic, PoissonLoss, Softmax, Squared, loss_of

GENERATOR = np.random.default_rng(5)
LINEAR = [Logistic(), Softmax(4), Hinge(), Squared(), PoissonLoss()]


def labels(loss, m):
    match loss:
        case Softmax():
            return GENERATOR.integers(0, loss.classes, m)
        case Squared():
            return GENERATOR.normal(size=m)
        case PoissonLoss():
            return GENERATOR.poisson(2.0, m)
        case _:
            return GENERATOR.integers(0, 2, m)


@pytest.mark.parametrize("loss", LINEAR, ids=repr)
def test_slopes_are_the_derivatives_of_values(loss):
    m, h = 40, 1e-5
    s, y = GENERATOR.normal(size=(m, loss.outputs)), labels(loss, m)
    slopes = loss.slope(s, y)
    assert slopes.shape == (m, loss.outputs)
    for k in range(loss.outputs):
        change = np.zeros_like(s)
        change[:, k] = h
        measured = (loss.value(s + change, y) - loss.value(s - change, y)) / (2 * h)
        assert np.allclose(measured, slopes[:, k], atol=1e-8)


@pytest.mark.parametrize("loss", LINEAR, ids=repr)
def test_values_are_the_equations(loss):
    s, y = GENERATOR.normal(size=(9, loss.outputs)), labels(loss, 9)
    plain = {
        Logistic: lambda s, y: math.log(1 + math.exp(s[0])) - y * s[0],
        Softmax: lambda s, y: math.log(sum(map(math.exp, s))) - s[y],
        Hinge: lambda s, y: max(0, 1 - s[0] if y else 1 + s[0]),
        Squared: lambda s, y: (s[0] - y) ** 2 / 2,
        PoissonLoss: lambda s, y: math.exp(s[0]) - y * s[0],
    }[type(loss)]
    assert np.allclose(loss.value(s, y), [plain(*one) for one in zip(s.tolist(), y.tolist(), strict=True)])


@pytest.mark.parametrize("loss", LINEAR[:3], ids=repr)
def test_slopes_keep_below_the_lipschitz_constant_and_come_near_it(loss):
    s = np.concatenate([GENERATOR.normal(size=(500, loss.outputs)) * scale for scale in (1.0, 30.0, 1e5)])
    norms = np.linalg.norm(loss.slope(s, labels(loss, len(s))), axis=1)
    assert 0.99 * loss.lipschitz < norms.max() <= loss.lipschitz
    assert Squared().lipschitz == PoissonLoss().lipschitz == CustomLoss(len).lipschitz == math.inf


@pytest.mark.parametrize("loss", LINEAR, ids=repr)
def test_scores_that_overflow_give_no_warning_and_finite_slopes(loss):
    s = np.full((2, loss.outputs), 1e4)
    s[1] = -1e4
    s[0, -1] = 1e4 + 1
    assert np.isfinite(loss.slope(s, np.array([0, 1]))).all()
    if not isinstance(loss, PoissonLoss):
        assert np.isfinite(loss.value(s, np.array([0, 1]))).all()
    assert np.isnan(loss.slope(np.full((1, loss.outputs), np.nan), np.array([0]))).all()


def test_a_count_far_below_its_mean_has_a_slope_that_leads_back():
    slope = PoissonLoss().slope(np.array([[50.0], [1e6]]), np.array([3, 3]))
    assert slope[0, 0] == math.exp(50.0) - 3
    assert slope[1, 0] == math.exp(100.0) - 3


@pytest.mark.parametrize(
    ("loss", "bad"),
    [
        (Logistic(), [-1.0, 2.0, 0.5, np.nan, np.inf]),
        (Hinge(), [-1.0, 2.0, 0.5, np.nan, np.inf]),
        (Softmax(3), [-1.0, 3.0, 0.5, np.nan, np.inf, -np.inf, 1e300]),
        (Squared(), [np.nan, np.inf]),
        (PoissonLoss(), [-1.0, np.nan, np.inf]),
    ],
    ids=repr,
)
def test_a_label_that_is_none_has_no_slope_and_nothing_is_raised(loss, bad):
    y = np.array([*bad, 0.0])
    s = np.zeros((len(y), loss.outputs))
    assert np.isnan(loss.slope(s, y)[:-1]).all()
    assert np.isnan(loss.value(s, y)[:-1]).all()
    assert np.isfinite(loss.slope(s, y)[-1]).all()


def test_booleans_are_labels():
    assert np.array_equal(Logistic().slope([[0.0], [0.0]], [False, True]), [[0.5], [-0.5]])


def test_the_hinge_has_a_subgradient_at_its_kink():
    assert Hinge().slope([[1.0]], [1])[0, 0] == 0.0
    assert Hinge().slope([[np.nextafter(1.0, 0.0)]], [1])[0, 0] == -1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: Logistic().slope(np.zeros((2, 2)), [0, 1]),
        lambda: Logistic().slope(np.zeros(2), [0, 1]),
        lambda: Logistic().slope(np.zeros((2, 1)), [0, 1, 1]),
        lambda: Logistic().slope(np.zeros((2, 1)), ["no", "yes"]),
        lambda: Logistic().slope(np.zeros((2, 1)), [[0], [1]]),
        lambda: Logistic().slope(np.zeros((2, 1), complex), [0, 1]),
        lambda: Softmax(1),
        lambda: Softmax(2.5),
        lambda: CustomLoss(3),
        lambda: CustomLoss(len, value=3),
        lambda: CustomLoss(len, outputs=0),
    ],
)
def test_shapes_and_types_are_refused(call):
    with pytest.raises(ArgumentError):
        call()


@pytest.mark.parametrize(
    ("word", "loss"),
    [("hinge", Hinge()), ("logistic", Logistic()), ("poisson", PoissonLoss()), ("softmax", Softmax(3)),
     ("squared", Squared())],
)  # fmt: skip
def test_words_name_losses_and_nothing_else(word, loss):
    assert loss_of(word, 3) == loss == loss_of(loss, 3)
    with pytest.raises(ArgumentError, match="loss must be one of"):
        loss_of(word + "s", 3)
