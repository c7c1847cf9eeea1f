"""The bounds file of `anyorder fit`: what is public of a table, written by a person and never read off data."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from anyorder.checks import final
from anyorder.errors import ArgumentError

__all__ = ["Bounds", "Categories", "Column", "Interval"]

_LARGEST = 16 * 2**20
_FORM = (
    'a JSON object {"features": {"age": [17, 90], "job": ["clerk", "nurse"]}, "target": ["no", "yes"]}: two numbers '
    "are low and high, words are categories or classes"
)


@final
@dataclass(frozen=True)
class Interval:
    """A column of numbers, cut to low .. high."""

    low: float
    high: float


@final
@dataclass(frozen=True)
class Categories:
    """A column of words; a word that is none of these counts as none of them."""

    words: tuple[str, ...]

    @cached_property
    def index(self) -> dict[str, int]:
        """Place of each word."""
        return {word: i for i, word in enumerate(self.words)}


Column = Interval | Categories


@dataclass(frozen=True)
class Bounds:
    """Public facts about a table.

    Attributes:
        features: columns by name; columns of the table that are not here are left out.
        target: an interval for numbers, categories for classes.
    """

    features: dict[str, Column]
    target: Column

    @classmethod
    def load(cls, path: str | Path) -> "Bounds":
        """Read the file.

        Raises: ArgumentError if it cannot be read or has another form.
        """
        try:
            with open(path, "rb") as file:
                text = file.read(_LARGEST + 1)
        except OSError as problem:
            raise ArgumentError(f"bounds file {path} cannot be read: {problem.strerror or problem}") from problem
        if len(text) > _LARGEST:
            raise ArgumentError(f"bounds file {path} must have at most {_LARGEST} bytes")
        try:
            data = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_once)
        except RecursionError as problem:
            raise ArgumentError(f"bounds file {path} is nested too deep: it must be {_FORM}") from problem
        except ValueError as problem:  # of the decoding too
            raise ArgumentError(f"bounds file {path} must be {_FORM}: {problem}") from problem
        return cls.of(data)

    @classmethod
    def of(cls, data: Any) -> "Bounds":
        """From JSON values.

        Raises: ArgumentError for another form.
        """
        if not isinstance(data, dict) or set(data) != {"features", "target"}:
            raise ArgumentError(f"bounds must be {_FORM}; got {_shown(data)}")
        features = data["features"]
        if not isinstance(features, dict) or not features:
            raise ArgumentError(f"bounds: 'features' must name at least one column, as in {_FORM}")
        columns = {name: _column(name, value, least=1) for name, value in features.items()}
        return cls(columns, _column("target", data["target"], least=2))

    def to_dict(self) -> dict[str, Any]:
        """JSON values, as in the file."""
        return {"features": {name: _plain(c) for name, c in self.features.items()}, "target": _plain(self.target)}

    @property
    def names(self) -> list[str]:
        """Of the features that are made: a number keeps its column's name, a category is column=word."""
        made: list[str] = []
        for name, column in self.features.items():
            match column:
                case Interval():
                    made.append(name)
                case Categories(words):
                    made += [f"{name}={word}" for word in words]
        return made

    @property
    def row_norm(self) -> float:
        """L2 norm that no row exceeds: each number lies in [-1, 1], and of a column's categories at most one is 1."""
        return math.sqrt(len(self.features))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return made


def _column(name: str, value: Any, least: int) -> Column:
    if isinstance(value, list) and len(value) == 2 and all(_is_number(v) for v in value):
        low, high = float(value[0]), float(value[1])
        if low < high and math.isfinite(high - low):
            return Interval(low, high)
    elif (
        isinstance(value, list)
        and len(value) >= least
        and all(isinstance(v, str) for v in value)
        and len(words := {v.strip(): None for v in value}) == len(value)
    ):
        return Categories(tuple(words))
    raise ArgumentError(
        f"bounds of {name!r} must be [low, high], two numbers with low below high, or a list of at least {least} "
        f'different words, got {_shown(value)}; write categories that are numbers as words: ["1", "2"]'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _plain(column: Column) -> list[Any]:
    match column:
        case Interval(low, high):
            return [low, high]
        case Categories(words):
            return list(words)


def _shown(value: Any) -> str:
    return ascii(value)[:80]
