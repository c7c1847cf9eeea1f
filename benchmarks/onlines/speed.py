"""Examples a second of logistic regression on 100 features, mini-batches of 256, beside other packages.

A row: thousands of examples in a second of the processor, ours and the peer's, and ours over the peer's. The target of
ours is 100 000 a second, from a batch to the next iterate: scores, clipped sum, noise, ledger, closed form. diffprivlib
has no steps: the time of its whole fit, its noise in the objective. Opacus: fast gradient clipping, Poisson sampling.
One thread each; of three runs the best.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import anyorder as ao
from benchmarks._peers import DIFFPRIVLIB, OPACUS, interpreter
from benchmarks._report import Row, judged

SCRIPTS = Path(__file__).resolve().parents[1] / "peers"
TARGET = 100_000
_shown: list[Row] = []


def _data(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 100))
    x /= np.linalg.norm(x, axis=1, keepdims=True) * (1 + 1e-6)
    return x, (x[:, 0] > 0).astype(np.int64)


def _ours(x: np.ndarray, y: np.ndarray) -> float:
    """Seconds of one pass."""
    plan = ao.plan(dataset_size=len(x), batch_size=256, epochs=1, epsilon=1, delta=1e-6, mechanism="blt, 2 buffers")
    best = np.inf
    for _ in range(3):
        with ao.online.Learner(plan, (100, 1), loss="logistic", regularization=100.0) as learner:
            began = time.process_time()
            for first in range(0, len(x), 256):
                part = slice(first, min(first + 256, len(x)))
                learner.step(np.arange(part.start, part.stop), x[part], y[part])
            best = min(best, time.process_time() - began)
    return float(best)


def _theirs(x: np.ndarray, y: np.ndarray, script: str, python: str, jobs: list[list[float]]) -> float:
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "rows.npz"
        np.savez(path, x=x.astype(np.float32), y=y, tx=x[:9].astype(np.float32), ty=y[:9])
        delta = ["1e-6"] if script == "opacus" else []
        words = [python, str(SCRIPTS / f"streams_{script}.py"), str(path), *delta, json.dumps(jobs)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
    return min(json.loads(line)["seconds"] for line in done.stdout.splitlines() if line.startswith("{"))


def rows(quick: bool) -> Iterator[Row]:
    """One row a peer, and the target."""
    n = 25_600 if quick else 256_000
    x, y = _data(n)
    mine = n / _ours(x, y)
    opacus = n / _theirs(x, y, "opacus", interpreter(*OPACUS, module="opacus"), [[1.0, 0, 1.0, 256, 1, 1.0]] * 3)
    whole = interpreter(*DIFFPRIVLIB, module="diffprivlib")
    other = n / _theirs(x, y, "diffprivlib", whole, [[1.0, 0, 1.0]] * 3)
    _shown.clear()
    for name, peer in (("Opacus", opacus), ("diffprivlib, all rows at once", other)):
        _shown.append(Row(f"logistic regression, beside {name}", mine / 1e3, peer / 1e3, mine / peer, "k examples/s"))
    name = judged("logistic regression, of 100 k examples/s", 1.0, mine / TARGET)
    _shown.append(Row(name, mine / 1e3, None, mine / TARGET, "k examples/s"))
    yield from _shown


def tables() -> Iterator[tuple[str, str, list[str]]]:
    """The rows."""
    lines = ["| | ours | peer | ratio | unit |", "|---|---|---|---|---|"]
    for row in _shown[:-1]:  # the last one is the project's own target
        numbers = ("" if number is None else f"{number:.3g}" for number in (row.ours, row.peer, row.ratio))
        lines.append(f"| {row.name.replace(', beside ', ', compared with ')} | {' | '.join(numbers)} | {row.unit} |")
    yield "compared.md", "speed", lines
