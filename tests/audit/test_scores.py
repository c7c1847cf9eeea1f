"""Scores: the dense formula for every strategy, the law that they are claimed to have, and no matrix over rows."""

import tracemalloc
from itertools import product

import numpy as np
import pytest
import torch

from anyorder.audit import Canaries, scores
from anyorder.audit.canaries import Scorer, as_released, forward, sampled_scores, visible
from anyorder.errors import ArgumentError, PlanError, TrainingError
from anyorder.strategy import BandedInverse, Independent, SquareRoot, Tree
from anyorder.strategy.registry import KINDS
from anyorder.strategy.rescaled import Rescaled
from anyorder.workload import prefix_sum
from laws.cases import STRATEGIES

SIZES = (1, 2, 5, 8, 11, 12)
CANARIES = Canaries(size=9, count=4, dimension=9, seed=1)
RANDOM = Canaries(size=9, count=12, dimension=7, seed=2, orthogonal=False)


def steps_for(n, count, seed=0):
    rng = np.random.default_rng(seed)
    return [np.flatnonzero(rng.random(n) < 0.4).tolist() or [int(rng.integers(n))] for _ in range(count)]


def pi_of(steps, n):
    pi = np.zeros((len(steps), n))
    for c, own in enumerate(steps):
        pi[c, own] = 1
    return pi


def dense(released, C, steps, canaries):
    """(C pi)^T (C Ghat) g_c / || C pi ||, word for word."""
    pi = pi_of(steps, len(released))
    return [(C @ p) @ (C @ released) @ g / np.linalg.norm(C @ p) for p, g in zip(pi, canaries.vectors(), strict=True)]


def test_scores_are_the_dense_formula():
    for name, n in product(STRATEGIES, SIZES):
        strategy = STRATEGIES[name](n)
        released = np.random.default_rng(n).normal(size=(n, 9))
        for canaries in (CANARIES, RANDOM):
            steps = steps_for(n, canaries.count)
            expected = dense(released, strategy.matrix(), steps, canaries)
            np.testing.assert_allclose(scores(released, strategy, steps, canaries), expected, rtol=1e-9, atol=1e-11)


def test_every_kind_is_among_them():
    assert {kind.cls for kind in KINDS} == {type(make(8)) for make in STRATEGIES.values()}


# The others' C grows without bound: at larger sizes float64 has nothing to say about it.
TAME = [name for name in STRATEGIES if not name.endswith(("mixed", "rising"))]


def test_the_stream_makes_every_row_of_C_once():
    for name, n in [*product(STRATEGIES, SIZES), *product(TAME, (64, 257))]:
        strategy = STRATEGIES[name](n)
        stream = forward(strategy)
        rows = np.array([row for t in range(n) for row in stream.push(np.eye(n)[t])])
        C = strategy.matrix()
        C = C[C.any(axis=1)]  # of a completed block, nodes over virtual steps alone have no row
        assert rows.shape == C.shape
        if strategy.num_rows == n and not name.startswith("tree"):
            np.testing.assert_allclose(rows, C, atol=1e-9 * abs(C).max())
        rows, C = (X[np.lexsort(np.round(X, 9).T)] for X in (rows, C))
        np.testing.assert_allclose(rows, C, atol=1e-9 * abs(C).max())


def test_what_is_released_early_is_scored_by_finished_rows():
    """A run that was stopped: the score is that of the leading part of what is released."""
    for name in STRATEGIES:
        n, taken = 11, 7
        strategy = as_released(STRATEGIES[name](n))
        steps = [[0], [0, 2, 6, 8], [3, 10], [1, 2, 3, 5]]
        released = np.random.default_rng(0).normal(size=(n, 9))
        scorer = Scorer(strategy, steps, CANARIES)
        for row in released[:taken]:
            scorer.add(row)
        C = strategy.matrix()
        finished = C[~C[:, taken:].any(axis=1)][:, :taken]
        pi = pi_of(steps, n)[:, :taken]
        for p, g, found in zip(pi, CANARIES.vectors(), scorer.scores(), strict=True):
            expected = (finished @ p) @ (finished @ released[:taken]) @ g / np.linalg.norm(finished @ p)
            np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


# -- the law ---------------------------------------------------------------------------------------------------------


ALSO = {
    "rescaled online tree": lambda n: Rescaled(Tree(n, "online"), np.linspace(2, 1, n)),
    "rescaled full tree": lambda n: Rescaled(Tree(n, "full", (3,), True), np.linspace(2, 1, n)),
    "rescaled twice": lambda n: Rescaled(Rescaled(SquareRoot(n), np.linspace(2, 1, n)), np.linspace(1, 3, n)),
}


def test_scores_have_the_law_that_is_claimed():
    """Exactly, from the weights of each row in a score: noise std 1, mean || C pi ||, for what is released."""
    for name in [*STRATEGIES, *ALSO]:
        n = 11
        claimed = (STRATEGIES | ALSO)[name](n)
        strategy = as_released(claimed)
        steps = steps_for(n, 4)
        K = claimed.noising_matrix()
        single = Canaries(n, n, n, 0)  # canary t is +-1 in coordinate t, so that its score is the weight of row t
        signs = single.dot(np.ones(n))
        for own, norm in zip(steps, visible(strategy, steps, 4), strict=True):
            weights = signs * scores(np.eye(n), strategy, own, single)
            np.testing.assert_allclose(np.linalg.norm(weights @ K), 1, rtol=1e-8)
            np.testing.assert_allclose(weights[own].sum(), norm, rtol=1e-8)
            most = np.linalg.norm(claimed.matrix()[:, own].sum(axis=1))
            assert norm <= most * (1 + 1e-9)
            if strategy is claimed:
                np.testing.assert_allclose(norm, most, rtol=1e-12)
        covariance = np.linalg.inv(K @ K.T)
        best = [np.sqrt(p @ covariance @ p) for p in pi_of(steps, n)]
        np.testing.assert_allclose(visible(strategy, steps, 4), best, rtol=1e-8)


def test_scores_of_simulated_runs():
    for name in STRATEGIES:
        n, std, clip = 7, 0.7, 2.0
        claimed = STRATEGIES[name](n)
        strategy = as_released(claimed)
        canaries = Canaries(size=4000, count=2000, dimension=4000, seed=3)
        steps = [0, 3, 5]
        rng = np.random.default_rng(5)
        included = rng.random(2000) < 0.5
        G = np.zeros((n, 4000))
        G[steps] = clip * canaries.sum(included)
        released = G + std * claimed.noising_matrix() @ rng.normal(size=(claimed.num_rows, 4000))
        found = scores(released, strategy, steps, canaries)
        norm = visible(strategy, [steps])[0]
        for part, mean in ((found[included], clip * norm), (found[~included], 0.0)):
            assert abs(part.mean() - mean) < 5 * std / np.sqrt(len(part))
            assert abs(part.std() / std - 1) < 5 / np.sqrt(2 * len(part))


def test_estimators_of_a_tree_that_lose_are_seen_through():
    """Against the tree itself their scores are noisier than claimed; as_released says what they give."""
    for estimator in ("vanilla", "online"):
        tree = Tree(8, estimator)
        C, K = tree.matrix(), tree.noising_matrix()
        pi = np.zeros(8)
        pi[[0, 5]] = 1
        noise = np.linalg.norm(K.T @ C.T @ C @ pi) / np.linalg.norm(C @ pi)
        assert noise > 1.05
        seen = visible(as_released(tree), [[0, 5]])[0]
        assert np.linalg.norm(C @ pi) / noise < seen < np.linalg.norm(C @ pi)
    full = Tree(8, "full")
    assert as_released(full) is full
    assert as_released(Independent(5000)) == Independent(5000)
    with pytest.raises(PlanError, match="at most 4096"):
        as_released(Tree(5000))


def test_plain_scores_never_see_more():
    for name in STRATEGIES:
        n = 10
        strategy = STRATEGIES[name](n)
        rng = np.random.default_rng(1)
        released = rng.normal(size=(n, 9))
        steps = steps_for(n, 4)
        found = scores(released, strategy, steps, CANARIES, whiten=False)
        expected = [
            released[own].sum(axis=0) @ g / np.sqrt(len(own)) for own, g in zip(steps, CANARIES.vectors(), strict=True)
        ]
        np.testing.assert_allclose(found, expected, atol=1e-12)
        K = strategy.noising_matrix()
        for p, norm in zip(pi_of(steps, n), visible(as_released(strategy), steps, 4), strict=True):
            assert p.sum() / np.linalg.norm(p @ K) <= norm * (1 + 1e-9)


def test_the_score_under_poisson_sampling_is_the_likelihood_ratio():
    n, q, clip, std = 6, 0.3, 2.0, 3.0
    rng = np.random.default_rng(0)
    released = rng.normal(size=(n, 9)) * std
    found = sampled_scores(released, CANARIES, sampling_probability=q, clip_norm=clip, noise_std=std)
    y = released @ CANARIES.vectors().T / std
    shift = clip / std
    ratio = np.exp(-0.5 * (y - shift) ** 2) / np.exp(-0.5 * y**2)
    np.testing.assert_allclose(found, np.log(1 - q + q * ratio).sum(axis=0), rtol=1e-12)
    always = sampled_scores(released, CANARIES, sampling_probability=1.0, clip_norm=clip, noise_std=std)
    np.testing.assert_allclose(always, np.log(ratio).sum(axis=0), rtol=1e-10)


# -- forms of input, and memory --------------------------------------------------------------------------------------


def test_all_forms_of_rows_and_steps_mean_the_same():
    n = 8
    strategy = Tree(n, "full")
    released = np.random.default_rng(0).normal(size=(n, 9))
    steps = steps_for(n, 4)
    expected = scores(released, strategy, steps, CANARIES)
    tensor = torch.from_numpy(released)
    masks = pi_of(steps, n).astype(bool)
    for rows in (tensor, list(tensor), (row for row in released), [row.reshape(3, 3) for row in tensor]):
        np.testing.assert_array_equal(scores(rows, strategy, steps, CANARIES), expected)
    for given in (masks, list(masks), [np.array(own[::-1]) for own in steps], [*map(tuple, steps)]):
        np.testing.assert_array_equal(scores(released, strategy, given, CANARIES), expected)
    shared = scores(released, strategy, [[1, 4]] * 4, CANARIES)
    for given in ([1, 4], (4, 1), np.array([1, 4]), range(1, 5, 3), masks[0] * False | np.isin(np.arange(n), [1, 4])):
        np.testing.assert_array_equal(scores(released, strategy, given, CANARIES), shared)
    np.testing.assert_allclose(scores(released.astype(np.float32), strategy, [1, 4], CANARIES), shared, atol=1e-6)
    np.testing.assert_array_equal(
        scores(released, None, [1, 4], CANARIES), scores(released, Independent(n), [1, 4], CANARIES)
    )


@pytest.mark.parametrize(
    ("participations", "message"),
    [
        ([], "at least one step"),
        (5, "at least one step"),
        ([[]] * 4, "one or more steps"),
        ([[1], [2]], "for each of 4 canaries, got 2"),
        ([8], "lie in 0 .. 8 - 1|lie in 0"),
        ([-1], "lie in 0"),
        ([1, 1], "distinct"),
        ([0.5], "integers"),
        ([[False] * 8] * 4, "one or more steps"),
        ([[True] * 7] * 4, "one for each of n=8 steps, got 7"),
    ],
)
def test_steps_that_do_not_fit_are_refused(participations, message):
    with pytest.raises(ArgumentError, match=message):
        scores(np.zeros((8, 9)), Tree(8), participations, CANARIES)


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ArgumentError, match="each of 8 steps, got 7"):
        scores(np.zeros((7, 9)), Tree(8), [0], CANARIES)
    with pytest.raises(ArgumentError, match="n=8 rows.*more"):
        scores(np.zeros((9, 9)), Tree(8), [0], CANARIES)
    with pytest.raises(ArgumentError, match="each of 6 steps, got 4"):
        scores(np.zeros((4, 9)), None, [0, 5], CANARIES)
    with pytest.raises(ArgumentError, match="each of 6 steps, got 5"):
        scores(np.zeros((5, 9)), None, [0, 5], CANARIES)
    with pytest.raises(ArgumentError, match="size=9"):
        scores(np.zeros((8, 8)), Tree(8), [0], CANARIES)
    with pytest.raises(ArgumentError, match="canaries must be"):
        scores(np.zeros((8, 9)), Tree(8), [0], np.eye(9))
    scorer = Scorer(Tree(8), [3], CANARIES)
    scorer.add(np.zeros(9))
    with pytest.raises(TrainingError, match="nothing shows of 4 of 4 canaries"):
        scorer.scores()


@pytest.mark.parametrize("strategy", [BandedInverse.from_square_root(prefix_sum(2000), 4), Tree(2000, "full")])
def test_memory_is_that_of_the_canaries(strategy):
    n, size, count = 2000, 20_000, 200
    canaries = Canaries(size, count, size, 0)
    row = np.random.default_rng(0).normal(size=size).astype(np.float32)
    steps = [[c % 100 + 100 * e for e in range(20)] for c in range(count)]
    canaries.dot(row)
    tracemalloc.start()
    found = scores((row for _ in range(n)), strategy, steps, canaries)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.shape == (count,)
    assert peak < 4e6  # a row is 0.16 MB in float64; all of them 320 MB, and n numbers for each canary 3.2 MB
