"""Searches end on the side that holds, next to where it ends."""

import math

import pytest

from anyorder._numerics import bisect, crossing, doubled, just_below


@pytest.mark.parametrize(("inside", "outside"), [(0.0, 10.0), (10.0, 0.0), (-5.0, 1e300), (1.75e308, -1.75e308)])
def test_halves_end_at_the_last_float_that_holds(inside, outside):
    for edge in (0.3, 1 / 3, 2.0, 9.99):
        holds = edge.__ge__ if inside < outside else edge.__le__
        assert bisect(holds, inside=inside, outside=outside) == edge


def test_what_is_returned_was_looked_at_and_is_near_enough():
    looks = {}

    def holds(x):
        looks[x] = x >= 0.7
        return looks[x]

    found = bisect(holds, inside=8.0, outside=0.0, relative=1e-6)
    assert looks[found]
    assert 0.7 <= found <= 0.7 * (1 + 1e-6)
    assert 20 < len(looks) < 30
    assert bisect(holds, inside=8.0, outside=0.0, relative=1e-6, floor=1e5) <= 0.7 + 0.2
    assert bisect(holds, inside=8.0, outside=0.0, steps=3) == 1.0
    assert bisect(holds, inside=8.0, outside=0.0, steps=0) == 8.0
    assert bisect(lambda x: False, inside=8.0, outside=0.0, relative=1e-3) == 8.0


def test_doubling_finds_two_sides_or_infinity():
    assert doubled(lambda x: x >= 5, 0.0, 1.0) == (4.0, 8.0)
    assert doubled(lambda x: x >= 1, 0.25, 1.0) == (0.25, 1.0)
    assert doubled(lambda x: False, 0.0, 1.0, most=100) == (64.0, math.inf)
    assert doubled(lambda x: x >= 100, 0.0, 1.0, most=128) == (64.0, 128.0)
    assert bisect(lambda x: False, inside=math.inf, outside=64.0, relative=1e-3) == math.inf
    assert bisect(lambda x: False, inside=math.inf, outside=64.0) == math.inf


def test_a_crossing():
    assert crossing(lambda x: x**2 - 2, 0.0, 2.0, absolute=1e-12) == pytest.approx(math.sqrt(2), abs=2e-12)


@pytest.mark.parametrize("start", [-4.0, 0.0, 3.0])
@pytest.mark.parametrize("slope", [-0.5, -1.2, -3.0])
def test_it_ends_just_below_zero_in_few_looks(start, slope):
    looks = []

    def value(x):
        looks.append(x)
        return math.log(3.0) - 1.5 * x + 0.1 * math.sin(x)

    found, last = just_below(value, start, slope, 1e-6, looks=25)
    assert -1e-6 <= value(found) <= 0
    assert -2 < last < -1
    assert len(looks) < 16


def test_a_jump_over_zero_is_not_found():
    assert just_below(lambda x: -1.0 if x > 0.3 else 1.0, 0.0, -1.0, 1e-6) is None
    assert just_below(lambda x: 5.0, 0.0, -1.0, 1e-6) is None
