"""Scales: C diag(s)^-1 on top of any strategy."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from anyorder.errors import ArgumentError
from anyorder.strategy import BLT, Independent, SquareRoot, Strategy, ToeplitzBanded, Tree
from anyorder.strategy.registry import from_dict
from anyorder.strategy.rescaled import Rescaled

INNER: list[Callable[[int], Strategy]] = [
    Independent,
    SquareRoot,
    lambda n: ToeplitzBanded([1.0, 0.5, -0.2], n),
    lambda n: BLT([0.9, 0.2], [0.3, 0.2], n),
    lambda n: Tree(n, "online"),
]


@pytest.mark.parametrize("make", INNER)
def test_equals_dense(make: Callable[[int], Strategy]) -> None:
    n = 13
    scales = np.linspace(0.5, 2, n)
    inner = make(n)
    strategy = Rescaled(inner, scales)
    np.testing.assert_allclose(strategy.matrix(), inner.matrix() @ np.diag(1 / scales), rtol=1e-14)
    np.testing.assert_allclose(strategy.noising_matrix(), np.diag(scales) @ inner.noising_matrix(), rtol=1e-14)
    assert (strategy.num_rows, strategy.state_rows) == (inner.num_rows, inner.state_rows)
    assert from_dict(json.loads(json.dumps(strategy.to_dict()))) == strategy
    assert strategy != Rescaled(inner, scales[::-1])
    twice = Rescaled(strategy, 1 / scales)
    np.testing.assert_allclose(twice.matrix(), inner.matrix(), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("scales", [[1.0, 1.0], [1.0, 0.0, 1.0], [1.0, -1.0, 1.0], [1.0, np.inf, 1.0], [[1.0] * 3]])
def test_refusals(scales: object) -> None:
    with pytest.raises(ArgumentError, match="scales"):
        Rescaled(Independent(3), scales)  # type: ignore[arg-type]
