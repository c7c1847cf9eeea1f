"""Faults planted in sums and learner, each found by a test that passes without it."""

import doctest
from contextlib import contextmanager

import numpy as np
import pytest

import anyorder as ao
from anyorder.audit.faults import patched
from anyorder.audit.faults.core import FAULTS
from anyorder.audit.faults.front_end import Reached
from anyorder.online import Ball, Learner, learner, sums
from anyorder.online.losses import Hinge, Logistic, Softmax
from anyorder.online.sets import Everything
from online import test_ftrl, test_sums


def longer(name, by):
    """Units are cut at a norm that is too large."""
    real = getattr(sums, name)
    return patched(sums, name, lambda *arguments: real(*arguments[:-1], by * arguments[-1]))


def twice():
    """A unit of several rows is added twice."""
    real = sums._add_together

    def add_together(*arguments):
        real(*arguments)
        real(*arguments)

    return patched(sums, "_add_together", add_together)


def by_rows():
    """The rows of a unit are cut one by one."""

    def add_together(total, rows, slopes, sizes, bound):
        for i in range(len(rows)):
            total += rows[i : i + 1].T @ slopes[i : i + 1] * min(1.0, bound / np.linalg.norm(rows[i]))

    return patched(sums, "_add_together", add_together)


def means():
    """The mean of a batch is taken in for its sum."""

    def receive(self, step, private):
        real(self, step, private / self.plan.batch_size)

    real = Learner._receive
    return patched(Learner, "_receive", receive)


@contextmanager
def one_step_late():
    """The leader is that of the sum before: the last batch is left out."""
    real = Learner._receive

    def receive(self, step, private):
        kept = self.theta
        real(self, step, private)
        self.theta = kept

    with patched(Learner, "_receive", receive):
        yield


def half_the_noise():
    (fault,) = [fault for fault in FAULTS if fault.name == "half the noise"]
    return fault.plant(Reached())


def all_rows_at_once():
    """Scores by one product of matrices, which rounds a row by where it stands."""
    return patched(sums, "_scores", lambda rows, theta: rows @ theta)


def no_vector_turns_around():
    """Why scores are made row by row: with them made at once, a zero vector in the batch can turn another's around."""
    generator = np.random.default_rng(3)
    X = generator.normal(size=(64, 37))
    theta = generator.normal(size=(37, 1))
    turned = 0
    for i in range(64):
        at = theta / np.abs(X[i] @ theta)  # its score is 1, or the nearest number below or above it
        y = (X @ at > 0).astype(int)[:, 0]
        vectors = [
            sums.clipped_sum(Hinge(), at, X[rows], y[rows], np.arange(64)[rows], 1.0).total
            - sums.clipped_sum(Hinge(), at, X[rows][others], y[rows][others], np.arange(64)[rows][others], 1.0).total
            for rows in (slice(i, None), slice(0, None))
            for others in [np.arange(64)[rows] != i]
        ]
        turned += not np.allclose(*vectors, atol=1e-9)
    assert turned == 0


def the_paper(loss=Softmax(3), l1=0.02, kind=Ball(0.5)):
    test_ftrl.test_it_is_algorithm_1_of_the_paper.of_one(loss, l1, 0.5, kind)


FOUND = {
    "cut 1 % too long, units of one row": (
        lambda: longer("_alone", 1.01),
        lambda: test_sums.test_no_unit_is_longer_than_the_norm_in_exact_arithmetic(1.0, 1),
    ),
    "cut 1 % too long, units of several rows": (
        lambda: longer("_add_together", 1.01),
        lambda: test_sums.test_no_unit_is_longer_than_the_norm_in_exact_arithmetic(1.0, 3),
    ),
    "no room for rounding, units of one row": (
        lambda: longer("_alone", 1 / (1 - 31 * 2.0**-52)),
        lambda: test_sums.test_no_unit_is_longer_than_the_norm_in_exact_arithmetic(1.0, 1),
    ),
    "no room for rounding, units of several rows": (
        lambda: longer("_add_together", 1 / (1 - 31 * 2.0**-52)),
        lambda: test_sums.test_no_unit_is_longer_than_the_norm_in_exact_arithmetic(1.0, 3),
    ),
    "a unit added twice": (twice, the_paper),
    "rows cut one by one": (by_rows, the_paper),
    "means for sums": (means, the_paper),
    "the last batch left out": (one_step_late, the_paper),
    "half the noise": (half_the_noise, lambda: the_paper(Logistic(), 0.0, Everything())),
    "half the noise, at one prefix": (
        half_the_noise,
        lambda: test_ftrl.test_the_sum_has_the_noise_of_its_prefix_under_any_strategy(test_ftrl.Independent(13)),
    ),
    "all rows at once": (all_rows_at_once, test_sums.test_scores_do_not_depend_on_where_a_row_stands),
    "all rows at once, a unit's bits": (
        all_rows_at_once,
        lambda: test_sums.test_a_units_vector_has_the_same_bits_whoever_else_is_there(Logistic(), "dense"),
    ),
    "all rows at once, at the kink of the hinge": (all_rows_at_once, no_vector_turns_around),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_fault_is_found(name):
    plant, check = FOUND[name]
    check()
    with plant(), pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("module", [learner, sums], ids=lambda module: module.__name__)
def test_examples_of_docstrings(module):
    done = doctest.testmod(module, extraglobs={"ao": ao, "np": np})
    assert done.attempted
    assert not done.failed
