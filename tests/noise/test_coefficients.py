"""The polynomials of the transform: found again by Remez exchange, and as good as stated beside them."""

import numpy as np
import pytest

from anyorder.noise import normals
from noise.minimax import evaluate, minimax


def _log_rest(f):
    """(-2 ln(1 + f) + 2 f - f^2) / f^3, by its series near 0."""
    series = sum(-2 * (-1.0) ** (k + 1) / k * f ** (k - 3) for k in range(3, 20))
    g = np.where(np.abs(f) < 0.02, 1.0, f)
    return np.where(np.abs(f) < 0.02, series, (-2 * np.log1p(g) + 2 * g - g * g) / g**3)


def _log_weight(f):
    """The error of the rest, relative to -2 ln(1 + f)."""
    g = np.where(f == 0, 1.0, f)
    return np.where(f == 0, 0.0, np.abs(g**3 / (2 * np.log1p(g)))) + 1e-15


def _sine(z):
    return np.sinc(np.sqrt(z) / 4) * np.pi / 4


def _cosine_rest(z):
    """(cos(pi y / 4) - 1) / y^2 at z = y^2."""
    return -2 * (np.sinc(np.sqrt(z) / 8) * np.pi / 8) ** 2


CASES = {
    "log": (normals.LOG, _log_rest, _log_weight, (np.sqrt(0.5) - 1, np.sqrt(2.0) - 1), 3.5e-8),
    "sine": (normals.SIN, _sine, lambda z: 1 / _sine(z), (0.0, 1.0), 3.5e-8),
    "cosine": (normals.COS[1:], _cosine_rest, lambda z: z + 1e-15, (0.0, 1.0), 4.8e-8),
}


@pytest.mark.parametrize("name", CASES)
def test_stored_polynomials_have_the_stated_error(name):
    stored, target, weight, (low, high), stated = CASES[name]
    powers = range(len(stored))
    x = np.linspace(low, high, 200_001)
    error = np.abs(weight(x) * (target(x) - evaluate(np.float32(stored), powers, x))).max()
    best, least = minimax(target, weight, powers, low, high)
    assert 0.97 * stated < error <= stated
    assert least <= error
    np.testing.assert_allclose(np.float32(stored), best, rtol=1e-5)


def test_constants_are_float32_and_the_parts_of_ln_2_add_up():
    for c in (*normals.LOG, *normals.SIN, *normals.COS):
        assert str(np.float32(c)) == repr(c)  # the literal reads the same as a float32 literal in C
    assert normals.COS[0] == 1
    assert float(np.float32(normals.TWO_LN2_LOW)) == pytest.approx(-2 * np.log(2) - normals.TWO_LN2_HIGH, abs=3e-11)
    exponents = np.arange(97)
    assert (np.float32(normals.TWO_LN2_HIGH) * np.float32(exponents) == normals.TWO_LN2_HIGH * exponents).all()
