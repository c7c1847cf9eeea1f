"""Who takes part when: the sets of steps at which one privacy unit may contribute.

A participation is public. It must not depend on the data: it is the order in which a loader hands out units, or a
rule that arrivals obey. Steps count from 0; `b` is the distance from one step of a unit to its next (b = 1: every
step), never the number of steps between them.
"""

import base64
import zlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder.errors import ArgumentError

__all__ = [
    "EpochShuffle",
    "FixedOrder",
    "KnownOrder",
    "MinSeparation",
    "Participation",
    "PoissonSampling",
    "SingleEpoch",
    "covers",
    "from_dict",
]


class Participation(ABC):
    """A set of allowed patterns; a pattern is the sorted tuple of the steps of one unit."""

    n: int

    @property
    @abstractmethod
    def max_participations(self) -> int:
        """The largest number of steps of one unit."""

    @property
    @abstractmethod
    def min_separation(self) -> int:
        """The smallest distance between two steps of one unit that the rule allows; n if there is only one step."""

    @abstractmethod
    def patterns(self) -> Iterator[tuple[int, ...]]:
        """Every maximal allowed pattern; exponentially many for some rules: for tests and small n."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `from_dict` makes an equal participation."""

    @abstractmethod
    def describe(self) -> str:
        """One phrase for people."""


@dataclass(frozen=True)
class SingleEpoch(Participation):
    """Every unit takes part in one step at most."""

    n: int

    def __post_init__(self) -> None:
        _check.integer("n", self.n, low=1)

    @property
    def max_participations(self) -> int:
        """1."""
        return 1

    @property
    def min_separation(self) -> int:
        """n: there is no second time."""
        return self.n

    def patterns(self) -> Iterator[tuple[int, ...]]:
        """(0,), (1,), .., (n - 1,)."""
        return ((t,) for t in range(self.n))

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "single_epoch", "n": n}."""
        return {"kind": "single_epoch", "n": self.n}

    def describe(self) -> str:
        """One phrase for people."""
        return f"each unit in at most one of {self.n} steps"


@dataclass(frozen=True)
class FixedOrder(Participation):
    """The same order in every epoch: a unit that is in step j < b is in steps j, j + b, j + 2b, ..

    What a sequential loader does, or one that shuffled once and keeps the order (`FixedOrderSampler`).

    Args:
        n: number of steps, at most k b.
        k: number of epochs.
        b: steps in one epoch.
    """

    n: int
    k: int
    b: int

    def __post_init__(self) -> None:
        _check.integer("n", self.n, low=1)
        _check.integer("k", self.k, low=1)
        _check.integer("b", self.b, low=1)
        if self.n > self.k * self.b:
            raise ArgumentError(
                f"n must be at most k b = {self.k} * {self.b} = {self.k * self.b}, or some unit comes more than k "
                f"times; got n={self.n}"
            )

    @property
    def max_participations(self) -> int:
        """Epochs that begin within n steps."""
        return min(self.k, -(-self.n // self.b))

    @property
    def min_separation(self) -> int:
        """B."""
        return self.b

    def patterns(self) -> Iterator[tuple[int, ...]]:
        """One pattern for each step of an epoch."""
        return (tuple(range(j, self.n, self.b)) for j in range(min(self.b, self.n)))

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "fixed_order", "n": n, "k": k, "b": b}."""
        return {"kind": "fixed_order", "n": self.n, "k": self.k, "b": self.b}

    def describe(self) -> str:
        """One phrase for people."""
        return f"{self.max_participations} epochs of {self.b} steps, the same order in each"


@dataclass(frozen=True)
class EpochShuffle(Participation):
    """One step anywhere in each of k epochs: what `DataLoader(shuffle=True)` does. No amplification is claimed.

    Args:
        k: number of epochs.
        steps_per_epoch: steps in one epoch; n = k * steps_per_epoch.
    """

    k: int
    steps_per_epoch: int

    def __post_init__(self) -> None:
        _check.integer("k", self.k, low=1)
        _check.integer("steps_per_epoch", self.steps_per_epoch, low=1)

    @property
    def n(self) -> int:  # type: ignore[override]
        """K * steps_per_epoch."""
        return self.k * self.steps_per_epoch

    @property
    def max_participations(self) -> int:
        """K."""
        return self.k

    @property
    def min_separation(self) -> int:
        """1: last in one epoch, first in the next; n for a single epoch."""
        return 1 if self.k > 1 else self.n

    def patterns(self) -> Iterator[tuple[int, ...]]:
        """steps_per_epoch ** k patterns."""
        s = self.steps_per_epoch
        return product(*(range(e * s, (e + 1) * s) for e in range(self.k)))

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "epoch_shuffle", "k": k, "steps_per_epoch": s}."""
        return {"kind": "epoch_shuffle", "k": self.k, "steps_per_epoch": self.steps_per_epoch}

    def describe(self) -> str:
        """One phrase for people."""
        return f"{self.k} epochs of {self.steps_per_epoch} steps, shuffled anew in each"


@dataclass(frozen=True)
class MinSeparation(Participation):
    """At most k steps, any two of them at least b apart: arrivals that a timer spaces out.

    Args:
        n: number of steps.
        b: smallest distance between two steps of a unit; b = 1 allows every step.
        k: largest number of steps of a unit; None for as many as fit.
    """

    n: int
    b: int
    k: int | None = None

    def __post_init__(self) -> None:
        _check.integer("n", self.n, low=1)
        _check.integer("b", self.b, low=1)
        if self.k is not None:
            _check.integer("k", self.k, low=1)

    @property
    def max_participations(self) -> int:
        """k, or what fits into n steps if that is less."""
        fits = -(-self.n // self.b)
        return fits if self.k is None else min(self.k, fits)

    @property
    def min_separation(self) -> int:
        """B."""
        return self.b

    def patterns(self) -> Iterator[tuple[int, ...]]:
        """Every allowed pattern of 1 to max_participations steps."""
        for size in range(1, self.max_participations + 1):
            slack = self.n - (size - 1) * (self.b - 1)
            for steps in combinations(range(slack), size):
                yield tuple(t + i * (self.b - 1) for i, t in enumerate(steps))

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "min_separation", "n": n, "b": b, "k": k}."""
        return {"kind": "min_separation", "n": self.n, "b": self.b, "k": self.k}

    def describe(self) -> str:
        """One phrase for people."""
        return f"each unit in at most {self.max_participations} of {self.n} steps, at least {self.b} apart"


class KnownOrder(Participation):
    """An order that is known in full beforehand: which units are in which step.

    The order must not depend on the data. Every unit then has its own sensitivity; the plan's is the largest.

    Args:
        order: for each step the ids of its units (integers or strings; an id twice in a step counts once).

    Attributes:
        units: (U,) sorted distinct ids.
        steps, indices: (M,) one participation each, sorted by unit, then step; `indices` point into `units`.
    """

    def __init__(self, order: Sequence[Iterable[Hashable] | Hashable]) -> None:
        rows = [self._ids(step) for step in order]
        self.n = _check.integer("number of steps in order", len(rows), low=1)
        if not any(rows):
            raise ArgumentError("order must name at least one unit, got only empty steps")
        kinds = {type(u) for row in rows for u in row}
        if not kinds <= {int} and not kinds <= {str}:
            raise ArgumentError(f"units in order must be all integers or all strings, got {sorted(map(str, kinds))}")
        steps = np.repeat(np.arange(self.n), [len(row) for row in rows])
        ids = np.array([u for row in rows for u in row])
        self.units, indices = np.unique(ids, return_inverse=True)
        pairs = np.unique(np.stack([indices, steps]), axis=1)
        self.indices: NDArray[np.int64] = pairs[0].astype(np.int64)
        self.steps: NDArray[np.int64] = pairs[1].astype(np.int64)

    @staticmethod
    def _ids(step: Any) -> list[Any]:
        if isinstance(step, (str, int, np.integer)):
            step = [step]
        return [int(u) if isinstance(u, np.integer) else str(u) if isinstance(u, np.str_) else u for u in step]

    @property
    def max_participations(self) -> int:
        """The largest number of steps of one unit."""
        return int(np.bincount(self.indices).max())

    @property
    def min_separation(self) -> int:
        """The smallest distance that occurs; n if no unit comes twice."""
        gaps = np.diff(self.steps)[np.diff(self.indices) == 0]
        return int(gaps.min()) if gaps.size else self.n

    def patterns(self) -> Iterator[tuple[int, ...]]:
        """The pattern of each unit, in the order of `units`."""
        bounds = np.searchsorted(self.indices, np.arange(len(self.units) + 1))
        return (tuple(self.steps[i:j].tolist()) for i, j in pairwise(bounds))

    def to_dict(self) -> dict[str, Any]:
        """The order, compressed: steps and indices as deltas, zlib, base64."""

        def pack(values: NDArray[np.int64]) -> str:
            raw = np.diff(values, prepend=0).astype("<i4").tobytes()
            return base64.b64encode(zlib.compress(raw, 9)).decode()

        units = pack(self.units.astype(np.int64)) if self._integer_units else self.units.tolist()
        return {
            "kind": "known_order", "n": self.n, "units": units,
            "indices": pack(self.indices), "steps": pack(self.steps),
        }  # fmt: skip

    @property
    def _integer_units(self) -> bool:
        small = self.units.dtype.kind == "i" and np.abs(self.units).max(initial=0) < 2**30
        return bool(small)

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> "KnownOrder":
        def unpack(text: str) -> NDArray[np.int64]:
            raw = zlib.decompress(base64.b64decode(text, validate=True))
            return np.cumsum(np.frombuffer(raw, dtype="<i4").astype(np.int64))

        steps, indices = unpack(data["steps"]), unpack(data["indices"])
        units = unpack(data["units"]) if isinstance(data["units"], str) else np.array(data["units"])
        order: list[list[Any]] = [[] for _ in range(data["n"])]
        for t, u in zip(steps.tolist(), units[indices].tolist(), strict=True):
            order[t].append(u)
        return cls(order)

    def describe(self) -> str:
        """One phrase for people."""
        return f"a known order of {len(self.units)} units over {self.n} steps, at most {self.max_participations} times"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KnownOrder) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.n, len(self.units), len(self.steps)))

    def __repr__(self) -> str:
        return f"KnownOrder(n={self.n}, units={len(self.units)})"


@dataclass(frozen=True)
class PoissonSampling(Participation):
    """Every unit is in every step independently with a given, secret coin: DP-SGD's amplified baseline.

    Only `anyorder`'s own sampler provides it; a shuffled loader does not.

    Args:
        n: number of steps.
        sampling_probability: q, in (0, 1].
    """

    n: int
    sampling_probability: float

    def __post_init__(self) -> None:
        _check.integer("n", self.n, low=1)
        _check.real("sampling_probability", self.sampling_probability, low=0.0, high=1.0)
        _check.positive("sampling_probability", self.sampling_probability)

    @property
    def max_participations(self) -> int:
        """n: nothing but chance keeps a unit out of a step."""
        return self.n

    @property
    def min_separation(self) -> int:
        """1."""
        return 1

    def patterns(self) -> Iterator[tuple[int, ...]]:
        """Every step: the one maximal pattern."""
        yield tuple(range(self.n))

    def to_dict(self) -> dict[str, Any]:
        """{"kind": "poisson_sampling", "n": n, "sampling_probability": q}."""
        return {"kind": "poisson_sampling", "n": self.n, "sampling_probability": self.sampling_probability}

    def describe(self) -> str:
        """One phrase for people."""
        return f"Poisson sampling, each unit in each of {self.n} steps with probability {self.sampling_probability:g}"


_SIMPLE: dict[str, type[Participation]] = {
    "single_epoch": SingleEpoch,
    "fixed_order": FixedOrder,
    "epoch_shuffle": EpochShuffle,
    "min_separation": MinSeparation,
    "poisson_sampling": PoissonSampling,
}


def from_dict(data: dict[str, Any]) -> Participation:
    """The participation that `Participation.to_dict` described."""
    kind = _check.choice("participation kind", data.get("kind", ""), {*_SIMPLE, "known_order"})
    if kind == "known_order":
        return KnownOrder._from_dict(data)
    return _SIMPLE[kind](**{key: value for key, value in data.items() if key != "kind"})


def covers(planned: Participation, actual: Participation) -> bool:
    """Whether the patterns of `actual`, within the planned steps, are known to be among those of `planned`.

    A known order covers whatever the ledger lets pass, step by step, so it is not judged here.
    """
    match planned:
        case SingleEpoch():
            return actual.max_participations == 1
        case FixedOrder(b=b):
            same = isinstance(actual, FixedOrder) and actual.b == b and actual.max_participations <= planned.k
            return same or (isinstance(actual, SingleEpoch) and actual.n <= b)
        case EpochShuffle(k=k, steps_per_epoch=s):
            same = isinstance(actual, EpochShuffle) and actual.steps_per_epoch == s and actual.k <= k
            return same or covers(FixedOrder(k * s, k, s), actual)
        case MinSeparation(b=b):
            return actual.min_separation >= b and actual.max_participations <= planned.max_participations
        case KnownOrder():
            return True
        case _:
            return planned == actual
