"""The verdict of `anyorder check` for others to see: a page, a badge, a summary and JSON, with nothing of the data.

What is written are the settings of the training, how many steps were seen and what follows; never a batch, an example,
a loss or a path of the machine.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anyorder import __version__
from anyorder.accounting.risk import point_tpr
from anyorder.app.charts import Html, document, join, tag
from anyorder.app.exits import ExitCode
from anyorder.app.form import Level, level_of
from anyorder.audit.loader_check import CLAIM, NOTHING, UNSURE, WHAT_IF
from anyorder.formats import printable
from anyorder.formatting import rounded_up

HOLDS, FAILS, STOPPED = "the claim holds", "the claim does not hold", "the script failed"
EXIT_CODES = {
    HOLDS: ExitCode.OK, FAILS: ExitCode.FAILED, STOPPED: ExitCode.FAILED, NOTHING: ExitCode.NOT_PRIVATE,
    WHAT_IF: ExitCode.WHAT_IF, UNSURE: ExitCode.NOT_ESTABLISHED,
}  # fmt: skip
_FILES = ("verdict.json", "verdict.html", "verdict.md", "badge.svg")
_MEANS = {
    HOLDS: "The training clipped and added noise in every step, and its order supports the epsilon that it claims.",
    FAILS: "The training claims an epsilon, and what was seen of it does not support that number.",
    STOPPED: "The script ended with an error. What was found speaks of the steps before, and certifies nothing.",
    NOTHING: "No training was seen that clips each example's gradient and adds noise. Its epsilon is infinite.",
    UNSURE: "The training claims an epsilon. Whether each example was clipped alone, and each step had noise of "
    "its own, could not be established. The claim may be right or wrong.",
    WHAT_IF: "Nobody claims an epsilon here. This is what the order of the data would give if noise were added.",
}
_COLOURS = {
    HOLDS: "#17693f",
    FAILS: "#a3161f",
    STOPPED: "#a3161f",
    NOTHING: "#a3161f",
    WHAT_IF: "#56606e",
    UNSURE: "#8a5a00",
}
_STRENGTHS = {"green": "strong (green)", "amber": "moderate (amber)", "red": "weak (red), and protects few people"}
_BANNERS = {"green": "banner good", "amber": "banner mid", "red": "banner bad"}
_BADGES = {"green": _COLOURS[HOLDS], "amber": _COLOURS[UNSURE], "red": _COLOURS[FAILS]}
_UNSEEN = (
    "that the data set gives one person's data under one index only",
    "that the random numbers of torch and of the operating system cannot be predicted",
    "what the script prints or saves of the data itself, or learns without an optimizer of torch",
    "the next run: another one may use another order, other settings or other code",
)


def outcome_of(findings: Sequence[dict[str, Any]], code: int) -> str:
    """One of the outcomes: the worst of all data sets.

    Args:
        code: exit code of the script.
    """
    claims = [one for one in findings if one["outcome"] == CLAIM]
    if code != 0:
        return STOPPED
    if any(one["holds"] is not True for one in claims):
        return FAILS
    if not findings or any(one["outcome"] == NOTHING for one in findings):
        return NOTHING
    if any(one["outcome"] == UNSURE for one in findings):
        return UNSURE
    return HOLDS if len(claims) == len(findings) else WHAT_IF


def promise_of(finding: dict[str, Any]) -> tuple[Level, str] | None:
    """The colour of a claim that holds, which is that of the report, and a sentence; None where no claim holds."""
    if finding["outcome"] != CLAIM or finding["holds"] is not True:
        return None
    level = level_of(finding["true"], finding["delta"])
    return level, f"{_STRENGTHS[level]}: epsilon = {rounded_up(finding['true'])} at this delta"


def clear_verdict(folder: Path) -> None:
    """Make the folder, and remove the verdict of an earlier run, which must not stand if this one breaks off."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)


def save_verdict(
    folder: Path, target: str, code: int, findings: Sequence[dict[str, Any]], facts: Sequence[list[tuple[str, str]]]
) -> None:
    """Write verdict.html, verdict.json, verdict.md and badge.svg into a folder.

    Args:
        target: the script, or module:function; of a path only the last part is shown.
        code: exit code of the script.
        findings: in JSON values, one for each data set.
        facts: of each finding, (name, text).
    """
    name, outcome = Path(target).name, outcome_of(findings, code)
    told = {"target": name, "exit_code": code, "outcome": outcome, "findings": list(findings), "version": __version__}
    texts = (
        json.dumps(told, allow_nan=False, indent=1) + "\n",
        _page(name, outcome, findings, facts),
        _summary(name, outcome, facts),
        _badge(_short(outcome, findings), _BADGES[_worst(findings)] if outcome == HOLDS else _COLOURS[outcome]),
    )
    for file, text in zip(_FILES, texts, strict=True):
        (folder / file).write_text(text, encoding="utf-8")


def _short(outcome: str, findings: Sequence[dict[str, Any]]) -> str:
    """The badge's words."""
    if outcome == HOLDS:
        return f"epsilon {rounded_up(max(one['claimed'] for one in findings))} holds"
    return {
        FAILS: "epsilon does not hold",
        STOPPED: "script failed",
        NOTHING: "not private",
        WHAT_IF: "no claim",
        UNSURE: "not established",
    }[outcome]


def _worst(findings: Sequence[dict[str, Any]]) -> Level:
    """The mark of the largest epsilon."""
    worst = max(findings, key=lambda one: one["true"])
    return level_of(worst["true"], worst["delta"])


def _page(name: str, outcome: str, findings: Sequence[dict[str, Any]], facts: Sequence[list[tuple[str, str]]]) -> str:
    kind = {WHAT_IF: "banner soft", UNSURE: "banner soft"}.get(outcome, "banner bad")
    kind = _BANNERS[_worst(findings)] if outcome == HOLDS else kind
    parts = [tag("h1", f"Is {name} private?")]
    parts.append(tag("div", tag("p", tag("strong", outcome)), tag("p", _MEANS[outcome]), class_=kind))
    if outcome == HOLDS:
        worst = max(findings, key=lambda one: one["true"])
        found = point_tpr(worst["true"], worst["delta"], 0.01)
        parts.append(
            tag(
                "p",
                "What this means: the strongest attacker, who may accuse one innocent person in a hundred, finds out "
                f"at most {math.ceil(1000 * found) / 10:g} % of those whose data was used.",
            )
        )
    for i, rows in enumerate(facts, start=1):
        pairs = [join(tag("dt", key), tag("dd", text)) for key, text in rows]
        parts += [tag("h2", "What was found" if len(facts) == 1 else f"Data set {i}"), tag("dl", *pairs)]
    parts += [tag("h2", "What was not checked"), tag("ul", *(tag("li", text) for text in _UNSEEN))]
    parts.append(tag("p", f"anyorder {__version__}, anyorder check", class_="soft small"))
    return document(f"{name}: {outcome}", *parts)


def _summary(name: str, outcome: str, facts: Sequence[list[tuple[str, str]]]) -> str:
    lines = [f"### {_plain(name)}: {outcome}", "", _MEANS[outcome]]
    for rows in facts:
        lines += ["", "| | |", "|---|---|", *(f"| {_plain(key)} | {_plain(text)} |" for key, text in rows)]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>|#" else c for c in printable(text))


def _badge(text: str, colour: str) -> str:
    """A badge of two parts, 20 pixels high."""
    left, wide = 62, 7 * len(text) + 12
    words = [
        tag("text", "anyorder", x=left / 2, y=14), tag("text", text, x=left + wide / 2, y=14),
    ]  # fmt: skip
    drawn = [
        tag("title", f"anyorder check: {text}"),
        tag("rect", width=left, height=20, fill="#444c56"),
        tag("rect", x=left, width=wide, height=20, fill=colour),
        tag("g", *words, fill="#fff", text_anchor="middle", font_family="Verdana,sans-serif", font_size=11),
    ]
    svg = tag("svg", *drawn, xmlns="http://www.w3.org/2000/svg", width=left + wide, height=20, role="img")
    return Html(f"{svg}\n")
