"""BLT: coefficients, inverse and errors in closed form against power series and reference values."""

import numpy as np
import pytest

from anyorder.errors import ArgumentError
from anyorder.strategy import BLT
from anyorder.strategy.toeplitz import inverse_series
from references import reference

CASES = [
    ([0.9, 0.5], [0.3, 0.1]),
    ([0.99999, 0.9, 0.3], [0.01, 0.2, 0.1]),
    ([0.7, 0.7], [0.2, 0.1]),  # equal decays
    ([1.0, 0.0], [0.1, 0.4]),
    ([0.6], [1.5]),
    ([0.5, -0.5], [0.3, -0.2]),
    ([0.9, -0.1], [0.5, -0.5]),  # the inverse has complex decays
]


def test_given_one() -> None:
    strategy = BLT([0.9, 0.5], [0.3, 0.1], 10)
    np.testing.assert_allclose(strategy.toeplitz_coefficients(), reference("blt_given_coefs_10"), rtol=1e-12)
    inverse, expected = strategy.inverse(), reference("blt_given_inverse")
    np.testing.assert_allclose(inverse.decays, expected["buf_decay"], rtol=1e-12)
    np.testing.assert_allclose(inverse.scales, expected["output_scale"], rtol=1e-12)
    assert strategy.last_prefix_variance() == pytest.approx(reference("blt_given_max_error_n10"), rel=1e-12)


def test_stream_has_the_reference_values() -> None:
    strategy = BLT([0.9, 0.5], [0.3, 0.1], 8)
    Z = np.sin(1 + np.arange(8)[:, None] + 2 * np.arange(2)).astype(np.float32)
    state, noise = strategy.init(2), []
    for t in range(8):
        made, state = strategy.step(t, state, lambda r: Z[r])
        noise.append(made)
    np.testing.assert_allclose(noise, reference("stream_blt_inverse_n8"), atol=1e-6)


@pytest.mark.parametrize(("decays", "scales"), CASES)
@pytest.mark.parametrize("n", [1, 2, 3, 50, 1000])
def test_closed_forms_equal_the_series(decays: list[float], scales: list[float], n: int) -> None:
    strategy = BLT(decays, scales, n)
    powers = np.power.outer(np.array(decays), np.arange(n - 1))
    c = np.append(1.0, np.array(scales) @ powers)[:n]
    np.testing.assert_allclose(strategy.toeplitz_coefficients(), c, rtol=1e-12, atol=1e-300)
    g = inverse_series(c, n)
    np.testing.assert_allclose(strategy.noising_coefficients(), g, atol=1e-11 * np.abs(g).max())
    variance = np.cumsum(np.cumsum(g) ** 2)
    np.testing.assert_allclose(strategy.prefix_variance(), variance, rtol=1e-10)
    assert strategy.last_prefix_variance() == pytest.approx(variance[-1], rel=1e-10)


@pytest.mark.parametrize("n", [256, 2048, 100_000])
def test_optima_of_the_reference(n: int) -> None:
    """Their parameters in our formulas: the error and sensitivity that they report, long runs included."""
    for buffers in {256: (1, 2, 3, 4), 2048: (3,), 100_000: (1, 5)}[n]:
        expected = reference(f"blt_opt_max_n{n}_buf{buffers}")
        strategy = BLT(expected["buf_decay"], expected["output_scale"], n)
        inverse = strategy.inverse()
        np.testing.assert_allclose(inverse.decays, expected["inv_buf_decay"], rtol=1e-8)
        g = strategy.noising_coefficients()
        assert strategy.last_prefix_variance() == pytest.approx(np.square(np.cumsum(g)).sum(), rel=1e-9)


def test_ten_million_steps() -> None:
    strategy = BLT([0.9999999, 0.999, 0.9], [0.0005, 0.01, 0.1], 10**7)
    half = BLT(strategy.decays, strategy.scales, 10**6)
    assert half.last_prefix_variance() == pytest.approx(half.prefix_variance()[-1], rel=1e-8)
    assert half.last_prefix_variance() < strategy.last_prefix_variance()


def test_a_decay_beside_one_is_not_one() -> None:
    """1 - 2e-8 is 1 in float32, whose numbers at 1e6 are 1/16 apart: 0.54 - 0.02 rounds down, 0.54 up."""
    strategy = BLT([1 - 2e-8], [0.0], 10)
    state = (np.full(1, 1e6, dtype=np.float32),)
    _, after = strategy.step(0, state, lambda r: np.full(1, 0.54, dtype=np.float32))
    assert after[0][0] == 1e6 + 0.5


def test_complex_inverse_is_refused_and_still_streams() -> None:
    strategy = BLT([0.9, -0.1], [0.5, -0.5], 20)
    with pytest.raises(ArgumentError, match="real decays"):
        strategy.inverse()
    np.testing.assert_allclose(strategy.noising_matrix() @ strategy.matrix(), np.eye(20), atol=1e-12)


@pytest.mark.parametrize(
    ("decays", "scales", "message"),
    [
        ([0.5], [0.1, 0.2], "equally many"),
        ([1.01], [0.1], r"\[-1, 1\]"),
        ([], [], "non-empty"),
        ([np.nan], [0.1], "finite"),
    ],
)
def test_refusals(decays: list[float], scales: list[float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        BLT(decays, scales, 10)


def test_what_a_step_rounds_is_the_loss_of_a_decay() -> None:
    """float32 has no number between 1 - 6e-8 and 1: a rounded decay would lose nothing, or twice as much."""
    for decay in (1 - 1e-9, 1 - 3e-8, 1 - 1e-4):
        blt = BLT([decay], [0.0], 3)
        _, (after,) = blt.step(1, (np.ones(1),), lambda _: np.zeros(1))  # type: ignore[arg-type,return-value]
        assert 1 - after[0] == pytest.approx(1 - decay, rel=1e-6)
