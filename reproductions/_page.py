"""docs/papers: how many claims hold, and a page a paper, from what is kept in reproductions/results alone."""

import hashlib
import json
from collections import Counter
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
- *undecided*: seeds, spread and task could not tell. The page of the paper states the number of seeds, the half width
  of a 95 % interval, and the least difference that matters. The rule is the same for successes and misses;
- *not tried*, with the reason.

The page of a paper has every claim with its command, which runs it again. Powers stand in `reproductions/powers.toml`:
seeds, least difference, and how far the task is from the paper's. *Power stated after the run* marks a verdict whose
runs are older than its power. *Stored runs* marks one whose command reads runs that are on file; `--fresh` runs them
again, but for those of another benchmark, whose command it prints.
"""

SECTIONS: dict[str, tuple[Verdict, ...]] = {
    "What fails": ("fails", "fails, scaled down"),
    "What is undecided": ("undecided",),
    "What holds": ("holds", "holds, scaled down"),
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
    """One paper: what fails, what is undecided, what holds, and what was not tried; the plots."""
    text = [
        f"{HIDDEN}# {title}\n",
        (
            f"Each claim is run again by `python -m reproductions {paper} COMMAND`, with the command of its row. "
            f"`reproductions/results/{paper}.jsonl` has seeds, time, machine and versions. "
            "[What a verdict means](index.md).\n"
        ),
    ]
    for heading, verdicts in SECTIONS.items():
        claims = [row for row in rows if row.claim.verdict in verdicts]
        if claims:
            told = heading != "What holds"
            head = ["where", "claim", "they say", "we got", *(["why"] if told else []), "command"]
            text += [f"## {heading}\n", f"| {' | '.join(head)} |\n{'|---' * len(head)}|"]
            text += ["| " + " | ".join(cells(row, reasons=told)) + " |" for row in claims] + [""]
    drawn = [row for row in rows if row.claim.curves is not None]
    if drawn:
        text.append("## Plots\n")
    for row in drawn:
        curves = row.claim.curves
        assert curves is not None
        text.append(
            f"{row.claim.place}: {row.claim.statement}.\n\n![{curves.y} against {curves.x}]({plot_name(row)})\n"
        )
    return "\n".join(text)


def power_mark(row: Kept) -> str:
    """That the power of a verdict was stated, or changed, after what it judges."""
    power = _powers.stated(row.claim.paper, row.claim.statement)
    if not row.claim.ours or (power is None and not row.power):
        return ""
    late = row.late or power is None or row.power != power.digest
    return f"power stated {'after' if late else 'before'} the run"


def cells(row: Kept, *, reasons: bool) -> list[str]:
    """The row of a claim."""
    claim = row.claim
    stored = "stored runs" if claim.stored or claim.measured else ""
    marks = "".join(f" *({mark})*" for mark in (power_mark(row), stored) if mark)
    scaled = f" (**{claim.verdict}**)" if "scaled down" in claim.verdict else ""
    found = [claim.place, claim.statement + scaled + marks, claim.theirs, claim.ours, *([claim.why] if reasons else [])]
    return [cell.replace("|", "\\|") for cell in found] + [f"`{claim.command.rpartition(' ')[2]}`"]


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
