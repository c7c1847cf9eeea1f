"""What a file of a stranger may cost: two seconds and 200 MB, all bounds in one place.

Amounts are counted before they are made: bytes, values and steps of a file by its reader, and operations where they are
spent, by `check_work`. Files of one's own are read without bounds (`large=True`, `anyorder verify --large`).
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from anyorder.errors import CertificateError

__all__ = [
    "MAX_BYTES", "MAX_OBJECTS", "MAX_STEPS", "MAX_VALUES", "REMEDY", "bounded", "check_plan", "check_work",
    "inflate", "spend_participations",
]  # fmt: skip

MAX_BYTES = 32 << 20  # of a file
MAX_VALUES = 1 << 19  # numbers, texts and lists in it
MAX_OBJECTS = 64
MAX_STEPS = 1 << 19
_SMALL_STEPS = 3 << 10
_MAX_LISTED = 1 << 12
_MAX_BUFFERS = 64
_LEAST_SAMPLED_SIGMA = 0.4  # below, privacy loss distributions take minutes, and epsilon is in the tens
MAX_PARTICIPATIONS = 1 << 21  # of all units together; a known order has them thrice
MAX_INFLATED = 16 << 20  # bytes, of all compressed parts together
MAX_NUMBERS = 3 << 20  # in one array
MAX_OPERATIONS = 3 << 27

REMEDY = "; if you trust where the file comes from, pass large=True (anyorder verify --large)"


class _Budget:
    """What one file has left."""

    def __init__(self) -> None:
        self.inflated = MAX_INFLATED
        self.participations = MAX_PARTICIPATIONS


_budget: ContextVar[_Budget | None] = ContextVar("what the file in hand has left; None: no bounds", default=None)


@contextmanager
def bounded(active: bool) -> Iterator[None]:
    """Within, the functions below refuse what a file of a stranger may not ask for."""
    token = _budget.set(_Budget() if active else None)
    try:
        yield
    finally:
        _budget.reset(token)


def check_work(what: str, *, numbers: int = 0, operations: int = 0) -> None:
    """Raise CertificateError if this is for a file of a stranger, and is too much. Elsewhere nothing is too much.

    Args:
        what: that is computed.
        numbers: in the largest array that it takes.
        operations: on numbers; an operation of Python's own counts as 256.
    """
    if _budget.get() is not None and (numbers > MAX_NUMBERS or operations > MAX_OPERATIONS):
        raise CertificateError(f"{what} takes more time or memory than a file is given{REMEDY}")


def check_plan(data: Any) -> None:
    """Refuse a described plan whose claims a stranger's file may not have recomputed, before any part of it is made.

    Up to `_SMALL_STEPS` steps every pair of a mechanism and an order is quick, but for dense matrices, which
    `check_work` counts; beyond, those are that have a closed form.
    """
    if _budget.get() is None:
        return
    part, chosen, work = (_part(data, name) for name in ("participation", "strategy", "workload"))
    n = _number(work.get("n"), MAX_STEPS)
    for described in (part, chosen, work):
        for name in ("n", "k", "b", "p", "steps_per_epoch"):
            if _number(described.get(name), 0) > MAX_STEPS:
                raise CertificateError(f"the plan has {name} above {MAX_STEPS}, the most that is read{REMEDY}")
        _check_lists(described)
    for described, kinds in ((work, ("custom",)), (chosen, ("dense", "banded_low_rank"))):
        if described.get("kind") in kinds:
            check_work("a dense matrix", numbers=_number(described.get("n"), 0) ** 2)
    if part.get("kind") == "min_separation" and chosen.get("kind") in ("banded", "toeplitz_banded"):
        bands = max(_number(chosen.get("p"), 1), _longest(chosen))
        check_work("a banded mechanism with this separation", operations=n * bands * _rounds(part, n))
    sigma = data.get("sigma") if isinstance(data, dict) else None
    if part.get("kind") == "poisson_sampling" and isinstance(sigma, (int, float)) and sigma < _LEAST_SAMPLED_SIGMA:
        raise CertificateError(f"Poisson sampling with so little noise takes more time than a file is given{REMEDY}")
    if n > _SMALL_STEPS and not _has_closed_form(part, chosen, n):
        raise CertificateError(
            f"the claims of this mechanism, for this order and {n} steps, take more time than a file is given{REMEDY}"
        )


def _check_lists(described: dict[str, Any]) -> None:
    """Refuse lists that are longer than any plan needs: buffers of a BLT, restarts of a tree, entries of all else."""
    most = {"blt": _MAX_BUFFERS, "tree": 4 * _MAX_BUFFERS}.get(str(described.get("kind")), _MAX_LISTED)
    for value in described.values():
        if isinstance(value, dict):
            _check_lists(value)
        elif isinstance(value, list):
            inner = max((len(row) for row in value if isinstance(row, list)), default=0)
            if len(value) > most or inner > _MAX_BUFFERS:
                raise CertificateError(f"a part of the plan lists more numbers than are read{REMEDY}")


def _has_closed_form(part: dict[str, Any], chosen: dict[str, Any], n: int) -> bool:
    """Whether the sensitivity takes about n operations and numbers."""
    kind, order = chosen.get("kind"), part.get("kind")
    k, b = _number(part.get("k"), n), max(1, _number(part.get("b"), 1))
    if kind == "independent" or order == "single_epoch":
        return True
    if kind == "restarted_blt" or _longest(chosen) * _rounds(part, n) > MAX_NUMBERS:
        return kind == "restarted_blt"
    if order == "fixed_order":
        return kind in ("tree", "blt", "banded_inverse", "toeplitz_banded", "square_root")
    if order == "epoch_shuffle":
        toeplitz = kind in ("blt", "banded_inverse", "toeplitz_banded", "square_root")
        return kind == "tree" or (toeplitz and k <= 64 and k * n <= MAX_NUMBERS)
    if order == "min_separation" and kind == "tree":
        return not chosen.get("restarts") and min(b, 2 * n // b) * (n // b) ** 2 <= MAX_OPERATIONS
    return order == "min_separation" and kind in ("blt", "banded_inverse", "square_root")


def _rounds(part: dict[str, Any], n: int) -> int:
    """How often a unit takes part at most."""
    return max(1, min(_number(part.get("k"), n), n // max(1, _number(part.get("b"), 1)) + 1))


def _longest(described: dict[str, Any]) -> int:
    return max((len(value) for value in described.values() if isinstance(value, list)), default=1)


def _part(data: Any, name: str) -> dict[str, Any]:
    found = data.get(name) if isinstance(data, dict) else None
    return found if isinstance(found, dict) else {}


def _number(value: Any, otherwise: int) -> int:
    return value if type(value) is int else otherwise


def spend_participations(count: int) -> None:
    """Count the participations that a file holds. Raises CertificateError if they are too many."""
    budget = _budget.get()
    if budget is not None:
        budget.participations -= count
        if budget.participations < 0:
            raise CertificateError(
                f"the file holds more than the {MAX_PARTICIPATIONS} participations that are read{REMEDY}"
            )


def inflate(data: bytes) -> bytes:
    """What zlib compressed; never more than a file may hold. Raises zlib.error for what is not one whole stream."""
    budget = _budget.get()
    stream = zlib.decompressobj()
    raw = stream.decompress(data, 0 if budget is None else budget.inflated + 1)
    if budget is not None:
        budget.inflated -= len(raw)
        if budget.inflated < 0:
            raise CertificateError(f"the file unpacks to more than the {MAX_INFLATED} bytes that are read{REMEDY}")
    if not stream.eof or stream.unused_data:
        raise zlib.error("cut short, or more behind the end")
    return raw
