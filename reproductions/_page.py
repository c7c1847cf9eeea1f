"""docs/papers: how many claims hold, and a page a paper, from what is kept in reproductions/results alone."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from reproductions import _powers
from reproductions._claims import Curves, Kept, Verdict, results

DOCS = Path(__file__).parents[1] / "docs" / "papers"

HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"

INDEX = f"""{HIDDEN}# Papers run again

*For readers of the papers that this package builds on.* We ran their claims again, theorems and experiments.
`python -m reproductions --page` writes these pages from `reproductions/results`, where each claim has its seeds,
machine, time and versions. A verdict is one of:

- *holds*, or *fails*;
- *holds, scaled down*, or *fails, scaled down*: on a smaller task than the paper's;
- *undecided*: seeds, spread and task could not tell. The rule is the same for successes and misses;
- *not tried*, with the reason.

The page of a paper has each claim with the command that runs it again and prints its numbers. What fails and what is
undecided has numbers on the page too. "3 seeds, ± 0.8 points, least 0.5" is the power of an experiment: the number of
seeds, the half width of a 95 % interval, and the least difference that matters. Powers are stated in
`reproductions/powers.toml`, with how far the task is from the paper's.

- † The power was stated, or changed, after the runs that it judges.
- ‡ The command reads runs that are on file. `--fresh` runs them again, except those of another benchmark, whose command
  it prints.
"""

SECTIONS: dict[str, tuple[Verdict, ...]] = {
    "What fails": ("fails", "fails, scaled down"),
    "What is undecided": ("undecided",),
    "What holds, scaled down": ("holds, scaled down",),
    "What holds": ("holds",),
    "What was not tried": ("not tried",),
}


def write(titles: dict[str, str]) -> list[Path]:
    """Write index.md, a page a paper and its plots; returns what was written."""
    DOCS.mkdir(exist_ok=True)
    made = []
    for name, text in pages(titles).items():
        made.append(DOCS / name)
        made[-1].write_text(text)
    for name, curves in plots(titles).items():
        made.append(DOCS / name)
        draw(made[-1], curves)
    return made


def pages(titles: dict[str, str]) -> dict[str, str]:
    """File names and their text."""
    kept = {paper: results(paper) for paper in titles}
    return {"index.md": index(titles, kept)} | {
        f"{paper}.md": page(titles[paper], paper, rows) for paper, rows in kept.items()
    }


def plots(titles: dict[str, str]) -> dict[str, Curves]:
    """File names and their curves."""
    return {
        plot_name(row): row.claim.curves for paper in titles for row in results(paper) if row.claim.curves is not None
    }


def plot_name(row: Kept) -> str:
    """One a figure."""
    return f"{row.claim.paper}_{row.figure}.png"


def index(titles: dict[str, str], kept: dict[str, list[Kept]]) -> str:
    """How many claims of each paper have which verdict."""
    verdicts = get_args(Verdict)
    lines = [f"| paper | {' | '.join(verdicts)} |", "|---" * (len(verdicts) + 1) + "|"]
    for paper, rows in kept.items():
        counts = Counter(row.claim.verdict for row in rows)
        cells = " | ".join(str(counts[verdict] or "") for verdict in verdicts)
        lines.append(f"| [{titles[paper]}]({paper}.md) | {cells} |")
    return "\n".join([INDEX, *lines, ""])


def page(title: str, paper: str, rows: list[Kept]) -> str:
    """One paper: what fails, what is undecided, what holds, and what was not tried; notes, numbers and plots."""
    notes = repeated(row.claim.why for row in rows if row.claim.verdict != "holds")
    numbers = series(rows)
    seeds, least = usual_power(rows)
    usual = (
        f" Where only ± is told, there are {seeds}, and the least difference that matters is {least}." if seeds else ""
    )
    text = [
        f"{HIDDEN}# {title}\n",
        (
            f"`python -m reproductions {paper} COMMAND` runs a claim again, with its command. "
            f"`reproductions/results/{paper}.jsonl` has seeds, time, machine and versions. "
            f"[Verdicts, powers, † and ‡](index.md).{usual}\n"
        ),
    ]
    for heading, verdicts in SECTIONS.items():
        claims = [row for row in rows if row.claim.verdict in verdicts]
        if claims:
            told = [cells(row, notes) for row in claims]
            if heading == "What fails":
                text += [f"## {heading}\n", *table(list(told[0]), [list(one.values()) for one in told]), ""]
            else:
                text += [f"## {heading}\n", *(measured if told[0]["we got"] and told[0]["why"] else listed)(told), ""]
    if notes:
        text += ["## Notes\n", *(f"- **{letter}**: {said}" for said, letter in notes.items()), ""]
    if numbers:
        text += [
            "## Numbers\n",
            *table(["", "they say", "we got"], [[name, *told] for name, told in numbers.items()]),
            "",
        ]
    drawn = [row for row in rows if row.claim.curves is not None]
    if drawn:
        text.append("## Plots\n")
    for row in drawn:
        curves = row.claim.curves
        assert curves is not None
        text.append(f"{row.claim.place}:\n\n![{curves.y} against {curves.x}]({plot_name(row)})\n")
    whole = "\n".join(text)
    return without_usual_power(whole, seeds, least)


def without_usual_power(text: str, seeds: str, least: str) -> str:
    """Of powers that have the page's usual seeds and least difference, the half width alone."""
    power = rf"{seeds}, (± [^,|]+), least {re.escape(least)}(?![.]?\d)"
    return re.sub(power, r"\1", text) if seeds else text


def measured(told: list[dict[str, str]]) -> list[str]:
    """An entry for each place and command, with its claims: what came out here, and the reason of the verdict."""
    entries: dict[str, list[str]] = {}
    last: dict[str, str] = {}
    for one in told:
        place, ours = f"- **{one['where']}** ({one['command']}):", one["we got"]
        ours = "the same as above" if ours == last.get(place) and len(ours) > 40 else ours
        last[place] = one["we got"]
        claims = entries.setdefault(place, [])
        claims.append(f"{sentence(one['claim'])} Here: {ours}. {sentence(one['why'])}")
    lines = []
    for place, claims in entries.items():
        lines += [f"{place} {claims[0]}"] if len(claims) == 1 else [place, *(f"    - {claim}" for claim in claims)]
    return lines


def listed(told: list[dict[str, str]]) -> list[str]:
    """An entry for each place and command, with its claims, and the reasons of what was not tried."""
    entries: dict[tuple[str, str], list[str]] = {}
    for one in told:
        name = (one["where"], "" if one["why"] else f" ({one['command']})")
        entries.setdefault(name, []).extend(said for said in (one["claim"], one["why"]) if said)
    return [
        f"- **{where}**{command}: {' '.join(map(sentence, together(said)))}"
        for (where, command), said in entries.items()
    ]


def sentence(text: str) -> str:
    """With a capital, unless a symbol is first, and a full stop."""
    return f"{text[0].upper() if text[:2].isalpha() else text[0]}{text[1:]}."


def together(claims: list[str]) -> list[str]:
    """Neighbours "a: x" and "a: y" as "a: x; y", and "x: a" and "y: a" as "x; y: a"."""
    made: list[str] = []
    for claim in claims:
        last = made[-1] if made else ""
        if ": " in claim and last.rpartition(": ")[0] == claim.rpartition(": ")[0]:
            made[-1] = f"{last}; {claim.rpartition(': ')[2]}"
        elif ": " in claim and last.partition(": ")[2] == claim.partition(": ")[2]:
            made[-1] = f"{last.partition(': ')[0]}; {claim}"
        else:
            made.append(claim)
    return made


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


_SERIES = re.compile(r"(?:^|; )(\w+, \w+): ((?:\d+: [^;,]+, )+\d+: [^;,]+)(?=;|$)")


def series(rows: list[Kept]) -> dict[str, list[str]]:
    """Series such as "mnist, silo: 4: 94.5, 16: 94.6" in cells of several claims, joined: theirs and ours, by name."""
    numbers: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        for place, cell in enumerate((row.claim.theirs, row.claim.ours)):
            for name, values in _SERIES.findall(cell):
                told = numbers.setdefault(name, [{}, {}])
                told[place] |= dict(value.split(": ") for value in values.split(", "))
    return {
        name: [", ".join(f"{x}: {told[x]}" for x in sorted(told, key=int)) for told in both]
        for name, both in numbers.items()
    }


def usual_power(rows: list[Kept]) -> tuple[str, str]:
    """("3 seeds", "0.5"): seeds and least difference of most experiments of a paper."""
    powers = [found for row in rows if (found := _POWER.search(row.claim.why))]
    counts = Counter((found[1], found[4]) for found in powers if found[2])
    return counts.most_common(1)[0][0] if counts else ("", "")


_POWER = re.compile(
    r"Power: (\d+ seeds?), differences (?:known to within (.+?) \(95 %\)|of (unknown spread)), (\S+) matter\."
)


def sentences(why: str) -> list[str]:
    """Of a reason, with its power in few words."""
    why = _POWER.sub(lambda found: f"{found[1]}, {'± ' + found[2] if found[2] else found[3]}, least {found[4]}.", why)
    return re.split(r"(?<=\.)\s+(?=[A-Z0-9])", why)


def repeated(reasons: Iterable[str]) -> dict[str, str]:
    """Long sentences of two reasons or more, and the letter that stands for each."""
    counts = Counter(sentence.removesuffix(".") for why in reasons for sentence in sentences(why))
    often = [sentence for sentence, count in counts.items() if count > 1 and len(sentence) > 40]
    return {sentence: chr(ord("a") + place) for place, sentence in enumerate(often)}


def power_mark(row: Kept) -> str:
    """That the power of a verdict was stated, or changed, after what it judges."""
    power = _powers.stated(row.claim.paper, row.claim.statement)
    if not row.claim.ours or (power is None and not row.power):
        return ""
    late = row.late or power is None or row.power != power.digest
    return "†" if late else ""


def cells(row: Kept, notes: dict[str, str]) -> dict[str, str]:
    """The row of a claim, by column. Where a claim does not fail, of what they say only a few numbers are told."""
    claim = row.claim
    ours, printed = claim.ours, ""
    if claim.verdict == "undecided" and re.search(r"\d\d|\.\d", claim.theirs) and len(claim.theirs.split()) < 12:
        printed = f". Paper: {claim.theirs}"
    if _SERIES.findall(ours):
        ours = "[these numbers](#numbers)"
    marks = power_mark(row) + ("‡" if claim.stored or claim.measured else "")
    scaled = f" (**{claim.verdict}**)" if claim.verdict == "fails, scaled down" else ""
    said = [sentence.removesuffix(".") for sentence in sentences(claim.why)]
    letters = ", ".join(sorted(notes[one] for one in said if one in notes))
    why = ". ".join([*(one for one in said if one not in notes), *([f"Note {letters}"] if letters else [])])
    why = "" if claim.verdict == "holds" else why
    found = {
        "where": claim.place, "claim": claim.statement + scaled + (f" {marks}" if marks else "") + printed,
        "they say": claim.theirs, "we got": ours, "why": why,
    }  # fmt: skip
    command = {"command": f"`{claim.command.rpartition(' ')[2]}`"}
    return {name: cell.replace("|", "\\|") for name, cell in found.items()} | command


def mark(curves: Curves) -> str:
    """A digest of what is drawn, kept in the picture, so that a picture of older results is told."""
    return hashlib.sha256(json.dumps(asdict(curves), sort_keys=True).encode()).hexdigest()


def draw(path: Path, curves: Curves) -> None:
    """The plot as a PNG of less than 60 kB."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves.curves.items():
        axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 30 else None, markersize=3, label=name)
    if "x" in curves.log:
        axes.set_xscale("log")
    if "y" in curves.log:
        axes.set_yscale("log")
    axes.set_xlabel(curves.x)
    axes.set_ylabel(curves.y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90, metadata={"Description": mark(curves), "Software": None})
