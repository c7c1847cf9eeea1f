"""Noise in exact integers: X[t] = round(sigma (K Z)[t]), as if the normals Z and the combination were real numbers.

**Why rounded normals.** For integers m, m + round(sigma z) = round(m + sigma z): the release is the Gaussian mechanism
on m, rounded afterwards. So every guarantee of the real-valued mechanism holds as it stands, composed and adaptive,
for any K, and nothing is lost to a conversion; the discrete Gaussian of Canonne, Kamath and Steinke (2020) has a bound
by zCDP only, and needs integer K. What floats cannot do, and Mironov (2012) attacks, is to draw from the law of the
real number m + sigma z. Only its integer has to be right here.

**Normals.** Z[row, element] is a real number: it has a sign and a uniform v in (0, 1), and |Z| = t with 2 Q(t) = v,
Q(t) = Phi(-t). v has 575 bits. The first 63 and floats give t within an error that is bounded in `_estimate`.

**Rounding.** X is settled by the estimates unless their sum lies within its error of a half-integer, a few times in
10^7 for sigma = 10^6. Then all bits, and 200 digits, decide. The error bounds are generous, so X does not depend on
the machine.

**Exactness.** 575 bits in the place of infinitely many change an X with probability below 2^-500. Times all elements
of all steps this is far below the last digit of any delta, which is rounded up. K stands in float64, so sigma is taken
2^-30 larger: with K C = I + R as rounded, mu grows by at most the factor 1 + ||R||, and ||R|| is refused above 2^-31
where C is given in full (trees and banded inverses are far below). The bits come from ChaCha, as all of this package's
randomness.

**Layout**, final. Under the key `derive(b"discrete")`, w = word 2e + 2^32 word (2e + 1) of the raw words of the row:
bit 63 of w is set for negative Z, j = w mod 2^63. Under the key `derive(b"discrete, further")`, the words
16 e, .., 16 e + 15, most significant first, are an integer h. v = (j + (h + 1/2) 2^-512) 2^-63.
"""

import math
from collections.abc import Mapping
from decimal import ROUND_FLOOR, Context, Decimal, localcontext
from functools import cache
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from anyorder import checks
from anyorder.errors import PlanError
from anyorder.noise.stream import NoiseSource, check_saved, check_step_left
from anyorder.strategy import Strategy
from anyorder.strategy.base import Combination, Terms
from anyorder.strategy.registry import Structure, kind_of

__all__ = ["GridStream", "check_combination", "check_grid"]

Integers = NDArray[np.int64]

MAX_SIGMA = 2.0**32  # beyond, the estimates would leave too many elements undecided
MAX_RATIO = 2.0**31  # clip norm over grid: squares of integer vectors, and sums over 2^31 units, fit int64
MAX_RESIDUAL = 2.0**-31  # of K C = I: what the 2^-30 on sigma covers, with a half to spare
_KEPT = 64  # rows of Z that are kept for the next step: a tree's path, the bands of an inverse
_CHUNK = 2**16
_ERROR = 2.0**-44  # of a float estimate, over 1 + t: more than 100 times what scipy's ndtri and the rest err by
_DIGITS = 200
_FURTHER = 16  # words


class GridStream:
    """round(std / grid * (K Z)[t]) for t = 0, 1, .., n - 1, over the coordinates start, .., start + size - 1.

    Streams over disjoint ranges of coordinates make together what one stream over all of them makes.

    Args:
        strategy: a `Combination`: Independent, Tree, BandedInverse, SquareRoot, Dense.
        source: the run's; keys of its own are derived from it. One source serves one plan.
        std: noise standard deviation in gradient units.
        grid: a power of two, from std / 2^32 to std.
        size: number of coordinates.
        start: first coordinate.

    Cost: the rows of Z that the step before did not use, at five times the cost of `NoiseSource.normal` each, and
        12 bytes a coordinate for each row of a step, up to 64 of them; beyond, rows are made again.
    """

    def __init__(
        self, strategy: Strategy, source: NoiseSource, std: float, grid: float, size: int, *, start: int = 0
    ) -> None:
        check_combination(strategy)
        assert isinstance(strategy, Combination)
        self._strategy: Combination = strategy
        self._sigma = checks.real("std / grid", std / grid, low=1.0, high=MAX_SIGMA) * (1 + 2.0**-30)
        self._size = checks.integer("size", size, low=0)
        self._start = checks.integer("start", start, low=0, high=2**58 - self._size)
        self._source = source.derive(b"discrete")
        self._further = source.derive(b"discrete, further")
        self._saved_as = {
            "kind": f"grid of {type(strategy).__name__}", "n": strategy.n, "start": self._start, "size": self._size,
            "std": float(std), "grid": float(grid), "source": source.own.fingerprint(),
        }  # fmt: skip
        self._rows: dict[int, _Row] = {}
        self._t = 0

    @property
    def t(self) -> int:
        """Steps made so far: the step that `next` makes."""
        return self._t

    def next(self) -> Integers:
        """The noise of step t in grid steps, (size,) int64, a fresh array.

        Raises: StepsExhaustedError after n steps; nothing changes.
        """
        check_step_left(self._t, self._strategy.n)
        terms = self._strategy.terms(self._t)
        result, unsure = self._estimate(terms)
        for i in np.flatnonzero(unsure).tolist():
            result[i] = self._exact(terms, self._start + i)
        self._t += 1
        return result

    def _estimate(self, terms: Terms) -> tuple[Integers, NDArray[np.bool_]]:
        """The rounded float sum, and where it is not certain."""
        total, error = np.zeros(self._size), np.zeros(self._size)
        keep = len(terms.rows) <= _KEPT
        rows: dict[int, _Row] = {}
        for r, coefficient in zip(terms.rows.tolist(), terms.coefficients.tolist(), strict=True):
            row = self._rows.get(r) or rows.get(r) or self._row(r)
            if keep:
                rows[r] = row
            total += self._sigma * coefficient * row.z
            error += self._sigma * abs(coefficient) * row.error
        self._rows = rows
        error *= 1 + len(terms.rows) * 2.0**-7  # the rounding of the sum itself, 2^-52 a term, against 2^-44
        nearest = np.rint(total)
        return nearest.astype(np.int64), ~(0.5 - np.abs(total - nearest) > error)  # an error of 0 * inf is no number

    def _row(self, row: int) -> "_Row":
        z, error = np.empty(self._size), np.empty(self._size, np.float32)
        for first in range(0, self._size, _CHUNK):
            last = min(first + _CHUNK, self._size)
            words = self._source.words(row, 2 * (self._start + first), 2 * (self._start + last)).astype(np.uint64)
            z[first:last], error[first:last] = _estimate(words[0::2] | words[1::2] << np.uint64(32))
        return _Row(z, error)

    def _exact(self, terms: Terms, element: int) -> int:
        """round(sigma * sum of coefficients and normals of one element) with all bits and digits."""
        with _digits():
            total = Decimal(0)
            for r, coefficient in zip(terms.rows.tolist(), terms.coefficients.tolist(), strict=True):
                total += Decimal(coefficient) * self._normal(r, element)
            return int((Decimal(self._sigma) * total + Decimal("0.5")).to_integral_value(ROUND_FLOOR))

    def _normal(self, row: int, element: int) -> Decimal:
        """Z[row, element] to nearly all digits of the context."""
        low, high = self._source.words(row, 2 * element, 2 * element + 2).tolist()
        v = high % 2**31 << 32 | low
        for word in self._further.words(row, _FURTHER * element, _FURTHER * (element + 1)).tolist():
            v = v << 32 | word
        t = _quantile(Decimal(2 * v + 1) / Decimal(2 ** (64 + 32 * _FURTHER)))
        return -t if high >> 31 else t

    def state_dict(self) -> dict[str, Any]:
        """Numbers and words that `load_state_dict` resumes from, bit for bit. Never holds the key."""
        return self._saved_as | {"t": self._t, "state": []}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises: CheckpointError if it is of another stream, or malformed; nothing changes.
        """
        self._t = check_saved(saved, self._saved_as, self._strategy.n)


class _Row(NamedTuple):
    """Estimates of a row of Z, and bounds of their errors."""

    z: NDArray[np.float64]
    error: NDArray[np.float32]


def _estimate(w: NDArray[np.uint64]) -> _Row:
    """Z from its first 64 bits.

    The bits that are not known move v by at most 2^-64 from the middle, and t by 2^-64 / (2 phi(t)) < 1 / j, since
    v = 2 Q(t) <= 2.51 phi(t) for t >= 0. With j = 0 nothing bounds t, hence the infinite error.
    """
    j = (w & np.uint64(2**63 - 1)).astype(np.float64)
    t = -ndtri((j + 0.5) * 2.0**-64)
    with np.errstate(divide="ignore"):
        error = (_ERROR * (1 + t) + 1 / j) * (1 + 2.0**-20)  # float32 must not round it down
    return _Row(np.where(w >> np.uint64(63), -t, t), error.astype(np.float32))


def _quantile(v: Decimal) -> Decimal:
    """The t with 2 Q(t) = v, by Newton's method: floats give 15 digits, and each step doubles them."""
    t = Decimal(-float(ndtri(float(v) / 2)))
    for _ in range(4):
        density = (-t * t / 2).exp() / _root_two_pi()
        t += (_tail(t) - v / 2) / density
    return t


def _tail(t: Decimal) -> Decimal:
    """Q(t) = 1/2 - phi(t) (t + t^3 / 3 + t^5 / (3 5) + ..), to nearly all digits after the point."""
    term = total = t
    square, odd = t * t, 1
    while abs(term) > abs(total).scaleb(-_DIGITS):
        odd += 2
        term = term * square / odd
        total += term
    return Decimal("0.5") - (-square / 2).exp() * total / _root_two_pi()


@cache
def _root_two_pi() -> Decimal:
    """sqrt(2 pi), pi by Machin: 16 arctan(1/5) - 4 arctan(1/239), in integers with ten guard digits."""
    one = 10 ** (_DIGITS + 10)

    def arctan_of_inverse(x: int) -> int:
        total, power, odd = 0, one // x, 1
        while power:
            total += power // odd if odd % 4 == 1 else -(power // odd)
            power, odd = power // (x * x), odd + 2
        return total

    pi = 16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)
    with _digits():
        return (2 * Decimal(pi) / Decimal(one)).sqrt()


def _digits() -> Any:
    return localcontext(Context(prec=_DIGITS))


# -- which plans -----------------------------------------------------------------------------------------------------


def check_combination(strategy: Strategy) -> None:
    """Raise PlanError, with the reason, for a strategy whose noise cannot be rounded as a real number."""
    structure = kind_of(strategy).structure
    match structure:
        case Structure.IDENTITY | Structure.TOEPLITZ | Structure.TREE:
            pass
        case Structure.DENSE:
            residual = float(np.linalg.norm(strategy.noising_matrix() @ strategy.matrix() - np.eye(strategy.n)))
            if not residual <= MAX_RESIDUAL:
                raise PlanError(
                    f"exact integers need K C = I to 2^-31 in numbers as they are rounded, got {residual:.1e}: this C "
                    "is too ill-conditioned"
                )
        case (
            Structure.TOEPLITZ_BANDED | Structure.BUFFERED | Structure.BANDED | Structure.LOW_RANK
            | Structure.RESTARTED | Structure.RESCALED
        ):  # fmt: skip
            raise PlanError(
                "exact integers (grid, secure) need a strategy whose noise is at each step a combination of rows of Z, "
                "to be computed to any precision, as those of 'tree' and 'banded inverse' are; the noise of "
                f"{type(strategy).__name__} is a recurrence in floating point, whose rounding errors stay in its state"
            )
        case _:
            assert_never(structure)


def check_grid(grid: float, clip_norm: float, noise_std: float) -> None:
    """Raise PlanError unless grid is a power of two that int64 sums and the sampler can carry."""
    grid = checks.positive("grid", grid)
    if math.frexp(grid)[0] != 0.5 or not 2.0**-100 <= grid <= 2.0**100:
        raise PlanError(
            f"grid must be a power of two from 2^-100 to 2^100, so that float32 divides by it exactly, got {grid!r}"
        )
    if not 1 <= clip_norm / grid <= MAX_RATIO:
        raise PlanError(f"grid must be from clip_norm / 2^31 to clip_norm = {clip_norm:g}, got {grid!r}")
    if not 1 <= noise_std / grid <= MAX_SIGMA:
        raise PlanError(f"grid must be from noise_std / 2^32 to noise_std = {noise_std:g}, got {grid!r}")
