"""Rows of features within public bounds: how they are clipped, where the intercept is, and the way back."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from math import hypot, sqrt
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.validation import validate_data

from anyorder import checks
from anyorder.checks import final, frozen
from anyorder.errors import ArgumentError
from anyorder.ledger import Units, as_units, numbered

Floats = NDArray[np.float64]

_MISSING = (
    "bounds must be given, and from what is public, not from these data: the L2 norm to which each row of features is "
    "clipped, or (low, high), the least and largest value of each feature. Bounds that are found in the data tell of "
    "its outliers, and no noise here would cover that"
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
            within, limit = None, checks.positive("bounds", bounds)
        constant = checks.positive("intercept_scaling", scaling) * limit if intercept else 0.0
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

    def clipped(self, X: Any) -> Any:
        """(m, d): the rows within their bounds, in their own units, dense or sparse as they came."""
        if self.box is None:
            return self.prepare(X)[:, : self.d]
        if not sparse.issparse(X):
            return np.clip(X, self.box.low, self.box.high)
        rows = sparse.csr_array(X, dtype=np.float64, copy=True)
        rows.sum_duplicates()
        rows.data = np.clip(rows.data, self.box.low[rows.indices], self.box.high[rows.indices])
        return rows

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
            "bounds must leave a gap between low and high for one feature at least, and be (all lows, all highs): not "
            "one pair for each feature"
        )
    return low, high


def _side(name: str, side: Any, d: int) -> Floats:
    given = np.asarray(checks.plain(side))
    if given.dtype.kind not in "iuf" or given.shape not in ((), (d,)) or not np.isfinite(given).all():
        raise ArgumentError(
            f"{name} of bounds must be a finite number, or one for each of the {d} features, got {given.dtype} of "
            f"shape {given.shape}"
        )
    return frozen(np.broadcast_to(given, (d,)).astype(np.float64))


def _factors(limit: float, squares: Floats) -> Floats:
    return np.asarray(np.minimum(1.0, limit / np.sqrt(squares)))


# ----------------------------------------------------------------------------------------------------
# What scikit-learn's callers hand in, checked by shape and type alone: no cell of a row is an error or a warning.


class Key(bytes):
    """A noise key, which no repr shows: of an estimator, a pipeline around it, or a log of either."""

    def __repr__(self) -> str:
        return "<32 secret bytes>"


def plain_key(key: Any) -> Any:
    """For noise and checkpoints."""
    return bytes(key) if isinstance(key, Key) else key


def read_rows(estimator: Any, X: Any, *, reset: bool, finite: bool) -> Any:
    """(m, d) numbers, an array or a CSR one; the estimator has, or is held to, names and number of features.

    Args:
        reset: whether the estimator is to take names and number of features from X.
        finite: refuse NaN and infinities: for what is asked of a fitted model, never for what it learns from.
    Raises: ArgumentError, or ValueError as scikit-learn says it.
    """
    if hasattr(X, "columns") and any(getattr(dtype, "kind", "O") in "cmM" for dtype in X.dtypes):
        raise ArgumentError("X must have columns of numbers, and one has a dtype of times or complex numbers")
    rows = X if sparse.issparse(X) else _numbers("X", X)
    rows = check_array(rows, accept_sparse="csr", ensure_all_finite=False, estimator=type(estimator).__name__)
    validate_data(estimator, X, reset=reset, skip_check_array=True)
    if finite and not np.isfinite(rows.data if sparse.issparse(rows) else rows).all():
        raise ArgumentError("X must be finite to be predicted from: it has NaN or infinity in some row")
    return rows


def contents_of(rows: Any, targets: NDArray[Any]) -> Iterator[bytes]:
    """What each row is, with its target, as bytes: to tell whether it is another."""
    labels = np.ascontiguousarray(targets)
    for i, label in enumerate(labels):
        if isinstance(rows, np.ndarray):
            yield rows[i].tobytes() + label.tobytes()
        else:
            own = slice(rows.indptr[i], rows.indptr[i + 1])
            yield rows.indices[own].astype(np.int64).tobytes() + rows.data[own].tobytes() + label.tobytes()


def read_targets(y: Any, X: Any) -> NDArray[Any]:
    """(m,) labels or numbers, one for each row of X."""
    if y is None:
        raise ArgumentError("this learner requires y to be passed, but the target y is None")
    targets = column_or_1d(_array(y) if hasattr(y, "dtype") else _objects(y), warn=True)
    check_consistent_length(X, targets)
    return np.asarray(targets)


def numbers_of(y: NDArray[Any]) -> NDArray[np.float64]:
    """Targets of a regression; NaN for one that is no number."""
    with np.errstate(all="ignore"):  # of wider floats, and of NaN that signals
        return np.asarray(_numbers("y", y) + 0.0, dtype=np.float64)


def _numbers(name: str, given: Any) -> Any:
    """As it came where it is numbers by its type; else cell by cell, NaN for one that is no number."""
    values = _array(given)
    if values.dtype.kind in "biuf":
        return values
    if values.dtype.kind not in "OSU":
        kind = "Complex data not supported" if values.dtype.kind == "c" else "it cannot be learned from"
        raise ArgumentError(f"{name} must be numbers, got {values.dtype}: {kind}")
    return _each(values, _number, np.float64)


def _array(given: Any) -> NDArray[Any]:
    """By the type that the caller gave it; a list has none, and one of its cells must not give it one."""
    if hasattr(given, "dtype") or hasattr(given, "dtypes"):
        return np.asarray(given)
    try:
        values = np.asarray(given)
    except ValueError:  # a list in a cell: rows of several lengths are none of two dimensions, and refused as such
        return _objects(given)
    return values if values.dtype.kind in "biuf" else _objects(given)


def _objects(given: Any) -> NDArray[Any]:
    return np.asarray(given, dtype=object)


def _each(values: NDArray[Any], read: Callable[[Any], Any], dtype: type) -> NDArray[Any]:
    """One by one, so that what stands in a cell changes that cell alone."""
    cells = values.ravel()
    return np.fromiter((read(cell) for cell in cells), dtype, count=len(cells)).reshape(values.shape)


def _number(cell: Any) -> float:
    """NaN for what is none: text, a missing value, a whole number beyond all floats, an array."""
    if not isinstance(cell, (Real, str, bytes, Decimal, np.bool_)):
        return float("nan")
    try:
        with np.errstate(all="ignore"):
            return float(cell)
    except Exception:  # whatever it is, it would tell of this row
        return float("nan")


# -- classes ---------------------------------------------------------------------------------------------------------


def public_classes(classes: Any) -> NDArray[Any]:
    """The classes, sorted. Raises: ArgumentError where there are none, or they are none."""
    if classes is None:
        raise ArgumentError(
            "classes must be given, the labels that there can be (or their number, for 0, 1, ..), and from what is "
            "public: a class that is taken from the data tells that somebody is in it"
        )
    if isinstance(classes, (int, np.integer)) and not isinstance(classes, bool):
        classes = range(int(classes))
    given = np.asarray(list(classes) if isinstance(classes, Iterable) and not isinstance(classes, str) else [])
    if given.ndim != 1 or len(given) < 2 or given.dtype.kind not in "biufUSO":
        raise ArgumentError(f"classes must be two or more labels, or their number, got {classes!r}")
    found = np.unique(given)
    if len(found) != len(given):
        raise ArgumentError(f"classes must be distinct, got {classes!r}")
    return found


def codes_of(y: NDArray[Any], classes: NDArray[Any]) -> NDArray[np.int64]:
    """(m,) the place of each label among the classes; -1 for a label that is none, from which nothing is learned.

    Raises: ArgumentError where the type of y is none that the classes could have.
    """
    numeric, wanted = y.dtype.kind in "biuf", classes.dtype.kind in "biuf"
    if y.dtype.kind not in "biufUSO" or (y.dtype.kind != "O" and classes.dtype.kind != "O" and numeric != wanted):
        raise ArgumentError(
            f"y must have labels of the type of the classes, {classes.dtype}, got {y.dtype}: Unknown label type"
        )
    if "O" in (y.dtype.kind, classes.dtype.kind):
        places = {label: place for place, label in enumerate(classes.tolist())}
        return _each(y, lambda cell: _place(places, cell), np.int64)
    codes = np.full(len(y), -1, np.int64)
    with np.errstate(all="ignore"):
        for place, label in enumerate(classes):
            codes[np.asarray(y == label, dtype=bool)] = place
    return codes


def _place(places: dict[Any, int], cell: Any) -> int:
    try:
        return places.get(cell, -1)
    except Exception:  # an array, a missing value: it would tell of this row
        return -1


# -- units -----------------------------------------------------------------------------------------------------------


def check_units(unit: str, units: Any) -> None:
    """Raise ArgumentError where more than rows is to be protected, and nobody says whose each row is."""
    if units is None and unit != "example":
        raise ArgumentError(
            f"units must be given where the unit is {unit!r}: fit(X, y, units=ids), whose each row is. Without them "
            "each row by itself is protected, and the certificate would say more"
        )


class RowsByUnit:
    """The rows of a data set by whose they are, in batches of whole units.

    How many units there are is public, as are their ids: neighbours differ in what a unit's rows are.

    Attributes:
        count: number of units.
    """

    def __init__(self, units: Iterable[Any] | None, rows: int) -> None:
        """Args: units: (m,) ids, or None where each row is a unit of its own."""
        if units is None:
            self._ids: Units = np.arange(rows)
            self._of = np.arange(rows)
        else:
            self._ids = as_units(units)
            if len(self._ids) != rows:
                raise ArgumentError(
                    f"units must name whose each row is: {rows} of them, one for each row of X, got {len(self._ids)}"
                )
            groups = numbered(self._ids)
            _, first = np.unique(groups, return_index=True)
            rank = np.empty(len(first), np.int64)
            rank[np.argsort(first, kind="stable")] = np.arange(len(first))  # by the first row of each
            self._of = rank[groups]
        self.count = int(self._of.max()) + 1

    def batches(self, size: int, order: NDArray[np.int64] | None) -> list[NDArray[np.int64]]:
        """Rows of each batch: all rows of `size` units each, the last one perhaps of fewer.

        Args:
            order: (count,) a permutation, the place of each unit; None for that in which they come.
        """
        place = self._of if order is None else order[self._of]
        rows = np.argsort(place, kind="stable")
        steps = -(-self.count // size)
        ends = np.searchsorted(place[rows], size * np.arange(1, steps))
        return np.split(rows, ends)

    def names(self, rows: NDArray[np.int64]) -> Units:
        """Whose these rows are."""
        return self._ids[rows] if isinstance(self._ids, np.ndarray) else [self._ids[i] for i in rows]
