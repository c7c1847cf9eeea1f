"""The bounds of `anyorder.audit` against closed forms and plain sums; their arguments."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

import anyorder as ao
from anyorder.accounting import Gaussian, Sampled, gdp_delta, gdp_epsilon
from anyorder.accounting.curves import Composed, compose
from anyorder.audit import bounds as gaussian_law
from anyorder.audit import epsilon_lower_bound, f_dp, many_runs, mu_estimate, one_run, p_value
from anyorder.audit.bounds import METHODS
from anyorder.errors import ArgumentError


def attack(m, mu, seed):
    rng = np.random.default_rng(seed)
    coins = rng.random(m) < 0.5
    return mu * coins + rng.standard_normal(m), coins


def plain_one_run(m, r, v, epsilon, delta):
    """The formula, by sums of exact binomials."""
    q = 1 / (1 + math.exp(-epsilon))
    pmf = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    tail = math.fsum(pmf[v:])
    return min(1.0, tail + m * delta * tail * math.fsum(pmf[:v]) / (v * pmf[v])) if v else 1.0


def published_one_run(m, r, v, epsilon, delta):
    """Steinke, Nasr and Jagielski's formula, by the same sums."""
    q = 1 / (1 + math.exp(-epsilon))
    pmf = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    extra = max((math.fsum(pmf[v - i : v]) / i for i in range(1, v + 1)), default=0.0)
    return min(1.0, math.fsum(pmf[v:]) + 2 * m * delta * extra)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0, 7.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.01])
def test_one_run_is_the_formula(epsilon, delta):
    for r in (1, 2, 7, 40):
        for v in range(r + 1):
            found, plain = one_run.chance(60, r, v, epsilon, delta), plain_one_run(60, r, v, epsilon, delta)
            assert plain * (1 - 1e-13) <= found <= plain * (1 + 1e-11)


def test_one_run_is_never_below_the_formula():
    """In 60 digits: what floats round away is added."""
    with localcontext(prec=60):
        for r, epsilon, delta in ((7, 0.3, 0.0), (40, 2.0, 1e-5), (400, 1.0, 1e-5), (400, 0.1, 0.0)):
            q = 1 / (1 + Decimal(-epsilon).exp())
            pmf = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
            for v in range(1, r + 1, max(1, r // 20)):
                tail = sum(pmf[v:])
                exact = tail + 2 * r * Decimal(delta) * tail * (1 - tail) / (v * pmf[v])
                found = Decimal(one_run.chance(2 * r, r, v, epsilon, delta))
                assert min(exact, 1) <= found <= exact * (1 + Decimal("1e-9")), (r, v)


def test_one_run_is_the_published_p_value_without_delta_and_below_it_with():
    for m, r in ((3, 3), (60, 40), (1000, 100)):
        for v in range(r + 1):
            for epsilon in (0.0, 1.0, 3.0):
                published = published_one_run(m, r, v, epsilon, 0.0)
                assert one_run.chance(m, r, v, epsilon, 0.0) == pytest.approx(published, rel=1e-10)
                for delta in (1e-6, 1e-3):
                    published = published_one_run(m, r, v, epsilon, delta)
                    assert one_run.chance(m, r, v, epsilon, delta) <= published * (1 + 1e-10) or published > 0.5
    without, ours, published = (f(1000, 100, 90, 1.5, d) for f, d in (
        (plain_one_run, 0.0), (one_run.chance, 1e-5), (published_one_run, 1e-5)
    ))  # fmt: skip
    assert published - without > 7 * (ours - without) > 0


def test_the_published_term_in_delta_is_exceeded_by_a_mechanism():
    """m = r = 2: two guesses, N of them right with probability p_N; the wrong pairs of coins are shared evenly."""
    none = (1 - 0.05 * (2 + math.e)) / (1 + math.e * (2 + math.e))  # so that they add up to 1
    one = 2 * (0.05 + math.e * none)  # where no other guess is right: right - e wrong = delta
    p = np.array([none, one, math.e * one / 2])
    assert p.sum() == pytest.approx(1)
    right, wrong = np.array([p[1] / 2, p[2]]), np.array([p[0], p[1] / 2])
    assert np.maximum(right - math.e * wrong, 0).sum() + np.maximum(wrong - math.e * right, 0).sum() < 0.05 + 1e-15
    assert published_one_run(2, 2, 1, 1.0, 0.05) < p[1:].sum() <= one_run.chance(2, 2, 1, 1.0, 0.05)


def test_one_run_in_the_far_tail():
    assert one_run.chance(200, 200, 200, 1.0, 0.0) == pytest.approx((1 + math.exp(-1)) ** -200, rel=1e-9)
    assert one_run.chance(10**5, 2000, 2000, 0.0, 0.0) == pytest.approx(0.0, abs=1e-300)
    assert one_run.chance(10**5, 2000, 2000, 0.0, 0.0) > 0


def test_one_run_of_all_guesses_right_is_a_closed_form():
    """q^r = significance."""
    scores, coins = np.arange(60.0), np.arange(60) >= 30
    q = 0.05 ** (1 / 60)
    found = epsilon_lower_bound(scores, coins, 0.0, method="one_run", guesses=60)
    assert found == pytest.approx(math.log(q / (1 - q)), rel=1e-9)
    assert found <= math.log(q / (1 - q))


def test_the_number_of_guesses_is_paid_for():
    scores, coins = attack(300, 2.0, 1)
    counts = one_run.right_guesses(scores, coins, None)
    assert [r for r, _ in counts] == [round(share * 150) * 2 for share in one_run.SHARES]
    for method in ("one_run", "f_dp"):
        single = [p_value(scores, coins, (0.5, 1e-6), method=method, guesses=r) for r, _ in counts]
        assert p_value(scores, coins, (0.5, 1e-6), method=method) == pytest.approx(len(counts) * min(single))
        best = max(epsilon_lower_bound(scores, coins, 1e-6, 0.975, method, guesses=r) for r, _ in counts)
        assert epsilon_lower_bound(scores, coins, 1e-6, 0.95, method) == pytest.approx(best, rel=1e-6)


def test_guesses_are_the_highest_and_the_lowest():
    scores = np.array([5.0, 1.0, 4.0, 2.0, 3.0])
    coins = np.array([True, False, False, False, True])
    for guesses, right in ((1, 1), (2, 2), (3, 2), (4, 3), (5, 4)):
        assert one_run.right_guesses(scores, coins, guesses) == [(guesses, right)]


def test_equal_scores_tell_nothing_though_the_list_is_sorted_by_its_coins():
    for coins in (np.arange(1000) < 500, np.arange(1000) >= 500, np.arange(1000) % 2 == 0):
        [(r, v)] = one_run.right_guesses(np.zeros(1000), coins, 1000)
        assert abs(v - r / 2) < 25
        assert epsilon_lower_bound(np.zeros(1000), coins, 1e-5, method="one_run") == 0


def test_f_dp_of_all_guesses_right_is_a_recursion_by_hand():
    """m = r = v = 2: tau right at N = 2; N = 1 needs H_1 = f(1 - tau); N = 0 needs H_0 = f(1 - tau - H_1)."""
    errors = f_dp.errors_of((1.0, 0.0))
    low = math.exp(-1)
    # while R <= q = 1 / (1 + e^-1): H_1 = tau / e, R_1 = tau + tau / e, H_0 = max(R_1 / e, 1 - e (1 - R_1)); R + H = 1
    q = 1 / (1 + low)
    tau = q / (1 + low)
    assert tau == pytest.approx(q * q)
    assert f_dp.chance(errors, 2, 2, 2) == pytest.approx(q * q, rel=1e-5)
    assert f_dp.chance(errors, 1, 1, 1) == pytest.approx(q, rel=1e-5)


def test_f_dp_of_one_canary_is_the_trade_off_function():
    """The best guess of one coin is right with probability Phi(mu / 2)."""
    for mu in (0.0, 0.5, 2.0, 6.0):
        found = f_dp.chance(f_dp.errors_of(Gaussian(mu)), 1, 1, 1)
        assert found == pytest.approx(0.5 * math.erfc(-mu / 2 / math.sqrt(2)), rel=2e-6)


def test_f_dp_p_values_below_1e_30_are_right():
    """At mu = 0 each coin is guessed with probability 1/2; all right under f(1 - x) = x gives the binomial tail."""
    assert f_dp.chance(f_dp.errors_of(Gaussian(0.0)), 150, 150, 150) == pytest.approx(2.0**-150, rel=1e-4)


def test_f_dp_finds_the_mu_whose_p_value_is_the_significance():
    for m, r, v in ((40, 40, 33), (1000, 150, 140), (5000, 500, 400)):
        mu = f_dp.largest_mu(m, [(r, v)], 0.05)
        assert f_dp.chance(f_dp.errors_of(Gaussian(mu)), m, r, v) == pytest.approx(0.05, rel=1e-4)
        assert f_dp.chance(f_dp.errors_of(Gaussian(mu * 0.999)), m, r, v) <= 0.05


def test_bounds_are_values_that_were_refuted_themselves():
    for m, r, v in ((40, 40, 33), (1000, 150, 140), (5000, 500, 400)):
        epsilon = one_run.largest_epsilon(m, [(r, v)], 1e-9, 0.05)
        assert epsilon > 0
        assert one_run.chance(m, r, v, epsilon, 1e-9) <= 0.05
        mu = f_dp.largest_mu(m, [(r, v)], 0.05)
        assert mu > 0
        assert f_dp._impossible(np.array([0.05]), f_dp.gaussian_errors(np.array([mu])), m, r, v)[0]


def test_trade_off_functions_are_rounded_down():
    """mu = 0 is f(1 - x) = x; lines are held against 60 digits."""
    x = np.random.default_rng(0).random(500)
    assert (f_dp.errors_of(Gaussian(0.0))(x) <= x).all()
    with localcontext(prec=60):
        for epsilon, delta in ((0.3, 0.0), (1.0, 1e-3), (3.0, 0.02)):
            steep = Decimal(epsilon).exp()
            for one, found in zip(x, f_dp.errors_of((epsilon, delta))(x), strict=True):
                right, lost = Decimal(one), Decimal(delta)
                exact = max(1 - lost - steep * (1 - right), (right - lost) / steep, Decimal(0))
                assert exact - Decimal("1e-13") < Decimal(found) <= exact


def test_what_fair_coins_give_is_never_impossible():
    """f(1 - x) = x: tau is the binomial tail, to the last bit."""
    for r in (3, 10, 40, 100, 400):
        for v in range(1, r + 1, max(1, r // 15)):
            tail = Fraction(sum(math.comb(r, k) for k in range(v, r + 1)), 2**r)
            tau = float(tail) if Fraction(float(tail)) <= tail else math.nextafter(float(tail), 0.0)
            for m in (r, 3 * r):
                assert not f_dp._impossible(np.array([tau]), lambda x: x * 1.0, m, r, v)[0], (m, r, v)


def test_f_dp_rounds_its_epsilon_down():
    for mu, delta in ((0.01, 1e-5), (1.0, 1e-5), (1.0, 0.38), (1.0, 0.3829249), (5.0, 1e-12)):
        epsilon = f_dp.epsilon_below(mu, delta)
        assert epsilon <= gdp_epsilon(mu, delta)
        assert epsilon == 0 or gdp_delta(mu, epsilon) > delta


def test_the_gaussian_tail_at_shift_zero_is_the_beta_function():
    from scipy.special import betainc

    for df in (1, 2, 5, 98, 10**5):
        for t in (0.1, 1.0, 5.0, 20.0):
            half = betainc(df / 2, 0.5, df / (df + t * t)) / 2
            assert gaussian_law.log_tail(t, df, 0.0) == pytest.approx(math.log(half), abs=2e-10), (df, t)
            assert math.exp(gaussian_law.log_tail(-t, df, 0.0)) == pytest.approx(1 - half, rel=1e-10)


@pytest.mark.filterwarnings("ignore:divide by zero encountered in _nct_sf:RuntimeWarning")  # scipy 1.13
def test_the_gaussian_tail_is_scipys_where_that_is_accurate():
    from scipy.stats import nct

    for df in (1, 3, 20, 500):
        for shift in (-1.0, 0.5, 3.0, 10.0):
            for t in (-1.0, 0.3, shift, shift + 2):
                found, theirs = math.exp(gaussian_law.log_tail(t, df, shift)), float(nct.sf(t, df, shift))
                assert found == pytest.approx(theirs, rel=1e-7, abs=1e-9), (df, shift, t)


def test_the_gaussian_tail_is_a_plain_sum_far_out():
    """E[Phi(shift - t S)] by ten million points, in logs."""
    from scipy.special import gammaln, log_ndtr, logsumexp

    for t, df, shift in ((40.0, 30, 5.0), (8000.0, 10**5 - 2, 7905.7), (-3.0, 98, 8.0), (300.0, 98, 250.0)):
        s = np.linspace(1e-9, 4, 4_000_001)
        density = math.log(2) + df / 2 * math.log(df / 2) - gammaln(df / 2) + (df - 1) * np.log(s) - df * s * s / 2
        plain = float(logsumexp(density + log_ndtr(shift - t * s))) + math.log(s[1] - s[0])
        assert gaussian_law.log_tail(t, df, shift) == pytest.approx(plain, abs=1e-8), (t, df, shift)


@pytest.mark.parametrize(("m", "mu"), [(4, 1.0), (100, 0.0), (1000, 1.66), (10**5, 50.0), (10**5, 0.01)])
def test_the_gaussian_interval_inverts_its_p_value(m, mu):
    scores, coins = attack(m, mu, 3)
    for confidence in (0.5, 0.95, 1 - 1e-9):
        low, high = mu_estimate(scores, coins, confidence)
        tail = (1 - confidence) / 2
        assert gaussian_law.chance(scores, coins, low) == pytest.approx(tail, rel=2e-5)
        assert gaussian_law.chance(-scores, coins, -high) == pytest.approx(tail, rel=2e-5)
        assert gaussian_law.chance(scores, coins, low) <= tail * (1 + 1e-8)
    assert low <= mu <= high


def test_the_gaussian_p_value_at_mu_zero_is_that_of_the_t_test():
    from scipy.stats import ttest_ind

    for n1, n0 in ((2, 2), (1, 5), (20, 3), (300, 700)):
        scores = np.random.default_rng(n1).standard_normal(n1 + n0)
        coins = np.arange(n1 + n0) < n1
        theirs = ttest_ind(scores[coins], scores[~coins], alternative="greater").pvalue
        assert p_value(scores, coins, Gaussian(0.0), "gaussian") == pytest.approx(float(theirs), rel=1e-8)


def test_the_gaussian_p_value_is_the_noncentral_t_of_unequal_groups():
    from scipy.stats import nct, ttest_ind

    scores, coins = np.array([4.0, 5.0, 6.5, 0.0, 1.0, 2.0, -1.0]), np.arange(7) < 3
    t = float(ttest_ind(scores[coins], scores[~coins]).statistic)
    expected = float(nct.sf(t, 5, 2.0 / math.sqrt(1 / 3 + 1 / 4)))
    assert p_value(scores, coins, Gaussian(2.0), "gaussian") == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_a_pair_is_tested_as_no_less_than_its_mu(mu):
    """The mu of a pair is rounded up: the p-value is not below that of the curve itself."""
    scores, coins = attack(1000, mu + 0.3, 8)
    pair = (gdp_epsilon(mu, 1e-5), 1e-5)
    exact, rounded = (p_value(scores, coins, claim, "gaussian") for claim in (Gaussian(mu), pair))
    assert exact <= rounded < exact * (1 + 1e-5)


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_the_gaussian_bound_is_refuted_at_its_significance(confidence):
    """All of the significance is on one side, and no more than that."""
    scores, coins = attack(1000, 2.0, 9)
    low = epsilon_lower_bound(scores, coins, 1e-5, confidence, "gaussian")
    assert low > 0
    p = p_value(scores, coins, (low, 1e-5), "gaussian")
    assert p == pytest.approx(1 - confidence, rel=1e-4)


def test_the_gaussian_law_does_not_depend_on_units():
    scores, coins = attack(50, 2.0, 5)
    for scale in (1e-200, 3.0, 1e200):
        assert mu_estimate(scores * scale, coins) == pytest.approx(mu_estimate(scores, coins), rel=1e-9)
        assert mu_estimate(scores - 100, coins) == pytest.approx(mu_estimate(scores, coins), rel=1e-9)


def test_clopper_pearson_of_separated_scores_is_a_closed_form():
    """No error in n trials: at most 1 - level^(1/n)."""
    scores, coins = np.arange(200.0), np.arange(200) >= 100
    bound = 1 - 0.025 ** (1 / 100)
    expected = math.log((1 - 1e-3 - bound) / bound)
    found = epsilon_lower_bound(scores, coins, 1e-3, method="clopper_pearson", threshold=99.5)
    assert expected * (1 - 1e-8) < found <= expected


def test_clopper_pearson_keeps_choice_and_test_apart():
    """What the odd-numbered pairs are decides nothing about the threshold."""
    scores, coins = attack(400, 3.0, 2)
    shown = many_runs._chosen(scores[::2], coins[::2], 1e-5, 0.05)
    expected = epsilon_lower_bound(scores[1::2], coins[1::2], 1e-5, method="clopper_pearson", threshold=shown)
    assert epsilon_lower_bound(scores, coins, 1e-5, method="clopper_pearson") == expected > 0
    claim = Gaussian(2.0)
    candidates = many_runs._candidates(scores[::2])
    _, shown = many_runs._least(scores[::2], coins[::2], f_dp.errors_of(claim), candidates)
    expected = p_value(scores[1::2], coins[1::2], claim, method="clopper_pearson", threshold=shown)
    assert p_value(scores, coins, claim, method="clopper_pearson") == expected < 0.9


def test_where_all_err_the_bound_of_errors_is_one():
    level = 1e-3
    for n in (1, 3, 40):
        assert (many_runs._upper(np.array([n, n + 1]), n, level) == 1).all()
        for k in range(n):
            bound = float(many_runs._upper(np.array([k]), n, level)[0])
            assert plain_binomial(k, n, bound) == pytest.approx(level, rel=1e-4)
            assert plain_binomial(k, n, bound) <= level
    assert many_runs._upper(np.array([0]), 0, level) == 1


def plain_binomial(k, n, p):
    """P(k or fewer of n)."""
    return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


def test_a_score_at_the_threshold_is_guessed_in():
    scores = np.repeat([0.0, 1.0, 2.0], 60)
    coins = np.arange(180) % 60 < np.repeat([2, 30, 58], 60)
    at, under, over = (
        epsilon_lower_bound(scores, coins, 0.0, method="clopper_pearson", threshold=t) for t in (1.0, 0.5, 1.5)
    )
    alarms, misses = many_runs._upper_errors(scores, coins, np.array([1.0]), 0.025)
    expected = many_runs._upper_errors(scores, coins, np.array([0.5]), 0.025)
    assert (alarms, misses) == expected
    assert at == under > 0
    assert over > 0


def test_clopper_pearson_p_value_inverts_the_bound():
    scores, coins = attack(4000, 2.5, 4)
    p = p_value(scores, coins, (4.0, 1e-3), method="clopper_pearson", threshold=2.5)
    assert 1e-12 < p < 0.1
    at = epsilon_lower_bound(scores, coins, 1e-3, 1 - p, method="clopper_pearson", threshold=2.5)
    assert at == pytest.approx(4.0, rel=1e-5)


def test_separated_scores_give_a_finite_bound():
    for m in (2, 3, 10, 1000):
        scores, coins = np.arange(float(m)), np.arange(m) >= m // 2
        for method in METHODS:
            if method == "gaussian" and m == 2:
                continue  # two scores tell no spread: an error, below
            assert 0 <= epsilon_lower_bound(scores, coins, 1e-5, method=method) < 40


def test_more_confidence_is_a_smaller_bound():
    scores, coins = attack(500, 3.0, 8)
    for method in METHODS:
        bounds = [epsilon_lower_bound(scores, coins, 1e-5, c, method) for c in (0.5, 0.95, 1 - 1e-6)]
        assert bounds == sorted(bounds, reverse=True)
        assert bounds[0] > bounds[1] > 0
        assert bounds[0] < gdp_epsilon(3.0, 1e-5) * 1.2


def test_all_canaries_may_be_in():
    scores, _ = attack(30, 1.0, 0)
    for coins in (np.ones(30, bool), np.zeros(30, bool)):
        for method in ("one_run", "f_dp", "clopper_pearson"):
            assert epsilon_lower_bound(scores, coins, 1e-5, method=method) >= 0
            assert 0 < p_value(scores, coins, Gaussian(1.0), method=method) <= 1
        with pytest.raises(ArgumentError, match="both kinds"):
            epsilon_lower_bound(scores, coins, 1e-5, method="gaussian")
    assert epsilon_lower_bound([1.0], [True], 1e-5) == 0
    assert epsilon_lower_bound([1.0], [True], 1e-5, method="f_dp") == 0


def test_claims_are_curves_or_pairs():
    scores, coins = attack(500, 4.0, 6)
    for method in METHODS:
        assert p_value(scores, coins, Gaussian(0.1), method=method) < 0.01
        assert p_value(scores, coins, Gaussian(50.0), method=method) > 0.9
        assert p_value(scores, coins, (0.1, 1e-6), method=method) < 0.01


def test_curves_of_sampling_are_tested_too():
    pytest.importorskip("dp_accounting")
    scores, coins = attack(500, 4.0, 6)
    sampled = Sampled(5.0, 0.05, 100)
    both = compose(sampled, Gaussian(0.1, neighbours="add-or-remove"))
    assert type(both) is Composed
    for method in ("one_run", "f_dp", "clopper_pearson"):
        assert p_value(scores, coins, sampled, method=method) < 0.01
        assert p_value(scores, coins, both, method=method) < 0.1
        assert p_value(scores, coins, Sampled(0.3, 0.5, 100), method=method) > 0.9
    with pytest.raises(ArgumentError, match="Gaussian curve"):
        p_value(scores, coins, sampled, method="gaussian")


def test_a_curve_by_200_lines_is_below_its_closed_form():
    lines = f_dp._errors_of_lines(*np.array(f_dp.pairs_of(Gaussian(1.5))).T)
    exact = f_dp.errors_of(Gaussian(1.5))
    x = np.linspace(1e-9, 1 - 1e-9, 1001)
    assert (lines(x) <= exact(x) * (1 + 1e-9)).all()
    assert (exact(x) - lines(x)).max() < 1e-4


def test_bad_arguments_are_named():
    scores, coins = attack(10, 1.0, 0)
    for given, word in (
        ({"included": coins[:-1]}, "included"),
        ({"included": coins + 1}, "included"),
        ({"included": ["a"] * 10}, "included"),
        ({"included": scores}, "included"),
        ({"scores": np.append(scores[:-1], np.nan)}, "scores"),
        ({"scores": scores[:, None]}, "scores"),
        ({"scores": [], "included": []}, "scores"),
        ({"delta": 1.0}, "delta"),
        ({"delta": -0.1}, "delta"),
        ({"confidence": 1.0}, "confidence"),
        ({"confidence": 0}, "confidence"),
        ({"method": "guess"}, "method"),
        ({"guesses": 0}, "guesses"),
        ({"guesses": 11}, "guesses"),
        ({"guesses": 4, "method": "gaussian"}, "guesses"),
        ({"threshold": 1.0}, "threshold"),
        ({"threshold": math.inf, "method": "clopper_pearson"}, "threshold"),
        ({"delta": 0.0, "method": "f_dp"}, "delta"),
        ({"delta": 0.0, "method": "gaussian"}, "delta"),
        ({"scores": np.zeros(10), "method": "gaussian"}, "scores"),
    ):
        with pytest.raises(ArgumentError, match=word):
            epsilon_lower_bound(**{**{"scores": scores, "included": coins, "delta": 1e-5}, **given})
    with pytest.raises(ArgumentError, match="delta must be above 0"):
        p_value(scores, coins, (1.0, 0.0), method="gaussian")
    for claim in (1.0, "x", (1.0,), (-1.0, 0.1), (1.0, 1.0), (1.0, math.nan), (1.0, 0.1, 2)):
        with pytest.raises(ArgumentError):
            p_value(scores, coins, claim)


def test_the_public_names_are_there():
    assert ao.audit.epsilon_lower_bound is epsilon_lower_bound
    assert ao.audit.mu_estimate is mu_estimate
    assert ao.audit.p_value is p_value


def test_canaries_that_stand_out_of_no_noise_refute_every_claim():
    """A mechanism that forgot its noise: no spread at all, where the law of scores has one with certainty."""
    included = np.arange(40) % 2 == 1
    scores = np.where(included, 1.0, 0.0)
    assert p_value(scores, included, Gaussian(5.0), method="gaussian") == 5e-324
    with pytest.raises(ArgumentError, match="mu is infinite"):
        mu_estimate(scores, included)
    for nothing in (np.ones(40), -scores, 1e15 + scores):  # no gap, the wrong way, one that rounding may have made
        with pytest.raises(ArgumentError, match="nothing tells"):
            p_value(nothing, included, Gaussian(5.0), method="gaussian")
