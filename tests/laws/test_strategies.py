"""Laws of every strategy: K C = I, streamed noise is K Z, prefix variances, saved and loaded alike."""

import json
from typing import assert_never

import numpy as np
import pytest

from anyorder.errors import ArgumentError, PlanError
from anyorder.strategy import Banded, Strategy, Toeplitz
from anyorder.strategy.base import Combination
from anyorder.strategy.registry import Structure, from_dict, kind_of
from anyorder.strategy.rescaled import Rescaled
from laws.cases import STRATEGIES, over

SIZES = [1, 2, 3, 7, 16, 29]

every_strategy = over("name", STRATEGIES)
every_size = over("n", SIZES)


def stream(strategy: Strategy, Z: np.ndarray) -> np.ndarray:
    """All noise, step by step. Rows come in one buffer; the noise is written over; each step is taken twice."""
    buffer = np.empty_like(Z[0])

    def row(r: int) -> np.ndarray:
        buffer[:] = Z[r]
        return buffer

    state, noise = strategy.init(Z.shape[1]), []
    for t in range(strategy.n):
        made, _ = strategy.step(t, state, row)
        assert made.dtype == np.float32
        noise.append(made.copy())
        made[:] = np.nan  # the caller's own array
        again, state = strategy.step(t, state, row)  # the state before is as it was
        np.testing.assert_array_equal(again, noise[-1])
        again[:] = np.nan
        assert len(state) <= strategy.state_rows
    return np.array(noise)


@every_strategy
@every_size
def test_noising_matrix_inverts_the_strategy(name: str, n: int) -> None:
    strategy = STRATEGIES[name](n)
    C, K = strategy.matrix(), strategy.noising_matrix()
    assert (strategy.n, C.shape, K.shape) == (n, (strategy.num_rows, n), (n, strategy.num_rows))
    np.testing.assert_allclose(K @ C, np.eye(n), rtol=0, atol=1e-12)
    A = np.tri(n)
    np.testing.assert_allclose((A @ K) @ C, A, rtol=0, atol=1e-11)


@every_strategy
@every_size
def test_columns_are_those_of_the_matrix(name: str, n: int) -> None:
    strategy = STRATEGIES[name](n)
    C, steps = strategy.matrix(), np.arange(0, n, 2)
    np.testing.assert_allclose(strategy.columns(steps), C[:, steps], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(strategy.column_norms_squared(), np.square(C).sum(axis=0), rtol=1e-12)


@every_strategy
@every_size
def test_streamed_noise_is_the_dense_product(name: str, n: int) -> None:
    strategy = STRATEGIES[name](n)
    Z = np.random.default_rng(n).standard_normal((strategy.num_rows, 6)).astype(np.float32)
    expected = strategy.noising_matrix() @ Z
    np.testing.assert_allclose(stream(strategy, Z), expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


@every_strategy
def test_chunks_of_coordinates_give_the_same_noise(name: str) -> None:
    strategy = STRATEGIES[name](29)
    Z = np.random.default_rng(0).standard_normal((strategy.num_rows, 6)).astype(np.float32)
    parts = [stream(strategy, np.ascontiguousarray(Z[:, cut])) for cut in (slice(0, 1), slice(1, 4), slice(4, 6))]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), stream(strategy, Z))


@every_strategy
@every_size
def test_prefix_variance_is_that_of_the_dense_matrix(name: str, n: int) -> None:
    strategy = STRATEGIES[name](n)
    expected = np.square(np.tri(n) @ strategy.noising_matrix()).sum(axis=1)
    np.testing.assert_allclose(strategy.prefix_variance(), expected, rtol=1e-10)


@every_strategy
@over("scaled", [False, True])
@every_size
def test_the_recurrence_streams_the_noising_matrix(name: str, n: int, scaled: bool) -> None:
    """Where there is none, the strategy is a combination; one of the two says how its noise is made."""
    strategy = STRATEGIES[name](n)
    if scaled:
        strategy = Rescaled(strategy, np.linspace(2, 0.5, n))
    try:
        d = len(strategy.recurrence(0).h)
    except PlanError:
        combined = (Structure.DENSE, Structure.TOEPLITZ, Structure.TREE, Structure.RESCALED)
        assert kind_of(strategy).structure in combined
        return
    K, state = strategy.noising_matrix(), np.zeros((d, n))  # the state, as a combination of rows of Z
    for t, z in enumerate(np.eye(n)):
        F, G, h, g = strategy.recurrence(t)
        assert (F.shape, G.shape, h.shape, g.shape) == ((d, d), (d,), (d,), ())
        np.testing.assert_allclose(h @ state + g * z, K[t], rtol=0, atol=1e-12 * max(1, np.abs(K).max()))
        state = F @ state + np.outer(G, z)
    for one, many in zip(strategy.recurrence(n - 1), strategy.recurrences(np.arange(n)), strict=True):
        np.testing.assert_array_equal(many[-1], one)


@every_strategy
@every_size
def test_the_structure_is_what_the_row_says(name: str, n: int) -> None:
    """What sensitivities, roundings and renewals take for granted."""
    strategy = STRATEGIES[name](n)
    C, structure = strategy.matrix(), kind_of(strategy).structure
    same = {"rtol": 1e-12, "atol": 1e-13 * np.abs(C).max()}
    if structure is not Structure.TREE:
        assert C.shape == (n, n)
        assert not np.triu(C, 1).any()
        assert (np.diag(C) > 0).all()
    match structure:
        case Structure.IDENTITY:
            np.testing.assert_array_equal(C, np.eye(n))
        case Structure.TOEPLITZ | Structure.TOEPLITZ_BANDED | Structure.BUFFERED:
            assert isinstance(strategy, Toeplitz)
            K, below = strategy.noising_matrix(), np.tril(np.subtract.outer(np.arange(n), np.arange(n)))
            np.testing.assert_allclose(C, np.tril(strategy.toeplitz_coefficients()[below]), **same)
            np.testing.assert_allclose(K, np.tril(strategy.noising_coefficients()[below]), **same)
            if structure is Structure.TOEPLITZ:
                assert isinstance(strategy, Combination)
                for t in range(n):
                    rows, coefficients = strategy.terms(t).rows, strategy.terms(t).coefficients
                    np.testing.assert_array_equal(rows, np.arange(t, t - len(rows), -1))
                    expected = strategy.noising_coefficients()[: t + 1]
                    np.testing.assert_array_equal(coefficients.astype("f4"), expected[: len(rows)].astype("f4"))
                    assert not expected[len(rows) :].any()
        case Structure.BANDED:
            assert isinstance(strategy, Banded)
            for lag, band in enumerate(strategy.bands):
                np.testing.assert_array_equal(np.diagonal(C, -lag), band[: n - lag])
        case Structure.RESCALED:
            assert isinstance(strategy, Rescaled)
            np.testing.assert_allclose(C * strategy.scales, strategy.strategy.matrix(), **same)
        case Structure.RESTARTED:
            assert strategy.restart_period is not None
        case Structure.DENSE | Structure.LOW_RANK | Structure.TREE:
            pass  # whose sensitivities and roundings are made from the matrices themselves, or from the class
        case _:
            assert_never(structure)


@every_strategy
@every_size
def test_saved_and_loaded(name: str, n: int) -> None:
    strategy = STRATEGIES[name](n)
    loaded = from_dict(json.loads(json.dumps(strategy.to_dict())))
    assert loaded == strategy
    assert hash(loaded) == hash(strategy)
    assert strategy != STRATEGIES[name](n + 1)
    np.testing.assert_array_equal(loaded.noising_matrix(), strategy.noising_matrix())


@every_strategy
def test_terms_of_combinations_are_the_rows_of_the_noising_matrix(name: str) -> None:
    strategy = STRATEGIES[name](29)
    if isinstance(strategy, Combination):
        K = strategy.noising_matrix()
        for t in range(strategy.n):
            terms = strategy.terms(t)
            assert terms.rows.dtype == np.int64
            dense = np.zeros(strategy.num_rows)
            np.add.at(dense, terms.rows, terms.coefficients)
            np.testing.assert_allclose(dense, K[t], atol=1e-14)


@every_strategy
@pytest.mark.parametrize("size", [-1, 1.5, None])
def test_init_refuses_a_bad_size(name: str, size: object) -> None:
    with pytest.raises(ArgumentError, match="size"):
        STRATEGIES[name](5).init(size)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if STRATEGIES[name](6).restart_period is not None])
@every_size
def test_blocks_between_restarts_have_noise_of_their_own(name: str, n: int) -> None:
    strategy = STRATEGIES[name](n)
    assert strategy.restart_period is not None
    block = np.arange(n) // strategy.restart_period
    apart = block[:, None] != block
    assert not strategy.matrix()[apart].any()
    assert not strategy.noising_matrix()[apart].any()
