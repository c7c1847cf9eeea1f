"""What `Audited` says of itself: each number at the confidence asked for, and rounded to the safe side."""

import numpy as np
import pytest

from anyorder.accounting import Gaussian
from anyorder.audit import Audited, epsilon_lower_bound
from anyorder.audit.result import Stated

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
