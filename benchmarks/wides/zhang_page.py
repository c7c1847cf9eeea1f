"""The experiment's part of docs/experiments.md and its two pictures, from the runs on file."""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import StatisticsError, mean, stdev
from typing import Any

from benchmarks.wides import zhang_epsilon
from benchmarks.wides.zhang import REPEATS, SHARERS, TITLES, WAYS, described, read_results, started
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
    """The tables between their marks, and the pictures."""
    lines = read_results()
    page = DOCS / "experiments.md"
    text = page.read_text(encoding="utf-8")
    tables: dict[str, Callable[[list[Line]], Iterable[str]]] = {
        "losses": losses,
        "claims": claims,
        "canaries": canaries,
    }
    for mark, table in tables.items():
        made = "\n".join(table(lines))
        head, _, rest = text.partition(f"<!-- {mark} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        text = f"{head}<!-- {mark} -->\n\n{made}\n\n{end}{tail}"
    page.write_text(text, encoding="utf-8")
    _plot_losses(lines)
    _plot_ranks(lines)


def runs(lines: list[Line], way: Way, repeats: int = 0) -> list[Line]:
    """Those of all seeds, full length."""
    wanted = described(way, 0, repeats, Setting().epochs)
    del wanted["seed"]
    return sorted((line for line in lines if wanted.items() <= line.items()), key=lambda line: int(line["seed"]))


# -- tables ----------------------------------------------------------------------------------------------------------


def losses(lines: list[Line]) -> Iterable[str]:
    """A way a line; of each first table the last losses, of the training part and the test part."""
    epsilons = _epsilons()
    yield "| | epsilon | N(0, 1): train | test | gap | seeds | small: train | test | seeds |"
    yield "|" + "---|" * 9
    zero = f"{ZERO_TABLE:.3f} | {ZERO_TABLE:.3f}"
    yield f"| a table of zeros | 0 | {zero} | 0 | | {zero} | |"
    for way, title in TITLES.items():
        normal, small = runs(lines, way), runs(lines, started(way, "small"))
        gap = _spread([line["test"] - line["train"] for line in normal])
        cells = [_column(normal, "train"), _column(normal, "test"), gap, str(len(normal) or "")]
        cells += [_column(small, "train"), _column(small, "test"), str(len(small) or "")]
        yield f"| {title} | {epsilons[way.selector, way.sigma]} | " + " | ".join(cells) + " |"


def _epsilons() -> dict[tuple[str, float], str]:
    """Exact at delta 1e-5 for a sample that is there or not; who is chosen uniformly depends on no data."""
    found = {row.name: row.ours for row in zhang_epsilon.rows(True)}
    noise, chosen = (f"{found[f'{name}, add or remove']:.2f}" for name in (
        "DP-SGD, sigma 0.5", "selection and sigma 0.5",
    ))  # fmt: skip
    return {
        ("none", 0.0): "none", ("all", 0.32): f"{found['DP-SGD, sigma 0.32, add or remove']:.2f}", ("all", 0.5): noise,
        ("em", 0.5): f"at most {chosen}", ("uniform", 0.5): noise, ("svt", 0.5): "not claimed",
    }  # fmt: skip


def _column(found: list[Line], name: str) -> str:
    return _spread([line[name] for line in found])


def _spread(values: list[float], digits: int = 2) -> str:
    if not values:
        return ""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def claims(lines: list[Line]) -> Iterable[str]:
    """What the paper says of its Fig. 1, beside differences here, means over seeds."""
    yield "| the paper on Fig. 1 | measured as | N(0, 1) | small |"
    yield "|---|---|---|---|"
    em, svt, weak, none = Way("em", 0.5), Way("svt", 0.5), Way("all", 0.32), Way("none")
    much, slightly, small = "sparse much better than DP-SGD", "EM slightly better than SVT", "small gaps with privacy"
    apart: list[tuple[str, str, Way, Way]] = [
        (much, "test loss, DP-SGD 0.32 - EM, dense Adam", weak, em),
        (much, "the same, lazy Adam", weak, _lazy(em)),
        (much, "test loss, DP-SGD 0.5 - EM, dense Adam", Way("all", 0.5), em),
        (slightly, "test loss, SVT - EM, dense Adam", svt, em),
        (slightly, "the same, lazy Adam", _lazy(svt), _lazy(em)),
        ("", "test loss, uniform - EM, dense Adam", Way("uniform", 0.5), em),
    ]
    for claim, measured, more, less in apart:
        yield _claim(
            claim, measured, lines, lambda lines, f=more, g=less: _mean(lines, f, "test") - _mean(lines, g, "test")
        )
    for title, way in (("DP-SGD 0.32", weak), ("EM, dense Adam", em)):
        yield _claim(small, f"test - training loss, {title}", lines, lambda lines, f=way: _mean(lines, f, "gap"))
    yield _claim("non-private: a huge gap", "test - training loss", lines, lambda lines: _mean(lines, none, "gap"))
    yield _claim(
        "non-private: periodic training error", "loss of batches, end of an epoch - begin of the next", lines,
        lambda lines: _mean(lines, none, "saw"),
    )  # fmt: skip
    yield _claim(
        "non-private: best test error", "least test loss on the way - 6.238", lines,
        lambda lines: _mean(lines, none, "least") - ZERO_TABLE,
    )  # fmt: skip


def _lazy(way: Way) -> Way:
    return Way(way.selector, way.sigma, "lazy")


def _claim(claim: str, measured: str, lines: list[Line], number: Callable[[Callable[[Way], list[Line]]], float]) -> str:
    cells = []
    for start in ("normal", "small"):
        try:
            cells.append(f"{number(lambda way, start=start: runs(lines, started(way, start))):+.2f}")
        except StatisticsError:  # no run yet
            cells.append("")
    return f"| {claim} | {measured} | {' | '.join(cells)} |"


def _mean(found: Callable[[Way], list[Line]], way: Way, what: str) -> float:
    """Over seeds; StatisticsError where there is no run."""
    match what:
        case "gap":
            return mean(line["test"] - line["train"] for line in found(way))
        case "least":
            return mean(min(point[3] for point in line["curve"]) for line in found(way))
        case "saw":  # five points an epoch; the first epochs still fall
            batches = [[point[1] for point in line["curve"][1:]] for line in found(way)]
            return mean(mean(b[i - 1] - b[i] for i in range(len(b) // 2, len(b), 5)) for b in batches)
        case _:
            return mean(float(line[what]) for line in found(way))


def canaries(lines: list[Line]) -> Iterable[str]:
    """Chi-squared distances and p-values, beside the printed ones."""
    yield "| | " + " | ".join(f"{n} times: here | paper" for n in REPEATS) + " |"
    yield "|" + "---|" * (2 * len(REPEATS) + 1)
    for way in SHARERS:
        cells = [_pair(runs(lines, way, n), "canaries", PRINTED[way.selector, n]) for n in REPEATS]
        yield f"| {TITLES[way]} | " + " | ".join(cells) + " |"
    plain = [_pair(runs(lines, Way("none"), n), "chance", PRINTED["random", n]) for n in REPEATS]
    yield "| phrases never planted, no privacy | " + " | ".join(plain) + " |"


def _pair(found: list[Line], what: str, printed: str) -> str:
    shown = "; ".join(f"{_small(line[what]['distance'])} ({_small(line[what]['p_value'])})" for line in found)
    return f"{shown} | {printed}"


def _small(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}".lstrip("0") if value >= 0.0005 else "< .001"


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
