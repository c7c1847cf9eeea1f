"""Which entry of a budget is that of a certificate's run, and what it turned out to use."""

from datetime import UTC, datetime
from typing import Any

from anyorder.accounting.curves import Gaussian
from anyorder.budget.account import Account, Held
from anyorder.budget.entries import Settle
from anyorder.budget.relations import plan_for
from anyorder.certificate import Certificate
from anyorder.errors import BudgetError
from anyorder.realised import is_claimable, realised_claim

__all__ = ["entry_of", "now", "settlement", "went_on"]


def entry_of(account: Account, certificate: Certificate, run: str | None) -> Held:
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


def went_on(account: Account, held: Held, what: Any) -> Settle | None:
    """What a certificate says of a run that was settled before its end, and went on; None where it says no more."""
    if type(what) is not Certificate or held.settled is None:
        return None
    return settlement(account, held, what)


def settlement(account: Account, held: Held, certificate: Certificate) -> Settle | None:
    """What is to be written; None where nothing changes. Raises: BudgetError where nothing can be claimed."""
    before, shown = held.settled, certificate.realised
    mu = _claimed(account, held, certificate)
    if mu is None and before is None:
        raise BudgetError(
            "the certificate has no realised claim below its plan's, so that its plan's counts: there is none where "
            "neighbours differ in who took part (add-or-remove), batches or the record are secret or on devices, or "
            "it was not shown"
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


def _claimed(account: Account, held: Held, certificate: Certificate) -> float | None:
    """Mu of what a run used, at most its entry's; None where nothing can be claimed."""
    plan, shown = plan_for(certificate.plan, str(account.neighbours)), certificate.realised
    if shown is None or not is_claimable(certificate.plan) or not is_claimable(plan):
        return None
    claim = realised_claim(plan, shown.max_participations, shown.min_separation)
    return None if claim is None or type(held.curve) is not Gaussian else min(claim.mu, held.curve.mu)


def now() -> str:
    """For people: the order of entries is that of the file, whatever clocks say."""
    return datetime.now(UTC).isoformat(timespec="seconds")
