"""Test accuracy that people compare: MNIST, Fashion-MNIST and CIFAR-10 from scratch, beside published figures.

Every run is `anyorder train` with the settings of a data set, and a line of benchmarks/results/accuracy.jsonl; a run
that is on file is not run again. docs/accuracy.md has the table between two marks.
"""

import argparse
import functools
import json
import os
import resource
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from anyorder.app import Settings, train
from anyorder.app import job as parts
from anyorder.app.data import Data
from benchmarks._report import Row, processor

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accuracy.jsonl"
PAGE = ROOT / "docs" / "accuracy.md"
MARKS = "<!-- table: begin -->", "<!-- table: end -->"
DATASETS = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
SIZES = {"mnist": 60_000, "fashion_mnist": 60_000, "cifar10": 50_000}
EPSILONS = (3.0, 8.0, 1.0)
ORDERS = {"fixed": "shuffled once, no secret", "poisson": "secret Poisson sampling"}
# (data set, epsilon) -> percent and who says so; all at delta 1e-5 and with secret sampling
PUBLISHED = {
    ("mnist", 3.0): (98.7, "Tramer and Boneh 2021"),
    ("fashion_mnist", 3.0): (89.7, "Tramer and Boneh 2021"),
    ("cifar10", 3.0): (69.3, "Tramer and Boneh 2021"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to run; epsilons, seeds and the folder of data sets are options of the grids too."""
    parser.add_argument("--datasets", nargs="+", choices=tuple(DATASETS), help="accuracy: these alone")
    parser.add_argument("--orders", nargs="+", choices=tuple(ORDERS), help="accuracy: these alone")
    parser.add_argument("--write", action="store_true", help="accuracy: put the table into docs/accuracy.md")


def rows(chosen: argparse.Namespace) -> Iterator[Row]:
    """What is missing is run, cell by cell; then the page's table is written, if asked for."""
    if chosen.quick:
        yield from _quick()
        return
    for dataset in chosen.datasets or DATASETS:
        for order in chosen.orders or ORDERS:
            for epsilon in chosen.epsilons or EPSILONS:
                for seed in range(chosen.seeds or 1):
                    line = run(dataset, order, epsilon, seed, chosen.data_dir)
                    bar = PUBLISHED.get((dataset, epsilon), (None, ""))[0]
                    ratio = None if bar is None else line["accuracy"] / bar
                    yield Row(
                        f"{dataset}, {order}, epsilon {epsilon:g}, seed {seed}", line["accuracy"], bar, ratio, "%"
                    )
    if chosen.write:
        write()


def run(dataset: str, order: str, epsilon: float, seed: int, data_dir: str | None) -> dict[str, Any]:
    """One run, or its line on file."""
    wanted = {"dataset": dataset, "order": order, "epsilon": epsilon, "seed": seed}
    for line in read():
        if wanted.items() <= line.items() and is_of_today(line):
            return line
    settings = settings_of(dataset, order, epsilon, seed, data_dir)
    with tempfile.TemporaryDirectory() as folder:
        result = train(settings, Path(folder) / "run", data=_data(dataset, data_dir))
    line = {
        **wanted, "accuracy": round(100 * result.accuracy[-1], 2), "certified_epsilon": result.plan.epsilon,
        "delta": result.plan.delta, "mechanism": result.plan.strategy.describe(), "seconds": round(result.seconds, 1),
        "cores": torch.get_num_threads(), "machine_cores": os.cpu_count(),
        "plan": result.plan.public().digest, "date": date.today().isoformat(), "machine": processor(),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "settings": settings.to_dict() | {"data_dir": None},
    }  # fmt: skip
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return line


def settings_of(dataset: str, order: str, epsilon: float, seed: int, data_dir: str | None) -> Settings:
    """Those of `anyorder train` for the data set, in an order."""
    folder = None if data_dir is None else str(Path(data_dir) / dataset)
    return Settings.of(dataset, data_dir=folder, epsilon=epsilon, order=order, seed=seed)


def is_of_today(line: dict[str, Any]) -> bool:
    """Whether `anyorder train` would take a line's settings now, and the line's plan is the one that it would make."""
    return has_settings_of_today(line) and line.get("plan") == plan_digest(
        line["dataset"], line["order"], line["epsilon"]
    )


def has_settings_of_today(line: dict[str, Any]) -> bool:
    """Whether a line's settings are what `anyorder train` would take now; those of others stay on file."""
    now = settings_of(line["dataset"], line["order"], line["epsilon"], line["seed"], None)
    kept, wanted = ({name: x for name, x in one.items() if x is not None} for one in (line["settings"], now.to_dict()))
    return bool(kept == wanted)  # a setting that came later, and is not given, is none


@functools.cache
def plan_digest(dataset: str, order: str, epsilon: float) -> str:
    """The digest of the plan that `anyorder train` makes now, whatever the seed. Seconds, once."""
    return parts.plan_of(settings_of(dataset, order, epsilon, 0, None), SIZES[dataset]).public().digest


@functools.lru_cache(maxsize=1)
def _data(dataset: str, data_dir: str | None) -> Data:
    return parts.make_data(settings_of(dataset, "fixed", 1.0, 0, data_dir))


def read() -> list[dict[str, Any]]:
    """The lines on file."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def _quick() -> Iterator[Row]:
    """The same at small size: made-up images of two textures, so that no data set is needed."""
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.normal(size=(1200, 1, 16, 16))).float()
    y = torch.arange(1200) % 2
    x = torch.where(y[:, None, None, None] == 1, x + x.roll(1, -1), x + x.roll(1, -2))
    data = Data("textures", TensorDataset(x[:1000], y[:1000]), TensorDataset(x[1000:], y[1000:]), (1, 16, 16), 2)
    for order in ORDERS:
        settings = Settings.of(
            "textures", model="scattering", epsilon=8.0, order=order, batch_size=200, epochs=6,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            accuracy = 100 * train(settings, Path(folder) / "run", data=data).accuracy[-1]
        yield Row(f"textures (made up), {order}, epsilon 8", accuracy, 50.0, accuracy / 50, "%")


# -- the page --------------------------------------------------------------------------------------------------------


def write() -> None:
    """Put the table of all results on file into the page."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = (text.index(mark) for mark in MARKS)
    PAGE.write_text(f"{text[: begin + len(MARKS[0])]}\n\n{table(read())}\n\n{text[end:]}", encoding="utf-8")


def table(lines: list[dict[str, Any]]) -> str:
    """Test accuracy in percent with the settings of today: data sets and orders down, budgets across.

    A cell without a run on today's plan says so: `python -m benchmarks.train --only accuracy` runs it.
    """
    epsilons = sorted(EPSILONS)
    head = "| data | order | " + " | ".join(f"epsilon {e:g}" for e in epsilons) + " |"
    found = [head, "|---|---|" + "---|" * len(epsilons)]
    for dataset, title in DATASETS.items():
        for order, words in ORDERS.items():
            cells = [_cell([line for line in lines if _is(line, dataset, order, e)]) for e in epsilons]
            found.append(f"| {title} | {words} | " + " | ".join(cells) + " |")
    return "\n".join(found)


def _is(line: dict[str, Any], dataset: str, order: str, epsilon: float) -> bool:
    return (line["dataset"], line["order"], line["epsilon"]) == (dataset, order, epsilon) and has_settings_of_today(
        line
    )


def _cell(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return "not run"
    now = [line for line in lines if "plan" in line and is_of_today(line)]
    lines, earlier = (now, "") if now else (lines, ", of an earlier plan")
    values = [line["accuracy"] for line in lines]
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{spread} ({len(values)} {'seed' if len(values) == 1 else 'seeds'}{earlier})"
