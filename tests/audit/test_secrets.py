"""Phrases hidden in a text: where they stand, what a model's ranks of them are, and what chance makes of those."""

import itertools
import math

import numpy as np
import pytest

from anyorder.accounting import Gaussian, Sampled
from anyorder.audit import Memorised, Secrets
from anyorder.audit.secrets import chi_squared, exposure, group_curve
from anyorder.errors import ArgumentError

KEY = bytes(range(32))


def table_model(vocabulary, seed=0, order=2):
    """A model of random tables: log Pr(word | the last `order` words)."""
    made = np.random.default_rng(seed)
    tables = {
        j: np.log(made.dirichlet(np.full(vocabulary, 0.3), size=(vocabulary,) * j) + 1e-12) for j in range(1, order + 1)
    }

    def log_prob(contexts, words):
        last = contexts[:, -order:]
        return tables[last.shape[1]][(*last.T, words)]

    return log_prob


def equal(contexts, words):
    return np.full(len(words), -math.log(7.0))


def memorising(secrets, others=equal):
    """Probability 1 for every next word of a canary."""
    known = {tuple(phrase[: j + 1]) for phrase in secrets.phrases.tolist() for j in range(1, secrets.words)}

    def log_prob(contexts, words):
        seen = [(*c, w) in known for c, w in zip(contexts.tolist(), words.tolist(), strict=True)]
        return np.where(seen, 0.0, others(contexts, words))

    return log_prob


# -- phrases and coins -----------------------------------------------------------------------------------------------


def test_phrases_are_uniform_and_a_function_of_the_seed():
    secrets = Secrets(4000, 3, vocabulary=20, seed=5)
    assert np.array_equal(secrets.phrases, Secrets(4000, 3, vocabulary=20, seed=5).phrases)
    assert not np.array_equal(secrets.phrases, Secrets(4000, 3, vocabulary=20, seed=b"5").phrases)
    assert not np.array_equal(secrets.phrases, Secrets(4000, 3, vocabulary=20, seed=6).phrases)
    for j in range(3):
        counts = np.bincount(secrets.phrases[:, j], minlength=20)
        assert ((counts - 200) ** 2 / 200).sum() < 55  # 19 degrees of freedom: p = 2e-5
    pairs = np.bincount(secrets.phrases[:, 0] * 20 + secrets.phrases[:, 1], minlength=400)
    assert ((pairs - 10) ** 2 / 10).sum() < 520  # 399


def test_coins_are_fair_and_no_function_of_the_seed():
    secrets = Secrets(10_000, vocabulary=5, seed=0)
    assert abs(secrets.draw(KEY).sum() - 5000) < 250
    assert np.array_equal(secrets.draw(KEY), Secrets(10_000, vocabulary=9, seed=1).draw(KEY))
    assert not np.array_equal(secrets.draw(), secrets.draw())


# -- insertion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [False, True])
def test_insertion_counts_are_exact_and_the_corpus_is_unchanged(empty):
    secrets = Secrets(6, 3, vocabulary=50, seed=1)
    corpus = [np.arange(i % 5) for i in range(40)]
    included = np.array([1, 0, 1, 1, 0, 0], bool)
    planted = secrets.insert(corpus, 4, included=included, empty=empty, key=KEY)
    assert len(planted.corpus) == len(planted.canary) == 40 + 4 * (6 if empty else 3)
    own = [text for text, c in zip(planted.corpus, planted.canary, strict=True) if c < 0]
    assert all(np.array_equal(a, b) for a, b in zip(own, corpus, strict=True))
    for c in range(6):
        texts = [planted.corpus[i] for i in np.flatnonzero(planted.canary == c)]
        assert len(texts) == (4 if included[c] or empty else 0)
        assert all(np.array_equal(text, secrets.phrases[c] if included[c] else []) for text in texts)
    assert [text.tolist() for text in corpus] == [list(range(i % 5)) for i in range(40)]


def test_a_coin_moves_nothing_but_its_own_canary():
    secrets, corpus = Secrets(5, 2, vocabulary=9, seed=2), [[1, 2, 3]] * 30
    with_all = secrets.insert(corpus, 3, empty=True)
    without = secrets.insert(corpus, 3, included=np.array([True, True, False, True, True]), empty=True)
    assert np.array_equal(with_all.canary, without.canary)
    changed = [i for i, (a, b) in enumerate(zip(with_all.corpus, without.corpus, strict=True)) if len(a) != len(b)]
    assert changed == np.flatnonzero(with_all.canary == 2).tolist()


def test_positions_are_uniform():
    """Of 2 canaries, twice each, in 4 sequences: 8! / (4! 2! 2!) = 420 arrangements."""
    secrets, seen, draws = Secrets(2, 2, vocabulary=3, seed=0), {}, 8400
    for i in range(draws):
        arrangement = tuple(secrets.insert([[0]] * 4, 2, key=i.to_bytes(32, "little")).canary.tolist())
        seen[arrangement] = seen.get(arrangement, 0) + 1
    expected = draws / 420
    statistic = sum((count - expected) ** 2 / expected for count in seen.values()) + (420 - len(seen)) * expected
    assert len(seen) <= 420
    assert statistic < 550  # 419 degrees of freedom: p = 1e-5


# -- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "vocabulary"), [(2, 30), (3, 9), (4, 5)])
def test_ranks_among_all_phrases_are_those_of_brute_force(words, vocabulary):
    secrets, model = Secrets(20, words, vocabulary=vocabulary, seed=3), table_model(vocabulary)
    found = secrets.ranks(model, candidates=None)

    def perplexity(phrase):
        parts = (model(np.array([phrase[:j]]), np.array([phrase[j]]))[0] for j in range(1, words))
        return -sum(parts)

    for canary, rank in zip(secrets.phrases.tolist(), found, strict=True):
        own = perplexity(canary)
        tails = itertools.product(range(vocabulary), repeat=words - 1)
        others = [perplexity([canary[0], *tail]) for tail in tails if list(tail) != canary[1:]]
        assert 1 + sum(p < own for p in others) <= rank <= 1 + sum(p <= own for p in others)
    assert secrets.log_perplexity(model) == pytest.approx([perplexity(c) for c in secrets.phrases.tolist()])
    assert secrets.size(None) == vocabulary ** (words - 1)


def test_sampled_ranks_follow_ranks_among_all():
    secrets, model = Secrets(200, 3, vocabulary=30, seed=4), table_model(30)
    share = secrets.ranks(model, candidates=None) / 900
    sampled = secrets.ranks(model, candidates=2000) / 2001
    deviation = np.abs(sampled - share) / np.sqrt(share * (1 - share) / 2000 + 1e-6)
    assert deviation.max() < 5
    assert np.abs(deviation).mean() > 0.4  # they are samples: sqrt(2 / pi) is expected


@pytest.mark.parametrize(
    ("model", "candidates"),
    [(table_model(40), 99), (equal, None), (lambda c, w: -1.0 * (w % 3), 99)],
    ids=["table, sampled", "equal, all", "ties, sampled"],
)
def test_ranks_of_a_model_that_saw_nothing_are_uniform(model, candidates):
    """p-values over 40 seeds: uniform themselves, however many ties there are."""
    values = []
    for seed in range(40):
        secrets = Secrets(200, 2, vocabulary=40, seed=seed)
        values.append(chi_squared(secrets.ranks(model, candidates), secrets.size(candidates)).p_value)
    ordered = np.sort(values)
    steps = np.arange(41) / 40
    distance = max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())
    assert distance < 0.30  # Kolmogorov's, of 40: p = 1e-3


def test_ties_are_not_to_the_canarys_favour():
    """All phrases alike: a rank is a fair draw, not 1 and not the last."""
    secrets = Secrets(3000, 2, vocabulary=1000, seed=0)
    found = secrets.ranks(equal, candidates=9)
    counts = np.bincount(found, minlength=11)[1:]
    assert ((counts - 300) ** 2 / 300).sum() < 40  # 9 degrees of freedom: p = 8e-6
    impossible = secrets.ranks(lambda c, w: np.full(len(w), -np.inf), candidates=9)
    assert np.array_equal(impossible, found)


def test_ties_among_all_phrases_are_drawn_anew_for_each_canary():
    secrets = Secrets(400, 2, vocabulary=2, seed=0)
    found = secrets.ranks(equal, candidates=None)
    for word in (0, 1):
        own = found[secrets.phrases[:, 1] == word]
        assert abs((own == 1).mean() - 0.5) < 0.2


def test_rounding_that_depends_on_the_place_favours_nobody():
    def uneven(contexts, words):  # as kernels that take the first rows otherwise than the last
        return np.where(np.arange(len(words)) == 0, -1.0, -2.0)

    secrets = Secrets(3000, 2, vocabulary=1000, seed=0)
    assert abs((secrets.ranks(uneven, candidates=9) == 1).sum() - 300) < 90


def test_a_model_that_memorised_exposes_all_it_can():
    secrets = Secrets(30, 3, vocabulary=100, seed=7)
    model = memorising(secrets, others=lambda c, w: -5.0 - 0.001 * w)
    for candidates in (500, None):
        found = Memorised(secrets.ranks(model, candidates), secrets.size(candidates))
        assert found.exposure.max() == np.log2(found.size)
        assert np.median(found.ranks) == 1
    assert found.uniformity.distance == pytest.approx(9.0)
    assert found.uniformity.p_value < 1e-50
    assert found.uniformity.counts.tolist() == [30] + [0] * 9


@pytest.mark.parametrize("candidates", [300, None])
def test_each_canary_has_a_place_of_its_own_among_its_candidates(candidates):
    """One place for all would make ranks rise and fall together, where a model's rounding depends on the place."""
    secrets, places = Secrets(40, 2, vocabulary=301, seed=5), []

    def model(contexts, words):
        canary = len(places)
        places.append(np.flatnonzero(words == secrets.phrases[canary, 1]).tolist())
        return np.zeros(len(words))

    ranks = secrets.ranks(model, candidates)
    assert len(set(ranks.tolist())) > 30  # of 301 places: 37.5 are expected
    for found, rank in zip(places, ranks.tolist(), strict=True):
        assert rank - 1 in found  # all are equal to this model, so that a rank is a place


def test_candidates_are_fresh_for_each_canary_and_share_its_first_word():
    secrets, calls = Secrets(3, 3, vocabulary=1000, seed=0), []

    def model(contexts, words):
        calls.append((contexts.copy(), words.copy()))
        return np.zeros(len(words))

    done = []
    secrets.ranks(model, candidates=50, progress=done.append)
    assert done == [1, 2, 3]
    assert [contexts.shape for contexts, _ in calls] == [(51, 1), (51, 2)] * 3
    for c, ((_, second), (before, third)) in enumerate(zip(calls[::2], calls[1::2], strict=True)):
        assert (before[:, 0] == secrets.phrases[c, 0]).all()
        phrases = [tuple(phrase) for phrase in np.column_stack([before, third]).tolist()]
        assert phrases.count(tuple(secrets.phrases[c].tolist())) == 1
        assert np.array_equal(before[:, 1], second)
    assert not np.array_equal(calls[0][1], calls[2][1])
    assert np.array_equal(secrets.ranks(model, 50), secrets.ranks(model, 50))
    assert not np.array_equal(secrets.ranks(model, 50), secrets.ranks(model, 50, key=KEY))


# -- statistics ------------------------------------------------------------------------------------------------------


def test_exposure_by_chance():
    found = exposure(np.arange(1, 10_002), 10_001)
    assert found.max() == np.log2(10_001)
    assert found.mean() == pytest.approx(1 / math.log(2), abs=2e-3)
    assert np.median(found) == pytest.approx(1.0, abs=1e-3)
    assert np.quantile(found, 0.9) == pytest.approx(math.log2(10), abs=2e-3)


def test_chi_squared_by_hand_and_with_bins_of_unequal_size():
    found = chi_squared([1, 1, 2, 4], 4, bins=2)
    assert (found.statistic, found.distance) == (1.0, 0.25)  # 3 and 1, where 2 and 2 are expected
    assert found.p_value == pytest.approx(math.erfc(math.sqrt(0.5)))
    assert found.counts.tolist() == [3, 1]
    for size in (10, 11, 17, 10_001):
        every = chi_squared(np.arange(1, size + 1), size)
        assert every.statistic == pytest.approx(0, abs=1e-20)
        assert every.counts.sum() == size
    scipy = pytest.importorskip("scipy.stats")
    ranks = np.random.default_rng(0).integers(1, 1001, 500)
    reference = scipy.chisquare(np.histogram(ranks, bins=10, range=(0.5, 1000.5))[0])
    assert chi_squared(ranks, 1000).statistic == pytest.approx(reference.statistic)
    assert chi_squared(ranks, 1000).p_value == pytest.approx(reference.pvalue)


def test_the_claim_for_a_canary_is_that_of_a_group():
    assert group_curve(Gaussian(0.5), 1).mu == 0.5
    assert group_curve(Sampled(1.0, 0.1, 10), 1) == Sampled(1.0, 0.1, 10)
    found = group_curve(Gaussian(0.5, neighbours="replace-one"), 9)
    assert (found.mu, found.neighbours) == (4.5, "replace-one")
    with pytest.raises(ArgumentError, match="repeats=1"):
        group_curve(Sampled(1.0, 0.1, 10), 3)


def test_a_summary_holds_no_single_rank():
    told = Memorised(np.arange(1, 1001), 1000).to_dict()
    assert told["distance"] == 0.0
    assert told["counts"] == [100] * 10
    assert all(not isinstance(value, list) or len(value) == 10 for value in told.values())


# -- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_refused():
    secrets = Secrets(3, 3, vocabulary=300, seed=0)
    for wrong in (
        lambda: Secrets(0, vocabulary=5, seed=0),
        lambda: Secrets(1, 1, vocabulary=5, seed=0),
        lambda: Secrets(1, vocabulary=1, seed=0),
        lambda: Secrets(1, vocabulary=5, seed=-1),
        lambda: secrets.insert([[0]], 0),
        lambda: secrets.insert([[0]], 1, included=[1, 0, 1]),
        lambda: secrets.insert([[0]], 1, included=[True]),
        lambda: secrets.insert([[0.5]], 1),
        lambda: secrets.insert([[[0]]], 1),
        lambda: secrets.ranks(equal, 0),
        lambda: Secrets(1, 4, vocabulary=300, seed=0).ranks(equal, None),
        lambda: secrets.ranks(lambda c, w: np.nan * w, 5),
        lambda: secrets.ranks(lambda c, w: np.full(len(w), np.inf), 5),
        lambda: secrets.ranks(lambda c, w: np.zeros(3), 5),
        lambda: exposure([0], 5),
        lambda: exposure([6], 5),
        lambda: exposure([1.0], 5),
        lambda: chi_squared([], 10),
        lambda: chi_squared([1], 5),
    ):
        with pytest.raises(ArgumentError):
            wrong()
    with pytest.raises(ArgumentError, match="from 0 to 299") as caught:
        secrets.insert([[271_828]], 1)
    assert "271" not in str(caught.value)


def test_a_set_of_secrets_cannot_be_changed():
    secrets = Secrets(3, 3, vocabulary=300, seed=0)
    with pytest.raises(ValueError, match="read-only"):
        secrets.phrases[0, 0] = 1
    with pytest.raises(AttributeError):
        secrets.count = 4
