"""One step anywhere in each epoch: the worst steps are first or last ones, or nearly so."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft

__all__ = ["convex_bound", "toeplitz_bound", "two_point_bound"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_WINDOW = 8  # epochs whose choices are remembered: 2^window states


def two_point_bound(weights: Floats, k: int, s: int) -> float:
    """An upper bound of the largest sum of weights over pi x pi, with one step of each of k epochs of s steps in pi.

    Let o_e be the place of the step in epoch e, from 0 to s - 1. For e < f, the weight as a function of o_e and o_f is
    at most its bilinear interpolation between the four corners plus the largest excess over that; the same on
    the diagonal, with linear interpolation. The sum of all interpolations is linear in each o_e, so its maximum has
    every o_e at 0 or s - 1: 2^k choices, of which dynamic programming takes the best. The excess is 0 where the
    weights are convex in each place, as X is for convex Toeplitz c but for the rows that the end of the run cuts off.
    The last epoch, where the cut is felt most, is taken step by step, without interpolation.

    Choices of the last 8 epochs are remembered; older ones are charged at their worst.

    Args:
        weights: (n, n) symmetric, not negative, n = k s.
    Cost: O(n^2 + k 2^8 (k + s)) time.
    """
    place = np.linspace(0.0, 1.0, s) if s > 1 else np.zeros(1)
    diagonal = weights.diagonal().reshape(k, s)
    value, excess = np.zeros(()), 0.0
    for f in range(k - 1):
        block = weights[: f * s, f * s : (f + 1) * s].reshape(f, s, s)  # epoch e, place in e, place in f
        corners = block[:, [0, -1]][:, :, [0, -1]]
        plane = _between(_between(corners, place, 1), place, 2)
        excess += float(_positive(diagonal[f] - _between(diagonal[f, [0, -1]], place, 0)).max())
        excess += 2 * float(_positive(block - plane).max(axis=(1, 2)).sum())
        value = _advance(value, diagonal[f, [0, -1]], corners)
    block = weights[: (k - 1) * s, (k - 1) * s :].reshape(k - 1, s, s)
    corners = block[:, [0, -1]]
    beyond = _positive(block - _between(corners, place, 1)).max(axis=1).sum(axis=0)
    return excess + float(_advance(value, diagonal[k - 1] + 2 * beyond, corners).max())


def toeplitz_bound(c: Floats, k: int, s: int) -> float:
    """The same for Toeplitz C, without X.

    For j in epoch f, |X[i, j]| is at most h_f(j - i) = sum_{l < n - f s} |c_l c_{l+j-i}|, which cuts off no row that X
    has. As a function of two places, h_f(o_f - o_e + d s) exceeds its bilinear interpolation by no more than it
    exceeds the two lines between h_f(d s - s + 1), h_f(d s), h_f(d s + s - 1), plus a quarter of the dent where these
    three are not convex: along o_f - o_e = constant the interpolation is quadratic, and on these lines at both ends.

    Args:
        c: (n + s,) first coefficients of C.
    Cost: O(k n log n), by fast Fourier transforms.
    """
    c = np.abs(c)
    size = next_fast_len(2 * len(c), real=True)
    transform = rfft(c, size)
    rise = np.linspace(0.0, 1.0, s)[1:] if s > 1 else np.zeros(0)
    value, excess = np.zeros(()), 0.0
    for f in range(k):
        h = irfft(transform * rfft(c[: (k - f) * s], size).conj(), size)[: (f + 1) * s]
        distance = s * np.arange(f, 0, -1)[:, None]
        near, at, far = h[distance - s + 1], h[distance], h[distance + s - 1]
        above = np.concatenate([
            h[distance - np.arange(s)[1:]] - at - rise * (near - at),
            h[distance + np.arange(s)[1:]] - at - rise * (far - at),
        ], axis=1)  # fmt: skip
        excess += 2 * float(_positive(above).max(axis=1, initial=0.0).sum())
        excess += 2 * float(_positive(2 * at - near - far).sum()) / 4
        corners = np.concatenate([at, far, near, at], axis=1).reshape(f, 2, 2)
        value = _advance(value, h[[0, 0]], corners)
    return excess + float(value.max())


def convex_bound(k: int, s: int, gram: Callable[[Integers, Integers], Floats]) -> float:
    """The same for Toeplitz C with c >= 0 and c_1, c_2, .. convex, so that each h_f is: nothing exceeds the lines.

    Args:
        gram: (gaps, rows) -> sum_{l < rows} c_l c_{l + gap}, elementwise.
    Cost: 3 values of `gram` for each pair of epochs, and O(k 2^8).
    """
    value = np.zeros(())
    for f in range(k):
        rows = (k - f) * s
        gaps = s * np.arange(f, 0, -1)[:, None, None] + (s - 1) * np.array([[0, 1], [-1, 0]])
        values = gram(np.append(gaps.ravel(), 0), np.full(gaps.size + 1, rows))
        value = _advance(value, values[[-1, -1]], values[:-1].reshape(gaps.shape))
    return float(value.max())


def _advance(value: Floats, own: Floats, cross: Floats) -> Floats:
    """The best sums after one more epoch.

    Args:
        value: (2, .., 2) best sum for each choice in the remembered epochs, oldest first.
        own: (c,) weight of each choice in this epoch.
        cross: (f, 2, c) weight of a choice in each of the f earlier epochs with one in this.
    """
    known = value.ndim
    forgotten = cross[: len(cross) - known].max(axis=1).sum(axis=0)
    longer = value[..., None] + own + 2 * forgotten
    for i, pair in enumerate(cross[len(cross) - known :]):
        longer = longer + 2 * pair.reshape((2,) + (1,) * (known - 1 - i) + (-1,))
    return longer if known < _WINDOW else np.asarray(longer.max(axis=0))


def _between(ends: Floats, place: Floats, axis: int) -> Floats:
    """Linear interpolation along an axis of length 2, at places from 0 to 1."""
    low, high = np.take(ends, [0], axis=axis), np.take(ends, [1], axis=axis)
    shape = [1] * ends.ndim
    shape[axis] = -1
    at = place.reshape(shape)
    return low * (1 - at) + high * at


def _positive(values: Floats) -> Floats:
    return np.maximum(values, 0.0)
