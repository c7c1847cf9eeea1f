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
from anyorder._closed import SetOnce, final, frozen
from anyorder._limits import inflate, spend_participations
from anyorder.errors import ArgumentError, PlanError

__all__ = [
    "EpochShuffle",
    "FixedOrder",
    "KnownOrder",
    "MinSeparation",
    "Participation",
    "PoissonSampling",
    "SingleEpoch",
    "check_kind",
    "covers",
    "from_dict",
    "one_unit",
    "with_names",
    "without_names",
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


@final
@dataclass(frozen=True)
class SingleEpoch(Participation):
    """Every unit takes part in one step at most."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _check.integer("n", self.n, low=1))

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


@final
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
        object.__setattr__(self, "n", _check.integer("n", self.n, low=1))
        object.__setattr__(self, "k", _check.integer("k", self.k, low=1))
        object.__setattr__(self, "b", _check.integer("b", self.b, low=1))
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


@final
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
        object.__setattr__(self, "k", _check.integer("k", self.k, low=1))
        object.__setattr__(self, "steps_per_epoch", _check.integer("steps_per_epoch", self.steps_per_epoch, low=1))

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


@final
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
        object.__setattr__(self, "n", _check.integer("n", self.n, low=1))
        object.__setattr__(self, "b", _check.integer("b", self.b, low=1))
        if self.k is not None:
            object.__setattr__(self, "k", _check.integer("k", self.k, low=1))

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


@final
class KnownOrder(SetOnce, Participation):
    """An order that is known in full beforehand: which units are in which step.

    The order must not depend on the data. Every unit then has its own sensitivity; the plan's is the largest.

    Args:
        order: for each step the ids of its units (integers or strings; an id twice in a step counts once).

    Attributes:
        units: (U,) sorted distinct ids.
        steps, indices: (M,) one participation each, sorted by unit, then step; `indices` point into `units`.
    """

    def __init__(self, order: Sequence[Iterable[Hashable] | Hashable]) -> None:
        rows = [_ids(step) for step in order]
        n = _check.integer("number of steps in order", len(rows), low=1)
        kinds = {row.dtype.kind for row in rows if len(row)}
        if not kinds:
            raise ArgumentError("order must name at least one unit, got only empty steps")
        if len(kinds) > 1:
            raise ArgumentError("units in order must be all integers or all strings, got both")
        self._fill(n, np.concatenate([row for row in rows if len(row)]), np.repeat(np.arange(n), [*map(len, rows)]))

    def _fill(self, n: int, ids: NDArray[Any], steps: NDArray[np.int64]) -> None:
        """From one id and one step for each participation, sorted by step; those that come twice count once."""
        self.n = n
        by_unit = np.argsort(ids, kind="stable")
        ids, steps = ids[by_unit], steps[by_unit]
        new = np.append(True, ids[1:] != ids[:-1])
        once = new | np.append(True, steps[1:] != steps[:-1])
        self.units: NDArray[Any] = frozen(ids[new])
        self.indices: NDArray[np.int64] = frozen((np.cumsum(new) - 1)[once])
        self.steps: NDArray[np.int64] = frozen(steps[once].astype(np.int64))

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
        units = _packed(self.units) if self.units.dtype.kind == "i" else self.units.tolist()
        return {
            "kind": "known_order", "n": self.n, "units": units,
            "indices": _packed(self.indices), "steps": _packed(self.steps),
        }  # fmt: skip

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> "KnownOrder":
        n = _check.integer("n", data["n"], low=1)
        steps, indices = _unpacked(data["steps"]), _unpacked(data["indices"])
        units = _unpacked(data["units"]) if isinstance(data["units"], str) else _ids(data["units"])
        if len(steps) != len(indices) or not len(steps) or not len(units):
            raise ArgumentError("a known order must have one step and one unit for each of its participations")
        for name, values, size in (("steps", steps, n), ("indices", indices, len(units))):
            if values.min() < 0 or values.max() >= size:
                raise ArgumentError(f"{name} of a known order must lie in 0 .. {size - 1}")
        by_step = np.argsort(steps, kind="stable")
        result = cls.__new__(cls)
        result._fill(n, units[indices[by_step]], steps[by_step])
        return result

    def describe(self) -> str:
        """One phrase for people."""
        return f"a known order of {len(self.units)} units over {self.n} steps, at most {self.max_participations} times"

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is KnownOrder
            and self.n == other.n
            and all(
                np.array_equal(mine, its)
                for mine, its in ((self.units, other.units), (self.indices, other.indices), (self.steps, other.steps))
            )
        )

    def __hash__(self) -> int:
        return hash((self.n, len(self.units), len(self.steps)))

    def __repr__(self) -> str:
        return f"KnownOrder(n={self.n}, units={len(self.units)})"


def _ids(step: Any) -> NDArray[Any]:
    """The ids of one step: int64, or text. Python's own types are looked at one by one: True is not the unit 1."""
    if isinstance(step, (str, int, np.integer)):
        step = [step]
    if isinstance(step, np.ndarray) and step.ndim == 1 and step.dtype.kind == "i":
        return step.astype(np.int64)
    ids = [int(u) if isinstance(u, np.integer) else str(u) if isinstance(u, np.str_) else u for u in step]
    kinds = set(map(type, ids))
    if not kinds <= {int} and kinds != {str}:
        raise ArgumentError(f"units in order must be all integers or all strings, got {sorted(map(str, kinds))}")
    try:
        return np.array(ids) if kinds == {str} else np.array(ids, dtype=np.int64)
    except OverflowError as problem:
        raise ArgumentError("integer units in order must fit into 64 bits with their sign; use strings") from problem


def _packed(values: NDArray[np.int64]) -> str:
    """Integers as text: differences, modulo 2^64, in the fewest bytes that all fit into, compressed."""
    differences = np.diff(values, prepend=np.int64(0))
    for width in "bhiq":
        narrow = differences.astype(f"<i{np.dtype(width).itemsize}")
        if (narrow == differences).all():
            break
    return f"{width}:" + base64.b64encode(zlib.compress(narrow.tobytes(), 1)).decode()


def _unpacked(text: str) -> NDArray[np.int64]:
    width, packed = text.split(":")
    size = np.dtype(_check.choice("width of packed integers", width, "bhiq")).itemsize
    raw = inflate(base64.b64decode(packed, validate=True))
    spend_participations(len(raw) // size)
    return np.cumsum(np.frombuffer(raw, dtype=f"<i{size}").astype(np.int64))


@final
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
        object.__setattr__(self, "n", _check.integer("n", self.n, low=1))
        probability = _check.real("sampling_probability", self.sampling_probability, low=0.0, high=1.0)
        object.__setattr__(self, "sampling_probability", _check.positive("sampling_probability", probability))

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


_KINDS = (SingleEpoch, FixedOrder, EpochShuffle, MinSeparation, KnownOrder, PoissonSampling)


def check_kind(participation: object) -> None:
    """Raise PlanError unless it is one of the kinds of this module itself: the set that all claims are proven for."""
    if type(participation) not in _KINDS:
        raise PlanError(
            f"participation must be one of {', '.join(kind.__name__ for kind in _KINDS)}, got "
            f"{type(participation).__name__}: claims are proven for these alone; name the units of every step with "
            "KnownOrder"
        )


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


def one_unit(n: int, steps: Sequence[int]) -> KnownOrder:
    """The order of n steps in which unit 0 is in the given ones, which rise, and nobody else in any."""
    order = KnownOrder.__new__(KnownOrder)
    order._fill(n, np.zeros(len(steps), np.int64), np.array(steps, np.int64))
    return order


Names = list[int] | list[str]


def without_names(participation: Participation) -> tuple[Participation, Names | None]:
    """The participation as it may be shown, and what it leaves out: the ids of units, by number.

    A known order's units are numbered by their steps alone, so that neither their ids nor the ids' order can be told:
    unit 0 has the first pattern in lexicographic order. Other rules name nobody: (itself, None).
    """
    if type(participation) is not KnownOrder:
        return participation, None
    order, count = participation, len(participation.units)
    text = order.steps.astype(">i4").tobytes()  # in this form bytes compare as the steps do
    bounds = (4 * np.searchsorted(order.indices, np.arange(count + 1))).tolist()
    ranking = sorted(range(count), key=[text[i:j] for i, j in pairwise(bounds)].__getitem__)
    numbers = np.empty(count, np.int64)
    numbers[ranking] = np.arange(count)
    return _renamed(order, numbers), order.units[ranking].tolist()


def with_names(participation: Participation, names: Names | None) -> Participation:
    """What `without_names` was given. Raises: ArgumentError for names that are not one for each number."""
    if type(participation) is not KnownOrder:
        if names is not None:
            raise ArgumentError(f"{participation.describe()} names no units, got {len(names)} names")
        return participation
    count = len(participation.units)
    if names is None or len(names) != count or len(set(names)) != count:
        raise ArgumentError(f"names must be {count} distinct ids, one for each unit of the known order")
    return _renamed(participation, np.array(names))


def _renamed(order: KnownOrder, names: NDArray[Any]) -> KnownOrder:
    """The order with names[i] in place of its unit i."""
    by_step = np.argsort(order.steps, kind="stable")
    bounds = np.searchsorted(order.steps[by_step], np.arange(1, order.n))
    return KnownOrder([part.tolist() for part in np.split(names[order.indices[by_step]], bounds)])


def covers(planned: Participation, actual: Participation) -> bool:
    """Whether the patterns of `actual`, within the planned steps, are known to be among those of `planned`.

    A known order covers whatever the ledger lets pass, step by step, so it is not judged here.
    """
    check_kind(planned)
    check_kind(actual)
    match planned:
        case SingleEpoch():
            return actual.max_participations == 1
        case FixedOrder(b=b):
            same = type(actual) is FixedOrder and actual.b == b and actual.max_participations <= planned.k
            return same or (type(actual) is SingleEpoch and actual.n <= b)
        case EpochShuffle(k=k, steps_per_epoch=s):
            same = type(actual) is EpochShuffle and actual.steps_per_epoch == s and actual.k <= k
            return same or covers(FixedOrder(k * s, k, s), actual)
        case MinSeparation(b=b):
            return actual.min_separation >= b and actual.max_participations <= planned.max_participations
        case KnownOrder():
            return True
        case PoissonSampling():
            return planned == actual
        case _:
            raise AssertionError("unreachable: checked above")
