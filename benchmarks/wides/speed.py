"""Seconds of the processor a step, and memory: tables of 100 000 x 100 and 1 000 000 x 100, batches of 64 and 2000.

The task is that of `benchmarks/peers/wide_task.py`, the same for all: pairs of words with 8 negatives, drawn evenly,
so that almost every row of a batch is another one. A step goes from the loader to the end of `optimizer.step()`; one
thread. Every program runs in a process of its own, all take turns, and a number is the median over the steps of all
turns. Ours are timed when most rows have been read before, each at another step: else the jumps would be few and alike.

Rows: "ours" is `ao.PrivacyEngine` with the noise that is named; the peer is non-private training with
`nn.Embedding(sparse=True)`, Opacus (ghost clipping; it has no sparse noise) or tensorflow_privacy's AdaFEST, which is
run from its sources, as no package of it has that part. The ratio is peer / ours. Memory is how much a process grows,
at most, after its data are made and, of ours, a rehearsal on a small table: beside what the table and what is kept of
it take.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import anyorder as ao
from benchmarks._peers import OPACUS, TENSORFLOW, TENSORFLOW_PRIVACY, interpreter, sources
from benchmarks._report import Row, judged
from benchmarks.peers.wide_model import Batches, Pairs, losses
from benchmarks.peers.wide_task import CLIP, IDS, LR, WARM, WIDTH, Clock, batches
from benchmarks.wides.page import put

PEERS = Path(__file__).parents[1] / "peers"
LAZY = {  # words of the table -> of the plan
    "lazy, independent": "independent",
    "lazy, BLT of 2 buffers": "blt, 2 buffers",
    "lazy, BLT of 3 buffers": "blt, 3 buffers",
    "lazy, banded inverse of 4": "banded inverse, 4 bands",
    "lazy, tree": "tree",
}
THRESHOLD = 4.0  # of the selection by counts, and of the peer's
KEPT = {"independent": 0, "blt, 2 buffers": 2, "blt, 3 buffers": 3, "banded inverse, 4 bands": 3, "tree": 0}
"""Numbers beside each of the table's."""


def rows(quick: bool) -> Iterator[Row]:
    """Times and memory of every size; a whole measurement is written on the page."""
    sizes = [(20_000, 64)] if quick else [(100_000, 64), (1_000_000, 64), (100_000, 2000), (1_000_000, 2000)]
    columns: dict[str, dict[str, float]] = {}
    for size, batch in sizes:
        where = f"{size} rows, batch {batch}"
        times, memory = _of(size, batch, turns=1 if quick else 3)
        yield from _times(times, where)
        yield from _memory(memory, size, where)
        columns |= {f"{where}, CPU ms": times, f"{where}, MB": memory}
    if not quick:
        put("speed", _table(columns))


def _table(columns: dict[str, dict[str, float]]) -> Iterator[str]:
    """A line for each way."""
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name in next(iter(columns.values())):
        yield f"| {name} | {' | '.join(format(float(format(found[name], '.3g')), 'g') for found in columns.values())} |"


def _of(size: int, batch: int, turns: int) -> tuple[dict[str, float], dict[str, float]]:
    """Of each way the milliseconds of a step, and the MB that the process grew by."""
    commands = {name: [*_US, kind, size, batch, 100] for name, kind in _ours().items()}
    commands["dense"] = [*_US, "dense", size, batch, 5]
    commands["Opacus"] = [interpreter(*OPACUS, module="opacus"), PEERS / "wide_opacus.py", "ghost", size, batch, 5]
    tensorflow = [interpreter(*TENSORFLOW, module="tensorflow_probability"), PEERS / "wide_tensorflow.py"]
    commands["tensorflow_privacy's AdaFEST"] = [*tensorflow, "adafest", size, batch, 30]
    commands["Keras, non-private"] = [*tensorflow, "plain", size, batch, 30]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for _ in range(turns):
        for name, command in commands.items():
            found[name].append(_measured([str(word) for word in command]))
    times = {name: median(1000 * t for run in runs for t in run["seconds"]) for name, runs in found.items()}
    return times, {name: median(run["bytes"] for run in runs) / 2**20 for name, runs in found.items()}


_US = (sys.executable, "-m", "benchmarks.wides.speed")


def _ours() -> dict[str, str]:
    return {"non-private": "plain", **LAZY, "selected by counts": "counts"}


def _times(times: dict[str, float], where: str) -> Iterator[Row]:
    def row(ours: str, peer: str, target: float | None = None) -> Row:
        ratio, title = times[peer] / times[ours], f"{where}: {ours}; peer: {peer}"
        return Row(title if target is None else judged(title, target, ratio), times[ours], times[peer], ratio, "CPU ms")

    for name in LAZY:
        yield row(name, "non-private", 1 / 3)
    yield row("selected by counts", "non-private")
    for name in list(LAZY)[1:]:
        yield row(name, "lazy, independent", 1 / 1.5)
    for name in ("lazy, BLT of 2 buffers", "selected by counts"):
        for peer in ("dense", "Opacus", "tensorflow_privacy's AdaFEST"):
            yield row(name, peer)
    yield row("Keras, non-private", "tensorflow_privacy's AdaFEST")


def _memory(memory: dict[str, float], size: int, where: str) -> Iterator[Row]:
    """Ours: how much the process grew; the peer: the table, what is kept of it, and a number for each row."""
    for name in ("non-private", *LAZY, "selected by counts"):
        stated = _stated(name, size)
        title = f"{where}: memory, {name}; peer: table and state"
        yield Row(title, memory[name], stated, stated / memory[name], "MB")
    for name in ("dense", "Opacus", "tensorflow_privacy's AdaFEST"):
        table = _stated(name, size)
        yield Row(f"{where}: memory, {name}; peer: table", memory[name], table, table / memory[name], "MB")


def _stated(name: str, size: int) -> float:
    """MB of the table, of what a way keeps of it, and of a number for each row."""
    table = size * WIDTH * 4 / 2**20
    return table * (1 + KEPT.get(LAZY.get(name, ""), 0)) + (size * 8 / 2**20 if name in LAZY else 0)


def _measured(command: Sequence[str]) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(sources(*TENSORFLOW_PRIVACY))]))
    one = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **one})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


# -- what runs in a process of its own ---------------------------------------------------------------------------------


def main() -> None:
    """KIND ROWS BATCH STEPS: print the seconds of each step, and the memory, as JSON."""
    torch.set_num_threads(1)
    kind, size, batch, steps = sys.argv[1], *(int(word) for word in sys.argv[2:])
    warm = WARM if kind in ("plain", "dense") else max(WARM, min(2500, 2 * size // (batch * IDS)))
    _train(kind, 200, 8, 3, None)  # loads what is loaded on first use: it is no part of the memory of a table
    _train(kind, size, batch, steps, warm)


def _train(kind: str, size: int, batch: int, steps: int, warm: int | None) -> None:
    """With a clock, which reports, or as a rehearsal."""
    steps += warm or 0
    data = Batches(batches(size, batch, steps))
    clock = Clock(warm or 0)
    model: Any = Pairs(size, WIDTH, sparse=kind != "dense")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
    loader: Any = data.loader()
    if kind != "plain":
        engine = ao.PrivacyEngine(_plan(kind, batch, steps))
        model, optimizer, loader = engine.make_private(model, optimizer, loader)
    for ids in loader:
        optimizer.zero_grad()
        losses(model(ids)).mean().backward()
        optimizer.step()
        clock.tick()
    if warm is not None:
        clock.report()


def _plan(kind: str, batch: int, steps: int) -> ao.Plan:
    selection = ao.sparse.Counts(THRESHOLD) if kind == "counts" else None
    name = "independent" if kind in ("counts", "dense") or steps < 10 else kind
    return ao.plan(
        dataset_size=batch * steps, batch_size=batch, epochs=1, epsilon=8, delta=1e-6, clip_norm=CLIP,
        mechanism=ao.mechanism(name, selection=selection),
    )  # fmt: skip


if __name__ == "__main__":
    main()
