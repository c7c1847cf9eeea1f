"""What a strategy is: the matrix C of the release A G + std B Z = B (C G + std Z), as pure numbers."""

import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.checks import SetOnce
from anyorder.errors import ArgumentError, PlanError

Floats = NDArray[np.float64]

DENSE_STEPS = 4096  # up to which an n x n matrix is made in full: C, K, X = C^T C, or A where it is not Toeplitz

Vector = NDArray[np.float32]

Row = Callable[[int], Vector]
"""Row id r -> Z[r] over the coordinates in hand, float32. Pure: the same id gives the same numbers."""

State = tuple[Vector, ...]
"""Arrays over the coordinates in hand; never written in place once returned."""


@dataclass(frozen=True)
class Terms:
    """A row of the noising matrix as a short combination of rows of Z."""

    rows: NDArray[np.int64]
    coefficients: Floats


class Recurrence(NamedTuple):
    """A step from a small state x: the noise is h . x + g z, then x <- F x + G z; z is the step's row of Z, x_0 = 0.

    Attributes:
        F: (.., d, d).
        G: (.., d).
        h: (.., d).
        g: (..).
    """

    F: Floats
    G: Floats
    h: Floats
    g: Floats


class Strategy(SetOnce, ABC):
    """The matrix C (num_rows, n) of a factorisation A = B C, and how its noise is made step by step.

    Step t of n releases the gradient g_t + std * (K Z)[t], where K (n, num_rows) is the noising matrix and Z has
    num_rows rows of independent standard normals; K C = I. For square C, K = C^-1; a tree has more rows than
    columns, and K is one of its left inverses (the estimator). Row r of C is paired with row r of Z.

    A strategy holds float64 numbers only: no randomness, no torch. It is immutable, compares by value, and is
    saved by `to_dict`.
    """

    _steps_alike = False  # step t takes row t alone, and does what the step before does from a state of as many arrays

    @property
    @abstractmethod
    def n(self) -> int:
        """Number of steps."""

    @property
    def num_rows(self) -> int:
        """Number of rows of C and of Z."""
        return self.n

    @abstractmethod
    def matrix(self) -> Floats:
        """C, (num_rows, n) float64. For tests and small n: O(n num_rows) memory."""

    @abstractmethod
    def noising_matrix(self) -> Floats:
        """K, (n, num_rows) float64 with K C = I. For tests and small n."""

    def init(self, size: int) -> State:
        """The state before step 0, for `size` coordinates; empty, unless a strategy begins with one."""
        checks.integer("size", size, low=0)
        return ()

    @abstractmethod
    def step(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        """The noise (K Z)[t] and the state after step t.

        Args:
            t: step, 0 <= t < n; steps are taken in order.
            state: what `init` or the step before returned; it is not written.
            row: gives Z[r] by row id; it may be asked for any row, any number of times.
        Returns: float32 noise of shape (size,), a fresh array, and the next state.
        """

    @property
    @abstractmethod
    def state_rows(self) -> int:
        """Number of vectors of the size of the model that the state holds at most."""

    def recurrence(self, t: int) -> Recurrence:
        """Step t as a recurrence: F (d, d), G (d,), h (d,), g ().

        Raises: PlanError for a strategy that is a combination of rows and no recurrence: see `Combination.terms`.
        """
        t = checks.integer("t", t, low=0, high=self.n - 1)
        return Recurrence(*(part[0] for part in self.recurrences(np.array([t]))))

    def recurrences(self, steps: NDArray[np.int64]) -> Recurrence:
        """The recurrences of (k,) steps, arrays with a first axis of length k: the one statement of them."""
        raise PlanError(f"{self!r} has no recurrence of a small state: its noise is a combination of rows, see `terms`")

    @property
    def restart_period(self) -> int | None:
        """The s with C block-diagonal in blocks of s steps, the last perhaps shorter; None where none is known.

        The noise of a block's steps is then independent of all other blocks': none of it cancels later.
        """
        return None

    def describe(self) -> str:
        """Return a phrase for people."""
        return repr(self)

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `strategy.registry.from_dict` makes an equal strategy; "kind" names the class."""

    def prefix_variance(self) -> Floats:
        """(n,) variance of the noise in each prefix sum of the gradients, unit-variance rows of Z.

        variance[t] = || sum_{s <= t} K[s] ||^2
        """
        prefix: Floats = np.cumsum(self.noising_matrix(), axis=0)
        variance: Floats = np.square(prefix).sum(axis=1)
        return variance

    def columns(self, steps: ArrayLike) -> Floats:
        """C[:, steps], (num_rows, len(steps)): what one unit that takes part in these steps adds to C G."""
        return np.asarray(self.matrix()[:, np.asarray(steps)])

    def column_norms_squared(self) -> Floats:
        """(n,) squared norms of the columns of C, the diagonal of X = C^T C."""
        return np.asarray(np.square(self.matrix()).sum(axis=0))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n={self.n})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((type(self), self.n))


class Combination(Strategy):
    """A strategy whose noise is, at every step, a short combination of rows of Z: nothing is kept between steps."""

    @abstractmethod
    def terms(self, t: int) -> Terms:
        """Row t of K as row ids of Z and their coefficients."""

    def step(self, t: int, state: State, row: Row) -> tuple[Vector, State]:
        """The combination of regenerated rows, in the order of `terms`."""
        terms = self.terms(t)
        noise = row(int(terms.rows[0])) * np.float32(terms.coefficients[0])
        for r, coefficient in zip(terms.rows[1:], terms.coefficients[1:], strict=True):
            noise += row(int(r)) * np.float32(coefficient)
        return noise, state

    @property
    def state_rows(self) -> int:
        """Nothing is kept."""
        return 0

    def noising_matrix(self) -> Floats:
        """K, filled from the terms of each step."""
        K = np.zeros((self.n, self.num_rows))
        for t in range(self.n):
            terms = self.terms(t)
            np.add.at(K[t], terms.rows, terms.coefficients)
        return K


# -- arrays ----------------------------------------------------------------------------------------------------------

# Large arrays in JSON: base64 of little-endian float64, bit-exact.


def pack(values: NDArray[np.float64]) -> str:
    """The values in C order as text."""
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f8").tobytes()).decode()


def unpack(name: str, text: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """The array of the given shape that `pack` wrote."""
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f8")
        return flat.astype(np.float64).reshape(shape)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ArgumentError(f"{name} must be base64 text of {shape} float64 numbers: {error}") from error


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
