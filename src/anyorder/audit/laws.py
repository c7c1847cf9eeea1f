"""Whether the noise that was released is the noise that was planned: tests of a run whose un-noised sums are known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, assert_never

import numpy as np
import scipy  # its statistics, which take half a second to load, are loaded where they are asked for
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, bdtrc, chdtr, chdtrc, ndtr

from anyorder import checks
from anyorder.accounting.amplification.secret_order import DrawLaw
from anyorder.audit.canaries import forward, whitener
from anyorder.audit.secret_steps import sampled_rule
from anyorder.errors import ArgumentError
from anyorder.patterns import Participation
from anyorder.strategy import Strategy, Tree
from anyorder.strategy.base import DENSE_STEPS
from anyorder.strategy.rescaled import Rescaled

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class NoiseLaw:
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

    def __or__(self, other: "NoiseLaw") -> "NoiseLaw":
        return NoiseLaw({**self.p_values, **other.p_values})


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
) -> NoiseLaw:
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
    std = checks.positive("noise_std", noise_std)
    rows, sums = (np.asarray(x, dtype=np.float64) for x in (released, totals))
    if rows.ndim != 2 or rows.shape != sums.shape or rows.shape[0] != strategy.n or rows.shape[1] < 2:
        raise ArgumentError(
            f"released and totals must both be (n, size) with n={strategy.n} and size at least 2, got shapes "
            f"{rows.shape} and {sums.shape}"
        )
    if not np.isfinite(rows).all():
        return NoiseLaw({"finite": 0.0})
    W = _white(rows * checks.positive("divisor", divisor) - sums, strategy) / std
    n, size = W.shape
    squares = np.square(W)
    pairs = {} if n > DENSE_STEPS else {"a row used again": _rows_used_again(W)}
    return NoiseLaw({
        "variance": _chi_squared(squares.sum(keepdims=True), n * size),
        "variance of a step": _chi_squared(squares.sum(1), size),
        "variance of a coordinate": _chi_squared(squares.sum(0), n),
        **pairs,
        "correlation": _correlation(W),
        "largest": _bonferroni_array(2 * ndtr(-np.abs(W).max(keepdims=True)), W.size),
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
) -> NoiseLaw:
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
        totals: (n, size) sums without noise where they are known. None: what canaries add is clip_norm at their steps.
        clip_norm: length of a canary in a sum.
    Returns: Law; every p-value is of a normal law, paid for the places where it looked.
    Cost: a pass over the rows, and O(n^2 count).
    Raises: ArgumentError if shapes do not fit, or no canary is included.
    """
    std, divisor = checks.positive("noise_std", noise_std), checks.positive("divisor", divisor)
    there = np.asarray(included, dtype=np.bool_)
    if there.ndim != 1 or len(steps) != len(there) or not there.any():
        raise ArgumentError(
            f"included must be (count,) draws, at least one of them true, and steps must name those of each canary; "
            f"got shape {there.shape} and {len(steps)} lists of steps"
        )
    there_at = participations(steps, strategy.n)[:, there]
    sums: Any = np.zeros(strategy.n) if totals is None else totals
    y = np.array([canaries.dot(np.asarray(row, np.float64) * divisor - own) for row, own in _rows(released, sums)])
    if len(y) != strategy.n or y.shape[1:] != there.shape:
        raise ArgumentError(f"there must be {strategy.n} rows and {len(there)} inner products, got shape {y.shape}")
    if not np.isfinite(y).all():
        return NoiseLaw({"finite": 0.0})
    y = y[:, there] - (clip_norm * there_at if totals is None else 0.0)
    A = whitener(strategy)
    Y = A @ y / std
    scores = (A.T @ Y) / np.linalg.norm(A, axis=0)[:, None]
    free = 1.0 - there_at  # 1 where the canary has nothing to do
    counts = there_at @ free.T
    pairs = (there_at @ (scores * free).T)[counts > 0] / np.sqrt(counts[counts > 0])
    return NoiseLaw({
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


def _bonferroni_array(p_values: Floats, times: int) -> float:
    """The smallest p-value of so many, paid for; what is below 1e-300 is rounded up."""
    return float(min(1.0, times * max(p_values.min(initial=1.0), LEAST)))


def _normal(scores: Floats) -> float:
    """Of the largest of some standard normals, on either side."""
    return _bonferroni_array(2 * ndtr(-np.abs(scores)), scores.size)


def _chi_squared(sums: Floats, degrees: int) -> float:
    """Of sums of so many squares, too small or too large."""
    return _bonferroni_array(2 * np.minimum(chdtr(degrees, sums), chdtrc(degrees, sums)), sums.size)


def _rows_used_again(W: Floats) -> float:
    first, second = np.triu_indices(len(W), 1)
    return _bonferroni_array(_products((W @ W.T)[first, second], W.shape[1]), len(first)) if len(first) else 1.0


def _correlation(W: Floats) -> float:
    """Of sum_{t, i} W[t, i] W[t + s, i + h] over all moves (s, h) != 0, half of which mirror the others."""
    n, size = W.shape
    spectrum = np.fft.rfft2(W, s=(2 * n, 2 * size))
    sums = np.fft.irfft2(np.square(np.abs(spectrum)), s=(2 * n, 2 * size))
    steps, moves = np.arange(n)[:, None], np.arange(1 - size, size)
    sums = sums[steps, moves]
    numbers = (n - steps) * (size - np.abs(moves))
    keep = (steps > 0) | (moves > 0)
    return _bonferroni_array(_products(sums[keep], numbers[keep]), int(keep.sum()))


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
    return _bonferroni_array(2 * np.exp(np.array([-2 * W.size * distance**2])), 1)


# ----------------------------------------------------------------------------------------------------
# Whether batches have the law of the draws that a claim rests on: tests of who was in which step.
#
# Amplification asks more of an order than that units come as often as planned: steps must be drawn by the law of the
# rule, for each unit by itself, and anew for each run. A bin that follows from the unit's number, a shuffle that is cut
# into batches, a bin drawn again in each epoch, or the draws of another run have batches that look well one by one.
#
# Who was in which step is as secret as the data: this is for tests of samplers, and for audits of runs that are thrown
# away. Every p-value is of an exact law, or a union bound of some.


Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]

_IMPOSSIBLE = NoiseLaw({"possible": 0.0})


def order_law(there: ArrayLike, participation: Participation, before: ArrayLike | None = None) -> NoiseLaw:
    """Whether a run's batches look drawn as an order draws them.

    - "possible": 0, alone, where the rule never gives such steps (one bin for a unit, its group, the distance ..).
    - "even": bins, or batches, that differ in size by too much or too little: a shuffle that is cut is too even.
    - "share": how many take part in all.
    - "next unit": units whose numbers lie 1, or b, apart share steps too often, too seldom, or at one distance.
    - "next round": a unit does in an epoch, or the next visit of its group, what it did in the one before.
    - "other run": as in the run before, whose draws were others.

    Args:
        there: (n, units) bools, who was in which step; units by their numbers.
        participation: the rule, of secret draws.
        before: the same of another run, with a key of its own.
    Returns: Law.
    Raises: ArgumentError for arrays that do not fit, or a rule without secret draws.
    Cost: O(n units), and for bins O(b units largest batch).

    Example:
        >>> from anyorder.participation import BallsInBins
        >>> rule = BallsInBins(k=3, b=4)
        >>> in_turn = np.arange(12)[:, None] % 4 == np.arange(200) % 4  # the bin of a unit is its number
        >>> order_law(in_turn, rule).p_value < 1e-6
        True
    """
    rule = sampled_rule(participation)
    runs = [np.asarray(x) for x in (there, before) if x is not None]
    for run in runs:
        if run.dtype != np.bool_ or run.ndim != 2 or run.shape != runs[0].shape or len(run) != rule.n:
            raise ArgumentError(
                f"there and before must be (n, units) bools of n={rule.n} steps, got {run.dtype} of shape {run.shape}"
            )
    if runs[0].shape[1] < 2:
        raise ArgumentError(f"there must be of two units or more, got {runs[0].shape[1]}")
    match rule.draw_law:
        case DrawLaw.ONE_BIN:
            return _chosen(runs, rule, again=False)
        case DrawLaw.BIN_EACH_EPOCH:
            return _chosen(runs, rule, again=True)
        case DrawLaw.EACH_STEP:
            return _drawn(runs, rule)
        case DrawLaw.CUT_BATCHES:
            return _truncated(runs, rule)
        case DrawLaw.SEPARATED:
            return _separated(runs, rule)
        case other:
            assert_never(other)


# -- one of b bins -----------------------------------------------------------------------------------------------------


def _chosen(runs: list[Bools], rule: Any, *, again: bool) -> NoiseLaw:
    """Differences of uniform choices along a chain of them are uniform and independent, modulo b."""
    found = []
    for run in runs:
        epochs = run.reshape(rule.k, rule.b, -1)
        bins = epochs.argmax(axis=1)
        if (epochs.sum(axis=1) != 1).any() or (not again and (bins != bins[0]).any()):
            return _IMPOSSIBLE
        found.append(bins if again else bins[:1])
    bins, b = found[0], rule.b
    p_values = {
        "even": _bonferroni([_evenness(np.bincount(own, minlength=b)) for own in bins]),
        "next unit": _bonferroni(
            [_uniform(bins[:, lag:] - bins[:, :-lag], b) for lag in {1, b} if lag < bins.shape[1]]
        ),
    }
    if len(bins) > 1:
        p_values["next round"] = _uniform(np.diff(bins, axis=0), b)
    if len(found) > 1:
        p_values["other run"] = _uniform(bins - found[1], b)
    return NoiseLaw(p_values)


def _uniform(differences: Integers, b: int) -> float:
    """Whether each of 0, .., b - 1 comes as often as it should, modulo b."""
    counts = np.bincount(differences.ravel() % b, minlength=b)
    return _bonferroni([_binomial(int(count), differences.size, 1 / b) for count in counts])


def _evenness(counts: Integers) -> float:
    """Each of b counts of a uniform choice, too large or too small; and the largest, too small by its law."""
    b, units, most = len(counts), int(counts.sum()), int(counts.max())
    uneven = _bonferroni([_binomial(int(count), units, 1 / b) for count in counts])
    fits = np.zeros(units + 1)  # of so many units, that no bin has more than most
    fits[0] = 1.0
    rest, inside = np.arange(units + 1)[:, None], np.arange(most + 1)
    for bins in range(1, b + 1):
        chances = scipy.stats.binom.pmf(inside, rest, 1 / bins)
        fits = (chances * np.where(rest >= inside, fits[np.maximum(rest - inside, 0)], 0.0)).sum(axis=1)
    return _bonferroni([uneven, float(fits[units])])


# -- a draw in each step -----------------------------------------------------------------------------------------------


def _groups(run: Bools, cycle: int) -> list[Bools]:
    """Of each group (its visits, its units)."""
    return [run[group::cycle, group::cycle] for group in range(cycle)]


def _outside(run: Bools, cycle: int) -> bool:
    """Whether anybody is in a step of another group."""
    return int(run.sum()) != sum(int(own.sum()) for own in _groups(run, cycle))


def _drawn(runs: list[Bools], rule: Any) -> NoiseLaw:
    q, cycle = rule.sampling_probability, rule.pattern.stride  # of the steps of one group
    if any(_outside(run, cycle) for run in runs):
        return _IMPOSSIBLE
    groups = _groups(runs[0], cycle)
    cells = sum(own.size for own in groups)
    p_values = {
        "share": _binomial(int(runs[0].sum()), cells, q),
        "even": _bonferroni([_even_batches(groups, q), *(_each(own.sum(axis=0), len(own), q) for own in groups)]),
        "next unit": _pairs([own[:, :-1:2] for own in groups], [own[:, 1::2] for own in groups], q),
        "next round": _pairs([own[:-1:2] for own in groups], [own[1::2] for own in groups], q),
    }
    if len(runs) > 1:
        p_values["other run"] = _pairs(groups, _groups(runs[1], cycle), q)
    return NoiseLaw(p_values)


def _pairs(first: Sequence[Bools], second: Sequence[Bools], q: float) -> float:
    """Draws that have nothing to do with each other, two by two: both fall with q^2."""
    pairs = sum(own.size for own in first)
    both = sum(int((one & other).sum()) for one, other in zip(first, second, strict=True))
    return _binomial(both, pairs, q * q) if pairs else 1.0


def _even_batches(groups: list[Bools], q: float) -> float:
    """The batch furthest from its mean: too far by a union bound, too near by the product over all batches."""
    sizes = [(int(size), own.shape[1]) for own in groups for size in own.sum(axis=1)]
    far = _bonferroni([_binomial(size, of, q) for size, of in sizes])
    most = max(abs(size - of * q) for size, of in sizes)
    near = 1.0
    for _, of in sizes:
        low, high = np.ceil(of * q - most), np.floor(of * q + most)
        near *= float(scipy.stats.binom.cdf(high, of, q) - scipy.stats.binom.cdf(low - 1, of, q))
    return _bonferroni([far, near])


def _each(counts: Integers, number: int, q: float) -> float:
    """Of each unit, how often it came."""
    return _bonferroni([_binomial(int(count), number, q) for count in counts]) if number and len(counts) else 1.0


# -- batches of a fixed size -------------------------------------------------------------------------------------------


def _truncated(runs: list[Bools], rule: Any) -> NoiseLaw:
    """Given the sizes of batches, who is in them is a uniform choice in each step, independent of the others."""
    groups = _groups(runs[0], rule.cycle)
    if any(_outside(run, rule.cycle) or (run.sum(axis=1) > rule.batch_size).any() for run in runs):
        return _IMPOSSIBLE
    if runs[0].shape[1] != rule.dataset_size:
        raise ArgumentError(f"there must be of dataset_size={rule.dataset_size} units, got {runs[0].shape[1]}")
    q, most = rule.sampling_probability, rule.batch_size
    full = [_binomial(int((own.sum(axis=1) == most).sum()), len(own), _full(own, most, q)) for own in groups]
    halves = [(own, np.broadcast_to(np.arange(own.shape[1]) < own.shape[1] // 2, own.shape)) for own in groups]
    p_values = {
        "share": _bonferroni(full),
        "next unit": _overlaps(halves),
        "next round": _overlaps([(own[:-1:2], own[1::2]) for own in groups]),
    }
    if len(runs) > 1:
        p_values["other run"] = _overlaps(list(zip(groups, _groups(runs[1], rule.cycle), strict=True)))
    return NoiseLaw(p_values)


def _full(group: Bools, most: int, q: float) -> float:
    """The probability of a full batch."""
    return float(scipy.stats.binom.sf(most - 1, group.shape[1], q))


def _overlaps(pairs: list[tuple[Bools, Bools]]) -> float:
    """How many are in both of two batches, over all pairs of them: a sum of hypergeometric numbers."""
    total, law = 0, np.ones(1)
    for first, second in pairs:
        for one, other in zip(first, second, strict=True):
            own = scipy.stats.hypergeom.pmf(
                np.arange(min(one.sum(), other.sum()) + 1), len(one), one.sum(), other.sum()
            )
            law = np.convolve(law, own)
            total += int((one & other).sum())
    return min(1.0, 2 * float(min(law[: total + 1].sum(), law[total:].sum())) + 1e-12)


# -- a distance between steps ------------------------------------------------------------------------------------------


def _separated(runs: list[Bools], rule: Any) -> NoiseLaw:
    n, b, p = rule.n, rule.b, rule.sampling_probability
    for run in runs:
        sums = np.concatenate([np.zeros((1, run.shape[1]), np.int64), run.cumsum(axis=0)])
        windows = sums[np.minimum(np.arange(n) + b, n)] - sums[:n]
        if (windows > 1).any():
            return _IMPOSSIBLE
    firsts = [np.where(run.any(axis=0), run.argmax(axis=0), n) for run in runs]
    law = _first_visits(rule)
    first, units, both = firsts[0], runs[0].shape[1], float(np.square(law).sum())
    returns = first[first + b < n]
    again = runs[0][returns + b, np.flatnonzero(first + b < n)]
    at_most = np.minimum(law.cumsum(), 1.0)
    p_values = {
        "share": _bonferroni([_binomial(int((first <= t).sum()), units, float(at_most[t])) for t in range(n)]),
        "next unit": _binomial(int((first[:-1:2] == first[1::2]).sum()), units // 2, both),
        "next round": _binomial(int(again.sum()), len(again), p),
    }
    if len(runs) > 1:
        p_values["other run"] = _binomial(int((first == firsts[1]).sum()), units, both)
    return NoiseLaw(p_values)


def _first_visits(rule: Any) -> Floats:
    """(n + 1,) the probability of each step to be a unit's first; of none, at the end."""
    n, b, p = rule.n, rule.b, rule.sampling_probability
    waits = np.zeros(max(n, b))
    waits[:b] = rule.marginal
    waits[0] = 1 - (b - 1) * rule.marginal
    if not rule.warm_start:
        waits[:] = np.arange(len(waits)) == 0
    law, waiting = np.zeros(n + 1), 0.0
    for t in range(n):
        waiting += waits[t]
        law[t] = waiting * p
        waiting *= 1 - p
    law[n] = max(0.0, 1 - law[:n].sum())
    return law


# -- p-values ----------------------------------------------------------------------------------------------------------


def _binomial(count: int, number: int, chance: float) -> float:
    """Two-sided."""
    chance = min(max(chance, 0.0), 1.0)
    low, high = bdtr(count, number, chance), bdtrc(count - 1, number, chance) if count else 1.0
    return max(min(1.0, 2 * float(min(low, high))), LEAST)


def _bonferroni(p_values: Sequence[float]) -> float:
    """The least, paid for as many (Bonferroni)."""
    return max(min(1.0, len(p_values) * min(p_values, default=1.0)), LEAST)
