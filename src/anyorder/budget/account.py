"""The sums of a budget: what its lines come to, what one more plan would, and what is left."""

import hashlib
import hmac
import json
import math
import os
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import cached_property
from math import inf, nextafter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import durable
from anyorder.accounting.curves import Curve, Gaussian, compose
from anyorder.accounting.gaussian import gdp_epsilon, gdp_mu, rdp_epsilon
from anyorder.budget import search_privacy
from anyorder.budget.claim import SearchCertificate
from anyorder.budget.filter import Cost, Searched, dominating_squared, renyi, renyi_left, root_down, root_up
from anyorder.budget.log import Begin, Limit, Line, Settle, Spend, UnitsAt, label_of, read_curve
from anyorder.budget.search_privacy import repeated
from anyorder.errors import AnyorderError, BudgetError
from anyorder.formats import html_table
from anyorder.formatting import rounded_down, rounded_up
from anyorder.plan.certificate import Certificate, is_claimable, realised_claim
from anyorder.plan.plan import Plan

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
                # follows it, and all is one release of a fixed curve; where it is not, the filter bounds all. Which of
                # the two it is follows from the plan and not from outputs: no delta is paid twice.
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

    def facts(self) -> list[tuple[str, str]]:
        """(name, text)."""
        return [
            ("spent", f"epsilon {self._spent()} at delta = {rounded_up(self.delta, 6)}"),
            ("left", f"epsilon {rounded_down(self.epsilon)} for one Gaussian plan"),
            ("entries", f"{self.entries}, counted by the rule {self.rule}"),
        ]

    def _repr_html_(self) -> str:
        return html_table(self.facts())

    def __str__(self) -> str:
        left = f"epsilon {rounded_down(self.epsilon)} left for one Gaussian plan"
        return f"epsilon {self._spent()} spent at delta = {rounded_up(self.delta, 6)}; {left}"

    def _spent(self) -> str:
        return f"{rounded_up(self.spent)} of {rounded_up(self.limit)}"


@dataclass(frozen=True)
class Balance:
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

    def __init__(self, begin: Begin, units: "UnitFile") -> None:
        self.begin, self._units = begin, units
        self.epsilon, self.delta = begin.epsilon, begin.delta
        self.held: dict[int, Balance] = {}
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
                held = Balance(line, self.cost_of(line), None, rows)
                self.held[line.number] = held
                if line.run is not None:
                    self.by_run[line.run] = line.number
                if line.key is not None:
                    self.by_key[line.key] = line.number
                self._add(held)
            case Settle():
                held = self.held[line.number]
                self.by_key[line.key] = line.number
                self.held[line.number] = Balance(held.spend, held.curve, line, held.rows)
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
        law = search_privacy.from_dict(spend.search)
        return repeated(curve, law.runs) if isinstance(law, search_privacy.Fixed) else Searched(law, curve)

    @staticmethod
    def gaussian(squared: Fraction, unit: str, label: str) -> Gaussian:
        """Of this mu^2, under the label of sums."""
        return Gaussian(root_up(squared), neighbours=label, unit=unit)

    def _add(self, held: Balance) -> None:
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


# ----------------------------------------------------------------------------------------------------
# What a plan costs for the neighbours of a budget, where that follows from the plan itself.
#
# A plan releases sums with noise; for each relation the same noise covers how far one unit moves them.
#
#     budget        plan             why
#     the same      the same
#     zero-out      replace-one      zero is one of the vectors that may replace a unit's: mu is that of zero-out, half
#     replace-one   zero-out         from one vector to zero, and to the other: the sums move twice as far, mu doubles
#     zero-out      add-or-remove    a unit that adds zero to the sums leaves them as one that is not there: the same
#     mu,
#                                    and under secret draws the same law of the output
#     replace-one   add-or-remove    as from zero-out, where no draw is secret; else no bound is stated here
#
# A plan for zero-out or replace-one says nothing of add-or-remove: what its run shows (how often units appeared, which
# steps were full) may tell whether a unit was there at all. A curve without a plan is for its own relation alone: what
# made it may be no sum.


_FOLLOWS = {
    ("zero-out", "replace-one"), ("replace-one", "zero-out"),
    ("zero-out", "add-or-remove"), ("replace-one", "add-or-remove"),
}  # fmt: skip


def plan_for(plan: Plan, neighbours: str) -> Plan:
    """The plan whose curve holds for these neighbours: of the same release, read for another relation.

    A plan with secret draws for add-or-remove is returned as it is for zero-out, where its curve holds.
    Raises: BudgetError where none follows.
    """
    if plan.neighbours == neighbours:
        return plan
    if (neighbours, plan.neighbours) in _FOLLOWS and not (plan.amplified and neighbours != "zero-out"):
        if plan.amplified and plan.neighbours == "add-or-remove":
            return plan
        try:
            return replace(plan, neighbours=neighbours)
        except AnyorderError as problem:
            raise BudgetError(
                f"the plan is for {plan.neighbours} neighbours, the budget for {neighbours}: {problem}"
            ) from problem
    raise _other("plan", plan.neighbours, neighbours)


def check_relation(curve: Curve, unit: str, neighbours: str) -> None:
    """Raise BudgetError unless a curve without a plan is for this unit and these neighbours."""
    check_unit(curve.unit, unit)
    if curve.neighbours != neighbours:
        raise _other("curve", curve.neighbours, neighbours)


def check_unit(found: str, unit: str) -> None:
    """Raise BudgetError unless this is what the budget protects."""
    if found != unit:
        raise BudgetError(
            f"the budget is for one {unit!r}, and this is for one {found!r}: no sum of both is a bound for either. "
            f"Plan with unit={unit!r}, or keep a budget for each"
        )


def _other(what: str, found: str, neighbours: str) -> BudgetError:
    return BudgetError(
        f"the budget is for {neighbours} neighbours, and this {what} for {found}, from which nothing follows for them: "
        f"plan for {neighbours}, or make the budget with neighbours='zero-out', which takes plans for all three"
    )


# ----------------------------------------------------------------------------------------------------
# What single units have of a budget, where orders are known: a file of its own, as secret as who was in which step.
#
#     file    one JSON line with a key, then for each entry its units: (keyed hash of the id, mu) each
#
# The hash keeps names out of sight, and no more: who has this file can try ids. The budget file says where the units
# of an entry are and, under the key, what they were. Where this file is lost, cut or altered, such an entry counts for
# everybody with the largest mu of its units: never less than it should.
#
# One unit has one hash only under one key. So the first entry with units binds the budget to the fingerprint of the
# key; where the file is gone, or another is in its place, no more units are entered one by one.


_FORMAT = "anyorder-budget-units/1"
_ROW = np.dtype([("id", "<u8"), ("mu", "<f8")])


class Own:
    """What units have beyond what everybody has: sums of mu^2, rounded up.

    Attributes:
        ids: (U,) hashes, rising. Two ids of one hash, of 2^64, would be counted as one unit: never too little.
        squares: (U,) their sums.
    """

    def __init__(self) -> None:
        self.ids = np.empty(0, np.uint64)
        self.squares = np.empty(0)

    def add(self, ids: NDArray[np.uint64], squares: NDArray[np.float64]) -> None:
        """Take the parts of one entry in; each id may come once."""
        every, place = np.unique(np.concatenate([self.ids, ids]), return_inverse=True)
        sums = np.zeros(len(every))
        sums[place[: len(self.ids)]] = self.squares
        sums[place[len(self.ids) :]] = np.nextafter(sums[place[len(self.ids) :]] + squares, np.inf)
        self.ids, self.squares = every, sums

    def worst(self) -> float:
        """The largest sum; 0 for nobody."""
        return float(self.squares.max()) if len(self.squares) else 0.0


class UnitFile:
    """`.NAME.units` beside a budget file NAME."""

    def __init__(self, budget: Path) -> None:
        self.path = budget.with_name(f".{budget.name}.units")

    def hashed(
        self, ids: list[int] | list[str], mus: NDArray[np.float64], bound: str | None = None, *, make: bool = True
    ) -> tuple[bytes, NDArray[np.void]]:
        """(key, the rows of these units), under the key of the file.

        Args:
            bound: fingerprint of the key that the budget's entries have; None before the first. Then the file is made
                where there is none.
            make: False to write nothing: where there is no file, no unit has anything that these could add to.

        Raises: BudgetError if the file cannot be made or read, or is not the one that the budget is bound to.
        """
        key = self._key()
        if bound is not None and (key is None or _fingerprint(key) != bound):
            what = "is gone, or cannot be read" if key is None else "is not the one that belongs to this budget"
            raise BudgetError(
                f"{self.path}, which keeps what units have, {what}: how much these units have is not known. Nothing "
                "was spent; put the file back, or spend with named=False, which counts for everybody"
            )
        key = key or (self._made() if make else os.urandom(32))
        rows = np.empty(len(ids), _ROW)
        rows["id"] = [
            int.from_bytes(hashlib.blake2b(_raw(one), digest_size=8, key=key).digest(), "little") for one in ids
        ]
        rows["mu"] = mus
        rows = rows[np.lexsort((rows["mu"], rows["id"]))]
        last = np.append(rows["id"][1:] != rows["id"][:-1], True)
        return key, rows[last]  # the larger of two units of one hash

    def write(self, key: bytes, rows: NDArray[np.void]) -> UnitsAt:
        """Bring the rows to the disk, behind all that are there. Raises: BudgetError; then nothing refers to them."""
        data = rows.tobytes()
        try:
            log = durable.Log.open(self.path)
            try:
                place = log.end = log.stat().st_size  # whatever a kill left stays: entries say where their rows are
                log.append(data)
            finally:
                log.close()
        except OSError as problem:
            raise BudgetError(
                f"{self.path}, which keeps what units have, cannot be written: {problem.strerror or problem}. Nothing "
                "was spent; make room, and ask again"
            ) from problem
        return UnitsAt(offset=place, size=len(data), digest=_digest(key, place, data), key=_fingerprint(key))

    def fingerprint(self) -> str | None:
        """Of the key that the file has now; None where there is none to be read."""
        key = self._key()
        return None if key is None else _fingerprint(key)

    def read(self, at: UnitsAt) -> NDArray[np.void] | None:
        """The rows of an entry; None where they are lost or are not those that were written."""
        key = self._key()
        if key is None or _fingerprint(key) != at.key:
            return None
        try:
            with open(self.path, "rb") as file:
                file.seek(at.offset)
                data = file.read(at.size)
        except (OSError, ValueError):  # then the entry counts for everybody
            return None
        if not hmac.compare_digest(_digest(key, at.offset, data), at.digest):
            return None
        return np.frombuffer(data, _ROW)

    def _key(self) -> bytes | None:
        try:
            with open(self.path, "rb") as file:
                head = json.loads(file.readline(200))
            return bytes.fromhex(head["key"]) if head["format"] == _FORMAT else None
        except (OSError, ValueError, KeyError, TypeError):  # then no entry has units
            return None

    def _made(self) -> bytes:
        key = os.urandom(32)
        head = json.dumps({"format": _FORMAT, "key": key.hex()}).encode() + b"\n"
        try:  # one that cannot be read any more: its entries count for everybody
            durable.replace(self.path, head, secret=True)
        except OSError as problem:
            raise BudgetError(f"{self.path} cannot be written: {problem.strerror}; nothing was spent") from problem
        return key


def _raw(one: int | str) -> bytes:
    """An integer as its digits: whoever is 7 in one plan and "7" in the next is one person."""
    return str(one).encode("utf-8", "surrogatepass")


def _fingerprint(key: bytes) -> str:
    return hashlib.sha256(b"anyorder budget units" + key).hexdigest()[:32]


def _digest(key: bytes, place: int, data: bytes) -> str:
    return hmac.new(key, place.to_bytes(8, "little") + data, "sha256").hexdigest()


# ----------------------------------------------------------------------------------------------------
# What a budget says of an entry that it refuses.


def was_made(what: Any) -> bool:
    """Whether it is the certificate of a run that took steps, or of a search: then it is too late to refuse the run."""
    return type(what) is SearchCertificate or (type(what) is Certificate and what.steps > 0)


def refusal(path: Path, account: Account, totals: Totals, curve: Cost, *, made: bool) -> str:
    """In a line: what it would come to, the limit, what is left, and what can be done.

    Args:
        totals: with what is refused.
        curve: of what is refused.
        made: see `was_made`.
    """
    spent, before = totals.epsilon(account.delta), account.totals()
    left = before.left_squared(account.epsilon, account.delta)
    with_it = f"with it epsilon {rounded_up(spent, 6)} would be spent at delta = {rounded_up(account.delta, 6)}"
    if not math.isfinite(spent):
        with_it = f"this budget has no bound of epsilon with it at delta = {rounded_up(account.delta, 6)}"
    after = "Nothing was entered, and it must not run"
    if made:
        after = (
            "Nothing was entered, but this run was already made: the limit is exceeded, whatever the file says. To "
            "have it in the file, raise the limit first (limit(epsilon, delta); limit --epsilon --delta)"
        )
    hint = ""
    if totals.rule == "gaussian" and type(curve) is not Gaussian:
        how = (
            "has no bound for a search"
            if not math.isfinite(spent)
            else "counts secret sampling and selections as if they were not"
        )
        hint = (
            f". This budget counts by a Gaussian filter, for good, which {how}: a budget that takes all is made with "
            "filter='renyi' (limit --filter renyi), or with adaptive=False (limit --planned) where all plans are "
            "chosen in advance"
        )
    return (
        f"refused: {with_it}, and the limit of the budget {path} is {account.epsilon:g}; "
        f"{rounded_up(before.epsilon(account.delta), 6)} are spent, and one Gaussian plan may have "
        f"{rounded_down(gdp_epsilon(float(left) ** 0.5, account.delta), 6)}. {after}{hint}"
    )


# ----------------------------------------------------------------------------------------------------
# Which entry of a budget is that of a certificate's run, and what it turned out to use.


def entry_of(account: Account, certificate: Certificate, run: str | None) -> Balance:
    """The entry of the certificate's own run: by the fingerprint of its noise, or by a word that only its owner knows.

    By the plan alone it is never known: runs of one plan are alike, plans that name other units look alike in public,
    and a run within a search, which has its entry in that of the search, may have the plan of another entry.
    """
    digest, key = certificate.plan.public().digest, certificate.key_fingerprint
    number = account.by_key.get(key)
    if number is None and run is not None:
        number = account.by_run.get(run)
    if number is None:
        same = any(held.spend.plan == digest for held in account.held.values())
        why = (
            "no entry of the budget has its plan" if not same else
            "its plan alone does not say which entry is that of its run. Say run=, the word under which it was spent; "
            "an entry without a word, or a certificate from before the first step, is not settled: its plan counts"
        )  # fmt: skip
        raise BudgetError(f"the certificate settles nothing: {why}")
    held = account.held[number]
    if held.key not in (None, key) or (run is not None and held.spend.run != run):
        raise BudgetError(
            f"the certificate settles nothing: entry {number} of the budget belongs to another run. Each run settles "
            "its own entry, once"
        )
    if held.spend.plan != digest:
        raise BudgetError(f"the certificate settles nothing: entry {number} of the budget is of another plan")
    return held


def went_on(account: Account, held: Balance, what: Any) -> Settle | None:
    """What a certificate says of a run that was settled before its end, and went on; None where it says no more."""
    if type(what) is not Certificate or held.settled is None:
        return None
    return settlement(account, held, what)


def settlement(account: Account, held: Balance, certificate: Certificate) -> Settle | None:
    """What is to be written; None where nothing changes. Raises: BudgetError where nothing can be claimed."""
    before, shown = held.settled, certificate.realised
    mu = _claimed(account, held, certificate)
    if mu is None and before is None:
        raise BudgetError(
            "the certificate has no realised claim below its plan's, so that its plan's counts: there is none where "
            "neighbours differ in who took part (add-or-remove), batches or the record are secret or on devices, or "
            "it was not shown. Of a run that stopped early settle with its evidence: settle(release.evidence(), ..)"
        )
    if mu is None and before is not None and certificate.steps > before.steps and type(held.curve) is Gaussian:
        mu = held.curve.mu  # it went on, and does not say how far: its plan counts again
    if mu is None or (before is not None and mu <= before.mu):
        return None
    rule = certificate.plan.participation
    k, b = (
        (rule.max_participations, rule.min_separation) if shown is None else
        (shown.max_participations, shown.min_separation)
    )  # fmt: skip
    return Settle(
        number=held.spend.number, key=certificate.key_fingerprint, steps=certificate.steps, max_participations=k,
        min_separation=b, mu=mu, time=now(),
    )  # fmt: skip


def _claimed(account: Account, held: Balance, certificate: Certificate) -> float | None:
    """Mu of what a run used, at most its entry's; None where nothing can be claimed."""
    plan, shown = plan_for(certificate.plan, str(account.neighbours)), certificate.realised
    if shown is None or not is_claimable(certificate.plan) or not is_claimable(plan):
        return None
    claim = realised_claim(plan, shown.max_participations, shown.min_separation)
    return None if claim is None or type(held.curve) is not Gaussian else min(claim.mu, held.curve.mu)


def now() -> str:
    """For people: the order of entries is that of the file, whatever clocks say."""
    return datetime.now(UTC).isoformat(timespec="seconds")
