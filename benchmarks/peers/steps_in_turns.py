"""Training steps of one model by one method, some at a time, for a caller who lets several methods take turns.

    python steps_in_turns.py MODEL METHOD STEPS ROUNDS

A line on standard input asks for STEPS further steps; the answer is a line of JSON: the median of their times in
seconds by the clock, on one thread, from the loader to the end of `optimizer.step()`; that of the very first step; and
the process's peak memory in MiB so far. METHOD: see `training_step`. Needs torch, and the method.
"""

import json
import resource
import sys
import time
from collections.abc import Iterator
from itertools import islice
from statistics import median
from typing import Any

import torch
from step_models import case
from torch import nn
from torch.utils.data import DataLoader
from training_step import Batches, loss_of, made_private

WARM = 6  # steps before those that count: ours has captured its program


def main() -> None:
    """Answer each line."""
    name, method, steps, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x, y = case(name, opacus=method in ("hooks", "ghost"))
    # Of a lazy table most rows were read by then, at different steps.
    warm = WARM if name != "table" or method == "plain" else 500
    data = Batches(x, y, warm + steps * rounds, 10**6 if name == "table" else 0)
    loader: Any = DataLoader(data, batch_size=len(x), shuffle=True, collate_fn=_as_it_is)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=0.01)
    model, optimizer, criterion, loader = made_private(method, model, optimizer, loader)
    times, first = _times(model, optimizer, criterion, loader), 0.0
    for number, _ in enumerate(sys.stdin):
        if number == 0:  # none begins before it is asked: the others wait while this one's first step is timed
            first, _ = next(times), list(islice(times, warm - 1))
        own = median(islice(times, steps))
        print(json.dumps({"step": own, "first": first, "mib": _resident()}), flush=True)


def _times(model: nn.Module, optimizer: Any, criterion: Any, loader: Any) -> Iterator[float]:
    """Seconds of each step."""
    start = time.perf_counter()
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y, criterion).backward()
        optimizer.step()
        now = time.perf_counter()
        yield now - start
        start = time.perf_counter()  # what the caller waits for in between is no part of a step


def _resident() -> float:
    """The most memory that the process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def _as_it_is(batch: Any) -> Any:
    return batch


if __name__ == "__main__":
    main()
