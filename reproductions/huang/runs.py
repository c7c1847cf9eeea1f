"""Runs of the joint task that `benchmarks.federations.joint` has not: 4 and 512 owners, other epsilons, users.

They are kept in reproductions/results/huang2023_runs.jsonl, and only what is missing is run; $ANYORDER_DATA names the
folder with mnist and fashion_mnist.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from benchmarks.federations import joint as kept_joint
from benchmarks.federations import joint_task as task

import anyorder as ao
from anyorder.federated import joint
from reproductions import _runs

RUNS = Path(__file__).parents[1] / "results" / "huang2023_runs.jsonl"
MEASURED = "python -m reproductions huang2023 figure1"
ONLY_JOINT = "python -m benchmarks.federated --only joint"

ALL_OWNERS = (4, 16, 64, 128, 256, 512)
EPSILONS = (1.0, 10.0, 100.0)  # of 1, 2, 5, 10, 100
DATASETS = ("mnist", "fashion_mnist")
SEEDS = 3
SILO, FED_AVG, FULL, JOINT = "silo", "fed_avg", "full_dp", "two_phase"


class Cell(NamedTuple):
    """One training."""

    dataset: str
    n: int
    mode: str
    epsilon: float
    records: int
    seed: int


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Private(task.Private):
    """The benchmark's, at another epsilon."""

    epsilon: float = 1.0

    def plan(self) -> ao.Plan:
        """As there."""
        rows = len(self.data.y) // self.per_user
        return ao.plan(
            order=ao.participation.PoissonSampling(self.steps, self.coin),
            batch_size=round(rows * self.coin),
            mechanism="independent",
            epsilon=self.epsilon,
            delta=task.DELTA,
            clip_norm=self.clip_norm,
            dataset_size=rows,
        )


def cells(seeds: tuple[int, ...]) -> Iterator[Cell]:
    """What the benchmark has not."""
    for seed in seeds:
        for dataset in DATASETS:
            yield from (Cell(dataset, n, mode, 1.0, 1, seed) for mode in (JOINT, SILO) for n in (4, 512))
    for seed in seeds:
        yield from (Cell("mnist", 256, mode, epsilon, 1, seed) for epsilon in (100.0, 10.0) for mode in (FULL, JOINT))
        yield from (Cell("mnist", 256, FULL, 1.0, k, seed) for k in (20, 5))


def compute(cell: Cell, folder: Path) -> float:
    """Test accuracy."""
    data = task.pool(cell.dataset, folder, cell.seed)
    parts, tests = task.owners(data, cell.n, cell.seed)
    at = kept_joint._Setting(kept_joint.Cell(cell.dataset, cell.n, cell.mode, cell.seed), data, parts, tests, "")
    if cell.mode == SILO:
        return kept_joint._silo(at)
    if cell.mode == JOINT and cell.epsilon == 1 and cell.records == 1:
        return kept_joint._two_phase(at)  # which trains the shared part once for all numbers of owners
    rows, k = (data, 1) if cell.records == 1 else (task.users(data, parts, cell.records), cell.records)
    train = Private(rows, cell.seed, lr=1.0 if k < 10 else 0.3, per_user=k, epsilon=cell.epsilon)
    if cell.mode == FULL:
        return kept_joint._accuracy(joint.full_dp(at.model, parts, train), tests)
    head = kept_joint.HEAD
    return kept_joint._accuracy(joint.two_phase(at.model, parts, train, task.Head(), personal=head), tests)


def kept() -> dict[Cell, float]:
    """Accuracies of all runs, the benchmark's among them; full DP does not depend on n where a record is the unit."""
    found = {}
    for name, value in kept_joint._kept().items():
        dataset, n, mode, *rest = name.replace("users, ", "users ").split(", ")
        records = int(mode.split()[1]) if mode.startswith("users") else 1
        seed = int(rest[-1].removeprefix("seed "))
        mode = JOINT if mode.startswith("users") else mode
        found[Cell(dataset, int(n.removeprefix("n=")), mode, 1.0, records, seed)] = float(value["accuracy"])
    for row in _runs.kept(RUNS):
        found[Cell(**row["cell"])] = row["accuracy"]
    for cell, value in list(found.items()):
        if (cell.mode, cell.records, cell.n, cell.epsilon) == (FULL, 1, 16, 1.0):
            found |= {cell._replace(n=n): value for n in ALL_OWNERS}
    return found


def run_missing(seeds: tuple[int, ...]) -> None:
    """Train what is not on file."""
    have = kept()
    for cell in cells(seeds):
        if cell in have:
            continue
        folder = kept_joint._folder()
        if folder is None:
            raise SystemExit("ANYORDER_DATA names no folder with mnist and fashion_mnist, which missing runs need")
        start = time.process_time()
        accuracy = compute(cell, folder)
        row = {
            "cell": cell._asdict(),
            "accuracy": accuracy,
            "cpu_seconds": round(time.process_time() - start, 1),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        _runs.keep(RUNS, row)


# -- what is read ------------------------------------------------------------------------------------------------------


class Found:
    """Accuracies by seed."""

    def __init__(self, runs: dict[Cell, float]) -> None:
        self._runs = runs

    def of(self, dataset: str, n: int, mode: str, *, epsilon: float = 1.0, records: int = 1) -> list[float]:
        """Of each seed; ValueError where a run is missing."""
        cells = sorted(
            (cell.seed, value) for cell, value in self._runs.items() if cell[:5] == (dataset, n, mode, epsilon, records)
        )
        if not cells:
            raise ValueError(
                f"no run of {mode} with {n} owners on {dataset}, epsilon {epsilon:g}: {ONLY_JOINT}; {MEASURED}"
            )
        return [value for _, value in cells]

    def seeds(self, dataset: str, n: int, mode: str, *, epsilon: float = 1.0, records: int = 1) -> int:
        """How many runs are on file."""
        return sum(cell[:5] == (dataset, n, mode, epsilon, records) for cell in self._runs)

    def owners(self, modes: tuple[str, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Those numbers of owners that are measured in all modes, on both data sets, with all seeds."""
        return tuple(
            n for n in wanted if all(self.seeds(dataset, n, mode) >= SEEDS for dataset in DATASETS for mode in modes)
        )

    def mean(self, dataset: str, n: int, mode: str, **options: Any) -> float:
        """Over seeds."""
        return mean(self.of(dataset, n, mode, **options))

    def row(self, mode: str, dataset: str, owners: tuple[int, ...]) -> str:
        """For a table."""
        return f"{dataset}, {mode}: " + ", ".join(f"{n}: {told(self.of(dataset, n, mode))}" for n in owners)


def told(found: list[float]) -> str:
    """Percent."""
    return f"{100 * mean(found):.1f}" + (f" ± {100 * stdev(found):.1f}" if len(found) > 1 else "")
