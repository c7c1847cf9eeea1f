"""Sums that a release takes, from vectors that are already there."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyorder import checks
from anyorder.clipping.units import ClippedSum
from anyorder.errors import ArgumentError
from anyorder.ledger import as_units, numbered

__all__ = ["bounded_sum"]


def bounded_sum(vectors: Any, units: Iterable[Any], clip_norm: float, *, grid: float | None = None) -> Any:
    """The sum over units of each unit's vector, cut to L2 norm clip_norm: a total for `Release.step`.

        sum over units u of  g_u min(1, clip_norm / ||g_u||),    g_u = sum of the rows of u

    Args:
        vectors: (m, *shape), a NumPy array or torch tensor of floats; not written.
        units: (m,) the unit of each row, integers or strings.
        clip_norm: `release.clip_norm`.
        grid: `plan.grid`, for a plan with exact integers.
    Returns: (*shape), float64 for float64 vectors, else float32; on a grid int64, in grid steps.
    Guarantee: a unit changes the result by a vector of norm at most clip_norm, whatever its rows are: one whose sum is
        NaN or infinite adds exactly zero, and nothing tells of it. Factors are rounded down.
    Cost: O(m d) time; memory of one further copy of the vectors.
    Raises: ArgumentError for other shapes or types.

    Example:
        >>> ao.bounded_sum(np.array([[3.0, 4.0], [0.3, 0.4], [np.nan, 0.0]]), ["a", "b", "c"], clip_norm=1.0).round(6)
        array([0.9, 1.2])
    """
    clip_norm = checks.positive("clip_norm", clip_norm)
    ids = as_units(units)
    if not isinstance(vectors, Tensor) and not (isinstance(vectors, np.ndarray) and vectors.dtype.kind == "f"):
        raise ArgumentError(f"vectors must be a NumPy array or torch tensor of floats, got {type(vectors).__name__}")
    rows = vectors.detach() if isinstance(vectors, Tensor) else torch.from_numpy(np.array(vectors, order="C"))
    if not rows.is_floating_point() or rows.dim() < 2 or len(rows) != len(ids):
        raise ArgumentError(
            f"vectors must be floats of shape (m, ..), one row for each of the {len(ids)} units named, got "
            f"{vectors.dtype} of shape {tuple(vectors.shape)}"
        )
    groups = numbered(ids)
    order = np.argsort(groups, kind="stable")
    one = torch.empty(rows.shape[1:], dtype=rows.dtype, device=rows.device)
    total = ClippedSum({"": one}, clip_norm=clip_norm, scale=1.0, grid=grid)
    if len(rows):
        by_unit = torch.from_numpy(groups[order].astype(np.int64))
        total.add({"": rows[torch.from_numpy(order).to(rows.device)]}, by_unit, complete=True)
    result = total.finish()[""]
    return result if isinstance(vectors, Tensor) else result.numpy()
