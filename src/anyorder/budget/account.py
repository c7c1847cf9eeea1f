"""The sums of a budget: what its lines come to, what one more plan would, and what is left."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import inf, nextafter

import numpy as np
from numpy.typing import NDArray

from anyorder._words import rounded_down, rounded_up
from anyorder.accounting.curves import Gaussian, compose
from anyorder.accounting.gaussian import gdp_epsilon, gdp_mu, rdp_epsilon
from anyorder.budget import laws
from anyorder.budget.bounds import repeated
from anyorder.budget.entries import Begin, Limit, Line, Settle, Spend, UnitsAt, label_of, read_curve
from anyorder.budget.filter import Cost, Searched, dominating_squared, renyi, renyi_left, root_down, root_up
from anyorder.budget.units import Own, UnitFile
from anyorder.errors import BudgetError

__all__ = ["Account", "Held", "Remaining", "Totals"]

Rows = NDArray[np.void]
_ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)


@dataclass(frozen=True)
class Totals:
    """What entries come to, for the unit that has most.

    Attributes:
        rule: "gaussian", "renyi" or "planned"; see `anyorder.budget.filter`.
        order: of the Rényi filter.
        squared: sum of mu^2 of all that is Gaussian, exact; with what the worst unit has of its own.
        rest: curves that are not Gaussian.
        rest_squared, rest_renyi: of these, mu^2 of Gaussians that tell no less, and the sum of RDP(order).
        alone: the curve of the only entry, None where there are none or several.
    """

    rule: str
    order: int
    squared: Fraction = Fraction(0)
    rest: tuple[Cost, ...] = ()
    rest_squared: Fraction = Fraction(0)
    rest_renyi: Fraction = Fraction(0)
    alone: Cost | None = None

    def epsilon(self, delta: float, extra: Fraction = Fraction(0)) -> float:
        """What is spent at delta, rounded up.

        Args:
            extra: mu^2 of one more Gaussian.
        """
        squared = self.squared + extra
        if not squared and not self.rest:
            return 0.0
        match self.rule:
            case "gaussian":
                mu = root_up(squared + self.rest_squared)
                return gdp_epsilon(mu, delta) if math.isfinite(mu) else inf
            case "renyi":
                spent = _float_up(self.order * squared / 2 + self.rest_renyi)
                found = rdp_epsilon(([float(self.order)], [spent]), delta) if math.isfinite(spent) else inf
                # The first plan is chosen before anything was released. Where it alone is beyond the filter, nothing
                # follows it; so that it has its own curve.
                return found if self.alone is None or extra else min(found, self.alone.epsilon(delta))
            case _:
                return self._planned(squared, delta)

    def _planned(self, squared: Fraction, delta: float) -> float:
        """Of what was all chosen in advance: by loss distributions, and with searches by the best Rényi order."""
        curves = [one for one in self.rest if not isinstance(one, Searched)]
        if len(curves) == len(self.rest):
            label = curves[0].neighbours if curves else "zero-out"
            return compose(Account.gaussian(squared, self.unit, label), *curves).epsilon(delta)
        if self.alone is not None and not squared:
            return self.alone.epsilon(delta)
        kept = []
        for order in _ORDERS:
            value = order * squared / 2 + sum((_fraction(renyi(one, order)) for one in self.rest), Fraction(0))
            if math.isfinite(_float_up(value)):
                kept.append((float(order), _float_up(value)))
        return rdp_epsilon(([a for a, _ in kept], [r for _, r in kept]), delta) if kept else inf

    @property
    def unit(self) -> str:
        """Of the curves."""
        return self.rest[0].unit if self.rest else "example"

    def left_squared(self, epsilon: float, delta: float) -> Fraction:
        """mu^2 of the largest Gaussian plan that may follow, rounded down."""
        match self.rule:
            case "gaussian":
                return max(Fraction(gdp_mu(epsilon, delta)) ** 2 - self.squared - self.rest_squared, Fraction(0))
            case "renyi":
                spent = self.order * self.squared / 2 + self.rest_renyi
                return max((Fraction(renyi_left(epsilon, delta, self.order)) - spent) * 2 / self.order, Fraction(0))
            case _:
                most = Fraction(gdp_mu(epsilon, delta)) ** 2 - self.squared
                if not self.rest or most <= 0:
                    return max(most, Fraction(0))
                low, high = Fraction(0), most
                for _ in range(12):  # each costs a composition; the answer may be too small by 2^-12 of what fits
                    middle = Fraction(float((low + high) / 2))
                    low, high = (middle, high) if self.epsilon(delta, middle) <= epsilon else (low, middle)
                return low


@dataclass(frozen=True)
class Remaining:
    """What a budget has left.

    Attributes:
        spent: epsilon at delta of all entries, for the unit that has most.
        limit: epsilon that must not be exceeded at delta.
        delta: of both.
        entries: how many.
        rule: how they are counted: "gaussian", "renyi" or "planned".
    """

    spent: float
    limit: float
    delta: float
    entries: int
    rule: str
    _totals: Totals = field(repr=False, compare=False)

    @cached_property
    def mu(self) -> float:
        """Of the largest Gaussian plan that may still be spent; amplified ones have no such number."""
        return root_down(self._totals.left_squared(self.limit, self.delta))

    @cached_property
    def epsilon(self) -> float:
        """Epsilon at delta of that plan: `ao.plan(epsilon=remaining.epsilon, delta=remaining.delta, ..)` fits."""
        return gdp_epsilon(self.mu, self.delta) * (1 - 1e-9)

    def __str__(self) -> str:
        left = f"epsilon {rounded_down(self.epsilon)} left for one Gaussian plan"
        return f"epsilon {rounded_up(self.spent)} of {self.limit:.4g} spent at delta = {self.delta:g}; {left}"


@dataclass(frozen=True)
class Held:
    """One entry as it counts now.

    Attributes:
        curve: of the whole entry, for the unit that has most of it, as it was spent.
        settled: what its run turned out to use; None where that was not said.
        rows: of the units; None where everybody has the whole.
    """

    spend: Spend
    curve: Cost
    settled: Settle | None = None
    rows: Rows | None = None

    @property
    def key(self) -> str | None:
        """Fingerprint of the noise of its run, where it is known."""
        return self.settled.key if self.settled is not None else self.spend.key

    @property
    def now(self) -> Cost:
        """The curve that counts."""
        return (
            self.curve
            if self.settled is None
            else Gaussian(self.settled.mu, neighbours=self.curve.neighbours, unit=self.curve.unit)
        )


class Account:
    """The lines of a budget file, summed. Not thread-safe by itself: `Budget` has the lock.

    Attributes:
        held: number -> entry.
        by_run: word of a run -> number of its entry.
        by_key: fingerprint of a run's noise -> number of its entry.
        units_key: fingerprint of the key that all entries with units have; None before the first.
    """

    def __init__(self, begin: Begin, units: UnitFile) -> None:
        self.begin, self._units = begin, units
        self.epsilon, self.delta = begin.epsilon, begin.delta
        self.held: dict[int, Held] = {}
        self.by_run: dict[str, int] = {}
        self.by_key: dict[str, int] = {}
        self.units_key: str | None = None
        self._clear()

    def _clear(self) -> None:
        self._squared = self._rest_squared = self._rest_renyi = Fraction(0)
        self._rest: list[Cost] = []
        self._own = Own()

    @property
    def unit(self) -> str | None:
        """What is protected; None before it is known."""
        return self.begin.unit or (next(iter(self.held.values())).curve.unit if self.held else None)

    @property
    def neighbours(self) -> str | None:
        """The relation; None before it is known."""
        if self.begin.neighbours is not None or not self.held:
            return self.begin.neighbours
        return str(next(iter(self.held.values())).spend.about["neighbours"])

    @property
    def number(self) -> int:
        """Of the next entry."""
        return len(self.held) + 1

    def rule(self, first: Cost | None = None) -> str:
        """How entries are counted.

        Args:
            first: the curve of the first entry, where it is about to be made.
        """
        if not self.begin.adaptive:
            return "planned"
        if self.begin.filter is not None:
            return self.begin.filter
        curve = next(iter(self.held.values())).curve if self.held else first
        return "gaussian" if curve is None or type(curve) is Gaussian else "renyi"

    # -- lines -------------------------------------------------------------------------------------------------------

    def take(self, line: Line) -> None:
        """Count one more line, whatever the limit. Raises: BudgetError for one that does not fit the others."""
        match line:
            case Spend():
                if line.number != self.number:
                    raise BudgetError(f"entry {line.number} of the budget file is not in its place")
                rows = None if line.units is None else self._rows(UnitsAt(**line.units))
                held = Held(line, self.cost_of(line), None, rows)
                self.held[line.number] = held
                if line.run is not None:
                    self.by_run[line.run] = line.number
                if line.key is not None:
                    self.by_key[line.key] = line.number
                self._add(held)
            case Settle():
                held = self.held[line.number]
                self.by_key[line.key] = line.number
                self.held[line.number] = Held(held.spend, held.curve, line, held.rows)
                if held.rows is None and type(held.now) is Gaussian:
                    self._squared += Fraction(line.mu) ** 2 - Fraction(held.now.mu) ** 2
                else:
                    self._clear()
                    for one in self.held.values():
                        self._add(one)
            case Limit():
                self.epsilon, self.delta = line.epsilon, line.delta
            case _:
                raise BudgetError("a budget file begins once")

    def _rows(self, at: UnitsAt) -> Rows | None:
        self.units_key = self.units_key or at.key
        if at.key != self.units_key:
            raise BudgetError("an entry of the budget file has units under another key than those before it")
        return self._units.read(at)

    @staticmethod
    def cost_of(spend: Spend) -> Cost:
        """What an entry costs, under the label of sums."""
        curve = read_curve(spend.parts, label_of(spend.parts))
        if spend.search is None:
            return curve
        law = laws.from_dict(spend.search)
        return repeated(curve, law.runs) if isinstance(law, laws.Fixed) else Searched(law, curve)

    @staticmethod
    def gaussian(squared: Fraction, unit: str, label: str) -> Gaussian:
        """Of this mu^2, under the label of sums."""
        return Gaussian(root_up(squared), neighbours=label, unit=unit)

    def _add(self, held: Held) -> None:
        curve = held.now
        if held.rows is not None and type(curve) is Gaussian:
            self._own.add(held.rows["id"], _squares(held.rows, curve.mu))
        elif type(curve) is Gaussian:
            self._squared += Fraction(curve.mu) ** 2
        else:
            self._rest.append(curve)
            self._rest_squared += dominating_squared(curve)
            self._rest_renyi += _fraction(renyi(curve, self.begin.order))

    # -- sums --------------------------------------------------------------------------------------------------------

    def totals(self) -> Totals:
        """Of all entries."""
        alone = next(iter(self.held.values())).now if len(self.held) == 1 else None
        return Totals(
            self.rule(), self.begin.order, self._squared + Fraction(self._own.worst()), tuple(self._rest),
            self._rest_squared, self._rest_renyi, alone,
        )  # fmt: skip

    def totals_with(self, curve: Cost, rows: Rows | None) -> Totals:
        """Of all entries, and one more.

        Args:
            curve: its own, under the label of sums.
            rows: of its units; None where everybody has the whole.
        """
        squared, worst = self._squared, Fraction(self._own.worst())
        rest, rest_squared, rest_renyi = self._rest, self._rest_squared, self._rest_renyi
        if type(curve) is not Gaussian:
            rest = [*rest, curve]
            rest_squared, rest_renyi = (
                rest_squared + dominating_squared(curve), rest_renyi + _fraction(renyi(curve, self.begin.order))
            )  # fmt: skip
        elif rows is None:
            squared += Fraction(curve.mu) ** 2
        else:
            own = Own()
            own.add(self._own.ids, self._own.squares)
            own.add(rows["id"], _squares(rows, curve.mu))
            worst = Fraction(own.worst())
        alone = None if self.held else curve
        return Totals(
            self.rule(curve), self.begin.order, squared + worst, tuple(rest), rest_squared, rest_renyi, alone
        )  # fmt: skip

    def remaining(self) -> Remaining:
        """What is left."""
        totals = self.totals()
        spent = totals.epsilon(self.delta)
        return Remaining(spent, self.epsilon, self.delta, len(self.held), totals.rule, totals)


def _squares(rows: Rows, most: float) -> NDArray[np.float64]:
    """mu^2 of each unit, none above that of the whole, rounded up."""
    return np.asarray(np.nextafter(np.square(np.minimum(rows["mu"], most)), np.inf))


def _fraction(value: float) -> Fraction:
    return Fraction(value) if math.isfinite(value) else Fraction(2) ** 1100  # beyond every limit


def _float_up(value: Fraction) -> float:
    try:
        result = float(value)
    except OverflowError:
        return inf
    return result if Fraction(result) >= value else nextafter(result, inf)
