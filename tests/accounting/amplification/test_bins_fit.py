"""What is tried as a chain is above the matrix, whatever a solver returns, and is no dearer than it has to be."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.optimize

from anyorder.accounting.amplification import bins
from anyorder.accounting.amplification import bins as bins_fit
from anyorder.accounting.amplification.bins import Chain, dominating_chains

B = 8
APART = np.abs(np.subtract.outer(np.arange(B), np.arange(B)))
GROWING = np.outer(np.linspace(0.6, 1, B), np.linspace(0.6, 1, B))


def chain_matrix(chain):
    """K' of a chain, written out from its definition."""
    block = np.array([max(m for m in range(chain.blocks) if m * chain.b // chain.blocks <= i) for i in range(chain.b)])
    d = np.abs(np.subtract.outer(block, block))
    states = chain.v * (chain.r**d + chain.r ** (chain.blocks - d)) / (1 + chain.r**chain.blocks)
    return states + chain.constant + chain.within * (d == 0) + chain.nu * np.eye(chain.b)


def least_eigenvalue(matrix):
    return float(np.linalg.eigvalsh(matrix)[0])


def is_above(chain, k):
    """Whether K' - k is entries and a form: reflections, of both with a diagonal of 1, which moves neither cone."""
    rest = chain_matrix(chain) - k
    assert rest.diagonal().min() > 0
    scale = 1 / np.sqrt(rest.diagonal())
    rest = rest * np.outer(scale, scale)
    at = np.zeros_like(rest)
    for step in range(20_000):
        values, vectors = np.linalg.eigh(at)
        form = (vectors * np.maximum(values, 0.0)) @ vectors.T
        other = np.minimum(2 * form - at, rest)
        at += other - form
        if step % 50 == 49 and least_eigenvalue(rest - np.maximum(rest - form, 0.0)) > -1e-7:
            return True
    return False


def odd_matrices():
    rng = np.random.default_rng(7)
    yield "a bin alone", np.diag(np.r_[np.full(B - 1, 0.05), 1.0]) + 0.01
    yield "rows of nothing", np.pad([[1.0, 0.9], [0.9, 1.0]], (0, B - 2))
    yield "nearly constant", np.ones((B, B)) + 1e-5 * np.diag(rng.uniform(size=B))
    yield "one direction", np.outer(*[rng.uniform(size=B)] * 2)
    yield "every other", np.outer(*[1 + 0.9 * (-1.0) ** np.arange(B)] * 2) / 4
    yield "falling", np.exp(-1.5 * APART - np.add.outer(np.arange(B), np.arange(B)) / 2)
    yield "growing", (0.8**APART + 0.1 * np.eye(B)) * GROWING
    order = rng.permutation(B)
    yield "any order", (0.8**APART)[np.ix_(order, order)]


def test_chains_are_above_odd_matrices():
    for at, (_, k) in enumerate(odd_matrices()):
        for scale in ([1e-4, 20.0], [1.0])[at % 2]:  # each fit is a hundred linear programs
            found = dominating_chains(scale * k)
            assert found
            for chain in found:
                assert chain.constant + chain.own >= scale * k.max()  # no diagonal is lower
                assert is_above(chain, scale * k)


@pytest.mark.parametrize("found", [0.0, -1.0])
def test_nothing_from_a_solver_is_a_diagonal_that_is_above_by_itself(monkeypatch, found):
    """With no entries and no chain, the least diagonal is the largest eigenvalue, and a little for roundings."""
    k = np.exp(-np.minimum(APART, B - APART) / 3)
    monkeypatch.setattr(
        scipy.optimize, "linprog", lambda c, **_: SimpleNamespace(status=0, x=np.full(len(c), found), fun=1.0)
    )
    chains = dominating_chains(k)
    assert chains
    for chain in chains:
        assert min(chain.constant, chain.nu, chain.v) >= 0
        assert least_eigenvalue(chain_matrix(chain) - k) > 0.5e-7
        assert chain.nu < np.linalg.eigvalsh(k)[-1] + 1e-6


def test_entries_below_zero_from_a_solver_count_as_none(monkeypatch):
    k = np.exp(-np.minimum(APART, B - APART) / 3)

    def solver(c, **_):
        return SimpleNamespace(status=0, x=np.r_[np.zeros(3), np.full(len(c) - 3, -1.0)], fun=1.0)

    monkeypatch.setattr(scipy.optimize, "linprog", solver)
    for chain in dominating_chains(k):
        assert least_eigenvalue(chain_matrix(chain) - k) > 0.5e-7


def test_what_a_solver_misses_the_diagonal_makes_up_for(monkeypatch):
    k = (0.8**APART + 0.1 * np.eye(B)) * GROWING
    solved = scipy.optimize.linprog

    def short(*args, **kwargs):
        answer = solved(*args, **kwargs)
        answer.x = answer.x * 0.98 - 1e-3
        return answer

    monkeypatch.setattr(scipy.optimize, "linprog", short)
    found = dominating_chains(k)
    assert found
    assert all(is_above(chain, k) for chain in found)


def test_a_raised_diagonal_has_a_little_for_roundings():
    """Of no chain at all, above no entry: what it takes is the largest eigenvalue."""
    k = 0.8**APART
    least = np.linalg.eigvalsh(k)[-1]
    assert least + 0.5e-7 < bins_fit._raised(Chain(B, 0.0, 0.0, 0.0, 0.5, B), k).nu < least + 2e-7


def test_without_a_solver_other_matrices_are_left(monkeypatch):
    k = 0.8**APART
    with_chains = bins.bins_delta(k, 1.0, 1.0)
    monkeypatch.setattr(scipy.optimize, "linprog", lambda *_, **__: SimpleNamespace(status=4, x=None, fun=None))
    bins._dominating.cache_clear()
    assert dominating_chains(k) == []
    assert bins.bins_delta(k, 1.0, 1.0) >= with_chains
    bins._dominating.cache_clear()


@pytest.mark.parametrize("found", [np.nan, np.inf])
def test_a_solver_that_returns_no_numbers_has_failed(monkeypatch, found):
    monkeypatch.setattr(
        scipy.optimize, "linprog", lambda c, **_: SimpleNamespace(status=0, x=np.full(len(c), found), fun=1.0)
    )
    assert dominating_chains(0.8**APART) == []


def test_a_length_that_a_solver_fails_at_is_left_out(monkeypatch):
    solved, calls = scipy.optimize.linprog, []

    def every_third(*args, **kwargs):
        calls.append(1)
        return solved(*args, **kwargs) if len(calls) % 3 == 0 else SimpleNamespace(status=4, x=None, fun=None)

    monkeypatch.setattr(scipy.optimize, "linprog", every_third)
    found = dominating_chains(0.8**APART)
    assert found
    assert all(is_above(chain, 0.8**APART) for chain in found)


def test_both_the_least_moment_and_the_largest_entries_are_tried():
    k = (0.8**APART + 0.1 * np.eye(B)) * GROWING
    found = dominating_chains(k)
    largest = bins_fit._cheapest(bins_fit._circulant(k), 1.0)
    assert largest in found
    variances = [np.expm1(chain_matrix(chain)).mean() for chain in found]
    assert min(variances) < 0.92 * np.expm1(chain_matrix(largest)).mean()


def test_the_mean_of_diagonals_may_be_raised_most_and_cost_least(monkeypatch):
    scales = np.random.default_rng(3).uniform(0.5, 1, size=10)
    d = np.abs(np.subtract.outer(np.arange(10), np.arange(10)))
    k = (0.1 * np.eye(10) + 0.6 * (0.8**d + 0.8 ** (10 - d)) / (1 + 0.8**10)) * np.outer(scales, scales)
    least = min(np.exp(chain_matrix(chain)).mean() for chain in dominating_chains(k))
    monkeypatch.setattr(bins_fit, "_SHARES", (0.5, 1.0))
    assert least < 0.99 * min(np.exp(chain_matrix(chain)).mean() for chain in dominating_chains(k))


def test_projections_are_as_many_as_it_takes():
    """By hand: 200 of them, and of the diagonal given before whatever is best."""
    scales = np.random.default_rng(3).uniform(0.5, 1, size=10)
    d = np.abs(np.subtract.outer(np.arange(10), np.arange(10)))
    k = (0.1 * np.eye(10) + 0.6 * (0.8**d + 0.8 ** (10 - d)) / (1 + 0.8**10)) * np.outer(scales, scales)
    fitted = Chain(10, 0.02, 0.1, 0.25, 0.5, 4, 0.05)
    rest, tries = chain_matrix(fitted) - k, []
    for given in np.linspace(0, 0.45, 19):
        at, best = rest + given * np.eye(10), -np.inf
        entries = np.zeros_like(rest)
        for _ in range(200):
            values, vectors = np.linalg.eigh(at - entries)
            best = max(best, values[0])
            entries = np.maximum(at - (vectors * np.maximum(values, 0)) @ vectors.T, 0)
        tries.append(given - best)
    assert bins_fit._raised(fitted, k).nu - 0.1 == pytest.approx(min(tries), rel=1e-3)


def test_a_second_price_that_finds_hardly_less_costs_no_second_law():
    d = np.minimum(APART, B - APART)
    k = (0.1 * np.eye(B) + (0.8**d + 0.8 ** (B - d)) / (1 + 0.8**B)) * GROWING
    assert len(dominating_chains(k)) == 2
