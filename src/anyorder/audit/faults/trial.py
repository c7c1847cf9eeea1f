"""A run that the audit knows all about: who brings what in which step, and what must come out of it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder.audit.canaries import Canaries, random_steps
from anyorder.errors import ArgumentError, TrainingError
from anyorder.noise import NoiseSource
from anyorder.participation import BallsInBins, MinSeparation, PoissonSampling
from anyorder.plan.plan import Plan
from anyorder.strategy import Banded, BandedInverse, Independent, Strategy, Tree
from anyorder.workload import prefix_sum

__all__ = [
    "BinsTrial",
    "FaultTrial",
    "Moved",
    "Released",
    "SampledTrial",
    "banded",
    "banded_inverse",
    "independent",
    "tree",
]

Floats = NDArray[np.float64]
Step = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Ids of units, (m,) int64, and (m, size) float32: the rows of a unit are added up, and the sum is cut once."""

CLIP_NORM = 1.5
BATCH_SIZE = 20
_MOST_ROWS = 3  # of a unit in a step


def banded(n: int) -> Strategy:
    """C of four bands with unit columns: orthogonal for steps four apart, and far from it for steps three apart."""
    bands = [[0.9**band * (t + band < n) for t in range(n)] for band in range(4)]
    return Banded(np.array(bands)).normalized()


def banded_inverse(n: int) -> Strategy:
    """Noise that is a combination of rows, with nothing kept between steps."""
    return BandedInverse([1.0, -0.5, -0.2], n)


def tree(n: int) -> Strategy:
    """Binary trees, of more rows than steps."""
    return Tree(n)


def independent(n: int) -> Strategy:
    """Independent noise: DP-SGD's."""
    return Independent(n)


@dataclass(frozen=True)
class Moved:
    """A released row of a front end whose clip norm moves: units were clipped at `clip_norm`, and the noise scaled
    with it.

    Attributes:
        row: the mean in its own units.
        clip_norm: at which units were clipped in this step.
        scale: the noise in `row` times the divisor is that of the plan times scale, and what a unit adds divided by
            it is at most the plan's clip norm.
    """

    row: Any
    clip_norm: float
    scale: float


@dataclass(frozen=True)
class Released:
    """The rows that a front end released in a trial.

    Attributes:
        rows: (n, size), times the divisor and in the plan's units: sums plus noise.
        totals: (n, size), the sums without noise, by this file's own arithmetic.
    """

    rows: Floats
    totals: Floats


class FaultTrial:
    """A run under a plan for several participations, some steps apart, with canaries among its units.

    Units 0, .., count - 1 are canaries: each brings, in the steps that are its own, up to three rows whose sum is a
    long vector along its direction, or zeros where its secret draw says so. The others bring vectors on the
    other half of the coordinates: short ones, long ones, and ones that are not finite and must add zero.

    Args:
        seed: of all of it but the noise.
        strategy: makes C for n steps.
        n: steps.
        size: elements of a released row.
        count: canaries, at most size / 2.
        others: further units.
        looser: for faults in the guard of the plan's rule: given the rule, the one that units really follow; they come
            as early and as often as it allows. None: they keep to the plan.

    Attributes:
        size: as given.
        key: 32 bytes for the release.
        canaries: their directions, on the first half of the coordinates.
        included: (count,) the draws.
        own: for every unit its steps.
    """

    sigma = 0.05
    separation, most = 4, 3

    def __init__(
        self,
        seed: int,
        strategy: Callable[[int], Strategy] = banded,
        *,
        n: int = 16,
        size: int = 800,
        count: int = 160,
        others: int = 12,
        looser: Callable[[MinSeparation], MinSeparation] | None = None,
    ) -> None:
        self.size = checks.integer("size", size, low=2)
        source = NoiseSource(checks.integer("seed", seed, low=0).to_bytes(32, "little"))
        self.key = source.derive(b"release").key
        self._generator = np.random.default_rng(seed)
        half = size // 2
        self.canaries = Canaries(size, count, half, seed, coordinates=np.arange(half))
        self.included = self.canaries.draw(source.derive(b"coins").key)
        self._strategy, self._n, self._others = strategy(n), n, checks.integer("others", others, low=0)
        rule = MinSeparation(n, self.separation, self.most)
        units = count + self._others
        if looser is None:
            self.own: Sequence[Sequence[int]] = random_steps(rule, units, source.derive(b"steps"))
        else:
            followed = looser(rule)
            starts = self._generator.integers(0, self.separation, units)  # early ones: C has more rows below them
            self.own = [tuple(range(start, n, followed.b))[: followed.k] for start in starts]
        self._rule = rule
        self._batches = [self._batch(t) for t in range(n)]

    @cached_property
    def plan(self) -> Plan:
        """The plan that the front end is to carry out; its unit is a "user"."""
        return Plan(
            participation=self._rule, strategy=self._strategy, workload=prefix_sum(self._n), clip_norm=CLIP_NORM,
            sigma=self.sigma, delta=1e-5, batch_size=BATCH_SIZE, unit="user",
        )  # fmt: skip

    @property
    def steps(self) -> Iterator[Step]:
        """For every step the unit of each row, and the rows: raw vectors, which nobody has clipped."""
        return ((units.copy(), rows.copy()) for units, rows in self._batches)

    def _batch(self, t: int) -> Step:
        units = np.array([unit for unit, own in enumerate(self.own) if t in own], np.int64)
        named, rows = [], []
        for unit in self._generator.permutation(units):
            number = int(self._generator.integers(1, _MOST_ROWS + 1))
            shares = self._generator.dirichlet(np.ones(number))
            named += [unit] * number
            rows.append(shares[:, None] * self._vector(int(unit)))
        order = self._generator.permutation(len(named))
        stacked = np.concatenate([np.empty((0, self.size)), *rows])
        return np.array(named, np.int64)[order], stacked[order].astype(np.float32)

    def _vector(self, unit: int) -> Floats:
        """What a unit brings to a step, as a whole."""
        length = CLIP_NORM * self._generator.uniform(20, 60)
        if unit < self.canaries.count:
            return length * self.canaries.vector(unit) if self.included[unit] else np.zeros(self.size)
        result = np.zeros(self.size)
        half = self.size // 2
        drawn = self._generator.normal(size=self.size - half)
        kind = unit % 4
        result[half:] = drawn / np.linalg.norm(drawn) * (0.4 * CLIP_NORM if kind < 2 else length)
        if kind == 3:
            result[half + unit % 7] = (np.nan, np.inf)[unit // 4 % 2]
        return result

    def total(self, t: int, clip_norm: float) -> Floats:
        """(size,) the sum of step t of vectors clipped at clip_norm, by the equation, in float64."""
        units, rows = self._batches[t]
        result = np.zeros(self.size)
        for unit in np.unique(units):
            vector = rows[units == unit].astype(np.float64).sum(0)
            norm = np.linalg.norm(vector)
            if np.isfinite(norm) and norm > 0:
                result += vector * min(1.0, clip_norm / norm)
        return result

    def released(self, rows: Iterable[ArrayLike | Moved]) -> Released:
        """Return what a front end gave, and what it had to give.

        Raises: ArgumentError for rows of another shape, TrainingError for too few of them or too many.
        """
        found: list[Floats] = []
        totals: list[Floats] = []
        for row in rows:
            moved = row if isinstance(row, Moved) else Moved(row, CLIP_NORM, 1.0)
            values = np.asarray(moved.row, dtype=np.float64).reshape(-1)
            if values.shape != (self.size,):
                raise ArgumentError(f"a released row must have {self.size} elements, got shape {np.shape(moved.row)}")
            if len(found) == self._n:
                raise TrainingError(f"the front end released more than the {self._n} rows of the plan")
            totals.append(self.total(len(found), moved.clip_norm) / moved.scale)
            found.append(values * BATCH_SIZE / moved.scale)
        if len(found) < self._n:
            raise TrainingError(f"the front end released {len(found)} rows, and the plan has {self._n} steps")
        return Released(np.array(found), np.array(totals))


class SampledTrial:
    """A run of secret sampling: units are drawn by the release's own draws, and every unit brings one vector.

    Args:
        seed: of all of it but the noise and the draws of sampling.
        n: steps.
        count: canaries, which are all the units there are.

    Attributes:
        size: elements of a released row.
        key: 32 bytes for the release.
        vectors: (count, size) float32, row i what unit i brings whenever it is drawn; zeros where its draw says so.
        canaries, included: as in `Trial`.
    """

    sampling_probability = 0.02
    sigma = 0.25

    def __init__(self, seed: int, *, n: int = 20, count: int = 400) -> None:
        source = NoiseSource(checks.integer("seed", seed, low=0).to_bytes(32, "little")).derive(b"sampled")
        self.size = 2 * count
        self.key = source.derive(b"release").key
        self.canaries = Canaries(self.size, count, self.size, seed)
        self.included = self.canaries.draw(source.derive(b"coins").key)
        self.vectors = (30 * CLIP_NORM * self.canaries.vectors() * self.included[:, None]).astype(np.float32)
        self._n = n

    @cached_property
    def plan(self) -> Plan:
        """The plan that the front end is to carry out; its unit is an "example"."""
        return Plan(
            participation=PoissonSampling(self._n, self.sampling_probability), strategy=Independent(self._n),
            workload=prefix_sum(self._n), clip_norm=CLIP_NORM, sigma=self.sigma, delta=1e-5, batch_size=BATCH_SIZE,
            neighbours="add-or-remove",
        )  # fmt: skip


class BinsTrial:
    """A run of balls in bins with so little noise that its rows tell who was in which step.

    What is tested is the law of the batches, and that of the noise; `strategy` is correlated over bins.

    Args:
        seed: of all of it but the noise and the draws of bins.
        number: of runs of one front end, which must have draws of their own.
        count: units.

    Attributes:
        size: elements of a released row.
        key: 32 bytes for the release.
        vectors: (count, size) float32, row i what unit i brings whenever it is drawn.
        canaries: their directions: those of all units.
    """

    sigma = 0.01

    def __init__(self, seed: int, number: int = 0, *, count: int = 300) -> None:
        source = NoiseSource(checks.integer("seed", seed, low=0).to_bytes(32, "little")).derive(b"bins %d" % number)
        self.size = count
        self.key = source.derive(b"release").key
        self.canaries = Canaries(count, count, count, seed)
        self.vectors = (30 * CLIP_NORM * self.canaries.vectors()).astype(np.float32)

    @cached_property
    def plan(self) -> Plan:
        """The plan that the front end is to carry out; its unit is an "example"."""
        rule = BallsInBins(k=3, b=8)
        return Plan(
            participation=rule, strategy=banded(rule.n), workload=prefix_sum(rule.n), clip_norm=CLIP_NORM,
            sigma=self.sigma, delta=1e-5, batch_size=BATCH_SIZE,
        )  # fmt: skip

    def present(self, released: Iterable[ArrayLike]) -> tuple[NDArray[np.bool_], Released]:
        """Return who was in which step, (n, count); and the rows next to the sums that follow from that.

        Raises: ArgumentError for rows of another shape, TrainingError for too few of them or too many.
        """
        rows = np.array([np.asarray(row, dtype=np.float64).reshape(-1) for row in released]) * BATCH_SIZE
        if rows.shape != (self.plan.n, self.size):
            raise TrainingError(
                f"the front end released rows of shape {rows.shape}, and the plan has {self.plan.n} steps of "
                f"{self.size} elements"
            )
        there = np.stack([self.canaries.dot(row) for row in rows]) > CLIP_NORM / 2
        return there, Released(rows, CLIP_NORM * there.astype(np.float64) @ self.canaries.vectors())
