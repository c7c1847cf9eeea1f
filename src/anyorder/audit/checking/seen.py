"""What is seen of the batches of one data set: who was in which step, a few numbers for each example."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray

from anyorder._words import counted
from anyorder.errors import AnyorderError

__all__ = ["Batch", "Epoch", "Group", "Seen"]

Indices = NDArray[np.int64]

_ENOUGH = 8  # examples, from which on two passes that begin with the same batches are no chance
KEPT = "the loop trains on batches that it kept: who was in those steps cannot be told"
DROPPED = "batches that were fetched without gradients may have been trained on: who was in those steps cannot be told"


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
        reused: uses of a batch in a step after its first one.
        is_redrawn: whether two passes began with the same batches, or two batches in a row were the same.
        doubt: why the counts say nothing of the run; "" where they do.
        is_secret: whether batches were drawn by coins that the claim rests on: the counts, which tell of them, are for
            the judgement alone, and neither words nor JSON have them.
    """

    steps: int
    batches: int
    epochs: int
    most: int = field(repr=False)
    together: int = field(repr=False)
    separation: int | None = field(repr=False)
    weight: float = field(repr=False)
    is_repeated: bool
    is_named: bool
    reused: int = 0
    is_redrawn: bool = False
    doubt: str = ""
    is_secret: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what may be shown."""
        hidden = ("most", "together", "separation", "weight") if self.is_secret else ()
        return {name: value for name, value in vars(self).items() if name not in hidden}

    def describe(self) -> str:
        """One sentence."""
        came = f"{counted(self.batches, 'batch')} in {counted(self.steps, 'step')}"
        if self.doubt:
            return f"{came}; {self.doubt}"
        if not self.is_named:
            return f"{came}; who was in them could not be told"
        if self.is_secret:
            return f"{came}; who was in them is secret, and so is how often units came"
        apart = "" if self.separation is None else f", at least {counted(self.separation, 'step')} apart"
        often = f", up to {self.together} examples in a step" if self.together > 1 else ""
        same = "; the same order in each epoch" if self.is_repeated else ""
        again = f"; {counted(self.reused, 'time')} a batch was used again" if self.reused else ""
        steps, epochs, most = counted(self.steps, "step"), counted(self.epochs, "epoch"), counted(self.most, "step")
        told = f"{steps} in {epochs}; a unit in {most} at most"
        return f"{told}{apart}{often}{same}{again}"


@dataclass(eq=False)
class Batch:
    """The units of a batch that the loop has, and in how many steps it was."""

    names: Indices
    serial: int
    uses: int = 0


class Group:
    """All loaders of one data set."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.loaders: list[Any] = []  # that were trained on, copied
        self.known: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # the loaders themselves, and their copies
        self.epochs = self.batches = self.steps = self.reused = self.serial = 0
        self.orders: list[bytes] = []
        self.starts: set[bytes] = set()
        self.is_named, self.is_redrawn, self.doubt = True, False, ""
        self.numbers: dict[Any, int] = {}  # of units that are named by batches, and of indices beyond the data set
        self.pending: WeakKeyDictionary[Any, list[Batch]] = WeakKeyDictionary()
        self.previous: WeakKeyDictionary[Any, list[Batch]] = WeakKeyDictionary()
        self.fresh: list[Batch] = []  # since the last step of any optimizer
        self.last: list[Batch] = []  # what that step used
        self.alive: dict[int, tuple[ReferenceType[Any], int]] = {}  # tensors of batches, and the serial of theirs
        self.dropped = 0  # batches without gradients since the last step
        self.is_exhausted = False  # a pass has ended since the last batch
        self.is_idle = True  # the last step had none of it
        self.is_mixed = False  # an optimizer of no engine of this package stepped once it had batches
        self.leads: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # whether a loop is one batch ahead
        self.weights, self.counts, self.recent = np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.together, self.separation = 0, math.inf
        self.last_names = np.zeros(0, np.int64)
        self._size: int | None = None

    def names(self, index: Any, data: Any, unit: Any, naming: Callable[[Indices], Indices] | None) -> Indices | None:
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
            if naming is None or found.dtype.kind not in "iu":
                return np.zeros(0, np.int64) if isinstance(index, list) and not index else None
            if (found > np.iinfo(np.int64).max).any():
                return None
            return self._numbered(naming(found.astype(np.int64)))
        except (ValueError, TypeError, IndexError):
            return None

    def _numbered(self, names: Indices) -> Indices:
        """Small numbers for names that are none: what lies within a data set's length is one already."""
        if self._size is None:
            self._size = _length(self.dataset)
        size = self._size
        if not len(names) or (names.min() >= 0 and names.max() < size):
            return names
        return np.array(
            [i if 0 <= i < size else size + self.numbers.setdefault(i, len(self.numbers)) for i in names.tolist()],
            np.int64,
        )

    def train(self, epoch: "Epoch") -> None:
        """A pass has its first batch that is trained on; loaders that are only looked at say nothing of the order."""
        self.epochs += 1
        if epoch.loader is not None and not any(epoch.loader is loader for loader in self.loaders):
            self.loaders.append(epoch.loader)

    def deliver(self, names: Indices | None, data: Any, is_trained: bool) -> None:
        """A batch is in the hands of the loop; without gradients it is not trained on."""
        self.serial += 1
        for tensor in _tensors(data):
            self._keep(tensor)
        if not is_trained:
            self.dropped += 1
            return
        self.batches += 1
        self.is_exhausted = False
        if names is None:
            self.is_named, names = False, np.zeros(0, np.int64)
        if len(names) >= _ENOUGH and np.array_equal(names, self.last_names):
            self.is_redrawn = True
        self.last_names = names
        batch = Batch(names, self.serial)
        self.fresh.append(batch)
        for waiting in self.pending.values():
            waiting.append(batch)

    def _keep(self, tensor: Any) -> None:
        key = id(tensor)

        def gone(dead: ReferenceType[Any]) -> None:
            if key in self.alive and self.alive[key][0] is dead:
                del self.alive[key]

        self.alive[key] = ref(tensor, gone), self.serial

    def has_new(self, optimizer: Any) -> bool:
        """Whether batches came since its last step."""
        return bool(self.pending.get(optimizer, self.fresh))

    def step(self, optimizer: Any, is_other: bool, is_unexplained: bool) -> None:
        """An optimizer has stepped: what came since its last step was in it.

        Args:
            is_other: batches of another data set came since its last step, and none of this one.
            is_unexplained: no batch of any data set was ever handed out for training.
        """
        is_new = optimizer not in self.pending
        used = list(self.fresh) if is_new else self.pending[optimizer]
        if used:
            # A loop that fetches one batch ahead takes two before the first step of a pass, and none before the last.
            self.leads[optimizer] = len(used) == 2 or (len(used) == 1 and self.leads.get(optimizer, False))
        else:
            before = self.last if is_new else self.previous.get(optimizer, [])
            used = self._again(optimizer, before, is_new, is_other, is_unexplained)
        self.pending[optimizer] = []
        if used or not is_new:
            self.previous[optimizer] = used or self.previous.get(optimizer, [])
        if self.fresh:
            self.last, self.fresh = self.fresh, []
        self.dropped, self.is_idle = 0, not used
        if used:
            self._count(used)

    def _again(
        self, optimizer: Any, before: list[Batch], is_new: bool, is_other: bool, is_unexplained: bool
    ) -> list[Batch]:
        """The batches of a step for which none was fetched: those of the step before, if they can be no others."""
        if self.dropped and not is_other and (self.batches or self.alive or is_unexplained):
            self.doubt, self.steps = self.doubt or DROPPED, self.steps + 1
            return []
        is_alive = bool(self.alive)
        if not before or (((is_other and not is_new) or self.is_idle) and not is_alive):
            return []
        if self.batches == 1:
            return before
        if self.is_exhausted and not is_other and self.leads.pop(optimizer, False):
            self.steps += 1  # with the batch that was fetched ahead, and counted a step early
            return []
        first = min(batch.serial for batch in before)
        others = any(serial < first for _, serial in self.alive.values())  # earlier batches that the loop still has
        if others or (self.is_exhausted and not is_other) or (len(before) > 1 and not is_new):
            self.doubt = self.doubt or KEPT
        return before

    def _count(self, used: list[Batch]) -> None:
        for batch in used:
            self.reused += batch.uses > 0
            batch.uses += 1
        t, self.steps = self.steps, self.steps + 1
        units, counts = np.unique(np.concatenate([batch.names for batch in used]), return_counts=True)
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
            reused=self.reused, is_redrawn=self.is_redrawn or len(set(self.orders)) < len(self.orders),
            doubt=self.doubt,
        )  # fmt: skip


class Epoch:
    """One pass over a loader: the indices that its sampler gave, and which of them were handed out."""

    def __init__(
        self, group: Group, is_whole_of: int | None, naming: Callable[[Indices], Indices] | None, loader: Any
    ) -> None:
        self.group, self.length, self.naming, self.loader = group, is_whole_of, naming, loader
        self.is_trained = False
        self.waiting: deque[Any] = deque()
        self.handed, self.examples, self.digest = 0, 0, blake2b(digest_size=16)

    def hand_out(self, data: Any, unit: Any) -> Indices | None:
        """The next batch reaches the loop: whose it is, where that can be told."""
        index = self.waiting.popleft() if self.waiting else None
        self.handed += 1
        names = self.group.names(index, data, unit, self.naming)
        if not self.is_trained:
            return names
        if names is not None:
            self.digest.update(names.tobytes() + b".")
            if self.examples < _ENOUGH <= self.examples + len(names):
                start = self.digest.digest()
                self.group.is_redrawn |= start in self.group.starts
                self.group.starts.add(start)
            self.examples += len(names)
        if self.length is not None and self.handed == self.length:
            self.group.orders.append(self.digest.digest())
        return names


def _tensors(data: Any, depth: int = 3) -> Iterator[Any]:
    """Tensors and arrays of a batch, those deep within it left out."""
    import torch

    if isinstance(data, (torch.Tensor, np.ndarray)):
        yield data
    elif depth and isinstance(data, (list, tuple, dict)):
        for part in data.values() if isinstance(data, dict) else data:
            yield from _tensors(part, depth - 1)


def _length(dataset: Any) -> int:
    """Examples of a data set, 0 where it has no length that can be asked for, and never more than fit into tables."""
    try:
        return min(len(dataset), 1 << 28)
    except Exception:  # of the script's own class, which may do anything: its indices are then all numbered
        return 0
