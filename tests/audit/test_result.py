"""What `Audited` says of itself: each number at the confidence asked for, and rounded to the safe side."""

import numpy as np
import pytest

from anyorder.accounting import Gaussian
from anyorder.app import AuditSummary
from anyorder.audit import epsilon_lower_bound
from anyorder.audit.result import Audited, Stated

COINS = np.arange(300) % 2 == 0
SCORES = 3.0 * COINS + np.random.default_rng(11).standard_normal(300)


def audited(**changes):
    given = {
        "scores": SCORES, "included": COINS, "noise_std": 1.0, "mus": np.full(300, 2.0), "curve": Gaussian(2.0),
        "delta": 1e-5, "epsilon": 8.00001, **changes,
    }  # fmt: skip
    return Audited(**given)


@pytest.mark.parametrize("confidence", [0.6, 0.999])
@pytest.mark.parametrize("delta", [1e-5, 1e-2])
def test_a_bound_is_of_the_confidence_that_is_asked_for_at_the_delta_of_the_claim(confidence, delta):
    given = audited(delta=delta)
    for method in ("one_run", "f_dp", "gaussian", "clopper_pearson"):
        assert given.lower_bound(method, confidence) == epsilon_lower_bound(SCORES, COINS, delta, confidence, method)
    assert given.lower_bound(confidence=confidence) == given.lower_bound("f_dp", confidence)
    assert audited(delta=delta, curve=Stated(8.0, delta)).lower_bound() == given.lower_bound("one_run")
    low, high = given.mu_estimate(confidence)
    assert (high - low < 0.5) is (confidence < 0.9)


def test_a_claim_is_printed_rounded_up_and_a_bound_rounded_down(monkeypatch):
    monkeypatch.setattr(Audited, "lower_bound", lambda self: 1.23499)
    told = str(audited())
    assert "claimed_epsilon: 8.001 at delta 1e-05" in told
    assert "epsilon at least 1.234 (" in told


def test_a_verdict_is_printed_in_the_word_that_refuted_gives():
    for curve, word in ((Gaussian(4.0), "verdict: not refuted at"), (Gaussian(1e-3), "verdict: REFUTED at")):
        given = audited(curve=curve, independent=True)
        assert word in str(given)
        assert given.refuted() is given.to_dict()["refuted"] is (word == "verdict: REFUTED at")


@pytest.mark.parametrize("curve", [Gaussian(2.0), Stated(8.0, 1e-5)])
@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize(
    ("side", "words"),
    [(True, "300 canaries in and none out"), (False, "300 canaries out and none in")],
)
def test_an_audit_whose_coins_are_all_alike_says_that_nothing_was_tested(curve, independent, side, words):
    """However far the scores lie from what the claim allows: it is no verdict that speaks for the claim."""
    for scores in (SCORES, SCORES + 1e6, -SCORES):
        given = audited(curve=curve, independent=independent, scores=scores, included=np.full(300, side))
        assert not given.refuted()
        told = str(given)
        assert told.endswith(f"\n{given.alike}")
        assert given.alike.startswith("nothing was tested by scores: all draws came out alike")
        assert words in told
        verdict = str(AuditSummary.of(given)).splitlines()[-1]
        assert verdict.split(maxsplit=1) == ["verdict", f"not refuted, and {given.alike}"]
    for coins in (COINS, np.arange(300) == 7, np.arange(300) != 7):
        given = audited(curve=curve, independent=independent, included=coins)
        assert given.alike is None
        assert "alike" not in str(given)
        assert "alike" not in str(AuditSummary.of(given))


def test_of_two_tests_the_smaller_p_counts_twice():
    """Weak scores, so that the product is below 1."""
    weak = 0.9 * COINS + np.random.default_rng(3).standard_normal(300)
    given = audited(curve=Stated(0.05, 1e-5), epsilon=0.05, scores=weak, independent=True)
    assert given.methods == ("clopper_pearson", "f_dp")
    least = min(given.p_value(method) for method in given.methods)
    assert 0 < least < 0.5
    assert given.p_value() == 2 * least


def test_coins_that_are_alike_are_not_told_of_a_run_that_is_as_secret_as_the_data():
    hidden = audited(included=np.full(300, True), informed=True)
    assert "canaries" not in str(hidden)
    assert "canaries" not in str(AuditSummary.of(hidden))
