"""Accuracy against epsilon, mechanism by mechanism: MNIST as in Figure 1(a) of Kairouz et al. 2021, and CIFAR-10.

Each cell, a mechanism and an epsilon, tunes its learning rate on seed 0 over the grid 1, 2, 5 x 10^i as in their
appendix F.1, by test accuracy as they do; then the best rate runs with the other seeds.
"""

import argparse
import functools
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from anyorder.app import Settings, train
from anyorder.app import data as datasets
from anyorder.app.data import Data
from benchmarks._report import Row
from benchmarks.wides.page import put

ROOT = Path(__file__).resolve().parents[1]
RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
FIRST_RATES = {1.0: 0.05, 2.0: 0.1, 4.0: 0.2, 8.0: 0.2, 14.0: 0.2, 20.0: 0.5}  # where the search starts
TITLES = {
    "tree-restart": "tree (DP-FTRLM), shuffled",
    "poisson": "DP-SGDM, amplified: secret sampling",
    "independent": "DP-SGDM, shuffled",
    "restarted blt": "restarted BLT (auto), shuffled",
    "tree@fixed": "tree, fixed order",
    "blt@fixed": "BLT, fixed order",
    "banded inverse@fixed": "banded inverse, fixed order",
    "banded, 240 bands@fixed": "banded, 240 bands, fixed order",
    "dense@fixed": "dense optimum, fixed order",
    "auto@fixed": "auto, fixed order",
    "auto@balls-in-bins": "auto, balls in bins: secret sampling",
    "blt@balls-in-bins": "BLT, balls in bins: secret sampling",
    "banded toeplitz@balls-in-bins": "banded, balls in bins: secret sampling",
}

Table = dict[tuple[str, float], tuple[float, list[float]]]
"""(mechanism, epsilon) -> (learning rate, accuracies in percent)."""


@dataclass(frozen=True)
class Grid:
    """A data set's runs: each a line of benchmarks/results/<dataset>.jsonl, all together a table of docs/accuracy.md.

    Attributes:
        settings: of a run, see `Settings`.
        epsilons, mechanisms, seeds: run where nothing else is asked for.
    """

    dataset: str
    title: str
    settings: dict[str, Any] = field(hash=False)
    epsilons: tuple[float, ...]
    mechanisms: tuple[str, ...]
    seeds: int

    @property
    def results(self) -> Path:
        """The file of runs."""
        return ROOT / "benchmarks" / "results" / f"{self.dataset}.jsonl"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to run of a grid."""
    parser.add_argument(
        "--mechanisms", nargs="+",
        help="tree-restart, poisson, independent, or any --mechanism of anyorder train; NAME@ORDER in that order",
    )  # fmt: skip
    parser.add_argument("--epsilons", nargs="+", type=float)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--data-dir", help="folder with the data set's parquet files; without it, the hub is asked")


def run(grid: Grid, pool: ProcessPoolExecutor, chosen: argparse.Namespace) -> Iterator[Row]:
    """Run what is missing, cell by cell, then write the page and its plot."""
    grid.results.parent.mkdir(exist_ok=True)
    seeds = chosen.seeds or grid.seeds
    cells: dict[Future[list[float]], tuple[str, float]] = {
        pool.submit(cell, grid, mechanism, epsilon, seeds, chosen.data_dir): (mechanism, epsilon)
        for epsilon in chosen.epsilons or grid.epsilons
        for mechanism in chosen.mechanisms or grid.mechanisms
    }
    for done in as_completed(cells):
        mechanism, epsilon = cells[done]
        accuracy = mean(done.result())
        yield Row(f"{grid.dataset}, {mechanism} at epsilon {epsilon:g}", accuracy, None, None, "test accuracy")
    write(grid, _read(grid))


def cell(grid: Grid, mechanism: str, epsilon: float, seeds: int, data_dir: str | None) -> list[float]:
    """The accuracies of all seeds at the best learning rate."""
    run = functools.partial(_accuracy, grid, mechanism, epsilon, data_dir)
    i = RATES.index(FIRST_RATES.get(epsilon, 0.1))
    for step in (1, -1):  # uphill, first to larger rates
        while 0 <= i + step < len(RATES) and run(RATES[i + step], 0) > run(RATES[i], 0):
            i += step
    return [run(RATES[i], seed) for seed in range(seeds)]


def _accuracy(grid: Grid, mechanism: str, epsilon: float, data_dir: str | None, lr: float, seed: int) -> float:
    """Test accuracy after the last epoch: from the file of results, or by a run that is then added to it."""
    wanted = {"mechanism": mechanism, "epsilon": epsilon, "lr": lr, "seed": seed}
    for line in _read(grid):
        if wanted.items() <= line.items():
            return float(line["accuracy"])
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.of(
            grid.dataset, data_dir=data_dir, epsilon=epsilon, lr=lr, seed=seed, **grid.settings, **_noise(mechanism)
        )
        result = train(settings, Path(folder) / "run", data=_data(grid.dataset, data_dir))
    line = {**wanted, "accuracy": result.accuracy[-1], "seconds": round(result.seconds, 1)}
    with grid.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return result.accuracy[-1]


def _noise(mechanism: str) -> dict[str, Any]:
    if mechanism == "tree-restart":
        return {"mechanism": "tree", "restart_every": 1, "completion": "on", "order": "shuffled"}
    if mechanism == "poisson":
        return {"mechanism": "poisson"}
    name, _, order = mechanism.partition("@")
    return {"mechanism": name, "order": order or "shuffled"}


@functools.cache
def _data(dataset: str, data_dir: str | None) -> Data:
    return datasets.load(dataset, data_dir)


def _read(grid: Grid) -> list[dict[str, Any]]:
    return [json.loads(line) for line in grid.results.read_text().splitlines()] if grid.results.exists() else []


# -- the page --------------------------------------------------------------------------------------------------------


def write(grid: Grid, lines: list[dict[str, Any]]) -> None:
    """The page and its plot from all results on file."""
    table = _best(lines)
    mechanisms = list(dict.fromkeys(name for name, _ in table))
    epsilons = sorted({epsilon for _, epsilon in table})
    _plot(grid, table, mechanisms, epsilons)
    head = "| | " + " | ".join(f"epsilon {epsilon:g}" for epsilon in epsilons) + " |"
    rule = "|" + "---|" * (len(epsilons) + 1)
    entries = {cell: _entry(*found) for cell, found in table.items()}
    rows = [
        f"| {TITLES.get(name, name)} | " + " | ".join(entries.get((name, e), "") for e in epsilons) + " |"
        for name in mechanisms
    ]
    image = f"![accuracy against epsilon]({grid.dataset}.png)"
    put(grid.dataset, [head, rule, *rows, "", *_verdict(table, epsilons), image], ROOT / "docs" / "accuracy.md")


def _way(name: str) -> str:
    return "with balls in bins" if name.endswith("@balls-in-bins") else f"with {TITLES.get(name, name)}"


def _verdict(table: Table, epsilons: list[float]) -> list[str]:
    """How far balls in bins, and the best of all, are from amplified DP-SGD: means over seeds."""
    lines = []
    for epsilon in epsilons:
        others = {name: mean(found[1]) for (name, e), found in table.items() if e == epsilon}
        bar = others.pop("poisson", None)
        secret = {name: value for name, value in others.items() if name.endswith("@balls-in-bins")}
        tops = [max(some, key=lambda name: some[name]) for some in (secret, others) if some]
        if bar is not None and tops:
            said = [f"{others[name] - bar:+.2f} {_way(name)}" for name in dict.fromkeys(tops)]
            lines.append(f"{', '.join(said)} at epsilon {epsilon:g}")
    return [f"Points above amplified DP-SGD: {'; '.join(lines)}.", ""] if lines else []


def _best(lines: list[dict[str, Any]]) -> Table:
    """The learning rate that ran with most seeds, then the best, of each cell; cells still being tuned are left out."""
    runs: dict[tuple[str, float], dict[float, list[float]]] = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        rates = runs.setdefault((line["mechanism"], line["epsilon"]), {})
        rates.setdefault(line["lr"], []).append(100 * line["accuracy"])
    best = {cell: max(rates.items(), key=lambda item: (len(item[1]), mean(item[1]))) for cell, rates in runs.items()}
    return {cell: found for cell, found in best.items() if len(found[1]) > 1 or _is_tuned(found[0], set(runs[cell]))}


def _is_tuned(best: float, tried: set[float]) -> bool:
    """Whether the rates beside the best one ran too."""
    i = RATES.index(best)
    return tried >= set(RATES[max(i - 1, 0) : i + 2])


def _entry(lr: float, accuracies: list[float]) -> str:
    spread = f" ± {stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    return f"{mean(accuracies):.2f}{spread} (lr {lr:g})"


def _plot(grid: Grid, table: Table, mechanisms: list[str], epsilons: list[float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for name, marker in zip(mechanisms, "osD^vPX*" * len(mechanisms), strict=False):
        points = [(epsilon, table[name, epsilon][1]) for epsilon in epsilons if (name, epsilon) in table]
        spread = [stdev(values) if len(values) > 1 else 0.0 for _, values in points]
        axes.errorbar(
            [epsilon for epsilon, _ in points], [mean(values) for _, values in points], spread, marker=marker,
            markersize=5, linewidth=1.5, capsize=3, label=TITLES.get(name, name),
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.set_xlabel("epsilon (delta = 1e-5)")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(f"{grid.title}: mean and standard deviation over seeds", fontsize=11, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    figure.savefig(ROOT / "docs" / f"{grid.dataset}.png", dpi=150)


MNIST = Grid(
    "mnist", "MNIST, 5 epochs of batch 250",
    {"model": "cnn", "batch_size": 250, "epochs": 5, "momentum": 0.9, "clip_norm": 1.0, "delta": 1e-5},
    (2.0, 4.0, 8.0, 14.0, 20.0), ("tree-restart", "poisson", "independent"), 3,
)  # fmt: skip

CIFAR10 = Grid(
    "cifar10", "CIFAR-10, 10 epochs of batch 500",
    {"model": "cnn", "batch_size": 500, "epochs": 10, "momentum": 0.9, "clip_norm": 1.0, "delta": 1e-5},
    (1.0, 2.0, 4.0, 8.0), ("poisson", "auto@balls-in-bins", "auto@fixed"), 1,
)  # fmt: skip
