"""C forward as a stream: what was released, row by row, as rows of C G plus white noise."""

from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from anyorder.errors import ArgumentError, PlanError
from anyorder.strategy import Strategy
from anyorder.strategy.base import Combination
from anyorder.strategy.dense import Dense
from anyorder.strategy.kinds import Structure, kind_of
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.tree import Tree

__all__ = ["DENSE_STEPS", "Forward", "as_released", "forward", "whitener"]

Floats = NDArray[np.float64]

DENSE_STEPS = 4096
"""Steps up to which a matrix over pairs of them is made."""


class Forward(Protocol):
    """C y for y that come row by row, many columns at once."""

    def push(self, y: Floats) -> list[Floats]:
        """Take row t of y, (m,); the rows of C y that no later row of y enters, each (m,), each once."""


def forward(strategy: Strategy) -> Forward:
    """C forward, by the strategy's own statement of K = C^-1.

    A recurrence (noise = h . x + g z, x <- F x + G z) is solved for z: z = (y - h . x) / g. Combinations of rows give z
    by forward substitution. The rows of a tree are sums over the steps below a node, and end with it.

    Cost: a column of y needs the memory of the strategy's own state (a few numbers; of dense forms n), and a step the
    time of one coordinate of its noise.
    """
    structure = kind_of(strategy).structure
    match structure:
        case Structure.IDENTITY | Structure.TOEPLITZ | Structure.DENSE:
            assert isinstance(strategy, Combination)
            return _Substitution(strategy)
        case (
            Structure.TOEPLITZ_BANDED
            | Structure.BUFFERED
            | Structure.BANDED
            | Structure.LOW_RANK
            | Structure.RESTARTED
        ):  # fmt: skip
            return _Recurrence(strategy)
        case Structure.RESCALED:
            assert type(strategy) is Rescaled
            return _Scaled(strategy)
        case Structure.TREE:
            return _Nodes(strategy)
        case _:
            assert_never(structure)


def as_released(strategy: Strategy) -> Strategy:
    """The square mechanism whose noise has the law of what is released; the strategy itself where that is so already.

    The estimators "vanilla" and "online" of a tree throw away what they know of its nodes: K is not the pseudoinverse
    of C. With K K^T = L L^T what they release is, in law, the mechanism of C = L^-1, and

        || L^-1 pi ||^2 = pi^T (K K^T)^-1 pi <= || C pi ||^2

    is all that anybody can see of a unit in the steps pi. The best score of such a release whitens with L^-1.

    Raises: PlanError for such a tree of more than 4096 steps.
    Cost: O(n^3) where a matrix is made.
    """
    tree = strategy.strategy if type(strategy) is Rescaled else strategy
    if type(tree) is not Tree or tree.estimator == "full":
        return strategy
    if strategy.n > DENSE_STEPS:
        raise PlanError(
            f"the law of {tree.estimator!r} estimates of a tree is a dense matrix over pairs of steps: n must be at "
            f"most {DENSE_STEPS}, got {strategy.n}; score against the tree itself, or plan with estimator='full'"
        )
    return Dense(np.tril(whitener(strategy)))


def whitener(strategy: Strategy) -> Floats:
    """A with A K Z white, (n, n) lower triangular: the inverse L^-1 of the Cholesky factor, K K^T = L L^T.

    For square C with a positive diagonal that is C itself; for a tree, whatever its estimator, it takes what the noise
    of its steps has in common out of them.

    Cost: O(n^2 num_rows).
    Raises: ArgumentError beyond 4096 steps.
    """
    n = strategy.n
    if n > DENSE_STEPS:
        raise ArgumentError(f"the law of noise is tested for at most {DENSE_STEPS} steps, got {n}: audit a short run")
    K = strategy.noising_matrix()
    return np.asarray(solve_triangular(np.linalg.cholesky(K @ K.T), np.eye(n), lower=True))


class _Substitution:
    """z_t = (y_t - sum_{s < t} K[t, s] z_s) / K[t, t], with as many rows z kept as a step combines."""

    def __init__(self, strategy: Combination) -> None:
        self._strategy, self._t = strategy, 0
        self._length = len(strategy.terms(strategy.n - 1).rows)
        self._kept = np.zeros((0, 0))

    def push(self, y: Floats) -> list[Floats]:
        if not self._t:
            self._kept = np.zeros((self._length, len(y)))
        terms = self._strategy.terms(self._t)
        weights = np.zeros(self._length)
        weights[terms.rows % self._length] = terms.coefficients
        own = self._t % self._length
        diagonal, weights[own] = weights[own], 0.0
        z = (y - weights @ self._kept) / diagonal
        self._kept[own] = z
        self._t += 1
        return [z]


class _Recurrence:
    """z = (y - h . x) / g, then x <- F x + G z."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self._t = strategy, 0
        self._state = np.zeros((0, 0))

    def push(self, y: Floats) -> list[Floats]:
        F, G, h, g = self._strategy.recurrence(self._t)
        if not self._t:
            self._state = np.zeros((len(G), len(y)))
        z = (y - h @ self._state) / g
        self._state = F @ self._state + np.outer(G, z)
        self._t += 1
        return [z]


class _Scaled:
    """C diag(scales)^-1 y."""

    def __init__(self, strategy: Rescaled) -> None:
        self._inner, self._scales, self._t = forward(strategy.strategy), strategy.scales, 0

    def push(self, y: Floats) -> list[Floats]:
        self._t += 1
        return self._inner.push(y / self._scales[self._t - 1])


class _Nodes:
    """Rows of C that cover runs of steps: a row is open from its first step to its last, about log2 n at a time."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self._t = strategy, 0
        self._open: dict[int, Floats] = {}
        self._now = self._column(0)

    def push(self, y: Floats) -> list[Floats]:
        for row, coefficient in self._now.items():
            self._open[row] = self._open.get(row, 0.0) + coefficient * y
        self._t += 1
        self._now = self._column(self._t)
        return [self._open.pop(row) for row in [*self._open] if row not in self._now]

    def _column(self, t: int) -> dict[int, float]:
        """Row -> entry, of column t of C; none after the last."""
        if t == self._strategy.n:
            return {}
        column = self._strategy.columns(np.array([t]))[:, 0]
        rows = np.flatnonzero(column)
        return dict(zip(rows.tolist(), column[rows].tolist(), strict=True))
