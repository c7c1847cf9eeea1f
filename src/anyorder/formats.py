"""What a file of a stranger may cost: two seconds and 200 MB, all bounds in one place.

Amounts are counted before they are made: bytes, values and steps of a file by its reader, and operations where they are
spent, by `check_work`. Files of one's own are read without bounds (`large=True`, `anyorder verify --large`).
"""

import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from pathlib import Path
from typing import Any, NoReturn

from anyorder import durable
from anyorder.errors import CertificateError, LimitError

MAX_BYTES = 32 << 20  # of a file
MAX_VALUES = 1 << 19  # numbers, texts and lists in it
MAX_OBJECTS = 64
MAX_STEPS = 1 << 19
MAX_PARTICIPATIONS = 1 << 21  # of all units together; a known order has them thrice
MAX_INFLATED = 16 << 20  # bytes, of all compressed parts together
MAX_NUMBERS = 3 << 20  # in one array
MAX_OPERATIONS = 3 << 27

REMEDY = "; if you trust where the file comes from, pass large=True (anyorder verify --large)"


class _TimeBudget:
    """What one file has left."""

    def __init__(self) -> None:
        self.inflated = MAX_INFLATED
        self.participations = MAX_PARTICIPATIONS


_budget: ContextVar[_TimeBudget | None] = ContextVar("what the file in hand has left; None: no bounds", default=None)


@contextmanager
def bounded(active: bool) -> Iterator[None]:
    """Within, the functions below refuse what a file of a stranger may not ask for."""
    token = _budget.set(_TimeBudget() if active else None)
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


# ----------------------------------------------------------------------------------------------------
# Sealed JSON: files that carry the sha256 of their own content, and a reader that no file can hurt.
#
# Whoever writes a file can seal it, so the seal finds damage, not lies; what the numbers say is checked by those who
# read them. The reader takes files from strangers: it bounds time and memory before it looks at the content, and
# refuses with one line.


_MAX_DIGITS = 32
_MAX_INTEGER = 2**63 - 1


def canonical(data: dict[str, Any]) -> str:
    """The one text of JSON values. Raises ValueError for numbers that are not finite."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def save_json(path: str | Path, data: dict[str, Any], *, secret: bool = False) -> None:
    """Put data in the place of what a file holds, with the sha256 of its canonical form: any altered number shows.

    Args:
        secret: for its owner's eyes: the file is readable by the owner only, from its first byte on.
    """
    sealed = {**data, "sha256": hashlib.sha256(canonical(data).encode()).hexdigest()}
    text = json.dumps(sealed, indent=1, sort_keys=True, allow_nan=False) + "\n"
    try:
        if Path(path).exists() and not Path(path).is_file():
            Path(path).write_text(text, encoding="utf-8")  # a pipe, or standard output
        else:
            durable.replace(path, text.encode(), secret=secret)
    except OSError as problem:
        raise CertificateError(f"cannot write {path}: {problem.strerror or problem}") from problem


def load_json(
    path: str | Path, *formats: str, old: dict[str, str] | None = None, large: bool = False
) -> dict[str, Any]:
    """Read what `save_json` wrote; refuses other formats, damaged JSON, and altered content.

    Args:
        formats: those that are read.
        old: formats of earlier versions, and why they are not read.
        large: lift the bounds on size: for files of one's own.
    Raises: CertificateError.
    """
    data = read_json(path, large=large)
    found = data.get("format")
    if isinstance(found, str) and found in (old or {}):
        raise CertificateError(f"{_name(path)} is of the old format {found}, which is refused: {(old or {})[found]}")
    if found not in formats:
        raise CertificateError(f"{_name(path)} must be of format {' or '.join(formats)}, got {quoted(found)}")
    digest = data.pop("sha256", None)
    try:
        actual = hashlib.sha256(canonical(data).encode()).hexdigest()
    except RecursionError:
        _refuse(path, "is nested too deep")
    if digest != actual:
        raise CertificateError(f"{_name(path)} was altered: its sha256 is {actual}, the file says {quoted(digest)}")
    return data


def read_json(path: str | Path, *, large: bool = False) -> dict[str, Any]:
    """The JSON object in a file. Strict: ASCII, no name twice, numbers that are finite and fit into 64 bits.

    Raises: CertificateError, within 2 seconds and 200 MB whatever the file holds, unless `large`.
    """
    text = _read(path, large)
    reader = _Reader(large)
    try:
        data = json.loads(
            text, object_pairs_hook=reader.object, parse_int=_integer, parse_float=_real, parse_constant=_constant
        )
    except RecursionError:
        _refuse(path, "is nested too deep")
    except ValueError as problem:
        _refuse(path, f"is not JSON: {problem}")
    if not isinstance(data, dict):
        _refuse(path, f"must hold a JSON object, got {type(data).__name__}")
    return data


def mentions(path: str | Path, text: str, *, large: bool = False) -> bool:
    """Whether the text stands anywhere in a file, which is not read as JSON: a quick look at whose file it may be."""
    return text in _read(path, large)


def _read(path: str | Path, large: bool) -> str:
    try:
        try:
            descriptor = os.open(
                path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
            )  # a pipe without a writer would block
        except ValueError as problem:  # a zero byte
            raise CertificateError(f"cannot read {_name(path)}: {problem}") from None
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                _refuse(path, "is no regular file")
            if not large and found.st_size > MAX_BYTES:
                _too_much(path, f"has {found.st_size} bytes, and up to {MAX_BYTES} are read{REMEDY}")
            data = file.read() if large else file.read(MAX_BYTES + 1)
    except OSError as problem:
        raise CertificateError(f"cannot read {_name(path)}: {problem.strerror or problem}") from None
    if not data.isascii():
        _refuse(path, "is not JSON of this package, which is plain ASCII")
    if not large:
        _check_amount(path, data)
    return data.decode("ascii")


def _check_amount(path: str | Path, data: bytes) -> None:
    """Count what would be made, before anything is made; marks inside of texts count too, and are few."""
    if len(data) > MAX_BYTES:
        _too_much(path, f"has more than the {MAX_BYTES} bytes that are read{REMEDY}")
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > MAX_VALUES:
        _too_much(path, f"holds about {values} values, and up to {MAX_VALUES} are read{REMEDY}")


class _Reader:
    """Objects of one file: few, and no name twice."""

    def __init__(self, large: bool) -> None:
        self._left = math.inf if large else MAX_OBJECTS

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {MAX_OBJECTS} objects")
        result: dict[str, Any] = {}
        for name, value in pairs:
            if name in result:
                raise ValueError(f"the name {quoted(name)} stands twice in one object")
            result[name] = value
        return result


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > _MAX_INTEGER:
        raise ValueError(f"the integer {quoted(text)} does not fit into 64 bits")
    return int(text)


def _real(text: str) -> float:
    value = float(text) if len(text) <= _MAX_DIGITS else math.inf
    if not math.isfinite(value):
        raise ValueError(f"the number {quoted(text)} is beyond double precision")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _refuse(path: str | Path, why: str) -> NoReturn:
    raise CertificateError(f"{_name(path)} {why}")


def _too_much(path: str | Path, why: str) -> NoReturn:
    raise LimitError(f"{_name(path)} {why}")


def check_names(what: str, data: Any, names: set[str]) -> dict[str, Any]:
    """The object, which must have these fields and no others. Raises: CertificateError."""
    if not isinstance(data, dict):
        raise CertificateError(f"{what} must be an object, got {quoted(data)}")
    if data.keys() != names:
        missing, strange = sorted(names - data.keys()), [quoted(name) for name in data.keys() - names]
        raise CertificateError(
            f"{what} must have the fields {', '.join(sorted(names))}; missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(sorted(strange)[:3]) or 'none'}"
        )
    return data


def hexadecimal(data: dict[str, Any], name: str, digits: int) -> str:
    """The field of this name, which must have so many digits. Raises: CertificateError."""
    value = data[name]
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        raise CertificateError(f"{name} must be {digits} hexadecimal digits, got {quoted(value)}")
    return value


# -- text from strangers ---------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """The text with every character that a terminal could act on replaced by its escape: one line, as it reads."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows of texts for a notebook, each headed by its first; every text is escaped.

    Args:
        head: names of the columns, where they have some.
    """
    made = [_html_row(len(head), head)] if head else []
    made += [_html_row(1, row) for row in rows]
    return f"<table>{''.join(made)}</table>"


def _html_row(heads: int, texts: Sequence[str]) -> str:
    names = ("th" if i < heads else "td" for i in range(len(texts)))
    cells = (f"<{name}>{escape(printable(text))}</{name}>" for name, text in zip(names, texts, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


def quoted(value: Any, most: int = 60) -> str:
    """What a file says, for a message: short, on one line, harmless on a terminal."""
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[: most + 1] if isinstance(value, str) else value)
    return text if len(text) <= most else f"{text[:most]} .."


def brief(problem: BaseException) -> str:
    """An error that a file led to, in one short line."""
    text = printable(" ".join(f"{problem}".split())) or type(problem).__name__
    return text if len(text) <= 300 else f"{text[:300]} .."


def _name(path: str | Path) -> str:
    return printable(str(path))
