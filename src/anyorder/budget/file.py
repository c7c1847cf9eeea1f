"""The budget of a data set: one file in which every plan, run and search on its units is entered before it starts."""

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from anyorder import checks
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.curves import BoundedRange, Composed, Curve, Gaussian, Sampled, compose
from anyorder.accounting.gaussian import NEIGHBOURS
from anyorder.budget import search_privacy
from anyorder.budget.account import (
    Account,
    Balance,
    Remaining,
    UnitFile,
    check_relation,
    check_unit,
    entry_of,
    now,
    plan_for,
    refusal,
    settlement,
    was_made,
    went_on,
)
from anyorder.budget.claim import SearchCertificate, SearchClaim
from anyorder.budget.filter import Searched, best_order
from anyorder.budget.log import FILTERS, Begin, BudgetLog, Limit, Spend, read_curve, relabelled, write_curve
from anyorder.budget.search_privacy import Law
from anyorder.checks import final
from anyorder.errors import ArgumentError, BudgetError
from anyorder.formats import html_table, printable
from anyorder.formatting import counted, rounded_up
from anyorder.participation import KnownOrder
from anyorder.plan.certificate import Certificate, Evidence
from anyorder.plan.plan import CANDIDATE, Plan

_SHARE_UP = 1 + 2.0**-46  # what the rounding of one unit's own mu may have lost


@final
class Budget:
    """A privacy budget of one data set: its limit and all runs entered, in an append-only file that is locked.

        ao.Budget("people.budget", epsilon=8, delta=1e-6).spend(plan)

    Everything that is released about the units must be entered before it starts, and is refused where it would bring
    the whole beyond (epsilon, delta). How entries are counted:

        adaptive=True     by a privacy filter: later plans may depend on what earlier ones released. Gaussian plans
                          exactly, sum of mu^2 <= mu_max^2; if the first is not Gaussian, all of them by a Rényi filter
                          at one order, which is fixed when the budget is made. See `anyorder.budget.filter`
        adaptive=False    by `compose`, loss distributions where there are amplified plans: smaller, and valid only
                          where all plans were chosen before anything was released

    A `KnownOrder` plan that names its units adds each unit's own mu^2 to that unit alone (for neighbours zero-out and
    replace-one, where who is in which step is the same for neighbours); the limit is on the unit that has most. What
    units have is in `.NAME.units` next to the file, as secret as evidence. The file itself names nobody.

    Objects may be kept, copied to other processes and used by threads: each call sees what others entered meanwhile.

    Args:
        path: the file; made if it is not there, which needs epsilon and delta.
        epsilon, delta: the limit. For a file that is there: None, or what it says; `limit` changes it.
        unit: what is protected, as in plans; None: as the first plan says.
        neighbours: None: as the first plan says. "zero-out" takes plans for all three relations.
        adaptive: see above. For a file that is there it must be the file's, where it is given.
        filter: with adaptive: "gaussian", "renyi", or None for what the first entry needs. "gaussian" counts amplified
            plans as if they were not; choose "renyi" beforehand where Gaussian plans and amplified ones or searches
            are to follow each other.
    Raises: ArgumentError; BudgetError if the file cannot be made, read or locked, or was altered.
    Cost: of a call, about 0.1 ms for each entry that was not read before, and a write that waits for the disk.

    Example:
        >>> import tempfile, anyorder as ao
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     budget = ao.Budget(f"{folder}/people.budget", epsilon=8, delta=1e-6)
        ...     print(budget.spend(ao.accounting.Gaussian(0.9)))
        epsilon 4.394 of 8 spent at delta = 1e-06; epsilon 6.066 left for one Gaussian plan
    """

    def __init__(
        self,
        path: str | Path,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        unit: str | None = None,
        neighbours: str | None = None,
        adaptive: bool | None = None,
        filter: str | None = None,
    ) -> None:
        if (epsilon is None) != (delta is None):
            raise ArgumentError(f"epsilon and delta must be given together, got {epsilon!r} and {delta!r}")
        if epsilon is not None and delta is not None:
            epsilon, delta = checks.positive("epsilon", epsilon), checks.probability("delta", delta)
        if unit is not None:
            checks.word("unit", unit)
        if neighbours is not None:
            checks.choice("neighbours", neighbours, NEIGHBOURS)
        if filter is not None:
            checks.choice("filter", filter, FILTERS)
            if adaptive is False:
                raise ArgumentError(f"filter counts with adaptive=True alone, got filter={filter!r}, adaptive=False")
        self._log = BudgetLog(path)
        self._units = UnitFile(self._log.path)
        self._account: Account | None = None
        self._seen: list[Any] = []
        self._key: str | None = None
        wanted = {"unit": unit, "neighbours": neighbours, "adaptive": adaptive, "filter": filter}
        with self._log.locked(write=epsilon is not None, create=epsilon is not None) as descriptor:
            if not self._log.lines and epsilon is not None and delta is not None:
                self._log.begin(descriptor, _begin(epsilon, delta, wanted))
            self._check(epsilon, delta, wanted)

    def __repr__(self) -> str:
        """By what was read last: it waits for no lock."""
        account = self._account
        return f"Budget({str(self.path)!r}: {'being read' if account is None else account.remaining()})"

    def _repr_html_(self) -> str:
        return html_table([("budget", str(self.path)), *self.remaining().facts()])

    def __reduce__(self) -> tuple[Any, ...]:
        return Budget, (self.path,)  # a copy reads the file anew: locks are of one process

    def _check(self, epsilon: float | None, delta: float | None, wanted: dict[str, Any]) -> None:
        """The file is what was asked for."""
        account = self._current()
        if epsilon is not None and (epsilon, delta) != (account.epsilon, account.delta):
            raise BudgetError(
                f"the budget {self.path} has the limit epsilon = {account.epsilon:g} at delta = {account.delta:g}, got "
                f"{epsilon:g} and {delta:g}: open it without them, and change it with limit(epsilon, delta)"
            )
        for name, value in wanted.items():
            found = getattr(account.begin, name)
            if value is not None and found is not None and value != found:
                raise BudgetError(
                    f"the budget {self.path} was made with {name}={found!r}, got {value!r}: that is fixed for good"
                )

    @property
    def path(self) -> Path:
        """The file, symbolic links followed."""
        return self._log.path

    @property
    def id(self) -> str:
        """32 hexadecimal digits, drawn when the budget was made."""
        with self._reading() as account:
            return account.begin.id

    # -- to enter ----------------------------------------------------------------------------------------------------

    def spend(
        self,
        what: Plan | Certificate | SearchClaim | SearchCertificate | Curve,
        name: str = "",
        *,
        run: str | Certificate | None = None,
        named: bool | None = None,
    ) -> Remaining:
        """Enter what is about to be released; when it returns, the entry is on the disk, and the run may start.

        Args:
            what: a plan that is about to run, the claim or certificate of a search, the certificate of a run that was
                not entered, or a curve.
            name: for people, up to 200 characters.
            run: a word of the run, up to 80 letters and digits, under which it can be settled. A certificate, of step
                0 too, has the fingerprint of its noise, is charged once for each key, and so may be asked for at every
                start; with what was started over before it, each start in an entry of its own. A plan or a curve knows
                no key: it is refused under a word that was used. Where the run is saved, give its certificate for the
                word, `run=release.certificate()`: the entry is then of that key, and may be asked for at every start.
            named: whether the units of a `KnownOrder` are their names, the same in every plan. A plan that was read
                from a public file has numbers for them, which are not; None: not if they look like such numbers.
        Returns: what is left after it.
        Raises: BudgetError, before anything is written, if the limit would be exceeded, or relation or unit differ; or
            if the entry cannot be brought to the disk. The message tells public numbers alone.
        """
        asked = _asked(what, name, run)
        with self._log.locked(write=True) as descriptor:
            account = self._current()
            old = self._charged(account, asked, named)
            if old is not None:
                line = went_on(account, old, what)
                if line is not None:
                    self._log.append(descriptor, line)
                return self._current().remaining()
            for start in _before(account, what, asked):
                spend, _ = self._spend(account, start, named)
                self._refuse(account, spend, None, made=True)
                self._log.append(descriptor, spend)
                account = self._current()
            spend, rows = self._spend(account, asked, named)
            self._refuse(account, spend, rows, made=was_made(what))
            if rows is not None:
                spend = replace(spend, units=self._units.write(rows[0], rows[1]).__dict__)
            self._log.append(descriptor, spend)
            return self._current().remaining()

    def check(
        self,
        what: Plan | Certificate | SearchClaim | SearchCertificate | Curve,
        *,
        run: str | Certificate | None = None,
        named: bool | None = None,
    ) -> None:
        """Raise BudgetError where `spend` would; enter nothing. Another process may spend before you do."""
        asked = _asked(what, "", run)
        with self._reading() as account:
            if self._charged(account, asked, named) is None:
                spend, rows = self._spend(account, asked, named, keep=False)
                self._refuse(account, spend, rows, made=was_made(what))

    def _spend(
        self, account: Account, asked: "_Asked", named: bool | None, *, keep: bool = True
    ) -> tuple[Spend, tuple[bytes, Any] | None]:
        """The entry, and what units have of it: (key, rows), or None for everybody the whole."""
        unit, neighbours = account.unit or asked.unit, account.neighbours or asked.neighbours
        check_unit(asked.unit, unit)
        rows = None
        if asked.plan is None:
            check_relation(asked.curve, unit, neighbours)
            curve = asked.curve
        else:
            plan = plan_for(asked.plan, neighbours)
            curve = plan.curve
            order = plan.participation
            if type(order) is KnownOrder and _is_named(plan, named) and neighbours != "add-or-remove":
                mus = np.minimum(plan.unit_mus() * _SHARE_UP, np.inf if plan.mu is None else plan.mu)
                if plan.mu is not None:
                    rows = self._units.hashed(order.units.tolist(), mus, account.units_key, make=keep)
        about = {**asked.about, "neighbours": neighbours, "for": asked.neighbours}
        made = Spend(
            number=account.number, name=asked.name, what=asked.what, parts=write_curve(curve), plan=asked.digest,
            search=None if asked.law is None else asked.law.to_dict(), run=asked.run, key=asked.key, about=about,
            time=now(),
        )  # fmt: skip
        return made, rows

    def _charged(self, account: Account, asked: "_Asked", named: bool | None) -> Balance | None:
        """The entry of the same run, if there is one. Raises: BudgetError where it cannot stand for this."""
        held = _charged(account, asked)
        if held is not None and held.spend.units is not None and asked.key is None:  # of named units: of the same?
            rows = self._spend(account, asked, named, keep=False)[1]
            if rows is None or held.rows is None or rows[1].tobytes() != held.rows.tobytes():
                raise BudgetError(
                    f"entry {held.spend.number} of the budget was made for this run with units by name, and it is not "
                    "known that these are the same: a run has one plan; give the other a word of its own"
                )
        return held

    def _refuse(self, account: Account, spend: Spend, rows: tuple[bytes, Any] | None, *, made: bool) -> None:
        curve = Account.cost_of(spend)
        totals = account.totals_with(curve, None if rows is None else rows[1])
        if totals.epsilon(account.delta) <= account.epsilon:
            return
        raise BudgetError(refusal(self.path, account, totals, curve, made=made))

    def settle(self, certificate: Certificate | Evidence, *, run: str | None = None) -> Remaining:
        """Enter what a run that is over turned out to use, where that is less than its plan.

        Its realised claim replaces the plan's: how often units appeared, how far apart, and mu of that; see
        `anyorder.plan.certificate`. With a filter (adaptive=True) it holds no matter who decided on the end, also by
        looking at releases: the filter sums what was used on every path (`anyorder.budget.filter` says why). With
        adaptive=False it is your promise that neither participants nor the end were chosen by what was released.

        The run must be over: one that goes on uses what others may have spent by then.

        Args:
            certificate: of the run, after its last step; or its evidence, which has what was realised also of a run
                that stopped early, of which a certificate says it only where its owner states why.
            run: the word under which it was spent. Left out where the entry was made with a certificate of the run
                (that of step 0, before it began), or was settled before: then the fingerprint of the noise says whose
                it is. An entry with neither cannot be settled, since runs of one plan cannot be told apart, even where
                it names other units: its plan counts.
        Returns: what is left. A certificate that was settled before changes nothing; one of a later step of the same
            run, which must not be, adds what it used since, whatever the limit.
        Raises: BudgetError if no entry is known to be that of the run, or if there is no claim to be made.
        """
        if type(certificate) is Evidence:
            certificate = certificate.shown(public_stop=True)
        if type(certificate) is not Certificate:
            raise ArgumentError(f"settle needs a Certificate, or Evidence, got {type(certificate).__name__}")
        with self._log.locked(write=True) as descriptor:
            account = self._current()
            held = entry_of(account, certificate, run)
            line = settlement(account, held, certificate)
            if line is not None:
                self._log.append(descriptor, line)
            return self._current().remaining()

    def limit(self, epsilon: float, delta: float) -> Remaining:
        """Set another limit. Below what is spent is allowed: then nothing more may be.

        To raise it after results were seen is your decision, and what was claimed with the old limit no longer holds:
        the data set's guarantee is that of the largest limit that anybody would set. The order of a Rényi filter stays.
        """
        epsilon, delta = checks.positive("epsilon", epsilon), checks.probability("delta", delta)
        with self._log.locked(write=True) as descriptor:
            account = self._current()
            if (epsilon, delta) != (account.epsilon, account.delta):
                self._log.append(descriptor, Limit(epsilon=epsilon, delta=delta, time=now()))
            return self._current().remaining()

    # -- to look -----------------------------------------------------------------------------------------------------

    def remaining(self) -> Remaining:
        """Return what is spent, and left, now."""
        with self._reading() as account:
            return account.remaining()

    def entries(self) -> list[Balance]:
        """All that was spent, in its order, as it counts now."""
        with self._reading() as account:
            return list(account.held.values())

    def curve(self) -> Curve:
        """All entries composed, for the unit that has most: epsilon at other deltas, as if all were chosen in advance.

        With adaptive=True only that of all-Gaussian entries is a claim, and only up to the limit.
        Raises: BudgetError before the first entry, and with searches among them, which have no such curve.
        """
        with self._reading() as account:
            if not account.held:
                raise BudgetError(f"the budget {self.path} has no entries yet, and so no curve")
            totals, neighbours = account.totals(), str(account.neighbours)
            curves = [one for one in totals.rest if not isinstance(one, Searched)]
            if len(curves) < len(totals.rest):
                raise BudgetError("a search for the best of a secret number of runs has an epsilon, and no curve")
            label = curves[0].neighbours if curves else neighbours
            found = compose(Account.gaussian(totals.squared, str(account.unit), label), *curves)
        return relabelled(found, neighbours)

    @contextmanager
    def _reading(self) -> Iterator[Account]:
        with self._log.locked(write=False):
            yield self._current()

    def _current(self) -> Account:
        """The account of all lines that were read."""
        if not self._log.lines:
            raise BudgetError(
                f"the budget file {self.path} is empty: it was never begun. Make it with epsilon and delta"
            )
        key = self._units.fingerprint()
        if self._account is None or self._seen is not self._log.lines or self._key != key:
            begin = self._log.lines[0]
            assert type(begin) is Begin  # as the log sees to
            self._account, self._seen, self._counted = Account(begin, self._units), self._log.lines, 1
            self._key = key  # rows of units that were read under another are not those that a new object would see
        account, self._account = self._account, None  # what is interrupted half way is summed anew
        while self._counted < len(self._log.lines):
            account.take(self._log.lines[self._counted])
            self._counted += 1
        self._account = account
        return account


@dataclass(frozen=True)
class _Asked:
    """What is to be spent, in one form."""

    what: str
    name: str
    curve: Curve
    plan: Plan | None
    digest: str | None
    run: str | None
    key: str | None
    about: dict[str, Any]
    law: Law | None = None
    has_key: bool = False
    """Whether the word is the fingerprint of the run's noise, by its certificate."""

    @property
    def unit(self) -> str:
        return self.curve.unit if self.plan is None else self.plan.unit

    @property
    def neighbours(self) -> str:
        return self.curve.neighbours if self.plan is None else self.plan.neighbours


def _asked(what: Any, name: str, run: str | Certificate | None) -> _Asked:
    if type(run) is Certificate:
        if type(what) is not Plan or what.public().digest != run.plan.digest:
            raise ArgumentError("run must be the certificate of a run of this plan, or a word")
        return replace(_asked(what, name, run.key_fingerprint), has_key=True)
    if not isinstance(name, str) or len(name) > 200 or printable(name) != name:
        raise ArgumentError("name must be a text of up to 200 characters that can be printed on one line")
    if run is not None and not (isinstance(run, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,79}", run)):
        raise ArgumentError(f"run must be up to 80 letters, digits, ' ', '.', '_' or '-', got {ascii(run)[:90]}")
    plan = what.plan if type(what) is Certificate else what if type(what) is Plan else None
    if plan is not None and plan.candidate_of is not None:
        raise BudgetError(f"the plan is of {CANDIDATE}. Enter that one, or give the budget to tune(), which enters it")
    if plan is not None:
        key = what.key_fingerprint if type(what) is Certificate else None
        kind = "certificate" if type(what) is Certificate else "plan"
        return _Asked(kind, name, plan.curve, plan, plan.public().digest, run, key, _about(plan))
    if type(what) is SearchCertificate:
        run = run or f"search {what.key_fingerprint}"  # the word under which the search itself was charged
        what = what.claim
    if type(what) is SearchClaim:
        return _Asked("search", name, what.curve, None, None, run, None, {}, what.law)
    if isinstance(what, Curve):
        return _Asked("curve", name, what, None, None, run, None, {})
    raise ArgumentError(
        "spend needs a Plan, the Certificate of a run, the claim of a search, or a curve (anyorder.accounting), got "
        + type(what).__name__
    )


def _about(plan: Plan) -> dict[str, Any]:
    """What exports and people want to know of a plan; public, as the plan is."""
    return {
        "mechanism": plan.strategy.describe(), "order": plan.participation.describe(), "steps": plan.n,
        "clip_norm": plan.clip_norm, "noise_multiplier": plan.noise_multiplier, "epsilon": plan.epsilon,
        "delta": plan.delta, "amplified": plan.amplified, "exact_integers": plan.grid is not None,
        "on_device": list(plan.on_device), "selection": None if plan.selection is None else plan.selection.describe(),
    }  # fmt: skip


def _begin(epsilon: float, delta: float, wanted: dict[str, Any]) -> Begin:
    adaptive = wanted["adaptive"] is not False
    return Begin(
        id=secrets.token_hex(16), epsilon=epsilon, delta=delta, unit=wanted["unit"], neighbours=wanted["neighbours"],
        adaptive=adaptive, filter=wanted["filter"], order=best_order(epsilon, delta), time=now(),
    )  # fmt: skip


def _charged(account: Account, asked: _Asked) -> Balance | None:
    """The entry of the same run, if there is one. Raises: BudgetError where it cannot stand for this."""
    number = account.by_run.get(asked.run or "", account.by_key.get(asked.key or ""))
    if number is None:
        return None
    held = account.held[number]
    spend = held.spend
    law = None if asked.law is None else asked.law.to_dict()
    if (spend.plan, spend.search) != (asked.digest, law) or (
        asked.digest is None and spend.parts != write_curve(asked.curve)
    ):
        raise BudgetError(
            f"entry {number} of the budget was made for this run with another plan: a run has one; give the other a "
            "word of its own"
        )
    if held.settled is not None and asked.what == "plan":
        raise BudgetError(
            f"entry {number} of the budget was settled: its run is over, and must not go on. Spend on a new run"
        )
    if asked.what in ("plan", "curve") and not asked.has_key:
        raise BudgetError(
            f"entry {number} of the budget was made under this word, and a {asked.what} does not say which noise: "
            "a program without a checkpoint is another run at each start, and counts each time. Save the run first, "
            "and enter its certificate, which is charged once for each noise key: release.save(), and then "
            "budget.spend(release.certificate()), or budget.spend(plan, run=release.certificate()). Or give this start "
            "a word of its own"
        )
    if asked.key is not None and account.by_key.get(asked.key) != number and asked.run != asked.key:
        known = "is of another run, with other noise" if held.key is not None else "says nothing of its run's noise"
        raise BudgetError(
            f"entry {number} of the budget, made under the word of this certificate, {known}. Enter the run under a "
            "word of its own; or, if the entry is its own, settle it: that tells them apart from then on"
        )
    return held


def _before(account: Account, what: Any, asked: _Asked) -> list[_Asked]:
    """The starts before a run that have no entry yet: each is charged as its whole plan, under its own noise."""
    if type(what) is not Certificate:
        return []
    known = {*account.by_key, *account.by_run}
    name = f"{asked.name}, started over"[:200] if asked.name else "started over"
    return [replace(asked, name=name, run=None, key=key) for key, _ in what.earlier if key not in known]


def _is_named(plan: Plan, named: bool | None) -> bool:
    """Whether the units of a known order are the same in every plan."""
    return plan.public().digest != plan.digest if named is None else bool(named)


# ----------------------------------------------------------------------------------------------------
# What a budget says of itself in two public forms: a registry of deployments, and a guide to evaluating them.
#
# `opendp`: a record with the fields of the OpenDP deployments registry (opendp/deployments-registry-data, schema of
# July 2026). JSON, which is YAML too. What only the owner knows is empty, or what that registry's own template has
# where it allows nothing empty; `administrative.notes` lists these fields. `nist`: answers to what NIST SP 800-226
# ("Guidelines for Evaluating Differential Privacy Guarantees", 2025) asks one to look at, layer by layer, with
# questions in our words. Both are made from entries alone, which are public.


FORMATS = ("nist", "opendp")
_ADJACENT = {
    "zero-out": "two data sets that differ in one {0}, all of whose contributions are replaced by zero in the other",
    "replace-one": "two data sets that differ in one {0}, replaced by any other in the same steps",
    "add-or-remove": "two data sets of which one has one {0} more",
}
_RULES = {
    "gaussian": "fully adaptive composition of Gaussian DP: the sum of mu^2 over all releases, held below that of "
    "the limit by a privacy filter (Smith and Thakurta 2022); exact",
    "renyi": "a Renyi filter at one order that was fixed beforehand (Feldman and Zrnic 2021)",
    "planned": "composition of privacy loss distributions of releases that were all chosen in advance",
}
_BLANK = [
    "basic.name", "basic.data_curators", "basic.intended_use", "basic.data_product_type", "basic.data_product_region",
    "basic.description", "basic.publication_date", "dp_variant.data_domain", "dp_variant.unprotected_quantities",
    "deployment_model.actors", "deployment_model.data_source_type_details", "deployment_model.access_type_details",
    "accounting.post_processing", "implementation.preprocessing_and_hyperparameter_tuning",
    "implementation.justification", "administrative.sources", "administrative.registry_authors",
]  # fmt: skip
"""What only the owner knows."""


def export(budget: Budget, format: str) -> str:
    """The text of an export. Raises: ArgumentError for another format than those of `FORMATS`; BudgetError."""
    match format:
        case "opendp":
            made = opendp(budget)
        case "nist":
            made = nist(budget)
        case _:
            raise ArgumentError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    return json.dumps(made, indent=1, allow_nan=False)


def opendp(budget: Budget) -> dict[str, Any]:
    """A record of the deployments registry, of its third tier, as a draft that the owner completes."""
    facts = _Facts(budget)
    return {
        "url_slug": "",
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": {
                "name": "", "data_curators": [""], "intended_use": "", "data_product_type": "Machine learning model",
                "data_product_region": "", "description": "", "publication_date": "1900-01-01",
            },
            "dp_variant": {"variant_name": "Approximate DP", "data_domain": "", "unprotected_quantities": ""},
            "privacy_loss": {
                "privacy_unit": facts.unit,
                "privacy_unit_details": facts.adjacent,
                "privacy_parameters": {"epsilon": facts.left.spent, "delta": facts.left.delta},
                "privacy_parameters_details": facts.parameters,
            },
            "deployment_model": {
                "model_name": "Central",
                "model_name_details": facts.trust,
                "actors": "",
                "release_type": "One release" if len(facts.entries) == 1 else "Many releases",
                "release_type_details": facts.releases,
                "data_source_type": "Static",
                "data_source_type_details": "",
                "access_type": "Non-interactive",
                "access_type_details": "",
            },
            "accounting": {"post_processing": "", "composition": facts.composition},
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": "",
                "mechanisms": facts.mechanisms,
                "justification": "",
            },
            "administrative": {
                "sources": "",
                "notes": f"Made from the entries of a budget file. To be filled in by the owner: {', '.join(_BLANK)}.",
                "registry_authors": [""],
            },
        },
    }  # fmt: skip


def nist(budget: Budget) -> dict[str, Any]:
    """Questions under the layers of the guide's pyramid, from its top, and what the entries answer; "" for none."""
    facts = _Facts(budget)
    asked = [
        ("privacy parameters", "Which definition of differential privacy holds?", "(epsilon, delta)-DP"),
        ("privacy parameters", "What is epsilon, for all releases together?", facts.left.spent),
        ("privacy parameters", "What is delta?", facts.left.delta),
        ("privacy parameters", "What is the most that epsilon may become?", facts.left.limit),
        ("privacy parameters", "What else is known of the loss?", facts.parameters),
        ("unit of privacy", "Whom or what does one unit stand for?", facts.unit),
        ("unit of privacy", "When are two data sets neighbours?", facts.adjacent),
        ("unit of privacy", "Are the contributions of one unit bounded, and how?", facts.bounded),
        ("algorithms", "Which mechanisms add the noise?", facts.mechanisms),
        ("algorithms", "How do several releases compose?", facts.composition),
        ("algorithms", "How many releases are there?", facts.releases),
        ("algorithms", "Is tuning of settings counted?", facts.tuning),
        ("implementation", "What is done against leaks through floating-point arithmetic?", facts.arithmetic),
        ("implementation", "What is done against leaks through timing and other side channels?", ""),
        ("trust model", "Whom must one trust with the data?", facts.trust),
        ("trust model", "Who may query, and how is the budget shared among them?", ""),
        ("utility and bias", "How accurate are the results, and for whom are they less so?", ""),
        ("security", "Who has access to the data, keys and records of participation?", ""),
        ("data collection", "How are the data collected, and how long are they kept?", ""),
    ]  # fmt: skip
    return {
        "guide": "NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees",
        "budget": budget.id,
        "answers": [{"layer": layer, "question": question, "answer": answer} for layer, question, answer in asked],
    }


class _Facts:
    """Sentences and numbers that both forms need."""

    def __init__(self, budget: Budget) -> None:
        self.left: Remaining = budget.remaining()
        self.entries: list[Balance] = budget.entries()
        first = self.entries[0] if self.entries else None
        self.unit = "" if first is None else first.curve.unit
        relation = "" if first is None else str(first.spend.about["neighbours"])
        self.adjacent = _ADJACENT[relation].format(self.unit) if relation else ""
        self.composition = _RULES[self.left.rule]
        self.mechanisms = "; ".join(f"{held.spend.number}. {_mechanism(held)}" for held in self.entries)
        self.releases = "; ".join(_release(held) for held in self.entries)
        self.bounded = "; ".join(sorted({
            f"a part in a step to L2 norm {held.spend.about['clip_norm']:g}, {held.spend.about['order']}"
            for held in self.entries if held.spend.plan is not None
        }))  # fmt: skip

    @property
    def parameters(self) -> str:
        """What is known beside epsilon and delta."""
        told = f"limit epsilon {self.left.limit:g} at the same delta"
        if self.left.rule == "gaussian" and self.entries:
            told += "; the loss is that of Gaussian DP, from which epsilon follows at every delta"
        if any(held.rows is not None for held in self.entries):
            told += "; summed unit by unit where orders were known, and said of the unit that has most"
        return told

    @property
    def trust(self) -> str:
        """Who sees what."""
        devices = sorted({one for held in self.entries for one in held.spend.about.get("on_device", [])})
        alone = f"; trusted to the users' devices: {', '.join(devices)}" if devices else ""
        return f"the curator holds the data and adds the noise before anything is released{alone}"

    @property
    def arithmetic(self) -> str:
        """Exact integers, or not."""
        exact = [held.spend.about.get("exact_integers") for held in self.entries if held.spend.plan is not None]
        if not exact:
            return ""
        if all(exact):
            return "noise in exact integers"
        return "noise in floating point" + (" in some releases, in exact integers in others" if any(exact) else "")

    @property
    def tuning(self) -> str:
        """Searches among the entries."""
        searches = sum(held.spend.what == "search" for held in self.entries)
        return f"{searches} of {len(self.entries)} entries are searches, counted as a whole" if searches else ""


def _mechanism(held: Balance) -> str:
    about = held.spend.about
    noise = _law(read_curve(held.spend.parts))
    if held.spend.search is not None:
        return f"{search_privacy.from_dict(held.spend.search).describe()}, each with: {noise}"
    if held.spend.plan is None:
        return noise
    std, steps = about["noise_multiplier"], about["steps"]
    return f"{noise}, as {about['mechanism']}, noise of std {std:.6g} clip norms over {counted(steps, 'step')}"


def _law(curve: Curve) -> str:
    match curve:
        case Gaussian():
            return f"Gaussian mechanism with mu = {rounded_up(curve.mu, 6)}"
        case BoundedRange():
            return f"{curve.draws} draws of the exponential mechanism with range {curve.e0:.6g}"
        case Sampled():
            sample = f"each on a secret sample at rate {curve.sampling_probability:.6g}"
            return f"{curve.n} Gaussian mechanisms with noise multiplier {curve.sigma:.6g}, {sample}"
        case Amplified():
            order = curve.participation.describe()
            noise = f"noise multiplier {curve.noise_multiplier:.6g}"
            return f"matrix mechanism {curve.strategy.describe()} with {noise}, {order}"
        case Composed():
            return " with ".join(_law(part) for part in curve.parts)


def _release(held: Balance) -> str:
    spend, settled = held.spend, held.settled
    name = f" ({spend.name})" if spend.name else ""
    stopped = "" if settled is None else f", over after {counted(settled.steps, 'step')}"
    return f"{spend.number}. {spend.what}{name}, {spend.time[:10]}{stopped}"
