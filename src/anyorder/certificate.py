"""Claim and evidence: what a run promises, in a file for everybody, and who took part when, in a file for its owner."""

import base64
import hmac
import re
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from anyorder._limits import bounded
from anyorder._sealed import brief, canonical, check_names, load_json, quoted, save_json
from anyorder.errors import CertificateError
from anyorder.ledger import Ledger
from anyorder.participation import with_names, without_names
from anyorder.plan import FORMAT as PLAN_FORMAT
from anyorder.plan import Plan, checked_plan, plan_of

__all__ = ["Certificate", "Evidence", "Verification", "verify"]

FORMAT = "anyorder-certificate/2"
EVIDENCE_FORMAT = "anyorder-evidence/1"
_OLD = {
    "anyorder-certificate/1": "it holds who was in which step, which is as secret as the data. Write a new one with "
    "engine.certificate().save(..), from the run's checkpoint, and do not pass the old one on"
}


@dataclass(frozen=True)
class Certificate:
    """What a run claims. Public: it names nobody, and tells nothing of any batch.

    Attributes:
        plan: the plan that was run; a known order's units are numbers in it.
        steps: steps taken; at most plan.n. Stopping early costs nothing.
        key_fingerprint: a hash of the noise key; equal in two certificates only if noise was used twice.
        record_digest: HMAC-SHA256 of plan, steps and the ledger's history, under a key that only the run's owner has:
            it tells nothing to others, and holds the owner to one record.
    """

    plan: Plan
    steps: int
    key_fingerprint: str
    record_digest: str

    def save(self, path: str | Path) -> None:
        """Write the certificate as JSON."""
        save_json(path, {
            "format": FORMAT,
            "plan": self.plan.to_dict(),
            "claims": self.plan.claims(),
            "run": self.run(),
        })  # fmt: skip

    def run(self) -> dict[str, Any]:
        """What the file says on the run, beside its plan."""
        return {"steps": self.steps, "key_fingerprint": self.key_fingerprint, "record_digest": self.record_digest}

    @classmethod
    def load(cls, path: str | Path, *, large: bool = False) -> "Certificate":
        """Read a certificate; every claim is recomputed. Raises CertificateError if one does not follow."""
        return cls._of(load_json(path, FORMAT, old=_OLD, large=large), large)

    @classmethod
    def _of(cls, data: dict[str, Any], large: bool) -> "Certificate":
        check_names("certificate", data, {"format", "plan", "claims", "run"})
        run = check_names("run", data["run"], {"steps", "key_fingerprint", "record_digest"})
        fingerprint, digest = _hex(run, "key_fingerprint", 32), _hex(run, "record_digest", 64)
        plan = checked_plan(data["plan"], data["claims"], large=large)
        steps = run["steps"]
        if type(steps) is not int or not 0 <= steps <= plan.n:
            raise CertificateError(
                f"steps must be an integer from 0 to {plan.n}, the planned ones, got {quoted(steps)}"
            )
        return cls(plan, steps, fingerprint, digest)


@dataclass(frozen=True)
class Evidence:
    """Who took part in which step of a run: what backs its certificate. Secret, as the data is.

    Under secret sampling the batches must stay secret for the claim to hold; elsewhere ids of units are in it.

    Attributes:
        plan: the plan that was run, with the names of a known order.
        ledger: which unit took part at which step.
        key_fingerprint: as in the certificate.
        record_key: 32 bytes, the key of the certificate's record digest; the noise key does not follow from it.
    """

    plan: Plan
    ledger: Ledger
    key_fingerprint: str
    record_key: bytes = field(repr=False)

    @property
    def certificate(self) -> Certificate:
        """The claim that this evidence backs."""
        shown, steps = self.plan.public(), self.ledger.step
        text = canonical({
            "plan": shown.digest, "steps": steps, "key": self.key_fingerprint, "history": self.ledger.digest(),
        })  # fmt: skip
        digest = hmac.new(self.record_key, text.encode(), sha256).hexdigest()
        return Certificate(shown, steps, self.key_fingerprint, digest)

    def save(self, path: str | Path) -> None:
        """Write the evidence as JSON, readable by the owner of the file only."""
        shown = self.certificate
        save_json(path, {
            "format": EVIDENCE_FORMAT,
            "plan_digest": shown.plan.digest,
            **shown.run(),
            "record_key": self.record_key.hex(),
            "names": without_names(self.plan.participation)[1],
            "ledger": base64.b64encode(self.ledger.to_bytes()).decode(),
        }, secret=True)  # fmt: skip

    @classmethod
    def load(cls, path: str | Path, certificate: Certificate, *, large: bool = False) -> "Evidence":
        """Read the evidence of a certificate; its history is replayed under the plan's rule.

        Raises: CertificateError if it belongs to another certificate, or a unit broke the rule; the message names none.
        """
        data = load_json(path, EVIDENCE_FORMAT, large=large)
        check_names("evidence", data, {
            "format", "plan_digest", "steps", "key_fingerprint", "record_digest", "record_key", "names", "ledger",
        })  # fmt: skip
        for name, value in {"plan_digest": certificate.plan.digest, **certificate.run()}.items():
            if type(data[name]) is not type(value) or data[name] != value:
                raise CertificateError(
                    f"the evidence is not that of this certificate: its {name} is {quoted(data[name], 70)}, and the "
                    f"certificate's is {value}"
                )
        key = bytes.fromhex(_hex(data, "record_key", 64))
        try:
            order = with_names(certificate.plan.participation, data["names"])
            with bounded(not large):
                ledger = Ledger.from_bytes(order, base64.b64decode(data["ledger"], validate=True))
        except CertificateError:
            raise
        except Exception as problem:  # whatever the decoder trips over, the file does not hold
            raise CertificateError(f"the evidence does not hold: {brief(problem)}") from problem
        evidence = cls(replace(certificate.plan, participation=order), ledger, certificate.key_fingerprint, key)
        if evidence.certificate != certificate:
            raise CertificateError("the evidence holds another record than the one that the certificate was made of")
        return evidence


@dataclass(frozen=True)
class Verification:
    """What was checked: the plan, the certificate where the file was one, the evidence where it was given."""

    plan: Plan
    certificate: Certificate | None
    evidence: Evidence | None = None


def verify(path: str | Path, *, evidence: str | Path | None = None, large: bool = False) -> Verification:
    """Recompute every claim of a plan or certificate file; with the evidence, check who took part as well.

    Checked from the public file alone: its own hash; sensitivity, noise, mu and epsilon from the strategy's numbers.
    With the evidence: that it is the certificate's, and that every unit's steps obey the participation. Not checked,
    because no file can show it: that the program which wrote the files added the noise, and that order, units and
    clipping were what it says.

    Args:
        path: a certificate or a plan.
        evidence: the certificate's evidence, a file that its owner keeps secret.
        large: read files of one's own that are beyond the bounds on files of strangers.
    Raises: CertificateError with the first thing that does not hold; within 2 seconds and 200 MB, unless `large`.
    """
    data = load_json(path, FORMAT, PLAN_FORMAT, old=_OLD, large=large)
    if data["format"] == PLAN_FORMAT:
        if evidence is not None:
            raise CertificateError("the file is a plan, which has not run: evidence belongs to a certificate")
        return Verification(plan_of(data, large=large), None)
    certificate = Certificate._of(data, large)
    found = None if evidence is None else Evidence.load(evidence, certificate, large=large)
    return Verification(certificate.plan, certificate, found)


def _hex(data: dict[str, Any], name: str, digits: int) -> str:
    value = data[name]
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        raise CertificateError(f"{name} must be {digits} hexadecimal digits, got {quoted(value)}")
    return value
