"""The files of a run that may be shown, in a folder of their own: known public ones, each looked through first."""

import json
import shutil
from pathlib import Path

from anyorder.app import folder
from anyorder.app.fit import MODEL as LINEAR_MODEL
from anyorder.budget.claim import SearchCertificate
from anyorder.budget.search import CERTIFICATE as SEARCH
from anyorder.budget.search import REPORT
from anyorder.errors import ArgumentError, CertificateError
from anyorder.plan.certificate import verify
from anyorder.release import checkpoint
from anyorder.release.weights import check_model

PUBLIC = (
    folder.CERTIFICATE, SEARCH, folder.PLAN, folder.MODEL, LINEAR_MODEL, folder.METRICS, folder.ACCURACY_PLOT,
    folder.NOISE_PLOT, REPORT, "audit.json",
)  # fmt: skip
"""All names that are copied. budget.json is not among them: it says where on the owner's machine the budget is."""


def publish(run: Path, to: Path) -> tuple[list[str], list[str]]:
    """Copy the public files of a run that has ended into a new folder: (names copied, names left where they are).

    The certificate is verified, and must be of the model that is copied, where it names one. No file may hold the
    run's noise key or the key of its record, whatever its name says.

    Raises: ArgumentError; CertificateError where a claim does not hold or a secret is found. Then nothing is copied.
    """
    if not run.is_dir():
        raise ArgumentError(f"publish needs the folder of a run, got {run}")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ArgumentError(f"{to} holds files already: choose a new folder")
    here = {path.name for path in run.iterdir() if path.name not in (".gitignore", ".lock")}
    shown = [name for name in PUBLIC if name in here]
    if not {folder.CERTIFICATE, SEARCH} & set(shown):
        raise ArgumentError(f"{run} has no certificate ({folder.CERTIFICATE}): publish a run that has ended")
    if folder.CERTIFICATE in shown:
        certificate = verify(run / folder.CERTIFICATE, large=True).certificate
        for name in (folder.MODEL, LINEAR_MODEL):
            if certificate is not None and certificate.weights and name in shown:
                check_model(certificate, run / name)
    if SEARCH in shown:
        SearchCertificate.load(run / SEARCH, large=True)
    secrets = _secrets(run)
    for name in shown:
        path = run / name
        if path.is_symlink() or not path.is_file():
            raise ArgumentError(f"{path} must be a file, and is a link or a folder: nothing was copied")
        content = path.read_bytes()
        if any(secret in content for secret in secrets):
            raise CertificateError(f"{path} holds a secret key of the run: nothing was copied. Do not show it")
    to.mkdir(parents=True, exist_ok=True)
    for name in shown:
        shutil.copyfile(run / name, to / name)
    return shown, sorted(here - set(shown))


def _secrets(run: Path) -> list[bytes]:
    """The keys of the run as they may be written: as bytes, and in hexadecimal digits."""
    keys = []
    if (run / folder.CHECKPOINT).exists():
        keys.append(bytes(checkpoint.load(run / folder.CHECKPOINT)["key"]))
    if (run / folder.EVIDENCE).exists():
        keys.append(bytes.fromhex(json.loads((run / folder.EVIDENCE).read_text())["record_key"]))
    return [form for key in keys for form in (key, key.hex().encode(), key.hex().upper().encode())]
