"""docs/references.md: counts, and what differs and why; benchmarks/results/references.csv: all values."""

import csv
import io
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.references._value import Value

VERDICTS = ("equal", "lower", "within", "explained", "side", "not computed", "open")

HEAD = """\
---
search:
  exclude: true
---

# Reference values

*For readers who ask whether the numbers are right.* Other projects, papers and independent computations publish values
of what this package computes. We computed each of them, and copied nothing from them but the setting (and, where a line
says so, the parameters of their matrix C). `python -m benchmarks.factorize --only references` writes this page. All
values are in `benchmarks/results/references.csv`. Differences are relative. For an array it is the largest difference
over the largest entry.

- *equal*: to 1e-6, or to the digits or the tolerance of the published value.
- *lower*: an error that both minimise, or an upper bound. Ours is lower, from a matrix of our own or an exact formula.
- *within*: theirs is a limit, and ours is below it.
- *explained*: they differ by convention. Computed in their convention, ours equals theirs.
- *side*: not compared. The value depends on where in a flat valley an optimiser stops, or on its inner workings.
- *not computed*: the package does not compute it.
- *open*: ours is higher, or no reason is known.

The CSV names the reasons by their numbers. It leaves out run times, and parameters of theirs that are our input.
"""


def page(found: dict[str, list[Value]]) -> str:
    """The page, from the values of every source."""
    every, numbers = _numbered(found)
    return "\n".join([HEAD, _summary(found), _open(every), "## Reasons\n", _reasons(every, numbers)]) + "\n"


def data(found: dict[str, list[Value]]) -> str:
    """Every value as a line of CSV."""
    _, numbers = _numbered(found)
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["source", "value", "theirs", "ours", "difference", "verdict"])
    for title, values in found.items():
        lines.writerows([title, *_cells(value, numbers)] for value in values)
    return text.getvalue()


def _numbered(found: dict[str, list[Value]]) -> tuple[list[Value], dict[str, int]]:
    every = [value for values in found.values() for value in values]
    reasons = dict.fromkeys(v.reason for v in every if _has_reason(v))
    return every, {reason: i for i, reason in enumerate(reasons, start=1)}


def _summary(found: dict[str, list[Value]]) -> str:
    lines = [f"| source | values | {' | '.join(VERDICTS)} |", "|---" * (len(VERDICTS) + 2) + "|"]
    total: Counter[str] = Counter()
    for title, values in found.items():
        counts = Counter(value.verdict for value in values)
        total += counts
        lines.append(_counts(title, counts))
    return "\n".join([*lines, _counts("all", total), ""])


def _counts(title: str, counts: Counter[str]) -> str:
    return f"| {title} | {counts.total()} | {' | '.join(str(counts[v] or '') for v in VERDICTS)} |"


def _open(every: list[Value]) -> str:
    left = [value for value in every if value.verdict == "open"]
    if not left:
        return "## Open\n\nNone.\n"
    lines = ["## Open\n", "| value | theirs | ours | difference | reason |", "|---|---|---|---|---|"]
    lines += [f"| `{_name(v)}` | {_number(v.theirs)} | {_number(v.ours)} | {_gap(v)} | {v.above} |" for v in left]
    return "\n".join([*lines, ""])


def _reasons(every: list[Value], numbers: dict[str, int]) -> str:
    counts = Counter((v.reason, v.verdict) for v in every if _has_reason(v))
    lines = []
    for reason, number in numbers.items():
        of = ", ".join(f"{counts[reason, verdict]} {verdict}" for verdict in VERDICTS if counts[reason, verdict])
        lines.append(f"{number}. {reason[0].upper()}{reason[1:]}. ({of})")
    return "\n".join(lines)


def _cells(value: Value, numbers: dict[str, int]) -> tuple[str, ...]:
    verdict = value.verdict + (f" ({numbers[value.reason]})" if _has_reason(value) else "")
    if value.verdict == "explained":
        verdict += f": {_number(value.variant)}"
    ours = "" if value.ours is None else _number(value.ours)
    return _name(value), _number(value.theirs), ours, _gap(value), verdict


def _has_reason(value: Value) -> bool:
    return bool(value.reason) and value.verdict not in ("equal", "open")


def _name(value: Value) -> str:
    name = f"{value.id}: {value.what}" if value.what else value.id
    return name.replace("|", "/")


def _gap(value: Value) -> str:
    if value.difference is None:
        return ""
    return f"{value.difference:+.1e}" if value.difference else "0"


def _number(number: Any) -> str:
    if number is None:
        return ""
    if isinstance(number, str):
        return number if len(number) <= 60 else number[:57] + "..."
    if isinstance(number, (int, float, np.number)):
        return f"{number:.8g}"
    array = np.asarray(number)
    if array.size <= 3 and array.dtype.kind in "if":
        return ", ".join(f"{x:.8g}" for x in array.ravel())
    return f"{array.size} numbers"
