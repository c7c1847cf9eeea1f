"""docs/papers: the table of all claims, and a page a paper, from what is kept in reproductions/results alone."""

import hashlib
import json
import re
from collections import Counter
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import get_args

from reproductions import _powers
from reproductions._claims import Claim, Curves, Kept, Verdict, results

DOCS = Path(__file__).parents[1] / "docs" / "papers"

INDEX = """# Papers run again

Written by `python -m reproductions --page` from the results kept in `reproductions/results`, one line a claim, with its
seeds, machine, time and versions. A verdict is one of:

- *holds*; *fails*, and the page says where;
- *holds, scaled down* and *fails, scaled down*: on a smaller task than the paper's, and the page says how much
  smaller;
- *undecided*: seeds, spread and task could not tell. The rule is the same for successes and misses, and the page says
  the power: seeds, the half width of a 95 % interval, and the least difference that matters. Powers stand in
  `reproductions/powers.toml`, and a verdict whose runs are older than its power is marked
  *power stated after the run*;
- *not tried*, and the page says why.

What fails has beside it what came out here, and the reason. Each claim has its command, which runs it again and tells
where a verdict turned. A claim that rests on stored runs names them, and `--fresh` runs them again.
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
    """The table of all claims."""
    text = [INDEX]
    for paper, rows in kept.items():
        counts = Counter(row.claim.verdict for row in rows)
        told = "; ".join(f"{verdict}: {counts[verdict]}" for verdict in get_args(Verdict) if counts[verdict])
        text.append(f"## [{titles[paper]}]({paper}.md)\n\nVerdicts: {told}.\n")
        text.append("| where | claim | verdict | what fails, and why | command |\n|---|---|---|---|---|")
        for row in rows:
            claim = row.claim
            verdict = f"**{claim.verdict}**{' (power stated after the run)' if power_mark(row).count('after') else ''}"
            cells = (claim.place, claim.statement, verdict, reason(claim), f"`{claim.command}`")
            text.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        text.append("")
    return "\n".join(text)


def reason(claim: Claim) -> str:
    """Of what fails: what came out, and why; what of the reason is on how it was run stands on the paper's page."""
    if not claim.verdict.startswith("fails"):
        return ""
    first = re.split(r"(?<=[a-z0-9)])\. (?=[A-Z])", claim.why)[0].rstrip(".")
    return f"{claim.ours.rstrip('.')}. {first[0].upper()}{first[1:]}."


def page(title: str, paper: str, rows: list[Kept]) -> str:
    """One paper: each claim with both numbers, verdict, reason, and how it was made."""
    text = [
        f"# {title}\n",
        (
            f"Written by `python -m reproductions --page` from `reproductions/results/{paper}.jsonl`; see "
            "[all claims](index.md) for what a verdict means.\n"
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
    lines += [f"- {mark}" for mark in [power_mark(row)] if mark]
    measured = f", which reads what `{claim.measured}` measured" if claim.measured else ""
    stored = f"; stored runs, of {', '.join(claim.stored)}: `--fresh` runs them again" if claim.stored else ""
    lines.append(f"- Command: `{claim.command}`{measured}{stored}")
    if claim.ours:
        seeds = f"seeds {', '.join(map(str, claim.seeds))}; " if claim.seeds else ""
        versions = ", ".join(f"{name} {number}" for name, number in row.versions.items())
        lines.append(f"- Made: {row.date}, {seeds}{max(row.seconds, 0.01):.2g} s on {cores(row.cores)}; {versions}")
    if claim.curves is not None:
        lines.append(f"\n![{claim.curves.y} against {claim.curves.x}]({plot_name(row)})")
    return "\n".join(lines) + "\n"


def power_mark(row: Kept) -> str:
    """That the power of a verdict was stated, or changed, after what it judges."""
    power = _powers.stated(row.claim.paper, row.claim.statement)
    if not row.claim.ours or (power is None and not row.power):
        return ""
    late = row.late or power is None or row.power != power.digest
    return f"Power stated {'after' if late else 'before'} the run"


def cores(number: int) -> str:
    """In words."""
    return f"{number} core{'s' if number > 1 else ''}"


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
