"""Which channels reach beyond a unit's own vector: loops with a known hole, by this package, Opacus and jax_privacy.

    python -m benchmarks.isolation [--json FILE]

All run the same loops under `anyorder.audit.isolation`. The sums that a peer makes go through a `Release` in the place
of its own noise, so that they are seen and all runs are handed the same private gradients. Opacus is as installed;
jax_privacy, by `clipped_grad` with its defaults, and optax run in an environment of their own, on the same batches.
Values that are not finite, or huge, are a loop of their own: elsewhere they would hide what else there is.
"""

import argparse
import json
import pickle
import subprocess
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
from benchmarks._peers import JAX_PRIVACY, interpreter

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
    """A sampler that remembers which examples it gave out.

    Args:
        generator: of the order; None: the global one, which torch's loaders take.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.batches: list[list[int]] = []
        self._generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        for batch in torch.randperm(N, generator=self._generator).split(B):
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


class Worker:
    """The process in which jax_privacy runs."""

    def __init__(self) -> None:
        python, script = interpreter(*JAX_PRIVACY, module="jax_privacy"), Path(__file__).with_name("peers")
        self._process = subprocess.Popen(
            [python, script / "isolation_jax_privacy.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.versions = pickle.load(self._process.stdout)

    def ask(self, word: str, *arguments: Any) -> Any:
        """What it answers."""
        pickle.dump((word, arguments), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def end(self) -> None:
        """Let it end."""
        self._process.stdin.close()
        self._process.wait()


def weights_of(kind: str) -> dict[str, Any]:
    """First weights of a model of jax_privacy's side."""
    shapes = {"w": (6, CLASSES), "b": (CLASSES,), "v": (WIDTH, 6), "c": (6,)} if kind == "mlp" else (
        {"w": (WIDTH, CLASSES), "b": (CLASSES,)} if kind == "flat" else
        {"embed": (9, 6), "w": (6, CLASSES), "b": (CLASSES,)}
    )  # fmt: skip
    return {name: (0.5 * torch.randn(shape)).numpy() for name, shape in sorted(shapes.items())}


def by_jax_privacy(worker: Worker, loop: Loop) -> Callable[[Any, Path], Any]:
    """The loop as a private run of jax_privacy, in an order of its own."""
    kind = loop.get("text") or ("flat" if loop.get("flat") else "mlp")
    optimizer = "plateau" if loop.get("plateau") else "polyak" if loop.get("closure") else "sgd"
    told = {"kind": kind, "optimizer": optimizer, "scale": loop.get("scale", 1.0), "hardest": "loss" in loop,
            "clip_norm": PLAN.clip_norm}  # fmt: skip

    def train(rows: Any, folder: Path) -> Any:
        params, sampler = weights_of(kind), Numbered(torch.Generator().manual_seed(1))  # its samplers have one too
        worker.ask("begin", told, params)
        release = Release(PLAN, sum(value.size for value in params.values()))
        collate = padded if "text" in loop else None
        loader = DataLoader(loop.get("data", list)(rows), batch_sampler=sampler, collate_fn=collate)
        for _ in range(EPOCHS):
            for x, y in loader:
                sums = worker.ask("sum", x.numpy(), y.numpy())
                whole = torch.cat([torch.from_numpy(sums[name].copy()).reshape(-1) for name in params])
                private = release.take(sorted(sampler.batches[-1]), [whole])[0]
                parts = private.split([value.size for value in params.values()])
                params = worker.ask("update", {
                    name: part.numpy().reshape(params[name].shape) for name, part in zip(params, parts, strict=True)
                })  # fmt: skip
        return params

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
    worker = Worker()
    found = {
        name: {
            "anyorder": outcome(by_anyorder(loop), loop), "Opacus": outcome(by_opacus(loop), loop),
            "jax_privacy": outcome(by_jax_privacy(worker, loop), loop),
        } for name, loop in LOOPS.items()
    }  # fmt: skip
    worker.end()
    versions = {"opacus": opacus.__version__, **worker.versions}
    print(f"| what a loop has | anyorder | Opacus {opacus.__version__} | jax_privacy {versions['jax_privacy']} |")
    print("|---|---|---|---|")
    for name, each in found.items():
        cells = [f"{one['outcome']}{_far(one.get('distance'))}" for one in each.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**versions, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
