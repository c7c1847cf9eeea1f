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
BEFORE = {"optimizer.step()": (212, 132, 17, 26), "the whole step: forward, backward too": (659, 340, 33, 48)}
"""Calls, calls in the package, files, changes of room, when the engine itself was the release."""


def calls() -> Iterator[Row]:
    """Of `optimizer.step()`, and of forward, backward and step together: Linear(4, 2), batch 8, no checkpoint."""
    plan = ao.plan(dataset_size=64, batch_size=8, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    model: Any = nn.Linear(4, 2)
    loader: Any = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,))), batch_size=8)
    engine = ao.PrivacyEngine(plan)
    model, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for x, y in loader:  # the last one counts, when everything is warm
        whole, step = _Profile(), _Profile()

        def passes(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()

        _counted(passes, whole)
        _counted(optimizer.step, whole, step)
    for name, profile in (("optimizer.step()", step), ("the whole step: forward, backward too", whole)):
        for (unit, value), before in zip(profile.found().items(), BEFORE[name], strict=True):
            yield Row(f"{name}: {unit}", value, before, before / value, "count; peer: before the release core")


def _counted(work: Callable[[], Any], *profiles: "_Profile") -> None:
    def each(frame: FrameType, event: str, argument: Any) -> None:
        for profile in profiles:
            profile(frame, event)

    sys.setprofile(each)
    try:
        work()
    finally:
        sys.setprofile(None)


class _Profile:
    """Counts what is called."""

    def __init__(self) -> None:
        self.all, self.own = 0, 0
        self.files: set[str] = set()
        self.changes = 0
        self.room = ""

    def __call__(self, frame: FrameType, event: str) -> None:
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
