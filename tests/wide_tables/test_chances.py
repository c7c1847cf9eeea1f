"""What a threshold chooses, against the selector itself, and the warnings about it."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, poisson

import anyorder as ao
from anyorder.errors import ArgumentError, PlanError, SelectionWarning
from anyorder.noise import NoiseSource
from anyorder.sparse import Counts, Top, Uniform, chances, threshold_for
from anyorder.sparse.select import select_counts
from training.wide import L, V, planned, private

ROWS = 5000


def test_the_selector_chooses_with_these_chances():
    """Counts of 25 units of 6 rows each, on 40 rows; the others by chance."""
    plan = planned(selection=Counts(9.0, count_norm=0.8, sigma=2.5))
    found = chances(plan, num_rows=ROWS, units=25, rows_of_unit=6)
    counts = (np.arange(40), np.full(40, 25 * 0.8 / np.sqrt(6)))
    own = others = 0
    steps = 100
    for step in range(steps):
        rows = select_counts(counts, 9.0, plan.selection_std, num_rows=ROWS, source=NoiseSource(bytes(32)), step=step)
        own += int((rows < 40).sum())
        others += int((rows >= 40).sum())
    assert 0.05 < found.touched < 0.95
    assert binomtest(own, 40 * steps, found.touched).pvalue > 1e-4
    assert found.rows_by_chance == pytest.approx(found.untouched * ROWS, rel=1e-15)
    mean = found.untouched * (ROWS - 40) * steps
    assert 1e-4 < poisson.cdf(others, mean) < 1 - 1e-4


def test_a_unit_of_few_rows_counts_one_at_most():
    plan = planned(selection=Counts(3.0, count_norm=4.0, sigma=1.0))
    one, sixteen, more = (chances(plan, num_rows=V, units=5, rows_of_unit=m).touched for m in (1, 16, 17))
    assert one == sixteen > more


def test_the_threshold_for_a_number_of_rows():
    plan = planned(selection=Counts(0.0, sigma=1.5))
    for wanted in (1e-6, 3.0, ROWS / 2, ROWS - 1.0):
        threshold = threshold_for(plan, num_rows=ROWS, rows_by_chance=wanted)
        there = replace(plan, selection=replace(plan.selection, threshold=threshold))
        assert (there.mu, there.selection_std) == (plan.mu, plan.selection_std)
        assert chances(there, num_rows=ROWS, units=0, rows_of_unit=1)[:2] == pytest.approx((wanted / ROWS, wanted))


def test_the_card_says_the_chance():
    plan = planned(selection=Counts(4.0, sigma=1.0))
    p = chances(plan, num_rows=1, units=0, rows_of_unit=1).untouched
    assert f"a row that nobody touched is chosen with probability {p:.3g}" in str(plan)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda p: threshold_for(p, num_rows=10, rows_by_chance=10), ArgumentError, "strictly between 0 and num_rows"),
        (lambda p: threshold_for(p, num_rows=0, rows_by_chance=1), ArgumentError, "num_rows must"),
        (lambda p: chances(p, num_rows=5, units=-1, rows_of_unit=1), ArgumentError, "units must"),
        (lambda p: chances(p, num_rows=5, units=1, rows_of_unit=0), ArgumentError, "rows_of_unit must"),
        *[
            (lambda p, s=s: chances(replace(p, selection=s), num_rows=5, units=1, rows_of_unit=1), PlanError, "Counts")
            for s in (Top(2, sigma=1.0), Uniform(3), None)
        ],
    ],
)
def test_what_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call(planned(selection=Counts(1.0, sigma=1.0)))


@pytest.mark.parametrize(
    ("threshold", "text"), [(-0.1, "of all rows by chance"), (4.1, "more than a batch of 4 can count")]
)
def test_thresholds_of_no_use_are_told(threshold, text):
    with pytest.warns(SelectionWarning, match=text):
        private(planned(selection=Counts(threshold, sigma=0.5)))


def test_others_are_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for selection in (Counts(0.0, sigma=0.5), Counts(4.0, sigma=0.5), Top(3, sigma=1.0), Uniform(L)):
            private(planned(selection=selection))
    assert issubclass(SelectionWarning, UserWarning)
    assert ao.errors.SelectionWarning is SelectionWarning
