"""One-run p-values for few canaries against the worst mechanism there is, found by a linear program.

Let a mechanism release m guesses t, with probability p_N / C(r, N) each, N = how many of them are right. For one
canary, the coins of all others known, a right guess beside j other right ones has probability
X_j = (j + 1) p_{j+1} / m, a wrong one Y_j = (r - j) p_j / m. It is (epsilon, delta)-DP if and only if

    sum_j max(X_j - e^epsilon Y_j, 0) + max(Y_j - e^epsilon X_j, 0) <= delta

(for r < m the mechanism guesses r canaries that it draws, and tells nothing of the others). So the largest P[N >= v] is
a linear program in p, and it is attained: no p-value may lie below it.
"""

import itertools
import math
from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom

from anyorder.accounting import Gaussian
from anyorder.accounting.amplification.claims import Amplified
from anyorder.audit import epsilon_lower_bound, f_dp, many_runs, one_run, p_value
from anyorder.participation import BallsInBins
from anyorder.strategy import Independent


def worst(m, r, v, pairs):
    """max P[N >= v]; variables p, and for each pair and j the two positive parts."""
    count = r + 1 + 2 * r * len(pairs)
    rows, limits = [], []
    for place, (epsilon, delta) in enumerate(pairs):
        start = r + 1 + 2 * r * place
        for j in range(r):
            for part, (right, wrong) in enumerate(((1.0, math.exp(epsilon)), (-math.exp(epsilon), -1.0))):
                row = np.zeros(count)
                row[j + 1], row[j], row[start + 2 * j + part] = right * (j + 1) / m, -wrong * (r - j) / m, -1
                rows.append(row)
                limits.append(0.0)
        total = np.zeros(count)
        total[start : start + 2 * r] = 1
        rows.append(total)
        limits.append(delta)
    aim = np.zeros(count)
    aim[v : r + 1] = -1
    one = np.zeros((1, count))
    one[0, : r + 1] = 1
    found = linprog(aim, A_ub=np.array(rows), b_ub=limits, A_eq=one, b_eq=[1], method="highs")
    assert found.status == 0
    return -found.fun


CASES = [(1, 1), (2, 2), (3, 3), (3, 2), (5, 4), (6, 6), (6, 3)]
PAIRS = [(0.0, 0.01), (0.5, 0.0), (1.0, 1e-3), (1.0, 0.05), (3.0, 0.0), (3.0, 0.02)]


@pytest.mark.parametrize(("m", "r"), CASES)
@pytest.mark.parametrize(("epsilon", "delta"), PAIRS)
def test_no_mechanism_of_a_pair_beats_its_p_value(m, r, epsilon, delta):
    for v in range(1, r + 1):
        most, found = worst(m, r, v, [(epsilon, delta)]), one_run.chance(m, r, v, epsilon, delta)
        assert most <= found + 1e-7  # what the program's own tolerance is
        if found < 0.9 and epsilon > 0:  # nothing is lost
            assert found == pytest.approx(most, abs=1e-6)
        assert most <= f_dp.chance(f_dp.errors_of((epsilon, delta)), m, r, v) + 1e-7


def test_no_gaussian_mechanism_beats_its_p_value():
    """40 lines of the curve, in both: fewer lines allow more."""
    for mu, (m, r) in product([0.3, 1.0, 2.5], CASES):
        curve = Gaussian(mu)
        pairs = [(epsilon, curve.delta(epsilon)) for epsilon in np.linspace(0, curve.epsilon(1e-7), 40)]
        errors = f_dp._errors_of_lines(*np.array(pairs).T)
        for v in range(1, r + 1):
            most, found = worst(m, r, v, pairs), f_dp.chance(errors, m, r, v)
            assert most <= found + 1e-7
            assert f_dp.chance(f_dp.errors_of(curve), m, r, v) <= found * (1 + 1e-5)
            if v == r:  # nothing is lost there
                assert found == pytest.approx(most, rel=1e-4)


@pytest.mark.parametrize("m", [1, 2, 4, 6])
def test_randomised_response_has_the_level_exactly(m):
    for epsilon in (0.0, 1.0, 3.0):
        q = 1 / (1 + math.exp(-epsilon))
        for v in range(1, m + 1):
            outcomes = itertools.product((0, 1), repeat=m)
            plain = math.fsum(q ** sum(o) * (1 - q) ** (m - sum(o)) for o in outcomes if sum(o) >= v)
            assert one_run.chance(m, m, v, epsilon, 0.0) == pytest.approx(plain, rel=1e-12)
            assert worst(m, m, v, [(epsilon, 0.0)]) == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize("m", [1, 2, 4, 6])
def test_independent_gaussians_are_below_the_p_value(m):
    """Each guessed by the side of mu / 2, which is right with probability Phi(mu / 2)."""
    for mu in (0.3, 1.0, 3.0):
        q = 0.5 * math.erfc(-mu / 2 / math.sqrt(2))
        for v in range(1, m + 1):
            assert float(binom.sf(v - 1, m, q)) <= f_dp.chance(f_dp.errors_of(Gaussian(mu)), m, m, v) * (1 + 1e-9)


@pytest.mark.parametrize("threshold", [None, 0.4, 1.1])
def test_the_least_level_of_clopper_and_pearson_refutes_and_no_smaller_one_does(threshold):
    """Half of p is the level of each error: rounded up, so that the claim is refuted there."""
    rng = np.random.default_rng(2)
    coins = rng.random(600) < 0.5
    scores, errors = 3.0 * coins + rng.standard_normal(600), f_dp.errors_of(Gaussian(1.0))
    p, tested = many_runs.chance(scores, coins, errors, threshold), slice(None)
    if threshold is None:
        candidates = many_runs._candidates(scores[::2])
        threshold, tested = many_runs._least(scores[::2], coins[::2], errors, candidates)[1], slice(1, None, 2)
    assert 1e-30 < p < 1e-2

    def refuted(level):
        alarms, misses = many_runs._upper_errors(scores[tested], coins[tested], np.array([threshold]), level)
        return bool(errors(1 - alarms) > misses)

    assert refuted(p / 2)
    assert not refuted(p / 2 * (1 - 1e-8))


def test_each_line_of_an_amplified_curve_is_what_the_curve_says():
    """12 pairs, from epsilon 0 to where delta is 1e-5; its trade-off function is above none of them."""
    curve = Amplified(Independent(4), BallsInBins(2, 2), 1.5)
    pairs = f_dp.pairs_of(curve)
    assert [epsilon for epsilon, _ in pairs] == np.linspace(0.0, curve.epsilon(1e-5), 12).tolist()
    assert [delta for _, delta in pairs] == [curve.delta(epsilon) for epsilon, _ in pairs]
    x, most = np.linspace(0.01, 0.99, 99), 0.0
    for pair in pairs:
        most = np.maximum(most, f_dp.errors_of(pair)(x))
    np.testing.assert_array_equal(f_dp.errors_of(curve)(x), most)
    # every pair bounds one probability
    assert one_run.chances(40, [(40, 40)], pairs) == min(one_run.chance(40, 40, 40, *pair) for pair in pairs)


@pytest.mark.parametrize("included", [6, 20, 37])
@pytest.mark.parametrize("claim", [Gaussian(0.4), (0.5, 1e-3)])
def test_a_p_value_and_a_bound_are_of_all_canaries_whose_coins_may_have_been_guessed(included, claim):
    """40 canaries, however many of them were in; and "f_dp" is the least of two that bound one probability."""
    coins = np.arange(40) < included
    scores = np.where(coins, 1.0, -1.0) + np.arange(40) * 1e-3
    pairs, errors = f_dp.pairs_of(claim), f_dp.errors_of(claim)
    for guesses in (6, 12):
        counts = one_run.right_guesses(scores, coins, guesses)
        by_pairs, by_line = one_run.chances(40, counts, pairs), f_dp.chances(errors, 40, counts)
        assert by_pairs < 1 or by_line < 1
        assert p_value(scores, coins, claim, "one_run", guesses=guesses) == by_pairs
        assert p_value(scores, coins, claim, "f_dp", guesses=guesses) == min(by_pairs, by_line)
        bound = one_run.largest_epsilon(40, counts, 1e-3, 0.5)
        assert epsilon_lower_bound(scores, coins, 1e-3, 0.5, "one_run", guesses=guesses) == bound
        bound = f_dp.epsilon_below(f_dp.largest_mu(40, counts, 0.5), 1e-3)
        assert epsilon_lower_bound(scores, coins, 1e-3, 0.5, "f_dp", guesses=guesses) == bound


@pytest.mark.parametrize(("claim", "least"), [(Gaussian(0.4), "line"), ((0.5, 1e-3), "pairs")])
def test_which_of_two_p_values_is_the_less_depends_on_the_claim(claim, least):
    found = {
        "pairs": one_run.chances(40, [(12, 11)], f_dp.pairs_of(claim)),
        "line": f_dp.chances(f_dp.errors_of(claim), 40, [(12, 11)]),
    }
    assert found[least] < 0.999 * found["pairs" if least == "line" else "line"]


def test_type_checkers_know_the_words_of_method():
    from typing import get_args, get_type_hints

    from anyorder.audit.bounds import METHODS, epsilon_lower_bound, p_value
    from anyorder.audit.result import Audited

    for function in (epsilon_lower_bound, p_value):
        assert get_args(get_type_hints(function)["method"]) == METHODS
    assert set(METHODS) == {"clopper_pearson", "f_dp", "gaussian", "one_run"}
    assert get_args(get_type_hints(Audited.method.fget)["return"]) == METHODS
