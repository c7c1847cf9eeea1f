"""Who is in a step that secret coins decide: pure functions of a rule, a number of units, a key and the step."""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    MinSeparationSampling,
    Participation,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)

__all__ = ["Draws", "check_size", "rate_of"]

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]


@final
class Draws:
    """The units of each step of a secret order, among units of numbers 0, .., size - 1.

        PoissonSampling, CyclicPoisson   in, where a 32-bit word of (step, unit) is below q 2^32. Rounding q down to a
                                         multiple of 2^-32 is the private side
        TruncatedPoisson                 so with 64-bit words; of more than batch_size, those with the least further
                                         64-bit words stay, which is a uniform choice up to ties (2^-65 a pair)
        BallsInBins                      a bin for each unit, one uniform word of (0, unit), for the whole run
        RandomAllocation                 the same with a word of (epoch, unit)
        MinSeparationSampling            in, where it may come and a 64-bit word of (step, unit) is below p 2^64

    64-bit words make a coin exact for every probability from 2^-11 on that is a float, and within 2^-64 below: where no
    proof says that a smaller probability is the private side. Uniform choices of one of b are a word modulo b, and
    words at the end of the range, where a part of b is left, are drawn again: no bias at all. Warm starts are within
    2^-64 for each of the waits.

    Units are numbers: a place in a list, and no names. The groups of cyclic rules are number mod cycle.

    Where the source was renewed from a step on, coins of one step are fresh from there on, and allocations from the
    next epoch on. Bins stay, and so do the steps since which units of `MinSeparationSampling` wait: they are the
    run's, and to draw them anew would move units into steps that the rule does not allow.

    Args:
        rule: one of the six above.
        size: number of units.
        source: where the coins come from, derived from the run's key; as secret as the data. Its rows are steps.
    Raises: ArgumentError for another rule, or a size that is not the rule's own.
    Cost: of a step O(size) words and comparisons; of bins and allocations O(size log size) once, or once an epoch, and
        then what comes out. `MinSeparationSampling` goes from step to step: to jump ahead costs the steps between, and
        to go back all of them from 0 on, about 1.5 ns for each unit and step.
    """

    def __init__(self, rule: Participation, size: int, source: NoiseSource) -> None:
        self.rule, self.size = rule, check_size(rule, size)
        self._source = source
        self._epoch: tuple[int, list[Integers]] | None = None  # of which the units of each bin are known
        self._next: tuple[int, Integers] | None = None  # step, from which step on each unit may come
        match rule:
            case PoissonSampling() | CyclicPoisson():
                threshold_of(rule.sampling_probability, 32)
            case TruncatedPoisson() | MinSeparationSampling():
                threshold_of(rule.sampling_probability, 64)
            case BallsInBins() | RandomAllocation():
                pass
            case _:
                raise ArgumentError(f"participation must be drawn by secret coins, got {rule!r}")

    def step(self, t: int) -> Integers:
        """The units of step t, ascending, perhaps none; a fresh array."""
        t, rule = checks.integer("t", t, low=0), self.rule
        match rule:
            case PoissonSampling():
                return self._tossed(t, 1, rule.sampling_probability)
            case CyclicPoisson():
                return self._tossed(t, rule.cycle, rule.sampling_probability)
            case TruncatedPoisson():
                return self._truncated(t, rule)
            case BallsInBins():
                return self._in_bin(0, t % rule.b, rule.b, b"bins", self._source.own)
            case RandomAllocation():
                epoch, place = divmod(t, rule.b)
                return self._in_bin(epoch, place, rule.b, b"allocation", self._source.of(epoch * rule.b))
            case MinSeparationSampling():
                return self._separated(t, rule)
            case _:
                raise ArgumentError(f"participation must be drawn by secret coins, got {rule!r}")

    def _tossed(self, t: int, cycle: int, probability: float) -> Integers:
        group = np.arange(t % cycle, self.size, cycle)
        coins = self._source.derive(b"poisson").words(t, 0, len(group))
        return group[coins.astype(np.uint64) < threshold_of(probability, 32)]

    def _truncated(self, t: int, rule: TruncatedPoisson) -> Integers:
        group = np.arange(t % rule.cycle, self.size, rule.cycle)
        source = self._source.derive(b"truncated poisson")
        tossed = _below(_words(source, t, len(group)), rule.sampling_probability)
        ranks = _words(source.derive(b"choice"), t, len(group))  # also where none is left out: steps take equal time
        drawn = np.flatnonzero(tossed)
        kept = drawn[np.argsort(ranks[drawn], kind="stable")[: rule.batch_size]]
        return group[np.sort(kept)]

    def _in_bin(self, epoch: int, place: int, b: int, label: bytes, source: NoiseSource) -> Integers:
        if self._epoch is None or self._epoch[0] != epoch:
            bins = uniform(source.derive(label), epoch, self.size, b)
            order = np.argsort(bins, kind="stable")
            self._epoch = epoch, np.split(order, np.cumsum(np.bincount(bins, minlength=b))[:-1])
        return self._epoch[1][place].copy()

    def _separated(self, t: int, rule: MinSeparationSampling) -> Integers:
        source = self._source.derive(b"min separation")
        if self._next is None or self._next[0] > t:
            self._next = 0, _waits(source.own.derive(b"start"), self.size, rule)
        step, free = self._next
        self._next = None  # until it is whole again
        drawn = np.zeros(0, np.int64)
        for s in range(step, t + 1):
            tossed = _below(_words(source, s, self.size), rule.sampling_probability)
            drawn = np.flatnonzero(tossed & (free <= s))
            free[drawn] = s + rule.b
        self._next = t + 1, free
        return drawn


def check_size(rule: Participation, size: int) -> int:
    """The number of units, if a rule may have so many. Raises ArgumentError."""
    size = checks.integer("num_units", size, low=1)
    if type(rule) is TruncatedPoisson and size != rule.dataset_size:
        raise ArgumentError(
            f"num_units must be the order's dataset_size={rule.dataset_size}, which its claim counts on, got {size}"
        )
    return size


def rate_of(rule: Participation) -> float:
    """The expected part of the units that are drawn in a step, before batches are cut; in the long run."""
    match rule:
        case PoissonSampling():
            return rule.sampling_probability
        case CyclicPoisson() | TruncatedPoisson():
            return rule.sampling_probability / rule.cycle
        case BallsInBins() | RandomAllocation():
            return 1 / rule.b
        case MinSeparationSampling():
            return rule.marginal
        case _:
            raise ArgumentError(f"participation must be drawn by secret coins, got {rule!r}")


def threshold_of(probability: float, bits: int) -> int:
    """floor(probability 2^bits), above which no word of a coin that falls may lie. Raises ArgumentError for 0."""
    threshold = int(Fraction(probability) * 2**bits)
    if threshold == 0:
        raise ArgumentError(f"sampling_probability must be at least 2^-{bits}, got {probability!r}")
    return threshold


def uniform(source: NoiseSource, row: int, size: int, b: int) -> Integers:
    """(size,) independent uniform choices of 0, .., b - 1: exactly so for uniform words."""
    words = _words(source, row, size)
    last = 2**64 // b * b - 1  # behind it a part of b is left
    late = words > np.uint64(last)
    while late.any():
        source = source.derive(b"again")
        words = np.where(late, _words(source, row, size), words)
        late = words > np.uint64(last)
    return (words % np.uint64(b)).astype(np.int64)


def _waits(source: NoiseSource, size: int, rule: MinSeparationSampling) -> Integers:
    """From which step on each unit tosses coins: w = 1, .., b - 1 with probability p / (1 + (b - 1) p) each, else 0."""
    if not rule.warm_start:
        return np.zeros(size, np.int64)
    p = Fraction(rule.sampling_probability)
    width = int(2**64 * p / (1 + (rule.b - 1) * p))
    if rule.b == 1 or width == 0:
        return np.zeros(size, np.int64)
    found = _words(source, 0, size) // np.uint64(width) + np.uint64(1)
    return np.where(found < rule.b, found, np.uint64(0)).astype(np.int64)


def _words(source: NoiseSource, row: int, size: int) -> Words:
    """(size,) uniform 64-bit words."""
    return source.words(row, 0, 2 * size).view(np.uint64)


def _below(words: Words, probability: float) -> NDArray[np.bool_]:
    """Coins that fall with the probability."""
    return words <= np.uint64(threshold_of(probability, 64) - 1)
