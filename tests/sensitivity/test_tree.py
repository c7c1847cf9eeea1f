"""Sensitivities of trees: by integers, against papers, other accountants and brute force."""

import json
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anyorder.errors import PlanError
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.patterns import Participation, Separated
from anyorder.strategy import Tree
from anyorder.strategy.registry import sensitivity, unit_sensitivities
from references import load


def squared(tree: Tree, participation: Participation) -> int:
    """sens^2, an integer; exact, and rounded up."""
    bound = sensitivity(tree, participation)
    result = round(bound.value**2)
    assert bound.exact
    assert bound.value**2 == pytest.approx(result, rel=1e-14)
    return result


def completed(order: list) -> tuple[Tree, KnownOrder]:
    """The order's tree, completed: one empty step after it makes it a block that a restart follows."""
    return Tree(len(order) + 1, restarts=(len(order),), completion=True), KnownOrder([*order, []])


def test_example_of_the_paper() -> None:
    """[Kairouz et al. 2021, D.2.1 and D.3.1]: the order 1, 2, 3, 1, 4; then with virtual steps."""
    order = [1, 2, 3, 1, 4]
    np.testing.assert_allclose(unit_sensitivities(Tree(5), KnownOrder(order)) ** 2, [8, 3, 3, 1], rtol=1e-14)
    assert squared(Tree(5), KnownOrder(order)) == 8
    np.testing.assert_allclose(unit_sensitivities(*completed(order)) ** 2, [12, 4, 4, 4], rtol=1e-14)


@pytest.mark.parametrize(
    ("n", "b", "k", "expected"),
    [(24, 3, 8, 88), (9, 4, 3, 11), (7, 3, 3, 9), (8, 8, 1, 4), (8, 1, 8, 120), (2000, 314, 6, 79), (19, 1, 2, 18)],
)
def test_minimum_separation_in_print(n: int, b: int, k: int, expected: int) -> None:
    """Unit tests of tensorflow-privacy and the deployed Gboard model; they count the steps between, b - 1."""
    assert squared(Tree(n), MinSeparation(n, b, k)) == expected


@pytest.mark.parametrize("d", range(11))
def test_every_step(d: int) -> None:
    """2^d leaves of one unit: sum over levels of nodes * leaves^2 = 2^d (2^(d+1) - 1)."""
    n = 2**d
    for rule in (MinSeparation(n, 1), FixedOrder(n, n, 1), EpochShuffle(n, 1), KnownOrder([0] * n)):
        assert squared(Tree(n), rule) == n * (2 * n - 1)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 9, 1023, 1024, 1600, 2**20 - 1])
def test_levels_of_one_epoch(n: int) -> None:
    """[Kairouz et al. 2021, Thm 4.1]: ceil(log2(n + 1)) nodes over a leaf."""
    levels = int(np.ceil(np.log2(n + 1)))
    assert squared(Tree(n), SingleEpoch(n)) == levels
    assert squared(Tree(n), MinSeparation(n, n)) == levels
    assert squared(Tree(n + 1, restarts=(n,), completion=True), SingleEpoch(n + 1)) == int(np.ceil(np.log2(n))) + 1


def test_min_separation_references() -> None:
    """tensorflow-privacy's exact recursion; its largest case took it 1819 s."""
    reference = load("dpftrl.json")
    seen = 0
    for case in reference["tfp.compute_rdp_single_tree"]:
        n, k, between = case["total_steps"], case["max_participation"], case["min_separation"]
        assert squared(Tree(n), MinSeparation(n, between + 1, k)) == case["sum_sensitivity_square"], case
        seen += 1
    for case in load("google_federated.json")["values"]:
        if case["id"].startswith("tree_sens2"):
            p = case["params"]
            rule = MinSeparation(p["steps"], p["min_separation_kairouz"] + 1, p["max_participation"])
            assert squared(Tree(p["steps"]), rule) == case["value"], case
            seen += 1
    assert seen > 25


def test_same_order_references() -> None:
    """DP-FTRL's accountant: (steps, epochs, virtual steps) -> with and without the virtual steps."""
    reference = load("dpftrl.json")
    cases = reference["dpftrl_privacy.get_total_sensitivity_sq_same_order"]
    completions = 0
    for case in cases:
        b, k, virtual = map(int, case["call"].split("order(")[1].split(")")[0].split(","))
        assert squared(Tree(b * k), FixedOrder(b * k, k, b)) == case["value"][1], case
        if b * k + virtual == 1 << (b * k - 1).bit_length():
            assert squared(*completed([*range(b)] * k)) == case["value"][0], case
            completions += 1
    assert completions >= 6


def test_given_order_references() -> None:
    """DP-FTRL's accountant; -1 is a step of nobody."""
    reference = load("dpftrl.json")
    for case in reference["dpftrl_privacy.get_total_sensitivity_sq_given_order"]:
        steps = json.loads(case["call"].split("(")[1].rstrip(")"))
        order = KnownOrder([[u] if u >= 0 else [] for u in steps])
        largest, each = case["value"]
        assert squared(Tree(len(steps)), order) == largest
        np.testing.assert_allclose(unit_sensitivities(Tree(len(steps)), order) ** 2, each, rtol=1e-14)


def test_restart_references() -> None:
    """DP-FTRL's accountant adds up the blocks, since each begins with a new shuffle; the last is not completed."""
    reference = load("dpftrl.json")
    for case in reference["dpftrl_privacy.compute_epsilon_tree"]:
        b, blocks = case["num_batches"], [e for e in case["epochs_between_restarts"] if e]
        total = 0
        for i, k in enumerate(blocks):
            order = [*range(b)] * k
            last = i == len(blocks) - 1 or not case["tree_completion"]
            total += squared(Tree(b * k), FixedOrder(b * k, k, b)) if last else squared(*completed(order))
        assert total == pytest.approx(case["sensitivity_sq"], rel=1e-12), case


def masks_best(tree: Tree, b: int, k: int) -> int:
    """max over all subsets of steps, as bit masks: an oracle that shares nothing with the program under test."""
    n = tree.n
    masks = np.arange(1 << n, dtype=np.int64)
    allowed = np.ones(len(masks), dtype=bool)
    for gap in range(1, b):
        allowed &= masks & (masks >> gap) == 0
    masks = masks[allowed]
    masks = masks[_popcount(masks) <= k]
    nodes = {(*np.flatnonzero(row), r) for r, row in enumerate(tree.matrix()) if row.any()}
    total = np.zeros(len(masks), dtype=np.int64)
    for node in nodes:
        total += _popcount(masks & sum(1 << int(t) for t in node[:-1])) ** 2
    return int(total.max())


def _popcount(values: np.ndarray) -> np.ndarray:
    return sum((values >> bit & 1) for bit in range(20))


@st.composite
def restarted(draw: st.DrawFn, max_n: int) -> Tree:
    n = draw(st.integers(1, max_n))
    restarts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else []
    return Tree(
        n, restarts=restarts, completion=draw(st.lists(st.booleans(), min_size=len(restarts), max_size=len(restarts)))
    )


@given(restarted(17), st.integers(1, 9), st.integers(1, 17))
@example(Tree(11, restarts=(10,), completion=True), 1, 11)  # a node whose right half is virtual
@settings(max_examples=80, deadline=None)
def test_minimum_separation_is_exact(tree: Tree, b: int, k: int) -> None:
    rule = MinSeparation(tree.n, b, k)
    assert squared(tree, rule) == masks_best(tree, b, rule.max_participations)


@given(restarted(16), st.data())
@settings(max_examples=100, deadline=None)
def test_epoch_shuffle_is_exact(tree: Tree, data: st.DataObject) -> None:
    n = tree.n
    s = data.draw(st.sampled_from([s for s in range(1, n + 1) if n % s == 0 and s ** (n // s) <= 5000]))
    rule, C = EpochShuffle(n // s, s), tree.matrix()
    best = max(np.square(C[:, list(pattern)].sum(axis=1)).sum() for pattern in rule.patterns())
    assert squared(tree, rule) == best


@given(restarted(60), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_orders_are_sums_over_nodes(tree: Tree, b: int) -> None:
    n, C = tree.n, tree.matrix()
    fixed = FixedOrder(n, -(-n // b), b)
    values = [np.square(C[:, list(pattern)].sum(axis=1)).sum() for pattern in fixed.patterns()]
    assert squared(tree, fixed) == max(values)
    order = KnownOrder([t % b for t in range(n)])
    np.testing.assert_allclose(unit_sensitivities(tree, order) ** 2, values, rtol=1e-14)


@pytest.mark.parametrize(("b", "k"), [(314, 6), (100, 20), (20, 100), (20, 60), (1, 2000), (1, 700), (3, 500)])
def test_real_sizes(b: int, k: int) -> None:
    """n = 2000: between the best of the regular orders and [Kairouz et al. 2021, Alg. 3], level by level."""
    n, tree = 2000, Tree(2000)
    rule = MinSeparation(n, b, k)
    k = rule.max_participations
    value = squared(tree, rule)
    starts = [
        KnownOrder([[0] if t >= j and (t - j) % b == 0 and (t - j) // b < k else [] for t in range(n)]) for j in (0, 3)
    ]
    assert value >= max(squared(tree, start) for start in starts)
    upper = 0
    for level in range(n.bit_length()):
        per_node, nodes = -(-(1 << level) // b), n >> level
        full = min(nodes, k // per_node)
        upper += full * per_node**2 + (full < nodes) * (k - full * per_node) ** 2
    assert value <= upper
    if b == 1:
        assert value == upper  # the first k steps fill the nodes of every level one after another


def test_restart_is_a_tree_of_its_own() -> None:
    """A unit that is in two blocks pays for each: the squares add."""
    n = 24
    for restarts in [(8,), (5, 17)]:
        tree = Tree(n, restarts=restarts)
        order = KnownOrder(["u" if t % 3 == 0 else [] for t in range(n)])
        edges = [0, *restarts, n]
        blocks = [
            (Tree(j - i), KnownOrder(["u" if t % 3 == 0 else [] for t in range(i, j)])) for i, j in pairwise(edges)
        ]
        assert squared(tree, order) == sum(squared(*block) for block in blocks)


def test_estimators_cost_the_same() -> None:
    rules = [
        SingleEpoch(30),
        FixedOrder(30, 5, 6),
        EpochShuffle(5, 6),
        MinSeparation(30, 4, 5),
        KnownOrder([t % 7 for t in range(30)]),
    ]
    for rule in rules:
        values = {squared(Tree(30, estimator, (11,), True), rule) for estimator in ("vanilla", "online", "full")}
        assert len(values) == 1


def test_rounds_up() -> None:
    for n in range(1, 200):
        value = sensitivity(Tree(n), MinSeparation(n, 2)).value
        squares = round(value**2)
        assert Fraction(value) ** 2 >= squares
        assert Fraction(np.nextafter(value, 0)) ** 2 < squares
    assert sensitivity(Tree(8), SingleEpoch(8)).value == 2.0


def test_unknown_participation() -> None:
    class Other(SingleEpoch.__base__):  # type: ignore[name-defined, misc]
        n, pattern = 8, Separated(8, 8, 1)
        covers = refusals = describe = to_dict = read = needs = lambda self, *asked: None

    with pytest.raises(PlanError, match="must be one of"):
        sensitivity(Tree(8), Other())
