"""Private and plain training steps of one model, in turns in one process; prints JSON. Needs torch, and this package.

    python steps_in_turns.py MODEL REPEATS

From the loader to the end of `optimizer.step()`, by the clock, on one thread. The two take turns step by step, so that
what else the machine does meets both; medians are told, and the median of the steps' ratios.
"""

import json
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from step_models import case, losses
from torch import nn
from torch.utils.data import DataLoader
from training_step import Batches

WARM = 10


def main() -> None:
    """Measure and print."""
    name, repeats = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    plain, ours = _steps(name, repeats, private=False), _steps(name, repeats, private=True)
    pairs = list(zip(plain, ours, strict=True))[WARM:]
    times = [median(one) for one in zip(*pairs, strict=True)]
    print(json.dumps({"plain": times[0], "ours": times[1], "over": median(b / a for a, b in pairs)}))


def _steps(name: str, repeats: int, *, private: bool) -> Iterator[float]:
    """Seconds of each step."""
    torch.manual_seed(0)
    model, x, y = case(name, opacus=False)
    data = Batches(x, y, WARM + repeats)
    loader: Any = DataLoader(data, batch_size=len(x), shuffle=True, collate_fn=_as_it_is)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if private:
        model, optimizer, loader = _private(model, optimizer, loader)
    batches = iter(loader)
    for _ in range(WARM + repeats):
        start = time.perf_counter()
        inputs, targets = next(batches)
        optimizer.zero_grad()
        losses(model(inputs), targets).mean().backward()
        optimizer.step()
        yield time.perf_counter() - start


def _private(model: nn.Module, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
    import anyorder as ao

    plan = ao.plan(loader=loader, epochs=1, epsilon=8.0, delta=1e-5, mechanism="independent")
    return ao.PrivacyEngine(plan).make_private(model, optimizer, loader)


def _as_it_is(batch: Any) -> Any:
    return batch


if __name__ == "__main__":
    main()
