"""Tables 1 and 2 of Huang et al. 2023: what owners gain who share a part of a network, at epsilon 1 and delta 1e-4.

Ours is test accuracy, mean over three seeds; the peer's what the paper prints for the mode. Modes:

- *silo*: each owner alone (12 owners by lot, each tested on about 320 images in the proportions of its classes);
- *fed_avg*: no privacy;
- *full_dp*: one model by DP-SGD on all records, its unit a record;
- *two_phase*: all but FC1 by DP-SGD on all records, its unit a record; then each owner fits FC1;
- *users, k records*: the same, its unit a user with k records at one owner (n = 256 only);
- *owner_level*: every owner's message is clipped: its unit is an owner.

For the last three the paper's number is its joint-DP, which is not private as printed (`reproductions`). Results are
kept in benchmarks/results/joint.json: a second run computes only what is missing. ANYORDER_DATA names the folder with
`mnist` and `fashion_mnist`, each with its parquet files. `tables()` writes them into docs/joint.md.
"""

import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch

from anyorder.federated import joint
from anyorder.federated.clients import Examples
from anyorder.federated.joint import Joint
from benchmarks._report import Row, judged
from benchmarks.federations import joint_task as task

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "joint.json"
COMMAND = "ANYORDER_DATA=FOLDER python -m benchmarks.federated --only joint"
SEEDS, OWNERS, DATASETS = 3, (16, 64, 128, 256), ("mnist", "fashion_mnist")
BY_LOT = 12
HEAD = ("fc1.*",)
TABLE_2 = ((), ("conv1",), ("conv2",), ("conv1", "conv2"), ("fc1",), ("conv1", "fc1"), ("conv2", "fc1"),
           ("conv1", "conv2", "fc1"))  # fmt: skip

PAPER = {
    ("mnist", "silo"): (0.9457, 0.9209, 0.8639, 0.7678),
    ("mnist", "fed_avg"): (0.9468, 0.9402, 0.9376, 0.9196),
    ("mnist", "full_dp"): (0.2926, 0.6982, 0.8081, 0.7399),
    ("mnist", "two_phase"): (0.3207, 0.7651, 0.8169, 0.7835),
    ("fashion_mnist", "silo"): (0.8575, 0.8498, 0.7506, 0.6489),
    ("fashion_mnist", "fed_avg"): (0.8301, 0.8232, 0.7676, 0.8010),
    ("fashion_mnist", "full_dp"): (0.4044, 0.5354, 0.6593, 0.6749),
    ("fashion_mnist", "two_phase"): (0.4205, 0.5564, 0.6719, 0.6908),
}
PAPER_USERS = {1: 0.7835, 5: 0.2517, 20: 0.1297}
PAPER_2 = (0.7399, 0.7240, 0.7090, 0.1863, 0.7835, 0.6606, 0.7291, 0.1727)


class Cell(NamedTuple):
    """One training: what, where, with which seed."""

    dataset: str
    n: int
    mode: str
    seed: int

    def __str__(self) -> str:
        return f"{self.dataset}, n={self.n}, {self.mode}, seed {self.seed}"


def rows(quick: bool) -> Iterator[Row]:
    """Every cell that is asked for, then the means beside the paper's."""
    folder = _folder()
    if folder is None:
        yield Row("joint: skipped, ANYORDER_DATA names no folder with mnist and fashion_mnist", None, None, None, "-")
        return
    if quick:
        for mode in MODES:
            found = compute(Cell("mnist", 8, mode, 0), folder, records=320)["accuracy"]
            yield Row(f"{mode}, 8 owners of 40 records, not tuned", found, None, None, "test accuracy")
        return
    for cell in cells():
        if str(cell) not in _kept():
            _keep(cell, compute(cell, folder))
    yield from _means()
    tables()


def cells() -> Iterator[Cell]:
    """Those of both tables, the most wanted first."""
    modes = ("full_dp", "two_phase", "silo", "fed_avg", "owner_level")
    for seed in range(SEEDS):
        for dataset in DATASETS:
            yield from (Cell(dataset, n, mode, seed) for mode in modes for n in OWNERS)
        layers = ("+".join(own) for own in TABLE_2 if own not in ((), ("fc1",)))  # these two are modes of Table 1
        yield from (Cell("mnist", 128, f"personal {names}", seed) for names in layers)
        yield from (Cell(dataset, 256, f"users, {k} records", seed) for k in (5, 20) for dataset in DATASETS)


def compute(cell: Cell, folder: Path, records: int = task.RECORDS) -> dict[str, Any]:
    """Train and test: {"accuracy": .., "seconds": CPU}."""
    start = time.process_time()
    data = task.pool(cell.dataset, folder, cell.seed, records)
    parts, tests = task.owners(data, cell.n, cell.seed)
    mode, _, rest = cell.mode.partition(" ")
    run = MODES[mode.rstrip(",")]
    accuracy = run(_Setting(cell, data, parts, tests, rest))
    return {"accuracy": round(accuracy, 5), "seconds": round(time.process_time() - start, 1)}


class _Setting(NamedTuple):
    cell: Cell
    data: task.Pool
    parts: dict[int, Examples]
    tests: dict[int, Examples]
    rest: str

    @property
    def model(self) -> task.TwoHeads:
        return task.network(self.cell.seed)


# -- modes -----------------------------------------------------------------------------------------------------------


def _full_dp(at: _Setting) -> float:
    return _accuracy(joint.full_dp(at.model, at.parts, _remembered(at, ())), at.tests)


def _two_phase(at: _Setting) -> float:
    return _accuracy(joint.two_phase(at.model, at.parts, _remembered(at, HEAD), task.Head(), personal=HEAD), at.tests)


def _users(at: _Setting) -> float:
    k = int(at.rest.split()[0])
    train = task.Private(task.users(at.data, at.parts, k), at.cell.seed, lr=1.0 if k < 10 else 0.3, per_user=k)
    return _accuracy(joint.two_phase(at.model, at.parts, train, task.Head(), personal=HEAD), at.tests)


def _personal(at: _Setting) -> float:
    """Table 2, where layers below the heads are personal too: owners by lot, as for silo."""
    own = [f"{layer}.*" for layer in at.rest.split("+")]
    parts, tests = _some_owners(at)
    fit = task.Steps(steps=60, lr=0.02, batch_size=32)
    train = task.Private(at.data, at.cell.seed, lr=1.0)
    return _accuracy(joint.two_phase(at.model, parts, train, fit, personal=own), tests)


def _silo(at: _Setting) -> float:
    parts, tests = _some_owners(at)
    per_owner = len(at.data.y) // at.cell.n
    steps, shift = (200, 2) if at.cell.dataset == "mnist" else (400, 0)
    fit = task.Steps(steps=steps if per_owner > 300 else steps // 2, lr=0.03, shift=shift)
    return _accuracy(joint.silo(at.model, parts, fit, seed=at.cell.seed), tests)


def _fed_avg(at: _Setting) -> float:
    few = at.cell.n < 20  # owners with many steps of their own in a round
    slow = at.cell.dataset == "fashion_mnist"
    lr = 0.1 if at.cell.n > 200 or slow else 0.05  # with few records there is little that a step could undo
    lr = 0.03 if slow and few else lr
    rounds = (8 if few else 12) * (3 if slow else 1)
    change = task.Epochs(1, lr, batch_size=16 if few else 8)
    return _accuracy(joint.fed_avg(at.model, at.parts, change, rounds=rounds, seed=at.cell.seed), at.tests)


def _owner_level(at: _Setting) -> float:
    import anyorder as ao

    rounds = 2
    plan = ao.plan(
        order=ao.participation.MinSeparation(n=rounds, b=1, k=rounds), batch_size=at.cell.n, unit="owner",
        epsilon=task.EPSILON, delta=task.DELTA, clip_norm=1.0,
    )  # fmt: skip
    model = at.model
    names = joint.split(model, HEAD).shared
    optimizer = torch.optim.SGD([model.get_parameter(name) for name in names], lr=0.3)
    server = ao.federated.Server(plan, model, optimizer, report_goal=at.cell.n, key=bytes([at.cell.seed]) * 32)
    change, fit = task.Epochs(0.5, lr=0.02, batch_size=16), task.Head(steps=20)
    return _accuracy(joint.owner_level(server, at.parts, change, fit, personal=HEAD, seed=at.cell.seed), at.tests)


MODES: dict[str, Callable[[_Setting], float]] = {
    "full_dp": _full_dp, "two_phase": _two_phase, "users": _users, "personal": _personal, "silo": _silo,
    "fed_avg": _fed_avg, "owner_level": _owner_level,
}  # fmt: skip


def _remembered(at: _Setting, personal: tuple[str, ...]) -> joint.Train:
    """Training on records does not ask who owns them: it is made once for all n. What it released is kept meanwhile."""

    def train(model: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> Any:
        state, certificate = _trained(at.cell.dataset, at.cell.seed, personal, len(at.data.y))
        model.load_state_dict(state)
        return certificate

    return train


@functools.lru_cache(maxsize=2)
def _trained(dataset: str, seed: int, personal: tuple[str, ...], records: int) -> tuple[dict[str, Any], Any]:
    model = task.network(seed)
    data = task.pool(dataset, _folder(), seed, records)
    shared = joint.split(model, personal).shared
    certificate = task.Private(data, seed, lr=1.0)(model, [model.get_parameter(name) for name in shared])
    return model.state_dict(), certificate


def _some_owners(at: _Setting) -> tuple[dict[int, Examples], dict[int, Examples]]:
    """12 owners by lot; each is tested on about 320 of all test images, in the proportions of its classes."""
    few = min(BY_LOT, at.cell.n)
    generator = np.random.default_rng(at.cell.seed)
    chosen = generator.choice(at.cell.n, few, replace=False).tolist()
    tests = {}
    for owner in chosen:
        counts = torch.bincount(at.parts[owner][1], minlength=task.CLASSES)
        wanted = (320 * counts / counts.sum()).round().int().tolist()
        own = [torch.from_numpy(generator.permutation(np.flatnonzero(at.data.test_y.numpy() == c))[:m])
               for c, m in enumerate(wanted)]  # fmt: skip
        tests[owner] = (at.data.test_x[torch.cat(own)], at.data.test_y[torch.cat(own)])
    return {owner: at.parts[owner] for owner in chosen}, tests


def _accuracy(found: Joint, tests: dict[int, Examples]) -> float:
    """Of all test images, the part that their owner's model gets right."""
    right = 0
    with torch.no_grad():
        for owner, (x, y) in tests.items():
            right += int((found.model_of(owner)(x).argmax(1) == y).sum())
    return right / sum(len(y) for _, y in tests.values())


# -- what is kept ----------------------------------------------------------------------------------------------------


def _folder() -> Path | None:
    folder = Path(os.environ.get("ANYORDER_DATA", ""))
    return folder if os.environ.get("ANYORDER_DATA") and all((folder / name).is_dir() for name in DATASETS) else None


def _kept() -> dict[str, dict[str, float]]:
    return json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else {}


def _keep(cell: Cell, found: dict[str, float]) -> None:
    text = json.dumps({"command": COMMAND, "cells": _kept() | {str(cell): found}}, indent=1)
    partial = RESULTS.with_suffix(".tmp")
    partial.write_text(text + "\n")
    partial.replace(RESULTS)
    print(cell, found, flush=True)


def _values(dataset: str, n: int, mode: str) -> list[float]:
    kept = _kept()
    found = [kept.get(str(Cell(dataset, n, mode, seed))) for seed in range(SEEDS)]
    return [cell["accuracy"] for cell in found if cell]


# -- the tables ------------------------------------------------------------------------------------------------------


def _means() -> Iterator[Row]:
    """The mean of each cell beside the paper's; for silo, FedAvg and full DP the paper's is the target."""
    for (dataset, mode), printed in PAPER.items():
        for n, theirs in zip(OWNERS, printed, strict=True):
            if found := _values(dataset, n, mode):
                name, ratio = f"{dataset}, n={n}, {mode}", mean(found) / theirs
                yield Row(
                    name if mode == "two_phase" else judged(name, 1.0, ratio), mean(found), theirs, ratio, "accuracy"
                )


def tables() -> None:
    """Write the tables into docs/joint.md, between its marks, and docs/joint.png."""
    page = ROOT / "docs" / "joint.md"
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    text = "\n".join([BEGIN, *_table_1(), "", *_table_2(), "", *_table_users(), END])
    page.write_text(head + text + tail, encoding="utf-8")
    _plot()


BEGIN, END = "<!-- tables: written by the benchmark -->", "<!-- end of tables -->"
NAMES = {
    "silo": "each owner alone", "fed_avg": "FedAvg, not private", "full_dp": "full DP, by record",
    "two_phase": "two phases, by record", "owner_level": "by owner",
}  # fmt: skip


def _table_1() -> Iterator[str]:
    yield "| | " + " | ".join(f"n = {n}" for n in OWNERS) + " |"
    yield "|---|" + "---|" * len(OWNERS)
    for dataset in DATASETS:
        for mode, title in NAMES.items():
            entries = [_entry(_values(dataset, n, mode)) for n in OWNERS]
            yield f"| {dataset}: {title} | " + " | ".join(entries) + " |"
            if printed := PAPER.get((dataset, mode)):
                theirs = "their joint-DP, not private as printed" if mode == "two_phase" else "as they print it"
                yield f"| *{theirs}* | " + " | ".join(f"*{100 * value:.1f}*" for value in printed) + " |"


def _table_2() -> Iterator[str]:
    yield "| personal layers (mnist, n = 128) | two phases, by record | their joint-DP |"
    yield "|---|---|---|"
    for own, printed in zip(TABLE_2, PAPER_2, strict=True):
        mode = {(): "full_dp", ("fc1",): "two_phase"}.get(own, f"personal {'+'.join(own)}")
        yield f"| {', '.join(own) or 'none'} | {_entry(_values('mnist', 128, mode))} | *{100 * printed:.1f}* |"


def _table_users() -> Iterator[str]:
    yield "| records of a user (n = 256) | mnist, two phases | fashion_mnist, two phases | their joint-DP, mnist |"
    yield "|---|---|---|---|"
    for k, printed in PAPER_USERS.items():
        mode = "two_phase" if k == 1 else f"users, {k} records"
        entries = " | ".join(_entry(_values(dataset, 256, mode)) for dataset in DATASETS)
        yield f"| {k} | {entries} | *{100 * printed:.1f}* |"


def _entry(found: list[float]) -> str:
    if not found:
        return ""
    spread = f"±{100 * stdev(found):.1f}" if len(found) > 1 else ""
    return f"{100 * mean(found):.1f}{spread}" + (f" ({len(found)})" if len(found) < SEEDS else "")


def _plot() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    for axes, dataset in zip(figure.subplots(1, 2), DATASETS, strict=True):
        for i, (mode, title) in enumerate(NAMES.items()):
            points = [(n, _values(dataset, n, mode)) for n in OWNERS]
            some = [(n, 100 * mean(found)) for n, found in points if found]
            axes.plot([n for n, _ in some], [value for _, value in some], marker="os^Dv"[i], color=f"C{i}",
                      label=title if dataset == DATASETS[0] else None)  # fmt: skip
        axes.plot(OWNERS, [100 * value for value in PAPER[dataset, "two_phase"]], "k:", linewidth=1,
                  label="joint-DP as printed in the paper" if dataset == DATASETS[0] else None)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(OWNERS, [str(n) for n in OWNERS])
        axes.set_xlabel("owners, 10 000 records together")
        axes.set_title(dataset, loc="left", fontsize=11)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("test accuracy (%)")
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(ROOT / "docs" / "joint.png", dpi=120)
