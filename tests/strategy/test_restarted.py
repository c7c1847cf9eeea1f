"""RestartedBLT: its blocks by their definition, and what it refuses."""

import numpy as np
import pytest
from scipy.linalg import toeplitz

from anyorder.errors import ArgumentError
from anyorder.strategy import BLT
from anyorder.strategy.restarted_blt import RestartedBLT

GOOD = {
    "decays": [[0.9, 0.2], [0.8, 0.3]], "scales": [[0.3, 0.4], [0.1, 0.2]], "totals": [1.5, 0.0], "shares": [2.0, 0.5],
    "n": 11, "steps_per_epoch": 6,
}  # fmt: skip


def test_gram_matrix_is_a_normalised_blt_and_a_total() -> None:
    strategy = RestartedBLT(**GOOD)
    C = strategy.matrix()
    X = C.T @ C
    np.testing.assert_array_equal(C[6:, :6], 0)
    for e, steps in enumerate((slice(0, 6), slice(6, 11))):
        n = steps.stop - steps.start
        c = BLT(strategy.decays[e], strategy.scales[e], n).toeplitz_coefficients()
        T = toeplitz(c, np.zeros(n))
        expected = T.T @ T + strategy.totals[e] ** 2
        d = np.sqrt(np.diag(expected))
        np.testing.assert_allclose(X[steps, steps], strategy.shares[e] ** 2 * expected / np.outer(d, d), rtol=1e-12)


def test_a_heavy_total_leaves_little_noise_in_it() -> None:
    light, heavy = (RestartedBLT([[0.9]], [[0.3]], [w], [1.0], 50, 50).prefix_variance() for w in (0.0, 10.0))
    assert heavy[-1] < 0.2 * light[-1]
    assert heavy[-1] == pytest.approx(1.0, rel=0.1)  # the sum alone would have variance 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 13}, "each of the 3 epochs"),
        ({"shares": [1.0]}, r"got \[1, 2\] rows"),
        ({"shares": [1.0, 0.0]}, "shares above 0"),
        ({"totals": [1.0, -0.1]}, "totals must be at least 0"),
        ({"decays": [[0.9, 1.1]] * 2}, "decays must lie in"),
        ({"scales": [[0.9]] * 2}, "equally many"),
        ({"steps_per_epoch": 0}, "steps_per_epoch"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RestartedBLT(**{**GOOD, **change})
