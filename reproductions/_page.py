"""docs/papers: what fails of all claims, and a page a paper, from what is kept in reproductions/results alone."""

import hashlib
import json
import re
from collections import Counter
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import get_args

from reproductions._claims import Claim, Curves, Kept, Verdict, results

DOCS = Path(__file__).parents[1] / "docs" / "papers"

HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"

INDEX = f"""{HIDDEN}# Papers run again

*For readers of the papers that this package builds on.* We ran their claims again, theorems and experiments.
`python -m reproductions --page` writes these pages from `reproductions/results`, where each claim has its seeds,
machine, time and versions. A verdict is one of:

- *holds*, or *fails*;
- *holds, scaled down*, or *fails, scaled down*: on a smaller task than the paper's;
- *undecided*: seeds, spread and task could not tell. The page of the paper states the number of seeds, the half width
  of a 95 % interval, and the least difference that matters;
- *not tried*, with the reason.

The page of a paper has every claim with its command, which runs it again. Below is what fails.
"""


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
    """How many claims of each paper hold, and a table of those that fail."""
    text = [INDEX]
    for paper, rows in kept.items():
        counts = Counter(row.claim.verdict for row in rows)
        told = "; ".join(f"{verdict}: {counts[verdict]}" for verdict in get_args(Verdict) if counts[verdict])
        text.append(f"## [{titles[paper]}]({paper}.md)\n\nVerdicts: {told}.\n")
        fails = [row.claim for row in rows if row.claim.verdict.startswith("fails")]
        if fails:
            text.append("| where | claim | verdict | what came out, and why |\n|---|---|---|---|")
        for claim in fails:
            cells = (claim.place, claim.statement, f"**{claim.verdict}**", reason(claim))
            text.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        text.append("")
    return "\n".join(text)


def reason(claim: Claim) -> str:
    """What came out, and why; what of the reason is on how it was run stands on the paper's page."""
    first = re.split(r"(?<=[a-z0-9)])\. (?=[A-Z])", claim.why)[0].rstrip(".")
    return f"{claim.ours.rstrip('.')}. {first[0].upper()}{first[1:]}."


def page(title: str, paper: str, rows: list[Kept]) -> str:
    """One paper: each claim with both numbers, verdict, reason, and how it was made."""
    text = [
        f"{HIDDEN}# {title}\n",
        (
            f"Written by `python -m reproductions --page` from `reproductions/results/{paper}.jsonl`, which also has "
            "the time, machine and versions of each claim. [What a verdict means](index.md).\n"
        ),
    ]
    for place, group in groupby(rows, lambda row: row.claim.place):
        text.append(f"## {place}\n")
        text.extend(entry(row) for row in group)
    return "\n".join(text)


def entry(row: Kept) -> str:
    """A claim."""
    claim = row.claim
    lines = [f"**{claim.statement}**\n", f"- They say: {claim.theirs}"]
    lines += [f"- We got: {claim.ours}"] if claim.ours else []
    lines.append(f"- Verdict: **{claim.verdict}**{'. ' + claim.why if claim.why else ''}")
    measured = f", which reads what `{claim.measured}` measured" if claim.measured else ""
    stored = f"; stored runs, of {', '.join(claim.stored)}: `--fresh` runs them again" if claim.stored else ""
    seeds = f", seeds {', '.join(map(str, claim.seeds))}" if claim.ours and claim.seeds else ""
    lines.append(f"- Command: `{claim.command}`{measured}{stored}{seeds}")
    if claim.curves is not None:
        lines.append(f"\n![{claim.curves.y} against {claim.curves.x}]({plot_name(row)})")
    return "\n".join(lines) + "\n"


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
