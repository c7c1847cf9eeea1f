"""Sealed JSON: files that carry the sha256 of their own content, so that any alteration shows."""

import hashlib
import json
from pathlib import Path
from typing import Any

from anyorder.errors import CertificateError

__all__ = ["canonical", "load_json", "save_json"]


def canonical(data: dict[str, Any]) -> str:
    """The one text of JSON values. Raises ValueError for numbers that are not finite."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def save_json(path: str | Path, data: dict[str, Any]) -> None:
    """Write data with the sha256 of its canonical form, so that any altered number shows."""
    sealed = {**data, "sha256": hashlib.sha256(canonical(data).encode()).hexdigest()}
    try:
        Path(path).write_text(json.dumps(sealed, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as problem:
        raise CertificateError(f"cannot write {path}: {problem.strerror or problem}") from problem


def load_json(path: str | Path, *formats: str) -> dict[str, Any]:
    """Read what `save_json` wrote; refuses other formats, damaged JSON, and altered content."""
    try:
        data: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise CertificateError(f"cannot read {path}: {problem.strerror or problem}") from problem
    except ValueError as problem:
        raise CertificateError(f"{path} is not JSON: {problem}") from problem
    found = data.get("format") if isinstance(data, dict) else type(data).__name__
    if found not in formats:
        raise CertificateError(f"{path} must be of format {' or '.join(formats)}, got {found!r}")
    digest = data.pop("sha256", None)
    try:
        actual = hashlib.sha256(canonical(data).encode()).hexdigest()
    except ValueError as problem:
        raise CertificateError(f"{path} holds a number that is not finite: {problem}") from problem
    if digest != actual:
        raise CertificateError(f"{path} was altered: its sha256 is {actual}, the file says {digest}")
    return data
