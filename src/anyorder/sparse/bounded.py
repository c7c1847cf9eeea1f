"""Row-sparse sums that a release takes, from gradients of rows that are already there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyorder import checks
from anyorder.clipping.norms import (
    EmbeddingUse,
    Settled,
    UnitMap,
    Weights,
    accumulator_dtype,
    full_precision,
    round_down,
    settle_lookups,
)
from anyorder.errors import ArgumentError
from anyorder.ledger import as_units, numbered

__all__ = ["bounded_parts", "bounded_rows"]


def bounded_rows(rows: Any, values: Any, units: Iterable[Any], clip_norm: float) -> tuple[Any, Any]:
    """The sum over units of each unit's rows of a table, clipped to L2 norm clip_norm: what `LazyTable.rows` takes.

        sum over units u of  g_u min(1, clip_norm / ||g_u||),    g_u: zeros, plus the values of u at their rows

    It is `bounded_sum` of a whole table, without the table: rows that a unit gives several times are added up first.
    **For a release of this one table alone.** A unit that is also in another table or in the dense total, clipped
    there on its own, would have norm up to sqrt(2) clip_norm, and the claim would be too small: `bounded_parts` clips
    over all.

    Args:
        rows: (m,) which row of the table each gradient is of, integers from 0, a NumPy array or torch tensor.
        values: (m, D) the gradients, a NumPy array or torch tensor of floats; not written.
        units: (m,) the unit of each, integers or strings.
        clip_norm: `release.clip_norm`.
    Returns: (rows, sums): the distinct rows (k,) int64, ascending, and the sums (k, D), float64 for float64 values,
        else float32; NumPy arrays where values are one. Which rows there are is as secret as the data.
    Guarantee: a unit changes the sums by a vector of norm at most clip_norm, whatever its values are: one whose sum is
        NaN or infinite adds exactly zero, and nothing tells of it. Factors are rounded down.
    Cost: O(m (D + log m)) time; memory of three further copies of the values. Nothing of the table's size.
    Raises: ArgumentError for other shapes or types.

    Example:
        >>> rows, values = np.array([7, 7, 2]), np.array([[3.0, 4.0], [0.0, 0.5], [np.inf, 0.0]])
        >>> [array.round(6).tolist() for array in ao.sparse.bounded_rows(rows, values, ["a", "b", "c"], clip_norm=1.0)]
        [[2, 7], [[0.0, 0.0], [0.6, 1.3]]]
    """
    clip_norm = checks.positive("clip_norm", clip_norm)
    return _cut([_rows_of("", rows, values, units)], clip_norm)[0]


def bounded_parts(
    dense: tuple[Any, Iterable[Any]] | None, tables: Sequence[tuple[Any, Any, Iterable[Any]]], clip_norm: float
) -> tuple[Any, list[tuple[Any, Any]]]:
    """The sums over units of a step with several parts, each unit clipped once over all of them: for `Release.step`.

        sum over units u of  g_u min(1, clip_norm / ||g_u||),    ||g_u||^2 = ||dense part of u||^2 + sum over tables of
                                                                             ||rows of u in the table||^2

    It is `bounded_sum` of all parts laid side by side, whole tables and all, without the tables.

    Args:
        dense: None for a release of size 0, else (vectors, units): (m, *shape) floats and the unit of each, as in
            `bounded_sum`.
        tables: for each table (rows, values, units): (m,), (m, D) and (m,), as in `bounded_rows`. Units are the same
            names in all parts; one may lack in some. A table that nobody touches has m = 0.
        clip_norm: `release.clip_norm`.
    Returns: (total, [(rows, sums), ..]): (*shape), float64 for float64 vectors, else float32, or of shape (0,) without
        a dense part; and what `bounded_rows` returns, for each table in their order: `table.rows(rows, sums)`.
    Guarantee: a unit changes all that is returned, taken together, by a vector of norm at most clip_norm, whatever its
        values are: one whose sum is NaN or infinite in any part adds exactly zero to every part, and nothing tells of
        it. Norms are added in float64, factors are rounded down.
    Cost: O(m (D + log m)) time for each part; memory of three further copies of the values. Nothing of a table's size.
    Raises: ArgumentError for other shapes or types, or where nothing is given.

    Example:
        >>> vectors, rows, values = np.array([[3.0], [0.1]]), np.array([7, 2]), np.array([[4.0], [0.2]])
        >>> total, [(ids, sums)] = ao.sparse.bounded_parts((vectors, [0, 1]), [(rows, values, [0, 1])], clip_norm=1.0)
        >>> total.round(6).tolist(), ids.tolist(), sums.round(6).tolist()
        ([0.7], [2, 7], [[0.2], [0.8]])
    """
    clip_norm = checks.positive("clip_norm", clip_norm)
    parts = [_rows_of(f" of table {i}", *_several("tables", table, 3)) for i, table in enumerate(tables)]
    if dense is not None:
        vectors, units = _several("dense", dense, 2)
        parts.insert(0, _dense_of(vectors, units))
    if not parts:
        raise ArgumentError("there must be a dense part or a table, got neither")
    sums = _cut(parts, clip_norm)
    if dense is None:
        return np.zeros(0, np.float32), sums
    (_, total), *others = sums
    return total.sum(0).reshape(parts[0].shape), others  # one row, or none where nobody has a vector


@dataclass(frozen=True)
class _Part:
    """Vectors of units at rows of a table; a dense part is row 0 of a table of one."""

    rows: Tensor  # (m,) int64
    values: Tensor  # (m, D)
    names: Any  # (m,) ids, as of `as_units`
    shape: tuple[int, ...]  # of a dense vector
    is_array: bool


def _rows_of(which: str, rows: Any, values: Any, units: Iterable[Any]) -> _Part:
    names = as_units(units)
    vectors = _tensor(f"values{which}", values)
    ids = _tensor(f"rows{which}", rows).to(vectors.device)
    if not vectors.is_floating_point() or vectors.shape[:1] != (len(names),) or vectors.dim() != 2:
        raise ArgumentError(
            f"values{which} must be floats of shape (m, D), one row for each of the {len(names)} units named, got "
            f"{vectors.dtype} of shape {tuple(vectors.shape)}"
        )
    if ids.dtype not in (torch.int64, torch.int32) or ids.shape != vectors.shape[:1]:
        raise ArgumentError(
            f"rows{which} must be int64 or int32 of shape ({len(vectors)},), a row of the table for each of the "
            f"values, got {ids.dtype} of shape {tuple(ids.shape)}"
        )
    if len(ids) and int(ids.min()) < 0:  # which it is, is data
        raise ArgumentError(f"rows{which} must be numbered from 0, got a negative number")
    return _Part(ids.long(), vectors, names, (), not isinstance(values, Tensor))


def _dense_of(given: Any, units: Iterable[Any]) -> _Part:
    names = as_units(units)
    vectors = _tensor("the dense vectors", given)
    if not vectors.is_floating_point() or vectors.dim() < 2 or len(vectors) != len(names):
        raise ArgumentError(
            f"the dense vectors must be floats of shape (m, ..), one for each of the {len(names)} units named, got "
            f"{vectors.dtype} of shape {tuple(vectors.shape)}"
        )
    row = torch.zeros(len(vectors), dtype=torch.int64, device=vectors.device)
    return _Part(row, vectors.flatten(1), names, tuple(vectors.shape[1:]), not isinstance(given, Tensor))


def _several(name: str, part: Any, number: int) -> Any:
    if isinstance(part, (tuple, list)) and len(part) == number:
        return part
    wanted = "(vectors, units), or None" if number == 2 else "a list of (rows, values, units)"
    raise ArgumentError(f"{name} must be {wanted}, got {type(part).__name__}")


def _tensor(name: str, array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array.detach()
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fi":
        raise ArgumentError(f"{name} must be a NumPy array or torch tensor of numbers, got {type(array).__name__}")
    return torch.from_numpy(np.array(array, order="C"))


def _cut(parts: list[_Part], clip_norm: float) -> list[tuple[Any, Any]]:
    """The distinct rows and their sums of each part, units cut over all parts."""
    names = as_units(list(chain.from_iterable(part.names for part in parts))) if len(parts) > 1 else parts[0].names
    numbers = torch.split(torch.from_numpy(numbered(names).astype(np.int64)), [len(part.names) for part in parts])
    squares = torch.zeros(1 + max((int(n.max()) for n in numbers if len(n)), default=-1), dtype=torch.float64)
    settled = [_Lookups.of(part, number) for part, number in zip(parts, numbers, strict=True)]
    for one in settled:
        squares.index_add_(0, one.owners, one.settled.squares.cpu())
    bad = ~squares.isfinite()
    # Just under clip_norm, so that the rounding of factors, products and norms cannot carry a unit over.
    below = clip_norm * (1 - max(1e-12, *(4 * torch.finfo(one.dtype).eps for one in settled)))
    factors = (below / squares.masked_fill(bad, 0.0).sqrt()).clamp(max=1.0)
    sums = [(one.distinct, one.sums(factors, bad)) for one in settled]
    pairs = zip(parts, sums, strict=True)
    return [(rows.numpy(), total.numpy()) if part.is_array else (rows, total) for part, (rows, total) in pairs]


@dataclass(frozen=True)
class _Lookups:
    """A part with the rows of each of its units added up."""

    distinct: Tensor  # (k,) rows
    units: UnitMap  # of this part alone
    owners: Tensor  # (U,) which of all units each of them is, on the CPU
    settled: Settled
    dtype: torch.dtype

    @classmethod
    def of(cls, part: _Part, numbers: Tensor) -> "_Lookups":
        device, dtype = part.values.device, accumulator_dtype(part.values)
        units = UnitMap.of(numbers, device)
        owners = torch.zeros(units.count, dtype=torch.int64).index_copy_(0, units.index.cpu(), numbers)
        distinct, place = torch.unique(part.rows, return_inverse=True)
        use = EmbeddingUse(place[:, None], part.values[:, None], max(1, len(distinct)), None, dtype)
        with torch.no_grad(), full_precision(device):
            return cls(distinct, units, owners, settle_lookups([use], units), dtype)

    def sums(self, factors: Tensor, bad: Tensor) -> Tensor:
        """(k, D) of what units add, each times its factor; the bad ones add zero."""
        device = self.units.index.device
        by_unit = round_down(factors[self.owners], self.dtype).to(device)
        left_out = bad[self.owners].to(device)
        weights = Weights(by_unit, by_unit[self.units.index], (left_out, left_out[self.units.index]))
        with torch.no_grad(), full_precision(device):
            return self.settled.total(weights).values()
