"""Variances of iterates whose noise has a small state: the steps in blocks, many side by side, then block after block.

In a block of L steps the iterates p and what is left at its end are linear in the state X at its beginning and in the
L new rows of Z:

    p_i = rows_i . X + (own noise of variance own_i),      X' = move X + (own noise of covariance left)

All of that is known without X. Then Var X goes from block to block, and Var p_i = rows_i Var X rows_i^T + own_i. Sums
are of squares and of covariances, so that nothing cancels.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from anyorder.strategy.base import Recurrence, Strategy
from anyorder.workload import GivenWorkload, Workload

Floats = NDArray[np.float64]
Way = Callable[[Floats, Floats], Floats]
"""(n,) Var p_t from M (n, 2, 2) and N (n, 2), see `by_recurrence`."""

_SHORTEST = 64  # block of bands
_COLUMNS = 512  # of K that are multiplied by A at once
_IN_HAND = 1 << 18  # entries of the maps of some blocks


class _Maps(NamedTuple):
    """rows (B, L, D), own (B, L), move (B, D, D), left (B, D, D) of B blocks, see above."""

    rows: Floats
    own: Floats
    move: Floats
    left: Floats


def by_recurrence(recurrences: Callable[[NDArray[np.int64]], Recurrence], M: Floats, N: Floats) -> Floats:
    """(n,) Var p_t for w <- M_t w + N_t eta_t, p = w[-1], and noise eta by a recurrence of d numbers.

    With X = (x, w) that is the recurrence of `joined`. The blocks have sqrt(n) steps.

    Args:
        recurrences: `Strategy.recurrences`.
        M: (n, 2, 2).
        N: (n, 2).
    Cost: O(n (d + 2)^3), with sqrt(n) turns of the interpreter.
    """
    n = len(N)
    length = math.isqrt(n - 1) + 1
    steps = np.arange(-(-n // length) * length).reshape(-1, length).clip(max=n - 1)
    count = len(steps)
    d = recurrences(steps[:1, 0]).h.shape[1]
    move, left = np.broadcast_to(np.eye(d + 2), (count, d + 2, d + 2)), np.zeros((count, d + 2, d + 2))
    rows, own = np.empty((count, length, d + 2)), np.empty((count, length))
    for i in range(length):
        here = steps[:, i]
        F, G = joined(recurrences(here), M[here], N[here])
        move = F @ move
        left = F @ left @ F.transpose(0, 2, 1) + G[:, :, None] * G[:, None]
        rows[:, i], own[:, i] = move[:, -1], left[:, -1, -1]
    return _chained([_Maps(rows, own, move, left)])[:n]


def joined(noise: Recurrence, M: NDArray[Any], N: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """F (k, d + 2, d + 2) and G (k, d + 2) of the state (x, w): [[F, 0], [N h, M]] and (G, N g)."""
    k, d = noise.h.shape
    F = np.zeros((k, d + 2, d + 2), dtype=noise.F.dtype)
    G = np.empty((k, d + 2), dtype=noise.F.dtype)
    F[:, :d, :d], G[:, :d] = noise.F, noise.G
    F[:, d:, :d] = N[:, :, None] * noise.h[:, None]
    F[:, d:, d:] = M
    G[:, d:] = N * noise.g[:, None]
    return F, G


class Bands(NamedTuple):
    """Noise from the last d outputs, or the last d rows of Z, oldest first, as a map of L steps at a time.

    Attributes:
        d: numbers kept.
        length: L >= d.
        maps: of block numbers (B,): (B or 1, L, d + L) the noise of the block's steps, from what is kept and from the
            new rows of Z.
        outputs: whether outputs are kept.
    """

    d: int
    length: int
    maps: Callable[[NDArray[np.int64]], Floats]
    outputs: bool


def substituted(bands: Floats, n: int) -> Bands:
    """Noise eta with sum_l bands[l, t - l] eta_{t-l} = z_t; (p, n) bands, or (p, 1) where all columns are alike."""
    p = len(bands)
    d, length = p - 1, _length(p, n)
    if bands.shape[1] == 1:
        whole = _inverted(_placed(np.broadcast_to(bands[::-1, 0], (1, length, p))), d)
        return Bands(d, length, lambda _: whole, outputs=True)
    count = -(-n // length)
    padded = np.zeros((p, d + count * length))
    padded[:, d : d + n] = bands
    padded[0, d + n :] = 1.0  # past the end: anything
    row, column = padded.strides
    # C[t, t - d + j] = bands[d - j, t - d + j], for j = 0 .. d
    rows = as_strided(padded[d:], (count, length, p), (length * column, column, column - row), writeable=False)
    return Bands(d, length, lambda blocks: _inverted(_placed(rows[blocks]), d), outputs=True)


def combined(coefficients: Floats, n: int) -> Bands:
    """Noise sum_l coefficients[l] z_{t-l}."""
    p = len(coefficients)
    length = _length(p, n)
    whole = _placed(np.broadcast_to(coefficients[::-1], (1, length, p)))
    return Bands(p - 1, length, lambda _: whole, outputs=False)


def by_bands(bands: Bands, M: Floats, N: Floats) -> Floats:
    """As `by_recurrence`, for noise in bands: a few products of matrices of L + d rows for each block of L steps."""
    n, (d, length) = len(N), bands[:2]
    count = -(-n // length)
    steps = np.arange(count * length).reshape(count, length).clip(max=n - 1)
    alike = (M[0] == M).all() and (N[0] == N).all()
    at_once = max(1, _IN_HAND // (length * (d + length)))
    parts = []
    for i in range(0, count, at_once):
        blocks = np.arange(i, min(i + at_once, count))
        here = steps[blocks[:1] if alike else blocks]
        parts.append(_band_maps(bands, blocks, M[here], N[here]))
    return _chained(parts)[:n]


def _band_maps(bands: Bands, blocks: NDArray[np.int64], M: Floats, N: Floats) -> _Maps:
    """Of some blocks; M (B or 1, L, 2, 2) and N (B or 1, L, 2)."""
    d, length, count = bands.d, bands.length, len(blocks)
    w = np.zeros((len(M), 2, length + 2))  # velocity and iterate, from the block's noise and from those before
    w[:, :, length:] = np.eye(2)
    iterates = np.empty((len(M), length, length + 2))
    for i in range(length):
        w = M[:, i] @ w
        w[:, :, i] += N[:, i]
        iterates[:, i] = w[:, 1]
    noise = bands.maps(blocks)
    p = iterates[:, :, :length] @ noise
    rows = np.empty((count, length, d + 2))
    rows[:, :, :d], rows[:, :, d:] = p[:, :, :d], iterates[:, :, length:]
    own = np.einsum("bij,bij->bi", p[:, :, d:], p[:, :, d:])
    end = np.zeros((count, d + 2, d + length))  # of what is kept, velocity and iterate
    end[:, :d] = noise[:, length - d :] if bands.outputs else np.eye(d, d + length, length)
    end[:, d:] = w[:, :, :length] @ noise
    move, new = np.zeros((count, d + 2, d + 2)), end[:, :, d:]
    move[:, :, :d], move[:, d:, d:] = end[:, :, :d], w[:, :, length:]
    left = new @ new.transpose(0, 2, 1)
    full = (count, length)
    return _Maps(np.broadcast_to(rows, (*full, d + 2)), np.broadcast_to(own, full), move, left)


def _placed(rows: Floats) -> Floats:
    """(B, L, d + L) with the d + 1 entries of row i at i, i + 1, .., i + d."""
    count, length, p = rows.shape
    result = np.zeros((count, length, length + p - 1))
    block, row, column = result.strides
    as_strided(result, rows.shape, (block, row + column, column))[:] = rows
    return result


def _inverted(C: Floats, d: int) -> Floats:
    """(B, L, d + L) the noise that C, the rows of some blocks with their past, makes white."""
    result = np.empty_like(C)
    for one, noise in zip(C, result, strict=True):
        noise[:, d:] = scipy.linalg.lapack.dtrtri(one[:, d:].T, lower=0)[0].T  # of columns in Fortran's order
        np.matmul(noise[:, d:], -one[:, :d], out=noise[:, :d])
    return result


def _chained(parts: list[_Maps]) -> Floats:
    """Var p of all steps, block after block."""
    D = parts[0].rows.shape[2]
    covariance = np.zeros((D, D))
    result = []
    for part in parts:
        for rows, own, move, left in zip(*part, strict=True):
            result.append(own + np.einsum("ij,ij->i", rows @ covariance, rows))
            covariance = move @ covariance @ move.T + left
    return np.concatenate(result)


def _length(p: int, n: int) -> int:
    """Of a block: no less than what is kept."""
    return max(min(_SHORTEST, n), p - 1, 1)


def of_iterates(strategy: Strategy, workload: Workload, own: Way, scales: Floats | None = None) -> Floats:
    """(n,) Var p_t for the noise of a strategy: by its kind's own way, or column by column where A is given in full.

    Args:
        strategy: C without scales.
        workload: A.
        own: from M and N, see `by_recurrence`.
        scales: of each step's noise, or none.
    """
    if isinstance(workload, GivenWorkload):
        return by_columns(strategy.noising_matrix(), workload, scales)
    M, N = workload.recurrence()
    if scales is not None:
        N = N * scales[:, None]
    return own(M, N) * np.square(workload.weights)


def by_columns(K: Floats, workload: Workload, scales: Floats | None = None) -> Floats:
    """The sums of squares of the rows of A K, so many columns of K at a time."""
    result = np.zeros(len(K))
    for start in range(0, K.shape[1], _COLUMNS):
        columns = K[:, start : start + _COLUMNS]
        result += np.square(workload.apply(columns if scales is None else scales[:, None] * columns)).sum(axis=1)
    return result
