"""One reference value beside ours, and the verdict."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from anyorder.patterns import Participation
from anyorder.strategy import Strategy, registry
from anyorder.strategy.registry import sensitivity
from anyorder.workload import Workload

Number = float | str | Sequence[Any] | np.ndarray
SAME = 1e-6


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of a reference file and ours.

    Attributes:
        id: the entry of the file.
        what: which number of the entry; "" for the only one.
        theirs: a number, or an array.
        ours: computed here; None where the package computes no such thing.
        rule: "same": both are the same quantity. "least": an error that both sides minimise, or an upper bound of the
            same quantity: less is better. "limit", "floor": what ours must not exceed, must not be below. "side":
            depends on where in a flat valley an optimiser stops, or on its inner matters; no verdict.
        tolerance: relative, to which they count as equal.
        reason: why they differ, or why nothing is computed.
        variant: theirs, computed by us in their convention: shows the reason.
        above: why ours is higher, where it is.
    """

    id: str
    what: str
    theirs: Number
    ours: Number | None
    rule: str = "same"
    tolerance: float = SAME
    reason: str = ""
    variant: Number | None = None
    above: str = ""

    @property
    def difference(self) -> float | None:
        """Relative; for arrays the largest difference over the largest entry."""
        return None if self.ours is None else _difference(self.ours, self.theirs)

    @property
    def verdict(self) -> str:
        """Equal, within (a limit), lower, explained (the variant is theirs), side, not computed; else "open"."""
        if self.ours is None:
            return "not computed"
        gap = _difference(self.ours, self.theirs)
        if abs(gap) <= self.tolerance:
            return "equal"
        if self.rule == "side":
            return "side"
        if (self.rule == "limit" and gap < 0) or (self.rule == "floor" and gap > 0):
            return "within"
        if self.variant is not None:
            return "explained" if abs(_difference(self.variant, self.theirs)) <= self.tolerance else "open"
        return "lower" if self.rule == "least" and gap < 0 else "open"


def _difference(ours: Number, theirs: Number) -> float:
    mine, other = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    if mine.shape != other.shape:
        return float("inf")
    if mine.ndim == 0:
        gap = float(mine - other)
        return gap / abs(float(other)) if other else gap
    return float(np.abs(mine - other).max() / (np.abs(other).max() or 1.0))


class Rule(NamedTuple):
    """How the values of the ids that match a pattern are computed; `slow` ones take seconds."""

    pattern: str
    compute: Callable[..., Iterable[Value]]
    slow: bool = False


def apply(rules: Sequence[Rule], entry: dict[str, Any], *, slow: bool) -> Iterator[Value]:
    """The values of one entry, by the first rule whose pattern its whole id matches.

    Raises: LookupError for an id that no rule knows.
    """
    for rule in rules:
        if match := re.fullmatch(rule.pattern, entry["id"]):
            if slow or not rule.slow:
                yield from rule.compute(entry, *(_parsed(group) for group in match.groups()))
            return
    raise LookupError(f"no computation for the reference {entry['id']!r}: add a rule, or the reason why there is none")


def _parsed(text: str | None) -> int | str | None:
    if text is None or text == "None":
        return None
    return int(text) if text.isdigit() else text


LOCAL = "a local optimum: one buffer is added after the other, and other starts lead lower"


def skip(reason: str) -> Callable[..., Iterator[Value]]:
    """A rule for what the package does not compute."""

    def compute(entry: dict[str, Any], *_: Any) -> Iterator[Value]:
        for what, value in _leaves(entry.get("value"), ""):
            yield Value(entry["id"], what, value, None, reason=reason)

    return compute


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for key, part in value.items():
        yield from _leaves(part, f"{path}, {key}" if path else str(key))


def statistics(strategy: Strategy, workload: Workload, participation: Participation) -> dict[str, float]:
    """Errors without and with the sensitivity, squared (`*_error`, `loss_*`) and root scale."""
    variances = registry.row_variances(strategy, workload)
    sens = sensitivity(strategy, participation).value
    mean, largest = float(variances.mean()), float(variances.max())
    return {
        "sensitivity": sens, "mean_error": mean, "max_error": largest, "last_error": float(variances[-1]),
        "loss_mean": sens**2 * mean, "loss_max": sens**2 * largest,
        "rmse": sens * mean**0.5, "max_rmse": sens * largest**0.5,
    }  # fmt: skip


def compare(
    name: str, theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "", rules: dict[str, str] | None = None,
    reason: str = "",
) -> Iterator[Value]:  # fmt: skip
    """The values of one dictionary beside those of another; `rules` by key, "same" if it names none at all."""
    for key, value in theirs.items():
        if key in ours:
            rule = "same" if rules is None else rules.get(key, "side")
            yield Value(name, f"{prefix}{key}", value, ours[key], rule, reason="" if rule == "side" else reason)
