"""Whether batches have the law of the coins that a claim rests on: tests of who was in which step.

Amplification asks more of an order than that units come as often as planned: steps must be drawn by the law of the
rule, for each unit by itself, and anew for each run. A bin that follows from the unit's number, a shuffle that is cut
into batches, a bin drawn anew in each epoch, or the coins of another run have batches that look well one by one.

Who was in which step is as secret as the data: this is for tests of samplers, and for audits of runs that are thrown
away. Every p-value is of an exact law, or a union bound of some.
"""

from collections.abc import Sequence
from typing import assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, bdtrc
from scipy.stats import binom, hypergeom

from anyorder.audit.noise_law import LEAST, Law
from anyorder.audit.secret_steps import sampled_rule
from anyorder.errors import ArgumentError
from anyorder.participation import Participation
from anyorder.participation.sampled import (
    BallsInBins,
    CyclicPoisson,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)

__all__ = ["order_law"]

Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_IMPOSSIBLE = Law({"possible": 0.0})


def order_law(there: ArrayLike, participation: Participation, before: ArrayLike | None = None) -> Law:
    """Whether a run's batches look drawn by the coins of a rule.

    - "possible": 0, alone, where the rule never gives such steps (one bin for a unit, its group, the distance ..).
    - "even": bins, or batches, that differ in size by too much or too little: a shuffle that is cut is too even.
    - "share": how many take part in all.
    - "next unit": units whose numbers lie 1, or b, apart share steps too often, too seldom, or at one distance.
    - "next round": a unit does in an epoch, or the next visit of its group, what it did in the one before.
    - "other run": as in the run before, whose coins were others.

    Args:
        there: (n, units) bools, who was in which step; units by their numbers.
        participation: the rule, of secret coins.
        before: the same of another run, with a key of its own.
    Returns: Law.
    Raises: ArgumentError for arrays that do not fit, or a rule without secret coins.
    Cost: O(n units), and for bins O(b units largest batch).

    Example:
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
    match rule:
        case BallsInBins() | RandomAllocation():
            return _chosen(runs, rule)
        case PoissonSampling() | CyclicPoisson():
            return _tossed(runs, rule)
        case TruncatedPoisson():
            return _truncated(runs, rule)
        case MinSeparationSampling():
            return _separated(runs, rule)
        case _:
            assert_never(rule)


# -- one of b bins -----------------------------------------------------------------------------------------------------


def _chosen(runs: list[Bools], rule: BallsInBins | RandomAllocation) -> Law:
    """Differences of uniform choices along a chain of them are uniform and independent, modulo b."""
    found = []
    for run in runs:
        epochs = run.reshape(rule.k, rule.b, -1)
        bins = epochs.argmax(axis=1)
        fixed = type(rule) is BallsInBins
        if (epochs.sum(axis=1) != 1).any() or (fixed and (bins != bins[0]).any()):
            return _IMPOSSIBLE
        found.append(bins[:1] if fixed else bins)
    bins, b = found[0], rule.b
    p_values = {
        "even": _several([_evenness(np.bincount(own, minlength=b)) for own in bins]),
        "next unit": _several([_uniform(bins[:, lag:] - bins[:, :-lag], b) for lag in {1, b} if lag < bins.shape[1]]),
    }
    if len(bins) > 1:
        p_values["next round"] = _uniform(np.diff(bins, axis=0), b)
    if len(found) > 1:
        p_values["other run"] = _uniform(bins - found[1], b)
    return Law(p_values)


def _uniform(differences: Integers, b: int) -> float:
    """Whether each of 0, .., b - 1 comes as often as it should, modulo b."""
    counts = np.bincount(differences.ravel() % b, minlength=b)
    return _several([_binomial(int(count), differences.size, 1 / b) for count in counts])


def _evenness(counts: Integers) -> float:
    """Each of b counts of a uniform choice, too large or too small; and the largest, too small by its law."""
    b, units, most = len(counts), int(counts.sum()), int(counts.max())
    uneven = _several([_binomial(int(count), units, 1 / b) for count in counts])
    fits = np.zeros(units + 1)  # of so many units, that no bin has more than most
    fits[0] = 1.0
    rest, inside = np.arange(units + 1)[:, None], np.arange(most + 1)
    for bins in range(1, b + 1):
        chances = binom.pmf(inside, rest, 1 / bins)
        fits = (chances * np.where(rest >= inside, fits[np.maximum(rest - inside, 0)], 0.0)).sum(axis=1)
    return _several([uneven, float(fits[units])])


# -- a coin in each step -----------------------------------------------------------------------------------------------


def _groups(run: Bools, cycle: int) -> list[Bools]:
    """Of each group (its visits, its units)."""
    return [run[group::cycle, group::cycle] for group in range(cycle)]


def _outside(run: Bools, cycle: int) -> bool:
    """Whether anybody is in a step of another group."""
    return int(run.sum()) != sum(int(own.sum()) for own in _groups(run, cycle))


def _tossed(runs: list[Bools], rule: PoissonSampling | CyclicPoisson) -> Law:
    q, cycle = rule.sampling_probability, rule.cycle if isinstance(rule, CyclicPoisson) else 1
    if any(_outside(run, cycle) for run in runs):
        return _IMPOSSIBLE
    groups = _groups(runs[0], cycle)
    cells = sum(own.size for own in groups)
    p_values = {
        "share": _binomial(int(runs[0].sum()), cells, q),
        "even": _several([_even_batches(groups, q), *(_each(own.sum(axis=0), len(own), q) for own in groups)]),
        "next unit": _pairs([own[:, :-1:2] for own in groups], [own[:, 1::2] for own in groups], q),
        "next round": _pairs([own[:-1:2] for own in groups], [own[1::2] for own in groups], q),
    }
    if len(runs) > 1:
        p_values["other run"] = _pairs(groups, _groups(runs[1], cycle), q)
    return Law(p_values)


def _pairs(first: Sequence[Bools], second: Sequence[Bools], q: float) -> float:
    """Coins that have nothing to do with each other, two by two: both fall with q^2."""
    pairs = sum(own.size for own in first)
    both = sum(int((one & other).sum()) for one, other in zip(first, second, strict=True))
    return _binomial(both, pairs, q * q) if pairs else 1.0


def _even_batches(groups: list[Bools], q: float) -> float:
    """The batch furthest from its mean: too far by a union bound, too near by the product over all batches."""
    sizes = [(int(size), own.shape[1]) for own in groups for size in own.sum(axis=1)]
    far = _several([_binomial(size, of, q) for size, of in sizes])
    most = max(abs(size - of * q) for size, of in sizes)
    near = 1.0
    for _, of in sizes:
        low, high = np.ceil(of * q - most), np.floor(of * q + most)
        near *= float(binom.cdf(high, of, q) - binom.cdf(low - 1, of, q))
    return _several([far, near])


def _each(counts: Integers, number: int, q: float) -> float:
    """Of each unit, how often it came."""
    return _several([_binomial(int(count), number, q) for count in counts]) if number and len(counts) else 1.0


# -- batches of a fixed size -------------------------------------------------------------------------------------------


def _truncated(runs: list[Bools], rule: TruncatedPoisson) -> Law:
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
        "share": _several(full),
        "next unit": _overlaps(halves),
        "next round": _overlaps([(own[:-1:2], own[1::2]) for own in groups]),
    }
    if len(runs) > 1:
        p_values["other run"] = _overlaps(list(zip(groups, _groups(runs[1], rule.cycle), strict=True)))
    return Law(p_values)


def _full(group: Bools, most: int, q: float) -> float:
    """The probability of a full batch."""
    return float(binom.sf(most - 1, group.shape[1], q))


def _overlaps(pairs: list[tuple[Bools, Bools]]) -> float:
    """How many are in both of two batches, over all pairs of them: a sum of hypergeometric numbers."""
    total, law = 0, np.ones(1)
    for first, second in pairs:
        for one, other in zip(first, second, strict=True):
            own = hypergeom.pmf(np.arange(min(one.sum(), other.sum()) + 1), len(one), one.sum(), other.sum())
            law = np.convolve(law, own)
            total += int((one & other).sum())
    return min(1.0, 2 * float(min(law[: total + 1].sum(), law[total:].sum())) + 1e-12)


# -- a distance between steps ------------------------------------------------------------------------------------------


def _separated(runs: list[Bools], rule: MinSeparationSampling) -> Law:
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
        "share": _several([_binomial(int((first <= t).sum()), units, float(at_most[t])) for t in range(n)]),
        "next unit": _binomial(int((first[:-1:2] == first[1::2]).sum()), units // 2, both),
        "next round": _binomial(int(again.sum()), len(again), p),
    }
    if len(runs) > 1:
        p_values["other run"] = _binomial(int((first == firsts[1]).sum()), units, both)
    return Law(p_values)


def _first_visits(rule: MinSeparationSampling) -> Floats:
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


def _several(p_values: Sequence[float]) -> float:
    """The least, paid for as many (Bonferroni)."""
    return max(min(1.0, len(p_values) * min(p_values, default=1.0)), LEAST)
