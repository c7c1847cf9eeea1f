"""The experiment's part of docs/experiments.md and its two pictures, from the runs on file."""

from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.wides.zhang import REPEATS, SHARERS, TITLES, WAYS, described, read_results
from benchmarks.wides.zhang_select import Setting
from benchmarks.wides.zhang_task import ZERO_TABLE, Way

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

PRINTED = {  # Table 2: distance (p)
    ("none", 3): "2.62 (.00)", ("none", 9): "3.24 (.00)", ("none", 15): "3.27 (.00)",
    ("all", 3): ".007 (.63)", ("all", 9): ".004 (.88)", ("all", 15): ".011 (.31)",
    ("em", 3): ".005 (.85)", ("em", 9): ".007 (.68)", ("em", 15): ".026 (.00)",
    ("random", 3): ".005 (.86)", ("random", 9): ".010 (.33)", ("random", 15): ".002 (.98)",
}  # fmt: skip

Line = dict[str, Any]


def write() -> None:
    """The pictures."""
    lines = read_results()
    _plot_losses(lines)
    _plot_ranks(lines)


def runs(lines: list[Line], way: Way, repeats: int = 0) -> list[Line]:
    """Those of all seeds, full length."""
    wanted = described(way, 0, repeats, Setting().epochs)
    del wanted["seed"]
    return sorted((line for line in lines if wanted.items() <= line.items()), key=lambda line: int(line["seed"]))


# -- pictures --------------------------------------------------------------------------------------------------------


def _plot_losses(lines: list[Line]) -> None:
    """Fig. 1: a panel for each way, seed 0; the training part as it is passed through, and the test part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 8.4), layout="constrained")
    panels = figure.subplots(3, 3, sharex=True, sharey=True).ravel()
    for axes, way in zip(panels, WAYS, strict=True):
        axes.axhline(ZERO_TABLE, color="grey", linestyle=":", linewidth=1)
        for line in runs(lines, way)[:1]:
            epochs, batch, train, test = zip(*line["curve"], strict=True)
            axes.plot(epochs[1:], batch[1:], color="tab:orange", linewidth=0.8, alpha=0.6, label="batches")
            axes.plot(epochs, train, color="tab:blue", linewidth=1.4, label="training part")
            axes.plot(epochs, test, color="tab:red", linewidth=1.4, label="test part")
        axes.set_yscale("log")
        axes.set_yticks([4, 6, 10, 20, 40], ["4", "6", "10", "20", "40"])
        axes.minorticks_off()
        axes.set_title(TITLES[way], fontsize=9.5, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    figure.supxlabel("epochs; dotted: a table of zeros", fontsize=9)
    figure.supylabel("loss of a sample", fontsize=9)
    figure.savefig(DOCS / "zhang.png", dpi=110)


def _plot_ranks(lines: list[Line]) -> None:
    """Fig. 2: how many canaries are in each tenth of the ranks, of all seeds."""
    from matplotlib.figure import Figure

    columns = [*((way, "canaries", TITLES[way]) for way in SHARERS), (Way("none"), "chance", "never planted")]
    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    panels = figure.subplots(len(REPEATS), len(columns), sharex=True)
    for row, repeats in zip(panels, REPEATS, strict=True):
        row[0].set_ylabel(f"{repeats} times", fontsize=9)
        for axes, (way, what, title) in zip(row, columns, strict=True):
            counts = [line[what]["counts"] for line in runs(lines, way, repeats)]
            if counts:
                heights = [mean(found) for found in zip(*counts, strict=True)]
                axes.bar([(i + 0.5) / 10 for i in range(10)], heights, 0.092, color="#4477aa")
                axes.axhline(mean(heights), color="#cc3311", linestyle="--", linewidth=1.2)
            axes.set_xlim(0, 1)
            axes.tick_params(labelsize=7)
            axes.spines[["top", "right"]].set_visible(False)
            if repeats == REPEATS[0]:
                axes.set_title(title, fontsize=9)
    figure.supxlabel("rank / phrases: 0 is the phrase that the model favours most; dashed: chance", fontsize=9)
    figure.savefig(DOCS / "zhang_ranks.png", dpi=100)


if __name__ == "__main__":
    write()
