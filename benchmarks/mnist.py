"""Figure 1(a) of Kairouz et al. 2021: MNIST, their network, 5 epochs of batch 250, delta 1e-5, clip norm 1.

Each cell, a mechanism and an epsilon, tunes its learning rate on seed 0 over the grid 1, 2, 5 x 10^i as in their
appendix F.1, by test accuracy as they do; then the best rate runs with the other seeds.
"""

import argparse
import functools
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from anyorder.run import Settings, datasets, train
from anyorder.run.datasets import Data
from benchmarks._report import Row

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mnist.jsonl"
RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
FIRST_RATES = {2.0: 0.1, 4.0: 0.2, 8.0: 0.2, 14.0: 0.2, 20.0: 0.5}  # where the search starts
EPSILONS = (2.0, 4.0, 8.0, 14.0, 20.0)
MECHANISMS = ("tree-restart", "poisson", "independent")
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
}

Table = dict[tuple[str, float], tuple[float, list[float]]]
"""(mechanism, epsilon) -> (learning rate, accuracies in percent)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to run of the grid."""
    parser.add_argument(
        "--mechanisms", nargs="+", default=MECHANISMS,
        help="tree-restart, poisson, independent, or any --mechanism of anyorder train; NAME@fixed keeps one order",
    )  # fmt: skip
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir", help="folder with MNIST's parquet files; without it, the hub is asked")


def grid(pool: ProcessPoolExecutor, chosen: argparse.Namespace) -> Iterator[Row]:
    """Run what is missing, cell by cell, then write docs/mnist.md and docs/mnist.png."""
    RESULTS.parent.mkdir(exist_ok=True)
    cells: dict[Future[list[float]], tuple[str, float]] = {
        pool.submit(cell, mechanism, epsilon, chosen.seeds, chosen.data_dir): (mechanism, epsilon)
        for epsilon in chosen.epsilons
        for mechanism in chosen.mechanisms
    }
    for done in as_completed(cells):
        mechanism, epsilon = cells[done]
        yield Row(f"mnist, {mechanism} at epsilon {epsilon:g}", mean(done.result()), None, None, "test accuracy")
    write(_read())


def cell(mechanism: str, epsilon: float, seeds: int, data_dir: str | None) -> list[float]:
    """The accuracies of all seeds at the best learning rate."""
    run = functools.partial(_accuracy, mechanism, epsilon, data_dir)
    i = RATES.index(FIRST_RATES.get(epsilon, 0.1))
    for step in (1, -1):  # uphill, first to larger rates
        while 0 <= i + step < len(RATES) and run(RATES[i + step], 0) > run(RATES[i], 0):
            i += step
    return [run(RATES[i], seed) for seed in range(seeds)]


def _accuracy(mechanism: str, epsilon: float, data_dir: str | None, lr: float, seed: int) -> float:
    """Test accuracy after the last epoch: from the file of results, or by a run that is then added to it."""
    wanted = {"mechanism": mechanism, "epsilon": epsilon, "lr": lr, "seed": seed}
    for line in _read():
        if wanted.items() <= line.items():
            return float(line["accuracy"])
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.of(
            "mnist", data_dir=data_dir, model="cnn", batch_size=250, epochs=5, momentum=0.9, clip_norm=1.0,
            delta=1e-5, epsilon=epsilon, lr=lr, seed=seed, **_noise(mechanism),
        )  # fmt: skip
        result = train(settings, Path(folder) / "run", data=_data(data_dir))
    line = {**wanted, "accuracy": result.accuracy[-1], "seconds": round(result.seconds, 1)}
    with RESULTS.open("a", encoding="utf-8") as file:
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
def _data(data_dir: str | None) -> Data:
    return datasets.load("mnist", data_dir)


def _read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


# -- the page --------------------------------------------------------------------------------------------------------


def write(lines: list[dict[str, Any]]) -> None:
    """docs/mnist.md and docs/mnist.png from all results on file."""
    table = _best(lines)
    mechanisms = list(dict.fromkeys(name for name, _ in table))
    epsilons = sorted({epsilon for _, epsilon in table})
    _plot(table, mechanisms, epsilons)
    head = "| | " + " | ".join(f"epsilon {epsilon:g}" for epsilon in epsilons) + " |"
    rule = "|" + "---|" * (len(epsilons) + 1)
    entries = {cell: _entry(*found) for cell, found in table.items()}
    rows = [
        f"| {TITLES.get(name, name)} | " + " | ".join(entries.get((name, e), "") for e in epsilons) + " |"
        for name in mechanisms
    ]
    text = "\n".join([PAGE, head, rule, *rows, "", "![accuracy against epsilon](mnist.png)", ""])
    (ROOT / "docs" / "mnist.md").write_text(text, encoding="utf-8")


PAGE = """# MNIST: accuracy against epsilon

Written by `python -m benchmarks.train --only mnist`. The setting of Figure 1(a) of Kairouz et al. 2021:
their network (26 010 parameters), 5 epochs of batch 250, momentum 0.9, clip norm 1, delta 1e-5, one example protected
(amplified DP-SGD: with or without it; the others: its gradients replaced by zero). Learning rates are tuned in each
cell on seed 0 by test accuracy, as in the paper; epsilon does not count the tuning. Entries: mean test accuracy in
percent over the seeds, its standard deviation, and the learning rate.

Amplification needs each batch to be a secret random sample. The others hold for a loader that shuffles in each epoch
(the tree is restarted and completed there), or for one that shuffles once and keeps the order.
"""


def _best(lines: list[dict[str, Any]]) -> Table:
    """The learning rate that ran with most seeds, then the best, of each cell; cells still being tuned are left out."""
    runs: dict[tuple[str, float], dict[float, list[float]]] = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        rates = runs.setdefault((line["mechanism"], line["epsilon"]), {})
        rates.setdefault(line["lr"], []).append(100 * line["accuracy"])
    best = {cell: max(rates.items(), key=lambda item: (len(item[1]), mean(item[1]))) for cell, rates in runs.items()}
    return {cell: found for cell, found in best.items() if len(found[1]) > 1}


def _entry(lr: float, accuracies: list[float]) -> str:
    spread = f" ± {stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    return f"{mean(accuracies):.2f}{spread} (lr {lr:g})"


def _plot(table: Table, mechanisms: list[str], epsilons: list[float]) -> None:
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
    axes.set_title("MNIST, 5 epochs of batch 250: mean and standard deviation over seeds", fontsize=11, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    figure.savefig(ROOT / "docs" / "mnist.png", dpi=150)
