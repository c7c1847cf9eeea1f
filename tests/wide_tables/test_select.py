"""Selectors: their laws by enumeration, what a replay gives, and what is refused without telling of the data."""

import itertools
import math
from collections import Counter
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from scipy.stats import chi2, norm

from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource
from anyorder.noise.discrete import _digits, _tail
from anyorder.sparse import select
from anyorder.sparse.select import select_counts, select_top, select_uniform

SOURCE = NoiseSource(bytes(range(32)))


def p_value(found, expected):
    """Of Pearson's chi-squared over all outcomes; those that are expected less than ten times are one outcome."""
    total = sum(found.values())
    assert sum(expected.values()) == pytest.approx(1, abs=1e-9)
    assert not set(found) - set(expected)
    cells = [(found.get(key, 0), total * p) for key, p in expected.items()]
    often = [cell for cell in cells if cell[1] >= 10]
    rest = np.sum([cell for cell in cells if cell[1] < 10], axis=0) if len(often) < len(cells) else (0, 0)
    if rest[1] >= 5:
        often.append(tuple(rest))
    else:
        assert rest[0] <= 20
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in often)
    return chi2.sf(statistic, len(often) - 1)


def drawn(choose, draws):
    return Counter(tuple(choose(step).tolist()) for step in range(draws))


def subsets_above(counts, threshold, std):
    """The law of the dense mechanism: independent coins."""
    p = norm.cdf((np.asarray(counts) - threshold) / std)
    return {
        chosen: math.prod(p[i] if i in chosen else 1 - p[i] for i in range(len(p)))
        for size in range(len(p) + 1)
        for chosen in itertools.combinations(range(len(p)), size)
    }


def exponential_mechanism(scores, k, scale):
    """The law of k draws without replacement, their order forgotten, by enumeration of all orders."""
    weights = np.exp(np.asarray(scores) / scale)
    law = {}
    for chosen in itertools.combinations(range(len(weights)), k):
        law[chosen] = 0.0
        for order in itertools.permutations(chosen):
            left, p = weights.sum(), 1.0
            for i in order:
                p *= weights[i] / left
                left -= weights[i]
            law[chosen] += p
    return law


COUNTS = [
    ([0.0, 2.0, 0.0, 0.7, 0.0, 0.0], 1.0, 0.8),
    ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0], 0.5, 1.0),  # no row is touched
    ([1.0, 2.0, 0.5, 0.7, -0.3, 0.1], 1.0, 1.0),  # all are
    ([0.0, 0.0, 3.0, 0.0, 0.0, 0.0], -0.4, 1.0),  # most untouched rows are chosen
]


@pytest.mark.parametrize(("counts", "threshold", "std"), COUNTS)
def test_counts_have_the_law_of_noise_on_all_rows(counts, threshold, std):
    found = drawn(lambda step: select_counts(counts, threshold, std, source=SOURCE, step=step), 1500)
    assert p_value(found, subsets_above(counts, threshold, std)) > 1e-3


def test_half_the_noise_on_counts_would_be_seen():
    counts, threshold, std = COUNTS[0]
    found = drawn(lambda step: select_counts(counts, threshold, std / 2, source=SOURCE, step=step), 1500)
    assert p_value(found, subsets_above(counts, threshold, std)) < 1e-12


TOP = [
    [0.0, 1.5, 0.0, 0.0, -1.0, 0.0, 0.4, 0.0],
    [0.0, 0.7, 0.7, 0.0, 0.7, 0.0, -0.7, -0.7],  # ties
    [-2.0, -1.0, -3.0, 0.0, -0.5, 0.0, 0.0, -0.1],
    [0.0] * 8,
    [5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -6.0],
]


@pytest.mark.parametrize(
    ("scores", "form"), [*((scores, "sparse") for scores in TOP), *((x, "dense") for x in TOP[:2])]
)
def test_top_has_the_law_of_the_sequential_exponential_mechanism(scores, form):
    """Touched rows alone, one of them with score 0; or all rows, each with a Gumbel of its own after a shift by 1/4."""
    ids = [*np.flatnonzero(scores).tolist(), scores.index(0.0)]
    given = (ids, [scores[i] for i in ids]) if form == "sparse" else np.array(scores) + 0.25
    found = drawn(lambda step: select_top(given, 3, 0.9, num_rows=8, source=SOURCE, step=step), 1500)
    assert p_value(found, exponential_mechanism(scores, 3, 0.9)) > 1e-3


@pytest.mark.parametrize("k", [1, 7, 8])
def test_top_chooses_exactly_k(k):
    found = drawn(lambda step: select_top(TOP[0], k, 1.0, source=SOURCE, step=step), 1000)
    assert p_value(found, exponential_mechanism(TOP[0], k, 1.0)) > 1e-3 if k < 8 else len(found) == 1


def test_another_scale_of_the_gumbels_would_be_seen():
    found = drawn(lambda step: select_top(TOP[0], 3, 0.45, source=SOURCE, step=step), 2000)
    assert p_value(found, exponential_mechanism(TOP[0], 3, 0.9)) < 1e-12


@pytest.mark.parametrize(("n", "k"), [(6, 3), (6, 4), (7, 2), (5, 1), (4, 4), (4, 0)])
def test_uniform_sets_are_equally_likely(n, k):
    sets = list(itertools.combinations(range(n), k))
    found = drawn(lambda step: select_uniform(k, num_rows=n, source=SOURCE, step=step), 1500)
    if len(sets) == 1:
        assert list(found) == sets
    else:
        assert p_value(found, dict.fromkeys(sets, 1 / len(sets))) > 1e-3


def test_words_have_64_bits_each_and_follow_each_other():
    """Far tails live in the low ones, and a word that is used twice would tie two rows together."""
    words = select._Words(SOURCE, b"select top", 3)
    taken = np.concatenate([words.take(count) for count in (2, 0, 5, 1)])
    raw = SOURCE.derive(b"select top").words(3, 0, 16)
    assert taken.tobytes() == raw.astype("<u4").tobytes()
    assert taken.dtype == np.uint64


def test_words_that_would_favour_small_rows_are_drawn_again():
    """2^64 is 5 and a third times 3 * 2^60: a plain remainder would name the first third 6 times for 5."""
    n = 3 * 2**60
    ids = np.concatenate([select_uniform(2000, num_rows=n, source=SOURCE, step=step) for step in range(10)])
    first = int((ids < n // 3).sum())  # 6/16 of all by remainders, with a standard deviation of 68
    assert abs(first - len(ids) / 3) < 4 * math.sqrt(len(ids) * 2 / 9)
    assert ids.max() > 0.99 * n


@pytest.mark.parametrize("touched", [[], [0], [9], [0, 1, 2], [3, 4, 7], [0, 2, 4, 6, 8], list(range(1, 10))])
def test_ranks_among_the_others_name_each_row_once(touched, monkeypatch):
    others = sorted(set(range(10)) - set(touched))
    monkeypatch.setattr(select, "_subset", lambda n, k, words: np.arange(n))
    ids = np.array(touched, np.int64)
    assert select._among_others(ids, len(others), len(others), None).tolist() == others


@pytest.mark.parametrize(
    ("n", "p"), [(1, 0.3), (7, 0.5), (50, 0.01), (10**7, 1e-5), (10**7, 1e-12), (10**7, 0.31), (2**60, 1e-15)]
)
def test_the_binomial_is_within_its_bound_in_total_variation(n, p):
    """Against the same weights to 50 digits, all of a wider window."""
    with localcontext(prec=50):
        exact_p = Decimal(p)
        odds = exact_p / (1 - exact_p)
        first, cumulative = select._weights(n, p, 1 - p)
        weights, total, b = {}, Decimal(0), first
        weight = Decimal(1)
        while b <= n and b < first + len(cumulative):
            weights[b] = weight
            total += weight
            weight = weight * (n - b) / (b + 1) * odds
            b += 1
        ours = np.diff(cumulative, prepend=0).tolist()
        gap = sum(abs(Decimal(own) / 2**62 - weights[first + i] / total) for i, own in enumerate(ours)) / 2
    assert cumulative[-1] == 2**62
    assert min(ours) >= 0
    assert float(gap) <= 2.0**-52 * (1 + math.sqrt(n * p))
    outside = max(0, first) and weights[first] / total  # the window's ends hold next to nothing
    assert float(outside) < 1e-18
    assert b > n or float(weights[b - 1] / total) < 1e-18


def test_tails_are_those_of_the_normal_law_far_out():
    """Relative error of Phi(-x), for thresholds of up to 12 standard deviations: within (4 + x^2) 2^-52."""
    with _digits():
        for x in np.linspace(0.25, 12, 48).tolist():
            exact = _tail(Decimal(x))
            assert float(abs(Decimal(float(select.ndtr(-x))) / exact - 1)) <= (4 + x * x) * 2.0**-52


@pytest.mark.parametrize("threshold", [6.0, 8.0])
def test_false_positives_of_far_thresholds_come_as_often_as_they_should(threshold):
    rows = int(300 / norm.sf(threshold))  # nothing of this size is made
    found = [len(select_counts(([], []), threshold, 1.0, num_rows=rows, source=SOURCE, step=t)) for t in range(100)]
    assert abs(np.mean(found) - 300) < 4 * math.sqrt(3)
    assert 150 < np.var(found) < 500


def test_touched_rows_far_below_a_far_threshold_are_chosen_as_often_as_they_should():
    """4.5 standard deviations below: 3.4e-6 each."""
    ids = np.arange(1_000_000)
    found = sum(
        len(select_counts((ids, np.full(len(ids), 1.5)), 6.0, 1.0, num_rows=len(ids), source=SOURCE, step=t))
        for t in range(10)
    )
    mean = 1e7 * norm.sf(4.5)
    assert abs(found - mean) < 4 * math.sqrt(mean)


def test_a_low_threshold_chooses_nearly_all():
    chosen = select_counts(([3], [1.0]), -2.0, 1.0, num_rows=10_000, source=SOURCE, step=0)
    assert abs(len(chosen) - 10_000 * norm.cdf(2.0)) < 4 * math.sqrt(10_000 * norm.cdf(2.0) * norm.sf(2.0))
    assert (np.diff(chosen) > 0).all()
    assert len(select_counts(([3], [1.0]), -60.0, 1.0, num_rows=1000, source=SOURCE, step=0)) == 1000
    assert select_counts(([3], [99.0]), 60.0, 1.0, num_rows=1000, source=SOURCE, step=0).tolist() == [3]


def test_the_first_waiting_times_are_exact_to_the_last_digits():
    """Sums of 20 000 gaps keep full relative precision; the plain running sum loses some."""
    times = select._waiting_times(np.random.default_rng(0).integers(2**64, size=20_000, dtype=np.uint64))
    found = select._first_of(10**7, times)
    total, worst = Decimal(0), 0.0
    with localcontext(prec=40):
        for j, time in enumerate(times.tolist()):
            total += Decimal(time) / (10**7 - j)
            worst = max(worst, abs(float(Decimal(float(found[j])) / total - 1)))
    assert worst < 5 * 2.0**-53


def test_waiting_times_are_exact_at_both_ends():
    words = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1], np.uint64)
    with localcontext(prec=60):
        exact = [float(-(1 - (Decimal(w) + Decimal("0.5")) / 2**64).ln()) for w in words.tolist()]
    np.testing.assert_allclose(select._waiting_times(words), exact, rtol=4e-16)


def test_top_of_a_wide_table_chooses_touched_rows_as_often_as_gumbels_on_all_do():
    """20 of 5000 with 40 touched: the number of touched rows that are chosen, beside plain Gumbel noise on all rows."""
    rng = np.random.default_rng(4)
    ids, scores = np.arange(0, 4000, 100), np.linspace(-1, 6, 40)
    full = np.zeros(5000)
    full[ids] = scores
    ours = [
        np.isin(select_top((ids, scores), 20, 1.0, num_rows=5000, source=SOURCE, step=t), ids).sum()
        for t in range(1500)
    ]
    plain = [np.isin(np.argpartition(-full - rng.gumbel(size=5000), 20)[:20], ids).sum() for _ in range(1500)]
    error = math.sqrt((np.var(ours) + np.var(plain)) / 1500)
    assert abs(np.mean(ours) - np.mean(plain)) < 4 * error
    assert np.var(ours) / np.var(plain) == pytest.approx(1, abs=0.2)


def test_the_same_step_gives_the_same_rows_however_counts_are_given():
    ids, values = np.array([70, 3, 900, 5, 41]), np.array([2.0, 5.0, 1.0, -9.0, 0.0])
    full = np.zeros(1000)
    full[ids] = values
    for choose in (
        lambda given, step, **size: select_counts(given, 2.0, 1.0, source=SOURCE, step=step, **size),
        lambda given, step, **size: select_top(given, 20, 1.0, source=SOURCE, step=step, **size),
    ):
        sparsely = choose((ids, values), 5, num_rows=1000)
        assert sparsely.dtype == np.int64
        assert (np.diff(sparsely) > 0).all()
        again = [
            choose((ids[::-1], values[::-1]), 5, num_rows=1000),
            choose((ids[:4], values[:4]), 5, num_rows=1000),
            choose((torch.tensor(ids), torch.tensor(values)), 5, num_rows=1000),
            choose(full, 5),
            choose(torch.tensor(full), 5, num_rows=1000),
        ]
        assert all(np.array_equal(sparsely, other) for other in again)
        assert not np.array_equal(sparsely, choose(full, 6))
    uniform = select_uniform(20, num_rows=1000, source=SOURCE, step=5)
    assert np.array_equal(uniform, select_uniform(20, num_rows=1000, source=SOURCE, step=5))


def test_a_renewed_source_chooses_anew_from_its_row_on():
    renewed = SOURCE.renewed(5, bytes(16))
    chosen = [select_uniform(20, num_rows=1000, source=s, step=t) for t in (4, 5) for s in (SOURCE, renewed)]
    assert np.array_equal(chosen[0], chosen[1])
    assert not np.array_equal(chosen[2], chosen[3])


def test_the_three_share_no_randomness(monkeypatch):
    """Equal words would let the data of one say which rows another chose: each has a key of its own."""
    keys, derive = [], NoiseSource.derive
    monkeypatch.setattr(
        NoiseSource, "derive", lambda own, label: keys.append(derive(own, label).key) or derive(own, label)
    )
    select_uniform(20, num_rows=1000, source=SOURCE, step=5)
    select_top(([], []), 20, 1.0, num_rows=1000, source=SOURCE, step=5)
    select_counts(([], []), 3.0, 1.0, num_rows=1000, source=SOURCE, step=5)
    assert len({*keys, SOURCE.key}) == 4


SECRET = 777_001


@pytest.mark.parametrize(
    ("given", "size", "message"),
    [
        (([SECRET, SECRET], [1.0, 2.0]), 10**6, "ids of counts must be distinct"),
        (([SECRET], [1.0]), 1000, "integers from 0 to num_rows - 1 = 999"),
        (([-SECRET], [1.0]), 1000, "integers from 0"),
        (([1.5], [1.0]), 1000, "integers from 0"),
        (([1, 2], [1.0]), 1000, "vectors of one length"),
        (([[1, 2]], [[1.0, 2.0]]), 1000, "vectors of one length"),
        (([1], [math.nan]), 1000, "must be finite"),
        (([1], [1.0], [2.0]), 1000, "a tuple of 3"),
        (([1], [1.0]), None, "num_rows must be given"),
        ([1.0, 2.0], 3, "must be num_rows = 3, got 2"),
        ([1.0, math.inf], None, "must be finite"),
        (([1], [1.0]), 0, "num_rows must be an integer from 1"),
    ],
)
def test_what_is_malformed_is_refused_without_telling_of_the_data(given, size, message):
    with pytest.raises(ArgumentError, match=message) as refused:
        select_counts(given, 1.0, 1.0, num_rows=size, source=SOURCE, step=0)
    assert str(SECRET) not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k must be an integer from 1 to 4"),
        ({"k": 5}, "k must be an integer from 1 to 4"),
        ({"scale": 0.0}, "scale must be above 0"),
        ({"scale": 1e-310}, "scores / scale must be finite"),
        ({"step": -1}, "step must be an integer from 0"),
    ],
)
def test_settings_are_checked(change, message):
    settings = {"k": 2, "scale": 1.0, "step": 0} | change
    with pytest.raises(ArgumentError, match=message):
        select_top([0.0, 1.0, 0.0, 2.0], source=SOURCE, **settings)


def test_thresholds_and_deviations_are_checked():
    for threshold, std, message in (
        (math.inf, 1.0, "threshold must be a finite"),
        (1.0, 0.0, "std must be above 0"),
        (1.0, -1.0, "std must be above 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            select_counts([1.0], threshold, std, source=SOURCE, step=0)
