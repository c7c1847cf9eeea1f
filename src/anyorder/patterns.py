"""The pattern families: the sets of steps of one unit that sensitivities and optimisers are proven for; and what an
order states about itself, the abstract `Participation`.

A pattern is the sorted tuple of the steps of one unit; b is the distance from one step to the next. Whatever is
allowed is allowed with steps left out: a unit that stays away contributes zero. The union `Pattern` is closed: code
that asks which family it has in hand matches all of them and ends with `assert_never`, so that the type checker names
every place that a further family would have to visit.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import combinations, pairwise, product
from math import comb
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import final, frozen
from anyorder.errors import ArgumentError, PlanError

Integers = NDArray[np.int64]

Groups = list[Integers]
"""Patterns of equal length together: arrays (number of patterns, length) of steps."""


@final
@dataclass(frozen=True, eq=False)
class Listed:
    """One pattern for each of the given units; made by `of` or `strided`.

    Attributes:
        n: number of steps.
        num_units: number of patterns U; some may be equal.
        stride: b where the patterns are j, j + b, j + 2b, .. for each j < b, and the proofs for such lists hold; None
            where they are given one by one.
        given: (steps, indices) of `of`; None for `strided`, which makes them when they are asked for.
    """

    n: int
    num_units: int
    stride: int | None
    given: tuple[Integers, Integers] | None

    def __post_init__(self) -> None:
        if (self.stride is None) == (self.given is None):
            raise ArgumentError("a list of patterns has either a stride or its steps; make it by Listed.of or .strided")

    @classmethod
    def of(cls, n: int, steps: Integers, indices: Integers) -> "Listed":
        """From one step and one unit for each participation, sorted by unit, then step; units are 0, .., U - 1."""
        return cls(n, int(indices[-1]) + 1, None, (frozen(steps), frozen(indices)))

    @classmethod
    def strided(cls, n: int, b: int) -> "Listed":
        """j, j + b, j + 2b, .. for every j < b, within n steps."""
        n, b = checks.integer("n", n, low=1), checks.integer("b", b, low=1)
        return cls(n, min(b, n), b, None)

    @cached_property
    def steps(self) -> Integers:
        """(M,) one step for each participation, sorted by unit, then step."""
        if self.given is not None:
            return self.given[0]
        assert self.stride is not None
        rows = -(-self.n // self.stride)
        steps = np.arange(rows)[None, :] * self.stride + np.arange(self.num_units)[:, None]
        return frozen(steps[steps < self.n])

    @cached_property
    def indices(self) -> Integers:
        """(M,) its unit, from 0 to U - 1; every unit has a step."""
        if self.given is not None:
            return self.given[1]
        assert self.stride is not None
        return frozen(self.steps % self.stride)

    @cached_property
    def max_participations(self) -> int:
        """The most steps of one unit."""
        if self.stride is not None:
            return -(-self.n // self.stride)
        return int(np.bincount(self.indices).max())

    @cached_property
    def min_separation(self) -> int:
        """The stride, or the smallest distance that occurs; n if no unit comes twice."""
        if self.stride is not None:
            return self.stride
        gaps = np.diff(self.steps)[np.diff(self.indices) == 0]
        return int(gaps.min()) if gaps.size else self.n

    def enumerate(self) -> Iterator[tuple[int, ...]]:
        """The pattern of each unit."""
        if self.stride is not None:
            return (tuple(range(j, self.n, self.stride)) for j in range(self.num_units))
        return (tuple(steps.tolist()) for steps in self._by_unit())

    def count(self, limit: int) -> int:
        """Number of patterns; limit + 1 where there are more than the limit."""
        return min(self.num_units, limit + 1)

    def allows(self, steps: Iterable[int]) -> bool:
        """Whether one of the units may be in these distinct steps."""
        wanted = np.array([*steps], np.int64)
        if self.stride is not None:
            inside = ((wanted >= 0) & (wanted < self.n)).all()
            return bool(inside and (wanted % self.stride == wanted[:1] % self.stride).all())
        there = np.bincount(self.indices[np.isin(self.steps, wanted)], minlength=1)
        return bool(there.max() == len(wanted))

    @property
    def spread(self) -> int:
        """A distance d such that one unit may be expected to take j, j + d, j + 2d, ..; for a stride it does."""
        if self.stride is not None:
            return self.stride
        return max(self.min_separation, -(-self.n // self.max_participations))

    def disjoint(self) -> Groups:
        """Disjoint patterns that cover every step; each step goes to one of its units, those with most free first."""
        if self.stride is not None:
            return _rectangular(self.n, self.stride)
        free = np.ones(self.n, dtype=bool)
        owned = []
        for steps in sorted(self._by_unit(), key=len, reverse=True):
            mine = steps[free[steps]]
            if mine.size:
                free[mine] = False
                owned.append(mine)
        return grouped(owned, self.n)

    @property
    def are_disjoint(self) -> bool:
        """Whether two units that are ever in one step share all their steps, so that `disjoint` leaves nothing out."""
        if self.stride is not None:
            return True
        steps = [frozenset(pattern) for pattern in self.enumerate()]
        return len(set().union(*steps)) == sum(len(pattern) for pattern in set(steps))

    def likely_worst(self) -> Integers:
        """The pattern of largest sensitivity for a Toeplitz C whose first column does not rise; guessed for a list."""
        return np.arange(0, self.n, self.spread)[: self.max_participations]

    def _by_unit(self) -> list[Integers]:
        bounds = np.searchsorted(self.indices, np.arange(self.num_units + 1))
        return [self.steps[i:j] for i, j in pairwise(bounds.tolist())]

    def __eq__(self, other: object) -> bool:
        if type(other) is not Listed or (self.n, self.stride) != (other.n, other.stride):
            return False
        return self.stride is not None or (
            np.array_equal(self.steps, other.steps) and np.array_equal(self.indices, other.indices)
        )

    def __hash__(self) -> int:
        return hash((self.n, self.num_units, self.stride))


@final
@dataclass(frozen=True)
class Separated:
    """At most k steps, any two of them at least b apart, wherever they lie.

    Args:
        n: number of steps.
        b: the smallest distance.
        k: the most steps of a unit, lowered to what fits into n; None for as many as fit.
    """

    n: int
    b: int
    k: int | None = None

    def __post_init__(self) -> None:
        n, b = checks.integer("n", self.n, low=1), checks.integer("b", self.b, low=1)
        fits = -(-n // b)
        k = fits if self.k is None else min(checks.integer("k", self.k, low=1), fits)
        for name, value in (("n", n), ("b", b), ("k", k)):
            object.__setattr__(self, name, value)

    @property
    def max_participations(self) -> int:
        """k, or what fits into n steps if that is less."""
        assert self.k is not None
        return self.k

    @property
    def min_separation(self) -> int:
        """B."""
        return self.b

    @property
    def is_single(self) -> bool:
        """Whether no second step fits into n, wherever the first one is."""
        return self.b >= self.n

    def enumerate(self) -> Iterator[tuple[int, ...]]:
        """Every pattern of 1 to max_participations steps: exponentially many."""
        for size in range(1, self.max_participations + 1):
            slack = self.n - (size - 1) * (self.b - 1)
            for steps in combinations(range(slack), size):
                yield tuple(t + i * (self.b - 1) for i, t in enumerate(steps))

    def count(self, limit: int) -> int:
        """Number of patterns; limit + 1 where there are more than the limit."""
        total = 0
        for size in range(1, self.max_participations + 1):
            total += comb(self.n - (size - 1) * (self.b - 1), size)
            if total > limit:
                return limit + 1
        return total

    def allows(self, steps: Iterable[int]) -> bool:
        """Whether a unit may be in these distinct steps."""
        wanted = sorted(steps)
        inside = not wanted or (wanted[0] >= 0 and wanted[-1] < self.n)
        far = all(later - sooner >= self.b for sooner, later in pairwise(wanted))
        return inside and far and len(wanted) <= self.max_participations

    @property
    def spread(self) -> int:
        """The least distance d such that a unit may take j, j + d, j + 2d, .. to the end, from any j."""
        return max(self.b, -(-self.n // self.max_participations))

    def disjoint(self) -> Groups:
        """Some disjoint patterns that cover every step: j, j + d, j + 2d, .. for the spread d."""
        return _rectangular(self.n, self.spread)

    @property
    def are_disjoint(self) -> bool:
        """Whether `disjoint` leaves no pattern out: single steps."""
        return self.max_participations == 1

    def likely_worst(self) -> Integers:
        """The pattern of largest sensitivity for a Toeplitz C whose first column does not rise: early and close."""
        return np.arange(0, self.n, self.b)[: self.max_participations]


@final
@dataclass(frozen=True)
class PerEpoch:
    """One step anywhere in each of k epochs, [e s, (e + 1) s) for s = steps_per_epoch; n = k s."""

    k: int
    steps_per_epoch: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", checks.integer("k", self.k, low=1))
        object.__setattr__(self, "steps_per_epoch", checks.integer("steps_per_epoch", self.steps_per_epoch, low=1))

    @property
    def n(self) -> int:
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

    def enumerate(self) -> Iterator[tuple[int, ...]]:
        """steps_per_epoch ** k patterns."""
        s = self.steps_per_epoch
        return product(*(range(e * s, (e + 1) * s) for e in range(self.k)))

    def count(self, limit: int) -> int:
        """Number of patterns; limit + 1 where there are more than the limit."""
        s = self.steps_per_epoch
        return int(min(s ** min(self.k, limit.bit_length()), limit + 1)) if s > 1 else 1

    def allows(self, steps: Iterable[int]) -> bool:
        """Whether a unit may be in these distinct steps."""
        wanted = [*steps]
        epochs = {t // self.steps_per_epoch for t in wanted}
        return all(0 <= t < self.n for t in wanted) and len(epochs) == len(wanted)

    @property
    def spread(self) -> int:
        """The least distance d such that a unit may take j, j + d, j + 2d, .. to the end, from any j."""
        return self.steps_per_epoch

    def disjoint(self) -> Groups:
        """Some disjoint patterns that cover every step: the same place in each epoch."""
        return _rectangular(self.n, self.steps_per_epoch)

    @property
    def are_disjoint(self) -> bool:
        """Whether `disjoint` leaves no pattern out: a single epoch."""
        return self.k == 1

    def likely_worst(self) -> Integers:
        """A guess at the pattern of largest sensitivity: last of one epoch, first of the next, and so in pairs."""
        epochs, s = np.arange(self.k), self.steps_per_epoch
        return np.asarray(epochs * s + np.where((epochs % 2 == 0) & (epochs < self.k - 1), s - 1, 0))


Pattern = Listed | Separated | PerEpoch
"""What one unit may do, closed: every participation reduces to one of these."""


def grouped(patterns: list[Integers], n: int) -> Groups:
    """The patterns sorted by length into rectangular arrays; steps in none of them come alone."""
    missing = np.setdiff1d(np.arange(n), np.concatenate(patterns))
    patterns = patterns + [missing[i : i + 1] for i in range(len(missing))]
    lengths = np.array([len(pattern) for pattern in patterns])
    return [np.array([p for p in patterns if len(p) == length]) for length in np.unique(lengths) if length]


def _rectangular(n: int, stride: int) -> Groups:
    """j, j + stride, j + 2 stride, .. within n steps."""
    stride = min(stride, n)
    table = np.arange(-(-n // stride) * stride).reshape(-1, stride).T
    whole = stride if n % stride == 0 else n % stride  # patterns of full length; the others lack the last step
    return [part for part in (table[whole:, :-1], table[:whole]) if part.size]


# ----------------------------------------------------------------------------------------------------
# What an order states about itself. The orders are in `anyorder.participation`, one file each.


class Needs(NamedTuple):
    """What somebody who trains must be able to do for an order's claim to hold.

    Attributes:
        access: to the data.
        secrecy: whether batches must stay secret.
        batches: of what size they are.
    """

    access: str
    secrecy: bool
    batches: str

    def __str__(self) -> str:
        secret = "batches stay secret" if self.secrecy else "batches may be public"
        return f"{self.access}; {secret}; {self.batches}"


class Word(NamedTuple):
    """A word that asks for an order, of `ao.plan`, the command line and the planner page.

    Attributes:
        word: as it is listed.
        meaning: in brackets, for people; "" for orders by secret draws, which are explained together.
        options: what may be given with it beside sizes: of "cycle", "max_batch_size", "method".
        is_compared: whether it is among those that "any" stands for.
        is_on_page: whether the planner page offers it.
        is_quick: whether long plans of it, and sweeps, take no time.
    """

    word: str
    meaning: str = ""
    options: tuple[str, ...] = ()
    is_compared: bool = True
    is_on_page: bool = True
    is_quick: bool = False


class Asked(NamedTuple):
    """The sizes that an order in words is asked for: so many passes over so many examples in batches of this size.

    Attributes:
        steps: in an epoch.
        cycle, max_batch_size: the options of that name; None where they are not given.
    """

    dataset_size: int
    batch_size: int
    epochs: int
    steps: int
    cycle: int | None = None
    max_batch_size: int | None = None

    @property
    def n(self) -> int:
        """Steps of all epochs."""
        return self.epochs * self.steps

    @property
    def share(self) -> float:
        """The expected part of the examples in a step."""
        return self.batch_size / self.dataset_size

    def cycle_for(self, word: str, otherwise: int | None = None) -> int:
        """The cycle, or what is taken without one. Raises: ArgumentError."""
        cycle = otherwise if self.cycle is None else self.cycle
        if cycle is None:
            raise ArgumentError(
                f"mechanism must have bands with order {word!r}, such as 'banded toeplitz, 8 bands', or be "
                "'independent', where no cycle is given in Python: other mechanisms are not accounted for this order "
                "without one"
            )
        return checks.integer("cycle", cycle, low=1, high=int(1 / self.share * (1 + 1e-12)))


class LoaderFacts(NamedTuple):
    """What the samplers of a loader say of who comes when, for an order to recognise itself.

    Attributes:
        steps: of the run.
        epochs: passes, the last perhaps in part.
        steps_per_epoch: of a whole epoch.
        is_once: whether each unit is in one step of an epoch at most, and there once.
        is_fixed: whether units are in the same steps of each epoch.
        probability: with which each unit is in each step, by secret draws of its own; None for other orders.
        units: the units of each step, where they are asked for by name; None where each example is its own.
    """

    steps: int
    epochs: int
    steps_per_epoch: int
    is_once: bool = False
    is_fixed: bool = False
    probability: float | None = None
    units: Sequence[Any] | None = None


def moves_others(order: str) -> PlanError:
    """The error for add-or-remove neighbours in an order in which a unit's absence moves others."""
    return PlanError(
        f"neighbours 'add-or-remove' do not fit {order}: without one unit, a loader would put others into other "
        "batches; use 'zero-out' (its gradients replaced by zero) or 'replace-one'"
    )


Refusals = list[tuple[str, NDArray[np.bool_]]]
"""What a rule says, and which of the units that want to come break it, clause by clause."""


class Participation(ABC):
    """A set of allowed patterns; a pattern is the sorted tuple of the steps of one unit.

    Attributes:
        n: number of steps.
        kind: its name in files.
        absence_moves_others: whether, without one unit, others would be in other steps, as where a loader fills
            batches by number. Then neighbours cannot differ by a unit's absence ("add-or-remove").
        words: that ask for it.
        cycle_is_chosen: whether a cycle that is not given is chosen for the claim, where the mechanism is "auto".
        device_can_keep: whether a device that knows its own past alone, how often it took part and how long ago, can
            hold itself to it.
    """

    n: int
    kind: ClassVar[str]
    absence_moves_others: ClassVar[bool] = True
    words: ClassVar[tuple[Word, ...]] = ()
    cycle_is_chosen: ClassVar[bool] = False
    device_can_keep: ClassVar[bool] = False

    @property
    @abstractmethod
    def pattern(self) -> Pattern:
        """The family that holds every set of steps that a unit may take; claims are proven for it."""

    @abstractmethod
    def covers(self, actual: "Participation") -> bool:
        """Whether the patterns of `actual`, within the planned steps, are known to be among those of this one."""

    @abstractmethod
    def describe(self) -> str:
        """One phrase for people."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `read` makes an equal participation; "kind" is its name."""

    @classmethod
    @abstractmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """From what `to_dict` wrote, without its kind."""

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What somebody who trains must be able to do for it."""

    @classmethod
    def asked(cls, asked: Asked) -> "Participation":
        """The order that one of `words` asks for at these sizes. Raises: ArgumentError."""
        raise ArgumentError(f"order must be one in words, and {cls.__name__} has none")

    @classmethod
    def recognise(cls, facts: LoaderFacts) -> "Participation | None":
        """The order of this kind that a loader has, if its samplers say so. At most one kind does for any facts."""
        del facts
        return None

    def check_neighbours(self, neighbours: str) -> None:
        """Refuse a relation of neighbours that the order is not accounted for. Raises: PlanError."""
        if neighbours == "add-or-remove" and self.absence_moves_others:
            raise moves_others(type(self).__name__)

    def without_draws(self) -> "Participation":
        """The order of the same steps without secret draws, which a mechanism may be fitted for; others: themselves."""
        return self

    @property
    def draw_probability(self) -> float | None:
        """The probability of the secret draw that alone decides whether a unit is in a step; None for other orders."""
        return None

    @property
    def secret(self) -> bool:
        """Whether its steps are drawn in secret, from which its privacy comes."""
        return False

    @property
    def max_participations(self) -> int:
        """The largest number of steps of one unit."""
        return self.pattern.max_participations

    @property
    def min_separation(self) -> int:
        """The smallest distance between two steps of one unit that the rule allows; n if there is only one step."""
        return self.pattern.min_separation

    def patterns(self) -> Iterator[tuple[int, ...]]:
        """Every maximal allowed pattern; exponentially many for some rules: for tests and small n."""
        return self.pattern.enumerate()


class Rule(Participation):
    """A participation that names no units: who may come follows from a unit's last step and its number of steps.

    Subclasses are frozen dataclasses; files hold their fields.
    """

    @abstractmethod
    def refusals(self, t: int, last: Integers, count: Integers) -> Refusals:
        """Return which units may not be in step t; those that no clause names may, whatever other units do.

        What is let through, step by step, must be within `pattern`: the claim rests on it.

        Args:
            t: the step.
            last: (m,) the last step of each unit that wants to come; -1 for never.
            count: (m,) its number of steps so far.
        """

    def to_dict(self) -> dict[str, Any]:
        """{"kind": .., and the fields}."""
        return {"kind": self.kind} | {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """Make the rule from its fields."""
        return cls(**data)


# ----------------------------------------------------------------------------------------------------
# The closed set of orders. `anyorder.participation.registry` lists them once, as it is imported; rooms that stand above
# it ask here whether what they are given is one of them, by its exact type.


_ORDERS: dict[str, type[Participation]] = {}


def close(orders: tuple[type[Participation], ...]) -> None:
    """Say which orders there are: `anyorder.participation.registry` does, and nobody else. Raises: a second time."""
    if _ORDERS:
        raise AssertionError("the set of orders is closed: add a row to anyorder.participation.registry")
    _ORDERS.update({order.kind: order for order in orders})


def check_order(participation: object) -> None:
    """Raise PlanError unless it is one of the registered orders itself: the set that all claims are proven for."""
    if type(participation) not in _ORDERS.values():
        raise PlanError(
            f"the order must be one of {', '.join(order.__name__ for order in _ORDERS.values())}, got "
            f"{type(participation).__name__}: claims are proven for these alone; name the units of every step with "
            "KnownOrder"
        )


def from_dict(data: dict[str, Any]) -> Participation:
    """The participation that `Participation.to_dict` described."""
    order = _ORDERS[checks.choice("participation kind", data.get("kind", ""), _ORDERS)]
    return order.read({key: value for key, value in data.items() if key != "kind"})
