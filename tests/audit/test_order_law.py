"""The law of batches: honest draws pass at the nominal rate, and each way of drawing otherwise is found."""

import numpy as np
import pytest

from anyorder.audit.laws import order_law
from anyorder.audit.secret_steps import drawn_steps
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedOrder,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)

UNITS = 300
RULES = {
    "poisson": PoissonSampling(12, 0.2),
    "cyclic": CyclicPoisson(12, 3, 0.4),
    "bins": BallsInBins(3, 6),
    "allocation": RandomAllocation(3, 6),
    "separated": MinSeparationSampling(12, 3, 0.3),
    "separated, all at once": MinSeparationSampling(12, 2, 0.4, warm_start=False),
    "truncated": TruncatedPoisson(12, 0.2, 60, UNITS),
    "truncated cyclic": TruncatedPoisson(12, 0.4, 40, UNITS, cycle=3),
}


def drawn(rule, seed):
    """By the rule; truncated batches by a generator, for canaries are not cut to a size together."""
    rng = np.random.default_rng([seed, 8])
    if type(rule) is not TruncatedPoisson:
        return drawn_steps(rule, UNITS, NoiseSource(rng.bytes(32)))
    there = np.zeros((rule.n, UNITS), bool)
    for t in range(rule.n):
        group = np.arange(t % rule.cycle, UNITS, rule.cycle)
        units = rng.permutation(group[rng.random(len(group)) < rule.sampling_probability])
        there[t, units[: rule.batch_size]] = True
    return there


@pytest.mark.parametrize("name", RULES)
def test_honest_draws_are_refuted_at_most_at_the_nominal_rate(name):
    """Each p-value lies above a uniform one, by Massart's bound at 1e-6."""
    laws = [order_law(drawn(RULES[name], 2 * i), RULES[name], drawn(RULES[name], 2 * i + 1)) for i in range(60)]
    for test in laws[0].p_values:
        p_values = np.sort([law.p_values[test] for law in laws])
        excess = (np.arange(1, len(laws) + 1) / len(laws) - p_values).max()
        assert excess < np.sqrt(np.log(1e6) / 2 / len(laws)), test
        assert p_values[-1] > 0.3, test
    assert all(law.p_value > 1e-6 for law in laws)


def in_turn(rule, rng):
    return np.arange(rule.n)[:, None] % rule.b == np.arange(UNITS) % rule.b


def blocks(rule, rng):
    return np.arange(rule.n)[:, None] % rule.b == np.arange(UNITS) * rule.b // UNITS


def cut_shuffle(rule, rng):
    return np.arange(rule.n)[:, None] % rule.b == rng.permutation(np.arange(UNITS) % rule.b)


def names_of_a_table(rule, rng):
    """A public table of b numbers, by the unit's number."""
    return np.arange(rule.n)[:, None] % rule.b == rng.permutation(rule.b)[np.arange(UNITS) % rule.b]


def one_bin_left_out(rule, rng):
    return np.arange(rule.n)[:, None] % rule.b == rng.integers(0, rule.b - 1, UNITS)


@pytest.mark.parametrize("fault", [in_turn, blocks, cut_shuffle, names_of_a_table, one_bin_left_out])
@pytest.mark.parametrize("k", [1, 3])
def test_bins_that_no_coins_chose_are_found(fault, k):
    rule = BallsInBins(k, 10)
    there = fault(rule, np.random.default_rng(1))
    assert order_law(there, rule).p_value < 1e-6
    if fault is not one_bin_left_out:
        assert order_law(there, RandomAllocation(k, 10)).p_value < 1e-6


def test_bins_are_drawn_once_and_allocations_in_each_epoch():
    bins, anew = BallsInBins(3, 6), RandomAllocation(3, 6)
    assert order_law(drawn(anew, 0), bins).p_value == 0
    law = order_law(drawn(bins, 0), anew)
    assert law.p_values["next round"] < 1e-6 < law.p_values["next unit"]


@pytest.mark.parametrize("name", RULES)
def test_draws_of_another_run_are_found(name):
    there = drawn(RULES[name], 3)
    law = order_law(there, RULES[name], there)
    assert law.p_values["other run"] < 1e-6
    assert order_law(there, RULES[name]).p_value > 1e-6


def test_fixed_batches_and_larger_coins_are_no_poisson_sampling():
    rng, rule = np.random.default_rng(2), PoissonSampling(60, 0.2)
    fixed = np.stack([rng.permutation(UNITS) < 60 for _ in range(60)])
    assert order_law(fixed, rule).p_values["even"] < 1e-6
    assert order_law(rng.random((60, UNITS)) < 0.25, rule).p_value < 1e-6
    shuffled = np.concatenate([np.arange(5)[:, None] == rng.permutation(UNITS) % 5 for _ in range(12)])
    assert order_law(shuffled, rule).p_value < 1e-6
    assert order_law(drawn(rule, 0), CyclicPoisson(60, 2, 0.2)).p_value == 0


def test_who_stays_of_too_many_is_chosen_at_random():
    rng, rule = np.random.default_rng(2), TruncatedPoisson(12, 0.3, 60, UNITS)
    first = np.zeros((12, UNITS), bool)
    for t in range(12):
        first[t, np.flatnonzero(rng.random(UNITS) < 0.3)[:60]] = True
    assert order_law(first, rule).p_values["next unit"] < 1e-6
    assert order_law(rng.random((12, UNITS)) < 0.3, rule).p_value == 0


def test_separation_and_its_warm_start_are_tested():
    rule, cold = RULES["separated"], MinSeparationSampling(12, 6, 0.3, warm_start=False)
    assert order_law(drawn(rule, 0), MinSeparationSampling(12, 4, 0.3)).p_value == 0
    assert order_law(drawn(cold, 0), MinSeparationSampling(12, 6, 0.3)).p_value < 1e-6
    assert order_law(drawn(MinSeparationSampling(12, 3, 0.6), 0), rule).p_value < 1e-6


def test_what_does_not_fit_is_refused():
    there = drawn(RULES["bins"], 0)
    for wrong, rule in (
        (there, FixedOrder(18, 3, 6)),
        (there[1:], RULES["bins"]),
        (there * 1.0, RULES["bins"]),
        (there[:, :1], RULES["bins"]),
        (drawn(RULES["poisson"], 0)[:, 1:] & False, RULES["truncated"]),
    ):
        with pytest.raises(ArgumentError):
            order_law(wrong, rule)
    with pytest.raises(ArgumentError, match="there and before"):
        order_law(there, RULES["bins"], there[:, 1:])


@pytest.mark.parametrize("name", ["cyclic", "truncated cyclic", "bins", "separated"])
def test_a_run_before_that_the_rule_never_gives_is_impossible_too(name):
    rule = RULES[name]
    there, before = drawn(rule, 0), drawn(rule, 1)
    assert order_law(there, rule, before).p_value > 1e-6
    before[:] = True
    assert dict(order_law(there, rule, before).p_values) == {"possible": 0.0}


def test_a_batch_of_one_too_many_is_impossible():
    rule = RULES["truncated"]
    there = drawn(rule, 0)
    for many, possible in ((rule.batch_size, True), (rule.batch_size + 1, False)):
        there[0] = np.arange(UNITS) % (UNITS // many) == 0
        there[0] = there[0] & (there[0].cumsum() <= many)
        assert there[0].sum() == many
        assert (order_law(there, rule).p_value > 0) is possible
