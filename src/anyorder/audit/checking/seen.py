"""What is seen of the batches of one data set: who was in which step, a few numbers for each example."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import AnyorderError

__all__ = ["Epoch", "Group", "Seen"]

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Seen:
    """What was seen of the batches of one data set.

    Attributes:
        steps: optimizer steps with a batch of it.
        batches: that were handed out for training.
        epochs: passes that were begun.
        most: the largest number of steps of one unit.
        together: the largest number of examples of one unit in a step.
        separation: the smallest distance between two steps of a unit; None where none came twice.
        weight: the largest sum over steps of squared numbers of examples of one unit.
        is_repeated: whether all whole epochs had the same order.
        is_named: whether it is known who was in every batch.
    """

    steps: int
    batches: int
    epochs: int
    most: int
    together: int
    separation: int | None
    weight: float
    is_repeated: bool
    is_named: bool

    def describe(self) -> str:
        """One sentence."""
        if not self.is_named:
            return f"{self.batches} batches in {self.steps} steps; who was in them could not be told"
        apart = "" if self.separation is None else f", at least {self.separation} steps apart"
        often = f", up to {self.together} examples in a step" if self.together > 1 else ""
        same = "; the same order in each epoch" if self.is_repeated else ""
        return f"{self.steps} steps in {self.epochs} epochs; a unit in {self.most} steps at most{apart}{often}{same}"


class Group:
    """All loaders of one data set."""

    def __init__(self, dataset: Any, naming: Callable[[Indices], Indices] | None) -> None:
        self.dataset, self.naming = dataset, naming
        self.loaders: list[Any] = []
        self.loader_ids: set[int] = set()
        self.epochs = self.batches = self.steps = 0
        self.orders: list[bytes] = []
        self.is_named = True
        self.numbers: dict[Any, int] = {}  # of units that are named by batches
        self.pending: WeakKeyDictionary[Any, list[Indices]] = WeakKeyDictionary()
        self.fresh: list[Indices] = []  # since the last step of any optimizer
        self.last: list[Indices] = []  # what that step used
        self.weights, self.counts, self.recent = np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.together, self.separation = 0, math.inf

    def names(self, index: Any, data: Any, unit: Any) -> Indices | None:
        """The units of a batch by number, or None where they cannot be told."""
        if unit is not None:
            from anyorder.sampling.loader import extract_units

            try:
                ids = np.asarray(extract_units(data, unit)).tolist()
            except AnyorderError:  # a batch for a test, say, that names nobody
                return None
            return np.array([self.numbers.setdefault(i, len(self.numbers)) for i in ids], np.int64)
        try:
            found = np.asarray(index).reshape(-1)
            if self.naming is None or found.dtype.kind not in "iu":
                return np.zeros(0, np.int64) if isinstance(index, list) and not index else None
            return self.naming(found.astype(np.int64))
        except (ValueError, TypeError, IndexError):
            return None

    def step(self, optimizer: Any) -> None:
        """An optimizer has stepped: what came since its last step was in it."""
        used = self.pending[optimizer] if optimizer in self.pending else list(self.fresh or self.last)
        self.pending[optimizer] = []
        if self.fresh:
            self.last, self.fresh = self.fresh, []
        if not used:
            return
        t, self.steps = self.steps, self.steps + 1
        units, counts = np.unique(np.concatenate(used), return_counts=True)
        if not len(units):
            return
        self._make_room(int(units[-1]) + 1)
        again = self.counts[units] > 0
        if again.any():
            self.separation = min(self.separation, int((t - self.recent[units[again]]).min()))
        self.weights[units] += counts.astype(np.float64) ** 2
        self.counts[units] += 1
        self.recent[units] = t
        self.together = max(self.together, int(counts.max()))

    def _make_room(self, size: int) -> None:
        if size > len(self.weights):
            more = max(size, 2 * len(self.weights)) - len(self.weights)
            self.weights = np.append(self.weights, np.zeros(more))
            self.counts = np.append(self.counts, np.zeros(more, np.int64))
            self.recent = np.append(self.recent, np.zeros(more, np.int64))

    def seen(self) -> Seen:
        """So far."""
        return Seen(
            steps=self.steps, batches=self.batches, epochs=self.epochs, most=int(self.counts.max(initial=0)),
            together=self.together, separation=None if math.isinf(self.separation) else int(self.separation),
            weight=float(self.weights.max(initial=0.0)),
            is_repeated=len(self.orders) > 1 and len(set(self.orders)) == 1, is_named=self.is_named,
        )  # fmt: skip


class Epoch:
    """One pass over a loader: the indices that its sampler gave, and which of them were handed out."""

    def __init__(self, group: Group, is_whole_of: int | None) -> None:
        self.group, self.length, self.is_trained = group, is_whole_of, False
        self.waiting: deque[Any] = deque()
        self.handed, self.digest = 0, blake2b(digest_size=16)

    def hand_out(self, data: Any, unit: Any) -> Indices | None:
        """The next batch reaches the loop: whose it is, where that can be told."""
        index = self.waiting.popleft() if self.waiting else None
        self.handed += 1
        names = self.group.names(index, data, unit)
        if names is not None:
            self.digest.update(names.tobytes() + b".")
        if self.length is not None and self.handed == self.length:
            self.group.orders.append(self.digest.digest())
        return names
