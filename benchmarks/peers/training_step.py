"""One model's whole training step by one method, in a process of its own; prints JSON. Needs torch, and the method.

    python training_step.py MODEL METHOD REPEATS

From the loader to the end of `optimizer.step()`: forward, loss, backward, clipping, noise, SGD. METHOD: plain, ours
(independent noise, that of DP-SGD), blt (ours, correlated noise of 4 buffers), hooks, ghost (Opacus), bare (of fully
connected models: the operations of ours alone, which nobody checks, records or keeps from coupling examples).
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from step_models import case, losses
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WARM = 3


class Batches(Dataset[Any]):
    """As many batches as asked for, all of them the same examples; with `fresh`, each of other ids below that."""

    def __init__(self, x: Tensor, y: Tensor, count: int, fresh: int = 0) -> None:
        self.x, self.y, self.count = x, y, count
        self.fresh = torch.randint(fresh, (count, *x.shape)) if fresh else None

    def __len__(self) -> int:
        return self.count * len(self.x)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """One batch: the loader asks for whole ones."""
        return self.x if self.fresh is None else self.fresh[indices[0] // len(self.x)], self.y

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index % len(self.x)], self.y[index % len(self.x)]


def main() -> None:
    """Measure and print."""
    name, method, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.manual_seed(0)
    model, x, y = case(name, opacus=method in ("hooks", "ghost"))
    data = Batches(x, y, WARM + repeats)
    loader = DataLoader(data, batch_size=len(x), shuffle=True, collate_fn=_as_it_is)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, criterion, loader = made_private(method, model, optimizer, loader)
    used = sorted(list(_times(model, optimizer, loader, criterion))[WARM:])
    print(json.dumps({"cpu": used[len(used) // 2]}))


def _times(model: Any, optimizer: Any, loader: Any, criterion: Any) -> Iterator[float]:
    """Seconds of the processor for each batch."""
    start = time.process_time()
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y, criterion).backward()
        optimizer.step()
        now = time.process_time()
        yield now - start
        start = now


def loss_of(out: Tensor, y: Tensor, criterion: Any) -> Any:
    """The mean loss; Opacus's fast gradient clipping has a criterion of its own, of one loss for each example."""
    return losses(out, y).mean() if criterion is None else criterion(out, y)


def made_private(method: str, model: nn.Module, optimizer: Any, loader: Any) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, criterion (None: torch's) and loader of a method."""
    match method:
        case "ours" | "blt":
            model, optimizer, loader = _ours(model, optimizer, loader, method)
        case "hooks" | "ghost":
            return _opacus(model, optimizer, loader, method)
        case "bare":
            model, optimizer = _bare(model, optimizer)
    return model, optimizer, None, loader


def _as_it_is(batch: Any) -> Any:
    return batch


def _ours(model: nn.Module, optimizer: Any, loader: Any, method: str) -> tuple[Any, Any, Any]:
    import anyorder as ao
    from anyorder.strategy import BLT

    n = len(loader)
    strategy: Any = "independent" if method == "ours" else BLT([0.99, 0.9, 0.6, 0.2], [0.02, 0.05, 0.1, 0.1], n)
    plan = ao.plan(loader=loader, epochs=1, epsilon=8.0, delta=1e-5, mechanism=strategy)
    return ao.PrivacyEngine(plan).make_private(model, optimizer, loader)


def _bare(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    """The least that a private step does of Python's calls: one node of autograd, one call that clips, one of noise."""
    import os

    from anyorder.clipping import native
    from anyorder.noise import NoiseSource, NoiseStream
    from anyorder.strategy import Independent

    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    sizes = [p.numel() for p in parameters]
    stream = NoiseStream(Independent(10**6), NoiseSource(os.urandom(32)), 1.0, sum(sizes))
    root = torch.zeros((), requires_grad=True)
    sums: list[Tensor] = []
    rows = 1

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, root: Tensor, x: Tensor) -> Tensor:
            inputs = []
            for layer in layers:
                inputs.append(x)
                x = torch.addmm(layer.bias, x, layer.weight.t())
                x = x.relu() if layer is not layers[-1] else x
            ctx.save_for_backward(*inputs)
            return x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            nonlocal rows
            (g,) = gradients
            rows = len(g)
            sums[:] = torch.empty(sum(sizes)).split_with_sizes(sizes)
            parts: list[Any] = []
            for i, a in reversed([*enumerate(ctx.saved_tensors)]):
                parts += [(a, g, sums[2 * i].view(layers[i].weight.shape)), (None, g, sums[2 * i + 1])]
                g = torch.ops.aten.threshold_backward(g @ layers[i].weight, a, 0) if i else g
            native.clip(parts, float(rows), 1.0, 2.0**30)
            return None, None

    step = optimizer.step

    def noised() -> None:
        stream.add_to([sums[0]._base], 1 / rows)
        for p, own in zip(parameters, sums, strict=True):
            p.grad = own.view(p.shape)
        step()

    optimizer.step = noised
    return lambda x: Step.apply(root, x), optimizer


def _opacus(model: nn.Module, optimizer: Any, loader: Any, method: str) -> tuple[Any, Any, Any, Any]:
    from opacus import PrivacyEngine

    mode = {"grad_sample_mode": "ghost", "criterion": _Loss()} if method == "ghost" else {}
    made = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        poisson_sampling=False, **mode,
    )  # fmt: skip
    if method == "ghost":
        private, optimizer, criterion, loader = made
        return private, optimizer, criterion, loader
    private, optimizer, loader = made
    return private, optimizer, None, loader


class _Loss(nn.Module):
    """The loss of each example, or their mean, as Opacus asks for either."""

    reduction = "mean"

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        """(B,) or ()."""
        each = losses(out, y)
        return each.mean() if self.reduction == "mean" else each


if __name__ == "__main__":
    main()
