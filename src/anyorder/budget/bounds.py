"""Epsilon of a search that makes K runs, K from a public law, and shows the best: from the privacy profile of one run.

With Q the run's outputs, best first, w the chance of a run to be better than one at hand, and `weight` of the law,

    the search shows  A(dy) = Q(dy) weight(w(y)),  and for a neighbour  A'(dy) = Q'(dy) weight(w'(y)).

w' is at most G(w), the most that a set of chance w can have under Q'. So, for any run with profile delta(.),

    delta_search(eps) <= sum over k of (h_k - h_(k-1)) delta(eps - ln slope_k)

with (c_k, h_k) the corners of the concave hull of the points (weight(G(w)), weight(w)), 0 <= w <= 1, from (0, 0) up,
and slope_k of its edges. docs/tuning.md proves it, and that no Rényi bound of the same shape is below it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder._closed import final
from anyorder.accounting.amplification.methods import MonteCarlo
from anyorder.accounting.curves import Amplified, Curve, Gaussian, compose
from anyorder.budget.laws import Fixed, Law, Secret, weight
from anyorder.budget.renyi import renyi_search_epsilon
from anyorder.errors import ArgumentError

__all__ = ["calibrate_search", "repeated", "search_delta", "search_epsilon"]

Floats = NDArray[np.float64]

_BOUNDS = ("least", "profile", "renyi")
_UP = 1 + 1e-12  # a hundred times the rounding of a weight
_LARGEST = 690.0  # epsilon whose exponential is a number
_CELLS = 2000  # of the chances w by their size, and as many evenly
_TOLERANCE = 1e-6  # of epsilon, of a calibration; the issue of a table of the profile is 1e-5
_KNOTS = {True: (1200, 200), False: (240, 40)}  # of a profile that is a formula, or a sum over a loss distribution


def search_delta(law: Law, curve: Curve, epsilon: float) -> float:
    """A delta at which a whole search keeps epsilon, at or above the smallest; see `search_epsilon`.

    Args:
        law: of the number of runs.
        curve: of one run, with its score where that is noisy.
        epsilon: not negative.
    Returns: delta in [0, 1].
    Raises: ArgumentError.

    Example:
        >>> from anyorder.budget import Geometric
        >>> round(search_delta(Geometric(50), Gaussian(1.0), 8.2567), 7)
        1e-06
    """
    epsilon = _check.real("epsilon", epsilon, low=0.0)
    _check_whole(curve)
    if isinstance(law, Fixed):
        return repeated(curve, law.runs).delta(epsilon)
    alone = curve.delta(epsilon)
    if alone == 0:
        return 0.0 if curve.mu == 0 else _profile(law, curve, 1e-280).delta(epsilon)
    return _profile(law, curve, alone).delta(epsilon)


def search_epsilon(law: Law, curve: Curve, delta: float, bound: str = "least") -> float:
    """The epsilon of a whole search, at or above the smallest that holds at delta.

    The search draws K from the law, makes K independent runs, each of settings drawn afresh from one public
    distribution, and shows the best: its output and settings, not K, and nothing of the others. Every run has this
    curve, whatever its settings. The order of "best" is that of a score which is part of the run's output, or a
    function of it and of public data; ties are broken by coins, or by which came first. `Fixed` shows every run, and is
    the composition of the runs; any score may then choose among them.

    Valid for every mechanism with this curve, both directions of neighbours. docs/tuning.md shows a mechanism that
    comes near. Neighbours and unit are those of the curve.

    Args:
        law: of the number of runs.
        curve: of one run, with its score where that is noisy: compose(run.curve, score_curve).
        delta: strictly between 0 and 1.
        bound: "profile", of the privacy profile; "renyi", of Rényi divergences, as papers print it; or "least", the
            smaller of these two. `Fixed` has its composition alone.
    Returns: epsilon, infinity where none is found, as may be above 690.
    Cost: 0.1 s for a Gaussian curve; for others, up to 300 times that of curve.delta.
    Raises: ArgumentError.

    Example:
        >>> from anyorder.budget import Geometric
        >>> round(search_epsilon(Geometric(50), Gaussian(1.0), 1e-6), 3), round(Gaussian(1.0).epsilon(1e-6), 3)
        (8.253, 4.887)
    """
    delta = _check.probability("delta", delta)
    _check.choice("bound", bound, _BOUNDS)
    _check_whole(curve)
    if isinstance(law, Fixed):
        return repeated(curve, law.runs).epsilon(delta)
    if curve.mu == 0:
        return 0.0
    by_profile = _profile(law, curve, delta).epsilon(delta) if bound != "renyi" else math.inf
    by_renyi = renyi_search_epsilon(law, curve, delta) if bound != "profile" else math.inf
    return min(by_profile, by_renyi)


def _check_whole(curve: Curve) -> None:
    """Raise ArgumentError for what holds for one delta alone: a search asks for the run's whole curve."""
    if type(curve) is Amplified and type(curve.method) is MonteCarlo:
        raise ArgumentError(
            "curve must not be found by samples, which hold for one delta of one release, and a search needs the whole "
            "curve of a run: plan with method='bound'"
        )


def calibrate_search(
    law: Law, epsilon: float, delta: float, make_curve: Callable[[float], Curve] = Gaussian
) -> float:  # fmt: skip
    """The largest mu of one run for which the whole search keeps (epsilon, delta).

    Args:
        law: of the number of runs.
        epsilon: above 0, of the search.
        delta: strictly between 0 and 1.
        make_curve: mu -> the curve of one run, which tells more where mu is larger; Gaussian(mu) unless given. For
            sampled sums: lambda mu: Sampled(1 / mu, q, n).
    Returns: mu: search_epsilon(law, make_curve(mu), delta) is at most epsilon, and within 1e-4 of it.
    Cost: that of about fifteen calls of `search_epsilon`.
    Raises: ArgumentError where no mu from 1e-9 to 10^6 keeps epsilon, or even the largest does.

    Example:
        >>> from anyorder.budget import Geometric
        >>> mu = calibrate_search(Geometric(50), 8.0, 1e-6)
        >>> round(mu, 3), round(search_epsilon(Geometric(50), Gaussian(mu), 1e-6), 3)
        (0.971, 8.0)
    """
    epsilon, delta = _check.positive("epsilon", epsilon), _check.probability("delta", delta)

    def over(log_mu: float) -> float:
        """The logarithm of how far over epsilon the search is, cut."""
        found = search_epsilon(law, make_curve(math.exp(log_mu)), delta)
        return math.log(min(max(found / epsilon, 1e-3), 1e3))

    inside, outside = math.log(1e-9), math.log(1e6)
    start = math.log(epsilon / 10)
    inside_over = outside_over = math.nan
    step = 0.5
    at = min(max(start, inside), outside)
    while True:  # to both sides until the target lies between
        here = over(at)
        if here <= 0:
            inside, inside_over = at, here
        else:
            outside, outside_over = at, here
        if not math.isnan(inside_over) and not math.isnan(outside_over):
            break
        if at in (math.log(1e-9), math.log(1e6)):
            raise ArgumentError(f"no mu from 1e-9 to 1e6 gives epsilon={epsilon:g} at delta={delta:g} with {law!r}")
        at = min(at + step, math.log(1e6)) if here <= 0 else max(at - step, math.log(1e-9))
        step *= 2
    return math.exp(_last_inside(over, inside, outside, inside_over, outside_over))


def _last_inside(
    over: Callable[[float], float], inside: float, outside: float, low: float, high: float
) -> float:  # fmt: skip
    """A point where `over` is not above 0 but within the tolerance of it, by the rule of false position, halved."""
    for turn in range(100):
        if low > -_TOLERANCE or abs(outside - inside) < 1e-12:
            break
        share = 0.5 if turn % 3 == 2 else min(max((-low - _TOLERANCE / 2) / (high - low), 1e-3), 1 - 1e-3)
        at = inside + share * (outside - inside)
        here = over(at)
        if here <= 0:
            inside, low = at, here
        else:
            outside, high = at, here
    return inside


@final
@dataclass(frozen=True)
class _Profile:
    """delta_search(eps) <= sum of rises delta(eps - shifts), delta(.) of one run by a table."""

    rises: Floats
    shifts: Floats
    knots: Floats
    deltas: Floats

    def delta(self, epsilon: float) -> float:
        return min(1.0, float(self.rises @ self._one(epsilon - self.shifts)) * (1 + 1e-9))

    def epsilon(self, delta: float) -> float:
        low, high = 0.0, 1.0
        if self.delta(0.0) <= delta:
            return 0.0
        while self.delta(high) > delta:
            low, high = high, 2 * high
            if high > 1e6:
                return math.inf
        while high - low > 1e-10 * high:
            middle = (low + high) / 2
            if self.delta(middle) <= delta:
                high = middle
            else:
                low = middle
        return high

    def _one(self, at: Floats) -> Floats:
        """Of one run: convex in e^eps, so a chord between knots is above; below 0 by the other direction."""
        size = np.minimum(np.abs(at), _LARGEST)
        found = np.interp(np.exp(size), np.exp(self.knots), self.deltas)  # beyond the last knot: that of the last
        return np.where(at >= 0, found, np.minimum(1.0, 1 - np.exp(np.minimum(at, 0.0)) * (1 - found) + 1e-15))


def _profile(law: Secret, curve: Curve, delta: float) -> _Profile:
    """The bound, with a table of the run's profile that is fine where a search's delta is near this one."""
    knots, deltas = _table(curve, delta / float(weight(law, 0.0)[0]))
    kept, own = _points(law, *_most(knots, deltas), float(knots[-1]))
    corners = _hull(kept, own)
    rises, runs = np.diff(corners[:, 1]), np.diff(corners[:, 0])
    with np.errstate(divide="ignore"):
        slopes = np.log(rises) - np.log(runs)
    return _Profile(rises, slopes + 1e-12 * (1 + np.abs(slopes)), knots, deltas)


def _table(curve: Curve, level: float) -> tuple[Floats, Floats]:
    """(epsilons from 0 on, delta at each), fine up to delta = level / 20, and on to level / 10^4."""
    many, few = _KNOTS[isinstance(curve, Gaussian)]
    near, far = (min(curve.epsilon(min(max(level * share, 1e-300), 0.5)), _LARGEST) for share in (0.05, 1e-4))
    near, far = max(near, 1e-9), max(far, near, 1e-9)
    knots = np.linspace(0.0, near, many + 1)
    if far > near:
        knots = np.concatenate([knots, np.linspace(near, far, few + 1)[1:]])
    return knots, np.minimum.accumulate([curve.delta(float(knot)) for knot in knots])


def _most(knots: Floats, deltas: Floats) -> tuple[Floats, Floats]:
    """(slopes, heights) of lines in w, falling in slope: a set of chance w under Q has no more under Q' than any.

    Of the set itself, w' <= e^t w + delta(t); of what is not in it, 1 - w <= e^t (1 - w') + delta(t); and w' <= 1.
    """
    slopes = np.concatenate([np.exp(knots[::-1]), np.exp(-knots[1:]), [0.0]])
    heights = np.concatenate([deltas[::-1], 1 - np.exp(-knots[1:]) * (1 - deltas[1:]), [1.0]])
    return slopes * _UP, heights * _UP


def _points(law: Secret, slopes: Floats, heights: Floats, far: float) -> tuple[Floats, Floats]:
    """(weight(G(w)) rounded down, weight(w) rounded up) at points whose hull is above those of all w in [0, 1].

    In a cell of w, weight is below its chord, for it is convex. G is below any of the lines; weight of a line is convex
    in w, and above its tangent at the middle. Both being lines, what a cell holds is below the chord of its ends.
    """
    top, falls = weight(law, 0.0)
    scale = float(-top / falls)  # w over which the weight falls
    first = max(0.01 * scale * math.exp(-far), 1e-300)
    edges = np.unique(
        np.concatenate([np.geomspace(first, 1.0, _CELLS), np.linspace(0.0, min(1.0, 40 * scale), _CELLS)])
    )
    low, high = edges[:-1], edges[1:]
    middle = (low + high) / 2
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # which line is taken does not matter
        crossings = (heights[1:] - heights[:-1]) / (slopes[:-1] - slopes[1:])
    lines = np.searchsorted(np.maximum.accumulate(np.nan_to_num(crossings)), middle)
    slope, height = slopes[lines], heights[lines]
    at, tangent = weight(law, np.minimum(slope * middle + height, 1e9))
    tangent = tangent * slope
    kept_low, kept_high = at + tangent * (low - middle), at + tangent * (high - middle)
    least = weight(law, np.minimum(slope * high + height, 1.0))[0]
    flat = ~(kept_high >= 0.8 * least)  # a coarse cell, or w' = 1: the least of the cell
    kept_low, kept_high = np.where(flat, least, kept_low), np.where(flat, least, kept_high)
    kept = np.concatenate([kept_low, kept_high]) / _UP
    own = np.concatenate([weight(law, low)[0], weight(law, high)[0]]) * _UP
    return kept, own


def _hull(x: Floats, y: Floats) -> Floats:
    """(corners, 2): the concave hull of (0, 0) and the points, up to the highest of them."""
    order = np.lexsort((-y, x))
    corners = [(0.0, 0.0)]
    for at, height in zip(x[order].tolist(), y[order].tolist(), strict=True):
        if height <= corners[-1][1]:
            continue
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (at - x0) > (height - y0) * (x1 - x0):
                break
            corners.pop()
        corners.append((at, height))
    return np.array(corners)


def repeated(curve: Curve, runs: int) -> Curve:
    """The composition of so many of a curve."""
    found, power = None, curve
    while runs:
        if runs & 1:
            found = power if found is None else compose(found, power)
        runs >>= 1
        if runs:
            power = compose(power, power)
    assert found is not None
    return found
