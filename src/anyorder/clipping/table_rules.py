"""Lookups in tables, of single rows and of bags of rows, on the whole batch.

The rows come from the parameter itself, or from a `Table` that stands behind it: then the parameter may have no rows.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anyorder.clipping.base import Table
from anyorder.clipping.rules import backward_as_forward
from anyorder.clipping.tracing import LOOKUPS, Tracer
from anyorder.clipping.uses import EmbeddingUse
from anyorder.errors import ModelError

__all__ = ["TABLE_RULES", "Bag", "Lookup", "Reading", "rows_of"]


def rows_of(source: Tensor | Table) -> int:
    """V."""
    return len(source) if isinstance(source, Tensor) else source.num_rows


def _read(source: Tensor | Table, ids: Tensor) -> Tensor:
    """(*ids.shape, D)."""
    if isinstance(source, Tensor):
        return F.embedding(ids, source)
    if ids.dtype not in (torch.int64, torch.int32):
        raise ModelError(f"ids of rows must be torch.int64 or torch.int32, got {ids.dtype}")
    if ids.numel() and not _within(ids, source.num_rows):  # an id is data: the message has none
        raise ModelError(f"ids of rows must be from 0 to {source.num_rows - 1}, and the batch has others")
    return source.read(ids)


def _within(ids: Tensor, size: int) -> bool:
    """Whether all are from 0 to size - 1."""
    if ids.device.type == "cpu" and ids.dtype == torch.int64:  # in one call: what is negative is large without a sign
        return int(ids.detach().numpy().view(np.uint64).max()) < size
    low, high = torch.aminmax(ids)
    return int(low) >= 0 and int(high) < size


class Lookup(torch.autograd.Function):
    """Rows of a table, (B, ..) ids to (B, .., D)."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, tracer: Any, part: Any, padding: Any, ids: Tensor, source: Any) -> Any:
        ctx.tracer, ctx.part, ctx.padding, ctx.size = tracer, part, padding, rows_of(source)
        ctx.save_for_backward(ids)
        return _read(source, ids)

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        flat, g = ids.reshape(len(ids), -1), grad.reshape(len(grad), -1, grad.shape[-1])
        ctx.tracer.enter(ctx.part, lambda dtype: EmbeddingUse(flat, g, ctx.size, ctx.padding, dtype))
        return (None,) * 6


class Bag(torch.autograd.Function):
    """Sums or means of rows of a table, (B, bags, L) ids to (B, bags, D); weights (B, bags, L) or None."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Any, tracer: Any, part: Any, padding: Any, mode: str, ids: Tensor, weights: Any, source: Any
    ) -> Any:
        ctx.tracer, ctx.part, ctx.padding, ctx.mode, ctx.size = tracer, part, padding, mode, rows_of(source)
        weighted = ctx.needs_input_grad[6]
        if isinstance(source, Tensor):
            ctx.save_for_backward(ids, weights, F.embedding(ids, source) if weighted else None)
            return _by_torch(source, ids, mode, padding, weights)
        rows = _read(source, ids)
        ctx.save_for_backward(ids, weights, rows if weighted else None)
        return _bags(rows, ids, mode, padding, weights)

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        ids, weights, rows = ctx.saved_tensors
        each = grad.unsqueeze(2).expand(*ids.shape, grad.shape[-1])
        if ctx.mode == "mean":
            each = each / _numbers(ids, ctx.padding)[..., None, None]
        elif weights is not None:
            each = each * weights.unsqueeze(-1)
        flat, g = ids.reshape(len(ids), -1), each.reshape(len(ids), -1, grad.shape[-1])
        ctx.tracer.enter(ctx.part, lambda dtype: EmbeddingUse(flat, g, ctx.size, ctx.padding, dtype))
        back = None
        if rows is not None:
            back = (rows * grad.unsqueeze(2)).sum(-1)
            back = back if ctx.padding is None else back.masked_fill_(ids == ctx.padding, 0)
        return None, None, None, None, None, None, back, None


def _by_torch(table: Tensor, ids: Tensor, mode: str, padding: int | None, weights: Tensor | None) -> Tensor:
    """(B, bags, D)."""
    flat, own = ids.flatten(0, 1), None if weights is None else weights.flatten(0, 1)
    y = F.embedding_bag(flat, table, mode=mode, per_sample_weights=own, padding_idx=padding)
    return y.view(*ids.shape[:2], -1)


def _bags(rows: Tensor, ids: Tensor, mode: str, padding: int | None, weights: Tensor | None) -> Tensor:
    """(B, bags, D) of the rows (B, bags, L, D)."""
    if padding is not None:  # not by a factor of 0: the row may hold anything
        rows = rows.masked_fill((ids == padding).unsqueeze(-1), 0)
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    total = rows.sum(2)
    return total / _numbers(ids, padding).unsqueeze(-1) if mode == "mean" else total


def _numbers(ids: Tensor, padding: int | None) -> Tensor:
    """(B, bags), how many rows are in each bag; 1 for an empty one, whose mean is zero."""
    if padding is None:
        return torch.full(ids.shape[:2], max(1, ids.shape[2]), device=ids.device)
    return (ids != padding).sum(2).clamp_(min=1)


def _embedding(
    tracer: Tracer, func: Any, input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    del norm_type, sparse
    part = tracer.part(weight)
    if part is None or weight.dim() != 2 or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    source = tracer.source(part)
    padding = None if padding_idx is None else padding_idx % rows_of(source)
    tracer.expect(part)
    return tracer.on_batch(lambda ids: tracer.anchored(Lookup, tracer, part, padding, ids, source), input)


def _embedding_bag(
    tracer: Tracer, func: Any, input: Any, weight: Any, offsets: Any = None, max_norm: Any = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Any = None, include_last_offset: bool = False, padding_idx: Any = None,
) -> Any:  # fmt: skip
    del norm_type, sparse
    part, weights = tracer.part(weight), per_sample_weights
    rectangle = isinstance(input, Tensor) and input.dim() == 2 and offsets is None and not include_last_offset
    if not rectangle or weight.dim() != 2 or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    if mode not in _MODES or (weights is not None and (mode != "sum" or not _fits(weights, input, weight))):
        return NotImplemented
    if part is None:  # frozen, or made from a parameter; vmap has no rule for bags
        if torch._C._functorch.is_functorch_wrapped_tensor(weight):
            return NotImplemented
        return tracer.on_batch(lambda ids, weights: _by_torch(weight, ids, mode, padding_idx, weights), input, weights)
    source = tracer.source(part)
    padding = None if padding_idx is None else padding_idx % rows_of(source)
    tracer.expect(part)

    def run(ids: Tensor, weights: Tensor | None) -> Any:
        return tracer.anchored(Bag, tracer, part, padding, mode, ids, weights, source)

    return tracer.on_batch(run, input, weights)


_MODES = ("sum", "mean")


def _fits(weights: Any, ids: Tensor, table: Tensor) -> bool:
    return isinstance(weights, Tensor) and weights.shape == ids.shape and weights.dtype == table.dtype


class Reading(TorchFunctionMode):
    """Looks rows up in tables, for a module that runs on one example without vmap.

    Args:
        tables: by the id of the parameter that stands for each.
    """

    def __init__(self, tables: Mapping[int, Table]) -> None:
        super().__init__()
        self._tables = tables

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LOOKUPS:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            table = self._tables.get(id(given["weight"]))
            if table is not None:
                rows, mode = _read(table, given["input"]), given.get("mode", "mean")
                return rows if func is F.embedding else rows.mean(-2) if mode == "mean" else rows.sum(-2)
        return func(*args, **kwargs)


TABLE_RULES: dict[Any, Callable[..., Any]] = {F.embedding: _embedding, F.embedding_bag: _embedding_bag}
"""As `FUNCTION_RULES`, for tables."""
