"""Whether the noise that was released is the noise that was planned: tests of a run whose un-noised sums are known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import chdtr, chdtrc, ndtr

from anyorder import _check
from anyorder.audit.whiten import DENSE_STEPS, forward, whitener
from anyorder.errors import ArgumentError
from anyorder.strategy import Rescaled, Strategy, Tree

__all__ = ["Law", "echo", "noise_law", "whitener"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Law:
    """Some tests of one run: name -> p-value, each already paid for the places where it looked.

    Attributes:
        p_values: probability, at most, of a result as strong if the run is as claimed.
    """

    p_values: Mapping[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "p_values", MappingProxyType(dict(self.p_values)))

    @property
    def p_value(self) -> float:
        """Of all of them together, by Bonferroni: the number of tests times the smallest, at most 1."""
        return min(1.0, len(self.p_values) * min(self.p_values.values(), default=1.0))

    def __or__(self, other: "Law") -> "Law":
        return Law({**self.p_values, **other.p_values})


class Directions(Protocol):
    """Canaries, as `echo` needs them: orthonormal directions, of which a row has inner products."""

    def dot(self, row: Any) -> Floats:
        """(count,) inner products with one row."""


def testable(strategy: Strategy) -> bool:
    """Whether `noise_law` is for this strategy: any up to 4096 steps, and what is no tree beyond."""
    inner = strategy.strategy if type(strategy) is Rescaled else strategy
    return strategy.n <= DENSE_STEPS or type(inner) is not Tree


def _white(residual: Floats, strategy: Strategy) -> Floats:
    """(n, size) A residual; beyond 4096 steps C forward, row by row, which is the same where C is square."""
    if strategy.n <= DENSE_STEPS or not testable(strategy):
        return whitener(strategy) @ residual
    stream = forward(strategy)
    return np.array([row for own in residual for row in stream.push(own)])


def noise_law(
    released: ArrayLike, totals: ArrayLike, strategy: Strategy, noise_std: float, divisor: float = 1.0
) -> Law:
    """Whether what was added to the sums is std K Z, with Z white: W = A (released divisor - totals) / std is N(0, 1).

    Every p-value is of an exact law or a proven bound of it, and paid for the places where it looked; a number that is
    not finite gives "finite" alone, with p-value 0.

    - "variance", "variance of a step", "variance of a coordinate": chi-squared, too small or too large.
    - "a row used again": inner products of all pairs of rows of W; up to 4096 steps.
    - "correlation": those of W with itself, moved by any number of steps and coordinates.
    - "largest": the largest entry.
    - "shape": the largest distance of the distribution function, by the bound of Dvoretzky, Kiefer and Wolfowitz
      with Massart's constant.

    Args:
        released: (n, size), what the release returned, or some coordinates of it that it could not know; size > 1.
        totals: (n, size), the sums of what the units added, without noise, in the same order.
        strategy: C, of n steps.
        noise_std: the plan's.
        divisor: what noised sums were divided by; `plan.batch_size`.
    Returns: Law.
    Cost: O(n size log(n size)) time, and memory of some copies: for audits at small size.
    Raises: ArgumentError if shapes do not fit, or for a tree of more than 4096 steps.
    """
    std = _check.positive("noise_std", noise_std)
    rows, sums = (np.asarray(x, dtype=np.float64) for x in (released, totals))
    if rows.ndim != 2 or rows.shape != sums.shape or rows.shape[0] != strategy.n or rows.shape[1] < 2:
        raise ArgumentError(
            f"released and totals must both be (n, size) with n={strategy.n} and size at least 2, got shapes "
            f"{rows.shape} and {sums.shape}"
        )
    if not np.isfinite(rows).all():
        return Law({"finite": 0.0})
    W = _white(rows * _check.positive("divisor", divisor) - sums, strategy) / std
    n, size = W.shape
    squares = np.square(W)
    pairs = {} if n > DENSE_STEPS else {"a row used again": _rows_used_again(W)}
    return Law({
        "variance": _chi_squared(squares.sum(keepdims=True), n * size),
        "variance of a step": _chi_squared(squares.sum(1), size),
        "variance of a coordinate": _chi_squared(squares.sum(0), n),
        **pairs,
        "correlation": _correlation(W),
        "largest": _several(2 * ndtr(-np.abs(W).max(keepdims=True)), W.size),
        "shape": _shape(W),
    })  # fmt: skip


def echo(
    released: ArrayLike,
    canaries: Directions,
    included: ArrayLike,
    steps: Sequence[Sequence[int]],
    strategy: Strategy,
    noise_std: float,
    divisor: float = 1.0,
    *,
    totals: ArrayLike | None = None,
    clip_norm: float = 1.0,
) -> Law:
    """Whether included canaries are in the steps that are theirs, and nowhere else.

    A gradient that is kept for a later step, or a momentum that is taken before the noise, is an echo. With y_t the
    inner products of canary g_c with what is left of row t without the canary's own part, Y = A y / std white, and
    a_t = A e_t, the score of canary c at step t is a_t . Y_c / ||a_t||, N(0, 1). Looked at are

    - "echo of a unit": each such score of its own;
    - "echo of a step": their sums over the canaries of step s at step t, for every pair of steps;
    - "echo": the matched sums over all canaries for each lag t - s.

    Args:
        released, strategy, noise_std, divisor: as for `noise_law`; released may be any iterable of n rows.
        canaries: mutually orthogonal unit vectors, on coordinates where nobody else adds anything, or with `totals`.
        included: (count,) bool.
        steps: for each canary the steps where it is, or would be.
        totals: (n, size) un-noised sums where they are known. None: what canaries add is clip_norm at their steps.
        clip_norm: length of a canary in a sum.
    Returns: Law; every p-value is of a normal law, paid for the places where it looked.
    Cost: a pass over the rows, and O(n^2 count).
    Raises: ArgumentError if shapes do not fit, or no canary is included.
    """
    std, divisor = _check.positive("noise_std", noise_std), _check.positive("divisor", divisor)
    there = np.asarray(included, dtype=np.bool_)
    if there.ndim != 1 or len(steps) != len(there) or not there.any():
        raise ArgumentError(
            f"included must be (count,) coins, at least one of them true, and steps must name those of each canary; "
            f"got shape {there.shape} and {len(steps)} lists of steps"
        )
    there_at = participations(steps, strategy.n)[:, there]
    sums: Any = np.zeros(strategy.n) if totals is None else totals
    y = np.array([canaries.dot(np.asarray(row, np.float64) * divisor - own) for row, own in _rows(released, sums)])
    if len(y) != strategy.n or y.shape[1:] != there.shape:
        raise ArgumentError(f"there must be {strategy.n} rows and {len(there)} inner products, got shape {y.shape}")
    if not np.isfinite(y).all():
        return Law({"finite": 0.0})
    y = y[:, there] - (clip_norm * there_at if totals is None else 0.0)
    A = whitener(strategy)
    Y = A @ y / std
    scores = (A.T @ Y) / np.linalg.norm(A, axis=0)[:, None]
    free = 1.0 - there_at  # 1 where the canary has nothing to do
    counts = there_at @ free.T
    pairs = (there_at @ (scores * free).T)[counts > 0] / np.sqrt(counts[counts > 0])
    return Law({
        "echo of a unit": _normal(scores[free > 0]),
        "echo of a step": _normal(pairs),
        "echo": _normal(_lags(A, Y, there_at, free)),
    })  # fmt: skip


def participations(steps: Sequence[Sequence[int]], n: int) -> Floats:
    """(n, count) 1 where a canary has its steps, else 0."""
    result = np.zeros((n, len(steps)))
    for column, own in enumerate(steps):
        result[np.asarray(own, dtype=np.intp), column] = 1.0
    return result


def _rows(released: Any, totals: Any) -> Any:
    return zip(released, totals, strict=True)


def _lags(A: Floats, Y: Floats, there_at: Floats, free: Floats) -> Floats:
    """Matched sums of what canaries would leave a lag after their steps, each lag normed to variance 1."""
    n = len(A)
    found = []
    for lag in [*range(1 - n, 0), *range(1, n)]:
        moved = np.zeros_like(there_at)
        moved[max(lag, 0) : n + min(lag, 0)] = there_at[max(-lag, 0) : n - max(lag, 0)]
        wanted = A @ (moved * free)
        norm = np.linalg.norm(wanted)
        if norm:
            found.append(float((wanted * Y).sum() / norm))
    return np.array(found)


LEAST = 1e-300
"""What p-values below it are rounded up to."""


# -- laws --------------------------------------------------------------------------------------------------------------


def _several(p_values: Floats, times: int) -> float:
    """The smallest p-value of so many, paid for; what is below 1e-300 is rounded up."""
    return float(min(1.0, times * max(p_values.min(initial=1.0), LEAST)))


def _normal(scores: Floats) -> float:
    """Of the largest of some standard normals, on either side."""
    return _several(2 * ndtr(-np.abs(scores)), scores.size)


def _chi_squared(sums: Floats, degrees: int) -> float:
    """Of sums of so many squares, too small or too large."""
    return _several(2 * np.minimum(chdtr(degrees, sums), chdtrc(degrees, sums)), sums.size)


def _rows_used_again(W: Floats) -> float:
    first, second = np.triu_indices(len(W), 1)
    return _several(_products((W @ W.T)[first, second], W.shape[1]), len(first)) if len(first) else 1.0


def _correlation(W: Floats) -> float:
    """Of sum_{t, i} W[t, i] W[t + s, i + h] over all moves (s, h) != 0, half of which mirror the others."""
    n, size = W.shape
    spectrum = np.fft.rfft2(W, s=(2 * n, 2 * size))
    sums = np.fft.irfft2(np.square(np.abs(spectrum)), s=(2 * n, 2 * size))
    steps, moves = np.arange(n)[:, None], np.arange(1 - size, size)
    sums = sums[steps, moves]
    numbers = (n - steps) * (size - np.abs(moves))
    keep = (steps > 0) | (moves > 0)
    return _several(_products(sums[keep], numbers[keep]), int(keep.sum()))


def _products(sums: Floats, number: NDArray[np.int64] | int) -> Floats:
    """A bound on P(|S| >= |sum|) for S a sum of so many products of two of some independent standard normals.

    The pairs, seen as edges between the normals, must be chains, as x_1 x_2 + x_2 x_3 + .. are. Then, for every
    0 < theta < 1/2, with r = (1 + sqrt(1 - 4 theta^2)) / 2,

        E exp(theta S) = det(I - theta chain)^(-1/2) <= r^(-number / 2),

    since the determinants D_m = D_{m-1} - theta^2 D_{m-2} of chains of m normals, D_0 = D_1 = 1, shrink by a factor
    that falls to r from above. theta = u / (1 + u^2), so that r = 1 / (1 + u^2); u is near the best.
    """
    x = np.abs(sums) / number
    u = np.where(x < 1, x / (1 + x * x), 0.5)
    exponent = number / 2 * np.log1p(u * u) - u / (1 + u * u) * np.abs(sums)
    return np.asarray(2 * np.exp(np.minimum(exponent, 0.0)))


def _shape(W: Floats) -> float:
    """Of the largest distance between the distribution function of the entries and that of N(0, 1)."""
    expected = ndtr(np.sort(W, axis=None))
    ranks = np.arange(W.size)
    distance = max(float((expected - ranks / W.size).max()), float(((ranks + 1) / W.size - expected).max()))
    return _several(2 * np.exp(np.array([-2 * W.size * distance**2])), 1)
