"""Ids of units: what may be one, and the bytes that stand for them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import ArgumentError

__all__ = ["Integers", "Units", "as_units", "canonical_bytes", "distinct", "numbered", "plain"]

Integers = NDArray[np.int64]

Units = Integers | list[str]
"""Ids of units: integers or strings. In a ledger's history distinct and sorted."""

_LENGTHS = [i.to_bytes(8, "little") for i in range(1 << 8)]


def as_units(units: Iterable[Any]) -> Units:
    """Ids in the order given: an int64 array, or a list of strings; an empty int64 array if there are none.

    Raises: ArgumentError for anything but a sequence (or set, iterator, array) of integers in int64 or of strings.
    """
    if isinstance(units, (str, bytes)):
        raise ArgumentError(f"units must be a sequence of ids, got a single {type(units).__name__}")
    if hasattr(units, "__array__"):
        array = np.asarray(units)
        if array.ndim != 1:
            raise ArgumentError(f"units must have one dimension, got shape {array.shape}")
        if array.dtype.kind == "i":
            return array.astype(np.int64)
        units = array.tolist()
    values = list(units)
    kinds = set(map(type, values))
    if kinds == {str}:
        return values
    if values and all(issubclass(kind, str) for kind in kinds):
        return [str.__str__(value) for value in values]  # the characters: a subclass's own str() may say another name
    if not all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ArgumentError(f"units must be all integers or all strings, got {names}")
    if kinds != {int}:  # the number itself, whatever a subclass says that it is
        values = [int.__int__(value) if isinstance(value, int) else np.generic.item(value) for value in values]
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as problem:
        raise ArgumentError(f"integer units must fit into int64: {problem}; pass such ids as strings") from problem


def distinct(units: Iterable[Any]) -> Units:
    """Each id once, sorted."""
    ids = as_units(units)
    if isinstance(ids, list):
        return sorted(set(ids))
    ids = np.sort(ids)  # np.unique hashes before it sorts: six times slower here
    return ids[np.diff(ids, prepend=ids[:1] - 1) != 0] if len(ids) else ids


def numbered(ids: Units) -> Integers:
    """(m,) a number for each id, equal where the ids are: not by NumPy's texts, which leave out NULs at the end."""
    if isinstance(ids, list):
        numbers = {unit: i for i, unit in enumerate(sorted(set(ids)))}
        return np.array([numbers[unit] for unit in ids], np.int64)
    return np.unique(ids, return_inverse=True)[1].reshape(-1).astype(np.int64)


def canonical_bytes(ids: Units) -> bytes:
    """What is hashed: a letter for the kind, then the ids, so that no two histories give the same bytes."""
    if isinstance(ids, list):
        pieces = [b"s"]
        for raw in [unit.encode("utf-8", "surrogatepass") for unit in ids]:
            size = len(raw)
            pieces += (_LENGTHS[size] if size < len(_LENGTHS) else size.to_bytes(8, "little"), raw)
        return b"".join(pieces)
    return b"i" + ids.astype("<i8").tobytes()


def plain(ids: Units) -> Sequence[int | str]:
    """The ids as Python's own integers or strings."""
    return ids if isinstance(ids, list) else ids.tolist()
