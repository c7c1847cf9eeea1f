"""Rescaled: the structured routes against the same matrix given in full."""

from collections.abc import Callable

import numpy as np
import pytest

from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.strategy import BLT, Banded, BandedInverse, Dense, Independent, SquareRoot, Strategy, ToeplitzBanded, Tree
from anyorder.strategy.registry import sensitivity, unit_sensitivities
from anyorder.strategy.rescaled import Rescaled

N = 48
INNER: list[Callable[[], Strategy]] = [
    lambda: Independent(N),
    lambda: SquareRoot(N),
    lambda: ToeplitzBanded([1.0, 0.5, -0.2], N),
    lambda: Banded(ToeplitzBanded([1.0, 0.5, 0.2], N).matrix()),
    lambda: BLT([0.9, 0.2], [0.3, 0.2], N),
    lambda: BandedInverse([1.0, -0.4, 0.1], N),
    lambda: Rescaled(BLT([0.9, 0.2], [0.3, 0.2], N), np.linspace(1, 3, N)),
    lambda: Rescaled(Dense(SquareRoot(N).matrix()), np.linspace(1, 3, N)),
]


@pytest.mark.parametrize("make", INNER)
def test_equals_the_dense_route(make: Callable[[], Strategy]) -> None:
    scales = 1 + 0.5 * np.cos(np.arange(N))
    strategy = Rescaled(make(), scales)
    dense = Dense(strategy.matrix())
    order = KnownOrder([[t % 7, 10 + (t * t) % 11] for t in range(N)])
    for rule in (SingleEpoch(N), FixedOrder(N, 4, 12), order):
        assert sensitivity(strategy, rule).value == pytest.approx(sensitivity(dense, rule).value, rel=1e-10)
    np.testing.assert_allclose(unit_sensitivities(strategy, order), unit_sensitivities(dense, order), rtol=1e-10)
    for rule in (MinSeparation(N, 6, 5), MinSeparation(N, 12), EpochShuffle(4, 12)):
        bound, other = sensitivity(strategy, rule), sensitivity(dense, rule)
        if bound.exact and other.exact:
            assert bound.value == pytest.approx(other.value, rel=1e-10)
        else:
            assert bound.value <= other.value * (1 + 1e-10)


def test_long_runs_in_a_fixed_order() -> None:
    """Beyond the generic route: 20 000 steps, against the columns of the worst unit."""
    n, k = 20_000, 10
    scales = np.linspace(1, 2, n)
    inner = BLT([0.999, 0.9], [0.02, 0.1], n)
    bound = sensitivity(Rescaled(inner, scales), FixedOrder(n, k, n // k))
    assert bound.exact
    first = Rescaled(inner, scales).columns(np.arange(0, n, n // k)).sum(axis=1)
    assert bound.value == pytest.approx(np.linalg.norm(first), rel=1e-10)


def test_long_runs_in_other_orders_divide_by_the_least_scale() -> None:
    n = 5000
    for inner in (BLT([0.99], [0.1], n), BandedInverse([1.0, -0.5], n)):
        for rule in (MinSeparation(n, 100, 5), EpochShuffle(5, 1000)):
            bound = sensitivity(Rescaled(inner, np.linspace(0.5, 2, n)), rule)
            assert not bound.exact
            assert bound.value == pytest.approx(2 * sensitivity(inner, rule).value, rel=1e-12)
        single = sensitivity(Rescaled(inner, np.linspace(0.5, 2, n)), SingleEpoch(n))
        assert single.exact
        assert single.value == pytest.approx(2 * sensitivity(inner, SingleEpoch(n)).value, rel=1e-10)


@pytest.mark.parametrize(
    "strategy",
    [
        Banded([[10.0, 1.0, 10.0]]),
        Rescaled(Independent(3), [0.1, 1.0, 0.1]),
        Rescaled(Dense(np.eye(3)), [0.1, 1.0, 0.1]),
        Rescaled(SquareRoot(3), [0.1, np.sqrt(1.25), 0.1]),
        Rescaled(Tree(3), [0.1, np.sqrt(2), 0.1]),
    ],
    ids=repr,
)
def test_steps_that_nobody_takes_part_in_do_not_count(strategy):
    bound = sensitivity(strategy, KnownOrder([[], ["a"], []]))
    assert bound.value == pytest.approx(1.0, rel=1e-12)
    assert bound.exact
