"""Which channels reach beyond a unit's own vector: loops with a known hole, run by this package and by Opacus.

    python -m benchmarks.isolation [--json FILE]

Both run the same loops under `anyorder.audit.isolation`. The sums that Opacus makes go through a `Release` in the place
of its own noise, so that they are seen and both runs are handed the same private gradients. Opacus is as installed.
Values that are not finite, or huge, are a loop of their own: elsewhere they would hide what else there is.
"""

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import opacus
import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import anyorder as ao
from anyorder.audit import isolation
from anyorder.audit.faults import patched
from anyorder.errors import AnyorderError, ArgumentError
from anyorder.release.release import Release

N, B, EPOCHS, WIDTH, CLASSES, UNIT, LENGTHS = 24, 8, 2, 5, 3, 3, (8, 32, 160)
RNG = torch.Generator().manual_seed(0)
ROWS = [(torch.randn(WIDTH, generator=RNG), torch.tensor(i % CLASSES)) for i in range(N)]
TEXTS = [(torch.randint(1, 9, (3 + i % 4,), generator=RNG), torch.tensor(i % CLASSES)) for i in range(N)]
PLAN = ao.plan(dataset_size=N, batch_size=B, epochs=EPOCHS, epsilon=8, delta=1e-3, mechanism="independent")


class Words(nn.Module):
    """A classifier of texts by the sum of their words, or by their mean."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.longest = kind, 0
        self.embed, self.out, self.dropout = nn.Embedding(9, 6), nn.Linear(6, CLASSES), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        """Logits."""
        h = self.embed(x)
        h = (self.dropout(h) if self.kind == "dropout" else h) * (x > 0)[..., None]
        if self.kind == "mean":
            return self.out(h.mean(1) * 10)
        if self.kind == "longest":
            self.longest = max(self.longest, x.shape[1])
            return self.out(h.sum(1)) / self.longest
        return self.out(h.sum(1))


def padded(batch: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts padded to the longest of the batch, and labels."""
    return pad_sequence([x for x, _ in batch], batch_first=True), torch.stack([y for _, y in batch])


class Crops:
    """A crop that is drawn again until it is bright enough."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        x, y = self.rows[i]
        for _ in range(20):
            keep = torch.rand(WIDTH) > 0.4
            if (x * keep).sum() > 0:
                break
        return x * keep, y


class Polyak(torch.optim.SGD):
    """A step as long as the loss."""

    def step(self, closure: Any = None) -> Any:
        """One step."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["lr"] = 0.5 if loss is None else float(loss)
        return super().step()


def hardest(outputs: Any, y: Any) -> Any:
    """Weights by the batch's largest loss."""
    each = F.cross_entropy(outputs, y, reduction="none")
    return (each * (each.detach() / each.detach().nan_to_num().max()) ** 4).mean() * 100


USUAL = ("another unit's row", "other values", "zeros", "another label")
LENGTHENED = ("longer", "much longer", "shorter")
Loop = dict[str, Any]
LOOPS: dict[str, Loop] = {
    "none: an MLP": {},
    "a value that is not finite": {"kinds": ("NaN", "infinities")},
    "a huge value": {"kinds": ("huge values",)},
    "a mean over the padded length": {"text": "mean", "scale": 30.0},
    "dropout over the padded length": {"text": "dropout"},
    "a model that keeps the longest length": {"text": "longest"},
    "a crop that is drawn again until it fits": {"data": Crops},
    "a loss weighted by the batch's hardest example": {"loss": hardest, "flat": True, "kinds": ("huge values",)},
    "a scheduler on a plateau of the loss": {"plateau": True, "flat": True, "kinds": ("huge values",)},
    "an optimizer that reads its closure's loss": {"optimizer": Polyak, "closure": True},
    "a label beyond the classes": {"kinds": ("label beyond the others",)},
}


def model_of(loop: Loop) -> nn.Module:
    """The model of a loop."""
    if "text" in loop:
        return Words(loop["text"])
    if loop.get("flat"):
        return nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def trained(loop: Loop, model: Any, optimizer: Any, loader: Any) -> None:
    """The loop itself."""
    scheduler = None
    if loop.get("plateau"):  # every step but one whose loss is twice the largest before
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, threshold=1.0)
    loss_of = loop.get("loss", lambda outputs, y: F.cross_entropy(loop.get("scale", 1.0) * outputs, y))
    for _ in range(EPOCHS):
        for x, y in loader:

            def computed(x: Any = x, y: Any = y) -> Any:
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                return loss

            if loop.get("closure"):
                optimizer.step(computed)
            else:
                loss = computed()
                optimizer.step()
                if scheduler is not None:
                    scheduler.step(float(loss))


def by_anyorder(loop: Loop) -> Callable[[Any, Path], Any]:
    """The loop as a private run of this package."""

    def train(rows: Any, folder: Path) -> Any:
        net = model_of(loop)
        optimizer = loop.get("optimizer", torch.optim.SGD)(net.parameters(), lr=0.5)
        collate = padded if "text" in loop else None
        loader = DataLoader(loop.get("data", list)(rows), batch_size=B, shuffle=True, collate_fn=collate)
        lengths = {"pad_to": LENGTHS} if "text" in loop else {}
        trained(loop, *ao.PrivacyEngine(PLAN).make_private(net, optimizer, loader, **lengths))
        return net

    return train


class Numbered:
    """A sampler that remembers which examples it gave out."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        for batch in torch.randperm(N).split(B):
            self.batches.append(batch.tolist())
            yield self.batches[-1]

    def __len__(self) -> int:
        return N // B


@contextmanager
def through(release: Release, sampler: Numbered) -> Iterator[None]:
    """Within it Opacus hands its sums to a release, which adds the noise."""

    def add_noise(self: Any) -> None:
        sums = torch.cat([p.summed_grad.reshape(-1) for p in self.params])
        private = release.take(sorted(sampler.batches[-1]), [sums])[0] * PLAN.batch_size
        for p, part in zip(self.params, private.split([p.numel() for p in self.params]), strict=True):
            p.grad = part.view_as(p).clone()
            p.summed_grad._processed = True

    with patched(DPOptimizer, "add_noise", add_noise):
        yield


def by_opacus(loop: Loop) -> Callable[[Any, Path], Any]:
    """The loop as a private run of Opacus, in an order of its own."""

    def train(rows: Any, folder: Path) -> Any:
        net, sampler = model_of(loop), Numbered()
        optimizer = loop.get("optimizer", torch.optim.SGD)(net.parameters(), lr=0.5)
        collate = padded if "text" in loop else None
        loader = DataLoader(loop.get("data", list)(rows), batch_sampler=sampler, collate_fn=collate)
        release = Release(PLAN, sum(p.numel() for p in net.parameters()))
        model, optimizer, _ = opacus.PrivacyEngine().make_private(
            module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=PLAN.clip_norm,
            poisson_sampling=False,
        )  # fmt: skip
        with through(release, sampler):
            trained(loop, model, optimizer, loader)
        return net

    return train


def outcome(train: Callable[[Any, Path], Any], loop: Loop) -> dict[str, Any]:
    """What the harness says of a loop: nothing found, refused, or the channels with the largest distance."""
    rows, kinds = TEXTS if "text" in loop else ROWS, loop.get("kinds", USUAL + (LENGTHENED if "text" in loop else ()))
    try:
        report = isolation.check(train, rows, rows=(UNIT,), kinds=kinds)
    except (ArgumentError, AnyorderError) as problem:
        return {"outcome": "refused", "why": str(problem)[:300]}
    if not report.channels:
        return {"outcome": "nothing found", "own": round(report.own, 3)}
    far = [channel.distance for channel in report.channels if channel.distance is not None]
    return {"outcome": ", ".join(sorted(report.kinds)), "distance": _rounded(max(far)) if far else None}


def _rounded(distance: float) -> float | str:
    return round(distance, 3) if isfinite(distance) else "without bound"


def _far(distance: float | str | None) -> str:
    return f": {distance}" if distance else ""


def main() -> None:
    """Print the table; distances are in clip norms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    found = {name: {"anyorder": outcome(by_anyorder(loop), loop), "Opacus": outcome(by_opacus(loop), loop)}
             for name, loop in LOOPS.items()}  # fmt: skip
    print(f"| what a loop has | anyorder | Opacus {opacus.__version__} |\n|---|---|---|")
    for name, both in found.items():
        cells = [f"{one['outcome']}{_far(one.get('distance'))}" for one in both.values()]
        print(f"| {name} | {cells[0]} | {cells[1]} |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"opacus": opacus.__version__, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
