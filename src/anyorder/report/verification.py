"""What a verification checked and could not see, in sentences."""

from anyorder.accounting.amplification import methods
from anyorder.accounting.amplification.methods import MonteCarlo
from anyorder.formats import quoted
from anyorder.plan.certificate import Verification
from anyorder.plan.compatibility import trusted_text
from anyorder.plan.plan import Plan
from anyorder.plan.receipt import Receipt

__all__ = ["receipt_facts", "verdict"]

_SHOWN = 40  # steps


def verdict(found: Verification, fresh: bool = False) -> tuple[list[str], list[str]]:
    """(what was checked, and holds; what no file, or none that was given, can show).

    Args:
        fresh: whether fresh samples were drawn for a claim by samples, beside its own.
    """
    checked = ["the file's hash", "sensitivity, noise, mu and epsilon, recomputed from the plan"]
    if found.plan.method is not None:
        checked += [f"the amplified epsilon, {methods.describe(found.plan.method)}; and the one if batches were known"]
    unseen = ["that the noise was added, and that order, units and clipping were what the file says"]
    if type(found.plan.method) is MonteCarlo and not fresh:
        unseen += [
            "that the samples, which salt and settings decide, are not the luckiest of more than 256 tries: --fresh "
            "draws others"
        ]
    if found.certificate is None:
        unseen += ["that anything was trained: this is a plan, and not the certificate of a run"]
    if found.plan.candidate_of is not None:
        unseen += ["what the search spent, of which this is one candidate: verify the search's certificate"]
    if found.plan.participation.secret:
        unseen += ["that the coins were those of the order, and that nobody but the sampler knows the batches"]
    if found.certificate is not None and found.certificate.realised is not None:
        checked += ["the realised mu and epsilon, recomputed from how often units came and how far apart"]
        unseen += [
            "that neither who took part nor the end of the run was chosen by what was released: see the realised"
        ]
    named = "record" not in found.plan.on_device
    if found.plan.on_device:
        unseen += [f"what the plan trusts: {trusted_text(found.plan.on_device)}"]
    if found.evidence is not None:
        steps = found.evidence.ledger.step
        kept = f"that every unit kept to the order in {'its one step' if steps == 1 else f'all {steps} steps'}"
        checked += [
            kept if named else "that the evidence names nobody",
            "that the evidence is the one that the certificate was made of",
        ]
        if found.certificate is not None and found.certificate.realised is not None:
            checked += ["that no unit came more often or nearer than the realised participation says"]
    elif found.certificate is not None and named:
        realised = found.certificate.realised
        if realised is not None and realised.says_nobody(found.certificate.steps):
            unseen += [
                "that nobody took part in any step, as the file says: it is implausible, and the planned epsilon counts"
            ]
        unseen += ["who took part in which step: pass --evidence, if you are the owner or the auditor"]
    if found.receipt is not None:
        checked += ["that the certificate is bound to the receipt's steps, which keep to the order, and their mu"]
    return checked, unseen


def receipt_facts(own: Receipt, plan: Plan) -> list[tuple[str, str]]:
    """(name, text) rows of a unit's own receipt, for `facts_panel`."""
    shown = ", ".join(map(str, own.steps[:_SHOWN])) + (", .." if len(own.steps) > _SHOWN else "")
    mu = f"{own.mu:.5g}"
    if plan.participation.secret:
        mu += " against those who know these steps; the plan's claim is against all others"
    elif plan.mu is not None:
        mu += f" (the plan's: {plan.mu:.5g})"
    return [("unit", quoted(own.unit)), ("steps", f"{len(own.steps)}: {shown}"), ("its own mu", mu)]
