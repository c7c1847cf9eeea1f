"""Rows of a table carried over the steps that they have missed: the arithmetic of a jump, the same bits everywhere.

For each coordinate of a row, with D numbers s, normals xi and perhaps a sum g of gradients,

    s_i  <-  0 + Phi_i1 s_1 + .. + Phi_iD s_D + R_i1 xi_1 + .. + R_iw xi_w + into_i g

in float64, from left to right, every product and every sum rounded by itself, terms of factor 0 left out; then once
rounded to the type of the table. Such a sum is never -0, so that a term of +0 or -0 would change no bit of it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import ArgumentError
from anyorder.noise.lazy import Jump
from anyorder.noise.source import NoiseSource

__all__ = ["carried", "carry"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_MOST = 128  # normals of a coordinate that the kernel has room for
_MAX_ELEMENT = 1 << 62


def carry(
    source: NoiseSource,
    jump: Jump,
    arrays: Sequence[NDArray[Any]],
    rows: Integers,
    first: int,
    sums: NDArray[Any] | None = None,
    into: Floats | None = None,
) -> None:
    """Carry some rows of a table, in place; see the module.

    Args:
        source: of the normals.
        jump: maps, and which one each row takes.
        arrays: (V, width) each, all float32 or all float64, rows contiguous: the numbers of a coordinate, in order.
        rows: (k,) distinct rows.
        first: element of Z of the first coordinate of row 0; they lie row-major.
        sums: (k, width) what the rows have as gradients, float32 or float64; or none.
        into: (D,) what a sum of 1 adds.
    Raises: ArgumentError for what does not fit; MemoryError. Nothing was changed then.
    """
    _check_fits(jump, arrays, rows, first, sums, into)
    if not len(rows) or not arrays[0].shape[1]:
        return
    used = _used(jump)
    one = _one_source(source, jump.rows)
    kernel = None if one is None else one.kernel
    if one is not None and kernel is not None and (jump.R.shape[2] <= _MOST or used.max() <= _MOST):
        kernel.carry(
            one.key_words, one.rounds, arrays, np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(jump.Phi),
            np.ascontiguousarray(jump.R), np.ascontiguousarray(jump.rows), used,
            np.ascontiguousarray(jump.which, np.int64), first, None if sums is None else np.ascontiguousarray(sums),
            into,
        )  # fmt: skip
        return
    made = carried(source, jump, np.stack([x[rows] for x in arrays]), rows, first, sums, into)
    with np.errstate(all="ignore"):
        for x, new in zip(arrays, made, strict=True):
            x[rows] = new


def carried(
    source: NoiseSource,
    jump: Jump,
    state: NDArray[Any],
    rows: Integers,
    first: int,
    sums: NDArray[Any] | None = None,
    into: Floats | None = None,
) -> Floats:
    """The numbers of `carry` before they are rounded to the type of the table: (D, k, width).

    Args:
        state: (D, k, width) the numbers of these rows.
    """
    D, k, width = state.shape
    w = int(_used(jump).max(initial=0))
    ids, elements = np.broadcast_arrays(jump.rows[jump.which, :w], (first + rows * width)[:, None])
    xi = source.normal_at(ids.ravel(), elements.ravel(), width).reshape(k, w, width)
    made = np.zeros((D, k, width))
    with np.errstate(all="ignore"):  # of a run that diverges
        for i in range(D):
            for j in range(D):
                _add(made[i], jump.Phi[jump.which, i, j], state[j])
            for j in range(w):
                _add(made[i], jump.R[jump.which, i, j], xi[:, j])
            if sums is not None and into is not None:
                _add(made[i], np.full(k, into[i]), sums)
    return made


def _add(total: Floats, factors: Floats, x: NDArray[Any]) -> None:
    """Total += factors x, row by row; where the factor is 0, not even 0 inf."""
    has = factors != 0
    if has.all():
        total += factors[:, None] * x
    elif has.any():
        total[has] += factors[has, None] * x[has]


def _used(jump: Jump) -> Integers:
    """(u,) the columns of R up to the last that is not 0: no further normals are made."""
    _, D, w = jump.R.shape
    has = jump.R[:, 0] != 0 if D == 1 else (jump.R != 0).any(axis=1)
    used: Integers = (has * np.arange(1, w + 1)).max(axis=1, initial=0)
    return used


def _one_source(source: NoiseSource, ids: Integers) -> NoiseSource | None:
    """The source of a single key that all these rows of Z come from."""
    if not ids.size:
        return source
    return source.of_all(int(row()) for row in (ids.min, ids.max))  # keys change from a row on


def _check_fits(
    jump: Jump,
    arrays: Sequence[NDArray[Any]],
    rows: Integers,
    first: int,
    sums: NDArray[Any] | None,
    into: Floats | None,
) -> None:
    """The kernel writes where it is told: what it is told must be memory of the table."""
    num_rows, width = shape = arrays[0].shape
    D, u, kind = len(arrays), len(jump.Phi), arrays[0].dtype
    w = jump.rows.shape[1]
    for x in arrays:
        plain = x.strides[1] == x.itemsize or width < 2
        if x.shape != shape or x.dtype != kind or kind not in (np.float32, np.float64) or not plain or x.strides[0] < 0:
            raise ArgumentError("arrays must be float32 or float64, alike, with contiguous rows")
    if jump.Phi.shape != (u, D, D) or jump.R.shape != (u, D, w) or jump.rows.shape != (u, w):
        raise ArgumentError(f"a jump of {jump.Phi.shape[1]} numbers does not fit {D} arrays")
    if len(jump.which) != len(rows) or (len(rows) and not 0 <= jump.which.min() <= jump.which.max() < u):
        raise ArgumentError("a jump must have a map for each row")
    if len(rows) and not 0 <= rows.min() <= rows.max() < num_rows:
        raise ArgumentError(f"rows must lie in 0 .. {num_rows - 1}, and some do not")
    if not 0 <= first <= _MAX_ELEMENT - num_rows * width or (jump.rows.size and jump.rows.min() < 0):
        raise ArgumentError("elements of Z must lie in 0 .. 2^62, and its rows in 0 .. 2^63 - 1")
    if (sums is None) != (into is None):
        raise ArgumentError("sums and into go together")
    if sums is None or into is None:
        return
    if sums.shape != (len(rows), width) or sums.dtype not in (np.float32, np.float64) or into.shape != (D,):
        raise ArgumentError(f"sums must be {(len(rows), width)} in float32 or float64, got {sums.shape}")
