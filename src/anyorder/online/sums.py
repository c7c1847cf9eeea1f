"""Sums of clipped gradients of linear models, without the gradient of each example; sparse examples stay sparse."""

from collections.abc import Iterable
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.ledger import Units, as_units, distinct, numbered
from anyorder.online.losses import CustomLoss, Hinge, Logistic, Loss, PoissonLoss, Softmax, Squared, labels_of

__all__ = ["LARGEST", "SMALLEST", "Examples", "LinearSum", "clipped_sum", "sum_of"]

Floats = NDArray[np.float64]

HUGE = 2.0**200
"""A row or a slope that is longer counts as not finite: products of two that are not keep clear of overflow."""
_BLOCK = 2**16
"""Numbers that are made at a time, of units with several rows: few enough to stay in a cache."""
SMALLEST, LARGEST = 2.0**-60, 2.0**60
"""Clip norms that leave room around them."""


class LinearSum(NamedTuple):
    """The sum that a batch adds.

    Attributes:
        names: the units in it, each once, sorted: who `Release.step` is told of.
        total: (d, outputs) float64, the sum of their vectors.
    """

    names: Units
    total: Floats


class Examples(NamedTuple):
    """A batch whose shapes and types are right.

    Attributes:
        X: (m, d) float64: an array, or a CSR array in canonical form.
        y: (m,) numbers.
        units: (m,) ids.
        given: X as it came.
    """

    X: Any
    y: NDArray[Any]
    units: Units
    given: Any

    @classmethod
    def of(cls, X: Any, y: Any, units: Iterable[Any], features: int) -> "Examples":
        """Raises: ArgumentError for other shapes or types: nothing that depends on the numbers of one unit."""
        if units is None:
            raise ArgumentError(
                "units must name whose each row is, got None; an array of row numbers makes each its own"
            )
        ids = as_units(units)
        rows = _sparse(X) if sparse.issparse(X) else _dense(X)
        if rows.shape != (len(ids), features):
            raise ArgumentError(
                f"X must be ({len(ids)}, {features}), a row for each of the units named and a column for each "
                f"feature, got {rows.shape}"
            )
        return cls(rows, labels_of(y, len(ids)), ids, X)


def clipped_sum(loss: Loss, theta: Any, X: Any, y: Any, units: Iterable[Any], clip_norm: float) -> LinearSum:
    """The sum over units of each unit's gradient at theta, clipped to L2 norm clip_norm: a sum for `Release.step`.

        sum over units u of  g_u min(1, clip_norm / ||g_u||),    g_u = sum over rows i of u of  x_i (outer) slope_i

    A unit of one row has ||g_u|| = ||x_i|| ||slope_i||, so that such units together cost one product of matrices,
    X' (factors * slopes), with no gradient of an example. The rows of a unit that has several are added first, and
    clipped together.

    Guarantee: a unit changes the result by a vector of norm at most clip_norm, whatever its rows are. That vector is
    a function of theta and the unit's own rows (with a `CustomLoss` that keeps its promise): nothing is taken over
    the batch, and scores are made row by row, since a kernel for many rows at once rounds a row by where it stands,
    and a kink in the loss makes a whole vector of a rounding. A unit with NaN, infinities, numbers beyond 2^200
    or a label that is none adds exactly zero, and nothing tells of it.

    Proof of the bound in float64, u = 2^-53, D = d outputs. A sum of k squares in any order is at least (1 - k u) of
    the true one but for underflow, which takes at most k 2^-1075 from it: so the computed norms of x and slope are low
    by less than (D/2 + 4) u together and sqrt(D) 2^-537, times the other's norm of at most 2^200. The factor
    min(1, c / norm) and its product with slope round by 3 u more. What unit u adds is x (outer) (factor slope), with
    these rounded numbers, of norm at most c (1 + (D + 10) u) + sqrt(D) 2^-336 in exact arithmetic; and
    c = clip_norm (1 - (D + 16) 2 u) leaves it below clip_norm, as clip_norm >= 2^-60. For the vectors of units of
    several rows, which are D rounded numbers, the same count holds with one norm. As in every sum of
    floats, adding the vectors up rounds the sum, which no bound on a unit speaks of.

    Args:
        loss: one of `anyorder.online.losses`.
        theta: (d, outputs).
        X: (m, d): a NumPy array, or a sparse array or matrix of SciPy, which is never made dense.
        y: (m,) labels, numbers.
        units: (m,) whose each row is, integers or strings.
        clip_norm: from 2^-60 to 2^60.
    Returns: ClippedSum(names, total).
    Cost: O(m D) time, sparse O(nonzeros outputs + D).
    Raises: ArgumentError for shapes and types alone; what a `CustomLoss` gradient raises.

    Example:
        >>> X, y = np.array([[3.0, 4.0], [0.0, 0.5], [np.nan, 0.0]]), np.array([-1.0, -1.0, -1.0])
        >>> made = clipped_sum(Squared(), np.zeros((2, 1)), X, y, ["a", "b", "c"], clip_norm=1.0)
        >>> made.total.round(6).tolist()
        [[0.6], [1.3]]
    """
    at = np.asarray(theta)
    if at.dtype.kind not in "iuf" or at.ndim != 2 or at.shape[1] != loss.outputs:
        raise ArgumentError(f"theta must be numbers of shape (d, {loss.outputs}), got {at.dtype} of shape {at.shape}")
    batch = Examples.of(X, y, units, len(at))
    clip_norm = checks.real("clip_norm", clip_norm, low=SMALLEST, high=LARGEST)
    names = distinct(batch.units)
    return LinearSum(names, sum_of(loss, at.astype(np.float64), batch, clip_norm, names))


def sum_of(loss: Loss, theta: Floats, batch: Examples, clip_norm: float, names: Units) -> Floats:
    """The sum that `clipped_sum` makes, of a batch that was checked and has these units, each named once."""
    bound = clip_norm * (1.0 - (theta.size + 16) * 2.0**-52)
    match loss:
        case CustomLoss():
            rows, slopes = _gradients(loss, theta, batch), np.ones((len(batch.y), 1))
        case Logistic() | Softmax() | Hinge() | Squared() | PoissonLoss():
            with np.errstate(all="ignore"):
                scores = _scores(batch.X, theta)
            rows, slopes = batch.X, loss.slope(scores, batch.y)
        case _:
            assert_never(loss)
    with np.errstate(all="ignore"):
        total = _cut_and_added(rows, slopes, batch.units, len(names), bound)
    return total.reshape(theta.shape)


def _cut_and_added(rows: Any, slopes: Floats, units: Units, count: int, bound: float) -> Floats:
    """(columns of rows, columns of slopes): the sum over the units, `count` of them, of what they add."""
    lengths, heights = np.sqrt(squares(rows)), np.sqrt(squares(slopes))
    good = (lengths <= HUGE) & (heights <= HUGE)  # not so for NaN
    if count == len(good):
        return _alone(rows, slopes, lengths * heights, good, bound)
    groups = numbered(units)
    sizes = np.bincount(groups, minlength=count)
    alone = sizes[groups] == 1
    total = _alone(rows[alone], slopes[alone], (lengths * heights)[alone], good[alone], bound)
    whole = np.bincount(groups[good], minlength=count) == sizes
    order = np.argsort(groups, kind="stable")
    order = order[((sizes > 1) & whole)[groups[order]]]
    _add_together(total, rows[order], slopes[order], sizes[(sizes > 1) & whole], bound)
    return total


def _alone(rows: Any, slopes: Floats, norms: Floats, good: NDArray[np.bool_], bound: float) -> Floats:
    """What units of one row each add."""
    factors = np.minimum(1.0, bound / norms)
    if not good.all():  # a factor of 0 would leave NaN
        rows, slopes, factors = rows[good], slopes[good], factors[good]
    return np.asarray(rows.T @ (slopes * factors[:, None]))


def _add_together(total: Floats, rows: Any, slopes: Floats, sizes: NDArray[np.intp], bound: float) -> None:
    """Add what units of several rows each add, whose rows stand one behind the other, `sizes` of them."""
    edges = np.concatenate([[0], np.cumsum(sizes)])
    if sparse.issparse(rows):
        _add_sparse(total, rows, slopes, edges, bound)
        return
    for size in np.unique(sizes):  # products of one shape, each by itself
        places = edges[:-1][sizes == size, None] + np.arange(size)
        step = max(1, _BLOCK // max(total.size, size * rows.shape[1]))
        for first in range(0, len(places), step):
            own = places[first : first + step]
            vectors = np.matmul(rows[own].swapaxes(1, 2), slopes[own]).reshape(len(own), -1)
            factors = np.minimum(1.0, bound / np.sqrt(squares(vectors)))
            total += (factors @ vectors).reshape(total.shape)


def _add_sparse(total: Floats, rows: Any, slopes: Floats, edges: NDArray[np.intp], bound: float) -> None:
    """The same of sparse rows; unit u has those from edges[u] to edges[u + 1]."""
    shape, places = (len(edges) - 1, len(slopes)), np.arange(len(slopes))
    # A product from the left with a sparse array adds up each unit's rows in their order, whatever the others are.
    adders = [sparse.csr_array((np.ascontiguousarray(column), places, edges), shape=shape) for column in slopes.T]
    vectors = [adder @ rows for adder in adders]  # (units, d) for each output
    factors = np.minimum(1.0, bound / np.sqrt(sum(squares(part) for part in vectors)))
    for column, part in enumerate(vectors):
        total[:, column] += part.T @ factors


def _scores(rows: Any, theta: Floats) -> Floats:
    """(m, outputs): each row times theta, by itself."""
    if sparse.issparse(rows):
        return np.asarray(rows @ theta)
    return np.asarray(np.matmul(rows[:, None, :], theta)[:, 0, :])  # m products of one shape


def squares(rows: Any) -> Floats:
    """(m,) the squared norm of each row, by itself."""
    if sparse.issparse(rows):
        m = rows.shape[0]
        return np.bincount(np.repeat(np.arange(m), np.diff(rows.indptr)), np.square(rows.data), m).astype(np.float64)
    return np.asarray(np.matmul(rows[:, None, :], rows[:, :, None])[:, 0, 0])


def _gradients(loss: CustomLoss, theta: Floats, batch: Examples) -> Floats:
    """(m, d outputs) the user's own gradients, a row an example."""
    shown = theta.view()
    shown.flags.writeable = False
    made = np.asarray(loss.gradient(shown, batch.given, batch.y))
    m = len(batch.y)
    shapes = [(m, *theta.shape), (m, theta.size)] if theta.shape[1] == 1 else [(m, *theta.shape)]
    if made.dtype.kind not in "iuf" or made.shape not in shapes:
        raise ArgumentError(
            f"gradient must return numbers of shape {shapes[-1]}, a row for each example, got {made.dtype} of shape "
            f"{made.shape}"
        )
    with np.errstate(all="ignore"):
        return made.reshape(m, theta.size).astype(np.float64)


def _dense(X: Any) -> Floats:
    rows = np.asarray(X)
    if rows.dtype.kind not in "biuf" or rows.ndim != 2 or isinstance(X, np.ma.MaskedArray):
        raise ArgumentError(f"X must be numbers of shape (m, d), got {type(X).__name__}, {rows.dtype} {rows.shape}")
    with np.errstate(all="ignore"):  # of floats that are wider
        return np.ascontiguousarray(rows, dtype=np.float64)


def _sparse(X: Any) -> Any:
    """In canonical form: an element that is stored in two parts is one number, and not squared part by part."""
    if X.ndim != 2 or X.dtype.kind not in "biuf":
        raise ArgumentError(f"X must be numbers of shape (m, d), got {X.dtype} of shape {X.shape}")
    rows = X.tocsr()
    # Made anew: what an array says of itself was true when it was made, and may not be so any more.
    made = sparse.csr_array((rows.data, rows.indices, rows.indptr), shape=rows.shape)
    try:
        made.check_format(full_check=True)
    except ValueError as problem:
        raise ArgumentError(f"X is no whole sparse array: {problem}") from problem
    with np.errstate(all="ignore"):
        made = made.astype(np.float64)
    if not made.has_canonical_format:
        made.sum_duplicates()
    return made
