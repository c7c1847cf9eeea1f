"""What `anyorder fit` leaves: a linear model in a JSON file, by the names of columns."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import ArgumentError, CertificateError
from anyorder.formats import read_json
from anyorder.run.fit_bounds import Bounds, Categories
from anyorder.run.fit_csv import Rows, Table

__all__ = ["LinearModel", "Tested", "check_test_table", "load_model"]

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
        table = Table(csv, self.bounds, None)
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
        table = Table(csv, self.bounds, self.target)
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

    def _judged(self, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
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
    table = Table(csv, bounds, target)
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
