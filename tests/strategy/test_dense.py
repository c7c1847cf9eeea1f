"""Dense C: refusals, and bit-exact JSON."""

import json

import numpy as np
import pytest

from anyorder.errors import ArgumentError
from anyorder.strategy import Dense
from anyorder.strategy.registry import from_dict


def test_streams_the_inverse() -> None:
    strategy = Dense([[2.0, 0.0], [1.0, 4.0]])
    np.testing.assert_array_equal(strategy.noising_matrix(), [[0.5, 0.0], [-0.125, 0.25]])
    np.testing.assert_array_equal(strategy.terms(1).rows, [0, 1])
    np.testing.assert_array_equal(strategy.prefix_variance(), [0.25, 0.375**2 + 0.25**2])


def test_what_was_given_is_copied() -> None:
    given = np.eye(3)
    strategy = Dense(given)
    given[0, 0] = 5.0
    assert strategy.matrix()[0, 0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        strategy.matrix()[0, 0] = 5.0


def test_json_is_exact() -> None:
    C = np.tril(np.random.default_rng(0).standard_normal((5, 5))) + 4 * np.eye(5)
    loaded = from_dict(json.loads(json.dumps(Dense(C).to_dict())))
    assert np.array_equal(loaded.matrix(), C)


@pytest.mark.parametrize(
    ("C", "message"),
    [
        (np.ones((2, 3)), "square"),
        ([[1.0, 0.5], [0.0, 1.0]], "lower triangular, got 1 non-zero"),
        ([[1.0, 0.0], [1.0, 0.0]], "positive diagonal"),
        ([[1.0, 0.0], [np.nan, 1.0]], "finite"),
        ([1.0, 2.0], "2 dimension"),
    ],
)
def test_refusals(C: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Dense(C)  # type: ignore[arg-type]


@pytest.mark.parametrize("lower", ["", "AAAA", "not base64!", 3])
def test_malformed_json_is_refused(lower: object) -> None:
    with pytest.raises(ArgumentError, match="lower"):
        from_dict({"kind": "dense", "n": 2, "lower": lower})
