"""Certificates: a run's plan, claims and order in one file that anybody can verify without the data."""

import base64
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyorder._sealed import load_json, save_json
from anyorder.errors import AnyorderError, CertificateError
from anyorder.ledger import Ledger
from anyorder.plan import FORMAT as PLAN_FORMAT
from anyorder.plan import Plan, check_claims

__all__ = ["Certificate", "Verification", "verify"]

FORMAT = "anyorder-certificate/1"


@dataclass(frozen=True)
class Certificate:
    """What a run claims, and the record that backs it.

    Attributes:
        plan: the plan that was run.
        steps: steps taken; at most plan.n. Stopping early costs nothing.
        ledger: which unit took part at which step. Integer ids (row numbers) stand as they are; other keys are
            replaced by the order of their first appearance, since the file is meant to be shown.
        key_fingerprint: a hash of the noise key; equal in two certificates only if noise was used twice.
    """

    plan: Plan
    steps: int
    ledger: Ledger
    key_fingerprint: str

    @classmethod
    def of(cls, plan: Plan, ledger: Ledger, key_fingerprint: str) -> "Certificate":
        """The certificate of a run, with keys that are not integers replaced by numbers."""
        shown = Ledger(plan.participation)
        numbers: dict[Hashable, int] = {}
        integer = _is_integer(ledger)
        known = plan.participation.to_dict()["kind"] == "known_order"  # a known order names its units anyway
        for t, units in enumerate(ledger.history()):
            shown.record(t, units if integer or known else [numbers.setdefault(u, len(numbers)) for u in units])
        return cls(plan, ledger.step, shown, key_fingerprint)

    def save(self, path: str | Path) -> None:
        """Write the certificate as JSON."""
        save_json(path, {
            "format": FORMAT,
            "plan": self.plan.to_dict(),
            "claims": self.plan.claims(),
            "run": {
                "steps": self.steps,
                "ledger_digest": self.ledger.digest(),
                "ledger": base64.b64encode(self.ledger.to_bytes()).decode(),
                "key_fingerprint": self.key_fingerprint,
            },
        })  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> "Certificate":
        """Read and verify. Raises CertificateError if a number does not follow, or a unit broke the rule."""
        data = load_json(path, FORMAT)
        try:
            plan = Plan.from_dict(data["plan"])
            check_claims(plan, data["claims"])
            run = data["run"]
            recorded = Ledger.from_bytes(plan.participation, base64.b64decode(run["ledger"], validate=True))
            ledger = Ledger(plan.participation)
            for t, units in enumerate(recorded.history()):
                ledger.record(t, units)  # the record is replayed: the ledger refuses what the plan does not cover
            found = {"steps": ledger.step, "ledger_digest": ledger.digest()}
            fingerprint = str(run["key_fingerprint"])
        except CertificateError:
            raise
        except (AnyorderError, KeyError, TypeError, ValueError) as problem:
            raise CertificateError(f"{path}: {problem}") from problem
        for name, value in found.items():
            if run[name] != value:
                raise CertificateError(f"the file says {name} = {run[name]!r}; its ledger gives {value!r}")
        return cls(plan, ledger.step, ledger, fingerprint)


@dataclass(frozen=True)
class Verification:
    """What was checked: the plan, and the certificate where the file was one."""

    plan: Plan
    certificate: Certificate | None


def verify(path: str | Path) -> Verification:
    """Recompute every claim of a plan or certificate file from the file alone.

    Checked: the file's own hash; sensitivity, noise, mu and epsilon from the strategy's numbers; and, for a
    certificate, that every unit's steps obey the participation, with the digest of the ledger. Not checked, because no
    file can show it: that the program which wrote the file added the noise. That is what `anyorder.audit` measures.
    Raises: CertificateError with the first thing that does not hold.
    """
    if load_json(path, FORMAT, PLAN_FORMAT)["format"] == PLAN_FORMAT:
        return Verification(Plan.load(path), None)
    certificate = Certificate.load(path)
    return Verification(certificate.plan, certificate)


def _is_integer(ledger: Ledger) -> bool:
    first: Iterable[Any] = next((units for units in ledger.history() if len(units)), ())
    return all(not isinstance(u, str) for u in list(first)[:1])
