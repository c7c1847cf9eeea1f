"""What attackers reach: closed forms, attacks by hand, and what riskcal finds of 1000 curves."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

import anyorder as ao
from anyorder.accounting import BoundedRange, Gaussian, Sampled
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.amplification.methods import Deterministic, MonteCarlo
from anyorder.accounting.risk import RATES, _least, point_reach, reach
from anyorder.errors import ArgumentError, PlanError
from anyorder.participation import BallsInBins
from anyorder.strategy import ToeplitzBanded

REFERENCES = json.loads((Path(__file__).parents[1] / "refs" / "riskcal.json").read_text())["rows"]
FPRS = (1e-9, 1e-4, 0.001, 0.01, 0.05, 0.3, 0.5, 0.8, 0.99)


# -- attacks by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [1e-3, 0.3, 1.0, 4.0])
def test_the_best_test_of_two_gaussians_is_the_bound_and_no_more(mu):
    curve = Gaussian(mu)
    for fpr in FPRS:
        true = norm.sf(norm.isf(fpr) - mu)
        assert true <= curve.tpr(fpr) <= true * (1 + 1e-10)
        assert curve.reconstruction(fpr) == curve.tpr(fpr)
        assert curve.tpr(fpr, group=3) == pytest.approx(Gaussian(3 * mu).tpr(fpr), rel=1e-15)
    true = 2 * norm.cdf(mu / 2) - 1
    assert true <= curve.advantage() <= true * (1 + 1e-10)
    assert curve.advantage(group=3) == Gaussian(3 * mu).advantage()
    half = norm.sf(norm.isf(0.05) - 2 * mu)  # what an attacker reaches where half the noise was added
    assert half > curve.tpr(0.05)


def best_tests(p, q):
    """(FPR, TPR) of the likelihood ratio tests of q against p: the corners by Neyman and Pearson."""
    order = np.argsort(-q / p)
    return np.vstack([[0, 0], np.cumsum(np.column_stack([p[order], q[order]]), axis=0)])


def turns_right(a, b, c):
    return (b[0] - a[0]) * (c[1] - a[1]) < (b[1] - a[1]) * (c[0] - a[0])


def hull(points):
    """The upper concave hull of points."""
    found = []
    for point in sorted(map(tuple, points)):
        while len(found) > 1 and not turns_right(*found[-2:], point):
            found.pop()
        found.append(point)
    return np.array(found)


def test_any_two_distributions_by_enumeration_in_both_directions():
    """The bound is the hull of the best tests of both directions: neither alone would do."""
    draw = np.random.default_rng(2)
    for _ in range(20):
        p, q = draw.dirichlet(np.full(6, 0.5), 2) * 0.999 + 0.001 / 6

        def delta(epsilon, p=p, q=q):
            return max(np.maximum(p - math.exp(epsilon) * q, 0).sum(), np.maximum(q - math.exp(epsilon) * p, 0).sum())

        one, other = best_tests(p, q), best_tests(q, p)
        both = hull([*one, *other])
        assert delta(0.0) == pytest.approx((both[:, 1] - both[:, 0]).max())
        for fpr in FPRS:
            true = np.interp(fpr, *both.T)
            found = _least(delta, fpr)
            assert true * (1 - 1e-12) <= found <= true * (1 + 1e-3 if fpr < 1e-3 else 1 + 1e-4)
            assert found >= max(np.interp(fpr, *one.T), np.interp(fpr, *other.T)) * (1 - 1e-12)


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.1), (0.7, 0.02), (3.0, 0.5)])
def test_both_attacks_on_a_sampled_step_stay_below_its_bound_and_one_attains_it(sigma, q):
    """Whoever looks for units that took part, and whoever looks for units that did not."""
    curve, t = Sampled(sigma, q, 1), np.linspace(-9, 12, 200_001)
    out, into = norm.sf(t), (1 - q) * norm.sf(t) + q * norm.sf(t - 1 / sigma)
    larger = 0
    for fpr in (0.001, 0.01, 0.05, 0.3, 0.7):
        present, absent = np.interp(fpr, out[::-1], into[::-1]), np.interp(fpr, 1 - into, 1 - out)
        found = curve.tpr(fpr)
        assert max(present, absent) * (1 - 1e-5) <= found <= max(present, absent) * 1.02
        larger += absent > present
        noisier = Sampled(2 * sigma, q, 1).tpr(fpr)
        assert present > noisier  # an attack on half the claimed noise is seen
    assert 0 < larger < 5  # so that a bound of one direction alone fails above


def test_a_group_is_that_many_steps_one_after_the_other():
    """As for a Gaussian, whose loss distribution a draw that always falls so has: group * mu."""
    curve, true = Sampled(3.0, 1.0, 9), Gaussian(1.0)
    assert true.tpr(0.05, group=3) * (1 - 1e-9) <= curve.tpr(0.05, group=3) <= true.tpr(0.05, group=3) * 1.001
    assert true.advantage(group=2) * (1 - 1e-9) <= curve.advantage(group=2) <= true.advantage(group=2) * 1.001
    pure = BoundedRange(0.4, 1)
    assert pure.advantage() < pure.advantage(group=2) <= 2 * pure.advantage()


def test_samples_hold_for_one_point_and_their_curve_is_the_bound():
    sampled = Amplified(ToeplitzBanded([1.0, 0.5], 12), BallsInBins(3, 4), 1.0, MonteCarlo(10_000, 1e-6))
    whole = Amplified(ToeplitzBanded([1.0, 0.5], 12), BallsInBins(3, 4), 1.0, Deterministic())
    assert reach(sampled) == reach(whole)


def test_a_pair_alone_says_less_than_its_curve():
    for curve in (Gaussian(0.8), Sampled(1.0, 0.05, 100)):
        for delta in (0.1, 1e-5):
            whole, point = reach(curve), point_reach(curve.epsilon(delta), delta)
            assert whole.advantage <= point.advantage * (1 + 1e-9)
            assert all(a <= b * (1 + 1e-9) for a, b in zip(whole.tprs, point.tprs, strict=True))
    assert point_reach(1e4, 0.1).advantage == 1


# -- riskcal -----------------------------------------------------------------------------------------------------------


def test_gaussians_and_points_are_riskcals():
    for kind, given, advantage, tprs in REFERENCES:
        if kind != "sampled":
            found = reach(Gaussian(*given)) if kind == "gaussian" else point_reach(*given)
            assert found.advantage == pytest.approx(advantage, rel=1e-9, abs=1e-14)
            assert found.tprs == pytest.approx(tprs, rel=1e-9, abs=1e-14)


def test_sampled_curves_are_riskcals():
    """Every fiftieth: of the same loss distribution to rounding, and of ours, on its finer grid, below that."""
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    for _, (sigma, q, steps), advantage, tprs in [row for row in REFERENCES if row[0] == "sampled"][::50]:
        losses = pld.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=1e-3)
        delta = losses.self_compose(steps).get_delta_for_epsilon
        assert [_least(delta, fpr) for fpr in RATES] == pytest.approx(tprs, rel=1e-6)
        assert delta(0.0) == pytest.approx(advantage, rel=1e-6)
        found = reach(Sampled(sigma, q, steps))
        assert [found.advantage, *found.tprs] == pytest.approx([advantage, *tprs], rel=0.02)
        assert found.advantage <= advantage * (1 + 1e-6)


# -- a budget asked for as a risk --------------------------------------------------------------------------------------

BASE = {"dataset_size": 200, "batch_size": 20, "epochs": 2, "delta": 1e-4, "mechanism": "independent"}
RISKS = [("advantage", 0.1), ("advantage", 0.6), ("tpr", 0.01, 0.05), ("tpr", 0.2, 0.21)]


SECRET = {"order": "poisson", "dataset_size": 80}  # of few steps, whose claims a search takes a moment for
COUNTS = {"mechanism": ao.mechanism("independent", selection=ao.sparse.Counts(5.0))}


@pytest.mark.parametrize(
    ("risk", "more"),
    [*((risk, {}) for risk in RISKS), (RISKS[2], SECRET), (RISKS[0], {**SECRET, "order": "balls-in-bins"}),
     (RISKS[2], {"neighbours": "replace-one"}), (RISKS[2], COUNTS)],
)  # fmt: skip
def test_a_risk_that_is_asked_for_is_kept_and_nearly_used_up(risk, more):
    plan = ao.plan(**{**BASE, **more}, risk=risk)
    most = risk[-1]
    found = plan.curve.advantage() if risk[0] == "advantage" else plan.curve.tpr(risk[1])
    assert most * (1 - 1e-4) <= found <= most * (1 + 1e-9)
    again = ao.plan(**{**BASE, **more}, noise_multiplier=plan.noise_multiplier * 0.99)
    worse = again.curve.advantage() if risk[0] == "advantage" else again.curve.tpr(risk[1])
    assert worse > most


def test_what_is_no_risk_is_refused():
    for risk in (0.1, "advantage", ("advantage",), ("advantage", 0.0), ("tpr", 0.05, 0.01), ("fpr", 0.1, 0.2)):
        with pytest.raises(ArgumentError, match="risk"):
            ao.plan(**BASE, risk=risk)
    with pytest.raises(ArgumentError, match="exactly one of epsilon, noise_multiplier and risk"):
        ao.plan(**BASE, risk=RISKS[0], epsilon=1.0)
    with pytest.raises(PlanError, match="monte_carlo"):
        ao.plan(**BASE, order=ao.order("balls-in-bins", method="monte_carlo"), risk=RISKS[0])
    for wrong in (0.0, 1.0, math.nan):
        with pytest.raises(ArgumentError, match="fpr"):
            Gaussian(1.0).tpr(wrong)
        with pytest.raises(ArgumentError, match="prior"):
            Gaussian(1.0).reconstruction(wrong)
    with pytest.raises(ArgumentError, match="group"):
        Gaussian(1.0).advantage(group=0)


def test_a_card_prints_mu_first_where_it_is_exact_and_the_attack_of_the_curve_itself():
    for order in (None, "poisson"):
        plan = ao.plan(**BASE, order=order, epsilon=2.0)
        facts = dict(plan.facts())
        assert facts["privacy"].startswith("mu = " if order is None else "epsilon <= ")
        shown = float(facts["attacks"].split()[-2])
        assert 100 * plan.curve.tpr(0.01) <= shown <= 100 * plan.curve.tpr(0.01) * 1.01
        assert shown < 100 * point_reach(plan.epsilon, plan.delta).found
