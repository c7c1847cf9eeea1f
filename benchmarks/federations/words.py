"""Next-word prediction on the Brown corpus, a passage of ten sentences for each user: the setting of [Kairouz et al.
2021] Table 4, scaled down.

A row is a mechanism at an epsilon, after one pass or three: test accuracy in percent, mean over seeds where there are
several. The server's learning rate of each is the best of a few, tried with seed 0; epsilon does not count the tuning.
Runs are kept in benchmarks/results/words.jsonl, and only what is missing is run; docs/experiments.md and its
pictures are written from it.

    python -m benchmarks.federations.words --data-dir FOLDER          the same; FOLDER has Brown's Parquet file
    python -m benchmarks.federations.words --data-dir FOLDER --full   the paper's LSTM and vocabulary: 4 050 748 weights
    python -m benchmarks.federations.words --write                    the page alone
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import anyorder as ao
from anyorder.federated import LocalTraining, Server
from anyorder.participation import MinSeparation, PoissonSampling, SingleEpoch
from anyorder.patterns import Participation
from anyorder.plan.plan import Plan
from benchmarks._report import Row, show
from benchmarks.federations.next_word import Brown, WordLSTM, accuracy, read_brown, word_loss

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "words.jsonl"
DATA = os.environ.get("ANYORDER_BROWN", "brown")

MOMENTUM, DELTA = 0.9, 1e-4
MECHANISMS = {  # words of the table -> of the plan
    "tree": "tree",
    "blt": "blt, 2 buffers",
    "independent": "independent",
    "poisson": "poisson",
}


@dataclass(frozen=True)
class Size:
    """How large a model on which users, and how they train."""

    vocabulary: int = 500
    embedding: int = 16
    hidden: int = 32
    passage: int = 10
    report_goal: int = 25
    clip_norm: float = 0.15
    client_lr: float = 0.5


SMALL = Size()
FULL = Size(vocabulary=10_000, embedding=96, hidden=670)


# -- one run ---------------------------------------------------------------------------------------------------------


def plan_of(mechanism: str, epsilon: float, passes: int, population: int, size: Size) -> Plan:
    """Users in one order, kept over the passes: so each is away for a pass. Or drawn in secret: "poisson"."""
    s = population // size.report_goal
    rule: Participation = SingleEpoch(s) if passes == 1 else MinSeparation(passes * s, s, passes)
    if mechanism == "poisson":
        rule = PoissonSampling(passes * s, size.report_goal / population)
    return ao.plan(
        order=rule, mechanism="independent" if mechanism == "poisson" else MECHANISMS[mechanism], epsilon=epsilon,
        delta=DELTA, clip_norm=size.clip_norm, optimizer=ao.SGD(momentum=MOMENTUM), batch_size=size.report_goal,
        dataset_size=population, unit="user",
    )  # fmt: skip


def trained(
    brown: Brown, size: Size, mechanism: str, epsilon: float | None, passes: int, lr: float, seed: int
) -> float:
    """Test accuracy of the last model; epsilon None is without noise, clipped all the same."""
    names = list(brown.users)
    names = [names[i] for i in torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()]
    model = WordLSTM(brown.words, embedding=size.embedding, hidden=size.hidden, seed=seed)
    training = LocalTraining(word_loss, lr=size.client_lr, batch_size=16, epochs=1, max_examples=256)
    plan = None if epsilon is None else plan_of(mechanism, epsilon, passes, len(names), size)
    key = hashlib.sha256(f"words {mechanism} {epsilon} {passes} {lr} {seed}".encode()).digest()  # no secrets here
    if plan is None or mechanism == "poisson":
        _by_hand(brown, names, model, training, plan, key, size, passes, lr)
    else:
        _by_server(brown, names, model, training, plan, key, lr)
    return accuracy(model, brown.test)


def _by_server(
    brown: Brown, names: list[str], model: WordLSTM, training: LocalTraining, plan: Plan, key: bytes, lr: float
) -> None:
    server = Server(plan, model, ao.FTRL(model.parameters(), lr=lr, momentum=MOMENTUM), key=key)
    s = len(names) // plan.batch_size
    for t in range(plan.n):
        cohort = names[t % s * plan.batch_size : (t % s + 1) * plan.batch_size]
        rows = training.changes(model, server.layout, [brown.users[name] for name in cohort], [t] * len(cohort))
        with server.open() as opened:
            opened.add_rows(cohort, rows)
    server.close()


def _by_hand(
    brown: Brown, names: list[str], model: WordLSTM, training: LocalTraining, plan: Plan | None, key: bytes, size: Size,
    passes: int, lr: float,
) -> None:  # fmt: skip
    """What no server offers: rounds without noise, and cohorts drawn in secret, whose answers none may drop."""
    from anyorder.federated import Layout

    layout = Layout.of(dict(model.named_parameters()))
    optimizer = ao.FTRL(model.parameters(), lr=lr, momentum=MOMENTUM)
    release = None if plan is None else ao.Release(plan, layout.size, key=key)
    s = len(names) // size.report_goal
    for t in range(passes * s):
        if release is None:
            units = list(range(t % s * size.report_goal, (t % s + 1) * size.report_goal))
        else:
            units = release.sample(len(names)).tolist()
        rows = training.changes(model, layout, [brown.users[names[i]] for i in units], [t] * len(units))
        total = _clipped_sum(rows, size.clip_norm)
        moved = total / size.report_goal if release is None else release.step(units, total)
        for p, piece in zip(model.parameters(), layout.named(moved).values(), strict=True):
            p.grad = -piece
        optimizer.step()


def _clipped_sum(rows: Tensor, clip_norm: float) -> Tensor:
    factors = (clip_norm / rows.norm(dim=1)).clamp(max=1 - 1e-6)
    return factors @ rows


# -- what is run -----------------------------------------------------------------------------------------------------


Cell = tuple[str, float | None, int]
"""A place of the table: mechanism, epsilon (None: no noise), passes."""

RATES: dict[Cell, tuple[float, ...]] = {  # the server's learning rates that are tried, with seed 0
    ("none", None, 1): (3.0, 10.0),
    ("tree", 8.0, 1): (1.0, 3.0, 10.0),
    ("independent", 8.0, 1): (0.3, 1.0, 3.0),
    ("poisson", 8.0, 1): (1.0, 3.0),
    ("tree", 2.0, 1): (0.3, 1.0, 3.0),
    ("independent", 2.0, 1): (0.1, 0.3, 1.0),
    ("poisson", 2.0, 1): (0.3, 1.0),
    ("none", None, 3): (3.0,),
    ("tree", 8.0, 3): (1.0, 3.0),
    ("independent", 8.0, 3): (0.3, 1.0),
}  # BLT takes the tree's best
CELLS: list[Cell] = [
    *((name, 8.0, 1) for name in ("tree", "independent", "blt", "poisson")),
    *((name, 2.0, 1) for name in ("tree", "independent", "blt", "poisson")),
    ("none", None, 1),
    *((name, 8.0, 3) for name in ("tree", "independent", "blt")),
    ("none", None, 3),
]


class Runs:
    """Accuracies, from the file or by a run that is then added to it."""

    def __init__(self, size: Size, folder: str) -> None:
        self._size, self._folder = size, folder

    @cached_property
    def brown(self) -> Brown:
        """Read when the first run is missing."""
        return read_brown(self._folder, vocabulary=self._size.vocabulary, passage=self._size.passage)

    def accuracy(self, cell: Cell, lr: float, seed: int) -> float:
        mechanism, epsilon, passes = cell
        wanted = {
            "mechanism": mechanism, "epsilon": epsilon, "passes": passes, "lr": lr, "seed": seed,
            "size": asdict(self._size),
        }  # fmt: skip
        for line in read_results():
            if wanted.items() <= line.items():
                return float(line["accuracy"])
        start = time.process_time()
        found = trained(self.brown, self._size, mechanism, epsilon, passes, lr, seed)
        line = {**wanted, "accuracy": found, "cpu_seconds": round(time.process_time() - start, 1)}
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return found

    def best_rate(self, cell: Cell) -> float:
        """The best of the rates that are tried, with seed 0."""
        mechanism, epsilon, passes = cell
        cell = ("tree" if mechanism == "blt" else mechanism, epsilon, passes)
        return max(RATES[cell], key=lambda rate: self.accuracy(cell, rate, 0))


def read_results() -> list[dict[str, Any]]:
    """All runs on file."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def grid(size: Size, folder: str, cells: list[Cell], seeds: int) -> Iterator[Row]:
    """What is missing of the cells, by a search for the rate and then the other seeds; the page is written anew."""
    runs = Runs(size, folder)
    for cell in cells:
        mechanism, epsilon, passes = cell
        rate = runs.best_rate(cell)
        found = mean(runs.accuracy(cell, rate, seed) for seed in range(seeds))
        level = "no noise" if epsilon is None else f"epsilon {epsilon:g}"
        yield Row(f"words, {mechanism}, {level}, passes: {passes}", 100 * found, None, None, "% right")
    if size == SMALL:
        from benchmarks.federations.words_page import write

        write()


def rows(quick: bool) -> Iterator[Row]:
    """One cell of a very small model if quick; else all, as `main` runs them."""
    if quick:
        tiny = Size(vocabulary=100, embedding=8, hidden=8, report_goal=500)
        brown = read_brown(DATA, vocabulary=tiny.vocabulary)
        found = trained(brown, tiny, "tree", 8.0, 1, 1.0, 0)
        yield Row("words, a very small model, tree, epsilon 8, one pass", 100 * found, None, None, "% right")
        return
    yield from grid(SMALL, DATA, CELLS, seeds=1)


def main() -> None:
    """The grid, or a part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=DATA, help="folder with Brown's Parquet file; default: $ANYORDER_BROWN")
    parser.add_argument("--full", action="store_true", help="the paper's model: a pass takes a quarter of an hour")
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--mechanisms", nargs="+", default=["none", *MECHANISMS])
    parser.add_argument("--epsilons", type=float, nargs="+")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the page of what is on file, and run nothing")
    chosen = parser.parse_args()
    if chosen.write:
        from benchmarks.federations.words_page import write

        write()
        return
    cells = [
        (name, epsilon, passes) for name, epsilon, passes in CELLS
        if name in chosen.mechanisms and passes in chosen.passes
        and (chosen.epsilons is None or epsilon is None or epsilon in chosen.epsilons)
    ]  # fmt: skip
    show(grid(FULL if chosen.full else SMALL, chosen.data_dir, cells, chosen.seeds), as_json=False)


if __name__ == "__main__":
    main()
