"""The settings that a search draws from: lists of values and ranges, or a list of whole settings; public, all of it."""

import inspect
import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder._closed import final
from anyorder.errors import ArgumentError
from anyorder.planner import plan

__all__ = ["PLAN_NAMES", "Range", "Space", "plan_settings", "read_space", "uniforms"]

Settings = dict[str, Any]

PLAN_NAMES = frozenset(inspect.signature(plan).parameters)
"""Settings of these names go into the plan of a run."""

_OF_THE_SEARCH = {"epsilon", "delta", "noise_multiplier", "sigma"}  # the noise of a run follows from the whole search
_OF_ALL = {"unit", "neighbours"}  # a claim is about one of each
_MOST = 100_000  # settings of a list, or plans
_MOST_NAMES = 64


@final
@dataclass(frozen=True)
class Range:
    """Numbers from low to high, of which a setting is drawn evenly, or evenly in its logarithm."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        low, high = _check.real("low", self.low), _check.real("high", self.high)
        if not low < high or not math.isfinite(high - low) or type(self.log) is not bool or (self.log and low <= 0):
            raise ArgumentError(
                f"a range must have low < high, and low above 0 where it is drawn by the logarithm (log is true or "
                f"false), got low={self.low!r}, high={self.high!r}, log={self.log!r}"
            )
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    def at(self, u: float) -> float:
        """The number at the share u of the way."""
        if self.log:
            between = math.exp(math.log(self.low) + u * (math.log(self.high) - math.log(self.low)))
            return min(max(between, self.low), self.high)
        return min(max(self.low + u * (self.high - self.low), self.low), self.high)


@final
@dataclass(frozen=True)
class Space:
    """What `read_space` made.

    Attributes:
        listed: whole settings; empty where `axes` say them.
        axes: name -> its values, or their range.
    """

    listed: tuple[Settings, ...]
    axes: dict[str, list[Any] | Range]

    @property
    def size(self) -> int | None:
        """How many settings there are; None where a range is among them."""
        if self.listed:
            return len(self.listed)
        sizes = [None if type(axis) is Range else len(axis) for axis in self.axes.values()]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    @property
    def width(self) -> int:
        """Uniform numbers that a draw takes."""
        return 1 if self.listed else len(self.axes)

    def draw(self, shares: NDArray[np.float64]) -> Settings:
        """The settings of (width,) numbers in (0, 1): each listed one, each value, as likely as another.

        A copy to its last list, as `at` gives: what one run does to its settings, no other run and no certificate has.
        """
        if self.listed:
            return deepcopy(self.listed[_place(shares[0], len(self.listed))])
        return {
            name: axis.at(float(u)) if isinstance(axis, Range) else deepcopy(axis[_place(u, len(axis))])
            for (name, axis), u in zip(self.axes.items(), shares, strict=True)
        }

    def at(self, i: int) -> Settings:
        """The i-th of all settings, where there is no range."""
        if self.listed:
            return deepcopy(self.listed[i])
        settings = {}
        for name, axis in reversed(self.axes.items()):
            assert isinstance(axis, list)
            i, place = divmod(i, len(axis))
            settings[name] = deepcopy(axis[place])
        return dict(reversed(settings.items()))

    def plans(self) -> Iterable[Settings]:
        """The keywords of all the plans that a run may have, some of them more than once. No range is among them."""
        if self.listed:
            return (plan_settings(one) for one in self.listed)
        axes = {name: axis for name, axis in self.axes.items() if name in PLAN_NAMES}
        return (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, for a digest."""
        axes = {
            name: {"low": axis.low, "high": axis.high, "log": axis.log} if isinstance(axis, Range) else axis
            for name, axis in self.axes.items()
        }
        return {"listed": list(self.listed), "axes": axes}


def read_space(given: Any) -> Space:
    """The space of an argument, or of a file.

    Args:
        given: {name: list of values, or (low, high), or (low, high, "log"), or {"low": .., "high": .., "log": ..}}; or
            a list of whole settings, {name: value} each. Values are JSON's: numbers, texts, booleans, None, lists.
    Raises: ArgumentError.
    """
    if isinstance(given, Mapping):
        if not 1 <= len(given) <= _MOST_NAMES:
            raise ArgumentError(f"space must name 1 to {_MOST_NAMES} settings, got {len(given)}")
        space = Space((), {_name(name): _axis(name, axis) for name, axis in given.items()})
        count = math.prod(
            len(axis) for name, axis in space.axes.items() if isinstance(axis, list) and name in PLAN_NAMES
        )
        if count > _MOST:
            raise ArgumentError(f"space must not have more than {_MOST} plans, got {count}: give fewer values")
        return space
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(one, Mapping) for one in given):
        raise ArgumentError(
            f"space must be names with their values, {{name: [..]}}, or a list of settings, [{{name: value}}, ..], "
            f"got {type(given).__name__}"
        )
    if len(given) > _MOST:
        raise ArgumentError(f"space must not list more than {_MOST} settings, got {len(given)}")
    return Space(tuple({_name(name): _value(name, value) for name, value in one.items()} for one in given), {})


def plan_settings(settings: Settings) -> Settings:
    """Those of the settings that are keywords of `anyorder.plan`."""
    return {name: value for name, value in settings.items() if name in PLAN_NAMES}


def uniforms(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """(k,) numbers strictly between 0 and 1, evenly spread, from (2 k,) words."""
    whole = words.astype(np.uint64)
    return np.asarray((((whole[::2] << np.uint64(32) | whole[1::2]) >> np.uint64(12)) + 0.5) * 2.0**-52, np.float64)


def _place(share: float, count: int) -> int:
    return min(int(share * count), count - 1)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or len(name) > 60:
        raise ArgumentError(f"a setting's name must be one of Python's, ASCII, up to 60 letters, got {name!r:.70}")
    if name in _OF_THE_SEARCH:
        raise ArgumentError(
            f"space must not have {name!r}: epsilon and delta are of the whole search, and each run has the noise that "
            "keeps them"
        )
    if name in _OF_ALL:
        raise ArgumentError(f"space must not have {name!r}, which must be the same in all runs: give it in plan=")
    return name


def _axis(name: str, given: Any) -> list[Any] | Range:
    if isinstance(given, Range):
        axis: list[Any] | Range = given
    elif isinstance(given, Mapping):
        if not {"low", "high"} <= given.keys() <= {"low", "high", "log"}:
            raise ArgumentError(f"space[{name!r}] must be a list, or low, high and maybe log, got {sorted(given)!r}")
        axis = Range(given["low"], given["high"], given.get("log", False))
    elif isinstance(given, tuple):
        if len(given) not in (2, 3) or (len(given) == 3 and given[2] != "log"):
            raise ArgumentError(
                f"space[{name!r}] must be (low, high) or (low, high, 'log') where it is a tuple; values are a list, "
                f"got {given!r}"
            )
        axis = Range(given[0], given[1], len(given) == 3)
    elif isinstance(given, list) and given:
        axis = [_value(name, value) for value in given]
        if len(axis) > _MOST:
            raise ArgumentError(f"space[{name!r}] must not have more than {_MOST} values, got {len(axis)}")
    else:
        raise ArgumentError(f"space[{name!r}] must be a list of values, or a range (low, high), got {given!r:.70}")
    if isinstance(axis, Range) and name in PLAN_NAMES:
        raise ArgumentError(
            f"space[{name!r}] must be a list of values: all plans are made before the first run, got a range"
        )
    return axis


def _value(name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    parts = value if isinstance(value, (list, tuple)) else [value]
    for part in parts:
        if type(part) not in (bool, int, float, str, type(None)) or (type(part) is float and not math.isfinite(part)):
            raise ArgumentError(
                f"values of {name!r} must be finite numbers, texts, booleans, None, or lists of those; whatever else a "
                f"run needs is looked up by them, got {type(part).__name__}"
            )
    return list(parts) if isinstance(value, (list, tuple)) else value
