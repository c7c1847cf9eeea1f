"""The laws of privacy curves, over every kind: a kind without a case fails the suite."""

import itertools
import math
from functools import cache
from typing import get_args

import pytest

from anyorder.accounting import BoundedRange, Gaussian, Sampled
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.amplification.methods import Pld
from anyorder.accounting.bounded_range import bounded_range_mu
from anyorder.accounting.curves import Composed, Curve, compose
from anyorder.accounting.risk import point_tpr
from anyorder.participation import BallsInBins, MinSeparationSampling, RandomAllocation, TruncatedPoisson
from anyorder.strategy import Independent, ToeplitzBanded

OFTEN = Sampled(1.5, 0.5, 4)
CURVES = {
    "nothing": Gaussian(0.0),
    "mu 1e-6": Gaussian(1e-6),
    "mu 1": Gaussian(1.0),
    "mu 2, replace-one": Gaussian(2.0, neighbours="replace-one", unit="user"),
    "mu 50": Gaussian(50.0),
    "sampled": Sampled(1.0, 0.02, 300),
    "sampled once": Sampled(0.8, 0.1, 1),
    "never by a coin": Sampled(3.0, 1.0, 9),
    "sampled, much noise": Sampled(1e3, 0.1, 10),
    "a choice, then a training": compose(Gaussian(0.5, neighbours="add-or-remove"), OFTEN),
    "two trainings": compose(OFTEN, Sampled(1.0, 0.01, 100)),
    "one draw": BoundedRange(3.0, 1),
    "many draws": BoundedRange(0.1, 200, neighbours="replace-one"),
    "draws, then a training": compose(BoundedRange(0.2, 20), Gaussian(0.7)),
    "draws and sums under one coin": Sampled(1.5, 0.1, 20, e0=0.2, draws=5),
    "balls in bins": Amplified(ToeplitzBanded([1.0, 0.5], 12), BallsInBins(3, 4), 1.0, neighbours="add-or-remove"),
    "truncated": Amplified(Independent(12), TruncatedPoisson(12, 0.1, 5, 30), 3.0, Pld()),
    "allocation": Amplified(Independent(12), RandomAllocation(3, 4), 1.5, unit="user"),
    "separated": Amplified(ToeplitzBanded([1.0, 0.5], 12), MinSeparationSampling(12, 3, 0.2), 2.0),
}
DELTAS = (0.3, 1e-2, 1e-5, 1e-9, 1e-13, 1e-300)
EPSILONS = (0.0, 1e-3, 0.5, 2.0, 20.0)
each = pytest.mark.parametrize("name", CURVES)


@cache
def epsilon(name, delta):
    return CURVES[name].epsilon(delta)


@cache
def delta(name, epsilon):
    return CURVES[name].delta(epsilon)


def test_every_kind_has_a_case():
    assert {type(curve) for curve in CURVES.values()} == set(get_args(Curve))


@each
def test_epsilon_falls_in_delta_and_delta_in_epsilon(name):
    found = [epsilon(name, value) for value in DELTAS]
    assert all(a <= b for a, b in itertools.pairwise(found))
    assert all(value >= 0 for value in found)
    found = [delta(name, value) for value in EPSILONS]
    assert all(a >= b for a, b in itertools.pairwise(found))
    assert all(0 <= value <= 1 for value in found)


@each
def test_what_holds_at_delta_holds_at_epsilon_and_back(name):
    for value in DELTAS:
        at = epsilon(name, value)
        if at < math.inf:
            assert CURVES[name].delta(at) <= value * (1 + 1e-9)
    for value in EPSILONS:
        at = delta(name, value)
        if 1e-9 < at < 1 or (0 < at < 1 and type(CURVES[name]) is Gaussian):  # below, transforms cannot tell
            assert CURVES[name].epsilon(at) <= value * (1 + 1e-6) + 1e-9


@each
def test_a_curve_beside_nothing_is_itself_and_beside_another_no_less(name):
    curve = CURVES[name]
    nothing = Gaussian(0.0, neighbours=curve.neighbours, unit=curve.unit)
    other = Gaussian(0.7, neighbours=curve.neighbours, unit=curve.unit)
    assert compose(curve) == compose(curve, nothing) == compose(nothing, curve) == curve
    both = compose(curve, other)
    assert both == compose(other, curve)
    assert hash(both) == hash(compose(other, curve))
    for value in (1e-2, 1e-5):
        # pessimistic grids differ from one composition to the next
        assert both.epsilon(value) >= max(epsilon(name, value), other.epsilon(value)) * (1 - 1e-3)


def without_coins(part):
    """The mu of a part, each draw as the Gaussian that is the least above it."""
    match part:
        case Gaussian():
            return part.mu
        case BoundedRange():
            return bounded_range_mu(part.e0) * math.sqrt(part.draws)
        case Sampled():
            draws = bounded_range_mu(part.e0) * math.sqrt(part.draws) if part.draws else 0.0
            return math.sqrt(part.n) * math.hypot(1 / part.sigma, draws)
        case Amplified():
            return part.known_mu


@each
def test_sampling_never_adds(name):
    parts = CURVES[name].parts if type(CURVES[name]) is Composed else (CURVES[name],)
    unsampled = Gaussian(compose(*map(without_coins, parts)))
    assert all(epsilon(name, value) <= unsampled.epsilon(value) for value in DELTAS)
    assert all(delta(name, value) <= unsampled.delta(value) for value in EPSILONS)


@each
def test_mu_is_there_for_gaussians_alone(name):
    assert (CURVES[name].mu is not None) == (type(CURVES[name]) is Gaussian)


@each
def test_no_attacker_reaches_more_than_any_point_of_the_curve_allows(name):
    curve = CURVES[name]
    rates = (1e-4, 0.01, 0.05, 0.5, 0.9)
    tprs = [curve.tpr(rate) for rate in rates]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(tprs))
    assert all(rate <= tpr <= 1 for rate, tpr in zip(rates, tprs, strict=True))
    assert all(tpr - rate <= curve.advantage() + 1e-9 for rate, tpr in zip(rates, tprs, strict=True))
    assert curve.advantage() == pytest.approx(delta(name, 0.0), rel=1e-9, abs=1e-15)
    for value in EPSILONS:
        allowed = [point_tpr(value, delta(name, value), rate) for rate in rates]
        assert all(tpr <= most * (1 + 1e-6) for tpr, most in zip(tprs, allowed, strict=True))
