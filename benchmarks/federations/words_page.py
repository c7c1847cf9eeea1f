"""docs/experiments.md and its pictures, from the runs on file and from what follows by computation alone."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from anyorder.app.charts import plot_report_goals
from anyorder.federated import epsilon_by_report_goal
from anyorder.federated.planning import at_same_error
from benchmarks.federations.words import DELTA, SMALL, read_results

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

USERS, ROUNDS, RATIO = 342_477, 1600, 0.149 / 100  # of [Kairouz et al. 2021], sections 7.3 and G
POPULATION = 5361  # passages of ten sentences

TITLES = {
    "none": "no noise",
    "tree": "tree (DP-FTRLM)",
    "blt": "BLT, 2 buffers",
    "independent": "independent (DP-SGDM), not amplified",
    "poisson": "independent (DP-SGDM), amplified: secret sampling",
}

Key = tuple[str, float | None, int]  # mechanism, epsilon, passes
Table = dict[Key, tuple[float, list[float]]]  # -> (learning rate, accuracies in percent)


def write() -> None:
    """The tables of the page, between their marks, and the pictures."""
    table = best(read_results())
    _plot(table)
    page = DOCS / "experiments.md"
    text = page.read_text(encoding="utf-8")
    tables = {"accuracies": accuracies, "goals": report_goals}
    for mark, lines in tables.items():
        made = "\n".join(lines(table))
        head, _, rest = text.partition(f"<!-- {mark} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        text = f"{head}<!-- {mark} -->\n\n{made}\n\n{end}{tail}"
    page.write_text(text, encoding="utf-8")


# -- accuracies ------------------------------------------------------------------------------------------------------


def best(lines: list[dict[str, Any]]) -> Table:
    """Of each cell the learning rate that ran with most seeds, then the best."""
    runs: dict[Key, dict[float, list[float]]] = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        if line["size"] == asdict(SMALL):
            rates = runs.setdefault((line["mechanism"], line["epsilon"], line["passes"]), {})
            rates.setdefault(line["lr"], []).append(100 * line["accuracy"])
    return {cell: max(rates.items(), key=lambda item: (len(item[1]), mean(item[1]))) for cell, rates in runs.items()}


def columns(table: Table) -> list[tuple[float, int]]:
    """(epsilon, passes), passes first."""
    found = {(epsilon, passes) for _, epsilon, passes in table if epsilon is not None}
    return sorted(found, key=lambda column: (column[1], column[0]))


def accuracies(table: Table) -> Iterable[str]:
    """The rows of the table."""
    heads = [f"epsilon {epsilon:g}, passes: {passes}" for epsilon, passes in columns(table)]
    yield "| | " + " | ".join(heads) + " |"
    yield "|" + "---|" * (len(heads) + 1)
    for name, title in TITLES.items():
        cells = [table.get((name, None if name == "none" else e, passes)) for e, passes in columns(table)]
        yield f"| {title} | " + " | ".join("" if cell is None else _entry(*cell) for cell in cells) + " |"


def _entry(lr: float, found: list[float]) -> str:
    spread = f" ± {stdev(found):.2f}" if len(found) > 1 else ""
    return f"{mean(found):.2f}{spread} (lr {lr:g})"


# -- report goals ----------------------------------------------------------------------------------------------------

TABLE_5 = ((100, USERS, 363.66), (1000, USERS, 32.52), (5060, USERS, 9.76), (16302, USERS, 4.11),
           (3846, 10**6, 7.57), (10262, 10**6, 3.56))  # fmt: skip


def report_goals(table: Table) -> Iterable[str]:
    """Table 5 of the paper, and the picture."""
    del table
    yield "| population | report goal | times a user | printed | as printed, here | exact | timer | one tree | BLT |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for goal, population, printed in TABLE_5:
        (paper,) = _points([goal], population, order="shuffled", conversion="rdp")
        (exact,) = _points([goal], population, order="shuffled")
        timer = _points([goal], population)
        (once,), (blt,) = at_same_error(timer, "tree", restart_every=0), at_same_error(timer, "blt, 2 buffers")
        numbers = [printed, *(point.epsilon for point in (paper, exact, timer[0], once, blt))]
        texts = [str(population), str(goal), str(paper.max_participations), *(f"{number:.5g}" for number in numbers)]
        yield f"| {' | '.join(texts)} |"
    goals = [round(100 * 200 ** (i / 12)) for i in range(13)]
    tree = _points(goals, USERS)
    lines = {
        "tree, restarted in each pass": tree,
        "one tree": at_same_error(tree, "tree", restart_every=0),
        "BLT, 2 buffers": at_same_error(tree, "blt, 2 buffers"),
        "independent": at_same_error(tree, "independent"),
        "independent, secret sampling": at_same_error(tree, "poisson"),
    }
    plot_report_goals(
        {name: [(point.report_goal, point.epsilon) for point in points] for name, points in lines.items()},
        DOCS / "report_goals.png", f"{USERS} users, {ROUNDS} rounds, delta 1e-6, the same noise in the model",
    )  # fmt: skip


def _points(goals: list[int], population: int, **chosen: Any) -> list[Any]:
    return epsilon_by_report_goal(population, ROUNDS, RATIO, goals, 1e-6, **chosen)


# -- the picture -----------------------------------------------------------------------------------------------------


def _plot(table: Table) -> None:
    from matplotlib.figure import Figure

    every = sorted({passes for _, _, passes in table})
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    panels = figure.subplots(1, len(every), sharey=True, squeeze=False)[0]
    for axes, passes in zip(panels, every, strict=True):
        epsilons = [epsilon for epsilon, p in columns(table) if p == passes]
        for (name, title), marker in zip(TITLES.items(), "_os^D", strict=True):
            found = {e: table[name, e, passes][1] for e in epsilons if (name, e, passes) in table}
            if found:
                spread = [stdev(values) if len(values) > 1 else 0.0 for values in found.values()]
                axes.errorbar(
                    list(found), [mean(values) for values in found.values()], spread, marker=marker, markersize=5,
                    linewidth=1.5, capsize=3, label=title if passes == every[0] else None,
                )  # fmt: skip
        if ("none", None, passes) in table:
            line = mean(table["none", None, passes][1])
            axes.axhline(line, color="grey", linestyle="--", label=TITLES["none"] if passes == every[0] else None)
        axes.set_xscale("log", base=2)
        axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axes.set_xlabel(f"epsilon (delta {DELTA:g})")
        axes.set_title(f"passes: {passes}", fontsize=11, loc="left")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("words predicted (%)")
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(DOCS / "words.png", dpi=150)


if __name__ == "__main__":
    write()
