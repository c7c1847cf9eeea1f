"""Which C a secret order is accounted with, and the causal |C| behind it: every kind, against its whole matrix."""

import time

import numpy as np
import pytest

from anyorder import formats
from anyorder.accounting.amplification.mixture import absolute_columns, bins_gram, check_fits, reach
from anyorder.errors import AnyorderError, ArgumentError, PlanError
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedOrder,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.strategy import Dense, Independent, Tree
from laws.cases import STRATEGIES

N = 8
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def causal(matrix):
    """|L| of the lower triangular L with L^T L = C^T C, by QR: only signs of its rows are left open."""
    return np.abs(np.linalg.qr(matrix[:, ::-1])[1][::-1, ::-1])


def overlaps(strategy):
    """(n, n) whether two columns of C meet in a row; of the causal C where that is another."""
    matrix = np.asarray(strategy.columns(np.arange(N)))
    there = (causal(matrix) if len(matrix) == N else np.abs(matrix)) > 1e-12
    return there.T.astype(int) @ there > 0


@every_strategy
def test_columns_are_those_of_a_lower_triangular_matrix(name):
    strategy = STRATEGIES[name](N)
    found, matrix = absolute_columns(strategy, np.arange(N)), np.asarray(strategy.columns(np.arange(N)))
    assert (found >= 0).all()
    assert (found.T @ found >= np.abs(matrix.T @ matrix) * (1 - 1e-12) - 1e-12).all()
    np.testing.assert_allclose(found, causal(matrix) if len(matrix) == N else np.abs(matrix), atol=1e-10)
    some = np.array([5, 0, 2])
    np.testing.assert_allclose(absolute_columns(strategy, some), found[:, some], atol=1e-12)
    folded = found.reshape(len(found), 2, 4).sum(axis=1)
    np.testing.assert_allclose(bins_gram(strategy, BallsInBins(2, 4)), folded.T @ folded, rtol=1e-9, atol=1e-12)


@every_strategy
def test_a_reach_is_the_largest_distance_of_columns_that_meet(name):
    strategy = STRATEGIES[name](N)
    i, j = np.nonzero(overlaps(strategy))
    assert reach(strategy) == np.abs(i - j).max() + 1


@every_strategy
def test_what_fits_an_order_is_what_does_not_overlap(name):
    strategy = STRATEGIES[name](N)
    i, j = np.nonzero(overlaps(strategy))
    cases = [(PoissonSampling(N, 0.5), type(strategy) is Independent)]
    for b in range(1, N + 1):
        apart = not (np.abs(i - j) >= b).any()
        cases += [
            (CyclicPoisson(N, b, 0.5), apart),
            (TruncatedPoisson(N, 0.5, 4, 12, b), apart),
            (MinSeparationSampling(N, b, 0.5), apart),
        ]
        if N % b == 0:
            cases += [
                (BallsInBins(N // b, b), True),
                (RandomAllocation(N // b, b), not (i // b != j // b).any()),
            ]
    for rule, fits in cases:
        try:
            check_fits(strategy, rule)
        except PlanError:
            assert not fits, rule
        else:
            assert fits, rule


@pytest.mark.parametrize(
    "rule",
    [
        PoissonSampling(6, 0.5), CyclicPoisson(6, 2, 0.5), TruncatedPoisson(6, 0.5, 4, 12), BallsInBins(2, 3),
        RandomAllocation(2, 3), MinSeparationSampling(6, 2, 0.5),
    ],
    ids=repr,
)  # fmt: skip
def test_another_number_of_steps_is_refused(rule):
    for n in (5, 7, 12):
        with pytest.raises(PlanError, match="same number of steps"):
            check_fits(Independent(n), rule)
    with pytest.raises(ArgumentError, match="same number of steps"):
        bins_gram(Independent(12), BallsInBins(2, 3))


def test_columns_that_hardly_meet_meet():
    matrix = np.eye(6)
    matrix[4, 1] = -1e-12
    strategy = Dense(matrix)
    assert reach(strategy) == 4
    with pytest.raises(PlanError, match="overlap"):
        check_fits(strategy, CyclicPoisson(6, 3, 0.5))
    with pytest.raises(PlanError, match="overlap"):
        check_fits(strategy, RandomAllocation(2, 3))
    check_fits(strategy, CyclicPoisson(6, 4, 0.5))
    check_fits(strategy, RandomAllocation(1, 6))


def test_an_order_without_coins_is_refused():
    with pytest.raises(ArgumentError, match="must be drawn in secret"):
        check_fits(Independent(6), FixedOrder(6, 2, 3))


def test_the_file_of_a_stranger_asks_for_no_large_matrix():
    n, before = 1 << 17, time.process_time()
    with formats.bounded(True), pytest.raises(AnyorderError, match="large"):
        check_fits(Tree(n), CyclicPoisson(n, 2, 0.5))
    assert time.process_time() - before < 5
