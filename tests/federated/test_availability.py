"""Who is there, who is asked, who answers: public chance, the same for the same seed."""

import numpy as np
import pytest
from scipy import stats

from anyorder.errors import ArgumentError
from anyorder.federated.cohorts import CheckIn, Diurnal, UniformAvailability, choose_cohort, cohort_size
from anyorder.noise import NoiseSource

SOURCE = NoiseSource(bytes(range(32)))
MODELS = {
    "uniform": UniformAvailability(0.3),
    "diurnal": Diurnal(0.6, 0.05, zones=(0.0,)),
    "check-in": CheckIn(10.0, 4.0, 0.5, 0.6),
}


def times(model, num_rounds, num_users, source=SOURCE):
    """(num_rounds, num_users) bool."""
    return np.array([model.present(source, t, num_users) for t in range(num_rounds)])


def closest(there):
    """The smallest distance between two rounds of one user."""
    return min(int(np.diff(np.flatnonzero(column)).min(initial=len(there))) for column in there.T)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_same_source_and_round_give_the_same_devices(model):
    there = times(model, 6, 400)
    assert np.array_equal(model.present(SOURCE, 4, 400), there[4])  # whatever was asked before
    assert np.array_equal(model.present(SOURCE, 4, 900)[:400], there[4])  # whoever else there is
    assert not np.array_equal(model.present(NoiseSource(bytes(32)), 4, 400), there[4])
    assert not np.array_equal(there[3], there[4])


def test_uniform_devices_are_there_as_often_as_said_and_independently():
    there = times(UniformAvailability(0.3), 50, 400)
    assert stats.binomtest(int(there.sum()), there.size, 0.3).pvalue > 1e-3
    both = int((there[1:] & there[:-1]).sum())
    assert stats.binomtest(both, there[1:].size, 0.09).pvalue > 1e-3
    assert times(UniformAvailability(), 3, 400).all()


def test_a_day_is_a_wave_and_zones_flatten_it():
    one = times(Diurnal(0.6, 0.05, zones=(0.0,)), 48, 4000).mean(1)
    hours = np.arange(48)
    assert one == pytest.approx(0.05 + 0.55 * (1 + np.cos(2 * np.pi * hours / 24)) / 2, abs=0.04)
    opposite = times(Diurnal(0.6, 0.05, zones=(0.0, 12.0)), 48, 4000).mean(1)
    assert opposite == pytest.approx(np.full(48, 0.325), abs=0.04)


def test_a_device_stays_in_its_zone():
    model = Diurnal(1.0, 0.0, zones=(0.0, 12.0))  # one half is there at midnight, the other one at noon
    there = times(model, 49, 400)
    assert 150 < there[0].sum() < 250
    for midnight in (24, 48):
        assert np.array_equal(there[midnight], there[0])
    for noon in (12, 36):
        assert np.array_equal(there[noon], ~there[0])


@pytest.mark.parametrize("model", [CheckIn(), CheckIn(10.0, 4.0, 0.5, 0.6), CheckIn(2.5, 1.0, 1.0, 0.0)], ids=repr)
def test_a_timer_keeps_what_it_promises_and_separation_is_known_afterwards(model):
    there = times(model, 120, 3000)
    promised = model.separation(120, 3000, 1, 1)
    assert promised > 1
    assert promised <= closest(there) <= promised + 1  # and not much more: the promise is worth something
    assert there.mean() == pytest.approx(model.round_hours / (model.hours + model.spread), rel=0.1)
    gaps = {int(gap) for column in there.T for gap in np.diff(np.flatnonzero(column))}
    assert len(gaps) > 2  # emergent: users come back after different numbers of rounds


def test_check_ins_do_not_come_before_the_timer_has_run():
    """Hour by hour, with rounds so short that each check-in has its own."""
    model = CheckIn(1.0, 0.5, 0.01, 0.0)
    there = times(model, 600, 200)
    assert closest(there) >= 100
    assert there.sum(0).min() >= 3  # of 6 hours, at most two apart


def test_in_rounds_longer_than_the_timer_everybody_has_checked_in():
    model = CheckIn(1.0, 0.5, 4.0, 0.0)  # at most two hours between two check-ins of one device
    assert times(model, 12, 500)[1:].all()


def test_time_runs_forward():
    model = CheckIn(round_hours=0.2, swing=0.95)
    assert (np.diff([model.time(t) for t in range(-1, 500)]) > 0).all()


@pytest.mark.parametrize("model", [UniformAvailability(), UniformAvailability(0.4), Diurnal(0.6, 0.3)], ids=repr)
def test_with_the_separation_that_is_proposed_no_round_falls_short(model):
    goal, asked, n, users = 10, cohort_size(10, 1.3), 60, 400
    b = model.separation(n, users, asked, goal)
    assert b > 1
    last = np.full(users, -n)
    for t in range(n):
        candidates = model.present(SOURCE, t, users) & (t - last >= b)
        assert candidates.sum() >= asked
        last[choose_cohort(SOURCE, t, candidates, goal).added] = t
    assert model.separation(n, 5, asked, goal) == 1  # a population that is too small: nothing is asked of it


def test_a_cohort_asks_more_than_it_needs_and_takes_the_first_who_answer():
    candidates = np.arange(300) % 3 != 0
    cohort = choose_cohort(SOURCE, 7, candidates, 20, over_selection=1.5, drop_out=0.2)
    every = np.concatenate([cohort.added, cohort.late, cohort.dead])
    assert len(every) == len(set(every.tolist())) == 30
    assert candidates[every].all()
    assert len(cohort.added) == 20
    again = choose_cohort(SOURCE, 7, candidates, 20, over_selection=1.5, drop_out=0.2)
    assert np.array_equal(again.added, cohort.added)
    other = choose_cohort(SOURCE, 8, candidates, 20, over_selection=1.5, drop_out=0.2)
    assert not np.array_equal(other.added, cohort.added)


def test_every_candidate_is_as_likely_as_another():
    counts = np.zeros(40, np.int64)
    for t in range(1500):
        counts[choose_cohort(SOURCE, t, np.ones(40, np.bool_), 8, over_selection=1.25, drop_out=0.1).added] += 1
    assert stats.chisquare(counts).pvalue > 1e-3
    assert 0.9 * 8 < counts.sum() / 1500 <= 8


def test_too_few_make_the_round_with_those_who_are_there():
    candidates = np.zeros(50, np.bool_)
    assert len(choose_cohort(SOURCE, 0, candidates, 10).added) == 0
    candidates[[3, 9]] = True
    assert choose_cohort(SOURCE, 0, candidates, 10).added.tolist() == [3, 9]
    dead = choose_cohort(SOURCE, 0, np.ones(50, np.bool_), 10, over_selection=1.0, drop_out=0.9)
    assert len(dead.added) < 10
    assert len(dead.added) + len(dead.dead) == 10


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: UniformAvailability(0.0),
        lambda: UniformAvailability(1.1),
        lambda: Diurnal(0.2, 0.3),
        lambda: Diurnal(zones=()),
        lambda: CheckIn(0.0),
        lambda: CheckIn(swing=1.0),
        lambda: CheckIn(round_hours=-1.0),
        lambda: choose_cohort(SOURCE, 0, np.ones(3), 2),
        lambda: choose_cohort(SOURCE, 0, np.ones(3, np.bool_), 2, over_selection=0.9),
        lambda: choose_cohort(SOURCE, 0, np.ones(3, np.bool_), 2, drop_out=1.0),
        lambda: choose_cohort(SOURCE, 0, np.ones(3, np.bool_), 0),
    ],
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ArgumentError):
        wrong()


def test_the_cohort_size_is_rounded_up_but_not_by_rounding_errors():
    assert [cohort_size(10, 1.3), cohort_size(10, 1.1), cohort_size(7, 1.3), cohort_size(5, 1.0)] == [13, 11, 10, 5]
