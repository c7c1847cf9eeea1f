"""`anyorder fit`: a convex learner on a CSV file in the order it lies in, and the folder that says what was done."""

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.app import folder, session
from anyorder.app import report as report_file
from anyorder.app.job import Observer
from anyorder.checks import final
from anyorder.errors import ArgumentError, CertificateError, CheckpointError
from anyorder.formats import read_json
from anyorder.online import Learner
from anyorder.online.losses import Hinge, Logistic, PoissonLoss, Softmax, Squared
from anyorder.online.regret import usual_regularization
from anyorder.participation import MinSeparation
from anyorder.plan.options import default_delta
from anyorder.plan.plan import Plan
from anyorder.plan.planner import plan as make_plan
from anyorder.sampling.row_digests import digests_of

# ----------------------------------------------------------------------------------------------------
# The bounds file of `anyorder fit`: what is public of a table, written by a person and never read off data.


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


# ----------------------------------------------------------------------------------------------------
# Rows of a CSV file in the order they lie in, encoded by public bounds alone, in bounded memory.
#
# A line is a row, and what is made of it depends on nothing but that line: a quote that is not closed, a cell that is
# no number or a line without end spoils its own row and no other. A spoiled row is made of NaN, which the learners
# count as a zero vector, and nothing tells of it: whoever reads an error, a count or a warning would read something
# of a person.


_BLOCK = 2**20
_LONGEST = 2**20
"""A line with more bytes is a spoiled row."""


@dataclass(frozen=True)
class RowBatch:
    """Some rows in a row.

    Attributes:
        first: number of the first one; the line under the header is 0.
        X: (m, features) float64, numbers mapped from [low, high] to [-1, 1], categories 0 or 1; NaN all along a
            spoiled row.
        y: (m,) the class's place or the number, cut to its bounds; 0 in a spoiled row.
        users: (m,) whose each row is, None where it cannot be read; None without a column of users.
        lines: (m,) as they stand in the file, None for one that is too long.
    """

    first: int
    X: NDArray[np.float64]
    y: NDArray[np.float64]
    users: list[str | None] | None
    lines: list[bytes | None]


class CsvTable:
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

    def batches(self, size: int, rows: int) -> Iterator[RowBatch]:
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

    def _encoded(self, first: int, texts: list[bytes | None]) -> RowBatch:
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
                if not (name := checks.name_of_unit(cells[user])):
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
        return RowBatch(first, X, y, users, texts)


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


# ----------------------------------------------------------------------------------------------------
# What `anyorder fit` leaves: a linear model in a JSON file, by the names of columns.


_FORMAT = "anyorder linear model 1"
_ROWS = 4096


@dataclass(frozen=True)
class Tested:
    """What a model did on a table of nobody in need of protection.

    Attributes:
        score: fraction of classes that are right, or R^2 of numbers; None where no row can be read, or R^2 is of one
            value only.
        rows: that were judged.
        unreadable: rows that were left out, as they do not fit the bounds.
    """

    score: float | None
    rows: int
    unreadable: int


@dataclass(frozen=True)
class LinearModel:
    """scores = X coefficients + intercept, of rows that are encoded by public bounds.

    Attributes:
        learner: "logistic", "softmax", "linear", "svc" or "poisson".
        bounds: of the columns; numbers are mapped from [low, high] to [-1, 1], a category is 0 or 1.
        target: name of the predicted column.
        coefficients: (features, outputs), a row for each of `bounds.names`.
        intercept: (outputs,).
    """

    learner: str
    bounds: Bounds
    target: str
    coefficients: NDArray[np.float64]
    intercept: NDArray[np.float64]

    def predict(self, csv: str | Path) -> list[Any]:
        """The class, or the number, for each row of a CSV file, which needs the features' columns alone.

        None for a row that cannot be read. Made of released numbers and of the rows that are given.
        """
        table = CsvTable(csv, self.bounds, None)
        made: list[Any] = []
        for rows in table.batches(_ROWS, table.count()):
            good = np.asarray(np.isfinite(rows.X).all(axis=1))
            found = self.of_rows(np.where(good[:, None], rows.X, 0.0))
            made += [self._shown(value) if fine else None for value, fine in zip(found, good, strict=True)]
        return made

    def score(self, csv: str | Path) -> float | None:
        """Fraction of classes that are right, or R^2 of numbers, on rows of a CSV file that can be read.

        **Not private for the people in that file**: use data that is public, or of nobody in need of protection. None
        where no row can be read, or R^2 is of one value only.
        """
        return self.test(csv).score

    def test(self, csv: str | Path) -> Tested:
        """`score`, with how many rows it is of and how many could not be read. **Not private**, as that."""
        table = CsvTable(csv, self.bounds, self.target)
        count = table.count()
        parts = [self._judged(rows) for rows in table.batches(_ROWS, count)]
        y, found = (np.concatenate([part[i] for part in parts]) if parts else np.zeros(0) for i in (0, 1))
        return Tested(self._score(y, found), len(y), count - len(y))

    def _score(self, y: NDArray[np.float64], found: NDArray[np.float64]) -> float | None:
        if not len(y):
            return None
        if type(self.bounds.target) is Categories:
            return float(np.mean(y == found))
        spread = float(np.square(y - y.mean()).sum())
        return 1.0 - float(np.square(y - found).sum()) / spread if spread else None

    def of_rows(self, X: NDArray[np.float64]) -> NDArray[np.float64]:
        """(m,) places of classes, or numbers, for encoded rows."""
        scores = X @ self.coefficients + self.intercept
        match self.learner:
            case "softmax":
                return np.asarray(np.argmax(scores, axis=1), dtype=np.float64)
            case "logistic" | "svc":
                return np.asarray(scores[:, 0] > 0, dtype=np.float64)
            case "poisson":
                return np.asarray(np.exp(np.minimum(scores[:, 0], 100.0)))
            case _:
                return np.asarray(scores[:, 0])

    def _judged(self, rows: RowBatch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        good = np.asarray(np.isfinite(rows.X).all(axis=1))
        return rows.y[good], self.of_rows(rows.X[good])

    def _shown(self, value: float) -> Any:
        target = self.bounds.target
        return target.words[int(value)] if type(target) is Categories else float(value)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: coefficients by the names of features, a list where there are several outputs."""
        names = self.bounds.names
        return {
            "format": _FORMAT, "learner": self.learner, "target": self.target, "bounds": self.bounds.to_dict(),
            "coefficients": {name: row.tolist() for name, row in zip(names, self.coefficients, strict=True)},
            "intercept": self.intercept.tolist(),
        }  # fmt: skip


def check_test_table(csv: str | Path, bounds: Bounds, target: str) -> None:
    """Raise ArgumentError unless some row of a table of nobody in need of protection can be read.

    Cost: reads up to the first such row.
    """
    table = CsvTable(csv, bounds, target)
    for rows in table.batches(_ROWS, table.count()):
        if np.isfinite(rows.X).all(axis=1).any():
            return
    wanted = "a number"
    if type(bounds.target) is Categories:
        words = bounds.target.words
        wanted = f"one of {', '.join(map(repr, words[:5]))}{', ..' if len(words) > 5 else ''}"
    raise ArgumentError(
        f"test_csv: no row of {csv} fits the bounds, so nothing could be measured: cells must be numbers where the "
        f"bounds are, and {target!r} {wanted}, letter for letter ('0' is not '0.0')"
    )


def load_model(folder: str | Path) -> LinearModel:
    """The model in a folder of `anyorder fit`.

    Raises: ArgumentError if it holds none.
    """
    path = Path(folder) / "model.json"
    try:
        data = read_json(path, large=True)
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']!r}")
        bounds = Bounds.of(data["bounds"])
        rows = [data["coefficients"][name] for name in bounds.names]
        coefficients, intercept = np.array(rows, dtype=np.float64), np.array(data["intercept"], dtype=np.float64)
        if coefficients.ndim != 2 or intercept.shape != coefficients.shape[1:]:
            raise ValueError("coefficients and intercept do not fit together")
        return LinearModel(data["learner"], bounds, data["target"], coefficients, intercept)
    except (CertificateError, KeyError, TypeError, ValueError) as problem:
        raise ArgumentError(f"{path} is not a model of anyorder fit: {problem}") from problem


# ----------------------------------------------------------------------------------------------------
# `anyorder fit`: a convex learner on a CSV file in the order it lies in, and the folder that says what was done.


LEARNERS = ("linear", "logistic", "poisson", "softmax", "svc")
MODEL = "model.json"
_SAVES = 10  # checkpoints in the course of a run


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """What a fit does; all of it public.

    Attributes:
        csv: the table, one row on a line; see `CsvTable`.
        target: column that is predicted.
        bounds: the bounds file's content.
        learner: one of `LEARNERS`; None for what the target asks for: two classes "logistic", more "softmax", numbers
            "linear".
        epsilon, delta: the target of the whole fit; delta None for a tenth of one over the rows, rounded down.
        rows: of the table, public; None to count them.
        batch_size: rows of a step.
        epochs: passes over the table in its order.
        mechanism: as `anyorder.plan` takes it.
        user_key: column that says whose a row is: then users are protected as a whole.
        max_participations: steps that a user's rows may be in; what comes after is left out. With user_key alone.
        regularization: lambda; None for `usual_regularization`, as of the estimators.
        test_csv: rows of nobody in need of protection, to measure accuracy on.
    """

    csv: str
    target: str
    bounds: dict[str, Any]
    learner: str | None = None
    epsilon: float = 1.0
    delta: float | None = None
    rows: int | None = None
    batch_size: int = 256
    epochs: int = 1
    mechanism: str = "auto"
    user_key: str | None = None
    max_participations: int = 1
    regularization: float | None = None
    test_csv: str | None = None


@dataclass(frozen=True)
class FitResult:
    """What came of it.

    Attributes:
        path: the folder.
        plan: what was run.
        model: as in model.json.
        score: on the test table: the fraction of classes that are right, or R^2; None without one.
        test_rows, test_unreadable: of the test table, rows that the score is of, and rows that do not fit the bounds.
    """

    path: Path
    settings: FitSettings
    plan: Plan
    regularization: float
    model: LinearModel | None = field(default=None, repr=False)
    score: float | None = None
    test_rows: int | None = None
    test_unreadable: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what metrics.json holds. No time is in it: how long a row takes depends on the row."""
        return {
            "settings": asdict(self.settings),
            "claims": self.plan.claims(),
            "order": self.plan.participation.describe(),
            "mechanism": self.plan.strategy.describe(),
            "regularization": self.regularization,
            "test_score": self.score,
            "test_rows": self.test_rows,
            "test_unreadable": self.test_unreadable,
            "finished": self.model is not None,
        }


def fit(
    settings: FitSettings, output: str | Path | None = None, *, observer: Observer | None = None,
    key: bytes | None = None, budget: str | Path | None = None,
) -> FitResult:  # fmt: skip
    """Fit a model to a table, one pass for each epoch, and write the folder of the run.

    The folder holds model.json, run.privacy.json (the certificate), plan.json, metrics.json and report.html, which may
    be shown; and the folder secret (checkpoint.pt with its journal, run.evidence.json), which is as secret as the data
    and in its .gitignore.

    Guarantee: everything that is printed and written to be shown is a function of the released sums, the settings, the
    header, the number of lines, and with user_key of which lines name which user. Unit: the row, or the user;
    neighbours: zero-out.

    Args:
        budget: file of an `anyorder.Budget`, in which the plan is entered before the first step.
    Raises: ArgumentError, PlanError for settings, bounds or a header that do not fit, and where no row of test_csv can
        be read; BudgetError for a plan that the budget refuses.
    """
    work = _Work(settings)
    if settings.test_csv is not None:  # before anything is spent
        check_test_table(settings.test_csv, work.bounds, settings.target)
    plan = work.plan()
    regularization = work.regularization(plan)
    begun = FitResult(Path(), work.settings, plan, regularization)
    with session.begin(output, Path(settings.csv).stem or "fit", plan, begun.to_dict(), budget) as path:
        return _run(work, replace(begun, path=path), observer or Observer(), key)


def resume_fit(path: str | Path, *, observer: Observer | None = None) -> FitResult:
    """Go on with the fit in a folder, bit for bit as if never interrupted; the table must be as it was.

    Raises: CheckpointError if the folder holds no fit that can be resumed, or a line that was read is another one now.
        ArgumentError if it is going on.
    """
    path = Path(path)

    def read(found: dict[str, Any]) -> tuple[FitSettings, float]:
        return FitSettings(**found["settings"]), float(found["regularization"])

    with session.go_on(path, "fit", read) as ((settings, regularization), plan):
        return _run(_Work(settings), FitResult(path, settings, plan, regularization), observer or Observer(), None)


class _Work:
    """What settings ask for."""

    def __init__(self, settings: FitSettings) -> None:
        self.bounds = Bounds.of(settings.bounds)
        self.table = CsvTable(settings.csv, self.bounds, settings.target, settings.user_key)
        counted = self.table.count()
        if counted == 0:
            raise ArgumentError(f"csv {settings.csv} has no rows under its header")
        rows = counted if settings.rows is None else checks.integer("rows", settings.rows, low=1)
        if rows > counted:
            raise ArgumentError(f"rows must be at most the number of lines under the header, {counted}, got {rows}")
        checks.integer("batch_size", settings.batch_size, low=1)
        checks.integer("epochs", settings.epochs, low=1)
        values = {**asdict(settings), "rows": rows, "learner": _learner(settings.learner, self.bounds)}
        values["batch_size"] = min(settings.batch_size, rows)
        self.settings = FitSettings(**values)
        if settings.user_key is None and settings.max_participations != 1:
            raise ArgumentError("max_participations is for user_key: without it each row is in one step of an epoch")
        if settings.user_key is not None and settings.epochs != 1:
            raise ArgumentError(f"epochs must be 1 with user_key, got {settings.epochs}: use max_participations")
        self.loss, self.steepest = self._loss()
        # A row and the constant 1 of the intercept.
        self.row_norm = math.hypot(self.bounds.row_norm, 1.0)

    def _loss(self) -> tuple[Logistic | Softmax | Squared | Hinge | PoissonLoss, float]:
        """And the bound on its slope, by which gradients are cut; where there is none, one that fits the bounds."""
        target = self.bounds.target
        match self.settings.learner, target:
            case "logistic", Categories():
                return Logistic(), 1.0
            case "svc", Categories():
                return Hinge(), 1.0
            case "softmax", Categories(words):
                return Softmax(len(words)), math.sqrt(2.0)
            case "poisson", Interval(_, high):
                return PoissonLoss(), max(1.0, high)
            case _:
                return Squared(), 2.0  # targets are mapped to [-1, 1]; no score need be longer

    def plan(self) -> Plan:
        """The order of the table, or of users who come when they come, and the mechanism."""
        settings, rows = self.settings, self.settings.rows or 0
        shared: dict[str, Any] = {
            "epsilon": settings.epsilon, "mechanism": settings.mechanism,
            "delta": default_delta(rows) if settings.delta is None else settings.delta,
            "clip_norm": self.steepest * self.row_norm,
        }  # fmt: skip
        if settings.user_key is None:
            return make_plan(
                dataset_size=rows, batch_size=settings.batch_size, epochs=settings.epochs, order="sequential", **shared
            )
        steps = math.ceil(rows / settings.batch_size)
        most = checks.integer("max_participations", settings.max_participations, low=1, high=steps)
        rule = MinSeparation(steps, 1, most)
        return make_plan(order=rule, batch_size=settings.batch_size, unit="user", **shared)

    def regularization(self, plan: Plan) -> float:
        """As given, or by the default."""
        if (given := self.settings.regularization) is not None:
            return checks.positive("regularization", given)
        steep = math.isinf(self.loss.lipschitz)
        return usual_regularization(plan, self.row_norm, spread=1.0 if steep else 2.0, curvature=0.5 if steep else 0.0)

    def batches(self) -> Any:
        """All batches of all epochs."""
        size, rows = self.settings.batch_size, self.settings.rows or 0
        for _ in range(self.settings.epochs):
            yield from self.table.batches(size, rows)

    def labels(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        """For the loss: squared targets in [-1, 1]."""
        target = self.bounds.target
        if type(self.loss) is not Squared or not isinstance(target, Interval):
            return y
        return (y - target.low) / (target.high - target.low) * 2 - 1

    def model(self, theta: NDArray[np.float64]) -> LinearModel:
        """In units of the target."""
        coefficients, intercept = theta[:-1].copy(), theta[-1].copy()
        target = self.bounds.target
        if type(self.loss) is Squared and isinstance(target, Interval):
            half = (target.high - target.low) / 2
            coefficients, intercept = coefficients * half, intercept * half + target.low + half
        name = self.settings.learner or ""
        return LinearModel(name, self.bounds, self.settings.target, coefficients, intercept)


def _learner(name: str | None, bounds: Bounds) -> str:
    """The learner's name, fit for the target."""
    classes = len(bounds.target.words) if isinstance(bounds.target, Categories) else 0
    if name is None:
        return "linear" if not classes else "logistic" if classes == 2 else "softmax"
    checks.choice("learner", name, LEARNERS)
    fits = {"linear": not classes, "poisson": not classes, "softmax": classes >= 2}.get(name, classes == 2)
    if not fits:
        raise ArgumentError(
            f"learner {name!r} does not fit the target of the bounds file: logistic and svc need two classes, softmax "
            "two or more, linear and poisson [low, high]"
        )
    if name == "poisson" and isinstance(bounds.target, Interval) and bounds.target.low < 0:
        raise ArgumentError(f"learner 'poisson' needs a target of at least 0, got low {bounds.target.low:g}")
    return name


def _run(work: _Work, begun: FitResult, observer: Observer, key: bytes | None) -> FitResult:
    """All steps that are left, then the files."""
    path, plan, bounds = begun.path, begun.plan, work.bounds
    every = max(1, plan.n // _SAVES)
    shape = (len(bounds.names) + 1, work.loss.outputs)
    came: Counter[str] = Counter()
    with Learner(
        plan, shape, loss=work.loss, regularization=begun.regularization, checkpoint=path / folder.CHECKPOINT, key=key
    ) as learner:
        done, lines = learner.steps_taken, _LinesSeen(learner, work)
        session.enter(path, plan, learner.save, learner.certificate)
        observer.started(plan, path, done)
        for step, rows in enumerate(work.batches()):
            lines.meet(rows)  # of steps that were taken before too: a changed table is refused before a gradient
            units, kept = _units(rows, came, work.settings.max_participations)
            if step < done:
                continue
            X = np.hstack([rows.X[kept], np.ones((len(units), 1))])
            learner.step(units, X, work.labels(rows.y[kept]))
            if (step + 1) % every == 0:
                learner.save()
            observer.stepped(step + 1)
        if learner.steps_taken != plan.n:
            raise CheckpointError(
                f"the table has fewer rows than when the run began: it took {learner.steps_taken} of {plan.n} steps"
            )
        learner.save()
        model = work.model(learner.average)
        made = FitResult(path, work.settings, plan, begun.regularization, model, None)
        folder.write_json(path / MODEL, model.to_dict())
        learner.evidence().save(path / folder.EVIDENCE)
        shown = learner.evidence().naming(learner.certificate(), (sha256((path / MODEL).read_bytes()).hexdigest(),))
        shown.save(path / folder.CERTIFICATE)
    if (test := work.settings.test_csv) is not None:
        found = model.test(test)
        made = replace(made, score=found.score, test_rows=found.rows, test_unreadable=found.unreadable)
    folder.write_metrics(path, made.to_dict())
    report_file.write(path)
    return made


class _LinesSeen:
    """Keyed digests of the lines that were read, kept in the checkpoint: a row is known by its number in the file.

    Where a line was read before, in an earlier epoch or before a resume, it must be the same. What was not read yet is
    noted when it first is, so that nothing is read twice for this.
    """

    def __init__(self, learner: Learner, work: _Work) -> None:
        self._kept, self._work = learner.extra, work
        self._key = learner.release.derived(b"lines").key
        self._kept["lines"] = np.asarray(self._kept.get("lines", np.zeros(work.settings.rows or 0, np.int64))).copy()
        self._kept.setdefault("lines seen", 0)

    def meet(self, rows: RowBatch) -> None:
        """Compare or note these. Raises: CheckpointError, whose `changed` says how many of the lines seen differ."""
        now = self._digests(rows)
        if self._changed(rows, now):
            problem = CheckpointError(
                f"the table {self._work.settings.csv} is not the one with which this run began: a line that was read "
                "is another one now. A row is known by its line, and the claim counts how often it takes part. Put "
                "the table back as it was, or begin a new run, whose epsilon adds to this one's (--budget keeps the "
                "sum)"
            )
            everything = self._work.table.batches(_ROWS, self._work.settings.rows or 0)
            changed = sum(self._changed(each, self._digests(each)) for each in everything)
            problem.changed = changed, self._kept["lines seen"]
            raise problem
        end = rows.first + len(rows.lines)
        if end > self._kept["lines seen"]:
            self._kept["lines"][rows.first : end] = now
            self._kept["lines seen"] = end

    def _changed(self, rows: RowBatch, now: NDArray[np.int64]) -> int:
        before = self._kept["lines"][rows.first : self._kept["lines seen"]]
        now = now[: len(before)]
        return int(np.count_nonzero(before[: len(now)] != now))

    def _digests(self, rows: RowBatch) -> NDArray[np.int64]:
        return digests_of((line or b"" for line in rows.lines), self._key)


def _units(rows: RowBatch, came: Counter[str], most: int) -> tuple[Any, NDArray[np.intp]]:
    """Whose the rows are that take part, and which these are. A user who came as often as allowed is left out."""
    if rows.users is None:
        everything = np.arange(len(rows.y))
        return rows.first + everything, everything
    here = {user for user in rows.users if user is not None and came[user] < most}
    came.update(here)
    kept = np.array([i for i, user in enumerate(rows.users) if user in here], dtype=np.intp)
    return [rows.users[i] for i in kept], kept
