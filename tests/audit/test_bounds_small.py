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

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom

from anyorder.accounting import Gaussian
from anyorder.audit import f_dp, one_run


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


@pytest.mark.parametrize(("m", "r"), CASES)
@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_no_gaussian_mechanism_beats_its_p_value(m, r, mu):
    """40 lines of the curve, in both: fewer lines allow more."""
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


def test_type_checkers_know_the_words_of_method():
    from typing import get_args, get_type_hints

    from anyorder.audit.bounds import METHODS, epsilon_lower_bound, p_value
    from anyorder.audit.result import Audited

    for function in (epsilon_lower_bound, p_value):
        assert get_args(get_type_hints(function)["method"]) == METHODS
    assert set(METHODS) == {"clopper_pearson", "f_dp", "gaussian", "one_run"}
    assert get_args(get_type_hints(Audited.method.fget)["return"]) == METHODS
