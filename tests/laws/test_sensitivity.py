"""Laws of sensitivities: never below what a unit can reach; equal to it where they say so."""

from itertools import pairwise

import numpy as np
import pytest

from anyorder.errors import PlanError
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.strategy.registry import sensitivity, unit_sensitivities
from laws.cases import PARTICIPATIONS, SAMPLED, STRATEGIES, over
from oracles import attained_squared, random_separated

every_strategy = over("name", STRATEGIES)


@every_strategy
@over("n", [1, 2, 5, 8])
def test_never_below_brute_force(name: str, n: int) -> None:
    strategy = STRATEGIES[name](n)
    C = strategy.matrix()
    for rule, make in PARTICIPATIONS.items():
        bound, reached = sensitivity(strategy, make(n)), attained_squared(C, make(n).patterns())
        assert bound.value**2 >= reached * (1 - 1e-13), rule
        if bound.exact:
            assert bound.value**2 == pytest.approx(reached, rel=1e-9), rule
        if name.startswith(("tree", "independent")):
            assert bound.exact, rule


@every_strategy
def test_never_below_random_patterns(name: str) -> None:
    n, rng = 60, np.random.default_rng(0)
    strategy = STRATEGIES[name](n)
    C = strategy.matrix()
    for b, k in [(1, 8), (1, None), (4, None), (7, 5), (20, 2)]:
        rule = MinSeparation(n, b, k)
        patterns = [random_separated(rng, n, b, rule.max_participations) for _ in range(40)]
        patterns.append(tuple(range(0, n, b))[: rule.max_participations])
        reached = max(float(np.square(C[:, p].sum(axis=1)).sum()) for p in map(list, patterns))
        assert sensitivity(strategy, rule).value ** 2 >= reached * (1 - 1e-13)
    for k in (2, 5, 12):
        draws = rng.integers(0, n // k, (40, k)) + np.arange(k) * (n // k)
        reached = max(float(np.square(C[:, p].sum(axis=1)).sum()) for p in draws)
        assert sensitivity(strategy, EpochShuffle(k, n // k)).value ** 2 >= reached * (1 - 1e-13)


@every_strategy
def test_wider_rules_are_never_cheaper(name: str) -> None:
    """One epoch <= same order <= shuffles <= separated, where each rule's patterns are among the next one's."""
    strategy = STRATEGIES[name](24)
    rules = [SingleEpoch(24), FixedOrder(24, 4, 6), EpochShuffle(4, 6), MinSeparation(24, 1, 4), MinSeparation(24, 1)]
    bounds = [sensitivity(strategy, rule) for rule in rules]
    for narrow, wide in pairwise(bounds):
        if narrow.exact:
            assert wide.value >= narrow.value * (1 - 1e-13)


@every_strategy
def test_units_of_a_known_order(name: str) -> None:
    strategy, order = STRATEGIES[name](9), KnownOrder(["a", ["b", "a"], "c", "a", [], "d", "b", "c", "a"])
    units = unit_sensitivities(strategy, order)
    assert units.shape == (4,)
    for value, pattern in zip(units, order.patterns(), strict=True):
        assert value**2 >= attained_squared(strategy.matrix(), [pattern]) * (1 - 1e-13)
    bound = sensitivity(strategy, order)
    assert bound.value == pytest.approx(units.max(), rel=1e-12)


@every_strategy
def test_refusals(name: str) -> None:
    strategy = STRATEGIES[name](9)
    for rule in SAMPLED.values():
        with pytest.raises(PlanError, match=r"accounting\.Sampled"):
            sensitivity(strategy, rule(9))
    with pytest.raises(PlanError, match="got 8 and 9"):
        sensitivity(strategy, SingleEpoch(8))
    with pytest.raises(PlanError, match="got 2 and 9"):
        unit_sensitivities(strategy, KnownOrder([0, 1]))
