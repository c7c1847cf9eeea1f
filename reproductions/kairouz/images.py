"""Training runs on images, scaled down to one hidden layer: one line a run in results/kairouz2021_runs.jsonl.

Order, batches, epochs and privacy are the paper's; the network is not: MNIST 784 - 32 - 10; CIFAR-10, averaged over
2 x 2 pixels, 768 - 64 - 10; tanh between. Clip norm 1, delta 1e-5. A cell tunes its learning rate on its first seed
over 1, 2, 5 x 10^i by test accuracy, as the paper does (F.1), and no epsilon counts that. Noise: `ao.Release`.
"""

import functools
import hashlib
import os
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import anyorder as ao
from anyorder.app import data as datasets
from anyorder.plan.plan import Plan
from reproductions import _runs
from reproductions._claims import RESULTS, Run

Floats = NDArray[np.float32]

DELTA = 1e-5
RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
RUNS = RESULTS / "kairouz2021_runs.jsonl"


@dataclass(frozen=True)
class Cell:
    """What is trained: `noise` is tree, independent or poisson; the others are of the tree."""

    data: str
    noise: str
    epsilon: float
    batch: int
    epochs: int
    momentum: float = 0.9
    estimator: str = "online"
    restart_every: int = 1
    completion: bool = True

    def plan(self, size: int) -> Plan:
        """As the paper has it: a shuffle after each restart. A tree over several epochs keeps the order between."""
        common = {
            "dataset_size": size, "batch_size": self.batch, "epochs": self.epochs, "epsilon": self.epsilon,
            "delta": DELTA, "optimizer": ao.SGD(momentum=self.momentum),
        }  # fmt: skip
        if self.noise != "tree":
            return ao.plan(**common, mechanism=self.noise, order=ao.order(drop_last=self.noise != "poisson"))
        return ao.plan(
            **common,
            mechanism=ao.mechanism(
                "tree",
                estimator=self.estimator,
                restart_every=self.restart_every,
                completion="on" if self.completion else "off",
            ),
            order=ao.order("shuffled" if self.restart_every == 1 else "fixed", drop_last=True),
        )


class Images(NamedTuple):
    """Rows in [-1, 1], and classes."""

    x: Floats
    y: NDArray[np.int64]
    test_x: Floats
    test_y: NDArray[np.int64]
    hidden: int


@functools.cache
def load(name: str) -> Images:
    """From the folder that ANYORDER_DATA names, else from the hub."""
    root = os.environ.get("ANYORDER_DATA")
    found = datasets.load(name, None if root is None else str(Path(root) / name))
    return Images(*_rows(found.train), *_rows(found.test), 32 if name == "mnist" else 64)


def _rows(part: Any) -> tuple[Floats, NDArray[np.int64]]:
    x, y = (tensor.numpy() for tensor in part.tensors)
    if x.shape[1] == 3:
        x = x.reshape(len(x), 3, 16, 2, 16, 2).mean(axis=(3, 5))
    return np.ascontiguousarray(x.reshape(len(x), -1), dtype=np.float32), y


class Network:
    """Softmax over one hidden layer of tanh, with the sum of clipped gradients in closed form."""

    def __init__(self, inputs: int, hidden: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.sizes = (inputs * hidden, hidden, hidden * 10, 10)
        self.theta = np.zeros(sum(self.sizes), dtype=np.float32)
        w, _, v, _ = self.parts()
        w[:] = rng.uniform(-1, 1, w.shape) / np.sqrt(inputs)
        v[:] = rng.uniform(-1, 1, v.shape) / np.sqrt(hidden)

    def parts(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Views of theta."""
        w, b, v, c = np.split(self.theta, np.cumsum(self.sizes)[:-1])
        return w.reshape(-1, len(b)), b, v.reshape(-1, 10), c

    def scores(self, x: Floats) -> tuple[Floats, Floats]:
        """Hidden layer and logits."""
        w, b, v, c = self.parts()
        h = np.tanh(x @ w + b)
        return h, h @ v + c

    def clipped_sum(self, x: Floats, y: NDArray[np.int64]) -> Floats:
        """Sum over rows of the gradient of the cross entropy, each scaled to norm 1 at most."""
        h, z = self.scores(x)
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        back = (p @ self.parts()[2].T) * (1 - h * h)
        squares = (p**2).sum(1) * ((h**2).sum(1) + 1) + (back**2).sum(1) * ((x**2).sum(1) + 1)
        scale = np.minimum(1, (1 - 1e-5) / np.sqrt(np.maximum(squares, 1e-30)))[:, None]
        p, back = p * scale, back * scale
        return np.concatenate([(x.T @ back).ravel(), back.sum(0), (h.T @ p).ravel(), p.sum(0)])

    def accuracy(self, x: Floats, y: NDArray[np.int64]) -> float:
        """In percent."""
        return float(100 * (self.scores(x)[1].argmax(1) == y).mean())


def trained(cell: Cell, lr: float, seed: int) -> float:
    """Test accuracy after the last step."""
    data = load(cell.data)
    plan, size = cell.plan(len(data.y)), len(data.y)
    model = Network(data.x.shape[1], data.hidden, seed)
    key = hashlib.sha256(f"{cell} {lr} {seed}".encode()).digest()  # no secret here
    release = ao.Release(plan, model.theta.size, key=key)
    rng, speed = np.random.default_rng([seed, 1]), np.zeros_like(model.theta)
    steps = plan.n // cell.epochs
    for t in range(plan.n):
        if t == 0 or (t % steps == 0 and cell.restart_every == 1):
            order = rng.permutation(size)
        if cell.noise == "poisson":
            units = release.sample(size)
        else:
            units = order[t % steps * cell.batch : (t % steps + 1) * cell.batch]
        found = release.step(units.tolist(), model.clipped_sum(data.x[units], data.y[units]))
        speed = cell.momentum * speed + np.asarray(found, dtype=np.float32)
        model.theta -= np.float32(lr) * speed
    return model.accuracy(data.test_x, data.test_y)


class Best(NamedTuple):
    """Of a cell: accuracies in percent, at the rate that was best on the first seed."""

    lr: float
    accuracies: list[float]
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        """Over seeds."""
        return mean(self.accuracies)


def best(cell: Cell, run: Run, start: float) -> Best:
    """Uphill over the grid of rates from `start` on the first seed, then the other seeds."""
    i = RATES.index(start)
    for step in (1, -1):
        while 0 <= i + step < len(RATES) and accuracy(cell, RATES[i + step], run.seeds[0]) > accuracy(
            cell, RATES[i], run.seeds[0]
        ):
            i += step
    return _at(cell, RATES[i], run)


def tried(cell: Cell, run: Run, rates: tuple[float, ...]) -> Best:
    """The better of a few rates on the first seed, then the other seeds."""
    lr = max(rates, key=lambda rate: accuracy(cell, rate, run.seeds[0]))
    return _at(cell, lr, run)


def _at(cell: Cell, lr: float, run: Run) -> Best:
    accuracies = [accuracy(cell, lr, seed) for seed in run.seeds]
    return Best(lr, accuracies, sum(row["cpu_seconds"] for row in kept() if asdict(cell).items() <= row.items()))


def accuracy(cell: Cell, lr: float, seed: int) -> float:
    """From the file of runs, or by a run that is then added to it: delete its lines to train again."""
    wanted = {**asdict(cell), "lr": lr, "seed": seed}
    for row in kept():
        if wanted.items() <= row.items():
            return float(row["accuracy"])
    before = time.process_time()
    found = trained(cell, lr, seed)
    row = {**wanted, "accuracy": found, "cpu_seconds": round(time.process_time() - before, 1)}
    _runs.keep(RUNS, row | {"date": date.today().isoformat()})
    return found


def kept() -> list[dict[str, Any]]:
    """All runs on file."""
    return _runs.kept(RUNS)
