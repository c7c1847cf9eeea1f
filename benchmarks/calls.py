"""How far one step of a small model goes through the code: Python calls, files, and changes of room."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from benchmarks._report import Row

ROOT = Path(ao.__file__).parent
BEFORE = {"whole step": (472.0, 0.0, 0.0, 0.0)}


def calls() -> Iterator[Row]:
    """Of `optimizer.step()`, and of forward, backward and step together: Linear(4, 2), batch 8, no checkpoint."""
    plan = ao.plan(dataset_size=64, batch_size=8, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    model: Any = nn.Linear(4, 2)
    loader: Any = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,))), batch_size=8)
    engine = ao.PrivacyEngine(plan)
    model, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    counts = {}
    for t, (x, y) in enumerate(loader):
        profile = _Profile() if t >= 3 else None

        def passes(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()

        _counted(passes, profile)
        passed = None if profile is None else profile.found()
        step = _Profile() if t >= 3 else None
        _counted(optimizer.step, step)
        if step is not None and passed is not None:
            counts["optimizer.step()"] = step.found()
            counts["zero_grad, forward, backward"] = passed
    for name, found in counts.items():
        for unit, value in found.items():
            yield Row(name, value, None, None, unit)


def _counted(work: Callable[[], Any], profile: "_Profile | None") -> None:
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)


class _Profile:
    """Counts what is called."""

    def __init__(self) -> None:
        self.all, self.own = 0, 0
        self.files: set[str] = set()
        self.changes, self.edges = 0, 0
        self.room = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        self.all += 1
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT):
            return
        self.own += 1
        self.files.add(str(path))
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        self.changes += room != self.room
        self.room = room

    def found(self) -> dict[str, float]:
        return {
            "Python calls": self.all, "Python calls in the package": self.own,
            "files of the package": len(self.files), "changes of room": self.changes,
        }  # fmt: skip
