"""Any lower-triangular C, without structure: the optimum that structured strategies are measured against."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve_triangular

from anyorder import checks
from anyorder.checks import final, frozen
from anyorder.errors import ArgumentError
from anyorder.strategy._packing import pack, unpack
from anyorder.strategy.base import Combination, Terms

__all__ = ["Dense", "check_lower_triangular"]

Floats = NDArray[np.float64]


def check_lower_triangular(name: str, value: ArrayLike) -> Floats:
    """A square lower-triangular float64 matrix with a positive diagonal, copied and read-only."""
    C = checks.array(name, value, ndim=2)
    if C.shape[0] != C.shape[1]:
        raise ArgumentError(f"{name} must be square, got shape {C.shape}")
    if np.triu(C, 1).any():
        raise ArgumentError(
            f"{name} must be lower triangular, got {np.count_nonzero(np.triu(C, 1))} non-zero entries above the "
            f"diagonal; factor C^T C again (Cholesky of its reverse) or drop them with numpy.tril"
        )
    if (np.diag(C) <= 0).any():
        raise ArgumentError(f"{name} must have a positive diagonal, its smallest entry is {np.diag(C).min()!r}")
    return C


@final
class Dense(Combination):
    """C given in full [Denisov et al. 2022, section 3].

    A step regenerates t + 1 rows of Z: O(n^2 d) for a run. For small n, and as the yardstick of the structured
    strategies.

    Args:
        C: (n, n) lower triangular, positive diagonal.
    """

    def __init__(self, C: ArrayLike) -> None:
        self._C = check_lower_triangular("C", C)
        self._K: Floats = frozen(solve_triangular(self._C, np.eye(self.n), lower=True))

    @property
    def n(self) -> int:
        """Number of steps."""
        return len(self._C)

    def matrix(self) -> Floats:
        """C, read-only."""
        return self._C

    def noising_matrix(self) -> Floats:
        """C^-1, read-only."""
        return self._K

    def terms(self, t: int) -> Terms:
        """Rows 0 to t."""
        return Terms(np.arange(t + 1), self._K[t, : t + 1])

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "dense", "n": n, "lower": base64 of the lower triangle, row by row}."""
        return {"kind": "dense", "n": self.n, "lower": pack(self._C[np.tril_indices(self.n)])}

    @classmethod
    def _from_dict(cls, n: int, lower: str) -> "Dense":
        n = checks.integer("n", n, low=1)
        C = np.zeros((n, n))
        C[np.tril_indices(n)] = unpack("lower", lower, (n * (n + 1) // 2,))
        return cls(C)

    def __repr__(self) -> str:
        return f"Dense(n={self.n})"
