"""An order for people who have user ids: each user's examples in few steps, and these far apart."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.ledger import as_units
from anyorder.sampling.samplers import permutation_of

__all__ = ["UnitOrderSampler"]


class UnitOrderSampler(Sampler[list[int]]):
    """Batches in which the examples of a unit stand together, the same in every epoch.

    A unit of m examples is in ceil(m / batch_size) steps of an epoch, as far apart as there is room; a unit that fits
    into a batch is in one step. So users cost hardly more noise than examples do: sensitivity counts the steps of a
    unit, not its examples. Batches are filled as far as whole units allow and may be smaller than `batch_size`, which
    is the plan's divisor all the same.

        loader = DataLoader(dataset, batch_sampler=UnitOrderSampler(user_ids, batch_size=64))
        plan = ao.plan(loader=loader, unit="user_id", epochs=5, epsilon=8, delta=1e-5)

    Privacy: how many examples each unit has decides the order, and the order is public in the claim (`KnownOrder`):
    neighbours are data sets of the same order, in which one unit's gradients are replaced by zero.

    Args:
        unit_ids: one for each example of the data set, in its order: integers or strings.
        batch_size: examples in a batch, at most.
        seed: an integer >= 0 or bytes, for the order of batches; None draws one from the operating system.

    Attributes:
        indices: all of them, (m,) int64.

    Cost: O(m log m) once; batches are kept.
    """

    def __init__(
        self, unit_ids: Sequence[Any] | NDArray[Any], batch_size: int, seed: int | bytes | None = None
    ) -> None:
        ids = np.asarray(as_units(unit_ids))
        if not len(ids):
            raise ArgumentError("unit_ids must name the unit of each example, got none")
        self.batch_size = checks.integer("batch_size", batch_size, low=1)
        self.indices: NDArray[np.int64] = np.arange(len(ids))
        pieces, owners = _pieces(ids, self.batch_size)
        bins = _pack([len(piece) for piece in pieces], self.batch_size)
        slots = _spread(bins, owners, permutation_of(len(bins), seed))
        self._batches = [np.concatenate([pieces[p] for p in bins[j]]).tolist() for j in slots]

    def batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        """The batches of an epoch from its batch `start` on: the same in each."""
        del epoch
        return (list(batch) for batch in self._batches[start:])

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches(0, 0)

    def __len__(self) -> int:
        return len(self._batches)


def _pieces(ids: NDArray[Any], most: int) -> tuple[list[NDArray[np.int64]], list[int]]:
    """The examples of each unit in as few parts as fit into batches, and the number of the unit of each part."""
    order = np.argsort(ids, kind="stable")
    cuts = np.flatnonzero(ids[order][1:] != ids[order][:-1]) + 1
    pieces: list[NDArray[np.int64]] = []
    owners: list[int] = []
    for unit, examples in enumerate(np.split(order, cuts)):
        parts = np.array_split(examples, -(-len(examples) // most))
        pieces += parts
        owners += [unit] * len(parts)
    return pieces, owners


def _pack(sizes: list[int], most: int) -> list[list[int]]:
    """Best fit, largest first: which parts go into each batch. Two parts of a unit never fit into one."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is left, bin), ascending
    for piece in sorted(range(len(sizes)), key=lambda p: -sizes[p]):
        place = bisect_left(room, (sizes[piece], -1))
        left, j = room.pop(place) if place < len(room) else (most, len(bins))
        if j == len(bins):
            bins.append([])
        bins[j].append(piece)
        if left > sizes[piece]:
            insort(room, (left - sizes[piece], j))
    return bins


def _spread(bins: list[list[int]], owners: list[int], shuffled: NDArray[np.int64]) -> list[int]:
    """The bin of each step: those of a unit in several as evenly apart as what is free allows, all others shuffled."""
    where: dict[int, list[int]] = {}
    for j in shuffled.tolist():
        for piece in bins[j]:
            where.setdefault(owners[piece], []).append(j)
    steps = len(bins)
    free, slot_of = list(range(steps)), dict[int, int]()
    for unit in sorted((u for u in where if len(where[u]) > 1), key=lambda u: -len(where[u])):
        taken = sorted(slot_of[j] for j in where[unit] if j in slot_of)
        first = taken[0] if taken else free[0]
        targets = [(first + i * steps // len(where[unit])) % steps for i in range(len(where[unit]))]
        for slot in taken:  # the targets that bins shared with other units serve already
            targets.remove(min(targets, key=lambda t: abs(t - slot)))
        for j, target in zip([j for j in where[unit] if j not in slot_of], targets, strict=True):
            place = min(bisect_left(free, target), len(free) - 1)
            near = min((max(place - 1, 0), place), key=lambda i: abs(free[i] - target))
            slot_of[j] = free.pop(near)
    slots = {slot: j for j, slot in slot_of.items()}
    slots |= zip(free, (j for j in shuffled.tolist() if j not in slot_of), strict=True)
    return [slots[slot] for slot in range(steps)]
