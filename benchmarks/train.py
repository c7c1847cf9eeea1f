"""Whole training runs: what others print and we print for a shuffled loader, digits, and the MNIST grid of a paper.

    python -m benchmarks.train                    the two below
    python -m benchmarks.train --only opacus      epsilon of an ordinary loader: ours beside Opacus 1.6
    python -m benchmarks.train --only digits      test accuracy at epsilon 8, five seeds
    python -m benchmarks.train --only calls       Python calls, files and rooms that one step goes through
    python -m benchmarks.train --only accuracy    MNIST, Fashion-MNIST, CIFAR-10; --write: docs/accuracy.md
    python -m benchmarks.train --only mnist       Figure 1(a) of Kairouz et al. 2021: hours; writes docs/accuracy.md
    python -m benchmarks.train --only plain       the network of that figure on MNIST, without privacy
    python -m benchmarks.train --only cifar10     the same of CIFAR-10, one seed; writes docs/accuracy.md

A grid goes on where it was stopped: every run is a line of benchmarks/results/<data set>.jsonl.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import anyorder as ao
from anyorder.app import Settings, job, train
from anyorder.app import data as datasets
from benchmarks import accuracy, images
from benchmarks._peers import OPACUS, interpreter
from benchmarks._report import Row, show
from benchmarks.calls import calls

PARTS = ("opacus", "digits", "mnist", "plain", "cifar10", "calls", "accuracy")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    images.add_options(parser)
    accuracy.add_options(parser)
    chosen = parser.parse_args()
    parts = chosen.only or PARTS[:2]
    one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(chosen.processes, get_context("spawn"), **one_thread) as pool:
        rows = {
            "opacus": opacus,
            "digits": lambda: digits(pool, seeds=2 if chosen.quick else 5),
            "calls": calls,
            "accuracy": lambda: accuracy.rows(chosen),
            "mnist": lambda: images.run(images.MNIST, pool, chosen),
            "plain": lambda: plain(pool, seeds=1 if chosen.quick else 3),
            "cifar10": lambda: images.run(images.CIFAR10, pool, chosen),
        }
        show((row for part in parts for row in rows[part]()), chosen.json)


def opacus() -> Iterator[Row]:
    """The true epsilon of three epochs (q = 0.05, noise multiplier 1, delta 1e-5), and what Opacus prints."""
    found = subprocess.run(
        [interpreter(*OPACUS, module="opacus"), str(Path(__file__).parent / "peers" / "opacus_loaders.py")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    printed = json.loads(found.stdout)
    for text in sorted({text for run in printed["runs"].values() for text in run["warnings"]}):
        print(f"Opacus {printed['version']} warned: {text}", file=sys.stderr)  # of other things than the loader
    for name, run in printed["runs"].items():
        order = name.split()[0]
        epsilon = ao.plan(
            dataset_size=2000, batch_size=100, epochs=3, order=order, mechanism="independent",
            noise_multiplier=1.0, delta=1e-5,
        ).epsilon  # fmt: skip
        yield Row(f"{name} (Opacus {printed['version']})", epsilon, run["epsilon"], run["epsilon"] / epsilon, "epsilon")


def digits(pool: ProcessPoolExecutor, seeds: int) -> Iterator[Row]:
    """Mean test accuracy at epsilon 8, delta 1e-5: what `auto` picks beside the tree and DP-SGD's noise."""
    auto = mean(pool.map(_digits, ["auto"] * seeds, range(seeds)))
    for name in ("tree", "independent", "poisson", "balls-in-bins"):
        peer = mean(pool.map(_digits, [name] * seeds, range(seeds)))
        yield Row(f"digits at epsilon 8, auto; peer: {name}", auto, peer, peer / auto, "test accuracy")


_RATES = {
    "auto": 0.2,
    "tree": 0.2,
    "independent": 0.1,
    "poisson": 0.2,
    "balls-in-bins": 0.2,
}  # best of 0.02, 0.05, 0.1, 0.2, 0.5


def plain(pool: ProcessPoolExecutor, seeds: int) -> Iterator[Row]:
    """What the network of the MNIST grid reaches without clipping and noise, its rate tuned as the others' are."""
    rates = (0.02, 0.05, 0.1, 0.2)
    rate = max(zip(pool.map(_plain, rates, [0] * len(rates)), rates, strict=True))[1]
    found = mean(pool.map(_plain, [rate] * seeds, range(seeds)))
    yield Row(f"MNIST without privacy, {seeds} seeds, learning rate {rate:g}", 100 * found, None, None, "% correct")


def _plain(lr: float, seed: int) -> float:
    chosen = images.MNIST.settings
    torch.manual_seed(seed)
    data = datasets.load("mnist")
    model = job.build(chosen["model"], data.input_shape, data.num_classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=chosen["momentum"])
    loader = DataLoader(data.train, chosen["batch_size"], shuffle=True)
    for _ in range(chosen["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(data.test, 1000))
    return right / len(data.test)


def _digits(mechanism: str, seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        noise = {"order": "balls-in-bins"} if mechanism == "balls-in-bins" else {"mechanism": mechanism}
        settings = Settings.of("digits", epsilon=8.0, lr=_RATES[mechanism], seed=seed, **noise)
        return train(settings, Path(folder) / "run").accuracy[-1]


if __name__ == "__main__":
    main()
