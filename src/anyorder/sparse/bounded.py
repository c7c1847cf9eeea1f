"""Row-sparse sums that a release takes, from gradients of rows that are already there."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyorder import _check
from anyorder.clipping.batch import UnitMap, full_precision
from anyorder.clipping.lookups import settle_lookups
from anyorder.clipping.norms import Weights
from anyorder.clipping.units import accumulator_dtype, round_down
from anyorder.clipping.uses import EmbeddingUse
from anyorder.errors import ArgumentError
from anyorder.ledger import as_units, numbered

__all__ = ["bounded_rows"]


def bounded_rows(rows: Any, values: Any, units: Iterable[Any], clip_norm: float) -> tuple[Any, Any]:
    """The sum over units of each unit's rows of a table, cut to L2 norm clip_norm: what `LazyTable.rows` takes.

        sum over units u of  g_u min(1, clip_norm / ||g_u||),    g_u: zeros, plus the values of u at their rows

    It is `bounded_sum` of whole tables, without a table: rows that a unit gives several times are added up first.

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
    clip_norm = _check.positive("clip_norm", clip_norm)
    by_name = as_units(units)
    vectors = _tensor("values", values)
    ids = _tensor("rows", rows).to(vectors.device)
    if not vectors.is_floating_point() or vectors.shape[:1] != (len(by_name),) or vectors.dim() != 2:
        raise ArgumentError(
            f"values must be floats of shape (m, D), one row for each of the {len(by_name)} units named, got "
            f"{vectors.dtype} of shape {tuple(vectors.shape)}"
        )
    if ids.dtype not in (torch.int64, torch.int32) or ids.shape != vectors.shape[:1]:
        raise ArgumentError(
            f"rows must be int64 or int32 of shape ({len(vectors)},), a row of the table for each of the values, got "
            f"{ids.dtype} of shape {tuple(ids.shape)}"
        )
    if len(ids) and int(ids.min()) < 0:  # which it is, is data
        raise ArgumentError("rows must be numbered from 0, got a negative number")
    distinct, place = torch.unique(ids.long(), return_inverse=True)
    sums = _sums(place, vectors, torch.from_numpy(numbered(by_name).astype(np.int64)), clip_norm, len(distinct))
    return (distinct, sums) if isinstance(values, Tensor) else (distinct.numpy(), sums.numpy())


def _tensor(name: str, array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array.detach()
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fi":
        raise ArgumentError(f"{name} must be a NumPy array or torch tensor of numbers, got {type(array).__name__}")
    return torch.from_numpy(np.array(array, order="C"))


def _sums(place: Tensor, values: Tensor, groups: Tensor, clip_norm: float, number: int) -> Tensor:
    """(number, D) of values at their places."""
    dtype, units = accumulator_dtype(values), UnitMap.of(groups, values.device)
    if not number:
        return torch.zeros(0, values.shape[1], dtype=dtype, device=values.device)
    with torch.no_grad(), full_precision(values.device):
        settled = settle_lookups([EmbeddingUse(place[:, None], values[:, None], number, None, dtype)], units)
        bad = ~settled.squares.isfinite()
        # Just under clip_norm, so that the rounding of factors, products and norms cannot carry a unit over.
        below = clip_norm * (1 - max(1e-12, 4 * torch.finfo(dtype).eps))
        factors = (below / settled.squares.masked_fill(bad, 0.0).sqrt()).clamp(max=1.0)
        by_unit = round_down(factors, dtype)
        return settled.total(Weights(by_unit, by_unit[units.index], (bad, bad[units.index]))).values()
