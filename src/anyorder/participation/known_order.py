"""An order that names its units, and the same order without their names."""

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.checks import SetOnce, final, frozen
from anyorder.errors import ArgumentError
from anyorder.formatting import counted
from anyorder.participation.packing import packed, unpacked
from anyorder.patterns import Listed, LoaderFacts, Needs, Participation, Refusals

Integers = NDArray[np.int64]

Names = list[int] | list[str]


@final
class KnownOrder(SetOnce, Participation):
    """An order that is known in full beforehand: which units are in which step.

    The order must not depend on the data. Every unit then has its own sensitivity; the plan's is the largest. Its
    pattern is the list of what is planned, `Listed`, itself. The absence of a unit moves no other.

    Args:
        order: for each step the ids of its units (integers or strings; an id twice in a step counts once).

    Attributes:
        units: (U,) sorted distinct ids.
        steps, indices: (M,) one participation each, sorted by unit, then step; `indices` point into `units`.
    """

    kind = "known_order"
    absence_moves_others = False

    def __init__(self, order: Sequence[Iterable[Hashable] | Hashable]) -> None:
        rows = [_ids(step) for step in order]
        n = checks.integer("number of steps in order", len(rows), low=1)
        kinds = {row.dtype.kind for row in rows if len(row)}
        if not kinds:
            raise ArgumentError("order must name at least one unit, got only empty steps")
        if len(kinds) > 1:
            raise ArgumentError("units in order must be all integers or all strings, got both")
        self._fill(n, np.concatenate([row for row in rows if len(row)]), np.repeat(np.arange(n), [*map(len, rows)]))

    def _fill(self, n: int, ids: NDArray[Any], steps: Integers) -> None:
        """From one id and one step for each participation, sorted by step; those that come twice count once."""
        self.n = n
        by_unit = np.argsort(ids, kind="stable")
        ids, steps = ids[by_unit], steps[by_unit]
        new = np.append(True, ids[1:] != ids[:-1])
        once = new | np.append(True, steps[1:] != steps[:-1])
        self.units: NDArray[Any] = frozen(ids[new])
        self._listed = Listed.of(n, steps[once].astype(np.int64), (np.cumsum(new) - 1)[once])
        self.steps, self.indices = self._listed.steps, self._listed.indices

    @property
    def pattern(self) -> Listed:
        """The steps of each unit, in the order of `units`."""
        return self._listed

    def covers(self, actual: Participation) -> bool:
        """True: it covers whatever the ledger lets pass, unit by unit and step by step, so that is not judged here."""
        return True

    def strangers(self, t: int, units: Integers | list[str]) -> Refusals:
        """Return which of the distinct units are not planned for step t. One that is planned may stay away."""
        indices, bounds = self._by_step
        planned = set(self.units[indices[bounds[t] : bounds[t + 1]]].tolist())
        named = units if isinstance(units, list) else units.tolist()
        strange = np.array([unit not in planned for unit in named], np.bool_)
        rule = "a step takes the units that were planned for it, and no others"
        if np.array_equal(self.units, np.arange(len(self.units))):  # as `without_names` leaves them
            rule += " (a plan read from a file has numbers in place of its units' names: make it anew from the loader)"
        return [(rule, strange)]

    @cached_property
    def _by_step(self) -> tuple[Integers, Integers]:
        """(M,) units sorted by step, and (n + 1,) where each step begins among them."""
        by_step = np.argsort(self.steps, kind="stable")
        bounds = np.searchsorted(self.steps[by_step], np.arange(self.n + 1))
        return frozen(self.indices[by_step]), frozen(bounds)

    def to_dict(self) -> dict[str, Any]:
        """The order, compressed: steps and indices as deltas, zlib, base64."""
        units = packed(self.units) if self.units.dtype.kind == "i" else self.units.tolist()
        return {
            "kind": self.kind, "n": self.n, "units": units,
            "indices": packed(self.indices), "steps": packed(self.steps),
        }  # fmt: skip

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """Read the compressed order."""
        n = checks.integer("n", data["n"], low=1)
        steps, indices = unpacked(data["steps"]), unpacked(data["indices"])
        units = unpacked(data["units"]) if isinstance(data["units"], str) else _ids(data["units"])
        if len(steps) != len(indices) or not len(steps) or not len(units):
            raise ArgumentError("a known order must have one step and one unit for each of its participations")
        for name, values, size in (("steps", steps, n), ("indices", indices, len(units))):
            if values.min() < 0 or values.max() >= size:
                raise ArgumentError(f"{name} of a known order must lie in 0 .. {size - 1}")
        by_step = np.argsort(steps, kind="stable")
        result = cls.__new__(cls)
        result._fill(n, units[indices[by_step]], steps[by_step])
        return result

    @classmethod
    def recognise(cls, facts: LoaderFacts) -> "KnownOrder | None":
        """The units of each step, where units have names."""
        return None if facts.units is None else cls(facts.units)

    @property
    def needs(self) -> Needs:
        """The order that is needed."""
        return Needs("the order that is known", secrecy=False, batches="as they are")

    def describe(self) -> str:
        """Return a phrase for people."""
        units, steps = counted(len(self.units), "unit"), counted(self.n, "step")
        return f"a known order of {units} over {steps}, at most {counted(self.max_participations, 'time')}"

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is KnownOrder
            and self.n == other.n
            and np.array_equal(self.units, other.units)
            and self.pattern == other.pattern
        )

    def __hash__(self) -> int:
        return hash((self.n, len(self.units), len(self.steps)))

    def __repr__(self) -> str:
        return f"KnownOrder(n={self.n}, units={len(self.units)})"


def one_unit(n: int, steps: Sequence[int]) -> KnownOrder:
    """The order of n steps in which unit 0 is in the given ones, which rise, and nobody else in any."""
    order = KnownOrder.__new__(KnownOrder)
    order._fill(n, np.zeros(len(steps), np.int64), np.array(steps, np.int64))
    return order


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


def _plain(unit: Any) -> Any:
    """The number or the text itself, whatever a subclass says that it is; all else, and True and False, as given."""
    if isinstance(unit, np.integer):
        return np.generic.item(unit)
    if isinstance(unit, int) and not isinstance(unit, bool):
        return int.__int__(unit)
    return checks.name_of_unit(unit) if isinstance(unit, str) else unit


def _ids(step: Any) -> NDArray[Any]:
    """The ids of one step: int64, or text. Python's own types are looked at one by one: True is not the unit 1."""
    if isinstance(step, (str, int, np.integer)):
        step = [step]
    if isinstance(step, np.ndarray) and step.ndim == 1 and step.dtype.kind == "i":
        return step.astype(np.int64)
    ids = [_plain(unit) for unit in step]
    kinds = set(map(type, ids))
    if not kinds <= {int} and kinds != {str}:
        raise ArgumentError(f"units in order must be all integers or all strings, got {sorted(map(str, kinds))}")
    if kinds == {str} and any(str(text).endswith("\0") for text in ids):
        raise ArgumentError(
            "units in order that are strings must not end in a NUL character, which arrays of text leave out; strip "
            "it, if it is padding"
        )
    try:
        return np.array(ids) if kinds == {str} else np.array(ids, dtype=np.int64)
    except OverflowError as problem:
        raise ArgumentError("integer units in order must fit into 64 bits with their sign; use strings") from problem
