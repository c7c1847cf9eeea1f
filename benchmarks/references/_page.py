"""docs/references.md: counts, and what differs and why; benchmarks/results/references.csv: all values."""

import csv
import io
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.references._value import Value

VERDICTS = ("equal", "lower", "within", "explained", "side", "not computed", "open")
MANY = 10
"""Reasons of so many values stand on the page; the CSV has all."""

HEAD = """\
---
search:
  exclude: true
---

# Reference values

*For readers who ask whether the numbers are right.* Other projects, papers and independent computations publish values
of what this package computes. We computed each of them from its setting (and, where a line says so, from the parameters
of their matrix C). `python -m benchmarks.factorize --only references` writes this page, and all values with their
reasons into `benchmarks/results/references.csv`. It leaves out run times, and parameters of theirs that are our input.

| verdict | meaning |
|---|---|
| equal | to 1e-6, or to the digits or the tolerance of the published value |
| lower | an error that both minimise, or an upper bound: ours is lower, from our own matrix or an exact formula |
| within | theirs is a limit, and ours is below it |
| explained | another convention; computed in theirs, ours is equal |
| side | not compared: it depends on where in a flat valley an optimiser stops, or on its inner workings |
| not computed | the package does not compute it |
| open | ours is higher, or no reason is known |

"""


def page(found: dict[str, list[Value]]) -> str:
    """The page, from the values of every source."""
    every = [value for values in found.values() for value in values]
    reasons = f"## Reasons of {MANY} values or more\n"
    return "\n".join([HEAD + _summary(found), _open(every), reasons, _reasons(every)]) + "\n"


def data(found: dict[str, list[Value]]) -> str:
    """Every value as a line of CSV."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["source", "value", "theirs", "ours", "difference", "verdict", "reason"])
    for title, values in found.items():
        lines.writerows([title, *_cells(value)] for value in values)
    return text.getvalue()


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


def _reasons(every: list[Value]) -> str:
    counts = Counter((_reason(v), v.verdict) for v in every if _reason(v))
    return "\n".join(
        f"- {count} {verdict}: {reason}" for (reason, verdict), count in counts.most_common() if count >= MANY
    )


def _cells(value: Value) -> tuple[str, ...]:
    verdict = value.verdict + (f": {_number(value.variant)}" if value.verdict == "explained" else "")
    ours = "" if value.ours is None else _number(value.ours)
    return _name(value), _number(value.theirs), ours, _gap(value), verdict, _reason(value)


def _reason(value: Value) -> str:
    """In a sentence; equal values need none, and that of an open one stands in its table."""
    reason = value.reason if value.verdict not in ("equal", "open") else ""
    return f"{reason[0].upper()}{reason[1:]}." if reason else ""


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
