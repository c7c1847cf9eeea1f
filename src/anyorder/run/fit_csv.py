"""Rows of a CSV file in the order they lie in, encoded by public bounds alone, in bounded memory.

A line is a row, and what is made of it depends on nothing but that line: a quote that is not closed, a cell that is no
number or a line without end spoils its own row and no other. A spoiled row is made of NaN, which the learners count as
a zero vector, and nothing tells of it: whoever reads an error, a count or a warning would read something of a person.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import ArgumentError
from anyorder.run.fit_bounds import Bounds, Categories, Interval

__all__ = ["Rows", "Table"]

_BLOCK = 2**20
_LONGEST = 2**20
"""A line with more bytes is a spoiled row."""


@dataclass(frozen=True)
class Rows:
    """Some rows in a row.

    Attributes:
        first: number of the first one; the line under the header is 0.
        X: (m, features) float64, numbers mapped from [low, high] to [-1, 1], categories 0 or 1; NaN all along a
            spoiled row.
        y: (m,) the class's place or the number, cut to its bounds; 0 in a spoiled row.
        users: (m,) whose each row is, None where it cannot be read; None without a column of users.
    """

    first: int
    X: NDArray[np.float64]
    y: NDArray[np.float64]
    users: list[str | None] | None


class Table:
    """A CSV file with a header: comma-separated, UTF-8, one row on one line.

    Args:
        path: the file.
        bounds: public facts about its columns.
        target: name of the column that is to be predicted; None leaves it out, and y is 0.
        user_key: name of the column that says whose a row is.
    Raises: ArgumentError if the file cannot be read, or its header lacks a column or has one twice. The header is
        taken as public, and so is the number of lines.
    """

    def __init__(self, path: str | Path, bounds: Bounds, target: str | None, user_key: str | None = None) -> None:
        self.path, self.bounds, self.target = Path(path), bounds, target
        if target in bounds.features:
            raise ArgumentError(f"target {target!r} stands among the features of the bounds file: leave it out there")
        with self._open() as file:
            header = self._header(file)
        self._width = len(header)
        self._places = [_place(header, name, self.path) for name in bounds.features]
        self._target = None if target is None else _place(header, target, self.path)
        self._user = None if user_key is None else _place(header, user_key, self.path)
        self._encoder = _Encoder(bounds, target is not None)

    def _open(self) -> BinaryIO:
        try:
            return open(self.path, "rb")
        except OSError as problem:
            raise ArgumentError(f"csv {self.path} cannot be read: {problem.strerror or problem}") from problem

    def _header(self, file: BinaryIO) -> list[str]:
        line = file.readline(_LONGEST)
        try:
            cells = _cells(line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            cells = None
        if not line.strip() or cells is None:
            raise ArgumentError(
                f"csv {self.path} must begin with a line that names its columns, comma-separated, in UTF-8"
            )
        return [cell.strip() for cell in cells]

    def count(self) -> int:
        """Number of rows: lines under the header, blank ones too; a last one needs no end of line."""
        count, last = 0, b"\n"
        with self._open() as file:
            file.readline(_LONGEST)
            while block := file.read(_BLOCK):
                count += block.count(b"\n")
                last = block[-1:]
        return count + (last != b"\n")

    def batches(self, size: int, rows: int) -> Iterator[Rows]:
        """The first `rows` rows, `size` at a time."""
        first, texts = 0, list[bytes | None]()
        with self._open() as file:
            file.readline(_LONGEST)
            for line in _lines(file):
                texts.append(line)
                if len(texts) == min(size, rows - first):
                    yield self._encoded(first, texts)
                    first, texts = first + len(texts), []
                    if first == rows:
                        return
        if texts:
            yield self._encoded(first, texts)

    def _encoded(self, first: int, texts: list[bytes | None]) -> Rows:
        # Without a target the first feature stands in its place, and is not looked at.
        label_at = self._places[0] if self._target is None else self._target
        take: Callable[[list[str]], Any] = itemgetter(*self._places, label_at)
        width, user, encode = self._width, self._user, self._encoder.row
        X = np.full((len(texts), self._encoder.features), np.nan)
        y = np.zeros(len(texts))
        users: list[str | None] | None = None if user is None else [None] * len(texts)
        good, made, labels = [], [], []
        for i, text in enumerate(texts):
            cells = None if text is None else _cells(text.decode("utf-8", "replace"))
            if cells is None or len(cells) != width:
                continue
            if users is not None and user is not None:
                if not (name := cells[user].strip()):
                    continue
                users[i] = name  # it took part, whatever stands in the other cells
            try:
                row, label = encode(take(cells))
            except (ValueError, KeyError):
                continue
            good.append(i)
            made.append(row)
            labels.append(label)
        if good:
            X[good], y[good] = self._encoder.finish(np.array(made, dtype=np.float64), np.array(labels))
        return Rows(first, X, y, users)


class _Encoder:
    """From cells to numbers."""

    def __init__(self, bounds: Bounds, labelled: bool) -> None:
        self.features = len(bounds.names)
        columns = list(bounds.features.values())
        self._numbers = [i for i, column in enumerate(columns) if type(column) is Interval]
        self._words = [(i, column.index) for i, column in enumerate(columns) if type(column) is Categories]
        intervals = [column for column in columns if type(column) is Interval]
        self._low = np.array([column.low for column in intervals])
        self._high = np.array([column.high for column in intervals])
        self._target = bounds.target if labelled else None
        # Where each column's features begin.
        sizes = [len(column.words) if type(column) is Categories else 1 for column in columns]
        self._starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(int)

    def row(self, cells: tuple[str, ...]) -> tuple[list[float], float]:
        """Numbers as they stand, then the place of each category (-1 for none); and the label.

        Raises: ValueError, KeyError for cells that are no numbers and targets that are no class.
        """
        target = cells[-1]
        match self._target:
            case Categories() as classes:
                label = float(classes.index[target.strip()])
            case Interval():
                label = float(target)
            case None:
                label = 0.0
        values = [float(cells[i]) for i in self._numbers]
        values += [index.get(cells[i].strip(), -1) for i, index in self._words]
        return values, label

    def finish(self, values: NDArray[np.float64], labels: NDArray[np.float64]) -> tuple[Any, Any]:
        """Features and targets within their bounds; NaN along each row that has a number that is not finite."""
        count = len(self._numbers)
        X = np.zeros((len(values), self.features))
        with np.errstate(invalid="ignore", over="ignore"):
            inside = np.clip(values[:, :count], self._low, self._high)
            X[:, self._starts[self._numbers]] = (inside - self._low) / (self._high - self._low) * 2 - 1
        for place, (i, _) in enumerate(self._words):
            found = values[:, count + place].astype(int)
            known = np.flatnonzero(found >= 0)
            X[known, self._starts[i] + found[known]] = 1.0
        good = np.isfinite(values).all(axis=1) & np.isfinite(labels)
        X[~good] = np.nan
        if isinstance(self._target, Interval):
            labels = np.clip(np.where(good, labels, self._target.low), self._target.low, self._target.high)
        return X, labels


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Each line without its end; None for one that is too long, of which no more than a block is ever held."""
    rest, spoiled = b"", False
    while block := file.read(_BLOCK):
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield None if spoiled or len(line) > _LONGEST else line
            spoiled = False
        if len(rest) > _LONGEST:
            rest, spoiled = b"", True
    if rest or spoiled:
        yield None if spoiled else rest


def _cells(line: str) -> list[str] | None:
    """The cells of one line; None if its quotes are wrong."""
    if '"' not in line:
        return line.rstrip("\r\n").split(",")
    try:
        return next(csv.reader([line.rstrip("\r\n")], strict=True))
    except csv.Error:
        return None


def _place(header: list[str], name: str, path: Path) -> int:
    """The column of that name."""
    if (found := header.count(name)) != 1:
        how = "has no column" if found == 0 else f"has {found} columns"
        raise ArgumentError(f"csv {path} {how} {name!r}, and must have one of that name; its header names them")
    return header.index(name)
