"""What an audit says: which bounds and tests, at which confidence, rounded to the safe side, in which words."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import trapezoid

from anyorder.accounting import Gaussian, Sampled
from anyorder.app import AuditSummary, plot_audit
from anyorder.app.charts import audit_panel, not_refuted
from anyorder.audit.laws import NoiseLaw
from anyorder.audit.result import Audited, Stated

MU, DELTA = 2.0, 1e-5


def seen(mu=MU, included=80, count=200, **changes):
    """Canaries of which the first are in, each score by the law of N(mu, 1) or N(0, 1), times a deviation of 3."""
    coins = np.arange(count) < included
    scores = 3.0 * (mu * coins + np.random.default_rng(7).standard_normal(count))
    given = {
        "scores": scores, "included": coins, "noise_std": 3.0, "mus": np.full(count, MU), "curve": Gaussian(MU),
        "delta": DELTA, "epsilon": Gaussian(MU).epsilon(DELTA), "independent": True, **changes,
    }  # fmt: skip
    return Audited(**given)


def row(text, label):
    """What stands behind a label of the card."""
    [found] = [line.partition("  ")[2] for line in map(str.strip, text.splitlines()) if line.startswith(label + "  ")]
    return found


@pytest.mark.parametrize("confidence", [0.6, 0.999])
def test_every_bound_and_interval_is_of_the_confidence_and_the_methods_that_were_asked_for(confidence):
    audited, known, methods = seen(), seen(count=150), ("one_run", "f_dp", "gaussian")
    summary = AuditSummary.of(audited, methods, confidence, known=known)
    for of, found in ((audited, summary), (known, summary.known)):
        assert found.bounds == {method: of.lower_bound(method, confidence) for method in methods}
        assert found.mu_seen == of.mu_estimate(confidence)
        assert found.confidence == confidence
    shown = str(summary)
    assert f"{100 * confidence:g} %" in row(shown, "mu seen")
    assert row(shown, "each bound holds").startswith(f"in {100 * confidence:g} % of all runs")
    assert "95 %" not in shown


def test_the_tests_of_the_noise_are_paid_for_together():
    law = NoiseLaw({"variance": 2e-7, "largest": 0.5, "shape": 0.9, "correlation": 1.0})
    summary = AuditSummary.of(seen(), law=law)
    assert summary.p_values["noise"] == law.p_value == 8e-7
    assert not summary.refuted


@pytest.mark.parametrize("included", [0, 1, 199, 200])
def test_without_two_canaries_of_each_kind_no_law_of_scores_is_read(included):
    summary = AuditSummary.of(seen(included=included))
    assert set(summary.unfit) == {"gaussian"}
    assert "two that are out" in summary.unfit["gaussian"]
    assert set(summary.p_values) == {"f_dp"}
    assert summary.mu_seen is None
    assert not AuditSummary.of(seen(included=included), ("one_run",)).unfit  # what nobody asked for lacks nothing
    assert set(AuditSummary.of(seen(included=2)).bounds) == {"one_run", "f_dp", "gaussian", "clopper_pearson"}


def test_scores_that_noise_has_not_touched_are_a_verdict_and_no_error():
    """A mechanism that forgot its noise: no mu is finite, and every claim is refuted."""
    coins = seen().included
    forgotten = seen(scores=6.0 * coins)
    summary = AuditSummary.of(forgotten)
    assert set(summary.p_values) == {"gaussian"}
    assert summary.refuted
    assert summary.to_dict()["mu_seen"] is None
    assert "REFUTED" in str(summary)
    assert "do not spread" in summary.unfit["gaussian"]
    told = forgotten.to_dict()
    assert told["refuted"] is True
    assert told["mu_low"] is told["mu_high"] is None
    for nothing in (np.ones(200), -6.0 * coins):  # nothing tells the noise, and nothing speaks against the claim
        audited = seen(scores=nothing)
        assert audited.p_value() == 1
        summary = AuditSummary.of(audited)
        assert set(summary.p_values) == {"f_dp"}
        assert not summary.refuted
        assert audited.to_dict()["mu_low"] is None


ALL = ("one_run", "f_dp", "gaussian", "clopper_pearson")


@pytest.mark.parametrize(
    ("changes", "above"),
    [
        ({}, ALL),
        ({"independent": False}, ("one_run", "f_dp")),
        ({"curve": Stated(0.01, DELTA)}, ALL),
        ({"curve": Stated(0.01, DELTA), "mus": None}, ("one_run", "clopper_pearson")),
        ({"curve": Stated(0.01, DELTA), "mus": None, "independent": False}, ("one_run",)),
        ({"epsilon": 1e6}, ()),
    ],
    ids=str,
)
def test_only_bounds_whose_assumptions_hold_are_said_to_lie_above_the_claim(changes, above):
    audited = seen(mu=6.0, count=2000, included=1000, **{"epsilon": 0.01, "mus": np.full(2000, MU), **changes})
    summary = AuditSummary.of(audited)
    assert set(summary.bounds) == set(ALL)
    assert all(0.01 < bound < 1e6 for bound in summary.bounds.values())
    assert set(summary.above) == set(above)


def test_what_is_written_has_each_number_under_its_own_name():
    summary = AuditSummary.of(seen(mus=np.linspace(1.5, MU, 200)))
    written = summary.to_dict()
    assert written["canaries"] == {"in": 80, "out": 120, "mu": {"smallest": 1.5, "largest": MU}}
    assert (written["mu_seen"]["low"], written["mu_seen"]["high"]) == summary.mu_seen
    assert written["mu_seen"]["low"] < written["mu_seen"]["high"]
    assert written["claimed"] == {"epsilon": Gaussian(MU).epsilon(DELTA), "delta": DELTA, "mu": MU}
    assert "known" not in written
    known = AuditSummary.of(seen(), known=seen(count=90)).to_dict()["known"]
    assert known["canaries"]["in"] + known["canaries"]["out"] == 90


def test_a_claim_is_shown_rounded_up_and_what_was_seen_rounded_down():
    audited = seen(epsilon=3.00001)
    bounds = {"one_run": 1.23499, "f_dp": 2.34599}
    known = replace(AuditSummary.of(replace(audited, epsilon=5.00001)), bounds={"f_dp": 4.56799})
    summary = replace(AuditSummary.of(audited), bounds=bounds, unfit={"gaussian": "of a reason"}, known=known)
    shown = str(summary)
    assert row(shown, "claimed") == "epsilon <= 3.001 at delta = 1e-05; mu = 2"
    assert row(shown, "canaries") == "200: 80 in, 120 out, by secret draws"
    assert row(shown, "epsilon at least") == "1.234  one_run: whatever the mechanism is"
    assert "2.345  f_dp: of any mechanism whose curve is a Gaussian's" in shown
    assert "none  gaussian: of a reason" in shown
    assert row(shown, "if known") == "epsilon <= 5.001; 200 canaries, their steps known"
    assert "epsilon at least 4.567 f_dp" in shown


def test_each_p_value_stands_beside_the_words_of_its_test():
    p_values = {"f_dp": 0.11, "gaussian": 0.12, "clopper_pearson": 0.13, "known": 0.14, "noise": 0.15}
    shown = str(replace(AuditSummary.of(seen()), p_values=p_values))
    for words in (
        "0.11  the scores, whatever the mechanism is",
        "0.12  the scores, independent and normal",
        "0.13  the scores, independent\n",
        "0.14  of what is promised if batches become known: the scores that know them",
        "0.15  the noise itself, sums known",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("p_values", "words"),
    [
        ({"gaussian": 0.9e-6}, "REFUTED: of true claims less than one in a million would look like this"),
        ({"gaussian": 0.5, "known": 0.4e-6}, "REFUTED: of true claims less than one in a million would look like this"),
        ({"gaussian": 0.5, "noise": 0.4e-6}, "REFUTED: what was added is not the noise of the plan"),
        ({"gaussian": 0.6e-6, "noise": 0.4e-6}, "REFUTED: what was added is not the noise of the plan"),
        ({"gaussian": 0.6e-6, "noise": 0.5}, "not refuted: this run does not speak against the claim"),
    ],
    ids=str,
)
def test_the_verdict_says_which_test_refutes_and_its_colour_agrees(p_values, words):
    summary = replace(AuditSummary.of(seen(epsilon=1e6)), p_values=p_values)
    assert row(str(summary), "verdict").startswith(words)
    assert audit_panel(summary).border_style == ("red" if words.startswith("REFUTED") else "green")


def test_bounds_above_a_claim_are_counted_and_as_frequent_as_the_confidence_says():
    for confidence, often in ((0.95, "twenty"), (0.9, "10"), (0.99, "100"), (0.985, "66")):
        assert not_refuted(1, confidence).endswith(
            f"1 of the bounds lies above the claim, as they do in up to one true claim of {often}: audit again, with "
            "more canaries"
        )
        assert "3 of the bounds lie above" in not_refuted(3, confidence)
    summary = replace(AuditSummary.of(seen(epsilon=0.01), confidence=0.9), p_values={"gaussian": 0.5})
    assert row(str(summary), "verdict") == not_refuted(4, 0.9)


def drawn(audited, monkeypatch):
    figures = []
    monkeypatch.setattr("anyorder.app.charts.save_figure", lambda figure, path: figures.append(figure))
    plot_audit(audited, "none.png")
    return figures[0].axes[0]


def test_the_lines_of_a_picture_are_densities_whose_mean_is_that_of_the_claim(monkeypatch):
    mus = np.where(np.arange(200) < 150, 1.0, 3.0)
    axes = drawn(seen(mus=mus, epsilon=8.00001), monkeypatch)
    assert "epsilon 8.01 at delta 1e-05" in axes.get_title(loc="left")
    for line, mean in zip(axes.get_lines(), (0.0, 1.5), strict=True):
        x, y = line.get_data()
        assert trapezoid(y, x) == pytest.approx(1, abs=0.01)
        assert trapezoid(x * y, x) == pytest.approx(mean, abs=0.02)


def test_a_picture_of_secret_sampling_promises_no_law(monkeypatch):
    audited = seen(mus=None, noise_std=None, curve=Sampled(1.0, 0.1, 10), epsilon=1.0)
    axes = drawn(audited, monkeypatch)
    assert not axes.get_lines()
    assert "log likelihood ratio" in axes.get_xlabel()


def test_noise_that_is_not_the_plans_is_refuted_though_all_coins_are_alike():
    law = NoiseLaw({"variance": 1e-30, "largest": 0.5, "shape": 0.9, "correlation": 1.0})
    summary = AuditSummary.of(seen(included=0), law=law)
    assert summary.refuted
    assert row(str(summary), "verdict") == "REFUTED: what was added is not the noise of the plan"
