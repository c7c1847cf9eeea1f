"""What an audit leaves: audit.json, its picture, and the certificate of the run that was audited."""

import math
from pathlib import Path
from typing import Any

from anyorder.audit.result import REFUTED
from anyorder.errors import ArgumentError, CertificateError
from anyorder.formats import brief, load_json, save_json
from anyorder.formatting import counted
from anyorder.plan.plan import Plan
from anyorder.report.html import Attacked

__all__ = ["AUDIT", "FORMAT", "PICTURE", "found", "fresh", "read", "save"]

AUDIT = "audit.json"
PICTURE = "audit.png"
FORMAT = "anyorder-audit/1"
NOTE = (
    "The audited run had canaries in it: the model that it trained is for the audit, not for use. Its certificate is "
    "that of the audited run, and holds for the units of the data."
)


def fresh(out: Path) -> Path:
    """The folder, made if it is not there. Raises ArgumentError if it holds files or cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ArgumentError(f"output folder {out} holds files already: choose another")
    except OSError as problem:
        raise ArgumentError(f"output folder {out} cannot be written: {problem.strerror or problem}") from problem
    return out


def save(path: Path, described: dict[str, Any]) -> None:
    """Write audit.json, with its sha256."""
    save_json(path, {"format": FORMAT, "note": NOTE, **described})


def read(path: str | Path, plan: Plan) -> str:
    """What an audit.json says of a plan, in a sentence. It may be of any run of the plan; nobody signed it.

    Raises: CertificateError if the file is none, was altered, is of another plan, or says that the claim was refuted.
    """
    attacked, refuted = found(path, plan)
    if refuted is not None:
        raise CertificateError(refuted)
    return (
        f"an audit of a run of this plan, with {counted(attacked.canaries, 'canary')}, did not refute its claim "
        f"(p = {attacked.p_value:.2g})"
    )


def found(path: str | Path, plan: Plan) -> tuple[Attacked, str | None]:
    """(what the attack found, how it refuted the claim or None), see `read`.

    Raises: CertificateError if the file is none, was altered, or is of another plan.
    """
    data = load_json(path, FORMAT)
    if data.get("plan_digest") != plan.public().digest:
        raise CertificateError(
            "the audit is of another plan, and says nothing of this claim: audit a training with this file's plan"
        )
    try:
        seen = data["audit"]
        refuted, p_value = seen["refuted"], float(seen["p_value"])
        counts = int(seen["canaries"]["in"]), int(seen["canaries"]["out"])
        bound = seen.get("epsilon_at_least", {}).get("one_run")
        at_least = None if bound is None else float(bound)
        delta = float(seen.get("claimed", {}).get("delta", plan.delta))
        confidence = float(seen.get("confidence", 0.95))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as problem:
        raise CertificateError(f"the audit has no verdict: {brief(problem)}") from problem
    agrees = refuted is not False or REFUTED <= p_value <= 1
    possible = min(counts) >= 0 and 0 < delta < 1 and 0 < confidence < 1 and not math.isnan(at_least or 0.0)
    if not (agrees and possible):
        raise CertificateError(
            "the audit does not agree with itself: its verdict is not that of its p-value and counts"
        )
    count = sum(counts)
    claimed = None if delta == plan.delta else plan.curve.epsilon(delta)  # a bound says nothing at another delta
    attacked = Attacked(canaries=count, p_value=p_value, at_least=at_least, claimed=claimed, confidence=confidence)
    if refuted is not False:
        canaries = counted(count, "canary")
        return attacked, f"an audit of this plan, with {canaries}, refuted its claim (p = {p_value:.2g})"
    return attacked, None
