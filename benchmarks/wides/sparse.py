"""Where a step touches a part of a table alone: vectors of 20 000 words of the Brown corpus, in batches of 2000 pairs.

An example is a pair of words at most 4 apart and 8 negatives; words have a vector as centres and one as neighbours,
100 numbers each, in one table of 40 000 rows [Mikolov et al. 2013]. The text is read from the Parquet file in the
folder that $ANYORDER_BROWN names. SGD once over 2 000 000 pairs; clip norm 1; epsilon 8 at delta 1e-5 for a pair,
exact, and the same for every way. A table of zeros has loss 9 ln 2 = 6.238 in the mean of a test pair.

The learning rate of each way is the best of the same four, and the threshold or number of rows of a selection the
better of two, by the loss on test pairs with seed 0; epsilon does not count that choice. Runs are kept in
benchmarks/results/wide.jsonl, and only what is missing is run; the table of docs/experiments.md is written from it.

    ANYORDER_BROWN=FOLDER python -m benchmarks.wide --only sparse
    python -m benchmarks.wides.sparse --write                       the page alone

A row is a way: ours is its test loss, the peer that of the non-private run, once both are there.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import anyorder as ao
from benchmarks._report import Row
from benchmarks.peers.wide_model import Pairs, losses
from benchmarks.peers.wide_task import resident
from benchmarks.wides import page
from benchmarks.wides.pairs import Corpus, read_pairs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "wide.jsonl"
DATA = os.environ.get("ANYORDER_BROWN", "brown")

EPSILON, DELTA, CLIP = 8.0, 1e-5, 1.0
BUDGET = {"goal": EPSILON, "delta": DELTA, "clip_norm": CLIP}
ZERO = 9 * math.log(2)
RATES = (10.0, 30.0, 3.0, 100.0)  # in the order of their turns


@dataclass(frozen=True)
class Size:
    """How many words, pairs and steps."""

    vocabulary: int = 20_000
    width: int = 100
    train: int = 2_000_000
    test: int = 20_000
    batch: int = 2000
    epochs: int = 1


@dataclass(frozen=True)
class Way:
    """How rows are trained: the plan's mechanism, the selection, whether the gradient is sparse."""

    title: str
    mechanism: str = "independent"
    selection: str = ""
    sparse: bool = True


WAYS = {
    "none": Way("no privacy"),
    "dense": Way("dense DP-SGD, no sampling", sparse=False),
    "dense-poisson": Way("dense DP-SGD, secret sampling", "poisson", sparse=False),
    "counts": Way("AdaFEST (noisy counts), no sampling", selection="counts"),
    "counts-poisson": Way("AdaFEST (noisy counts), secret sampling", "poisson", "counts"),
    "top-poisson": Way("Gumbel top-k, secret sampling", "poisson", "top"),
    "lazy-independent": Way("lazy, independent, no sampling"),
    "lazy-blt": Way("lazy, BLT of 3 buffers, no sampling", "blt, 3 buffers"),
    "lazy-tree": Way("lazy, tree, no sampling", "tree"),
}
TRIED: dict[str, tuple[float, ...]] = {
    "": (0,),
    "counts": (2.0, 5.0),  # thresholds; a pair adds 10^-1/2 to the count of each of its ten rows
    "top": (500, 2000),  # rows a step
}


def plan_of(way: Way, size: Size, pairs: int, amount: float) -> ao.Plan:
    """The same budget for every way; the amount is that of `TRIED`."""
    selection = {"counts": lambda: ao.sparse.Counts(amount), "top": lambda: ao.sparse.Top(int(amount))}
    chosen = selection[way.selection]() if way.selection in selection else None
    order = {} if way.mechanism == "poisson" else {"order": "fixed"}
    return ao.plan(
        dataset_size=pairs, batch_size=size.batch, epochs=size.epochs, epsilon=EPSILON, delta=DELTA, clip_norm=CLIP,
        mechanism=ao.mechanism(way.mechanism, selection=chosen), **order,
    )  # fmt: skip


# -- one run, in a process of its own --------------------------------------------------------------------------------


class Examples(Dataset[Tensor]):
    """Rows of a tensor, a batch at a time."""

    def __init__(self, pairs: Tensor) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Tensor:
        return self.pairs[index]

    def __getitems__(self, indices: list[int]) -> Tensor:
        """One batch: the loader asks for whole ones."""
        return self.pairs[indices]


def _collate(batch: Any) -> Tensor:
    return batch if isinstance(batch, Tensor) else torch.stack(batch)


def trained(
    corpus: Corpus, size: Size, name: str, lr: float, seed: int, amount: float = 0
) -> dict[str, Any]:  # fmt: skip
    """Test loss at the end, processor's seconds a step, bytes that the process grew at most, epsilon."""
    way, before = WAYS[name], resident()
    train, test = (_two_tables(pairs, corpus.vocabulary) for pairs in (corpus.train, corpus.test))
    train = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))]
    model: Any = Pairs(2 * corpus.vocabulary, size.width, sparse=way.sparse, seed=seed)
    table = model.table.weight
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=lr)
    loader: Any = DataLoader(Examples(train), size.batch, collate_fn=_collate)
    engine, plan = None, None
    if name != "none":
        plan = plan_of(way, size, len(train), amount)
        key = hashlib.sha256(f"wide {name} {lr} {seed} {amount}".encode()).digest()  # no secrets here
        engine = ao.PrivacyEngine(plan, key=key)
        model, optimizer, loader = engine.make_private(model, optimizer, loader)
    seconds, start = [], time.process_time()
    for _ in range(size.epochs):
        for ids in loader:
            optimizer.zero_grad()
            losses(model(ids)).mean().backward()
            optimizer.step()
            now = time.process_time()
            seconds.append(now - start)
            start = now
    if engine is not None and way.sparse and not way.selection:
        engine.flush()
    return {
        "loss": test_loss(table, test), "flush_seconds": time.process_time() - start,
        "step_seconds": median(seconds), "bytes": _most() - before,
        "epsilon": None if plan is None else plan.epsilon,
    }  # fmt: skip


def _two_tables(pairs: Tensor, vocabulary: int) -> Tensor:
    """Neighbours and negatives have rows of their own, behind those of the centres."""
    return pairs + vocabulary * torch.tensor([0] + [1] * (pairs.shape[1] - 1))


@torch.no_grad()
def test_loss(table: Tensor, test: Tensor) -> float:
    """The mean over pairs; infinite where a table has overflowed."""
    model = Pairs(1, 1, sparse=False)
    model.table.weight = torch.nn.Parameter(table.detach())
    found = float(torch.cat([losses(model(ids)) for ids in test.split(2000)]).mean())
    return found if math.isfinite(found) else math.inf


def _most() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- what is run -----------------------------------------------------------------------------------------------------


class Runs:
    """Results, from the file or by a run that is then added to it."""

    def __init__(self, size: Size, folder: str, made: Path, results: Path = RESULTS) -> None:
        self.size, self._folder, self._made, self._results = size, folder, made, results

    def _corpus(self) -> Path:
        """The tensors on disk, for every process."""
        path = self._made / "corpus.pt"
        if not path.exists():
            size = self.size
            corpus = read_pairs(self._folder, vocabulary=size.vocabulary, train=size.train, test=size.test)
            torch.save({"vocabulary": corpus.vocabulary, "train": corpus.train, "test": corpus.test}, path)
        return path

    def run(self, name: str, lr: float, amount: float, seed: int) -> dict[str, Any]:
        wanted = {"way": name, "lr": lr, "amount": amount, "seed": seed, "size": asdict(self.size), **BUDGET}
        for line in read_results(self._results):
            if wanted.items() <= line.items():
                return line
        asked = json.dumps({"corpus": str(self._corpus()), **wanted})
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.wides.sparse", asked], capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"the run {wanted} failed:\n{done.stderr[-3000:]}")
        line = {**wanted, **json.loads(done.stdout.splitlines()[-1])}
        self._results.parent.mkdir(exist_ok=True)
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def best(self, name: str) -> dict[str, Any]:
        """The run with the best of the rates and amounts, seed 0."""
        return min((self.run(name, *chosen, 0) for chosen in tried(name)), key=lambda line: float(line["loss"]))


def tried(name: str) -> list[tuple[float, float]]:
    """Rates and amounts."""
    return [(rate, amount) for amount in TRIED[WAYS[name].selection] for rate in RATES]


def read_results(path: Path = RESULTS) -> list[dict[str, Any]]:
    """All runs on file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows(quick: bool) -> Iterator[Row]:
    """Two ways of a small size if quick; else all, and the page."""
    if quick:
        small = Size(vocabulary=1000, width=10, train=20_000, test=2000, epochs=1)
        corpus = read_pairs(DATA, vocabulary=small.vocabulary, train=small.train, test=small.test)
        for name in ("none", "lazy-blt"):
            found = trained(corpus, small, name, 30.0, 0)
            yield Row(f"1000 words, {WAYS[name].title}; peer: zero table", found["loss"], ZERO, None, "test loss")
        return
    with tempfile.TemporaryDirectory() as made:
        yield from _all(Runs(Size(), DATA, Path(made)))
    write()


def _all(runs: "Runs") -> Iterator[Row]:
    """One rate for every way, then the next: so that what is on file compares alike whenever it is stopped."""
    every = [(lr, amount, name) for name in WAYS for lr, amount in tried(name)]
    for lr, amount, name in sorted(every, key=lambda one: RATES.index(one[0])):
        runs.run(name, lr, amount, 0)
    plain = None
    for name, way in WAYS.items():
        found = runs.best(name)
        plain = plain or found["loss"]
        yield Row(f"20 000 words, {way.title} (lr {found['lr']:g})", found["loss"], plain, None, "test loss")
        yield Row(f"20 000 words, {way.title}: a step", 1000 * found["step_seconds"], None, None, "CPU ms")


def write() -> None:
    """The table of the page, of what is on file."""
    lines = [line for line in read_results() if {"size": asdict(Size()), **BUDGET}.items() <= line.items()]
    page.put("sparse", page.ways(lines, {name: way.title for name, way in WAYS.items()}, ZERO))


def main() -> None:
    """One run, named in JSON, or the page."""
    if sys.argv[1:] == ["--write"]:
        write()
        return
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    corpus = Corpus(**torch.load(asked["corpus"]))
    print(json.dumps(trained(corpus, Size(**asked["size"]), asked["way"], asked["lr"], asked["seed"], asked["amount"])))


if __name__ == "__main__":
    main()
