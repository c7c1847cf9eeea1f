"""C^-1 is Toeplitz with p bands: every step's noise is a combination of the last p rows of Z."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.patterns import Participation
from anyorder.strategy.base import Combination, Recurrence, Terms
from anyorder.strategy.fitting import Valued
from anyorder.strategy.toeplitz import (
    Problem,
    Toeplitz,
    _padded,
    accurate_inverse_series,
    check_series,
    delays,
    fit_all,
    inverse_series,
    reciprocal,
    repeated,
    square_root_series,
)
from anyorder.workload import Workload

Floats = NDArray[np.float64]


@final
class BandedInverse(Toeplitz, Combination):
    """(C^-1)[i, j] = g_{i-j} for i - j < p, else 0; C is full.

    Noise g_0 z_t + .. + g_{p-1} z_{t-p+1}, O(p d) a step, nothing kept between steps [Kalinin et al. 2025].

    Args:
        coefficients: (p,) g_0 > 0, .., g_{p-1}; p <= n.
        n: number of steps.
    """

    def __init__(self, coefficients: ArrayLike, n: int) -> None:
        super().__init__(n)
        self.coefficients = check_series("coefficients", coefficients, self.n)

    @classmethod
    def from_square_root(cls, workload: Workload, num_bands: int) -> "BandedInverse":
        """BISR: the first num_bands coefficients of the inverse square root of a Toeplitz workload.

        For the prefix sum g_k = g_{k-1} (1 - 3/(2k)).                              [Kalinin et al. 2025, BISR]
        """
        num_bands = checks.integer("num_bands", num_bands, low=1, high=workload.n)
        inverse = inverse_series(workload.toeplitz_coefficients()[:num_bands], num_bands)
        return cls(square_root_series(inverse, num_bands), workload.n)

    @property
    def num_bands(self) -> int:
        """Number of coefficients p."""
        return len(self.coefficients)

    def toeplitz_coefficients(self, m: int | None = None) -> Floats:
        """(m,) coefficients of 1 / g, each right to a few units in its last place."""
        return accurate_inverse_series(self.coefficients, self.n if m is None else m)

    def noising_coefficients(self, m: int | None = None) -> Floats:
        """(m,) g_0, .., g_{p-1}, 0, .."""
        return _padded(self.coefficients, self.n if m is None else m)

    def terms(self, t: int) -> Terms:
        """Rows t, t - 1, .., t - p + 1."""
        count = min(t + 1, self.num_bands)
        return Terms(np.arange(t, t - count, -1), self.coefficients[:count])

    def recurrences(self, steps: NDArray[np.int64]) -> Recurrence:
        """State: the last p - 1 rows of Z, newest first."""
        F, G = delays(self.num_bands - 1)
        return repeated(F, G, self.coefficients[1:], self.coefficients[0], len(steps))

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "banded_inverse", "coefficients": [..], "n": n}."""
        return {"kind": "banded_inverse", "coefficients": self.coefficients.tolist(), "n": self.n}

    def __repr__(self) -> str:
        return f"BandedInverse(num_bands={self.num_bands}, n={self.n})"


# -- fit -------------------------------------------------------------------------------------------------------------


def fit_banded_inverse(problem: Problem, bands: int) -> BandedInverse:
    """The C of banded Toeplitz inverse of least loss: from the inverse square root, and from half the bands."""
    return fits_banded_inverse(problem, [bands])[0]


def fit(workload: Workload, participation: Participation, objective: str, bands: int) -> BandedInverse:
    """`fit_banded_inverse` to a workload."""
    return fit_banded_inverse(Problem(workload, participation, objective), bands)


def fits_banded_inverse(problem: Problem, sizes: Sequence[int]) -> list[BandedInverse]:
    """`fit_banded_inverse` for many sizes, each fit made once."""

    def loss(stiffness: float, free: Floats) -> Valued:
        d = np.concatenate([[1.0], free])
        sens, g_sens = reciprocal(d, problem.n, lambda c: problem.sens(c, stiffness))
        error, g_error = problem.error(d)
        return error * sens, (g_error * sens + error * g_sens)[1:]

    return fit_all(problem, sizes, loss, BandedInverse, inverse=True)
