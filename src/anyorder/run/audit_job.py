"""`anyorder audit run`: from the name of a set-up to a verdict, and a folder that shows it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyorder import checks
from anyorder.audit.bounds import Method
from anyorder.audit.planted import known_curve
from anyorder.plan.certificate import Certificate
from anyorder.plan.plan import Plan
from anyorder.report import AuditSummary, plot_audit
from anyorder.report.audits import METHODS, audit_panel
from anyorder.report.plots import can_draw
from anyorder.run import audit_files, folder
from anyorder.run.auditing import attack, setup_of
from anyorder.run.progress import StepsBar

__all__ = ["Request", "Verdict", "run"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for; checked before anything is trained.

    Attributes:
        target: see `anyorder.run.auditing.setup_of`.
        canaries, coordinates: see `anyorder.run.audit_training`.
        confidence, methods: of the bounds, see `anyorder.report.AuditSummary`.
        delta: of claim and bounds; None for the plan's.
        plot: a PNG to be written.
        out: a new folder to be written.
    """

    target: str
    canaries: int = 1000
    coordinates: int | None = None
    confidence: float = 0.95
    delta: float | None = None
    methods: Sequence[Method] = tuple(METHODS)
    plot: Path | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        checks.integer("canaries", self.canaries, low=1)
        if self.coordinates is not None:
            checks.integer("coordinates", self.coordinates, low=1)
        checks.probability("confidence", self.confidence)
        for method in self.methods:
            checks.choice("method", method, METHODS)
        if self.delta is not None:
            checks.probability("delta", self.delta)
        if self.plot is not None:
            can_draw(self.plot)
        if self.out is not None:
            checks.optional("matplotlib.figure", extra="train", purpose="drawing an audit")


@dataclass(frozen=True)
class Verdict:
    """A training that was audited.

    Attributes:
        target: what was asked for.
        plan: its claim.
        summary: what the attack saw.
        certificate: of the run.
        seconds: of training and scoring.
    """

    target: str
    plan: Plan
    summary: AuditSummary
    certificate: Certificate
    seconds: float

    def panel(self) -> Any:
        """A rich panel."""
        return audit_panel(self.summary, self.plan)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what audit.json holds beside format and note. No coins, no scores."""
        return {
            "target": self.target,
            "plan_digest": self.certificate.plan.digest,
            "key_fingerprint": self.certificate.key_fingerprint,
            "steps": self.certificate.steps,
            "claims": self.plan.claims(),
            "order": self.plan.participation.describe(),
            "mechanism": self.plan.strategy.describe(),
            "audit": self.summary.to_dict(),
            "seconds": round(self.seconds, 3),
        }


def run(asked: Request, bar: StepsBar) -> Verdict:
    """Train the set-up with canaries in it, and write what was asked for. Raises ArgumentError, TrainingError, .."""
    if asked.out is not None:
        audit_files.fresh(asked.out)
    setup = setup_of(asked.target)
    bar.started(setup.plan)
    began = time.perf_counter()
    done = attack(setup, canaries=asked.canaries, coordinates=asked.coordinates, stepped=bar.stepped)
    seconds = time.perf_counter() - began
    audited, known, certificate = done.audited, done.known, done.certificate
    if asked.delta is not None:
        audited = replace(audited, delta=asked.delta, epsilon=setup.plan.curve.epsilon(asked.delta))
        if known is not None:
            known = replace(known, delta=asked.delta, epsilon=known_curve(setup.plan).epsilon(asked.delta))
    summary = AuditSummary.of(audited, asked.methods, asked.confidence, done.law, known)
    verdict = Verdict(asked.target, setup.plan, summary, certificate, seconds)
    if asked.plot is not None:
        plot_audit(audited, asked.plot)
    if asked.out is not None:
        folder.replace(asked.out / folder.CERTIFICATE, certificate.save)
        plot_audit(audited, asked.out / audit_files.PICTURE)
        audit_files.save(asked.out / audit_files.AUDIT, verdict.to_dict())
    return verdict
