"""Samplers whose order is a pure function of a seed and an epoch, so that any epoch and batch can be begun again."""

import os
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from anyorder import checks
from anyorder._draws import Draws
from anyorder.errors import ArgumentError, LoaderError
from anyorder.ledger import Units
from anyorder.noise import NoiseSource
from anyorder.participation import PoissonSampling


def key_of(seed: int | bytes | None) -> bytes:
    """32 bytes: BLAKE2b of a seed; fresh ones from the operating system for None."""
    if seed is None:
        return os.urandom(32)
    text = b"bytes" + seed if isinstance(seed, bytes) else b"int%d" % checks.integer("seed", seed, low=0)
    return blake2b(text, digest_size=32, person=b"anyorder sampler").digest()


def permutation_of(size: int, seed: int | bytes | None, row: int = 0) -> NDArray[np.int64]:
    """0 .. size - 1 in the order that sorts 64-bit words; see `_permutation`."""
    return _permutation(key_of(seed), size, row)


def _permutation(key: bytes, size: int, row: int) -> NDArray[np.int64]:
    """The order that sorts 64-bit words: uniform up to ties, which come in one of 2^65 / size^2 draws."""
    words = NoiseSource(key).derive(b"order").words(row, 0, 2 * size)
    return np.argsort(words.view(np.uint64), kind="stable")


class _KeyedSampler(Sampler[int]):
    """Indices of one epoch in an order drawn from a key.

    Attributes:
        key: what the order is drawn from; kept in checkpoints.
    """

    def __init__(self, data: Sized | int, seed: int | bytes | None) -> None:
        self.size = checks.integer("size", len(data) if isinstance(data, Sized) else data, low=1)
        self.key = key_of(seed)

    def _permutation(self, row: int) -> NDArray[np.int64]:
        return _permutation(self.key, self.size, row)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The indices of an epoch, (size,) int64."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.size


class FixedOrderSampler(_KeyedSampler):
    """A sampler that shuffles once and keeps the order in every epoch.

    A unit then appears again after exactly one epoch, so the plan's participation is `FixedOrder`, which needs less
    noise than an order that is shuffled again (`EpochShuffle`), where last and first steps of epochs may meet.

    Args:
        data: the data set, or its size.
        seed: an integer >= 0 or bytes; None draws one from the operating system.
    """

    def __init__(self, data: Sized | int, seed: int | bytes | None = None) -> None:
        super().__init__(data, seed)

    def order(self, epoch: int = 0) -> NDArray[np.int64]:
        """The indices, (size,) int64; the same in every epoch."""
        return self._permutation(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())


class EpochShuffleSampler(_KeyedSampler):
    """Shuffles again in each epoch; the order is a pure function of the seed and the epoch.

    Args:
        data: the data set, or its size.
        seed: an integer >= 0 or bytes.
    """

    def __init__(self, data: Sized | int, seed: int | bytes) -> None:
        super().__init__(data, seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives."""
        self.epoch = checks.integer("epoch", epoch, low=0)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The indices of an epoch, (size,) int64."""
        return self._permutation(checks.integer("epoch", epoch, low=0))

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.epoch).tolist())


def _ascending(indices: Any, size: int) -> NDArray[np.int64]:
    """A copy of indices of distinct examples, that the caller cannot change."""
    found = np.array(indices)
    sound = found.shape == (size,) and np.issubdtype(found.dtype, np.integer)
    if not sound or found[0] < 0 or (found[1:] <= found[:-1]).any():
        raise ArgumentError(f"indices must be {size} distinct integers in ascending order, none negative")
    return found.astype(np.int64)


class PoissonRates(Sampler[int]):
    """A sampler for Poisson sampling in which each example has a rate of its own: weighted and balanced batches.

    Example i is in each step with probability rates[i], by a secret draw of its own. The claim of a plan with
    `ao.plan(loader=.., order="poisson")` is that of the largest rate, `most`, for every example; `make_private` draws:

        rates = torch.tensor([0.002, 0.02])[labels]                # by a rule that was fixed beforehand
        loader = DataLoader(dataset, batch_size=64, sampler=ao.sampling.PoissonRates(rates, most=0.02))
        plan = ao.plan(loader=loader, order="poisson", epochs=5, epsilon=2, delta=1e-6)

    A rate may depend on the example itself, its label for instance, and on nothing else of the data: not on counts of
    classes, unless these are public. `most` and the loader's batch size, by which sums are divided, are public.

    Args:
        rates: (size,) probabilities, from 0 to 1, of the examples of the data set in their order.
        most: the largest that the rule can give, at most 1.
    Raises: ArgumentError for other rates; LoaderError where it is iterated: without the key of a run nothing is drawn.
    """

    def __init__(self, rates: Any, most: float) -> None:
        self.most = checks.real("most", checks.positive("most", most), high=1.0)
        found = checks.array("rates", checks.plain(rates), ndim=1)
        if found.min() < 0 or found.max() > self.most * (1 + 1e-6):  # 0.3 is more than 0.3 in float32
            raise ArgumentError(f"rates must be probabilities from 0 to most={self.most:g}, one for each example")
        self.rates = np.minimum(found, self.most)

    def __len__(self) -> int:
        return len(self.rates)

    def __iter__(self) -> Iterator[int]:
        raise LoaderError(
            "PoissonRates is drawn from by the secret key of a run: plan with ao.plan(loader=.., order='poisson'), and "
            "iterate the loader that make_private returns"
        )


class PoissonBatchSampler(Sampler[list[int]]):
    """Batches in which every example is independently with the same probability: the sampling of amplified DP-SGD.

    Example i is in batch t iff its draw, a 32-bit word addressed by (t, i), is below q 2^32. The probability is
    rounded down to a multiple of 2^-32, which is the private side. Batches differ in size and may be empty.

    Privacy: amplification holds only while the draws are secret. `source` must come from the run's secret key.

    Args:
        size: number of examples.
        sampling_probability: q in (0, 1].
        steps: batches in one epoch.
        source: where the draws come from.
        rank, ranks: every batch is dealt out to so many ranks, and this one's share is given.
        indices: (size,) int64, distinct and ascending: the indices of the examples; None for 0, .., size - 1.
    Raises: ArgumentError for other indices: who stands there twice has two draws.
    """

    def __init__(
        self,
        size: int,
        sampling_probability: float,
        steps: int,
        source: NoiseSource,
        *,
        rank: int = 0,
        ranks: int = 1,
        indices: NDArray[np.int64] | None = None,
    ) -> None:
        self.size = checks.integer("size", size, low=1)
        self.sampling_probability = checks.real("sampling_probability", sampling_probability, low=0.0, high=1.0)
        self.steps = checks.integer("steps", steps, low=1)
        probability = checks.positive("sampling_probability", self.sampling_probability)
        self._draws = Draws(PoissonSampling(self.steps, probability), self.size, source)
        self._rank, self._ranks = rank, ranks
        self.indices = np.arange(self.size) if indices is None else _ascending(indices, self.size)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives."""
        self.epoch = checks.integer("epoch", epoch, low=0)

    def batch(self, t: int) -> list[int]:
        """The rank's indices of batch t, counted over all epochs; ascending, perhaps none."""
        drawn: list[int] = self.indices[self._draws.step(t)].tolist()
        return drawn[self._rank :: self._ranks]

    def batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        """The batches of an epoch from its batch `start` on."""
        return (self.batch(epoch * self.steps + i) for i in range(start, self.steps))

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches(self.epoch, 0)

    def __len__(self) -> int:
        return self.steps


# ----------------------------------------------------------------------------------------------------
# The batches of secret orders: drawn by units, dealt out to ranks, cut into micro-batches, filled up.


Integers = NDArray[np.int64]


class PaddedBatch(list[int]):
    """Indices of examples, of which the last `padding` only fill the batch up: they are to count for nothing."""

    def __init__(self, indices: Iterable[int] = (), padding: int = 0) -> None:
        super().__init__(indices)
        self.padding = padding


@dataclass(frozen=True)
class Owned:
    """The examples of units of numbers 0, .., size - 1.

    Attributes:
        examples: (m,) their indices, unit after unit, ascending within each.
        starts: (size,) where those of each unit begin.
    """

    examples: Integers
    starts: Integers

    @classmethod
    def each_its_own(cls, members: Integers) -> "Owned":
        """Every example is a unit."""
        return cls(members, np.arange(len(members)))

    @classmethod
    def by(cls, members: Integers, owners: Integers) -> "Owned":
        """Of ascending members whose units have these numbers, all of which come."""
        counts = np.bincount(owners)
        return cls(members[np.argsort(owners, kind="stable")], np.cumsum(counts) - counts)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def sizes(self) -> Integers:
        """(size,) how many examples each unit has."""
        return np.diff(self.starts, append=len(self.examples))

    def of(self, units: Any) -> list[int]:
        """The examples of these units, unit after unit."""
        if len(self.starts) == len(self.examples):
            return self.examples[np.asarray(units, np.int64)].tolist()  # type: ignore[no-any-return]
        ends = self.starts + self.sizes
        return [i for unit in units for i in self.examples[self.starts[unit] : ends[unit]].tolist()]


class SecretBatchSampler(Sampler[list[int]]):
    """The batches of a secret order, each dealt out to ranks and cut into `accumulate` micro-batches.

    A unit's examples stand in one micro-batch of one rank. Units are told by their place among all units, ascending;
    a draw is of units, and takes all examples of each.

    Args:
        draws: who is in which step.
        owned: the examples of each unit.
        accumulate: micro-batches of a step, all of a rank: the same number for every step, however many were drawn.
        rows: to how many examples each micro-batch is filled up, by examples of its own again, or the first of all
            where it has none. Only what is more than that tells how many were drawn. None: as many as were drawn.
        rank, ranks: of which this one's share is given.
        ids: of the unit of each member, ascending; None where every example is a unit.
        stated: (steps of an epoch, expected units of a step) where units have rates of their own; None for the order's.
    """

    def __init__(
        self, draws: Draws, owned: Owned, *, accumulate: int = 1, rows: int | None = None, rank: int = 0,
        ranks: int = 1, ids: Units | None = None, stated: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.rule, self._draws, self._owned = draws.rule, draws, owned
        self._accumulate, self._rows, self._rank, self._ranks = accumulate, rows, rank, ranks
        self._step: tuple[int, list[list[int]]] | None = None
        self.members, self._ids = np.sort(owned.examples), ids
        most = draws.rule.most_units
        steps, units = stated or (draws.rule.steps_per_epoch, len(owned) * draws.rule.rate)
        self.steps = accumulate * (draws.rule.n if draws.rule.n % steps else steps)
        units = units if most is None else min(units, most)
        expected = units * len(self.members) / len(owned)
        self.batch_size = max(1, round(expected / (accumulate * ranks)))

    @property
    def phrase(self) -> str:
        """The order in words, such as a checkpoint keeps."""
        if (probability := self.rule.draw_probability) is not None:
            return f"Poisson sampling with probability {probability:g}"
        return self.rule.describe()

    def batch(self, position: int) -> list[int]:
        """The micro-batch of this number, counted over all epochs."""
        step, part = divmod(position, self._accumulate)
        if self._step is None or self._step[0] != step:
            units = self._draws.step(step)[self._rank :: self._ranks]
            self._step = step, [self._padded(own) for own in self._dealt(units)]
        return self._step[1][part]

    def names(self, units: Units, indices: list[int]) -> bool:
        """Whether these are the ids of the units that were drawn, by the examples of these indices."""
        if self._ids is None:
            return True
        places = np.searchsorted(self.members, indices).tolist()
        return len(units) == len(places) and all(self._ids[i] == unit for i, unit in zip(places, units, strict=True))

    def _dealt(self, units: NDArray[np.int64]) -> list[list[int]]:
        """The examples of the units in as many parts as a step has micro-batches, units whole, of like sizes."""
        if self._accumulate == 1:
            parts: list[Any] = [units]
        elif self._owned.sizes.max() == 1:
            parts = np.array_split(units, self._accumulate)
        else:
            parts, sizes = [[] for _ in range(self._accumulate)], np.zeros(self._accumulate, np.int64)
            own = self._owned.sizes
            for unit in units[np.argsort(-own[units], kind="stable")].tolist():
                least = int(sizes.argmin())
                parts[least].append(unit)
                sizes[least] += own[unit]
        return [self._owned.of(part) for part in parts]

    def _padded(self, examples: list[int]) -> list[int]:
        missing = 0 if self._rows is None else max(0, self._rows - len(examples))
        again = examples or [int(self.members[0])]
        return PaddedBatch([*examples, *(again[i % len(again)] for i in range(missing))], missing)

    def batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        """The batches of an epoch from its batch `start` on."""
        return (self.batch(epoch * self.steps + i) for i in range(start, self.steps))

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches(0, 0)

    def __len__(self) -> int:
        return self.steps
