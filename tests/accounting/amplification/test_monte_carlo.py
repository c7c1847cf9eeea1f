"""Certificates of chance: the limit is not below the truth but for its failure, near it, and the same again."""

import numpy as np
import pytest

from anyorder.accounting import gdp_epsilon
from anyorder.accounting.amplification.monte_carlo import MonteCarlo, bins_interval, mc_delta, mc_epsilon, mc_interval
from anyorder.errors import ArgumentError
from anyorder.participation import BallsInBins
from anyorder.strategy import Independent


@pytest.mark.parametrize(("mu", "delta"), [(0.3, 1e-5), (1.66, 1e-5), (1.0, 1e-8)])
def test_one_bin_is_the_gaussian_mechanism(mu: float, delta: float) -> None:
    settings = MonteCarlo(50_000)
    truth = gdp_epsilon(mu, delta)
    found = mc_epsilon(Independent(1), BallsInBins(1, 1), 1 / mu, delta, settings)
    assert truth < found < 1.01 * truth
    interval = mc_interval(Independent(1), BallsInBins(1, 1), 1 / mu, delta, settings)
    assert 0.99 * truth < interval.lower < truth < interval.upper < 1.01 * truth
    assert 0.98 * delta < mc_delta(Independent(1), BallsInBins(1, 1), 1 / mu, truth, settings) < 1.1 * delta
    gram = bins_interval(np.ones((3, 3)), 1 / mu, delta, settings)  # bins that are all alike hide nothing
    assert 0.99 * truth < gram.lower < truth < gram.upper < 1.01 * truth


def test_the_same_again_and_other_samples_for_another_salt() -> None:
    rule, strategy = BallsInBins(2, 5), Independent(10)
    first = mc_epsilon(strategy, rule, 1.0, 1e-5, MonteCarlo(5000))
    assert first == mc_epsilon(strategy, rule, 1.0, 1e-5, MonteCarlo(5000))
    other = mc_epsilon(strategy, rule, 1.0, 1e-5, MonteCarlo(5000, salt=1))
    assert first != other
    assert first == pytest.approx(other, rel=0.03)


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="failure must be below delta"):
        mc_epsilon(Independent(4), BallsInBins(2, 2), 1.0, 1e-5, MonteCarlo(5000, failure=1e-5))
    with pytest.raises(ArgumentError, match="square, symmetric matrix without negative entries"):
        bins_interval(-np.eye(2), 1.0, 1e-5)
