"""Rows of features within public bounds: how they are cut, where the intercept is, and the way back."""

from dataclasses import dataclass
from math import hypot, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from anyorder import _check
from anyorder._closed import final, frozen
from anyorder.errors import ArgumentError

__all__ = ["Linear", "RowBound", "box"]

Floats = NDArray[np.float64]

_MISSING = (
    "bounds must be given, and from what is public, not from these data: the L2 norm to which each row of features is "
    "cut, or (low, high), the least and largest value of each feature. Bounds that are found in the data tell of its "
    "outliers, and no noise here would cover that"
)


class Linear(NamedTuple):
    """A linear model in the user's own features.

    Attributes:
        coef: (outputs, d).
        intercept: (outputs,).
    """

    coef: Floats
    intercept: Floats


class _Box(NamedTuple):
    """Features in [low, high], and the map (x - centre) slope to [-1, 1]: to 0 for one that is constant."""

    low: Floats
    high: Floats
    centre: Floats
    slope: Floats

    @classmethod
    def of(cls, low: Floats, high: Floats) -> "_Box":
        half = high / 2 - low / 2
        slope = np.divide(1.0, half, out=np.zeros_like(half), where=half > 0)
        return cls(low, high, low / 2 + high / 2, slope)


@final
@dataclass(frozen=True, eq=False)
class RowBound:
    """What a learner is given of each row x of d features: a vector of norm at most `norm`, whatever x is.

        a number R      ( x min(1, R / ||x||),  s R )
        (low, high)     ( (2 clip(x, low, high) - low - high) / (high - low),  s sqrt(d) )

    The last element is the intercept's, s = `scaling`; without an intercept there is none. Each row is made by itself,
    and nothing of other rows is in it. A row with NaN keeps it, for the learner to take for zero.

    Attributes:
        d: number of features.
        limit: R, or sqrt(d).
        box: of the features, or None.
        constant: the intercept's element, 0 for none.
    """

    d: int
    limit: float
    box: _Box | None
    constant: float

    @classmethod
    def of(cls, bounds: Any, d: int, *, intercept: bool, scaling: float) -> "RowBound":
        """Raises: ArgumentError for bounds that are none, and where there are none."""
        if bounds is None:
            raise ArgumentError(_MISSING)
        if isinstance(bounds, (tuple, list, np.ndarray)):
            within, limit = _Box.of(*box(bounds, d)), sqrt(d)
        else:
            within, limit = None, _check.positive("bounds", bounds)
        constant = _check.positive("intercept_scaling", scaling) * limit if intercept else 0.0
        return cls(d, limit, within, constant)

    @property
    def norm(self) -> float:
        """Bound on the norm of a whole row."""
        return hypot(self.limit, self.constant)

    @property
    def width(self) -> int:
        """Elements of a whole row."""
        return self.d + (self.constant > 0)

    def check_sparse(self) -> None:
        """Raise ArgumentError where zeros of sparse rows would not stay zeros."""
        if self.box is not None and self.box.centre.any():
            raise ArgumentError(
                "bounds must be a number, or low must be -high, where X is sparse: features are mapped from "
                "[low, high] to [-1, 1], which would make every zero another number"
            )

    def prepare(self, X: Any) -> Any:
        """(m, width): the rows for a learner, dense or sparse as they came."""
        with np.errstate(all="ignore"):
            if sparse.issparse(X):
                return self._sparse(X)
            made = np.empty((X.shape[0], self.width))
            made[:, self.d :] = self.constant
            rows = made[:, : self.d]
            if self.box is None:
                rows[:] = X
                rows *= _factors(self.limit, np.einsum("ij,ij->i", rows, rows))[:, None]
            else:
                np.clip(X, self.box.low, self.box.high, out=rows)
                rows -= self.box.centre
                rows *= self.box.slope
        return made

    def _sparse(self, X: Any) -> Any:
        rows = sparse.csr_array(X, dtype=np.float64, copy=True)
        rows.sum_duplicates()
        m, places = rows.shape[0], rows.indices
        if self.box is None:
            of = np.repeat(np.arange(m), np.diff(rows.indptr))
            squares = np.bincount(of, np.square(rows.data), m).astype(np.float64)
            rows.data *= _factors(self.limit, squares)[of]
        else:
            rows.data = np.clip(rows.data, self.box.low[places], self.box.high[places]) * self.box.slope[places]
        if not self.constant:
            return rows
        return sparse.csr_array(sparse.hstack([rows, np.full((m, 1), self.constant)], format="csr"))

    def back(self, theta: Floats) -> Linear:
        """The model theta (width, outputs) on prepared rows as one on rows within their bounds."""
        weights = theta[: self.d]
        intercept = self.constant * theta[self.d] if self.constant else np.zeros(theta.shape[1])
        if self.box is not None:
            weights = weights * self.box.slope[:, None]
            intercept = intercept - self.box.centre @ weights
        return Linear(np.ascontiguousarray(weights.T), np.array(intercept))


def box(bounds: Any, d: int) -> tuple[Floats, Floats]:
    """(low, high), each (d,). Raises: ArgumentError unless they are bounds of d features."""
    if len(bounds) != 2:
        raise ArgumentError(
            f"bounds must be a number, the L2 norm of a row, or (low, high), each a number or {d} of them, got "
            f"{len(bounds)} elements"
        )
    low, high = (_side(name, side, d) for name, side in zip(("low", "high"), bounds, strict=True))
    if (low > high).any():
        raise ArgumentError(
            "bounds must have low at most high for every feature, and be (all lows, all highs): not one pair for each"
        )
    if (low == high).all():
        raise ArgumentError(
            "bounds must leave room between low and high for one feature at least, and be (all lows, all highs): not "
            "one pair for each feature"
        )
    return low, high


def _side(name: str, side: Any, d: int) -> Floats:
    given = np.asarray(_check.plain(side))
    if given.dtype.kind not in "iuf" or given.shape not in ((), (d,)) or not np.isfinite(given).all():
        raise ArgumentError(
            f"{name} of bounds must be a finite number, or one for each of the {d} features, got {given.dtype} of "
            f"shape {given.shape}"
        )
    return frozen(np.broadcast_to(given, (d,)).astype(np.float64))


def _factors(limit: float, squares: Floats) -> Floats:
    return np.asarray(np.minimum(1.0, limit / np.sqrt(squares)))
