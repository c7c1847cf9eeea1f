"""A workload that is given by its matrix."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.workload.base import Workload, pack

__all__ = ["GivenWorkload"]

Floats = NDArray[np.float64]


@final
class GivenWorkload(Workload):
    """Any lower-triangular workload, given by its matrix; made by `custom`. O(n^2) memory."""

    def __init__(self, entries: ArrayLike, *, weights: ArrayLike | None = None) -> None:
        self.entries = checks.array("matrix", entries, ndim=2)
        if self.entries.shape[0] != self.entries.shape[1] or np.triu(self.entries, 1).any():
            raise ArgumentError(f"matrix must be square and lower triangular, got shape {self.entries.shape}")
        if not self.entries.any():
            raise ArgumentError("matrix must have an entry that is not 0, got only zeros")
        super().__init__(len(self.entries), weights=weights)

    def apply(self, rows: Floats) -> Floats:
        """diag(weights) A @ rows: O(n^2 m)."""
        rows = np.asarray(rows, dtype=np.float64)
        result: Floats = (self.weights[:, None] * self.entries) @ rows
        return result

    def apply_transposed(self, rows: Floats) -> Floats:
        """(diag(weights) A)^T @ rows: O(n^2 m)."""
        result: Floats = (self.weights[:, None] * self.entries).T @ np.asarray(rows, dtype=np.float64)
        return result

    @property
    def is_prefix_sum(self) -> bool:
        """True if A is all ones on and below the diagonal."""
        return bool((self.matrix() == np.tri(self.n)).all())

    @property
    def is_toeplitz(self) -> bool:
        """True if every diagonal of A is constant."""
        A = self.matrix()
        return bool((A[1:, 1:] == A[:-1, :-1]).all())

    def toeplitz_coefficients(self) -> Floats:
        """First column of a Toeplitz A, (n,).

        Raises: ArgumentError where A is not Toeplitz.
        """
        if not self.is_toeplitz:
            raise ArgumentError(f"toeplitz_coefficients needs a matrix of constant diagonals, got {self!r}")
        return np.array(self.matrix()[:, 0])

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `from_dict` makes an equal workload."""
        columns = np.tril_indices(self.n)
        result: dict[str, Any] = {"kind": "custom", "n": self.n, "entries": pack(self.entries[columns])}
        if (self.weights != 1).any():
            result["weights"] = pack(self.weights)
        return result

    def __repr__(self) -> str:
        return f"Custom(n={self.n})"
