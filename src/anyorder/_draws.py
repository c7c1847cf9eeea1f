"""Who is in a step that is drawn in secret: pure functions of an order, a number of units, a key and the step.

Each order makes its own draws (`units_of`, in its file); what they share is here.
"""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.accounting.amplification.secret_order import SecretOrder, UnitsOf
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource
from anyorder.patterns import Participation

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Words = NDArray[np.uint64]


@final
class Draws:
    """The units of each step of a secret order, among units of numbers 0, .., size - 1.

    64-bit words make a draw exact for every probability from 2^-11 on that is a float, and within 2^-64 below: where no
    proof says that a smaller probability is the private side. Uniform choices of one of b are a word modulo b, and
    words at the end of the range, where a part of b is left, are drawn again: no bias at all.

    Units are numbers: a place in a list, and no names. The groups of cyclic orders are number mod cycle.

    Where the source was renewed from a step on, draws of one step are fresh from there on, and allocations from the
    next epoch on. What decides the whole run stays, such as bins: to draw it anew would move units into steps that the
    order does not allow.

    Args:
        rule: an order with secret draws.
        size: number of units.
        source: where the draws come from, derived from the run's key; as secret as the data. Its rows are steps.
        rates: (size,) the probability of each unit in each step, none above the order's: of Poisson sampling alone.
    Raises: ArgumentError for another order, a size that is not the order's own, or rates that the order does not hold.
    Cost: of a step O(size) words and comparisons; of bins and allocations O(size log size) once, or once an epoch, and
        then what comes out. `MinSeparationSampling` goes from step to step: to jump ahead costs the steps between, and
        to go back all of them from 0 on, about 1.5 ns for each unit and step.
    """

    def __init__(self, rule: Participation, size: int, source: NoiseSource, rates: Floats | None = None) -> None:
        self.rule = _secret(rule)
        self.size = self.rule.check_size(size)
        self._source = source
        if rates is None:
            self._units_of = self.rule.units_of(self.size, source)
        else:
            _check_rates(self.rule, rates)
            self._units_of = tossed(self.size, source, 1, rates)

    def step(self, t: int) -> Integers:
        """The units of step t, ascending, perhaps none; a fresh array."""
        return self._units_of(checks.integer("t", t, low=0))


def _check_rates(rule: Participation, rates: Floats) -> None:
    """Raise ArgumentError unless the claim of the order holds for units of these rates.

    A unit that is in a step with probability p <= q loses no more there than at q. Let Q be the law of the step without
    it and P with it. At p the law is (1 - p) Q + p P = (1 - p/q) Q + p/q M, where M = (1 - q) Q + q P is that at q.
    Hockey-stick divergences H are jointly convex and H(Q, Q) is the least there is, so H(that, Q) <= H(M, Q), and in
    the other direction too. Steps that are dominated one by one compose [Zhu et al. 2022, Theorem 10].
    """
    most = rule.draw_probability
    if most is None:
        raise ArgumentError(f"rates of single units are for Poisson sampling, got {rule.describe()}")
    if rates.max() > most:
        raise ArgumentError(f"rates must be at most sampling_probability={most!r}, which the claim is for")


def check_size(rule: Participation, size: int) -> int:
    """The number of units, if an order with secret draws may have so many. Raises: ArgumentError."""
    return _secret(rule).check_size(size)


def _secret(rule: Participation) -> SecretOrder:
    if not isinstance(rule, SecretOrder):
        raise ArgumentError(f"participation must be drawn in secret, got {rule!r}")
    return rule


def tossed(size: int, source: NoiseSource, cycle: int, probability: float | Floats) -> UnitsOf:
    """Each unit of the step's group is in where a 32-bit word of (step, unit) is below probability 2^32.

    Rounding the probability down to a multiple of 2^-32 is the private side.

    Args:
        probability: of all units; or (size,) of each, in one group.
    """
    source = source.derive(b"poisson")
    threshold: Words | np.uint64
    if isinstance(probability, np.ndarray):
        threshold = np.floor(probability * 2.0**32).astype(np.uint64)  # exact: of a product by a power of two
    else:
        threshold = np.uint64(threshold_of(probability, 32))

    def step(t: int) -> Integers:
        group = np.arange(t % cycle, size, cycle)
        return group[source.words(t, 0, len(group)).astype(np.uint64) < threshold]

    return step


def in_bins(bins: Integers, b: int) -> list[Integers]:
    """The units of each of b bins, ascending."""
    order = np.argsort(bins, kind="stable")
    return np.split(order, np.cumsum(np.bincount(bins, minlength=b))[:-1])


def threshold_of(probability: float, bits: int) -> int:
    """floor(probability 2^bits), below which the word of a draw takes a unit. Raises ArgumentError for 0."""
    threshold = int(Fraction(probability) * 2**bits)
    if threshold == 0:
        raise ArgumentError(f"sampling_probability must be at least 2^-{bits}, got {probability!r}")
    return threshold


def uniform(source: NoiseSource, row: int, size: int, b: int) -> Integers:
    """(size,) independent uniform choices of 0, .., b - 1: exactly so for uniform words."""
    drawn = words(source, row, size)
    last = 2**64 // b * b - 1  # behind it a part of b is left
    late = drawn > np.uint64(last)
    while late.any():
        source = source.derive(b"again")
        drawn = np.where(late, words(source, row, size), drawn)
        late = drawn > np.uint64(last)
    return (drawn % np.uint64(b)).astype(np.int64)


def words(source: NoiseSource, row: int, size: int) -> Words:
    """(size,) uniform 64-bit words."""
    return source.words(row, 0, 2 * size).view(np.uint64)


def below(drawn: Words, probability: float) -> NDArray[np.bool_]:
    """Draws that take with the probability."""
    return drawn <= np.uint64(threshold_of(probability, 64) - 1)


# ----------------------------------------------------------------------------------------------------
# The same law for an audit's canaries, which have draws of their own, and their likelihoods.


def uniforms(source: NoiseSource, rows: int, count: int) -> Floats:
    """(rows, count) numbers in [0, 1), multiples of 2^-53."""
    drawn = np.stack([source.words(row, 0, 2 * count).view(np.uint64) for row in range(rows)])
    return np.asarray((drawn >> np.uint64(11)) * 2.0**-53)


def uniform_integers(source: NoiseSource, rows: int, count: int, number: int) -> Integers:
    """(rows, count) integers from 0 to number - 1."""
    return np.floor(uniforms(source, rows, count) * number).astype(np.int64)


def tossed_ratios(exponents: Floats, q: Floats | float) -> Floats:
    """log(1 - q + q e^x), of a draw for each step and canary."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-np.asarray(q)), np.log(q) + exponents))
