"""Laws of participations: what the ledger lets in is what the pattern family holds, set by set of steps."""

import json
from collections.abc import Iterator
from itertools import chain, combinations

import numpy as np
import pytest

from anyorder import participation, patterns
from anyorder.accounting.amplification.secret_order import DrawLaw
from anyorder.errors import ParticipationError
from anyorder.ledger import Ledger, allows
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    KnownOrder,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.participation.registry import ORDERS, WORDS, order_in_words, words_with
from anyorder.patterns import Listed, Participation
from laws.cases import PARTICIPATIONS, SAMPLED, over

CASES = {**PARTICIPATIONS, **SAMPLED}
SIZES = [1, 2, 5, 8]

every_case = pytest.mark.parametrize("name", CASES)
every_size = over("n", SIZES)


def sets_of_steps(n: int) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(n), size) for size in range(n + 1))


def is_let_in(rule: Participation, unit: object, steps: tuple[int, ...]) -> bool:
    ledger = Ledger(rule)
    try:
        for t in range(rule.n):
            ledger.record(t, [unit] if t in steps else [])
    except ParticipationError:
        return False
    return True


def test_every_rule_is_offered_under_a_name_of_its_own() -> None:
    assert len({rule.kind for rule in ORDERS}) == len(ORDERS)
    for rule in ORDERS:
        assert getattr(participation, rule.__name__) is rule
        assert rule.__name__ in participation.__all__


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("sizes", [(12, 4, 1), (12, 4, 3), (13, 4, 2)])
def test_an_order_in_words_has_the_steps_that_were_asked_for(word: str, sizes: tuple[int, int, int]) -> None:
    size, batch, epochs = sizes
    order = order_in_words(word, *sizes, cycle=2 if word in words_with("cycle") else None)
    assert order.n == epochs * -(-size // batch)
    assert order.secret or order.max_participations == epochs


@every_case
@every_size
def test_the_ledger_lets_in_what_the_pattern_allows(name: str, n: int) -> None:
    rule = CASES[name](n)
    units = rule.units.tolist() if isinstance(rule, KnownOrder) else [5]
    within = {steps for p in rule.patterns() for size in range(len(p) + 1) for steps in combinations(p, size)}
    for steps in sets_of_steps(rule.n):
        allowed = rule.pattern.allows(steps)
        assert allowed == any(is_let_in(rule, unit, steps) for unit in units), steps
        assert allowed == (steps in within) == allows(rule, steps), steps


@every_case
@every_size
def test_steps_outside_the_plan_are_not_allowed(name: str, n: int) -> None:
    rule = CASES[name](n)
    assert not rule.pattern.allows([rule.n])
    assert not rule.pattern.allows([-1])


@every_case
@every_size
def test_numbers_are_those_of_the_patterns(name: str, n: int) -> None:
    rule = CASES[name](n)
    pattern, patterns = rule.pattern, list(rule.patterns())
    assert pattern.n == rule.n
    assert rule.max_participations == max(map(len, patterns))
    gaps = [int(gap) for steps in patterns for gap in np.diff(steps)]
    assert rule.min_separation <= min(gaps, default=rule.n) or rule.max_participations == 1
    assert pattern.count(10**6) == len(patterns)
    assert pattern.count(len(patterns) - 1) == len(patterns)
    if not (isinstance(pattern, Listed) and pattern.stride is None):  # of patterns one by one the worst is guessed
        assert pattern.allows(pattern.likely_worst().tolist())


@every_case
@every_size
def test_disjoint_patterns_cover_each_step_once(name: str, n: int) -> None:
    pattern = CASES[name](n).pattern
    blocks = [tuple(block) for group in pattern.disjoint() for block in group.tolist()]
    assert sorted(chain.from_iterable(blocks)) == list(range(pattern.n))
    named = {t for steps in pattern.enumerate() for t in steps}  # a known order may leave steps empty
    assert all(pattern.allows(block) for block in blocks if set(block) <= named)
    longest = {steps for steps in pattern.enumerate() if not any(set(steps) < set(p) for p in pattern.enumerate())}
    if pattern.are_disjoint:
        assert sum(map(len, longest)) == len(named)


@every_case
def test_what_covers_allows_all(name: str) -> None:
    """Within the planned steps; a known order is judged by the ledger alone."""
    for n in (3, 6):
        planned = CASES[name](n)
        for actual in (make(m) for make in CASES.values() for m in (2, 3, 6)):
            if not isinstance(planned, KnownOrder) and participation.covers(planned, actual):
                for steps in actual.patterns():
                    assert planned.pattern.allows(t for t in steps if t < planned.n), actual


@every_case
@every_size
def test_files_keep_it(name: str, n: int) -> None:
    rule = CASES[name](n)
    again = patterns.from_dict(json.loads(json.dumps(rule.to_dict())))
    assert again == rule
    assert again.pattern == rule.pattern
    assert hash(again) == hash(rule)
    assert hash(again.pattern) == hash(rule.pattern)
    assert rule.describe()


@every_case
def test_draws_are_secret_and_have_a_law_or_there_are_none(name: str) -> None:
    rule = CASES[name](8)
    assert rule.secret == (name in SAMPLED)
    assert rule.secret == isinstance(getattr(rule, "draw_law", None), DrawLaw)


SECRET = [
    *(make(6) for make in SAMPLED.values()), PoissonSampling(6, 0.2), CyclicPoisson(6, 3, 0.3),
    CyclicPoisson(6, 1, 0.1), TruncatedPoisson(6, 0.3, 4, 12), TruncatedPoisson(6, 0.2, 5, 12),
    TruncatedPoisson(6, 0.2, 4, 13), BallsInBins(2, 3), RandomAllocation(2, 3), MinSeparationSampling(6, 3, 0.4),
    MinSeparationSampling(6, 3, 0.3, warm_start=False), MinSeparationSampling(6, 2, 0.3),
]  # fmt: skip


@pytest.mark.parametrize("planned", SECRET, ids=repr)
def test_secret_orders_cover_themselves_alone(planned: Participation) -> None:
    """Of what may come they say as little as others with the same steps; what they claim rests on their own draws."""
    others = [*SECRET, *(make(6) for make in PARTICIPATIONS.values())]
    assert [actual for actual in others if participation.covers(planned, actual)] == [planned]
