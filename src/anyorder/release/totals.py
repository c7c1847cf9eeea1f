"""Totals as they come and go: whole vectors, or rows of a table."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from anyorder.errors import ArgumentError
from anyorder.plan.plan import Plan

__all__ = ["Rows", "like", "piece_of"]

_FLOATS = (torch.float32, torch.float64)


def piece_of(total: Any, size: int, grid: float | None) -> Tensor:
    """A flat copy of a total. Raises: ArgumentError if it does not fit or is not finite; see `Release`."""
    tensor = _tensor("total", total)
    kinds = _FLOATS if grid is None else (torch.int64,)
    if tensor.dtype not in kinds:
        raise ArgumentError(
            f"total must be float32 or float64, got {total.dtype}"
            if grid is None
            else f"total must be int64, in steps of the plan's grid {grid:g} (bounded_sum(.., grid=) gives that), got "
            f"{total.dtype}"
        )
    if tensor.numel() != size:
        raise ArgumentError(f"total must have {size} elements, in any shape, got shape {tuple(tensor.shape)}")
    _check_finite("total", tensor)
    return tensor.view(-1)


def like(piece: Tensor, total: Any) -> Any:
    """A private piece in the shape and kind of the total."""
    shaped = piece.view(tuple(total.shape))
    return shaped if isinstance(total, Tensor) else shaped.numpy()


@dataclass(frozen=True)
class Rows:
    """Some rows of a (num_rows, width) table.

    Attributes:
        rows: (k,) int64, distinct.
        values: (k, width), a copy of the sums, float32 or float64.
    """

    rows: NDArray[np.int64]
    values: Tensor

    @classmethod
    def of(cls, rows: ArrayLike, values: Any, size: int, plan: Plan) -> "Rows":
        """Raises: ArgumentError if they do not fit the table, or the plan has no noise for rows alone."""
        if plan.grid is not None:
            raise ArgumentError(
                "rows alone have no exact noise: give the whole table to step(), or plan without secure="
            )
        if plan.strategy.state_rows:
            raise ArgumentError(
                f"rows alone need noise without a state, and that of {plan.strategy.describe()} comes from all steps "
                "before: plan with a tree of regenerate=True, a banded inverse or independent noise, or give the whole "
                "table to step()"
            )
        tensor = _values(values)
        width = tensor.shape[1]
        if not width or size % width:
            raise ArgumentError(f"values must be as wide as the table, whose {size} elements are no rows of {width}")
        return cls._checked(rows, tensor, size // width)

    @classmethod
    def fitting(cls, rows: ArrayLike, values: Any, num_rows: int, width: int) -> "Rows":
        """Raises: ArgumentError if they do not fit the table."""
        tensor = _values(values)
        if tensor.shape[1] != width:
            raise ArgumentError(f"values must be as wide as the table, (k, {width}), got {tuple(tensor.shape)}")
        return cls._checked(rows, tensor, num_rows)

    @classmethod
    def _checked(cls, rows: ArrayLike, tensor: Tensor, num_rows: int) -> "Rows":
        asked = rows.detach().cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows)
        if asked.ndim != 1 or (asked.size and asked.dtype.kind not in "iu") or len(asked) != len(tensor):
            raise ArgumentError(
                f"rows must be a list of {len(tensor)} integers, one for each row of values, got {asked.dtype} of "
                f"shape {asked.shape}"
            )
        if asked.size and not 0 <= asked.min() <= asked.max() < num_rows:
            raise ArgumentError(f"rows must lie in 0 .. {num_rows - 1}, the rows of the table, and some do not")
        ascending = bool((asked[1:] > asked[:-1]).all())
        if not ascending and len(np.unique(asked)) != len(asked):
            raise ArgumentError("rows must be distinct: one that is named twice would be released twice; add them up")
        _check_finite("values", tensor)
        return cls(asked.astype(np.int64), tensor)

    def parts(self) -> list[Tensor]:
        """What a journal is told: other rows, another width, or no rows, are other data."""
        head = np.concatenate([[-1, *self.values.shape], self.rows])
        return [torch.from_numpy(head), self.values]


def _values(values: Any) -> Tensor:
    tensor = _tensor("values", values)
    if tensor.dtype not in _FLOATS or tensor.dim() != 2:
        raise ArgumentError(
            f"values must be (k, width) in float32 or float64, got {values.dtype} of shape {tuple(values.shape)}"
        )
    return tensor


def _tensor(name: str, values: Any) -> Tensor:
    """A copy of the values as a tensor in row-major order."""
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.device.type == "meta":
            raise ArgumentError(f"{name} must be a dense tensor with memory, got {values.layout} on {values.device}")
        return values.detach().clone(memory_format=torch.contiguous_format)
    if not isinstance(values, np.ndarray) or isinstance(values, np.ma.MaskedArray):
        raise ArgumentError(f"{name} must be a NumPy array or a torch tensor, got {type(values).__name__}")
    if values.dtype.kind not in "fi" or not values.dtype.isnative or values.dtype.itemsize > 8:
        raise ArgumentError(f"{name} must be of native float32, float64 or int64, got {values.dtype}")
    return torch.from_numpy(np.array(values, order="C", subok=False))


def _check_finite(name: str, values: Tensor) -> None:
    # NaN and infinities survive a sum, so that a finite sum, one cheap pass, settles it.
    if not values.is_floating_point() or values.sum().isfinite() or values.isfinite().all():
        return
    raise ArgumentError(
        f"{name} must be finite: a unit's part that is not must be zero before it is added, as bounded_sum does. "
        "Nothing was released or changed; but this error tells of the data, and no noise covers it"
    )
