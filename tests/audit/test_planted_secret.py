"""Canaries in runs whose order secret draws draw: what is released is noise and canaries, and both claims are kept."""

from dataclasses import replace

import numpy as np
import pytest

import anyorder as ao
from anyorder.app import AuditSummary
from anyorder.audit import Canaries, plant, scores
from anyorder.audit import planted as planted_of
from anyorder.audit.canaries import as_released
from anyorder.audit.planted import known_curve
from anyorder.audit.secret_steps import SecretScorer
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.plan.plan import Plan
from anyorder.strategy import BandedInverse, Independent, ToeplitzBanded, Tree
from anyorder.workload import prefix_sum

KEY, COINS = bytes(range(32)), bytes(range(1, 33))
N, COUNT = 24, 400
CANARIES = Canaries(COUNT, COUNT, COUNT, 3)
BANDED = ToeplitzBanded([1.0, 0.6, 0.3], N)
PLANS = {
    "poisson": (PoissonSampling(N, 0.1), Independent(N)),
    "cyclic": (CyclicPoisson(N, 4, 0.3), BANDED),
    "truncated": (TruncatedPoisson(N, 0.3, 5, 40, cycle=4), BANDED),
    "bins": (BallsInBins(4, 6), BandedInverse([1.0, -0.6, -0.1], N)),
    "allocation": (RandomAllocation(4, 6), Independent(N)),
    "separated": (MinSeparationSampling(N, 4, 0.2), BANDED),
}


def planned(name, sigma=0.8, **changes):
    rule, strategy = PLANS[name]
    neighbours = "add-or-remove" if type(rule) is PoissonSampling else "zero-out"
    settings = {"clip_norm": 1.5, "sigma": sigma, "delta": 1e-3, "batch_size": 4, "neighbours": neighbours}
    return Plan(participation=rule, strategy=strategy, workload=prefix_sum(N), **{**settings, **changes})


def run(plan, canaries=CANARIES, known=True, key=KEY, coins=COINS, **how):
    """Units that bring nothing: what is released is noise and canaries."""
    release = ao.Release(plan, canaries.size, key=key)
    planted = plant(release, canaries, key=coins, known=known, informed=True, **how)
    for _ in range(plan.n):
        release.step(release.sample(40), np.zeros(canaries.size))
    return planted


@pytest.mark.parametrize("name", PLANS)
def test_included_canaries_are_in_the_steps_that_they_drew(name):
    plan = planned(name)
    planted = run(plan, totals=True)
    assert planted.steps is None
    there = np.array([[t in own for own in planted.drawn] for t in range(N)])
    np.testing.assert_allclose(
        planted.totals @ CANARIES.vectors().T, plan.clip_norm * (there & planted.included), atol=1e-9
    )
    assert all(plan.participation.pattern.allows(own) for own in planted.drawn)
    secret, known = planted.result(), planted.result(known=True)
    present = np.array([bool(own) for own in planted.drawn])
    np.testing.assert_array_equal(known.included, planted.included[present])
    own = [steps or (0,) for steps in planted.drawn]
    np.testing.assert_allclose(known.scores, scores(planted.released, plan.strategy, own, CANARIES)[present])
    C = plan.strategy.matrix()
    means = np.array([np.linalg.norm(C[:, list(steps)].sum(axis=1)) for steps in planted.drawn])[present]
    np.testing.assert_allclose(known.mus, means * plan.clip_norm / plan.noise_std)
    gap = known.scores[known.included].mean() - known.scores[~known.included].mean()
    assert gap / plan.noise_std == pytest.approx(known.mus.mean(), abs=6 / np.sqrt(len(known.scores)))
    assert known.epsilon == pytest.approx(plan.known_epsilon, rel=1e-5)
    assert known.epsilon >= plan.epsilon * (1 - 1e-5)
    assert known.mus.max() <= known.curve.mu * (1 + 1e-9)
    assert not known.refuted()
    assert not secret.refuted()
    assert secret.curve == plan.curve
    assert secret.mus is None
    assert secret.scores[secret.included].mean() > secret.scores[~secret.included].mean()


def test_who_knows_the_bins_sees_more_and_half_the_noise_is_found():
    plan = planned("bins", sigma=1.2)
    planted = run(plan)
    secret, known = planted.result(), planted.result(known=True)
    low, high = known.mu_estimate()
    assert low < known.mus.mean() < high
    assert known.lower_bound("gaussian") > secret.lower_bound("clopper_pearson")
    loud = run(planned("bins", sigma=0.6))  # half of what is held against it
    found = loud.result(known=True)
    for seen, halved in ((found, True), (known, False)):
        held = ao.audit.from_scores(
            seen.scores, included=seen.included, claim=known.curve, delta=1e-3, noise_std=seen.noise_std,
            independent=True,
        )  # fmt: skip
        assert held.refuted() is halved


def test_what_is_promised_should_batches_become_known_is_of_the_units_and_neighbours_of_the_plan():
    plan = replace(planned("bins"), neighbours="add-or-remove", unit="user")
    curve = run(plan).result(known=True).curve
    assert (curve.mu, curve.neighbours, curve.unit) == (plan.known_mu, "add-or-remove", "user")


def test_the_same_coins_come_from_the_same_key_and_no_others():
    plan = planned("bins")
    first, again = run(plan), run(plan)
    assert first.drawn == again.drawn
    assert first.drawn != run(plan, coins=bytes(32)).drawn
    free = [plant(ao.Release(plan, COUNT, key=KEY), CANARIES).drawn for _ in range(2)]
    assert free[0] != free[1]


@pytest.mark.parametrize("key", [None, KEY], ids=["of the system", "given"])
def test_coins_and_steps_and_places_of_canaries_are_drawn_by_keys_of_their_own(monkeypatch, key):
    """No two of them by one key, nor by one of the vectors or of the run, though the run has the same key given."""
    keys, purposes = {}, ["others"]

    def under(purpose, function):
        def called(*given, **named):
            purposes.append(purpose)
            try:
                return function(*given, **named)
            finally:
                purposes.pop()

        return called

    for name in ("words", "normal"):

        def read(source, *given, through=getattr(NoiseSource, name), **named):
            keys.setdefault(purposes[-1], set()).add(source.key)
            return through(source, *given, **named)

        monkeypatch.setattr(NoiseSource, name, read)
    monkeypatch.setattr(Canaries, "draw", under("who is in", Canaries.draw))
    monkeypatch.setattr(planted_of, "drawn_steps", under("steps", planted_of.drawn_steps))
    monkeypatch.setattr(planted_of, "drawn", under("places", planted_of.drawn))
    found = []
    for _ in range(2):
        keys.clear()
        run(planned("bins"), Canaries(50, 50, 50, 9), key=key, coins=key, totals=10)
        assert set(keys) == {"who is in", "steps", "places", "others"}
        found.append({purpose: frozenset(own) for purpose, own in keys.items()})
    for one in found:
        assert len(frozenset().union(*one.values())) == sum(map(len, one.values()))
        assert all(len(one[purpose]) == 1 for purpose in ("who is in", "steps", "places"))
        if key is not None:
            assert not frozenset().union(*one.values()) & {key}  # each is derived from it
    for purpose in ("who is in", "steps", "places"):
        assert (found[0][purpose] == found[1][purpose]) is (key is not None)


def test_what_is_known_must_be_asked_for_before_the_run():
    planted = run(planned("bins"), known=False)
    with pytest.raises(ArgumentError, match="known=True"):
        planted.result(known=True)
    with pytest.raises(ArgumentError, match="steps must be None"):
        plant(ao.Release(planned("bins"), COUNT), CANARIES, [0])
    rare = Plan(
        participation=CyclicPoisson(N, 4, 1e-6), strategy=BANDED, workload=prefix_sum(N), clip_norm=1.0, sigma=1.0,
        delta=1e-3, batch_size=4,
    )  # fmt: skip
    with pytest.raises(ArgumentError, match="canaries must be more"):
        run(rare).result(known=True)


def test_replace_one_puts_the_opposite_canary_in_the_same_steps():
    plan = planned("bins", neighbours="replace-one")
    planted = run(plan, totals=True)
    there = np.array([[t in own for own in planted.drawn] for t in range(N)])
    signs = np.where(planted.included, 1.0, -1.0)
    np.testing.assert_allclose(planted.totals @ CANARIES.vectors().T, plan.clip_norm * there * signs, atol=1e-9)
    known = planted.result(known=True)
    assert known.curve == known_curve(plan)
    assert known.curve.mu == pytest.approx(2 * known_curve(planned("bins")).mu)
    assert not known.refuted()
    assert not planted.result().refuted()


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
@pytest.mark.parametrize("strategy", [PLANS["bins"][1], Tree(N, "online")], ids=["banded inverse", "tree online"])
def test_scores_are_those_of_the_noise_that_is_released_and_of_what_a_coin_decides(strategy, neighbours):
    """Of a tree that loses some of what it knows, as it is in law; of the opposite canary, both ratios."""
    plan = replace(planned("bins", neighbours=neighbours), strategy=strategy)
    canaries = Canaries(40, 40, 40, 3)
    planted = run(plan, canaries, totals=True)
    law, signed = as_released(strategy), neighbours == "replace-one"
    scorer = SecretScorer(law, plan.participation, canaries, plan.clip_norm, plan.noise_std, signed=signed)
    for row in planted.released:
        scorer.add(row)
    np.testing.assert_allclose(planted.result().scores, scorer.scores(), rtol=1e-9)
    expected = scores(planted.released, law, planted.drawn, canaries)
    np.testing.assert_allclose(planted.result(known=True).scores, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("informed", [False, True])
def test_what_is_known_is_as_secret_and_as_independent_as_the_rest_of_the_audit(informed):
    """Scores less what the data add tell the data, whoever made them; and the data's own part ties scores together."""
    plan = planned("bins")
    release = ao.Release(plan, COUNT, key=KEY)
    planted = plant(release, CANARIES, key=COINS, known=True, informed=informed)
    for _ in range(plan.n):
        release.step(release.sample(40), np.zeros(COUNT))
    secret, known = planted.result(), planted.result(known=True)
    assert known.informed is secret.informed is informed
    assert known.independent is secret.independent is informed
    assert known.method == ("gaussian" if informed else "f_dp")
    apart = replace(secret, run_discarded=True)  # one of the two is not enough
    for shown in (known.to_dict, AuditSummary.of(apart, known=known).to_dict):
        if informed:
            with pytest.raises(ArgumentError, match="tells what the units added"):
                shown()
        else:
            assert shown()["refuted"] is False


@pytest.mark.parametrize("name", PLANS)
def test_what_is_promised_of_known_batches_is_what_the_plan_prints(name):
    """To twelve digits: what covers the rounding of coefficients is in the noise, and is not taken from the promise."""
    plan = planned(name)
    assert known_curve(plan).epsilon(plan.delta) == pytest.approx(plan.known_epsilon, rel=1e-12)
