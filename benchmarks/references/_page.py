"""docs/references.md: counts, what differs and why, then all values."""

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

# Reference values, theirs and ours

Written by `python -m benchmarks.factorize --only references`. Every value that other projects, papers and independent
computations give for what this package computes, and what it computes itself: nothing is copied from them but the
setting (and, where the line says so, the parameters of their C). Differences are relative; of an array the largest one
over its largest entry.

- *equal*: to 1e-6, or to the digits or the tolerance that theirs is given with.
- *lower*: an error that both minimise, or an upper bound: ours is lower, from a C of our own or an exact formula.
- *within*: theirs is a limit, and ours is below.
- *explained*: they differ by convention; computed in their convention, ours is theirs. The number follows.
- *side*: not compared: it depends on where in a flat valley an optimiser stops, or on its inner matters.
- *not computed*: the package has no such thing.
- *open*: ours is higher, or no reason is known.

The numbers in brackets refer to the reasons. Left out: run times, and parameters of theirs that are input to ours.
"""


def page(found: dict[str, list[Value]], about: dict[str, str]) -> str:
    """The page, from the values of every source."""
    every = [value for values in found.values() for value in values]
    reasons = list(dict.fromkeys(v.reason for v in every if _has_reason(v)))
    numbers = {reason: i for i, reason in enumerate(reasons, start=1)}
    parts = [HEAD, _summary(found), _open(every), "## Reasons\n", _reasons(every, numbers)]
    for title, values in found.items():
        parts += [f"\n## {title}\n\n{about[title]}\n", _table(values, numbers)]
    return "\n".join(parts) + "\n"


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
    lines += [f"| {_name(v)} | {_number(v.theirs)} | {_number(v.ours)} | {_gap(v)} | {v.above} |" for v in left]
    return "\n".join([*lines, ""])


def _reasons(every: list[Value], numbers: dict[str, int]) -> str:
    counts = Counter((v.reason, v.verdict) for v in every if _has_reason(v))
    lines = []
    for reason, number in numbers.items():
        of = ", ".join(f"{counts[reason, verdict]} {verdict}" for verdict in VERDICTS if counts[reason, verdict])
        lines.append(f"{number}. {reason[0].upper()}{reason[1:]}. ({of})")
    return "\n".join(lines)


def _table(values: list[Value], numbers: dict[str, int]) -> str:
    lines = ["| value | theirs | ours | difference | verdict |", "|---|---|---|---|---|"]
    for value in values:
        verdict = value.verdict
        if _has_reason(value):
            verdict += f" ({numbers[value.reason]})"
        if value.verdict == "explained":
            verdict += f": {_number(value.variant)}"
        ours = "" if value.ours is None else _number(value.ours)
        lines.append(f"| {_name(value)} | {_number(value.theirs)} | {ours} | {_gap(value)} | {verdict} |")
    return "\n".join(lines)


def _has_reason(value: Value) -> bool:
    return bool(value.reason) and value.verdict not in ("equal", "open")


def _name(value: Value) -> str:
    name = f"{value.id}: {value.what}" if value.what else value.id
    return f"`{name.replace('|', '/')}`"


def _gap(value: Value) -> str:
    if value.difference is None:
        return ""
    return f"{value.difference:+.1e}" if value.difference else "0"


def _number(number: Any) -> str:
    if number is None:
        return ""
    if isinstance(number, str):
        return _escaped(number if len(number) <= 60 else number[:57] + "...")
    if isinstance(number, (int, float, np.number)):
        return f"{number:.8g}"
    array = np.asarray(number)
    if array.size <= 3 and array.dtype.kind in "if":
        return ", ".join(f"{x:.8g}" for x in array.ravel())
    return f"{array.size} numbers"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("_", "\\_").replace("*", "\\*").replace("<", "&lt;")
