"""Sums and squared norms of many numbers, in pieces that stay in the cache and with rounding that is bounded."""

import torch
from torch import Tensor

from anyorder.clipping import native

__all__ = ["BLOCK", "ROWS", "cleared", "has_large", "outer_sum", "squares_of", "sum_of"]

BLOCK = 2**20
"""Numbers in an intermediate tensor, so that it stays in the cache."""


ROWS = 2**12  # terms of a weighted sum that are added up in float32 at a time; such pieces are added in float64


PIECE = 64
SMALL = 2**15  # numbers that are fast in float64
LARGE = 2.0**30  # what multiplies a weighted tensor in float32 at most; so what underflows in that cannot be seen


def squares_of(rows: Tensor) -> Tensor:
    """(n,) float64, the squared norms of (n, m) or a little more, never less.

    The compiled library adds float32 on a CPU in float64. Without it such numbers are added in pieces of PIECE, which
    errs by a factor of at most 1 + (PIECE + 3) u and, by underflow, by the smallest normal number for each element; the
    pieces are added in float64, as is all else.
    """
    if rows.dtype == torch.float64 or rows.device.type != "cpu":
        square: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
        # In float64 squares may be lost below the smallest number; those of float32 are not.
        return square + rows.shape[1] * torch.finfo(torch.float64).tiny if rows.dtype == torch.float64 else square
    m = rows.shape[1]
    if rows.dtype == torch.float32 and rows.stride(1) == 1 and native.available():
        return native.squares(rows)
    if rows.numel() <= SMALL:
        return rows.double().square_().sum(1)
    whole = m - m % PIECE
    parts = [rows[:, :whole].reshape(len(rows), -1, PIECE)] if whole else []
    parts += [rows[:, None, whole:]] if whole < m else []
    square = rows.new_zeros(len(rows), dtype=torch.float64)
    for part in parts:
        square += torch.linalg.vector_norm(part, dim=2).double().square_().sum(1)
    info = torch.finfo(rows.dtype)
    square = square * (1 + PIECE * info.eps) + m * info.tiny
    if not bool(square.isfinite().all()):  # squares overflow before their roots do
        size = max(1, BLOCK // max(1, m))
        return torch.cat([rows[i : i + size].double().square_().sum(1) for i in range(0, len(rows), size)])
    return square


def outer_sum(g: Tensor, a: Tensor) -> Tensor:
    """(m, n), the sum over rows of g (x) a, of (rows, m) and (rows, n)."""
    if len(g) <= ROWS or g.dtype == torch.float64:
        return g.mT @ a
    result = g.new_zeros(g.shape[1], a.shape[1], dtype=torch.float64)
    for i in range(0, len(g), ROWS):
        result += g[i : i + ROWS].mT @ a[i : i + ROWS]
    return result.to(g.dtype)


def has_large(tensor: Tensor) -> bool:
    """Whether a float32 tensor has numbers above LARGE."""
    if tensor.dtype == torch.float64 or not tensor.numel():
        return False
    low, high = torch.aminmax(tensor)
    return bool(torch.maximum(-low, high).item() > LARGE)


def cleared(tensor: Tensor, rows: Tensor) -> Tensor:
    """A copy of (B, ...) with zeros in some rows, (B,) bool."""
    return tensor.masked_fill(rows.view(-1, *(1 for _ in tensor.shape[1:])), 0)


def sum_of(tensors: list[Tensor]) -> Tensor:
    """The sum of one tensor or more."""
    result = tensors[0]
    for other in tensors[1:]:
        result = result + other
    return result
