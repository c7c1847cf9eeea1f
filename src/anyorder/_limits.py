"""What a file of a stranger may cost: two seconds and 200 MB, all bounds in one place.

Amounts are counted before they are made: bytes, values and steps of a file by its reader, and operations where they are
spent, by `check_work`. Files of one's own are read without bounds (`large=True`, `anyorder verify --large`).
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from anyorder.errors import LimitError

__all__ = [
    "MAX_BYTES", "MAX_NUMBERS", "MAX_OBJECTS", "MAX_OPERATIONS", "MAX_STEPS", "MAX_VALUES", "REMEDY", "bounded",
    "check_work", "inflate", "is_bounded", "spend_participations",
]  # fmt: skip

MAX_BYTES = 32 << 20  # of a file
MAX_VALUES = 1 << 19  # numbers, texts and lists in it
MAX_OBJECTS = 64
MAX_STEPS = 1 << 19
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


def is_bounded() -> bool:
    """Whether what is done now is for a file of a stranger."""
    return _budget.get() is not None


def check_work(what: str, *, numbers: int = 0, operations: int = 0) -> None:
    """Raise CertificateError if this is for a file of a stranger, and is too much. Elsewhere nothing is too much.

    Args:
        what: that is computed.
        numbers: in the largest array that it takes.
        operations: on numbers; an operation of Python's own counts as 256.
    """
    if _budget.get() is not None and (numbers > MAX_NUMBERS or operations > MAX_OPERATIONS):
        raise LimitError(f"{what} takes more time or memory than a file is given{REMEDY}")


def spend_participations(count: int) -> None:
    """Count the participations that a file holds. Raises CertificateError if they are too many."""
    budget = _budget.get()
    if budget is not None:
        budget.participations -= count
        if budget.participations < 0:
            raise LimitError(f"the file holds more than the {MAX_PARTICIPATIONS} participations that are read{REMEDY}")


def inflate(data: bytes) -> bytes:
    """What zlib compressed; never more than a file may hold. Raises zlib.error for what is not one whole stream."""
    budget = _budget.get()
    stream = zlib.decompressobj()
    raw = stream.decompress(data, 0 if budget is None else budget.inflated + 1)
    if budget is not None:
        budget.inflated -= len(raw)
        if budget.inflated < 0:
            raise LimitError(f"the file unpacks to more than the {MAX_INFLATED} bytes that are read{REMEDY}")
    if not stream.eof or stream.unused_data:
        raise zlib.error("cut short, or more behind the end")
    return raw
