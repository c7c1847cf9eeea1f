"""Data sets that differ from one's own in one unit: in values, lengths, types, labels, and in how many rows it has."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyorder.checks import final
from anyorder.errors import ArgumentError

__all__ = ["KINDS", "Neighbour", "neighbours"]

Row = Any
Kind = Callable[[Row, Sequence[Row]], Row]
_LONGER, _STRANGE, _IGNORED = 5, 1e30, -100


@final
@dataclass(frozen=True)
class Neighbour:
    """A data set that differs from the first one in one unit.

    Attributes:
        name: in what it differs, in words.
        dataset: what `train` is given in the place of the first one.
        is_absent: whether the unit is left out, and not replaced. Then its own steps move by at most the clip norm; by
            twice that where it is replaced.
    """

    name: str
    dataset: Any
    is_absent: bool = False


def neighbours(
    dataset: Iterable[Row], rows: Sequence[int] = (0,), kinds: Sequence[str] | None = None
) -> list[Neighbour]:
    """One neighbour for each kind that changes these rows, which are all of one unit.

    A row is a number, a text, a list of numbers, an array, a tensor, or tuples, lists and dictionaries of them. An
    integer that stands alone is taken for a label.

    Args:
        dataset: rows; the neighbours are lists of them.
        rows: places of the unit's.
        kinds: names of `KINDS`. None: those that keep what all rows of this data set share, its types and, where all
            are equal, its shapes; and lengths where these vary.
    """
    given = list(dataset)
    if not rows or not all(0 <= i < len(given) for i in rows):
        raise ArgumentError(f"rows must be places of the unit's rows, 0 .. {len(given) - 1}, got {list(rows)}")
    for name in kinds or ():
        if name not in KINDS:
            raise ArgumentError(f"kinds must be of {', '.join(KINDS)}, got {name!r}")
    found = []
    for name in _usual(given) if kinds is None else kinds:
        changed = list(given)
        for i in rows:
            others = [row for j, row in enumerate(given) if j not in rows]
            changed[i] = KINDS[name](given[i], others)
        if any(not same(changed[i], given[i]) for i in rows):
            found.append(Neighbour(name, changed))
    return found


def _usual(rows: Sequence[Row]) -> list[str]:
    lengths = {tuple(map(_size, _leaves(row))) for row in rows}
    return [*_OF_ONE_SHAPE, *(_LENGTHS if len(lengths) > 1 else ())]


# -- rows as trees of leaves -----------------------------------------------------------------------------------------


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) in (int, float) for x in value)


def _mapped(row: Row, change: Callable[[Any], Any]) -> Row:
    """The row with every leaf changed."""
    if isinstance(row, dict):
        return {name: _mapped(part, change) for name, part in row.items()}
    if isinstance(row, tuple | list) and not _is_numbers(row):
        parts = [_mapped(part, change) for part in row]
        return type(row)(*parts) if hasattr(row, "_fields") else type(row)(parts)
    return change(row)


def _leaves(row: Row) -> Iterator[Any]:
    found: list[Any] = []
    _mapped(row, found.append)
    return iter(found)


def _size(leaf: Any) -> Any:
    if isinstance(leaf, str | list):
        return len(leaf)
    return tuple(leaf.shape) if isinstance(leaf, Tensor | np.ndarray) else ()


def same(one: Any, other: Any) -> bool:
    """Whether two rows are the same: types, shapes and bits."""
    a, b = list(_leaves(one)), list(_leaves(other))
    return len(a) == len(b) and all(map(_same_leaf, a, b))


def _same_leaf(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b) or (a != a and b != b)


def _is_label(leaf: Any) -> bool:
    if isinstance(leaf, Tensor | np.ndarray):
        return bool(leaf.ndim == 0) and str(leaf.dtype).removeprefix("torch.").startswith(("int", "uint"))
    return type(leaf) is int or isinstance(leaf, np.integer)


def _is_float(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point()
    if isinstance(leaf, np.ndarray):
        return bool(leaf.dtype.kind == "f")
    return isinstance(leaf, float) or (_is_numbers(leaf) and any(type(x) is float for x in leaf))


def _numbers(leaf: Any, change: Callable[[Any], Any]) -> Any:
    return [change(x) for x in leaf] if isinstance(leaf, list) else change(leaf)


# -- the kinds -------------------------------------------------------------------------------------------------------


def _another(row: Row, others: Sequence[Row]) -> Row:
    """What another unit has, the one that lies furthest in the list: it is in the data's own range."""
    return next((other for other in reversed(others) if not same(other, row)), row)


def _floats(change: Callable[[Any], Any]) -> Kind:
    def changed(leaf: Any) -> Any:
        return _numbers(leaf, change) if _is_float(leaf) else leaf

    return lambda row, _: _mapped(row, changed)


def _labels(of: Callable[[Any, list[Any]], Any]) -> Kind:
    """Labels, each given the values that the data set has in its place."""

    def changed(row: Row, others: Sequence[Row]) -> Row:
        columns = zip(*(list(_leaves(other)) for other in (row, *others)), strict=False)
        values = iter([list(column) for column in columns])

        def change(leaf: Any) -> Any:
            known = next(values)
            if not _is_label(leaf):
                return leaf
            label = of(int(leaf), sorted({int(x) for x in known if _is_label(x)}))
            if isinstance(leaf, Tensor):
                return torch.full_like(leaf, label)
            return label if type(leaf) is int else leaf.dtype.type(label)

        return _mapped(row, change)

    return changed


def _of_length(times: float) -> Kind:
    """Every leaf that has a length is as many times as long; 0 leaves one."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, str | list):
            return leaf * int(times) if times else leaf[:1]
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.repeat(int(times), *[1] * (leaf.ndim - 1)) if times else leaf[:1].clone()
        if isinstance(leaf, np.ndarray) and leaf.ndim:
            return np.concatenate([leaf] * int(times)) if times else leaf[:1].copy()
        return leaf

    return lambda row, _: _mapped(row, change)


def _zero(leaf: Any) -> Any:
    return leaf if isinstance(leaf, str) or _is_label(leaf) else _numbers(leaf, lambda x: x * 0)


def _other_type(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        types = {torch.float32: torch.float64, torch.int64: torch.int32}
        return leaf.to(types.get(leaf.dtype, torch.float32))
    if isinstance(leaf, np.ndarray):
        return leaf.astype("f8" if leaf.dtype != np.float64 else "f4")
    return float(leaf) if type(leaf) is int else leaf


_OF_ONE_SHAPE: dict[str, Kind] = {
    "another unit's row": _another,
    "other values": _floats(lambda x: 1 - 3 * x),
    "zeros": lambda row, _: _mapped(row, _zero),
    "huge values": _floats(lambda x: x * _STRANGE),
    "NaN": _floats(lambda x: x * float("nan")),
    "infinities": _floats(lambda x: (x * 0 + 1) / 1e-300 * 1e300),
    "another label": _labels(lambda label, known: next((x for x in known if x != label), label)),
}
_LENGTHS: dict[str, Kind] = {
    "longer": _of_length(_LONGER),
    "much longer": _of_length(_LONGER**2),
    "shorter": _of_length(0),
}
KINDS: dict[str, Kind] = {
    **_OF_ONE_SHAPE,
    **_LENGTHS,
    "another type": lambda row, _: _mapped(row, _other_type),
    "negative label": _labels(lambda _, __: -1),
    "ignored label": _labels(lambda _, __: _IGNORED),
    "label beyond the others": _labels(lambda _, known: known[-1] + 5),
}
"""Name -> the changed row, of the row and of all others' rows."""
