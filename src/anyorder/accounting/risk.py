"""What an epsilon means: how far the strongest attacker gets, for every privacy curve.

An attacker sees all that was released, knows the data of everybody else, and says whether one unit took part. TPR is
the share of those who took part that it finds, FPR the share of others that it accuses. A curve bounds TPR by FPR:

    TPR <= min over eps >= 0 of min(e^eps FPR + delta(eps), 1 - e^-eps (1 - delta(eps) - FPR))
                                                                             [Dong, Roth, Su 2022, Prop. 2.12]
    Phi(Phi^-1(FPR) + mu)                                                    of mu-GDP, and attained

Here delta(eps) is the larger of both directions of neighbours, so the bound is for one who looks for units that took
part and for one who looks for units that did not: the trade-off function symmetrised, as riskcal has it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from anyorder import checks
from anyorder._numerics import bisect, least
from anyorder.errors import ArgumentError

__all__ = ["RATES", "Reach", "Risk", "TradeOff", "point_reach", "point_tpr", "reach"]

Vector = NDArray[np.float64]
Delta = Callable[[float], float]
_UP = 1 + 1e-11  # above the rounding of the normal distribution, and of a line
_MOST = 40.0  # an epsilon beyond which lines say no more than that the attacker may always be right
_LINES = 257  # of a group's
_NEAR = 1e-5  # of the best epsilon: a line next to the best one is above it by the square of that


class _Measured(Protocol):
    """A privacy curve: what the methods of `TradeOff` read."""

    @property
    def mu(self) -> float | None:
        """Of a curve that is exactly a Gaussian's."""

    @property
    def _whole(self) -> "_Measured":
        """One whose every delta holds at once."""

    def delta(self, epsilon: float) -> float:
        """At or above the smallest that holds."""


class TradeOff:
    """The success of the strongest attacker under a curve; the base class of every curve.

    No number is below the true one: an attacker is taken to be at least as strong as it can be. All apply to attackers
    who know everybody else's data and who see every model on the way.

    A group is of units that belong together, such as the records of one person where the unit is an example. Between a
    run with all of them and a run without any lie as many neighbours, one after the other, and at each step TPR grows
    from FPR as it does for one unit: TPR(TPR(.. FPR)), which is the curve of group * mu for a Gaussian
    [Dong, Roth, Su 2022, Theorem 2.14].
    """

    @property
    def _whole(self: "_Measured") -> "_Measured":
        """The curve itself, but for samples: those hold for one delta alone, see `Amplified`."""
        return self

    def tpr(self: _Measured, fpr: float, *, group: int = 1) -> float:
        """The share of units that an attacker finds, at most, if it wrongly accuses a share `fpr` of the others.

        Args:
            fpr: false positive rate, strictly between 0 and 1.
            group: units that are attacked together, 1 or more.
        Returns: true positive rate, rounded up; at most 1.
        Cost: some twenty values of delta(epsilon), each a millisecond or so; of a group, 257 of them.
        Raises: ArgumentError.

        Example:
            >>> from anyorder.accounting import Gaussian
            >>> round(Gaussian(1.0).tpr(0.01), 4)
            0.0924
        """
        fpr, group = checks.probability("fpr", fpr), checks.integer("group", group, low=1)
        if self.mu is not None:
            return gaussian_tpr(group * self.mu, fpr)
        delta = self._whole.delta
        return _least(delta, fpr) if group == 1 else _of_group(_lines(delta), fpr, group)

    def advantage(self: _Measured, *, group: int = 1) -> float:
        """Return how much more often an attacker accuses a unit that took part than one that did not: sup (TPR - FPR).

        It is the total variation distance of the two runs, delta at epsilon 0, and 2 Phi(mu / 2) - 1 of mu-GDP. A fair
        draw of who took part is guessed right with probability (1 + advantage) / 2 at most.

        Args:
            group: units that are attacked together, 1 or more.
        Returns: between 0 and 1, rounded up.
        Cost: one value of delta(epsilon); of a group, 257 of them.
        Raises: ArgumentError.

        Example:
            >>> from anyorder.accounting import Gaussian
            >>> round(Gaussian(1.0).advantage(), 4)
            0.3829
        """
        group = checks.integer("group", group, low=1)
        if self.mu is not None:
            return gaussian_advantage(group * self.mu)
        delta = self._whole.delta
        most = delta(0.0)
        if group == 1:
            return most

        lines = _lines(delta)

        # A symmetric trade-off function f crosses the diagonal once, at a; its slope there is -1, so that 1 - 2 a is
        # the largest TPR - FPR. A rate whose TPR is at most 1 - itself is at or below a, whatever rounding added.
        def below(rate: float) -> bool:
            return _of_group(lines, rate, group) <= 1 - rate

        found = bisect(below, inside=0.0, outside=0.5, steps=50)
        return min(1.0, group * most, (1 - 2 * found) * _UP)  # TPR - FPR grows by `most` at each step, or less

    def reconstruction(self, prior: float, *, group: int = 1) -> float:
        """The probability, at most, that an attacker guesses what a unit's data is: 1 - f(prior).

        Whatever is guessed (who it is, one of its attributes, its record up to some error) and by whatever means; f is
        the trade-off function [Kulynych et al. 2025, arXiv 2507.06969].

        Args:
            prior: the probability with which the best guess is right without the release, strictly between 0 and 1.
            group: units that are attacked together, 1 or more.
        Returns: the probability with the release, rounded up; at most 1.
        Cost, Raises: as `tpr`, whose value at fpr = prior it is.
        """
        return self.tpr(checks.probability("prior", prior), group=group)  # type: ignore[misc]  # every curve is measured


def gaussian_tpr(mu: float, fpr: float) -> float:
    """Phi(Phi^-1(fpr) + mu), rounded up."""
    return min(1.0, float(ndtr(ndtri(fpr) + mu)) * _UP)


def gaussian_advantage(mu: float) -> float:
    """2 Phi(mu / 2) - 1, rounded up."""
    return min(1.0, math.erf(mu / math.sqrt(8)) * _UP)


def point_tpr(epsilon: float, delta: float, fpr: float) -> float:
    """`TradeOff.tpr` where nothing but one pair (epsilon, delta) is known.

    Example:
        >>> round(point_tpr(1.0, 1e-5, 0.01), 4), round(point_tpr(8.0, 1e-5, 0.01), 4)
        (0.0272, 0.9997)
    """
    if epsilon > 700:
        return 1.0
    grown = math.exp(epsilon)
    return min(1.0, (grown * fpr + delta) * _UP, (1 - (1 - delta - fpr) / grown) * _UP)


def _lines(delta: Delta) -> tuple[Vector, Vector]:
    """(epsilons, deltas) whose lines are taken for all: fewer say less, by some 1e-4 of TPR, and stay true."""
    end = 1.0
    while end < _MOST and delta(end) > 1e-7:
        end *= 2
    epsilons = np.linspace(0.0, end, _LINES)
    return epsilons, np.array([delta(float(epsilon)) for epsilon in epsilons])


def _of_group(lines: tuple[Vector, Vector], rate: float, group: int) -> float:
    """FPR -> TPR of one unit, so many times."""
    epsilons, deltas = lines
    for _ in range(group):
        rising, falling = np.exp(epsilons) * rate + deltas, 1 - (1 - deltas - rate) * np.exp(-epsilons)
        rate = min(1.0, float(np.minimum(rising, falling).min()) * _UP)
    return rate


def _least(delta: Delta, fpr: float) -> float:
    """The least of the lines through (fpr, TPR). Each one holds, so that the search cannot end below the truth.

    A line is convex in e^eps or in e^-eps, as delta is in e^eps: there is one least. A line steeper than that from
    (0, 0) to the one at epsilon 0 says less than that one: there the search ends.
    """
    flat = fpr + delta(0.0)
    if flat >= 1 and delta(_MOST) >= 1:
        return 1.0
    steep = math.log(min(1.0, flat) / fpr)
    shallow = _MOST if flat >= 1 else min(_MOST, math.log((1 - fpr) / (1 - flat)))
    ends = [end for end in (steep, shallow) if end > 1e-12]
    found = [
        least(lambda epsilon: point_tpr(epsilon, delta(epsilon), fpr), 0.0, end, absolute=_NEAR * end) for end in ends
    ]
    return min(1.0, flat * _UP, *found)


# -- what is shown of a claim ----------------------------------------------------------------------------------------

RATES = (0.001, 0.01, 0.05)
"""False positive rates that are shown."""


@dataclass(frozen=True)
class Reach:
    """The success of the strongest attacker against a claim, rounded up.

    Attributes:
        advantage: TPR - FPR, at most.
        tprs: at each of `RATES`.
    """

    advantage: float
    tprs: tuple[float, ...]

    @property
    def found(self) -> float:
        """TPR at a false positive rate of 1 %."""
        return self.tprs[RATES.index(0.01)]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "advantage": self.advantage,
            "tpr": {f"{fpr:g}": tpr for fpr, tpr in zip(RATES, self.tprs, strict=True)},
        }


def reach(curve: Any) -> Reach:
    """Return the reach of a curve, a `TradeOff`."""
    return Reach(curve.advantage(), tuple(curve.tpr(fpr) for fpr in RATES))


def point_reach(epsilon: float, delta: float, known_mu: float | None = None) -> Reach:
    """Return the reach if nothing is known but a pair (epsilon, delta).

        advantage = 1 - 2 (1 - delta) / (e^eps + 1)

    Args:
        known_mu: of secret batches, should they become known: who does not know them can tell no more.
    """
    advantage = 1.0 if epsilon > 700 else min(1.0, (1 - 2 * (1 - delta) / (math.exp(epsilon) + 1)) * _UP)
    found = Reach(advantage, tuple(point_tpr(epsilon, delta, fpr) for fpr in RATES))
    if known_mu is None:
        return found
    known = (gaussian_tpr(known_mu, fpr) for fpr in RATES)
    return Reach(min(advantage, gaussian_advantage(known_mu)), tuple(map(min, found.tprs, known)))


# -- a budget that is asked for as a risk ----------------------------------------------------------------------------


class Risk:
    """A bound on what attackers reach, as `ao.plan(risk=..)` takes it.

        ("advantage", most)    ("tpr", fpr, most)

    Attributes:
        fpr: the false positive rate of "tpr"; None for "advantage".
        most: what the attacker may reach.
    """

    def __init__(self, asked: Any) -> None:
        told = tuple(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else (asked,)
        match told:
            case ("advantage", most):
                self.fpr, self.most = None, checks.probability("the advantage in risk", most)
            case ("tpr", fpr, most):
                self.fpr = checks.probability("the false positive rate in risk", fpr)
                self.most = checks.probability("the true positive rate in risk", most)
                if self.most <= self.fpr:
                    raise ArgumentError(
                        f"risk must allow more true positives than false ones, which guessing gives, got {asked!r}"
                    )
            case _:
                raise ArgumentError(
                    "risk must be ('advantage', most) or ('tpr', fpr, most), such as ('tpr', 0.01, 0.05), got "
                    f"{asked!r}"
                )

    def of(self, curve: TradeOff) -> float:
        """Return what attackers reach under this curve: at most `most` where the risk is kept."""
        found: float = curve.advantage() if self.fpr is None else curve.tpr(self.fpr)  # type: ignore[misc]
        return found

    @property
    def mu(self) -> float:
        """The largest mu of Gaussian DP that keeps it, rounded down."""
        found = 2 * ndtri((1 + self.most) / 2) if self.fpr is None else ndtri(self.most) - ndtri(self.fpr)
        return float(found) * (1 - 1e-9)
