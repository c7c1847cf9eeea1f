"""What it costs to know that rows are those of before: their digests, beside an epoch of private training.

python -m benchmarks.rows             # 10^3 to 10^6 rows
python -m benchmarks.rows --quick     # 10^3 and 10^4

A table of ten numbers in a TensorDataset, and the same read by a data set of one's own that draws at random (32 x 32
pictures with a random shift). Trained is a network of one hidden layer of 64 at batches of 256, which is about the
least that anybody trains; 200 steps are timed, and an epoch is as many as it has. An epoch's check is of 32 rows.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import anyorder as ao
from benchmarks._report import Row, options, show

BATCH, STEPS = 256, 200


class Pictures(Dataset[Any]):
    """Shifted at random at each reading."""

    def __init__(self, rows: int) -> None:
        self.pictures = torch.zeros(min(rows, 2000), 3, 40, 40)
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> Any:
        x, y = torch.randint(0, 8, (2,)).tolist()
        return self.pictures[i % len(self.pictures), :, y : y + 32, x : x + 32].reshape(-1), i % 2


def rows(quick: bool) -> Iterator[Row]:
    """Seconds by number of rows."""
    for number in (10**3, 10**4) if quick else (10**3, 10**4, 10**5, 10**6):
        yield from _of(
            f"table, 10 numbers, n = {number}", TensorDataset(torch.randn(number, 10), torch.arange(number) % 2)
        )
        yield from _of(f"pictures, random shifts, n = {number}", Pictures(number))


def _of(name: str, dataset: Any) -> Iterator[Row]:
    def begun() -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 2))
        engine = ao.PrivacyEngine(plan, checkpoint=path)
        loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
        return engine, *engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader)

    number, width = len(dataset), dataset[0][0].numel()
    plan = ao.plan(
        dataset_size=number, batch_size=BATCH, epochs=1 + -(-STEPS * BATCH // number), epsilon=8, delta=1e-6,
        mechanism="independent",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ckpt"
        engine, *parts = begun()
        step = _step(*parts)
        noted = engine.loader.rows
        fresh = type(noted)(parts[2]._user_loader, noted._indices, noted._names, bytes(32))
        note = _seconds(fresh.note)
        check = _seconds(lambda: noted._found(noted.sample()))
        size = os.path.getsize(path)
        resume = _seconds(lambda: noted.check_resumed(noted.state_dict()))
        kept = len(noted.state_dict()["names"])
        engine.close()
    epoch = step * -(-number // BATCH)
    yield Row(f"{name}: rows kept", float(kept), None, None, "rows")
    yield Row(f"{name}: begin, once", note, None, None, "s")
    yield Row(f"{name}: resume", resume, None, None, "s")
    yield Row(f"{name}: checkpoint", size / 2**20, None, None, "MB")
    yield Row(f"{name}: an epoch's training", epoch, None, None, "s")
    yield Row(f"{name}: check of an epoch / its training", check / epoch, None, None, "share")
    yield Row(f"{name}: begin / ten epochs' training", note / (10 * epoch), None, None, "share")


def _step(model: Any, optimizer: Any, loader: Any) -> float:
    """Seconds of a step of training."""
    taken, start = 0, 0.0
    while taken < STEPS:
        for x, y in loader:
            if taken == 5:
                start = time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            taken += 1
            if taken == STEPS:
                break
    return (time.perf_counter() - start) / (taken - 5)


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    chosen = options(__doc__ or "")
    show(rows(chosen.quick), chosen.json)
