"""Trees: published variances, estimators against the pseudoinverse, restarts, completion."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyorder.errors import ArgumentError
from anyorder.strategy import Tree
from anyorder.strategy.registry import from_dict
from references import load

ESTIMATORS = ["vanilla", "online", "full"]


@st.composite
def trees(draw: st.DrawFn, max_n: int = 40) -> Tree:
    n = draw(st.integers(1, max_n))
    restarts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=4))) if n > 1 else []
    completion = draw(st.lists(st.booleans(), min_size=len(restarts), max_size=len(restarts)))
    return Tree(n, draw(st.sampled_from(ESTIMATORS)), restarts, completion, draw(st.booleans()))


def nodes_of(tree: Tree) -> np.ndarray:
    """The 0/1 matrix of the nodes, made anew: every block's aligned ranges of 2^l leaves."""
    rows = []
    edges = [0, *tree.restarts, tree.n]
    for start, end, completed in zip(edges[:-1], edges[1:], (*tree.completion, False), strict=True):
        leaves = 2 ** int(np.ceil(np.log2(end - start))) if completed else end - start
        for level in range(leaves.bit_length()):
            for first in range(0, leaves - 2**level + 1, 2**level):
                covered = np.arange(start + first, min(start + first + 2**level, end))
                rows.append(np.isin(np.arange(tree.n), covered))
    return np.array(rows, dtype=float)


@given(trees())
@settings(max_examples=60, deadline=None)
def test_factors_and_streams(tree: Tree) -> None:
    C, K, N = tree.matrix(), tree.noising_matrix(), nodes_of(tree)
    assert C.shape == K.T.shape == (tree.num_rows, tree.n)
    np.testing.assert_allclose(K @ C, np.eye(tree.n), atol=1e-12)
    np.testing.assert_allclose(C.T @ C, N.T @ N, atol=1e-12)  # the same sensitivities as of the nodes
    if tree.estimator != "full":
        assert sorted(map(tuple, C)) == sorted(map(tuple, N))
    np.testing.assert_allclose(tree.prefix_variance(), np.square(np.tri(tree.n) @ K).sum(axis=1), rtol=1e-12)
    Z = np.random.default_rng(tree.n).standard_normal((tree.num_rows, 2)).astype(np.float32)
    state = tree.init(2)
    for t in range(tree.n):
        noise, state = tree.step(t, state, Z.__getitem__)
        np.testing.assert_allclose(noise, K[t] @ Z, atol=1e-5)


@given(trees(max_n=24))
@settings(max_examples=40, deadline=None)
def test_full_is_the_pseudoinverse(tree: Tree) -> None:
    full = Tree(tree.n, "full", tree.restarts, tree.completion)
    P = np.linalg.pinv(nodes_of(full))
    K = full.noising_matrix()
    np.testing.assert_allclose(K @ K.T, P @ P.T, atol=1e-12)
    online, vanilla = (Tree(tree.n, e, tree.restarts, tree.completion) for e in ("online", "vanilla"))
    assert (full.prefix_variance() <= online.prefix_variance() * (1 + 1e-12)).all()
    assert (online.prefix_variance() <= vanilla.prefix_variance() * (1 + 1e-12)).all()


def online_by_formula(m: int) -> np.ndarray:
    """Prefix estimates on the nodes of one block by the published recursion: r' = r + (r'_left + r'_right) / 2."""
    nodes: dict[tuple[int, int], np.ndarray] = {}
    ids = [(first, size) for size in (1, 2, 4, 8, 16, 32) for first in range(0, m - size + 1, size)]
    unit = dict(zip(ids, np.eye(len(ids)), strict=True))
    for first, size in ids:
        below = 0 if size == 1 else (nodes[first, size // 2] + nodes[first + size // 2, size // 2]) / 2
        nodes[first, size] = unit[first, size] + below
    prefixes = []
    for t in range(1, m + 1):
        first, total = 0, np.zeros(len(ids))
        for size in (32, 16, 8, 4, 2, 1):
            if t & size:
                total += nodes[first, size] / (2 - 1 / size)
                first += size
        prefixes.append(total)
    return np.array(prefixes)


@pytest.mark.parametrize("m", [1, 2, 5, 8, 23, 32])
def test_online_is_the_published_recursion(m: int) -> None:
    B, P = np.tri(m) @ Tree(m, "online").noising_matrix(), online_by_formula(m)
    np.testing.assert_allclose(B @ B.T, P @ P.T, atol=1e-13)


def test_variances_of_the_reference_classes() -> None:
    reference = load("dpftrl.json")["noise_variance_steps_1_to_64_std_1"]
    for estimator, key, short in (
        ("online", "CummuNoiseEffTorch", "eff"),
        ("vanilla", "CummuNoiseTorch", "vanilla"),
    ):
        tree = Tree(64, estimator)
        np.testing.assert_allclose(tree.prefix_variance(), reference[key], rtol=1e-13)
        K = tree.noising_matrix()
        np.testing.assert_allclose(np.square(K).sum(axis=1), reference[f"increment_variance_{short}"], rtol=1e-13)
        B = np.tri(8) @ K[:8]
        np.testing.assert_allclose(B @ B.T, reference[f"covariance_first_8_{short}"], atol=1e-14)


def test_variances_in_print() -> None:
    assert Tree(32, "online").prefix_variance()[31] == pytest.approx(1 / (2 - 1 / 32))  # 0.508
    assert Tree(25, "online").prefix_variance()[24] == pytest.approx(2.05, abs=0.005)
    assert Tree(25).prefix_variance()[24] == 3


def test_completion_carries_the_noise_of_the_root() -> None:
    """25 steps completed to 32: the carried variance falls from that of 25 to that of a root."""
    after = {e: Tree(50, e, (25,), True).prefix_variance()[25] - 1 for e in ("vanilla", "online")}
    before = {e: Tree(50, e, (25,)).prefix_variance()[25] - 1 for e in ("vanilla", "online")}
    assert before == pytest.approx({"vanilla": 3, "online": 2.049462365591398})
    assert after["vanilla"] == 1
    # Below the 0.508 of noise on all 32 leaves: that the virtual ones are 0 is known. Nodes over them alone are never
    # drawn; a node with one real leaf under four levels has four looks at it.
    half = 1 / (2 - 1 / 8) + 1 / 4
    quarter = 1 / (2 - 1 / 16) + half / (1 + half)
    assert after["online"] == pytest.approx(quarter / (1 + quarter))
    assert after["online"] == pytest.approx(0.4886, abs=1e-4)


def test_restart_keeps_the_last_noise() -> None:
    for estimator in ESTIMATORS:
        alone = Tree(6, estimator).prefix_variance()
        both = Tree(12, estimator, restarts=(6,)).prefix_variance()
        np.testing.assert_allclose(both, np.concatenate([alone, alone + alone[-1]]), rtol=1e-14)


def test_large_trees_in_closed_form() -> None:
    n = 10**6
    vanilla, online, full = (Tree(n, e, (n // 3,), True).prefix_variance() for e in ESTIMATORS)
    assert vanilla[n // 3 - 1] == (n // 3).bit_count()
    assert vanilla[-1] == (n - n // 3).bit_count() + 1
    assert (full < online).mean() > 0.9
    assert online[2**16 - 1] == pytest.approx(1 / (2 - 2.0**-16), rel=1e-14)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rows_made_and_kept(estimator: str) -> None:
    """Costs in the documentation: rows of Z a step, vectors kept."""
    n, drawn = 256, []
    for regenerate in (False, True):
        tree = Tree(n, estimator, regenerate=regenerate)
        Z = np.zeros((tree.num_rows, 1), dtype=np.float32)
        asked: list[int] = []
        state, kept = tree.init(1), 0
        for t in range(n):
            _, state = tree.step(t, state, lambda r, Z=Z, asked=asked: asked.append(r) or Z[r])
            kept = max(kept, len(state))
        assert kept == tree.state_rows
        drawn.append((len(asked) / n, kept))
        if not regenerate and estimator != "vanilla":
            assert sorted(asked) == list(range(tree.num_rows))  # each row exactly once
    expected = {"vanilla": [(2, 0), (2, 0)], "online": [(2, 8), (9, 0)], "full": [(1, 8), (9, 0)]}[estimator]
    for (rows, kept), (most, vectors) in zip(drawn, expected, strict=True):
        assert rows <= most
        assert kept == vectors


def test_completion_as_one_bool_or_one_for_each() -> None:
    assert Tree(9, restarts=(2, 5), completion=True) == Tree(9, restarts=[2, 5], completion=[True, True])
    assert Tree(9, restarts=(2, 5), completion=[True, False]) != Tree(9, restarts=(2, 5))
    assert Tree(9, completion=True) == Tree(9)  # nothing follows the last block
    assert from_dict(Tree(9, "online", (3,), True, True).to_dict()).to_dict()["regenerate"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n must be an integer of at least 1, got 0"),
        ({"estimator": "honaker"}, "estimator must be one of 'full', 'online', 'vanilla', got 'honaker'"),
        ({"restarts": (0,)}, "restarts must be an integer from 1 to 9, got 0"),
        ({"restarts": (10,)}, "restarts must be an integer from 1 to 9, got 10"),
        ({"restarts": (4, 4)}, "restarts must increase"),
        ({"restarts": (4,), "completion": (True, False)}, "one for each of 1 restarts"),
        ({"restarts": (4,), "completion": (1,)}, "completion must be a bool"),
        ({"regenerate": 1}, "regenerate must be a bool, got 1"),
    ],
)
def test_refusals(arguments: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Tree(**({"n": 10} | arguments))
