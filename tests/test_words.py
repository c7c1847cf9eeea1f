"""Numbers and counts as people read them."""

import math

import pytest

import anyorder as ao
from anyorder.app import html_report
from anyorder.formatting import counted, rounded_down, rounded_up
from anyorder.participation import FixedOrder, SingleEpoch
from anyorder.plan.planner import plan_at_sigma


@pytest.mark.parametrize(("value", "digits", "text"), [
    (4.0, 4, "4"), (4.0004, 4, "4.001"), (4.001, 4, "4.001"), (7.9999, 4, "8"), (3.3, 4, "3.3"), (0.0, 4, "0"),
    (0.100003, 4, "0.1001"), (12345.0, 4, "1.235e+04"), (999.91, 4, "1000"), (2.001, 3, "2.01"), (math.inf, 4, "inf"),
    (1e-9, 4, "1e-09"), (8.0000001, 6, "8.00001"), (0.1 + 0.2, 4, "0.3"),
])  # fmt: skip
def test_a_bound_is_never_shown_smaller_than_it_is(value, digits, text):
    assert rounded_up(value, digits) == text
    assert float(rounded_up(value, digits)) >= value * (1 - 1e-12)


@pytest.mark.parametrize(("value", "digits", "text"), [
    (4.0, 4, "4"), (3.9996, 4, "3.999"), (3.3, 4, "3.3"), (0.0, 4, "0"), (12349.0, 4, "1.234e+04"), (2.009, 3, "2"),
    (math.inf, 4, "inf"), (1e-9, 4, "1e-09"), (0.1 * 3, 4, "0.3"), (7.999999, 6, "7.99999"),
])  # fmt: skip
def test_what_is_seen_or_left_is_never_shown_larger_than_it_is(value, digits, text):
    assert rounded_down(value, digits) == text
    assert float(rounded_down(value, digits)) <= value * (1 + 1e-12)


def test_what_a_budget_shows_as_left_fits(tmp_path):
    budget = ao.Budget(tmp_path / "budget", epsilon=3, delta=1e-5)
    budget.spend(ao.plan(order=FixedOrder(10, 2, 5), batch_size=4, epsilon=1.9, delta=1e-5))
    left = budget.remaining()
    shown = str(left).split("; epsilon ")[1].split(" left")[0]
    assert float(f"{left.epsilon:.4g}") > left.epsilon  # to the nearest it would be refused
    budget.spend(ao.plan(order=FixedOrder(10, 2, 5), batch_size=4, epsilon=float(shown), delta=1e-5))


@pytest.mark.parametrize(("count", "what", "text"), [
    (1, "step", "1 step"), (2, "step", "2 steps"), (0, "batch", "0 batches"), (3, "epoch", "3 epochs"),
    (1, "canary", "1 canary"), (2, "canary", "2 canaries"), (2, "entry", "2 entries"), (2, "day", "2 days"),
])  # fmt: skip
def test_one_is_not_many(count, what, text):
    assert counted(count, what) == text


def test_cards_and_reports_round_up():
    plan = plan_at_sigma(1.0, order=FixedOrder(10, 2, 5), batch_size=4, delta=1e-5, mechanism="independent")
    claimed = f"{plan.epsilon:.4g}"
    assert float(claimed) < plan.epsilon  # to the nearest it would read less than it is
    shown = rounded_up(plan.epsilon)
    assert f"epsilon <= {shown} at delta" in str(plan)
    page = html_report(plan)
    assert f"epsilon ≤ {shown}" in page
    assert f"epsilon {shown} at delta" in page
    assert f"epsilon {claimed} at" not in page


def test_a_plan_of_one_step_speaks_of_one_step():
    plan = ao.plan(order=SingleEpoch(1), batch_size=4, epsilon=2, delta=1e-5, mechanism="independent")
    assert "of 1 step" in str(plan)
    for text in (str(plan), html_report(plan)):
        assert "1 steps" not in text.replace("11 steps", "")
        assert " 1 vectors" not in text
        assert " 1 epochs" not in text
    assert FixedOrder(5, 1, 5).describe() == "1 epoch of 5 steps, the same order in each"
