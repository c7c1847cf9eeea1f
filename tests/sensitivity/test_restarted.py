"""RestartedBLT: closed forms against the matrix itself, and counts where it is too long for one."""

import math
from importlib import import_module

import numpy as np
import pytest

from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.patterns import Participation
from anyorder.strategy.registry import sensitivity, unit_sensitivities
from anyorder.strategy.restarted_blt import RestartedBLT
from oracles import attained_squared

SHARES = np.array([1.0, 0.8, 0.5, 0.9])


def make(s: int = 3) -> RestartedBLT:
    return RestartedBLT([[0.9, 0.3]] * 4, [[0.4, 0.2]] * 4, [0.7, 0.0, 2.0, 0.4], SHARES, 4 * s, s)


@pytest.mark.parametrize(
    ("participation", "squared"),
    [
        (SingleEpoch(12), 1.0),
        (EpochShuffle(4, 3), 1.0 + 0.64 + 0.25 + 0.81),
        (EpochShuffle(2, 6), 1.0 + 0.81),
        (FixedOrder(12, 4, 3), 1.0 + 0.64 + 0.25 + 0.81),
        (FixedOrder(12, 3, 5), 1.0 + 0.64 + 0.81),
        (KnownOrder([0, 9, 9, 1, 9, 9, 0, 9, 9, 1, 9, 9]), None),
    ],
    ids=repr,
)
def test_closed_forms(participation: Participation, squared: float | None) -> None:
    strategy = make()
    found = sensitivity(strategy, participation)
    reached = attained_squared(strategy.matrix(), participation.patterns())
    assert found.exact
    assert found.value**2 == pytest.approx(reached, rel=1e-12)
    if squared is not None:
        assert found.value**2 == pytest.approx(squared, rel=1e-12)


def test_steps_of_one_unit_in_one_epoch_correlate() -> None:
    strategy, order = make(), KnownOrder([0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 1])
    reached = [attained_squared(strategy.matrix(), [pattern]) for pattern in order.patterns()]
    np.testing.assert_allclose(unit_sensitivities(strategy, order) ** 2, reached, rtol=1e-12)
    assert max(reached) > 2.5 * 1.1  # more than orthogonal columns would give


@pytest.mark.parametrize(
    "participation",
    [
        EpochShuffle(8, 3),  # two in each epoch of the strategy
        EpochShuffle(3, 8),  # two in an epoch that has steps of two shuffled ones
        MinSeparation(24, 6),
        MinSeparation(24, 6, 2),
        MinSeparation(24, 4, 3),
        FixedOrder(24, 6, 4),
        KnownOrder([t % 5 for t in range(24)]),
    ],
    ids=repr,
)
def test_counts_are_never_below(participation: Participation, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = make(6)
    true = sensitivity(strategy, participation)
    monkeypatch.setattr(import_module("anyorder.strategy.restarted_blt"), "DENSE_STEPS", 10)
    counted = sensitivity(strategy, participation)
    assert not counted.exact or counted.value == pytest.approx(true.value)
    assert true.value <= counted.value * (1 + 1e-12) < 2 * true.value
    assert counted.value <= math.sqrt(float(np.square(2 * SHARES).sum())) * (1 + 1e-12)
    if isinstance(participation, KnownOrder):
        units = unit_sensitivities(strategy, participation)
        assert counted.value == pytest.approx(units.max())
        for value, pattern in zip(units, participation.patterns(), strict=True):
            assert value**2 >= attained_squared(strategy.matrix(), [pattern]) * (1 - 1e-12)
