"""A tree's noise that is added late: by value that of the stream; or by a recurrence, its law."""

import itertools

import numpy as np
import pytest

from anyorder.errors import ArgumentError, PlanError
from anyorder.noise import NoiseSource, NoiseStream, lazy
from anyorder.noise.lazy import Jumps
from anyorder.strategy import BLT, Tree
from anyorder.strategy.registry import KINDS
from noise.test_lazy import OPTIMIZERS, RATES, N, difference, differences, patterns, recorded

TREES = {
    name: make
    for kind in KINDS
    if kind.cls is Tree
    for name, make in kind.examples.items()
    if "online" not in name and "regenerated" not in name
} | {
    "restarts at powers": lambda n: Tree(n, restarts=(8, 16, 17, 25), completion=(True, False, True, True)),
    "full at powers": lambda n: Tree(n, "full", restarts=(8, 16, 17, 25), completion=True),
}
SOURCE = NoiseSource(bytes(range(32)))


@pytest.mark.parametrize("name", TREES)
def test_prefix_terms_are_the_sums_of_the_steps_terms(name):
    tree = TREES[name](N)
    sums = np.concatenate([np.zeros((1, tree.num_rows)), np.cumsum(tree.noising_matrix(), axis=0)])
    for t in range(N + 1):
        terms, row = tree.prefix_terms(t), np.zeros(tree.num_rows)
        row[terms.rows] = terms.coefficients
        assert len(set(terms.rows.tolist())) == len(terms.rows) <= 5 * (1 + len(tree.restarts))
        np.testing.assert_allclose(row, sums[t], atol=1e-14)


def test_prefix_terms_of_the_online_estimator_are_refused():
    with pytest.raises(PlanError, match="as many rows as steps"):
        Tree(4, "online").prefix_terms(2)


def test_jumps_take_few_rows():
    for n, estimator in itertools.product((1, 2, 7, 8, 100, 1023, 1025), ("vanilla", "full")):
        jumps = recorded(Jumps(Tree(n, estimator), by_value=True), np.full(n, 0.1), np.ones(n))
        assert jumps.by_value
        assert jumps.kept == 0
        for stop in range(1, n + 1, max(1, n // 50)):
            assert jumps.over(np.arange(stop), stop).R.shape[2] <= 2 * (n - 1).bit_length() + 1
            if estimator == "vanilla":  # a step ends one node, and as many as it has below it to the left are taken off
                assert jumps.over([stop - 1], stop).R.shape[2] == (stop & -stop).bit_length()


def test_values_are_those_of_the_dense_run():
    for name, rates in itertools.product(TREES, RATES):
        tree, width, place, std = TREES[name](N), 3, 1000, 1.5
        lr, scale = RATES[rates]
        jumps = recorded(Jumps(tree, by_value=True), lr, scale)
        stream = NoiseStream(tree, SOURCE, std, width, start=place)
        dense = np.zeros((N + 1, width))
        for t in range(N):
            dense[t + 1] = dense[t] - lr[t] * scale[t] / std * stream.next().astype(np.float64)
        for touched in patterns(N):
            theta, last = np.zeros(width), 0
            for stop in sorted({*touched, *(t + 1 for t in touched), N}):
                jump = jumps.over([last, stop], stop)
                at = jump.which[0]
                places = np.full(jump.rows.shape[1], place)
                theta = theta * jump.Phi[at, 0, 0] + jump.R[at, 0] @ SOURCE.normal_at(jump.rows[at], places, width)
                assert not jump.R[jump.which[1]].any()
                np.testing.assert_allclose(theta, dense[stop], atol=3e-6 * np.abs(dense).max())
                last = stop


def test_jumps_by_value_from_many_starts_are_those_of_the_matrix():
    for name, rates in itertools.product(TREES, RATES):
        tree, (lr, scale) = TREES[name](N), RATES[rates]
        moved = -(lr * scale)[:, None] * tree.noising_matrix()
        jumps = recorded(Jumps(tree, by_value=True), lr, scale)
        for stop in (1, 12, 18, 23, N):
            jump = jumps.over(np.arange(stop + 1), stop)
            for start in range(stop + 1):
                row, at = np.zeros(tree.num_rows), jump.which[start]
                np.add.at(row, jump.rows[at], jump.R[at, 0])
                np.testing.assert_allclose(row, moved[start:stop].sum(axis=0), atol=1e-15)


@pytest.mark.parametrize("n", [1, 2, 8, N])
def test_by_a_recurrence_the_law_is_the_trees(n):
    for optimizer, rates in itertools.product(OPTIMIZERS.values(), RATES.values()):
        lr, scale = (x[:n] for x in rates)
        if n < N:
            for touched in ([], [0], [n - 1]):
                assert max(difference(Tree(n), touched, lr, scale, optimizer)) < 1e-12
            continue
        for tree in (Tree(n, restarts=(5, 13, 21)), Tree(n, restarts=(13, 21), completion=False)):
            assert not Jumps(tree, **optimizer).by_value
            assert max(differences(tree, lr, scale, optimizer)) < 1e-12


@pytest.mark.parametrize(
    ("tree", "message"),
    [(Tree(8, "full"), "full estimator"), (Tree(8, restarts=(5,), completion=True), "completed blocks")],
)
def test_trees_of_several_new_rows_a_step_are_refused_as_a_recurrence(tree, message):
    Jumps(tree, by_value=True)
    for momentum in (0.0, 0.5):
        with pytest.raises(PlanError, match=message):
            Jumps(tree, momentum=momentum)
    Jumps(Tree(8, restarts=(4,), completion=True), momentum=0.5)  # the root of 4 is the last prefix


@pytest.mark.parametrize(
    ("strategy", "momentum", "message"),
    [
        (BLT([0.9], [0.1], 8), 0.0, "blt, 1 buffer and momentum 0"),
        (Tree(8), 0.5, "and momentum 0.5"),
        (Tree(8, "online"), 0.0, "online estimator cannot"),
    ],
)
def test_by_value_needs_a_short_combination(strategy, momentum, message):
    with pytest.raises(PlanError, match=message):
        Jumps(strategy, momentum=momentum, by_value=True)
    with pytest.raises(ArgumentError, match="by_value must be a bool"):
        Jumps(strategy, by_value=1)


def test_rows_by_value_are_renewed_with_the_run():
    with pytest.raises(PlanError, match="rows of the run itself"):
        Jumps(Tree(8), by_value=True).first_row(3)


@pytest.mark.parametrize("estimator", ["vanilla", "full"])
@pytest.mark.parametrize("rates", ["constant", "drops"])
def test_prefixes_that_were_forgotten_are_the_same_again(estimator, rates, monkeypatch):
    """However few are kept."""
    tree = Tree(N, estimator=estimator)
    kept, forgetful = (recorded(Jumps(tree, by_value=True), *RATES[rates]) for _ in range(2))
    for stop in (N // 2, 7, N, N // 2):
        monkeypatch.setattr(lazy, "_MOST_PREFIXES", 1 << 21)
        expected = kept.over(np.arange(stop), stop)
        monkeypatch.setattr(lazy, "_MOST_PREFIXES", 5)
        for made, right in zip(forgetful.over(np.arange(stop), stop), expected, strict=True):
            assert made.tobytes() == right.tobytes()
