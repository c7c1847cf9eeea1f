"""Searches by secants end just below zero, or say that they did not."""

import math

import pytest

from anyorder.accounting.gaussian import just_below


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
